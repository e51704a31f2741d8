"""GRPO and its family for language models, in one file: actor, rewards, a reference if wanted; no critic.

GROUP_SIZE responses to a prompt, of scores s_i, are each other's baseline (Shao et al. 2024, 2402.03300):

    A_i   = (s_i - mean of its group) / (std + 1e-4)  std of group, batch, or none (SCALE_REWARDS), ddof 1;
                                                      LEAVE_ONE_OUT: minus the others' mean (RLOO, 2402.14740)
    rho_t = pi(y_t) / pi_old(y_t),    clip_t = clip(rho_t, 1 - CLIP_RANGE, 1 + CLIP_RANGE_HIGH)

    LOSS_TYPE   loss of a token                                     mean
    grpo        -min(rho_t A, clip_t A)                             of each response, then of all
    dapo        the same                                            over all tokens (2503.14476)
    dr_grpo     the same, A not divided by a std                    sum / (rows * MAX_NEW_TOKENS) (2503.20783)
    gspo        the same, rho = exp(mean_t log rho_t)               of each response, then of all (2507.18071)
    cispo       -sg(min(rho_t, 1 + CLIP_RANGE_HIGH)) A log pi(y_t)  over all tokens (2506.13585)
    sapo        -4/tau sigmoid(tau (rho_t - 1)) A                   of each response, then of all (2511.20347)

Means are over an optimizer step's tokens or rows. sapo's tau is 1 where A > 0, else 1.05. DUAL_CLIP bounds
the loss where A < 0 (1912.09729). KL_COEF * kl_t - ENTROPY_COEF * H(pi_t) is added to each token's loss.
kl_t has the *value* of KL_ESTIMATOR (k1 = log pi/pi_ref, k2 = k1^2 / 2, k3 = exp(-k1) - 1 + k1;
joschu.net/blog/kl-approx.html) and always the *gradient* of k2, k1 * grad log pi, whose mean on policy is the
gradient of KL(pi || pi_ref). k1's own gradient has mean 0, and k3's the gradient of KL(pi_ref || pi).
Deliberate deviations from the papers:
- that gradient; and dapo is the default loss, with a symmetric clip unless CLIP_RANGE_HIGH is raised;
- sampling inverts the cumulative distribution at uniform numbers that are drawn ahead for the whole step, so
  at a fixed BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS, another BATCH_SIZE gives the same samples, and the
  same update except for rounding;
- what MASK_TRUNCATED or TOP_ENTROPY_FRACTION leaves out still counts in the loss's denominator.

Shapes: rows = responses of a step, prompts * GROUP_SIZE, those of a group side by side; R = tokens of the
longest response. A parameter `rows` beside a batch is a list of row numbers; batch.rows are records of the
data.

    python grpo/grpo.py                                 # edit the constants below, or: KEY=VALUE, @FILE
    python grpo/grpo.py ACTOR_MODEL=Qwen/Qwen2.5-0.5B-Instruct DTYPE=bfloat16 LEARNING_RATE=1e-6

Writes into OUTPUT_DIR: training_config.json, logs/ (training_*.log, metrics.jsonl, samples.jsonl), step_N/
checkpoints, best/policy/, two pictures. docs/reference.md defines every file and metric.

To change      see
the loss       policy_loss, GRPOTrainer.token_losses      the data       TRAIN_DATASETS; load_rows
the advantage  group_advantages, compute_advantages       a metric       GRPOTrainer.record, evaluate
the reward     REWARD_FUNCTIONS; compute_rewards          a plot         PLOT_PANELS; draw_plot
sampling       sampling_logprobs; rollout, generate       the schedule   learning_rate_scale
turns          ENVIRONMENT; converse                      the optimizer  make_optimizer
the KL         kl_loss                                    when to stop   train (run.is_stopped = True)
To log a metric of the responses add a reward function of weight 0. To add a constant write one line below;
one that may be None needs its type, as REFERENCE_MODEL has.
"""

import ast
import copy
import csv
import difflib
import faulthandler
import hashlib
import inspect
import io
import itertools
import json
import math
import operator
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakSet

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch loads: faster beside busy programs
if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):
    print(__doc__ + Path(__file__).read_text().split("= constants\n")[1].split("\n_VALID_RANGES")[0])
    sys.exit()
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
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoTokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.cache_utils import DynamicLayer, get_layer_types_and_kwargs
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer

ROOT = next((p for p in Path(__file__).resolve().parents if (p / "rewards").is_dir()), None)
if ROOT is None:
    sys.exit("grpo.py needs the folder rewards/ beside it or above it: copy it from the repository")
sys.path.insert(0, str(ROOT))
import rewards

# ================================================================ constants

STAGE = "train"  # train | evaluate: score EVALUATE_POLICY on EVAL_DATASETS, write eval_<name>.json, and end
EVALUATE_POLICY = "best"  # best, or step_N, of OUTPUT_DIR; or any model: a folder or a hub name
EVALUATE_SAMPLES = 8  # sampled responses per prompt in STAGE=evaluate: k of pass@k and majority@k

# Models: a folder or a hub name
ACTOR_MODEL = f"{ROOT}/data/tiny/policy"
REWARD_MODEL: str | None = None  # classifier with one label; None: reward functions alone
REFERENCE_MODEL: str | None = None  # None: a frozen copy of the initial actor, if KL_COEF > 0
LORA_RANK = 0  # 0: all weights are trained; > 0: only LoRA adapters of this rank (2106.09685)
LORA_ALPHA = 32.0  # an adapter's output is scaled by LORA_ALPHA / LORA_RANK
LORA_TARGETS = "all-linear"  # "all-linear" (every linear layer except the heads), or names: q_proj,v_proj
DTYPE = "float32"  # float32 | bfloat16 (autocast; trained weights and optimizer state stay float32)
DEVICE = "auto"  # auto | cpu | cuda | cuda:1 | mps
GRADIENT_CHECKPOINTING = False  # recompute activations in the update: less memory, a third more time

# Data sets: {"path", "type": "jsonl" | "csv" | "parquet" | "hub", "input", "output"}; on the hub also "name"
# and "split". "input" and "output" name columns; a dot reaches into nested records ("answers.text"). The
# input is a text or a list of chat messages
TRAIN_DATASETS = [
    {"path": f"{ROOT}/data/tiny/train.jsonl", "type": "jsonl", "input": "problem", "output": "solution"},
    {"path": f"{ROOT}/data/tiny/train.parquet", "type": "parquet", "input": "problem", "output": "solution"},
]
EVAL_DATASETS = [
    {"path": f"{ROOT}/data/tiny/test.jsonl", "type": "jsonl", "input": "problem", "output": "solution"},
]
PROMPT_TEMPLATE = "{input}"  # the question; the tokenizer's chat template, if it has one, wraps it
SYSTEM_PROMPT: str | None = None  # put before prompts that have none; needs a chat template
MAX_TRAIN_PROMPTS: int | None = None  # number of prompts read, from the first on; None: all
MAX_EVAL_PROMPTS: int | None = 200

# Rewards: score = REWARD_MODEL_WEIGHT * reward model + sum of weight * function. List names of functions in
# rewards/, or functions that you define above them: f(prompts, responses, answers) returns one number
# per response. prompts are texts or chats as the data has them, responses are texts, answers are texts, lists
# of texts or None. Further parameters of f: response_ids (token ids with EOS), messages, or the name of a
# data column. Rewards per token are ppo.py's; advantages per token: compute_advantages() may set (rows, R)
REWARD_FUNCTIONS = [("exact_answer", 1.0)]
REWARD_MODEL_WEIGHT = 1.0
OVERLONG_BUFFER = 0  # number of last tokens that are penalised, linearly (2503.14476, eq. 13); 0: none
OVERLONG_PENALTY = 1.0  # penalty of a response of MAX_NEW_TOKENS
ACCURACY_FUNCTION = "exact_answer"  # in rewards/; decides whether a response is correct (evaluation)
REWARD_TIMEOUT: float | None = 600.0  # seconds to score one batch of responses; None: no limit

# Rollout
BATCH_SIZE = 32  # prompts sampled and scored at a time
MICRO_BATCH_ROWS: int | None = None  # responses per forward and backward pass; None: chosen from the memory
GRADIENT_ACCUMULATION_STEPS = 1  # a step samples this many batches of BATCH_SIZE prompts; not micro-batches
GROUP_SIZE = 8  # responses per prompt, each other's baseline; 1: distillation, where only the KL trains
EVAL_SAMPLES = 4  # samples per prompt in evaluation: k of pass@k
MAX_PROMPT_TOKENS = 256  # longer prompts are left out, and counted
MAX_NEW_TOKENS = 64
TEMPERATURE = 1.0  # > 0; for top-p and the like edit sampling_logprobs

# Turns: a function(messages, response, answer) returns the next turn's text, or None at the end. The policy
# then responds again. Only its own tokens are trained (examples/turns.py)
ENVIRONMENT: "function | None" = None  # noqa: F821
ENVIRONMENT_ROLE = "user"  # user | tool: role of those turns in the chat template
ENVIRONMENT_THREADS = 1  # calls at the same time, for a function that waits for a sandbox or HTTP
MAX_TURNS = 4  # turns of the policy per episode, each up to MAX_NEW_TOKENS
MAX_CONTEXT_TOKENS = 512  # prompt and all turns; a longer episode ends and counts as truncated

# Optimisation
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0  # > 0
WEIGHT_DECAY = 0.0
USE_LR_SCHEDULER = False
LR_SCHEDULER_TYPE = "linear"  # linear | cosine (both to 0) | plateau (halves)
PLATEAU_PATIENCE = 2  # evaluations without a better reward before plateau halves
WARMUP_STEPS = 0  # linear warm-up, with or without a scheduler

# Algorithm
LOSS_TYPE = "dapo"  # grpo | dapo | dr_grpo | gspo | cispo | sapo: see the table above
GROUP_EPOCHS = 1  # passes over each step's responses
MINI_BATCHES = 1  # optimizer steps per pass
SCALE_REWARDS = "group"  # group | batch | none: whose standard deviation advantages are divided by
LEAVE_ONE_OUT = False  # the baseline is the mean of the other responses
RESAMPLE_FLAT_GROUPS = 0  # most rounds of replacing groups of equal scores by new prompts; 0: never
SKIP_FLAT_GROUPS = True  # leave rows without a gradient out of the update: it takes as little as half as long
CLIP_RANGE = 0.2  # > 0; gspo wants about 3e-4
CLIP_RANGE_HIGH = 0.2  # > 0; DAPO's clip-higher: 0.28; gspo about 4e-4; cispo about 4
DUAL_CLIP: float | None = None  # > 1, such as 3: for A < 0 the loss is at most DUAL_CLIP * |A|
ENTROPY_COEF = 0.0
TOP_ENTROPY_FRACTION = 1.0  # train only this fraction of tokens, those of highest entropy (2506.01939: 0.2)
MASK_TRUNCATED = False  # do not train responses that were cut
KL_COEF = 0.0  # weight of the KL in the loss; 0: no reference model is loaded, and the metric kl is 0
KL_ESTIMATOR = "k3"  # k1 | k2 | k3: the value that is logged; all have the same gradient
REFERENCE_SYNC_STEPS = 0  # steps between moves of the reference towards the actor (2404.09656); 0: never
REFERENCE_SYNC_ALPHA = 0.6  # reference = ALPHA * actor + (1 - ALPHA) * reference; 0 to 1

# Schedule
NUM_EPOCHS = 1  # passes over the prompts
MAX_STEPS: int | None = 40  # the run ends here or after NUM_EPOCHS, whichever is first; None: NUM_EPOCHS

# Bookkeeping
SAVE_EVERY_N_STEPS = 25  # 0: only at the end
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 10  # 0: only before the first and after the last step
EARLY_STOPPING_PATIENCE = 0  # evaluations without a better reward before the run ends; 0: all steps are run
EARLY_STOPPING_THRESHOLD = 0.0  # a gain above this resets patience; best/ keeps the highest reward
LOG_SAMPLES = 4  # responses per step written to samples.jsonl
RESUME = "ask"  # ask (yes without a terminal or under torchrun) | yes | no | path of a checkpoint or a run
OUTPUT_DIR = f"{ROOT}/checkpoints/grpo"
SEED = 1
USE_WANDB = False
WANDB_PROJECT = "hackable-rlhf"
# Panels of grpo_metrics_with_entropy.png: (label, metrics); training_metrics_detailed.png has all that change
PLOT_PANELS = [
    ("accuracy", ["accuracy_sampled", "accuracy_greedy", "pass@k"]),
    ("reward", ["reward"]),
    ("entropy", ["entropy"]),
    ("policy_loss", ["policy_loss"]),
    ("grad_norm", ["grad_norm"]),
    ("zero_variance_groups", ["zero_variance_groups"]),
    ("clip_fraction", ["clip_fraction"]),
    ("kl", ["kl"]),
    ("response_length", ["response_length"]),
    ("turns", ["turns"]),
]

# Processes: torchrun --nproc_per_node=2 grpo/grpo.py
DETERMINISTIC_GRADIENTS = True  # the same bits on any number of processes; False: a little faster
SHARD = "none"  # none | fsdp2: each process keeps a part of every model, but samples with a whole one
PROCESS_TIMEOUT = 1800.0  # seconds that a process waits for the others

_VALID_RANGES = {  # (smallest, largest) value or allowed words, where a bad value might go unnoticed
    "BATCH_SIZE GRADIENT_ACCUMULATION_STEPS MAX_PROMPT_TOKENS MAX_NEW_TOKENS EVAL_SAMPLES": (1, 1e12),
    "MAX_STEPS NUM_EPOCHS GROUP_EPOCHS MINI_BATCHES MAX_TURNS KEEP_LAST_N_CHECKPOINTS": (1, 1e12),
    "TEMPERATURE CLIP_RANGE CLIP_RANGE_HIGH MAX_GRAD_NORM LORA_ALPHA REWARD_TIMEOUT": (1e-6, 1e9),
    "PLATEAU_PATIENCE MAX_TRAIN_PROMPTS MICRO_BATCH_ROWS DUAL_CLIP EVALUATE_SAMPLES": (1, 1e12),
    "MAX_EVAL_PROMPTS WARMUP_STEPS LOG_SAMPLES SAVE_EVERY_N_STEPS EVAL_EVERY_N_STEPS WEIGHT_DECAY": (0, 1e12),
    "LEARNING_RATE KL_COEF OVERLONG_BUFFER OVERLONG_PENALTY LORA_RANK REFERENCE_SYNC_STEPS": (0, 1e6),
    "GROUP_SIZE ENVIRONMENT_THREADS": (1, 1e12),
    "RESAMPLE_FLAT_GROUPS": (0, 1e6),
    "TOP_ENTROPY_FRACTION REFERENCE_SYNC_ALPHA": (1e-6, 1),
    "STAGE": ["train", "evaluate"],
    "DTYPE": ["float32", "bfloat16"],
    "SHARD": ["none", "fsdp2"],
    "ENVIRONMENT_ROLE": ["user", "tool"],
    "LR_SCHEDULER_TYPE": ["linear", "cosine", "plateau"],
    "KL_ESTIMATOR": ["k1", "k2", "k3"],
    "LOSS_TYPE": ["grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo"],
    "SCALE_REWARDS": ["group", "batch", "none"],
}

_TUNED_FOR_TINY = {  # values that suit the shipped model and data, and what another model wants
    "MAX_STEPS": (40, "None: NUM_EPOCHS alone ends the run"),
    "MAX_PROMPT_TOKENS": (256, "longer prompts are left out"),
    "MAX_NEW_TOKENS": (64, "worked solutions need 256 to 1024"),
    "LEARNING_RATE": (1e-4, "1e-6 for whole pretrained models, 1e-5 for LoRA"),
    "OUTPUT_DIR": (f"{ROOT}/checkpoints/grpo", "the shipped model's run; give yours a folder of its own"),
}
_RENAMED = {"EXACT_SUMS": "DETERMINISTIC_GRADIENTS"}  # old names of constants, accepted as arguments
_INSTEAD_HERE = {"BETA": "KL_COEF"}  # constants of other trainers: what this file has instead
# When a run resumes, it logs every constant that has changed, except these
_MAY_CHANGE = "RESUME OUTPUT_DIR PLOT_PANELS STAGE EVALUATE_POLICY EVALUATE_SAMPLES".split()
# When one of these has changed, the scores of a resumed run do not compare with the earlier ones. Add a
# constant of yours that changes how responses are sampled or scored
_CHANGE_SCORES = """
    EVAL_DATASETS MAX_EVAL_PROMPTS REWARD_FUNCTIONS REWARD_MODEL REWARD_MODEL_WEIGHT
    ACCURACY_FUNCTION PROMPT_TEMPLATE SYSTEM_PROMPT MAX_PROMPT_TOKENS MAX_NEW_TOKENS TEMPERATURE
    OVERLONG_BUFFER OVERLONG_PENALTY REFERENCE_MODEL
    KL_ESTIMATOR ENVIRONMENT ENVIRONMENT_ROLE MAX_TURNS MAX_CONTEXT_TOKENS
""".split()

# ================================================================ the maths of GRPO


def sampling_logprobs(logits, temperature):
    """Returns log-probabilities (..., vocabulary) of the distribution that is sampled *and* trained: change
    it here (top-p, say), and the first ratios stay 1. A token that must not be sampled gets -inf."""
    return full_logprobs(logits, temperature)


def group_advantages(scores, group_size, scale, leave_one_out):
    """Returns the advantage of each response, (rows,). Equal scores of a group get zeros."""
    groups = scores.view(-1, group_size)
    # Without this, float32 rounds the mean of equal scores such as 0.7 to another number
    groups = groups - groups[:, :1]
    advantages = groups - groups.mean(1, keepdim=True)
    if leave_one_out:
        advantages = advantages * group_size / max(1, group_size - 1)  # s_i - mean of the others
    if scale != "none" and group_size > 1:
        std = groups.std(1, keepdim=True) if scale == "group" else scores.std()
        advantages = advantages / (std + 1e-4)
    return advantages.flatten()


def overlong_penalty(lengths, max_new_tokens, buffer):
    """Returns 0 up to max_new_tokens - buffer, then falls to -1 at max_new_tokens, (rows,)."""
    if not buffer:
        return torch.zeros_like(lengths)
    return ((max_new_tokens - buffer - lengths) / buffer).clamp(-1, 0)


def token_weights(mask, loss_type, max_new_tokens):
    """Returns the weight of each token, (rows, R). The loss of an optimizer step is the sum of weight * loss
    over all its rows."""
    if loss_type in ("grpo", "gspo", "sapo"):
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask)
    if loss_type == "dr_grpo":
        return mask / (len(mask) * max_new_tokens)
    return mask / mask.sum()


def policy_loss(
    logprobs, old_logprobs, advantages, mask, loss_type, clip_range, clip_range_high, dual_clip=None
):
    """Returns the loss of each token, by the table above, and its ratio, both (rows, R). advantages (rows, 1)
    or (rows, R). A type of yours also goes into token_weights, grpo_stats and _VALID_RANGES."""
    log_ratio = ((logprobs - old_logprobs) * mask).clamp(max=80)  # exp's inf would give NaN gradients
    if loss_type == "gspo":
        mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = mean.expand_as(mask)
    ratio = log_ratio.exp()
    if loss_type == "cispo":
        return -ratio.detach().clamp(max=1 + clip_range_high) * advantages * logprobs, ratio
    if loss_type == "sapo":  # its slope is 1 on policy, and falls to either side
        tau = torch.where(advantages > 0, 1.0, 1.05)
        return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages, ratio
    objective = torch.min(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range_high) * advantages)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.max(objective, dual_clip * advantages), objective)
    return -objective, ratio


def grpo_stats(ratio, mask, advantages, loss_type, clip_range, clip_range_high):
    """Returns what is logged of each token, a dict of (rows, R): whether CLIP_RANGE clips the ratio (in cispo
    only from above, in sapo never), the k3 estimate of KL(old || new), and |ratio - 1|."""
    ratio = torch.where(mask > 0, ratio, 1)
    clipped = ratio > 1 + clip_range_high
    if loss_type == "sapo":
        clipped = torch.zeros_like(clipped)
    elif loss_type != "cispo":
        clipped = torch.where(advantages > 0, clipped, ratio < 1 - clip_range)
    return {
        "clip_fraction": (clipped & (advantages != 0)).float(),
        "approx_kl": ratio - 1 - ratio.clamp(min=2e-9).log(),
        "ratio_deviation": (ratio - 1).abs(),
    }


def kl_loss(logprobs, ref_logprobs, estimator):
    """Returns the estimator's value with k2's gradient, (rows, R). A token that an edited sampling_logprobs()
    excludes by now has log-probability -1e30 and gets 0."""
    log_ratio = torch.where(logprobs > -1e29, logprobs - ref_logprobs, 0.0)
    k2 = 0.5 * log_ratio**2
    value = {"k1": log_ratio, "k2": k2, "k3": (-log_ratio).exp() - 1 + log_ratio}[estimator]
    return k2 + (value - k2).detach()


# ================================================================ the trainer


