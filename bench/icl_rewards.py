"""By which reward rce/rce_icl.py learns best: mode, weights, raw or z-scored, InfoScore. On validation
questions.

    python bench/icl_rewards.py 1 2 3 [OUT=folder] [KEY=VALUE ...]      # rce_icl.py's constants

The default data, with 1,000 questions mined once per seed unless MINE_QUERIES says otherwise; then RCE on
those lists by each reward. The policy begins as similarity and has neither rule nor classifier
(CLASSIFIER_C=0), so what it has over similarity it has from the reward. Prints the reader's accuracy after
the last policy's picks, mean over 1 .. SHOTS, with the gain over similarity. OUT keeps results.jsonl and the
lists; what is in it is not run again. An OUT that was made with other KEY=VALUE words is refused.

Runs use one thread unless OMP_NUM_THREADS is set: tests/old.py, which is imported here, sets it to 1.
"""

import contextlib
import io
import sys
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from old import load_script
from kept import append_result, read_results

PURE = {"REWARD_MODE": "hybrid", "HYBRID_MIX_SCORE": "infoscore"}
REWARDS = {
    "hard_only": {"REWARD_MODE": "hard_only"},
    "hard_plus_gtprob": {"REWARD_MODE": "hard_plus_gtprob"},
    "hard_plus_gtprob_separated": {"REWARD_MODE": "hard_plus_gtprob_separated"},
    "the same, SOFT_WEIGHT 3": {"REWARD_MODE": "hard_plus_gtprob_separated", "SOFT_WEIGHT": 3.0},
    "the same, HARD_WEIGHT 3": {"REWARD_MODE": "hard_plus_gtprob_separated", "HARD_WEIGHT": 3.0},
    "the same, HARD_WEIGHT 0 (gt_prob alone)": {"REWARD_MODE": "hard_plus_gtprob", "HARD_WEIGHT": 0.0},
    "hybrid of InfoScore and hard, half each": PURE,
    "InfoScore alone": {**PURE, "HYBRID_ALPHA": 1.0},
}


def trainer_of(words, seed, folder, **constants):
    """Returns rce_icl.py's trainer with these constants. It begins as similarity and has no test."""
    script = load_script("rce/rce_icl.py", CLASSIFIER_C=0.0, MINE_QUERIES=1000, TEST_QUERIES=1)
    script.apply_overrides(words)
    for key, value in {"SEED": seed, "OUTPUT_DIR": str(folder), "RESUME": "no", **constants}.items():
        setattr(script, key, value)

    class Trainer(script.ICLTrainer):
        def begin_with_a_rule(self):
            """Stays similarity."""

        def test(self):
            """Not needed."""

        def train_stage(self):
            queries = self.splits["validation"]
            script.EVAL_EVERY_N_STEPS = 0
            super().train_stage()
            accuracies = self.mean_accuracy(queries, partial(self.pick, queries))
            rule = self.mean_accuracy(queries, partial(script.rule_lists, self, queries, "similarity", 0))
            self.found = {"accuracy": accuracies.mean(), "similarity": rule.mean()}

    return Trainer()


def main(words):
    seeds = [int(word) for word in words if word.isdecimal()]
    if not seeds:
        sys.exit(__doc__)
    options = [word for word in words if not word.isdecimal()]
    out = Path(next((word[4:] for word in options if word.startswith("OUT=")), "checkpoints/icl_rewards"))
    options = [word for word in options if not word.startswith("OUT=")]
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    found = {}
    for line in read_results(results, options):
        found[line["reward"], line["weights"], line["seed"]] = line
    print("| reward | WEIGHT_REWARDS | accuracy | over similarity, by seed |\n|---|---|---|---|")
    for name, constants in REWARDS.items():
        for weights in ("raw", "zscore"):
            lines = []
            for seed in seeds:
                if (name, weights, seed) not in found:
                    folder = out / f"seed_{seed}"
                    with contextlib.redirect_stdout(io.StringIO()):
                        if not (folder / "candidates.json").exists():
                            trainer_of(options, seed, folder, STAGE="mine", RESUME="yes").train()
                        settings = {**constants, "WEIGHT_REWARDS": weights, "STAGE": "train"}
                        trainer = trainer_of(options, seed, folder, **settings)
                        trainer.train()
                    if trainer.run.stop_signal:  # by Ctrl-C or a time limit: half a run is no figure
                        sys.exit("stopped; what is in results.jsonl is not run again")
                    line = {"reward": name, "weights": weights, "seed": seed, **trainer.found}
                    found[name, weights, seed] = line
                    append_result(results, options, line)
                lines.append(found[name, weights, seed])
            accuracy = np.mean([line["accuracy"] for line in lines])
            gains = ", ".join(f"{line['accuracy'] - line['similarity']:+.3f}" for line in lines)
            print(f"| {name} | {weights} | {accuracy:.3f} | {gains} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
