"""Rewards inside a response: 1 at the token that ends a right line of the solution (PPO).

A line is right if it stands in the data's solution. score() adds a field to the batch; per_token_rewards()
adds it to the score, which stands at the last token. The critic learns how many right lines are still to
come: docs/ppo.md shows it. `reward` in logs is the score alone, without these rewards.

Change: what a line is, and what it is worth. GRPO has no critic: there compute_advantages() may set an
advantage for each token.

    python examples/token_rewards.py [KEY=VALUE ...]    # three minutes of one core; constants of ppo.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ppo"))
import ppo
import torch

LINE_REWARD = 1.0


class StepTrainer(ppo.PPOTrainer):
    def line_rewards(self, batch):
        """Returns the rewards of tokens, (rows, R): LINE_REWARD at each that ends a right line."""
        rewards = torch.zeros_like(batch.mask)
        for row, ids in enumerate(batch.response_ids):
            right = batch.rows[row]["answer"].splitlines()
            line = []
            for t, token in enumerate(ids):
                line.append(token)
                if "\n" in self.tokenizer.decode([token]) or t + 1 == len(ids):
                    text = self.tokenizer.decode(line, skip_special_tokens=True).strip()
                    if text in right:
                        right.remove(text)  # once
                        rewards[row, t] = LINE_REWARD
                    line = []
        return rewards

    def score(self, batch):
        super().score(batch)
        batch.line_rewards = self.line_rewards(batch)


original = ppo.per_token_rewards
ppo.per_token_rewards = lambda batch, kl_coef: original(batch, kl_coef) + batch.line_rewards
ppo.PPOTrainer = StepTrainer
ppo.OUTPUT_DIR = f"{ppo.ROOT}/checkpoints/token_rewards"
ppo.REWARD_MODEL = None
ppo.GROUP_SIZE = 1  # classic PPO: the critic is the only baseline of a prompt
ppo.BATCH_SIZE = 64
ppo.MINI_BATCHES = 4
ppo.CRITIC_LEARNING_RATE = 1e-3
ppo.MAX_STEPS = 30

if __name__ == "__main__":
    ppo.train_main()
