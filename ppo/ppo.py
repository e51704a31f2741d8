"""PPO for language models, in one file: actor, critic, reference and reward model or reward functions.

A response is an episode, a token an action (Ziegler et al. 2019, arXiv 1909.08593; Schulman et al. 2017,
1707.06347):

    r_t   = -KL_COEF (log pi(y_t) - log pi_ref(y_t)) + [t is the last token] score(y)
    A_t   = sum_k (GAMMA LAM)^k (r_{t+k} + GAMMA V_{t+k+1} - V_{t+k}), V after the end is 0; then whitened
    R_t   = V_t + A_t before that, or the same sum with CRITIC_LAM (VC-PPO, 2503.01491)
    rho_t = pi(y_t) / pi_old(y_t)
    L     = -mean_t min(rho_t A_t, clip(rho_t, 1 - CLIP_RANGE, 1 + CLIP_RANGE_HIGH) A_t)
            + VALUE_LOSS_COEF mean_t 1/2 max((V_t - R_t)^2, (clip(V_t, V_old +- VALUE_CLIP_RANGE) - R_t)^2)
            - ENTROPY_COEF mean_t H(pi_t)

Means run over every response token of the optimizer step, whatever the micro-batches. Deliberate deviations:
- actor and critic are two networks, each with its optimizer and gradient clipping;
- sampling inverts the cumulative distribution on uniform numbers drawn ahead for the whole step, so how
  prompts are cut into batches changes neither the samples nor, but for rounding, the update;
- the score is not whitened and the KL coefficient's controller works on nats a token.

    python ppo/ppo.py                                   # edit the constants below, or override: KEY=VALUE
    python ppo/ppo.py ACTOR_MODEL=Qwen/Qwen2.5-0.5B-Instruct LEARNING_RATE=1e-6 CRITIC_LEARNING_RATE=1e-5
    torchrun --nproc_per_node=4 ppo/ppo.py              # the same bytes on any number (docs/processes.md)

Writes into OUTPUT_DIR: training_config.json, logs/ (training_*.log, metrics.jsonl, samples.jsonl), step_N/
checkpoints, best/policy/, two pictures. docs/reference.md defines every file and metric.

To change      see
the loss       policy_loss, value_loss, optimizer_step    the data       TRAIN_DATASETS; load_rows
the advantage  gae, compute_advantages                    a metric       PPOTrainer.record, evaluate
the reward     REWARD_FUNCTIONS; compute_rewards          a plot         self.run.panels; draw_plot
sampling       sampling_logprobs; rollout, generate       the schedule   learning_rate_scale
the optimizer  make_optimizer                             a constant     one more line below; _LIMITS
"""

import ast
import copy
import csv
import difflib
import faulthandler
import hashlib
import inspect
import io
import json
import math
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch loads: faster beside busy programs
if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    print(f"{Path(__file__).name} loads torch, models and data", flush=True)
import filelock
import numpy as np
import pyarrow.parquet
import torch
import torch.distributed as dist
import transformers
from matplotlib.figure import Figure
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from transformers.cache_utils import DynamicLayer, get_layer_types_and_kwargs
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer

ROOT = next((p for p in Path(__file__).resolve().parents if (p / "rewards").is_dir()), None)
if ROOT is None:
    sys.exit("ppo.py needs the folder rewards/ beside it or above it: copy it from the repository")
sys.path.insert(0, str(ROOT))
import rewards

# ================================================================ constants

# Models: a folder or a hub name
ACTOR_MODEL = f"{ROOT}/data/tiny/policy"
CRITIC_MODEL: str | None = None  # None: starts from the actor's weights; its value head starts at zero
REWARD_MODEL: str | None = f"{ROOT}/data/tiny/reward_model"  # one-label classifier; None: functions alone
REFERENCE_MODEL: str | None = None  # None: a frozen copy of the actor; none is held while KL_COEF is 0
LORA_RANK = 0  # 0: whole models are trained; else adapters of this rank (2106.09685), on frozen weights
LORA_ALPHA = 32.0  # an adapter's product counts LORA_ALPHA / LORA_RANK
LORA_TARGETS = "all-linear"  # which layers get one: all-linear (but the heads), or names: q_proj,v_proj
DTYPE = "float32"  # float32 | bfloat16 (autocast; weights and optimizer state stay float32)
DEVICE = "auto"  # auto | cpu | cuda | cuda:1 | mps
GRADIENT_CHECKPOINTING = False  # recompute activations in the update: less memory, a third more time

# Data: rows of {"path", "type": "jsonl" | "csv" | "parquet" | "hub", "input", "output"}; hub takes "name" and
# "split" too. A column may be a path into nested records, such as "answers.text"; input a text or messages
TRAIN_DATASETS = [
    {"path": f"{ROOT}/data/tiny/train.jsonl", "type": "jsonl", "input": "problem", "output": "solution"},
    {"path": f"{ROOT}/data/tiny/train.parquet", "type": "parquet", "input": "problem", "output": "solution"},
]
EVAL_DATASETS = [
    {"path": f"{ROOT}/data/tiny/test.jsonl", "type": "jsonl", "input": "problem", "output": "solution"},
]
PROMPT_TEMPLATE = "{input}"  # what the actor is asked; the tokenizer's chat template, if any, goes around it
SYSTEM_PROMPT: str | None = None  # goes before prompts without a system message; needs a chat template
MAX_TRAIN_PROMPTS: int | None = None  # only the first so many; None: all
MAX_EVAL_PROMPTS: int | None = 200

# Rewards: score = REWARD_MODEL_WEIGHT * reward model + sum of weight * function; a function, or its name in
# rewards/; its parameter named messages, response_ids or like a column of the data gets that
REWARD_FUNCTIONS = [("exact_answer", 1.0)]
REWARD_MODEL_WEIGHT = 0.1
MISSING_EOS_PENALTY = 0.0  # >= 0, taken from the score of a response cut at MAX_NEW_TOKENS
ACCURACY_FUNCTION = "exact_answer"  # what evaluation calls right, in rewards/, where the data has answers
REWARD_TIMEOUT: float | None = 600.0  # seconds that scoring one batch of responses may take; None: any

# Rollout
BATCH_SIZE = 16  # prompts in memory at a time, with GROUP_SIZE responses each
GRADIENT_ACCUMULATION_STEPS = 2  # batches a training step: BATCH_SIZE * this = prompts a step
GROUP_SIZE = 4  # responses a prompt
MAX_PROMPT_TOKENS = 256  # longer prompts are left out, and counted
MAX_NEW_TOKENS = 64
TEMPERATURE = 1.0  # > 0; the distribution sampled is the one scored: top-p goes into sampling_logprobs

# Optimisation
LEARNING_RATE = 1e-4
CRITIC_LEARNING_RATE = 5e-4
MAX_GRAD_NORM = 1.0  # > 0, for actor and critic each
WEIGHT_DECAY = 0.0
USE_LR_SCHEDULER = False
LR_SCHEDULER_TYPE = "linear"  # linear | cosine (to 0 after the last step) | plateau (halves)
PLATEAU_PATIENCE = 2  # evaluations without a better reward before plateau halves
WARMUP_STEPS = 0  # with or without a scheduler

# Algorithm
GROUP_EPOCHS = 2  # passes over each step's responses
MINI_BATCHES = 1  # optimizer steps a pass
CLIP_RANGE = 0.2  # > 0
CLIP_RANGE_HIGH: float | None = None  # > 0; DAPO's clip-higher: 0.28 (2503.14476); None: CLIP_RANGE
DUAL_CLIP: float | None = None  # > 1, such as 3: the greatest ratio where the advantage is negative
VALUE_CLIP_RANGE = 0.2  # > 0; 0 turns value clipping off
VALUE_LOSS_COEF = 0.5
ENTROPY_COEF = 0.0
KL_COEF = 0.01  # price of a nat a token away from the reference; 0 holds no reference
KL_TARGET: float | None = None  # nats a token; turns on the adaptive coefficient (1909.08593, section 2.2)
KL_HORIZON = 10000  # responses over which the adaptive coefficient moves; a step moves it by a fifth at most
GAMMA = 1.0  # 0 to 1
LAM = 0.95  # 0 to 1; 1: Monte-Carlo returns less values
CRITIC_LAM: float | None = None  # of the critic's returns, 0 to 1; None: LAM's
CRITIC_WARMUP_STEPS = 0  # the first so many steps train the critic alone (2503.01491)
WHITEN_ADVANTAGES = True

# Schedule
NUM_EPOCHS = 1  # passes over the prompts
MAX_STEPS: int | None = 50  # None: all of NUM_EPOCHS

# Bookkeeping
SAVE_EVERY_N_STEPS = 25  # 0: only at the end
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 10  # 0: only before and after
EARLY_STOPPING_PATIENCE = 0  # evaluations without a better reward before the run ends; 0: never
EARLY_STOPPING_THRESHOLD = 0.0  # by how much better is better for patience; best/ follows the highest
LOG_SAMPLES = 4  # responses a step written to samples.jsonl
RESUME = "ask"  # ask | yes | no | a checkpoint's path
OUTPUT_DIR = f"{ROOT}/checkpoints/ppo"
SEED = 1
USE_WANDB = False
WANDB_PROJECT = "hackable-rlhf"

# Processes: torchrun --nproc_per_node=2 ppo/ppo.py
EXACT_SUMS = True  # of gradients, in one order: the same bits on any number of processes; False: faster
SHARD = "none"  # none: each process has whole models | fsdp2: its part of them, for models larger than a GPU
PROCESS_TIMEOUT = 1800.0  # seconds that one process waits for another

_LIMITS = {  # least and greatest value, where a wrong one would not show; the words that a constant takes
    "BATCH_SIZE GRADIENT_ACCUMULATION_STEPS GROUP_SIZE MAX_PROMPT_TOKENS MAX_NEW_TOKENS DUAL_CLIP": (1, 1e12),
    "MAX_STEPS NUM_EPOCHS GROUP_EPOCHS MINI_BATCHES PLATEAU_PATIENCE MAX_TRAIN_PROMPTS KL_HORIZON": (1, 1e12),
    "KEEP_LAST_N_CHECKPOINTS": (1, 1e12),
    "MAX_EVAL_PROMPTS WARMUP_STEPS LOG_SAMPLES SAVE_EVERY_N_STEPS EVAL_EVERY_N_STEPS WEIGHT_DECAY": (0, 1e12),
    "TEMPERATURE CLIP_RANGE CLIP_RANGE_HIGH MAX_GRAD_NORM LORA_ALPHA REWARD_TIMEOUT": (1e-6, 1e9),
    "LEARNING_RATE CRITIC_LEARNING_RATE KL_COEF KL_TARGET MISSING_EOS_PENALTY LORA_RANK": (0, 1e6),
    "GAMMA LAM CRITIC_LAM": (0, 1),
    "DTYPE": ["float32", "bfloat16"],
    "SHARD": ["none", "fsdp2"],
    "LR_SCHEDULER_TYPE": ["linear", "cosine", "plateau"],
}

# ================================================================ the maths of PPO


def sampling_logprobs(logits, temperature):
    """Log-probabilities (..., vocabulary) of the distribution that is sampled *and* trained: change it here
    (top-p, say), and the first ratios stay 1. A token that must not come gets -inf."""
    return full_logprobs(logits, temperature)


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum()


def token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef, dense=None):
    """Reward of each token, (rows, R): the KL penalty everywhere, the score (rows,) once, at the last one. Of
    scores that are sums of rewards a token, dense (rows, R), only what is left over is the last one's."""
    rewarded = -kl_coef * (logprobs - ref_logprobs) * mask
    if dense is not None:
        rewarded += dense
        scores = scores - dense.sum(1)
    rewarded[torch.arange(len(scores), device=mask.device), mask.sum(1).long() - 1] += scores
    return rewarded


def gae(rewarded, values, mask, gamma, lam):
    """Generalised advantage estimation (1506.02438) from token rewards, (rows, R); V after the end is 0."""
    values = values * mask
    advantages = torch.zeros_like(values)
    running = next_value = 0.0
    for t in reversed(range(values.shape[1])):
        delta = rewarded[:, t] + gamma * next_value - values[:, t]
        running = (delta + gamma * lam * running) * mask[:, t]
        advantages[:, t] = running
        next_value = values[:, t]
    return advantages


def masked_variance(x, mask):
    return masked_mean((x - masked_mean(x, mask)) ** 2, mask)


def whiten(x, mask):
    """Mean 0 and variance 1 over the mask; 0 outside it."""
    return (x - masked_mean(x, mask)) * torch.rsqrt(masked_variance(x, mask) + 1e-8) * mask


def policy_loss(logprobs, old_logprobs, advantages, clip_range, clip_range_high, dual_clip=None):
    """Clipped surrogate of each token, (rows, R): 1707.06347, equation 7; dual_clip: 1912.09729."""
    ratio = (logprobs - old_logprobs).exp()
    objective = torch.min(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range_high) * advantages)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.max(objective, dual_clip * advantages), objective)
    return -objective


def value_loss(values, old_values, returns, clip_range):
    """Half the squared error of each token, (rows, R), clipped around the rollout's value; 0: not clipped."""
    clipped = values
    if clip_range > 0:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)


def adapt_kl_coef(kl_coef, kl, target, responses, horizon):
    """The KL coefficient after a step, by 1909.08593, section 2.2, whose gain of 0.1 is responses / horizon
    here. The paper's clipped error moves it by a fifth at most; with a gain above 1 the factor itself is
    clipped to that: it could be negative, and the penalty a reward."""
    factor = 1 + max(-0.2, min(0.2, kl / target - 1)) * responses / horizon
    return kl_coef * max(0.8, min(1.2, factor))


# ================================================================ the trainer


