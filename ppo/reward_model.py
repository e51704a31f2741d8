"""A reward model from preferences in one file: what ppo.py is rewarded by is trained on pairs of answers.

Of two answers to a prompt the better one, y_c, gets the higher score (Bradley and Terry 1952; Ouyang et al.
2022, arXiv 2203.02155, equation 1), and every pair counts alike:

    d = r(x, y_c) - r(x, y_r)
    L = mean over pairs of [ -log sigmoid(d - margin) + CENTER_COEF (r(x, y_c) + r(x, y_r))^2 ]

A pair may have a margin (Llama 2, 2307.09288, section 3.2.2): how much better its chosen answer is. A tie is
half a win of each: -1/2 log sigmoid(d) - 1/2 log sigmoid(-d). CENTER_COEF draws the scores towards 0
(Eisenstein et al. 2023, 2312.09244; trl's center_rewards_coefficient), because d does not fix their mean.
Deliberate choices:
- a decoder's score is read at the last token of the chat, an encoder reads prompt and answer as two texts:
  both as reward_model_scores() in ppo.py does;
- dropout is off, and pairs that do not fit MAX_TOKENS are left out and counted: none is cut.

Shapes: rows = pairs at hand. Other dimensions are written as words.

    python ppo/reward_model.py                          # edit the constants below, or: KEY=VALUE, @FILE
    python ppo/reward_model.py BASE_MODEL=checkpoints/sft/best/policy LEARNING_RATE=1e-5
    torchrun --nproc_per_node=4 ppo/reward_model.py     # the same bytes on any number of processes
    python ppo/ppo.py REWARD_MODEL=checkpoints/reward_model/best/reward_model    # go on with PPO

Writes into OUTPUT_DIR: training_config.json, logs/ (training_*.log, metrics.jsonl, samples.jsonl), step_N/
checkpoints, best/reward_model/, three pictures, of which reward_model_pairs.png shows the held-out pairs.
docs/reference.md defines every file, docs/preferences.md the path.

To change            see
the loss             preference_loss; update           the data       TRAIN_DATASETS; load_pairs
what is scored       encode_pair, score_answers        a metric       pair_figures, update, evaluate
the optimizer        make_optimizer                    a plot         PLOT_PANELS; draw_plot, draw_pairs
the figures          pair_figures, reliability         the schedule   learning_rate_scale
Another evaluation, in train(): run.write_metrics("eval", {...}) of what evaluate(rows=...) returns
(run.log_evaluation() would move best/, too).
To add a constant write one line below; one that may be None needs its type, as MAX_STEPS has.
"""

import ast
import copy
import csv
import difflib
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
from torch.nn.functional import logsigmoid
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer
from transformers import AutoModelForSequenceClassification
from transformers.modeling_layers import GradientCheckpointingLayer

ROOT = next((p for p in Path(__file__).resolve().parents if (p / "rewards").is_dir()), None)
if ROOT is None:
    sys.exit("reward_model.py needs the folder rewards/ beside it or above it: copy it from the repository")
sys.path.insert(0, str(ROOT))

# ================================================================ constants

# Model: a folder or a hub name. A new head for one label is put on a language model or an encoder
BASE_MODEL = f"{ROOT}/data/tiny/policy"  # where the reward model starts: best from the policy it will score
LORA_RANK = 0  # 0: all weights are trained; > 0: only LoRA adapters of this rank (2106.09685), and the head
LORA_ALPHA = 32.0  # an adapter's output is scaled by LORA_ALPHA / LORA_RANK
LORA_TARGETS = "all-linear"  # "all-linear" (every linear layer except the heads), or names: q_proj,v_proj
DTYPE = "float32"  # float32 | bfloat16 (autocast; trained weights and optimizer state stay float32)
DEVICE = "auto"  # auto | cpu | cuda | cuda:1 | mps
GRADIENT_CHECKPOINTING = False  # recompute activations in the update: less memory, a third more time

# Data sets: {"path", "type": "jsonl" | "csv" | "parquet" | "hub", "chosen", "rejected"} and, if there are
# such columns, "prompt", "margin" (a number) and "tie" (true or false); on the hub also "name" and "split".
# A prompt is a text or a list of chat messages; an answer a text, or a chat that ends with it. Without
# "prompt" both answers are whole chats with one prompt, as lists of messages or as texts of HH-RLHF
TRAIN_DATASETS = [
    {
        "path": f"{ROOT}/data/tiny/pairs.jsonl",
        "type": "jsonl",
        "prompt": "prompt",
        "chosen": "chosen",
        "rejected": "rejected",
    },
]
EVAL_DATASETS = [
    {
        "path": f"{ROOT}/data/tiny/pairs_test.jsonl",
        "type": "jsonl",
        "prompt": "prompt",
        "chosen": "chosen",
        "rejected": "rejected",
    },
]
PROMPT_TEMPLATE = "{input}"  # the question; the tokenizer's chat template, if it has one, wraps it
SYSTEM_PROMPT: str | None = None  # put before prompts that have none; needs a chat template
MAX_TRAIN_PAIRS: int | None = None  # number of pairs read, from the first on; None: all
MAX_EVAL_PAIRS: int | None = 400
MAX_TOKENS = 512  # of a prompt with an answer; pairs with a longer one are left out, and counted

