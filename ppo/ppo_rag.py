"""PPO over retrieval, in one file: it chooses top_k, temperature and reranking for each question.

An episode has one step. The observation s describes the question and what BM25 finds for it. The action
a is one of TOP_KS x TEMPERATURES x RERANKS: how many paragraphs the generator gets, its temperature, and
whether a reranker sorts the paragraphs first. The reward r of the answer trains the policy (PPO, arXiv
1707.06347). With one step per episode there is no GAE and no bootstrapping:

    r   = EM_WEIGHT EM + F1_WEIGHT F1 + ROUGE_WEIGHT ROUGE-L - COST_WEIGHT cost
    A   = r - V(s), whitened over the episodes of the update
    rho = pi(a|s) / pi_old(a|s)
    L   = -mean min(rho A, clip(rho, 1 - CLIP_RANGE, 1 + CLIP_RANGE) A)
          + VALUE_LOSS_COEF mean 1/2 (V - r)^2 - ENTROPY_COEF mean H(pi)

Actor and critic are one network with two heads. Before training every question is answered under every
action, and the answers are kept in CACHE_DIR. So PPO trains in seconds, and simple rules are measured on
the same answers.

Shapes: Q = questions; A = actions; E = entries of an observation; episodes = questions with an action.

    python ppo/ppo_rag.py                 # edit the constants below, or give KEY=VALUE or @FILE
    python ppo/ppo_rag.py MAX_STEPS=0     # the table of all actions and the rules, without training

Writes table.jsonl (all answers), test.json, logs/, step_N/, best/policy/ and two pictures into
OUTPUT_DIR. A run that was stopped or killed continues from its last checkpoint, to the same bytes.

To change        see                                To change   see
the loss         policy_loss, optimizer_step        the data    load_questions, data/make_corpus.py
the reward       EM_WEIGHT ..., compute_rewards     a metric    compute_rewards, record, evaluate
the actions      TOP_KS, TEMPERATURES, RERANKS      a plot      PANELS, draw_grid
the observation  observe                            the system  Trigrams, CrossEncoder, Generator
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

ROOT = Path(__file__).resolve().parent
while not (ROOT / "rewards").is_dir():
    if ROOT.parent == ROOT:
        sys.exit(f"{__file__}: copy the folder rewards/ of the repository beside this file, or above it")
    ROOT = ROOT.parent
sys.path.insert(0, str(ROOT))
import rewards
from rewards import UserError

# ================================================================ constants

# Data: a folder with corpus {title, text} and questions {question, answer, gold, type}, each a .jsonl,
# .csv or .parquet file. An answer may be a list of right ones; gold (titles) and type may be missing
DATASET = f"{ROOT}/data/rag"
SAMPLE: int | None = None  # number of questions drawn from the data set; None: all
TEST_QUESTIONS = 400  # used once, at the end; at most 4/15 of the questions
VALIDATION_QUESTIONS = 200  # choose best/ and the size of the tree; at most 2/15 of the questions
SPLIT_SEED = 0  # of the drawn questions and the splits; SEED does not change them

# The system that answers. Models are folders or hub names
GENERATOR = f"{ROOT}/data/rag/reader"  # any seq2seq or causal model. This one knows only data/rag
RERANKER: str | None = "lexical"  # lexical: character trigrams | a cross-encoder with one label | None
TITLE_WEIGHT = 2  # how many times BM25 counts the words of a title
RERANK_DEPTH = 20  # number of BM25's best paragraphs that the reranker sorts
PROMPT = (
    "Answer ONLY with the correct answer, as a short phrase, based strictly on the provided CONTEXTS.\n"
    "CONTEXTS:\n{contexts}\nQUESTION: {question}\nANSWER:"
)
PARAGRAPH = "[{n}] {title}: {text}"
CHAT_TEMPLATE = True  # sends the prompt as a user's message, if the generator has a chat template
MAX_PROMPT_TOKENS = 4096  # paragraphs beyond this or the generator's own limit are left out
MAX_NEW_TOKENS = 16
DTYPE = "float32"  # float32 | bfloat16, of generator and reranker
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # or mps; of generator and reranker
QUESTIONS_AT_ONCE = 16  # prompts per batch of the generator
CACHE_DIR = f"{ROOT}/checkpoints/ppo_rag_cache"  # answers of earlier runs

# Actions: all combinations
TOP_KS = (1, 2, 4, 8)  # paragraphs that the generator gets
TEMPERATURES = (0.0, 0.7)  # 0: greedy
RERANKS = (0, 1)  # 1: the reranker sorts the RERANK_DEPTH best before the first top_k are taken
FIXED_ACTION: tuple | None = (4, 0.7, 0)  # a baseline: (top_k, temperature, rerank) for every question

# Reward
EM_WEIGHT = 1.0
F1_WEIGHT = 0.5
ROUGE_WEIGHT = 0.0
STRICT = False  # False: HotpotQA's EM and F1, to which -5 is 5, 3.5 is 35, C# is C++ | True: signs count
COST_WEIGHT = 0.05
COST_TOKENS = 100.0  # tokens of prompts and answers that cost 1
COST_PAIRS = 4.0  # pairs of question and paragraph, scored by the reranker, that cost 1

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
    """Returns the lower-case words and signs of a text, without punctuation: of "C++" c, + and +. In
    scripts without blanks, such as Chinese and Thai, characters and pairs of neighbours are words."""
    no_blanks = r"\p{Han}\p{Hiragana}\p{Katakana}ー\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
    patterns = [
        rf"([{no_blanks}]+)",
        rf"[[\p{{L}}\p{{M}}\p{{N}}]--[{no_blanks}]]+",  # letters, marks and digits of other scripts
        r"\p{S}",  # a sign
        r"(?<=\p{L})#",  # the sign of C#
    ]
    words = []
    text = unicodedata.normalize("NFKC", text).casefold()
    for match in regex.finditer("(?V1)" + "|".join(patterns), text):
        if match[1] is None:
            words.append(match[0])
        else:
            characters = regex.findall(r"\X", match[1])  # with their marks
            words += characters
            words += [first + second for first, second in itertools.pairwise(characters)]
    return words


def paragraph_text(paragraph):
    return f"{paragraph['title']}: {paragraph['text']}"


def fraction_found(items, collection):
    """Returns the fraction of the items that the collection contains; 0 if there are no items."""
    return sum(item in collection for item in items) / max(1, len(items))


def observe(question, scores, paragraphs, vocabulary):
    """Returns the observation, {name: number}, of a question's words and BM25's 20 best paragraphs."""
    words = words_of(question)
    s = np.zeros(20)  # scores, the highest first
    s[: len(scores)] = scores  # a small corpus has fewer paragraphs
    best_score = max(s[0], 1e-9)
    entries = {"words": len(words)}
    entries["unknown"] = 1 - fraction_found(words, vocabulary)  # words that no paragraph has
    # "or" often asks for a choice, "of" for a chain of facts
    for keyword in "who what when where which how of or and".split():
        entries[f"has_{keyword}"] = keyword in words
    verbs = "is are was were do does did has have had can could".split()
    entries["yes_no"] = len(words) > 0 and words[0] in verbs
    entries["s1"] = s[0]
    entries["s1_per_word"] = s[0] / max(1, len(words))
    for n in (2, 3, 4, 8, 20):
        entries[f"s{n}/s1"] = s[n - 1] / best_score
    entries["spread"] = s.std() / max(s.mean(), 1e-9)
    entries["near"] = (s >= 0.9 * best_score).sum()  # paragraphs with at least 0.9 of the highest score
    for n in (1, 2, 4):  # fraction of the question's words that are in the best n paragraphs
        texts = " ".join(map(paragraph_text, paragraphs[:n]))
        entries[f"overlap{n}"] = fraction_found(words, set(words_of(texts)))
    title = words_of(paragraphs[0]["title"])  # of the best paragraph
    entries["title"] = fraction_found(title, words)
    return entries


def all_actions():
    return list(itertools.product(TOP_KS, TEMPERATURES, RERANKS))


class Policy(torch.nn.Module):
    """Actor and critic: two shared layers, then one logit per action, and a value. Inputs are normalized
    by mean and standard deviation of the `observations` (questions, E)."""

    def __init__(self, observations, num_actions):
        super().__init__()
        self.register_buffer("mean", observations.mean(0))
        self.register_buffer("scale", observations.std(0, unbiased=False) + 1e-3)
        self.first = torch.nn.Linear(observations.shape[1], HIDDEN_SIZE)
        self.second = torch.nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)
        self.actor = torch.nn.Linear(HIDDEN_SIZE, num_actions)
        self.critic = torch.nn.Linear(HIDDEN_SIZE, 1)
        # With small weights of the actor all actions are at first about equally likely (2006.05990)
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
    """self.table has all answers, self.rewards (Q, A) their rewards, self.run the files. self.state is
    what a checkpoint holds beside policy and optimizer: you may add numbers, texts and lists."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        self.run = Run(resume_from_checkpoint or RESUME)
        self.actions = all_actions()
        self.action_names = [f"k={k} T={t} rerank={rerank}" for k, t, rerank in self.actions]
        self.questions, corpus = load_questions()
        self.qa = QASystem(corpus)
        self.table = answer_all(self.questions, self.qa)  # records, one per question and action
        columns = {name: column(self.table, name) for name in self.table[0]}
        self.metrics = {}  # {name: (Q, A)}
        for name, values in self.compute_rewards(columns).items():
            self.metrics[name] = values.float().view(-1, len(self.actions))
            for record, value in zip(self.table, values.tolist()):
                record.setdefault(name, value)
        self.rewards = self.metrics["reward"]
        self.run.facts["data"] = digest(self.table)
        observations = [self.qa.observe(question["question"]) for question in self.questions]
        self.observations = torch.tensor(observations, dtype=torch.float32)  # (Q, E)
        self.splits = {}  # {split: numbers of its questions}
        split_of_question = np.array(column(self.questions, "split"))
        for split in ("train", "validation", "test"):
            self.splits[split] = torch.tensor(np.flatnonzero(split_of_question == split))
        self.rules = self.fit_rules()  # {name: probabilities (Q, A)}
        validation = self.splits["validation"]
        self.rule_metrics = {name: self.measure(validation, rule) for name, rule in self.rules.items()}
        self.state = SimpleNamespace(
            step=0,  # the current step, counted from 1; between steps, how many are done
            trained_for=[self.action_names, len(self.splits["train"])],
            evaluation={},  # metrics of the last evaluation
            best_score=-math.inf,  # its policy is in best/
            log_sizes={},  # bytes of each log when the checkpoint was saved
            wandb_id=None,
        )
        self.seed_step()  # for the initial weights
        self.policy = Policy(self.observations[self.splits["train"]], len(self.actions))
        self.best = deepcopy(self.policy)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=LEARNING_RATE)
        if self.run.checkpoint:
            self.load_state(self.run.checkpoint)

    def compute_rewards(self, table):
        """Returns the reward of each answer, and other metrics, {name: (answers,)}. Edit or override
        freely. table: {column: list}, of the fields of questions and of answer_questions()."""
        texts = (table["question"], table["response"], table["answer"])
        form = "strict_" if STRICT else ""
        em = torch.tensor(rewards.find_function(f"{form}em")(*texts))
        f1 = torch.tensor(rewards.find_function(f"{form}f1")(*texts))
        tokens = torch.tensor(table["tokens"])
        pairs = torch.tensor(table["pairs"])
        cost = tokens / COST_TOKENS + pairs / COST_PAIRS
        reward = EM_WEIGHT * em + F1_WEIGHT * f1 - COST_WEIGHT * cost
        if ROUGE_WEIGHT:
            reward += ROUGE_WEIGHT * torch.tensor(rewards.rouge_l(*texts))
        if em.max() == 0:
            example = f"{table['response'][0]!r} for {table['answer'][0]!r}"
            print(f"WARNING: no answer is right, such as {example}: set GENERATOR or PROMPT", flush=True)
        metrics = {"reward": reward, "em": em, "f1": f1, "cost": cost}
        recall = torch.tensor(np.array(table["recall"], dtype=np.float32))  # None becomes NaN
        if not recall.isnan().all():
            metrics["recall"] = recall
        for name in ("top_k", "temperature", "rerank"):
            metrics[name] = torch.tensor(table[name])
        return {**metrics, "tokens": tokens, "pairs": pairs}

    def train(self):
        """Trains until the last step or a signal, then tests best/. Returns the last evaluation."""
        state = self.state
        self.run.open(state, state.step >= MAX_STEPS)  # opens the logs and catches signals
        with open(self.run.folder / "table.jsonl", "w") as file:
            for record in self.table:
                file.write(json.dumps(record) + "\n")
        texts = [f"{name} {metrics['reward']:.3f}" for name, metrics in self.rule_metrics.items()]
        self.run.log("rewards of simple rules on validation: " + "  ".join(texts))
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
        self.save()
        if not self.run.signal:
            self.test()
        self.run.close(state)
        return state.evaluation

    def seed_step(self):
        """Makes all random numbers of a step a function of its number: a checkpoint keeps none."""
        seed = (1_000_003 * SEED + self.state.step) % 2**32
        transformers.set_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def rollout(self):
        """Samples an action for each of N_STEPS training questions. Returns the batch of episodes:
        questions and actions (numbers), logprobs, values and rewards, all (episodes,)."""
        train = self.splits["train"]
        questions = train[torch.randperm(len(train), generator=self.generator)[:N_STEPS]]
        distribution, values = self.policy(self.observations[questions])  # (episodes, A), (episodes,)
        actions = torch.multinomial(distribution.exp(), 1, generator=self.generator).squeeze(1)
        batch = SimpleNamespace(questions=questions, actions=actions, values=values)
        batch.logprobs = distribution.gather(1, actions.unsqueeze(1)).squeeze(1)
        batch.rewards = self.rewards[questions, actions]
        return batch

    def compute_advantages(self, batch):
        """Adds A = r - V, whitened. An episode has one step, so its return is its reward."""
        advantages = batch.rewards - batch.values
        batch.advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)

    def update(self, batch):
        """Makes GROUP_EPOCHS passes of optimizer steps. Returns means of their metrics."""
        for group in self.optimizer.param_groups:  # in a resumed run it has the checkpoint's
            group["lr"] = LEARNING_RATE
        steps = []
        for _ in range(GROUP_EPOCHS):
            order = torch.randperm(len(batch.questions), generator=self.generator)
            for episodes in order.split(BATCH_SIZE):
                steps.append(self.optimizer_step(batch, episodes))
        metrics = {name: np.mean(column(steps, name)).item() for name in steps[0]}
        return {**metrics, "learning_rate": LEARNING_RATE}

    def optimizer_step(self, batch, episodes):
        """Makes one optimizer step on the episodes with these numbers. Returns its metrics."""
        old_logprobs = batch.logprobs[episodes]
        advantages = batch.advantages[episodes]
        distribution, values = self.policy(self.observations[batch.questions[episodes]])
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
        """Returns the simple rules, {name: probabilities (Q, A)}. best_fixed: the best action on the
        training questions; best_by_type: the best one for each question type; tree: see fit_tree();
        oracle: the best action of each question, which only its answers show."""
        train = self.splits["train"]
        types = np.array(column(self.questions, "type"))
        actions = {}  # {rule: the number of each question's action, (Q,)}
        if FIXED_ACTION:
            actions["fixed"] = torch.full((len(types),), self.actions.index(FIXED_ACTION))
        best_fixed = self.rewards[train].mean(0).argmax()
        actions["best_fixed"] = best_fixed.repeat(len(types))
        actions["best_by_type"] = best_fixed.repeat(len(types))  # of a type without training questions
        for name in np.unique(types[train]):
            is_type = torch.from_numpy(types == name)  # (Q,)
            of_type = train[is_type[train]]
            actions["best_by_type"][is_type] = self.rewards[of_type].mean(0).argmax()
        actions["tree"] = self.fit_tree()
        actions["oracle"] = self.rewards.argmax(1)
        rules = {"random": torch.full(self.rewards.shape, 1 / len(self.actions))}
        for name, chosen in actions.items():
            rules[name] = one_hot(chosen, len(self.actions)).float()
        return rules

    def fit_tree(self):
        """Returns each question's best action, (Q,), by a regression tree that predicts the rewards of
        all actions from the observation. Its number of leaves is chosen on validation."""
        train = self.splits["train"]
        validation = self.splits["validation"]
        highest = -math.inf
        for leaves in (2, 3, 4, 6, 8, 12, 16, 24, 32):
            tree = DecisionTreeRegressor(max_leaf_nodes=leaves, min_samples_leaf=5, random_state=0)
            tree.fit(self.observations[train].numpy(), self.rewards[train].numpy())
            predicted = tree.predict(self.observations.numpy()).reshape(self.rewards.shape)
            actions = torch.from_numpy(predicted.argmax(1))
            reward = self.rewards[validation, actions[validation]].mean()
            if reward > highest:
                highest = reward
                best_actions = actions
        return best_actions

    def measure(self, questions, probabilities):
        """Returns the means of all metrics over questions (numbers), if actions are drawn with
        probabilities (Q, A). Questions without gold paragraphs do not count for the recall."""
        means = {}
        for name, x in self.metrics.items():
            means[name] = (probabilities * x)[questions].sum(1).nanmean().item()
        return means

    @torch.no_grad()
    def choose(self, policy):
        """Returns the policy's likeliest action for each question, as probabilities (Q, A)."""
        return one_hot(policy(self.observations)[0].argmax(1), len(self.actions)).float()

    def evaluate(self):
        return self.measure(self.splits["validation"], self.choose(self.policy))

    def test(self):
        """Prints metrics of all actions, the rules and the policy of best/ on the test questions, and
        writes test.json. gain: the policy's reward minus that of the row; interval: half of its 95%
        interval; same: how often the policy takes the same action."""
        questions = self.splits["test"]
        best = self.choose(self.best)
        policies = {}  # {name: probabilities (Q, A)}
        for number, name in enumerate(self.action_names):
            policies[name] = torch.zeros_like(best)
            policies[name][:, number] = 1
        policies |= self.rules
        policies["policy"] = best
        figures = {}
        for name, probabilities in policies.items():
            gains = ((best - probabilities) * self.rewards)[questions].sum(1)
            figures[name] = self.measure(questions, probabilities)
            figures[name]["gain"] = gains.mean().item()
            figures[name]["interval"] = 1.96 * gains.std(correction=0).item() / len(questions) ** 0.5
            figures[name]["same"] = (best * probabilities)[questions].sum(1).mean().item()
        (self.run.folder / "test.json").write_text(json.dumps(figures, indent=1))
        header = "".join(f"{name:>9.8}" for name in figures["policy"])
        self.run.log(f"{len(questions):4} test questions{header}")
        for name, metrics in figures.items():
            self.run.log(f"{name:19}" + "".join(f"{x:9.3f}" for x in metrics.values()))

    @torch.no_grad()
    def answer(self, question):
        """Returns (answer, (top_k, temperature, rerank)) for a text. The policy of best/ chooses."""
        observation = torch.tensor([self.qa.observe(question)], dtype=torch.float32)
        logprobs, _ = self.best(observation)
        action = self.actions[int(logprobs.argmax())]
        records = answer_questions(self.qa, [question], action)
        return records[0]["response"], action

    def record(self, batch, metrics):
        """Logs and prints the metrics of a step, and logs some of its episodes."""
        step = self.state.step
        chosen = torch.zeros_like(self.rewards)  # probabilities (Q, A)
        chosen[batch.questions, batch.actions] = 1
        metrics |= self.measure(batch.questions, chosen)
        unexplained = (batch.rewards - batch.values).var() / batch.rewards.var().clamp(min=1e-8)
        metrics["explained_variance"] = 1 - unexplained.item()
        metrics["timesteps"] = step * len(batch.questions)
        self.run.write("metrics.jsonl", phase="train", step=step, **metrics)
        for question, action in zip(batch.questions[:LOG_SAMPLES].tolist(), batch.actions.tolist()):
            record = self.table[question * len(self.actions) + action]
            self.run.write("samples.jsonl", step=step, **record)
        printed = ("reward", "em", "f1", "cost", "policy_loss", "entropy", "explained_variance")
        texts = [f"{name} {metrics[name]:.3f}" for name in printed]
        self.run.log(f"step {step}/{MAX_STEPS}: " + "  ".join(texts))

    def log_evaluation(self, metrics):
        """Logs what evaluate() returned, and keeps the policy with the highest reward."""
        state = self.state
        state.evaluation = metrics
        self.run.write("metrics.jsonl", phase="eval", step=state.step, **metrics)
        texts = [f"{name} {x:.3f}" for name, x in metrics.items()]
        self.run.log(f"step {state.step}, validation: " + "  ".join(texts))
        if metrics["reward"] > state.best_score:
            state.best_score = metrics["reward"]
            self.best.load_state_dict(self.policy.state_dict())

    def save(self):
        """Writes step_N/ and best/, removes old checkpoints and draws the pictures."""
        folder = self.run.folder / f"step_{self.state.step}"
        self.run.checkpoint = folder  # if train() is called again, it resumes from here
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
            shutil.rmtree(old.rename(f"{old}.tmp"))  # after a kill the rest is no checkpoint
        draw_grid(self.run.folder, "training_metrics_detailed.png", self.rule_metrics)
        draw_grid(self.run.folder, "ppo_rag_metrics_with_entropy.png", self.rule_metrics, PANELS)

    def load_state(self, folder):
        saved = torch.load(folder / "training_state.pt", map_location="cpu", weights_only=True)
        if saved["state"]["trained_for"] != self.state.trained_for:
            raise UserError(f"{folder} was trained with other actions or questions: set RESUME=no")
        vars(self.state).update(saved["state"])
        for name in ("policy", "best", "optimizer"):
            getattr(self, name).load_state_dict(saved[name])


