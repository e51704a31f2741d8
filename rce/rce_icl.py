"""RCE, then GRPO, for choosing demonstrations: a pointer network picks the examples a frozen reader sees.

For a query x it chooses SHOTS demonstrations d_1 .. d_S out of a pool, in order, so that a reader that sees
them answers x best. A pointer network (Vinyals et al. 2015, arXiv 1506.03134) chooses one after the other, by
a rule, similarity, a classifier p of answers, and a learnt reading of the candidate's answer a_j:

    h_1 = MLP(x)   k_j = a_j projected   h_{t+1} = g h_t + (1 - g) k_{d_t},   g = sigmoid(W [h_t; k_{d_t}])
    score of j = u cos(x, j) + c log p(a_j | x) + v cos(h_t, k_j) + b [the rule shows j next]
               + s_j (w + z cos(x, j))               s_j = a_j's share of the similarity that is shown already
    pi(j | d_<t, x) = softmax_j score / POINTER_TEMPERATURE
    u to z are four sets: of the first or a later choice, which is the list's last or not.
    At the start b outweighs u and the others are 0: the policy is the rule, the best on validation of
    similarity, nearest neighbours, the classifier, and the classifier with fillers.

    1. mine      lists from the policy's beams and samples, from retrieval and at random; members of the best
                 by gt_prob (the probability the reader gives to the gold answers) are asked alone, the right
                 ones begin new lists; the best and a few others are then answered and marked
    2. check up  what they are worth; tools/check_up.py has a verdict
    3. RCE       w_i = exp(r_i / TAU) / sum_j exp(r_j / TAU)
                 L = mean over queries of sum_i w_i * -log pi(d^i | x)
    4. GRPO      (GRPO_EPOCHS > 0) A = (r - mean) / deviation, once, within a query's lists; rho = pi / pi_old
                 L = -mean min(rho A, clip(rho, 1 -+ CLIP_RANGE) A) + KL_COEF KL(pi || pi_RCE)

Deviations from the source (Lever-Plus v3), whose documents report that GRPO hurt what RCE had reached:
- pi_old is what GRPO starts from, not the policy that mined before RCE; no dropout in either;
- every list counts, none is picked before rewards are normalised, and they are so once, not twice;
- RCE weighs raw rewards; the policy that mines is the policy that is trained, its state update included;
- the policy weighs similarity and a classifier, by queries that the network is not trained on (stacking);
- mined lists are recombined ("local"); best/ leaves the rule for a clear gain. More: docs/reference-icl.md.

    python rce/rce_icl.py GRPO_EPOCHS=2 ON_POLICY=True   # edit the constants below, or: KEY=VALUE, @FILE
    python rce/rce_icl.py STAGE=mine, then python tools/check_up.py checkpoints/rce_icl, then STAGE=train
    python rce/rce_icl.py STAGE=evaluate                 # best/ on EVAL_DATASET's or the test's questions
    python rce/rce_icl.py READER=Qwen/Qwen2.5-0.5B-Instruct EMBEDDING=sentence-transformers/all-MiniLM-L6-v2

Writes into OUTPUT_DIR: embeddings_<digest>.npz, candidates.json, test_candidates_*.json, rce/policy/ (where
GRPO follows), best/policy/, eval_test.json, logs/, step_N/, pictures. docs/reference-icl.md defines metrics.

To change      see
the losses     rce_loss, grpo_loss, update           the reader     READER; load_reader, VoteReader
the network    Pointer                               the embedding  EMBEDDING; make_embedder
the reward     REWARD_MODE; shaped_rewards           the data       TRAIN_DATASET; load_examples
what is mined  propose, recombine, choose_kept       a plot         self.run.panels; draw_results
the rules      choose_rules, Corpus.rule_order       the test       test_policies, policy_scores
"""

import ast
import csv
import difflib
import hashlib
import inspect
import io
import json
import math
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
from collections import Counter, defaultdict
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import cache, lru_cache, partial
from itertools import chain, starmap, zip_longest
from operator import attrgetter, index, itemgetter
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
from torch.nn.functional import normalize, pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only
from tqdm import tqdm
from transformers import PreTrainedModel, PretrainedConfig

ROOT = next((p for p in Path(__file__).resolve().parents if (p / "rewards").is_dir()), None)
if ROOT is None:
    sys.exit("rce_icl.py needs the folder rewards/ beside it or above it: copy it from the repository")
sys.path.insert(0, str(ROOT))
import rewards

# ================================================================ constants

STAGE = "all"  # all | mine | train | evaluate (EVALUATE_POLICY on EVAL_DATASET)
EVALUATE_POLICY = "best"  # best, or step_N, of OUTPUT_DIR; or the folder of a policy of this program
CANDIDATES: str | None = None  # a JSON file of candidates (also the source's), instead of mining

# Data: {"path", "type": "csv" | "jsonl" | "parquet" | "hub", "input", "output"}, perhaps "image" (a column of
# paths) and "vectors" (a .npy file of an array with one vector per row, instead of EMBEDDING's). The output
# is a gold answer or a list of them, which GOLDS says how to read
TRAIN_DATASET = {"path": f"{ROOT}/data/banking77/train.csv", "type": "csv"}
TRAIN_DATASET |= {"input": "text", "output": "category"}
# None: a fifth of TRAIN_DATASET, at most TEST_QUERIES or 1,000, is held out
TEST_DATASET: dict | None = {**TRAIN_DATASET, "path": f"{ROOT}/data/banking77/test.csv"}
EVAL_DATASET: dict | None = None  # for STAGE=evaluate: its rows are the queries; None: the test's
GOLDS = "aliases"  # aliases: the best of a list counts | annotators: one answer per person, as in VQA
VALIDATION_QUERIES = 400  # of the training rows: not trained on; demonstrations only where CANDIDATES is set
TEST_QUERIES: int | None = None  # use only the first N rows of TEST_DATASET; None: all
SPLIT_SEED = 0  # which rows validate, and the pools of validation and test, whatever SEED is

# "tfidf": truncated SVD of TF-IDF of the demonstrations; or the folder or hub name of a sentence model, or of
# CLIP or SigLIP, which read images, too
EMBEDDING = "tfidf"
IMAGE_VECTORS = "both"  # of CLIP and SigLIP: both (one after the other) | mean | text | image
EMBEDDING_SIZE = 400  # of tfidf
EMBED_ANSWERS = True  # the network reads a candidate's answer; False: its text

# Reader: "votes" (class prior and votes by similarity), or a folder or hub name of a causal language model or
# of an image-text-to-text model, which sees the images of the data
READER = "votes"
PRIOR_STRENGTH = 0.2  # votes: weight of the class prior; a demonstration of similarity 1 has weight 1
INSTRUCTION: str | None = None  # what a language model reads first
DEMONSTRATION = "Question: {text}\nAnswer: {answer}\n\n"
QUERY = "Question: {text}\nAnswer:"
CHAT_TEMPLATE = True  # use the language model's chat template if it has one; False: plain text
MAX_ANSWER_TOKENS = 16
READER_BATCH_SIZE = 16  # prompts that a language model reads at once
MAX_IMAGE_PIXELS = 512 * 512  # of an image-text model's images: larger ones are made smaller
DTYPE = "float32"  # float32 | bfloat16, of hub models
DEVICE = "auto"  # auto | cpu | cuda | cuda:1 | mps

# Mining
SHOTS = 4  # demonstrations per list; evaluation also takes a list's first 1, 2, ...
POOL = "random"  # a query's candidates: random | similarity (the most similar ones)
POOL_SIZE = 256
MINE_QUERIES: int | None = None  # None: all training queries
BEAMS = 5  # of the policy's beam search
SAMPLES = 4  # sampled lists per temperature of SAMPLE_TEMPERATURES
SAMPLE_TEMPERATURES = [0.5, 1.0, 2.0]
RETRIEVED = 4  # lists cut from the ranking by similarity; from the rule's as many, forwards and backwards
RANDOM = 64  # lists cut from permutations of the pool, so that each candidate is tried
LOCAL_TOP = 6  # number of best lists by gt_prob whose members are asked alone
LOCAL = 24  # number of lists that begin with members that are right alone and end at random; 0: none
KEEP_TOP = 6  # number of best lists by gt_prob that are answered and kept
KEEP_RANDOM = 2  # number of other lists that are answered and kept
MINE_BATCH_SIZE = 100  # queries mined together; a run that is killed loses at most these

# Reward
REWARD_MODE = "hard_plus_gtprob_separated"  # one of the modes below: what r is made of
HARD_WEIGHT = 1.0  # multiplies the mode's hard mark, 1 (right) or 0 (wrong)
SOFT_WEIGHT = 1.0  # multiplies the mode's graded part: soft (the accuracy) or gt_prob
# Score of REWARD_MODE = hybrid. infoscore: log gt_prob, what a list adds to the log-probability of the golds,
# but for a number that is the same for all lists of a query
HYBRID_MIX_SCORE = "logprob"  # logprob | beam_score | infoscore
HYBRID_ALPHA = 0.5  # 0 to 1: hybrid's weight of the scaled score; that of hard is 1 - HYBRID_ALPHA
SKIP_FALLBACK = False  # leave out lists of the source's files that its fallback metric marked

# Network
POINTER_POLICY: str | None = None  # a policy/ of an earlier run, which mines and is trained; None: a new one
HIDDEN_SIZE = 64
LAYERS = 0  # of cross-attention from the query to its pool
HEADS = 4
POINTER_TEMPERATURE = 0.1  # > 0
DROPOUT = 0.3  # 0 to 0.9, in RCE alone
CLASSIFIER_C = 10.0  # of the logistic regression of answers on vectors that the policy reads; 0: none
WEIGHT_QUERIES = 0.1  # 0 to 1: the share of queries that train the terms' weights, and not the network

# RCE
RCE_EPOCHS = 5
BATCH_SIZE = 32  # queries per optimizer step
TAU = 0.5  # > 0; small: only the best lists count, large: all count the same
TAU_END: float | None = None  # TAU moves there by equal factors over the epochs; None: constant
WEIGHT_REWARDS = "raw"  # raw | zscore (within the query)
LEARNING_RATE = 3e-3
MAX_GRAD_NORM = 1.0  # > 0
WEIGHT_DECAY = 0.01
USE_LR_SCHEDULER = True
LR_SCHEDULER_TYPE = "linear"  # linear | cosine (towards 0 after the stage's last step) | plateau (halves)
PLATEAU_PATIENCE = 2  # evaluations without a better pick before plateau halves
WARMUP_STEPS = 0

# GRPO
GRPO_EPOCHS = 0  # RCE alone is a result
ON_POLICY = False  # True: sample lists in each step and ask the reader; False: the mined lists
GROUP_SIZE = 16  # sampled lists per query (ON_POLICY)
GRPO_LEARNING_RATE = 1e-4
CLIP_RANGE = 0.2  # > 0
KL_COEF = 0.1  # penalty per nat of KL per choice, to the policy that GRPO starts from
KL_TARGET: float | None = 0.02  # nats per choice; adapts KL_COEF (arXiv 1909.08593, section 2.2)
FREEZE = True  # train only attention, norms, gate and weights of terms

# Evaluation
EVAL_SHOTS = (1, 2, 3, 4)
PICK_BEAMS = 1  # beams of the policy in evaluation, test and select(); 1: greedy
TEST_ORACLE: bool | int = True  # mine lists for the test queries, or the first N of them; False: no oracle

# Bookkeeping
SAVE_EVERY_N_STEPS = 200  # 0: only before mining and after each stage
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 160  # 0: only before the first and after the last step of each stage
EARLY_STOPPING_PATIENCE = 0  # evaluations without a better pick before the run ends; 0: never
EARLY_STOPPING_THRESHOLD = 0.0  # smallest gain that resets patience; best/ keeps the highest clear_gain
LOG_SAMPLES = 4  # lists per step written to samples.jsonl
RESUME = "ask"  # ask (yes without a terminal) | yes | no | path of a checkpoint or a run
OUTPUT_DIR = f"{ROOT}/checkpoints/rce_icl"
SEED = 1
USE_WANDB = False
WANDB_PROJECT = "hackable-rlhf"

_MODES = (
    "hard_only soft_only hard_plus_soft hard_plus_soft_v2 separated hard_plus_gtprob "
    "hard_plus_gtprob_separated hybrid hard_plus_gtprob_plus_rel"
).split()
_VALID_RANGES = {  # least and greatest value of each number, or the words that a constant takes
    "VALIDATION_QUERIES TEST_QUERIES EMBEDDING_SIZE MAX_ANSWER_TOKENS READER_BATCH_SIZE SHOTS": (1, 1e12),
    "MAX_IMAGE_PIXELS": (1, 1e12),
    "POOL_SIZE MINE_QUERIES KEEP_TOP MINE_BATCH_SIZE HIDDEN_SIZE HEADS RCE_EPOCHS BATCH_SIZE": (1, 1e12),
    "PLATEAU_PATIENCE KEEP_LAST_N_CHECKPOINTS": (1, 1e12),
    "GROUP_SIZE": (2, 1e12),
    "BEAMS SAMPLES RETRIEVED RANDOM LOCAL_TOP LOCAL KEEP_RANDOM LAYERS GRPO_EPOCHS": (0, 1e12),
    "WARMUP_STEPS SAVE_EVERY_N_STEPS EVAL_EVERY_N_STEPS EARLY_STOPPING_PATIENCE LOG_SAMPLES": (0, 2**62),
    "SPLIT_SEED SEED": (0, 2**62),
    "PICK_BEAMS": (1, 1e12),
    "TEST_ORACLE": (0, 1e12),
    "LEARNING_RATE GRPO_LEARNING_RATE WEIGHT_DECAY KL_COEF EARLY_STOPPING_THRESHOLD": (0, 1e6),
    "HARD_WEIGHT SOFT_WEIGHT CLASSIFIER_C": (0, 1e6),
    "PRIOR_STRENGTH TAU TAU_END KL_TARGET CLIP_RANGE POINTER_TEMPERATURE": (1e-6, 1e6),
    "DROPOUT": (0, 0.9),
    "WEIGHT_QUERIES": (1e-6, 1),
    "HYBRID_ALPHA": (0, 1),
    "MAX_GRAD_NORM": (1e-12, 1e12),
    "STAGE": ["all", "mine", "train", "evaluate"],
    "GOLDS": ["aliases", "annotators"],
    "IMAGE_VECTORS": ["both", "mean", "text", "image"],
    "POOL": ["random", "similarity"],
    "DTYPE": ["float32", "bfloat16"],
    "HYBRID_MIX_SCORE": ["logprob", "beam_score", "infoscore"],
    "WEIGHT_REWARDS": ["raw", "zscore"],
    "LR_SCHEDULER_TYPE": ["linear", "cosine", "plateau"],
    "REWARD_MODE": _MODES,
}

_RENAMED = {}  # old names of constants, accepted as arguments
_INSTEAD_HERE = {  # constants of other trainers: what this file has instead
    "ACTOR_MODEL": "READER (frozen) and POINTER_POLICY (trained)",
    "EVAL_DATASETS": "EVAL_DATASET and TEST_DATASET",
    "MAX_STEPS": "RCE_EPOCHS and GRPO_EPOCHS",
    "NUM_EPOCHS": "RCE_EPOCHS and GRPO_EPOCHS",
    "MAX_NEW_TOKENS": "MAX_ANSWER_TOKENS",
    "MAX_TRAIN_PROMPTS": "MINE_QUERIES",
    "REWARD_FUNCTIONS": "REWARD_MODE",
}
_MAY_CHANGE = (
    "RESUME OUTPUT_DIR STAGE EVALUATE_POLICY EVAL_DATASET".split()
)  # a resumed run does not report these
# When one of these has changed, the scores of a resumed run do not compare with the earlier ones. Add a
# constant of yours that changes how responses are sampled or scored
_CHANGE_SCORES = """
    VALIDATION_QUERIES SPLIT_SEED GOLDS READER PRIOR_STRENGTH INSTRUCTION DEMONSTRATION QUERY
    CHAT_TEMPLATE MAX_ANSWER_TOKENS SHOTS POOL POOL_SIZE PICK_BEAMS
    TRAIN_DATASET EMBEDDING EMBED_ANSWERS IMAGE_VECTORS MAX_IMAGE_PIXELS DTYPE
""".split()

# ================================================================ the maths of RCE and GRPO


def rce_loss(logprobs, weights):
    """Returns the mean over queries of sum_i weight_i * -log pi(list_i). Both are (queries, lists)."""
    return -(weights * logprobs).sum(1).mean()


