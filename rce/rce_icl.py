"""Learns which demonstrations to show a frozen language model: RCE, then GRPO.

A language model (the reader) answers questions better after it has seen solved examples (demonstrations),
and which ones it sees matters. Here a small network (the policy) picks them for each question from a pool.
Only the policy is trained; the reader is frozen and may be any model. Take it if you cannot train the
reader, or to study which examples it needs. Each run also tests rules that need no training by the reader,
such as similarity: on real questions they may win (docs/rce_icl.md).

There are two stages. RCE (reward-weighted cross-entropy) fits the policy to lists of demonstrations that
were tried on the reader beforehand: the better a list, the more. GRPO goes on with lists that the policy
samples.

    1. mine   For each question, propose lists: the policy's, and single demonstrations. Rank them by
              gt_prob, the probability that the reader gives to the gold answers. Recombine the members of
              the best. Let the reader answer after the best lists and some others
    2. RCE    A group is the mined lists of one question and one length, with rewards r from REWARD_MODE:
              w_i = exp(r_i / TAU) / sum_j exp(r_j / TAU)
              L   = mean over groups of sum_i w_i * -log pi(list i | x)
    3. GRPO   A group is GROUP_SIZE lists that the policy samples for one question (2402.03300):
              A_i = (r_i - mean) / (std + 1e-4)     rho = pi / pi_old     c = clip(rho, 1 ± CLIP_RANGE)
              L   = mean of -min(rho A, c A) + KL_COEF * KL(pi || best policy of RCE) per choice, exact
    4. test   best/ beside the rules, and the best mined list (oracle)

The policy is a pointer network (1506.03134). For a question x it picks demonstrations d_1 .. d_S one after
the other; demonstration j has a text x_j and an answer a_j, both as vectors (EMBEDDING):

    h_1 = norm(P [x, 0])     k_j = norm(P [x_j, a_j])     h_{t+1} = GRU(k_{d_t}, h_t)
    score of j = u cos(x, x_j) / POINTER_TEMPERATURE + k_j . W h_t / sqrt(HIDDEN_SIZE)
    pi(j | d_<t, x) = softmax of the score over the pool without d_<t
    P, W, u and the GRU are trained. At first u = 1 and W = 0: the policy picks by similarity.

Shapes: H = HIDDEN_SIZE; d = size of a text's vector, D = that and its answer's; pool = demonstrations that a
question may choose from; choices = positions in a list, up to SHOTS.

    python rce/rce_icl.py            # a small world that ships; edit the constants, or KEY=VALUE or @FILE
    python examples/icl_votes.py     # real questions, and a reader of your own
    python tools/check_up.py checkpoints/rce_icl    # what the mined lists are worth

Writes candidates.jsonl, logs/, checkpoints step_N/, best/policy/, eval_test.json and pictures into
OUTPUT_DIR. A run that was stopped or killed continues from its last checkpoint and its last mined question,
and ends with the same bytes.

To change     see                                  To change       see
the loss      rce_loss, grpo_loss, update          the reader      READER; load_reader, ModelReader
the network   Pointer                              the vectors     EMBEDDING; make_embedder
the reward    REWARD_MODE; reward_modes            the data        TRAIN_DATASET; load_rows
the mining    mine_question                        the rules       Rules
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
from collections import Counter, defaultdict, namedtuple
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import chain, cycle, islice
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

# A data set has a "path", a "type" (jsonl | csv | parquet | hub; on the hub also "name" and "split") and
# names columns: "input" (the question), "output" (its gold answer, or a list of them) and perhaps "image"
# (a path). Of rows with the same question the first is kept
TRAIN_DATASET = {
    "path": f"{ROOT}/data/market/train.csv",
    "type": "csv",
    "input": "question",
    "output": "answer",
}
# None: a fifth of TRAIN_DATASET becomes the test set
TEST_DATASET: dict | None = {**TRAIN_DATASET, "path": f"{ROOT}/data/market/test.csv"}
GOLDS = "aliases"  # a list of golds is: aliases (any one is right) | annotators (one per person, VQA)
MAX_LABELS = 500  # with more different answers the rules that classify are left out
VALIDATION_QUESTIONS = 200  # taken from the training rows, at most a fifth of them
TEST_QUESTIONS: int | None = 500  # the first ones; None: all

# Reader: a folder or hub name of a causal or an image-text-to-text model
READER = f"{ROOT}/data/market/reader"
INSTRUCTION = ""  # text at the beginning of each prompt
DEMONSTRATION = "Question: {text}\nAnswer: {answer}\n\n"
QUESTION = "Question: {text}\nAnswer:"
CHAT_TEMPLATE = True  # use the model's chat template if it has one; False: plain text
MAX_ANSWER_TOKENS = 8
READER_BATCH_SIZE = 128  # prompts per forward pass of the reader
EMBEDDING = "tfidf"  # tfidf, or a folder or hub name of a sentence model, of CLIP or of SigLIP
DTYPE = "float32"  # of the reader and the embedding: float32 | bfloat16
DEVICE = "auto"  # auto | cpu | cuda | cuda:1

# Mining
SHOTS = 2  # demonstrations per list; shorter lists are trained and tested, too
POOL = "random"  # demonstrations that a question may choose from: random | similarity (the most similar)
POOL_SIZE = 16
MINE_QUESTIONS: int | None = 400  # training questions that are mined; None: all
SAMPLE_TEMPERATURES = [0.5, 1.0, 2.0]  # one list is sampled at each, beside the policy's greedy list
ALONE: int | None = None  # demonstrations of the pool that are tried as lists of one; None: all
LOCAL = 16  # lists recombined from the members of the best lists: KEEP_TOP long ones, 2 * KEEP_TOP of one
KEEP_TOP = 4  # lists of each length that are answered and kept: the best by gt_prob
KEEP_RANDOM = 4  # other lists of each length that are answered and kept

# Algorithm
REWARD_MODE = "hard_plus_gtprob_separated"  # r: a name in reward_modes below, or a function like them
RCE_EPOCHS = 10  # passes over the mined groups
TAU = 0.3  # > 0; small: only the best lists weigh; large: all weigh alike
GRPO_EPOCHS = 2  # passes over all training questions; 0: RCE alone
GROUP_SIZE = 8  # lists sampled per question
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
TEST_ORACLE: int | None = 100  # test questions that are mined for the oracle; None: all; 0: no oracle
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
    """Returns (r - mean) / (std + 1e-4) of one group's rewards (lists,), exactly 0 for equal ones."""
    rewards = rewards - rewards[0]  # else rounding leaves something of equal rewards such as 0.7
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def grpo_loss(logprobs, old_logprobs, advantages):
    """Returns the clipped loss of each list and rho, two (groups, lists)."""
    ratio = (logprobs - old_logprobs).clamp(max=80).exp()
    clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
    return -torch.min(ratio * advantages, clipped * advantages), ratio


def list_logprobs(all_logprobs, pointers):
    """Returns the log-probabilities of lists, (groups, lists), from those of the pool at each choice,
    (groups, lists, choices, pool). pointers (groups, lists, choices) are -1 after a list's end."""
    chosen = all_logprobs.gather(3, pointers.clamp(min=0).unsqueeze(3)).squeeze(3)
    is_choice = pointers >= 0
    return (chosen * is_choice).sum(2)


def choice_kl(logprobs, ref_logprobs):
    """Returns the exact KL(pi || reference) of each choice, (..., choices), from log-probabilities of the
    pool, (..., choices, pool)."""
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)


def choice_entropy(logprobs):
    """Returns the entropy of each choice, from the same log-probabilities."""
    return -(logprobs.exp() * logprobs).sum(-1)


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
    hard = torch.tensor([x.hard for x in lists], dtype=torch.float64)
    soft = torch.tensor([x.soft for x in lists], dtype=torch.float64)
    gt_prob = torch.tensor([x.gt_prob for x in lists], dtype=torch.float64)
    mode = reward_modes.get(REWARD_MODE, REWARD_MODE)
    return mode(hard, soft, gt_prob)


# ================================================================ the pointer network


