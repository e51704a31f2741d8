"""tools/show.py and tools/plot.py, which read a run; bench/; what whoever copies the repository needs."""

import ast
import json
import math
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, load, read

import rewards


def write(folder, *records, end="", name="samples.jsonl"):
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "logs" / name).write_text(lines + end)
    return folder


def message(program, capsys):
    """Returns the one line that a program printed before it ended with exit code 2."""
    with pytest.raises(SystemExit) as end:
        program()
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and len(err.splitlines()) == 1
    return err


# ---------------------------------------------------------------- show.py


def sample(step, reward, response):
    texts = {"prompt": "Tom has 1 apples.\nHow many?", "response": f"say {response}", "answer": None}
    return {"step": step, "id": f"a.jsonl:{response}", **texts, "reward": reward}


SAMPLES = [sample(1, 0.25, "a"), sample(1, -1.0, "b"), sample(2, 1.0, "c"), sample(2, 0.0, "d")]


@pytest.fixture
def show(capsys):
    """show(word, ...): what tools/show.py prints."""

    def run(*words):
        load("tools/show.py").main(*map(str, words))
        return capsys.readouterr().out

    return run


def responses(text):
    return "".join(re.findall(r"^    say (\w)$", text, re.MULTILINE))


def test_samples_are_printed(tmp_path):
    write(tmp_path / "run", SAMPLES[0])
    command = [sys.executable, "-I", ROOT / "tools/show.py", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    first = "step 1  id a.jsonl:a  reward 0.250\n"
    assert done.stdout == first + "prompt\n    Tom has 1 apples.\n    How many?\nresponse\n    say a\n\n"
    assert done.returncode == 0 and done.stderr == ""


def test_a_step_and_the_worst_or_best_can_be_asked_for(show, tmp_path):
    run = write(tmp_path / "lr=1e-4", *SAMPLES, {**SAMPLES[0], "reward": None, "response": "say e"})
    asked = {(): "abcde", ("STEP=2",): "cd", ("BY=worst",): "bdac", ("BY=best", "STEP=1"): "ab"}
    for words, wanted in asked.items():
        assert responses(show(run, *words)) == wanted
    write(run, *(sample(1, n, chr(97 + n)) for n in range(20)))
    assert responses(show(run, "BY=worst")) == "abcdefghij"
    assert show(write(run, {"step": 1, "read": "a\nb"})) == "step 1\nread\n    a\n    b\n\n"


def test_escapes_are_spelt_out_and_a_line_half_written_is_left_out(show, tmp_path):
    nasty = {**SAMPLES[2], "response": "say \033[2J\x07 5 \u202e", "id": "\033]0;x\x07"}
    text = show(write(tmp_path, nasty, end='{"step": 3, "pro'))
    assert "    say \\x1b[2J\\x07 5 \\u202e\n" in text and not {"\033", "\x07", "\u202e"} & set(text)


@pytest.mark.parametrize(
    "words, says",
    [
        (["none"], "there is no none/logs/samples.jsonl: it takes the OUTPUT_DIR of a run"),
        (["run", "STEP=9"], "run/logs/samples.jsonl has no such sample"),
        ([], "it takes a run's OUTPUT_DIR"),
        (["run", "STEP=x"], "and then, if wanted, STEP=n and BY=worst or BY=best"),
        (["run", "BY=reward"], "and then, if wanted, STEP=n and BY=worst or BY=best"),
        (["run", "run"], "and then, if wanted, STEP=n and BY=worst or BY=best"),
    ],
)
def test_what_cannot_be_shown_is_a_sentence(capsys, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run", *SAMPLES)
    assert says in message(lambda: load("tools/show.py").main(*words), capsys)


# ---------------------------------------------------------------- plot.py


def a_run(folder, *, steps=24, seed=0, **more):
    """A run's metrics: a reward that is its step and its seed, evaluated every 12 steps."""
    records = []
    for step in range(steps + 1):
        if step:
            both = {"reward": step + seed, "entropy": 1 / step, **more}
            records.append({"phase": "train", "step": step, **both})
        if step % 12 == 0:
            records.append({"phase": "eval", "step": step, "reward": -step - seed, "accuracy": step / 100})
    return write(folder, *records, name="metrics.jsonl", end='{"phase": "train", "step": 99, "rew')


@pytest.fixture
def plot(monkeypatch):
    """plot(word, ...): the figure that tools/plot.py draws."""

    def run(*words):
        drawn = []
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *of, **_: drawn.append(of))
        monkeypatch.setattr(sys, "argv", ["plot.py", *map(str, words)])
        load("tools/plot.py").main()
        return drawn[0][0]

    return run


def panels(figure):
    """{y label: its lines, each (colour, [(x, y), ...])}."""
    found = {}
    for axis in figure.axes:
        assert axis.get_xlabel() == "training step"
        found[axis.get_ylabel()] = [(line.get_color(), line.get_xydata().tolist()) for line in axis.lines]
    return found


def legend(figure):
    (of_figure,) = figure.legends
    return {x.get_text(): y.get_color() for x, y in zip(of_figure.texts, of_figure.legend_handles)}


def test_every_metric_of_a_run_is_drawn_as_far_as_it_goes(plot, tmp_path):
    run = a_run(tmp_path / "one", broken=None, clip_fraction=0.0, kl=math.nan, name="x")
    with open(run / "logs/metrics.jsonl", "a") as file:
        file.write('\n{"phase": "mine", "step": 0, "mined": 1.0}\n')
    figure = plot(run)
    drawn = panels(figure)
    assert set(drawn) == {"reward", "accuracy", "entropy (nats)", "mined"}  # clip_fraction is always 0
    assert drawn["mined"][0][1] == [[0, 1.0]]
    faint, rolling, held_out, start = drawn["reward"]
    assert faint[1] == [[step, step] for step in range(1, 25)]
    assert rolling[1] == [[1, 1], *([step, step - 0.5] for step in range(2, 25))]  # mean of 24 // 12
    assert held_out[1] == [[0, 0], [12, -12], [24, -24]]
    assert start[1] == [[0, 0], [1, 0]]  # over the whole width
    assert len(drawn["accuracy"]) == len(drawn["entropy (nats)"]) == 2
    assert [*legend(figure)][:3] == ["one", "training, each step", "training, mean of 2 steps"]


def test_several_runs_are_drawn_where_they_share_a_metric_each_in_its_colour(plot, tmp_path):
    one, two = a_run(tmp_path / "one", extra=1), a_run(tmp_path / "two", steps=36, seed=5, other=1)
    figure = plot(one, two)
    drawn = panels(figure)
    assert set(drawn) == {"reward", "accuracy", "entropy (nats)"}
    for name, first in (("one", 1), ("two", 6)):
        faint, rolling, *_ = [line for colour, line in drawn["reward"] if colour == legend(figure)[name]]
        assert faint[0] == [1, first] and rolling[3] == [4, first + 2]
    drawn = panels(plot(one, two, "--metrics", "extra,reward"))
    assert [*drawn] == ["extra", "reward"] and len(drawn["reward"]) == 8
    names = [*legend(plot(a_run(tmp_path / "a/run"), a_run(tmp_path / "b/run")))]
    assert names[:2] == [str(tmp_path / "a/run"), str(tmp_path / "b/run")]
    colours = legend(plot(*(a_run(tmp_path / f"seed_{n}", steps=1) for n in range(12)))).values()
    assert len({*map(str, colours)} - {"grey"}) == 12


@pytest.mark.parametrize(
    "words, says",
    [
        (["none"], "there is no none/logs/metrics.jsonl"),
        (["begun", "run"], "these runs share no metric that changes: name some by --metrics"),
        (["run", "--metrics", "reward,kl"], "--metrics: no run has kl; they have reward, accuracy, entropy"),
        (["run", "--out", "x.word"], "--out x.word: Format 'word' is not supported"),
        (["run", "--out", "none/x.png"], "--out none/x.png: "),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(capsys, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    a_run(tmp_path / "run")
    write(tmp_path / "begun", name="metrics.jsonl", end='{"phase": "ev')
    monkeypatch.setattr(sys, "argv", ["plot.py", *words])
    assert says in message(load("tools/plot.py").main, capsys)


# ---------------------------------------------------------------- what anyone who copies the repository needs


def packages(path):
    """Returns {package: what stands behind its name} of a file of requirements."""
    lines = [line for line in (ROOT / path).read_text().splitlines() if line and not line.startswith("#")]
    return dict(re.fullmatch(r"([\w-]+)([=<>].+)", line.replace("-", "_")).groups() for line in lines)


def imported_packages(paths):
    names = {"sklearn": "scikit_learn", "PIL": "pillow", "safetensors": "transformers"}
    names["tokenizers"] = "transformers"
    imported = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.partition(".")[0])
    ours = {path.stem for path in ROOT.glob("*/*.py")} | {"rewards"}
    return {names.get(name, name) for name in imported - ours - set(sys.stdlib_module_names)}


def test_requirements_have_what_the_trainers_import_and_the_tested_versions_what_anything_imports():
    names = "ppo/ppo ppo/sft ppo/reward_model grpo/grpo rce/rce rce/dpo rewards/__init__".split()
    trainers = [ROOT / f"{name}.py" for name in names]
    ranges, tested = packages("requirements.txt"), packages("requirements-dev.txt")
    assert imported_packages(trainers) == ranges.keys()
    folders = ("ppo", "grpo", "rce", "rewards", "tools", "data")
    everything = [path for folder in folders for path in (ROOT / folder).glob("*.py")]
    assert imported_packages(everything) <= tested.keys()
    for name, version in tested.items():
        assert version.startswith("==")
        lowest = re.match(r">=([\d.]+)", ranges.get(name, ">=0"))[1]
        assert [*map(int, lowest.split("."))] <= [*map(int, version[2:].split("."))]


def test_git_keeps_the_page_of_the_checkpoints_and_nothing_else_of_them(tmp_path):
    shutil.copy(ROOT / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    for name in ("checkpoints/README.md", "checkpoints/ppo/README.md", "checkpoints/run.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("")
    command = ["git", "-C", tmp_path, "ls-files", "--others", "--exclude-standard", "checkpoints"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "checkpoints/README.md\n"
    assert (ROOT / "checkpoints/README.md").is_file()


def test_the_shipped_data_is_small_and_its_answers_parse():
    tiny = ROOT / "data/tiny"
    assert sum(p.stat().st_size for p in tiny.rglob("*") if p.is_file()) < 8_000_000
    for name in ("train.jsonl", "test.jsonl"):
        golds = [row["solution"] for row in read(tiny / name)]
        assert rewards.exact_answer(golds, golds, golds) == [1.0] * len(golds)
    train, test = ({row["problem"] for row in read(tiny / f"{name}.jsonl")} for name in ("train", "test"))
    assert not train & test
