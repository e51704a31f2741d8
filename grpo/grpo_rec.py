"""GRPO for recommendation, in one file: a language model whose tokens are the codes of items.

A history of items is a prompt of their codes, <a_7><b_120><c_3>; the next item is the response. Decoding
walks a trie of the catalogue: the softmax runs over the codes that continue some item, so the policy can
answer with nothing but items,

    pi(item | history) = prod_t pi(c_t | history, c_<t),    pi(c | prefix) = softmax over the trie's children

and every log-probability below, sampled or trained, is of this constrained distribution. Two stages:

    SFT    L = -mean_t log pi(c_t of the logged next item)              keeps the best validation NDCG@10
    GRPO   the GROUP_SIZE candidates of a history, with scores s_i, are each other's baseline (2402.03300):
           A_i    = s_i - mean of its group, by default not divided by a deviation (SCALE_REWARDS)
           rho_t  = pi(c_t) / pi_old(c_t),    clip_t = clip(rho_t, 1 - CLIP_RANGE, 1 + CLIP_RANGE_HIGH)
           L      = mean_t (-min(rho_t A_i, clip_t A_i) + KL_COEF kl_t - ENTROPY_COEF H_t)

The candidates are samples. kl_t compares the policy with the best one of SFT: log(pi / pi_ref)^2 / 2, whose
gradient is on policy that of KL(pi || pi_ref), or k3 (KL_ESTIMATOR). The likeliest items, which beam search
finds, are recommended and evaluated.

Shapes: rows = histories; G = GROUP_SIZE; depth = codes of an item; R = codes of all items of a response.

    python grpo/grpo_rec.py                           # edit the constants below, or give KEY=VALUE or @FILE
    python grpo/grpo_rec.py MAX_STEPS=0               # SFT alone, before the command above goes on with GRPO
    python grpo/grpo_rec.py SFT_EPOCHS=0 ACTOR_MODEL=checkpoints/grpo_rec/sft/policy OUTPUT_DIR=checkpoints/rl
    python data/make_codes.py mine LOG=log.csv        # your own log: user, item, timestamp, title
    python grpo/grpo_rec.py @mine/words.txt

Writes logs/, step_N/ (checkpoints), sft/policy/ (the best of SFT), best/policy/, eval_test.json and two
pictures into OUTPUT_DIR. A run that was killed continues from its last checkpoint, to the same bytes.

To change      see                                       To change      see
the loss       policy_loss, kl_loss; sft_update          the data       TRAIN_FILE ...; load_splits
the advantage  group_advantages                          a metric       record, list_figures
the reward     RULE_WEIGHT ...; compute_rewards          a plot         PANELS, draw_grid
candidates     constrained_logprobs, search              the prompt     PROMPT_TEMPLATE, encode
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
from collections import Counter
from contextlib import contextmanager, suppress
from copy import deepcopy
from datetime import datetime, timedelta
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):
    print(__doc__ + Path(__file__).read_text().split("= constants\n")[1].split("\n# =====")[0])
    sys.exit()

import filelock
import numpy as np
import torch
import transformers
from matplotlib.figure import Figure
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import DynamicCache as Cache

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "rewards").is_dir()), None)
if ROOT is None:
    sys.exit(f"{__file__}: copy the folder rewards/ of the repository beside this file, or above it")
sys.path.insert(0, str(ROOT))
import rewards
from rewards import UserError, call_reward, find_functions

# ================================================================ constants

# Model: a folder or a hub name, whose tokenizer gains the codes. A folder without weights gets random ones:
# data/rec/llama is a small Llama that knows only codes; data/make_llama.py makes others
ACTOR_MODEL = f"{ROOT}/data/rec/llama"
DTYPE = "float32"  # float32 | bfloat16 (autocast; weights and optimizer state stay float32)
DEVICE = "auto"  # auto | cpu | cuda | cuda:1
ATTENTION: str | None = None  # sdpa | eager | flash_attention_2 (if installed); None: what the model has

# Data: csv files of a history and the next item. data/make_codes.py makes all files from a plain log
TRAIN_FILE = f"{ROOT}/data/rec/train.csv"  # all items of a line but the first are targets
VALID_FILE = f"{ROOT}/data/rec/valid.csv"
TEST_FILE: str | None = f"{ROOT}/data/rec/test.csv"  # scored at the end; nothing is chosen by it
USER_COLUMN = "user_id"
HISTORY_COLUMN = "history_item_id"  # such as "[3, 17, 204]", the oldest first
TARGET_COLUMN = "item_id"
INDEX_FILE = f"{ROOT}/data/rec/index.json"  # {item: its codes}
ITEM_FILE: str | None = f"{ROOT}/data/rec/items.txt"  # lines of codes, title, item, tab between
BASELINES_FILE = f"{ROOT}/data/rec/baselines.npz"  # other methods' lists; data/rec_baselines.py makes them
MAX_HISTORY = 10  # items; longer histories are cut from the left
MAX_EVAL_ROWS: int | None = 500  # of validation, equally far apart; None: all
PROMPT_TEMPLATE = "{input}"  # the history; the tokenizer's chat template, if it has one, wraps it
TITLE_HISTORY_ROWS = 0.0  # share of training rows that also appear with titles in place of codes
TITLE_ROWS = 0.0  # SFT: share of the items that are also asked for by their title

# Rewards: the score is the sum of weight * part
VALUE_WEIGHT = 1.0  # an item's value after the history, from VALUES_FILE, 0 to 1
RULE_WEIGHT = 1.0  # 1 for the logged target
REWARD_FUNCTIONS = []  # yours: (function(histories, items, targets), weight); it gets items' names
VALUES_FILE: str | None = f"{ROOT}/data/rec/values.npy"  # (items, items): worth of the second after the first
VALUE_DECAY = 1.0  # weight of an item of the history relative to the next one

# SFT
SFT_EPOCHS = 9
SFT_BATCH_SIZE = 8  # sequences per optimizer step: take as many as have about 64 items to learn
SFT_LEARNING_RATE = 3e-3  # rises for SFT_WARMUP of the steps, then falls to 0 by a cosine
SFT_WARMUP = 0.05
SFT_BETA2 = 0.95  # of AdamW; with its own 0.999 some seeds stay for long on the loss of the first steps
SFT_WEIGHT_DECAY = 0.05  # share of the weights that an epoch takes away at the full learning rate
SFT_PATIENCE = 4  # epochs without a better NDCG@10 on validation before SFT ends; 0: all are run

# Rollout
BATCH_SIZE = 32  # histories per step
MICRO_BATCH_ROWS = 32  # histories read at a time, with their candidates: memory, not results
GROUP_SIZE = 10  # candidates per history, each other's baseline
TEMPERATURE = 1.0  # > 0; of the distribution that is sampled and trained
EVAL_BEAMS = 50

# Algorithm
LEARNING_RATE = 5e-4
MAX_GRAD_NORM = 1.0  # of SFT too
WEIGHT_DECAY = 0.0  # of GRPO
GROUP_EPOCHS = 1  # passes over each step's candidates
MINI_BATCHES = 1  # optimizer steps per pass
SCALE_REWARDS = "none"  # group | batch | none: whose standard deviation advantages are divided by
CLIP_RANGE = 0.2
CLIP_RANGE_HIGH: float | None = None  # None: CLIP_RANGE. DAPO takes 0.28
ENTROPY_COEF = 0.0
KL_COEF = 0.5  # weight of the KL in the loss
KL_ESTIMATOR = "k2"  # k2 | k3, each with its own gradient

# Schedule and files
MAX_STEPS = 100  # of GRPO; 0: SFT alone
SAVE_EVERY_N_STEPS = 500  # 0: only at the end
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 50  # steps of GRPO; 0: only before the first and after the last. SFT: every epoch
EARLY_STOPPING_PATIENCE = 0  # evaluations without a better reward before GRPO ends; 0: all steps are run
PRINT_EVERY_N_STEPS = 10  # lines on the terminal; metrics.jsonl has every step
LOG_SAMPLES = 4  # candidates per step written to samples.jsonl
RESUME = "ask"  # ask (yes without a terminal) | yes | no | path of a checkpoint or a run
OUTPUT_DIR = f"{ROOT}/checkpoints/{Path(__file__).stem}"
SEED = 1
USE_WANDB = False  # its project and mode: environment variables WANDB_PROJECT, WANDB_MODE

# ================================================================ the maths of GRPO over items


def constrained_logprobs(logits, codes, allowed):
    """Returns log-probabilities (..., width), float32, over the codes that may come next; -inf where allowed
    is False. This distribution is sampled *and* trained, in SFT too: change it here, and the first ratios
    stay 1. logits (..., vocabulary); codes, columns of logits, and allowed (..., width)."""
    scores = logits.gather(-1, codes).float() / TEMPERATURE
    return scores.masked_fill(~allowed, -math.inf).log_softmax(-1)


def group_advantages(scores):
    """Returns the advantages of scores, both (rows, G). Equal scores in a group get exactly 0."""
    groups = scores - scores[:, :1]  # else float32 rounds the mean of equal scores such as 0.7
    advantages = groups - groups.mean(1, keepdim=True)
    if SCALE_REWARDS == "none":
        return advantages
    std = scores.std() if SCALE_REWARDS == "batch" else groups.std(1, keepdim=True)
    return advantages / (std + 1e-4)


def policy_loss(logprobs, old_logprobs, advantages):
    """Returns the clipped loss of each code and its ratio, both (rows, G, depth); advantages (rows, G, 1)."""
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - CLIP_RANGE, 1 + (CLIP_RANGE_HIGH or CLIP_RANGE))
    return -torch.min(ratio * advantages, clipped * advantages), ratio


def kl_loss(logprobs, ref_logprobs):
    """Returns kl_t of each token, (rows, R). Log ratios beyond 20 are cut: exp() would overflow."""
    k1 = (logprobs - ref_logprobs).clamp(-20, 20)
    return 0.5 * k1**2 if KL_ESTIMATOR == "k2" else (-k1).exp() - 1 + k1


def history_values(values, histories):
    """Returns what each item is worth after each history, (histories, items), of values (items, items): a
    mean over the history's items, each weighing VALUE_DECAY times as much as the next one."""
    rows = []
    for history in histories:
        weights = VALUE_DECAY ** torch.arange(len(history) - 1.0, -1.0, -1.0)
        rows.append(weights @ values[history] / weights.sum())
    return torch.stack(rows)


