"""Direct preference optimisation in one file: a policy is trained on pairs of answers, no reward model.

The policy's own log-probabilities stand for the reward (arXiv 2305.18290, equation 7):

    r(x, y) = log pi(y | x) - log pi_ref(y | x)     sums over the answer's tokens up to its end token
    h       = r(x, y_c) - r(x, y_r)                 y_c: the chosen answer, y_r: the rejected one
    L_dpo   = mean over pairs of -(1 - e) log sigmoid(BETA h) - e log sigmoid(-BETA h)
    L_ipo   = mean over pairs of (h - 1 / (2 BETA))^2

e = LABEL_SMOOTHING is the share of pairs whose order is taken to be wrong (conservative DPO, E. Mitchell
2023, https://ericmitchell.ai/cdpo.pdf). IPO is 2310.12036, equation 17, but its r is a mean over the tokens,
as in trl. log pi_ref is computed once, before training. Dropout is off. Pairs longer than MAX_TOKENS are left
out, and so are pairs of equal answers.

Shapes: rows = pairs; tokens = trained tokens of the answers at hand, one after the other.

    python rce/dpo.py                          # edit the constants below, or give KEY=VALUE or @FILE
    python rce/dpo.py ACTOR_MODEL=checkpoints/sft/best/policy LEARNING_RATE=1e-6
    torchrun --nproc_per_node=4 rce/dpo.py     # the same update up to rounding

Writes logs/, checkpoints step_N/, best/policy/ and two pictures into OUTPUT_DIR. A run that was stopped or
killed continues from its last checkpoint, and ends with the same bytes.

To change           see                                To change      see
the loss            dpo_loss, update                   a metric       dpo_stats, update, evaluate
the reference       add_reference                      a plot         PANELS, draw_grid
the data            TRAIN_DATASETS, make_row           sampling       respond
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
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from datetime import datetime, timedelta
from functools import partial
from itertools import accumulate, chain
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
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.modeling_layers import GradientCheckpointingLayer

rank, world_size, gpu = 0, 1, 0  # of this process under torchrun; rank 0 alone asks, writes and prints
if dist.is_torchelastic_launched():
    rank, world_size, gpu = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "rewards").is_dir()), None)
if ROOT is None:
    sys.exit(f"{__file__}: copy the folder rewards/ of the repository beside this file, or above it")
sys.path.insert(0, str(ROOT))
import rewards
from rewards import UserError, call_reward, find_function

# ================================================================ constants

# Models: a folder or a hub name
ACTOR_MODEL = f"{ROOT}/data/tiny/policy"
REFERENCE_MODEL: str | None = None  # None: the initial actor
LORA_RANK = 0  # 0: all weights are trained; > 0: LoRA adapters of this rank on all linear layers (2106.09685)
LORA_ALPHA = 32.0  # an adapter's output is scaled by LORA_ALPHA / LORA_RANK
DTYPE = "float32"  # float32 | bfloat16 (autocast; weights and optimizer state stay float32)
DEVICE = "auto"  # auto | cpu | cuda | cuda:1
ATTENTION: str | None = None  # sdpa | eager | flash_attention_2 (if installed); None: what the model has
GRADIENT_CHECKPOINTING = False  # recompute activations in the update: less memory, slower

# Data sets: {"path", "type": "jsonl" | "csv" | "parquet" | "hub", "prompt", "chosen", "rejected"}; on the hub
# also "name" and "split". They name columns: a text or a list of chat messages, and two answers to it, texts
# or messages. Without "prompt" chosen and rejected are whole chats, messages or texts of HH-RLHF. "output"
# names gold answers, for ACCURACY_FUNCTION; "tools" tools, lists or their JSON, for the chat template
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
    {**TRAIN_DATASETS[0], "path": f"{ROOT}/data/tiny/pairs_test.jsonl", "output": "solution"},
]
PROMPT_TEMPLATE = "{input}"  # the question; the tokenizer's chat template, if it has one, wraps it
SYSTEM_PROMPT: str | None = None  # put before chats that have none; needs a chat template
MAX_EVAL_PAIRS: int | None = 200  # the first ones of each data set; None: all
MAX_TOKENS = 512  # of a prompt with an answer; longer pairs are left out, and counted

# Evaluation beside the loss: answers are sampled, and a function of rewards/ decides whether one is correct
ACCURACY_FUNCTION: str | None = "exact_answer"  # f(prompts, responses, answers); None: nothing is sampled
MAX_NEW_TOKENS = 64
TEMPERATURE = 1.0  # > 0
EVAL_BATCH_SIZE = 64  # prompts sampled at a time

# Algorithm
LOSS_TYPE = "dpo"  # dpo | ipo
BETA = 0.1  # > 0; small: the policy may go far from the reference. IPO's unit is another one
LABEL_SMOOTHING = 0.0  # 0 to below 0.5: share of the pairs whose order is taken to be wrong (dpo)

# Optimisation
BATCH_SIZE = 16  # pairs per forward and backward pass: memory and speed, not the result
GRADIENT_ACCUMULATION_STEPS = 2  # a step has BATCH_SIZE times this many pairs
LOGITS_AT_ONCE = 256  # places whose logits are held at a time; they are computed again in the backward pass
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 0.0
USE_LR_SCHEDULER = True
LR_SCHEDULER_TYPE = "linear"  # linear | cosine, to 0
WARMUP_STEPS = 5  # linear warm-up, with or without a scheduler

# Schedule and files
NUM_EPOCHS = 1  # passes over the pairs; more overfit soon
MAX_STEPS: int | None = None  # the run ends here or after NUM_EPOCHS, whichever is first; None: NUM_EPOCHS
SAVE_EVERY_N_STEPS = 25  # 0: only at the end
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 19  # 0: only before the first and after the last step
EARLY_STOPPING_PATIENCE = 0  # evaluations without a lower loss before the run ends; 0: all steps are run
EARLY_STOPPING_THRESHOLD = 0.0  # a smaller gain does not count for EARLY_STOPPING_PATIENCE
LOG_SAMPLES = 2  # pairs per step written to samples.jsonl
RESUME = "ask"  # ask (yes without a terminal or under torchrun) | yes | no | path of a checkpoint or a run
OUTPUT_DIR = f"{ROOT}/checkpoints/{Path(__file__).stem}"
SEED = 1
DETERMINISTIC = True  # kernels that add in a fixed order: the same run gives the same bytes; slower on a GPU
USE_WANDB = False  # its project and mode: environment variables WANDB_PROJECT, WANDB_MODE

# ================================================================ the maths of DPO


def dpo_loss(chosen_logratios, rejected_logratios):
    """Returns the loss of each pair, (rows,), from log pi - log pi_ref of its two answers, (rows,)."""
    difference = chosen_logratios - rejected_logratios
    if LOSS_TYPE == "ipo":
        return (difference - 1 / (2 * BETA)) ** 2
    as_labelled = -logsigmoid(BETA * difference)
    reversed_order = -logsigmoid(-BETA * difference)
    return (1 - LABEL_SMOOTHING) * as_labelled + LABEL_SMOOTHING * reversed_order


def dpo_stats(chosen, rejected, ref_chosen, ref_rejected):
    """Returns what is logged of each pair, a dict of (rows,), from log pi and log pi_ref of its answers,
    (rows,). A reward is BETA (log pi - log pi_ref); reward_accuracy: the chosen answer's is higher (of equal
    ones a half, and what differs by rounding alone is equal)."""
    chosen_reward = BETA * (chosen - ref_chosen)
    rejected_reward = BETA * (rejected - ref_rejected)
    margin = chosen_reward - rejected_reward
    rounding = {"float32": 1e-5, "bfloat16": 1e-3}[DTYPE] * BETA * (ref_chosen + ref_rejected).abs()
    return {
        "reward_accuracy": 0.5 + 0.5 * torch.where(margin.abs() > rounding, margin.sign(), 0.0),
        "reward_margin": margin,
        "chosen_reward": chosen_reward,
        "rejected_reward": rejected_reward,
        "chosen_logprob": chosen,
        "rejected_logprob": rejected,
    }


# ================================================================ the trainer


class DPOTrainer:
    """self.run has the files. self.state is what a checkpoint holds beside models and optimizers: you may add
    numbers, texts, lists and tensors (of Python and torch: numpy's cannot be loaded again)."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        self.device = join_processes()
        self.run = Run(resume_from_checkpoint or RESUME)
        self.state = SimpleNamespace(
            step=0,  # the current one, from 1; between steps, how many are done
            evaluation={},  # the last one's metrics
            best_score=-math.inf,  # minus the lowest loss, whose policy is in best/
            evaluations_without_gain=0,
            log_sizes={},  # bytes of each log when the checkpoint was saved
            wandb_id=None,
        )
        self.seed_step()  # for the first weights of adapters
        try:
            self.load_models(self.run.checkpoint)
            if self.run.checkpoint:
                self.load_state(self.run.checkpoint)
        except Exception as error:  # the libraries raise many types
            if isinstance(error, (TypeError, AttributeError, NameError)):
                raise  # a mistake in the program
            names = f"ACTOR_MODEL={ACTOR_MODEL} or RESUME={self.run.checkpoint or RESUME} cannot be loaded"
            raise UserError(f"{names} ({type(error).__name__}: {first_line(error)})") from error
        self.accuracy_function = ACCURACY_FUNCTION and find_function(ACCURACY_FUNCTION)
        self.train_rows = load_rows(TRAIN_DATASETS, self.make_row)
        self.eval_rows = []
        for spec in EVAL_DATASETS:
            self.eval_rows += load_rows([spec], self.make_row)[:MAX_EVAL_PAIRS]
        self.run.facts["data"] = digest(self.train_rows)
        rows = self.train_rows + self.eval_rows
        answers = column(rows, "chosen_answer") + column(rows, "rejected_answer")
        self.ids = set(chain(self.end_ids, *column(answers, "ids")))
        lengths = list(map(len, column(rows, "ids")))
        if self.accuracy_function:
            sampled = [row for row in self.eval_rows if row["answer"] is not None]
            lengths += [len(row["prompt_ids"]) + MAX_NEW_TOKENS for row in sampled]
        check_limits(self.actor, self.ids, max(lengths))
        self.add_reference(rows)
        self.steps_per_epoch = math.ceil(len(self.train_rows) / (BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS))
        steps = NUM_EPOCHS * self.steps_per_epoch
        self.total_steps = steps if MAX_STEPS is None else min(steps, MAX_STEPS)

    def load_models(self, checkpoint):
        """The policy comes from the checkpoint if there is one."""
        causal = transformers.AutoModelForCausalLM
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(ACTOR_MODEL)
        self.actor = load_trained(causal, ACTOR_MODEL, checkpoint and checkpoint / "policy").to(self.device)
        self.models = {"policy": self.actor}  # what a checkpoint holds
        self.optimizers = {"policy": make_optimizer(self.actor, LEARNING_RATE)}
        self.end_ids = find_end_ids(self.actor, self.tokenizer)

    def make_row(self, record, spec, row_id):
        """Returns a row from a record of the data: id, prompt, chosen, rejected, answer (gold), chosen_answer
        and rejected_answer (see encode_answer), prompt_ids, and why it is left out."""
        prompt, chosen, rejected = read_pair(record, spec)
        row = {"id": row_id, "prompt": prompt, "chosen": chosen, "rejected": rejected, "left_out": None}
        for name in ("chosen", "rejected"):
            tools = read_tools(record, spec)
            row[f"{name}_answer"] = encode_answer(self.tokenizer, prompt, row[name], self.end_ids, tools)
        answers = row["chosen_answer"], row["rejected_answer"]
        row["ids"] = max(column(answers, "ids"), key=len)  # the longer one, by which pairs are sorted
        row["answer"] = as_answer(record.get(spec.get("output"))) or None
        if not all(1 in answer["mask"] for answer in answers):
            row["left_out"] = "without an answer"
        elif len(row["ids"]) > MAX_TOKENS:
            row["left_out"] = "longer than MAX_TOKENS"
        elif answers[0] == answers[1]:
            row["left_out"] = "whose answers are equal"
        row["prompt_ids"] = answers[0]["ids"][: [*answers[0]["mask"], 1].index(1)]
        return row

    @torch.no_grad()
    def add_reference(self, rows):
        """Adds to each row `reference`, log pi_ref of its two answers. Once is enough: it never changes."""
        reference = self.actor
        if REFERENCE_MODEL or (self.run.checkpoint and not LORA_RANK):  # the actor has moved
            path = REFERENCE_MODEL or ACTOR_MODEL
            reference = load_model(transformers.AutoModelForCausalLM, path).to(self.device)
            check_limits(reference, self.ids, max(map(len, column(rows, "ids"))))
        with reference.disable_adapter() if hasattr(reference, "disable_adapter") else nullcontext():
            values = []
            for first in progress(range(0, len(share(rows)), BATCH_SIZE), "micro-batches"):
                values += pair_logprobs(reference, share(rows)[first : first + BATCH_SIZE]).T.tolist()
        for row, value in zip(rows, chain(*all_gather(values))):
            row["reference"] = value

    # ------------------------------------------------------------ the algorithm

    def train(self):
        """Trains until the last step, a signal, or patience ends it. Returns the last evaluation."""
        state = self.state
        self.run.open(state, self.is_over())  # opens the logs and catches signals
        self.run.log(f"{len(self.train_rows)} pairs and {len(self.eval_rows)} held out, on {self.device}")
        if not state.evaluation:
            self.log_evaluation(self.evaluate())
        while not self.is_over():  # the last step, no patience, or a signal
            state.step += 1
            self.seed_step()
            started = time.perf_counter()
            rows = self.next_rows()
            metrics = self.update(rows)
            self.record(rows, metrics, time.perf_counter() - started)
            is_last = state.step == self.total_steps
            if is_last or (EVAL_EVERY_N_STEPS and state.step % EVAL_EVERY_N_STEPS == 0):
                self.log_evaluation(self.evaluate())
            if SAVE_EVERY_N_STEPS and state.step % SAVE_EVERY_N_STEPS == 0:
                self.save()
        if not self.eval_rows or not (self.run.folder / "best/policy").exists():
            self.save_best()
        self.save()
        self.run.close(state)
        return state.evaluation

    def seed_step(self):
        """Makes all random numbers of a step a function of its number: a checkpoint need not keep any."""
        seed = (1_000_003 * SEED + self.state.step) % 2**32
        transformers.set_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def is_over(self):
        self.run.signal = max(all_gather(self.run.signal))  # any process may have got it
        out_of_patience = 0 < EARLY_STOPPING_PATIENCE <= self.state.evaluations_without_gain
        return self.run.signal or out_of_patience or self.state.step >= self.total_steps

    def next_rows(self):
        """Returns the step's rows, fewer at the end of an epoch. Each epoch has its own order."""
        epoch, place = divmod(self.state.step - 1, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(SEED + epoch + 1)
        order = torch.randperm(len(self.train_rows), generator=generator)
        return [self.train_rows[i] for i in order.split(BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS)[place]]

    def pair_losses(self, rows):
        """Returns the loss of each pair, (rows,), and what is logged of it."""
        chosen, rejected = pair_logprobs(self.actor, rows)
        ref_chosen, ref_rejected = torch.tensor(column(rows, "reference"), device=self.device).T
        losses = dpo_loss(chosen - ref_chosen, rejected - ref_rejected)
        stats = dpo_stats(chosen.detach(), rejected.detach(), ref_chosen, ref_rejected)
        return losses, {"loss": losses.detach(), **stats}

    def update(self, rows):
        """One optimizer step. The loss is the mean over the pairs: a process adds up its micro-batches, then
        the processes add up their gradients. Returns the step's metrics."""
        scale = learning_rate_scale(self.state.step - 1, self.total_steps)
        set_learning_rate(self.optimizers["policy"], scale)
        sums = Counter()
        for micro in progress(cut_by_length(rows)[rank::world_size], "micro-batches"):
            losses, stats = self.pair_losses(micro)
            (losses.sum() / len(rows)).backward()
            for name, x in stats.items():
                sums[name] += x.sum() / len(rows)
        metrics = clip_and_step(self.optimizers, sums, self.run)
        return {**metrics, "learning_rate": LEARNING_RATE * scale}

    # ------------------------------------------------------------ evaluation, logs, checkpoints

    @torch.no_grad()
    def evaluate(self):
        """Returns metrics of held-out pairs: means and, if the data has gold answers, the accuracy of a
        greedy and of a sampled answer to each prompt."""
        rows = self.eval_rows
        if not rows:
            return {}
        sums = Counter()
        for micro in progress(cut_by_length(rows)[rank::world_size], "micro-batches"):
            _, stats = self.pair_losses(micro)
            sums.update({name: x.sum().item() for name, x in stats.items()})
        parts = all_gather(sums)
        metrics = {name: sum(column(parts, name)) / len(rows) for name in parts[0]}
        rows = [row for row in rows if row["answer"] is not None]
        if self.accuracy_function and rows:
            metrics["accuracy_greedy"] = self.accuracy(rows, greedy=True)
            metrics["accuracy_sampled"] = self.accuracy(rows, greedy=False)
        return metrics

    def accuracy(self, rows, greedy):
        """Returns the share of correct responses to the rows' prompts, by ACCURACY_FUNCTION."""
        texts = self.respond(column(rows, "prompt_ids"), greedy)
        arguments = column(rows, "prompt"), texts, column(rows, "answer"), {}
        return np.mean(call_reward(self.accuracy_function, *arguments)).item()

    @torch.no_grad()
    def respond(self, prompts, greedy):
        """Returns a response, a text, to each prompt, a list of ids, by transformers' generate() without any
        filter. Its random numbers are the same at every call."""
        options = {
            "max_new_tokens": MAX_NEW_TOKENS,
            "eos_token_id": self.end_ids,
            "pad_token_id": self.end_ids[0],
        }
        if not greedy:
            options |= {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0}
        model = self.actor.get_base_model() if LORA_RANK else self.actor
        own_config = model.generation_config  # generate() would fill in its filters
        model.generation_config = transformers.GenerationConfig(**options)
        texts = {}
        for first in range(0, len(prompts), EVAL_BATCH_SIZE)[rank::world_size]:
            ids, mask = pad_left(prompts[first : first + EVAL_BATCH_SIZE], self.device)
            torch.manual_seed(SEED + first)
            with autocast(self.device):
                sampled = model.generate(ids, attention_mask=mask)
            for place, response in enumerate(sampled[:, ids.shape[1] :].tolist(), first):
                ends = [t for t, token in enumerate(response) if token in self.end_ids]
                texts[place] = self.tokenizer.decode(response[: min(ends, default=None)])
        model.generation_config = own_config
        texts = dict(chain(*(part.items() for part in all_gather(texts))))
        return [texts[place] for place in range(len(prompts))]

    def record(self, rows, metrics, seconds):
        """Logs the step's metrics, some of its pairs, and its line on the terminal."""
        step = self.state.step
        metrics = {"epoch": (step - 1) // self.steps_per_epoch + 1, **metrics, "seconds/update": seconds}
        self.run.write("metrics.jsonl", phase="train", step=step, **metrics)
        for row in rows[:LOG_SAMPLES]:
            sample = {name: row[name] for name in ("id", "prompt", "chosen", "rejected", "reference")}
            self.run.write("samples.jsonl", step=step, **sample)
        eta = timedelta(seconds=round(seconds * (self.total_steps - step)))
        line = "Epoch {epoch}/{epochs}: L:{loss:.4f} A:{reward_accuracy:.3f} M:{reward_margin:.3f} "
        line += "LR:{learning_rate:.2e}" + f"  step {step}/{self.total_steps}, {eta} left"
        self.run.log(line.format(epochs=NUM_EPOCHS, **metrics))

    def log_evaluation(self, metrics):
        """Logs what evaluate() returned. The model with the lowest loss is kept in best/."""
        state = self.state
        state.evaluation = metrics
        if not metrics:
            return
        self.run.write("metrics.jsonl", phase="eval", step=state.step, **metrics)
        texts = [f"{name} {x:.3f}" for name, x in metrics.items()]
        self.run.log(f"step {state.step}, held out: " + "  ".join(texts))
        gain = -metrics["loss"] - state.best_score
        state.evaluations_without_gain += 1
        if gain > EARLY_STOPPING_THRESHOLD:
            state.evaluations_without_gain = 0
        if gain > 0:
            state.best_score = -metrics["loss"]
            self.save_best()

    def save_best(self):
        """Writes best/policy/, with an adapter merged into the weights, so that it loads without PEFT."""
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
        self.run.checkpoint = folder  # a second train() goes on
        if rank > 0 or folder.exists():
            return
        self.run.log(f"Saving {folder}")
        self.state.log_sizes = {name: file.tell() for name, file in self.run.logs.items()}
        with atomic_folder(folder) as tmp:
            for name, model in self.models.items():
                model.save_pretrained(tmp / name)
            self.tokenizer.save_pretrained(tmp / "policy")
            optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
            saved = {"state": vars(self.state), "optimizers": optimizers, "trained": self.trained_names()}
            torch.save(saved, tmp / "training_state.pt")
            shutil.copy(self.run.folder / "training_config.json", tmp / "run.json")
        for old in list_checkpoints(self.run.folder)[:-KEEP_LAST_N_CHECKPOINTS]:
            shutil.rmtree(old.rename(f"{old}.tmp"))  # what a kill leaves of it is no checkpoint
        draw_grid(self.run.folder, "training_metrics_detailed.png")
        draw_grid(self.run.folder, f"{Path(__file__).stem}_metrics_with_entropy.png", PANELS)

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
        for name, value in saved["state"].items():
            tensor = getattr(self.state, name, None)
            if torch.is_tensor(tensor):
                tensor.detach().copy_(value)  # in place: an optimizer may train it
            else:
                setattr(self.state, name, value)


def learning_rate_scale(steps_done, total):
    """Returns the factor of the learning rate after steps_done steps: linear warm-up, then the schedule."""
    if steps_done < WARMUP_STEPS:
        return (steps_done + 1) / WARMUP_STEPS
    done = (steps_done - WARMUP_STEPS) / max(1, total - WARMUP_STEPS)
    scales = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return scales[LR_SCHEDULER_TYPE] if USE_LR_SCHEDULER else 1.0


# ================================================================ models


def load_model(auto_class, path, is_trained=False):
    """Returns a model in evaluation mode, in which it stays. Missing weights are an error. Linear layers that
    are not trained, except the head, are stored in DTYPE: autocast would cast them at each call."""
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
    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and layer not in heads and not is_trained:
            layer.to(getattr(torch, DTYPE))
    return model.requires_grad_(is_trained).eval()


def load_trained(auto_class, path, saved):
    """Returns a model to train, from the folder `saved` of a checkpoint or else path, with LoRA's adapter."""
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
        # Without transformers' gradient_checkpointing_enable(), which needs training mode and its dropout
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
        group["lr"] = scale * group.setdefault("initial_lr", group["lr"])


def clip_and_step(optimizers, sums, run):
    """Adds up gradients over processes, steps if all is finite. sums: this process's metrics, 0-d tensors."""
    norms = {}
    for name, optimizer in optimizers.items():
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            if parameter.grad is None:  # this process had no micro-batch
                parameter.grad = torch.zeros_like(parameter)
            if world_size > 1:
                dist.all_reduce(parameter.grad)
        norms[f"{name}_grad_norm"] = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
    numbers = torch.stack([*sums.values(), *norms.values()]).tolist()  # here alone we wait for the device
    metrics = Counter(dict(zip(norms, numbers[len(sums) :])))
    for other_sums in all_gather(dict(zip(sums, numbers))):
        metrics.update(other_sums)  # adds
    is_finite = all(map(math.isfinite, metrics.values()))
    for optimizer in optimizers.values():
        if is_finite:
            optimizer.step()
        optimizer.zero_grad()
    if not is_finite:
        run.log("WARNING: skipped an optimizer step that is not finite")
    return metrics


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


def find_end_ids(model, tokenizer):
    """Returns the ids at which sampling stops, with which the model is saved: the token by which the chat
    template ends a turn, the tokenizer's EOS, and those of the generation config."""
    ends = [tokenizer.eos_token_id, *np.atleast_1d(model.generation_config.eos_token_id).tolist()]
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "xyzzy"}]
        tail = tokenizer.apply_chat_template(messages, tokenize=False).rpartition("xyzzy")[2].strip()
        end_of_turn = tokenizer(tail, add_special_tokens=False)["input_ids"][:1]
        ends = [id for id in end_of_turn if id in tokenizer.added_tokens_decoder] + ends
    ends = [id for id in dict.fromkeys(ends) if id is not None]
    if not ends:
        raise UserError(f"ACTOR_MODEL = {ACTOR_MODEL!r} has no EOS token: set eos_token of its tokenizer")
    model.generation_config.eos_token_id = ends
    return ends


def answer_logprobs(model, rows):
    """Returns the log-probability of every trained token of some rows, row after row, and whether it is the
    likeliest, two (tokens,) in float32. Rows are padded on the right, where a causal model cannot see. Logits
    are held for LOGITS_AT_ONCE tokens at a time: the backward pass computes them again."""
    ids = pad_sequence([torch.tensor(row["ids"]) for row in rows], batch_first=True).to(model.device)
    mask = pad_sequence([torch.tensor(row["mask"]) for row in rows], batch_first=True).to(model.device)
    is_trained = mask[:, 1:] == 1  # of the tokens after the first: (rows, T - 1)
    with autocast(model.device):
        output = model.get_decoder()(input_ids=ids, use_cache=False)
    hidden = output.last_hidden_state[:, :-1][is_trained].split(LOGITS_AT_ONCE)
    tokens = ids[:, 1:][is_trained].split(LOGITS_AT_ONCE)
    results = []
    for part in zip(hidden, tokens):
        results.append(checkpoint(logprobs_of_hidden, model, type(output), *part, use_reentrant=False))
    logprobs, is_likeliest = zip(*results)
    return torch.cat(logprobs), torch.cat(is_likeliest)


def logprobs_of_hidden(model, output_class, hidden, tokens):
    """Returns what answer_logprobs() does, of tokens (tokens,) and the hidden states before them (tokens,
    width). Some models scale or cap their logits, so the model's own forward() computes them: for this call
    its decoder is replaced by what it has computed already, and only the head runs."""
    decoder = model.get_decoder()
    decoder.forward = lambda *_, **__: output_class(last_hidden_state=hidden.unsqueeze(0))
    try:
        with autocast(model.device):
            logits = model(input_ids=tokens.unsqueeze(0)).logits.squeeze(0).float()
    finally:
        del decoder.forward
    logprobs = -torch.nn.functional.cross_entropy(logits, tokens, reduction="none")
    return logprobs, (logits.argmax(-1) == tokens).float()


def pair_logprobs(model, rows):
    """Returns log pi of the chosen and of the rejected answers, (2, rows) in float32: sums over an answer's
    tokens, for IPO their means."""
    answers = column(rows, "chosen_answer") + column(rows, "rejected_answer")
    by_answer = answer_logprobs(model, answers)[0].split([sum(answer["mask"]) for answer in answers])
    results = [x.mean() if LOSS_TYPE == "ipo" else x.sum() for x in by_answer]
    return torch.stack(results).view(2, len(rows))


def cut_by_length(rows):
    """Returns micro-batches, lists of BATCH_SIZE rows of like length, the longest first."""
    rows = sorted(rows, key=lambda row: len(row["ids"]), reverse=True)
    return [rows[first : first + BATCH_SIZE] for first in range(0, len(rows), BATCH_SIZE)]


def pad_left(rows, device):
    """Returns lists of ids as one tensor, (rows, length of the longest), and its mask."""
    ids = [torch.tensor(row) for row in rows]
    mask = [torch.ones_like(row) for row in ids]
    options = {"batch_first": True, "padding_side": "left"}
    return pad_sequence(ids, **options).to(device), pad_sequence(mask, **options).to(device)


# ================================================================ data


def load_rows(specs, make_row):
    """Returns the rows of data sets that can be trained; the others are counted."""
    rows = []
    for position, spec in enumerate(specs, 1):
        where = f"the data set {spec}"
        try:
            columns = check_keys(spec)
            for number, record in enumerate(read_records(spec), 1):
                where = f"{position}/{Path(spec['path']).name}:{number}"
                if None in record or not columns <= record.keys():
                    raise ValueError(f"{list(record)} lacks a column of {spec} (None: more fields)")
                if spec["type"] in ("parquet", "hub"):  # they fill absent keys with None
                    record = {name: without_nulls(value) for name, value in record.items()}
                rows.append(make_row(record, spec, where))
                where = f"after {where}"  # if the next record cannot be read
        except Exception as error:  # the libraries raise many types
            raise UserError(f"{where}: {type(error).__name__}: {first_line(error)}") from None
    kept = [row for row in rows if not row["left_out"]]
    for reason, count in Counter(column(rows, "left_out")).items():
        if reason and rank == 0:
            first = next(row["id"] for row in rows if row["left_out"] == reason)
            print(f"left out {count} of {len(rows)} rows, {reason}; the first is {first}")
    if specs and not kept:
        raise UserError(f"no row of {specs} can be trained")
    return kept


def check_keys(spec):
    """Returns the columns that a data set names. Refuses keys that nothing reads."""
    keys = spec.keys() - {"path", "type"}
    if spec.get("type") == "hub":
        keys -= {"name", "split"}
    needed = keys - {"prompt", "tools", "output"}
    if not {"path", "type"} <= spec.keys() or needed != {"chosen", "rejected"}:
        known = "path, type, prompt, chosen, rejected, output, tools"
        raise ValueError(f"the keys are {known}, and for hub name, split")
    return {spec[key] for key in keys}


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
            yield from csv.DictReader(file, strict=True)  # strict: an open quote does not swallow the rest
    elif file_type == "parquet":
        yield from pyarrow.parquet.read_table(path).to_pylist()
    elif file_type == "hub":
        import datasets  # slow

        yield from datasets.load_dataset(path, spec.get("name"), split=spec.get("split", "train"))
    else:
        raise ValueError("the types are jsonl, csv, parquet and hub")


def without_nulls(value):
    """Returns a value without the None in its lists and dicts."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def read_message(message):
    """Returns a message of a chat, whose content is a text. Refuses what a chat template would misread."""
    if not isinstance(message, dict):
        raise ValueError(f"a chat is a list of messages, not of {message!r:.80}")
    known = ["role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking"]
    message = {key: x for key, x in message.items() if x is not None}  # parquet and json fill absent keys
    marks = [message.pop(key) for key in ("weight", "train", "trainable", "loss_mask") if key in message]
    content = message.get("content", "" if "tool_calls" in message else None)
    if isinstance(content, list) and all(set(part) == {"type", "text"} for part in content):
        content = "".join(column(content, "text"))
    if not isinstance(content, str) or not set(message) <= set(known):
        raise ValueError(f"a message has {', '.join(known)}, and its content is a text: {message!r:.200}")
    if message.get("role") not in ("system", "developer", "user", "assistant", "tool"):
        raise ValueError(f"a message has an unknown role: {message!r:.200}")
    if not set(marks) <= {0, 1}:
        raise ValueError(f"a weight is 0 (the message is not trained) or 1: {marks} of {message!r:.200}")
    if 0 in marks:
        message["weight"] = 0
    if "tool_calls" in message:
        message["tool_calls"] = list(map(read_call, message["tool_calls"]))
    return {**message, "content": content}


def read_call(call):
    """Returns a tool call with its arguments as a dict. Many data sets have their JSON, which a chat template
    would write as a text in quotes."""
    function = dict(call.get("function", call))
    if isinstance(function.get("arguments"), str):
        with suppress(json.JSONDecodeError):
            function["arguments"] = json.loads(function["arguments"] or "{}")
    if not isinstance(function.get("arguments", {}), dict):
        raise ValueError(f"the arguments of a tool call are a dict or its JSON: {call!r:.200}")
    return {**call, "function": function} if "function" in call else function


def as_messages(prompt):
    """Returns the messages of a prompt, a text or a chat."""
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": PROMPT_TEMPLATE.replace("{input}", prompt)}]
    if isinstance(prompt, list) and prompt:
        return list(map(read_message, prompt))
    raise ValueError(f"a prompt is a text or a list of messages, not {prompt!r:.80}")


def as_answer(value):
    """Returns an answer of the data, a text or messages. A whole number becomes a text, but a float has lost
    the form that it had."""
    if isinstance(value, list):
        return list(map(read_message, value))
    if type(value) not in (str, int, type(None)):
        raise ValueError(f"an answer is a text or a list of messages, not {value!r:.80}")
    return "" if value is None else str(value)


def read_pair(record, spec):
    """Returns the prompt (a text or a chat) and the chosen and the rejected answer (texts or messages) of a
    record. Of whole chats the prompt is what both begin with, without the assistant's turns at its end."""
    prompt = record[spec["prompt"]] if "prompt" in spec else None
    chosen, rejected = as_answer(record[spec["chosen"]]), as_answer(record[spec["rejected"]])
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError("one answer is a text, the other messages")
    if isinstance(chosen, str) and ("prompt" not in spec or chosen.startswith("\n\nHuman:")):
        chosen, rejected = split_dialogue(chosen), split_dialogue(rejected)
    if isinstance(chosen, str):
        return prompt, chosen, rejected
    if "prompt" in spec and [turn["role"] for turn in chosen[:1] + rejected[:1]] == ["assistant"] * 2:
        return prompt, chosen, rejected
    is_equal = [mine == other for mine, other in zip(chosen, rejected)]
    count = [*is_equal, False].index(False)
    while count and chosen[count - 1]["role"] == "assistant":
        count -= 1
    if count == 0:
        raise ValueError("the chosen and the rejected chat do not begin with one prompt")
    first = next((turn["content"] for turn in chosen[:count] if turn["role"] == "user"), None)
    if prompt and isinstance(prompt, list):
        prompt = as_messages(prompt)
    if prompt and prompt not in (chosen[:count], first):
        raise ValueError(f"the chats have another prompt than the column {spec['prompt']!r}: {prompt!r:.80}")
    return chosen[:count], chosen[count:], rejected[count:]


def split_dialogue(text):
    """Returns the messages of a text as HH-RLHF has it: "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    first, *pieces = re.split(r"\n\n(Human|Assistant):", text)
    if first.strip() or not pieces:
        raise ValueError(
            'name "prompt", or give chats or texts such as "\\n\\nHuman: Hi\\n\\nAssistant: Hello"'
        )
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = zip(pieces[::2], pieces[1::2])
    return [{"role": roles[speaker], "content": words.strip()} for speaker, words in turns]


def as_turns(answer):
    """Returns the messages of an answer, a text or messages."""
    answer = as_answer(answer)
    return answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]


def is_trained_turn(turn):
    """Returns whether a message is the assistant's, says something and is to be trained."""
    says_something = turn.get("tool_calls") or turn["content"].strip()
    return turn["role"] == "assistant" and bool(says_something) and turn.get("weight") != 0


def read_tools(record, spec):
    """Returns the tools of a record for the chat template, a list, or None."""
    tools = record.get(spec.get("tools")) or None
    tools = json.loads(tools) if isinstance(tools, str) else tools
    if not isinstance(tools, (list, type(None))):
        raise ValueError(f"tools are a list or its JSON, not {tools!r:.80}")
    return tools


def read_chat(tokenizer, prompt, answer, tools=None):
    """Returns the messages of a prompt, a text or a chat, and those of its answer, a text or messages."""
    before, turns = as_messages(prompt), as_turns(answer)
    if [message["role"] for message in before[-1:] + turns[:1]] == ["assistant"] * 2:
        raise ValueError("a prompt ends before the assistant's message, which is the answer")
    if SYSTEM_PROMPT is not None and before[0]["role"] != "system":
        before.insert(0, {"role": "system", "content": SYSTEM_PROMPT})
    is_chat = isinstance(prompt, list) or isinstance(answer, list) or len(before) > 1 or tools
    if is_chat and not tokenizer.chat_template:
        raise UserError("chats, tools and SYSTEM_PROMPT need a tokenizer with a chat template")
    return before, turns


def render(tokenizer, messages, tools=None, is_open=False):
    """Returns the text of a chat in the chat template, if there is one. is_open: an answer follows."""
    if tokenizer.chat_template:
        options = {"tools": tools, "add_generation_prompt": is_open, "tokenize": False}
        return tokenizer.apply_chat_template(messages, **options)
    text = "".join(column(messages, "content"))
    return text if is_open else text + tokenizer.eos_token


def tokenize(tokenizer, text, is_open=False):
    """Returns the ids of a text. is_open: an answer follows."""
    text.encode()  # fails for half an emoji
    ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
    if is_open and not tokenizer.chat_template and ids[-1:] == [tokenizer.eos_token_id]:
        return ids[:-1]  # some append EOS to every text
    return ids


def check_shown(tokenizer, messages, tools, text):
    """Refuses a chat template whose text shows nothing of a chat's tools, calls, thoughts or prompts."""
    if tools and render(tokenizer, messages) == text:
        raise ValueError("the chat template shows no tools: take one that does")
    for hidden in ("tool_calls", "reasoning_content", "thinking"):
        bare = [{key: x for key, x in message.items() if key != hidden or not x} for message in messages]
        if bare != messages and render(tokenizer, bare, tools) == text:
            raise ValueError(f"the chat template shows no {hidden}: take one that does")
    for message in messages:
        for key in ("content", "reasoning_content", "thinking"):
            is_needed = key != "content" or message["role"] in ("system", "user")
            if is_needed and message.get(key, "").strip() not in text:
                raise ValueError(f"the chat template does not show the {message['role']}'s {key}")


def find_turn(tokenizer, messages, number, text, tools):
    """Returns where a turn stands in the text of its chat: what the policy writes begins at the first place
    and ends before the second. Refuses a template that writes the turn otherwise if another follows."""
    before = render(tokenizer, messages[:number], tools, is_open=True)
    after = render(tokenizer, messages[: number + 1], tools)
    if not after.startswith(before) or not text.startswith(after):
        hint = "give each turn a row: input, output"
        raise ValueError(f"the chat template writes a turn otherwise if another follows: {hint}")
    return len(before), len(after)


def find_turns(tokenizer, messages, numbers, text, tools):
    """Returns what find_turn() does, for several turns, without writing the chat again for each of them. The
    chat is written once more with marks around the words of the other roles: the turns stand between these.
    find_turn() says once for each role how an answer to it begins."""
    mark, marked, places = "\ue000", list(messages), {}
    for number, message in enumerate(messages):
        words = message["content"].strip()
        if message["role"] != "assistant" and words:
            places[number] = 2 * len(places) + 1  # of its words among the pieces
            marked[number] = {**message, "content": message["content"].replace(words, mark + words + mark)}
    pieces = render(tokenizer, marked, tools).split(mark)
    ends = list(accumulate(map(len, pieces)))
    if "".join(pieces) != text or len(pieces) != 2 * len(places) + 1:
        places = {}  # the marks changed what the template writes
    openings, turns = {}, []  # what stands between the words of a role and the answer
    for number in numbers:
        question, place = messages[number - 1], places.get(number - 1)
        key = question["role"], question["content"][len(question["content"].rstrip()) :]
        if place and key in openings and text.startswith(openings[key], ends[place]):
            turn = ends[place] + len(openings[key]), ends[place + 1]
            if messages[number]["content"].strip() in text[slice(*turn)]:
                turns.append(turn)
                continue
        turns.append(find_turn(tokenizer, messages, number, text, tools))
        if place:
            openings[key] = text[ends[place] : turns[-1][0]]
    return turns


def encode_answer(tokenizer, prompt, answer, end_ids, tools=None):
    """Returns the ids of a prompt with its answer, and the mask of those that are trained, {"ids", "mask"}:
    every turn of the assistant in the answer, up to its first end token, where sampling stops, too. What
    follows the last one is cut off. An empty turn is not trained."""
    before, turns = read_chat(tokenizer, prompt, answer, tools)
    messages = before + turns
    text = render(tokenizer, messages, tools)
    check_shown(tokenizer, messages, tools, text)
    numbers = [n for n in range(len(before), len(messages)) if is_trained_turn(messages[n])]
    ids = tokenize(tokenizer, text)
    mask = [0] * len(ids)
    place, first, end = 0, 0, -1  # a place in the text, its token, and the last token that is trained
    for start, stop in find_turns(tokenizer, messages, numbers, text, tools):
        piece = tokenize(tokenizer, text[place:start], is_open=True)
        if ids[first : first + len(piece)] != piece:  # some begin every text with a blank
            piece = tokenize(tokenizer, text[:start], is_open=True)[first:]
        if ids[first : first + len(piece)] != piece:
            hint = "end PROMPT_TEMPLATE with a line break"
            raise ValueError(f"the tokenizer joins a prompt with its answer: {hint}")
        place, first = start, first + len(piece)
        end = next((t for t in range(first, len(ids)) if ids[t] in end_ids), None)
        if end is None or tokenizer.decode([ids[end]]) not in text[start:stop]:
            raise ValueError(f"nothing ends the answer: sampling stops at {tokenizer.decode(end_ids)!r}")
        mask[first : end + 1] = [1] * (end + 1 - first)
    return {"ids": ids[: end + 1], "mask": mask[: end + 1]}


def column(rows, field):
    return [row[field] for row in rows]


# ================================================================ processes


def join_processes():
    """Joins torchrun's processes and asks for kernels that add in a fixed order. Returns the device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(DETERMINISTIC)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time
    # Float32 logits of a bfloat16 model: 10 bits of each factor (TF32) instead of 7, and float32 sums
    torch.backends.cuda.matmul.allow_tf32 = DTYPE == "bfloat16"
    default = f"cuda:{gpu}" if DEVICE == "cuda" or torch.cuda.is_available() else "cpu"
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
    return tqdm(items, unit=f" {unit}", leave=False, file=sys.stdout, disable=None if rank == 0 else True)


# ================================================================ the run's files


class Run:
    """The files of one run in OUTPUT_DIR, which process 0 writes, and the signals that end the run."""

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
        self.facts["processes"] = world_size
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
        """Opens the logs and catches signals. A run that continues cuts the logs back to its checkpoint; if
        no step is left, it is complete."""
        self.outcome = "Nothing was left to do: complete" if is_complete else "Done"
        self.handlers = {}
        with suppress(ValueError):  # only the main thread gets signals
            self.handlers = {n: signal.signal(n, self.on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        if rank > 0:
            return
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
        is_own = self.checkpoint and self.checkpoint.resolve().parent == self.folder.resolve()
        if not is_own:
            state.best_score, state.log_sizes, state.wandb_id = -math.inf, {}, None
            state.evaluations_without_gain = 0
        if not config.exists():
            return
        stale = list_checkpoints(self.folder)
        if is_own:
            stale = [path for path in stale if int(path.name[5:]) > state.step]
        else:
            for pattern in "logs/*.jsonl logs/training_*.log *_metrics_*.png training_config.json".split():
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
        all_gather(None)  # wait: torchrun would end processes that still write
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
        record = {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in record.items()}
        if rank == 0:
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
    asks = resume == "ask" and world_size == 1 and sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()
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


# The panels of dpo_metrics_with_entropy.png; training_metrics_detailed.png has all metrics that vary
PANELS = "loss reward_accuracy reward_margin chosen_logprob accuracy_sampled accuracy_greedy".split()


def draw_grid(folder, path, names=None):
    """Draws a panel per metric: each training step faint, their rolling mean, and the evaluations' points."""
    records = [json.loads(line) for line in (folder / "logs/metrics.jsonl").read_text().splitlines()]
    names = [name for name in names or dict.fromkeys(chain(*records)) if name not in ("phase", "step")]
    names = [name for name in names if len({r.get(name) for r in records} - {None}) > 1]  # it varies
    phases = ["train", *dict.fromkeys(r["phase"] for r in records if r["phase"] != "train")]
    colors = dict(zip(phases, ("blue", "orange", "green", "red", "purple", "brown")))
    height = max(1, math.ceil(len(names) / 3))
    figure = Figure(figsize=(10, 2.3 * height + 0.5), layout="tight")
    for number, name in enumerate(names, 1):
        axis = figure.add_subplot(height, 3, number, title=name, xlabel="step")
        axis.grid(alpha=0.3)
        for phase, color in colors.items():
            points = [r for r in records if r["phase"] == phase and r.get(name) is not None]
            steps, values = column(points, "step"), column(points, name)
            if phase != "train":
                axis.plot(steps, values, "o-", color=f"tab:{color}", markersize=4)
            elif values:
                window = max(1, len(values) // 12)
                means = np.convolve(values, np.full(window, 1 / window), "valid")
                axis.plot(steps, values, ".-", color=f"tab:{color}", alpha=0.25)
                axis.plot(steps[window - 1 :], means, color=f"tab:{color}")
    legend = "; ".join(f"{color}: {phase}" for phase, color in colors.items())
    figure.suptitle(f"{legend} (train: each step and rolling mean)", fontsize=9)
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
        "BATCH_SIZE GRADIENT_ACCUMULATION_STEPS EVAL_BATCH_SIZE LOGITS_AT_ONCE MAX_TOKENS MAX_NEW_TOKENS "
        "NUM_EPOCHS MAX_STEPS KEEP_LAST_N_CHECKPOINTS MAX_EVAL_PAIRS"
    )
    rules = {
        "DTYPE is float32 or bfloat16": DTYPE in ("float32", "bfloat16"),
        "LR_SCHEDULER_TYPE is linear or cosine": LR_SCHEDULER_TYPE in ("linear", "cosine"),
        "TEMPERATURE and MAX_GRAD_NORM are above 0": min(TEMPERATURE, MAX_GRAD_NORM) > 0,
        "LOSS_TYPE is dpo or ipo": LOSS_TYPE in ("dpo", "ipo"),
        "BETA is above 0": BETA > 0,
        "LABEL_SMOOTHING is from 0 to below 0.5": 0 <= LABEL_SMOOTHING < 0.5,
        "LABEL_SMOOTHING is of dpo, not of ipo": LOSS_TYPE == "dpo" or LABEL_SMOOTHING == 0,
        "PROMPT_TEMPLATE contains {input}": "{input}" in PROMPT_TEMPLATE,
        "TRAIN_DATASETS has a data set": len(TRAIN_DATASETS) > 0,
    }
    for rule, is_kept in rules.items():
        if not is_kept:
            raise UserError(f"a constant breaks a rule: {rule}")


def train_main():
    """Exit codes: 0; 2: the user can correct it; 130, 143: a signal; 1, with a traceback: other errors."""
    trainer = None
    try:
        apply_overrides(sys.argv[1:])
        trainer = DPOTrainer()
        trainer.train()
    except (UserError, OSError) as error:  # OSError: a file that cannot be read or written
        if trainer and not isinstance(error, UserError):
            raise  # a full disk
        print(f"\n{Path(__file__).name}: {first_line(error)}", file=sys.stderr)
        sys.exit(2)
    if world_size > 1:
        dist.destroy_process_group()  # else one of its threads may end the process with an error
    if trainer.run.signal:
        sys.exit(128 + trainer.run.signal)


if __name__ == "__main__":
    train_main()
