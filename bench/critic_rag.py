"""How much of the rewards' variance could the critic of ppo/ppo_rag.py explain, how much does it, and what
does it add?

    python bench/critic_rag.py [seed ...] [KEY=VALUE ...]      # default: 1 2 3

The table of answers holds the reward of every action, so the best baseline is known: E(question), the mean
reward of the policy's actions. With R the reward of the action that was sampled and V the critic's value:

    possible  Var(E) / Var(R)           the most that a critic which sees the question can explain
    ours      1 - Var(R - V) / Var(R)   explained_variance in metrics.jsonl

Both are printed every 25 steps. Then come the rewards of the last evaluation of whole runs, on the validation
questions, by baseline: the critic's value; 0; the mean reward of the step; and E itself, which no run could
know. The advantages are whitened in each.
"""

import importlib.util
import statistics
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
BASELINES = ("critic", "zero", "batch", "best possible")


def load_module(words):
    spec = importlib.util.spec_from_file_location("ppo_rag", ROOT / "ppo/ppo_rag.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.apply_overrides(words)
    return module


def one_run(baseline, seed, words):
    """Returns [(step, possible, ours)] and the metrics of the last evaluation on the validation questions."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        rag = load_module([f"SEED={seed}", f"OUTPUT_DIR={folder}/run", "RESUME=no", *words])

        class Ablation(rag.RAGTrainer):
            @torch.no_grad()
            def expected_rewards(self, batch):
                logprobs, _ = self.policy(batch.observations)
                rewards = self.table.rewards.mean(2)[batch.rows]  # (questions, actions)
                return (logprobs.exp() * rewards.to(logprobs)).sum(1)

            def compute_advantages(self, batch):
                expected = self.expected_rewards(batch)
                variance = batch.rewards.var()
                possible = (expected.var() / variance).item()
                ours = (1 - (batch.rewards - batch.values).var() / variance).item()
                found.append((self.run.step, possible, ours))
                critic_values = batch.values
                if baseline == "zero":
                    batch.values = torch.zeros_like(critic_values)
                if baseline == "batch":
                    batch.values = batch.rewards.mean().expand_as(critic_values)
                if baseline == "best possible":
                    batch.values = expected
                super().compute_advantages(batch)
                batch.values = critic_values

        trainer = Ablation()
        trainer.train()
        metrics = trainer.run.evaluation
    return found, metrics


def main():
    words = [word for word in sys.argv[1:] if "=" in word]
    seeds = [int(word) for word in sys.argv[1:] if word.isdecimal()] or [1, 2, 3]
    for baseline in BASELINES:
        rewards = []
        for seed in seeds:
            found, metrics = one_run(baseline, seed, words)
            rewards.append(metrics)
            if baseline == "critic":
                for step, possible, ours in found:
                    if step == 1 or step % 25 == 0:
                        print(
                            f"seed {seed} step {step:4}  possible {possible:6.3f}  ours {ours:6.3f}",
                            flush=True,
                        )
        for name in ("reward", "sampled_reward"):
            values = [metrics[name] for metrics in rewards]
            each = " ".join(f"{value:.3f}" for value in values)
            print(f"{baseline:14} {name:15} {statistics.mean(values):.3f} ({each})", flush=True)


if __name__ == "__main__":
    main()
