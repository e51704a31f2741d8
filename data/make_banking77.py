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


def cut(name, count):
    """Write `count` rows of a file; what it was like."""
    path = Path(SOURCE) / name
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    chosen = sorted(random.Random(f"{SEED} {name}").sample(range(len(rows)), count))
    with open(Path(OUT) / name, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["text", "category"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[i] for i in chosen)
    texts = [rows[i]["text"].strip().lower() for i in chosen]
    return {
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
            sys.exit(f"{word!r} is not KEY=VALUE with a constant of this file")
        globals()[key] = type(globals()[key])(value)
    missing = [name for name in ("train.csv", "test.csv") if not (Path(SOURCE) / name).is_file()]
    if not SOURCE or missing:
        where = "github.com/PolyAI-LDN/task-specific-datasets, banking_data/"
        sys.exit(f"SOURCE = {SOURCE!r} must be a folder with train.csv and test.csv: get them from {where}")
    Path(OUT).mkdir(parents=True, exist_ok=True)
    facts = {"seed": SEED, "train.csv": cut("train.csv", TRAIN_ROWS), "test.csv": cut("test.csv", TEST_ROWS)}
    (Path(OUT) / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
