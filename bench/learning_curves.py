"""Run a trainer's default on several seeds and print its evaluations side by side.

    python bench/learning_curves.py ppo/ppo.py 1 2 3 [KEY=VALUE ...]
    python bench/learning_curves.py grpo/grpo.py 1 2 3 recipe=maxrl show=entropy,kl

recipe=NAME: with that recipe of docs/change-the-algorithm.md; show=...: these metrics too, of evaluations or
of the training step before. Steps that not all seeds have evaluated are left out, and those for which not all
have the metric.
"""

import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def recipe(page, name):
    """The text of the fenced block after <!-- recipe: NAME --> in docs/PAGE."""
    after = (ROOT / "docs" / page).read_text().split(f"<!-- recipe: {name} -->\n")[1]
    return re.match(r"```\w+\n(.*?)```", after, re.DOTALL)[1]


def patched(text, lines):
    """A trainer's text with a recipe's: those lines after '-' make place for those after '+'."""
    for hunk in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", lines, re.MULTILINE):
        old, new = (re.sub("^[-+]", "", part, flags=re.MULTILINE) for part in hunk)
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def with_recipe(script, name, folder):
    """A program in `folder`: the trainer with the recipe's lines."""
    lines = recipe("change-the-algorithm.md", name)
    for beside in ("rewards", "data"):
        (folder / beside).symlink_to(ROOT / beside)
    text = patched(script.read_text(), lines)
    program = folder / f"with_recipe_{script.name}"
    program.write_text(text)
    return program


def run_seed(script, seed, overrides, folder):
    """({step: metrics} of the evaluations of one run, its seconds by the clock, its seconds of processor)."""
    words = [f"SEED={seed}", f"OUTPUT_DIR={folder}", *overrides]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    started = time.time()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, script, *words], check=True, **quiet)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.time() - started
    with open(folder / "logs/metrics.jsonl") as file:
        records = [json.loads(line) for line in file]
    trained = {r["step"]: r for r in records if r["phase"] == "train"}
    found = {r["step"]: {**trained.get(r["step"], {}), **r} for r in records if r["phase"] == "eval"}
    return found, seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    words = sys.argv[2:]
    seeds = [word for word in words if word.isdecimal()]
    if not seeds:
        sys.exit(__doc__)
    script = ROOT / sys.argv[1]
    options = dict(word.split("=", 1) for word in words if word.startswith(("recipe=", "show=")))
    overrides = [word for word in words if word.startswith("@") or word.partition("=")[0].isupper()]
    out = Path(tempfile.mkdtemp(prefix="learning_curves_"))
    if "recipe" in options:
        script = with_recipe(script, options["recipe"], out)
    runs = [run_seed(script, seed, overrides, out / seed) for seed in seeds]
    evaluations = [found for found, *_ in runs]
    steps = [step for step in evaluations[0] if all(step in found for found in evaluations)]
    names = "  ".join(f"seed {seed}" for seed in seeds)
    shown = options.get("show", "").split(",") if "show" in options else []
    for key in ("accuracy_sampled", "accuracy_greedy", "reward", *shown):
        print(f"\n{key:>18}  {names}    mean  (least to most)")
        for step in steps:
            values = [found[step][key] for found in evaluations if found[step].get(key) is not None]
            if len(values) < len(seeds):
                continue
            each = "  ".join(f"{value:6.3f}" for value in values)
            spread = f"{statistics.mean(values):6.3f}  ({min(values):.3f} to {max(values):.3f})"
            print(f"{'step':>12} {step:5d}  {each}  {spread}")
    print("\nseconds, start-up included: " + "  ".join(f"{seconds:.0f}" for _, seconds, _ in runs))
    print("of processor: " + "  ".join(f"{processor:.0f}" for *_, processor in runs))
    print(f"runs are in {out}")


if __name__ == "__main__":
    main()
