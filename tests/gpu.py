"""Everything that is open about GPUs, asked of one in one command, stage by stage:

    python tests/gpu.py                        # into checkpoints/gpu; one GPU: some 10 minutes, two: 30
    python tests/gpu.py OUT runs resume        # into a folder; some of the stages
    python tests/gpu.py OUT --small            # small sizes; so on a machine without a GPU

    waits     copies and synchronisations, beside what the pretended GPU (pretend_gpu.py) says
    resume    a run cut in two has the bytes of a whole one
    two       the same bytes on one and two GPUs (where resume was asked)
    memory    a GRPO step of Qwen2.5-0.5B's shape in bfloat16: whole, LORA_RANK, GRADIENT_CHECKPOINTING
    rollouts  tokens a second at 64 and 256 rows, beside transformers' generate and the bandwidth's floor
    runs      the default runs of PPO, GRPO and RCE: their seconds and accuracies
    speed     bench/speed.py gpu

A stage that is done stands in OUT/gpu.json and is not done again; one that fails is named and the next one
begins. The last thing printed, and OUT/gpu.md, is a table.
"""

import filecmp
import itertools
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
os.environ["HF_HUB_OFFLINE"] = "1"
import speed
import torch

ALGORITHMS = ("ppo", "grpo", "rce")
SHORT = {
    "MAX_STEPS": 4,
    "EVAL_EVERY_N_STEPS": 2,
    "MAX_EVAL_PROMPTS": 40,
    "SAVE_EVERY_N_STEPS": 2,
    "RESUME": "no",
}
COUNTED = {  # as test_pretend_gpu.py counts
    "BATCH_SIZE": 4,
    "GRADIENT_ACCUMULATION_STEPS": 2,
    "GROUP_SIZE": 4,
    "MAX_TRAIN_PROMPTS": 24,
    "MAX_STEPS": 1,
    "GROUP_EPOCHS": 1,
    "MAX_NEW_TOKENS": 64,
    "EVAL_DATASETS": [],
    "TEMPERATURE": 3.0,
    "RESUME": "no",
    "REWARD_FUNCTIONS": [("rouge_l", 1.0)],
}
MINED = {"rce": {"MINE_PROMPTS": 64, "ROUNDS": 1}}
PRETENDED = {  # units, waits, kernels
    "ppo": {"rollout": (126, 7, 31423), "update": (4, 4, 2897)},
    "grpo": {"rollout": (126, 7, 31423), "update": (2, 3, 1669)},
}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


# ---------------------------------------------------------------- programs


