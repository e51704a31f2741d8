"""Supervised fine-tuning in one file: the policy that PPO starts from is trained on demonstrations.

The likelihood of the demonstrated answers is maximised (Ouyang et al. 2022, arXiv 2203.02155, step 1):

    L = - 1 / (trained tokens of the step) * sum over them of log pi(y_t | prompt, y_<t)

Trained are the tokens of the answer and the end token that follows it. Of a chat ("messages") every turn of
the assistant is trained. The mean runs over all trained tokens of the optimizer step, however it is cut into
micro-batches. Deliberate choices:
- dropout is off, and all rows that do not fit MAX_TOKENS are left out and counted: none is cut;
- an answer ends with its first end token, where sampling stops too; what the chat template writes after it
  is not trained;
- a prompt has the ids that ppo.py gives it; if the tokenizer joins it with its answer, that is an error.

Shapes: tokens = trained tokens of the rows at hand, row after row. Other dimensions are written as words.

    python ppo/sft.py                                   # edit the constants below, or: KEY=VALUE, @FILE
    python ppo/sft.py ACTOR_MODEL=Qwen/Qwen2.5-0.5B 'EOS_TOKEN=<|im_end|>' LEARNING_RATE=1e-5
    torchrun --nproc_per_node=4 ppo/sft.py              # the same bytes on any number of processes
    python ppo/ppo.py ACTOR_MODEL=checkpoints/sft/best/policy        # go on with PPO

Writes into OUTPUT_DIR: training_config.json, logs/ (training_*.log, metrics.jsonl, samples.jsonl), step_N/
checkpoints, best/policy/, two pictures. docs/reference.md defines every file, docs/preferences.md the path.

To change            see
the loss             sft_loss, SFTTrainer.update       the data       TRAIN_DATASETS; load_demonstrations
what is trained      encode_answer, encode_turns       a metric       update, evaluate
the optimizer        make_optimizer                    a plot         PLOT_PANELS; draw_plot
sampled answers      sample_answers                    the schedule   learning_rate_scale
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
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

ROOT = next((p for p in Path(__file__).resolve().parents if (p / "rewards").is_dir()), None)
if ROOT is None:
    sys.exit("sft.py needs the folder rewards/ beside it or above it: copy it from the repository")
sys.path.insert(0, str(ROOT))
import rewards

# ================================================================ constants

# Model: a folder or a hub name
ACTOR_MODEL = f"{ROOT}/data/tiny/policy"
LORA_RANK = 0  # 0: all weights are trained; > 0: only LoRA adapters of this rank (2106.09685)
LORA_ALPHA = 32.0  # an adapter's output is scaled by LORA_ALPHA / LORA_RANK
LORA_TARGETS = "all-linear"  # "all-linear" (every linear layer except the heads), or names: q_proj,v_proj
DTYPE = "float32"  # float32 | bfloat16 (autocast; trained weights and optimizer state stay float32)
DEVICE = "auto"  # auto | cpu | cuda | cuda:1 | mps
GRADIENT_CHECKPOINTING = False  # recompute activations in the update: less memory, a third more time

# Data sets: {"path", "type": "jsonl" | "csv" | "parquet" | "hub", "input", "output"}; on the hub also "name"
# and "split". "input" and "output" name columns; a dot reaches into nested records ("answers.text"). The
# input is a text or a list of chat messages, the output a text. Instead of both, "messages" names a column of
# whole chats: every turn of the assistant is trained
TRAIN_DATASETS = [
    {
        "path": f"{ROOT}/data/tiny/demonstrations.jsonl",
        "type": "jsonl",
        "input": "problem",
        "output": "solution",
    },
]
EVAL_DATASETS = [
    {"path": f"{ROOT}/data/tiny/test.jsonl", "type": "jsonl", "input": "problem", "output": "solution"},
]
PROMPT_TEMPLATE = "{input}"  # the question; the tokenizer's chat template, if it has one, wraps it
SYSTEM_PROMPT: str | None = None  # put before prompts that have none; needs a chat template
EOS_TOKEN: str | None = None  # what ends an answer, such as <|im_end|>; None: the tokenizer's EOS
MAX_TRAIN_PROMPTS: int | None = None  # number of rows read, from the first on; None: all
MAX_EVAL_PROMPTS: int | None = 200
MAX_TOKENS = 512  # of a prompt with its answer, or of a chat; longer rows are left out, and counted

# Evaluation beside the loss: answers are sampled, and a function of rewards/ decides whether one is correct
ACCURACY_FUNCTION: str | None = "exact_answer"  # f(prompts, responses, answers); None: nothing is sampled
MAX_NEW_TOKENS = 64
TEMPERATURE = 1.0  # > 0
EVAL_BATCH_SIZE = 64  # prompts sampled at a time: memory and speed

# Optimisation
BATCH_SIZE = 32  # rows per forward and backward pass: memory and speed, not the result
GRADIENT_ACCUMULATION_STEPS = 2  # an optimizer step has BATCH_SIZE * this rows
LEARNING_RATE = 5e-4
MAX_GRAD_NORM = 1.0  # > 0
WEIGHT_DECAY = 0.0
USE_LR_SCHEDULER = True
LR_SCHEDULER_TYPE = "cosine"  # linear | cosine (both to 0) | plateau (halves)
PLATEAU_PATIENCE = 2  # evaluations without a lower loss before plateau halves
WARMUP_STEPS = 5  # linear warm-up, with or without a scheduler

# Schedule
NUM_EPOCHS = 2  # passes over the rows
MAX_STEPS: int | None = None  # the run ends here or after NUM_EPOCHS, whichever is first; None: NUM_EPOCHS

# Bookkeeping
SAVE_EVERY_N_STEPS = 25  # 0: only at the end
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 16  # 0: only before the first and after the last step
EARLY_STOPPING_PATIENCE = 0  # evaluations without a lower loss before the run ends; 0: all steps are run
EARLY_STOPPING_THRESHOLD = 0.0  # smallest gain that resets patience; best/ keeps the lowest loss
LOG_SAMPLES = 2  # rows per step written to samples.jsonl: the text that is read, and what of it is trained
RESUME = "ask"  # ask (yes without a terminal or under torchrun) | yes | no | path of a checkpoint or a run
OUTPUT_DIR = f"{ROOT}/checkpoints/sft"
SEED = 1
USE_WANDB = False
WANDB_PROJECT = "hackable-rlhf"
# Panels of sft_metrics_with_entropy.png: (label, metrics); training_metrics_detailed.png has all that change
PLOT_PANELS = [
    ("loss (nats per token)", ["loss"]),
    ("token_accuracy", ["token_accuracy"]),
    ("accuracy", ["accuracy_sampled", "accuracy_greedy"]),
    ("grad_norm", ["grad_norm"]),
    ("learning_rate", ["learning_rate"]),
    ("trained_tokens", ["trained_tokens"]),
]

# Processes: torchrun --nproc_per_node=2 ppo/sft.py
DETERMINISTIC_GRADIENTS = True  # the same bits on any number of processes; False: a little faster
SHARD = "none"  # none | fsdp2: each process keeps a part of every model
PROCESS_TIMEOUT = 1800.0  # seconds that a process waits for the others

_VALID_RANGES = {  # (smallest, largest) value or allowed words, where a bad value might go unnoticed
    "BATCH_SIZE EVAL_BATCH_SIZE GRADIENT_ACCUMULATION_STEPS MAX_TOKENS MAX_NEW_TOKENS MAX_STEPS": (1, 1e12),
    "NUM_EPOCHS PLATEAU_PATIENCE MAX_TRAIN_PROMPTS KEEP_LAST_N_CHECKPOINTS": (1, 1e12),
    "MAX_EVAL_PROMPTS WARMUP_STEPS LOG_SAMPLES SAVE_EVERY_N_STEPS EVAL_EVERY_N_STEPS WEIGHT_DECAY": (0, 1e12),
    "TEMPERATURE MAX_GRAD_NORM LORA_ALPHA": (1e-6, 1e9),
    "LEARNING_RATE LORA_RANK": (0, 1e6),
    "DTYPE": ["float32", "bfloat16"],
    "SHARD": ["none", "fsdp2"],
    "LR_SCHEDULER_TYPE": ["linear", "cosine", "plateau"],
}

_TUNED_FOR_TINY = {  # values that suit the shipped model and data, and what another model wants
    "MAX_TOKENS": (512, "longer rows are left out"),
    "MAX_NEW_TOKENS": (64, "worked solutions need 256 to 1024"),
    "LEARNING_RATE": (5e-4, "1e-5 for whole pretrained models, 1e-4 for LoRA"),
    "OUTPUT_DIR": (f"{ROOT}/checkpoints/sft", "the shipped model's run; give yours a folder of its own"),
}
_RENAMED = {}  # old names of constants, accepted as arguments
_INSTEAD_HERE = {  # constants of other trainers: what this file has instead
    "MAX_PROMPT_TOKENS": "MAX_TOKENS",
    "MICRO_BATCH_ROWS": "BATCH_SIZE",
}
# When a run resumes, it logs every constant that has changed, except these
_MAY_CHANGE = "RESUME OUTPUT_DIR PLOT_PANELS".split()
# When one of these has changed, the scores of a resumed run do not compare with the earlier ones. Add a
# constant of yours that changes how responses are sampled or scored
_CHANGE_SCORES = """
    EVAL_DATASETS MAX_EVAL_PROMPTS PROMPT_TEMPLATE SYSTEM_PROMPT EOS_TOKEN MAX_TOKENS