def column(rows, field):
    return [row[field] for row in rows]


# ================================================================ the system: replace any part of it


class Trigrams:
    """A reranker without a model: it compares character trigrams, weighted by their rarity in the
    corpus. So it finds old spellings and inflected words, which BM25 misses."""

    def __init__(self, corpus):
        options = {"analyzer": "char_wb", "ngram_range": (3, 3), "binary": True}
        self.vectorizer = TfidfVectorizer(preprocessor=lambda text: " ".join(words_of(text)), **options)
        self.vectorizer.fit(map(paragraph_text, corpus))

    def scores(self, question, texts):
        """Returns the question's cosine with each paragraph's text, (texts,)."""
        vectors = self.vectorizer.transform(texts)
        question_vector = self.vectorizer.transform([question])
        return (vectors @ question_vector.T).toarray()[:, 0]


class CrossEncoder:
    """A reranker that scores each pair of a question and a paragraph by a model."""

    def __init__(self):
        auto_class = transformers.AutoModelForSequenceClassification
        self.model = auto_class.from_pretrained(RERANKER, dtype=DTYPE).to(DEVICE)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(RERANKER, padding_side="right")
        config = self.model.config
        if config.num_labels != 1:
            raise UserError(f"RERANKER = {RERANKER!r} must have one label")
        positions = getattr(config, "max_position_embeddings", 10**9)
        if config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet"):
            positions -= 2  # their first two are not used
        self.max_length = min(self.tokenizer.model_max_length, positions)  # longer pairs are cut

    @torch.no_grad()
    def scores(self, question, texts):
        """Returns a score for each paragraph's text, (texts,)."""
        pairs = [(question, text) for text in texts]
        options = {"padding": True, "truncation": True, "max_length": self.max_length}
        inputs = self.tokenizer(pairs, **options, return_tensors="pt").to(DEVICE)
        return self.model(**inputs).logits[:, 0].float().cpu().numpy()


