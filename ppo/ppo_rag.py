"""PPO over retrieval, in one file: it chooses top_k, temperature and reranking for each question.

An episode has one step. The observation s describes the question and what BM25 finds for it. The action a is
one of TOP_KS x TEMPERATURES x RERANKS: how many paragraphs the generator reads, its temperature, and whether
a reranker sorts the paragraphs first. The reward r of the answer trains the policy (PPO, arXiv 1707.06347);
with one step per episode there is no GAE and no bootstrapping:

    r   = EM_WEIGHT EM + F1_WEIGHT F1 + ROUGE_WEIGHT ROUGE-L - COST_WEIGHT cost
    A   = r - V(s), whitened over the episodes of the update
    rho = pi(a|s) / pi_old(a|s)
    L   = -mean min(rho A, clip(rho, 1 - CLIP_RANGE, 1 + CLIP_RANGE) A)
          + VALUE_LOSS_COEF mean 1/2 (V - r)^2 - ENTROPY_COEF mean H(pi)

Actor and critic are one network with two heads. Every question is answered under every action before
training: PPO then trains in seconds, and simple rules are measured on the same answers, kept in CACHE_DIR.
Shapes: Q = questions, A = actions, E = entries of an observation, episodes = pairs of question and action.

    python ppo/ppo_rag.py                 # edit the constants below, or give KEY=VALUE or @FILE
    python ppo/ppo_rag.py MAX_STEPS=0     # the table of all actions and the rules, without training

Writes table.jsonl (all answers), test.json, logs/, step_N/, best/policy/ and two pictures into OUTPUT_DIR. A
run that was stopped or killed continues from its last checkpoint, and ends with the same bytes.

To change        see                                To change   see
the loss         policy_loss, optimizer_step        the data    load_questions, data/make_corpus.py
the reward       EM_WEIGHT ..., compute_rewards     a metric    compute_rewards, record, evaluate
the actions      TOP_KS, TEMPERATURES, RERANKS      a plot      PANELS, draw_grid
the observation  observe                            the system  Trigrams, CrossEncoder, Generator, QASystem
"""

import ast
import csv
import functools
import difflib
import hashlib
import inspect
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import unicodedata
from contextlib import contextmanager, suppress
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):
    print(__doc__ + Path(__file__).read_text().split("= constants\n")[1].split("\n# =====")[0])
    sys.exit()

import bm25s
import filelock
import numpy as np
import pyarrow.parquet
import regex
import torch
import transformers
from matplotlib.figure import Figure
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.tree import DecisionTreeRegressor
from torch.nn.functional import one_hot
from tqdm import tqdm

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "rewards").is_dir()), None)
if ROOT is None:
    sys.exit(f"{__file__}: copy the folder rewards/ of the repository beside this file, or above it")
sys.path.insert(0, str(ROOT))
import rewards
from rewards import UserError

# ================================================================ constants

# Data: a folder with corpus {title, text} and questions {question, answer, gold, type}, each a .jsonl, .csv
# or .parquet file. An answer may be a list of right ones; gold (titles) and type may be missing
DATASET = f"{ROOT}/data/rag"
SAMPLE: int | None = None  # number of questions drawn from the data set; None: all
TEST_QUESTIONS = 400  # used once, at the end; at most 4 of 15 questions
VALIDATION_QUESTIONS = 200  # for best/ and the tree's size; at most 2 of 15 questions
SPLIT_SEED = 0  # decides which questions are drawn, and their splits; SEED does not

# The system that answers. Models are folders or hub names
GENERATOR = f"{ROOT}/data/rag/reader"  # any seq2seq or causal model. This one reads data/rag alone
RERANKER: str | None = "lexical"  # lexical: character trigrams | a cross-encoder with one label | None
TITLE_WEIGHT = 2  # times that BM25 counts a title's words
RERANK_DEPTH = 20  # number of BM25's best paragraphs that the reranker sorts
PROMPT = (
    "Answer ONLY with the correct answer, as a short phrase, based strictly on the provided CONTEXTS.\n"
    "CONTEXTS:\n{contexts}\nQUESTION: {question}\nANSWER:"
)
PARAGRAPH = "[{n}] {title}: {text}"
CHAT_TEMPLATE = True  # sends the prompt as a user's message if the generator has a template; False: as text
MAX_PROMPT_TOKENS = 4096  # paragraphs beyond this or the generator's own limit are left out, and counted
MAX_NEW_TOKENS = 16
DTYPE = "float32"  # float32 | bfloat16, of generator and reranker
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # or mps; of generator and reranker
QUESTIONS_AT_ONCE = 16  # answered together, in batches of as many prompts; a kill loses these
CACHE_DIR = f"{ROOT}/checkpoints/ppo_rag_cache"  # has the answers of earlier runs

# Actions: all combinations
TOP_KS = (1, 2, 4, 8)  # paragraphs that the generator reads
TEMPERATURES = (0.0, 0.7)  # 0: greedy
RERANKS = (0, 1)  # 1: the reranker sorts the RERANK_DEPTH best before the first top_k are taken
FIXED_ACTION: tuple | None = (4, 0.7, 0)  # a baseline: (top_k, temperature, rerank) for every question

# Reward
EM_WEIGHT = 1.0
F1_WEIGHT = 0.5
ROUGE_WEIGHT = 0.0
STRICT = False  # False: HotpotQA's EM and F1, to which 5 is -5, 35 is 3.5, C# is C++ | True: signs count
COST_WEIGHT = 0.05
COST_TOKENS = 100.0  # tokens, read or written by the generator, that cost 1
COST_PAIRS = 4.0  # question-paragraph pairs, read by the reranker, that cost 1

