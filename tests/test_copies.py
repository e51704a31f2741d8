"""tools/copies.py: what trainers have in common is the same in each; a file contains only what it uses."""

import importlib.util
import subprocess

import pytest
from conftest import ROOT

spec = importlib.util.spec_from_file_location("copies", ROOT / "tools/copies.py")
copies = importlib.util.module_from_spec(spec)
spec.loader.exec_module(copies)

MACHINERY = "# ================ machinery: the same in all trainers that have it\n"
SHARED = """
# why it is twice
def twice(x):
    return 2 * x


class Run:
    name = "run"

    def save(self):
        return twice(1)
"""
MAIN = """
def train_main():
    return Run().save(), Run().name


"""
FILES = ("ppo/ppo.py", "grpo/grpo.py", "rce/rce.py")


def trainer(file, shared=SHARED):
    """A small trainer: its own algorithm, the machinery line, what it shares, and its main."""
    return f'"""{file}"""\n\nMINE = "{file}"\n\n{MACHINERY}\n{shared}\n{MAIN}'


def commit(root):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", root, "add", "."], check=True)
    subprocess.run(["git", "-C", root, *identity, "commit", "-qm", "x"], check=True)


@pytest.fixture
def root(tmp_path):
    """Three trainers in a git checkout of their own, whose copies are equal."""
    for file in FILES:
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(trainer(file))
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    commit(tmp_path)
    assert copies.differences(tmp_path) == copies.unused(tmp_path) == []
    return tmp_path


def test_the_copies_of_all_trainers_are_equal():
    assert not copies.differences()


def test_a_trainer_contains_only_what_it_uses():
    assert not copies.unused()


@pytest.mark.parametrize(
    "old, new, name",
    [
        ("return 2 * x", "return x + x", "twice"),
        ("# why it is twice", "# why it is double", "twice"),
        ("def twice(x):", "@cache\ndef twice(x):", "twice"),
        ("return twice(1)", "return twice( 1)", "Run.save"),
        ('name = "run"', 'name = "Run"', "Run"),
    ],
)
def test_a_definition_that_differs_is_named_with_both_files_and_a_diff(root, old, new, name):
    (root / "grpo/grpo.py").write_text(trainer("grpo/grpo.py").replace(old, new))
    (message,) = copies.differences(root)
    assert message.startswith(
        f"{name} differs between ppo/ppo.py and grpo/grpo.py:\n--- ppo/ppo.py\n+++ grpo"
    )
    assert f"\n-{'    ' * ('(' in new and 'return' in new)}" in message and new.splitlines()[0] in message


def test_what_stands_above_the_machinery_line_may_differ(root):
    text = trainer("grpo/grpo.py").replace("MINE = ", "def twice(x):\n    return 7\n\n\nMINE = ")
    (root / "grpo/grpo.py").write_text(text)
    assert copies.differences(root) == []


def test_a_marked_difference_is_allowed_and_only_for_its_own_definition(root):
    marked = SHARED.replace("# why it is twice", "# differs: it is thrice").replace("2 * x", "3 * x")
    (root / "grpo/grpo.py").write_text(trainer("grpo/grpo.py", marked))
    assert copies.differences(root) == []
    marked = SHARED.replace("    def save(self)", "    # differs: here\n    def save(self)").replace(
        "(1)", "(2)"
    )
    (root / "rce/rce.py").write_text(trainer("rce/rce.py", marked.replace("2 * x", "4 * x")))
    (message,) = copies.differences(root)
    assert message.startswith("twice differs between ppo/ppo.py and rce/rce.py")


@pytest.mark.parametrize(
    "addition, named",
    [
        ("def lonely():\n    return 1\n", "lonely"),
        ("_LONELY = 3\n", "_LONELY"),
        ("class Lonely:\n    pass\n", "Lonely"),
        (
            "class Used(Run):\n    def lonely(self):\n        pass\n\n\nRUN = Used()\nprint(RUN)\n",
            "Used.lonely",
        ),
    ],
)
def test_a_definition_that_its_file_never_uses_is_named(root, addition, named):
    (root / "rce/rce.py").write_text(trainer("rce/rce.py", f"{SHARED}\n\n{addition}"))
    assert copies.unused(root) == [f"rce/rce.py never uses {named}: delete it there"]