class Generator:
    """Short answers by any seq2seq or causal model of transformers."""

    def __init__(self):
        config = transformers.AutoConfig.from_pretrained(GENERATOR)
        self.is_seq2seq = config.is_encoder_decoder
        auto_class = transformers.AutoModelForCausalLM
        side = "left"
        if self.is_seq2seq:
            auto_class = transformers.AutoModelForSeq2SeqLM
            side = "right"
        self.model = auto_class.from_pretrained(GENERATOR, dtype=DTYPE).to(DEVICE)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(GENERATOR, padding_side=side)
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        # A chat template writes the special tokens itself
        self.is_chat = bool(CHAT_TEMPLATE and self.tokenizer.chat_template)
        positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 10**9
        self.limit = min(MAX_PROMPT_TOKENS, positions - MAX_NEW_TOKENS, self.tokenizer.model_max_length)
        # Without the model's own penalties, beams and filters a temperature means what it says
        own_config = self.model.generation_config.to_dict()
        ids = {name: x for name, x in own_config.items() if name.endswith("_token_id")}
        self.model.generation_config = transformers.GenerationConfig(**ids, top_k=0, top_p=1.0)

    def prompt(self, question, paragraphs):
        """Returns the prompt with as many of the paragraphs as fit, in order, and their number."""
        contexts = [PARAGRAPH.format(n=n, **paragraph) for n, paragraph in enumerate(paragraphs, 1)]
        while True:
            prompt = PROMPT.replace("{question}", question).replace("{contexts}", "\n".join(contexts))
            if self.is_chat:
                messages = [{"role": "user", "content": prompt}]
                options = {"tokenize": False, "add_generation_prompt": True}
                prompt = self.tokenizer.apply_chat_template(messages, **options)
            length = len(self.tokenizer(prompt, add_special_tokens=not self.is_chat)["input_ids"])
            if length <= self.limit:
                return prompt, len(contexts)
            if not contexts:
                limit = f"{self.limit}, the limit of GENERATOR or MAX_PROMPT_TOKENS"
                raise UserError(f"{question!r:.99} alone has {length} tokens, more than {limit}")
            contexts.pop()

    @torch.no_grad()
    def answers(self, prompts, temperature):
        """Returns [(answer, tokens of prompt and answer)]. Samples depend on nothing but the prompts."""
        options = {"padding": True, "return_tensors": "pt", "return_token_type_ids": False}
        inputs = self.tokenizer(prompts, add_special_tokens=not self.is_chat, **options).to(DEVICE)
        pad_id = self.tokenizer.pad_token_id
        options = {"max_new_tokens": MAX_NEW_TOKENS, "pad_token_id": pad_id}
        if temperature > 0:
            options |= {"do_sample": True, "temperature": temperature}
        hash_of_prompts = hashlib.sha1(repr(tuple(prompts)).encode()).hexdigest()
        torch.manual_seed(int(hash_of_prompts, 16) % 2**32)
        tokens = self.model.generate(**inputs, **options)
        # A seq2seq model begins with one start token, a causal model with the prompt
        start = 1 if self.is_seq2seq else inputs["input_ids"].shape[1]
        new_tokens = tokens[:, start:]  # (prompts, T)
        counts = (new_tokens != pad_id).sum(1) + inputs["attention_mask"].sum(1)
        texts = self.tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
        answers = [text.strip().split("\n")[0].strip() for text in texts]
        return list(zip(answers, counts.tolist()))


