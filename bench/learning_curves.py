"""Run a trainer's default on several seeds and print its evaluations side by side.

    python bench/seeds.py ppo/ppo.py 1 2 3 [KEY=VALUE ...]
"""
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main():
    script, *words = sys.argv[1:]
    seeds, overrides = [w for w in words if w.isdecimal()], [w for w in words if not w.isdecimal()]
    runs, out = {}, Path(tempfile.mkdtemp(prefix="seeds_"))
    for seed in seeds:
        started = time.time()
        subprocess.run([sys.executable, ROOT / script, f"SEED={seed}", f"OUTPUT_DIR={out / seed}", *overrides], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
        runs[seed] = [r for r in map(json.loads, open(out / seed / "logs/metrics.jsonl")) if r["phase"] == "eval"], time.time() - started
    for key in ("accuracy_sampled", "accuracy_greedy", "reward"):
        print(f"\n{key:>18}  " + "  ".join(f"seed {seed}" for seed in seeds) + "    mean  (least to most)")
        for row in zip(*(run for run, _ in runs.values())):
            values = [r[key] for r in row]
            print(f"{'step':>12} {row[0]['step']:5d}  " + "  ".join(f"{v:6.3f}" for v in values) + f"  {statistics.mean(values):6.3f}  ({min(values):.3f} to {max(values):.3f})")
    print("\nseconds, start-up included: " + "  ".join(f"{seconds:.0f}" for _, seconds in runs.values()) + f"\nruns are in {out}")


if __name__ == "__main__":
    main()