def sft_learning_rate(step, total):
    """Returns SFT's learning rate in a step, from 1: linear warm-up, then a cosine to 0."""
    warmup = round(SFT_WARMUP * total)
    if step <= warmup:
        return SFT_LEARNING_RATE * step / warmup
    done = (step - 1 - warmup) / max(1, total - warmup)
    return SFT_LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * done))


# ================================================================ the trainer


class RecTrainer:
    """Catalogue, models, data and the algorithm; self.run has the files. self.state is what a checkpoint
    holds beside models and optimizers: you may add numbers, texts, lists and tensors of torch."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)  # kernels that add in a fixed order
        torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time
        name = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(name if DEVICE == "auto" else DEVICE)
        self.run = Run(resume_from_checkpoint or RESUME)
        self.catalogue = Catalogue()
        self.state = SimpleNamespace(
            catalogue=zlib.crc32(repr([self.catalogue.items, self.catalogue.codes]).encode()),
            stage="SFT",  # or "GRPO"
            step=0,  # the current one, from 1, of both stages; between steps, how many are done
            first_step=0,  # steps that were done when this stage began
            evaluation={},  # the last one's metrics
            best_ndcg=-math.inf,  # of SFT: its policy is the reference
            best_score=-math.inf,  # of GRPO: its policy is in best/
            evaluations_without_gain=0,
            log_sizes={},  # bytes of each log when the checkpoint was saved
            wandb_id=None,
        )
        self.seed_step()  # for random first weights, and those of new codes
        try:
            self.load_models(self.run.checkpoint)
            if self.run.checkpoint:
                self.load_state(self.run.checkpoint)
        except Exception as error:  # the libraries raise many types
            if isinstance(error, (TypeError, AttributeError, NameError)):
                raise  # a mistake in the program
            names = f"ACTOR_MODEL={ACTOR_MODEL} or RESUME={self.run.checkpoint or RESUME} cannot be loaded"
            raise UserError(f"{names} ({type(error).__name__}: {first_line(error)})") from error
        self.load_data()
        self.run.facts["data"] = digest(self.sft_rows)
        self.reward_functions = find_functions(REWARD_FUNCTIONS)  # [(name, function, weight)]
        for taken in {"value", "rule"} & set(column(self.reward_functions, 0)):
            raise UserError(f"REWARD_FUNCTIONS: rename {taken}(): a part of the reward has this name")
        self.baselines = {}  # their metrics on validation, for the pictures
        self.seconds = Counter()  # of the current step, by activity

    def load_models(self, checkpoint):
        """Loads reference and actor, from the checkpoint if there is one. In SFT the reference keeps the best
        policy so far; in GRPO the KL holds the actor to it."""
        causal = transformers.AutoModelForCausalLM
        path = checkpoint / "reference" if checkpoint else ACTOR_MODEL
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        weights = [*Path(path).glob("*.safetensors"), *Path(path).glob("*.bin")]
        if weights or not Path(path).is_dir():
            self.reference = load_model(causal, path)
        else:  # a folder without weights gets random ones
            config = transformers.AutoConfig.from_pretrained(path)
            self.reference = causal.from_config(config, attn_implementation=ATTENTION).eval()
        known = self.tokenizer.get_vocab()
        self.tokenizer.add_tokens([code for code in self.catalogue.vocabulary if code not in known])
        if len(self.tokenizer) > self.reference.get_input_embeddings().num_embeddings:
            self.reference.resize_token_embeddings(len(self.tokenizer))
        self.reference.requires_grad_(False).to(self.device)
        ids = list(map(self.tokenizer.convert_tokens_to_ids, self.catalogue.codes))
        self.trie = Trie(torch.tensor(ids), self.device)

        if checkpoint is None:
            actor = deepcopy(self.reference).requires_grad_(True)
        else:
            actor = load_model(causal, checkpoint / "policy").requires_grad_(True)
        self.set_actor(actor)

    def set_actor(self, model):
        """Makes a model the one that is trained, with a new optimizer."""
        self.actor = model.to(self.device)
        self.models = {"policy": self.actor, "reference": self.reference}  # what a checkpoint holds
        self.optimizers = {"policy": make_optimizer(self.actor, LEARNING_RATE)}

    def load_data(self):
        """Adds the rows of SFT, GRPO, validation and test."""
        # What the chat template and PROMPT_TEMPLATE put before and behind the codes of a history
        code = self.catalogue.vocabulary[0]
        ids = encode(self.tokenizer, code)
        place = ids.index(self.tokenizer.convert_tokens_to_ids(code))
        self.head, self.tail = ids[:place], ids[place + 1 :]

        sequences, self.valid_rows, self.test_rows = load_splits(self.catalogue)
        self.rl_rows = transitions(sequences)
        for row in self.rl_rows + self.valid_rows + self.test_rows:
            row["ids"] = self.prompt(row["history"])
        code_rows = self.rl_rows
        if not self.tail:  # all items of a sequence are learnt in one pass: the same loss in less time
            code_rows = []
            for sequence in sequences:
                first, *items = sequence["items"]
                code_rows.append({"ids": self.prompt([first]), "items": items, "learn": sequence["learn"]})
        history_rows, title_rows = self.title_rows()
        self.rl_rows = self.rl_rows + history_rows
        self.sft_rows = code_rows + history_rows + title_rows
        rows = self.sft_rows + self.rl_rows + self.valid_rows + self.test_rows
        lengths = [len(row["ids"]) + len(row["items"]) * self.trie.depth for row in rows]
        check_limits(self.actor, chain(*column(rows, "ids")), max(lengths))
        self.steps_per_epoch = math.ceil(len(self.sft_rows) / SFT_BATCH_SIZE)
        self.sft_steps = SFT_EPOCHS * self.steps_per_epoch
        if VALUE_WEIGHT:
            self.values = torch.tensor(read_file("VALUES_FILE", np.load), dtype=torch.float32)
            if self.values.shape != 2 * (len(self.catalogue.items),):
                raise UserError(f"VALUES_FILE = {VALUES_FILE!r} needs a row and a column per item")

    def prompt(self, history):
        """Returns the token ids of a history, a list of item numbers."""
        return self.head + self.trie.codes[history].flatten().tolist() + self.tail

    def title_rows(self):
        """Returns TITLE_HISTORY_ROWS of the rows with titles in place of codes, and TITLE_ROWS of the items,
        each asked for by its title."""
        draw = random.Random(SEED)
        titles = self.catalogue.titles
        missing = [item for item, title in zip(self.catalogue.items, titles) if not title.strip()]
        if missing and TITLE_ROWS + TITLE_HISTORY_ROWS:
            fault = f"{len(missing)} items have no title, such as {missing[0]!r}"
            raise UserError(f"ITEM_FILE = {ITEM_FILE!r}: {fault}; TITLE_ROWS, TITLE_HISTORY_ROWS need all")
        history_rows = draw.sample(self.rl_rows, round(TITLE_HISTORY_ROWS * len(self.rl_rows)))
        for number, row in enumerate(history_rows):
            text = "\n".join(titles[item] for item in row["history"])
            history_rows[number] = {**row, "ids": encode(self.tokenizer, text)}
        title_rows = []
        for item in draw.sample(range(len(titles)), round(TITLE_ROWS * len(titles))):
            title_rows.append({"ids": encode(self.tokenizer, titles[item]), "items": [item], "learn": [True]})
        unknown = self.tokenizer.unk_token_id
        if any(unknown in row["ids"] for row in history_rows + title_rows):
            raise UserError(f"TITLE_HISTORY_ROWS, TITLE_ROWS: {ACTOR_MODEL} does not know the titles' words")
        return history_rows, title_rows

    # ------------------------------------------------------------ the algorithm

    def train(self):
        """Runs SFT, then GRPO from its best policy, then the test. Returns the last evaluation."""
        state = self.state
        last_step = state.first_step + MAX_STEPS
        is_complete = state.stage == "GRPO" and self.is_over(last_step, EARLY_STOPPING_PATIENCE)
        self.run.open(state, is_complete)  # opens the logs and catches signals
        self.run.log(f"{len(self.rl_rows)} rows and {len(self.valid_rows)} held out, on {self.device}")
        for name, lists in baseline_lists(self.valid_rows).items():
            self.baselines[name] = means(self.list_figures(lists, self.valid_rows))
            self.run.log(f"{name:12} held out: {figures_text(self.baselines[name])}")
        if not state.evaluation:
            self.log_evaluation(self.evaluate())
        if state.stage == "SFT":
            self.fine_tune()
        if state.stage == "GRPO":
            self.reinforce()
        self.save()
        if TEST_FILE and not self.run.signal:
            self.test()
        self.run.close(state)
        return state.evaluation

    def fine_tune(self):
        """Runs SFT on the logged items, until its last step or until SFT_PATIENCE has run out."""
        while not self.is_over(self.sft_steps, SFT_PATIENCE):
            rows = self.next_rows(self.sft_rows, SFT_BATCH_SIZE)
            metrics = self.sft_update(rows)
            self.log_step("loss:{sft_loss:.4f} E:{entropy:.3f} LR:{learning_rate:.2e}", metrics)
            if self.state.step % self.steps_per_epoch == 0:
                self.log_evaluation(self.evaluate())
            if SAVE_EVERY_N_STEPS and self.state.step % SAVE_EVERY_N_STEPS == 0:
                self.save()
        if self.run.signal:
            return
        self.save_policy(self.reference, "sft/policy")
        self.save_policy(self.reference, "best/policy")  # GRPO will replace it
        if MAX_STEPS:
            self.begin_grpo()

    def begin_grpo(self):
        """The best policy of SFT, which the reference keeps, becomes the actor."""
        state = self.state
        state.stage, state.first_step = "GRPO", state.step
        state.evaluations_without_gain = 0
        actor = load_model(transformers.AutoModelForCausalLM, self.run.folder / "sft/policy")
        self.set_actor(actor.requires_grad_(True))
        self.log_evaluation(self.evaluate())

    def reinforce(self):
        """Runs GRPO on groups of candidates."""
        state = self.state
        if not (self.run.folder / "sft/policy").exists():  # this folder continues another one's run
            shutil.copytree(self.run.checkpoint.parent / "sft", self.run.folder / "sft")
        last_step = state.first_step + MAX_STEPS
        while not self.is_over(last_step, EARLY_STOPPING_PATIENCE):
            batch = self.rollout(self.next_rows(self.rl_rows, BATCH_SIZE))
            batch.advantages = group_advantages(batch.scores)
            metrics = self.update(batch)
            self.record(batch, metrics)
            steps_done = state.step - state.first_step
            if state.step == last_step or (EVAL_EVERY_N_STEPS and steps_done % EVAL_EVERY_N_STEPS == 0):
                self.log_evaluation(self.evaluate())
            if SAVE_EVERY_N_STEPS and state.step % SAVE_EVERY_N_STEPS == 0:
                self.save()
        if not (self.run.folder / "best/policy").exists():
            self.save_policy(self.actor, "best/policy")

    def seed_step(self):
        """Makes all random numbers of a step a function of its number: a checkpoint need not keep any."""
        seed = (1_000_003 * SEED + self.state.step) % 2**32
        transformers.set_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def is_over(self, last_step, patience):
        out_of_patience = 0 < patience <= self.state.evaluations_without_gain
        return self.run.signal or out_of_patience or self.state.step >= last_step

    def next_rows(self, rows, count):
        """Begins a step and returns its rows, fewer at the end of an epoch. Each epoch has its own order."""
        state = self.state
        epoch, place = divmod(state.step - state.first_step, math.ceil(len(rows) / count))
        state.step += 1
        self.epoch = epoch + 1
        self.seconds = Counter()
        self.seed_step()
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED + self.epoch))
        return [rows[i] for i in order.split(count)[place]]

    def sft_update(self, rows):
        """Makes one optimizer step on the items that were logged. Returns its metrics."""
        started = time.perf_counter()
        group = self.optimizers["policy"].param_groups[0]
        group["lr"] = sft_learning_rate(self.state.step, self.sft_steps)
        group["betas"] = 0.9, SFT_BETA2
        # AdamW takes learning rate * weight decay away per step, and a long log has more steps per epoch
        group["weight_decay"] = SFT_WEIGHT_DECAY / (SFT_LEARNING_RATE * self.steps_per_epoch)
        num_codes = self.trie.depth * sum(map(sum, column(rows, "learn")))
        sums = Counter()
        for first in range(0, len(rows), MICRO_BATCH_ROWS):
            micro = rows[first : first + MICRO_BATCH_ROWS]
            # (micro, T), padded on the right, where a causal model does not see
            items = pad_sequence(list(map(torch.tensor, column(micro, "items"))), batch_first=True)
            learn = pad_sequence(list(map(torch.tensor, column(micro, "learn"))), batch_first=True)
            learn = learn.unsqueeze(2).to(self.device)
            logprobs, entropy = self.logprobs_and_entropy(self.actor, micro, items.to(self.device))
            loss = -(learn * logprobs).sum() / num_codes
            loss.backward()
            sums["sft_loss"] += loss.detach()
            sums["entropy"] += (learn * entropy).sum().detach() / num_codes
        metrics = clip_and_step(self.optimizers, sums, self.run)
        self.seconds.update(update=time.perf_counter() - started)
        return {**metrics, "learning_rate": group["lr"]}

    @torch.no_grad()
    def rollout(self, rows):
        """Returns a batch of GROUP_SIZE candidates for each row, likelier ones first, with their scores:
        rows, items (rows, G), logprobs and ref_logprobs (rows, G, depth), log pi_old and log pi_ref of their
        codes; scores (rows, G), parts {name: (rows, G)}. reinforce() adds advantages (rows, G)."""
        started = time.perf_counter()
        batch = SimpleNamespace(rows=rows)
        batch.items, batch.logprobs = self.search_rows(self.actor, rows, GROUP_SIZE, is_sampled=True)
        searched = time.perf_counter()
        batch.scores, batch.parts = self.compute_rewards(rows, batch.items)
        batch.ref_logprobs = batch.logprobs
        if KL_COEF > 0:
            micro_batches = torch.arange(len(rows)).split(MICRO_BATCH_ROWS)
            logprobs = [self.candidate_logprobs(self.reference, batch, micro)[0] for micro in micro_batches]
            batch.ref_logprobs = torch.cat(logprobs)
        self.seconds.update(rollout=searched - started, score=time.perf_counter() - searched)
        return batch

    def compute_rewards(self, rows, items):
        """Returns the scores of items (rows, G), likelier ones first, and their parts {name: (rows, G)},
        which are logged as reward/<name>. Edit or override freely."""
        items = items.cpu()
        hits = (items == torch.tensor(column(rows, "target")).unsqueeze(1)).float()
        parts = [("rule", RULE_WEIGHT, hits)]
        if VALUE_WEIGHT:
            values = history_values(self.values, column(rows, "history")).gather(1, items)
            parts.append(("value", VALUE_WEIGHT, values))
        # Your functions get one entry per candidate; those of a history are neighbours, likelier ones first
        repeated = [row for row in rows for _ in range(items.shape[1])]
        for name, function, weight in self.reward_functions:
            histories = list(map(self.catalogue.names, column(repeated, "history")))
            targets = self.catalogue.names(column(repeated, "target"))
            names = self.catalogue.names(items.flatten())
            values = torch.tensor(call_reward(function, histories, names, targets, {}))
            parts.append((name, weight, values.view(items.shape)))
        scores = sum(weight * values for _, weight, values in parts)
        return scores.to(self.device), {name: values for name, weight, values in parts if weight != 0}

    def update(self, batch):
        """Makes GROUP_EPOCHS passes of MINI_BATCHES optimizer steps. Returns the means of their metrics."""
        started = time.perf_counter()
        self.optimizers["policy"].param_groups[0]["lr"] = LEARNING_RATE
        steps = []
        for _ in range(GROUP_EPOCHS):
            order = torch.randperm(len(batch.rows), generator=self.generator)
            for rows in order.tensor_split(min(MINI_BATCHES, len(order))):
                steps.append(self.optimizer_step(batch, rows))
        self.seconds.update(update=time.perf_counter() - started)
        # The first optimizer step trains the policy that searched: all ratios are 1 but for rounding
        mismatch = steps[0]["rollout_mismatch"]
        if not mismatch <= {"float32": 1e-4, "bfloat16": 0.05}[DTYPE]:  # it may be NaN
            raise UserError(f"update and rollout differ: |log ratio| is {mismatch:.2g} before the update")
        metrics = {name: np.mean(column(steps, name)).item() for name in steps[0]}
        return {**metrics, "rollout_mismatch": mismatch, "learning_rate": LEARNING_RATE}

    def optimizer_step(self, batch, rows):
        """One optimizer step on the histories `rows` (numbers). The loss is the mean over all their codes."""
        num_codes = batch.logprobs[rows].numel()
        sums = Counter()
        for micro in rows.split(MICRO_BATCH_ROWS):
            logprobs, entropy = self.candidate_logprobs(self.actor, batch, micro)
            advantages = batch.advantages[micro].unsqueeze(2)
            sampled_logprobs = batch.logprobs[micro]
            policy_losses, ratio = policy_loss(logprobs, sampled_logprobs, advantages)
            kl = kl_loss(logprobs, batch.ref_logprobs[micro])
            losses = policy_losses + KL_COEF * kl - ENTROPY_COEF * entropy  # add a term here
            (losses.sum() / num_codes).backward()
            log_ratio = logprobs - sampled_logprobs
            stats = {
                "policy_loss": policy_losses,
                "entropy": entropy,
                "kl": kl,
                "approx_kl": log_ratio.exp() - 1 - log_ratio,
                "clip_fraction": (policy_losses > -ratio * advantages).float(),
                "rollout_mismatch": log_ratio.abs(),
            }
            for name, x in stats.items():
                sums[name] += x.sum().detach() / num_codes
        return clip_and_step(self.optimizers, sums, self.run)

    # ------------------------------------------------------------ what the models say

    def logprobs_and_entropy(self, model, rows, items):
        """Returns the log-probabilities of the codes of items (rows, T), which follow the rows' prompts, and
        the entropy before each code, two (rows, T, depth)."""
        ids = self.trie.codes[items].flatten(1)  # (rows, R)
        prefix = Prefix(model, column(rows, "ids"))
        logits = prefix.logits
        if ids.shape[1] > 1:  # the last code is only predicted
            logits = torch.cat([logits, prefix.read(ids[:, :-1])], 1)  # (rows, R, vocabulary)
        return item_logprobs(self.trie, logits.unflatten(1, (-1, self.trie.depth)), items)

    def candidate_logprobs(self, model, batch, rows):
        """Returns the same of the candidates, two (rows, G, depth), for the histories with the numbers
        `rows`. A history is read once for all its candidates."""
        items = batch.items[rows]
        repeated = [batch.rows[i] for i in rows for _ in range(items.shape[1])]
        logprobs, entropy = self.logprobs_and_entropy(model, repeated, items.view(-1, 1))
        return logprobs.view(*items.shape, -1), entropy.view(*items.shape, -1)

    @torch.no_grad()
    def search_rows(self, model, rows, width, is_sampled=False):
        """Returns `width` items for each row, likelier ones first, (rows, width), and the log-probabilities
        of their codes, (rows, width, depth)."""
        width = min(width, len(self.catalogue.items))
        uniform = torch.rand(len(rows), width, self.trie.depth) if is_sampled else None
        found = []
        for first in tqdm(range(0, len(rows), MICRO_BATCH_ROWS), leave=False, file=sys.stdout, disable=None):
            micro = slice(first, first + MICRO_BATCH_ROWS)
            numbers = uniform[micro].to(self.device) if is_sampled else None
            with autocast(self.device):  # around all codes, so that the weights are cast once
                found.append(search(model, self.trie, column(rows[micro], "ids"), width, numbers))
        items, logprobs = map(torch.cat, zip(*found))
        order = logprobs.sum(2).argsort(dim=1, descending=True, stable=True)
        return items.gather(1, order), logprobs.gather(1, order.unsqueeze(2).expand_as(logprobs))

    def recommend(self, history, k=10, is_new=False):
        """Returns the actor's k likeliest items after a history (names, the oldest first), best first: tuples
        of item, title and probability. is_new=True leaves out the items of the history."""
        history = list(map(str, history))
        unknown = [name for name in history if name not in self.catalogue.number]
        if unknown or not history:
            raise UserError(f"recommend() takes a history of one or more items of INDEX_FILE; not {unknown}")
        items = [self.catalogue.number[name] for name in history]
        rows = [{"ids": self.prompt(items[-MAX_HISTORY:])}]
        (numbers,), (logprobs,) = self.search_rows(self.actor, rows, max(k, EVAL_BEAMS) + len(set(items)))
        found = []
        for number, probability in zip(numbers.tolist(), logprobs.sum(1).exp().tolist()):
            if not (is_new and number in items):
                found.append((self.catalogue.items[number], self.catalogue.titles[number], probability))
        return found[:k]

    # ------------------------------------------------------------ evaluation, logs, checkpoints

    @torch.no_grad()
    def evaluate(self):
        """Returns metrics of the best items for each validation row, and reward_sampled, of samples."""
        rows = self.valid_rows
        lists, _ = self.search_rows(self.actor, rows, EVAL_BEAMS)
        metrics = means(self.list_figures(lists, rows))
        transformers.set_seed(SEED)  # each step is seeded, too: this changes no training
        items, _ = self.search_rows(self.actor, rows, GROUP_SIZE, is_sampled=True)
        metrics["reward_sampled"] = self.compute_rewards(rows, items)[0].mean().item()
        return metrics

    def list_figures(self, lists, rows):
        """Returns metrics of each row's best items (rows, EVAL_BEAMS), best first: {name: (rows,)}. The
        GROUP_SIZE first are rewarded as if they were a group."""
        lists = lists.cpu()
        figures = {}
        for k in (1, 3, 5, 10, 20):
            figures[f"ndcg@{k}"] = gains(lists, rows, k)
            figures[f"hr@{k}"] = (figures[f"ndcg@{k}"] > 0).float()
        scores, parts = self.compute_rewards(rows, lists[:, :GROUP_SIZE])
        figures["reward"] = scores.mean(1).cpu()
        for name, values in parts.items():
            figures[f"reward/{name}"] = values.mean(1)
        figures["coverage@10"] = torch.tensor([len(lists[:, :10].unique()) / len(self.catalogue.items)])
        return figures

    def log_evaluation(self, metrics):
        """Logs what evaluate() returned. The best policy so far is kept, in SFT by NDCG@10 in the reference,
        in GRPO by reward in best/."""
        state = self.state
        state.evaluation = metrics
        self.run.write("metrics.jsonl", phase="eval", step=state.step, **metrics)
        self.run.log(f"step {state.step}, held out: {figures_text(metrics)}")
        state.evaluations_without_gain += 1
        if state.stage == "SFT" and metrics["ndcg@10"] > state.best_ndcg:
            state.best_ndcg = metrics["ndcg@10"]
            state.evaluations_without_gain = 0
            self.reference.load_state_dict(self.actor.state_dict())
        if state.stage == "GRPO" and metrics["reward"] > state.best_score:
            state.best_score = metrics["reward"]
            state.evaluations_without_gain = 0
            self.save_policy(self.actor, "best/policy")

    def record(self, batch, metrics):
        """Logs the metrics of a step of GRPO, some of its candidates, and its line on the terminal."""
        metrics["reward"] = batch.scores.mean().item()
        for name, values in batch.parts.items():
            metrics[f"reward/{name}"] = values.mean().item()
        metrics["advantage_abs"] = batch.advantages.abs().mean().item()
        metrics["zero_variance_groups"] = (batch.scores == batch.scores[:, :1]).all(1).float().mean().item()
        for number in torch.linspace(0, batch.items.numel() - 1, LOG_SAMPLES).long().tolist():
            place, rank = divmod(number, GROUP_SIZE)  # rank 0: the likeliest candidate
            row = batch.rows[place]
            item, target = self.catalogue.names([batch.items[place, rank], row["target"]])
            sample = {"id": row["id"], "history": self.catalogue.names(row["history"]), "target": target}
            sample |= {"item": item, "rank": rank, "reward": batch.scores[place, rank].item()}
            self.run.write("samples.jsonl", step=self.state.step, **sample)
        line = "PL:{policy_loss:.4f} R:{reward:.3f} A:{advantage_abs:.2f} E:{entropy:.3f} KL:{kl:.4f}"
        self.log_step(line, metrics)

    def log_step(self, line, metrics):
        """Logs a step's metrics and its line on the terminal."""
        state = self.state
        last_step = state.first_step + MAX_STEPS if state.stage == "GRPO" else self.sft_steps
        metrics = {"epoch": self.epoch, **metrics}
        metrics |= {f"seconds/{name}": seconds for name, seconds in self.seconds.items()}
        self.run.write("metrics.jsonl", phase="train", step=state.step, **metrics)
        if state.step % PRINT_EVERY_N_STEPS == 0:
            eta = timedelta(seconds=round(sum(self.seconds.values()) * (last_step - state.step)))
            line = f"{state.stage} epoch {self.epoch}: {line.format(**metrics)}"
            self.run.log(f"{line}  step {state.step}/{last_step}, {eta} left")

    @torch.no_grad()
    def test(self):
        """Compares the baselines, SFT's best policy and GRPO's on the test rows, see eval_test.json."""
        lists = baseline_lists(self.test_rows)
        policies = {"sft": "sft/policy"} | ({"grpo": "best/policy"} if self.state.stage == "GRPO" else {})
        for name, path in policies.items():
            model = load_model(transformers.AutoModelForCausalLM, self.run.folder / path).to(self.device)
            lists[name], _ = self.search_rows(model, self.test_rows, EVAL_BEAMS)
        figures = {name: self.list_figures(items, self.test_rows) for name, items in lists.items()}
        if "grpo" in figures:
            figures["grpo - sft"] = {key: figures["grpo"][key] - x for key, x in figures["sft"].items()}
        if VALUE_WEIGHT:  # of the best lists that there could be
            values = history_values(self.values, column(self.test_rows, "history"))
            figures["possible"] = {"reward/value": values.topk(GROUP_SIZE).values.mean(1)}
        table = {}
        for name, by_row in figures.items():
            table[name] = means(by_row)
            for key, values in by_row.items():  # the mean's 95% interval is +- this
                if len(values) > 1:
                    table[name][f"{key} +-"] = 1.96 * values.std().item() / math.sqrt(len(values))
            self.run.log(f"{name:12} test rows: {figures_text(table[name])}")
        (self.run.folder / "eval_test.json").write_text(json.dumps(table, indent=1))

    def save_policy(self, model, path):
        """Writes a policy into OUTPUT_DIR."""
        with atomic_folder(self.run.folder / path) as folder:
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    def save(self):
        """Writes step_N/ if it is not there yet, removes old checkpoints and draws the plots."""
        folder = self.run.folder / f"step_{self.state.step}"
        self.run.checkpoint = folder  # a second train() goes on
        if folder.exists():
            return
        self.run.log(f"Saving {folder}")
        self.state.log_sizes = {name: file.tell() for name, file in self.run.logs.items()}
        with atomic_folder(folder) as tmp:
            for name, model in self.models.items():
                model.save_pretrained(tmp / name)
                self.tokenizer.save_pretrained(tmp / name)
            optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
            saved = {"state": vars(self.state), "optimizers": optimizers, "trained": self.trained_names()}
            torch.save(saved, tmp / "training_state.pt")
            shutil.copy(self.run.folder / "training_config.json", tmp / "run.json")
        for old in list_checkpoints(self.run.folder)[:-KEEP_LAST_N_CHECKPOINTS]:
            shutil.rmtree(old.rename(f"{old}.tmp"))  # what a kill leaves of it is no checkpoint
        draw_grid(self.run.folder, "training_metrics_detailed.png", self.baselines)
        draw_grid(self.run.folder, f"{Path(__file__).stem}_metrics_with_entropy.png", self.baselines, PANELS)

    def trained_names(self):
        """Returns what the optimizers' states belong to: their classes and the parameters of each group."""
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
            raise UserError("it trained other parameters, in another order, or by another optimizer")
        for name, optimizer in self.optimizers.items():
            state = saved["optimizers"][name]["state"]  # not its rates: the constants of now decide
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        if saved["state"]["catalogue"] != self.state.catalogue:
            raise UserError(f"INDEX_FILE = {INDEX_FILE!r} has other codes than the run")
        for name, value in saved["state"].items():
            tensor = getattr(self.state, name, None)
            if torch.is_tensor(tensor):
                tensor.detach().copy_(value)  # in place: an optimizer may train it
            else:
                setattr(self.state, name, value)


