"""GRPO for generative recommendation, in one file: a language model whose tokens are the codes of items.

A history of items is a prompt of their codes, <a_7><b_120><c_3>; the next item is the response. Decoding
walks a trie of the catalogue: the softmax runs over the codes that continue some item, so the policy can
answer with nothing but items,

    pi(item | history) = prod_t pi(c_t | history, c_<t),    pi(c | prefix) = softmax over the trie's children

and every log-probability below, sampled or trained, is of this constrained distribution. Two stages:

    SFT    L = -mean_t log pi(c_t of the logged next item)               keeps the best validation NDCG@10
    GRPO   GROUP_SIZE candidates of a history, with scores s_i, are each other's baseline (2402.03300):
           A_i = (s_i - mean of its group) / (std + 1e-4),   rho_t = pi(c_t) / pi_old(c_t)
           clip_t = clip(rho_t, 1 - CLIP_RANGE, 1 + CLIP_RANGE_HIGH)
           L   = -mean_t min(rho_t A_i, clip_t A_i) + KL_COEF kl_t

LOSS_TYPE "gspo" has rho = exp(mean_t log rho_t) of the whole item (2507.18071); "dapo" and "grpo" are one,
since all responses have the same length. kl_t has k3's value against the best SFT policy and k2's gradient,
which is that of KL(pi || pi_ref). What the gradient estimates depends on CANDIDATES:
- "sample": as in GRPO, the gradient of a sample's expected reward, divided by a deviation (SCALE_REWARDS);
- "beam", the default: no samples, the GROUP_SIZE likeliest items: sum_i A_i grad log pi(i) ranks the list,
  better items up and worse ones down, whatever their probability. It knows nothing of items beyond the list,
  and the KL term is no KL: it pulls the log-probabilities of the listed items to the reference's.
Samples raise what a *sample* earns, and with it the few likeliest items; beams raise what a *list* earns,
which is what is shown to a user (docs/grpo_rec.md has both).

    python grpo/grpo_rec.py                          # edit the constants below, or: KEY=VALUE, @FILE
    python grpo/grpo_rec.py STAGE=sft, then STAGE=rl, and STAGE=evaluate: scores a policy on TEST_FILE
    python grpo/grpo_rec.py TRAIN_FILE=train.csv VALID_FILE=None TEST_FILE=test.csv INDEX_FILE=index.json \\
        ITEM_FILE=info.txt VALUES_FILE=None VALUE_WEIGHT=0 RULE_WEIGHT=1

Writes into OUTPUT_DIR: training_config.json, logs/ (training_*.log, metrics.jsonl, samples.jsonl), step_N/
checkpoints, sft/policy/ (the best of SFT), best/policy/, eval_test.json, rec_learning.png,
training_metrics_detailed.png and grpo_rec_metrics_with_entropy.png. docs/reference-rec.md defines metrics.

To change      see
the loss       policy_loss, token_losses; sft_update     the data       TRAIN_FILE ...; read_rows
the advantage  group_advantages, compute_advantages      a metric       RecTrainer.record, list_metrics
the reward     RULE_WEIGHT ...; compute_rewards          a plot         self.run.panels; draw_learning
candidates     constrained_logprobs, search              the prompt     PROMPT_TEMPLATE; Prompter
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
from collections import Counter, defaultdict
from collections.abc import Iterator
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
import torch
import torch.distributed as dist
import transformers
from matplotlib.figure import Figure
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import DynamicLayer, get_layer_types_and_kwargs
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer

ROOT = next((p for p in Path(__file__).resolve().parents if (p / "rewards").is_dir()), None)
if ROOT is None:
    sys.exit("grpo_rec.py needs the folder rewards/ beside it or above it: copy it from the repository")
sys.path.insert(0, str(ROOT))
import rewards

# ================================================================ constants

STAGE = (
    "all"  # all | sft | rl (from SFT's best policy, or ACTOR_MODEL) | evaluate (EVALUATE_POLICY on TEST_FILE)
)
EVALUATE_POLICY = "best"  # best, sft, or step_N, of OUTPUT_DIR; or the folder of another run's policy

# Models: a folder or a hub name, whose tokenizer gains the codes; None: a small Llama that knows only codes
ACTOR_MODEL: str | None = None
HIDDEN_SIZE = 64  # of the small Llama
LAYERS = 2
HEADS = 4
LORA_RANK = 0  # 0: trains whole models; else, in STAGE=rl, an adapter of this rank (2106.09685)
LORA_ALPHA = 32.0  # an adapter's output is scaled by LORA_ALPHA / LORA_RANK
LORA_TARGETS = "all-linear"  # "all-linear" (every linear layer except the heads), or names: q_proj,v_proj
DTYPE = "float32"  # float32 | bfloat16 (autocast; trained weights and optimizer state stay float32)
DEVICE = "auto"  # auto | cpu | cuda | cuda:1 | mps
GRADIENT_CHECKPOINTING = False  # recompute activations in the update: less memory, a third more time

# Data: csv files of a history and the next item
TRAIN_FILE = f"{ROOT}/data/rec/train.csv"
VALID_FILE: str | None = f"{ROOT}/data/rec/valid.csv"  # None: VALID_FRACTION of TRAIN_FILE's users
TEST_FILE: str | None = f"{ROOT}/data/rec/test.csv"  # scored at the end; nothing is chosen by it
VALID_FRACTION = 0.1
USER_COLUMN = "user_id"
HISTORY_COLUMN = "history_item_id"  # such as "[3, 17, 204]", the oldest first
TARGET_COLUMN = "item_id"
INDEX_FILE = f"{ROOT}/data/rec/index.json"  # {item: its codes}
ITEM_FILE: str | None = f"{ROOT}/data/rec/items.txt"  # lines of codes, title, item, tab between
TRAIN_PREFIXES = True  # the last MAX_HISTORY items of a line are targets too, each after those before it
MAX_HISTORY = 10  # items; longer histories are cut from the left, and counted
MAX_TRAIN_ROWS: int | None = None  # reads only the first ones of the file; None: all
MAX_EVAL_ROWS: int | None = 300  # of validation
PROMPT_TEMPLATE = "{history}"  # the tokenizer's chat template, if any, goes around it
TITLE_HISTORY_ROWS = (
    0.0  # share of the rows that also appear with titles in place of codes (a model of words)
)
TITLE_ROWS = 0.0  # SFT: share of the items that are also asked for by their title (a model of words)

# Rewards: the score is the sum of weight * part
VALUE_WEIGHT = 1.0  # an item's value after the history, from VALUES_FILE, 0 to 1
RULE_WEIGHT = 1.0  # 1 for the logged target
RANKING_WEIGHT = 0.0  # 1 for the target; if it is in the group, other items get less the higher they rank
SEMANTIC_WEIGHT = 0.0  # cosine of the item's vector with the target's
COLLABORATIVE_WEIGHT = 0.0  # SASREC_FILE's score, scaled to 0 to 1 within the group
REWARD_FUNCTIONS = []  # yours: (function(histories, items, targets), weight)
VALUES_FILE: str | None = (
    f"{ROOT}/data/rec/values.npy"  # (items, items): the second item's value after the first
)
VALUE_DECAY = 0.5  # weight of an item of the history relative to the next one
VECTORS_FILE: str | None = None  # (items, width) for the semantic reward; None: TF-IDF of the titles
SASREC_FILE: str | None = f"{ROOT}/data/rec/sasrec.npz"  # data/sasrec.py makes it; a baseline too
REWARD_TIMEOUT: float | None = 600.0  # seconds that scoring one batch may take; None: no limit

# SFT
SFT_EPOCHS = 10
SFT_BATCH_SIZE: int | None = None  # histories per optimizer step; None: those with about 256 items to learn
SFT_LEARNING_RATE = 3e-3
SFT_LR_SCHEDULER_TYPE: str | None = (
    "cosine"  # linear | cosine (both to 0) | plateau (halves) | None: constant
)
SFT_WARMUP = 0.05  # share of SFT's steps in which the learning rate rises
SFT_WEIGHT_DECAY = 0.05  # share of the weights that a pass takes away at the full learning rate
SFT_EVALUATIONS = 10  # of validation during SFT, equally many steps apart; 0: only before and after it
SFT_PATIENCE = 3  # passes that had an evaluation, but no better NDCG@10, before SFT ends; 0: never

# Rollout
CANDIDATES = "beam"  # beam | sample
BATCH_SIZE = 32  # histories in memory at a time, with GROUP_SIZE candidates each
MICRO_BATCH_ROWS: int | None = None  # rows per forward and backward pass; None: chosen from the memory
GRADIENT_ACCUMULATION_STEPS = 1  # histories per training step = BATCH_SIZE * this
GROUP_SIZE = 16  # candidates per history; >= 2, since they are each other's baseline
TEMPERATURE = 1.0  # > 0; of the distribution that is sampled and scored

# Optimisation of GRPO
LEARNING_RATE = 5e-4
MAX_GRAD_NORM = 1.0  # > 0; of SFT too
WEIGHT_DECAY = 0.0
USE_LR_SCHEDULER = False
LR_SCHEDULER_TYPE = "linear"  # linear | cosine (both to 0) | plateau (halves)
PLATEAU_PATIENCE = 2  # evaluations without a better reward (SFT: NDCG@10) before plateau halves
WARMUP_STEPS = 0

# Algorithm
LOSS_TYPE = "dapo"  # dapo | gspo
GROUP_EPOCHS = 1  # passes over each step's candidates
MINI_BATCHES = 1  # optimizer steps per pass
SCALE_REWARDS = "group"  # group | batch | none: whose standard deviation advantages are divided by
CLIP_RANGE = 0.2  # > 0; gspo wants about 3e-4
CLIP_RANGE_HIGH = 0.2  # > 0; DAPO's clip-higher: 0.28
ENTROPY_COEF = 0.0
KL_COEF = 2.5  # weight of the KL in the loss
REFERENCE_SYNC_STEPS = 0  # steps between moves of the reference towards the actor (2404.09656); 0: never
REFERENCE_SYNC_ALPHA = 0.6  # reference = ALPHA * actor + (1 - ALPHA) * reference; 0 to 1
MAX_STEPS = 150  # of GRPO

# Evaluation
EVAL_BEAMS = 50

# Bookkeeping
SAVE_EVERY_N_STEPS = 100  # 0: only at the end
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 50  # steps of GRPO; 0: only before the first and after the last one
EARLY_STOPPING_PATIENCE = 0  # evaluations without a better reward (SFT: NDCG@10) that end a stage; 0: never
EARLY_STOPPING_THRESHOLD = 0.0  # a gain above this resets patience; best/ keeps the highest reward
LOG_SAMPLES = 4  # candidates per step written to samples.jsonl
RESUME = "ask"  # ask (yes without a terminal or under torchrun) | yes | no | path of a checkpoint or a run
OUTPUT_DIR = f"{ROOT}/checkpoints/grpo_rec"
SEED = 1
USE_WANDB = False
WANDB_PROJECT = "hackable-rlhf"

# Processes: torchrun --nproc_per_node=2 grpo/grpo_rec.py
DETERMINISTIC_GRADIENTS = True  # same bits on any number of processes; False: faster
PROCESS_TIMEOUT = 1800.0  # seconds that a process waits for the others

_VALID_RANGES = {  # least and greatest value of each number, or the words that a constant takes
    "HIDDEN_SIZE LAYERS HEADS MAX_HISTORY MAX_TRAIN_ROWS MAX_EVAL_ROWS SFT_EPOCHS SFT_BATCH_SIZE": (1, 1e12),
    "BATCH_SIZE GRADIENT_ACCUMULATION_STEPS GROUP_EPOCHS MINI_BATCHES MAX_STEPS": (1, 1e12),
    "PLATEAU_PATIENCE KEEP_LAST_N_CHECKPOINTS": (1, 1e12),
    "GROUP_SIZE": (2, 1e12),
    "EVAL_BEAMS": (20, 1e12),
    "WARMUP_STEPS SAVE_EVERY_N_STEPS EVAL_EVERY_N_STEPS EARLY_STOPPING_PATIENCE LOG_SAMPLES SEED": (0, 2**62),
    "SFT_EVALUATIONS SFT_PATIENCE REFERENCE_SYNC_STEPS LORA_RANK": (0, 2**62),
    "LEARNING_RATE WEIGHT_DECAY KL_COEF EARLY_STOPPING_THRESHOLD": (0, 1e6),
    "SFT_LEARNING_RATE": (1e-12, 1e6),
    "REFERENCE_SYNC_ALPHA TITLE_HISTORY_ROWS TITLE_ROWS VALUE_DECAY SFT_WEIGHT_DECAY": (0, 1),
    "VALID_FRACTION": (1e-6, 0.9),
    "SFT_WARMUP": (0, 0.9),
    "CLIP_RANGE CLIP_RANGE_HIGH LORA_ALPHA MAX_GRAD_NORM REWARD_TIMEOUT PROCESS_TIMEOUT": (1e-12, 1e12),
    "TEMPERATURE": (1e-3, 1e3),
    "STAGE": ["all", "sft", "rl", "evaluate"],
    "DTYPE": ["float32", "bfloat16"],
    "CANDIDATES": ["beam", "sample"],
    "LR_SCHEDULER_TYPE SFT_LR_SCHEDULER_TYPE": ["linear", "cosine", "plateau"],
    "LOSS_TYPE": ["dapo", "gspo"],
    "SCALE_REWARDS": ["group", "batch", "none"],
}
_KS = (1, 3, 5, 10, 20)  # of HR@K and NDCG@K
_SMOOTHING = (1, 3, 10, 30, 100, 300)  # of the counts with back-off: the best pair on validation is taken
_DECAYS = (0, 0.1, 0.2, 0.4, 0.6, 0.8)

_RENAMED = {"EXACT_SUMS": "DETERMINISTIC_GRADIENTS"}  # old names of constants, accepted as arguments
_INSTEAD_HERE = {  # constants of other trainers: what this file has instead
    "TRAIN_DATASETS": "TRAIN_FILE",
    "EVAL_DATASETS": "VALID_FILE and TEST_FILE",
    "NUM_EPOCHS": "SFT_EPOCHS and MAX_STEPS",
    "MAX_TRAIN_PROMPTS": "MAX_TRAIN_ROWS",
    "MAX_EVAL_PROMPTS": "MAX_EVAL_ROWS",
}
_MAY_CHANGE = "RESUME OUTPUT_DIR STAGE EVALUATE_POLICY".split()  # a resumed run does not report these
# When one of these has changed, the scores of a resumed run do not compare with the earlier ones. Add a
# constant of yours that changes how responses are sampled or scored
_CHANGE_SCORES = """
    VALID_FILE VALID_FRACTION MAX_EVAL_ROWS MAX_HISTORY PROMPT_TEMPLATE EVAL_BEAMS GROUP_SIZE
    VALUE_WEIGHT RULE_WEIGHT RANKING_WEIGHT SEMANTIC_WEIGHT COLLABORATIVE_WEIGHT REWARD_FUNCTIONS
    VALUES_FILE VALUE_DECAY VECTORS_FILE SASREC_FILE
    INDEX_FILE ITEM_FILE DTYPE
