"""The programs in tools/, which read a run's files: what the policy says, its metrics as a picture."""

import ast
import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, load, read
from matplotlib.colors import to_hex

import rewards

SAMPLES = [
    {
        "step": step,
        "id": f"a.jsonl:{n}",
        "prompt": f"Tom has {n} apples.\nHow many?",
        "response": f"say {step}.{n}",
        "answer": None,
        "truncated": False,
        "reward": reward,
        "reward/exact_answer": reward,
        "advantage": -0.5,
    }
    for step, n, reward in ((1, 1, 0.25), (1, 2, -1.0), (2, 3, 1.0), (2, 4, 0.0))
]


def write(folder, *records, end="", name="samples.jsonl"):
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "logs" / name).write_text(lines + end)
    return folder


def ended(program, capsys):
    """What a program printed that ended by itself with an exit code."""
    with pytest.raises(SystemExit) as end:
        program()
    said = capsys.readouterr()
    return SimpleNamespace(returncode=end.value.code, stdout=said.out, stderr=said.err)


@pytest.mark.parametrize("tool, others", [("show", set()), ("plot", {"matplotlib"})])
def test_a_tool_imports_nothing_of_ours(tool, others):
    names = set()
    for node in ast.walk(ast.parse((ROOT / f"tools/{tool}.py").read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    assert names - set(sys.stdlib_module_names) == others


# ---------------------------------------------------------------- show.py


@pytest.fixture
def show(capsys):
    """show(word, ...): what tools/show.py prints."""

    def run(*words):
        load("tools/show.py").main(*map(str, words))
        return capsys.readouterr().out

    return run


def responses(text):
    """The samples printed, by their responses, in order."""
    return [line.split()[1] for line in text.splitlines() if line.startswith("    say ")]


def test_samples_are_printed_and_nothing_is_written(tmp_path):
    run = write(tmp_path / "run", SAMPLES[0])
    command = [sys.executable, "-I", ROOT / "tools/show.py", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert (
        done.stdout
        == """\
step 1  id a.jsonl:1  truncated False  reward 0.250  reward/exact_answer 0.250  advantage -0.500
prompt
    Tom has 1 apples.
    How many?
response
    say 1.1

"""
    )
    assert sorted(str(file.relative_to(run)) for file in run.rglob("*")) == ["logs", "logs/samples.jsonl"]


def test_a_step_and_the_worst_or_best_can_be_asked_for(show, tmp_path):
    run = write(tmp_path / "lr=1e-4", *SAMPLES)
    assert responses(show(run)) == ["1.1", "1.2", "2.3", "2.4"]
    assert responses(show(run, "STEP=2")) == ["2.3", "2.4"]
    write(run, *SAMPLES, {**SAMPLES[0], "step": 3, "response": "say 3.1"})
    assert responses(show(run, "STEP=2")) == ["2.3", "2.4"]  # neither an earlier step nor a later one
    write(run, *SAMPLES)
    assert responses(show(run, "BY=worst")) == ["1.2", "2.4", "1.1", "2.3"]
    assert responses(show(run, "BY=best", "STEP=1")) == ["1.1", "1.2"]
    many = [{**SAMPLES[0], "response": f"say {n}", "reward": n} for n in range(30)]
    write(run, *many[15:], {**SAMPLES[0], "reward": None}, *many[:15])
    assert responses(show(run, "BY=best")) == [str(n) for n in range(29, 19, -1)]
    assert responses(show(run, "BY=worst")) == [str(n) for n in range(10)]
    assert len(responses(show(run))) == 31


def test_samples_without_a_reward_are_not_ordered_by_it(show, tmp_path, capsys):
    run = write(tmp_path / "run", {"step": 1, "query": "one\ntwo", "loss": 0.5})
    assert show(run) == "step 1  loss 0.500\nquery\n    one\n    two\n\n"
    main = load("tools/show.py").main
    with pytest.raises(SystemExit, match="2"):
        main(str(run), "BY=worst")
    assert "have no reward: leave BY out" in capsys.readouterr().err


def test_escapes_are_printed_safely_and_colours_at_a_terminal_alone(show, tmp_path, monkeypatch):
    nasty = {**SAMPLES[2], "response": "say \033[2J\x07 5 \u202e", "id": "\033]0;x\x07"}
    run = write(tmp_path, nasty)
    text = show(run)
    assert "\033" not in text and "\x07" not in text and "\u202e" not in text
    assert "    say \\x1b[2J\\x07 5 \\u202e\n" in text
    script = load("tools/show.py")
    assert script.show_sample(SAMPLES[2], False) == script.show_sample(SAMPLES[2], True).replace(
        "\033[1;32m", ""
    ).replace("\033[2m", "").replace("\033[0m", "")
    assert "\033[1;31m" in script.show_sample(SAMPLES[3], True)
    for terminal, no_colour, coloured in ((True, False, True), (True, True, False), (False, False, False)):
        monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
        monkeypatch.setattr("os.environ", {"NO_COLOR": "1"} if no_colour else {})
        assert ("\033[0m" in show(run)) == coloured


def test_a_run_in_progress_is_shown_as_far_as_it_goes(show, tmp_path):
    assert responses(show(write(tmp_path, *SAMPLES, end='{"step": 3, "pro'))) == ["1.1", "1.2", "2.3", "2.4"]


@pytest.mark.parametrize(
    "words, says",
    [
        (["{none}"], "there is no {none}/logs/samples.jsonl: it takes the OUTPUT_DIR of a run"),
        (["{run}", "STEP=9"], "{run}/logs/samples.jsonl has no such sample: its steps are 1 to 2"),
        (["{empty}"], "{empty}/logs/samples.jsonl has no such sample: it is empty"),
        ([], "it takes a run's OUTPUT_DIR"),
        (["{run}", "STEP=x"], "and then, if wanted, STEP=n and BY=worst or BY=best"),
        (["{run}", "BY=reward"], "and then, if wanted, STEP=n and BY=worst or BY=best"),
        (["{run}", "{run}"], "and then, if wanted, STEP=n and BY=worst or BY=best"),
    ],
)
def test_what_cannot_be_shown_is_a_sentence(capsys, tmp_path, words, says):
    folders = {"none": "none", "run": write(tmp_path / "run", *SAMPLES), "empty": write(tmp_path / "empty")}
    words = [word.format(**folders) for word in words]
    done = ended(lambda: load("tools/show.py").main(*words), capsys)
    assert done.returncode == 2 and done.stdout == ""
    assert says.format(**folders) in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_reader_that_has_seen_enough_ends_it_quietly(tmp_path, monkeypatch):
    run = write(tmp_path, *SAMPLES * 2000)
    end, written = os.pipe()
    os.close(end)
    with os.fdopen(written, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        load("tools/show.py").main(str(run))
        print("to nowhere", flush=True)


# ---------------------------------------------------------------- plot.py


def a_run(folder, *, steps=24, seed=0, **more):
    """A run's metrics: a reward that is its step and its seed, evaluated every 12 steps."""
    records = []
    for step in range(steps + 1):
        if step:
            records.append(
                {"phase": "train", "step": step, "reward": step + seed, "entropy": 1 / step, **more}
            )
        if step % 12 == 0:
            records.append({"phase": "eval", "step": step, "reward": -step - seed, "accuracy": step / 100})
    return write(folder, *records, name="metrics.jsonl", end='{"phase": "train", "step": 99, "rew')


@pytest.fixture
def plot(monkeypatch, capsys):
    """plot(word, ...): the figure that tools/plot.py draws, and the path it writes it to."""

    def run(*words):
        drawn = []
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *of, **_: drawn.append(of))
        monkeypatch.setattr(sys, "argv", ["plot.py", *map(str, words)])
        load("tools/plot.py").main()
        ((figure, path),) = drawn
        assert capsys.readouterr().out == f"{path}\n"
        return figure, path

    return run


STYLES = ["training, each step", "training, mean of 2 steps", "held out"]


def panels(figure):
    """{y label: its lines, each (colour, [(x, y), ...])}."""
    found = {}
    for axis in figure.axes:
        assert axis.get_xlabel() == "training step"
        found[axis.get_ylabel()] = [(line.get_color(), line.get_xydata().tolist()) for line in axis.lines]
    return found


def legend(figure):
    return {
        text.get_text(): handle.get_color()
        for text, handle in zip(figure.legends[0].texts, figure.legends[0].legend_handles)
    }


def test_every_metric_of_a_run_is_drawn_as_far_as_it_goes(plot, tmp_path):
    nan = float("nan")
    run = a_run(tmp_path / "one", broken=None, clip_fraction=0.0, **{"kl": nan, "name": "x"})
    write(run, {"phase": "mine", "step": 0, "mined": 1.0}, name="mined.jsonl")
    with open(run / "logs/metrics.jsonl", "a") as file:
        file.write("\n" + (run / "logs/mined.jsonl").read_text())
    figure, path = plot(run)
    assert path == "metrics.png"
    drawn = panels(figure)
    assert list(drawn) == ["reward", "accuracy", "entropy (nats)", "mined"]  # clip_fraction is always 0
    assert drawn["mined"][0][1] == [[0, 1.0]]
    faint, rolling, held_out, start = drawn["reward"]
    assert faint[1] == [[step, step] for step in range(1, 25)]
    assert rolling[1] == [[1, 1], *([step, step - 0.5] for step in range(2, 25))]  # mean of 24 // 12
    assert held_out[1] == [[0, 0], [12, -12], [24, -24]]
    assert start[1] == [[0, 0], [1, 0]]  # over the whole width
    assert len(drawn["accuracy"]) == len(drawn["entropy (nats)"]) == 2
    assert list(legend(figure)) == ["one", *STYLES, "held out, first evaluation"]


def test_numbers_that_are_not_finite_are_left_out_of_a_curve(plot, tmp_path):
    steps = range(1, 26)
    records = [{"phase": "train", "step": n, "kl": math.nan if n == 2 else n} for n in steps]
    figure, _ = plot(write(tmp_path / "one", *records, name="metrics.jsonl"))
    faint, rolling = panels(figure)["kl (nats)"]
    assert faint[1] == [[n, n] for n in steps if n != 2]
    assert rolling[1][:3] == [[1, 1], [3, 2], [4, 3.5]]


def test_several_runs_are_drawn_where_they_share_a_metric_each_in_its_colour(plot, tmp_path):
    one, two = a_run(tmp_path / "one", extra=1), a_run(tmp_path / "two", steps=36, seed=5, other=1)
    figure, _ = plot(one, two)
    drawn = panels(figure)
    assert list(drawn) == ["reward", "accuracy", "entropy (nats)"]
    named = legend(figure)
    assert list(named)[:4] == ["one", "two", "training, each step", "training, mean of 3 steps"]
    for name, first in (("one", 1), ("two", 6)):
        faint, rolling, _held_out, _start = [line for c, line in drawn["reward"] if c == named[name]]
        assert faint[0] == [1, first] and rolling[3] == [4, first + 2]
    figure, _ = plot(a_run(tmp_path / "a/run"), a_run(tmp_path / "b/run"))
    assert list(legend(figure))[:2] == [str(tmp_path / "a/run"), str(tmp_path / "b/run")]
    figure, _ = plot(*(a_run(tmp_path / f"seed_{n}") for n in range(12)))
    colours = {to_hex(colour) for colour in legend(figure).values()}
    assert len(colours - {to_hex("grey")}) == 12


def test_metrics_are_chosen_and_a_run_without_one_is_left_out_of_its_panel(plot, tmp_path):
    one, two = a_run(tmp_path / "one", extra=1), a_run(tmp_path / "two")
    figure, path = plot(one, two, "--metrics", "extra,reward", "--out", tmp_path / "x.svg")
    assert path == str(tmp_path / "x.svg")
    drawn = panels(figure)
    assert list(drawn) == ["extra", "reward"]
    assert {colour for colour, _ in drawn["extra"]} == {legend(figure)["one"]}
    assert len(drawn["reward"]) == 8


@pytest.mark.parametrize(
    "words, says",
    [
        (["none"], "there is no none/logs/metrics.jsonl"),
        (["begun", "run"], "begun/logs/metrics.jsonl holds no metric yet"),
        (
            ["run", "--metrics", "reward,kl"],
            "--metrics kl: no run has it; they have accuracy, entropy, reward",
        ),
        (["run", "apart"], "these runs share no metric that changes: name some by --metrics"),
        (["run", "--out", "x.word"], "--out x.word: Format 'word' is not supported"),
        (["run", "--out", "none/x.png"], "--out none/x.png: "),
        (["run", "--out", "noending"], "--out noending: it takes the name of a file with an ending"),
        (["run", "--out", "begun"], "--out begun: it takes the name of a file with an ending"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(capsys, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    a_run(tmp_path / "run")
    write(tmp_path / "begun", name="metrics.jsonl", end='{"phase": "ev')
    write(tmp_path / "apart", {"phase": "train", "step": 1, "other": 1}, name="metrics.jsonl")
    monkeypatch.setattr(sys, "argv", ["plot.py", *words])
    done = ended(load("tools/plot.py").main, capsys)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("plot.py: ") and says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_picture_is_written(tmp_path):
    a_run(tmp_path / "run")
    command = [sys.executable, ROOT / "tools/plot.py", "run", "--metrics", "reward", "--out", "x.png"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "x.png\n", done.stderr
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- pairs.py


def test_the_best_and_the_worst_candidate_of_a_prompt_are_a_pair(tmp_path, capsys):
    """Right before wrong, then by the grade; not what failed, was not verified or is all alike."""
    groups = {"a": [(0, 0.2), (1, 0.4), (1, 0.9), (0, 0.1), (None, None)], "b": [(1, 0.5), (1, 0.5)]}
    rows = []
    for name, facts in {**groups, "c": [(0, 0.3)]}.items():
        for i, (hard, soft) in enumerate(facts):
            record = {"prompt_id": name, "prompt": f"{name}?", "text": f"{name}{i}", "eval_failed": False}
            rows.append({**record, "hard": hard, "soft": soft})
    rows.append({**rows[0], "text": "failed", "hard": 0, "soft": -1.0, "eval_failed": True})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    load("tools/pairs.py").main([str(tmp_path / "c.parquet"), str(tmp_path / "pairs.jsonl")])
    (pair,) = read(tmp_path / "pairs.jsonl")
    assert pair == {"prompt": "a?", "chosen": "a2", "rejected": "a3", "margin": pytest.approx(1.8)}
    assert capsys.readouterr().out.startswith("1 pairs of 3 prompts")


# ---------------------------------------------------------------- bench/real.py


def test_the_trainers_take_what_bench_real_sets():
    real = load("bench/real.py")
    for path, words in real.RUNS.values():
        script = load(path)
        script.apply_overrides(words)
        script.check_constants()
    told = real.SHOWN.format(contexts="Ada: Ada Lovelace.", question="who?")
    assert told.endswith("Ada: Ada Lovelace.\nQUESTION: who?\nANSWER:")


def test_bench_reals_eight_intents_are_banking77s(tmp_path, monkeypatch):
    real = load("bench/real.py")
    (tmp_path / "data/real").mkdir(parents=True)
    shutil.copytree(ROOT / "data/banking77", tmp_path / "data/banking77")
    monkeypatch.setattr(real, "ROOT", tmp_path)
    real.make_intents()
    real.make_sums()
    for name in ("train", "test"):
        with open(tmp_path / f"data/real/banking_{name}.csv", newline="") as file:
            found = {row["category"] for row in csv.DictReader(file)}
        assert found == {intent.replace("_", " ") for intent in real.INTENTS}
    asked = [
        set((tmp_path / f"data/real/sums_{name}.jsonl").read_text().splitlines())
        for name in ("train", "test")
    ]
    assert [len(lines) for lines in asked] == [2000, 256] and not asked[0] & asked[1]
    for line in asked[1]:
        row = json.loads(line)
        numbers = [int(word) for word in re.findall(r"\d+", row["messages"][-1]["content"])]
        assert sum(numbers) == int(row["answer"])


def test_bench_reals_shop_has_40_items(tmp_path, monkeypatch):
    real = load("bench/real.py")
    monkeypatch.setattr(real, "SHOP", tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "make_rec", raising=False)  # its constants are changed
    real.make_shop()
    del sys.modules["make_rec"]
    assert len(json.loads((tmp_path / "index.json").read_text())) == 40
    for name, count in (("train", 1280), ("valid", 60), ("test", 200)):
        with open(tmp_path / f"{name}.csv", newline="") as file:
            lengths = [len(json.loads(row["history_item_id"])) for row in csv.DictReader(file)]
        assert len(lengths) == count and max(lengths) <= 5


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


def test_the_readme_names_the_licences():
    readme = (ROOT / "README.md").read_text()
    for name in re.findall(r"\((LICENSE|data/\S+LICENCE\.md)\)", readme):
        assert (ROOT / name).is_file()
    owner = "Copyright (c) 2026 the hackable-rlhf authors"
    assert (ROOT / "LICENSE").read_text().startswith(f"MIT License\n\n{owner}\n")
    assert "MIT licence ([LICENSE](LICENSE))" in readme and "(data/banking77/LICENCE.md)" in readme


@pytest.mark.parametrize("given", ["", "nowhere", "half"])
def test_banking77_is_not_cut_without_its_source(given, tmp_path):
    (tmp_path / "half").mkdir()
    (tmp_path / "half/train.csv").write_text("text,category\n")
    words = [f"SOURCE={given}"] if given else []
    command = [sys.executable, ROOT / "data/make_banking77.py", f"OUT={tmp_path}/out", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    says = f"SOURCE = {given!r} must be a folder with train.csv"
    assert done.returncode == 2 and done.stderr.startswith(f"make_banking77.py: {says}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words, says",
    [
        (["TRAIN_ROWS=3", "TEST_ROWS=1"], "train.csv has 2 rows, not 3: set TRAIN_ROWS and TEST_ROWS"),
        (["TRAIN_ROWS=x"], "TRAIN_ROWS=x: TRAIN_ROWS takes a whole number"),
        (
            ["TRAIN_ROWS=1", "TEST_ROWS=1"],
            "test.csv has the columns ['text', 'label'], not text and category",
        ),
        (["OUT={source}"], "the source would be overwritten"),
        (["ROWS=1"], "'ROWS=1' is not KEY=VALUE with a constant of this file"),
    ],
)
def test_banking77_is_left_as_it_is_until_its_source_is_good(words, says, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    for folder in (source, out):
        folder.mkdir()
    (source / "train.csv").write_text("text,category\na,b\nc,d\n")
    (source / "test.csv").write_text("text,label\na,b\n")
    (out / "train.csv").write_text("mine")
    words = [word.format(source=source) for word in words]
    command = [sys.executable, ROOT / "data/make_banking77.py", f"SOURCE={source}", f"OUT={out}", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1
    assert (out / "train.csv").read_text() == "mine" and (source / "train.csv").read_text().startswith("text")


def test_the_shipped_data_is_small_and_its_answers_parse():
    tiny = ROOT / "data/tiny"
    assert sum(p.stat().st_size for p in tiny.rglob("*") if p.is_file()) < 8_000_000
    for name in ("train.jsonl", "test.jsonl"):
        golds = [row["solution"] for row in read(tiny / name)]
        assert rewards.exact_answer(golds, golds, golds) == [1.0] * len(golds)
    train, test = ({row["problem"] for row in read(tiny / f"{name}.jsonl")} for name in ("train", "test"))
    assert not train & test
