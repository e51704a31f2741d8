"""A curriculum: easy problems first (GRPO).

Overrides next_prompts(), which chooses the prompts of a step. Step s of S draws from the easiest s/S of the
data. Random numbers come from self.generator, which the number of the step seeds: a run that is resumed, and
every process of several, draws the same prompts.

Change: difficulty(). A row has prompt, answer and columns, the whole record of the data.

    python examples/curriculum.py [KEY=VALUE ...]    # a minute of one core; constants of grpo.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo
import torch


def difficulty(row):
    """Returns the number of steps of the data's solution."""
    return row["answer"].count("\n")


class CurriculumTrainer(grpo.GRPOTrainer):
    def next_prompts(self):
        rows = sorted(self.train_rows, key=difficulty)
        count = min(len(rows), grpo.BATCH_SIZE * grpo.GRADIENT_ACCUMULATION_STEPS)
        num_easy = max(count, len(rows) * self.state.step // self.total_steps)
        chosen = torch.randperm(num_easy, generator=self.generator)[:count]
        return [rows[i] for i in chosen]


grpo.GRPOTrainer = CurriculumTrainer
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/curriculum"

if __name__ == "__main__":
    grpo.train_main()