""".split()

# ================================================================ the maths of GRPO over items


def constrained_logprobs(logits, codes, allowed, temperature):
    """Returns log-probabilities (..., width), float32, over the codes that may come next; -inf where allowed
    is False. This distribution is sampled *and* trained, in SFT too: change it here, and the first ratios
    stay 1. logits (..., all codes); codes, columns of logits, and allowed (..., width)."""
    scores = logits.float().gather(-1, codes) / temperature
    logprobs = scores.masked_fill(~allowed, -math.inf).log_softmax(-1)
    return logprobs.masked_fill(~allowed, -math.inf)  # also where nothing is allowed: no NaN


def group_advantages(scores, group_size, scale):
    """Returns advantages (rows,), 0 where a group's scores are equal. Rows of a group are neighbours."""
    groups = scores.view(-1, group_size)
    # A mean of equal float32 numbers is often not that number: subtract the first, so that they are zeros
    shifted = groups - groups[:, :1]
    advantages = shifted - shifted.mean(1, keepdim=True)
    if scale != "none":
        std = shifted.std(1, keepdim=True) if scale == "group" else (scores - scores[0]).std()
        advantages = advantages / (std + 1e-4)
    return advantages.flatten()


def policy_loss(logprobs, old_logprobs, advantages, loss_type, clip_range, clip_range_high):
    """Returns the loss of each code and its ratio, both (rows, codes); advantages (rows, 1)."""
    log_ratio = logprobs - old_logprobs
    if loss_type == "gspo":
        log_ratio = log_ratio.mean(1, keepdim=True).expand_as(logprobs)
    ratio = log_ratio.exp()
    objective = torch.min(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range_high) * advantages)
    return -objective, ratio


def kl_loss(logprobs, ref_logprobs):
    """Returns k3's value with k2's gradient, (rows, codes): its mean on policy is KL(pi || pi_ref)'s."""
    log_ratio = logprobs - ref_logprobs
    k2 = 0.5 * log_ratio**2
    k3 = (-log_ratio).exp() - 1 + log_ratio
    return k2 + (k3 - k2).detach()  # forward: k3, which is >= 0; backward: k2


def rule_reward(histories, items, targets):
    """1.0 where the item is the logged target, else 0.0. Range {0, 1}."""
    return [float(item == target) for item, target in zip(items, targets)]


def ranking_reward(hits):
    """Rewards of one group, likelier items first, from its hits (0 or 1 each): a hit gets 1; where the group
    has one, the miss at rank i from 0 gets minus its share of the discounts, -d_i / sum_j d_j with d_i =
    1 / log2(i + 2); without a hit all get 0. Range [-1, 1]. Source: MiniOneRec, rl.py."""
    if not any(hits):
        return [0.0] * len(hits)
    discounts = [1 / math.log2(rank + 2) for rank in range(len(hits))]
    return [1.0 if hit else -discount / sum(discounts) for hit, discount in zip(hits, discounts)]


def min_max(scores):
    """Scores of one group, the lowest 0 and the highest 1; equal ones all 0. Range [0, 1]."""
    low = min(scores)
    width = max(scores) - low
    return [(score - low) / width if width > 0 else 0.0 for score in scores]


def history_value(values, history, item, decay):
    """What an item is worth after a history: the mean of values[h][item] over its items h, each weighing
    `decay` times as much as the next one. Range: that of the values."""
    weights = [decay**back for back in range(len(history) - 1, -1, -1)]
    return float(sum(w * values[h][item] for w, h in zip(weights, history)) / sum(weights))


# ================================================================ the trainer


