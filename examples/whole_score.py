"""The whole score in your own hands: override compute_rewards().

Shows a score that is no weighted sum of functions: the reward model's score counts only as far as a response
is short and does not repeat itself. compute_rewards() returns one number per response, (rows,). What it puts
into self.reward_parts is logged under these names.

Change: the formula. `columns` holds response_ids, messages and the columns of the data. The weights and
REWARD_FUNCTIONS do nothing here. PPO and GRPO have compute_rewards(); RCE trains on the two parts that
HARD_REWARD and SOFT_REWARD name. A sum of functions needs none of this (own_reward.py).

    python examples/whole_score.py [KEY=VALUE ...]    # two minutes of one core; constants of ppo.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ppo"))
import ppo
import torch


def brevity(responses):
    """Returns 1 for responses of up to 40 characters, less for longer ones, (rows,)."""
    return torch.tensor([min(1.0, 40 / max(1, len(response))) for response in responses])


def variety(responses):
    """Returns the fraction of a response's lines that are different, (rows,)."""
    values = []
    for response in responses:
        lines = response.split("\n")
        values.append(len(set(lines)) / len(lines))
    return torch.tensor(values)


class OwnScoreTrainer(ppo.PPOTrainer):
    def __init__(self, resume_from_checkpoint=None):
        if not ppo.REWARD_MODEL:
            raise ppo.UserError("whole_score.py needs a REWARD_MODEL: name one, or change its formula")
        super().__init__(resume_from_checkpoint)

    def compute_rewards(self, prompts, responses, answers, **columns):
        quality = self.reward_model_score(prompts, responses).sigmoid().cpu()  # (rows,), 0 to 1
        short, varied = brevity(responses), variety(responses)
        self.reward_parts = {"quality": quality, "brevity": short, "variety": varied}
        return quality * short * varied


ppo.OUTPUT_DIR = f"{ppo.ROOT}/checkpoints/whole_score"

if __name__ == "__main__":
    ppo.run_main(OwnScoreTrainer)
