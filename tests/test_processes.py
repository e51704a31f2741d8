"""Two processes sample what one samples, and make the same update up to rounding; also where they share all
weights, in examples/sharded.py."""

import shutil
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from conftest import ROOT, read, small, without_clock, words_of
from program import run_program

OPTIONS = {
    "ppo/ppo.py": {"BATCH_SIZE": 5, "MINI_BATCHES": 2, "MICRO_BATCH_ROWS": 3},  # shares of 2 and 3 prompts
    "grpo/grpo.py": {
        "BATCH_SIZE": 5,
        "KL_COEF": 0.1,
        "RESAMPLE_ZERO_VARIANCE_GROUPS": 1,
        "MICRO_BATCH_ROWS": 3,
    },
    "rce/rce.py": {"BATCH_SIZE": 5, "MICRO_BATCH_ROWS": 3},
    "ppo/sft.py": {"BATCH_SIZE": 3, "GRADIENT_ACCUMULATION_STEPS": 3, "ACCURACY_FUNCTION": "exact_answer"},
    "ppo/reward_model.py": {"BATCH_SIZE": 3, "GRADIENT_ACCUMULATION_STEPS": 3},
    "rce/dpo.py": {"BATCH_SIZE": 3, "GRADIENT_ACCUMULATION_STEPS": 3, "ACCURACY_FUNCTION": "exact_answer"},
}
SHARDED = {
    "grpo/grpo.py": {
        **{"BATCH_SIZE": 3, "MICRO_BATCH_ROWS": 5, "KL_COEF": 0.1},
        "REWARD_FUNCTIONS": [("length_penalty", 0.1)],
    },
    # Each update has one response, and so a filler for one process
    "ppo/ppo.py": {"BATCH_SIZE": 3, "GROUP_SIZE": 1, "MINI_BATCHES": 3, "GROUP_EPOCHS": 1},
    "ppo/sft.py": {"BATCH_SIZE": 1},
}


def run(path, folder, processes, sharded=False, **options):
    words = words_of(small(path, OUTPUT_DIR=folder, **options))
    command = [ROOT / "examples/sharded.py", path] if sharded else [ROOT / path]
    return run_program(*command, *words, cwd=ROOT, processes=processes)


def assert_equal_runs(one, two):
    metrics = (without_clock(folder / "logs/metrics.jsonl") for folder in (one, two))
    for a, b in zip(*metrics, strict=True):
        assert a.pop("phase") == b.pop("phase")
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    step = sorted(one.glob("step_*"))[-1].name
    for path in one.glob(f"{step}/[pr]*/model.safetensors"):  # not the critic's
        a, b = (safetensors.torch.load_file(folder / path.relative_to(one)) for folder in (one, two))
        assert a.keys() == b.keys()  # tied weights are saved once
        assert all(torch.allclose(a[name], b[name], atol=1e-5) for name in a)


@pytest.mark.parametrize("path", OPTIONS)
def test_two_processes_agree_with_one(tmp_path, path):
    run(path, tmp_path / "one", 1, **OPTIONS[path])
    shown = run(path, tmp_path / "two", 2, **OPTIONS[path])
    assert shown.count("step 1/") == 1  # one process alone writes
    first = []
    for name in ("one", "two"):
        records = [r for r in read(tmp_path / f"{name}/logs/samples.jsonl") if r["step"] == 1]
        first.append([{k: x for k, x in r.items() if not isinstance(x, float)} for r in records])
    assert first[0] == first[1] != []
    assert_equal_runs(tmp_path / "one", tmp_path / "two")


def test_torchrun_and_a_process_without_a_prompt(tmp_path):
    """With a reward model, too: the last step of an epoch and a short evaluation have fewer prompts."""
    options = {"BATCH_SIZE": 1, "MAX_STEPS": 1, "MAX_EVAL_PROMPTS": 1, "OUTPUT_DIR": tmp_path / "run"}
    launcher = "-m torch.distributed.run --nproc_per_node=2 --rdzv-endpoint=localhost:0 --rdzv-backend=c10d"
    words = words_of(small("ppo/ppo.py", **options))
    command = [sys.executable, *launcher.split(), "ppo/ppo.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert read(tmp_path / "run/logs/metrics.jsonl")[-1]["phase"] == "eval"


@pytest.mark.parametrize("path", SHARDED)
def test_a_sharded_run_is_that_of_one_process_and_goes_on_with_and_without_fsdp(tmp_path, path):
    one, sharded, mixed = (tmp_path / name for name in ("one", "sharded", "mixed"))
    options = {**SHARDED[path], "MAX_NEW_TOKENS": 16, "USE_LR_SCHEDULER": False, "RESUME": "yes"}
    options |= {"MAX_STEPS": 3, "MAX_EVAL_PROMPTS": 3}
    for name in ("MAX_NEW_TOKENS", "MAX_EVAL_PROMPTS") if path == "ppo/sft.py" else ():
        del options[name]
    run(path, one, 1, **options)
    run(path, sharded, 2, sharded=True, **{**options, "MAX_STEPS": 2})
    shutil.copytree(sharded, mixed)
    run(path, sharded, 2, sharded=True, **options)
    run(path, mixed, 1, **options)
    assert_equal_runs(one, sharded)
    assert_equal_runs(one, mixed)
