"""Two processes sample what one samples, and make the same update up to rounding."""

import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from conftest import ROOT, read, small, without_clock

OPTIONS = {
    "ppo/ppo.py": {"BATCH_SIZE": 5, "MINI_BATCHES": 2, "MICRO_BATCH_ROWS": 3},  # shares of 2 and 3 prompts
    "grpo/grpo.py": {"BATCH_SIZE": 5, "KL_COEF": 0.1, "RESAMPLE_FLAT_GROUPS": 1, "MICRO_BATCH_ROWS": 3},
    "rce/rce.py": {"BATCH_SIZE": 5, "MICRO_BATCH_ROWS": 3},
    "ppo/sft.py": {"BATCH_SIZE": 3, "GRADIENT_ACCUMULATION_STEPS": 3, "ACCURACY_FUNCTION": "exact_answer"},
    "ppo/reward_model.py": {"BATCH_SIZE": 3, "GRADIENT_ACCUMULATION_STEPS": 3},
    "rce/dpo.py": {"BATCH_SIZE": 3, "GRADIENT_ACCUMULATION_STEPS": 3, "ACCURACY_FUNCTION": "exact_answer"},
}


def run(path, folder, processes, **options):
    words = [f"{key}={value}" for key, value in small(path, OUTPUT_DIR=folder, **options).items()]
    command = [sys.executable, path, *words]
    if processes > 1:
        launcher = [
            "-m",
            "torch.distributed.run",
            f"--nproc_per_node={processes}",
            "--rdzv-endpoint=localhost:0",
        ]
        command = [sys.executable, *launcher, "--rdzv-backend=c10d", path, *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ), timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def weights(folder):
    (file,) = sorted(folder.glob("step_*"))[-1].glob("[pr]*/model.safetensors")  # not the critic's
    return safetensors.torch.load_file(file)


@pytest.mark.parametrize("path", OPTIONS)
def test_two_processes_agree_with_one(tmp_path, path):
    run(path, tmp_path / "one", 1, **OPTIONS[path])
    shown = run(path, tmp_path / "two", 2, **OPTIONS[path])
    assert shown.count("step 1/") == 1  # one process alone writes
    one, two = (read(tmp_path / f"{name}/logs/samples.jsonl") for name in ("one", "two"))
    first = [[record for record in records if record["step"] == 1] for records in (one, two)]
    for a, b in zip(*first):
        assert a.keys() == b.keys()
        assert {k: x for k, x in a.items() if not isinstance(x, float)} == {
            k: x for k, x in b.items() if not isinstance(x, float)
        }
    one, two = (without_clock(tmp_path / f"{name}/logs/metrics.jsonl") for name in ("one", "two"))
    assert len(one) == len(two)
    for a, b in zip(one, two):
        assert a.pop("phase") == b.pop("phase")
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


def test_a_process_without_a_prompt_takes_part(tmp_path):
    """With a reward model, too: the last step of an epoch and a short evaluation have fewer prompts."""
    run("ppo/ppo.py", tmp_path / "run", 2, BATCH_SIZE=1, MAX_STEPS=1, MAX_EVAL_PROMPTS=1)
    assert read(tmp_path / "run/logs/metrics.jsonl")[-1]["phase"] == "eval"
