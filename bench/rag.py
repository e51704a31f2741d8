"""Test rewards of ppo_rag.py's default run beside the simple rules, over seeds or over splits.

    python bench/rag.py SEED 1 2 3               # the shipped split
    python bench/rag.py SPLIT_SEED 0 1 2 3 4     # seed 1
    python bench/rag.py SEED 1 2 3 MAX_STEPS=300 DATASET=... OUT=checkpoints/bench_rag

Each run is one that a user starts, `python ppo/ppo_rag.py SEED=1 ...`. The table of answers is made once. The
rules know the rewards of all actions of the training questions; PPO knows those of the actions that it tried.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_figures(folder, words):
    """Returns test.json of a new run with these KEY=VALUE words. What an earlier one left is moved aside."""
    command = [sys.executable, ROOT / "ppo/ppo_rag.py", *words, f"OUTPUT_DIR={folder}", "RESUME=no"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}")
    return json.loads((folder / "test.json").read_text())


def main(constant, *arguments):
    values = [word for word in arguments if word.isdecimal()]
    words = [word for word in arguments if not word.isdecimal() and not word.startswith("OUT=")]
    (out,) = [word[4:] for word in arguments if word.startswith("OUT=")] or [ROOT / "checkpoints/bench_rag"]
    if not values:
        sys.exit(__doc__)
    runs = [test_figures(Path(out) / f"{constant}_{x}", [*words, f"{constant}={x}"]) for x in values]

    print(f"{'test reward, ' + constant:24}" + "".join(f"{x:>8}" for x in values) + "    mean      sd")
    for name in runs[0]:
        rewards = [figures[name]["reward"] for figures in runs]
        deviation = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        print(f"{name:24}" + "".join(f"{x:8.3f}" for x in [*rewards, statistics.mean(rewards), deviation]))
    print("\nPPO's gain over a rule, with its 95% interval (paired by question)")
    for name in ("best_fixed", "best_by_type", "tree"):
        gains = [f"{run[name]['gain']:+.3f} ± {run[name]['interval']:.3f}" for run in runs]
        print(f"{name:24}" + "  ".join(gains))


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("SEED", "SPLIT_SEED"):
        sys.exit(__doc__)
    main(*sys.argv[1:])
