"""Everything that a GPU can show, in one command of a few minutes; prints a table (docs/results.md has one).

python tests/gpu.py                      # all stages, into checkpoints/gpu
python tests/gpu.py OUT curves resume    # into the folder OUT, some of the stages

curves   ten steps of the default run of each trainer, in float32 and bfloat16
options  two steps with LORA_RANK and with GRADIENT_CHECKPOINTING
resume   a run that was killed after its first checkpoint ends with the bytes of one that was not
graphs   the responses that CUDA graphs sample against those of kernels that are launched one by one
waits    how often sampling and the update wait for the GPU
step     seconds and memory of a GRPO step with a random model of Qwen2.5-0.5B's shape
two      the same first step on two GPUs as on one
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
TRAINERS = {"ppo/ppo.py": "PPOTrainer", "grpo/grpo.py": "GRPOTrainer", "rce/rce.py": "RCETrainer"}
MINED = ["MINE_PROMPTS=64", "ROUNDS=1"]  # for rce.py alone
VARIANTS = {  # of the GRPO step of stage `step`
    "bfloat16": {},
    "bfloat16, CUDA graphs": {"CUDA_GRAPHS": True, "DECODE_BLOCK": 128},
    "bfloat16, LoRA 16, CUDA graphs": {"LORA_RANK": 16, "CUDA_GRAPHS": True, "DECODE_BLOCK": 128},
    "bfloat16, checkpointing": {"GRADIENT_CHECKPOINTING": True},
    "bfloat16, LoRA 16": {"LORA_RANK": 16},
}
table = []  # (what was asked, what came out)


def report(question, answer):
    table.append((question, answer))
    print(f"{question}: {answer}", flush=True)


def load(path, **constants):
    """Returns a fresh module of a trainer with these constants."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in constants.items():
        setattr(module, name, value)
    return module


def arguments(path, folder, *words):
    extra = MINED if path == "rce/rce.py" else []
    return [str(ROOT / path), f"OUTPUT_DIR={folder}", "RESUME=yes", *extra, *words]