# ================================================================ models


def load_model(auto_class, path):
    """Returns a frozen model in evaluation mode, in which it stays. Missing weights are an error."""
    options = {"output_loading_info": True, "dtype": torch.float32, "attn_implementation": ATTENTION}
    model, info = auto_class.from_pretrained(path, **options)
    missing = info["missing_keys"] | {key[0] for key in info["mismatched_keys"]}
    if missing:
        raise UserError(f"the model {path} lacks the weights {', '.join(sorted(missing))}")
    if getattr(model, "peft_config", None):  # all weights would be trained, and the adapter alone saved
        base = next(iter(model.peft_config.values())).base_model_name_or_path
        raise UserError(f"{path} is an adapter of {base}: merge it, or name the run's best/policy")
    for parameter in model.parameters():
        # Weights that are mapped from a file may be unaligned, which changes a product's last bit
        parameter.data = parameter.data.clone()
    return model.requires_grad_(False).eval()


def check_limits(model, ids, length):
    """Refuses token ids that the model has no embedding for, and texts longer than its positions: on a GPU
    they would end the process."""
    count = model.get_input_embeddings().num_embeddings
    if max(ids, default=0) >= count:
        raise UserError(f"{model.name_or_path} has {count} embeddings: too few for its tokenizer's ids")
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    if length > limit * (rope.get("factor") or 1):
        fault = "too few for the longest text with its response"
        raise UserError(f"{model.name_or_path} has {limit} positions: {fault}, {length} tokens")


