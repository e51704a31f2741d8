"""PPO for language models, in one file: actor, critic, reference, reward model or reward functions.

A response is an episode, a token is an action (arXiv 1909.08593, 1707.06347):

    r_t   = -KL_COEF (log pi(y_t) - log pi_ref(y_t)) + [t is the last token] score(y)
    d_t   = r_t + GAMMA V_old_{t+1} - V_old_t; V_old after the end is 0
    A_t   = sum_k (GAMMA LAM)^k d_{t+k}, then whitened
    R_t   = V_old_t + sum_k (GAMMA CRITIC_LAM)^k d_{t+k}: the critic's target
    rho_t = pi(y_t) / pi_old(y_t)
    L     = -mean_t min(rho_t A_t, clip(rho_t, 1 - CLIP_RANGE, 1 + CLIP_RANGE_HIGH) A_t)
            + VALUE_LOSS_COEF mean_t 1/2 max((V_t - R_t)^2, (clip(V_t, V_old +- VALUE_CLIP_RANGE) - R_t)^2)
            - ENTROPY_COEF mean_t H(pi_t)

pi_old and V_old are those of the rollout, pi and V of the update. t runs over the tokens that the
policy wrote; tokens of a tool between them are skipped. mean_t is over all tokens of an optimizer
step, whatever the size of a micro-batch. Actor and critic are two networks.

Shapes: rows = responses, grouped by prompt; P = tokens of the longest prompt; R = MAX_NEW_TOKENS, or in a
micro-batch the tokens of its longest response.

    python ppo/ppo.py                          # edit the constants below, or give KEY=VALUE or @FILE
    python ppo/ppo.py ACTOR_MODEL=Qwen/Qwen2.5-0.5B-Instruct REWARD_MODEL=None LEARNING_RATE=1e-6
    torchrun --nproc_per_node=4 ppo/ppo.py     # the same samples, the same update up to rounding

Writes logs/, checkpoints step_N/, best/policy/ and two pictures into OUTPUT_DIR. A run that was
stopped or killed continues from its last checkpoint, and ends with the same bytes.

To change      see                                       To change      see
the loss       policy_loss, value_loss, optimizer_step   the data       TRAIN_DATASETS, load_rows
the advantage  gae, compute_advantages                   a metric       ppo_stats, record, evaluate
the reward     REWARD_FUNCTIONS, compute_rewards         a plot         PANELS, draw_grid
sampling       sampling_logprobs, generate               tools, turns   respond
when to stop   is_over
"""

import ast
import csv
import difflib
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from copy import deepcopy
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
import pyarrow.parquet
import torch
import torch.distributed as dist
import transformers
from matplotlib.figure import Figure
from torch.nn.utils.rnn import pad_sequence
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
from rewards import UserError, call_reward, find_function, find_functions

# ================================================================ constants

# Models: a folder or a hub name
ACTOR_MODEL = f"{ROOT}/data/tiny/policy"
CRITIC_MODEL: str | None = None  # None: the actor's weights. A value head that is missing starts at 0
REWARD_MODEL: str | None = f"{ROOT}/data/tiny/reward_model"  # classifier with one label; or None
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

# Rewards: score = REWARD_MODEL_WEIGHT * reward model + sum of weight * function. A function is a name
# in rewards/, or one that you define above this: f(prompts, responses, answers) returns one number per
# response. It may have more parameters: one with the name of a column of the data gets that column, one
# value per response; response_ids gets the sampled token ids, with EOS
REWARD_FUNCTIONS = [("exact_answer", 1.0)]
REWARD_MODEL_WEIGHT = 0.1
MISSING_EOS_PENALTY = 0.0  # subtracted from the score of a response cut at MAX_NEW_TOKENS
ACCURACY_FUNCTION = "exact_answer"  # in rewards/; decides whether a response is correct (evaluation)

# A step is one rollout with all optimizer steps on it; constants in steps count these
# Rollout
BATCH_SIZE = 16  # prompts per call of generate()
# A step samples BATCH_SIZE times this many prompts before its first update. It does not cut the update
# into backward passes, as the name says in other programs: MICRO_BATCH_ROWS does
GRADIENT_ACCUMULATION_STEPS = 2
GROUP_SIZE = 4  # responses per prompt
MICRO_BATCH_ROWS = 32  # responses per forward and backward pass; scoring takes four times as many
LOGIT_CHUNK = 256  # tokens whose logits are held at a time; the backward pass computes them again
DECODE_BLOCK = 32  # tokens by which the KV cache grows in sampling; each block needs a new CUDA graph
CUDA_GRAPHS = False  # in sampling: one launch per token. Has not run on a GPU yet; take DECODE_BLOCK=128
EVAL_SAMPLES = 4  # samples per prompt in evaluation: k of pass@k
MAX_PROMPT_TOKENS = 256  # longer prompts are left out, and counted
MAX_NEW_TOKENS = 64
TEMPERATURE = 1.0  # > 0; for top-p and the like edit sampling_logprobs

