"""RCE and GRPO for choosing demonstrations: a pointer network picks the examples that a frozen reader sees.

For a question x it picks demonstrations d_1 .. d_S from a pool, one after the other, so that a reader that
has seen them answers x best (pointer networks, 1506.03134). Demonstration j is a text x_j and its answer a_j:

    h_1 = norm(P [x, 0])     k_j = norm(P [x_j, a_j])     h_{t+1} = GRU(k_{d_t}, h_t)
    score of j = u cos(x, x_j) / POINTER_TEMPERATURE + k_j . W h_t / sqrt(HIDDEN_SIZE)
    pi(j | d_<t, x) = softmax of the score over the pool without d_<t
    P, W, u and the GRU are trained. At first u = 1 and W = 0: the policy picks by similarity.

    1. mine   for each question: propose lists (the policy's, and candidates alone), rank them by gt_prob (the
              probability that the reader gives to the gold answers), recombine the members of the best, and
              let the reader answer the best and some others
    2. RCE    on groups, the mined lists of one question and one length, with rewards r from REWARD_MODE:
              w_i = exp(r_i / TAU) / sum_j exp(r_j / TAU)
              L   = mean over groups of sum_i w_i * -log pi(list i | x)
    3. GRPO   on groups of GROUP_SIZE lists that the policy draws in each step (2402.03300):
              A_i = (r_i - mean) / (std + 1e-4)     rho = pi / pi_old     c = clip(rho, 1 ± CLIP_RANGE)
              L   = mean of -min(rho A, c A) + KL_COEF * KL(pi || best policy of RCE) per choice, exact
    4. test   best/ beside rules that see the same data, and the best mined list (oracle)

    python rce/rce_icl.py                # a small world that ships; edit the constants, or KEY=VALUE or @FILE
    python examples/icl_votes.py         # real questions, and a reader of your own
    python tools/check_up.py checkpoints/rce_icl    # what the mined lists are worth

Writes candidates.jsonl, logs/, checkpoints step_N/, best/policy/, eval_test.json, pictures into OUTPUT_DIR. A
run that was stopped or killed continues from its last checkpoint and mined question, to the same bytes.

To change     see                                  To change       see
the loss      rce_loss, grpo_loss, update          the reader      READER; load_reader, ModelReader
the network   Pointer                              the vectors     EMBEDDING; make_embedder
the reward    REWARD_MODE; reward_modes            the data        TRAIN_DATASET; load_rows
the mining    mine_question                        the rules       Corpus.rule_lists
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
import zlib
from collections import Counter, defaultdict
from contextlib import contextmanager, suppress
from copy import deepcopy
from datetime import datetime, timedelta
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):
    print(__doc__ + Path(__file__).read_text().split("= constants\n")[1].split("\n# =====")[0])
    sys.exit()

import filelock
import numpy as np
import pyarrow.parquet
import safetensors.torch
import torch
import transformers
from matplotlib.figure import Figure
from PIL import Image
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "rewards").is_dir()), None)
if ROOT is None:
    sys.exit(f"{__file__}: copy the folder rewards/ of the repository beside this file, or above it")
sys.path.insert(0, str(ROOT))
import rewards
from rewards import UserError

# ================================================================ constants

# Data sets: {"path", "type": "jsonl" | "csv" | "parquet" | "hub", "input", "output"}; on the hub also "name"
# and "split". "input", "output" and perhaps "image" (paths) name columns. An output may be a list of golds.
# Of rows that ask the same the first is kept
TRAIN_DATASET = {"path": f"{ROOT}/data/market/train.csv", "type": "csv"}
TRAIN_DATASET |= {"input": "question", "output": "answer"}
# None: a fifth of TRAIN_DATASET is held out
TEST_DATASET: dict | None = {**TRAIN_DATASET, "path": f"{ROOT}/data/market/test.csv"}
GOLDS = "aliases"  # of a list of golds: aliases (the best counts) | annotators (VQA: one answer per person)
MAX_LABELS = 500  # data with more different answers have free texts: no rule classifies them
VALIDATION_QUESTIONS = 200  # of the training rows, at most a fifth: neither trained on nor shown
TEST_QUESTIONS: int | None = 500  # the first ones; None: all

# Reader: a folder or hub name of a causal or an image-text-to-text model
READER = f"{ROOT}/data/market/reader"
INSTRUCTION = ""  # what a model reads first
DEMONSTRATION = "Question: {text}\nAnswer: {answer}\n\n"
QUESTION = "Question: {text}\nAnswer:"
CHAT_TEMPLATE = True  # use the model's chat template if it has one; False: plain text
MAX_ANSWER_TOKENS = 8
READER_BATCH_SIZE = 128  # prompts that a model reads at once
EMBEDDING = "tfidf"  # tfidf, or a folder or hub name of a sentence model, of CLIP or of SigLIP
DTYPE = "float32"  # float32 | bfloat16, of reader and embedding
DEVICE = "auto"  # auto | cpu | cuda | cuda:1

# Mining
SHOTS = 2  # demonstrations per list; shorter lists are trained and tested, too
POOL = "random"  # a question's candidates: random | similarity (the most similar ones)
POOL_SIZE = 16
MINE_QUESTIONS: int | None = 400  # training questions that are mined; None: all
SAMPLE_TEMPERATURES = [0.5, 1.0, 2.0]  # a list is sampled from the policy at each, and one is its pick
ALONE: int | None = None  # candidates that are shown alone; None: all
LOCAL = 16  # recombinations of the members of the KEEP_TOP best lists and of twice as many candidates alone
KEEP_TOP = 4  # best lists of each length by gt_prob that are answered and kept
KEEP_RANDOM = 4  # other lists of each length that are answered and kept

# Algorithm
REWARD_MODE = "hard_plus_gtprob_separated"  # what r is: a name in reward_modes below, or a function like them
RCE_EPOCHS = 10  # passes over the mined groups
TAU = 0.3  # > 0; small: only the best lists weigh; large: all weigh alike
GRPO_EPOCHS = 2  # passes over all training questions; 0: RCE alone
GROUP_SIZE = 8  # lists drawn per question
GROUP_EPOCHS = 2  # optimizer steps on the lists of a step
CLIP_RANGE = 0.2
KL_COEF = 0.01  # per nat

# Network and optimisation
HIDDEN_SIZE = 64
POINTER_TEMPERATURE = 0.1
BATCH_SIZE = 32  # groups per step
LEARNING_RATE = 1e-2
GRPO_LEARNING_RATE = 3e-3
MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 1.0
USE_LR_SCHEDULER = True  # linear to 0, in RCE and in GRPO; False: constant

# Schedule and files
TEST_ORACLE: int | None = 100  # mine lists for the first N test questions; None: all; 0: no oracle
SAVE_EVERY_N_STEPS = 100  # 0: only before mining and after each stage
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 40  # 0: only before the first and after the last step of a stage
EARLY_STOPPING_PATIENCE = 0  # evaluations without a better pick before a stage ends; 0: all steps are run
LOG_SAMPLES = 4  # lists per step written to samples.jsonl
RESUME = "ask"  # ask (yes without a terminal) | yes | no | path of a checkpoint or a run
OUTPUT_DIR = f"{ROOT}/checkpoints/{Path(__file__).stem}"
SEED = 1
USE_WANDB = False  # its project and mode: environment variables WANDB_PROJECT, WANDB_MODE

# ================================================================ the maths of RCE and GRPO


def rce_weights(rewards):
    """Returns the weights w of one group's lists from their rewards r, two (lists,)."""
    return (rewards / TAU).softmax(0)


def rce_loss(logprobs, weights):
    """Returns the mean over groups of sum_i w_i * -log pi(list_i). Both are (groups, lists)."""
    return -(weights * logprobs).sum(1).mean()


