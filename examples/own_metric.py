"""Metrics of your own (GRPO).

Shows the three places of a metric. Each is logged, drawn in training_metrics_detailed.png and sent to wandb.
- of each token: grpo_stats(). Its mean over the tokens of the update is logged.
- of the step's responses: record().
- of the evaluation: evaluate().
PANELS names the metrics of grpo_metrics_with_entropy.png.

Change: each by itself. A metric of single responses is a reward function of weight 0 (own_reward.py).

    python examples/own_metric.py [KEY=VALUE ...]    # a minute of one core; constants of grpo.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo

plain_grpo_stats = grpo.grpo_stats


def grpo_stats(logprobs, old_logprobs, ratio, advantages):
    stats = plain_grpo_stats(logprobs, old_logprobs, ratio, advantages)
    return {**stats, "unlikely_tokens": (logprobs < -1).float()}  # of a probability below 37%


class MetricTrainer(grpo.GRPOTrainer):
    def record(self, batch, metrics):
        groups = range(0, len(batch.texts), grpo.GROUP_SIZE)
        distinct = sum(len(set(batch.texts[i : i + grpo.GROUP_SIZE])) for i in groups)
        super().record(batch, {**metrics, "distinct_responses": distinct / len(batch.texts)})

    def evaluate(self, prompts=None, answers=None):
        metrics = super().evaluate(prompts, answers)
        if "accuracy_sampled" in metrics:  # not without rows, or without answers
            best_of_k = metrics[f"pass@{grpo.EVAL_SAMPLES}"]
            metrics["gain_of_more_samples"] = best_of_k - metrics["accuracy_sampled"]
        return metrics


grpo.grpo_stats = grpo_stats
grpo.GRPOTrainer = MetricTrainer
grpo.PANELS += ["unlikely_tokens", "distinct_responses", "gain_of_more_samples"]
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/own_metric"

if __name__ == "__main__":
    grpo.train_main()
