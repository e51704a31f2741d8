"""Less memory on one GPU: AdamW's moments stay on the CPU (GRPO).

Replaces make_optimizer(). AdamW keeps 8 bytes per parameter. Here they lie in the CPU's memory, and are
copied to the GPU only while their parameter is stepped. The weights are those of plain AdamW to the bit.

It was tested on a CPU. What the copies cost on a GPU, 8 bytes per parameter and step each way, has not been
measured.

    python examples/offloaded_adamw.py [KEY=VALUE ...]    # a minute of one core; constants of grpo.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo
import torch


class OffloadedAdamW(torch.optim.AdamW):
    def move_state(self, parameter, device):
        self.state[parameter] = {name: x.to(device) for name, x in self.state[parameter].items()}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)  # it puts the moments on the parameters' device
        for parameter in list(self.state):
            self.move_state(parameter, "cpu")

    def step(self, closure=None):
        (group,) = self.param_groups
        for parameter in group["params"]:
            self.param_groups = [{**group, "params": [parameter]}]
            self.move_state(parameter, parameter.device)
            super().step()
            self.move_state(parameter, "cpu")
        self.param_groups = [group]


def make_optimizer(model, learning_rate):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return OffloadedAdamW(parameters, lr=learning_rate, weight_decay=grpo.WEIGHT_DECAY, fused=True)


grpo.make_optimizer = make_optimizer
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/offloaded_adamw"

if __name__ == "__main__":
    grpo.train_main()
