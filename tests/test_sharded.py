"""examples/sharded.py: two processes that share all weights train as one process does without FSDP2, and
their checkpoints go on with it and without it."""

import shutil
import socket

import pytest
import safetensors.torch
import torch
from conftest import ROOT, without_clock
from program import Program

OPTIONS = {
    "GRADIENT_ACCUMULATION_STEPS": 1,
    "MAX_NEW_TOKENS": 16,
    "EVAL_EVERY_N_STEPS": 2,
    "SAVE_EVERY_N_STEPS": 2,
    "USE_LR_SCHEDULER": False,
    "MAX_STEPS": 3,
    "RESUME": "yes",
}
SAMPLED = {**OPTIONS, "MAX_EVAL_PROMPTS": 3, "EVAL_SAMPLES": 2}
# Two processes get 12 responses in micro-batches of at most 5
GROUPS = {"BATCH_SIZE": 3, "GROUP_SIZE": 4, "MICRO_BATCH_ROWS": 5, "KL_COEF": 0.1}
RUNS = {
    "grpo/grpo.py": {**SAMPLED, **GROUPS, "REWARD_FUNCTIONS": [("length_penalty", 0.1)]},
    # Each update has one response, and so a filler for one process
    "ppo/ppo.py": {**SAMPLED, "BATCH_SIZE": 3, "GROUP_SIZE": 1, "MINI_BATCHES": 3, "GROUP_EPOCHS": 1},
    "ppo/sft.py": {**OPTIONS, "BATCH_SIZE": 1, "MAX_EVAL_ROWS": 3},
}


def words(folder, options):
    return [f"{key}={value}" for key, value in {**options, "OUTPUT_DIR": folder}.items()]


def run_alone(path, folder, **options):
    done = Program(ROOT / path, *words(folder, options), cwd=ROOT).wait()
    assert done.returncode == 0, done.stderr[-2000:]


def run_sharded(path, folder, **options):
    """Runs two processes as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    programs = []
    for rank in "01":
        environment = {**variables, "RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RUN_ID": "test"}
        command = (ROOT / "examples/sharded.py", path, *words(folder, options))
        programs.append(Program(*command, cwd=ROOT, environment=environment))
    for done in [program.wait() for program in programs]:
        assert done.returncode == 0, done.stderr[-2000:]


def assert_equal_runs(one, two):
    metrics = (without_clock(folder / "logs/metrics.jsonl") for folder in (one, two))
    for a, b in zip(*metrics, strict=True):
        assert a.pop("phase") == b.pop("phase")
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    for path in sorted(one.glob("step_3/*/model.safetensors")):
        a, b = (safetensors.torch.load_file(folder / path.relative_to(one)) for folder in (one, two))
        assert a.keys() == b.keys()  # tied weights are saved once
        assert all(torch.allclose(a[name], b[name], atol=1e-5) for name in a)


@pytest.mark.parametrize("path", RUNS)
def test_a_sharded_run_is_that_of_one_process_and_goes_on_with_and_without_fsdp(tmp_path, path):
    one, sharded, mixed = (tmp_path / name for name in ("one", "sharded", "mixed"))
    run_alone(path, one, **RUNS[path])
    run_sharded(path, sharded, **{**RUNS[path], "MAX_STEPS": 2})
    shutil.copytree(sharded, mixed)
    run_sharded(path, sharded, **RUNS[path])
    run_alone(path, mixed, **RUNS[path])
    assert_equal_runs(one, sharded)
    assert_equal_runs(one, mixed)
