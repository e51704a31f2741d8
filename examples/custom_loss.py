"""Another loss: right responses count less than wrong ones (GRPO).

Replaces policy_loss(), which returns the loss and the ratio of each token, two (rows, R). Here tokens of
positive advantage have the weight POSITIVE_WEIGHT: learning mostly from mistakes keeps the responses diverse
(weighted REINFORCE, 2506.01347).

Change: the formula. Groups of equal scores are not read unless KL_COEF or ENTROPY_COEF is above 0. A term
that trains them, too, needs SKIP_ZERO_VARIANCE_GROUPS = False.

    python examples/custom_loss.py [KEY=VALUE ...]    # a minute of one core; constants of grpo.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo
import torch

POSITIVE_WEIGHT = 0.1

plain_policy_loss = grpo.policy_loss


def policy_loss(logprobs, old_logprobs, advantages, mask):
    losses, ratio = plain_policy_loss(logprobs, old_logprobs, advantages, mask)
    return losses * torch.where(advantages > 0, POSITIVE_WEIGHT, 1.0), ratio


grpo.policy_loss = policy_loss
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/custom_loss"

if __name__ == "__main__":
    grpo.train_main()
