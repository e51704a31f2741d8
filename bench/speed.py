"""Speed and memory side by side, from one run on this machine:

    python bench/run.py                    # everything, about 25 minutes on 2 cores
    python bench/run.py rollout growth     # some of: trl rollout phases growth gpu

    trl      a GRPO step against trl 1.16.0's on the same work (needs bench/requirements-trl.txt, in an environment of its own)
    rollout  our generate() against transformers' model.generate: lengths even and heavy-tailed, prompts of 32 and 512 tokens
    phases   seconds of rollout, scoring and update of GRPO and PPO at equal samples; model FLOPs against this machine's matrix products
    growth   time and memory as the samples of a step grow from 64 to 1,024 while BATCH_SIZE stays
    gpu      Qwen2.5-0.5B's shape with random weights, bf16, where there is a GPU

Every figure comes from a fresh process; sides alternate, the table has medians of the rounds. "20M" is a Llama of 19.7 million random
parameters with 32,768 ids, "tiny" the shipped one. Peak memory is the whole process's, the libraries' 0.5 GB included.
"""
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "data/tiny/policy"
os.environ["HF_HUB_OFFLINE"] = "1"


# ---------------------------------------------------------------- what a child process measures

def load(name):
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / name / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_model(folder, **shape):
    """A Llama or Qwen2 with random weights and the tiny tokenizer (ids beyond it decode to nothing)."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config, model = (Qwen2Config, Qwen2ForCausalLM) if shape.pop("qwen", False) else (LlamaConfig, LlamaForCausalLM)
    model(config(tie_word_embeddings=True, **ids, **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


SHAPES = {"20M": dict(vocab_size=32768, hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=2048),
          "qwen": dict(qwen=True, vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=4096)}


def peak():
    import torch
    return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def train_steps(script, model, seed=1, warm_up=2, **constants):
    """Run a trainer, return medians of its own metrics after the first steps, the wall time of a step, FLOPs and the reward curve."""
    module, stamps = load(script), []
    constants = dict(SEED=seed, ACTOR_MODEL=str(model), REWARD_MODEL=None, EVAL_DATASETS=[], SAVE_EVERY_N_STEPS=0, RESUME="no", LEARNING_RATE=1e-4,
                     MAX_NEW_TOKENS=40, OUTPUT_DIR=tempfile.mkdtemp()) | constants
    for key, value in constants.items():
        assert hasattr(module, key), key
        setattr(module, key, value)
    trainer = getattr(module, script.upper() + "Trainer")()
    log_step = trainer.log_step
    trainer.log_step = lambda batch, metrics: (log_step(batch, metrics), stamps.append(time.perf_counter()))
    trainer.train()
    records = [r for r in map(json.loads, open(trainer.metrics_file.name)) if r["phase"] == "train"]
    middle = {key: statistics.median(r[key] for r in records[warm_up:]) for key in ("seconds/rollout", "seconds/score", "seconds/update", "response_length")}
    samples = module.BATCH_SIZE * module.GRADIENT_ACCUMULATION_STEPS * module.GROUP_SIZE
    # Useful work alone: 2 FLOPs a weight and token forward, 4 backward; each prompt once; the head where a response's token is said
    body = sum(p.numel() for n, p in trainer.actor.named_parameters() if p.dim() == 2 and "embed" not in n and "lm_head" not in n)
    head = trainer.actor.get_output_embeddings().weight.numel()
    prompts = samples / module.GROUP_SIZE * statistics.mean(len(row["ids"]) for row in trainer.train_rows)
    responses = samples * middle["response_length"]
    forward = 2 * (body * (prompts + responses) + head * responses)
    critic = 2 * body * (prompts + responses) if script == "ppo" else 0
    passes = module.GROUP_EPOCHS
    flops = forward * (1 + 3 * passes) + critic * (1 + 3 * passes) + (forward if trainer.reference else 0)
    seconds = statistics.median(b - a for a, b in zip(stamps[warm_up - 1:], stamps[warm_up:]))
    return {"seconds": seconds, "tokens_per_second": responses / seconds, "peak": peak(), "curve": [r["reward"] for r in records], "flops": flops, **middle}


def ours(model, seed, prompts, steps):
    return train_steps("grpo", model, seed, BATCH_SIZE=prompts, GROUP_SIZE=8, MAX_STEPS=2 + steps)


def trls(model, seed, prompts, steps):
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    sys.path.insert(0, str(ROOT))
    import rewards
    data = load_dataset("json", data_files=str(ROOT / "data/tiny/train.jsonl"), split="train").map(lambda r: {"prompt": r["problem"] + "\n"})
    stamps = []

    class Stamp(TrainerCallback):
        def on_step_end(self, *_, **__):
            stamps.append(time.perf_counter())

    def reward(prompts, completions, solution, **_):
        return rewards.exact_answer(prompts, completions, solution)

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), seed=seed, per_device_train_batch_size=prompts * 8, gradient_accumulation_steps=1, num_generations=8, max_completion_length=40,
        beta=0.0, learning_rate=1e-4, lr_scheduler_type="constant", max_grad_norm=1.0, temperature=1.0, top_p=1.0, top_k=0, loss_type="dapo",
        max_steps=2 + steps, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True)
    trainer = GRPOTrainer(AutoModelForCausalLM.from_pretrained(model), reward, config, train_dataset=data,
                          processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"), callbacks=[Stamp()])
    trainer.train()
    logs = [r for r in trainer.state.log_history if "reward" in r]
    seconds = statistics.median(b - a for a, b in zip(stamps[1:], stamps[2:]))
    tokens = statistics.median(r["completions/mean_length"] for r in logs[2:]) * prompts * 8
    return {"seconds": seconds, "tokens_per_second": tokens / seconds, "peak": peak(), "curve": [r["reward"] for r in logs]}


def rollout(model, prompt_tokens, lengths, prompts, rounds, new_tokens):
    """Tokens a second of our generate() and of transformers' on the same prompts and the same law of lengths, alternating."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
    logging.disable_progress_bar()
    grpo = load("grpo")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(model).eval().to(device)
    eos = model.config.eos_token_id

    def end(module, args, kwargs, out):
        """Make P(length > t) = (20 / (t + 20))^1.5, a heavy tail with mean 40, or let no response end before the last token."""
        t = (kwargs["position_ids"][:, -1:] - prompt_tokens + 1).clamp(min=0).float()
        chance = 1 - ((t + 20) / (t + 21)) ** 1.5 if lengths == "heavy" else torch.full_like(t, 1e-9)
        logits = out.logits[:, -1]
        logits[:, eos] = -1e30
        logits[:, eos:eos + 1] = logits.logsumexp(-1, keepdim=True) + (chance / (1 - chance)).log()
        out.logits = logits[:, None]
        return out
    model.register_forward_hook(end, with_kwargs=True)
    ids = [torch.randint(3, 80, (prompt_tokens,)).tolist() for _ in range(prompts)]
    repeated = torch.tensor([row for row in ids for _ in range(8)], device=device)

    def mine():
        return int(grpo.generate(model, ids, torch.rand(prompts * 8, new_tokens, device=device), 8, new_tokens, 1.0, torch.tensor([eos], device=device), 0)[1].sum())

    def theirs():
        with torch.no_grad():
            out = model.generate(repeated, attention_mask=torch.ones_like(repeated), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new_tokens, pad_token_id=0)
        ended = (out[:, prompt_tokens:] == eos).long()
        return int((ended.cumsum(1) - ended == 0).sum())

    rates = {"ours": [], "generate": []}
    for number in range(rounds + 1):
        for side, function in (("ours", mine), ("generate", theirs)):
            started = time.perf_counter()
            tokens = function()
            if device == "cuda":
                torch.cuda.synchronize()
            if number:  # the first round warms up
                rates[side].append(tokens / (time.perf_counter() - started))
    return {side: statistics.median(values) for side, values in rates.items()}


