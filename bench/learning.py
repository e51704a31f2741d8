"""Runs trainers on several seeds, and prints the evaluations of the seeds side by side.

    python bench/learning.py ppo/ppo.py 1 2 3 [KEY=VALUE ...]
    python bench/learning.py grpo/grpo.py 1 2 3 show=entropy,kl      # these metrics, too
    python bench/learning.py 1 2 3 jobs=2 picture=learning.png MAX_STEPS=30 grpo/grpo.py rce/rce.py ROUNDS=1

KEY=VALUE or @FILE after a trainer is for that one, before the first for all. jobs=2 runs two at a time, one
thread each. The picture has the sampled accuracy over the CPU seconds of a run, start-up, mining and
evaluations included. A metric of training is that of the step at which the evaluation stands. Steps that not
all seeds have do not appear.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_seed(script, seed, words, folder):
    """Returns {step: metrics} of a run's evaluations, with its CPU seconds until then."""
    command = [sys.executable, script, *words, f"SEED={seed}", f"OUTPUT_DIR={folder}"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    file = folder / "logs/metrics.jsonl"
    trained, found = {}, {}
    position = 0
    is_running = True
    while is_running:
        seconds = cpu_seconds(process.pid)  # before poll(): then a process that ended has none
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
    (folder / "evaluations.json").write_text(json.dumps(found))
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
    seeds = []
    options = {"show": "", "picture": "", "jobs": "1"}
    overrides = {"": []}  # {trainer: its constants}; those of "" are for all
    script = ""
    for word in words:
        key, _, value = word.partition("=")
        if word.isdecimal():
            seeds.append(word)
        elif word.endswith(".py"):
            script = word
            overrides[script] = []
        elif key in options:
            options[key] = value
        else:
            overrides[script].append(word)  # the trainer refuses what it does not know
    of_all = overrides.pop("")
    out = Path(tempfile.mkdtemp(prefix="learning_"))
    print(f"runs are in {out}", flush=True)
    with ThreadPoolExecutor(int(options["jobs"])) as pool:
        futures = {}
        for script, own in overrides.items():
            for seed in seeds:
                folder = out / Path(script).stem / seed
                futures[script, seed] = pool.submit(run_seed, ROOT / script, seed, [*of_all, *own], folder)
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axis = figure.add_subplot(xlabel="CPU seconds, start-up included", ylabel="sampled accuracy, validation")
    axis.grid(alpha=0.3)
    keys = [
        "accuracy_sampled",
        "accuracy_greedy",
        "reward",
        "seconds",
        *filter(None, options["show"].split(",")),
    ]
    for number, script in enumerate(overrides):
        runs = [futures[script, seed].result() for seed in seeds]
        print_table(script, seeds, runs, keys)
        for found in runs:
            points = [x for x in found.values() if "accuracy_sampled" in x]
            seconds, accuracies = [[x[key] for x in points] for key in ("seconds", "accuracy_sampled")]
            label = Path(script).stem if found is runs[0] else None
            axis.plot(seconds, accuracies, "o-", color=f"C{number}", markersize=3, alpha=0.7, label=label)
    if options["picture"]:
        axis.legend()
        figure.savefig(options["picture"], dpi=110)


if __name__ == "__main__":
    if not any(word.isdecimal() for word in sys.argv):
        sys.exit(__doc__)
    main(*sys.argv[1:])
