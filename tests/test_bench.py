"""Benchmarks: what they keep and do not repeat, which rows are held out, and small functions of theirs."""

import json
import sys
from types import SimpleNamespace

import pytest
from old import ROOT, load_script

# A program that writes into its OUTPUT_DIR, says how often it was started, and ends with the exit code of its
# first argument
PROGRAM = """
import pathlib, sys
folder = pathlib.Path(sys.argv[-2].removeprefix("OUTPUT_DIR="))
assert sys.argv[-1] == "RESUME=no"
(folder / "best").mkdir(parents=True, exist_ok=True)
with open(folder.parent / "starts", "a") as file:
    file.write("x")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def folder_of_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")


# ---------------------------------------------------------------- what is kept


def test_a_folder_has_its_name_when_its_run_has_ended(tmp_path):
    kept = load_script("bench/kept.py")
    folder = tmp_path / "sft_dpo_0.1_1"
    with pytest.raises(kept.subprocess.CalledProcessError):
        kept.run_once([sys.executable, "-S", "-c", PROGRAM, "130"], folder)
    assert not folder.exists() and (tmp_path / "sft_dpo_0.1_1_unfinished/best").is_dir()
    for _ in range(2):  # the second finds it
        kept.run_once([sys.executable, "-S", "-c", PROGRAM, "0"], folder)
    assert (folder / "best").is_dir() and not (tmp_path / "sft_dpo_0.1_1_unfinished").exists()
    assert (tmp_path / "starts").read_text() == "xx"


def test_results_of_other_words_are_refused(tmp_path):
    kept = load_script("bench/kept.py")
    path = tmp_path / "results.jsonl"
    assert kept.read_results(path, ["B=2", "A=1"]) == []
    kept.append_result(path, ["A=1", "B=2"], {"seed": 1})
    assert kept.read_results(path, ["A=1", "B=2"]) == [{"words": ["A=1", "B=2"], "seed": 1}]
    message = f"OUT={tmp_path} was made with A=1 B=2, not with no words: set another OUT"
    with pytest.raises(SystemExit, match=message):
        kept.read_results(path, [])
    path.write_text('{"seed": 1}\n')  # of an earlier version, which wrote no words
    with pytest.raises(SystemExit, match="was made with unknown words, not with A=1"):
        kept.read_results(path, ["A=1"])


def test_an_out_is_refused_before_anything_was_measured(tmp_path):
    """Lists and policies are kept from the start: they belong to its words, too."""
    kept = load_script("bench/kept.py")
    kept.read_results(tmp_path / "results.jsonl", ["SHOTS=2"])
    with pytest.raises(SystemExit, match="was made with SHOTS=2, not with no words"):
        kept.read_results(tmp_path / "results.jsonl", [])


@pytest.mark.parametrize("name", ["icl_rules", "icl_rewards"])
def test_without_a_seed_a_benchmark_shows_its_help(name, monkeypatch):
    words = ["MAX_STEPS=1"]
    if name == "icl_rules":
        words = ["topics", *words]
    bench = load_script(f"bench/{name}.py")
    monkeypatch.setattr(sys, "argv", [name, *words])
    arguments = [words] if name == "icl_rewards" else []
    with pytest.raises(SystemExit) as ended:
        bench.main(*arguments)
    assert ended.value.code == bench.__doc__


# ---------------------------------------------------------------- preferences_real.py


def test_no_held_out_sum_is_trained_on():
    bench = load_script("bench/preferences_real.py")
    parts = bench.sum_rows(1)
    counts = {name: len(rows) for name, rows in parts.items()}
    assert counts == {"demos": 320, "held_out": 64, "prompts": 400, "pairs": 960}
    sums = [row["chosen"].partition(" = ")[0] for rows in parts.values() for row in rows]
    assert len(set(sums)) == len(sums) == 1744
    prompts = [row["prompt"] for row in parts["held_out"]]
    assert {prompt.startswith("Tom") for prompt in prompts} == {True, False}
    for row in parts["pairs"]:
        assert row["chosen"].endswith(f"= {row['answer']}.") and not row["rejected"].endswith(
            f"= {row['answer']}."
        )


def test_without_gsm8ks_file_its_place_is_named(tmp_path, monkeypatch):
    bench = load_script("bench/preferences_real.py")
    monkeypatch.setattr(bench, "GSM8K", tmp_path / "example_model_solutions.jsonl")
    with pytest.raises(
        SystemExit, match="example_model_solutions.jsonl is missing: take .*openai/grade-school-math"
    ):
        bench.gsm8k(1)


# ---------------------------------------------------------------- others


def test_bench_icl_takes_over_the_constants_of_a_run(tmp_path):
    bench = load_script("bench/icl.py")
    constants = {"SHOTS": 2, "EVAL_SHOTS": [1, 2], "SAMPLE_TEMPERATURES": [0.5], "GONE": 1}
    constants |= {"OUTPUT_DIR": "x", "RESUME": "no", "STAGE": "train"}
    (tmp_path / "training_config.json").write_text(json.dumps({"constants": constants}))
    known = {**constants, "EVAL_SHOTS": (1, 2, 3, 4), "SEED": 1}
    del known["GONE"]
    script = SimpleNamespace(**known, constants=lambda: known)
    found = bench.constants_of_run(tmp_path, script)
    assert found == {"SHOTS": 2, "EVAL_SHOTS": (1, 2), "SAMPLE_TEMPERATURES": [0.5]}


def test_bench_icls_grpo_starts_from_the_last_policy_of_rce():
    bench = load_script("bench/icl.py")
    calls = []

    class Base:
        def __init__(self):
            self.run = SimpleNamespace(evaluation={"reward": 1.0}, save_best=calls.append)

        def begin_grpo(self):
            calls.append("begin")

    script = SimpleNamespace(ICLTrainer=Base, group_advantages=None)
    bench.make_trainer(script, ()).begin_grpo()
    assert calls == [{"reward": 1.0}, "begin"]


def test_answers_of_another_reader_are_not_reused():
    key = load_script("bench/icl_rules.py").answer_key
    constants = {"READER": "a", "DTYPE": "float32", "MAX_ANSWER_TOKENS": 8}
    known = key(SimpleNamespace(**constants), "question")
    assert key(SimpleNamespace(**constants), "question") == known
    for name, value in (("READER", "b"), ("DTYPE", "bfloat16"), ("MAX_ANSWER_TOKENS", 16)):
        assert key(SimpleNamespace(**{**constants, name: value}), "question") != known
    assert key(SimpleNamespace(**constants), "another question") != known


# ---------------------------------------------------------------- speed.py


@pytest.mark.parametrize("stage", ["sft", "reward_model", "dpo"])
def test_our_side_of_the_comparison_with_trl_measures_steps(stage, tmp_path, capsys):
    bench = load_script("bench/speed.py")
    data = str(tmp_path / "rows.jsonl")
    bench.write_preferences(data, stage, rows_per_step=2, steps=3)
    bench.measure("ours", stage, str(bench.TINY), data, size="1")
    *lines, result = capsys.readouterr().out.splitlines()
    assert sum("step 3/3" in line for line in lines) == 1
    measured = json.loads(result)
    assert measured["seconds"] > 0 and measured["peak memory"] > measured["beyond imports"] >= 0