""".split()

# ================================================================ the maths of fine-tuning


def sft_loss(logprobs):
    """Returns the loss of each trained token, (tokens,), from its log-probability."""
    return -logprobs


# ================================================================ the trainer


class SFTTrainer:
    """Model, data and the algorithm; self.run has the files. resume_from_checkpoint overrides the constant
    RESUME: a path, "ask", "yes" or "no"."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        self.device = find_device()
        self.run = Run("sft", resume_from_checkpoint, self.device)
        self.run.title = f"SFT, {'/'.join(Path(ACTOR_MODEL).parts[-2:])}, seed {SEED}"
        self.run.panels = PLOT_PANELS
        self.run.best_by = ["negative_loss"]
        self.load_model()
        self.train_rows = load_demonstrations(self, TRAIN_DATASETS, "TRAIN_DATASETS", MAX_TRAIN_PROMPTS)
        self.eval_rows = load_demonstrations(self, EVAL_DATASETS, "EVAL_DATASETS", MAX_EVAL_PROMPTS)
        check_padding(self.actor, self.train_rows)
        # What a checkpoint keeps beside weights, optimizers and random generators. order: this epoch's
        # permutation of the rows. prompts: their number, compared when a run resumes
        num_rows = len(self.train_rows)
        self.state = SimpleNamespace(epoch=0, order=None, cursor=0, prompts=num_rows)
        # If the run resumes, this loads the checkpoint into state and optimizers
        self.run.register(self.state, self.models, self.optimizers, self.tokenizer)
        self.run.total_steps = last_step(self.state, self.run.step)

    def load_model(self):
        """The policy comes from the checkpoint if there is one."""
        self.tokenizer = load_tokenizer(ACTOR_MODEL, "ACTOR_MODEL")
        self.actor = load_trained(self.run, "policy", AutoModelForCausalLM, ACTOR_MODEL, "ACTOR_MODEL")
        if EOS_TOKEN is not None:
            if EOS_TOKEN not in self.tokenizer.get_vocab():
                raise UserError(f"EOS_TOKEN = {EOS_TOKEN!r} is no token of ACTOR_MODEL = {ACTOR_MODEL!r}")
            self.tokenizer.eos_token = EOS_TOKEN  # saved with the policy
        self.end_ids = ids_of_ends(self.actor, self.tokenizer).tolist()
        if EOS_TOKEN is not None:
            self.actor.generation_config.eos_token_id = self.end_ids  # for those who sample from best/policy
        # Models that are trained, by the name of their folder in a checkpoint; and all, by their constant
        self.models = {"policy": self.actor}
        self.models_by_constant = {"ACTOR_MODEL": self.actor}
        self.optimizers = {"policy": make_optimizer(self.actor, LEARNING_RATE)}
        self.accuracy_function = find_accuracy_function()

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
                if run.is_due(SAVE_EVERY_N_STEPS):
                    run.save()
        return run.evaluation

    def update(self, rows):
        """One optimizer step. The loss is the mean over all trained tokens of the rows, however they are cut
        into micro-batches. Returns the step's metrics."""
        run = self.run
        scale = step_scale(run)
        num_tokens = sum(len(row["trained"]) for row in rows)
        gradients = GradientSum([self.actor])
        with run.timed("update"):
            set_learning_rate(self.optimizers["policy"], LEARNING_RATE * scale)
            for micro in gradients.deal(cut_by_length(rows)):
                logprobs, is_likeliest = answer_logprobs(self.actor, micro)
                losses = sft_loss(logprobs)
                gradients.backward(self.actor, losses.sum() / num_tokens)
                stats = {"loss": losses, "token_accuracy": is_likeliest}
                gradients.log_means(stats, torch.ones_like(logprobs), num_tokens)
            metrics = gradients.finish()
            row_ids = column(rows, "id")
            (grad_norm,) = clip_and_step([self.optimizers["policy"]], metrics["loss"], run, row_ids)
        return {
            **metrics,
            "grad_norm": grad_norm,
            "learning_rate": LEARNING_RATE * scale,
            "trained_tokens": num_tokens,
        }

    # ------------------------------------------------------------ evaluation and what is logged

    @torch.no_grad()
    def evaluate(self, rows=None):
        """Returns metrics of rows (those of load_demonstrations()), or of the held-out rows: means over all
        their trained tokens and, with ACCURACY_FUNCTION, how many sampled answers are correct. best/ and
        patience follow the highest negative_loss. Override it to add metrics of yours to its own."""
        if rows is None:
            rows = self.eval_rows
        if not rows:
            return {}
        with self.run.timed("evaluate"):
            logprobs, is_likeliest = map_rows(answer_logprobs, self.actor, rows)
            loss = sft_loss(logprobs.double()).mean().item()
            metrics = {
                "loss": loss,
                "negative_loss": -loss,
                "token_accuracy": is_likeliest.double().mean().item(),
            }
            if self.accuracy_function:
                metrics |= sampled_accuracy(self, rows)
        return metrics

    def generate_response(self, prompt, greedy=True):
        """Returns one response to a prompt, a text or a chat."""
        ids = encode_chat(self.tokenizer, prompt, "generate_response")
        return sample_answers(self.actor, self.tokenizer, [ids], greedy)[0]

    def record(self, rows, metrics):
        """Logs the step's metrics, some of its rows, and its line on the terminal."""
        samples = []
        for row in rows[:LOG_SAMPLES]:
            trained = [row["ids"][t] for t in row["trained"]]
            texts = {"text": self.tokenizer.decode(row["ids"]), "trained": self.tokenizer.decode(trained)}
            samples.append({"id": row["id"], **texts})
        metrics = {"epoch": self.state.epoch, **metrics}
        line = "Epoch {epoch}/{epochs}: L:{loss:.4f} TA:{token_accuracy:.3f} LR:{learning_rate:.2e}"
        num_read = sum(len(row["ids"]) for row in rows)
        self.run.log_step(metrics, num_read, samples, line.format(epochs=NUM_EPOCHS, **metrics))


