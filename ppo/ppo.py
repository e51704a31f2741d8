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
import ast, bisect, difflib, fcntl, hashlib, inspect, json, math, os, platform, random, shutil, signal, subprocess, sys, threading, time, traceback
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from numbers import Number
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from tqdm import tqdm
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer
from transformers.cache_utils import DynamicLayer, get_layer_types_and_kwargs
from transformers.integrations.sdpa_attention import sdpa_attention_forward
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
# "input" and "output" may be paths into nested records, such as "answers.text"
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
REWARD_TIMEOUT: float | None = 600.0  # seconds that scoring one batch of responses may take; None: any

# Rollout
BATCH_SIZE = 16  # prompts in memory at a time, with GROUP_SIZE responses each
GRADIENT_ACCUMULATION_STEPS = 2  # batches a training step: BATCH_SIZE * this = prompts a step
GROUP_SIZE = 4  # responses a prompt
MAX_PROMPT_TOKENS = 256  # longer prompts are left out, and counted
MAX_NEW_TOKENS = 64
TEMPERATURE = 1.0  # > 0; no top-k or top-p: the distribution sampled is the one scored

# Optimisation
LEARNING_RATE = 1e-4
CRITIC_LEARNING_RATE = 5e-4
MAX_GRAD_NORM = 1.0  # > 0, for actor and critic each
WEIGHT_DECAY = 0.0
USE_LR_SCHEDULER = False
LR_SCHEDULER_TYPE = "linear"  # linear | cosine (to 0 after the last step) | plateau (halves)
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
KL_HORIZON = 10000  # responses over which the adaptive coefficient moves; a step moves it by a fifth at most
GAMMA = 1.0  # 0 to 1
LAM = 0.95  # 0 to 1
WHITEN_ADVANTAGES = True

# Schedule
NUM_EPOCHS = 1  # passes over the prompts
MAX_STEPS: int | None = 50  # None: all of NUM_EPOCHS

# Bookkeeping
SAVE_EVERY_N_STEPS = 25  # 0: only at the end
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 10  # 0: only before and after
EARLY_STOPPING_PATIENCE = 0  # evaluations without a better reward before the run ends; 0: never
EARLY_STOPPING_THRESHOLD = 0.0  # by how much better is better for patience; best/ follows the highest
LOG_SAMPLES = 4  # responses a step written to samples.jsonl
RESUME = "ask"  # ask | yes | no | a checkpoint's path
OUTPUT_DIR = f"{ROOT}/checkpoints/ppo"
SEED = 1
USE_WANDB = False
WANDB_PROJECT = "hackable-rlhf"

_RANGES = {  # least and greatest value of each number, or the words that a constant takes
    "BATCH_SIZE GRADIENT_ACCUMULATION_STEPS GROUP_SIZE MAX_PROMPT_TOKENS MAX_NEW_TOKENS GROUP_EPOCHS MINI_BATCHES NUM_EPOCHS "
    "PLATEAU_PATIENCE KL_HORIZON KEEP_LAST_N_CHECKPOINTS MAX_STEPS MAX_TRAIN_PROMPTS MAX_EVAL_PROMPTS": (1, 1e12),
    "WARMUP_STEPS SAVE_EVERY_N_STEPS EVAL_EVERY_N_STEPS EARLY_STOPPING_PATIENCE LOG_SAMPLES SEED": (0, 2**62),
    "LEARNING_RATE CRITIC_LEARNING_RATE WEIGHT_DECAY VALUE_LOSS_COEF VALUE_CLIP_RANGE KL_COEF MISSING_EOS_PENALTY "
    "EARLY_STOPPING_THRESHOLD": (0, 1e6), "REWARD_MODEL_WEIGHT ENTROPY_COEF": (-1e6, 1e6), "GAMMA LAM": (0, 1),
    "CLIP_RANGE": (1e-6, 1e6), "TEMPERATURE": (1e-3, 1e3), "MAX_GRAD_NORM KL_TARGET": (1e-12, 1e12), "REWARD_TIMEOUT": (1e-3, 1e6),
    "DTYPE": ["float32", "bfloat16"], "LR_SCHEDULER_TYPE": ["linear", "cosine", "plateau"],
}

