"""The documents: links lead somewhere, commands have constants that exist, snippets run, generated pages are
new."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY, load_script, small
from test_rag import world  # noqa: F401 (a fixture)
from test_rec import write_world
from test_your_model import SMALLER, gsm8k, qwen  # noqa: F401 (fixtures)
from test_vision import embedder_folder, family, llava, rows_with_images  # noqa: F401 (fixtures)

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


@pytest.mark.parametrize("name", NAMES)
def test_no_page_has_a_gap_that_was_to_be_filled(name):
    assert not re.findall(r"@@?[A-Z0-9]{3,}@@?|TODO|>\?<!--/r", (ROOT / name).read_text())


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


def test_the_readme_is_at_most_150_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


# ---------------------------------------------------------------- generated pages


def test_the_page_of_constants_is_what_the_trainers_say():
    module = load_script("tools/constants.py")
    assert module.PAGE.read_text() == module.page(), "run python tools/constants.py"


def test_the_page_of_constants_has_each_trainers_constants_with_their_comments():
    module = load_script("tools/constants.py")
    text = module.page()
    for path in (*module.TOGETHER, *module.ALONE):
        block = "\n".join(module.block_of(path))
        for name in filter(lambda name: f"\n{name}" in block, load_script(path).constants()):
            assert f"| `{name}` |" in text, (path, name)
    assert "| `_" not in text
    assert not re.search(r"^### .*\|", text, re.MULTILINE), (
        "a comment below a section's name became part of it"
    )
    assert "| `LEARNING_RATE` | `1e-4` (ppo, grpo, dpo)" in text
    assert (
        "| `CLIP_RANGE_HIGH` | `0.2` | > 0; DAPO's clip-higher: 0.28; gspo about 4e-4; cispo about 4 |"
        in text
    )
    assert '| `ACTOR_MODEL` | `"data/tiny/policy"` | a folder or a hub name |' in text


def test_a_changed_comment_makes_the_page_old(monkeypatch, tmp_path):
    module = load_script("tools/constants.py")
    for path in (*module.TOGETHER, *module.ALONE):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        text = (ROOT / path).read_text()
        (tmp_path / path).write_text(text.replace("# sampled responses per prompt", "# answers per prompt"))
    before = module.page()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert module.page() == before.replace("sampled responses per prompt", "answers per prompt") != before


def test_the_short_list_of_architectures_is_what_its_table_says():
    text = (ROOT / "docs/architectures.md").read_text()
    outcomes = {}
    for name, variant, outcome in re.findall(r"^\| (\S+) \| (.*?) \| (\w[\w ]*) \|", text, re.MULTILINE):
        if "beyond its length" not in variant:
            outcomes.setdefault(name, []).append(outcome)
    works, refused = re.findall(r"^\| (?:work|are refused with a message) \| (.*) \|$", text, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", works):
        assert set(outcomes[name]) == {"equal"}, name
    for name in re.findall(r"`(\w+)`", refused):
        assert outcomes[name][0] == "refused", name


# ---------------------------------------------------------------- commands


trainer_of = functools.cache(load_script)  # one module per file: their constants are not used
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


@pytest.mark.parametrize("name", NAMES)
def test_each_command_has_a_program_that_exists_and_constants_that_it_takes(name, tmp_path):
    for path, *words in commands(ROOT / name, tmp_path):
        if path in ("-m", "-c"):
            continue
        path = path.removeprefix("/")  # $REPO/ppo/ppo.py, where REPO is not set
        if path.endswith("mine.py"):  # a copy that the page has just made
            path = "grpo/grpo.py"
        assert (ROOT / path).exists(), (path, words)
        if path.split("/")[0] in ("ppo", "grpo", "rce"):
            trainer = trainer_of(path)
            try:
                trainer.apply_overrides(
                    [word for word in words if word != "--help" and not word.startswith("@mine/")]
                )
            except trainer.UserError as error:
                pytest.fail(f"{name}: {path} {words}: {error}")


def test_the_command_for_your_data_on_this_machine_runs(started, tmp_path, monkeypatch):
    (tmp_path / "stubs").mkdir()
    found = [
        words
        for words in commands(ROOT / "docs/your-data.md", tmp_path / "stubs")
        if "OUTPUT_DIR=checkpoints/my_data" in words
    ]
    ((path, *words),) = found
    monkeypatch.chdir(tmp_path)
    Path("data").symlink_to(ROOT / "data")
    programs = re.findall(r'^python -c "(.*)"$', (ROOT / "docs/your-data.md").read_text(), re.M)
    assert len(programs) == 2
    for program in programs:  # they write questions.csv and held_out.csv
        exec(program)
    fewer = ["MAX_STEPS=1", "BATCH_SIZE=2", "GROUP_SIZE=2", "MAX_NEW_TOKENS=8", "MAX_EVAL_PROMPTS=2"]
    done = started(path, *words, *fewer, shrink=False)
    assert done.returncode == 0 and "300 prompts to train on, 2 held out" in done.stdout


def test_the_command_of_your_reward_for_rce_trains_on_the_reward_that_it_names(started, tmp_path):
    (tmp_path / "stubs").mkdir()
    found = commands(ROOT / "docs/your-reward.md", tmp_path / "stubs")
    ((path, *words),) = [words for words in found if words[0] == "rce/rce.py"]
    words = [word for word in words if not word.startswith("OUTPUT_DIR=")]
    fewer = ["MAX_STEPS=1", "MINE_PROMPTS=8", "GROUP_SIZE=4", "MAX_EVAL_PROMPTS=2", "ROUNDS=1"]
    done = started(path, *words, *fewer, f"OUTPUT_DIR={tmp_path / 'run'}", shrink=False)
    assert done.returncode == 0, done.stderr
    assert "reward/last_number" in done.stdout and "reward/exact_answer" not in done.stdout


def test_the_preset_for_a_small_card_runs(started, tmp_path):
    page = (ROOT / "docs/troubleshooting.md").read_text()
    (preset,) = re.findall(r"`(LORA_RANK=16 LEARNING_RATE=\S+ DTYPE=.*?)`", page)
    fewer = ["MAX_STEPS=1", "MAX_NEW_TOKENS=8", "MAX_TRAIN_PROMPTS=8", "MAX_EVAL_PROMPTS=2"]
    done = started("grpo/grpo.py", *preset.split(), *fewer, f"OUTPUT_DIR={tmp_path / 'run'}", shrink=False)
    assert done.returncode == 0, done.stderr


def test_what_troubleshooting_names_exists():
    """Its constants are in constants.md, its metrics in reference.md, its messages in a trainer."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    constants = (ROOT / "docs/constants.md").read_text()
    for name in set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", page)) - {"OMP_NUM_THREADS"}:
        assert f"| `{name}` |" in constants, name
    reference = (ROOT / "docs/reference.md").read_text().split("## Metrics")[1]
    defined = set(re.findall(r"`([a-z0-9@_/<>, ]+)`", reference))
    rows = page.split("## Metric by metric")[1].split("## Presets")[0]
    for cell in re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE):
        for metric in re.findall(r"`(.*?)`", cell):
            assert metric in defined, metric
    sources = [(ROOT / path).read_text() for path in ("ppo/ppo.py", "grpo/grpo.py")]
    messages = page.split("## When the program ends")[1].split("## Metric by metric")[0]
    first_cells = "\n".join(re.findall(r"^\| ([^|]*) \|", messages, re.MULTILINE))
    quoted = re.findall(r'["`]([^"`\n]{9,})["`]', first_cells)
    assert len(quoted) == 4
    for message in quoted:
        assert any(message in source for source in sources), message


