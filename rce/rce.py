"""RCE for language models, in one file: samples and scores candidates, and fits the policy to the best.

Reward-weighted cross-entropy (reward-weighted regression, Peters and Schaal 2007; AWR without the
critic, 1910.00177). The candidates y_1 .. y_n of a prompt x, with rewards r_1 .. r_n, give

    w_i = exp(r_i / TAU) / sum_j exp(r_j / TAU)               no gradient; they sum to 1 for each prompt
    L   = mean over prompts of sum_i w_i * -log pi(y_i | x)   LENGTH_NORMALISE: log pi / tokens of y_i

As TAU goes to 0, this becomes best-of-n distillation. Unlike GRPO it needs no old policy and no
ratios, may learn from any responses, and never pushes one down (all w >= 0). Use it if you want to
inspect the training data before you train, if scoring is slow, or if you have scored responses.

Each of the ROUNDS takes the next MINE_PROMPTS prompts:

    mine      propose the greedy response, beams, samples at several temperatures and, if wanted, the
              data's own solution; merge equal ones; score them by the reward functions. If those are
              slow, a pre-filter may choose what they score: see VERIFY_TOP
    check up  log statistics of the candidates; tools/check_up.py computes more
    train     on the prompts whose candidates' rewards differ. VALIDATION_FRACTION of all prompts are
              never trained on: there pick_accuracy is how often the policy's likeliest candidate is
              right, and the policy with the highest is kept in best/

Shapes: rows = candidates, grouped by prompt; P, R = tokens of the longest prompt and response.

    python rce/rce.py                         # edit the constants below, or give KEY=VALUE or @FILE
    python rce/rce.py STAGE=mine, then python tools/check_up.py checkpoints/rce, then rce.py STAGE=train
    python grpo/grpo.py ACTOR_MODEL=checkpoints/rce/best/policy OUTPUT_DIR=checkpoints/rce_grpo  # then GRPO
    torchrun --nproc_per_node=4 rce/rce.py    # the same candidates, the same update up to rounding

Writes candidates_round_N.parquet, logs/, checkpoints step_N/, best/policy/ and two pictures into
OUTPUT_DIR. A run that was stopped or killed continues from its last checkpoint and its last mined
prompts, and ends with the same bytes.

To change    see                                      To change      see
the weights  rce_weights, tau_at, reward_modes        the data       TRAIN_DATASETS, load_rows
the loss     rce_loss, update                         a metric       update, record, evaluate, check_up
the reward   REWARD_FUNCTIONS, compute_rewards        a plot         PANELS, draw_grid
the mining   propose, choose_verified, beam_search    validation     is_for_validation, validate
the end      is_over
"""

import ast
import csv
import difflib
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
import zlib
from collections import Counter, defaultdict
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):
    print(__doc__ + Path(__file__).read_text().split("= constants\n")[1].split("\n# =====")[0])
    sys.exit()

import filelock
import numpy as np
import pyarrow
import pyarrow.parquet
import torch
import torch.distributed as dist
import transformers
from matplotlib.figure import Figure
from torch.nn.utils.rnn import pad_sequence
from torch.special import entr
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

rank, world_size, local_rank = 0, 1, 0  # of this process; rank 0 alone asks, writes and prints
if dist.is_torchelastic_launched():
    rank, world_size, local_rank = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
ROOT = next((path for path in Path(__file__).resolve().parents if (path / "rewards").is_dir()), None)
if ROOT is None:
    sys.exit(f"{__file__}: copy the folder rewards/ of the repository beside this file, or above it")
sys.path.insert(0, str(ROOT))
import rewards
from rewards import UserError, call_reward, find_function, find_functions, gold_answers

# ================================================================ constants

# What to do
STAGE = "all"  # all | mine (the first round, no training) | train (on the first round's candidates)
ROUNDS = 2  # times to mine and train
CANDIDATES: str | None = None  # a parquet of scored candidates for the first round, instead of mining

# Models: a folder or a hub name
ACTOR_MODEL = f"{ROOT}/data/tiny/policy"
LORA_RANK = 0  # 0: train all weights; > 0: LoRA adapters of this rank on all linear layers (2106.09685)
LORA_ALPHA = 32.0  # an adapter's output is scaled by LORA_ALPHA / LORA_RANK
DTYPE = "float32"  # float32 | bfloat16: autocast; trained weights and logits stay float32
DEVICE = "auto"  # auto | cpu | cuda | cuda:1
ATTENTION: str | None = None  # sdpa | eager | flash_attention_2 (if installed); None: what the model has
GRADIENT_CHECKPOINTING = False  # recompute activations in the update: less memory, slower

# Data sets: {"path", "type": "jsonl" | "csv" | "parquet" | "hub", "input", "output"}; on the hub also
# "name" and "split". "input" and "output" name columns; the input is a text or a list of chat messages
TRAIN_DATASETS = [
    {"path": f"{ROOT}/data/tiny/train.jsonl", "type": "jsonl", "input": "problem", "output": "solution"},
    {"path": f"{ROOT}/data/tiny/train.parquet", "type": "parquet", "input": "problem", "output": "solution"},
]
EVAL_DATASETS = [{**TRAIN_DATASETS[0], "path": f"{ROOT}/data/tiny/test.jsonl"}]
PROMPT_TEMPLATE = "{input}"  # the question; the tokenizer's chat template, if it has one, wraps it
SYSTEM_PROMPT: str | None = None  # put before prompts that have none; needs a chat template
MAX_EVAL_PROMPTS: int | None = 200  # the first ones of each data set; None: all
VALIDATION_FRACTION = 0.2  # share of the prompts that are never trained on; a hash of the text decides

# Rewards: a function is a name in rewards/, or one that you define above: f(prompts, responses,
# answers) returns one number per response. It may have more parameters: one with the name of a column
# of the data gets that column, one value per response; response_ids gets the sampled token ids, with
# EOS. For a reward model define a function that calls it
REWARD_FUNCTIONS = [("exact_answer", 1.0), ("rouge_l", 0.0)]  # the weights make evaluation's reward only
HARD_REWARD = "exact_answer"  # "hard": the function that is 1 for right and 0 for wrong candidates
SOFT_REWARD = "rouge_l"  # "soft": the function that grades candidates, 0 to 1
REWARD_MODE = "hard_only"  # how r is made of hard, soft, gt_prob and logprob: see reward_modes
# gt_prob, for the pre-filter and some modes: the probability that the policy, after a candidate's own
# reasoning, writes a gold answer and ends. Reasoning is the text through the last "####" of this form
ANSWER_FORM: str | None = "#### {answer}"  # None: gt_prob is not computed, and mining is quicker
ACCURACY_FUNCTION = "exact_answer"  # in rewards/; decides whether a response is correct (evaluation)

# Mining
MINE_PROMPTS: int | None = 320  # prompts per round; None: all
BEAMS = 2  # responses of a beam search of this width; 0: none
GROUP_SIZE = 13  # sampled responses per prompt, which take the SAMPLE_TEMPERATURES in turn
SAMPLE_TEMPERATURES = [0.6, 0.8, 1.0]  # each > 0
INCLUDE_REFERENCE = False  # propose the data's own solution, if it has at most MAX_NEW_TOKENS tokens
# Pre-filter for slow rewards: of each prompt the VERIFY_TOP candidates by PREFILTER and VERIFY_RANDOM
# others are verified, that is, scored by the reward functions. The rest are verified only if all
# of these are right, or all are wrong
VERIFY_TOP: int | None = None  # None: all
VERIFY_RANDOM = 2
PREFILTER = "gt_prob"  # gt_prob | logprob (of the candidate under the policy)
MAX_PROMPT_TOKENS = 256  # longer prompts are left out, and counted
MAX_NEW_TOKENS = 64
TEMPERATURE = 1.0  # > 0; in training, evaluation and all log-probabilities
EVAL_SAMPLES = 4  # samples per prompt in evaluation: k of pass@k

# Optimisation
BATCH_SIZE = 32  # prompts mined at a time
# An optimizer step has the candidates of BATCH_SIZE times this many prompts. It does not cut the update
# into backward passes, as the name says in other programs: MICRO_BATCH_ROWS does
GRADIENT_ACCUMULATION_STEPS = 1
MICRO_BATCH_ROWS = 32  # responses per forward and backward pass; scoring takes four times as many
LOGIT_CHUNK = 256  # tokens whose logits are held at a time; the backward pass computes them again
DECODE_BLOCK = 32  # tokens by which the KV cache grows in sampling; each block needs a new CUDA graph
CUDA_GRAPHS = False  # in sampling: one launch per token. Has not run on a GPU yet; take DECODE_BLOCK=128
TAU = 0.1  # > 0; small: only the best candidates weigh; large: all weigh alike
TAU_END: float | None = None  # TAU goes there geometrically over all steps; None: it stays
WEIGHT_REWARDS = "raw"  # raw | zscore: r as it is, or scaled to mean 0 and deviation 1 within the prompt
LENGTH_NORMALISE = False  # divides log pi by the number of tokens
LEARNING_RATE = 3e-4
MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 0.0
USE_LR_SCHEDULER = True
LR_SCHEDULER_TYPE = "linear"  # linear | cosine (to 0) | plateau (halves if 2 evaluations bring no gain)
WARMUP_STEPS = 0  # linear warm-up, with or without a scheduler

# Schedule and files
NUM_EPOCHS = 2  # passes over a round's prompts
MAX_STEPS: int | None = None  # of all rounds; None: all steps are run
SAVE_EVERY_N_STEPS = 25  # 0: only after each round
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 8  # 0: only before the first step and after each round
EARLY_STOPPING_PATIENCE = 0  # evaluations without a better pick before the run ends; 0: no early stop
EARLY_STOPPING_THRESHOLD = 0.0  # a smaller gain does not count for EARLY_STOPPING_PATIENCE
LOG_SAMPLES = 4  # candidates per step written to samples.jsonl
RESUME = "ask"  # ask (yes without a terminal or under torchrun) | yes | no | path of a checkpoint or run
OUTPUT_DIR = f"{ROOT}/checkpoints/{Path(__file__).stem}"
SEED = 1
DETERMINISTIC = True  # kernels add in a fixed order: the same run gives the same bytes; slower on a GPU
USE_WANDB = False  # its project and mode: environment variables WANDB_PROJECT, WANDB_MODE

# ================================================================ the maths of RCE


def sampling_logprobs(logits, temperature):
    """Returns log-probabilities (..., vocabulary) at a temperature, a number or a tensor. Sampling,
    scoring and training call it. For top-p and the like edit generate(): a token that is excluded here
    could never be learnt."""
    return (logits.float() / temperature).log_softmax(-1)


def rce_weights(rewards, tau):
    """Returns the weights w of one prompt's candidates from their rewards r, two (candidates,)."""
    if WEIGHT_REWARDS == "zscore":
        rewards = rewards / (rewards.std() + 1e-4)  # a softmax does not see their mean
    return (rewards / tau).softmax(0)


def tau_at(steps_done, total):
    """Returns TAU after steps_done of total steps. It goes to TAU_END geometrically."""
    if TAU_END is None:
        return TAU
    fraction = min(1, steps_done / max(1, total - 1))  # 1 at the last step
    return TAU * (TAU_END / TAU) ** fraction


def rce_loss(logprobs, mask, weights):
    """Returns the sum over rows of w * -log pi; update() divides it by the number of prompts.
    logprobs, mask (rows, R); weights (rows,)."""
    row_logprobs = (logprobs * mask).sum(1)
    if LENGTH_NORMALISE:
        row_logprobs = row_logprobs / mask.sum(1)
    return -(weights * row_logprobs).sum()


def gold_probability(logprobs, start):
    """Returns the probability of one gold answer and its end, given prompt and reasoning. gt_prob is
    the sum over the distinct gold answers. logprobs (R,) of the reasoning's tokens, then, from
    `start` on, of the answer's."""
    return logprobs[start:].double().sum().exp().item()


def hybrid(hard, soft, gt_prob, logprob):
    """Returns the mean of hard and the logprob, which is scaled to 0 to 1 within the prompt."""
    scaled = (logprob - logprob.min()) / (logprob.max() - logprob.min()).clamp(min=1e-8)
    return (hard + scaled) / 2


# r of one prompt's candidates, (candidates,), from hard (0 or 1), soft and gt_prob (0 to 1), and logprob
reward_modes = {
    "hard_only": lambda hard, soft, gt_prob, logprob: hard,
    "soft_only": lambda hard, soft, gt_prob, logprob: soft,
    "hard_plus_soft": lambda hard, soft, gt_prob, logprob: hard + soft,  # right and wrong can meet at 1
    "separated": lambda hard, soft, gt_prob, logprob: 2 * hard + soft,  # right: 2 to 3, wrong: 0 to 1
    "hard_plus_gtprob": lambda hard, soft, gt_prob, logprob: hard + gt_prob,
    "hard_plus_gtprob_separated": lambda hard, soft, gt_prob, logprob: 2 * hard + gt_prob,
    "hybrid": hybrid,
}


