"""Another optimizer: Muon for the matrices, AdamW for everything else (GRPO).

Replaces make_optimizer(). A trainer wants one optimizer per model: it clips gradients and sets the learning
rate. MuonAndAdamW is such an optimizer, with one group of parameters. It hands these to two of PyTorch, which
keep their state in its own, and so in the checkpoint. Muon moves a matrix by its orthogonalised momentum
(kellerjordan.github.io/posts/muon); embeddings, the head, biases and norms stay with AdamW. "match_rms_adamw"
gives Muon's steps the size of AdamW's (2502.16982).

Change: which parameters go where, and the optimizers.

    python examples/muon.py [KEY=VALUE ...]    # a minute of one core; constants of grpo.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo
import torch


class MuonAndAdamW(torch.optim.Optimizer):
    def __init__(self, matrices, others, **options):
        super().__init__([*matrices, *others], options)
        muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options)
        self.optimizers = [muon, torch.optim.AdamW(others, **options)]

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.state = self.state
            optimizer.param_groups[0]["lr"] = self.param_groups[0]["lr"]
            optimizer.step()


def make_optimizer(model, learning_rate):
    ends = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    matrices, others = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_hidden_matrix = parameter.dim() == 2 and parameter not in ends
            group = matrices if is_hidden_matrix else others
            group.append(parameter)
    return MuonAndAdamW(matrices, others, lr=learning_rate, weight_decay=grpo.WEIGHT_DECAY)


grpo.make_optimizer = make_optimizer
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/muon"

if __name__ == "__main__":
    grpo.train_main()
