"""Makes what README shows of GRPO's default run: docs/readme.png, and a problem's answers before and after.

    python bench/readme.py 1 2 3 [FOLDER=/tmp/readme]    # seeds; runs that are there already are not repeated

The picture: sampled and greedy accuracy on the 200 held-out problems, reward of training, length of the
responses. Lines are means over the seeds, bands the least and the greatest of them.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
PANELS = [
    ("correct answers, held out", "eval", [("accuracy_sampled", "sampled"), ("accuracy_greedy", "greedy")]),
    ("reward, training", "train", [("reward", "each step")]),
    ("tokens per response", "train", [("response_length", "each step")]),
]


def run(seed, folder):
    """The folder of a default run, which is made unless it is there."""
    out = folder / f"seed_{seed}"
    if not (out / "best/policy").exists():
        command = [sys.executable, ROOT / "grpo/grpo.py", f"SEED={seed}", f"OUTPUT_DIR={out}", "RESUME=no"]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return out


def read(folder, phase):
    lines = (folder / "logs/metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["phase"] == phase]


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
    figure.suptitle(f"grpo.py at its defaults, mean and range of {len(folders)} seeds", fontsize=14)
    figure.savefig(path, dpi=100)


def answers(policy, out):
    """The records of STAGE=evaluate, one per held-out problem."""
    command = [sys.executable, ROOT / "grpo/grpo.py", "STAGE=evaluate", f"EVALUATE_POLICY={policy}"]
    command += [f"OUTPUT_DIR={out}", "EVALUATE_SAMPLES=4", "MAX_EVAL_PROMPTS=40"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    (file,) = out.glob("eval_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def main():
    folder = Path(next((word[7:] for word in sys.argv if word.startswith("FOLDER=")), tempfile.mkdtemp()))
    seeds = [int(word) for word in sys.argv[1:] if word.isdecimal()] or [1, 2, 3]
    folders = [run(seed, folder) for seed in seeds]
    draw(folders, ROOT / "docs/readme.png")
    for key in ("accuracy_sampled", "accuracy_greedy"):
        values = np.array([[record[key] for record in read(out, "eval")] for out in folders])
        print(
            key, "before", values[:, 0].mean().round(3), "after", values[:, -1].mean().round(3), values[:, -1]
        )
    before = answers(ROOT / "data/tiny/policy", folder / "before")
    after = answers(folders[0] / "best/policy", folder / "after")
    for first, last in list(zip(before, after))[:3]:
        print("\n" + first["prompt"], "  answer", first["answer"])
        print("before:", first["sampled"][0].replace("\n", " "))
        print("after: ", last["sampled"][0].replace("\n", " "))


if __name__ == "__main__":
    main()
