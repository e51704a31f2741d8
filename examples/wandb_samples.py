"""Samples as a table in Weights & Biases (GRPO).

Overrides record(). self.run.wandb is the run of wandb, or None on all processes but the first. Every
EVERY_N_STEPS steps a table of the step's responses is sent beside the metrics.

Without an account it works offline: files are written to OUTPUT_DIR/wandb/, and `wandb sync` sends them
later. With an account start it with WANDB_MODE=online.

Change: what is sent. The same method stands in ppo.py.

    python examples/wandb_samples.py [KEY=VALUE ...]    # a minute of one core; constants of grpo.py
"""

import os
import sys
from pathlib import Path

import wandb

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo

EVERY_N_STEPS = 10
os.environ.setdefault("WANDB_MODE", "offline")


class TableTrainer(grpo.GRPOTrainer):
    def record(self, batch, metrics):
        super().record(batch, metrics)
        if self.run.wandb and self.state.step % EVERY_N_STEPS == 0:
            table = wandb.Table(["prompt", "response", "reward"])
            for row, text, score in zip(batch.rows, batch.texts, batch.scores.tolist()):
                table.add_data(str(row["prompt"]), text, score)
            self.run.wandb.log({"samples": table}, step=self.state.step)


grpo.GRPOTrainer = TableTrainer
grpo.USE_WANDB = True
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/wandb_samples"

if __name__ == "__main__":
    grpo.train_main()
