"""Compares the functions that the trainers have in common, and copies one from a trainer to the others.

    python tools/copies.py                            # compare all; exit code 1 if anything is wrong
    python tools/copies.py ppo/ppo.py:clip_and_step   # copy clip_and_step() to every trainer that has it
    python tools/copies.py ppo/ppo.py:Run.save        # copy one method
    python tools/copies.py --force ppo/ppo.py:generate   # also where the other trainer's was edited

Each trainer is one file, so the trainers repeat each other's machinery. Below the line `# ===== machinery` a
function, a constant or a method of the same name must have the same text in every trainer that has it. The
comment `# differs: why`, directly above a definition, allows a difference.

The first command also lists definitions below that line which their file never uses: delete them there.

Copying refuses a trainer whose definition was edited since the last commit, or marked `# differs`, and shows
the difference. Nothing is written then.
"""

import ast
import difflib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MACHINERY = "# ================ machinery"
DIFFERS = "# differs:"
FOLDERS = ("ppo", "grpo", "rce")


class CopyError(Exception):
    """Something that the user of this program can mend, in one message."""


@dataclass
class Definition:
    """A function, class head, method or constant below the machinery line of one file."""

    name: str  # a method is Class.method; a class's own lines above its first method are Class
    text: str  # with its decorators and the comments directly above it
    first: int  # its first line, from 0
    end: int  # the line after its last
    differs: bool  # whether `# differs: why` stands above it


def trainers(root):
    """Returns {path below root: text} of every file that has the machinery line."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).glob("*.py"))]
    texts = {path.relative_to(root).as_posix(): path.read_bytes().decode() for path in paths}
    return {file: text for file, text in texts.items() if MACHINERY in text}


def defined_names(node):
    """Returns the names that a top-level statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def first_line(node, lines, least):
    """Returns the line, from 0, where a definition begins: with its decorators and the comments above it."""
    decorators = getattr(node, "decorator_list", [])
    line = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
    indent = " " * node.col_offset
    while line > least and lines[line - 1].startswith(f"{indent}# ") and "# ----" not in lines[line - 1]:
        line -= 1
    return line


def definitions(text):
    """Returns {name: Definition} of what stands below the machinery line, in the order of the file."""
    lines = text.splitlines(keepends=True)
    border = next(number for number, line in enumerate(lines) if line.startswith(MACHINERY)) + 1
    found = {}

    def add(name, first, end):
        differs = any(DIFFERS in line for line in lines[first:end] if line.lstrip().startswith(DIFFERS))
        found[name] = Definition(name, "".join(lines[first:end]), first, end, differs)

    for node in ast.parse(text).body:
        names = defined_names(node)
        if node.lineno <= border or not names or names[0] == "train_main":
            continue
        first = first_line(node, lines, border)
        if not isinstance(node, ast.ClassDef):
            add(names[0], first, node.end_lineno)
            continue
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
        head_end = node.end_lineno
        if methods:
            head_end = first_line(methods[0], lines, node.lineno)
        add(node.name, first, head_end)
        for method in methods:
            add(f"{node.name}.{method.name}", first_line(method, lines, node.lineno), method.end_lineno)
    return found


def show_difference(one, other, text, other_text):
    """Returns a diff of two texts, named by their files."""
    lines = difflib.unified_diff(text.splitlines(), other_text.splitlines(), one, other, lineterm="")
    return "\n".join(lines) or f"{text[-80:]!a}\n{other_text[-80:]!a}"  # other line ends


def differences(root=ROOT):
    """Returns one message for each definition that differs from the first trainer's that has it."""
    messages = []
    first = {}  # {name: (file, text)}
    for file, text in trainers(root).items():
        for name, definition in definitions(text).items():
            if definition.differs:
                continue
            other, wanted = first.setdefault(name, (file, definition.text.strip("\r\n")))
            if definition.text.strip("\r\n") != wanted:
                diff = show_difference(other, file, wanted, definition.text.strip("\r\n"))
                messages.append(f"{name} differs between {other} and {file}:\n{diff}")
    return messages


def used_names(tree):
    """Returns every name that is read anywhere in a file, as a name or as an attribute."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return names


def is_called_by_others(name, tree):
    """Whether a method overrides one of a library's class, which calls it."""
    owner, _, method = name.partition(".")
    if method.startswith("__"):
        return True
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    bases = [ast.unparse(base) for base in classes[owner].bases] if owner in classes else []
    return any(base not in classes for base in bases) or any(
        is_called_by_others(f"{base}.{method}", tree) for base in bases if base in classes
    )


def unused(root=ROOT):
    """Returns one message for each definition below the machinery line that its file never uses."""
    messages = []
    for file, text in trainers(root).items():
        tree = ast.parse(text)
        used = used_names(tree)
        for name in definitions(text):
            owner, _, method = name.partition(".")
            if method and is_called_by_others(name, tree):
                continue
            if (method or owner) not in used:
                messages.append(f"{file} never uses {name}: delete it there")
    return messages


def committed_text(root, file):
    """Returns a file's text at the last commit; None where git does not have it."""
    command = ["git", "-C", str(root), "show", f"HEAD:{file}"]
    shown = subprocess.run(command, capture_output=True)
    return shown.stdout.decode() if shown.returncode == 0 else None


def copy(source, name, root=ROOT, force=False):
    """Copies one definition to every other trainer that has it. Returns the files that changed."""
    texts = trainers(root)
    if source not in texts:
        raise CopyError(f"{source} is no trainer: choose one of {', '.join(texts)}")
    found = definitions(texts[source])
    if name not in found:
        near = difflib.get_close_matches(name, found, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise CopyError(f"{source} defines no {name} below its machinery line{hint}")
    new = found[name].text
    changed = {}
    refused = []
    for file, text in texts.items():
        target = definitions(text).get(name)
        if file == source or target is None or target.text == new:
            continue
        committed = committed_text(root, file)
        was = definitions(committed).get(name) if committed else None
        edited = was is None or was.text != target.text
        if (edited or target.differs) and not force:
            why = "is marked `# differs`" if target.differs else "was edited since the last commit"
            diff = show_difference(source, file, new, target.text)
            refused.append(f"{name} in {file} {why}; nothing was copied (--force copies):\n{diff}")
        lines = text.splitlines(keepends=True)
        changed[file] = "".join([*lines[: target.first], new, *lines[target.end :]])
    if refused:
        raise CopyError("\n\n".join(refused))
    for file, text in changed.items():
        (root / file).write_bytes(text.encode())
    return list(changed)


def main(words, root=ROOT):
    force = "--force" in words
    words = [word for word in words if word != "--force"]
    if len(words) > 1 or (words and ":" not in words[0]):
        sys.exit(__doc__)
    try:
        if words:
            path, _, name = words[0].rpartition(":")
            source = Path(path).resolve()
            if not source.is_relative_to(root):
                raise CopyError(f"{path} is not a file of {root}")
            changed = copy(source.relative_to(root).as_posix(), name, root, force)
            print(f"{name} copied to {', '.join(changed)}" if changed else f"{name} is equal in all trainers")
            return
        messages = differences(root) + unused(root)
    except CopyError as error:
        sys.exit(f"copies.py: {error}")
    if messages:
        sys.exit("\n\n".join(messages))
    print("all copies are equal, and every definition is used")


if __name__ == "__main__":
    main(sys.argv[1:])
