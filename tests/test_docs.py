"""The documents: links lead somewhere, commands have programs and constants that exist, snippets compile."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys

import pandas
import pytest
from conftest import ROOT, TINY, TRAINERS, read

PAGES = [ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "checkpoints/README.md")]
PAGES += sorted(ROOT.glob("docs/**/*.md")) + sorted(ROOT.glob("examples/README.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def slug(heading):
    """Returns GitHub's anchor of a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page):
    """Returns the anchors of a page's headings; of equal headings the later ones have a number."""
    found = []
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        anchor = slug(heading)
        count = sum(re.sub(r"-\d+$", "", other) == anchor or other == anchor for other in found)
        found.append(f"{anchor}-{count}" if count else anchor)
    return found


def links(page):
    """Yields (target, file, anchor) of a page's relative links."""
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if not re.match(r"https?:|mailto:", target):
            path, _, anchor = target.partition("#")
            yield target, (page.parent / path).resolve() if path else page, anchor


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_to_a_file_and_a_heading(name):
    wrong = []
    for target, path, anchor in links(ROOT / name):
        if not path.exists():
            wrong.append(f"{target}: no such file")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            wrong.append(f"{target}: no such heading")
    assert not wrong


def test_every_page_is_linked_from_the_readme_or_a_page_that_it_links():
    start = ROOT / "README.md"
    seen = {start}
    waiting = [start]
    while waiting:
        for _, path, _ in links(waiting.pop()):
            if path.suffix == ".md" and path.exists() and path not in seen:
                seen.add(path)
                waiting.append(path)
    of_docs = {page for page in PAGES if "docs" in page.parts}
    assert of_docs <= seen


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


# ---------------------------------------------------------------- commands


STUBS = """
python() { "$REAL_PYTHON" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" >> "$SAID"; }
torchrun() { while [[ $1 == --* ]]; do shift; done; python "$@"; }
srun() { "$@"; }
command_not_found_handle() { return 0; }
"""


def commands(page, folder):
    """Returns the argument lists of the programs of Python that a page's shell blocks start: bash reads the
    blocks, with stand-ins for all programs."""
    said = folder / "said"
    said.touch()
    tools = folder / "bin"
    tools.mkdir()
    for name in ("cat", "ls", "wc"):
        (tools / name).symlink_to(shutil.which(name))
    environment = {"PATH": str(tools), "SAID": str(said), "REAL_PYTHON": sys.executable, "HOME": str(folder)}
    for language, block in FENCE.findall(page.read_text()):
        if language == "bash":
            subprocess.run(
                [shutil.which("bash"), "-c", STUBS + block],
                cwd=folder,
                env=environment,
                capture_output=True,
                timeout=30,
            )
    return [json.loads(line) for line in said.read_text().splitlines()]


def constants_of(path):
    """Returns the names of a file's constants: what stands in capitals at its top level."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
    return {name for name in names if name.isupper() and not name.startswith("_")}


@pytest.mark.parametrize("name", NAMES)
def test_each_command_has_a_program_that_exists_and_constants_that_it_has(name, tmp_path):
    for path, *words in commands(ROOT / name, tmp_path):
        if path in ("-m", "-c"):
            continue
        path = path.removeprefix("/")  # $REPO/ppo/ppo.py, where REPO is not set
        if path.endswith("mine.py"):  # a copy that the page has just made
            path = "grpo/grpo.py"
        assert (ROOT / path).exists(), (path, words)
        if path.split("/")[0] in ("ppo", "grpo", "rce"):
            named = {word.partition("=")[0] for word in words if word[0] not in "-@"}
            assert named <= constants_of(path), (path, sorted(named - constants_of(path)))


# ---------------------------------------------------------------- snippets


def snippets(name):
    """Yields the blocks of Python in a page."""
    for language, block in FENCE.findall((ROOT / name).read_text()):
        if language == "python":
            yield block


@pytest.mark.parametrize("name", NAMES)
def test_each_snippet_is_python(name):
    for block in snippets(name):
        compile(block, name, "exec")


def test_the_quickstarts_policy_answers(tmp_path, monkeypatch, capsys):
    (block,) = [block for block in snippets("docs/quickstart.md")]
    exec(block.replace("checkpoints/grpo/best/policy", os.fspath(TINY / "policy")), {})
    assert capsys.readouterr().out == "34-23=11\n#### 11\n"
    text = (ROOT / "docs/quickstart.md").read_text()
    assert "Before training it prints `34-23=11`, `#### 11`." in text


def test_the_page_of_preferences_makes_pairs_of_candidates(tmp_path, monkeypatch):
    """The best and the worst of each prompt: right before wrong, then by the grade; not what failed."""
    groups = {"a": [(0, 0.2), (1, 0.4), (1, 0.9), (0, 0.1), (None, None)], "b": [(1, 0.5), (1, 0.5)]}
    rows = []
    for name, marks in groups.items():
        for i, (hard, soft) in enumerate(marks):
            row = {"prompt_id": name, "prompt": f"{name}?", "text": f"{name}{i}", "hard": hard, "soft": soft}
            rows.append({**row, "eval_failed": False, "truncated": False})
    rows.append({**rows[0], "text": "failed", "soft": -1.0, "eval_failed": True})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints/rce").mkdir(parents=True)
    pandas.DataFrame(rows).to_parquet("checkpoints/rce/candidates_round_1.parquet")
    (block,) = [block for block in snippets("docs/preferences.md") if "pairs.jsonl" in block]
    exec(block, {})
    (pair,) = read(tmp_path / "pairs.jsonl")
    assert pair == {"prompt": "a?", "chosen": "a2", "rejected": "a3", "margin": pytest.approx(1.8)}


def test_each_line_that_a_page_takes_out_of_a_trainer_stands_in_one():
    trainers = [(ROOT / path).read_text() for path in TRAINERS]
    for language, block in FENCE.findall((ROOT / "docs/change-the-algorithm.md").read_text()):
        for line in re.findall(r"^-(.*\n)", block, re.MULTILINE) if language == "diff" else []:
            assert any(line in text for text in trainers), line
