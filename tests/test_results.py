"""docs/results.json and tools/results.py, and what the trainers' pictures show."""

import json
import sys

import pytest
from conftest import ROOT, load_script
from matplotlib.figure import Figure


@pytest.fixture
def results(monkeypatch, tmp_path):
    """tools/results.py on a folder with a README, a page and no records yet."""
    module = load_script("tools/results.py")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "docs/results.json")
    (tmp_path / "docs/lab").mkdir(parents=True)
    (tmp_path / "README.md").write_text("PPO reaches <!--r:ppo.sampled.50 0-->93%<!--/r--> here.\n")
    page = (
        "<!--r:ppo.sampled.50-->1%<!--/r-->, <!--r:ppo.sampled.50 range-->2<!--/r-->, <!--r:loss-->3<!--/r-->"
    )
    (tmp_path / "docs/lab/ppo.md").write_text(f"one\n{page}\n")
    return module


def record(results, key, values, unit):
    known = {"commit": "abc", "machine": "CPU", "date": "2026-11-25"}
    results.record(key, values, unit, "SEED 1, 2", "python bench/x.py", path=results.RESULTS, **known)


def test_the_pages_show_the_figures_of_results_json(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["results.py", "--check"])
    load_script("tools/results.py").main()
    for known in json.loads((ROOT / "docs/results.json").read_text()):
        low, high = known["spread"]
        assert low <= known["value"] <= high and known["seeds"] and known["command"] and known["commit"]


def test_check_names_a_figure_that_differs_and_write_puts_it_in(results, monkeypatch, capsys, tmp_path):
    record(results, "ppo.sampled.50", [0.95, 0.93], "%")
    record(results, "loss", [0.5], "")
    monkeypatch.setattr(sys, "argv", ["results.py", "--check"])
    with pytest.raises(SystemExit, match="2"):
        results.main()
    out, err = capsys.readouterr()
    assert out.startswith("README.md:1: PPO reaches") and "docs/lab/ppo.md:2: <!--r" in out
    assert err == "results.py: 2 lines differ: put the figures in with python tools/results.py --write\n"
    monkeypatch.setattr(sys, "argv", ["results.py", "--write"])
    results.main()
    assert (tmp_path / "README.md").read_text() == "PPO reaches <!--r:ppo.sampled.50 0-->94%<!--/r--> here.\n"
    shown = (tmp_path / "docs/lab/ppo.md").read_text()
    assert ">94.0%<" in shown and ">93.0 to 95.0%<" in shown and ">0.500<" in shown
    monkeypatch.setattr(sys, "argv", ["results.py", "--check"])
    results.main()


@pytest.mark.parametrize(
    "text, says",
    [
        ("<!--r:none-->1<!--/r-->", "docs/results.json has no record none"),
        ("<!--r:loss-->1", "a mark <!--r:...--> is not closed by <!--/r--> in its line"),
    ],
)
def test_a_wrong_mark_is_named_with_its_page(results, monkeypatch, capsys, tmp_path, text, says):
    record(results, "ppo.sampled.50", [0.93], "%")
    record(results, "loss", [3.0], "")
    (tmp_path / "docs/other.md").write_text(text)
    monkeypatch.setattr(sys, "argv", ["results.py", "--write"])
    with pytest.raises(SystemExit):
        results.main()
    assert capsys.readouterr().err == f"results.py: docs/other.md: {says}\n"


def test_a_record_replaces_the_one_of_its_id(results):
    record(results, "b", [1.0], "s")
    record(results, "a", [1.0, 3.0], "s")
    record(results, "b", [2.0], "s")
    found = results.read_records(results.RESULTS)
    assert [(key, each["value"], each["spread"]) for key, each in found.items()] == [
        ("a", 2.0, [1.0, 3.0]),
        ("b", 2.0, [2.0, 2.0]),
    ]
    assert results.shown(found["a"], None) == "2 s" and results.shown(found["a"], "range") == "1 to 3 s"


# ---------------------------------------------------------------- the trainers' pictures


@pytest.fixture
def drawn(monkeypatch, drawing):
    """The figures that are saved."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


def draw(panels, tmp_path):
    script = load_script("rce/rce.py")
    script.write_atomically = lambda path, save: save(path)
    records = [{"phase": "mine", "step": 0, "mined": 3}, {"phase": "eval", "step": 0, "reward": 0.0}]
    for step in range(1, 25):
        records.append({"phase": "train", "step": step, "reward": step / 24, "kl": 0.0, "loss": step % 2})
    script.draw_plot(records, tmp_path / "x.png", "title", panels, {"train": "candidates", "eval": "policy"})


def test_a_picture_leaves_out_panels_in_which_nothing_changes(drawn, tmp_path):
    draw([("reward", ["reward"]), ("kl", ["kl"]), ("mined", ["mined"]), ("both", ["loss", "kl"])], tmp_path)
    assert [axis.get_ylabel() for axis in drawn[0].axes] == ["reward", "both"]


def test_the_legend_says_what_each_line_is(drawn, tmp_path):
    draw([("reward", ["reward"])], tmp_path)
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.texts] == [
        "candidates, each step",
        "candidates, mean over 1/12 of the steps",
        "policy",
        "policy, first evaluation",
    ]
    (axis,) = drawn[0].axes
    assert [text.get_text() for text in axis.get_legend().texts] == ["candidates", "policy"]
    faint, rolling = axis.lines[:2]
    assert rolling.get_ydata()[3] == pytest.approx(3.5 / 24)  # of steps 3 and 4
    assert faint.get_ydata()[3] == pytest.approx(4 / 24) and faint.get_alpha() < 1


@pytest.mark.parametrize("oracle", ["oracle", "oracle, 2 queries", None])
def test_the_picture_of_demonstrations_compares_the_policy_with_the_best_rule(drawn, tmp_path, oracle):
    script = load_script("rce/rce_icl.py")
    script.write_atomically = lambda path, save: save(path)
    shots = {}
    for number, knn in ((1, 0.6), (2, 0.8)):
        accuracy = {"random": 0.1, "similarity": 0.4, "kNN": knn, "classifier": 0.7, "RCE": 0.75}
        if oracle:
            accuracy[oracle] = 0.9
        gains = {name: [-0.01, 0.02] for name in ("random", "similarity", "kNN", "classifier")}
        shots[number] = {"accuracy": accuracy, "intervals_of_gains": gains}
    script.draw_results({"policy": "RCE", "shots": shots}, tmp_path / "x.png", "title")
    (axis,) = drawn[0].axes
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axis.containers}
    wanted = {"similarity": [0.4, 0.4], "best rule": [0.7, 0.8], "RCE": [0.75, 0.75]}
    assert heights == wanted | ({oracle: [0.9, 0.9]} if oracle else {})
    names = [text.get_text() for text in axis.get_xticklabels()]
    assert names[0] == "shots: 1\nbest rule: classifier\nRCE minus it: +5.0%\n(-1.0% to +2.0%)"
    assert names[1] == "shots: 2\nbest rule: kNN\nRCE minus it: -5.0%\n(-1.0% to +2.0%)"