class PPOTrainer:
    """Models, data and the algorithm; self.run has the files. resume_from_checkpoint overrides the constant
    RESUME: a path, "ask", "yes" or "no"."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        if KL_TARGET and KL_COEF == 0:
            raise UserError(f"KL_TARGET = {KL_TARGET} needs a KL_COEF to start from, such as 0.01")
        self.device = find_device()
        self.run = Run("ppo", resume_from_checkpoint, self.device)
        self.run.title = f"PPO, {'/'.join(Path(ACTOR_MODEL).parts[-2:])}, seed {SEED}"
        # Drawn in ppo_metrics_with_entropy.png, (label, metrics); training_metrics_detailed.png has them all
        names = "reward entropy policy_loss value_loss kl explained_variance clip_fraction response_length"
        self.run.panels = [("accuracy", ["accuracy_sampled", "accuracy_greedy"])]
        self.run.panels += [(name, [name]) for name in names.split()]
        self.load_models()
        readers = self.tokenizer, self.readers, self.run.say
        self.train_rows = load_prompts(TRAIN_DATASETS, "TRAIN_DATASETS", MAX_TRAIN_PROMPTS, *readers)
        self.eval_rows = load_prompts(EVAL_DATASETS, "EVAL_DATASETS", MAX_EVAL_PROMPTS, *readers)
        check_models(self.readers, self.train_rows, self.pad_id)
        # What a checkpoint keeps beside weights, optimizers and generators; order is this epoch's permutation
        self.state = SimpleNamespace(
            epoch=0, order=None, cursor=0, prompts=len(self.train_rows), kl_coef=KL_COEF
        )
        self.run.register(self.state, self.models, self.optimizers, self.tokenizer)
        steps_an_epoch = math.ceil(len(self.train_rows) / (BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS))
        self.run.total_steps = min(NUM_EPOCHS * steps_an_epoch, MAX_STEPS or math.inf)

    def load_models(self):
        """Actor and critic come from the checkpoint when there is one; the other models never change."""
        at = self.run.checkpoint
        critic = CRITIC_MODEL or ACTOR_MODEL
        self.tokenizer = load_tokenizer(ACTOR_MODEL, "ACTOR_MODEL")
        self.actor = load_trained(
            AutoModelForCausalLM, ACTOR_MODEL, "ACTOR_MODEL", self.device, at and at / "policy"
        )
        self.critic = load_trained(
            AutoModelForTokenClassification,
            critic,
            "CRITIC_MODEL",
            self.device,
            at and at / "critic",
            new_head=True,
        )
        if known_ids(self.critic) < min(len(self.tokenizer), known_ids(self.actor)):
            raise UserError(f"CRITIC_MODEL = {str(critic)!r} must know all tokens of the actor's tokenizer")
        self.pad_id = padding_id(self.actor, self.tokenizer)
        # What is trained and saved, by its folder's name; what reads responses, by its constant
        self.models = {"policy": self.actor, "critic": self.critic}
        self.readers = {"ACTOR_MODEL": self.actor, "CRITIC_MODEL": self.critic}
        self.reference = None
        if KL_COEF > 0 and LORA_RANK and not REFERENCE_MODEL:
            self.reference = self.actor  # its adapter switched off: no second copy
        elif KL_COEF > 0:
            path = REFERENCE_MODEL or ACTOR_MODEL
            self.reference = load_model(AutoModelForCausalLM, path, "REFERENCE_MODEL", self.device)
            self.reference.requires_grad_(False)
            self.readers["REFERENCE_MODEL"] = self.reference
        self.reward_model, self.reward_tokenizer = load_reward_model(REWARD_MODEL, self.device)
        if not REWARD_MODEL and not REWARD_FUNCTIONS:
            raise UserError("REWARD_MODEL is None and REWARD_FUNCTIONS is empty: give at least one of them")
        self.reward_functions = resolve_rewards(REWARD_FUNCTIONS, "REWARD_FUNCTIONS")
        self.accuracy_function = resolve_rewards([(ACCURACY_FUNCTION, 1.0)], "ACCURACY_FUNCTION")[0][1]
        rates = {"policy": LEARNING_RATE, "critic": CRITIC_LEARNING_RATE}
        self.optimizers = {name: make_optimizer(self.models[name], rate) for name, rate in rates.items()}

    def train(self):
        """Roll out, score, estimate advantages, update. Returns the last evaluation."""
        with self.run.session(headline(self.run, self.actor, self.train_rows, self.eval_rows)):
            for _ in self.run.steps(self.evaluate):
                prompts = next_rows(self.train_rows, self.state, BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS)
                batch = self.rollout(prompts)
                self.score(batch)
                self.compute_advantages(batch)
                self.record(batch, self.update(batch))
        return self.run.evaluation

    def rollout(self, prompts):
        """GROUP_SIZE sampled responses to each prompt: a batch, its tensors (prompts * GROUP_SIZE, ...)."""
        with self.run.timed("rollout"):
            # drawn at once: BATCH_SIZE does not matter to it
            uniform = torch.rand(len(prompts) * GROUP_SIZE, MAX_NEW_TOKENS)
            batch = respond(self.actor, self.tokenizer, [row["ids"] for row in prompts], uniform, GROUP_SIZE)
            batch.rows = [row for row in prompts for _ in range(GROUP_SIZE)]
        return batch

    @torch.no_grad()
    def score(self, batch):
        """Scores of the responses; values and reference log-probabilities of their tokens."""
        with self.run.timed("score"):
            scores, batch.parts = self.rewards_of(batch)
            batch.dense = scores[:, : batch.logprobs.shape[1]] if scores.dim() == 2 else None  # (rows, R)
            batch.scores = scores.view(len(scores), -1).sum(1) - MISSING_EOS_PENALTY * batch.truncated
            batch.values = score_batch(partial(response_values, self.critic, batch), self.critic, batch)
            batch.ref_logprobs = batch.logprobs
            if self.reference:
                with without_adapter(self.reference) if LORA_RANK else nullcontext():
                    batch.ref_logprobs = all_logprobs(self.reference, batch, distribution=full_logprobs)

    def rewards_of(self, batch):
        """compute_rewards() of a batch, the responses of BATCH_SIZE prompts at a time: its scores, checked,
        (rows,) or one per token, (rows, MAX_NEW_TOKENS), and the parts it left behind."""
        name = "compute_rewards"
        with unsharded(self.reward_model):
            scores, parts = dealt_rewards(self, name, self.compute_rewards, batch, MAX_NEW_TOKENS)
        return scores.to(self.device), parts

    def compute_rewards(self, prompts, responses, answers, **columns):
        """Score of each response, (rows,), or a list per response of its tokens' rewards; edit or override
        freely. columns: what reward functions take by name; response_ids has EOS. reward_parts is logged."""
        total = torch.zeros(len(responses))
        if self.reward_model:
            self.reward_parts["reward_model"] = self.reward_model_score(prompts, responses).cpu()
            total += REWARD_MODEL_WEIGHT * self.reward_parts["reward_model"]
        for name, function, weight in self.reward_functions:
            self.reward_parts[name] = call_reward(name, function, prompts, responses, answers, columns)
            total += weight * self.reward_parts[name]
        return total

    def reward_model_score(self, prompts, responses):
        """The reward model's score of each response, (rows,); two strings give one number."""
        if isinstance(prompts, str):
            return self.reward_model_score([prompts], [responses])[0]
        return classify(self.reward_model, self.reward_tokenizer, prompts, responses)

    def compute_advantages(self, batch):
        """GAE on the token rewards: returns come from advantages before they are whitened."""
        mask = batch.response_mask
        if not KL_TARGET:
            self.state.kl_coef = KL_COEF  # only the controller's coefficient outlives a changed constant
        rewarded = token_rewards(
            batch.scores, batch.logprobs, batch.ref_logprobs, mask, self.state.kl_coef, batch.dense
        )
        batch.raw_advantages = gae(rewarded, batch.values, mask, GAMMA, LAM)
        batch.returns = batch.raw_advantages + batch.values
        if CRITIC_LAM is not None:
            batch.returns = gae(rewarded, batch.values, mask, GAMMA, CRITIC_LAM) + batch.values
        batch.advantages = whiten(batch.raw_advantages, mask) if WHITEN_ADVANTAGES else batch.raw_advantages

    def update(self, batch):
        """GROUP_EPOCHS passes of MINI_BATCHES optimizer steps over the batch; returns the step's metrics."""
        run = self.run
        kind = LR_SCHEDULER_TYPE if USE_LR_SCHEDULER else None
        scale = learning_rate_scale(run.step, run.total_steps, WARMUP_STEPS, kind, run.halvings)
        rate = LEARNING_RATE * scale * (run.step >= CRITIC_WARMUP_STEPS)
        set_rates(self.optimizers["policy"], rate)
        set_rates(self.optimizers["critic"], CRITIC_LEARNING_RATE * scale)
        steps = []
        with run.timed("update"):
            for _ in range(GROUP_EPOCHS):
                rows = (torch.randperm if MINI_BATCHES > 1 else torch.arange)(len(batch.rows))
                for chunk in rows.chunk(MINI_BATCHES):
                    steps.append(self.optimizer_step(batch, upload(chunk.tolist(), self.device)))
            check_first_ratio(steps, run.step)
        metrics = {key: sum(step[key] for step in steps) / len(steps) for key in steps[0]}
        metrics["ratio_max"] = max(step["ratio_max"] for step in steps)
        first = steps[0]["ratio_max"]
        metrics |= {"ratio_max_first": first, "learning_rate": rate, "kl_coef": self.state.kl_coef}
        metrics["kl"] = masked_mean(batch.logprobs - batch.ref_logprobs, batch.response_mask).item()
        if self.reference and KL_TARGET and math.isfinite(metrics["kl"]):
            self.state.kl_coef = adapt_kl_coef(
                self.state.kl_coef, metrics["kl"], KL_TARGET, len(batch.rows), KL_HORIZON
            )
        return metrics

    def optimizer_step(self, batch, rows):
        """One step of both optimizers on `rows`, in micro-batches whose gradients add up to the whole's."""
        metrics = {}  # of the whole step; share is a micro-batch's
        tokens = batch.response_mask[rows].sum()  # of the whole step, of which a micro-batch is a part
        tensors = (batch.response_mask, batch.logprobs, batch.advantages, batch.values, batch.returns)
        high = CLIP_RANGE_HIGH or CLIP_RANGE
        micros = micro_batches(self.actor, batch, rows)
        for micro, share in summed([self.actor, self.critic], micros, metrics):
            width = longest(batch, micro)  # this micro-batch's alone: no normaliser
            mask, old_logprobs, advantages, old_values, returns = (x[micro, :width] for x in tensors)
            logprobs, entropy = response_logprobs(self.actor, batch, micro, TEMPERATURE)
            policy_losses = policy_loss(logprobs, old_logprobs, advantages, CLIP_RANGE, high, DUAL_CLIP)
            losses = policy_losses - ENTROPY_COEF * entropy if ENTROPY_COEF else policy_losses
            backward(self.actor, (losses * mask).sum() / tokens)

            values = response_values(self.critic, batch, micro)
            value_losses = value_loss(values, old_values, returns, VALUE_CLIP_RANGE)
            backward(self.critic, (VALUE_LOSS_COEF * value_losses * mask).sum() / tokens)

            log_ratio = (logprobs.detach() - old_logprobs).clamp(min=-20) * mask  # -1e30: left the nucleus
            ratio = log_ratio.exp()
            clipped = torch.where(advantages > 0, ratio > 1 + high, ratio < 1 - CLIP_RANGE)  # policy_loss's
            means = {
                "policy_loss": policy_losses,
                "value_loss": value_losses,
                "entropy": entropy,
                "approx_kl": ratio - 1 - log_ratio,
                "clip_fraction": clipped.float(),
                "log_ratio": log_ratio.abs(),
            }
            for key, x in means.items():
                share[key] = (x.detach() * mask).sum() / tokens
            share["ratio_max"] = (ratio - 1).abs().max()  # of names in _max the step has the greatest
        ids = [batch.rows[i]["id"] for i in listed(rows)]
        must_be_finite = metrics["policy_loss"] + metrics["value_loss"]
        norms = clip_and_step(self.optimizers.values(), must_be_finite, self.run, ids)
        metrics["grad_norm"], metrics["critic_grad_norm"] = norms
        return metrics

    # ------------------------------------------------------------ evaluation and what is logged

    def evaluate(self, prompts=None, answers=None):
        """Metrics of greedy and sampled responses to prompts (texts or chats; default: held-out). Override to
        add yours. The samples have their own random stream, so evaluating never changes training."""
        rows = self.eval_rows
        if prompts is not None:
            rows = encode_texts(prompts, answers, "evaluate", self.tokenizer, self.readers, self.run.say)
        if not rows:
            return {}
        ids = [row["ids"] for row in rows]
        generator = torch.Generator().manual_seed(SEED + 1)
        uniform = torch.rand(len(rows), MAX_NEW_TOKENS, generator=generator)
        greedy = respond(self.actor, self.tokenizer, ids, None)
        sampled = respond(self.actor, self.tokenizer, ids, uniform)
        greedy.rows = sampled.rows = rows
        metrics = {}
        if all(row["answer"] is not None for row in rows):
            metrics["accuracy_greedy"] = self.accuracy(greedy).mean().item()
            metrics["accuracy_sampled"] = self.accuracy(sampled).mean().item()
        scores, parts = self.rewards_of(sampled)
        scores = scores.view(len(scores), -1).sum(1) - MISSING_EOS_PENALTY * sampled.truncated
        return {**metrics, **response_metrics(sampled, scores, parts)}

    def accuracy(self, batch):
        """Whether each of a batch's responses is right, (rows,), in float64."""
        return dealt_rewards(self, "ACCURACY_FUNCTION", self.accuracy_function, batch)[0].double()

    def generate_response(self, prompt, greedy=True):
        """One response to a prompt, a text or a chat; greedy=False samples from the global random stream."""
        rows = encode_texts([prompt], None, "generate_response", self.tokenizer, self.readers, self.run.say)
        if not rows:
            raise UserError(f"the prompt is longer than MAX_PROMPT_TOKENS = {MAX_PROMPT_TOKENS}")
        uniform = None if greedy else torch.rand(1, MAX_NEW_TOKENS)
        return respond(self.actor, self.tokenizer, [rows[0]["ids"]], uniform).responses[0]

    def record(self, batch, metrics):
        """The step's metrics, a few of its responses and its line on the terminal, for the run to write."""
        mask = batch.response_mask
        groups = batch.scores.view(-1, GROUP_SIZE)
        flat = (groups == groups[:, :1]).all(1).float().mean().item() if GROUP_SIZE > 1 else 0.0
        variance = masked_variance(batch.returns, mask)
        unexplained = masked_variance(batch.returns - batch.values, mask) / (variance + 1e-8)
        metrics = {
            "epoch": self.state.epoch,
            **metrics,
            **response_metrics(batch, batch.scores, batch.parts),
            "advantage": masked_mean(batch.raw_advantages, mask).item(),
            "explained_variance": (1 - unexplained).item(),
            "zero_variance_groups": flat,
        }
        line = (
            "Epoch {epoch}/{epochs}: PL:{policy_loss:.4f} VL:{value_loss:.4f} R:{reward:.2f} "
            "A:{advantage:.2f} E:{entropy:.3f} LR:{learning_rate:.2e}"
        )
        line = line.format(epochs=NUM_EPOCHS, **metrics)
        samples = sample_records(batch, (batch.advantages * mask).sum(1) / mask.sum(1))
        self.run.record(metrics, batch.response_lengths.sum().item(), samples, line)


