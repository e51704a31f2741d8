"""Prints what a run's policy says, logs/samples.jsonl in its OUTPUT_DIR, as a person reads it.

python tools/show.py checkpoints/ppo             # every sample; the run may be going on
python tools/show.py checkpoints/ppo STEP=20     # those of that step
python tools/show.py checkpoints/ppo BY=worst    # the ten of lowest reward; BY=best: of highest
"""

import json
import signal
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

# Fields of a sample that are shown below its numbers, each under its name
TEXTS = "prompt question query response answer text read trained chosen rejected history shown".split()


def stop(sentence):
    print(f"show.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def printable(text):
    """Returns a text with its control characters spelt out: a terminal obeys escapes."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def as_text(sample):
    """Returns a sample as text: its numbers in the first line, then each text under its name."""
    facts, texts = [], []
    for key, value in sample.items():
        if value is None:
            continue
        value = f"{value:.3f}" if isinstance(value, float) else printable(str(value))
        if key in TEXTS:
            texts.append(f"{key}\n" + textwrap.indent(value, "    ", lambda line: True))
        else:
            facts.append(f"{key} {value}")
    return "\n".join(["  ".join(facts), *texts, ""])


def main(folder="", *options):
    asked = dict(word.partition("=")[::2] for word in options)
    step, by = asked.pop("STEP", ""), asked.pop("BY", "")
    if not folder or asked or by not in ("", "worst", "best") or not (step or "0").isdecimal():
        stop("it takes a run's OUTPUT_DIR and then, if wanted, STEP=n and BY=worst or BY=best")
    path = Path(folder) / "logs/samples.jsonl"
    if not path.is_file():
        stop(f"there is no {path}: it takes the OUTPUT_DIR of a run that has done a step")
    samples = []
    for line in path.read_text(errors="replace").splitlines():
        with suppress(ValueError):  # a line half-written
            samples.append(json.loads(line))
    if step:
        samples = [sample for sample in samples if sample["step"] == int(step)]
    if by:
        samples = [sample for sample in samples if sample.get("reward") is not None]
        samples = sorted(samples, key=lambda sample: sample["reward"], reverse=by == "best")[:10]
    if not samples:
        stop(f"{path} has no such sample")
    for sample in samples:
        print(as_text(sample))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `| head` ends it quietly
    main(*sys.argv[1:])