# PPO
LEARNING_RATE = 3e-4
MAX_GRAD_NORM = 0.5
HIDDEN_SIZE = 64  # units in each of the two layers
N_STEPS = 256  # episodes per update; each has one step, and a training question of its own
BATCH_SIZE = 64  # episodes per optimizer step
GROUP_EPOCHS = 4  # passes over the episodes per update
CLIP_RANGE = 0.2
VALUE_LOSS_COEF = 0.5
ENTROPY_COEF = 0.01

# Schedule and files
MAX_STEPS = 150  # updates; 0: only the table and the rules
SAVE_EVERY_N_STEPS = 50  # 0: only at the end
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 10  # 0: only before the first and after the last step
LOG_SAMPLES = 4  # episodes per update written to samples.jsonl
RESUME = "ask"  # ask (yes without a terminal) | yes | no | path of a checkpoint or a run
OUTPUT_DIR = f"{ROOT}/checkpoints/{Path(__file__).stem}"
SEED = 1
USE_WANDB = False  # its project and mode: environment variables WANDB_PROJECT, WANDB_MODE

# ================================================================ what the policy sees and does


def words_of(text):
    """Returns the lower-case words and signs of a text, without punctuation: of "C++" c, + and +. In scripts
    without blanks, as Chinese, Japanese and Thai, characters are words, and so are pairs of neighbours."""
    no_blanks = r"\p{Han}\p{Hiragana}\p{Katakana}ー\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
    pattern = rf"(?V1)([{no_blanks}]+)|[[\p{{L}}\p{{M}}\p{{N}}]--[{no_blanks}]]+|\p{{S}}|(?<=\p{{L}})#"
    words = []
    for match in regex.finditer(pattern, unicodedata.normalize("NFKC", text).casefold()):
        characters = [match[0]]
        if match[1]:
            characters = regex.findall(r"\X", match[1])  # with their marks
        words += characters + list(map("".join, itertools.pairwise(characters)))
    return words


def paragraph_text(paragraph):
    return f"{paragraph['title']}: {paragraph['text']}"


def fraction_found(items, collection):
    """Returns the fraction of the items that the collection contains; 0 if there are no items."""
    return sum(item in collection for item in items) / max(1, len(items))


def observe(question, scores, paragraphs, vocabulary):
    """Returns the observation of a question, {name: number}, of its words and BM25's 20 best paragraphs."""
    words = words_of(question)
    s = np.zeros(20)
    s[: len(scores)] = scores  # a small corpus has fewer paragraphs
    best_score = max(s[0], 1e-9)
    entries = {"words": len(words)}
    entries["unknown"] = 1 - fraction_found(words, vocabulary)  # fraction of the words that no paragraph has
    for keyword in "who what when where which how of or and".split():  # "or": a choice; "of": often a chain
        entries[f"has_{keyword}"] = keyword in words
    verbs = "is are was were do does did has have had can could".split()
    entries["yes_no"] = words[:1] != [] and words[0] in verbs
    entries["s1"] = s[0]  # s1 is the highest score
    entries["s1_per_word"] = s[0] / max(1, len(words))
    for n in (2, 3, 4, 8, 20):
        entries[f"s{n}/s1"] = s[n - 1] / best_score
    entries["spread"] = s.std() / max(s.mean(), 1e-9)
    entries["near"] = (s >= 0.9 * best_score).sum()  # paragraphs with at least 0.9 of the highest score
    for n in (1, 2, 4):  # fraction of the question's words that stand in the best n paragraphs
        texts = " ".join(map(paragraph_text, paragraphs[:n]))
        entries[f"overlap{n}"] = fraction_found(words, set(words_of(texts)))
    entries["title"] = fraction_found(words_of(paragraphs[0]["title"]), words)  # of the best one
    return entries


def all_actions():
    return list(itertools.product(TOP_KS, TEMPERATURES, RERANKS))


class Policy(torch.nn.Module):
    """Actor and critic: two shared layers, then one logit per action, and a value. Inputs are scaled by mean
    and deviation of the observations (questions, E) that it is made with."""

    def __init__(self, observations, num_actions):
        super().__init__()
        self.register_buffer("mean", observations.mean(0))
        self.register_buffer("scale", observations.std(0, unbiased=False) + 1e-3)
        self.first = torch.nn.Linear(observations.shape[1], HIDDEN_SIZE)
        self.second = torch.nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)
        self.actor = torch.nn.Linear(HIDDEN_SIZE, num_actions)
        self.critic = torch.nn.Linear(HIDDEN_SIZE, 1)
        # The actor's weights are small, so that all actions begin about equally likely (2006.05990)
        gains = {self.first: 2**0.5, self.second: 2**0.5, self.actor: 0.01, self.critic: 1.0}
        for layer, gain in gains.items():
            torch.nn.init.orthogonal_(layer.weight, gain)
            torch.nn.init.zeros_(layer.bias)

    def forward(self, observations):
        """Returns log-probabilities (episodes, A) and values (episodes,)."""
        inputs = ((observations - self.mean) / self.scale).clamp(-5, 5)
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        return self.actor(hidden).log_softmax(-1), self.critic(hidden).squeeze(-1)


def policy_loss(logprobs, old_logprobs, advantages):
    """Returns the clipped surrogate loss of each episode, (episodes,): 1707.06347, equation 7."""
    ratio = (logprobs - old_logprobs).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE) * advantages)


# ================================================================ the trainer


