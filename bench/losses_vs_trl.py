"""The loss of each LOSS_TYPE on the same float64 tensors, ours and trl 1.16.0's. Needs trl, in an environment of its own:

    python -m venv .venv-trl && .venv-trl/bin/pip install -r bench/requirements-trl.txt && .venv-trl/bin/python bench/losses_vs_trl.py
"""
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
os.environ["HF_HUB_OFFLINE"] = "1"


def load_grpo():
    spec = importlib.util.spec_from_file_location("grpo_script", ROOT / "grpo/grpo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    compare_losses()
