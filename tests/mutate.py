"""Plants one wrong operator or number after the other into a trainer's maths, and looks whether tests fail.

    python tests/mutate.py ppo/ppo.py               # all mutants of the part `the maths of ...`
    python tests/mutate.py grpo/grpo.py kl_loss     # of one function, also outside that part

A mutant changes one thing: + to -, * to /, < to <=, a number, min to max, `and` to `or`, a condition to its
opposite, or it drops a sign or a .clamp(). One that test_<trainer>.py and test_maths.py let pass is
printed as ALIVE: a test is missing, or the code does nothing. Exit code 1 if one is alive.
"""

import ast
import importlib
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
JOBS = 2
SWAPS = {"Add": "-", "Sub": "+", "Mult": "/", "Div": "*", "Pow": "*", "BitAnd": "|", "BitOr": "&"}
SWAPS |= {"Lt": "<=", "LtE": "<", "Gt": ">=", "GtE": ">", "Eq": "!=", "NotEq": "==", "And": "or", "Or": "and"}
NAMES = {"min": "max", "max": "min", "exp": "log", "mean": "sum", "cos": "sin", "clamp": "", "rsqrt": "sqrt"}


def part_of(text):
    """Returns the lines of the maths, from 1: first and last."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines, 1) if line.startswith("# =====") and "the maths" in line)
    last = next(i for i, line in enumerate(lines, 1) if line.startswith("# =====") and i > first)
    return first, last


def replacements(node, source):
    """Yields texts that may stand in place of a node."""
    text = ast.get_source_segment(source, node)
    if isinstance(node, (ast.BinOp, ast.Compare, ast.BoolOp)):
        children = list(ast.iter_child_nodes(node))
        operands = [ast.get_source_segment(source, x) for x in children if isinstance(x, ast.expr)]
        for child in children:
            if type(child).__name__ in SWAPS:
                yield f"({operands[0]}) {SWAPS[type(child).__name__]} ({operands[1]})"
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield repr(node.value + 1)
        if type(node.value) is float:  # an integer is mostly a dimension: -1 would be the same as 1
            yield repr(-node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield ast.get_source_segment(source, node.operand)
    if isinstance(node, ast.IfExp):
        yield ast.get_source_segment(source, node.body)
        yield ast.get_source_segment(source, node.orelse)
    if isinstance(node, ast.Call):
        function = node.func
        name = getattr(function, "attr", getattr(function, "id", None))
        if name == "clamp":
            yield ast.get_source_segment(source, function.value)
        elif name in NAMES:
            whole = ast.get_source_segment(source, function)
            yield text.replace(whole, whole[: -len(name)] + NAMES[name], 1)


def mutants(text, names):
    """Returns (line, old, new, whole mutated text) of each mutant."""
    first, last = part_of(text)
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    made = []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        if function.name not in names if names else not first < function.lineno < last:
            continue
        for node in ast.walk(function):
            conditions = [node.test] if isinstance(node, ast.If) else []
            changes = [(condition, f"not ({ast.unparse(condition)})") for condition in conditions]
            if isinstance(node, ast.expr):
                changes += [(node, new) for new in replacements(node, text)]
            for place, new in changes:
                begin = starts[place.lineno - 1] + place.col_offset
                end = starts[place.end_lineno - 1] + place.end_col_offset
                old = text.encode()[begin:end].decode()
                mutated = (text.encode()[:begin] + f"({new})".encode() + text.encode()[end:]).decode()
                made.append((place.lineno, old, new, mutated))
    return made


def survives(tree, file, mutated, test):
    """Returns whether the tests pass with the mutated text, in a copy of the repository."""
    (tree / file).write_text(mutated)
    child = os.fork()
    if child == 0:
        os.chdir(tree)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        sys.path.insert(0, str(tree / "tests"))
        import pytest

        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", f"--rootdir={tree}"]
        os._exit(int(pytest.main([*options, str(tree / "tests/test_maths.py"), str(tree / test)])))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def main(file, *names):
    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"})
    for name in "pytest torch transformers.models.llama.modeling_llama matplotlib.figure".split():
        importlib.import_module(name)  # once, for all forks
    text = (ROOT / file).read_text()
    stem = Path(file).stem
    test = f"tests/test_{'preferences' if stem in ('reward_model', 'dpo') else stem}.py"
    planted = mutants(text, names)
    print(f"{len(planted)} mutants of {file}, {test}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        trees = SimpleQueue()
        for number in range(JOBS):
            tree = Path(folder) / str(number)
            tree.mkdir()
            command = f"git ls-files -z | xargs -0 tar cf - | tar xf - -C {tree}"
            subprocess.run(command, shell=True, cwd=ROOT, check=True)
            trees.put(tree)
        if not survives(Path(folder) / "0", file, text, test):
            sys.exit(f"{test} fails without a mutant")

        def is_alive(mutant):
            tree = trees.get()
            try:
                return survives(tree, file, mutant[3], test)
            finally:
                trees.put(tree)

        alive = 0
        with ThreadPoolExecutor(JOBS) as pool:
            for (line, old, new, _), lives in zip(planted, pool.map(is_alive, planted)):
                if lives:
                    alive += 1
                    print(f"ALIVE {file}:{line}: {' '.join(old.split())}  ->  {new}", flush=True)
    print(f"{len(planted)} planted, {alive} alive")
    return alive > 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
