"""PPO for language models, in one file: actor, critic, reference and reward model or reward functions.

A response is an episode, a token an action (Ziegler et al. 2019, arXiv 1909.08593; Schulman et al. 2017, 1707.06347):

    r_t   = -KL_COEF (log pi(y_t) - log pi_ref(y_t)) + [t is the last token] score(y)
    A_t   = sum_k (GAMMA LAM)^k (r_{t+k} + GAMMA V_{t+k+1} - V_{t+k}),  V after the last token = 0,  R_t = A_t + V_t
    L     = -mean_t min(rho_t A_t, clip(rho_t, 1 - CLIP_RANGE, 1 + CLIP_RANGE) A_t)        rho_t = pi(y_t) / pi_old(y_t)
            + VALUE_LOSS_COEF mean_t 1/2 max((V_t - R_t)^2, (clip(V_t, V_old +- VALUE_CLIP_RANGE) - R_t)^2)
            - ENTROPY_COEF mean_t H(pi_t)

Means run over every response token of the optimizer step, whatever the micro-batches. Deliberate deviations:
- actor and critic are two networks, each with its optimizer and gradient clipping;
- sampling inverts the cumulative distribution on uniform numbers drawn ahead for the whole step, so how prompts are
  cut into batches changes neither the samples nor, but for rounding, the update;
- the score is not whitened and the KL coefficient's controller works on nats a token.

    python ppo/ppo.py                                   # edit the constants below, or override: KEY=VALUE
    python ppo/ppo.py ACTOR_MODEL=Qwen/Qwen2.5-0.5B-Instruct DTYPE=bfloat16 LEARNING_RATE=1e-6

Writes into OUTPUT_DIR: training_config.json, logs/ (training_*.log, metrics.jsonl, samples.jsonl), step_N/ checkpoints,
best/policy/, training_metrics_detailed.png and ppo_metrics_with_entropy.png. The README defines every metric.
"""
import ast
import difflib
import errno
import hashlib
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
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from tqdm import tqdm
from transformers import (AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification,
                          AutoTokenizer)
from transformers.modeling_layers import GradientCheckpointingLayer

ROOT = next((p for p in Path(__file__).resolve().parents if (p / "rewards").is_dir()), None)
if ROOT is None:
    sys.exit("ppo.py needs the folder rewards/ beside it or above it: copy it from the repository")
sys.path.insert(0, str(ROOT))
import rewards  # noqa: E402

# ================================================================ constants

# Models: a folder or a hub name
ACTOR_MODEL = f"{ROOT}/data/tiny/policy"
CRITIC_MODEL: str | None = None  # None: starts from the actor's weights; its value head starts at zero
REWARD_MODEL: str | None = f"{ROOT}/data/tiny/reward_model"  # one-label sequence classifier; None: reward functions alone
REFERENCE_MODEL: str | None = None  # None: a frozen copy of the actor; none is held while KL_COEF is 0
DTYPE = "float32"  # float32 | bfloat16 (autocast; weights and optimizer state stay float32)
DEVICE = "auto"  # auto | cpu | cuda | cuda:1 | mps
GRADIENT_CHECKPOINTING = False  # recompute activations in the update: less memory, a third more time

# Data: rows of {"path", "type": "jsonl" | "parquet" | "hub", "input", "output"}; hub takes "name" and "split" too
TRAIN_DATASETS = [
    {"path": f"{ROOT}/data/tiny/train.jsonl", "type": "jsonl", "input": "problem", "output": "solution"},
    {"path": f"{ROOT}/data/tiny/train.parquet", "type": "parquet", "input": "problem", "output": "solution"},
]
EVAL_DATASETS = [{"path": f"{ROOT}/data/tiny/test.jsonl", "type": "jsonl", "input": "problem", "output": "solution"}]
PROMPT_TEMPLATE = "{input}"  # what the actor is asked; the tokenizer's chat template, if any, is put around it
MAX_TRAIN_PROMPTS: int | None = None  # only the first so many; None: all
MAX_EVAL_PROMPTS: int | None = 200

# Rewards: score = REWARD_MODEL_WEIGHT * reward model + sum of weight * function; a name in rewards/ or a function
REWARD_FUNCTIONS = [("exact_answer", 1.0)]
REWARD_MODEL_WEIGHT = 0.1
MISSING_EOS_PENALTY = 0.0  # >= 0, taken from the score of a response cut at MAX_NEW_TOKENS
ACCURACY_FUNCTION = "exact_answer"  # what evaluation calls right, in rewards/; used where the data has answers

# Rollout
BATCH_SIZE = 16  # prompts in memory at a time, with GROUP_SIZE responses each
GRADIENT_ACCUMULATION_STEPS = 2  # batches a training step: BATCH_SIZE * this = prompts a step
GROUP_SIZE = 4  # responses a prompt
MAX_PROMPT_TOKENS = 256  # longer prompts are left out, and counted
MAX_NEW_TOKENS = 64
TEMPERATURE = 1.0  # > 0; no top-k or top-p: the distribution sampled is the one scored

# Optimisation
LEARNING_RATE = 2e-4
CRITIC_LEARNING_RATE = 5e-4
MAX_GRAD_NORM = 1.0  # > 0, for actor and critic each
WEIGHT_DECAY = 0.0
USE_LR_SCHEDULER = False
LR_SCHEDULER_TYPE = "linear"  # linear | cosine (both to 0 at the last step) | plateau (halves)
PLATEAU_PATIENCE = 2  # evaluations without a better reward before plateau halves
WARMUP_STEPS = 0

# Algorithm
GROUP_EPOCHS = 2  # passes over each step's responses
MINI_BATCHES = 1  # optimizer steps a pass
CLIP_RANGE = 0.2  # > 0
VALUE_CLIP_RANGE = 0.2  # > 0; 0 turns value clipping off
VALUE_LOSS_COEF = 0.5
ENTROPY_COEF = 0.0
KL_COEF = 0.01  # price of a nat a token away from the reference; 0 holds no reference
KL_TARGET: float | None = None  # nats a token; a number turns on the adaptive coefficient (1909.08593, section 2.2)
KL_HORIZON = 10000  # responses over which the adaptive coefficient moves
GAMMA = 1.0  # 0 to 1
LAM = 0.95  # 0 to 1
WHITEN_ADVANTAGES = True

# Schedule
NUM_EPOCHS = 1  # passes over the prompts
MAX_STEPS: int | None = 60  # None: all of NUM_EPOCHS

# Bookkeeping
SAVE_EVERY_N_STEPS = 20  # 0: only at the end
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 10  # 0: only before and after
EARLY_STOPPING_PATIENCE = 0  # evaluations without a better reward before the run ends; 0: never
EARLY_STOPPING_THRESHOLD = 0.0  # by how much better is better
LOG_SAMPLES = 4  # responses a step written to samples.jsonl
RESUME = "ask"  # ask | yes | no | a checkpoint's path
OUTPUT_DIR = f"{ROOT}/checkpoints/ppo"
SEED = 1
USE_WANDB = False
WANDB_PROJECT = "hackable-rlhf"

_RANGES = {  # least and greatest value of each number
    "BATCH_SIZE GRADIENT_ACCUMULATION_STEPS GROUP_SIZE MAX_PROMPT_TOKENS MAX_NEW_TOKENS GROUP_EPOCHS MINI_BATCHES "
    "NUM_EPOCHS PLATEAU_PATIENCE KL_HORIZON KEEP_LAST_N_CHECKPOINTS MAX_STEPS MAX_TRAIN_PROMPTS MAX_EVAL_PROMPTS": (1, 1e12),
    "WARMUP_STEPS SAVE_EVERY_N_STEPS EVAL_EVERY_N_STEPS EARLY_STOPPING_PATIENCE LOG_SAMPLES SEED": (0, 2**62),
    "LEARNING_RATE CRITIC_LEARNING_RATE WEIGHT_DECAY VALUE_LOSS_COEF KL_COEF MISSING_EOS_PENALTY "
    "EARLY_STOPPING_THRESHOLD VALUE_CLIP_RANGE": (0, 1e6),
    "REWARD_MODEL_WEIGHT ENTROPY_COEF": (-1e6, 1e6),
    "GAMMA LAM": (0, 1), "CLIP_RANGE": (1e-6, 1e6), "TEMPERATURE": (1e-3, 1e3), "MAX_GRAD_NORM KL_TARGET": (1e-12, 1e12),
}
_CHOICES = {"DTYPE": ("float32", "bfloat16"), "LR_SCHEDULER_TYPE": ("linear", "cosine", "plateau")}