class Pointer(torch.nn.Module):
    """The policy. Its pointers are places in the pool of a question. Inputs: see Corpus.inputs()."""

    def __init__(self, vector_size):
        super().__init__()
        self.projection = torch.nn.Linear(vector_size, HIDDEN_SIZE)
        self.question_norm = torch.nn.LayerNorm(HIDDEN_SIZE)
        self.candidate_norm = torch.nn.LayerNorm(HIDDEN_SIZE)
        self.cell = torch.nn.GRUCell(HIDDEN_SIZE, HIDDEN_SIZE)
        self.output = torch.nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, bias=False)
        torch.nn.init.zeros_(self.output.weight)
        self.similarity_weight = torch.nn.Parameter(torch.tensor(1.0))

    def build_lists(self, inputs, num_lists, shots, choose):
        """Builds lists of each question, one choice after the other: choose(t, logprobs) returns the pointers
        of choice t, (questions, lists), and gets log-probabilities, (questions, lists, pool). Returns both
        for all choices: (questions, lists, choices) and (questions, lists, choices, pool)."""
        num_questions, text_size = inputs.vectors.shape
        no_answer = inputs.vectors.new_zeros(num_questions, inputs.candidates.shape[1] - text_size)
        questions = self.question_norm(self.projection(torch.cat([inputs.vectors, no_answer], 1)))
        keys = self.candidate_norm(self.projection(inputs.candidates))
        keys = keys[inputs.pool]  # (questions, pool, H)
        similarity = inputs.similarity.unsqueeze(1)  # (questions, 1, pool)
        state = questions.unsqueeze(1).expand(-1, num_lists, -1)  # (questions, lists, H)
        taken = inputs.is_padding.unsqueeze(1).expand(-1, num_lists, -1)  # (questions, lists, pool)
        pointers, all_logprobs = [], []
        for t in range(shots):
            scores = self.output(state) @ keys.transpose(1, 2) / HIDDEN_SIZE**0.5
            scores = scores + self.similarity_weight * similarity / POINTER_TEMPERATURE
            logprobs = scores.masked_fill(taken, -1e9).log_softmax(-1)
            pointer = choose(t, logprobs)
            pointers.append(pointer)
            all_logprobs.append(logprobs)

            index = pointer.unsqueeze(2)
            chosen = keys.gather(1, index.expand(-1, -1, HIDDEN_SIZE))
            state = self.cell(chosen.flatten(0, 1), state.flatten(0, 1)).view_as(chosen)
            taken = taken.scatter(2, index, True)
        return torch.stack(pointers, 2), torch.stack(all_logprobs, 2)

    def forward(self, inputs, pointers):
        """Returns log-probabilities (questions, lists, choices, pool) of the pool at each choice in given
        lists. pointers (questions, lists, choices) are -1 after a list's end."""
        _, num_lists, shots = pointers.shape
        given = pointers.clamp(min=0)
        _, logprobs = self.build_lists(inputs, num_lists, shots, lambda t, _: given[:, :, t])
        return logprobs

    def draw(self, inputs, shots, temperatures, generator):
        """Samples a list of each question at each temperature; at 0 it is greedy. With Gumbel noise the
        largest log-probability is a sample of the softmax. Returns pointers (questions, lists, shots)."""
        scale = torch.tensor(temperatures, device=inputs.vectors.device).unsqueeze(1)  # (lists, 1)

        def sample(t, logprobs):
            uniform = torch.rand(logprobs.shape, generator=generator).clamp(min=1e-30)
            noise = -uniform.log().neg().log()
            return (logprobs + scale * noise.to(scale.device)).argmax(-1)

        pointers, _ = self.build_lists(inputs, len(temperatures), shots, sample)
        return pointers


# ================================================================ the trainer


@dataclass
class DemoList:
    """A list of demonstrations for one question, as candidates.jsonl has it."""

    shown: list  # numbers of the demonstrations
    source: list  # how it was proposed: [greedy | sample | alone | local], or [fresh] in GRPO
    temperature: list  # [that of a sample, else None]
    gt_prob: float | None = None
    response: str | None = None  # the reader's answer, and its scores, see score_answer()
    accuracy: float | None = None
    hard: int | None = None
    soft: float | None = None


# Lists that are compared with each other: those of one question (a row, see load_rows) and one length
Group = namedtuple("Group", "question lists")


