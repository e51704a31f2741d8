"""Rebuilds data/rec/, the catalogue and histories of grpo/grpo_rec.py's default run, from a seed.

    python data/make_rec.py                    # data/rec/
    python data/make_rec.py /tmp/shop 8        # the shop of another seed

The shop has 576 items: 16 departments, in each 6 brands, of each 6 variants. An item's codes are department,
brand, variant. Four departments are a hall, and a brand is sold in one hall only.

Each user belongs to one of 6 camps, which no file names. In each hall one brand belongs to each camp. What a
user takes next depends on the camp and on the department of the last item *together*,

    P(i | camp, last) = P(department | camp, last department) P(brand | camp) P(variant | camp)

Each camp has 3 departments that may follow each one, with probabilities FOLLOWS. LOYALTY is the share of the
brand of the user's camp; the other brands share the rest. A camp likes half of the variants and takes them
TASTE times as often as the others. So one item says little about a user, who may have taken the brand of
another camp. Several items say what the camp is, to a reader who has learnt which brands go together.

What is returned is not in the log. A user keeps brands of the own camp, in variants that it likes. As far as
the history h tells, an item's value is

    value(h, i) = share of i's camp among the items of h, if that camp likes the variant; else 0

Files: train.csv, valid.csv, test.csv (a row per user; each user is in one file), index.json {item: codes},
items.txt (codes, title and item, tab between), values.npy (items, items), in the order of index.json: 1 if
the second item is of the first one's camp, in a variant that this camp likes.
"""

import csv
import json
import sys
from pathlib import Path

import numpy as np

SEED = 7
USERS = {"train": 2000, "valid": 500, "test": 2000}
LONGEST = 10  # items in a history
HALLS = {  # departments: brands
    "pan kettle knife bowl": "Aldo Bern Corva Dunn Elis Fenn",
    "spade hose pot rake": "Garo Hale Ivon Jute Kolm Lark",
    "racket mat glove net": "Mavi Nord Orlo Pell Quil Rusk",
    "bag pillow lock map": "Sable Tarn Ulm Vero Wick Xeno",
}
VARIANTS = "small large red blue plain classic".split()
CAMPS = 6  # as many as a hall has brands, and a brand variants
LIKED = (0, 1, 3)  # variants that the first camp likes; each next camp likes those one further
FOLLOWS = (0.5, 0.3, 0.2)
LOYALTY = 0.6
TASTE = 2.0
NOISE = 0.1  # share of the departments that are taken by chance
DEPARTMENTS = " ".join(HALLS).split()
BRANDS = " ".join(HALLS.values()).split()


def build_world(rng):
    """Returns the items' codes (items, 3), P(item | camp, department of the last item), (camps, departments,
    items), and values (items, items)."""
    department, brand, variant = np.indices((len(DEPARTMENTS), CAMPS, len(VARIANTS))).reshape(3, -1)
    brand += department * len(HALLS) // len(DEPARTMENTS) * CAMPS
    camp = rng.permuted(np.tile(np.arange(CAMPS), (len(HALLS), 1)), axis=1).flatten()[brand]
    likes = np.isin((np.arange(CAMPS) - np.arange(CAMPS)[:, None]) % CAMPS, LIKED)  # (camps, variants)
    follows = np.full((CAMPS, len(DEPARTMENTS), len(DEPARTMENTS)), NOISE / len(DEPARTMENTS))
    for chain in follows:
        for last, row in enumerate(chain):
            others = rng.permutation(np.delete(np.arange(len(row)), last))[: len(FOLLOWS)]
            row[others] += (1 - NOISE) * np.array(FOLLOWS)
    is_own = camp == np.arange(CAMPS)[:, None]  # (camps, items)
    chosen = np.where(is_own, LOYALTY, (1 - LOYALTY) / (CAMPS - 1)) * np.where(likes[:, variant], TASTE, 1.0)
    chosen /= len(VARIANTS) * (1 + TASTE) / 2  # P(brand, variant | camp, department)
    values = likes[camp, variant] * (camp[:, None] == camp)
    return np.stack([department, brand, variant], 1), follows[:, :, department] * chosen[:, None], values


def make_histories(rng, codes, probabilities, users):
    rows = []
    for _ in range(users):
        of_camp = probabilities[rng.integers(CAMPS)]
        sequence = [int(rng.choice(len(codes), p=of_camp.mean(0)))]
        for _ in range(rng.integers(4, LONGEST + 1)):
            sequence.append(int(rng.choice(len(codes), p=of_camp[codes[sequence[-1], 0]])))
        rows.append((sequence[:-1], sequence[-1]))
    return rows


def write_csv(path, *rows):
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def main(folder, seed=SEED):
    rng = np.random.default_rng(seed)
    codes, probabilities, values = build_world(rng)
    folder.mkdir(parents=True, exist_ok=True)
    index = {}
    lines = []
    for item, (department, brand, variant) in enumerate(codes):
        index[str(item)] = [f"<a_{department}>", f"<b_{brand}>", f"<c_{variant}>"]
        title = f"{VARIANTS[variant]} {DEPARTMENTS[department]}, {BRANDS[brand]}"
        lines.append(f"{''.join(index[str(item)])}\t{title}\t{item}\n")
    (folder / "index.json").write_text(json.dumps(index) + "\n")
    (folder / "items.txt").write_text("".join(lines))
    np.save(folder / "values.npy", values.astype(np.uint8))
    for split, users in USERS.items():
        histories = enumerate(make_histories(rng, codes, probabilities, users))
        rows = [(f"{split}{user}", history, target) for user, (history, target) in histories]
        write_csv(folder / f"{split}.csv", ("user_id", "history_item_id", "item_id"), *rows)


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else Path(__file__).parent / "rec"), *map(int, sys.argv[2:]))