def shaped_rewards(candidates):
    """Returns r of one prompt's candidates by REWARD_MODE, (candidates,), float64; NaN where the mode
    reads what a candidate lacks."""
    columns = []
    for name in ("hard", "soft", "gt_prob", "logprob"):
        values = [getattr(candidate, name) for candidate in candidates]
        values = [math.nan if value is None else value for value in values]
        columns.append(torch.tensor(values, dtype=torch.float64))
    mode = REWARD_MODE if callable(REWARD_MODE) else reward_modes[REWARD_MODE]
    return mode(*columns)


def learning_rate_scale(steps_done, total, halvings):
    """Returns the learning rate's factor after steps_done steps: linear warm-up, then the schedule."""
    if steps_done < WARMUP_STEPS:
        return (steps_done + 1) / WARMUP_STEPS
    if not USE_LR_SCHEDULER:
        return 1.0
    if LR_SCHEDULER_TYPE == "plateau":
        return 0.5**halvings
    fraction = (steps_done - WARMUP_STEPS) / max(1, total - WARMUP_STEPS)
    if LR_SCHEDULER_TYPE == "linear":
        return 1 - fraction
    return 0.5 * (1 + math.cos(math.pi * fraction))


# ================================================================ the trainer


class RCETrainer:
    """self.run has the files. self.state is what a checkpoint holds beside models and optimizers: you
    may add numbers, texts, lists and tensors (of Python and torch: numpy's cannot be loaded again)."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        self.device = join_processes()
        self.run = Run(resume_from_checkpoint or RESUME)
        self.state = SimpleNamespace(
            step=0,  # number of the current step, from 1; 0: none has begun
            round=1,  # the current one
            round_start=0,  # the step after which it began
            evaluation={},  # the last one's metrics
            best_score=-math.inf,  # the highest pick_accuracy: its policy is in best/
            evaluations_without_gain=0,
            halvings=0,  # of the learning rate, by LR_SCHEDULER_TYPE = "plateau"
            log_sizes={},  # bytes of each log when the checkpoint was saved
            wandb_id=None,
        )
        self.seed_step()  # for the first weights of adapters
        try:
            self.load_models(self.run.checkpoint)
            if self.run.checkpoint:
                self.load_state(self.run.checkpoint)
        except (TypeError, AttributeError, NameError):
            raise  # a mistake in the program
        except Exception as error:  # the libraries raise many types
            resumed = self.run.checkpoint or RESUME
            fault = f"ACTOR_MODEL={ACTOR_MODEL} or RESUME={resumed} cannot be loaded"
            raise UserError(f"{fault} ({type(error).__name__}: {first_line(error)})") from error
        self.reward_functions = find_functions(REWARD_FUNCTIONS)  # [(name, function, weight)]
        self.accuracy_function = find_function(ACCURACY_FUNCTION)
        self.reward_parts = {}  # {name: (rows,)}, filled by compute_rewards() and logged
        self.train_rows = load_rows(TRAIN_DATASETS, self.tokenizer)
        self.eval_rows = []
        for spec in EVAL_DATASETS:
            self.eval_rows += load_rows([spec], self.tokenizer)[:MAX_EVAL_PROMPTS]
        self.run.facts["data"] = digest(self.train_rows)
        rows = self.train_rows + self.eval_rows
        complete_columns(rows)
        check_answers(self.reward_functions, rows)
        warn_of_data(self.train_rows, self.eval_rows, {ACTOR_MODEL: self.tokenizer})
        longest = max(map(len, column(rows, "ids")))
        check_limits(self.actor, chain(self.end_ids, *column(rows, "ids")), longest + MAX_NEW_TOKENS)
        if PREFILTER == "gt_prob" and (ANSWER_FORM is None or None in column(self.train_rows, "answer")):
            raise UserError('PREFILTER = "gt_prob" needs ANSWER_FORM and the key "output" of the data')
        self.rounds = 1 if STAGE == "train" else ROUNDS
        self.total_steps = math.inf if MAX_STEPS is None else MAX_STEPS  # until prepare_round() sets it
        self.seconds = Counter()

    def load_models(self, checkpoint):
        """The actor comes from the checkpoint if there is one."""
        saved = checkpoint and checkpoint / "policy"
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(ACTOR_MODEL)
        self.actor = load_trained(transformers.AutoModelForCausalLM, ACTOR_MODEL, saved).to(self.device)
        self.models = {"policy": self.actor}  # what a checkpoint holds
        self.optimizers = {"policy": make_optimizer(self.actor, LEARNING_RATE)}
        self.end_ids = find_end_ids(self.actor, self.tokenizer)
        prefill(self.actor, [[0]])  # refuses a model without a KV cache

    # ------------------------------------------------------------ the algorithm

    def train(self):
        """Mines, checks up and trains, round by round, until the last step, a signal, or patience ends
        it. Returns the last evaluation."""
        state = self.state
        is_mined = STAGE == "mine" and candidates_path(self.run.folder, 1).exists()
        is_complete = is_mined or state.round > self.rounds or self.is_over()
        self.run.open(state, is_complete)  # opens the logs and catches signals
        counts = f"{len(self.train_rows)} prompts and {len(self.eval_rows)} held out"
        self.run.log(f"{counts}, on {self.device}")
        self.copy_candidates()
        self.save()  # the first round mines from this checkpoint
        while state.round <= self.rounds and not self.is_over():
            if not self.prepare_round() or STAGE == "mine":  # mines and checks up
                break
            if not state.evaluation:
                self.log_evaluation(self.validate() | self.evaluate())
            while state.step < self.round_end and not self.is_over():
                state.step += 1
                self.seconds = Counter()
                self.seed_step()
                batch = self.next_batch()  # candidates and their weights
                metrics = self.update(batch)
                self.record(batch, metrics)
                is_last = state.step in (self.round_end, self.total_steps)
                if is_last or (EVAL_EVERY_N_STEPS and state.step % EVAL_EVERY_N_STEPS == 0):
                    self.log_evaluation(self.validate() | self.evaluate())
                if SAVE_EVERY_N_STEPS and state.step % SAVE_EVERY_N_STEPS == 0 and not is_last:
                    self.save()
            if state.step >= self.round_end:
                state.round += 1
                state.round_start = state.step
                self.save()  # the next round mines from this checkpoint
        if state.step and (not state.evaluation or not (self.run.folder / "best/policy").exists()):
            self.save_best()
        self.save()
        self.run.close(state)
        return state.evaluation

    def seed_step(self, chunk=0):
        """Makes a step's random numbers a function of its number: a checkpoint need not keep any."""
        seed = (1_000_003 * SEED + 104_729 * chunk + self.state.step) % 2**32
        transformers.set_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def is_over(self):
        self.run.signal = max(all_gather(self.run.signal))  # any process may have got it
        waited = self.state.evaluations_without_gain
        has_patience = EARLY_STOPPING_PATIENCE == 0 or waited < EARLY_STOPPING_PATIENCE
        return self.run.signal > 0 or not has_patience or self.state.step >= self.total_steps

    def copy_candidates(self):
        """A run that continues from a checkpoint of another folder takes its candidates from there."""
        if rank > 0 or not self.run.checkpoint:
            return
        for number in range(1, self.state.round + 1):
            path = candidates_path(self.run.folder, number)
            source = self.run.checkpoint.parent / path.name
            if source.exists() and not path.exists():
                shutil.copy(source, path)

    def prepare_round(self):
        """Mines the round's candidates unless they are there, and plans its steps. Returns False if a
        signal stopped the mining."""
        state = self.state
        path = candidates_path(self.run.folder, state.round)
        is_mined = all_gather(path.exists())[0]  # as process 0 sees it
        if not is_mined:
            is_mined = self.mine(path)
        if not is_mined:
            return False
        groups = read_candidates(path, self.train_rows)
        # Those of the first round always: then pick_accuracy compares policies on the same candidates
        first_round = read_candidates(candidates_path(self.run.folder, 1), self.train_rows)
        self.validation_groups = [group for group in first_round if is_for_validation(group[0].row)]
        self.train_groups = []
        for group in groups:
            rewards = shaped_rewards(group)
            if rewards.isnan().any():
                lacks = f"a candidate of {group[0].row['id']} lacks what REWARD_MODE reads"
                raise UserError(f"{path}: {lacks}, or a mode gives NaN")
            rewards_differ = rewards.max() - rewards.min() > 1e-6  # equal ones teach nothing
            if rewards_differ and not is_for_validation(group[0].row):
                self.train_groups.append(group)
        prompts_per_step = BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS
        self.steps_per_epoch = math.ceil(len(self.train_groups) / prompts_per_step)
        steps = NUM_EPOCHS * self.steps_per_epoch
        self.round_end = state.round_start + steps
        # The schedules of TAU and the learning rate need the number of steps. Later rounds, which are
        # not mined yet, count as long as this one
        rounds_left = self.rounds - state.round + 1
        planned = state.round_start + max(1, rounds_left * steps)  # a round of equal rewards has no step
        self.total_steps = min(planned, math.inf if MAX_STEPS is None else MAX_STEPS)
        if state.step == state.round_start:  # a run that resumes within a round has logged it already
            figures = {"trained_prompts": len(self.train_groups), **check_up(groups)}
            self.run.write("metrics.jsonl", phase="mine", step=state.step, round=state.round, **figures)
            texts = [f"{name} {x:.3g}" for name, x in figures.items()]
            self.run.log(f"Check-up of {path}: " + "  ".join(texts))
        if state.round == 1 and not self.train_groups and STAGE != "mine":
            raise UserError(f"{path}: no prompt to train on has two candidates of unequal rewards")
        return True

    def next_batch(self):
        """Returns the candidates of the step's prompts, see make_batch(), with tau, their rewards and
        weights (rows,), and prompt_weights, the weights of each prompt. Each epoch has its own order."""
        epoch, place = divmod(self.state.step - self.state.round_start - 1, self.steps_per_epoch)
        self.epoch = (self.state.round - 1) * NUM_EPOCHS + epoch + 1
        generator = torch.Generator().manual_seed(SEED + self.epoch)
        order = torch.randperm(len(self.train_groups), generator=generator)
        chosen = order.split(BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS)[place]
        groups = [self.train_groups[i] for i in chosen]
        batch = make_batch(list(chain(*groups)))
        batch.tau = tau_at(self.state.step - 1, self.total_steps)
        rewards = list(map(shaped_rewards, groups))
        batch.prompt_weights = [rce_weights(prompt_rewards, batch.tau) for prompt_rewards in rewards]
        batch.weights = torch.cat(batch.prompt_weights).float()
        batch.rewards = torch.cat(rewards).float()
        return batch

    def update(self, batch):
        """Makes one optimizer step on the batch. The loss is that of all its rows: a process adds up its
        micro-batches, then the processes add up their gradients. Returns the step's metrics."""
        scale = learning_rate_scale(self.state.step - 1, self.total_steps, self.state.halvings)
        set_learning_rate(self.optimizers["policy"], scale)
        started = time.perf_counter()
        sums = Counter()
        micros = micro_batches(batch, torch.arange(len(batch.rows)), MICRO_BATCH_ROWS)
        # All processes have the same list; each takes every world_size-th micro-batch
        for micro in progress(micros[rank::world_size], "micro-batches"):
            logprobs, entropy = logprobs_and_entropy(self.actor, batch, micro)
            mask = batch.mask[micro, : logprobs.shape[1]].to(self.device)
            weights = batch.weights[micro].to(self.device)

            loss = rce_loss(logprobs, mask, weights) / len(batch.prompt_weights)  # add a term here
            loss.backward()

            sums["policy_loss"] += loss.detach()
            sums["entropy"] += (mask * entropy).sum() / batch.mask.sum()
        metrics = clip_and_step(self.optimizers, sums, self.run)
        self.seconds["update"] += time.perf_counter() - started
        return {**metrics, "learning_rate": LEARNING_RATE * scale}

    # ------------------------------------------------------------ mining

    @torch.no_grad()
    def mine(self, path):
        """Writes the candidates of this round into the file `path`, and returns True; False if a signal
        stops it. Each BATCH_SIZE prompts have a file of their own until all are mined: a killed run
        continues."""
        is_given = CANDIDATES is not None and path == Path(CANDIDATES)
        was_mined = self.state.step > self.state.round_start
        if STAGE == "train" or is_given or was_mined:
            raise UserError(f"there is no file {path}: run STAGE=mine first, or correct CANDIDATES")
        # The next MINE_PROMPTS of a random order. Validation prompts are of use in the first round only
        order = torch.randperm(len(self.train_rows), generator=torch.Generator().manual_seed(SEED))
        count = min(MINE_PROMPTS or len(order), len(order))
        first = count * (self.state.round - 1)
        places = [
            i % len(order) for i in range(first, first + count)
        ]  # after the last prompt the first again
        rows = [self.train_rows[i] for i in order[places]]
        rows = [row for row in rows if self.state.round == 1 or not is_for_validation(row)]
        # A part's name has a checksum of program, data and constants: parts of others are not taken
        values = constants()
        for name in ("RESUME", "OUTPUT_DIR", "STAGE"):
            del values[name]
        settings = repr([values, self.run.facts["text"], self.run.facts["data"]])
        checksum = zlib.crc32(settings.encode())
        files = []
        for first in range(0, len(rows), BATCH_SIZE):
            files.append(path.with_suffix(".parts") / f"{first:08d}_{checksum}.parquet")
            if all_gather(files[-1].exists())[0]:
                continue
            self.seed_step(first + 1)  # 0 is that of a training step
            records = self.mine_prompts(rows[first : first + BATCH_SIZE])
            if rank == 0:
                write_parquet(records, files[-1])
            num_mined = min(first + BATCH_SIZE, len(rows))
            self.run.log(f"Round {self.state.round}: mined {num_mined} of {len(rows)} prompts")
            if self.is_over():
                return False
        if rank == 0:
            mined = [pyarrow.parquet.read_table(file).to_pylist() for file in files]
            write_parquet(list(chain(*mined)), path)
            shutil.rmtree(path.with_suffix(".parts"), ignore_errors=True)
        all_gather(None)  # wait for the file
        return True

    def mine_prompts(self, rows):
        """Proposes candidates for some prompts, scores them for the pre-filter, and verifies them.
        Every process draws the numbers for all prompts, and takes its share of them. Returns the
        candidates of all processes as records of a file, prompt after prompt."""
        uniform = torch.rand(len(rows), GROUP_SIZE, MAX_NEW_TOKENS, generator=self.generator)
        groups = self.propose(share(rows), share(uniform))
        candidates = list(chain(*groups))
        logprobs = all_logprobs(self.actor, make_batch(candidates)).double().sum(1)
        for candidate, logprob in zip(candidates, logprobs.tolist()):
            candidate.logprob = logprob
        self.score_gold(candidates)
        self.verify(list(chain(*map(choose_verified, groups))))
        # Without both a right and a wrong candidate a prompt teaches little: verify the rest as well
        others = []
        for group in groups:
            hard = [candidate.hard for candidate in group]
            if 0 not in hard or 1 not in hard:
                others += [candidate for candidate in group if candidate.eval_mode == "unverified"]
        self.verify(others)
        own = [to_record(candidate) for candidate in candidates]
        records = list(chain(*all_gather(own)))  # of all processes, by rank
        errors = [record["eval_error"] for record in records if record["eval_failed"]]
        if errors and len(errors) == len(records):
            raise UserError(f"the reward failed for all candidates: {errors[0]}")
        if errors:
            self.run.log(f"WARNING: the reward failed for {len(errors)} candidates: {errors[0]}")
        return records

    def propose(self, rows, uniform):
        """Returns the candidates of each prompt, one list per prompt. Equal ones are merged and list
        their sources. uniform (rows, GROUP_SIZE, MAX_NEW_TOKENS) decides the samples."""
        greedy = self.respond(rows, None)
        check_scoring(self.actor, greedy)
        # Each is (number of the row, ids, source, temperature)
        proposals = [(i, ids, "greedy", None) for i, ids in enumerate(greedy.response_ids)]
        with autocast(self.device):
            beams = beam_search(self.actor, column(rows, "ids"), self.end_ids)
        for i, ids in enumerate(beams):
            proposals.append((i // BEAMS, ids, "beam", None))
        # Each sample of a prompt has its temperature: all are drawn in one go
        count = len(SAMPLE_TEMPERATURES)
        of_prompt = [float(SAMPLE_TEMPERATURES[i % count]) for i in range(GROUP_SIZE)]
        temperatures = of_prompt * len(rows)
        repeated = [row for row in rows for _ in range(GROUP_SIZE)]
        samples = self.respond(repeated, uniform.flatten(0, 1), temperatures)
        for i, ids in enumerate(samples.response_ids):
            proposals.append((i // GROUP_SIZE, ids, "sample", temperatures[i]))
        for i, row in enumerate(rows):
            if INCLUDE_REFERENCE and isinstance(row["answer"], str):
                ids = self.tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
                if len(ids) < MAX_NEW_TOKENS:
                    proposals.append((i, [*ids, self.end_ids[0]], "reference", None))

        groups = [{} for _ in rows]  # {token ids: candidate} of each prompt
        for i, ids, source, temperature in proposals:
            key = tuple(ids)
            if key not in groups[i]:
                is_truncated = ids[-1] not in self.end_ids
                text = self.tokenizer.decode(ids if is_truncated else ids[:-1])
                groups[i][key] = Candidate(rows[i], ids, text, truncated=is_truncated)
            candidate = groups[i][key]
            candidate.source.append(source)
            candidate.temperature.append(temperature)
        return [list(group.values()) for group in groups]

    def score_gold(self, candidates):
        """Sets gt_prob of each candidate, None if its row has no answer or ANSWER_FORM is None."""
        candidates_of = defaultdict(list)  # {(row id, reasoning, gold answer): candidates}, scored once
        for candidate in candidates:
            row = candidate.row
            if row["answer"] is None or ANSWER_FORM is None:
                continue
            candidate.gt_prob = 0.0
            reasoning, golds = gold_after_reasoning(
                self.tokenizer, row["answer"], candidate.text, self.end_ids[0]
            )
            for gold in golds:
                candidates_of[row["id"], tuple(reasoning), tuple(gold)].append(candidate)
        to_score = []  # candidates by their row and ids only, as make_batch() takes them
        for (_, reasoning, gold), same in candidates_of.items():
            to_score.append(Candidate(same[0].row, [*reasoning, *gold]))
        logprobs = all_logprobs(self.actor, make_batch(to_score))
        for ((_, reasoning, _), same), gold_logprobs in zip(candidates_of.items(), logprobs):
            for candidate in same:
                candidate.gt_prob += gold_probability(gold_logprobs, len(reasoning))

    def verify(self, candidates):
        """Sets the rewards of candidates. All are scored in one call. If that raises, they are scored
        one by one, and those that raise are marked as failed."""
        if not candidates:
            return
        batch = SimpleNamespace(rows=[candidate.row for candidate in candidates])
        batch.texts = [candidate.text for candidate in candidates]
        batch.response_ids = [candidate.token_ids for candidate in candidates]
        try:
            self.score_responses(batch)
        except UserError:
            raise
        except Exception as error:  # a reward function may raise anything
            if len(candidates) == 1:
                candidates[0].eval_mode = "failed"
                candidates[0].eval_error = f"{type(error).__name__}: {first_line(error)}"
                return
            for candidate in candidates:
                self.verify([candidate])
            return
        if not {HARD_REWARD, SOFT_REWARD} <= self.reward_parts.keys():
            names = ", ".join(self.reward_parts)
            raise UserError(f"HARD_REWARD and SOFT_REWARD are not both among {names}")
        for i, candidate in enumerate(candidates):
            candidate.eval_mode = "verified"
            candidate.rewards = {name: values[i].item() for name, values in self.reward_parts.items()}
            candidate.hard = candidate.rewards[HARD_REWARD]
            candidate.soft = candidate.rewards[SOFT_REWARD]
            if candidate.hard not in (0, 1) or not 0 <= candidate.soft <= 1:
                given = f"{candidate.hard} and {candidate.soft}"
                raise UserError(f"HARD_REWARD gives 0 or 1, SOFT_REWARD 0 to 1, not {given}")

    # ------------------------------------------------------------ rewards

    def respond(self, rows, uniform, temperatures=None):
        """Samples a response to each row of the data; uniform (rows, MAX_NEW_TOKENS) decides the
        tokens, None takes the likeliest; temperatures (rows,) are TEMPERATURE if None. Returns a batch
        on the CPU: rows, texts, response_ids (lists); truncated, lengths (rows,); ids, logprobs, mask
        (1: a token that the policy sampled) (rows, R)."""
        batch = SimpleNamespace(rows=rows)
        batch.ids = torch.full((len(rows), MAX_NEW_TOKENS), self.end_ids[0])
        batch.logprobs = torch.zeros(batch.ids.shape)
        temperatures = torch.tensor(temperatures or [TEMPERATURE] * len(rows), device=self.device)
        for first in range(0, len(rows), BATCH_SIZE * GROUP_SIZE):  # the cache of more may not fit
            part = slice(first, first + BATCH_SIZE * GROUP_SIZE)
            numbers = None if uniform is None else uniform[part].to(self.device)
            with autocast(self.device):  # around all tokens: the weights are cast once
                prompts = column(rows[part], "ids")
                sampled = generate(self.actor, prompts, numbers, self.end_ids, temperatures[part])
            batch.ids[part], batch.logprobs[part] = sampled
        is_end = torch.isin(batch.ids, torch.tensor(self.end_ids))
        num_ends = is_end.cumsum(1)  # up to each token, itself included
        is_first_end = is_end & (num_ends == 1)
        batch.mask = ((num_ends == 0) | is_first_end).float()
        if not batch.logprobs.isfinite().all():
            raise UserError("probabilities are not finite: lower LEARNING_RATE, RESUME an earlier step")
        batch.logprobs *= batch.mask
        batch.truncated = ~is_end.any(1)
        batch.lengths = batch.mask.sum(1).long()
        batch.response_ids, batch.texts = [], []
        for ids, length, is_truncated in zip(batch.ids.tolist(), batch.lengths, batch.truncated):
            ids = ids[:length]
            batch.response_ids.append(ids)
            without_end = ids if is_truncated else ids[:-1]
            batch.texts.append(self.tokenizer.decode(without_end))  # other special tokens stay
        return batch

    def score_responses(self, batch):
        """Adds the scores of the responses, (rows,), and reward_parts, what they consist of."""
        self.reward_parts = {}
        prompts, texts, answers, columns = reward_arguments(batch)
        batch.scores = torch.as_tensor(self.compute_rewards(prompts, texts, answers, **columns)).float()
        batch.reward_parts = {name: torch.as_tensor(part) for name, part in self.reward_parts.items()}

    def compute_rewards(self, prompts, responses, answers, **columns):
        """Returns the score of each response, (rows,). Edit or override freely. columns: response_ids,
        and the columns of the data. What you put into self.reward_parts is logged as reward/<name>."""
        total = torch.zeros(len(responses))
        for name, function, weight in self.reward_functions:
            values = torch.tensor(call_reward(function, prompts, responses, answers, columns))
            self.reward_parts[name] = values
            total += weight * values
        return total

    # ------------------------------------------------------------ evaluation, logs, checkpoints

    @torch.no_grad()
    def validate(self):
        """Returns how often the policy's pick, its likeliest verified candidate, is right on the
        validation prompts. It calls no reward function."""
        if not self.validation_groups:
            return {}
        groups = share(self.validation_groups)
        logprobs = all_logprobs(self.actor, make_batch(list(chain(*groups)))).double().sum(1)
        hard = []
        sizes = [len(group) for group in groups]
        for group, group_logprobs in zip(groups, logprobs.split(sizes)):
            hard.append(group[group_logprobs.argmax()].hard)
        hard = list(chain(*all_gather(hard)))
        return {"pick_accuracy": sum(hard) / len(hard)}

    def evaluate(self, prompts=None, answers=None):
        """Returns metrics of greedy and sampled responses to held-out prompts, or to your `prompts`."""
        rows = self.eval_rows
        if prompts is not None:
            answers = answers or [None] * len(prompts)
            rows = [make_row(self.tokenizer, *pair) for pair in zip(prompts, answers, strict=True)]
        if not rows:
            return {}
        generator = torch.Generator().manual_seed(SEED + 1)
        uniform = torch.rand(len(rows), EVAL_SAMPLES, MAX_NEW_TOKENS, generator=generator)
        repeated = [row for row in share(rows) for _ in range(EVAL_SAMPLES)]
        sampled = self.respond(repeated, share(uniform).flatten(0, 1))
        metrics = {}
        if None not in column(rows, "answer"):
            correct = self.correct(sampled).view(-1, EVAL_SAMPLES)
            metrics["accuracy_greedy"] = self.correct(self.respond(share(rows), None)).mean().item()
            metrics["accuracy_sampled"] = correct.mean().item()
            metrics[f"pass@{EVAL_SAMPLES}"] = correct.amax(1).mean().item()
        if prompts is None or None not in answers:  # check_answers() has seen the held-out rows
            self.score_responses(sampled)
        return metrics | self.response_metrics(join(all_gather(sampled)))

    def correct(self, batch):
        """Returns ACCURACY_FUNCTION of the responses of all processes, (rows,)."""
        values = call_reward(self.accuracy_function, *reward_arguments(batch))
        return torch.tensor(list(chain(*all_gather(values))))

    def generate_response(self, prompt, greedy=True):
        """Returns one response to a prompt, a text or a chat."""
        uniform = None if greedy else torch.rand(1, MAX_NEW_TOKENS)
        return self.respond([make_row(self.tokenizer, prompt)], uniform).texts[0]

    def record(self, batch, metrics):
        """Logs the step's metrics, some of its candidates, and its line on the terminal."""
        step = self.state.step
        metrics = {
            "epoch": self.epoch,
            "round": self.state.round,
            **metrics,
            "tau": batch.tau,
            "effective_candidates": np.mean([entr(w).sum().exp() for w in batch.prompt_weights]).item(),
            "weight_on_best": np.mean([w.max() for w in batch.prompt_weights]).item(),
            "candidate_reward": batch.rewards.mean().item(),
            "weighted_reward": (batch.weights * batch.rewards).sum().item() / len(batch.prompt_weights),
            "response_length": batch.mask.sum(1).mean().item(),
            **{f"seconds/{name}": seconds for name, seconds in self.seconds.items()},
        }
        self.run.write("metrics.jsonl", phase="train", step=step, **metrics)
        num_samples = min(LOG_SAMPLES, len(batch.rows))
        for i in torch.linspace(0, len(batch.rows) - 1, num_samples).long().tolist():
            row, candidate = batch.rows[i], batch.candidates[i]
            sample = {name: row[name] for name in ("id", "prompt", "answer")}
            sample |= {name: getattr(candidate, name) for name in ("source", "hard", "soft", "gt_prob")}
            sample |= {"response": candidate.text}
            sample |= {"reward": batch.rewards[i].item(), "weight": batch.weights[i].item()}
            self.run.write("samples.jsonl", step=step, **sample)
        eta = timedelta(seconds=round(sum(self.seconds.values()) * (self.total_steps - step)))
        self.run.log(
            f"Epoch {self.epoch}/{NUM_EPOCHS * self.rounds}: PL:{metrics['policy_loss']:.4f} "
            f"R:{metrics['weighted_reward']:.2f} N:{metrics['effective_candidates']:.1f} "
            f"E:{metrics['entropy']:.3f} LR:{metrics['learning_rate']:.2e}  "
            f"step {step}/{self.total_steps}, {eta} left"
        )

    def response_metrics(self, batch):
        """Returns means over responses."""
        metrics = {}
        if hasattr(batch, "scores"):
            metrics["reward"] = batch.scores.mean().item()
            for name, part in batch.reward_parts.items():
                metrics[f"reward/{name}"] = part.float().mean().item()
        metrics["response_length"] = batch.mask.sum(1).mean().item()
        metrics["truncated_fraction"] = batch.truncated.float().mean().item()
        return metrics

    def log_evaluation(self, metrics):
        """Logs what validate() and evaluate() returned. best/ keeps the policy with the highest
        pick_accuracy or, without validation prompts, the highest reward; of equal ones the last."""
        state = self.state
        state.evaluation = metrics
        if not metrics:
            return
        self.run.write("metrics.jsonl", phase="eval", step=state.step, **metrics)
        texts = [f"{name} {x:.3f}" for name, x in metrics.items()]
        self.run.log(f"step {state.step}, held out: " + "  ".join(texts))
        score = metrics.get("pick_accuracy", metrics.get("reward"))
        gain = score - state.best_score
        state.evaluations_without_gain += 1
        if gain > EARLY_STOPPING_THRESHOLD:
            state.evaluations_without_gain = 0
        elif state.evaluations_without_gain % 2 == 0:
            state.halvings += 1
        if gain >= 0:  # equal picks are common: then the policy that was trained longer
            state.best_score = score
            self.save_best()

    def save_best(self):
        """Writes best/policy/. An adapter is merged into the weights, so that it loads without PEFT."""
        if rank > 0:
            return
        policy = self.actor
        if LORA_RANK:  # merged on the CPU: a GPU may have no room for another model
            policy = deepcopy(self.actor.cpu()).float().merge_and_unload()
            self.actor.to(self.device)
        with atomic_folder(self.run.folder / "best/policy") as folder:
            policy.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    def save(self):
        """Writes step_N/ if it is not there yet, removes old checkpoints and draws the plots."""
        folder = self.run.folder / f"step_{self.state.step}"
        self.run.checkpoint = folder  # if train() is called again, it resumes from here
        if rank > 0 or folder.exists():
            return
        self.run.log(f"Saving {folder}")
        self.state.log_sizes = {name: file.tell() for name, file in self.run.logs.items()}
        with atomic_folder(folder) as tmp:
            for name, model in self.models.items():
                model.save_pretrained(tmp / name)
            self.tokenizer.save_pretrained(tmp / "policy")
            optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
            trained = self.trained_names()
            saved = {"state": vars(self.state), "optimizers": optimizers, "trained": trained}
            torch.save(saved, tmp / "training_state.pt")
            shutil.copy(self.run.folder / "training_config.json", tmp / "run.json")
        for old in list_checkpoints(self.run.folder)[:-KEEP_LAST_N_CHECKPOINTS]:
            # A folder that is half deleted must not look like a checkpoint
            removed = old.rename(f"{old}.tmp")
            shutil.rmtree(removed)
        draw_grid(self.run.folder, "training_metrics_detailed.png")
        draw_grid(self.run.folder, f"{Path(__file__).stem}_metrics_with_entropy.png", PANELS)

    def trained_names(self):
        """Returns class and names of parameters of each optimizer: a resumed run must have the same."""
        trained = {}
        for key, optimizer in self.optimizers.items():
            names = {parameter: name for name, parameter in self.models[key].named_parameters()}
            groups = [[names.get(p) for p in group["params"]] for group in optimizer.param_groups]
            trained[key] = [type(optimizer).__name__, *groups]
        return trained

    def load_state(self, folder):
        """Restores state and optimizers; load_models() took the weights from the same folder."""
        saved = torch.load(folder / "training_state.pt", map_location="cpu", weights_only=True)
        if saved.get("trained") != self.trained_names():
            raise UserError("the run trained other parameters, in another order or by another optimizer")
        for name, optimizer in self.optimizers.items():
            moments = saved["optimizers"][name]["state"]  # not the learning rate: the constants set it
            optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
        for name, value in saved["state"].items():
            tensor = getattr(self.state, name, None)
            if torch.is_tensor(tensor):
                tensor.detach().copy_(value)  # in place: an optimizer may train it
            else:
                setattr(self.state, name, value)


# ================================================================ models


def load_model(auto_class, path, is_trained=False):
    """Returns a model in evaluation mode, in which it stays. Missing weights are an error. Linear
    layers that are not trained, except the head, are stored in DTYPE: autocast would cast them at each
    call."""
    options = {"output_loading_info": True, "dtype": torch.float32, "attn_implementation": ATTENTION}
    model, info = auto_class.from_pretrained(path, **options)
    missing = info["missing_keys"] | {key[0] for key in info["mismatched_keys"]}
    if missing:
        raise UserError(f"the model {path} lacks the weights {', '.join(sorted(missing))}")
    if getattr(model, "peft_config", None):  # a PEFT adapter: all its model's weights would be trained
        base = next(iter(model.peft_config.values())).base_model_name_or_path
        raise UserError(f"{path} is an adapter of {base}: merge it, or name the run's best/policy")
    for parameter in model.parameters():
        # Weights that are mapped from a file may be unaligned, which changes a product's last bit
        parameter.data = parameter.data.clone()
    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and layer not in heads and not is_trained:
            layer.to(getattr(torch, DTYPE))
    return model.requires_grad_(is_trained).eval()


def load_trained(auto_class, path, saved):
    """Returns a model to train, with LoRA's adapter: from the checkpoint folder `saved`, or path."""
    if saved and (saved / "adapter_config.json").exists() != (LORA_RANK > 0):
        raise UserError(f"{saved} was trained with another LORA_RANK")
    if LORA_RANK == 0:
        model = load_model(auto_class, saved or path, is_trained=True)
    else:
        import peft  # slow

        options = {"r": LORA_RANK, "lora_alpha": LORA_ALPHA, "target_modules": "all-linear"}
        base = load_model(auto_class, path)
        if base.config.model_type in ("falcon_h1", "nemotron_h"):
            options["exclude_modules"] = ["out_proj", "conv1d"]  # PEFT refuses them
        model = peft.get_peft_model(base, peft.LoraConfig(**options, task_type="CAUSAL_LM"))
        frozen = [name for name, _ in model.named_parameters() if name.endswith(".experts.down_proj")]
        if frozen and rank == 0:
            print(f"LORA_RANK adapts linear layers: experts stay frozen, as {frozen[0]}")
        if saved:
            peft.set_peft_model_state_dict(model, peft.load_peft_weights(saved, "cpu"))
    if GRADIENT_CHECKPOINTING:
        # Not by transformers' gradient_checkpointing_enable(): it needs training mode, with dropout
        options = {"use_reentrant": False, "preserve_rng_state": False}
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.forward = partial(checkpoint, layer.forward, **options)
    return model.eval()


def autocast(device):
    return torch.autocast(device.type, torch.bfloat16, enabled=DTYPE == "bfloat16")


def make_optimizer(model, learning_rate):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=WEIGHT_DECAY, fused=True)


def set_learning_rate(optimizer, scale):
    """Sets the learning rate of each parameter group to `scale` times the one that it was made with."""
    for group in optimizer.param_groups:
        if "initial_lr" not in group:
            group["initial_lr"] = group["lr"]
        group["lr"] = scale * group["initial_lr"]


def clip_and_step(optimizers, sums, run):
    """Adds up the gradients of all processes, and steps if all numbers are finite. sums: this process's
    metrics, 0-d tensors. Returns the metrics of all processes."""
    norms = {}
    for name, optimizer in optimizers.items():
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            if parameter.grad is None:  # this process had no micro-batch
                parameter.grad = torch.zeros_like(parameter)
            if world_size > 1:
                dist.all_reduce(parameter.grad)
        norms[f"{name}_grad_norm"] = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
    numbers = torch.stack([*sums.values(), *norms.values()]).tolist()  # the only wait for the device
    sums_here = dict(zip(sums, numbers[: len(sums)]))
    metrics = dict(zip(norms, numbers[len(sums) :]))
    for sums_of_process in all_gather(sums_here):
        for name, number in sums_of_process.items():
            metrics[name] = metrics.get(name, 0.0) + number
    is_finite = all(map(math.isfinite, metrics.values()))
    for optimizer in optimizers.values():
        if is_finite:
            optimizer.step()
        optimizer.zero_grad()
    if not is_finite:
        run.log("WARNING: skipped an optimizer step that is not finite")
    return metrics


def check_limits(model, ids, length):
    """Refuses token ids that the model has no embedding for, and texts longer than its positions: on a
    GPU they would end the process."""
    count = model.get_input_embeddings().num_embeddings
    if max(ids, default=0) >= count:
        raise UserError(f"{model.name_or_path} has {count} embeddings: too few for its tokenizer's ids")
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    if length > limit * (rope.get("factor") or 1):
        fault = "too few for the longest text with its response"
        raise UserError(f"{model.name_or_path} has {limit} positions: {fault}, {length} tokens")


def find_end_ids(model, tokenizer):
    """Returns the ids at which sampling stops, with which the model is saved: the token by which the
    chat template ends a turn, the tokenizer's EOS, and those of the generation config."""
    ends = model.generation_config.eos_token_id
    if not isinstance(ends, list):
        ends = [ends]
    ends = [tokenizer.eos_token_id, *ends]
    if tokenizer.chat_template:  # the end of a turn follows the assistant's text
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "xyzzy"}]
        after = tokenizer.apply_chat_template(messages, tokenize=False).rpartition("xyzzy")[2].strip()
        end_of_turn = tokenizer(after, add_special_tokens=False)["input_ids"][:1]
        ends = [id for id in end_of_turn if id in tokenizer.added_tokens_decoder] + ends
    ends = [id for id in dict.fromkeys(ends) if id is not None]
    if not ends:
        raise UserError(f"ACTOR_MODEL = {ACTOR_MODEL!r} has no EOS token: set its tokenizer's eos_token")
    model.generation_config.eos_token_id = ends
    return ends


# ================================================================ sampling and scoring
# Each distinct prompt runs once for all its rows (prefill). They continue from its keys and values:
# in the rollout token by token (decode), in scoring all tokens at once, in the update with a gradient.


class Cache(transformers.DynamicCache):
    """Keys and values in DTYPE: rotary embeddings turn keys into float32."""

    place = None  # (1,) in a Decoder, if all layers have full attention: where the next token goes
    length = None  # how many places attention then reads

    def update(self, keys, values, number, *args, **kwargs):
        keys, values = keys.to(getattr(torch, DTYPE)), values.to(getattr(torch, DTYPE))
        if self.place is None:
            return super().update(keys, values, number, *args, **kwargs)
        layer = self.layers[number]
        layer.keys.index_copy_(2, self.place, keys)
        layer.values.index_copy_(2, self.place, values)
        return layer.keys[:, :, : self.length], layer.values[:, :, : self.length]


def takes_4d_mask(model, cache):
    """Returns whether forward() may pass its own mask (rows, 1, T, tokens), which is added to the
    scores: all layers have full attention, by sdpa, without alibi."""
    config = model.config
    is_full = all(type(layer) is DynamicLayer for layer in cache.layers)
    return is_full and config._attn_implementation == "sdpa" and not getattr(config, "alibi", False)


def forward(model, ids, mask, cache=None):
    """Returns the output of a model without its head, for ids (rows, T). mask covers the cache, too."""
    num_cached = mask.shape[1] - ids.shape[1]
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, num_cached:]  # padding on the left has none
    if cache is not None and cache.get_seq_length() > 0 and takes_4d_mask(model, cache):
        # (rows, 1, T, tokens). In DTYPE: else each layer would convert the mask, and keep its own copy
        is_seen = mask.bool()[:, None, None].expand(-1, 1, ids.shape[1], -1)
        is_seen = is_seen.tril(num_cached)  # causal: token t of ids sees num_cached + t + 1 tokens
        mask = torch.zeros(is_seen.shape, dtype=getattr(torch, DTYPE), device=mask.device)
        mask = mask.masked_fill(~is_seen, -math.inf)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    with autocast(model.device):
        return model.get_decoder()(**inputs, past_key_values=cache, use_cache=cache is not None)


