"""Our GRPO against trl's on the same work: the tiny model, 32 prompts x 8 completions a step, 40 new tokens, beta 0,
constant learning rate, one update a step, float32. Needs trl, in a virtual environment of its own:

    python -m venv .venv-trl && .venv-trl/bin/pip install -r bench/requirements-trl.txt && .venv-trl/bin/python bench/grpo_vs_trl.py

Each round runs both in fresh processes, one after the other; 2 steps warm up, 20 are measured. Prints seconds a step, tokens
a second, peak memory and both reward curves, with ratios from this one run. `... losses` compares the losses instead: the
loss of each LOSS_TYPE on the same tensors, ours and trl's.
"""
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WARM_UP, STEPS, ROUNDS = 2, 20, 3
os.environ["HF_HUB_OFFLINE"] = "1"


def load_grpo():
    spec = importlib.util.spec_from_file_location("grpo_script", ROOT / "grpo/grpo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ours(seed):
    grpo = load_grpo()
    for key, value in dict(SEED=seed, BATCH_SIZE=32, GROUP_SIZE=8, MAX_NEW_TOKENS=40, MAX_STEPS=WARM_UP + STEPS, LEARNING_RATE=1e-4, EVAL_DATASETS=[],
                           SAVE_EVERY_N_STEPS=0, RESUME="no", OUTPUT_DIR=tempfile.mkdtemp()).items():
        setattr(grpo, key, value)
    trainer, stamps = grpo.GRPOTrainer(), []
    log_step = trainer.log_step
    trainer.log_step = lambda batch, metrics: (log_step(batch, metrics), stamps.append(time.perf_counter()))
    trainer.train()
    records = [json.loads(line) for line in open(trainer.metrics_file.name)]
    return stamps, [r["response_length"] * 256 for r in records], [r["reward"] for r in records]


def trls(seed):
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
        output_dir=tempfile.mkdtemp(), seed=seed, per_device_train_batch_size=256, gradient_accumulation_steps=1, num_generations=8, max_completion_length=40,
        beta=0.0, learning_rate=1e-4, lr_scheduler_type="constant", max_grad_norm=1.0, temperature=1.0, top_p=1.0, top_k=0, loss_type="dapo",
        max_steps=WARM_UP + STEPS, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True)
    trainer = GRPOTrainer(AutoModelForCausalLM.from_pretrained(ROOT / "data/tiny/policy"), reward, config, train_dataset=data,
                          processing_class=AutoTokenizer.from_pretrained(ROOT / "data/tiny/policy", padding_side="left"), callbacks=[Stamp()])
    trainer.train()
    logs = [r for r in trainer.state.log_history if "reward" in r]
    return stamps, [r["completions/mean_length"] * 256 for r in logs], [r["reward"] for r in logs]


def child(side, seed):
    stamps, tokens, curve = {"ours": ours, "trl": trls}[side](seed)
    seconds = [b - a for a, b in zip(stamps[WARM_UP - 1:], stamps[WARM_UP:])]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("RESULT " + json.dumps({"seconds": statistics.median(seconds), "tokens_per_second": sum(tokens[WARM_UP:]) / sum(seconds), "peak": peak, "curve": curve}))