class ICLTrainer:
    """self.run has the files. self.state is what a checkpoint holds beside policies and optimizer: you
    may add numbers, texts, lists and tensors."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        self.device = find_device()
        self.run = Run(resume_from_checkpoint or RESUME)
        self.state = SimpleNamespace(
            step=0,  # the current one, from 1; between steps, how many are done
            rce_steps=math.inf,  # where patience ended RCE; inf: it has not
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
            loading = f"EMBEDDING={EMBEDDING}"
            self.corpus = Corpus(self.demos, self.device)
            loading = f"READER={READER}"
            self.reader = self.load_reader()
            self.policy = Pointer(self.corpus.candidates.shape[1]).to(self.device)
            self.best = deepcopy(self.policy)
            self.reference = deepcopy(self.policy)  # in GRPO the best policy of RCE
            self.models = {"policy": self.policy, "best": self.best, "reference": self.reference}
            self.optimizer = torch.optim.AdamW(self.policy.parameters(), weight_decay=WEIGHT_DECAY)
            loading = f"RESUME={self.run.checkpoint}"
            if self.run.checkpoint:
                self.load_state(self.run.checkpoint)
        except (UserError, TypeError, AttributeError, NameError):  # said already, or a fault of the code
            raise
        except Exception as error:  # the libraries raise many types
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"{loading} cannot be loaded ({reason})") from error
        self.rules = Rules(self.demos, self.corpus.demo_vectors)
        for questions in self.splits.values():
            self.corpus.add_pools(questions, POOL_SIZE)

    def load_reader(self):
        """Returns the reader. Override it for one of your own, with answers(asked), texts, and
        gold_probabilities(asked), the gt_prob of each; asked is [(question, demonstrations)]."""
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
            for rule in self.rules.names:
                state.rules[rule] = self.evaluate(pick=partial(self.rules.pick, rule))["accuracy"]
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
                if state.step == self.rce.steps:
                    self.start_grpo()
                state.step += 1
                self.started = time.perf_counter()
                self.seed_step()
                batch = self.next_batch()  # mined or fresh lists, with their rewards and weights
                metrics = self.update(batch)
                self.record(batch, metrics)
                is_last = state.step in (self.rce.steps, self.total_steps)
                if is_last or (EVAL_EVERY_N_STEPS and state.step % EVAL_EVERY_N_STEPS == 0):
                    self.log_evaluation(self.evaluate())
                if self.is_out_of_patience() and state.step < self.rce.steps:
                    state.rce_steps = state.step  # GRPO is next
                    self.plan(questions)
                    is_last = True
                if is_last:  # each stage has its own patience: is_over() would end the run here
                    state.evaluations_without_gain = 0
                if is_last or (SAVE_EVERY_N_STEPS and state.step % SAVE_EVERY_N_STEPS == 0):
                    self.save()
            self.save()
            self.test()
        self.run.close(state)
        return state.evaluation

    def seed_step(self):
        """Makes all random numbers of a step a function of its number: checkpoints need not keep any."""
        seed = (1_000_003 * SEED + self.state.step) % 2**32
        transformers.set_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def is_out_of_patience(self):
        has_waited = self.state.evaluations_without_gain >= EARLY_STOPPING_PATIENCE
        return EARLY_STOPPING_PATIENCE > 0 and has_waited

    def is_over(self):
        return self.run.signal or self.is_out_of_patience() or self.state.step >= self.total_steps

    def plan(self, questions):
        """Collects the mined groups whose rewards differ, and counts the steps of both stages."""
        groups = []
        for question in questions:
            for length in range(1, SHOTS + 1):
                lists = [x for x in question["lists"] if len(x.shown) == length]
                if lists:
                    groups.append(Group(question, lists))
        mined = [group for group in groups if len(shaped_rewards(group.lists).unique()) > 1]
        if not mined:
            raise UserError("no question has lists of different rewards: there is nothing to train on")
        train = self.splits["train"]
        rce_steps = min(self.state.rce_steps, RCE_EPOCHS * math.ceil(len(mined) / BATCH_SIZE))
        grpo_steps = GRPO_EPOCHS * math.ceil(len(train) / BATCH_SIZE)
        self.rce = SimpleNamespace(name="RCE", data=mined, steps_before=0, steps=rce_steps)
        self.rce.learning_rate = LEARNING_RATE
        self.rce.updates = 1  # optimizer steps per batch
        self.rce.weigh = rce_weights
        self.grpo = SimpleNamespace(name="GRPO", data=train, steps_before=rce_steps, steps=grpo_steps)
        self.grpo.learning_rate = GRPO_LEARNING_RATE
        self.grpo.updates = GROUP_EPOCHS
        self.grpo.weigh = group_advantages
        self.total_steps = rce_steps + grpo_steps
        self.state.planned_steps = self.total_steps
        if self.state.step == 0:
            has_right = [max(x.hard for x in group.lists) for group in groups]
            figures = {"trained_groups": len(mined), "has_a_right_list": np.mean(has_right).item()}
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

    def next_batch(self):
        """Returns what the step trains on. Each epoch has its own order; its last batch may be small."""
        stage = self.rce if self.state.step <= self.rce.steps else self.grpo
        steps_done = self.state.step - 1 - stage.steps_before
        epochs_done, step_of_epoch = divmod(steps_done, math.ceil(len(stage.data) / BATCH_SIZE))
        epoch = epochs_done + 1
        learning_rate = stage.learning_rate
        if USE_LR_SCHEDULER:
            learning_rate *= 1 - steps_done / stage.steps
        order = permutation(len(stage.data), SEED + stage.steps_before + epoch)
        groups = take(stage.data, order.split(BATCH_SIZE)[step_of_epoch])
        if stage is self.grpo:
            groups = self.fresh_groups(groups)

        rewards, weights, pointers = [], [], []
        for group in groups:
            rewards.append(shaped_rewards(group.lists))
            weights.append(stage.weigh(rewards[-1]))
            pointers.append(self.corpus.pointers(group))
        weights = pad_sequence(weights, batch_first=True).float()  # a group may have fewer lists
        pointers = pad_sequence(pointers, batch_first=True, padding_value=-1).to(self.device)
        inputs = self.corpus.inputs([group.question for group in groups])
        with torch.no_grad():
            logprobs = list_logprobs(self.policy(inputs, pointers), pointers)
            ref_logprobs = self.reference(inputs, pointers)
        return SimpleNamespace(
            stage=stage,
            epoch=epoch,
            learning_rate=learning_rate,
            groups=groups,
            rewards=rewards,  # of each group, (lists,)
            weights=weights.to(self.device),  # w or A, (groups, lists)
            inputs=inputs,
            pointers=pointers,  # (groups, lists, SHOTS), -1 after a list's end
            logprobs=logprobs,  # before the update, (groups, lists); in GRPO log pi_old
            ref_logprobs=ref_logprobs,  # (groups, lists, SHOTS, pool)
        )

    def fresh_groups(self, questions):
        """Returns a group of GROUP_SIZE sampled lists for each question. Lengths 1 to SHOTS take turns."""
        groups = []
        for length in range(1, min(SHOTS, len(questions)) + 1):
            of_length = questions[length - 1 :: SHOTS]
            drawn = self.draw(of_length, length, [1.0] * GROUP_SIZE, self.generator)
            for question, numbers_of_lists in zip(of_length, drawn):
                lists = [DemoList(numbers, ["fresh"], [None]) for numbers in numbers_of_lists]
                groups.append(Group(question, lists))
        self.ask_gt_probs(groups)
        self.ask_answers(groups)
        return groups

    def update(self, batch):
        """Makes the optimizer steps on a batch, GROUP_EPOCHS in GRPO. Returns the last one's metrics."""
        for parameter_group in self.optimizer.param_groups:
            parameter_group["lr"] = batch.learning_rate
        is_choice = batch.pointers >= 0
        for _ in range(batch.stage.updates):
            all_logprobs = self.policy(batch.inputs, batch.pointers)
            logprobs = list_logprobs(all_logprobs, batch.pointers)
            metrics = {"entropy": choice_entropy(all_logprobs)[is_choice].mean()}
            if batch.stage is self.rce:
                policy_loss = rce_loss(logprobs, batch.weights)
                metrics["policy_loss"] = policy_loss
                loss = policy_loss
            else:
                losses, ratio = grpo_loss(logprobs, batch.logprobs, batch.weights)
                policy_loss = losses.mean()
                kl = choice_kl(all_logprobs, batch.ref_logprobs)[is_choice].mean()
                is_clipped = (ratio - 1) * batch.weights.sign() > CLIP_RANGE
                metrics["policy_loss"] = policy_loss
                metrics["kl"] = kl
                metrics["clip_fraction"] = is_clipped.float().mean()
                loss = policy_loss + KL_COEF * kl
            loss.backward()  # add a term above
            parameters = self.policy.parameters()
            metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            metrics = {name: x.item() for name, x in metrics.items()}
            if not all(map(math.isfinite, metrics.values())):
                raise UserError(f"step {self.state.step} is not finite: {metrics}; lower the learning rate")
            self.optimizer.step()
            self.optimizer.zero_grad()
        return metrics

    # ------------------------------------------------------------ mining

    def mine_lists(self, path, questions, shots):
        """Gives each question its "lists". A file keeps them, a line per question: a killed run goes on."""
        text = path.read_text() if path.exists() else ""
        text = text[: text.rfind("\n") + 1]  # without the half line of a killed run
        path.write_text(text)
        lines = text.splitlines()
        for question, line in zip(questions, lines):
            record = json.loads(line)
            if (record["id"], record["pool"]) != (question["id"], question["pool"].tolist()):
                hint = "set the constants back, or RESUME=no"
                raise UserError(f"{path} is of other data or pools: {hint}")
            question["lists"] = [DemoList(**fields) for fields in record["lists"]]
        with open(path, "a", buffering=1) as file:
            for question in tqdm(questions[len(lines) :], "mining", leave=False, disable=None):
                if self.run.signal:
                    return
                question["lists"] = self.mine_question(question, shots)
                record = {name: question[name] for name in ("id", "text", "golds")}
                record["lists"] = [vars(x) for x in question["lists"]]
                record["pool"] = question["pool"].tolist()
                file.write(json.dumps(record) + "\n")

    def mine_question(self, question, shots):
        """Returns answered lists of a question: of each length the best by gt_prob, and some others."""
        generator = question_stream(question, f"mine {shots}")
        lists = distinct(self.propose(question, shots, generator))
        self.ask_gt_probs([Group(question, lists)])
        lists = distinct(lists + recombine(lists, shots, generator))
        self.ask_gt_probs([Group(question, lists)])

        greedy = lists[0]
        kept = [greedy]  # first: tools/check_up.py compares it with the best
        for length in range(1, shots + 1):
            of_length = best_first(lists, length)
            others = shuffled(of_length[KEEP_TOP:], generator)
            for demo_list in of_length[:KEEP_TOP] + others[:KEEP_RANDOM]:
                if demo_list is not greedy:
                    kept.append(demo_list)
        self.ask_answers([Group(question, kept)])
        return kept

    def propose(self, question, shots, generator):
        """Returns the policy's greedy list, its samples, and lists of one demonstration of the pool."""
        (drawn,) = self.draw([question], shots, [0.0, *SAMPLE_TEMPERATURES], generator)
        lists = [DemoList(drawn[0], ["greedy"], [None])]
        for numbers, temperature in zip(drawn[1:], SAMPLE_TEMPERATURES):
            lists.append(DemoList(numbers, ["sample"], [temperature]))
        for number in shuffled(question["pool"].tolist(), generator)[:ALONE]:
            lists.append(DemoList([number], ["alone"], [None]))
        return lists

    def ask_gt_probs(self, groups):
        """Asks the reader for the gt_prob of those lists that have none yet."""
        new, asked = [], []
        for group in groups:
            for demo_list in group.lists:
                if demo_list.gt_prob is None:
                    new.append(demo_list)
                    asked.append((group.question, take(self.demos, demo_list.shown)))
        for demo_list, gt_prob in zip(new, self.reader.gold_probabilities(asked), strict=True):
            if not 0 <= gt_prob <= 1.001:  # rounding may exceed 1
                raise UserError(f"the reader's gold_probabilities hold {gt_prob}: not a probability")
            demo_list.gt_prob = gt_prob

    def ask_answers(self, groups):
        """Asks the reader for its answers after the lists, and scores them."""
        questions, lists = [], []
        for group in groups:
            questions += [group.question] * len(group.lists)
            lists += group.lists
        results = self.scored_answers(questions, [demo_list.shown for demo_list in lists])
        for demo_list, result in zip(lists, results):
            vars(demo_list).update(result)

    def scored_answers(self, questions, lists):
        """Returns the reader's answer to each question after its list, {"response": ..., score: ...}."""
        asked = [(question, take(self.demos, numbers)) for question, numbers in zip(questions, lists)]
        results = []
        for question, answer in zip(questions, self.reader.answers(asked), strict=True):
            results.append({"response": answer, **score_answer(answer, question["golds"], self.exact)})
        return results

    # ------------------------------------------------------------ evaluation, logs, checkpoints

    @torch.no_grad()
    def draw(self, questions, shots, temperatures, generator, policy=None):
        """Returns lists of each question, see Pointer.draw(), as numbers of demonstrations."""
        policy = policy or self.policy
        pointers = policy.draw(self.corpus.inputs(questions), shots, temperatures, generator)
        return [question["pool"][places].tolist() for question, places in zip(questions, pointers.cpu())]

    def pick(self, questions, shots, policy=None):
        """Returns the policy's greedy list for each question, as numbers of demonstrations."""
        drawn = self.draw(questions, shots, [0.0], torch.Generator(), policy)
        return [lists[0] for lists in drawn]

    def accuracies(self, questions, lists):
        """Returns the reader's accuracy after each question's list, (questions,)."""
        return np.array(column(self.scored_answers(questions, lists), "accuracy"))

    def evaluate(self, questions=None, pick=None):
        """Returns accuracies after the policy's greedy lists, or those of pick(questions, shots)."""
        questions = questions or self.splits["validation"]
        pick = pick or self.pick
        metrics = {}
        for shots in range(1, SHOTS + 1):
            accuracies = self.accuracies(questions, pick(questions, shots))
            metrics[f"accuracy@{shots}"] = accuracies.mean().item()
        return {"accuracy": np.mean(list(metrics.values())).item(), **metrics}

    def select(self, text, shots=SHOTS, image=None):
        """Returns the demonstrations, out of all, that the best policy picks for a question."""
        question = {"id": "select", "text": text, "image": image, "split": "select", "key": None}
        self.corpus.add_pools([question], len(self.demos))
        (numbers,) = self.pick([question], shots, self.best)
        return take(self.demos, numbers)

    def record(self, batch, metrics):
        """Logs the step's metrics, some of its lists, and its line on the terminal."""
        step = self.state.step
        if batch.stage is self.rce:
            # The mean of mined lists never changes: log how good the policy's likeliest one is
            reward = []
            for rewards, logprobs in zip(batch.rewards, batch.logprobs.cpu()):
                likeliest = logprobs[: len(rewards)].argmax()
                reward.append(rewards[likeliest])
            reward = torch.stack(reward)
        else:
            reward = torch.cat(batch.rewards)
        best_reward = torch.stack([rewards.max() for rewards in batch.rewards])
        seconds = time.perf_counter() - self.started
        metrics |= {"epoch": batch.epoch, "learning_rate": batch.learning_rate}
        metrics |= {"reward": reward.mean().item(), "best_reward": best_reward.mean().item()}
        metrics["seconds"] = seconds
        self.run.write("metrics.jsonl", phase="train", step=step, **metrics)
        for group, rewards in zip(batch.groups[:LOG_SAMPLES], batch.rewards):
            demo_list = group.lists[0]
            demos = take(self.demos, demo_list.shown)
            sample = {"step": step, "prompt": group.question["text"], "answer": group.question["golds"]}
            sample |= vars(demo_list)
            sample["shown"] = [f"{demo['text']} -> {demo['answer']}" for demo in demos]
            sample["reward"] = rewards[0].item()
            self.run.write("samples.jsonl", **sample)
        eta = timedelta(seconds=round(seconds * (self.total_steps - step)))
        self.run.log(
            f"{batch.stage.name} epoch {batch.epoch}: PL:{metrics['policy_loss']:.4f} "
            f"R:{metrics['reward']:.2f} E:{metrics['entropy']:.3f} LR:{batch.learning_rate:.2e}  "
            f"step {step}/{self.total_steps}, {eta} left"
        )

    def log_evaluation(self, metrics):
        """Logs what evaluate() returned. The policy with the highest accuracy is kept in best/."""
        state = self.state
        state.evaluation = metrics
        self.run.write("metrics.jsonl", phase="eval", step=state.step, **metrics)
        self.run.log(f"step {state.step}, validation: " + show(metrics))
        state.evaluations_without_gain += 1
        if metrics["accuracy"] > state.best_score:
            state.evaluations_without_gain = 0
            state.best_score = metrics["accuracy"]
            self.best.load_state_dict(self.policy.state_dict())
            save_policy(self.best, self.run.folder / "best/policy")

    def test(self):
        """Tests the best policy beside the rules and the oracle, the best of the mined lists."""
        questions = self.splits["test"]
        for_oracle = questions[:TEST_ORACLE]
        picks = {"no demonstrations": lambda questions, shots: [[]] * len(questions)}
        for rule in self.rules.names:
            picks[rule] = partial(self.rules.pick, rule)
        if RCE_EPOCHS and GRPO_EPOCHS:
            picks["RCE"] = partial(self.pick, policy=self.reference)
        picks["best/"] = partial(self.pick, policy=self.best)
        results = defaultdict(list)  # {name: for each number of shots the accuracy of each question}
        for shots in range(1, SHOTS + 1):
            path = self.run.folder / f"test_{shots}_step_{self.state.step}.jsonl"
            self.mine_lists(path, for_oracle, shots)
            if self.run.signal:
                return
            if for_oracle:
                best = [max(x.accuracy for x in question["lists"]) for question in for_oracle]
                results["oracle"].append(best)
            for name, pick in picks.items():
                results[name].append(self.accuracies(questions, pick(questions, shots)).tolist())
        (self.run.folder / "eval_test.json").write_text(json.dumps(results))
        self.run.log(f"{len(questions)} test questions: accuracy, what best/ has more ± standard error")
        for name in results:
            line = name.ljust(22)
            for shots in range(1, SHOTS + 1):
                accuracies = np.array(results[name][shots - 1])
                of_best = np.array(results["best/"][shots - 1])
                gain = of_best[: len(accuracies)] - accuracies
                error = gain.std() / len(gain) ** 0.5
                line += f"{shots}: {accuracies.mean():.3f}  {gain.mean():+.3f} ± {error:.3f}    "
            self.run.log(line)

    def save(self):
        """Writes step_N/ if it is not there yet, removes old checkpoints and draws the plots."""
        folder = self.run.folder / f"step_{self.state.step}"
        self.run.checkpoint = folder  # if train() is called again, it resumes from here
        if folder.exists():
            return
        self.run.log(f"Saving {folder}")
        self.state.log_sizes = {name: file.tell() for name, file in self.run.logs.items()}
        models = {name: model.state_dict() for name, model in self.models.items()}
        saved = {"state": vars(self.state), "optimizer": self.optimizer.state_dict(), "models": models}
        with atomic_folder(folder) as tmp:
            torch.save(saved, tmp / "training_state.pt")
            shutil.copy(self.run.folder / "training_config.json", tmp / "run.json")
        for old in list_checkpoints(self.run.folder)[:-KEEP_LAST_N_CHECKPOINTS]:
            # A folder that is half deleted must not look like a checkpoint
            removed = old.rename(f"{old}.tmp")
            shutil.rmtree(removed)
        draw_grid(self.run.folder, "training_metrics_detailed.png", self.state.rules)
        draw_grid(self.run.folder, "rce_icl_metrics_with_entropy.png", self.state.rules, PANELS)

    def load_state(self, folder):
        """Restores state, policies and optimizer."""
        saved = torch.load(folder / "training_state.pt", map_location="cpu", weights_only=True)
        for name, model in self.models.items():
            model.load_state_dict(saved["models"][name])
        moments = saved["optimizer"]["state"]  # the learning rate is that of the constants now
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
        vars(self.state).update(saved["state"])