class RAGTrainer:
    """self.table has all answers, self.rewards (Q, A) their rewards, self.run the files. self.state is what a
    checkpoint holds beside policy and optimizer: you may add numbers, texts, lists and tensors of torch."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        self.run = Run(resume_from_checkpoint or RESUME)
        self.actions = all_actions()
        self.names = ["k={} T={} rerank={}".format(*action) for action in self.actions]
        self.questions, corpus = load_questions()
        self.qa = QASystem(corpus)
        self.table = answer_all(self.questions, self.qa)  # records, one for each question and action
        metrics = self.compute_rewards({name: column(self.table, name) for name in self.table[0]})
        for name, x in metrics.items():
            for record, value in zip(self.table, x.tolist()):
                record.setdefault(name, value)
        self.metrics = {name: x.float().view(-1, len(self.actions)) for name, x in metrics.items()}  # (Q, A)
        self.rewards = self.metrics["reward"]
        self.run.facts["data"] = digest(self.table)  # with all that it rests on
        observations = list(map(self.qa.observe, column(self.questions, "question")))
        self.observations = torch.tensor(observations, dtype=torch.float32)  # (Q, E)
        splits = np.array(column(self.questions, "split"))
        self.splits = {name: torch.tensor(np.flatnonzero(splits == name)) for name in np.unique(splits)}
        self.rules = self.fit_rules()  # {name: probabilities (Q, A)}
        rows = self.splits["validation"]
        self.rule_metrics = {name: self.measure(rows, rule) for name, rule in self.rules.items()}
        self.state = SimpleNamespace(
            step=0,  # the current one, from 1; between steps, how many are done
            trained_for=[self.names, len(self.splits["train"])],
            evaluation={},  # the last one's metrics
            best_score=-math.inf,  # its policy is in best/
            log_sizes={},  # bytes of each log when the checkpoint was saved
            wandb_id=None,
        )
        self.seed_step()  # for the first weights
        self.policy = Policy(self.observations[self.splits["train"]], len(self.actions))
        self.best = deepcopy(self.policy)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=LEARNING_RATE)
        if self.run.checkpoint:
            self.load_state(self.run.checkpoint)

    def compute_rewards(self, table):
        """Returns the reward of each answer, and what else is logged of it, {name: (answers,)}. Edit or
        override freely. table: {column: list}, see answer_block(), with columns of the questions."""
        texts = table["question"], table["response"], table["answer"]
        names = ["strict_em", "strict_f1"] if STRICT else ["em", "f1"]
        em, f1 = torch.tensor([rewards.find_function(name)(*texts) for name in names])
        names = "recall top_k temperature rerank tokens pairs".split()
        metrics = {name: torch.tensor(table[name]) for name in names}
        cost = metrics["tokens"] / COST_TOKENS + metrics["pairs"] / COST_PAIRS
        reward = EM_WEIGHT * em + F1_WEIGHT * f1 - COST_WEIGHT * cost
        if ROUGE_WEIGHT:
            reward += ROUGE_WEIGHT * torch.tensor(rewards.rouge_l(*texts))
        if em.max() == 0:
            shown = f"{texts[1][0]!r} for {texts[2][0]!r}"
            print(f"WARNING: no answer is right, such as {shown}: set GENERATOR or PROMPT", flush=True)
        if metrics["recall"].isnan().all():  # the questions have no gold paragraphs
            del metrics["recall"]
        return {"reward": reward, "em": em, "f1": f1, "cost": cost, **metrics}

    def train(self):
        """Trains until the last step or a signal, then tests best/. Returns the last evaluation."""
        state = self.state
        self.run.open(state, state.step >= MAX_STEPS)  # opens the logs and catches signals
        with open(self.run.folder / "table.jsonl", "w") as file:
            for record in self.table:
                file.write(json.dumps(record).replace('"recall": NaN', '"recall": null') + "\n")
        texts = [f"{name} {metrics['reward']:.3f}" for name, metrics in self.rule_metrics.items()]
        self.run.log("held-out rewards of simple rules: " + "  ".join(texts))
        if not state.evaluation:
            self.log_evaluation(self.evaluate())
        while state.step < MAX_STEPS and not self.run.signal:
            state.step += 1
            self.seed_step()
            batch = self.rollout()
            self.compute_advantages(batch)
            metrics = self.update(batch)
            self.record(batch, metrics)
            is_last = state.step == MAX_STEPS
            if is_last or (EVAL_EVERY_N_STEPS and state.step % EVAL_EVERY_N_STEPS == 0):
                self.log_evaluation(self.evaluate())
            if SAVE_EVERY_N_STEPS and state.step % SAVE_EVERY_N_STEPS == 0 and not is_last:
                self.save()
        self.save()  # again after a kill, which may have come before the plots
        if not self.run.signal:
            self.test()
        self.run.close(state)
        return state.evaluation

    def seed_step(self):
        """Makes all random numbers of a step a function of its number: a checkpoint need not keep any."""
        seed = (1_000_003 * SEED + self.state.step) % 2**32
        transformers.set_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def rollout(self):
        """Samples an action for each of N_STEPS training questions. Returns the batch of episodes."""
        train = self.splits["train"]
        rows = train[torch.randperm(len(train), generator=self.generator)[:N_STEPS]]
        distribution, values = self.policy(self.observations[rows])  # (episodes, A), (episodes,)
        actions = torch.multinomial(distribution.exp(), 1, generator=self.generator).squeeze(1)
        batch = SimpleNamespace(rows=rows, actions=actions, values=values)
        batch.logprobs = distribution.gather(1, actions.unsqueeze(1)).squeeze(1)
        batch.rewards = self.rewards[rows, actions]
        return batch

    def compute_advantages(self, batch):
        """Adds A = r - V, whitened. An episode has one step, so its return is its reward."""
        advantages = batch.rewards - batch.values
        batch.advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)

    def update(self, batch):
        """Passes GROUP_EPOCHS times over the episodes, BATCH_SIZE per step. Returns means of the metrics."""
        for group in self.optimizer.param_groups:  # a resumed one has the checkpoint's
            group["lr"] = LEARNING_RATE
        steps = []
        for _ in range(GROUP_EPOCHS):
            for episodes in torch.randperm(len(batch.rows), generator=self.generator).split(BATCH_SIZE):
                steps.append(self.optimizer_step(batch, episodes))
        metrics = {name: np.mean(column(steps, name)).item() for name in steps[0]}
        return metrics | {"learning_rate": LEARNING_RATE}

    def optimizer_step(self, batch, episodes):
        """Makes one step on the episodes with these numbers. Returns its metrics."""
        old_logprobs, advantages = batch.logprobs[episodes], batch.advantages[episodes]
        distribution, values = self.policy(self.observations[batch.rows[episodes]])
        logprobs = distribution.gather(1, batch.actions[episodes].unsqueeze(1)).squeeze(1)
        entropy = -(distribution.exp() * distribution).sum(1)
        policy_losses = policy_loss(logprobs, old_logprobs, advantages)
        value_losses = 0.5 * (values - batch.rewards[episodes]) ** 2
        loss = (policy_losses + VALUE_LOSS_COEF * value_losses - ENTROPY_COEF * entropy).mean()
        self.optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        log_ratio = logprobs.detach() - old_logprobs
        is_clipped = (log_ratio.exp() - 1) * advantages.sign() > CLIP_RANGE
        metrics = {
            "policy_loss": policy_losses.mean(),
            "value_loss": value_losses.mean(),
            "entropy": entropy.mean(),
            "approx_kl": (log_ratio.exp() - 1 - log_ratio).mean(),
            "clip_fraction": is_clipped.float().mean(),
            "policy_grad_norm": grad_norm,
        }
        return {name: x.item() for name, x in metrics.items()}

    def fit_rules(self):
        """Returns the simple rules, {name: probabilities (Q, A)}. best_fixed: the best action on the training
        questions; best_by_type: that of each type; tree: that of each leaf of a regression tree on the
        observation, its size chosen on validation; oracle: each question's best, found afterwards."""
        reward, train, validation = self.rewards, self.splits["train"], self.splits["validation"]
        rules = {}
        if FIXED_ACTION:
            rules["fixed"] = torch.full((len(reward),), self.actions.index(FIXED_ACTION))
        rules["best_fixed"] = torch.full((len(reward),), int(reward[train].mean(0).argmax()))
        types = np.array(column(self.questions, "type"))
        rules["best_by_type"] = rules["best_fixed"].clone()
        for name in np.unique(types[train]):
            is_type = torch.from_numpy(types == name)
            rules["best_by_type"][is_type] = reward[train[is_type[train]]].mean(0).argmax()
        trees = []
        for leaves in (2, 3, 4, 6, 8, 12, 16, 24, 32):
            tree = DecisionTreeRegressor(max_leaf_nodes=leaves, min_samples_leaf=5, random_state=0)
            tree.fit(self.observations[train].numpy(), reward[train].numpy())
            predicted = tree.predict(self.observations.numpy()).reshape(reward.shape)
            trees.append(torch.from_numpy(predicted.argmax(1)))
        rules["tree"] = max(trees, key=lambda actions: reward[validation, actions[validation]].mean())
        rules["oracle"] = reward.argmax(1)
        rules = {name: one_hot(actions, len(self.actions)).float() for name, actions in rules.items()}
        return {"random": torch.full(reward.shape, 1 / len(self.actions)), **rules}

    def measure(self, rows, probabilities):
        """Returns means of all metrics over the questions `rows`, if actions are drawn with probabilities
        (Q, A). Questions without gold paragraphs do not count for the recall."""
        means = {name: (probabilities * x)[rows].sum(1).nanmean() for name, x in self.metrics.items()}
        return dict(zip(means, torch.stack([*means.values()]).tolist()))

    @torch.no_grad()
    def choose(self, policy):
        """Returns the policy's likeliest action for each question, as probabilities (Q, A)."""
        return one_hot(policy(self.observations)[0].argmax(1), len(self.actions)).float()

    def evaluate(self):
        return self.measure(self.splits["validation"], self.choose(self.policy))

    def test(self):
        """Prints figures of all actions, the rules and the policy of best/ on the test questions: also its
        gain in reward over each (with half a 95% interval), and how often it takes the same action."""
        rows = self.splits["test"]
        best = self.choose(self.best)
        fixed = torch.eye(len(self.names)).unsqueeze(1).expand(-1, *best.shape)  # (A, Q, A)
        figures = {}
        for name, probabilities in {**dict(zip(self.names, fixed)), **self.rules, "policy": best}.items():
            gains = ((best - probabilities) * self.rewards)[rows].sum(1)
            figures[name] = self.measure(rows, probabilities)
            figures[name]["gain"] = gains.mean().item()
            figures[name]["interval"] = 1.96 * gains.std(correction=0).item() / len(rows) ** 0.5
            figures[name]["same"] = (best * probabilities)[rows].sum(1).mean().item()
        (self.run.folder / "test.json").write_text(json.dumps(figures, indent=1))
        self.run.log(
            f"{len(rows)} test questions".ljust(18) + "".join(map("{:>9.8}".format, figures["policy"]))
        )
        for name, numbers in figures.items():
            self.run.log(f"{name:18}" + "".join(map("{:9.3f}".format, numbers.values())))

    @torch.no_grad()
    def answer(self, question):
        """Returns (answer, (top_k, temperature, rerank)) for a text. The policy of best/ chooses."""
        logprobs, _ = self.best(torch.tensor([self.qa.observe(question)], dtype=torch.float32))
        action = self.actions[int(logprobs.argmax())]
        (record,) = answer_block(self.qa, [question], action)
        return record["response"], action

    def record(self, batch, metrics):
        """Logs the step's metrics, some of its episodes, and its line on the terminal."""
        step = self.state.step
        probabilities = torch.zeros_like(self.rewards)
        probabilities[batch.rows, batch.actions] = 1
        metrics |= self.measure(batch.rows, probabilities)
        unexplained = (batch.rewards - batch.values).var() / batch.rewards.var().clamp(min=1e-8)
        metrics |= {"explained_variance": 1 - unexplained.item(), "timesteps": step * len(batch.rows)}
        self.run.write("metrics.jsonl", phase="train", step=step, **metrics)
        for row, action in zip(batch.rows[:LOG_SAMPLES].tolist(), batch.actions.tolist()):
            self.run.write("samples.jsonl", step=step, **self.table[row * len(self.actions) + action])
        line = "R:{reward:.3f} EM:{em:.3f} F1:{f1:.3f} cost:{cost:.2f} PL:{policy_loss:.4f} "
        line += f"E:{{entropy:.2f}} EV:{{explained_variance:.2f}}  step {step}/{MAX_STEPS}"
        self.run.log(line.format(**metrics))

    def log_evaluation(self, metrics):
        """Logs what evaluate() returned, and keeps the policy with the highest reward."""
        state = self.state
        state.evaluation = metrics
        self.run.write("metrics.jsonl", phase="eval", step=state.step, **metrics)
        texts = [f"{name} {x:.3f}" for name, x in metrics.items()]
        self.run.log(f"step {state.step}, held out: " + "  ".join(texts))
        if metrics["reward"] > state.best_score:
            state.best_score = metrics["reward"]
            self.best.load_state_dict(self.policy.state_dict())

    def save(self):
        """Writes step_N/ if it is not there yet and best/, removes old checkpoints and draws the plots."""
        folder = self.run.folder / f"step_{self.state.step}"
        self.run.checkpoint = folder  # a second train() goes on
        if folder not in list_checkpoints(self.run.folder):
            self.run.log(f"Saving {folder}")
            self.state.log_sizes = {name: file.tell() for name, file in self.run.logs.items()}
            saved = {name: getattr(self, name).state_dict() for name in ("policy", "best", "optimizer")}
            with atomic_folder(self.run.folder / "best/policy") as tmp:
                torch.save(self.best.state_dict(), tmp / "policy.pt")
            with atomic_folder(folder) as tmp:
                torch.save({"state": vars(self.state), **saved}, tmp / "training_state.pt")
                shutil.copy(self.run.folder / "training_config.json", tmp / "run.json")
        for old in list_checkpoints(self.run.folder)[:-KEEP_LAST_N_CHECKPOINTS]:
            shutil.rmtree(old.rename(f"{old}.tmp"))  # what a kill leaves of it is no checkpoint
        draw_grid(self.run.folder, "training_metrics_detailed.png", self.rule_metrics)
        draw_grid(self.run.folder, "ppo_rag_metrics_with_entropy.png", self.rule_metrics, PANELS)

    def load_state(self, folder):
        saved = torch.load(folder / "training_state.pt", map_location="cpu", weights_only=True)
        if saved["state"]["trained_for"] != self.state.trained_for:
            raise UserError(f"{folder} was trained with other actions or questions: RESUME=no starts again")
        vars(self.state).update(saved["state"])
        for name in ("policy", "best", "optimizer"):
            getattr(self, name).load_state_dict(saved[name])