def autocast(device):
    return torch.autocast(device.type, torch.bfloat16, enabled=DTYPE == "bfloat16")


def make_optimizer(model, learning_rate):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=WEIGHT_DECAY, fused=True)


def clip_and_step(optimizers, sums, run):
    """Clips gradients and steps if all is finite. sums: metrics, 0-d tensors."""
    norms = {}
    for name, optimizer in optimizers.items():
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norms[f"{name}_grad_norm"] = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
    numbers = torch.stack([*sums.values(), *norms.values()]).tolist()  # here alone we wait for the device
    metrics = dict(zip([*sums, *norms], numbers))
    is_finite = all(map(math.isfinite, numbers))
    for optimizer in optimizers.values():
        if is_finite:
            optimizer.step()
        optimizer.zero_grad()
    if not is_finite:
        run.log("WARNING: skipped an optimizer step that is not finite")
    return metrics


# ================================================================ reading prompts and responses
# One path for all: the prompts are read once, then the responses continue from their keys and values, in the
# search a code at a time, in scoring all codes at once, in the update with a gradient.


class Prefix:
    """Prompts that were read, and the rows that continue them. self.logits predict each row's next token.
    prompts: a list of ids per row. Equal ones are read once, for all their rows."""

    def __init__(self, model, prompts):
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        ids, self.mask = pad_left(distinct, model.device)  # (distinct prompts, P)
        self.model = model
        self.cache = Cache(config=model.config)
        self.logits = logits_of(model, ids, self.mask, 1, self.cache)  # (distinct prompts, 1, vocabulary)
        self.select([distinct.index(tuple(prompt)) for prompt in prompts])

    def select(self, rows):
        """Continues with these rows; a row may stand several times."""
        rows = torch.as_tensor(rows, device=self.model.device)
        self.cache.reorder_cache(rows)
        self.mask, self.logits = self.mask[rows], self.logits[rows]

    def read(self, ids):
        """Appends ids (rows, T). Returns the logits (rows, T, vocabulary) that follow each."""
        self.mask = torch.cat([self.mask, torch.ones_like(ids)], 1)
        return logits_of(self.model, ids, self.mask, ids.shape[1], self.cache)