def distinct(lists):
    """Returns the lists without those that show what an earlier one shows, in the same order."""
    first = {}
    for demo_list in lists:
        first.setdefault(tuple(demo_list.shown), demo_list)
    return list(first.values())


def best_first(lists, length):
    """Returns the lists of one length, the highest gt_prob first."""
    of_length = [x for x in lists if len(x.shown) == length]
    return sorted(of_length, key=lambda x: -x.gt_prob)


def recombine(lists, shots, generator):
    """Returns LOCAL lists of members of the best ones: a list is often good for one of its members."""
    best = best_first(lists, shots)[:KEEP_TOP] + best_first(lists, 1)[: 2 * KEEP_TOP]
    members = list(dict.fromkeys(chain(*[x.shown for x in best])))
    lengths = list(range(shots, 1, -1)) or [1]
    recombined = []
    for length in islice(cycle(lengths), LOCAL):
        numbers = shuffled(members, generator)[:length]
        recombined.append(DemoList(numbers, ["local"], [None]))
    return recombined


def show(figures):
    return "  ".join(f"{name} {x:.4g}" for name, x in figures.items())


def save_policy(policy, path):
    with atomic_folder(path) as folder:
        safetensors.torch.save_file(policy.state_dict(), folder / "model.safetensors")


# ================================================================ vectors and pools