def group_advantages(rewards):
    """Returns (r - mean) / (std + 1e-4) of one group's rewards, (lists,). Equal rewards get exactly 0."""
    rewards = rewards - rewards[0]  # else rounding leaves something of equal rewards such as 0.7
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def grpo_loss(logprobs, old_logprobs, advantages):
    """Returns the clipped loss of each list and rho, two (groups, lists)."""
    ratio = (logprobs - old_logprobs).clamp(max=80).exp()
    clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
    return -torch.min(ratio * advantages, clipped * advantages), ratio


def list_logprobs(all_logprobs, pointers):
    """Returns the log-probabilities of lists, (groups, lists), from those of all candidates at each choice,
    (groups, lists, choices, pool). pointers (groups, lists, choices) are -1 after a list's end."""
    chosen = all_logprobs.gather(3, pointers.clamp(min=0)[..., None])[..., 0]
    return (chosen * (pointers >= 0)).sum(2)


def choice_kl(logprobs, ref_logprobs):
    """Returns the exact KL(pi || reference) of each choice, (..., choices), from the log-probabilities of all
    candidates, (..., choices, pool). Less a reference of zeros, it is the entropy."""
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)


# r of a group's lists, (lists,), from hard (0 or 1), soft and gt_prob (0 to 1)
reward_modes = {
    "hard_only": lambda hard, soft, gt_prob: hard,
    "soft_only": lambda hard, soft, gt_prob: soft,
    "hard_plus_soft": lambda hard, soft, gt_prob: hard + soft,  # right and wrong ones can meet at 1
    "separated": lambda hard, soft, gt_prob: 2 * hard + soft,  # right ones 2 to 3, wrong ones 0 to 1
    "hard_plus_gtprob": lambda hard, soft, gt_prob: hard + gt_prob,
    "hard_plus_gtprob_separated": lambda hard, soft, gt_prob: 2 * hard + gt_prob,
}


def shaped_rewards(lists):
    """Returns r of a group's lists by REWARD_MODE, (lists,), float64."""
    columns = [torch.tensor(column(lists, name), dtype=torch.float64) for name in ("hard", "soft", "gt_prob")]
    return reward_modes.get(REWARD_MODE, REWARD_MODE)(*columns)


# ================================================================ the pointer network


class Pointer(torch.nn.Module):
    """Picks candidates. Inputs: see Corpus.inputs(). Pointers are places in the pool. H is HIDDEN_SIZE."""

    def __init__(self, vector_size):
        super().__init__()
        self.projection = torch.nn.Linear(vector_size, HIDDEN_SIZE)
        self.question_norm = torch.nn.LayerNorm(HIDDEN_SIZE)
        self.candidate_norm = torch.nn.LayerNorm(HIDDEN_SIZE)
        self.cell = torch.nn.GRUCell(HIDDEN_SIZE, HIDDEN_SIZE)
        self.output = torch.nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, bias=False)
        torch.nn.init.zeros_(self.output.weight)
        self.similarity_weight = torch.nn.Parameter(torch.tensor(1.0))

    def begin(self, inputs, num_lists):
        """Returns empty lists of each question: keys (questions, pool, H), similarity (questions, 1, pool),
        state (questions, lists, H) and taken (questions, lists, pool), which cannot be chosen."""
        no_answer = (0, inputs.candidates.shape[1] - inputs.vectors.shape[1])
        questions = self.projection(torch.nn.functional.pad(inputs.vectors, no_answer))
        keys = self.candidate_norm(self.projection(inputs.candidates))
        lists = SimpleNamespace(keys=keys[inputs.rows], similarity=inputs.similarity[:, None])
        lists.state = self.question_norm(questions)[:, None].expand(-1, num_lists, -1)
        lists.taken = inputs.is_padding[:, None].expand(-1, num_lists, -1)
        return lists

    def append(self, lists, choice):
        """Appends choice (questions, lists), places in the pool."""
        chosen = lists.keys.gather(1, choice[..., None].expand(-1, -1, HIDDEN_SIZE))
        lists.state = self.cell(chosen.flatten(0, 1), lists.state.flatten(0, 1)).view_as(chosen)
        lists.taken = lists.taken.scatter(2, choice[..., None], True)

    def choice_logprobs(self, lists):
        """Returns log-probabilities (questions, lists, pool) of the next choice; -1e9 for what is taken."""
        scores = self.output(lists.state) @ lists.keys.transpose(1, 2) / HIDDEN_SIZE**0.5
        scores = scores + self.similarity_weight * lists.similarity / POINTER_TEMPERATURE
        return scores.masked_fill(lists.taken, -1e9).log_softmax(-1)

    def forward(self, inputs, pointers):
        """Returns log-probabilities of all candidates at each choice, (questions, lists, choices, pool).
        pointers (questions, lists, choices) are -1 after a list's end."""
        lists = self.begin(inputs, pointers.shape[1])
        steps = []
        for choice in pointers.clamp(min=0).unbind(2):
            steps.append(self.choice_logprobs(lists))
            self.append(lists, choice)
        return torch.stack(steps, 2)

    def draw(self, inputs, shots, temperatures, generator):
        """Draws a list of each question at each of the temperatures, by the Gumbel-max trick; at 0 it is the
        likeliest choices. Returns pointers (questions, lists, shots)."""
        scale = torch.tensor(temperatures, device=inputs.vectors.device)[:, None]
        lists = self.begin(inputs, len(scale))
        choices = []
        for _ in range(shots):
            logprobs = self.choice_logprobs(lists)
            uniform = torch.rand(logprobs.shape, generator=generator).clamp(min=1e-30)
            gumbels = -uniform.log().neg().log()
            choices.append((logprobs + scale * gumbels.to(scale.device)).argmax(-1))
            self.append(lists, choices[-1])
        return torch.stack(choices, 2)


# ================================================================ the trainer


