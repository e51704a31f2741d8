"""PPO with its critic, and without one: what does the critic add to a run of ppo/ppo.py?

    python bench/critic_ablations.py TASK [seed ...] [baseline ...] [KEY=VALUE ...]

By default seeds 1 2 3 and all baselines. TASK is one of
    default  the default run of ppo/ppo.py
    sums     SmolLM2-135M-Instruct on sums (bench/real.py get)
    early    An early token decides, the later ones are noise. A response has LENGTH tokens of 82; its first
             must be one of the ten digits, which is scored at the end. One response per prompt, so that a
             group has no mean. The policy is a Llama of 2 layers with random weights.
    dense    The same policy and size, and each token that repeats the prompt, a digit, is rewarded at once:
             what comes later is noise to it. Accuracy is the share of right tokens.
    counted  As dense, but the share of right tokens is the score at the end: nothing tells which were right.

The values that compute_advantages() reads are, by baseline:
    critic   the critic's, of its model and its least-squares fit (value_features() in ppo/ppo.py)
    network  those of the critic's model alone
    fit      those of the fit alone
    zero     0
    group    the mean score of the prompt's responses, at each token
    batch    the mean score of the step's responses, at each token
The last four make no passes through a critic's model, and all its weights are frozen but those of its last
layer, `score`. Everything else is equal: responses per step, GAE, whitening, clipping. Printed: sampled
accuracy at each evaluation, and the seconds of processor time per step until then, without evaluations.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from dense_rewards import load_ppo, make_inputs
from real import RUNS

ROOT = Path(__file__).resolve().parents[1]
LENGTH = 60
BASELINES = ("critic", "network", "fit", "zero", "group", "batch")
RANDOM_LLAMA = [
    "REWARD_MODEL=None",
    "KL_COEF=0.0",
    "BATCH_SIZE=80",
    "GRADIENT_ACCUMULATION_STEPS=1",
    "GROUP_SIZE=1",
    f"MAX_NEW_TOKENS={LENGTH}",
    "LEARNING_RATE=1e-3",
    "CRITIC_LEARNING_RATE=3e-3",
    "MINI_BATCHES=4",
    "ENTROPY_COEF=0.01",
    "LAM=1.0",
    "NUM_EPOCHS=1000000",
    "MAX_STEPS=40",
    "EVAL_EVERY_N_STEPS=5",
    "MAX_EVAL_PROMPTS=None",
]
TASKS = {
    "default": [],
    "sums": RUNS["ppo"][1],
    "early": RANDOM_LLAMA,
    "dense": RANDOM_LLAMA,
    "counted": RANDOM_LLAMA,
}


def trainer_class(ppo, task, baseline, seconds):
    class Ablation(ppo.PPOTrainer):
        def score(self, batch):
            super().score(batch)
            if baseline == "group":
                means = batch.scores.view(-1, ppo.GROUP_SIZE).mean(1).repeat_interleave(ppo.GROUP_SIZE)
                batch.values = means[:, None] * batch.response_mask
            if baseline == "batch":
                batch.values = batch.scores.mean() * batch.response_mask

        def evaluate(self, prompts=None, answers=None, rows=None):
            seconds.append(time.process_time())
            metrics = super().evaluate(prompts, answers, rows)
            seconds.append(time.process_time())
            return metrics

    class OfDigits(Ablation):
        def __init__(self):
            super().__init__()
            self.digits = self.tokenizer.convert_tokens_to_ids([str(digit) for digit in range(10)])

        def compute_rewards(self, prompts, responses, answers, response_ids):
            if task == "early":
                return [float(ids[0] in self.digits) for ids in response_ids]
            wanted = self.tokenizer.convert_tokens_to_ids(prompts)  # a digit is one token
            right = [[(i == digit) / LENGTH for i in ids] for ids, digit in zip(response_ids, wanted)]
            return right if task == "dense" else [sum(tokens) for tokens in right]

        def accuracy(self, batch):
            return batch.scores.double()

        def respond_to(self, rows, num_samples):
            found = super().respond_to(rows, num_samples)
            for batch in found:
                batch.scores = self.score_responses(batch)[0].cpu()
            return found

    return OfDigits if TASKS[task] is RANDOM_LLAMA else Ablation


def without_critic(ppo):
    """Takes the critic's passes out of a copy of ppo/ppo.py: its values are zeros."""

    def no_values(model, batch, rows):
        zeros = torch.zeros(len(rows), ppo.max_response_length(batch, rows), device=model.device)
        return zeros + 0 * model.score.weight.sum()

    ppo.response_values = no_values


