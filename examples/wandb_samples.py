"""Samples as a table in Weights & Biases.

Shows how anything is sent to wandb beside the metrics: self.run.wandb is the run of wandb, or None on all
processes but the first. At each evaluation the newest 100 lines of logs/samples.jsonl become a table.

Without an account it works offline: files are written to OUTPUT_DIR/wandb/, and `wandb sync` sends them
later. With an account start it with WANDB_MODE=online.

Change: what is sent; the class stands over PPOTrainer and RCETrainer just as well.

    python examples/wandb_samples.py [KEY=VALUE ...]    # a minute of one core; constants of grpo.py
"""

import json
import os
import sys
from pathlib import Path

import wandb

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo

os.environ.setdefault("WANDB_MODE", "offline")


class TableTrainer(grpo.GRPOTrainer):
    def evaluate(self, prompts=None, answers=None, rows=None):
        if self.run.wandb and self.run.step and grpo.LOG_SAMPLES:
            lines = (self.run.folder / "logs/samples.jsonl").read_text().splitlines()[-100:]
            samples = [json.loads(line) for line in lines]
            columns = list(samples[-1])
            cells = [[sample.get(column) for column in columns] for sample in samples]
            table = wandb.Table(columns, cells, allow_mixed_types=True)
            self.run.wandb.log({"samples": table}, step=self.run.step)
        return super().evaluate(prompts, answers, rows)


grpo.USE_WANDB = True
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/wandb_samples"

if __name__ == "__main__":
    grpo.run_main(TableTrainer)
