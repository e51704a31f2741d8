"""Two optimizers: Muon for the matrices, AdamW for everything else (GRPO).

Shows a second entry of self.optimizers. Every entry is clipped, stepped and saved in the checkpoint;
update() sets the learning rate of "policy", and this class gives it to Muon, too. Muon moves a matrix by its
orthogonalised momentum (kellerjordan.github.io/posts/muon, torch.optim.Muon). It is meant for the matrices of
hidden layers, so embeddings, the head, biases and norms stay with AdamW. adjust_lr_fn="match_rms_adamw"
gives its steps the size of AdamW's (2502.16982), so that both take the same LEARNING_RATE.

In PPO edit optimizer_step(), too: it names its two optimizers. MAX_GRAD_NORM bounds each optimizer's gradient
by itself, and grad_norm is that of "policy".

Change: which parameters go where, and the optimizers. For one optimizer with several groups of parameters
edit make_optimizer() instead.

Run (seed 1, 20 steps, 40 s of one core): 20% of sampled answers right before, 41% after. AdamW alone has 84%
then: on the shipped model Muon learns more slowly at this rate. No other rate was tried.

    python examples/muon.py [KEY=VALUE ...]    # a minute of one core; constants of grpo.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo
import torch


class MuonTrainer(grpo.GRPOTrainer):
    def load_models(self):
        super().load_models()
        rate = grpo.LEARNING_RATE
        ends = {self.actor.get_input_embeddings().weight, self.actor.get_output_embeddings().weight}
        matrices, others = [], []
        for parameter in self.actor.parameters():
            if parameter.dim() == 2 and parameter not in ends:
                matrices.append(parameter)
            else:
                others.append(parameter)
        options = {"lr": rate, "weight_decay": grpo.WEIGHT_DECAY}
        self.optimizers = {
            "policy": torch.optim.AdamW(others, fused=True, **options),
            "muon": torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options),
        }

    def optimizer_step(self, batch, rows):
        rate = self.optimizers["policy"].param_groups[0]["lr"]  # of this step, by the schedule
        grpo.set_learning_rate(self.optimizers["muon"], rate)
        return super().optimizer_step(batch, rows)


grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/muon"

if __name__ == "__main__":
    grpo.run_main(MuonTrainer)