# ================================================================ small functions that every trainer has

# same in: ppo/ppo.py
class UserError(Exception):
    """Something the user can mend, said in one sentence; the program ends with exit code 2."""


# same in: ppo/ppo.py
def constants():
    """Every constant of this file, as it is now."""
    return {k: v for k, v in globals().items() if k.isupper() and not k.startswith("_") and k != "ROOT"}


# same in: ppo/ppo.py
def apply_overrides(words):
    """Set constants from KEY=VALUE words; a value has the type that its constant has in the file."""
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in constants():
            near = difflib.get_close_matches(key.upper(), constants(), 1, 0.5)
            raise UserError(f"{word!r} is not KEY=VALUE with a constant of this file" + (f"; did you mean {near[0]}?" if near else ""))
        default = globals()[key]
        kind = str(globals().get("__annotations__", {}).get(key, type(default).__name__))  # such as "int | None"
        try:
            value = text if kind == "str" or "str" in kind and text != "None" else ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = {"true": True, "false": False}.get(text.lower(), text)
        if "float" in kind and type(value) is int:
            value = float(value)
        if type(value).__name__.replace("NoneType", "None") not in kind.replace(" ", "").split("|"):
            raise UserError(f"{key}={text} does not fit: {key} takes {kind.replace('|', 'or')}, as in {key}={default}")
        globals()[key] = value


# same in: ppo/ppo.py
def check_constants():
    """Refuse numbers out of range and unknown choices before anything is loaded or written."""
    for keys, (low, high) in _RANGES.items():
        for key in keys.split():
            value = globals()[key]
            if value is not None and not low <= value <= high:
                raise UserError(f"{key} = {value} is out of range: it takes {low:g} to {high:g}")
    for key, choices in _CHOICES.items():
        if globals()[key] not in choices:
            raise UserError(f"{key} = {globals()[key]!r} is unknown: it takes {' or '.join(choices)}")


# same in: ppo/ppo.py
def load_rows(datasets, constant, limit=None):
    """[{"id", "prompt", "answer"}] of all data sets, one after the other; answer is None without an output column."""
    rows = []
    for spec in datasets:
        where = f"{constant}: {spec.get('path')}"
        if unknown := set(spec) - {"path", "type", "input", "output", "name", "split"} or {"path", "type", "input"} - set(spec):
            raise UserError(f"{where}: a data set takes path, type, input and, if you like, output, name and split; mend {sorted(unknown)}")
        if spec["type"] not in ("jsonl", "parquet", "hub"):
            raise UserError(f"{where}: type {spec['type']!r} is unknown: it takes jsonl, parquet or hub")
        if spec["type"] != "hub" and not Path(spec["path"]).is_file():
            raise UserError(f"{where}: there is no such file")
        before = len(rows)
        for number, record in read_records(spec, where):
            for column in filter(None, (spec["input"], spec.get("output"))):
                if not isinstance(record, dict) or record.get(column) is None:
                    has = sorted(record) if isinstance(record, dict) else type(record).__name__
                    raise UserError(f"{where} line {number}: there is no value for column {column!r}; the row has {has}")
            if not isinstance(record[spec["input"]], str) or not record[spec["input"]].strip():
                raise UserError(f"{where} line {number}: {spec['input']!r} must be a text that is not empty")
            rows.append({"id": f"{Path(spec['path']).name}:{number}", "prompt": record[spec["input"]],
                         "answer": str(record[spec["output"]]) if spec.get("output") else None})
        if len(rows) == before:
            raise UserError(f"{where}: the data set is empty")
    return rows[:limit]


# same in: ppo/ppo.py
def read_records(spec, where):
    """(line number from 1, record) of one data set."""
    if spec["type"] == "jsonl":
        with open(spec["path"], "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    if line.strip():
                        yield number, json.loads(line.decode("utf-8-sig"))
                except ValueError as error:
                    raise UserError(f"{where} line {number}: not a line of JSON ({error}); mend or delete it") from None
        return
    try:
        if spec["type"] == "parquet":
            import pyarrow.parquet
            table = pyarrow.parquet.read_table(spec["path"], columns=[c for c in (spec["input"], spec.get("output")) if c])
            records = table.to_pylist()
        else:
            import datasets
            records = datasets.load_dataset(spec["path"], spec.get("name"), split=spec.get("split", "train"))
    except Exception as error:  # both libraries raise many kinds
        raise UserError(f"{where}: cannot be read as {spec['type']} ({str(error).splitlines()[0]})") from None
    yield from enumerate(records, 1)


# same in: ppo/ppo.py
def load_model(auto_class, path, constant, new_head=False):
    """The model in float32, every weight accounted for; with new_head, weights outside the base model may be absent
    (they start at zero) or left over."""
    try:
        model, info = auto_class.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    except (OSError, ValueError, KeyError) as error:
        if not Path(path).exists():
            raise UserError(f"{constant} = {path!r}: there is no such folder, and no such model could be fetched from the hub") from None
        raise UserError(f"{constant} = {path!r} cannot be loaded ({str(error).splitlines()[0]})") from None
    base = model.base_model_prefix + "."
    missing = set(info["missing_keys"]) | {key[0] for key in info["mismatched_keys"]}
    wrong = [k for k in missing | set(info["unexpected_keys"]) if not new_head or k.startswith(base) and k in missing]
    if wrong:
        raise UserError(f"{constant} = {path!r} does not fit {type(model).__name__}: missing or unexpected weights {', '.join(sorted(wrong))}")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in missing:
                parameter.zero_()
    return model.eval()  # and it stays so: dropout is off in rollout and update alike


# same in: ppo/ppo.py
def load_tokenizer(path, constant):
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError):
        raise UserError(f"{constant} = {path!r}: no tokenizer could be loaded from there") from None
    if tokenizer.eos_token_id is None:
        raise UserError(f"{constant} = {path!r}: its tokenizer has no EOS token, so no response could ever end; set eos_token in it")
    return tokenizer


# same in: ppo/ppo.py
def pad_left(rows, value):
    """Lists of ids as one tensor, (rows, longest)."""
    width = max(map(len, rows))
    return torch.tensor([[value] * (width - len(row)) + list(row) for row in rows])


# same in: ppo/ppo.py
def sample_tokens(logprobs, uniform):
    """One id a row by inverting the cumulative distribution: logprobs (rows, vocabulary), uniform (rows,) in [0, 1)."""
    cumulative = logprobs.double().exp().cumsum(-1)
    target = uniform.double().unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logprobs.shape[-1] - 1)


