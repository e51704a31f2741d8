"""Supervised fine-tuning in one file: a policy is trained on demonstrations (arXiv 2203.02155, step 1).

    L = -mean_t log pi(y_t | what stands before it)

t runs over the tokens of all answers in an optimizer step, each up to its first end token. In a chat
every turn of the assistant is an answer, with its tool calls, except the first message and turns whose
weight is 0. Dropout is off. Rows longer than MAX_TOKENS are left out.

Shapes: tokens = all trained tokens of the rows, one row after the other; T = tokens of the longest row.

    python ppo/sft.py                          # edit the constants below, or give KEY=VALUE or @FILE
    python ppo/sft.py ACTOR_MODEL=Qwen/Qwen2.5-0.5B LEARNING_RATE=1e-5 DTYPE=bfloat16
    torchrun --nproc_per_node=4 ppo/sft.py     # the same update up to rounding
    python ppo/ppo.py ACTOR_MODEL=checkpoints/sft/best/policy OUTPUT_DIR=checkpoints/sft_ppo  # then PPO

Writes logs/, checkpoints step_N/, best/policy/ and two pictures into OUTPUT_DIR. A run that was stopped
or killed continues from its last checkpoint, and ends with the same bytes.

To change           see                                To change      see
the loss            update, answer_logprobs            a metric       update, evaluate
what is trained     is_trained_turn, encode_answer     a plot         PANELS, draw_grid
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
from contextlib import contextmanager, suppress
from copy import deepcopy
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__" and ("-h" in sys.argv or "--help" in sys.argv):
    below_heading = Path(__file__).read_text().split("= constants\n")[1]
    print(__doc__ + below_heading.split("\n# =====")[0])
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
from transformers.modeling_layers import GradientCheckpointingLayer

rank, world_size, gpu = 0, 1, 0  # this process under torchrun; rank 0 alone asks, writes and prints
if dist.is_torchelastic_launched():
    rank, world_size, gpu = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
ROOT = next((path for path in Path(__file__).resolve().parents if (path / "rewards").is_dir()), None)
if ROOT is None:
    sys.exit(f"{__file__}: copy the folder rewards/ of the repository beside this file, or above it")
sys.path.insert(0, str(ROOT))
import rewards
from rewards import UserError, call_reward, find_function

# ================================================================ constants

# Model: a folder or a hub name
ACTOR_MODEL = f"{ROOT}/data/tiny/policy"
LORA_RANK = 0  # 0: all weights are trained; > 0: LoRA (2106.09685) of this rank on all linear layers
LORA_ALPHA = 32.0  # an adapter's output is scaled by LORA_ALPHA / LORA_RANK
DTYPE = "float32"  # float32 | bfloat16 (autocast; weights and optimizer state stay float32)
DEVICE = "auto"  # auto | cpu | cuda | cuda:1
ATTENTION: str | None = None  # sdpa | eager | flash_attention_2 (if installed); None: what the model has
GRADIENT_CHECKPOINTING = False  # recompute activations in the update: less memory, slower

# Data sets: {"path", "type": "jsonl" | "csv" | "parquet" | "hub"}, on the hub also "name" and "split".
# The other keys name columns. "input": prompts, texts or lists of chat messages; "output": the answers,
# texts or messages. Or "messages": whole chats. "tools": lists, or their JSON, for the chat template
TRAIN_DATASETS = [
    {
        "path": f"{ROOT}/data/tiny/demonstrations.jsonl",
        "type": "jsonl",
        "input": "problem",
        "output": "solution",
    },
]
EVAL_DATASETS = [{**TRAIN_DATASETS[0], "path": f"{ROOT}/data/tiny/test.jsonl"}]
PROMPT_TEMPLATE = "{input}"  # the question; the tokenizer's chat template, if it has one, wraps it
SYSTEM_PROMPT: str | None = None  # put before chats that have none; needs a chat template
MAX_EVAL_ROWS: int | None = 200  # per data set, the first ones; None: all
MAX_TOKENS = 512  # of a prompt with its answer, or of a chat; longer rows are left out, and counted

# Evaluation beside the loss: responses are sampled, and a function of rewards/ says which are correct
ACCURACY_FUNCTION: str | None = "exact_answer"  # f(prompts, responses, answers); None: no sampling
MAX_NEW_TOKENS = 64
TEMPERATURE = 1.0  # > 0
EVAL_BATCH_SIZE = 64  # prompts sampled at a time

# Optimisation
BATCH_SIZE = 32  # rows per forward and backward pass: memory and speed, not the result
GRADIENT_ACCUMULATION_STEPS = 2  # a step has BATCH_SIZE times this many rows
LOGITS_AT_ONCE = 256  # tokens whose logits are held at a time; recomputed in the backward pass
LEARNING_RATE = 5e-4
MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 0.0
USE_LR_SCHEDULER = True
LR_SCHEDULER_TYPE = "cosine"  # linear | cosine, to 0
WARMUP_STEPS = 5  # linear warm-up, with or without a scheduler

# Schedule and files
NUM_EPOCHS = 2  # passes over the rows
MAX_STEPS: int | None = None  # the run ends at this step if NUM_EPOCHS have more; None: it does not
SAVE_EVERY_N_STEPS = 25  # 0: only at the end
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 16  # 0: only before the first and after the last step
EARLY_STOPPING_PATIENCE = 0  # evaluations without a lower loss before the run ends; 0: all steps are run
EARLY_STOPPING_THRESHOLD = 0.0  # a smaller gain does not count for EARLY_STOPPING_PATIENCE
LOG_SAMPLES = 2  # rows per step written to samples.jsonl
RESUME = "ask"  # ask (yes without a terminal or under torchrun) | yes | no | path of a checkpoint, a run
OUTPUT_DIR = f"{ROOT}/checkpoints/{Path(__file__).stem}"
SEED = 1
DETERMINISTIC = True  # the same run gives the same bytes: kernels add in a fixed order, slower on a GPU
USE_WANDB = False  # its project and mode: environment variables WANDB_PROJECT, WANDB_MODE

# ================================================================ the trainer


class SFTTrainer:
    """self.run has the run's files. Checkpoints hold self.state beside models and optimizers: you may
    add numbers, texts, lists and tensors to it, of Python and torch (numpy's cannot be loaded)."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        self.device = join_processes()
        self.run = Run(resume_from_checkpoint or RESUME)
        self.state = SimpleNamespace(
            step=0,  # the current one, from 1; between steps, how many are done
            evaluation={},  # metrics of the last evaluation
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
        except (TypeError, AttributeError, NameError):
            raise  # a mistake in the program
        except Exception as error:  # the libraries raise many types
            names = f"ACTOR_MODEL={ACTOR_MODEL} or RESUME={self.run.checkpoint or RESUME}"
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"{names} cannot be loaded ({reason})") from error
        self.train_rows = load_rows(TRAIN_DATASETS, self.make_row)
        self.eval_rows = []
        for spec in EVAL_DATASETS:
            self.eval_rows += load_rows([spec], self.make_row)[:MAX_EVAL_ROWS]
        self.run.facts["data"] = digest(self.train_rows)
        all_ids = column(self.train_rows + self.eval_rows, "ids")
        lengths = list(map(len, all_ids))
        self.accuracy_function = None
        if ACCURACY_FUNCTION:
            self.accuracy_function = find_function(ACCURACY_FUNCTION)
            lengths += [len(row["prompt_ids"]) + MAX_NEW_TOKENS for row in self.eval_rows]
        check_limits(self.actor, max(chain(self.end_ids, *all_ids)), max(lengths))
        rows_per_step = BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS
        self.steps_per_epoch = math.ceil(len(self.train_rows) / rows_per_step)
        steps = NUM_EPOCHS * self.steps_per_epoch
        self.total_steps = steps if MAX_STEPS is None else min(steps, MAX_STEPS)

    def load_models(self, checkpoint):
        """The policy comes from the checkpoint if there is one."""
        saved = checkpoint / "policy" if checkpoint else None
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(ACTOR_MODEL)
        self.actor = load_trained(transformers.AutoModelForCausalLM, ACTOR_MODEL, saved).to(self.device)
        self.models = {"policy": self.actor}  # what a checkpoint holds
        self.optimizers = {"policy": make_optimizer(self.actor, LEARNING_RATE)}
        self.end_ids = find_end_ids(self.actor, self.tokenizer)

    def make_row(self, record, spec, row_id):
        """Returns a row from a record of the data: id, prompt, answer (the last turn's text), ids of
        both, mask (1: trained), prompt_ids (before the last turn), and why it is left out."""
        if "messages" in spec:
            chat = record[spec["messages"]]
            if not isinstance(chat, list):
                raise ValueError(f"a chat is a list of messages, not {chat!r:.80}")
            prompt, answer = chat[:1], as_answer(chat[1:])
        else:
            prompt, answer = record[spec["input"]], as_answer(record[spec["output"]])
        row = {"id": row_id, "prompt": prompt, "answer": answer, "left_out": None}
        row |= encode_answer(self.tokenizer, prompt, answer, self.end_ids, read_tools(record, spec))
        trained_turns = [n for n, turn in enumerate(as_turns(answer)) if is_trained_turn(turn)]
        if not trained_turns:
            row["left_out"] = "without an answer"
            return row
        if len(row["ids"]) > MAX_TOKENS:
            row["left_out"] = "longer than MAX_TOKENS"
        if isinstance(answer, list):  # evaluation samples the last trained turn, and compares that
            last = trained_turns[-1]
            row["prompt"] = [*as_messages(prompt), *answer[:last]]
            row["answer"] = answer[last]["content"] or None  # None: it only calls tools
        untrained = [t for t, is_trained in enumerate(row["mask"]) if not is_trained]
        row["prompt_ids"] = row["ids"][: untrained[-1] + 1]
        return row

    # ------------------------------------------------------------ the algorithm

    def train(self):
        """Trains until the last step, a signal, or patience ends it. Returns the last evaluation."""
        state = self.state
        self.run.open(state, self.is_over())  # opens the logs and catches signals
        self.run.log(f"{len(self.train_rows)} rows and {len(self.eval_rows)} held out, on {self.device}")
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
        """Makes all random numbers of a step a function of its number: no checkpoint has to keep any."""
        transformers.set_seed((1_000_003 * SEED + self.state.step) % 2**32)

    def is_over(self):
        self.run.signal = max(all_gather(self.run.signal))  # any process may have got it
        out_of_patience = 0 < EARLY_STOPPING_PATIENCE <= self.state.evaluations_without_gain
        return self.run.signal or out_of_patience or self.state.step >= self.total_steps

    def next_rows(self):
        """Returns the step's rows, fewer at the end of an epoch. Each epoch has its own order."""
        epoch, step_in_epoch = divmod(self.state.step - 1, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(SEED + epoch + 1)
        order = torch.randperm(len(self.train_rows), generator=generator)
        rows_per_step = BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS
        return [self.train_rows[i] for i in order.split(rows_per_step)[step_in_epoch]]

    def update(self, rows):
        """One optimizer step. The loss is the mean over all trained tokens of the rows: a process adds
        up its micro-batches, then the processes add up their gradients. Returns the step's metrics."""
        scale = learning_rate_scale(self.state.step - 1, self.total_steps)
        set_learning_rate(self.optimizers["policy"], scale)
        num_tokens = sum(map(sum, column(rows, "mask")))
        sums = Counter()
        # Every process cuts the same list of micro-batches and takes each world_size-th of them
        for micro in progress(cut_by_length(rows)[rank::world_size], "micro-batches"):
            logprobs, is_likeliest = answer_logprobs(self.actor, micro)
            loss = -logprobs.sum() / num_tokens  # the loss is here
            loss.backward()
            sums["loss"] += loss.detach()
            sums["token_accuracy"] += is_likeliest.sum() / num_tokens
        metrics = clip_and_step(self.optimizers, sums, self.run)
        return {**metrics, "learning_rate": LEARNING_RATE * scale, "trained_tokens": num_tokens}

    # ------------------------------------------------------------ evaluation, logs, checkpoints

    @torch.no_grad()
    def evaluate(self):
        """Returns metrics of held-out rows: means over their trained tokens, and the accuracy of a
        greedy and of a sampled answer to each prompt."""
        rows = self.eval_rows
        if not rows:
            return {}
        num_tokens = sum(map(sum, column(rows, "mask")))
        sums = Counter()
        for micro in progress(cut_by_length(rows)[rank::world_size], "micro-batches"):
            logprobs, is_likeliest = answer_logprobs(self.actor, micro)
            sums["loss"] -= logprobs.sum().item()
            sums["token_accuracy"] += is_likeliest.sum().item()
        metrics = {name: x / num_tokens for name, x in add_over_processes(sums).items()}
        with_answer = [row for row in rows if row["answer"] is not None]
        if self.accuracy_function and with_answer:
            metrics["accuracy_greedy"] = self.accuracy(with_answer, greedy=True)
            metrics["accuracy_sampled"] = self.accuracy(with_answer, greedy=False)
        return metrics

    def accuracy(self, rows, greedy):
        """Returns the share of correct responses to the rows' prompts, by ACCURACY_FUNCTION."""
        responses = self.respond(column(rows, "prompt_ids"), greedy)
        prompts, answers = column(rows, "prompt"), column(rows, "answer")
        return np.mean(call_reward(self.accuracy_function, prompts, responses, answers, {})).item()

    @torch.no_grad()
    def respond(self, prompts, greedy):
        """Returns the text of one response per prompt (a list of ids), by transformers' generate()
        without top-k, top-p or the like. The same random numbers are drawn at every call."""
        config = transformers.GenerationConfig(eos_token_id=self.end_ids, pad_token_id=self.end_ids[0])
        config.max_new_tokens = MAX_NEW_TOKENS
        if not greedy:
            config.update(do_sample=True, temperature=TEMPERATURE, top_k=0)
        model = self.actor.get_base_model() if LORA_RANK else self.actor
        saved_config = model.generation_config  # generate() would take top-k and the like from it
        model.generation_config = config
        texts = {}  # by the prompt's number
        for first in range(0, len(prompts), EVAL_BATCH_SIZE)[rank::world_size]:
            ids, mask = pad_left(prompts[first : first + EVAL_BATCH_SIZE], self.device)
            torch.manual_seed(SEED + first)
            with autocast(self.device):
                output = model.generate(ids, attention_mask=mask)
            for number, response in enumerate(output[:, ids.shape[1] :].tolist(), first):
                ends = [t for t, token in enumerate(response) if token in self.end_ids]
                if ends:
                    response = response[: ends[0]]
                texts[number] = self.tokenizer.decode(response)
        model.generation_config = saved_config
        all_texts = {}
        for process_texts in all_gather(texts):
            all_texts |= process_texts
        return [all_texts[number] for number in range(len(prompts))]

    def record(self, rows, metrics, seconds):
        """Logs the step's metrics, some of its rows, and its line on the terminal."""
        step = self.state.step
        epoch = (step - 1) // self.steps_per_epoch + 1
        metrics = {"epoch": epoch, **metrics, "seconds/update": seconds}
        self.run.write("metrics.jsonl", phase="train", step=step, **metrics)
        for row in rows[:LOG_SAMPLES]:
            trained = [token for token, is_trained in zip(row["ids"], row["mask"]) if is_trained]
            texts = {"read": self.tokenizer.decode(row["ids"]), "trained": self.tokenizer.decode(trained)}
            self.run.write("samples.jsonl", step=step, id=row["id"], **texts)
        time_left = timedelta(seconds=round(seconds * (self.total_steps - step)))
        self.run.log(
            f"Epoch {epoch}/{NUM_EPOCHS}: L:{metrics['loss']:.4f} TA:{metrics['token_accuracy']:.3f} "
            f"LR:{metrics['learning_rate']:.2e}  step {step}/{self.total_steps}, {time_left} left"
        )

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
        """Writes best/policy/, with an adapter merged into the weights: it loads without PEFT."""
        if rank > 0:
            return
        policy = self.actor
        if LORA_RANK:  # merged on the CPU: a GPU may lack memory for another model
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
            saved = {"state": vars(self.state), "optimizers": optimizers}
            torch.save({**saved, "trained": self.trained_names()}, tmp / "training_state.pt")
            shutil.copy(self.run.folder / "training_config.json", tmp / "run.json")
        for old in list_checkpoints(self.run.folder)[:-KEEP_LAST_N_CHECKPOINTS]:
            shutil.rmtree(old.rename(f"{old}.tmp"))  # renamed first: a kill must not leave half of step_N
        draw_grid(self.run.folder, "training_metrics_detailed.png")
        draw_grid(self.run.folder, f"{Path(__file__).stem}_metrics_with_entropy.png", PANELS)

    def trained_names(self):
        """Returns what the optimizers' states belong to: their classes and groups of parameters."""
        trained = {}
        for key, optimizer in self.optimizers.items():
            names = {parameter: name for name, parameter in self.models[key].named_parameters()}
            trained[key] = [type(optimizer).__name__]
            for group in optimizer.param_groups:
                trained[key].append([names.get(parameter) for parameter in group["params"]])
        return trained

    def load_state(self, folder):
        """Restores state and optimizers; load_models() took the weights from the same folder."""
        saved = torch.load(folder / "training_state.pt", map_location="cpu", weights_only=True)
        if saved.get("trained") != self.trained_names():
            raise UserError("it trained other parameters, in another order, or by another optimizer")
        for name, optimizer in self.optimizers.items():
            moments = saved["optimizers"][name]["state"]  # rates are those of the constants now
            optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
        for name, value in saved["state"].items():
            tensor = getattr(self.state, name, None)
            if torch.is_tensor(tensor):
                tensor.detach().copy_(value)  # in place: an optimizer may train it
            else:
                setattr(self.state, name, value)


def learning_rate_scale(steps_done, total):
    """Returns the learning rate's factor after steps_done steps: linear warm-up, then the schedule."""
    if steps_done < WARMUP_STEPS:
        return (steps_done + 1) / WARMUP_STEPS
    if not USE_LR_SCHEDULER:
        return 1.0
    done = (steps_done - WARMUP_STEPS) / max(1, total - WARMUP_STEPS)
    if LR_SCHEDULER_TYPE == "linear":
        return 1 - done
    return 0.5 * (1 + math.cos(math.pi * done))


# ================================================================ models


def load_model(auto_class, path, is_trained=False):
    """Returns a model in evaluation mode, in which it stays. Frozen linear layers, except the head, are
    stored in DTYPE: autocast would cast them at each call. Missing weights are an error."""
    options = {"output_loading_info": True, "dtype": torch.float32, "attn_implementation": ATTENTION}
    model, info = auto_class.from_pretrained(path, **options)
    missing = info["missing_keys"] | {key[0] for key in info["mismatched_keys"]}
    if missing:
        raise UserError(f"the model {path} lacks the weights {', '.join(sorted(missing))}")
    if getattr(model, "peft_config", None):  # all weights would be trained, and the adapter alone saved
        raise UserError(f"{path} is an adapter: merge it, or name the run's best/policy")
    for parameter in model.parameters():
        # Weights that are mapped from a file may be unaligned, which changes a product's last bit
        parameter.data = parameter.data.clone()
    head = model.get_output_embeddings()
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and layer is not head and not is_trained:
            layer.to(getattr(torch, DTYPE))
    return model.requires_grad_(is_trained).eval()


def load_trained(auto_class, path, saved):
    """Returns a model to train, from a checkpoint's folder `saved` or else path, with LoRA's adapter."""
    if saved and (saved / "adapter_config.json").exists() != (LORA_RANK > 0):
        raise UserError(f"{saved} was trained with another LORA_RANK")
    if LORA_RANK == 0:
        model = load_model(auto_class, saved or path, is_trained=True)
    else:
        import peft  # slow

        base = load_model(auto_class, path)
        options = {"r": LORA_RANK, "lora_alpha": LORA_ALPHA, "target_modules": "all-linear"}
        model = peft.get_peft_model(base, peft.LoraConfig(**options, task_type="CAUSAL_LM"))
        if saved:
            peft.set_peft_model_state_dict(model, peft.load_peft_weights(saved, "cpu"))
    if GRADIENT_CHECKPOINTING:
        # Not by gradient_checkpointing_enable(), which needs training mode with its dropout
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
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = scale * group["initial_lr"]


def clip_and_step(optimizers, sums, run):
    """Adds up gradients and metrics over processes, and makes a step if all of them are finite. sums:
    this process's metrics, 0-d tensors. Returns the metrics with the norms of the gradients."""
    metrics = {}
    for name, optimizer in optimizers.items():
        parameters = list(chain(*column(optimizer.param_groups, "params")))
        for parameter in parameters:
            if parameter.grad is None:  # this process had no micro-batch
                parameter.grad = torch.zeros_like(parameter)
            if world_size > 1:
                dist.all_reduce(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        metrics[f"{name}_grad_norm"] = norm.item()
    metrics |= add_over_processes({name: x.item() for name, x in sums.items()})
    is_finite = all(map(math.isfinite, metrics.values()))
    for optimizer in optimizers.values():
        if is_finite:
            optimizer.step()
        optimizer.zero_grad()
    if not is_finite:
        run.log("WARNING: skipped an optimizer step that is not finite")
    return metrics


def check_limits(model, largest_id, length):
    """Refuses token ids that the model has no embedding for, and texts longer than its positions: on a
    GPU they would end the process."""
    count = model.get_input_embeddings().num_embeddings
    if largest_id >= count:
        raise UserError(f"{model.name_or_path} has {count} embeddings: too few for its tokenizer's ids")
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    rope = getattr(config, "rope_parameters", None) or {}
    if length > positions * (rope.get("factor") or 1):
        fault = "too few for the longest text with its response"
        raise UserError(f"{model.name_or_path} has {positions} positions: {fault}, {length} tokens")


def find_end_ids(model, tokenizer):
    """Returns the ids at which sampling stops, with which the model is saved: the token by which the
    chat template ends a turn, the tokenizer's EOS, and those of the generation config."""
    ends = []
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "xyzzy"}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        after_answer = text.rpartition("xyzzy")[2].strip()
        first_ids = tokenizer(after_answer, add_special_tokens=False)["input_ids"][:1]
        ends += [id for id in first_ids if id in tokenizer.added_tokens_decoder]
    ends.append(tokenizer.eos_token_id)
    configured = model.generation_config.eos_token_id  # an id, a list of them, or None
    ends += configured if isinstance(configured, list) else [configured]
    ends = [id for id in dict.fromkeys(ends) if id is not None]
    if not ends:
        raise UserError(f"ACTOR_MODEL = {ACTOR_MODEL!r} has no EOS token: set its tokenizer's eos_token")
    model.generation_config.eos_token_id = ends
    return ends


def answer_logprobs(model, rows):
    """Returns the log-probabilities of all trained tokens, and whether each token is the likeliest, two
    (tokens,) in float32. Rows are padded on the right, where a causal model cannot see. Logits are held
    for LOGITS_AT_ONCE tokens at a time, and computed again in the backward pass."""
    ids = pad_sequence([torch.tensor(row["ids"]) for row in rows], batch_first=True).to(model.device)
    mask = pad_sequence([torch.tensor(row["mask"]) for row in rows], batch_first=True).to(model.device)
    is_trained = mask[:, 1:] == 1  # of the tokens after the first: (rows, T - 1)
    with autocast(model.device):
        output = model.get_decoder()(input_ids=ids, use_cache=False)
    hidden = output.last_hidden_state[:, :-1][is_trained].split(LOGITS_AT_ONCE)  # before each token
    tokens = ids[:, 1:][is_trained].split(LOGITS_AT_ONCE)
    results = []
    for chunk in zip(hidden, tokens):
        results.append(checkpoint(logprobs_of_hidden, model, type(output), *chunk, use_reentrant=False))
    logprobs, is_likeliest = zip(*results)
    return torch.cat(logprobs), torch.cat(is_likeliest)


def logprobs_of_hidden(model, output_class, hidden, tokens):
    """Returns the log-probability of each token (tokens,) and whether it is the likeliest, from the
    hidden states before them (tokens, width). Some models scale or cap their logits, so the model's own
    forward() computes them: for this call its decoder returns these states, and only the head runs."""
    decoder = model.get_decoder()
    decoder.forward = lambda *_, **__: output_class(last_hidden_state=hidden.unsqueeze(0))
    try:
        with autocast(model.device):
            logits = model(input_ids=tokens.unsqueeze(0)).logits.squeeze(0).float()
    finally:
        del decoder.forward
    logprobs = -torch.nn.functional.cross_entropy(logits, tokens, reduction="none")
    return logprobs, (logits.argmax(-1) == tokens).float()


def cut_by_length(rows):
    """Returns micro-batches, lists of BATCH_SIZE rows of like length, the longest first."""
    rows = sorted(rows, key=lambda row: len(row["ids"]), reverse=True)
    return [rows[first : first + BATCH_SIZE] for first in range(0, len(rows), BATCH_SIZE)]


def pad_left(sequences, device):
    """Returns lists of ids as one tensor, (sequences, length of the longest), and its mask."""
    ids = list(map(torch.tensor, sequences))
    mask = list(map(torch.ones_like, ids))
    options = {"batch_first": True, "padding_side": "left"}
    return pad_sequence(ids, **options).to(device), pad_sequence(mask, **options).to(device)


# ================================================================ data


def load_rows(specs, make_row):
    """Returns the rows of data sets that can be trained; the others are counted."""
    rows = []
    for number, spec in enumerate(specs, 1):
        row_id = f"the data set {spec}"  # for an error before the first record
        try:
            columns = check_keys(spec)
            for line, record in enumerate(read_records(spec), 1):
                row_id = f"{number}/{Path(spec['path']).name}:{line}"
                if None in record:  # where csv puts them
                    raise ValueError(f"more fields than the {len(record) - 1} columns of the header")
                if not columns <= record.keys():
                    raise ValueError(f"{list(record)} lacks a column of {spec}")
                if spec["type"] in ("parquet", "hub"):  # they fill absent keys with None
                    record = {name: without_nulls(value) for name, value in record.items()}
                rows.append(make_row(record, spec, row_id))
                row_id = f"after {row_id}"  # if the next record cannot be read
        except Exception as error:  # the libraries raise many types
            raise UserError(f"{row_id}: {type(error).__name__}: {first_line(error)}") from None
    left_out = [row for row in rows if row["left_out"]]
    for reason in dict.fromkeys(column(left_out, "left_out")):
        ids = [row["id"] for row in left_out if row["left_out"] == reason]
        if rank == 0:
            print(f"left out {len(ids)} of {len(rows)} rows, {reason}; the first is {ids[0]}")
    if specs and len(left_out) == len(rows):
        raise UserError(f"no row of {specs} can be trained")
    return [row for row in rows if not row["left_out"]]


def check_keys(spec):
    """Returns the columns that a data set names. Refuses keys that nothing reads."""
    keys = spec.keys() - {"path", "type"}
    if spec.get("type") == "hub":
        keys -= {"name", "split"}
    is_known = keys - {"tools"} in ({"input", "output"}, {"messages"})
    if not is_known or not {"path", "type"} <= spec.keys():
        known = "path, type, input and output or messages, tools"
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
            yield from csv.DictReader(file, strict=True)  # strict: no open quote swallows the rest
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
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def read_message(message):
    """Returns a message whose content is a text. Refuses what a chat template would misread."""
    if not isinstance(message, dict):
        raise ValueError(f"a chat is a list of messages, not of {message!r:.80}")
    message = {key: x for key, x in message.items() if x is not None}  # absent keys in parquet
    keys = ["role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking"]
    weight_keys = ["weight", "train", "trainable", "loss_mask"]
    weights = [message.pop(key) for key in weight_keys if key in message]
    if not set(weights) <= {0, 1}:
        raise ValueError(f"a weight is 0 (not trained) or 1: {weights} of {message!r:.200}")
    if "tool_calls" in message:
        message["tool_calls"] = list(map(read_call, message["tool_calls"]))
        message.setdefault("content", "")
    content = message.get("content")
    if isinstance(content, list) and all(set(part) == {"type", "text"} for part in content):
        message["content"] = "".join(column(content, "text"))
    if not isinstance(message.get("content"), str) or not set(message) <= set(keys):
        raise ValueError(f"a message has {', '.join(keys)}, and its content is a text: {message!r:.200}")
    if message.get("role") not in ("system", "developer", "user", "assistant", "tool"):
        raise ValueError(f"a message has an unknown role: {message!r:.200}")
    if 0 in weights:
        message["weight"] = 0
    return message


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


def as_messages(prompt):
    """Returns the messages of a prompt, a text or a chat."""
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": PROMPT_TEMPLATE.replace("{input}", prompt)}]
    if isinstance(prompt, list) and prompt:
        return list(map(read_message, prompt))
    raise ValueError(f"a prompt is a text or a list of messages, not {prompt!r:.80}")


def as_answer(value):
    """Returns an answer of the data, a text or messages; None becomes an empty text. A whole number
    becomes a text. A float is refused: it has lost the form that it had, such as 7.50."""
    if value is None:
        return ""
    if isinstance(value, list):
        return list(map(read_message, value))
    if type(value) not in (str, int):
        raise ValueError(f"an answer is a text or a list of messages, not {value!r:.80}")
    return str(value)


def as_turns(answer):
    """Returns the messages of an answer, a text or messages."""
    return answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]


def is_trained_turn(turn):
    """Returns whether a message is the assistant's, says something and is to be trained."""
    if turn["role"] != "assistant" or turn.get("weight") == 0:
        return False
    return bool(turn.get("tool_calls") or turn["content"].strip())


def read_tools(record, spec):
    """Returns the tools of a record for the chat template, a list, or None."""
    tools = record[spec["tools"]] if "tools" in spec else None
    if tools and isinstance(tools, str):
        tools = json.loads(tools)
    if tools and not isinstance(tools, list):
        raise ValueError(f"tools are a list or its JSON, not {tools!r:.80}")
    return tools or None


def read_chat(tokenizer, prompt, answer, tools=None):
    """Returns the messages of a prompt (a text or a chat) and of its answer (a text or messages)."""
    before, turns = as_messages(prompt), as_turns(answer)
    if turns and before[-1]["role"] == turns[0]["role"] == "assistant":
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
        return ids[:-1]  # some tokenizers append EOS to every text
    return ids


def check_shown(tokenizer, messages, tools, text):
    """Refuses a chat template whose text shows nothing of a chat's tools, calls, thoughts or prompts."""
    if tools and render(tokenizer, messages) == text:
        raise ValueError("the chat template shows no tools: take one that does")
    for key in ("tool_calls", "reasoning_content", "thinking"):
        is_used = any(message.get(key) for message in messages)
        without = [{name: x for name, x in message.items() if name != key} for message in messages]
        if is_used and render(tokenizer, without, tools) == text:
            raise ValueError(f"the chat template shows no {key}: take one that does")
    for message in messages:
        for key in ("content", "reasoning_content", "thinking"):
            is_needed = key != "content" or message["role"] in ("system", "user")
            if is_needed and message.get(key, "").strip() not in text:
                raise ValueError(f"the chat template does not show the {message['role']}'s {key}")


def find_turn(tokenizer, messages, number, text, tools):
    """Returns where the policy's words of a turn begin and end in the text of its chat. Refuses a
    template that writes the turn otherwise if another follows."""
    before = render(tokenizer, messages[:number], tools, is_open=True)
    after = render(tokenizer, messages[: number + 1], tools)
    if not after.startswith(before) or not text.startswith(after):
        hint = "give each turn a row: input, output"
        raise ValueError(f"the chat template writes a turn otherwise if another follows: {hint}")
    return len(before), len(after)


def encode_answer(tokenizer, prompt, answer, end_ids, tools=None):
    """Returns the ids of a prompt with its answer, and the mask of those that are trained, {"ids",
    "mask"}: every turn of the assistant in the answer, up to its first end token, where sampling stops,
    too. What follows the last one is cut off. An empty turn is not trained."""
    before, turns = read_chat(tokenizer, prompt, answer, tools)
    messages = before + turns
    text = render(tokenizer, messages, tools)
    check_shown(tokenizer, messages, tools, text)
    ids = tokenize(tokenizer, text)
    mask = [0] * len(ids)
    length = 0  # tokens up to the last one that is trained
    text_done, ids_done = 0, 0  # where the latest turn begins, in the text and in the ids
    for number in range(len(before), len(messages)):
        if not is_trained_turn(messages[number]):
            continue
        start, stop = find_turn(tokenizer, messages, number, text, tools)
        piece = tokenize(tokenizer, text[text_done:start], is_open=True)
        first = ids_done + len(piece)
        if ids[ids_done:first] != piece:  # some tokenizers begin every text with a blank: compare from 0
            prefix = tokenize(tokenizer, text[:start], is_open=True)
            first = len(prefix)
            if ids[:first] != prefix:
                hint = "end PROMPT_TEMPLATE with a line break"
                raise ValueError(f"the tokenizer joins a prompt with its answer: {hint}")
        text_done, ids_done = start, first
        end = first
        while end < len(ids) and ids[end] not in end_ids:
            end += 1
        if end == len(ids) or tokenizer.decode([ids[end]]) not in text[start:stop]:
            raise ValueError(f"nothing ends the answer: sampling stops at {tokenizer.decode(end_ids)!r}")
        length = end + 1
        mask[first:length] = [1] * (length - first)
    return {"ids": ids[:length], "mask": mask[:length]}


def column(dicts, key):
    """Returns the value of a key in each of several dicts."""
    return [item[key] for item in dicts]


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


def all_gather(value):
    """Returns the values of all processes, a list by rank."""
    values = [value] * world_size
    if world_size > 1:
        dist.all_gather_object(values, value)
    return values


def add_over_processes(numbers):
    """Returns the sums over all processes of numbers, a dict by name."""
    sums = {}
    for process_numbers in all_gather(dict(numbers)):
        for name, x in process_numbers.items():
            sums[name] = sums.get(name, 0) + x
    return sums


def progress(items, unit):
    """Shows a progress bar on a terminal, which vanishes at the end."""
    is_hidden = None if rank == 0 else True  # None: hidden unless this is a terminal
    return tqdm(items, unit=f" {unit}", leave=False, file=sys.stdout, disable=is_hidden)


# ================================================================ the run's files


class Run:
    """The files of one run in OUTPUT_DIR, which process 0 writes, and the signals that end the run."""

    def __init__(self, resume):
        self.folder = Path(OUTPUT_DIR).absolute()  # now: a function may change the working directory
        self.logs = {}
        self.wandb = None
        self.signal = 0
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.lock = filelock.FileLock(f"{self.folder}.lock", is_singleton=True)
        self.facts = {"file": __file__, "program": os.path.abspath(sys.argv[0])}
        self.facts |= {"torch": torch.__version__, "processes": world_size}
        files = {os.path.realpath(path) for path in (__file__, sys.argv[0], rewards.__file__)}
        texts = [Path(path).read_bytes() for path in files if Path(path).is_file()]
        self.facts["text"] = digest(sorted(texts))
        checkpoint = None
        if rank == 0:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.lock.acquire(timeout=0)  # fails if another run writes into OUTPUT_DIR
            checkpoint = choose_checkpoint(self.folder, resume)
            print(f"Writing to {self.folder}; loading the models", flush=True)
        self.checkpoint = all_gather(checkpoint)[0]  # that of rank 0

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
            for number in (signal.SIGINT, signal.SIGTERM):
                self.handlers[number] = signal.signal(number, self.on_signal)
        if rank > 0:
            return
        self.lock.acquire(timeout=0)  # a second train() has to take it again
        if self.checkpoint:
            self.compare(state, is_complete)
        for unfinished in self.folder.glob("step_*.tmp"):  # a kill may leave some
            shutil.rmtree(unfinished)
        now = f"{datetime.now():%Y%m%d_%H%M%S_%f}"
        self.move_old_files(state, Path(f"{self.folder}_old_{now}"))
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        self.text_log = open(self.folder / f"logs/training_{now}.log", "a", buffering=1)
        for name in ("metrics.jsonl", "samples.jsonl"):
            file = open(self.folder / "logs" / name, "a", buffering=1)
            file.truncate(min(file.tell(), state.log_sizes.get(name, 0)))
            self.logs[name] = file
        config = self.folder / "training_config.json"
        tmp = config.with_suffix(".tmp")
        tmp.write_text(json.dumps({**self.facts, "constants": constants()}, indent=1))
        tmp.rename(config)
        if USE_WANDB:
            import wandb  # slow

            options = {"dir": self.folder, "config": constants()}
            self.wandb = wandb.init(**options, id=state.wandb_id, resume="allow")
            state.wandb_id = self.wandb.id

    def compare(self, state, is_complete):
        """Prints what changed since the checkpoint. Refuses another model: the weights are those of the
        checkpoint. Refuses a complete run that would end as if it had trained what changed."""
        earlier = json.loads((self.checkpoint / "run.json").read_text())
        changes = []
        for name, value in constants().items():
            is_new = earlier["constants"].get(name, value) != value
            if is_new and name not in ("RESUME", "OUTPUT_DIR"):
                changes.append(f"{name}={value!r}")
        print("Constants that changed: " + (", ".join(changes) or "none"), flush=True)
        for fact, name in (("text", "file"), ("data", "data")):
            if earlier.get(fact) != self.facts.get(fact):
                changes.append(f"the {name} changed since step {state.step}")
                print(changes[-1], flush=True)
        hint = "RESUME=no or another OUTPUT_DIR begins another run"
        model = earlier["constants"].get("ACTOR_MODEL")
        if model != constants()["ACTOR_MODEL"]:
            raise UserError(f"the weights of {self.checkpoint} are of ACTOR_MODEL={model}: {hint}")
        if is_complete and changes:
            raise UserError(f"complete at step {state.step}, but {'; '.join(changes)}: {hint}")

    def move_old_files(self, state, target):
        """Moves files to the folder `target`. A run that resumes its own checkpoint moves the
        checkpoints after it; a new run in a used folder moves all files of the earlier run. If anything
        is moved, best/ goes, too: it may be of a later step, or of the other run."""
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
            for pattern in ("logs/*.jsonl", "logs/training_*.log", "*_metrics_*.png"):
                stale += self.folder.glob(pattern)
        if stale or not is_own:
            state.best_score = -math.inf
            stale += [path.parent for path in self.folder.glob("best/*/config.json")]
        if not is_own:
            stale.append(config)  # the last one: a folder without it is nobody's run
        for path in stale:
            moved = target / path.relative_to(self.folder)
            moved.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, moved)
            print(f"Moved {path} to {moved}", flush=True)

    def close(self, state):
        all_gather(None)  # wait: torchrun would end processes that still write
        outcome = "Stopped" if self.signal else self.outcome
        self.log(f"{outcome} at step {state.step}")
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
    """Returns the folders step_N of a run, oldest first, without an unfinished step_N.tmp."""
    folders = [path.parent for path in Path(folder).glob("step_*/training_state.pt")]
    finished = [path for path in folders if path.name.removeprefix("step_").isdecimal()]
    return sorted(finished, key=lambda path: int(path.name.removeprefix("step_")))