# ================ machinery: the same in all trainers that have it
# Edit it freely in a copy of your own. In the repository tools/copies.py keeps definitions of one name equal.

# ---------------------------------------------------------------- loading models


# differs: no sharing of prompts, no new head
def load_model(auto_class, path, constant, device, dtype=torch.float32):
    """Returns the model of a folder or hub name, in evaluation mode. Missing or unexpected weights are an
    error."""
    if (Path(path) / "adapter_config.json").exists():
        hint = "to resume its run set the LORA_RANK it had; as a model take its run's best/policy"
        raise UserError(f"{constant} = {str(path)!r} is a LoRA adapter: {hint}")
    config = load_pretrained(AutoConfig, path, constant)
    for part in (config, config.get_text_config()):
        for name, value in list(vars(part).items()):
            # Layers that recompute their activations run in training mode, so dropout must be 0 in the config
            if "drop" in name and type(value) is float:
                setattr(part, name, 0.0)
    options = {"config": config, "dtype": dtype, "output_loading_info": True}
    model, info = load_pretrained(auto_class, path, constant, **options)
    bad_keys = {*info["missing_keys"], *info["unexpected_keys"]}
    bad_keys |= {key[0] for key in info["mismatched_keys"]}
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


# differs: no new head
def load_trained(run, name, auto_class, path, constant):
    """Returns a model that is trained: from the folder `name` of the run's checkpoint if there is one, else
    from path. With LORA_RANK it is the frozen model of path with an adapter."""
    saved = run.checkpoint / name if run.checkpoint else None
    if LORA_RANK:
        model = load_adapted(auto_class, path, constant, run.device, saved)
    else:
        model = load_model(auto_class, saved or path, constant, run.device)
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