def compare_speed():
    results = {"ours": [], "trl": []}
    for round_ in range(1, ROUNDS + 1):
        for side in results:
            out = subprocess.run([sys.executable, __file__, side, str(round_)], capture_output=True, text=True)
            line = next((l for l in out.stdout.splitlines() if l.startswith("RESULT ")), None)
            if line is None:
                sys.exit(f"{side} failed:\n{out.stderr[-3000:]}")
            results[side].append(json.loads(line[7:]))
            r = results[side][-1]
            print(f"round {round_}  {side:>4}: {r['seconds']:.3f} s a step, {r['tokens_per_second']:.0f} tokens/s, peak {r['peak']:.0f} MiB", flush=True)
    middle = {side: {key: statistics.median(r[key] for r in rs) for key in ("seconds", "tokens_per_second", "peak")} for side, rs in results.items()}
    print("\nmedians of the rounds        ours       trl  ours/trl")
    for key, name in (("seconds", "seconds a step"), ("tokens_per_second", "tokens a second"), ("peak", "peak memory, MiB")):
        a, b = middle["ours"][key], middle["trl"][key]
        print(f"{name:>22}  {a:9.3f} {b:9.3f}    {a / b:.2f}")
    print("\nreward by step, mean (least to most) over the rounds' seeds\nstep        ours                  trl")
    for step in range(0, WARM_UP + STEPS, 3):
        cells = [[r["curve"][step] for r in results[side]] for side in results]
        print(f"{step + 1:4d}  " + "   ".join(f"{statistics.mean(c):.3f} ({min(c):.3f} to {max(c):.3f})" for c in cells))


def compare_losses():
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    grpo = load_grpo()
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/tiny/policy", padding_side="left")
    torch.manual_seed(0)
    rows, width, low, high = 6, 12, 0.2, 0.3
    prompt, ids = torch.randint(3, 80, (rows, 9)), torch.randint(3, 80, (rows, width))
    mask = (torch.arange(width) < torch.tensor([12, 1, 5, 8, 3, 12])[:, None]).double()
    advantages, noise = torch.tensor([1.0, -1.0, 0.5, -2.0, -0.7, 1.5]).double(), 0.5 * torch.randn(rows, width).double()
    from transformers.utils import logging
    logging.disable_progress_bar()
    print("loss type   dual clip        ours         trl   difference")
    for loss_type in ("grpo", "dapo", "dr_grpo", "gspo", "cispo"):
        for dual in (None, 1.4):
            if loss_type == "cispo" and dual:
                continue  # neither has one
            config = GRPOConfig(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=rows, num_generations=rows, max_completion_length=20, beta=0.0, bf16=False, use_cpu=True,
                                loss_type="grpo" if loss_type == "gspo" else loss_type, importance_sampling_level="sequence" if loss_type == "gspo" else "token",
                                epsilon=low, epsilon_high=1 + high if loss_type == "cispo" else high, delta=dual, report_to=[], gradient_checkpointing=False)
            model = AutoModelForCausalLM.from_pretrained(ROOT / "data/tiny/policy", dtype=torch.float64)
            trl = GRPOTrainer(model, lambda completions, **_: [0.0] * len(completions), config, train_dataset=Dataset.from_dict({"prompt": ["x"] * rows}), processing_class=tokenizer)
            trl.current_gradient_accumulation_steps = 1
            model.eval()
            with torch.no_grad():
                logprobs, *_ = trl._get_per_token_logps_and_entropies(model, torch.cat([prompt, ids], 1), torch.cat([torch.ones_like(prompt), mask.long()], 1), width)
                inputs = {"prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt), "completion_ids": ids, "completion_mask": mask.long(), "advantages": advantages,
                          "old_per_token_logps": logprobs - noise, "num_items_in_batch": mask.sum()}
                model.train()  # trl normalises otherwise in evaluation; the model has no dropout
                theirs = trl._compute_loss(model, inputs).item()
                losses, _ = grpo.policy_loss(logprobs, logprobs - noise, advantages[:, None], mask, loss_type, low, high, dual)
                mine = (losses * grpo.token_weights(mask, loss_type, 20)).sum().item()
            print(f"{loss_type:>9} {str(dual):>11} {mine:11.7f} {theirs:11.7f}    {abs(mine - theirs):.1e}")
            assert abs(mine - theirs) < 1e-6, loss_type


if __name__ == "__main__":
    if sys.argv[1:] == ["losses"]:
        compare_losses()
    elif len(sys.argv) == 3:
        child(sys.argv[1], int(sys.argv[2]))
    else:
        compare_speed()
