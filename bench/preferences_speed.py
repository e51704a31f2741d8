"""One optimizer step of ppo/sft.py, ppo/reward_model.py and rce/dpo.py against trl 1.16.0's SFTTrainer,
RewardTrainer and DPOTrainer: the same rows of data/tiny, batches of the same size, float32, no recomputed
activations, one thread of the CPU. Each figure comes from a process of its own, forked after the imports; the
sides alternate. Needs trl, in an environment of its own:

    python -m venv .venv-trl
    .venv-trl/bin/pip install -r bench/requirements-trl.txt
    .venv-trl/bin/python bench/preferences_speed.py              # tiny and 20M
    .venv-trl/bin/python bench/preferences_speed.py smollm2      # data/real/smollm2
    .venv-trl/bin/python bench/preferences_speed.py tiny dpo     # one model, one trainer

Printed are processor seconds per step (median of the steps after the first two; then the median of the
rounds) and the peak memory until the last step, of the whole process and beyond what it held after its
imports. trl's DPO asks its reference in every step. Ours asks it before the first step; the seconds of that
pass are counted in, for as many pairs as a step has.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from speed import ROOT, TINY, WARM_UP, load, random_model, shown, table_head, table_row

SIZES = {  # model: rows per micro-batch of SFT, pairs per micro-batch, steps after the first two, rounds
    "tiny": (32, 16, 5, 2),
    "20M": (16, 8, 2, 1),
    "smollm2": (8, 4, 1, 1),
}
ACCUMULATION = 2  # micro-batches per step
SCRIPTS = {"sft": "ppo/sft.py", "reward_model": "ppo/reward_model.py", "dpo": "rce/dpo.py"}
CLASSES = {"sft": "SFTTrainer", "reward_model": "RewardModelTrainer", "dpo": "DPOTrainer"}


def peak():
    """Returns the most memory that this process has held, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Stamps:
    """Notes the processor time and the peak at the end of each step."""

    def __init__(self):
        self.imported = peak()
        self.seconds = []
        self.peaks = []

    def add(self):
        self.seconds.append(time.process_time())
        self.peaks.append(peak())

    def result(self, extra_seconds=0.0):
        steps = [after - before for before, after in zip(self.seconds[WARM_UP - 1 :], self.seconds[WARM_UP:])]
        seconds = statistics.median(steps) + extra_seconds
        return {"seconds": seconds, "peak": self.peaks[-1], "beyond": self.peaks[-1] - self.imported}


def ours(stage, model, size, steps):
    """Returns the seconds and the memory of our trainer."""
    script = load(ROOT / SCRIPTS[stage])
    stamps = Stamps()
    settings = {"BATCH_SIZE": size, "GRADIENT_ACCUMULATION_STEPS": ACCUMULATION, "MAX_STEPS": WARM_UP + steps}
    settings |= {"EVAL_DATASETS": [], "SAVE_EVERY_N_STEPS": 0, "RESUME": "no", "LEARNING_RATE": 1e-5}
    folder = tempfile.TemporaryDirectory()
    settings |= {"OUTPUT_DIR": folder.name, "NUM_EPOCHS": 10}
    settings["BASE_MODEL" if stage == "reward_model" else "ACTOR_MODEL"] = model
    limit = "MAX_TRAIN_PROMPTS" if stage == "sft" else "MAX_TRAIN_PAIRS"
    settings[limit] = size * ACCUMULATION * (WARM_UP + steps)
    for key, value in settings.items():
        assert key in script.constants(), key
        setattr(script, key, value)
    reference_seconds = 0.0
    if stage == "dpo":
        add_reference = script.DPOTrainer.add_reference

        def timed(trainer):
            nonlocal reference_seconds
            started = time.process_time()
            add_reference(trainer)
            reference_seconds = (time.process_time() - started) / (WARM_UP + steps)

        script.DPOTrainer.add_reference = timed
    trainer = getattr(script, CLASSES[stage])()
    record = trainer.record

    def record_and_stamp(rows, metrics):
        record(rows, metrics)
        stamps.add()

    trainer.record = record_and_stamp
    trainer.train()
    folder.cleanup()
    return stamps.result(reference_seconds)


def read(name, count):
    return [json.loads(line) for line in (ROOT / "data/tiny" / name).read_text().splitlines()[:count]]


