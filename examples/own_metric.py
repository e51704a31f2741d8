"""A metric, a panel in the plot, a learning rate schedule, and an end of the run by KL (GRPO).

Shows four small changes:
- a metric of the step in record(), of the evaluation in evaluate(). It is logged, plotted in
  training_metrics_detailed.png and sent to wandb by its name. A metric of single responses is a reward
  function of weight 0 (own_reward.py); one of the update goes into what optimizer_step() returns.
- a panel of the algorithm's plot: PLOT_PANELS, a label and the metrics in it.
- a schedule: learning_rate_scale(), the factor of LEARNING_RATE after so many steps. This one is constant and
  falls to 0 over the last COOLDOWN of the run. It replaces LR_SCHEDULER_TYPE, which then does nothing.
- the run ends once the policy is more than MAX_KL nats per token from where it began: that step becomes its
  last, so the policy is evaluated and saved. KL_COEF must be above 0 for the KL to be measured; 1e-6 hardly
  trains.

Change: each by itself. A checkpoint keeps is_stopped: started again, a run that ended by its KL stays ended.

Run (seed 1, 42 s of one core): it ended at step 14 of 40, with 80% of sampled answers right.

    python examples/own_metric.py [KEY=VALUE ...]    # a minute of one core; constants of grpo.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo

COOLDOWN = 0.25
MAX_KL = 0.05


def learning_rate_scale(steps_done, total, warmup, schedule, halvings):
    steps_left = total - steps_done
    return min(1.0, (steps_done + 1) / max(1, warmup), steps_left / max(1.0, COOLDOWN * total))


class MetricTrainer(grpo.GRPOTrainer):
    def evaluate(self, prompts=None, answers=None, rows=None):
        metrics = super().evaluate(prompts, answers, rows)
        if "accuracy_sampled" in metrics:  # not without rows, or without answers
            metrics["headroom"] = 1 - metrics["accuracy_sampled"]
        return metrics

    def record(self, batch, metrics):
        groups = range(0, len(batch.responses), grpo.GROUP_SIZE)
        different = sum(len(set(batch.responses[i : i + grpo.GROUP_SIZE])) for i in groups)
        metrics["distinct_responses"] = different / len(batch.responses)
        super().record(batch, metrics)
        if metrics["kl"] > MAX_KL:
            self.run.log(f"The KL, {metrics['kl']:.4f}, is above MAX_KL = {MAX_KL}: the run ends here")
            self.run.is_stopped = True


grpo.learning_rate_scale = learning_rate_scale
grpo.KL_COEF = 1e-6
grpo.PLOT_PANELS += [("distinct responses", ["distinct_responses"]), ("headroom", ["headroom"])]
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/own_metric"

if __name__ == "__main__":
    grpo.run_main(MetricTrainer)
