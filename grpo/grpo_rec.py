"""GRPO for generative recommendation, in one file: a language model whose tokens are the codes of items.

A history of items is a prompt of their codes, <a_7><b_120><c_3>, the next item is the response. Decoding
walks a trie of the catalogue: softmax runs over the codes that some item goes on with, so the policy can say
nothing but items,

    pi(item | history) = prod_t pi(c_t | history, c_<t),    pi(c | prefix) = softmax over the trie's children

and every log-probability below, sampled or trained, is of this constrained distribution. Two stages:

    SFT    L = -mean_t log pi(c_t of the logged next item)               best validation NDCG@10 goes on
    GRPO   GROUP_SIZE candidates of a history, of scores s_i, are each other's baseline (2402.03300):
           A_i = (s_i - mean of its group) / (std + 1e-4),   rho_t = pi(c_t) / pi_old(c_t)
           clip_t = clip(rho_t, 1 - CLIP_RANGE, 1 + CLIP_RANGE_HIGH)
           L   = -mean_t min(rho_t A_i, clip_t A_i) + KL_COEF kl_t

LOSS_TYPE "gspo" has rho = exp(mean_t log rho_t) of the whole item (2507.18071); "dapo" and "grpo" are one,
since all responses are as long. kl_t has k3's value against the best SFT policy and k2's gradient, that of
KL(pi || pi_ref). What the gradient estimates depends on CANDIDATES:
- "sample": that of the expected reward of a sample, as in GRPO;
- "beam", the default: no samples, the GROUP_SIZE likeliest items: sum_i A_i grad log pi(i) ranks the list,
  better items up and worse ones down, whatever their probability. It knows nothing of items beyond the list,
  and the KL term is no KL: it pulls the log-probabilities of the listed items to the reference's.
Samples raise what a *sample* earns, and with it the few likeliest items; beams raise what a *list* earns,
which is what is shown to a user (docs/grpo_rec.md has both).

    python grpo/grpo_rec.py                          # edit the constants below, or override: KEY=VALUE
    python grpo/grpo_rec.py STAGE=sft, then STAGE=rl
    python grpo/grpo_rec.py TRAIN_FILE=train.csv VALID_FILE=None TEST_FILE=test.csv INDEX_FILE=index.json \\
        ITEM_FILE=info.txt VALUES_FILE=None VALUE_WEIGHT=0 RULE_WEIGHT=1

Writes into OUTPUT_DIR: training_config.json, logs/ (training_*.log, metrics.jsonl, samples.jsonl), step_N/
checkpoints, sft/policy/ (the best of SFT), best/policy/, eval_test.json, rec_learning.png,
training_metrics_detailed.png and grpo_rec_metrics_with_entropy.png. docs/grpo_rec.md defines every metric.

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
from collections import Counter, defaultdict
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
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
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

STAGE = "all"  # all | sft | rl: rl goes on from SFT's best, or from ACTOR_MODEL

# Models: a folder or a hub name, whose tokenizer gains the codes; None: a small Llama that knows codes alone
ACTOR_MODEL: str | None = None
HIDDEN_SIZE = 64  # of the small Llama
LAYERS = 2
HEADS = 4
LORA_RANK = 0  # 0: whole models are trained; else, in STAGE=rl, an adapter of this rank (2106.09685)
LORA_ALPHA = 32.0  # an adapter's product counts LORA_ALPHA / LORA_RANK
LORA_TARGETS = "all-linear"  # which layers get one: all-linear (but the heads), or names: q_proj,v_proj
DTYPE = "float32"  # float32 | bfloat16 (autocast; weights and optimizer state stay float32)
DEVICE = "auto"  # auto | cpu | cuda | cuda:1 | mps
GRADIENT_CHECKPOINTING = False  # recompute activations in the update: less memory, a third more time

# Data: csv files of a history and the next item
TRAIN_FILE = f"{ROOT}/data/rec/train.csv"
VALID_FILE: str | None = f"{ROOT}/data/rec/valid.csv"  # None: VALID_FRACTION of TRAIN_FILE's users
TEST_FILE: str | None = f"{ROOT}/data/rec/test.csv"  # seen once, at the end
VALID_FRACTION = 0.1
USER_COLUMN = "user_id"
HISTORY_COLUMN = "history_item_id"  # such as "[3, 17, 204]", the oldest first
TARGET_COLUMN = "item_id"
INDEX_FILE = f"{ROOT}/data/rec/index.json"  # {item: its codes}
ITEM_FILE: str | None = f"{ROOT}/data/rec/items.txt"  # lines of codes, title, item, tab between
TRAIN_PREFIXES = True  # a history's own items are targets too, of what stands before them
MAX_HISTORY = 10  # items; longer histories are cut from the left, and counted
MAX_TRAIN_ROWS: int | None = None  # only the first so many of the file; None: all
MAX_EVAL_ROWS: int | None = 300  # of validation
PROMPT_TEMPLATE = "{history}"  # the tokenizer's chat template, if any, goes around it
TITLE_HISTORY_ROWS = 0.0  # share of the rows also asked with titles in place of codes (a model of words)
TITLE_ROWS = 0.0  # SFT: share of the items whose title alone asks for them (a model of words)

# Rewards: the score is the sum of weight * part
VALUE_WEIGHT = 1.0  # what the user values by VALUES_FILE, 0 to 1
RULE_WEIGHT = 1.0  # 1 for the logged target
RANKING_WEIGHT = 0.0  # 1 for it; where it is in the group, the others cost the more the higher they stand
SEMANTIC_WEIGHT = 0.0  # cosine of the item's vector with the target's
COLLABORATIVE_WEIGHT = 0.0  # score by SASREC_FILE, 0 to 1 within the group
REWARD_FUNCTIONS = []  # yours of histories, items, targets: (function, or name in rewards/; weight)
VALUES_FILE: str | None = f"{ROOT}/data/rec/values.npy"  # (items, items): the second's worth after the first
VALUE_DECAY = 0.5  # weight of an item of the history relative to the next one
VECTORS_FILE: str | None = None  # (items, width) for the semantic reward; None: TF-IDF of the titles
SASREC_FILE: str | None = f"{ROOT}/data/rec/sasrec.npz"  # data/sasrec.py makes it; a baseline too
REWARD_TIMEOUT: float | None = 600.0  # seconds that scoring one batch may take; None: any

# SFT
SFT_EPOCHS = 20
SFT_BATCH_SIZE = 64  # histories an optimizer step
SFT_LEARNING_RATE = 3e-3
SFT_PATIENCE = 3  # evaluations without a better NDCG@10 before SFT ends; 0: never

# Rollout
CANDIDATES = "beam"  # beam | sample
BATCH_SIZE = 32  # histories in memory at a time, with GROUP_SIZE candidates each
GRADIENT_ACCUMULATION_STEPS = 1  # batches a training step: BATCH_SIZE * this = histories a step
GROUP_SIZE = 16  # candidates a history; >= 2, since they are each other's baseline
TEMPERATURE = 1.0  # > 0; of the distribution that is sampled and scored

# Optimisation of GRPO (MAX_GRAD_NORM, WEIGHT_DECAY and WARMUP_STEPS: of SFT too)
LEARNING_RATE = 5e-4
MAX_GRAD_NORM = 1.0  # > 0
WEIGHT_DECAY = 0.0
USE_LR_SCHEDULER = False
LR_SCHEDULER_TYPE = "linear"  # linear | cosine (to 0 after the last step) | plateau (halves)
PLATEAU_PATIENCE = 2  # evaluations without a better reward (SFT: NDCG@10) before plateau halves
WARMUP_STEPS = 0

# Algorithm
LOSS_TYPE = "dapo"  # dapo | gspo
GROUP_EPOCHS = 1  # passes over each step's candidates
MINI_BATCHES = 1  # optimizer steps a pass
SCALE_REWARDS = "group"  # group | batch | none: the standard deviation that advantages are divided by
CLIP_RANGE = 0.2  # > 0; gspo wants about 3e-4
CLIP_RANGE_HIGH = 0.2  # > 0; DAPO's clip-higher: 0.28
ENTROPY_COEF = 0.0
KL_COEF = 4.0  # weight of the KL in the loss
REFERENCE_SYNC_STEPS = 0  # every so many the reference moves towards the actor (2404.09656); 0: never
REFERENCE_SYNC_ALPHA = 0.6  # reference = ALPHA * actor + (1 - ALPHA) * reference; 0 to 1
MAX_STEPS = 150  # of GRPO

# Evaluation
EVAL_BEAMS = 50

# Bookkeeping
SAVE_EVERY_N_STEPS = 100  # 0: only at the end
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 50  # 0: only before and after each stage
EARLY_STOPPING_PATIENCE = 0  # evaluations without a better reward (SFT: NDCG@10) that end a stage; 0: never
EARLY_STOPPING_THRESHOLD = 0.0  # by how much better is better for patience; best/ follows the highest
LOG_SAMPLES = 4  # candidates a step written to samples.jsonl
RESUME = "ask"  # ask | yes | no | a checkpoint's path
OUTPUT_DIR = f"{ROOT}/checkpoints/grpo_rec"
SEED = 1
USE_WANDB = False
WANDB_PROJECT = "hackable-rlhf"

# Processes: torchrun --nproc_per_node=2 grpo/grpo_rec.py
EXACT_SUMS = True  # of gradients, in one order: the same bits on any number of processes; False: faster
PROCESS_TIMEOUT = 1800.0  # seconds that one process waits for another

_LIMITS = {  # least and greatest value of each number, or the words that a constant takes
    "HIDDEN_SIZE LAYERS HEADS MAX_HISTORY MAX_TRAIN_ROWS MAX_EVAL_ROWS SFT_EPOCHS SFT_BATCH_SIZE": (1, 1e12),
    "BATCH_SIZE GRADIENT_ACCUMULATION_STEPS GROUP_EPOCHS MINI_BATCHES MAX_STEPS": (1, 1e12),
    "PLATEAU_PATIENCE KEEP_LAST_N_CHECKPOINTS": (1, 1e12),
    "GROUP_SIZE": (2, 1e12),
    "EVAL_BEAMS": (20, 1e12),
    "WARMUP_STEPS SAVE_EVERY_N_STEPS EVAL_EVERY_N_STEPS EARLY_STOPPING_PATIENCE LOG_SAMPLES SEED": (0, 2**62),
    "SFT_PATIENCE REFERENCE_SYNC_STEPS LORA_RANK": (0, 2**62),
    "LEARNING_RATE SFT_LEARNING_RATE WEIGHT_DECAY KL_COEF EARLY_STOPPING_THRESHOLD": (0, 1e6),
    "REFERENCE_SYNC_ALPHA TITLE_HISTORY_ROWS TITLE_ROWS VALUE_DECAY": (0, 1),
    "VALID_FRACTION": (1e-6, 0.9),
    "CLIP_RANGE CLIP_RANGE_HIGH LORA_ALPHA MAX_GRAD_NORM REWARD_TIMEOUT PROCESS_TIMEOUT": (1e-12, 1e12),
    "TEMPERATURE": (1e-3, 1e3),
    "STAGE": ["all", "sft", "rl"],
    "DTYPE": ["float32", "bfloat16"],
    "CANDIDATES": ["beam", "sample"],
    "LR_SCHEDULER_TYPE": ["linear", "cosine", "plateau"],
    "LOSS_TYPE": ["dapo", "gspo"],
    "SCALE_REWARDS": ["group", "batch", "none"],
}
_KS = (1, 3, 5, 10, 20)  # of HR@K and NDCG@K
_SMOOTHING = (1, 3, 10, 30, 100, 300)  # of the counts that back off: the best pair on validation is taken
_DECAYS = (0, 0.1, 0.2, 0.4, 0.6, 0.8)

# ================================================================ the maths of GRPO over items


def sampling_logprobs(logits, temperature):
    """Log-probabilities (..., vocabulary) of the distribution that is sampled *and* trained: change it here
    (top-p, say), and the first ratios stay 1. A token that must not come gets -inf."""
    return full_logprobs(logits, temperature)


def constrained_logprobs(logits, codes, open_, temperature):
    """Log-probabilities of the codes that may come next, (..., width), float32, -inf where not open. This
    distribution is sampled *and* scored, everywhere. logits (..., all codes), codes, open_ (..., width)."""
    scores = logits.float().gather(-1, codes) / temperature
    logprobs = scores.masked_fill(~open_, -math.inf).log_softmax(-1)
    return logprobs.masked_fill(~open_, -math.inf)  # also where nothing is open: no NaN


def group_advantages(scores, group_size, scale):
    """Advantage of each candidate, (rows,); rows of a group are neighbours. Equal scores get zeros."""
    groups = scores.view(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if scale != "none":
        std = groups.std(1, keepdim=True) if scale == "group" else scores.std()
        advantages = advantages / (std + 1e-4)
    return torch.where(groups.amax(1, keepdim=True) > groups.amin(1, keepdim=True), advantages, 0.0).flatten()


def policy_loss(logprobs, old_logprobs, advantages, loss_type, clip_range, clip_range_high):
    """Loss of each token and the ratio it saw, (rows, codes); advantages (rows, 1)."""
    log_ratio = logprobs - old_logprobs
    if loss_type == "gspo":
        log_ratio = log_ratio.mean(1, keepdim=True).expand_as(logprobs)
    ratio = log_ratio.exp()
    objective = torch.min(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range_high) * advantages)
    return -objective, ratio


def kl_loss(logprobs, ref_logprobs):
    """k3's value with k2's gradient, (rows, codes): in the mean that of KL(pi || pi_ref) on policy."""
    log_ratio = logprobs - ref_logprobs
    k2 = 0.5 * log_ratio**2
    k3 = (-log_ratio).exp() - 1 + log_ratio
    return k2 + (k3 - k2).detach()


# ================================================================ the trainer


class RecTrainer:
    """Catalogue, model, data and the algorithm; self.run has the files. resume_from_checkpoint overrides the
    constant RESUME: a path, "ask", "yes" or "no"."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        check_sizes()
        self.device = find_device()
        made = () if STAGE == "rl" else ("sft",)  # what rl starts from, it does not move aside
        files = (*made, "rec_learning.png", "eval_test.json")
        # An evaluation has a reward in the stage of GRPO alone
        self.run = Run("grpo_rec", resume_from_checkpoint, self.device, files, ("reward", "ndcg@10"))
        self.run.title = f"GRPO for recommendation, {Path(TRAIN_FILE).parent.name}, seed {SEED}"
        # Drawn in grpo_rec_metrics_with_entropy.png, (label, metrics); training_metrics_detailed.png has all
        names = "ndcg@10 hr@10 reward reward_sampled entropy policy_loss grad_norm kl clip_fraction"
        self.run.panels = [(name, [name]) for name in [*names.split(), "coverage@10"]]
        self.catalogue = Catalogue(self.run.say)
        self.load_models()
        self.train_rows, self.valid_rows, self.test_rows = load_splits(self.catalogue, self.run.say)
        for row in [*self.train_rows, *self.valid_rows, *self.test_rows]:
            row["ids"] = self.prompter.ids(row["history"])
        self.sft_rows, self.rl_rows = self.prompter.rows_of_stages(self.train_rows, self.run.say)
        check_models({"ACTOR_MODEL": self.actor}, self.train_rows, self.pad_id)
        check_head(self.actor, self.trie, self.train_rows[0]["ids"])
        self.reference.shares_prompts = self.actor.shares_prompts
        targets = torch.tensor([row["target"] for row in self.train_rows])
        self.popularity = targets.bincount(minlength=len(self.catalogue.items))  # how often each is a target
        self.load_rewards()
        # What a checkpoint keeps beside weights, optimizers and generators; order is this epoch's
        # permutation, begin the step at which the stage began
        self.state = SimpleNamespace(
            epoch=0,
            order=None,
            cursor=0,
            prompts=len(self.train_rows),
            begin=0,
            stage="rl" if STAGE == "rl" else "sft",
            sft_best=-1.0,
            sft_waited=0,
        )
        self.best = None, None  # for recommend(): its value and the model
        self.run.register(self.state, self.models, self.optimizers, self.tokenizer)
        if STAGE == "sft" and self.state.stage == "rl":
            raise UserError(f"{self.run.checkpoint} is in its second stage: STAGE=rl or all goes on with it")
        self.plan_steps()

    def load_models(self):
        """Actor and reference come from the checkpoint when there is one. The reference is the best policy of
        SFT so far; in GRPO it is what KL_COEF holds the actor to."""
        at = self.run.checkpoint
        self.tokenizer, self.actor = load_actor(at / "policy" if at else None, self.catalogue, self.device)
        self.pad_id = padding_id(self.actor, self.tokenizer)
        self.prompter = Prompter(self.tokenizer, self.catalogue, self.actor)
        self.trie = Trie(self.prompter.codes, self.device)
        self.models = {"policy": self.actor}  # saved, by its folder's name
        self.reference = self.actor  # with LORA_RANK: its adapter switched off
        if not LORA_RANK:
            self.reference = copy.deepcopy(self.actor)
            if at:
                self.reference = load_model(AutoModelForCausalLM, at / "reference", "RESUME", self.device)
            self.reference.requires_grad_(False)
            self.models["reference"] = self.reference
        rate = LEARNING_RATE if STAGE == "rl" else SFT_LEARNING_RATE
        self.optimizers = {"policy": make_optimizer(self.actor, rate)}

    def load_rewards(self):
        """What compute_rewards() needs: values, vectors, functions."""
        self.values = None
        if VALUE_WEIGHT:
            self.values = read_array(VALUES_FILE, "VALUES_FILE", self.catalogue, square=True)
        self.vectors = item_vectors(self.catalogue) if SEMANTIC_WEIGHT else None
        asked = [*self.valid_rows, *self.test_rows, *(self.train_rows if COLLABORATIVE_WEIGHT else ())]
        self.sasrec = read_sasrec(self.train_rows, asked, self.run.say)
        if COLLABORATIVE_WEIGHT and not self.sasrec:
            raise UserError("COLLABORATIVE_WEIGHT needs a SASREC_FILE of these rows: data/sasrec.py makes it")
        weights = (VALUE_WEIGHT, RULE_WEIGHT, RANKING_WEIGHT, SEMANTIC_WEIGHT, COLLABORATIVE_WEIGHT)
        if not any(weights) and not REWARD_FUNCTIONS:
            raise UserError("every reward weight is 0 and REWARD_FUNCTIONS is empty: give at least one")
        self.rewards = resolve_rewards(REWARD_FUNCTIONS, "REWARD_FUNCTIONS")

    # ------------------------------------------------------------ the algorithm

    def train(self):
        """Fine-tune, then GRPO from the best of that, then the test rows. Returns the last evaluation."""
        with self.run.session(self.headline()):
            self.prepare_baselines()
            if self.state.stage == "sft":
                self.fine_tune()
            if self.state.stage == "rl":
                for _ in self.run.steps(self.evaluate):
                    batch = self.rollout()
                    self.score(batch)
                    self.compute_advantages(batch)
                    metrics = self.update(batch)
                    self.sync_reference()
                    self.record(batch, metrics)
            if not self.run.stop_signal:
                self.test()
        return self.run.evaluation

    def fine_tune(self):
        """SFT on the logged items; then its best policy is the actor and the reference of GRPO."""
        for _ in self.run.steps(self.evaluate_sft, until=self.end):
            if 0 < SFT_PATIENCE <= self.state.sft_waited:
                break
            rows = next_rows(self.sft_rows, self.state, SFT_BATCH_SIZE)
            self.record_sft(self.sft_update(rows))
        if self.run.stop_signal:
            return
        self.run.say(f"SFT ends at step {self.run.step}; best NDCG@10 {self.state.sft_best:.4f}")
        self.actor.load_state_dict(self.reference.state_dict())
        folder = self.run.folder / "sft"
        if rank() == 0:
            write_whole(folder, lambda at: self.run.save_model(self.actor, at / "policy"))
        if STAGE == "sft":
            self.run.last_word = f"SFT is done: {folder}/policy; STAGE=rl goes on from it"
            return
        self.state.stage = "rl"
        self.state.begin = self.run.step
        self.state.epoch = self.state.cursor = 0
        self.optimizers["policy"] = make_optimizer(self.actor, LEARNING_RATE)
        self.run.begin_part()
        self.plan_steps()

    def plan_steps(self):
        """The step at which the stage ends if nothing ends it before, and the run's last one."""
        steps = MAX_STEPS
        more = 0
        if self.state.stage == "sft":
            steps = SFT_EPOCHS * math.ceil(len(self.sft_rows) / SFT_BATCH_SIZE)
            more = 0 if STAGE == "sft" else MAX_STEPS
        self.end = self.state.begin + steps
        self.run.total_steps = self.end + more

    def learning_rate(self, base):
        """Set and return this step's learning rate."""
        kind = LR_SCHEDULER_TYPE if USE_LR_SCHEDULER else None
        step = self.run.step - self.state.begin
        total = self.end - self.state.begin
        rate = base * learning_rate_scale(step, total, WARMUP_STEPS, kind, self.run.halvings)
        set_rates(self.optimizers["policy"], rate)
        return rate

    def sft_update(self, rows):
        """One optimizer step on the items that were logged; returns its metrics."""
        rate = self.learning_rate(SFT_LEARNING_RATE)
        metrics = {}  # of the whole step; share is a micro-batch's
        with self.run.timed("update"):
            batch = sft_batch(rows, self.trie, self.device)
            weights = batch.learn / batch.learn.sum()
            for micro, share in summed([self.actor], micro_batches(self.actor, batch), metrics):
                logprobs, entropy = item_logprobs(self.actor, self.trie, batch, micro, TEMPERATURE)
                weight = weights[micro, : logprobs.shape[1]]
                loss = -(weight * logprobs).sum()
                backward(self.actor, loss)
                share["policy_loss"] = loss.item()
                share["entropy"] = (weight * entropy.detach()).sum().item()
            ids = [row["id"] for row in rows]
            norms = clip_and_step(self.optimizers.values(), metrics["policy_loss"], self.run, ids)
        self.tokens = int(batch.learn.sum())
        return {**metrics, "grad_norm": norms[0], "learning_rate": rate}

    def rollout(self):
        """GROUP_SIZE candidates for each of a step's histories, likelier ones first: a batch, its tensors
        (histories * GROUP_SIZE, ...)."""
        with self.run.timed("rollout"):
            rows = next_rows(self.rl_rows, self.state, BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS)
            uniform = None
            if CANDIDATES == "sample":  # drawn at once: BATCH_SIZE does not matter to it
                uniform = torch.rand(self.trie.depth, len(rows), GROUP_SIZE)
            return candidates(self.actor, self.trie, rows, GROUP_SIZE, self.pad_id, uniform)

    @torch.no_grad()
    def score(self, batch):
        """Scores of the candidates and the reference's log-probabilities of their codes."""
        with self.run.timed("score"):
            batch.scores, batch.parts = self.rewards_of(batch.rows, batch.items)
            batch.ref_logprobs = batch.logprobs
            if KL_COEF > 0:

                def score(rows):
                    return item_logprobs(self.reference, self.trie, batch, rows, TEMPERATURE)[0]

                with without_adapter(self.reference) if LORA_RANK else nullcontext():
                    batch.ref_logprobs = score_batch(score, self.reference, batch)

    def rewards_of(self, rows, items):
        """compute_rewards(), checked, and the parts it left behind; items (rows,), groups are neighbours."""
        names = self.catalogue.items
        asked = [
            {"prompt": [names[i] for i in row["history"]], "answer": names[row["target"]], "columns": {}}
            for row in rows
        ]
        batch = SimpleNamespace(rows=asked, responses=[names[i] for i in items.tolist()], columns={})
        scores, parts = dealt_rewards(self, "compute_rewards", self.compute_rewards, batch)
        return scores.to(self.device), parts

    def compute_rewards(self, histories, items, targets):
        """Score of each item, (rows,); edit or override freely. The candidates of a history are neighbours,
        GROUP_SIZE of them, likelier ones first. self.reward_parts is what is logged."""
        parts = {
            "value": (VALUE_WEIGHT, self.value_reward),
            "rule": (RULE_WEIGHT, rewards.rule_reward),
            "ranking": (RANKING_WEIGHT, self.ranking_reward),
            "semantic": (SEMANTIC_WEIGHT, self.semantic_reward),
            "collaborative": (COLLABORATIVE_WEIGHT, self.collaborative_reward),
        }
        for name, function, weight in self.rewards:
            parts[name] = (weight, function)
        total = torch.zeros(len(items))
        for name, (weight, function) in parts.items():
            if weight:
                self.reward_parts[name] = call_reward(name, function, histories, items, targets)
                total += weight * self.reward_parts[name]
        return total

    def value_reward(self, histories, items, targets):
        pairs = zip(map(self.numbers, histories), self.numbers(items))
        return [rewards.history_value(self.values, history, item, VALUE_DECAY) for history, item in pairs]

    def ranking_reward(self, histories, items, targets):
        hit = rewards.rule_reward(histories, items, targets)
        groups = [rewards.ranking_reward(hit[n : n + GROUP_SIZE]) for n in range(0, len(hit), GROUP_SIZE)]
        return [score for group in groups for score in group]

    def semantic_reward(self, histories, items, targets):
        return (self.vectors[self.numbers(items)] * self.vectors[self.numbers(targets)]).sum(1).tolist()

    def collaborative_reward(self, histories, items, targets):
        chosen = torch.tensor(self.numbers(items)).view(-1, GROUP_SIZE)
        scores = self.sasrec.scores([self.numbers(history) for history in histories[::GROUP_SIZE]])
        return [score for group in scores.gather(1, chosen).tolist() for score in rewards.min_max(group)]

    def numbers(self, items):
        return [self.catalogue.number[item] for item in items]

    def compute_advantages(self, batch):
        """Compare each candidate with its group."""
        batch.advantages = group_advantages(batch.scores, GROUP_SIZE, SCALE_REWARDS)

    def update(self, batch):
        """GROUP_EPOCHS passes of MINI_BATCHES optimizer steps over the batch; returns the step's metrics."""
        rate = self.learning_rate(LEARNING_RATE)
        steps = []
        with self.run.timed("update"):
            for _ in range(GROUP_EPOCHS):
                rows = (torch.randperm if MINI_BATCHES > 1 else torch.arange)(len(batch.rows))
                for chunk in rows.chunk(MINI_BATCHES):
                    steps.append(self.optimizer_step(batch, upload(chunk.tolist(), self.device)))
            check_first_ratio(steps, self.run.step - self.state.begin)
        metrics = {key: sum(step[key] for step in steps) / len(steps) for key in steps[0]}
        metrics["ratio_max"] = max(step["ratio_max"] for step in steps)
        return {**metrics, "ratio_max_first": steps[0]["ratio_max"], "learning_rate": rate}

    def optimizer_step(self, batch, chunk):
        """One optimizer step on `chunk`, in micro-batches whose gradients add up to that of the whole."""
        metrics = {}  # of the whole step; share is a micro-batch's
        tokens = batch.response_mask[chunk].sum()
        micros = micro_batches(self.actor, batch, chunk)
        for rows, share in summed([self.actor], micros, metrics):
            logprobs, entropy = item_logprobs(self.actor, self.trie, batch, rows, TEMPERATURE)
            losses, policy_losses, ratio, kl = self.token_losses(batch, rows, logprobs, entropy)
            backward(self.actor, losses.sum() / tokens)  # the whole step's tokens, not the micro-batch's
            share["policy_loss"] = policy_losses.sum() / tokens
            share["log_ratio"] = (logprobs - batch.logprobs[rows]).abs().sum() / tokens
            ratio = ratio.detach()
            advantages = batch.advantages[rows, None]
            clipped = torch.where(advantages > 0, ratio > 1 + CLIP_RANGE_HIGH, ratio < 1 - CLIP_RANGE)
            clipped = (clipped & (advantages != 0)).float()
            approx_kl = ratio - 1 - ratio.log()
            means = {"entropy": entropy, "kl": kl, "clip_fraction": clipped, "approx_kl": approx_kl}
            for key, values in means.items():
                share[key] = values.sum() / tokens
            share["ratio_max"] = (ratio - 1).abs().max()
        ids = [batch.rows[i]["id"] for i in listed(chunk)]
        (metrics["grad_norm"],) = clip_and_step(
            self.optimizers.values(), metrics["policy_loss"], self.run, ids
        )
        return metrics

    def token_losses(self, batch, rows, logprobs, entropy):
        """Loss of each token, the policy's part of it, the ratio and the KL: each (rows, codes). Edit or
        override freely."""
        policy_losses, ratio = policy_loss(
            logprobs,
            batch.logprobs[rows],
            batch.advantages[rows, None],
            LOSS_TYPE,
            CLIP_RANGE,
            CLIP_RANGE_HIGH,
        )
        kl = kl_loss(logprobs, batch.ref_logprobs[rows])
        return policy_losses + KL_COEF * kl - ENTROPY_COEF * entropy, policy_losses, ratio, kl

    @torch.no_grad()
    def sync_reference(self):
        """Move the reference towards the actor every REFERENCE_SYNC_STEPS steps."""
        done = self.run.step + 1 - self.state.begin
        if REFERENCE_SYNC_STEPS and done % REFERENCE_SYNC_STEPS == 0:
            for ref, parameter in zip(self.reference.parameters(), self.actor.parameters()):
                ref.lerp_(parameter, REFERENCE_SYNC_ALPHA)

    # ------------------------------------------------------------ evaluation and what is logged

    def evaluate(self, rows=None):
        """Metrics of the EVAL_BEAMS best items for each row (default: validation). In the stage of GRPO also
        reward, of the GROUP_SIZE best as if they were a group, and reward_sampled, of samples that have their
        own random stream. Override to add yours."""
        rows = self.valid_rows if rows is None else rows
        lists = best_items(self.actor, self.trie, rows, EVAL_BEAMS, self.pad_id)
        if self.state.stage == "sft":
            return list_metrics(lists, rows, self.popularity)
        metrics, _ = self.list_figures(lists, rows)
        generator = torch.Generator().manual_seed(SEED + 1)
        uniform = torch.rand(self.trie.depth, len(rows), GROUP_SIZE, generator=generator)
        batch = candidates(self.actor, self.trie, rows, GROUP_SIZE, self.pad_id, uniform)
        metrics["reward_sampled"] = self.rewards_of(batch.rows, batch.items)[0].mean().item()
        return metrics

    def list_figures(self, lists, rows):
        """Metrics of the best items (rows, EVAL_BEAMS) and rewards of the GROUP_SIZE first; HR, NDCG and
        reward by row, each (rows,)."""
        metrics = list_metrics(lists, rows, self.popularity)
        every = [row for row in rows for _ in range(GROUP_SIZE)]
        scores, parts = self.rewards_of(every, lists[:, :GROUP_SIZE].flatten())
        metrics |= {"reward": scores.mean().item(), "reward@1": scores[::GROUP_SIZE].mean().item()}
        metrics |= {f"reward/{name}": values.mean().item() for name, values in parts.items()}
        by_row = {"hr@10": hits(lists, rows, 10), "ndcg@10": gains(lists, rows, 10)}
        by_row["reward"] = scores.view(-1, GROUP_SIZE).mean(1).cpu()
        return metrics, by_row

    def evaluate_sft(self):
        """evaluate(); the best policy so far is kept in the reference, whatever happens to best/."""
        metrics = self.evaluate()
        self.state.sft_waited += 1
        if metrics["ndcg@10"] > self.state.sft_best:
            self.state.sft_best = metrics["ndcg@10"]
            self.state.sft_waited = 0
            self.reference.load_state_dict(self.actor.state_dict())
        return metrics

    def record_sft(self, metrics):
        metrics = {"epoch": self.state.epoch, **metrics}
        line = "SFT, epoch {epoch}: loss:{policy_loss:.4f} E:{entropy:.3f} LR:{learning_rate:.2e}"
        self.run.record(metrics, self.tokens, [], line.format(**metrics))

    def record(self, batch, metrics):
        """The step's metrics, a few of its candidates and its line on the terminal, for the run to write."""
        groups = batch.scores.view(-1, GROUP_SIZE)
        metrics = {
            "epoch": self.state.epoch,
            **metrics,
            "reward": batch.scores.mean().item(),
            **{f"reward/{name}": values.mean().item() for name, values in batch.parts.items()},
            "advantage": batch.advantages.abs().mean().item(),
            "zero_variance_groups": (groups == groups[:, :1]).all(1).float().mean().item(),
            "group_probability": batch.logprobs.sum(1).exp().mean().item() * GROUP_SIZE,
        }
        line = (
            "GRPO, epoch {epoch}: PL:{policy_loss:.4f} R:{reward:.3f} A:{advantage:.2f} "
            "E:{entropy:.3f} KL:{kl:.4f} LR:{learning_rate:.2e}"
        ).format(**metrics)
        logged = torch.linspace(0, len(batch.rows) - 1, min(LOG_SAMPLES, len(batch.rows))).long().tolist()
        samples = [sample_record(batch, i, self.catalogue) for i in logged]
        self.run.record(metrics, batch.response_ids.numel(), samples, line)

    def recommend(self, history, k=10):
        """The k items of highest probability after a history (items, the oldest first), best first: [{"item",
        "title", "codes", "probability"}], by the policy of best/, or before the first evaluation as it is."""
        row = self.prompter.row_of(history)
        width = min(max(k, EVAL_BEAMS), len(self.catalogue.items))
        items, logprobs, _ = search(self.best_policy(), self.trie, [row["ids"]], width, self.pad_id)
        found = []
        for item, logprob in zip(items[0].tolist()[:k], logprobs[0].sum(1).tolist()):
            found.append(
                {
                    "item": self.catalogue.items[item],
                    "title": self.catalogue.titles[item],
                    "codes": "".join(self.catalogue.codes[item]),
                    "probability": math.exp(logprob),
                }
            )
        return found

    def best_policy(self):
        """The policy of best/, read anew when there is a better one; before there is one the actor."""
        if self.run.best_value == -math.inf:
            return self.actor
        if self.run.best_value != self.best[0]:
            path = self.run.folder / "best/policy"
            model = load_model(AutoModelForCausalLM, path, "OUTPUT_DIR", self.device)
            model.decodes_shared = self.actor.decodes_shared
            self.best = self.run.best_value, model
        return self.best[1]

    # ------------------------------------------------------------ beside the algorithm

    def headline(self):
        name = f"{self.actor.config.model_type}: {size_of(self.actor)} on {self.device}"
        items = f"{len(self.catalogue.items)} items of {self.trie.depth} codes"
        rows = f"{len(self.train_rows)} rows to train on, {len(self.valid_rows)} for validation"
        stages = f"stage {self.state.stage}, steps {self.run.step} to {self.run.total_steps}"
        return f"{name}, {DTYPE}; {items}; {rows}, {len(self.test_rows)} for the test; {stages}; {OUTPUT_DIR}"

    def prepare_baselines(self):
        """Popularity, Markov counts, counts that back off, and SASRec, of the rows that the model is trained
        on, and their figures on validation."""
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
            self.run.say(f"{name:10} on validation: {figures}, reward {level['reward']:.4f}")

    def test(self):
        """Baselines, SFT's best policy and GRPO's on the test rows: a table, eval_test.json, the picture."""
        rows = self.test_rows
        if not rows:
            return
        lists = {name: top_items(model, rows) for name, model in self.baselines.items()}
        policies = {}
        if self.state.stage == "sft" or not REFERENCE_SYNC_STEPS:
            policies["sft"] = self.reference
        if self.state.stage == "rl":
            policies["grpo"] = self.best_policy()
        for name, model in policies.items():
            with without_adapter(model) if LORA_RANK else nullcontext():
                lists[name] = best_items(model, self.trie, rows, EVAL_BEAMS, self.pad_id)
        figures = {}
        by_row = {}
        for name, best in lists.items():
            figures[name], by_row[name] = self.list_figures(best, rows)
            figures[name]["intervals"] = {key: bootstrap_interval(x) for key, x in by_row[name].items()}
        if {"sft", "grpo"} <= set(lists):
            figures["grpo_minus_sft"] = {}
            for key in by_row["sft"]:
                gained = by_row["grpo"][key] - by_row["sft"][key]
                gain = {"mean": gained.mean().item(), "interval": bootstrap_interval(gained)}
                figures["grpo_minus_sft"][key] = gain
        if self.values is not None:
            figures["possible"] = {"value": best_value(self.values, rows, GROUP_SIZE)}
        for line in table_lines(figures):
            self.run.say(line)
        if rank() == 0:
            table = json.dumps({"rows": len(rows), **figures}, indent=1)
            write_whole(self.run.folder / "eval_test.json", lambda path: path.write_text(table + "\n"))
            records = read_metrics(self.run.folder / "logs/metrics.jsonl")
            draw_learning(records, self.run.folder, self.run.title, self.levels, figures)


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


