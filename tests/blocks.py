"""The blocks below each trainer's algorithm are byte-identical copies, so that each trainer is one file.

    python tests/blocks.py                  # compare them; exit code 1 and a diff where two differ
    python tests/blocks.py ppo/ppo.py       # copy this file's blocks to every other trainer that has them

A block opens with the line `# ==== block: NAME` and closes with `# ==== end of block: NAME`.
"""

import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LESS = ("faster decoding", "faster scoring", "adapters", "sharding")  # a copy may delete any of them
CHATS = ("language models", "prompts and responses", *LESS)
ALL = ("records", "rewards", "the run")
MINING = ("mining and check-up",)
HAVE = {  # which blocks a trainer must have; one that is not named here has what it has
    "ppo/ppo.py": (*CHATS, *ALL),
    "grpo/grpo.py": (*CHATS, *ALL),
    "rce/rce.py": (*CHATS, *ALL, *MINING),
    "ppo/ppo_rag.py": ALL,
    "grpo/grpo_rec.py": ("language models", *LESS[:3], *ALL),
    "rce/rce_icl.py": ("records", "the run", *MINING),
}
MARK = re.compile(r"^# ==== (block|end of block): (.*)$\n?", re.MULTILINE)


class Fault(Exception):
    """Markers of a file that do not fit, in one sentence."""


def trainers(root):
    """{path below root: text} of every file with a block, in the order of HAVE, and then of their names."""
    found = {}
    for path in sorted(root.glob("*/*.py")):
        name = path.relative_to(root).as_posix()
        if name in HAVE or (path.parent.name != "tests" and MARK.search(path.read_bytes().decode())):
            found[name] = path.read_bytes().decode()
    return {**{name: found[name] for name in HAVE if name in found}, **found}


def places(file, text):
    """{name: (begin, end)} of a file's blocks, both markers inside."""
    found = {}
    opened = None  # (name, begin) of the block that the text is in
    for mark in MARK.finditer(text):
        kind, name = mark.groups()
        line = text.count("\n", 0, mark.start()) + 1
        if kind == "block" and opened:
            raise Fault(f"{file}: line {line} opens the block {name!r} before {opened[0]!r} has its end")
        if kind == "block" and name in found:
            raise Fault(f"{file}: line {line} opens the block {name!r} a second time")
        if kind == "end of block" and (not opened or opened[0] != name):
            raise Fault(f"{file}: line {line} closes the block {name!r}, which is not open there")
        if kind == "block":
            opened = name, mark.start()
        else:
            found[name] = opened[1], mark.end()
            opened = None
    if opened:
        raise Fault(f"{file}: the block {opened[0]!r} has no line `# ==== end of block: {opened[0]}`")
    for name in HAVE.get(file, ()):
        if name not in found:
            raise Fault(f"{file}: there is no block {name!r}")
    return found


def blocks(file, text):
    """{name: text} of a file's blocks."""
    return {name: text[begin:end] for name, (begin, end) in places(file, text).items()}


def differences(root=ROOT):
    """One text for each fault, and for each block that differs from the first file's, with a diff."""
    wrong = [f"{file}: there is no such file" for file in HAVE if not (root / file).is_file()]
    first = {}  # {name: (file, text)}
    for file, text in trainers(root).items():
        try:
            found = blocks(file, text)
        except Fault as fault:
            wrong.append(str(fault))
            continue
        for name, block in found.items():
            other, wanted = first.setdefault(name, (file, block))
            if block != wanted:
                lines = wanted.splitlines(), block.splitlines()
                diff = "\n".join(difflib.unified_diff(*lines, other, file, lineterm=""))
                # what splitlines() does not show: line ends, or none at the file's end
                diff = diff or f"{wanted[-80:]!a}\n{block[-80:]!a}"
                wrong.append(f"the block {name!r} differs between {other} and {file}:\n{diff}")
    return wrong


def spread(source, root=ROOT):
    """Copy source's blocks to every other file that has them, the rest of which stays; the names of those
    that changed. Where any file's markers do not fit, nothing is written."""
    texts = trainers(root)
    if source not in texts:
        raise Fault(f"{source}: there is no such trainer with blocks; it takes {' or '.join(texts)}")
    new = blocks(source, texts[source])
    changed = {}
    for file, text in texts.items():
        for name, (begin, end) in reversed(places(file, text).items()):  # later ones first: begin stays right
            if name in new:
                text = text[:begin] + new[name] + text[end:]
        if text != texts[file]:
            changed[file] = text
    for file, text in changed.items():
        (root / file).write_bytes(text.encode())
    return list(changed)


def main(words, root=ROOT):
    if len(words) > 1:
        sys.exit(__doc__)
    if words:
        try:
            source = Path(words[0]).resolve().relative_to(root).as_posix()
            changed = spread(source, root)
        except (Fault, ValueError) as error:
            sys.exit(f"blocks.py: {error}")
        print(f"{source}'s blocks copied to {', '.join(changed)}" if changed else "all were equal already")
    if wrong := differences(root):
        sys.exit("\n\n".join(wrong))
    if not words:
        print("the blocks of all trainers are equal")


if __name__ == "__main__":
    main(sys.argv[1:])
