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

Importing torch and transformers takes longer than most of the tests. It is done once, and pytest runs in a fork.
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

# What the tests import from elsewhere. Nothing of this repository may stand here: it would be imported unplanted.
IMPORTED_ONCE = """
    hypothesis numpy pandas pyarrow.parquet pytest tqdm.contrib.logging xdist.plugin torch torch._dynamo transformers
    transformers.generation.utils transformers.models.auto.modeling_auto transformers.models.auto.tokenization_auto
    transformers.models.llama.modeling_llama transformers.models.gpt2.modeling_gpt2""".split()

MUTANTS = []
for path in sorted(Path(__file__).parent.glob("mutants_*.py")):
    MUTANTS += runpy.run_path(str(path))["MUTANTS"]


def copy_repository(folder):
    """The tracked files as they are in the working tree; data/ as a link, since no test writes there."""
    command = ["git", "-C", ROOT, "ls-files", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        if name and not name.startswith("data/") and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / "data").symlink_to(ROOT / "data")


def prepare():
    """Import what can be shared. Forks are safe while no thread runs here: so one thread for OpenMP, no torch op."""
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ.update(settings)
    sys.dont_write_bytecode = True  # it may outlive a planted file of the same size
    sys.path.remove(str(ROOT / "tests"))
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    gc.freeze()  # no fork looks for garbage in what was imported


def be_pytest(folder, tests, output):
    """Turn this process, a fork, into `python -m pytest` in the folder."""
    import pytest
    os.setsid()  # so that a time limit ends what the tests started too
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = ["pytest"]
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(written, 1)
    os.dup2(written, 2)
    words = "-n 0 -x -q --assert=plain -p no:cacheprovider -p no:anyio"
    code = pytest.main([*words.split(), *tests])
    sys.exit(int(code))


def run_tests(folder, tests):
    """Exit code of pytest and what it said."""
    output = folder.with_suffix(".txt")
    limit = SECONDS * len(tests)
    process = multiprocessing.get_context("fork").Process(target=be_pytest, args=(folder, tests, output))
    process.start()
    process.join(limit)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return None, f"no end within {limit} s"
    return process.exitcode, output.read_text(errors="replace")


def plant(folder, mutant):
    """One word for what became of a mutant planted in the copy in `folder`, which is put back as it was."""
    file, old, new, test = mutant
    text = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
    if text.count(old) != 1:
        return "STALE"
    planted = text.replace(old, new)
    try:
        compile(planted, file, "exec")
    except SyntaxError:
        return "BROKEN"
    (folder / file).write_text(planted)
    code, _ = run_tests(folder, [test])
    (folder / file).write_text(text)
    return {0: "ALIVE", 1: "killed"}.get(code, "BROKEN")


def own_copy(parent):
    """Give this worker a copy of the repository."""
    global COPY
    COPY = Path(parent) / str(os.getpid())
    copy_repository(COPY)


def run_here(tests):
    return run_tests(COPY, tests)


def plant_here(mutant):
    return plant(COPY, mutant)


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
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as parent, ProcessPoolExecutor(jobs, fork, own_copy, [parent]) as pool:
        print(f"{len(tests)} tests without a mutant", flush=True)
        parts = [tests[n::jobs] for n in range(jobs) if tests[n::jobs]]
        for code, said in pool.map(run_here, parts):
            if code != 0:
                print(f"{said}\nThe named tests must pass without a mutant: mend them first")
                sys.exit(1)
        for mutant, word in zip(chosen, pool.map(plant_here, chosen)):
            file, old, new, test = mutant
            print(f"{word:6}  {file}: {short(old)} -> {short(new)}  {test.partition('::')[2]}", flush=True)
            found.append(word)
    alive = sum(word != "killed" for word in found)
    print(f"{len(found)} planted, {alive} alive")
    sys.exit(alive > 0)


if __name__ == "__main__":
    main()