# ================ machinery: the same in all trainers that have it

# ---------------------------------------------------------------- language models
# Loading, sampling, scoring, and the one optimizer step they all share; what a copy may delete stands in the
# blocks after it. Edit it freely in a copy of your own; the repository keeps blocks byte-identical in all
# trainers that have them (tests/blocks.py).


# ---------------------------------------------------------------- loading


def load_model(auto_class, path, constant, device, new_head=False, dtype=torch.float32):
    """The model in evaluation mode, every weight accounted for. With new_head, weights outside the base model
    may be left over or absent; the absent ones start at zero."""
    if (Path(path) / "adapter_config.json").exists():
        raise UserError(f"{constant} = {str(path)!r} is an adapter: set its LORA_RANK, or take best/policy")
    config = load_pretrained(AutoConfig, path, constant)
    for part in (config, config.get_text_config()):
        for name, value in list(vars(part).items()):
            if "drop" in name and type(value) is float:  # layers that recompute are in training mode
                setattr(part, name, 0.0)
    if new_head:
        config.num_labels = 1
    options = {"config": config, "dtype": dtype, "output_loading_info": True}
    model, info = load_pretrained(auto_class, path, constant, **options)
    missing = set(info["missing_keys"]) | {key[0] for key in info["mismatched_keys"]}
    wrong = missing | set(info["unexpected_keys"])
    if new_head:
        wrong = {key for key in missing if key.startswith(model.base_model_prefix + ".")}
    if wrong:
        names = ", ".join(sorted(wrong))
        raise UserError(f"{constant} = {str(path)!r}: missing or unexpected weights {names}")
    for name, parameter in model.named_parameters():
        # A file's memory map begins at any byte, and the last bit of a product depends on it
        parameter.data = torch.zeros_like(parameter) if name in missing else parameter.data.clone()
    if "attend" in globals() and model.config._attn_implementation == "sdpa" and attention_windows(model):
        model.set_attn_implementation("shared_prompts")
    model.eval()  # and it stays so: dropout is off in rollout and update alike
    return shard(model, device) if is_sharded() else model.to(device)


def load_trained(auto_class, path, constant, device, saved=None, new_head=False):
    """The model that is trained: that of a checkpoint's folder `saved`, or of path; with LORA_RANK an
    adapter on it, and a new head."""
    if LORA_RANK:
        return load_adapted(auto_class, path, constant, device, saved, new_head)
    return load_model(auto_class, saved or path, constant, device, new_head and not saved)


def is_sharded():
    """Whether each process has its part of every model; not every trainer can."""
    return globals().get("SHARD") == "fsdp2"


def unsharded(*models):
    """A block in which each process has the whole of these models, and may sample as often as it likes."""
    return gathered(*models) if is_sharded() else nullcontext()


def load_tokenizer(path, constant):
    tokenizer = load_pretrained(AutoTokenizer, path, constant)
    if tokenizer.eos_token_id is None:
        raise UserError(f"{constant} = {str(path)!r}: its tokenizer has no EOS token; set eos_token in it")
    return tokenizer


def known_ids(model):
    """How many token ids model has an embedding for."""
    return len(model.get_input_embeddings().weight)


def padding_id(model, tokenizer):
    """An id to pad with: no model looks at it, but all look it up."""
    pad = tokenizer.pad_token_id
    return tokenizer.eos_token_id if pad is None or pad >= known_ids(model) else pad


def positions_of(model):
    """How many tokens model reads, inf without a bound in its config; where its rotary positions depend on
    the length (longrope, dynamic), how many before that: what is sampled and trained would differ."""
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
        if rope.get("rope_type") in ("longrope", "dynamic"):
            first = rope.get("original_max_position_embeddings")
            return first or getattr(config, "original_max_position_embeddings", None) or longest
    return longest if isinstance(longest, int) and longest > 0 else math.inf


# ---------------------------------------------------------------- tensors


def pad_left(rows, value):
    """Lists of ids as one tensor, (rows, longest)."""
    width = max(map(len, rows))
    return torch.tensor([[value] * (width - len(row)) + list(row) for row in rows])


def pad_right(rows, value, multiple=1):
    width = math.ceil(max(map(len, rows)) / multiple) * multiple
    return torch.tensor([list(row) + [value] * (width - len(row)) for row in rows])


def upload(values, device):
    """A list of numbers, or a CPU tensor, on a device; a list stays at hand as its attribute `listed`. The
    host of a GPU does not wait: a copy from pageable memory is staged."""
    tensor = torch.as_tensor(values).to(device, non_blocking=torch.device(device).type == "cuda")
    if isinstance(values, list):
        tensor.listed = values
    return tensor


def listed(rows):
    return getattr(rows, "listed", None) or rows.tolist()


def pack(prompts, responses, device):
    """A batch of prompts and responses, lists of ids: on the host token_lists, of each row its prompt, its
    response and which of the response's tokens the policy sampled; on the device tensors (rows, R)."""
    lengths = upload([len(response) for response in responses], device)
    ids = upload(pad_right(responses, 0), device)
    return SimpleNamespace(
        token_lists=[(prompt, said, range(len(said))) for prompt, said in zip(prompts, responses)],
        response_ids=ids,
        response_lengths=lengths,
        response_mask=(torch.arange(ids.shape[1], device=device) < lengths[:, None]).float(),
    )


def longest(batch, rows):
    """R of rows: the length of the longest response."""
    return max(len(batch.token_lists[i][1]) for i in listed(rows))


def rows_at_once(model, batch):
    """Rows of a micro-batch: those of BATCH_SIZE prompts, but at most 64, and fewer where their logits would
    pass 64 MiB, on a GPU the power of two below 1/16 of its memory: all processes must cut alike."""
    on_gpu = model.device.type == "cuda"
    room = 1 << (torch.cuda.mem_get_info(model.device)[1].bit_length() - 5) if on_gpu else 2**26
    row_bytes = 4 * model.config.get_text_config().vocab_size * batch.response_mask.shape[1]
    return max(1, min(64, BATCH_SIZE * GROUP_SIZE, room // row_bytes))


def micro_batches(model, batch, rows=None):
    """Rows, or all, cut into micro-batches: rows of one prompt together, prompts by their tokens."""
    rows = range(len(batch.token_lists)) if rows is None else listed(rows)
    size = rows_at_once(model, batch)
    size = size // GROUP_SIZE * GROUP_SIZE or size  # a group that is cut is read twice
    prompts = {i: tuple(batch.token_lists[i][0]) for i in rows}
    tokens = Counter()  # of a prompt with its responses
    for i in rows:
        tokens[prompts[i]] += len(prompts[i]) + len(batch.token_lists[i][1])
    order = sorted(rows, key=lambda i: (tokens[prompts[i]], len(prompts[i]), prompts[i]), reverse=True)
    return [upload(order[i : i + size], model.device) for i in range(0, len(order), size)]


def autocast(model):
    return torch.autocast(model.device.type, torch.bfloat16) if DTYPE == "bfloat16" else nullcontext()


# ---------------------------------------------------------------- sampling


def find_in_cdf(weights, at):
    """Where the fraction at (rows, 1) of the sum of weights (rows, n) is reached, and by how much passed."""
    cumulative = weights.double().cumsum(-1)
    target = at * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, target, right=True).clamp(max=weights.shape[1] - 1)
    return found, cumulative.gather(-1, found) - target


def full_logprobs(logits, temperature):
    """Log-probabilities (..., vocabulary) of all tokens, in float32; a reference is scored by these."""
    logits = logits.float()
    return (logits / temperature if temperature != 1 else logits).log_softmax(-1)


def entropy_of(logprobs):
    """Entropy (...) of a distribution's log-probabilities (..., vocabulary), in nats."""
    return -(logprobs.exp() * logprobs.clamp(min=-1e30)).sum(-1)  # 0 times -inf is no number


def sample_tokens(probabilities, uniform):
    """One id a row by inverting the CDF of probabilities (rows, vocabulary) at uniform (rows,) in [0, 1).
    First among blocks of 128 ids, then within: four times as fast as over a whole large vocabulary."""
    if probabilities.device.type == "mps":  # has no float64
        return sample_tokens(probabilities.cpu(), uniform.cpu()).to(probabilities.device)
    missing = -probabilities.shape[1] % 128
    blocks = torch.nn.functional.pad(probabilities, (0, missing)).unflatten(1, (-1, 128))
    sums = blocks.sum(-1)
    block, passed = find_in_cdf(sums, uniform.double().unsqueeze(-1))
    at = (1 - passed / sums.gather(-1, block)).clamp(0, 1 - 2**-40)
    inside, _ = find_in_cdf(blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, 128)).squeeze(1), at)
    return (block * 128 + inside).squeeze(-1).clamp(max=probabilities.shape[1] - 1)


def call_model(model, ids, **options):
    """The model's output for ids (rows, T), with those of the options that its forward() takes."""
    names = inspect.signature(model.forward).parameters
    return model(input_ids=ids, **{key: value for key, value in options.items() if key in names})