def trls(stage, model, size, steps):
    """Returns the seconds and the memory of trl's trainer."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    stamps = Stamps()

    class Stamp(TrainerCallback):
        def on_step_end(self, *_, **__):
            stamps.add()

    count = size * ACCUMULATION * (WARM_UP + steps)
    chats = []
    for row in read("demonstrations.jsonl" if stage == "sft" else "pairs.jsonl", count):
        prompt = [{"role": "user", "content": row["problem" if stage == "sft" else "prompt"]}]
        names = {"completion": "solution"} if stage == "sft" else {"chosen": "chosen", "rejected": "rejected"}
        answers = {key: [{"role": "assistant", "content": row[name]}] for key, name in names.items()}
        chats.append({"prompt": prompt, **answers})
    config_class, trainer_class, auto_class, more = {
        "sft": (SFTConfig, SFTTrainer, AutoModelForCausalLM, {}),
        "reward_model": (
            RewardConfig,
            RewardTrainer,
            AutoModelForSequenceClassification,
            {"center_rewards_coefficient": 0.01},
        ),
        "dpo": (DPOConfig, DPOTrainer, AutoModelForCausalLM, {"beta": 0.1}),
    }[stage]
    folder = tempfile.TemporaryDirectory()
    config = config_class(
        output_dir=folder.name,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=WARM_UP + steps,
        learning_rate=1e-5,
        max_length=512,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        **more,
    )
    options = {"num_labels": 1} if stage == "reward_model" else {}
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = trainer_class(
        model=auto_class.from_pretrained(model, dtype="float32", **options),
        args=config,
        train_dataset=Dataset.from_list(chats),
        processing_class=tokenizer,
        callbacks=[Stamp()],
    )
    trainer.train()
    folder.cleanup()
    return stamps.result()


class Side:
    """A process that imports the libraries of one side, and forks one process per measurement."""

    def __init__(self, name):
        command = [sys.executable, __file__, "serve", name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        self.process = subprocess.Popen(command, **pipes)

    def measure(self, *arguments):
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
            if line.startswith("FAILED"):
                break
        sys.exit(f"{arguments} failed")


def serve(name):
    """Answers measurements: one line of arguments, one line with the result."""
    if name == "ours":
        load(ROOT / SCRIPTS["dpo"])
    else:
        import trl

        print(trl.DPOTrainer, trl.SFTTrainer, trl.RewardTrainer)  # they are imported when they are named
    for line in sys.stdin:
        if pid := os.fork():
            _, status = os.waitpid(pid, 0)
            if status:
                print("FAILED", flush=True)
        else:
            result = {"ours": ours, "trl": trls}[name](*json.loads(line))
            print("\nRESULT " + json.dumps(result), flush=True)
            os._exit(0)


def compare(stage, name, model, sides):
    rows, pairs, steps, rounds = SIZES[name]
    size = rows if stage == "sft" else pairs
    results = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 else reversed(sides):
            results[side].append(sides[side].measure(stage, model, size, steps))
    for key, title in {
        "seconds": "processor seconds per step",
        "peak": "peak memory, MiB",
        "beyond": "peak beyond imports, MiB",
    }.items():
        medians = [shown(statistics.median(r[key] for r in results[side])) for side in results]
        ratios = sorted(a[key] / b[key] for a, b in zip(*results.values()))
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        table_row(f"{stage}, {name}", title, *medians, ratio)


def main(words):
    if words[:1] == ["serve"]:
        return serve(words[1])
    if unknown := set(words) - {*SIZES, *SCRIPTS}:
        sys.exit(f"unknown: {', '.join(unknown)}\n{__doc__}")
    table_head("", "", "ours", "trl", "ours / trl, median of rounds (least to most)")
    sides = {name: Side(name) for name in ("ours", "trl")}
    with tempfile.TemporaryDirectory() as folder:
        models = {"tiny": str(TINY), "20M": f"{folder}/20M", "smollm2": str(ROOT / "data/real/smollm2")}
        for name in [word for word in words if word in SIZES] or ["tiny", "20M"]:
            if name == "20M":
                random_model(models[name], name)
            for stage in [word for word in words if word in SCRIPTS] or SCRIPTS:
                compare(stage, name, models[name], sides)


if __name__ == "__main__":
    main(sys.argv[1:])