class RecTrainer:
    """Catalogue, model, data and the algorithm; self.run has the files. resume_from_checkpoint overrides the
    constant RESUME: a path, "ask", "yes" or "no"."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        check_sizes()
        self.device = find_device()
        self.run = Run("grpo_rec", resume_from_checkpoint, self.device)
        self.run.title = f"GRPO for recommendation, {Path(TRAIN_FILE).parent.name}, seed {SEED}"
        self.run.best_by = ["reward", "ndcg@10"]  # evaluations of SFT have no reward
        self.run.old_files.append("rec_learning.png")
        if STAGE != "rl":  # which starts from sft/ and must not move it aside
            self.run.old_files.append("sft")
        # Drawn in grpo_rec_metrics_with_entropy.png; training_metrics_detailed.png has all metrics
        names = "ndcg@10 hr@10 reward reward_sampled entropy policy_loss grad_norm kl clip_fraction"
        for name in [*names.split(), "coverage@10"]:
            self.run.panels.append((name, [name]))
        self.reward_parts = {}  # what compute_rewards() leaves to be logged, {name: (rows,)}

        self.catalogue = Catalogue(self.run.log)
        self.load_models()
        self.train_rows, self.valid_rows, self.test_rows = load_splits(self.catalogue, self.run.log)
        for row in self.train_rows + self.valid_rows + self.test_rows:
            row["ids"] = self.prompter.ids(row["history"])
        self.sft_rows, self.rl_rows = self.prompter.rows_of_stages(self.train_rows, self.run.log)
        some_rows = self.train_rows or self.test_rows
        check_models({"ACTOR_MODEL": self.actor}, some_rows, self.pad_id)
        check_head(self.actor, self.trie, some_rows[0]["ids"])
        if self.actor in _SHARED_SCORING:
            _SHARED_SCORING.add(self.reference)
        targets = torch.tensor(column(self.train_rows, "target"), dtype=torch.long)
        self.popularity = targets.bincount(minlength=len(self.catalogue.items))  # how often each is a target
        self.load_rewards()

        self.state = SimpleNamespace(  # saved with each checkpoint, beside weights, optimizers and generators
            epoch=0,
            order=None,  # this epoch's permutation of the rows
            cursor=0,
            prompts=len(self.train_rows),
            begin=0,  # the step at which the stage began
            stage="rl" if STAGE in ("rl", "evaluate") else "sft",
            sft_best=-1.0,
            sft_waited=0,
            sft_is_done=False,
            reference_has_moved=False,
            sft_judged=0,
        )
        self.best = None, None  # what best_policy() has read: (folder, step), model
        # Folders that may have this run's best/: before training only the checkpoint's
        self.best_folders = [self.run.checkpoint.parent] if self.run.checkpoint else []
        self.run.register(self.state, self.models, self.optimizers, self.tokenizer)
        if self.run.has_other_scores:
            self.state.sft_best, self.state.sft_waited = -1.0, 0
        if STAGE == "sft" and self.state.stage == "rl":
            raise UserError(f"{self.run.checkpoint} is in its second stage: STAGE=rl or all goes on with it")
        rows = self.sft_rows if self.state.stage == "sft" else self.rl_rows
        if self.state.cursor and len(self.state.order) != len(rows):
            fault = f"stands within a pass over {len(self.state.order)} rows, there are {len(rows)}"
            raise UserError(f"{self.run.checkpoint} {fault}: take TITLE_ROWS ... as before, or RESUME=no")
        self.plan_steps()
        if self.state.stage == "sft":
            # AdamW takes learning rate * weight decay away in each step, and a long log has more of them
            steps_per_pass = self.end / SFT_EPOCHS
            for group in self.optimizers["policy"].param_groups:
                group["weight_decay"] = SFT_WEIGHT_DECAY / (SFT_LEARNING_RATE * steps_per_pass)

    def load_models(self):
        """Loads actor and reference, from the checkpoint if there is one. In SFT the reference keeps the best
        policy so far; in GRPO the KL holds the actor to it."""
        checkpoint = self.run.checkpoint
        policy = checkpoint / "policy" if checkpoint else None
        self.tokenizer, self.actor = load_actor(policy, self.catalogue, self.device)
        self.pad_id = padding_id(self.actor, self.tokenizer)
        self.prompter = Prompter(self.tokenizer, self.catalogue, self.actor)
        self.trie = Trie(self.prompter.codes, self.device)
        self.models = {"policy": self.actor}  # models to save, keyed by checkpoint folder
        self.reference = self.actor  # with LORA_RANK: its adapter is switched off
        if not LORA_RANK and STAGE != "evaluate":
            self.reference = copy.deepcopy(self.actor)
            if checkpoint:
                path = checkpoint / "reference"
                self.reference = load_model(AutoModelForCausalLM, path, "RESUME", self.device)
            self.reference.requires_grad_(False)
            self.models["reference"] = self.reference
        self.optimizers = {"policy": make_optimizer(self.actor, LEARNING_RATE)}

    def load_rewards(self):
        """Loads what compute_rewards() needs: values, vectors, SASRec and the user's functions."""
        self.values = None
        if VALUE_WEIGHT:
            self.values = read_array(VALUES_FILE, "VALUES_FILE", self.catalogue, square=True)
        self.vectors = item_vectors(self.catalogue) if SEMANTIC_WEIGHT else None
        scored_rows = self.valid_rows + self.test_rows
        if COLLABORATIVE_WEIGHT:
            scored_rows = scored_rows + self.train_rows
        self.sasrec = None
        if STAGE != "evaluate" or COLLABORATIVE_WEIGHT:
            self.sasrec = read_sasrec(self.train_rows, scored_rows, self.run.log)
        if COLLABORATIVE_WEIGHT and not self.sasrec:
            raise UserError("COLLABORATIVE_WEIGHT needs a SASREC_FILE of these rows: data/sasrec.py makes it")
        self.rewards = resolve_rewards(REWARD_FUNCTIONS, "REWARD_FUNCTIONS")
        weights = [VALUE_WEIGHT, RULE_WEIGHT, RANKING_WEIGHT, SEMANTIC_WEIGHT, COLLABORATIVE_WEIGHT]
        for name, _, weight in self.rewards:
            weights.append(weight)
            if name in ("value", "rule", "ranking", "semantic", "collaborative"):
                taken = f"the name {name!r} belongs to {name.upper()}_WEIGHT"
                raise UserError(f"REWARD_FUNCTIONS: {taken}: give your function another name")
        if not any(weights):
            raise UserError("every reward weight is 0, those of REWARD_FUNCTIONS too: give at least one")

    # ------------------------------------------------------------ the algorithm

    def train(self):
        """Runs SFT, then GRPO from its best policy, then the test. Returns the last evaluation."""
        run = self.run
        with run.session(self.summary()):  # lock, logs and signals; saves at the end
            self.enter_folder()
            self.prepare_baselines()
            # A checkpoint may be of either stage. STAGE=sft never begins GRPO
            if self.state.stage == "sft" and not (self.state.sft_is_done and STAGE == "rl"):
                self.fine_tune()
            if self.state.stage == "sft" and not run.stop_signal and STAGE != "sft":
                self.begin_grpo()
            if self.state.stage == "rl":
                self.reinforce()
            if not run.stop_signal:
                run.save()  # before a test that may fail
                self.test()
                self.compare_with_baselines()
        return run.evaluation

    def fine_tune(self):
        """Runs SFT on the logged items, until its last step or until SFT_PATIENCE has run out. Its best
        policy, which the reference keeps, becomes the actor."""
        run = self.run
        evaluate_every = math.ceil(self.end / SFT_EVALUATIONS) if SFT_EVALUATIONS else 0
        if run.needs_first_evaluation():
            run.log_evaluation(self.evaluate_sft())
        while run.step < self.end and not self.is_out_of_patience() and run.next_step():
            rows = next_rows(self.sft_rows, self.state, self.sft_batch_size)
            self.record_sft(self.sft_update(rows))
            if run.is_due(evaluate_every) or run.step == self.end:
                run.log_evaluation(self.evaluate_sft())
            if run.is_due(SAVE_EVERY_N_STEPS) and run.step < self.end:
                run.save()
        if run.stop_signal:
            return
        run.log(f"SFT ends at step {run.step}; best NDCG@10 {self.state.sft_best:.4f}")
        self.actor.load_state_dict(self.reference.state_dict())  # the best so far: see evaluate_sft()
        self.state.sft_is_done = True
        if rank() == 0:
            write_atomically(run.folder / "sft", lambda folder: run.save_model(self.actor, folder / "policy"))

    def reinforce(self):
        """Runs GRPO on groups of candidates."""
        run = self.run
        if run.needs_first_evaluation():
            run.log_evaluation(self.evaluate())
        while run.next_step():
            batch = self.rollout()
            self.score(batch)
            self.compute_advantages(batch)
            metrics = self.update(batch)
            self.sync_reference()
            self.record(batch, metrics)
            if run.is_due(EVAL_EVERY_N_STEPS) or run.is_last_step():
                run.log_evaluation(self.evaluate())
            if run.is_due(SAVE_EVERY_N_STEPS):
                run.save()

    def is_out_of_patience(self):
        """Returns whether SFT_PATIENCE passes through the data brought nothing better. Only a whole pass
        counts."""
        pass_is_over = self.state.cursor == 0
        return pass_is_over and 0 < SFT_PATIENCE <= self.state.sft_waited

    def begin_grpo(self):
        self.state.stage = "rl"
        self.state.begin = self.run.step
        self.state.epoch = self.state.cursor = 0
        self.optimizers["policy"] = make_optimizer(self.actor, LEARNING_RATE)
        self.run.reset_best()
        self.run.clock = None
        self.plan_steps()

    def plan_steps(self):
        """Sets the last step of the stage, unless patience ends it earlier, and the last step of the run."""
        if self.state.stage == "rl":
            self.end = self.state.begin + MAX_STEPS
            self.run.total_steps = self.end
            return
        self.sft_batch_size = SFT_BATCH_SIZE or balanced_batch_size(self.sft_rows)
        self.end = SFT_EPOCHS * math.ceil(len(self.sft_rows) / self.sft_batch_size)
        self.run.total_steps = self.end
        if STAGE != "sft":
            self.run.total_steps += MAX_STEPS

    def set_learning_rates(self):
        """Sets and returns this step's learning rate; the schedule begins with the stage."""
        run = self.run
        steps_done = max(0, run.step - 1 - self.state.begin)  # run.step counts this step already
        total = self.end - self.state.begin
        if self.state.stage == "sft":
            warmup = round(SFT_WARMUP * total)
            learning_rate, schedule = SFT_LEARNING_RATE, SFT_LR_SCHEDULER_TYPE
        else:
            warmup = WARMUP_STEPS
            learning_rate, schedule = LEARNING_RATE, LR_SCHEDULER_TYPE if USE_LR_SCHEDULER else None
        learning_rate *= learning_rate_scale(steps_done, total, warmup, schedule, run.halvings)
        set_learning_rate(self.optimizers["policy"], learning_rate)
        return learning_rate

    def sft_update(self, rows):
        """Makes one optimizer step on the items that were logged. Returns its metrics."""
        learning_rate = self.set_learning_rates()
        with self.run.timed("update"):
            batch = sft_batch(rows, self.trie, self.device)
            weights = batch.learn / batch.learn.sum()
            gradients = GradientSum([self.actor])
            for micro in gradients.deal(micro_batches(self.actor, batch)):
                logprobs, entropy = item_logprobs(self.actor, self.trie, batch, micro, TEMPERATURE)
                weight = weights[to_device(micro, self.device), : logprobs.shape[1]]
                loss = -(weight * logprobs).sum()
                gradients.backward(self.actor, loss)
                gradients.log_sum("policy_loss", loss.detach())
                gradients.log_sum("entropy", (weight * entropy.detach()).sum())
            metrics = gradients.finish()
            row_ids = column(rows, "id")
            norms = clip_and_step(self.optimizers.values(), metrics["policy_loss"], self.run, row_ids)
        self.tokens = int(batch.learn.sum())
        return {**metrics, "grad_norm": norms[0], "learning_rate": learning_rate}

    def rollout(self):
        """Returns a batch of GROUP_SIZE candidates for each of a step's histories, likelier ones first. Its
        tensors are (histories * GROUP_SIZE, ...)."""
        with self.run.timed("rollout"):
            rows = next_rows(self.rl_rows, self.state, BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS)
            uniform = None
            if CANDIDATES == "sample":  # drawn for the whole step: BATCH_SIZE does not change the samples
                uniform = torch.rand(self.trie.depth, len(rows), GROUP_SIZE)
            return candidates(self.actor, self.trie, rows, GROUP_SIZE, self.pad_id, uniform)

    @torch.no_grad()
    def score(self, batch):
        """Adds the candidates' scores and the reference's log-probabilities of their codes to the batch."""

        def compute(model, batch, rows):
            return item_logprobs(model, self.trie, batch, rows, TEMPERATURE)[0]

        with self.run.timed("score"):
            batch.scores, batch.reward_parts = self.score_responses(batch.rows, batch.items)
            batch.ref_logprobs = batch.logprobs  # without a KL a stand-in: record() logs none
            if KL_COEF > 0:
                with without_adapter(self.reference):
                    batch.ref_logprobs = map_micro_batches(compute, self.reference, batch)

    def score_responses(self, rows, items):
        """Calls compute_rewards() and checks the result. items (rows,); groups are neighbours. Returns scores
        (rows,) and the logged reward parts."""
        named_rows = []
        for row in rows:
            history = self.catalogue.names(row["history"])
            target = self.catalogue.items[row["target"]]
            named_rows.append({"prompt": history, "answer": target, "columns": {}})
        responses = self.catalogue.names(items.tolist())
        batch = SimpleNamespace(rows=named_rows, responses=responses, columns={})
        scores, reward_parts = score_over_ranks(self, "compute_rewards", self.compute_rewards, batch)
        return scores.to(self.device), reward_parts

    def compute_rewards(self, histories, items, targets):
        """Returns the score of each item, (rows,); edit or override freely. The GROUP_SIZE candidates of a
        history are neighbours, likelier ones first. self.reward_parts is what is logged."""
        weighted = [
            ("value", self.value_reward, VALUE_WEIGHT),
            ("rule", rule_reward, RULE_WEIGHT),
            ("ranking", self.ranking_reward, RANKING_WEIGHT),
            ("semantic", self.semantic_reward, SEMANTIC_WEIGHT),
            ("collaborative", self.collaborative_reward, COLLABORATIVE_WEIGHT),
        ]
        total = torch.zeros(len(items))
        for name, function, weight in weighted + self.rewards:
            if weight:
                self.reward_parts[name] = call_reward(name, function, histories, items, targets)
                total += weight * self.reward_parts[name]
        return total

    def value_reward(self, histories, items, targets):
        scores = []
        for history, item in zip(map(self.catalogue.numbers, histories), self.catalogue.numbers(items)):
            scores.append(history_value(self.values, history, item, VALUE_DECAY))
        return scores

    def ranking_reward(self, histories, items, targets):
        is_hit = rule_reward(histories, items, targets)
        scores = []
        for begin in range(0, len(items), GROUP_SIZE):
            scores += ranking_reward(is_hit[begin : begin + GROUP_SIZE])
        return scores

    def semantic_reward(self, histories, items, targets):
        vectors = self.vectors[self.catalogue.numbers(items)]
        return (vectors * self.vectors[self.catalogue.numbers(targets)]).sum(1).tolist()

    def collaborative_reward(self, histories, items, targets):
        chosen = torch.tensor(self.catalogue.numbers(items)).view(-1, GROUP_SIZE)
        group_histories = list(map(self.catalogue.numbers, histories[::GROUP_SIZE]))
        scores = []
        for group in self.sasrec.scores(group_histories).gather(1, chosen).tolist():
            scores += min_max(group)
        return scores

    def compute_advantages(self, batch):
        """Compares each candidate with its group."""
        batch.advantages = group_advantages(batch.scores, GROUP_SIZE, SCALE_REWARDS)

    def update(self, batch):
        """Makes GROUP_EPOCHS passes of MINI_BATCHES optimizer steps. Returns the means of their metrics."""
        learning_rate = self.set_learning_rates()
        steps = []
        with self.run.timed("update"):
            for _ in range(GROUP_EPOCHS):
                for rows in mini_batches(len(batch.rows)):
                    steps.append(self.optimizer_step(batch, rows))
        check_first_ratio(steps[0], self.run.step - self.state.begin)
        metrics = {}
        for key in steps[0]:
            metrics[key] = sum(column(steps, key)) / len(steps)
        metrics["max_ratio_deviation"] = max(column(steps, "max_ratio_deviation"))
        metrics["first_ratio_deviation"] = steps[0]["max_ratio_deviation"]
        metrics["learning_rate"] = learning_rate
        return metrics

    def optimizer_step(self, batch, rows):
        """Makes one optimizer step on `rows`, a list of row numbers; how they are cut into micro-batches does
        not change it. Returns its metrics."""
        num_codes = batch.response_mask[to_device(rows, self.device)].sum()
        gradients = GradientSum([self.actor])
        for micro in gradients.deal(micro_batches(self.actor, batch, rows)):
            index = to_device(micro, self.device)
            logprobs, entropy = item_logprobs(self.actor, self.trie, batch, micro, TEMPERATURE)
            losses, policy_losses, ratio, kl = self.token_losses(batch, index, logprobs, entropy)
            gradients.backward(self.actor, losses.sum() / num_codes)

            ratio = ratio.detach()
            advantages = batch.advantages[index, None]
            clipped = torch.where(advantages > 0, ratio > 1 + CLIP_RANGE_HIGH, ratio < 1 - CLIP_RANGE)
            values = {
                "policy_loss": policy_losses,
                "mean_abs_log_ratio": (logprobs - batch.logprobs[index]).abs(),
                "entropy": entropy,
                "kl": kl,
                "clip_fraction": (clipped & (advantages != 0)).float(),
                "approx_kl": ratio - 1 - ratio.log(),
            }
            gradients.log_means(values, torch.ones_like(ratio), num_codes)
            gradients.log_max("max_ratio_deviation", (ratio - 1).abs().max())
        metrics = gradients.finish()
        row_ids = [batch.rows[i]["id"] for i in rows]
        norms = clip_and_step(self.optimizers.values(), metrics["policy_loss"], self.run, row_ids)
        metrics["grad_norm"] = norms[0]
        return metrics

    def token_losses(self, batch, rows, logprobs, entropy):
        """Returns the loss of each code, the policy's part of it, the ratio and the KL: each (rows, codes).
        Edit or override freely."""
        old_logprobs = batch.logprobs[rows]
        advantages = batch.advantages[rows, None]
        policy_losses, ratio = policy_loss(
            logprobs, old_logprobs, advantages, LOSS_TYPE, CLIP_RANGE, CLIP_RANGE_HIGH
        )
        kl = kl_loss(logprobs, batch.ref_logprobs[rows])
        return policy_losses + KL_COEF * kl - ENTROPY_COEF * entropy, policy_losses, ratio, kl

    @torch.no_grad()
    def sync_reference(self):
        """Moves the reference towards the actor every REFERENCE_SYNC_STEPS steps."""
        steps_done = self.run.step - self.state.begin
        if REFERENCE_SYNC_STEPS and steps_done % REFERENCE_SYNC_STEPS == 0:
            self.state.reference_has_moved = True
            for ref, parameter in zip(self.reference.parameters(), self.actor.parameters()):
                ref.lerp_(parameter, REFERENCE_SYNC_ALPHA)

    # ------------------------------------------------------------ evaluation and what is logged

    def evaluate(self, rows=None):
        """Returns metrics of the EVAL_BEAMS best items for each row (default: validation). GRPO adds reward,
        of the GROUP_SIZE best as if they were a group, and reward_sampled, of samples that have their own
        random stream. Override to add yours."""
        with self.run.timed("evaluate"):
            rows = self.valid_rows if rows is None else rows
            lists = best_items(self.actor, self.trie, rows, EVAL_BEAMS, self.pad_id)
            if self.state.stage == "sft":
                return list_metrics(lists, rows, self.popularity)
            metrics, _ = self.list_figures(lists, rows)
            generator = torch.Generator().manual_seed(SEED + 1)
            uniform = torch.rand(self.trie.depth, len(rows), GROUP_SIZE, generator=generator)
            batch = candidates(self.actor, self.trie, rows, GROUP_SIZE, self.pad_id, uniform)
            metrics["reward_sampled"] = self.score_responses(batch.rows, batch.items)[0].mean().item()
            return metrics

    def list_figures(self, lists, rows):
        """Returns metrics of the best items (rows, EVAL_BEAMS), with the rewards of the GROUP_SIZE first; and
        HR, NDCG and reward of each row, each (rows,)."""
        metrics = list_metrics(lists, rows, self.popularity)
        repeated_rows = np.repeat(rows, GROUP_SIZE).tolist()
        scores, reward_parts = self.score_responses(repeated_rows, lists[:, :GROUP_SIZE].flatten())
        metrics["reward"] = scores.mean().item()
        metrics["reward@1"] = scores[::GROUP_SIZE].mean().item()
        for name, values in reward_parts.items():
            metrics[f"reward/{name}"] = values.mean().item()
        by_row = {"hr@10": hits(lists, rows, 10), "ndcg@10": gains(lists, rows, 10)}
        by_row["reward"] = scores.view(-1, GROUP_SIZE).mean(1).cpu()
        return metrics, by_row

    def evaluate_sft(self):
        """Returns evaluate(), and keeps the best policy so far in the reference, whatever happens to best/.

        state.sft_waited counts passes through the data whose evaluations brought nothing better;
        state.sft_judged is the last pass that was counted, or had a better one."""
        metrics = self.evaluate()
        if metrics["ndcg@10"] > self.state.sft_best:
            self.state.sft_best = metrics["ndcg@10"]
            self.state.sft_waited = 0
            self.state.sft_judged = self.state.epoch
            self.reference.load_state_dict(self.actor.state_dict())
        elif self.state.sft_judged < self.state.epoch:
            self.state.sft_waited += 1
            self.state.sft_judged = self.state.epoch
        return metrics

    def record_sft(self, metrics):
        metrics = {"epoch": self.state.epoch, **metrics}
        line = "SFT, epoch {epoch}: loss:{policy_loss:.4f} E:{entropy:.3f} LR:{learning_rate:.2e}"
        self.run.log_step(metrics, self.tokens, [], line.format(**metrics))

    def record(self, batch, metrics):
        """Logs the step's metrics, a few of its candidates and its line on the terminal."""
        metrics = {"epoch": self.state.epoch, **metrics, "reward": batch.scores.mean().item()}
        if KL_COEF == 0:
            metrics["kl"] = math.nan
        for name, values in batch.reward_parts.items():
            metrics[f"reward/{name}"] = values.mean().item()
        groups = batch.scores.view(-1, GROUP_SIZE)
        metrics["advantage_abs"] = batch.advantages.abs().mean().item()
        metrics["zero_variance_groups"] = (groups == groups[:, :1]).all(1).float().mean().item()
        metrics["group_probability"] = batch.logprobs.sum(1).exp().mean().item() * GROUP_SIZE
        line = (
            "GRPO, epoch {epoch}: PL:{policy_loss:.4f} R:{reward:.3f} A:{advantage_abs:.2f} "
            "E:{entropy:.3f} KL:{kl:.4f} LR:{learning_rate:.2e}"
        ).format(**metrics)
        logged = torch.linspace(0, len(batch.rows) - 1, min(LOG_SAMPLES, len(batch.rows))).long().tolist()
        samples = [sample_record(batch, i, self.catalogue) for i in logged]
        self.run.log_step(metrics, batch.response_ids.numel(), samples, line)

    def recommend(self, history, k=10):
        """Returns the k likeliest items after a history (names, the oldest first, or one name), best first:
        [{"item", "title", "codes", "probability"}]. It asks the policy of best/, or the actor before there is
        one."""
        if isinstance(history, str):
            history = [history]
        names = list(map(str, history))
        if not names or not set(names) <= self.catalogue.number.keys():
            raise UserError(f"a history has one item of INDEX_FILE or more, not {names}")
        prompt = self.prompter.ids(self.catalogue.numbers(names)[-MAX_HISTORY:])
        width = min(max(k, EVAL_BEAMS), len(self.catalogue.items))
        items, logprobs, _ = search(self.best_policy(), self.trie, [prompt], width, self.pad_id)
        recommended = []
        for item, logprob in zip(items[0].tolist()[:k], logprobs[0].sum(1).tolist()):
            recommended.append(
                {
                    "item": self.catalogue.items[item],
                    "title": self.catalogue.titles[item],
                    "codes": "".join(self.catalogue.codes[item]),
                    "probability": math.exp(logprob),
                }
            )
        return recommended

    def best_policy(self):
        """Returns the policy of best/, read again when there is a better one; before there is one, the actor.
        A run that goes on in another folder has the best/ beside its checkpoint until its own has one."""
        for folder in self.best_folders:
            metrics = folder / "best/metrics.json"
            if not metrics.exists():
                continue
            step = json.loads(metrics.read_text())["step"]
            if self.best[0] != (folder, step):
                model = load_model(AutoModelForCausalLM, folder / "best/policy", "OUTPUT_DIR", self.device)
                if self.actor in _SHARED_DECODING:
                    _SHARED_DECODING.add(model)
                self.best = (folder, step), model
            return self.best[1]
        return self.actor

    # ------------------------------------------------------------ beside the algorithm

    def summary(self):
        name = f"{self.actor.config.model_type}: {parameter_counts(self.actor)} on {self.device}"
        items = f"{len(self.catalogue.items)} items of {self.trie.depth} codes"
        rows = f"{len(self.train_rows)} rows to train on, {len(self.valid_rows)} for validation"
        stages = f"stage {self.state.stage}, steps {self.run.step} to {self.run.total_steps}"
        return f"{name}, {DTYPE}; {items}; {rows}, {len(self.test_rows)} for the test; {stages}; {OUTPUT_DIR}"

    def enter_folder(self):
        """A run that goes on in another folder takes sft/ there, because LORA_RANK's adapters need it."""
        source = self.run.checkpoint.parent if self.run.checkpoint else self.run.folder
        self.best_folders = [self.run.folder]
        if source.resolve() == self.run.folder.resolve():
            return
        best = source / "best/metrics.json"
        if best.exists() and json.loads(best.read_text())["step"] <= self.run.step:
            self.best_folders.append(source)
        if self.state.stage == "rl" and (source / "sft").exists() and rank() == 0:
            archive_old_run([*self.run.folder.glob("sft")], OUTPUT_DIR, self.run.log)
            write_atomically(self.run.folder / "sft", lambda path: shutil.copytree(source / "sft", path))

    def prepare_baselines(self):
        """Fits the baselines that count, and logs the metrics of all baselines on validation."""
        paths = self.trie.paths.cpu()
        self.baselines = {
            "popularity": Counts(self.train_rows, paths[:, :1]),
            "markov": Counts(self.train_rows, paths[:, [0, -1]]),
            "counts": best_counts(self.train_rows, paths, self.valid_rows),
        }
        if self.sasrec:
            self.baselines["sasrec"] = self.sasrec
        self.levels = {}  # of validation, for the pictures
        for name, model in self.baselines.items():
            level, _ = self.list_figures(top_items(model, self.valid_rows), self.valid_rows)
            self.levels[name] = level
            figures = f"HR@10 {level['hr@10']:.4f}, NDCG@10 {level['ndcg@10']:.4f}"
            self.run.log(f"{name:10} on validation: {figures}, reward {level['reward']:.4f}")

    def compare_with_baselines(self):
        """Says if a baseline is better on validation: than SFT by NDCG@10, than GRPO by reward."""
        reached = []
        if self.state.sft_best >= 0:  # else SFT was another run's
            reached.append(("SFT", "ndcg@10", self.state.sft_best))
        if self.state.stage == "rl":
            reached.append(("GRPO", "reward", self.run.best_value))
        for stage, key, value in reached:
            name = max(self.levels, key=lambda name: self.levels[name][key])
            best = self.levels[name][key]
            if -math.inf < value < best:
                told = f"{stage} reached {key} {value:.4f} on validation, the baseline {name!r} {best:.4f}"
                self.run.log(f"NOTE: a rule wins. {told}: recommend by it, or train longer, or on more rows")

    def test(self):
        """Compares the baselines, SFT's best policy and GRPO's on the test rows: a table, eval_test.json and
        rec_learning.png."""
        rows = self.test_rows
        if not rows:
            return
        lists = {}
        for name, model in self.baselines.items():
            lists[name] = top_items(model, rows)
        if not self.state.reference_has_moved:  # else it is not SFT's policy any more
            with without_adapter(self.reference):
                lists["sft"] = best_items(self.reference, self.trie, rows, EVAL_BEAMS, self.pad_id)
        if self.state.stage == "rl":
            lists["grpo"] = best_items(self.best_policy(), self.trie, rows, EVAL_BEAMS, self.pad_id)
        figures = {}
        by_row = {}
        for name, best in lists.items():
            figures[name], by_row[name] = self.list_figures(best, rows)
            figures[name]["intervals"] = {}
            for key, values in by_row[name].items():
                figures[name]["intervals"][key] = bootstrap_interval(values)
        if {"sft", "grpo"} <= lists.keys():
            figures["grpo_minus_sft"] = {}
            for key in by_row["sft"]:
                gained = by_row["grpo"][key] - by_row["sft"][key]
                interval = bootstrap_interval(gained)
                figures["grpo_minus_sft"][key] = {"mean": gained.mean().item(), "interval": interval}
        if self.values is not None:
            figures["possible"] = {"value": best_value(self.values, rows, GROUP_SIZE)}
        for line in table_lines(figures):
            self.run.log(line)
        if rank() == 0:
            table = json.dumps({"rows": len(rows), **figures}, indent=1)
            write_atomically(self.run.folder / "eval_test.json", lambda path: path.write_text(table + "\n"))
            records = read_metrics(self.run.folder / "logs/metrics.jsonl")
            draw_learning(records, self.run.folder, self.run.title, self.levels, figures)