class GrowingLayer(DynamicLayer):
    """A layer of a cache with room for further keys, a half more each time: transformers' own copies all keys
    at every token, which took 39% of a rollout's time."""

    def __init__(self, layer):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values = self.room = (layer.keys, layer.values)

    def update(self, keys, values, *args, **kwargs):
        before = self.keys.shape[2]
        after = before + keys.shape[2]
        if after > self.room[0].shape[2]:
            more = (0, 0, 0, 16 + after // 2)
            self.room = [torch.nn.functional.pad(x, more) for x in (self.keys, self.values)]
        for x, new in zip(self.room, (keys, values)):
            x[:, :, before:after] = new
        self.keys, self.values = (x[:, :, :after] for x in self.room)
        return self.keys, self.values

    def reorder_cache(self, rows):
        length = self.keys.shape[2]
        self.room = [x.index_select(0, rows) for x in self.room]
        self.keys, self.values = (x[:, :, :length] for x in self.room)


class Decoder:
    """Decoding with the model's own cache: each prompt (a list of ids) is read once, and goes on as
    group_size rows. logits (rows, vocabulary) are those of each row's next token."""

    def __init__(self, model, prompts, group_size, pad_id):
        ids = upload(pad_left(prompts, pad_id), model.device)  # (prompts, P)
        width = ids.shape[1]
        self.model = model
        self.positions = upload([len(p) for p in prompts], model.device)  # of the next token
        self.mask = (torch.arange(width, device=model.device) >= width - self.positions[:, None]).long()
        self.cache = None
        self.read(ids, (self.mask.cumsum(1) - 1).clamp(min=0), self.mask)
        layers = getattr(self.cache, "layers", [])
        for i, layer in enumerate(layers):
            if type(layer) is DynamicLayer and layer.is_initialized:
                shared = getattr(model, "decodes_shared", False)
                layers[i] = SharedLayer(layer, self.mask) if shared else GrowingLayer(layer)
        self.needs_mask = not layers or not all(hasattr(layer, "prompt") for layer in layers)
        self.select_rows(upload([i // group_size for i in range(len(prompts) * group_size)], ids.device))

    def read(self, ids, positions, mask):
        cache = {"past_key_values": self.cache, "cache_params": self.cache}
        options = {"attention_mask": mask, "position_ids": positions, "logits_to_keep": 1}
        out = call_model(self.model, ids, **options, **cache, use_cache=True)
        self.cache = getattr(out, "past_key_values", None) or out.cache_params
        self.logits = out.logits[:, -1]

    def next(self, tokens):
        """Logits (rows, vocabulary) after one more token (rows,) a row."""
        if self.needs_mask:
            self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        self.read(tokens[:, None], self.positions[:, None], self.mask if self.needs_mask else None)
        self.positions = self.positions + 1
        return self.logits

    def select_rows(self, rows):
        """Go on with these rows (n,), of which one may stand several times."""
        self.cache.reorder_cache(rows)
        self.mask = self.mask[rows]
        self.positions = self.positions[rows]
        self.logits = self.logits[rows]


_LOOK_EVERY = {"cpu": 1}  # tokens from one look at who has finished to the next; a GPU stops for each answer


@torch.no_grad()
def generate(model, prompts, uniform, group_size, max_new_tokens, temperature, eos_ids, pad_id):
    """Respond to each prompt (a list of ids) group_size times; rows of one prompt are neighbours.

    uniform (rows, max_new_tokens) decides every token; None takes the likeliest one. Returns ids (rows,
    max_new_tokens), lengths (rows,), and of the sampling distribution each id's log-probability and the
    entropy, as the ids. A row holds its first EOS and pad after it; a row that was cut holds no EOS."""
    device = model.device
    decoder = Decoder(model, prompts, group_size, pad_id)
    rows = torch.arange(len(prompts) * group_size, device=device)  # of the result, for each of the decoder's
    ids = torch.full((len(rows), max_new_tokens), pad_id, device=device)
    logprobs, entropies = torch.zeros(2, len(rows), max_new_tokens, device=device)
    ended = torch.zeros_like(rows, dtype=torch.bool)
    columns = []  # of the tokens since the last look: ids, log-probabilities, -entropies; each (rows left,)
    for t in tracked(range(max_new_tokens), "tokens"):
        scaled = sampling_logprobs(decoder.logits, temperature).clamp_(min=-1e30)  # (rows left, vocabulary)
        probabilities = scaled.exp()
        tokens = scaled.argmax(-1) if uniform is None else sample_tokens(probabilities, uniform[rows, t])
        logprob = scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        columns.append((tokens, logprob, (probabilities * scaled).sum(-1)))
        if (t + 1) % _LOOK_EVERY.get(device.type, 16) == 0 or t + 1 == max_new_tokens:
            since = slice(t + 1 - len(columns), t + 1)
            for result, column in zip((ids, logprobs, entropies), zip(*columns)):
                result[rows, since] = torch.stack(column, 1)
            columns = []
            ended |= torch.isin(ids[rows, since], eos_ids).any(1)
            left = [i for i, over in enumerate(ended.tolist()) if not over] if t + 1 < max_new_tokens else []
            if not left:
                break
            if len(left) <= 0.75 * len(rows):  # drop the finished rows, but not for every single one
                keep = upload(left, device)
                decoder.select_rows(keep)
                rows = rows[keep]
                tokens = tokens[keep]
                ended = ended[keep]
        decoder.next(tokens)
    ended = torch.isin(ids, eos_ids).long()
    over = ended.cumsum(1) > ended  # what came after the end
    logprobs, entropies = logprobs.masked_fill(over, 0), (-entropies).masked_fill(over, 0)
    return ids.masked_fill(over, pad_id), (~over).sum(1), logprobs, entropies


# ---------------------------------------------------------------- scoring


def logits_at(model, ids, at, **options):
    """Logits (tokens, labels) of ids (rows, T) at the places `at`, a pair of (tokens,): rows and columns. A
    large output layer reads these alone."""
    head = model.get_output_embeddings()
    if head is None:
        return call_model(model, ids, use_cache=False, **options).logits[at]
    hook = head.register_forward_pre_hook(lambda module, inputs: inputs[0][at][None])
    try:
        return call_model(model, ids, use_cache=False, **options).logits[0]
    finally:
        hook.remove()


def logits_of_rows(model, batch, rows):
    """Logits where the model predicts the response tokens that the policy sampled, (tokens, labels), row
    after row, and which those tokens are: two (tokens,), of `rows` and of the response. Each row is read with
    its prompt, padded on the right, where a causal model cannot see it: no mask, no positions."""
    lists = [batch.token_lists[i] for i in listed(rows)]
    ids = upload(pad_right([prompt + response for prompt, response, _ in lists], 0), model.device)
    places = [(i, len(prompt) - 1 + t, t) for i, (prompt, _, sampled) in enumerate(lists) for t in sampled]
    row, predicted_at, token = upload(places, model.device).T
    return logits_at(model, ids, (row, predicted_at)), (row, token)


def attention_windows(model):
    """{kind of layer: how many of the keys before it a query sees, None: all}, by the config; {} where it has
    other kinds, or a window that no layer is said to have."""
    try:
        config = model.config.get_text_config(decoder=True)
        kinds, options = get_layer_types_and_kwargs(config)
    except AttributeError:  # such as Mamba's
        return {}
    windows = {kind: option.get("sliding_window") for kind, option in zip(kinds, options)}
    named = [value for key, value in vars(config).items() if key.endswith(("window", "window_size"))]
    hidden = any(type(value) is int and value > 0 for value in named) and not any(windows.values())
    return {} if hidden or not windows.keys() <= {"full_attention", "sliding_attention"} else windows


def response_logits(model, batch, rows):
    """logits_of_groups() where check_models() found that they are right, or else logits_of_rows()."""
    shared = getattr(model, "shares_prompts", False)
    return (logits_of_groups if shared else logits_of_rows)(model, batch, rows)


def response_logprobs(model, batch, rows, temperature, distribution=None):
    """Log-probabilities of the responses' ids in a distribution (None: sampling_logprobs) and its entropy at
    each: two (rows, R), float32, 0 where response_mask is. One tensor of the logits' size waits for the
    backward pass, which computes the entropy's anew."""
    with autocast(model):
        logits, at = response_logits(model, batch, rows)
    ids = batch.response_ids[rows][at]
    every = (distribution or sampling_logprobs)(logits, temperature)  # (tokens, vocabulary)
    logprobs = every.gather(-1, ids.unsqueeze(-1)).squeeze(-1).clamp(min=-1e30)
    entropy = checkpoint(entropy_of, every, use_reentrant=False, preserve_rng_state=False)
    zeros = torch.zeros(len(rows), longest(batch, rows), device=logits.device)
    return zeros.index_put(at, logprobs), zeros.index_put(at, entropy)


def response_values(model, batch, rows):
    """A one-label model's value before each response token, (rows, R), float32, 0 where response_mask is."""
    with autocast(model):
        values, at = response_logits(model, batch, rows)
    zeros = torch.zeros(len(rows), longest(batch, rows), device=values.device)
    return zeros.index_put(at, values[:, 0].float())


@torch.no_grad()
def score_batch(score, model, batch, micros=None):
    """score(rows) (micro-batch, R) of all rows of a batch, as one tensor (rows, R); each micro-batch is read
    by one process."""
    micros = micros or micro_batches(model, batch)
    scores = torch.zeros_like(batch.response_mask)
    with unsharded(model):
        for rows, values in zip(micros, map_over_ranks(micros, score)):
            scores[rows, : values.shape[1]] = values.to(model.device)
    return scores


def all_logprobs(model, batch, micros=None, distribution=None):
    """Log-probabilities of a batch's responses under model, (rows, R), without a gradient."""

    def score(rows):
        return response_logprobs(model, batch, rows, TEMPERATURE, distribution)[0]

    return score_batch(score, model, batch, micros)


# ---------------------------------------------------------------- the optimizer step


def make_optimizer(model, learning_rate):
    """AdamW over a model, whose activations are recomputed with GRADIENT_CHECKPOINTING. All its groups are
    scheduled (see set_rates), clipped and stepped."""
    if GRADIENT_CHECKPOINTING:
        model.activation_checkpointing_enable({"use_reentrant": False})
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=WEIGHT_DECAY, fused=True)
    if is_sharded():
        shard_state(optimizer)
    return optimizer


def set_rates(optimizer, rate):
    """Give each group the learning rate, or the multiple of it that make_optimizer() gave it."""
    made = optimizer.defaults["lr"]
    for group in optimizer.param_groups:
        group["lr"] = rate * group.setdefault("multiple", group["lr"] / made if made else 1.0)


def backward(model, loss):
    """loss.backward(), on a GPU by kernels whose sums always come in one order, unless EXACT_SUMS = False;
    the gradient becomes a part of the step's sum (see summed)."""
    strict = EXACT_SUMS and model.device.type == "cuda"
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    try:
        (0 * loss if getattr(model, "idle", False) else loss).backward()
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise UserError(f"EXACT_SUMS = True: {first_line(error)}: set it to False") from None
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def summed(models, parts, metrics):
    """Go through the parts of one optimizer step in rounds, a part a process: yields this process's with a
    dict for what it measures, to a body that calls backward(). After a round all processes add its gradients
    in the order of the parts, so that their sum has the same bits on any number of processes; with EXACT_SUMS
    = False they add up once, at the end. metrics gets the sums of what was measured; of names that end in
    _max the greatest. Meanwhile layers recompute their activations with GRADIENT_CHECKPOINTING."""
    parameters = [p for model in models for p in model.parameters() if p.requires_grad]
    layers = [m for model in models for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    sharded = is_sharded()  # FSDP2 adds up in each backward pass
    for parameter in parameters:  # even where nothing comes: momentum moves the weights
        parameter.grad = None if sharded else torch.zeros_like(parameter)
    for layer in layers:
        layer.training = GRADIENT_CHECKPOINTING  # they do it in training mode alone, which hides a cache
    added_here = world_size() > 1 and not sharded
    totals = [torch.zeros_like(p) for p in parameters if added_here and EXACT_SUMS]
    measured = []
    for first in tracked(range(0, len(parts), world_size()), "micro-batches"):
        number = first + rank()
        share = {}
        for model in models:
            model.idle = number >= len(parts)  # FSDP2 waits for all processes in each part
        if number < len(parts) or sharded:
            yield parts[min(number, len(parts) - 1)], share
        measured.append({k: torch.as_tensor(x, device=models[0].device).detach() for k, x in share.items()})
        for parameter, total in zip(parameters, totals):
            gradients = [torch.empty_like(total) for _ in range(world_size())]
            dist.all_gather(gradients, parameter.grad)
            for gradient in gradients:
                total += gradient
            parameter.grad.zero_()
    for layer in layers:
        layer.training = False
    for parameter, total in zip(parameters, totals):
        parameter.grad = total
    for parameter in parameters if added_here and not EXACT_SUMS else ():
        dist.all_reduce(parameter.grad)
    values = [x for share in measured for x in share.values()]
    numbers = iter(torch.stack(values).tolist() if values else ())  # a GPU is asked once
    everyone = all_gather([{key: next(numbers) for key in share} for share in measured])
    for number in range(len(parts)):
        for key, value in everyone[number % world_size()][number // world_size()].items():
            both = (metrics[key], value) if key in metrics else (value,)
            metrics[key] = max(both) if key.endswith("_max") else sum(both)


def check_first_ratio(steps, step):
    """The run's first optimizer step sees the policy that sampled: its ratios are 1, but for rounding."""
    apart = [metrics.pop("log_ratio") for metrics in steps][0]  # mean |log ratio|, nats a token
    if DTYPE == "float32":
        apart = steps[0]["ratio_max"]  # no rounding hides a single token
    if step == 0 and apart > (1e-3 if DTYPE == "float32" else 0.05):
        why = f"ACTOR_MODEL scores otherwise than it sampled, or DTYPE = {DTYPE!r} does not suit it"
        raise UserError(f"the first update sees a ratio {apart:.2g} away from 1: {why}")


def clip_and_step(optimizers, loss, run, ids):
    """Clip and step each optimizer; returns the gradient norms. Where loss or a norm is not finite the
    weights stay as they are, and run.count_skipped() names the prompts' ids."""
    norms = []
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
    finite = all(map(math.isfinite, (loss, *norms)))
    for optimizer in optimizers:
        if finite:
            optimizer.step()
        optimizer.zero_grad()
    run.count_skipped(finite, ids)
    return norms


# ---------------------------------------------------------------- what is logged


def size_of(model):
    """How many parameters a model has and, with an adapter, how many of them are trained."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{model.num_parameters():,} parameters" + f", {trained:,} of them trained," * (LORA_RANK > 0)


def headline(run, actor, train_rows, eval_rows):
    """What a run begins with, on the terminal."""
    suits = any(has for name, has in torch.cpu.get_capabilities().items() if "bf16" in name)
    slower = DTYPE == "bfloat16" and actor.device.type == "cpu" and not suits
    dtype = DTYPE + " (slower than float32 on this processor)" * slower
    model = f"{'/'.join(Path(ACTOR_MODEL).parts[-2:])}: {size_of(actor)} on {actor.device}, {dtype}"
    prompts = f"{len(train_rows)} prompts to train on, {len(eval_rows)} held out"
    each = f"{BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS} x {GROUP_SIZE} responses each"
    return f"{model}; {prompts}; steps {run.step} to {run.total_steps}, {each}; writing to {OUTPUT_DIR}"


# ---------------------------------------------------------------- models are tried before they are used


def plain_logits(model, batch):
    """logits_of_rows() of a model that reads each row alone: no padding, mask, cache or other row."""
    found = []
    for prompt, response, _ in batch.token_lists:
        ids = torch.tensor([prompt + response], device=model.device)
        found.append(call_model(model, ids, use_cache=False).logits[0, len(prompt) - 1 : -1])
    return torch.cat(found)


def disagreement(model, compute):
    """How the two tensors that compute() gives differ, or what it raises, in words; empty where that is
    rounding: mistakes are as large as logits are."""
    try:
        found, wanted = compute()
    except Exception as error:  # whatever a model raises that is not made for it
        return f"it raises {type(error).__name__}: {first_line(error)}"
    apart = (found - wanted).float().reshape(len(found), -1)
    exact = model.dtype == torch.float32  # bfloat16 moves a few of 49,152 logits far, not a position's mean
    apart = (apart.abs() if exact else apart.square().mean(1).sqrt()).max().item()
    tolerance = (1e-3 if exact else 0.1) * (1 + wanted.std(correction=0).item())
    return "" if apart <= tolerance else f"beside other tokens the same tokens get values {apart:.2g} apart"


@torch.no_grad()
def check_models(readers, rows, pad_id):
    """Compare the actor's sampler and all models' scoring with plain_logits(), on four prompts cut to mixed
    lengths. Sets model.decodes_shared and model.shares_prompts where that is right; draws none of the run's
    random numbers. readers: models by constant, the actor first."""
    actor = next(iter(readers.values()))
    prompts = [rows[i % len(rows)]["ids"][:length] for i, length in enumerate((32, 3, 17, 8))]
    twice = [p for p in prompts for _ in range(2)]
    ends = torch.arange(0, known_ids(actor), 7, device=actor.device)  # rows leave at different times
    uniform = torch.rand(8, 10, generator=torch.Generator().manual_seed(0)).to(actor.device)
    batch = SimpleNamespace()  # what the sampler gives

    def sample():
        ids, lengths, logprobs, _ = generate(actor, prompts, uniform, 2, 10, 1.5, ends, pad_id)
        responses = [row[:n] for row, n in zip(ids.tolist(), lengths.tolist())]
        vars(batch).update(vars(pack(twice, responses, actor.device)))
        at = batch.response_mask.nonzero(as_tuple=True)
        wanted = sampling_logprobs(plain_logits(actor, batch), 1.5)
        return logprobs[at], wanted.gather(1, ids[at][:, None]).squeeze(1)

    def compare(way):
        every = torch.arange(8, device=actor.device)
        return disagreement(model, lambda: (way(model, batch, every)[0], plain_logits(model, batch)))

    with unsharded(actor):
        for actor.decodes_shared in (actor.config._attn_implementation == "shared_prompts", False):
            wrong = disagreement(actor, sample)
            if not wrong:
                break
    for constant, model in readers.items():
        with unsharded(model), autocast(model) if model.dtype != torch.float32 else nullcontext():
            zeros = [p for p in model.parameters() if not p.any()]  # a new head says 0 whatever it reads
            for parameter in zeros:
                parameter.copy_(torch.linspace(-0.02, 0.02, parameter.numel()).view_as(parameter))
            wrong = wrong or compare(logits_of_rows)
            model.shares_prompts = "logits_of_groups" in globals() and not compare(logits_of_groups)
            for parameter in zeros:
                parameter.zero_()
        if wrong:
            kind = f"a model of the type {model.config.model_type!r}"
            needs = "it must be causal, and decode with a cache"
            raise UserError(f"{constant}: {kind} cannot be used here, {wrong}: {needs}")


# ---------------------------------------------------------------- prompts and responses
# Texts and chats from files to ids, the responses sampled to them, and what a reward model says of those.


def load_rows(datasets, constant, limit=None):
    """Rows {"id", "prompt": text or chat, "answer": text, texts or None, "columns"} of all data sets."""
    rows = []
    for spec in datasets:
        if not {"path", "type", "input"} <= set(spec) <= {"path", "type", "input", "output", "name", "split"}:
            raise UserError(f"{constant}: a data set has path, type, input (output, name, split): {spec!r}")
        before = len(rows)
        for number, record in read_records(spec, f"{constant}: {spec['path']}"):
            where = f"{constant}: {spec['path']} line {number}"
            row = {"id": f"{Path(spec['path']).name}:{number}", "answer": None, "columns": record}
            row["prompt"] = read_prompt(look_up(record, spec["input"], where), f"{where}: {spec['input']!r}")
            if spec.get("output"):
                answer = look_up(record, spec["output"], where)
                if isinstance(answer, list) and answer and isinstance(answer[-1], dict):
                    answer = answer[-1].get("content")  # of messages the last one's
                kind = "texts" if isinstance(answer, list) else "text"
                row["answer"] = read_as(kind, answer, f"{where}: {spec['output']!r}")
            rows.append(row)
        if len(rows) == before:
            raise UserError(f"{constant}: {spec['path']}: the data set is empty")
    lacking = {name: None for row in rows for name in row["columns"]}
    return [{**row, "columns": lacking | row["columns"]} for row in rows[:limit]]


def load_prompts(datasets, constant, limit, *readers):
    """The rows of data sets that encode() keeps; those to train on must be some."""
    if "{input}" not in PROMPT_TEMPLATE:
        raise UserError(f"PROMPT_TEMPLATE = {PROMPT_TEMPLATE!r} has no {{input}}, where the prompt goes")
    rows = encode(load_rows(datasets, constant, limit), constant, *readers)
    if not rows and constant == "TRAIN_DATASETS":
        raise UserError(f"{constant} leaves no prompt to train on: raise MAX_PROMPT_TOKENS or give it data")
    return rows


def read_prompt(value, where):
    """A text, or a chat: a list of {"role", "content"} messages that ends with what is to be answered."""
    if isinstance(value, str) and value.strip():
        return value
    # without the nulls that parquet and the hub fill in for keys that a message lacks
    text = json.dumps(value, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))
    messages = json.loads(
        text, object_hook=lambda record: {key: item for key, item in record.items() if item is not None}
    )
    right = isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)
    for message in messages if right else []:
        content = message.setdefault("content", "" if message.get("tool_calls") else None)
        right = right and isinstance(message.get("role"), str) and isinstance(content, str)
    if not right or messages[-1]["role"] == "assistant":
        form = 'a text, or messages such as [{"role": "user", "content": "How many?"}], to be answered'
        raise UserError(f"{where}: a prompt is {form}, not {repr(value)[:160]}")
    return messages


def transcript(value):
    """A prompt or response as a person reads it: of a chat every message."""
    if isinstance(value, str):
        return value
    return "\n".join(f"{m['role']}: {m['content']}{m.get('tool_calls', '')}" for m in value)


def conversation(prompt):
    """The messages that a prompt is to the model: a chat's own, or its text in PROMPT_TEMPLATE; SYSTEM_PROMPT
    goes first where there is no system message."""
    messages = prompt
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": PROMPT_TEMPLATE.replace("{input}", prompt)}]
    if SYSTEM_PROMPT is None or any(message["role"] in ("system", "developer") for message in messages):
        return list(messages)
    return [{"role": "system", "content": SYSTEM_PROMPT}, *messages]


def render(tokenizer, messages, where, go_on):
    """Messages as text by the chat template; go_on: with what begins the assistant's next turn."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=go_on)
    except Exception as error:  # a template may refuse roles, or their order, by any kind
        why = f"{tokenizer.name_or_path!r} does not take these messages ({first_line(error)})"
        raise UserError(f"{where}: the chat template of {why}") from None


def chat(tokenizer, prompt, where, response=None):
    """The ids of a prompt, a text or a chat, or of one with its response, a text or turns, in the tokenizer's
    chat template; a text can do without one. where: what an error names."""
    prompt = read_prompt(prompt, where)
    messages = conversation(prompt)
    turns = [{"role": "assistant", "content": response}] if isinstance(response, str) else response or []
    if tokenizer.chat_template:
        text = render(tokenizer, messages + turns, where, response is None)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(messages) > 1 or not isinstance(prompt, str):
        needs = f"messages and SYSTEM_PROMPT need a chat template, and {tokenizer.name_or_path!r} has none"
        raise UserError(f"{where}: {needs}: put a file chat_template.jinja beside it")
    ends = {"assistant": tokenizer.eos_token}
    text = messages[0]["content"] + "".join(m["content"] + ends.get(m["role"], "") for m in turns)
    ids = tokenizer(text)["input_ids"]
    # Some tokenizers end every text: a response would begin after the end, or end twice
    ended = [tokenizer.eos_token_id] * (1 if response is None else 2)
    said = (messages + turns)[-1]["content"].endswith(tokenizer.eos_token)
    return ids[:-1] if ids[-len(ended) :] == ended and not said else ids


def encode(rows, constant, tokenizer, readers, say):
    """Add the prompt's ids to each row ({"prompt", ...}); rows longer than MAX_PROMPT_TOKENS are left out,
    and said so. readers: the models that read them, each by its constant, the actor first."""
    known = known_ids(next(iter(readers.values())))
    for row in rows:
        where = f"{constant}: {row.get('id', 'the prompt')}"
        row["ids"] = chat(tokenizer, row["prompt"], where)
        row["columns"]["messages"] = conversation(row["prompt"])
        if not row["ids"] or max(row["ids"]) >= known:
            gives = f"its tokenizer gives no token, or the id {max(row['ids'], default=0)}"
            raise UserError(f"{where}: {gives}; ACTOR_MODEL = {ACTOR_MODEL!r} knows {known} ids")
    kept = [row for row in rows if len(row["ids"]) <= MAX_PROMPT_TOKENS]
    if len(kept) < len(rows):
        left_out = f"left out {len(rows) - len(kept)} of {len(rows)} prompts"
        say(f"{constant}: {left_out}, longer than MAX_PROMPT_TOKENS = {MAX_PROMPT_TOKENS}")
    needed = max((len(row["ids"]) for row in kept), default=0) + MAX_NEW_TOKENS
    for name, model in readers.items():
        if needed > positions_of(model):
            have = f"a prompt of {constant} and MAX_NEW_TOKENS = {MAX_NEW_TOKENS} are {needed}"
            raise UserError(f"{name} reads {positions_of(model)} tokens at most; {have}: lower either")
    return kept


def encode_texts(prompts, answers, what, *readers):
    """Rows of texts or chats that a caller gives, those that encode() keeps."""
    answers = answers or [None] * len(prompts)
    prompts = [read_prompt(prompt, what) for prompt in prompts]
    rows = [{"prompt": p, "answer": answer, "columns": {}} for p, answer in zip(prompts, answers)]
    return encode(rows, what, *readers)


def end_ids(model, tokenizer):
    """The ids that end a response, a tensor: the tokenizer's and the generation config's, often several."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return upload(sorted({tokenizer.eos_token_id, *ends} - {None}), model.device)


def respond(model, tokenizer, prompts, uniform, group_size=1, temperature=None):
    """generate() over lists of ids, as many rows at a time as a training batch has; uniform None is greedy. A
    batch whose tensors are (rows, R): R is the longest response, response_mask is 1 up to its first EOS."""
    size = max(1, BATCH_SIZE * GROUP_SIZE // group_size)  # prompts
    eos_ids = end_ids(model, tokenizer)
    pad_id = padding_id(model, tokenizer)

    def some(i):
        part = slice(i * group_size, (i + size) * group_size)
        own = None if uniform is None else upload(uniform[part], model.device)
        with autocast(model):
            return generate(
                model,
                prompts[i : i + size],
                own,
                group_size,
                MAX_NEW_TOKENS,
                temperature or TEMPERATURE,
                eos_ids,
                pad_id,
            )

    with unsharded(model):
        parts = map_over_ranks(range(0, len(prompts), size), some)
    ids, lengths, logprobs, entropies = (torch.cat(x).to(model.device) for x in zip(*parts))
    rows = [row[:n] for n, *row in torch.cat([lengths[:, None], ids], 1).tolist()]
    batch = pack([p for p in prompts for _ in range(group_size)], rows, model.device)
    width = batch.response_mask.shape[1]
    batch.logprobs = logprobs[:, :width]
    batch.entropies = entropies[:, :width]
    batch.truncated = ~torch.isin(ids.gather(1, lengths[:, None] - 1).squeeze(1), eos_ids)
    batch.responses = tokenizer.batch_decode(rows, skip_special_tokens=True)
    batch.columns = {"response_ids": rows}  # for reward functions, beside the rows' own
    return batch


def load_reward_model(path, device):
    """A one-label sequence classifier, frozen, and its tokenizer; (None, None) for None."""
    if path is None:
        return None, None
    model = load_model(AutoModelForSequenceClassification, path, "REWARD_MODEL", device).requires_grad_(False)
    if model.config.num_labels != 1 or not hasattr(model, "score"):
        raise UserError(f"REWARD_MODEL = {path!r} must be a decoder with a classification head of one label")
    return model, load_tokenizer(path, "REWARD_MODEL")


@torch.no_grad()
def classify(model, tokenizer, prompts, responses):
    """A reward model's score of each prompt with its response, (rows,), read at the last real token."""
    rows = [chat(tokenizer, p, "REWARD_MODEL", r) for p, r in zip(prompts, responses)]
    scores = torch.zeros(len(rows))
    lengths = torch.tensor([len(row) for row in rows])
    if lengths.max() > positions_of(model):
        reads = f"reads {positions_of(model)} tokens at most; a prompt with its response has {lengths.max()}"
        raise UserError(f"REWARD_MODEL = {REWARD_MODEL!r} {reads}")
    for chunk in lengths.argsort(stable=True).split(min(64, BATCH_SIZE * GROUP_SIZE)):
        ids = upload(pad_right([rows[i] for i in chunk], 0), model.device)  # a causal model cannot see it
        last = upload(torch.stack([torch.arange(len(chunk)), lengths[chunk] - 1]), model.device)
        with autocast(model):
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[tuple(last)]
            scores[chunk] = model.score(hidden).squeeze(-1).float().cpu()
    return scores


def response_metrics(batch, scores, parts):
    """Means over responses: of the scores and their parts, lengths, how many were cut."""
    return {
        "reward": scores.mean().item(),
        **{f"reward/{name}": values.mean().item() for name, values in parts.items()},
        "response_length": batch.response_mask.sum(1).mean().item(),
        "truncated_fraction": batch.truncated.float().mean().item(),
    }


def sample_records(batch, advantages):
    """LOG_SAMPLES of a step's rows for samples.jsonl; advantages (rows,)."""
    records = []
    for i in torch.linspace(0, len(batch.rows) - 1, min(LOG_SAMPLES, len(batch.rows))).long().tolist():
        row = batch.rows[i]
        response = batch.columns.get("turns", batch.responses)[i]
        records.append(
            {
                "id": row["id"],
                "prompt": transcript(row["prompt"]),
                "response": transcript(response),
                "answer": row["answer"],
                "truncated": bool(batch.truncated[i]),
                "reward": batch.scores[i].item(),
                **{f"reward/{name}": float(values[i]) for name, values in batch.parts.items()},
                "advantage": advantages[i].item(),
            }
        )
    return records


# ---------------------------------------------------------------- faster decoding
# A prompt's keys and values are kept once for all its responses; in a copy without this block for each.


class SharedLayer(GrowingLayer):
    """Keys and values of the responses; those of the prompts, (heads, prompts, P, width), stand beside."""

    def __init__(self, layer, mask):
        super().__init__(layer)
        self.prompt = [x.transpose(0, 1).contiguous() for x in self.room]
        self.bias = torch.where(mask[:, None] > 0, 0.0, -math.inf)
        self.row_to_prompt = range(len(mask))
        self.keys, self.values = self.room = [x[:, :, :0] for x in self.room]

    def get_seq_length(self):
        return self.prompt[0].shape[2] + self.keys.shape[2]

    def update(self, keys, values, *args, **kwargs):
        keys, values = super().update(keys, values)
        keys.shared = self  # for attend()
        return keys, values

    def reorder_cache(self, rows):
        super().reorder_cache(rows)
        if not hasattr(rows, "groups"):  # once for all layers; rows of one prompt are neighbours
            owners = [self.row_to_prompt[row] for row in listed(rows)]
            prompts = list(dict.fromkeys(owners))
            most = max(map(owners.count, prompts))
            at = [min(owners.index(p) + i, len(owners) - 1) for p in prompts for i in range(most)]
            slots = [prompts.index(p) * most + i - owners.index(p) for i, p in enumerate(owners)]
            owners = [prompts.index(p) for p in owners]
            rows.groups = owners, most, *(upload(x, rows.device) for x in (prompts, at, slots))
        self.row_to_prompt, self.most, prompts, self.rows_at, self.slots = rows.groups
        self.prompt = [x.index_select(1, prompts) for x in self.prompt]
        self.bias = self.bias[prompts]

    def by_prompt(self, x):
        """(rows, heads, n, width) to (heads, prompts, most * n, width), padded with any rows."""
        return x.transpose(0, 1).index_select(1, self.rows_at).unflatten(1, (-1, self.most)).flatten(2, 3)

    def by_row(self, x):
        return x.unflatten(2, (self.most, -1)).flatten(1, 2).index_select(1, self.slots).transpose(0, 1)


def attend(module, query, key, value, attention_mask, scaling=None, **options):
    """transformers' sdpa attention; with a SharedLayer's keys one softmax over the prompt's and the own."""
    layer = getattr(key, "shared", None)
    if layer is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    rows, heads, _, width = query.shape
    query = query.reshape(rows, key.shape[1], -1, width) * (width**-0.5 if scaling is None else scaling)
    scores = layer.by_row(layer.by_prompt(query) @ layer.prompt[0].mT + layer.bias)
    weights = torch.cat([scores, query @ key.mT], -1).softmax(-1, dtype=torch.float32).to(value.dtype)
    of_prompt, of_response = weights.split([scores.shape[-1], key.shape[2]], -1)
    out = of_response @ value + layer.by_row(layer.by_prompt(of_prompt) @ layer.prompt[1])
    return out.reshape(rows, 1, heads, -1), None


AttentionInterface.register("shared_prompts", attend)
AttentionMaskInterface.register("shared_prompts", AttentionMaskInterface()["sdpa"])


# ---------------------------------------------------------------- faster scoring
# In scoring and update a prompt is read once with all its responses. Delete this block in a copy of your
# own, and each response is read with its prompt.


_RESPONSE_TOKENS = 1024  # at most in one sequence below: its attention is dense


def logits_of_groups(model, batch, rows):
    """As logits_of_rows(), neighbouring rows of one prompt in one sequence: the prompt once, then their
    responses side by side. Positions of each go on after the prompt, and a token sees, by a mask of four
    dimensions, its prompt and its own response alone."""
    device = model.device
    sequences = []  # of each its ids, their positions, and whose they are: 0 is the prompt, i + 1 row i
    places = []  # of each token: its row, the sequence, where it is predicted, and itself
    last = None
    for i, row in enumerate(listed(rows)):
        prompt, response, sampled = batch.token_lists[row]
        first, more = len(prompt), len(response) - 1  # nothing is predicted after the last token
        if prompt != last or len(sequences[-1][0]) + more > first + _RESPONSE_TOKENS:
            last = prompt
            sequences.append((list(prompt), list(range(first)), [0] * first))
        ids, positions, owner = sequences[-1]
        places += [(i, len(sequences) - 1, (len(ids) + t if t else first) - 1, t) for t in sampled]
        ids += response[:more]
        positions += range(first, first + more)
        owner += [i + 1] * more
    # Padding is seen by none but itself; a GPU's kernels copy masks of other widths
    ids, positions, owner = (
        upload(pad_right(part, value, 8), device) for part, value in zip(zip(*sequences), (0, 0, -1))
    )
    back = positions[:, :, None] - positions[:, None]  # from a query to a key
    seen = (back >= 0) & ((owner[:, None] == 0) | (owner[:, None] == owner[:, :, None]))
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.dtype
    masks = {}
    for kind, window in attention_windows(model).items():
        hidden = ~seen | (back >= (window or math.inf))
        zeros = torch.zeros(hidden.shape, dtype=dtype, device=device)
        masks[kind] = zeros.masked_fill_(hidden, -math.inf)[:, None]
    masks = masks if len(masks) > 1 else masks.popitem()[1]
    row, sequence, predicted_at, token = upload(places, device).T
    options = {"attention_mask": masks, "position_ids": positions}
    return logits_at(model, ids, (sequence, predicted_at), **options), (row, token)


# ---------------------------------------------------------------- adapters
# LoRA: small matrices are trained beside a model's frozen weights. Delete this block in a copy of your own
# that leaves LORA_RANK at 0.


def load_adapted(auto_class, path, constant, device, saved, new_head):
    """The model of path, frozen and in DTYPE, with an adapter on it in float32: the saved one, or one that
    changes nothing yet. A new head is trained whole."""
    if is_sharded():
        raise UserError(f"LORA_RANK = {LORA_RANK} and SHARD = 'fsdp2' do not go together: set one of them")
    import peft

    path = str(Path(path).resolve()) if Path(path).exists() else path  # the adapter's config names it
    model = load_model(auto_class, path, constant, device, new_head, getattr(torch, DTYPE))
    targets = LORA_TARGETS if LORA_TARGETS == "all-linear" else LORA_TARGETS.replace(" ", "").split(",")
    config = peft.LoraConfig(
        r=LORA_RANK,
        lora_alpha=LORA_ALPHA,
        target_modules=targets,
        lora_dropout=0.0,
        task_type="TOKEN_CLS" if new_head else "CAUSAL_LM",
        modules_to_save=["score", "classifier"] if new_head else None,
    )  # what heads are named
    warnings.filterwarnings("error", "Model has .tie_word_embeddings")  # merging would change both layers
    try:
        model.add_adapter(config)
    except (ValueError, UserWarning) as error:
        raise UserError(f"LORA_TARGETS = {LORA_TARGETS!r}: {first_line(error).rstrip('(')}") from None
    adapted = [f".{name}" for name, layer in model.named_modules() if hasattr(layer, "get_delta_weight")]
    for target in [] if targets == LORA_TARGETS else targets:
        if not any(name.endswith(f".{target}") for name in adapted):
            raise UserError(f"LORA_TARGETS = {LORA_TARGETS!r}: {model.name_or_path} has no layer {target!r}")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if head := model.get_output_embeddings():  # or a view, as generate() reads, takes up to 350 times as long
        head.register_forward_pre_hook(lambda module, inputs: inputs[0].contiguous())
    config.target_modules = sorted(config.target_modules)  # a set's order differs from run to run
    if saved:
        then = load_pretrained(peft.LoraConfig, saved, "RESUME")
        same = (then.r, then.lora_alpha) == (LORA_RANK, LORA_ALPHA)
        if not same or sorted(then.target_modules) != config.target_modules:
            raise UserError(f"{saved} is of another LORA_RANK, LORA_ALPHA or LORA_TARGETS: resume it so")
        state = load_file(saved / "adapter_model.safetensors")
        state = {name.removeprefix("base_model.model."): x for name, x in state.items()}
        peft.set_peft_model_state_dict(model, state)
    return model


@contextmanager
def without_adapter(model):
    """Inside the block the model is what it was before it got an adapter, if it has one."""
    adapted = hasattr(model, "peft_config")
    if adapted:
        model.disable_adapters()
    yield
    if adapted:
        model.enable_adapters()


def merged(model):
    """A model's copy with its adapter added to the weights, in float32: plain from_pretrained() loads it."""
    copied = copy.deepcopy(model).float()
    for name, layer in list(copied.named_modules()):
        if hasattr(layer, "get_delta_weight"):
            layer.merge()
            copied.set_submodule(name, layer.get_base_layer())
    copied._hf_peft_config_loaded = False
    del copied.peft_config
    return copied


# ---------------------------------------------------------------- sharding
# Models larger than a GPU, each process with its part of them (FSDP2). Delete this block in a copy of your
# own that leaves SHARD at "none".


def shard(model, device):
    """Each process keeps its part of every parameter, gradient and optimizer state (FSDP2): the layers' other
    parts come when one is read, in the update."""
    mesh = init_device_mesh(device.type, (world_size(),))
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing is done in place
    for part in (*(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)), model):
        fully_shard(part, mesh=mesh)  # in float32: autocast narrows
        part.set_gradient_divide_factor(1.0)  # sums: losses are divided by the whole step's tokens already
        part.set_force_sum_reduction_for_comms(True)
    with torch.no_grad():  # or the first layer that is read would take itself for the whole model
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device))
    model.reset_iter_state()
    model.register_state_dict_post_hook(gather)
    return model


def gather(module, state, *_):
    """A hook: state_dict() of a sharded model or its optimizer has full tensors, on the CPU of the first
    process, which writes them; all processes call it."""
    for key, x in state.items():
        if isinstance(x, dict):
            state[key] = dict(x)  # an optimizer's own would lose its state
            gather(None, state[key])
        elif isinstance(x, DTensor):
            x = x.full_tensor()
            state[key] = x.cpu() if rank() == 0 else None
    for key, source in getattr(module, "all_tied_weights_keys", {}).items():
        state[key] = state[source]


def shard_state(optimizer):
    """state_dict() and load_state_dict() of an optimizer have full tensors, as if nothing were sharded."""
    optimizer.register_state_dict_post_hook(gather)
    optimizer.register_load_state_dict_pre_hook(deal_moments)


def deal_moments(optimizer, saved):
    """A hook: load_state_dict() takes what gather() gave, each process its part."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, state in saved["state"].items():
        p = parameters[number]
        for key, x in state.items():
            if isinstance(p, DTensor) and x.shape == p.shape:
                x = x.to(p.device)
                state[key] = distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None)


@contextmanager
def gathered(*models):
    """Inside the block each process has all parameters of sharded models, and may read and sample with them
    as often as it likes: nothing waits for another process."""
    models = [m for m in models if isinstance(m, FSDPModule) and not getattr(m, "is_unsharded", False)]
    for model in models:
        model.is_unsharded = True
        model.set_reshard_after_forward(False)
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.unshard()
    yield
    for model in models:
        model.reset_iter_state()  # a prefetch that is left over would wait for the others
        model.set_reshard_after_forward(True)
        model.is_unsharded = False


# ---------------------------------------------------------------- records
# Rows of files and of the hub, and their order in each epoch.


def read_records(spec, where):
    """Yields (line number from 1, record) of one data set; a csv file's record has the line it ends on."""
    try:
        if spec["type"] == "jsonl":
            records = enumerate(Path(spec["path"]).read_bytes().split(b"\n"), 1)
        elif spec["type"] == "csv":
            text = Path(spec["path"]).read_bytes().decode("utf-8-sig")
            reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)  # or open quotes take all
            records = [(reader.line_num, record) for record in reader]
        elif spec["type"] == "parquet":
            records = enumerate(pyarrow.parquet.read_table(spec["path"]).to_pylist(), 1)
        elif spec["type"] != "hub":
            raise ValueError("the types are jsonl, csv, parquet and hub")
        else:
            import datasets  # slow

            split = spec.get("split", "train")
            records = enumerate(datasets.load_dataset(spec["path"], spec.get("name"), split=split), 1)
    except Exception as error:  # the libraries raise many kinds
        line = f" line {reader.reader.line_num}" if isinstance(error, csv.Error) else ""
        raise UserError(f"{where}{line}: cannot be read as {spec['type']} ({first_line(error)})") from None
    for number, record in records:
        if spec["type"] == "csv":
            if None in (*record, *record.values()):
                raise UserError(f"{where} line {number}: it has not as many fields as the head: quote commas")
            record = {key: text or None for key, text in record.items()}
        try:
            if not isinstance(record, bytes):
                yield number, record
            elif record.strip():
                yield number, dict(json.loads(record.decode("utf-8-sig")))
        except (ValueError, TypeError) as error:
            raise UserError(f"{where} line {number}: not a JSON object ({error}); mend it") from None


def look_up(record, path, where):
    """What stands at a path such as "answers.text" in nested records."""
    value = record
    for key in [path] if path in record else path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if value is None:
        raise UserError(f"{where}: there is no value for column {path!r}; the row has {sorted(record)}")
    return value


def read_as(kind, value, where):
    """A value of a file as its kind: "text" (a number becomes one) or "texts" (a list, or one)."""
    if kind == "texts":
        return [read_as("text", x, where) for x in (value if isinstance(value, list) and value else [value])]
    if not isinstance(value, (str, int, float)) or value != value:  # NaN
        raise UserError(f"{where} must be a text or a number, not {repr(value)[:80]}: mend or delete it")
    return str(value)


def next_rows(rows, state, count):
    """The next `count` rows, fewer at an epoch's end; each epoch has its own permutation, state.order."""
    if state.cursor == 0:
        state.epoch += 1
        state.order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED + state.epoch))
    chosen = state.order[state.cursor : state.cursor + count].tolist()
    state.cursor = (state.cursor + len(chosen)) % len(rows)
    return [rows[i] for i in chosen]


