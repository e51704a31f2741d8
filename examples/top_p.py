"""Another sampler: top-p, sampled and trained (GRPO).

Replaces sampling_logprobs(), the distribution that is sampled and trained. The rollout, the update and the
reference call it, so one change gives samples, ratios and gradients that fit together. A token that must not
be sampled gets -1e30: minus infinity would make NaN.

Change: TOP_P, or the rule: top-k, min-p, a list of forbidden ids.

Take DTYPE=float32. In bfloat16, rounding takes tokens at the edge out of the update's distribution that the
rollout had sampled, and the check of the first ratios ends the run. Keep KL_COEF small or 0: a sampled token
that the reference excludes has a KL of 20 nats, and in ppo.py of 1e30.

    python examples/top_p.py [KEY=VALUE ...]    # a minute of one core; constants of grpo.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo

TOP_P = 0.95

full_logprobs = grpo.sampling_logprobs


def sampling_logprobs(logits):
    """Returns log-probabilities (..., vocabulary) of the fewest tokens that have more than TOP_P together."""
    logprobs = full_logprobs(logits)
    ordered, order = logprobs.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()  # the probability of all likelier tokens
    is_cut = (before > TOP_P).gather(-1, order.argsort(-1))
    return logprobs.masked_fill(is_cut, -1e30).log_softmax(-1)


grpo.sampling_logprobs = sampling_logprobs
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/top_p"

if __name__ == "__main__":
    grpo.train_main()
