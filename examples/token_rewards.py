"""Rewards inside a response: 0.1 at the token where a right line of the solution ends (PPO).

score() adds a field to the batch; per_token_rewards() adds it to the score, which stands at the last token.
The critic learns which token earned what; GAMMA and LAM say how far back a reward counts. `reward` in logs
is the score alone, without these rewards.

Change: what a line is, and what it is worth. GRPO has no critic: there compute_advantages() may set an
advantage for each token.

    python examples/token_rewards.py [KEY=VALUE ...]    # two minutes of one core; constants of ppo.py
"""

import operator
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ppo"))
import ppo
import torch

LINE_REWARD = 0.1
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def is_right(line):
    """Returns whether a line such as 34-23=11 is true."""
    found = re.fullmatch(r"(\d+)([-+*])(\d+)=(\d+)", line.strip())
    return bool(found) and OPERATORS[found[2]](int(found[1]), int(found[3])) == int(found[4])


class StepTrainer(ppo.PPOTrainer):
    def line_rewards(self, batch):
        """Returns the rewards of tokens, (rows, R): of those that end a line."""
        rewards = torch.zeros_like(batch.mask)
        for row, ids in enumerate(batch.response_ids):
            line = []
            for t, token in enumerate(ids):
                line.append(token)
                if "\n" in self.tokenizer.decode([token]) or t + 1 == len(ids):
                    text = self.tokenizer.decode(line, skip_special_tokens=True)
                    rewards[row, t] = LINE_REWARD * is_right(text)
                    line = []
        return rewards

    def score(self, batch):
        super().score(batch)
        batch.line_rewards = self.line_rewards(batch)


original = ppo.per_token_rewards
ppo.per_token_rewards = lambda batch, kl_coef: original(batch, kl_coef) + batch.line_rewards
ppo.PPOTrainer = StepTrainer
ppo.OUTPUT_DIR = f"{ppo.ROOT}/checkpoints/token_rewards"

if __name__ == "__main__":
    ppo.train_main()
