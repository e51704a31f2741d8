"""PPO from random weights: a reward at the end of the response against one reward per token.

    python bench/dense_rewards.py [seed ...] [form ...] [KEY=VALUE ...]    # default: 1 2 3, all forms

The prompt is a digit, which the response must repeat LENGTH times. The policy is a Llama of 2 layers that
knows nothing, among 82 tokens. Three forms of compute_rewards, everything else equal:
    exact   1 where the whole response is right, else 0: a chance of 82 ** -LENGTH
    share   the share of the tokens that are right, at the end
    tokens  the same number, but each token gets its own part of it: one list per response
Printed for each seed, by step: the share of right tokens in greedy responses to the ten digits, and, after a
slash, of responses right as a whole.
"""

import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
LENGTH = 10
FORMS = ("exact", "share", "tokens")
CONSTANTS = {
    "REWARD_MODEL": None,
    "KL_COEF": 0.0,
    "BATCH_SIZE": 40,
    "GRADIENT_ACCUMULATION_STEPS": 1,
    "GROUP_SIZE": 4,
    "MAX_NEW_TOKENS": LENGTH,
    "LEARNING_RATE": 1e-3,
    "CRITIC_LEARNING_RATE": 1e-3,
    "NUM_EPOCHS": 10**6,
    "ENTROPY_COEF": 0.01,
    "MAX_STEPS": 80,
    "EVAL_EVERY_N_STEPS": 20,
    "SAVE_EVERY_N_STEPS": 0,
    "LOG_SAMPLES": 0,
    "RESUME": "no",
}


def load_ppo(**constants):
    """A fresh copy of ppo/ppo.py with these constants."""
    spec = importlib.util.spec_from_file_location("ppo", ROOT / "ppo/ppo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for key, value in constants.items():
        setattr(module, key, value)
    return module


def make_inputs(folder, seed):
    """A policy of random weights, and a data set of the ten digits, four times each."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/tiny/policy")
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    for part in (LlamaForCausalLM(config), tokenizer):
        part.save_pretrained(folder / "policy")
    lines = [json.dumps({"digit": str(n % 10)}) + "\n" for n in range(40)]
    (folder / "digits.jsonl").write_text("".join(lines))
    return [{"path": str(folder / "digits.jsonl"), "type": "jsonl", "input": "digit"}]


def train(form, seed, folder, overrides):
    """{step: (share of right tokens, of right responses)} of one run, both of greedy ones."""
    data = make_inputs(folder, seed)
    ppo = load_ppo(
        **CONSTANTS,
        ACTOR_MODEL=str(folder / "policy"),
        TRAIN_DATASETS=data,
        EVAL_DATASETS=data,
        SEED=seed,
        OUTPUT_DIR=str(folder / "run"),
    )
    ppo.apply_overrides(overrides)
    found = {}

    class Repeating(ppo.PPOTrainer):
        def compute_rewards(self, prompts, responses, answers, response_ids):
            wanted = self.tokenizer.convert_tokens_to_ids(prompts)  # a digit is one token
            parts = [[(token == digit) / LENGTH for token in ids] for ids, digit in zip(response_ids, wanted)]
            if form == "tokens":
                return parts
            shares = [sum(row) for row in parts]
            return shares if form == "share" else [float(share > 1 - 1e-9) for share in shares]

        def evaluate(self, prompts=None, answers=None):
            said = [self.generate_response(str(digit)).split() for digit in range(10)]
            right = ["".join(words).count(str(digit)) / LENGTH for digit, words in enumerate(said)]
            found[self.run.step] = sum(right) / 10, sum(share == 1 for share in right) / 10
            return {"reward": sum(right) / 10}

    Repeating().train()
    return found


def main():
    words = sys.argv[1:]
    seeds = [int(word) for word in words if word.isdecimal()] or [1, 2, 3]
    overrides = [word for word in words if "=" in word]
    lines = []
    for form in [word for word in words if word in FORMS] or FORMS:
        for seed in seeds:
            started = time.time()
            with tempfile.TemporaryDirectory() as folder:
                found = train(form, seed, Path(folder), overrides)
            shown = "  ".join(f"{step}: {tokens:.2f}/{whole:.1f}" for step, (tokens, whole) in found.items())
            lines.append(f"{form:7} seed {seed}  {shown}  ({time.time() - started:.0f} s)")
    print("\nshare of right tokens / responses, by step\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
