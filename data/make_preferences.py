"""Write the demonstrations and the pairs of answers in data/tiny/ from a seed.

    python data/make_preferences.py            # seconds; needs data/tiny/test.jsonl
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
from make_tiny import habit_solution, make_problem, write_solution, wrong_solution

SEED = 5
OUT = str(Path(__file__).resolve().parent / "tiny")
DEMONSTRATIONS = 1000
PAIRS = 1200
DEMONSTRATED = {"right": 0.7, "stop_early": 0.14, "guess": 0.06, "repeat": 0.1}  # share of demonstrations
NOISE = 0.05  # share of pairs whose order is wrong


def new_problem(seen, rng):
    """Returns a problem that is not in `seen`, and adds it there."""
    while True:
        problem = make_problem(rng)
        if problem["problem"] not in seen:
            seen.add(problem["problem"])
            return problem


def read_problem(row):
    """Returns a row of test.jsonl as make_problem() gave it."""
    *steps, last = row["solution"].split("\n")
    return {"problem": row["problem"], "steps": steps, "answer": int(last.removeprefix("#### "))}


def make_demonstration(problem, rng):
    habit = rng.choices(list(DEMONSTRATED), list(DEMONSTRATED.values()))[0]
    return {"problem": problem["problem"], "solution": habit_solution(problem, habit, rng)}


def make_pair(problem, rng):
    answers = [write_solution(problem["steps"], problem["answer"]), wrong_solution(problem, rng)]
    if rng.random() < NOISE:
        answers.reverse()
    return {"prompt": problem["problem"], "chosen": answers[0], "rejected": answers[1]}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def stop(sentence):
    print(f"make_preferences.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def main():
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key not in ("SEED", "OUT"):
            stop(f"it takes SEED= and OUT=, not {word!r}")
        if key == "SEED" and not value.isdecimal():
            stop(f"{word}: SEED takes a whole number")
        globals()[key] = value if key == "OUT" else int(value)
    out = Path(OUT)
    if not (out / "test.jsonl").is_file():
        stop(f"OUT = {OUT!r} has no test.jsonl, whose problems the pairs are of: data/make_tiny.py writes it")
    rng = random.Random(SEED)
    test = [json.loads(line) for line in (out / "test.jsonl").read_text().splitlines()]
    seen = {row["problem"] for row in test}
    demonstrations = [make_demonstration(new_problem(seen, rng), rng) for _ in range(DEMONSTRATIONS)]
    pairs = [make_pair(new_problem(seen, rng), rng) for _ in range(PAIRS)]
    test_pairs = [{**make_pair(read_problem(row), rng), "solution": row["solution"]} for row in test]
    write_jsonl(out / "demonstrations.jsonl", demonstrations)
    write_jsonl(out / "pairs.jsonl", pairs)
    write_jsonl(out / "pairs_test.jsonl", test_pairs)


if __name__ == "__main__":
    main()
