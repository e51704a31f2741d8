"""The loss of each LOSS_TYPE on the same float64 tensors, ours and trl 1.16.0's. Needs trl, in an environment
of its own:

    python -m venv .venv-trl
    .venv-trl/bin/pip install -r bench/requirements-trl.txt
    .venv-trl/bin/python bench/losses_vs_trl.py
"""

import importlib.util
import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOW = 0.2  # CLIP_RANGE
HIGH = 0.3  # CLIP_RANGE_HIGH
LENGTH = 20  # MAX_NEW_TOKENS
os.environ["HF_HUB_OFFLINE"] = "1"


def load_grpo():
    spec = importlib.util.spec_from_file_location("grpo_script", ROOT / "grpo/grpo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def no_reward(completions, **_):
    return [0.0] * len(completions)


def make_trl(loss_type, dual, rows):
    """trl's trainer with that loss, and its model in float64."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=rows,
        num_generations=rows,
        max_completion_length=LENGTH,
        beta=0.0,
        bf16=False,
        use_cpu=True,
        loss_type="grpo" if loss_type == "gspo" else loss_type,
        importance_sampling_level="sequence" if loss_type == "gspo" else "token",
        epsilon=LOW,
        epsilon_high=1 + HIGH if loss_type == "cispo" else HIGH,
        delta=dual,
        report_to=[],
        gradient_checkpointing=False,
    )
    model = AutoModelForCausalLM.from_pretrained(ROOT / "data/tiny/policy", dtype=torch.float64)
    trainer = GRPOTrainer(
        model,
        no_reward,
        config,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * rows}),
        processing_class=AutoTokenizer.from_pretrained(ROOT / "data/tiny/policy", padding_side="left"),
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer, model


def compare_losses():
    grpo = load_grpo()
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    rows = 6
    width = 12
    prompt = torch.randint(3, 80, (rows, 9))
    ids = torch.randint(3, 80, (rows, width))
    mask = (torch.arange(width) < torch.tensor([12, 1, 5, 8, 3, 12])[:, None]).double()
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0, -0.7, 1.5]).double()
    noise = 0.5 * torch.randn(rows, width).double()
    prompt_mask = torch.ones_like(prompt)
    print("loss type   dual clip        ours         trl   difference")
    for loss_type in ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo"):
        for dual in (None, 1.4):
            if loss_type in ("cispo", "sapo") and dual:
                continue  # neither has one
            trl, model = make_trl(loss_type, dual, rows)
            model.eval()
            with torch.no_grad():
                whole = torch.cat([prompt, ids], 1)
                whole_mask = torch.cat([prompt_mask, mask.long()], 1)
                logprobs, *_ = trl._get_per_token_logps_and_entropies(model, whole, whole_mask, width)
                old_logprobs = logprobs - noise
                inputs = {
                    "prompt_ids": prompt,
                    "prompt_mask": prompt_mask,
                    "completion_ids": ids,
                    "completion_mask": mask.long(),
                    "advantages": advantages,
                    "old_per_token_logps": old_logprobs,
                    "num_items_in_batch": mask.sum(),
                }
                model.train()  # trl normalises otherwise in evaluation; the model has no dropout
                theirs = trl._compute_loss(model, inputs).item()
                losses, _ = grpo.policy_loss(
                    logprobs, old_logprobs, advantages[:, None], mask, loss_type, LOW, HIGH, dual
                )
                ours = (losses * grpo.token_weights(mask, loss_type, LENGTH)).sum().item()
            difference = abs(ours - theirs)
            print(f"{loss_type:>9} {dual!s:>11} {ours:11.7f} {theirs:11.7f}    {difference:.1e}")
            assert difference < 1e-6, loss_type


if __name__ == "__main__":
    compare_losses()
