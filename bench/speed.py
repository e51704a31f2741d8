"""Speed side by side, in rounds that alternate; one thread, processor seconds.

    python bench/speed.py old 7f640d6 grpo                 # steps 2 to 6 against an older commit's grpo.py
    python bench/speed.py old 7f640d6 ppo ACTOR_MODEL=data/real/smollm2 BATCH_SIZE=8 MAX_NEW_TOKENS=48
    python bench/speed.py rollout 20M                      # our sampling against transformers' generate
    python bench/speed.py preferences                      # our SFT, reward model and DPO against trl's
    python bench/speed.py preferences smollm2 dpo sft      # of one model, of two stages

KEY=VALUE sets a constant on both sides. `rollout` samples 8 responses to each of 32 prompts, up to 64 tokens,
with the tiny model, "20M" (a random Llama of 19.7 million parameters and 32,768 ids) or a folder.

`preferences` needs an environment with bench/requirements-trl.txt, and has a process per measurement. Both
sides read the same rows in the same micro-batches, in float32, without recomputed activations. Memory is the
peak until the last step, of the whole process and beyond what it held after the imports. Both ask DPO's
reference once, before training (trl: precompute_ref_log_probs), which is counted in. On a CPU trl computes
logits of the prompts, too; here it scores the answers alone, as it does on a GPU.
"""

import ast
import importlib.util
import itertools
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
MODELS = {  # rows of SFT per micro-batch (pairs: half of it), steps after the first one, rounds
    "tiny": (32, 8, 5),
    "20M": (16, 3, 3),
    "smollm2": (8, 2, 2),
}
STAGES = {  # our file, trainer and constant with the model; trl's trainer
    "sft": ("ppo/sft.py", "SFTTrainer", "ACTOR_MODEL", "SFTTrainer"),
    "reward_model": ("ppo/reward_model.py", "RewardModelTrainer", "BASE_MODEL", "RewardTrainer"),
    "dpo": ("rce/dpo.py", "DPOTrainer", "ACTOR_MODEL", "DPOTrainer"),
}
ACCUMULATION = 2  # micro-batches per step


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