# ---------------------------------------------------------------- rewards
# Calling reward functions and checking what they return.


def resolve_rewards(functions, constant):
    """[(name, function, weight)] of pairs (function or name in rewards/, weight); no name stands twice."""
    resolved = []
    for pair in functions:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise UserError(f"{constant} takes pairs (function or name in rewards/, weight), not {pair!r}")
        function = getattr(rewards, pair[0], None) if isinstance(pair[0], str) else pair[0]
        if not callable(function):
            raise UserError(f"{constant}: rewards/ has no function {pair[0]!r}")
        name = plain_name(function)
        count = 1 + sum(plain_name(other) == name for _, other, _ in resolved)  # of lambdas, say
        resolved.append((f"{name}_{count}" if count > 1 else name, function, float(pair[1])))
    return resolved


@contextmanager
def time_limit():
    """Ends the program, and shows where it hangs, if what is inside takes longer than REWARD_TIMEOUT."""
    if REWARD_TIMEOUT and sys.__stderr__:  # sys.stderr may be a notebook's, without a file
        faulthandler.dump_traceback_later(REWARD_TIMEOUT, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def call_reward(name, function, prompts, responses, answers, columns={}, width=None):
    """Values of a reward function, (rows,); with a width (rows, width) if it returns a list per response, a
    number per token. Its parameters after the first three get the columns of their names."""
    signature = inspect.signature(function)
    first = [*signature.parameters][:3]
    takes_all = any(p.kind == p.VAR_KEYWORD for p in signature.parameters.values())
    named = {k: v for k, v in columns.items() if k not in first and (takes_all or k in signature.parameters)}
    try:
        signature.bind(prompts, responses, answers, **named)
    except TypeError as error:
        raise UserError(f"{name}: {error}; the columns of these rows are {sorted(columns)}") from None
    try:
        values = function(prompts, responses, answers, **named)
    except Exception as error:
        if isinstance(error, ValueError) and getattr(function, "__module__", None) == rewards.__name__:
            raise UserError(str(error)) from None  # what its data must have
        if not isinstance(error, UserError) and not hasattr(error, "__notes__"):  # the innermost is enough
            error.add_note(f"(raised by the reward function {name})")
        raise
    if (
        not width
        or not hasattr(values, "__len__")
        or len(values) != len(responses)
        or not any(getattr(value, "ndim", isinstance(value, (list, tuple))) for value in values)
    ):
        return check_scores(name, values, len(responses))
    token_rewards = torch.zeros(len(responses), width)  # 0 after each response's end
    for i, ids in enumerate(columns["response_ids"]):
        token_rewards[i, : len(ids)] = check_scores(name, values[i], len(ids), f"token of response {i}")
    return token_rewards


def check_scores(name, values, count, each="response"):
    """The values as a float32 tensor (count,); anything else is the reward function's mistake."""
    try:
        scores = torch.as_tensor(values, dtype=torch.float32).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        scores = torch.tensor(torch.nan)
    if scores.shape != (count,) or not scores.isfinite().all():
        returned = f"{repr(values)[:80]}, of shape {tuple(scores.shape)}"
        raise UserError(f"{name} must return {count} finite numbers, one per {each}; it returned {returned}")
    return scores


def dealt_rewards(trainer, name, function, batch, width=None):
    """call_reward() of a batch's responses, those of BATCH_SIZE prompts at a time, dealt out to processes,
    and {part: values (rows,)} of what the function left in trainer.reward_parts."""
    size = BATCH_SIZE * GROUP_SIZE

    def work(i):
        rows = [copy.deepcopy(row) for row in batch.rows[i : i + size]]  # a judge may append to its messages
        lists = (
            [row["prompt"] for row in rows],
            batch.responses[i : i + size],
            [row["answer"] for row in rows],
        )
        columns = {name: [row["columns"][name] for row in rows] for name in rows[0]["columns"]}
        columns |= {name: copy.deepcopy(values[i : i + size]) for name, values in batch.columns.items()}
        trainer.reward_parts = {}
        with time_limit():
            scores = call_reward(name, function, *lists, columns, width)
        parts = trainer.reward_parts.items()
        return scores, {k: check_scores(f"reward_parts[{k!r}]", v, len(scores)) for k, v in parts}

    scores, parts = zip(*map_over_ranks(range(0, len(batch.rows), size), work))
    return torch.cat(scores), {k: torch.cat([some[k] for some in parts]) for k in parts[0] | parts[-1]}


# ---------------------------------------------------------------- the run
# Constants and errors, processes, OUTPUT_DIR and its lock, checkpoints and resume, logs, plots, signals.


class UserError(Exception):
    """Something the user can mend, said in one sentence; the program ends with exit code 2."""


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def run_main(trainer_class):
    """Run the trainer as a program: exit code 0, 2 for what the user can mend, 130 or 143 after Ctrl-C or
    SIGTERM, 1 with a traceback for all else. One process's error ends all; the first that fails prints it."""
    try:
        apply_overrides(sys.argv[1:])
        trainer = trainer_class()
        trainer.train()
        code = 128 + trainer.run.stop_signal if trainer.run.stop_signal else 0
    except (KeyboardInterrupt, EOFError):  # Ctrl-C or Ctrl-D where a question was asked
        code = 130
    except Exception as error:
        text = sentence_of(error)
        if text is None and not dist.is_initialized():
            raise
        code = 1 if text is None else 2
        if fails_first():
            print(f"\n{Path(__file__).name}: {text}" if text else traceback.format_exc(), file=sys.stderr)
    if dist.is_initialized():  # at once: others may wait in a collective, and gloo's threads may abort us
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def sentence_of(error):
    """What the user can do about an error; None where a traceback says more."""
    if hasattr(error, "__notes__"):  # a reward function's
        return None
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or OUTPUT_DIR}: {error.strerror or error}"
    if type(error).__module__.startswith("wandb"):
        return f"USE_WANDB = True: {first_line(error)}"
    if isinstance(error, dist.DistError) or "/gloo/" in str(error):  # gloo has no type for it
        return f"another process of this run is gone, or was silent ({first_line(error)})"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error):
        return f"out of memory ({first_line(error)}): lower BATCH_SIZE, GROUP_SIZE or MAX_NEW_TOKENS"


