"""What rce/rce_icl.py reaches: a table over seeds, and a picture of how it got there.

    for s in 1 2 3; do python rce/rce_icl.py SEED=$s OUTPUT_DIR=runs/icl_$s; done    # 90 s of one core each
    python bench/icl.py runs/icl_1 runs/icl_2 runs/icl_3 [PICTURE=docs/rce_icl.png]

The table has accuracies on the test questions by number of demonstrations, least and greatest over the
runs, and for the largest number what best/ has more, by run, with the standard error of the difference. In
the market (data/make_market.py) another row says what a chooser gets that is told guild and region of all
rows: it shows a row of both, or one of the question's guild and one of its region.
"""

import csv
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
MARKET = ["{ROOT}/data/market/train.csv", "{ROOT}/data/market/test.csv"]


def read_run(run):
    """Returns the test's results, {name: accuracy of each question, by shots}, and the constants of a run."""
    try:
        results = json.loads((run / "eval_test.json").read_text())
        constants = json.loads((run / "training_config.json").read_text())["constants"]
    except OSError as error:
        sys.exit(f"icl.py: {run} is not a run of rce_icl.py that has ended ({error})")
    sets = [constants[name] or {} for name in ("TRAIN_DATASET", "TEST_DATASET")]
    if [spec.get("path") for spec in sets] == MARKET and constants["SHOTS"] == 2:
        results["told guild and region"] = told_accuracies(constants)
    return results, constants


def load_trainer(constants):
    """Returns a trainer with the constants of a run, which writes nothing there."""
    spec = importlib.util.spec_from_file_location("rce_icl", ROOT / "rce/rce_icl.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in json.loads(json.dumps(constants).replace("{ROOT}", str(ROOT))).items():
        setattr(module, name, value)
    module.OUTPUT_DIR = tempfile.mkdtemp()
    return module.ICLTrainer("no")


def told_accuracies(constants):
    """Returns the accuracies of each question by number of shots, of one who is told guild and region."""
    trainer = load_trainer(constants)
    facts = {}  # {text: (guild, region)}
    for path in MARKET:
        with open(path.replace("{ROOT}", str(ROOT)), newline="") as file:
            for row in csv.DictReader(file):
                facts[row["question"]] = row["guild"], row["region"]
    questions = trainer.splits["test"]
    by_shots = []
    for shots in (1, 2):
        lists = []
        for question in questions:
            guild, region = facts[question["text"]]
            pool = question["pool"].tolist()
            of_pool = [facts[trainer.demos[number]["text"]] for number in pool]
            # One of both first; then one of the guild and one of the region
            same = [2 * (g == guild and r == region) + (g == guild) for g, r in of_pool]
            first = int(np.argmax(same))
            others = [r == region and place != first for place, (_, r) in enumerate(of_pool)]
            lists.append([pool[first], pool[int(np.argmax(others))]][:shots])
        by_shots.append(trainer.accuracies(questions, lists).tolist())
    return by_shots


def print_table(results):
    shots = len(results[0]["best/"])
    print(f"| {len(results[0]['best/'][0])} test questions, {len(results)} runs", end=" | ")
    print(" | ".join(f"{count} shown" for count in range(1, shots + 1)), end=" | ")
    print(f"best/ has more, {shots} shown, by run |")
    print("|---" * (shots + 2) + "|")
    for name in results[0]:
        cells, gains = [], []
        for count in range(shots):
            means = [np.mean(result[name][count]) for result in results]
            cells.append(f"{min(means):.1%} to {max(means):.1%}")
        for result in results:
            accuracies = np.array(result[name][-1])
            gain = np.array(result["best/"][-1])[: len(accuracies)] - accuracies
            gains.append(f"{100 * gain.mean():+.1f} ± {100 * gain.std() / len(gain) ** 0.5:.1f}")
        print(f"| {name} | {' | '.join(cells)} | {', '.join(gains)} |")


def draw(runs, path):
    """Draws the accuracy on validation of each run, and the first run's rules."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axis = figure.add_subplot(xlabel="step", ylabel="accuracy on validation, mean over 1 to SHOTS")
    axis.grid(alpha=0.3)
    for number, run in enumerate(runs):
        records = [json.loads(line) for line in (run / "logs/metrics.jsonl").read_text().splitlines()]
        steps, accuracies = zip(*[(r["step"], r["accuracy"]) for r in records if r["phase"] == "eval"])
        label = ["policy, by seed", None][number > 0]
        axis.plot(steps, accuracies, "o-", color="C0", alpha=0.5, markersize=3, label=label)
        for first in [r["step"] for r in records if "kl" in r][:1]:
            label = ["GRPO begins", None][number > 0]
            axis.axvline(first, color="grey", linewidth=0.8, label=label)
    last = max(runs[0].glob("step_*"), key=lambda folder: int(folder.name[5:]))
    rules = torch.load(last / "training_state.pt", weights_only=True)["state"]["rules"]
    for color, (rule, accuracy) in enumerate(rules.items(), 1):
        axis.axhline(accuracy, linestyle="--", linewidth=1, color=f"C{color}", label=f"rule: {rule}")
    axis.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)


def main(*words):
    pictures = [word[8:] for word in words if word.startswith("PICTURE=")]
    runs = [Path(word) for word in words if not word.startswith("PICTURE=")]
    results, constants = zip(*map(read_run, runs))
    for run, of_run in zip(runs, constants):
        changed = [name for name, value in of_run.items() if value != constants[0].get(name)]
        if set(changed) - {"SEED", "OUTPUT_DIR", "RESUME"}:
            sys.exit(f"icl.py: {run} has other constants than {runs[0]}: {', '.join(changed)}")
    print_table(results)
    for path in pictures:
        draw(runs, path)


if __name__ == "__main__":
    if len(sys.argv) < 2 or {"-h", "--help"} & set(sys.argv):
        sys.exit(__doc__)
    main(*sys.argv[1:])