# ================================================================ the trie of the catalogue, and decoding


class Trie:
    """All items' codes as flat tensors, a few a level. A level's nodes are its distinct prefixes in lexical
    order, so a node's children are neighbours on the next level: `first` and `count` of a node say where.
    codes (items, depth) of token ids, all rows distinct."""

    def __init__(self, codes, device):
        self.codes = codes.to(device)
        self.depth = codes.shape[1]
        self.first = []  # of each level: (nodes,) its first child's number on the next level
        self.count = []  # (nodes,) how many children
        self.code = []  # (children,) the code that leads to each
        self.width = []  # the most children that a node has
        paths = [torch.zeros(len(codes), dtype=torch.long)]  # (items,) its node on each level
        for level in range(self.depth):
            prefixes, at = codes[:, : level + 1].unique(dim=0, return_inverse=True)
            parent = torch.zeros(len(prefixes), dtype=torch.long).scatter(0, at, paths[-1])
            count = parent.bincount()
            self.first.append((count.cumsum(0) - count).to(device))
            self.count.append(count.to(device))
            self.code.append(prefixes[:, -1].to(device))
            self.width.append(int(count.max()))
            paths.append(at)
        self.paths = torch.stack(paths, 1).to(device)  # (items, depth + 1)
        self.item_at = torch.zeros(len(codes), dtype=torch.long, device=device)  # of a leaf
        self.item_at[self.paths[:, -1]] = torch.arange(len(codes), device=device)
        self.ids = self.codes.unique()  # of tokens that are codes
        self.columns = torch.zeros(int(self.ids.max()) + 1, dtype=torch.long, device=device)
        self.columns[self.ids] = torch.arange(len(self.ids), device=device)  # of each in CodeHead's logits

    def options(self, level, nodes):
        """What may follow the nodes (...) of a level: codes, the nodes they lead to, and which of them are
        there at all, all (..., width)."""
        step = torch.arange(self.width[level], device=nodes.device)
        open_ = step < self.count[level][nodes].unsqueeze(-1)
        children = (self.first[level][nodes].unsqueeze(-1) + step).clamp(max=len(self.code[level]) - 1)
        return self.code[level][children], children, open_


