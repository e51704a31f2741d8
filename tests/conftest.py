"""What all tests share: one thread for each, no network, trainers as modules, and the fixtures of old.py."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

# Several tests run at a time (pytest.ini): threads of theirs would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "data/tiny"
TRAINERS = {"ppo/ppo.py": "PPOTrainer", "grpo/grpo.py": "GRPOTrainer", "rce/rce.py": "RCETrainer"}
sys.path.insert(0, str(ROOT))
pytest_plugins = ["old"]

SMALL = {  # a run of seconds; rce.py has the constants in its second part only
    "all": {
        "BATCH_SIZE": 4,
        "GRADIENT_ACCUMULATION_STEPS": 1,
        "GROUP_SIZE": 4,
        "MAX_NEW_TOKENS": 32,
        "MAX_EVAL_PROMPTS": 6,
        "EVAL_SAMPLES": 2,
        "EVAL_EVERY_N_STEPS": 2,
        "SAVE_EVERY_N_STEPS": 2,
        "RESUME": "no",
    },
    "ppo/ppo.py": {"MAX_STEPS": 2},
    "grpo/grpo.py": {"MAX_STEPS": 2},
    "rce/rce.py": {"MINE_PROMPTS": 12, "ROUNDS": 1, "NUM_EPOCHS": 1, "SAMPLE_TEMPERATURES": [1.0]},
}


def small(path, **constants):
    return {**SMALL["all"], **SMALL[path], **constants}


def load(path, **constants):
    """Returns a fresh module of a trainer with these constants."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in constants.items():
        assert name in module.constants(), name
        setattr(module, name, value)
    return module


@pytest.fixture
def make(tmp_path):
    """make("ppo/ppo.py", KEY=value) returns a small trainer, and its module as trainer.module. It draws no
    pictures, which take longer than its steps, unless draws=True."""

    def make_trainer(path, draws=False, **constants):
        constants = {"OUTPUT_DIR": str(tmp_path / "run"), **constants}
        module = load(path, **small(path, **constants))
        if not draws:
            module.draw_grid = lambda *arguments: None
        trainer = getattr(module, TRAINERS[path])()
        trainer.module = module
        return trainer

    return make_trainer


def read(path):
    """Returns the records of a .jsonl file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def without_clock(path):
    """Returns the records of metrics.jsonl without what a clock says."""
    return [{name: x for name, x in record.items() if "second" not in name} for record in read(path)]
