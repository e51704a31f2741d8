"""What busy neighbours cost a trainer: tokens a second of grpo.py's default step beside other programs.

    python bench/neighbours.py                     # every setting below, alone and beside others
    python bench/neighbours.py GOMP_SPINCOUNT=3000 # OpenMP's own and this one

OpenMP's threads spin while they wait for each other: on a core that a neighbour uses too, they wait for one
that does not run. The settings take turns, round by round: alone, beside one that is pinned to a core, and
once beside one busy process a core, where OpenMP's own setting takes minutes. 300000 is what libgomp takes
where nothing is set; the trainers set 10000.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS = 5
ROUNDS = 4
SETTINGS = [f"GOMP_SPINCOUNT={n}" for n in (300000, 10000, 1000)]
BUSY = [sys.executable, "-c", "while True: pass"]
NEIGHBOURS = {  # (what runs beside, rounds)
    "alone": ([], ROUNDS),
    "one pinned to a core": ([["taskset", "-c", "0", *BUSY]], ROUNDS),
    "one busy process a core": ([BUSY] * (os.cpu_count() or 1), 1),
}


def tokens_per_second(setting):
    """Of the median step after the first."""
    own = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {key: value for key, value in os.environ.items() if key not in own}
    environment.update([setting.split("=")])
    with tempfile.TemporaryDirectory() as folder:
        words = [f"MAX_STEPS={STEPS}", "EVAL_DATASETS=[]", "SAVE_EVERY_N_STEPS=0", f"OUTPUT_DIR={folder}/run"]
        command = [sys.executable, ROOT / "grpo/grpo.py", *words]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in open(f"{folder}/run/logs/metrics.jsonl")]
    return statistics.median(line["tokens_per_second"] for line in lines[1:])


def main():
    settings = SETTINGS[:1] + sys.argv[1:] if sys.argv[1:] else SETTINGS
    for name, (commands, rounds) in NEIGHBOURS.items():
        found = {setting: [] for setting in settings}
        for _ in range(rounds):
            for setting in settings:
                neighbours = [subprocess.Popen(command) for command in commands]
                try:
                    found[setting].append(tokens_per_second(setting))
                finally:
                    for process in neighbours:
                        process.kill()
        for setting, speeds in found.items():
            ratio = statistics.median(a / b for a, b in zip(speeds, found[settings[0]]))
            each = ", ".join(f"{speed:,.0f}" for speed in speeds)
            print(f"{name}, {setting}: {each} tokens a second, {ratio:.2f} of {settings[0]}", flush=True)


if __name__ == "__main__":
    main()
