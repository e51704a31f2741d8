"""Benchmarks: what they keep and do not repeat, which rows are held out, and small functions of theirs."""

import json
import sys

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