class QASystem:
    """BM25, reranker and generator over one corpus [{"title", "text"}]."""

    def __init__(self, corpus):
        self.corpus = corpus
        self.index = bm25s.BM25()
        words = [words_of(row["title"]) * TITLE_WEIGHT + words_of(row["text"]) for row in corpus]
        self.index.index(words, show_progress=False)
        self.reranker = None
        if 1 in RERANKS:
            self.reranker = Trigrams(corpus) if RERANKER == "lexical" else CrossEncoder()
        self.generator = Generator()
        self.ranked = functools.lru_cache(1000)(self.ranked)  # all actions need the same paragraphs

    def search(self, question, count):
        """Returns (paragraphs, scores) of the `count` best ones, best first. If no paragraph has a word
        of the question, all score 0."""
        scores = self.index.get_scores(words_of(question) or [""])
        order = np.argsort(-scores, kind="stable")[:count]
        return [self.corpus[i] for i in order], scores[order]

    def observe(self, question):
        """Returns the observation of a question, a list of E numbers."""
        paragraphs, scores = self.search(question, 20)
        return list(observe(question, scores, paragraphs, self.index.vocab_dict).values())

    def ranked(self, question, rerank):
        """Returns the question's paragraphs, best first, as many as the largest action takes or more."""
        paragraphs, _ = self.search(question, max(*TOP_KS, RERANK_DEPTH))
        if not rerank:
            return paragraphs
        candidates = paragraphs[:RERANK_DEPTH]
        scores = self.reranker.scores(question, list(map(paragraph_text, candidates)))
        order = np.argsort(-scores, kind="stable")
        return [candidates[i] for i in order] + paragraphs[RERANK_DEPTH:]