def column(rows, field):
    return [row[field] for row in rows]


# ================================================================ the system that answers: replace any part


class Trigrams:
    """A reranker without a model: it compares the character trigrams of question and paragraph, weighted by
    rarity in the corpus, and so finds old spellings and inflected words, which BM25's whole words miss."""

    def __init__(self, corpus):
        options = {"analyzer": "char_wb", "ngram_range": (3, 3), "binary": True}
        self.grams = TfidfVectorizer(preprocessor=lambda text: " ".join(words_of(text)), **options)
        self.grams.fit(map(paragraph_text, corpus))

    def scores(self, question, texts):
        """Returns the question's cosine with each paragraph's text, (texts,)."""
        return (self.grams.transform(texts) @ self.grams.transform([question]).T).toarray()[:, 0]


class CrossEncoder:
    """A reranker that reads a question and a paragraph together and gives one score."""

    def __init__(self):
        auto_class = transformers.AutoModelForSequenceClassification
        self.model = auto_class.from_pretrained(RERANKER, dtype=DTYPE).to(DEVICE)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(RERANKER, padding_side="right")
        if self.model.config.num_labels != 1:
            raise UserError(f"RERANKER = {RERANKER!r} must have one label")
        config = self.model.config
        unused = 2 if config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet") else 0
        positions = getattr(config, "max_position_embeddings", 10**9) - unused
        self.limit = min(self.tokenizer.model_max_length, positions)  # longer pairs are cut

    @torch.no_grad()
    def scores(self, question, texts):
        """Returns a score for each paragraph's text, (texts,)."""
        pairs = list(zip(itertools.repeat(question), texts))
        inputs = self.tokenizer(
            pairs, padding=True, truncation=True, max_length=self.limit, return_tensors="pt"
        )
        return self.model(**inputs.to(DEVICE)).logits[:, 0].float().cpu().numpy()