def run_one(task, baseline, seed, words):
    """One run, in a process of its own; prints a line of JSON at its end."""
    ppo = load_ppo()
    if baseline not in ("critic", "network"):
        without_critic(ppo)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*TASKS[task], f"SEED={seed}", f"OUTPUT_DIR={folder}/run", "RESUME=no"]
        overrides += ["SAVE_EVERY_N_STEPS=0", "LOG_SAMPLES=0"]
        ppo.apply_overrides(overrides)
        if TASKS[task] is RANDOM_LLAMA:
            data = make_inputs(Path(folder), seed)
            ppo.ACTOR_MODEL, ppo.TRAIN_DATASETS, ppo.EVAL_DATASETS = f"{folder}/policy", data, data * 5
        ppo.apply_overrides(words)
        if baseline not in ("critic", "fit"):
            ppo.VALUE_FIT_DECAY = None
        trainer = trainer_class(ppo, task, baseline, seconds)()
        if baseline not in ("critic", "network"):
            for name, parameter in trainer.critic.named_parameters():
                parameter.requires_grad_(name.startswith("score"))
        trainer.train()
        records = [json.loads(line) for line in open(f"{folder}/run/logs/metrics.jsonl")]
    found, spent = [], 0.0
    trained = {r["step"]: r for r in records if r["phase"] == "train"}
    evaluated = [r for r in records if r["phase"] == "eval"]
    for number, record in enumerate(evaluated):
        if number:
            spent += seconds[2 * number] - seconds[2 * number - 1]
        explained = trained.get(record["step"], {}).get("explained_variance")
        found.append((record["step"], record.get("accuracy_sampled", record["reward"]), spent, explained))
    print("FOUND " + json.dumps(found), flush=True)


def main():
    words = sys.argv[1:]
    if words[:1] == ["one"]:
        return run_one(words[1], words[2], int(words[3]), words[4:])
    if not words or words[0] not in TASKS:
        sys.exit(__doc__)
    task = words[0]
    seeds = [int(word) for word in words if word.isdecimal()] or [1, 2, 3]
    chosen = [word for word in words if word in BASELINES] or list(BASELINES)
    if TASKS[task] is RANDOM_LLAMA:
        chosen = [name for name in chosen if name != "group"]  # one response per prompt
    overrides = [word for word in words if "=" in word]
    for baseline in chosen:
        runs = []
        for seed in seeds:
            command = [sys.executable, __file__, "one", task, baseline, str(seed), *overrides]
            done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE)
            line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
            runs.append(json.loads(line.removeprefix("FOUND ")))
        print(f"\n{baseline}")
        print("   step  accuracy: mean (each seed)   seconds per step  explained_variance")
        for evaluations in zip(*runs):
            step = evaluations[0][0]
            values = [evaluation[1] for evaluation in evaluations]
            each = " ".join(f"{value:.3f}" for value in values)
            spent = statistics.mean(evaluation[2] for evaluation in evaluations)
            explained = " ".join(f"{e[3]:.2f}" for e in evaluations if e[3] is not None)
            rate = f"{spent / step:17.2f}" if step else " " * 17
            print(f"{step:7}  {statistics.mean(values):.3f} ({each}) {rate}  {explained}", flush=True)


if __name__ == "__main__":
    main()
