"""Kill, corrupt and starve a trainer, and see whether anything is lost: a resumed run must equal an unbroken
one.

    python tests/chaos.py ppo/ppo.py grpo/grpo.py rce/rce.py   # everything: the table of its results
    python tests/chaos.py grpo/grpo.py --kills 50              # SIGKILL at 50 random moments, and the rest
    python tests/chaos.py grpo/grpo.py --only kill,rewards --quick   # a few of each of these
    python tests/chaos.py ppo/ppo.py --processes 2             # begun by torchrun: kills of one, of all
    python tests/chaos.py ppo/ppo.py LORA_RANK=4 KL_COEF=0.05  # with these constants

A run is a fork of this process, which has imported the libraries already, so it starts in a moment; the
trainer's file is run as `python trainer.py KEY=VALUE ...` runs it, without a terminal. Faults are hooks in
that fork (sys.addaudithook sees each file operation, a wrapper spoils the logits); the trainer knows nothing
of them. "Lost" is: a hang, another exit code than is documented, a traceback (but a reward function's own,
with exit code 1), or a final checkpoint, metrics.jsonl (timing aside), samples.jsonl, best/ or candidates
that differ from the unbroken run's by a byte. Every fault that loses something is printed with what it lost;
exit code 1 then. With --processes N runs are begun by torchrun, resumed by it or as one process, and must
equal an unbroken run of one process; a process that is left over is lost, too.
"""

