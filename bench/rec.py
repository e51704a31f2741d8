"""Figures of grpo/grpo_rec.py: the tables of docs/grpo_rec.md.

    python bench/rec.py default 1 2 3              # default runs, test rows: smallest to largest of the seeds
    python bench/rec.py weight 1 2 3               # what RULE_WEIGHT, KL_COEF and SCALE_REWARDS do
    python bench/rec.py exploration 1 2 3          # what CANDIDATES, TEMPERATURE and GROUP_SIZE do
    python bench/rec.py decoding                   # the constrained search beside transformers' generate

KEY=VALUE arguments, which follow the seeds, are grpo_rec.py's. `weight` and `exploration` run SFT once per
seed, and for each line GRPO from its policy. They score 1,500 validation and 1,500 test rows that
data/make_rec.py draws from the shipped world, of users that no file has: the 500 shipped rows are too few for
a difference of 0.003. A line has GRPO minus SFT: the mean of the seeds and half of one seed's 95% interval.
"""

import contextlib
import importlib.util
import io
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "checkpoints/bench_rec"
FIGURES = ("hr@10", "ndcg@10", "reward/value")
GRIDS = {
    "weight": [
        {"SCALE_REWARDS": scale, "KL_COEF": kl, "RULE_WEIGHT": rule, "RANKING_WEIGHT": ranking}
        for scale, kl, rule, ranking in (
            ("none", 1.5, 1.0, 0.0),
            ("none", 1.5, 0.0, 0.0),
            ("none", 1.5, 10.0, 0.0),
            ("none", 2.5, 1.0, 0.0),
            ("none", 1.0, 1.0, 0.0),
            ("group", 2.5, 1.0, 0.0),
            ("none", 1.5, 3.0, 0.0),
            ("none", 1.5, 0.0, 3.0),
        )
    ],
    "exploration": [
        {"CANDIDATES": candidates, "TEMPERATURE": temperature, "GROUP_SIZE": size}
        for candidates, temperature, size in (
            ("beam", 1.0, 4),
            ("beam", 1.0, 16),
            ("beam", 1.0, 48),
            ("beam", 0.5, 16),
            ("beam", 2.0, 16),
            ("sample", 1.0, 4),
            ("sample", 1.0, 16),
            ("sample", 1.0, 48),
            ("sample", 0.5, 16),
            ("sample", 2.0, 16),
        )
    ],
}


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(arguments, **constants):
    """Returns a trainer that has been trained, and its module."""
    rec = load("grpo/grpo_rec.py", "grpo_rec")
    rec.apply_overrides(arguments)
    vars(rec).update(RESUME="no", **constants)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = rec.RecTrainer()
        trainer.train()
    if trainer.run.signal:
        sys.exit("stopped")
    return trainer, rec


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


def grid(cells, seeds, arguments):
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
    for cell in cells:
        means, errors = [], []
        for seed in seeds:
            places = {"ACTOR_MODEL": str(OUT / f"sft_{seed}/sft/policy"), "OUTPUT_DIR": str(OUT / "cell")}
            trainer, rec = train(arguments, SEED=seed, **places, **fixed, **cell)
            vars(rec).update(GROUP_SIZE=16, TEMPERATURE=1.0)  # all cells are scored alike
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
        label = ", ".join(f"{key}={value}" for key, value in cell.items())
        print(f"| {label} | " + " | ".join(texts) + " |", flush=True)


def decoding():
    """Times beam search over 3,686 random items of three codes, for 32 prompts of 30 tokens, and compares it
    with transformers' generate(prefix_allowed_tokens_fn=...), which looks at one beam after the other."""
    import transformers

    rec = load("grpo/grpo_rec.py", "grpo_rec")
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([48, 256, 256])
    codes = (torch.rand(8000, 3, generator=generator) * sizes).long() + torch.tensor([0, 48, 304])
    codes = codes.unique(dim=0)
    codes = codes[torch.randperm(len(codes), generator=generator)[:3686]]
    allowed = {}
    for item in codes.tolist():
        for level, code in enumerate(item):
            allowed.setdefault(tuple(item[:level]), set()).add(code)
    allowed = {prefix: sorted(children) for prefix, children in allowed.items()}
    prompts = codes[torch.randint(len(codes), (32, 10), generator=generator)].flatten(1)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=560, **shape)).eval()
    trie = rec.Trie(codes, "cpu")
    for beams in (16, 50):
        rec.search(model, trie, prompts.tolist(), beams, False)  # warm-up
        started = time.perf_counter()
        items, _ = rec.search(model, trie, prompts.tolist(), beams, False)
        searched = time.perf_counter()
        ids = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            num_beams=beams,
            num_return_sequences=beams,
            max_new_tokens=3,
            do_sample=False,
            renormalize_logits=True,
            pad_token_id=0,
            eos_token_id=None,
            prefix_allowed_tokens_fn=lambda row, ids: allowed[tuple(ids[30:].tolist())],
        )
        generated = time.perf_counter()
        equal = (ids[:, 30:].view(32, beams, 3) == codes[items]).all(-1).float().mean().item()
        seconds = f"{searched - started:.3f} s, generate {generated - searched:.3f} s"
        print(f"{beams} beams: {seconds}; {100 * equal:.1f}% of the places have the same item")


def main(words):
    seeds = [int(word) for word in words if word.isdecimal()]
    arguments = [word for word in words[1:] if "=" in word]
    OUT.mkdir(parents=True, exist_ok=True)
    if words[:1] == ["decoding"]:
        decoding()
    elif words[:1] == ["default"] and seeds:
        default_runs(seeds, arguments)
    elif words and words[0] in GRIDS and seeds:
        grid(GRIDS[words[0]], seeds, arguments)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