def train(path, folder, *words, launcher=(sys.executable,)):
    """Runs a trainer as a program. Returns its records of metrics.jsonl and its seconds."""
    started = time.time()
    subprocess.run([*launcher, *arguments(path, folder, *words)], check=True, stdout=subprocess.DEVNULL)
    lines = (Path(folder) / "logs/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], time.time() - started


def curves(out):
    for path in TRAINERS:
        for dtype in ("float32", "bfloat16"):
            name = f"{Path(path).stem}_{dtype}"
            words = [f"DTYPE={dtype}", "MAX_STEPS=10", "EVAL_EVERY_N_STEPS=5"]
            records, seconds = train(path, out / name, *words)
            accuracies = [r["accuracy_sampled"] for r in records if r["phase"] == "eval"]
            deviation = max(r.get("rollout_mismatch", 0) for r in records if r["phase"] == "train")
            shown = " ".join(f"{x:.3f}" for x in accuracies)
            report(f"{name}, sampled accuracy", f"{shown}; {seconds:.0f} s; rollout mismatch {deviation:.1e}")


def options(out):
    for path in TRAINERS:
        for word in ("LORA_RANK=8", "GRADIENT_CHECKPOINTING=True"):
            name = f"{Path(path).stem}_{word.partition('=')[0].lower()}"
            _, seconds = train(path, out / name, "MAX_STEPS=2", "DTYPE=bfloat16", "MAX_EVAL_PROMPTS=20", word)
            report(f"{Path(path).stem} {word}", f"{seconds:.0f} s")


def without_clock(path):
    """Returns the lines of metrics.jsonl without what a clock says."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: x for name, x in record.items() if "second" not in name} for record in records]


def resume(out):
    for path in TRAINERS:
        name = Path(path).stem
        words = ["MAX_STEPS=4", "EVAL_EVERY_N_STEPS=2", "SAVE_EVERY_N_STEPS=2", "MAX_EVAL_PROMPTS=40"]
        whole, cut = out / f"{name}_whole", out / f"{name}_cut"
        train(path, whole, *words)
        program = subprocess.Popen(
            [sys.executable, *arguments(path, cut, *words)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while program.poll() is None and not (cut / "step_2/training_state.pt").exists():
            time.sleep(0.02)
        program.send_signal(signal.SIGKILL)
        program.wait()
        train(path, cut, *words)
        equal = without_clock(whole / "logs/metrics.jsonl") == without_clock(cut / "logs/metrics.jsonl")
        for file in ("logs/samples.jsonl", "step_4/policy/model.safetensors"):
            equal &= (whole / file).read_bytes() == (cut / file).read_bytes()
        report(f"{name} killed and resumed", "equal bytes" if equal else "DIFFERENT BYTES")


def profile(work):
    """Runs work(). Returns how often the host waited for the device, by call."""
    with torch.profiler.profile() as profiler:
        work()
    calls = Counter(event.name for event in profiler.events())
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
    kernels = sum(n for name, n in calls.items() if name.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    return sum(calls[name] for name in waits), kernels


def waits(out):
    for path in ("ppo/ppo.py", "grpo/grpo.py"):
        module = load(path, OUTPUT_DIR=str(out / "waits"), RESUME="no", EVAL_DATASETS=[], TEMPERATURE=3.0)
        trainer = getattr(module, TRAINERS[path])()
        trainer.state.step = 1
        trainer.seed_step()
        name = Path(path).stem
        trainer.rollout(trainer.next_prompts())  # warms up
        batches = []
        count, kernels = profile(lambda: batches.append(trainer.rollout(trainer.next_prompts())))
        report(f"{name} rollout of {module.MAX_NEW_TOKENS} tokens", f"{count} waits, {kernels} kernels")
        if name == "grpo":
            trainer.replace_zero_variance_groups(batches[0])
        trainer.compute_advantages(batches[0])
        count, kernels = profile(lambda: trainer.update(batches[0]))
        steps = module.GROUP_EPOCHS * module.MINI_BATCHES
        report(f"{name} update of {steps} optimizer steps", f"{count} waits, {kernels} kernels")
        trainer.run.lock.release(force=True)


def graphs(out):
    for dtype in ("float32", "bfloat16"):
        batches = []
        for uses_graphs in (False, True):
            options = {"OUTPUT_DIR": str(out / "graphs"), "RESUME": "no", "EVAL_DATASETS": [], "DTYPE": dtype}
            module = load("grpo/grpo.py", **options, CUDA_GRAPHS=uses_graphs, DECODE_BLOCK=16)
            trainer = module.GRPOTrainer()
            trainer.state.step = 1
            trainer.seed_step()
            batches.append(trainer.rollout(trainer.next_prompts()))
            scored = module.all_logprobs(trainer.actor, batches[-1])
            trainer.run.lock.release(force=True)
        equal = sum(a == b for a, b in zip(*(batch.response_ids for batch in batches)))
        ratio = (scored - batches[1].logprobs).abs().max().item()
        report(f"{dtype}: responses with a graph as without", f"{equal} of {len(scored)}")
        report("  largest |log ratio| of scoring to sampling", f"{ratio:.1e}")


def random_qwen(folder):
    """Writes a random model of Qwen2.5-0.5B's shape with the tiny tokenizer. Returns its folder."""
    config = transformers.Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(ROOT / "data/tiny/policy").save_pretrained(folder)
    return folder


def bandwidth():
    """Returns bytes per second, read and written, of a large copy on the device."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    torch.cuda.synchronize()
    return 10 * 2 * len(source) / (time.perf_counter() - started)


def step(out):
    model = random_qwen(out / "qwen")
    for label, constants in VARIANTS.items():
        options = {
            "ACTOR_MODEL": str(model),
            "DTYPE": "bfloat16",
            "BATCH_SIZE": 64,
            "GROUP_SIZE": 8,
            "MAX_NEW_TOKENS": 256,
            "LEARNING_RATE": 1e-6,
            "REWARD_FUNCTIONS": [("length_penalty", 1.0)],
            "EVAL_DATASETS": [],
            "OUTPUT_DIR": str(out / "step"),
            "RESUME": "no",
            **constants,
        }
        module = load("grpo/grpo.py", **options)
        trainer = module.GRPOTrainer()
        trainer.run.open(trainer.state, False)
        for number in (1, 2):  # the first one warms up
            torch.cuda.reset_peak_memory_stats()
            trainer.state.step = number
            trainer.seconds = Counter()
            trainer.seed_step()
            batch = trainer.rollout(trainer.next_prompts())
            trainer.compute_advantages(batch)
            torch.cuda.synchronize()
            trainer.update(batch)
            torch.cuda.synchronize()
        seconds = {name: round(x, 1) for name, x in trainer.seconds.items()}
        tokens = batch.mask.sum().item()
        gigabytes = torch.cuda.max_memory_allocated() / 2**30
        report(f"GRPO step, 64 x 8 x 256, {label}", f"{seconds}, {gigabytes:.1f} GiB")
        # A token reads all weights and the cache once: 2 bytes per weight, 2 * 2 * 64 * 2 bytes per layer
        # and position
        weights = 2 * sum(p.numel() for p in trainer.actor.parameters())
        cache = 512 * 24 * 512 * (256 / 2 + len(batch.rows[0]["ids"]))
        limit = 256 * (weights + cache) / bandwidth()
        rate = tokens / seconds["rollout"]
        report("  tokens per second", f"{rate:,.0f}; bandwidth's limit is {limit:.2f} s for the rollout")
        trainer.run.close(trainer.state)
        del module, trainer, batch
        torch.cuda.empty_cache()


def two(out):
    if torch.cuda.device_count() < 2:
        report("two processes", "not run: one GPU")
        return
    words = ["MAX_STEPS=2", "MAX_EVAL_PROMPTS=20"]
    one, _ = train("grpo/grpo.py", out / "one", *words)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    both, _ = train("grpo/grpo.py", out / "both", *words, launcher=launcher)
    difference = max(abs(a["reward"] - b["reward"]) for a, b in zip(one, both))
    report("one against two processes, reward", f"differs by {difference:.1e}")


def main(out=ROOT / "checkpoints/gpu", *names):
    stages = {f.__name__: f for f in (graphs, step, waits, resume, curves, options, two)}
    started = time.time()
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    for name in names or stages:
        try:
            stages[name](out)
        except Exception as error:  # a stage that fails must not hide the others
            report(name, f"FAILED: {type(error).__name__}: {str(error)[:300]}")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"\n{name}, torch {torch.__version__}, {time.time() - started:.0f} s\n")
    lines = ["| question | answer |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in table)]
    (out / "gpu.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
