"""GRPO for recommendation, in one file: a language model whose tokens are the codes of items.

An item is a few codes, <a_7><b_120><c_3>. The prompt is the codes of a history of items; the response is
the codes of the next item. Decoding walks a trie of the catalogue: the softmax runs over the codes that
continue some item, so the policy can answer with nothing but items,

    pi(item | history) = prod_t pi(c_t | history, c_<t)
    pi(c | prefix)     = softmax over the children of the prefix in the trie

Every log-probability below, sampled or trained, is of this constrained distribution. Two stages:

    SFT    L = -mean_t log pi(c_t of the logged next item)              keeps the best validation NDCG@10
    GRPO   GROUP_SIZE candidates per history, with scores s_i, are each other's baseline (2402.03300):
           A_i    = s_i - mean of its group (SCALE_REWARDS can also divide it by a standard deviation)
           rho_t  = pi(c_t) / pi_old(c_t),    clip_t = clip(rho_t, 1 - CLIP_RANGE, 1 + CLIP_RANGE_HIGH)
           kl_t   = log(pi(c_t) / pi_ref(c_t))^2 / 2,    pi_ref = the best policy of SFT
           L      = mean_t (-min(rho_t A_i, clip_t A_i) + KL_COEF kl_t - ENTROPY_COEF H_t)

On policy this kl_t has the gradient of KL(pi || pi_ref); KL_ESTIMATOR has another form. The candidates
are samples. What is evaluated and recommended is the likeliest items, which beam search finds.

Shapes: rows = histories; G = GROUP_SIZE; depth = codes of an item; R = codes of all items of a response.

    python grpo/grpo_rec.py                      # edit the constants below, or give KEY=VALUE or @FILE
    python grpo/grpo_rec.py MAX_STEPS=0          # SFT alone; the command above then continues with GRPO
    python data/make_codes.py mine LOG=log.csv   # your own log: user, item, timestamp, title
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

ROOT = Path(__file__).resolve().parent
while not (ROOT / "rewards").is_dir():
    if ROOT.parent == ROOT:
        sys.exit(f"{__file__}: copy the folder rewards/ of the repository beside this file, or above it")
    ROOT = ROOT.parent
sys.path.insert(0, str(ROOT))
import rewards
from rewards import UserError, call_reward, find_functions

# ================================================================ constants

# Model: a folder or a hub name; the codes are added to its tokenizer. A folder without weights gets
# random ones: data/rec/llama is a small Llama that knows only codes; data/make_llama.py makes others
ACTOR_MODEL = f"{ROOT}/data/rec/llama"
DTYPE = "float32"  # float32 | bfloat16 (autocast; weights and optimizer state stay float32)
DEVICE = "auto"  # auto | cpu | cuda | cuda:1

# Data: csv files of a history and the next item. data/make_codes.py makes all files from a plain log
TRAIN_FILE = f"{ROOT}/data/rec/train.csv"  # each item of a line but the first is a target
VALID_FILE = f"{ROOT}/data/rec/valid.csv"
TEST_FILE: str | None = f"{ROOT}/data/rec/test.csv"  # scored once, at the end
USER_COLUMN = "user_id"
HISTORY_COLUMN = "history_item_id"  # such as "[3, 17, 204]", oldest first
TARGET_COLUMN = "item_id"
INDEX_FILE = f"{ROOT}/data/rec/index.json"  # {item: its codes}
ITEM_FILE: str | None = f"{ROOT}/data/rec/items.txt"  # lines of codes, title and item, separated by tabs
BASELINES_FILE = f"{ROOT}/data/rec/baselines.npz"  # lists by other methods, see data/rec_baselines.py
MAX_HISTORY = 10  # items; of longer histories the last ones
MAX_EVAL_ROWS: int | None = 500  # validation rows that are used, evenly spaced; None: all
PROMPT_TEMPLATE = "{input}"  # {input}: the history. A chat template, if the tokenizer has one, wraps it
TITLE_HISTORY_ROWS = 0.0  # share of training rows that are added with titles in place of codes
TITLE_ROWS = 0.0  # SFT: share of items for which a row is added that asks for the item by its title

# Rewards: the score is the sum of weight * part
VALUE_WEIGHT = 1.0  # of the item's value after the history, see VALUES_FILE
RULE_WEIGHT = 1.0  # of the rule: 1 for the logged target, else 0
REWARD_FUNCTIONS = []  # yours: (function(histories, items, targets), weight); items are names
VALUES_FILE: str | None = f"{ROOT}/data/rec/values.npy"  # [i, j]: value of item j after item i, 0 to 1
VALUE_DECAY = 1.0  # weight of an item of the history relative to the next one

# SFT
SFT_EPOCHS = 9
SFT_BATCH_SIZE = 8  # sequences per optimizer step; choose it so that a step has about 64 target items
SFT_LEARNING_RATE = 3e-3  # the highest one, after the warm-up; a cosine then lowers it to 0
SFT_WARMUP = 0.05  # share of the steps
SFT_BETA2 = 0.95  # of AdamW; with 0.999, its default, some seeds are stuck at the initial loss for long
SFT_WEIGHT_DECAY = 0.05  # share of the weights that one epoch removes at the full learning rate
SFT_PATIENCE = 4  # epochs without a better NDCG@10 on validation before SFT ends; 0: never ends early

# Rollout
BATCH_SIZE = 32  # histories per step
MICRO_BATCH_ROWS = 32  # histories per forward pass, with all their candidates; fewer need less memory
GROUP_SIZE = 10  # candidates per history, each other's baseline
TEMPERATURE = 1.0  # > 0; of the distribution that is sampled and trained
EVAL_BEAMS = 50  # beams in evaluation

# Algorithm
LEARNING_RATE = 5e-4
MAX_GRAD_NORM = 1.0  # of SFT too
GROUP_EPOCHS = 1  # passes over each step's candidates
MINI_BATCHES = 1  # optimizer steps per pass
SCALE_REWARDS = "none"  # group | batch: divides advantages by its standard deviation | none
CLIP_RANGE = 0.2
CLIP_RANGE_HIGH: float | None = None  # None: the same as CLIP_RANGE. DAPO uses 0.28
ENTROPY_COEF = 0.0
KL_COEF = 0.5
KL_ESTIMATOR = "k2"  # k2: log(pi / pi_ref)^2 / 2 | k3: pi_ref / pi - 1 - log(pi_ref / pi)

# Schedule and files
MAX_STEPS = 100  # of GRPO; 0: SFT alone
SAVE_EVERY_N_STEPS = 500  # 0: only at the end
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 50  # of GRPO; 0: only before the first and after the last. SFT: after every epoch
EARLY_STOPPING_PATIENCE = 0  # evaluations without a better reward before GRPO ends; 0: never ends early
PRINT_EVERY_N_STEPS = 10  # on the terminal; metrics.jsonl has every step
LOG_SAMPLES = 4  # candidates per step written to samples.jsonl
RESUME = "ask"  # ask (yes without a terminal) | yes | no | path of a checkpoint or a run
OUTPUT_DIR = f"{ROOT}/checkpoints/{Path(__file__).stem}"
SEED = 1
USE_WANDB = False  # its project and mode: environment variables WANDB_PROJECT, WANDB_MODE

# ================================================================ the maths of GRPO over items


def constrained_logprobs(logits, codes, is_allowed):
    """Returns log-probabilities (..., width), float32, over the allowed ones of `codes`; -inf for the
    others. This distribution is sampled *and* trained, in SFT too: change it here, and the first ratios
    stay 1. logits (..., vocabulary); codes (..., width) are token ids; is_allowed (..., width)."""
    scores = logits.gather(-1, codes).float() / TEMPERATURE
    return scores.masked_fill(~is_allowed, -math.inf).log_softmax(-1)


def group_advantages(scores):
    """Returns the advantages of scores, both (rows, G). Equal scores in a group get exactly 0."""
    differences = scores - scores[:, :1]  # without it the mean of equal scores such as 0.7 is rounded
    advantages = differences - differences.mean(1, keepdim=True)
    if SCALE_REWARDS == "group":
        advantages = advantages / (differences.std(1, keepdim=True) + 1e-4)
    if SCALE_REWARDS == "batch":
        advantages = advantages / (scores.std() + 1e-4)
    return advantages


def policy_loss(logprobs, old_logprobs, advantages):
    """Returns the clipped loss and the ratio of each code, (rows, G, depth); advantages (rows, G, 1)."""
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - CLIP_RANGE, 1 + (CLIP_RANGE_HIGH or CLIP_RANGE))
    return -torch.min(ratio * advantages, clipped * advantages), ratio


def kl_loss(logprobs, ref_logprobs):
    """Returns kl_t of each code. Log-ratios are clamped: exp() of a large one would overflow."""
    log_ratio = (logprobs - ref_logprobs).clamp(-20, 20)
    if KL_ESTIMATOR == "k2":
        return 0.5 * log_ratio**2
    return (-log_ratio).exp() - 1 + log_ratio


def history_values(values, histories):
    """Returns the value of each item after each history, (histories, items). It is the weighted mean of
    the rows of values (items, items) of the history's items. The last item has the weight 1, each
    earlier one VALUE_DECAY times the weight of the next."""
    means = []
    for history in histories:
        items_back = torch.arange(len(history) - 1.0, -1.0, -1.0)  # the last item: 0
        weights = VALUE_DECAY**items_back
        means.append(weights @ values[history] / weights.sum())
    return torch.stack(means)


def sft_learning_rate(step, last_step):
    """Returns SFT's learning rate in a step, from 1: linear warm-up, then a cosine to 0."""
    warmup = round(SFT_WARMUP * last_step)
    if step <= warmup:
        return SFT_LEARNING_RATE * step / warmup
    progress = (step - 1 - warmup) / max(1, last_step - warmup)
    return SFT_LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * progress))


