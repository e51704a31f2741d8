"""Another sampler: top-p, sampled and trained.

Shows a change of sampling_logprobs(), the distribution that is sampled. generate(), the update and the check
of the models call the same function, so one change gives samples, ratios and gradients that fit together.
A token that must not be sampled gets minus infinity.

Change: TOP_P, or the rule: top-k, min-p, a list of forbidden ids.

Limits. The reference is scored by its full distribution, so the KL stays finite; it then includes the
log-probability that the kept tokens gain by the cut. With GROUP_EPOCHS > 1 a sampled token can leave the
nucleus of the policy that moved: its ratio is 0, and it is not trained. bfloat16 can do this to a token at
the edge of the nucleus by rounding alone: if the check of the first ratio ends the run, take DTYPE=float32.

Run (seed 1, 20 steps, 39 s of one core): 20% of sampled answers right before, 93% after. grpo.py, which
samples from the full distribution, has 84% then. Both are evaluated by what they sample from.

    python examples/top_p.py [KEY=VALUE ...]    # a minute of one core; constants of grpo.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo
import torch

TOP_P = 0.95


def sampling_logprobs(logits, temperature):
    """Returns log-probabilities (..., vocabulary) of the fewest tokens that have more than TOP_P together."""
    logprobs = grpo.full_logprobs(logits, temperature)
    ordered, order = logprobs.sort(-1, descending=True)
    cut = ordered.exp().cumsum(-1) - ordered.exp() > TOP_P  # the tokens before it have enough
    return logprobs.masked_fill(cut.gather(-1, order.argsort(-1)), -torch.inf).log_softmax(-1)


grpo.sampling_logprobs = sampling_logprobs
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/top_p"

if __name__ == "__main__":
    grpo.train_main()
