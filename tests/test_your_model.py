"""The commands of docs/your-model.md and your-data.md, with a tiny random Qwen2 on local problems."""

import json
import re
import shlex

import datasets
import pytest
import torch
from conftest import ROOT, TINY
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

PAGES = [(ROOT / f"docs/{name}.md").read_text() for name in ("your-model", "your-data")]
COMMANDS = re.findall(
    r"^python (?:grpo|ppo|rce)/[^\n]*Qwen.*?(?=\n```)|^python grpo/\S+ STAGE=.*?(?=\n```)",
    "\n".join(PAGES),
    re.M | re.S,
)
CHAT_TEMPLATE = (  # Qwen2.5's form, in words that the tiny tokenizer has
    "{% for m in messages %}{{ '(' + m['role'] + ')' }}\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '(assistant)' }}\n{% endif %}"
)
SMALLER = (
    "MAX_STEPS=1 BATCH_SIZE=2 GRADIENT_ACCUMULATION_STEPS=1 GROUP_SIZE=2 MAX_NEW_TOKENS=8 EVALUATE_SAMPLES=2"
)


@pytest.fixture
def qwen(tmp_path):
    """A folder with a random Qwen2 of two layers, the tiny tokenizer and a chat template."""
    folder = tmp_path / "Qwen2.5-tiny"
    tokenizer = AutoTokenizer.from_pretrained(TINY / "policy")
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(
        vocab_size=len(tokenizer), num_key_value_heads=2, tie_word_embeddings=True, **sizes, **ids
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def gsm8k(monkeypatch, tmp_path):
    """datasets.load_dataset("openai/gsm8k", ...) gives a few problems; two csv files lie in the folder."""
    problems = [
        {"question": f"Tom has {i} apples. Tom buys 3 more.", "answer": f"{i}+3\n#### {i + 3}"}
        for i in range(4)
    ]

    def load_dataset(path, name, split):
        assert (path, name) == ("openai/gsm8k", "main") and split in ("train", "test")
        return problems

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    for file in ("questions.csv", "held_out.csv"):
        lines = "".join(f'"{p["question"]}",{i + 3}\n' for i, p in enumerate(problems))
        (tmp_path / file).write_text("question,answer\n" + lines)


def test_the_pages_have_the_commands_that_are_run_here():
    assert len(COMMANDS) == 5


@pytest.mark.parametrize("command", COMMANDS, ids=["grpo", "ppo", "rce", "evaluate", "csv"])
def test_a_command_of_the_page_runs_on_a_model_of_that_architecture(command, qwen, gsm8k, started, tmp_path):
    _, path, *words = shlex.split(command.replace("\\\n", " "))
    words = [word.replace("Qwen/Qwen2.5-0.5B-Instruct", str(qwen)) for word in words]
    if "STAGE=evaluate" in words:
        words.append(f"EVALUATE_POLICY={qwen}")
    if path == "rce/rce.py":
        words.append("REWARD_MODE=soft_only")  # this model's candidates are never right
    run = started(path, *words, *SMALLER.split(), "REWARD_TIMEOUT=60", shrink=False)
    assert run.returncode == 0, run.stderr
    folder = tmp_path / next(word for word in words if word.startswith("OUTPUT_DIR=")).removeprefix(
        "OUTPUT_DIR="
    )
    if "STAGE=evaluate" in words:
        (figures,) = folder.glob("eval_*_gsm8k_main_test.json")
        assert {"accuracy_greedy", "pass@1", "pass@2", "reward"} <= json.loads(figures.read_text())[
            "figures"
        ].keys()
        return
    assert (folder / "best/policy/config.json").exists() and "Done at step 1 of 1" in run.stdout
    note = next((line for line in run.stdout.splitlines() if line.startswith("NOTE")), "")
    assert note == "", "the command sets every constant that the note names"