# ================================================================ the trainer


class RecTrainer:
    """Catalogue, models, data and the algorithm; self.run has the files. self.state is what a checkpoint
    holds beside models and optimizer: you may add numbers, texts and lists."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)  # kernels that add in a fixed order
        torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time
        device = DEVICE
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.run = Run(resume_from_checkpoint or RESUME)
        self.catalogue = Catalogue()
        self.state = SimpleNamespace(
            catalogue=zlib.crc32(repr([self.catalogue.items, self.catalogue.codes]).encode()),
            stage="SFT",  # or "GRPO"
            step=0,  # the current one, from 1, of both stages; between steps, how many are done
            first_step=0,  # steps that were done when this stage began
            evaluation={},  # metrics of the last evaluation
            best_ndcg=-math.inf,  # of SFT: its policy is the reference
            best_score=-math.inf,  # of GRPO: its policy is in best/
            evaluations_without_gain=0,
            log_sizes={},  # bytes of each log when the checkpoint was saved
            wandb_id=None,
        )
        self.seed_step()  # for random initial weights, and the embeddings of new codes
        try:
            self.load_models(self.run.checkpoint)
            if self.run.checkpoint:
                self.load_state(self.run.checkpoint)
        except (TypeError, AttributeError, NameError):
            raise  # a mistake in the program
        except Exception as error:  # the libraries raise many types
            reason = f"{type(error).__name__}: {first_line(error)}"
            models = f"ACTOR_MODEL={ACTOR_MODEL} or RESUME={self.run.checkpoint or RESUME}"
            raise UserError(f"{models} cannot be loaded ({reason})") from error
        self.load_data()
        self.run.facts["data"] = digest(self.sft_rows)
        self.reward_functions = find_functions(REWARD_FUNCTIONS)  # [(name, function, weight)]
        for name, _, _ in self.reward_functions:
            if name in ("value", "rule"):
                raise UserError(f"REWARD_FUNCTIONS: rename {name}(): a part of the reward has this name")
        self.baselines = {}  # {name: metrics on validation}, for the pictures
        self.seconds = {}  # of the current step, by activity

    def load_models(self, checkpoint):
        """Loads reference and actor, from the checkpoint if there is one. In SFT the reference is the
        best policy so far; in GRPO it is SFT's best policy, which the KL refers to."""
        path = checkpoint / "reference" if checkpoint else ACTOR_MODEL
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        weights = [*Path(path).glob("*.safetensors"), *Path(path).glob("*.bin")]
        if weights or not Path(path).is_dir():
            self.reference = load_model(path)
        else:  # a folder without weights gets random ones
            config = transformers.AutoConfig.from_pretrained(path)
            self.reference = transformers.AutoModelForCausalLM.from_config(config).eval()
        known = self.tokenizer.get_vocab()
        self.tokenizer.add_tokens([code for code in self.catalogue.vocabulary if code not in known])
        if len(self.tokenizer) > self.reference.get_input_embeddings().num_embeddings:
            self.reference.resize_token_embeddings(len(self.tokenizer))
        self.reference.requires_grad_(False).to(self.device)
        ids = [self.tokenizer.convert_tokens_to_ids(codes) for codes in self.catalogue.codes]
        self.trie = Trie(torch.tensor(ids), self.device)
        if checkpoint:
            self.set_actor(load_model(checkpoint / "policy"))
        else:
            self.set_actor(deepcopy(self.reference))

    def set_actor(self, model):
        """Makes a model the one that is trained, with a new optimizer."""
        self.actor = model.requires_grad_(True).to(self.device)
        options = {"lr": LEARNING_RATE, "weight_decay": 0.0, "fused": True}
        self.optimizer = torch.optim.AdamW(self.actor.parameters(), **options)

    def load_data(self):
        """Loads the rows of SFT, GRPO, validation and test. A row has "ids", the prompt, "items", which
        follow it, and "learn", whether SFT learns each of them. All but some of SFT also have "id",
        "user", "history" and "target"."""
        # The token ids that the chat template and PROMPT_TEMPLATE put before and after a history
        code = self.catalogue.vocabulary[0]
        ids = encode(self.tokenizer, code)
        position = ids.index(self.tokenizer.convert_tokens_to_ids(code))
        self.ids_before = ids[:position]
        self.ids_after = ids[position + 1 :]

        sequences, self.valid_rows, self.test_rows = load_splits(self.catalogue)
        self.rl_rows = transitions(sequences)
        for row in self.rl_rows + self.valid_rows + self.test_rows:
            row["ids"] = self.prompt(row["history"])
        self.sft_rows = self.rl_rows
        if not self.ids_after:  # all items of a sequence in one pass: the same loss in less time
            self.sft_rows = []
            for sequence in sequences:
                first, *items = sequence["items"]
                row = {"ids": self.prompt([first]), "items": items, "learn": sequence["learn"]}
                self.sft_rows.append(row)
        if TITLE_ROWS or TITLE_HISTORY_ROWS:
            self.add_title_rows()

        self.steps_per_epoch = math.ceil(len(self.sft_rows) / SFT_BATCH_SIZE)
        self.sft_steps = SFT_EPOCHS * self.steps_per_epoch
        if VALUE_WEIGHT:
            self.values = torch.tensor(read_file("VALUES_FILE", np.load), dtype=torch.float32)
            num_items = len(self.catalogue.items)
            if self.values.shape != (num_items, num_items):
                raise UserError(f"VALUES_FILE = {VALUES_FILE!r} needs a row and a column per item")

    def prompt(self, history):
        """Returns the token ids of a history, a list of item numbers."""
        return self.ids_before + self.trie.codes[history].flatten().tolist() + self.ids_after

    def add_title_rows(self):
        """Adds TITLE_HISTORY_ROWS of the rows once more, with titles in place of codes, and for
        TITLE_ROWS of the items a row of SFT that asks for the item by its title."""
        titles = self.catalogue.titles
        if "" in titles:
            item = self.catalogue.items[titles.index("")]
            fault = f"{titles.count('')} items have no title, such as {item!r}"
            raise UserError(f"ITEM_FILE = {ITEM_FILE!r}: {fault}, which TITLE_... need")
        draw = random.Random(SEED)
        history_rows = []
        for row in draw.sample(self.rl_rows, round(TITLE_HISTORY_ROWS * len(self.rl_rows))):
            text = "\n".join(titles[item] for item in row["history"])
            history_rows.append({**row, "ids": encode(self.tokenizer, text)})
        item_rows = []
        for item in draw.sample(range(len(titles)), round(TITLE_ROWS * len(titles))):
            ids = encode(self.tokenizer, titles[item])
            item_rows.append({"ids": ids, "items": [item], "learn": [True]})
        for row in history_rows + item_rows:
            if self.tokenizer.unk_token_id in row["ids"]:
                fault = f"{ACTOR_MODEL} does not know the titles' words"
                raise UserError(f"TITLE_HISTORY_ROWS, TITLE_ROWS: {fault}")
        self.rl_rows = self.rl_rows + history_rows
        self.sft_rows = self.sft_rows + history_rows + item_rows

    # ------------------------------------------------------------ the algorithm

    def train(self):
        """Runs SFT, then GRPO from its best policy, then the test. Returns the last evaluation."""
        state = self.state
        last_step = state.first_step + MAX_STEPS
        is_complete = state.stage == "GRPO" and self.is_over(last_step, EARLY_STOPPING_PATIENCE)
        self.run.open(state, is_complete)  # opens the logs and catches signals
        counts = f"{len(self.rl_rows)} training rows, {len(self.valid_rows)} of validation"
        self.run.log(f"{counts}, on {self.device}")
        for name, lists in baseline_lists(self.valid_rows).items():
            self.baselines[name] = means(self.list_figures(lists, self.valid_rows))
            self.run.log(f"{name:12} validation: {figures_text(self.baselines[name])}")
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
        """Runs SFT on the logged items until its last step, or until SFT_PATIENCE runs out."""
        while not self.is_over(self.sft_steps, SFT_PATIENCE):
            rows = self.next_rows(self.sft_rows, SFT_BATCH_SIZE)
            metrics = self.sft_update(rows)
            self.log_step(metrics, self.sft_steps, ("sft_loss", "entropy", "learning_rate"))
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
        """Makes SFT's best policy, which is the reference, the actor."""
        state = self.state
        state.stage = "GRPO"
        state.first_step = state.step
        state.evaluations_without_gain = 0
        self.set_actor(deepcopy(self.reference))
        self.log_evaluation(self.evaluate())

    def reinforce(self):
        """Runs GRPO on groups of candidates."""
        state = self.state
        last_step = state.first_step + MAX_STEPS
        while not self.is_over(last_step, EARLY_STOPPING_PATIENCE):
            rows = self.next_rows(self.rl_rows, BATCH_SIZE)
            batch = self.rollout(rows)
            batch.advantages = group_advantages(batch.scores)
            metrics = self.update(batch)
            self.record(batch, metrics)
            steps_done = state.step - state.first_step
            if state.step == last_step or (EVAL_EVERY_N_STEPS and steps_done % EVAL_EVERY_N_STEPS == 0):
                self.log_evaluation(self.evaluate())
            if SAVE_EVERY_N_STEPS and state.step % SAVE_EVERY_N_STEPS == 0:
                self.save()
        if not (self.run.folder / "best/policy").exists():  # resumed in another folder, no step was left
            self.save_policy(self.actor, "best/policy")

    def seed_step(self):
        """Makes all random numbers of a step a function of its number: a checkpoint keeps none."""
        seed = (1_000_003 * SEED + self.state.step) % 2**32
        transformers.set_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def is_over(self, last_step, patience):
        """Whether the stage ends: at its last step, without progress, or by a signal."""
        is_out_of_patience = patience > 0 and self.state.evaluations_without_gain >= patience
        return self.run.signal or is_out_of_patience or self.state.step >= last_step

    def next_rows(self, rows, batch_size):
        """Begins a step. Returns its rows, fewer at the end of an epoch. Each epoch has a new order."""
        steps_done = self.state.step - self.state.first_step
        steps_per_epoch = math.ceil(len(rows) / batch_size)
        self.epoch = steps_done // steps_per_epoch + 1
        self.state.step += 1
        self.seconds = {}
        self.seed_step()
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED + self.epoch))
        batches = order.split(batch_size)
        return [rows[i] for i in batches[steps_done % steps_per_epoch]]

    def sft_update(self, rows):
        """Makes one optimizer step on the items that were logged. Returns its metrics."""
        started = time.perf_counter()
        group = self.optimizer.param_groups[0]
        group["lr"] = sft_learning_rate(self.state.step, self.sft_steps)
        group["betas"] = (0.9, SFT_BETA2)
        # AdamW removes the share learning rate * weight decay per step: of a long log more per epoch
        group["weight_decay"] = SFT_WEIGHT_DECAY / (SFT_LEARNING_RATE * self.steps_per_epoch)
        num_items = sum(sum(row["learn"]) for row in rows)
        num_codes = num_items * self.trie.depth
        sums = Counter()
        for start in range(0, len(rows), MICRO_BATCH_ROWS):
            micro = rows[start : start + MICRO_BATCH_ROWS]
            items = pad_right(column(micro, "items"), self.device)  # (rows, T); padding is not learnt
            learn = pad_right(column(micro, "learn"), self.device).unsqueeze(2)
            logprobs, entropy = self.logprobs_and_entropy(self.actor, micro, items)
            loss = -(learn * logprobs).sum() / num_codes
            loss.backward()
            sums["sft_loss"] += loss.detach()
            sums["entropy"] += (learn * entropy).sum().detach() / num_codes
        metrics = self.clip_and_step(sums)
        self.seconds["update"] = time.perf_counter() - started
        return {**metrics, "learning_rate": group["lr"]}

    @torch.no_grad()
    def rollout(self, rows):
        """Samples GROUP_SIZE items for each row and scores them. Returns a batch: rows; items (rows, G),
        likelier ones first; scores (rows, G) and their parts {name: (rows, G)}; logprobs and
        ref_logprobs (rows, G, depth), of the items' codes by sampling policy and reference."""
        started = time.perf_counter()
        batch = SimpleNamespace(rows=rows)
        batch.items, batch.logprobs = self.search_rows(self.actor, rows, GROUP_SIZE, is_sampled=True)
        sampled = time.perf_counter()
        batch.scores, batch.parts = self.compute_rewards(rows, batch.items)
        batch.ref_logprobs = batch.logprobs  # without a KL no reference is needed
        if KL_COEF > 0:
            ref_logprobs = []
            for indices in torch.arange(len(rows)).split(MICRO_BATCH_ROWS):
                logprobs, _ = self.candidate_logprobs(self.reference, batch, indices)
                ref_logprobs.append(logprobs)
            batch.ref_logprobs = torch.cat(ref_logprobs)
        self.seconds["rollout"] = sampled - started
        self.seconds["score"] = time.perf_counter() - sampled
        return batch

    def compute_rewards(self, rows, items):
        """Returns the scores of items (rows, G), likelier ones first, and their parts {name: (rows, G)},
        which are logged as reward/<name>. Edit or override freely."""
        items = items.cpu()
        hits = (items == torch.tensor(column(rows, "target")).unsqueeze(1)).float()
        scores = RULE_WEIGHT * hits
        parts = {"rule": hits}
        if VALUE_WEIGHT:
            values = history_values(self.values, column(rows, "history")).gather(1, items)
            scores = scores + VALUE_WEIGHT * values
            parts["value"] = values
        # Your functions get one entry per candidate; those of one history are neighbours
        candidate_rows = repeat_each(rows, items.shape[1])
        for name, function, weight in self.reward_functions:
            histories = [self.catalogue.names(row["history"]) for row in candidate_rows]
            targets = self.catalogue.names(column(candidate_rows, "target"))
            names = self.catalogue.names(items.flatten())
            values = torch.tensor(call_reward(function, histories, names, targets, {})).view(items.shape)
            scores = scores + weight * values
            parts[name] = values
        return scores.to(self.device), parts

    def update(self, batch):
        """Makes GROUP_EPOCHS passes of MINI_BATCHES optimizer steps. Returns means of their metrics."""
        started = time.perf_counter()
        self.optimizer.param_groups[0]["lr"] = LEARNING_RATE  # in a resumed run it is the checkpoint's
        steps = []
        for _ in range(GROUP_EPOCHS):
            order = torch.randperm(len(batch.rows), generator=self.generator)
            for indices in order.tensor_split(min(MINI_BATCHES, len(order))):
                steps.append(self.optimizer_step(batch, indices))
        self.seconds["update"] = time.perf_counter() - started
        # The first optimizer step trains the policy that sampled: all ratios are 1 but for rounding
        mismatch = steps[0]["rollout_mismatch"]
        limits = {"float32": 1e-4, "bfloat16": 0.05}
        if math.isnan(mismatch) or mismatch > limits[DTYPE]:
            raise UserError(f"update and rollout differ: |log ratio| {mismatch:.2g} before the update")
        metrics = {name: np.mean(column(steps, name)).item() for name in steps[0]}
        return {**metrics, "rollout_mismatch": mismatch, "learning_rate": LEARNING_RATE}

    def optimizer_step(self, batch, indices):
        """Makes one optimizer step on the rows of the batch with these indices. The loss is the mean
        over all codes of their candidates."""
        num_codes = batch.logprobs[indices].numel()
        sums = Counter()
        for micro in indices.split(MICRO_BATCH_ROWS):
            old_logprobs = batch.logprobs[micro]
            advantages = batch.advantages[micro].unsqueeze(2)  # (rows, G, 1)
            logprobs, entropy = self.candidate_logprobs(self.actor, batch, micro)
            policy_losses, ratio = policy_loss(logprobs, old_logprobs, advantages)
            kl = kl_loss(logprobs, batch.ref_logprobs[micro])
            losses = policy_losses + KL_COEF * kl - ENTROPY_COEF * entropy  # add a term here
            (losses.sum() / num_codes).backward()
            log_ratio = logprobs - old_logprobs
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
        return self.clip_and_step(sums)

    def clip_and_step(self, sums):
        """Clips the gradient and steps, if all is finite. Returns sums (0-d tensors) and the norm."""
        sums["policy_grad_norm"] = torch.nn.utils.clip_grad_norm_(self.actor.parameters(), MAX_GRAD_NORM)
        metrics = {name: x.item() for name, x in sums.items()}
        if all(map(math.isfinite, metrics.values())):
            self.optimizer.step()
        else:
            self.run.log("WARNING: skipped an optimizer step that is not finite")
        self.optimizer.zero_grad()
        return metrics

    # ------------------------------------------------------------ scoring and searching

    def logprobs_and_entropy(self, model, rows, items):
        """Returns the log-probabilities of the codes of items (rows, T), which follow the rows'
        prompts, and the entropy before each code, two (rows, T, depth)."""
        ids = self.trie.codes[items].flatten(1)  # (rows, R)
        prefix = Prefix(model, column(rows, "ids"))
        logits = prefix.logits  # (rows, 1, vocabulary)
        if ids.shape[1] > 1:  # the last code is only predicted
            logits = torch.cat([logits, prefix.append(ids[:, :-1])], 1)  # (rows, R, vocabulary)
        return item_logprobs(self.trie, logits.unflatten(1, (-1, self.trie.depth)), items)

    def candidate_logprobs(self, model, batch, indices):
        """Returns the log-probabilities of the codes of candidates, and the entropy before each code,
        two (rows, G, depth), for the rows of the batch with these indices."""
        items = batch.items[indices]  # (rows, G)
        rows = repeat_each([batch.rows[i] for i in indices], items.shape[1])
        logprobs, entropy = self.logprobs_and_entropy(model, rows, items.view(-1, 1))
        return logprobs.view(*items.shape, -1), entropy.view(*items.shape, -1)

    @torch.no_grad()
    def search_rows(self, model, rows, width, is_sampled=False):
        """Returns `width` items for each row, likelier ones first, (rows, width), and the
        log-probabilities of their codes, (rows, width, depth)."""
        width = min(width, len(self.catalogue.items))
        # Drawn for all rows at once, so that samples do not depend on MICRO_BATCH_ROWS
        uniform = torch.rand(len(rows), width, self.trie.depth).to(self.device) if is_sampled else None
        results = []
        starts = range(0, len(rows), MICRO_BATCH_ROWS)
        for start in tqdm(starts, leave=False, file=sys.stdout, disable=None):
            micro = slice(start, start + MICRO_BATCH_ROWS)
            prompts = column(rows[micro], "ids")
            numbers = uniform[micro] if is_sampled else None
            with autocast(self.device):  # around all codes, so that the weights are cast once
                results.append(search(model, self.trie, prompts, width, numbers))
        items = torch.cat([items for items, _ in results])
        logprobs = torch.cat([logprobs for _, logprobs in results])
        order = logprobs.sum(2).argsort(dim=1, descending=True, stable=True)
        row = torch.arange(len(rows), device=self.device).unsqueeze(1)
        return items[row, order], logprobs[row, order]

    def recommend(self, history, k=10, is_new=False):
        """Returns the actor's k likeliest items after a history (names, oldest first): tuples of item,
        title and probability. is_new=True leaves out the items of the history."""
        items = [self.catalogue.number[str(name)] for name in history]
        row = {"ids": self.prompt(items[-MAX_HISTORY:])}
        width = max(k, EVAL_BEAMS) + len(items)
        numbers, logprobs = self.search_rows(self.actor, [row], width)
        probabilities = logprobs[0].sum(1).exp()
        recommended = []
        for number, probability in zip(numbers[0].tolist(), probabilities.tolist()):
            if is_new and number in items:
                continue
            item, title = self.catalogue.items[number], self.catalogue.titles[number]
            recommended.append((item, title, probability))
        return recommended[:k]

    # ------------------------------------------------------------ evaluation, logs, checkpoints

    @torch.no_grad()
    def evaluate(self):
        """Returns metrics of the likeliest items on validation, and reward_sampled, of samples."""
        rows = self.valid_rows
        lists, _ = self.search_rows(self.actor, rows, EVAL_BEAMS)
        metrics = means(self.list_figures(lists, rows))
        transformers.set_seed(SEED)  # the next step is seeded again: this does not change the training
        items, _ = self.search_rows(self.actor, rows, GROUP_SIZE, is_sampled=True)
        scores, _ = self.compute_rewards(rows, items)
        metrics["reward_sampled"] = scores.mean().item()
        return metrics

    def list_figures(self, lists, rows):
        """Returns the metrics of lists of items (rows, width), best first, by row: {name: (rows,)}. The
        first GROUP_SIZE items are rewarded. coverage@10 is one number for all rows, (1,)."""
        lists = lists.cpu()
        figures = {}
        for k in (1, 3, 5, 10, 20):
            figures[f"ndcg@{k}"] = gains(lists, rows, k)
            figures[f"hr@{k}"] = (figures[f"ndcg@{k}"] > 0).float()
        scores, parts = self.compute_rewards(rows, lists[:, :GROUP_SIZE])
        figures["reward"] = scores.mean(1).cpu()
        for name, values in parts.items():
            figures[f"reward/{name}"] = values.mean(1)
        num_covered = len(lists[:, :10].unique())
        figures["coverage@10"] = torch.tensor([num_covered / len(self.catalogue.items)])
        return figures

    def log_evaluation(self, metrics):
        """Logs what evaluate() returned. Keeps the best policy: SFT's, by NDCG@10, in the reference,
        GRPO's, by reward, in best/."""
        state = self.state
        state.evaluation = metrics
        self.run.write("metrics.jsonl", phase="eval", step=state.step, **metrics)
        self.run.log(f"step {state.step}, validation: {figures_text(metrics)}")
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
        """Logs the metrics of a step of GRPO and LOG_SAMPLES of its candidates."""
        metrics["reward"] = batch.scores.mean().item()
        for name, values in batch.parts.items():
            metrics[f"reward/{name}"] = values.mean().item()
        metrics["advantage_abs"] = batch.advantages.abs().mean().item()
        is_zero_variance = (batch.scores == batch.scores[:, :1]).all(1)  # (rows,)
        metrics["zero_variance_groups"] = is_zero_variance.float().mean().item()
        group_size = batch.items.shape[1]
        # Evenly spaced over all rows and ranks; rank 0 is the likeliest candidate of a row
        for number in torch.linspace(0, batch.items.numel() - 1, LOG_SAMPLES).long().tolist():
            index, rank = divmod(number, group_size)
            row = batch.rows[index]
            sample = {"id": row["id"], "history": self.catalogue.names(row["history"])}
            sample["target"] = self.catalogue.items[row["target"]]
            sample["item"] = self.catalogue.items[batch.items[index, rank]]
            sample["rank"] = rank
            sample["reward"] = batch.scores[index, rank].item()
            self.run.write("samples.jsonl", step=self.state.step, **sample)
        printed = ("policy_loss", "reward", "advantage_abs", "entropy", "kl")
        self.log_step(metrics, self.state.first_step + MAX_STEPS, printed)

    def log_step(self, metrics, last_step, printed):
        """Logs the metrics of a step, and prints those that are named in `printed`."""
        step = self.state.step
        metrics = {"epoch": self.epoch, **metrics}
        for name, seconds in self.seconds.items():
            metrics[f"seconds/{name}"] = seconds
        self.run.write("metrics.jsonl", phase="train", step=step, **metrics)
        if step % PRINT_EVERY_N_STEPS == 0:
            eta = timedelta(seconds=round(sum(self.seconds.values()) * (last_step - step)))
            text = "  ".join(f"{name} {metrics[name]:.4g}" for name in printed)
            self.run.log(f"{self.state.stage} step {step}/{last_step}: {text}  ({eta} left)")

    @torch.no_grad()
    def test(self):
        """Compares the baselines and the best policies of SFT and GRPO on the test rows."""
        rows = self.test_rows
        lists = baseline_lists(rows)
        lists["sft"], _ = self.search_rows(self.reference, rows, EVAL_BEAMS)
        if self.state.stage == "GRPO":
            best = load_model(self.run.folder / "best/policy").to(self.device)
            lists["grpo"], _ = self.search_rows(best, rows, EVAL_BEAMS)
        figures = {name: self.list_figures(items, rows) for name, items in lists.items()}
        if "grpo" in figures:
            figures["grpo - sft"] = {key: figures["grpo"][key] - x for key, x in figures["sft"].items()}
        if VALUE_WEIGHT:  # of the lists with the highest values
            values = history_values(self.values, column(rows, "history"))
            highest = values.sort(dim=1, descending=True).values[:, :GROUP_SIZE]
            figures["possible"] = {"reward/value": highest.mean(1)}
        table = {}
        for name, by_row in figures.items():
            table[name] = means(by_row)
            for key, values in by_row.items():
                if len(values) > 1:  # half of the mean's 95% interval
                    table[name][f"{key} +-"] = 1.96 * values.std().item() / math.sqrt(len(values))
            self.run.log(f"{name:12} test: {figures_text(table[name])}")
        (self.run.folder / "eval_test.json").write_text(json.dumps(table, indent=1))

    def save_policy(self, model, path):
        """Writes a policy into OUTPUT_DIR."""
        with atomic_folder(self.run.folder / path) as folder:
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    def save(self):
        """Writes step_N/ if it is not there yet, removes old checkpoints and draws the pictures."""
        folder = self.run.folder / f"step_{self.state.step}"
        self.run.checkpoint = folder  # if train() is called again, it resumes from here
        if folder.exists():
            return
        self.run.log(f"Saving {folder}")
        self.state.log_sizes = {name: file.tell() for name, file in self.run.logs.items()}
        with atomic_folder(folder) as tmp:
            for name, model in {"policy": self.actor, "reference": self.reference}.items():
                model.save_pretrained(tmp / name)
                self.tokenizer.save_pretrained(tmp / name)
            saved = {"state": vars(self.state), "optimizer": self.optimizer.state_dict()}
            torch.save(saved, tmp / "training_state.pt")
            shutil.copy(self.run.folder / "training_config.json", tmp / "run.json")
        for old in list_checkpoints(self.run.folder)[:-KEEP_LAST_N_CHECKPOINTS]:
            shutil.rmtree(old.rename(f"{old}.tmp"))  # after a kill the rest is no checkpoint
        draw_grid(self.run.folder, "training_metrics_detailed.png", self.baselines)
        name = f"{Path(__file__).stem}_metrics_with_entropy.png"
        draw_grid(self.run.folder, name, self.baselines, PANELS)

    def load_state(self, folder):
        """Restores state and optimizer; load_models() took the weights from the same folder."""
        saved = torch.load(folder / "training_state.pt", map_location="cpu", weights_only=True)
        if saved["state"]["catalogue"] != self.state.catalogue:
            raise UserError(f"INDEX_FILE = {INDEX_FILE!r} has other codes than the run")
        self.optimizer.load_state_dict(saved["optimizer"])
        vars(self.state).update(saved["state"])