def logprobs_at(model, ids, places, **options):
    """Returns the log-probabilities of tokens, and whether each is the likeliest, two (tokens,), in float32.
    Each of places has a token's row, the column where it is predicted, and its id."""
    row, predicted_at, token = to_device(places, model.device).T
    with autocast(model):
        logits = logits_at(model, ids, (row, predicted_at), **options)
    logprobs = logits.float().log_softmax(-1)  # (tokens, vocabulary)
    is_likeliest = (logits.argmax(-1) == token).float()
    return logprobs.gather(-1, token[:, None]).squeeze(-1), is_likeliest


def answer_logprobs(model, rows):
    """Returns the log-probability of every trained token of some rows, row after row, and whether it is the
    likeliest, two (tokens,), in float32. Rows are padded on the right, where a causal model cannot see."""
    places = []  # of each token: its row, where it is predicted, its id
    for i, row in enumerate(rows):
        places += [(i, t - 1, row["ids"][t]) for t in row["trained"]]
    return logprobs_at(model, to_device(pad_right(column(rows, "ids"), 0), model.device), places)


@torch.no_grad()
def check_padding(model, rows):
    """Refuses a model whose log-probabilities depend on the padding, or on the rows beside them."""
    rows = [min(rows, key=lambda row: len(row["ids"])), *rows[:3]]
    with full_parameters(model):
        together = answer_logprobs(model, rows)[0]
        alone = torch.cat([answer_logprobs(model, [row])[0] for row in rows])
    difference = (together - alone).abs().mean()
    tolerance = 1e-3
    if DTYPE != "float32":  # bfloat16 rounds by 1 in 256
        tolerance = 0.1
    if not difference <= tolerance * (1 + alone.abs().mean()):
        fault = f"log-probabilities change by {difference:.2g} if other rows or padding share the batch"
        raise UserError(f"a {model.config.model_type!r} model cannot be trained here: {fault}")


