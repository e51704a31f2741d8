"""Benchmarks: what they measure of our side."""

import json

import pytest
from conftest import load


@pytest.mark.parametrize("stage", ["grpo", "sft", "reward_model", "dpo"])
def test_our_side_of_the_comparison_with_trl_measures_steps(stage, tmp_path, capsys):
    speed = load("bench/speed.py")
    data = str(tmp_path / "rows.jsonl")
    speed.write_rows(data, stage, rows_per_step=2, steps=3)
    sizes = (
        {"micro": 8, "parts": 2, "prompts": 2, "tokens": 8} if stage == "grpo" else {"micro": 1, "parts": 2}
    )
    speed.measure("ours", stage, str(speed.TINY), data, json.dumps({"prompts": 2, **sizes}))
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert measured["seconds"] > 0 and measured["peak memory"] > measured["beyond imports"] >= 0


def test_no_pair_of_numbers_of_the_sums_is_in_two_parts_or_in_an_example():
    real = load("bench/real.py")
    parts = {name: set(map(frozenset, pairs)) for name, pairs in real.split_pairs().items()}
    assert {name: len(pairs) for name, pairs in parts.items()} == real.SPLITS
    assert len(set.union(*parts.values(), map(frozenset, real.EXAMPLES))) == sum(real.SPLITS.values()) + 8
