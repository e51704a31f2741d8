"""Cut data/banking77/ out of Banking77: customers' questions to a bank, each with one of 77 intents.

    python data/make_banking77.py SOURCE=path/to/banking77     # a second

SOURCE holds train.csv and test.csv as PolyAI publishes them (github.com/PolyAI-LDN/task-specific-datasets).
Writes TRAIN_ROWS and TEST_ROWS of them, drawn by SEED and left in their order, and facts.json: the rows, the
questions that occur twice in a file, and the digest of each source.
"""

import csv
import hashlib
import json
import random
import sys
from pathlib import Path

SEED = 1
SOURCE = ""  # a folder with PolyAI's train.csv and test.csv; there is no default
OUT = str(Path(__file__).resolve().parent / "banking77")
TRAIN_ROWS = 8000
TEST_ROWS = 1000


def stop(sentence):
    print(f"make_banking77.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def cut(name, count):
    """Returns `count` rows of a file, and what it was like."""
    path = Path(SOURCE) / name
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    if not {"text", "category"} <= set(reader.fieldnames or ()):
        stop(f"{path} has the columns {reader.fieldnames}, not text and category")
    if not 0 < count <= len(rows):
        stop(f"{path} has {len(rows)} rows, not {count}: set TRAIN_ROWS and TEST_ROWS")
    chosen = sorted(random.Random(f"{SEED} {name}").sample(range(len(rows)), count))
    texts = [rows[i]["text"].strip().lower() for i in chosen]
    return [rows[i] for i in chosen], {
        "rows": count,
        "of": len(rows),
        "intents": len({rows[i]["category"] for i in chosen}),
        "questions_said_twice": len(texts) - len(set(texts)),
        "source_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }


def main():
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key not in ("SEED", "SOURCE", "OUT", "TRAIN_ROWS", "TEST_ROWS"):
            stop(f"{word!r} is not KEY=VALUE with a constant of this file")
        try:
            globals()[key] = type(globals()[key])(value)
        except ValueError:
            stop(f"{word}: {key} takes a whole number")
    missing = [name for name in ("train.csv", "test.csv") if not (Path(SOURCE) / name).is_file()]
    if not SOURCE or missing:
        where = "github.com/PolyAI-LDN/task-specific-datasets, banking_data/"
        stop(f"SOURCE = {SOURCE!r} must be a folder with train.csv and test.csv: get them from {where}")
    if Path(OUT).resolve() == Path(SOURCE).resolve():
        stop(f"SOURCE and OUT are {OUT!r}: the source would be overwritten")
    facts = {"seed": SEED}
    rows = {}
    for name, count in (("train.csv", TRAIN_ROWS), ("test.csv", TEST_ROWS)):
        rows[name], facts[name] = cut(name, count)
    Path(OUT).mkdir(parents=True, exist_ok=True)
    for name, chosen in rows.items():
        with open(Path(OUT) / name, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["text", "category"], lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(chosen)
    (Path(OUT) / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