class GRPOTrainer:
    """Models, data and the algorithm; self.run has the files. resume_from_checkpoint overrides the constant
    RESUME: a path, "ask", "yes" or "no"."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        self.device = find_device()
        self.run = Run("grpo", resume_from_checkpoint, self.device)
        self.run.title = f"GRPO ({LOSS_TYPE}), {'/'.join(Path(ACTOR_MODEL).parts[-2:])}, seed {SEED}"
        pass_at_k = f"pass@{EVAL_SAMPLES}"
        for label, keys in PLOT_PANELS:
            if label != "turns" or ENVIRONMENT:
                self.run.panels.append((label, [key.replace("pass@k", pass_at_k) for key in keys]))
        # {name: (rows,)}, filled by compute_rewards() for the log. score_over_ranks() empties it before each
        # call and collects it afterwards
        self.reward_parts = {}
        self.steps_without_signal = 0  # in a row, in this start of the program; see record()
        self.load_models()
        self.distils = is_distillation(self)
        if self.distils:
            self.run.best_by = ["minus_kl"]
            self.run.log("Only the KL to REFERENCE_MODEL trains (distillation): best/ follows minus_kl")
        check_choices(self)
        self.train_rows = load_prompts(self, TRAIN_DATASETS, "TRAIN_DATASETS", MAX_TRAIN_PROMPTS)
        self.eval_rows = load_prompts(self, EVAL_DATASETS, "EVAL_DATASETS", MAX_EVAL_PROMPTS)
        check_environment(self)
        check_models(self.models_by_constant, self.train_rows, self.pad_id)
        # What a checkpoint keeps beside weights, optimizers and generators; order is this epoch's permutation
        self.state = SimpleNamespace(epoch=0, order=None, cursor=0, prompts=len(self.train_rows))
        self.run.register(self.state, self.models, self.optimizers, self.tokenizer)
        self.run.total_steps = last_step(self.state, self.run.step)

    def load_models(self):
        """The actor comes from the checkpoint if there is one; so does a reference that follows it."""
        checkpoint = self.run.checkpoint
        self.tokenizer = load_tokenizer(ACTOR_MODEL, "ACTOR_MODEL")
        self.actor = load_trained(self.run, "policy", AutoModelForCausalLM, ACTOR_MODEL, "ACTOR_MODEL")
        self.pad_id = padding_id(self.actor, self.tokenizer)
        self.models = {"policy": self.actor}  # saved in a checkpoint, by the name of their folder
        self.models_by_constant = {"ACTOR_MODEL": self.actor}  # all that read the tokenizer's ids
        self.reference = None
        if KL_COEF > 0 and LORA_RANK and not REFERENCE_MODEL:
            self.reference = self.actor  # without its adapter
        elif KL_COEF > 0:
            path = REFERENCE_MODEL or ACTOR_MODEL
            has_moved = checkpoint is not None and (checkpoint / "reference").exists()
            if has_moved:
                path = checkpoint / "reference"
            self.reference = load_model(AutoModelForCausalLM, path, "REFERENCE_MODEL", self.device)
            self.reference.requires_grad_(False)
            self.models_by_constant["REFERENCE_MODEL"] = self.reference
            if REFERENCE_SYNC_STEPS or has_moved:
                self.models["reference"] = self.reference
        self.reward_model, self.reward_tokenizer = load_reward_model(REWARD_MODEL, self.device)
        self.reward_functions = resolve_rewards(REWARD_FUNCTIONS, "REWARD_FUNCTIONS")
        _, self.accuracy_function, _ = resolve_rewards([(ACCURACY_FUNCTION, 1.0)], "ACCURACY_FUNCTION")[0]
        self.optimizers = {"policy": make_optimizer(self.actor, LEARNING_RATE)}

    # ------------------------------------------------------------ the algorithm

    def train(self):
        """Trains until the last step, a signal, or patience ends it. Returns the last evaluation."""
        run = self.run
        # session: lock, logs and signals; saves at the end
        with run.session(run_summary(self, GROUP_EPOCHS * MINI_BATCHES)):
            if run.needs_first_evaluation():
                run.log_evaluation(self.evaluate())
            while run.next_step():
                batch = self.rollout_and_score()
                self.compute_advantages(batch)
                metrics = self.update(batch)
                self.sync_reference()
                run.total_steps = last_step(self.state, run.step)  # fewer if resampling took prompts
                self.record(batch, metrics)
                if run.is_due(EVAL_EVERY_N_STEPS) or run.is_last_step():
                    run.log_evaluation(self.evaluate())
                if run.is_due(SAVE_EVERY_N_STEPS):
                    run.save()
        return run.evaluation

    def rollout_and_score(self):
        """Returns a step's responses with their scores. With RESAMPLE_FLAT_GROUPS new prompts replace groups
        of equal scores, as long as the run's epochs have prompts. batch.flat_groups is the fraction of flat
        groups before that."""
        prompts = next_rows(self.train_rows, self.state, BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS)
        batch = self.score(self.rollout(prompts))
        for _ in range(RESAMPLE_FLAT_GROUPS):
            is_flat = flat_groups(batch.scores)
            is_end = self.state.cursor == 0 and self.state.epoch >= NUM_EPOCHS
            if is_flat.any() and not is_end:
                prompts = next_rows(self.train_rows, self.state, int(is_flat.sum()))
                batch = replace_flat_groups(batch, is_flat, self.score(self.rollout(prompts)))
        return batch

    def rollout(self, prompts):
        """Samples GROUP_SIZE responses to each prompt. Returns a batch, its tensors (rows, ...)."""
        with self.run.timed("rollout"):
            # Drawn here, for the whole step: how it is cut into batches does not change the samples
            uniform = torch.rand(max_turns(), len(prompts) * GROUP_SIZE, MAX_NEW_TOKENS)
            return converse(self.actor, self.tokenizer, prompts, uniform, GROUP_SIZE)

    def score(self, batch):
        """Adds the scores of the responses, and the reference's log-probabilities of their tokens."""
        with self.run.timed("score"):
            batch.scores, batch.reward_parts = self.score_responses(batch)
            batch.flat_groups = flat_groups(batch.scores).float().mean().item()
            batch.ref_logprobs = self.reference_logprobs(batch)
        return batch

    @torch.no_grad()
    def reference_logprobs(self, batch):
        """Returns the log-probabilities of the responses, (rows, R), under the reference; without one the
        sampler's."""
        if not self.reference:
            return batch.logprobs
        with without_adapter(self.reference):
            return batch_logprobs(self.reference, batch, full_logprobs)

    def score_responses(self, batch):
        """Calls compute_rewards() with the responses of BATCH_SIZE prompts at a time. Returns the scores
        (rows,), less the penalty of long responses, and its reward_parts."""
        with full_parameters(self.reward_model):
            scores, reward_parts = score_over_ranks(self, "compute_rewards", self.compute_rewards, batch)
        penalty = overlong_penalty(batch.response_lengths.float(), MAX_NEW_TOKENS, OVERLONG_BUFFER)
        return scores.to(self.device) + OVERLONG_PENALTY * penalty, reward_parts

    def compute_rewards(self, prompts, responses, answers, **columns):
        """Returns the score of each response, (rows,); edit or override freely. columns: what reward
        functions take by name. What you put into self.reward_parts is logged."""
        total = torch.zeros(len(responses))
        if self.reward_model:
            shown = columns["turns"] if ENVIRONMENT else responses
            self.reward_parts["reward_model"] = self.reward_model_score(prompts, shown).cpu()
            total += REWARD_MODEL_WEIGHT * self.reward_parts["reward_model"]
        for name, function, weight in self.reward_functions:
            self.reward_parts[name] = call_reward(name, function, prompts, responses, answers, columns)
            total += weight * self.reward_parts[name]
        return total

    def reward_model_score(self, prompts, responses):
        """Returns the score of each response (or its turns), (rows,); given two texts, one number."""
        if isinstance(prompts, str):
            return self.reward_model_score([prompts], [responses])[0]
        return reward_model_scores(self.reward_model, self.reward_tokenizer, prompts, responses)

    def compute_advantages(self, batch):
        """Sets batch.advantages, (rows,), from each response's group. An edit may set (rows, R)."""
        scale = SCALE_REWARDS
        if LOSS_TYPE == "dr_grpo":
            scale = "none"
        batch.advantages = group_advantages(batch.scores, GROUP_SIZE, scale, LEAVE_ONE_OUT)

    def select_tokens(self, batch):
        """Sets batch.trained, (rows, R): 1 where a token is trained."""
        batch.trained = batch.response_mask.clone()
        if TOP_ENTROPY_FRACTION < 1:
            ordered = batch.entropies[batch.response_mask > 0].sort().values  # quantile() takes 2**24 at most
            # The lowest entropy that is trained; 1e-6 absorbs rounding
            threshold = ordered[math.ceil((1 - TOP_ENTROPY_FRACTION) * (len(ordered) - 1) - 1e-6)]
            batch.trained *= batch.entropies >= threshold
        if MASK_TRUNCATED:
            batch.trained *= ~batch.truncated[:, None]

    def update(self, batch):
        """Makes GROUP_EPOCHS passes of MINI_BATCHES optimizer steps. Returns the means of their metrics."""
        run = self.run
        schedule = LR_SCHEDULER_TYPE if USE_LR_SCHEDULER else None
        steps_done = max(0, run.step - 1)  # run.step is 0 before the first step
        scale = learning_rate_scale(steps_done, run.total_steps, WARMUP_STEPS, schedule, run.halvings)
        set_learning_rate(self.optimizers["policy"], LEARNING_RATE * scale)
        self.select_tokens(batch)
        batch.sampled_logprobs = batch.logprobs  # for the log: logprobs_again() may replace batch.logprobs
        steps = []
        with run.timed("update"):
            for _ in range(GROUP_EPOCHS):
                chunks = mini_batches(len(batch.rows))
                if LOSS_TYPE == "gspo" and DTYPE == "bfloat16" and not steps:
                    logprobs_again(self, batch, chunks)
                for rows in chunks:
                    steps.append(self.optimizer_step(batch, rows))
        check_first_ratio(steps[0], run.step)
        metrics = over_optimizer_steps(steps)
        metrics["first_ratio_deviation"] = steps[0]["max_ratio_deviation"]
        metrics["learning_rate"] = LEARNING_RATE * scale
        entropy = (batch.entropies * batch.response_mask).sum() / batch.response_mask.sum()
        metrics["entropy"] = entropy.item()  # of the policy that sampled
        return metrics

    def optimizer_step(self, batch, rows):
        """One optimizer step on `rows`, a list. The loss is that of all these rows, however they are cut into
        micro-batches. Returns the step's metrics."""
        step_index = to_device(rows, self.device)
        step_mask = batch.response_mask[step_index]
        step_weights = token_weights(step_mask, LOSS_TYPE, MAX_NEW_TOKENS) * batch.trained[step_index]
        batch.weights = torch.zeros_like(batch.response_mask).index_copy(0, step_index, step_weights)
        rows_to_train = rows_with_gradient(self, batch, rows)
        # KLs and log ratios are means over the tokens of these rows: of the other rows they are not known
        num_tokens_read = batch.response_mask[to_device(rows_to_train, self.device)].sum()
        gradients = GradientSum([self.actor])  # every model that is trained: others get no sum over processes
        for micro in gradients.deal(micro_batches(self.actor, batch, rows_to_train)):
            index = to_device(micro, self.device)
            width = max_response_length(batch, micro)  # R of this micro-batch
            mask = batch.response_mask[index, :width]
            weights = batch.weights[index, :width]

            logprobs, entropy = response_logprobs(self.actor, batch, micro, TEMPERATURE)
            losses, policy_losses, ratio, kl = self.token_losses(batch, micro, logprobs, entropy)
            gradients.backward(self.actor, (weights * losses).sum())

            gradients.log_means({"policy_loss": policy_losses}, weights, 1)  # weights have the denominator
            advantages = token_advantages(batch, index, width)
            trained = batch.trained[index, :width]
            stats = grpo_stats(ratio.detach(), mask, advantages, LOSS_TYPE, CLIP_RANGE, CLIP_RANGE_HIGH)
            gradients.log_max("max_ratio_deviation", stats.pop("ratio_deviation").max())
            # Rows that are left out count here as not clipped: A = 0, or none of their tokens is trained
            clipped = {"clip_fraction": stats.pop("clip_fraction")}
            gradients.log_means(clipped, trained, batch.trained[step_index].sum().clamp(min=1))
            log_ratio = (logprobs.detach() - batch.sampled_logprobs[index, :width]).clamp(-20, 20)
            stats |= {"kl": kl, "mean_abs_log_ratio": log_ratio.abs()}
            gradients.log_means(stats, mask, num_tokens_read)
        metrics = gradients.finish()
        row_names = [batch.rows[i]["id"] for i in rows]
        norms = clip_and_step(self.optimizers.values(), metrics["policy_loss"], self.run, row_names)
        return {**metrics, "grad_norm": norms[0]}

    def token_losses(self, batch, rows, logprobs, entropy):
        """Returns four (rows, R): the loss of each token, which the step sums with batch.weights; the
        policy's part of it; the ratio; the KL. Edit or override freely, but change and log nothing here:
        rows_with_gradient() calls it too, with shifted log-probabilities, to find the rows that it trains."""
        index = to_device(rows, self.device)
        width = logprobs.shape[1]
        mask = batch.response_mask[index, :width]
        old_logprobs = batch.logprobs[index, :width]
        advantages = token_advantages(batch, index, width)
        policy_losses, ratio = policy_loss(
            logprobs, old_logprobs, advantages, mask, LOSS_TYPE, CLIP_RANGE, CLIP_RANGE_HIGH, DUAL_CLIP
        )
        losses = policy_losses  # add a term here: a number per token, no mean
        kl = torch.zeros_like(ratio)
        if self.reference:
            kl = kl_loss(logprobs, batch.ref_logprobs[index, :width], KL_ESTIMATOR)
            losses = losses + KL_COEF * kl
        if ENTROPY_COEF:
            losses = losses - ENTROPY_COEF * entropy
        return losses, policy_losses, ratio, kl

    @torch.no_grad()
    def sync_reference(self):
        """Moves the reference towards the actor every REFERENCE_SYNC_STEPS steps."""
        if self.reference and self.run.is_due(REFERENCE_SYNC_STEPS):
            for ref, parameter in zip(self.reference.parameters(), self.actor.parameters()):
                ref.lerp_(parameter, REFERENCE_SYNC_ALPHA)

    # ------------------------------------------------------------ evaluation and what is logged

    def evaluate(self, prompts=None, answers=None, rows=None):
        """Returns metrics of greedy and sampled responses to prompts (texts or chats), or to rows (those of
        load_prompts()), or to the held-out rows. Override it to add metrics of yours to its own."""
        if rows is None:
            rows = self.eval_rows
        if prompts is not None:
            rows = encode_texts(self, prompts, answers, "evaluate")
        if not rows:
            return {}
        with self.run.timed("evaluate"):
            greedy, batch = self.respond_to(rows, EVAL_SAMPLES)
            metrics = {}
            if None not in column(rows, "answer"):
                correct = self.accuracy(batch).view(-1, EVAL_SAMPLES)
                metrics["accuracy_greedy"] = self.accuracy(greedy).mean().item()
                metrics["accuracy_sampled"] = metrics["pass@1"] = correct.mean().item()
                metrics[f"pass@{EVAL_SAMPLES}"] = correct.amax(1).mean().item()
            if self.distils:
                kl = kl_loss(batch.logprobs, self.reference_logprobs(batch), KL_ESTIMATOR)
                metrics["kl"] = ((kl * batch.response_mask).sum() / batch.response_mask.sum()).item()
                metrics["minus_kl"] = -metrics["kl"]
            scores, reward_parts = self.score_responses(batch)
        return {**metrics, **response_metrics(batch, scores, reward_parts), **turn_metrics(batch)}

    def respond_to(self, rows, num_samples):
        """Returns two batches: a greedy response to each row, and num_samples sampled ones. These have a
        random generator of their own, so that evaluating never changes the training."""
        generator = torch.Generator().manual_seed(SEED + 1)
        uniform = torch.rand(max_turns(), len(rows) * num_samples, MAX_NEW_TOKENS, generator=generator)
        greedy = converse(self.actor, self.tokenizer, rows, None)
        return greedy, converse(self.actor, self.tokenizer, rows, uniform, num_samples)

    def accuracy(self, batch):
        """Returns whether each response of a batch is correct, (rows,), in float64."""
        return score_over_ranks(self, "ACCURACY_FUNCTION", self.accuracy_function, batch)[0].double()

    def generate_response(self, prompt, greedy=True):
        """Returns one response to a prompt, a text or a chat; greedy=False samples with the global
        generator."""
        rows = encode_texts(self, [prompt], None, "generate_response")
        if not rows:
            raise UserError(f"the prompt is longer than MAX_PROMPT_TOKENS = {MAX_PROMPT_TOKENS}")
        uniform = None if greedy else torch.rand(max_turns(), 1, MAX_NEW_TOKENS)
        return converse(self.actor, self.tokenizer, rows, uniform).responses[0]

    def record(self, batch, metrics):
        """Logs the step's metrics, some of its responses, and its line on the terminal."""
        advantages, sizes = batch.advantages, batch.advantages.abs()
        if advantages.dim() == 2:  # an edit's, per token: the means of each response
            num_tokens = batch.response_mask.sum(1)
            advantages = (advantages * batch.response_mask).sum(1) / num_tokens
            sizes = (sizes * batch.response_mask).sum(1) / num_tokens
        metrics = {
            "epoch": self.state.epoch,
            **metrics,
            **response_metrics(batch, batch.scores, batch.reward_parts),
            **turn_metrics(batch),
            "advantage_abs": sizes.mean().item(),
            "zero_variance_groups": batch.flat_groups,
        }
        line = (
            f"Epoch {self.state.epoch}/{NUM_EPOCHS}: PL:{metrics['policy_loss']:.4f} "
            f"R:{metrics['reward']:.2f} A:{metrics['advantage_abs']:.2f} "
            f"E:{metrics['entropy']:.3f} LR:{metrics['learning_rate']:.2e}"
        )
        responses = batch.columns.get("turns", batch.responses)
        samples = sample_records(batch, responses, advantages)
        self.run.log_step(metrics, int(batch.response_mask.sum()), samples, line)
        count_signal(self, bool(batch.advantages.any()) or self.distils, "all responses to the same prompt")


# ================ machinery: models, data, sampling, files, processes. The algorithm ends here
# Edit it freely in a copy of your own. In the repository tools/copies.py keeps definitions of one name equal
# in all trainers; "# differs" marks one that is different on purpose, and says why.

# ---------------------------------------------------------------- loading models


def load_model(auto_class, path, constant, device, new_head=False, dtype=torch.float32):
    """Returns the model of a folder or hub name, in evaluation mode. Missing or unexpected weights are an
    error. With new_head it gets a head for one label. Weights of the head that the checkpoint lacks, or has
    in another shape, start at zero; those that fit are kept."""
    if (Path(path) / "adapter_config.json").exists():
        hint = "to resume its run set the LORA_RANK it had; as a model take its run's best/policy"
        raise UserError(f"{constant} = {str(path)!r} is a LoRA adapter: {hint}")
    config = load_pretrained(AutoConfig, path, constant)
    for part in (config, config.get_text_config()):
        for name, value in list(vars(part).items()):
            # Layers that recompute their activations run in training mode, so dropout must be 0 in the config
            if "drop" in name and type(value) is float:
                setattr(part, name, 0.0)
    if new_head:
        config.num_labels = 1
    options = {"config": config, "dtype": dtype, "output_loading_info": True}
    options["ignore_mismatched_sizes"] = new_head
    model, info = load_pretrained(auto_class, path, constant, **options)
    missing = set(info["missing_keys"]) | {key[0] for key in info["mismatched_keys"]}
    if new_head:  # the head may be missing or another one: only the body must be complete
        bad_keys = {key for key in missing if key.startswith(model.base_model_prefix + ".")}
    else:
        bad_keys = missing | set(info["unexpected_keys"])
    if bad_keys:
        names = ", ".join(sorted(bad_keys))
        raise UserError(f"{constant} = {str(path)!r}: missing or unexpected weights {names}")
    for name, parameter in model.named_parameters():
        if name in missing:
            parameter.data = torch.zeros_like(parameter)
        else:
            # Weights that are memory-mapped from a file may be unaligned, which changes a product's last bit
            parameter.data = parameter.data.clone()
    if model.config._attn_implementation == "sdpa" and attention_windows(model):
        model.set_attn_implementation("shared_prompts")
    model.eval()  # from here on, in the update too
    if is_sharded():
        return shard(model, device)
    return model.to(device)


def load_trained(run, name, auto_class, path, constant, new_head=False):
    """Returns a model that is trained: from the folder `name` of the run's checkpoint if there is one, else
    from path. With LORA_RANK it is the frozen model of path with an adapter, and with the new head."""
    saved = run.checkpoint / name if run.checkpoint else None
    if LORA_RANK:
        model = load_adapted(auto_class, path, constant, run.device, saved, new_head)
    elif saved:
        model = load_model(auto_class, saved, constant, run.device)
    else:
        model = load_model(auto_class, path, constant, run.device, new_head)
    if GRADIENT_CHECKPOINTING:  # activations are computed again in the backward pass; see GradientSum
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def load_tokenizer(path, constant):
    tokenizer = load_pretrained(AutoTokenizer, path, constant)
    if tokenizer.eos_token_id is None:
        raise UserError(f"{constant} = {str(path)!r}: its tokenizer has no EOS token; set eos_token in it")
    return tokenizer


def load_pretrained(auto_class, path, constant, **options):
    """Calls from_pretrained(). If that fails, the error names `constant`, which the user set to `path`."""
    try:
        return auto_class.from_pretrained(path, trust_remote_code=False, **options)
    except Exception as error:  # transformers, safetensors and tokenizers raise many types
        why = f"cannot be loaded ({first_line(error)})"
        if not Path(path).exists():
            why = f"no such folder, and the hub gave no model ({first_line(error)})"
        elif Path(path).is_dir() and not (Path(path) / "config.json").exists():
            why = "that folder holds no model, no config.json"
            found = sorted([*Path(path).glob("*/config.json"), *Path(path).glob("*/*/config.json")])
            if found:
                why += f"; {found[0].parent} does"
        raise UserError(f"{constant} = {str(path)!r}: {why}") from None


def vocab_size(model):
    """Returns how many token ids the model has an embedding for."""
    return len(model.get_input_embeddings().weight)


def padding_id(model, tokenizer):
    """Returns an id to pad with. The attention masks hide it, but the embedding must have it."""
    pad = tokenizer.pad_token_id
    if pad is None or pad >= vocab_size(model):
        return tokenizer.eos_token_id
    return pad


