"""Print what a run's policy says, logs/samples.jsonl in its OUTPUT_DIR, as a person reads it.

python tools/show.py checkpoints/ppo             # every sample; the run may be going on
python tools/show.py checkpoints/ppo STEP=20     # those of that step
python tools/show.py checkpoints/ppo BY=worst    # the ten of lowest reward; BY=best: of highest
"""

import json
import os
import sys
import textwrap
from contextlib import suppress
from pathlib import Path


# Fields of a sample that are shown below its numbers, each under its name
TEXTS = ("prompt", "question", "query", "response", "answer", "text", "trained", "chosen", "rejected")


def stop(sentence):
    print(f"show.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def read_samples(path):
    """The records of samples.jsonl; a line that is no JSON, such as one half-written, is left out."""
    records = []
    for line in path.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def printable(text):
    """Text with its control characters spelt out: a response may hold escapes, which a terminal obeys."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def show_sample(sample, colour):
    """A sample as text for a terminal: numbers in its first line, then each text under its name."""

    def paint(code, text):
        return f"\033[{code}m{text}\033[0m" if colour else text

    facts = []
    texts = []
    for key, value in sample.items():
        if key in TEXTS and value is not None:
            text = textwrap.indent(printable(str(value)), "    ", lambda line: True)
            texts.append(f"{paint(2, key)}\n{text}")
        elif value is not None:
            value = f"{value:.3f}" if isinstance(value, float) else value
            facts.append(printable(f"{key} {value}"))
    first = paint("1;32" if (sample.get("reward") or 0) > 0 else "1;31", "  ".join(facts))
    return "\n".join([first, *texts, ""])


def main(folder="", *options):
    asked = dict(word.partition("=")[::2] for word in options)
    by = asked.get("BY", "worst")
    step = asked.get("STEP", "0")
    if not folder or set(asked) - {"STEP", "BY"} or by not in ("worst", "best") or not step.isdecimal():
        stop("it takes a run's OUTPUT_DIR and then, if wanted, STEP=n and BY=worst or BY=best")
    path = Path(folder) / "logs/samples.jsonl"
    if not path.is_file():
        stop(f"there is no {path}: it takes the OUTPUT_DIR of a run that has done a step")
    samples = read_samples(path)
    steps = [sample["step"] for sample in samples]
    if "STEP" in asked:
        samples = [sample for sample in samples if sample["step"] == int(step)]
    if "BY" in asked:
        if samples and not any("reward" in sample for sample in samples):
            stop(f"the samples of {path} have no reward: leave BY out")
        samples = [sample for sample in samples if sample.get("reward") is not None]
        samples = sorted(samples, key=lambda sample: sample["reward"], reverse=by == "best")[:10]
    if not samples:
        has = f"its steps are {min(steps)} to {max(steps)}" if steps else "it is empty"
        stop(f"{path} has no such sample: {has}")
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    try:
        for sample in samples:
            print(show_sample(sample, colour))
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; the rest goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main(*sys.argv[1:])
