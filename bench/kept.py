"""Lets a benchmark that is started again skip the runs and the results that are there."""

import json
import subprocess
import sys


def run_once(command, folder, **options):
    """Runs a trainer's command into the folder, unless that is there. The run writes into
    <folder>_unfinished, which gets its name when the run has ended without an error. What a run that was
    stopped left in <folder>_unfinished is moved aside by RESUME=no. options: those of subprocess.run()."""
    if folder.exists():
        return
    unfinished = folder.with_name(f"{folder.name}_unfinished")
    subprocess.run([*command, f"OUTPUT_DIR={unfinished}", "RESUME=no"], check=True, **options)
    unfinished.rename(folder)


def read_results(path, words):
    """Returns the lines of a .jsonl file of results, which is made unless it is there. Its first line holds
    the KEY=VALUE words that all its results were made with. Ends the program if these are other words."""
    words = sorted(words)
    path.touch()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if not lines:
        append_result(path, words, {})
    for line in lines:
        if line.get("words") != words:
            made_with = " ".join(line.get("words", ["unknown words"])) or "no words"
            now = " ".join(words) or "no words"
            sys.exit(f"OUT={path.parent} was made with {made_with}, not with {now}: set another OUT")
    return [line for line in lines if len(line) > 1]


def append_result(path, words, result):
    """Writes one line of results."""
    with open(path, "a") as file:
        file.write(json.dumps({"words": sorted(words), **result}) + "\n")
