"""PPO without what its critic knows: is the critic worth its time?

    python bench/learning.py ppo/ppo.py bench/critic.py 1 2 3

All values are 0, so a token's advantage is its discounted return, whitened over the step: REINFORCE with the
batch's mean as the baseline, in PPO's clipped loss. All else is ppo.py's default.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ppo"))
import ppo


class WithoutCritic(ppo.PPOTrainer):
    def score(self, batch):
        super().score(batch)
        batch.values.zero_()


ppo.PPOTrainer = WithoutCritic
ppo.LAM = 1.0  # below 1 it would discount: without values nothing makes up for it
ppo.CRITIC_LEARNING_RATE = 0.0
ppo.OUTPUT_DIR = f"{ppo.ROOT}/checkpoints/without_critic"

if __name__ == "__main__":
    ppo.train_main()
