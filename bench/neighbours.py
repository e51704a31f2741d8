"""What busy neighbours cost a trainer: tokens a second of grpo.py's default step beside other programs.

    python bench/neighbours.py                     # every setting below, idle and beside others
    python bench/neighbours.py GOMP_SPINCOUNT=3000 # the default and this one

OpenMP's threads spin while they wait for each other: on a core that a neighbour uses too, they wait for one
that does not run. Each setting is run in turn, alone, beside one busy process a core, and beside one that is
pinned to a core.
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
SETTINGS = ["", *(f"GOMP_SPINCOUNT={n}" for n in (1000, 10000, 100000)), "OMP_WAIT_POLICY=passive"]
BUSY = [sys.executable, "-c", "while True: pass"]
NEIGHBOURS = {
    "alone": [],
    "one busy process a core": [BUSY] * (os.cpu_count() or 1),
    "one pinned to a core": [["taskset", "-c", "0", *BUSY]],
}


def tokens_per_second(setting):
    """Of the median step after the first."""
    own = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {key: value for key, value in os.environ.items() if key not in own}
    environment.update([setting.split("=")] if setting else [])
    with tempfile.TemporaryDirectory() as folder:
        words = [f"MAX_STEPS={STEPS}", "EVAL_DATASETS=[]", "SAVE_EVERY_N_STEPS=0", f"OUTPUT_DIR={folder}/run"]
        command = [sys.executable, ROOT / "grpo/grpo.py", *words]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in open(f"{folder}/run/logs/metrics.jsonl")]
    return statistics.median(line["tokens_per_second"] for line in lines[1:])


def main():
    settings = ["", *sys.argv[1:]] if sys.argv[1:] else SETTINGS
    print("| setting | " + " | ".join(NEIGHBOURS) + " |\n|---|" + "---|" * len(NEIGHBOURS))
    for setting in settings:
        found = []
        for commands in NEIGHBOURS.values():
            neighbours = [subprocess.Popen(command) for command in commands]
            try:
                found.append(tokens_per_second(setting))
            finally:
                for process in neighbours:
                    process.kill()
        print(f"| {setting or 'none'} | " + " | ".join(f"{x:,.0f}" for x in found) + " |", flush=True)


if __name__ == "__main__":
    main()