# same in: ppo/ppo.py
@torch.no_grad()
def generate(model, prompts, uniform, group_size, max_new_tokens, temperature, eos_ids, pad_id):
    """Respond to each prompt (a list of ids) group_size times; rows of one prompt are neighbours.

    uniform (rows, max_new_tokens) decides every token; None takes the likeliest one. Each prompt is prefilled once.
    Returns ids, lengths and log-probabilities under the sampling distribution: (rows, longest), (rows,), (rows, longest).
    A row holds its first EOS and pad after it; a row cut at max_new_tokens holds no EOS.
    """
    device, rows = model.device, len(prompts) * group_size
    prompt_ids = pad_left(prompts, pad_id).to(device)  # (prompts, prompt)
    prompt_lengths = torch.tensor([len(p) for p in prompts], device=device)
    mask = (torch.arange(prompt_ids.shape[1], device=device) >= prompt_ids.shape[1] - prompt_lengths[:, None]).long()
    out = model(input_ids=prompt_ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=True, logits_to_keep=1)
    cache, logits = out.past_key_values, out.logits[:, -1].repeat_interleave(group_size, 0)
    cache.batch_repeat_interleave(group_size)
    mask = torch.cat([mask.repeat_interleave(group_size, 0), mask.new_ones(rows, max_new_tokens)], 1)
    positions = prompt_lengths.repeat_interleave(group_size)  # (rows,) of the next token

    ids = torch.full((rows, max_new_tokens), pad_id, device=device)
    logprobs, lengths = torch.zeros(rows, max_new_tokens, device=device), torch.zeros(rows, dtype=torch.long, device=device)
    eos_ids, uniform = torch.tensor(sorted(eos_ids), device=device), None if uniform is None else uniform.to(device)
    rows = torch.arange(rows, device=device)  # which row of the result each row of the cache is
    going = torch.ones_like(rows, dtype=torch.bool)
    for t in range(max_new_tokens):
        scaled = (logits.float() / temperature).log_softmax(-1)  # (cached rows, vocabulary)
        tokens = scaled.argmax(-1) if uniform is None else sample_tokens(scaled, uniform[rows, t])
        live = rows[going]
        ids[live, t] = tokens[going]
        logprobs[live, t] = scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)[going]
        lengths[live] += 1
        going &= ~torch.isin(tokens, eos_ids)
        left = int(going.sum())
        if left == 0 or t + 1 == max_new_tokens:
            break
        if left <= 0.75 * len(rows):  # drop the finished rows, but not for every single one
            keep = going.nonzero().squeeze(-1)
            cache.batch_select_indices(keep)
            rows, tokens, mask, positions, going = rows[keep], tokens[keep], mask[keep], positions[keep], going[keep]
        logits = model(input_ids=tokens.unsqueeze(-1), attention_mask=mask[:, :prompt_ids.shape[1] + t + 1],
                       position_ids=positions.unsqueeze(-1), past_key_values=cache, use_cache=True).logits[:, -1]
        positions = positions + 1
    longest = int(lengths.max())
    return ids[:, :longest], lengths, logprobs[:, :longest]


# same in: ppo/ppo.py
def response_window(batch, rows):
    """Model inputs for some rows, cut to their own longest prompt and response, and those two lengths (P, R).
    What the model says at columns P-1 to P+R-2 concerns the response's tokens."""
    prompt, response = int(batch.prompt_lengths[rows].max()), int(batch.response_lengths[rows].max())
    ids = torch.cat([batch.prompt_ids[rows, -prompt:], batch.response_ids[rows, :response]], 1)  # (rows, P + R)
    column = torch.arange(prompt + response, device=ids.device)
    mask = (column >= prompt - batch.prompt_lengths[rows, None]) & (column < prompt + batch.response_lengths[rows, None])
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions, "use_cache": False}, prompt, response


# same in: ppo/ppo.py
def response_logprobs(model, batch, rows, temperature):
    """Log-probabilities of the response's own ids and the entropy at each: two (rows, R) tensors, in float32."""
    inputs, _, width = response_window(batch, rows)
    logits = model(**inputs, logits_to_keep=width + 1).logits[:, :-1]  # (rows, R, vocabulary)
    logprobs = (logits.float() / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, batch.response_ids[rows, :width].unsqueeze(-1)).squeeze(-1), entropy


# same in: ppo/ppo.py
def micro_batches(batch, rows, size):
    """Cut rows into micro-batches of like length, at most `size` rows each."""
    lengths = (batch.prompt_lengths + batch.response_lengths)[rows]
    return rows[lengths.argsort(descending=True, stable=True)].split(size)


# same in: ppo/ppo.py
def learning_rate_scale(step, total, warmup, kind, halvings):
    """Factor of the learning rate at step (from 0): linear warm-up, then the schedule; kind None stays at 1."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return {None: 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "plateau": 0.5 ** halvings}[kind]


# same in: ppo/ppo.py
def get_rng_state():
    """The state of Python's, NumPy's and torch's generators, as plain types and tensors."""
    numpy_state = np.random.get_state()
    return {"python": random.getstate(), "numpy": (numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]), "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


# same in: ppo/ppo.py
def set_rng_state(state):
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state((state["numpy"][0], np.array(state["numpy"][1], dtype=np.uint32), *state["numpy"][2:]))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