def head(model, output, hidden):
    """Returns the logits (tokens, vocabulary) of hidden states (tokens, width), or the values (tokens,
    1) of a model with a head `score`, in float32. Some models scale or cap their logits, so the model's
    own forward() computes them: for this call the rest of the model is replaced by its result."""
    decoder = model.get_decoder()
    hidden = hidden.float()
    with torch.autocast(model.device.type, enabled=False):
        if hasattr(model, "score"):
            return model.score(hidden)
        result = type(output)(last_hidden_state=hidden.unsqueeze(0))
        decoder.forward = lambda *_, **__: result  # this attribute hides the method of its class
        try:
            return model(input_ids=hidden.new_zeros(1, len(hidden), dtype=torch.long)).logits[0]
        finally:
            del decoder.forward  # and the method is back


def pad_left(rows, device):
    """Returns lists of ids as one tensor, (rows, length of the longest), and its mask."""
    ids = [torch.tensor(row) for row in rows]
    mask = [torch.ones_like(row) for row in ids]
    options = {"batch_first": True, "padding_side": "left"}
    return pad_sequence(ids, **options).to(device), pad_sequence(mask, **options).to(device)


def prefill(model, prompts):
    """Runs the model once on each distinct prompt. prompts: a list of ids for each row. Returns the
    cache, the mask (rows, P) and the model's output without its head, whose last_hidden_state
    (rows, 1, width) is that of the last token."""
    prompts = list(map(tuple, prompts))
    distinct = list(dict.fromkeys(prompts))
    index_of = {prompt: index for index, prompt in enumerate(distinct)}
    rows = torch.tensor([index_of[prompt] for prompt in prompts], device=model.device)
    ids, mask = pad_left(distinct, model.device)  # (distinct prompts, P)
    cache = Cache(config=model.config)
    output = forward(model, ids, mask, cache)
    if getattr(output, "past_key_values", None) is not cache:
        raise UserError(f"{model.name_or_path} has no KV cache: it cannot be trained here")
    output.last_hidden_state = output.last_hidden_state[rows, -1:]
    cache.reorder_cache(rows)  # repeats the prompts' keys and values
    return cache, mask[rows], output