class Corpus:
    """The demonstrations, and their vectors. add_pools() adds to questions: vector (d,); pool, numbers of
    demonstrations, without the question itself; and similarity to these (pool,)."""

    def __init__(self, demos, device):
        self.demos = demos
        self.device = device
        self.embed = make_embedder(demos, device)
        self.demo_vectors = torch.tensor(unit(self.embed(demos)))  # (demonstrations, d)
        answers, answer_of = np.unique(column(demos, "answer"), return_inverse=True)
        answer_rows = [{"text": answer.replace("_", " "), "image": None} for answer in answers.tolist()]
        embed_answers = make_embedder(answer_rows, device)
        answer_vectors = torch.tensor(unit(embed_answers(answer_rows)))
        # What the policy gets of each demonstration, (demonstrations, D)
        self.candidates = torch.cat([self.demo_vectors, answer_vectors[answer_of]], 1)

    def add_pools(self, questions, size):
        number_of = {demo["key"]: number for number, demo in enumerate(self.demos)}
        vectors = torch.tensor(unit(self.embed(questions)))
        for question, vector in zip(questions, vectors):
            similarity = self.demo_vectors @ vector
            if POOL == "similarity":
                order = similarity.argsort(descending=True, stable=True)
            else:
                order = torch.randperm(len(self.demos), generator=question_stream(question, "pool"))
            own_number = number_of.get(question["key"], -1)
            pool = order[order != own_number][:size].clone()
            if len(pool) < SHOTS:
                what = f"the pool of {question['id']} has {len(pool)} demonstrations"
                raise UserError(f"{what}: lower SHOTS")
            question |= {"vector": vector, "pool": pool, "similarity": similarity[pool]}

    def inputs(self, questions):
        """Returns what the policy gets of some questions."""
        vectors = torch.stack(column(questions, "vector"))
        pool = pad_sequence(column(questions, "pool"), batch_first=True, padding_value=-1)
        similarity = pad_sequence(column(questions, "similarity"), batch_first=True)
        numbers, index = pool.clamp(min=0).unique(return_inverse=True)  # each demonstration once
        return SimpleNamespace(
            vectors=vectors.to(self.device),  # (questions, d)
            candidates=self.candidates[numbers].to(self.device),  # of all their pools, (candidates, D)
            pool=index.to(self.device),  # as indices of candidates, (questions, pool)
            is_padding=(pool < 0).to(self.device),  # (questions, pool)
            similarity=similarity.to(self.device),  # (questions, pool)
        )

    def pointers(self, group):
        """Returns the places in the pool of a group's lists, (lists, SHOTS), -1 after a list's end."""
        place_of = {number: place for place, number in enumerate(group.question["pool"].tolist())}
        pointers = torch.full((len(group.lists), SHOTS), -1)
        for i, demo_list in enumerate(group.lists):
            places = [place_of[number] for number in demo_list.shown]
            pointers[i, : len(places)] = torch.tensor(places)
        return pointers


def question_stream(question, use):
    """Returns a random generator for one use of one question. Only training questions depend on SEED."""
    seed = SEED if question["split"] == "train" else 0
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {question['id']} {use}".encode()))


def make_embedder(rows, device):
    """Returns a function of rows that gives their vectors, (rows, d). Replace it by one of your own."""
    if EMBEDDING == "tfidf":
        pattern = r"\w+|[^\w\s]+"  # labels may be signs
        vectorizer = TfidfVectorizer(sublinear_tf=True, token_pattern=pattern, max_features=4000)
        vectorizer.fit(column(rows, "text"))
        return lambda rows: vectorizer.transform(column(rows, "text")).toarray()

    model = load_model(transformers.AutoModel, EMBEDDING).to(device)
    processor = transformers.AutoProcessor.from_pretrained(EMBEDDING)
    sees_images = hasattr(model.config, "vision_config")
    vectors_of = text_image_vectors if sees_images else sentence_vectors

    def embed(rows):
        return np.concatenate([vectors_of(processor, model, batch) for batch in batches(rows)])

    return embed


@torch.no_grad()
def sentence_vectors(tokenizer, model, rows):
    """Returns the means over the tokens of a model's last layer, (rows, d)."""
    limit = min(512, getattr(model.config, "max_position_embeddings", None) or 512)
    options = {"padding": True, "truncation": True, "max_length": limit, "return_tensors": "pt"}
    tokens = tokenizer(column(rows, "text"), **options).to(model.device)
    states = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(2)
    means = (states * mask).sum(1) / mask.sum(1)
    return means.float().cpu().numpy()


@torch.no_grad()
def text_image_vectors(processor, model, rows):
    """Returns CLIP's or SigLIP's vectors, each of length 1, of text and image (0: none), (rows, 2 d)."""

    def as_unit(features):
        features = getattr(features, "pooler_output", features)  # SigLIP returns more than the vectors
        return unit(features.float().cpu().numpy())

    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    tokens = processor(text=column(rows, "text"), **options).to(model.device)
    texts = as_unit(model.get_text_features(**tokens))
    images = np.zeros_like(texts)
    has_image = np.array([bool(row["image"]) for row in rows])
    if has_image.any():
        pixels = processor(images=open_images(rows), return_tensors="pt").to(model.device, model.dtype)
        images[has_image] = as_unit(model.get_image_features(**pixels))
    return np.hstack([texts, images])


def unit(vectors):
    """Returns float32 vectors of length 1. Zeros, of a text without a known word, stay zeros."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-9)).astype(np.float32)


# ================================================================ rules


class Rules:
    """Rules that pick demonstrations without the reader, to compare the policy with. They see the texts
    and answers of all demonstrations.
    similarity           the most similar to the question first
    kNN, classifier      of the likeliest answer, the most similar first; then of the next answer
    classifier, fillers  of the likeliest answer, then the least similar others
    format               as classifier, for formats instead of answers: see answer_format()
    format, similarity   one of the likeliest format, then the most similar others"""

    def __init__(self, demos, demo_vectors):
        vectors = demo_vectors.numpy()
        answers, answer_of = np.unique(column(demos, "answer"), return_inverse=True)
        formats, format_of = np.unique([answer_format(demo) for demo in demos], return_inverse=True)
        self.classifiers = {}  # of questions, by rule
        self.classes = {"similarity": np.zeros_like(answer_of)}  # of the demonstrations, by rule
        if 1 < len(answers) <= MAX_LABELS:
            nearest = KNeighborsClassifier(min(20, len(demos)), weights="distance", metric="cosine")
            logistic = LogisticRegression(C=10.0, max_iter=1000).fit(vectors, answer_of)
            self.classifiers["kNN"] = nearest.fit(vectors, answer_of)
            self.classifiers["classifier"] = logistic
            self.classifiers["classifier, fillers"] = logistic
            self.classes |= dict.fromkeys(self.classifiers, answer_of)
        if 1 < len(formats) < min(MAX_LABELS, len(answers)):
            logistic = LogisticRegression(C=10.0, max_iter=1000).fit(vectors, format_of)
            for rule in ("format", "format, similarity"):
                self.classifiers[rule] = logistic
                self.classes[rule] = format_of
        self.names = list(self.classes)

    def pick(self, rule, questions, shots):
        """Returns the list that a rule picks for each question, as numbers of demonstrations."""
        probabilities = np.ones((len(questions), 1))
        if rule in self.classifiers:
            vectors = torch.stack(column(questions, "vector")).numpy()
            probabilities = self.classifiers[rule].predict_proba(vectors)  # (questions, classes)
        lists = []
        for question, of_class in zip(questions, probabilities):
            pool = question["pool"]
            likelihood = of_class[self.classes[rule][pool]]  # (pool,)
            order = rule_order(rule, likelihood, question["similarity"].numpy())
            lists.append(take(pool.tolist(), order[:shots]))
        return lists


def rule_order(rule, likelihood, similarity):
    """Returns the places of a pool, the best first. likelihood (pool,) is that of each one's class."""
    by_similarity = np.argsort(-similarity, kind="stable").tolist()
    by_class = np.lexsort((-similarity, -likelihood)).tolist()  # by similarity within a class
    if rule == "classifier, fillers":
        is_likeliest = likelihood == likelihood.max()
        likeliest = [place for place in by_similarity if is_likeliest[place]]
        least_similar = np.argsort(similarity, kind="stable").tolist()
        return likeliest + [place for place in least_similar if not is_likeliest[place]]
    if rule == "format, similarity":
        first = by_class[0]
        by_similarity.remove(first)
        return [first, *by_similarity]
    return by_class