# ================ machinery: the same in all trainers that have it
# Edit it freely in a copy of your own. In the repository tools/copies.py keeps definitions of one name equal.

# ---------------------------------------------------------------- loading models


# differs: models are not sharded
def load_model(auto_class, path, constant, device, new_head=False, dtype=torch.float32):
    """Returns the model of a folder or hub name, in evaluation mode. Missing or unexpected weights are an
    error. With new_head it gets a head for one label. Weights of the head that the checkpoint lacks, or has
    in another shape, start at zero; those that fit are kept."""
    if (Path(path) / "adapter_config.json").exists():
        raise UserError(
            f"{constant} = {str(path)!r} is a LoRA adapter: set the LORA_RANK it was trained with, "
            "or take its run's best/policy"
        )
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
    bad_keys = missing | set(info["unexpected_keys"])
    if new_head:
        bad_keys = {key for key in missing if key.startswith(model.base_model_prefix + ".")}
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
    return model.to(device)


# differs: the model goes to its device later
def load_trained(auto_class, path, constant, device, saved=None, new_head=False):
    """Returns a model that is trained: from a checkpoint's folder `saved` if there is one, else from path.
    With LORA_RANK it is the frozen model of path with an adapter, and with the new head."""
    if LORA_RANK:
        model = load_adapted(auto_class, path, constant, device, saved, new_head)
    elif saved:
        model = load_model(auto_class, saved, constant, device)
    else:
        model = load_model(auto_class, path, constant, device, new_head)
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


