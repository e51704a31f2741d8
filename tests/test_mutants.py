"""The mutants of mutants_*.py fit the files they are planted in. (To plant them: python tests/mutants.py.)"""

import ast
from functools import cache

import pytest
from conftest import ROOT
from mutants import MUTANTS


@cache
def names_in(file):
    """Names of the test functions of a file."""
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("file, old, new, test", MUTANTS, ids=range(len(MUTANTS)))
def test_a_mutant_has_its_place_and_its_test(file, old, new, test):
    assert (ROOT / file).read_text().count(old) == 1 and new != old
    path, name = test.split("::")
    assert name.partition("[")[0] in names_in(path)


def test_no_mutant_stands_twice():
    assert len({mutant[:3] for mutant in MUTANTS}) == len(MUTANTS)