def matrix_rate(size=1024):
    """FLOPs a second of a float32 (bf16 on a GPU) matrix product, the best of 20."""
    import torch
    gpu = torch.cuda.is_available()
    size = size * 8 if gpu else size
    a, best = torch.randn(size, size, device="cuda" if gpu else "cpu", dtype=torch.bfloat16 if gpu else torch.float32), 0
    for _ in range(20):
        started = time.perf_counter()
        a @ a
        if gpu:
            torch.cuda.synchronize()
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


# ---------------------------------------------------------------- the sections

def child(function, *args, **kwargs):
    """What the function returns in a fresh process."""
    done = subprocess.run([sys.executable, __file__, "child", function, json.dumps([args, kwargs])], capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        sys.exit(f"{function}{args} failed:\n{done.stderr[-3000:]}")
    return json.loads(line[7:])


def section_trl(models):
    if not importlib.util.find_spec("trl"):
        return print("trl is not installed here: pip install -r bench/requirements-trl.txt\n")
    for name, prompts, steps, rounds in (("tiny", 32, 20, 5), ("20M", 8, 3, 3)):
        results = {"ours": [], "trls": []}
        for number in range(1, rounds + 1):
            for side in results:
                results[side].append(child(side, models[name], number, prompts, steps))
        print(f"GRPO, {name}, {prompts} prompts x 8 responses of at most 40 tokens, {steps} steps, medians of {rounds} rounds\n\n| | ours | trl | ours / trl |\n|---|---|---|---|")
        for key, title in (("seconds", "seconds a step"), ("tokens_per_second", "tokens a second"), ("peak", "peak memory, MiB")):
            a, b = (statistics.median(r[key] for r in results[side]) for side in results)
            ratios = sorted(r[key] / t[key] for r, t in zip(*results.values()))  # of neighbours in time: the machine's speed drifts
            shown = f"{a:,.3g} | {b:,.3g}" if a < 100 else f"{a:,.0f} | {b:,.0f}"
            print(f"| {title} | {shown} | {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |")
        if name == "tiny":
            print(f"\n| reward at step | ours, mean of {rounds} seeds (least to most) | trl |\n|---|---|---|")
            for step in (1, 7, 13, 19, 22):
                cells = [[r["curve"][step - 1] for r in results[side]] for side in results]
                print(f"| {step} | " + " | ".join(f"{statistics.mean(c):.3f} ({min(c):.3f} to {max(c):.3f})" for c in cells) + " |")
        print(flush=True)


def section_rollout(models):
    print("Rollout, 8 responses a prompt, response tokens a second\n\n| model | prompts | tokens of each | lengths | ours | generate | ours / generate |\n|---|---|---|---|---|---|---|")
    for name, prompts, rounds in (("tiny", 8, 3), ("tiny", 32, 3), ("20M", 8, 2)):
        for prompt_tokens in (32, 512):
            for lengths, new_tokens in (("even", 64), ("heavy", 256)):
                if prompt_tokens == 512 and (prompts == 32 or name == "20M" and lengths == "heavy"):
                    continue  # minutes of generate()
                r = child("rollout", models[name], prompt_tokens, lengths, prompts, rounds, new_tokens)
                print(f"| {name} | {prompts} | {prompt_tokens} | {lengths}, at most {new_tokens} | {r['ours']:,.0f} | {r['generate']:,.0f} | {r['ours'] / r['generate']:.1f} |", flush=True)
    print()


def phase_row(title, r, rate):
    total = r["seconds"]
    print(f"| {title} | {r['seconds/rollout']:.3f} | {r['seconds/score']:.3f} | {r['seconds/update']:.3f} | {total:.3f} | {r['peak']:,.0f} | {r['flops'] / total / rate:.0%} |", flush=True)


def section_phases(models):
    rate = child("matrix_rate")
    print(f"Phases of a step, seconds; matrix products reach {rate / 1e9:,.0f} GFLOP/s here\n\n| | rollout | score | update | step | peak MiB | share of that rate |\n|---|---|---|---|---|---|---|")
    for name, prompts, steps in (("tiny", 32, 10), ("20M", 8, 4)):
        for script in ("grpo", "ppo"):
            r = child("train_steps", script, models[name], BATCH_SIZE=prompts, GROUP_SIZE=8, GRADIENT_ACCUMULATION_STEPS=1, MAX_STEPS=2 + steps, GROUP_EPOCHS=1, MINI_BATCHES=1)
            phase_row(f"{script}, {name}, {prompts * 8} samples", r, rate)
    print()


def section_growth(models):
    print("Growth, GRPO, BATCH_SIZE 8, GROUP_SIZE 8\n\n| model | samples a step | seconds | milliseconds a sample | peak MiB |\n|---|---|---|---|---|")
    for name, sizes in (("tiny", (1, 4, 16)), ("20M", (1, 4))):
        for batches in sizes:
            r = child("train_steps", "grpo", models[name], BATCH_SIZE=8, GROUP_SIZE=8, GRADIENT_ACCUMULATION_STEPS=batches, MAX_STEPS=4 if name == "20M" else 6)
            print(f"| {name} | {64 * batches:,} | {r['seconds']:.2f} | {1000 * r['seconds'] / 64 / batches:.1f} | {r['peak']:,.0f} |", flush=True)
    print()


def section_gpu(models):
    import torch
    if not torch.cuda.is_available():
        return print("No GPU here: its section is left out\n")
    rate = child("matrix_rate")
    print(f"{torch.cuda.get_device_name()}, Qwen2.5-0.5B's shape, random weights, bf16; matrix products reach {rate / 1e12:,.0f} TFLOP/s; peak is of GPU memory\n")
    print("| | rollout | score | update | step | peak MiB | share of that rate |\n|---|---|---|---|---|---|---|")
    for tokens in (256, 1024):
        r = child("train_steps", "grpo", models["qwen"], BATCH_SIZE=16, GROUP_SIZE=8, MAX_STEPS=6, MAX_NEW_TOKENS=tokens, DTYPE="bfloat16", LEARNING_RATE=1e-6)
        phase_row(f"grpo, 128 samples of {tokens} tokens", r, rate)
    for prompt_tokens in (32, 512):
        for lengths, new_tokens in (("even", 256), ("heavy", 256)):
            r = child("rollout", models["qwen"], prompt_tokens, lengths, 16, 2, new_tokens)
            print(f"rollout, float32, prompt {prompt_tokens}, {lengths}: ours {r['ours']:,.0f}, generate {r['generate']:,.0f} tokens a second, {r['ours'] / r['generate']:.1f}", flush=True)
    print()


def main():
    if sys.argv[1:2] == ["child"]:
        args, kwargs = json.loads(sys.argv[3])
        return print("\nRESULT " + json.dumps(globals()[sys.argv[2]](*args, **kwargs)))
    sections = sys.argv[1:] or ["trl", "rollout", "phases", "growth", "gpu"]
    if unknown := [s for s in sections if f"section_{s}" not in globals()]:
        sys.exit(f"unknown section {unknown[0]}: there are trl, rollout, phases, growth, gpu")
    import torch
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.processor()) if Path("/proc/cpuinfo").exists() else platform.processor()
    print(f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}, Python {platform.python_version()}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        models = {"tiny": str(TINY), **{name: f"{folder}/{name}" for name in SHAPES}}
        for name in ["20M"] + ["qwen"] * ("gpu" in sections and torch.cuda.is_available()):
            random_model(models[name], **SHAPES[name])
        for section in sections:
            globals()[f"section_{section}"](models)


if __name__ == "__main__":
    main()
