"""Less memory on one GPU: AdamW's moments stay on the CPU (GRPO).

Shows a change of make_optimizer(). AdamW keeps 8 bytes per parameter. Here they lie in the CPU's memory and
are copied to the GPU only while their parameter is stepped. The weights are those of plain AdamW to the bit,
and a resumed run equals an unbroken one.

Change: nothing, or take a class of your own in make_optimizer().

Tested on the CPU and on the pretended GPU (docs/lab/gpu.md). What the copies cost on a real GPU, 8 bytes per
parameter and step each way, has not been measured.

    python examples/offloaded_adamw.py [KEY=VALUE ...]    # a minute of one core; constants of grpo.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo
import torch

plain_make_optimizer = grpo.make_optimizer


class OffloadedAdamW(torch.optim.AdamW):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)  # it puts the moments on the parameters' device
        for p, state in self.state.items():
            self.state[p] = {key: x.cpu() for key, x in state.items()}

    def step(self, closure=None):
        all_groups = self.param_groups
        for group in all_groups:
            for p in group["params"]:
                self.param_groups = [{**group, "params": [p]}]
                self.state[p] = {key: x.to(p.device) for key, x in self.state[p].items()}
                super().step()
                self.state[p] = {key: x.cpu() for key, x in self.state[p].items()}
        self.param_groups = all_groups


def make_optimizer(model, learning_rate):
    """Returns grpo.make_optimizer()'s optimizer, its groups and rates, with the moments on the CPU."""
    return OffloadedAdamW(plain_make_optimizer(model, learning_rate).param_groups)


grpo.make_optimizer = make_optimizer
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/offloaded_adamw"

if __name__ == "__main__":
    grpo.train_main()