# ---------------------------------------------------------------- sampling, in evaluation alone


def ids_of_ends(model, tokenizer):
    """Returns the ids that end a response, a tensor: the tokenizer's EOS and those of the model's generation
    config, which often names several."""
    ends = model.generation_config.eos_token_id
    if not isinstance(ends, list):
        ends = [ends]
    return to_device(sorted({tokenizer.eos_token_id, *ends} - {None}), model.device)


@torch.no_grad()
def sample_answers(model, tokenizer, prompts, greedy):
    """Returns one answer, a text, to each prompt, a list of ids, by transformers' generate() without any
    filter. Sampling has random numbers of its own, so that evaluating never changes the training."""
    pad_id = padding_id(model, tokenizer)
    settings = {"max_new_tokens": MAX_NEW_TOKENS, "pad_token_id": pad_id}
    settings["eos_token_id"] = ids_of_ends(model, tokenizer).tolist()
    if not greedy:
        settings |= {"temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(do_sample=not greedy, **settings)
    own_config = model.generation_config  # generate() would take from it what is not set here

    def sample_chunk(first):
        chunk = prompts[first : first + EVAL_BATCH_SIZE]
        ids = to_device(pad_left(chunk, pad_id), model.device)
        mask = to_device(pad_left([[1] * len(prompt) for prompt in chunk], 0), model.device)
        with autocast(model), torch.random.fork_rng():
            torch.manual_seed(SEED + first)
            options = {"attention_mask": mask, "generation_config": config, "synced_gpus": False}
            model.generation_config = GenerationConfig()
            try:
                answers = model.generate(ids, **options)[:, ids.shape[1] :]
            finally:
                model.generation_config = own_config
        return tokenizer.batch_decode(answers, skip_special_tokens=True)

    with full_parameters(model):
        chunks = map_over_ranks(range(0, len(prompts), EVAL_BATCH_SIZE), sample_chunk)
    return list(itertools.chain(*chunks))


def find_accuracy_function():
    """Returns the function that ACCURACY_FUNCTION names, or None."""
    if ACCURACY_FUNCTION is None or callable(ACCURACY_FUNCTION):
        return ACCURACY_FUNCTION
    function = getattr(rewards, ACCURACY_FUNCTION, None)
    if not callable(function):
        raise UserError(f"ACCURACY_FUNCTION: rewards/ has no function {ACCURACY_FUNCTION!r}")
    return function


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


def sampled_accuracy(trainer, rows):
    """Returns the accuracy of a greedy and of a sampled answer to each row's prompt, a dict."""
    metrics = {}
    for name, greedy in (("accuracy_greedy", True), ("accuracy_sampled", False)):
        prompt_ids = column(rows, "prompt_ids")
        responses = sample_answers(trainer.actor, trainer.tokenizer, prompt_ids, greedy)
        values = trainer.accuracy_function(column(rows, "prompt"), responses, column(rows, "answer"))
        metrics[name] = check_scores("ACCURACY_FUNCTION", values, len(rows)).mean().item()
    return metrics


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


# ---------------------------------------------------------------- demonstrations


def load_demonstrations(trainer, datasets, constant, limit):
    """Returns the rows of data sets: {"id", "prompt": text or chat, "answer": text, "ids": of the prompt with
    its answer, "length": their number, "trained": places of the trained ids, "prompt_ids"}. Rows without an
    answer or longer than MAX_TOKENS are left out and counted."""
    rows = []
    left_out = {}  # {reason: row ids}
    required = [["input", "output"], ["messages"]]
    for spec, record, row_id, where in read_datasets(datasets, constant, required, [], limit):
        if "messages" in spec:
            chat = read_chat(look_up(record, spec["messages"], where), f"{where}: {spec['messages']!r}")
            turns = []
            for message in chat:
                if message["role"] == "assistant":
                    turns.append(f"{message['content']}{message.get('tool_calls', '')}")
        else:
            prompt = read_prompt(look_up(record, spec["input"], where), f"{where}: {spec['input']!r}")
            turns = [cell_text(look_up(record, spec["output"], where), f"{where}: {spec['output']!r}")]
        if not turns:
            left_out.setdefault("without a turn of the assistant", []).append(row_id)
            continue
        if not all(turn.strip() for turn in turns):
            left_out.setdefault("with an empty answer", []).append(row_id)
            continue
        if "messages" in spec:
            prompt, ids, trained = encode_turns(trainer, chat, where)
            if not trained:
                left_out.setdefault("in which only the first message is the assistant's", []).append(row_id)
                continue
        else:
            ids, trained = encode_answer(trainer, prompt, turns[0], where)
        if len(ids) > MAX_TOKENS:
            left_out.setdefault(f"longer than MAX_TOKENS = {MAX_TOKENS}", []).append(row_id)
            continue
        row = {"id": row_id, "prompt": prompt, "answer": turns[-1], "ids": ids, "trained": trained}
        row |= {"prompt_ids": ids[: start_of_last_turn(trained)], "length": len(ids)}
        rows.append(row)
    log_left_out(trainer, constant, left_out, rows)
    check_lengths(trainer, rows, constant)
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


def check_lengths(trainer, rows, constant):
    """The model must be able to read all rows, and to sample an answer to the prompts held out."""
    longest = max(column(rows, "length"), default=0)
    if trainer.accuracy_function and constant == "EVAL_DATASETS":
        longest = max([longest, *(len(row["prompt_ids"]) + MAX_NEW_TOKENS for row in rows)])
    if longest > max_positions(trainer.actor):
        fault = f"reads at most {max_positions(trainer.actor)} tokens, but a row may have {longest}"
        raise UserError(f"ACTOR_MODEL {fault} ({constant}): lower MAX_TOKENS or MAX_NEW_TOKENS")


def check_ids(trainer, ids, where):
    """The model must have an embedding for every id."""
    num_ids = vocab_size(trainer.actor)
    if max(ids) >= num_ids:
        fault = f"the tokenizer gives the id {max(ids)}, but the model has only {num_ids}"
        raise UserError(f"{where}: {fault}: ACTOR_MODEL = {ACTOR_MODEL!r}")


def read_chat(value, where):
    """Returns a whole chat as a file has it: a list of {"role", "content"} messages."""
    messages = without_nulls(value)
    if not isinstance(messages, list) or not messages or not all(is_message(m) for m in messages):
        form = 'a chat is a list of messages such as [{"role": "user", "content": "How many?"}, ...]'
        raise UserError(f"{where}: {form}; this is {repr(value)[:160]}")
    return [{**message, "content": message.get("content", "")} for message in messages]


def encode_answer(trainer, prompt, answer, where):
    """Returns the ids of a prompt with its answer, and the places of those that are trained, a range: the
    answer up to its end token. The prompt has the ids that ppo.py samples answers to."""
    prompt_ids = encode_chat(trainer.tokenizer, prompt, where)
    ids = encode_chat(trainer.tokenizer, prompt, where, answer)
    if ids[: len(prompt_ids)] != prompt_ids:
        fault = "the ids of the prompt with its answer do not begin with the prompt's own"
        hint = "let the chat template add a turn without changing what stands before it"
        if not trainer.tokenizer.chat_template:
            hint = "end PROMPT_TEMPLATE with a line break, so that no token joins the two"
        raise UserError(f"{where}: {fault}: {hint}")
    start = len(prompt_ids)
    if start == 0:
        raise UserError(f"{where}: the tokenizer gives no token for this prompt")
    ids = ids[: start + num_until_end(ids[start:], trainer.end_ids)]
    check_ids(trainer, ids, where)
    check_end(trainer, ids[start:], where)
    return ids, range(start, len(ids))


def check_end(trainer, trained_ids, where):
    """Refuses an answer without an end token: the policy would never learn to stop."""
    if not set(trained_ids) & set(trainer.end_ids):
        decode = trainer.tokenizer.decode
        fault = f"an answer ends in {decode(trained_ids[-2:])!r} by the chat template, but sampling stops at"
        hint = "set EOS_TOKEN of sft.py to what ends a turn, and go on with the policy that it trains"
        raise UserError(f"{where}: {fault} {decode(trainer.end_ids)!r}: {hint}")


def num_until_end(ids, end_ids):
    """Returns how many ids an answer has with its first end token, where sampling stops; without one: all."""
    for number, token in enumerate(ids, 1):
        if token in end_ids:
            return number
    return len(ids)


def encode_turns(trainer, chat, where):
    """Returns the messages before the last turn of the assistant, the chat's ids, and the places of those
    that are trained: every turn of the assistant, but for a chat's first message. The places come from the
    markers {% generation %} of the chat template; if it has none, from what each turn adds to the ids before
    it, up to its end token."""
    tokenizer, messages = trainer.tokenizer, as_messages(chat)
    if not tokenizer.chat_template:
        fault = f"a chat needs a chat template, which {tokenizer.name_or_path!r} lacks"
        raise UserError(f"{where}: {fault}: put a file chat_template.jinja beside the tokenizer")
    roles = column(messages, "role")
    if re.search(r"{%-?\s*generation\s*-?%}", tokenizer.chat_template):
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        try:
            encoded = tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # a template may refuse roles, or their order, by any type
            fault = f"does not take these messages ({first_line(error)})"
            raise UserError(f"{where}: the chat template of {tokenizer.name_or_path!r} {fault}") from None
        ids = encoded["input_ids"]
        trained = np.flatnonzero(encoded["assistant_masks"]).tolist()
        if not trained:
            raise UserError(f"{where}: the chat template's {{% generation %}} marks no token of this chat")
    else:
        ids = ids_of_chat(tokenizer, messages, where, False)
        trained = []
        for i, role in enumerate(roles):
            if role != "assistant" or i == 0:  # nothing stands before a first message
                continue
            before = ids_of_chat(tokenizer, messages[:i], where, True)
            after = ids_of_chat(tokenizer, messages[: i + 1], where, False)
            if after[: len(before)] != before or ids[: len(after)] != after:
                fault = "the chat template writes a turn of the assistant otherwise if another turn follows"
                hint = "put {% generation %} around those turns in it, or give rows of input and output"
                raise UserError(f"{where}: {fault}: {hint}")
            turn = after[len(before) :]
            trained += range(len(before), len(before) + num_until_end(turn, trainer.end_ids))
    if trained and trained[0] == 0:  # nothing predicts the first token
        trained = trained[1:]
    if not trained:
        return messages, ids, trained
    ids = ids[: trained[-1] + 1]
    check_ids(trainer, ids, where)
    check_end(trainer, [ids[t] for t in trained], where)
    last_answer = len(roles) - 1 - roles[::-1].index("assistant")
    return messages[:last_answer], ids, trained


def ids_of_chat(tokenizer, messages, where, add_generation_prompt):
    """Returns the ids of messages in the tokenizer's chat template."""
    if not messages:
        return []
    text = apply_chat_template(tokenizer, messages, where, add_generation_prompt)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def start_of_last_turn(trained):
    """Returns the first of the places that follow one another up to the last trained one."""
    start = trained[-1]
    places = set(trained)
    while start - 1 in places:
        start -= 1
    return start


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


# differs: rows instead of responses
def run_summary(trainer):
    """Returns the first lines of a run on the terminal."""
    run, actor = trainer.run, trainer.actor
    name = "/".join(Path(ACTOR_MODEL).parts[-2:])
    end = "NUM_EPOCHS"
    if MAX_STEPS and run.total_steps >= MAX_STEPS:
        end = "MAX_STEPS"
    rows_per_step = BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS
    lines = [
        f"{name}: {parameter_counts(actor)} on {device_and_dtype(actor.device)}; writing to {OUTPUT_DIR}",
        f"{len(trainer.train_rows)} rows to train on, {len(trainer.eval_rows)} held out",
        f"Steps {run.step} to {run.total_steps}, where {end} ends the run; each has {rows_per_step} rows",
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


# ---------------------------------------------------------------- LoRA
# Small matrices are trained beside a model's frozen weights (2106.09685).


# differs: no new head
def load_adapted(auto_class, path, constant, device, saved):
    """Returns the model of path, frozen and in DTYPE, with an adapter in float32: the saved one, or a new one
    that changes nothing yet."""
    if is_sharded():
        raise UserError(f"LORA_RANK = {LORA_RANK} and SHARD = 'fsdp2' do not go together: set one of them")
    import peft  # slow

    if Path(path).exists():
        path = str(Path(path).resolve())  # the adapter's config names it
    model = load_model(auto_class, path, constant, device, getattr(torch, DTYPE))
    targets = LORA_TARGETS
    if LORA_TARGETS != "all-linear":
        targets = LORA_TARGETS.replace(" ", "").split(",")
    config = peft.LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=targets, lora_dropout=0.0)
    config.task_type = "CAUSAL_LM"
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
        hint += "the training stays as it is; or, if it was an evaluation, lower EVAL_BATCH_SIZE"
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
    run_main(SFTTrainer)


if __name__ == "__main__":
    train_main()
