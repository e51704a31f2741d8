"""Runs trainers on several seeds, and prints the evaluations of the seeds side by side.

    python bench/learning.py ppo/ppo.py 1 2 3 [KEY=VALUE ...]
    python bench/learning.py grpo/grpo.py 1 2 3 show=entropy,kl      # these metrics, too
    python bench/learning.py ppo/ppo.py bench/critic.py grpo/grpo.py rce/rce.py 1 2 3 picture=learning.png

The picture has the sampled accuracy over the processor seconds of a run, start-up, mining and evaluations
included, one thread each. A metric of training is that of the step at which the evaluation stands. Steps that
not all seeds have do not appear.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")


def processor_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_seed(script, seed, words, folder):
    """Returns {step: metrics} of a run's evaluations, with its processor seconds until then."""
    command = [sys.executable, script, f"SEED={seed}", f"OUTPUT_DIR={folder}", *words]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    file = folder / "logs/metrics.jsonl"
    trained, found = {}, {}
    position = 0
    is_running = True
    while is_running:
        seconds = processor_seconds(process.pid)  # before poll(): then a process that ended has none
        is_running = process.poll() is None
        time.sleep(0.1)
        lines = file.read_text()[position:] if file.exists() else ""
        position += lines.rfind("\n") + 1
        for line in lines[: lines.rfind("\n") + 1].splitlines():
            record = json.loads(line)
            if record["phase"] == "train":
                trained = record
            elif record["phase"] == "eval":
                values = trained if trained.get("step") == record["step"] else {}
                found[record["step"]] = {**values, **record, "seconds": seconds}
    if process.returncode:
        sys.exit(f"{script} ended with exit code {process.returncode}")
    return found


def print_table(script, seeds, evaluations, keys):
    print(f"\n{script}")
    for key in keys:
        print(f"{key:>18}  " + "  ".join(f"seed {seed}" for seed in seeds) + "    mean  (least to most)")
        for step in evaluations[0]:
            values = [found.get(step, {}).get(key) for found in evaluations]
            if None not in values:
                each = "  ".join(f"{value:6.3f}" for value in values)
                mean = f"{statistics.mean(values):6.3f}  ({min(values):.3f} to {max(values):.3f})"
                print(f"{'step':>12} {step:5d}  {each}  {mean}", flush=True)


def main(*words):
    scripts = [word for word in words if word.endswith(".py")]
    seeds = [word for word in words if word.isdecimal()]
    options = dict(word.split("=", 1) for word in words if word.startswith(("show=", "picture=")))
    keys = ["accuracy_sampled", "accuracy_greedy", "reward", "seconds"]
    if "show" in options:
        keys += options["show"].split(",")
    known = [*scripts, *seeds, *(f"{key}={value}" for key, value in options.items())]
    overrides = [word for word in words if word not in known]  # the trainer refuses what it does not know
    out = Path(tempfile.mkdtemp(prefix="learning_"))
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axis = figure.add_subplot(
        xlabel="processor seconds, start-up included", ylabel="sampled accuracy, held out"
    )
    axis.grid(alpha=0.3)
    for number, script in enumerate(scripts):
        runs = [run_seed(ROOT / script, seed, overrides, out / Path(script).stem / seed) for seed in seeds]
        print_table(script, seeds, runs, keys)
        for found in runs:
            points = [
                (x["seconds"], x["accuracy_sampled"]) for x in found.values() if "accuracy_sampled" in x
            ]
            label = script if found is runs[0] else None
            axis.plot(*zip(*points), "o-", color=f"C{number}", markersize=3, alpha=0.7, label=label)
    print(f"\nruns are in {out}")
    if "picture" in options:
        axis.legend()
        figure.savefig(options["picture"], dpi=110)


if __name__ == "__main__":
    if not any(word.isdecimal() for word in sys.argv):
        sys.exit(__doc__)
    main(*sys.argv[1:])
