"""Benchmarks: what they keep and do not repeat, which rows are held out, and small functions of theirs."""

import sys
from types import SimpleNamespace

import pytest
import torch
from old import ROOT, load_script
from transformers import PretrainedConfig

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


@pytest.mark.parametrize("name", ["icl", "rec_exploration"])
def test_without_a_seed_a_benchmark_shows_its_help(name, monkeypatch):
    words = ["MAX_STEPS=1"]
    bench = load_script(f"bench/{name}.py")
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(SystemExit) as ended:
        bench.main(words)
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


def test_sb3_reads_what_our_policy_reads():
    bench = load_script("bench/rag.py")
    script = load_script("ppo/ppo_rag.py")
    policy = script.Policy(PretrainedConfig(inputs=3, hidden_size=4, actions=[[1, 0.0, 0]]))
    policy.mean.copy_(torch.tensor([1.0, 2.0, 3.0]))
    policy.scale.copy_(torch.tensor([0.1, 1.0, 2.0]))
    read = []
    policy.first.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    table = SimpleNamespace(observations=torch.tensor([[9.0, 2.5, 3.0], [1.0, 0.0, -9.0]]))
    policy(table.observations)
    inputs = bench.network_inputs(SimpleNamespace(policy=policy, table=table))
    assert torch.equal(inputs, read[0]) and inputs.max() == 5 and inputs.min() == -5
    assert bench.split_words(["1", "MAX_STEPS=2", "3"]) == (["1", "3"], ["MAX_STEPS=2"])
