"""What the trainers share is the same in each; the algorithm stands above it; lines can be read."""

import subprocess
import sys
from functools import cache

import blocks
import pytest
from conftest import ROOT, TRAINERS, load_script, read, small
from torch.testing import assert_close

NAMES = ("language models", "rewards", "the run")  # blocks of the small trainers below
LENGTHS = [
    ("ppo/ppo.py", 480),
    ("grpo/grpo.py", 556),
    ("rce/rce.py", 672),
    ("ppo/ppo_rag.py", 499),
    ("grpo/grpo_rec.py", 667),
    ("rce/rce_icl.py", 731),
]
MOST = {  # lines of a block today; a further promise finds its lines inside
    "language models": 606,
    "prompts and responses": 226,
    "records": 73,
    "rewards": 96,
    "the run": 714,
    "mining and check-up": 126,
    "faster decoding": 63,
    "faster scoring": 46,
    "adapters": 74,
    "sharding": 77,
}


def upper_part(text):
    """How many lines stand above the first block."""
    return text[: blocks.MARK.search(text).start()].count("\n")


def test_the_blocks_of_all_trainers_are_equal():
    wrong = blocks.differences()
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("file, most", LENGTHS)
def test_the_algorithm_stands_above_the_first_block_and_is_short(file, most):
    assert upper_part((ROOT / file).read_text()) <= most


@pytest.mark.parametrize("name", MOST)
def test_a_block_does_not_grow(name):
    file = next(file for file, names in blocks.HAVE.items() if name in names)
    text = (ROOT / file).read_text()
    begin, end = blocks.places(file, text)[name]
    assert text.count("\n", begin, end) <= MOST[name]


def test_no_line_of_python_is_over_110_characters():
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    files = [ROOT / name for name in listed.stdout.splitlines()] or list(ROOT.glob("[!.]*/*.py"))
    over = {}
    for path in files:
        lines = path.read_text().splitlines() if path.exists() else []
        numbers = [str(number) for number, line in enumerate(lines, 1) if len(line) > 110]
        if numbers:
            over[path.relative_to(ROOT).as_posix()] = numbers
    assert len(files) > 10
    listing = (f"{file}: {len(lines)} (lines {', '.join(lines[:5])} ...)" for file, lines in over.items())
    assert not over, "lines over 110 characters:\n" + "\n".join(listing)


EACH = [(path, blocks.LESS) for path in TRAINERS] + [("grpo/grpo.py", (name,)) for name in blocks.LESS]


def one_step(file, path, out):
    """What a step of a trainer's file, or of a copy of it, says and learns."""
    learns = {"MISSING_EOS_PENALTY": 1.0} if path == "ppo/ppo.py" else {}  # other rewards are all 0 here
    module = load_script(file, **small(path, MAX_STEPS=1, OUTPUT_DIR=str(out), **learns))
    trainer = getattr(module, TRAINERS[path])()
    trainer.train()
    said = [sample["response"] for sample in read(out / "logs/samples.jsonl")]
    norms = [record["grad_norm"] for record in read(out / "logs/metrics.jsonl") if record["phase"] == "train"]
    assert norms and all(norms)
    weights = {name: model.state_dict() for name, model in trainer.models.items()}
    return said, weights, (hasattr(module, "shared_prompt_attention"), trainer.actor.shares_prompts)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """one_step() of a trainer's own file, done once."""
    return cache(lambda path: one_step(path, path, tmp_path_factory.mktemp("whole")))