class Generator:
    """Short answers by any seq2seq or causal model of transformers."""

    def __init__(self):
        config = transformers.AutoConfig.from_pretrained(GENERATOR)
        self.is_seq2seq = config.is_encoder_decoder  # the prompt stands in the encoder
        auto_class, side = transformers.AutoModelForCausalLM, "left"
        if self.is_seq2seq:
            auto_class, side = transformers.AutoModelForSeq2SeqLM, "right"
        self.model = auto_class.from_pretrained(GENERATOR, dtype=DTYPE).to(DEVICE)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(GENERATOR, padding_side=side)
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.is_chat = bool(CHAT_TEMPLATE and self.tokenizer.chat_template)
        self.options = {"add_special_tokens": not self.is_chat}  # the template writes them itself
        max_positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 10**9
        self.limit = min(MAX_PROMPT_TOKENS, max_positions - MAX_NEW_TOKENS, self.tokenizer.model_max_length)
        # The model's own penalties, beams and filters stay out: a temperature means what it says
        own = self.model.generation_config.to_dict().items()
        ids = {name: x for name, x in own if name.endswith("_token_id")}
        self.model.generation_config = transformers.GenerationConfig(**ids, top_k=0, top_p=1.0)

    def prompt(self, question, paragraphs):
        """Returns the prompt with as many of the paragraphs as fit, in order, and their number."""
        contexts = [PARAGRAPH.format(n=n, **paragraph) for n, paragraph in enumerate(paragraphs, 1)]
        while True:
            prompt = PROMPT.replace("{question}", question).replace("{contexts}", "\n".join(contexts))
            if self.is_chat:
                chat = [{"role": "user", "content": prompt}]
                prompt = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            length = len(self.tokenizer(prompt, **self.options)["input_ids"])
            if length <= self.limit:
                return prompt, len(contexts)
            if not contexts:
                limit = f"{self.limit}, the limit of GENERATOR or MAX_PROMPT_TOKENS"
                raise UserError(f"{question!r:.99} alone has {length} tokens, more than {limit}")
            contexts.pop()

    @torch.no_grad()
    def answers(self, prompts, temperature):
        """Returns [(answer, tokens read and written)]; equal prompts give equal samples."""
        reading = {"padding": True, "return_tensors": "pt", "return_token_type_ids": False, **self.options}
        inputs = self.tokenizer(list(prompts), **reading).to(DEVICE)
        options = {"max_new_tokens": MAX_NEW_TOKENS, "pad_token_id": self.tokenizer.pad_token_id}
        if temperature > 0:
            options |= {"do_sample": True, "temperature": temperature}
        torch.manual_seed(int(hashlib.sha1(repr(prompts).encode()).hexdigest(), 16) % 2**32)
        tokens = self.model.generate(**inputs, **options)
        written = tokens[:, 1 if self.is_seq2seq else inputs["input_ids"].shape[1] :]  # (prompts, new tokens)
        lengths = (written != self.tokenizer.pad_token_id).sum(1) + inputs["attention_mask"].sum(1)
        texts = self.tokenizer.batch_decode(written, skip_special_tokens=True)
        return [(text.strip().split("\n")[0].strip(), n) for text, n in zip(texts, lengths.tolist())]