class CodeHead(torch.nn.Module):
    """A model's output layer for some ids alone: no logits of words that are no codes. Of a vocabulary of
    32,000 they took most of the time of decoding."""

    def __init__(self, head, ids):
        super().__init__()
        self.head = head
        self.ids = ids

    def forward(self, hidden):
        bias = self.head.bias
        return torch.nn.functional.linear(
            hidden, self.head.weight[self.ids], None if bias is None else bias[self.ids]
        )


@contextmanager
def codes_alone(model, trie):
    """Inside the block the model's logits are those of trie.ids."""
    head = model.get_output_embeddings()
    model.set_output_embeddings(CodeHead(head, trie.ids))
    try:
        yield
    finally:
        model.set_output_embeddings(head)


@torch.no_grad()
def check_head(model, trie, ids):
    """A model whose logits are not its output layer's, one by one, cannot be narrowed to the codes."""
    prompt = torch.tensor([ids], device=model.device)
    wanted = call_model(model, prompt, use_cache=False).logits[0, -1, trie.ids]
    with codes_alone(model, trie):
        found = call_model(model, prompt, use_cache=False).logits[0, -1]
    if found.shape != wanted.shape or not torch.allclose(found, wanted, atol=1e-3, rtol=1e-3):
        raise UserError(f"ACTOR_MODEL = {ACTOR_MODEL!r}: its logits are not those of a linear output layer")


