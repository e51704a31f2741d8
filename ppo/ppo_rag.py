"""PPO over retrieval, in one file: it chooses top_k, temperature and reranking for each question.

An episode has one step. The observation s describes the question and what BM25 finds for it; the action a is
one of TOP_KS x TEMPERATURES x RERANKS: how many paragraphs the generator reads, its temperature, and whether
a reranker sorts the paragraphs first. The answer gives the reward, from which PPO (Schulman et al. 2017,
arXiv 1707.06347) learns; with one step per episode there is no GAE and no bootstrapping:

    r   = EM_WEIGHT EM + F1_WEIGHT F1 + ROUGE_WEIGHT ROUGE-L - COST_WEIGHT cost
    A   = r - V(s), whitened over the episodes of the update
    rho = pi(a|s) / pi_old(a|s)
    L   = -mean min(rho A, clip(rho, 1 - CLIP_RANGE, 1 + CLIP_RANGE) A)
          + VALUE_LOSS_COEF mean 1/2 max((V - r)^2, (clip(V, V_old +- VALUE_CLIP_RANGE) - r)^2)
          - ENTROPY_COEF mean H(pi)

Deliberate deviations:
- every (question, action, draw) is answered once, before training, and cached in CACHE_DIR: PPO then trains
  in seconds, a resumed run repeats exactly, and changing a weight of the reward costs nothing;
- the cost counts tokens and reranked pairs, so that runs repeat; COST="seconds" measures the time instead;
- actor and critic are one small network with two heads, and one optimizer.

    python ppo/ppo_rag.py                                 # edit the constants below, or: KEY=VALUE, @FILE
    python ppo/ppo_rag.py BASELINE_ONLY=True              # the table of all actions, without training
    python ppo/ppo_rag.py STAGE=evaluate                  # best/ on the test questions, without training
    python ppo/ppo_rag.py GENERATOR=google/flan-t5-small RERANKER=cross-encoder/ms-marco-MiniLM-L-6-v2 \\
        'DATASET={"path": "hotpot_dev_distractor_v1.json", "type": "hotpotqa"}' 'TOP_KS=(5, 10, 20, 50)' \\
        'TEMPERATURES=(0.0, 0.3, 0.7, 1.0)' 'FIXED_ACTION=(20, 0.7, 0)' COST_TOKENS=1000

It writes into OUTPUT_DIR: eval_baseline_*.json, logs/ (metrics.jsonl, samples.jsonl, training_*.log), step_N/
checkpoints, best/policy/, eval_test.json, and the plots rag_learning.png, rag_actions.png,
training_metrics_detailed.png and ppo_rag_metrics_with_entropy.png. docs/reference-rag.md defines metrics and
observation.

To change         see
the loss          policy_loss, value_loss, update       the data    DATASET; load_questions
the reward        EM_WEIGHT ...; compute_rewards        a metric    RAGTrainer.record, evaluate
the actions       TOP_KS, TEMPERATURES, RERANKS         a plot      self.run.panels; draw_learning
the observation   observe                               QA parts    Retriever, Reranker, Generator
"""

import ast
import csv
import difflib
import faulthandler
import hashlib
import inspect
import io
import itertools
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import string
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections import defaultdict
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

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
from torch.utils._pytree import tree_map_only
from tqdm import tqdm
from transformers import PreTrainedModel, PretrainedConfig

ROOT = next((p for p in Path(__file__).resolve().parents if (p / "rewards").is_dir()), None)
if ROOT is None:
    sys.exit("ppo_rag.py needs the folder rewards/ beside it or above it: copy it from the repository")
sys.path.insert(0, str(ROOT))
import rewards

# ================================================================ constants

STAGE = "train"  # train | evaluate: score EVALUATE_POLICY on EVAL_DATASET, write eval_<name>.json, and end
EVALUATE_POLICY = "best"  # best, or step_N, of OUTPUT_DIR; or such a folder of another run
EVAL_DATASET: dict | None = None  # for STAGE=evaluate: its questions; None: DATASET's test questions

# Data. folder: has corpus {title, text} and questions {question, answer, gold, type}, each a .jsonl, .csv or
# .parquet file, or corpus/ with .txt and .md files; hotpotqa: HotpotQA's JSON file (distractor format); hub:
# the same, as {"path": "hotpotqa/hotpot_qa", "type": "hub", "name": "distractor", "split": "validation"}
DATASET = {"path": f"{ROOT}/data/rag", "type": "folder"}  # type: folder | hotpotqa | hub
SAMPLE: int | None = None  # number of questions drawn from a data set; None: all
VALIDATION_QUESTIONS: int | None = None  # for best/ and early stopping; None: 2 of 15, at most 200
TEST_QUESTIONS: int | None = None  # used once, at the end; None: 4 of 15, at most 400
SPLIT_SEED = 0  # decides which questions are drawn, and their splits; SEED does not

# The QA system. Models are folders or hub names; each part is a class below that you may replace
GENERATOR = f"{ROOT}/data/rag/reader"  # any seq2seq or causal model
RERANKER: str | None = "lexical"  # lexical: character trigrams | a cross-encoder of one label | None
TITLE_WEIGHT = 2  # times that BM25 counts a title's words
RERANK_DEPTH = 20  # number of BM25's best paragraphs that the reranker sorts
PROMPT = (
    "Answer ONLY with the correct answer, as a short phrase, based strictly on the provided CONTEXTS.\n"
    "CONTEXTS:\n{contexts}\nQUESTION: {question}\nANSWER:"
)
PARAGRAPH = "[{n}] {title}: {text}"
CHAT_TEMPLATE = True  # sends the prompt as a user's message if the generator has a template; False: as text
MAX_PROMPT_TOKENS = 4096  # paragraphs beyond this or the generator's own limit are left out and counted
MAX_NEW_TOKENS = 16
DTYPE = "float32"  # float32 | bfloat16, of generator and reranker
DEVICE = "auto"  # auto | cpu | cuda | cuda:1 | mps
QUESTIONS_AT_ONCE = 16  # answered in one batch (not if COST = "seconds"); a kill loses only these
CACHE_DIR = f"{ROOT}/checkpoints/ppo_rag_cache"

# Actions: all combinations
TOP_KS = (1, 2, 4, 8)  # paragraphs that the generator reads
TEMPERATURES = (0.0, 0.7)  # 0: greedy
RERANKS = (0, 1)  # 1: the reranker sorts the RERANK_DEPTH best before the first top_k are taken
DRAWS = 1  # answers sampled for each action with a temperature above 0

# Reward
EM_WEIGHT = 1.0
F1_WEIGHT = 0.5
ROUGE_WEIGHT = 0.0
COST_WEIGHT = 0.05
COST = "read"  # read: tokens / COST_TOKENS + reranked pairs / COST_PAIRS | seconds: of each question alone
COST_TOKENS = 100.0  # tokens, read or written by the generator, that cost 1
COST_PAIRS = 4.0  # question-paragraph pairs, read by the reranker, that cost 1
REWARD_CLIP = 100.0  # rewards are clipped to the range from -REWARD_CLIP to REWARD_CLIP
REWARD_TIMEOUT: float | None = 600.0  # seconds that scoring the whole table may take; None: no limit

# Baselines
FIXED_ACTION = (4, 0.7, 0)  # top_k, temperature, rerank of the baseline "fixed"
BASELINE_ONLY = False  # True: only the table and the baselines, no training

# Optimisation
LEARNING_RATE = 3e-4
MAX_GRAD_NORM = 0.5  # > 0
WEIGHT_DECAY = 0.0
USE_LR_SCHEDULER = False
LR_SCHEDULER_TYPE = "linear"  # linear | cosine (both to 0) | plateau (halves)
PLATEAU_PATIENCE = 5  # evaluations without a better reward before plateau halves
WARMUP_STEPS = 0
HIDDEN_SIZE = 64  # units in each of the two layers

# Algorithm
N_STEPS = 256  # episodes per update; each has one step
BATCH_SIZE = 64  # episodes per optimizer step
GROUP_EPOCHS = 4  # passes over the episodes per update
CLIP_RANGE = 0.2  # > 0
VALUE_CLIP_RANGE = 0.0  # 0: values are not clipped
VALUE_LOSS_COEF = 0.5
ENTROPY_COEF = 0.01
WHITEN_ADVANTAGES = True
MAX_STEPS = 150  # updates

# Bookkeeping
SAVE_EVERY_N_STEPS = 50  # 0: only at the end
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 10  # 0: only before the first and after the last step
EARLY_STOPPING_PATIENCE = 0  # evaluations without a better reward before the run ends; 0: never ends
EARLY_STOPPING_THRESHOLD = 0.0  # a gain above this resets patience; best/ keeps the highest reward
LOG_SAMPLES: int | None = None  # episodes per update written to samples.jsonl; None: all
RESUME = "ask"  # ask (yes without a terminal) | yes | no | path of a checkpoint or a run
OUTPUT_DIR = f"{ROOT}/checkpoints/ppo_rag"
SEED = 1
USE_WANDB = False
WANDB_PROJECT = "hackable-rlhf"

_VALID_RANGES = {  # least and greatest value of each number, or the words that a constant takes
    "SAMPLE VALIDATION_QUESTIONS TEST_QUESTIONS RERANK_DEPTH MAX_PROMPT_TOKENS MAX_NEW_TOKENS": (1, 1e12),
    "QUESTIONS_AT_ONCE DRAWS HIDDEN_SIZE N_STEPS BATCH_SIZE GROUP_EPOCHS MAX_STEPS": (1, 1e12),
    "PLATEAU_PATIENCE KEEP_LAST_N_CHECKPOINTS": (1, 1e12),
    "WARMUP_STEPS SAVE_EVERY_N_STEPS EVAL_EVERY_N_STEPS EARLY_STOPPING_PATIENCE LOG_SAMPLES SEED": (0, 2**62),
    "SPLIT_SEED TITLE_WEIGHT": (0, 2**62),
    "LEARNING_RATE WEIGHT_DECAY VALUE_LOSS_COEF VALUE_CLIP_RANGE EARLY_STOPPING_THRESHOLD": (0, 1e6),
    "COST_TOKENS COST_PAIRS REWARD_CLIP CLIP_RANGE MAX_GRAD_NORM REWARD_TIMEOUT": (1e-12, 1e12),
    "STAGE": ["train", "evaluate"],
    "DTYPE": ["float32", "bfloat16"],
    "COST": ["read", "seconds"],
    "LR_SCHEDULER_TYPE": ["linear", "cosine", "plateau"],
}