class ICLTrainer:
    """Questions and demonstrations are rows, see load_rows(); a list is a dict, see new_list(); a group has a
    question and lists of one length. self.run has the files. self.state is what a checkpoint holds beside
    policies and optimizer: you may add numbers, texts, lists and tensors."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        self.device = find_device()
        self.run = Run(resume_from_checkpoint or RESUME)
        self.state = SimpleNamespace(
            step=0,  # the current one, from 1; between steps, how many are done
            rce_steps=math.inf,  # patience may end RCE
            planned_steps=math.inf,  # of RCE and GRPO
            rules={},  # accuracy of each rule on validation
            evaluation={},  # the last one's metrics
            best_score=-math.inf,  # the highest accuracy on validation: its policy is in best/
            evaluations_without_gain=0,
            log_sizes={},  # bytes of each log when the checkpoint was saved
            wandb_id=None,
        )
        self.splits, self.demos = split_rows()
        self.exact = find_exact(chain(self.demos, *self.splits.values()))
        self.run.facts["data"] = digest([(row["text"], row["golds"]) for row in self.demos])
        self.seed_step()  # for the first weights
        try:
            loaded = f"EMBEDDING={EMBEDDING}"
            self.corpus = Corpus(self.demos, self.device)
            loaded = f"READER={READER}"
            self.reader = self.load_reader()
            self.policy = Pointer(self.corpus.candidates.shape[1]).to(self.device)
            self.best = deepcopy(self.policy)
            self.reference = deepcopy(self.policy)  # in GRPO the best policy of RCE
            self.models = {"policy": self.policy, "best": self.best, "reference": self.reference}
            self.optimizer = torch.optim.AdamW(self.policy.parameters(), weight_decay=WEIGHT_DECAY)
            loaded = f"RESUME={self.run.checkpoint}"
            if self.run.checkpoint:
                self.load_state(self.run.checkpoint)
        except (UserError, TypeError, AttributeError, NameError):  # said already, or a mistake in the program
            raise
        except Exception as error:  # the libraries raise many types
            raise UserError(
                f"{loaded} cannot be loaded ({type(error).__name__}: {first_line(error)})"
            ) from error
        for questions in self.splits.values():
            self.corpus.add_pools(questions, POOL_SIZE)

    def load_reader(self):
        """Returns the reader. Override it for one of your own, with answers(asked), texts, and
        gold_probabilities(asked), of each question's golds; asked is [(question, demonstrations)]."""
        reader = ModelReader(READER, self.device)
        reader.check_lengths(list(chain(*self.splits.values())), self.demos)
        return reader

    # ------------------------------------------------------------ the algorithm

    def train(self):
        """Mines, trains by RCE, then by GRPO, and tests. Returns the last evaluation."""
        state = self.state
        self.run.open(state, state.step >= state.planned_steps)  # opens the logs and catches signals
        counts = {name: len(questions) for name, questions in self.splits.items()}
        self.run.log(f"Questions: {counts}. Reader on {self.device}")
        if not state.rules:
            for rule in self.corpus.rules:
                state.rules[rule] = self.evaluate(pick=partial(self.corpus.rule_lists, rule))["accuracy"]
            self.run.log("Rules, validation: " + show(state.rules))
        save_policy(self.best, self.run.folder / "best/policy")
        self.save()  # lists are mined by this policy
        questions = self.splits["train"][:MINE_QUESTIONS]
        self.mine_lists(self.run.folder / "candidates.jsonl", questions, SHOTS)
        if not self.run.signal:
            self.plan(questions)
            if not state.evaluation:
                self.log_evaluation(self.evaluate())
            while not self.is_over():
                if state.step == self.rce_steps:
                    self.start_grpo()
                state.step += 1
                self.started = time.perf_counter()
                self.seed_step()
                batch = self.next_groups()  # mined or fresh lists, with their rewards and weights
                metrics = self.update(batch)
                self.record(batch, metrics)
                is_last = state.step in (self.rce_steps, self.total_steps)
                if is_last or (EVAL_EVERY_N_STEPS and state.step % EVAL_EVERY_N_STEPS == 0):
                    self.log_evaluation(self.evaluate())
                if self.is_out_of_patience() and state.step < self.rce_steps:
                    state.rce_steps = state.step  # GRPO is next
                    self.plan(questions)
                    is_last = True
                if is_last:
                    state.evaluations_without_gain = 0
                if is_last or (SAVE_EVERY_N_STEPS and state.step % SAVE_EVERY_N_STEPS == 0):
                    self.save()
            self.save()
            self.test()
        self.run.close(state)
        return state.evaluation

    def seed_step(self):
        """Makes all random numbers of a step a function of its number: a checkpoint need not keep any."""
        seed = (1_000_003 * SEED + self.state.step) % 2**32
        transformers.set_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def is_out_of_patience(self):
        return 0 < EARLY_STOPPING_PATIENCE <= self.state.evaluations_without_gain

    def is_over(self):
        return self.run.signal or self.is_out_of_patience() or self.state.step >= self.total_steps

    def plan(self, questions):
        """Chooses the mined groups to train on, those of different rewards, and counts the steps."""
        groups = []
        for question in questions:
            for length in range(1, SHOTS + 1):
                lists = [record for record in question["lists"] if len(record["shown"]) == length]
                if lists:
                    groups.append({"question": question, "lists": lists})
        self.groups = [group for group in groups if len(shaped_rewards(group["lists"]).unique()) > 1]
        if not self.groups:
            raise UserError("no question has lists of different rewards: there is nothing to train on")
        train = self.splits["train"]
        self.rce_steps = min(self.state.rce_steps, RCE_EPOCHS * math.ceil(len(self.groups) / BATCH_SIZE))
        self.total_steps = self.rce_steps + GRPO_EPOCHS * math.ceil(len(train) / BATCH_SIZE)
        self.state.planned_steps = self.total_steps
        rce = {"name": "RCE", "rate": LEARNING_RATE, "rows": self.groups, "weigh": rce_weights}
        grpo = {"name": "GRPO", "rate": GRPO_LEARNING_RATE, "rows": train, "weigh": group_advantages}
        self.rce = SimpleNamespace(**rce, first=0, steps=self.rce_steps)
        self.grpo = SimpleNamespace(**grpo, first=self.rce_steps, steps=self.total_steps - self.rce_steps)
        if self.state.step == 0:
            has_right = [max(column(group["lists"], "hard")) for group in groups]
            figures = {"trained_groups": len(self.groups), "has_a_right_list": np.mean(has_right).item()}
            self.run.write("metrics.jsonl", phase="mine", step=0, **figures)
            self.run.log("Mined: " + show(figures))
            if not any(has_right):
                self.run.log("WARNING: no list leads to a right answer: is READER made for these data?")

    def start_grpo(self):
        """GRPO goes on from the best policy of RCE. It is its reference, and is kept in rce/policy/."""
        self.policy.load_state_dict(self.best.state_dict())
        self.reference.load_state_dict(self.best.state_dict())
        save_policy(self.reference, self.run.folder / "rce/policy")
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), weight_decay=WEIGHT_DECAY)

    def next_groups(self):
        """Returns what the step trains on, fewer groups at the end of an epoch. Each epoch has its own order.
        pointers (groups, lists, SHOTS); rewards, (lists,) of each group; weights (groups, lists), w or A."""
        stage = self.rce if self.state.step <= self.rce_steps else self.grpo
        done = self.state.step - 1 - stage.first
        epoch, place = divmod(done, math.ceil(len(stage.rows) / BATCH_SIZE))
        batch = SimpleNamespace(stage=stage.name, epoch=epoch + 1)
        batch.learning_rate = stage.rate * (1 - USE_LR_SCHEDULER * done / stage.steps)
        order = permutation(len(stage.rows), SEED + stage.first + batch.epoch)
        batch.groups = take(stage.rows, order.split(BATCH_SIZE)[place])
        if stage is self.grpo:
            batch.groups = self.fresh_groups(batch.groups)
        batch.rewards = list(map(shaped_rewards, column(batch.groups, "lists")))
        batch.weights = pad_sequence(list(map(stage.weigh, batch.rewards)), True).float()
        batch.pointers = pad_sequence(list(map(self.corpus.pointers, batch.groups)), True, -1)
        return batch

    def fresh_groups(self, questions):
        """Returns a group of GROUP_SIZE sampled lists for each question. Lengths of 1 to SHOTS take turns."""
        groups = []
        for shots in range(1, SHOTS + 1):
            part = questions[shots - 1 :: SHOTS]
            for question, drawn in zip(part, self.draw(part, shots, [1.0] * GROUP_SIZE, self.generator)):
                groups.append({"question": question, "lists": list(map(new_list, drawn))})
        self.ask(groups)
        return groups

    def update(self, batch):
        """Takes the optimizer steps on a batch, GROUP_EPOCHS in GRPO. Returns the metrics of the last one."""
        for group in self.optimizer.param_groups:
            group["lr"] = batch.learning_rate
        is_rce = batch.stage == "RCE"
        inputs = self.corpus.inputs(column(batch.groups, "question"))
        pointers, weights = batch.pointers.to(self.device), batch.weights.to(self.device)
        is_choice = pointers >= 0
        with torch.no_grad():
            ref_logprobs = self.reference(inputs, pointers)
            batch.logprobs = list_logprobs(self.policy(inputs, pointers), pointers)  # of fresh lists: pi_old
        for _ in range(1 if is_rce else GROUP_EPOCHS):
            all_logprobs = self.policy(inputs, pointers)
            logprobs = list_logprobs(all_logprobs, pointers)
            metrics = {"entropy": -choice_kl(all_logprobs, 0.0 * all_logprobs)[is_choice].mean()}
            if is_rce:
                loss = metrics["policy_loss"] = rce_loss(logprobs, weights)
            else:
                losses, ratio = grpo_loss(logprobs, batch.logprobs, weights)
                metrics["policy_loss"] = losses.mean()
                metrics["kl"] = choice_kl(all_logprobs, ref_logprobs)[is_choice].mean()
                metrics["clip_fraction"] = ((ratio - 1) * weights.sign() > CLIP_RANGE).float().mean()
                loss = metrics["policy_loss"] + KL_COEF * metrics["kl"]
            loss.backward()  # add a term above
            metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_GRAD_NORM)
            metrics = dict(zip(metrics, torch.stack(list(metrics.values())).tolist()))
            if not all(map(math.isfinite, metrics.values())):
                raise UserError(f"step {self.state.step} is not finite: {metrics}; lower LEARNING_RATE")
            self.optimizer.step()
            self.optimizer.zero_grad()
        return metrics

    # ------------------------------------------------------------ mining

    def mine_lists(self, path, questions, shots):
        """Gives each question its "lists". A file keeps them, one line per question: a killed run goes on."""
        text = path.read_text() if path.exists() else ""
        text = text[: text.rfind("\n") + 1]  # without half a line
        path.write_text(text)
        lines = text.splitlines()
        for question, line in zip(questions, lines):
            record = json.loads(line)
            if (record["id"], record["pool"]) != (question["id"], question["pool"].tolist()):
                raise UserError(f"{path} is of other data or pools: set the constants back, or RESUME=no")
            question["lists"] = record["lists"]
        with open(path, "a", buffering=1) as file:
            for question in tqdm(questions[len(lines) :], "mining", leave=False, disable=None):
                if self.run.signal:
                    return
                question["lists"] = self.mine_question(question, shots)
                record = {name: question[name] for name in ("id", "text", "golds", "lists")}
                file.write(json.dumps({**record, "pool": question["pool"].tolist()}) + "\n")

    def mine_question(self, question, shots):
        """Returns the answered lists of a question: of each length the best by gt_prob, and others."""
        pool = question["pool"]
        generator = question_stream(question, f"mine {shots}")
        shuffle = partial(torch.randperm, generator=generator)
        (drawn,) = self.draw([question], shots, [0.0, *SAMPLE_TEMPERATURES], generator)
        lists = {tuple(drawn[0]): new_list(drawn[0], "greedy")}  # {demonstrations' numbers: list}
        for numbers, temperature in zip(drawn[1:], SAMPLE_TEMPERATURES):
            lists.setdefault(tuple(numbers), new_list(numbers, "sample", temperature))
        for number in pool[shuffle(len(pool))[:ALONE]].tolist():
            lists.setdefault((number,), new_list([number], "alone"))
        self.ask([{"question": question, "lists": lists.values()}], ["gt_prob"])

        # A list is often good for one member: recombine those of the best, in lists of 2 to shots
        best = ranked(lists, shots)[:KEEP_TOP] + ranked(lists, 1)[: 2 * KEEP_TOP]
        members = torch.tensor(list(dict.fromkeys(chain(*column(best, "shown")))))
        for number in range(LOCAL):
            length = max(1, shots - number % max(1, shots - 1))
            numbers = members[shuffle(len(members))[:length]].tolist()
            lists.setdefault(tuple(numbers), new_list(numbers, "local"))
        self.ask([{"question": question, "lists": lists.values()}], ["gt_prob"])

        kept = [lists[tuple(drawn[0])]]  # first: tools/check_up.py compares it with the best
        for length in range(1, shots + 1):
            best = ranked(lists, length)
            others = shuffle(max(0, len(best) - KEEP_TOP))[:KEEP_RANDOM] + KEEP_TOP
            for record in best[:KEEP_TOP] + take(best, others):
                if record is not kept[0]:
                    kept.append(record)
        self.ask([{"question": question, "lists": kept}])
        return kept

    def ask(self, groups, marks=("gt_prob", "response")):
        """Asks the reader for the marks that lists of groups lack."""
        methods = {"gt_prob": self.reader.gold_probabilities, "response": self.reader.answers}
        for mark in marks:
            asked, records = [], []
            for group in groups:
                for record in group["lists"]:
                    if record[mark] is None:
                        asked.append((group["question"], take(self.demos, record["shown"])))
                        records.append(record)
            for (question, _), record, value in zip(asked, records, methods[mark](asked), strict=True):
                record[mark] = value
                if mark == "response":
                    record |= score_answer(value, question["golds"], self.exact)
                elif not 0 <= value <= 1.001:  # rounding may exceed 1
                    raise UserError(f"the reader's gold_probabilities hold {value}: not a probability")

    # ------------------------------------------------------------ evaluation, logs, checkpoints

    @torch.no_grad()
    def draw(self, questions, shots, temperatures, generator, policy=None):
        """Returns lists of each question, see Pointer.draw(), as numbers of demonstrations."""
        pointers = (policy or self.policy).draw(self.corpus.inputs(questions), shots, temperatures, generator)
        return [question["pool"][places].tolist() for question, places in zip(questions, pointers.cpu())]

    def pick(self, questions, shots, policy=None):
        """Returns the policy's pick for each question: its likeliest choices, one after the other."""
        return list(chain(*self.draw(questions, shots, [0.0], torch.Generator(), policy)))

    def accuracies(self, questions, lists):
        """Returns the reader's accuracy after each question's list, (questions,)."""
        asked = list(zip(questions, map(partial(take, self.demos), lists)))
        score = partial(score_answer, exact=self.exact)
        scores = map(score, self.reader.answers(asked), column(questions, "golds"))
        return np.array(column(scores, "accuracy"))

    def evaluate(self, questions=None, pick=None):
        """Returns accuracies of the policy's picks, or of pick(questions, shots), on validation or rows."""
        questions = questions or self.splits["validation"]
        metrics = {}
        for shots in range(1, SHOTS + 1):
            accuracies = self.accuracies(questions, (pick or self.pick)(questions, shots))
            metrics[f"accuracy@{shots}"] = accuracies.mean().item()
        return {"accuracy": np.mean(list(metrics.values())).item(), **metrics}

    def select(self, text, shots=SHOTS, image=None):
        """Returns the demonstrations, out of all, that the best policy picks for a question."""
        question = {"id": "select", "text": text, "image": image, "split": "select", "asked": None}
        self.corpus.add_pools([question], len(self.demos))
        return take(self.demos, self.pick([question], shots, self.best)[0])

    def record(self, batch, metrics):
        """Logs the step's metrics, some of its lists, and its line on the terminal."""
        step = self.state.step
        rewards = pad_sequence(batch.rewards, True, -math.inf)  # (groups, lists)
        reward = rewards[rewards.isfinite()].mean()
        if batch.stage == "RCE":  # mined lists stay the same: how good is the one that the policy likes most?
            likeliest = batch.logprobs.cpu().masked_fill(rewards.isinf(), -math.inf).argmax(1, keepdim=True)
            reward = rewards.gather(1, likeliest).mean()
        metrics |= {"epoch": batch.epoch, "learning_rate": batch.learning_rate, "reward": reward.item()}
        metrics["best_reward"] = rewards.amax(1).mean().item()
        metrics["seconds"] = time.perf_counter() - self.started
        self.run.write("metrics.jsonl", phase="train", step=step, **metrics)
        for group, of_first in zip(batch.groups[:LOG_SAMPLES], rewards[:, 0].tolist()):
            question, record = group["question"], {**group["lists"][0], "reward": of_first}
            sample = {"step": step, "prompt": question["text"], "answer": question["golds"], **record}
            sample["shown"] = [f"{x['text']} -> {x['answer']}" for x in take(self.demos, record["shown"])]
            self.run.write("samples.jsonl", **sample)
        eta = timedelta(seconds=round(metrics["seconds"] * (self.total_steps - step)))
        line = "{stage} epoch {epoch}: PL:{policy_loss:.4f} R:{reward:.2f} E:{entropy:.3f} "
        line += f"LR:{{learning_rate:.2e}}  step {step}/{self.total_steps}, {eta} left"
        self.run.log(line.format(stage=batch.stage, **metrics))

    def log_evaluation(self, metrics):
        """Logs what evaluate() returned. The policy with the highest accuracy is kept in best/."""
        state = self.state
        state.evaluation = metrics
        self.run.write("metrics.jsonl", phase="eval", step=state.step, **metrics)
        self.run.log(f"step {state.step}, validation: " + show(metrics))
        gain = metrics["accuracy"] - state.best_score
        state.evaluations_without_gain += 1
        if gain > 0:
            state.evaluations_without_gain = 0
            state.best_score = metrics["accuracy"]
            self.best.load_state_dict(self.policy.state_dict())
            save_policy(self.best, self.run.folder / "best/policy")

    def test(self):
        """Tests the best policy beside the rules and the oracle, the best mined list of at most so many."""
        questions, for_oracle = self.splits["test"], self.splits["test"][:TEST_ORACLE]
        picks = {"no demonstrations": lambda questions, shots: [[]] * len(questions)}
        for rule in self.corpus.rules:
            picks[rule] = partial(self.corpus.rule_lists, rule)
        if RCE_EPOCHS and GRPO_EPOCHS:
            picks["RCE"] = partial(self.pick, policy=self.reference)
        picks["best/"] = partial(self.pick, policy=self.best)
        results = defaultdict(list)  # {name: accuracy of each question, by shots}
        for shots in range(1, SHOTS + 1):
            self.mine_lists(self.run.folder / f"test_{shots}_step_{self.state.step}.jsonl", for_oracle, shots)
            if self.run.signal:
                return
            if for_oracle:
                results["oracle"].append([max(column(q["lists"], "accuracy")) for q in for_oracle])
            for name, pick in picks.items():
                results[name].append(self.accuracies(questions, pick(questions, shots)).tolist())
        self.run.log(f"{len(questions)} test questions: accuracy, and what best/ has more ± standard error")
        for name, by_shots in results.items():
            line = name.ljust(22)
            for shots, (accuracies, of_best) in enumerate(zip(by_shots, results["best/"]), 1):
                gain = np.subtract(of_best[: len(accuracies)], accuracies)
                error = gain.std() / len(gain) ** 0.5
                line += f"{shots}: {np.mean(accuracies):.3f}  {gain.mean():+.3f} ± {error:.3f}    "
            self.run.log(line)
        (self.run.folder / "eval_test.json").write_text(json.dumps(results))

    def save(self):
        """Writes step_N/ if it is not there yet, removes old checkpoints and draws the plots."""
        folder = self.run.folder / f"step_{self.state.step}"
        self.run.checkpoint = folder  # a second train() goes on
        if folder.exists():
            return
        self.run.log(f"Saving {folder}")
        self.state.log_sizes = {name: file.tell() for name, file in self.run.logs.items()}
        saved = {"state": vars(self.state), "optimizer": self.optimizer.state_dict()}
        saved["models"] = {name: model.state_dict() for name, model in self.models.items()}
        with atomic_folder(folder) as tmp:
            torch.save(saved, tmp / "training_state.pt")
            shutil.copy(self.run.folder / "training_config.json", tmp / "run.json")
        for old in list_checkpoints(self.run.folder)[:-KEEP_LAST_N_CHECKPOINTS]:
            shutil.rmtree(old.rename(f"{old}.tmp"))  # what a kill leaves of it is no checkpoint
        draw_grid(self.run.folder, "training_metrics_detailed.png", self.state.rules)
        draw_grid(self.run.folder, "rce_icl_metrics_with_entropy.png", self.state.rules, PANELS)

    def load_state(self, folder):
        """Restores state, policies and optimizer."""
        saved = torch.load(folder / "training_state.pt", map_location="cpu", weights_only=True)
        for name, model in self.models.items():
            model.load_state_dict(saved["models"][name])
        state = saved["optimizer"]["state"]  # not its rates: the constants of now decide
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        vars(self.state).update(saved["state"])


