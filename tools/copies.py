"""Compares the functions that the trainers have in common, and copies one from a trainer to the others.

    python tools/copies.py                     # compare; exit code 1 if two texts differ
    python tools/copies.py ppo/ppo.py:encode   # copy encode() to every trainer that has it
    python tools/copies.py ppo/ppo.py:Run.open # copy one method

Each trainer is one file, so the trainers repeat each other's functions. Functions, classes and methods of one
name have the same text in all of them, with the comments directly above. A comment `# differs: why` there
allows a difference; those with the same reason are compared with each other. The names in OWN belong to one
algorithm and are not compared.
"""

import ast
import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRAINERS = (
    *("ppo/ppo.py", "grpo/grpo.py", "rce/rce.py"),
    *("ppo/sft.py", "ppo/reward_model.py", "rce/dpo.py"),
    *("grpo/grpo_rec.py", "ppo/ppo_rag.py", "rce/rce_icl.py"),
)
OWN = set(
    "__init__ load_models train respond score score_responses compute_advantages update optimizer_step "
    "record policy_loss check_constants train_main make_row pair_losses test read_file".split()
)


def definitions(text):
    """Returns {name: (first line from 0, line after the last, text)} of functions and methods; the trainer's
    methods stand under Trainer.NAME."""
    lines = text.splitlines(keepends=True)
    found = {}

    def add(name, node):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
        while lines[first - 1].lstrip().startswith("# ") and "# ---" not in lines[first - 1]:
            first -= 1
        found[name] = first, node.end_lineno, "".join(lines[first : node.end_lineno])

    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            add(node.name, node)
        if isinstance(node, ast.ClassDef):
            owner = "Trainer" if node.name.endswith("Trainer") else node.name
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    add(f"{owner}.{method.name}", method)
    return {name: value for name, value in found.items() if name.split(".")[-1] not in OWN or "Run." in name}


def mark(text):
    """Returns the line `# differs: why` of a definition, or nothing."""
    first = text.lstrip().splitlines()[0]
    return first if first.startswith("# differs:") else ""


def compare(texts):
    """Returns a message for each definition that differs from the first trainer's that has it, or has it with
    the same mark."""
    messages, first = [], {}
    for file, text in texts.items():
        for name, (_, _, new) in definitions(text).items():
            other, wanted = first.setdefault((name, mark(new)), (file, new))
            if new != wanted:
                lines = difflib.unified_diff(wanted.splitlines(), new.splitlines(), other, file, lineterm="")
                messages.append(f"{name} differs:\n" + "\n".join(lines))
    return messages


def copy(texts, source, name):
    """Returns {file: new text} of the trainers whose definition of that name is not the source's."""
    new = definitions(texts[source])[name][2]
    changed = {}
    for file, text in texts.items():
        first, end, old = definitions(text).get(name, (0, 0, new))
        if old == new:
            continue
        if mark(old) != mark(new):
            print(f"{file}: {name} is marked `# differs`: left as it is")
            continue
        lines = text.splitlines(keepends=True)
        changed[file] = "".join([*lines[:first], new, *lines[end:]])
    return changed


def main(arguments):
    texts = {file: (ROOT / file).read_text() for file in TRAINERS}
    if arguments:
        source, _, name = arguments[0].partition(":")
        if source not in texts or name not in definitions(texts[source]):
            sys.exit(f"copies.py: {arguments[0]!r} is not FILE:NAME of one of {', '.join(TRAINERS)}")
        for file, text in copy(texts, source, name).items():
            (ROOT / file).write_text(text)
            print(f"copied {name} to {file}")
        return
    messages = compare(texts)
    if messages:
        sys.exit("\n\n".join(messages))
    print("equal definitions in " + ", ".join(TRAINERS))


if __name__ == "__main__":
    main(sys.argv[1:])