# Optimisation
BATCH_SIZE = 16  # pairs per forward and backward pass: memory and speed, not the result
GRADIENT_ACCUMULATION_STEPS = 2  # an optimizer step has BATCH_SIZE * this pairs
CENTER_COEF = 0.01  # draws scores towards 0; 0: off
LEARNING_RATE = 5e-4
MAX_GRAD_NORM = 1.0  # > 0
WEIGHT_DECAY = 0.0
USE_LR_SCHEDULER = True
LR_SCHEDULER_TYPE = "cosine"  # linear | cosine (both to 0) | plateau (halves)
PLATEAU_PATIENCE = 2  # evaluations without a lower loss before plateau halves
WARMUP_STEPS = 5  # linear warm-up, with or without a scheduler

# Schedule
NUM_EPOCHS = 2  # passes over the pairs; more than one or two overfit large models
MAX_STEPS: int | None = None  # the run ends here or after NUM_EPOCHS, whichever is first; None: NUM_EPOCHS

# Bookkeeping
SAVE_EVERY_N_STEPS = 25  # 0: only at the end
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 25  # 0: only before the first and after the last step
EARLY_STOPPING_PATIENCE = 0  # evaluations without a lower loss before the run ends; 0: all steps are run
EARLY_STOPPING_THRESHOLD = 0.0  # smallest gain that resets patience; best/ keeps the lowest loss
LOG_SAMPLES = 2  # pairs per step written to samples.jsonl
RESUME = "ask"  # ask (yes without a terminal or under torchrun) | yes | no | path of a checkpoint or a run
OUTPUT_DIR = f"{ROOT}/checkpoints/reward_model"
SEED = 1
USE_WANDB = False
WANDB_PROJECT = "hackable-rlhf"
# Panels of reward_model_metrics_with_entropy.png: (label, metrics); training_metrics_detailed.png shows all
PLOT_PANELS = [
    ("loss (nats per pair)", ["loss"]),
    ("pair accuracy", ["accuracy"]),
    ("margin", ["margin"]),
    ("score", ["chosen_score", "rejected_score"]),
    ("calibration_error", ["calibration_error"]),
    ("length_correlation", ["length_correlation"]),
]

# Processes: torchrun --nproc_per_node=2 ppo/reward_model.py
DETERMINISTIC_GRADIENTS = True  # the same bits on any number of processes; False: a little faster
SHARD = "none"  # none | fsdp2: each process keeps a part of every model
PROCESS_TIMEOUT = 1800.0  # seconds that a process waits for the others

_VALID_RANGES = {  # (smallest, largest) value or allowed words, where a bad value might go unnoticed
    "BATCH_SIZE GRADIENT_ACCUMULATION_STEPS MAX_TOKENS MAX_STEPS NUM_EPOCHS MAX_TRAIN_PAIRS": (1, 1e12),
    "PLATEAU_PATIENCE KEEP_LAST_N_CHECKPOINTS": (1, 1e12),
    "MAX_EVAL_PAIRS WARMUP_STEPS LOG_SAMPLES SAVE_EVERY_N_STEPS EVAL_EVERY_N_STEPS WEIGHT_DECAY": (0, 1e12),
    "MAX_GRAD_NORM LORA_ALPHA": (1e-6, 1e9),
    "LEARNING_RATE LORA_RANK CENTER_COEF": (0, 1e6),
    "DTYPE": ["float32", "bfloat16"],
    "SHARD": ["none", "fsdp2"],
    "LR_SCHEDULER_TYPE": ["linear", "cosine", "plateau"],
}

_TUNED_FOR_TINY = {  # values that suit the shipped model and data, and what another model wants
    "MAX_TOKENS": (512, "pairs with a longer answer are left out"),
    "LEARNING_RATE": (5e-4, "1e-5 for whole pretrained models, 1e-4 for LoRA"),
    "NUM_EPOCHS": (2, "1 for large models"),
    "OUTPUT_DIR": (f"{ROOT}/checkpoints/reward_model", "the shipped model's run; give yours its own folder"),
}
_RENAMED = {}  # old names of constants, accepted as arguments
_INSTEAD_HERE = {  # constants of other trainers: what this file has instead
    "ACTOR_MODEL": "BASE_MODEL",
    "MAX_PROMPT_TOKENS": "MAX_TOKENS",
    "MICRO_BATCH_ROWS": "BATCH_SIZE",
}
# When a run resumes, it logs every constant that has changed, except these
_MAY_CHANGE = "RESUME OUTPUT_DIR PLOT_PANELS".split()
# When one of these has changed, the scores of a resumed run do not compare with the earlier ones. Add a
# constant of yours that changes how responses are sampled or scored
_CHANGE_SCORES = """
    EVAL_DATASETS MAX_EVAL_PAIRS PROMPT_TEMPLATE SYSTEM_PROMPT MAX_TOKENS CENTER_COEF
""".split()

# ================================================================ the maths of preferences


def preference_loss(chosen, rejected, margins, is_tie, center_coef):
    """Returns the loss of each pair, (rows,), from the scores of its answers, its margin, and whether it is a
    tie, all (rows,)."""
    difference = chosen - rejected
    losses = -logsigmoid(difference - margins)
    tie_losses = -0.5 * (logsigmoid(difference) + logsigmoid(-difference))
    return torch.where(is_tie, tie_losses, losses) + center_coef * (chosen + rejected) ** 2


