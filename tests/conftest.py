import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two tests run at a time (pytest.ini): threads of theirs would only wait for each other

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "data/tiny"
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network
sys.path.insert(0, str(ROOT))
_numbers = itertools.count()

# Two ways through a model in float32 (packed or row by row, padded or not, another processor) add the same
# hundreds of products in another order: 2**-23 of logits of some tens, over the layers, is some 1e-5 nats.
# A bug is 1e-2 or more.
NATS = 3e-4

SMALL = dict(BATCH_SIZE=4, GRADIENT_ACCUMULATION_STEPS=1, GROUP_SIZE=2, MAX_TRAIN_PROMPTS=24, MAX_EVAL_PROMPTS=4, MAX_NEW_TOKENS=32,
             MAX_STEPS=2, EVAL_EVERY_N_STEPS=0, SAVE_EVERY_N_STEPS=0, REWARD_MODEL=None, KL_COEF=0.0)


def load_script(path, **constants):
    """A fresh copy of a trainer's module with some constants set."""
    spec = importlib.util.spec_from_file_location(f"script_{next(_numbers)}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for key, value in constants.items():
        assert key in module.constants(), key
        setattr(module, key, value)
    return module


@pytest.fixture
def ppo(tmp_path):
    """ppo(KEY=value, ...): ppo/ppo.py with small constants, writing below tmp_path."""
    return lambda **constants: load_script("ppo/ppo.py", **{**SMALL, "OUTPUT_DIR": str(tmp_path / "run"), **constants})


TRAINERS = {"ppo/ppo.py": "PPOTrainer", "grpo/grpo.py": "GRPOTrainer", "rce/rce.py": "RCETrainer"}


@pytest.fixture(params=TRAINERS, ids=["ppo", "grpo", "rce"])
def each(request, tmp_path):
    """each(KEY=value, ...): module and class of each trainer in turn, small, writing below tmp_path."""
    def load(**constants):
        small = {key: value for key, value in SMALL.items() if key != "KL_COEF" or "rce" not in request.param}
        module = load_script(request.param, **{**small, "OUTPUT_DIR": str(tmp_path / "run"), **constants})
        return module, getattr(module, TRAINERS[request.param])
    return load


def distance(got, want):
    """Euclidean distance in parts of want's length: small elements of a gradient are sums that cancel."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def run_script(path, *words, cwd=ROOT, **options):
    """Run a trainer as a user does, without a terminal."""
    small = [f"{k}={v}" for k, v in SMALL.items()]
    return subprocess.run([sys.executable, str(ROOT / path), *small, *map(str, words)], cwd=cwd, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=240, **options)
