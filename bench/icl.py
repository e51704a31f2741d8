"""Does GRPO help after RCE? Each fault of the source of rce/rce_icl.py alone, beside doing it right.

    python rce/rce_icl.py SEED=1 OUTPUT_DIR=/tmp/icl/d1       # and so on: runs of RCE, GRPO_EPOCHS=0
    python bench/icl.py /tmp/icl/d1 /tmp/icl/d2 /tmp/icl/d3   # about 5 minutes a run on one thread

Each run is copied with its constants, and its last policy of RCE goes on with EPOCHS of GRPO. The last policy
of RCE and that of GRPO are tested greedily on the test queries at SHOTS. Neither is chosen by validation,
which would hide what a variant does. Prints a table: mean, least and greatest over the runs, and the change
from RCE.
"""

import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
EPOCHS = 1
# A rate at which an epoch moves the policy: what is wrong then shows
MOVING = {"GRPO_LEARNING_RATE": 1e-3, "FREEZE": False}
VARIANTS = {  # constants, and names of the faults below
    "with the run's constants (defaults: lr 1e-4, FREEZE)": ({}, ()),
    "right, mined lists": (MOVING, ()),
    "right, fresh lists (ON_POLICY)": ({**MOVING, "ON_POLICY": True}, ()),
    "old log-probabilities from before RCE": (MOVING, ("before",)),
    "best five picked before normalising": (MOVING, ("five",)),
    "z-score never (raw rewards)": (MOVING, ("never",)),
    "z-score twice": (MOVING, ("twice",)),
    "dropout on": (MOVING, ("dropout",)),
    "old from before RCE, best five": (MOVING, ("before", "five")),
    "old from before RCE, best five, dropout": (MOVING, ("before", "five", "dropout")),
}


def load():
    spec = importlib.util.spec_from_file_location("rce_icl", ROOT / "rce/rce_icl.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def constants_of_run(folder, script):
    """Returns the constants of the run in a folder which the file still has, {name: value}. Those that say
    where and how a run starts are left out."""
    constants = json.loads((folder / "training_config.json").read_text())["constants"]
    found = {}
    for key in sorted(constants.keys() & script.constants().keys() - {"OUTPUT_DIR", "RESUME", "STAGE"}):
        is_tuple = isinstance(getattr(script, key), tuple)  # JSON has a list for it
        found[key] = tuple(constants[key]) if is_tuple else constants[key]
    return found


def make_trainer(script, faults):
    """A trainer with the source's faults that are named."""
    once = script.group_advantages

    def never(r):
        return torch.as_tensor(r, dtype=torch.float64)

    def twice(r):
        return once(once(r))

    script.group_advantages = {"never": never, "twice": twice}.get(next(iter(faults), ""), once)

    class Trainer(script.ICLTrainer):
        def begin_grpo(self):
            """Starts from RCE's last policy: it takes the place of best/, which begin_grpo() starts from."""
            self.run.save_best(self.run.evaluation)
            super().begin_grpo()

        def old_logprobs(self, batch, logprobs, ref_logprobs):
            if "before" not in faults:
                return super().old_logprobs(batch, logprobs, ref_logprobs)
            return script.pad_rows([[c["logprob"] for c in lists] for lists in batch.lists])

        def choose_rows(self, groups):
            super().choose_rows(groups)
            for row in self.train_rows if "five" in faults else ():
                best = np.argsort([-x for x in row["rewards"]], kind="stable")[:5]
                row["candidates"] = [row["candidates"][i] for i in best]
                row["rewards"] = [row["rewards"][i] for i in best]

        def grpo(self, batch, all_logprobs, logprobs, inputs):
            if "dropout" in faults:
                self.policy.train()
                all_logprobs = self.policy(*inputs)
                logprobs = script.list_logprobs(all_logprobs, batch.pointers)
            return super().grpo(batch, all_logprobs, logprobs, inputs)

        def test(self):
            queries = self.splits["test"]
            before = script.load_pointer(self.run.folder / "rce/policy", self.corpus.sizes)
            for name, policy in (("before", before), ("after", self.policy)):
                lists = self.pick(queries, script.SHOTS, policy)
                setattr(self, name, float(self.accuracy_of(queries, lists).mean()))

    return Trainer()


def main():
    found = {}
    for folder in map(Path, sys.argv[1:]):
        for name, (changed, faults) in VARIANTS.items():
            with tempfile.TemporaryDirectory() as out:
                shutil.copytree(folder, f"{out}/run", ignore=shutil.ignore_patterns("test_cand*", "*.png"))
                script = load()
                constants = {
                    **constants_of_run(folder, script),
                    "OUTPUT_DIR": f"{out}/run",
                    "RESUME": "yes",
                    "GRPO_EPOCHS": EPOCHS,
                    "ON_POLICY": False,
                    "SAVE_EVERY_N_STEPS": 0,
                    "EVAL_EVERY_N_STEPS": 0,
                    "USE_WANDB": False,
                    **changed,
                }
                for key, value in constants.items():
                    setattr(script, key, value)
                trainer = make_trainer(script, faults)
                trainer.run.log = lambda *text, **options: None
                trainer.train()
                found.setdefault(name, []).append((trainer.before, trainer.after))
                print(f"{folder} {name}: {trainer.before:.3f} -> {trainer.after:.3f}", flush=True)
    head = f"GRPO, {EPOCHS} epochs after RCE, {len(sys.argv) - 1} seeds"
    print(f"| {head} | RCE | + GRPO | change | least, greatest |")
    print("|---|---|---|---|---|")
    for name, pairs in found.items():
        before, after = np.array(pairs).T
        change = after - before
        ends = f"{change.min():+.3f}, {change.max():+.3f}"
        print(f"| {name} | {before.mean():.3f} | {after.mean():.3f} | {change.mean():+.3f} | {ends} |")


if __name__ == "__main__":
    main()
