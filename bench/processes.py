"""Seconds per step and memory per process, with one process and with two, from one run on this machine:

    python bench/processes.py                  # under 4 minutes on 2 idle cores
    python bench/processes.py --rounds 3       # each side three times, in turn: medians
    python bench/processes.py --cpu            # on a busy machine: the processor's seconds, not the clock's

Every side is a fresh torchrun with OMP_NUM_THREADS=1. "tiny" is PPO on its default models, 32 prompts x 4
responses a step; "20M" is GRPO on a Llama of 19.7 million random parameters with 32,768 ids, 8 prompts x 4
responses of at most 40 tokens. "state" is what a process keeps of models (parameters), optimizers and, in the
update, gradients, counted from its tensors. Where several processes add their gradients in the order of the
micro-batches, each also holds the sums, which take as much memory as the gradients. "peak" is the whole
process's greatest resident memory, the libraries' 0.5 GB, loading and saving included. Ratios compare sides
of this one run. With --cpu times are those of the process that works most in each phase, without waiting for
others.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from speed import WARM_UP, load, peak, random_model, table_head, table_row, trainer_file
import itertools

STEPS = 5
PHASES = ("seconds/rollout", "seconds/score", "seconds/update")
SIDES = {  # (processes, constants)
    "1 process": (1, {}),
    "1, DETERMINISTIC_GRADIENTS=False": (1, {"DETERMINISTIC_GRADIENTS": False}),
    "2 processes": (2, {}),
    "2, DETERMINISTIC_GRADIENTS=False": (2, {"DETERMINISTIC_GRADIENTS": False}),
    "2, SHARD=fsdp2": (2, {"SHARD": "fsdp2"}),
}


# ---------------------------------------------------------------- what a process measures


def bytes_of(tensors):
    """Of the parts that this process holds; tied weights count once."""
    local = [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
    return sum({id(whole): part.nbytes for whole, part in zip(tensors, local)}.values())


def held_bytes(module, trainer):
    """What this process keeps of models and optimizers, and of gradients and their sums in the update."""
    import torch

    models = [value for value in vars(trainer).values() if isinstance(value, torch.nn.Module)]
    parameters = [p for model in models for p in model.parameters()]
    trained = [p for model in trainer.run.models.values() for p in model.parameters() if p.requires_grad]
    states = [s for optimizer in trainer.run.optimizers.values() for s in optimizer.state.values()]
    gradients = bytes_of(trained)
    several = module.DETERMINISTIC_GRADIENTS and module.SHARD == "none" and module.world_size() > 1
    sums = gradients if several else 0  # GradientSum.totals: of each parameter's own shape and type
    optimizers = bytes_of([x for state in states for x in state.values() if torch.is_tensor(x)])
    return bytes_of(parameters) + optimizers + gradients + sums


class ProcessorTime:
    """The module time, whose perf_counter() counts this process's seconds of processor."""

    perf_counter = staticmethod(time.process_time)

    def __getattr__(self, name):
        return getattr(time, name)


def worker(script, folder, cpu, constants):
    """One process of a side: trains, and writes what it measured into the folder."""
    module = load(trainer_file(script))
    module.time = ProcessorTime() if cpu else time
    unmeasured = {"EVAL_DATASETS": [], "SAVE_EVERY_N_STEPS": 0, "RESUME": "no"}
    constants = {"OUTPUT_DIR": f"{folder}/run", "MAX_STEPS": STEPS, **unmeasured, **constants}
    for key, value in constants.items():
        setattr(module, key, value)
    trainer = getattr(module, f"{script.upper()}Trainer")()
    record = trainer.record
    times = []  # of each step: its phases
    stamps = []

    def record_and_stamp(batch, metrics):
        times.append({f"seconds/{phase}": value for phase, value in trainer.run.times.items()})
        record(batch, metrics)
        stamps.append(module.time.perf_counter())

    trainer.record = record_and_stamp
    trainer.train()
    found = {key: statistics.median(step.get(key, 0.0) for step in times[WARM_UP:]) for key in PHASES}
    counted = stamps[WARM_UP - 1 :]
    found["seconds"] = statistics.median(after - before for before, after in itertools.pairwise(counted))
    found["state"] = held_bytes(module, trainer) / 2**20
    found["peak"] = peak()
    Path(f"{folder}/{os.environ['RANK']}.json").write_text(json.dumps(found))
    if module.dist.is_initialized():  # a thread of gloo's that is left at the end may abort the program
        module.dist.destroy_process_group()


# ---------------------------------------------------------------- the table


def measure(script, count, cpu, constants):
    """What a fresh torchrun finds, of each number the greatest of any process."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={count}", __file__]
        words += ["--worker", script, folder, "cpu" * cpu, json.dumps(constants)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(f"{script} {constants} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        found = [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(count)]
    return {key: max(one[key] for one in found) for key in found[0]}


def table(title, script, constants, rounds, cpu):
    results = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            count, own = SIDES[side]
            results[side].append(measure(script, count, cpu, {**constants, **own}))
    print(f"{title}, {STEPS - WARM_UP} steps after {WARM_UP}, rounds: {rounds}\n")
    table_head("", "rollout", "score", "update", "step", "/ 1 process", "state MiB", "peak MiB")
    first = statistics.median(r["seconds"] for r in results["1 process"])
    for side, rows in results.items():
        of = {key: statistics.median(r[key] for r in rows) for key in rows[0]}
        times = [f"{of[key]:.2f}" for key in (*PHASES, "seconds")]
        table_row(side, *times, f"{of['seconds'] / first:.2f}", f"{of['state']:,.1f}", f"{of['peak']:,.0f}")
    print()
    for exact in "1 process", "2 processes":
        plain = f"{exact[0]}, DETERMINISTIC_GRADIENTS=False"
        for key in "seconds/update", "seconds":
            ratios = [a[key] / b[key] for a, b in zip(results[exact], results[plain])]
            what = key.removeprefix("seconds/").replace("seconds", "step")
            print(f"exact sums / plain sums, {exact}, {what}: {statistics.median(ratios):.2f}")
    print(flush=True)


def main():
    if sys.argv[1:2] == ["--worker"]:
        script, folder, cpu, constants = sys.argv[2:]
        worker(script, folder, cpu, json.loads(constants))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", help="seconds of processor, not the clock's")
    options = parser.parse_args()
    how = options.rounds, options.cpu
    seconds = "seconds of processor" if options.cpu else "seconds"
    at_start = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start"
    print(f"{at_start}; {seconds} a step, one thread a process\n", flush=True)
    table("tiny, PPO, 128 responses a step", "ppo", {}, *how)
    with tempfile.TemporaryDirectory() as folder:
        random_model(folder, "20M")
        work = {"BATCH_SIZE": 4, "GRADIENT_ACCUMULATION_STEPS": 2, "GROUP_SIZE": 4, "MAX_NEW_TOKENS": 40}
        work["SKIP_FLAT_GROUPS"] = False  # a random model earns nothing: all groups are flat
        table("20M, GRPO, 32 responses a step", "grpo", {"ACTOR_MODEL": folder, **work}, *how)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