def answer_format(row):
    """Returns a row's answer with * for the words that its question has: how it is said, not what."""
    question_words = row["text"].lower().split()
    return " ".join("*" if word.lower() in question_words else word for word in row["answer"].split())


# ================================================================ answers


def normalise(text):
    """Returns an answer as it is compared."""
    return normalise_vqa(text) if GOLDS == "annotators" else normalise_alias(text)


def normalise_alias(text):
    """Returns a text in lower case, without outer quotes, an article before it, punctuation after it."""
    text = " ".join(text.lower().split())
    bare = re.sub(r"""^(["'])(.+)\1$""", r"\2", text).rstrip(".,;!?")
    bare = re.sub(r"^(a|an|the) (?=\S)", "", bare)
    return bare or text  # the answer may be "!"


digits = {"none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5"}
digits |= {"six": "6", "seven": "7", "eight": "8", "nine": "9", "ten": "10"}


def normalise_vqa(text):
    """Returns a text as VQA compares it: number words as digits, no articles, no punctuation but decimal
    points and : $ %. Unlike VQA it keeps a sign before a digit, and has no table of contractions."""
    cleaned = re.sub(r"(?<=\d),(?=\d)|\.(?!\d)|'", "", text.lower())
    cleaned = re.sub(r"(?!(?<!\w)[-+]\.?\d)[^\w\s.:$%]|_", " ", cleaned)
    words = cleaned.split() or text.split()  # the answer may be "!"
    without_articles = [word for word in words if word not in ("a", "an", "the")]
    words = without_articles or words  # the answer may be "A"
    return " ".join(digits.get(word, word) for word in words)


def find_exact(rows):
    """Returns the answers that normalise() would make equal to others of the data, such as labels A and
    a: they are compared as they are written. More than MAX_LABELS answers are free texts, which vary so."""
    answers = set(column(rows, "answer"))
    if len(answers) > MAX_LABELS:
        return set()
    counts = Counter(map(normalise, answers))
    return {answer for answer in answers if counts[normalise(answer)] > 1}


def vqa_accuracy(response, golds):
    """Returns VQA's accuracy (1505.00468): min(agreeing annotators / 3, 1), mean over leaving one out."""
    agrees = [normalise(gold) == normalise(response) for gold in golds]
    if len(golds) == 1:
        return float(agrees[0])
    return np.mean([min((sum(agrees) - left_out) / 3, 1.0) for left_out in agrees]).item()


def words_f1(text, gold):
    words, gold_words = Counter(text.split()), Counter(gold.split())
    shared = (words & gold_words).total()
    return 2 * shared / (words.total() + gold_words.total())


def score_answer(text, golds, exact=()):
    """Returns the scores of a response, 0 to 1: accuracy; hard, 1 if it is right at all; soft: VQA's
    accuracy, or with aliases the best F1 of its words with a gold's. For `exact` see find_exact()."""
    if GOLDS == "annotators":
        accuracy = soft = vqa_accuracy(text, golds)
    else:
        accuracy = soft = 0.0
        for gold in golds:
            form = str.strip if gold in exact else normalise
            accuracy = max(accuracy, float(form(text) == form(gold)))
            soft = max(soft, words_f1(form(text), form(gold)))
    return {"accuracy": accuracy, "hard": int(accuracy > 0), "soft": soft}


def gold_weights(golds):
    """Returns {distinct gold answer: its weight in gt_prob}: 1, or of annotators min(count / 3, 1)."""
    first_spelling = {}  # {normalised gold: how it is written first}
    counts = Counter()
    for gold in golds:
        spelling = first_spelling.setdefault(normalise(gold), gold)
        counts[spelling] += 1
    enough = 1
    if GOLDS == "annotators":
        enough = min(3, len(golds))
    return {gold: min(1.0, count / enough) for gold, count in counts.items()}


# ================================================================ readers