def fails_first():
    """True on the first process of the run that calls it; before they have met, on process 0."""
    with suppress(Exception):  # no store yet, or gone with the process that held it
        store = dist.distributed_c10d._get_default_store()
        return store.compare_set("failed", "", str(rank())).decode() == str(rank())
    return rank() == 0


def constants():
    """Every constant of this file, as JSON has it."""
    values = {k: v for k, v in globals().items() if k.isupper() and not k.startswith("_") and k != "ROOT"}
    return json.loads(json.dumps(values, default=plain_name))


def plain_name(value):
    """What stands in JSON for a function or an object, the same from run to run."""
    return getattr(value, "__name__", type(value).__name__)


def settings():
    """What makes a run what it is: constants, this file, threads and GPU, on which sums' last bits depend."""
    here = {Path(__file__).name: file_digest(__file__)["sha256"][:12], "GPU": None}
    if torch.cuda.is_available():
        here["GPU"] = torch.cuda.get_device_name(int(os.environ.get("LOCAL_RANK", 0)))
    return {**constants(), **here, "OMP_NUM_THREADS": torch.get_num_threads()}


def apply_overrides(words):
    """Set constants from KEY=VALUE words; a value has the type that its constant has in the file."""
    annotate = globals().get("__annotate__")  # Python 3.14 makes annotations when asked (PEP 649)
    annotations = annotate(1) if annotate else __annotations__
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in constants():
            near = difflib.get_close_matches(key.upper(), constants(), 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{word!r} is not KEY=VALUE with a constant of this file{hint}")
        kind = str(annotations.get(key, type(globals()[key]).__name__))  # such as "int | None"
        value = text
        if "str" not in kind or "None" in kind and text == "None":
            with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                value = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
        value = float(value) if "float" in kind and type(value) is int else value
        if not text.strip() or type(value).__name__.replace("NoneType", "None") not in kind.split(" | "):
            raise UserError(f"{key}={text}: {key} takes {kind.replace('|', 'or')}, such as {globals()[key]}")
        globals()[key] = value


def check_constants():
    """Refuse numbers out of range and unknown words before anything is loaded or written."""
    for keys, allowed in _LIMITS.items():
        for key in keys.split():
            value = globals()[key]
            if isinstance(allowed, list) and value is not None and value not in allowed:
                raise UserError(f"{key} = {value!r} is unknown: it takes {' or '.join(allowed)}")
            if isinstance(allowed, tuple) and value is not None and not allowed[0] <= value <= allowed[1]:
                raise UserError(f"{key} = {value} is out of range: it takes {allowed[0]:g} to {allowed[1]:g}")


def load_pretrained(auto_class, path, constant, **options):
    """from_pretrained() with one sentence when that fails; `constant` is what the user set to `path`."""
    try:
        return auto_class.from_pretrained(path, trust_remote_code=False, **options)
    except Exception as error:  # transformers, safetensors and tokenizers raise many kinds
        why = "cannot be loaded" if Path(path).exists() else "no such folder, and the hub gave no such model"
        raise UserError(f"{constant} = {str(path)!r}: {why} ({first_line(error)})") from None


def find_device():
    """The device that DEVICE names, each process of a machine its own GPU; the processes meet here."""
    join_processes()
    mps = torch.backends.mps.is_available() and world_size() == 1  # gloo does not know it
    best = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    name = best if DEVICE == "auto" else DEVICE
    if name == "cuda" and world_size() > 1:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError):
        raise UserError(f"DEVICE = {name!r} is not here; auto takes {best}, one for each process") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def seed_everything(seed):
    """Seed all generators; deterministic kernels, or gradients would add up in the order of threads."""
    with suppress(ImportError):  # transformers imports it within a run, and it takes a random number
        import sklearn.metrics  # noqa: F401
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time


