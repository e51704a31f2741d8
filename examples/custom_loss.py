"""A term of your own in the loss: override token_losses() (GRPO).

Shows a term that makes responses of more than MAX_LENGTH tokens less likely. token_losses() returns four
tensors (rows, R): the loss of each token, the policy's part of it, the ratio and the KL. `rows` are row
numbers of the batch; all tensors of the batch are indexed by them. GRPO leaves rows without a gradient out
of the backward pass (SKIP_FLAT_GROUPS). It asks token_losses() which rows these are, so a term that trains
rows of equal rewards is trained on them.

Change: the term. In PPO the place is the line `actor_losses = policy_losses` of optimizer_step(); in RCE it
is the function rce_loss().

    python examples/custom_loss.py [KEY=VALUE ...]    # a minute of one core; constants of grpo.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo

MAX_LENGTH = 30  # tokens
COEF = 0.01


class ShorterTrainer(grpo.GRPOTrainer):
    def token_losses(self, batch, rows, logprobs, entropy):
        losses, *rest = super().token_losses(batch, rows, logprobs, entropy)
        too_long = (batch.response_mask[rows].sum(1) > MAX_LENGTH).float()  # (rows,)
        return losses + COEF * too_long[:, None] * logprobs, *rest


grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/custom_loss"

if __name__ == "__main__":
    grpo.run_main(ShorterTrainer)
