import importlib.util
import itertools
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure
from program import Program, draw_no_pictures

# Two tests run at a time (pytest.ini): threads of theirs would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "data/tiny"
TRAINERS = {"ppo/ppo.py": "PPOTrainer", "grpo/grpo.py": "GRPOTrainer", "rce/rce.py": "RCETrainer"}
sys.path.insert(0, str(ROOT))
_numbers = itertools.count()
_PICTURES = {name: getattr(Figure, name) for name in ("savefig", "add_subplot")}
draw_no_pictures()

# Two ways through a model in float32 (packed or row by row, padded or not, another processor) add the same
# hundreds of products in another order: 2**-23 of logits of some tens, over the layers, is some 1e-5 nats.
# A bug is 1e-2 or more.
NATS = 3e-4

SMALL = {
    "BATCH_SIZE": 4,
    "GRADIENT_ACCUMULATION_STEPS": 1,
    "GROUP_SIZE": 2,
    "MAX_TRAIN_PROMPTS": 24,
    "MAX_EVAL_PROMPTS": 4,
    "MAX_NEW_TOKENS": 32,
    "MAX_STEPS": 2,
    "EVAL_EVERY_N_STEPS": 0,
    "SAVE_EVERY_N_STEPS": 0,
    "REWARD_MODEL": None,
    "KL_COEF": 0.0,
}


def small(path, **constants):
    """SMALL, as far as the trainer has these constants, and `constants`."""
    left_out = {"KL_COEF"} if path == "rce/rce.py" else set()
    return {**{key: value for key, value in SMALL.items() if key not in left_out}, **constants}


def load_script(path, **constants):
    """A fresh copy of a trainer's module with some constants set."""
    spec = importlib.util.spec_from_file_location(f"script_{next(_numbers)}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for key, value in constants.items():
        assert key in module.constants(), key
        setattr(module, key, value)
    return module


def policy_with_two_ends(folder):
    """(The tiny policy in a folder, its generation config naming the end of a line beside EOS; their ids)."""
    shutil.copytree(TINY / "policy", folder)
    file = folder / "generation_config.json"
    ends = [3, 1]  # 3 is the end of a line
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": ends}))
    return str(folder), ends


def words_of(path, *words):
    """The words of a trainer's command line: SMALL, then these."""
    return [f"{key}={value}" for key, value in small(path).items()] + [str(word) for word in words]


def run_script(path, *words, **environment):
    """Run a trainer as a user does, without a terminal."""
    return Program(ROOT / path, *words_of(path, *words), cwd=ROOT, environment=environment).wait()


@pytest.fixture
def drawing(monkeypatch):
    """In this test pictures are drawn; in others they are empty files."""
    for name, own in _PICTURES.items():
        monkeypatch.setattr(Figure, name, own)


@pytest.fixture
def started(monkeypatch, capsys):
    """started("ppo/ppo.py", "KEY=value", ...): what run_script() gives, without the seconds that a process
    takes to begin; shrink=False leaves SMALL out."""

    def run(path, *words, shrink=True):
        script = load_script(path)
        monkeypatch.setattr(sys, "argv", [path, *(words_of(path, *words) if shrink else words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            script.train_main()
        said = capsys.readouterr()
        return SimpleNamespace(returncode=end.value.code, stdout=said.out, stderr=said.err)

    return run


def loader(path, tmp_path):
    """load(KEY=value, ...): a fresh module of a trainer with small constants, writing below tmp_path."""

    def load(**constants):
        return load_script(path, **{**small(path, OUTPUT_DIR=str(tmp_path / "run")), **constants})

    return load


def load_example(name, monkeypatch, **constants):
    """The module of examples/NAME.py over a fresh copy of the trainer that it imports. The constants are set
    where the example has not set them itself; OUTPUT_DIR always."""
    file = ROOT / f"examples/{name}.py"
    path = "ppo/ppo.py" if "\nimport ppo\n" in file.read_text() else "grpo/grpo.py"
    script = load_script(path)
    shipped = script.constants()
    monkeypatch.setitem(sys.modules, Path(path).stem, script)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location(f"example_{name}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    changed = [key for key, value in script.constants().items() if value != shipped[key]]
    for key, value in small(path).items():
        if key not in changed:
            setattr(script, key, value)
    for key, value in constants.items():
        assert key in shipped, key
        setattr(script, key, value)
    return module


@pytest.fixture
def example(tmp_path, monkeypatch):
    """example("judge", KEY=value, ...): examples/judge.py over a small trainer, writing below tmp_path."""

    def load(name, **constants):
        return load_example(name, monkeypatch, **{"OUTPUT_DIR": str(tmp_path / "run"), **constants})

    return load


@pytest.fixture
def ppo(tmp_path):
    """ppo(KEY=value, ...): ppo/ppo.py with small constants, writing below tmp_path."""
    return loader("ppo/ppo.py", tmp_path)


@pytest.fixture
def grpo(tmp_path):
    return loader("grpo/grpo.py", tmp_path)


@pytest.fixture
def rce(tmp_path):
    return loader("rce/rce.py", tmp_path)


@pytest.fixture(params=TRAINERS, ids=["ppo", "grpo", "rce"])
def each(request, tmp_path):
    """each(KEY=value, ...): module and class of each trainer in turn, small, writing below tmp_path."""
    load = loader(request.param, tmp_path)

    def make(**constants):
        module = load(**constants)
        return module, getattr(module, TRAINERS[request.param])

    make.path = request.param
    return make


@pytest.fixture(params=TRAINERS, ids=["ppo", "grpo", "rce"])
def path(request):
    """The file of each trainer in turn."""
    return request.param


def reward_batch(prompts, responses, answers, **columns):
    """What score_responses() needs of a batch."""
    rows = [{"prompt": p, "answer": a, "columns": {}} for p, a in zip(prompts, answers)]
    import torch

    truncated = torch.zeros(len(rows))
    return SimpleNamespace(rows=rows, responses=responses, columns=columns, truncated=truncated)


def distance(got, want):
    """Euclidean distance in parts of want's length: small elements of a gradient are sums that cancel."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def share_prompts(module, model, decoding=None, scoring=None):
    """Switch the ways that read a prompt once for all its responses on or off, as check_models() does."""
    for models, on in ((module._SHARED_DECODING, decoding), (module._SHARED_SCORING, scoring)):
        if on is not None:
            (models.add if on else models.discard)(model)


# ---------------------------------------------------------------- what a run wrote


def read(path):
    """The objects of a .jsonl file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def untimed(path):
    """The records of metrics.jsonl without what the clock and a GPU's memory say."""
    measured = ("second", "gpu_memory")
    return [{k: v for k, v in record.items() if not any(m in k for m in measured)} for record in read(path)]


def walk(value, path=""):
    """(path, leaf) of everything in nested dicts and lists."""
    if isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from walk(item, f"{path}/{key}")
    else:
        yield path, value


def assert_same_state(a, b):
    """Two training_state.pt are equal to the bit."""
    import torch

    one, two = (dict(walk(torch.load(path, weights_only=True))) for path in (a, b))
    assert one.keys() == two.keys()
    for key, value in one.items():
        other = two[key]
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, key
