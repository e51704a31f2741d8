"""Rebuilds data/rec/, the catalogue and histories of grpo/grpo_rec.py's default run, from a seed.

    python data/make_rec.py [folder]                # the shop
    python data/make_rec.py long checkpoints/long   # log.csv and titles.csv of long histories

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
Files: train.csv, valid.csv, test.csv (a row a user; users are in one of them alone), index.json {item:
codes}, items.txt (codes, title and item, tab between), values.npy (V, in the order of index.json), facts.json
(the figures that are possible, printed too).

The long log has LONG_USERS users with 20 to 700 interactions each, 80 on average, for data/make_codes.py.
An item has latent factors near those of its kind and a popularity. Some items are parts of a series. A user's
taste drifts. Nobody takes an item twice:

    P(next part) = SEQUEL, if the last item has a next part that was not taken
    P(next i)    ~ popularity_i exp(LONG_SHARPNESS taste . factors_i) over the items that were not taken

long.json has the figures of this distribution itself, on the last tenth of the log: what is possible.
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
LONG_USERS = 1000
LONG_ITEMS = 1700
LEAST, MOST = 20, 700  # interactions of a user
FACTORS = 4
LONG_SHARPNESS = 10.0
DRIFT = 0.04  # how far a taste moves after each interaction
SEQUEL = 0.15
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


def after(worth, history):
    """The worth (items, items) of each item after this history, (items,)."""
    weights = DECAY ** np.arange(len(history))[::-1]
    return (weights / weights.sum()) @ worth[history].astype(float)


def logged_distribution(fits, exposure, history):
    weighted = exposure * np.exp(SHARPNESS * after(fits, history))
    return (1 - NOISE) * weighted / weighted.sum() + NOISE * exposure


def make_histories(rng, fits, exposure, users):
    rows = []
    for _ in range(users):
        sequence = [int(rng.choice(len(exposure), p=exposure))]
        for _ in range(rng.integers(3, LONGEST + 1)):
            sequence.append(int(rng.choice(len(exposure), p=logged_distribution(fits, exposure, sequence))))
        rows.append((sequence[:-1], sequence[-1]))
    return rows


def figures(rows, fits, values, exposure):
    """Means over rows of the best lists that are possible: by the true distribution of the log, and by
    value."""
    discounts = 1 / np.log2(np.arange(10) + 2)
    found = {}
    for name in ("ranked by the log's true distribution", "ranked by value", "ranked by popularity"):
        means = {"value@1": [], "value@10": [], "hr@10": [], "ndcg@10": []}
        for history, target in rows:
            value = after(values, history)
            by = {"ranked by value": value, "ranked by popularity": exposure}.get(name)
            if by is None:
                by = logged_distribution(fits, exposure, history)
            top = np.argsort(-by, kind="stable")[:10]
            means["value@1"].append(value[top[0]])
            means["value@10"].append(value[top].mean())
            means["hr@10"].append(float(target in top))
            means["ndcg@10"].append(float(discounts[top == target].sum()))
        found[name] = {key: round(float(np.mean(x)), 4) for key, x in means.items()}
    return found


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def build_long_world(rng):
    """Returns of each item: its factors, its popularity, the next part of its series (-1: none) and its
    title."""
    kinds = [f"{name} {kind}" for name, kinds in NAMES.items() for kind in kinds.split()]
    departments = np.repeat(unit(rng.standard_normal((DEPARTMENTS, FACTORS))), SHELVES, 0)
    centres = unit(departments + 0.25 * rng.standard_normal(departments.shape))
    factors = np.zeros((LONG_ITEMS, FACTORS))
    next_part = np.full(LONG_ITEMS, -1)
    titles = []
    while len(titles) < LONG_ITEMS:
        kind = int(rng.integers(len(kinds)))
        adjective = rng.choice(ADJECTIVES)
        name = "".join(rng.choice(list("bdfgklmnprst")) + rng.choice(list("aeiou")) for _ in range(3))
        factor = unit(centres[kind] + 0.2 * rng.standard_normal(FACTORS))
        parts = min(int(rng.choice((1, 2, 3, 5), p=(0.85, 0.05, 0.05, 0.05))), LONG_ITEMS - len(titles))
        for part in range(parts):
            item = len(titles)
            factors[item] = factor
            next_part[item] = item + 1 if part + 1 < parts else -1
            titles.append(f"{adjective} {kinds[kind]} {name}, part {part + 1}")
    return factors, np.exp(1.5 * rng.standard_normal(LONG_ITEMS)), next_part, titles


def make_long_log(rng, factors, popularity, next_part):
    """Returns [(user, item, time, rank of the item in the distribution that it was drawn from)] by time."""
    log = []
    for user in range(LONG_USERS):
        count = int(np.clip(np.exp(rng.normal(3.95, 0.9)), LEAST, MOST))
        begin = rng.uniform(0, 0.85)
        times = np.sort(begin + (1 - begin) * rng.beta(1, rng.uniform(1, 4), count))
        taste = unit(rng.standard_normal(FACTORS))
        worth = popularity.copy()  # 0 for what the user has taken
        last = -1
        for time in times:
            chances = worth * np.exp(LONG_SHARPNESS * factors @ taste)
            chances /= chances.sum()
            sequel = next_part[last] if last >= 0 else -1
            if sequel >= 0 and worth[sequel] > 0:
                chances *= 1 - SEQUEL
                chances[sequel] += SEQUEL
            last = int(rng.choice(LONG_ITEMS, p=chances))
            log.append((user, last, round(1e8 * time), int((chances > chances[last]).sum()) + 1))
            worth[last] = 0
            taste = unit(taste + DRIFT * rng.standard_normal(FACTORS))
    return sorted(log, key=lambda event: event[2])


def make_long(folder):
    rng = np.random.default_rng(SEED)
    factors, popularity, next_part, titles = build_long_world(rng)
    log = make_long_log(rng, factors, popularity, next_part)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "titles.csv", "w", newline="") as file:
        csv.writer(file).writerows([("item", "title"), *enumerate(titles)])
    with open(folder / "log.csv", "w", newline="") as file:
        csv.writer(file).writerows([("user", "item", "timestamp"), *(event[:3] for event in log)])
    ranks = np.array([event[3] for event in log[-len(log) // 10 :]])
    gains = np.where(ranks <= 10, 1 / np.log2(ranks + 1), 0)
    facts = {"seed": SEED, "interactions": len(log), "items": LONG_ITEMS, "users": LONG_USERS}
    facts["possible"] = {
        "hr@10": round(float(np.mean(ranks <= 10)), 4),
        "ndcg@10": round(float(gains.mean()), 4),
    }
    (folder / "long.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"{len(log)} interactions; possible on the last tenth: {facts['possible']}")


def main(folder):
    rng = np.random.default_rng(SEED)
    fits, values, exposure = build_world(rng)
    folder.mkdir(parents=True, exist_ok=True)
    index = {}
    lines = []
    kinds = [f"{name} {kind}" for name, kinds in NAMES.items() for kind in kinds.split()]
    for item in range(len(values)):
        shelf, place = divmod(item, PLACES)
        index[str(item)] = [f"<a_{shelf // SHELVES}>", f"<b_{shelf % SHELVES}>", f"<c_{place}>"]
        lines.append(f"{''.join(index[str(item)])}\t{kinds[shelf]}, {ADJECTIVES[place]}\t{item}\n")
    (folder / "index.json").write_text(json.dumps(index) + "\n")
    (folder / "items.txt").write_text("".join(lines))
    np.save(folder / "values.npy", values)
    facts = {"seed": SEED, "items": len(values), "decay": DECAY, "users": USERS}
    for split, users in USERS.items():
        rows = make_histories(rng, fits, exposure, users)
        with open(folder / f"{split}.csv", "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["user_id", "history_item_id", "item_id"])
            for user, (history, target) in enumerate(rows):
                writer.writerow([f"{split}{user}", history, target])
        if split != "train":
            facts[split] = figures(rows, fits, values, exposure)
            for name, means in facts[split].items():
                print(f"{split:6} {name:40} " + "  ".join(f"{key} {x:.4f}" for key, x in means.items()))
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    words = sys.argv[1:]
    make = main
    if words[:1] == ["long"]:
        make = make_long
        words = words[1:]
    elif not words:
        words = [str(Path(__file__).resolve().parent / "rec")]
    if len(words) != 1 or "=" in words[0] or words[0].startswith("-"):
        print("make_rec.py: it takes the folder to write, or long and the folder", file=sys.stderr)
        sys.exit(2)
    make(Path(words[0]))