class QASystem:
    """BM25, reranker and generator over one corpus [{"title", "text"}]."""

    def __init__(self, corpus):
        self.corpus = corpus
        words = [words_of(row["title"]) * TITLE_WEIGHT + words_of(row["text"]) for row in corpus]
        self.index = bm25s.BM25()
        self.index.index(words, show_progress=False)
        self.reranker = None
        if 1 in RERANKS:
            self.reranker = Trigrams(corpus) if RERANKER == "lexical" else CrossEncoder()
        self.generator = Generator()
        self.ranked = functools.lru_cache(1000)(self.ranked)  # all actions need the same

    def search(self, question, count):
        """Returns (paragraphs, scores) of the `count` best, best first; of equal ones the earlier. If no
        paragraph has a word of the question, all score 0."""
        scores = self.index.get_scores(words_of(question) or [""])
        order = np.argsort(-scores, kind="stable")[:count]
        return [self.corpus[i] for i in order], scores[order]

    def observe(self, question):
        """Returns the observation of a question, a list of E numbers."""
        paragraphs, scores = self.search(question, 20)
        return list(observe(question, scores, paragraphs, self.index.vocab_dict).values())

    def ranked(self, question, rerank):
        """Returns the question's paragraphs, best first, at least as many as the largest action may read."""
        paragraphs, _ = self.search(question, max(*TOP_KS, RERANK_DEPTH))
        if rerank:
            scores = self.reranker.scores(question, list(map(paragraph_text, paragraphs[:RERANK_DEPTH])))
            order = np.argsort(-scores, kind="stable")
            paragraphs[:RERANK_DEPTH] = [paragraphs[i] for i in order]
        return paragraphs


# ================================================================ questions and their answers


def texts_of(value):
    """Returns the texts of a field: one of a text or number, several of a list, none of a gap."""
    items = value if isinstance(value, list) else [value]
    texts = []
    for item in items:
        if isinstance(item, (list, dict, bytes)):
            raise ValueError(f"{item!r:.99} is no text or number")
        if isinstance(item, float) and item.is_integer():
            item = int(item)  # numbers of a column with gaps are floats
        text = "" if item is None else unicodedata.normalize("NFC", str(item))
        text.encode()  # fails for half of an emoji
        if text.strip() not in ("", "nan"):
            texts.append(text)
    return texts


def read_cell(text):
    """Returns the text of a csv cell, or the list that it has as JSON."""
    try:
        return json.loads(text) if text.startswith("[") else text
    except ValueError:
        raise ValueError(f"a cell with [ is a JSON list, and not {text!r:.99}") from None


