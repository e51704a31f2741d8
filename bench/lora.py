"""LoRA against training whole models: memory and time of GRPO's and PPO's step at 20M parameters.

    python bench/lora.py [ROUNDS]        # 3 rounds, about 5 minutes on 2 idle cores

A Llama of 19.7 million random parameters (bench/speed.py), KL_COEF = 0.05, so that whole models have a
reference beside them. Sides alternate, each in a fresh process; medians of the rounds and, last, of their
ratios. Seconds are the process's own CPU time: other programs' do not count. Peak memory is the whole
process's, some 500 MB of libraries included.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time

import speed

STEPS = 5  # after the first two
SIDES = {"whole": {"LORA_RANK": 0}, "rank 8": {"LORA_RANK": 8, "LEARNING_RATE": 1e-3}}
WORK = {
    "BATCH_SIZE": 4,
    "GRADIENT_ACCUMULATION_STEPS": 1,
    "GROUP_SIZE": 4,
    "MAX_NEW_TOKENS": 40,
    "KL_COEF": 0.05,
    "REWARD_MODEL": None,
    "EVAL_DATASETS": [],
    "SAVE_EVERY_N_STEPS": 0,
    "MAX_STEPS": STEPS + 2,
    "RESUME": "no",
}


def megabytes(tensors):
    return sum(x.numel() * x.element_size() for x in tensors) / 1e6


def measure(script, model, side):
    """One run: what its weights and optimizers take, and the CPU seconds of its steps."""
    module = speed.load(speed.trainer_file(script))
    folder = tempfile.TemporaryDirectory()
    for key, value in {**WORK, **SIDES[side], "ACTOR_MODEL": model, "OUTPUT_DIR": folder.name}.items():
        setattr(module, key, value)
    trainer = getattr(module, f"{script.upper()}Trainer")()
    stamps = []
    record = trainer.record

    def record_and_stamp(*some):
        record(*some)
        stamps.append(time.process_time())

    trainer.record = record_and_stamp
    trainer.train()
    folder.cleanup()
    models = {id(m): m for m in (*trainer.models.values(), trainer.reference)}.values()
    parameters = [p for m in models for p in m.parameters()]
    states = [x for o in trainer.optimizers.values() for state in o.state.values() for x in state.values()]
    return {
        "trained weights, MB": megabytes(p for p in parameters if p.requires_grad),
        "optimizer's state, MB": megabytes(states),
        "all weights, MB": megabytes(parameters),
        "peak memory, MB": speed.peak() * 2**20 / 1e6,
        "CPU seconds a step": (stamps[-1] - stamps[1]) / STEPS,
    }


def main(rounds):
    with tempfile.TemporaryDirectory() as folder:
        speed.random_model(folder, "20M")
        for script in ("grpo", "ppo"):
            compare(script, folder, rounds)


def compare(script, model, rounds):
    """Prints the table of one trainer."""
    found = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            words = [sys.executable, __file__, script, model, side]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            found[side].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"\n{script}, {rounds} rounds of {STEPS} steps\n")
    speed.table_head("", *SIDES, "rank 8 / whole")
    for key in found["whole"][0]:
        medians = [speed.shown(statistics.median(r[key] for r in found[side])) for side in SIDES]
        ratios = [b[key] / a[key] for a, b in zip(*found.values())]
        speed.table_row(key, *medians, f"{statistics.median(ratios):.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(measure(*sys.argv[1:])))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 3)