class Decoder:
    """Reads prompts, then one token per row at a time. self.logits (rows, vocabulary) predict the next.

    If all layers have full attention, a token is written into memory that does not move. There a GPU
    can run the kernels of a token as one CUDA graph: launching them one by one takes longer than
    running them."""

    def __init__(self, model, prompts):
        self.model = model
        self.cache, mask, output = prefill(model, prompts)
        self.logits = head(model, output, output.last_hidden_state[:, 0])
        self.padding = (mask == 0).sum(1, keepdim=True)  # places before each prompt
        self.length = self.capacity = mask.shape[1]
        self.place = torch.tensor([self.length], device=model.device)  # of the next token
        if takes_4d_mask(model, self.cache):
            self.cache.place = self.place  # else transformers appends to a copy
        self.uses_graph = CUDA_GRAPHS and model.device.type == "cuda" and self.cache.place is not None
        self.graph = None

    def select(self, rows):
        """Continues with these rows; a row may stand several times."""
        self.cache.reorder_cache(rows)
        self.padding = self.padding[rows]
        self.graph = None  # it reads the memory of before

    def decode(self, tokens):
        """Reads a token of each row, (rows,)."""
        if self.cache.place is not None and self.length == self.capacity:
            for layer in self.cache.layers:  # keys and values: (rows, heads, places, size)
                free = (*layer.keys.shape[:2], DECODE_BLOCK, layer.keys.shape[3])
                layer.keys = torch.cat([layer.keys, layer.keys.new_zeros(free)], 2)
                free = (*layer.values.shape[:2], DECODE_BLOCK, layer.values.shape[3])
                layer.values = torch.cat([layer.values, layer.values.new_zeros(free)], 2)
            self.capacity += DECODE_BLOCK
            self.graph = None
        self.length += 1
        if self.graph:
            self.tokens.copy_(tokens.unsqueeze(1))
            self.graph.replay()
            self.logits = self.graph_logits
            return
        self.tokens = tokens.unsqueeze(1)
        self.cache.length = self.capacity if self.uses_graph else self.length
        torch.use_deterministic_algorithms(False)  # a deterministic index_copy_ copies the whole cache
        self.logits = self.step()
        if self.uses_graph:  # the step above was the warm-up; the capture records one and runs nothing
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.graph_logits = self.step()
        torch.use_deterministic_algorithms(DETERMINISTIC)

    def step(self):
        """Reads self.tokens (rows, 1). Returns the logits after them, (rows, vocabulary)."""
        # With a graph the mask is as wide as the capacity, and 0 beyond the token: forward() counts the ones
        places = torch.arange(self.cache.length, device=self.model.device)
        mask = (places >= self.padding) & (places <= self.place)
        output = forward(self.model, self.tokens, mask.long(), self.cache)
        self.place += 1
        return head(self.model, output, output.last_hidden_state[:, 0])