# Optimisation
LEARNING_RATE = 1e-4
CRITIC_LEARNING_RATE = 5e-4
MAX_GRAD_NORM = 1.0  # actor and critic are clipped separately
WEIGHT_DECAY = 0.0
USE_LR_SCHEDULER = False
LR_SCHEDULER_TYPE = "linear"  # linear | cosine (to 0) | plateau (halves if 2 evaluations bring no gain)
WARMUP_STEPS = 0  # linear warm-up, with or without a scheduler

# Algorithm
GROUP_EPOCHS = 2  # passes over each step's responses; elsewhere ppo_epochs or num_iterations
MINI_BATCHES = 1  # optimizer steps per pass
CLIP_RANGE = 0.2
CLIP_RANGE_HIGH: float | None = None  # None: CLIP_RANGE; DAPO takes 0.28 (2503.14476)
VALUE_CLIP_RANGE = 0.2  # 0: values are not clipped
VALUE_LOSS_COEF = 0.5
ENTROPY_COEF = 0.0
KL_COEF = 0.01  # coefficient of the KL penalty per token; 0: no reference model is loaded
KL_TARGET: float | None = None  # nats per token: adapts KL_COEF (1909.08593); None: constant
KL_HORIZON = 10000  # responses; larger: KL_COEF adapts more slowly
GAMMA = 1.0
LAM = 0.95  # 1: Monte-Carlo returns minus values
CRITIC_LAM = 1.0  # lambda of the critic's targets; 1: discounted sum of rewards (VC-PPO, 2503.01491)
CRITIC_WARMUP_STEPS = 0  # the first so many steps train the critic alone (2503.01491)
WHITEN_ADVANTAGES = True

# Schedule and files
NUM_EPOCHS = 1  # passes over the prompts
MAX_STEPS: int | None = 50  # the run ends here or after NUM_EPOCHS, whichever is first; None: NUM_EPOCHS
SAVE_EVERY_N_STEPS = 25  # 0: only at the end
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 10  # 0: only before the first and after the last step
EARLY_STOPPING_PATIENCE = 0  # evaluations without a better reward before the run ends; 0: no early stop
EARLY_STOPPING_THRESHOLD = 0.0  # a smaller gain does not count for EARLY_STOPPING_PATIENCE
LOG_SAMPLES = 4  # responses per step written to samples.jsonl
RESUME = "ask"  # ask (yes without a terminal or under torchrun) | yes | no | path of a checkpoint or run
OUTPUT_DIR = f"{ROOT}/checkpoints/{Path(__file__).stem}"
SEED = 1
DETERMINISTIC = True  # kernels add in a fixed order: the same run gives the same bytes; slower on a GPU
USE_WANDB = False  # its project and mode: environment variables WANDB_PROJECT, WANDB_MODE

# ================================================================ the maths of PPO


def sampling_logprobs(logits):
    """Returns log-probabilities (..., vocabulary) of the distribution that is sampled and trained:
    rollout and update both call this, so all ratios are 1 before the first update. Edit it for top-p,
    for example: give tokens to exclude -1e30 (-inf would make NaN), and normalise the others again. A
    term of yours in log-ratios then has to clamp them, as the metrics do: the update may exclude what
    was sampled."""
    return (logits.float() / TEMPERATURE).log_softmax(-1)


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum()


def masked_variance(x, mask):
    return masked_mean((x - masked_mean(x, mask)) ** 2, mask)


def whiten(x, mask):
    """Returns x with mean 0 and variance 1 over the mask, and 0 outside it."""
    return (x - masked_mean(x, mask)) * torch.rsqrt(masked_variance(x, mask) + 1e-8) * mask


def per_token_rewards(batch, kl_coef):
    """Returns the reward of each token, (rows, R): minus the KL penalty at every token, plus the score
    (rows,) at the last one that the policy wrote."""
    # With top-p the reference may have excluded a token (-1e30) that the policy sampled
    log_ratio = (batch.logprobs - batch.ref_logprobs).clamp(-20, 20)
    token_rewards = -kl_coef * log_ratio * batch.mask
    positions = torch.arange(batch.mask.shape[1])
    last_token = torch.where(batch.mask > 0, positions, 0).amax(1)
    token_rewards[torch.arange(len(last_token)), last_token] += batch.scores
    return token_rewards