# ================================================================ models


def load_model(path):
    """Returns a frozen model in evaluation mode, in which it stays. Missing weights are an error."""
    auto_class = transformers.AutoModelForCausalLM
    model, info = auto_class.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    missing = info["missing_keys"] | {key[0] for key in info["mismatched_keys"]}
    if missing:
        raise UserError(f"the model {path} lacks the weights {', '.join(sorted(missing))}")
    for parameter in model.parameters():
        # Weights that are mapped from a file may be unaligned, which changes the last bit of a product
        parameter.data = parameter.data.clone()
    return model.requires_grad_(False).eval()


def autocast(device):
    return torch.autocast(device.type, torch.bfloat16, enabled=DTYPE == "bfloat16")


# ================================================================ prompts and what follows them
# Each distinct prompt is computed once (prefill). Its rows continue from its keys and values: in the
# search one code at a time (decode), in scoring all codes at once, in the update with a gradient.


class Prefix:
    """The tokens of each row so far, as keys and values in a cache. self.logits (rows, 1, vocabulary)
    predict what follows the prompts, lists of ids. Equal prompts are computed once."""

    def __init__(self, model, prompts):
        self.model = model
        self.cache = Cache(config=model.config)
        numbers = {}  # of distinct prompts
        for prompt in prompts:
            numbers.setdefault(tuple(prompt), len(numbers))
        ids, self.mask = pad_left(numbers, model.device)  # (distinct prompts, P)
        self.logits = self.forward(ids, keep=1)
        self.select([numbers[tuple(prompt)] for prompt in prompts])

    def select(self, rows):
        """Continues with the rows of these numbers; a row may be taken several times."""
        rows = torch.as_tensor(rows, device=self.model.device)
        self.cache.reorder_cache(rows)
        self.mask = self.mask[rows]
        self.logits = self.logits[rows]

    def append(self, ids):
        """Appends ids (rows, T). Returns the logits after each of them, (rows, T, vocabulary)."""
        self.mask = torch.cat([self.mask, torch.ones_like(ids)], 1)
        return self.forward(ids, keep=ids.shape[1])

    def forward(self, ids, keep):
        """Returns the logits after the last `keep` of ids, (rows, keep, vocabulary)."""
        positions = (self.mask.cumsum(1)[:, -ids.shape[1] :] - 1).clamp(min=0)
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": self.mask}
        with autocast(self.model.device):
            return self.model(**inputs, past_key_values=self.cache, logits_to_keep=keep).logits