@torch.no_grad()
def search(model, trie, prompts, width, pad_id, uniform=None):
    """`width` items for each prompt (a list of ids), level by level down the trie: their numbers, the
    log-probabilities of their codes and the entropy at each: (prompts, width), twice (prompts, width, depth).
    Each prompt is read once; its cache is expanded to the prefixes that go on.

    uniform None: beam search, best first; where the catalogue has fewer items, the rest are -1 with a
    log-probability of -inf. Else random numbers (depth, prompts, width): samples with replacement."""
    count = len(prompts)
    device = model.device
    with codes_alone(model, trie):
        decoder = Decoder(model, prompts, 1, pad_id)
    logits = decoder.logits
    nodes = torch.zeros(count, 1, dtype=torch.long, device=device)
    total = torch.zeros(count, 1, device=device)  # log-probability of each prefix
    steps = torch.zeros(count, 1, 0, 2, device=device)  # log-probability and entropy of each code
    prompt = torch.arange(count, device=device)[:, None]
    for level in range(trie.depth):
        codes, children, open_ = trie.options(level, nodes)  # (prompts, prefixes, options)
        logits = logits.view(*nodes.shape, -1)
        logprobs = constrained_logprobs(logits, trie.columns[codes], open_, TEMPERATURE)
        totals = total.unsqueeze(-1) + logprobs
        options = codes.shape[-1]
        if uniform is None:
            chosen = totals.flatten(1).topk(min(width, totals[0].numel())).indices  # (prompts, next prefixes)
            parent = chosen // options
        else:
            probabilities = logprobs.expand(-1, width, -1).flatten(0, 1).exp()
            parent = torch.arange(width, device=device).expand(count, -1) % nodes.shape[1]
            code = sample_tokens(probabilities, uniform[level].flatten()).view(count, width)
            chosen = parent * options + code
        total = totals.flatten(1).gather(1, chosen)
        nodes = children.flatten(1).gather(1, chosen)
        step = torch.stack(
            [logprobs.flatten(1).gather(1, chosen), entropy_of(logprobs).gather(1, parent)], -1
        )
        steps = torch.cat([steps[prompt, parent], step.unsqueeze(2)], 2)
        if level + 1 < trie.depth:
            # Where the last code is the only one left nothing needs to be computed
            needed = torch.ones_like(nodes) if level + 2 < trie.depth else trie.count[level + 1][nodes] > 1
            rows = needed.flatten().nonzero().squeeze(-1)
            before = prompt * codes.shape[1] + parent
            logits = logits.new_zeros(nodes.numel(), logits.shape[-1])
            if len(rows):
                decoder.select_rows(before.flatten()[rows])
                tokens = codes.flatten(1).gather(1, chosen).flatten()[rows]
                with codes_alone(model, trie):
                    logits[rows] = decoder.next(tokens).to(logits.dtype)
    items = torch.where(total.isfinite(), trie.item_at[nodes], -1)
    return items, *steps.unbind(-1)


