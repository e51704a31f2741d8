"""GRPO on the rewards of examples/token_rewards.py, summed per response: what the critic is compared with.

    python bench/learning.py 1 2 3 examples/token_rewards.py        # PPO
    python bench/learning.py 1 2 3 examples/token_rewards.py CRITIC_LEARNING_RATE=0.0 LAM=1.0    # values of 0
    python bench/learning.py 1 2 3 bench/critic.py                  # GRPO on as many responses and steps

A critic that does not learn says 0 everywhere: PPO then is a clipped REINFORCE whose baseline is the batch's
mean. The same two constants take the critic from ppo.py's default task.
"""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo


def right_lines(prompts, responses, answers):
    """Returns how many lines of each response stand in the data's solution."""
    counts = []
    for response, answer in zip(responses, answers):
        lines = Counter(line.strip() for line in response.split("\n"))
        counts.append((lines & Counter(answer.splitlines())).total())
    return counts


grpo.REWARD_FUNCTIONS = [("exact_answer", 1.0), (right_lines, 1.0)]
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/token_rewards_grpo"
grpo.BATCH_SIZE = 16  # x GROUP_SIZE = 8: the 128 responses of a step
grpo.GROUP_EPOCHS = 2
grpo.MINI_BATCHES = 4
grpo.MAX_STEPS = 30

if __name__ == "__main__":
    grpo.train_main()
