"""A run that is killed at any moment and started again ends with the bytes of one that was not."""

import random
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import ROOT, TRAINERS, small, without_clock
from program import Program

RUNS = {
    "ppo/ppo.py": {
        "plain, mini-batches, a KL target": {"MINI_BATCHES": 2, "KL_TARGET": 0.01, "MAX_STEPS": 6},
        "lora and a schedule": {"LORA_RANK": 4, "USE_LR_SCHEDULER": True, "WARMUP_STEPS": 2, "MAX_STEPS": 4},
    },
    "grpo/grpo.py": {
        "a moving reference, resampling, plateau": {
            "KL_COEF": 0.1,
            "REFERENCE_SYNC_STEPS": 2,
            "RESAMPLE_FLAT_GROUPS": 1,
            "USE_LR_SCHEDULER": True,
            "LR_SCHEDULER_TYPE": "plateau",
            "MAX_STEPS": 6,
        },
        "lora": {"LORA_RANK": 4, "KL_COEF": 0.1, "MAX_STEPS": 4},
    },
    "rce/rce.py": {
        "two rounds": {"ROUNDS": 2, "NUM_EPOCHS": 2, "TAU_END": 0.5, "SAVE_EVERY_N_STEPS": 1},
        "lora": {"LORA_RANK": 4, "ROUNDS": 2, "VERIFY_TOP": 2},
    },
    "ppo/sft.py": {
        "two epochs, sampled answers": {"MAX_STEPS": 15, "ACCURACY_FUNCTION": "last_number"},
    },
    "ppo/reward_model.py": {"lora and a new head": {"LORA_RANK": 4, "MAX_STEPS": 10}},
    "rce/dpo.py": {"a reference that is read again": {"LEARNING_RATE": 1e-3, "MAX_STEPS": 10}},
}
CASES = [(path, name) for path in RUNS for name in RUNS[path]]


def start(path, folder, options):
    words = small(path, **{**options, "OUTPUT_DIR": folder, "RESUME": "yes"})
    return Program(ROOT / path, *(f"{key}={value}" for key, value in words.items()), cwd=ROOT)


def finish(path, folder, options):
    done = start(path, folder, options).wait()
    assert done.returncode == 0, done.stderr


def assert_equal_runs(one, two):
    """Weights, samples and candidates byte for byte, metrics but for the clock."""
    assert without_clock(one / "logs/metrics.jsonl") == without_clock(two / "logs/metrics.jsonl")
    patterns = (
        "logs/samples.jsonl",
        "best/*/*.safetensors",
        "step_*/*/*.safetensors",
        "candidates*.parquet",
    )
    for pattern in patterns:
        names = [sorted(str(p.relative_to(folder)) for p in folder.glob(pattern)) for folder in (one, two)]
        assert names[0] == names[1] and (names[0] or "candidates" in pattern)
        for name in names[0]:
            assert (one / name).read_bytes() == (two / name).read_bytes(), name


@pytest.mark.parametrize("path, name", CASES)
def test_a_killed_run_ends_with_the_same_bytes(tmp_path, path, name):
    options = RUNS[path][name]
    started = time.time()
    finish(path, tmp_path / "whole", options)
    seconds = time.time() - started
    moments = random.Random(name)
    for _ in range(2):
        program = start(path, tmp_path / "killed", options)
        time.sleep(seconds * moments.uniform(0.2, 0.7))
        with suppress(ProcessLookupError):  # it has ended
            program.send_signal(9)
        program.wait()
    finish(path, tmp_path / "killed", options)
    assert_equal_runs(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("path", TRAINERS)
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(make, tmp_path, path):
    """Half a folder has another name, and is written again."""
    trainer = make(path)
    trainer.train()
    last = f"step_{trainer.state.step}"
    half = tmp_path / "run/step_9.tmp"
    half.mkdir()
    (half / "training_state.pt").write_bytes(b"half")
    assert trainer.module.list_checkpoints(tmp_path / "run")[-1].name == last
    with pytest.raises(RuntimeError), trainer.module.atomic_folder(tmp_path / "run/step_9") as folder:
        (Path(folder) / "policy").write_text("half")
        raise RuntimeError("the power fails")
    assert not (tmp_path / "run/step_9").exists()


@pytest.mark.parametrize("path", ["ppo/ppo.py", "grpo/grpo.py"])
def test_an_earlier_checkpoint_and_another_folder_can_be_continued(make, tmp_path, path):
    make(path, MAX_STEPS=4).train()
    make(path, MAX_STEPS=4, OUTPUT_DIR=str(tmp_path / "other"), RESUME=str(tmp_path / "run/step_2")).train()
    for step in (4,):
        one, two = (
            tmp_path / f"{folder}/step_{step}/policy/model.safetensors" for folder in ("run", "other")
        )
        assert one.read_bytes() == two.read_bytes()
    make(path, MAX_STEPS=4, RESUME=str(tmp_path / "run/step_2")).train()
    metrics = without_clock(tmp_path / "run/logs/metrics.jsonl")
    assert [r["step"] for r in metrics if r["phase"] == "train"] == [1, 2, 3, 4]
    (old,) = tmp_path.glob("run_old_*")
    assert sorted(p.name for p in old.iterdir()) == ["best", "step_4"]  # the abandoned branch's
    assert (tmp_path / "run/best/policy/model.safetensors").exists()
    assert (tmp_path / "other/best/policy/model.safetensors").exists()
    assert (old / "step_4/policy/model.safetensors").read_bytes() == one.read_bytes()
    assert (tmp_path / "run/step_4/policy/model.safetensors").read_bytes() == one.read_bytes()


def test_constants_that_change_at_a_restart_count(make):
    make("grpo/grpo.py").train()
    again = make("grpo/grpo.py", RESUME="yes", WEIGHT_DECAY=0.5, LEARNING_RATE=5e-5, MAX_STEPS=3)
    (group,) = again.optimizers["policy"].param_groups
    assert group["weight_decay"] == 0.5 and len(again.optimizers["policy"].state) > 0
    again.train()
    assert group["lr"] == 5e-5


def test_an_adapter_of_another_rank_is_refused(make):
    make("grpo/grpo.py", LORA_RANK=4).train()
    with pytest.raises(ValueError, match="RESUME=.*step_2 cannot be loaded"):
        make("grpo/grpo.py", LORA_RANK=8, RESUME="yes")