# ================================================================ questions and their answers


def texts_of(value):
    """Returns the texts of a field: one of a text or number, several of a list, none of a gap."""
    texts = []
    items = value if isinstance(value, list) else [value]
    for item in items:
        if isinstance(item, (list, dict, bytes)):
            raise ValueError(f"{item!r:.99} is no text or number")
        if isinstance(item, float) and item.is_integer():
            item = int(item)  # a column with gaps has floats for whole numbers
        if item is not None and str(item).strip() not in ("", "nan"):
            texts.append(unicodedata.normalize("NFC", str(item)))
    return texts


def read_cell(text):
    """Returns the text of a csv cell, or the list that it has as JSON."""
    try:
        return json.loads(text) if text.startswith("[") else text
    except ValueError:
        raise ValueError(f"a cell with [ is a JSON list, and not {text!r:.99}") from None


def records_of(path):
    """Yields the records of a .jsonl (lines, or an array), .csv or .parquet file."""
    if path.suffix == ".parquet":
        yield from pyarrow.parquet.read_table(path).to_pylist()
    elif path.suffix == ".csv":
        csv.field_size_limit(2**31 - 1)  # documents are longer than the default, 131,072
        with open(path, encoding="utf-8-sig", newline="") as file:
            # strict: otherwise an unclosed quote swallows the rest of the file
            yield from csv.DictReader(file, strict=True)
    else:
        text = path.read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            yield from json.loads(text)
            return
        for line in text.split("\n"):
            if line.strip():
                yield json.loads(line)


