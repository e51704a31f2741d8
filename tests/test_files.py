"""Sizes and copies of the trainers: each is read in one sitting, and what they share is the same text."""

import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import copies

LIMITS = {
    **{"ppo/ppo.py": 1780, "grpo/grpo.py": 1785, "rce/rce.py": 2085, "rewards/__init__.py": 300},
    **{"ppo/sft.py": 1225, "ppo/reward_model.py": 1205, "rce/dpo.py": 1365},
    **{"ppo/ppo_rag.py": 1225, "grpo/grpo_rec.py": 1500, "rce/rce_icl.py": 1770},
}


@pytest.mark.parametrize("file", LIMITS)
def test_a_file_is_read_in_one_sitting(file):
    lines = len((ROOT / file).read_text().splitlines())
    assert lines <= LIMITS[file], f"{file} has {lines} lines: take some away, or raise LIMITS in your copy"


def test_definitions_of_one_name_are_the_same_text():
    assert copies.compare({file: (ROOT / file).read_text() for file in copies.TRIO}) == []


def test_each_difference_of_the_table_exists():
    for file, name in copies.DIFFERS:
        texts = {other: (ROOT / other).read_text() for other in copies.TRIO}
        own = copies.definitions(texts.pop(file))[name]
        assert any(copies.definitions(text).get(name, own)[2] != own[2] for text in texts.values()), name


ONE = "class Run:\n    def open(self):\n        return 1\n\n\ndef share(x):\n    return x\n"


def test_a_difference_is_reported_unless_it_is_in_the_table(monkeypatch):
    two = ONE.replace("return 1", "return 2")
    (message,) = copies.compare({"a.py": ONE, "b.py": two})
    assert message.startswith("Run.open differs") and "-        return 1" in message
    monkeypatch.setattr(copies, "DIFFERS", {("b.py", "Run.open"): "it is two"})
    assert copies.compare({"a.py": ONE, "b.py": two}) == []
    (message,) = copies.compare({"a.py": ONE, "b.py": two, "c.py": two})
    assert message.startswith("Run.open differs") and "c.py" in message


def test_an_edit_is_copied_to_the_others_but_not_over_one_of_the_table(monkeypatch):
    monkeypatch.setattr(copies, "DIFFERS", {("c.py", "share"): "more"})
    two = ONE.replace("return x", "return x + 1  # old")
    assert copies.copy({"a.py": ONE, "b.py": two, "c.py": two}, "a.py", "share") == {"b.py": ONE}