def max_positions(model):
    """Returns how many tokens the model can read; inf if its config has no bound. If its rotary positions
    change beyond some length (longrope, dynamic), that length is the bound: otherwise the distribution that
    is sampled would differ from the one that is trained."""
    config = model.config.get_text_config(decoder=True)
    bound = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for parameters in ropes:
        if parameters.get("rope_type") in ("longrope", "dynamic"):
            first = parameters.get("original_max_position_embeddings")
            return first or getattr(config, "original_max_position_embeddings", None) or bound
    if not isinstance(bound, int) or bound <= 0:
        return math.inf
    embeddings = getattr(getattr(model, "base_model", model), "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    if padding is not None:  # RoBERTa's positions begin after its padding id
        return bound - padding - 1
    return bound


def autocast(model):
    """Returns a context in which the model computes in DTYPE."""
    if DTYPE == "bfloat16":
        return torch.autocast(model.device.type, torch.bfloat16)
    return nullcontext()


# ---------------------------------------------------------------- checking models when they are loaded


def unbatched_logits(model, batch):
    """Returns the logits that logits_of_rows() returns, by the plainest way: one row at a time, without
    padding, attention mask or cache."""
    logits = []
    for prompt, response, _ in batch.sequences:
        ids = torch.tensor([prompt + response], device=model.device)
        logits.append(forward(model, ids, use_cache=False).logits[0, len(prompt) - 1 : -1])
    return torch.cat(logits)


def disagreement(model, compute):
    """compute() returns two tensors (tokens, ...) that should be equal. Returns "" if they differ by rounding
    alone, else a description. A real fault is about as large as the values: a wide tolerance finds it."""
    try:
        values, wanted = compute()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model that is not made for this may raise any type
        return f"it raises {type(error).__name__}: {first_line(error)}"
    difference = (values - wanted).float().reshape(len(values), -1)
    if model.dtype == torch.float32:
        tolerance = 1e-3
        difference = difference.abs().max()
    else:  # bfloat16 moves a few logits of a large vocabulary far, but not the mean over a position's logits
        tolerance = 0.1
        difference = difference.square().mean(1).sqrt().max()
    if difference <= tolerance * (1 + wanted.std(correction=0)):
        return ""
    return f"values of a token change by {difference:.2g} if other tokens or padding share its batch"


@torch.no_grad()
def check_models(models_by_constant, rows, pad_id):
    """Compares the actor's sampling and every model's scoring with unbatched_logits(), on four prompts cut to
    mixed lengths. A model that disagrees is refused. Where the faster ways that share prompts agree, they are
    used from here on. Draws none of the run's random numbers. models_by_constant: {constant: model}, the
    actor first."""
    actor = next(iter(models_by_constant.values()))
    prompts = [rows[i % len(rows)]["ids"][:length] for i, length in enumerate((32, 3, 17, 8))]
    prompts_twice = repeat_each(prompts, 2)
    eos_ids = torch.arange(0, vocab_size(actor), 7, device=actor.device)  # rows finish at different times
    uniform = torch.rand(8, 10, generator=torch.Generator().manual_seed(0)).to(actor.device)
    batch = None  # what sampled_and_scored() sampled; the models' scores of it are compared below

    def sampled_and_scored():
        nonlocal batch
        settings = (2, 10, 1.5, eos_ids, pad_id)  # group size, most new tokens, temperature, ids
        ids, lengths, logprobs, *_ = generate(actor, prompts, uniform, *settings)
        responses = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist())]
        batch = make_batch(prompts_twice, responses, actor.device)
        tokens = batch.response_mask.nonzero(as_tuple=True)
        wanted = sampling_logprobs(unbatched_logits(actor, batch), 1.5)
        return logprobs[tokens], wanted.gather(1, ids[tokens][:, None]).squeeze(1)

    def disagreement_of(model, logits_of):
        def compute():
            return logits_of(model, batch, range(8))[0], unbatched_logits(model, batch)

        return disagreement(model, compute)

    # Sampling: with shared prompts where that agrees, else without
    with full_parameters(actor):
        sampling_fault = "not tried"  # "": the model agrees
        if actor.config._attn_implementation == "shared_prompts":
            _SHARED_DECODING.add(actor)
            sampling_fault = disagreement(actor, sampled_and_scored)
        if sampling_fault:
            _SHARED_DECODING.discard(actor)
            sampling_fault = disagreement(actor, sampled_and_scored)
    # Scoring, of every model
    for constant, model in models_by_constant.items():
        precision = nullcontext()
        if model.dtype != torch.float32:
            precision = autocast(model)
        with full_parameters(model), precision:
            # A new head is zero, so all its values would be equal: fill it for this comparison
            zeros = [p for p in model.parameters() if not p.any()]
            for parameter in zeros:
                parameter.copy_(torch.linspace(-0.02, 0.02, parameter.numel()).view_as(parameter))
            fault = sampling_fault if model is actor else ""
            fault = fault or disagreement_of(model, logits_of_rows)
            if not fault and not disagreement_of(model, logits_of_shared_prompts):
                _SHARED_SCORING.add(model)
            else:
                _SHARED_SCORING.discard(model)
            for parameter in zeros:
                parameter.zero_()
        if fault:
            fault += ". It must be causal and decode with a cache"
            raise UserError(f"{constant}: a {model.config.model_type!r} model cannot be used here, {fault}")


# ---------------------------------------------------------------- batches and micro-batches


def pad_left(rows, value):
    """Returns lists of ids as one tensor, (rows, length of the longest)."""
    width = max(map(len, rows))
    return torch.tensor([[value] * (width - len(row)) + list(row) for row in rows])


def pad_right(rows, value, multiple=1):
    """Returns lists of ids as one tensor, (rows, length of the longest, rounded up to a multiple)."""
    width = math.ceil(max(map(len, rows)) / multiple) * multiple
    return torch.tensor([list(row) + [value] * (width - len(row)) for row in rows])


def to_device(values, device):
    """Returns a list of numbers, or a CPU tensor, as a tensor on the device. A copy to a GPU does not
    block."""
    return torch.as_tensor(values).to(device, non_blocking=torch.device(device).type == "cuda")


def make_batch(prompts, responses, device):
    """Returns a batch of prompts and responses, lists of ids. On the host it has batch.sequences, one tuple
    per row: prompt ids, response ids, and which of these tokens the policy sampled, by index: here all. Its
    tensors on the device are (rows,) or (rows, R), R being the longest response."""
    lengths = to_device(list(map(len, responses)), device)
    ids = to_device(pad_right(responses, 0), device)
    return SimpleNamespace(
        sequences=[(p, response, range(len(response))) for p, response in zip(prompts, responses)],
        response_ids=ids,
        response_lengths=lengths,
        response_mask=(torch.arange(ids.shape[1], device=device) < lengths[:, None]).float(),
    )


def max_response_length(batch, rows):
    return max(len(batch.sequences[i][1]) for i in rows)


def micro_batch_rows(model, batch):
    """Returns how many rows are read at a time: MICRO_BATCH_ROWS, or the rows of BATCH_SIZE prompts, but at
    most 64, and fewer where their logits would pass 64 MiB. On a GPU the bound is 1/16 of its memory, rounded
    down to a power of two, so that all processes choose the same number."""
    if MICRO_BATCH_ROWS:
        return MICRO_BATCH_ROWS
    max_bytes = 2**26
    if model.device.type == "cuda":
        memory = torch.cuda.mem_get_info(model.device)[1]
        max_bytes = 2 ** (memory.bit_length() - 1) // 16
    row_bytes = 4 * model.config.get_text_config().vocab_size * batch.response_mask.shape[1]
    return max(1, min(64, BATCH_SIZE * GROUP_SIZE, max_bytes // row_bytes))


def micro_batches(model, batch, rows=None):
    """Cuts rows (None: all) into micro-batches, lists of row numbers. Rows of one prompt stay together where
    they fit, because the prompt is read once for all of them. Prompts with the most tokens, responses
    included, come first."""
    if rows is None:
        rows = range(len(batch.sequences))
    size = micro_batch_rows(model, batch)
    if size > GROUP_SIZE:
        size = size // GROUP_SIZE * GROUP_SIZE  # whole groups
    prompts = {i: tuple(batch.sequences[i][0]) for i in rows}
    num_tokens = Counter()  # {prompt: tokens of all its rows}
    for i in rows:
        num_tokens[prompts[i]] += len(prompts[i]) + len(batch.sequences[i][1])
    order = sorted(rows, key=lambda i: (num_tokens[prompts[i]], len(prompts[i]), prompts[i]), reverse=True)
    return [order[i : i + size] for i in range(0, len(order), size)]


# ---------------------------------------------------------------- sampling


def full_logprobs(logits, temperature):
    """Returns log-probabilities (..., vocabulary) over all tokens, in float32. A reference model is scored by
    these, also where sampling_logprobs() is edited."""
    logits = logits.float()
    if temperature != 1:
        logits = logits / temperature
    return logits.log_softmax(-1)


def entropy_of(logprobs):
    """Returns the entropy (...) of log-probabilities (..., vocabulary), in nats."""
    return -(logprobs.exp() * logprobs.clamp(min=-1e30)).sum(-1)  # without clamp, 0 * -inf would be NaN


def find_in_cdf(weights, fraction):
    """Returns the index at which the cumulative sum of weights (rows, n) passes fraction (rows, 1) of the
    total, and by how much it passes, two (rows, 1)."""
    cumulative = weights.double().cumsum(-1)
    target = fraction * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).clamp(max=weights.shape[1] - 1)
    return index, cumulative.gather(-1, index) - target


def sample_tokens(probabilities, uniform):
    """Returns one id per row: inverts the cumulative distribution of probabilities (rows, vocabulary) at
    uniform (rows,) in [0, 1). It first finds a block of 128 ids, then the id inside: four times as fast as a
    search over a large vocabulary."""
    if probabilities.device.type == "mps":  # has no float64
        return sample_tokens(probabilities.cpu(), uniform.cpu()).to(probabilities.device)
    padding = -probabilities.shape[1] % 128
    blocks = torch.nn.functional.pad(probabilities, (0, padding)).unflatten(1, (-1, 128))
    block_sums = blocks.sum(-1)
    block, overshoot = find_in_cdf(block_sums, uniform.double().unsqueeze(-1))
    # Where the target lies inside its block, as a fraction of the block's sum
    fraction = (1 - overshoot / block_sums.gather(-1, block)).clamp(0, 1 - 2**-40)  # below 1
    index, _ = find_in_cdf(blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, 128)).squeeze(1), fraction)
    return (block * 128 + index).squeeze(-1).clamp(max=probabilities.shape[1] - 1)


def forward(model, ids, shared_prompts=None, **options):
    """Returns the model's output for ids (rows, T), with those of the options that its forward() takes.
    shared_prompts is a keyword that transformers' models hand on to shared_prompt_attention()."""
    parameters = inspect.signature(model.forward).parameters
    options = {key: value for key, value in options.items() if key in parameters}
    if shared_prompts is not None:
        options["shared_prompts"] = shared_prompts
    return model(input_ids=ids, **options)


class PreallocatedCacheLayer(DynamicLayer):
    """A cache layer that keeps its keys and values in larger buffers. transformers' own layer copies all keys
    at every token, which took 39% of a rollout's time (docs/lab/speed.md)."""

    def __init__(self, layer):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.buffers = (layer.keys, layer.values)  # update() makes them larger
        self.keys, self.values = self.buffers

    def update(self, keys, values, *args, **kwargs):
        before = self.keys.shape[2]
        after = before + keys.shape[2]
        if after > self.buffers[0].shape[2]:
            padding = (0, 0, 0, 16 + after // 2)  # half as long again
            self.buffers = [torch.nn.functional.pad(buffer, padding) for buffer in self.buffers]
        for buffer, new in zip(self.buffers, (keys, values)):
            buffer[:, :, before:after] = new
        self.keys, self.values = (buffer[:, :, :after] for buffer in self.buffers)
        return self.keys, self.values

    def reorder_cache(self, rows):
        length = self.keys.shape[2]
        self.buffers = [buffer.index_select(0, rows) for buffer in self.buffers]
        self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)


class Decoder:
    """Decodes with the model's own cache. Each prompt, a list of ids, is read once; then group_size rows
    continue it. self.logits (rows, vocabulary) predict each row's next token."""

    def __init__(self, model, prompts, group_size, pad_id):
        ids = to_device(pad_left(prompts, pad_id), model.device)  # (prompts, P)
        width = ids.shape[1]
        self.model = model
        self.positions = to_device(list(map(len, prompts)), model.device)  # of each row's next token
        self.mask = (torch.arange(width, device=model.device) >= width - self.positions[:, None]).long()
        self.cache = None
        self.shared_prompts = None
        self.read(ids, (self.mask.cumsum(1) - 1).clamp(min=0), self.mask)
        self.replace_cache_layers()
        self.select_rows(np.arange(len(prompts)).repeat(group_size))

    def replace_cache_layers(self):
        """Puts faster layers in place of transformers' own, where these are plain (no sliding window)."""
        layers = getattr(self.cache, "layers", [])
        plain = [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer and layer.is_initialized]
        self.needs_mask = True  # False if all layers are SharedPromptLayers, which hide the padding
        if self.model in _SHARED_DECODING:
            shared_layers = {}
            for i in plain:
                shared_layers[i] = layers[i] = SharedPromptLayer(layers[i])
            self.shared_prompts = SharedPrompts(shared_layers, self.mask)
            self.needs_mask = len(plain) < len(layers)
        else:
            for i in plain:
                layers[i] = PreallocatedCacheLayer(layers[i])

    def read(self, ids, positions, mask):
        cache = {"past_key_values": self.cache, "cache_params": self.cache}
        options = {"attention_mask": mask, "position_ids": positions, "logits_to_keep": 1}
        out = forward(self.model, ids, self.shared_prompts, **options, **cache, use_cache=True)
        self.cache = getattr(out, "past_key_values", None) or out.cache_params
        self.logits = out.logits[:, -1]

    def next(self, tokens):
        """Appends one token to each row, (rows,). Returns the logits (rows, vocabulary) after it."""
        mask = None
        if self.needs_mask:
            self.mask = mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        self.read(tokens[:, None], self.positions[:, None], mask)
        self.positions = self.positions + 1
        return self.logits

    def select_rows(self, rows):
        """Continues with these rows, a list or an array in which a row may stand several times. Returns them
        as a tensor."""
        index = to_device(rows, self.mask.device)
        if self.shared_prompts:
            self.shared_prompts.select_rows(rows)
        self.cache.reorder_cache(index)
        self.mask = self.mask[index]
        self.positions = self.positions[index]
        self.logits = self.logits[index]
        return index


# Number of tokens between checks for finished rows, because a GPU must wait at each check
_EOS_CHECK_EVERY = {"cpu": 1, "cuda": 16, "mps": 16}


# differs: entropies, which TOP_ENTROPY_FRACTION needs
@torch.no_grad()
def generate(model, prompts, uniform, group_size, max_new_tokens, temperature, eos_ids, pad_id):
    """Samples group_size responses to each prompt, a list of ids; rows of one prompt are neighbours.

    uniform (rows, max_new_tokens) decides every token; None takes the likeliest one. Returns ids (rows,
    max_new_tokens), lengths (rows,), and, in the shape of ids, each id's log-probability in the sampling
    distribution and that distribution's entropy. A row holds its first EOS id, and padding after it. A row
    that was cut holds no EOS id."""
    device = model.device
    check_every = _EOS_CHECK_EVERY[device.type]
    decoder = Decoder(model, prompts, group_size, pad_id)
    rows = torch.arange(len(prompts) * group_size, device=device)  # rows of the result that are decoded
    ids = torch.full((len(rows), max_new_tokens), pad_id, device=device)
    logprobs, entropies = torch.zeros(2, len(rows), max_new_tokens, device=device)
    finished = torch.zeros_like(rows, dtype=torch.bool)
    pending = []  # since the last check, of each token: ids, log-probabilities, entropies, (unfinished rows,)
    for t in progress(range(max_new_tokens), "tokens"):
        distribution = sampling_logprobs(decoder.logits, temperature).clamp_(min=-1e30)  # (rows, vocabulary)
        probabilities = distribution.exp()
        if uniform is None:
            tokens = distribution.argmax(-1)
        else:
            tokens = sample_tokens(probabilities, uniform[rows, t])
        chosen = distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        pending.append((tokens, chosen, -(probabilities * distribution).sum(-1)))
        is_last = t + 1 == max_new_tokens
        # Every check_every tokens: store what is pending, then drop the rows that are finished
        if (t + 1) % check_every == 0 or is_last:
            columns = slice(t + 1 - len(pending), t + 1)
            for result, values in zip((ids, logprobs, entropies), zip(*pending)):
                result[rows, columns] = torch.stack(values, 1)
            pending = []
            if is_last:
                break
            finished |= torch.isin(ids[rows, columns], eos_ids).any(1)
            unfinished = np.flatnonzero(finished.cpu().numpy() == 0).tolist()
            if not unfinished:
                break
            if len(unfinished) <= 0.75 * len(rows):  # dropping rows copies the cache: drop many at once
                keep = decoder.select_rows(unfinished)
                rows = rows[keep]
                tokens = tokens[keep]
                finished = finished[keep]
        decoder.next(tokens)
    is_eos = torch.isin(ids, eos_ids).long()
    after_eos = is_eos.cumsum(1) > is_eos  # an EOS stands before this token
    logprobs = logprobs.masked_fill(after_eos, 0)
    entropies = entropies.masked_fill(after_eos, 0)
    return ids.masked_fill(after_eos, pad_id), (~after_eos).sum(1), logprobs, entropies


# ---------------------------------------------------------------- decoding with shared prompts
# Keys and values of a prompt are kept once for all its responses: a rollout takes 0.44 to 0.7 of the time
# (docs/lab/speed.md). Whoever deletes this section must also take the uses of what it defines, and of
# shared_prompts, out of load_model(), check_models(), forward() and Decoder.

_SHARED_DECODING = WeakSet()  # models for which check_models() found that decoding this way is right


class SharedPromptLayer(PreallocatedCacheLayer):
    """A cache layer of which keys and values are those of the responses alone. `prompt` holds the keys and
    the values of the prompts, two (heads, prompts, P, width)."""

    def __init__(self, layer):
        super().__init__(layer)
        self.prompt = [x.transpose(0, 1).contiguous() for x in self.buffers]
        self.buffers = [x[:, :, :0] for x in self.buffers]
        self.keys, self.values = self.buffers

    def get_seq_length(self):
        return self.prompt[0].shape[2] + self.keys.shape[2]


class SharedPrompts:
    """Which prompt each row continues. A model hands it on to shared_prompt_attention() as a keyword.

    Attention to the prompts takes the rows in groups of equal size. For example, rows 0 to 3, of which three
    continue the first prompt and one the second, take the six slots of two groups:
        row_of_slot = [0, 1, 2,  3, 3, 3]    slot_of_row = [0, 1, 2, 3]    (slots 4 and 5 are padding)
    """

    def __init__(self, layers, mask):
        self.layers = layers  # {layer_idx: SharedPromptLayer}
        self.bias = torch.where(mask[:, None] > 0, 0.0, -math.inf)  # (prompts, 1, P): hides padding
        self.prompt_of_row = np.arange(len(mask))

    def select_rows(self, rows):
        """Continues with these rows, a list in which rows of one prompt are neighbours."""
        outputs = {"return_index": True, "return_inverse": True, "return_counts": True}
        prompts, first_row, prompt_of_row, counts = np.unique(self.prompt_of_row[rows], **outputs)
        size = int(counts.max())
        # A prompt's slots: its rows, then rows of the next prompts, which are never read
        row_of_slot = np.minimum(first_row[:, None] + np.arange(size), len(rows) - 1).ravel()
        slot_of_row = prompt_of_row * size + np.arange(len(rows)) - first_row[prompt_of_row]
        self.group_size, self.prompt_of_row = size, prompt_of_row
        device = self.bias.device
        self.row_of_slot, self.slot_of_row = to_device(row_of_slot, device), to_device(slot_of_row, device)
        kept = to_device(prompts, device)
        self.bias = self.bias[kept]
        for layer in self.layers.values():
            layer.prompt = [x.index_select(1, kept) for x in layer.prompt]

    def by_prompt(self, x):
        """(rows, heads, n, width) to (heads, prompts, group size * n, width). heads: of the keys; n: query
        heads that share one of them."""
        grouped = x.transpose(0, 1).index_select(1, self.row_of_slot)
        return grouped.unflatten(1, (-1, self.group_size)).flatten(2, 3)

    def by_row(self, x):
        """(heads, prompts, group size * n, width) to (rows, heads, n, width); see by_prompt()."""
        slots = x.unflatten(2, (self.group_size, -1)).flatten(1, 2)
        return slots.index_select(1, self.slot_of_row).transpose(0, 1)


def shared_prompt_attention(module, query, key, value, attention_mask, shared_prompts=None, **options):
    """Computes transformers' sdpa attention. With shared prompts, which occur in decoding alone, each row has
    one query token: it gets one softmax over the row's prompt and its response. Query heads that share a key
    head stand side by side. attention_mask must keep its name: some models pass it as a keyword."""
    if shared_prompts is None or module.layer_idx not in shared_prompts.layers:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    by_prompt, by_row = shared_prompts.by_prompt, shared_prompts.by_row
    prompt_keys, prompt_values = shared_prompts.layers[module.layer_idx].prompt
    rows, heads, _, width = query.shape
    query = query.reshape(rows, key.shape[1], -1, width) * (options.get("scaling") or width**-0.5)
    prompt_scores = by_row(by_prompt(query) @ prompt_keys.mT + shared_prompts.bias)
    scores = torch.cat([prompt_scores, query @ key.mT], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    prompt_weights, response_weights = weights.split([prompt_scores.shape[-1], key.shape[2]], -1)
    out = response_weights @ value + by_row(by_prompt(prompt_weights) @ prompt_values)
    return out.reshape(rows, 1, heads, -1), None


AttentionInterface.register("shared_prompts", shared_prompt_attention)
AttentionMaskInterface.register("shared_prompts", AttentionMaskInterface()["sdpa"])


# ---------------------------------------------------------------- scoring


def logits_at(model, ids, places, **options):
    """Returns logits (tokens, labels) of ids (rows, T) at some places, a pair of (tokens,): rows and columns.
    The output layer, which may be large, is computed at these places alone."""
    head = model.get_output_embeddings()
    if head is None:
        return forward(model, ids, use_cache=False, **options).logits[places]
    # Hidden states, (rows, T, width), become those of the places, (1, tokens, width)
    hook = head.register_forward_pre_hook(lambda module, inputs: inputs[0][places][None])
    try:
        return forward(model, ids, use_cache=False, **options).logits[0]
    finally:
        hook.remove()


def logits_of_rows(model, batch, rows):
    """Returns the logits that predict the response tokens which the policy sampled, (tokens, labels), row
    after row, and where each token stands, two (tokens,): its row's index in `rows`, and its index in the
    response. Each row is read with its prompt and padded on the right, where a causal model cannot see: no
    mask, no positions."""
    sequences = []  # of each row: prompt and response
    places = []  # of each token: its row, where it is predicted, its index in the response
    for i, row in enumerate(rows):
        prompt, response, sampled = batch.sequences[row]
        sequences.append(prompt + response)
        places += [(i, len(prompt) - 1 + t, t) for t in sampled]
    ids = to_device(pad_right(sequences, 0), model.device)
    row, predicted_at, token = to_device(places, model.device).T
    return logits_at(model, ids, (row, predicted_at)), (row, token)


def response_logits(model, batch, rows):
    """Returns logits_of_rows(), computed in the faster way where check_models() found that it is right."""
    if model in _SHARED_SCORING:
        return logits_of_shared_prompts(model, batch, rows)
    return logits_of_rows(model, batch, rows)


def response_logprobs(model, batch, rows, temperature, distribution=None):
    """Returns the log-probabilities of the responses' ids in a distribution (None: sampling_logprobs) and the
    distribution's entropy, two (rows, R), float32, 0 where response_mask is 0. Only one tensor of the logits'
    size is kept for the backward pass: the entropy's is computed again."""
    with autocast(model):
        logits, places = response_logits(model, batch, rows)
    if distribution is None:
        distribution = sampling_logprobs
    ids = batch.response_ids[to_device(rows, logits.device)][places]
    vocab_logprobs = distribution(logits, temperature)  # (tokens, vocabulary)
    logprobs = vocab_logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1).clamp(min=-1e30)
    entropy = checkpoint(entropy_of, vocab_logprobs, use_reentrant=False, preserve_rng_state=False)
    zeros = torch.zeros(len(rows), max_response_length(batch, rows), device=logits.device)
    return zeros.index_put(places, logprobs), zeros.index_put(places, entropy)


@torch.no_grad()
def map_micro_batches(compute, model, batch):
    """Returns compute(model, batch, rows), (micro-batch, R), of all rows of a batch as one tensor (rows, R).
    The processes share the micro-batches."""
    micros = micro_batches(model, batch)
    result = torch.zeros_like(batch.response_mask)
    with full_parameters(model):
        for rows, values in zip(micros, map_over_ranks(micros, partial(compute, model, batch))):
            result[to_device(rows, result.device), : values.shape[1]] = values.to(model.device)
    return result


def batch_logprobs(model, batch, distribution):
    """Returns the log-probabilities of a batch's responses under a model, (rows, R), without a gradient."""

    def compute(model, batch, rows):
        return response_logprobs(model, batch, rows, TEMPERATURE, distribution)[0]

    return map_micro_batches(compute, model, batch)


