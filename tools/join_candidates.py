"""Joins files of candidates into one that CANDIDATES of rce_icl.py takes, such as lists of 2, 3 and 4 shots.

    python tools/join_candidates.py all.json runs/shots2/candidates.json runs/shots3/candidates.json
    python tools/join_candidates.py all.json "runs/*/candidates.json"

A query's pool becomes the union of its pools. A list that stands in several files stands once in the joined
one, as the first of the files has it. Where the files were mined with different values of a constant, _meta
of the joined file holds the value of each file; rce_icl.py refuses the joined file if marks depend on that
constant, such as READER. A file of the source's oldest format (id_list and score_list, of InfoScore) is
converted: its score becomes beam_score, and vqa_correct is 0, since no answer was marked. It is joined with
files of its kind alone. Train on it with REWARD_MODE=hybrid HYBRID_MIX_SCORE=beam_score HYBRID_ALPHA=1.0; its
oracle_accuracy is always 0 and means nothing.
"""

import glob
import json
import os
import sys
from pathlib import Path


def stop(sentence):
    print(f"join_candidates.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def read_file(path):
    """Returns (records by query, _meta) of a file, records of the oldest format converted."""
    try:
        records = json.loads(Path(path).read_text())
        mined_with = records.pop("_meta", {})
        for key, record in records.items():
            if "id_list" in record:
                records[key] = {"pointer_candidates": convert(key, record)}
            for candidate in records[key]["pointer_candidates"]:
                tuple(candidate["pointer"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        stop(f"{path} is no file of candidates ({type(error).__name__}: {error})")
    return records, mined_with


def convert(key, record):
    """Returns the lists of a record of id_list and score_list. Row numbers of a list end with the query."""
    lists = []
    for numbers, score in zip(record["id_list"], record["score_list"], strict=True):
        if str(numbers[-1]) == key:
            numbers = numbers[:-1]
        marks = {"vqa_correct": 0, "beam_score": float(score), "vqa_eval_mode": "score alone"}
        lists.append({"pointer": numbers, "gen_method": "beam", **marks})
    return lists


def join_records(key, records):
    """Returns one record of a query's records, of which there is one per file that has the query."""
    if len(records) == 1:
        return records[0]
    asked = [record["query"] for record in records if "query" in record]
    if any(query.get("text") != asked[0].get("text") for query in asked):
        stop(f"query {key} has another text in another file: they are of different data")
    joined = {"query": asked[0]} if asked else {}
    pools = [record.get("candidate_pool_ids") for record in records]
    if all(pools):
        joined["candidate_pool_ids"] = list(dict.fromkeys(number for pool in pools for number in pool))
    joined["proposed"] = sum(r.get("proposed") or len(r["pointer_candidates"]) for r in records)
    candidates = {}  # by pointer
    for record in records:
        for candidate in record["pointer_candidates"]:
            candidates.setdefault(tuple(candidate["pointer"]), candidate)
    return {**joined, "pointer_candidates": list(candidates.values())}


def join_facts(facts):
    """Returns _meta of the joined file from {path: _meta}: values, or {path: value} where files differ."""
    if len({mined_with.get("program") for mined_with in facts.values()}) > 1:
        without = [path for path, mined_with in facts.items() if "program" not in mined_with]
        if not without:
            stop("the files were mined by different programs: join those of one program")
        stop(f"{without[0]} does not say what it was mined with, but others do: join those of one program")
    joined = {}
    for key in dict.fromkeys(key for mined_with in facts.values() for key in mined_with):
        values = {path: mined_with.get(key) for path, mined_with in facts.items()}
        first = next(iter(values.values()))
        joined[key] = first if all(value == first for value in values.values()) else values
    return joined


def main(out="", *patterns):
    if not patterns:
        stop('it takes the file to write, then files or patterns such as "runs/*/candidates.json"')
    paths = dict.fromkeys(path for pattern in patterns for path in sorted(glob.glob(pattern)) or [pattern])
    if Path(out).exists():
        stop(
            f"{out} is there already: give first the name of a new file, or delete it; then the files to join"
        )
    if not Path(out).absolute().parent.is_dir():
        stop(f"{out} cannot be written: there is no folder {Path(out).parent}")
    by_query, facts = {}, {}
    for path in paths:
        records, facts[path] = read_file(path)
        for key, record in records.items():
            by_query.setdefault(key, []).append(record)
    joined = {key: join_records(key, records) for key, records in by_query.items()}
    lists = [candidate for record in joined.values() for candidate in record["pointer_candidates"]]
    if len({candidate.get("vqa_eval_mode") == "score alone" for candidate in lists}) > 1:
        stop("some files have lists with marks, and others with a score alone: join files of one kind")
    meta = join_facts(facts)
    if meta:
        joined = {"_meta": meta, **joined}
    tmp = Path(f"{out}.tmp")
    tmp.write_text(json.dumps(joined) + "\n")
    os.replace(tmp, out)
    print(f"{out}: {len(by_query)} queries and {len(lists)} lists of {len(paths)} files")


if __name__ == "__main__":
    main(*sys.argv[1:])