def pad_left(lists, device):
    """Returns lists of ids as one tensor, (rows, length of the longest), and its mask."""
    ids = [torch.tensor(row) for row in lists]
    mask = [torch.ones_like(row) for row in ids]
    options = {"batch_first": True, "padding_side": "left"}
    return pad_sequence(ids, **options).to(device), pad_sequence(mask, **options).to(device)


def pad_right(lists, device):
    """Returns lists as one tensor, (rows, length of the longest), padded with 0 or False."""
    return pad_sequence([torch.tensor(row) for row in lists], batch_first=True).to(device)


def repeat_each(rows, count):
    """Returns a list in which each row stands `count` times in succession."""
    repeated = []
    for row in rows:
        repeated += [row] * count
    return repeated


# ================================================================ the trie of the catalogue, search


class Trie:
    """The codes of all items as a tree of prefixes. Level 0 has one node, the empty prefix; a node of
    level l is a distinct prefix of l codes, with its number in lexical order. codes (items, depth):
    token ids, all rows distinct."""

    def __init__(self, codes, device):
        self.codes = codes.to(device)
        self.depth = codes.shape[1]
        self.children = []  # by level: (nodes, width), numbers of each node's children, padded with -1
        self.last_codes = []  # by level: (nodes of the next level,), the last code of each
        paths = [torch.zeros(len(codes), dtype=torch.long)]  # by level: (items,), the node of each item
        for level in range(self.depth):
            prefixes, nodes = codes[:, : level + 1].unique(dim=0, return_inverse=True)
            parents = torch.zeros(len(prefixes), dtype=torch.long).scatter(0, nodes, paths[-1])
            # In lexical order the children of one node are neighbours
            children = torch.arange(len(prefixes)).split(parents.bincount().tolist())
            children = pad_sequence(children, batch_first=True, padding_value=-1)
            self.children.append(children.to(device))
            self.last_codes.append(prefixes[:, -1].to(device))
            paths.append(nodes)
        self.paths = torch.stack(paths, 1).to(device)  # (items, depth + 1)
        self.item_at = self.paths[:, -1].argsort()  # (items,), the item of each node of the last level

    def distribution(self, level, nodes, logits):
        """Returns the children of nodes (...) of a level and their log-probabilities, (..., width)."""
        children = self.children[level][nodes]
        codes = self.last_codes[level][children]
        return children, constrained_logprobs(logits, codes, children >= 0)