def sample_tokens(probabilities, uniform):
    """Returns one id per row, (rows,): where the cumulative distribution passes uniform, (rows,)."""
    cumulative = probabilities.double().cumsum(-1)
    target = uniform.double().unsqueeze(1) * cumulative[:, -1:]  # their sum is 1 only up to rounding
    ids = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return ids.clamp(max=probabilities.shape[1] - 1)  # NaN would give an id beyond the vocabulary


@torch.no_grad()
def generate(model, prompts, uniform, end_ids, temperatures):
    """Samples a response to each prompt, see respond(). Returns ids and their log-probabilities, (rows,
    MAX_NEW_TOKENS), on the CPU; what follows an end id is arbitrary."""
    device = model.device
    decoder = Decoder(model, prompts)
    active = torch.arange(len(prompts), device=device)  # the rows that are not finished
    ids = torch.full((len(prompts), MAX_NEW_TOKENS), end_ids[0], device=device)
    logprobs = torch.zeros(len(prompts), MAX_NEW_TOKENS, device=device)
    ends = torch.tensor(end_ids, device=device)
    is_finished = torch.zeros_like(active, dtype=torch.bool)
    for t in progress(range(MAX_NEW_TOKENS), "tokens"):
        distribution = sampling_logprobs(decoder.logits, temperatures[active].unsqueeze(1))
        if uniform is None:
            tokens = distribution.argmax(-1)
        else:
            tokens = sample_tokens(distribution.exp(), uniform[active, t])
        ids[active, t] = tokens
        logprobs[active, t] = distribution.gather(1, tokens.unsqueeze(1)).squeeze(1)
        is_finished |= torch.isin(tokens, ends)
        if device.type == "cpu" or t % 16 == 15:  # to look for finished rows the CPU waits for the GPU
            keep = is_finished.logical_not().nonzero().squeeze(1)
            if len(keep) == 0:
                break
            if len(keep) <= 0.75 * len(active):  # dropping rows copies the cache: drop many at once
                decoder.select(keep)
                active, tokens, is_finished = active[keep], tokens[keep], is_finished[keep]
        if t + 1 < MAX_NEW_TOKENS:
            decoder.decode(tokens)
    return ids.cpu(), logprobs.cpu()


def response_output(model, batch, rows):
    """Returns the ids (rows, R) of the responses with the indices `rows`, and the model's output without
    its head, whose last_hidden_state (rows, R, width) predicts each of these tokens. With
    GRADIENT_CHECKPOINTING or recurrent layers no gradient flows through a cache: then prompt and response
    run together."""
    prompts = [batch.rows[i]["ids"] for i in rows]
    ids = batch.ids[rows, : int(batch.lengths[rows].max())].to(model.device)
    layers = Cache(config=model.config).layers
    is_recurrent = any(not isinstance(layer, DynamicLayer) for layer in layers)
    if torch.is_grad_enabled() and (GRADIENT_CHECKPOINTING or is_recurrent):
        prompt_ids, mask = pad_left(prompts, model.device)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)  # padding on the right is not seen before it
        output = forward(model, torch.cat([prompt_ids, ids], 1), mask)
        output.last_hidden_state = output.last_hidden_state[:, -ids.shape[1] - 1 : -1]
        return ids, output
    cache, mask, output = prefill(model, prompts)
    if ids.shape[1] > 1:
        last_of_prompt = output.last_hidden_state
        inputs = ids[:, :-1]  # the last token is only predicted
        output = forward(model, inputs, torch.cat([mask, torch.ones_like(inputs)], 1), cache)
        output.last_hidden_state = torch.cat([last_of_prompt, output.last_hidden_state], 1)
    return ids, output


def logprobs_and_entropy(model, batch, rows):
    """Returns log-probabilities and entropies of the tokens of responses `rows`, two (rows, R), 0 after
    the end. Logits are held for LOGIT_CHUNK tokens at a time: the backward pass computes them again."""
    ids, output = response_output(model, batch, rows)
    in_response = torch.arange(ids.shape[1]) < batch.lengths[rows].unsqueeze(1)
    in_response = in_response.to(model.device)
    hidden = output.last_hidden_state[in_response].split(LOGIT_CHUNK)  # (tokens, width) each
    targets = ids[in_response].split(LOGIT_CHUNK)
    logprobs, entropies = [], []
    for chunk in zip(hidden, targets):
        results = checkpoint(chunk_logprobs, model, output, *chunk, use_reentrant=False)
        logprobs.append(results[0])
        entropies.append(results[1])
    zeros = torch.zeros(ids.shape, device=model.device)
    logprobs = zeros.masked_scatter(in_response, torch.cat(logprobs))
    return logprobs, zeros.masked_scatter(in_response, torch.cat(entropies))