def logits_of(model, ids, mask, keep, cache=None):
    """Returns a policy's logits at the last `keep` positions, (rows, keep, vocabulary). mask also covers what
    the cache has."""
    positions = (mask.cumsum(1)[:, -ids.shape[1] :] - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    inputs |= {"past_key_values": cache, "use_cache": cache is not None}
    with autocast(model.device):
        return model(**inputs, logits_to_keep=keep).logits


def pad_left(rows, device):
    """Returns lists of ids as one tensor, (rows, length of the longest), and its mask."""
    ids = [torch.tensor(row) for row in rows]
    mask = [torch.ones_like(row) for row in ids]
    options = {"batch_first": True, "padding_side": "left"}
    return pad_sequence(ids, **options).to(device), pad_sequence(mask, **options).to(device)


# ================================================================ the trie of the catalogue, and decoding


class Trie:
    """All items' codes as tensors, two per level. A level's nodes are its distinct prefixes, by number.
    codes (items, depth), token ids, all rows distinct."""

    def __init__(self, codes, device):
        self.codes = codes.to(device)
        self.depth = codes.shape[1]
        self.children = []  # of each level: (nodes, width) their children on the next one; -1: none
        self.code = []  # (nodes of the next level,) the code that leads to each
        paths = [torch.zeros(len(codes), dtype=torch.long)]  # (items,) an item's node on each level
        for level in range(self.depth):
            prefixes, node = codes[:, : level + 1].unique(dim=0, return_inverse=True)  # in lexical order
            parent = torch.zeros(len(prefixes), dtype=torch.long).scatter(0, node, paths[-1])
            children = torch.arange(len(prefixes)).split(parent.bincount().tolist())
            self.children.append(pad_sequence(children, batch_first=True, padding_value=-1).to(device))
            self.code.append(prefixes[:, -1].to(device))
            paths.append(node)
        self.paths = torch.stack(paths, 1).to(device)  # (items, depth + 1)
        self.item_at = self.paths[:, -1].argsort()  # (leaves,) the item of each

    def distribution(self, level, nodes, logits):
        """Returns the children of nodes (...) of a level and their log-probabilities, both (..., width)."""
        children = self.children[level][nodes]
        return children, constrained_logprobs(logits, self.code[level][children], children >= 0)


def item_logprobs(trie, logits, items):
    """Returns constrained log-probabilities of the codes of items (...) and the entropy before each, two
    (..., depth). logits (..., depth, vocabulary)."""
    logprobs = []
    entropies = []
    for level in range(trie.depth):
        children, distribution = trie.distribution(level, trie.paths[items, level], logits[..., level, :])
        chosen = (children == trie.paths[items, level + 1].unsqueeze(-1)).long().argmax(-1, keepdim=True)
        logprobs.append(distribution.gather(-1, chosen).squeeze(-1))
        # Without clamp, 0 * -inf would be NaN
        entropies.append(-(distribution.exp() * distribution.clamp(min=-1e30)).sum(-1))
    return torch.stack(logprobs, -1), torch.stack(entropies, -1)


@torch.no_grad()
def search(model, trie, prompts, width, uniform=None):
    """Returns `width` items for each prompt (a list of ids): their numbers (prompts, width), and the
    log-probabilities of their codes, (prompts, width, depth). It goes down the trie level by level with
    several prefixes per prompt: by beam search, or by samples with replacement, which `uniform` numbers
    (prompts, width, depth) decide. Example of beams: of the items ax, ay and bx, width 2, the root's options
    a and b are both kept. Each of them offers two options (b's second is not allowed), totals = [[-0.5, -2.7,
    -1.1, -inf]] of ax, ay, bx and none. The best two are chosen = [[0, 2]], their parents chosen // 2 = [[0,
    1]]: ax goes on from a, bx from b."""
    count = len(prompts)
    prefix = Prefix(model, prompts)
    logits = prefix.logits
    prompt = torch.arange(count, device=model.device)[:, None]
    nodes = torch.zeros(count, 1, dtype=torch.long, device=model.device)  # (prompts, prefixes)
    logprobs = torch.zeros(count, 1, 0, device=model.device)  # (prompts, prefixes, codes so far)
    for level in range(trie.depth):
        children, options = trie.distribution(level, nodes, logits.view(*nodes.shape, -1))
        num_prefixes, num_options = options.shape[1:]  # options (prompts, prefixes, options)
        if uniform is not None:
            parent = torch.arange(width, device=model.device).expand(count, -1) % num_prefixes
            shares = options.exp().cumsum(2)[prompt, parent]  # (prompts, width, options), rising to 1
            drawn = uniform[:, :, level, None] * shares[:, :, -1:]
            chosen = parent * num_options + (shares < drawn).sum(2)
        else:
            totals = (logprobs.sum(2, keepdim=True) + options).flatten(1)
            chosen = totals.topk(min(width, totals.shape[1])).indices  # (prompts, next prefixes)
            parent = chosen // num_options
        nodes = children.flatten(1).gather(1, chosen)
        chosen_logprobs = options.flatten(1).gather(1, chosen)
        logprobs = torch.cat([logprobs[prompt, parent], chosen_logprobs.unsqueeze(2)], 2)
        if level + 1 < trie.depth:
            prefix.select((prompt * num_prefixes + parent).flatten())
            logits = prefix.read(trie.code[level][nodes].view(-1, 1))
    return trie.item_at[nodes], logprobs


# ================================================================ data


def column(rows, field):
    return [row[field] for row in rows]


def encode(tokenizer, prompt):
    """Returns the ids of a prompt, in PROMPT_TEMPLATE and the chat template if there is one."""
    text = PROMPT_TEMPLATE.replace("{input}", prompt)
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        options = {"add_generation_prompt": True, "return_dict": True}
        return tokenizer.apply_chat_template(messages, **options)["input_ids"]
    ids = tokenizer(text)["input_ids"]
    if ids[-1:] == [tokenizer.eos_token_id]:  # some append EOS to every text
        ids = ids[:-1]
    return ids


def read_file(constant, read):
    """Returns read(path) of the file that a constant names. Its failure becomes one line."""
    path = globals()[constant]
    try:
        return read(path)
    except Exception as error:  # the libraries raise many types
        fault = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{constant} = {path!r} cannot be read ({fault})") from None


class Catalogue:
    """The items of INDEX_FILE by number: items (names), titles, codes (lists); vocabulary: all codes."""

    def __init__(self):
        index = read_file("INDEX_FILE", lambda path: json.loads(Path(path).read_text("utf-8-sig")))
        takes = 'it takes {item: codes}, such as {"B0012": ["<a_7>", "<b_120>", "<c_3>"]}'
        if not isinstance(index, dict) or not index:
            raise UserError(f"INDEX_FILE = {INDEX_FILE!r}: {takes}")
        for item, codes in index.items():
            is_list = isinstance(codes, list) and len(codes) > 0
            if not is_list or not all(isinstance(code, str) and code.strip() for code in codes):
                raise UserError(f"INDEX_FILE = {INDEX_FILE!r}: item {item!r} has {codes!r:.80}: {takes}")
        self.items = list(index)
        self.number = {item: number for number, item in enumerate(index)}
        self.codes = list(map(list, index.values()))
        self.vocabulary = sorted(set(chain(*self.codes)))
        if len(set(map(len, self.codes))) > 1:
            raise UserError(f"INDEX_FILE = {INDEX_FILE!r}: all items need the same number of codes")
        ((codes, count),) = Counter(map(tuple, self.codes)).most_common(1)
        if count > 1:
            raise UserError(f"INDEX_FILE = {INDEX_FILE!r}: {count} items have the codes {codes}")
        if len(self.items) < GROUP_SIZE:
            raise UserError(f"GROUP_SIZE = {GROUP_SIZE} is above the number of items, {len(self.items)}")
        titles = read_file("ITEM_FILE", read_titles) if ITEM_FILE else {}
        self.titles = [titles.get(item, "") for item in index]

    def names(self, numbers):
        return [self.items[number] for number in numbers]


def read_titles(path):
    lines = Path(path).read_text("utf-8-sig").removesuffix("\n").split("\n")
    return {item: title for _, title, item in (line.split("\t") for line in lines)}


def read_csv(path):
    csv.field_size_limit(2**31 - 1)  # a history may be longer than the default, 131,072
    with open(path, encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file, strict=True))  # strict: an open quote is an error