# differs: nothing is sampled; the decoder's own logits are compared
@torch.no_grad()
def check_models(models_by_constant, rows, pad_id):
    """Compares the actor's decoding and every model's scoring with unbatched_logits(), on four prompts cut to
    mixed lengths. A model that disagrees is refused. Where the faster ways that share prompts agree, they are
    used from here on. Draws none of the run's random numbers. models_by_constant: {constant: model}, the
    actor first."""
    actor = next(iter(models_by_constant.values()))
    prompts = [rows[i % len(rows)]["ids"][:length] for i, length in enumerate((32, 3, 17, 8))]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size(actor), (8, 10), generator=generator).to(actor.device)
    batch = make_batch(repeat_each(prompts, 2), tokens.tolist(), actor.device)

    def decoded_and_scored():
        decoder = Decoder(actor, prompts, 2, pad_id)
        order = list(range(8))
        logits = [decoder.logits]
        for t in range(9):
            decoder.next(tokens[order, t])
            order = [*order[2:], *order[:2]]  # as a search does, it continues with other rows
            decoder.select_rows([2, 3, 4, 5, 6, 7, 0, 1])
            logits.append(decoder.logits[np.argsort(order).tolist()])
        return torch.stack(logits, 1).flatten(0, 1), unbatched_logits(actor, batch)

    def disagreement_of(model, logits_of):
        def compute():
            return logits_of(model, batch, range(8))[0], unbatched_logits(model, batch)

        return disagreement(model, compute)

    # Decoding: with shared prompts where that agrees, else without
    with full_parameters(actor):
        decoding_fault = "not tried"  # "": the model agrees
        if actor.config._attn_implementation == "shared_prompts":
            _SHARED_DECODING.add(actor)
            decoding_fault = disagreement(actor, decoded_and_scored)
        if decoding_fault:
            _SHARED_DECODING.discard(actor)
            decoding_fault = disagreement(actor, decoded_and_scored)
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
            fault = decoding_fault if model is actor else ""
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
    at every token, which took 39% of a rollout's time."""

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


# ---------------------------------------------------------------- decoding with shared prompts
# Keys and values of a prompt are kept once for all its responses: a rollout takes 0.44 to 0.7 of the time.
# A copy may delete this section, and the two places in Decoder and load_model() that
# name it.

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


# ---------------------------------------------------------------- scoring with shared prompts
# A prompt is read once with all its responses. A copy may delete this section; then response_logits() and
# check_models() must not name it.

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


# differs: the name of the distribution
def check_first_ratio(metrics, step):
    """The run's first optimizer step trains the very policy that sampled, so its ratios are 1 but for
    rounding. In float32 no token may differ; bfloat16 moves single tokens, so there the mean counts."""
    if step > 1:
        return
    deviation, bound = metrics["mean_abs_log_ratio"], 0.05
    if DTYPE == "float32":
        deviation, bound = metrics["max_ratio_deviation"], 1e-3
    if deviation > bound:
        hint = f"ACTOR_MODEL, or an edited constrained_logprobs(), differs in training; DTYPE = {DTYPE!r}"
        raise UserError(f"in the first update a ratio differs from 1 by {deviation:.2g}: {hint}")


# ---------------------------------------------------------------- prompts and responses


def parameter_counts(model):
    """Returns the number of parameters as text and, with an adapter, how many of them are trained."""
    text = f"{model.num_parameters():,} parameters"
    if LORA_RANK:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        text += f", of which {trained:,} are trained,"
    return text


# ---------------------------------------------------------------- STAGE=evaluate


def policy_and_step(policy):
    """Returns a policy's folder as text and, if it is the best/ of a run, the step that it is of."""
    for folder in (Path(policy), Path(policy).parent):
        if (folder / "metrics.json").exists():
            return f"{policy} (step {json.loads((folder / 'metrics.json').read_text())['step']})"
    return str(policy)


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


# differs: the data and the figures of this trainer
@keeping_constants()
def evaluate_policy(trainer_class):
    """Scores EVALUATE_POLICY on TEST_FILE without training, by its EVAL_BEAMS best items of each row. Writes
    OUTPUT_DIR/eval_<policy>_<data>.json, and the ten best items of every row to a .jsonl of that name; a run
    in OUTPUT_DIR stays as it is. Returns {figure: {"mean", "low", "high"}}."""
    folder = Path(OUTPUT_DIR)
    policy = Path(EVALUATE_POLICY)
    if not TEST_FILE:
        raise UserError("STAGE = 'evaluate' needs a TEST_FILE")
    if EVALUATE_POLICY in ("best", "sft") or EVALUATE_POLICY.startswith("step_"):
        policy = folder / EVALUATE_POLICY
    if (policy / "policy").exists():
        policy = policy / "policy"
    if not (policy / "config.json").exists() and not (policy / "adapter_config.json").exists():
        hint = "train first, or give the folder of a policy"
        raise UserError(f"EVALUATE_POLICY = {EVALUATE_POLICY!r}: there is no policy in {policy}: {hint}")
    trainer = trainer_to_evaluate(trainer_class, str(policy))
    by_row, records = policy_scores(trainer, trainer.test_rows)
    figures = {}
    for figure, values in by_row.items():
        mean, (low, high) = values.mean().item(), bootstrap_interval(values.numpy())
        figures[figure] = {"mean": mean, "low": low, "high": high}
        trainer.run.log(f"{figure:16} {mean:.4f}   95% interval {low:.4f} to {high:.4f}")
    settings = {"policy": str(policy), "data": TEST_FILE, "rows": len(records)}
    settings |= {"max_history": MAX_HISTORY, "eval_beams": EVAL_BEAMS, "group_size": GROUP_SIZE}
    settings["constants"] = {name: constants()[name] for name in _CHANGE_SCORES}
    names = ["eval", *Path(EVALUATE_POLICY).parts[-2:], Path(TEST_FILE).stem]
    path = write_evaluation("_".join(names), settings, {"figures": figures}, records)
    counts = f"{len(records)} rows"
    trainer.run.log(f"{policy_and_step(policy)}: {counts}; written to {path}.json and .jsonl")
    trainer.run.lock.release(force=True)
    return figures


# differs: load_splits() leaves out the data to train on
def trainer_to_evaluate(trainer_class, policy):
    """Returns a trainer with the policy as its actor. No data to train on are loaded."""
    global STAGE, ACTOR_MODEL, LORA_RANK
    STAGE, ACTOR_MODEL, LORA_RANK = "evaluate", policy, 0
    return trainer_class(resume_from_checkpoint="no")


# differs: the figures of this trainer
def policy_scores(trainer, rows):
    """Returns {figure: its value for each row, (rows,)} of the actor's best items, and a record of each row
    with the first ten. The rewards are means over the GROUP_SIZE best items, as in the table of a run."""
    lists = best_items(trainer.actor, trainer.trie, rows, EVAL_BEAMS, trainer.pad_id)
    by_row = {}
    for k in _KS:
        by_row |= {f"hr@{k}": hits(lists, rows, k), f"ndcg@{k}": gains(lists, rows, k)}
    rewarded = lists[:, :GROUP_SIZE].flatten()
    scores, reward_parts = trainer.score_responses(repeat_each(rows, GROUP_SIZE), rewarded)
    by_row["reward"] = scores.view(-1, GROUP_SIZE).mean(1).cpu()
    for name, values in reward_parts.items():
        by_row[f"reward/{name}"] = values.view(-1, GROUP_SIZE).mean(1).cpu()
    names = trainer.catalogue.names
    records = []
    for i, row in enumerate(rows):
        best = [item for item in lists[i, :10].tolist() if item >= 0]
        record = {"id": row["id"], "history": names(row["history"]), "target": names([row["target"]])[0]}
        record |= {"items": names(best), "ndcg@10": by_row["ndcg@10"][i].item()}
        records.append({**record, "reward": by_row["reward"][i].item()})
    return by_row, records


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


# differs: this trainer does not shard models
def is_sharded():
    return False


# differs: models are not sharded
@contextmanager
def full_parameters(*models):
    yield


# differs: models are not sharded
def full_state(state):
    return state


# differs: models are not sharded
def full_weights(model):
    return model.state_dict()


# differs: models are not sharded
def load_optimizer_state(optimizer, saved):
    """Loads an optimizer's state. Learning rates and the like come from the constants of now."""
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({**saved, "param_groups": groups})


# ---------------------------------------------------------------- records


# differs: csv alone
def read_records(path, where):
    """Yields (number of its last line, record) of a csv file."""
    try:
        # strict: otherwise an unclosed quote swallows the rest of the file
        reader = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
        for name in reader.fieldnames or []:
            if name and reader.fieldnames.count(name) > 1:
                raise ValueError(f"its first line has the column {name!r} twice: rename one of them")
        records = [(reader.line_num, record) for record in reader]
    except Exception as error:  # such as csv.Error, UnicodeError, OSError
        line = ""
        if isinstance(error, csv.Error):
            line = f" line {reader.reader.line_num}"
        raise UserError(f"{where}{line}: cannot be read as csv ({first_line(error)})") from None
    for number, record in records:
        if None in (*record, *record.values()):
            fault = "its number of fields differs from the first line's: quote commas"
            raise UserError(f"{where} line {number}: {fault}")
        yield number, record


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
        hint = "make it a plain function; examples/judge.py makes many calls at a time"
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

    # differs: SFT alone ends with sft/
    def final_message(self):
        if self.stop_signal:
            return f"Stopped at step {self.step}: start it again with RESUME=yes to continue"
        if STAGE == "sft":
            stage = "STAGE=rl continue from it (with LORA_RANK: STAGE=rl RESUME=no)"
            return f"SFT is done: {self.folder}/sft/policy; the same words with {stage}"
        policy = self.folder / "best/policy"
        if not policy.exists():
            policy = self.checkpoint / "policy"
        policy = f"{policy}{self.step_of_best(self.state.begin)}"
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


# differs: beams
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
        hint += "GRADIENT_ACCUMULATION_STEPS: the training stays as it is; or, if it was an evaluation, "
        hint += "lower EVAL_BEAMS"
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


# differs: its panels are no constant
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
    for keys, allowed in _VALID_RANGES.items():
        for key in keys.split():
            value = globals()[key]
            if value is None:
                continue
            if isinstance(allowed, list) and value not in allowed:
                raise UserError(f"{key} = {value!r} is unknown: it takes {' or '.join(allowed)}")
            if isinstance(allowed, tuple) and not allowed[0] <= value <= allowed[1]:
                raise UserError(f"{key} = {value} is out of range: it takes {allowed[0]:g} to {allowed[1]:g}")


# ---------------------------------------------------------------- the trie of the catalogue, and decoding


class Trie:
    """All items' codes as flat tensors, a few per level. A level's nodes are its distinct prefixes in lexical
    order, so a node's children are neighbours on the next level: `first` and `count` of a node say where.
    codes (items, depth) of token ids, all rows distinct."""

    def __init__(self, codes, device):
        self.codes = codes.to(device)
        self.depth = codes.shape[1]
        self.first = []  # of each level: (nodes,) the number of a node's first child on the next level
        self.count = []  # (nodes,) how many children a node has
        self.code = []  # (children,) the code that leads to each child
        self.width = []  # the most children that a node has
        paths = [torch.zeros(len(codes), dtype=torch.long)]  # (items,) an item's node on each level
        for level in range(self.depth):
            prefixes, node = codes[:, : level + 1].unique(dim=0, return_inverse=True)
            parent = torch.zeros(len(prefixes), dtype=torch.long).scatter(0, node, paths[-1])
            count = parent.bincount()
            self.first.append((count.cumsum(0) - count).to(device))
            self.count.append(count.to(device))
            self.code.append(prefixes[:, -1].to(device))
            self.width.append(int(count.max()))
            paths.append(node)
        self.paths = torch.stack(paths, 1).to(device)  # (items, depth + 1)
        self.item_at = self.paths[:, -1].argsort()  # (leaves,) the item of each
        self.ids = self.codes.unique()  # of tokens that are codes
        self.columns = torch.zeros(int(self.ids.max()) + 1, dtype=torch.long, device=device)
        self.columns[self.ids] = torch.arange(len(self.ids), device=device)  # of each id in CodeHead's logits

    def options(self, level, nodes):
        """Returns what may follow the nodes (...) of a level: codes, the children they lead to, and allowed,
        False where a node has fewer children; each (..., width)."""
        step = torch.arange(self.width[level], device=nodes.device)
        allowed = step < self.count[level][nodes].unsqueeze(-1)
        children = (self.first[level][nodes].unsqueeze(-1) + step).clamp(max=len(self.code[level]) - 1)
        return self.code[level][children], children, allowed


class CodeHead(torch.nn.Module):
    """A model's output layer, cut to the ids of codes. With a vocabulary of 32,000 the logits of other words
    took most of the time of decoding."""

    def __init__(self, head, ids):
        super().__init__()
        self.head = head
        self.ids = ids

    def forward(self, hidden):
        bias = self.head.bias
        if bias is not None:
            bias = bias[self.ids]
        return torch.nn.functional.linear(hidden, self.head.weight[self.ids], bias)


@contextmanager
def only_code_logits(model, trie):
    """Inside the block the model's logits are those of trie.ids, the codes."""
    head = model.get_output_embeddings()
    model.set_output_embeddings(CodeHead(head, trie.ids))
    try:
        yield
    finally:
        model.set_output_embeddings(head)


