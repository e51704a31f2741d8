"""The path from preferences to a policy on the shipped world, for several seeds: SFT, reward model, DPO, and
PPO on the reward model with and without a KL penalty. Prints the held-out evaluations of each run and draws
PPO's as checkpoints/preferences/preferences.png. Some 12 minutes of one core per seed; a run that is there is
not repeated.

    python bench/preferences.py 1 2 3
"""

import json
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "checkpoints/preferences"
KL_COEFS = {"KL_COEF = 0.1": 0.1, "no KL penalty": 1e-6}  # 1e-6: none, but the KL is logged


def runs_of(seed):
    """Returns {folder: command words} of one seed, in the order in which they need each other."""
    policy, reward_model = OUT / f"sft_{seed}/best/policy", OUT / f"rm_{seed}/best/reward_model"
    runs = {
        f"sft_{seed}": ["ppo/sft.py"],
        f"rm_{seed}": ["ppo/reward_model.py"],
        f"dpo_{seed}": ["rce/dpo.py"],
        f"sft_dpo_{seed}": ["rce/dpo.py", f"ACTOR_MODEL={policy}"],
    }
    for kl_coef in KL_COEFS.values():
        words = ["ppo/ppo.py", f"ACTOR_MODEL={policy}", f"REWARD_MODEL={reward_model}", f"KL_COEF={kl_coef}"]
        words += ["REWARD_FUNCTIONS=[]", "REWARD_MODEL_WEIGHT=1.0", "MAX_STEPS=45", "EVAL_EVERY_N_STEPS=15"]
        runs[f"ppo_{kl_coef}_{seed}"] = [*words, "SAVE_EVERY_N_STEPS=0"]
    return runs


def evaluations(folder):
    """Returns the held-out evaluations of a run, and the KL of the training step at each."""
    records = [json.loads(line) for line in (OUT / folder / "logs/metrics.jsonl").read_text().splitlines()]
    kl = {record["step"]: record.get("kl") for record in records if record["phase"] == "train"}
    return [{**r, "kl": kl.get(r["step"])} for r in records if r["phase"] == "eval"]


def draw(seeds):
    figure = Figure(figsize=(8.5, 3.4), layout="tight")
    figure.suptitle("PPO on a learned reward model, one line per seed", fontsize=10)
    labels = {"accuracy_sampled": "true accuracy, sampled (200 held-out problems)"}
    labels["reward"] = "score of the learned reward model"
    for place, (key, y_label) in enumerate(labels.items(), 1):
        axis = figure.add_subplot(1, 2, place, xlabel="training step of PPO")
        axis.set_ylabel(y_label, fontsize=8)
        axis.grid(alpha=0.3)
        for color, (label, kl_coef) in zip(("C0", "C3"), KL_COEFS.items()):
            for seed in seeds:
                points = [(r["step"], r[key]) for r in evaluations(f"ppo_{kl_coef}_{seed}")]
                axis.plot(*zip(*points), "o-", color=color, markersize=4, linewidth=1, label=label)
                label = None
        axis.legend(fontsize=8)
    figure.axes[0].set_ylim(0, 1)
    figure.savefig(OUT / "preferences.png", dpi=100)


def main(seeds):
    for seed in seeds:
        for folder, words in runs_of(seed).items():
            if not (OUT / folder / "best").exists():
                command = [sys.executable, *words, f"SEED={seed}", f"OUTPUT_DIR={OUT / folder}", "RESUME=no"]
                subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            for record in evaluations(folder):
                figures = {
                    key: x for key, x in record.items() if isinstance(x, float) and "second" not in key
                }
                texts = [f"{key} {x:.3f}" for key, x in figures.items()]
                print(f"{folder:18} step {record['step']:3}  " + "  ".join(texts), flush=True)
    draw(seeds)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [1, 2, 3])
