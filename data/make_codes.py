"""Makes what grpo/grpo_rec.py trains on out of a plain log: who took what when, and what items are called.

    python data/make_codes.py mine LOG=log.csv                       # columns user, item, timestamp, title
    python data/make_codes.py mine LOG=log.csv TITLES=titles.csv     # user, item, timestamp; and item, title
    python data/rec_baselines.py @mine/words.txt                     # other methods' lists, for comparison
    python grpo/grpo_rec.py @mine/words.txt

The folder gets train.csv, valid.csv, test.csv (a user, a history, the item that came next), index.json {item:
codes}, items.txt (codes, title, item) and words.txt, the constants that grpo_rec.py needs. Further arguments:
the constants below as KEY=VALUE.

Splits. SPLIT=time, the default: the test asks for the last TEST_SHARE of all interactions, validation for the
VALID_SHARE before them, and what is older is trained on. So nothing that is trained on is later than what is
asked, as where a recommender is used. SPLIT=last asks for each user's last item, and in validation for the
one before: every user of three interactions is asked for, but what others did later is trained on. It suits
short logs. A user's interactions are ordered by time, equal times as in the log. Of lines with equal user,
item and time one is kept.

Histories. words.txt has a MAX_HISTORY of 10 to 50: HISTORY_SHARE of the rows that validation asks for have no
longer history. A user's training rows end STRIDE items apart, by default MAX_HISTORY, so that each item is
trained on once, in a window of that length.

Codes. k-means cuts unit vectors of the titles into CODES groups. The next level cuts what is left of each
(the vector minus its centre), LEVELS times. If two items have the same codes, every item gets one
more: among equals 0 is the one bought most before validation. So items of a group are alike, and what is
learnt of one is learnt of the others. Vectors: SVD of the TF-IDF of the titles' pieces of words.
"""

import csv
import json
import math
import sys
import warnings
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from datetime import datetime, UTC
from pathlib import Path

import numpy as np
from sklearn.cluster import KMeans
from sklearn.decomposition import TruncatedSVD
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import TfidfVectorizer

ROOT = Path(__file__).resolve().parents[1]

# constants
LOG = "log.csv"
TITLES = ""  # a csv file of items and titles; "": LOG has the titles
USER, ITEM, TIME, TITLE = "user", "item", "timestamp", "title"  # the columns
SPLIT = "time"  # time | last
VALID_SHARE = 0.1
TEST_SHARE = 0.1
LONGEST = 200  # of a user's interactions, the latest
STRIDE = 0  # a user's training rows end so many items apart; 0: MAX_HISTORY
MAX_HISTORY = 0  # items of a history that grpo_rec.py reads; 0: chosen from the log
HISTORY_SHARE = 0.75
LEVELS = 3
CODES = 0  # groups of a level; 0: the square root of the number of items
WIDTH = 64  # of the vectors
SEED = 0
UNITS = (1e8, 1e11, 1e14, 1e17)  # times since 1973 in seconds, milliseconds, microseconds, nanoseconds
WORDS = {  # of grpo_rec.py: what words.txt names in the folder
    "TRAIN_FILE": "train.csv",
    "VALID_FILE": "valid.csv",
    "TEST_FILE": "test.csv",
    "INDEX_FILE": "index.json",
    "ITEM_FILE": "items.txt",
    "BASELINES_FILE": "baselines.npz",
    "OUTPUT_DIR": "run",
}


class UserError(Exception):
    """Something that the user can correct, in one message."""