def get_rng_state():
    """The state of Python's, NumPy's and torch's generators, as plain types."""
    name, words, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (name, words.tolist(), *rest)}
    state["torch"] = torch.get_rng_state().tolist()
    if torch.cuda.is_initialized():  # dropout's, or what a function of yours draws
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    return state


def set_rng_state(state):
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.ByteTensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(torch.ByteTensor(state["cuda"]))


# ---------------------------------------------------------------- processes


def rank():
    """Which of the processes this is, from 0, which alone asks, writes and prints."""
    return int(os.environ.get("RANK", 0))


def world_size():
    return int(os.environ.get("WORLD_SIZE", 1))


_DEALING = []  # not empty: this process is at its share, which is its own alone


def join_processes():
    """Meet the others; those of an earlier start, whose addresses torchrun keeps, are never waited for."""
    if dist.is_initialized() or world_size() == 1 and globals().get("SHARD") != "fsdp2":
        return
    if "PROCESS_TIMEOUT" not in globals():
        raise UserError("it runs as one process: start it with python, not torchrun")
    if "MASTER_ADDR" not in os.environ:
        raise UserError("SHARD = 'fsdp2' needs torchrun --nproc_per_node=N, for one process too")
    os.environ.setdefault("NCCL_ALGO", "Ring")  # one order of addition
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    wait = timedelta(seconds=PROCESS_TIMEOUT)
    store = next(dist.rendezvous("env://", timeout=wait))[0]
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":  # several machines count restarts each for itself
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(backend, store=store, timeout=wait, world_size=world_size(), rank=rank())
    everyone = all_gather(settings())
    for name, value in everyone[0].items():
        if any(other.get(name) != value for other in everyone):
            raise UserError(f"the processes differ in {name}: make it the same")


def all_gather(value=None):
    """What every process gives, a list by rank; of several processes tensors come to the CPU."""
    if not dist.is_initialized():
        return [value]
    everyone = [None] * world_size()
    dist.all_gather_object(everyone, tree_map_only(torch.Tensor, torch.Tensor.cpu, value))
    return everyone


def broadcast_from_rank0(function):
    """What function() gives to the first process, which alone calls it."""
    return all_gather(function() if rank() == 0 else None)[0]


def tracked(items, unit):
    """Yields the items; says how many are done, on a terminal twice a second in one line, else every 30 s."""
    before, after, every = ("\r\033[K", "", 0.5) if sys.stdout.isatty() else ("", "\n", 30)
    begun = said = time.perf_counter()
    for done, item in enumerate(items):
        now = time.perf_counter()
        if now - said > every and rank() == 0:
            said = now
            rate = done / (now - begun)
            text = f"{Run.doing}: {done} of {len(items)} {unit}, {rate:.3g} a second"
            print(before + text, end=after, flush=True)
        yield item


