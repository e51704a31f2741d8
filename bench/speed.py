"""Speed side by side, in one process whose rounds alternate; one thread, processor seconds.

    python bench/speed.py old 7f640d6 grpo                 # steps 2 to 6 against an older commit's grpo.py
    python bench/speed.py old 7f640d6 ppo ACTOR_MODEL=data/real/smollm2 BATCH_SIZE=8 MAX_NEW_TOKENS=48
    python bench/speed.py rollout 20M                      # our sampling against transformers' generate

KEY=VALUE sets a constant on both sides. `rollout` samples 8 responses to each of 32 prompts, up to 64 tokens,
with the tiny model, "20M" (a random Llama of 19.7 million parameters and 32,768 ids) or a folder.
"""

import ast
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout, suppress
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "data/tiny/policy"
WARM_UP = 2  # steps that are not counted; for preferences_speed.py
ROUNDS = 3
SHAPES = {
    "20M": {
        "vocab_size": 32768,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "max_position_embeddings": 2048,
    },
}


def load(path):
    """Returns a trainer's file as a module, with the rewards/ beside it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "rewards"]:
        del sys.modules[name]
    spec = importlib.util.spec_from_file_location(f"{Path(path).stem}_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_model(folder, name):
    """Writes a Llama with random weights and the tiny tokenizer (ids beyond it decode to nothing)."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = {f"{token}_token_id": getattr(tokenizer, f"{token}_token_id") for token in ("bos", "eos", "pad")}
    LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **ids, **SHAPES[name])).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def table_head(*columns):
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns), flush=True)


def table_row(*cells):
    print("| " + " | ".join(cells) + " |", flush=True)


def shown(value):
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def show(name, old, new):
    """Prints medians of two lists of seconds, and their ratio with its range over neighbouring rounds."""
    ratios = [b / a for a, b in zip(old, new)]
    medians = statistics.median(old), statistics.median(new)
    spread = f"{medians[1] / medians[0]:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    table_row(name, *map(shown, medians), spread)


def steps_of(file, name, folder, words):
    """Trains six steps. Returns the processor seconds of steps 2 to 6, a list of dicts by activity."""
    module = load(file)
    settings = {"EVAL_DATASETS": [], "EVAL_EVERY_N_STEPS": 0, "SAVE_EVERY_N_STEPS": 0, "MAX_STEPS": 6}
    settings |= {"RESUME": "no", "OUTPUT_DIR": folder}
    for word in words:
        key, _, value = word.partition("=")
        with suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value)
        settings[key] = value
    for key, value in settings.items():
        setattr(module, key, value)
    with open(os.devnull, "w") as null, redirect_stdout(null):
        getattr(module, f"{name.upper()}Trainer")("no").train()
    steps = []
    for line in (Path(folder) / "logs/metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["step"] > 1:
            seconds = {key[8:]: x for key, x in record.items() if key.startswith("seconds/")}
            steps.append({"step": sum(seconds.values()), **seconds})
    return steps


def compare_with_commit(commit, name, *words):
    time.perf_counter = time.process_time  # what the trainers measure their activities by
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "-C", ROOT, "archive", commit], check=True, capture_output=True)
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        sides = {"old": [], "new": []}
        for number in range(ROUNDS):
            for side, root in {"old": folder, "new": ROOT}.items():
                sys.path.insert(0, str(root))
                runs = steps_of(f"{root}/{name}/{name}.py", name, f"{folder}/{side}{number}", words)
                sys.path.remove(str(root))
                sides[side].append({key: statistics.median(run[key] for run in runs) for key in runs[0]})
    table_head(f"{name}.py, processor seconds of a step", commit, "now", "now / then")
    for key in sides["new"][0]:
        if key in sides["old"][0]:
            show(key, *([run[key] for run in sides[side]] for side in ("old", "new")))


def compare_with_generate(model="tiny"):
    import torch

    grpo = load(ROOT / "grpo/grpo.py")
    with tempfile.TemporaryDirectory() as folder:
        if model in SHAPES:
            random_model(folder, model)
        grpo.ACTOR_MODEL = {"tiny": str(TINY), "20M": folder}.get(model, model)
        grpo.OUTPUT_DIR, grpo.EVAL_DATASETS = f"{folder}/run", []
        trainer = grpo.GRPOTrainer("no")
    rows = [row for row in trainer.train_rows[:32] for _ in range(8)]
    prompts, mask = grpo.pad_left([row["ids"] for row in rows], trainer.device)
    sampling = {"do_sample": True, "top_k": 0, "max_new_tokens": grpo.MAX_NEW_TOKENS, "pad_token_id": 0}
    ours, theirs = [], []
    for number in range(ROUNDS + 1):
        started = time.process_time()
        batch = trainer.respond(rows, torch.rand(len(rows), grpo.MAX_NEW_TOKENS))
        middle = time.process_time()
        with torch.no_grad():
            ids = trainer.actor.generate(prompts, attention_mask=mask, **sampling)
        tokens = int((ids[:, prompts.shape[1] :] != 0).sum())
        if number:  # the first round warms up
            ours.append((middle - started) / int(batch.lengths.sum()))
            theirs.append((time.process_time() - middle) / tokens)
    table_head("processor seconds of a token", "generate", "ours", "ours / generate")
    show(model, theirs, ours)


def main(what=None, *words):
    commands = {"old": compare_with_commit, "rollout": compare_with_generate}
    if what not in commands:
        sys.exit(__doc__)
    commands[what](*words)


if __name__ == "__main__":
    main(*sys.argv[1:])