def read_csv(constant, columns):
    """Returns [(line, a text for each of columns)]."""
    where = f"{constant} = {globals()[constant]!r}"
    rows = []
    csv.field_size_limit(2**31 - 1)  # a cell may be longer than the default, 131,072
    try:
        with open(globals()[constant], newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            for name in columns:
                if (reader.fieldnames or []).count(name) != 1:
                    raise UserError(f"{where}: it needs one column {name!r}; it has {reader.fieldnames}")
            for record in reader:
                cells = [" ".join((record[name] or "").split()) for name in columns]
                if "" in cells or None in record:  # None: more fields than columns
                    fault = "a cell is empty, or a text with commas has no quotes"
                    raise UserError(f"{where} line {reader.line_num}: {fault}: {list(record.values())}")
                rows.append((reader.line_num, *cells))
    except (OSError, UnicodeError, csv.Error) as error:
        raise UserError(f"{where}: {error}") from None
    return rows


def read_time(text, where):
    """Returns a number, or the seconds since 1970 of a date, and its unit: "date", or a number's place in
    UNITS."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isfinite(seconds):
        return seconds, bisect_right(UNITS, abs(seconds))
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        takes = "it takes a number, such as seconds since 1970, or a date, such as 2024-03-01T12:30:00"
        raise UserError(f"{where}: {TIME} {text[:40]!r} cannot be read: {takes}") from None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return date.timestamp(), "date"


def read_log():
    """Returns {item: title} and {user: [(seconds, item)] by time}."""
    titles = {}
    for line, item, title in read_csv("TITLES" if TITLES else "LOG", (ITEM, TITLE)):
        if titles.setdefault(item, title) != title:
            raise UserError(f"{TITLES or LOG} line {line}: item {item!r} has two titles: delete one")
    events = defaultdict(dict)  # a user's, without equal ones
    first_of = {}  # the first line of each unit
    lines = read_csv("LOG", (USER, ITEM, TIME))
    for line, user, item, time in lines:
        where = f"LOG = {LOG!r} line {line}"
        if item not in titles:
            raise UserError(f"{where}: item {item!r} has no title in {TITLES}: add it, or delete the line")
        seconds, unit = read_time(time, where)
        first_of.setdefault(unit, f"line {line} has {TIME} {time}")
        events[user][seconds, item] = None
    if not events:
        raise UserError(f"LOG = {LOG!r}: it has no line below its columns")
    if len(first_of) > 1:
        fault = "of different units, such as seconds, milliseconds and dates: write all in one"
        raise UserError(f"LOG = {LOG!r}: {', '.join(first_of.values())}: times {fault}")
    if repeated := len(lines) - sum(map(len, events.values())):
        print(f"{repeated} of {len(lines)} lines repeat an earlier one's user, item and time: left out")
    by_time = {}
    for user, pairs in events.items():
        ordered = sorted(pairs, key=lambda pair: pair[0])
        by_time[user] = ordered[-LONGEST:]
    return titles, by_time


def split_rows(events):
    """Returns {split: [(user, history with the item that came next at its end)]}, the MAX_HISTORY to train
    with, and {item: how often it was bought before validation begins}."""
    seconds = sorted(second for pairs in events.values() for second, _ in pairs)
    valid_begin = seconds[int(len(seconds) * (1 - (VALID_SHARE + TEST_SHARE)))]
    test_begin = seconds[int(len(seconds) * (1 - TEST_SHARE))]
    rows = {"train": [], "valid": [], "test": []}
    trained_items = {}
    for user, pairs in events.items():
        items = [item for _, item in pairs]
        count = len(items)
        trained, known = count, count  # how many items are trained on, and how many come before the test
        if SPLIT == "time":
            trained = bisect_left(pairs, (valid_begin,))
            known = bisect_left(pairs, (test_begin,))
        elif count > 2:
            trained, known = count - 2, count - 1
        trained_items[user] = items[:trained]
        for end in range(max(1, trained), known):
            rows["valid"].append((user, items[: end + 1]))
        for end in range(max(1, known), count):
            rows["test"].append((user, items[: end + 1]))
    longest = MAX_HISTORY or suitable_history([len(items) - 1 for _, items in rows["valid"]])
    if longest < STRIDE:
        fault = f"STRIDE = {STRIDE} is above MAX_HISTORY = {longest}"
        raise UserError(f"{fault}: items between would not be trained on; give a smaller one, or MAX_HISTORY")
    bought = Counter()
    for user, items in trained_items.items():
        ends = range(len(items), 1, -(STRIDE or longest))
        for end in reversed(ends):
            rows["train"].append((user, items[:end]))
        bought.update(items)
    if not all(rows.values()):
        found = ", ".join(f"{len(pairs)} for {name}" for name, pairs in rows.items())
        last = "of three interactions or more" if SPLIT == "last" else "that returned, or SPLIT=last"
        few = f"{len(seconds)} interactions of {len(events)} users give rows {found}"
        raise UserError(f"LOG = {LOG!r}: {few}, and it takes one of each: more users {last}")
    return rows, longest, bought


def suitable_history(lengths):
    """Returns the shortest length that HISTORY_SHARE of the histories do not exceed, but 10 to 50."""
    shortest = np.quantile(lengths or [0], HISTORY_SHARE, method="inverted_cdf")
    return int(min(50, max(10, shortest)))


def title_vectors(texts):
    """Returns vectors of length 1, (texts, WIDTH or less)."""
    pieces = {"analyzer": "char_wb", "ngram_range": (3, 5), "max_features": 2**17}
    found = TfidfVectorizer(sublinear_tf=True, **pieces).fit_transform(texts)
    width = min(WIDTH, found.shape[1] - 1, len(texts))
    vectors = TruncatedSVD(width, random_state=SEED).fit_transform(found) if width > 1 else found.toarray()
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


def make_codes(items, vectors, bought):
    """Returns {item: [codes]}; vectors (items, width), bought {item: how often}."""
    warnings.simplefilter("ignore", ConvergenceWarning)  # fewer vectors that differ than groups
    residuals = vectors.astype(np.float64)
    levels = []  # of each level the code of each item
    count = min(CODES, len(items)) or math.isqrt(len(items) - 1) + 1
    for _ in range(LEVELS):
        groups = KMeans(count, n_init=1, random_state=SEED).fit(residuals)
        residuals = residuals - groups.cluster_centers_[groups.labels_]
        levels.append(groups.labels_.tolist())
    items_of = defaultdict(list)  # {codes: the items that have them}
    for item, path in zip(items, zip(*levels)):
        items_of[path].append(item)
    codes = {}
    for path, members in items_of.items():
        for place, item in enumerate(sorted(members, key=lambda item: -bought[item])):
            numbers = list(path)
            if len(items_of) < len(items):  # some items have the same codes
                numbers.append(place)
            codes[item] = [f"<{letter}_{x}>" for letter, x in zip("abcdefghijkl", numbers)]
    return {item: codes[item] for item in items}


def write(folder, rows, longest, titles, codes):
    folder.mkdir(parents=True, exist_ok=True)
    for name, split in rows.items():
        with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["user_id", "history_item_id", "item_id"])
            writer.writerows([user, items[:-1], items[-1]] for user, items in split)
    (folder / "index.json").write_text(json.dumps(codes) + "\n")
    lines = [f"{''.join(codes[item])}\t{title}\t{item}\n" for item, title in titles.items()]
    (folder / "items.txt").write_text("".join(lines), encoding="utf-8")
    words = [f"{key}={folder / name}" for key, name in WORDS.items()] + ["VALUES_FILE=None", "VALUE_WEIGHT=0"]
    words.append(f"MAX_HISTORY={longest}")
    # As many training rows per optimizer step as have about 64 items to learn, a power of two
    learnt = np.mean([min(longest, len(items) - 1) for _, items in rows["train"]])
    batch_size = 2 ** max(0, round(math.log2(64 / learnt)))
    # About 2,250 steps of SFT, as in the default run, in 10 to 40 epochs. A third without a gain ends it
    epochs = min(40, max(10, round(2250 * batch_size / len(rows["train"]))))
    words += [f"SFT_BATCH_SIZE={batch_size}", f"SFT_EPOCHS={epochs}", f"SFT_PATIENCE={epochs // 3}"]
    words.append(f"GROUP_SIZE={min(10, len(titles))}")
    (folder / "words.txt").write_text("\n".join(words) + "\n")


def apply_words(words):
    known = [name for name, value in globals().items() if name.isupper() and type(value) in (str, int, float)]
    for word in words:
        key, _, text = word.partition("=")
        if key not in known:
            raise UserError(f"{word!r} is not KEY=VALUE with one of the constants {', '.join(known)}")
        try:
            globals()[key] = type(globals()[key])(text)
        except ValueError:
            raise UserError(f"{word}: {key} takes a number, such as {globals()[key]}") from None
    if min(LONGEST, STRIDE, MAX_HISTORY, CODES, SEED) < 0 or WIDTH < 1 or not 0 <= HISTORY_SHARE <= 1:
        takes = "counts are not negative, WIDTH is 1 or more, HISTORY_SHARE at most 1"
        raise UserError(f"{takes}: {' '.join(words)}")
    if SPLIT not in ("time", "last") or not 1 <= LEVELS <= 11 or not 0 < VALID_SHARE < 1 - TEST_SHARE < 1:
        takes = "SPLIT takes time or last, LEVELS 1 to 11; the SHAREs are above 0 and their sum below 1"
        raise UserError(f"{takes}: {' '.join(words)}")


def main(words):
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__ + Path(__file__).read_text().split("# constants\n")[1].split("UNITS =")[0])
        return
    if not words or "=" in words[0]:
        raise UserError("the first word is the folder to write: make_codes.py mine LOG=log.csv TITLES=...")
    apply_words(words[1:])
    folder = Path(words[0]).resolve()
    for path in (Path(LOG).resolve(), Path(TITLES or LOG).resolve()):
        if path.parent == folder and path.name in (*WORDS.values(), "words.txt"):
            raise UserError(f"{path} would be overwritten: name another folder to write")
    titles, events = read_log()
    rows, longest, bought = split_rows(events)
    codes = make_codes(list(titles), title_vectors(list(titles.values())), bought)
    write(folder, rows, longest, titles, codes)
    unseen = sum(items[-1] not in bought for _, items in rows["test"])
    alike = len(titles) - len({tuple(path[:LEVELS]) for path in codes.values()})
    counts = ", ".join(f"{len(pairs)} in {name}.csv" for name, pairs in rows.items())
    print(f"{len(titles)} items, of which {alike} differ from another one by their last code alone")
    print(f"rows: {counts}; {unseen} of the test's items were never taken in training; MAX_HISTORY={longest}")
    asked = len({user for user, _ in rows["test"]})
    reason = (
        "took nothing in the test's time, or nothing before it" if SPLIT == "time" else "took fewer than 3"
    )
    print(f"{asked} of {len(events)} users are asked for in the test; others {reason}")
    for program in ("data/rec_baselines.py", "grpo/grpo_rec.py"):
        print(f"python {ROOT}/{program} @{folder}/words.txt")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UserError, OSError) as error:
        print(f"make_codes.py: {error}", file=sys.stderr)
        sys.exit(2)
