"""Write docs/constants.md: every constant of every trainer, with its default and the comment beside it.

python tools/constants.py           # writes the page
python tools/constants.py --check   # exit code 1 if the page differs from what the trainers say
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/constants.md"
TOGETHER = ("ppo/ppo.py", "grpo/grpo.py", "rce/rce.py", "ppo/sft.py", "ppo/reward_model.py", "rce/dpo.py")
ALONE = ("ppo/ppo_rag.py", "grpo/grpo_rec.py", "rce/rce_icl.py")
LONGEST = 60  # characters of a default; a longer one is only in the file
SECTION_OF = {"Model": "Models", "Training": "Rollout", "What to do": "Stage"}  # one name for one thing
HEAD = """# Constants

Every constant, its default, and the comment that stands beside it in the file. `KEY=VALUE` on the command
line overrides it. `python tools/constants.py` writes this page from the trainers. A constant with two
meanings has two rows. Paths are relative to the repository.
"""


def block_of(path):
    """Returns the lines of a trainer's file between the line "constants" and the table of valid values."""
    text = (ROOT / path).read_text()
    return text.split("= constants\n")[1].split("\n_VALID_RANGES")[0].splitlines()


def section_name(comment):
    """Returns the first words of a comment that begins a section: "Data sets: {...}" -> "Data sets"."""
    name = re.match(r"[^.:]*", comment)[0].strip()
    return SECTION_OF.get(name, name)


def constants_of(path):
    """Returns [(section, name, default, meaning)] in the file's order."""
    lines = block_of(path)
    rows = []
    section = "Stage"
    text = "\n".join(lines)
    for node in ast.parse(text).body:
        above = comment_above(lines, node.lineno - 1)
        starts_section = above and not lines[node.lineno - 2 - len(above)].strip()
        if starts_section and re.match("[A-Z]", above[0]) and "None:" not in above[0]:
            section = section_name(" ".join(above))
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if target.id.startswith("_"):
            continue
        if section.startswith("Panels"):
            section = "Bookkeeping"
        beside = [line.partition("  # ")[2] for line in lines[node.lineno - 1 : node.end_lineno]]
        meaning = " ".join(filter(None, beside)).removeprefix("noqa: F821").strip()
        default = " ".join(ast.get_source_segment(text, node.value).split())
        rows.append((section, target.id, default, meaning or first_meaning(above, starts_section)))
    return rows


def comment_above(lines, index):
    """Returns the texts of the comment lines directly above a line."""
    found = []
    while index > 0 and lines[index - 1].startswith("# "):
        index -= 1
        found.insert(0, lines[index][2:])
    return found


def first_meaning(above, starts_section):
    """Returns what the comment above a constant says, without the section's name."""
    text = " ".join(above)
    return re.sub(r"^[A-Z][\w' ]*([:.] |$)", "", text) if starts_section else text


def shown(default):
    """Returns a default as a table shows it."""
    text = re.sub(r'f"\{ROOT\}/([^"]*)"', r'"\1"', default)
    return "in the file" if len(text) > LONGEST else "`" + text.replace("|", "\\|") + "`"


def table(rows, with_files):
    """Returns a Markdown table of {(name, meaning): {default: [trainers]}}."""
    head = "| constant | default | meaning | files |\n|---|---|---|---|" if with_files else ""
    lines = [head or "| constant | default | meaning |\n|---|---|---|"]
    for (name, meaning), defaults in rows.items():
        texts = [shown(default) for default in defaults]
        if len(set(texts)) > 1:
            names = [", ".join(files) for files in defaults.values()]
            texts = [f"{text} ({files})" for text, files in zip(texts, names)]
        meaning = meaning.replace("|", "\\|").replace("<", "&lt;")
        cells = [f"`{name}`", ", ".join(dict.fromkeys(texts)), meaning]
        if with_files:
            cells.append(", ".join(file for files in defaults.values() for file in files))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sections_of(paths):
    """Returns {section: {(name, meaning): {default: [trainers]}}} of several files."""
    sections = {}
    for path in paths:
        for section, name, default, meaning in constants_of(path):
            row = sections.setdefault(section, {}).setdefault((name, meaning), {})
            row.setdefault(default, []).append(Path(path).stem)
    return sections


def page():
    names = ", ".join(f"`{path}`" for path in TOGETHER)
    parts = [HEAD, f"## PPO, GRPO, RCE, and the path before them\n\n{names}\n"]
    for section, rows in sections_of(TOGETHER).items():
        parts.append(f"### {section}\n\n{table(rows, True)}\n")
    for path in ALONE:
        parts.append(f"## {Path(path).name}\n")
        for section, rows in sections_of([path]).items():
            parts.append(f"### {section} of {Path(path).name}\n\n{table(rows, False)}\n")
    return "\n".join(parts)


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    if not sys.argv[1:]:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit(f"{PAGE.relative_to(ROOT)} is old: run python tools/constants.py")


if __name__ == "__main__":
    main()
