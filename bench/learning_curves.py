"""Run a trainer's default on several seeds and print its evaluations side by side.

    python bench/learning_curves.py ppo/ppo.py 1 2 3 [KEY=VALUE ...]
"""
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_seed(script, seed, overrides, folder):
    """The evaluations of one run, and its seconds, start-up included."""
    words = [f"SEED={seed}", f"OUTPUT_DIR={folder}", *overrides]
    started = time.time()
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    subprocess.run([sys.executable, ROOT / script, *words], check=True, **quiet)
    seconds = time.time() - started
    with open(folder / "logs/metrics.jsonl") as file:
        records = [json.loads(line) for line in file]
    return [r for r in records if r["phase"] == "eval"], seconds


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    script, *words = sys.argv[1:]
    seeds = [word for word in words if word.isdecimal()]
    overrides = [word for word in words if not word.isdecimal()]
    out = Path(tempfile.mkdtemp(prefix="learning_curves_"))
    evaluations = []  # a list a seed
    times = []
    for seed in seeds:
        found, seconds = run_seed(script, seed, overrides, out / seed)
        evaluations.append(found)
        times.append(seconds)
    for key in ("accuracy_sampled", "accuracy_greedy", "reward"):
        names = "  ".join(f"seed {seed}" for seed in seeds)
        print(f"\n{key:>18}  {names}    mean  (least to most)")
        for row in zip(*evaluations):
            values = [r[key] for r in row]
            each = "  ".join(f"{value:6.3f}" for value in values)
            spread = f"{statistics.mean(values):6.3f}  ({min(values):.3f} to {max(values):.3f})"
            print(f"{'step':>12} {row[0]['step']:5d}  {each}  {spread}")
    print("\nseconds, start-up included: " + "  ".join(f"{seconds:.0f}" for seconds in times))
    print(f"runs are in {out}")


if __name__ == "__main__":
    main()