def candidates(model, trie, rows, width, pad_id, uniform):
    """`width` candidates for each row, likelier ones first: a batch, its tensors (rows * width, ...), that
    item_logprobs() takes."""

    def some_rows(begin):
        some = rows[begin : begin + BATCH_SIZE]
        noise = None
        if uniform is not None:
            noise = uniform[:, begin : begin + BATCH_SIZE].to(model.device)
        with autocast(model):
            prompts = [row["ids"] for row in some]
            items, logprobs, entropies = search(model, trie, prompts, width, pad_id, noise)
        order = logprobs.sum(2).argsort(dim=1, descending=True, stable=True)
        at = order.unsqueeze(-1).expand(-1, -1, trie.depth)
        return items.gather(1, order), logprobs.gather(1, at), entropies.gather(1, at)

    found = map_over_ranks(range(0, len(rows), BATCH_SIZE), some_rows)
    items, logprobs, entropies = (torch.cat(x).flatten(0, 1).to(model.device) for x in zip(*found))
    every = [row for row in rows for _ in range(width)]
    batch = item_batch([row["ids"] for row in every], [[item] for item in items.tolist()], trie)
    batch.rows = every
    batch.items = items
    batch.logprobs = logprobs
    batch.entropies = entropies
    return batch


def best_items(model, trie, rows, width, pad_id):
    """The width best items of each row by beam search, best first, (rows, width), -1 where there are none."""
    width_here = min(width, len(trie.codes))
    at_once = max(1, min(64, 2**28 // (4 * len(trie.ids) * width_here)))

    def some_rows(begin):
        some = rows[begin : begin + at_once]
        with autocast(model):
            return search(model, trie, [row["ids"] for row in some], width_here, pad_id)[0]

    found = map_over_ranks(range(0, len(rows), at_once), some_rows)
    return torch.nn.functional.pad(torch.cat(found).cpu(), (0, width - width_here), value=-1)


def item_batch(prompts, items, trie):
    """A batch of prompts (lists of ids) and, for each, the items (a list of numbers) that follow it."""
    device = trie.codes.device
    numbers = upload(pad_right(items, 0), device)  # (rows, most items)
    codes = trie.codes[numbers].flatten(1).tolist()
    batch = pack(prompts, [row[: trie.depth * len(some)] for row, some in zip(codes, items)], device)
    batch.paths = trie.paths[numbers, : trie.depth].flatten(1)  # the node that each code is read at
    batch.children = trie.paths[numbers, 1:].flatten(1)  # and the one it leads to
    return batch


def sft_batch(rows, trie, device):
    """A batch of SFT's rows {"prompt", "items", "learn"}; its learn is 1 for the items to learn."""
    batch = item_batch([row["prompt"] for row in rows], [row["items"] for row in rows], trie)
    learn = pad_right([row["learn"] for row in rows], False).to(device)
    batch.learn = batch.response_mask * learn.repeat_interleave(trie.depth, 1)
    return batch


def item_logprobs(model, trie, batch, rows, temperature):
    """Constrained log-probabilities of the items' codes and the entropy at each: two (rows, R), float32, 0
    after the end."""
    with autocast(model), codes_alone(model, trie):
        logits, at = response_logits(model, batch, rows)  # (tokens, codes)
    token = at[1]
    nodes, children = (x[rows][at] for x in (batch.paths, batch.children))
    found = []
    for level in range(trie.depth):
        some = (token % trie.depth == level).nonzero().squeeze(-1)
        codes, _, open_ = trie.options(level, nodes[some])
        logprobs = constrained_logprobs(logits[some], trie.columns[codes], open_, temperature)
        chosen = children[some] - trie.first[level][nodes[some]]
        found.append((some, logprobs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), entropy_of(logprobs)))
    back = torch.cat([some for some, _, _ in found]).argsort()
    zeros = torch.zeros(len(rows), longest(batch, rows), device=logits.device)
    logprobs, entropy = (torch.cat([part[i] for part in found])[back] for i in (1, 2))
    return zeros.index_put(at, logprobs), zeros.index_put(at, entropy)


# ================================================================ catalogue, rows and prompts


class Catalogue:
    """The items of INDEX_FILE with their codes and ITEM_FILE's titles. Items of the same codes are one: items
    (a name each), codes and titles go by its number; number has the names of all."""

    def __init__(self, say):
        index = read_index()
        self.items = []
        self.codes = []
        self.rows = []  # which row of INDEX_FILE each one is
        self.number = {}
        known = {}
        doubles = []
        for row, (item, codes) in enumerate(index.items()):
            codes = tuple(codes)
            if codes in known:
                doubles.append(f"{item} as {self.items[known[codes]]}")
            else:
                known[codes] = len(self.items)
                self.items.append(item)
                self.codes.append(codes)
                self.rows.append(row)
            self.number[item] = known[codes]
        self.size = len(index)
        if doubles:
            others = f"{len(doubles)} of {self.size} items have the codes of another ({doubles[0]} ...)"
            say(f"WARNING: {others}: a hit on one counts for both")
        count = len(self.items)
        if GROUP_SIZE > count:  # the list that evaluation rewards is a group of distinct items
            raise UserError(f"GROUP_SIZE = {GROUP_SIZE} is above {count}, as many items as there are")
        self.titles = read_titles(self.number, count) if ITEM_FILE else [""] * count


def read_index():
    """{item: [codes]} of INDEX_FILE."""
    where = f"INDEX_FILE = {INDEX_FILE!r}"
    try:
        index = json.loads(read_text(INDEX_FILE, "INDEX_FILE"))
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})") from None
    if not isinstance(index, dict) or not index:
        raise UserError(f"{where}: it must be one object of items and their codes, {{item: [code, ...]}}")
    first = next(iter(index.values()))
    for item, codes in index.items():
        texts = isinstance(codes, list) and all(isinstance(code, str) and code.strip() for code in codes)
        if not texts or not codes or len(codes) != len(first) or not "".join(codes).isprintable():
            takes = "it takes a list of codes, equally many for all items"
            raise UserError(f"{where}: item {item!r} has {repr(codes)[:60]}: {takes}")
    return index