_RENAMED = {}  # old names of constants, accepted as arguments
_INSTEAD_HERE = {  # constants of other trainers: what this file has instead
    "ACTOR_MODEL": "GENERATOR",
    "TRAIN_DATASETS": "DATASET",
    "NUM_EPOCHS": "MAX_STEPS",
    "MAX_TRAIN_PROMPTS": "SAMPLE",
    "REWARD_FUNCTIONS": "EM_WEIGHT, F1_WEIGHT, ROUGE_WEIGHT and COST_WEIGHT",
}
_MAY_CHANGE = "RESUME OUTPUT_DIR STAGE EVALUATE_POLICY EVAL_DATASET".split()  # when resuming
# When one of these has changed, the scores of a resumed run do not compare with the earlier ones. Add a
# constant of yours that changes how responses are sampled or scored
_CHANGE_SCORES = """
    DATASET SAMPLE VALIDATION_QUESTIONS TEST_QUESTIONS SPLIT_SEED GENERATOR RERANKER PROMPT
    PARAGRAPH MAX_PROMPT_TOKENS MAX_NEW_TOKENS EM_WEIGHT F1_WEIGHT ROUGE_WEIGHT COST_WEIGHT COST
    COST_TOKENS COST_PAIRS REWARD_CLIP
    TITLE_WEIGHT RERANK_DEPTH CHAT_TEMPLATE DTYPE TOP_KS TEMPERATURES RERANKS DRAWS
""".split()

# ================================================================ the maths of PPO, one step an episode


def whiten(x):
    """Returns x scaled to mean 0 and variance 1, (episodes,); equal numbers become zeros."""
    if (x == x[0]).all():  # their float32 mean is often another number, which would be scaled up
        return torch.zeros_like(x)
    return (x - x.mean()) * torch.rsqrt(x.var(unbiased=False) + 1e-8)


def policy_loss(logprobs, old_logprobs, advantages, clip_range):
    """Returns the clipped surrogate of each episode, (episodes,). Source: arXiv 1707.06347, equation 7."""
    ratio = (logprobs - old_logprobs).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages)


def value_loss(values, old_values, returns, clip_range):
    """Returns half the squared error of each episode, (episodes,), clipped around the rollout's value if
    clip_range > 0."""
    clipped = values
    if clip_range > 0:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)


# ================================================================ what the policy sees and does

_KEYWORDS = "who what when where which how of or and".split()  # a choice has "or", a chain often "of"
_AUXILIARIES = "is are was were do does did has have had can could".split()  # they begin a yes-no question


def words_of(text):
    """Returns the lower-case words, without punctuation."""
    return re.sub(r"[\W_]+", " ", text).lower().split()


def paragraph_text(paragraph):
    return f"{paragraph['title']}: {paragraph['text']}"


def fraction_found(items, collection):
    """Returns the fraction of the items that the collection contains; 0 if there are no items."""
    return sum(map(collection.__contains__, items)) / max(1, len(items))


def observe(question, scores, paragraphs, vocabulary):
    """Returns the observation of a question, {name: number}: of its words, and of the paragraphs [{"title",
    "text"}] that BM25 finds with these scores, best first. It uses no answer. The cost leaves it out."""
    words = words_of(question)
    names = []  # capitalised words after the first
    for word in question.replace("?", " ").split()[1:]:
        if word[:1].isupper():
            names += words_of(word)
    s = np.zeros(20)  # scores of the 20 best; 0 where there are fewer
    s[: len(scores)] = scores[:20]
    best_score = max(s[0], 1e-9)
    entries = {
        "words": len(words),
        "capitalised": len(names),
        "unknown": 1 - fraction_found(words, vocabulary),  # fraction of the words that no paragraph has
        "commas": question.count(","),
    }
    for keyword in _KEYWORDS:
        entries[f"has_{keyword}"] = keyword in words
    entries["yes_no"] = bool(words) and words[0] in _AUXILIARIES
    entries["s1"] = s[0]  # s1 is the highest score
    entries["s1_per_word"] = s[0] / max(1, len(words))
    for n in (2, 3, 4, 8, 20):
        entries[f"s{n}/s1"] = s[n - 1] / best_score
    entries["gap"] = (s[0] - s[1]) / best_score
    entries["spread"] = s.std() / max(s.mean(), 1e-9)
    entries["near"] = (s >= 0.9 * best_score).sum()  # paragraphs with at least 0.9 of the highest score
    for name, question_words in (("overlap", words), ("names", names)):
        for n in (1, 2, 4):  # fraction of these words that stand in the best n paragraphs
            texts = " ".join(map(paragraph_text, paragraphs[:n]))
            entries[f"{name}{n}"] = fraction_found(question_words, set(words_of(texts)))
    entries |= {"title1": 0.0, "title2": 0.0}
    for n, paragraph in enumerate(paragraphs[:2], 1):  # fraction of the title's words that the question has
        entries[f"title{n}"] = fraction_found(words_of(paragraph["title"]), words)
    return entries


_OBSERVATION = tuple(observe("", [], [], set()))  # names of the entries: observe() accepts no paragraphs too
_ACTION = ("top_k", "temperature", "rerank")


def all_actions():
    """Returns [(top_k, temperature, rerank)], all combinations in order."""
    return list(itertools.product(TOP_KS, TEMPERATURES, RERANKS))


class Policy(PreTrainedModel):
    """Actor and critic: two shared layers, then one logit per action, and a value. config holds inputs,
    hidden_size and the actions; Policy.from_pretrained() loads a saved one."""

    config_class = PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("mean", torch.zeros(config.inputs))  # of the training questions' observations
        self.register_buffer("scale", torch.ones(config.inputs))
        self.first = torch.nn.Linear(config.inputs, config.hidden_size)
        self.second = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.actor = torch.nn.Linear(config.hidden_size, len(config.actions))
        self.critic = torch.nn.Linear(config.hidden_size, 1)
        self.post_init()

    def _init_weights(self, module):
        """Orthogonal; the actor's are small, so that all actions begin about equally likely (2006.05990)."""
        if isinstance(module, torch.nn.Linear):
            gain = {self.actor: 0.01, self.critic: 1.0}.get(module, math.sqrt(2))
            torch.nn.init.orthogonal_(module.weight, gain)
            torch.nn.init.zeros_(module.bias)

    def forward(self, observations):
        """Returns log-probabilities (episodes, actions) and values (episodes,)."""
        inputs = ((observations - self.mean) / self.scale).clamp(-5, 5)
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        return self.actor(hidden).log_softmax(-1), self.critic(hidden).squeeze(-1)


# ================================================================ the trainer


