"""Cut data/banking77/ out of Banking77: customers' questions to a bank, each with one of 77 intents.

    python data/make_banking77.py path/to/banking77 data/banking77     # a second

The first folder holds train.csv and test.csv as PolyAI publishes them, at
github.com/PolyAI-LDN/task-specific-datasets. Writes ROWS of them, drawn by SEED and left in their order, and
facts.json: the rows, the questions that occur twice in a file, and the digest of each source.
"""

import csv
import hashlib
import json
import random
import sys
from pathlib import Path

SEED = 1
ROWS = {"train.csv": 8000, "test.csv": 1000}


def cut(path, count):
    """Returns `count` rows of a file, and what it was like."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    chosen = sorted(random.Random(f"{SEED} {path.name}").sample(range(len(rows)), count))
    chosen_rows = [rows[i] for i in chosen]
    texts = [row["text"].strip().lower() for row in chosen_rows]
    return chosen_rows, {
        "rows": count,
        "of": len(rows),
        "intents": len({row["category"] for row in chosen_rows}),
        "questions_said_twice": len(texts) - len(set(texts)),
        "source_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }


def main(source, out):
    facts = {"seed": SEED}
    Path(out).mkdir(parents=True, exist_ok=True)
    for name, count in ROWS.items():
        rows, facts[name] = cut(Path(source) / name, count)
        with open(Path(out) / name, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["text", "category"], lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    (Path(out) / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