def group_advantages(r):
    """Returns (r - mean) / deviation (ddof 1) of one query's rewards, (lists,). Equal ones give exactly 0."""
    r = torch.as_tensor(r, dtype=torch.float64)
    r = r - r[0]  # the mean of equal rewards is often not that reward: 0.7 three times
    if len(r) < 2:
        return r
    return (r - r.mean()) / (r.std() + 1e-4)


def grpo_loss(logprobs, old_logprobs, advantages, clip_range):
    """Returns the clipped surrogate loss, (queries, lists). A list's ratio is the product of its choices'."""
    ratio = (logprobs - old_logprobs).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages)


def choice_kl(logprobs, ref_logprobs):
    """Returns the exact KL(pi || reference) of each choice, (..., choices), from the log-probabilities of all
    candidates, (..., choices, pool). Masked candidates count 0."""
    masked = logprobs <= -1e8
    difference = (logprobs - ref_logprobs).masked_fill(masked, 0.0)
    return (logprobs.exp() * difference).sum(-1)


def adapt_kl_coef(coef, kl, target):
    """Returns the coefficient, changed by a tenth of the KL's relative error, which is clipped to +-0.2.
    Source: arXiv 1909.08593, section 2.2."""
    return coef * (1 + 0.1 * max(-0.2, min(0.2, kl / target - 1)))


# Reward modes take lists of one query's length: hard is 0 or 1 (right or wrong), soft and gt_prob are from 0
# to 1, score is any number. They return one reward per list.


def hard_only(hard, soft, gt_prob, score):
    """hard. Range {0, 1}: candidates that are alike right or wrong weigh alike."""
    return list(hard)


def soft_only(hard, soft, gt_prob, score):
    """soft. Range [0, 1]."""
    return list(soft)


def hard_plus_soft(hard, soft, gt_prob, score):
    """hard + soft. Range [0, 2]; right ones in [1, 2], wrong ones in [0, 1]: they can meet."""
    return [h + s for h, s in zip(hard, soft)]


def hard_plus_soft_v2(hard, soft, gt_prob, score):
    """soft + 2 hard. Range [0, 3]; right ones in [2, 3], wrong ones in [0, 1]: at least 1 apart."""
    return [s + 2 * h for h, s in zip(hard, soft)]


def separated(hard, soft, gt_prob, score):
    """2 hard + soft: hard_plus_soft_v2 by its other name. Range [0, 1] for wrong ones, [2, 3] for right
    ones."""
    return hard_plus_soft_v2(hard, soft, gt_prob, score)


def hard_plus_gtprob(hard, soft, gt_prob, score):
    """hard + gt_prob. Range [0, 2]; right ones in [1, 2], wrong ones in [0, 1]."""
    return hard_plus_soft(hard, gt_prob, gt_prob, score)


def hard_plus_gtprob_separated(hard, soft, gt_prob, score):
    """2 hard + gt_prob. Range [0, 1] for wrong ones, [2, 3] for right ones."""
    return hard_plus_soft_v2(hard, gt_prob, gt_prob, score)


def hybrid(hard, soft, gt_prob, score, mix=0.5):
    """mix * scaled score + (1 - mix) * hard, the score min-max scaled over the prompt's candidates (equal
    scores: 0). Range [0, 1]; up to mix = 0.5 no wrong one is above a right one."""
    low = min(score)
    width = max(score) - low
    return [mix * ((x - low) / width if width > 0 else 0.0) + (1 - mix) * h for h, x in zip(hard, score)]


def shape_wrong(reward, hard, similarity, weight):
    """reward + weight * similarity where hard is 0, reward elsewhere: being close orders wrong candidates
    among themselves and never a right one. Keep weight below the mode's distance from wrong to right. Range:
    the mode's + [0, weight]."""
    return [r if h else r + weight * s for r, h, s in zip(reward, hard, similarity)]


def hard_plus_gtprob_plus_rel(hard, soft, gt_prob, score):
    """2 hard + gt_prob, and .1 of the relevance in `score`, in [0, 1], where hard is 0. Range [0, 1.1] for
    wrong ones, [2, 3] for right ones."""
    return shape_wrong(hard_plus_gtprob_separated(hard, soft, gt_prob, score), hard, score, 0.1)


def shaped_rewards(candidates):
    """Returns r of one query's lists by REWARD_MODE. HARD_WEIGHT multiplies hard; SOFT_WEIGHT multiplies the
    mode's graded part, which is soft or gt_prob."""
    weighted = []
    for candidate in map(dict, candidates):  # copies
        if candidate["hard"]:
            candidate["relevance"] = 0.0  # only wrong lists get it; HARD_WEIGHT = 0 makes all look wrong
        if candidate.get("gt_prob") is not None:
            candidate["infoscore"] = math.log(max(candidate["gt_prob"], 1e-6))
        for key, weight in (("hard", HARD_WEIGHT), ("soft", SOFT_WEIGHT), ("gt_prob", SOFT_WEIGHT)):
            if candidate.get(key) is not None:
                candidate[key] *= weight
        weighted.append(candidate)
    return rewards_by_mode(weighted, "relevance" if "rel" in REWARD_MODE else HYBRID_MIX_SCORE)


# ================================================================ the pointer network


class PointerConfig(PretrainedConfig):
    model_type = "rce_icl_pointer"
    query_size = candidate_size = hidden_size = layers = heads = 1
    vectors = ""  # digest of what the vectors that it reads depend on; "": not known
    rule = ("similarity", 0)  # name and setting of the rule that it starts as
    dropout = 0.0
    pointer_temperature = 1.0


