"""Measures the figures that README.md and the trainers' pages show, except the seconds of a run, and writes
them to docs/results.json. bench/learning_curves.py measures ppo.seconds, grpo.seconds and rce.seconds.

    python bench/readme.py grpo 1 2 3 FOLDER=runs    # also ppo, rce
    python bench/readme.py grpo_rec 1 2 3 FOLDER=runs
    python bench/readme.py ppo_rag 0 1 2 3 4 FOLDER=runs    # the numbers are SPLIT_SEED's
    python bench/readme.py rce_icl 1 FOLDER=runs

It starts the default run once per seed, in FOLDER/<trainer>_<seed>; a run that is there is not repeated. Then
`python tools/results.py --write` puts the figures into the pages.

grpo also makes README's picture, docs/readme.png (sampled and greedy accuracy on the 200 held-out problems,
reward, length of the responses; lines are means over the seeds, bands the smallest and largest values), and
prints three problems with the answers before and after training. COMMIT=... and DATE=... belong to runs that
were made earlier.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from kept import run_once
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import results

SCRIPTS = {"ppo": "ppo/ppo.py", "grpo": "grpo/grpo.py", "rce": "rce/rce.py", "ppo_rag": "ppo/ppo_rag.py"}
SCRIPTS |= {"grpo_rec": "grpo/grpo_rec.py", "rce_icl": "rce/rce_icl.py"}
PANELS = [
    ("correct answers, held out", "eval", [("accuracy_sampled", "sampled"), ("accuracy_greedy", "greedy")]),
    ("reward, training", "train", [("reward", "each step")]),
    ("tokens per response", "train", [("response_length", "each step")]),
]


def run(name, constant, seed, folder):
    """Returns the folder of a default run, which is made unless it is there."""
    out = folder / f"{name}_{seed}"
    command = [sys.executable, ROOT / SCRIPTS[name], f"{constant}={seed}"]
    run_once(command, out, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return out


def read(folder, phase):
    lines = (folder / "logs/metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["phase"] == phase]


# ---------------------------------------------------------------- the figures of a run: {id: (value, unit)}


def curve_figures(folder):
    """Accuracy on the held-out problems at each evaluation."""
    figures = {}
    for record in read(folder, "eval"):
        for key in ("sampled", "greedy"):
            figures[f"{key}.{record['step']}"] = (record[f"accuracy_{key}"], "%")
    return figures


def rag_figures(folder):
    """Reward of the policy and of each rule on the test questions."""
    tested = json.loads((folder / "eval_test.json").read_text())
    return {name: (each["reward"], "") for name, each in tested.items() if "reward" in each}


def rec_figures(folder):
    """Reward, share of the best possible value, HR@10 and NDCG@10 on the test rows."""
    tested = json.loads((folder / "eval_test.json").read_text())
    figures = {}
    for name, each in tested.items():
        if isinstance(each, dict) and "intervals" in each:
            figures[f"{name}.reward"] = (each["reward"], "")
            figures[f"{name}.value"] = (each["reward/value"] / tested["possible"]["value"], "%")
            figures[f"{name}.hr"] = (each["hr@10"], "%")
            figures[f"{name}.ndcg"] = (each["ndcg@10"], "")
    return figures


def icl_figures(folder):
    """The reader's accuracy on the test questions, by method and number of shots."""
    tested = json.loads((folder / "eval_test.json").read_text())
    figures = {}
    for shots, each in tested["shots"].items():
        for method, accuracy in each["accuracy"].items():
            figures[f"{method.replace(', ', '_').replace(' ', '_')}.{shots}"] = (accuracy, "%")
    return figures


FIGURES = {"ppo": curve_figures, "grpo": curve_figures, "rce": curve_figures}
FIGURES |= {"ppo_rag": rag_figures, "grpo_rec": rec_figures, "rce_icl": icl_figures}


# ---------------------------------------------------------------- README's picture and example


def draw(folders, path):
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    for axis, (title, phase, metrics) in zip(figure.subplots(1, 3), PANELS):
        for key, label in metrics:
            runs = [read(folder, phase) for folder in folders]
            steps = [record["step"] for record in runs[0]]
            values = np.array([[record[key] for record in records] for records in runs])
            axis.plot(steps, values.mean(0), marker="o" if phase == "eval" else None, label=label)
            axis.fill_between(steps, values.min(0), values.max(0), alpha=0.25)
        axis.set_title(title, fontsize=14)
        axis.set_xlabel("step", fontsize=12)
        axis.tick_params(labelsize=12)
        axis.grid(alpha=0.3)
        if len(metrics) > 1:
            axis.legend(fontsize=12, loc="lower right")
            axis.set_ylim(0, 1)
    figure.suptitle(
        f"grpo.py at its defaults: line, mean of {len(folders)} seeds; band, their range", fontsize=14
    )
    figure.savefig(path, dpi=100)


def answers(policy, out):
    """The records of STAGE=evaluate, one per held-out problem."""
    command = [sys.executable, ROOT / "grpo/grpo.py", "STAGE=evaluate", f"EVALUATE_POLICY={policy}"]
    command += [f"OUTPUT_DIR={out}", "EVALUATE_SAMPLES=4", "MAX_EVAL_PROMPTS=40"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    file = max(out.glob("eval_*.jsonl"), key=lambda path: path.stat().st_mtime)
    return [json.loads(line) for line in file.read_text().splitlines()]


def show_answers(folder, trained):
    before = answers(ROOT / "data/tiny/policy", folder / "before")
    after = answers(trained / "best/policy", folder / "after")
    for first, last in list(zip(before, after))[:3]:
        print("\n" + first["prompt"], "  answer", first["answer"])
        print("before:", first["sampled"][0].replace("\n", " "))
        print("after: ", last["sampled"][0].replace("\n", " "))


def main():
    words = [word for word in sys.argv[2:] if "=" not in word]
    options = dict(word.split("=", 1) for word in sys.argv[2:] if "=" in word)
    if not words or sys.argv[1] not in SCRIPTS or not all(word.isdecimal() for word in words):
        sys.exit(__doc__)
    name = sys.argv[1]
    folder = Path(options.get("FOLDER") or tempfile.mkdtemp())
    constant = "SPLIT_SEED" if name == "ppo_rag" else "SEED"
    folders = [run(name, constant, seed, folder) for seed in words]
    known = {"commit": options.get("COMMIT"), "date": options.get("DATE")}
    command = f"python bench/readme.py {name} {' '.join(words)}"
    found = [FIGURES[name](out) for out in folders]
    for key, (_, unit) in found[0].items():
        values = [figures[key][0] for figures in found]
        results.record(f"{name}.{key}", values, unit, f"{constant} {', '.join(words)}", command, **known)
        print(f"{name}.{key}", *(round(value, 4) for value in values))
    if name == "grpo":
        draw(folders, ROOT / "docs/readme.png")
        show_answers(folder, folders[0])


if __name__ == "__main__":
    main()
