"""Write the demonstrations and the pairs of answers in data/tiny/ from a seed.

    python data/make_preferences.py            # seconds; needs test.jsonl in OUT, which make_tiny.py writes
    python data/make_preferences.py SEED=3 OUT=/tmp/tiny

The problems are those of make_tiny.py, new ones for training. Demonstrations are what people wrote: most are
right, the others follow a bad habit. A pair has a right and a wrong solution of one problem, and people
prefer the right one but for NOISE of the pairs, in which they erred.

Writes demonstrations.jsonl (problem, solution), pairs.jsonl (prompt, chosen, rejected) and pairs_test.jsonl
(the same of the problems of test.jsonl, with the right solution).
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_tiny import make_demonstration, make_pair, new_problem, write_rows

SEED = 5
OUT = str(Path(__file__).resolve().parent / "tiny")
DEMONSTRATIONS = 1000
PAIRS = 1200
DEMONSTRATED = {"right": 0.7, "stop_early": 0.14, "guess": 0.06, "repeat": 0.1}  # share of demonstrations
NOISE = 0.05  # share of pairs whose order is wrong


def read_problem(row):
    """Returns a row of test.jsonl as make_problem() gave it."""
    *steps, last = row["solution"].split("\n")
    return {"problem": row["problem"], "steps": steps, "answer": int(last.removeprefix("#### "))}


def noisy_pair(problem, rng):
    pair = make_pair(problem, rng)
    if rng.random() < NOISE:
        pair["chosen"], pair["rejected"] = pair["rejected"], pair["chosen"]
    return pair


def main():
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key not in ("SEED", "OUT"):
            sys.exit(f"make_preferences.py takes SEED= and OUT=, not {word!r}")
        globals()[key] = value if key == "OUT" else int(value)
    out = Path(OUT)
    rng = random.Random(SEED)
    test = [json.loads(line) for line in (out / "test.jsonl").read_text().splitlines()]
    seen = {row["problem"] for row in test}
    demonstrations, pairs = [], []
    for number in range(DEMONSTRATIONS + PAIRS):
        problem = new_problem(seen, rng)
        seen.add(problem["problem"])
        if number < DEMONSTRATIONS:
            demonstrations.append(make_demonstration(problem, DEMONSTRATED, rng))
        else:
            pairs.append(noisy_pair(problem, rng))
    test_pairs = [{**noisy_pair(read_problem(row), rng), "solution": row["solution"]} for row in test]
    write_rows(out / "demonstrations.jsonl", demonstrations)
    write_rows(out / "pairs.jsonl", pairs)
    write_rows(out / "pairs_test.jsonl", test_pairs)


if __name__ == "__main__":
    main()