class Pointer(PreTrainedModel):
    """Chooses candidates one after the other. policy/ loads with Pointer.from_pretrained()."""

    config_class = PointerConfig

    def __init__(self, config):
        super().__init__(config)
        hidden = config.hidden_size
        self.query_projection = torch.nn.Sequential(
            torch.nn.Linear(config.query_size, 4 * hidden),
            torch.nn.GELU(),
            torch.nn.Dropout(config.dropout),
            torch.nn.Linear(4 * hidden, hidden),
        )
        self.candidate_projection = torch.nn.Linear(config.candidate_size, hidden)
        self.query_norm = torch.nn.LayerNorm(hidden)
        self.candidate_norm = torch.nn.LayerNorm(hidden)
        options = {"dropout": 0.0, "batch_first": True}
        self.attention = torch.nn.ModuleList(
            torch.nn.MultiheadAttention(hidden, config.heads, **options) for _ in range(config.layers)
        )
        self.attention_norm = torch.nn.ModuleList(torch.nn.LayerNorm(hidden) for _ in range(config.layers))
        self.gate = torch.nn.Linear(2 * hidden, hidden)
        # Weights of similarity, classifier, network's cosine, rule, share shown, share x similarity: (first
        # or later choice, others follow or it is the last, 6). They count 30 times, so that the network's
        # learning rate moves them fast enough. A new policy is the rule: cosines differ by 2 at most
        self.choice_weights = torch.nn.Parameter(torch.tensor([[[0.5 / 30, 0, 0, 1.1 / 30, 0, 0]] * 2] * 2))
        self.post_init()

    def _init_weights(self, module):
        """torch's own initialisation stays."""

    def encode(self, queries, vectors, pool, known, held_out=None):
        """Returns state (queries, 1, H) and candidates: keys (queries, pool, H), known (queries, 3, pool:
        similarity, classifier, place by the rule), rows (queries, 1, pool: numbers of equal vectors, -1 is
        padding), held_out. Queries are (queries, d); pools, (queries, pool), hold rows of `vectors`
        (rows, d'), -1 after their ends."""
        rows, where = torch.unique(pool.clamp(min=0), return_inverse=True)
        keys = self.candidate_norm(self.candidate_projection(vectors[rows]))[where]
        state = self.query_norm(self.query_projection(5 * queries))[:, None]  # unit vectors are small
        for attention, norm in zip(self.attention, self.attention_norm):
            seen = attention(state, keys, keys, key_padding_mask=pool < 0, need_weights=False)[0]
            state = norm(state + seen)
        return state, (keys, known, torch.where(pool < 0, -1, where)[:, None], held_out)

    def choice_logprobs(self, state, candidates, taken, count, is_last):
        """Returns log-probabilities (queries, lists, pool) of the next choice after `count`; taken ones are
        -1e9. is_last, (queries or 1, lists or 1): whether it is the list's last choice. held_out (queries,):
        RCE trains the terms' weights on these and the network on the others, for which the cosine weighs 1,
        and classifier and rule 0. Otherwise the weights would trust what the network has memorised, and the
        network would leave everything to the classifier."""
        keys, known, rows, held_out = candidates
        similarity, classifier, place = known.split(1, 1)
        place = place.masked_fill(taken, math.inf)
        by_rule = (place == place.amin(-1, keepdim=True)).to(known.dtype)  # what the rule shows next
        cosines = normalize(state, dim=-1) @ normalize(keys, dim=-1).transpose(1, 2)
        weights = 30 * self.choice_weights[min(count, 1)][is_last.long()]  # (queries, lists, 6)
        if held_out is not None:
            held_out = held_out[:, None, None]
            cosines = torch.where(held_out, cosines.detach(), cosines)
            of_others = weights.detach().clone()
            of_others[..., [1, 3]] = 0.0
            of_others[..., 2] = 1.0
            weights = torch.where(held_out, weights, of_others)
        terms = [similarity, classifier, cosines, by_rule]
        if count:  # answers, by the similarity already shown of each; padding has none
            answers = rows.clamp(min=0).expand_as(taken)
            votes = (similarity.clamp(min=0) + 1e-3) * (taken & (rows >= 0))
            shown = votes.new_zeros(*taken.shape[:2], int(rows.max()) + 1)
            shown = shown.scatter_add(2, answers, votes).gather(2, answers)
            shown = shown / votes.sum(-1, keepdim=True).clamp(min=1e-3)  # none where only padding is taken
            terms += [shown, shown * similarity]
        scores = sum(w[..., None] * term for w, term in zip(weights.unbind(-1), terms))
        scores = scores / self.config.pointer_temperature
        return scores.masked_fill(taken, -1e9).log_softmax(-1)

    def advance(self, state, candidates, choice):
        """Returns the state (queries, lists, H) after choice (queries, lists), a number within the pool."""
        keys = candidates[0]
        chosen = keys.gather(1, choice[..., None].expand(-1, -1, keys.shape[-1]))
        gate = torch.sigmoid(self.gate(torch.cat([state, chosen], -1)))
        return gate * state + (1 - gate) * chosen

    def forward(self, queries, vectors, pool, known, pointers, held_out=None):
        """Returns log-probabilities of all candidates at each choice, (queries, lists, choices, pool).
        pointers (queries, lists, choices) are -1 after a list's end. held_out: see choice_logprobs()."""
        state, candidates = self.encode(queries, vectors, pool, known, held_out)
        lists = pointers.shape[1]
        taken = (pool < 0)[:, None]
        lengths = (pointers >= 0).sum(-1)
        steps = [self.choice_logprobs(state, candidates, taken, 0, lengths == 1)]
        state = state.expand(-1, lists, -1)
        taken = taken.expand(-1, lists, -1)
        for count in range(1, pointers.shape[2]):
            most = (pointers[:, :, count] >= 0).any(0).nonzero()[-1] + 1  # lists behind these are shorter
            choice = pointers[:, :most, count - 1].clamp(min=0)
            taken = taken[:, :most].scatter(2, choice[..., None], True)
            state = self.advance(state[:, :most], candidates, choice)
            is_last = lengths[:, :most] == count + 1
            logprobs = self.choice_logprobs(state, candidates, taken, count, is_last)
            steps.append(pad(logprobs, (0, 0, 0, lists - most)))
        return torch.stack(steps, 2)

    def search(self, queries, vectors, pool, known, shots, beams=1, encoded=None):
        """Returns the likeliest lists by beam search, likeliest first: pointers (queries, beams, shots) and
        their log-probabilities (queries, beams), below -1e8 if a pool has no more lists. One beam: greedy."""
        check_room(pool, shots)
        state, candidates = encoded or self.encode(queries, vectors, pool, known)
        size = pool.shape[1]
        queries_of = torch.arange(len(pool), device=pool.device)[:, None]
        taken = (pool < 0)[:, None]
        lists = torch.zeros(len(pool), 1, 0, dtype=torch.long, device=pool.device)
        scores = torch.zeros(len(pool), 1, device=pool.device)
        for count in range(shots):
            is_last = torch.tensor([[count + 1 == shots]], device=pool.device)
            logprobs = self.choice_logprobs(state, candidates, taken, count, is_last)
            totals = scores[..., None] + logprobs  # (queries, beams, pool)
            scores, best = totals.flatten(1).topk(min(beams, totals[0].numel()), 1)
            parents, choice = (queries_of, best // size), best % size
            lists = torch.cat([lists[parents], choice[..., None]], -1)
            taken = taken[parents].scatter(2, choice[..., None], True)
            state = self.advance(state[parents], candidates, choice)
        return lists, scores

    def sample(self, queries, vectors, pool, known, uniform, temperature=1.0, encoded=None):
        """Draws lists with uniform numbers (queries, lists, choices, pool) at a temperature, by the
        Gumbel-max trick. Returns pointers (queries, lists, choices)."""
        check_room(pool, uniform.shape[2])
        state, candidates = encoded or self.encode(queries, vectors, pool, known)
        state = state.expand(-1, uniform.shape[1], -1)
        taken = (pool < 0)[:, None].expand(-1, uniform.shape[1], -1)
        lists = []
        for count, numbers in enumerate(uniform.unbind(2)):
            is_last = torch.tensor([[count + 1 == uniform.shape[2]]], device=pool.device)
            logprobs = self.choice_logprobs(state, candidates, taken, count, is_last)
            gumbels = -(-numbers.clamp(min=1e-9).log()).log()
            choice = (logprobs / temperature + gumbels).argmax(-1)
            lists.append(choice)
            taken = taken.scatter(2, choice[..., None], True)
            state = self.advance(state, candidates, choice)
        return torch.stack(lists, -1)


# ================================================================ the trainer


class ICLTrainer:
    """Queries, reader, policy and the algorithm; self.run has the files. resume_from_checkpoint overrides the
    constant RESUME: a path, "ask", "yes" or "no"."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        check_lists()
        self.device = find_device()
        self.run = Run("rce_icl", resume_from_checkpoint, self.device)
        self.run.best_by = ["clear_gain"]
        self.run.old_files += ["test_candidates_*", "icl_*.png", "rce"]
        if STAGE != "train" and not CANDIDATES:  # else they are given, so they stay
            self.run.old_files.append("candidates*")
        self.run.title = f"RCE for demonstrations ({REWARD_MODE}, {SHOTS} shots), seed {SEED}"
        names = "entropy policy_loss effective_lists weight_on_best advantage_spread kl kl_coef grad_norm"
        # The pick's accuracy is the mean over 1 .. SHOTS demonstrations, the oracle's that of mined lists
        self.run.panels = [("accuracy of the pick and the oracle", ["pick_accuracy", "oracle_accuracy"])]
        self.run.panels += [(name, [name]) for name in names.split()]
        self.splits, self.demos = load_splits(self.run.log)
        self.resumed_from = self.run.checkpoint
        afresh = self.resumed_from is None and STAGE != "evaluate"
        embed_splits(self.splits, self.demos, self.device, self.run.log, afresh)
        self.corpus = Corpus(self.demos, self.device)
        self.reader = self.load_reader()
        self.answered = {}  # (query's id, demonstrations' numbers): the reader's answer
        self.load_policy()
        self.miner = Miner(self.corpus, self.policy, self.reader)
        # What a checkpoint keeps beside weights, optimizer and generators. order is this epoch's permutation,
        # begin the step at which the stage began, candidates the digest of the file that is trained on
        self.state = SimpleNamespace(stage="rce", begin=0, candidates="", queries=0, kl_coef=float(KL_COEF))
        self.state.epoch = self.state.cursor = 0
        self.state.order = None
        self.state.prompts = len(self.demos)
        models = {"policy": self.policy, "reference": self.reference}
        self.optimizers = {"policy": self.make_optimizer(LEARNING_RATE)}
        self.run.register(self.state, models, self.optimizers, tokenizer=None)
        if self.state.stage == "grpo":
            self.freeze()
        if not KL_TARGET:
            self.state.kl_coef = float(KL_COEF)  # a changed constant takes effect when a run resumes
        self.plan_steps()

    def load_reader(self):
        """Returns the reader. Override for one of your own: it needs answers() and gold_probabilities()."""
        if READER == "votes":
            return VoteReader(self.demos)
        if reads_images(READER):
            return VisionReader(READER, self.device)
        if with_images := [demo for demo in self.demos if demo["image"]]:
            fault = f"reads no images, but {with_images[0]['id']} has one"
            raise UserError(f"READER = {READER!r} {fault}: take an image-text model, or leave out 'image'")
        return LanguageReader(READER, self.device)

    def load_policy(self):
        """Loads policy and reference (where GRPO starts): the checkpoint's, else POINTER_POLICY, else new."""
        checkpoint, sizes = self.run.checkpoint, self.corpus.sizes
        folder = start = POINTER_POLICY
        if checkpoint:
            folder, start = checkpoint / "policy", checkpoint / "reference"
        self.policy = load_pointer(folder, sizes).to(self.device)
        self.reference = load_pointer(start, sizes).to(self.device).eval().requires_grad_(False)
        vectors = vectors_digest(self.demos)
        if self.policy.config.vectors not in ("", vectors):
            todo = (
                "use the TRAIN_DATASET, CANDIDATES, VALIDATION_QUERIES, SPLIT_SEED and EMBEDDING of its run"
            )
            raise UserError(f"{folder} was trained on other demonstrations, or other vectors of them: {todo}")
        self.policy.config.vectors = self.reference.config.vectors = vectors
        self.corpus.rule = self.policy.config.rule

    def begin_with_a_rule(self):
        """Makes a new policy the rule that is the best on validation, mean over 1 .. SHOTS; of equal ones the
        later, which knows more."""
        queries = self.splits["validation"]
        accuracies = {}
        try:
            for rule in choose_rules(self).items():
                lists_of = partial(rule_lists, self, queries, *rule)
                accuracies[rule] = self.mean_accuracy(queries, lists_of).mean()
        except UserError:
            raise
        except Exception as error:  # a reader may raise anything
            self.run.log(f"WARNING: the reader failed ({first_line(error)}): the policy starts as similarity")
            return
        self.corpus.rule = max(reversed(accuracies), key=accuracies.get)
        self.policy.config.rule = self.reference.config.rule = self.corpus.rule
        scores = ", ".join(f"{name} {accuracy:.3f}" for (name, _), accuracy in accuracies.items())
        self.run.log(f"Rules on validation: {scores}; the policy starts as {self.corpus.rule[0]}")

    def make_optimizer(self, rate):
        return torch.optim.AdamW(self.policy.parameters(), lr=rate, weight_decay=WEIGHT_DECAY)

    def train(self):
        """Mines, checks up, trains by RCE and GRPO, tests. Returns the last evaluation."""
        run = self.run
        with run.session(self.introduction()):  # lock, logs and signals; saves at the end
            if self.state.candidates:
                self.find_candidates()
            if self.state.stage == "grpo" and not (run.folder / "rce").exists():
                self.keep_rce_policy()  # the run continues in another folder
            if not run.checkpoint and not POINTER_POLICY:
                self.begin_with_a_rule()
            run.save()  # candidates are mined from it
            if self.prepare() and STAGE != "mine":
                self.train_stage()
                if self.state.stage == "rce" and GRPO_EPOCHS and not run.stop_signal:
                    self.begin_grpo()
                    self.train_stage()
                if not run.stop_signal:
                    self.test()
        return run.evaluation

    def train_stage(self):
        """Trains until the stage's last step, a signal, or patience ends it."""
        run = self.run
        if run.needs_first_evaluation():
            run.log_evaluation(self.evaluate())
        while run.step < self.end and run.next_step():
            batch = self.next_batch()
            metrics = self.update(batch)
            self.record(batch, metrics)
            is_end = run.step == self.end or run.is_last_step()
            if run.is_due(EVAL_EVERY_N_STEPS) or is_end:
                run.log_evaluation(self.evaluate())
            if run.is_due(SAVE_EVERY_N_STEPS) and run.step < self.end:
                run.save()
        if not run.stop_signal and not (run.folder / "best").exists():
            # The run was resumed in another folder at the end of a stage
            run.log_evaluation(self.evaluate())

    def prepare(self):
        """Mines if there are no candidates; chooses training rows. Returns False if a signal stopped it."""
        path = candidates_path()
        is_new = not self.state.candidates
        if is_new and not path.exists():
            if STAGE == "train" or CANDIDATES:
                todo = "run STAGE=mine first, or set CANDIDATES to a JSON file of candidates"
                raise UserError(f"there are no candidates at {path}: {todo}")
            queries = self.splits["validation"] + self.splits["train"][:MINE_QUERIES]
            if not self.mine(path, queries, SHOTS):
                return False
        digest = file_digest(path)["sha256"]
        groups = read_candidates(path, self.splits, self.demos, self.reader)
        if is_new:
            proposed = sum(map(attrgetter("proposed"), groups))
            lists = list(map(attrgetter("candidates"), groups))
            figures = check_up(lists, proposed, path, self.run.log)
            doubles = figures["share of doubles"] = np.mean(list(map(attrgetter("doubles"), groups))).item()
            if math.isfinite(doubles):  # given files may not say it
                self.run.log(f"Share of doubles among the lists that were proposed first: {doubles:.3f}")
            self.run.write_metrics("mine", figures)
        self.choose_rows(groups)
        if not self.train_rows:
            raise UserError(f"{path}: no query has lists of different reward: nothing to train on")
        if not is_new and len(self.train_rows) != self.state.queries:  # state.order is over those queries
            fault = f"leaves {len(self.train_rows)} queries to train on, and left {self.state.queries} before"
            hint = "set REWARD_MODE and what else decides it back, or RESUME=no"
            raise UserError(f"{path} {fault} the run was stopped: {hint}")
        self.state.candidates = digest
        self.state.queries = len(self.train_rows)
        self.plan_steps()
        return True

    def find_candidates(self):
        """Refuses to continue without the run's candidates. A run continued in another folder copies them."""
        path = candidates_path()
        if self.resumed_from and not path.exists():
            source = self.resumed_from.parent / path.name
            if source.exists():
                write_atomically(path, lambda tmp: shutil.copy(source, tmp))
        if not path.exists() or file_digest(path)["sha256"] != self.state.candidates:
            todo = "put it back, or start afresh with RESUME=no"
            raise UserError(f"{path} is not the file this run was trained on, or is missing: {todo}")

    def choose_rows(self, groups):
        """Chooses what is trained on: queries that do not validate and whose lists' rewards differ. Equal
        rewards give all lists the same weight, so nothing says which to prefer."""
        validation = set(column(self.splits["validation"], "id"))
        best = []  # accuracy of the best list of each validation query
        self.train_rows = []
        for group in groups:
            query, candidates = group.query, usable(group.candidates)
            query["pool"] = group.pool  # given candidates have pools of their own
            if not candidates:
                continue
            if query["id"] in validation:  # given candidates may have hard alone
                best.append(max(c["hard"] if c["soft"] is None else c["soft"] for c in candidates))
                continue
            shaped = shaped_rewards(candidates)
            if not is_flat(shaped):
                drawn = torch.rand(1, generator=query_stream(query, "weights")).item()
                row = {"id": query["id"], "query": query, "candidates": candidates, "rewards": shaped}
                self.train_rows.append({**row, "held_out": drawn < WEIGHT_QUERIES})
        self.oracle = float(np.mean(best)) if best else math.nan
        skipped = len(groups) - len(self.train_rows) - len(best)
        others = f"{len(best)} validate, {skipped} are skipped: equal rewards, or no list that was marked"
        self.run.log(f"{len(self.train_rows)} queries to train on; {others}")
        if self.train_rows and not any(column(self.train_rows, "held_out")):
            todo = "raise WEIGHT_QUERIES, or mine more queries"
            self.run.log(
                f"WARNING: none of them trains the terms' weights, so RCE leaves them as they are: {todo}"
            )

    def next_batch(self):
        """Returns the next queries: what the policy reads, pointers (queries, lists, choices), and present,
        weights, advantages (queries, lists)."""
        rows = next_rows(self.train_rows, self.state, BATCH_SIZE)
        batch = SimpleNamespace(rows=rows, inputs=self.corpus.inputs(column(rows, "query")))
        batch.lists, batch.rewards = column(rows, "candidates"), column(rows, "rewards")
        if self.state.stage == "grpo" and ON_POLICY:
            batch.lists, batch.rewards = self.fresh_lists(batch)
        tau = tau_at(self.state.epoch - 1, RCE_EPOCHS)
        rewards_of = [torch.tensor(r, dtype=torch.float64) for r in batch.rewards]
        weights = pad_rows([rce_weights(r, tau, WEIGHT_REWARDS) for r in rewards_of])
        batch.pointers = pad_pointers(batch.lists).to(self.device)
        batch.present = pad_rows(map(torch.ones_like, rewards_of)).float().to(self.device)
        batch.weights = weights.float().to(self.device)
        batch.advantages = pad_rows(map(group_advantages, rewards_of)).float().to(self.device)
        batch.facts = {"reward": torch.cat(rewards_of).numpy().mean()}
        if self.state.stage == "rce":
            effective = torch.special.entr(weights).sum(1).exp()
            batch.facts |= {"tau": tau, "effective_lists": effective.numpy().mean()}
            batch.facts["weight_on_best"] = weights.amax(1).numpy().mean()
        else:
            batch.facts["advantage_spread"] = torch.stack(list(map(torch.std, rewards_of))).numpy().mean()
        return batch

    @torch.no_grad()
    def fresh_lists(self, batch):
        """Draws GROUP_SIZE lists per query from the policy. Returns them, answered, and their rewards."""
        with self.run.timed("rollout"):
            self.policy.eval()
            uniform = torch.rand(len(batch.rows), GROUP_SIZE, SHOTS, batch.inputs[2].shape[1])
            pointers = self.policy.sample(*batch.inputs, uniform.to(self.device)).tolist()
            groups = []
            for row, of_query in zip(batch.rows, pointers):
                candidates = [new_candidate(pointer, "sample", 1.0) for pointer in of_query]
                groups.append(SimpleNamespace(query=row["query"], candidates=candidates))
            if REWARD_MODE == "hybrid":
                self.miner.add_logprobs(groups)
        with self.run.timed("score"):
            uses_infoscore = REWARD_MODE == "hybrid" and HYBRID_MIX_SCORE == "infoscore"
            if "gtprob" in REWARD_MODE or uses_infoscore:  # other modes do without half of the reading
                self.miner.score_gold(groups)
            self.miner.verify(groups)
        lists = []
        for row, group in zip(batch.rows, groups):
            answered = usable(group.candidates)
            lists.append(
                answered if len(answered) > 1 else row["candidates"]
            )  # mined ones if the reader failed
        return lists, list(map(shaped_rewards, lists))

    def update(self, batch):
        """Takes one optimizer step of the stage on the batch; returns its metrics."""
        in_rce = self.state.stage == "rce"
        steps_done = max(0, self.run.step - 1 - self.state.begin)
        total = self.end - self.state.begin
        schedule = LR_SCHEDULER_TYPE if USE_LR_SCHEDULER else None
        rate = LEARNING_RATE if in_rce else GRPO_LEARNING_RATE
        rate *= learning_rate_scale(steps_done, total, WARMUP_STEPS, schedule, self.run.halvings)
        optimizer = self.optimizers["policy"]
        optimizer.param_groups[0]["lr"] = rate
        with self.run.timed("update"):
            self.policy.train(in_rce)  # dropout in RCE alone
            inputs = *batch.inputs, batch.pointers
            if in_rce:
                held_out = torch.tensor(column(batch.rows, "held_out"), device=self.device)
                all_logprobs = self.policy(*inputs, held_out)  # (queries, lists, choices, pool)
                loss = rce_loss(list_logprobs(all_logprobs, batch.pointers), batch.weights)
                metrics = {"policy_loss": loss.item()}
            else:
                all_logprobs = self.policy(*inputs)
                logprobs = list_logprobs(all_logprobs, batch.pointers)
                loss, metrics = self.grpo(batch, all_logprobs, logprobs, inputs)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_GRAD_NORM)
            finite = math.isfinite(loss.item() + norm.item())
            if finite:
                optimizer.step()
        self.run.note_optimizer_step(finite, column(batch.rows, "id"))
        chosen = (batch.pointers >= 0).float()
        entropy = -(all_logprobs.detach().exp() * all_logprobs.detach().clamp(min=-1e8)).sum(-1)
        metrics["entropy"] = ((entropy * chosen).sum() / chosen.sum()).item()
        return {**metrics, "grad_norm": norm.item(), "learning_rate": rate}

    def grpo(self, batch, all_logprobs, logprobs, inputs):
        """Returns the loss of GRPO and its metrics; all_logprobs (queries, lists, choices, pool)."""
        with torch.no_grad():
            ref_logprobs = self.reference(*inputs)
        old_logprobs = self.old_logprobs(batch, logprobs, ref_logprobs)
        losses = grpo_loss(logprobs, old_logprobs, batch.advantages, CLIP_RANGE)
        chosen = (batch.pointers >= 0).float()
        kl = (choice_kl(all_logprobs, ref_logprobs) * chosen).sum() / chosen.sum()
        policy_loss = (losses * batch.present).sum() / batch.present.sum()
        ratio = (logprobs.detach() - old_logprobs).exp()
        clipped = ((ratio - 1) * batch.advantages.sign() > CLIP_RANGE).float() * batch.present
        metrics = {
            "policy_loss": policy_loss.item(),
            "kl": kl.item(),
            "kl_coef": self.state.kl_coef,
            "max_ratio_deviation": ((ratio - 1).abs() * batch.present).max().item(),
            "clip_fraction": (clipped.sum() / batch.present.sum()).item(),
        }
        loss = policy_loss + self.state.kl_coef * kl
        if KL_TARGET and math.isfinite(metrics["kl"]):
            self.state.kl_coef = adapt_kl_coef(self.state.kl_coef, metrics["kl"], KL_TARGET)
        return loss, metrics

    def old_logprobs(self, batch, logprobs, ref_logprobs):
        """Returns log pi_old of the lists, (queries, lists): of the policy now or where GRPO starts."""
        return logprobs.detach() if ON_POLICY else list_logprobs(ref_logprobs, batch.pointers)

    def plan_steps(self):
        """Computes the last step of the stage and of the run, from the state alone: resumed runs agree."""
        queries = self.state.queries or len(self.splits["train"][:MINE_QUERIES])  # a guess until it is mined
        steps_per_epoch = math.ceil(queries / BATCH_SIZE)
        grpo_steps = GRPO_EPOCHS * steps_per_epoch
        self.end = self.run.total_steps = self.state.begin + grpo_steps
        if self.state.stage == "rce":
            self.end = self.state.begin + RCE_EPOCHS * steps_per_epoch
            self.run.total_steps = self.end + grpo_steps

    def begin_grpo(self):
        """Starts GRPO from the best policy of RCE, which is kept in rce/ and is the reference of the KL."""
        best = load_pointer(self.run.folder / "best/policy", self.corpus.sizes)
        self.policy.load_state_dict(best.state_dict())
        self.reference.load_state_dict(best.state_dict())
        self.keep_rce_policy()
        self.run.log(f"RCE ends at step {self.run.step}; its best policy: {self.run.folder}/rce/policy")
        self.state.stage = "grpo"
        self.state.begin = self.run.step
        self.state.epoch = self.state.cursor = 0
        self.optimizers["policy"] = self.make_optimizer(GRPO_LEARNING_RATE)
        self.freeze()
        self.run.reset_best()
        self.run.clock = None
        self.plan_steps()
        self.run.save()

    def keep_rce_policy(self):
        """Writes rce/policy: what RCE ended with, which is GRPO's reference."""
        save = partial(self.run.save_model, self.reference)
        write_atomically(self.run.folder / "rce", lambda tmp: save(tmp / "policy"))

    def freeze(self):
        """Stops training the projections, if FREEZE."""
        for name, parameter in self.policy.named_parameters():
            parameter.requires_grad_(not FREEZE or "projection" not in name)

    def mine(self, path, queries, shots):
        """Mines lists for queries into `path`. Returns False if a signal stopped it."""

        def mine_chunk(chunk):
            return [group_record(group, self.demos) for group in self.miner.mine(chunk, shots)]

        arguments = list_facts(queries, shots, self.reader), mine_chunk, read_json, write_candidates
        return mine_in_chunks(self.run, path, queries, MINE_BATCH_SIZE, *arguments)

    # ------------------------------------------------------------ evaluation and what is logged

    @torch.no_grad()
    def pick(self, queries, shots, policy=None):
        """Returns the policy's list for each query, the best of PICK_BEAMS, as numbers of demonstrations."""
        policy = (policy or self.policy).eval()
        picked = []
        for start in range(0, len(queries), 64):
            chunk = queries[start : start + 64]
            pointers, _ = policy.search(*self.corpus.inputs(chunk), shots, PICK_BEAMS)
            for query, pointer in zip(chunk, pointers[:, 0].cpu()):
                picked.append(self.corpus.pool_of(query)[pointer].tolist())
        return picked

    def accuracy_of(self, queries, lists):
        """Returns the reader's accuracy after these demonstrations, (queries,). Each list is asked once."""
        keys, new = [], {}
        for query, numbers in zip(queries, lists):
            keys.append((query["id"], tuple(numbers)))
            if keys[-1] not in self.answered:
                new[keys[-1]] = query, self.corpus.examples(numbers)
        if new:
            self.answered.update(zip(new, ask_reader(self.reader.answers, list(new.values()))))
        texts = map(self.answered.get, keys)
        return np.array(list(map(answer_accuracy, texts, column(queries, "golds"))))

    def mean_accuracy(self, queries, lists_of):
        """Returns the mean accuracy over 1 .. SHOTS demonstrations, (queries,), of lists_of(shots)."""
        return np.mean([self.accuracy_of(queries, lists_of(shots)) for shots in range(1, SHOTS + 1)], 0)

    def evaluate(self):
        """Returns metrics of the policy's pick on the validation queries, means over 1 .. SHOTS. best/
        follows clear_gain, the gain over the rule less two standard errors of the paired difference (0 while
        the policy is the rule): a few queries' noise does not choose a policy. Override to add yours."""
        with self.run.timed("evaluate"):
            queries = self.splits["validation"]
            baseline = self.mean_accuracy(queries, partial(rule_lists, self, queries, *self.corpus.rule))
            accuracy = self.mean_accuracy(queries, partial(self.pick, queries))
            gain = accuracy - baseline
            clear_gain = gain.mean() - 2 * gain.std() / len(gain) ** 0.5
            metrics = {"pick_accuracy": float(accuracy.mean()), "clear_gain": float(clear_gain)}
            if math.isfinite(self.oracle):
                metrics["oracle_accuracy"] = self.oracle
            return metrics

    def select(self, query, shots=SHOTS, image=None):
        """Returns the demonstrations, out of all, that this run's best policy (if there is none, the current
        one) picks for a query, a text and perhaps the path of an image: id, text, image, golds, answer."""
        query = {"id": f"select {query}", "text": query, "image": image, "golds": [], "split": "select"}
        query["vector"] = self.corpus.embed_query(query)
        best = self.run.folder / "best/policy"
        policy = load_pointer(best, self.corpus.sizes).to(self.device) if best.is_dir() else self.policy
        fields = ("id", "text", "image", "golds", "answer")
        demonstrations = self.corpus.examples(self.pick([query], shots, policy)[0])
        return [{name: demo[name] for name in fields} for demo in demonstrations]

    def test(self):
        test_policies(self)

    def introduction(self):
        """Returns what a run begins with on the terminal."""
        counts = ", ".join(f"{len(rows)} {name}" for name, rows in self.splits.items())
        name = "/".join(Path(READER).parts[-2:])
        policy = f"a policy of {self.policy.num_parameters():,} parameters on {self.device}"
        return f"{counts} queries, {len(self.demos)} demonstrations; reader {name}; {policy}; {OUTPUT_DIR}"

    def record(self, batch, metrics):
        """Hands the step's metrics, a few of its lists and its line on the terminal to the run."""
        metrics = {"epoch": self.state.epoch, **metrics, **batch.facts}
        samples = []
        for row, candidates, shaped in zip(batch.rows[:LOG_SAMPLES], batch.lists, batch.rewards):
            query, first = row["query"], candidates[0]
            shown = self.corpus.examples(self.corpus.pool_of(query)[list(first["pointer"])])
            sample = {"id": row["id"], "query": query["text"], "golds": query["golds"]}
            sample |= {"demonstrations": column(shown, "id"), "response": first["text"]}
            sample |= {key: first[key] for key in ("source", "hard", "soft", "gt_prob")}
            samples.append({**sample, "reward": shaped[0]})
        line = "{} epoch {epoch}: PL:{policy_loss:.4f} R:{reward:.2f} E:{entropy:.3f} LR:{learning_rate:.2e}"
        line = line.format(self.state.stage.upper(), **metrics)
        self.run.log_step(metrics, sum(map(len, batch.lists)), samples, line, unit="lists")


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

    # differs: mining trains no policy
    def final_message(self):
        if self.stop_signal:
            return f"Stopped at step {self.step}: start it again with RESUME=yes to continue"
        if STAGE == "mine":
            return f"Mined: {candidates_path()}; STAGE=train trains on it"
        policy = self.folder / "best/policy"
        if not policy.exists():
            policy = self.checkpoint / "policy"
        policy = f"{policy}{self.step_of_best(self.state.begin)}"
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
        hint = "lower BATCH_SIZE or GROUP_SIZE or READER_BATCH_SIZE"
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