def read_text(path, constant):
    try:
        return Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise UserError(f"{constant} = {path!r}: {error}") from None


def read_titles(number, count):
    """Titles of `count` items; lines are codes, title and item, tab between. number: {item: its number}."""
    titles = [""] * count
    for line_number, line in enumerate(read_text(ITEM_FILE, "ITEM_FILE").split("\n"), 1):
        if not line.strip():
            continue
        _, *title, item = line.split("\t")
        if not title or item.strip() not in number:
            takes = "it takes codes, title and an item of INDEX_FILE, tab between"
            raise UserError(f"ITEM_FILE = {ITEM_FILE!r} line {line_number}: {takes}, not {line[:60]!r}")
        at = number[item.strip()]
        titles[at] = titles[at] or "\t".join(title)
    return titles


def read_rows(path, constant, catalogue, limit=None):
    """[{"id", "user", "sequence"}] of a csv file; sequence: the history's item numbers, then the target's."""
    where = f"{constant} = {str(path)!r}"
    rows = []
    for line, record in read_records({"path": path, "type": "csv"}, where):
        for name in (USER_COLUMN, HISTORY_COLUMN, TARGET_COLUMN):
            if name not in record:
                raise UserError(f"{where}: there is no column {name!r}; it has {list(record)}")
        sequence = read_sequence(record, f"{where} line {line}", catalogue.number)
        rows.append({"id": f"{Path(path).name}:{line}", "user": record[USER_COLUMN], "sequence": sequence})
    if not rows:
        raise UserError(f"{where}: the data set is empty")
    return rows[:limit]


def read_sequence(record, where, number):
    """Numbers of the history's items and of the target."""
    text = record[HISTORY_COLUMN]
    try:
        names = [str(item) for item in ast.literal_eval(text)]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        names = []
    if not names:
        takes = "it takes a list of one item or more, such as [3, 17]"
        raise UserError(f"{where}: {HISTORY_COLUMN} holds {repr(text)[:60]}: {takes}; mend or delete it")
    names.append(str(record[TARGET_COLUMN]).strip())
    for name in names:
        if name not in number:
            raise UserError(f"{where}: item {name!r} has no codes in INDEX_FILE: add it, or delete the line")
    return [number[name] for name in names]


def transitions(rows, prefixes, say, name):
    """[{"id", "user", "history", "target", "line", "at", "sequence"}]: each row's target and, with prefixes,
    the items of its history too; what stands in several rows of a user (one row's history goes on in the
    next) once. `at` is the target's place in the sequence, which is cut to MAX_HISTORY."""
    found = []
    seen = set()
    longer = sum(len(row["sequence"]) - 1 > MAX_HISTORY for row in rows)
    if longer:
        say(f"{longer} of {len(rows)} {name} histories are longer than MAX_HISTORY: cut from the left")
    for line, row in enumerate(rows):
        sequence = row["sequence"][-MAX_HISTORY - 1 :]
        cut = len(row["sequence"]) - len(sequence)
        for at in range(1 if prefixes else len(sequence) - 1, len(sequence)):
            key = (row["user"], tuple(row["sequence"][: cut + at + 1]))  # the same in every window
            if prefixes and key in seen:
                continue
            seen.add(key)
            found.append(
                {
                    "id": f"{row['id']}#{at}" if prefixes else row["id"],
                    "user": row["user"],
                    "line": line,
                    "at": at,
                    "history": sequence[:at],
                    "target": sequence[at],
                    "sequence": sequence,
                }
            )
    return found


