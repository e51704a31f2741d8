"""On-policy distillation: a teacher grades each token that the student samples (GRPO).

Overrides compute_advantages(): with all advantages at 0, only the KL term trains, and the reference is the
teacher. KL_ESTIMATOR = "k2" has the gradient of KL(student || teacher). The rewards are not trained; they are
logged, and best/ follows them.

Change: REFERENCE_MODEL, any model with the student's tokenizer. Keep GROUP_EPOCHS=1 and MINI_BATCHES=1: the
KL term has no ratio, so it is right for samples of the present policy only. Without this override it is GRPO
with a teacher in place of its reference.

    python grpo/grpo.py                                # a minute; its best/policy is the teacher
    python examples/distillation.py [KEY=VALUE ...]    # half a minute of one core; constants of grpo.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo
import torch


class DistillationTrainer(grpo.GRPOTrainer):
    def load_models(self, checkpoint):
        teacher = grpo.REFERENCE_MODEL
        if not teacher:
            raise grpo.UserError("distillation.py needs REFERENCE_MODEL, the teacher")
        super().load_models(checkpoint)
        tokenizer = grpo.transformers.AutoTokenizer.from_pretrained(teacher)
        if tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise grpo.UserError(f"the teacher {teacher} has another tokenizer than ACTOR_MODEL")

    def compute_advantages(self, batch):
        super().compute_advantages(batch)
        batch.advantages = torch.zeros_like(batch.advantages)


grpo.GRPOTrainer = DistillationTrainer
grpo.REFERENCE_MODEL = f"{grpo.ROOT}/checkpoints/grpo/best/policy"
grpo.KL_COEF = 1.0
grpo.KL_ESTIMATOR = "k2"
grpo.GROUP_SIZE = 2
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/distillation"

if __name__ == "__main__":
    grpo.train_main()