@pytest.mark.parametrize("path, names", EACH, ids=lambda x: x if isinstance(x, str) else "+".join(x))
def test_a_copy_without_the_blocks_that_may_go_trains_as_the_file_does(path, names, whole, tmp_path):
    text = (ROOT / path).read_text()
    for name, (begin, end) in reversed(blocks.places(path, text).items()):
        if name in names:
            text = text[:begin] + text[end:]
    for folder in ("rewards", "data"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    copy = tmp_path / "mine.py"
    copy.write_text(text)
    (said, weights, ways), (same_said, same_weights, own) = whole(path), one_step(copy, path, tmp_path)
    assert said == same_said
    assert_close(weights, same_weights, rtol=0, atol=3e-5)  # a step moves them by 1e-4 or more
    assert ways == (True, True) and own == ("faster decoding" not in names, "faster scoring" not in names)


# ---------------------------------------------------------------- tests/blocks.py itself, on small files


def trainer(file, **changed):
    """A small trainer: an algorithm of its own, and the blocks with what `changed` makes of them."""
    text = f'"""{file}"""\nMINE = "{file}"\n'
    for number, name in enumerate(NAMES):
        body = changed.get(f"block_{number}", f"def function_{number}():\n    return {number}\n")
        text += f"\n\n# ==== block: {name}\n# A sentence.\n{body}# ==== end of block: {name}\n"
    return text + f"\n\ndef train_main():\n    return {file!r}\n"


@pytest.fixture
def three(monkeypatch):
    """As if these three were all trainers."""
    monkeypatch.setattr(blocks, "HAVE", {file: NAMES for file in TRAINERS})


@pytest.fixture
def root(tmp_path, three):
    """Three trainers in a folder of their own, whose blocks are equal."""
    for file in TRAINERS:
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(trainer(file))
    assert blocks.differences(tmp_path) == []
    return tmp_path


@pytest.mark.parametrize("number, name", list(enumerate(NAMES)))
@pytest.mark.parametrize(
    "body",
    [
        "def function():\n    return 7\n",  # another line
        "def function_0():\n    return  0\n",  # a space more
        "",  # nothing
    ],
)
def test_a_planted_difference_is_shown_with_both_files(root, number, name, body):
    (root / "grpo/grpo.py").write_text(trainer("grpo/grpo.py", **{f"block_{number}": body}))
    (wrong,) = blocks.differences(root)
    assert f"the block {name!r} differs between ppo/ppo.py and grpo/grpo.py" in wrong
    assert "--- ppo/ppo.py\n+++ grpo/grpo.py" in wrong
    assert f"\n-    return {number}" in wrong


def test_a_difference_in_line_ends_alone_is_one(root):
    text = (root / "rce/rce.py").read_bytes()
    (root / "rce/rce.py").write_bytes(text.replace(b"return 1\n", b"return 1\r\n"))
    (wrong,) = blocks.differences(root)
    assert "between ppo/ppo.py and rce/rce.py" in wrong


def test_the_real_files_are_compared(tmp_path, three):
    """A bit of ppo.py's own last block, changed in a copy of grpo.py."""
    for file in TRAINERS:
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text((ROOT / "ppo/ppo.py").read_text())
    text = (tmp_path / "grpo/grpo.py").read_text()
    planted = text.replace("handle = os.open(path, os.O_RDONLY)", "handle = os.open(path, 0)")
    assert planted != text
    (tmp_path / "grpo/grpo.py").write_text(planted)
    (wrong,) = blocks.differences(tmp_path)
    assert "the block 'the run' differs between ppo/ppo.py and grpo/grpo.py" in wrong
    assert "+    handle = os.open(path, 0)" in wrong


def test_spreading_mends_it_and_leaves_the_rest_of_the_file_alone(root):
    body = "def function_1():\n    return 'better'\n"
    better = trainer("grpo/grpo.py", block_1=body)
    (root / "grpo/grpo.py").write_text(better)
    (root / "mine").mkdir()
    one = "MINE = 1\n# ==== block: the run\nold\n# ==== end of block: the run\nLAST = 1"
    (root / "mine/mine.py").write_text(one)  # a trainer that has one block only, and no line end at the end
    (root / "mine/other.py").write_text("x = 1\n")
    assert blocks.spread("grpo/grpo.py", root) == ["ppo/ppo.py", "rce/rce.py", "mine/mine.py"]
    assert blocks.differences(root) == []
    assert (root / "grpo/grpo.py").read_text() == better
    for file in ("ppo/ppo.py", "rce/rce.py"):
        assert (root / file).read_text() == trainer(file, block_1=body)
    the_run = blocks.blocks("grpo/grpo.py", better)["the run"]
    assert (root / "mine/mine.py").read_text() == f"MINE = 1\n{the_run}LAST = 1"
    assert (root / "mine/other.py").read_text() == "x = 1\n"
    assert blocks.spread("grpo/grpo.py", root) == []


@pytest.mark.parametrize(
    "old, new, says",
    [
        (
            "# ==== end of block: rewards\n",
            "",
            "grpo/grpo.py: line 18 opens the block 'the run' before 'rewards' has its end",
        ),
        (
            "# ==== end of block: the run\n",
            "",
            "grpo/grpo.py: the block 'the run' has no line `# ==== end of block: the run`",
        ),
        (
            "# ==== block: the run\n",
            "",
            "grpo/grpo.py: line 22 closes the block 'the run', which is not open there",
        ),
        (
            "# ==== block: the run\n",
            "# ==== block: rewards\n",
            "grpo/grpo.py: line 19 opens the block 'rewards' a second time",
        ),
        ("block: the run\n", "block: another\n", "grpo/grpo.py: there is no block 'the run'"),
    ],
)
def test_markers_that_do_not_fit_are_named_and_nothing_is_spread(root, old, new, says):
    (root / "grpo/grpo.py").write_text(trainer("grpo/grpo.py").replace(old, new))
    before = {file: (root / file).read_bytes() for file in TRAINERS}
    assert blocks.differences(root) == [says]
    for source in ("ppo/ppo.py", "grpo/grpo.py"):
        with pytest.raises(blocks.Fault) as fault:
            blocks.spread(source, root)
        assert str(fault.value) == says
    assert before == {file: (root / file).read_bytes() for file in TRAINERS}


def test_a_trainer_that_is_gone_is_named(root):
    (root / "rce/rce.py").unlink()
    assert blocks.differences(root) == ["rce/rce.py: there is no such file"]
    with pytest.raises(blocks.Fault, match="rce/rce.py: there is no such trainer with blocks"):
        blocks.spread("rce/rce.py", root)


def test_the_commands(root, monkeypatch, capsys):
    blocks.main([], root)
    assert capsys.readouterr().out == "the blocks of all trainers are equal\n"
    (root / "rce/rce.py").write_text(trainer("rce/rce.py", block_2="pass\n"))
    with pytest.raises(SystemExit, match="--- ppo/ppo.py\n.*rce/rce.py"):
        blocks.main([], root)
    monkeypatch.chdir(root / "ppo")  # a path is the user's own, from where he stands
    blocks.main(["ppo.py"], root)
    assert capsys.readouterr().out == "ppo/ppo.py's blocks copied to rce/rce.py\n"
    assert blocks.differences(root) == []
    with pytest.raises(SystemExit, match="no such trainer"):
        blocks.main([str(root / "ppo/no.py")], root)


def test_a_difference_ends_the_program_with_exit_code_1(tmp_path):
    """As it is run: a copy of it looks at the trainers beside it, and here there are none."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/blocks.py").write_bytes((ROOT / "tests/blocks.py").read_bytes())
    command = [sys.executable, tmp_path / "tests/blocks.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "ppo/ppo.py: there is no such file" in done.stderr
    assert "Traceback" not in done.stderr
