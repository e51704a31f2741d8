"""How we know what the tests are worth: bugs as data, planted one at a time, each killed by the test that it names.

    python tests/mutants.py                     # all of them, two at a time
    python tests/mutants.py --some 10           # ten at random
    python tests/mutants.py --only next_rows    # those whose file, texts or test contain it

A mutant is (file, old text that occurs exactly once in it, new text, pytest id of the test that must fail). First the
named tests run once as they are and must pass. Then each mutant is planted in a copy of the repository. killed: its
test failed. ALIVE: it passed. STALE: the old text is not there exactly once. BROKEN: pytest neither passed nor
failed, or the planted file is not Python. Last line `N planted, M alive`; all but killed count as alive.
"""
import argparse
import os
import queue
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
JOBS = 2
SECONDS = 600  # a test may take with a mutant planted

PPO, GRPO, RCE = "ppo/ppo.py", "grpo/grpo.py", "rce/rce.py"

MUTANTS = [
]

for path in sorted(Path(__file__).parent.glob("mutants_*.py")):  # lists of other files
    MUTANTS += runpy.run_path(str(path))["MUTANTS"]


def copy_repository(folder):
    """The tracked files as they are in the working tree; data/ as a link, since no test writes there."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        if name and not name.startswith("data/") and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / "data").symlink_to(ROOT / "data")
    return folder


def run_tests(folder, tests):
    """Exit code of pytest and what it said; no bytecode, which would outlive a planted file of the same size and second."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *tests]
    limit = SECONDS * len(tests)
    try:
        done = subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return None, f"no end within {limit} s"
    return done.returncode, done.stdout + done.stderr


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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--some", type=int, metavar="K", help="K mutants at random")
    parser.add_argument("--seed", type=int, help="of --some")
    parser.add_argument("--only", metavar="TEXT", help="mutants whose file, texts or test contain TEXT")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"mutants at a time (default {JOBS})")
    words = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not words.only or words.only in "\n".join(mutant)]
    if words.some is not None:
        chosen = random.Random(words.seed).sample(chosen, min(words.some, len(chosen)))

    with tempfile.TemporaryDirectory() as parent:
        folders = queue.Queue()
        for number in range(max(1, words.jobs)):
            folders.put(copy_repository(Path(parent) / str(number)))

        tests = list(dict.fromkeys(test for *_, test in chosen))
        print(f"{len(tests)} tests without a mutant", flush=True)
        code, said = run_tests(Path(parent) / "0", tests) if tests else (0, "")
        if code != 0:
            print(f"{said}\nThe named tests must pass without a mutant: mend them first")
            sys.exit(1)

        def judge(mutant):
            folder = folders.get()
            try:
                word = plant(folder, mutant)
            finally:
                folders.put(folder)
            file, old, new, test = mutant
            print(f"{word:6}  {file}: {' '.join(old.split())[:60]!r} -> {' '.join(new.split())[:60]!r}  {test.partition('::')[2]}", flush=True)
            return word

        with ThreadPoolExecutor(max(1, words.jobs)) as pool:
            found = list(pool.map(judge, chosen))
    alive = sum(word != "killed" for word in found)
    print(f"{len(found)} planted, {alive} alive")
    sys.exit(alive > 0)


if __name__ == "__main__":
    main()