# ---------------------------------------------------------------- mining and check-up
# Candidates: their weights, the chunks that they are mined in, what they are worth.


def rce_weights(shaped, tau, normalisation="raw"):
    """Returns the weights of one prompt's candidates, (candidates,): softmax(r / tau) of their shaped rewards
    r. "zscore" scales those to mean 0 and deviation 1 first (ddof 1)."""
    shaped = torch.as_tensor(shaped, dtype=torch.float64)
    if normalisation == "zscore":
        shaped = (shaped - shaped.mean()) / (shaped.std() + 1e-4)
    return (shaped / tau).softmax(0)


def tau_at(step, total):
    """Returns TAU at a step (or epoch) of `total`. It moves to TAU_END by equal factors."""
    progress = min(step, total - 1) / max(1, total - 1)
    return TAU * ((TAU_END or TAU) / TAU) ** progress


# differs: HYBRID_ALPHA
def rewards_by_mode(candidates, mixed_score=None):
    """Returns r of one prompt's candidates by REWARD_MODE. mixed_score is the column that some modes mix
    in."""
    columns = {}
    for key in ("hard", "soft", "gt_prob", mixed_score):
        columns[key] = [candidate.get(key) for candidate in candidates]
    mix = {"mix": HYBRID_ALPHA} if REWARD_MODE == "hybrid" else {}
    try:
        shaped = globals()[REWARD_MODE](*columns.values(), **mix)
        if any(value is None for value in shaped):
            raise TypeError("r is None")
        return shaped
    except TypeError:  # arithmetic with None, or what is raised above
        lacking = ", ".join(key for key, values in columns.items() if key and None in values)
        if not lacking:  # a fault of your own function
            raise
        raise UserError(
            f"REWARD_MODE = {REWARD_MODE!r} needs {lacking}, which the candidates lack: mine candidates "
            "that have it, or choose another REWARD_MODE"
        ) from None


def usable(candidates):
    """Returns the candidates that were verified and whose scoring did not fail."""
    return [c for c in candidates if c["hard"] is not None and not c["eval_failed"]]


def is_flat(values):
    """Returns whether all values are equal, but for rounding."""
    return max(values) - min(values) < 1e-6


def mining_facts(**facts):
    """Returns what candidates depend on, in JSON's types: `facts` and the constants in _MINING."""
    for key in _MINING:
        facts[key] = constants()[key]
    return json.loads(json.dumps(facts, default=json_name))


def check_facts(path, mined_with, facts, keys, todo):
    """Refuses a file that was mined under another value of one of the keys."""
    for key in keys:
        if mined_with.get(key) != facts[key]:
            raise UserError(
                f"{path} was mined with {key} = {mined_with.get(key)!r}; it is {facts[key]!r} now: set it "
                f"back, or {todo}"
            )


def mine_in_chunks(run, path, rows, chunk_size, facts, mine, read, write):
    """Writes the records of mine(rows) into `path`, chunk_size rows at a time. Returns False if a signal
    stopped it. Each chunk has a file of its own until all are mined. Its records depend on policy and
    constants alone, so a killed run goes on."""
    folder = path.with_suffix(".parts")
    folder.mkdir(parents=True, exist_ok=True)
    files = {}  # {number of a chunk's first row: its file}
    for start in range(0, len(rows), chunk_size):
        files[start] = folder / f"{start:08d}{path.suffix}"
    chunks = broadcast_from_rank0(partial(read_chunks, files, facts, read, run.log))
    missing = [start for start in files if start not in chunks]
    began = time.perf_counter()
    for done in range(0, len(missing), world_size()):
        starts = missing[done : done + world_size()]
        mined = map_over_ranks(starts, lambda start: mine(rows[start : start + chunk_size]))
        for start, records in zip(starts, mined):
            chunks[start] = records
            broadcast_from_rank0(partial(write, records, files[start], facts))
        num_mined = min(len(chunks) * chunk_size, len(rows))
        seconds_per_chunk = (time.perf_counter() - began) / (done + len(starts))
        time_left = timedelta(seconds=round(seconds_per_chunk * (len(files) - len(chunks))))
        run.log(f"{path.stem}: mined {num_mined}/{len(rows)}, {time_left} left in mining")
        if run.agree_on_stop():
            return False
    records = []
    for start in files:
        records += chunks[start]
    broadcast_from_rank0(partial(write, records, path, facts))
    broadcast_from_rank0(partial(shutil.rmtree, folder))
    return True


def read_chunks(files, facts, read, log):
    """Returns {first row: records} of the chunks, {first row: file}, that an earlier start mined. Broken ones
    are left out."""
    chunks = {}
    for start, path in files.items():
        if path.exists():
            try:
                records, mined_with = read(path)
            except UserError as error:
                log(f"WARNING: {error}; mining it again")
                continue
            check_facts(path, mined_with, facts, facts, "start afresh with RESUME=no")
            chunks[start] = records
    return chunks


def policy_pick(candidates):
    """Returns the index of what the policy picked in mining: its greedy response; without one its best beam,
    where beams have scores (in rce_icl.py they do); else the likeliest."""

    def preference(i):
        scores = candidates[i].get("beam_score"), candidates[i].get("logprob")
        scores = [-math.inf if score is None else score for score in scores]  # 0.0 is a score, not a gap
        return ("greedy" in candidates[i]["source"], *scores)

    return max(range(len(candidates)), key=preference)


def check_up(groups, proposed, path, log):
    """Logs and returns {name: figure} of candidates, one list per prompt. The last five are means over the
    usable candidates, or over the prompts that have some."""
    marks = []  # hard rewards of all usable candidates
    facts = []  # of each prompt that has some
    for group in filter(None, map(usable, groups)):
        hard = column(group, "hard")
        marks += hard
        facts.append([not any(hard), is_flat(shaped_rewards(group)), hard[policy_pick(group)], any(hard)])
    means = np.mean(facts or [[math.nan] * 4], axis=0).tolist()
    figures = {
        "prompts": len(groups),
        "candidates": sum(map(len, groups)),
        "proposed": proposed,
        "positive rate": float(np.mean(marks or math.nan)),
        "prompts without a positive": means[0],
        "prompts with flat reward": means[1],
        "accuracy of the policy's pick": means[2],
        "accuracy of the oracle": means[3],
    }
    lines = [f"Check-up (more: python tools/check_up.py {path}):"]
    for name, value in figures.items():
        digits = 0 if isinstance(value, int) else 3
        lines.append(f"    {name:<32}{value:>9,.{digits}f}")
    log("\n".join(lines))
    failed = [c for group in groups for c in group if c["eval_failed"]]
    if failed:
        error = failed[0].get("eval_error")
        log(f"WARNING: scoring failed for {len(failed)} of {figures['candidates']} candidates: {error}")
    return figures


# ---------------------------------------------------------------- data and embeddings


def check_lists():
    """Refuses what _VALID_RANGES cannot say before anything is read."""
    if not SAMPLE_TEMPERATURES or min(SAMPLE_TEMPERATURES) < 1e-3 or max(SAMPLE_TEMPERATURES) > 1e3:
        raise UserError(f"SAMPLE_TEMPERATURES = {SAMPLE_TEMPERATURES}: it takes numbers, 0.001 to 1000")
    if set(map(type, EVAL_SHOTS)) != {int} or min(EVAL_SHOTS) < 1:
        raise UserError(f"EVAL_SHOTS = {EVAL_SHOTS}: it takes one or more whole numbers from 1")
    if max(SHOTS, *EVAL_SHOTS) > POOL_SIZE:
        raise UserError(f"POOL_SIZE = {POOL_SIZE} holds fewer than the rows of SHOTS or EVAL_SHOTS: raise it")
    name = "HARD_WEIGHT" if REWARD_MODE == "soft_only" else "SOFT_WEIGHT"
    value = constants()[name]
    if REWARD_MODE in ("soft_only", "hard_only", "hybrid") and value != 1:
        raise UserError(f"{name} = {value} does nothing with REWARD_MODE = {REWARD_MODE!r}: set it to 1.0")
    if REWARD_MODE == "hybrid" and HYBRID_MIX_SCORE == "beam_score" and GRPO_EPOCHS and ON_POLICY:
        raise UserError("ON_POLICY: sampled lists have no beam_score: set HYBRID_MIX_SCORE = 'logprob'")
    if HIDDEN_SIZE % HEADS:
        raise UserError(f"HIDDEN_SIZE = {HIDDEN_SIZE} must be a multiple of HEADS = {HEADS}")


def load_examples(spec, constant, split, limit=None):
    """Returns [{"id", "number", "text", "image", "golds", "answer", "split"}] of a data set: the row's number
    from 0; answer, the gold named most often, is what a demonstration shows."""
    keys = {"path", "type", "input", "output"}
    is_texts = isinstance(spec, dict) and set(map(type, (*spec, *spec.values()))) == {str}
    if not is_texts or not keys <= set(spec) <= keys | {"image", "name", "split", "vectors"}:
        takes = "a dict of texts: path, type, input, output and, if you like, image, name, split, vectors"
        raise UserError(f"{constant} = {spec!r}: it takes {takes}")
    where = f"{constant}: {spec['path']}"
    examples = []
    for line, record in read_records(spec, where):
        row = f"{where} line {line}"
        text = cell_text(look_up(record, spec["input"], row), f"{row}: {spec['input']!r}")
        golds = cell_texts(look_up(record, spec["output"], row), f"{row}: {spec['output']!r}")
        for key, texts in (("input", [text]), ("output", golds)):
            if "" in map(str.strip, texts):
                raise UserError(f"{row}: column {spec[key]!r} is empty: write it, or delete the line")
        image = None
        if spec.get("image"):
            image = cell_text(look_up(record, spec["image"], row), f"{row}: {spec['image']!r}")
            if not Path(image).is_file():
                raise UserError(f"{row}: there is no image {image!r}")
        example = {"id": f"{Path(spec['path']).name}:{line}", "number": len(examples), "split": split}
        example |= {"text": text, "image": image, "golds": golds}
        examples.append({**example, "answer": Counter(golds).most_common(1)[0][0]})
        if len(examples) == limit:
            break
    if not examples:
        raise UserError(f"{where}: the data set is empty")
    if spec.get("vectors"):
        take_vectors(examples, spec["vectors"], constant)
    return examples