def read_sequences(constant, catalogue):
    """Returns [{"id", "user", "items"}] of a csv file; items are the numbers of a history and its target."""
    path = globals()[constant]
    sequences = []
    for line, record in enumerate(read_file(constant, read_csv), 2):
        try:
            names = [*map(str, ast.literal_eval(record[HISTORY_COLUMN])), record[TARGET_COLUMN]]
            items = [catalogue.number[name] for name in names]
            if len(items) < 2:
                raise ValueError("no history")
            sequences.append({"id": f"{Path(path).name}:{line}", "user": record[USER_COLUMN], "items": items})
        except (KeyError, ValueError, SyntaxError, TypeError) as error:
            takes = f"{HISTORY_COLUMN}, a list such as [3, 17], and {TARGET_COLUMN}, of items of INDEX_FILE"
            fault = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"{path} line {line} ({fault}): it takes {USER_COLUMN}, {takes}") from None
    return sequences


def load_splits(catalogue):
    """Returns sequences to train on, and rows of validation and test. A sequence is a row of TRAIN_FILE cut
    to MAX_HISTORY and its target, with "learn", whether each item but the first is a target: not if the same
    user took it after the same item in validation, test or an earlier row."""
    valid = list(map(as_row, read_sequences("VALID_FILE", catalogue)))
    test = list(map(as_row, read_sequences("TEST_FILE", catalogue))) if TEST_FILE else []
    taken = {(row["user"], row["history"][-1], row["target"]) for row in valid + test}
    sequences = []
    for sequence in read_sequences("TRAIN_FILE", catalogue):
        items = sequence["items"][-MAX_HISTORY - 1 :]
        pairs = [(sequence["user"], *pair) for pair in pairwise(items)]
        learn = [pair not in taken for pair in pairs]
        taken.update(pairs)
        if any(learn):
            sequences.append({**sequence, "items": items, "learn": learn})
    if not sequences or not valid:
        raise UserError("TRAIN_FILE or VALID_FILE: no rows are left that the other files do not have")
    if MAX_EVAL_ROWS and len(valid) > MAX_EVAL_ROWS:
        valid = [valid[i] for i in torch.linspace(0, len(valid) - 1, MAX_EVAL_ROWS).long()]
    return sequences, valid, test