def map_over_ranks(parts, work):
    """[work(part)] in the order of the parts: each is done by one process and told to all."""
    if _DEALING or world_size() == 1:
        return [work(part) for part in tracked(parts, "parts")]
    _DEALING.append(work)
    everyone = all_gather([work(part) for part in tracked(parts[rank() :: world_size()], "parts")])
    _DEALING.pop()
    return [everyone[i % world_size()][i // world_size()] for i in range(len(parts))]


# ---------------------------------------------------------------- files, schedule, plots


def fsync(path):
    handle = os.open(path, os.O_RDONLY)  # works for folders too
    os.fsync(handle)
    os.close(handle)


def file_digest(path):
    with open(path, "rb") as file:
        return {"size": os.path.getsize(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_whole(path, fill):
    """fill(tmp) writes a file, or a folder and its files; then fsync and rename: `path` is there whole or not
    at all. Of a folder that is replaced restore_folder() puts the old one back after a kill in between."""
    tmp = path.with_name(path.name + ".tmp")
    old = path.with_name(path.name + ".old")
    try:
        fill(tmp)
        for part in [*tmp.rglob("*"), tmp]:
            fsync(part)
        if path.is_dir():
            os.rename(path, old)
        os.rename(tmp, path)
        fsync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:  # an OSError, torch.save's RuntimeError, safetensors' own
        shutil.rmtree(tmp, ignore_errors=True)
        restore_folder(path)
        todo = "make room and start again, training goes on from the last good checkpoint"
        raise UserError(f"{path} could not be saved ({first_line(error)}): {todo}") from None


def restore_folder(folder):
    """What write_whole() was about to replace when it was killed comes back."""
    old = folder.with_name(folder.name + ".old")
    if old.exists() and not folder.exists():
        os.rename(old, folder)
    shutil.rmtree(old, ignore_errors=True)


def checkpoint_fault(folder):
    """Why a checkpoint cannot be trusted, or None: its files must be those of its manifest, to the byte."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name in ("training_state.pt", *manifest):
            if file_digest(folder / name) != manifest[name]:
                return f"{name} is not what was saved"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return first_line(error)


def list_checkpoints(output_dir):
    """[(N, step_N/)] of a run, oldest first."""
    return sorted((int(p.name[5:]), p) for p in Path(output_dir).glob("step_*") if p.name[5:].isdecimal())


def choose_checkpoint(resume, output_dir, say):
    """The checkpoint to go on from, or None to start afresh; asks at a terminal when resume is "ask"."""
    run = output_dir if resume in ("ask", "yes", "no") else resume
    checkpoints = list_checkpoints(run) if resume != "no" else []
    if run == resume and not checkpoints:
        checkpoints = [(0, Path(resume))]
    for _, folder in reversed(checkpoints):
        if fault := checkpoint_fault(folder):
            say(f"WARNING: skipping the broken checkpoint {folder}: {fault}")
            continue
        say(f"Found checkpoint: {folder}")
        if resume != "ask" or world_size() > 1 or not sys.stdin.isatty():
            say("Resuming from it (RESUME=no starts afresh)")
            return folder
        while (reply := input("Resume training from it? (y/n): ").strip().lower()[:1]) not in ("y", "n"):
            pass
        return folder if reply == "y" else None
    if checkpoints:
        raise UserError(f"no checkpoint in {run} is whole: mend one, or RESUME=no, which keeps the old run")


def move_aside(paths, output_dir, say):
    """Keep what a new start would overwrite: move it to OUTPUT_DIR/old_<time>/."""
    if paths:
        old = Path(output_dir) / f"old_{datetime.now():%Y%m%d_%H%M%S_%f}"
        old.mkdir(exist_ok=True)
        for path in paths:
            os.rename(path, old / path.name)
        say(f"Moved {', '.join(sorted(p.name for p in paths))} of an earlier run to {old}")


def learning_rate_scale(step, total, warmup, kind, halvings):
    """Factor of the learning rate at step (from 0): linear warm-up, then the schedule; None stays at 1."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return {None: 1.0, "linear": 1 - progress, "cosine": cosine, "plateau": 0.5**halvings}[kind]


def read_metrics(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def plot_metric(axis, records, phase, key, color, label):
    """A metric by step: training faint with its rolling mean, evaluation as points from a dashed start."""
    points = [(r["step"], r[key]) for r in records if r["phase"] == phase and r.get(key) is not None]
    axis.xaxis.get_major_locator().set_params(integer=True)
    if points and phase == "train":
        x, y = np.array(points, dtype=float).T
        window = max(1, len(y) // 12)
        rolling = [y[max(0, i - window) : i].mean() for i in range(1, len(y) + 1)]
        axis.plot(x, y, color=color, alpha=0.25)
        axis.plot(x, rolling, color=color, label=f"{label}, mean of {window}")
    elif points:
        axis.plot(*zip(*points), "o-", color=color, markersize=5, linewidth=0.8, label=f"{label}, held out")
        axis.axhline(points[0][1], color=color, linestyle="--", linewidth=0.8)


def draw_plot(records, path, title, panels):
    """A grid of panels, each (y label, metrics)."""
    height = math.ceil(len(panels) / 3)
    figure = Figure(figsize=(16, 0.8 + 3.4 * height))
    inch = 1 / figure.get_figheight()  # matplotlib's own layouts take half as long again
    figure.subplots_adjust(0.055, 0.5 * inch, 0.99, 1 - 0.6 * inch, wspace=0.22, hspace=0.25)
    figure.suptitle(title, y=1 - 0.2 * inch)
    for number, (label, keys) in enumerate(panels, 1):
        label += " (nats per token)" * (label in ("entropy", "kl", "approx_kl"))
        axis = figure.add_subplot(height, 3, number, xlabel="training step", ylabel=label)
        axis.grid(alpha=0.3)
        axis.ticklabel_format(axis="y", scilimits=(-3, 4), useOffset=False)  # short labels stay inside
        for color, (key, phase) in enumerate((key, phase) for key in keys for phase in ("train", "eval")):
            plot_metric(axis, records, phase, key, f"C{color}", key)
        if axis.lines:
            axis.legend(fontsize=8)
    write_whole(path, partial(figure.savefig, format="png", dpi=100))


class Run:
    """One run in OUTPUT_DIR: its lock, logs, plots, checkpoints, signals, counters. A new start moves `files`
    aside, too; best/ and patience follow the first metric of best_by that an evaluation has."""

    doing = "check models"  # what takes its time now, for tracked()
    saved = (  # of its attributes, in a checkpoint
        "step",
        "evaluated_at",
        "best_value",
        "patience_value",
        "evals_since_best",
        "halvings",
        "skipped",
        "log_lines",
        "wandb_id",
        "evaluation",
    )

    def __init__(self, name, resume, device, files=(), best_by=("reward",), later_of_equal=False):
        self.name = name
        self.device = device
        self.files = ("logs", "step_*", "best", "training_*", f"{name}_*.png", *files)
        self.best_by = best_by
        self.later_of_equal = later_of_equal
        self.logs = dict.fromkeys(("metrics.jsonl", "samples.jsonl"))  # by name, open while training
        self.log_lines = {}  # how many each had when the checkpoint was saved
        self.log = None  # of the texts that say() prints
        self.unlogged = []  # those from before it was there
        self.step = 0  # steps done
        self.total_steps = 0
        self.begin_part()
        self.evaluation = {}  # the last one's metrics
        self.skipped = 0  # optimizer steps in a row that were not finite
        self.times = {}
        self.clock = (time.perf_counter(), 0)  # when the steps began, and after which
        self.wandb = self.wandb_id = None
        self.signal = None  # that this process has got
        self.stop_signal = None  # that all have agreed to stop by
        self.last_word = None  # what is said at the end in place of its own
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.folder = Path(OUTPUT_DIR)
        self.lock = filelock.FileLock(self.folder / ".lock", thread_local=False, is_singleton=True)
        if rank() == 0:
            self.take_lock()
            restore_folder(self.folder / "best")
        choose = partial(choose_checkpoint, resume or RESUME, OUTPUT_DIR, self.say)
        self.checkpoint = broadcast_from_rank0(choose)  # to go on from
        seed_everything(SEED)

    def begin_part(self):
        """Another part of the training begins: best/ and patience know nothing of the one before."""
        self.evaluated_at = -1  # the step of the last evaluation
        self.best_value = -math.inf  # the highest yet, whose policy is in best/
        self.patience_value = -math.inf  # the last that was better by more than EARLY_STOPPING_THRESHOLD
        self.evals_since_best = 0  # evaluations since then
        self.halvings = 0  # of the learning rate, by LR_SCHEDULER_TYPE = "plateau"

    def take_lock(self):
        """Keep other processes out of OUTPUT_DIR; released when this one exits, even after SIGKILL."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.lock.acquire(blocking=False)
        except filelock.Timeout:
            raise UserError(f"OUTPUT_DIR = {OUTPUT_DIR!r} is in use by another run: set another") from None

    def register(self, state, models, optimizers, tokenizer):
        """What a checkpoint holds: state, a namespace of plain values and tensors; models and optimizers by
        folder; the tokenizer, if any. A resumed run's become what it holds."""
        self.state = state
        self.models = models
        self.optimizers = optimizers
        self.tokenizer = tokenizer
        if self.checkpoint:
            self.load_checkpoint(self.checkpoint)

    @contextmanager
    def session(self, headline):
        """The whole of training, files open, signals caught; at the end a checkpoint."""
        self.signal = None
        if rank() == 0:
            self.open_files()
        self.best_value = all_gather(self.best_value)[0]
        self.say(headline)
        handlers = {n: signal.signal(n, self.on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
            self.listen()
            self.save()
            self.say_the_end()
            all_gather()  # who ends first would take the others with it
        finally:
            self.lock.release(force=True)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def on_signal(self, number, frame):
        """Ctrl-C and SIGTERM end the run after the current step; a second Ctrl-C leaves at once."""
        if self.signal and number == signal.SIGINT:
            os._exit(130)
        self.signal = number
        if rank() == 0:
            print("\nStopping after this step, then saving; Ctrl-C again leaves at once", flush=True)

    def listen(self):
        """Whether a signal has come to one of the processes, whose random numbers must be the same here."""
        state = {key: x for key, x in get_rng_state().items() if key != "cuda"}  # each GPU draws for its part
        signals, drawn = zip(*all_gather((self.signal or 0, repr(state))))
        if len(set(drawn)) > 1:
            raise UserError("the processes drew different random numbers: give your functions a generator")
        self.stop_signal = max(signals) or None
        return self.stop_signal is not None

    def should_continue(self):
        out_of_patience = 0 < EARLY_STOPPING_PATIENCE <= self.evals_since_best
        return not self.listen() and not out_of_patience and self.step < self.total_steps

    def steps(self, evaluate, until=math.inf):
        """Yields the number of each step to do, which ends with record(); evaluates and saves between."""
        if self.evaluated_at < 0 and self.should_continue():
            self.evaluate(evaluate)
        self.clock = (time.perf_counter(), self.step)
        while self.should_continue() and self.step < until:
            yield self.step
            last = self.step in (until, self.total_steps)
            if last or EVAL_EVERY_N_STEPS and self.step % EVAL_EVERY_N_STEPS == 0:
                self.evaluate(evaluate)
            if SAVE_EVERY_N_STEPS and self.step % SAVE_EVERY_N_STEPS == 0 and self.step != until:
                self.save()

    @contextmanager
    def timed(self, what):
        """Count the seconds of the block as seconds/<what> of this step."""
        Run.doing = what
        started = time.perf_counter()
        yield
        self.times[what] = self.times.get(what, 0.0) + time.perf_counter() - started

    def record(self, metrics, count, samples, line, unit="tokens"):
        """A step of `count` units is done: log its metrics and some of its responses, and print its line."""
        self.step += 1
        seconds = {f"seconds/{what}": value for what, value in self.times.items()}
        speed = {f"{unit}_per_second": count / sum(self.times.values())} if self.times else {}
        self.write_metrics("train", {**metrics, **speed, **seconds})
        self.times = {}
        self.write("samples.jsonl", [json.dumps({"step": self.step, **sample}) for sample in samples])
        started, first = self.clock
        left = (time.perf_counter() - started) / (self.step - first) * (self.total_steps - self.step)
        self.say(f"{line}  step {self.step}/{self.total_steps}, {timedelta(seconds=round(left))} left")

    def write_metrics(self, phase, metrics):
        metrics = {k: v if math.isfinite(v) else None for k, v in metrics.items()}  # NaN is not JSON
        self.write("metrics.jsonl", [json.dumps({"phase": phase, "step": self.step, **metrics})])
        if self.wandb:
            self.wandb.log({f"{phase}/{key}": value for key, value in metrics.items()}, step=self.step)

    def write(self, name, lines):
        if rank() == 0:
            self.logs[name].writelines(line + "\n" for line in lines)

    def say(self, text):
        """One line to the terminal, in place of what tracked() says there, and to the log file."""
        if rank() > 0:
            return
        print("\r\033[K" * sys.stdout.isatty() + text, flush=True)
        self.unlogged.append(text)
        if self.log:
            print(*self.unlogged, sep="\n", file=self.log, flush=True)
            self.unlogged = []

    def count_skipped(self, finite, ids):
        """Count skipped optimizer steps in a row and name their prompts; five end the run."""
        self.skipped = 0 if finite else self.skipped + 1
        if not finite:
            names = " ".join(sorted(set(ids)))
            self.say(f"WARNING: step {self.step + 1} skipped, loss or gradient not finite: prompts {names}")
        if self.skipped == 5:
            raise UserError("five optimizer steps in a row were not finite: lower LEARNING_RATE")

    def evaluate(self, evaluate):
        """Log what evaluate() finds; keep the policy of the highest value; count those not better."""
        started = time.perf_counter()
        Run.doing = "evaluate"
        metrics = {key: x.item() if hasattr(x, "item") else x for key, x in (evaluate() or {}).items()}
        metrics = self.evaluation = all_gather(metrics)[0]  # what follows from them is the same on all
        self.evaluated_at = self.step
        if not metrics:
            return
        self.write_metrics("eval", {**metrics, "seconds/evaluate": time.perf_counter() - started})
        shown = (f"{k} {v:,}" if isinstance(v, int) else f"{k} {v:.3f}" for k, v in metrics.items())
        self.say(f"step {self.step}, held out: " + "  ".join(shown))
        value = next((metrics[key] for key in self.best_by if key in metrics), None)
        if value is None:
            raise UserError(f"evaluate() must give {' or '.join(self.best_by)}: best/ and patience follow it")
        self.evals_since_best += 1
        if value > self.patience_value + EARLY_STOPPING_THRESHOLD:
            self.patience_value = value
            self.evals_since_best = 0
        elif self.evals_since_best % PLATEAU_PATIENCE == 0:
            self.halvings += 1
        if value > self.best_value or self.later_of_equal and value == self.best_value:
            self.best_value = value
            policy = merged(self.models["policy"]) if globals().get("LORA_RANK") else self.models["policy"]
            fill = partial(self.fill_best, metrics, policy, policy.state_dict())
            if rank() == 0:
                write_whole(self.folder / "best", fill)

    def save(self):
        """Write step_N/, prune, redraw. All processes call state_dict(): see gather()."""
        folder = self.checkpoint = self.folder / f"step_{self.step}"  # train() again goes on from it
        if broadcast_from_rank0(folder.exists):
            return
        weights = {name: model.state_dict() for name, model in self.models.items()}
        optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        if rank() > 0:
            return
        self.say(f"Saving {folder}")
        write_whole(folder, partial(self.fill_checkpoint, weights, optimizers))
        for _, old in list_checkpoints(OUTPUT_DIR)[:-KEEP_LAST_N_CHECKPOINTS]:
            shutil.rmtree(old)
        self.draw_plots()

    def fill_checkpoint(self, weights, optimizers, folder):
        for name, model in self.models.items():
            self.save_model(model, folder / name, weights[name])
        for name, file in self.logs.items():
            fsync(file.name)
            self.log_lines[name] = Path(file.name).read_bytes().count(b"\n")
        run = {key: getattr(self, key) for key in self.saved}
        saved = {"trainer": self.name, "run": run, "state": vars(self.state), "optimizers": optimizers}
        torch.save({**saved, "rng": get_rng_state()}, folder / "training_state.pt")
        (folder / "config.json").write_text(json.dumps(settings(), indent=1))
        manifest = {str(p.relative_to(folder)): file_digest(p) for p in folder.rglob("*") if p.is_file()}
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))

    def fill_best(self, metrics, policy, weights, folder):
        self.save_model(policy, folder / "policy", weights)
        (folder / "metrics.json").write_text(json.dumps({"step": self.step, **metrics}, indent=1))

    def save_model(self, model, folder, weights=None):
        model.save_pretrained(folder, state_dict=weights)
        if self.tokenizer:
            self.tokenizer.save_pretrained(folder)

    def load_checkpoint(self, folder):
        """State, optimizers and generators as they were; the models were loaded from the same folder."""
        try:  # weights_only: nothing in the file is run
            saved = torch.load(folder / "training_state.pt", map_location="cpu", weights_only=True)
            before = json.loads((folder / "config.json").read_text())
            if saved["trainer"] != self.name or saved["state"].keys() != vars(self.state).keys():
                raise ValueError("it is no state of this trainer")
            if (prompts := saved["state"]["prompts"]) != self.state.prompts:
                raise ValueError(f"of {prompts} training prompts, there are {self.state.prompts}")
            vars(self).update({key: saved["run"][key] for key in self.saved})
            vars(self.state).update(saved["state"])
            for name, optimizer in self.optimizers.items():
                groups = optimizer.state_dict()["param_groups"]  # a changed constant counts from here on
                for group, old in zip(groups, saved["optimizers"][name]["param_groups"]):
                    group["params"] = old["params"]
                optimizer.load_state_dict({**saved["optimizers"][name], "param_groups": groups})
            set_rng_state(saved["rng"])
        except Exception as error:
            raise UserError(f"{folder} cannot be used, take another: {first_line(error)}") from None
        for key, value in settings().items():
            if before.get(key) != value and key not in ("RESUME", "OUTPUT_DIR", "STAGE"):
                self.say(f"Changed since the checkpoint: {key} was {before.get(key)!r}, is {value!r}")

    def open_files(self):
        """Move aside what a new start or a future given up has left, cut the logs back, open the files."""
        logs = self.folder / "logs"
        self.take_lock()  # again, where a training before this one has ended
        if USE_WANDB:
            import wandb

            options = {"project": WANDB_PROJECT, "dir": OUTPUT_DIR, "config": constants()}
            self.wandb = wandb.init(**options, id=self.wandb_id, resume="allow")
            self.wandb_id = self.wandb.id
        for stale in self.folder.glob("*.tmp"):  # what a kill left half written
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        if self.checkpoint and self.checkpoint.resolve().parent == self.folder.resolve():
            # a checkpoint beyond this one, broken or of a future given up, would be found by the next resume
            earlier = [path for step, path in list_checkpoints(OUTPUT_DIR) if step > self.step]
            best = self.folder / "best/metrics.json"
            if earlier and best.exists() and json.loads(best.read_text())["step"] > self.step:
                earlier.append(best.parent)
        else:
            earlier = [path for pattern in self.files for path in self.folder.glob(pattern)]
            self.log_lines = {}
        move_aside(earlier, OUTPUT_DIR, self.say)
        self.best_value = self.best_value if (self.folder / "best").exists() else -math.inf  # none: any wins
        logs.mkdir(exist_ok=True)
        for name in self.logs:  # cut to what they held at the checkpoint: each step stands in them once
            path = logs / name
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            write_whole(path, lambda tmp: tmp.write_bytes(b"".join(lines[: self.log_lines.get(name, 0)])))
            self.logs[name] = open(path, "a", buffering=1)
        self.log = open(logs / time.strftime("training_%Y%m%d_%H%M%S.log"), "a")
        config = {
            "constants": constants(),
            "processes": world_size(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "git_commit": subprocess.getoutput(f"git -C '{ROOT}' rev-parse HEAD 2>/dev/null"),
        }
        (self.folder / "training_config.json").write_text(json.dumps(config, indent=1))

    def draw_plots(self):
        records = read_metrics(self.folder / "logs/metrics.jsonl")
        if not records:
            return
        keys = dict.fromkeys(key for record in records for key in record if key not in ("phase", "step"))
        every = self.folder / "training_metrics_detailed.png"
        draw_plot(records, every, f"{self.title}: every metric", [(key, [key]) for key in keys])
        draw_plot(records, self.folder / f"{self.name}_metrics_with_entropy.png", self.title, self.panels)

    def say_the_end(self):
        best = self.folder / "best/policy"
        policy = best if best.exists() else self.checkpoint / "policy"
        end = f"Done at step {self.step} of {self.total_steps}. Plots: {OUTPUT_DIR}/*.png; policy: {policy}"
        stopped = self.stop_signal and f"Stopped at step {self.step}: run again to go on"
        self.say(stopped or self.last_word or end)
        if self.wandb:
            self.wandb.finish()


def train_main():
    run_main(PPOTrainer)


if __name__ == "__main__":
    train_main()