def choose_checkpoint(folder, resume):
    """Returns the checkpoint to resume from, or None. Asks at a terminal if resume is "ask"."""
    checkpoints = list_checkpoints(folder)
    if resume not in ("ask", "yes", "no"):
        checkpoints = list_checkpoints(resume) or [Path(resume)]
        if not (checkpoints[-1] / "training_state.pt").exists():
            raise UserError(f"RESUME = {resume!r} is not ask, yes, no, or the folder of a checkpoint, a run")
    if resume == "yes" and not checkpoints:
        print(f"RESUME=yes: {folder} has no checkpoint, the run begins afresh", flush=True)
    if resume == "no" or not checkpoints:
        return None
    print(f"Found checkpoint: {checkpoints[-1]}", flush=True)
    is_terminal = sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()
    if resume == "ask" and world_size == 1 and is_terminal:
        reply = input("Resume training from it? (y/n): ")
        if not reply.lower().startswith("y"):
            return None
    return checkpoints[-1]


def digest(items):
    """Returns the number of items and the beginning of their hash, as a text."""
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
    for file in [*tmp.rglob("*"), tmp]:  # the files must be on the disk before the new name is
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    shutil.rmtree(path, ignore_errors=True)
    tmp.rename(path)


# Panels of sft_metrics_with_entropy.png; training_metrics_detailed.png has all metrics that vary
PANELS = "loss token_accuracy accuracy_greedy accuracy_sampled policy_grad_norm".split()


