"""The trainers are plain: counts of habits that make readers stop, with limits (docs: AGENTS.md)."""

import ast

import pytest
from old import ROOT
from old import TRAINERS as FILES

COMPREHENSION = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
OURS = ("self", "batch")  # objects on which attributes may be set
TORCH_OWN = ("grad", "training", "data", "requires_grad")  # attributes that torch itself has


def rows_of(node_type, tree):
    return [node for node in ast.walk(tree) if isinstance(node, node_type)]


def is_text(node):
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def counts(text):
    """Returns {habit: lines where it stands} and the number of code lines."""
    tree = ast.parse(text)
    found = {
        "conditional expressions": [node.lineno for node in rows_of(ast.IfExp, tree)],
        "comprehensions": [node.lineno for node in rows_of(COMPREHENSION, tree)],
    }
    iterables = [node.iter for node in rows_of((ast.For, ast.comprehension), tree)]
    found["conditional iterables"] = [node.lineno for node in iterables if isinstance(node, ast.IfExp)]
    found["texts times a condition"] = []
    for node in rows_of(ast.BinOp, tree):
        sides = (node.left, node.right)
        is_count = any(isinstance(side, ast.Constant) and isinstance(side.value, int) for side in sides)
        if isinstance(node.op, ast.Mult) and any(map(is_text, sides)) and not is_count:
            found["texts times a condition"].append(node.lineno)
    statements = rows_of(ast.Expr, tree)
    found["comprehensions as statements"] = [
        n.lineno for n in statements if isinstance(n.value, COMPREHENSION)
    ]
    found["probes whether a name exists"] = []
    for node in rows_of(ast.Compare, tree):
        is_globals = [isinstance(x, ast.Call) and ast.unparse(x) == "globals()" for x in node.comparators]
        if any(is_globals) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            found["probes whether a name exists"].append(node.lineno)
    code = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    return found, len(code)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "habit",
    [
        "conditional iterables",
        "texts times a condition",
        "comprehensions as statements",
        "probes whether a name exists",
    ],
)
def test_no_trainer_has_a_habit_that_makes_readers_stop(file, habit):
    found, _ = counts((ROOT / file).read_text())
    assert not found[habit], f"{file}: {habit} in lines {found[habit]}"


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("habit, limit", [("conditional expressions", 2), ("comprehensions", 4)])
def test_a_trainer_is_not_dense(file, habit, limit):
    found, code = counts((ROOT / file).read_text())
    per_hundred = 100 * len(found[habit]) / code
    assert per_hundred <= limit, f"{file}: {per_hundred:.2f} {habit} per 100 lines of code, at most {limit}"


@pytest.mark.parametrize("file", FILES)
def test_no_trainer_sets_an_attribute_on_a_tensor_or_a_model(file):
    """By their names in these files; what is ours (batch, run, group, state) may carry what it holds."""
    names = {"model", "tensor", "rows", "keys", "key", "module", "actor", "layer", "index", "merged"}
    # our own layer; peft's own flag; transformers' own field
    allowed = {("layer", "prompt"), ("merged", "_hf_peft_config_loaded"), ("model", "generation_config")}
    lines = []
    for node in rows_of(ast.Assign, ast.parse((ROOT / file).read_text())):
        for target in node.targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                pair = (target.value.id, target.attr)
                if pair[0] in names and pair[1] not in TORCH_OWN and pair not in allowed:
                    lines.append((node.lineno, ".".join(pair)))
    assert not lines, f"{file}: {lines}"


def test_the_counter_counts():
    text = "for x in (a if b else c):\n    y = 'a' * b\n[f(x) for x in z]\nif 'q' in globals():\n    pass\n"
    found, code = counts(text)
    assert code == 5
    assert {habit: len(lines) for habit, lines in found.items()} == {
        "conditional expressions": 1,
        "comprehensions": 1,
        "conditional iterables": 1,
        "texts times a condition": 1,
        "comprehensions as statements": 1,
        "probes whether a name exists": 1,
    }
    assert counts("y = 'a' * 3\n")[0]["texts times a condition"] == []