def chunk_logprobs(model, output, hidden, ids):
    """Returns log-probabilities and entropies of tokens after hidden states, two (tokens,)."""
    distribution = sampling_logprobs(head(model, output, hidden), TEMPERATURE)  # (tokens, vocabulary)
    logprobs = distribution.gather(1, ids.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        entropies = -(distribution.exp() * distribution).sum(-1)
    return logprobs, entropies


@torch.no_grad()
def all_logprobs(model, batch):
    """Returns the log-probabilities of all response tokens, (rows, R), 0 outside the mask."""
    result = torch.zeros_like(batch.mask)
    for rows in micro_batches(batch, torch.arange(len(batch.rows)), 4 * MICRO_BATCH_ROWS):
        logprobs, _ = logprobs_and_entropy(model, batch, rows)
        result[rows, : logprobs.shape[1]] = logprobs.cpu()
    return result * batch.mask


def check_scoring(model, batch):
    """Refuses a model whose scoring gives other log-probabilities than its sampling gave: its mask or
    cache is wrong. batch: greedy responses."""
    difference = (all_logprobs(model, batch) - batch.logprobs).sum(1).abs() / batch.lengths  # per token
    tolerance = 1e-3 if DTYPE == "float32" else 0.05
    if len(difference) > 0 and not difference.mean() <= tolerance:  # it may be NaN
        raise UserError(f"scoring and sampling differ: |log ratio| is {difference.mean():.2g} per token")


def make_batch(candidates):
    """Returns candidates as a batch to score or train. Its fields are candidates and rows (lists),
    lengths (rows,), ids and mask (rows, R)."""
    batch = SimpleNamespace(candidates=candidates, rows=[candidate.row for candidate in candidates])
    batch.lengths = torch.tensor([len(candidate.token_ids) for candidate in candidates]).long()
    width = max(batch.lengths.tolist(), default=0)
    batch.ids = torch.zeros(len(candidates), width, dtype=torch.long)
    for ids, candidate in zip(batch.ids, candidates):
        ids[: len(candidate.token_ids)] = torch.tensor(candidate.token_ids)
    batch.mask = (torch.arange(width) < batch.lengths.unsqueeze(1)).float()
    return batch


def micro_batches(batch, rows, size):
    """Cuts row numbers into micro-batches, the longest first. A prompt's rows stand together, and
    prompts whose longest responses are alike: less padding."""
    longest = Counter()  # of each prompt
    for row, length in zip(batch.rows, batch.lengths.tolist()):
        longest[row["id"]] = max(longest[row["id"]], length)
    lengths = torch.tensor([longest[batch.rows[i]["id"]] for i in rows])
    order = lengths.argsort(descending=True, stable=True)
    return [micro for micro in rows[order].split(size) if len(micro) > 0]


# ================================================================ candidates


@dataclass
class Candidate:
    """A response that is proposed for a prompt. candidates_round_N.parquet has these fields as columns,
    but prompt_id and prompt for the row, and reward/NAME for each of the rewards."""

    row: dict  # the prompt's row of the data, see make_row()
    token_ids: list  # of the response, with its end token unless it is truncated
    text: str = ""  # without the end token
    truncated: bool = False  # cut at MAX_NEW_TOKENS
    source: list = field(default_factory=list)  # of each proposal: greedy | beam | sample | reference
    temperature: list = field(default_factory=list)  # of each proposal; None unless it is a sample
    logprob: float | None = None  # log pi(y | x), summed over tokens, under the policy that mined it
    gt_prob: float | None = None  # None without ANSWER_FORM or without a gold answer
    eval_mode: str = "unverified"  # unverified | verified (scored) | failed (a reward function raised)
    eval_error: str | None = None  # the exception, if it failed
    hard: float | None = None  # HARD_REWARD, 0 or 1, once it is verified
    soft: float | None = None  # SOFT_REWARD, 0 to 1, once it is verified
    rewards: dict = field(default_factory=dict)  # {name: value} of each reward function


def to_record(candidate):
    """Returns a candidate as a row of a file, a dict."""
    record = {"prompt_id": candidate.row["id"], "prompt": prompt_text(candidate.row), **vars(candidate)}
    del record["row"], record["rewards"]
    record["eval_failed"] = candidate.eval_mode == "failed"
    return record | {f"reward/{name}": value for name, value in candidate.rewards.items()}


@torch.no_grad()
def beam_search(model, prompts, end_ids):
    """Returns BEAMS responses per prompt, lists of ids through their end: the likeliest that a search
    of this width finds."""
    if not BEAMS or not prompts:
        return []
    decoder = Decoder(model, prompts)
    scores, tokens = sampling_logprobs(decoder.logits, TEMPERATURE).topk(BEAMS)  # (prompts, BEAMS)
    first_beams = BEAMS * torch.arange(len(prompts), device=model.device).unsqueeze(1)
    decoder.select(torch.arange(len(prompts)).repeat_interleave(BEAMS))
    ids = tokens.view(-1, 1)  # (prompts * BEAMS, tokens so far)
    ends = torch.tensor(end_ids, device=model.device)
    while ids.shape[1] < MAX_NEW_TOKENS and not torch.isin(ids[:, -1], ends).all():
        decoder.decode(ids[:, -1])
        logprobs = sampling_logprobs(decoder.logits, TEMPERATURE)
        # A finished beam stays as it is: it goes on with one more end, whose probability counts as 1
        is_finished = torch.isin(ids[:, -1], ends)
        logprobs[is_finished] = -math.inf
        logprobs[is_finished, end_ids[0]] = 0
        totals = scores.view(-1, 1) + logprobs  # (prompts * BEAMS, vocabulary)
        scores, best = totals.view(len(prompts), -1).topk(BEAMS)  # of BEAMS * vocabulary continuations
        beam, token = best // logprobs.shape[1], best % logprobs.shape[1]
        parents = (first_beams + beam).flatten()
        decoder.select(parents)
        ids = torch.cat([ids[parents], token.view(-1, 1)], 1)
    responses = []
    for response in ids.tolist():
        length = 1
        while length < len(response) and response[length - 1] not in end_ids:
            length += 1
        responses.append(response[:length])  # through the first end
    return responses


def gold_after_reasoning(tokenizer, answer, response, end_id):
    """Returns the reasoning of a response as ids, and the distinct gold answers after it, lists of
    ids. With ANSWER_FORM = "#### {answer}" these are, say, "2 + 3 = 6\n####" and " 5<eos>". After a
    gold answer stands the rest of ANSWER_FORM or, if it has none, EOS. So none is the beginning of
    another: they exclude each other, and their probabilities may be added."""
    mark, rest = ANSWER_FORM.split("{answer}")
    mark = mark.rstrip()
    golds = dict.fromkeys(gold.strip() for gold in gold_answers(answer) if gold.strip())
    text = ""  # without a mark all of the response is the answer
    if mark:
        text = response.rpartition(mark)[0] if mark in response else response + "\n"
    texts = [text + mark, *(text + ANSWER_FORM.replace("{answer}", gold) for gold in golds)]
    reasoning, *answered = tokenizer(texts, add_special_tokens=False)["input_ids"]
    # A token may hold the end of the mark and the beginning of an answer, as "{-" of "\boxed{-5}"
    # does. The reasoning ends before it for all gold answers
    border = min([len(reasoning), *(common_length(reasoning, ids) for ids in answered)])
    end = [] if rest else [end_id]
    return reasoning[:border], [ids[border:] + end for ids in answered]


def common_length(first, second):
    """Returns the number of equal items at the beginning of two lists."""
    for number, (a, b) in enumerate(zip(first, second)):
        if a != b:
            return number
    return min(len(first), len(second))


def choose_verified(group):
    """Returns the candidates of a prompt that are verified first: the best VERIFY_TOP by PREFILTER, and
    VERIFY_RANDOM of the others."""
    ranked = sorted(group, key=lambda candidate: -getattr(candidate, PREFILTER))  # ties stay as proposed
    best = ranked[:VERIFY_TOP]  # None: all
    others = ranked[len(best) :]
    generator = random.Random(f"{SEED} {group[0].row['id']}")
    return best + generator.sample(others, min(VERIFY_RANDOM, len(others)))


def prompt_text(row):
    """Returns the text of a prompt; of a chat, one line per message."""
    if isinstance(row["prompt"], str):
        return row["prompt"]
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in row["prompt"])


def is_for_validation(row):
    """Returns whether a prompt is for validation. Its text decides: equal prompts are on one side."""
    hashed = zlib.crc32(f"{SEED} {prompt_text(row)}".encode())  # 0 to 2**32 - 1
    return hashed < VALIDATION_FRACTION * 2**32


def check_up(groups):
    """Returns what the candidates, one list per prompt, are worth: the share of right ones by source; of
    prompts, the share that has a right one, and that has right and wrong ones; the spread of r."""
    values = defaultdict(list)
    for group in groups:
        for candidate in group:
            for source, temperature in zip(candidate.source, candidate.temperature):
                name = f"accuracy/{source}"
                if temperature is not None:
                    name += f"_{temperature}"
                values[name].append(candidate.hard)
        hard = [candidate.hard for candidate in group]
        rewards = shaped_rewards(group)
        values["best_of_n_accuracy"].append(max(hard))
        values["mixed_prompts"].append(max(hard) > min(hard))
        values["reward_spread"].append((rewards.max() - rewards.min()).item())
        values["candidates"].append(len(group))
    return {name: np.mean(values[name]).item() for name in sorted(values)}


def candidates_path(folder, number):
    """Returns the file with the candidates of a round, counted from 1."""
    if CANDIDATES and number == 1:
        return Path(CANDIDATES)
    return folder / f"candidates_round_{number}.parquet"


def write_parquet(records, path):
    """Writes records of candidates. The file is there whole or not at all."""
    names = dict.fromkeys(chain(*records))
    table = pyarrow.Table.from_pylist([dict.fromkeys(names) | record for record in records])
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


def read_candidates(path, rows):
    """Returns the verified candidates in a file, a list per prompt. It may come from elsewhere
    (CANDIDATES): it needs prompt_id, prompt, token_ids, hard, and what REWARD_MODE reads."""
    row_of = {(row["id"], prompt_text(row)): row for row in rows}
    names = [x.name for x in fields(Candidate) if x.name not in ("row", "rewards")]
    groups = defaultdict(list)
    for record in pyarrow.parquet.read_table(path).to_pylist():
        row = row_of.get((record["prompt_id"], record["prompt"]))
        if row is None:
            raise UserError(f"{path} has a prompt that TRAIN_DATASETS lack: {record['prompt_id']}")
        if record["hard"] is not None and not record.get("eval_failed"):
            known = {name: record[name] for name in names if name in record}
            groups[row["id"]].append(Candidate(row, **known))
    return list(groups.values())


# ================================================================ data


def load_rows(specs, tokenizer):
    """Returns the rows of data sets, see make_row(), without prompts longer than MAX_PROMPT_TOKENS."""
    rows = []
    for position, spec in enumerate(specs, 1):
        number = 1  # of the record that is read
        try:
            check_keys(spec)
            for record in read_records(spec):
                row_id = f"{position}/{Path(spec['path']).name}:{number}"
                prompt, answer = prompt_and_answer(spec, record)
                rows.append(make_row(tokenizer, prompt, answer, row_id, record))
                number += 1
        except Exception as error:  # the libraries raise many types
            fault = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"{spec.get('path')}:{number}: {fault}") from None
    kept = [row for row in rows if len(row["ids"]) <= MAX_PROMPT_TOKENS]
    if len(kept) < len(rows) and rank == 0:
        print(f"left out {len(rows) - len(kept)} of {len(rows)} prompts, longer than MAX_PROMPT_TOKENS")
    if specs and not kept:
        limit = f"MAX_PROMPT_TOKENS = {MAX_PROMPT_TOKENS}"
        raise UserError(f"no prompt of {specs} has at most {limit} tokens")
    return kept


def check_keys(spec):
    """Refuses a data set that lacks keys or has keys that nothing reads."""
    allowed = {"path", "type", "input", "output"}
    if spec.get("type") == "hub":
        allowed |= {"name", "split"}
    if not {"path", "type", "input"} <= spec.keys() <= allowed:
        keys = "path, type, input, output, and on the hub name, split"
        raise ValueError(f"the keys are {keys}, not {list(spec)}")


def prompt_and_answer(spec, record):
    """Returns what a record has in the columns that the data set names."""
    if None in record:
        raise ValueError("it has more fields than the header")  # csv.DictReader puts them under None
    for key in ("input", "output"):
        if key in spec and spec[key] not in record:
            raise ValueError(f"it has the columns {list(record)}, but not {spec[key]!r}")
    prompt = record[spec["input"]]
    if spec["type"] in ("parquet", "hub"):
        prompt = without_nulls(prompt)
    answer = record[spec["output"]] if "output" in spec else None
    return prompt, answer


def read_records(spec):
    """Yields the records of a data set, dicts by column. Texts stay as the file has them."""
    path, file_type = spec["path"], spec["type"]
    csv.field_size_limit(2**31 - 1)  # documents are longer than the default, 131,072
    if file_type == "jsonl":
        text = Path(path).read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):  # an array of records
            yield from json.loads(text)
        else:
            yield from (json.loads(line) for line in text.split("\n") if line.strip())
    elif file_type == "csv":
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield from csv.DictReader(file, strict=True)  # strict: else an open quote swallows the rest
    elif file_type == "parquet":
        yield from pyarrow.parquet.read_table(path).to_pylist()
    elif file_type == "hub":
        import datasets  # slow

        yield from datasets.load_dataset(path, spec.get("name"), split=spec.get("split", "train"))
    else:
        raise ValueError("the types are jsonl, csv, parquet and hub")


