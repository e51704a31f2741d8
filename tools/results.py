"""Keeps the figures that README.md and docs/ show equal to docs/results.json.

    python tools/results.py --check    # exit code 1 if a page shows another figure than docs/results.json
    python tools/results.py --write    # put the figures of docs/results.json into the pages

A page shows a figure between two HTML comments, which GitHub does not display:

    <!--r:grpo.sampled.40-->95.2%<!--/r-->                  the mean over the seeds
    <!--r:grpo.sampled.40 0-->95%<!--/r-->                  the mean with another number of decimals
    <!--r:grpo.sampled.40 range-->94.8 to 95.9%<!--/r-->    the smallest and the largest value

A record of docs/results.json has: id; value, the mean; spread, the smallest and the largest value; seeds;
unit ("%": the values are fractions and are shown times 100; "s"; or ""); command; commit; machine; date.
A benchmark writes records with record().
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/results.json"
DECIMALS = {"%": 1, "s": 0, "": 3}
MARKED = re.compile(r"<!--r:(\S+?)(?: (range|\d))?-->(.*?)<!--/r-->")


def stop(message):
    print(f"results.py: {message}", file=sys.stderr)
    sys.exit(2)


def read_records(path):
    """Returns {id: record}."""
    records = {}
    for record in json.loads(path.read_text()):
        if record["id"] in records:
            stop(f"{path}: two records have the id {record['id']}")
        records[record["id"]] = record
    return records


def shown(record, form):
    """Returns a figure as a page shows it. form: None, "range" or a number of decimals."""
    unit = record["unit"]
    values = record["spread"] if form == "range" else [record["value"]]
    decimals = DECIMALS[unit] if form in (None, "range") else int(form)
    scale = 100 if unit == "%" else 1
    ending = " s" if unit == "s" else unit
    return " to ".join(f"{value * scale:.{decimals}f}" for value in values) + ending


def replaced(text, records, name):
    """Returns the text of a page with the figures of the records. name: the page's, for messages."""
    if text.count("<!--r:") != len(MARKED.findall(text)):
        stop(f"{name}: a mark <!--r:...--> is not closed by <!--/r--> in its line")

    def figure(match):
        key, form, _ = match.groups()
        if key not in records:
            stop(f"{name}: docs/results.json has no record {key}")
        start = match.group(0).partition("-->")[0]
        return f"{start}-->{shown(records[key], form)}<!--/r-->"

    return MARKED.sub(figure, text)


def machine():
    """Returns the processor, its number of cores and torch's version."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return (
        f"{names[0] if names else 'CPU'}, {os.cpu_count()} cores, torch {importlib.metadata.version('torch')}"
    )


def commit():
    """Returns the commit, with a + if the trainers have changes that are not committed."""

    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "ppo", "grpo", "rce", "rewards", "data")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def record(key, values, unit, seeds, command, path=RESULTS, **known):
    """Writes the record `key` of values, one per run. seeds: the runs, in words, as "SEED 1, 2, 3". known:
    commit, machine and date, if they are not those of this moment."""
    records = read_records(path) if path.exists() else {}
    records[key] = {
        "id": key,
        "value": round(sum(values) / len(values), 5),
        "spread": [round(min(values), 5), round(max(values), 5)],
        "seeds": seeds,
        "unit": unit,
        "command": command,
        "commit": known.get("commit") or commit(),
        "machine": known.get("machine") or machine(),
        "date": known.get("date") or datetime.date.today().isoformat(),
    }
    lines = [json.dumps(records[key]) for key in sorted(records)]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true")
    what.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    records = read_records(RESULTS)
    other = 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text()
        name = page.relative_to(ROOT)
        wanted = replaced(text, records, name)
        for number, (old, new) in enumerate(zip(text.splitlines(), wanted.splitlines()), 1):
            if old != new:
                other += 1
                print(f"{name}:{number}: {old}\n    docs/results.json: {new}")
        if write and text != wanted:
            page.write_text(wanted)
    if other and not write:
        stop(f"{other} lines differ: put the figures in with python tools/results.py --write")


if __name__ == "__main__":
    main()
