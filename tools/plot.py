"""Draws logs/metrics.jsonl of one or several runs of any trainer, ended or going on.

    python tools/plot.py checkpoints/ppo                       # every metric of the run, to metrics.png
    python tools/plot.py checkpoints/seed_1 checkpoints/seed_2 # all that they share, each run in a colour
    python tools/plot.py checkpoints/seed_* --metrics reward,accuracy_sampled --out seeds.png

Without --metrics it leaves out a metric that never changes. A faint line is each training step, the line on
top its rolling mean; points are evaluations, and a dashed line marks the first one. What rce.py and
rce_icl.py log of a round of mining is drawn as points, too. In rce.py training steps show the mined
candidates, and evaluations the policy's own responses. The ending of --out chooses the kind of file: png,
pdf, svg.
"""

import argparse
import json
import math
import sys
from contextlib import suppress
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

UNITS = {"response_length": "tokens", "entropy": "nats", "kl": "nats", "approx_kl": "nats"}


def stop(sentence):
    print(f"plot.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def read_metrics(run):
    """Returns {metric: {"train": [(step, value), ...], "eval": [...]}} of a run's OUTPUT_DIR. What is logged
    of mining is among "eval"."""
    path = Path(run) / "logs/metrics.jsonl"
    if not path.is_file():
        stop(f"there is no {path}: it takes the OUTPUT_DIR of runs that have begun to train")
    metrics = {}
    for line in path.read_text(errors="replace").splitlines():
        record = {}
        with suppress(ValueError):  # a line half-written
            record = json.loads(line)
        for key, value in record.items():
            is_metric = key not in ("phase", "step") and isinstance(value, (int, float))
            if is_metric and math.isfinite(value):
                phases = metrics.setdefault(key, {"train": [], "eval": []})
                phases["train" if record["phase"] == "train" else "eval"].append((record["step"], value))
    return metrics


def changes(phases):
    """Returns whether a metric has two different values, or one value alone."""
    values = [value for points in phases.values() for _, value in points]
    return len(values) == 1 or len(set(values)) > 1


def draw_run(axis, phases, colour, window):
    if phases["train"]:
        steps, values = np.array(phases["train"]).T
        axis.plot(steps, values, color=colour, alpha=0.25, zorder=1)
        if len(steps) == 1:  # a line of one point is not seen
            axis.plot(steps, values, "s", color=colour, markersize=4)
        means = [values[max(0, i - window) : i].mean() for i in range(1, len(values) + 1)]
        axis.plot(steps, means, color=colour)
    if phases["eval"]:
        axis.plot(*zip(*phases["eval"]), "o-", color=colour, markersize=4, linewidth=0.8)
        axis.axhline(phases["eval"][0][1], color=colour, linestyle="--", linewidth=0.8)


def draw(runs, keys, path):
    """Writes a grid of panels, one for each of the metrics `keys`, of {name: read_metrics()}."""
    height = math.ceil(len(keys) / 3)
    figure = Figure(figsize=(9.5, 1 + 2.2 * height), layout="constrained")
    longest = max(len(phases["train"]) for metrics in runs.values() for phases in metrics.values())
    window = max(1, longest // 12)
    many = matplotlib.colormaps["turbo"].resampled(len(runs))
    colours = [f"C{n}" if len(runs) <= 10 else many(n) for n in range(len(runs))]
    for number, key in enumerate(keys, 1):
        unit = "s" if key.startswith("seconds/") else UNITS.get(key)
        axis = figure.add_subplot(height, min(3, len(keys)), number, xlabel="training step")
        axis.set_ylabel(f"{key} ({unit})" if unit else key)
        axis.grid(alpha=0.3)
        axis.ticklabel_format(axis="y", scilimits=(-3, 4), useOffset=False)
        axis.xaxis.get_major_locator().set_params(integer=True)
        for metrics, colour in zip(runs.values(), colours):
            if key in metrics:
                draw_run(axis, metrics[key], colour, window)
    legend = [Line2D([], [], color=colour, linewidth=4, label=name) for name, colour in zip(runs, colours)]
    legend.append(Line2D([], [], color="grey", alpha=0.4, label="training, each step"))
    legend.append(Line2D([], [], color="grey", label=f"training, mean of {window} steps"))
    legend.append(Line2D([], [], color="grey", marker="o", markersize=4, linewidth=0.8, label="held out"))
    legend.append(Line2D([], [], color="grey", linestyle="--", label="held out, first evaluation"))
    columns = max(1, 100 // max(20, 8 + max(map(len, runs))))  # as many as the width holds
    figure.legend(handles=legend, loc="outside upper center", ncols=min(columns, len(legend)), fontsize=9)
    figure.savefig(path, dpi=120)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's OUTPUT_DIR")
    parser.add_argument("--metrics", metavar="A,B", help="only these metrics, in this order")
    parser.add_argument("--out", metavar="FILE", default="metrics.png")
    words = parser.parse_args()
    names = [Path(run).resolve().name for run in words.runs]
    names = names if len(set(names)) == len(names) else words.runs
    runs = {name: read_metrics(run) for name, run in zip(names, words.runs)}
    known = dict.fromkeys(key for metrics in runs.values() for key in metrics)
    keys = words.metrics.split(",") if words.metrics else []
    if missing := set(keys) - set(known):
        stop(f"--metrics: no run has {', '.join(missing)}; they have {', '.join(known) or 'no metric yet'}")
    if not words.metrics:
        for key in known:
            each = [metrics.get(key) for metrics in runs.values()]
            if None not in each and any(map(changes, each)):
                keys.append(key)
    if not keys:
        stop("these runs share no metric that changes: name some by --metrics")
    try:
        draw(runs, keys, words.out)
    except (ValueError, OSError) as error:  # an ending unknown to matplotlib, a folder that is not there
        stop(f"--out {words.out}: {error}")
    print(words.out)


if __name__ == "__main__":
    main()