def new_list(numbers, source="fresh", temperature=None):
    """Returns a list: numbers of the demonstrations, how it was proposed, what the reader makes of it."""
    record = {"shown": list(numbers), "source": [source], "temperature": [temperature]}
    return {**record, "gt_prob": None, "response": None}


def ranked(lists, length):
    """Returns the lists of one length, the best by gt_prob first."""
    lists = [record for record in lists.values() if len(record["shown"]) == length]
    return sorted(lists, key=lambda record: -record["gt_prob"])


def show(figures):
    return "  ".join(f"{name} {x:.4g}" for name, x in figures.items())


def save_policy(policy, path):
    with atomic_folder(path) as folder:
        safetensors.torch.save_file(policy.state_dict(), folder / "model.safetensors")


# ================================================================ demonstrations, pools and rules


class Corpus:
    """The demonstrations, what the policy reads of them, and the rules. add_pools() adds to rows vector (d,);
    pool, the numbers of demonstrations, without those that ask the same; and similarity to them (pool,)."""

    def __init__(self, demos, device):
        self.demos = demos
        self.device = device
        self.embed = make_embedder(demos, device)
        self.demo_vectors = torch.tensor(unit(self.embed(demos)))
        answers, answer_of = np.unique(column(demos, "answer"), return_inverse=True)
        rows = [{"text": answer.replace("_", " "), "image": None} for answer in answers.tolist()]
        vectors = unit(make_embedder(rows, device)(rows))
        # What the policy reads of a demonstration: its vector and that of its answer, (demonstrations, d')
        self.candidates = torch.cat([self.demo_vectors, torch.tensor(vectors[answer_of])], 1)
        formats, format_of = np.unique(list(map(answer_format, demos)), return_inverse=True)
        self.classes = {"similarity": 0 * answer_of, "format": format_of}  # of the demonstrations, by rule
        self.classes["kNN"] = self.classes["classifier"] = answer_of
        self.classifiers = {}
        self.rules = ["similarity"]
        if 1 < len(answers) <= MAX_LABELS:
            nearest = KNeighborsClassifier(min(20, len(demos)), weights="distance", metric="cosine")
            self.classifiers |= {"kNN": nearest, "classifier": LogisticRegression(C=10.0, max_iter=1000)}
            self.rules += ["kNN", "classifier", "classifier, fillers"]
        if 1 < len(formats) < min(MAX_LABELS, len(answers)):
            self.classifiers["format"] = LogisticRegression(C=10.0, max_iter=1000)
            self.rules += ["format", "format, similarity"]
        for name, classifier in self.classifiers.items():
            classifier.fit(self.demo_vectors.numpy(), self.classes[name])

    def add_pools(self, rows, size):
        numbers = {demo["asked"]: number for number, demo in enumerate(self.demos)}
        for row, vector in zip(rows, torch.tensor(unit(self.embed(rows)))):
            row["vector"] = vector
            similarity = self.demo_vectors @ vector
            order = torch.randperm(len(self.demos), generator=question_stream(row, "pool"))
            if POOL == "similarity":
                order = similarity.argsort(descending=True, stable=True)
            row["pool"] = order[order != numbers.get(row["asked"], -1)][:size].clone()
            row["similarity"] = similarity[row["pool"]]
            if len(row["pool"]) < SHOTS:
                raise UserError(f"the pool of {row['id']} has {len(row['pool'])} demonstrations: lower SHOTS")

    def inputs(self, questions):
        """Returns what the policy reads: vectors (questions, d); candidates (rows, d'); the pools as rows of
        candidates, is_padding, and similarity, three (questions, pool)."""
        pool = pad_sequence(column(questions, "pool"), True, -1)
        numbers, rows = pool.clamp(min=0).unique(return_inverse=True)
        inputs = SimpleNamespace(candidates=self.candidates[numbers], rows=rows, is_padding=pool < 0)
        inputs.vectors = torch.stack(column(questions, "vector"))
        inputs.similarity = pad_sequence(column(questions, "similarity"), True)
        return SimpleNamespace(**{name: x.to(self.device) for name, x in vars(inputs).items()})

    def pointers(self, group):
        """Returns the places in the pool of a group's lists, (lists, SHOTS), -1 after a list's end."""
        places = {number: place for place, number in enumerate(group["question"]["pool"].tolist())}
        pointers = torch.full((len(group["lists"]), SHOTS), -1)
        for row, record in zip(pointers, group["lists"]):
            row[: len(record["shown"])] = torch.tensor([places[number] for number in record["shown"]])
        return pointers

    def rule_lists(self, rule, questions, shots):
        """Returns the lists that a rule shows. Rules see the demonstrations' texts and answers, no reader.
        similarity        the most similar first
        kNN, classifier   rows of the likeliest answer, the most similar first, then of the next answer
        ..., fillers      rows of the likeliest answer, then the least similar others
        format            as classifier, for formats instead of answers: see answer_format()
        ..., similarity   one row of the likeliest format, then the most similar others"""
        name, _, others = rule.partition(", ")
        likelihoods = np.ones((len(questions), 1))
        if name in self.classifiers:
            vectors = torch.stack(column(questions, "vector")).numpy()
            likelihoods = self.classifiers[name].predict_proba(vectors)
        lists = []
        for question, likelihood in zip(questions, likelihoods):
            similarity = question["similarity"].numpy()
            score = likelihood[self.classes[name][question["pool"]]]
            if others == "fillers":
                score = (score == score.max()).astype(float)
                similarity = np.where(score, similarity, -similarity)
            order = np.lexsort((-similarity, -score))
            if others == "similarity":
                score[order[1:]] = 0
                order = np.lexsort((-similarity, -score))
            lists.append(question["pool"][order[:shots].copy()].tolist())
        return lists