# ================================================================ small functions that every trainer has

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
class UserError(Exception):
    """Something the user can mend, said in one sentence; the program ends with exit code 2."""

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def constants():
    """Every constant of this file, as it is now."""
    return {k: v for k, v in globals().items() if k.isupper() and not k.startswith("_") and k != "ROOT"}

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def plain_name(value):
    """What stands for a value that is not JSON: a function's name stays the same from run to run."""
    return getattr(value, "__name__", repr(value))

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def printable(text):
    """Text without control characters and terminal escapes: data and errors may hold them, and a terminal obeys them."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def apply_overrides(words):
    """Set constants from KEY=VALUE words; a value has the type that its constant has in the file."""
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in constants():
            near = difflib.get_close_matches(key.upper(), constants(), 1, 0.5)
            raise UserError(f"{word!r} is not KEY=VALUE with a constant of this file" + (f"; did you mean {near[0]}?" if near else ""))
        kind = str(globals()["__annotations__"].get(key, type(globals()[key]).__name__))  # such as "int | None"
        try:
            value = text if "str" in kind and not ("None" in kind and text == "None") else ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = {"true": True, "false": False}.get(text.lower(), text)
        value = float(value) if "float" in kind and type(value) is int else value
        if type(value).__name__.replace("NoneType", "None") not in kind.split(" | "):
            raise UserError(f"{key}={text} does not fit: {key} takes {kind.replace('|', 'or')}, as in {key}={globals()[key]}")
        globals()[key] = value

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def check_constants():
    """Refuse numbers out of range and unknown words before anything is loaded or written."""
    for keys, allowed in _RANGES.items():
        for key in keys.split():
            value = globals()[key]
            if isinstance(allowed, list) and value not in allowed:
                raise UserError(f"{key} = {value!r} is unknown: it takes {' or '.join(allowed)}")
            if isinstance(allowed, tuple) and value is not None and not allowed[0] <= value <= allowed[1]:
                raise UserError(f"{key} = {value} is out of range: it takes {allowed[0]:g} " + (f"to {allowed[1]:g}" if allowed[1] < 1e6 else "or more"))
    for key, value in constants().items():
        if isinstance(value, str) and (not value.strip() or "\0" in value):
            raise UserError(f"{key} = {value!r}: it takes a text that is not empty")
    if "{input}" not in PROMPT_TEMPLATE:
        raise UserError(f"PROMPT_TEMPLATE = {PROMPT_TEMPLATE!r} must contain {{input}}, where the prompt goes")

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def load_rows(datasets, constant, limit=None):
    """[{"id", "prompt", "answer"}] of all data sets, one after the other; answer is None without an output column."""
    rows = []
    for spec in datasets:
        if not isinstance(spec, dict) or not all(isinstance(x, str) for x in (*spec, *spec.values())):
            raise UserError(f"{constant}: a data set is a dict of texts, such as {{'path': 'data.jsonl', 'type': 'jsonl', 'input': 'problem'}}, not {spec!r}")
        where, before, columns = f"{constant}: {spec.get('path')}", len(rows), [c for c in (spec.get("input"), spec.get("output")) if c]
        if odd := set(spec) - {"path", "type", "input", "output", "name", "split"} or {"path", "type", "input"} - set(spec):
            raise UserError(f"{where}: a data set has path, type, input and, if you like, output, name, split; mend {sorted(odd)}")
        for number, record in read_records(spec, columns, where):
            for column in columns:
                if look_up(record, column) is None:
                    has = sorted(record) if isinstance(record, dict) else type(record).__name__
                    raise UserError(f"{where} line {number}: there is no value for column {column!r}; the row has {has}")
            prompt = look_up(record, spec["input"])
            if not isinstance(prompt, str) or not prompt.strip():
                must = "must be a text that is not empty" + inside(prompt, "input", spec)
                raise UserError(f"{where} line {number}: {spec['input']!r} {must}")
            answer = look_up(record, spec["output"]) if spec.get("output") else None
            golds = answer if isinstance(answer, list) else [answer]
            if answer is not None and not (golds and all(map(is_plain, golds))):
                must = "a text, a number or a list of such that is not empty" + inside(answer, "output", spec)
                held = f"{spec['output']!r} holds {repr(answer)[:80]}"
                raise UserError(f"{where} line {number}: {held}: write {must}, or delete the line")
            if isinstance(answer, list):
                answer = [str(gold) for gold in golds]
            elif answer is not None:
                answer = str(answer)
            try:
                "".join([prompt, *(answer if isinstance(answer, list) else [answer or ""])]).encode()
            except UnicodeEncodeError:
                raise UserError(f"{where} line {number}: half of a surrogate pair, such as \\ud800, is no character; mend or delete it") from None
            rows.append({"id": f"{Path(spec['path']).name}:{number}", "prompt": prompt, "answer": answer})
        if len(rows) == before:
            raise UserError(f"{where}: the data set is empty")
    return rows[:limit]

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def look_up(record, path):
    """What stands at a path such as "answers.text" in nested records, None where nothing does. A name that
    has a dot itself wins."""
    for head, rest in splits(path):
        if isinstance(record, dict) and head in record:
            return look_up(record[head], rest) if rest else record[head]

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def splits(path):
    """[(head, rest)] of a path, cut at each of its dots, the longest head first: "a.b" gives ("a.b", ""),
    ("a", "b")."""
    words = path.split(".")
    return [(".".join(words[:n]), ".".join(words[n:])) for n in range(len(words), 0, -1)]

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def is_plain(value):
    """Whether a value is a text, a bool or a number, which NaN and infinity are not."""
    return isinstance(value, (str, Number)) and not (isinstance(value, float) and not math.isfinite(value))

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def inside(value, key, spec):
    """Where a nested record stands in place of a text: how to name what is in it."""
    names = [name for name in value if name] if isinstance(value, dict) else []
    return f", or name what is in it, such as {key!r}: {f'{spec[key]}.{names[0]}'!r}" if names else ""

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def read_records(spec, columns, where):
    """(line number from 1, record) of one data set."""
    if spec["type"] not in ("jsonl", "parquet", "hub"):
        raise UserError(f"{where}: type {spec['type']!r} is unknown: it takes jsonl, parquet or hub")
    if spec["type"] != "hub" and not Path(spec["path"]).is_file():
        raise UserError(f"{where}: there is no such file")
    if spec["type"] == "jsonl":
        with open(spec["path"], "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    if line.strip():
                        yield number, json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{where} line {number}: not a line of JSON ({getattr(error, 'msg', error)}); mend or delete it") from None
        return
    try:
        if spec["type"] == "parquet":
            import pyarrow.parquet
            names = pyarrow.parquet.read_schema(spec["path"]).names
            heads = [next((head for head, _ in splits(path) if head in names), path) for path in columns]
            records = pyarrow.parquet.read_table(spec["path"], columns=list(dict.fromkeys(heads))).to_pylist()
        else:
            import datasets
            records = datasets.load_dataset(spec["path"], spec.get("name"), split=spec.get("split", "train"))
    except Exception as error:  # both libraries raise many kinds
        raise UserError(f"{where}: cannot be read as {spec['type']} ({first_line(error)})") from None
    yield from enumerate(records, 1)

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def load_pretrained(auto_class, path, constant, **options):
    """from_pretrained with one clear sentence when that fails; `constant` is what the user set to `path`."""
    try:
        return auto_class.from_pretrained(path, trust_remote_code=False, **options)
    except Exception as error:  # transformers, safetensors and tokenizers raise many kinds
        there = Path(path).exists()
        why = f"cannot be loaded ({first_line(error)})" if there else "there is no such folder, and the hub gave no such model"
        raise UserError(f"{constant} = {str(path)!r}: {why}") from None

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def load_config(path, constant):
    """The model's config without what differs between one forward pass and the next: dropout, which layers recomputed in training
    mode would apply; nor with a router's logits, which the loss of load balancing takes for all tokens of whole rows."""
    config = load_pretrained(AutoConfig, path, constant)
    parts = [config]
    while parts:  # with those inside it
        part = parts.pop()
        for name, value in list(vars(part).items()):
            if isinstance(value, transformers.PreTrainedConfig):
                parts.append(value)
            elif "drop" in name and type(value) is float:
                setattr(part, name, 0.0)
        if getattr(part, "output_router_logits", False):
            part.output_router_logits = False
    return config

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def load_model(auto_class, path, constant, new_head=False):
    """The model in float32, every weight accounted for. With new_head, weights outside the base model may be left over
    or absent; the absent ones start at zero."""
    config = load_config(path, constant)
    if new_head:
        config.num_labels = 1
    model, info = load_pretrained(auto_class, path, constant, config=config, dtype=torch.float32, output_loading_info=True)
    missing = set(info["missing_keys"]) | {key[0] for key in info["mismatched_keys"]}
    wrong = missing | set(info["unexpected_keys"])
    if new_head:
        wrong = {key for key in wrong if key in missing and key.startswith(model.base_model_prefix + ".")}
    if wrong:
        raise UserError(f"{constant} = {str(path)!r} does not fit {type(model).__name__}: missing or unexpected weights {', '.join(sorted(wrong))}")
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.clone()  # a file's memory map begins at any byte, and the last bit of a product depends on it
        if name in missing:
            torch.nn.init.zeros_(parameter)
    return model.eval()  # and it stays so: dropout is off in rollout and update alike

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def load_tokenizer(path, constant):
    tokenizer = load_pretrained(AutoTokenizer, path, constant)
    if tokenizer.eos_token_id is None:
        raise UserError(f"{constant} = {str(path)!r}: its tokenizer has no EOS token, so no response could ever end; set eos_token in it")
    return tokenizer

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def resolve_rewards(functions, constant):
    """[(name, function, weight)] of names in rewards/ or functions."""
    for pair in functions:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and (callable(pair[0]) or isinstance(pair[0], str))
                and isinstance(pair[1], (int, float)) and math.isfinite(pair[1])):
            raise UserError(f"{constant}: it takes pairs (function, or its name in rewards/; weight), not {pair!r}")
        if not callable(pair[0]) and not callable(getattr(rewards, pair[0], None)):
            raise UserError(f"{constant}: rewards/ has no function {pair[0]!r}")
    return [(getattr(f, "__name__", f), f if callable(f) else getattr(rewards, f), weight) for f, weight in functions]

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def check_scores(name, values, count):
    """The values as a float32 tensor (count,); anything else is the reward function's mistake."""
    try:
        numbers = torch.as_tensor(values, dtype=torch.float32).detach()
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{name} must return {count} finite numbers, one a response; it returned {repr(values)[:100]}") from None
    if numbers.shape != (count,) or not numbers.isfinite().all():
        shape = f"{len(numbers)}" if numbers.dim() == 1 else f"a shape of {tuple(numbers.shape)}"
        raise UserError(f"{name} must return {count} finite numbers, one a response; it returned {shape}, {int((~numbers.isfinite()).sum())} of them not finite")
    return numbers

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def guarded(name, function, *lists):
    """What a reward function gives within REWARD_TIMEOUT, checked, (rows,); whatever it raises becomes one sentence that says where."""
    try:
        with time_limit(REWARD_TIMEOUT, name):
            return check_scores(name, function(*lists), len(lists[1]))
    except UserError:
        raise
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename and not f.filename.startswith(sys.base_prefix)] or traceback.extract_tb(error.__traceback__)
        raise UserError(f"{name} raised {type(error).__name__}: {' '.join(str(error).split())[:300]} ({frames[-1].filename} line {frames[-1].lineno})") from error

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
@contextmanager
def time_limit(seconds, name):
    """TimeoutError inside the block after so many seconds. A block that heeds it not (it hangs outside Python) ends the program
    when it has taken twice that. Only a main thread can be interrupted; SIGALRM is left to others (math-verify uses it)."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    over, late, text = threading.Event(), [], f"it took longer than REWARD_TIMEOUT = {seconds:g} s"

    def interrupt(number, frame):
        if not over.is_set():
            raise TimeoutError(text)

    def watch():
        if not over.wait(seconds):
            late.append(True)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGVTALRM)
            if not over.wait(max(seconds, 5)):
                print(f"\n{Path(__file__).name}: {name}: {text} and could not be interrupted", file=sys.stderr, flush=True)
                os._exit(2)

    before, watcher = signal.signal(signal.SIGVTALRM, interrupt), threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        signal.signal(signal.SIGVTALRM, before)
    if late:  # the function caught it
        raise TimeoutError(text)

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def pad_left(rows, value):
    """Lists of ids as one tensor, (rows, longest)."""
    width = max(map(len, rows))
    return torch.tensor([[value] * (width - len(row)) + list(row) for row in rows])

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def invert(weights, at):
    """Where the fraction at (rows, 1) of each row's sum of weights (rows, n) is reached, and how far into that weight: two (rows, 1)."""
    cumulative = weights.double().cumsum(-1)
    target = at * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, target, right=True).clamp(max=weights.shape[1] - 1)
    weight = weights.double().gather(-1, found)
    return found, (1 - (cumulative.gather(-1, found) - target) / weight).clamp(0, 1 - 2**-40)

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def sample_tokens(probabilities, uniform):
    """One id a row by inverting the cumulative distribution: probabilities (rows, vocabulary), uniform (rows,) in [0, 1).
    First among blocks of 128 ids, then within the block: four times as fast as over a whole large vocabulary."""
    if probabilities.device.type == "mps":  # has no float64
        return sample_tokens(probabilities.cpu(), uniform.cpu()).to(probabilities.device)
    blocks = torch.nn.functional.pad(probabilities, (0, -probabilities.shape[1] % 128)).unflatten(1, (-1, 128))
    block, at = invert(blocks.sum(-1), uniform.double().unsqueeze(-1))
    inside, _ = invert(blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, 128)).squeeze(1), at)
    return (block * 128 + inside).squeeze(-1).clamp(max=probabilities.shape[1] - 1)

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
class Groups:
    """Rows of one prompt side by side: which (rows,) says each row's prompt, in order; bias (prompts, 1, 1, P) hides the prompts' padding."""

    def __init__(self, which, bias):
        counts = which.bincount(minlength=len(bias))
        self.which, self.bias, self.most = which, bias, int(counts.max())
        self.slots = which * self.most + torch.arange(len(which), device=which.device) - (counts.cumsum(0) - counts)[which]
        self.full = len(which) == len(bias) * self.most

    def together(self, x):
        """(rows, heads, n, width) to (prompts, heads, most * n, width), zeros where a prompt has fewer rows than the most."""
        if not self.full:
            x = x.new_zeros(len(self.bias) * self.most, *x.shape[1:]).index_copy_(0, self.slots, x)
        return x.unflatten(0, (-1, self.most)).transpose(1, 2).flatten(2, 3)

    def apart(self, x):
        """The inverse of together()."""
        x = x.unflatten(2, (self.most, -1)).transpose(1, 2).flatten(0, 1)
        return x if self.full else x.index_select(0, self.slots)

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
class GroupedLayer(DynamicLayer):
    """One layer's keys and values while decoding: each prompt's once for all its responses, and what every response adds."""

    def __init__(self, layer, groups):
        super().__init__()
        self.is_initialized, self.dtype, self.device = True, layer.dtype, layer.device
        self.handed_out, self.attended = (None, None), False
        self.groups, self.prompt, self.length = groups, (layer.keys, layer.values), 0
        self.room = [x.new_empty(len(groups.which), x.shape[1], 0, x.shape[3]) for x in self.prompt]

    def get_seq_length(self):
        return self.prompt[0].shape[2] + self.length

    def update(self, keys, values, *args, **kwargs):
        if self.length == self.room[0].shape[2]:  # DynamicLayer copies everything at every token; here room grows by a half
            more = 16 + self.length // 2
            self.room = [torch.cat([x, x.new_empty(*x.shape[:2], more, x.shape[3])], 2) for x in self.room]
        for room, new in zip(self.room, (keys, values)):
            room[:, :, self.length] = new[:, :, 0]
        self.length += 1
        self.handed_out = tuple(room[:, :, :self.length] for room in self.room)
        self.handed_out[0].grouped = self  # for attend()
        return self.handed_out

    def select(self, rows, prompts, groups):
        self.room, self.prompt = ([x.index_select(0, chosen) for x in of] for of, chosen in ((self.room, rows), (self.prompt, prompts)))
        self.groups = groups

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def shared_windows(model):
    """How many of the keys before it each layer's query sees (None: all), a number a layer; None where rows of one prompt cannot share
    it: there tokens meet in something else than transformers' sdpa attention, or the config has a window that no layer is said to have."""
    try:
        config = model.config.get_text_config(decoder=True)
        kinds, options = get_layer_types_and_kwargs(config)
        if not model._supports_attention_backend or model.config._attn_implementation != "sdpa":
            return None
    except AttributeError:  # such as Mamba's
        return None
    if not {"full_attention", "sliding_attention"}.issuperset(kinds):
        return None
    windows = [option.get("sliding_window") for option in options]
    hidden = [v for k, v in vars(config).items() if k.endswith(("window", "window_size")) and type(v) is int and v > 0]
    return None if hidden and not any(windows) else windows

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
class CopyPrompts(torch.autograd.Function):
    """A prompt's keys or values (prompts, heads, P, width) for each row: which (rows,) says each row's prompt. The gradient is a product
    with ones and zeros: the same sum on every run, and quicker than indexing's (bench/README.md)."""

    @staticmethod
    def forward(ctx, prompts, which):
        ctx.save_for_backward(which)
        ctx.prompts = len(prompts)
        return prompts.index_select(0, which)

    @staticmethod
    def backward(ctx, grad):
        which, = ctx.saved_tensors
        share = torch.nn.functional.one_hot(which, ctx.prompts).to(grad.dtype)
        return (share.T @ grad.flatten(1)).unflatten(1, grad.shape[1:]), None

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
class Packed:
    """Rows of a batch as one sequence of tokens, almost without padding: each prompt once, then the responses without their last
    tokens, in blocks of like length that are padded to their longest. A response attends to its prompt and to itself."""

    def __init__(self, batch, rows, windows=()):
        which, device = same_prompt(batch, rows), rows.device
        self.windows = windows  # a layer's number: its window
        one = rows[which.new_zeros(int(which.max()) + 1).scatter_(0, which, torch.arange(len(rows), device=device))]  # a row of each prompt
        lengths, sizes, wide = batch.prompt_lengths[one], batch.response_lengths[rows], batch.prompt_ids.shape[1]
        column = torch.arange(int(lengths.max()), device=device)
        prompts = batch.prompt_ids[one].gather(1, (wide - lengths[:, None] + column).clamp(max=wide - 1))  # padding to the right
        seen = torch.where(column < lengths[:, None], column, 2**40)  # positions of keys; a padding's is out of sight
        # Of each block: its ids, the positions of its queries and of the keys they may see, which prompt each row has
        self.blocks, starts, offset = [(prompts, column.expand_as(prompts), seen, None)], torch.zeros_like(rows), prompts.numel()
        order, end = sizes.argsort(stable=True), 0
        ordered = sizes[order].tolist()
        while end < len(rows):
            begin, end = end, bisect.bisect_right(ordered, 1.2 * ordered[end] + 2)
            part, n = order[begin:end], ordered[end - 1] - 1
            if n:
                positions = lengths[which[part], None] + torch.arange(n, device=device)
                self.blocks.append((batch.response_ids[rows[part], :n], positions, torch.cat([seen[which[part]], positions], 1), which[part]))
                starts[part] = offset + n * torch.arange(len(part), device=device)
                offset += n * len(part)
        step = torch.arange(ordered[-1], device=device)
        self.mask, last = step < sizes[:, None], which * len(column) + lengths[which] - 1  # (rows, R); each row's last prompt token
        self.said = torch.where(step > 0, starts[:, None] + step - 1, last[:, None])[self.mask]  # where each response token is predicted
        self.masks, hint = {}, torch.zeros(1, 1, offset, 0, device=device)  # four dimensions: models hand it on; no other attention can take it
        hint.packed = self
        ids, positions = (torch.cat([block[i].flatten() for block in self.blocks])[None] for i in (0, 1))
        self.inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": hint, "use_cache": False}

    def mask_of(self, number, window, dtype):
        """What is added to a block's scores, (rows, 1, n, keys); one tensor for all layers, since each keeps its own for the backward pass."""
        if (number, window) not in self.masks:
            _, at, seen, _ = self.blocks[number]
            back = (at[:, :, None] - seen[:, None])[:, None]
            rows, one, n, keys = back.shape
            aligned = torch.zeros(rows, one, n, keys + -keys % 8, dtype=dtype, device=back.device)  # a GPU's kernels copy other widths in each layer
            self.masks[number, window] = aligned[..., :keys].masked_fill_((back < 0) | (back >= (window or 2**40)), -torch.inf)
        return self.masks[number, window]

    def attend(self, module, query, key, value, sliding_window=None, **options):
        """Queries (1, heads, tokens, width), keys and values as they are, to (1, tokens, heads, width). The window is the config's: not
        every model says it here."""
        if options.get("position_bias") is not None:
            raise ValueError("a bias of whole rows cannot be packed")
        sliding_window = self.windows[module.layer_idx]
        out, parts = [], zip(*(x.squeeze(0).split([ids.numel() for ids, *_ in self.blocks], 1) for x in (query, key, value)))
        for number, ((ids, _, _, which), part) in enumerate(zip(self.blocks, parts)):
            q, k, v = (x.unflatten(1, ids.shape).transpose(0, 1) for x in part)  # (rows, heads, n, width)
            if which is None:
                prompt = k, v
            else:
                k, v = (torch.cat([CopyPrompts.apply(p, which), x], 2) for p, x in zip(prompt, (k, v)))
            mask = None if which is None and not sliding_window else self.mask_of(number, sliding_window, q.dtype)
            out.append(sdpa_attention_forward(module, q, k, v, mask, **options)[0].flatten(0, 1))
        return torch.cat(out)[None]

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def attend(module, query, key, value, attention_mask, scaling=None, **options):
    """transformers' sdpa attention, but for two layouts: while decoding, a GroupedLayer's keys of a prompt are read once for all its
    rows, which decoding waits for; of a Packed sequence each response attends to its prompt and to itself."""
    layer, packed = getattr(key, "grouped", None), getattr(attention_mask, "packed", None)
    if packed is not None:
        return packed.attend(module, query, key, value, scaling=scaling, **options), None
    if layer is None or value is not layer.handed_out[1] or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    layer.attended = True
    rows, heads, _, width = query.shape
    query = query.reshape(rows, key.shape[1], -1, width) * (width ** -0.5 if scaling is None else scaling)
    groups, (prompt_keys, prompt_values) = layer.groups, layer.prompt
    prompt = groups.apart(groups.together(query) @ prompt_keys.mT + groups.bias)  # (rows, kv heads, heads / kv heads, P)
    weights = torch.cat([prompt, query @ key.mT], -1).softmax(-1, dtype=torch.float32).to(value.dtype)
    of_prompt, of_response = weights.split([prompt.shape[-1], key.shape[2]], -1)
    out = groups.apart(groups.together(of_prompt) @ prompt_values) + of_response @ value
    return out.reshape(rows, 1, heads, -1), None

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
class Cached:
    """Decoding with the model's own cache. Each prompt is prefilled once and its cache expanded to group_size rows; with share,
    layers that hold all keys keep a prompt's once for all its rows."""

    def __init__(self, model, prompts, group_size, max_new_tokens, pad_id, share):
        device, rows, names = model.device, len(prompts) * group_size, inspect.signature(model.forward).parameters
        prompt_ids = pad_left(prompts, pad_id).to(device)  # (prompts, P)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        mask = (torch.arange(prompt_ids.shape[1], device=device) >= prompt_ids.shape[1] - lengths[:, None]).long()
        self.model, self.positioned = model, "position_ids" in names
        self.name = "cache_params" if "cache_params" in names else "past_key_values"
        self.options = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        out = self.forward(prompt_ids, mask, (mask.cumsum(1) - 1).clamp(min=0), None)
        self.cache, self.logits = getattr(out, self.name), out.logits[:, -1].repeat_interleave(group_size, 0)  # (rows, vocabulary)
        which = torch.arange(rows, device=device) // group_size
        self.groups = Groups(which, torch.where(mask[:, None, None] > 0, 0, torch.finfo(torch.float32).min))
        self.layers = getattr(self.cache, "layers", None) or [self.cache]
        for i, layer in enumerate(self.layers):  # a sliding window's layer stays what it is
            if share and type(layer) is DynamicLayer and layer.is_initialized:
                self.layers[i] = GroupedLayer(layer, self.groups)
            else:
                layer.reorder_cache(which)
        self.shared = [layer for layer in self.layers if isinstance(layer, GroupedLayer)]
        self.mask = torch.cat([mask.repeat_interleave(group_size, 0), mask.new_ones(rows, max_new_tokens)], 1)
        self.seen, self.positions = prompt_ids.shape[1], lengths.repeat_interleave(group_size)  # (rows,) of the next token

    def forward(self, ids, mask, positions, cache):
        options = {**self.options, "position_ids": positions} if self.positioned else self.options
        return self.model(input_ids=ids, attention_mask=mask, use_cache=True, **{self.name: cache}, **options)

    def next(self, tokens):
        """Logits (rows, vocabulary) after one more token (rows,) a row."""
        self.seen += 1
        seen = None if len(self.shared) == len(self.layers) else self.mask[:, :self.seen]  # a grouped layer hides the padding by itself
        out = self.forward(tokens.unsqueeze(-1), seen, self.positions.unsqueeze(-1), self.cache)
        self.positions = self.positions + 1
        return out.logits[:, -1]

    def keep(self, rows):
        """Go on with these rows alone."""
        alive, which = self.groups.which[rows].unique(return_inverse=True)
        self.groups = Groups(which, self.groups.bias[alive])
        for layer in self.layers:
            layer.select(rows, alive, self.groups) if isinstance(layer, GroupedLayer) else layer.reorder_cache(rows)
        self.mask, self.positions = self.mask[rows], self.positions[rows]

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
class Uncached:
    """Decoding without a cache: every row anew at every token. Slow, and right for any causal model."""

    def __init__(self, model, prompts, group_size, max_new_tokens, pad_id):
        width = max(map(len, prompts)) + max_new_tokens
        rows = [list(p) + [pad_id] * (width - len(p)) for p in prompts for _ in range(group_size)]
        self.model, self.ids, self.shared = model, torch.tensor(rows, device=model.device), ()
        self.lengths = torch.tensor([len(p) for p in prompts], device=model.device).repeat_interleave(group_size)
        self.logits = self.last_logits()

    def last_logits(self):
        logits = row_logits(self.model, self.ids[:, :int(self.lengths.max())])
        return logits[torch.arange(len(logits), device=logits.device), self.lengths - 1]

    def next(self, tokens):
        self.ids.scatter_(1, self.lengths.unsqueeze(-1), tokens.unsqueeze(-1))
        self.lengths = self.lengths + 1
        return self.last_logits()

    def keep(self, rows):
        self.ids, self.lengths = self.ids[rows], self.lengths[rows]

