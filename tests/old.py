"""What the tests of rce/rce_icl.py share, which is not yet rewritten. It leaves with it."""

import importlib.util
import itertools
import json
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for bench/, which imports this file, too

import pytest
from matplotlib.figure import Figure
from program import Program, draw_nothing, save_nothing

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "data/tiny"
TRAINERS = []
# Two ways through a model in float32 (packed or row by row, padded or not, another processor) add the same
# hundreds of products in another order: 2**-23 of logits of some tens, over the layers, is some 1e-5 nats.
# A bug is 1e-2 or more.
NATS = 3e-4
sys.path.insert(0, str(ROOT))
_numbers = itertools.count()
_PICTURES = {name: getattr(Figure, name) for name in ("savefig", "add_subplot")}


def load_script(path, **constants):
    """A fresh copy of a trainer's module with some constants set."""
    spec = importlib.util.spec_from_file_location(f"script_{next(_numbers)}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for key, value in constants.items():
        assert key in module.constants(), key
        setattr(module, key, value)
    return module


@pytest.fixture(scope="module")
def no_pictures():
    """In the tests of this file pictures are empty files: drawing is most of a short run."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Figure, "savefig", save_nothing)
        patched.setattr(Figure, "add_subplot", draw_nothing)
        yield


@pytest.fixture
def drawing(monkeypatch):
    """In this test pictures are drawn."""
    for name, own in _PICTURES.items():
        monkeypatch.setattr(Figure, name, own)


@pytest.fixture
def started(monkeypatch, capsys):
    """started("rce/rce_icl.py", "KEY=value", ...): a trainer's exit code and what it says, without the
    seconds that a process takes to begin."""

    def run(path, *words):
        script = load_script(path)
        monkeypatch.setattr(sys, "argv", [path, *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            script.train_main()
        said = capsys.readouterr()
        return SimpleNamespace(returncode=end.value.code, stdout=said.out, stderr=said.err)

    return run


class Processes:
    """count programs that torchrun would have begun: `file` with words. As torchrun's agent does, this
    process holds their store."""

    def __init__(self, count, file, *words):
        import torch

        with socket.socket() as some:
            some.bind(("127.0.0.1", 0))
            port = some.getsockname()[1]
        common = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        self.store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        self.programs = []
        for rank in range(count):
            own = {key: str(value) for key, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
            self.programs.append(Program(file, *words, cwd=ROOT, environment=own if count > 1 else {}))

    def wait(self):
        return [program.wait() for program in self.programs]


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