def draw_grid(folder, path, names=None):
    """Draws one panel per metric that varies: training steps, their rolling mean, and evaluations."""
    records = [json.loads(line) for line in (folder / "logs/metrics.jsonl").read_text().splitlines()]
    phases = dict.fromkeys(["train", *column(records, "phase")])
    panels = {}
    for name in names or dict.fromkeys(chain(*records)):
        points = [record for record in records if record.get(name) is not None]
        if name not in ("phase", "step") and len(set(column(points, name))) > 1:
            panels[name] = points
    height = max(1, math.ceil(len(panels) / 3))
    figure = Figure(figsize=(10, 2.3 * height + 0.5), layout="constrained")
    for number, (name, points) in enumerate(panels.items(), 1):
        axis = figure.add_subplot(height, 3, number, title=name, xlabel="step")
        axis.grid(alpha=0.3)
        for color, phase in enumerate(phases):
            of_phase = [record for record in points if record["phase"] == phase]
            steps, values = column(of_phase, "step"), column(of_phase, name)
            if phase != "train":
                label = phase.replace("eval", "evaluation")
                axis.plot(steps, values, "o-", color=f"C{color}", markersize=4, label=label)
            elif values:
                window = max(1, len(values) // 12)
                means = np.convolve(values, np.full(window, 1 / window), "valid")
                axis.plot(steps, values, ".-", color="C0", alpha=0.25, label="training step")
                axis.plot(steps[window - 1 :], means, color="C0", label="rolling mean of training")
    lines = {line.get_label(): line for axis in figure.axes for line in axis.lines}
    figure.legend(handles=lines.values(), loc="outside upper center", ncols=4)
    figure.savefig(folder / path, dpi=110)


# ================================================================ command line


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def constants():
    """Returns every constant of this file by name, as JSON has it."""
    values = {name: x for name, x in globals().items() if name.isupper()}
    del values["ROOT"], values["PANELS"]
    text = json.dumps(values, default=lambda x: getattr(x, "__name__", type(x).__name__))
    root = json.dumps(str(ROOT)).strip('"')
    return json.loads(text.replace(root, "{ROOT}"))  # the repository may be moved


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
    """Sets constants from KEY=VALUE arguments, or @FILE with one per line, in the constants' types."""
    for argument in arguments:
        if argument.startswith("@"):
            apply_overrides(read_constants(argument[1:]))
            continue
        key, _, text = argument.partition("=")
        if key not in constants():
            near = difflib.get_close_matches(key.upper(), constants(), 1, 0.0)[0]
            raise UserError(f"{argument!r} is not KEY=VALUE with a constant such as {near}")
        default = globals()[key]
        wanted = __annotations__.get(key, type(default))  # a type such as int, or int | None
        value = os.path.expanduser(text).replace("{file}", Path(sys.argv[0]).stem)
        value = re.sub(r"(?<!\\)\\n", "\n", value).replace(r"\\n", r"\n")  # \n is a line break, \\n is \n
        if not isinstance(value, wanted) or text == "None":
            with suppress(ValueError, SyntaxError):
                value = ast.literal_eval(text)
        accepts_float = isinstance(0.0, wanted)
        if type(value) is int and accepts_float:
            value = float(value)
        if not isinstance(value, wanted):
            raise UserError(f"{argument}: {key} takes a value such as {default!r}")
        globals()[key] = value


def check_constants():
    """Refuses values that would fail silently or late."""
    at_least_1 = ["BATCH_SIZE", "GRADIENT_ACCUMULATION_STEPS", "EVAL_BATCH_SIZE", "LOGITS_AT_ONCE"]
    at_least_1 += ["MAX_TOKENS", "MAX_NEW_TOKENS", "MAX_EVAL_ROWS"]
    at_least_1 += ["NUM_EPOCHS", "MAX_STEPS", "KEEP_LAST_N_CHECKPOINTS"]
    for name, value in constants().items():
        lowest = 1 if name in at_least_1 else 0
        if type(value) in (int, float) and not value >= lowest:  # "not": NaN is refused, too
            raise UserError(f"{name} = {value!r} is not a number from {lowest} on")
    if DTYPE not in ("float32", "bfloat16"):
        raise UserError(f"DTYPE = {DTYPE!r} is not float32 or bfloat16")
    if LR_SCHEDULER_TYPE not in ("linear", "cosine"):
        raise UserError(f"LR_SCHEDULER_TYPE = {LR_SCHEDULER_TYPE!r} is not linear or cosine")
    if TEMPERATURE == 0 or MAX_GRAD_NORM == 0:
        raise UserError("TEMPERATURE and MAX_GRAD_NORM are above 0")
    if "{input}" not in PROMPT_TEMPLATE:
        raise UserError("PROMPT_TEMPLATE does not contain {input}")
    if not TRAIN_DATASETS:
        raise UserError("TRAIN_DATASETS has no data set")


def train_main():
    """Exit codes: 0; 2: the user can correct it; 130, 143: a signal; 1, with a traceback: others."""
    trainer = None
    try:
        apply_overrides(sys.argv[1:])
        trainer = SFTTrainer()
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