def gae(token_rewards, values, mask, gamma, lam):
    """Returns generalised advantage estimates (1506.02438), (rows, R). The value after the last token
    is 0; tokens outside the mask are skipped, as if their neighbours stood side by side."""
    advantages = torch.zeros_like(values)
    next_advantage = next_value = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        is_sampled = mask[:, t] > 0
        next_advantage = torch.where(is_sampled, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(is_sampled, values[:, t], next_value)
        advantages[:, t] = next_advantage
    return advantages * mask


def policy_loss(logprobs, old_logprobs, advantages):
    """Returns the clipped surrogate loss of each token, (rows, R): 1707.06347, equation 7."""
    ratio = (logprobs - old_logprobs).clamp(max=80).exp()  # exp() overflows above 88
    clipped = ratio.clamp(1 - CLIP_RANGE, 1 + (CLIP_RANGE_HIGH or CLIP_RANGE))
    return -torch.min(ratio * advantages, clipped * advantages)


def value_loss(values, old_values, returns):
    """Returns half the larger of two squared errors of each token, (rows, R): of the value, and of the
    value kept within VALUE_CLIP_RANGE of the rollout's."""
    clipped = values
    if VALUE_CLIP_RANGE > 0:
        clipped = old_values + (values - old_values).clamp(-VALUE_CLIP_RANGE, VALUE_CLIP_RANGE)
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)


def ppo_stats(logprobs, old_logprobs, advantages):
    """Returns {metric: its value for each token, (rows, R)}. The means are logged. Add others here."""
    log_ratio = (logprobs - old_logprobs).clamp(-20, 20)
    ratio = log_ratio.exp()
    too_high = ratio > 1 + (CLIP_RANGE_HIGH or CLIP_RANGE)
    too_low = ratio < 1 - CLIP_RANGE
    clipped = (too_high & (advantages > 0)) | (too_low & (advantages < 0))
    approx_kl = ratio - 1 - log_ratio  # k3 of KL(pi_old || pi)
    return {"approx_kl": approx_kl, "clip_fraction": clipped.float()}


def adapt_kl_coef(kl_coef, kl, num_responses):
    """Returns the KL coefficient after a step: the proportional controller of 1909.08593, section 2.2,
    with gain num_responses / KL_HORIZON instead of 0.1. A step changes it by at most 20%."""
    error = max(-0.2, min(0.2, kl / KL_TARGET - 1))
    return kl_coef * (1 + error * min(1, num_responses / KL_HORIZON))


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