@torch.no_grad()
def check_head(model, trie, ids):
    """Refuses a model whose logits are not those of a linear output layer, such as one that caps them: its
    logits cannot be narrowed to the codes."""
    prompt = torch.tensor([ids], device=model.device)
    wanted = forward(model, prompt, use_cache=False).logits[0, -1, trie.ids]
    with only_code_logits(model, trie):
        logits = forward(model, prompt, use_cache=False).logits[0, -1]
    if logits.shape != wanted.shape or not torch.allclose(logits, wanted, atol=1e-3, rtol=1e-3):
        raise UserError(f"ACTOR_MODEL = {ACTOR_MODEL!r}: its logits are not those of a linear output layer")


@torch.no_grad()
def search(model, trie, prompts, width, pad_id, uniform=None):
    """Returns `width` items for each prompt (a list of ids): their numbers (prompts, width), the
    log-probabilities of their codes and the entropies of the distributions that these came from, both
    (prompts, width, depth). It goes down the trie level by level with several prefixes per prompt.

    uniform None: beam search, best first; where the catalogue has fewer items, the rest are -1 with a
    log-probability of -inf. Else random numbers (depth, prompts, width): samples with replacement.

    Example: one prompt, the items ax, ay and bx, width 2. The root offers two options, a and b, of
    log-probabilities -0.4 and -1.1: both are kept, nodes = [[a, b]]. Each of them offers two options (b's
    second is not allowed), totals = [[-0.5, -2.7, -1.1, -inf]] of ax, ay, bx and none. The best two are
    chosen = [[0, 2]], their parents chosen // 2 = [[0, 1]]: ax goes on from a, bx from b."""
    count = len(prompts)
    device = model.device
    with only_code_logits(model, trie):
        decoder = Decoder(model, prompts, 1, pad_id)  # each prompt is read once
    logits = decoder.logits
    nodes = torch.zeros(count, 1, dtype=torch.long, device=device)  # (prompts, prefixes)
    total = torch.zeros(count, 1, device=device)  # log-probability of each prefix
    logprobs, entropies = torch.zeros(2, count, 1, 0, device=device)  # (prompts, prefixes, codes so far)
    prompt = torch.arange(count, device=device)[:, None]
    for level in range(trie.depth):
        codes, children, allowed = trie.options(level, nodes)  # (prompts, prefixes, options)
        num_prefixes, num_options = codes.shape[1:]
        logits = logits.view(count, num_prefixes, -1)
        option_logprobs = constrained_logprobs(logits, trie.columns[codes], allowed, TEMPERATURE)
        totals = (total.unsqueeze(-1) + option_logprobs).flatten(1)
        if uniform is None:
            chosen = totals.topk(min(width, totals.shape[1])).indices  # (prompts, next prefixes)
            parent = chosen // num_options
        else:
            probabilities = option_logprobs.expand(-1, width, -1).flatten(0, 1).exp()
            parent = torch.arange(width, device=device).expand(count, -1) % num_prefixes
            option = sample_tokens(probabilities, uniform[level].flatten()).view(count, width)
            chosen = parent * num_options + option
        total = totals.gather(1, chosen)
        nodes = children.flatten(1).gather(1, chosen)
        logprob = option_logprobs.flatten(1).gather(1, chosen).unsqueeze(-1)
        entropy = entropy_of(option_logprobs).gather(1, parent).unsqueeze(-1)
        logprobs = torch.cat([logprobs[prompt, parent], logprob], -1)
        entropies = torch.cat([entropies[prompt, parent], entropy], -1)
        if level + 1 == trie.depth:
            break
        # The model reads the new codes. Where only one last code may follow, its logits do not matter
        goes_on = trie.count[level + 1][nodes] > 1
        if level + 2 < trie.depth:
            goes_on = torch.ones_like(goes_on)
        rows = goes_on.flatten().nonzero().squeeze(-1)
        logits = logits.new_zeros(nodes.numel(), logits.shape[-1])
        if len(rows):
            decoder.select_rows((prompt * num_prefixes + parent).flatten()[rows].tolist())
            tokens = codes.flatten(1).gather(1, chosen).flatten()[rows]
            with only_code_logits(model, trie):
                logits[rows] = decoder.next(tokens).to(logits.dtype)
    items = torch.where(total.isfinite(), trie.item_at[nodes], -1)
    return items, logprobs, entropies


def search_rows(model, trie, rows, width, pad_id, chunk_size, uniform=None):
    """Returns search() of all rows. It searches chunk_size rows at a time; the processes share the chunks."""

    def search_chunk(begin):
        chunk = slice(begin, begin + chunk_size)
        noise = None if uniform is None else uniform[:, chunk].to(model.device)
        with autocast(model):
            return search(model, trie, column(rows[chunk], "ids"), width, pad_id, noise)

    chunks = map_over_ranks(range(0, len(rows), chunk_size), search_chunk)
    return map(torch.cat, zip(*chunks))


def candidates(model, trie, rows, width, pad_id, uniform):
    """Returns a batch of `width` candidates for each row, likelier ones first. Its tensors are (rows * width,
    ...)."""
    items, logprobs, entropies = search_rows(model, trie, rows, width, pad_id, BATCH_SIZE, uniform)
    order = logprobs.sum(2).argsort(dim=1, descending=True, stable=True)
    code_order = order.unsqueeze(-1).expand(-1, -1, trie.depth)
    items = items.gather(1, order).view(-1, 1)
    repeated_rows = np.repeat(rows, width).tolist()
    batch = item_batch(column(repeated_rows, "ids"), items.tolist(), trie)
    batch.rows = repeated_rows
    batch.items = items.flatten().to(model.device)
    batch.logprobs = logprobs.gather(1, code_order).flatten(0, 1).to(model.device)
    batch.entropies = entropies.gather(1, code_order).flatten(0, 1).to(model.device)
    return batch


