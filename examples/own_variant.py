"""A variant of your own: copies a trainer into a new folder, where you may edit anything.

Shows what a copy needs: the trainer's file and rewards/. The shipped models and data come along, so that the
copy runs as it is; delete its data/ when you name your own.

Change: whatever you like, in the copy. What you do not use may go; `ruff check --select F mine/grpo.py` then
names what is missing. Most copies can do without the sections "decoding with shared prompts" and "scoring
with shared prompts" (sampling then takes 1.0 to 2.3 times as long, docs/lab/speed.md), "LoRA" and "sharding".

    python examples/own_variant.py grpo/grpo.py mine          # then: python mine/grpo.py
"""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def stop(sentence):
    print(f"own_variant.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def main(arguments):
    if len(arguments) != 2:
        sys.exit(__doc__)
    trainer, folder = ROOT / arguments[0], Path(arguments[1])
    if not trainer.is_file():
        stop(f"there is no trainer {arguments[0]}; README.md lists them")
    if folder.exists():
        stop(f"{folder} exists already: name a new folder")
    folder.mkdir(parents=True)
    shutil.copy(trainer, folder)
    text = trainer.read_text()
    shipped = [p for p in sorted((ROOT / "data").iterdir()) if p.is_dir() and f"data/{p.name}/" in text]
    for name in ("rewards", *(f"data/{p.name}" for p in shipped)):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    print(f"Made {folder}. Start it by: python {folder / trainer.name}; it writes into {folder}/checkpoints/")


if __name__ == "__main__":
    main(sys.argv[1:])