# ---------------------------------------------------------------- scoring with shared prompts
# A prompt is read once with all its responses. Whoever deletes this section must keep attention_windows()
# and take what names _SHARED_SCORING or logits_of_shared_prompts out of response_logits() and check_models().

_SHARED_SCORING = WeakSet()  # models for which check_models() found that scoring this way is right
_RESPONSE_TOKENS = 1024  # most response tokens in one sequence, because its attention is dense


def attention_windows(model):
    """Returns {layer type: how many tokens back a query sees; None: all} from the model's config. Returns {},
    so that prompts are not shared, if the config has other types of layers, or if it names a window but no
    layer type has one."""
    try:
        config = model.config.get_text_config(decoder=True)
        layer_types, options = get_layer_types_and_kwargs(config)
    except AttributeError:  # such as Mamba's
        return {}
    windows = {name: option.get("sliding_window") for name, option in zip(layer_types, options)}
    if not windows.keys() <= {"full_attention", "sliding_attention"}:
        return {}
    sizes = [value for key, value in vars(config).items() if key.endswith(("window", "window_size"))]
    has_window = any(type(size) is int and size > 0 for size in sizes)
    if has_window and not any(windows.values()):
        return {}
    return windows


def logits_of_shared_prompts(model, batch, rows):
    """Returns what logits_of_rows() returns. Neighbouring rows of one prompt are read in one sequence: the
    prompt, then the responses one after another. Each response's positions continue the prompt's, and a
    four-dimensional mask shows each token its prompt and its own response alone. For example, a prompt of
    two tokens with two responses of two and three tokens (nothing is predicted after a last token):
        ids        p p  a  b b
        positions  0 1  2  2 3
        owner      0 0  1  2 2
    """
    device = model.device
    sequences = []  # of each: ids, their positions, their owners (0: the prompt, i + 1: row i)
    places = []  # of each token: its row, its sequence, where it is predicted, its index in the response
    last_prompt = None
    for i, row in enumerate(rows):
        prompt, response, sampled = batch.sequences[row]
        prompt_length = len(prompt)
        added = len(response) - 1  # tokens: the last one is only predicted, so it is not read
        if prompt != last_prompt or len(sequences[-1][0]) + added > prompt_length + _RESPONSE_TOKENS:
            last_prompt = prompt
            sequences.append((list(prompt), list(range(prompt_length)), [0] * prompt_length))
        ids, positions, owner = sequences[-1]
        for t in sampled:
            predicted_at = prompt_length - 1  # the first token: by the prompt's last
            if t > 0:
                predicted_at = len(ids) + t - 1
            places.append((i, len(sequences) - 1, predicted_at, t))
        ids += response[:added]
        positions += range(prompt_length, prompt_length + added)
        owner += [i + 1] * added
    # Widths are multiples of 8: for others a GPU's kernels copy the mask. Padding sees other
    # padding, since a row of the mask that is all -inf gives NaN
    ids, positions, owner = zip(*sequences)
    ids = to_device(pad_right(ids, 0, 8), device)
    positions = to_device(pad_right(positions, 0, 8), device)
    owner = to_device(pad_right(owner, -1, 8), device)
    distance = positions[:, :, None] - positions[:, None]  # from a query back to a key
    visible = (distance >= 0) & ((owner[:, None] == 0) | (owner[:, None] == owner[:, :, None]))
    dtype = model.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    masks = {}
    for layer_type, window in attention_windows(model).items():
        hidden = ~visible | (distance >= (window or math.inf))
        zeros = torch.zeros(hidden.shape, dtype=dtype, device=device)
        masks[layer_type] = zeros.masked_fill_(hidden, -math.inf)[:, None]
    mask = masks  # transformers takes one mask for each type of layer or, where there is one type, a tensor
    if len(masks) == 1:
        mask = masks.popitem()[1]
    row, sequence, predicted_at, token = to_device(places, device).T
    options = {"attention_mask": mask, "position_ids": positions}
    return logits_at(model, ids, (sequence, predicted_at), **options), (row, token)


# ---------------------------------------------------------------- the optimizer step


def make_optimizer(model, learning_rate):
    """Returns AdamW over the model's trained parameters. Another optimizer, or several parameter groups, go
    here: all groups are scheduled, clipped and stepped, and each may have a rate of its own.
    examples/muon.py has two optimizers for one model."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=WEIGHT_DECAY, fused=True)
    for group in optimizer.param_groups:  # lr_multiplier is 1, unless you give a group its own "lr" above
        group["lr_multiplier"] = group["lr"] / learning_rate if learning_rate else 1.0
    return optimizer


def set_learning_rate(optimizer, learning_rate):
    """Sets each parameter group's learning rate: learning_rate times the group's "lr_multiplier", if any."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_multiplier", 1.0)


def mini_batches(num_rows):
    """Returns the row numbers of each optimizer step of a pass, MINI_BATCHES lists of like size. A single
    list is not shuffled, since the order within a step changes nothing."""
    order = torch.arange(num_rows)
    if MINI_BATCHES > 1:
        order = torch.randperm(num_rows)
    return [chunk.tolist() for chunk in order.tensor_split(min(MINI_BATCHES, num_rows))]


class GradientSum:
    """Adds up the gradients of one optimizer step over its micro-batches and over the processes.

        gradients = GradientSum([model])
        for micro in gradients.deal(micro_batches):  # this process's micro-batches
            gradients.backward(model, loss)          # any number of times
            gradients.log_means({"loss": losses}, mask, num_tokens)
        metrics = gradients.finish()

    In each round every process gets one micro-batch. After each round the processes add its gradients in the
    order of the micro-batches, so that the sum has the same bits on any number of processes. With
    DETERMINISTIC_GRADIENTS = False they add up once, in finish(); with FSDP2 in every backward pass."""

    def __init__(self, models):
        self.models = models
        self.parameters = [p for model in models for p in model.parameters() if p.requires_grad]
        self.rounds = []  # what each round logged, {name: tensor}
        self.num_micro_batches = 0
        self.is_dummy = False  # there is no micro-batch for this process in this round
        self.is_complete = False
        self.adds_gradients = world_size() > 1 and not is_sharded()
        self.totals = []  # of each parameter, over the rounds; empty where .grad itself is the sum
        if self.adds_gradients and DETERMINISTIC_GRADIENTS:
            self.totals = [torch.zeros_like(p) for p in self.parameters]

    def deal(self, micro_batches):
        """Yields this process's share of the micro-batches: of N processes each gets every N-th. The loop
        must run to its end, because the others wait for this one in every round; finish() raises if it did
        not."""
        self.num_micro_batches = len(micro_batches)
        for parameter in self.parameters:
            # Zeros, not None: AdamW must also step parameters that get no gradient. FSDP2 makes its own
            parameter.grad = None if is_sharded() else torch.zeros_like(parameter)
        self.set_checkpointing(GRADIENT_CHECKPOINTING)
        try:
            for first in progress(range(0, len(micro_batches), world_size()), "micro-batches"):
                number = first + rank()
                self.rounds.append({})
                self.is_dummy = number >= len(micro_batches)
                if not self.is_dummy:
                    yield micro_batches[number]
                elif is_sharded():
                    # FSDP2 waits for all processes in each pass; backward() makes this loss zero
                    yield micro_batches[-1]
                self.add_round()
            self.is_complete = True
        finally:
            self.set_checkpointing(False)

    def set_checkpointing(self, on):
        """Turns recomputing of activations on or off. A GradientCheckpointingLayer does it where its flag
        `training` is set. It then uses no cache, so sampling must find the flag unset."""
        for model in self.models:
            for layer in model.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.training = on

    def backward(self, model, loss):
        """loss.backward(), by kernels that always add in the same order. An operation that has none is an
        error on a GPU; with DETERMINISTIC_GRADIENTS = False it is a warning."""
        if self.is_dummy:
            loss = 0 * loss
        warn_only = not DETERMINISTIC_GRADIENTS or model.device.type != "cuda"
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        try:
            loss.backward()
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            why = first_line(error)
            raise UserError(f"DETERMINISTIC_GRADIENTS = True: {why}: set it to False") from None
        finally:
            torch.use_deterministic_algorithms(True, warn_only=True)

    def log_means(self, values, mask, num_tokens):
        """Logs the sum over the micro-batches of values * mask / num_tokens. values: {name: (rows, R)}.
        Refuses a loss that is a mean already: the step would divide by the tokens twice."""
        for name, x in values.items():
            if x.shape != mask.shape:
                fault = f"{name} has the shape {tuple(x.shape)}, not {tuple(mask.shape)}"
                raise ValueError(f"{fault}: return one number per token or pair, not their mean")
            self.log_sum(name, (x.detach() * mask).sum() / num_tokens)

    def log_sum(self, name, value):
        """Logs a number that adds up over the micro-batches; of a name max_... the largest is kept."""
        self.rounds[-1][name] = value

    def log_max(self, name, value):
        """Logs a number of which the largest counts. finish() knows it by its name."""
        assert name.startswith("max_"), f"{name}: its name must begin with max_"
        self.rounds[-1][name] = value

    def add_round(self):
        if self.is_dummy:
            self.rounds[-1] = {}
        for parameter, total in zip(self.parameters, self.totals):
            gradients = list(total.new_empty(world_size(), *total.shape))
            dist.all_gather(gradients, parameter.grad)
            for gradient in gradients:
                total += gradient
            parameter.grad.zero_()

    def finish(self):
        """Leaves the sums in the parameters' .grad. Returns {name: number} of what was logged."""
        if not self.is_complete:
            raise RuntimeError("the loop over GradientSum.deal() was left early: do not break out of it")
        for parameter, total in zip(self.parameters, self.totals):
            parameter.grad = total
        if self.adds_gradients and not DETERMINISTIC_GRADIENTS:
            for parameter in self.parameters:
                dist.all_reduce(parameter.grad)
        rounds_by_rank = all_gather(self.logged_numbers())
        metrics = {}
        # In the order of the micro-batches: process n % N had number n, in its round n // N
        for number in range(self.num_micro_batches):
            for name, value in rounds_by_rank[number % world_size()][number // world_size()].items():
                add = max if name.startswith("max_") else operator.add
                metrics[name] = add(metrics[name], value) if name in metrics else value
        return metrics

    def logged_numbers(self):
        """Returns what each round logged as Python numbers, which come from the device in one copy."""
        values, structure = tree_flatten(self.rounds)
        if not values:
            return self.rounds
        tensors = [torch.as_tensor(x, device=self.models[0].device) for x in values]
        return tree_unflatten(torch.stack(tensors).tolist(), structure)


def over_optimizer_steps(steps):
    """Returns one {name: number} for several optimizer steps: means, but maxima of what begins with max_."""
    metrics = {}
    for name in steps[0]:
        values = column(steps, name)
        metrics[name] = max(values) if name.startswith("max_") else sum(values) / len(values)
    return metrics


def clip_and_step(optimizers, total_loss, run, row_names):
    """Clips the gradients and steps each optimizer. Returns the gradient norms before clipping. If a norm, or
    the loss, is not finite the weights stay as they are, and the run logs the names of the data's rows."""
    norms = []
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        norms.append(norm.item())
    finite = all(map(math.isfinite, (total_loss, *norms)))
    for optimizer in optimizers:
        if finite:
            optimizer.step()
        optimizer.zero_grad()
    run.note_optimizer_step(finite, row_names)
    return norms


def check_first_ratio(metrics, step):
    """The run's first optimizer step trains the very policy that sampled, so its ratios are 1 but for
    rounding. In float32 no token may differ; bfloat16 moves single tokens, so there the mean counts."""
    if step > 1:
        return
    deviation, bound = metrics["mean_abs_log_ratio"], 0.05
    if DTYPE == "float32":
        deviation, bound = metrics["max_ratio_deviation"], 1e-3
    if deviation > bound:
        hint = f"ACTOR_MODEL, or an edited sampling_logprobs(), differs in training; DTYPE = {DTYPE!r}"
        raise UserError(f"in the first update a ratio differs from 1 by {deviation:.2g}: {hint}")


# ---------------------------------------------------------------- prompts and responses


def load_rows(datasets, constant, limit=None):
    """Returns the rows of all data sets: {"id", "prompt": text or chat, "answer": text, texts or None,
    "columns": the whole record}."""
    known = ["path", "type", "input", "output", "name", "split"]
    for spec in datasets:
        if not isinstance(spec, dict):
            raise UserError(
                f"{constant}: a data set is {{'path': ..., 'type': ..., 'input': ...}}, not {spec!r}"
            )
    file_names = Counter(Path(spec.get("path", "")).name for spec in datasets)
    rows = []
    for spec in datasets:
        for key in spec.keys() - set(known):
            raise UserError(f"{constant}: unknown key {key!r} in {spec!r}{did_you_mean(key, known)}")
        if not {"path", "type", "input"} <= spec.keys():
            keys = "a data set needs path, type, input and may have output, name, split"
            raise UserError(f"{constant}: {keys}: {spec!r}")
        count_before = len(rows)
        for number, record in read_records(spec, f"{constant}: {spec['path']}"):
            where = f"{constant}: {spec['path']} line {number}"
            prompt = read_prompt(look_up(record, spec["input"], where), f"{where}: {spec['input']!r}")
            answer = None
            if spec.get("output"):
                answer = read_answer(look_up(record, spec["output"], where), f"{where}: {spec['output']!r}")
            file_name = Path(spec["path"]).name
            if file_names[file_name] > 1:
                parts = [spec["path"], spec.get("name"), spec.get("split")]
                file_name = ":".join(part for part in parts if part)
            row_id = f"{file_name}:{number}"
            rows.append({"id": row_id, "answer": answer, "columns": record, "prompt": prompt})
        if len(rows) == count_before:
            raise UserError(f"{constant}: {spec['path']}: the data set is empty")
    all_names = {name: None for row in rows for name in row["columns"]}
    for row in rows:
        row["columns"] = all_names | row["columns"]  # all rows have the same columns
    return rows[:limit]


def load_prompts(trainer, datasets, constant, limit):
    """Returns the rows of data sets with their prompts' ids; see encode(). There must be some to train on."""
    if "{input}" not in PROMPT_TEMPLATE:
        raise UserError(f"PROMPT_TEMPLATE = {PROMPT_TEMPLATE!r} has no {{input}}, the place of the prompt")
    rows = encode(trainer, load_rows(datasets, constant, limit), constant)
    if not rows and constant == "TRAIN_DATASETS":
        raise UserError(f"{constant} leaves no prompt to train on: raise MAX_PROMPT_TOKENS or give it data")
    warn_of_unknown_tokens(trainer, rows, constant)
    return rows


def warn_of_unknown_tokens(trainer, rows, constant):
    """Logs a warning if rows have tokens that stand for what the tokenizer does not know, such as <unk>."""
    tokenizer = trainer.tokenizer
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        return
    unknown_tokens = tokens = 0
    affected = []
    for row in rows:
        tokens += len(row["ids"])
        if unknown in row["ids"]:
            unknown_tokens += row["ids"].count(unknown)
            affected.append(row)
    if affected:
        text = tokenizer.decode(affected[0]["ids"])
        place = text.find(tokenizer.unk_token)
        text = text[max(0, place - 40) : place + 40]
        where = f"{len(affected)} of {len(rows)} rows (the first: {affected[0]['id']}: {text!r})"
        fault = f"{unknown_tokens / tokens:.1%} of the tokens, in {where}, are {tokenizer.unk_token}"
        hint = "its tokenizer does not know these words: take a model that does, or other words"
        trainer.run.log(f"WARNING: {constant}: {fault}. ACTOR_MODEL = {ACTOR_MODEL!r}: {hint}")


def read_prompt(value, where):
    """Returns a prompt as a file has it: a text, or a chat, which is a list of {"role", "content"} messages
    that ends with the one to be answered."""
    if isinstance(value, str) and value.strip():
        return value
    messages = without_nulls(value)
    valid = isinstance(messages, list) and len(messages) > 0
    if valid:
        valid = all(is_message(message) for message in messages) and messages[-1]["role"] != "assistant"
    if not valid:
        form = 'a prompt is a text, or messages such as [{"role": "user", "content": "How many?"}]'
        raise UserError(f"{where}: {form}, the last not the assistant's; this is {repr(value)[:160]}")
    return [{**message, "content": message.get("content", "")} for message in messages]


def without_nulls(value):
    """Returns plain lists and dicts without the nulls that parquet and the hub fill in for absent keys."""
    if hasattr(value, "tolist"):  # an array
        value = value.tolist()
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(item) for item in value]
    return value


def is_message(value):
    """Whether a value is {"role": text, "content": text}; a message with tool calls may lack its content."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str) or ("content" not in value and bool(value.get("tool_calls")))


def read_answer(value, where):
    """Returns an answer as text, or as a list of texts; of messages the last one's content."""
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    if isinstance(value, list):
        return cell_texts(value, where)
    return cell_text(value, where)


def as_text(prompt):
    """Returns a prompt or response as a person reads it: every message of a chat."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{m['role']}: {m['content']}{m.get('tool_calls', '')}" for m in prompt)


def as_messages(prompt):
    """Returns the messages that the model is given: a chat's own, or the text in PROMPT_TEMPLATE.
    SYSTEM_PROMPT goes first unless there is a system message."""
    messages = prompt
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": PROMPT_TEMPLATE.replace("{input}", prompt)}]
    if SYSTEM_PROMPT is None or any(message["role"] in ("system", "developer") for message in messages):
        return list(messages)
    return [{"role": "system", "content": SYSTEM_PROMPT}, *messages]


def apply_chat_template(tokenizer, messages, where, add_generation_prompt):
    """Returns messages as text by the tokenizer's chat template."""
    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # a template may refuse roles, or their order, by any type
        fault = f"does not take these messages ({first_line(error)})"
        raise UserError(f"{where}: the chat template of {tokenizer.name_or_path!r} {fault}") from None


def encode_chat(tokenizer, prompt, where, response=None):
    """Returns the ids of a prompt (a text or a chat), or of a prompt with its response (a text or turns), in
    the tokenizer's chat template. Without a template only texts can be encoded. where: what an error
    names."""
    prompt = read_prompt(prompt, where)
    messages = as_messages(prompt)
    turns = response or []
    if isinstance(response, str):
        turns = [{"role": "assistant", "content": response}]
    if tokenizer.chat_template:
        text = apply_chat_template(tokenizer, messages + turns, where, response is None)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(messages) > 1 or not isinstance(prompt, str):
        fault = f"need a chat template, which {tokenizer.name_or_path!r} lacks"
        hint = "put a file chat_template.jinja beside the tokenizer"
        raise UserError(f"{where}: messages and SYSTEM_PROMPT {fault}: {hint}")
    text = messages[0]["content"]
    for turn in turns:
        text += turn["content"]
        if turn["role"] == "assistant":
            text += tokenizer.eos_token
    ids = tokenizer(text)["input_ids"]
    # Some tokenizers append an EOS to every text, which is dropped. After a response there are two: the
    # response's own and the tokenizer's
    appended = [tokenizer.eos_token_id] * (1 if response is None else 2)
    text_has_eos = (messages + turns)[-1]["content"].endswith(tokenizer.eos_token)
    if ids[-len(appended) :] == appended and not text_has_eos:
        return ids[:-1]
    return ids


def encode(trainer, rows, constant):
    """Adds the prompt's ids to each row and returns the rows that are not longer than MAX_PROMPT_TOKENS; the
    number of the others is logged. Every model in trainer.models_by_constant must be able to read them."""
    tokenizer = trainer.tokenizer
    num_ids = vocab_size(trainer.actor)
    for row in rows:
        where = f"{constant}: {row.get('id', 'the prompt')}"
        row["ids"] = encode_chat(tokenizer, row["prompt"], where)
        row["columns"]["messages"] = as_messages(row["prompt"])  # in place of a column of that name
        if not row["ids"]:
            raise UserError(f"{where}: the tokenizer gives no token for this prompt")
        if max(row["ids"]) >= num_ids:
            fault = f"the tokenizer gives the id {max(row['ids'])}, but the model has only {num_ids}"
            raise UserError(f"{where}: {fault}: ACTOR_MODEL = {ACTOR_MODEL!r}")
    kept = [row for row in rows if len(row["ids"]) <= MAX_PROMPT_TOKENS]
    if len(kept) < len(rows):
        left_out = f"left out {len(rows) - len(kept)} of {len(rows)} prompts"
        trainer.run.log(f"{constant}: {left_out}, longer than MAX_PROMPT_TOKENS = {MAX_PROMPT_TOKENS}")
    longest = max((len(row["ids"]) for row in kept), default=0) + MAX_NEW_TOKENS
    for name, model in trainer.models_by_constant.items():
        if longest > max_positions(model):
            fault = f"reads at most {max_positions(model)} tokens, but a prompt and its response may have"
            hint = "lower MAX_PROMPT_TOKENS or MAX_NEW_TOKENS"
            raise UserError(f"{name} {fault} {longest} ({constant}): {hint}")
    return kept


def encode_texts(trainer, prompts, answers, where):
    """Returns rows of texts or chats that a caller gives; see encode()."""
    answers = answers or [None] * len(prompts)
    if len(answers) != len(prompts):
        raise UserError(f"{where} got {len(prompts)} prompts and {len(answers)} answers: give one per prompt")
    rows = []
    for prompt, answer in zip(prompts, answers):
        rows.append({"prompt": read_prompt(prompt, where), "answer": answer, "columns": {}})
    return encode(trainer, rows, where)


def ids_of_ends(model, tokenizer):
    """Returns the ids that end a response, a tensor: the tokenizer's EOS and those of the model's generation
    config, which often names several."""
    ends = model.generation_config.eos_token_id
    if not isinstance(ends, list):
        ends = [ends]
    return to_device(sorted({tokenizer.eos_token_id, *ends} - {None}), model.device)