def start(*words):
    """What a program prints; its error is raised."""
    done = subprocess.run([*map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr[-2000:]}")
    return done.stdout


def words_of(name, folder, constants):
    constants = {**constants, "OUTPUT_DIR": folder}
    return ROOT / f"{name}/{name}.py", *(f"{key}={value}" for key, value in constants.items())


def train(name, folder, constants, *launcher):
    start(*(launcher or [sys.executable]), *words_of(name, folder, constants))


def measured(what, name, folder, constants):
    """What a run in a process of its own measures (be_measured)."""
    said = start(sys.executable, __file__, f"--{what}", *words_of(name, folder, constants))
    return json.loads(said.partition("MEASURED ")[2].splitlines()[0])


def be_measured(what, program, *words):
    """Be this program, then print its most memory, or how often the host waited for the GPU."""
    sys.argv = [program, *words]
    if what == "--memory":
        with suppress(SystemExit):
            runpy.run_path(program, run_name="__main__")
    print("MEASURED " + json.dumps(speed.peak() if what == "--memory" else profiled(program)))


def profiled(program):
    """{"rollout", "update": [units, waits, kernels]} of a run's step by PyTorch's profiler; a unit is a token
    decoded or a backward pass."""
    module = speed.load(program)
    module.apply_overrides(sys.argv[1:])
    trainer = getattr(module, Path(program).stem.upper() + "Trainer")()
    found = {}
    units = []

    def count(owner, name):
        work = getattr(owner, name)
        setattr(owner, name, lambda *args: units.append(name) or work(*args))

    def observe(phase):
        work = getattr(trainer, phase)

        def observed(batch):
            units.clear()
            with torch.profiler.profile() as profile:
                out = work(batch)
            events = {event.key: event.count for event in profile.key_averages()}
            counts = (sum(events.get(name, 0) for name in names) for names in (WAITS, LAUNCHES))
            found[phase] = [len(units), *counts]
            return out

        setattr(trainer, phase, observed)

    count(module.Decoder, "next")
    count(module, "backward")
    observe("rollout")
    observe("update")
    trainer.train()
    return found


def records(folder, phase):
    """Records of a phase in a run's metrics.jsonl, without what is of time."""
    every = map(json.loads, (Path(folder) / "logs/metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in r.items() if "second" not in k} for r in every if r["phase"] == phase]


def same(one, two):
    """Whether two runs have the same metrics and, in their last checkpoints, the same weights."""
    last = max(Path(one).glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    weights = sorted(path.relative_to(one) for path in last.rglob("*.safetensors"))
    assert weights, f"{last} has no weights"
    equal = [filecmp.cmp(Path(one) / path, Path(two) / path, shallow=False) for path in weights]
    return all(equal) and all(records(one, phase) == records(two, phase) for phase in ("train", "eval"))


# ---------------------------------------------------------------- stages: [(what is asked, answer)]


def waits(out, small):
    answers = []
    for name in ("ppo", "grpo"):
        if torch.version.cuda is None:  # the pretended GPU is for CPU builds of PyTorch
            words = words_of(name, out / "waits", COUNTED)
            said = start(sys.executable, ROOT / "tests/pretend_gpu.py", *words)
            rows = re.findall(r"^(rollout|update) +(\d+) +(\d+) +\d+ +(\d+) +(\d+)$", said, re.MULTILINE)
            found = {phase: [int(a) + int(b), int(c), int(d)] for phase, a, b, c, d in rows}
        else:
            found = measured("waits", name, out / "waits", COUNTED)
        for phase, unit in (("rollout", "tokens"), ("update", "backward passes")):
            both = found[phase], PRETENDED[name][phase]
            counts = [f"{stops} waits, {kernels:,} kernels in {n} {unit}" for n, stops, kernels in both]
            answers.append((f"{name}, {phase}", f"{counts[0]}; pretended: {counts[1]}"))
    return answers


def resume(out, small):
    answers = []
    for name in ALGORITHMS[1:2] if small else ALGORITHMS:
        whole, cut = out / f"{name}_whole", out / f"{name}_cut"
        constants = {**SHORT, **MINED.get(name, {})}
        train(name, whole, constants)
        shutil.rmtree(cut, ignore_errors=True)
        shutil.copytree(whole, cut)
        shutil.rmtree(cut / "step_4")
        train(name, cut, {**constants, "RESUME": "yes"})
        answers.append((f"{name}: a resumed run has the whole one's bytes", same(whole, cut)))
    return answers


def two(out, small):
    if torch.cuda.device_count() < 2 and not small:
        return [("the same bytes on one and two GPUs", "there is one GPU")]
    answers = []
    for name in ALGORITHMS[1:2] if small else ALGORITHMS:
        one, both = out / f"{name}_whole", out / f"{name}_two"  # the stage resume made the first
        words = "-m torch.distributed.run --standalone --nproc_per_node=2".split()
        train(name, both, {**SHORT, **MINED.get(name, {})}, sys.executable, *words)
        answers.append((f"{name}: the same bytes on one and two processes", same(one, both)))
    return answers


def model_of(out, small):
    folder = out / "model"
    if not small and not folder.exists():
        speed.random_model(folder, "qwen")
    return speed.TINY if small else folder


def memory(out, small):
    constants = {
        "ACTOR_MODEL": model_of(out, small),
        "DTYPE": "bfloat16",
        "MAX_STEPS": 1,
        "EVAL_DATASETS": [],
        "SAVE_EVERY_N_STEPS": 0,
        "BATCH_SIZE": 2 if small else 8,
        "GRADIENT_ACCUMULATION_STEPS": 1,
        "GROUP_SIZE": 4 if small else 8,
        "MAX_NEW_TOKENS": 16 if small else 512,
        "RESUME": "no",
    }
    answers = []
    for rank, checkpointing in itertools.product((0, 8), (False, True)):
        more = {"LORA_RANK": rank, "GRADIENT_CHECKPOINTING": checkpointing}
        peak = measured("memory", "grpo", out / "memory", {**constants, **more})
        name = f"LORA_RANK={rank} GRADIENT_CHECKPOINTING={checkpointing}"
        answers.append((f"a grpo step, {name}", f"at most {peak:,.0f} MiB"))
    return answers


def bandwidth(device, size):
    """Bytes a second of memory: a copy reads and writes each byte; the best of ten."""
    source, to = torch.zeros(2, size, dtype=torch.uint8, device=device)
    best = math.inf
    for _ in range(10):
        started = time.perf_counter()
        to.copy_(source)[:1].item()
        best = min(best, time.perf_counter() - started)
    return 2 * size / best


def rollouts(out, small):
    model = model_of(out, small)
    rate = bandwidth("cuda", 2**30) if torch.cuda.is_available() else bandwidth("cpu", 2**26)
    weights = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
    answers = [("memory's bandwidth, a copy", f"{rate / 1e9:,.0f} GB/s")]
    for prompts in (1, 2) if small else (8, 32):
        work = [str(model), 32, "even", prompts, 1 if small else 2, 16 if small else 256]
        found = speed.child("rollout", *work)
        found["without shared prompts"] = speed.child("rollout", *work, shared=False)["ours"]
        found["at the bandwidth"] = 8 * prompts * rate / weights  # all weights for a token of every row
        rates = "; ".join(f"{name} {x:,.0f}" for name, x in found.items())
        answers.append((f"tokens a second, float32, {8 * prompts} rows", rates))
    return answers


def runs(out, small):
    answers = []
    for name in ALGORITHMS:
        more = {"MAX_STEPS": 2, "MAX_EVAL_PROMPTS": 20} if small else {}
        more |= {"MINE_PROMPTS": 16} if small and name == "rce" else {}
        started = time.perf_counter()
        train(name, out / name, {"RESUME": "no", **more})
        seconds = time.perf_counter() - started
        first, *_, last = (f"{r['accuracy_sampled']:.3f}" for r in records(out / name, "eval"))
        answers.append((f"{name}, its default run", f"sampled accuracy {first} to {last} in {seconds:.0f} s"))
    return answers


def gpu_speed(out, small):
    return [("bench/speed.py gpu", start(sys.executable, ROOT / "bench/speed.py", "gpu").strip())]


STAGES = {
    "waits": waits,
    "resume": resume,
    "two": two,
    "memory": memory,
    "rollouts": rollouts,
    "runs": runs,
    "speed": gpu_speed,
}


def table(done):
    """What is answered, in Markdown; texts of several lines follow the table."""
    lines = [done["machine"] + "\n", "| stage | asked | answer |", "|---|---|---|"]
    texts = []
    for stage in (name for name in STAGES if name in done):
        for asked, answer in done[stage]["answers"]:
            if "\n" in str(answer):
                texts.append(f"\n{asked}:\n\n{answer}")
                answer = "below"
            lines.append(f"| {stage}, {done[stage]['seconds']:.0f} s | {asked} | {answer} |")
    return "\n".join(lines + texts)


def main(words):
    if words and words[0] in ("--memory", "--waits"):
        return be_measured(*words)
    small = "--small" in words or not torch.cuda.is_available()
    stages = [word for word in words if word in STAGES] or [*STAGES]
    folders = [word for word in words if word not in STAGES and word != "--small"]
    out = Path(folders[0] if folders else ROOT / "checkpoints/gpu").resolve()
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "gpu.json"
    done = json.loads(kept.read_text()) if kept.exists() else {}
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    done["machine"] = f"torch {torch.__version__}, {' and '.join(gpus) or 'no GPU: small sizes'}"
    for stage in stages:
        if stage in done:
            continue
        print(f"{stage} ...", flush=True)
        started = time.perf_counter()
        try:
            answers = STAGES[stage](out, small)
        except (Exception, SystemExit) as error:  # the next stage may go well
            print(f"{stage} failed: {type(error).__name__}: {error}", flush=True)
            continue
        done[stage] = {"answers": answers, "seconds": time.perf_counter() - started}
        kept.write_text(json.dumps(done, indent=1))
    (out / "gpu.md").write_text(table(done) + "\n")
    print(table(done))


if __name__ == "__main__":
    main(sys.argv[1:])
