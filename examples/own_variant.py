"""A variant of GRPO: trains for pass@k, that one of k responses is right.

Replaces group_advantages() by a formula of another paper. The score of k responses is 1 if one of them is
right; the advantage of a response is the mean score of all draws of k of the group in which it is
(2508.10751, section 2.4), normalised as in GRPO. Groups with few wrong responses have no gradient.

Change: K, at most GROUP_SIZE; any formula of the scores. compute_advantages() sees the whole batch.

To edit more than a function, copy the trainer: `mkdir mine; cp grpo/grpo.py mine/` in this repository.

    python examples/own_variant.py [KEY=VALUE ...]    # a minute of one core; constants of grpo.py
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo
import torch

K = 4


def group_advantages(scores):
    """Returns the advantage of each response, (rows,). Responses with a score above 0 are right."""
    size = grpo.GROUP_SIZE
    is_wrong = scores.view(-1, size) <= 0
    num_wrong = is_wrong.sum(1, keepdim=True)
    # By the number of wrong responses: which fraction of draws, and of draws with a given one, is all wrong
    all_wrong = torch.tensor([math.comb(n, K) / math.comb(size, K) for n in range(size + 1)])
    rest_wrong = torch.tensor([math.comb(n, K - 1) / math.comb(size - 1, K - 1) for n in range(size + 1)])
    all_wrong, rest_wrong = all_wrong[num_wrong], rest_wrong[(num_wrong - 1).clamp(min=0)]
    advantages = torch.where(is_wrong, all_wrong - rest_wrong, all_wrong)
    std = (all_wrong * (1 - all_wrong)).sqrt()  # of a score of 0 or 1
    return (advantages / (std + 1e-4)).flatten()


grpo.group_advantages = group_advantages
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/own_variant"

if __name__ == "__main__":
    grpo.train_main()