class RAGTrainer:
    """Questions, the table of answers, the policy and the algorithm; self.run writes the files.
    resume_from_checkpoint overrides the constant RESUME: a path, "ask", "yes" or "no"."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        check_choices()
        self.device = find_device()
        if BASELINE_ONLY:
            resume_from_checkpoint = "no"
        self.run = Run("ppo_rag", resume_from_checkpoint, self.device)
        self.run.old_files.append("rag_*.png")
        self.reward_parts = {}  # what compute_rewards() leaves to be logged, {name: (rows,)}
        self.run.title = f"PPO over retrieval, {Path(data_to_read()['path']).name}, seed {SEED}"
        names = "reward em f1 cost entropy policy_loss value_loss explained_variance approx_kl clip_fraction"
        self.run.panels = [(name, [name]) for name in (*names.split(), *_ACTION)]
        self.policy = self.load_policy()
        questions, corpus = load_questions(self.run.log)
        if STAGE == "evaluate":
            questions = questions_to_evaluate(questions, self.policy)
        self.qa = QASystem(corpus, self.device)
        self.table = fill_table(questions, self.qa, self.run.log)
        self.score()
        if self.policy is None:
            self.policy = self.new_policy()
        weights = self.policy.parameters()
        self.optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        # What a checkpoint keeps beside weights, optimizer and generators. order: this epoch's permutation;
        # cursor: the place in it
        self.state = SimpleNamespace(epoch=0, order=None, cursor=0, prompts=len(self.table.splits["train"]))
        self.run.register(self.state, {"policy": self.policy}, {"policy": self.optimizer}, tokenizer=None)
        self.best = self.load_best(math.inf)  # the policy of best/, from a finished or a resumed run
        self.run.total_steps = MAX_STEPS

    def load_policy(self):
        """Returns the policy of the checkpoint, or EVALUATE_POLICY with STAGE = "evaluate"; else None."""
        if STAGE == "evaluate":
            folder = policy_to_evaluate()
            policy = load_pretrained(Policy, folder, "EVALUATE_POLICY")
            what_to_do = "take those"
        elif self.run.checkpoint:
            folder = self.run.checkpoint
            policy = load_pretrained(Policy, str(folder / "policy"), "RESUME")
            what_to_do = "take those, or RESUME=no"
        else:
            return None
        actions = list(map(list, all_actions()))  # as JSON has them
        if (policy.config.inputs, policy.config.actions) != (len(_OBSERVATION), actions):
            names = ("TOP_KS", "TEMPERATURES", "RERANKS")
            trained = f"{policy.config.inputs} observed numbers and actions"
            for name, values in zip(names, zip(*policy.config.actions)):
                trained += f" {name} = {tuple(dict.fromkeys(values))}"
            raise UserError(f"{folder} was trained with {trained}: {what_to_do}")
        return policy

    def new_policy(self):
        """Returns a new policy that scales by the training observations. Its config keeps a digest of the
        questions that training and best/ see."""
        sizes = {"inputs": len(_OBSERVATION), "hidden_size": HIDDEN_SIZE}
        learns_from = questions_digest(self.table.questions)
        actions = list(map(list, self.table.actions))
        policy = Policy(PretrainedConfig(**sizes, actions=actions, learns_from=learns_from))
        observations = self.table.observations[self.table.splits["train"]]
        policy.mean.copy_(observations.mean(0))
        policy.scale.copy_(observations.std(0, unbiased=False) + 1e-3)
        return policy

    def load_best(self, last_step):
        """Returns the policy of best/ beside the checkpoint; None if there is none up to last_step."""
        if not self.run.checkpoint:
            return None
        folder = self.run.checkpoint.parent / "best"
        if not folder.is_dir() or json.loads((folder / "metrics.json").read_text())["step"] > last_step:
            return None
        return load_pretrained(Policy, str(folder / "policy"), "RESUME")

    def train(self):
        """Trains the policy, then tests it. Returns the metrics of the last evaluation; with BASELINE_ONLY it
        returns the baselines and does no more."""
        if BASELINE_ONLY:
            self.baselines()
            return self.figures
        run = self.run
        updates = f"{MAX_STEPS} updates of {N_STEPS} episodes"
        summary = f"{self.state.prompts} training questions, {len(self.table.actions)} actions, {updates}"
        with run.session(summary):  # lock, logs, signals; saves at the end
            self.best = self.load_best(run.step)
            self.baselines()
            if run.needs_first_evaluation():
                run.log_evaluation(self.evaluate())
            while run.next_step():
                batch = self.rollout()
                self.compute_advantages(batch)
                metrics = self.update(batch)
                self.record(batch, metrics)
                if run.is_due(EVAL_EVERY_N_STEPS) or run.is_last_step():
                    run.log_evaluation(self.evaluate())
                if run.is_due(SAVE_EVERY_N_STEPS):
                    run.save()
            draw_learning(run.folder, run.title, self.table, self.figures)
            best = run.folder / "best/policy"
            if best.is_dir():  # it is missing where a finished run goes on in another folder
                self.best = load_pretrained(Policy, str(best), "OUTPUT_DIR")
            if not run.stop_signal:
                self.test()
        return run.evaluation

    @torch.no_grad()
    def rollout(self):
        """Samples an action for each of the next N_STEPS training questions and looks up its reward."""
        with self.run.timed("rollout"):
            rows = []
            while len(rows) < N_STEPS:  # on into the next epoch
                rows += next_rows(self.table.splits["train"], self.state, N_STEPS - len(rows))
            rows = torch.tensor(rows)
            observations = self.table.observations[rows]
            logprobs, values = self.policy(observations)
            actions = torch.multinomial(logprobs.exp(), 1)[:, 0]
            draws = torch.randint(DRAWS, (N_STEPS,))
            metrics = {name: x[rows, actions, draws] for name, x in self.table.metrics.items()}
            return SimpleNamespace(  # all (episodes,) but the observations
                rows=rows,
                observations=observations,
                actions=actions,
                draws=draws,
                metrics=metrics,
                rewards=metrics["reward"],
                values=values,
                logprobs=logprobs.gather(1, actions[:, None])[:, 0],
            )

    def score(self):
        """Fills table.rewards, table.shown and table.metrics, {name: (questions, actions, draws)}."""
        table = self.table
        rows = np.repeat(table.questions, len(table.actions) * DRAWS)
        prompts = list(map(itemgetter("question"), rows))
        answers = list(map(itemgetter("answer"), rows))
        responses = list(itertools.chain(*itertools.chain(*table.responses)))
        self.reward_parts = {}
        with time_limit():
            scores = call_reward("compute_rewards", self.compute_rewards, prompts, responses, answers)
        shape = table.seconds.shape
        others = "epoch policy_loss value_loss entropy approx_kl clip_fraction max_ratio_deviation grad_norm "
        others += "first_ratio_deviation learning_rate advantage_mean explained_variance timesteps "
        others = (others + "wall_seconds id question answer response").split()
        reward_parts = {}
        for name, values in self.reward_parts.items():
            if name in ("reward", "cost", "seconds", *_ACTION) or name in others:
                taken = f"the name {name!r} belongs to a metric of the trainer"
                raise UserError(f"compute_rewards: reward_parts: {taken}: give the part another name")
            values = check_scores(f"reward_parts[{name!r}]", values, len(responses))
            reward_parts[name] = values.view(shape)
            if name == "em" and not values.any():
                example = f"{responses[0][:60]!r} where {answers[0]!r} is right"
                self.run.log(f"WARNING: em is 0 for all {len(values)} answers, such as {example}: see PROMPT")
        cost = table.seconds if COST == "seconds" else table.read
        scores = scores.view(shape) - COST_WEIGHT * cost
        table.rewards = scores.clamp(-REWARD_CLIP, REWARD_CLIP)
        table.shown = ["reward", *reward_parts, "cost"]  # in the lines on the terminal
        table.metrics = {"reward": table.rewards, **reward_parts, "cost": cost, "seconds": table.seconds}
        for name, values in zip(_ACTION, torch.tensor(table.actions, dtype=torch.float).T):
            table.metrics[name] = values[:, None].expand(shape)

    def compute_rewards(self, questions, responses, answers):
        """Returns what each answer is worth before its cost, (rows,); edit or override it freely.
        self.reward_parts is what is logged."""
        weighted = {"em": (EM_WEIGHT, rewards.em), "f1": (F1_WEIGHT, rewards.f1)}
        if ROUGE_WEIGHT:
            weighted["rouge_l"] = (ROUGE_WEIGHT, rewards.rouge_l)
        total = torch.zeros(len(responses))
        for name, (weight, function) in weighted.items():
            self.reward_parts[name] = call_reward(name, function, questions, responses, answers)
            total += weight * self.reward_parts[name]
        return total

    def compute_advantages(self, batch):
        """A = r - V, whitened. An episode has one step, so its return is its reward."""
        batch.advantages = batch.rewards - batch.values
        if WHITEN_ADVANTAGES:
            batch.advantages = whiten(batch.advantages)

    def update(self, batch):
        """Passes GROUP_EPOCHS times over the episodes, BATCH_SIZE per step. Returns their metrics."""
        run = self.run
        steps_done = max(0, run.step - 1)  # run.step is 0 before the first step
        schedule = LR_SCHEDULER_TYPE if USE_LR_SCHEDULER else None
        scale = learning_rate_scale(steps_done, run.total_steps, WARMUP_STEPS, schedule, run.halvings)
        self.optimizer.param_groups[0]["lr"] = LEARNING_RATE * scale
        step_metrics = defaultdict(list)  # {name: one value per optimizer step}
        with run.timed("update"):
            for _ in range(GROUP_EPOCHS):
                for chunk in torch.randperm(N_STEPS).split(BATCH_SIZE):
                    for name, value in self.optimizer_step(batch, chunk).items():
                        step_metrics[name].append(value)
        metrics = {name: sum(values) / len(values) for name, values in step_metrics.items()}
        metrics["max_ratio_deviation"] = max(step_metrics["max_ratio_deviation"])
        metrics["first_ratio_deviation"] = step_metrics["max_ratio_deviation"][0]
        metrics["learning_rate"] = LEARNING_RATE * scale
        return metrics

    def optimizer_step(self, batch, chunk):
        """Makes one step with the episodes of the chunk (indices). Returns its metrics."""
        old_logprobs = batch.logprobs[chunk]
        advantages = batch.advantages[chunk]
        all_logprobs, values = self.policy(batch.observations[chunk])  # of all actions
        logprobs = all_logprobs.gather(1, batch.actions[chunk, None])[:, 0]
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)  # (episodes,)
        policy_losses = policy_loss(logprobs, old_logprobs, advantages, CLIP_RANGE)
        value_losses = value_loss(values, batch.values[chunk], batch.rewards[chunk], VALUE_CLIP_RANGE)
        loss = (policy_losses + VALUE_LOSS_COEF * value_losses - ENTROPY_COEF * entropy).mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_GRAD_NORM)
        finite = math.isfinite(loss.item() + norm.item())
        if finite:
            self.optimizer.step()
        ids = [self.table.questions[row]["id"] for row in batch.rows[chunk].tolist()]
        self.run.note_optimizer_step(finite, ids)
        log_ratio = logprobs.detach() - old_logprobs
        ratio = log_ratio.exp()
        clipped = (ratio - 1) * advantages.sign() > CLIP_RANGE
        return {
            "policy_loss": policy_losses.mean().item(),
            "value_loss": value_losses.mean().item(),
            "entropy": entropy.mean().item(),
            "approx_kl": (ratio - 1 - log_ratio).mean().item(),
            "clip_fraction": clipped.float().mean().item(),
            "max_ratio_deviation": (ratio - 1).abs().max().item(),
            "grad_norm": norm.item(),
        }

    # ------------------------------------------------------------ evaluation and what is logged

    @torch.no_grad()
    def choose(self, rows, generator=None, policy=None):
        """Returns the likeliest action for each question, (rows,); with a generator, a sampled one."""
        logprobs, _ = (policy or self.policy)(self.table.observations[rows])
        if generator is None:
            return logprobs.argmax(1)
        return torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]

    def measure(self, rows, actions):
        """Returns the metrics of these actions (rows,), means over questions and draws."""
        return {name: x[rows, actions].double().mean().item() for name, x in self.table.metrics.items()}

    def evaluate(self):
        """Returns metrics of the greedy policy on the validation questions, and sampled_reward, that of
        sampled actions, which have their own random stream. Override it to add yours."""
        with self.run.timed("evaluate"):
            rows = self.table.splits["validation"]
            sampled = self.choose(rows, torch.Generator().manual_seed(SEED + 1))
            sampled_reward = self.measure(rows, sampled)["reward"]
            return {**self.measure(rows, self.choose(rows)), "sampled_reward": sampled_reward}

    def record(self, batch, metrics):
        """Logs the step's metrics and LOG_SAMPLES of its episodes, and prints its line."""
        errors = batch.rewards - batch.values
        unexplained = errors.var() / (batch.rewards.var() + 1e-8)
        means = {name: values.double().mean().item() for name, values in batch.metrics.items()}
        metrics = {
            "epoch": self.state.epoch,
            **metrics,
            **means,
            "advantage_mean": errors.mean().item(),
            "explained_variance": (1 - unexplained).item(),
            "timesteps": self.run.step * N_STEPS,
            "wall_seconds": time.perf_counter() - self.run.clock[0],  # since this start of the run
        }
        samples = []
        scores = {name: values.tolist() for name, values in batch.metrics.items()}
        for n, row in enumerate(batch.rows[:LOG_SAMPLES].tolist()):
            question = self.table.questions[row]
            sample = {"id": question["id"], "question": question["question"], "answer": question["answer"]}
            sample["response"] = self.table.responses[row][batch.actions[n]][batch.draws[n]]
            for name, values in scores.items():
                sample[name] = round(values[n], 6)
            samples.append(sample)
        short_names = {"reward": "R", "em": "EM", "f1": "F1"}
        line = ""
        for name in self.table.shown:
            line += f"{short_names.get(name, name)}:{metrics[name]:.3f} "
        line += "PL:{policy_loss:.4f} VL:{value_loss:.4f} E:{entropy:.3f}".format(**metrics)
        self.run.log_step(metrics, N_STEPS, samples, line, unit="episodes")

    def baselines(self):
        """Computes, prints and writes what needs no training, on every split: see baseline_figures()."""
        self.figures = baseline_figures(self.table)
        Path(OUTPUT_DIR).mkdir(parents=True, exist_ok=True)
        for name, figures in self.figures.items():
            write_json(Path(OUTPUT_DIR) / f"eval_baseline_{name}.json", figures)
        names = ["fixed", "random", "best_fixed", "best_by_type", "tree", "oracle_greedy", "oracle"]
        for text in table_lines(self.table, self.figures, names):
            self.run.log(text)

    def test(self):
        """Tests the policy of best/ and shows three answers. self.policy, which is saved next, stays."""
        rows = self.table.splits["test"]
        actions = self.choose(rows, policy=self.best)
        for row, action in zip(rows[:3], actions.tolist()):
            question = self.table.questions[row]
            chosen = "top_k {}, temperature {}, rerank {}".format(*self.table.actions[action])
            response = self.table.responses[row][action][0]
            self.run.log(f"{question['question']}  [{chosen}]  {response!r}, right: {question['answer']!r}")
        figures = {"policy": self.measure(rows, actions)}
        figures |= test_figures(self.table, rows, actions, self.figures)
        figures["actions"] = action_shares(self.table, rows, actions)
        write_json(self.run.folder / "eval_test.json", figures)
        draw_actions(self.run.folder, self.run.title, figures["actions"])
        for text in test_lines(self.table, figures):
            self.run.log(text)

    def answer(self, question):
        """Returns (answer, (top_k, temperature, rerank)) for the text of a question, retrieved and answered
        now. The policy of best/ chooses, or the current one if there is no best/ yet."""
        observation = self.qa.observe(question)
        with torch.no_grad():
            logprobs, _ = (self.best or self.policy)(observation[None])
        action = self.table.actions[int(logprobs.argmax())]
        return self.qa.answer(question, action), action