def test_a_method_that_a_library_calls_is_used(root):
    layer = "class Layer(dict):\n    def reorder(self):\n        pass\n\n\nLAYER = Layer()\nprint(LAYER)\n"
    (root / "rce/rce.py").write_text(trainer("rce/rce.py", f"{SHARED}\n\n{layer}"))
    assert copies.unused(root) == []


def test_copying_changes_this_definition_in_the_others_and_nothing_else(root):
    better = SHARED.replace("2 * x", "x + x").replace('name = "run"', 'name = "better"')
    (root / "grpo/grpo.py").write_text(trainer("grpo/grpo.py", better))
    assert copies.copy("grpo/grpo.py", "twice", root) == ["ppo/ppo.py", "rce/rce.py"]
    for file in ("ppo/ppo.py", "rce/rce.py"):
        assert (root / file).read_text() == trainer(file, SHARED.replace("2 * x", "x + x"))
    assert (root / "grpo/grpo.py").read_text() == trainer("grpo/grpo.py", better)
    assert copies.copy("grpo/grpo.py", "twice", root) == []


def test_copying_a_method_leaves_the_rest_of_its_class(root):
    (root / "ppo/ppo.py").write_text(trainer("ppo/ppo.py", SHARED.replace("twice(1)", "twice(5)")))
    assert copies.copy("ppo/ppo.py", "Run.save", root) == ["grpo/grpo.py", "rce/rce.py"]
    assert copies.differences(root) == []


@pytest.mark.parametrize("mark", ["", "# differs: it is mine\n"])
def test_a_target_that_was_edited_or_marked_is_refused_with_a_diff_and_nothing_is_written(root, mark):
    (root / "ppo/ppo.py").write_text(trainer("ppo/ppo.py", SHARED.replace("2 * x", "x + x")))
    edited = trainer("rce/rce.py", SHARED.replace("def twice", f"{mark}def twice").replace("2 * x", "x * 2"))
    (root / "rce/rce.py").write_text(edited)
    if mark:
        commit(root)
    with pytest.raises(copies.CopyError) as error:
        copies.copy("ppo/ppo.py", "twice", root)
    assert "twice in rce/rce.py" in str(error.value) and "+    return x * 2" in str(error.value)
    assert (root / "rce/rce.py").read_text() == edited
    assert (root / "grpo/grpo.py").read_text() == trainer("grpo/grpo.py")
    assert copies.copy("ppo/ppo.py", "twice", root, force=True) == ["grpo/grpo.py", "rce/rce.py"]
    assert copies.differences(root) == []


def test_the_commands(root, monkeypatch, capsys):
    copies.main([], root)
    assert capsys.readouterr().out == "all copies are equal, and every definition is used\n"
    (root / "rce/rce.py").write_text(trainer("rce/rce.py", SHARED.replace("2 * x", "x + x")))
    with pytest.raises(SystemExit, match=r"twice differs between ppo/ppo\.py and rce/rce\.py"):
        copies.main([], root)
    monkeypatch.chdir(root / "rce")  # a path is relative to the working directory
    copies.main(["rce.py:twice"], root)
    assert capsys.readouterr().out == "twice copied to ppo/ppo.py, grpo/grpo.py\n"
    with pytest.raises(SystemExit, match="defines no twise below its machinery line; did you mean twice"):
        copies.main(["rce.py:twise"], root)
    with pytest.raises(SystemExit, match="is no trainer"):
        copies.main([f"{root}/no.py:twice"], root)
    with pytest.raises(SystemExit, match="Compares the functions"):
        copies.main(["rce.py"], root)