def load_splits(catalogue, say):
    """Training, validation and test rows. A transition of a user that validation or test ask for is not
    trained on, whatever file it stands in and wherever its history is cut."""
    rows = read_rows(TRAIN_FILE, "TRAIN_FILE", catalogue, MAX_TRAIN_ROWS)
    if VALID_FILE is None:
        users = list(dict.fromkeys(row["user"] for row in rows))
        order = torch.randperm(len(users), generator=torch.Generator().manual_seed(0)).tolist()
        held_out = {users[i] for i in order[: math.ceil(VALID_FRACTION * len(users))]}
        held = [row for row in rows if row["user"] in held_out]
        rows = [row for row in rows if row["user"] not in held_out]
        if not rows:
            raise UserError(f"TRAIN_FILE = {TRAIN_FILE!r} has one user, none to hold out: set VALID_FILE")
    else:
        held = read_rows(VALID_FILE, "VALID_FILE", catalogue)
    asked = read_rows(TEST_FILE, "TEST_FILE", catalogue) if TEST_FILE else []
    valid = transitions(held, False, say, "validation")
    test = transitions(asked, False, say, "test")
    if MAX_EVAL_ROWS and len(valid) > MAX_EVAL_ROWS:
        valid = [valid[i] for i in torch.linspace(0, len(valid) - 1, MAX_EVAL_ROWS).long().tolist()]
    secret = defaultdict(list)  # {(user, last item, target): histories, as the files have them}
    for row in [*(held[row["line"]] for row in valid), *asked]:
        *history, target = row["sequence"]
        secret[row["user"], history[-1], target].append(history)

    def is_secret(row):
        whole = rows[row["line"]]["sequence"]
        history = whole[: len(whole) - len(row["sequence"]) + row["at"]]
        others = secret.get((row["user"], history[-1], row["target"]), ())
        return any(a[-len(b) :] == b[-len(a) :] for a, b in ((history, other) for other in others))

    train = transitions(rows, TRAIN_PREFIXES, say, "training")
    kept = [row for row in train if not is_secret(row)]
    if leaked := len(train) - len(kept):
        say(f"WARNING: {leaked} training rows are rows of validation or test: left out of training")
    if not kept:
        raise UserError(f"TRAIN_FILE = {TRAIN_FILE!r}: nothing to train on is left beside the other rows")
    return kept, valid, test


class Prompter:
    """How histories become ids: PROMPT_TEMPLATE, inside the tokenizer's chat template if it has one, around
    the codes of the items. codes (items, depth) are the tokens' ids."""

    def __init__(self, tokenizer, catalogue, model):
        self.tokenizer = tokenizer
        self.catalogue = catalogue
        self.codes = torch.tensor([tokenizer.convert_tokens_to_ids(list(codes)) for codes in catalogue.codes])
        self.lists = self.codes.tolist()
        text = PROMPT_TEMPLATE
        if tokenizer.chat_template:
            turns = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        before, after = text.split("{history}")
        self.head = tokenizer(before, add_special_tokens=not tokenizer.chat_template)["input_ids"]
        if self.head[-1:] == [tokenizer.eos_token_id]:  # some tokenizers end every text
            self.head = self.head[:-1]
        self.tail = tokenizer(after, add_special_tokens=False)["input_ids"] if after else []
        longest = len(self.head) + len(self.tail) + self.codes.shape[1] * (MAX_HISTORY + 1)
        self.most = positions_of(model)
        if longest > self.most:
            makes = f"MAX_HISTORY = {MAX_HISTORY} items make {longest} tokens"
            raise UserError(f"{makes}, ACTOR_MODEL reads {self.most}: lower MAX_HISTORY")

    def ids(self, history):
        return [*self.head, *(code for item in history for code in self.lists[item]), *self.tail]

    def row_of(self, history):
        """A row to recommend for, from items' names."""
        names = [str(item) for item in history]
        if not names or not set(names) <= self.catalogue.number.keys():
            raise UserError(f"a history has one item of INDEX_FILE or more, not {names}")
        numbers = [self.catalogue.number[name] for name in names][-MAX_HISTORY:]
        return {"history": numbers, "ids": self.ids(numbers)}

    def rows_of_stages(self, train_rows, say):
        """What SFT learns, [{"id", "prompt", "items", "learn"}], and what GRPO asks. Where nothing stands
        behind the history, one pass of SFT over a sequence asks for each of its items: the same loss as a row
        for each, at a fifth of the time."""
        by_titles, of_items = self.title_rows(train_rows, say)
        titles = [sft_row(row) for row in by_titles + of_items]
        if self.tail:
            return [sft_row(row) for row in train_rows] + titles, train_rows + by_titles
        lines = defaultdict(list)
        for row in train_rows:
            lines[row["line"]].append(row)
        found = []
        for rows in lines.values():
            asked = {row["at"] for row in rows}
            end = max(asked) + 1
            sequence = rows[0]["sequence"]
            found.append(
                {
                    "id": rows[0]["id"],
                    "prompt": self.ids(sequence[:1]),
                    "items": sequence[1:end],
                    "learn": [at in asked for at in range(1, end)],
                }
            )
        return found + titles, train_rows + by_titles

    def title_rows(self, train_rows, say):
        """Training rows asked by their history's titles; rows of items that their own title asks for."""
        generator = torch.Generator().manual_seed(0)
        titles = self.catalogue.titles
        by_titles = []
        order = torch.randperm(len(train_rows), generator=generator).tolist()
        for row in [train_rows[i] for i in order[: round(TITLE_HISTORY_ROWS * len(train_rows))]]:
            text = "; ".join(titles[item] for item in row["history"])
            by_titles.append({**row, "id": f"{row['id']} by titles", "ids": self.title_ids(text)})
        of_items = []
        items = torch.randperm(len(titles), generator=generator).tolist()
        for item in items[: round(TITLE_ROWS * len(items))]:
            name = f"title of {self.catalogue.items[item]}"
            of_items.append({"id": name, "ids": self.title_ids(titles[item]), "target": item})
        kept = [[row for row in rows if row["ids"]] for rows in (by_titles, of_items)]
        asked = len(by_titles) + len(of_items)
        if left_out := asked - len(kept[0]) - len(kept[1]):
            say(f"{left_out} of {asked} rows of titles are empty or too long: left out")
        return kept

    def title_ids(self, text):
        """A prompt of titles; None where there is no text, or it leaves no room for an item."""
        ids = [*self.head, *self.tokenizer(text, add_special_tokens=False)["input_ids"], *self.tail]
        return ids if text and len(ids) + self.codes.shape[1] <= self.most else None


def sft_row(row):
    return {"id": row["id"], "prompt": row["ids"], "items": [row["target"]], "learn": [True]}


def check_sizes():
    """Constants that do not fit each other."""
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


# ================================================================ the model


def small_model(depth):
    """A Llama of random weights for items of so many codes; its tokenizer will know codes alone."""
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
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
    if "attend" in globals():  # as load_model() does
        model.set_attn_implementation("shared_prompts")
    return tokenizer, model


def load_actor(checkpoint, catalogue, device):
    """Tokenizer and model, from a checkpoint if there is one, with a token for each code."""
    path = ACTOR_MODEL if LORA_RANK else checkpoint or ACTOR_MODEL
    sft = Path(OUTPUT_DIR) / "sft/policy"
    if path is None and STAGE == "rl":
        if not sft.exists():
            raise UserError("STAGE=rl has nothing to start from: run STAGE=sft first, or set ACTOR_MODEL")
        path = sft
    if path is None:
        tokenizer, model = small_model(len(catalogue.codes[0]))
    else:
        tokenizer = load_tokenizer(path, "ACTOR_MODEL")
        for key in ("is_local", "local_files_only"):  # where it came from, which it would save
            tokenizer.init_kwargs.pop(key, None)
        model = load_trained(AutoModelForCausalLM, path, "ACTOR_MODEL", torch.device("cpu"), checkpoint)
    codes = sorted({code for codes in catalogue.codes for code in codes})
    new = sorted(set(codes) - set(tokenizer.get_vocab()))
    tokenizer.add_tokens(new)
    for code in codes:
        if tokenizer(code, add_special_tokens=False)["input_ids"] != [tokenizer.convert_tokens_to_ids(code)]:
            raise UserError(f"INDEX_FILE: the tokenizer splits the code {code!r}: take codes such as <a_7>")
    if new and (STAGE == "rl" or checkpoint):
        lacks = f"{len(new)} of INDEX_FILE's codes are new to {path}, such as {new[0]}"
        raise UserError(f"{lacks}: run STAGE=sft first")
    if len(tokenizer) > known_ids(model):
        model.resize_token_embeddings(len(tokenizer))  # on the CPU: a GPU would draw other new rows
    return tokenizer, model.to(device).eval()


# ================================================================ item values and vectors


def load_arrays(path, constant):
    try:
        return np.load(path, allow_pickle=False)
    except Exception as error:  # NumPy raises many kinds
        raise UserError(f"{constant} = {path!r}: cannot be read by NumPy ({first_line(error)})") from None


def read_array(path, constant, catalogue, square=False):
    """An array by the catalogue's numbers, (items, ...) or square; the file has a row for each item of
    INDEX_FILE."""
    array = load_arrays(path, constant)
    fits = array.dtype.kind in "fiu" and array.ndim == 2 and array.size and len(array) == catalogue.size
    if not fits or square and array.shape[1] != len(array) or not np.isfinite(array).all():
        each = "a row and a column" if square else "a row"
        takes = f"it takes finite numbers, {each} for each of {catalogue.size} items of INDEX_FILE"
        raise UserError(f"{constant} = {path!r} has shape {array.shape}: {takes}")
    array = array[catalogue.rows].astype(np.float64)
    return array[:, catalogue.rows] if square else array


def item_vectors(catalogue):
    """Unit vectors of the items, (items, width), for the semantic reward; of titles the TF-IDF of words that
    stand in two or more."""
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