def item_logprobs(trie, logits, items):
    """Returns constrained log-probabilities of the codes of items (...) and the entropy before each, two
    (..., depth). logits (..., depth, vocabulary)."""
    logprobs = []
    entropies = []
    for level in range(trie.depth):
        nodes = trie.paths[items, level]
        next_nodes = trie.paths[items, level + 1]
        children, distribution = trie.distribution(level, nodes, logits[..., level, :])
        is_next = children == next_nodes.unsqueeze(-1)
        chosen = is_next.long().argmax(-1, keepdim=True)  # its place among the children
        logprobs.append(distribution.gather(-1, chosen).squeeze(-1))
        finite = distribution.clamp(min=-1e30)  # 0 * -inf would be NaN
        entropies.append(-(distribution.exp() * finite).sum(-1))
    return torch.stack(logprobs, -1), torch.stack(entropies, -1)


@torch.no_grad()
def search(model, trie, prompts, width, uniform=None):
    """Returns `width` items for each prompt (a list of ids): their numbers (prompts, width), and the
    log-probabilities of their codes, (prompts, width, depth). It goes down the trie level by level with
    several prefixes per prompt: by samples with replacement, which `uniform` numbers (prompts, width,
    depth) decide, or without them by beam search."""
    prefix = Prefix(model, prompts)
    logits = prefix.logits
    prompt = torch.arange(len(prompts), device=model.device).unsqueeze(1)
    nodes = torch.zeros_like(prompt)  # (prompts, prefixes); at first one, the root
    logprobs = torch.zeros(len(prompts), 1, 0, device=model.device)  # (prompts, prefixes, codes so far)
    for level in range(trie.depth):
        num_prefixes = nodes.shape[1]
        logits = logits.view(len(prompts), num_prefixes, -1)
        # The options of a prefix are its children, both (prompts, prefixes, options)
        children, option_logprobs = trie.distribution(level, nodes, logits)
        if uniform is None:
            parent, option = best_options(logprobs.sum(2), option_logprobs, width)
        else:
            parent, option = sampled_options(option_logprobs, uniform[:, :, level])
        nodes = children[prompt, parent, option]  # (prompts, next prefixes)
        chosen_logprobs = option_logprobs[prompt, parent, option].unsqueeze(2)
        logprobs = torch.cat([logprobs[prompt, parent], chosen_logprobs], 2)
        if level + 1 < trie.depth:
            prefix.select((prompt * num_prefixes + parent).flatten())
            logits = prefix.append(trie.last_codes[level][nodes].view(-1, 1))
    return trie.item_at[nodes], logprobs