# differs: entropies
def respond(model, tokenizer, prompts, uniform, group_size=1):
    """Samples group_size responses to each prompt, a list of ids, by generate(); as many rows at a time as a
    training batch has. uniform (rows, MAX_NEW_TOKENS); None: the likeliest tokens. Returns a batch (see
    make_batch) with logprobs, entropies, truncated, responses (texts) and columns (for reward functions)."""
    prompts_at_a_time = max(1, BATCH_SIZE * GROUP_SIZE // group_size)
    eos_ids = ids_of_ends(model, tokenizer)
    settings = (MAX_NEW_TOKENS, TEMPERATURE, eos_ids, padding_id(model, tokenizer))

    def sample_chunk(first):
        chunk = prompts[first : first + prompts_at_a_time]
        chunk_uniform = None
        if uniform is not None:
            rows = slice(first * group_size, (first + prompts_at_a_time) * group_size)
            chunk_uniform = to_device(uniform[rows], model.device)
        with autocast(model):
            return generate(model, chunk, chunk_uniform, group_size, *settings)

    with full_parameters(model):
        chunks = map_over_ranks(range(0, len(prompts), prompts_at_a_time), sample_chunk)
    ids, lengths, logprobs, entropies = (torch.cat(x).to(model.device) for x in zip(*chunks))
    # One copy from the device: each row begins with its length
    responses = [row[:length] for length, *row in torch.cat([lengths[:, None], ids], 1).tolist()]
    batch = make_batch(repeat_each(prompts, group_size), responses, model.device)
    width = batch.response_mask.shape[1]
    batch.logprobs = logprobs[:, :width]
    batch.entropies = entropies[:, :width]
    batch.truncated = ~torch.isin(ids.gather(1, lengths[:, None] - 1).squeeze(1), eos_ids)
    batch.responses = tokenizer.batch_decode(responses, skip_special_tokens=True)
    batch.columns = {"response_ids": responses}
    return batch


def load_reward_model(path, device):
    """Returns a sequence classifier with one label, frozen, and its tokenizer; (None, None) if path is
    None."""
    if path is None:
        return None, None
    model = load_model(AutoModelForSequenceClassification, path, "REWARD_MODEL", device).requires_grad_(False)
    if model.config.num_labels != 1:
        raise UserError(f"REWARD_MODEL = {path!r} must have a classification head of one label")
    if is_decoder(model):
        return model, load_tokenizer(path, "REWARD_MODEL")
    return model, load_pretrained(AutoTokenizer, path, "REWARD_MODEL")


def is_decoder(model):
    """Returns whether a classifier reads its score at the last token. Encoders such as DeBERTa do not."""
    return hasattr(model, "score")


@torch.no_grad()
def reward_model_scores(model, tokenizer, prompts, responses):
    """Returns a reward model's score of each prompt with its response, (rows,). A decoder's is read at the
    last token of the chat; an encoder reads the prompt and the response as a pair of texts."""
    if not is_decoder(model):
        return encoder_scores(model, tokenizer, prompts, responses)
    rows = [encode_chat(tokenizer, p, "REWARD_MODEL", response) for p, response in zip(prompts, responses)]
    scores = torch.zeros(len(rows))
    lengths = torch.tensor(list(map(len, rows)))
    if lengths.max() > max_positions(model):
        fault = f"reads at most {max_positions(model)} tokens, but a prompt with its response has"
        raise UserError(f"REWARD_MODEL = {REWARD_MODEL!r} {fault} {lengths.max()}")
    for chunk in lengths.argsort(stable=True).split(min(64, BATCH_SIZE * GROUP_SIZE)):
        ids = to_device(pad_right([rows[i] for i in chunk], 0), model.device)  # causal: padding is not seen
        last = to_device(torch.stack([torch.arange(len(chunk)), lengths[chunk] - 1]), model.device)
        with autocast(model):
            hidden_states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            scores[chunk] = model.score(hidden_states[tuple(last)]).squeeze(-1).float().cpu()
    return scores


def encoder_scores(model, tokenizer, prompts, responses):
    scores = torch.zeros(len(prompts))
    for chunk in torch.arange(len(prompts)).split(min(64, BATCH_SIZE * GROUP_SIZE)):
        first, second = zip(*((as_text(prompts[i]), as_text(responses[i])) for i in chunk))
        inputs = tokenizer(list(first), list(second), padding=True, return_tensors="pt").to(model.device)
        length = inputs["input_ids"].shape[1]
        if length > max_positions(model):
            fault = (
                f"reads at most {max_positions(model)} tokens, but a prompt with its response has {length}"
            )
            raise UserError(f"REWARD_MODEL = {REWARD_MODEL!r} {fault}")
        with autocast(model):
            scores[chunk] = model(**inputs).logits.squeeze(-1).float().cpu()
    return scores


def response_metrics(batch, scores, reward_parts):
    """Returns means over responses, of the scores, their parts and the lengths, and the share of responses
    that were truncated."""
    metrics = {"reward": scores.mean().item()}
    for name, values in reward_parts.items():
        metrics[f"reward/{name}"] = values.mean().item()
    metrics["response_length"] = batch.response_mask.sum(1).mean().item()
    metrics["truncated_fraction"] = batch.truncated.float().mean().item()
    return metrics


def count_signal(trainer, has_signal, responses):
    """Counts the steps in a row whose rewards were equal, and warns of the tenth. responses: the words for
    the warning, which responses had equal rewards."""
    trainer.steps_without_signal += 1
    if has_signal:
        trainer.steps_without_signal = 0
    if trainer.steps_without_signal == 10:
        fault = f"in the last 10 steps {responses} had equal rewards: there was nothing to learn from them"
        hint = "easier prompts, a reward with partial credit, a higher TEMPERATURE or GROUP_SIZE, or a "
        hint += "longer MAX_NEW_TOKENS where responses are cut (truncated_fraction)"
        trainer.run.log(f"WARNING: {fault}. See {OUTPUT_DIR}/logs/samples.jsonl; try {hint}")


def sample_records(batch, responses, advantages):
    """Returns LOG_SAMPLES of a step's rows for samples.jsonl. responses: texts or turns; advantages:
    (rows,)."""
    records = []
    count = min(LOG_SAMPLES, len(batch.rows))
    for i in torch.linspace(0, len(batch.rows) - 1, count).long().tolist():
        row = batch.rows[i]
        record = {"id": row["id"], "prompt": as_text(row["prompt"]), "response": as_text(responses[i])}
        record |= {"answer": row["answer"], "truncated": bool(batch.truncated[i])}
        record["reward"] = batch.scores[i].item()
        for name, values in batch.reward_parts.items():
            record[f"reward/{name}"] = float(values[i])
        record["advantage"] = advantages[i].item()
        records.append(record)
    return records


def parameter_counts(model):
    """Returns the number of parameters as text and, with an adapter, how many of them are trained."""
    text = f"{model.num_parameters():,} parameters"
    if LORA_RANK:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        text += f", of which {trained:,} are trained,"
    return text


def device_and_dtype(device):
    """Returns both as text, with a warning where a processor has no instructions for bfloat16."""
    fast_bfloat16 = any("bf16" in name and has for name, has in torch.cpu.get_capabilities().items())
    if DTYPE == "bfloat16" and device.type == "cpu" and not fast_bfloat16:
        return "cpu, bfloat16 (much slower than float32 on this processor: set DTYPE=float32)"
    return f"{device}, {DTYPE}"


def run_summary(trainer, optimizer_steps):
    """Returns the first lines of a run on the terminal. optimizer_steps: their number per training step."""
    run, actor = trainer.run, trainer.actor
    name = "/".join(Path(ACTOR_MODEL).parts[-2:])
    end = "NUM_EPOCHS"
    if MAX_STEPS and run.total_steps >= MAX_STEPS:
        end = "MAX_STEPS"
    prompts = BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS
    lines = [
        f"{name}: {parameter_counts(actor)} on {device_and_dtype(actor.device)}; writing to {OUTPUT_DIR}",
        f"{len(trainer.train_rows)} prompts to train on, {len(trainer.eval_rows)} held out",
        f"Steps {run.step} to {run.total_steps}, where {end} ends the run. In each step: {prompts} prompts x "
        f"{GROUP_SIZE} responses; optimizer steps of the policy: {optimizer_steps}",
        memory_summary(trainer),
        *unsuited_constants(),
        *shipped_evaluation(trainer),
    ]
    return "\n".join(lines)


def memory_summary(trainer):
    """Returns how much memory the models take, as text: weights and, where they are trained, their gradients
    and AdamW's two moments."""
    models = [*trainer.models_by_constant.values(), getattr(trainer, "reward_model", None)]
    used = 0
    for model in filter(None, models):
        for parameter in model.parameters():
            number = parameter.numel() // (world_size() if is_sharded() else 1)
            used += number * (parameter.element_size() + 12 * parameter.requires_grad)
    device = trainer.device
    available = math.nan  # where the system does not tell
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[1]
    else:
        with suppress(OSError, ValueError, AttributeError):
            available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (
        f"Weights, gradients and optimizer state take {used / 2**30:.2f} GiB of the {available / 2**30:.1f} "
        f"GiB of {device}; activations and the responses' caches come on top"
    )


def is_shipped(path):
    """Returns whether a path is in the repository's data/."""
    return Path(path).resolve().is_relative_to(Path(ROOT, "data"))


def unsuited_constants():
    """Returns a line about the constants that still have the value tuned for the shipped model and data,
    though the run uses others; an empty list if there is none."""
    if is_shipped(ACTOR_MODEL) and all(is_shipped(spec["path"]) for spec in TRAIN_DATASETS):
        return []
    hints = []
    for name, (tuned, hint) in _TUNED_FOR_TINY.items():
        fits_the_model = is_shipped(ACTOR_MODEL) and name.endswith(("RATE", "TOKENS"))
        if globals()[name] == tuned and not fits_the_model:
            hints.append(f"{name} = {tuned!r} ({hint})")
    if not hints:
        return []
    return ["NOTE: tuned for the shipped model and data, perhaps not for yours: " + "; ".join(hints)]


def shipped_evaluation(trainer):
    """Returns a line if the run trains on the user's own data but is evaluated on the shipped; else an empty
    list."""
    trains_on_own = not all(map(is_shipped, column(TRAIN_DATASETS, "path")))
    evaluates_on_shipped = any(map(is_shipped, column(EVAL_DATASETS, "path")))
    if not trains_on_own or not evaluates_on_shipped or not trainer.eval_rows:
        return []
    hint = "set EVAL_DATASETS to held-out rows of yours, or to [] for no evaluation"
    fault = "TRAIN_DATASETS is your own data, but EVAL_DATASETS, for evaluation, is still the shipped one"
    return [f"NOTE: {fault}: {hint}"]


def policy_and_step(policy):
    """Returns a policy's folder as text and, if it is the best/ of a run, the step that it is of."""
    for folder in (Path(policy), Path(policy).parent):
        if (folder / "metrics.json").exists():
            return f"{policy} (step {json.loads((folder / 'metrics.json').read_text())['step']})"
    return str(policy)


# ---------------------------------------------------------------- STAGE=evaluate


@contextmanager
def keeping_constants():
    """Restores this file's constants after the block, or after the function that it decorates."""
    before = {name: value for name, value in globals().items() if name.isupper()}
    try:
        yield
    finally:
        globals().update(before)


def write_evaluation(name, settings, results, records):
    """Writes settings and results to OUTPUT_DIR/<name>.json and records to <name>.jsonl; if there is already
    an evaluation of that name with other settings, to <name>_2, <name>_3, ... Returns their path without the
    ending."""
    name = re.sub(r"[^\w.-]+", "", name)
    settings = json.loads(json.dumps(settings))
    path = Path(OUTPUT_DIR, name)
    number = 1
    while Path(f"{path}.json").exists():
        with suppress(ValueError, AttributeError):  # a file that is not of an evaluation
            written = json.loads(Path(f"{path}.json").read_text())
            if all(written.get(key) == value for key, value in settings.items()):
                break
        number += 1
        path = Path(OUTPUT_DIR, f"{name}_{number}")
    if rank() == 0:
        lines = "".join(json.dumps(record) + "\n" for record in records)
        facts = json.dumps({**settings, **results}, indent=1)
        write_atomically(Path(f"{path}.jsonl"), lambda tmp: tmp.write_text(lines))
        write_atomically(Path(f"{path}.json"), lambda tmp: tmp.write_text(facts))
    return path


@keeping_constants()
def evaluate_policy(trainer_class):
    """Scores EVALUATE_POLICY on EVAL_DATASETS without training: one greedy and EVALUATE_SAMPLES sampled
    responses per prompt. Writes OUTPUT_DIR/eval_<policy>_<data>.json, and every response to a .jsonl of that
    name; a run in OUTPUT_DIR stays as it is. Returns {figure: {"mean", "low", "high"}}."""
    folder = Path(OUTPUT_DIR)
    policy = EVALUATE_POLICY
    if not EVAL_DATASETS or MAX_EVAL_PROMPTS == 0:
        raise UserError("STAGE = 'evaluate' needs EVAL_DATASETS, and MAX_EVAL_PROMPTS above 0 or None")
    if policy == "best" or policy.startswith("step_"):
        policy = str(folder / EVALUATE_POLICY / "policy")
        if not Path(policy).exists():
            hint = "train first, or give the folder of a model"
            raise UserError(f"EVALUATE_POLICY = {EVALUATE_POLICY!r}: there is no {policy}: {hint}")
    elif Path(policy).is_dir() and not (Path(policy) / "config.json").exists():
        hint = "give best, step_N, or a folder such as checkpoints/ppo/best/policy"
        raise UserError(f"EVALUATE_POLICY = {policy!r}: that folder holds no model (no config.json): {hint}")
    load_rows(EVAL_DATASETS, "EVAL_DATASETS", MAX_EVAL_PROMPTS)  # first, so that errors name this constant
    differences = constants_unlike_the_run(folder)
    trainer = trainer_to_evaluate(trainer_class, policy)
    for difference in differences:
        trainer.run.log(f"Other than in the run of {folder}: {difference}")
    by_prompt, records = policy_scores(trainer, *trainer.respond_to(trainer.eval_rows, EVALUATE_SAMPLES))
    figures = {}
    for figure, values in by_prompt.items():
        mean, (low, high) = values.mean().item(), bootstrap_interval(values.numpy())
        figures[figure] = {"mean": mean, "low": low, "high": high}
        trainer.run.log(f"{figure:16} {mean:.3f}   95% interval {low:.3f} to {high:.3f}")
    settings = {"policy": policy, "datasets": EVAL_DATASETS, "prompts": len(records)}
    settings |= {"samples": EVALUATE_SAMPLES, "temperature": TEMPERATURE, "max_new_tokens": MAX_NEW_TOKENS}
    settings["constants"] = {name: constants()[name] for name in [*_CHANGE_SCORES, "DTYPE", "SEED"]}
    names = ["eval", *Path(EVALUATE_POLICY).parts[-2:]]
    for spec in EVAL_DATASETS:
        names += [Path(spec["path"]).stem, *(spec[key] for key in ("name", "split") if spec.get(key))]
    path = write_evaluation("_".join(names), settings, {"figures": figures}, records)
    counts = f"{len(records)} prompts, {EVALUATE_SAMPLES} samples each"
    trainer.run.log(f"{policy_and_step(policy)}: {counts}; written to {path}.json and .jsonl")
    trainer.run.lock.release(force=True)
    return figures


# differs: which models are not needed
def trainer_to_evaluate(trainer_class, policy):
    """Returns a trainer with the policy as its actor, without a reference. Its rows to train on, those of
    EVAL_DATASETS, are not used."""
    global STAGE, ACTOR_MODEL, LORA_RANK, KL_COEF, REFERENCE_MODEL, TRAIN_DATASETS, MAX_TRAIN_PROMPTS
    STAGE, ACTOR_MODEL, LORA_RANK, KL_COEF, REFERENCE_MODEL = "evaluate", policy, 0, 0.0, None
    TRAIN_DATASETS, MAX_TRAIN_PROMPTS = EVAL_DATASETS, MAX_EVAL_PROMPTS
    return trainer_class(resume_from_checkpoint="no")


def constants_unlike_the_run(folder):
    """Returns a line for each constant that changes scores and has another value than in the run of a
    folder. A constant that the run was given on its command line must be given again."""
    if not (folder / "training_config.json").exists():
        return []
    before = json.loads((folder / "training_config.json").read_text())["constants"]
    now = constants()
    lines = []
    for name in [*_CHANGE_SCORES, "DTYPE", "SEED"]:
        if name in before and before[name] != now[name]:
            lines.append(f"{name} was {before[name]!r}, is {now[name]!r}")
    return lines


def policy_scores(trainer, greedy, sampled):
    """Returns {figure: its value for each prompt, (prompts,)} of greedy and sampled responses, and a record
    of each prompt with its responses."""
    scores = trainer.score_responses(sampled)[0].view(-1, EVALUATE_SAMPLES).cpu()
    by_prompt = {"reward": scores.double().mean(1)}
    correct = None
    if None not in column(greedy.rows, "answer"):
        correct = trainer.accuracy(sampled).view(-1, EVALUATE_SAMPLES)
        by_prompt |= {"accuracy_greedy": trainer.accuracy(greedy), "pass@1": correct.mean(1)}
        by_prompt[f"pass@{EVALUATE_SAMPLES}"] = correct.amax(1)
        votes = majority_votes(trainer, sampled)
        if votes is not None:
            by_prompt[f"majority@{EVALUATE_SAMPLES}"] = correct.gather(1, votes[:, None]).squeeze(1)
        else:
            fault = f"ACCURACY_FUNCTION = {ACCURACY_FUNCTION!r} cannot take a response as the answer"
            trainer.run.log(f"NOTE: no majority@{EVALUATE_SAMPLES}: {fault}")
    records = []
    for i, row in enumerate(greedy.rows):
        responses = sampled.responses[i * EVALUATE_SAMPLES : (i + 1) * EVALUATE_SAMPLES]
        record = {"id": row["id"], "prompt": as_text(row["prompt"]), "answer": row["answer"]}
        record |= {"greedy": greedy.responses[i], "sampled": responses, "rewards": scores[i].tolist()}
        if correct is not None:
            record["greedy_correct"] = by_prompt["accuracy_greedy"][i].item()
            record["sampled_correct"] = correct[i].tolist()
        records.append(record)
    return by_prompt, records


# differs: turns
def majority_votes(trainer, batch):
    """Returns for each prompt the index of the response that most others agree with, (prompts,). Two
    responses agree if ACCURACY_FUNCTION finds one correct with the other as the answer. Returns None if it
    finds none correct, not even with itself as the answer, or if it raises: it cannot compare responses."""
    votes = []
    can_compare = False
    score = partial(call_reward, "ACCURACY_FUNCTION", trainer.accuracy_function)
    for start in range(0, len(batch.responses), EVALUATE_SAMPLES):
        responses = batch.responses[start : start + EVALUATE_SAMPLES]
        row = copy.deepcopy(batch.rows[start])  # a judge may append to its messages
        prompts = [row["prompt"]] * len(responses)
        columns = {name: [value] * len(responses) for name, value in row["columns"].items()}
        for name, values in batch.columns.items():
            columns[name] = values[start : start + EVALUATE_SAMPLES]
        agreement = torch.zeros(len(responses))
        for response in responses:
            answers = [response] * len(responses)
            try:
                with time_limit():
                    agreement += score(prompts, responses, answers, columns)
            except Exception:  # of any type: it cannot read a response as an answer
                return None
        can_compare = can_compare or agreement.any().item()
        votes.append(agreement.argmax().item())
    return torch.tensor(votes) if can_compare else None


def bootstrap_interval(values):
    """95% interval of the mean of values (rows,), resampling rows."""
    generator = np.random.default_rng(0)
    means = [generator.choice(values, len(values)).mean() for _ in range(2000)]
    return np.quantile(means, (0.025, 0.975)).tolist()


# ---------------------------------------------------------------- LoRA
# Small matrices are trained beside a model's frozen weights (2106.09685).


def load_adapted(auto_class, path, constant, device, saved, new_head):
    """Returns the model of path, frozen and in DTYPE, with an adapter in float32: the saved one, or a new one
    that changes nothing yet. A new head is trained whole."""
    if is_sharded():
        raise UserError(f"LORA_RANK = {LORA_RANK} and SHARD = 'fsdp2' do not go together: set one of them")
    import peft  # slow

    if Path(path).exists():
        path = str(Path(path).resolve())  # the adapter's config names it
    model = load_model(auto_class, path, constant, device, new_head, getattr(torch, DTYPE))
    targets = LORA_TARGETS
    if LORA_TARGETS != "all-linear":
        targets = LORA_TARGETS.replace(" ", "").split(",")
    config = peft.LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=targets, lora_dropout=0.0)
    config.task_type = "CAUSAL_LM"
    if new_head:
        config.task_type = "TOKEN_CLS"
        heads = []  # such as score; a head may have several layers
        for name, layer in model.named_children():
            if name != model.base_model_prefix and list(layer.parameters()):
                heads.append(name)
        config.modules_to_save = heads
    warnings.filterwarnings("error", "Model has .tie_word_embeddings")  # merging would change both layers
    try:
        model.add_adapter(config)
    except (ValueError, UserWarning) as error:
        raise UserError(f"LORA_TARGETS = {LORA_TARGETS!r}: {first_line(error).rstrip('(')}") from None
    if targets != "all-linear":
        check_targets(model, targets)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    head = model.get_output_embeddings()
    if head is not None:
        # torch multiplies a view, which generate() passes, with a frozen matrix up to 350 times slower
        head.register_forward_pre_hook(lambda module, inputs: inputs[0].contiguous())
    config.target_modules = sorted(config.target_modules)  # a set's order differs from run to run
    if saved:
        load_adapter(model, saved, config)
    return model


def check_targets(model, targets):
    """Every name in LORA_TARGETS must be that of a layer."""
    adapted = [f".{name}" for name, layer in model.named_modules() if hasattr(layer, "get_delta_weight")]
    for target in targets:
        if not any(name.endswith(f".{target}") for name in adapted):
            raise UserError(f"LORA_TARGETS = {LORA_TARGETS!r}: {model.name_or_path} has no layer {target!r}")


def load_adapter(model, saved, config):
    """Loads the adapter of a checkpoint, which must have been trained with the same constants."""
    import peft

    if not (saved / "adapter_config.json").exists():
        fault = f"{saved} is a whole model, which was trained with LORA_RANK = 0, not {LORA_RANK}"
        raise UserError(f"{fault}: resume with 0, or begin anew with RESUME=no")
    before = load_pretrained(peft.LoraConfig, saved, "RESUME")
    same_size = (before.r, before.lora_alpha) == (config.r, config.lora_alpha)
    if not same_size or sorted(before.target_modules) != config.target_modules:
        changed = "LORA_RANK, LORA_ALPHA or LORA_TARGETS"
        raise UserError(f"{saved} was trained with another {changed}: resume with the same")
    state = load_file(saved / "adapter_model.safetensors")
    state = {name.removeprefix("base_model.model."): x for name, x in state.items()}
    peft.set_peft_model_state_dict(model, state)


@contextmanager
def without_adapter(model):
    """Inside the block a model with an adapter is the frozen model; any other is unchanged."""
    has_adapter = hasattr(model, "peft_config")
    if has_adapter:
        model.disable_adapters()
    try:
        yield
    finally:
        if has_adapter:
            model.enable_adapters()


def merge_adapter(model):
    """Returns a copy of a model whose adapter is added to the weights, in float32: it loads without PEFT."""
    merged = copy.deepcopy(model).float()
    for name, layer in list(merged.named_modules()):
        if hasattr(layer, "get_delta_weight"):
            layer.merge()
            merged.set_submodule(name, layer.get_base_layer())
    merged._hf_peft_config_loaded = False
    del merged.peft_config
    return merged


# ---------------------------------------------------------------- sharding
# Each process keeps a part of every parameter, gradient and optimizer state (FSDP2). To sample and to score,
# a GPU must hold one whole model.

_FULL = WeakSet()  # sharded models of which every process holds all parameters; see full_parameters()


def is_sharded():
    return SHARD == "fsdp2"


def shard(model, device):
    """Returns the model with its layers sharded: the other parts of a layer arrive when it is read."""
    mesh = init_device_mesh(device.type, (world_size(),))
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing is done in place
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in [*layers, model]:
        fully_shard(module, mesh=mesh)  # in float32; autocast computes in DTYPE
        module.set_gradient_divide_factor(1.0)  # sums: losses are divided by the whole step's tokens already
        module.set_force_sum_reduction_for_comms(True)
    # FSDP2 takes the first module that runs for the root: let that be the model
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device))
    model.reset_iter_state()
    return model


