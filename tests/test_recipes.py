"""Each recipe trains by the command in its first lines, here with tiny random models of the same kinds and
local rows of the same columns. Its figure for memory is the one that tools/memory.py computes."""

import math
import re
import sys

import pytest
import transformers
from conftest import ROOT, byte_tokenizer, load, read

sys.path.insert(0, str(ROOT / "tools"))
import memory

SHAPE = {"vocab_size": 151_936, "tie_word_embeddings": True, "num_key_value_heads": 2}
POLICY = {**SHAPE, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14}
LARGER = {**SHAPE, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12}
REWARD = {**SHAPE, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 128}
CONFIGS = {
    "Qwen/Qwen2.5-0.5B": transformers.Qwen2Config(**POLICY, num_hidden_layers=24),
    "Qwen/Qwen2.5-0.5B-Instruct": transformers.Qwen2Config(**POLICY, num_hidden_layers=24),
    "Qwen/Qwen2.5-1.5B-Instruct": transformers.Qwen2Config(**LARGER, num_hidden_layers=28),
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": transformers.Qwen3Config(
        **REWARD | {"num_key_value_heads": 8}, num_hidden_layers=28
    ),
}
TEMPLATE = """{% if messages[0].role != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PROBLEMS = [{"question": f"{i} + 2?", "answer": f"{i} + 2\n#### {i + 2}"} for i in range(8)]
QUESTION = {"role": "user", "content": "Say it"}
GOOD, BAD = ([QUESTION, {"role": "assistant", "content": text}] for text in ("yes", "no"))
PAIRS = 8 * [{"prompt": "Say it", "messages": GOOD, "chosen": GOOD, "rejected": BAD}]
SHORT = """BATCH_SIZE=2 GRADIENT_ACCUMULATION_STEPS=1 GROUP_SIZE=4 MINI_BATCHES=1 MAX_STEPS=1
MAX_NEW_TOKENS=12 MAX_EVAL_PROMPTS=2 MAX_EVAL_ROWS=2 MAX_EVAL_PAIRS=2 MINE_PROMPTS=8 ROUNDS=1
CRITIC_WARMUP_STEPS=0 RESUME=no"""


def save_stand_in(name):
    """Saves a random model and a tokenizer of bytes into a folder that is called as a model of the hub is."""
    small = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_labels": 1, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model("qwen3" if "Qwen3" in name else "qwen2", **small)
    task = "SequenceClassification" if "Reward" in name else "CausalLM"
    getattr(transformers, f"AutoModelFor{task}").from_config(config).save_pretrained(name)
    end = "<|im_end|>" if "Instruct" in name else "<|endoftext|>"  # as in Qwen2.5
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    byte_tokenizer(special, eos_token=end, chat_template=TEMPLATE).save_pretrained(name)


def judge(function, prompts, responses, *others):
    return [float(len(response) % 2) for response in responses]  # a random model would never be right


def train(recipe, monkeypatch):
    text = (ROOT / "recipes" / recipe).read_text()
    path = re.search(rf"python (\S+) @recipes/{recipe}\n", text)[1]
    monkeypatch.setattr(sys, "argv", [path])  # {file} of OUTPUT_DIR
    module = load(path)
    module.apply_overrides([f"@{ROOT}/recipes/{recipe}"])
    if "gsm8k" in recipe:
        assert f"python tools/evaluate.py {module.OUTPUT_DIR} @recipes/gsm8k_test.txt" in text
        module.apply_overrides([f"@{ROOT}/recipes/gsm8k_test.txt"])
    module.apply_overrides(word for word in SHORT.split() if word.split("=")[0] in module.constants())
    monkeypatch.setattr(module, "read_records", lambda spec: PAIRS if "ultra" in spec["path"] else PROBLEMS)
    monkeypatch.setattr(module, "draw_grid", lambda *arguments: None)
    monkeypatch.setattr(module, "call_reward", judge, raising=False)
    trainer_class = next(x for name, x in vars(module).items() if name.endswith("Trainer"))
    trainer_class().train()
    steps = [x for x in read(f"{module.OUTPUT_DIR}/logs/metrics.jsonl") if x["phase"] == "train"]
    norms = [x for step in steps for name, x in step.items() if name.endswith("grad_norm")]
    assert norms and all(0 < x < math.inf for x in norms)


CHAIN = [f"{name}_ultrafeedback.txt" for name in ("sft", "reward_model", "ppo")]
OTHERS = sorted({path.name for path in (ROOT / "recipes").glob("*.txt")} - {*CHAIN, "gsm8k_test.txt"})


@pytest.mark.parametrize("recipes", [CHAIN, *([name] for name in OTHERS)], ids=lambda names: names[-1])
def test_recipe(tmp_path, monkeypatch, recipes):
    monkeypatch.chdir(tmp_path)  # models of the hub and checkpoints of another recipe are folders here
    for name in CONFIGS:
        save_stand_in(name)
    for recipe in recipes:
        train(recipe, monkeypatch)


@pytest.mark.parametrize("recipe", [*CHAIN, *OTHERS])
def test_the_memory_in_a_recipe_is_what_the_tool_computes(recipe, monkeypatch):
    config = CONFIGS["Qwen/Qwen2.5-0.5B"]  # also of the policies that other recipes train
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda name: CONFIGS.get(name, config))
    path = ROOT / "recipes" / recipe
    assert f"# Memory, computed: {memory.describe(memory.load_constants([f'@{path}']))}\n" in path.read_text()
