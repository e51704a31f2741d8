"""What TEMPERATURE and GROUP_SIZE do to GRPO of grpo/grpo_rec.py. Figures on validation rows, by seed.

    python bench/rec_exploration.py 1 2 3 [OUT=folder] [KEY=VALUE ...]      # grpo_rec.py's constants

SFT once per seed; then MAX_STEPS of GRPO from its policy for each cell, all else as the constants are. All
cells are evaluated alike: reward of the 16 likeliest items, and of 16 samples at temperature 1. OUT keeps the
SFT policies and results.jsonl; cells that are in it are not run again. An OUT that was made with other
KEY=VALUE words is refused.

Runs use one thread unless OMP_NUM_THREADS is set: tests/old.py, which is imported here, sets it to 1.
"""

import contextlib
import io
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from old import load_script
from kept import append_result, read_results

FIGURES = ("reward", "reward_sampled", "ndcg@10", "coverage@10")
CELLS = [("sample", t, g) for t in (0.5, 1.0, 2.0) for g in (4, 16, 48)]
CELLS += [("beam", t, g) for t, g in ((1.0, 4), (1.0, 16), (1.0, 48), (0.5, 16), (2.0, 16))]


def load(words, **constants):
    """Returns grpo_rec.py with the command's words and these constants, and its trainer without a test."""
    script = load_script("grpo/grpo_rec.py")
    script.apply_overrides(words)
    fixed = {"TEST_FILE": None, "SASREC_FILE": None, "SAVE_EVERY_N_STEPS": 0, "EVAL_EVERY_N_STEPS": 0}
    for key, value in {**fixed, "RESUME": "no", **constants}.items():
        setattr(script, key, value)

    class Trainer(script.RecTrainer):
        def prepare_baselines(self):
            """They are not compared here."""

        def compare_with_baselines(self):
            """They are not compared here."""

        def evaluate(self, rows=None):
            used = script.GROUP_SIZE, script.TEMPERATURE
            script.GROUP_SIZE, script.TEMPERATURE = 16, 1.0
            figures = super().evaluate(rows)
            script.GROUP_SIZE, script.TEMPERATURE = used
            return figures

    return Trainer()


def figures_of(seed, cell, out, words):
    """Returns the figures after MAX_STEPS of a cell; of the SFT policy if cell is None."""
    sft = out / f"sft_{seed}"
    if not (sft / "sft/policy").exists():
        load(words, STAGE="sft", SEED=seed, OUTPUT_DIR=str(sft)).train()
    with tempfile.TemporaryDirectory() as folder:
        constants = {
            "STAGE": "rl",
            "SEED": seed,
            "OUTPUT_DIR": folder,
            "ACTOR_MODEL": str(sft / "sft/policy"),
        }
        if cell is None:
            return load(words, **constants).evaluate()
        names = ("CANDIDATES", "TEMPERATURE", "GROUP_SIZE")
        trainer = load(words, **constants, **dict(zip(names, cell)))
        figures = trainer.train()
        if trainer.run.stop_signal:  # by Ctrl-C or a time limit: half a run is no figure
            sys.exit("stopped; what is in results.jsonl is not run again")
        return figures


def main(words):
    seeds = [int(word) for word in words if word.isdecimal()]
    if not seeds:
        sys.exit(__doc__)
    options = [word for word in words if not word.isdecimal()]
    out = Path(next((word[4:] for word in options if word.startswith("OUT=")), "checkpoints/rec_exploration"))
    options = [word for word in options if not word.startswith("OUT=")]
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    found = {}
    for line in read_results(results, options):
        found[line["seed"], line["cell"]] = line["figures"]
    print("| candidates, TEMPERATURE, GROUP_SIZE | " + " | ".join(FIGURES) + " |")
    print("|---|" + "---|" * len(FIGURES))
    for cell in [None, *CELLS]:
        name = "SFT" if cell is None else "{}, {}, {}".format(*cell)
        for seed in seeds:
            if (seed, name) not in found:
                with contextlib.redirect_stdout(io.StringIO()):
                    figures = figures_of(seed, cell, out, options)
                found[seed, name] = {key: figures[key] for key in FIGURES}
                line = {"seed": seed, "cell": name, "figures": found[seed, name]}
                append_result(results, options, line)
        cells = []
        for key in FIGURES:
            values = np.array([found[seed, name][key] for seed in seeds])
            cells.append(f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f})")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