@contextmanager
def full_parameters(*models):
    """Inside the block every process holds all parameters of sharded models, and may read and sample with
    them as often as it likes, without waiting for the others. Models that are not sharded stay as they
    are."""
    sharded = [model for model in models if isinstance(model, FSDPModule) and model not in _FULL]
    if sharded and _INSIDE_RANK_MAP:  # the other processes are not here
        raise UserError("SHARD = 'fsdp2': a reward function cannot sample with a model: set SHARD to none")
    for model in sharded:
        _FULL.add(model)
        model.set_reshard_after_forward(False)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
    yield
    for model in sharded:
        model.reset_iter_state()  # a prefetch that is under way would wait for the others
        model.set_reshard_after_forward(True)
        _FULL.discard(model)


def full_state(state):
    """Returns a state dict whose sharded tensors are whole, on the CPU of process 0; None on the others. All
    processes must call it."""
    full = {}
    for key, value in state.items():
        if isinstance(value, dict):
            value = full_state(value)
        elif isinstance(value, DTensor):
            value = value.full_tensor()
            value = value.cpu() if rank() == 0 else None
        full[key] = value
    return full


def full_weights(model):
    """Returns a model's state dict with whole tensors. Layers that are tied stay one tensor."""
    state = full_state(model.state_dict())
    for key, source in getattr(model, "all_tied_weights_keys", {}).items():
        state[key] = state[source]
    return state


def load_optimizer_state(optimizer, saved):
    """Loads what full_state() gave for an optimizer; of a sharded model every process takes its part.
    Learning rates and the like come from the constants of now, not from the checkpoint."""
    groups = optimizer.state_dict()["param_groups"]
    for group, saved_group in zip(groups, saved["param_groups"]):
        # Here "params" are the parameters' numbers. The saved ones make load_state_dict() below raise if a
        # group has another size
        group["params"] = saved_group["params"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, state in saved["state"].items():
        parameter = parameters[number]
        for key, x in state.items():
            if key == "exp_avg" and type(optimizer) is torch.optim.AdamW and x.shape != parameter.shape:
                raise ValueError("its optimizer's parameters have another order or other shapes")
            if isinstance(parameter, DTensor) and x.shape == parameter.shape:
                mesh, placements = parameter.device_mesh, parameter.placements
                state[key] = distribute_tensor(x.to(parameter.device), mesh, placements, src_data_rank=None)
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})


# ---------------------------------------------------------------- records


def read_records(spec, where):
    """Yields (line number from 1, record) of one data set; for a csv record, the number of its last line."""
    try:
        if spec["type"] == "jsonl":
            records = enumerate(Path(spec["path"]).read_bytes().split(b"\n"), 1)
        elif spec["type"] == "csv":
            text = Path(spec["path"]).read_bytes().decode("utf-8-sig")
            # strict: otherwise an unclosed quote swallows the rest of the file
            reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
            for name in reader.fieldnames or []:
                if name and reader.fieldnames.count(name) > 1:
                    raise ValueError(f"its first line has the column {name!r} twice: rename one of them")
            records = [(reader.line_num, record) for record in reader]
        elif spec["type"] == "parquet":
            records = enumerate(pyarrow.parquet.read_table(spec["path"]).to_pylist(), 1)
        elif spec["type"] != "hub":
            raise ValueError("the types are jsonl, csv, parquet and hub")
        else:
            import datasets  # slow

            split = spec.get("split", "train")
            records = enumerate(datasets.load_dataset(spec["path"], spec.get("name"), split=split), 1)
    except Exception as error:  # the libraries raise many types
        line = ""
        if isinstance(error, csv.Error):
            line = f" line {reader.reader.line_num}"
        raise UserError(f"{where}{line}: cannot be read as {spec['type']} ({first_line(error)})") from None
    for number, record in records:
        if spec["type"] == "csv":
            if None in (*record, *record.values()):
                fault = "its number of fields differs from the first line's: quote commas"
                raise UserError(f"{where} line {number}: {fault}")
            record = {key: text or None for key, text in record.items()}
        try:
            if not isinstance(record, bytes):
                yield number, record
            elif record.strip():
                yield number, dict(json.loads(record.decode("utf-8-sig")))
        except (ValueError, TypeError) as error:
            raise UserError(f"{where} line {number}: not a JSON object ({error}); correct it") from None


def look_up(record, path, where):
    """Returns the value at a path such as "answers.text" in nested records."""
    keys = path.split(".")
    if path in record:
        keys = [path]
    value = record
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if value is None:
        fault = f"there is no value for column {path!r}"
        if path.split(".")[0] not in record:
            fault += f"; the row has {sorted(record)}"
        raise UserError(f"{where}: {fault}")
    return value


def cell_text(value, where):
    """Returns a text of a file; a number becomes text, and so do JSON's true and false."""
    if isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, (str, int, float)) or value != value:  # NaN
        raise UserError(f"{where} must be a text or a number, not {repr(value)[:80]}: correct or delete it")
    return str(value)


def cell_texts(value, where):
    """Returns a list of texts; a single one becomes a list."""
    if not isinstance(value, list) or not value:
        value = [value]
    return [cell_text(item, where) for item in value]


def column(rows, field):
    """Returns one field of all rows, a list."""
    return [row[field] for row in rows]


def repeat_each(rows, count):
    """Returns each row `count` times, one after another, a list."""
    return [row for row in rows for _ in range(count)]


def next_rows(rows, state, count):
    """Returns the next `count` rows, fewer at the end of an epoch. state.order is this epoch's
    permutation."""
    if state.cursor == 0:
        state.epoch += 1
        state.order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED + state.epoch))
    chosen = state.order[state.cursor : state.cursor + count].tolist()
    state.cursor = (state.cursor + len(chosen)) % len(rows)
    return [rows[i] for i in chosen]


# ---------------------------------------------------------------- rewards


def resolve_rewards(functions, constant):
    """Returns [(name, function, weight)] of pairs (function or its name in rewards/, weight). A name that
    occurs again, such as <lambda>, gets a number."""
    resolved = []
    counts = Counter()
    for pair in functions:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise UserError(f"{constant} takes pairs (function or name in rewards/, weight), not {pair!r}")
        function, weight = pair
        if not isinstance(weight, (int, float)):
            raise UserError(f"{constant}: the weight of {function!r} is a number, not {weight!r}")
        if isinstance(function, str):
            function = getattr(rewards, function, None)
        if not callable(function):
            raise UserError(f"{constant}: rewards/ has no function {pair[0]!r}")
        name = json_name(function)
        counts[name] += 1
        if counts[name] > 1:
            name = f"{name}_{counts[name]}"
        resolved.append((name, function, float(weight)))
    return resolved


@contextmanager
def time_limit():
    """Ends the program, and shows where it hangs, if the block takes longer than REWARD_TIMEOUT seconds."""
    if REWARD_TIMEOUT and sys.__stderr__:  # sys.stderr may be a notebook's, without a file
        faulthandler.dump_traceback_later(REWARD_TIMEOUT, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def call_reward(name, function, prompts, responses, answers, columns=None):
    """Calls a reward function and returns its values, (rows,). Its fourth and later parameters get the data
    columns of their names."""
    columns = columns or {}
    signature = inspect.signature(function)
    first = [*signature.parameters][:3]  # these are passed by position
    takes_all = any(p.kind == p.VAR_KEYWORD for p in signature.parameters.values())
    taken = {*first, "self"}  # a column named self would be a method's first argument
    named = {k: v for k, v in columns.items() if k not in taken and (takes_all or k in signature.parameters)}
    try:
        signature.bind(prompts, responses, answers, **named)
    except TypeError as error:
        call = "it is called with prompts, responses, answers and, by their names, columns of the data"
        raise UserError(f"{name}: {error}; {call}; the columns of these rows are {sorted(columns)}") from None
    try:
        values = function(prompts, responses, answers, **named)
        if isinstance(values, Iterator):  # a generator
            values = list(values)
    except Exception as error:
        if isinstance(error, ValueError) and getattr(function, "__module__", None) == rewards.__name__:
            raise UserError(str(error)) from None  # it says what its data must have
        if not isinstance(error, UserError) and not hasattr(error, "__notes__"):  # not noted yet
            error.add_note(f"(raised by the reward function {name})")
        raise
    return check_scores(name, values, len(responses))


def check_scores(name, values, count):
    """Returns the values as a float32 tensor (count,). Anything else is a mistake of the reward function."""
    if inspect.isawaitable(values) or inspect.isasyncgen(values):
        if inspect.iscoroutine(values):
            values.close()  # otherwise Python warns that it was never awaited
        hint = "make it a plain function; rewards.threaded() makes many calls at a time"
        raise UserError(f"{name} is async: {hint}")
    try:
        scores = torch.as_tensor(values, dtype=torch.float32).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        returned = repr(values)[:80]
        if isinstance(values, (list, tuple)):
            returned += f", a {type(values).__name__} of {len(values)} values"
        returned += ", which cannot be read as numbers"
    else:
        if scores.shape == (count,) and scores.isfinite().all():
            return scores
        returned = f"{repr(values)[:80]}, of shape {tuple(scores.shape)}"
    raise UserError(f"{name} must return {count} finite numbers, one per response; it returned {returned}")


def reward_chunks(rows):
    """Returns slices of the rows, one for each call of a reward function, with at most BATCH_SIZE *
    GROUP_SIZE rows. Responses to one prompt, which are neighbours and share one row object, stay together
    even where they are more: a reward function may compare them."""
    chunks = []
    start = end = 0
    for _, group in itertools.groupby(rows, key=id):  # rows of one prompt are one object
        group_size = len(list(group))
        if end > start and end + group_size - start > BATCH_SIZE * GROUP_SIZE:
            chunks.append(slice(start, end))
            start = end
        end += group_size
    return [*chunks, slice(start, end)]


def score_over_ranks(trainer, function_name, function, batch):
    """Calls a reward function with one chunk of a batch's responses at a time; the processes share the calls.
    Returns the scores and {part: values (rows,)} of what the function left in trainer.reward_parts."""

    def score_chunk(chunk):
        rows = [copy.deepcopy(row) for row in batch.rows[chunk]]  # a judge may append to its messages
        records = column(rows, "columns")
        columns = {name: column(records, name) for name in records[0]}
        for name, values in batch.columns.items():
            columns[name] = copy.deepcopy(values[chunk])
        prompts, responses, answers = column(rows, "prompt"), batch.responses[chunk], column(rows, "answer")
        trainer.reward_parts = {}
        with time_limit():
            scores = call_reward(function_name, function, prompts, responses, answers, columns)
        reward_parts = {}
        for part, values in trainer.reward_parts.items():
            reward_parts[part] = check_scores(f"reward_parts[{part!r}]", values, len(scores))
        return scores, reward_parts

    scores, chunk_parts = zip(*map_over_ranks(reward_chunks(batch.rows), score_chunk))
    for reward_parts in chunk_parts:
        if different := reward_parts.keys() ^ chunk_parts[0].keys():
            part = sorted(different)[0]
            hint = "in some calls only: set it in every call"
            raise UserError(f"{function_name} sets reward_parts[{part!r}] {hint}")
    reward_parts = {}
    for part in chunk_parts[0]:
        reward_parts[part] = torch.cat([values[part] for values in chunk_parts])
    return torch.cat(scores), reward_parts


# ---------------------------------------------------------------- processes


def rank():
    """Returns the number of this process, from 0. Process 0 alone asks, writes and prints."""
    return int(os.environ.get("RANK", 0))


def world_size():
    return int(os.environ.get("WORLD_SIZE", 1))


def find_device():
    """Returns the device that DEVICE names; each process of a machine gets a GPU of its own."""
    join_processes()
    best = "cpu"
    if torch.cuda.is_available():
        best = "cuda"
    elif torch.backends.mps.is_available() and world_size() == 1:  # gloo does not know mps
        best = "mps"
    name = best if DEVICE == "auto" else DEVICE
    if name == "cuda" and world_size() > 1:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError):
        raise UserError(f"DEVICE = {name!r} is not available; auto takes {best}, one per process") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def join_processes():
    """Joins the process group that torchrun started, and checks that all processes have the same
    constants."""
    if dist.is_initialized() or (world_size() == 1 and not is_sharded()):
        return
    if "MASTER_ADDR" not in os.environ:
        raise UserError("SHARD = 'fsdp2' needs torchrun --nproc_per_node=N, for one process too")
    os.environ.setdefault("NCCL_ALGO", "Ring")  # always adds in the same order
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    wait = timedelta(seconds=PROCESS_TIMEOUT)
    store = next(dist.rendezvous("env://", timeout=wait))[0]
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        # After a restart by torchrun the keys of the failed attempt are still there: the prefix hides them.
        # Several machines may count restarts differently, so there it is left out
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(backend, store=store, timeout=wait, world_size=world_size(), rank=rank())
    fingerprints = all_gather(run_fingerprint())
    for name, value in fingerprints[0].items():
        if any(other.get(name) != value for other in fingerprints):
            raise UserError(f"{name} differs between the processes: make it the same")


def all_gather(value=None):
    """Returns the values of all processes, a list by rank. Tensors of other processes come to the CPU."""
    if not dist.is_initialized():
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, tree_map_only(torch.Tensor, torch.Tensor.cpu, value))
    return values


def broadcast_from_rank0(function):
    """Returns what function() returns on process 0, which alone calls it."""
    value = function() if rank() == 0 else None
    return all_gather(value)[0]


def progress(items, unit):
    """Yields the items. On a terminal process 0 shows a progress bar, which vanishes at the end; without a
    terminal it prints a line about every 30 seconds."""
    if rank() > 0 or len(items) == 1:  # a single item is not worth a bar
        yield from items
    elif sys.stdout.isatty():
        yield from tqdm(items, unit=f" {unit}", leave=False, file=sys.stdout, dynamic_ncols=True)
    else:
        started = printed = time.perf_counter()
        for done, item in enumerate(items):
            now = time.perf_counter()
            if done and now - printed > 30:
                printed = now
                time_left = tqdm.format_interval((now - started) / done * (len(items) - done))
                print(f"{done} of {len(items)} {unit}, {time_left} left", flush=True)
            yield item


_INSIDE_RANK_MAP = []  # not empty while this process computes its share in map_over_ranks()