# ================ machinery: the same in all trainers that have it
# Edit it freely in a copy of your own. In the repository tools/copies.py keeps definitions of one name equal.

# ---------------------------------------------------------------- loading models


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


def cell_texts(value, where):
    """Returns a list of texts; a single one becomes a list."""
    if not isinstance(value, list) or not value:
        value = [value]
    return [cell_text(item, where) for item in value]


def next_rows(rows, state, count):
    """Returns the next `count` rows, fewer at the end of an epoch. state.order is this epoch's
    permutation."""
    if state.cursor == 0:
        state.epoch += 1
        state.order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED + state.epoch))
    chosen = state.order[state.cursor : state.cursor + count].tolist()
    state.cursor = (state.cursor + len(chosen)) % len(rows)
    return [rows[i] for i in chosen]


# ---------------------------------------------------------------- rewards


@contextmanager
def time_limit():
    """Ends the program, and shows where it hangs, if the block takes longer than REWARD_TIMEOUT seconds."""
    if REWARD_TIMEOUT and sys.__stderr__:  # sys.stderr may be a notebook's, without a file
        faulthandler.dump_traceback_later(REWARD_TIMEOUT, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def call_reward(name, function, prompts, responses, answers, columns=None):
    """Calls a reward function and returns its values, (rows,). Its fourth and later parameters get the data
    columns of their names."""
    columns = columns or {}
    signature = inspect.signature(function)
    first = [*signature.parameters][:3]  # these are passed by position
    takes_all = any(p.kind == p.VAR_KEYWORD for p in signature.parameters.values())
    taken = {*first, "self"}  # a column named self would be a method's first argument
    named = {k: v for k, v in columns.items() if k not in taken and (takes_all or k in signature.parameters)}
    try:
        signature.bind(prompts, responses, answers, **named)
    except TypeError as error:
        call = "it is called with prompts, responses, answers and, by their names, columns of the data"
        raise UserError(f"{name}: {error}; {call}; the columns of these rows are {sorted(columns)}") from None
    try:
        values = function(prompts, responses, answers, **named)
        if isinstance(values, Iterator):  # a generator
            values = list(values)
    except Exception as error:
        if isinstance(error, ValueError) and getattr(function, "__module__", None) == rewards.__name__:
            raise UserError(str(error)) from None  # it says what its data must have
        if not isinstance(error, UserError) and not hasattr(error, "__notes__"):  # not noted yet
            error.add_note(f"(raised by the reward function {name})")
        raise
    return check_scores(name, values, len(responses))


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


# differs: this trainer runs as one process
def join_processes():
    if world_size() > 1:
        raise UserError("it runs as one process: start it with python, not torchrun")


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


# differs: entropy and KL are of choices, not of tokens
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
            label += " (nats)"
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

    # differs: models are never sharded
    def save(self):
        """Writes step_N/, removes old checkpoints and draws the plots. All processes must call it."""
        # Set even if nothing is written: open_files() sees from it that a second train() continues this run
        folder = self.checkpoint = self.folder / f"step_{self.step}"
        # session() saves the last step, which may be saved already, but perhaps before the run was stopped
        if broadcast_from_rank0(folder.exists) and not self.is_stopped:
            return
        weights = {name: model.state_dict() for name, model in self.models.items()}
        optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
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

    # differs: there is no adapter to merge
    def save_best(self, metrics):
        policy = self.models["policy"]
        weights = policy.state_dict()
        write_atomically(self.folder / "best", partial(self.write_best, metrics, policy, weights))

    def write_best(self, metrics, policy, weights, folder):
        self.save_model(policy, folder / "policy", weights)
        (folder / "metrics.json").write_text(json.dumps({"step": self.step, **metrics}, indent=1))

    def save_model(self, model, folder, weights=None):
        model.save_pretrained(folder, state_dict=weights)
        if self.tokenizer:
            self.tokenizer.save_pretrained(folder)

    # differs: optimizers are never sharded
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
                groups = optimizer.state_dict()["param_groups"]  # changed constants take effect
                optimizer.load_state_dict({**saved["optimizers"][name], "param_groups": groups})
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


def run_stage(trainer_class):
    """Trains or, with STAGE = "evaluate", scores a policy. Returns the exit code."""
    if STAGE == "evaluate":
        check_constants()
        evaluate_policy(trainer_class)
        return 0
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
        hint = "lower BATCH_SIZE or MAX_NEW_TOKENS or QUESTIONS_AT_ONCE"
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


# differs: its panels are no constant
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
    for keys, allowed in _VALID_RANGES.items():
        for key in keys.split():
            value = globals()[key]
            if value is None:
                continue
            if isinstance(allowed, list) and value not in allowed:
                raise UserError(f"{key} = {value!r} is unknown: it takes {' or '.join(allowed)}")
            if isinstance(allowed, tuple) and not allowed[0] <= value <= allowed[1]:
                raise UserError(f"{key} = {value} is out of range: it takes {allowed[0]:g} to {allowed[1]:g}")


# ---------------------------------------------------------------- the QA system: replace any part by your own


class Retriever:
    """BM25 over titles, TITLE_WEIGHT times, and texts, by the library bm25s."""

    def __init__(self, corpus):
        import bm25s

        self.tokenize = partial(bm25s.tokenize, return_ids=False, show_progress=False)
        self.size = len(corpus)
        words = self.tokenize([" ".join([p["title"]] * TITLE_WEIGHT + [p["text"]]) for p in corpus])
        if not any(words):
            fault = "no paragraph has a word of two letters or more, other than stop words"
            raise UserError(f"{data_constant()}: {fault}")
        self.index = bm25s.BM25()
        self.index.index(words, show_progress=False)

    def search(self, question, count):
        """Returns (ids, scores) of the `count` best paragraphs, best first; of equal ones the earlier. If a
        question has no word that BM25 counts, all paragraphs score 0."""
        (words,) = self.tokenize([question])
        scores = self.index.get_scores(words) if words else np.zeros(self.size, dtype=np.float32)
        ids = np.argsort(-scores, kind="stable")[:count]
        return ids.tolist(), scores[ids]


class Reranker:
    """A cross-encoder: one score for a question and a paragraph read together."""

    def __init__(self, name, device):
        self.tokenizer = load_pretrained(transformers.AutoTokenizer, name, "RERANKER")
        auto_class = transformers.AutoModelForSequenceClassification
        model = load_pretrained(auto_class, name, "RERANKER", dtype=DTYPE)
        self.model = model.to(device).eval()
        config = self.model.config
        if config.num_labels != 1:
            raise UserError(f"RERANKER = {name!r} has {config.num_labels} labels: it takes one of one label")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        max_positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 512
        self.limit = min(512, max_positions, self.tokenizer.model_max_length)

    @torch.no_grad()
    def scores(self, question, texts):
        """Returns a score for each paragraph's text, (texts,)."""
        limit = {"truncation": "longest_first", "max_length": self.limit}
        questions = [question] * len(texts)
        inputs = self.tokenizer(questions, texts, padding=True, return_tensors="pt", **limit)
        return self.model(**inputs.to(self.model.device)).logits[:, 0].float().cpu()


class Trigrams:
    """A reranker without a model: it compares the character trigrams of question and paragraph, weighted by
    rarity in the corpus, and so finds old spellings and inflected words, which BM25's whole words miss."""

    def __init__(self, corpus):
        from sklearn.feature_extraction.text import TfidfVectorizer

        def plain(text):
            return " ".join(words_of(text))

        # char_wb: of each word with a blank at both ends
        self.grams = TfidfVectorizer(preprocessor=plain, analyzer="char_wb", ngram_range=(3, 3), binary=True)
        self.grams.fit(map(paragraph_text, corpus))

    def scores(self, question, texts):
        """Returns the question's cosine with each paragraph's text, (texts,)."""
        question_vector = self.grams.transform([question])
        return torch.from_numpy((self.grams.transform(texts) @ question_vector.T).toarray()[:, 0])


class Generator:
    """Short answers by any seq2seq or causal model of transformers."""

    def __init__(self, name, device):
        config = load_pretrained(transformers.AutoConfig, name, "GENERATOR")
        self.is_encoder_decoder = config.is_encoder_decoder  # the prompt stands in the encoder
        auto_class = transformers.AutoModelForCausalLM
        if self.is_encoder_decoder:
            auto_class = transformers.AutoModelForSeq2SeqLM
        self.tokenizer = load_pretrained(transformers.AutoTokenizer, name, "GENERATOR", padding_side="left")
        self.model = load_pretrained(auto_class, name, "GENERATOR", dtype=DTYPE).to(device).eval()
        if self.tokenizer.eos_token_id is None:
            raise UserError(f"GENERATOR = {name!r} has a tokenizer without EOS: no answer would end")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        loaded = self.model.generation_config
        no_eos = loaded.eos_token_id is None
        # The model's own top-k, top-p and penalties stay out: a temperature means what it says
        self.model.generation_config = transformers.GenerationConfig(
            eos_token_id=self.tokenizer.eos_token_id if no_eos else loaded.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            max_new_tokens=MAX_NEW_TOKENS,
            decoder_start_token_id=loaded.decoder_start_token_id,
            bos_token_id=loaded.bos_token_id,
        )
        max_positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 10**9
        if not self.is_encoder_decoder:
            max_positions = max(0, max_positions - MAX_NEW_TOKENS)
        self.limit = min(MAX_PROMPT_TOKENS, max_positions, self.tokenizer.model_max_length)

    def is_chat(self):
        """Whether prompts go through the chat template, which writes special tokens such as BOS itself."""
        return bool(CHAT_TEMPLATE and self.tokenizer.chat_template)

    def prompt(self, question, paragraphs):
        """Returns (prompt, number of the paragraphs in it): as many as fit, in order."""
        contexts = [PARAGRAPH.format(n=n, **paragraph) for n, paragraph in enumerate(paragraphs, 1)]
        for count in range(len(paragraphs), -1, -1):
            prompt = PROMPT.format(contexts="\n".join(contexts[:count]), question=question)
            if self.is_chat():
                chat = [{"role": "user", "content": prompt}]
                prompt = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            length = len(self.tokenizer(prompt, add_special_tokens=not self.is_chat())["input_ids"])
            if length <= self.limit:
                return prompt, count
        takes = f"takes {length} tokens in PROMPT without any paragraph"
        limit = f"GENERATOR and MAX_PROMPT_TOKENS = {MAX_PROMPT_TOKENS} allow {self.limit}"
        raise UserError(f"the question {question[:80]!r} {takes}, {limit}")

    @torch.no_grad()
    def answers(self, prompts, temperature, seed):
        """Returns [(answer, tokens read and written)]; above temperature 0 it samples, from the seed."""
        device = self.model.device
        options = {"add_special_tokens": not self.is_chat(), "return_token_type_ids": False}
        inputs = self.tokenizer(prompts, padding=True, return_tensors="pt", **options).to(device)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {}
        gpus = [device] if device.type == "cuda" else []  # without a list fork_rng() takes all GPUs
        with torch.random.fork_rng(gpus):
            torch.manual_seed(seed)
            tokens = self.model.generate(**inputs, **sampling)
        start = 1 if self.is_encoder_decoder else inputs["input_ids"].shape[1]
        written = tokens[:, start:]  # (prompts, new tokens)
        lengths = (written != self.tokenizer.pad_token_id).sum(1) + inputs["attention_mask"].sum(1)
        texts = self.tokenizer.batch_decode(written, skip_special_tokens=True)
        return [(text.strip().split("\n")[0].strip(), n) for text, n in zip(texts, lengths.tolist())]


class QASystem:
    """Retriever, reranker and generator over one corpus [{"title", "text"}]."""

    def __init__(self, corpus, device):
        self.corpus = corpus
        self.retriever = Retriever(corpus)
        if 1 in RERANKS:
            self.reranker = Trigrams(corpus) if RERANKER == "lexical" else Reranker(RERANKER, device)
        self.generator = Generator(GENERATOR, device)
        self.vocabulary = set(words_of(" ".join(map(paragraph_text, corpus))))

    def observe(self, question):
        """Returns the observation of a question, (len(_OBSERVATION),)."""
        ids, scores = self.retriever.search(question, 20)
        entries = observe(question, scores, [self.corpus[i] for i in ids], self.vocabulary)
        return torch.tensor(list(entries.values()), dtype=torch.float32)

    def ranked(self, question, rerank):
        """Returns ids of the question's paragraphs, best first, as many as the largest action may read."""
        depth = max(TOP_KS)
        if not rerank:
            return self.retriever.search(question, depth)[0]
        ids, _ = self.retriever.search(question, max(depth, RERANK_DEPTH))
        best = ids[:RERANK_DEPTH]
        scores = self.reranker.scores(question, [paragraph_text(self.corpus[i]) for i in best])
        order = scores.argsort(descending=True, stable=True)
        return (torch.tensor(best)[order].tolist() + ids[RERANK_DEPTH:])[:depth]

    def prompt(self, question, ids, top_k):
        """Returns (prompt, number of the first top_k paragraphs in it)."""
        return self.generator.prompt(question, [self.corpus[i] for i in ids[:top_k]])

    def answer(self, question, action):
        """Returns the answer to one question under (top_k, temperature, rerank)."""
        top_k, temperature, rerank = action
        prompt, _ = self.prompt(question, self.ranked(question, rerank), top_k)
        return self.generator.answers([prompt], temperature, SEED)[0][0]


# ---------------------------------------------------------------- questions


# differs: the constants of this trainer
def check_choices():
    """Refuses constants that cannot be used, before anything is read."""
    for key, values, least, number_type, numbers in (
        ("TOP_KS", TOP_KS, 1, int, "whole numbers"),
        ("TEMPERATURES", TEMPERATURES, 0, (int, float), "numbers"),
        ("RERANKS", RERANKS, 0, int, "whole numbers"),
    ):
        valid = {x for x in values if isinstance(x, number_type) and least <= x < math.inf}
        if not valid or len(valid) < len(values):
            raise UserError(f"{key} = {values!r}: it takes different {numbers} from {least}, such as (1,)")
    if WHITEN_ADVANTAGES and N_STEPS == 1:
        raise UserError("N_STEPS = 1: whitening makes one advantage 0: raise it, or WHITEN_ADVANTAGES=False")
    if max(RERANKS) > 1 or (1 in RERANKS and not RERANKER):
        raise UserError(f"RERANKS = {RERANKS}: it takes 0 and, where RERANKER is not None, 1")
    if tuple(FIXED_ACTION) not in all_actions():
        raise UserError(f"FIXED_ACTION = {FIXED_ACTION!r} is none of TOP_KS x TEMPERATURES x RERANKS")
    data = data_to_read()
    if not isinstance(data.get("path"), str) or data.get("type") not in ("folder", "hotpotqa", "hub"):
        takes = "it takes {'path': ..., 'type': 'folder' | 'hotpotqa' | 'hub'}, and for the hub name, split"
        raise UserError(f"{data_constant()} = {data!r}: {takes}")
    for key, pattern, required, optional in (
        ("PROMPT", PROMPT, ["contexts", "question"], []),
        ("PARAGRAPH", PARAGRAPH, ["text"], ["n", "title"]),
    ):
        names = ["a lone brace"]
        with suppress(ValueError):
            _, names, *_ = zip(*string.Formatter().parse(pattern))
        if not {*required} <= {*names} - {None} <= {*required, *optional}:
            takes = "{" + "}, {".join(required + optional) + "}"
            raise UserError(f"{key} = {pattern!r}: it takes {takes}; a brace itself is written twice")


def read_question(record, where):
    """Returns {"id", "question", "answer", "type"} of a file's record; of several answers the best counts."""
    row = {"id": where.split(": ", 1)[-1].rsplit("/", 1)[-1], "type": str(record.get("type") or "")}
    row["question"] = cell_text(look_up(record, "question", where), f"{where}: 'question'")
    answer = look_up(record, "answer", where)
    answers = cell_texts(answer, f"{where}: 'answer'")
    row["answer"] = answers if isinstance(answer, list) else answers[0]
    for key, texts in (("question", [row["question"]]), ("answer", answers)):
        if "" in map(str.strip, texts):
            raise UserError(f"{where}: its {key} is empty; correct or delete the line")
    return row


def from_hotpot(records, where):
    """Returns (questions, {(title, text): paragraph id}) of numbered records in HotpotQA's format, the
    file's or the hub's. Gold paragraphs that are not in a record's own context (fullwiki) do not count."""
    questions = []
    corpus = {}
    for number, record in records:
        line = f"{where} record {number}"
        gold = []
        try:
            context = record["context"]
            if isinstance(context, dict):  # the hub's columns
                context = zip(context["title"], context["sentences"])
            facts = record["supporting_facts"]
            gold_titles = facts["title"] if isinstance(facts, dict) else dict(facts)
            for title, sentences in context:
                if not isinstance(title, str):
                    raise ValueError("a title is no text")
                paragraph = (title, "".join(sentences).strip())
                paragraph_id = corpus.setdefault(paragraph, len(corpus))
                if title in gold_titles:
                    gold.append(paragraph_id)
        except (KeyError, TypeError, ValueError):
            fields = "question, answer, context, supporting_facts"
            raise UserError(f"{line} is not HotpotQA's format ({fields})") from None
        questions.append({**read_question(record, line), "gold_docs": gold})
    return questions, corpus


def folder_records(folder, name):
    """Yields (place, record) of the folder's file `name`.jsonl, .csv or .parquet, or of the texts in
    corpus/."""
    where = f"{data_constant()}: {folder}"
    takes = [f"{name}.jsonl", f"{name}.csv", f"{name}.parquet"]
    if name == "corpus":
        takes.append("corpus/ with .txt or .md files")
    files = [file for file in takes if Path(folder, file.split(" ")[0]).exists()]
    if not files:
        raise UserError(f"{where}: it takes {' or '.join(takes)}")
    if len(files) > 1:
        raise UserError(f"{where}: there are {' and '.join(files)}: keep one")
    file = files[0]
    if file not in takes[:3]:
        yield from text_paragraphs(f"{folder}/corpus")
        return
    where += f"/{file}"
    for number, record in read_records({"path": f"{folder}/{file}", "type": file.split(".")[1]}, where):
        yield f"{where} line {number}", record


def text_paragraphs(folder):
    """Yields (place, {"title", "text"}) of .txt and .md files. Blank lines end a paragraph; its title is the
    file's name, or the last heading that stands alone (# Fines)."""
    for path in sorted(Path(folder).rglob("*")):
        if path.suffix not in (".txt", ".md"):
            continue
        where = f"{data_constant()}: {path}"
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise UserError(f"{where}: cannot be read ({first_line(error)})") from None
        title = path.stem
        for block in re.split(r"\n\s*\n", text.strip()):
            if re.fullmatch(r"#+ .*", block):
                title = block.strip("# ")
            elif block:
                yield where, {"title": title, "text": block}


def from_folder(folder):
    """Returns (questions, {(title, text): paragraph id}) of a folder's corpus and questions."""
    if not Path(folder).is_dir():
        raise UserError(f"{data_constant()}: there is no folder {folder}")
    corpus = {}
    ids_by_title = defaultdict(set)
    for place, record in folder_records(folder, "corpus"):
        title = cell_text(look_up(record, "title", place), f"{place}: 'title'")
        text = cell_text(look_up(record, "text", place), f"{place}: 'text'")
        ids_by_title[title].add(corpus.setdefault((title, text), len(corpus)))
    questions = []
    for place, record in folder_records(folder, "questions"):
        titles = []
        if record.get("gold"):
            titles = cell_texts(record["gold"], f"{place}: 'gold'")
        gold = set()
        for title in titles:
            if title not in ids_by_title:
                raise UserError(f"{place}: its gold paragraph {title!r} is not in the corpus")
            gold |= ids_by_title[title]
        questions.append({**read_question(record, place), "gold_docs": sorted(gold)})
    return questions, corpus


def data_constant():
    """Returns the name of the constant whose data set is read."""
    return "EVAL_DATASET" if STAGE == "evaluate" and EVAL_DATASET else "DATASET"


def data_to_read():
    return EVAL_DATASET if data_constant() == "EVAL_DATASET" else DATASET


def load_questions(log):
    """Returns (questions with their split, test questions first; corpus) of the data set. A question asked
    twice counts once, so that no test question is trained on."""
    data = data_to_read()
    path = data["path"]
    where = f"{data_constant()}: {path}"
    if data["type"] == "folder":
        questions, corpus = from_folder(path)
    elif data["type"] == "hub":
        questions, corpus = from_hotpot(read_records(data, where), where)
    else:
        try:
            records = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{where} cannot be read as JSON ({first_line(error)})") from None
        if not isinstance(records, list):
            raise UserError(f"{where} is not HotpotQA's format: it takes a list of records")
        questions, corpus = from_hotpot(enumerate(records, 1), where)
    for text in itertools.chain(map(itemgetter("question"), questions), *corpus):
        if text != text.encode(errors="ignore").decode():
            raise UserError(f"{where}: {text[:60]!r} has a lone surrogate: correct or delete it")
    for number, name in ((len(questions), "question"), (len(corpus), "paragraph")):
        if number == 0:
            raise UserError(f"{where} has no {name}")
    unique = {}
    for row in reversed(questions):
        unique[" ".join(words_of(row["question"])) or row["question"]] = row
    questions = list(unique.values())[::-1]
    order = np.random.default_rng(SPLIT_SEED).permutation(len(questions))[:SAMPLE]
    splits = split_names(len(order))
    questions = [{**questions[i], "split": split} for i, split in zip(order, splits)]
    sizes = ", ".join(f"{splits.count(name)} {name}" for name in dict.fromkeys(splits))
    log(f"{len(questions)} questions of {path} ({sizes}), {len(corpus)} paragraphs")
    if len(corpus) < max(TOP_KS):
        count = len(corpus)
        log(f"WARNING: TOP_KS = {TOP_KS}: all from {count} up read the whole corpus")
    return questions, [{"title": title, "text": text} for title, text in corpus]


def split_names(count):
    """Returns the split of each of `count` questions, (count,)."""
    if data_constant() == "EVAL_DATASET":
        return ["test"] * count
    test, validation = TEST_QUESTIONS, VALIDATION_QUESTIONS
    if test is None:
        test = min(400, max(1, count * 4 // 15))
    if validation is None:
        validation = min(200, max(1, count * 2 // 15))
    if count <= test + validation:
        held_out = f"TEST_QUESTIONS = {test} and VALIDATION_QUESTIONS = {validation}"
        fault = f"{count} questions leave none to train on beside {held_out}"
        raise UserError(f"DATASET: {fault}: lower these, or add questions")
    return ["test"] * test + ["validation"] * validation + ["train"] * (count - test - validation)


def questions_digest(questions):
    """Returns a digest of the questions that training and best/ see: all but the test questions."""
    texts = sorted(row["question"] for row in questions if row["split"] != "test")
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


# ---------------------------------------------------------------- the table: every question x action x draw


def model_digest(name):
    """Returns what a model is: its files' digests for a folder, its name for the hub."""
    if not name or not Path(name).is_dir():
        return [str(name)]
    files = sorted(filter(Path.is_file, Path(name).rglob("*")))
    return [(str(path.relative_to(name)), file_digest(path)["sha256"]) for path in files]


# differs: what is replaced in this trainer
def source_of(component):
    """Returns the source of an object's methods, without comments: another class gets another cache."""
    sources = []
    for parent in type(component).__mro__[:-1]:  # the last is object
        for name, method in sorted(vars(parent).items()):
            if inspect.isfunction(method):
                source = method.__qualname__
                with suppress(OSError, SyntaxError):  # of a lambda there is a piece of a line
                    source = inspect.getsource(method)
                    source = ast.unparse(ast.parse(textwrap.dedent(source)))
                sources.append((name, source))
    return sources


def cache_path(qa):
    """Returns the jsonl file of answers. Its name changes with the models, the prompts, the corpus and the
    classes that answer."""
    commit = getattr(qa.generator.model.config, "_commit_hash", None)
    models = [model_digest(GENERATOR), commit, model_digest(RERANKER), DTYPE]
    prompt = [PROMPT, PARAGRAPH, CHAT_TEMPLATE, MAX_PROMPT_TOKENS, MAX_NEW_TOKENS]
    components = [qa, qa.retriever, qa.generator, getattr(qa, "reranker", None)]
    sources = list(map(source_of, components))
    facts = [models, prompt, qa.corpus, TITLE_WEIGHT, RERANK_DEPTH, sources]
    if COST == "seconds":  # times measured in batches are not reused
        facts.append(COST)
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return Path(CACHE_DIR) / f"answers_{digest}.jsonl"


def block_size():
    """Returns how many questions are answered at once; one if each is timed."""
    return 1 if COST == "seconds" else QUESTIONS_AT_ONCE


_KEYS = ("question", *_ACTION, "draw")


def read_cache(path):
    """Returns {(question, top_k, temperature, rerank, draw): record} of earlier answers. A line holds a
    block; a half-written one is ignored."""
    known = {}
    if path.exists():
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                known |= {itemgetter(*_KEYS)(record): record for record in json.loads(line)}
    return known


def add_to_cache(path, records):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.write("\n" + json.dumps(records) + "\n")  # \n first: it ends a half-written line
        fsync(path)
    except OSError as error:
        raise UserError(f"CACHE_DIR = {CACHE_DIR!r}: answers cannot be kept: {error}") from None


def answer_block(qa, questions, missing):
    """Returns records of a few questions' answers to the missing (top_k, temperature, rerank, draw)."""
    rankings = {}
    ranking_seconds = {}
    for rerank in set(map(itemgetter(2), missing)):
        started = time.perf_counter()
        rankings[rerank] = [qa.ranked(question, rerank) for question in questions]
        ranking_seconds[rerank] = time.perf_counter() - started
    records = []
    for key in missing:
        top_k, temperature, rerank, _ = key
        pairs = rerank * min(RERANK_DEPTH, len(qa.corpus))  # that the reranker read
        prompts, counts = zip(*map(partial(qa.prompt, top_k=top_k), questions, rankings[rerank]))
        digest = hashlib.sha256(json.dumps([questions, *key]).encode()).digest()
        seed = int.from_bytes(digest[:6], "big")
        started = time.perf_counter()
        answers = qa.generator.answers(list(prompts), temperature, seed)
        seconds = (time.perf_counter() - started + ranking_seconds[rerank]) / len(questions)
        for question, ids, count, (text, tokens) in zip(questions, rankings[rerank], counts, answers):
            record = dict(zip(_KEYS, (question, *key)))
            record |= {"response": text, "tokens": tokens, "pairs": pairs, "seconds": seconds}
            record |= {"paragraphs": ids[:top_k], "left_out": len(ids[:top_k]) - count}
            records.append(record)
    return records


def warn_of_unknown_words(questions, qa, log):
    """Logs what fraction of the words of questions and paragraphs (the first 1,000) the generator's tokenizer
    does not know, if that is more than 1%."""
    tokenizer = qa.generator.tokenizer
    texts = list(map(itemgetter("question"), questions[:1000]))
    texts += map(paragraph_text, qa.corpus[:1000])
    tokens = np.concatenate(tokenizer(texts, add_special_tokens=False)["input_ids"])
    unknown = np.count_nonzero(tokens == tokenizer.unk_token_id) / max(1, len(tokens))
    if unknown > 0.01:
        words = f"{unknown:.0%} of the words of {data_constant()} (data/rag/reader is for data/rag alone)"
        log(f"WARNING: GENERATOR = {GENERATOR!r} reads {tokenizer.unk_token} in place of {words}")


def fill_table(questions, qa, log):
    """Returns the table, every question x action x draw. What the cache lacks is answered now, in blocks that
    depend on the questions and QUESTIONS_AT_ONCE alone; each is saved before the next begins."""
    path = cache_path(qa)
    known = read_cache(path)
    warn_of_unknown_words(questions, qa, log)
    wanted = itertools.product(TOP_KS, TEMPERATURES, RERANKS, range(DRAWS))
    wanted = [key for key in wanted if key[1] > 0 or key[3] == 0]  # at temperature 0 all draws are equal
    texts = list(map(itemgetter("question"), questions))
    blocks = []
    for n in range(0, len(texts), block_size()):
        block = texts[n : n + block_size()]
        missing = []
        for key in wanted:
            if any((text, *key) not in known for text in block):
                missing.append(key)
        if missing:
            blocks.append((block, missing))
    if blocks:
        for text in texts:  # raises for one that is too long, before hours of answers
            qa.generator.prompt(text, [])
        log(f"Answering {len(texts)} questions, {len(wanted)} answers each; they are kept in {path}")
    for block, missing in progress(blocks, "blocks"):
        records = answer_block(qa, block, missing)
        if not any(map(itemgetter("response"), records)):
            hint = "does it fit PROMPT, and does it write within MAX_NEW_TOKENS?"
            raise UserError(f"GENERATOR = {GENERATOR!r} answered none of {len(records)} prompts: {hint}")
        add_to_cache(path, records)
        known |= {itemgetter(*_KEYS)(record): record for record in records}
    return make_table(questions, qa, known, log)


def make_table(questions, qa, known, log):
    """Returns the table: questions and their types, actions, rows of each split, observations (questions,
    len(_OBSERVATION)), and (questions, actions, draws) responses, cost of what was read and seconds."""
    actions = all_actions()
    records = np.empty((len(questions), len(actions), DRAWS), dtype=object)
    splits = {"train": [], "validation": [], "test": []}
    observations = []
    for q, row in enumerate(questions):
        splits[row["split"]].append(q)
        observations.append(qa.observe(row["question"]))
        for (a, action), draw in itertools.product(enumerate(actions), range(DRAWS)):
            top_k, temperature, rerank = action
            record = known[row["question"], *action, draw if temperature > 0 else 0]
            records[q, a, draw] = record
            if top_k == max(TOP_KS):
                row[f"ranked_{rerank}"] = record["paragraphs"]

    def column(key, dtype=np.float32):
        return np.vectorize(itemgetter(key), otypes=[dtype])(records)

    if left_out := np.count_nonzero(column("left_out")):
        which = f"{left_out} of {records.size} prompts"
        log(f"WARNING: {which} left out paragraphs that do not fit {qa.generator.limit} tokens")
    return SimpleNamespace(
        questions=questions,
        types=np.array(list(map(itemgetter("type"), questions))),
        actions=actions,
        splits=splits,
        responses=column("response", object).tolist(),
        observations=torch.stack(observations),
        read=torch.tensor(column("tokens")) / COST_TOKENS + torch.tensor(column("pairs")) / COST_PAIRS,
        seconds=torch.tensor(column("seconds")),
    )


# ---------------------------------------------------------------- baselines, figures and pictures


def recall_at(questions, rerank, top_k):
    """Returns the fraction of gold paragraphs among the first top_k, mean over the questions with any."""
    recalls = []
    for row in questions:
        if row["gold_docs"]:
            recalls.append(fraction_found(row["gold_docs"], row[f"ranked_{rerank}"][:top_k]))
    return sum(recalls) / len(recalls) if recalls else math.nan


def rules(table):
    """Returns {name: an action for each question, (questions,)}: the best action; the best of each type; the
    best of each leaf of a regression tree on the observations, with as many leaves as are best on validation.
    The rules see all actions' rewards on the training questions, PPO one action at a time."""
    from sklearn.tree import DecisionTreeRegressor

    mean = table.rewards.double().mean(2)  # (questions, actions)
    train = np.array(table.splits["train"])
    validation = table.splits["validation"]
    best_fixed = mean[train].mean(0).argmax().expand(len(mean))
    by_type = best_fixed.clone()
    for name in np.unique(table.types[train]):
        best = mean[train[table.types[train] == name]].mean(0).argmax()
        by_type[torch.from_numpy(table.types == name)] = best
    observations = table.observations.numpy()
    best_reward = -math.inf
    for leaves in (2, 3, 4, 6, 8, 12, 16, 24, 32):
        tree = DecisionTreeRegressor(max_leaf_nodes=leaves, min_samples_leaf=5, random_state=0)
        predicted = tree.fit(observations[train], mean[train]).predict(observations)
        actions = torch.from_numpy(predicted.reshape(mean.shape).argmax(1))  # one action alone comes out flat
        reward = mean[validation, actions[validation]].mean()
        if reward > best_reward:
            best_reward = reward
            by_tree = actions
    return {"best_fixed": best_fixed, "best_by_type": by_type, "tree": by_tree}


def split_means(table, actions):
    """Returns {split: {"questions": their number, metric: mean}}. actions: one per question, (questions,), or
    weights of all that sum to 1, (questions, actions)."""
    if actions.ndim == 1:
        actions = torch.eye(len(table.actions), dtype=torch.float64)[actions]
    figures = {}
    for split, rows in table.splits.items():
        figures[split] = {"questions": len(rows)}
        for name, values in table.metrics.items():
            per_question = (values.double().mean(2) * actions).sum(1)
            figures[split][name] = per_question[rows].mean().item()
    return figures


def baseline_figures(table):
    """Returns {name: split_means()} of what needs no training: a random action, the rules, FIXED_ACTION,
    every action, and each question's best action after the fact, of the greedy ones or of all."""
    mean = table.rewards.double().mean(2)  # (questions, actions)
    temperatures = torch.tensor(table.actions, dtype=torch.float64)[:, 1]
    greedy = mean.masked_fill(temperatures > min(TEMPERATURES), -math.inf)
    chosen = {**rules(table), "oracle_greedy": greedy.argmax(1), "oracle": mean.argmax(1)}
    figures = {"random": split_means(table, torch.full_like(mean, 1 / len(table.actions)))}
    for name, actions in chosen.items():
        figures[name] = split_means(table, actions)
    figures["every_action"] = []
    for a, action in enumerate(table.actions):
        means_of_action = split_means(table, torch.full((len(mean),), a))
        figures["every_action"].append({"action": dict(zip(_ACTION, action)), **means_of_action})
    figures["best_fixed"]["action"] = figures["every_action"][chosen["best_fixed"][0]]["action"]
    figures["fixed"] = figures["every_action"][table.actions.index(tuple(FIXED_ACTION))]
    return figures


# differs: the figures of this trainer
def table_lines(table, figures, names):
    """Returns lines for the terminal: recall, mean reward by type and action, baselines."""
    lines = []
    for rerank in RERANKS:
        recalls = list(map(partial(recall_at, table.questions, rerank), TOP_KS))
        if not math.isnan(recalls[0]):
            line = f"Recall of the gold paragraphs, {'reranked' if rerank else 'BM25':8}"
            for top_k, recall in zip(TOP_KS, recalls):
                line += f"  @{top_k} {recall:.3f}"
            lines.append(line)
    lowest = min(TEMPERATURES)
    lines.append(f"Mean reward at temperature {lowest}, training questions, by type:")
    columns = [a for a, (_, temperature, _) in enumerate(table.actions) if temperature == lowest]
    line = " " * 16
    for a in columns:
        top_k, _, rerank = table.actions[a]
        name = f"k={top_k} rerank" if rerank else f"k={top_k}"
        line += f"{name:>12}"
    lines.append(line)
    mean = table.rewards.double().mean(2)
    train = np.array(table.splits["train"])
    for name in np.unique(table.types[train]):
        means = mean[train[table.types[train] == name]].mean(0)[columns].tolist()
        line = f"  {name or 'all':14}"
        for value in means:
            line += f"{value:11.3f}" + ("*" if value == max(means) else " ")
        lines.append(line)
    lines.append("Baselines on the test questions:")
    for name in names:
        action = tuple(figures[name].get("action", {}).values()) or ""
        metrics = "  ".join(f"{key} {figures[name]['test'][key]:.3f}" for key in table.shown)
        lines.append(f"  {name.replace('_', ' '):14}{metrics}  {action}")
    return lines


def bootstrap_interval(values):
    """95% interval of the mean of values (rows,), resampling rows."""
    generator = np.random.default_rng(0)
    means = [generator.choice(values, len(values)).mean() for _ in range(2000)]
    return np.quantile(means, (0.025, 0.975)).tolist()


# differs: the figures of this trainer
def test_figures(table, rows, actions, figures):
    """Returns {baseline: its means on the test questions, "gains": {rule: mean gain over it, and its 95%
    interval}} of the actions (rows,) for the test questions (rows,)."""
    mean = table.rewards.double().mean(2)
    test = {name: baseline["test"] for name, baseline in figures.items() if name != "every_action"}
    test["gains"] = {}
    for name, chosen in rules(table).items():
        gains = mean[rows, actions] - mean[rows, chosen[rows]]
        test["gains"][name] = {"gain": gains.mean().item(), "interval": bootstrap_interval(gains)}
    return test


# differs: the figures of this trainer
def test_lines(table, figures):
    """Yields lines for the terminal."""
    metrics = "  ".join(f"{key} {figures['policy'][key]:.3f}" for key in table.shown)
    yield f"Test: {metrics}; oracle {figures['oracle']['reward']:.3f} after the fact"
    for name, gain in figures["gains"].items():
        interval = "{:+.3f} to {:+.3f}".format(*gain["interval"])
        rule = f"{name.replace('_', ' '):12}  {figures[name]['reward']:.3f}"
        yield f"  {rule}, gain over it {gain['gain']:+.3f} (95% interval {interval})"


def action_shares(table, rows, actions):
    """Returns [{"top_k", "temperature", "rerank", "chosen", "oracle"}], one for each action: the fraction of
    the questions (rows,) for which the actions (rows,) choose it, and for which it is the best."""
    best = table.rewards.double().mean(2)[rows].argmax(1)
    shares = []
    for a, action in enumerate(table.actions):
        chosen = (actions == a).double().mean().item()
        oracle = (best == a).double().mean().item()
        shares.append({**dict(zip(_ACTION, action)), "chosen": chosen, "oracle": oracle})
    return shares


def write_json(path, value):
    write_atomically(path, lambda tmp: tmp.write_text(json.dumps(value, indent=1) + "\n"))


# differs: the figures of this trainer
def draw_learning(folder, title, table, figures):
    """Draws rag_learning.png: metrics over the updates, baselines as dashed lines; and recall."""
    records = read_metrics(folder / "logs/metrics.jsonl")
    figure = Figure(figsize=(9.5, 8.4), layout="constrained")
    figure.suptitle(title)
    *axes, last = figure.subplots(3, 3).flat
    units = {"reward": "reward", "em": "em", "f1": "f1", "cost": "cost (that the reward weighs)"}
    units |= {"top_k": "paragraphs (top_k)", "temperature": "temperature", "rerank": "fraction reranked"}
    units["entropy"] = "entropy (nats per action)"
    for axis, (key, label) in zip(axes, units.items()):
        plot_metric(axis, records, "train", key, "C0", key)
        plot_metric(axis, records, "eval", key, "C1", key)
        for name, color in (
            ("random", "grey"),
            ("fixed", "C2"),
            ("best_fixed", "C3"),
            ("best_by_type", "C4"),
            ("tree", "black"),
        ):
            level = figures[name]["validation"].get(key)
            if level is not None:
                axis.axhline(level, linestyle="--", color=color, label=name.replace("_", " "))
        axis.set(xlabel="update", ylabel=label)
        axis.grid(alpha=0.3)
    for rerank in RERANKS:
        recalls = list(map(partial(recall_at, table.questions, rerank), TOP_KS))
        last.plot(TOP_KS, recalls, "o-", markersize=4, label="reranked" if rerank else "BM25")
    last.set(xlabel="k", ylabel="recall@k of the gold paragraphs", ylim=(0, 1.02))
    last.grid(alpha=0.3)
    last.legend()
    names = {"train": "sampled, training questions", "eval": "greedy, validation questions"}
    rules = axes[0].get_legend_handles_labels()[0][2:]  # behind the two lines of plot_metric()
    lines = [*line_styles(axes[0], names), *rules]
    figure.legend(handles=lines, loc="outside lower center", ncols=3, fontsize=9)
    write_atomically(folder / "rag_learning.png", partial(figure.savefig, format="png", dpi=120))


def sampled_actions(samples, actions):
    """Returns [(update, number of the action in actions)] of the samples, as samples.jsonl has them."""
    numbers = {}
    for number, action in enumerate(actions):
        numbers[tuple(torch.tensor(action).double().round(decimals=6).tolist())] = number
    sampled = []
    for sample in samples:
        number = numbers.get(tuple(map(sample.get, _ACTION)))
        if number is not None:
            sampled.append((sample["step"], number))
    return sampled


def draw_actions(folder, title, shares):
    """Draws rag_actions.png: how often each action was sampled in the episodes of samples.jsonl, over the
    updates; and how often it is chosen on the test questions, and is the best there."""
    actions = list(map(itemgetter(*_ACTION), shares))
    sampled = sampled_actions(read_metrics(folder / "logs/samples.jsonl"), actions)
    figure = Figure(figsize=(16, 2 + 0.4 * len(shares)), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, sharey=True)
    if sampled:
        updates, numbers = np.array(sampled).T
        edges = np.linspace(0.5, updates.max() + 0.5, min(30, updates.max()) + 1)
        rows = np.arange(-0.5, len(shares))
        counts, _, _ = np.histogram2d(numbers, updates, (rows, edges))
        fractions = counts / counts.sum(0).clip(1)
        left.pcolormesh(edges, rows, fractions, cmap="Blues", vmin=0)
        left.set(title=f"sampled episodes: white 0%, darkest {fractions.max():.0%}")
    names = ["k={}, T={}, rerank {}".format(*action) for action in actions]
    left.set(xlabel="update", yticks=range(len(shares)), yticklabels=names)
    for offset, key, label in ((-0.2, "chosen", "chosen by the policy"), (0.2, "oracle", "best, afterwards")):
        heights = np.arange(len(shares)) + offset
        right.barh(heights, list(map(itemgetter(key), shares)), 0.4, label=label)
    right.set(xlabel="fraction of the test questions")
    right.grid(alpha=0.3)
    right.legend()
    write_atomically(folder / "rag_actions.png", partial(figure.savefig, format="png", dpi=100))


# ---------------------------------------------------------------- STAGE=evaluate


def policy_to_evaluate():
    """Returns the folder with the weights of EVALUATE_POLICY."""
    folder = Path(EVALUATE_POLICY)
    if EVALUATE_POLICY == "best" or EVALUATE_POLICY.startswith("step_"):
        folder = Path(OUTPUT_DIR) / EVALUATE_POLICY
    if (folder / "policy").is_dir():
        folder /= "policy"
    config = folder / "config.json"
    if not config.exists() or '"actions"' not in config.read_text():
        fault = f"there is no policy of this trainer in {folder}"
        hint = "train first, or give the folder best or step_N of a run"
        raise UserError(f"EVALUATE_POLICY = {EVALUATE_POLICY!r}: {fault}: {hint}")
    return folder


def questions_to_evaluate(questions, policy):
    """Returns the test questions, and what completes their last block, on which sampled answers depend.
    Refuses a policy that has learnt from others than the rest, because they may be among the test
    questions."""
    learnt_from = getattr(policy.config, "learns_from", None)  # older policies do not tell
    if not EVAL_DATASET and learnt_from not in (None, questions_digest(questions)):
        fault = "has perhaps learnt from these test questions: its training questions were not all the others"
        hint = "set DATASET, SAMPLE, SPLIT_SEED and TEST_QUESTIONS as in its training_config.json"
        hint += ", or name a data set that is new to it by EVAL_DATASET"
        raise UserError(f"EVALUATE_POLICY = {EVALUATE_POLICY!r} {fault}: {hint}")
    number = sum(row["split"] == "test" for row in questions)
    return questions[: math.ceil(number / block_size()) * block_size()]


def policy_and_step(policy):
    """Returns a policy's folder as text and, if it is the best/ of a run, the step that it is of."""
    for folder in (Path(policy), Path(policy).parent):
        if (folder / "metrics.json").exists():
            return f"{policy} (step {json.loads((folder / 'metrics.json').read_text())['step']})"
    return str(policy)


@contextmanager
def keeping_constants():
    """Restores this file's constants after the block, or after the function that it decorates."""
    before = {name: value for name, value in globals().items() if name.isupper()}
    try:
        yield
    finally:
        globals().update(before)


def write_evaluation(name, settings, results, records):
    """Writes settings and results to OUTPUT_DIR/<name>.json and records to <name>.jsonl; if there is already
    an evaluation of that name with other settings, to <name>_2, <name>_3, ... Returns their path without the
    ending."""
    name = re.sub(r"[^\w.-]+", "", name)
    settings = json.loads(json.dumps(settings))
    path = Path(OUTPUT_DIR, name)
    number = 1
    while Path(f"{path}.json").exists():
        with suppress(ValueError, AttributeError):  # a file that is not of an evaluation
            written = json.loads(Path(f"{path}.json").read_text())
            if all(written.get(key) == value for key, value in settings.items()):
                break
        number += 1
        path = Path(OUTPUT_DIR, f"{name}_{number}")
    if rank() == 0:
        lines = "".join(json.dumps(record) + "\n" for record in records)
        facts = json.dumps({**settings, **results}, indent=1)
        write_atomically(Path(f"{path}.jsonl"), lambda tmp: tmp.write_text(lines))
        write_atomically(Path(f"{path}.json"), lambda tmp: tmp.write_text(facts))
    return path


# differs: what is scored
@keeping_constants()
def evaluate_policy(trainer_class):
    """Scores EVALUATE_POLICY, without training, on all questions of EVAL_DATASET or, without one, on the test
    questions of DATASET. Writes OUTPUT_DIR/eval_<policy>_<data>.json, and each question with its action and
    answer to a .jsonl of that name; a run in OUTPUT_DIR stays as it is. Returns {figure: {"mean", "low",
    "high"}}."""
    trainer = trainer_class(resume_from_checkpoint="no")
    by_question, records, shares = policy_scores(trainer)
    figures = {}
    for figure, values in by_question.items():
        mean, (low, high) = values.mean().item(), bootstrap_interval(values.numpy())
        figures[figure] = {"mean": mean, "low": low, "high": high}
        trainer.run.log(f"{figure:22} {mean:.3f}   95% interval {low:.3f} to {high:.3f}")
    settings = {"policy": str(policy_to_evaluate()), "dataset": data_to_read(), "questions": len(records)}
    names = "SPLIT_SEED GENERATOR RERANKER FIXED_ACTION EM_WEIGHT F1_WEIGHT ROUGE_WEIGHT COST_WEIGHT COST"
    settings["settings"] = {key: constants()[key] for key in [*names.split(), *_CHANGE_SCORES]}
    names = ["eval", *Path(EVALUATE_POLICY).parts[-2:], Path(data_to_read()["path"]).stem]
    path = write_evaluation("_".join(names), settings, {"figures": figures, "actions": shares}, records)
    policy = policy_and_step(policy_to_evaluate())
    trainer.run.log(f"{policy}: {len(records)} questions; written to {path}.json and .jsonl")
    trainer.run.lock.release(force=True)
    return figures


# differs: what is scored
def policy_scores(trainer):
    """Returns {figure: its value for each test question, (questions,)}, a record of each question with its
    action and answers, and action_shares()."""
    table = trainer.table
    rows = table.splits["test"]
    with torch.no_grad():
        logprobs, _ = trainer.policy(table.observations[rows])
    actions = logprobs.argmax(1)
    by_question = {}
    for name, values in table.metrics.items():
        by_question[name] = values[rows, actions].double().mean(1)
    rewards_of_actions = table.rewards.double().mean(2)[rows]  # (questions, actions)
    by_question["expected_reward"] = (logprobs.double().exp() * rewards_of_actions).sum(1)
    fixed = rewards_of_actions[:, table.actions.index(tuple(FIXED_ACTION))]
    best_action = rewards_of_actions[:, rewards_of_actions.mean(0).argmax()]
    by_question |= {"fixed_reward": fixed, "best_action_reward": best_action}
    by_question["oracle_reward"] = rewards_of_actions.amax(1)
    by_question["gain_over_fixed"] = by_question["reward"] - fixed
    by_question["gain_over_best_action"] = by_question["reward"] - best_action
    records = []
    for n, (row, action) in enumerate(zip(rows, actions.tolist())):
        question = table.questions[row]
        top_k, _, rerank = table.actions[action]
        titles = [trainer.qa.corpus[i]["title"] for i in question[f"ranked_{rerank}"][:top_k]]
        record = {key: question[key] for key in ("id", "question", "answer", "type")}
        record |= {"responses": table.responses[row][action], "paragraphs": titles}
        for name, values in by_question.items():
            record[name] = round(values[n].item(), 6)
        records.append(record)
    return by_question, records, action_shares(table, rows, actions)


def train_main():
    run_main(RAGTrainer)


if __name__ == "__main__":
    train_main()
