"""Rebuilds data/rec/, the catalogue and histories of grpo/grpo_rec.py's default run, from a seed.

    python data/make_rec.py [folder]

The shop is a world small enough to know what is possible in it. 500 items stand on 50 shelves of 10
departments; an item's codes are department, shelf, place. A shelf fits after a few others (a Markov chain of
shelves); an item has a quality, which shows after the purchase. What a user with the history h *values* next,
0 to 1, is

    value(h, i) = sum_j w_j fit[shelf of h_j, shelf of i] * quality_i

with weights w that fall by DECAY for each item further back and sum to 1. What was *logged* knows nothing of
quality. Each shelf has one item that is advertised: it is shown PROMOTION times as often as its neighbours,
bought again and again, and regretted; some shelves are shown more than others, and some clicks are noise:

    fit(h, i)       = sum_j w_j fit[shelf of h_j, shelf of i]
    P(logged i | h) = (1 - NOISE) exposure_i exp(SHARPNESS fit(h, i)) / sum + NOISE exposure_i / sum

So what imitates the log, a model or a count, recommends what was shown, and cannot know which of a shelf's
other items are good; what is rewarded by value can.
Files: train.csv, valid.csv, test.csv (a row per user; each user is in one file), index.json {item: codes},
items.txt (codes, title and item, tab between), values.npy (the worth of each item after each, in the order of
index.json).
"""

import csv
import json
import sys
from pathlib import Path

import numpy as np

SEED = 7
DEPARTMENTS = 10
SHELVES = 5  # a department
PLACES = 10  # a shelf
USERS = {"train": 4000, "valid": 500, "test": 2000}
LONGEST = 10  # items in a history
SUCCESSORS = (1.0, 0.85, 0.7, 0.55)  # how well a shelf's four successors fit
SAME_SHELF = 0.3
DECAY = 0.5
EXPOSURE = 0.5  # the shelf of popularity rank n was shown n ** -EXPOSURE as often as the first
PROMOTION = 16.0
REGRETTED = 0.1  # the quality of what is advertised; the others' is 0.2 to 1
SHARPNESS = 7.0
NOISE = 0.1
NAMES = {
    "kitchen": "pan kettle knife bowl grater",
    "garden": "spade hose seed pot rake",
    "office": "pen folder lamp stapler desk",
    "workshop": "drill saw hammer clamp vice",
    "music": "guitar string drum stand tuner",
    "sport": "ball racket mat glove net",
    "bath": "towel soap brush mirror scale",
    "toys": "puzzle kite train doll blocks",
    "travel": "bag map adapter pillow lock",
    "pets": "leash bed feeder toy comb",
}
ADJECTIVES = "small large red blue light heavy plain folding classic new".split()
KINDS = [f"{name} {kind}" for name, kinds in NAMES.items() for kind in kinds.split()]


def build_world(rng):
    items = DEPARTMENTS * SHELVES * PLACES
    shelves = DEPARTMENTS * SHELVES
    shelf = np.arange(items) // PLACES
    fit = np.zeros((shelves, shelves))
    for s in range(shelves):
        others = rng.permutation(np.delete(np.arange(shelves), s))[: len(SUCCESSORS)]
        fit[s, others] = SUCCESSORS
        fit[s, s] = SAME_SHELF
    of_shelf = [REGRETTED, *np.linspace(0.2, 1.0, PLACES - 1)]
    quality = rng.permuted(np.tile(of_shelf, (shelves, 1)), axis=1).flatten()
    exposure = ((1.0 + rng.permutation(shelves)) ** -EXPOSURE)[shelf]
    exposure[quality == REGRETTED] *= PROMOTION
    fits = fit[shelf][:, shelf]
    return fits, (fits * quality).astype(np.float16), exposure / exposure.sum()  # values as they are saved


def logged_distribution(fits, exposure, history):
    weights = DECAY ** np.arange(len(history))[::-1]
    fit = (weights / weights.sum()) @ fits[history]
    weighted = exposure * np.exp(SHARPNESS * fit)
    return (1 - NOISE) * weighted / weighted.sum() + NOISE * exposure


def make_histories(rng, fits, exposure, users):
    rows = []
    for _ in range(users):
        sequence = [int(rng.choice(len(exposure), p=exposure))]
        for _ in range(rng.integers(3, LONGEST + 1)):
            sequence.append(int(rng.choice(len(exposure), p=logged_distribution(fits, exposure, sequence))))
        rows.append((sequence[:-1], sequence[-1]))
    return rows


def write_csv(path, *rows):
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def main(folder):
    rng = np.random.default_rng(SEED)
    fits, values, exposure = build_world(rng)
    folder.mkdir(parents=True, exist_ok=True)
    index = {}
    lines = []
    for item in range(len(values)):
        shelf, place = divmod(item, PLACES)
        index[str(item)] = [f"<a_{shelf // SHELVES}>", f"<b_{shelf % SHELVES}>", f"<c_{place}>"]
        lines.append(f"{''.join(index[str(item)])}\t{KINDS[shelf]}, {ADJECTIVES[place]}\t{item}\n")
    (folder / "index.json").write_text(json.dumps(index) + "\n")
    (folder / "items.txt").write_text("".join(lines))
    np.save(folder / "values.npy", values)
    for split, users in USERS.items():
        histories = enumerate(make_histories(rng, fits, exposure, users))
        rows = [(f"{split}{user}", history, target) for user, (history, target) in histories]
        write_csv(folder / f"{split}.csv", ("user_id", "history_item_id", "item_id"), *rows)


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else Path(__file__).parent / "rec"))
