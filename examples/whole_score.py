"""The whole score in your own hands: the reward model's score counts as far as a response is short (PPO).

Overrides compute_rewards(), which returns one number per response, (rows,). What it puts into
self.reward_parts is logged under these names.

Change: the formula. `columns` holds response_ids and the columns of the data. REWARD_FUNCTIONS and the
weights do nothing here. A weighted sum of functions needs none of this (own_reward.py).

    python examples/whole_score.py [KEY=VALUE ...]    # two minutes of one core; constants of ppo.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ppo"))
import ppo
import torch

MAX_CHARACTERS = 40  # a longer response gets less


class OwnScoreTrainer(ppo.PPOTrainer):
    def compute_rewards(self, prompts, responses, answers, **columns):
        quality = self.reward_model_score(prompts, responses).sigmoid()  # (rows,), 0 to 1
        lengths = torch.tensor([len(response) for response in responses])
        brevity = MAX_CHARACTERS / lengths.clamp(min=MAX_CHARACTERS)
        self.reward_parts = {"quality": quality, "brevity": brevity}
        return quality * brevity


ppo.PPOTrainer = OwnScoreTrainer
ppo.OUTPUT_DIR = f"{ppo.ROOT}/checkpoints/whole_score"

if __name__ == "__main__":
    ppo.train_main()