def records_of(path):
    """Yields the records of a .jsonl (lines, or an array), .csv or .parquet file."""
    csv.field_size_limit(2**31 - 1)  # documents are longer than the default, 131,072
    if path.suffix == ".parquet":
        yield from pyarrow.parquet.read_table(path).to_pylist()
        return
    with open(path, encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".csv":
            yield from csv.DictReader(file, strict=True)  # strict: an open quote does not swallow the rest
            return
        text = file.read()
    if text.lstrip().startswith("["):
        yield from json.loads(text)
    else:
        yield from (json.loads(line) for line in text.split("\n") if line.strip())


def read_file(name, fields):
    """Returns the records of the file `name` in DATASET, {field: text, or texts of answer and gold}."""
    paths = [x for x in Path(DATASET).glob(f"{name}.*") if x.suffix in (".jsonl", ".csv", ".parquet")]
    if len(paths) != 1:
        raise UserError(f"DATASET = {DATASET!r} needs one of {name}.jsonl, {name}.csv and {name}.parquet")
    rows = []
    try:
        for record in records_of(paths[0]):
            if not isinstance(record, dict) or None in record:
                raise ValueError(f"this is no object, or has too many fields: {record!r:.99}")
            row = {}
            for field in fields:
                value = record.get(field)
                if paths[0].suffix == ".csv" and field in ("answer", "gold"):
                    value = read_cell(value or "")
                row[field] = texts_of(value)
                if not row[field] and field not in ("type", "gold"):
                    raise ValueError(f"no {field} in {record!r:.200}")
                if field not in ("answer", "gold"):
                    row[field] = " ".join(row[field])
            rows.append(row)
    except (ValueError, csv.Error) as error:
        raise UserError(f"{paths[0]}: record {len(rows) + 1}: {first_line(error)}") from None
    return rows


def load_questions():
    """Returns the questions {"question", "answer" (a text or a list of right ones), "type", "gold" (titles),
    "split"}, and the corpus {"title", "text"}. What stands there twice counts once."""
    corpus = {paragraph_text(row): row for row in read_file("corpus", ["title", "text"])}
    titles = set(column(corpus.values(), "title"))
    questions, repeated, unknown = {}, [], []
    forms = {"": {""}}  # {what EM and F1 compare: what their strict forms do}
    for row in read_file("questions", ["question", "type", "answer", "gold"]):
        unknown += sorted(set(row["gold"]) - titles)
        for gold in row["answer"]:
            form = forms.setdefault(rewards.normalise_answer(gold), set())
            form.add(rewards.normalise_answer(gold, strict=True))
        if len(row["answer"]) == 1:
            row["answer"] = row["answer"][0]
        key = " ".join(row["question"].casefold().split()).rstrip("? ")
        if questions.setdefault(key, row) is not row:  # in no two splits
            repeated.append(row["question"])
    confused = [sorted(form) for form in forms.values() if len(form) > 1 and not STRICT]
    warnings = {
        "questions stand there twice: the first counts": repeated,
        "gold titles are not in the corpus": unknown,
        "groups of gold answers are the same to EM and F1, but for STRICT=True": confused,
    }
    for text, examples in warnings.items():
        if examples:
            print(f"WARNING: {len(examples)} {text}, such as {examples[0]!r}", flush=True)
    rows = np.random.default_rng(SPLIT_SEED).permutation(list(questions.values()))[:SAMPLE]
    num_test = min(TEST_QUESTIONS, max(1, len(rows) * 4 // 15))
    num_validation = min(VALIDATION_QUESTIONS, max(1, len(rows) * 2 // 15))
    if len(rows) <= num_test + num_validation or not corpus:
        counts = f"{len(rows)} questions and {len(corpus)} paragraphs"
        raise UserError(f"DATASET = {DATASET!r} has {counts}: that is too few")
    splits = ["test"] * num_test + ["validation"] * num_validation + ["train"] * len(rows)
    for row, split in zip(rows, splits):
        row["split"] = split
    return sorted(rows, key=lambda row: row["question"]), list(corpus.values())  # blocks fit any SPLIT_SEED


def system_digest(qa):
    """Returns a text that changes with all that decides an answer: models, prompts, corpus, and code."""
    facts = [GENERATOR, RERANKER, DTYPE, PROMPT, PARAGRAPH, CHAT_TEMPLATE, MAX_PROMPT_TOKENS, MAX_NEW_TOKENS]
    facts += [TITLE_WEIGHT, RERANK_DEPTH, qa.corpus]
    facts += [torch.__version__, transformers.__version__, bm25s.__version__]
    facts += map(inspect.getsource, (words_of, paragraph_text, answer_block))
    for part in filter(None, (qa, qa.reranker, qa.generator)):
        facts += map(inspect.getsource, dict(inspect.getmembers(type(part), inspect.isfunction)).values())
        if hasattr(part, "model"):
            facts.append(getattr(part.model.config, "_commit_hash", None))  # of the hub; a folder has files
    for folder in filter(None, (GENERATOR, RERANKER)):
        for path in sorted(filter(Path.is_file, Path(folder).glob("*"))):
            with open(path, "rb") as file:
                facts.append([path.name, hashlib.file_digest(file, "sha1").hexdigest()])
    return hashlib.sha1(json.dumps(facts).encode()).hexdigest()


def answer_block(qa, questions, action):
    """Returns a record for each question (a text): top_k, temperature, rerank, titles (of what was read),
    response, tokens (read and written by the generator), pairs (read by the reranker)."""
    top_k, temperature, rerank = action
    paragraphs = [qa.ranked(question, rerank)[:top_k] for question in questions]
    prompts, num_read = zip(*map(qa.generator.prompt, questions, paragraphs))
    answers = qa.generator.answers(prompts, temperature)
    shared = dict(zip(("top_k", "temperature", "rerank"), action))
    shared["pairs"] = rerank * min(RERANK_DEPTH, len(qa.corpus))
    records = []
    for found, number, (text, tokens) in zip(paragraphs, num_read, answers):
        titles = column(found[:number], "title")
        records.append({**shared, "titles": titles, "response": text, "tokens": tokens})
    return records


def answer_all(questions, qa):
    """Returns the table of answers, a record for each question and action, in this order: the fields of the
    question, those of answer_block(), and recall, the fraction of gold titles that were read. Answers are
    kept in CACHE_DIR, a line for each action and QUESTIONS_AT_ONCE questions."""
    path = Path(CACHE_DIR) / f"{system_digest(qa)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {}  # {questions and an action, as text: records}
    table = []
    num_blind = 0
    for question in column(questions, "question"):
        qa.generator.prompt(question, [])  # refuses one that is too long before any is answered
        num_blind += not qa.search(question, 1)[1].any()
    if num_blind:
        print(f"WARNING: BM25 finds no paragraph for {num_blind} of {len(questions)} questions", flush=True)
    with open(path, "a+") as file:
        file.seek(0)
        for line in file:
            with suppress(ValueError):  # a line that was half written
                kept |= json.loads(line)
        starts = range(0, len(questions), QUESTIONS_AT_ONCE)
        for start in tqdm(starts, "Answering all questions", mininterval=5, file=sys.stdout):
            block = questions[start : start + QUESTIONS_AT_ONCE]
            texts = column(block, "question")
            answers = []  # (actions, questions)
            for action in all_actions():
                key = json.dumps([action, texts])
                if key not in kept:
                    kept[key] = answer_block(qa, texts, action)
                    file.write("\n" + json.dumps({key: kept[key]}))
                    file.flush()
                answers.append(kept[key])
            table += [row | record for row, records in zip(block, zip(*answers)) for record in records]
    num_cut = 0
    for record in table:
        record["recall"] = fraction_found(record["gold"], record["titles"]) if record["gold"] else math.nan
        num_cut += len(record["titles"]) < min(record["top_k"], len(qa.corpus))
    if num_cut:
        limit = f"{qa.generator.limit} tokens, the limit of GENERATOR or MAX_PROMPT_TOKENS"
        print(f"WARNING: {num_cut} of {len(table)} prompts lack paragraphs beyond {limit}", flush=True)
    return table


# ================================================================ the run's files


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
        """Prints what changed since the checkpoint that is resumed. Refuses a complete run that would end as
        if it had trained what changed."""
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
        if is_complete and changes:
            raise UserError(f"complete at step {state.step}, but {'; '.join(changes)}: {hint}")

    def move_old_files(self, state, target):
        """Moves what is later than the run's checkpoint, or all of an earlier run, to the folder `target`."""
        config = self.folder / "training_config.json"
        if not config.exists():
            return
        stale = list_checkpoints(self.folder)
        if self.checkpoint and self.checkpoint.resolve().parent == self.folder.resolve():
            stale = [path for path in stale if int(path.name[5:]) > state.step]
        else:
            state.log_sizes = {}
            names = "test.json table.jsonl best/policy training_config.json"
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


# The panels of ppo_rag_metrics_with_entropy.png; training_metrics_detailed.png has all metrics that vary
PANELS = "reward em f1 cost recall entropy top_k temperature rerank".split()


def draw_grid(folder, path, rules, names=None):
    """Draws a panel per metric: each training step faint, their rolling mean, the evaluations' points, and
    what the rules reach on the validation questions."""
    records = [json.loads(line) for line in (folder / "logs/metrics.jsonl").read_text().splitlines()]
    names = names or list(dict.fromkeys(itertools.chain(*records)))[2:]  # after phase and step
    names = [name for name in names if len({r.get(name) for r in records} - {None}) > 1]  # it varies
    lines = {}  # of the rules
    height = max(1, math.ceil(len(names) / 3))
    figure = Figure(figsize=(10, 2.3 * height + 0.8), layout="constrained")
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
        for i, rule in enumerate(rules):
            if name in rules[rule]:
                lines[rule] = axis.axhline(rules[rule][name], color=f"C{i + 2}", linestyle="--", linewidth=1)
    figure.suptitle("blue: training, each step and rolling mean; orange: held out; dashed: rules", fontsize=9)
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=len(rules), fontsize=8)
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
        "SAMPLE TEST_QUESTIONS VALIDATION_QUESTIONS RERANK_DEPTH MAX_PROMPT_TOKENS MAX_NEW_TOKENS "
        "QUESTIONS_AT_ONCE HIDDEN_SIZE N_STEPS BATCH_SIZE GROUP_EPOCHS KEEP_LAST_N_CHECKPOINTS"
    )
    rules = {
        "TOP_KS are whole numbers above 0": TOP_KS and all(type(k) is int and k > 0 for k in TOP_KS),
        "TEMPERATURES are 0 or above": TEMPERATURES and all(0 <= x < math.inf for x in TEMPERATURES),
        "RERANKS are 0 and, with a RERANKER, 1": RERANKS and set(RERANKS) <= {0, int(bool(RERANKER))},
        "DTYPE is float32 or bfloat16": DTYPE in ("float32", "bfloat16"),
        "CLIP_RANGE and MAX_GRAD_NORM are above 0": min(CLIP_RANGE, MAX_GRAD_NORM) > 0,
        "COST_TOKENS and COST_PAIRS are above 0": min(COST_TOKENS, COST_PAIRS) > 0,
        "FIXED_ACTION is None or one of the actions": FIXED_ACTION in (None, *all_actions()),
        "PROMPT contains {contexts} and {question}": "{contexts}" in PROMPT and "{question}" in PROMPT,
    }
    for rule, is_kept in rules.items():
        if not is_kept:
            raise UserError(f"a constant breaks a rule: {rule}")


def train_main():
    """Exit codes: 0; 2: the user can correct it; 130, 143: a signal; 1, with a traceback: other errors."""
    trainer = None
    try:
        apply_overrides(sys.argv[1:])
        trainer = RAGTrainer()
        trainer.train()
    except (UserError, OSError) as error:  # OSError: a file that cannot be read or written
        if trainer and not isinstance(error, UserError):
            raise  # a reward function's fault, or a full disk
        print(f"\n{Path(__file__).name}: {first_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # before the training; answers are kept
        sys.exit(130)
    if trainer.run.signal:
        sys.exit(128 + trainer.run.signal)


if __name__ == "__main__":
    train_main()
