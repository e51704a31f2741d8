"""Runs a trainer on several seeds and prints its evaluations side by side.

    python bench/learning.py ppo/ppo.py 1 2 3 [KEY=VALUE ...]
    python bench/learning.py grpo/grpo.py 1 2 3 show=entropy,kl      # these metrics, too

A metric of training is that of the step at which the evaluation stands. Steps that not all seeds have do not
appear.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_seed(script, seed, words, folder):
    """Returns {step: metrics} of a run's evaluations, its seconds by the clock and those of the processor."""
    started, processor = time.time(), sum(os.times()[2:4])
    command = [sys.executable, script, f"SEED={seed}", f"OUTPUT_DIR={folder}", *words]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    seconds = time.time() - started, sum(os.times()[2:4]) - processor
    records = [json.loads(line) for line in (folder / "logs/metrics.jsonl").read_text().splitlines()]
    trained = {record["step"]: record for record in records if record["phase"] == "train"}
    found = {}
    for record in records:
        if record["phase"] == "eval":
            found[record["step"]] = {**trained.get(record["step"], {}), **record}
    return found, *seconds


def main(script, *words):
    seeds = [word for word in words if word.isdecimal()]
    keys = ["accuracy_sampled", "accuracy_greedy", "reward"]
    for word in words:
        if word.startswith("show="):
            keys += word.removeprefix("show=").split(",")
    overrides = [word for word in words if word[0] == "@" or word.split("=")[0].isupper()]
    out = Path(tempfile.mkdtemp(prefix="learning_"))
    runs = [run_seed(ROOT / script, seed, overrides, out / seed) for seed in seeds]
    evaluations = [found for found, *_ in runs]
    for key in keys:
        print(f"\n{key:>18}  " + "  ".join(f"seed {seed}" for seed in seeds) + "    mean  (least to most)")
        for step in evaluations[0]:
            values = [found.get(step, {}).get(key) for found in evaluations]
            if None not in values:
                each = "  ".join(f"{value:6.3f}" for value in values)
                mean = f"{statistics.mean(values):6.3f}  ({min(values):.3f} to {max(values):.3f})"
                print(f"{'step':>12} {step:5d}  {each}  {mean}")
    print("\nseconds, start-up included: " + "  ".join(f"{clock:.0f}" for _, clock, _ in runs))
    print("of processor: " + "  ".join(f"{processor:.0f}" for *_, processor in runs))
    print(f"runs are in {out}")


if __name__ == "__main__":
    if not any(word.isdecimal() for word in sys.argv):
        sys.exit(__doc__)
    main(*sys.argv[1:])