# ================================================================ baselines


class Counts:
    """How often items followed each other in rows, on each level of codes that paths (items, levels) has: the
    node of each item, the root first. What is rare on one level is smoothed by the level above,

        P_0(i) = i's share of the targets
        P_l(i | j) = (n_l(j, i) + smoothing P_{l-1}(i | j)) / (n_l(j) + smoothing)

    n_l(j, i): how often an item of j's node came before one of i's, times i's share of its node's targets. A
    score is the sum over the history of decay ** (items further back) P(i | j)."""

    def __init__(self, rows, paths, smoothing=1.0, decay=0.0):
        self.smoothing = smoothing
        self.decay = decay
        last = torch.tensor([row["history"][-1] for row in rows])
        targets = torch.tensor([row["target"] for row in rows])
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
        items = sorted({item for history in histories for item in history})
        after = self.shares.expand(len(items), -1)  # P(. | j) of each j of items
        for nodes, followed, within in self.levels:
            counts = followed.index_select(0, nodes[items]).to_dense()  # (len(items), nodes)
            above = self.smoothing * after
            after = (counts[:, nodes] * within + above) / (counts.sum(1, keepdim=True) + self.smoothing)
        weights = torch.zeros(len(histories), len(items)).double()
        place = {item: n for n, item in enumerate(items)}
        for n, history in enumerate(histories):
            for back, item in enumerate(reversed(history)):
                weights[n, place[item]] += self.decay**back  # 0 ** 0 is 1
        return weights @ after


def best_counts(rows, paths, valid_rows):
    """Of the Counts on all levels those of the smoothing and the decay that validation chooses by NDCG@10."""

    def ndcg(counts):
        return gains(top_items(counts, valid_rows), valid_rows, 10).mean()

    return max((Counts(rows, paths, *how) for how in itertools.product(_SMOOTHING, _DECAYS)), key=ndcg)


class SASRec:
    """Of the model that data/sasrec.py has trained (1808.09781): a score is the product of a vector of the
    history, of users (histories, width), and one of the item, of items (items, width)."""

    def __init__(self, histories, users, items):
        self.row_of = {tuple(item for item in history if item >= 0): n for n, history in enumerate(histories)}
        self.users = users
        self.items = items

    def scores(self, histories):
        return self.users[[self.row_of[tuple(history)] for history in histories]] @ self.items.T


def read_sasrec(train_rows, asked_rows, say):
    """SASREC_FILE's SASRec, or None and a sentence where it is not of these rows."""
    if SASREC_FILE is None:
        return None
    why = "there is no such file"
    if Path(SASREC_FILE).exists():
        why = "it was made of other rows"
        arrays = load_arrays(SASREC_FILE, "SASREC_FILE")
        users, items = (torch.from_numpy(arrays[key]) for key in ("users", "items"))
        model = SASRec(arrays["histories"].tolist(), users, items)
        known = all(tuple(row["history"]) in model.row_of for row in asked_rows)
        if known and str(arrays["trained_on"]) == rows_digest(train_rows):
            return model
    say(f"SASREC_FILE = {SASREC_FILE!r}: {why}: no SASRec beside the policy (data/sasrec.py makes the file)")
    return None


def rows_digest(rows):
    facts = json.dumps([[row["history"], row["target"]] for row in rows])
    return hashlib.sha256(facts.encode()).hexdigest()


def top_items(model, rows):
    """The EVAL_BEAMS best items of each row by a baseline's scores, (rows, EVAL_BEAMS), -1 where there are
    fewer."""
    found = []
    for begin in range(0, len(rows), 512):
        scores = model.scores([row["history"] for row in rows[begin : begin + 512]])
        found.append(scores.sort(dim=1, descending=True, stable=True).indices[:, :EVAL_BEAMS])
    lists = torch.cat(found)
    return torch.nn.functional.pad(lists, (0, EVAL_BEAMS - lists.shape[1]), value=-1)


# ================================================================ metrics, figures and pictures


def sample_record(batch, i, catalogue):
    """A candidate for samples.jsonl."""
    row = batch.rows[i]
    item = int(batch.items[i])
    return {
        "id": row["id"],
        "history": [catalogue.items[n] for n in row["history"]],
        "item": catalogue.items[item],
        "title": catalogue.titles[item],
        "target": catalogue.items[row["target"]],
        "logprob": batch.logprobs[i].sum().item(),
        "reward": batch.scores[i].item(),
        **{f"reward/{name}": values[i].item() for name, values in batch.parts.items()},
        "advantage": batch.advantages[i].item(),
    }


def gains(lists, rows, k):
    """NDCG of one target: 1 / log2(rank + 1) where it is among the first k, rank from 1, (rows,)."""
    targets = torch.tensor([row["target"] for row in rows])
    discounts = 1 / torch.log2(torch.arange(min(k, lists.shape[1])) + 2.0)
    return ((lists[:, :k] == targets[:, None]) * discounts).sum(1)


def hits(lists, rows, k):
    """1 where the target is among the first k, else 0, (rows,)."""
    return (gains(lists, rows, k) > 0).float()


def list_metrics(lists, rows, popularity):
    """HR and NDCG at _KS of the best items (rows, EVAL_BEAMS) of rows; coverage@10, the share of the
    catalogue in some list; popularity@10, the mean share of items that are less popular."""
    metrics = {}
    for k in _KS:
        metrics[f"hr@{k}"] = hits(lists, rows, k).mean().item()
        metrics[f"ndcg@{k}"] = gains(lists, rows, k).mean().item()
    top = lists[:, :10]
    top = top[top >= 0]
    less_popular = (popularity[:, None] > popularity).float().mean(1)  # (items,)
    metrics["coverage@10"] = len(top.unique()) / len(popularity)
    metrics["popularity@10"] = less_popular[top].mean().item()
    return metrics


def bootstrap_interval(values):
    """95% interval of the mean of values (rows,), resampling rows."""
    generator = np.random.default_rng(0)
    means = [generator.choice(values, len(values)).mean() for _ in range(2000)]
    return np.quantile(means, (0.025, 0.975)).tolist()


def best_value(values, rows, count):
    """The highest mean value that a list of so many distinct items can have, over rows."""
    total = 0.0
    for history in (row["history"] for row in rows):
        worth = [rewards.history_value(values, history, item, VALUE_DECAY) for item in range(len(values))]
        total += np.sort(worth)[-count:].mean()
    return total / len(rows)


def table_lines(figures):
    """Lines for the terminal: each policy on the test rows, the gain over SFT, what is possible."""
    keys = ["hr@1", "hr@10", "ndcg@10", "hr@20", "reward", "coverage@10", "popularity@10"]
    lines = ["Test rows:" + " " * 6 + "".join(f"{key:>15}" for key in [*keys, "of best value"])]
    possible = figures.get("possible")
    for name, figure in figures.items():
        if "intervals" in figure:
            share = f"{figure['reward/value'] / possible['value']:>15.1%}" if possible else ""
            lines.append(f"  {name:14}" + "".join(f"{figure[key]:>15.4f}" for key in keys) + share)
    for key, gained in figures.get("grpo_minus_sft", {}).items():
        interval = "95% interval {:+.4f} to {:+.4f}".format(*gained["interval"])
        lines.append(f"  GRPO minus SFT, {key}: {gained['mean']:+.4f} ({interval})")
    return lines


def draw_learning(records, folder, title, levels, figures):
    """rec_learning.png, from the logs: HR, NDCG and reward over the steps of both stages, with the baselines'
    on validation as dashed lines; below them the test rows' as bars with 95% intervals."""
    figure = Figure(figsize=(16, 9), layout="constrained")
    figure.suptitle(title)
    trained = [record for record in records if record["phase"] == "train"]
    begin = next((record["step"] - 1 for record in trained if "reward" in record), None)
    names = [name for name in figures if "intervals" in figures[name]]
    for (curve, bars), key in zip(figure.subplots(2, 3).T, ("hr@10", "ndcg@10", "reward")):
        for phase in ("train", "eval"):
            plot_metric(curve, records, phase, key, "C0", key)
        for number, (name, level) in enumerate(levels.items(), 1):
            curve.axhline(level[key], linestyle="--", color=f"C{number}", label=name)
        if begin:
            curve.axvline(begin, color="grey", linewidth=0.8, label="SFT ends, GRPO begins")
        curve.set(xlabel="training step", ylabel=key)
        curve.legend(fontsize=8)
        means = np.array([figures[name][key] for name in names])
        low, high = np.array([figures[name]["intervals"][key] for name in names]).T
        bars.bar(names, means, 0.6, yerr=np.maximum([means - low, high - means], 0), capsize=3)
        bars.set(ylabel=f"{key} on the test rows, 95% intervals")
        for axis in (curve, bars):
            axis.grid(alpha=0.3)
            axis.margins(y=0.15)
    write_whole(folder / "rec_learning.png", partial(figure.savefig, format="png", dpi=100))


def train_main():
    run_main(RecTrainer)


if __name__ == "__main__":
    train_main()
