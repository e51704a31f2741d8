"""How we know what the tests are worth: bugs as data, planted one by one, each killed by the test it names.

    python tests/mutants.py                     # all of them, two at a time
    python tests/mutants.py --some 10           # ten at random
    python tests/mutants.py --only next_rows    # those whose file, texts or test contain it

The mutants stand in mutants_*.py. Each is (file, old text that occurs exactly once in it, new text, pytest id
of the test that must fail). First the named tests run once as they are and must pass. Then each mutant is
planted in a copy of the tree:
    killed  its test failed
    ALIVE   its test passed
    STALE   the old text is not there exactly once
    BROKEN  pytest neither passed nor failed, or the planted file is not Python
Last line `N planted, M alive`; all but killed count as alive, and the exit code is 1 if there is any.

Importing torch and transformers takes longer than most tests: it is done once, and pytest runs in a fork.
"""

import argparse
import gc
import importlib
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
JOBS = 2
SECONDS = 600  # a test may take with a mutant planted
FORK = multiprocessing.get_context("fork")
LEFT_BEHIND = ("checkpoints", "wandb", "__pycache__", "venv")  # folders that git ignores

# What the tests import from elsewhere. Nothing of this repository: a mutant in it would have no effect.
IMPORTED_ONCE = """
    hypothesis matplotlib.figure numpy pandas pyarrow.parquet pytest sklearn.metrics tqdm.contrib.logging
    xdist.plugin
    torch torch._dynamo transformers transformers.generation.utils
    transformers.models.auto.modeling_auto transformers.models.auto.tokenization_auto
    transformers.models.gpt2.modeling_gpt2 transformers.models.llama.modeling_llama""".split()

MUTANTS = []
for path in sorted(Path(__file__).parent.glob("mutants_*.py")):
    MUTANTS += runpy.run_path(str(path))["MUTANTS"]


def prepare():
    """Import what can be shared. A fork is safe where no thread runs: one for OpenMP, and no torch op."""
    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"})
    sys.dont_write_bytecode = True  # bytecode may outlive a planted file of the same size
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT / "tests"]
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    gc.freeze()  # no fork looks for garbage in what was imported


def repository_files(root=ROOT):
    """Names of the files that belong to the repository, below root: git's, or in a downloaded archive, which
    has no .git, all but what running leaves behind."""
    if (root / ".git").exists():
        command = ["git", "-C", root, "ls-files", "-z"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [name for name in listed.split("\0") if name and (root / name).is_file()]
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_BEHIND and not name.startswith(".")]
        names += [(Path(folder) / name).relative_to(root).as_posix() for name in files]
    return names


def copy_repository(parent):
    """This worker's COPY: the repository's files as they are; data/'s folders as links, no test writes
    there. Of data/tiny a copy: a link would lead out of the tree, and is_shipped() follows it."""
    global COPY
    COPY = Path(parent) / str(os.getpid())
    for name in repository_files():
        linked = name.startswith("data/") and name.count("/") > 1 and not name.startswith("data/tiny/")
        if not linked:
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, COPY / name)
    for folder in (ROOT / "data").glob("*/"):
        if folder.name != "tiny":
            (COPY / "data" / folder.name).symlink_to(folder)


def be_pytest(tests, output):
    """Turn this process, a fork, into `python -m pytest` in the copy."""
    import pytest

    os.setsid()  # a time limit ends what the tests started too
    os.chdir(COPY)
    sys.path.insert(0, str(COPY))
    sys.argv = ["pytest"]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(written, 2)
    words = "-n 0 -x -q --assert=plain -p no:cacheprovider -p no:anyio"
    code = pytest.main([*words.split(), "-m", "sweep or not sweep", *tests])
    sys.exit(int(code))


def run_tests(tests):
    """Exit code of pytest and what it said."""
    output = COPY.with_suffix(".txt")
    limit = SECONDS * len(tests)
    process = FORK.Process(target=be_pytest, args=(tests, output))
    process.start()
    process.join(limit)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return None, f"no end within {limit} s"
    return process.exitcode, output.read_text(errors="replace")


def plant(mutant):
    """One word for what became of a mutant planted in the copy, which is put back as it was."""
    file, old, new, test = mutant
    text = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
    if text.count(old) != 1:
        return "STALE"
    planted = text.replace(old, new)
    try:
        compile(planted if file.endswith(".py") else "", file, "exec")  # or a recipe in a page of docs/
    except SyntaxError:
        return "BROKEN"
    (COPY / file).write_text(planted)
    code, _ = run_tests([test])
    (COPY / file).write_text(text)
    return {0: "ALIVE", 1: "killed"}.get(code, "BROKEN")


def short(text):
    return repr(" ".join(text.split())[:60])


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--some", type=int, metavar="K", help="K mutants at random")
    parser.add_argument("--seed", type=int, help="of --some")
    parser.add_argument("--only", metavar="TEXT", help="mutants whose file, texts or test contain TEXT")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"mutants at a time (default {JOBS})")
    words = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not words.only or words.only in "\n".join(mutant)]
    if words.some is not None:
        chosen = random.Random(words.seed).sample(chosen, min(words.some, len(chosen)))
    jobs = max(1, words.jobs)
    tests = list(dict.fromkeys(test for *_, test in chosen))

    prepare()
    found = []
    with (
        tempfile.TemporaryDirectory() as parent,
        ProcessPoolExecutor(jobs, FORK, initializer=copy_repository, initargs=[parent]) as pool,
    ):
        print(f"{len(tests)} tests without a mutant", flush=True)
        parts = [tests[n : n + 10] for n in range(0, len(tests), 10)]
        for code, said in pool.map(run_tests, parts):
            if code != 0:
                print(f"{said}\nThe named tests must pass without a mutant: mend them first")
                sys.exit(1)
        for mutant, word in zip(chosen, pool.map(plant, chosen)):
            file, old, new, test = mutant
            print(f"{word:6}  {file}: {short(old)} -> {short(new)}  {test.partition('::')[2]}", flush=True)
            found.append(word)
    alive = sum(word != "killed" for word in found)
    print(f"{len(found)} planted, {alive} alive")
    sys.exit(alive > 0)


if __name__ == "__main__":
    main()
