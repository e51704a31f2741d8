"""A trainer run as a user runs it, but begun in a moment: in a fork of a process that has imported torch and
transformers, which takes longer than most tests. It has a pid, may be killed, and ends with an exit code."""

import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

FORKS = multiprocessing.get_context("forkserver")
# Nothing of this repository. A fork is safe where no thread runs: one for OpenMP, and no torch operation yet
FORKS.set_forkserver_preload(
    """
    filelock matplotlib.figure pyarrow.parquet safetensors.torch sklearn.metrics torch torch.distributed.fsdp
    torch.distributed.tensor transformers
    transformers.generation.utils transformers.models.auto.modeling_auto
    transformers.models.auto.tokenization_auto transformers.models.llama.modeling_llama""".split()
)


def save_nothing(figure, path, **options):
    """In place of Figure.savefig: drawing is most of a short run."""
    Path(path).touch()


def draw_nothing(figure, *args, **options):
    """In place of Figure.add_subplot: axes that take everything. Theirs is a third of a short run."""
    return MagicMock()


def draw_no_pictures():
    """From here on pictures are empty files."""
    from matplotlib.figure import Figure

    Figure.savefig = save_nothing
    Figure.add_subplot = draw_nothing


def be_program(words, cwd, environment, outputs):
    """Turn this process into `python words[0] words[1] ...` whose pictures are empty files."""
    draw_no_pictures()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where the tests run under nohup it is ignored
    os.environ.update(environment)
    os.chdir(cwd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")


class Program:
    """Begun at once, without a terminal; merged: stderr goes where stdout goes."""

    def __init__(self, *words, cwd, environment=None, merged=False):
        self.folder = tempfile.TemporaryDirectory()
        outputs = [f"{self.folder.name}/{name}" for name in ("stdout", "stdout" if merged else "stderr")]
        values = {**os.environ, **(environment or {})}
        arguments = [str(word) for word in words], str(cwd), values, outputs
        self.process = FORKS.Process(target=be_program, args=arguments)
        self.process.start()

    def poll(self):
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.process.pid, number)

    def wait(self, seconds=240):
        """Exit code, stdout and stderr, as subprocess.run() gives them."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        paths = [Path(self.folder.name) / name for name in ("stdout", "stderr")]
        stdout, stderr = (path.read_text() if path.exists() else "" for path in paths)
        return SimpleNamespace(returncode=self.process.exitcode, stdout=stdout, stderr=stderr)


def run_program(*words, cwd, processes=1):
    """Runs a program to its end; several processes of it are begun as torchrun begins them. Returns what they
    wrote to stdout."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    variables["TORCHELASTIC_RUN_ID"] = "test"
    programs = []
    for rank in map(str, range(processes)):
        environment = {**variables, "RANK": rank, "LOCAL_RANK": rank} if processes > 1 else {}
        programs.append(Program(*words, cwd=cwd, environment=environment))
    ended = [program.wait() for program in programs]
    assert not any(done.returncode for done in ended), "".join(done.stderr[-2000:] for done in ended)
    return "".join(done.stdout for done in ended)