def as_row(sequence):
    """Returns the last transition of a sequence as a row with a history and a target."""
    *history, target = sequence["items"][-MAX_HISTORY - 1 :]
    row = {"id": sequence["id"], "user": sequence["user"], "history": history, "target": target}
    return {**row, "items": [target], "learn": [True]}  # SFT reads these two


def transitions(sequences):
    """Returns a row with a history and a target for each item of sequences that is learnt."""
    rows = []
    for sequence in sequences:
        for place, is_learnt in enumerate(sequence["learn"], 1):
            if is_learnt:
                items = sequence["items"][: place + 1]
                rows.append(as_row({**sequence, "id": f"{sequence['id']}#{place}", "items": items}))
    return rows


# ================================================================ figures


def baseline_data():
    """Returns a digest of what other methods learn from and choose their settings by."""
    return digest([MAX_HISTORY, *(Path(path).read_bytes() for path in (INDEX_FILE, TRAIN_FILE, VALID_FILE))])


def baseline_lists(rows):
    """Returns {baseline: best items (rows, 20 or more)} of BASELINES_FILE; {} if it is of other data."""
    if not Path(BASELINES_FILE).exists():
        return {}
    arrays = dict(read_file("BASELINES_FILE", np.load))
    is_current = str(arrays.pop("data", "")) == baseline_data()
    place = {}  # of a history's lists
    for number, history in enumerate(arrays.pop("histories")):
        place[tuple(history[history >= 0])] = number  # -1 is padding
    places = [place.get(tuple(row["history"])) for row in rows]
    width = min(array.shape[1] for array in arrays.values())
    if not is_current or None in places or width < GROUP_SIZE:
        fault = "is of other rows, codes, MAX_HISTORY or a smaller GROUP_SIZE, and is not shown"
        print(f"BASELINES_FILE = {BASELINES_FILE!r} {fault}; data/rec_baselines.py writes it", flush=True)
        return {}
    return {name: torch.tensor(lists[places]).long() for name, lists in arrays.items()}


def gains(lists, rows, k):
    """Returns NDCG of one target, (rows,): 1 / log2(rank + 1) where it is among the first k, rank from 1."""
    targets = torch.tensor(column(rows, "target"))
    discounts = 1 / torch.log2(torch.arange(lists[:, :k].shape[1]) + 2.0)
    return ((lists[:, :k] == targets[:, None]) * discounts).sum(1)


def means(figures):
    return {name: values.mean().item() for name, values in figures.items()}


def figures_text(metrics):
    """Returns the figures that are printed, with half of their 95% intervals if these are known."""
    text = ""
    for name in (*PANELS[:4], "reward_sampled", "coverage@10"):
        if name in metrics:
            text += f"{name} {metrics[name]:.4f}  "
        if f"{name} +-" in metrics:
            text += f"±{metrics[f'{name} +-']:.4f}  "
    return text


# ================================================================ the run's files