def write_preferences(path, stage, rows_per_step, steps):
    """Writes chats of data/tiny, sorted by length within a step, as our trainers sort them."""
    source, columns = "pairs.jsonl", {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    if stage == "sft":
        source, columns = "demonstrations.jsonl", {"problem": "prompt", "solution": "completion"}
    rows = [json.loads(line) for line in (ROOT / "data/tiny" / source).read_text().splitlines()]
    with open(path, "w") as file:
        for first in range(0, rows_per_step * steps, rows_per_step):
            for row in sorted(rows[first : first + rows_per_step], key=lambda row: -len(str(row))):
                chats = {}
                for name, column in columns.items():
                    role = "user" if column == "prompt" else "assistant"
                    chats[column] = [{"role": role, "content": row[name]}]
                file.write(json.dumps(chats) + "\n")


def timed(method, seconds):
    """Returns a method that also adds its processor seconds to a list."""

    def call(*arguments):
        started = time.process_time()
        result = method(*arguments)
        seconds.append(time.process_time() - started)
        return result

    return call


def our_trainer(stage, model, data, size, folder, stamp, reference_seconds):
    file, name, model_constant, _ = STAGES[stage]
    script = load(ROOT / file)
    stamp()
    columns = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    if stage == "sft":
        columns = {"input": "prompt", "output": "completion"}
    settings = {"TRAIN_DATASETS": [{"path": data, "type": "jsonl", **columns}], "EVAL_DATASETS": []}
    settings |= {"BATCH_SIZE": size, "GRADIENT_ACCUMULATION_STEPS": ACCUMULATION, "NUM_EPOCHS": 1}
    settings |= {"LEARNING_RATE": 1e-5, "OUTPUT_DIR": f"{folder}/run"}
    for key, value in {**settings, model_constant: model}.items():
        assert key in script.constants(), key
        setattr(script, key, value)
    if stage == "dpo":
        script.DPOTrainer.add_reference = timed(script.DPOTrainer.add_reference, reference_seconds)
    trainer = getattr(script, name)("no")
    record, rows = trainer.record, iter(trainer.train_rows)
    trainer.next_rows = lambda: list(itertools.islice(rows, size * ACCUMULATION))
    trainer.record = lambda *arguments: (record(*arguments), stamp())
    return trainer


def trl_trainer(stage, model, data, size, folder, stamp, reference_seconds):
    import datasets
    import transformers
    import trl
    import trl.trainer.utils

    name = STAGES[stage][3]
    trainer_class, config_class = getattr(trl, name), getattr(trl, name.replace("Trainer", "Config"))
    stamp()
    trl.trainer.utils._use_triton = lambda device: True  # logits of the answers alone
    settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": ACCUMULATION}
    settings |= {"num_train_epochs": 1, "train_sampling_strategy": "sequential", "learning_rate": 1e-5}
    settings |= {"bf16": False, "use_cpu": True, "gradient_checkpointing": False, "output_dir": folder}
    settings |= {"report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    if stage == "reward_model":
        settings["center_rewards_coefficient"] = 0.01
    if stage == "dpo":
        settings["precompute_ref_log_probs"] = True
        precompute = trainer_class._precompute_ref_logps
        trainer_class._precompute_ref_logps = timed(precompute, reference_seconds)

    class Stamp(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            stamp()

    rows = datasets.Dataset.from_list([json.loads(line) for line in open(data)])
    return trainer_class(model, args=config_class(**settings), train_dataset=rows, callbacks=[Stamp()])


def measure(side, stage, model, data, size):
    """Trains once. Prints a line of JSON: processor seconds per step after the first, and memory in MiB."""
    seconds, peaks, reference_seconds = [], [], []  # after the imports, and after each step

    def stamp():
        seconds.append(time.process_time())
        peaks.append(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024)

    with tempfile.TemporaryDirectory() as folder:
        make_trainer = {"ours": our_trainer, "trl": trl_trainer}[side]
        make_trainer(stage, model, data, int(size), folder, stamp, reference_seconds).train()
    steps = [end - start for start, end in itertools.pairwise(seconds[1:])]
    step = statistics.median(steps) + sum(reference_seconds) / (len(steps) + 1)
    print(json.dumps({"seconds": step, "peak memory": peaks[-1], "beyond imports": peaks[-1] - peaks[0]}))


def compare_with_trl(*words):
    if unknown := set(words) - {*MODELS, *STAGES}:
        sys.exit(f"unknown: {', '.join(unknown)}\n{__doc__}")
    table_head("a step: processor seconds, MiB", "trl", "ours", "ours / trl")
    with tempfile.TemporaryDirectory() as folder:
        random_model(f"{folder}/20M", "20M")
        paths = {"tiny": TINY, "20M": f"{folder}/20M", "smollm2": ROOT / "data/real/smollm2"}
        for model in [word for word in words if word in MODELS] or MODELS:
            for stage in [word for word in words if word in STAGES] or STAGES:
                rows, steps, rounds = MODELS[model]
                size = rows if stage == "sft" else rows // 2
                data = f"{folder}/data.jsonl"
                write_preferences(data, stage, size * ACCUMULATION, steps + 1)
                results = {"trl": [], "ours": []}
                for number in range(rounds):
                    for side in sorted(results, reverse=number % 2 == 1):
                        arguments = side, stage, paths[model], data, str(size)
                        command = [sys.executable, __file__, "measure", *arguments]
                        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                        results[side].append(json.loads(output.splitlines()[-1]))
                for key in results["ours"][0]:
                    sides = [[result[key] for result in side] for side in results.values()]
                    show(f"{model}, {stage}, {key}", *sides)


def main(what=None, *words):
    commands = {"old": compare_with_commit, "rollout": compare_with_generate}
    commands |= {"preferences": compare_with_trl, "measure": measure}
    if what not in commands:
        sys.exit(__doc__)
    commands[what](*words)


if __name__ == "__main__":
    main(*sys.argv[1:])