def map_over_ranks(items, compute):
    """Returns [compute(item)] in the order of the items. Each is computed by one process and sent to all. A
    call inside compute(), such as a reward that samples, is not shared again."""
    if _INSIDE_RANK_MAP or world_size() == 1:
        return [compute(item) for item in progress(items, "batches")]
    _INSIDE_RANK_MAP.append(compute)
    mine = [compute(item) for item in progress(items[rank() :: world_size()], "batches")]
    _INSIDE_RANK_MAP.pop()
    results = all_gather(mine)  # of N processes, i % N has item i in place i // N
    return [results[i % world_size()][i // world_size()] for i in range(len(items))]


def get_rng_state():
    """Returns the states of Python's, NumPy's and torch's generators, as plain types."""
    name, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (name, keys.tolist(), *rest)}
    state["torch"] = torch.get_rng_state().tolist()
    if torch.cuda.is_initialized():  # for functions of yours that draw there
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    return state


def set_rng_state(state):
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.ByteTensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(torch.ByteTensor(state["cuda"]))


def seed_everything(seed):
    """Seeds all generators, and asks for kernels that always add in the same order."""
    with suppress(ImportError):  # transformers imports it during a run, and its import draws a random number
        import sklearn.metrics  # noqa: F401
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time


# ---------------------------------------------------------------- files and checkpoints


def fsync(path):
    handle = os.open(path, os.O_RDONLY)  # works for folders too
    os.fsync(handle)
    os.close(handle)


def file_digest(path):
    with open(path, "rb") as file:
        return {"size": os.path.getsize(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_atomically(path, write):
    """write(tmp) writes a file, or a folder with its files; then it is synced to the disk and renamed to
    `path`, which is therefore there whole or not at all. A folder that stands there already is renamed first;
    if the program is killed between the two renames, finish_replacing() brings it back."""
    tmp = path.with_name(path.name + ".tmp")
    old = path.with_name(path.name + ".old")
    try:
        write(tmp)
        for written in [*tmp.rglob("*"), tmp]:
            fsync(written)
        if path.is_dir():
            os.rename(path, old)
        os.rename(tmp, path)
        fsync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:
        shutil.rmtree(tmp, ignore_errors=True)
        finish_replacing(path)
        # The disk's errors are OSErrors, but torch.save and safetensors raise types of their own
        if not isinstance(error, OSError) and not re.search("inline_container|os error", str(error)):
            raise
        hint = "make room and start again; training continues from the last good checkpoint"
        raise UserError(f"{path} could not be saved ({first_line(error)}): {hint}") from None


def finish_replacing(folder):
    """Brings back the folder that write_atomically() was replacing when the program was killed."""
    old = folder.with_name(folder.name + ".old")
    if old.exists() and not folder.exists():
        os.rename(old, folder)
    shutil.rmtree(old, ignore_errors=True)


def checkpoint_error(folder):
    """Returns why a checkpoint cannot be trusted, or None. Its files must be those of its manifest."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name in ("training_state.pt", *manifest):
            if file_digest(folder / name) != manifest[name]:
                return f"{name} is not the file that was saved"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return first_line(error)
    return None


def check_state(state):
    """Refuses a field of the state that load_checkpoint() could not read, because it would end every
    resume."""
    for name, value in state.items():
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception:  # pickle and torch raise many types
            types = "numbers, texts, lists, tuples, dicts and tensors"
            fault = f"is of type {type(value).__name__}, but a checkpoint takes {types}"
            raise UserError(f"self.state.{name} {fault}") from None


def list_checkpoints(output_dir):
    """Returns [(N, path of step_N)] of a run, oldest first."""
    checkpoints = {}
    for path in Path(output_dir).glob("step_*"):
        number = path.name.removeprefix("step_")
        if number.isdecimal():
            checkpoints[int(number)] = path
    return sorted(checkpoints.items())


def choose_checkpoint(resume, output_dir, log):
    """Returns the checkpoint to resume from, or None to start from the beginning. Asks at a terminal if
    resume is "ask"."""
    if resume == "no":
        return None
    is_path = resume not in ("ask", "yes")
    if is_path and not Path(resume).exists():
        raise UserError(f"RESUME = {resume!r}: no such folder. It takes ask, yes, no, or a checkpoint or run")
    run = resume if is_path else output_dir
    checkpoints = list_checkpoints(run)
    if is_path and not checkpoints:
        checkpoints = [(0, Path(resume))]
    for _, folder in reversed(checkpoints):
        if error := checkpoint_error(folder):
            log(f"WARNING: skipping the broken checkpoint {folder}: {error}")
            continue
        log(f"Found checkpoint: {folder}")
        if resume != "ask" or world_size() > 1 or not sys.stdin.isatty():
            log("Resuming from it (RESUME=no starts a new run)")
            return folder
        reply = ""
        while reply not in ("y", "n"):
            reply = input("Resume training from it? (y/n): ").strip().lower()[:1]
        return folder if reply == "y" else None
    if checkpoints:
        hint = "repair one, or set RESUME=no, which moves the old run aside"
        raise UserError(f"no checkpoint in {run} is whole: {hint}")
    return None


def archive_old_run(paths, output_dir, log):
    """Moves what a new start would overwrite to OUTPUT_DIR/old_<time>/."""
    if not paths:
        return
    archive = Path(output_dir) / f"old_{datetime.now():%Y%m%d_%H%M%S_%f}"
    archive.mkdir(exist_ok=True)
    for path in paths:
        os.rename(path, archive / path.name)
    names = ", ".join(sorted(path.name for path in paths))
    log(f"Moved {names} of an earlier run to {archive}")


# ---------------------------------------------------------------- schedule and plots


def learning_rate_scale(steps_done, total, warmup, schedule, halvings):
    """Returns the factor of the learning rate after steps_done steps: linear warm-up, then the schedule (None
    stays at 1)."""
    if steps_done < warmup:
        return (steps_done + 1) / warmup
    done = (steps_done - warmup) / max(1, total - warmup)
    if schedule == "linear":
        return 1 - done
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if schedule == "plateau":
        return 0.5**halvings
    return 1.0


def read_metrics(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def varies(records, keys, phases):
    """Returns whether a plot of these metrics shows something: in the records of the phases one of them has
    different values, or was logged only once."""
    for key in keys:
        values = []
        for record in records:
            if record["phase"] in phases and record.get(key) is not None:
                values.append(record[key])
        if len(values) == 1 or len(set(values)) > 1:
            return True
    return False


def plot_metric(axis, records, phase, key, color, label):
    """Plots a metric by step. Training: each step faint, and the rolling mean. Evaluation: points, and a
    dashed line at the first one. line_styles() returns a legend's lines for them."""
    points = [(r["step"], r[key]) for r in records if r["phase"] == phase and r.get(key) is not None]
    axis.xaxis.get_major_locator().set_params(integer=True)
    if not points:
        return
    x, y = np.array(points, dtype=float).T
    if phase == "train":
        window = max(1, len(y) // 12)
        rolling = [y[max(0, i - window) : i].mean() for i in range(1, len(y) + 1)]
        axis.plot(x, y, color=color, alpha=0.25)
        axis.plot(x, rolling, color=color, label=label)
        if len(x) == 1:  # a line of one point is not seen
            axis.plot(x, y, ".", color=color)
    else:
        axis.plot(x, y, "o-", color=color, markersize=4, linewidth=0.8, label=label)
        axis.axhline(y[0], color=color, linestyle="--", linewidth=0.8)


def line_styles(axis, names):
    """Returns empty lines whose labels say what plot_metric() draws. names: what each phase shows."""
    train, held_out = names["train"], names["eval"]
    return [
        *axis.plot([], [], color="C0", alpha=0.25, label=f"{train}, each step"),
        *axis.plot([], [], color="C0", label=f"{train}, mean over 1/12 of the steps"),
        *axis.plot([], [], "o-", color="C1", markersize=4, linewidth=0.8, label=held_out),
        *axis.plot([], [], "--", color="C1", linewidth=0.8, label=f"{held_out}, first evaluation"),
    ]


def draw_plot(records, path, title, panels, names):
    """Draws a grid of panels, each (y label, metrics), without those in which nothing changes. names: what
    each phase shows, {"train": ..., "eval": ...}."""
    panels = [panel for panel in panels if varies(records, panel[1], names)] or panels
    if not panels:
        return
    height = math.ceil(len(panels) / 3)
    figure = Figure(figsize=(9.5, 1.4 + 2.2 * height))
    inch = 1 / figure.get_figheight()  # margins by hand: matplotlib's own layouts take 1.5 times as long
    figure.subplots_adjust(0.08, 0.5 * inch, 0.99, 1 - 1.0 * inch, wspace=0.36, hspace=0.36)
    figure.suptitle(title, y=1 - 0.1 * inch)
    for number, (label, keys) in enumerate(panels, 1):
        if label in ("entropy", "kl", "approx_kl"):
            label += " (nats per token)"
        if label == "response_length":
            label += " (tokens)"
        axis = figure.add_subplot(height, 3, number, xlabel="training step", ylabel=label)
        axis.grid(alpha=0.3)
        axis.ticklabel_format(axis="y", scilimits=(-3, 4), useOffset=False)  # short labels stay inside
        for i, key in enumerate(keys):
            labels = names
            if len(keys) > 1:
                labels = {"train": key, "eval": key}
            plot_metric(axis, records, "train", key, f"C{2 * i}", labels["train"])
            plot_metric(axis, records, "eval", key, f"C{2 * i + 1}", labels["eval"])
        if len(axis.get_legend_handles_labels()[0]) > 1:
            axis.legend(fontsize=8)
    lines = line_styles(axis, names)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 1 - 0.3 * inch)}
    figure.legend(handles=lines, ncols=2, fontsize=9, **place)
    write_atomically(path, partial(figure.savefig, format="png", dpi=120))


# ---------------------------------------------------------------- the run


def as_numbers(metrics):
    """Returns {name: number} of metrics that may be tensors or NumPy numbers."""
    numbers = {}
    for name, value in metrics.items():
        if hasattr(value, "tolist"):
            value = value.tolist()
        if not isinstance(value, (int, float)):
            raise TypeError(f"the metric {name!r} must be one number, not {value!r}")
        numbers[name] = value
    return numbers


def without_nan(record):
    """Returns a record with None for each number that is not finite, which JSON does not have."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def model_name(path):
    """Returns the last folder names of a path, by which a model is known after a move: one or, where the last
    is policy or reward_model, three, such as sft/best/policy."""
    parts = Path(str(path)).parts
    return parts[-3:] if parts[-1] in ("policy", "reward_model") else parts[-1:]


class Run:
    """One run in OUTPUT_DIR: its lock, logs, plots, checkpoints, signals and counters. The trainer's train()
    decides when it evaluates and saves."""

    checkpointed_fields = ("step", "evaluated_at", "best_value", "patience_value", "evals_since_best")
    checkpointed_fields += ("halvings", "skipped", "log_lines", "wandb_id", "evaluation", "is_stopped")

    def __init__(self, name, resume, device):
        self.name = name
        self.title = name  # of the plots
        self.panels = []  # of the algorithm's plot: (label, metrics)
        self.missing_metrics = []  # of the panels; logged once
        self.phase_names = {"train": "training", "eval": "held out"}  # of the plots
        self.device = device
        # A new run moves these of an earlier one aside
        self.old_files = ["logs", "step_*", "best", "training_config.json", "training_metrics_*.png"]
        self.old_files += ["eval_*", f"{name}_*.png"]
        self.best_by = ["reward"]  # best/ and patience follow the first of these that evaluate() returns
        self.logs = {"metrics.jsonl": None, "samples.jsonl": None}  # {name: file, open while training}
        self.log_lines = {}  # {name: lines in it when the checkpoint was saved}
        self.text_log = None  # file of what log() prints
        self.has_changed = False  # whether the run resumes with other constants
        self.has_other_scores = False  # a changed constant is in _CHANGE_SCORES; best/ has the earlier scores
        self.has_failed = False  # True while train() runs, and after it ended with an error
        self.unwritten = []  # what log() printed before that file was open
        self.step = 0  # the current step, from 1; between steps, how many are done
        self.total_steps = 0
        self.clock = None  # for time_left(): when this train() began its first step, and the steps before it
        self.reset_best()
        self.evaluation = {}  # the last one's metrics
        self.skipped = 0  # optimizer steps in a row that were not finite
        self.times = {}  # seconds of this step, by activity
        self.wandb = self.wandb_id = None
        self.signal = None  # received by this process
        self.stop_signal = None  # by which all processes agreed to stop
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        tqdm.set_lock(threading.RLock())  # tqdm's own lock starts a process on some systems
        self.folder = Path(OUTPUT_DIR)
        self.lock = filelock.FileLock(self.folder / ".lock", thread_local=False, is_singleton=True)
        if rank() == 0:
            self.take_lock()
            for old in [*self.folder.glob("best.old"), *self.folder.glob("step_*.old")]:
                finish_replacing(old.with_suffix(""))
        choose = partial(choose_checkpoint, resume or RESUME, OUTPUT_DIR, self.log)
        self.checkpoint = broadcast_from_rank0(choose)  # to resume from; later the last that was saved
        if self.checkpoint:
            trainer = json.loads((self.checkpoint / "config.json").read_text()).get("trainer", name)
            if trainer != name:
                hint = "set another OUTPUT_DIR or, to begin anew, RESUME=no"
                raise UserError(f"{self.checkpoint} is of the trainer {trainer!r}, not {name!r}: {hint}")
        seed_everything(SEED)

    def reset_best(self):
        """Forgets earlier evaluations: nothing is best yet."""
        self.evaluated_at = -1  # the step of the last evaluation
        self.best_value = -math.inf  # the highest so far, whose policy is in best/
        self.patience_value = -math.inf  # the last that was better by more than EARLY_STOPPING_THRESHOLD
        self.evals_since_best = 0  # evaluations since patience_value rose
        # You may set this to True, on all processes: then this step is the last, also after a restart. To go
        # on nevertheless, set it to False before train()
        self.is_stopped = False
        self.halvings = 0  # of the learning rate, by LR_SCHEDULER_TYPE = "plateau"

    def take_lock(self):
        """Keeps other processes out of OUTPUT_DIR. The lock ends with this process, even by SIGKILL."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.lock.acquire(blocking=False)
        except filelock.Timeout:
            raise UserError(f"OUTPUT_DIR = {OUTPUT_DIR!r} is in use by another run: set another") from None

    def register(self, state, models, optimizers, tokenizer):
        """Names what a checkpoint holds: state, a namespace of plain values and tensors; models and
        optimizers by name; the tokenizer, if any. When the run resumes, state and optimizers get what the
        checkpoint holds; models must have been loaded from it."""
        self.state = state
        self.models = models
        self.optimizers = optimizers
        self.tokenizer = tokenizer
        if self.checkpoint:
            self.load_checkpoint(self.checkpoint)

    # ------------------------------------------------------------ the loop

    @contextmanager
    def session(self, summary):
        """Wraps the whole training: opens the files, catches signals, and saves a checkpoint at the end."""
        if self.has_failed:
            raise RuntimeError(
                "the last train() failed after its checkpoint: make a new trainer, which resumes"
            )
        self.signal = None
        self.clock = None
        if rank() == 0:
            self.open_files()
        self.best_value = all_gather(self.best_value)[0]  # open_files() may have reset it on process 0
        self.log(summary)
        handlers = {n: signal.signal(n, self.on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        self.has_failed = True  # until the end is reached
        try:
            yield
            self.agree_on_stop()
            self.save()
            self.has_failed = False
            self.log(self.final_message())
            if self.wandb:
                self.wandb.finish()
            all_gather()  # wait: torchrun would end the processes that are still writing
        finally:
            self.lock.release(force=True)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def on_signal(self, number, frame):
        """Ctrl-C and SIGTERM end the run after the current step; a second Ctrl-C ends it at once."""
        if self.signal and number == signal.SIGINT:
            os._exit(130)
        self.signal = number
        if rank() == 0:
            print("\nStopping after this step, then saving; Ctrl-C again stops at once", flush=True)

    def agree_on_stop(self):
        """Returns whether any process got a signal. Also checks that the random generators of all processes
        are in the same state."""
        rng_state = get_rng_state()
        rng_state.pop("cuda", None)  # a GPU draws for its micro-batches alone
        signals, rng_states = zip(*all_gather((self.signal or 0, repr(rng_state))))
        if len(set(rng_states)) > 1:
            hint = "give your functions a generator of their own"
            raise UserError(f"the processes drew different random numbers: {hint}")
        self.stop_signal = max(signals) or None
        return self.stop_signal is not None

    def needs_first_evaluation(self):  # all processes must call it
        return self.evaluated_at < 0 and not self.is_over()

    def next_step(self):
        """Begins the next step and returns True; returns False after the last step, a signal, or when
        patience has run out."""
        if self.is_over():
            return False
        if self.clock is None:
            self.clock = (time.perf_counter(), self.step)
        self.step += 1
        self.times = {}
        return True

    def is_over(self):  # all processes must call it
        stopped = self.agree_on_stop()
        out_of_patience = 0 < EARLY_STOPPING_PATIENCE <= self.evals_since_best
        return stopped or out_of_patience or self.is_last_step()

    def is_last_step(self):
        return self.is_stopped or self.step >= self.total_steps

    def is_due(self, interval):
        """Returns whether something that happens every `interval` steps happens after this one; 0: never."""
        return interval > 0 and self.step % interval == 0

    @contextmanager
    def timed(self, activity):
        """Adds the seconds of the block to seconds/<activity> of this step."""
        started = time.perf_counter()
        yield
        self.times[activity] = self.times.get(activity, 0.0) + time.perf_counter() - started

    # ------------------------------------------------------------ what is logged

    def log_step(self, metrics, count, samples, line, unit="tokens"):
        """Logs the metrics of a step that processed `count` units and some of its samples, and prints its
        line."""
        times = {activity: value for activity, value in self.times.items() if activity != "evaluate"}
        seconds = {f"seconds/{activity}": value for activity, value in times.items()}
        speed = {}
        if times:
            speed[f"{unit}_per_second"] = count / sum(times.values())
        if self.device.type == "cuda":
            metrics["gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30  # the most so far
        self.write_metrics("train", {**metrics, **speed, **seconds})
        for sample in samples:
            self.write("samples.jsonl", {"step": self.step, **sample})
        self.log(f"{line}  step {self.step}/{self.total_steps}, {self.time_left()} left")

    def time_left(self):
        started, steps_before = self.clock or (time.perf_counter(), self.step)
        seconds_per_step = (time.perf_counter() - started) / max(1, self.step - steps_before)
        return timedelta(seconds=round(seconds_per_step * (self.total_steps - self.step)))

    def log_evaluation(self, metrics):
        """Logs what evaluate() returned. Keeps the policy with the highest value in best/, and counts the
        evaluations since one was better by EARLY_STOPPING_THRESHOLD."""
        metrics = as_numbers(metrics or {})
        metrics = self.evaluation = all_gather(metrics)[0]  # all processes decide by the same numbers
        self.evaluated_at = self.step
        if not metrics:
            return
        seconds = {}
        if "evaluate" in self.times:
            seconds["seconds/evaluate"] = self.times.pop("evaluate")
        self.write_metrics("eval", {**metrics, **seconds})
        texts = [f"{key} {x:,}" if isinstance(x, int) else f"{key} {x:.3f}" for key, x in metrics.items()]
        self.log(f"step {self.step}, held out: " + "  ".join(texts))
        value = next((metrics[key] for key in self.best_by if key in metrics), None)
        if value is None:
            names = " or ".join(self.best_by)
            raise UserError(f"evaluate() must return the metric {names}, which best/ and patience follow")
        self.evals_since_best += 1
        if value > self.patience_value + EARLY_STOPPING_THRESHOLD:
            self.patience_value = value
            self.evals_since_best = 0
        elif self.evals_since_best % PLATEAU_PATIENCE == 0:
            self.halvings += 1
        if self.is_best(value):
            self.best_value = value
            if self.has_other_scores and rank() == 0:
                archive_old_run(list(self.folder.glob("best")), OUTPUT_DIR, self.log)
            self.has_other_scores = False
            self.save_best(metrics)

    def is_best(self, value):
        return value > self.best_value

    def write_metrics(self, phase, metrics):
        numbers = without_nan(as_numbers(metrics))
        self.write("metrics.jsonl", {"phase": phase, "step": self.step, **numbers})
        if self.wandb:
            self.wandb.log({f"{phase}/{key}": value for key, value in numbers.items()}, step=self.step)

    def write(self, name, record):
        """Writes one line of JSON to a log."""
        if rank() > 0:
            return
        if self.logs[name] is None:
            raise RuntimeError(f"{name} is open only inside `with run.session(...)`")
        self.logs[name].write(json.dumps(without_nan(record)) + "\n")

    def log(self, text):
        """Prints one line, above any progress bar, and writes it to the log file."""
        if rank() > 0:
            return
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
        self.unwritten.append(text)
        if self.text_log:
            print(*self.unwritten, sep="\n", file=self.text_log, flush=True)
            self.unwritten = []

    def note_optimizer_step(self, finite, row_names):
        """Counts optimizer steps in a row that were skipped, and names their rows. Five end the run."""
        if finite:
            self.skipped = 0
            return
        self.skipped += 1
        names = " ".join(sorted(set(row_names)))
        fault = "an optimizer step was skipped, because its loss or gradient is not finite"
        self.log(f"WARNING: step {self.step}: {fault}; its prompts: {names}")
        if self.skipped == 5:
            raise UserError("five optimizer steps in a row were not finite: lower the learning rate")

    def draw_plots(self):
        records = read_metrics(self.folder / "logs/metrics.jsonl")
        if not records:
            return
        keys = dict.fromkeys(key for record in records for key in record if key not in ("phase", "step"))
        for key in [key for _, metrics in self.panels for key in metrics if key not in keys]:
            # Only a name that is near is a typo: a panel may show what other settings would log
            near = difflib.get_close_matches(key, keys, 1, cutoff=0.85)
            if near and key not in self.missing_metrics:
                self.missing_metrics.append(key)
                fault = f"a panel of the plot shows {key!r}, which no step has logged"
                self.log(f"NOTE: {fault}; did you mean {near[0]}?")
        all_panels = [(key, [key]) for key in keys]
        detailed = self.folder / "training_metrics_detailed.png"
        title = f"{self.title}: every metric that changed"
        draw_plot(records, detailed, title, all_panels, self.phase_names)
        path = self.folder / f"{self.name}_metrics_with_entropy.png"
        draw_plot(records, path, self.title, self.panels, self.phase_names)

    def final_message(self):
        if self.stop_signal:
            return f"Stopped at step {self.step}: start it again with RESUME=yes to continue"
        policy = self.folder / "best/policy"
        if not policy.exists():
            policy = self.checkpoint / "policy"
        policy = f"{policy}{self.step_of_best()}"
        done = f"Done at step {self.step} of {self.total_steps}"
        if self.is_stopped:
            done += ", where is_stopped = True ended the run"
        return f"{done}. Plots: {OUTPUT_DIR}/*.png; policy: {policy}"

    # ------------------------------------------------------------ saving and resuming

    def step_of_best(self, first=0):
        """Returns of which step best/ is, as text. first: the step before anything was trained."""
        path = self.folder / "best/metrics.json"
        if not path.exists():
            return ""
        step = json.loads(path.read_text())["step"]
        if step == first and self.step > first:
            return f" (of step {step}: no later one was better in evaluation)"
        return f" (of step {step})"

    def save(self):
        """Writes step_N/, removes old checkpoints and draws the plots. All processes must call it."""
        # Set even if nothing is written: open_files() sees from it that a second train() continues this run
        folder = self.checkpoint = self.folder / f"step_{self.step}"
        # session() saves the last step, which may be saved already, but perhaps before the run was stopped
        if broadcast_from_rank0(folder.exists) and not self.is_stopped:
            return
        weights = {name: full_weights(model) for name, model in self.models.items()}
        optimizers = {name: full_state(optimizer.state_dict()) for name, optimizer in self.optimizers.items()}
        if rank() > 0:
            return
        check_state(vars(self.state))
        self.log(f"Saving {folder}")
        write_atomically(folder, partial(self.write_checkpoint, weights, optimizers))
        for _, old in list_checkpoints(OUTPUT_DIR)[:-KEEP_LAST_N_CHECKPOINTS]:
            shutil.rmtree(old)
        self.draw_plots()

    def write_checkpoint(self, weights, optimizers, folder):
        for name, model in self.models.items():
            self.save_model(model, folder / name, weights[name])
        for name, file in self.logs.items():
            fsync(file.name)
            self.log_lines[name] = Path(file.name).read_bytes().count(b"\n")
        saved = {
            "run": {key: getattr(self, key) for key in self.checkpointed_fields},
            "state": vars(self.state),
            "optimizers": optimizers,
            "rng": get_rng_state(),
        }
        torch.save(saved, folder / "training_state.pt")
        config = {"trainer": self.name, **run_fingerprint()}
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        manifest = {}
        for path in folder.rglob("*"):
            if path.is_file():
                manifest[str(path.relative_to(folder))] = file_digest(path)
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))

    def save_best(self, metrics):
        policy = self.models["policy"]
        if LORA_RANK:
            policy = merge_adapter(policy)
        weights = full_weights(policy)  # all processes must call it
        if rank() == 0:
            write_atomically(self.folder / "best", partial(self.write_best, metrics, policy, weights))

    def write_best(self, metrics, policy, weights, folder):
        self.save_model(policy, folder / "policy", weights)
        (folder / "metrics.json").write_text(json.dumps({"step": self.step, **metrics}, indent=1))

    def save_model(self, model, folder, weights=None):
        model.save_pretrained(folder, state_dict=weights)
        if self.tokenizer:
            self.tokenizer.save_pretrained(folder)

    def load_checkpoint(self, folder):
        """Restores state, optimizers and generators. The models were loaded from the same folder."""
        try:  # weights_only: nothing in the file is run
            saved = torch.load(folder / "training_state.pt", map_location="cpu", weights_only=True)
            before = json.loads((folder / "config.json").read_text().replace(f"{ROOT}/", ""))
            # The saved state may have further fields, which an edited trainer adds while it trains
            if missing := sorted(vars(self.state).keys() - saved["state"].keys()):
                raise ValueError(f"its state has no {', '.join(missing)}")
            if (prompts := saved["state"]["prompts"]) != self.state.prompts:
                hint = "give the same data, or begin anew with RESUME=no"
                raise ValueError(
                    f"it has {prompts} training prompts, now there are {self.state.prompts}: {hint}"
                )
            vars(self).update(saved["run"])
            vars(self.state).update(saved["state"])
            for name, optimizer in self.optimizers.items():
                load_optimizer_state(optimizer, saved["optimizers"][name])
            set_rng_state(saved["rng"])
        except Exception as error:
            raise UserError(f"{folder} cannot be used, choose another: {first_line(error)}") from None
        for key, value in run_fingerprint().items():
            if before.get(key) != value and key not in _MAY_CHANGE:
                self.has_changed = True
                is_model = key in ("ACTOR_MODEL", "BASE_MODEL")  # the second is reward_model.py's
                if is_model and model_name(value) != model_name(before.get(key)):
                    fault = f"was trained from {key} = {before.get(key)!r}, not {value!r}"
                    raise UserError(f"{folder} {fault}: give that one, or begin anew with RESUME=no")
                self.log(f"Changed since the checkpoint: {key} was {before.get(key)!r}, is {value!r}")
                self.has_other_scores |= key in _CHANGE_SCORES
        if self.has_other_scores:
            self.log("Earlier scores do not compare with the new ones: best/ and patience begin anew")
            # As reset_best() does, but is_stopped and halvings stay
            self.evaluated_at, self.evals_since_best = -1, 0
            self.best_value = self.patience_value = -math.inf

    def open_files(self):
        """Moves files of an earlier run aside, cuts the logs back to the checkpoint, and opens them."""
        self.take_lock()  # again, if an earlier train() has ended
        for pattern in self.old_files:
            for stale in self.folder.glob(f"{pattern}.tmp"):  # half written when the program was killed
                shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        continues_here = self.checkpoint and self.checkpoint.resolve().parent == self.folder.resolve()
        if continues_here:
            # Later checkpoints are broken or were given up: the next time a run resumes it must not find them
            to_archive = [path for step, path in list_checkpoints(OUTPUT_DIR) if step > self.step]
            best = self.folder / "best/metrics.json"
            # Otherwise best/ stays: the run repeats the steps up to that one and writes the same best/ again
            is_later = best.exists() and json.loads(best.read_text())["step"] > self.step
            if is_later and (to_archive or self.has_changed):
                to_archive.append(best.parent)
        else:
            to_archive = [path for pattern in self.old_files for path in self.folder.glob(pattern)]
            self.log_lines = {}
        metrics = self.folder / "logs/metrics.jsonl"
        is_cut = metrics.exists() and metrics.read_bytes().count(b"\n") > self.log_lines.get(metrics.name, 0)
        if not continues_here or (is_cut and self.has_changed) or self.has_other_scores:
            # wandb ignores steps that its run has already. That is right only where they are the same again
            self.wandb_id = None
        self.start_wandb()
        archive_old_run(to_archive, OUTPUT_DIR, self.log)
        if not (self.folder / "best").exists():
            self.best_value = -math.inf  # any value is better than none
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        for name in self.logs:
            self.logs[name] = open_log(logs / name, self.log_lines.get(name, 0))
        self.text_log = open(logs / time.strftime("training_%Y%m%d_%H%M%S.log"), "a")
        device = platform.machine()
        if self.device.type == "cuda":
            device = torch.cuda.get_device_name()
        config = {
            "constants": constants(),
            "processes": world_size(),
            "threads": torch.get_num_threads(),
            "device": device,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "git_commit": subprocess.getoutput(f"git -C '{ROOT}' rev-parse HEAD 2>/dev/null"),
        }
        (self.folder / "training_config.json").write_text(json.dumps(config, indent=1))

    def start_wandb(self):
        if not USE_WANDB:
            return
        import wandb  # slow

        options = {"project": WANDB_PROJECT, "dir": OUTPUT_DIR, "config": constants()}
        self.wandb = wandb.init(**options, id=self.wandb_id, resume="allow")
        self.wandb_id = self.wandb.id


def open_log(path, num_lines):
    """Cuts a log back to its first lines, so that every step stands in it once, and opens it for
    appending."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    write_atomically(path, lambda tmp: tmp.write_bytes(b"".join(lines[:num_lines])))
    return open(path, "a", buffering=1)


# ---------------------------------------------------------------- errors and constants


class UserError(Exception):
    """Something that the user can correct, in one message. The program ends with exit code 2."""


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def run_main(trainer_class):
    """Runs the trainer as a program. Exit codes: 0; 2 for what the user can correct; 130 or 143 after Ctrl-C
    or SIGTERM; 1, with a traceback, for everything else. An error in any process ends all of them; only the
    first to fail prints it."""
    try:
        apply_overrides(sys.argv[1:])
        code = run_stage(trainer_class)
    except (KeyboardInterrupt, EOFError):  # Ctrl-C or Ctrl-D at a question
        code = 130
    except Exception as error:
        message = user_message(error)
        if message is None and not dist.is_initialized():
            raise
        code = 2
        text = f"\n{Path(__file__).name}: {message}"
        if message is None:
            code = 1
            text = traceback.format_exc()
        if fails_first():
            print(text, file=sys.stderr)
    if dist.is_initialized():  # end at once: others may wait for us, and gloo's threads may abort the program
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def run_stage(trainer_class):
    """Trains or, with STAGE = "evaluate", scores a policy. Returns the exit code."""
    if STAGE == "evaluate":
        check_constants()
        evaluate_policy(trainer_class)
        return 0
    trainer = trainer_class()
    trainer.train()
    return 128 + trainer.run.stop_signal if trainer.run.stop_signal else 0


def user_message(error):
    """Returns what the user can do about an error, or None if a traceback says more."""
    if any("raised by" in note for note in getattr(error, "__notes__", ())):  # a function of the user's
        return None
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or OUTPUT_DIR}: {error.strerror or error}"
    if type(error).__module__.startswith("wandb"):
        return f"USE_WANDB = True: {first_line(error)}"
    if isinstance(error, dist.DistError) or "/gloo/" in str(error):  # gloo has no type for it
        return f"another process of this run ended or did not answer ({first_line(error)})"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error):
        hint = "set MICRO_BATCH_ROWS=1 and GRADIENT_CHECKPOINTING=True, or halve BATCH_SIZE and double "
        hint += "GRADIENT_ACCUMULATION_STEPS: the training stays as it is"
        return f"out of memory ({first_line(error)}): {hint}"
    return None


def fails_first():
    """Returns True on the first process that calls it; before the processes have joined, on process 0."""
    with suppress(Exception):  # there is no store yet, or it ended with the process that held it
        store = dist.distributed_c10d._get_default_store()
        return store.compare_set("failed", "", str(rank())).decode() == str(rank())
    return rank() == 0


def constants():
    """Returns every constant of this file, as JSON has it."""
    values = {k: v for k, v in globals().items() if k.isupper() and not k.startswith("_") and k != "ROOT"}
    return json.loads(json.dumps(values, default=json_name))


def json_name(value):
    """Returns what stands in JSON for a function or an object; it is the same in every run."""
    return getattr(value, "__name__", type(value).__name__)


def run_fingerprint():
    """Returns what decides a run's results: the constants, this file and the one that was started, and the
    number of threads and the GPU, on which the last bits depend."""
    gpu = None
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    # A program that imports this file and edits it, as in examples/, decides the results, too
    started = getattr(sys.modules["__main__"], "__file__", None) or __file__
    sources = [file for file in (__file__, started) if Path(file).is_file()]
    files = {Path(file).name: file_digest(file)["sha256"][:12] for file in sources}
    # Without ROOT: the repository may be moved
    values = json.loads(json.dumps(constants()).replace(f"{ROOT}/", ""))
    return {**values, **files, "GPU": gpu, "OMP_NUM_THREADS": torch.get_num_threads()}


def apply_overrides(arguments):
    """Sets constants from command-line arguments, KEY=VALUE or @FILE. A value has its constant's type."""
    annotate = globals().get("__annotate__")  # Python 3.14 computes annotations on demand (PEP 649)
    annotations = annotate(1) if annotate else __annotations__
    known = constants()
    for argument in read_arguments(arguments):
        key, equals, text = argument.partition("=")
        key = _RENAMED.get(key, key)
        if key in _INSTEAD_HERE:
            raise UserError(
                f"{argument}: {key} is a constant of other trainers; here set {_INSTEAD_HERE[key]}"
            )
        if not equals or key not in known:
            hint = did_you_mean(key.upper(), known)
            raise UserError(f"{argument!r} is not KEY=VALUE with a constant of this file{hint}")
        default = globals()[key]
        allowed = str(annotations.get(key, type(default).__name__)).split(" | ")  # such as ["int", "None"]
        value = read_value(text, allowed)
        if not text.strip() or type(value).__name__.replace("NoneType", "None") not in allowed:
            raise UserError(f"{key}={text}: {key} takes {' or '.join(allowed)}, such as {default}")
        globals()[key] = value


def read_arguments(arguments):
    """Returns the arguments, each @FILE replaced by the file's lines; blank lines and # lines are left out.
    A file that is missing or empty is an error: without its constants the shipped data would be used."""
    words = []
    for argument in arguments:
        if not argument.startswith("@"):
            words.append(argument)
            continue
        lines = []
        hint = "it takes a text file with one KEY=VALUE per line"
        try:
            for line in Path(argument[1:]).read_text(encoding="utf-8-sig").splitlines():
                if line.strip() and not line.strip().startswith("#"):
                    lines.append(line.strip())
        except (OSError, UnicodeError) as error:
            raise UserError(f"{argument}: the file cannot be read ({first_line(error)}): {hint}") from None
        if not lines:
            raise UserError(f"{argument}: the file has no line: {hint}")
        words += lines
    return words


def did_you_mean(word, known):
    """Returns "; did you mean ...?" with the nearest known word, or "" if none is near."""
    near = difflib.get_close_matches(word, known, 1, 0.5)
    return f"; did you mean {near[0]}?" if near else ""


def read_value(text, allowed):
    """Returns the value of a command-line argument: a Python literal, or the text itself, if not quoted."""
    value = text
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    if is_quoted or "str" not in allowed or ("None" in allowed and text == "None"):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    if "float" in allowed and type(value) is int:
        value = float(value)
    return value


def check_constants():
    """Refuses numbers out of range and unknown words before anything is loaded or written. Warns of names
    that nothing in this file reads, such as a misspelt constant that was pasted at its top."""
    names_in_file = Counter(re.findall(r"[A-Z]\w*", Path(__file__).read_text()))
    values = constants()
    output = Path(OUTPUT_DIR).resolve()
    for key, value in values.items():
        if names_in_file[key] < 2 and rank() == 0:  # it stands where it is set, and nowhere else
            hint = did_you_mean(key, values.keys() - {key})
            print(f"WARNING: nothing reads the constant {key}{hint}", flush=True)
        if key.endswith("_MODEL") and value and values.get("STAGE") != "evaluate":
            folders = [output / "best", *output.glob("step_*")]
            if any(Path(value).resolve().is_relative_to(folder) for folder in folders):
                hint = "which a new run moves and this one writes: set another OUTPUT_DIR"
                raise UserError(f"{key} = {value!r} lies in OUTPUT_DIR, {hint}")
    for panel in values.get("PLOT_PANELS", []):  # constants() gives lists for tuples, as JSON does
        if not (isinstance(panel, list) and len(panel) == 2 and isinstance(panel[1], list)):
            raise UserError(f'PLOT_PANELS: {panel} is not a panel, such as ("KL", ["kl"])')
    for keys, allowed in _VALID_RANGES.items():
        for key in keys.split():
            value = globals()[key]
            if value is None:
                continue
            if isinstance(allowed, list) and value not in allowed:
                raise UserError(f"{key} = {value!r} is unknown: it takes {' or '.join(allowed)}")
            if isinstance(allowed, tuple) and not allowed[0] <= value <= allowed[1]:
                raise UserError(f"{key} = {value} is out of range: it takes {allowed[0]:g} to {allowed[1]:g}")


# ---------------------------------------------------------------- turns


def max_turns():
    """Returns how many turns of the policy an episode may have."""
    return MAX_TURNS if ENVIRONMENT else 1


def converse(model, tokenizer, rows, uniform, group_size=1):
    """Samples group_size responses to each row's prompt. With an ENVIRONMENT a response holds all turns: the
    policy's as they were sampled, where response_mask is 1, and between them the environment's. uniform
    (max_turns(), rows * group_size, MAX_NEW_TOKENS); None: the likeliest tokens.

    Returns a batch as respond() does, and its rows. The text of a response is that of its last turn;
    columns["turns"] has all turns. It is truncated if its last turn was, or if the environment's next turn
    did not fit."""
    first_uniform = None if uniform is None else uniform[0]
    first = respond(model, tokenizer, [row["ids"] for row in rows], first_uniform, group_size)
    first.rows = repeat_each(rows, group_size)
    if not ENVIRONMENT:
        return first
    episodes = []
    for number, row in enumerate(first.rows):
        empty = {key: [] for key in ("ids", "mask", "logprobs", "entropies", "messages")}
        episodes.append(SimpleNamespace(number=number, row=row, **empty))
    add_turn(episodes, first, tokenizer)
    unfinished = episodes
    for turn in range(1, MAX_TURNS):
        unfinished = ask_environment(unfinished, model, tokenizer)
        if not unfinished:
            break
        contexts = [episode.row["ids"] + episode.ids for episode in unfinished]
        turn_uniform = None
        if uniform is not None:
            turn_uniform = uniform[turn][[episode.number for episode in unfinished]]
        add_turn(unfinished, respond(model, tokenizer, contexts, turn_uniform), tokenizer)

    columns = {key: [getattr(episode, key) for episode in episodes] for key in vars(episodes[0])}
    prompts = [row["ids"] for row in first.rows]
    batch = make_batch(prompts, columns["ids"], model.device)
    sampled = [np.flatnonzero(mask).tolist() for mask in columns["mask"]]
    batch.sequences = list(zip(prompts, columns["ids"], sampled))
    batch.response_mask = pad_right(columns["mask"], 0.0).to(model.device)
    batch.logprobs = pad_right(columns["logprobs"], 0.0).to(model.device)
    batch.entropies = pad_right(columns["entropies"], 0.0).to(model.device)
    batch.truncated = torch.tensor(columns["truncated"], device=model.device)
    batch.rows, batch.responses = first.rows, columns["response"]
    batch.columns = {"response_ids": columns["ids"], "turns": columns["messages"]}
    return batch


def add_turn(episodes, batch, tokenizer):
    """Appends the policy's turns, a batch, to the episodes. A message keeps the special tokens of its text,
    but not the one that ended it."""
    columns = (batch.response_ids, batch.logprobs, batch.entropies, batch.response_lengths, batch.truncated)
    turns = zip(episodes, batch.responses, *(column.tolist() for column in columns))
    for episode, response, ids, logprobs, entropies, length, truncated in turns:
        episode.ids += ids[:length]
        episode.logprobs += logprobs[:length]
        episode.entropies += entropies[:length]
        episode.mask += [1.0] * length
        text = tokenizer.decode(ids[: length if truncated else length - 1])
        episode.messages.append({"role": "assistant", "content": text})
        vars(episode).update(response=response, truncated=truncated)


def ask_environment(episodes, model, tokenizer):
    """Appends the environment's turns to the episodes. Returns the episodes that go on."""
    episodes = [episode for episode in episodes if not episode.truncated]
    chunks = [episodes[i : i + ENVIRONMENT_THREADS] for i in range(0, len(episodes), ENVIRONMENT_THREADS)]
    texts = itertools.chain(*map_over_ranks(chunks, next_texts))
    ends = ids_of_ends(model, tokenizer).tolist()
    unfinished = []
    for episode, text in zip(episodes, texts):
        if text is None:
            continue
        prompt = as_messages(episode.row["prompt"])
        # Some tokenizers begin a text with a space of their own, but not after a special token
        tail = tokenizer.eos_token + turn_text(tokenizer, prompt, text, ends, episode.ids[-1])
        ids = tokenizer(tail, add_special_tokens=False)["input_ids"][1:]
        length = len(episode.row["ids"]) + len(episode.ids) + len(ids)
        if length + MAX_NEW_TOKENS > MAX_CONTEXT_TOKENS:
            vars(episode).update(truncated=True)
            continue
        episode.ids += ids
        for values in (episode.mask, episode.logprobs, episode.entropies):
            values += [0.0] * len(ids)
        episode.messages.append({"role": ENVIRONMENT_ROLE, "content": text})
        unfinished.append(episode)
    return unfinished


def next_texts(episodes):
    """Returns what ENVIRONMENT says next in each episode. All are asked at once, so that one time limit
    serves each call. With one thread it is asked in the main thread, because only there signals work."""
    with time_limit(), ThreadPoolExecutor(ENVIRONMENT_THREADS) as pool:
        if ENVIRONMENT_THREADS == 1:
            return list(map(next_text, episodes))
        return list(pool.map(next_text, episodes))


def next_text(episode):
    """Returns the environment's next text in an episode; None: the end."""
    *messages, turn = as_messages(episode.row["prompt"]) + episode.messages
    name = f"ENVIRONMENT ({json_name(ENVIRONMENT)})"
    try:
        text = ENVIRONMENT(copy.deepcopy(messages), turn["content"], episode.row["answer"])
    except Exception as error:
        error.add_note(f"(raised by {name})")
        raise
    if text is not None and (not isinstance(text, str) or not text):
        raise UserError(
            f"{name} must return a text that is not empty, or None at the end of the episode; it returned "
            f"{repr(text)[:80]}"
        )
    return text


def turn_text(tokenizer, prompt, text, ends, end):
    """Returns what the chat template puts between a turn of the policy, which ended in the id `end` (one of
    `ends`), and its next turn: the environment's turn, and what begins the policy's. It is read off the
    prompt's messages with a stand-in for the policy's turn. A template that rewrites earlier turns is
    refused: they must stay as they were sampled."""
    if not tokenizer.chat_template:
        return text
    where = f"ACTOR_MODEL = {ACTOR_MODEL!r}: its chat template"
    before = apply_chat_template(tokenizer, prompt, where, True)
    response = "2"
    if "</think>" in str(tokenizer.chat_template) and not before.rstrip().endswith("</think>"):
        begin = "" if before.rstrip().endswith("<think>") else "<think>\n"
        response = f"{begin}2\n</think>\n\n2"  # below, a template that drops earlier thoughts is refused
    turns = [{"role": "assistant", "content": response}, {"role": ENVIRONMENT_ROLE, "content": text}]
    after = apply_chat_template(tokenizer, prompt + turns, where, True)
    tail = after.removeprefix(before + response)
    if tail == after:
        raise UserError(
            f"{where} rewrites earlier turns when one of the role {ENVIRONMENT_ROLE!r} follows: take the "
            "other role, or another template"
        )
    if not tail.startswith(tuple(tokenizer.batch_decode([[i] for i in ends]))):
        raise UserError(f"{where} does not end a turn by the model's EOS alone: take a template that does")
    return tail.removeprefix(tokenizer.decode([end]))


def check_environment(trainer):
    """Refuses, before anything is sampled, constants and models that cannot take turns."""
    if ENVIRONMENT is None:
        return
    if OVERLONG_BUFFER:
        raise UserError(f"OVERLONG_BUFFER = {OVERLONG_BUFFER} is for single responses: set it to 0")
    context = f"MAX_CONTEXT_TOKENS = {MAX_CONTEXT_TOKENS}"
    one_turn = MAX_PROMPT_TOKENS + MAX_NEW_TOKENS
    if one_turn > MAX_CONTEXT_TOKENS:
        raise UserError(f"{context} is less than a prompt and one turn may have, {one_turn}: raise it")
    readers = {**trainer.models_by_constant, "REWARD_MODEL": trainer.reward_model or trainer.actor}
    for constant, model in readers.items():
        if max_positions(model) < MAX_CONTEXT_TOKENS:
            raise UserError(f"{context}: {constant} reads {max_positions(model)} at most: lower it")
    prompt = as_messages(trainer.train_rows[0]["prompt"])
    ends = ids_of_ends(trainer.actor, trainer.tokenizer).tolist()
    if "345" not in turn_text(trainer.tokenizer, prompt, "345", ends, ends[0]):
        raise UserError(
            f"ACTOR_MODEL = {ACTOR_MODEL!r}: its chat template does not show a text of the role "
            f"{ENVIRONMENT_ROLE!r}: take the other ENVIRONMENT_ROLE"
        )


def turn_metrics(batch):
    """Returns means over responses: of the policy's turns, and of the environment's tokens."""
    if not ENVIRONMENT:
        return {}
    roles = [message["role"] for turns in batch.columns["turns"] for message in turns]
    others = batch.response_lengths - batch.response_mask.sum(1)
    turns = roles.count("assistant") / len(others)
    return {"turns": turns, "environment_tokens": others.mean().item()}


# ---------------------------------------------------------------- refused constants; groups of equal scores


# differs: the constants of this trainer
def check_choices(trainer):
    """Refuses constants that contradict each other."""
    if not REWARD_MODEL and not REWARD_FUNCTIONS:
        raise UserError("REWARD_MODEL is None and REWARD_FUNCTIONS is empty: set at least one of them")
    if REFERENCE_MODEL and KL_COEF == 0:
        raise UserError(f"REFERENCE_MODEL = {REFERENCE_MODEL!r} is not used at KL_COEF = 0: set KL_COEF")
    if LOSS_TYPE == "dr_grpo" and SCALE_REWARDS == "batch":
        trainer.run.log(
            "SCALE_REWARDS = 'batch' has no effect: LOSS_TYPE = 'dr_grpo' divides by no deviation"
        )
    if LOSS_TYPE == "gspo" and CLIP_RANGE > 0.01:
        trainer.run.log(
            f"LOSS_TYPE = 'gspo' with CLIP_RANGE = {CLIP_RANGE}: its paper takes 3e-4 and, for "
            "CLIP_RANGE_HIGH, 4e-4"
        )
    if LOSS_TYPE in ("cispo", "sapo") and DUAL_CLIP is not None:
        raise UserError(
            f"DUAL_CLIP = {DUAL_CLIP} does nothing with LOSS_TYPE = {LOSS_TYPE!r}: set it to None"
        )
    if REFERENCE_SYNC_STEPS and trainer.reference:
        shapes = [[p.shape for p in model.parameters()] for model in (trainer.actor, trainer.reference)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"REFERENCE_SYNC_STEPS = {REFERENCE_SYNC_STEPS}: REFERENCE_MODEL = {REFERENCE_MODEL!r} has "
                "other layers than the actor, so it cannot move towards it: set REFERENCE_SYNC_STEPS = 0"
            )
    if LORA_RANK and KL_COEF and REFERENCE_SYNC_STEPS:
        raise UserError(
            f"REFERENCE_SYNC_STEPS = {REFERENCE_SYNC_STEPS}: LORA_RANK keeps the base frozen: set one to 0"
        )
    if GROUP_SIZE == 1 and STAGE == "train" and not trainer.distils:
        raise UserError(
            "GROUP_SIZE = 1 has nothing to compare with: take 2 or more, or distil: rewards of weight 0, "
            "REFERENCE_MODEL=teacher KL_COEF=1"
        )
    if trainer.distils and GROUP_EPOCHS * MINI_BATCHES > 1:
        raise UserError(
            f"GROUP_EPOCHS = {GROUP_EPOCHS}, MINI_BATCHES = {MINI_BATCHES}: distillation makes one update "
            "per step, because the KL's gradient has no ratio: set both to 1"
        )
    if trainer.distils and RESAMPLE_FLAT_GROUPS:
        raise UserError(
            f"RESAMPLE_FLAT_GROUPS = {RESAMPLE_FLAT_GROUPS}: with rewards of weight 0 all groups are flat: "
            "set it to 0"
        )


def last_step(state, step):
    """Returns the run's last step, as known after `step` steps, from the prompts that the epochs have left.
    It depends on the state alone, so that a resumed run has the same."""
    prompts_per_step = BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS
    steps_left = math.ceil((-state.cursor % state.prompts) / prompts_per_step)
    steps_left += max(0, NUM_EPOCHS - state.epoch) * math.ceil(state.prompts / prompts_per_step)
    return min(step + steps_left, MAX_STEPS or math.inf)


def token_advantages(batch, index, width):
    """Returns the advantages of the rows in `index`, (rows, width), or (rows, 1) if all tokens of a response
    have the same."""
    shape = tuple(batch.response_mask.shape)
    if batch.advantages.shape not in (shape[:1], shape):
        raise UserError(
            f"batch.advantages has the shape {tuple(batch.advantages.shape)}: compute_advantages() must set "
            f"one per response, {shape[:1]}, or one per token, {shape}"
        )
    return batch.advantages.view(len(batch.advantages), -1)[index, :width]


def rows_with_gradient(trainer, batch, rows):
    """Returns those of `rows` that are trained: with SKIP_FLAT_GROUPS, but not with FSDP2, the rows to which
    the loss gives a gradient, at least one, for the metrics. The loss is computed at the policy that sampled
    and at others around it, so that every term of it counts, clipped or not. A term that reaches
    the weights by another way than logprobs and entropy is not seen: set SKIP_FLAT_GROUPS = False for it."""
    if not SKIP_FLAT_GROUPS or is_sharded():
        return rows
    index = to_device(rows, trainer.device)
    sampled, entropy, trained = batch.logprobs[index], batch.entropies[index], batch.trained[index]
    is_trained = torch.zeros(len(rows), dtype=torch.bool, device=trainer.device)
    for offset in (-3.0, -0.3, -0.01, 0.0, 0.01, 0.3, 3.0):
        logprobs = (sampled + offset).requires_grad_()
        entropies = (entropy * math.exp(-abs(offset))).requires_grad_()
        with torch.enable_grad():
            loss = (trained * trainer.token_losses(batch, rows, logprobs, entropies)[0]).sum()
        for gradient in torch.autograd.grad(loss, (logprobs, entropies), allow_unused=True):
            if gradient is not None:
                is_trained |= (gradient != 0).any(1)
    return torch.tensor(rows)[is_trained.cpu()].tolist() or rows[:1]


@torch.no_grad()
def logprobs_again(trainer, batch, chunks):
    """Replaces the sampler's log-probabilities by the update's. In bfloat16 they differ by rounding, by 1e-3
    and more in the mean of a response: beyond gspo's clip range, so that the first update would clip a tenth
    of the tokens."""
    micros = []
    for rows in chunks:
        micros += micro_batches(trainer.actor, batch, rows_with_gradient(trainer, batch, rows))

    def compute(rows):
        return response_logprobs(trainer.actor, batch, rows, TEMPERATURE)[0]

    batch.logprobs = batch.logprobs.clone()
    with full_parameters(trainer.actor):
        for rows, logprobs in zip(micros, map_over_ranks(micros, compute)):
            batch.logprobs[to_device(rows, trainer.device), : logprobs.shape[1]] = logprobs.to(trainer.device)


def is_distillation(trainer):
    """Returns whether only the KL to a reference trains: every weight of a reward is 0, and neither
    compute_rewards() nor compute_advantages() is overridden."""
    weights = [weight for *_, weight in trainer.reward_functions]
    if REWARD_MODEL:
        weights.append(REWARD_MODEL_WEIGHT)
    if OVERLONG_BUFFER:
        weights.append(OVERLONG_PENALTY)
    cls = type(trainer)
    is_edited = (
        cls.compute_rewards is not GRPOTrainer.compute_rewards
        or cls.compute_advantages is not GRPOTrainer.compute_advantages
    )
    return trainer.reference is not None and not any(weights) and not is_edited


def flat_groups(scores):
    """Returns which groups have equal scores, (groups,) of bool. scores (rows,)."""
    groups = scores.view(-1, GROUP_SIZE)
    return (groups == groups[:, :1]).all(1)


def replace_flat_groups(batch, is_flat, new):
    """Returns the rows of a batch whose groups are not flat, and all rows of the batch `new`. is_flat
    (groups,). A field of yours must be a tensor or list of all rows, or a dict of such."""
    keep = (~is_flat).repeat_interleave(GROUP_SIZE).nonzero().squeeze(-1).tolist()

    def join(kept, added):
        if isinstance(kept, float):  # batch.flat_groups: the fraction before any replacement
            return kept
        if isinstance(kept, dict):
            return {key: join(kept[key], added[key]) for key in kept}
        rows = [kept[i] for i in keep] + [*added]
        if not isinstance(kept, torch.Tensor):
            return rows
        if kept.dim() == 1:
            return torch.stack(rows)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    return SimpleNamespace(**join(vars(batch), vars(new)))


def train_main():
    run_main(GRPOTrainer)


if __name__ == "__main__":
    train_main()