def take_vectors(examples, path, constant):
    """Gives the examples their rows of the array in a .npy file, scaled, as "given_vector"."""
    try:
        array = np.load(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{constant}: {path} cannot be read as .npy ({first_line(error)})") from None
    if array.ndim != 2 or len(array) < len(examples) or not np.isfinite(array).all():
        fault = f"is an array of {array.shape}: it needs one vector of finite numbers"
        raise UserError(f"{constant}: {path} {fault} for each of {len(examples)} rows")
    for example, vector in zip(examples, scaled(array)):
        example["given_vector"] = vector


def is_shipped(path):
    """Returns whether a path is in the repository's data/."""
    return Path(path).resolve().is_relative_to(Path(ROOT, "data"))


def test_data():
    """Returns the name of the constant that names the test queries, and its value, which may be None."""
    if STAGE == "evaluate" and EVAL_DATASET is not None:
        return "EVAL_DATASET", EVAL_DATASET
    return "TEST_DATASET", TEST_DATASET


# differs: the data of this trainer
def load_splits(say):
    """{"train", "validation", "test"}: queries, and the demonstrations: training rows that do not validate.
    Candidates that are given decide the queries, and all training rows are demonstrations, as they were when
    they were mined."""
    rows = load_examples(TRAIN_DATASET, "TRAIN_DATASET", "train")
    if TEST_DATASET is None:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()
        count = min(TEST_QUERIES or 1000, len(rows) // 5)
        test = [{**rows[i], "split": "test"} for i in order[:count]]
        rows = [rows[i] for i in sorted(order[count:])]
        say(f"TEST_DATASET is None: {count} rows of TRAIN_DATASET are the test, {len(rows)} are left")
    constant, spec = test_data()
    if spec is not None:
        test = load_examples(spec, constant, "test", TEST_QUERIES)
        if is_shipped(spec["path"]) and not is_shipped(TRAIN_DATASET["path"]):
            hint = "set it to rows of yours, or to None, which holds out a fifth of them"
            say(f"NOTE: TRAIN_DATASET is your own data, but {constant} is still the shipped one: {hint}")
        sizes = [len(example.get("given_vector", ())) for example in (rows[0], test[0])]
        if sizes[0] != sizes[1]:
            rule = f"the vectors of TRAIN_DATASET and {constant} must be of one size"
            raise UserError(f"{rule}, not {sizes[0]} and {sizes[1]} numbers")
        if Path(spec["path"]).name == Path(TRAIN_DATASET["path"]).name:
            for row in test:  # two files of one name, or two splits of the hub: ids must differ
                row["id"] = f"test {row['id']}"
    asked = rows
    if CANDIDATES:
        numbers = {int(key) for key, _ in read_json(CANDIDATES)[0] if key.isdecimal()}
        asked = [row for row in rows if row["number"] in numbers]
    if len(asked) < 5:
        given = f"CANDIDATES = {CANDIDATES!r}" if CANDIDATES else "TRAIN_DATASET"
        raise UserError(f"{given} has {len(asked)} queries: it needs at least 5, because a fifth validates")
    count = min(VALIDATION_QUERIES, len(asked) // 5)
    if count < VALIDATION_QUERIES:
        fault = f"VALIDATION_QUERIES = {VALIDATION_QUERIES} is more than a fifth of the queries"
        say(f"{fault}: using {count}")
    order = torch.randperm(len(asked), generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()
    for i in order[:count]:
        asked[i]["split"] = "validation"
    demos = rows if CANDIDATES else [row for row in rows if row["split"] == "train"]
    train = [row for row in asked if row["split"] == "train"]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(SEED)).tolist()
    held_back = [row for row in asked if row["split"] == "validation"]
    return {"train": [train[i] for i in order], "validation": held_back, "test": test}, demos


class TfidfEmbedder:
    """Truncated SVD of TF-IDF of words and pairs of words, by scikit-learn; fitted on the demonstrations."""

    def __init__(self, demos):
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import TfidfVectorizer

        rare = 2 if len(demos) > 100 else 1  # words and pairs in fewer texts are left out
        self.words = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), min_df=rare)
        try:
            counts = self.words.fit_transform(column(demos, "text"))
            size = min(EMBEDDING_SIZE, min(counts.shape) - 1)
            self.svd = TruncatedSVD(size, random_state=0).fit(counts)
        except ValueError as error:  # no word at all, none in `rare` texts, or one alone
            why = f"EMBEDDING = 'tfidf' finds too few words in the demonstrations ({first_line(error)})"
            raise UserError(f"{why}: give a sentence model") from None

    def vectors(self, rows):
        return self.svd.transform(self.words.transform(column(rows, "text")))


class HubEmbedder:
    """A sentence model: the mean over its last layer's tokens."""

    def __init__(self, name, device):
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer = load_pretrained(AutoTokenizer, name, "EMBEDDING")
        self.model = load_pretrained(AutoModel, name, "EMBEDDING", dtype=torch.float32).to(device).eval()
        if self.model.config.is_encoder_decoder:  # T5: its encoder reads
            self.model = self.model.get_encoder()
        if self.tokenizer.pad_token_id is None:  # padding is masked, whatever it is
            self.tokenizer.pad_token = self.tokenizer.eos_token or self.tokenizer.unk_token

    @torch.no_grad()
    def vectors(self, rows):
        means = []
        limit = min(512, self.tokenizer.model_max_length)
        for start in range(0, len(rows), READER_BATCH_SIZE):
            texts = column(rows[start : start + READER_BATCH_SIZE], "text")
            read = self.tokenizer(texts, padding=True, truncation=True, max_length=limit, return_tensors="pt")
            states = self.model(**read.to(self.model.device)).last_hidden_state
            mask = read["attention_mask"][..., None].to(states.dtype)
            means.append((states * mask).sum(1) / mask.sum(1))
        return torch.cat(means).float().cpu().numpy()


class ImageEmbedder:
    """CLIP or SigLIP: vectors of texts and of images, each of length 1, joined by IMAGE_VECTORS. A row
    without an image has zeros for it, or with "mean" its text's vector."""

    def __init__(self, name, device):
        from transformers import AutoModel, AutoProcessor

        self.processor = load_pretrained(AutoProcessor, name, "EMBEDDING")
        self.model = load_pretrained(AutoModel, name, "EMBEDDING", dtype=torch.float32).to(device).eval()

    def features(self, rows):
        """Returns vectors of the rows' texts and images, two (rows, d)."""
        texts = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        inputs = self.processor(text=column(rows, "text"), **texts).to(self.model.device)
        text = self.model.get_text_features(**inputs)
        text = scaled(getattr(text, "pooler_output", text).cpu().numpy())
        image = np.zeros_like(text)
        places = [i for i, row in enumerate(rows) if row["image"]]
        if places:
            images = [read_image(rows[i]) for i in places]
            inputs = self.processor(images=images, return_tensors="pt").to(self.model.device)
            features = self.model.get_image_features(**inputs)
            image[places] = scaled(getattr(features, "pooler_output", features).cpu().numpy())
        return text, image

    @torch.no_grad()
    def vectors(self, rows):
        joined = []
        for start in range(0, len(rows), READER_BATCH_SIZE):
            text, image = self.features(rows[start : start + READER_BATCH_SIZE])
            choices = {"text": text, "image": image, "mean": text + image}
            joined.append(np.hstack([text, image]) if IMAGE_VECTORS == "both" else choices[IMAGE_VECTORS])
        return np.concatenate(joined)


def make_embedder(demos, device):
    """Returns an object with vectors(rows), (rows, d), of rows with "text" and "image". Replace it."""
    if EMBEDDING == "tfidf":
        return TfidfEmbedder(demos)
    if is_image_embedder(EMBEDDING):
        return ImageEmbedder(EMBEDDING, device)
    return HubEmbedder(EMBEDDING, device)


def is_image_embedder(name):
    """Returns whether a folder or hub name is a model of texts and images such as CLIP, by its config."""
    from transformers import AutoConfig

    config = load_pretrained(AutoConfig, name, "EMBEDDING")
    return hasattr(config, "vision_config") and hasattr(config, "text_config")


def scaled(vectors):
    """Returns float32 vectors of length 1. A vector of zeros, of a text without a known word, stays zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-9)).astype(np.float32)


def embed(embedder, rows):
    """Returns scaled vectors of rows, (rows, d)."""
    vectors = np.asarray(embedder.vectors(rows))
    if vectors.ndim != 2 or len(vectors) != len(rows) or not np.isfinite(vectors).all():
        wanted = f"must give finite numbers of shape ({len(rows)}, d)"
        raise UserError(f"vectors() of {type(embedder).__name__} {wanted}, not an array of {vectors.shape}")
    return scaled(vectors)


def name_of(thing):
    """Returns the name of a function or of an object's class, and whether another file defines it."""
    name = json_name(thing)
    return name if thing.__module__ == __name__ else f"{name} of another file"


# differs: what is replaced in this trainer
def source_of(thing):
    """The source of a function or class; its name where there is none, as in an interactive session."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return json_name(thing)


def embedder_facts():
    """Returns what vectors depend on beside the rows: the source of make_embedder and of the functions and
    classes that it names, the plain values that it names, and the files of a model's folder."""
    facts = [EMBEDDING, EMBEDDING_SIZE, IMAGE_VECTORS, name_of(make_embedder), source_of(make_embedder)]
    if inspect.isfunction(make_embedder):
        named = inspect.getclosurevars(make_embedder)
        for name, value in sorted({**named.globals, **named.nonlocals}.items()):
            if inspect.isfunction(value) or inspect.isclass(value):
                facts.append([name, source_of(value)])
            elif isinstance(value, (str, int, float)):
                facts.append([name, value])
    return facts + folder_facts(EMBEDDING)


def folder_facts(folder):
    """Returns the names and digests of the files of a model's folder; [] of anything else."""
    facts = []
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            facts.append([str(path.relative_to(folder)), file_digest(path)["sha256"]])
    return facts


def vectors_digest(demos):
    """Returns a digest of what the numbers that a policy reads depend on. TF-IDF is fitted on the texts, and
    the answers' vectors are decorrelated together."""
    facts = [Path(EMBEDDING).name, EMBEDDING_SIZE, EMBED_ANSWERS, name_of(make_embedder)]
    if any(column(demos, "image")):
        facts.append(IMAGE_VECTORS)
    if TRAIN_DATASET.get("vectors"):
        facts.append(file_digest(TRAIN_DATASET["vectors"])["sha256"])
    if EMBEDDING == "tfidf":
        facts += column(demos, "text")
    if EMBED_ANSWERS:
        facts += sorted(set(column(demos, "answer")))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def embed_splits(splits, demos, device, say, afresh):
    """Gives each example its "vector", and each demonstration the "candidate_vector" of its answer. A file
    keeps them, named by a digest of the rows, the images' bytes and embedder_facts(). A fresh run computes
    those of an embedder of your own again: the digest cannot see what else such code reads."""
    examples = {}  # each once, training rows first, in the order of their numbers
    for example in chain(demos, *splits.values()):
        examples[example["split"] == "test", example["number"]] = example
    examples = list(dict(sorted(examples.items())).values())
    answers = sorted(set(column(demos, "answer")))
    images = sorted(set(column(examples, "image")) - {None})
    facts = [embedder_facts(), answers, {image: file_digest(image)["sha256"] for image in images}]
    facts += map(itemgetter("id", "text", "split", "image"), examples)
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    path = Path(OUTPUT_DIR) / f"embeddings_{digest}.npz"
    of_your_own = name_of(make_embedder) != "make_embedder"
    if not path.exists() or (afresh and of_your_own):
        embedder = make_embedder(demos, device)
        vectors = embed(embedder, examples)
        answer_rows = [{"text": answer.replace("_", " "), "image": None} for answer in answers]
        answer_vectors = embed(embedder, answer_rows)
        # Decorrelated: what is learnt of one answer leaves the others as they are
        answer_vectors = scaled(np.linalg.svd(answer_vectors, full_matrices=False)[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda tmp: np.savez(open(tmp, "wb"), vectors, answer_vectors))
        say(f"Embedded {len(examples)} texts, {vectors.shape[1]} numbers each: {path}")
    with np.load(path) as file:
        vectors, answer_vectors = file["arr_0"], dict(zip(answers, file["arr_1"]))
    for example, vector in zip(examples, vectors):
        example["vector"] = example.get("given_vector", vector)
    for demo in demos:
        demo["candidate_vector"] = answer_vectors[demo["answer"]] if EMBED_ANSWERS else demo["vector"]


def load_pointer(folder, sizes):
    """Returns a folder's policy; None: a new one. sizes are those of a query's and a candidate's vector."""
    options = {"dropout": DROPOUT, "pointer_temperature": POINTER_TEMPERATURE}  # whatever it was trained with
    if folder is None:
        shape = {"hidden_size": HIDDEN_SIZE, "layers": LAYERS, "heads": HEADS}
        return Pointer(PointerConfig(query_size=sizes[0], candidate_size=sizes[1], **shape, **options))
    try:
        policy, report = Pointer.from_pretrained(str(folder), output_loading_info=True, **options)
    except Exception as error:  # transformers raises many types
        raise UserError(f"{folder} is no policy of this program ({first_line(error)})") from None
    if any(report.values()):  # weights that are missing or unexpected
        raise UserError(f"{folder}: {report}: take a policy that this version made")
    trained_sizes = policy.config.query_size, policy.config.candidate_size
    if trained_sizes != tuple(sizes):
        todo = "TRAIN_DATASET, TEST_DATASET, SPLIT_SEED and EMBEDDING must be those of its run"
        fault = f"reads vectors of {trained_sizes} numbers, these data give {tuple(sizes)}"
        raise UserError(f"{folder} {fault}: {todo}")
    return policy


# ---------------------------------------------------------------- readers: replace them by your own
# A reader has answers(asked), texts, and gold_probabilities(asked), of each query's golds, in [0, 1]. asked
# is [(query, demonstrations)]; these are rows: text, image, golds, answer, vector.

_NUMBER_WORDS = {
    word: str(n) for n, word in enumerate("zero one two three four five six seven eight nine ten".split())
} | {"none": "0"}
_CONTRACTIONS = (
    "ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't "
    "he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've "
    "mustn't must've needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't "
    "shouldn't've somebody'd've somebody'll somebody's someone'd someone'd've someone'll someone's "
    "something'd something'd've something'll that's there'd there'd've there're there's they'd they'd've "
    "they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's "
    "where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't "
    "wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've"
).split()
_WITH_APOSTROPHE = {  # its table: one apostrophe is missing, each in turn; one key has one too many
    word[:n] + word[n + 1 :]: word for word in _CONTRACTIONS for n, sign in enumerate(word) if sign == "'"
}
_WITH_APOSTROPHE["somebody'd"] = "somebodyd"


@lru_cache(maxsize=100_000)
def normalise_vqa(text: str) -> str:
    """An answer as the VQA evaluation compares it: lower case, number words as digits, no articles, no
    punctuation, contractions with their apostrophes. Source: GT-Vision-Lab/VQA, vqaEval.py."""
    text = text.replace("\n", " ").replace("\t", " ").strip()
    original = text
    for sign in ';/[]"{}()=+\\_-><@`,?!':
        beside_a_blank = f"{sign} " in original or f" {sign}" in original
        alone = beside_a_blank or re.search(r"\d,\d", original)
        text = text.replace(sign, "" if alone else " ")
    text = re.sub(r"(?!<=\d)\.(?!\d)", "", text)
    words = [_NUMBER_WORDS.get(word, word) for word in text.lower().split()]
    return " ".join(_WITH_APOSTROPHE.get(word, word) for word in words if word not in ("a", "an", "the"))


def vqa_accuracy(response: str, golds: list[str]) -> float:
    """Official VQA accuracy: min(agreeing / 3, 1) averaged over leaving each of the gold answers out; one
    gold answer: 1.0 where it is the same. Range [0, 1]."""
    said = normalise_vqa(response)
    same = [normalise_vqa(gold) == said for gold in golds]
    if len(golds) == 1:
        return float(same[0])
    agreeing = sum(same)
    return sum(min((agreeing - one) / 3, 1.0) for one in same) / len(golds)


def gold_weights(golds):
    """Returns {distinct gold answer: its weight}: 1, or of annotators min(count / 3, 1). Answers that VQA's
    normalisation makes equal are one."""
    spellings = {}  # normalised gold: how it is written first
    counts = Counter()
    for gold in golds:
        counts[spellings.setdefault(normalise_vqa(gold), gold)] += 1
    enough = min(3, len(golds)) if GOLDS == "annotators" else 1
    return {gold: min(1.0, count / enough) for gold, count in counts.items()}


def answer_accuracy(text, golds):
    """Returns 1 if the answer is one of the golds, else 0; of annotators VQA's accuracy."""
    if GOLDS == "annotators":
        return vqa_accuracy(text, golds)
    return float(normalise_vqa(text) in map(normalise_vqa, golds))


class VoteReader:
    """A frozen classifier: P(answer) = (PRIOR_STRENGTH * its share of all demonstrations' answers + the
    similarity of those read that show it) / the sum over all answers. Exact, and blind to the order. Answers
    are counted as VQA's normalisation writes them."""

    def __init__(self, demos):
        answers = list(map(normalise_vqa, column(demos, "answer")))
        self.spellings = dict(zip(reversed(answers), reversed(column(demos, "answer"))))  # the first of each
        self.prior = {answer: count / len(demos) for answer, count in Counter(answers).items()}
        self.commonest = max(self.prior, key=self.prior.get)

    def votes(self, query, demonstrations):
        """Returns {answer: votes} of the demonstrations; one of similarity 0 or less still gives a little."""
        votes = {}
        for demo in demonstrations:
            similarity = max(0.0, float(query["vector"] @ demo["vector"])) + 1e-3
            answer = normalise_vqa(demo["answer"])
            votes[answer] = votes.get(answer, 0.0) + similarity
        return votes

    def probability(self, votes, answer):
        weight = PRIOR_STRENGTH * self.prior.get(answer, 0.0) + votes.get(answer, 0.0)
        return weight / (PRIOR_STRENGTH + sum(votes.values()))

    def answers(self, asked):
        texts = []
        for query, demonstrations in asked:
            votes = {self.commonest: 0.0} | self.votes(query, demonstrations)
            best = max(votes, key=partial(self.probability, votes))
            texts.append(self.spellings.get(best, best))
        return texts

    def gold_probabilities(self, asked):
        probabilities = []
        for query, demonstrations in asked:
            votes = self.votes(query, demonstrations)
            total = 0.0
            for gold, weight in gold_weights(query["golds"]).items():
                total += weight * self.probability(votes, normalise_vqa(gold))
            probabilities.append(min(1.0, total))
        return probabilities


class LanguageReader:
    """A causal language model: greedy answers, and the probability of the golds after the prompt."""

    def __init__(self, name, device):
        from transformers import GenerationConfig

        model = self.load(name)  # sets self.tokenizer, and self.processor, which has the chat template
        tokenizer = self.tokenizer
        self.model = model.to(device).eval()
        config = model.generation_config
        # The model may have one id, several or none
        eos = np.hstack([config.eos_token_id, tokenizer.eos_token_id]).tolist()
        eos = sorted(set(eos) - {None})
        self.pad_id = [*eos, 0][0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        # A model's own penalties and cuts stay out: gt_prob knows none
        model.generation_config = GenerationConfig(
            eos_token_id=eos or None, pad_token_id=self.pad_id, bos_token_id=config.bos_token_id
        )
        # An answer ends with EOS or a token that begins with a newline, such as a paragraph's "\n\n"
        texts = tokenizer.batch_decode(torch.arange(len(tokenizer))[:, None])
        newlines = [n for n, text in enumerate(texts) if text.lstrip(" ").startswith(("\n", "\r\n"))]
        ends = torch.tensor(sorted({*eos, *newlines}), dtype=torch.long, device=device)
        self.ends = ends[ends < model.config.get_text_config().vocab_size]
        if not len(self.ends):
            raise UserError(f"READER = {name!r} has no token that ends an answer, neither EOS nor a newline")
        self.chats = bool(CHAT_TEMPLATE and self.processor.chat_template)
        self.limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf

    def load(self, name):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = load_pretrained(AutoTokenizer, name, "READER", padding_side="left")
        self.processor = self.tokenizer
        return load_pretrained(AutoModelForCausalLM, name, "READER", dtype=getattr(torch, DTYPE))

    def prompt(self, query, demonstrations):
        """Returns what the model reads. A space at its end is cut: tokens of the answer begin with theirs."""
        text = INSTRUCTION or ""
        for demo in demonstrations:
            text += DEMONSTRATION.format(text=demo["text"], answer=demo["answer"])
        text = (text + QUERY.format(text=query["text"])).rstrip(" ")
        if not self.chats:
            return text
        messages = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def ids_of(self, texts):
        """Returns ids of prompts with or without an answer. A chat's template has written BOS."""
        ids = self.tokenizer(texts, add_special_tokens=not self.chats)["input_ids"]
        for row in ids:
            if not self.chats and len(row) > 1 and row[-1] == self.tokenizer.eos_token_id:
                row.pop()  # some tokenizers end every text
        return ids

    def inputs(self, texts, asked):
        """Returns what the model reads of texts, left-padded: input_ids and attention_mask, (texts, P)."""
        rows = self.ids_of(texts)
        ids = pad_rows(rows, self.pad_id, "left")
        lengths = torch.tensor(list(map(len, rows)))
        mask = torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]
        device = self.model.device
        return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}

    def position_ids(self, mask):
        return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}

    def check_length(self, length):
        if length > self.limit:
            fault = f"reads {self.limit} tokens, a prompt and its answer have {length}"
            raise UserError(f"READER = {READER!r} {fault}: lower SHOTS or EVAL_SHOTS, or leave long rows out")

    @torch.no_grad()
    def answers(self, asked, **sampling):
        """Returns greedy answers; sampled ones by generate()'s own options."""
        answers = []
        options = {"do_sample": False, "num_beams": 1, "max_new_tokens": MAX_ANSWER_TOKENS, **sampling}
        for start in range(0, len(asked), READER_BATCH_SIZE):
            chunk = asked[start : start + READER_BATCH_SIZE]
            inputs = self.inputs(list(starmap(self.prompt, chunk)), chunk)
            prompt_length = inputs["input_ids"].shape[1]
            self.check_length(prompt_length + MAX_ANSWER_TOKENS)
            out = self.model.generate(**inputs, **options)
            texts = self.tokenizer.batch_decode(out[:, prompt_length:], skip_special_tokens=True)
            answers += [text.strip().partition("\n")[0].strip() for text in texts]  # up to a line's end
        return answers

    @torch.no_grad()
    def gold_probabilities(self, asked):
        space = "" if self.chats else " "
        golds = []  # (number of the query, prompt, prompt and answer, weight)
        for number, (query, demonstrations) in enumerate(asked):
            prompt = self.prompt(query, demonstrations)
            for gold, weight in gold_weights(query["golds"]).items():
                golds.append((number, prompt, prompt + space + gold, weight))
        probabilities = np.zeros(len(asked))
        for start in range(0, len(golds), READER_BATCH_SIZE):
            numbers, prompts, texts, weights = zip(*golds[start : start + READER_BATCH_SIZE])
            lengths = []  # of answers, with a token that merges the prompt's end with the answer's beginning
            for row, prompt_ids in zip(self.ids_of(list(texts)), self.ids_of(list(prompts))):
                lengths.append(len(row) - len(os.path.commonprefix([row, prompt_ids])))
            inputs = self.inputs(list(texts), [asked[number] for number in numbers])
            for number, weight, logprob in zip(numbers, weights, self.answer_logprobs(inputs, lengths)):
                probabilities[number] += weight * math.exp(logprob)
        return probabilities.clip(max=1.0).tolist()

    def answer_logprobs(self, inputs, lengths):
        """Returns the log-probability of each row's last `lengths` tokens and an end after them, a list."""
        ids = inputs["input_ids"]
        self.check_length(ids.shape[1])
        kept = max(lengths) + 1
        positions = self.position_ids(inputs["attention_mask"])
        out = self.model(**inputs, **positions, logits_to_keep=kept)
        logprobs = out.logits[:, -kept:].float().log_softmax(-1)
        chosen = logprobs[:, :-1].gather(2, ids[:, 1 - kept :, None])[..., 0].double()  # (rows, kept - 1)
        places = torch.arange(1 - kept, 0, device=ids.device)
        in_answer = places >= -torch.tensor(lengths, device=ids.device)[:, None]
        ends = logprobs[:, -1, self.ends].double().logsumexp(-1)
        return ((chosen * in_answer).sum(1) + ends).tolist()