def agreement(chosen, rejected):
    """Returns whether each pair's chosen answer has the higher score, (rows,); of equal scores a half."""
    return (chosen > rejected).to(chosen.dtype) + 0.5 * (chosen == rejected).to(chosen.dtype)


def reliability(chosen, rejected, num_bins=5):
    """Returns for each bin of confidence [confidence, agreement, pairs], means over its pairs: a calibrated
    model whose scores say that the better answer is better with probability p is right in p of the pairs."""
    confidence = (chosen - rejected).abs().sigmoid()  # 0.5 to 1
    right = agreement(chosen, rejected)
    bins = ((confidence - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    points = []
    for number in range(num_bins):
        inside = bins == number
        if inside.any():
            points.append(
                [confidence[inside].mean().item(), right[inside].mean().item(), inside.sum().item()]
            )
    return points


def average_ranks(x):
    """Returns the ranks of numbers (n,); equal numbers share their mean rank."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse]


def rank_correlation(x, y):
    """Returns Spearman's correlation of two (n,); 0 if one of them is constant."""
    x, y = average_ranks(x), average_ranks(y)
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def pair_figures(chosen, rejected, chosen_lengths, rejected_lengths):
    """Returns what is said of held-out pairs without ties, from the scores and the tokens of their answers,
    (rows,): accuracy with a 95% interval; the mean margin; the calibration error (mean distance of confidence
    and agreement); Spearman's correlation of score and length; and the accuracy on pairs of equal length."""
    right = agreement(chosen, rejected)
    low, high = bootstrap_interval(right.numpy())
    points = reliability(chosen, rejected)
    error = sum(abs(confidence - mean) * count for confidence, mean, count in points) / len(right)
    scores = torch.cat([chosen, rejected]).numpy()
    lengths = torch.cat([chosen_lengths, rejected_lengths]).numpy()
    figures = {"accuracy": right.mean().item(), "accuracy_low": low, "accuracy_high": high}
    figures |= {"margin": (chosen - rejected).mean().item(), "calibration_error": error}
    figures["length_correlation"] = rank_correlation(scores, lengths)
    is_equal = chosen_lengths == rejected_lengths
    if is_equal.any():
        figures["accuracy_equal_length"] = right[is_equal].mean().item()
    return figures


# ================================================================ the trainer


class RewardModelTrainer:
    """Model, data and the algorithm; self.run has the files. resume_from_checkpoint overrides the constant
    RESUME: a path, "ask", "yes" or "no"."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        self.device = find_device()
        self.run = Run("reward_model", resume_from_checkpoint, self.device)
        self.run.title = f"Reward model, {'/'.join(Path(BASE_MODEL).parts[-2:])}, seed {SEED}"
        self.run.panels = PLOT_PANELS
        self.run.best_by = ["negative_loss"]
        self.load_model()
        keys = ["prompt", "margin", "tie"]
        self.train_rows = load_pairs(self, TRAIN_DATASETS, "TRAIN_DATASETS", keys, MAX_TRAIN_PAIRS)
        self.eval_rows = load_pairs(self, EVAL_DATASETS, "EVAL_DATASETS", keys, MAX_EVAL_PAIRS)
        self.read_pairs = self.pair_scores
        if is_decoder(self.model) and reads_joined(
            self.model, self.joined_scores, self.pair_scores, self.train_rows + self.eval_rows
        ):
            self.read_pairs = self.joined_scores
        self.held_out = None  # scores and lengths of the last evaluation's pairs, for a picture
        # What a checkpoint keeps beside weights, optimizers and random generators. order: this epoch's
        # permutation of the rows. prompts: their number, compared when a run resumes
        num_rows = len(self.train_rows)
        self.state = SimpleNamespace(epoch=0, order=None, cursor=0, prompts=num_rows)
        # If the run resumes, this loads the checkpoint into state and optimizers
        self.run.register(self.state, self.models, self.optimizers, self.tokenizer)
        self.run.total_steps = last_step(self.state, self.run.step)

    def load_model(self):
        """The reward model comes from the checkpoint if there is one."""
        self.model = load_trained(
            self.run,
            "reward_model",
            AutoModelForSequenceClassification,
            BASE_MODEL,
            "BASE_MODEL",
            new_head=True,
        )
        load = load_tokenizer if is_decoder(self.model) else partial(load_pretrained, AutoTokenizer)
        self.tokenizer = load(BASE_MODEL, "BASE_MODEL")
        self.model.config.pad_token_id = padding_id(self.model, self.tokenizer)  # forward() asks for one
        # Models that are trained, by the name of their folder in a checkpoint; and all, by their constant
        self.models = {"reward_model": self.model}
        self.models_by_constant = {"BASE_MODEL": self.model}
        self.optimizers = {"reward_model": make_optimizer(self.model, LEARNING_RATE)}

    def encode_pair(self, row, record, spec, where):
        """Adds to a row {"id", "prompt", "chosen", "rejected"} what the model reads of its answers, their
        numbers of tokens, the length of the pair, its margin, and whether it is a tie."""
        for key in ("chosen", "rejected"):
            inputs = encode_scored(self.model, self.tokenizer, row["prompt"], row[key], where)
            row[f"{key}_inputs"] = inputs
            row[f"{key}_tokens"] = len(self.tokenizer(row[key], add_special_tokens=False)["input_ids"])
        row["length"] = max(len(row[f"{key}_inputs"]["input_ids"]) for key in ("chosen", "rejected"))
        row["margin"], row["is_tie"] = 0.0, False
        if "margin" in spec:
            row["margin"] = read_number(
                look_up(record, spec["margin"], where), f"{where}: {spec['margin']!r}"
            )
        if "tie" in spec:
            row["is_tie"] = read_boolean(look_up(record, spec["tie"], where), f"{where}: {spec['tie']!r}")

    # ------------------------------------------------------------ the algorithm

    def train(self):
        """Trains until the last step, a signal, or patience ends it. Returns the last evaluation."""
        run = self.run
        with run.session(run_summary(self)):  # lock, logs and signals; saves at the end
            if run.needs_first_evaluation():
                run.log_evaluation(self.evaluate())
            while run.next_step():
                rows = next_rows(self.train_rows, self.state, BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS)
                metrics = self.update(rows)
                self.record(rows, metrics)
                if run.is_due(EVAL_EVERY_N_STEPS) or run.is_last_step():
                    run.log_evaluation(self.evaluate())
                    draw_pairs(run, self.held_out)
                if run.is_due(SAVE_EVERY_N_STEPS):
                    run.save()
        return run.evaluation

    def pair_scores(self, model, rows):
        """Returns the scores of the chosen and of the rejected answers, two (rows,), in float32."""
        answers = column(rows, "chosen_inputs") + column(rows, "rejected_inputs")
        return score_answers(model, self.tokenizer, answers).chunk(2)

    def joined_scores(self, model, rows):
        """Returns what pair_scores() returns, but reads the prompt of a pair once."""
        chosen = column(column(rows, "chosen_inputs"), "input_ids")
        rejected = column(column(rows, "rejected_inputs"), "input_ids")
        ids, options, rejected_places = join_pairs(model, list(zip(chosen, rejected)))
        last = [(len(first) - 1, places[-1]) for first, places in zip(chosen, rejected_places)]
        return scores_at(model, ids, last, **options).unbind(1)

    def pair_losses(self, rows, chosen, rejected):
        """Returns the loss of each pair, (rows,)."""
        margins = to_device(column(rows, "margin"), chosen.device)
        is_tie = to_device(column(rows, "is_tie"), chosen.device)
        return preference_loss(chosen, rejected, margins, is_tie, CENTER_COEF)

    def update(self, rows):
        """One optimizer step. The loss is the mean over all pairs, however they are cut into micro-batches.
        Returns the step's metrics."""
        run = self.run
        scale = step_scale(run)
        gradients = GradientSum([self.model])
        with run.timed("update"):
            set_learning_rate(self.optimizers["reward_model"], LEARNING_RATE * scale)
            for micro in gradients.deal(cut_by_length(rows)):
                chosen, rejected = self.read_pairs(self.model, micro)
                losses = self.pair_losses(micro, chosen, rejected)
                gradients.backward(self.model, losses.sum() / len(rows))
                stats = {"loss": losses, "accuracy": agreement(chosen, rejected), "margin": chosen - rejected}
                stats |= {"chosen_score": chosen, "rejected_score": rejected}
                gradients.log_means(stats, torch.ones_like(chosen), len(rows))
            metrics = gradients.finish()
            optimizers, row_ids = [self.optimizers["reward_model"]], column(rows, "id")
            (grad_norm,) = clip_and_step(optimizers, metrics["loss"], run, row_ids)
        return {**metrics, "grad_norm": grad_norm, "learning_rate": LEARNING_RATE * scale}

    # ------------------------------------------------------------ evaluation and what is logged

    @torch.no_grad()
    def evaluate(self, rows=None):
        """Returns metrics of rows (those of load_pairs()), or of the held-out pairs; ties count in the loss
        alone. best/ and patience follow the highest negative_loss. Override it to add metrics of yours."""
        if rows is None:
            rows = self.eval_rows
        if not rows:
            return {}
        with self.run.timed("evaluate"):
            chosen, rejected = (x.double() for x in map_rows(self.read_pairs, self.model, rows))
            loss = self.pair_losses(rows, chosen, rejected).mean().item()
            metrics = {"loss": loss, "negative_loss": -loss}
            metrics |= {"chosen_score": chosen.mean().item(), "rejected_score": rejected.mean().item()}
            is_ordered = ~torch.tensor(column(rows, "is_tie"))
            if is_ordered.any():
                lengths = torch.tensor([(row["chosen_tokens"], row["rejected_tokens"]) for row in rows]).T
                self.held_out = [x[is_ordered] for x in (chosen, rejected, *lengths)]
                metrics |= pair_figures(*self.held_out)
        return metrics

    @torch.no_grad()
    def reward_model_score(self, prompts, responses):
        """Returns the score of each response, (rows,); of two strings one number."""
        if isinstance(prompts, str):
            return self.reward_model_score([prompts], [responses])[0]
        encode = partial(encode_scored, self.model, self.tokenizer)
        answers = [encode(p, response, "reward_model_score") for p, response in zip(prompts, responses)]
        return score_answers(self.model, self.tokenizer, answers)

    def record(self, rows, metrics):
        """Logs the step's metrics, some of its pairs, and its line on the terminal."""
        samples = []
        for row in rows[:LOG_SAMPLES]:
            sample = {"id": row["id"], "prompt": as_text(row["prompt"])}
            samples.append({**sample, "chosen": row["chosen"], "rejected": row["rejected"]})
        metrics = {"epoch": self.state.epoch, **metrics}
        line = "Epoch {epoch}/{epochs}: L:{loss:.4f} A:{accuracy:.3f} M:{margin:.3f} LR:{learning_rate:.2e}"
        line = line.format(epochs=NUM_EPOCHS, **metrics)
        self.run.log_step(metrics, len(rows), samples, line, unit="pairs")


# ================ machinery: the same in all trainers that have it
# Edit it freely in a copy of your own. In the repository tools/copies.py keeps definitions of one name equal.

# ---------------------------------------------------------------- loading models


# differs: no sharing of prompts; new layers start as the library initialises them
# A classifier of zeros behind another new layer of zeros would never learn
def load_model(auto_class, path, constant, device, new_head=False, dtype=torch.float32):
    """Returns the model of a folder or hub name, in evaluation mode. Missing or unexpected weights are an
    error. With new_head it gets a head for one label: the checkpoint may lack that head, or hold another
    one."""
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
    for parameter in model.parameters():
        # Weights that are memory-mapped from a file may be unaligned, which changes a product's last bit
        parameter.data = parameter.data.clone()
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


# ---------------------------------------------------------------- micro-batches


def pad_right(rows, value, multiple=1):
    """Returns lists of ids as one tensor, (rows, length of the longest, rounded up to a multiple)."""
    width = math.ceil(max(map(len, rows)) / multiple) * multiple
    return torch.tensor([list(row) + [value] * (width - len(row)) for row in rows])


def to_device(values, device):
    """Returns a list of numbers, or a CPU tensor, as a tensor on the device. A copy to a GPU does not
    block."""
    return torch.as_tensor(values).to(device, non_blocking=torch.device(device).type == "cuda")


def cut_by_length(rows):
    """Cuts rows into micro-batches, lists of BATCH_SIZE rows of like length."""
    rows = sorted(rows, key=lambda row: (row["length"], row["id"]), reverse=True)
    return [rows[i : i + BATCH_SIZE] for i in range(0, len(rows), BATCH_SIZE)]


def map_rows(compute, model, rows):
    """Returns what compute(model, rows) returns, tensors, for all rows in their order, on the CPU. The
    processes share them, BATCH_SIZE at a time."""
    chunks = [rows[i : i + BATCH_SIZE] for i in range(0, len(rows), BATCH_SIZE)]
    with full_parameters(model):
        results = map_over_ranks(chunks, partial(compute, model))
    return [torch.cat([x.cpu() for x in values]) for values in zip(*results)]


# ---------------------------------------------------------------- scoring


# differs: no sharing of prompts by an attention of its own
def forward(model, ids, **options):
    """Returns the model's output for ids (rows, T), with those of the options that its forward() takes."""
    parameters = inspect.signature(model.forward).parameters
    return model(input_ids=ids, **{key: value for key, value in options.items() if key in parameters})


def is_decoder(model):
    """Returns whether a classifier reads its score at the last token. Encoders such as DeBERTa do not."""
    return hasattr(model, "score")


def encode_scored(model, tokenizer, prompt, response, where):
    """Returns what a reward model reads of a prompt with its response, {"input_ids", ...}, lists: the chat,
    or in an encoder the two texts."""
    if is_decoder(model):
        inputs = {"input_ids": encode_chat(tokenizer, prompt, where, response)}
    else:
        inputs = dict(tokenizer(as_text(prompt), as_text(response)))
    num_tokens = len(inputs["input_ids"])
    if max(inputs["input_ids"]) >= vocab_size(model):
        fault = f"gives the id {max(inputs['input_ids'])}, but the model has only {vocab_size(model)}"
        raise UserError(f"{where}: the tokenizer {fault}: BASE_MODEL = {BASE_MODEL!r}")
    if max_positions(model) < num_tokens <= MAX_TOKENS:  # longer ones are left out
        fault = f"reads at most {max_positions(model)} tokens, but a prompt with its answer has {num_tokens}"
        raise UserError(f"{where}: BASE_MODEL = {BASE_MODEL!r} {fault}: lower MAX_TOKENS")
    return inputs


def score_answers(model, tokenizer, answers):
    """Returns the score of each answer, what encode_scored() gave, (rows,), in float32. A decoder scores
    every token; the last one's counts. Its padding on the right is not seen."""
    if not is_decoder(model):
        inputs = tokenizer.pad(answers, return_tensors="pt").to(model.device)
        with autocast(model):
            return model(**inputs).logits.squeeze(-1).float()
    ids = to_device(pad_right(column(answers, "input_ids"), 0), model.device)
    last = [[len(answer["input_ids"]) - 1] for answer in answers]
    return scores_at(model, ids, last).squeeze(-1)


def scores_at(model, ids, places, **options):
    """Returns a decoder's scores of ids (rows, T) at some columns of each row, (rows, columns); float32."""
    columns = to_device(places, model.device)
    rows = torch.arange(len(ids), device=model.device)[:, None]

    def scores_everywhere(head, inputs, output):
        """The model looks for a row's last token by its id, and may take another; so all have its scores."""
        return output[rows, columns].squeeze(-1)[:, None].expand(-1, ids.shape[1], -1)

    hook = model.score.register_forward_hook(scores_everywhere)
    try:
        with autocast(model):
            return forward(model, ids, use_cache=False, **options).logits.float()
    finally:
        hook.remove()


def join_pairs(model, pairs):
    """Returns pairs of texts, two lists of ids each, as rows of ids (rows, T) that a decoder reads once: what
    both begin with, the rest of the first, the rest of the second; the options that keep the rests apart; and
    for each row the places of the second text's ids."""
    rows, positions, owners, second_places = [], [], [], []
    for first, second in pairs:
        num_common = len(os.path.commonprefix([first, second]))
        rows.append(first + second[num_common:])
        positions.append([*range(len(first)), *range(num_common, len(second))])
        # 0: of both texts, 1: of the first, 2: of the second; padding: 3
        num_first, num_second = len(first) - num_common, len(second) - num_common
        owners.append([0] * num_common + [1] * num_first + [2] * num_second)
        second_places.append([*range(num_common), *range(len(first), len(first) + num_second)])
    owner = to_device(pad_right(owners, 3), model.device)
    is_visible = (owner[:, None, :] == 0) | (owner[:, None, :] == owner[:, :, None])  # (rows, query, key)
    options = {"position_ids": to_device(pad_right(positions, 0), model.device)}
    options["attention_mask"] = is_visible.tril()[:, None]
    return to_device(pad_right(rows, 0), model.device), options, second_places


@torch.no_grad()
def reads_joined(model, joined, separate, rows):
    """Returns whether joined(model, rows) and separate(model, rows) agree on some pairs, of which one is the
    longest. Models with another attention, such as a window shorter than the pair, do not."""
    rows = [max(rows, key=lambda row: row["length"]), *rows[:3]]
    with full_parameters(model):
        want = torch.cat(separate(model, rows))
        try:
            got = torch.cat(joined(model, rows))
        except Exception:  # it has no such option, and models say so in many ways
            return False
    tolerance = 1e-3
    if DTYPE != "float32":  # bfloat16 rounds by 1 in 256
        tolerance = 0.02
    return bool((got - want).abs().max() <= tolerance * (1 + want.abs().max()))


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


def step_scale(run):
    """Returns the factor of the learning rate in the current step."""
    schedule = LR_SCHEDULER_TYPE if USE_LR_SCHEDULER else None
    steps_done = max(0, run.step - 1)  # run.step is 0 before the first step
    return learning_rate_scale(steps_done, run.total_steps, WARMUP_STEPS, schedule, run.halvings)


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


# ---------------------------------------------------------------- pairs


def load_pairs(trainer, datasets, constant, optional, limit):
    """Returns the pairs of data sets, rows {"id", "prompt": text or chat, "chosen", "rejected": texts} with
    what trainer.encode_pair() adds. Pairs that cannot be used are left out and counted, by reason."""
    rows = []
    left_out = {}  # {reason: row ids}
    repeats_prompt = []
    required = [["chosen", "rejected"]]
    for spec, record, row_id, where in read_datasets(datasets, constant, required, optional, limit):
        pair, reason = read_pair(record, spec, where)
        row = {"id": row_id, **pair}
        if reason is None:
            trainer.encode_pair(row, record, spec, where)
            if row["length"] > MAX_TOKENS:
                reason = f"longer than MAX_TOKENS = {MAX_TOKENS}"
        if reason:
            left_out.setdefault(reason, []).append(row_id)
            continue
        rows.append(row)
        prompt = as_text(row["prompt"])
        if row["chosen"].startswith(prompt) and row["rejected"].startswith(prompt):
            repeats_prompt.append(row_id)
    if len(repeats_prompt) > len(rows) / 2:
        fault = f"answers begin with their prompt ({repeats_prompt[0]} and others)"
        raise UserError(f"{constant}: {fault}: give the answers alone")
    log_left_out(trainer, constant, left_out, rows)
    return rows


def read_datasets(datasets, constant, required, optional, limit):
    """Yields (spec, record, row id, what an error names) of the first `limit` records of data sets; None: of
    all. A spec has the keys of one of the lists in `required`, and may have those in `optional`."""
    if "{input}" not in PROMPT_TEMPLATE:
        raise UserError(f"PROMPT_TEMPLATE = {PROMPT_TEMPLATE!r} has no {{input}}, the place of the prompt")
    known = ["path", "type", "name", "split", *optional, *itertools.chain(*required)]
    file_names = Counter(Path(spec.get("path", "")).name for spec in datasets)
    count = 0
    for spec in datasets:
        for key in spec.keys() - set(known):
            raise UserError(f"{constant}: unknown key {key!r} in {spec!r}{did_you_mean(key, known)}")
        if not any({"path", "type", *keys} <= spec.keys() for keys in required):
            keys = " or ".join(", ".join(keys) for keys in required)
            raise UserError(f"{constant}: a data set needs path, type and {keys}: {spec!r}")
        count_before = count
        for number, record in read_records(spec, f"{constant}: {spec['path']}"):
            if limit is not None and count == limit:
                return
            file_name = Path(spec["path"]).name
            if file_names[file_name] > 1:
                parts = [spec["path"], spec.get("name"), spec.get("split")]
                file_name = ":".join(part for part in parts if part)
            yield spec, record, f"{file_name}:{number}", f"{constant}: {spec['path']} line {number}"
            count += 1
        if count == count_before and limit != 0:
            raise UserError(f"{constant}: {spec['path']}: the data set is empty")


def log_left_out(trainer, constant, left_out, kept):
    """Logs how many rows were left out, by reason: {reason: row ids}. Some rows must be left to train on."""
    total = len(kept) + sum(map(len, left_out.values()))
    for reason, row_ids in left_out.items():
        trainer.run.log(
            f"{constant}: left out {len(row_ids)} of {total} rows, {reason} (the first: {row_ids[0]})"
        )
    if not kept and constant == "TRAIN_DATASETS":
        reasons = "; ".join(left_out) or "it is empty"
        raise UserError(
            f"{constant} leaves no row to train on ({reasons}): raise MAX_TOKENS, or give other data"
        )


def read_pair(record, spec, where):
    """Returns {"prompt", "chosen", "rejected"} of a record, and why it cannot be used, or None."""
    values = {}
    for key in ("chosen", "rejected"):
        value = look_up(record, spec[key], where)
        name = f"{where}: {spec[key]!r}"
        if isinstance(value, str) and "prompt" not in spec:
            value = split_dialogue(value, name)
        values[key] = (
            cell_text(value, name) if isinstance(value, (str, int, float)) else read_chat(value, name)
        )
    prompts = []
    if "prompt" in spec:
        prompts.append(read_prompt(look_up(record, spec["prompt"], where), f"{where}: {spec['prompt']!r}"))
    answers = {}
    for key, value in values.items():
        answers[key] = value
        if isinstance(
            value, list
        ):  # a chat: its last message is the answer, what stands before it the prompt
            if value[-1]["role"] != "assistant":
                return {}, f"whose {key} answer does not end with a turn of the assistant"
            answers[key] = value[-1]["content"]
            if len(value) > 1 or not prompts:
                prompts.append(value[:-1])
    as_chats = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]
    if any(chat != as_chats[0] for chat in as_chats):
        return {}, "whose chosen and rejected answers do not continue one prompt"
    if not prompts[0] or as_chats[0][-1]["role"] == "assistant":
        return {}, "without a prompt that asks for an answer"
    if not answers["chosen"].strip() or not answers["rejected"].strip():
        return {}, "with an empty answer"
    if answers["chosen"] == answers["rejected"]:
        return {}, "whose chosen and rejected answers are equal"
    return {"prompt": prompts[0], **answers}, None


def split_dialogue(text, where):
    """Returns the messages of a text as HH-RLHF has it: "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    first, *pieces = re.split(r"\n\n(Human|Assistant):", text)
    if first.strip() or not pieces:
        hint = 'name the column of the prompts, or give texts such as "\\n\\nHuman: Hi\\n\\nAssistant: Hello"'
        raise UserError(f'{where} is a text, and the data set has no "prompt": {hint}')
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[speaker], "content": words.strip()}
        for speaker, words in zip(pieces[::2], pieces[1::2])
    ]


def read_chat(value, where):
    """Returns a whole chat as a file has it: a list of {"role", "content"} messages."""
    messages = without_nulls(value)
    if not isinstance(messages, list) or not messages or not all(is_message(m) for m in messages):
        form = 'a chat is a list of messages such as [{"role": "user", "content": "How many?"}, ...]'
        raise UserError(f"{where}: {form}; this is {repr(value)[:160]}")
    return [{**message, "content": message.get("content", "")} for message in messages]


def read_number(value, where):
    """Returns a finite number of a file; a csv has it as a text."""
    with suppress(ValueError, TypeError):
        if math.isfinite(float(value)):
            return float(value)
    raise UserError(f"{where} must be a finite number, not {repr(value)[:80]}")


def read_boolean(value, where):
    """Returns true or false of a file; a csv has 0, 1, true or false as a text."""
    words = {"true": True, "1": True, "false": False, "0": False}
    if str(value).lower() not in words:
        raise UserError(f"{where} must be true or false, not {repr(value)[:80]}")
    return words[str(value).lower()]


# ---------------------------------------------------------------- prompts and chats


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


# ---------------------------------------------------------------- the first lines of a run


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


# differs: pairs instead of responses
def run_summary(trainer):
    """Returns the first lines of a run on the terminal."""
    run, model = trainer.run, trainer.model
    name = "/".join(Path(BASE_MODEL).parts[-2:])
    end = "NUM_EPOCHS"
    if MAX_STEPS and run.total_steps >= MAX_STEPS:
        end = "MAX_STEPS"
    pairs_per_step = BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS
    lines = [
        f"{name}: {parameter_counts(model)} on {device_and_dtype(model.device)}; writing to {OUTPUT_DIR}",
        f"{len(trainer.train_rows)} pairs to train on, {len(trainer.eval_rows)} held out",
        f"Steps {run.step} to {run.total_steps}, where {end} ends the run; each has {pairs_per_step} pairs",
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


# differs: no actor
def unsuited_constants():
    """Returns a line about the constants that still have the value tuned for the shipped model and data,
    though the run uses others; an empty list if there is none."""
    if is_shipped(BASE_MODEL) and all(is_shipped(spec["path"]) for spec in TRAIN_DATASETS):
        return []
    hints = []
    for name, (tuned, hint) in _TUNED_FOR_TINY.items():
        if globals()[name] == tuned and not (is_shipped(BASE_MODEL) and name.endswith(("RATE", "TOKENS"))):
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


# differs: its new head is trained whole, beside the adapters
def merge_adapter(model):
    """Returns a copy of a model whose adapter is added to the weights, in float32: it loads without PEFT."""
    merged = copy.deepcopy(model).float()
    for name, layer in list(merged.named_modules()):
        if hasattr(layer, "get_delta_weight"):
            layer.merge()
            merged.set_submodule(name, layer.get_base_layer())
        elif hasattr(layer, "modules_to_save"):
            merged.set_submodule(name, layer.modules_to_save["default"])
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


def column(rows, field):
    """Returns one field of all rows, a list."""
    return [row[field] for row in rows]


def next_rows(rows, state, count):
    """Returns the next `count` rows, fewer at the end of an epoch. state.order is this epoch's
    permutation."""
    if state.cursor == 0:
        state.epoch += 1
        state.order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED + state.epoch))
    chosen = state.order[state.cursor : state.cursor + count].tolist()
    state.cursor = (state.cursor + len(chosen)) % len(rows)
    return [rows[i] for i in chosen]


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


def last_step(state, step):
    """Returns the run's last step, as known after `step` steps, from the prompts that the epochs have left.
    It depends on the state alone, so that a resumed run has the same."""
    prompts_per_step = BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS
    steps_left = math.ceil((-state.cursor % state.prompts) / prompts_per_step)
    steps_left += max(0, NUM_EPOCHS - state.epoch) * math.ceil(state.prompts / prompts_per_step)
    return min(step + steps_left, MAX_STEPS or math.inf)


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


def draw_pairs(run, held_out):
    """Draws what the scores say of the held-out pairs: margins, reliability, and score by length, beside the
    rule that the longer answer is better. held_out: scores and lengths, four (rows,); None draws nothing."""
    if rank() > 0 or held_out is None:
        return
    chosen, rejected, chosen_lengths, rejected_lengths = held_out
    figure = Figure(figsize=(16, 4.6))
    figure.subplots_adjust(0.05, 0.13, 0.99, 0.83, wspace=0.2)
    accuracy = agreement(chosen, rejected).mean().item()
    rule = agreement(chosen_lengths.double(), rejected_lengths.double()).mean().item()
    facts = f"accuracy {accuracy:.1%}; the longer answer is the chosen one in {rule:.1%}"
    figure.suptitle(f"{run.title}: {len(chosen)} held-out pairs after step {run.step}; {facts}")
    axis = figure.add_subplot(1, 3, 1, xlabel="score of the chosen minus the rejected answer", ylabel="pairs")
    axis.hist((chosen - rejected).tolist(), bins=40)
    axis.axvline(0, color="black", linewidth=0.8)
    label = "share in which it is the chosen one"
    axis = figure.add_subplot(
        1, 3, 2, xlabel="probability that the model gives to its preferred answer", ylabel=label
    )
    confidence, mean, count = zip(*reliability(chosen, rejected))
    axis.plot((0.5, 1), (0.5, 1), "--", color="black", linewidth=0.8, label="calibrated")
    axis.plot(confidence, mean, "o-", label="held-out pairs, five bins")
    for x, y, number in zip(confidence, mean, count):
        axis.annotate(f" {number}", (x, y), va="top")
    axis.legend(fontsize=8)
    axis = figure.add_subplot(1, 3, 3, xlabel="tokens of the answer", ylabel="score")
    axis.plot(chosen_lengths.tolist(), chosen.tolist(), ".", alpha=0.5, label="chosen")
    axis.plot(rejected_lengths.tolist(), rejected.tolist(), ".", alpha=0.5, label="rejected")
    axis.legend(fontsize=8)
    for axis in figure.axes:
        axis.grid(alpha=0.3)
    write_atomically(run.folder / "reward_model_pairs.png", partial(figure.savefig, format="png", dpi=100))


def bootstrap_interval(values):
    """95% interval of the mean of values (rows,), resampling rows."""
    generator = np.random.default_rng(0)
    means = [generator.choice(values, len(values)).mean() for _ in range(2000)]
    return np.quantile(means, (0.025, 0.975)).tolist()


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

    # differs: it is a reward model
    def final_message(self):
        if self.stop_signal:
            return f"Stopped at step {self.step}: start it again with RESUME=yes to continue"
        model = self.folder / "best/reward_model"
        if not model.exists():
            model = self.checkpoint / "reward_model"
        model = f"{model}{self.step_of_best()}"
        done = f"Done at step {self.step} of {self.total_steps}"
        if self.is_stopped:
            done += ", where is_stopped = True ended the run"
        return f"{done}. Plots: {OUTPUT_DIR}/*.png; model: {model}"

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

    # differs: it is a reward model
    def save_best(self, metrics):
        model = self.models["reward_model"]
        if LORA_RANK:
            model = merge_adapter(model)
        weights = full_weights(model)  # all processes must call it
        if rank() == 0:
            write_atomically(self.folder / "best", partial(self.write_best, metrics, model, weights))

    # differs: it is a reward model
    def write_best(self, metrics, model, weights, folder):
        self.save_model(model, folder / "reward_model", weights)
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


# differs: it only trains
def run_stage(trainer_class):
    """Trains. Returns the exit code."""
    trainer = trainer_class()
    trainer.train()
    return 128 + trainer.run.stop_signal if trainer.run.stop_signal else 0


# differs: the constants that bound the memory
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
        hint = "set GRADIENT_CHECKPOINTING=True, or halve BATCH_SIZE and double GRADIENT_ACCUMULATION_STEPS: "
        hint += "the training stays as it is"
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


def train_main():
    run_main(RewardModelTrainer)


if __name__ == "__main__":
    train_main()
