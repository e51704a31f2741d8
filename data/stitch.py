"""Writes the training rows of grpo/grpo_rec.py stitched together anew, for data of few users.

    python data/stitch.py FOLDER [CHANCE=0.8] [SIBLINGS=1.0] [PASSES=15] TRAIN_FILE=... INDEX_FILE=...
    python grpo/grpo_rec.py TRAIN_FILE=FOLDER/train.csv VALID_FILE=FOLDER/valid.csv SFT_EPOCHS=1 ...

The words after the folder are those of grpo_rec.py, which says what may be trained on. Each of its sequences
is walked PASSES times. Before each next item the walk jumps, with the chance CHANCE, to another place where
the same item stood, and goes on from there. So each pair of neighbours was logged, but the items further back
were not seen together: with few users a model remembers users by them. Most pairs to come were never logged,
so the walk may also jump to where a sibling of the item stands (an item with the same codes but the last):
all siblings together weigh as much as SIBLINGS logged places. valid.csv has the rows that grpo_rec.py
validates on, at most MAX_EVAL_ROWS of them. SEED draws the walks.
"""

import csv
import random
import sys
from collections import defaultdict
from pathlib import Path

from sasrec import run, sequences_of

CHANCE = 0.8
SIBLINGS = 1.0
PASSES = 15
SEED = 0  # of the walks


def places_after(sequences, codes):
    """Returns for each item of codes two lists of places, (sequence, where in it), that are trained on: those
    right after the item, and those where a sibling or the item itself stands."""
    after = defaultdict(list)
    siblings = defaultdict(list)
    for sequence, asked in sequences:
        for at in sorted(asked):
            after[sequence[at - 1]].append(((sequence, asked), at))
            siblings[codes[sequence[at]][:-1]].append(((sequence, asked), at))
    return [(after[item], siblings[some[:-1]]) for item, some in enumerate(codes)]


def stitch(source, places, chance, weight, longest, draw):
    """A sequence that begins as source does, (sequence, where it is trained on), of at most `longest` items
    after the first; it ends where it would go on to an item that is not trained on. draw: random.Random."""
    stitched = [source[0][0]]
    at = 1
    while len(stitched) <= longest:
        known, siblings = places[stitched[-1]]
        extra = weight if siblings else 0.0
        if (known or extra) and draw.random() < chance:
            logged = draw.random() * (len(known) + extra) < len(known)
            source, at = draw.choice(known if logged else siblings)
        if at not in source[1]:
            break
        stitched.append(source[0][at])
        at += 1
    return stitched


def main(rec, folder, words):
    settings = {"CHANCE": CHANCE, "SIBLINGS": SIBLINGS, "PASSES": PASSES, "SEED": SEED}
    mine = [word for word in words if word.partition("=")[0] in settings]
    for word in mine:
        key, _, text = word.partition("=")
        try:
            settings[key] = type(settings[key])(text)
        except ValueError:
            raise rec.UserError(f"{word}: {key} takes a number, such as {settings[key]}") from None
    chance, siblings, passes, seed = settings.values()
    if not (0 <= chance <= 1 and 0 <= siblings < 1e9 and 1 <= passes < 1e6):
        raise rec.UserError("CHANCE is 0 to 1, SIBLINGS 0 or more, PASSES 1 or more")
    rec.apply_overrides([word for word in words if word not in mine])
    rec.check_constants()
    written = [(folder / f"{name}.csv").resolve() for name in ("train", "valid")]
    for constant in ("TRAIN_FILE", "VALID_FILE", "TEST_FILE"):
        path = getattr(rec, constant)
        if path and Path(path).resolve() in written:
            raise rec.UserError(f"{constant} = {path!r} would be overwritten: name another folder to write")
    catalogue = rec.Catalogue(print)
    train_rows, valid_rows, _ = rec.load_splits(catalogue, print)
    sequences = sequences_of(train_rows)
    places = places_after(sequences, catalogue.codes)
    draw = random.Random(int(seed))
    stitched = []
    for number in range(int(passes)):
        for line, source in enumerate(sequences):
            some = stitch(source, places, chance, siblings, rec.MAX_HISTORY, draw)
            if len(some) > 1:
                stitched.append((f"{line}.{number}", some))
    held_out = [(row["user"], [*row["history"], row["target"]]) for row in valid_rows]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", stitched), ("valid", held_out)):
        with open(folder / f"{name}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([rec.USER_COLUMN, rec.HISTORY_COLUMN, rec.TARGET_COLUMN])
            for user, items in rows:
                *history, target = (catalogue.items[item] for item in items)
                writer.writerow([user, history, target])
        print(f"{folder / name}.csv: {len(rows)} rows")


if __name__ == "__main__":
    if len(sys.argv) < 2 or "=" in sys.argv[1]:
        print("stitch.py: the first word is the folder to write: FOLDER CHANCE=0.8", file=sys.stderr)
        sys.exit(2)
    run(main, Path(sys.argv[1]), sys.argv[2:])