def reads_images(name):
    """Returns whether a folder or hub name is an image-text-to-text model, by its config."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    return load_pretrained(AutoConfig, name, "READER").model_type in NAMES


def read_image(example):
    """Returns an example's image as RGB, made smaller if it has more than MAX_IMAGE_PIXELS."""
    from PIL import Image

    try:
        image = Image.open(example["image"]).convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # PIL raises each for a bad file
        raise UserError(f"{example['id']}: {example['image']} is no image ({first_line(error)})") from None
    scale = math.sqrt(MAX_IMAGE_PIXELS / (image.width * image.height))
    if scale < 1:
        return image.resize([max(1, int(side * scale)) for side in image.size], Image.Resampling.BICUBIC)
    return image


class VisionReader(LanguageReader):
    """An image-text-to-text model, such as Qwen2.5-VL, SmolVLM or LLaVA. One message has the demonstrations
    and the query in turn, the image of each before its text."""

    def load(self, name):
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.processor = load_pretrained(AutoProcessor, name, "READER", padding_side="left")
        self.tokenizer = self.processor.tokenizer
        return load_pretrained(AutoModelForImageTextToText, name, "READER", dtype=getattr(torch, DTYPE))

    def prompt(self, query, demonstrations):
        content = [{"type": "text", "text": INSTRUCTION or ""}]
        texts = [DEMONSTRATION.format(text=demo["text"], answer=demo["answer"]) for demo in demonstrations]
        texts.append(QUERY.format(text=query["text"]).rstrip(" "))
        for example, text in zip((*demonstrations, query), texts):
            if self.processor.image_token in text:
                fault = f"has the text {self.processor.image_token!r}, which stands for an image"
                raise UserError(f"{example['id']} {fault} in READER = {READER!r}")
            if example["image"]:
                content.append({"type": "image", "text": self.processor.image_token})
            content.append({"type": "text", "text": text})
        if not self.chats:
            return "".join(column(content, "text"))
        messages = [{"role": "user", "content": [part for part in content if part["text"]]}]
        return self.processor.apply_chat_template(messages, add_generation_prompt=True)

    def inputs(self, texts, asked):
        """Returns what the model reads of texts with the images of demonstrations and queries: input_ids and
        attention_mask, (texts, P), where P counts the tokens of the images, and their pixels."""
        images = []  # of each text
        for query, demonstrations in asked:
            images.append([read_image(row) for row in (*demonstrations, query) if row["image"]])
        options = {"padding": True, "return_tensors": "pt", "add_special_tokens": not self.chats}
        if any(images):
            options["images"] = images
        return self.processor(text=texts, **options).to(self.model.device, self.model.dtype)

    def position_ids(self, mask):
        return {}  # Qwen's have three axes, which it works out itself; the others' are relative


# ---------------------------------------------------------------- pools and mining


class Corpus:
    """Demonstrations, their vectors, and the pool of each query."""

    def __init__(self, demos, device):
        self.demos = demos
        self.device = device
        questions = list(map(what_is_asked, demos))
        # Demonstrations that ask the same have one number
        self.number = dict(zip(dict.fromkeys(questions), range(len(questions))))
        self.asked = torch.tensor(list(map(self.number.get, questions)))
        self.embedder = None  # of new queries
        vectors = torch.tensor(np.stack(column(demos, "candidate_vector")))
        vectors, self.vector_of = torch.unique(vectors, dim=0, return_inverse=True)
        self.vectors = vectors.to(device)  # one row for all demonstrations of one answer
        self.demo_vectors = torch.tensor(np.stack(column(demos, "vector")))
        self.sizes = self.demo_vectors.shape[1], self.vectors.shape[1]  # of a query's, a candidate's vector
        answers, answer_of = np.unique(column(demos, "answer"), return_inverse=True)
        self.answer_of = torch.tensor(answer_of)
        self.classifies = 1 < len(answers) <= 500
        self.rule = ("similarity", 0)  # that the policy starts as
        self.classifiers = {}  # by C and the fold that each was not fitted on
        self.probabilities = {}  # by rule, setting and the query's id

    def examples(self, numbers):
        return [self.demos[j] for j in numbers]

    def embed_query(self, query):
        """Returns the vector of a new query."""
        if "given_vector" in self.demos[0]:
            raise UserError("select() cannot make the vector of a new query: TRAIN_DATASET has given vectors")
        self.embedder = self.embedder or make_embedder(self.demos, self.device)
        return embed(self.embedder, [query])[0]

    def pool_of(self, query):
        """Returns the numbers of a query's demonstrations, (pool,), without those that ask the same."""
        if "pool" not in query:
            if POOL == "random":
                order = torch.randperm(len(self.demos), generator=query_stream(query, "pool"))
            else:
                order = self.ranking(query, torch.arange(len(self.demos)))
            query["pool"] = order[self.asked[order] != self.number.get(what_is_asked(query), -1)]
            if query["split"] != "select":
                query["pool"] = query["pool"][:POOL_SIZE]
        return query["pool"]

    def similarity(self, query, numbers):
        """Returns the cosines of a query and demonstrations, (numbers,)."""
        return self.demo_vectors[numbers] @ torch.tensor(query["vector"])

    def ranking(self, query, numbers):
        """Returns places within `numbers`, that of the demonstration most similar to the query first."""
        return self.similarity(query, numbers).argsort(descending=True, stable=True)

    def answer_probabilities(self, query, name, setting):
        """Returns the probability of each answer, (answers,), by the demonstrations' answers and vectors:
        kNN, votes of the `setting` nearest by 1 / (1 - cosine), or a logistic regression with C = `setting`.
        A query that is a demonstration itself is asked of the four fifths without it and all that ask the
        same: it never sees its own answer."""
        key = name, setting, query["id"]
        if key not in self.probabilities:
            number = self.number.get(what_is_asked(query))
            fold = -1 if number is None else number % 5
            fitted = (self.asked % 5 != fold).nonzero()[:, 0]
            of_answers = np.zeros(self.answer_of.max() + 1)
            if name == "kNN":
                cosines, nearest = self.similarity(query, fitted).topk(min(setting, len(fitted)))
                votes = 1 / (1 - cosines).clamp(min=1e-6).double()
                np.add.at(of_answers, self.answer_of[fitted[nearest]].numpy(), (votes / votes.sum()).numpy())
            else:
                model = self.classifier(setting, fold, fitted)
                of_answers[model.classes_] = model.predict_proba(query["vector"][None])[0]
            self.probabilities[key] = of_answers
        return self.probabilities[key]

    def classifier(self, C, fold, fitted):
        """Returns the logistic regression of the demonstrations' answers without a fold."""
        from sklearn.dummy import DummyClassifier
        from sklearn.linear_model import LogisticRegression

        if (C, fold) not in self.classifiers:
            several = len(self.answer_of[fitted].unique()) > 1
            model = LogisticRegression(C=C, max_iter=1000) if several else DummyClassifier()
            model.fit(self.demo_vectors[fitted].numpy(), self.answer_of[fitted].numpy())
            self.classifiers[C, fold] = model
        return self.classifiers[C, fold]

    def log_likelihood(self, query, numbers):
        """Returns a tenth of log p(answer | query) of demonstrations, (numbers,), at least -1, by a logistic
        regression; 0 without a classifier."""
        if not self.classifies or not CLASSIFIER_C:
            return torch.zeros(len(numbers))
        of_answers = torch.tensor(self.answer_probabilities(query, "classifier", CLASSIFIER_C))
        return of_answers.log().div(10).clamp(min=-1).float()[self.answer_of[numbers]]

    def rule_order(self, query, name, setting):
        """Returns the query's pool's places in the order in which a rule shows them, (pool,). similarity:
        the most similar first; kNN, classifier: rows of the likeliest answer, the most similar first, then of
        the next one; with fillers: of the likeliest alone, then the pool's least similar rows."""
        pool = self.pool_of(query)
        similarity = self.similarity(query, pool).numpy()
        score = np.zeros(len(pool))
        if name != "similarity":
            of_answers = self.answer_probabilities(query, name.partition(",")[0], setting)
            score = of_answers[self.answer_of[pool]]
        if name == "classifier, fillers":
            score = score == score.max(initial=0.0)
            similarity = np.where(score, similarity, -similarity)
        return np.lexsort((-similarity, -score.astype(float)))

    def inputs(self, queries):
        """Returns what the policy reads of queries and their pools: the arguments of Pointer.encode()."""
        rows, known = [], []
        for query in queries:
            pool = self.pool_of(query)
            if "known" not in query or query["known"][0] is not pool:
                place = torch.tensor(self.rule_order(query, *self.rule)).argsort().float()
                columns = self.similarity(query, pool), self.log_likelihood(query, pool), place
                query["known"] = pool, torch.stack(columns, 1)  # (pool, 3)
            rows.append(self.vector_of[pool])
            known.append(query["known"][1])
        vectors = torch.tensor(np.stack(column(queries, "vector")))
        rows = pad_rows(rows, -1)
        known = pad_rows(known).transpose(1, 2).contiguous()
        return vectors.to(self.device), self.vectors, rows.to(self.device), known.to(self.device)


def what_is_asked(example):
    return example["text"].strip().lower(), example["image"]


