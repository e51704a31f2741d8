"""The trainers are copies on purpose: what stands under `# same in: a.py, b.py` is the same in each file it names."""
import ast
import difflib
import itertools
from pathlib import Path

import pytest
from conftest import ROOT

MARK = "# same in: "


FILES = ("ppo/ppo.py", "grpo/grpo.py", "rce/rce.py")


def defined(path):
    """{qualified name: source} of every function and class of a file."""
    return {name: source for name, (_, source) in marked(path, every=True).items()}


def marked(path, every=False):
    """{qualified name: (files its marker names, source)} of every marked function and class of a file."""
    text = Path(path).read_text()
    lines, found = text.splitlines(), {}

    def visit(body, prefix):
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                above = lines[first - 2].strip()
                if above.startswith(MARK) or every:
                    found[prefix + node.name] = (above[len(MARK):].split(", "), "\n".join(lines[first - 1:node.end_lineno]))
                if isinstance(node, ast.ClassDef) and not above.startswith(MARK):
                    visit(node.body, "Trainer.")
    visit(ast.parse(text).body, "")
    assert every or len(found) == text.count(MARK), f"{path}: a marker stands above no function"
    return found


def differences(root):
    """One text for each copy that is missing or differs, naming both files and showing the diff."""
    files = {str(p.relative_to(root)): marked(p) for p in sorted(root.glob("*/*.py")) if MARK in p.read_text() and p.parent.name in ("ppo", "grpo", "rce")}
    wrong = []
    for file, functions in files.items():
        for name, (named, source) in functions.items():
            if file not in named:
                wrong.append(f"{file}: the marker of {name} does not name its own file")
            for other in named:
                other_named, other_source = files.get(other, {}).get(name, (None, ""))
                if other_source != source or other_named != named:
                    diff = "\n".join(difflib.unified_diff(source.splitlines(), other_source.splitlines(), file, other, lineterm=""))
                    wrong.append(f"{name} differs between {file} and {other}:\n{diff}")
    return wrong


def test_copies_are_equal():
    assert not differences(ROOT), "\n\n".join(differences(ROOT))


def test_enough_is_marked():
    functions, everything = {file: set(marked(ROOT / file)) for file in FILES}, {file: defined(ROOT / file) for file in FILES}
    assert all(len(names) > 40 for names in functions.values())
    # what two files define alike and do not mark could drift apart unseen
    for a, b in itertools.combinations(FILES, 2):
        alike = {name for name, source in everything[a].items() if everything[b].get(name) == source and source.count("\n") > 2}
        assert alike <= functions[a] & functions[b], f"{a} and {b}: unmarked and equal: {sorted(alike - functions[a])}"


@pytest.mark.parametrize("old, new", [("return self.respond(", "return  self.respond("), ("handle = os.open(path, os.O_RDONLY)", "handle = os.open(path, 0)"),
                                      (MARK + ", ".join(FILES) + "\ndef fsync", "def fsync"), ("def fsync(path)", "def sync(path)")])
def test_a_planted_difference_is_shown_with_both_files(tmp_path, old, new):
    for file in FILES:
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text((ROOT / file).read_text())
    assert not differences(tmp_path)
    text = (tmp_path / "grpo/grpo.py").read_text()
    assert old in text
    (tmp_path / "grpo/grpo.py").write_text(text.replace(old, new))
    wrong = "\n".join(differences(tmp_path))
    assert "between ppo/ppo.py and grpo/grpo.py" in wrong and "--- ppo/ppo.py\n+++ grpo/grpo.py" in wrong