AttentionInterface.register("sdpa", attend)

_LOOK_EVERY = {"cpu": 1}  # tokens from one look at who has finished to the next; a GPU has to stop and wait for each answer

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
@torch.no_grad()
def generate(model, prompts, uniform, group_size, max_new_tokens, temperature, eos_ids, pad_id):
    """Respond to each prompt (a list of ids) group_size times; rows of one prompt are neighbours.

    uniform (rows, max_new_tokens) decides every token; None takes the likeliest one. model.sampled_by (grouped | cached | uncached) is
    what choose_sampling() found. Returns ids (rows, max_new_tokens), lengths (rows,), and of the sampling distribution each id's
    log-probability and the entropy, as the ids. A row holds its first EOS and pad after it; a row cut at max_new_tokens holds no EOS.
    """
    device, rows, way = model.device, len(prompts) * group_size, getattr(model, "sampled_by", "grouped")
    if way == "uncached":
        decoder = Uncached(model, prompts, group_size, max_new_tokens, pad_id)
    else:
        decoder = Cached(model, prompts, group_size, max_new_tokens, pad_id, share=way == "grouped" and shared_windows(model) is not None)
    ids = torch.full((rows, max_new_tokens), pad_id, device=device)
    lengths, logprobs, entropies = torch.zeros(rows, dtype=torch.long, device=device), *torch.zeros(2, rows, max_new_tokens, device=device)
    rows = torch.arange(rows, device=device)  # which row of the result each row of the decoder is
    going, logits = torch.ones_like(rows, dtype=torch.bool), decoder.logits
    look = _LOOK_EVERY.get(device.type, 16)
    for t in range(max_new_tokens):
        scaled = (logits.float() / temperature if temperature != 1 else logits.float()).log_softmax(-1)  # (rows still there, vocabulary)
        probabilities = scaled.exp()
        tokens = scaled.argmax(-1) if uniform is None else sample_tokens(probabilities, uniform[rows, t])
        ids[rows, t], logprobs[rows, t] = tokens, scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        entropies[rows, t] = -(probabilities * scaled).sum(-1)
        lengths[rows] += going
        going &= ~torch.isin(tokens, eos_ids)
        left = int(going.sum()) if t % look == 0 else len(rows)
        if left == 0 or t + 1 == max_new_tokens:
            break
        if left <= 0.75 * len(rows):  # drop the finished rows, but not for every single one
            keep = going.nonzero().squeeze(-1)
            decoder.keep(keep)
            rows, tokens, going = rows[keep], tokens[keep], going[keep]
        logits = decoder.next(tokens)
        if t == 0 and not all(layer.attended for layer in decoder.shared):
            # The model changes keys or values before attention sees them: attend() could not add the prompt's
            model.sampled_by = "cached"
            return generate(model, prompts, uniform, group_size, max_new_tokens, temperature, eos_ids, pad_id)
    over = torch.arange(max_new_tokens, device=device) >= lengths[:, None]  # what finished rows said while others went on
    return ids.masked_fill(over, pad_id), lengths, logprobs.masked_fill(over, 0), entropies.masked_fill(over, 0)

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def row_logits(model, ids, last=0):
    """Logits of whole rows (rows, T), the last so many columns or, with 0, all. Padding stands on the right, where a causal model cannot
    see it: no mask, no positions, no cache."""
    wanted, names = {"use_cache": False, "logits_to_keep": last}, inspect.signature(model.forward).parameters
    return model(input_ids=ids, **{key: value for key, value in wanted.items() if key in names}).logits[:, -last:]

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def same_prompt(batch, rows):
    """A number for each of the rows, (rows,), equal where the prompts are."""
    return torch.cat([batch.prompt_lengths[rows, None], batch.prompt_ids[rows]], 1).unique(dim=0, return_inverse=True)[1]

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
class TokenLogprobs(torch.autograd.Function):
    """Log-probability of ids (rows, n) and the entropy under logits (rows, n, vocabulary) / temperature, in float32. One tensor of
    the logits' size waits for the backward pass, where autograd by itself would keep three."""

    @staticmethod
    def forward(ctx, logits, ids, temperature):
        logprobs = (logits.float() / temperature if temperature != 1 else logits.float()).log_softmax(-1)
        entropy = -logprobs.exp().mul_(logprobs).sum(-1)
        ctx.save_for_backward(logprobs, ids.unsqueeze(-1), entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1), entropy

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        """d log p_i / d logit_j = 1[i = j] - p_j;  dH / d logit_j = -p_j (log p_j + H)."""
        logprobs, ids, entropy = ctx.saved_tensors
        factor, grad_entropy = -grad.unsqueeze(-1), grad_entropy.unsqueeze(-1)
        if grad_entropy.any():
            factor = factor - grad_entropy * (logprobs + entropy.unsqueeze(-1))
        out = logprobs.exp().mul_(factor)
        out.scatter_(-1, ids, out.gather(-1, ids) + grad.unsqueeze(-1))
        return (out.div_(ctx.temperature) if ctx.temperature != 1 else out).to(ctx.dtype), None, None

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def response_logits(model, batch, rows):
    """What the model says where it predicts a response token, (tokens, labels), row after row, and where those tokens are, (rows, R) of bool.

    model.scored_by says how: in whole rows, each with its prompt; or packed, where tokens meet in attention alone, and that is attend()'s.
    """
    windows = shared_windows(model)
    if windows is not None and getattr(model, "scored_by", "packed") == "packed":
        packed = Packed(batch, rows, windows)
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        logits = model(**packed.inputs, **({"logits_to_keep": packed.said} if keeps else {})).logits.squeeze(0)
        return logits if keeps else logits[packed.said], packed.mask
    prompts, responses, wide = batch.prompt_lengths[rows, None], batch.response_lengths[rows, None], batch.prompt_ids.shape[1]
    column = torch.arange(int((prompts + responses).max()), device=rows.device).expand(len(rows), -1)
    in_prompt = batch.prompt_ids[rows].gather(1, (wide - prompts + column).clamp(max=wide - 1))
    in_response = batch.response_ids[rows].gather(1, (column - prompts).clamp(0, batch.response_ids.shape[1] - 1))
    first = int(prompts.min()) - 1  # the first column that predicts a response token
    logits = row_logits(model, torch.where(column < prompts, in_prompt, in_response), column.shape[1] - first)
    step = torch.arange(int(responses.max()), device=rows.device)
    mask = step < responses  # (rows, R)
    row, at = mask.nonzero(as_tuple=True)
    return logits[row, prompts.squeeze(-1)[row] - 1 - first + at], mask

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def response_logprobs(model, batch, rows, temperature):
    """Log-probabilities of the response's own ids and the entropy at each: two (rows, R) tensors, in float32, 0 after the response."""
    logits, mask = response_logits(model, batch, rows)
    said = TokenLogprobs.apply(logits, batch.response_ids[rows, :mask.shape[1]][mask], temperature)
    return tuple(torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, x) for x in said)

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
@torch.no_grad()
def single_rows(model, batch):
    """What model says of each response's tokens when it reads the row alone: no padding, mask, cache or other row; (tokens, labels)."""
    said = []
    for i, (p, n) in enumerate(zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist())):
        ids = torch.cat([batch.prompt_ids[i, -p:], batch.response_ids[i, :n]])
        said.append(row_logits(model, ids[None])[0, p - 1:-1].float())
    return torch.cat(said)

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def first_that_agrees(model, constant, kind, ways, attempt):
    """Set model.<kind> to the first of the ways whose attempt() gives (what it found, what it should have found) that agree."""
    for way in ways:
        setattr(model, kind, way)
        try:
            found, wanted, result = attempt()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a model raises that is not made for this way
            why = f"it raises {type(error).__name__}: {first_line(error)}"
            continue
        apart = (found - wanted).abs().max().item()
        if apart <= 1e-3 * (1 + wanted.std(correction=0).item()):  # a mistake is of the size of the logits; rounding is not
            return result
        why = f"with other tokens around them, the same tokens get values {apart:.2g} apart"
    raise UserError(f"{constant}: a model of the type {model.config.model_type!r} cannot be used here, {why}. It must be causal; try it in transformers, or take another")

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
@torch.no_grad()
def choose_sampling(model, constant, prompts, pad_id):
    """Set model.sampled_by to the fastest way to decode that gives each token the log-probability it has in a forward pass of its row
    alone. In float32, whatever DTYPE is: a mistake cannot hide in bfloat16's noise. Returns the samples, a batch for choose_scoring()."""
    ends = torch.arange(0, model.get_input_embeddings().num_embeddings, 7, device=model.device)  # rows leave at different times
    uniform = torch.rand(2 * len(prompts), 10, generator=torch.Generator().manual_seed(0)).to(model.device)

    def attempt():
        ids, lengths, logprobs, _ = generate(model, prompts, uniform, 2, 10, 1.5, ends, pad_id)
        twice = [p for p in prompts for _ in range(2)]
        batch = SimpleNamespace(prompt_ids=pad_left(twice, pad_id).to(model.device), prompt_lengths=torch.tensor([len(p) for p in twice], device=model.device),
                                response_ids=ids, response_lengths=lengths)
        mask = torch.arange(10, device=model.device) < lengths[:, None]
        wanted = (single_rows(model, batch) / 1.5).log_softmax(-1).gather(1, ids[mask].unsqueeze(-1)).squeeze(-1)
        return logprobs[mask], wanted, batch
    ways = ("grouped", "cached", "uncached") if shared_windows(model) is not None else ("cached", "uncached")
    return first_that_agrees(model, constant, "sampled_by", ways, attempt)

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
@torch.no_grad()
def choose_scoring(model, constant, batch):
    """Set model.scored_by to "packed" or, where that says something else than single_rows(), to "rows"."""
    zeros, generator = [p for p in model.parameters() if not p.any()], torch.Generator().manual_seed(0)
    for parameter in zeros:  # a new value head says 0 whatever it reads
        parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    rows = torch.arange(len(batch.response_lengths), device=model.device)
    try:
        first_that_agrees(model, constant, "scored_by", ("packed", "rows") if shared_windows(model) is not None else ("rows",),
                          lambda: (response_logits(model, batch, rows)[0].float(), single_rows(model, batch), None))
    finally:
        for parameter in zeros:
            parameter.zero_()

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def positions_of(model):
    """(How many tokens model can read, why no more); inf where its config knows no bound."""
    config = model.config.get_text_config(decoder=True)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(x for x in ropes.values() if isinstance(x, dict))):
        if rope.get("rope_type") in ("longrope", "dynamic"):
            first = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
            return first, f"its rotary positions ({rope['rope_type']}) change beyond, so what is sampled and what is trained would differ"
    most = getattr(config, "max_position_embeddings", None)
    return (most, "it has no more positions") if isinstance(most, int) and most > 0 else (math.inf, "")

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def micro_batches(batch, rows, size):
    """Cut rows into micro-batches of at most `size` rows, rows of one prompt together, prompts of like length."""
    if not len(rows):
        return ()
    which, lengths = same_prompt(batch, rows), (batch.prompt_lengths + batch.response_lengths)[rows]
    longest = torch.zeros_like(lengths).scatter_reduce(0, which, lengths, "amax")[which]
    return rows[(longest * len(rows) + which).argsort(descending=True, stable=True)].split(size)

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def learning_rate_scale(step, total, warmup, kind, halvings):
    """Factor of the learning rate at step (from 0): linear warm-up, then the schedule; kind None stays at 1.
    Linear and cosine would be 0 one step after the last, as transformers' own: a step at rate 0 would teach
    nothing."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return {None: 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "plateau": 0.5 ** halvings}[kind]

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def seed_everything(seed):
    """Seed every generator and ask for deterministic kernels: without, gradients that meet at one index (a prompt shared by its
    responses) are added in whatever order the threads come, and no two runs are equal, on the CPU either."""
    random.seed(seed), np.random.seed(seed % 2**32), torch.manual_seed(seed)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def get_rng_state():
    """The state of Python's, NumPy's and torch's generators, as plain types and a tensor."""
    name, words, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": (name, words.tolist(), *rest), "torch": torch.get_rng_state()}

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def set_rng_state(state):
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def fsync(path):
    handle = os.open(path, os.O_RDONLY)  # works for folders too
    os.fsync(handle)
    os.close(handle)

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def file_digest(path):
    with open(path, "rb") as file:
        return {"size": os.path.getsize(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def not_saved(path, error):
    why = "the disk is full" if shutil.disk_usage(path.parent).free < 2**26 else first_line(error)
    return UserError(f"{path} could not be saved: {why}; make room and start again, training goes on from the last good checkpoint")

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def write_checkpoint(folder, fill):
    """fill(tmp) writes the files; then the manifest, fsync and rename, so that `folder` is there whole or not at all."""
    tmp = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    try:
        tmp.mkdir(parents=True)
        fill(tmp)
        manifest = {str(p.relative_to(tmp)): file_digest(p) for p in sorted(tmp.rglob("*")) if p.is_file()}
        (tmp / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for path in [*tmp.rglob("*"), tmp]:
            fsync(path)
        os.rename(tmp, folder)
        fsync(folder.parent)
    except Exception as error:  # a failed write is an OSError, torch.save's a RuntimeError, safetensors' its own
        shutil.rmtree(tmp, ignore_errors=True)
        raise not_saved(folder, error) from None

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def checkpoint_fault(folder):
    """Why a checkpoint cannot be trusted, or None: its files must be those of its manifest, to the byte."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        files = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json"}
        for name in sorted({"training_state.pt", *manifest, *files}):
            if name not in files or file_digest(files[name]) != manifest.get(name):
                return f"{name} is {'not what was saved' if name in files else 'missing'}"
            if folder.resolve() not in files[name].resolve().parents:
                return f"{name} points out of the checkpoint"
    except (OSError, ValueError, AttributeError) as error:
        return f"manifest.json: {error}"

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def lock_folder(folder):
    """An open file whose lock says that this process writes into the folder. The kernel lets go of it when the process ends, however it ends."""
    file = open(Path(folder) / ".lock", "a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        raise UserError(f"OUTPUT_DIR = {str(folder)!r} is in use by another run (process {file.read(20).strip() or '?'}): wait for it, stop it, or set another OUTPUT_DIR") from None
    except OSError:
        pass  # a file system without locks
    file.truncate(0)
    print(os.getpid(), file=file, flush=True)
    return file

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def list_checkpoints(output_dir):
    """[(N, step_N/)] of a run, oldest first."""
    return sorted((int(p.name[5:]), p) for p in Path(output_dir).glob("step_*") if p.name[5:].isdecimal())

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def choose_checkpoint(resume, output_dir, say):
    """The checkpoint to go on from, or None to start afresh; asks at a terminal when RESUME is "ask"."""
    if resume not in ("ask", "yes", "no"):
        if fault := checkpoint_fault(Path(resume)):
            raise UserError(f"the checkpoint {resume} cannot be resumed from: {fault}")
        return Path(resume)
    found = list_checkpoints(output_dir) if resume != "no" else []
    for _, folder in reversed(found):
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
    if found:
        raise UserError(f"no checkpoint in {output_dir} is whole: put a good copy back, or start afresh with RESUME=no, which keeps the run in {output_dir}/old_<time>/")

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def move_aside(paths, output_dir, say):
    """Keep what a new start would overwrite: move it to OUTPUT_DIR/old_<time>/."""
    if paths:
        old = Path(output_dir) / time.strftime("old_%Y%m%d_%H%M%S")
        while old.exists():  # two within a second
            old = old.with_name(old.name + "_")
        old.mkdir()
        for path in paths:
            os.rename(path, old / path.name)
        say(f"Moved {', '.join(sorted(p.name for p in paths))} of an earlier run to {old}")

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def run_facts(device):
    """Versions, git commit and device, for training_config.json."""
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True) if shutil.which("git") else None
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "git_commit": (git.stdout.strip() or None) if git else None, "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} ({platform.machine()})"}

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def read_metrics(path):
    """The records of metrics.jsonl with their finite numbers; a line that is none, by a hand's or a disk's doing, is left out."""
    records = []
    with open(path, errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int) and record.get("phase") in ("train", "eval", "mine"):
                records.append({k: v for k, v in record.items() if k == "phase" or isinstance(v, (int, float)) and abs(v) < 1e300})
    return [r for r in records if "step" in r]

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def draw_plot(records, path, title, panels):
    """A grid of panels, each (y label, metrics): training faint with its rolling mean, evaluation as points from a dashed start."""
    from matplotlib.figure import Figure
    height = math.ceil(len(panels) / 3)
    figure = Figure(figsize=(16, 0.8 + 3.4 * height))
    inch = 1 / figure.get_figheight()
    figure.subplots_adjust(left=0.055, right=0.99, bottom=0.5 * inch, top=1 - 0.6 * inch, wspace=0.22, hspace=0.25)  # matplotlib's own layouts draw everything twice
    figure.suptitle(title, y=1 - 0.2 * inch)
    for number, (label, keys) in enumerate(panels, 1):
        axis = figure.add_subplot(height, 3, number, xlabel="training step", ylabel=label)
        axis.grid(alpha=0.3)
        axis.ticklabel_format(axis="y", scilimits=(-3, 4), useOffset=False)  # short labels stay inside
        for color, (key, phase) in enumerate((key, phase) for key in keys for phase in ("train", "eval")):
            points = [(r["step"], r[key]) for r in records if r["phase"] == phase and r.get(key) is not None]
            if points and phase == "train":
                x, y = np.array(points, dtype=float).T
                window = max(1, len(y) // 12)
                axis.plot(x, y, color=f"C{color}", alpha=0.25)
                axis.plot(x, [y[max(0, i - window):i].mean() for i in range(1, len(y) + 1)], color=f"C{color}", label=f"{key}, mean of {window}")
            elif points:
                axis.plot(*zip(*points), "o-", color=f"C{color}", markersize=5, linewidth=0.8, label=f"{key}, held out")
                axis.axhline(points[0][1], color=f"C{color}", linestyle="--", linewidth=0.8)
        if axis.lines:
            axis.legend(fontsize=8)
    figure.savefig(f"{path}.tmp", format="png", dpi=100)
    os.replace(f"{path}.tmp", path)

# ================================================================ the maths of PPO

def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum()

def token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef):
    """Reward of each token, (rows, R): the KL penalty everywhere, the score (rows,) once, at the last response token."""
    rewards = -kl_coef * (logprobs - ref_logprobs) * mask
    rewards[torch.arange(len(scores)), mask.sum(1).long() - 1] += scores
    return rewards

def gae(token_rewards, values, mask, gamma, lam):
    """Generalised advantage estimation (arXiv 1506.02438); all (rows, R). V after the last response token is 0."""
    advantages, running, next_value, values = torch.zeros_like(values), 0.0, 0.0, values * mask
    for t in reversed(range(values.shape[1])):
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = running = (delta + gamma * lam * running) * mask[:, t]
        next_value = values[:, t]
    return advantages

def masked_variance(x, mask):
    return masked_mean((x - masked_mean(x, mask)) ** 2, mask)

def whiten(x, mask):
    """Mean 0 and variance 1 over the mask; 0 outside it."""
    return (x - masked_mean(x, mask)) * torch.rsqrt(masked_variance(x, mask) + 1e-8) * mask

def policy_loss(logprobs, old_logprobs, advantages, clip_range):
    """Clipped surrogate of each token, (rows, R). Source: arXiv 1707.06347, equation 7."""
    ratio = (logprobs - old_logprobs).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages)

def value_loss(values, old_values, returns, clip_range):
    """Half the squared error of each token, (rows, R), clipped around the rollout's value; clip_range 0: not clipped."""
    clipped = old_values + (values - old_values).clamp(-clip_range, clip_range) if clip_range > 0 else values
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)

def adapt_kl_coef(kl_coef, kl, target, responses, horizon):
    """Proportional controller of the KL coefficient. Source: arXiv 1909.08593, section 2.2, whose gain of 0.1
    a step is responses / horizon here. The paper clips the error so that one step moves the coefficient by a
    fifth at most: with a gain above 1 the factor itself is clipped to that, or it could be negative, and the
    penalty a reward."""
    factor = 1 + max(-0.2, min(0.2, kl / target - 1)) * responses / horizon
    return kl_coef * max(0.8, min(1.2, factor))

# ================================================================ the trainer

class PPOTrainer:
    """Holds actor, critic, reference, reward model, data and the run's files; train() is the algorithm.
    resume_from_checkpoint overrides the constant RESUME: a path, "ask", "yes" or "no"."""
    run_files = ("step_*", "best", "*.png", "training_config.json")  # what a new start moves aside, beside logs/

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        if KL_TARGET and KL_COEF == 0:
            raise UserError(f"KL_TARGET = {KL_TARGET} does nothing with KL_COEF = 0 and so no reference: "
                            "give KL_COEF a value to start from, such as 0.01, or set KL_TARGET to None")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.log, self.unlogged, self.wandb, self.stop_signal, self.lock, self.strict = None, [], None, None, None, False
        found = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        try:
            self.device = torch.zeros(1, device=found if DEVICE == "auto" else DEVICE).device
        except (RuntimeError, AssertionError):
            raise UserError(f"DEVICE = {DEVICE!r} is not here; auto takes {found}") from None
        self.lock = lock_folder(OUTPUT_DIR) if Path(OUTPUT_DIR).is_dir() else None
        self.checkpoint = choose_checkpoint(resume_from_checkpoint or RESUME, OUTPUT_DIR, self.say)
        seed_everything(SEED)
        self.load_models()
        self.load_data()
        self.check_models()
        # What a checkpoint keeps beside weights, optimizers and generators; order is this epoch's permutation of the prompts
        self.state = SimpleNamespace(
            step=0, epoch=0, order=None, cursor=0, prompts=len(self.train_rows), skipped=0, kl_coef=KL_COEF, best_reward=-math.inf,
            patience_reward=-math.inf, evals_since_best=0, halvings=0, log_bytes={}, ways={}, wandb_id=None)
        steps_per_epoch = math.ceil(len(self.train_rows) / (BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS))
        self.total_steps = min(NUM_EPOCHS * steps_per_epoch, MAX_STEPS or math.inf)
        if self.checkpoint:
            self.load_checkpoint(self.checkpoint)
        if not 0 < EVAL_EVERY_N_STEPS < self.total_steps:
            self.warn_of_idle_patience(f"EVAL_EVERY_N_STEPS = {EVAL_EVERY_N_STEPS} evaluates before and "
                                       f"after the {self.total_steps} steps alone")

    def load_models(self):
        """Actor and critic come from the checkpoint when there is one; reference and reward model never change."""
        at, critic = self.checkpoint, CRITIC_MODEL or ACTOR_MODEL
        self.tokenizer = load_tokenizer(ACTOR_MODEL, "ACTOR_MODEL")
        self.actor = load_model(AutoModelForCausalLM, at / "policy" if at else ACTOR_MODEL, "ACTOR_MODEL").to(self.device)
        self.critic = load_model(AutoModelForTokenClassification, at / "critic" if at else critic, "CRITIC_MODEL", new_head=not at).to(self.device)
        self.reference = self.reward_model = None
        if KL_COEF > 0:
            self.reference = load_model(AutoModelForCausalLM, REFERENCE_MODEL or ACTOR_MODEL, "REFERENCE_MODEL").to(self.device).requires_grad_(False)
        if REWARD_MODEL:
            self.reward_model = load_model(AutoModelForSequenceClassification, REWARD_MODEL, "REWARD_MODEL").to(self.device).requires_grad_(False)
            self.reward_tokenizer = load_tokenizer(REWARD_MODEL, "REWARD_MODEL")
            if self.reward_model.config.num_labels != 1 or not hasattr(self.reward_model, "score"):
                raise UserError(f"REWARD_MODEL = {REWARD_MODEL!r} must be a decoder with a classification head of one label, not {self.reward_model.config.num_labels}")
        if not REWARD_MODEL and not REWARD_FUNCTIONS:
            raise UserError("REWARD_MODEL is None and REWARD_FUNCTIONS is empty: give at least one of them")
        self.reward_functions, right = resolve_rewards(REWARD_FUNCTIONS, "REWARD_FUNCTIONS"), resolve_rewards([(ACCURACY_FUNCTION, 1.0)], "ACCURACY_FUNCTION")[0][1]
        self.accuracy_function = lambda *lists: guarded("ACCURACY_FUNCTION", right, *lists).tolist()
        ends = self.actor.generation_config.eos_token_id  # chat models may have several
        self.eos_ids = torch.tensor(sorted({self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}), device=self.device)
        self.embeddings, pad = self.actor.get_input_embeddings().num_embeddings, self.tokenizer.pad_token_id
        self.pad_id = self.tokenizer.eos_token_id if pad is None or pad >= self.embeddings else pad  # no model may look at it, but all look it up
        if self.critic.get_input_embeddings().num_embeddings < min(len(self.tokenizer), self.embeddings):
            raise UserError(f"CRITIC_MODEL = {critic!r} knows fewer tokens than the actor and its tokenizer: take a critic of the actor's family")
        self.models = {"policy": self.actor, "critic": self.critic}  # what is trained and saved, by its folder's name
        self.readers = {"ACTOR_MODEL": self.actor, "CRITIC_MODEL": self.critic, "REFERENCE_MODEL": self.reference}  # what scores responses, by its constant
        self.set_positions()
        self.optimizers = {name: torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=WEIGHT_DECAY, fused=self.device.type != "mps")
                           for (name, model), rate in zip(self.models.items(), (LEARNING_RATE, CRITIC_LEARNING_RATE))}
        for model in self.models.values() if GRADIENT_CHECKPOINTING else ():
            model.activation_checkpointing_enable({"use_reentrant": False})

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def load_data(self):
        self.train_rows = self.encode(load_rows(TRAIN_DATASETS, "TRAIN_DATASETS", MAX_TRAIN_PROMPTS), "TRAIN_DATASETS")
        self.eval_rows = self.encode(load_rows(EVAL_DATASETS, "EVAL_DATASETS", MAX_EVAL_PROMPTS), "EVAL_DATASETS")
        if not self.train_rows:
            raise UserError("TRAIN_DATASETS leaves no prompt to train on: raise MAX_PROMPT_TOKENS or give it data")

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def encode(self, rows, constant):
        """Add the prompt's ids to each row; rows longer than MAX_PROMPT_TOKENS are left out, and said so."""
        tokenizer, longest = self.tokenizer, 0
        for row in rows:
            text = PROMPT_TEMPLATE.replace("{input}", row["prompt"])
            if tokenizer.chat_template:
                text = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
            row["ids"] = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
            if row["ids"][-1:] == [tokenizer.eos_token_id] and not text.endswith(tokenizer.eos_token):
                row["ids"].pop()  # some tokenizers end every text; a response would begin after the end
            if not row["ids"]:
                raise UserError(f"{constant}: {row.get('id', 'the prompt')}: its tokenizer makes no token of it; mend or delete it")
            if max(row["ids"]) >= self.embeddings:
                raise UserError(f"ACTOR_MODEL = {ACTOR_MODEL!r}: its tokenizer gives the id {max(row['ids'])} ({constant}: {row.get('id', 'the prompt')}), its model "
                                f"knows {self.embeddings} ids: take the tokenizer it was trained with, or resize its embeddings")
            longest = max(longest, len(row["ids"]))
        kept = [row for row in rows if len(row["ids"]) <= MAX_PROMPT_TOKENS]
        if len(kept) < len(rows):
            self.say(f"{constant}: left out {len(rows) - len(kept)} of {len(rows)} prompts, longer than MAX_PROMPT_TOKENS = {MAX_PROMPT_TOKENS} (longest {longest})")
        most, whose, why = self.positions
        needed = max((len(row["ids"]) for row in kept), default=0) + MAX_NEW_TOKENS
        if needed > most:
            raise UserError(f"{whose} reads {most} tokens at most ({why}); a prompt of {constant} and MAX_NEW_TOKENS = {MAX_NEW_TOKENS} are {needed}: lower "
                            f"MAX_NEW_TOKENS, or MAX_PROMPT_TOKENS, which leaves longer prompts out")
        return kept

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def set_positions(self):
        """(Most tokens that every model can read, the constant of the one that reads fewest, why no more)."""
        self.readers = {constant: model for constant, model in self.readers.items() if model is not None}
        limits = {constant: positions_of(model) for constant, model in self.readers.items()}
        whose = min(limits, key=lambda constant: limits[constant][0])
        self.positions = limits[whose][0], whose, limits[whose][1]

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def check_models(self):
        """Find out how each model samples and scores what it should, on four prompts cut to mixed lengths; draws none of the run's
        random numbers."""
        prompts = [self.train_rows[i % len(self.train_rows)]["ids"][:length] for i, length in enumerate((32, 3, 17, 8))]
        batch = choose_sampling(self.actor, "ACTOR_MODEL", prompts, self.pad_id)
        for constant, model in self.readers.items():
            choose_scoring(model, constant, batch)
        if self.device.type == "cuda":
            self.try_strict_kernels(batch)

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def try_strict_kernels(self, batch):
        """Whether the backward pass can do without any kernel whose sums come in another order on another run. Attention on a GPU has
        such kernels and takes others only where nothing else is tolerated."""
        rows, self.strict = torch.arange(len(batch.response_lengths), device=self.device), True
        self.recompute(True)
        try:
            for name in self.optimizers:
                with self.autocast():
                    loss = response_logits(self.models[name], batch, rows)[0].float().logsumexp(-1).sum()
                self.backward(loss)
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            self.strict = False
            self.say(f"WARNING: on this device a resumed run is not the same to the last bit: {first_line(error)}")
        self.recompute(False)
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def backward(self, loss):
        if not self.strict:
            return loss.backward()
        torch.use_deterministic_algorithms(True)
        try:
            loss.backward()
        finally:
            torch.use_deterministic_algorithms(True, warn_only=True)

    # ------------------------------------------------------------ the algorithm

    def train(self):
        """Roll out, score, estimate advantages, update; log, evaluate, save. Returns the last evaluation."""
        state, metrics = self.state, {}
        self.open_run()
        handlers = self.catch_signals()
        try:
            if state.step == 0 and not self.checkpoint:
                metrics = self.evaluate_and_log()
            while state.step < self.total_steps and not self.stop_signal and not 0 < EARLY_STOPPING_PATIENCE <= state.evals_since_best:
                batch = self.rollout(self.next_rows())
                self.score(batch)
                self.compute_advantages(batch)
                train_metrics = self.update(batch)
                state.step += 1
                self.log_step(batch, train_metrics)
                if state.step == self.total_steps or EVAL_EVERY_N_STEPS and state.step % EVAL_EVERY_N_STEPS == 0:
                    metrics = self.evaluate_and_log()
                if SAVE_EVERY_N_STEPS and state.step % SAVE_EVERY_N_STEPS == 0:
                    self.save_checkpoint()
            self.save_checkpoint()
            self.finish()
        finally:
            self.bar.close()
            self.lock.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return metrics

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def next_rows(self, count=None):
        """The next prompts, BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS or fewer at an epoch's end; each epoch has its own permutation."""
        state = self.state
        if state.cursor == 0:
            state.epoch += 1
            state.order = torch.randperm(len(self.train_rows), generator=torch.Generator().manual_seed(SEED + state.epoch))
        chosen = state.order[state.cursor:state.cursor + (count or BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS)].tolist()
        state.cursor = (state.cursor + len(chosen)) % len(self.train_rows)
        return [self.train_rows[i] for i in chosen]

    # same in: ppo/ppo.py, grpo/grpo.py
    def rollout(self, prompts):
        """GROUP_SIZE sampled responses to each prompt: a batch whose tensors are (prompts * GROUP_SIZE, ...)."""
        started = time.perf_counter()
        uniform = torch.rand(len(prompts) * GROUP_SIZE, MAX_NEW_TOKENS)  # drawn at once: BATCH_SIZE does not matter to it
        batch = self.respond([row["ids"] for row in prompts], uniform, GROUP_SIZE)
        batch.rows = [row for row in prompts for _ in range(GROUP_SIZE)]
        batch.prompt_ids = pad_left([row["ids"] for row in batch.rows], self.pad_id).to(self.device)
        batch.prompt_lengths = torch.tensor([len(row["ids"]) for row in batch.rows], device=self.device)
        batch.seconds = {"rollout": time.perf_counter() - started}
        return batch

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def respond(self, prompts, uniform, group_size=1, temperature=None):
        """generate() over lists of ids, BATCH_SIZE at a time; uniform None is greedy."""
        parts, size = [], BATCH_SIZE * group_size
        with self.autocast():
            for i in range(0, len(prompts), BATCH_SIZE):
                chunk = None if uniform is None else uniform[i * group_size:i * group_size + size].to(self.device)
                parts.append(generate(self.actor, prompts[i:i + BATCH_SIZE], chunk, group_size, MAX_NEW_TOKENS, temperature or TEMPERATURE, self.eos_ids, self.pad_id))
        ids, lengths, logprobs, entropies = (torch.cat(x) for x in zip(*parts))
        ids, logprobs, entropies = (x[:, :lengths.max()] for x in (ids, logprobs, entropies))
        responses = self.tokenizer.batch_decode([row[:n] for row, n in zip(ids.tolist(), lengths.tolist())], skip_special_tokens=True)
        return SimpleNamespace(
            response_ids=ids, response_lengths=lengths, logprobs=logprobs, entropies=entropies, responses=responses,
            response_mask=(torch.arange(ids.shape[1], device=self.device) < lengths[:, None]).float(),
            truncated=~torch.isin(ids.gather(1, lengths[:, None] - 1).squeeze(1), self.eos_ids))

    @torch.no_grad()
    def score(self, batch):
        """Scores of the responses; reference log-probabilities and values of their tokens."""
        started, mask = time.perf_counter(), batch.response_mask
        scores, batch.parts = self.rewards_of([r["prompt"] for r in batch.rows], batch.responses, [r["answer"] for r in batch.rows])
        batch.scores = scores - MISSING_EOS_PENALTY * batch.truncated
        batch.values, batch.ref_logprobs = torch.zeros_like(mask), torch.zeros_like(mask) if self.reference else batch.logprobs
        with self.autocast():
            for rows in micro_batches(batch, torch.arange(len(mask), device=self.device), self.rows_at_once(batch)):
                width = int(batch.response_lengths[rows].max())
                batch.values[rows, :width] = self.response_values(batch, rows)
                if self.reference:
                    batch.ref_logprobs[rows, :width] = response_logprobs(self.reference, batch, rows, TEMPERATURE)[0]
        batch.seconds["score"] = time.perf_counter() - started

    def response_values(self, batch, rows):
        """V before each response token is seen, (rows, R): what the critic says at the position before it."""
        values, mask = response_logits(self.critic, batch, rows)
        return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values[:, 0].float())

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def rewards_of(self, prompts, responses, answers):
        """compute_rewards(), checked, and the parts it left behind."""
        self.reward_parts = {}
        return guarded("compute_rewards", self.compute_rewards, prompts, responses, answers).to(self.device), self.reward_parts

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def compute_rewards(self, prompts, responses, answers):
        """Score of each response, (rows,); edit or override freely. What is put into self.reward_parts is logged."""
        total = torch.zeros(len(responses))
        if self.reward_model:
            self.reward_parts["reward_model"] = self.reward_model_score(prompts, responses).cpu()
            total += REWARD_MODEL_WEIGHT * self.reward_parts["reward_model"]
        for name, function, weight in self.reward_functions:
            self.reward_parts[name] = guarded(f"REWARD_FUNCTIONS: {name}", function, prompts, responses, answers)
            total += weight * self.reward_parts[name]
        return total

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    @torch.no_grad()
    def reward_model_score(self, prompts, responses):
        """The reward model's score of each response (rows,), read at its last real token; two strings give one number."""
        if isinstance(prompts, str):
            return self.reward_model_score([prompts], [responses])[0]
        tokenizer, rows, scores = self.reward_tokenizer, [], torch.zeros(len(responses), device=self.device)
        for prompt, response in zip(prompts, responses):
            text = PROMPT_TEMPLATE.replace("{input}", prompt)
            chat = [{"role": "user", "content": text}, {"role": "assistant", "content": response}]
            text = tokenizer.apply_chat_template(chat, tokenize=False) if tokenizer.chat_template else text + response + tokenizer.eos_token
            ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
            rows.append(ids[:-1] if ids[-2:] == [tokenizer.eos_token_id] * 2 and not response.endswith(tokenizer.eos_token) else ids)  # some end every text
        most, why = positions_of(self.reward_model)
        if max(map(len, rows)) > most:
            raise UserError(f"REWARD_MODEL = {REWARD_MODEL!r} reads {most} tokens at most ({why}); a prompt with its response has {max(map(len, rows))}")
        lengths = torch.tensor([len(row) for row in rows])
        with self.autocast():
            for chunk in lengths.argsort(stable=True).split(min(64, BATCH_SIZE * GROUP_SIZE)):
                width = int(lengths[chunk].max())  # padded right, where a causal model cannot see it
                ids = torch.tensor([rows[i] + [0] * (width - len(rows[i])) for i in chunk], device=self.device)
                hidden = self.reward_model.base_model(input_ids=ids, use_cache=False).last_hidden_state
                last = hidden[torch.arange(len(chunk), device=self.device), (lengths[chunk] - 1).to(self.device)]
                scores[chunk.to(self.device)] = self.reward_model.score(last).squeeze(-1).float()
        return scores

    # same in: ppo/ppo.py, grpo/grpo.py
    def check_first_ratio(self, steps):
        """The run's first optimizer step sees the very policy that sampled: its ratios are 1, in bfloat16 but for rounding."""
        apart = [step.pop("log_ratio") for step in steps][0]
        if self.state.step == 0 and DTYPE == "float32" and steps[0]["ratio_max"] > 1e-3:
            raise UserError(f"the first update sees a ratio {steps[0]['ratio_max']:.2g} away from 1: ACTOR_MODEL scores a response otherwise than it sampled it")
        if self.state.step == 0 and apart > 0.05:
            raise UserError(f"the first update sees log-probabilities {apart:.2g} nats a token away from the sampler's: DTYPE = {DTYPE!r} does not suit ACTOR_MODEL")

    def compute_advantages(self, batch):
        """GAE on the token rewards; returns come from the advantages as they are, the policy sees them whitened."""
        mask, state = batch.response_mask, self.state
        state.kl_coef = state.kl_coef if KL_TARGET else KL_COEF  # only the controller's coefficient outlives a changed constant
        rewards = token_rewards(batch.scores, batch.logprobs, batch.ref_logprobs, mask, state.kl_coef)
        batch.raw_advantages = gae(rewards, batch.values, mask, GAMMA, LAM)
        batch.returns = batch.raw_advantages + batch.values
        batch.advantages = whiten(batch.raw_advantages, mask) if WHITEN_ADVANTAGES else batch.raw_advantages

    def update(self, batch):
        """GROUP_EPOCHS passes of MINI_BATCHES optimizer steps over the batch; returns the step's metrics."""
        started, state, steps = time.perf_counter(), self.state, []
        kind = LR_SCHEDULER_TYPE if USE_LR_SCHEDULER else None
        scale = learning_rate_scale(state.step, self.total_steps, WARMUP_STEPS, kind, state.halvings)
        for optimizer, rate in zip(self.optimizers.values(), (LEARNING_RATE, CRITIC_LEARNING_RATE)):
            optimizer.param_groups[0]["lr"] = rate * scale
        self.recompute(True)
        for _ in range(GROUP_EPOCHS):
            rows = torch.randperm(len(batch.rows)) if MINI_BATCHES > 1 else torch.arange(len(batch.rows))
            steps += [self.optimizer_step(batch, chunk) for chunk in rows.to(self.device).chunk(MINI_BATCHES)]
        self.recompute(False)
        self.check_first_ratio(steps)
        metrics = {key: sum(step[key] for step in steps) / len(steps) for key in steps[0]}
        metrics.update(ratio_max_first=steps[0]["ratio_max"], learning_rate=LEARNING_RATE * scale, kl_coef=state.kl_coef)
        metrics["kl"] = masked_mean(batch.logprobs - batch.ref_logprobs, batch.response_mask).item()
        if self.reference and KL_TARGET and math.isfinite(metrics["kl"]):
            state.kl_coef = adapt_kl_coef(state.kl_coef, metrics["kl"], KL_TARGET, len(batch.rows), KL_HORIZON)
        batch.seconds["update"] = time.perf_counter() - started
        return metrics

    def optimizer_step(self, batch, rows):
        """One step of both optimizers on `rows`, in micro-batches whose gradients add up to that of the whole."""
        tokens, metrics = batch.response_mask[rows].sum(), defaultdict(float)
        for micro in micro_batches(batch, rows, self.rows_at_once(batch)):
            width = int(batch.response_lengths[micro].max())
            mask, old, advantages, old_values, returns = (x[micro, :width] for x in (
                batch.response_mask, batch.logprobs, batch.advantages, batch.values, batch.returns))
            mean = lambda x: (x * mask).sum() / tokens  # over the whole optimizer step, of which this is a part
            with self.autocast():
                logprobs, entropy = response_logprobs(self.actor, batch, micro, TEMPERATURE)
            policy_losses = policy_loss(logprobs, old, advantages, CLIP_RANGE)
            self.backward(mean(policy_losses - ENTROPY_COEF * entropy))
            with self.autocast():
                values = self.response_values(batch, micro)
            value_losses = value_loss(values, old_values, returns, VALUE_CLIP_RANGE)
            self.backward(mean(VALUE_LOSS_COEF * value_losses))
            log_ratio = (logprobs.detach() - old) * mask
            ratio = log_ratio.exp()
            metrics["log_ratio"] += mean(log_ratio.abs()).item()
            for key, x in {"policy_loss": policy_losses, "value_loss": value_losses, "entropy": entropy, "approx_kl": ratio - 1 - log_ratio,
                           "clip_fraction": ((ratio - 1) * advantages.sign() > CLIP_RANGE).float()}.items():
                metrics[key] += mean(x.detach()).item()
            metrics["ratio_max"] = max(metrics["ratio_max"], (ratio - 1).abs().max().item())
        metrics["grad_norm"], metrics["critic_grad_norm"] = self.clip_and_step(metrics["policy_loss"] + metrics["value_loss"], batch, rows)
        return metrics

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def clip_and_step(self, loss, batch, rows):
        """Clip and step each optimizer, return the gradient norms. Where loss or gradient is not finite the weights stay
        as they are and the prompts are named; five in a row end the run."""
        norms = [torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], MAX_GRAD_NORM).item() for optimizer in self.optimizers.values()]
        finite = all(map(math.isfinite, (loss, *norms)))
        for optimizer in self.optimizers.values():
            if finite:
                optimizer.step()
            optimizer.zero_grad()
        self.state.skipped = 0 if finite else self.state.skipped + 1
        if not finite:
            ids = sorted({batch.rows[i]["id"] for i in rows.tolist()})
            self.say(f"WARNING: step {self.state.step + 1}: loss or gradient not finite, optimizer step skipped; prompts {' '.join(ids)}")
        if self.state.skipped == 5:
            raise UserError("five optimizer steps in a row were not finite: lower LEARNING_RATE, or look at the prompts named in the log")
        return norms

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def rows_at_once(self, batch):
        """Rows of a micro-batch: those of BATCH_SIZE prompts, but at most 64, and fewer where their logits would take more than 64 MiB,
        on a GPU 1/16 of its memory (a large vocabulary)."""
        room = torch.cuda.mem_get_info(self.device)[1] // 16 if self.device.type == "cuda" else 2**26
        return max(1, min(64, BATCH_SIZE * GROUP_SIZE, room // (4 * self.actor.config.get_text_config().vocab_size * batch.response_ids.shape[1])))

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16) if DTYPE == "bfloat16" else nullcontext()

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def recompute(self, on):
        """Gradient checkpointing is for layers in training mode: only they are put into it, so dropout stays off."""
        for model in self.models.values() if GRADIENT_CHECKPOINTING else ():
            for layer in (m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)):
                layer.training = on

    # ------------------------------------------------------------ evaluation

    def evaluate(self, prompts=None, answers=None):
        """Metrics of greedy and sampled responses to prompts (texts; default: the held-out set). Override to add yours.
        The sampled responses have their own random stream, so evaluating never changes training."""
        rows = self.eval_rows
        if prompts is not None:
            rows = self.encode([{"prompt": p, "answer": a} for p, a in zip(prompts, answers or [None] * len(prompts))], "evaluate")
        if not rows:
            return {}
        prompts, answers, ids = ([row[key] for row in rows] for key in ("prompt", "answer", "ids"))
        metrics, uniform = {}, torch.rand(len(rows), MAX_NEW_TOKENS, generator=torch.Generator().manual_seed(SEED + 1))
        for name, noise in (("greedy", None), ("sampled", uniform)):
            batch = self.respond(ids, noise)
            if None not in answers:
                metrics[f"accuracy_{name}"] = float(np.mean(self.accuracy_function(prompts, batch.responses, answers)))
        scores, parts = self.rewards_of(prompts, batch.responses, answers)
        return {**metrics, "reward": scores.mean().item(), **{f"reward/{k}": v.mean().item() for k, v in parts.items()},
                "response_length": batch.response_lengths.float().mean().item(), "truncated_fraction": batch.truncated.float().mean().item()}

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def generate_response(self, prompt, greedy=True):
        """One response to one prompt text; greedy=False samples from the global random stream."""
        rows = self.encode([{"prompt": prompt}], "generate_response")
        if not rows:
            raise UserError(f"the prompt is longer than MAX_PROMPT_TOKENS = {MAX_PROMPT_TOKENS}")
        return self.respond([rows[0]["ids"]], None if greedy else torch.rand(1, MAX_NEW_TOKENS)).responses[0]

    # same in: ppo/ppo.py, grpo/grpo.py
    def evaluate_and_log(self):
        """Evaluate, log, keep the best policy, count patience."""
        started, state, metrics = time.perf_counter(), self.state, self.evaluate()
        if metrics:
            self.write_metrics("eval", {**metrics, "seconds/evaluate": time.perf_counter() - started})
            self.say(f"step {state.step}, held out: " + "  ".join(f"{k} {v:.3f}" for k, v in metrics.items()))
            self.count_patience(metrics["reward"])
            if metrics["reward"] > state.best_reward:
                state.best_reward = metrics["reward"]
                self.save_best(metrics)
        elif state.step == 0:
            self.warn_of_idle_patience("EVAL_DATASETS gives nothing to evaluate")
        return metrics

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def count_patience(self, value):
        """Count evaluations that are not better, by more than EARLY_STOPPING_THRESHOLD, than the last one
        that was. best/ is kept apart from this: it follows the highest value, by however little."""
        state = self.state
        if value > state.patience_reward + EARLY_STOPPING_THRESHOLD:
            state.patience_reward, state.evals_since_best = value, 0
        else:
            state.evals_since_best += 1
            state.halvings += state.evals_since_best % PLATEAU_PATIENCE == 0

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def warn_of_idle_patience(self, why):
        """Early stopping and plateau act on evaluations: where there are none during the run, say so."""
        idle = [f"EARLY_STOPPING_PATIENCE = {EARLY_STOPPING_PATIENCE}"] if EARLY_STOPPING_PATIENCE else []
        if USE_LR_SCHEDULER and LR_SCHEDULER_TYPE == "plateau":
            idle.append("LR_SCHEDULER_TYPE = 'plateau'")
        if idle:
            self.say(f"WARNING: nothing comes of {' and '.join(idle)}: {why}")

    # ------------------------------------------------------------ the run's files

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def say(self, text, terminal=True):
        """One line to the terminal, above the bar, and to the log file."""
        text = printable(text)
        if terminal:
            tqdm.write(text)
            sys.stdout.flush()
        if self.log:
            self.log.write(text + "\n")
            self.log.flush()
        else:
            self.unlogged.append(text)  # until there is a log file

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def open_run(self):
        """Make OUTPUT_DIR ready: cut the logs back to the checkpoint, or move an earlier run aside; open the files."""
        out, state = Path(OUTPUT_DIR), self.state
        logs = out / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.lock = lock_folder(out) if self.lock is None or self.lock.closed else self.lock
        for stale in (*out.glob("step_*.tmp"), *out.glob("best.tmp"), *out.glob("*.png.tmp")):  # what a kill left half written
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        if self.checkpoint and self.checkpoint.resolve().parent == out.resolve():
            # a broken checkpoint beyond this one, or one of a future given up, would be found by the next resume
            move_aside([path for step, path in list_checkpoints(out) if step > state.step], out, self.say)
            for name, size in state.log_bytes.items():
                has = (logs / name).stat().st_size if (logs / name).exists() else 0
                if has > size:
                    os.truncate(logs / name, size)
                elif has < size:
                    self.say(f"WARNING: {logs / name} has lost {size - has} bytes since the checkpoint; what they said is gone")
        else:
            earlier = [path for pattern in self.run_files for path in out.glob(pattern)]
            move_aside(earlier + [logs] * any(logs.iterdir()), out, self.say)
            logs.mkdir(exist_ok=True)
            state.log_bytes = {}
        log_name = next((n for n in state.log_bytes if n.startswith("training_")), time.strftime("training_%Y%m%d_%H%M%S.log"))
        self.log, self.metrics_file, self.samples_file = (open(logs / name, "a") for name in (log_name, "metrics.jsonl", "samples.jsonl"))
        self.log.writelines(text + "\n" for text in self.unlogged)
        (out / "training_config.json").write_text(json.dumps({"constants": constants(), **run_facts(self.device)}, indent=1, default=plain_name))
        if USE_WANDB:
            import wandb
            self.wandb = wandb.init(project=WANDB_PROJECT, dir=OUTPUT_DIR, config=constants(), id=state.wandb_id, resume="allow")
            state.wandb_id = self.wandb.id
        self.say(self.headline())
        self.bar = tqdm(total=self.total_steps, initial=state.step, disable=not sys.stderr.isatty(), dynamic_ncols=True, leave=False,
                        bar_format="{percentage:3.0f}%|{bar:8}| {remaining} left  {desc}")
        self.started, self.first_step = time.perf_counter(), state.step

    def headline(self):
        return (f"{'/'.join(Path(ACTOR_MODEL).parts[-2:])}: {self.actor.num_parameters():,} parameters on {self.device}, {DTYPE}; {len(self.train_rows)} prompts to train on, "
                f"{len(self.eval_rows)} held out; steps {self.state.step} to {self.total_steps}, {BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS} x {GROUP_SIZE} responses each; writing to {OUTPUT_DIR}")

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def write_metrics(self, phase, metrics):
        metrics = {key: value if math.isfinite(value) else None for key, value in metrics.items()}  # NaN is not JSON
        self.metrics_file.write(json.dumps({"phase": phase, "step": self.state.step, **metrics}) + "\n")
        self.metrics_file.flush()
        if self.wandb:
            self.wandb.log({f"{phase}/{key}": value for key, value in metrics.items()}, step=self.state.step)

    def log_step(self, batch, metrics):
        """The step's line on the terminal, its object in metrics.jsonl and a few of its responses in samples.jsonl."""
        step, mask, lengths, groups = self.state.step, batch.response_mask, batch.response_lengths.float(), batch.scores.view(-1, GROUP_SIZE)
        variance = masked_variance(batch.returns, mask)
        metrics = {
            "epoch": self.state.epoch, **metrics, "reward": batch.scores.mean().item(),
            **{f"reward/{k}": v.mean().item() for k, v in batch.parts.items()}, "advantage": masked_mean(batch.raw_advantages, mask).item(),
            "explained_variance": (1 - masked_variance(batch.returns - batch.values, mask) / (variance + 1e-8)).item(),
            "response_length": lengths.mean().item(), "truncated_fraction": batch.truncated.float().mean().item(),
            "zero_variance_groups": (groups == groups[:, :1]).all(1).float().mean().item() if GROUP_SIZE > 1 else 0.0,
            "tokens_per_second": lengths.sum().item() / sum(batch.seconds.values()), **{f"seconds/{k}": v for k, v in batch.seconds.items()}}
        self.write_metrics("train", metrics)
        for i in torch.linspace(0, len(groups.view(-1)) - 1, min(LOG_SAMPLES, len(batch.rows))).long().tolist():
            self.samples_file.write(json.dumps({
                "step": step, "id": batch.rows[i]["id"], "prompt": batch.rows[i]["prompt"], "response": batch.responses[i],
                "answer": batch.rows[i]["answer"], "truncated": bool(batch.truncated[i]), "reward": batch.scores[i].item(),
                **{f"reward/{k}": float(v[i]) for k, v in batch.parts.items()}, "advantage": masked_mean(batch.advantages[i], mask[i]).item()}) + "\n")
        self.samples_file.flush()
        line = ("Epoch {epoch}/{epochs}: PL:{policy_loss:.4f} VL:{value_loss:.4f} R:{reward:.2f} A:{advantage:.2f} E:{entropy:.3f} "
                "LR:{learning_rate:.2e}").format(epochs=NUM_EPOCHS, **metrics)
        self.bar.set_description_str(line, refresh=False)
        self.bar.update(1)
        left = (time.perf_counter() - self.started) / (step - self.first_step) * (self.total_steps - step)
        self.say(f"{line}  step {step}/{self.total_steps}, {tqdm.format_interval(left)} left", terminal=self.bar.disable)

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def save_checkpoint(self):
        """Write step_N/ whole or not at all, prune, redraw the plots."""
        folder = Path(OUTPUT_DIR) / f"step_{self.state.step}"
        if not folder.exists():
            self.say(f"Saving {folder}")
            write_checkpoint(folder, self.fill_checkpoint)
            for _, old in list_checkpoints(OUTPUT_DIR)[:-KEEP_LAST_N_CHECKPOINTS]:
                shutil.rmtree(old)
            self.draw_plots()

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def fill_checkpoint(self, folder):
        for name, model in self.models.items():
            model.save_pretrained(folder / name)
            self.tokenizer.save_pretrained(folder / name)
        logs = [Path(file.name) for file in (self.log, self.metrics_file, self.samples_file)]
        for path in logs:
            fsync(path)
        self.state.log_bytes = {path.name: path.stat().st_size for path in logs}
        self.state.ways = {name: [getattr(model, "sampled_by", None), model.scored_by] for name, model in self.models.items()}
        optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        torch.save({**vars(self.state), "optimizers": optimizers, "rng": [get_rng_state()]}, folder / "training_state.pt")
        (folder / "config.json").write_text(json.dumps(constants(), indent=1, default=plain_name))

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def load_checkpoint(self, folder):
        try:  # weights_only: nothing in the file is run
            saved, then = torch.load(folder / "training_state.pt", map_location="cpu", weights_only=True), json.loads((folder / "config.json").read_text())
            kind = {key: type(value) for key, value in vars(self.state).items() if value is not None}
            if not isinstance(then, dict) or set(saved) != {*vars(self.state), "optimizers", "rng"} or set(saved["optimizers"]) != set(self.optimizers) or any(
                    not isinstance(saved[key], known) for key, known in kind.items()) or any(len(ways) != 2 for ways in saved["ways"].values()):
                raise ValueError(f"it is no state of {Path(__file__).name}")
        except Exception as error:
            raise UserError(f"{folder}/training_state.pt or config.json cannot be used ({first_line(error)}): take a checkpoint that this trainer made") from None
        if saved["prompts"] != self.state.prompts:
            raise UserError(f"{folder} was made with {saved['prompts']} training prompts, TRAIN_DATASETS now gives {self.state.prompts}: a resumed run needs the same data (RESUME=no starts afresh)")
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(saved["optimizers"][name])
            optimizer.param_groups[0]["weight_decay"] = WEIGHT_DECAY  # a changed constant counts from here on
        set_rng_state(saved["rng"][0])
        self.state = SimpleNamespace(**{key: saved[key] for key in vars(self.state)})
        for name in self.models.keys() & self.state.ways.keys():  # as the run began, were check_models() to see the trained weights another way
            self.models[name].sampled_by, self.models[name].scored_by = self.state.ways[name]
        now = json.loads(json.dumps(constants(), default=plain_name))
        for key in sorted({*then, *now} - {"RESUME", "OUTPUT_DIR", "STAGE"}):
            if then.get(key) != now.get(key):
                self.say(f"Changed since the checkpoint: {key} was {then.get(key)!r}, is {now.get(key)!r}")

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def save_best(self, metrics):
        """best/policy/, each file replaced in one move, so that it loads at any moment."""
        best, tmp = Path(OUTPUT_DIR) / "best", Path(OUTPUT_DIR) / "best.tmp"
        try:
            self.actor.save_pretrained(tmp / "policy")
            self.tokenizer.save_pretrained(tmp / "policy")
            (tmp / "metrics.json").write_text(json.dumps({"step": self.state.step, **metrics}, indent=1))
            (best / "policy").mkdir(parents=True, exist_ok=True)
            for path in [p for p in tmp.rglob("*") if p.is_file()]:
                fsync(path)
                os.replace(path, best / path.relative_to(tmp))
            shutil.rmtree(tmp)
        except Exception as error:
            shutil.rmtree(tmp, ignore_errors=True)
            raise not_saved(best, error) from None

    def draw_plots(self):
        """The step's plots, from metrics.jsonl alone."""
        records = read_metrics(self.metrics_file.name)
        units = {"entropy": " (nats a token)", "kl": " (nats a token)", "approx_kl": " (nats a token)", "response_length": " (tokens)"}
        label = lambda key: key + units.get(key, " (s)" if key.startswith("seconds/") else "")
        title, keys = f"PPO, {'/'.join(Path(ACTOR_MODEL).parts[-2:])}, seed {SEED}", dict.fromkeys(key for r in records for key in r if key not in ("phase", "step"))
        draw_plot(records, f"{OUTPUT_DIR}/training_metrics_detailed.png", f"{title}: every metric", [(label(key), [key]) for key in keys])
        draw_plot(records, f"{OUTPUT_DIR}/ppo_metrics_with_entropy.png", title, [("accuracy", ["accuracy_sampled", "accuracy_greedy"])] + [
            (label(key), [key]) for key in "reward entropy policy_loss value_loss kl explained_variance clip_fraction response_length".split()])

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def catch_signals(self):
        """Ctrl-C and SIGTERM end the run after the current step; a second Ctrl-C leaves at once."""
        def handler(number, frame):
            if self.stop_signal and number == signal.SIGINT:
                os._exit(130)
            self.stop_signal = number
            print("\nStopping after this step, then saving; Ctrl-C again leaves at once", flush=True)
        main = threading.current_thread() is threading.main_thread()  # elsewhere signals are somebody else's
        return {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM) if main}

    # same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
    def finish(self):
        best, last = f"{OUTPUT_DIR}/best/policy", f"{OUTPUT_DIR}/step_{self.state.step}/policy"
        kept = f"best policy: {best}"
        if not Path(best).exists():
            kept = f"no evaluation has kept a best policy here; the last one: {last}"
        why = "Stopped" if self.stop_signal else "Done" if self.state.step == self.total_steps else "No better evaluation for a while: stopped early"
        self.say(f"{why} at step {self.state.step} of {self.total_steps} after {time.perf_counter() - self.started:.0f} s. Plots: {OUTPUT_DIR}/*.png; "
                 + ("run again to go on" if self.stop_signal else kept))
        if self.wandb:
            self.wandb.finish()

