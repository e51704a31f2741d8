"""Each recipe trains by the command in its first lines, here with tiny random models of the same kinds and
local rows of the same columns. Its figure for memory is the one that memory() computes."""

import math
import re
import sys

import pytest
import transformers
from conftest import ROOT, byte_tokenizer, load, read

# Parameters; layers; hidden units; width of a layer's keys; inputs and outputs of all linear layers
POLICY = (494_032_768, 24, 896, 128, 549_888)
SIZES = {
    "Qwen/Qwen2.5-0.5B": POLICY,
    "Qwen/Qwen2.5-0.5B-Instruct": POLICY,
    "Qwen/Qwen2.5-1.5B-Instruct": (1_543_714_304, 28, 1536, 256, 1_154_048),
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": (596_050_944, 28, 1024, 1024, 630_784),
}
VOCABULARY = 151_936
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


def memory(c):
    """Returns the comment on memory, from the constants c. Bytes: 4 per weight and gradient, 8 for moments, 2
    for a bfloat16 copy of the largest model, and for keys and values; 26 per logit in sampling, 16 in the
    update (24 with rce.py's entropies); per token, layer and hidden unit 80 for activations."""
    size, layers, hidden, key_width, linear = SIZES.get(c.get("BASE_MODEL") or c["ACTOR_MODEL"], POLICY)
    reward_size = SIZES.get(c["REWARD_MODEL"], POLICY)[0] if c.get("REWARD_MODEL") else 0
    trained = c["LORA_RANK"] * linear or size * (1 + ("CRITIC_MODEL" in c))
    frozen = reward_size + size * (c["LORA_RANK"] > 0 or c.get("KL_COEF", 0) > 0)  # the reference
    rest = 12 * trained + 4 * frozen + 2 * max(size, reward_size)
    update = rest + 4 * trained
    if "MAX_TOKENS" in c:
        rows = c["BATCH_SIZE"] * (1 + ("BASE_MODEL" in c))  # a pair has two answers
        update += rows * c["MAX_TOKENS"] * 80 * layers * hidden
        update += 16 * VOCABULARY * c.get("LOGITS_AT_ONCE", 0)
        return f"# Memory, computed: {update / 1e9:.1f} GB"
    tokens = c["MAX_PROMPT_TOKENS"] + c["MAX_NEW_TOKENS"]
    logits = c["MAX_NEW_TOKENS"] * VOCABULARY * (16 + 8 * ("TAU" in c))
    update += c["MICRO_BATCH_ROWS"] * (logits + tokens * 80 * layers * hidden)
    cache = tokens * layers * 2 * key_width * 2
    rollout = rest + c["BATCH_SIZE"] * c["GROUP_SIZE"] * (cache + 26 * VOCABULARY)
    return f"# Memory, computed: {rollout / 1e9:.1f} GB in the rollout, {update / 1e9:.1f} GB in the update"


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
    assert memory(module.constants()) in text
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
    for name in SIZES:
        save_stand_in(name)
    for recipe in recipes:
        train(recipe, monkeypatch)