def query_stream(query, use):
    """Returns a random generator for one use of one query. SEED does not change those of held-out queries."""
    seed = SEED if query["split"] == "train" else SPLIT_SEED
    digest = hashlib.sha256(f"{seed} {query['id']} {use}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


class Miner:
    """Proposes lists and asks the reader about them. A group has one query, its pool and its candidates."""

    def __init__(self, corpus, policy, reader):
        self.corpus = corpus
        self.policy = policy
        self.reader = reader

    @torch.no_grad()
    def mine(self, queries, shots):
        """Returns groups: proposed, scored by gt_prob, recombined; the best and a few others marked."""
        self.policy.eval()
        groups = self.propose(queries, shots)
        self.score_gold(groups)
        for group in groups:
            self.take_apart(group)
        self.score_gold(groups)
        self.verify(groups, "alone")
        for group in groups:
            self.recombine(group, shots)
        self.score_gold(groups)
        for group in groups:
            group.proposed = sum(map(len, column(group.candidates, "source")))
            self.choose_kept(group)
        self.verify(groups)
        candidates = list(chain.from_iterable(map(attrgetter("candidates"), groups)))
        if all(column(candidates, "eval_failed")):
            first = candidates[0]["eval_error"]
            raise UserError(f"the reader failed for every one of {len(candidates)} lists: {first}")
        self.add_logprobs(groups)
        return groups

    @torch.no_grad()
    def add_logprobs(self, groups):
        """Adds the log-probabilities of the groups' lists under the policy."""
        lists = list(map(attrgetter("candidates"), groups))
        pointers = pad_pointers(lists).to(self.corpus.device)
        inputs = self.corpus.inputs(list(map(attrgetter("query"), groups)))
        logprobs = list_logprobs(self.policy(*inputs, pointers), pointers).tolist()
        for candidates, values in zip(lists, logprobs):
            for candidate, logprob in zip(candidates, values):
                candidate["logprob"] = logprob

    def propose(self, queries, shots):
        """Returns one group per query: its pool and its distinct ordered lists, each with all its sources."""
        inputs = self.corpus.inputs(queries)  # padded, for the policy alone
        check_room(inputs[2], shots)
        encoded = self.policy.encode(*inputs)  # once for all beams and samples
        proposed = [{} for _ in queries]  # {pointer: candidate}
        if BEAMS:
            pointers, scores = self.policy.search(*inputs, shots, BEAMS, encoded)
            for candidates, beams, beam_scores in zip(proposed, pointers.tolist(), scores.tolist()):
                for pointer, score in zip(beams, beam_scores):
                    if score > -1e8:  # a small pool has fewer lists than BEAMS
                        add_candidate(candidates, pointer, "beam")["beam_score"] = score
        for number, temperature in enumerate(SAMPLE_TEMPERATURES):
            uniform = []
            for query in queries:
                stream = query_stream(query, f"sample {number}")
                uniform.append(torch.rand(SAMPLES, shots, inputs[2].shape[1], generator=stream))
            uniform = torch.stack(uniform).to(self.corpus.device)
            pointers = self.policy.sample(*inputs, uniform, temperature, encoded)
            for candidates, samples in zip(proposed, pointers.tolist()):
                for pointer in samples:
                    add_candidate(candidates, pointer, "sample", float(temperature))
        groups = []
        for query, candidates in zip(queries, proposed):
            pool = self.corpus.pool_of(query)
            by_rule = torch.tensor(self.corpus.rule_order(query, *self.corpus.rule))
            for source, order in (("retrieval", self.corpus.ranking(query, pool)), ("rule", by_rule)):
                for pointer in cut_lists(order, shots)[:RETRIEVED]:
                    add_candidate(candidates, pointer, source)
                    if source == "rule":  # some readers heed the last demonstration most
                        add_candidate(candidates, pointer[::-1], source)
            stream = query_stream(query, "random")
            pointers = []
            while len(pointers) < RANDOM:
                pointers += cut_lists(torch.randperm(len(pool), generator=stream), shots)
            for pointer in pointers[:RANDOM]:
                add_candidate(candidates, pointer, "random")
            groups.append(SimpleNamespace(query=query, pool=pool, candidates=list(candidates.values())))
        if not all(proposed):
            raise UserError("nothing proposes a list: set BEAMS, SAMPLES, RETRIEVED or RANDOM")
        for group in groups:
            group.doubles = share_of_doubles(group.candidates)
        return groups

    def take_apart(self, group):
        """Adds each member of the LOCAL_TOP best lists without a common member as a list of its own."""
        members = []
        remaining = LOCAL_TOP
        for candidate in sorted(group.candidates, key=gold_first):
            if remaining and not set(candidate["pointer"]) & set(members):
                members += candidate["pointer"]
                remaining -= 1
        candidates = by_pointer(group.candidates)
        group.alone = []
        for member in members:
            group.alone.append(candidates.setdefault((member,), new_candidate((member,), "alone")))
        group.candidates = list(candidates.values())

    def recombine(self, group, shots):
        """Adds LOCAL lists: the members that are right alone in random order, then others of the pool, the
        least similar or any. Right lists often have a bad member; a reader that is blind to order would not
        stop the policy from choosing it first."""
        right = column(filter(itemgetter("hard"), group.alone), "pointer")
        right = torch.tensor(right, dtype=torch.long).flatten()
        places = torch.arange(len(group.pool))
        others = places[~torch.isin(places, right)]
        ranking = self.corpus.similarity(group.query, group.pool[others]).argsort(stable=True)
        stream = query_stream(group.query, "local")
        candidates = by_pointer(group.candidates)
        for number in range(LOCAL):
            first = right[torch.randperm(len(right), generator=stream)]
            fillers = others[ranking[: 2 * shots]] if number % 2 else others
            fillers = fillers[torch.randperm(len(fillers), generator=stream)]
            pointer = tuple(torch.cat([first, fillers])[:shots].tolist())
            if len(pointer) == shots:
                candidates.setdefault(pointer, new_candidate(pointer, "local"))
        group.candidates = list(candidates.values())

    def choose_kept(self, group):
        """Keeps what is right alone, the policy's pick, KEEP_TOP by gt_prob and KEEP_RANDOM of the others.
        A list does not count if a member that is right alone stands behind any other."""
        alone = by_pointer(group.alone)
        ordered = []
        for candidate in group.candidates:
            marks = [alone.get((j,), {}).get("hard") or 0 for j in candidate["pointer"]]
            if candidate["pointer"] not in alone and marks == sorted(marks, reverse=True):
                ordered.append(candidate)
        ordered.sort(key=gold_first)
        kept, others = ordered[:KEEP_TOP], ordered[KEEP_TOP:]
        order = torch.randperm(len(others), generator=query_stream(group.query, "keep"))
        kept += [others[i] for i in order[:KEEP_RANDOM]]
        pick = group.candidates[policy_pick(group.candidates)]
        if pick["beam_score"] is not None and pick["pointer"] not in alone and pick not in kept:
            kept.append(pick)
        # Short lists last. At one shot what was asked alone may have been proposed as a list: that is kept
        kept += [c for c in group.alone if c["hard"] or c["source"] != ["alone"]]
        group.candidates = kept or group.alone

    def score_gold(self, groups):
        """Asks for gt_prob of the lists that have none yet."""
        self.ask(groups, "candidates", "gt_prob", self.reader.gold_probabilities, take_gold)

    def verify(self, groups, which="candidates"):
        """Asks for answers of the lists that have none yet, and marks them."""
        self.ask(groups, which, "hard", self.reader.answers, take_answer)

    def ask(self, groups, which, mark, method, take):
        """Asks the reader about the lists that lack a mark and did not fail."""
        asked, candidates = [], []
        for group in groups:
            pool = self.corpus.examples(self.corpus.pool_of(group.query).tolist())
            for candidate in getattr(group, which):
                if candidate[mark] is None and not candidate["eval_failed"]:
                    asked.append((group.query, [pool[j] for j in candidate["pointer"]]))
                    candidates.append(candidate)
        if asked:
            ask_and_take(asked, candidates, method, take)


def ask_and_take(asked, candidates, method, take):
    """Asks about all lists at once; if that raises, one by one. What raises by itself is marked as failed and
    not asked again."""
    try:
        values = ask_reader(method, asked)
    except UserError:
        raise
    except Exception as error:  # a reader may raise anything
        if len(asked) == 1:
            candidates[0].update(eval_failed=True, eval_error=f"{type(error).__name__}: {error}")
            return
        for pair, candidate in zip(asked, candidates):
            ask_and_take([pair], [candidate], method, take)
        return
    for (query, _), candidate, value in zip(asked, candidates, values):
        take(candidate, value, query)


def ask_reader(method, asked):
    """Returns what a method of a reader gives for [(query, demonstrations)], a list: one value for each."""
    values = list(method(asked))
    if len(values) != len(asked):
        counts = f"{len(values)} values for {len(asked)} lists"
        raise UserError(f"the reader gave {counts}: it must give one for each")
    return values


# ---------------------------------------------------------------- lists and files


def new_candidate(pointer, source=None, temperature=None):
    """Returns a list: numbers within the pool, in order, and every way in which it was proposed."""
    candidate = {"pointer": tuple(pointer), **dict.fromkeys(_FIELDS)}
    candidate |= {"source": [], "temperature": [], "text": "", "eval_failed": False}
    if source:
        candidate |= {"source": [source], "temperature": [temperature]}
    return candidate


def by_pointer(candidates):
    """Returns {pointer: candidate}."""
    return {candidate["pointer"]: candidate for candidate in candidates}


def add_candidate(candidates, pointer, source, temperature=None):
    """Adds a way in which a list was proposed to {pointer: candidate}. Returns the candidate."""
    candidate = candidates.setdefault(tuple(pointer), new_candidate(pointer))
    candidate["source"].append(source)
    candidate["temperature"].append(temperature)
    return candidate


def share_of_doubles(candidates):
    """Returns the share of the proposed lists that were proposed before, by another source or the same."""
    return 1 - len(candidates) / sum(map(len, column(candidates, "source")))


def cut_lists(order, shots):
    """Cuts an order, a tensor, into lists of `shots`; the rest is left out."""
    return order[: len(order) // shots * shots].view(-1, shots).tolist()


def gold_first(candidate):
    """Sorts by gt_prob, the highest first; a list without one comes last."""
    return math.inf if candidate["gt_prob"] is None else -candidate["gt_prob"]


def take_gold(candidate, value, query):
    if isinstance(value, str) or not 0 <= value <= 1:
        raise UserError(f"the reader gives {query['id']} gt_prob {value!r}: it must be from 0 to 1")
    candidate["gt_prob"] = float(value)


def take_answer(candidate, text, query):
    """Marks an answer: its accuracy, right if that is above 0, and its relevance."""
    if not isinstance(text, str):
        raise UserError(f"the reader answers {query['id']} with {text!r}: it must be a text")
    candidate["text"] = text
    candidate["soft"] = answer_accuracy(text, query["golds"])
    candidate["hard"] = int(candidate["soft"] > 0)
    candidate["relevance"] = max(map(partial(rewards.f1_score, text), query["golds"]))
    candidate["eval_mode"] = "vqa" if GOLDS == "annotators" else "exact"


def list_logprobs(all_logprobs, pointers):
    """Returns the log-probabilities of lists, (queries, lists), from those of all candidates at each choice,
    (queries, lists, choices, pool). Choices after a list's end, -1, count 0."""
    chosen = all_logprobs.gather(3, pointers.clamp(min=0)[..., None])[..., 0]
    return (chosen * (pointers >= 0)).sum(2)


def pad_pointers(lists):
    """Returns the pointers of each query's candidates, (queries, lists, choices), -1 where there are none."""
    pointers = [candidate["pointer"] for candidates in lists for candidate in candidates]
    pointers = torch.tensor(list(zip_longest(*pointers, fillvalue=-1))).T
    return pad_rows(pointers.split(list(map(len, lists))), -1)


def pad_rows(rows, fill=0, side="right"):
    """Returns rows of different lengths, tensors or lists, as one tensor (rows, longest, ...)."""
    return pad_sequence(list(map(torch.as_tensor, rows)), True, fill, side)


def column(rows, field):
    """Returns one field of all rows, a list."""
    return [row[field] for row in rows]


def check_room(pool, shots):
    """Refuses pools (queries, pool), padded by -1, of which one has fewer candidates than a list."""
    least = (pool >= 0).sum(-1).min().item()
    if least < shots:
        todo = "ask for fewer SHOTS or EVAL_SHOTS, or give rows that ask something else"
        raise UserError(f"a query's pool holds {least} candidates, a list of {shots} needs as many: {todo}")


# The marks of lists depend on these: lists mined under other values are neither trained on nor joined
_READING = (
    "VALIDATION_QUERIES SPLIT_SEED EMBEDDING EMBEDDING_SIZE READER PRIOR_STRENGTH INSTRUCTION DEMONSTRATION "
    "QUERY CHAT_TEMPLATE MAX_ANSWER_TOKENS DTYPE GOLDS POOL POOL_SIZE"
).split()
# differs: the constants of this trainer
# Which lists there are depends on these, too: parts of one file are never mined under two settings
_MINING = (
    _READING
    + """
    TRAIN_DATASET TEST_DATASET EMBED_ANSWERS BEAMS SAMPLES SAMPLE_TEMPERATURES RETRIEVED RANDOM LOCAL_TOP
    LOCAL KEEP_TOP KEEP_RANDOM MINE_BATCH_SIZE POINTER_POLICY HIDDEN_SIZE LAYERS HEADS POINTER_TEMPERATURE
    CLASSIFIER_C SEED""".split()
)


def code_facts(reader):
    """Returns what else marks depend on, which files of earlier versions do not have: which class reads and
    what makes vectors, by name, and the reader's code and files."""
    facts = {"reader class": name_of(reader), "embedder": name_of(make_embedder)}
    facts |= {"MAX_IMAGE_PIXELS": MAX_IMAGE_PIXELS, "IMAGE_VECTORS": IMAGE_VECTORS}
    return {**facts, "digest of the reader's code and files": reader_digest(type(reader), READER)}


@cache  # a model's files are large
def reader_digest(reader_class, name):
    """Returns a digest of the source of a class and of what it is derived from, and of a folder's files."""
    facts = [list(map(source_of, reader_class.__mro__[:-1])), folder_facts(name)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def list_facts(queries, shots, reader):
    """Returns what the lists of these queries depend on."""
    count = "TEST_QUERIES" if queries[0]["split"] == "test" else "MINE_QUERIES"
    facts = {"program": "rce_icl", "shots": shots, count: len(queries)}
    return mining_facts(**facts, **code_facts(reader))


# differs: the files of this trainer
def candidates_path():
    return Path(CANDIDATES) if CANDIDATES else Path(OUTPUT_DIR) / "candidates.json"


_FIELDS = {  # of a list: its key in the file, which is the source's
    "source": "gen_methods",
    "temperature": "temperatures",
    "beam_score": "beam_score",
    "logprob": "logprob_score",
    "text": "vqa_pred_answer",
    "hard": "vqa_correct",
    "soft": "vqa_acc_score",
    "gt_prob": "vqa_gt_prob",
    "relevance": "vqa_rel_score",
    "eval_mode": "vqa_eval_mode",
    "eval_failed": "eval_failed",
    "eval_error": "eval_error",
}


def group_record(group, demos):
    """Returns (row number, a query and its lists as JSON has them). Pointers and pool are row numbers."""
    pool = [demos[j]["number"] for j in group.pool.tolist()]
    lists = []
    for candidate in group.candidates:
        record = {"pointer": [pool[j] for j in candidate["pointer"]]}
        for key, name in _FIELDS.items():
            record[name] = candidate[key]
        lists.append(record)
    query = {key: group.query[key] for key in ("id", "text", "golds", "split")}
    record = {"query": query, "candidate_pool_ids": pool, "proposed": group.proposed}
    record["share_of_doubles"] = group.doubles
    return str(group.query["number"]), {**record, "pointer_candidates": lists}


def write_candidates(records, path, facts):
    """Writes [(row number, record)] and _meta as JSON: the whole file or nothing."""
    text = json.dumps({"_meta": facts, **dict(records)}) + "\n"
    write_atomically(path, lambda tmp: tmp.write_text(text))


def read_json(path):
    """Returns [(row number, record)] of a file of candidates, and what they were mined with."""
    try:
        records = json.loads(Path(path).read_text())
        mined_with = records.pop("_meta", {})
        return [*records.items()], mined_with
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as JSON with an object ({first_line(error)})") from None


# differs: the files of this trainer
def read_candidates(path, splits, demos, reader):
    """Groups of a file, this program's or the source's. The mapping is strict: a query or demonstration that
    is not known, not in the pool, there twice or asking what the query asks is an error that names it."""
    records, mined_with = read_json(path)
    if mined_with.get("program") == "rce_icl":
        facts = code_facts(reader)
        keys = _READING + [key for key in facts if key in mined_with]  # older files do not have them
        check_facts(path, mined_with, mining_facts(**facts), keys, "mine again, in another OUTPUT_DIR")
    of_test = path.name.startswith("test_candidates_")
    known = splits["test"] if of_test else splits["train"] + splits["validation"]
    known = {str(row["number"]): row for row in known}
    position = {demo["number"]: j for j, demo in enumerate(demos)}
    asking = defaultdict(set)
    for demo in demos:
        asking[what_is_asked(demo)].add(demo["number"])
    parsed = {}
    for key, record in records:
        try:
            told = record.get("query", {}).get("text")  # the source's files may not have it
            lists = [parse_list(c) for c in record["pointer_candidates"]]
            pool = [index(number) for number in record.get("candidate_pool_ids") or ()]
            counts = index(record.get("proposed") or len(lists)), float(record.get("share_of_doubles", "nan"))
            parsed[key] = pool, lists, *counts
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            fault = f"{type(error).__name__}: {error}"
            raise UserError(
                f"{path}, query {key}: cannot be read ({fault}); see docs/reference-icl.md"
            ) from None
        if key not in known or told not in (None, known[key]["text"]):
            raise UserError(f"{path}, query {key}: there is no such query in the data")
    all_numbers = sorted(
        {number for _, lists, *_ in parsed.values() for numbers, _ in lists for number in numbers}
    )
    groups = []
    for key, (pool, lists, proposed, doubles) in parsed.items():
        where = f"{path}, query {key}"
        excluded = asking[what_is_asked(known[key])]
        pool = pool or [number for number in all_numbers if number not in excluded]  # a file without pools
        check_numbers(pool, position, excluded, f"{where}: its pool")
        place = {number: j for j, number in enumerate(pool)}
        candidates = {}
        for pointer, candidate in lists:
            check_numbers(pointer, place, excluded, f"{where}: pointer {pointer}")
            candidate["pointer"] = tuple(place[number] for number in pointer)
            candidates.setdefault(candidate["pointer"], candidate)
        if candidates:
            groups.append(
                SimpleNamespace(
                    query=known[key],
                    pool=torch.tensor([position[number] for number in pool]),
                    candidates=list(candidates.values()),
                    proposed=proposed,
                    doubles=doubles,
                )
            )
    if not groups:
        raise UserError(f"{path}: there are no candidates in it")
    return groups


def check_numbers(numbers, known, same_question, where):
    """Refuses row numbers of a pool or a list that are unknown, there twice or ask what the query asks."""
    for number in numbers:
        if number in same_question:
            raise UserError(f"{where} has row {number}, which asks what the query asks: leave it out")
        if number not in known:
            raise UserError(f"{where} has {number}, which is no demonstration of the data or not in the pool")
    if not numbers or len(set(numbers)) < len(numbers):
        raise UserError(f"{where} is empty or names a demonstration twice")


def parse_list(record):
    """Returns (row numbers, candidate) of one list. If it has pointer_global, the source's newer format, that
    holds the rows, and pointer their places in the pool."""
    numbers = list(map(index, record.get("pointer_global") or record["pointer"]))
    candidate = new_candidate(())
    candidate |= {key: record[name] for key, name in _FIELDS.items() if record.get(name) is not None}
    if not candidate["source"]:
        candidate["source"] = [record.get("gen_method") or "given"]
        candidate["temperature"] = [record.get("temperature")]
    candidate["eval_failed"] |= SKIP_FALLBACK and candidate["eval_mode"] == "fallback"
    marks = itemgetter("hard", "soft", "gt_prob", "relevance")(candidate)
    if not all(mark is None or 0 <= mark <= 1 for mark in marks) or candidate["hard"] not in (0, 1, None):
        raise ValueError(f"vqa_correct takes 0 or 1, the other marks 0 to 1, not {marks}")
    return numbers, candidate


# ---------------------------------------------------------------- STAGE=evaluate


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


# differs: the figures of this trainer
@keeping_constants()
def evaluate_policy(trainer_class):
    """Scores EVALUATE_POLICY without training, on the queries of EVAL_DATASET or else the test's: the
    reader's accuracy after its lists, and after those of the rules, at each of EVAL_SHOTS. Writes
    OUTPUT_DIR/eval_<policy>_<data>.json, and every query to a .jsonl of that name; a run in OUTPUT_DIR stays
    as it is. Returns {figure: {"mean", "low", "high"}}."""
    folder = Path(OUTPUT_DIR)
    policy = Path(EVALUATE_POLICY)
    if EVALUATE_POLICY == "best" or EVALUATE_POLICY.startswith("step_"):
        policy = folder / EVALUATE_POLICY
    if (policy / "policy").is_dir():
        policy = policy / "policy"
    if not (policy / "config.json").exists():
        hint = "train first, or give the folder of a policy"
        raise UserError(f"EVALUATE_POLICY = {EVALUATE_POLICY!r}: there is no policy in {policy}: {hint}")
    trainer = trainer_to_evaluate(trainer_class, str(policy))
    by_query, records = policy_scores(trainer)
    figures = {}
    for figure, values in by_query.items():
        mean, (low, high) = values.mean().item(), bootstrap_interval(values)
        figures[figure] = {"mean": mean, "low": low, "high": high}
        trainer.run.log(f"{figure:24} {mean:.3f}   95% interval {low:.3f} to {high:.3f}")
    dataset = test_data()[1]
    settings = {"policy": str(policy), "dataset": dataset, "queries": len(records)}
    settings |= {"reader": READER, "embedding": EMBEDDING, "pool": POOL, "pool_size": POOL_SIZE}
    settings["constants"] = {name: constants()[name] for name in [*_CHANGE_SCORES, "EVAL_SHOTS"]}
    data = Path((dataset or TRAIN_DATASET)["path"]).stem
    if dataset is None:
        data += "_held_out"
    name = "_".join(["eval", *Path(EVALUATE_POLICY).parts[-2:], data])
    path = write_evaluation(name, settings, {"figures": figures}, records)
    counts = f"{len(records)} queries"
    trainer.run.log(f"{policy_and_step(policy)}: {counts}; written to {path}.json and .jsonl")
    trainer.run.lock.release(force=True)
    return figures


# differs: the policy is a pointer network
def trainer_to_evaluate(trainer_class, policy):
    """Returns a trainer with the policy. No candidates are loaded."""
    global POINTER_POLICY
    POINTER_POLICY = policy
    return trainer_class(resume_from_checkpoint="no")


# differs: the figures of this trainer
def policy_scores(trainer):
    """Returns {figure: its value for each test query, (queries,)} of the policy and the rules, and a record
    of each query with the policy's lists."""
    queries = trainer.splits["test"]
    settings = choose_rules(trainer)
    by_query = {}
    records = []
    for query in queries:
        records.append({"id": query["id"], "query": query["text"], "golds": query["golds"], "shots": {}})
    for shots in EVAL_SHOTS:
        lists = trainer.pick(queries, shots)
        accuracies = {"policy": trainer.accuracy_of(queries, lists)}
        accuracies |= baseline_accuracies(trainer, settings, queries, shots)
        by_query |= {f"{name}@{shots}": values for name, values in accuracies.items()}
        for number, numbers in enumerate(lists):
            shown = {"demonstrations": column(trainer.corpus.examples(numbers), "id")}
            shown["response"] = trainer.answered[queries[number]["id"], tuple(numbers)]
            shown["accuracy"] = {name: float(values[number]) for name, values in accuracies.items()}
            records[number]["shots"][shots] = shown
    return by_query, records


# ---------------------------------------------------------------- the test, figures and pictures


def test_policies(trainer):
    """Tests the best policy on the test queries beside what needs no training, at each of EVAL_SHOTS."""
    folders = {"RCE": "best/policy"}
    if trainer.state.stage == "grpo":
        folders = {"RCE": "rce/policy", "RCE + GRPO": "best/policy"}
    policies = {}
    for name, folder in folders.items():
        policies[name] = load_pointer(trainer.run.folder / folder, trainer.corpus.sizes).to(trainer.device)
    queries = mined = trainer.splits["test"]
    oracle = "oracle"
    if TEST_ORACLE is not True and len(queries) > TEST_ORACLE:
        mined = queries[:TEST_ORACLE]
        oracle = f"oracle, {len(mined)} queries"
    settings = choose_rules(trainer)
    results = {}
    for shots in EVAL_SHOTS:
        accuracies = baseline_accuracies(trainer, settings, queries, shots)
        for name, policy in policies.items():
            accuracies[name] = trainer.accuracy_of(queries, trainer.pick(queries, shots, policy))
        if mined:
            accuracies[oracle] = test_oracle(trainer, queries, shots, mined)
            if accuracies[oracle] is None:
                return  # a signal
        results[shots] = accuracies
    figures = test_figures(results, list(policies)[-1])
    text = json.dumps(figures, indent=1) + "\n"
    write_atomically(trainer.run.folder / "eval_test.json", lambda tmp: tmp.write_text(text))
    trainer.run.log(test_lines(figures))
    draw_results(figures, trainer.run.folder / "icl_results.png", trainer.run.title)


def choose_rules(trainer):
    """Returns {rule: its setting} of the rules, which are not trained on rewards: of several settings the one
    that is the best on validation at one shot. Similarity alone if there are too many answers, or one."""
    settings = {"similarity": 0}
    queries = trainer.splits["validation"]
    if trainer.corpus.classifies:
        for name, values in (("kNN", (5, 10, 20, 40)), ("classifier", (3.0, 10.0, 30.0))):
            accuracies = []
            for value in values:
                lists = rule_lists(trainer, queries, name, value, 1)
                accuracies.append(trainer.accuracy_of(queries, lists).mean())
            settings[name] = values[int(np.argmax(accuracies))]
        settings["classifier, fillers"] = settings["classifier"]
    return settings


def rule_lists(trainer, queries, name, setting, shots):
    """Returns the lists that a rule shows, as numbers of demonstrations."""
    lists = []
    for query in queries:
        places = trainer.corpus.rule_order(query, name, setting)[:shots]
        lists.append(trainer.corpus.pool_of(query)[places].tolist())
    return lists


def baseline_accuracies(trainer, settings, queries, shots):
    """Returns {name: accuracies, (queries,)} of what is not trained on rewards."""
    lists = {"no demonstrations": [[] for _ in queries], "random": []}
    for query in queries:
        pool = trainer.corpus.pool_of(query)
        drawn = torch.randperm(len(pool), generator=query_stream(query, "baseline"))[:shots]
        lists["random"].append(pool[drawn].tolist())
    for name, setting in settings.items():
        lists[name] = rule_lists(trainer, queries, name, setting, shots)
    return {name: trainer.accuracy_of(queries, of_queries) for name, of_queries in lists.items()}


def test_oracle(trainer, queries, shots, mined):
    """Returns the accuracy of the best list of each query in `mined`, the first of the queries, NaN for the
    others, (queries,); None if a signal stopped the mining."""
    of_first = f"first_{len(mined)}_" if len(mined) < len(queries) else ""
    path = Path(OUTPUT_DIR) / f"test_candidates_{shots}_{of_first}step_{trainer.run.step}.json"
    if not path.exists() and not trainer.mine(path, mined, shots):
        return None
    facts = list_facts(mined, shots, trainer.reader)
    check_facts(path, read_json(path)[1], facts, facts, "delete it to mine again")
    best = dict.fromkeys(column(queries, "id"), math.nan) | dict.fromkeys(column(mined, "id"), 0.0)
    for group in read_candidates(path, trainer.splits, trainer.demos, trainer.reader):
        for candidate in group.candidates:
            best[group.query["id"]] = max(best[group.query["id"]], candidate["soft"] or 0.0)
    return np.array(list(best.values()))


def bootstrap_interval(values):
    """95% interval of the mean of values (rows,), resampling rows."""
    generator = np.random.default_rng(0)
    means = [generator.choice(values, len(values)).mean() for _ in range(2000)]
    return np.quantile(means, (0.025, 0.975)).tolist()


# differs: the figures of this trainer
def test_figures(results, name):
    """Accuracies by shots, what `name` gains over the others with its interval, and the share of the way from
    similarity to the oracle, if there is one. results: {shots: {method: (queries,)}}, NaN where the oracle
    was not mined: those queries do not count where it is compared."""
    figures = {"queries": len(next(iter(results.values()))[name]), "policy": name, "shots": {}}
    for shots, by_method in results.items():
        gain = by_method[name] - by_method["similarity"]
        gap_closed = None
        intervals = {}
        for method, values in by_method.items():
            known = np.isfinite(values)
            if method != name:
                intervals[method] = bootstrap_interval((by_method[name] - values)[known])
            if method.startswith("oracle"):
                gap = (values - by_method["similarity"])[known].mean()
                gap_closed = float(gain[known].mean() / gap) if gap > 0 else None
        figures["shots"][str(shots)] = {
            "accuracy": {method: float(np.nanmean(values)) for method, values in by_method.items()},
            "gain_over_similarity": float(gain.mean()),
            "share_of_gap": gap_closed,
            "intervals_of_gains": intervals,
        }
    return figures


# differs: the figures of this trainer
def test_lines(figures):
    """A table for the terminal."""
    of_shots = figures["shots"]
    lines = [f"Test accuracy, {figures['queries']} queries:"]
    lines.append(f"  {'shots':20}" + "".join(f"{shots:>8}" for shots in of_shots))
    for method in next(iter(of_shots.values()))["accuracy"]:
        cells = "".join(f"{each['accuracy'][method]:8.3f}" for each in of_shots.values())
        lines.append(f"  {method:20}{cells}")
    for shots, each in of_shots.items():
        means = {k: v for k, v in each["accuracy"].items() if not k.startswith(("oracle", "RCE"))}
        best = max(means, key=means.get)
        low, high = each["intervals_of_gains"][best]
        gain = round(each["accuracy"][figures["policy"]] - means[best], 3)
        compared = f"level with {best}"
        if gain:
            compared = f"{gain:+.3f} over {best}" if gain > 0 else f"{-gain:.3f} below {best}"
        line = f"  {figures['policy']} at {shots} shots: {compared}, the best of the others"
        line += f" ({low:+.3f} to {high:+.3f})"
        if each["share_of_gap"] is not None:
            line += f"; {each['share_of_gap']:.0%} of the way from similarity to the oracle"
        lines.append(line)
    return "\n".join(lines)


def draw_results(figures, path, title):
    """Draws icl_results.png: test accuracy of similarity, the best of the other rules, the policy and the
    oracle as bars, for each number of shots; below them what the policy gains over the best rule."""
    policy = figures["policy"]
    bars, names = {}, []
    for shots, each in figures["shots"].items():
        accuracy = each["accuracy"]
        rules = {name: value for name, value in accuracy.items() if not name.startswith(("oracle", "RCE"))}
        rule = max(rules, key=rules.get)
        for label, value in (("similarity", accuracy["similarity"]), ("best rule", rules[rule])):
            bars.setdefault(label, []).append(value)
        for method, value in accuracy.items():  # the policies, and the oracle if there is one
            if method not in rules:
                bars.setdefault(method, []).append(value)
        gain = f"{policy} minus it: {accuracy[policy] - rules[rule]:+.1%}"
        interval = "({:+.1%} to {:+.1%})".format(*each["intervals_of_gains"][rule])
        names.append(f"shots: {shots}\nbest rule: {rule}\n{gain}\n{interval}")
    figure = Figure(figsize=(9.5, 5), layout="constrained")
    axis = figure.subplots()
    for number, (label, heights) in enumerate(bars.items()):
        places = np.arange(len(names)) + 0.8 * (number - (len(bars) - 1) / 2) / len(bars)
        drawn = axis.bar(places, heights, 0.75 / len(bars), label=label)
        axis.bar_label(drawn, [f"{height:.1%}" for height in heights], fontsize=8)
    axis.set(ylabel="test accuracy", ylim=(0, 1.05), title=title)
    axis.set_xticks(range(len(names)), names)
    axis.grid(alpha=0.3, axis="y")
    figure.legend(loc="outside lower center", ncols=4)
    write_atomically(path, partial(figure.savefig, format="png", dpi=120))


def train_main():
    run_main(ICLTrainer)


if __name__ == "__main__":
    train_main()