def best_options(prefix_logprobs, option_logprobs, width):
    """Returns the parent and the option of the `width` likeliest next prefixes, two (prompts, next
    prefixes), for prefixes (prompts, prefixes) and options (prompts, prefixes, options). For example, a
    has the options x and y, b has x alone. The totals [[-0.5, -2.7, -1.1, -inf]] are those of ax, ay,
    bx and of no item, the best two are the numbers [[0, 2]], their parents [[0, 1]] (a and b) and
    options [[0, 0]] (x and x)."""
    totals = (prefix_logprobs.unsqueeze(2) + option_logprobs).flatten(1)
    numbers = totals.topk(min(width, totals.shape[1])).indices
    num_options = option_logprobs.shape[2]
    return numbers // num_options, numbers % num_options


def sampled_options(option_logprobs, uniform):
    """Returns the parent and the option of each sample, two (prompts, samples). At the root all samples
    have one parent, later each continues its own prefix. uniform (prompts, samples) is in [0, 1)."""
    num_prompts, num_samples = uniform.shape
    prompt = torch.arange(num_prompts, device=uniform.device).unsqueeze(1)
    parent = torch.arange(num_samples, device=uniform.device) % option_logprobs.shape[1]
    parent = parent.expand(num_prompts, -1)
    cumulative = option_logprobs.exp().cumsum(2)[prompt, parent]  # (prompts, samples, options), up to 1
    target = uniform.unsqueeze(2) * cumulative[:, :, -1:]
    return parent, (cumulative < target).sum(2)


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
    if ids[-1:] == [tokenizer.eos_token_id]:  # some tokenizers append EOS to every text
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
        form = 'it takes {item: codes}, such as {"B0012": ["<a_7>", "<b_120>", "<c_3>"]}'
        if not isinstance(index, dict) or not index:
            raise UserError(f"INDEX_FILE = {INDEX_FILE!r}: {form}")
        item_of = {}  # {codes: item}
        for item, codes in index.items():
            fault = f"INDEX_FILE = {INDEX_FILE!r}: item {item!r} has {codes!r:.80}"
            is_list = isinstance(codes, list) and len(codes) > 0
            if not is_list or not all(isinstance(code, str) and code.strip() for code in codes):
                raise UserError(f"{fault}: {form}")
            if tuple(codes) in item_of:
                raise UserError(f"{fault}, as item {item_of[tuple(codes)]!r} has")
            item_of[tuple(codes)] = item
        self.items = list(index)
        self.number = {item: number for number, item in enumerate(index)}
        self.codes = list(index.values())
        self.vocabulary = sorted(set(chain(*self.codes)))
        if len(set(map(len, self.codes))) > 1:
            raise UserError(f"INDEX_FILE = {INDEX_FILE!r}: all items need the same number of codes")
        titles = read_file("ITEM_FILE", read_titles) if ITEM_FILE else {}
        self.titles = [titles.get(item, "") for item in index]

    def names(self, numbers):
        return [self.items[number] for number in numbers]


def read_titles(path):
    """Returns {item: title} of lines of codes, title and item with tabs between."""
    titles = {}
    for line in Path(path).read_text("utf-8-sig").removesuffix("\n").split("\n"):
        _, title, item = line.split("\t")
        titles[item] = title.strip()
    return titles


def read_csv(path):
    csv.field_size_limit(2**31 - 1)  # a history may be longer than the default, 131,072
    with open(path, encoding="utf-8-sig", newline="") as file:
        # strict: otherwise an unclosed quote swallows the rest of the file
        return list(csv.DictReader(file, strict=True))


def read_sequences(constant, catalogue):
    """Returns [{"id", "user", "items"}] of a csv file; items: numbers of a history and its target."""
    file = Path(globals()[constant])
    sequences = []
    for line, record in enumerate(read_file(constant, read_csv), 2):
        try:
            history = ast.literal_eval(record[HISTORY_COLUMN])
            names = [*map(str, history), record[TARGET_COLUMN]]
            if len(names) < 2:
                raise ValueError("no history")
            items = [catalogue.number[name] for name in names]
            sequences.append({"id": f"{file.name}:{line}", "user": record[USER_COLUMN], "items": items})
        except (KeyError, ValueError, SyntaxError, TypeError) as error:
            fault = f"{type(error).__name__}: {first_line(error)}"
            columns = f"{USER_COLUMN}, {HISTORY_COLUMN} such as [3, 17] and {TARGET_COLUMN}"
            hint = f"it takes {columns}, of items of INDEX_FILE"
            raise UserError(f"{file} line {line} ({fault}): {hint}") from None
    return sequences


def load_splits(catalogue):
    """Returns sequences to train on, and rows of validation and test. A sequence is a line of
    TRAIN_FILE cut to its target and MAX_HISTORY items before it. Its "learn" says for each item but the
    first whether it is a target: not if the same user took it after the same item in validation, test
    or an earlier line."""
    valid = [make_row(sequence) for sequence in read_sequences("VALID_FILE", catalogue)]
    test = []
    if TEST_FILE:
        test = [make_row(sequence) for sequence in read_sequences("TEST_FILE", catalogue)]
    taken = {(row["user"], row["history"][-1], row["target"]) for row in valid + test}
    sequences = []
    for sequence in read_sequences("TRAIN_FILE", catalogue):
        items = sequence["items"][-MAX_HISTORY - 1 :]
        steps = [(sequence["user"], item, next_item) for item, next_item in pairwise(items)]
        learn = [step not in taken for step in steps]
        taken.update(steps)
        if any(learn):
            sequences.append({**sequence, "items": items, "learn": learn})
    if not sequences or not valid:
        raise UserError("TRAIN_FILE or VALID_FILE: no rows are left that the other files do not have")
    if MAX_EVAL_ROWS and len(valid) > MAX_EVAL_ROWS:
        valid = [valid[i] for i in torch.linspace(0, len(valid) - 1, MAX_EVAL_ROWS).long()]
    return sequences, valid, test