def read_file(name, fields):
    """Returns the records of the file `name` in DATASET, {field: text, or texts of answer and gold}."""
    names = [f"{name}.jsonl", f"{name}.csv", f"{name}.parquet"]
    paths = [Path(DATASET, name) for name in names if Path(DATASET, name).exists()]
    if len(paths) != 1:
        raise UserError(f"DATASET = {DATASET!r} needs one of {', '.join(names)}")
    path = paths[0]
    rows = []
    try:
        for record in records_of(path):
            if not isinstance(record, dict) or None in record:  # None: csv fields without a column
                raise ValueError(f"this is no object, or has too many fields: {record!r:.99}")
            row = {}
            for field in fields:
                value = record.get(field)
                if path.suffix == ".csv" and field in ("answer", "gold"):
                    value = read_cell(value or "")
                texts = texts_of(value)
                if not texts and field not in ("type", "gold"):
                    raise ValueError(f"no {field} in {record!r:.200}")
                row[field] = texts if field in ("answer", "gold") else " ".join(texts)
            rows.append(row)
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}: record {len(rows) + 1}: {first_line(error)}") from None
    return rows


def load_questions():
    """Returns the questions {"question", "answer" (a text or a list of right ones), "type", "gold"
    (titles), "split"}, and the corpus {"title", "text"}, both without repetitions."""
    corpus = {}
    for paragraph in read_file("corpus", ["title", "text"]):
        corpus[paragraph_text(paragraph)] = paragraph
    titles = set(column(corpus.values(), "title"))
    questions = {}
    repeated = []
    unknown = []
    for row in read_file("questions", ["question", "type", "answer", "gold"]):
        key = " ".join(row["question"].casefold().split()).rstrip("? ")
        if key in questions:  # it could be in two splits
            repeated.append(row["question"])
        questions.setdefault(key, row)
        unknown += sorted(set(row["gold"]) - titles)
    warn("questions stand there twice: the first counts", repeated)
    warn("gold titles are not in the corpus", unknown)
    if not STRICT:
        confused = confused_answers(itertools.chain(*column(questions.values(), "answer")))
        warn("groups of gold answers are the same to EM and F1, but for STRICT=True", confused)
    for row in questions.values():
        if len(row["answer"]) == 1:
            row["answer"] = row["answer"][0]

    rows = np.random.default_rng(SPLIT_SEED).permutation(list(questions.values()))[:SAMPLE]
    num_test = min(TEST_QUESTIONS, max(1, len(rows) * 4 // 15))
    num_validation = min(VALIDATION_QUESTIONS, max(1, len(rows) * 2 // 15))
    if len(rows) <= num_test + num_validation or not corpus:
        counts = f"{len(rows)} questions and {len(corpus)} paragraphs"
        raise UserError(f"DATASET = {DATASET!r} has {counts}: that is too few")
    for row in rows:
        row["split"] = "train"
    for row in rows[:num_test]:
        row["split"] = "test"
    for row in rows[num_test : num_test + num_validation]:
        row["split"] = "validation"
    # Sorted, so that kept answers can be used with another SPLIT_SEED
    return sorted(rows, key=lambda row: row["question"]), list(corpus.values())


def warn(text, examples):
    if examples:
        print(f"WARNING: {len(examples)} {text}, such as {examples[0]!r}", flush=True)


def confused_answers(golds):
    """Returns groups of gold answers that are one to EM and F1, but not to their strict forms."""
    groups = {"": {""}}  # {what EM and F1 compare: {what the strict forms compare}}
    for gold in golds:
        group = groups.setdefault(rewards.normalise_answer(gold), set())
        group.add(rewards.normalise_answer(gold, strict=True))
    return [sorted(group) for group in groups.values() if len(group) > 1]


def system_digest(qa):
    """Returns a text that changes with all that decides an answer: models, prompts, corpus, code."""
    facts = [GENERATOR, RERANKER, DTYPE, TITLE_WEIGHT, RERANK_DEPTH, qa.corpus]
    facts += [PROMPT, PARAGRAPH, CHAT_TEMPLATE, MAX_PROMPT_TOKENS, MAX_NEW_TOKENS]
    facts += [torch.__version__, transformers.__version__, bm25s.__version__]
    for function in (words_of, paragraph_text, answer_questions):
        facts.append(inspect.getsource(function))
    for component in (qa, qa.reranker, qa.generator):
        for _, method in inspect.getmembers(type(component), inspect.isfunction):
            facts.append(inspect.getsource(method))
        if hasattr(component, "model"):  # of the hub the commit, of a folder the files
            facts.append(getattr(component.model.config, "_commit_hash", None))
    for folder in (GENERATOR, str(RERANKER)):
        for path in sorted(Path(folder).glob("*")):
            if path.is_file():
                with open(path, "rb") as file:
                    facts.append([path.name, hashlib.file_digest(file, "sha1").hexdigest()])
    return hashlib.sha1(json.dumps(facts).encode()).hexdigest()


def answer_questions(qa, questions, action):
    """Returns a record for each question (a text): top_k, temperature, rerank; pairs, that the reranker
    scored; titles, of the paragraphs in the prompt; response; tokens, of prompt and response."""
    top_k, temperature, rerank = action
    num_pairs = rerank * min(RERANK_DEPTH, len(qa.corpus))
    prompts = []
    records = []
    for question in questions:
        paragraphs = qa.ranked(question, rerank)[:top_k]
        prompt, num_paragraphs = qa.generator.prompt(question, paragraphs)
        prompts.append(prompt)
        record = {"top_k": top_k, "temperature": temperature, "rerank": rerank, "pairs": num_pairs}
        record["titles"] = column(paragraphs[:num_paragraphs], "title")
        records.append(record)
    for record, (text, tokens) in zip(records, qa.generator.answers(prompts, temperature)):
        record["response"] = text
        record["tokens"] = tokens
    return records


def answer_all(questions, qa):
    """Returns the table of answers, a record for each question and action, in this order: the fields of
    the question, those of answer_questions(), and recall, the fraction of gold titles in the prompt.
    Answers are kept in CACHE_DIR, a line for each action and QUESTIONS_AT_ONCE questions."""
    for question in column(questions, "question"):
        qa.generator.prompt(question, [])  # refuses one that is too long before any is answered
    path = Path(CACHE_DIR) / f"{system_digest(qa)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {}  # {questions and an action, as text: records}
    table = []
    with open(path, "a+") as file:
        file.seek(0)
        for line in file:
            with suppress(ValueError):  # a line that was half written
                kept |= json.loads(line)
        starts = range(0, len(questions), QUESTIONS_AT_ONCE)
        for start in tqdm(starts, "Answering all questions", mininterval=5, file=sys.stdout):
            together = questions[start : start + QUESTIONS_AT_ONCE]
            texts = column(together, "question")
            by_action = []
            for action in all_actions():
                key = json.dumps([action, texts])
                if key not in kept:
                    kept[key] = answer_questions(qa, texts, action)
                    file.write("\n" + json.dumps({key: kept[key]}))
                    file.flush()
                by_action.append(kept[key])
            for number, question in enumerate(together):
                table += [{**question, **records[number]} for records in by_action]
    num_cut = 0
    for record in table:
        record["recall"] = None
        if record["gold"]:
            record["recall"] = fraction_found(record["gold"], record["titles"])
        num_cut += len(record["titles"]) < min(record["top_k"], len(qa.corpus))
    if num_cut:
        limit = f"{qa.generator.limit} tokens, the limit of GENERATOR or MAX_PROMPT_TOKENS"
        print(f"WARNING: {num_cut} of {len(table)} prompts lack paragraphs beyond {limit}", flush=True)
    return table


# ================================================================ the run's files


class Run:
    """The files of one run in OUTPUT_DIR, and the signals that end the run."""

    def __init__(self, resume):
        self.folder = Path(OUTPUT_DIR).absolute()  # a program may change the working directory
        self.logs = {}
        self.wandb = None
        self.signal = 0
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.lock = filelock.FileLock(f"{self.folder}.lock", is_singleton=True)
        program = os.path.abspath(sys.argv[0])
        self.facts = {"file": __file__, "program": program, "torch": torch.__version__}
        files = [Path(path) for path in (__file__, program, rewards.__file__) if Path(path).is_file()]
        self.facts["text"] = digest(sorted({file.read_bytes() for file in files}))
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
        """Opens the logs and catches signals. A resumed run cuts the logs back to its checkpoint."""
        self.outcome = "Nothing was left to do: complete" if is_complete else "Done"
        self.handlers = {}  # {signal: its handler before}
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
        self.text_log = open(self.folder / f"logs/training_{now}.log", "a", buffering=1)
        for name in ("metrics.jsonl", "samples.jsonl"):
            file = open(self.folder / "logs" / name, "a", buffering=1)
            file.truncate(min(file.tell(), state.log_sizes.get(name, 0)))
            self.logs[name] = file
        config = self.folder / "training_config.json"
        facts = {**self.facts, "constants": constants()}
        config.with_suffix(".tmp").write_text(json.dumps(facts, indent=1))
        config.with_suffix(".tmp").rename(config)
        if USE_WANDB:
            import wandb  # slow

            options = {"id": state.wandb_id, "resume": "allow"}
            self.wandb = wandb.init(dir=self.folder, config=constants(), **options)
            state.wandb_id = self.wandb.id

    def compare(self, state, is_complete):
        """Prints what changed since the checkpoint that is resumed. Refuses a complete run that would
        end as if it had trained what changed."""
        if not self.checkpoint:
            return
        earlier = json.loads((self.checkpoint / "run.json").read_text())
        changes = []
        for name, value in constants().items():
            is_free = name in ("RESUME", "OUTPUT_DIR")
            if not is_free and earlier["constants"].get(name, value) != value:
                changes.append(f"{name}={value!r}")
        print("Constants that changed: " + (", ".join(changes) or "none"), flush=True)
        for name, fact in (("file", "text"), ("data", "data")):
            if earlier[fact] != self.facts[fact]:
                changes.append(f"the {name} changed since step {state.step}")
                print(changes[-1], flush=True)
        if is_complete and changes:
            hint = "RESUME=no or another OUTPUT_DIR begins another run"
            raise UserError(f"complete at step {state.step}, but {'; '.join(changes)}: {hint}")

    def move_old_files(self, state, target):
        """Moves files later than the resumed checkpoint, or all of an earlier run, to `target`."""
        config = self.folder / "training_config.json"
        if not config.exists():
            return
        stale = list_checkpoints(self.folder)
        if self.checkpoint and self.checkpoint.resolve().parent == self.folder.resolve():
            stale = [path for path in stale if int(path.name.removeprefix("step_")) > state.step]
        else:
            state.log_sizes = {}
            names = "test.json table.jsonl best/policy"
            for pattern in f"logs/*.jsonl logs/training_*.log *_metrics_*.png {names}".split():
                stale += self.folder.glob(pattern)
            stale.append(config)  # moved last: a start that does not find it moves nothing
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
        if number.isdecimal():  # not step_N.tmp
            folders[int(number)] = path.parent
    return [folders[number] for number in sorted(folders)]


def choose_checkpoint(folder, resume):
    """Returns the checkpoint to resume from, or None. Asks at a terminal if resume is "ask"."""
    checkpoints = list_checkpoints(folder)
    if resume not in ("ask", "yes", "no"):
        checkpoints = list_checkpoints(resume) or [Path(resume)]
        if not (checkpoints[-1] / "training_state.pt").exists():
            raise UserError(f"RESUME = {resume!r} is not ask, yes, no or a checkpoint's or run's folder")
    if resume == "yes" and not checkpoints:
        print(f"RESUME=yes: {folder} has no checkpoint, so a new run begins", flush=True)
    if resume == "no" or not checkpoints:
        return None
    print(f"Found checkpoint: {checkpoints[-1]}", flush=True)
    is_terminal = sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()
    if resume == "ask" and is_terminal:
        answer = input("Resume training from it? (y/n): ")
        if not answer.lower().startswith("y"):
            return None
    return checkpoints[-1]


def digest(items):
    """Returns the number of items and the beginning of a hash of them, as a text."""
    total = hashlib.sha256()
    for item in items:
        total.update(repr(item).encode())
    return f"{len(items)} {total.hexdigest()[:12]}"


@contextmanager
def atomic_folder(path):
    """Yields a folder to fill, which is then renamed to `path`: it is there whole or not at all."""
    tmp = path.with_name(path.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    yield tmp
    for file in [*tmp.rglob("*"), tmp]:  # the contents must be on the disk before the name is
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    shutil.rmtree(path, ignore_errors=True)
    tmp.rename(path)


# The panels of ppo_rag_metrics_with_entropy.png; training_metrics_detailed.png has all metrics that vary
PANELS = ["reward", "em", "f1", "cost", "recall", "entropy", "top_k", "temperature", "rerank"]


def draw_grid(folder, path, rules, names=None):
    """Draws a panel for each metric that varies. A step of training is a faint point around the rolling
    mean, an evaluation a point, a rule {name: metrics} a dashed line."""
    curves = {}  # {(phase, metric): ([steps], [values])}
    distinct_values = {}  # {metric: set}
    for line in (folder / "logs/metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if name not in ("phase", "step") and value is not None:
                steps, values = curves.setdefault((record["phase"], name), ([], []))
                steps.append(record["step"])
                values.append(value)
                distinct_values.setdefault(name, set()).add(value)
    panels = [name for name in names or distinct_values if len(distinct_values.get(name, ())) > 1]
    height = max(1, math.ceil(len(panels) / 3))
    figure = Figure(figsize=(10, 2.3 * height + 0.8), layout="constrained")
    legend = {}  # {label: line}
    for number, name in enumerate(panels, 1):
        axis = figure.add_subplot(height, 3, number, title=name, xlabel="update")
        axis.grid(alpha=0.3)
        if ("train", name) in curves:
            steps, values = curves["train", name]
            window = max(1, len(values) // 12)
            rolling_means = np.convolve(values, np.full(window, 1 / window), "valid")
            axis.plot(steps, values, ".", color="C0", alpha=0.3, markersize=3)
            line = axis.plot(steps[window - 1 :], rolling_means, color="C0")[0]
            legend["training, sampled actions (rolling mean)"] = line
        if ("eval", name) in curves:
            steps, values = curves["eval", name]
            line = axis.plot(steps, values, "o-", color="C1", markersize=4)[0]
            legend["validation, likeliest actions"] = line
        for color, (rule, metrics) in enumerate(rules.items(), 2):
            if name in metrics:
                line = axis.axhline(metrics[name], color=f"C{color}", linestyle="--", linewidth=1)
                legend[f"{rule}, validation"] = line
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(folder / path, dpi=110)


# ================================================================ command line


def first_line(error):
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def constants():
    """Returns every constant of this file by name, as JSON has it."""
    values = {name: x for name, x in globals().items() if name.isupper()}
    del values["ROOT"], values["PANELS"]
    text = json.dumps(values)
    return json.loads(text.replace(json.dumps(str(ROOT))[1:-1], "{ROOT}"))  # the repository may be moved


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
    """Sets constants from KEY=VALUE arguments, or @FILE with one on each line, in their types."""
    for argument in arguments:
        if argument.startswith("@"):
            apply_overrides(read_constants(argument[1:]))
            continue
        key, _, text = argument.partition("=")
        if key not in constants():
            near = difflib.get_close_matches(key.upper(), constants(), 1, 0.0)[0]
            raise UserError(f"{argument!r} is not KEY=VALUE with a constant, such as {near}")
        wanted = __annotations__.get(key, type(globals()[key]))  # a type such as int, or int | None
        value = os.path.expanduser(text)
        value = re.sub(r"(?<!\\)\\n", "\n", value).replace(r"\\n", r"\n")  # \n is a line break, \\n is \n
        value = value.replace("{file}", Path(sys.argv[0]).stem)
        if not isinstance(value, wanted) or text == "None":
            with suppress(ValueError, SyntaxError):
                value = ast.literal_eval(text)
        accepts_float = isinstance(0.0, wanted)
        if type(value) is int and accepts_float:
            value = float(value)
        if not isinstance(value, wanted):
            raise UserError(f"{argument}: {key} takes a value such as {globals()[key]!r}")
        globals()[key] = value


def require(is_kept, rule):
    if not is_kept:
        raise UserError(f"a constant breaks a rule: {rule}")


def check_constants():
    """Refuses values that would fail silently or late."""
    counts = (
        "SAMPLE TEST_QUESTIONS VALIDATION_QUESTIONS RERANK_DEPTH MAX_PROMPT_TOKENS MAX_NEW_TOKENS "
        "QUESTIONS_AT_ONCE HIDDEN_SIZE N_STEPS BATCH_SIZE GROUP_EPOCHS KEEP_LAST_N_CHECKPOINTS"
    )
    for name, value in constants().items():
        if type(value) in (int, float):
            lowest = 1 if name in counts.split() else 0
            require(value >= lowest, f"{name} = {value!r} is below {lowest}, or no number")
    for name in ("CLIP_RANGE", "MAX_GRAD_NORM", "COST_TOKENS", "COST_PAIRS"):
        require(globals()[name] > 0, f"{name} is above 0")
    are_counts = len(TOP_KS) > 0 and all(type(k) is int and k > 0 for k in TOP_KS)
    require(are_counts, "TOP_KS are whole numbers above 0")
    require(len(TEMPERATURES) > 0 and min(TEMPERATURES) >= 0, "TEMPERATURES are 0 or above")
    known = {0, 1} if RERANKER else {0}
    require(len(RERANKS) > 0 and set(RERANKS) <= known, "RERANKS are 0 and, with a RERANKER, 1")
    require(DTYPE in ("float32", "bfloat16"), "DTYPE is float32 or bfloat16")
    is_action = FIXED_ACTION is None or FIXED_ACTION in all_actions()
    require(is_action, "FIXED_ACTION is None or one of the actions")
    is_prompt = "{contexts}" in PROMPT and "{question}" in PROMPT
    require(is_prompt, "PROMPT contains {contexts} and {question}")


def train_main():
    """Exit codes: 0; 2: the user can correct it; 130, 143: a signal; 1, with a traceback: all else."""
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
