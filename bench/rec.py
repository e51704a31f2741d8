"""Figures of grpo/grpo_rec.py: the tables of docs/grpo_rec.md.

    python bench/rec.py default 1 2 3      # default runs, test rows: smallest to largest of the seeds
    python bench/rec.py weight 1 2 3       # what KL_COEF and RULE_WEIGHT trade

KEY=VALUE arguments, which follow the seeds, are grpo_rec.py's. `weight` runs SFT once per seed, and for each
line GRPO from its policy. It scores 1,500 validation and 1,500 test rows that data/make_rec.py draws from the
shipped world, of users that no file has: the 500 shipped rows are too few for a difference of 0.003. A line
has GRPO minus SFT: the mean of the seeds and half of one seed's 95% interval.
"""

import contextlib
import importlib.util
import io
import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "checkpoints/bench_rec"
FIGURES = ("hr@10", "ndcg@10", "reward/value")
CELLS = [  # KL_COEF, RULE_WEIGHT
    (1.5, 0.0),
    (1.5, 1.0),
    (1.5, 10.0),
    (1.0, 1.0),
    (2.5, 1.0),
]


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(arguments, **constants):
    """Returns a trainer that has been trained."""
    rec = load("grpo/grpo_rec.py", "grpo_rec")
    rec.apply_overrides(arguments)
    vars(rec).update(RESUME="no", **constants)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = rec.RecTrainer()
        trainer.train()
    if trainer.run.signal:
        sys.exit("stopped")
    return trainer


def draw_rows():
    """Returns validation and test rows of new users of the shipped world."""
    make_rec = load("data/make_rec.py", "make_rec")
    fits, _, exposure = make_rec.build_world(np.random.default_rng(make_rec.SEED))
    splits = {}
    for split, seed in (("validation", 101), ("test", 102)):
        pairs = make_rec.make_histories(np.random.default_rng(seed), fits, exposure, 1500)
        splits[split] = [{"history": history, "target": target} for history, target in pairs]
    return splits


def score(trainer, model, rows):
    """Returns figures of each row, {name: (rows,)}, of the model's best items."""
    for row in rows:
        row["ids"] = trainer.prompt(row["history"])
    lists, _ = trainer.search_rows(model, rows, 50)
    return trainer.list_figures(lists, rows)


def default_runs(seeds, arguments):
    tables = []
    for seed in seeds:
        folder = OUT / f"default_{seed}"
        train(arguments, SEED=seed, OUTPUT_DIR=str(folder))
        tables.append(json.loads((folder / "eval_test.json").read_text()))
    names = ("reward", *FIGURES)
    print("| | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1))
    for method in tables[0]:
        cells = []
        for name in names:
            values = [table[method].get(name, np.nan) for table in tables]
            cells.append(f"{min(values):.3f} to {max(values):.3f}")
        print(f"| {method} | " + " | ".join(cells) + " |")
    for seed, table in zip(seeds, tables):
        gains = table["grpo - sft"]
        texts = [f"{name} {gains[name]:+.4f} ±{gains[f'{name} +-']:.4f}" for name in names]
        print(f"seed {seed}, grpo - sft: " + ", ".join(texts))


def print_weights(seeds, arguments):
    """Prints a line per cell: what GRPO adds to SFT, on validation and on test rows."""
    splits = draw_rows()
    for seed in seeds:
        folder = OUT / f"sft_{seed}"
        if not (folder / "eval_test.json").exists():
            train(arguments, SEED=seed, OUTPUT_DIR=str(folder), MAX_STEPS=0)
    names = [f"{split} {name}" for split in splits for name in FIGURES]
    print("| | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1))
    before = {}  # SFT's figures
    fixed = {"SFT_EPOCHS": 0, "TEST_FILE": None, "MAX_EVAL_ROWS": 50, "EVAL_EVERY_N_STEPS": 0}
    for kl_coef, rule_weight in CELLS:
        cell = {"KL_COEF": kl_coef, "RULE_WEIGHT": rule_weight}
        means, errors = [], []
        for seed in seeds:
            places = {"ACTOR_MODEL": str(OUT / f"sft_{seed}/sft/policy"), "OUTPUT_DIR": str(OUT / "cell")}
            trainer = train(arguments, SEED=seed, **places, **fixed, **cell)
            for split, rows in splits.items():
                if (seed, split) not in before:
                    before[seed, split] = score(trainer, trainer.reference, rows)
                after = score(trainer, trainer.actor, rows)
                for name in FIGURES:
                    gains = after[name] - before[seed, split][name]
                    means.append(gains.mean().item())
                    errors.append(1.96 * gains.std().item() / len(rows) ** 0.5)
        means = np.array(means).reshape(len(seeds), -1).mean(0)
        errors = np.array(errors).reshape(len(seeds), -1).mean(0)
        texts = [f"{mean:+.4f} (±{error:.4f})" for mean, error in zip(means, errors)]
        print(f"| KL_COEF={kl_coef}, RULE_WEIGHT={rule_weight} | " + " | ".join(texts) + " |", flush=True)


def main(words):
    seeds = [int(word) for word in words if word.isdecimal()]
    programs = {"default": default_runs, "weight": print_weights}
    if not seeds or words[0] not in programs:
        sys.exit(__doc__)
    OUT.mkdir(parents=True, exist_ok=True)
    programs[words[0]](seeds, [word for word in words if "=" in word])


if __name__ == "__main__":
    main(sys.argv[1:])
