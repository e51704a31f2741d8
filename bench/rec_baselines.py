"""What rules reach that never see the reward, on the rows of grpo/grpo_rec.py, without training anything.

    python bench/rec_baselines.py                          # the made catalogue
    python bench/rec_baselines.py TRAIN_FILE=... INDEX_FILE=... VALUES_FILE=None      # grpo_rec.py's words

Beside the baselines of grpo_rec.py's table: counts that know of the exposure bias, the scores of "counts"
divided by the item's popularity to a power. Every power is shown, none is chosen.
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "data"))
from sasrec import run

POWERS = (0.25, 0.5, 0.75, 1.0)


class Debiased:
    def __init__(self, counts, popularity, power):
        self.counts = counts
        self.price = (1 + popularity) ** power

    def scores(self, histories):
        return self.counts.scores(histories) / self.price


def paths_of(rec, catalogue):
    """The node of each item on each level of codes, (items, depth + 1)."""
    number = {code: n for n, code in enumerate(sorted({code for codes in catalogue.codes for code in codes}))}
    codes = torch.tensor([[number[code] for code in codes] for codes in catalogue.codes])
    return rec.Trie(codes, torch.device("cpu")).paths


def value_of(rec, values, lists, rows):
    """Mean value of the GROUP_SIZE first items."""
    found = []
    for some, row in zip(lists[:, : rec.GROUP_SIZE].tolist(), rows):
        found += [rec.history_value(values, row["history"], item, rec.VALUE_DECAY) for item in some]
    return sum(found) / len(found)


def main(rec, words):
    rec.apply_overrides(words)
    rec.check_constants()
    catalogue = rec.Catalogue(print)
    train_rows, valid_rows, test_rows = rec.load_splits(catalogue, print)
    paths = paths_of(rec, catalogue)
    counts = rec.best_counts(train_rows, paths, valid_rows)
    popularity = torch.tensor([row["target"] for row in train_rows]).bincount(minlength=len(paths)).double()
    models = {
        "popularity": rec.Counts(train_rows, paths[:, :1]),
        "markov": rec.Counts(train_rows, paths[:, [0, -1]]),
        "counts": counts,
        **{f"counts / popularity^{x:g}": Debiased(counts, popularity, x) for x in POWERS},
    }
    sasrec = rec.read_sasrec(train_rows, [*valid_rows, *test_rows], print)
    if sasrec:
        models["sasrec"] = sasrec
    values = None
    if rec.VALUES_FILE:
        values = rec.read_array(rec.VALUES_FILE, "VALUES_FILE", catalogue, square=True)
    print(f"counts: smoothing {counts.smoothing}, decay {counts.decay}, by NDCG@10 on validation")
    for split, rows in (("validation", valid_rows), ("test", test_rows)):
        if not rows:  # TEST_FILE=None
            continue
        for name, model in models.items():
            lists = rec.top_items(model, rows)
            figures = {f"HR@{k}": rec.hits(lists, rows, k).mean() for k in (10, 20)}
            figures["NDCG@10"] = rec.gains(lists, rows, 10).mean()
            if values is not None:
                figures["value"] = value_of(rec, values, lists, rows)
            line = "  ".join(f"{key} {float(x):.4f}" for key, x in figures.items())
            print(f"{split:10}  {name:24}  {line}")


if __name__ == "__main__":
    run(main, sys.argv[1:])
