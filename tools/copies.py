"""Compares the functions that the trainers have in common, and copies one from a trainer to others.

    python tools/copies.py                                 # compare; exit code 1 if two texts differ
    python tools/copies.py ppo/ppo.py:encode               # copy encode() to grpo.py and rce.py
    python tools/copies.py ppo/ppo.py:Run.open ppo/sft.py  # copy one method to the files that are named

ppo.py, grpo.py and rce.py are read side by side, so functions, classes and methods of one name have the same
text there, with the comments directly above. DIFFERS holds what differs on purpose, OWN the names that
belong to one algorithm. The other six began as copies and may drift: which of their definitions did is only
printed.
"""

import ast
import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRIO = ("ppo/ppo.py", "grpo/grpo.py", "rce/rce.py")
OTHERS = (
    *("ppo/sft.py", "ppo/reward_model.py", "rce/dpo.py"),
    *("grpo/grpo_rec.py", "ppo/ppo_rag.py", "rce/rce_icl.py"),
)
OWN = set(
    "__init__ load_models train respond score score_responses compute_advantages update optimizer_step "
    "record policy_loss check_constants train_main".split()
)
DIFFERS = {  # {(file, name): why}
    ("ppo/ppo.py", "load_model"): "a critic may begin without a value head",
    ("ppo/ppo.py", "load_trained"): "a critic may begin without a value head",
    ("grpo/grpo.py", "Trainer.next_prompts"): "dynamic sampling takes prompts out of their turn",
    ("rce/rce.py", "sampling_logprobs"): "mining samples at several temperatures",
    ("rce/rce.py", "Trainer.seed_step"): "mining draws numbers for each chunk of prompts, counted from 1",
    ("rce/rce.py", "Trainer.compute_rewards"): "there is no reward model",
    ("rce/rce.py", "Trainer.log_evaluation"): "best/ and patience follow pick_accuracy",
    ("rce/rce.py", "generate"): "each row has its temperature; there are no entropies",
    ("rce/rce.py", "chunk_logprobs"): "the entropy is only logged",
    ("rce/rce.py", "all_logprobs"): "batches of candidates have no log-probabilities yet",
    ("rce/rce.py", "micro_batches"): "prompts have unlike numbers of candidates",
    ("rce/rce.py", "Run.move_old_files"): "the files of candidates move, too",
}


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


def compare(texts):
    """Returns a message for each definition that differs from that of the first file that has it."""
    messages, first = [], {}
    for file, text in texts.items():
        for name, (_, _, new) in definitions(text).items():
            if (file, name) in DIFFERS:
                continue
            other, wanted = first.setdefault(name, (file, new))
            if new != wanted:
                lines = difflib.unified_diff(wanted.splitlines(), new.splitlines(), other, file, lineterm="")
                messages.append(f"{name} differs:\n" + "\n".join(lines))
    return messages


def drifted(texts, file):
    """Returns the names of a file's definitions that differ from those of the trainers it is a copy of."""
    wanted = {
        name: new for text in reversed(texts.values()) for name, (_, _, new) in definitions(text).items()
    }
    own = definitions((ROOT / file).read_text())
    return sorted(name for name, (_, _, new) in own.items() if wanted.get(name, new) != new)


def copy(texts, source, name):
    """Returns {file: new text} of the files whose definition of that name is not the source's."""
    new = definitions(texts[source])[name][2]
    changed = {}
    for file, text in texts.items():
        first, end, old = definitions(text).get(name, (0, 0, new))
        if old == new:
            continue
        if (file, name) in DIFFERS:
            print(f"{file}: {name} differs on purpose ({DIFFERS[file, name]}): left as it is")
            continue
        lines = text.splitlines(keepends=True)
        changed[file] = "".join([*lines[:first], new, *lines[end:]])
    return changed


def main(arguments):
    if arguments:
        source, _, name = arguments[0].partition(":")
        files = [source, *(arguments[1:] or TRIO)]
        for file in files:
            if file not in TRIO + OTHERS:
                sys.exit(f"copies.py: {file!r} is not one of {', '.join(TRIO + OTHERS)}")
        texts = {file: (ROOT / file).read_text() for file in files}
        if name not in definitions(texts[source]):
            sys.exit(f"copies.py: {source} has no {name!r}")
        for file, text in copy(texts, source, name).items():
            (ROOT / file).write_text(text)
            print(f"copied {name} to {file}")
        return
    texts = {file: (ROOT / file).read_text() for file in TRIO}
    messages = compare(texts)
    if messages:
        sys.exit("\n\n".join(messages))
    print("equal definitions in " + ", ".join(TRIO))
    for file in OTHERS:
        print(f"{file} has its own {', '.join(drifted(texts, file))}")


if __name__ == "__main__":
    main(sys.argv[1:])