class ModelReader:
    """A causal language model, or an image-text-to-text model such as Qwen2.5-VL, SmolVLM or LLaVA. It
    sees the image of each demonstration and of the question before its text."""

    def __init__(self, name, device):
        self.sees_images = hasattr(transformers.AutoConfig.from_pretrained(name), "vision_config")
        if self.sees_images:
            self.model = load_model(transformers.AutoModelForImageTextToText, name).to(device)
            self.processor = transformers.AutoProcessor.from_pretrained(name, padding_side="left")
        else:
            self.model = load_model(transformers.AutoModelForCausalLM, name).to(device)
            self.processor = transformers.AutoTokenizer.from_pretrained(name, padding_side="left")
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.end_ids = self.find_end_ids()
        # Penalties and the like of the model's own generation_config are left out: gt_prob knows none
        options = {"eos_token_id": self.end_ids, "pad_token_id": self.tokenizer.pad_token_id or 0}
        self.model.generation_config = transformers.GenerationConfig(**options)
        self.chats = bool(CHAT_TEMPLATE and self.processor.chat_template)
        self.opening, self.closing = answer_form(self.chats)
        # The prompt ends with the opening, but for its last blanks: a word's token begins with its blank.
        # A chat's answer is a message of its own, which the opening begins
        self.prompt_end = "" if self.chats else self.opening.rstrip(" ")
        self.answer_start = self.opening.removeprefix(self.prompt_end)

    def find_end_ids(self):
        """Returns the ids of the tokens that end an answer: EOS, and those that begin with a newline."""
        ids = np.hstack([self.model.generation_config.eos_token_id, self.tokenizer.eos_token_id])
        ids = set(ids.tolist()) - {None}
        vocabulary = self.model.config.get_text_config().vocab_size
        for number in range(min(vocabulary, len(self.tokenizer))):
            if self.tokenizer.decode([number]).lstrip(" \r").startswith("\n"):
                ids.add(number)
        return sorted(ids)

    def check_lengths(self, questions, demos):
        """Refuses prompts that can exceed the model's positions (without images). Warns of answers that
        MAX_ANSWER_TOKENS cuts."""

        def length(text):
            return len(self.tokenizer(text, add_special_tokens=False).input_ids)

        answers = [row["answer"] for row in questions]
        lengths = [length(self.answer_start + answer + self.closing) for answer in answers]
        longest = max(lengths)
        if longest > MAX_ANSWER_TOKENS:
            answer = answers[lengths.index(longest)]
            print(f"WARNING: {answer!r} has {longest} tokens, above MAX_ANSWER_TOKENS", flush=True)
        shown = sorted(demos, key=lambda row: length(row["text"] + row["answer"]))[-SHOTS:]
        question = max(questions, key=lambda row: length(row["text"]))
        count = length(self.prompt(question, shown)) + max(longest, MAX_ANSWER_TOKENS)
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if limit and count > limit:
            what = f"{SHOTS} demonstrations such as {shown[-1]['id']} and a question have {count} tokens"
            raise UserError(f"READER={READER} has {limit} positions, {what}: lower SHOTS")

    def prompt(self, question, demonstrations):
        """Returns the text of a prompt, with the image token for each image."""
        parts = [{"type": "text", "text": INSTRUCTION}]
        for row in [*demonstrations, question]:
            if row["image"]:
                parts.append({"type": "image", "text": self.processor.image_token})
            template = QUESTION if row is question else DEMONSTRATION
            parts.append({"type": "text", "text": fill(template, row)})
        parts[-1]["text"] = parts[-1]["text"].rstrip(" ") + self.prompt_end
        text = "".join(column(parts, "text"))
        if not self.chats:
            return text
        content = [part for part in parts if part["text"]] if self.sees_images else text
        messages = [{"role": "user", "content": content}]
        return self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def inputs(self, texts, asked):
        """Returns the model's inputs, left-padded: input_ids and attention_mask of texts, (texts, P), and
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
        for batch in batches(asked):
            prompts = [self.prompt(question, demonstrations) for question, demonstrations in batch]
            inputs = self.inputs(prompts, batch)
            ids = self.model.generate(**inputs, do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS)
            response_ids = ids[:, inputs["input_ids"].shape[1] :]
            for text in self.tokenizer.batch_decode(response_ids, skip_special_tokens=True):
                line = text.strip().partition("\n")[0].strip()
                answer = line.removeprefix(self.opening.strip()).removesuffix(self.closing)
                answers.append(answer.strip())
        return answers

    @torch.no_grad()
    def gold_probabilities(self, asked):
        """Returns the gt_prob of each: the sum over the question's golds of weight * P(gold and what ends it
        | prompt), at most 1. A gold is written as in DEMONSTRATION."""
        golds = []  # (number in asked, prompt, prompt and gold, weight)
        for number, (question, demonstrations) in enumerate(asked):
            prompt = self.prompt(question, demonstrations)
            for gold, weight in gold_weights(question["golds"]).items():
                text = prompt + self.answer_start + gold + self.closing
                golds.append((number, prompt, text, weight))
        gt_probs = [0.0] * len(asked)
        for batch in batches(golds):
            numbers, prompts, texts, weights = map(list, zip(*batch))
            inputs = self.inputs(texts, take(asked, numbers))
            lengths = self.answer_lengths(prompts, texts)
            probabilities = self.answer_logprobs(inputs, lengths).exp().tolist()
            for number, weight, probability in zip(numbers, weights, probabilities):
                gt_probs[number] += weight * probability
        return [min(1.0, gt_prob) for gt_prob in gt_probs]

    def answer_lengths(self, prompts, texts):
        """Returns how many tokens of each text come after those that it shares with its prompt."""
        prompt_ids = self.tokenizer(prompts, add_special_tokens=False).input_ids
        text_ids = self.tokenizer(texts, add_special_tokens=False).input_ids
        lengths = []
        for of_prompt, of_text in zip(prompt_ids, text_ids):
            shared = os.path.commonprefix([of_prompt, of_text])
            lengths.append(len(of_text) - len(shared))
        return lengths

    def answer_logprobs(self, inputs, lengths):
        """Returns the log-probability of the last `lengths` tokens and an end after them, (texts,)."""
        longest = max(lengths)
        if not self.sees_images:  # other models work them out: Qwen's have three axes
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        kept = longest + 1  # the last prompt token's logits are those of the first answer token
        logits = self.model(**inputs, logits_to_keep=kept).logits[:, -kept:]
        logprobs = logits.double().log_softmax(-1).cpu()  # (rows, kept, vocabulary)
        ids = inputs["input_ids"][:, -longest:].cpu()
        chosen = logprobs[:, :-1].gather(2, ids.unsqueeze(2)).squeeze(2)  # (rows, longest)
        tokens_from_end = torch.arange(longest, 0, -1)
        is_answer = tokens_from_end <= torch.tensor(lengths).unsqueeze(1)
        end_logprob = logprobs[:, -1, self.end_ids].logsumexp(-1)
        return (chosen * is_answer).sum(1) + end_logprob


def fill(template, row):
    """Returns a template with the row's {text} and {answer}. Other braces stay."""
    return re.sub(r"\{(text|answer)\}", lambda field: row[field[1]], template)


def answer_form(chats):
    """Returns what opens and what closes an answer in DEMONSTRATION. What follows it on its line closes it.
    What stands before it and not in QUESTION opens it, such as a blank, a line break or a quote. In a chat,
    or if the two templates differ, what stands directly before it opens it, such as a quote."""
    before, _, after = DEMONSTRATION.partition("{answer}")
    before = before.rpartition("{text}")[2]
    question_end = QUESTION.rpartition("{text}")[2].rstrip(" ")
    if chats:
        opening = re.search(r"[^\s:=]*$", before)[0]
    elif before.startswith(question_end):
        opening = before.removeprefix(question_end)
    else:
        opening = re.search(r"\s*[^\s:=]*$", before)[0]
    closing = after.partition("\n")[0].rstrip()
    return opening, closing


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
    """Returns the rows of a data set, dicts: id, text, golds, image (a path or None), answer (the gold
    named most often, which a demonstration shows), and key (equal for rows with the same question)."""
    rows = []
    row_id = f"the data set {spec}"
    try:
        required, optional = {"path", "type", "input", "output"}, {"name", "split", "image"}
        if not required <= spec.keys() <= required | optional:
            raise ValueError(f"it must have {sorted(required)} and may have {sorted(optional)}")
        for number, record in enumerate(read_records(spec), 1):
            row_id = f"{Path(spec['path']).name}:{number}"
            rows.append({"id": row_id, **make_row(record, spec)})
            row_id = f"after {row_id}"  # if the next record cannot be read
    except Exception as error:  # the libraries raise many types
        raise UserError(f"{row_id}: {type(error).__name__}: {first_line(error)}") from None
    return rows


def make_row(record, spec):
    """Returns a row without its id, or raises ValueError."""
    columns = {spec[name] for name in ("input", "output", "image") if name in spec}
    if not columns <= record.keys():
        raise ValueError(f"{list(record)} lacks a column of {spec}")
    if None in record:
        raise ValueError("it has more fields than the header")  # csv.DictReader puts them under None
    text, golds = record[spec["input"]], record[spec["output"]]
    if not isinstance(golds, list) or not golds:
        golds = [golds]
    for value in (text, *golds):
        is_text = isinstance(value, (str, int, float)) and value == value  # NaN is not itself
        if not is_text or not str(value).strip():
            raise ValueError(f"{value!r} is no question or answer: it is empty, or no text or number")
    if spec["type"] == "csv" and re.match(r"\[\s*['\"]", str(golds[0])):
        raise ValueError(f"{golds[0]!r} is a list in a cell: write lists of answers as jsonl")
    image = record[spec["image"]] if "image" in spec else None
    if image and not Path(image).is_file():
        raise ValueError(f"there is no image {image!r}")
    text, golds = str(text), [str(gold) for gold in golds]
    answer = Counter(golds).most_common(1)[0][0]
    return {
        "text": text,
        "golds": golds,
        "image": image,
        "answer": answer,
        "key": (question_key(text), image),
    }


def question_key(text):
    """Returns a question without case, blanks and closing punctuation that may differ (5! is not 5)."""
    text = " ".join(text.lower().split())
    return re.sub(r"([\s.,;:?…\u3002\uff1f\uff01]|(?<!\d)!)+$", "", text) or text


def one_per_question(rows, name, other_keys=()):
    """Returns the first of the rows with the same question, unless other_keys has it. Counts the rest."""
    first = {}
    for row in reversed(rows):
        first[row["key"]] = row  # the first one is assigned last
    kept = [row for row in reversed(first.values()) if row["key"] not in other_keys]
    if len(kept) < len(rows):
        unlike = sum(row["golds"] != first[row["key"]]["golds"] for row in rows)
        what = f"{len(rows) - len(kept)} of {len(rows)} rows are left out: other rows ask the same"
        print(f"{name}: {what} ({unlike} have another answer)", flush=True)
    return kept