def best_items(model, trie, rows, width, pad_id):
    """Returns the `width` best items of each row by beam search, best first, (rows, width), on the CPU; -1
    where there are fewer."""
    beams = min(width, len(trie.codes))
    chunk_size = max(1, min(64, 2**28 // (4 * len(trie.ids) * beams)))
    items, _, _ = search_rows(model, trie, rows, beams, pad_id, chunk_size)
    return torch.nn.functional.pad(items.cpu(), (0, width - beams), value=-1)


def balanced_batch_size(rows):
    """Returns how many of SFT's rows have about 256 items to learn: the power of two that is nearest. One
    optimizer step is then the same amount of data for short and for long histories."""
    items_per_row = sum(map(sum, column(rows, "learn"))) / len(rows)
    return 2 ** max(0, round(math.log2(256 / items_per_row)))


def item_batch(prompts, items, trie):
    """Returns a batch of prompts (lists of ids) and of the items, a list of numbers each, that follow."""
    device = trie.codes.device
    numbers = to_device(pad_right(items, 0), device)  # (rows, most items)
    responses = []
    for codes, row_items in zip(trie.codes[numbers].flatten(1).tolist(), items):
        responses.append(codes[: trie.depth * len(row_items)])
    batch = make_batch(prompts, responses, device)
    batch.paths = trie.paths[numbers, : trie.depth].flatten(1)  # the node that each code is read at
    batch.children = trie.paths[numbers, 1:].flatten(1)  # and the one it leads to
    return batch


def sft_batch(rows, trie, device):
    """Returns a batch of SFT's rows {"prompt", "items", "learn"}; batch.learn is 1 for the codes of the items
    to learn, (rows, R)."""
    batch = item_batch(column(rows, "prompt"), column(rows, "items"), trie)
    learn = pad_right(column(rows, "learn"), False).to(device)
    batch.learn = batch.response_mask * learn.repeat_interleave(trie.depth, 1)
    return batch


def item_logprobs(model, trie, batch, rows, temperature):
    """Returns constrained log-probabilities of the items' codes and the entropy at each: two (rows, R),
    float32, 0 after the end."""
    with autocast(model), only_code_logits(model, trie):
        logits, (row, place) = response_logits(
            model, batch, rows
        )  # logits[n] (codes,) are of place[n] in row[n]
    index = to_device(rows, logits.device)
    nodes = batch.paths[index][row, place]
    children = batch.children[index][row, place]
    logprobs = torch.zeros(len(rows), max_response_length(batch, rows), device=logits.device)
    entropy = torch.zeros_like(logprobs)
    for level in range(trie.depth):
        of_level = (place % trie.depth == level).nonzero().squeeze(-1)
        codes, _, allowed = trie.options(level, nodes[of_level])
        option_logprobs = constrained_logprobs(logits[of_level], trie.columns[codes], allowed, temperature)
        chosen = children[of_level] - trie.first[level][nodes[of_level]]
        chosen_logprobs = option_logprobs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        positions = (row[of_level], place[of_level])
        logprobs = logprobs.index_put(positions, chosen_logprobs)
        entropy = entropy.index_put(positions, entropy_of(option_logprobs))
    return logprobs, entropy


# ---------------------------------------------------------------- catalogue, rows and prompts


def column(rows, field):
    """Returns one field of all rows, a list."""
    return [row[field] for row in rows]


class Catalogue:
    """The items of INDEX_FILE by number: items (their names), codes and titles. Items of the same codes are
    one; number has the names of all."""

    def __init__(self, log):
        self.items = []
        self.codes = []
        self.rows = []  # of each item: its row of INDEX_FILE
        self.number = {}
        number_of = {}  # {codes: item's number}
        doubles = []
        for row, (item, codes) in enumerate(read_index().items()):
            number = number_of.setdefault(tuple(codes), len(self.items))
            self.number[item] = number
            if number < len(self.items):
                doubles.append(f"{item} as {self.items[number]}")
            else:
                self.items.append(item)
                self.codes.append(tuple(codes))
                self.rows.append(row)
        if doubles:
            others = (
                f"{len(doubles)} of {len(self.number)} items have the codes of another ({doubles[0]} ...)"
            )
            log(f"WARNING: {others}: a hit on one counts for both")
        if len(self.items) < GROUP_SIZE:  # the list that evaluation rewards is a group of distinct items
            count = f"{len(self.items)}, as many items as there are"
            raise UserError(f"GROUP_SIZE = {GROUP_SIZE} is above {count}")
        codes_of_items = json.dumps(sorted(zip(self.items, self.codes)))
        self.digest = hashlib.sha256(codes_of_items.encode()).hexdigest()[:16]  # of items and their codes
        self.titles = [""] * len(self.items)
        if ITEM_FILE:
            self.titles = read_titles(self.number, len(self.items))

    def names(self, numbers):
        return [self.items[number] for number in numbers]

    def numbers(self, names):
        return [self.number[name] for name in names]


def read_file(path, constant, read):
    """Returns read(path). Its failure becomes one sentence."""
    try:
        return read(path)
    except Exception as error:  # NumPy and others raise many types
        raise UserError(f"{constant} = {path!r}: cannot be read ({first_line(error)})") from None


def read_text(path):
    return Path(path).read_text("utf-8-sig")


def read_index():
    """Returns {item: [codes]} of INDEX_FILE. Items of fewer codes than others end with <end>."""

    def without_repeats(pairs):  # JSON alone would keep the last of an item that stands twice
        index = {}
        for item, codes in pairs:
            if item in index:
                raise ValueError(f"item {item!r} stands in it twice: delete one")
            index[item] = codes
        return index

    def parse(path):
        return json.loads(read_text(path), object_pairs_hook=without_repeats)

    where = f"INDEX_FILE = {INDEX_FILE!r}"
    index = read_file(INDEX_FILE, "INDEX_FILE", parse)
    if not isinstance(index, dict) or not index:
        raise UserError(f"{where}: it must be one object of items and their codes, {{item: [code, ...]}}")
    for item, codes in index.items():
        texts = isinstance(codes, list) and all(isinstance(code, str) and code.strip() for code in codes)
        if not texts or not codes or not "".join(codes).isprintable():
            takes = "it takes a list of codes"
            raise UserError(f"{where}: item {item!r} has {repr(codes)[:60]}: {takes}")
    depth = max(map(len, index.values()))
    return {item: codes + ["<end>"] * (depth - len(codes)) for item, codes in index.items()}


def read_titles(number, count):
    """Returns the titles of `count` items, empty where ITEM_FILE has none. number: {item: its number}."""
    titles = [""] * count
    for line_number, line in enumerate(read_file(ITEM_FILE, "ITEM_FILE", read_text).split("\n"), 1):
        if not line.strip():
            continue
        fields = line.split("\t")
        item = fields[-1].strip()
        if len(fields) < 3 or item not in number:
            takes = "it takes codes, title and an item of INDEX_FILE, tab between"
            raise UserError(f"ITEM_FILE = {ITEM_FILE!r} line {line_number}: {takes}, not {line[:60]!r}")
        titles[number[item]] = titles[number[item]] or "\t".join(fields[1:-1])
    return titles


def read_rows(path, constant, catalogue):
    """Returns [{"id", "user", "sequence"}] of a csv file; sequence: numbers of the history's items and of the
    target."""
    where = f"{constant} = {str(path)!r}"
    rows = []
    for line, record in read_records(path, where):
        for name in (USER_COLUMN, HISTORY_COLUMN, TARGET_COLUMN):
            if name not in record:
                raise UserError(f"{where}: there is no column {name!r}; it has {list(record)}")
            if not record[name].strip():
                raise UserError(f"{where} line {line}: its {name} is empty: mend or delete it")
        text = record[HISTORY_COLUMN]
        items = None
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            items = ast.literal_eval(text)
        # A set has no order, a text would be its letters
        if not isinstance(items, (list, tuple)) or not items:
            takes = "it takes a list of one item or more, such as [3, 17]; mend or delete it"
            raise UserError(f"{where} line {line}: {HISTORY_COLUMN} holds {repr(text)[:60]}: {takes}")
        names = [*map(str, items), record[TARGET_COLUMN].strip()]
        if unknown := [name for name in names if name not in catalogue.number]:
            todo = "add it before SFT, or delete the line"
            raise UserError(f"{where} line {line}: item {unknown[0]!r} has no codes in INDEX_FILE: {todo}")
        row_id = f"{Path(path).name}:{line}"
        rows.append({"id": row_id, "user": record[USER_COLUMN], "sequence": catalogue.numbers(names)})
    if not rows:
        raise UserError(f"{where}: the data set is empty")
    return rows


def transitions(rows, prefixes, log, name):
    """Returns one row per history and target: {"id", "user", "line", "at", "history", "target", "sequence",
    "whole_history"}. With prefixes the items of a history are targets too; what stands in several rows of a
    user (one row's history goes on in the next) is taken once. `at` is the target's place in the sequence,
    which is cut to MAX_HISTORY; whole_history is not cut."""
    targets = []
    seen = set()
    num_cut = 0
    for line, row in enumerate(rows):
        sequence = row["sequence"][-MAX_HISTORY - 1 :]
        cut = len(row["sequence"]) - len(sequence)
        num_cut += cut > 0
        for place in range(1 if prefixes else len(sequence) - 1, len(sequence)):
            whole_history = tuple(row["sequence"][: cut + place])
            key = (row["user"], whole_history, sequence[place])  # the same in every window
            if prefixes and key in seen:
                continue
            seen.add(key)
            row_id = f"{row['id']}#{place}" if prefixes else row["id"]
            new = {"id": row_id, "user": row["user"], "line": line, "at": place, "sequence": sequence}
            new |= {"history": sequence[:place], "target": sequence[place], "whole_history": whole_history}
            targets.append(new)
    if num_cut:
        log(f"{num_cut} of {len(rows)} {name} histories are longer than MAX_HISTORY: cut from the left")
    return targets


def hold_out_users(rows):
    """Returns the rows to train on, and those of VALID_FRACTION of the users for validation."""
    users = list(dict.fromkeys(column(rows, "user")))
    if len(users) < 2:
        raise UserError(f"TRAIN_FILE = {TRAIN_FILE!r} has one user, none to hold out: set VALID_FILE")
    order = torch.randperm(len(users), generator=torch.Generator().manual_seed(0))
    count = min(math.ceil(VALID_FRACTION * len(users)), len(users) - 1)
    held_out = np.isin(column(rows, "user"), np.array(users)[order[:count].numpy()])
    return list(itertools.compress(rows, ~held_out)), list(itertools.compress(rows, held_out))


# differs: the data of this trainer
def load_splits(catalogue, log):
    """Returns training, validation and test rows. What validation or test ask for is not trained on: the same
    user and target after the same history, whatever file it stands in and wherever its history is cut."""
    test = []
    if TEST_FILE:
        test = transitions(read_rows(TEST_FILE, "TEST_FILE", catalogue), False, log, "test")
    if STAGE == "evaluate":
        return [], [], test
    rows = read_rows(TRAIN_FILE, "TRAIN_FILE", catalogue)[:MAX_TRAIN_ROWS]
    if VALID_FILE is None:
        rows, valid = hold_out_users(rows)
    else:
        valid = read_rows(VALID_FILE, "VALID_FILE", catalogue)
    valid = transitions(valid, False, log, "validation")
    if MAX_EVAL_ROWS and len(valid) > MAX_EVAL_ROWS:
        valid = [valid[i] for i in torch.linspace(0, len(valid) - 1, MAX_EVAL_ROWS).long().tolist()]
    asked = defaultdict(list)  # {(user, last item, target): histories, as the files have them}
    for row in valid + test:
        asked[row["user"], row["history"][-1], row["target"]].append(row["whole_history"])

    def is_asked(row):
        history = row["whole_history"]
        for other in asked.get((row["user"], history[-1], row["target"]), ()):
            shorter = min(len(history), len(other))
            if history[-shorter:] == other[-shorter:]:
                return True
        return False

    train = transitions(rows, TRAIN_PREFIXES, log, "training")
    kept = list(itertools.filterfalse(is_asked, train))
    if num_asked := len(train) - len(kept):
        log(f"WARNING: {num_asked} training rows are rows of validation or test: left out of training")
    if not kept:
        raise UserError(f"TRAIN_FILE = {TRAIN_FILE!r}: nothing to train on is left beside the other rows")
    return kept, valid, test


class Prompter:
    """Writes histories as prompts: PROMPT_TEMPLATE, in the tokenizer's chat template if it has one, around
    codes of items. codes (items, depth) are their ids."""

    def __init__(self, tokenizer, catalogue, model):
        self.tokenizer = tokenizer
        self.catalogue = catalogue
        self.codes = torch.tensor(list(map(tokenizer.convert_tokens_to_ids, catalogue.codes)))
        text = PROMPT_TEMPLATE
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, after = text.split("{history}")
        self.head = tokenizer(before, add_special_tokens=not tokenizer.chat_template)["input_ids"]
        if self.head[-1:] == [tokenizer.eos_token_id]:  # some tokenizers end every text
            self.head = self.head[:-1]
        self.tail = tokenizer(after, add_special_tokens=False)["input_ids"] if after else []
        longest = len(self.head) + len(self.tail) + self.codes.shape[1] * (MAX_HISTORY + 1)
        self.max_length = max_positions(model)
        if longest > self.max_length:
            makes = f"MAX_HISTORY = {MAX_HISTORY} items make {longest} tokens"
            raise UserError(f"{makes}, ACTOR_MODEL reads {self.max_length}: lower MAX_HISTORY")

    def ids(self, history):
        return self.head + self.codes[history].flatten().tolist() + self.tail

    def rows_of_stages(self, train_rows, log):
        """Returns SFT's rows, [{"id", "prompt", "items", "learn"}], and GRPO's. Where nothing stands behind
        the history, one row of SFT asks for all items of a sequence: the same loss as with a row for each, at
        a fifth of the time."""
        title_rows = self.title_rows(train_rows, log)
        single_rows = title_rows
        lines = defaultdict(list)  # {line of the file: its training rows}
        if self.tail:
            single_rows = train_rows + title_rows
        else:
            for row in train_rows:
                lines[row["line"]].append(row)
        sft_rows = []
        for rows in lines.values():
            places = column(rows, "at")
            end = max(places) + 1
            learn = np.isin(range(1, end), places).tolist()
            history, items = rows[0]["sequence"][:1], rows[0]["sequence"][1:end]
            sft_rows.append(
                {"id": rows[0]["id"], "prompt": self.ids(history), "items": items, "learn": learn}
            )
        for row in single_rows:
            items = [row["target"]]
            sft_rows.append({"id": row["id"], "prompt": row["ids"], "items": items, "learn": [True]})
        return sft_rows, train_rows + [row for row in title_rows if "history" in row]

    def title_rows(self, train_rows, log):
        """Returns training rows whose history is written as titles, then rows without a history that ask for
        an item by its own title."""
        generator = torch.Generator().manual_seed(0)
        titles = self.catalogue.titles
        rows = []
        order = torch.randperm(len(train_rows), generator=generator)
        for i in order[: round(TITLE_HISTORY_ROWS * len(train_rows))].tolist():
            text = "; ".join(titles[item] for item in train_rows[i]["history"])
            rows.append({**train_rows[i], "id": f"{train_rows[i]['id']} by titles", "text": text})
        order = torch.randperm(len(titles), generator=generator)
        for item in order[: round(TITLE_ROWS * len(titles))].tolist():
            name = f"title of {self.catalogue.items[item]}"
            rows.append({"id": name, "text": titles[item], "target": item})
        kept = []
        for row in rows:
            ids = self.tokenizer(row["text"], add_special_tokens=False)["input_ids"]
            row["ids"] = self.head + ids + self.tail
            if row["text"] and len(row["ids"]) + self.codes.shape[1] <= self.max_length:
                kept.append(row)
        if len(kept) < len(rows):
            log(f"{len(rows) - len(kept)} of {len(rows)} rows of titles are empty or too long: left out")
        return kept


def check_sizes():
    """Refuses constants that do not fit each other."""
    if LORA_RANK and (STAGE != "rl" or REFERENCE_SYNC_STEPS):
        needs = "STAGE=rl with REFERENCE_SYNC_STEPS=0: whole models learn what codes are, by STAGE=sft"
        raise UserError(f"LORA_RANK = {LORA_RANK} needs {needs}")
    if HIDDEN_SIZE % HEADS or (HIDDEN_SIZE // HEADS) % 2:
        raise UserError(f"HIDDEN_SIZE = {HIDDEN_SIZE} must be an even multiple of HEADS = {HEADS}")
    if GROUP_SIZE > EVAL_BEAMS:
        raise UserError(f"GROUP_SIZE = {GROUP_SIZE} is above EVAL_BEAMS = {EVAL_BEAMS}: raise EVAL_BEAMS")
    if PROMPT_TEMPLATE.count("{history}") != 1:
        raise UserError(f"PROMPT_TEMPLATE = {PROMPT_TEMPLATE!r} must contain {{history}} once")
    if VALUE_WEIGHT and VALUES_FILE is None:
        raise UserError("VALUE_WEIGHT needs a VALUES_FILE; without one set VALUE_WEIGHT=0 and another weight")
    if ACTOR_MODEL is None and (TITLE_HISTORY_ROWS or TITLE_ROWS or PROMPT_TEMPLATE != "{history}"):
        raise UserError("PROMPT_TEMPLATE, TITLE_HISTORY_ROWS and TITLE_ROWS need an ACTOR_MODEL of words")
    if ITEM_FILE is None and (TITLE_HISTORY_ROWS or TITLE_ROWS):
        raise UserError("TITLE_HISTORY_ROWS and TITLE_ROWS need an ITEM_FILE, which has the titles")


# ---------------------------------------------------------------- the model


def small_model(depth):
    """Returns a tokenizer that knows nothing but special tokens, and a Llama of random weights for items of
    `depth` codes."""
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    word_level = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_level, **special)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=4 * HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=depth * (MAX_HISTORY + 1) + 16,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.set_attn_implementation("shared_prompts")  # as load_model() does
    return tokenizer, model


def load_actor(checkpoint, catalogue, device):
    """Returns tokenizer and model, from a checkpoint's folder if there is one, with a token for each code."""
    path = ACTOR_MODEL
    if checkpoint and not LORA_RANK:  # an adapter's checkpoint has no base model
        path = checkpoint
    if path is None and STAGE == "rl":
        run_folder = checkpoint.parents[1] if checkpoint else Path(OUTPUT_DIR)
        path = run_folder / "sft/policy"
        if not path.exists():
            todo = "run STAGE=sft first, or set ACTOR_MODEL to that model"
            raise UserError(f"STAGE=rl starts from {path}, which is not there: {todo}")
    if path is None:
        tokenizer, model = small_model(len(catalogue.codes[0]))
        if GRADIENT_CHECKPOINTING:
            model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        tokenizer = load_tokenizer(path, "ACTOR_MODEL")
        for key in ("is_local", "local_files_only"):  # where it came from, which it would save
            tokenizer.init_kwargs.pop(key, None)
        model = load_trained(AutoModelForCausalLM, path, "ACTOR_MODEL", torch.device("cpu"), checkpoint)
        if hasattr(model.get_output_embeddings(), "get_delta_weight"):
            raise UserError(
                f"LORA_TARGETS = {LORA_TARGETS!r}: the output layer cannot be adapted: leave it out"
            )
    codes = sorted(set().union(*catalogue.codes))
    known = getattr(
        model.config, "catalogue", catalogue.digest
    )  # a model of another program has no catalogue
    if known != catalogue.digest and (STAGE in ("rl", "evaluate") or checkpoint):
        raise UserError(f"INDEX_FILE = {INDEX_FILE!r}: {path} has learnt the codes of another catalogue")
    model.config.update({"catalogue": catalogue.digest})  # saved in the policy's config.json
    new = sorted(set(codes).difference(tokenizer.get_vocab()))
    tokenizer.add_tokens(new)
    for code in codes:
        if tokenizer(code, add_special_tokens=False)["input_ids"] != [tokenizer.convert_tokens_to_ids(code)]:
            raise UserError(f"INDEX_FILE: the tokenizer splits the code {code!r}: take codes such as <a_7>")
    if new and (STAGE in ("rl", "evaluate") or checkpoint):
        lacks = f"{len(new)} of INDEX_FILE's codes are new to {path}, such as {new[0]}"
        raise UserError(f"{lacks}: run STAGE=sft first")
    if len(tokenizer) > vocab_size(model):
        model.resize_token_embeddings(len(tokenizer))  # on the CPU: a GPU would draw other new rows
    return tokenizer, model.to(device).eval()


# ---------------------------------------------------------------- item values and vectors


def read_array(path, constant, catalogue, square=False):
    """Returns an array by the catalogue's numbers, (items, width), or (items, items) if square. The file has
    a row, if square also a column, for each item of INDEX_FILE."""
    array = read_file(path, constant, np.load)
    size = len(catalogue.number)
    fits = array.dtype.kind in "fiu" and array.ndim == 2 and array.size and len(array) == size
    if not fits or (square and array.shape[1] != size) or not np.isfinite(array).all():
        each = "a row and a column" if square else "a row"
        takes = f"it takes finite numbers, {each} for each of {size} items of INDEX_FILE"
        raise UserError(f"{constant} = {path!r} has shape {array.shape}: {takes}")
    array = array[catalogue.rows].astype(np.float64)
    return array[:, catalogue.rows] if square else array


def item_vectors(catalogue):
    """Returns unit vectors of the items, (items, width), for the semantic reward. Without VECTORS_FILE they
    are TF-IDF of the words that stand in two titles or more."""
    if VECTORS_FILE:
        array = read_array(VECTORS_FILE, "VECTORS_FILE", catalogue)
    else:
        from sklearn.feature_extraction.text import TfidfVectorizer

        try:
            array = TfidfVectorizer(min_df=2).fit_transform(catalogue.titles).toarray()
        except ValueError:
            todo = "no word stands in two titles of ITEM_FILE: set VECTORS_FILE"
            raise UserError(f"SEMANTIC_WEIGHT = {SEMANTIC_WEIGHT}: {todo}") from None
    return torch.nn.functional.normalize(torch.tensor(array, dtype=torch.float32))


# ---------------------------------------------------------------- baselines


class Counts:
    """Counts how often items followed each other in rows, on each level of codes that paths (items, levels)
    has: the node of each item, the root first. A level with few counts is smoothed by the level above,

        P_0(i) = i's share of the targets
        P_l(i | j) = (n_l(j, i) + smoothing P_{l-1}(i | j)) / (n_l(j) + smoothing)

    n_l(j, i): how often an item of j's node came before one of i's, times i's share of its node's targets. A
    score is the sum over the history of decay ** (items further back) P(i | j)."""

    def __init__(self, rows, paths, smoothing=1.0, decay=0.0):
        self.smoothing = smoothing
        self.decay = decay
        last = torch.tensor([row["history"][-1] for row in rows])
        targets = torch.tensor(column(rows, "target"))
        popularity = targets.bincount(minlength=len(paths)).double()
        self.shares = popularity / len(rows)
        self.levels = []  # (node of each item, how often nodes followed each other, share within the node)
        for nodes in paths.T[1:]:
            size = int(nodes.max()) + 1
            pairs = torch.stack([nodes[last], nodes[targets]])
            ones = torch.ones(len(rows), dtype=torch.double)
            followed = torch.sparse_coo_tensor(pairs, ones, (size, size), check_invariants=True).coalesce()
            within = popularity / nodes.bincount(popularity).clamp(min=1)[nodes]
            self.levels.append((nodes, followed, within))

    def scores(self, histories):
        """Returns a score for each item, (histories, items), float64."""
        known = sorted(set().union(*histories))
        after = self.shares.expand(len(known), -1)  # P(. | j) of each j of known
        for nodes, followed, within in self.levels:
            counts = followed.index_select(0, nodes[known]).to_dense()  # (len(known), nodes)
            above = self.smoothing * after
            after = (counts[:, nodes] * within + above) / (counts.sum(1, keepdim=True) + self.smoothing)
        weights = torch.zeros(len(histories), len(self.shares)).double()
        for n, history in enumerate(histories):
            for back, item in enumerate(reversed(history)):
                weights[n, item] += self.decay**back  # 0 ** 0 is 1
        return weights[:, known] @ after


def best_counts(rows, paths, valid_rows):
    """Returns Counts on all levels with the smoothing and the decay of the best NDCG@10 on validation."""
    best_ndcg = -1.0
    for smoothing, decay in itertools.product(_SMOOTHING, _DECAYS):
        counts = Counts(rows, paths, smoothing, decay)
        ndcg = gains(top_items(counts, valid_rows), valid_rows, 10).mean()
        if ndcg > best_ndcg:
            best = counts
            best_ndcg = ndcg
    return best


class SASRec:
    """Scores items as the model that data/sasrec.py has trained (1808.09781): a score is the product of a
    history's vector, of users (histories, width), and an item's, of items (items, width)."""

    def __init__(self, histories, users, items):
        self.row_of = dict(zip(map(tuple, histories), range(len(histories))))
        self.users = users
        self.items = items

    def scores(self, histories):
        return self.users[[self.row_of[tuple(history)] for history in histories]] @ self.items.T


def read_sasrec(train_rows, scored_rows, log):
    """Returns SASREC_FILE's SASRec; None, with a warning, where it was not made of these rows."""
    if SASREC_FILE is None:
        return None
    fault = "there is no such file"
    if Path(SASREC_FILE).exists():
        fault = "it was made of other rows"
        arrays = read_file(SASREC_FILE, "SASREC_FILE", np.load)
        if not {"users", "items", "histories", "trained_on"} <= set(getattr(arrays, "files", ())):
            raise UserError(f"SASREC_FILE = {SASREC_FILE!r} is not a file that data/sasrec.py has made")
        histories = [row[row >= 0].tolist() for row in arrays["histories"]]  # without the padding, -1
        model = SASRec(histories, torch.from_numpy(arrays["users"]), torch.from_numpy(arrays["items"]))
        is_known = model.row_of.keys() >= set(map(tuple, column(scored_rows, "history")))
        if is_known and (STAGE == "evaluate" or str(arrays["trained_on"]) == rows_digest(train_rows)):
            return model
    log(
        f"SASREC_FILE = {SASREC_FILE!r}: {fault}: no SASRec beside the policy (data/sasrec.py makes the file)"
    )
    return None


def rows_digest(rows):
    pairs = list(zip(column(rows, "history"), column(rows, "target")))
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def top_items(model, rows):
    """Returns the best items of each row by a baseline's scores, (rows, EVAL_BEAMS); -1: no more items."""
    chunks = []
    histories = column(rows, "history")
    for begin in range(0, len(rows), 512):
        scores = model.scores(histories[begin : begin + 512])
        chunks.append(scores.sort(dim=1, descending=True, stable=True).indices[:, :EVAL_BEAMS])
    lists = torch.cat(chunks)
    return torch.nn.functional.pad(lists, (0, EVAL_BEAMS - lists.shape[1]), value=-1)


# ---------------------------------------------------------------- metrics, figures and pictures


def sample_record(batch, i, catalogue):
    """Returns candidate i for samples.jsonl."""
    row = batch.rows[i]
    item = int(batch.items[i])
    record = {
        "id": row["id"],
        "history": catalogue.names(row["history"]),
        "item": catalogue.items[item],
        "title": catalogue.titles[item],
        "target": catalogue.items[row["target"]],
        "logprob": batch.logprobs[i].sum().item(),
        "reward": batch.scores[i].item(),
    }
    for name, values in batch.reward_parts.items():
        record[f"reward/{name}"] = values[i].item()
    return {**record, "advantage": batch.advantages[i].item()}


def gains(lists, rows, k):
    """Returns NDCG of one target, (rows,): 1 / log2(rank + 1) where it is among the first k, rank from 1."""
    targets = torch.tensor(column(rows, "target"))
    discounts = 1 / torch.log2(torch.arange(min(k, lists.shape[1])) + 2.0)
    return ((lists[:, :k] == targets[:, None]) * discounts).sum(1)


def hits(lists, rows, k):
    """Returns 1 where the target is among the first k, else 0, (rows,)."""
    return (gains(lists, rows, k) > 0).float()


def list_metrics(lists, rows, popularity):
    """Returns HR and NDCG at _KS of the best items (rows, EVAL_BEAMS) of rows; coverage@10, the share of the
    catalogue in any list; popularity@10, the mean share of items that are less popular."""
    metrics = {}
    for k in _KS:
        metrics[f"hr@{k}"] = hits(lists, rows, k).mean().item()
        metrics[f"ndcg@{k}"] = gains(lists, rows, k).mean().item()
    top = lists[:, :10]
    top = top[top >= 0]
    less_popular = torch.searchsorted(popularity.sort().values, popularity).float() / len(popularity)
    metrics["coverage@10"] = len(top.unique()) / len(popularity)
    metrics["popularity@10"] = less_popular[top].mean().item()
    return metrics


def best_value(values, rows, count):
    """Returns the highest mean value that a list of `count` distinct items can have, averaged over rows."""
    total = 0.0
    for history in column(rows, "history"):
        worth = [history_value(values, history, item, VALUE_DECAY) for item in range(len(values))]
        total += np.sort(worth)[-count:].mean()
    return total / len(rows)


# differs: the figures of this trainer
def table_lines(figures):
    """Lines for the terminal: each policy on the test rows, the gain over SFT, what is possible."""
    keys = ["hr@1", "hr@10", "ndcg@10", "hr@20", "reward", "coverage@10", "popularity@10"]
    lines = ["Test rows:" + " " * 6 + "".join(f"{key:>15}" for key in [*keys, "of best value"])]
    possible = figures.get("possible")
    for name, figure in figures.items():
        if "intervals" in figure:
            fraction = ""
            has_value = "reward/value" in figure  # a compute_rewards() of the user's may have other parts
            if has_value and possible and possible["value"] > 0:
                fraction = f"{figure['reward/value'] / possible['value']:>15.1%}"
            lines.append(f"  {name:14}" + "".join(f"{figure[key]:>15.4f}" for key in keys) + fraction)
    gains_over_sft = figures.get("grpo_minus_sft", {})
    if gains_over_sft and not any(
        gained["mean"] or any(gained["interval"]) for gained in gains_over_sft.values()
    ):
        lines.append(
            "  GRPO equals SFT on every row: where no step of GRPO was better on validation, best/ is SFT's"
        )
        return lines
    for key, gained in gains_over_sft.items():
        interval = "95% interval {:+.4f} to {:+.4f}".format(*gained["interval"])
        lines.append(f"  GRPO minus SFT, {key}: {gained['mean']:+.4f} ({interval})")
    return lines


# differs: the figures of this trainer
def draw_learning(records, folder, title, levels, figures):
    """rec_learning.png, from the logs: HR, NDCG and reward over the steps of both stages, with the baselines'
    on validation as dashed lines; below them the test rows' as bars with 95% intervals."""
    figure = Figure(figsize=(9.5, 6.6), layout="constrained")
    figure.suptitle(title)
    trained = [record for record in records if record["phase"] == "train"]
    begin = next((record["step"] - 1 for record in trained if "reward" in record), None)
    tested = [name for name in figures if "intervals" in figures[name]]
    for (curve, bars), key in zip(figure.subplots(2, 3).T, ("hr@10", "ndcg@10", "reward")):
        for color, phase in (("C0", "train"), ("C1", "eval")):
            plot_metric(curve, records, phase, key, color, key)
        for number, (name, level) in enumerate(levels.items()):
            dashes = (2 * number, (2, 2 * len(levels) - 2))  # equal levels alternate
            curve.axhline(level[key], linestyle=dashes, color=f"C{number + 2}", label=name)
        if begin:
            curve.axvline(begin, color="grey", linewidth=0.8, label="SFT ends, GRPO begins")
        curve.set(xlabel="training step", ylabel=key)
        means = np.array([figures[name][key] for name in tested])
        low, high = np.array([figures[name]["intervals"][key] for name in tested]).T
        bars.barh(tested, means, 0.6, xerr=np.maximum([means - low, high - means], 0), capsize=3)
        bars.invert_yaxis()
        bars.set(xlabel=f"{key} on the test rows")
        for axis in (curve, bars):
            axis.grid(alpha=0.3)
    lines = line_styles(curve, {"train": "training rows", "eval": "validation rows"})
    lines += [line for line in curve.lines if line.get_label() in ("SFT ends, GRPO begins", *levels)]
    figure.legend(handles=lines, loc="outside lower center", ncols=3, fontsize=9)
    write_atomically(folder / "rec_learning.png", partial(figure.savefig, format="png", dpi=120))


def train_main():
    run_main(RecTrainer)


if __name__ == "__main__":
    train_main()