class PPOTrainer:
    """self.run has the files. self.state is what a checkpoint holds beside models and optimizers: you
    may add numbers, texts, lists and tensors (of Python and torch: numpy's cannot be loaded again)."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        self.device = join_processes()
        self.run = Run(resume_from_checkpoint or RESUME)
        self.state = SimpleNamespace(
            step=0,  # number of the current step, from 1; 0: none has begun
            kl_coef=KL_COEF,
            evaluation={},  # the last one's metrics
            best_score=-math.inf,  # its policy is in best/
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
            fault = f"a model of the constants or RESUME={resumed} cannot be loaded"
            raise UserError(f"{fault} ({type(error).__name__}: {first_line(error)})") from error
        if not KL_TARGET:
            self.state.kl_coef = KL_COEF  # a checkpoint may have another
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
        tokenizers = {ACTOR_MODEL: self.tokenizer}
        if REWARD_MODEL:
            tokenizers[REWARD_MODEL] = self.reward_tokenizer
        warn_of_data(self.train_rows, self.eval_rows, tokenizers)
        longest = max(map(len, column(rows, "ids"))) + MAX_NEW_TOKENS
        for model in (self.actor, self.critic):
            check_limits(model, chain(self.end_ids, *column(rows, "ids")), longest)
        prompts_per_step = BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS
        self.steps_per_epoch = math.ceil(len(self.train_rows) / prompts_per_step)
        steps = NUM_EPOCHS * self.steps_per_epoch
        self.total_steps = steps if MAX_STEPS is None else min(steps, MAX_STEPS)
        self.seconds = Counter()  # of the current step, by activity

    def load_models(self, checkpoint):
        """Actor and critic come from the checkpoint if there is one; the others never change."""
        causal = transformers.AutoModelForCausalLM
        classifier = transformers.AutoModelForSequenceClassification
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(ACTOR_MODEL)
        saved = checkpoint and checkpoint / "policy"
        self.actor = load_trained(causal, ACTOR_MODEL, saved).to(self.device)
        saved_critic = checkpoint and checkpoint / "critic"
        self.critic = load_trained(classifier, CRITIC_MODEL or ACTOR_MODEL, saved_critic).to(self.device)
        self.models = {"policy": self.actor, "critic": self.critic}  # what a checkpoint holds
        self.reference = None
        if KL_COEF > 0 and LORA_RANK:
            self.reference = self.actor  # without its adapter
        elif KL_COEF > 0:
            self.reference = load_model(causal, ACTOR_MODEL).to(self.device)
        if REWARD_MODEL:
            self.reward_model = load_model(classifier, REWARD_MODEL).to(self.device)
            if self.reward_model.config.num_labels != 1:
                raise UserError(f"REWARD_MODEL = {REWARD_MODEL!r} must have one label")
            self.reward_tokenizer = transformers.AutoTokenizer.from_pretrained(REWARD_MODEL)
        self.optimizers = {"policy": make_optimizer(self.actor, LEARNING_RATE)}
        self.optimizers["critic"] = make_optimizer(self.critic, CRITIC_LEARNING_RATE)
        self.end_ids = find_end_ids(self.actor, self.tokenizer)
        prefill(self.actor, [[0]])  # refuses a model without a KV cache

    # ------------------------------------------------------------ the algorithm

    def train(self):
        """Trains until the last step, a signal, or patience ends it. Returns the last evaluation."""
        state = self.state
        self.run.open(state, is_complete=self.is_over())  # opens the logs and catches signals
        counts = f"{len(self.train_rows)} prompts and {len(self.eval_rows)} held out"
        self.run.log(f"{counts}, on {self.device}")
        if not state.evaluation:
            self.log_evaluation(self.evaluate())
        while not self.is_over():  # the last step, no patience, or a signal
            state.step += 1
            self.seconds = Counter()
            self.seed_step()
            batch = self.rollout(self.next_prompts())  # samples and scores
            self.compute_advantages(batch)
            metrics = self.update(batch)
            self.record(batch, metrics)
            if KL_TARGET and state.step > CRITIC_WARMUP_STEPS:
                state.kl_coef = adapt_kl_coef(state.kl_coef, metrics["kl"], len(batch.rows))
            is_last = state.step == self.total_steps
            if is_last or (EVAL_EVERY_N_STEPS and state.step % EVAL_EVERY_N_STEPS == 0):
                self.log_evaluation(self.evaluate())
            if SAVE_EVERY_N_STEPS and state.step % SAVE_EVERY_N_STEPS == 0:
                self.save()
        if not self.eval_rows or not (self.run.folder / "best/policy").exists():
            self.save_best()  # without evaluation the last policy is the best
        self.save()
        self.run.close(state)
        return state.evaluation

    def seed_step(self):
        """Makes a step's random numbers a function of its number: a checkpoint need not keep any."""
        seed = (1_000_003 * SEED + self.state.step) % 2**32
        transformers.set_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def is_over(self):
        self.run.signal = max(all_gather(self.run.signal))  # any process may have got it
        waited = self.state.evaluations_without_gain
        has_patience = EARLY_STOPPING_PATIENCE == 0 or waited < EARLY_STOPPING_PATIENCE
        return self.run.signal > 0 or not has_patience or self.state.step >= self.total_steps

    def next_prompts(self):
        """Returns the step's prompts, fewer at the end of an epoch. Each epoch has its own order."""
        epoch, place = divmod(self.state.step - 1, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(SEED + epoch + 1)
        order = torch.randperm(len(self.train_rows), generator=generator)
        return [self.train_rows[i] for i in order.split(BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS)[place]]

    def rollout(self, prompts):
        """Returns GROUP_SIZE scored responses per prompt, see respond(). A process samples its share."""
        # Each process draws all prompts' numbers: samples do not depend on the number of processes
        uniform = torch.rand(len(prompts), GROUP_SIZE, MAX_NEW_TOKENS, generator=self.generator)
        rows = [row for row in share(prompts) for _ in range(GROUP_SIZE)]
        started = time.perf_counter()
        batch = self.respond(rows, share(uniform).flatten(0, 1))
        sampled = time.perf_counter()
        self.score(batch)
        self.seconds["rollout"] += sampled - started
        self.seconds["score"] += time.perf_counter() - sampled
        return join(all_gather(batch))

    def respond(self, rows, uniform):
        """Samples a response to each row. uniform: numbers in [0, 1), (rows, MAX_NEW_TOKENS), that
        decide the tokens; None: the likeliest. Returns a batch on the CPU, whose fields come from
        respond             rows, texts, response_ids (lists); truncated, lengths (rows,); ids, logprobs,
                            entropies, mask (1: a token that the policy sampled) (rows, R)
        score               scores (rows,), reward_parts {name: (rows,)}; values (V_old), ref_logprobs
                            (rows, R)
        compute_advantages  raw_advantages, advantages, returns (the critic's targets) (rows, R)
        Override it for tools. A token that the policy did not sample has mask 0 and logprobs 0, but is
        in ids and response_ids and counts in lengths. Batches are joined: all have R = MAX_NEW_TOKENS."""
        batch = SimpleNamespace(rows=rows)
        batch.ids = torch.full((len(rows), MAX_NEW_TOKENS), self.end_ids[0])
        batch.logprobs, batch.entropies = torch.zeros(2, *batch.ids.shape)
        for first in range(0, len(rows), BATCH_SIZE * GROUP_SIZE):  # the cache of more may not fit
            part = slice(first, first + BATCH_SIZE * GROUP_SIZE)
            numbers = None if uniform is None else uniform[part].to(self.device)
            with autocast(self.device):  # around all tokens: the weights are cast once
                sampled = generate(self.actor, column(rows[part], "ids"), numbers, self.end_ids)
            batch.ids[part], batch.logprobs[part], batch.entropies[part] = sampled
        is_end = torch.isin(batch.ids, torch.tensor(self.end_ids))
        num_ends = is_end.cumsum(1)  # up to each token, itself included
        is_first_end = is_end & (num_ends == 1)
        batch.mask = ((num_ends == 0) | is_first_end).float()
        if not batch.logprobs.isfinite().all():
            raise UserError("probabilities are not finite: lower LEARNING_RATE, RESUME an earlier step")
        batch.logprobs *= batch.mask
        batch.entropies *= batch.mask
        batch.truncated = ~is_end.any(1)
        batch.lengths = batch.mask.sum(1).long()
        batch.response_ids, batch.texts = [], []
        for ids, length, is_truncated in zip(batch.ids.tolist(), batch.lengths, batch.truncated):
            ids = ids[:length]
            batch.response_ids.append(ids)
            without_end = ids if is_truncated else ids[:-1]
            batch.texts.append(self.tokenizer.decode(without_end))  # other special tokens stay
        return batch

    @torch.no_grad()
    def score(self, batch):
        """Adds the scores of the responses, and of their tokens values and reference log-probabilities.
        The rows are whole groups of GROUP_SIZE."""
        self.score_responses(batch)
        batch.values = in_micro_batches(self.critic, batch, token_values)
        batch.ref_logprobs = batch.logprobs  # without a reference: KL 0
        if self.reference is self.actor:
            with self.actor.disable_adapter():
                batch.ref_logprobs = in_micro_batches(self.actor, batch, token_logprobs)
        elif self.reference:
            batch.ref_logprobs = in_micro_batches(self.reference, batch, token_logprobs)

    def score_responses(self, batch):
        """Adds the scores of the responses, (rows,), and reward_parts, what they consist of."""
        self.reward_parts = {}
        prompts, texts, answers, columns = reward_arguments(batch)
        scores = self.compute_rewards(prompts, texts, answers, **columns)
        batch.scores = torch.as_tensor(scores).float() - MISSING_EOS_PENALTY * batch.truncated
        batch.reward_parts = {name: torch.as_tensor(part) for name, part in self.reward_parts.items()}

    def compute_rewards(self, prompts, responses, answers, **columns):
        """Returns the score of each response, (rows,). Edit or override freely. columns: response_ids,
        and the columns of the data. What you put into self.reward_parts is logged as reward/<name>."""
        total = torch.zeros(len(responses))
        if REWARD_MODEL:
            self.reward_parts["reward_model"] = self.reward_model_score(prompts, responses)
            total += REWARD_MODEL_WEIGHT * self.reward_parts["reward_model"]
        for name, function, weight in self.reward_functions:
            values = torch.tensor(call_reward(function, prompts, responses, answers, columns))
            self.reward_parts[name] = values
            total += weight * values
        return total

    @torch.no_grad()
    def reward_model_score(self, prompts, responses):
        """Returns the reward model's score of each response, (rows,). A decoder gives it at the
        last token, an encoder gets prompt and response as a pair of texts."""
        model = self.reward_model
        is_decoder = hasattr(model, "score")  # the name of its head; encoders have another
        size = 4 * MICRO_BATCH_ROWS
        all_pairs = list(zip(prompts, responses))
        scores = torch.zeros(len(prompts))
        for first in range(0, len(prompts), size):
            pairs = all_pairs[first : first + size]
            if is_decoder:
                token_ids = [encode(self.reward_tokenizer, *pair) for pair in pairs]
                ids, mask = pad_left(token_ids, self.device)
                check_limits(model, ids.flatten().tolist(), ids.shape[1])
                output = forward(model, ids, mask)
                logits = head(model, output, output.last_hidden_state[:, -1])
            else:
                inputs = self.reward_tokenizer(pairs, padding=True, truncation=True, return_tensors="pt")
                with autocast(model.device):
                    logits = model(**inputs.to(self.device)).logits
            scores[first : first + size] = logits[:, 0].float().cpu()
        return scores

    def compute_advantages(self, batch):
        """Adds advantages and the critic's targets. Another estimator goes here."""
        token_rewards = per_token_rewards(batch, self.state.kl_coef)
        batch.returns = gae(token_rewards, batch.values, batch.mask, GAMMA, CRITIC_LAM) + batch.values
        batch.raw_advantages = gae(token_rewards, batch.values, batch.mask, GAMMA, LAM)
        batch.advantages = batch.raw_advantages
        if WHITEN_ADVANTAGES:
            batch.advantages = whiten(batch.raw_advantages, batch.mask)

    def update(self, batch):
        """Makes GROUP_EPOCHS passes of MINI_BATCHES optimizer steps. Returns the means of the metrics."""
        scale = learning_rate_scale(self.state.step - 1, self.total_steps, self.state.halvings)
        set_learning_rate(self.optimizers["policy"], scale)
        set_learning_rate(self.optimizers["critic"], scale)
        step_metrics = []  # of each optimizer step
        groups = torch.arange(len(batch.rows)).view(-1, GROUP_SIZE)
        started = time.perf_counter()
        for _ in range(GROUP_EPOCHS):
            order = torch.randperm(len(groups), generator=self.generator)
            for mini_batch in groups[order].tensor_split(min(MINI_BATCHES, len(groups))):
                step_metrics.append(self.optimizer_step(batch, mini_batch.flatten()))
        self.seconds["update"] += time.perf_counter() - started
        # The first optimizer step trains the policy that sampled: all ratios are 1 but for rounding
        mismatch = step_metrics[0]["rollout_mismatch"]
        tolerance = 1e-4 if DTYPE == "float32" else 0.05
        if math.isnan(mismatch) or mismatch > tolerance:
            fault = f"|log ratio| is {mismatch:.2g} before the update"
            raise UserError(f"update and rollout differ: {fault}")
        metrics = {name: np.mean(column(step_metrics, name)).item() for name in step_metrics[0]}
        metrics |= {"rollout_mismatch": mismatch, "learning_rate": LEARNING_RATE * scale}
        metrics["entropy"] = (batch.entropies.sum() / batch.mask.sum()).item()  # of the sampling policy
        # kl: of that policy to the reference. approx_kl: of that policy to the updated one
        if KL_COEF > 0:
            log_ratio = (batch.logprobs - batch.ref_logprobs).clamp(-20, 20)
            metrics["kl"] = masked_mean(log_ratio, batch.mask).item()
        return metrics

    def optimizer_step(self, batch, rows):
        """One step of both optimizers on the responses with the indices `rows`. The loss is the mean
        over all their tokens: a process adds up its micro-batches, then the processes add up their
        gradients."""
        num_tokens = batch.mask[rows].sum().item()
        micros = micro_batches(batch, rows, MICRO_BATCH_ROWS)
        trains_policy = self.state.step > CRITIC_WARMUP_STEPS
        sums = Counter()
        # All processes have the same list; each takes every world_size-th micro-batch
        for micro in progress(micros[rank::world_size], "micro-batches"):
            with torch.set_grad_enabled(trains_policy):
                logprobs, entropy = logprobs_and_entropy(self.actor, batch, micro)
            width = logprobs.shape[1]
            mask = batch.mask[micro, :width].to(self.device)
            old_logprobs = batch.logprobs[micro, :width].to(self.device)
            advantages = batch.advantages[micro, :width].to(self.device)
            old_values = batch.values[micro, :width].to(self.device)
            returns = batch.returns[micro, :width].to(self.device)

            policy_losses = policy_loss(logprobs, old_logprobs, advantages)
            losses = policy_losses  # add a term here; policy_loss is logged without it
            if ENTROPY_COEF:
                losses = losses - ENTROPY_COEF * entropy
            if trains_policy:
                ((losses * mask).sum() / num_tokens).backward()

            values = token_values(self.critic, batch, micro)
            value_losses = value_loss(values, old_values, returns)
            (VALUE_LOSS_COEF * (value_losses * mask).sum() / num_tokens).backward()

            stats = {"policy_loss": policy_losses, "value_loss": value_losses}
            stats |= ppo_stats(logprobs, old_logprobs, advantages)
            stats["rollout_mismatch"] = (logprobs - old_logprobs).abs().clamp(max=20)
            for name, x in stats.items():
                sums[name] += (mask * x).sum().detach() / num_tokens
        if not trains_policy:
            return clip_and_step({"critic": self.optimizers["critic"]}, sums, self.run)
        return clip_and_step(self.optimizers, sums, self.run)

    # ------------------------------------------------------------ evaluation, logs, checkpoints

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
        """Logs the step's metrics, some of its responses, and its line on the terminal."""
        step, mask = self.state.step, batch.mask
        groups = batch.scores.view(-1, GROUP_SIZE)
        variance = masked_variance(batch.returns, mask).clamp(min=1e-8)
        unexplained = masked_variance(batch.returns - batch.values, mask) / variance
        metrics = {
            "epoch": (step - 1) // self.steps_per_epoch + 1,
            **metrics,
            "kl_coef": self.state.kl_coef,
            **self.response_metrics(batch),
            "advantage_mean": masked_mean(batch.raw_advantages, mask).item(),
            "explained_variance": 1 - unexplained.item(),
            "zero_variance_groups": (groups == groups[:, :1]).all(1).float().mean().item(),
            "tokens_per_second": mask.sum().item() / sum(self.seconds.values()),
            **{f"seconds/{name}": seconds for name, seconds in self.seconds.items()},
        }
        self.run.write("metrics.jsonl", phase="train", step=step, **metrics)
        num_samples = min(LOG_SAMPLES, len(batch.rows))
        for i in torch.linspace(0, len(batch.rows) - 1, num_samples).long().tolist():
            sample = {name: batch.rows[i][name] for name in ("id", "prompt", "answer")}
            sample |= {"response": batch.texts[i], "truncated": batch.truncated[i].item()}
            self.run.write("samples.jsonl", step=step, **sample, reward=batch.scores[i].item())
        eta = timedelta(seconds=round(sum(self.seconds.values()) * (self.total_steps - step)))
        self.run.log(
            f"Epoch {metrics['epoch']}/{NUM_EPOCHS}: PL:{metrics['policy_loss']:.4f} "
            f"VL:{metrics['value_loss']:.4f} R:{metrics['reward']:.2f} "
            f"A:{metrics['advantage_mean']:.2f} E:{metrics['entropy']:.3f} "
            f"LR:{metrics['learning_rate']:.2e} EV:{metrics['explained_variance']:.2f}  "
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
        """Logs what evaluate() returned. The policy with the highest reward is kept in best/."""
        state = self.state
        state.evaluation = metrics
        if not metrics:
            return
        self.run.write("metrics.jsonl", phase="eval", step=state.step, **metrics)
        texts = [f"{name} {x:.3f}" for name, x in metrics.items()]
        self.run.log(f"step {state.step}, held out: " + "  ".join(texts))
        gain = metrics["reward"] - state.best_score
        state.evaluations_without_gain += 1
        if gain > EARLY_STOPPING_THRESHOLD:
            state.evaluations_without_gain = 0
        elif state.evaluations_without_gain % 2 == 0:
            state.halvings += 1
        if gain > 0:
            state.best_score = metrics["reward"]
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


def load_model(auto_class, path, is_trained=False, is_critic=False):
    """Returns a model in evaluation mode, in which it stays. Missing weights are an error, but the
    value head of a critic starts at 0 if it is missing or has another shape. Linear layers that are not
    trained, except the head, are stored in DTYPE: autocast would cast them at each call."""
    options = {"output_loading_info": True, "dtype": torch.float32, "attn_implementation": ATTENTION}
    if is_critic:
        options |= {"num_labels": 1, "ignore_mismatched_sizes": True}
    model, info = auto_class.from_pretrained(path, **options)
    missing = info["missing_keys"] | {key[0] for key in info["mismatched_keys"]}
    if is_critic and "score.weight" in missing:
        missing.remove("score.weight")
        torch.nn.init.zeros_(model.score.weight)
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
    is_critic = auto_class is transformers.AutoModelForSequenceClassification
    if saved and (saved / "adapter_config.json").exists() != (LORA_RANK > 0):
        raise UserError(f"{saved} was trained with another LORA_RANK")
    if LORA_RANK == 0:
        model = load_model(auto_class, saved or path, is_trained=True, is_critic=is_critic)
    else:
        import peft  # slow

        task = "SEQ_CLS" if is_critic else "CAUSAL_LM"  # SEQ_CLS trains the head whole
        options = {"r": LORA_RANK, "lora_alpha": LORA_ALPHA, "target_modules": "all-linear"}
        base = load_model(auto_class, path, is_critic=is_critic)
        if base.config.model_type in ("falcon_h1", "nemotron_h"):
            options["exclude_modules"] = ["out_proj", "conv1d"]  # PEFT refuses them
        model = peft.get_peft_model(base, peft.LoraConfig(**options, task_type=task))
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
def generate(model, prompts, uniform, end_ids):
    """Returns ids, log-probabilities and entropies, (rows, MAX_NEW_TOKENS), arbitrary after an end."""
    device = model.device
    decoder = Decoder(model, prompts)
    active = torch.arange(len(prompts), device=device)  # the rows that are not finished
    ids = torch.full((len(prompts), MAX_NEW_TOKENS), end_ids[0], device=device)
    logprobs, entropies = torch.zeros(2, len(prompts), MAX_NEW_TOKENS, device=device)
    ends = torch.tensor(end_ids, device=device)
    is_finished = torch.zeros_like(active, dtype=torch.bool)
    for t in progress(range(MAX_NEW_TOKENS), "tokens"):
        distribution = sampling_logprobs(decoder.logits)  # (rows, vocabulary)
        probabilities = distribution.exp()
        tokens = distribution.argmax(-1)
        if uniform is not None:
            tokens = sample_tokens(probabilities, uniform[active, t])
        ids[active, t] = tokens
        logprobs[active, t] = distribution.gather(1, tokens.unsqueeze(1)).squeeze(1)
        entropies[active, t] = -(probabilities * distribution).sum(-1)
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
    return ids.cpu(), logprobs.cpu(), entropies.cpu()


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
    """Returns log-probabilities and entropies (0 if ENTROPY_COEF is 0) of tokens, two (tokens,)."""
    distribution = sampling_logprobs(head(model, output, hidden))  # (tokens, vocabulary)
    logprobs = distribution.gather(1, ids.unsqueeze(1)).squeeze(1)
    if ENTROPY_COEF == 0:
        return logprobs, torch.zeros_like(logprobs)
    return logprobs, -(distribution.exp() * distribution).sum(-1)


def token_logprobs(model, batch, rows):
    """Returns the log-probability of each response token, (rows, R)."""
    return logprobs_and_entropy(model, batch, rows)[0]


def token_values(critic, batch, rows):
    """Returns the critic's value before each response token, (rows, R)."""
    _, output = response_output(critic, batch, rows)
    return head(critic, output, output.last_hidden_state).squeeze(2)


@torch.no_grad()
def in_micro_batches(model, batch, compute):
    """Returns compute(model, batch, rows) of all rows, (rows, R), 0 outside the mask."""
    result = torch.zeros_like(batch.logprobs)
    for rows in micro_batches(batch, torch.arange(len(batch.rows)), 4 * MICRO_BATCH_ROWS):
        values = compute(model, batch, rows)
        result[rows, : values.shape[1]] = values.cpu()
    return result * batch.mask


def micro_batches(batch, rows, size):
    """Cuts row numbers into micro-batches. Groups go by their longest response, longest first: there is
    little padding, and a group, whose prompt is read once, stays together."""
    longest = batch.lengths.view(len(batch.rows) // GROUP_SIZE, GROUP_SIZE).amax(1)  # of each group
    order = longest.repeat_interleave(GROUP_SIZE)[rows].argsort(descending=True, stable=True)
    return [micro for micro in rows[order].split(size) if len(micro) > 0]


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
        """Moves files to the folder `target`: checkpoints after the resumed one if the run continues
        here, else all that an earlier run left. best/ moves with them: it may come from what was moved."""
        config = self.folder / "training_config.json"
        is_own = self.checkpoint and self.checkpoint.resolve().parent == self.folder.resolve()
        if not is_own:
            state.best_score, state.log_sizes, state.wandb_id = -math.inf, {}, None
            state.evaluations_without_gain = 0
        if not config.exists():
            return
        stale = list_checkpoints(self.folder)
        if is_own:
            stale = [path for path in stale if int(path.name.removeprefix("step_")) > state.step]
        else:
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


# The panels of ppo_metrics_with_entropy.png; training_metrics_detailed.png has all metrics that vary
PANELS = "accuracy_sampled reward entropy value_loss explained_variance kl clip_fraction".split()


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
        "BATCH_SIZE GRADIENT_ACCUMULATION_STEPS GROUP_SIZE MICRO_BATCH_ROWS EVAL_SAMPLES MAX_NEW_TOKENS "
        "GROUP_EPOCHS MINI_BATCHES NUM_EPOCHS MAX_STEPS KEEP_LAST_N_CHECKPOINTS MAX_EVAL_PROMPTS "
        "KL_HORIZON DECODE_BLOCK LOGIT_CHUNK"
    )
    schedules = ("linear", "cosine", "plateau")
    above_zero = min(TEMPERATURE, CLIP_RANGE, MAX_GRAD_NORM)
    fractions = (GAMMA, LAM, CRITIC_LAM)
    require(DTYPE in ("float32", "bfloat16"), "DTYPE is float32 or bfloat16")
    require(LR_SCHEDULER_TYPE in schedules, f"LR_SCHEDULER_TYPE is one of {schedules}")
    require(above_zero > 0, "TEMPERATURE, CLIP_RANGE and MAX_GRAD_NORM are above 0")
    require(min(fractions) >= 0 and max(fractions) <= 1, "GAMMA, LAM and CRITIC_LAM are between 0 and 1")
    require(CLIP_RANGE_HIGH != 0, "CLIP_RANGE_HIGH is None or above 0")
    require("{input}" in PROMPT_TEMPLATE, "PROMPT_TEMPLATE contains {input}")
    require(TRAIN_DATASETS, "TRAIN_DATASETS has a data set")
    require(REWARD_MODEL or REWARD_FUNCTIONS, "there is a REWARD_MODEL or a reward function")
    if KL_TARGET is not None:
        require(min(KL_TARGET, KL_COEF) > 0, "KL_TARGET is above 0 and needs KL_COEF > 0")


def train_main():
    """Exit codes: 0; 2: the user can correct it; 130, 143: a signal; 1, with a traceback: the rest."""
    trainer = None
    try:
        apply_overrides(sys.argv[1:])
        trainer = PPOTrainer()
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