class Run:
    """The files of one run in OUTPUT_DIR, and the signals that end the run."""

    def __init__(self, resume):
        self.folder = Path(OUTPUT_DIR).absolute()  # once: a reward function may change the working directory
        self.logs = {}
        self.wandb = None
        self.signal = 0
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.lock = filelock.FileLock(f"{self.folder}.lock", is_singleton=True)
        self.facts = {"file": __file__, "program": os.path.abspath(sys.argv[0]), "torch": torch.__version__}
        paths = {os.path.realpath(path) for path in (__file__, sys.argv[0], rewards.__file__)}
        self.facts["text"] = digest(sorted(Path(path).read_bytes() for path in paths if Path(path).is_file()))
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.lock.acquire(timeout=0)  # fails if another run writes into OUTPUT_DIR
        self.checkpoint = choose_checkpoint(self.folder, resume)
        print(f"Writing to {self.folder}; loading the models", flush=True)

    def on_signal(self, number, frame):
        """Ctrl-C and SIGTERM end the run after the current step; a second one ends it at once."""
        self.signal = number
        signal.signal(number, signal.SIG_DFL)
        print("\nStopping after this step, then saving; again stops at once", flush=True)

    def open(self, state, is_complete):
        """Opens the logs and catches signals. A run that continues cuts the logs back to its checkpoint; if
        no step is left, it is complete."""
        self.outcome = "Nothing was left to do: complete" if is_complete else "Done"
        self.handlers = {}
        with suppress(ValueError):  # only the main thread gets signals
            self.handlers = {n: signal.signal(n, self.on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
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
        config.with_suffix(".tmp").write_text(json.dumps(self.facts | {"constants": constants()}, indent=1))
        config.with_suffix(".tmp").rename(config)
        if USE_WANDB:
            import wandb  # slow

            self.wandb = wandb.init(dir=self.folder, config=constants(), id=state.wandb_id, resume="allow")
            state.wandb_id = self.wandb.id

    def compare(self, state, is_complete):
        """Prints what changed since the checkpoint that is resumed. Refuses another model: the weights are
        those of the checkpoint. Refuses a complete run that would end as if it had trained what changed."""
        if not self.checkpoint:
            return
        earlier = json.loads((self.checkpoint / "run.json").read_text())
        changes = [(k, x) for k, x in constants().items() if earlier["constants"].get(k, x) != x]
        changes = [f"{k}={x!r}" for k, x in changes if k not in ("RESUME", "OUTPUT_DIR", "TEST_FILE")]
        print("Constants that changed: " + (", ".join(changes) or "none"), flush=True)
        for name, what in {"text": "file", "data": "data"}.items():
            if earlier.get(name) != self.facts.get(name):
                changes.append(f"the {what} changed since step {state.step}")
                print(changes[-1], flush=True)
        hint = "RESUME=no or another OUTPUT_DIR begins another run"
        for name in ("ACTOR_MODEL", "CRITIC_MODEL", "BASE_MODEL"):
            model = earlier["constants"].get(name)
            if model != constants().get(name):
                raise UserError(f"the weights of {self.checkpoint} are of {name}={model}: {hint}")
        if is_complete and changes:
            raise UserError(f"complete at step {state.step}, but {'; '.join(changes)}: {hint}")

    def move_old_files(self, state, target):
        """Moves what is later than the run's checkpoint, or all of an earlier run, to the folder `target`."""
        config = self.folder / "training_config.json"
        if not config.exists():
            return
        stale = list_checkpoints(self.folder)
        if self.checkpoint and self.checkpoint.resolve().parent == self.folder.resolve():
            stale = [path for path in stale if int(path.name[5:]) > state.step]
        else:
            state.log_sizes = {}
            names = "training_config.json eval_test.json sft/policy"
            for pattern in f"logs/*.jsonl logs/training_*.log *_metrics_*.png {names}".split():
                stale += self.folder.glob(pattern)
        if stale:  # best/ may be of a later step, or of the other run
            state.best_score = -math.inf
            stale += [path.parent for path in self.folder.glob("best/*/config.json")]
        for path in sorted(stale, key=config.__eq__):  # it goes last: a start without it moves nothing
            moved = target / path.relative_to(self.folder)
            moved.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, moved)
            print(f"Moved {path} to {moved}", flush=True)

    def close(self, state):
        self.log(f"{'Stopped' if self.signal else self.outcome} at step {state.step}")
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.wandb:
            self.wandb.finish()
        self.lock.release(force=True)

    def log(self, text):
        """Prints a line, above any progress bar, and writes it to the log file."""
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
        print(text, file=self.text_log)

    def write(self, name, **record):
        """Writes one line of JSON to a log. Numbers that are not finite become null: JSON has no NaN."""
        record = {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in record.items()}
        self.logs[name].write(json.dumps(record) + "\n")
        if self.wandb and name == "metrics.jsonl":
            phase = record.pop("phase")
            self.wandb.log({f"{phase}/{key}": x for key, x in record.items()}, step=record["step"])


def list_checkpoints(folder):
    """Returns the folders step_N of a run, oldest first."""
    folders = {path.parent.name[5:]: path.parent for path in Path(folder).glob("step_*/training_state.pt")}
    return [folders[str(number)] for number in sorted(int(name) for name in folders if name.isdecimal())]


def choose_checkpoint(folder, resume):
    """Returns the checkpoint to resume from, or None. Asks at a terminal if resume is "ask"."""
    checkpoints = list_checkpoints(folder)
    if resume not in ("ask", "yes", "no"):
        checkpoints = list_checkpoints(resume) or [Path(resume)]
        if not (checkpoints[-1] / "training_state.pt").exists():
            raise UserError(f"RESUME = {resume!r} is not ask, yes, no, or the folder of a checkpoint or run")
    if resume == "yes" and not checkpoints:
        print(f"RESUME=yes: {folder} has no checkpoint, the run begins afresh", flush=True)
    if resume == "no" or not checkpoints:
        return None
    print(f"Found checkpoint: {checkpoints[-1]}", flush=True)
    asks = resume == "ask" and sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()
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


# The panels of grpo_rec_metrics_with_entropy.png; training_metrics_detailed.png has all metrics that vary.
# The first four are compared on the test rows, with intervals
PANELS = "hr@10 ndcg@10 reward reward/value reward_sampled entropy sft_loss policy_grad_norm kl".split()


def draw_grid(folder, path, baselines, names=None):
    """Draws a panel per metric: each training step faint, their rolling mean, and the evaluations' points.
    baselines {name: metrics} are dashed lines."""
    records = [json.loads(line) for line in (folder / "logs/metrics.jsonl").read_text().splitlines()]
    names = [name for name in names or dict.fromkeys(chain(*records)) if name not in ("phase", "step")]
    names = [name for name in names if len({r.get(name) for r in records} - {None}) > 1]  # it varies
    height = max(1, math.ceil(len(names) / 3))
    figure = Figure(figsize=(10, 2.3 * height + 0.5), layout="tight")
    for number, name in enumerate(names, 1):
        axis = figure.add_subplot(height, 3, number, title=name, xlabel="step")
        axis.grid(alpha=0.3)
        for phase in dict.fromkeys(column(records, "phase")):
            points = [r for r in records if r["phase"] == phase and r.get(name) is not None]
            steps, values = column(points, "step"), column(points, name)
            if phase != "train":
                axis.plot(steps, values, "o-", color="C1", markersize=4)
            elif values:
                window = max(1, len(values) // 12)
                means = np.convolve(values, np.full(window, 1 / window), "valid")
                axis.plot(steps, values, ".-", color="C0", alpha=0.25)
                axis.plot(steps[window - 1 :], means, color="C0")
        for color, (baseline, metrics) in enumerate(baselines.items(), 2):
            if name in metrics:
                axis.axhline(metrics[name], linestyle="--", linewidth=1, color=f"C{color}", label=baseline)
        if name == "ndcg@10" and baselines:
            axis.legend(fontsize=7)
    title = "blue: training, each step and rolling mean; orange: held out; dashed: other methods, held out"
    figure.suptitle(title, fontsize=9)
    figure.savefig(folder / path, dpi=110)


# ================================================================ command line


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def constants():
    """Returns every constant of this file by name, as JSON has it."""
    values = {name: x for name, x in globals().items() if name.isupper() and name not in ("ROOT", "PANELS")}

    def describe(x):  # a function by its name, an object without its address in memory
        return getattr(getattr(x, "func", x), "__name__", re.sub(r" at 0x\w+", "", str(x)))

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
    """Sets constants from KEY=VALUE arguments, or @FILE with one on each line, in the constants' types."""
    for argument in arguments:
        if argument.startswith("@"):
            apply_overrides(read_constants(argument[1:]))
            continue
        key, _, text = argument.partition("=")
        if key not in constants():
            near = difflib.get_close_matches(key.upper(), constants(), 1, 0.0)[0]
            raise UserError(f"{argument!r} is not KEY=VALUE with a constant of this file, such as {near}")
        wanted = __annotations__.get(key, type(globals()[key]))  # a type such as int, or int | None
        value = os.path.expanduser(text).replace("{file}", Path(sys.argv[0]).stem)
        # \n is a line break, but in \\n and in LaTeX's \neq, \nu and the like
        latex = r"(?:eq?|u|abla|ot(?:in)?|eg|mid|cong|leq|geq|less|exists|atural|orm)(?![a-z])"
        value = re.sub(rf"(?<!\\)\\n(?!{latex})", "\n", value).replace(r"\\n", r"\n")
        if not isinstance(value, wanted) or text == "None":
            with suppress(ValueError, SyntaxError):
                value = ast.literal_eval(text)
        if type(value) is int and isinstance(0.0, wanted):
            value = float(value)
        if not isinstance(value, wanted):
            raise UserError(f"{argument}: {key} takes a value such as {globals()[key]!r}")
        globals()[key] = value


def check_numbers(counts):
    """Refuses numbers below 0, or below 1 if `counts` has their names."""
    for name, value in constants().items():
        lowest = int(name in counts.split())
        if type(value) not in (int, float) or name == "REWARD_MODEL_WEIGHT":
            continue
        if not lowest <= value or (type(value) is int and value >= 2**63):  # NaN, and seeds beyond 64 bits
            raise UserError(f"{name} = {value!r} is not a number from {lowest} on (or too large)")


def check_constants():
    """Refuses values that would fail silently or late."""
    check_numbers(
        "MAX_HISTORY MAX_EVAL_ROWS SFT_BATCH_SIZE BATCH_SIZE MICRO_BATCH_ROWS GROUP_EPOCHS "
        "MINI_BATCHES KEEP_LAST_N_CHECKPOINTS PRINT_EVERY_N_STEPS"
    )
    above_0 = min(TEMPERATURE, CLIP_RANGE, MAX_GRAD_NORM, SFT_LEARNING_RATE)
    shares = VALUE_DECAY, SFT_WARMUP, TITLE_ROWS, TITLE_HISTORY_ROWS
    rules = {
        "DTYPE is float32 or bfloat16": DTYPE in ("float32", "bfloat16"),
        "SCALE_REWARDS is group, batch or none": SCALE_REWARDS in ("group", "batch", "none"),
        "KL_ESTIMATOR is k2 or k3": KL_ESTIMATOR in ("k2", "k3"),
        "TEMPERATURE, CLIP_RANGE, MAX_GRAD_NORM, SFT_LEARNING_RATE are above 0": above_0 > 0,
        "VALUE_DECAY, SFT_WARMUP, TITLE_ROWS, TITLE_HISTORY_ROWS are at most 1": max(shares) <= 1,
        "GROUP_SIZE is 2 or more, and at most EVAL_BEAMS": 2 <= GROUP_SIZE <= EVAL_BEAMS,
        "EVAL_BEAMS is 20 or more": EVAL_BEAMS >= 20,
        "a reward has a weight": VALUE_WEIGHT or RULE_WEIGHT or REWARD_FUNCTIONS,
        "VALUE_WEIGHT needs a VALUES_FILE": VALUES_FILE or not VALUE_WEIGHT,
        "TITLE_ROWS, TITLE_HISTORY_ROWS need an ITEM_FILE": ITEM_FILE or not TITLE_ROWS + TITLE_HISTORY_ROWS,
        "PROMPT_TEMPLATE contains {input}": "{input}" in PROMPT_TEMPLATE,
    }
    for rule, is_kept in rules.items():
        if not is_kept:
            raise UserError(f"a constant breaks a rule: {rule}")


def train_main():
    """Exit codes: 0; 2: the user can correct it; 130, 143: a signal; 1, with a traceback: other errors."""
    trainer = None
    try:
        apply_overrides(sys.argv[1:])
        trainer = RecTrainer()
        trainer.train()
    except (UserError, OSError) as error:  # OSError: a file that cannot be read or written
        if trainer and not isinstance(error, UserError):
            raise  # a reward function's fault, or a full disk
        print(f"\n{Path(__file__).name}: {first_line(error)}", file=sys.stderr)
        sys.exit(2)
    if trainer.run.signal:
        sys.exit(128 + trainer.run.signal)


if __name__ == "__main__":
    train_main()
