"""Each recipe trains by the command in its first lines, here with tiny random models of the same kinds and
local rows of the same columns. Its figure for memory is the one that tools/memory.py computes."""

import math
import re
import sys
from pathlib import Path

import pytest
import transformers
from conftest import ROOT, byte_tokenizer, load, read

sys.path.insert(0, str(ROOT / "tools"))
import memory

SHAPE = {"vocab_size": 151_936, "tie_word_embeddings": True, "num_key_value_heads": 2}
POLICY = {**SHAPE, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14}
LARGER = {**SHAPE, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12}
LARGEST = {
    "vocab_size": 152_064,
    "tie_word_embeddings": False,
    "num_key_value_heads": 4,
    "num_attention_heads": 28,
}
LARGEST |= {"hidden_size": 3584, "intermediate_size": 18944}
REWARD = {**SHAPE, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 128}
CONFIGS = {
    "Qwen/Qwen2.5-0.5B": transformers.Qwen2Config(**POLICY, num_hidden_layers=24),
    "Qwen/Qwen2.5-0.5B-Instruct": transformers.Qwen2Config(**POLICY, num_hidden_layers=24),
    "Qwen/Qwen2.5-1.5B-Instruct": transformers.Qwen2Config(**LARGER, num_hidden_layers=28),
    "Qwen/Qwen2.5-7B-Instruct": transformers.Qwen2Config(**LARGEST, num_hidden_layers=28),
    "data/real/smollm2": transformers.LlamaConfig(
        **{"vocab_size": 49_152, "tie_word_embeddings": True, "hidden_size": 576, "intermediate_size": 1536},
        **{"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30},
    ),
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
SUMS = [{"messages": [{"role": "user", "content": f"{i} + 2?"}], "answer": str(i + 2)} for i in range(8)]
RECORDS = {"gsm8k": PROBLEMS, "ultrafeedback_binarized": PAIRS}
RECORDS |= {f"sums_{part}.jsonl": SUMS for part in ("train", "validation", "test")}
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


def commands(recipe):
    """Returns the trainers in the first lines of a recipe and the constants behind it, [(path, words)]."""
    text = (ROOT / "recipes" / recipe).read_text()
    found = re.findall(rf"python (\S+) @recipes/{recipe}(.*)", text)
    return [(path, words.split()) for path, words in found if not path.startswith("tools/")]


def train(recipe, path, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", [path])  # {file} of OUTPUT_DIR
    module = load(path)
    script = module
    if path == "examples/judge.py":
        script = module.grpo
        monkeypatch.delitem(sys.modules, "grpo")  # the next recipe needs a fresh one
        monkeypatch.setattr(module, "grade", lambda prompt, response, answer: len(response) % 2)
    script.apply_overrides([f"@{ROOT}/recipes/{recipe}"])
    script.apply_overrides(word.replace("@", f"@{ROOT}/") for word in words)
    text = (ROOT / "recipes" / recipe).read_text()
    for of_test in ("gsm8k_test.txt", "sums_test.txt"):
        if f"@recipes/{of_test}" in text:
            folder = script.OUTPUT_DIR if len(commands(recipe)) == 1 else "checkpoints/sums_grpo"
            assert f"python tools/evaluate.py {folder} @recipes/{of_test}" in text
            script.apply_overrides([f"@{ROOT}/recipes/{of_test}"])
    script.apply_overrides(word for word in SHORT.split() if word.split("=")[0] in script.constants())
    monkeypatch.setattr(script, "read_records", lambda spec: RECORDS[Path(spec["path"]).name])
    monkeypatch.setattr(script, "draw_grid", lambda *arguments: None)
    monkeypatch.setattr(script, "call_reward", judge, raising=False)
    trainer_class = next(x for name, x in vars(module).items() if name.endswith("Trainer"))
    trainer_class().train()
    steps = [x for x in read(f"{script.OUTPUT_DIR}/logs/metrics.jsonl") if x["phase"] == "train"]
    norms = [x for step in steps for name, x in step.items() if name.endswith("grad_norm")]
    assert norms and all(0 < x < math.inf for x in norms)


CHAIN = [f"{name}_ultrafeedback.txt" for name in ("sft", "reward_model", "ppo")]
PARTS = {"gsm8k_test.txt", "sums_test.txt", "sums_ppo.txt", "sums_rce.txt"}  # beside another recipe
OTHERS = sorted({path.name for path in (ROOT / "recipes").glob("*.txt")} - {*CHAIN, *PARTS})


@pytest.mark.parametrize("recipes", [CHAIN, *([name] for name in OTHERS)], ids=lambda names: names[-1])
def test_recipe(tmp_path, monkeypatch, recipes):
    monkeypatch.chdir(tmp_path)  # models of the hub and checkpoints of another recipe are folders here
    for name in CONFIGS:
        save_stand_in(name)
    for recipe in recipes:
        for path, words in commands(recipe):
            train(recipe, path, words, monkeypatch)


@pytest.mark.parametrize("recipe", [*CHAIN, *OTHERS])
def test_the_memory_in_a_recipe_is_what_the_tool_computes(recipe, monkeypatch):
    config = CONFIGS["Qwen/Qwen2.5-0.5B"]  # also of the policies that other recipes train
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda name: CONFIGS.get(name, config))
    path = ROOT / "recipes" / recipe
    arguments = [*commands(recipe)[0][:1], f"@{path}"]
    assert f"# Memory, computed: {memory.describe(memory.load_constants(arguments))}\n" in path.read_text()