def make_row(sequence):
    """Returns the last transition of a sequence as a row with a history and a target."""
    *history, target = sequence["items"][-MAX_HISTORY - 1 :]
    row = {"id": sequence["id"], "user": sequence["user"], "history": history, "target": target}
    return {**row, "items": [target], "learn": [True]}  # SFT uses these two


def transitions(sequences):
    """Returns a row with a history and a target for each item of the sequences that is learnt."""
    rows = []
    for sequence in sequences:
        for position, is_learnt in enumerate(sequence["learn"], 1):
            if is_learnt:
                items = sequence["items"][: position + 1]
                rows.append(make_row({**sequence, "id": f"{sequence['id']}#{position}", "items": items}))
    return rows


# ================================================================ baselines and metrics


def baseline_data():
    """Returns a digest of the data that other methods learn from and choose their settings by."""
    files = [Path(path).read_bytes() for path in (INDEX_FILE, TRAIN_FILE, VALID_FILE)]
    return digest([MAX_HISTORY, *files])


def baseline_lists(rows):
    """Returns {method: best items (rows, 20 or more)} of BASELINES_FILE; {} if it is of other data."""
    if not Path(BASELINES_FILE).exists():
        return {}
    lists = dict(read_file("BASELINES_FILE", np.load))
    is_current = str(lists.pop("data", "")) == baseline_data()
    position = {}  # of each history in the lists
    for number, history in enumerate(lists.pop("histories")):
        position[tuple(history[history >= 0])] = number  # -1 is padding
    positions = [position.get(tuple(row["history"])) for row in rows]
    width = min(items.shape[1] for items in lists.values())
    if not is_current or None in positions or width < GROUP_SIZE:
        fault = "is not shown: it is of other rows, codes, MAX_HISTORY or a smaller GROUP_SIZE"
        print(f"BASELINES_FILE = {BASELINES_FILE!r} {fault} (data/rec_baselines.py)", flush=True)
        return {}
    return {name: torch.tensor(items[positions]).long() for name, items in lists.items()}


def gains(lists, rows, k):
    """Returns NDCG@k by row, (rows,): 1 / log2(rank + 1) of the target's rank in the list, from 1; 0 if
    it is not among the first k."""
    targets = torch.tensor(column(rows, "target")).unsqueeze(1)
    is_target = lists[:, :k] == targets
    ranks = torch.arange(1, is_target.shape[1] + 1)
    discounts = 1 / torch.log2(ranks + 1.0)
    return (is_target * discounts).sum(1)


def means(figures):
    return {name: values.mean().item() for name, values in figures.items()}


def figures_text(metrics):
    """Returns the metrics that are printed, with half of their 95% intervals if these are known."""
    text = ""
    for name in ("hr@10", "ndcg@10", "reward", "reward/value", "reward_sampled", "coverage@10"):
        if name in metrics:
            text += f"{name} {metrics[name]:.4f}  "
        if f"{name} +-" in metrics:
            text += f"±{metrics[f'{name} +-']:.4f}  "
    return text


# ================================================================ the run's files


class Run:
    """The files of one run in OUTPUT_DIR, and the signals that end the run."""

    def __init__(self, resume):
        self.folder = Path(OUTPUT_DIR).absolute()  # a program may change the working directory
        self.logs = {}
        self.wandb = None
        self.signal = 0
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.lock = filelock.FileLock(f"{self.folder}.lock", is_singleton=True)
        program = os.path.abspath(sys.argv[0])
        self.facts = {"file": __file__, "program": program, "torch": torch.__version__}
        files = [Path(path) for path in (__file__, program, rewards.__file__) if Path(path).is_file()]
        self.facts["text"] = digest(sorted({file.read_bytes() for file in files}))
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
        """Opens the logs and catches signals. A resumed run cuts the logs back to its checkpoint."""
        self.outcome = "Nothing was left to do: complete" if is_complete else "Done"
        self.handlers = {}  # {signal: its handler before}
        with suppress(ValueError):  # only the main thread gets signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self.handlers[number] = signal.signal(number, self.on_signal)
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
        facts = {**self.facts, "constants": constants()}
        config.with_suffix(".tmp").write_text(json.dumps(facts, indent=1))
        config.with_suffix(".tmp").rename(config)
        if USE_WANDB:
            import wandb  # slow

            options = {"id": state.wandb_id, "resume": "allow"}
            self.wandb = wandb.init(dir=self.folder, config=constants(), **options)
            state.wandb_id = self.wandb.id

    def compare(self, state, is_complete):
        """Prints what changed since the checkpoint that is resumed. Refuses another model: the weights
        are the checkpoint's. Refuses changes of a complete run: it would end as if it had them."""
        if not self.checkpoint:
            return
        earlier = json.loads((self.checkpoint / "run.json").read_text())
        hint = "RESUME=no or another OUTPUT_DIR begins another run"
        changes = []
        for name, value in constants().items():
            is_free = name in ("RESUME", "OUTPUT_DIR", "TEST_FILE")
            if not is_free and earlier["constants"].get(name, value) != value:
                changes.append(f"{name}={value!r}")
        print("Constants that changed: " + (", ".join(changes) or "none"), flush=True)
        for name, fact in (("file", "text"), ("data", "data")):
            if earlier[fact] != self.facts[fact]:
                changes.append(f"the {name} changed since step {state.step}")
                print(changes[-1], flush=True)
        model = earlier["constants"]["ACTOR_MODEL"]
        if model != constants()["ACTOR_MODEL"]:
            raise UserError(f"the weights of {self.checkpoint} are of ACTOR_MODEL={model}: {hint}")
        if is_complete and changes:
            raise UserError(f"complete at step {state.step}, but {'; '.join(changes)}: {hint}")

    def move_old_files(self, state, target):
        """Moves files later than the resumed checkpoint, or all of an earlier run, to `target`."""
        config = self.folder / "training_config.json"
        if not config.exists():
            return
        stale = list_checkpoints(self.folder)
        if self.checkpoint and self.checkpoint.resolve().parent == self.folder.resolve():
            stale = [path for path in stale if int(path.name.removeprefix("step_")) > state.step]
        else:
            state.log_sizes = {}
            names = "eval_test.json sft/policy"
            for pattern in f"logs/*.jsonl logs/training_*.log *_metrics_*.png {names}".split():
                stale += self.folder.glob(pattern)
            stale.append(config)  # moved last: a start that does not find it moves nothing
        if stale:  # best/ may be of a later step, or of the other run
            state.best_score = -math.inf
            stale[:0] = [path.parent for path in self.folder.glob("best/*/config.json")]
        for path in stale:
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
        for key, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                record[key] = None
        self.logs[name].write(json.dumps(record) + "\n")
        if self.wandb and name == "metrics.jsonl":
            phase = record.pop("phase")
            self.wandb.log({f"{phase}/{key}": x for key, x in record.items()}, step=record["step"])


def list_checkpoints(folder):
    """Returns the folders step_N of a run, oldest first."""
    folders = {}
    for path in Path(folder).glob("step_*/training_state.pt"):
        number = path.parent.name.removeprefix("step_")
        if number.isdecimal():  # not step_N.tmp
            folders[int(number)] = path.parent
    return [folders[number] for number in sorted(folders)]


def choose_checkpoint(folder, resume):
    """Returns the checkpoint to resume from, or None. Asks at a terminal if resume is "ask"."""
    checkpoints = list_checkpoints(folder)
    if resume not in ("ask", "yes", "no"):
        checkpoints = list_checkpoints(resume) or [Path(resume)]
        if not (checkpoints[-1] / "training_state.pt").exists():
            raise UserError(f"RESUME = {resume!r} is not ask, yes, no or a checkpoint's or run's folder")
    if resume == "yes" and not checkpoints:
        print(f"RESUME=yes: {folder} has no checkpoint, so a new run begins", flush=True)
    if resume == "no" or not checkpoints:
        return None
    print(f"Found checkpoint: {checkpoints[-1]}", flush=True)
    is_terminal = sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()
    if resume == "ask" and is_terminal:
        answer = input("Resume training from it? (y/n): ")
        if not answer.lower().startswith("y"):
            return None
    return checkpoints[-1]