def without_nulls(value):
    """Returns a value without None in its dicts: parquet gives all dicts of a column the same keys, and
    None where one had no such key."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def make_row(tokenizer, prompt, answer=None, row_id="the prompt", columns=None):
    """Returns a row: id, prompt (text or chat), answer (text, texts or None), columns, token ids."""
    golds = answer if isinstance(answer, list) else [answer]
    if any(isinstance(gold, (dict, list)) for gold in golds):
        raise ValueError(f"the answer {answer} is no text, number or list of them")
    golds = [str(x) for x in golds if x is not None and x == x and str(x).strip()]  # NaN is not itself
    if not isinstance(answer, list):
        golds = golds[0] if golds else None
    ids = encode(tokenizer, prompt)
    row = {"id": row_id, "prompt": prompt, "answer": golds or None}
    return row | {"columns": columns or {}, "ids": ids}


def read_message(message):
    """Returns a chat's message, its content as a text. Refuses what a chat template would misread."""
    if not isinstance(message, dict):
        raise ValueError(f"a chat is a list of messages, not of {message!r:.80}")
    known = ["role", "content", "name", "tool_calls", "tool_call_id"]
    message = {key: x for key, x in message.items() if x is not None}  # None: an absent key
    content = message.get("content")
    if content is None and "tool_calls" in message:
        content = ""
    if isinstance(content, list) and all(set(part) == {"type", "text"} for part in content):
        content = "".join(column(content, "text"))
    if not isinstance(content, str) or not set(message) <= set(known):
        names = ", ".join(known)
        raise ValueError(f"a message has {names}, and its content is a text: {message!r:.200}")
    if message.get("role") not in ("system", "developer", "user", "assistant", "tool"):
        raise ValueError(f"a message has an unknown role: {message!r:.200}")
    if "tool_calls" in message:
        message["tool_calls"] = list(map(read_call, message["tool_calls"]))
    return {**message, "content": content}


def read_call(call):
    """Returns a tool call with its arguments as a dict. Many data sets have their JSON, which a chat
    template would write as a text in quotes."""
    function = dict(call.get("function", call))
    if isinstance(function.get("arguments"), str):
        with suppress(json.JSONDecodeError):
            function["arguments"] = json.loads(function["arguments"] or "{}")
    if not isinstance(function.get("arguments", {}), dict):
        raise ValueError(f"the arguments of a tool call are a dict or its JSON: {call!r:.200}")
    return {**call, "function": function} if "function" in call else function


def encode(tokenizer, prompt, response=None):
    """Returns the ids of a prompt (text or chat) and its response, if given, in the chat template."""
    if isinstance(prompt, str) and prompt.strip():
        messages = [{"role": "user", "content": PROMPT_TEMPLATE.replace("{input}", prompt)}]
    elif isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt):
        messages = list(map(read_message, prompt))
    else:
        raise ValueError(f"a prompt is a text or a list of messages, not {prompt!r:.80}")
    if messages[-1]["role"] == "assistant":
        raise ValueError("a prompt ends before the assistant's message, which the policy writes")
    if SYSTEM_PROMPT is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": SYSTEM_PROMPT})
    if tokenizer.chat_template:
        if response is not None:
            messages.append({"role": "assistant", "content": response})
        options = {"add_generation_prompt": response is None, "tokenize": False}
        text = tokenizer.apply_chat_template(messages, **options)
        text.encode()  # raises on half an emoji (a lone surrogate)
        for message in messages:
            if message["role"] in ("system", "user") and message["content"].strip() not in text:
                raise ValueError(f"the chat template does not show the {message['role']}'s message")
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    if not isinstance(prompt, str) or len(messages) > 1:
        raise UserError("chats and SYSTEM_PROMPT need a tokenizer with a chat template")
    text = messages[0]["content"]
    if response is not None:
        text += response + (tokenizer.eos_token or "")
    ids = tokenizer(text)["input_ids"]
    if response is None and ids[-1:] == [tokenizer.eos_token_id]:  # some append EOS to every text
        ids = ids[:-1]
    if not ids:
        raise ValueError("a prompt without a token")
    return ids


def complete_columns(rows):
    """Gives all rows the same columns, with None where a data set lacks one: then a reward function
    finds its columns in any batch."""
    names = {name for row in rows for name in row["columns"]}
    for row in rows:
        row["columns"] = {**dict.fromkeys(names), **row["columns"]}


def check_answers(functions, rows):
    """Calls each function of rewards/ on a row without an answer: one that needs answers raises here,
    not in the middle of the run."""
    row = next((row for row in rows if row["answer"] is None), None)
    for _, function, _ in functions:
        if row and getattr(function, "__module__", "") == "rewards":
            call_reward(function, [row["id"]], [""], [None], {"response_ids": [[]]})


def warn_of_data(train_rows, eval_rows, tokenizers):
    """Prints what may be a mistake. tokenizers: {model: its tokenizer}."""
    trained = set(map(tuple, column(train_rows, "ids")))
    num_trained = sum(tuple(row["ids"]) in trained for row in eval_rows)
    if num_trained and rank == 0:
        print(f"WARNING: {num_trained} of {len(eval_rows)} held-out prompts are also trained")
    num_open = sum(row["answer"] is None for row in eval_rows)
    if 0 < num_open < len(eval_rows) and rank == 0:
        counts = f"{num_open} of {len(eval_rows)} held-out prompts"
        print(f"WARNING: {counts} have no answer: no accuracy is logged")
    texts = list(map(str, column(train_rows[:100], "prompt")))
    for name, tokenizer in tokenizers.items():
        ids = list(chain(*tokenizer(texts)["input_ids"]))
        unknown = ids.count(tokenizer.unk_token_id) / len(ids)
        if unknown > 0.1 and rank == 0:
            print(f"WARNING: {unknown:.0%} of the prompt tokens are unknown to the tokenizer of {name}")


def column(rows, field):
    return [row[field] for row in rows]


def join(batches):
    """Returns one batch of the rows of all."""
    fields = {}
    for name in vars(batches[0]):
        values = [vars(batch)[name] for batch in batches]
        if torch.is_tensor(values[0]):
            fields[name] = torch.cat(values)
        elif isinstance(values[0], dict):
            fields[name] = {key: torch.cat(column(values, key)) for key in values[0]}
        else:
            fields[name] = list(chain(*values))
    return SimpleNamespace(**fields)


def reward_arguments(batch):
    """Returns what reward functions take: prompts, responses, answers, and {column: values}."""
    names = {name for row in batch.rows for name in row["columns"]}
    names -= {"self", "prompts", "responses", "answers"}  # parameters of compute_rewards()
    columns = {name: [row["columns"].get(name) for row in batch.rows] for name in names}
    columns["response_ids"] = batch.response_ids
    return column(batch.rows, "prompt"), batch.texts, column(batch.rows, "answer"), columns


# ================================================================ processes


def join_processes():
    """Joins torchrun's processes and asks for kernels that add in a fixed order. Returns the device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(DETERMINISTIC)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time
    # Float32 logits of a bfloat16 model: 10 bits of each factor (TF32) instead of 7, and float32 sums
    torch.backends.cuda.matmul.allow_tf32 = DTYPE == "bfloat16"
    default = f"cuda:{local_rank}" if DEVICE == "cuda" or torch.cuda.is_available() else "cpu"
    name = default if DEVICE in ("auto", "cuda") else DEVICE
    if name.startswith("cuda:") and torch.cuda.is_available():
        torch.cuda.set_device(name)
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group()
    return torch.device(name)


def share(items):
    """Returns this process's share of a list or tensor."""
    return items[rank * len(items) // world_size : (rank + 1) * len(items) // world_size]


def all_gather(value):
    """Returns the values of all processes, a list by rank."""
    values = [value] * world_size
    if world_size > 1:
        dist.all_gather_object(values, value)
    return values


def progress(items, unit):
    """Shows a progress bar on a terminal, which vanishes at the end."""
    if rank > 0:
        return items
    # disable=None: without a terminal there is no bar
    return tqdm(items, unit=f" {unit}", leave=False, file=sys.stdout, disable=None)


# ================================================================ the run's files


class Run:
    """The files of one run in OUTPUT_DIR, which process 0 writes, and the signals that end the run."""

    def __init__(self, resume):
        self.folder = Path(OUTPUT_DIR).absolute()  # once: a reward function may change directory
        self.logs = {}
        self.wandb = None
        self.signal = 0
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.lock = filelock.FileLock(f"{self.folder}.lock", is_singleton=True)
        self.facts = {"file": __file__, "program": os.path.abspath(sys.argv[0])}
        paths = {os.path.realpath(path) for path in (__file__, sys.argv[0], rewards.__file__)}
        programs = [Path(path) for path in paths if Path(path).is_file()]
        self.facts["text"] = digest(sorted(program.read_bytes() for program in programs))
        self.facts |= {"torch": torch.__version__, "processes": world_size}
        checkpoint = None
        if rank == 0:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.lock.acquire(timeout=0)  # fails if another run writes into OUTPUT_DIR
            checkpoint = choose_checkpoint(self.folder, resume)
            print(f"Writing to {self.folder}; loading the models", flush=True)
        self.checkpoint = all_gather(checkpoint)[0]

    def on_signal(self, number, frame):
        """Ctrl-C and SIGTERM end the run after the current step; a second one ends it at once."""
        self.signal = number
        signal.signal(number, signal.SIG_DFL)
        print("\nStopping after this step, then saving; again stops at once", flush=True)

    def open(self, state, is_complete):
        """Opens the logs and catches signals. A run that continues cuts the logs back to its
        checkpoint; if no step is left, it is complete."""
        self.outcome = "Nothing was left to do: complete" if is_complete else "Done"
        self.handlers = {}
        with suppress(ValueError):  # only the main thread gets signals
            numbers = (signal.SIGINT, signal.SIGTERM)
            self.handlers = {number: signal.signal(number, self.on_signal) for number in numbers}
        if rank == 0:
            self.open_files(state, is_complete)
        scores = all_gather((state.best_score, state.evaluations_without_gain))
        state.best_score, state.evaluations_without_gain = scores[0]  # move_old_files() may reset them

    def open_files(self, state, is_complete):
        """In rank 0: prints what changed since the checkpoint, moves later files away, opens the logs."""
        self.lock.acquire(timeout=0)  # a second train() has to take it again
        self.compare(state, is_complete)
        for half in self.folder.glob("step_*.tmp"):  # a kill may leave some
            shutil.rmtree(half)
        now = f"{datetime.now():%Y%m%d_%H%M%S_%f}"
        self.move_old_files(state, Path(f"{self.folder}_old_{now}"))
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        self.text_log = open(self.folder / f"logs/training_{now}.log", "a", buffering=1)
        for name in ("metrics.jsonl", "samples.jsonl"):
            file = open(self.folder / "logs" / name, "a", buffering=1)
            file.truncate(min(file.tell(), state.log_sizes.get(name, 0)))
            self.logs[name] = file
        config = self.folder / "training_config.json"
        facts = self.facts | {"constants": constants()}
        config.with_suffix(".tmp").write_text(json.dumps(facts, indent=1))
        config.with_suffix(".tmp").rename(config)
        if USE_WANDB:
            import wandb  # slow

            options = {"dir": self.folder, "id": state.wandb_id, "resume": "allow"}
            self.wandb = wandb.init(config=constants(), **options)
            state.wandb_id = self.wandb.id

    def compare(self, state, is_complete):
        """Prints what changed since the checkpoint that is resumed. Refuses another model: the weights
        are those of the checkpoint. If no step is left, refuses every change: the run would end at
        once, as if it had trained with what changed."""
        if not self.checkpoint:
            return
        earlier = json.loads((self.checkpoint / "run.json").read_text())
        changes = [(k, x) for k, x in constants().items() if earlier["constants"].get(k, x) != x]
        changes = [f"{k}={x!r}" for k, x in changes if k not in ("RESUME", "OUTPUT_DIR")]
        print("Constants that changed: " + (", ".join(changes) or "none"), flush=True)
        for name, what in {"text": "file", "data": "data"}.items():
            if earlier.get(name) != self.facts.get(name):
                changes.append(f"the {what} changed since step {state.step}")
                print(changes[-1], flush=True)
        hint = "RESUME=no or another OUTPUT_DIR begins another run"
        for name in ("ACTOR_MODEL", "CRITIC_MODEL"):  # the latter in ppo.py
            model = earlier["constants"].get(name)
            if model != constants().get(name):
                raise UserError(f"the weights of {self.checkpoint} are of {name}={model}: {hint}")
        if is_complete and changes:
            raise UserError(f"complete at step {state.step}, but {'; '.join(changes)}: {hint}")

    def move_old_files(self, state, target):
        """Moves checkpoints and candidates that are later than the run's into the folder `target`, and
        for a new run all files of an earlier one. Files that no run wrote stay."""
        config = self.folder / "training_config.json"
        is_own = self.checkpoint and self.checkpoint.resolve().parent == self.folder.resolve()
        if not is_own:
            state.best_score, state.log_sizes, state.wandb_id = -math.inf, {}, None
            state.evaluations_without_gain = 0
        if not config.exists():
            return
        stale = list_checkpoints(self.folder)
        mined = {}  # {file or folder of candidates: its round}
        for path in self.folder.glob("candidates_round_*.*"):
            number = path.stem.removeprefix("candidates_round_")
            if number.isdecimal() and path != Path(CANDIDATES or "").absolute():
                mined[path] = int(number)
        if is_own:
            stale = [path for path in stale if int(path.name.removeprefix("step_")) > state.step]
            stale += [path for path, number in mined.items() if number > state.round]
        else:
            stale += [path for path, number in mined.items() if STAGE != "train" or number > 1]
            patterns = "logs/*.jsonl logs/training_*.log *_metrics_*.png training_config.json"
            for pattern in patterns.split():
                stale += self.folder.glob(pattern)
        if stale:
            state.best_score = -math.inf
            stale += [path.parent for path in self.folder.glob("best/*/config.json")]
        stale.sort(key=lambda path: path == config)  # last: after a kill the next start moves the rest
        for path in stale:
            moved = target / path.relative_to(self.folder)
            moved.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, moved)
            print(f"Moved {path} to {moved}", flush=True)

    def close(self, state):
        all_gather(None)  # waits for all: torchrun would end processes that still write
        self.log(f"{'Stopped' if self.signal else self.outcome} at step {state.step}")
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.wandb:
            self.wandb.finish()
        self.lock.release(force=True)

    def log(self, text):
        """Prints a line, above any progress bar, and writes it to the log file."""
        if rank == 0:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()
            print(text, file=self.text_log)

    def write(self, name, **record):
        """Writes one line of JSON to a log. Numbers that are not finite become null: JSON has no NaN."""
        for key, x in record.items():
            if isinstance(x, float) and not math.isfinite(x):
                record[key] = None
        if rank == 0:
            self.logs[name].write(json.dumps(record) + "\n")
        if self.wandb and name == "metrics.jsonl":
            phase = record.pop("phase")
            self.wandb.log({f"{phase}/{key}": x for key, x in record.items()}, step=record["step"])


