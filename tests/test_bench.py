"""Benchmarks: what they measure of our side."""

import json

import pytest
from conftest import load


# ---------------------------------------------------------------- speed.py


@pytest.mark.parametrize("stage", ["sft", "reward_model", "dpo"])
def test_our_side_of_the_comparison_with_trl_measures_steps(stage, tmp_path, capsys):
    bench = load("bench/speed.py")
    data = str(tmp_path / "rows.jsonl")
    bench.write_preferences(data, stage, rows_per_step=2, steps=3)
    bench.measure("ours", stage, str(bench.TINY), data, size="1")
    *lines, result = capsys.readouterr().out.splitlines()
    assert sum("step 3/3" in line for line in lines) == 1
    measured = json.loads(result)
    assert measured["seconds"] > 0 and measured["peak memory"] > measured["beyond imports"] >= 0