def digest(items):
    """Returns the number of items and the beginning of a hash of them, as a text."""
    total = hashlib.sha256()
    for item in items:
        total.update(repr(item).encode())
    return f"{len(items)} {total.hexdigest()[:12]}"


@contextmanager
def atomic_folder(path):
    """Yields a folder to fill, which is then renamed to `path`: it is there whole or not at all."""
    tmp = path.with_name(path.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    yield tmp
    for file in [*tmp.rglob("*"), tmp]:  # the contents must be on the disk before the name is
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    shutil.rmtree(path, ignore_errors=True)
    tmp.rename(path)


# The panels of grpo_rec_metrics_with_entropy.png: {title: {stage: metric}}.
# training_metrics_detailed.png has a panel for each stage and metric
PANELS = {
    "HR@10": {"validation": "hr@10"},
    "NDCG@10": {"validation": "ndcg@10"},
    "reward of the likeliest items": {"validation": "reward"},
    "value of the likeliest items": {"validation": "reward/value"},
    "reward of samples": {"GRPO": "reward", "validation": "reward_sampled"},
    "coverage of the catalogue": {"validation": "coverage@10"},
    "loss of SFT": {"SFT": "sft_loss"},
    "entropy per code": {"SFT": "entropy", "GRPO": "entropy"},
    "KL to the best policy of SFT": {"GRPO": "kl"},
}


def stage_of(record):
    """Returns the stage of a record of metrics.jsonl, see PANELS."""
    if record["phase"] == "eval":
        return "validation"
    return "SFT" if "sft_loss" in record else "GRPO"


def draw_grid(folder, path, baselines, panels=None):
    """Draws panels, by default one per stage and metric, without metrics that are constant. A training
    step is a faint point, an evaluation a full one, a baseline {name: metrics} a dashed line."""
    curves = {}  # {(stage, metric): ([steps], [values])}
    for line in (folder / "logs/metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if name not in ("phase", "step") and value is not None:
                steps, values = curves.setdefault((stage_of(record), name), ([], []))
                steps.append(record["step"])
                values.append(value)
    curves = {key: curve for key, curve in curves.items() if len(set(curve[1])) > 1}
    if panels is None:
        panels = {f"{stage}: {name}": {stage: name} for stage, name in curves}
    drawn = []
    for title, metrics in panels.items():
        if any((stage, name) in curves for stage, name in metrics.items()):
            drawn.append((title, metrics))
    height = max(1, math.ceil(len(drawn) / 3))
    figure = Figure(figsize=(10, 2.3 * height + 0.8), layout="constrained")
    legend = {}  # {label: line}
    for number, (title, metrics) in enumerate(drawn, 1):
        axis = figure.add_subplot(height, 3, number, title=title, xlabel="step")
        axis.grid(alpha=0.3)
        for stage, name in metrics.items():
            if (stage, name) not in curves:
                continue
            steps, values = curves[stage, name]
            if stage == "validation":
                line = axis.plot(steps, values, "o-", color="C1", markersize=4)[0]
                legend["validation"] = line
            else:
                color = "C0" if stage == "SFT" else "C2"
                window = max(1, len(values) // 12)
                rolling_means = np.convolve(values, np.full(window, 1 / window), "valid")
                axis.plot(steps, values, ".", color=color, alpha=0.3, markersize=3)
                line = axis.plot(steps[window - 1 :], rolling_means, color=color)[0]
                legend[f"{stage}, rolling mean"] = line
        for color, (baseline, figures) in enumerate(baselines.items(), 3):
            value = figures.get(metrics.get("validation"))
            if value is not None:
                line = axis.axhline(value, linestyle="--", linewidth=1, color=f"C{color}")
                legend[f"{baseline}, validation"] = line
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(folder / path, dpi=110)


# ================================================================ command line


def first_line(error):
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def constants():
    """Returns every constant of this file by name, as JSON has it."""
    values = {name: x for name, x in globals().items() if name.isupper()}
    del values["ROOT"], values["PANELS"]

    def describe(value):  # a function by its name
        return getattr(value, "__name__", type(value).__name__)

    text = json.dumps(values, default=describe)
    return json.loads(text.replace(json.dumps(str(ROOT))[1:-1], "{ROOT}"))  # the repository may be moved


def read_constants(path):
    """Yields KEY=VALUE of each line of a file, without comments. A text may stand in quotes."""
    for line in Path(path).read_text(encoding="utf-8-sig").splitlines():
        if not line.strip() or line.strip().startswith("#"):
            continue
        key, _, text = line.partition("=")
        quoted = re.fullmatch(r"""(["'])(.*?)\1\s*(#.*)?""", text.strip())
        text = quoted[2] if quoted else re.split(r"\s#\s", text)[0].strip()
        yield f"{key.strip()}={text}"


def apply_overrides(arguments):
    """Sets constants from KEY=VALUE arguments, or @FILE with one on each line, in their types."""
    for argument in arguments:
        if argument.startswith("@"):
            apply_overrides(read_constants(argument[1:]))
            continue
        key, _, text = argument.partition("=")
        if key not in constants():
            near = difflib.get_close_matches(key.upper(), constants(), 1, 0.0)[0]
            raise UserError(f"{argument!r} is not KEY=VALUE with a constant, such as {near}")
        wanted = __annotations__.get(key, type(globals()[key]))  # a type such as int, or int | None
        value = os.path.expanduser(text)
        value = re.sub(r"(?<!\\)\\n", "\n", value).replace(r"\\n", r"\n")  # \n is a line break, \\n is \n
        value = value.replace("{file}", Path(sys.argv[0]).stem)
        if not isinstance(value, wanted) or text == "None":
            with suppress(ValueError, SyntaxError):
                value = ast.literal_eval(text)
        accepts_float = isinstance(0.0, wanted)
        if type(value) is int and accepts_float:
            value = float(value)
        if not isinstance(value, wanted):
            raise UserError(f"{argument}: {key} takes a value such as {globals()[key]!r}")
        globals()[key] = value


def require(is_kept, rule):
    if not is_kept:
        raise UserError(f"a constant breaks a rule: {rule}")


def check_constants():
    """Refuses values that would fail silently or late."""
    counts = (
        "MAX_HISTORY MAX_EVAL_ROWS SFT_BATCH_SIZE BATCH_SIZE MICRO_BATCH_ROWS GROUP_EPOCHS "
        "MINI_BATCHES KEEP_LAST_N_CHECKPOINTS PRINT_EVERY_N_STEPS"
    )
    for name, value in constants().items():
        if type(value) in (int, float):
            lowest = 1 if name in counts.split() else 0
            require(value >= lowest, f"{name} = {value!r} is below {lowest}, or no number")
    for name in ("TEMPERATURE", "CLIP_RANGE", "MAX_GRAD_NORM", "SFT_LEARNING_RATE"):
        require(globals()[name] > 0, f"{name} is above 0")
    for name in ("VALUE_DECAY", "SFT_WARMUP", "TITLE_ROWS", "TITLE_HISTORY_ROWS"):
        require(globals()[name] <= 1, f"{name} is at most 1")
    require(DTYPE in ("float32", "bfloat16"), "DTYPE is float32 or bfloat16")
    require(SCALE_REWARDS in ("group", "batch", "none"), "SCALE_REWARDS is group, batch or none")
    require(KL_ESTIMATOR in ("k2", "k3"), "KL_ESTIMATOR is k2 or k3")
    require(2 <= GROUP_SIZE <= EVAL_BEAMS, "GROUP_SIZE is 2 or more, and at most EVAL_BEAMS")
    require(EVAL_BEAMS >= 20, "EVAL_BEAMS is 20 or more")
    require(VALUE_WEIGHT or RULE_WEIGHT or REWARD_FUNCTIONS, "a reward has a weight")
    require(VALUES_FILE or VALUE_WEIGHT == 0, "VALUE_WEIGHT needs a VALUES_FILE")
    needs_titles = TITLE_ROWS + TITLE_HISTORY_ROWS > 0
    require(ITEM_FILE or not needs_titles, "TITLE_ROWS, TITLE_HISTORY_ROWS need an ITEM_FILE")
    require("{input}" in PROMPT_TEMPLATE, "PROMPT_TEMPLATE contains {input}")


def train_main():
    """Exit codes: 0; 2: the user can correct it; 130, 143: a signal; 1, with a traceback: all else."""
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