# ---------------------------------------------------------------- published results, with stand-ins


@pytest.mark.sweep
@pytest.mark.parametrize("number", range(3), ids=["math", "gsm8k-ppo", "gsm8k-lora"])
def test_the_commands_of_math_and_gsm8k_run(number, qwen, gsm8k, started, tmp_path):  # noqa: F811
    for name in ("math_train", "math_test"):
        (tmp_path / f"{name}.jsonl").write_text('{"problem": "3 + 4", "answer": "7"}\n' * 4)
    (tmp_path / "stubs").mkdir()
    runs = [
        words
        for words in commands(ROOT / "docs/published.md", tmp_path / "stubs")
        if words[0] in ("grpo/grpo.py", "ppo/ppo.py")
    ]
    assert len(runs) == 3
    path, *words = runs[number]
    words = [re.sub("=(Qwen/Qwen2.5-0.5B-Instruct|qwen3-base)$", f"={qwen}", word) for word in words]
    done = started(path, *words, *SMALLER.split(), f"OUTPUT_DIR={tmp_path / 'run'}", shrink=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/best/policy/config.json").is_file()


@pytest.mark.sweep
@pytest.mark.parametrize("embedder_folder", ["clip"], indirect=True)
@pytest.mark.parametrize("family", [llava], indirect=True, ids=["llava"])
def test_the_commands_of_okvqa_run(family, embedder_folder, started, tmp_path, monkeypatch):  # noqa: F811
    (tmp_path / "stubs").mkdir()
    runs = [w for w in commands(ROOT / "docs/published.md", tmp_path / "stubs") if w[0] == "rce/rce_icl.py"]
    assert [word for words in runs for word in words if word.startswith(("STAGE", "GRPO_EPOCHS"))] == [
        "GRPO_EPOCHS=0",
        "STAGE=evaluate",
        "STAGE=train",
        "GRPO_EPOCHS=2",
    ]
    monkeypatch.chdir(tmp_path)
    reader, processor = family
    processor.save_pretrained(reader)
    Path("data/okvqa").mkdir(parents=True)
    rows = rows_with_images(tmp_path, 4)
    for name, count in (("train", 24), ("test", 4)):
        lines = [
            {
                "question": f"{row['text']} {name} {n}",
                "answers": ["ab"] * 7 + ["b"] * 3,
                "image": row["image"],
            }
            for n, row in zip(range(count), rows * count)
        ]
        Path(f"data/okvqa/{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stand_in = [
        f"READER={reader}",
        f"EMBEDDING={embedder_folder}",
        "DTYPE=float32",
        "VALIDATION_QUERIES=6",
        "POOL_SIZE=4",
    ]
    stand_in += [
        "BEAMS=1",
        "SAMPLES=1",
        "SAMPLE_TEMPERATURES=[1.0]",
        "RETRIEVED=1",
        "RANDOM=2",
        "LOCAL=0",
        "KEEP_TOP=2",
    ]
    stand_in += ["KEEP_RANDOM=1", "MINE_QUERIES=8", "MAX_ANSWER_TOKENS=2", "RCE_EPOCHS=1", "TEST_QUERIES=2"]
    stand_in += ["REWARD_MODE=hard_plus_gtprob"]  # its answers are words of a and b: seldom right
    for path, *words in runs:
        done = started(path, *words, *stand_in, shrink=False)
        assert done.returncode == 0, done.stderr
    assert Path("runs/okvqa_grpo/best/policy").is_dir()


@pytest.mark.sweep
def test_the_commands_of_hotpotqa_run_on_a_small_t5(started, world, tmp_path):  # noqa: F811
    (tmp_path / "stubs").mkdir()
    runs = [w for w in commands(ROOT / "docs/published.md", tmp_path / "stubs") if w[0] == "ppo/ppo_rag.py"]
    assert len(runs) == 2
    stand_in = [
        f"GENERATOR={world}/t5",
        f"RERANKER={world}/reranker",
        f"DATASET={{'path': '{world}', 'type': 'folder'}}",
    ]
    stand_in += ["TOP_KS=(1, 2)", "TEMPERATURES=(0.0, 1.0)", "FIXED_ACTION=(2, 1.0, 0)", "MAX_NEW_TOKENS=2"]
    stand_in += [
        "MAX_STEPS=1",
        "N_STEPS=4",
        "BATCH_SIZE=4",
        "VALIDATION_QUESTIONS=4",
        "TEST_QUESTIONS=4",
        "SAMPLE=14",
    ]
    stand_in += ["MAX_PROMPT_TOKENS=64", f"CACHE_DIR={tmp_path / 'cache'}"]
    for number, (path, *words) in enumerate(runs):
        done = started(path, *words, *stand_in, f"OUTPUT_DIR={tmp_path / str(number)}", shrink=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.sweep
def test_the_commands_of_recommendation_run_on_a_small_catalogue(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_world(tmp_path / "industrial", rows=130)
    (tmp_path / "industrial/items.txt").rename(tmp_path / "industrial/info.txt")
    runs = commands(ROOT / "docs/published.md", tmp_path)
    runs = [words for words in runs if words[0] == "grpo/grpo_rec.py"]
    assert [word for words in runs for word in words if word.startswith(("STAGE", "MAX_STEPS"))] == [
        "STAGE=sft",
        "STAGE=rl",
        "MAX_STEPS=2",  # of 131 lines
    ]
    stand_in = [
        f"ACTOR_MODEL={TINY / 'policy'}",
        "SFT_EPOCHS=1",
        "MAX_EVAL_ROWS=4",
        "EVAL_BEAMS=20",
        "GROUP_SIZE=4",
    ]
    stand_in += ["BATCH_SIZE=4", "MAX_STEPS=1", "DTYPE=float32", "RESUME=yes", "MAX_TRAIN_ROWS=20"]
    for path, *words in runs:
        done = started(path, *words, *stand_in, shrink=False)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/industrial/best/policy").is_dir()


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


CLASSES = ["docs/your-reward.md", "docs/change-the-algorithm.md", "docs/turns-and-tools.md"]


@pytest.mark.parametrize("name", CLASSES)
def test_each_program_of_a_page_trains_a_step(name, tmp_path):
    programs = [
        block for block in snippets(name) if block.startswith(("import sys", "import re\nimport sys"))
    ]
    assert programs
    for number, block in enumerate(programs):
        (trainer,) = re.findall(r"^import (ppo|grpo)$", block, re.MULTILINE)
        path = f"{trainer}/{trainer}.py"
        module = load_script(path, **small(path, OUTPUT_DIR=str(tmp_path / f"run{number}"), MAX_STEPS=1))
        space = {trainer: module, "__name__": "snippet"}
        exec(
            block.replace(f"import {trainer}\n", "", 1).replace(f'sys.path.insert(0, "{trainer}")\n', ""),
            space,
        )
        classes = [value for value in space.values() if isinstance(value, type)]
        made = classes[-1] if classes else {"ppo": "PPOTrainer", "grpo": "GRPOTrainer"}[trainer]
        trained = (made if classes else getattr(module, made))("no")
        trained.train()
        step = json.loads((tmp_path / f"run{number}/logs/metrics.jsonl").read_text().splitlines()[1])
        assert step["phase"] == "train"
        if "def calculator" in block:
            assert "turns" in step
        if "def short" in block:
            assert step["reward/short"] < 0
        if "diversity" in block:
            assert "reward/diversity" in step


def test_the_quickstart_shows_what_a_run_prints_and_writes(started, tmp_path):
    """Line by line, whatever the numbers are; and file by file."""
    page = (ROOT / "docs/quickstart.md").read_text()

    def shape(line):
        return re.sub(r"\d[\d.,:e+-]*", "0", line)

    said = started("grpo/grpo.py", f"OUTPUT_DIR={tmp_path / 'run'}", "MAX_STEPS=1").stdout.splitlines()
    shown = {shape(line) for line in page.splitlines()}
    for begin in ("Steps ", "step 0, held out", "Epoch 1/1"):
        (line,) = [line for line in said if line.startswith(begin)]
        assert shape(line) in shown, line
    metrics = page.split("before any training")[1].split("greedy answer is bad")[0]
    for metric in re.findall(r"`([a-z_]+(?:@\d)?)`", metrics):
        assert any(f"{metric} " in line for line in said), metric
    listed = page.split("checkpoints/grpo/\n")[1].split("```")[0]
    names = re.findall(r"^  (\S+)", listed, re.MULTILINE)
    assert len(names) > 7
    for name in names:
        pattern = re.sub(r"step_\d+", "step_1", name).replace("<time>", "*")
        assert list((tmp_path / "run").glob(pattern.rstrip("/"))), name


def test_the_quickstarts_policy_answers(tmp_path, monkeypatch, capsys):
    (block,) = [block for block in snippets("docs/quickstart.md")]
    exec(block.replace("checkpoints/grpo/best/policy", os.fspath(TINY / "policy")), {})
    assert capsys.readouterr().out == "34-23=11\n#### 11\n"
    text = (ROOT / "docs/quickstart.md").read_text()
    assert "Before training it prints `34-23=11`, `#### 11`." in text
