"""The trainers are copies on purpose: what stands under `# same in: a.py, b.py` is the same in each file it names."""
import ast
import difflib
from pathlib import Path

import pytest
from conftest import ROOT

MARK = "# same in: "


def marked(path):
    """{qualified name: (files its marker names, source)} of every marked function and class of a file."""
    text = Path(path).read_text()
    lines, found = text.splitlines(), {}

    def visit(body, prefix):
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                above = lines[first - 2].strip()
                if above.startswith(MARK):
                    found[prefix + node.name] = (above[len(MARK):].split(", "), "\n".join(lines[first - 1:node.end_lineno]))
                if isinstance(node, ast.ClassDef):
                    visit(node.body, "Trainer.")
    visit(ast.parse(text).body, "")
    assert len(found) == text.count(MARK), f"{path}: a marker stands above no function"
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
    functions = {file: marked(ROOT / file) for file in ("ppo/ppo.py", "grpo/grpo.py")}
    assert all(len(f) > 40 for f in functions.values()) and functions["ppo/ppo.py"].keys() == functions["grpo/grpo.py"].keys()


@pytest.mark.parametrize("old, new", [("return self.respond(", "return  self.respond("), ("handle = os.open(path, os.O_RDONLY)", "handle = os.open(path, 0)"),
                                      (MARK + "ppo/ppo.py, grpo/grpo.py\ndef fsync", "def fsync"), ("def fsync(path)", "def sync(path)")])
def test_a_planted_difference_is_shown_with_both_files(tmp_path, old, new):
    for file in ("ppo/ppo.py", "grpo/grpo.py"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text((ROOT / file).read_text())
    assert not differences(tmp_path)
    text = (tmp_path / "grpo/grpo.py").read_text()
    assert old in text
    (tmp_path / "grpo/grpo.py").write_text(text.replace(old, new))
    wrong = "\n".join(differences(tmp_path))
    assert "between ppo/ppo.py and grpo/grpo.py" in wrong and "--- ppo/ppo.py\n+++ grpo/grpo.py" in wrong
