"""A weighted sum of InfoScore and correctness as the reward of mined lists (choosing demonstrations, RCE).

Shows shaped_rewards(), which turns the marks of one query's lists into rewards. Here

    r = ALPHA * (log gt_prob - its mean over the query's lists) + BETA * (1 if the answer is right, else -1)

clipped to +-CLIP. InfoScore = log gt_prob with the list - log gt_prob without demonstrations. The second term
is one number per query, so the mean over the query's lists serves instead. REWARD_MODE = "hybrid" with
HYBRID_MIX_SCORE = "infoscore" scales it to 0 to 1 within a query; here a list that is far better than the
others weighs more.

REWARD_MODE, HARD_WEIGHT and SOFT_WEIGHT do not count here, though tools/check_up.py judges the lists by them.

Change: the formula. A list has hard, soft, gt_prob, relevance, logprob, and of beams beam_score.

    python examples/icl_legacy_reward.py [KEY=VALUE ...]    # minutes on one core; rce_icl.py's constants
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rce"))
import rce_icl

ALPHA = 0.2
BETA = 1.0
CLIP = 5.0


def shaped_rewards(candidates):
    """Returns the rewards of one query's lists."""
    if any(candidate["gt_prob"] is None for candidate in candidates):
        hint = "set REWARD_MODE = 'hard_plus_gtprob', and mine with it"
        raise rce_icl.UserError(f"icl_legacy_reward.py needs gt_prob, and a list has none: {hint}")
    scores = [math.log(max(candidate["gt_prob"], 1e-6)) for candidate in candidates]
    mean = sum(scores) / len(scores)
    shaped = []
    for candidate, score in zip(candidates, scores):
        reward = ALPHA * (score - mean) + BETA * (2 * candidate["hard"] - 1)
        shaped.append(max(-CLIP, min(CLIP, reward)))
    return shaped


rce_icl.shaped_rewards = shaped_rewards
rce_icl.OUTPUT_DIR = f"{rce_icl.ROOT}/checkpoints/icl_legacy_reward"

if __name__ == "__main__":
    rce_icl.run_main(rce_icl.ICLTrainer)