# same in: ppo/ppo.py, grpo/grpo.py, rce/rce.py
def run_main(trainer_class):
    """Run the trainer as a program: exit code 0, 2 for what the user can mend, 130 or 143 after Ctrl-C or SIGTERM."""
    try:
        apply_overrides(sys.argv[1:])
        trainer = trainer_class()
        trainer.train()
        sys.exit(128 + trainer.stop_signal if trainer.stop_signal else 0)
    except (KeyboardInterrupt, EOFError):  # Ctrl-C or Ctrl-D where a question was asked
        sys.exit(130)
    except (UserError, OSError, MemoryError, RuntimeError) as error:
        text = str(error) if isinstance(error, UserError) else f"{getattr(error, 'filename', None) or OUTPUT_DIR}: {getattr(error, 'strerror', None) or error}"
        if not isinstance(error, (UserError, OSError)):
            if isinstance(error, RuntimeError) and not any(words in str(error) for words in ("out of memory", "not enough memory", "t allocate memory", "Storage size calculation overflowed")):
                raise
            text = f"out of memory ({first_line(error)}): lower BATCH_SIZE and raise GRADIENT_ACCUMULATION_STEPS, or lower GROUP_SIZE or MAX_NEW_TOKENS"
        print(printable(f"\n{Path(__file__).name}: {text}"), file=sys.stderr)
        sys.exit(2)

def train_main():
    run_main(PPOTrainer)


if __name__ == "__main__":
    train_main()