def answer_format(row):
    """Returns a row's answer with * for the words that its question has: how it is said, not what."""
    asked = row["text"].lower().split()
    return " ".join("*" if word.lower() in asked else word for word in row["answer"].split())


def question_stream(question, use):
    """Returns a random generator for one use of one question. Held-out pools are the same for each SEED."""
    seed = SEED if question["split"] == "train" else 0
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {question['id']} {use}".encode()))


# ================================================================ vectors


def make_embedder(rows, device):
    """Returns a function of rows that gives their vectors, (rows, d). Replace it by one of your own."""
    if EMBEDDING == "tfidf":
        pattern = r"\w+|[^\w\s]+"  # labels may be signs
        options = {"sublinear_tf": True, "token_pattern": pattern, "max_features": 4000}
        vectorizer = TfidfVectorizer(**options).fit(column(rows, "text"))
        return lambda rows: vectorizer.transform(column(rows, "text")).toarray()
    model = load_model(transformers.AutoModel, EMBEDDING).to(device)
    processor = transformers.AutoProcessor.from_pretrained(EMBEDDING)
    embed = text_image_vectors if hasattr(model.config, "vision_config") else sentence_vectors
    return lambda rows: np.concatenate(list(map(partial(embed, processor, model), batches(rows))))


@torch.no_grad()
def sentence_vectors(tokenizer, model, rows):
    """Returns the means over the tokens of a model's last layer, (rows, d)."""
    limit = min(512, getattr(model.config, "max_position_embeddings", None) or 512)
    options = {"padding": True, "truncation": True, "max_length": limit, "return_tensors": "pt"}
    tokens = tokenizer(column(rows, "text"), **options).to(model.device)
    mask = tokens["attention_mask"][..., None]
    return ((model(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1)).float().cpu().numpy()


@torch.no_grad()
def text_image_vectors(processor, model, rows):
    """Returns CLIP's or SigLIP's vectors, each of length 1, of text and image (0: none), (rows, 2 d)."""
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    features = model.get_text_features(**processor(text=column(rows, "text"), **options).to(model.device))
    texts = unit(getattr(features, "pooler_output", features).float().cpu().numpy())
    images = np.zeros_like(texts)
    has_image = np.array(list(map(bool, column(rows, "image"))))
    if has_image.any():
        pixels = processor(images=open_images(rows), return_tensors="pt").to(model.device, model.dtype)
        features = model.get_image_features(**pixels)
        images[has_image] = unit(getattr(features, "pooler_output", features).float().cpu().numpy())
    return np.hstack([texts, images])


def unit(vectors):
    """Returns float32 vectors of length 1. A vector of zeros, of a text without a known word, stays zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-9)).astype(np.float32)


# ================================================================ answers


def normalise(text):
    """Returns an answer as it is compared: lower case, without quotes around it, an article before it and
    punctuation after it. Annotators' answers are compared as VQA does: number words as digits, no articles,
    no punctuation but decimal points (no apostrophes stand for its table of contractions), and a sign before
    a digit. What is nothing else stays."""
    if GOLDS == "aliases":
        text = " ".join(text.lower().split())
        bare = re.sub(r"""^(["'])(.+)\1$""", r"\2", text).rstrip(".,;!?")
        return re.sub(r"^(a|an|the) (?=\S)", "", bare) or text
    cleaned = re.sub(r"(?<=\d),(?=\d)|\.(?!\d)|'", "", text.lower())
    words = re.sub(r"(?!(?<!\w)[-+]\.?\d)[^\w\s.:$%]|_", " ", cleaned).split() or text.split()
    words = [word for word in words if word not in ("a", "an", "the")] or words  # the answer may be A
    digits = dict(zip("none zero one two three four five six seven eight nine ten".split(), [0, *range(11)]))
    return " ".join(str(digits.get(word, word)) for word in words)


def find_exact(rows):
    """Returns the answers that normalise() would make equal to others of the data, such as labels A and a:
    they are compared as they are written. More than MAX_LABELS answers are free texts, which vary so."""
    answers = set(column(rows, "answer"))
    counts = Counter(map(normalise, answers))
    if len(answers) > MAX_LABELS:
        return set()
    return {answer for answer in answers if counts[normalise(answer)] > 1}


def vqa_accuracy(response, golds):
    """Returns VQA's accuracy: min(agreeing annotators / 3, 1), mean over leaving each out (1505.00468)."""
    agrees = [normalise(gold) == normalise(response) for gold in golds]
    if len(golds) == 1:
        return float(agrees[0])
    return np.mean([min((sum(agrees) - one) / 3, 1.0) for one in agrees]).item()


def words_f1(text, gold):
    words, gold_words = Counter(text.split()), Counter(gold.split())
    return 2 * (words & gold_words).total() / (words.total() + gold_words.total())


def score_answer(text, golds, exact=()):
    """Returns the scores of a response, 0 to 1: accuracy; hard, 1 if it is right at all; soft: VQA's
    accuracy, or with aliases the best F1 of its words with a gold's. For `exact` see find_exact()."""
    accuracy = soft = 0.0
    if GOLDS == "annotators":
        accuracy = soft = vqa_accuracy(text, golds)
        golds = []
    for gold in golds:
        form = str.strip if gold in exact else normalise
        accuracy = max(accuracy, float(form(text) == form(gold)))
        soft = max(soft, words_f1(form(text), form(gold)))
    return {"accuracy": accuracy, "hard": int(accuracy > 0), "soft": soft}


def gold_weights(golds):
    """Returns {distinct gold answer: its weight in gt_prob}: 1, or of annotators min(count / 3, 1)."""
    spellings = {}  # normalised gold: how it is written first
    counts = Counter(spellings.setdefault(normalise(gold), gold) for gold in golds)
    enough = min(3, len(golds)) if GOLDS == "annotators" else 1
    return {gold: min(1.0, count / enough) for gold, count in counts.items()}


# ================================================================ readers


class ModelReader:
    """A causal language model, or an image-text-to-text model such as Qwen2.5-VL, SmolVLM or LLaVA, which
    sees the image of each demonstration and of the question before its text."""

    def __init__(self, name, device):
        self.sees_images = hasattr(transformers.AutoConfig.from_pretrained(name), "vision_config")
        auto_model, auto_processor = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
        if self.sees_images:
            auto_model, auto_processor = transformers.AutoModelForImageTextToText, transformers.AutoProcessor
        self.model = load_model(auto_model, name).to(device)
        self.processor = auto_processor.from_pretrained(name, padding_side="left")
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        # An answer ends with EOS or a token that begins with a newline, such as a paragraph's "\n\n"
        ends = np.hstack([self.model.generation_config.eos_token_id, self.tokenizer.eos_token_id]).tolist()
        vocabulary = self.model.config.get_text_config().vocab_size
        for number in range(min(vocabulary, len(self.tokenizer))):
            if self.tokenizer.decode([number]).lstrip(" \r").startswith("\n"):
                ends.append(number)
        self.ends = sorted(set(ends) - {None})
        # A model's own penalties and cuts stay out: gt_prob knows none
        options = {"eos_token_id": self.ends, "pad_token_id": self.tokenizer.pad_token_id or 0}
        self.model.generation_config = transformers.GenerationConfig(**options)
        self.chats = bool(CHAT_TEMPLATE and self.processor.chat_template)
        self.opening, self.closing = answer_form(self.chats)
        self.lead = "" if self.chats else self.opening.rstrip(" ")  # the prompt ends with it
        self.gap = self.opening.removeprefix(self.lead)

    def check_lengths(self, questions, demos):
        """Refuses prompts that can exceed the model's positions (without images). Warns of answers that
        MAX_ANSWER_TOKENS cuts."""

        def length(text):
            return len(self.tokenizer(text, add_special_tokens=False).input_ids)

        answers = {length(self.gap + row["answer"] + self.closing): row["answer"] for row in questions}
        longest = max(answers)
        if longest > MAX_ANSWER_TOKENS:
            print(f"WARNING: {answers[longest]!r} has {longest} tokens, above MAX_ANSWER_TOKENS", flush=True)
        shown = sorted(demos, key=lambda row: length(row["text"] + row["answer"]))[-SHOTS:]
        question = max(questions, key=lambda row: length(row["text"]))
        count = length(self.prompt(question, shown)) + max(longest, MAX_ANSWER_TOKENS)
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if limit and count > limit:
            what = f"{SHOTS} demonstrations such as {shown[-1]['id']} and a question have {count} tokens"
            raise UserError(f"READER={READER} has {limit} positions, {what}: lower SHOTS")

    def prompt(self, question, demonstrations):
        """Returns what the model reads. A space at its end is cut: tokens of the answer begin with theirs."""
        parts = [{"type": "text", "text": INSTRUCTION}]
        for row in [*demonstrations, question]:
            if row["image"]:
                parts.append({"type": "image", "text": self.processor.image_token})
            text = fill(QUESTION if row is question else DEMONSTRATION, row)
            parts.append({"type": "text", "text": text})
        parts[-1]["text"] = parts[-1]["text"].rstrip(" ") + self.lead
        content = "".join(column(parts, "text"))
        if not self.chats:
            return content
        if self.sees_images:
            content = [part for part in parts if part["text"]]
        messages = [{"role": "user", "content": content}]
        return self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def inputs(self, texts, asked):
        """Returns what the model reads of texts, left-padded: input_ids and attention_mask, (texts, P), and
        the pixels of the images of asked, [(question, demonstrations)]."""
        options = {"padding": True, "return_tensors": "pt", "add_special_tokens": not self.chats}
        if not self.sees_images:
            return self.processor(texts, return_token_type_ids=False, **options).to(self.model.device)
        images = [open_images([*demonstrations, question]) for question, demonstrations in asked]
        if any(images):
            options["images"] = images
        return self.processor(text=texts, **options).to(self.model.device, self.model.dtype)

    @torch.no_grad()
    def answers(self, asked):
        """Returns greedy answers, up to the end of the line."""
        answers = []
        for part in batches(asked):
            inputs = self.inputs(list(starmap(self.prompt, part)), part)
            ids = self.model.generate(**inputs, do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS)
            ids = ids[:, inputs["input_ids"].shape[1] :]
            for text in self.tokenizer.batch_decode(ids, skip_special_tokens=True):
                text = text.strip().partition("\n")[0].strip()
                text = text.removeprefix(self.opening.strip()).removesuffix(self.closing)
                answers.append(text.strip())
        return answers

    @torch.no_grad()
    def gold_probabilities(self, asked):
        """Returns the sum over a question's golds of weight * P(gold and what ends it | prompt), at most 1.
        A gold is asked for as DEMONSTRATION shows it. Its tokens are those of the prompt with it, less those
        of the prompt."""
        golds = []  # (number in asked, prompt, prompt and gold, weight)
        for number, (question, demonstrations) in enumerate(asked):
            prompt = self.prompt(question, demonstrations)
            for gold, weight in gold_weights(question["golds"]).items():
                text = prompt + self.gap + gold + self.closing
                golds.append((number, prompt, text, weight))
        probabilities = np.zeros(len(asked))
        for part in batches(golds):
            numbers, prompts, texts, weights = map(list, zip(*part))
            inputs = self.inputs(texts, take(asked, numbers))
            of_texts, of_prompts = [
                self.tokenizer(x, add_special_tokens=False).input_ids for x in (texts, prompts)
            ]
            prefixes = map(os.path.commonprefix, zip(of_texts, of_prompts))
            lengths = [len(ids) - len(prefix) for ids, prefix in zip(of_texts, prefixes)]
            np.add.at(probabilities, numbers, weights * self.answer_logprobs(inputs, lengths).exp().numpy())
        return probabilities.clip(max=1.0).tolist()

    def answer_logprobs(self, inputs, lengths):
        """Returns the log-probability of each row's last `lengths` tokens and an end after them, (rows,)."""
        kept = max(lengths) + 1
        if not self.sees_images:  # other models work them out: Qwen's have three axes
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        logits = self.model(**inputs, logits_to_keep=kept).logits[:, -kept:]
        logprobs = logits.double().log_softmax(-1).cpu()
        chosen = logprobs[:, :-1].gather(2, inputs["input_ids"][:, 1 - kept :, None].cpu())[..., 0]
        is_answer = torch.arange(1 - kept, 0) >= -torch.tensor(lengths)[:, None]
        return (chosen * is_answer).sum(1) + logprobs[:, -1, self.ends].logsumexp(-1)


def fill(template, row):
    """Returns a template with the row's {text} and {answer}. Other braces stay."""
    return re.sub(r"\{(text|answer)\}", lambda field: row[field[1]], template)


def answer_form(chats):
    """Returns what DEMONSTRATION shows between a question and its answer beyond QUESTION, such as a blank, a
    line break or a quote; and what ends the answer's line. A chat's answer begins a message of its own: it
    is begun by what stands directly before it, such as a quote."""
    before, _, after = DEMONSTRATION.partition("{answer}")
    shown, asked = before.rpartition("{text}")[2], QUESTION.rpartition("{text}")[2].rstrip(" ")
    opening = re.search(r"[^\s:=]*$" if chats else r"\s*[^\s:=]*$", shown)[0]
    if not chats and shown.startswith(asked):
        opening = shown.removeprefix(asked)
    return opening, after.partition("\n")[0].rstrip()


def open_images(rows):
    """Returns the images of the rows that have one."""
    return [Image.open(row["image"]).convert("RGB") for row in rows if row["image"]]


def batches(items):
    return [items[i : i + READER_BATCH_SIZE] for i in range(0, len(items), READER_BATCH_SIZE)]


def load_model(auto_class, path):
    """Returns a frozen model in evaluation mode, in which it stays. Missing weights are an error."""
    options = {"output_loading_info": True, "dtype": getattr(torch, DTYPE)}
    model, info = auto_class.from_pretrained(path, **options)
    missing = info["missing_keys"] | {key[0] for key in info["mismatched_keys"]}
    if missing:
        raise UserError(f"the model {path} lacks the weights {', '.join(sorted(missing))}")
    for parameter in model.parameters():
        # Weights that are mapped from a file may be unaligned, which changes a product's last bit
        parameter.data = parameter.data.clone()
    return model.requires_grad_(False).eval()


# ================================================================ data


def load_rows(spec):
    """Returns the rows of a data set: id, text, golds, image (a path or None), asked (equal for rows that ask
    the same), and answer, the gold named most often, which a demonstration shows."""
    rows = []
    where = f"the data set {spec}"
    try:
        required, optional = {"path", "type", "input", "output"}, {"name", "split", "image"}
        if not required <= spec.keys() <= required | optional:
            raise ValueError(f"it must have {sorted(required)} and may have {sorted(optional)}")
        for number, record in enumerate(read_records(spec), 1):
            where = f"{Path(spec['path']).name}:{number}"
            columns = {spec[key] for key in ("input", "output", "image") if key in spec}
            if None in record or not columns <= record.keys():
                raise ValueError(f"{list(record)} lacks a column of {spec} (None: more fields)")
            text, golds = record[spec["input"]], record[spec["output"]]
            golds = golds if isinstance(golds, list) and golds else [golds]
            for value in (text, *golds):
                is_text = isinstance(value, (str, int, float)) and value == value  # NaN is not itself
                if not is_text or not str(value).strip():
                    raise ValueError(f"{value!r} is no question or answer: it is empty, or no text or number")
            if spec["type"] == "csv" and re.match(r"\[\s*['\"]", str(golds[0])):
                raise ValueError(f"{golds[0]!r} is a list in a cell: write lists of answers as jsonl")
            row = {"id": where, "text": str(text), "golds": list(map(str, golds))}
            row["image"] = record[spec["image"]] if "image" in spec else None
            if row["image"] and not Path(row["image"]).is_file():
                raise ValueError(f"there is no image {row['image']!r}")
            row["asked"] = question_key(row["text"]), row["image"]
            rows.append({**row, "answer": Counter(row["golds"]).most_common(1)[0][0]})
            where = f"after {where}"  # if the next record cannot be read
    except Exception as error:  # the libraries raise many types
        raise UserError(f"{where}: {type(error).__name__}: {first_line(error)}") from None
    return rows


def question_key(text):
    """Returns what questions share that differ in case, blanks and closing punctuation (but 5! is not 5)."""
    text = " ".join(text.lower().split())
    return re.sub(r"([\s.,;:?…\u3002\uff1f\uff01]|(?<!\d)!)+$", "", text) or text


def one_per_question(rows, name, others=()):
    """Returns the first of the rows that ask the same, unless one of the others does. Counts the rest."""
    first = {row["asked"]: row for row in reversed(rows)}
    kept = [row for row in first.values() if row["asked"] not in others][::-1]
    if len(kept) < len(rows):
        answered = sum(row["golds"] != first[row["asked"]]["golds"] for row in rows)
        what = f"{len(rows) - len(kept)} of {len(rows)} rows are left out: other rows ask the same"
        print(f"{name}: {what} ({answered} have another answer)", flush=True)
    return kept


def split_rows():
    """Returns {"train", "validation", "test"}: questions; and the demonstrations: the training questions. No
    question is in two of them, and none is there twice."""
    test = one_per_question(load_rows(TEST_DATASET), "TEST_DATASET") if TEST_DATASET else []
    rows = one_per_question(load_rows(TRAIN_DATASET), "TRAIN_DATASET", set(column(test, "asked")))
    rows = take(rows, permutation(len(rows), 0))
    fifth = len(rows) // 5
    if TEST_DATASET is None:
        test, rows = rows[:fifth], rows[fifth:]
    count = min(VALIDATION_QUESTIONS, fifth)
    validation, demos = rows[:count], rows[count:]
    train = take(demos, permutation(len(demos), SEED))
    splits = {"train": train, "validation": validation, "test": test[:TEST_QUESTIONS]}
    if not all(splits.values()):
        raise UserError(f"the data sets are too small: {len(demos)} rows to train on")
    for split, questions in splits.items():
        for question in questions:
            question |= {"split": split, "id": f"{split} {question['id']}"}
    return splits, demos


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


def column(rows, field):
    return [row[field] for row in rows]


def take(rows, numbers):
    return [rows[number] for number in numbers]


def permutation(count, seed):
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


# ================================================================ the run's files


def find_device():
    """Returns the device, and asks for kernels that add in a fixed order."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)  # some models' kernels know no such order
    return torch.device(DEVICE.replace("auto", "cuda" if torch.cuda.is_available() else "cpu"))


PANELS = "accuracy reward entropy policy_loss grad_norm kl".split()  # of rce_icl_metrics_with_entropy.png


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
        if self.checkpoint and self.checkpoint.parent.resolve() != self.folder.resolve():
            shutil.copy(self.checkpoint.parent / "candidates.jsonl", self.folder)
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
        """Prints what changed since the checkpoint that is resumed. Refuses another reader or other vectors:
        the mined lists and the policy are of the old ones. Refuses a complete run that would end as if it
        had trained what changed."""
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
        for name in "READER INSTRUCTION DEMONSTRATION QUESTION CHAT_TEMPLATE EMBEDDING GOLDS".split():
            used = earlier["constants"].get(name)
            if used != constants()[name]:
                raise UserError(f"the mined lists of {self.checkpoint} are of {name}={used!r}: {hint}")
        if is_complete and changes:
            raise UserError(f"complete at step {state.step}, but {'; '.join(changes)}: {hint}")

    def move_old_files(self, state, target):
        """Moves what is later than the run's checkpoint, or all of an earlier run, to the folder `target`."""
        config = self.folder / "training_config.json"
        if not config.exists():
            return
        stale = list_checkpoints(self.folder)
        if self.checkpoint and self.checkpoint.resolve().parent == self.folder.resolve():
            stale += self.folder.glob("test_*_step_*.jsonl")
            stale = [path for path in stale if int(path.stem.rpartition("_")[2]) > state.step]
        else:
            state.log_sizes = {}
            names = "candidates.jsonl test_*.jsonl best/policy rce/policy eval_test.json training_config.json"
            for pattern in f"logs/*.jsonl logs/training_*.log *_metrics_*.png {names}".split():
                stale += self.folder.glob(pattern)
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


def draw_grid(folder, path, rules, names=None):
    """Draws a panel per metric: each training step faint, their rolling mean, and the evaluations' points."""
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
        if name == "accuracy":
            for color, (rule, accuracy) in enumerate(rules.items(), 2):
                axis.axhline(accuracy, linestyle="--", color=f"C{color}", linewidth=1, label=rule)
            axis.legend(fontsize=6)
    figure.suptitle(
        "blue: training, each step and rolling mean; orange: validation; dashed: rules", fontsize=9
    )
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
        "VALIDATION_QUESTIONS TEST_QUESTIONS MAX_ANSWER_TOKENS READER_BATCH_SIZE SHOTS "
        "POOL_SIZE MINE_QUESTIONS GROUP_SIZE GROUP_EPOCHS HIDDEN_SIZE BATCH_SIZE KEEP_LAST_N_CHECKPOINTS"
    )
    mode_is_known = callable(REWARD_MODE) or REWARD_MODE in reward_modes
    rules = {
        "GOLDS is aliases or annotators": GOLDS in ("aliases", "annotators"),
        "POOL is random or similarity": POOL in ("random", "similarity"),
        f"REWARD_MODE is one of {', '.join(reward_modes)}": mode_is_known,
        "DTYPE is float32 or bfloat16": DTYPE in ("float32", "bfloat16"),
        "TAU and MAX_GRAD_NORM are above 0": min(TAU, MAX_GRAD_NORM) > 0,
        "temperatures are above 0": min(POINTER_TEMPERATURE, *SAMPLE_TEMPERATURES) > 0,
        "GROUP_SIZE is at least 2": GROUP_SIZE >= 2,
        "QUESTION and DEMONSTRATION contain {text}": "{text}" in QUESTION and "{text}" in DEMONSTRATION,
        "DEMONSTRATION contains {answer} and then a line break": re.search(r"\{answer\}.*\n", DEMONSTRATION),
    }
    for rule, is_kept in rules.items():
        if not is_kept:
            raise UserError(f"a constant breaks a rule: {rule}")


def train_main():
    """Exit codes: 0; 2: the user can correct it; 130, 143: a signal; 1, with a traceback: other errors."""
    trainer = None
    try:
        apply_overrides(sys.argv[1:])
        trainer = ICLTrainer()
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