def split_rows():
    """Returns {"train", "validation", "test"}: questions; and the demonstrations: the training questions,
    in another order. No question is in two of them, and none is there twice."""
    test = []
    if TEST_DATASET:
        test = one_per_question(load_rows(TEST_DATASET), "TEST_DATASET")
    rows = one_per_question(load_rows(TRAIN_DATASET), "TRAIN_DATASET", set(column(test, "key")))
    rows = take(rows, permutation(len(rows), 0))
    fifth = len(rows) // 5
    if TEST_DATASET is None:
        test, rows = rows[:fifth], rows[fifth:]
    num_validation = min(VALIDATION_QUESTIONS, fifth)
    validation, demos = rows[:num_validation], rows[num_validation:]
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


def shuffled(items, generator):
    return take(items, torch.randperm(len(items), generator=generator))


def permutation(count, seed):
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


# ================================================================ the run's files


def find_device():
    """Returns the device, and asks for kernels that add in a fixed order."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)  # some models' kernels know no such order
    return torch.device(DEVICE.replace("auto", "cuda" if torch.cuda.is_available() else "cpu"))


class Run:
    """The files of one run in OUTPUT_DIR, and the signals that end the run."""

    def __init__(self, resume):
        self.folder = Path(OUTPUT_DIR).absolute()  # once: the working directory may change
        self.logs = {}
        self.wandb = None
        self.signal = 0
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.lock = filelock.FileLock(f"{self.folder}.lock", is_singleton=True)
        self.facts = {"file": __file__, "program": os.path.abspath(sys.argv[0]), "torch": torch.__version__}
        paths = {os.path.realpath(path) for path in (__file__, sys.argv[0], rewards.__file__)}
        files = [Path(path) for path in paths if os.path.isfile(path)]
        self.facts["text"] = digest(sorted(file.read_bytes() for file in files))
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
        """Opens the logs and catches signals. A run that continues cuts the logs back to its checkpoint;
        if no step is left, it is complete."""
        self.outcome = "Nothing was left to do: complete" if is_complete else "Done"
        self.handlers = {}
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
        if self.checkpoint and self.checkpoint.parent.resolve() != self.folder.resolve():
            shutil.copy(self.checkpoint.parent / "candidates.jsonl", self.folder)
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

            self.wandb = wandb.init(dir=self.folder, config=constants(), id=state.wandb_id, resume="allow")
            state.wandb_id = self.wandb.id

    def compare(self, state, is_complete):
        """Prints what changed since the checkpoint that is resumed. Refuses another reader or embedding:
        the mined lists and the policy are of the old ones. If no step is left, refuses any change: nothing
        would be trained with it."""
        if not self.checkpoint:
            return
        earlier = json.loads((self.checkpoint / "run.json").read_text())
        changes = []
        for name, value in constants().items():
            if name not in ("RESUME", "OUTPUT_DIR") and earlier["constants"].get(name, value) != value:
                changes.append(f"{name}={value!r}")
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
        """Moves what is later than the run's checkpoint, or all of an earlier run, to `target`."""
        config = self.folder / "training_config.json"
        if not config.exists():
            return
        stale = list_checkpoints(self.folder)
        if self.checkpoint and self.checkpoint.resolve().parent == self.folder.resolve():
            stale += self.folder.glob("test_*_step_*.jsonl")
            stale = [path for path in stale if int(path.stem.rpartition("_")[2]) > state.step]
        else:
            state.log_sizes = {}
            patterns = "logs/*.jsonl logs/training_*.log *_metrics_*.png candidates.jsonl test_*.jsonl "
            patterns += "best/policy rce/policy eval_test.json"
            for pattern in patterns.split():
                stale += self.folder.glob(pattern)
            stale.append(config)  # last: after a kill the next start moves the rest
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
        if number.isdecimal():  # not step_5.tmp
            folders[int(number)] = path.parent
    return [folders[number] for number in sorted(folders)]


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


# The panels of rce_icl_metrics_with_entropy.png; training_metrics_detailed.png has all metrics that vary.
# A training metric is drawn for one stage: reward and policy_loss mean other things in RCE and in GRPO
PANELS = ["accuracy", "reward in RCE", "policy_loss in RCE"]
PANELS += ["entropy in RCE", "reward in GRPO", "entropy in GRPO"]


def read_panels(path):
    """Returns {panel: [(step, value)]} of metrics.jsonl, without what never changes."""
    panels = defaultdict(list)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        step, phase = record.pop("step"), record.pop("phase")
        stage = ""
        if phase == "train":
            stage = " in GRPO" if "kl" in record else " in RCE"  # only GRPO has a KL divergence
        for name, value in record.items():
            if value is not None:
                panels[name + stage].append((step, value))
    return {name: points for name, points in panels.items() if len({value for _, value in points}) > 1}


def draw_grid(folder, path, rules, names=None):
    """Draws a panel per metric: training steps faint, their rolling mean, and evaluations as points."""
    panels = read_panels(folder / "logs/metrics.jsonl")
    names = [name for name in names or panels if name in panels]
    height = max(1, math.ceil(len(names) / 3))
    figure = Figure(figsize=(10, 2.3 * height + 0.5), layout="tight")
    for number, name in enumerate(names, 1):
        axis = figure.add_subplot(height, 3, number, title=name, xlabel="step")
        axis.grid(alpha=0.3)
        steps, values = zip(*panels[name])
        if " in " not in name:
            axis.plot(steps, values, "o-", color="C1", markersize=4, label="policy, validation")
        else:
            window = max(1, len(values) // 12)
            means = np.convolve(values, np.full(window, 1 / window), "valid")
            axis.plot(steps, values, ".-", color="C0", alpha=0.25, label="each step")
            axis.plot(steps[window - 1 :], means, color="C0", label="rolling mean")
        if name == "accuracy":
            for color, (rule, accuracy) in enumerate(rules.items(), 2):
                line = {"linestyle": "--", "linewidth": 1, "color": f"C{color}"}
                axis.axhline(accuracy, **line, label=f"rule: {rule}")
        axis.legend(fontsize=6)
    figure.savefig(folder / path, dpi=110)


# ================================================================ command line


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def constants():
    """Returns every constant of this file by name, as JSON has it."""
    values = {name: x for name, x in globals().items() if name.isupper() and name not in ("ROOT", "PANELS")}

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
    """Sets constants from KEY=VALUE arguments, or @FILE with one on each line, in their types."""
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
        if type(value) not in (int, float):
            continue
        if not lowest <= value or (type(value) is int and value >= 2**63):  # NaN, and seeds beyond 64 bits
            raise UserError(f"{name} = {value!r} is not a number from {lowest} on (or too large)")


def require(is_kept, rule):
    if not is_kept:
        raise UserError(f"a constant breaks a rule: {rule}")


def check_constants():
    """Refuses values that would fail silently or late."""
    check_numbers(
        "VALIDATION_QUESTIONS TEST_QUESTIONS MAX_ANSWER_TOKENS READER_BATCH_SIZE SHOTS "
        "POOL_SIZE MINE_QUESTIONS GROUP_SIZE GROUP_EPOCHS HIDDEN_SIZE BATCH_SIZE KEEP_LAST_N_CHECKPOINTS"
    )
    is_mode = callable(REWARD_MODE) or REWARD_MODE in reward_modes
    above_zero = [TAU, MAX_GRAD_NORM, POINTER_TEMPERATURE, *SAMPLE_TEMPERATURES]
    require(GOLDS in ("aliases", "annotators"), "GOLDS is aliases or annotators")
    require(POOL in ("random", "similarity"), "POOL is random or similarity")
    require(is_mode, f"REWARD_MODE is a function or one of {', '.join(reward_modes)}")
    require(DTYPE in ("float32", "bfloat16"), "DTYPE is float32 or bfloat16")
    require(min(above_zero) > 0, "TAU, MAX_GRAD_NORM and temperatures are above 0")
    require(GROUP_SIZE >= 2, "GROUP_SIZE is at least 2")
    require("{text}" in QUESTION, "QUESTION contains {text}")
    require("{text}" in DEMONSTRATION, "DEMONSTRATION contains {text}")
    is_line = re.search(r"\{answer\}.*\n", DEMONSTRATION)
    require(is_line, "DEMONSTRATION contains {answer} and then a line break")


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
