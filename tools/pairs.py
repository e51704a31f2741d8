"""Write pairs of answers for reward_model.py and dpo.py: the best and the worst candidate of each prompt that
rce.py mined.

python tools/pairs.py checkpoints/rce/candidates_round_1.parquet pairs.jsonl

Candidates are ordered by `hard`, equal ones by `soft`. Left out are candidates that were not verified or cut,
and prompts whose candidates are all alike. Each line has prompt, chosen, rejected and margin, the difference
of `hard` plus that of `soft`. The prompts must be texts: of a chat, candidates have lines `role: content`,
and a prompt that begins with such a line is taken for a chat.
"""

import json
import os
import re
import sys
from pathlib import Path

import pyarrow.parquet


def stop(sentence):
    print(f"pairs.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def rank_of(candidate):
    """Returns what candidates are ordered by: right or wrong, then the grade."""
    return candidate["hard"], candidate.get("soft") or 0.0


def pair_of(candidates):
    """Returns the pair of one prompt's candidates, or None if there is none."""
    usable = [
        c for c in candidates if c["hard"] is not None and not c["eval_failed"] and not c.get("truncated")
    ]
    if not usable:
        return None
    best, worst = max(usable, key=rank_of), min(usable, key=rank_of)
    if best["text"] == worst["text"]:  # if all ranks are equal, max() and min() return the first candidate
        return None
    margin = sum(rank_of(best)) - sum(rank_of(worst))
    return {"prompt": best["prompt"], "chosen": best["text"], "rejected": worst["text"], "margin": margin}


def main(words):
    if len(words) != 2:
        stop("it takes a file of candidates and the file to write: pairs.py CANDIDATES.parquet PAIRS.jsonl")
    source, target = map(Path, words)
    if target.resolve() == source.resolve():
        stop(f"{target} would be read and written: give the pairs another name")
    if not target.absolute().parent.is_dir():
        stop(f"{target} cannot be written: there is no folder {target.parent}")
    try:
        records = pyarrow.parquet.read_table(source).to_pylist()
    except (OSError, ValueError) as error:
        stop(f"{source} cannot be read as parquet ({error})")
    groups = {}
    for record in records:
        lacking = {"prompt_id", "prompt", "text", "hard", "eval_failed"} - record.keys()
        if lacking:
            stop(f"{source}: there is no column {sorted(lacking)[0]!r}; docs/rce.md lists them")
        if re.match("(system|user|assistant|tool|developer): ", record["prompt"]):
            stop(f"{source}: {record['prompt_id']} is a chat: pairs are made of prompts that are texts")
        groups.setdefault(record["prompt_id"], []).append(record)
    pairs = [pair for pair in map(pair_of, groups.values()) if pair]
    tmp = Path(f"{target}.tmp")
    tmp.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    os.replace(tmp, target)
    print(f"{len(pairs)} pairs of {len(groups)} prompts written to {target}")


if __name__ == "__main__":
    main(sys.argv[1:])