import argparse
import collections
import concurrent.futures
import errno
import hashlib
import importlib.util
import itertools
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
import filelock  # noqa: F401
import matplotlib.backends.backend_agg  # noqa: F401
import pyarrow.parquet  # noqa: F401
import torch
from transformers import (  # noqa: F401
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from transformers.models.llama import modeling_llama
import contextlib

ROOT = Path(__file__).resolve().parents[1]
SMALL = dict(
    BATCH_SIZE=4,
    GRADIENT_ACCUMULATION_STEPS=1,
    GROUP_SIZE=4,
    MAX_TRAIN_PROMPTS=24,
    MAX_EVAL_PROMPTS=4,
    MAX_NEW_TOKENS=24,
    SAVE_EVERY_N_STEPS=2,
    EVAL_EVERY_N_STEPS=3,
    MAX_STEPS=4,
    REWARD_FUNCTIONS="[('exact_answer', 1.0), ('rouge_l', 0.0)]",
)
MORE = {
    "ppo.py": dict(REWARD_MODEL=f"{ROOT}/data/tiny/reward_model"),
    "grpo.py": dict(EVAL_SAMPLES=2),
    "rce.py": dict(
        EVAL_SAMPLES=2,
        MINE_PROMPTS=9,
        ROUNDS=2,
        NUM_EPOCHS=1,
        BEAMS=0,
        SAMPLE_TEMPERATURES="[1.0]",
        REWARD_MODE="hard_plus_soft",
        VALIDATION_FRACTION=0.1,
    ),
}
ALONE = {  # trainers of other things than language models have constants of their own
    "ppo_rag.py": dict(
        SAMPLE=48,
        VALIDATION_QUESTIONS=8,
        TEST_QUESTIONS=16,
        TOP_KS="(1, 2)",
        TEMPERATURES="(0.0, 1.0)",
        FIXED_ACTION="(2, 1.0, 0)",
        RERANK_DEPTH=4,
        QUESTIONS_AT_ONCE=8,
        N_STEPS=32,
        BATCH_SIZE=16,
        SAVE_EVERY_N_STEPS=2,
        EVAL_EVERY_N_STEPS=3,
        MAX_STEPS=6,
    ),
    "grpo_rec.py": dict(
        MAX_TRAIN_ROWS=24,
        MAX_EVAL_ROWS=8,
        TEST_FILE=f"{ROOT}/data/rec/valid.csv",
        SFT_EPOCHS=1,
        SFT_BATCH_SIZE=8,
        BATCH_SIZE=4,
        GROUP_SIZE=4,
        EVAL_BEAMS=20,
        RANKING_WEIGHT=0.5,
        MINI_BATCHES=2,
        SAVE_EVERY_N_STEPS=2,
        EVAL_EVERY_N_STEPS=3,
        MAX_STEPS=4,
    ),
    "rce_icl.py": dict(
        TEST_QUERIES=10,
        VALIDATION_QUERIES=10,
        MINE_QUERIES=40,
        EMBEDDING_SIZE=16,
        POOL_SIZE=32,
        RANDOM=16,
        LOCAL=8,
        MINE_BATCH_SIZE=10,
        HIDDEN_SIZE=16,
        BATCH_SIZE=10,
        RCE_EPOCHS=1,
        GRPO_EPOCHS=1,
        EVAL_SHOTS="(2,)",
        SAVE_EVERY_N_STEPS=2,
        EVAL_EVERY_N_STEPS=3,
    ),
}
GIVEN = {}  # constants of the command line
LIMIT = 240  # seconds after which a run counts as hanging


# ---------------------------------------------------------------- running a trainer


def words_of(script, folder, constants):
    """KEY=VALUE words of a small run in the folder."""
    name = Path(script).name
    own = ALONE[name] if name in ALONE else {**SMALL, **MORE[name]}
    if name == "ppo_rag.py":
        own = {**own, "CACHE_DIR": f"{folder}/cache"}
    constants = {**own, **GIVEN, "OUTPUT_DIR": folder, **constants}
    return [f"{key}={value}" for key, value in constants.items()]


def weights_in(folder):
    """A model's file of weights, or its adapter's."""
    return next(Path(folder).glob("*model.safetensors"))


class Run:
    """One start of a trainer: pid, what it printed, how it ended."""

    def __init__(self, script, folder, arm=None, **constants):
        words = words_of(script, folder, constants)
        self.log = tempfile.TemporaryFile()
        with _forking:
            self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(self.log.fileno(), 1)
                os.dup2(self.log.fileno(), 2)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                sys.argv = [str(ROOT / script), *words]
                torch.set_num_threads(1)
                if arm:
                    arm()
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            except BaseException as error:
                frames = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
                # while importing: Python's own way of ending
                if isinstance(error, KeyboardInterrupt) and "run_main" not in frames:
                    code = 130
                else:
                    traceback.print_exc()
            finally:
                try:
                    sys.stdout.flush(), sys.stderr.flush()
                finally:
                    os._exit(code)
        self.started = time.time()

    def alive(self):
        if not hasattr(self, "code"):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return not hasattr(self, "code")

    def wait(self, limit=LIMIT):
        while self.alive() and time.time() - self.started < limit:
            time.sleep(0.01)
        if self.alive():
            self.kill(signal.SIGKILL)
            self.wait(limit + 60)
            self.code = "hang"
        return self

    def kill(self, number):
        if self.alive():
            os.kill(self.pid, number)

    @property
    def said(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def trouble(self, *codes):
        """What is wrong with how it ended: its exit code must be one of these, without a traceback; 2 needs
        its sentence."""
        said = self.said
        if self.code not in codes or "Traceback" in said or "Exception ignored" in said:
            return f"exit code {self.code}, not {' or '.join(map(str, codes))}: ...{said[-1500:]}"
        names = ("ppo.py: ", "grpo.py: ", "rce.py: ", "ppo_rag.py: ", "grpo_rec.py: ")
        names += ("rce_icl.py: ",)
        if self.code == 2 and not any(line.startswith(names) for line in said.splitlines()[-2:]):
            return f"no sentence at the end: ...{said[-500:]}"
        if any((ord(c) < 32 and c not in "\n\r\t") or c == "\x7f" for c in said):
            return "a control character was printed raw"

    def trouble_of_reward(self, *shows):
        """What is wrong where a reward function ended it: exit code 1, and its own traceback with these."""
        missing = [text for text in shows if text not in self.said]
        if self.code != 1 or missing:
            return f"exit code {self.code}, not 1, or not said: {missing}: ...{self.said[-1500:]}"


class TorchRun(Run):
    """One start by torchrun: its agent, which is what exits with a code, and the processes it begins, each in
    a process group of its own. All carry a mark in their environment. arm is (a function of this file, its
    arguments), for the first process."""

    def __init__(self, script, folder, count, arm=None, restarts=0, **constants):
        self.mark = f"CHAOS_MARK={_MARK}.{next(_numbers)}."
        self.restarts = restarts
        self.logs = Path(tempfile.mkdtemp(prefix="logs_", dir=Path(folder).parent))
        program = ROOT / script
        environment = dict([self.mark.split("="), *os.environ.items()])
        if arm:
            program = __file__
            environment["CHAOS_ARM"] = json.dumps([script, *arm], default=str)
        words = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={count}"]
        words += [f"--max-restarts={restarts}", "--redirects=3", f"--log-dir={self.logs}", program]
        words += words_of(script, folder, constants)
        self.log = open(self.logs / "torchrun.log", "w+b")
        streams = {"stdin": subprocess.DEVNULL, "stdout": self.log, "stderr": self.log}
        with _forking:
            self.agent = subprocess.Popen(words, env=environment, start_new_session=True, **streams)
        self.pid = self.agent.pid
        self.started = time.time()
        self.left = []  # processes that outlived it
        _TORCHRUNS.add(self)

    def alive(self):
        code = self.agent.poll()
        if code is not None and not hasattr(self, "code"):
            self.code = code
        return code is None

    def members(self):
        """{number: its parent's} of all living processes of this run, torchrun's too."""
        return {number: parent for number, (mark, parent) in marked_processes().items() if mark == self.mark}

    def workers(self):
        return [number for number, parent in self.members().items() if parent == self.pid]

    def kill_all(self):
        while members := self.members():
            for number in members:
                kill_one(number, signal.SIGKILL)
            self.agent.poll()
            time.sleep(0.01)

    def wait(self, limit=3 * LIMIT, grace=10):
        """Till torchrun has ended; its processes have so many more seconds (grace)."""
        super().wait(limit)
        until = time.time() + grace
        while self.members() and time.time() < until:
            time.sleep(0.05)
        self.left += self.members()
        self.kill_all()
        _TORCHRUNS.discard(self)
        return self

    @property
    def said(self):
        """What its processes printed, without torchrun's own."""
        paths = sorted(self.logs.glob("*/attempt_*/*/std*.log"))
        return "\n".join(path.read_text(errors="replace") for path in paths)

    def trouble(self, *codes):
        said = self.said
        if self.left:
            return f"processes {self.left} were left over: ...{said[-1500:]}"
        # while importing: Python's own way of ending
        early = "KeyboardInterrupt" in said and "run_main" not in said
        unforeseen = ("Traceback" in said and not early) or "terminate called" in said
        if self.code not in codes or unforeseen or "Exception ignored" in said:
            own = (self.logs / "torchrun.log").read_text(errors="replace")
            codes = " or ".join(map(str, codes))
            return f"exit code {self.code}, not {codes}: ...{said[-1500:]}\ntorchrun: ...{own[-1500:]}"


def marked_processes():
    """{number: (its mark, its parent's number)} of the living processes of this program's torchruns."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # another's, or gone
            continue
        mark = next((word for word in environment if word.startswith(f"CHAOS_MARK={_MARK}.")), None)
        if mark and state != "Z":
            found[int(folder.name)] = mark, int(parent)
    return found


def kill_one(number, how):
    with contextlib.suppress(ProcessLookupError):
        os.kill(number, how)


def end_all(number, frame):
    """Ctrl-C or SIGTERM to this program: nothing that it began is left over."""
    for run in list(_TORCHRUNS):
        run.kill_all()
    os._exit(128 + number)


def run_armed():
    """What torchrun begins in place of a trainer: the trainer, its first process armed with a fault."""
    script, name, *arguments = json.loads(os.environ["CHAOS_ARM"])
    sys.argv[0] = str(ROOT / script)
    if os.environ["RANK"] == "0":
        globals()[name](*arguments)()
    runpy.run_path(sys.argv[0], run_name="__main__")


_MARK = f"{os.getpid()}.{time.time():.0f}"
_numbers = itertools.count()
_TORCHRUNS = set()  # that have not ended
_forking = threading.Lock()


def plain_state(value):
    """A checkpoint's state in a form that == compares bit for bit, without what the clock says."""
    if isinstance(value, torch.Tensor):
        data = value.contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else value.item()
        return value.dtype, tuple(value.shape), data
    if isinstance(value, dict):
        return {key: plain_state(v) for key, v in value.items() if "second" not in str(key)}
    return [plain_state(v) for v in value] if isinstance(value, (list, tuple)) else repr(value)


def without_timing(text):
    """A record of metrics.jsonl, or what best/ or the test found, without what the clock says."""
    return plain_state(json.loads(text))


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(folder):
    """{name: what must be equal between two runs} of a run's folder."""
    folder = Path(folder)
    last = max(folder.glob("step_*"), key=lambda p: int(p.name[5:]) if p.name[5:].isdecimal() else -1)
    patterns = ("best/**/*", "logs/*.jsonl", "candidates_*.parquet", "**/*.tmp", "*.old")
    patterns += ("candidates.json", "test_candidates_*", "eval_test.json", "rce/policy/*")
    paths = [*last.rglob("*"), *(path for pattern in patterns for path in folder.glob(pattern))]
    found = {}
    for path in sorted(paths):
        name = str(path.relative_to(folder))
        if path.name == "training_state.pt":
            found[name] = plain_state(torch.load(path, weights_only=True))
        elif path.suffix == ".jsonl":
            found[name] = [without_timing(line) for line in path.read_text().splitlines()]
        elif name in ("best/metrics.json", "eval_test.json"):  # where answers are timed, in their table
            found[name] = without_timing(path.read_text())
        elif path.suffix in (".tmp", ".old"):
            found[name] = "left over"
        elif path.is_file() and path.name not in ("manifest.json", "config.json"):
            found[name] = digest(path)
    return found


def tree(folder):
    """Digest of each file, the lock aside: what must be untouched."""
    files = [p for p in sorted(Path(folder).rglob("*")) if p.is_file()]
    return {str(p.relative_to(folder)): digest(p) for p in files if p.name != ".lock"}


def difference(a, b):
    names = [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]
    return f"differs from the unbroken run in {', '.join(names)}" if names else None


# ---------------------------------------------------------------- faults that a fork is armed with


def file_operations(folder, act):
    """Call act(number, event) before each file operation below the folder: opening for writing, rename,
    mkdir, remove, truncate, fsync."""
    count = 0
    root = str(folder)
    busy = False

    def hook(event, args):
        if busy or event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            return
        path = args[0]
        if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        name = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        inside = name.startswith(root) and not name.endswith(".lock")
        if inside or (event == "os.rmdir" and isinstance(path, str)):  # rmtree's are relative
            step(event)

    def step(event):
        nonlocal busy, count
        busy = True
        try:
            act(count, event)
        finally:
            busy = False
            count += 1

    def counted_fsync(handle):
        step("fsync")
        fsync(handle)

    sys.addaudithook(hook)
    fsync = os.fsync
    os.fsync = counted_fsync


def kill_at(number, folder):
    def act(n, event):
        if n == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: file_operations(folder, act)


def full_at(number, folder):
    def act(n, event):
        if n == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return lambda: file_operations(folder, act)


def count_operations(folder, into):
    def arm():
        handle = os.open(into, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        file_operations(folder, lambda n, event: os.write(handle, b"."))

    return arm


def bad_reward(kind, after):
    """A reward function `faulty` that gives zeros, and from its call number `after` on does what kind
    says."""

    def wrong(count):
        return {
            "NaN": [float("nan")] * count,
            "wrong count": [0.0] * (count + 1),
            "strings": ["good"] * count,
            "None": None,
            "nested": [[0.0]] * count,
        }[kind]

    def arm():
        sys.path.insert(0, str(ROOT))
        import rewards

        calls = 0

        def faulty(prompts, responses, answers):
            nonlocal calls
            calls += 1
            if not kind or calls <= after:
                return [0.0] * len(responses)
            if kind == "raises":
                raise LookupError("no such key")
            while kind.startswith("hangs"):
                try:
                    time.sleep(3600)
                except Exception:
                    if "catches" not in kind:
                        raise
            return wrong(len(responses))

        rewards.faulty = faulty

    return arm


def nan_logits(first, last):
    """The model's logits are NaN in its calls number first to last that have a gradient."""

    def arm():
        forward, calls = modeling_llama.LlamaForCausalLM.forward, [0]

        def spoiled(self, *args, **kwargs):
            out = forward(self, *args, **kwargs)
            if torch.is_grad_enabled():
                calls[0] += 1
                if first <= calls[0] <= last:
                    out.logits = out.logits * float("nan")
            return out

        modeling_llama.LlamaForCausalLM.forward = spoiled

    return arm


# ---------------------------------------------------------------- the trials


class Chaos:
    def __init__(self, script, work, options):
        self.script, self.work, self.options = script, Path(work), options
        self.name = Path(script).name
        own = {"ppo_rag.py": ["GENERATOR"], "grpo_rec.py": ["ACTOR_MODEL"], "rce_icl.py": []}
        self.models = own.get(self.name, ["ACTOR_MODEL", "REWARD_MODEL"])
        self.asks_a_model = self.name not in ALONE  # else no reward function, logits or rows to spoil
        self.random = random.Random(f"{options.seed} {script}")
        self.number = 0
        self.whole, self.two = self.work / "whole", self.work / "two"
        started = time.time()
        if trouble := self.run(self.whole).trouble(0):
            sys.exit(f"the unbroken run of {script} failed: {trouble}")
        self.seconds = time.time() - started
        self.want = contents(self.whole)
        steps = sorted(self.whole.glob("step_*"), key=lambda p: int(p.name[5:]))
        self.last = steps[-1].name
        shutil.copytree(self.whole, self.two)  # without the last checkpoint: what resuming goes on from
        shutil.rmtree(self.two / self.last)

    def run(self, folder, arm=None, **constants):
        return Run(self.script, folder, arm, **constants).wait()

    def fresh(self, start=None):
        with _forking:
            self.number += 1
            folder = self.work / f"{self.number:04d}"
        if start:
            shutil.copytree(start, folder)
        return folder

    def end(self, folder, codes=(0,), **constants):
        """Go on to the end without a fault; what is wrong then, or None."""
        run = self.run(folder, **constants)
        return run.trouble(*codes) or difference(self.want, contents(folder))

    # Each trial is (title, [functions without arguments that return what was lost or None])

    def kill(self):
        """SIGKILL at random moments of a run from its start to its end, each resumed till it is done."""

        def cycle(seed):
            chance, folder, kills = random.Random(seed), self.fresh(), 0
            while True:
                run = Run(self.script, folder)
                if kills < 6:
                    time.sleep(chance.uniform(0.1, 1.1 * self.seconds))
                    if run.alive():
                        run.kill(signal.SIGKILL)
                        run.wait()
                        kills += 1
                        continue
                run.wait()
                break
            return kills, run.trouble(0) or difference(self.want, contents(folder)), folder

        return "SIGKILL at a random moment", cycle

    def save_points(self):
        """SIGKILL before each file operation of a resumed run's first steps, save and plots."""
        counter, folder = self.work / "operations", self.fresh(self.two)
        self.run(folder, count_operations(folder, counter))
        shutil.rmtree(folder)
        self.operations = counter.stat().st_size
        chosen = range(0, self.operations, 1 + self.operations // 40)
        if self.options.every:
            chosen = range(self.operations)
        elif self.options.quick:
            chosen = sorted(self.random.sample(range(self.operations), 4))

        def one(number):
            folder = self.fresh(self.two)
            run = self.run(folder, kill_at(number, folder))
            if run.code != -signal.SIGKILL:
                return f"operation {number} was never reached: {run.said[-300:]}"
            return self.end(folder)

        return [lambda n=n: one(n) for n in chosen]

    def signals(self):
        def one(number, seed):
            folder, chance = self.fresh(), random.Random(seed)
            run = Run(self.script, folder)
            wait = chance.uniform(0, self.seconds)
            time.sleep(wait)
            before = train_steps(folder)
            run.kill(number)
            run.wait()
            # before the run's files are open the signal's own effect is right
            early = () if before else (-number, 130)
            if trouble := run.trouble(128 + number, 0, *early):
                return trouble
            done = train_steps(folder)
            if len(done) - len(before) > 2:  # one was perhaps just being logged
                return f"{len(done) - len(before)} steps after the signal"
            if run.code == 128 + number and done:
                saved = (folder / f"step_{done[-1]}").is_dir()
                if not saved or not list(folder.glob("*_with_entropy.png")):
                    return "no checkpoint or no plot after the signal"
            return self.end(folder)

        count = 1 if self.options.quick else 6
        return [
            lambda n=n, i=i: one(n, f"{self.options.seed} {self.script} {n} {i}")
            for n in (signal.SIGINT, signal.SIGTERM)
            for i in range(count)
        ]

    def pauses(self):
        def one(seed):
            folder, chance = self.fresh(), random.Random(seed)
            run = Run(self.script, folder)
            for _ in range(3):
                time.sleep(chance.uniform(0.1, self.seconds / 3))
                run.kill(signal.SIGSTOP)
                time.sleep(0.7)
                run.kill(signal.SIGCONT)
            return run.wait().trouble(0) or difference(self.want, contents(folder))

        return [
            lambda i=i: one(f"{self.options.seed} pause {i}") for i in range(1 if self.options.quick else 5)
        ]

    def corruption(self):
        """Truncate, flip a bit of, delete each file of the newest checkpoint."""

        def one(name, how):
            folder = self.fresh(self.whole)
            path = folder / self.last / name
            data = path.read_bytes()
            if how == "deleted":
                path.unlink()
            elif how == "cut":
                path.write_bytes(data[: len(data) // 2])
            else:
                at = self.random.randrange(len(data))
                path.write_bytes(
                    data[:at] + bytes([data[at] ^ 1 << self.random.randrange(8)]) + data[at + 1 :]
                )
            run = self.run(folder)
            if trouble := run.trouble(0):
                return f"{name} {how}: {trouble}"
            if f"skipping the broken checkpoint {folder}/{self.last}: " not in run.said or (
                name not in run.said.split("skipping the broken")[1].splitlines()[0]
                and name != "manifest.json"
            ):
                return f"{name} {how}: the file was not named: {run.said[:300]}"
            return difference(self.want, contents(folder))

        def none_left(how):
            folder = self.fresh(self.whole)
            for checkpoint in folder.glob("step_*"):
                weights_in(checkpoint / "policy").write_bytes(b"" if how == "cut" else b"x" * 1000)
            before, run = tree(folder), self.run(folder)
            return run.trouble(2) or (None if tree(folder) == before else "files were touched")

        names = [
            str(p.relative_to(self.whole / self.last))
            for p in sorted((self.whole / self.last).rglob("*"))
            if p.is_file()
        ]
        names = names if not self.options.quick else self.random.sample(names, 1)
        return [lambda n=n, h=h: one(n, h) for n in names for h in ("cut", "bit flipped", "deleted")] + [
            lambda h=h: none_left(h) for h in ("cut", "replaced")
        ]

    def full_disk(self):
        """No space at each file operation in turn, then on a real file system that fills up at a random
        moment."""

        def one(number):
            folder = self.fresh(self.two)
            run = self.run(folder, full_at(number, folder))
            return run.trouble(0, 2) or self.end(folder)

        def really(seed):
            chance, mount = random.Random(seed), self.fresh()
            mount.mkdir()
            if subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=128m", "chaos", mount], capture_output=True
            ).returncode:
                return "skipped"
            try:
                folder, filler = mount / "run", mount / "filler"
                run = Run(self.script, folder)
                time.sleep(chance.uniform(0.3 * self.seconds, self.seconds))
                try:
                    with open(filler, "wb", buffering=0) as file:
                        while run.alive():
                            file.write(bytes(65536))
                except OSError:
                    pass
                run.wait()
                trouble = run.trouble(0, 2)
                filler.unlink(missing_ok=True)
                return trouble or self.end(folder)
            finally:
                subprocess.run(["umount", "-l", mount])

        count = 2 if self.options.quick else 10
        chosen = (
            sorted(self.random.sample(range(self.operations), 2))
            if self.options.quick
            else range(0, self.operations, 1 + self.operations // 30)
        )
        return [lambda n=n: one(n) for n in chosen] + [
            lambda i=i: really(f"{self.options.seed} full {i}") for i in range(count)
        ]

    def read_only(self):
        def one():
            mount = self.fresh()
            mount.mkdir()
            if subprocess.run(["mount", "-t", "tmpfs", "chaos", mount], capture_output=True).returncode:
                return "skipped"
            try:
                shutil.copytree(self.two, mount / "run")
                subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
                before, run = tree(mount), self.run(mount / "run")
                return run.trouble(2) or (None if tree(mount) == before else "files were touched")
            finally:
                subprocess.run(["umount", "-l", mount])

        return [one, lambda: self.run("/proc/chaos").trouble(2)]

    def two_runs(self):
        def one(stop):
            folder = self.fresh()
            first = Run(self.script, folder)
            while first.alive() and not (folder / "logs/metrics.jsonl").exists():
                time.sleep(0.02)
            second = self.run(folder)
            if trouble := second.trouble(2):
                return trouble
            if "in use by another run" not in second.said:
                return f"it did not say that the folder is in use: {second.said[-300:]}"
            if stop:
                first.kill(signal.SIGKILL)
                first.wait()
                return self.end(folder)
            return first.wait().trouble(0) or difference(self.want, contents(folder))

        return [lambda s=s: one(s) for s in (False, True)]

    def rewards(self):
        """What a reward function raises is shown as it is, where it hangs too: exit code 1. What it returns
        wrongly is a sentence: 2."""
        if not self.asks_a_model:
            return []
        functions = "[('exact_answer', 1.0), ('rouge_l', 0.0), ('faulty', 0.0)]"
        folder = self.fresh()
        self.run(folder, bad_reward(None, 0), REWARD_FUNCTIONS=functions)
        want = contents(folder)

        def one(kind, after):
            folder = self.fresh()
            # time enough for a busy machine to score: only what hangs for ever may meet it
            limit = {"REWARD_TIMEOUT": 10} if kind.startswith("hangs") else {}
            run = self.run(folder, bad_reward(kind, after), REWARD_FUNCTIONS=functions, **limit)
            if kind.startswith("hangs"):
                trouble = run.trouble_of_reward("Timeout (0:00:10)!", " in faulty")
            elif kind != "raises":
                trouble = run.trouble(2)
            elif self.name == "rce.py" and run.code == 2:
                trouble = run.trouble(2)  # while mining a candidate that cannot be scored is only left out
            else:
                note = "(raised by the reward function faulty)"
                trouble = run.trouble_of_reward("Traceback", "LookupError: no such key", note)
            if trouble:
                return f"{kind}: {trouble}"
            again = self.run(folder, bad_reward(None, 0), REWARD_FUNCTIONS=functions)
            return again.trouble(0) or difference(want, contents(folder))

        kinds = ["raises", "hangs", "hangs and catches", "NaN", "wrong count", "strings", "None", "nested"]
        calls = (0, 3)
        if self.options.quick:
            kinds = kinds[:2]
            calls = (2,)
        return [lambda k=k, n=n: one(k, n) for k in kinds for n in calls]

    def nan(self):
        if not self.asks_a_model:
            return []

        def one(first, last, codes, **constants):
            folder = self.fresh()
            run = self.run(folder, nan_logits(first, last), **constants)
            if trouble := run.trouble(*codes):
                return trouble
            if "not finite" not in run.said:
                return "nobody was told"
            for path in folder.glob("step_*/*/*model.safetensors"):
                from safetensors.torch import load_file

                if not all(w.isfinite().all() for w in load_file(path).values()):
                    return f"{path.relative_to(folder)} was saved with weights that are not finite"

        long = dict(MAX_STEPS=40, NUM_EPOCHS=40)  # five steps in a row end the run
        return [
            lambda: one(2, 3, (0,)),
            lambda: one(3, 10**9, (2,), **long),
            lambda: one(1, 10**9, (2,), **long),
        ]

    def data(self):
        if not self.asks_a_model:
            return []
        good = (
            json.dumps(
                {
                    "problem": "Tom has 3 apples. Tom buys 4 more. How many apples are there now?",
                    "solution": "3 + 4 = 7\n#### 7",
                }
            ).encode()
            + b"\n"
        )
        late = {
            "not UTF-8": good + b'{"problem": "\xff\xfe", "solution": "1"}\n',
            "half a line": good + good[:40],
            "a list": good + b"[1, 2]\n",
            "a number": good + b"5\n",
            "null": good + b"null\n",
            "wrong type": good + b'{"problem": 5, "solution": "1"}\n',
            "missing column": good + b'{"problem": "x"}\n',
            "empty prompt": good + b'{"problem": "", "solution": "1"}\n',
            "blank prompt": good + b'{"problem": "  \\n", "solution": "1"}\n',
            "empty file": b"",
            "only blank lines": b"\n\n",
            "binary": bytes(range(256)) * 10,
            "zeros": good + bytes(1000),
            "UTF-16": good.decode().encode("utf-16"),
            "5,000 digits": good + b'{"problem": ' + b"9" * 5000 + b"}\n",
            "parquet": (ROOT / "data/tiny/train.parquet").read_bytes(),
            "escape in a name": good + b'{"\\u001b[2Jproblem": 1}\n',
            "10 MB prompt alone": json.dumps({"problem": "apples " * 1_500_000, "solution": "1"}).encode(),
        }
        fine = {
            "BOM": b"\xef\xbb\xbf" + good * 4,
            "CRLF": good.replace(b"\n", b"\r\n") * 4,
            "blank lines": (good + b"\n") * 4,
            "no newline at the end": (good * 4)[:-1],
            "10 MB line": good * 4 + json.dumps({"problem": "apples " * 1_500_000, "solution": "1"}).encode(),
            "extra columns": good.replace(b"{", b'{"more": [1, {"x": null}], ', 1) * 4,
            "escapes in the prompt": json.dumps(
                {"problem": "Tom has \x1b[31m3\x07 apples.\x1b]0;title\x07", "solution": "\x1b[2J#### 3"}
            ).encode()
            + b"\n"
            + good * 3,
            "answers of other types": good * 2
            + b'{"problem": "x", "solution": 5}\n{"problem": "y", "solution": ["5", "6"]}\n',
        }

        def one(title, data, codes):
            folder, path = self.fresh(), self.work / f"{abs(hash(title))}.jsonl"
            path.write_bytes(data)
            spec = [{"path": str(path), "type": "jsonl", "input": "problem", "output": "solution"}]
            run = self.run(
                folder, TRAIN_DATASETS=spec, EVAL_DATASETS=spec if codes == (0,) else [], MAX_STEPS=1
            )
            if trouble := run.trouble(*codes):
                return f"{title}: {trouble}"
            if codes == (2,) and folder.exists():
                return f"{title}: something was written"

        def parquet(cut):
            folder, path = self.fresh(), self.work / f"cut{cut}.parquet"
            path.write_bytes((ROOT / "data/tiny/train.parquet").read_bytes()[:cut])
            return self.run(
                folder,
                TRAIN_DATASETS=[
                    {"path": str(path), "type": "parquet", "input": "problem", "output": "solution"}
                ],
            ).trouble(2)

        codes = (
            (0, 2) if self.name == "rce.py" else (0,)
        )  # rce may rightly find nothing to train on in four equal prompts
        trials = [lambda t=t, d=d: one(t, d, (2,)) for t, d in late.items()] + [
            lambda t=t, d=d: one(t, d, codes) for t, d in fine.items()
        ]
        trials += [lambda c=c: parquet(c) for c in (0, 3, 100, 5000)]
        return trials if not self.options.quick else self.random.sample(trials, 3)

    def constants(self):
        """Absurd values for every constant, by the command line: refused in a sentence, or the run does its
        step."""
        spec = importlib.util.spec_from_file_location("looked_at", ROOT / self.script)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        words = (
            "-1",
            "0",
            "nan",
            "-1e999",
            "10**9",
            "",
            "\x00",
            "\x1b[31m",
            "[]",
            "[1]",
            "[{}]",
            "None",
            "True",
            "1e18",
            "99999999999999999999",
            "🙂",
            "{'a': 1}",
            "[('exact_answer', 'x')]",
            "[(1, 2, 3)]",
        )
        # None of these ends or writes within the trial's folder: an endless run, another place
        endless = {"MAX_STEPS", "OUTPUT_DIR", "DEVICE"}

        def one(key, word):
            folder = self.fresh()
            fewer = {"MAX_TRAIN_PROMPTS": 8, "MAX_EVAL_PROMPTS": 2} if self.asks_a_model else {}
            constants = {"MAX_STEPS": 1, **fewer, key: word}
            if self.name == "rce.py":
                constants = {"MINE_PROMPTS": 8, **constants}
            run = self.run(folder, **constants)
            trouble = run.trouble(0, 2)
            shutil.rmtree(folder, ignore_errors=True)
            return trouble and f"{key}={word!r}: {trouble}"

        keys = [
            key
            for key in module.constants()
            if key not in endless and key not in ("USE_WANDB", "GROUP_EPOCHS")
        ]

        def some():
            return words if self.options.every else self.random.sample(words, 8)

        trials = [
            lambda k=k, w=w: one(k, w)
            for k in keys
            for w in some()
            if not (isinstance(getattr(module, k), bool) and w == "True")
        ]
        trials += [
            lambda k=k, w=w: one(k, w)
            for k, w in (
                ("MAX_STEPS", "-1"),
                ("MAX_STEPS", "nan"),
                ("OUTPUT_DIR", ""),
                ("DEVICE", "toaster"),
                ("DEVICE", ""),
                ("GROUP_EPOCHS", "0"),
                ("USE_WANDB", "2"),
            )
        ]
        return trials if not self.options.quick else self.random.sample(trials, 8)

    def untrusted(self):
        """A checkpoint made by an enemy: its manifest fits what is in it."""

        def remake(folder):
            manifest = {
                str(p.relative_to(folder)): {
                    "size": p.stat().st_size,
                    "sha256": hashlib.sha256(p.read_bytes()).hexdigest(),
                }
                for p in sorted(folder.rglob("*"))
                if p.is_file() and p.name != "manifest.json"
            }
            (folder / "manifest.json").write_text(json.dumps(manifest))

        def one(attack):
            folder = self.fresh(self.whole)
            step, mark = folder / self.last, folder.with_suffix(".pwned")
            weights = weights_in(step / "policy")
            adapted = weights.name.startswith("adapter")
            if attack in ("pickle bomb", "pickled weights"):
                import pickle

                class Bomb:
                    def __reduce__(self):
                        return os.system, (f"touch {mark}",)

                pickled = weights.with_name("adapter_model.bin" if adapted else "pytorch_model.bin")
                target = step / "training_state.pt" if attack == "pickle bomb" else pickled
                target.write_bytes(pickle.dumps(Bomb()))
                if attack == "pickled weights":
                    weights.unlink()
            elif attack == "remote code":
                file = step / "policy" / ("adapter_config.json" if adapted else "config.json")
                config = {} if adapted else json.loads(file.read_text())  # of an adapter's numbers are read
                file.write_text(
                    json.dumps(
                        {
                            **config,
                            "model_type": "evil",
                            "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
                        }
                    )
                )
                (step / "policy/evil.py").write_text(
                    f"import os\nos.system('touch {mark}')\nclass Evil: pass\n"
                )
            elif attack == "other state":
                torch.save({"step": "x", "prompts": [1]}, step / "training_state.pt")
            remake(step)
            if attack == "path outside":
                manifest = json.loads((step / "manifest.json").read_text())
                manifest["../../secret"] = {"size": 1, "sha256": "0"}
                (step / "manifest.json").write_text(json.dumps(manifest))
            run = self.run(folder)
            if mark.exists():
                return f"{attack}: its code was run"
            if attack.endswith(
                "outside"
            ):  # is no whole checkpoint: named and skipped, the one before it is used
                named = f"skipping the broken checkpoint {folder}/{self.last}: " in run.said
                return (
                    run.trouble(0)
                    or (None if named else f"{attack}: it was not named")
                    or difference(self.want, contents(folder))
                )
            return (trouble := run.trouble(2)) and f"{attack}: {trouble}"

        def model(name):
            folder, mark = self.fresh(), self.work / "model.pwned"
            path = self.work / "evil_model"
            if not path.exists():
                shutil.copytree(ROOT / "data/tiny/policy", path)
                config = json.loads((path / "config.json").read_text())
                (path / "config.json").write_text(
                    json.dumps(
                        {
                            **config,
                            "model_type": "evil",
                            "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
                        }
                    )
                )
                (path / "evil.py").write_text(f"import os\nos.system('touch {mark}')\nclass Evil: pass\n")
            run = self.run(folder, **{name: path})
            return "its code was run" if mark.exists() else run.trouble(2)

        return [
            lambda a=a: one(a)
            for a in (
                "pickle bomb",
                "pickled weights",
                "remote code",
                "other state",
                "path outside",
            )
        ] + [lambda n=n: model(n) for n in self.models[: 1 if self.options.quick else 2]]


class ProcessesChaos(Chaos):
    """The same for runs of several processes. What they make must equal an unbroken run of one."""

    def __init__(self, script, work, options):
        super().__init__(script, work, options)
        self.killed = collections.Counter()  # by kind
        self.slowest = 0.0  # seconds from one process's death to the end of all
        folder = self.fresh()
        metrics = folder / "logs/metrics.jsonl"
        run = TorchRun(script, folder, options.processes)
        while run.alive() and not metrics.exists():
            time.sleep(0.02)
        self.opened = time.time() - run.started  # seconds till it begins to write
        trouble = run.wait().trouble(0) or difference(self.want, contents(folder))
        if trouble:
            sys.exit(f"{script} with {options.processes} processes: {trouble}")
        self.seconds = time.time() - run.started

    def either(self, chance, folder, **more):
        """A start as one process or several."""
        if chance.random() < 1 / 3:
            return Run(self.script, folder)
        return TorchRun(self.script, folder, self.options.processes, **more)

    def sleep(self, chance, run, folder):
        """Till a random moment: of the whole run at times, else of what it does once its files are open."""
        wait = chance.uniform(0.1, self.seconds)
        if chance.random() < 0.75:
            while run.alive() and not (folder / "logs").exists():
                time.sleep(0.02)
            wait = chance.uniform(0, self.seconds - self.opened)
        time.sleep(wait)

    def end(self, folder, chance):
        run = self.either(chance, folder).wait()
        return run.trouble(0) or difference(self.want, contents(folder))

    def kill(self):
        """SIGKILL of one process, of all, or of torchrun alone, whose processes go on to the end. At times
        torchrun starts what was killed again (--max-restarts)."""

        def one_killed(chance, run):
            kill_one(chance.choice(run.workers() or [run.pid]), signal.SIGKILL)
            killed = time.time()
            run.wait()
            if run.code == 1:
                self.slowest = max(self.slowest, time.time() - killed)
            # 0: started again, or too late; SIGKILL: torchrun itself, where it had begun none yet
            return run.trouble(0, 1, -signal.SIGKILL)

        def all_killed(chance, run):
            members = list(run.members())
            chance.shuffle(members)
            for number in members:
                kill_one(number, signal.SIGKILL)
            run.wait()

        def torchrun_killed(chance, run):
            kill_one(run.pid, signal.SIGKILL)
            run.wait(grace=LIMIT)
            return run.trouble(0, -signal.SIGKILL)

        faults = itertools.cycle(((one_killed, 0), (all_killed, 0), (one_killed, 3), (torchrun_killed, 0)))

        def cycle(seed):
            chance, folder, kills = random.Random(seed), self.fresh(), 0
            fault, restarts = next(faults)
            run = TorchRun(self.script, folder, self.options.processes, restarts=restarts)
            while kills < min(3, self.options.kills):
                self.sleep(chance, run, folder)
                if not run.alive():
                    break
                kills += 1
                if isinstance(run, TorchRun):
                    kind = fault.__name__.replace("_", " ")
                    self.killed[kind + " and started again" * (run.restarts > 0)] += 1
                    if trouble := fault(chance, run):
                        return kills, f"{fault.__name__}: {trouble}", folder
                    fault, restarts = next(faults)
                else:
                    self.killed["a run of one process"] += 1
                    run.kill(signal.SIGKILL)
                    run.wait()
                run = self.either(chance, folder, restarts=restarts)
            run.wait()
            return kills, run.trouble(0) or difference(self.want, contents(folder)), folder

        return "SIGKILL", cycle

    def save_points(self):
        """SIGKILL of the first process, which alone writes, before a file operation of a resumed run."""
        self.count_operations()
        chosen = range(0, self.operations, 1 + self.operations // 10)
        if self.options.quick:
            chosen = [self.random.randrange(self.operations)]

        def one(number):
            folder = self.fresh(self.two)
            arm = "kill_at", number, folder
            run = TorchRun(self.script, folder, self.options.processes, arm).wait()
            if run.code == 0:
                return f"operation {number} was never reached: {run.said[-300:]}"
            return run.trouble(1) or self.end(folder, random.Random(number))

        return [lambda n=n: one(n) for n in chosen]

    def count_operations(self):
        if not hasattr(self, "operations"):
            folder, counter = self.fresh(self.two), self.work / "operations"
            arm = "count_operations", folder, counter
            TorchRun(self.script, folder, self.options.processes, arm).wait()
            self.operations = counter.stat().st_size

    def signals(self):
        def one(number, seed):
            folder, chance = self.fresh(), random.Random(seed)
            run = TorchRun(self.script, folder, self.options.processes)
            self.sleep(chance, run, folder)
            before = train_steps(folder)
            run.kill(number)
            run.wait()
            if trouble := run.trouble(0, 1):
                return trouble
            done = train_steps(folder)
            if len(done) - len(before) > 2:  # one was perhaps just being logged
                return f"{len(done) - len(before)} steps after the signal"
            if before:
                saved = (folder / f"step_{done[-1]}").is_dir()
                if not saved or not list(folder.glob("*_with_entropy.png")):
                    return f"no checkpoint or no plot after the signal: {run.said[-1500:]}"
            return self.end(folder, chance)

        count = 1 if self.options.quick else 3
        numbers = [signal.SIGTERM] if self.options.quick else [signal.SIGTERM, signal.SIGINT]
        seeds = [f"{self.options.seed} {self.script} {i}" for i in range(count)]
        return [lambda n=n, s=s: one(n, f"{s} {n}") for n in numbers for s in seeds]

    def full_disk(self):
        self.count_operations()

        def one(number):
            folder = self.fresh(self.two)
            arm = "full_at", number, folder
            run = TorchRun(self.script, folder, self.options.processes, arm).wait()
            return run.trouble(0, 1) or self.end(folder, random.Random(number))

        count = 1 if self.options.quick else 5
        return [lambda n=n: one(n) for n in self.random.sample(range(self.operations), count)]


def train_steps(folder):
    """The steps that a run's log has, in its order."""
    metrics = folder / "logs/metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [json.loads(line)["step"] for line in lines if '"train"' in line]


PROCESSES_TRIALS = {
    "kill": "SIGKILL of one process, of all, of torchrun alone",
    "save_points": "SIGKILL of the first process before a file operation",
    "signals": "SIGTERM and Ctrl-C to torchrun",
    "full_disk": "full disk at a file operation",
}
TRIALS = {
    "kill": "SIGKILL at a random moment",
    "save_points": "SIGKILL before each file operation around a save",
    "signals": "Ctrl-C and SIGTERM at a random moment",
    "pauses": "SIGSTOP and SIGCONT",
    "corruption": "each file of the newest checkpoint cut, flipped, deleted",
    "full_disk": "full disk at each file operation and at random",
    "read_only": "read-only OUTPUT_DIR",
    "two_runs": "two runs on one OUTPUT_DIR",
    "rewards": "reward raises, hangs, returns nonsense",
    "nan": "NaN logits",
    "data": "malformed data",
    "constants": "absurd constants",
    "untrusted": "checkpoints and models of an enemy",
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scripts", nargs="+", help="trainers' files, and KEY=VALUE constants")
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs at random moments, for each trainer")
    parser.add_argument("--quick", action="store_true", help="a few of each")
    parser.add_argument(
        "--every",
        action="store_true",
        help="every single file operation and absurd value, not 40 and 8 a constant",
    )
    parser.add_argument("--only", help="some of: " + ",".join(TRIALS))
    parser.add_argument("--processes", type=int, default=1, help="begun by torchrun, if more than one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, help="trials at a time")
    options = parser.parse_args()
    GIVEN.update(word.split("=", 1) for word in options.scripts if "=" in word)
    options.scripts = [word for word in options.scripts if "=" not in word]
    several = options.processes > 1
    options.trials = PROCESSES_TRIALS if several else TRIALS
    options.only = options.only or ",".join(options.trials)
    options.jobs = options.jobs or max(1, os.cpu_count() // options.processes)
    for number in (signal.SIGINT, signal.SIGTERM) if several else ():
        signal.signal(number, end_all)
    work = Path(tempfile.mkdtemp(prefix="chaos_"))
    lost = []
    table = {}  # {(script, fault): (tried, lost)}
    for script in options.scripts:
        (work / Path(script).stem).mkdir()
        chaos = (ProcessesChaos if several else Chaos)(script, work / Path(script).stem, options)
        print(f"{script}: the unbroken run takes {chaos.seconds:.1f} s", flush=True)
        for name in options.only.split(","):
            tried, bad = try_fault(chaos, name, options)
            table[script, name] = tried, len(bad)
            lost += bad
        if several:
            kinds = ", ".join(f"{count} {kind}" for kind, count in chaos.killed.items())
            slowest = f"after one process's death the others ended within {chaos.slowest:.1f} s"
            print(f"  SIGKILLs at random moments: {kinds}; {slowest}", flush=True)
    write_table(options, table)
    print(f"\n{sum(tried for tried, _ in table.values()):,} faults tried, {len(lost)} lost")
    if lost:
        sys.exit(f"the folders of what was lost are in {work}")
    shutil.rmtree(work)


def try_fault(chaos, name, options):
    """All trials of one fault: (how many were tried, what was lost)."""
    started = time.time()
    tried = skipped = 0
    bad = []
    if name == "full_disk" and options.processes == 1 and not hasattr(chaos, "operations"):
        chaos.save_points()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        if name == "kill":
            _, cycle = chaos.kill()
            while tried < options.kills:
                seeds = [f"{options.seed} {chaos.script} {tried} {i}" for i in range(options.jobs)]
                for kills, trouble, folder in pool.map(cycle, seeds):
                    tried += kills
                    if trouble:
                        bad.append(trouble)
                    else:
                        shutil.rmtree(folder)
        else:
            for trouble in pool.map(lambda trial: trial(), getattr(chaos, name)()):
                if trouble == "skipped":
                    skipped += 1
                    continue
                tried += 1
                bad += [trouble] if trouble else []
    for folder in chaos.work.glob("[0-9]" * 4) if not bad else ():
        shutil.rmtree(folder, ignore_errors=True)
    survived = f"{tried:>5} tried {tried - len(bad):>5} survived {len(bad):>3} lost"
    not_possible = f"  ({skipped} not possible here)" if skipped else ""
    seconds = time.time() - started
    print(f"  {options.trials[name]:<58} {survived}   {seconds:.0f} s{not_possible}", flush=True)
    for trouble in bad:
        print("    LOST: " + trouble.replace("\n", "\n      "), flush=True)
    return tried, bad


def write_table(options, table):
    """What the documentation shows: a row a fault, a column a trainer."""
    names = " | ".join(Path(script).name for script in options.scripts)
    print(f"\n| fault | {names} | survived | lost |")
    print("|---|" + "---|" * (len(options.scripts) + 2))
    for name in options.only.split(","):
        tried = [table[script, name][0] for script in options.scripts]
        bad = sum(table[script, name][1] for script in options.scripts)
        numbers = " | ".join(f"{n:,}" for n in tried)
        print(f"| {options.trials[name]} | {numbers} | {sum(tried) - bad:,} | {bad} |")


if __name__ == "__main__":
    run_armed() if "CHAOS_ARM" in os.environ else main()