def list_checkpoints(folder):
    """Returns the folders step_N of a run, oldest first."""
    folders = {}
    for path in Path(folder).glob("step_*/training_state.pt"):
        number = path.parent.name.removeprefix("step_")
        if number.isdecimal():  # not step_5.tmp
            folders[int(number)] = path.parent
    return [folders[number] for number in sorted(folders)]


def choose_checkpoint(folder, resume):
    """Returns the checkpoint to resume from, or None. Asks at a terminal if resume is "ask"."""
    checkpoints = list_checkpoints(folder)
    if resume not in ("ask", "yes", "no"):
        checkpoints = list_checkpoints(resume) or [Path(resume)]
        if not (checkpoints[-1] / "training_state.pt").exists():
            allowed = "ask, yes, no, or the folder of a checkpoint or run"
            raise UserError(f"RESUME = {resume!r} is not {allowed}")
    if resume == "yes" and not checkpoints:
        print(f"RESUME=yes: {folder} has no checkpoint, the run begins afresh", flush=True)
    if resume == "no" or not checkpoints:
        return None
    print(f"Found checkpoint: {checkpoints[-1]}", flush=True)
    has_terminal = sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()
    asks = resume == "ask" and world_size == 1 and has_terminal
    if asks and not input("Resume training from it? (y/n): ").lower().startswith("y"):
        return None
    return checkpoints[-1]


def digest(items):
    """Returns their number and the beginning of a hash of them, as a text."""
    total = hashlib.sha256()
    for item in items:
        total.update(repr(item).encode())
    return f"{len(items)} {total.hexdigest()[:12]}"


@contextmanager
def atomic_folder(path):
    """Gives a folder to fill, which is then renamed to `path`: it is there whole or not at all."""
    tmp = path.with_name(path.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    yield tmp
    for file in [*tmp.rglob("*"), tmp]:  # what was written is on the disk before its name is
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    shutil.rmtree(path, ignore_errors=True)
    tmp.rename(path)


# The panels of rce_metrics_with_entropy.png; training_metrics_detailed.png has all metrics that vary
PANELS = "accuracy_sampled pick_accuracy candidate_reward entropy policy_loss".split()


def draw_grid(folder, path, names=None):
    """Draws a panel per metric: training steps (faint), their rolling mean, and evaluations (points)."""
    records = [json.loads(line) for line in (folder / "logs/metrics.jsonl").read_text().splitlines()]
    names = [name for name in names or dict.fromkeys(chain(*records)) if name not in ("phase", "step")]
    names = [name for name in names if len({r.get(name) for r in records} - {None}) > 1]  # it varies
    phases = ["train", *dict.fromkeys(r["phase"] for r in records if r["phase"] != "train")]
    colors = dict(zip(phases, ("blue", "orange", "green", "red", "purple", "brown")))
    height = max(1, math.ceil(len(names) / 3))
    drawn = {}  # {phase: its color}
    figure = Figure(figsize=(10, 2.3 * height + 0.5), layout="tight")
    for number, name in enumerate(names, 1):
        axis = figure.add_subplot(height, 3, number, title=name, xlabel="step")
        axis.grid(alpha=0.3)
        for phase, color in colors.items():
            points = [r for r in records if r["phase"] == phase and r.get(name) is not None]
            steps, values = column(points, "step"), column(points, name)
            if values:
                drawn[phase] = color
            if phase != "train":
                axis.plot(steps, values, "o-", color=f"tab:{color}", markersize=4)
            elif values:
                window = max(1, len(values) // 12)
                means = np.convolve(values, np.full(window, 1 / window), "valid")
                axis.plot(steps, values, ".-", color=f"tab:{color}", alpha=0.25)
                axis.plot(steps[window - 1 :], means, color=f"tab:{color}")
    legend = "; ".join(f"{color}: {phase}" for phase, color in drawn.items())
    figure.suptitle(f"{legend} (train: each step and rolling mean)", fontsize=9)
    figure.savefig(folder / path, dpi=110)


# ================================================================ command line


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def constants():
    """Returns every constant of this file by name, as JSON has it."""
    names = [name for name in globals() if name.isupper() and name not in ("ROOT", "PANELS")]
    values = {name: globals()[name] for name in names}

    def describe(x):  # a function by its name, an object without its address in memory
        if isinstance(x, partial):
            x = x.func
        if hasattr(x, "__name__"):
            return x.__name__
        return re.sub(r" at 0x\w+", "", str(x))

    text = json.dumps(values, default=describe)
    return json.loads(text.replace(json.dumps(str(ROOT))[1:-1], "{ROOT}"))  # the repository may be moved


def read_constants(path):
    """Yields KEY=VALUE of each line of a file, without comments. A text may stand in quotes."""
    for line in Path(path).read_text(encoding="utf-8-sig").splitlines():
        key, _, text = line.partition("=")
        quoted = re.fullmatch(r"""(["'])(.*?)\1\s*(#.*)?""", text.strip())
        text = quoted[2] if quoted else re.split(r"\s#\s", text)[0].strip()
        if line.strip() and not line.strip().startswith("#"):
            yield f"{key.strip()}={text}"


def apply_overrides(arguments):
    """Sets constants from arguments, KEY=VALUE or @FILE with one per line. Each keeps its type."""
    for argument in arguments:
        if argument.startswith("@"):
            apply_overrides(read_constants(argument[1:]))
            continue
        key, _, text = argument.partition("=")
        if key not in constants():
            near = difflib.get_close_matches(key.upper(), constants(), 1, 0.0)[0]
            raise UserError(f"{argument!r} is not KEY=VALUE for a constant of this file, such as {near}")
        wanted = __annotations__.get(key, type(globals()[key]))  # a type such as int, or int | None
        value = os.path.expanduser(text).replace("{file}", Path(sys.argv[0]).stem)
        # \n becomes a line break, and \\n becomes \n
        value = re.sub(r"(?<!\\)\\n", "\n", value).replace(r"\\n", r"\n")
        if not isinstance(value, wanted) or text == "None":
            with suppress(ValueError, SyntaxError):
                value = ast.literal_eval(text)
        accepts_float = isinstance(0.0, wanted)
        if type(value) is int and accepts_float:
            value = float(value)
        if not isinstance(value, wanted):
            raise UserError(f"{argument}: {key} takes a value such as {globals()[key]!r}")
        globals()[key] = value


def check_numbers(counts):
    """Refuses numbers below 0, or below 1 if `counts` has their names."""
    for name, value in constants().items():
        lowest = 1 if name in counts.split() else 0
        if type(value) not in (int, float) or name == "REWARD_MODEL_WEIGHT":
            continue
        is_too_large = type(value) is int and value >= 2**63  # a seed has 64 bits
        if not lowest <= value or is_too_large:  # NaN, too
            raise UserError(f"{name} = {value!r} is not a number from {lowest} on (or too large)")


def require(is_kept, rule):
    if not is_kept:
        raise UserError(f"a constant breaks a rule: {rule}")


def check_constants():
    """Refuses values that would fail silently or late."""
    check_numbers(
        "ROUNDS MINE_PROMPTS GROUP_SIZE BATCH_SIZE GRADIENT_ACCUMULATION_STEPS MICRO_BATCH_ROWS "
        "EVAL_SAMPLES MAX_NEW_TOKENS NUM_EPOCHS MAX_STEPS KEEP_LAST_N_CHECKPOINTS MAX_EVAL_PROMPTS "
        "VERIFY_TOP DECODE_BLOCK LOGIT_CHUNK"
    )
    schedules = ("linear", "cosine", "plateau")
    is_mode = callable(REWARD_MODE) or REWARD_MODE in reward_modes
    above_zero = [TAU, TAU if TAU_END is None else TAU_END, TEMPERATURE, *SAMPLE_TEMPERATURES]
    require(STAGE in ("all", "mine", "train"), "STAGE is all, mine or train")
    require(DTYPE in ("float32", "bfloat16"), "DTYPE is float32 or bfloat16")
    require(LR_SCHEDULER_TYPE in schedules, f"LR_SCHEDULER_TYPE is one of {schedules}")
    require(PREFILTER in ("gt_prob", "logprob"), "PREFILTER is gt_prob or logprob")
    require(WEIGHT_REWARDS in ("raw", "zscore"), "WEIGHT_REWARDS is raw or zscore")
    require(is_mode, f"REWARD_MODE is a function or one of {', '.join(reward_modes)}")
    require(min(above_zero) > 0, "TAU, TAU_END, TEMPERATURE and SAMPLE_TEMPERATURES are above 0")
    require(SAMPLE_TEMPERATURES, "SAMPLE_TEMPERATURES is not empty")
    require(MAX_GRAD_NORM > 0, "MAX_GRAD_NORM is above 0")
    require(0 <= VALIDATION_FRACTION < 1, "VALIDATION_FRACTION is at least 0 and below 1")
    require("{input}" in PROMPT_TEMPLATE, "PROMPT_TEMPLATE contains {input}")
    require(TRAIN_DATASETS, "TRAIN_DATASETS has a data set")
    require(REWARD_FUNCTIONS, "there is a reward function")
    is_form = ANSWER_FORM is None or ANSWER_FORM.count("{answer}") == 1
    require(is_form, "ANSWER_FORM contains {answer} once")


def train_main():
    """Exit codes: 0; 2: the user can correct it; 130, 143: a signal; 1, with a traceback: the rest."""
    trainer = None
    try:
        apply_overrides(sys.argv[1:])
        trainer = RCETrainer()
        trainer.train()
    except (UserError, OSError) as error:  # OSError: a file that cannot be read or written
        if trainer and not isinstance(error, UserError):
            raise  # a reward function's fault, or a full disk
        print(f"\n{Path(__file__).name}: {first_line(error)}", file=sys.stderr)
        sys.exit(2)
    if world_size > 1:
        dist.destroy_process_group()  # else one of its threads may end the process with an error
    if trainer.run.signal:
        sys.exit(128 + trainer.run.signal)


if __name__ == "__main__":
    train_main()