# same in: ppo/ppo.py
def fsync(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# same in: ppo/ppo.py
def file_digest(path):
    with open(path, "rb") as file:
        return {"size": os.path.getsize(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


# same in: ppo/ppo.py
def write_checkpoint(folder, fill):
    """fill(tmp) writes the files; then the manifest, fsync and rename, so that `folder` is there whole or not at all."""
    tmp = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    try:
        fill(tmp)
        files = sorted(p for p in tmp.rglob("*") if p.is_file())
        manifest = {str(p.relative_to(tmp)): file_digest(p) for p in files}
        (tmp / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for path in [*files, tmp / "manifest.json", *(p for p in tmp.rglob("*") if p.is_dir()), tmp]:
            fsync(path)
    except OSError:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    os.rename(tmp, folder)
    fsync(folder.parent)


# same in: ppo/ppo.py
def checkpoint_fault(folder):
    """Why a checkpoint cannot be trusted, or None: its files must be those of its manifest, to the byte."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        files = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json"}
        for name in sorted({*manifest, *files}):
            if name not in files or name not in manifest:
                return f"{name} is {'missing' if name in manifest else 'not in the manifest'}"
            if file_digest(files[name]) != manifest[name]:
                return f"{name} is not what was saved"
        return None if "training_state.pt" in manifest else "training_state.pt is missing"
    except (OSError, ValueError) as error:
        return f"manifest.json: {error}"


# same in: ppo/ppo.py
def step_of(folder):
    """The number N of a folder step_N, else -1."""
    name = Path(folder).name
    return int(name[5:]) if name.startswith("step_") and name[5:].isdecimal() else -1


# same in: ppo/ppo.py
def choose_checkpoint(resume, output_dir, say):
    """The checkpoint to go on from, or None to start afresh; asks at a terminal when RESUME is "ask"."""
    if resume not in ("ask", "yes", "no"):
        if fault := checkpoint_fault(Path(resume)):
            raise UserError(f"the checkpoint {resume} cannot be resumed from: {fault}")
        return Path(resume)
    if resume == "no":
        return None
    for folder in sorted(Path(output_dir).glob("step_*"), key=step_of, reverse=True):
        if step_of(folder) < 0:
            continue
        if fault := checkpoint_fault(folder):
            say(f"WARNING: skipping the broken checkpoint {folder}: {fault}")
            continue
        say(f"Found checkpoint: {folder}")
        if resume == "yes" or not sys.stdin or not sys.stdin.isatty():
            say("Resuming from it (RESUME=no starts afresh)")
            return folder
        while (reply := input("Resume training from it? (y/n): ").strip().lower()[:1]) not in ("y", "n"):
            pass
        return folder if reply == "y" else None
    return None


# same in: ppo/ppo.py
def move_aside(paths, output_dir, say):
    """Keep what a new start would overwrite: move it to OUTPUT_DIR/old_<time>/."""
    if paths:
        old = Path(output_dir) / time.strftime("old_%Y%m%d_%H%M%S")
        old.mkdir(exist_ok=True)
        for path in paths:
            os.rename(path, old / path.name)
        say(f"Moved {', '.join(sorted(p.name for p in paths))} of an earlier run to {old}")


# same in: ppo/ppo.py
def run_facts(device):
    """Versions, git commit and device, for training_config.json."""
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True) if shutil.which("git") else None
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "git_commit": (git.stdout.strip() or None) if git else None, "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} ({platform.machine()})"}


# same in: ppo/ppo.py
def draw_plot(records, path, title, panels):
    """A grid of panels, each (y label, metrics): training faint with its rolling mean, evaluation as points,
    the first evaluation dashed."""
    from matplotlib.figure import Figure
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(16, 0.8 + 3.4 * lines), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for axis, (label, keys) in zip(axes, panels):
        for color, (phase, key) in enumerate((phase, key) for key in keys for phase in ("train", "eval")):
            points = [(r["step"], r[key]) for r in records if r["phase"] == phase and isinstance(r.get(key), (int, float))]
            if not points:
                continue
            x, y = np.array(points, dtype=float).T
            if phase == "train":
                window = max(1, min(10, len(y) // 5))
                axis.plot(x, y, color=f"C{color}", alpha=0.25)
                mean = [y[max(0, i - window + 1):i + 1].mean() for i in range(len(y))]
                axis.plot(x, mean, color=f"C{color}", label=f"{key}, mean of {window}")
            else:
                axis.plot(x, y, "o-", color=f"C{color}", markersize=5, linewidth=0.8, label=f"{key}, held out")
                axis.axhline(y[0], color=f"C{color}", linestyle="--", linewidth=0.8)
        axis.set(xlabel="training step", ylabel=label)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    for axis in list(axes):
        axis.remove()
    tmp = Path(path).with_suffix(".tmp.png")
    figure.savefig(tmp, dpi=100)
    os.replace(tmp, path)


# ================================================================ the maths of PPO

def token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef):
    """Reward of each token, (rows, R): the KL penalty everywhere, the score (rows,) once, at the last response token."""
    rewards_ = -kl_coef * (logprobs - ref_logprobs) * mask
    last = mask.sum(1).long() - 1
    rewards_[torch.arange(len(scores), device=scores.device), last] += scores
    return rewards_


def gae(token_rewards, values, mask, gamma, lam):
    """Generalised advantage estimation (arXiv 1506.02438); all (rows, R). V after the last response token is 0."""
    advantages, running, next_value = torch.zeros_like(values), 0.0, 0.0
    values = values * mask
    for t in reversed(range(values.shape[1])):
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        running = (delta + gamma * lam * running) * mask[:, t]
        advantages[:, t], next_value = running, values[:, t]
    return advantages


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum()


def whiten(x, mask):
    """Mean 0 and variance 1 over the mask; 0 outside it."""
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)
    return (x - mean) * torch.rsqrt(variance + 1e-8) * mask


def policy_loss(logprobs, old_logprobs, advantages, clip_range):
    """Clipped surrogate of each token, (rows, R). Source: arXiv 1707.06347, equation 7."""
    ratio = (logprobs - old_logprobs).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages)


def value_loss(values, old_values, returns, clip_range):
    """Half the squared error of each token, (rows, R), clipped around the rollout's value; clip_range 0: not clipped."""
    error = (values - returns) ** 2
    if clip_range > 0:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        error = torch.max(error, (clipped - returns) ** 2)
    return 0.5 * error


def adapt_kl_coef(kl_coef, kl, target, responses, horizon):
    """Proportional controller of the KL coefficient. Source: arXiv 1909.08593, section 2.2."""
    return kl_coef * (1 + max(-0.2, min(0.2, kl / target - 1)) * responses / horizon)


# ================================================================ the trainer

class PPOTrainer:
    """Holds actor, critic, reference, reward model, data and the run's files; train() is the algorithm.

    resume_from_checkpoint overrides the constant RESUME: a path, "ask", "yes" or "no".
    """

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        self.log, self.unlogged, self.bar, self.wandb, self.stop_signal = None, [], None, None, None
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        device = DEVICE if DEVICE != "auto" else "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        try:
            self.device = torch.zeros(1, device=device).device
        except (RuntimeError, AssertionError):
            raise UserError(f"DEVICE = {DEVICE!r} is not here; auto takes what there is") from None
        self.checkpoint = choose_checkpoint(resume_from_checkpoint or RESUME, OUTPUT_DIR, self.say)
        random.seed(SEED), np.random.seed(SEED % 2**32), torch.manual_seed(SEED)
        self.load_data()
        self.load_models()
        self.step, self.order, self.cursor, self.skipped = 0, None, 0, 0  # order: this epoch's permutation of the prompts
        self.kl_coef, self.best_reward, self.evals_since_best, self.halvings = KL_COEF, -math.inf, 0, 0
        self.log_bytes, self.wandb_id = {}, None
        per_step = BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS
        self.steps_per_epoch = math.ceil(len(self.train_rows) / per_step)
        self.total_steps = min(NUM_EPOCHS * self.steps_per_epoch, MAX_STEPS or math.inf)
        if self.checkpoint:
            self.load_checkpoint(self.checkpoint)

    def load_data(self):
        self.tokenizer = load_tokenizer(ACTOR_MODEL, "ACTOR_MODEL")
        self.train_rows = self.encode(load_rows(TRAIN_DATASETS, "TRAIN_DATASETS", MAX_TRAIN_PROMPTS), "TRAIN_DATASETS")
        self.eval_rows = self.encode(load_rows(EVAL_DATASETS, "EVAL_DATASETS", MAX_EVAL_PROMPTS), "EVAL_DATASETS")
        if not self.train_rows:
            raise UserError("TRAIN_DATASETS leaves no prompt to train on: raise MAX_PROMPT_TOKENS or give it data")

    def encode(self, rows, constant):
        """Add the prompt's ids to each row; rows longer than MAX_PROMPT_TOKENS are left out, and said so."""
        texts, chat = [PROMPT_TEMPLATE.replace("{input}", row["prompt"]) for row in rows], self.tokenizer.chat_template
        if chat:
            texts = [self.tokenizer.apply_chat_template([{"role": "user", "content": t}], tokenize=False, add_generation_prompt=True) for t in texts]
        for row, ids in zip(rows, self.tokenizer(texts, add_special_tokens=not chat)["input_ids"] if texts else []):
            row["ids"] = ids
        kept = [row for row in rows if 0 < len(row["ids"]) <= MAX_PROMPT_TOKENS]
        if len(kept) < len(rows):
            longest = max(len(row["ids"]) for row in rows)
            self.say(f"{constant}: left out {len(rows) - len(kept)} of {len(rows)} prompts, longer than MAX_PROMPT_TOKENS = {MAX_PROMPT_TOKENS} (longest {longest})")
        return kept

    def load_models(self):
        """Actor and critic come from the checkpoint when there is one; reference and reward model never change."""
        at = self.checkpoint
        self.actor = load_model(AutoModelForCausalLM, at / "policy" if at else ACTOR_MODEL, "ACTOR_MODEL").to(self.device)
        self.critic = load_model(AutoModelForTokenClassification, at / "critic", "the checkpoint's critic") if at else \
            load_critic(CRITIC_MODEL or ACTOR_MODEL, "CRITIC_MODEL" if CRITIC_MODEL else "ACTOR_MODEL")
        self.critic.to(self.device)
        if self.critic.config.vocab_size < len(self.tokenizer):
            raise UserError(f"CRITIC_MODEL has a vocabulary of {self.critic.config.vocab_size}, the actor's tokenizer {len(self.tokenizer)}: take a critic of the actor's family")
        self.reference = self.reward_model = None
        if KL_COEF > 0:
            self.reference = load_model(AutoModelForCausalLM, REFERENCE_MODEL or ACTOR_MODEL, "REFERENCE_MODEL").to(self.device).requires_grad_(False)
        if REWARD_MODEL:
            self.reward_model = load_model(AutoModelForSequenceClassification, REWARD_MODEL, "REWARD_MODEL").to(self.device).requires_grad_(False)
            self.reward_tokenizer = load_tokenizer(REWARD_MODEL, "REWARD_MODEL")
            if self.reward_model.config.num_labels != 1 or not hasattr(self.reward_model, "score"):
                raise UserError(f"REWARD_MODEL = {REWARD_MODEL!r} must be a decoder with a sequence classification head of one label, not {self.reward_model.config.num_labels}")
        elif not REWARD_FUNCTIONS:
            raise UserError("REWARD_MODEL is None and REWARD_FUNCTIONS is empty: give at least one of them")
        self.reward_functions = resolve_rewards(REWARD_FUNCTIONS)
        self.accuracy_function = resolve_rewards([(ACCURACY_FUNCTION, 1.0)])[0][1]
        if GRADIENT_CHECKPOINTING:
            for model in (self.actor, self.critic):
                model.gradient_checkpointing_enable({"use_reentrant": False})
        ends = self.actor.generation_config.eos_token_id
        self.eos_ids = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [] if ends is None else [ends])}
        self.pad_id = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        fused = self.device.type in ("cpu", "cuda")
        self.actor_optimizer = torch.optim.AdamW(self.actor.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=fused)
        self.critic_optimizer = torch.optim.AdamW(self.critic.parameters(), lr=CRITIC_LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=fused)

    # ------------------------------------------------------------ the algorithm

    def train(self):
        """Roll out, score, estimate advantages, update; log, evaluate, save. Returns the last evaluation."""
        self.open_run()
        handlers = self.catch_signals()
        try:
            metrics = {} if self.step else self.evaluate_and_log()
            while self.step < self.total_steps and not self.stop_signal and not self.out_of_patience():
                batch = self.rollout(self.next_rows())
                self.score(batch)
                self.compute_advantages(batch)
                train_metrics = self.update(batch)
                self.step += 1
                self.log_step(batch, train_metrics)
                last = self.step == self.total_steps
                if last or EVAL_EVERY_N_STEPS and self.step % EVAL_EVERY_N_STEPS == 0:
                    metrics = self.evaluate_and_log()
                if not last and SAVE_EVERY_N_STEPS and self.step % SAVE_EVERY_N_STEPS == 0:
                    self.save_checkpoint()
            self.save_checkpoint()
            self.finish()
        finally:
            self.bar.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return metrics

    def next_rows(self):
        """The next BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS prompts; each epoch has its own permutation."""
        if self.cursor == 0:
            epoch = self.step // self.steps_per_epoch
            self.order = torch.randperm(len(self.train_rows), generator=torch.Generator().manual_seed(SEED + epoch))
        rows = self.order[self.cursor:self.cursor + BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS]
        self.cursor = (self.cursor + len(rows)) % len(self.train_rows)
        return [self.train_rows[i] for i in rows.tolist()]

    def rollout(self, rows):
        """GROUP_SIZE sampled responses to each row, BATCH_SIZE prompts at a time: a batch of (rows * GROUP_SIZE, ...)."""
        started = time.perf_counter()
        uniform = torch.rand(len(rows) * GROUP_SIZE, MAX_NEW_TOKENS)  # drawn at once: BATCH_SIZE does not matter to it
        ids, lengths, logprobs = self.respond([row["ids"] for row in rows], uniform, GROUP_SIZE)
        rows = [row for row in rows for _ in range(GROUP_SIZE)]
        prompt_lengths = torch.tensor([len(row["ids"]) for row in rows], device=self.device)
        mask = torch.arange(ids.shape[1], device=self.device) < lengths[:, None]
        ended = torch.isin(ids.gather(1, lengths[:, None] - 1).squeeze(1), torch.tensor(sorted(self.eos_ids), device=self.device))
        return SimpleNamespace(
            rows=rows, prompt_ids=pad_left([row["ids"] for row in rows], self.pad_id).to(self.device), prompt_lengths=prompt_lengths,
            response_ids=ids, response_lengths=lengths, response_mask=mask.float(), logprobs=logprobs, truncated=~ended,
            responses=self.decode(ids, lengths), seconds={"rollout": time.perf_counter() - started})

    def respond(self, prompts, uniform, group_size=1):
        """generate() over lists of ids, BATCH_SIZE at a time; see there for what comes back."""
        parts, longest = [], 0
        with self.autocast():
            for start in range(0, len(prompts), BATCH_SIZE):
                chunk = None if uniform is None else uniform[start * group_size:(start + BATCH_SIZE) * group_size]
                parts.append(generate(self.actor, prompts[start:start + BATCH_SIZE], chunk, group_size, MAX_NEW_TOKENS, TEMPERATURE, self.eos_ids, self.pad_id))
                longest = max(longest, parts[-1][0].shape[1])
        pad = lambda x, value: torch.nn.functional.pad(x, (0, longest - x.shape[1]), value=value)
        ids, lengths, logprobs = zip(*parts)
        return torch.cat([pad(x, self.pad_id) for x in ids]), torch.cat(lengths), torch.cat([pad(x, 0.0) for x in logprobs])

    def decode(self, ids, lengths):
        return self.tokenizer.batch_decode([row[:n] for row, n in zip(ids.tolist(), lengths.tolist())], skip_special_tokens=True)

    @torch.no_grad()
    def score(self, batch):
        """Scores of the responses, reference log-probabilities and values of their tokens."""
        started = time.perf_counter()
        batch.scores = self.checked_rewards([r["prompt"] for r in batch.rows], batch.responses, [r["answer"] for r in batch.rows])
        batch.parts = self.reward_parts
        batch.scores = batch.scores - MISSING_EOS_PENALTY * batch.truncated
        batch.values = torch.zeros_like(batch.logprobs)
        batch.ref_logprobs = batch.logprobs.clone() if self.reference is None else torch.zeros_like(batch.logprobs)
        with self.autocast():
            for rows in micro_batches(batch, torch.arange(len(batch.rows), device=self.device), BATCH_SIZE * GROUP_SIZE):
                values = self.response_values(batch, rows)
                batch.values[rows, :values.shape[1]] = values * batch.response_mask[rows, :values.shape[1]]
                if self.reference is not None:
                    ref = response_logprobs(self.reference, batch, rows, TEMPERATURE)[0]
                    batch.ref_logprobs[rows, :ref.shape[1]] = ref * batch.response_mask[rows, :ref.shape[1]]
        batch.seconds["score"] = time.perf_counter() - started

    def response_values(self, batch, rows):
        """V before each response token is seen, (rows, R): what the critic says at the position before it."""
        inputs, prompt, _ = response_window(batch, rows)
        return self.critic(**inputs).logits[:, prompt - 1:-1, 0].float()

    def checked_rewards(self, prompts, responses, answers):
        self.reward_parts = {}
        scores = self.compute_rewards(prompts, responses, answers)
        scores = torch.as_tensor(scores, dtype=torch.float32, device=self.device)
        if scores.shape != (len(responses),) or not scores.isfinite().all():
            raise UserError(f"compute_rewards must return {len(responses)} finite numbers, one a response; it returned shape {tuple(scores.shape)}, {int((~scores.isfinite()).sum())} of them not finite")
        return scores

    def compute_rewards(self, prompts, responses, answers):
        """Score of each response, (rows,); edit or override freely. Fill self.reward_parts to see parts in the logs."""
        total = torch.zeros(len(responses))
        if self.reward_model is not None:
            self.reward_parts["reward_model"] = self.reward_model_score(prompts, responses).cpu()
            total += REWARD_MODEL_WEIGHT * self.reward_parts["reward_model"]
        for name, function, weight in self.reward_functions:
            try:
                values = [float(v) for v in function(prompts, responses, answers)]
            except ValueError as error:
                raise UserError(f"REWARD_FUNCTIONS: {name}: {error}") from None
            if len(values) != len(responses) or not all(map(math.isfinite, values)):
                raise UserError(f"REWARD_FUNCTIONS: {name} must return {len(responses)} finite numbers, one a response; it returned {len(values)}, {sum(not math.isfinite(v) for v in values)} of them not finite")
            self.reward_parts[name] = torch.tensor(values)
            total += weight * self.reward_parts[name]
        return total

    @torch.no_grad()
    def reward_model_score(self, prompts, responses):
        """The reward model's score of each response (rows,), read at its last real token; two strings give one number."""
        if isinstance(prompts, str):
            return self.reward_model_score([prompts], [responses])[0]
        tokenizer, texts = self.reward_tokenizer, []
        for prompt, response in zip(prompts, responses):
            prompt = PROMPT_TEMPLATE.replace("{input}", prompt)
            chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            texts.append(tokenizer.apply_chat_template(chat, tokenize=False) if tokenizer.chat_template else prompt + response + tokenizer.eos_token)
        rows = tokenizer(texts, add_special_tokens=not tokenizer.chat_template)["input_ids"]
        scores = torch.zeros(len(rows), device=self.device)
        with self.autocast():
            for chunk in torch.tensor([len(r) for r in rows]).argsort(stable=True).split(BATCH_SIZE * GROUP_SIZE):
                ids = pad_left([rows[i] for i in chunk], 0).to(self.device)  # padded left: the last column is always real
                lengths = torch.tensor([len(rows[i]) for i in chunk], device=self.device)
                mask = (torch.arange(ids.shape[1], device=self.device) >= ids.shape[1] - lengths[:, None]).long()
                hidden = self.reward_model.base_model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).last_hidden_state
                scores[chunk.to(self.device)] = self.reward_model.score(hidden[:, -1]).squeeze(-1).float()
        return scores

    def compute_advantages(self, batch):
        """GAE on the token rewards; returns come from the advantages as they are, the policy sees them whitened."""
        mask = batch.response_mask
        rewards_ = token_rewards(batch.scores, batch.logprobs, batch.ref_logprobs, mask, self.kl_coef)
        advantages = gae(rewards_, batch.values, mask, GAMMA, LAM)
        batch.returns, batch.raw_advantages = advantages + batch.values, advantages
        batch.advantages = whiten(advantages, mask) if WHITEN_ADVANTAGES else advantages

    def update(self, batch):
        """GROUP_EPOCHS passes of MINI_BATCHES optimizer steps over the batch; returns the step's metrics."""
        started = time.perf_counter()
        scale = learning_rate_scale(self.step, self.total_steps, WARMUP_STEPS, LR_SCHEDULER_TYPE if USE_LR_SCHEDULER else None, self.halvings)
        for optimizer, rate in ((self.actor_optimizer, LEARNING_RATE), (self.critic_optimizer, CRITIC_LEARNING_RATE)):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        self.set_checkpointing(True)
        metrics = defaultdict(list)
        for _ in range(GROUP_EPOCHS):
            rows = torch.randperm(len(batch.rows)) if MINI_BATCHES > 1 else torch.arange(len(batch.rows))
            for mini_batch in rows.to(self.device).chunk(MINI_BATCHES):
                for key, value in self.optimizer_step(batch, mini_batch).items():
                    metrics[key].append(value)
        self.set_checkpointing(False)
        first = metrics["ratio_max"][0]  # before any step of the optimizer: rollout and update must agree
        if self.step == 0 and DTYPE == "float32" and first > 1e-3:
            raise UserError(f"the first update sees ratios up to {first:.2g} away from 1: the model scores a response otherwise than it sampled it (is ACTOR_MODEL a causal model without dropout or hidden state of its own?)")
        mean = {key: sum(values) / len(values) for key, values in metrics.items() if key != "ratio_max"}
        if self.reference is not None and KL_TARGET:
            kl = masked_mean(batch.logprobs - batch.ref_logprobs, batch.response_mask).item()
            self.kl_coef = adapt_kl_coef(self.kl_coef, kl, KL_TARGET, len(batch.rows), KL_HORIZON)
        batch.seconds["update"] = time.perf_counter() - started
        return {**mean, "ratio_max_first": first, "learning_rate": LEARNING_RATE * scale}

    def optimizer_step(self, batch, rows):
        """One step of both optimizers on `rows`, in micro-batches whose gradients add up to that of the whole."""
        tokens, sums = batch.response_mask[rows].sum(), defaultdict(float)
        for micro in micro_batches(batch, rows, BATCH_SIZE * GROUP_SIZE):
            width = int(batch.response_lengths[micro].max())
            mask, old, advantages = (x[micro, :width] for x in (batch.response_mask, batch.logprobs, batch.advantages))
            with self.autocast():
                logprobs, entropy = response_logprobs(self.actor, batch, micro, TEMPERATURE)
            losses = policy_loss(logprobs, old, advantages, CLIP_RANGE)
            ((losses - ENTROPY_COEF * entropy) * mask).sum().div(tokens).backward()
            with self.autocast():
                values = self.response_values(batch, micro)
            value_losses = value_loss(values, batch.values[micro, :width], batch.returns[micro, :width], VALUE_CLIP_RANGE)
            (VALUE_LOSS_COEF * value_losses * mask).sum().div(tokens).backward()
            with torch.no_grad():
                log_ratio = (logprobs - old) * mask
                ratio = log_ratio.exp()
                for key, x in (("policy_loss", losses), ("value_loss", value_losses), ("entropy", entropy), ("approx_kl", ratio - 1 - log_ratio),
                               ("clip_fraction", (((ratio - 1) * advantages.sign()) > CLIP_RANGE).float())):
                    sums[key] += (x * mask).sum().div(tokens).item()
                sums["ratio_max"] = max(sums["ratio_max"], (ratio - 1).abs().max().item())
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item() for model in (self.actor, self.critic)]
        sums["grad_norm"], sums["critic_grad_norm"] = norms
        if all(map(math.isfinite, (*norms, sums["policy_loss"], sums["value_loss"]))):
            self.actor_optimizer.step()
            self.critic_optimizer.step()
            self.skipped = 0
        else:
            self.skip_step(batch, rows)
        self.actor_optimizer.zero_grad()
        self.critic_optimizer.zero_grad()
        return sums

    def skip_step(self, batch, rows):
        """A loss or gradient is not finite: the weights stay as they are; five in a row end the run."""
        self.skipped += 1
        names = sorted({batch.rows[i]["id"] for i in rows.tolist()})
        self.say(f"WARNING: step {self.step + 1}: loss or gradient is not finite; this optimizer step is skipped. Prompts: {', '.join(names[:20])}{' ...' if len(names) > 20 else ''}")
        if self.skipped == 5:
            raise UserError("five optimizer steps in a row were not finite: lower LEARNING_RATE, or look at the prompts named in the log")

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16) if DTYPE == "bfloat16" else nullcontext()

    def set_checkpointing(self, on):
        """Recomputation is for layers in training mode: only they are put into it, so dropout stays off."""
        for module in (*self.actor.modules(), *self.critic.modules()) if GRADIENT_CHECKPOINTING else ():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = on

    # ------------------------------------------------------------ evaluation

    def evaluate(self, prompts=None, answers=None):
        """Metrics of greedy and sampled responses to prompts (texts; default: the held-out set). Override to add yours.
        The sampled responses have their own random stream, so evaluating never changes training."""
        rows = self.eval_rows if prompts is None else self.encode(
            [{"prompt": p, "answer": a} for p, a in zip(prompts, answers or [None] * len(prompts))], "evaluate")
        prompts, answers, ids = ([row[key] for row in rows] for key in ("prompt", "answer", "ids"))
        if not rows:
            return {}
        metrics, uniform = {}, torch.rand(len(rows), MAX_NEW_TOKENS, generator=torch.Generator().manual_seed(SEED + 1))
        for name, noise in (("greedy", None), ("sampled", uniform)):
            response_ids, lengths, _ = self.respond(ids, noise)
            responses = self.decode(response_ids, lengths)
            if None not in answers:
                metrics[f"accuracy_{name}"] = float(np.mean(self.accuracy_function(prompts, responses, answers)))
        scores = self.checked_rewards(prompts, responses, answers)
        ended = torch.isin(response_ids.gather(1, lengths[:, None] - 1), torch.tensor(sorted(self.eos_ids), device=self.device))
        return {**metrics, "reward": scores.mean().item(), **{f"reward/{k}": v.mean().item() for k, v in self.reward_parts.items()},
                "response_length": lengths.float().mean().item(), "truncated_fraction": 1 - ended.float().mean().item()}

    def generate_response(self, prompt, greedy=True):
        """One response to one prompt text; greedy=False samples from the global random stream."""
        row, = self.encode([{"prompt": prompt}], "generate_response") or [None]
        if row is None:
            raise UserError(f"the prompt is empty or longer than MAX_PROMPT_TOKENS = {MAX_PROMPT_TOKENS}")
        ids, lengths, _ = self.respond([row["ids"]], None if greedy else torch.rand(1, MAX_NEW_TOKENS))
        return self.decode(ids, lengths)[0]

    def evaluate_and_log(self):
        """Evaluate, log, keep the best policy, count patience."""
        started = time.perf_counter()
        metrics = self.evaluate()
        if not metrics:
            return metrics
        self.write_metrics("eval", {**metrics, "seconds/evaluate": time.perf_counter() - started})
        self.say(f"step {self.step}: held out: " + "  ".join(f"{k} {v:.3f}" for k, v in metrics.items()))
        if metrics["reward"] > self.best_reward + (EARLY_STOPPING_THRESHOLD if self.evals_since_best or self.step else 0):
            self.best_reward, self.evals_since_best = metrics["reward"], 0
            self.save_best(metrics)
        else:
            self.evals_since_best += 1
            self.halvings += self.evals_since_best % PLATEAU_PATIENCE == 0
        return metrics

    def out_of_patience(self):
        return 0 < EARLY_STOPPING_PATIENCE <= self.evals_since_best

    # ------------------------------------------------------------ the run's files

    def say(self, text):
        """One line to the terminal, above the bar, and to the log file."""
        tqdm.write(text)
        sys.stdout.flush()
        self.write_log(text)

    def write_log(self, text):
        if self.log is None:
            self.unlogged.append(text)
        else:
            self.log.write(text + "\n")
            self.log.flush()

    def open_run(self):
        """Make OUTPUT_DIR ready: cut the logs back to the checkpoint, or move an earlier run aside; open the files."""
        out = Path(OUTPUT_DIR)
        (out / "logs").mkdir(parents=True, exist_ok=True)
        same_run = self.checkpoint is not None and self.checkpoint.resolve().parent == out.resolve()
        for stale in out.glob("*.tmp"):
            shutil.rmtree(stale)
        if same_run:  # checkpoints beyond this one, broken or of a future given up, would be found by the next resume
            move_aside([p for p in out.glob("step_*") if step_of(p) > self.step], out, self.say)
            for name, size in self.log_bytes.items():
                if (out / "logs" / name).exists() and (out / "logs" / name).stat().st_size > size:
                    os.truncate(out / "logs" / name, size)
        else:
            earlier = [p for p in (*out.glob("step_*"), *out.glob("*.png"), out / "best", out / "training_config.json") if p.exists()]
            move_aside(earlier + ([out / "logs"] if any((out / "logs").iterdir()) else []), out, self.say)
            (out / "logs").mkdir(exist_ok=True)
            self.log_bytes = {}
        log_name = next((n for n in self.log_bytes if n.startswith("training_")), time.strftime("training_%Y%m%d_%H%M%S.log"))
        self.log = open(out / "logs" / log_name, "a")
        self.metrics_file, self.samples_file = open(out / "logs/metrics.jsonl", "a"), open(out / "logs/samples.jsonl", "a")
        (out / "training_config.json").write_text(json.dumps({"constants": constants(), **run_facts(self.device)}, indent=1, default=repr))
        self.bar = tqdm(total=self.total_steps, initial=self.step, disable=not sys.stderr.isatty(), dynamic_ncols=True, leave=False,
                        bar_format="{percentage:3.0f}%|{bar:8}| {remaining} left  {desc}")
        self.started, self.first_step = time.perf_counter(), self.step
        if USE_WANDB:
            import wandb
            self.wandb = wandb.init(project=WANDB_PROJECT, dir=OUTPUT_DIR, config=constants(), id=self.wandb_id, resume="allow")
            self.wandb_id = self.wandb.id
        waiting, self.unlogged = self.unlogged, []
        for text in waiting:
            self.write_log(text)
        self.say(f"{Path(ACTOR_MODEL).name}: {sum(p.numel() for p in self.actor.parameters()):,} parameters on {self.device}, {DTYPE}; "
                 f"{len(self.train_rows)} prompts to train on, {len(self.eval_rows)} held out; steps {self.step} to {self.total_steps}, "
                 f"{BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS} prompts x {GROUP_SIZE} responses each")
        self.say(f"Writing to {out}")

    def write_metrics(self, phase, metrics):
        record = {"phase": phase, "step": self.step, **metrics}
        self.metrics_file.write(json.dumps(record) + "\n")
        self.metrics_file.flush()
        if self.wandb:
            self.wandb.log({f"{phase}/{k}": v for k, v in metrics.items()}, step=self.step)

    def log_step(self, batch, update_metrics):
        """The step's line on the terminal, its object in metrics.jsonl and a few of its responses in samples.jsonl."""
        mask, lengths, epoch = batch.response_mask, batch.response_lengths.float(), (self.step - 1) // self.steps_per_epoch + 1
        groups = batch.scores.view(-1, GROUP_SIZE)
        spread, error = whitening_moments(batch.returns, mask), whitening_moments(batch.returns - batch.values, mask)
        metrics = {
            "epoch": epoch, **update_metrics, "reward": batch.scores.mean().item(), **{f"reward/{k}": v.float().mean().item() for k, v in batch.parts.items()},
            "advantage": masked_mean(batch.raw_advantages, mask).item(), "kl": masked_mean(batch.logprobs - batch.ref_logprobs, mask).item(),
            "kl_coef": self.kl_coef, "response_length": lengths.mean().item(), "truncated_fraction": batch.truncated.float().mean().item(),
            "zero_variance_groups": (groups == groups[:, :1]).all(1).float().mean().item() if GROUP_SIZE > 1 else 0.0,
            "explained_variance": 1 - error / spread if spread > 0 else 0.0,
            "tokens_per_second": lengths.sum().item() / sum(batch.seconds.values()), **{f"seconds/{k}": v for k, v in batch.seconds.items()}}
        self.write_metrics("train", metrics)
        for i in torch.linspace(0, len(batch.rows) - 1, min(LOG_SAMPLES, len(batch.rows))).long().tolist():
            self.samples_file.write(json.dumps({
                "step": self.step, "id": batch.rows[i]["id"], "prompt": batch.rows[i]["prompt"], "response": batch.responses[i], "answer": batch.rows[i]["answer"],
                "reward": batch.scores[i].item(), **{f"reward/{k}": float(v[i]) for k, v in batch.parts.items()},
                "advantage": masked_mean(batch.advantages[i], mask[i]).item(), "truncated": bool(batch.truncated[i])}) + "\n")
        self.samples_file.flush()
        line = "Epoch {}/{}: PL:{policy_loss:.4f} VL:{value_loss:.4f} R:{reward:.2f} A:{advantage:.2f} E:{entropy:.3f} LR:{learning_rate:.2e}".format(epoch, NUM_EPOCHS, **metrics)
        self.bar.set_description_str(line, refresh=False)
        self.bar.update(1)
        left = (time.perf_counter() - self.started) / (self.step - self.first_step) * (self.total_steps - self.step)
        full = f"{line}  step {self.step}/{self.total_steps}, {tqdm.format_interval(left)} left"
        self.write_log(full)
        if self.bar.disable:
            print(full, flush=True)

    def save_checkpoint(self):
        """Write step_N/ whole or not at all, prune, redraw the plots."""
        folder = Path(OUTPUT_DIR) / f"step_{self.step}"
        if not folder.exists():
            self.say(f"Saving {folder}")
            try:
                write_checkpoint(folder, self.fill_checkpoint)
            except OSError as error:
                why = "the disk is full" if error.errno == errno.ENOSPC else str(error)
                raise UserError(f"{folder} could not be saved: {why}; make room and start again: training goes on from the last good checkpoint") from None
            for old in sorted((p for p in folder.parent.glob("step_*") if step_of(p) >= 0), key=step_of)[:-KEEP_LAST_N_CHECKPOINTS]:
                shutil.rmtree(old)
        self.draw_plots()

    def fill_checkpoint(self, folder):
        for model, name in ((self.actor, "policy"), (self.critic, "critic")):
            model.save_pretrained(folder / name)
            self.tokenizer.save_pretrained(folder / name)
        logs = [Path(file.name) for file in (self.log, self.metrics_file, self.samples_file)]
        for path in logs:
            fsync(path)
        torch.save({
            "step": self.step, "order": self.order, "cursor": self.cursor, "prompts": len(self.train_rows), "skipped": self.skipped,
            "kl_coef": self.kl_coef, "best_reward": self.best_reward, "evals_since_best": self.evals_since_best, "halvings": self.halvings,
            "actor_optimizer": self.actor_optimizer.state_dict(), "critic_optimizer": self.critic_optimizer.state_dict(),
            "rng": [get_rng_state()], "log_bytes": {path.name: path.stat().st_size for path in logs}, "wandb_id": self.wandb_id,
        }, folder / "training_state.pt")
        (folder / "config.json").write_text(json.dumps(constants(), indent=1, default=repr))

    def load_checkpoint(self, folder):
        state = torch.load(folder / "training_state.pt", map_location="cpu", weights_only=True)
        if state["prompts"] != len(self.train_rows):
            raise UserError(f"{folder} was made with {state['prompts']} training prompts, TRAIN_DATASETS now gives {len(self.train_rows)}: a resumed run needs the same data (RESUME=no starts afresh)")
        for key in ("step", "order", "cursor", "skipped", "kl_coef", "best_reward", "evals_since_best", "halvings", "log_bytes", "wandb_id"):
            setattr(self, key, state[key])
        self.actor_optimizer.load_state_dict(state["actor_optimizer"])
        self.critic_optimizer.load_state_dict(state["critic_optimizer"])
        set_rng_state(state["rng"][0])
        saved, now = json.loads((folder / "config.json").read_text()), json.loads(json.dumps(constants(), default=repr))
        for key in sorted({*saved, *now} - {"RESUME", "OUTPUT_DIR"}):
            if saved.get(key) != now.get(key):
                self.say(f"Changed since the checkpoint: {key} was {saved.get(key)!r}, is {now.get(key)!r}")
        self.say(f"Resumed at step {self.step}")

    def save_best(self, metrics):
        """best/policy/, each file replaced in one move, so that it loads at any moment."""
        best, tmp = Path(OUTPUT_DIR) / "best", Path(OUTPUT_DIR) / "best.tmp"
        shutil.rmtree(tmp, ignore_errors=True)
        self.actor.save_pretrained(tmp / "policy")
        self.tokenizer.save_pretrained(tmp / "policy")
        (tmp / "metrics.json").write_text(json.dumps({"step": self.step, **metrics}, indent=1))
        (best / "policy").mkdir(parents=True, exist_ok=True)
        for path in sorted(p for p in tmp.rglob("*") if p.is_file()):
            fsync(path)
            os.replace(path, best / path.relative_to(tmp))
        shutil.rmtree(tmp)

    def draw_plots(self):
        records = [json.loads(line) for line in Path(self.metrics_file.name).read_text().splitlines()]
        units = {"entropy": "nats a token", "kl": "nats a token", "approx_kl": "nats a token", "response_length": "tokens", "tokens_per_second": "tokens/s"}
        label = lambda key: f"{key} ({units.get(key, 's')})" if key in units or key.startswith("seconds/") else key
        keys = dict.fromkeys(k for r in records for k in r if k not in ("phase", "step"))
        name = f"PPO, {Path(ACTOR_MODEL).name}, seed {SEED}"
        draw_plot(records, f"{OUTPUT_DIR}/training_metrics_detailed.png", f"{name}: every metric", [(label(k), [k]) for k in keys])
        draw_plot(records, f"{OUTPUT_DIR}/ppo_metrics_with_entropy.png", name, [
            ("reward", ["reward"]), ("accuracy", ["accuracy_sampled", "accuracy_greedy"]), (label("entropy"), ["entropy"]),
            ("policy loss", ["policy_loss"]), ("value loss", ["value_loss"]), (label("kl"), ["kl"]),
            ("explained variance of returns", ["explained_variance"]), ("clip fraction", ["clip_fraction"]), (label("response_length"), ["response_length"])])

    # ------------------------------------------------------------ ending

    def catch_signals(self):
        """Ctrl-C and SIGTERM end the run after the current step; a second Ctrl-C leaves at once."""
        def handler(number, frame):
            if self.stop_signal and number == signal.SIGINT:
                os._exit(130)
            self.stop_signal = number
            tqdm.write("\nStopping after this step, then saving; Ctrl-C again leaves at once")
        try:
            return {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread: signals are somebody else's
            return {}

    def finish(self):
        why = "Stopped" if self.stop_signal else "Stopped early: no better evaluation for a while" if self.step < self.total_steps else "Done"
        self.say(f"{why} at step {self.step} of {self.total_steps}, {time.perf_counter() - self.started:.0f} s. Plots: {OUTPUT_DIR}/ppo_metrics_with_entropy.png"
                 + ("; run again to go on" if self.stop_signal else f"; best policy: {OUTPUT_DIR}/best/policy"))
        if self.wandb:
            self.wandb.finish()


def load_critic(path, constant):
    """A token-level value model on the weights at path; a value head that is not among them starts at zero."""
    from transformers import AutoConfig
    try:
        config = AutoConfig.from_pretrained(path, num_labels=1)
        auto = AutoModelForTokenClassification.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{constant} = {path!r} gives no token-level value model ({str(error).splitlines()[0]})") from None
    return load_model(type(auto), path, constant, new_head=True)


def whitening_moments(x, mask):
    """Variance over the mask, a number."""
    return masked_mean((x - masked_mean(x, mask)) ** 2, mask).item()


# same in: ppo/ppo.py
def resolve_rewards(functions):
    """[(name, function, weight)] from names in rewards/ or functions."""
    resolved = []
    for function, weight in functions:
        name = function if isinstance(function, str) else function.__name__
        function = getattr(rewards, function, None) if isinstance(function, str) else function
        if not callable(function):
            raise UserError(f"REWARD_FUNCTIONS: rewards/ has no function {name!r}")
        resolved.append((name, function, weight))
    return resolved


def train_main():
    try:
        apply_overrides(sys.argv[1:])
        trainer = PPOTrainer()
        trainer.train()
    except UserError as error:
        sys.exit((print(f"\nppo.py: {error}", file=sys.stderr), 2)[1])
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        sys.exit((print(f"\nppo.py: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr), 2)[1])
    sys.exit(128 + trainer.stop_signal if trainer.stop_signal else 0)


if __name__ == "__main__":
    train_main()
