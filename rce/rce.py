"""RCE for language models, in one file: mine candidates, check them up, train on them by reward-weighted
cross entropy.

A prompt x has scored candidates y_1 .. y_n. The policy is fitted to them, the better the more
(reward-weighted regression, Peters and Schaal 2007; AWR without the critic, arXiv 1910.00177; as TAU goes to
0, best-of-n distillation):

    w_i = exp(r_i / TAU) / sum_j exp(r_j / TAU)               no gradient; sums to 1 for each prompt
    L   = mean over prompts of sum_i w_i * -log pi(y_i | x)   LENGTH_NORMALISE: log pi / tokens of y_i

    1. mine      propose from a greedy response, beams, samples at several temperatures and, if wanted, the
                 data's own solution; merge equal ones; score all with the cheap signal, verify the best and
                 some others with the reward (compute_rewards)
    2. check up  what the candidates are worth; tools/check_up.py adds a picture and a verdict: mine more, fix
                 the reward, or train
    3. train     on the prompts whose candidates' rewards differ; a fifth of the prompts is kept to validate
    ROUNDS > 1   mine again with the policy so far, from further prompts

gt_prob of a candidate is the probability the policy gives to the gold answer after the candidate's own
working (up to ANSWER_FORM's mark): the product over the answer's tokens and what ends it, not their geometric
mean; summed over distinct gold answers with their weights. What ends each makes them exclude one another, so
it is never above 1.
Deliberate choices:
- validation is the accuracy of the policy's own pick, its likeliest candidate, on the first round's held-back
  prompts; best/ follows it;
- a prompt without a right and a wrong one among the verified has the rest of its candidates verified too;
- a candidate whose scoring raised is kept with eval_failed and never trained on: it is not a wrong one;
- rewards are normalised at most once (WEIGHT_REWARDS).

    python rce/rce.py                                   # edit the constants below, or override: KEY=VALUE
    python rce/rce.py STAGE=mine, then python tools/check_up.py checkpoints/rce, then rce.py STAGE=train
    python grpo/grpo.py ACTOR_MODEL=checkpoints/rce/best/policy      # go on with GRPO

Writes into OUTPUT_DIR: candidates_round_N.parquet, training_config.json, logs/
(training_*.log, metrics.jsonl, samples.jsonl), step_N/ checkpoints, best/policy/,
training_metrics_detailed.png and rce_metrics_with_entropy.png. docs/reference.md defines every metric.

To change     see
the loss      rce_loss, RCETrainer.update                the data      TRAIN_DATASETS; load_rows
the weights   TAU, WEIGHT_REWARDS; rce_weights           a metric      update, record, measure, evaluate
the reward    REWARD_FUNCTIONS, REWARD_MODE;             a plot        self.run.panels; draw_plot
              compute_rewards, shaped_rewards            the schedule  learning_rate_scale, plan_steps
what is mined propose, choose_verified; sampling_logprobs
A constant is one more line above; _LIMITS may hold its range.
"""
import hashlib
import math
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch loads: faster beside busy programs
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, GenerationConfig

ROOT = next((p for p in Path(__file__).resolve().parents if (p / "rewards").is_dir()), None)
if ROOT is None:
    sys.exit("rce.py needs the folder rewards/ beside it or above it: copy it from the repository")
sys.path.insert(0, str(ROOT))
import rewards  # noqa: E402

# ================================================================ constants

# What to do
STAGE = "all"  # all | mine | train: train takes the candidates of the first round
ROUNDS = 2  # times to mine and train
CANDIDATES: str | None = None  # a parquet of candidates to use in the first round instead of mining

# Models: a folder or a hub name
ACTOR_MODEL = f"{ROOT}/data/tiny/policy"
REWARD_MODEL: str | None = None  # one-label sequence classifier; None: reward functions alone
LORA_RANK = 0  # 0: whole models are trained; else adapters of this rank (2106.09685), on frozen weights
LORA_ALPHA = 32.0  # an adapter's product counts LORA_ALPHA / LORA_RANK
LORA_TARGETS = "all-linear"  # which layers get one: all-linear (but the heads), or names: q_proj,v_proj
BASE_DTYPE: str | None = None  # float32 | bfloat16: of the weights under an adapter; None: DTYPE
DTYPE = "float32"  # float32 | bfloat16 (autocast; weights and optimizer state stay float32)
DEVICE = "auto"  # auto | cpu | cuda | cuda:1 | mps
GRADIENT_CHECKPOINTING = False  # recompute activations in the update: less memory, a third more time

# Data: rows of {"path", "type": "jsonl" | "parquet" | "hub", "input", "output"}; hub takes "name" and "split"
# too. A column may be a path into nested records, such as "answers.text"; input a text or a list of messages
TRAIN_DATASETS = [
    {"path": f"{ROOT}/data/tiny/train.jsonl", "type": "jsonl", "input": "problem", "output": "solution"},
    {"path": f"{ROOT}/data/tiny/train.parquet", "type": "parquet", "input": "problem", "output": "solution"},
]
EVAL_DATASETS = [
    {"path": f"{ROOT}/data/tiny/test.jsonl", "type": "jsonl", "input": "problem", "output": "solution"},
]
PROMPT_TEMPLATE = "{input}"  # what the actor is asked; the tokenizer's chat template, if any, goes around it
SYSTEM_PROMPT: str | None = None  # goes before prompts without a system message; needs a chat template
EXTRA_COLUMNS = []  # further columns, for reward functions that have a parameter of such a name
MAX_TRAIN_PROMPTS: int | None = None  # only the first so many; None: all
MAX_EVAL_PROMPTS: int | None = 200
VALIDATION_FRACTION = 0.2  # of the first round's prompts: never trained on

# Rewards: score = REWARD_MODEL_WEIGHT * reward model + sum of weight * function; a function, or its name in
# rewards/. Weight 0: a part for SOFT_REWARD, not for the score that is logged
REWARD_FUNCTIONS = [("exact_answer", 1.0), ("rouge_l", 0.0)]
REWARD_MODEL_WEIGHT = 1.0
HARD_REWARD = "exact_answer"  # the part that says right (1) or wrong (0)
SOFT_REWARD = "rouge_l"  # the part, in [0, 1], that grades; "reward_model" gets there by a sigmoid
REWARD_MODE = "hard_only"  # a mode of rewards/: what r is made of
HYBRID_SCORE = "logprob"  # logprob, or a part: the score that REWARD_MODE = hybrid scales and mixes in
SIMILARITY_WEIGHT = 0.0  # adds so much of the part SIMILARITY to the r of wrong candidates
SIMILARITY = "rouge_l"
ANSWER_FORM = "#### {answer}"  # how a response states its answer: where gt_prob puts the gold one
GOLD_FULL_COUNT = 1  # a gold answer listed so often weighs 1, one listed less a share of it (VQA: 3)
ACCURACY_FUNCTION = "exact_answer"  # what evaluation calls right, in rewards/, where the data has answers
REWARD_TIMEOUT: float | None = 600.0  # seconds that scoring one batch of responses may take; None: any

# Mining
MINE_PROMPTS: int | None = 320  # of the first round; None: all. Later rounds take as many as it trained on
GREEDY = True  # propose the greedy response
BEAMS = 2  # propose the responses of a beam search so wide; 0: none
GROUP_SIZE = 13  # sampled responses a prompt, dealt out over SAMPLE_TEMPERATURES
SAMPLE_TEMPERATURES = [0.6, 0.8, 1.0]
INCLUDE_REFERENCE = False  # propose the data's own solution
CHEAP_SIGNAL = "gt_prob"  # gt_prob | logprob: what candidates are ranked by before they are verified
VERIFY_TOP: int | None = None  # the best so many a prompt are verified; None: all
VERIFY_RANDOM = 2  # and so many of the others, at random
MAX_PROMPT_TOKENS = 256  # longer prompts are left out, and counted
MAX_NEW_TOKENS = 64
TEMPERATURE = 1.0  # > 0; of the policy that is trained and evaluated and whose log-probabilities are logged
EVAL_SAMPLES = 4  # k of pass@k in evaluation

# Training
BATCH_SIZE = 32  # prompts in memory at a time, with GROUP_SIZE candidates each
GRADIENT_ACCUMULATION_STEPS = 1  # batches a training step: BATCH_SIZE * this = prompts a step
TAU = 0.1  # > 0; small: only the best candidates, large: all alike
TAU_END: float | None = None  # moves TAU there by equal factors over the run; None: it stays
WEIGHT_REWARDS = "raw"  # raw | zscore (within the prompt)
LENGTH_NORMALISE = False
LEARNING_RATE = 3e-4
MAX_GRAD_NORM = 1.0  # > 0
WEIGHT_DECAY = 0.0
USE_LR_SCHEDULER = True
LR_SCHEDULER_TYPE = "linear"  # linear | cosine (towards 0, one step after the last) | plateau (halves)
PLATEAU_PATIENCE = 2  # evaluations without a better pick before plateau halves
WARMUP_STEPS = 0

# Schedule
NUM_EPOCHS = 2  # passes over a round's prompts
MAX_STEPS: int | None = None  # a bound on the steps of all rounds

# Bookkeeping
SAVE_EVERY_N_STEPS = 25  # 0: only after each round
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 8  # 0: only before the first and after each round
EARLY_STOPPING_PATIENCE = 0  # evaluations without a better pick before the run ends; 0: never
EARLY_STOPPING_THRESHOLD = 0.0  # by how much better is better for patience; best/ follows the highest
LOG_SAMPLES = 4  # candidates a step written to samples.jsonl
RESUME = "ask"  # ask | yes | no | a checkpoint's path
OUTPUT_DIR = f"{ROOT}/checkpoints/rce"
SEED = 1
USE_WANDB = False
WANDB_PROJECT = "hackable-rlhf"

# Processes: torchrun --nproc_per_node=2 rce/rce.py
EXACT_SUMS = True  # of gradients: the same bits on any number of processes; each micro-batch's are sent
SHARD = "none"  # none: each process has whole models | fsdp2: its part of them, for models larger than a GPU
PROCESS_TIMEOUT = 1800.0  # seconds that one process waits for another

_LIMITS = {  # least and greatest value of each number, or the words that a constant takes
    "BATCH_SIZE GRADIENT_ACCUMULATION_STEPS GROUP_SIZE MAX_PROMPT_TOKENS MAX_NEW_TOKENS": (1, 1e12),
    "NUM_EPOCHS ROUNDS PLATEAU_PATIENCE EVAL_SAMPLES KEEP_LAST_N_CHECKPOINTS MAX_STEPS": (1, 1e12),
    "MAX_TRAIN_PROMPTS MAX_EVAL_PROMPTS MINE_PROMPTS VERIFY_TOP GOLD_FULL_COUNT": (1, 1e12),
    "WARMUP_STEPS SAVE_EVERY_N_STEPS EVAL_EVERY_N_STEPS EARLY_STOPPING_PATIENCE LOG_SAMPLES SEED": (0, 2**62),
    "BEAMS VERIFY_RANDOM": (0, 2**62),
    "LEARNING_RATE WEIGHT_DECAY EARLY_STOPPING_THRESHOLD SIMILARITY_WEIGHT": (0, 1e6),
    "REWARD_MODEL_WEIGHT": (-1e6, 1e6),
    "VALIDATION_FRACTION": (0, 0.9),
    "TAU TAU_END": (1e-6, 1e6),
    "TEMPERATURE": (1e-3, 1e3),
    "LORA_RANK": (0, 65536),
    "LORA_ALPHA": (1e-6, 1e6),
    "MAX_GRAD_NORM": (1e-12, 1e12),
    "REWARD_TIMEOUT PROCESS_TIMEOUT": (1e-3, 1e6),
    "STAGE": ["all", "mine", "train"],
    "DTYPE BASE_DTYPE": ["float32", "bfloat16"],
    "SHARD": ["none", "fsdp2"],
    "LR_SCHEDULER_TYPE": ["linear", "cosine", "plateau"],
    "CHEAP_SIGNAL": ["gt_prob", "logprob"],
    "WEIGHT_REWARDS": ["raw", "zscore"],
    "REWARD_MODE": [
        "hard_only", "soft_only", "hard_plus_soft", "hard_plus_soft_v2", "separated", "hard_plus_gtprob",
        "hard_plus_gtprob_separated", "hybrid"],
}
# ================================================================ the maths of RCE


def sampling_logprobs(logits, temperature):
    """Log-probabilities (..., vocabulary) of the distribution that is sampled *and* trained: change it here
    (top-p, say), and the first ratios stay 1. A token that must not come gets -inf."""
    return full_logprobs(logits, temperature)


def rce_loss(logprobs, mask, weights, prompts, length_normalise):
    """Part of the step's loss that these rows are: sum of weight * -log pi(row) / prompts; logprobs, mask
    (rows, R), weights (rows,); prompts is how many the whole step has."""
    row_logprobs = (logprobs * mask).sum(1)
    if length_normalise:
        row_logprobs = row_logprobs / mask.sum(1)
    return -(weights * row_logprobs).sum() / prompts


def shaped_rewards(candidates):
    """r of one prompt's candidates: REWARD_MODE, with SIMILARITY added to wrong ones."""
    mixed, similarity = (key if key == "logprob" else f"reward/{key}" for key in (HYBRID_SCORE, SIMILARITY))
    shaped = rewards_by_mode(candidates, mixed)
    if SIMILARITY_WEIGHT > 0:
        if any(c.get(similarity) is None for c in candidates):
            raise UserError(f"SIMILARITY = {SIMILARITY!r}: candidates lack {similarity}: name a known part")
        hard, grades = ([c[key] for c in candidates] for key in ("hard", similarity))
        shaped = rewards.shape_wrong(shaped, hard, grades, SIMILARITY_WEIGHT)
    return shaped


# ================================================================ the trainer


class RCETrainer:
    """Models, candidates and the algorithm; self.run has the files. resume_from_checkpoint overrides the
    constant RESUME: a path, "ask", "yes" or "no"."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        if not SAMPLE_TEMPERATURES or not all(1e-3 <= value <= 1e3 for value in SAMPLE_TEMPERATURES):
            raise UserError(f"SAMPLE_TEMPERATURES = {SAMPLE_TEMPERATURES}: it takes numbers, 0.001 to 1000")
        if ANSWER_FORM.count("{answer}") != 1:
            raise UserError(f"ANSWER_FORM = {ANSWER_FORM!r} must contain {{answer}} once")
        self.rounds = 1 if STAGE == "train" else ROUNDS
        self.device = find_device()
        # What a new start moves aside; STAGE=train starts from candidates, it does not make them
        made = () if STAGE == "train" else ("candidates_*",)
        best_by = ("pick_accuracy", "reward")
        self.run = Run("rce", resume_from_checkpoint, self.device, made, best_by, later_of_equal=True)
        name = "/".join(Path(ACTOR_MODEL).parts[-2:])
        self.run.title = f"RCE ({REWARD_MODE}, tau {TAU:g}), {name}, seed {SEED}"
        # Drawn in rce_metrics_with_entropy.png, (label, metrics); training_metrics_detailed.png has them all
        names = "pick_accuracy entropy policy_loss grad_norm effective_candidates weight_on_best reward"
        self.run.panels = [("accuracy", ["accuracy_sampled", "accuracy_greedy", f"pass@{EVAL_SAMPLES}"])]
        self.run.panels += [(name, [name]) for name in f"{names} response_length".split()]
        self.load_models()
        readers = self.tokenizer, self.readers, self.run.say
        self.train_rows = load_prompts(TRAIN_DATASETS, "TRAIN_DATASETS", MAX_TRAIN_PROMPTS, *readers)
        self.eval_rows = load_prompts(EVAL_DATASETS, "EVAL_DATASETS", MAX_EVAL_PROMPTS, *readers)
        check_models(self.readers, [self.actor], self.train_rows, self.pad_id, self.run.say)
        self.rows = {row["id"]: row for row in self.train_rows}  # train_rows become those of the round
        if len(self.rows) < len(self.train_rows):
            raise UserError("TRAIN_DATASETS: two files have one name, and candidates go by it: rename one")
        # What a checkpoint keeps beside weights, optimizers and generators. order is this epoch's
        # permutation; to_train is how many prompts the round trains on, until it is mined a guess; candidates
        # has the digest of each round's file, responses is how many were proposed
        to_train = math.ceil((MINE_PROMPTS or len(self.rows)) * (1 - VALIDATION_FRACTION))
        self.state = SimpleNamespace(
            epoch=0, order=None, cursor=0, prompts=len(self.train_rows),
            round=1, round_start=0, to_train=to_train, candidates={}, responses=0)
        self.run.keep(self.state, self.models, self.optimizers, self.tokenizer)
        self.plan_steps()

    def load_models(self):
        """The actor comes from the checkpoint when there is one."""
        at = self.run.checkpoint
        self.tokenizer = load_tokenizer(ACTOR_MODEL, "ACTOR_MODEL")
        self.actor = load_trained(
            AutoModelForCausalLM, ACTOR_MODEL, "ACTOR_MODEL", self.device, at and at / "policy")
        self.pad_id = padding_id(self.actor, self.tokenizer)
        self.eos_ids = end_ids(self.actor, self.tokenizer)
        self.models = {"policy": self.actor}  # what is saved, by its folder's name
        self.readers = {"ACTOR_MODEL": self.actor}  # what reads responses, by its constant
        self.reward_model, self.reward_tokenizer = load_reward_model(REWARD_MODEL, self.device)
        if not REWARD_MODEL and not REWARD_FUNCTIONS:
            raise UserError("REWARD_MODEL is None and REWARD_FUNCTIONS is empty: give at least one of them")
        self.reward_functions = resolve_rewards(REWARD_FUNCTIONS, "REWARD_FUNCTIONS")
        self.accuracy_function = resolve_rewards([(ACCURACY_FUNCTION, 1.0)], "ACCURACY_FUNCTION")[0][1]
        self.optimizers = {"policy": make_optimizer(self.actor, LEARNING_RATE)}

    # ------------------------------------------------------------ the algorithm

    def train(self):
        """Each round: mine, check up, train. Returns the last evaluation."""
        with self.run.opened(self.introduction()):
            if self.run.checkpoint and rank() == 0:  # perhaps an earlier one: its future is given up
                move_aside(candidates_after(self.state.round), OUTPUT_DIR, self.run.say)
            self.run.save()  # what the first round mines from
            while self.state.round <= self.rounds and self.run.goes_on():
                if not self.prepare_round() or STAGE == "mine":
                    break
                for _ in self.run.steps(self.measure, until=self.round_end):
                    batch = self.next_batch()
                    metrics = self.update(batch)
                    self.record(batch, metrics)
                if self.run.step >= self.round_end:
                    self.end_round()
            if STAGE == "mine":
                mined = candidates_path(min(self.state.round, self.rounds))
                self.run.last_word = f"Mined: {mined}; STAGE=train trains on it"
        return self.run.evaluation

    def prepare_round(self):
        """Candidates of this round, mined or given; when they are new, their check-up; then what can be
        trained. False where a signal stopped the mining."""
        path = candidates_path(self.state.round)
        number = str(self.state.round)
        new = number not in self.state.candidates
        if new and not path.exists():
            if STAGE == "train" or CANDIDATES and self.state.round == 1:
                todo = "run STAGE=mine first, or set CANDIDATES to a parquet file"
                raise UserError(f"there are no candidates at {path}: {todo}")
            if not self.mine(path):
                return False
        digest = file_digest(path)["sha256"] if path.exists() else None
        if not new and digest != self.state.candidates[number]:
            todo = "put it back, or start afresh with RESUME=no"
            raise UserError(f"{path} is not the file this run was trained on: {todo}")
        groups = read_candidates(path, self.rows, known_ids(self.actor))
        self.split(groups if self.state.round == 1 else self.first_round())
        self.choose_rows(groups)
        if new:
            self.check_up(path, [candidates for _, candidates in groups])
        if not self.train_rows:
            raise UserError(f"{path}: no prompt has candidates of different reward: nothing to train on")
        self.state.to_train = len(self.train_rows)
        self.plan_steps()
        if new:
            self.state.candidates[number] = digest
            steps = f"in steps {self.run.step + 1} to {self.round_end}, {len(self.validation)} to validate"
            self.run.say(f"Round {number}: {len(self.train_rows)} prompts to train on {steps}")
        return True

    def check_up(self, path, groups):
        proposed = sum(len(c["source"]) for group in groups for c in group)
        self.state.responses += proposed
        figures = check_up(groups, proposed, path, self.run.say)
        counts = {"round": self.state.round, "responses": self.state.responses}
        self.run.write_metrics("mine", {**counts, **figures})

    def choose_rows(self, groups):
        """What is trained on: prompts that are not held back and whose candidates' rewards differ. Where they
        are equal all candidates weigh alike, and nothing says which to prefer."""
        self.train_rows = []
        for row, candidates in groups:
            candidates = usable(candidates)
            if transcript(row["prompt"]) not in self.held_back and len(candidates) > 1:
                shaped = shaped_rewards(candidates)
                if not is_flat(shaped):
                    self.train_rows.append({**row, "candidates": candidates, "rewards": shaped})

    def next_batch(self):
        """The next prompts' candidates with their weights; those that weigh nothing are left out."""
        chosen = next_rows(self.train_rows, self.state, BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS)
        tau = tau_at(self.run.step, self.run.total_steps)
        parts = []  # (row, candidate, reward, weight)
        effective = []
        best = []
        for row in chosen:
            weights = rce_weights(row["rewards"], tau, WEIGHT_REWARDS)
            effective.append(torch.special.entr(weights).sum().exp().item())
            best.append(weights.max().item())
            every = zip(row["candidates"], row["rewards"], weights.tolist())
            parts += [(row, c, reward, weight) for c, reward, weight in every if weight > 0]
        rows, candidates, row_rewards, weights = (list(column) for column in zip(*parts))
        prompts = [row["ids"] for row in rows]
        batch = pack(prompts, [c["token_ids"] for c in candidates], self.pad_id, self.device)
        batch.rows = rows
        batch.candidates = candidates
        batch.rewards = row_rewards
        batch.weights = torch.tensor(weights, device=self.device)  # (rows,)
        batch.prompts = len(chosen)
        batch.facts = {
            "tau": tau,
            "effective_candidates": sum(effective) / len(chosen),
            "weight_on_best": sum(best) / len(chosen)}
        return batch

    def update(self, batch):
        """One optimizer step on the batch, in micro-batches whose gradients add up to that of the whole."""
        run = self.run
        kind = LR_SCHEDULER_TYPE if USE_LR_SCHEDULER else None
        scale = learning_rate_scale(run.step, run.total_steps, WARMUP_STEPS, kind, run.halvings)
        for optimizer in self.optimizers.values():
            set_rates(optimizer, LEARNING_RATE * scale)
        metrics = {}  # of the whole step; share is a micro-batch's
        tokens = batch.response_mask.sum()
        micros = every_micro_batch(self.actor, batch)
        with run.timed("update"), recomputing(self.models.values()):
            for rows, share in summed([self.actor], micros, metrics):
                mask = batch.response_mask[rows, :int(batch.response_lengths[rows].max())]
                logprobs, entropy = response_logprobs(self.actor, batch, rows, TEMPERATURE)
                loss = rce_loss(logprobs, mask, batch.weights[rows], batch.prompts, LENGTH_NORMALISE)
                backward(self.actor, loss)
                share["policy_loss"] = loss.item()
                share["entropy"] = ((entropy.detach() * mask).sum() / tokens).item()
            ids = [row["id"] for row in batch.rows]
            norms = clip_and_step(self.optimizers.values(), metrics["policy_loss"], run, ids)
        return {**metrics, "grad_norm": norms[0], "learning_rate": LEARNING_RATE * scale}

    # ------------------------------------------------------------ rounds

    def plan_steps(self):
        """The step at which this round ends, and all rounds if the later ones find as many prompts to train
        on. Depends on the state alone: a resumed run plans alike."""
        steps = NUM_EPOCHS * math.ceil(self.state.to_train / (BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS))
        rounds_left = max(0, self.rounds - self.state.round + 1)
        self.round_end = self.state.round_start + steps
        self.run.total_steps = min(self.state.round_start + rounds_left * steps, MAX_STEPS or math.inf)

    def end_round(self):
        """Count up the round, then save: the next one mines from this very checkpoint."""
        self.state.round += 1
        self.state.round_start = self.run.step
        self.state.cursor = 0
        self.run.save()

    def first_round(self):
        return read_candidates(candidates_path(1), self.rows, math.inf)

    def split(self, groups):
        """Hold VALIDATION_FRACTION of the first round's prompts back, by the prompt's text: equal prompts
        fall on one side. groups: its [(row, candidates)]."""
        texts = list(dict.fromkeys(transcript(row["prompt"]) for row, _ in groups))
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(SEED)).tolist()
        self.held_back = {texts[i] for i in order[:int(VALIDATION_FRACTION * len(texts))]}
        held_back = [group for group in groups if transcript(group[0]["prompt"]) in self.held_back]
        self.validation = [(row, usable(candidates)) for row, candidates in held_back if usable(candidates)]

    # ------------------------------------------------------------ mining

    def mine(self, path):
        """Mine this round's prompts into `path`; False when a signal stopped it."""
        rows = self.round_rows()
        with whole(self.actor, self.reward_model):
            return mine_by_parts(
                self.run, path, rows, BATCH_SIZE, mining_facts(), self.mine_part, read_parquet, write_parquet)

    def round_rows(self):
        """The prompts of this round: the first MINE_PROMPTS of a permutation; later rounds go on in it,
        without those held back."""
        rows = list(self.rows.values())
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED)).tolist()
        rows = [rows[i] for i in order]
        if self.state.round == 1:
            return rows[:MINE_PROMPTS]
        self.split(self.first_round())
        is_free = [transcript(row["prompt"]) not in self.held_back for row in rows]
        count = sum(is_free[:MINE_PROMPTS])
        rows = [row for row, free in zip(rows, is_free) if free]
        start = (self.state.round - 1) * count
        return [rows[(start + i) % len(rows)] for i in range(min(count, len(rows)))]

    @torch.no_grad()
    def mine_part(self, rows):
        """Candidates of some prompts: proposed, scored by the cheap signal, verified. A list of records,
        prompts in order."""
        groups = self.propose(rows)
        candidates = [c for group in groups for c in group]
        by_id = {row["id"]: row for row in rows}
        prompts = [by_id[c["prompt_id"]]["ids"] for c in candidates]
        logprobs = self.sequence_logprobs(prompts, [c["token_ids"] for c in candidates])
        for c, logprob in zip(candidates, logprobs):
            c["logprob"] = logprob
        check_logprobs(candidates)
        self.score_gold(by_id, candidates, prompts)
        for row, group in zip(rows, groups):
            self.choose_verified(row, group)
        self.verify([c for c in candidates if c["eval_mode"] == "verified"], by_id)
        lacking = []  # a right and a wrong one each, where they exist
        for group in groups:
            if len({c["hard"] for c in group if c["hard"] is not None}) < 2:
                lacking += [c for c in group if c["eval_mode"] == "cheap"]
        self.verify(lacking, by_id)
        return candidates

    def propose(self, rows):
        """Candidates of each prompt, equal token ids merged into one that lists its sources; one list a
        prompt."""
        eos = self.eos_ids.tolist()
        groups = [{} for _ in rows]  # of each prompt: a candidate by its token ids
        prompts = [row["ids"] for row in rows]

        def add(i, ids, source, temperature=None, **more):
            prompt = transcript(rows[i]["prompt"])
            new = {"prompt_id": rows[i]["id"], "prompt": prompt, "token_ids": list(ids)}
            record = groups[i].setdefault(tuple(ids), {**new, "source": [], "temperature": []})
            record["source"].append(source)
            record["temperature"].append(temperature)
            record.update(more)

        if GREEDY:
            batch = respond(self.actor, self.tokenizer, prompts, None)
            for i, ids in enumerate(response_lists(batch)):
                add(i, ids, "greedy", sampler_logprob=batch.logprobs[i, :len(ids)].sum().item())
        if BEAMS:
            for i, ids in enumerate(beam_search(self.actor, prompts, eos, self.pad_id)):
                add(i // BEAMS, ids, "beam")
        for k, temperature in enumerate(SAMPLE_TEMPERATURES):
            count = len(range(k, GROUP_SIZE, len(SAMPLE_TEMPERATURES)))  # GROUP_SIZE dealt out in turn
            if count:
                streams = [self.prompt_generator(row, f"sample {k}") for row in rows]
                uniform = torch.cat([torch.rand(count, MAX_NEW_TOKENS, generator=g) for g in streams])
                batch = respond(self.actor, self.tokenizer, prompts, uniform, count, temperature)
                for i, ids in enumerate(response_lists(batch)):
                    add(i // count, ids, "sample", float(temperature))
        if INCLUDE_REFERENCE:
            for i, row in enumerate(rows):
                for ids in solutions(self.tokenizer, row):
                    add(i, ids, "reference")
        if not all(groups):
            todo = "set GREEDY, BEAMS, or INCLUDE_REFERENCE with solutions no longer than MAX_NEW_TOKENS"
            raise UserError(f"nothing proposes a candidate: {todo}")
        groups = [list(group.values()) for group in groups]
        for c in (c for group in groups for c in group):
            c["text"] = self.tokenizer.decode(c["token_ids"], skip_special_tokens=True)
            c["truncated"] = c["token_ids"][-1] not in eos
        return groups

    def prompt_generator(self, row, use):
        """A random stream for one use of one prompt in one round, whatever was drawn before."""
        words = f"{SEED} {self.state.round} {row['id']} {use}"
        digest = hashlib.sha256(words.encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def token_logprobs(self, prompts, responses):
        """Log-probabilities of the responses' ids under the policy, a float32 tensor (rows, R) on the CPU, 0
        after each end."""
        return all_logprobs(self.actor, pack(prompts, responses, self.pad_id, self.device)).cpu()

    def sequence_logprobs(self, prompts, responses):
        return self.token_logprobs(prompts, responses).double().sum(1).tolist()

    def choose_verified(self, row, group):
        """Mark the candidates that the reward is asked about: VERIFY_TOP by the cheap signal, VERIFY_RANDOM
        of the others, and the greedy response."""
        if group[0][CHEAP_SIGNAL] is None:
            raise UserError("CHEAP_SIGNAL = 'gt_prob' needs gold answers: name their column, or take logprob")
        ranked = sorted(range(len(group)), key=lambda i: -group[i][CHEAP_SIGNAL])  # ties stay as proposed
        others = ranked[VERIFY_TOP:] if VERIFY_TOP else []
        order = torch.randperm(len(others), generator=self.prompt_generator(row, "verify")).tolist()
        chosen = {*ranked[:VERIFY_TOP], *(others[i] for i in order[:VERIFY_RANDOM])}
        for i, c in enumerate(group):
            verified = i in chosen or "greedy" in c["source"]
            c["eval_mode"] = "verified" if verified else "cheap"
            c.update(eval_failed=False, eval_error=None, hard=None, soft=None)

    def verify(self, candidates, by_id):
        """Score candidates with the reward, all at once; where that raises, one by one, and those that raise
        by themselves are marked as failed."""
        if not candidates:
            return
        try:
            every = self.parts_of(candidates, by_id)
        except Exception:  # a reward function may raise anything
            every = [part_or_failure(c, self.parts_of, by_id) for c in candidates]
        for c, parts in zip(candidates, every):
            if parts is not None:
                take_parts(c, parts)
        if all(c["eval_failed"] for c in candidates):
            why = candidates[0]["eval_error"]
            raise UserError(f"the reward failed for every one of {len(candidates)} candidates: {why}")

    def parts_of(self, candidates, by_id):
        """[{name: value}] of the reward's parts, one a candidate; what the reward raises comes through."""
        rows = [by_id[c["prompt_id"]] for c in candidates]
        responses = [with_facts(c["text"], response_ids=c["token_ids"]) for c in candidates]
        prompts, answers = ([row[key] for row in rows] for key in ("prompt", "answer"))
        _, parts = self.rewards_of(prompts, responses, answers)
        columns = [torch.as_tensor(values).flatten().tolist() for values in parts.values()]
        return [dict(zip(parts, values)) for values in zip(*columns)]

    # ------------------------------------------------------------ gt_prob

    def score_gold(self, by_id, candidates, prompts):
        """gt_prob of each candidate; None where the row has no gold answer."""
        rows = []  # (candidate's number, its working, a gold answer's ids, their weight)
        for i, c in enumerate(candidates):
            c["gt_prob"] = None
            before, golds = gold_after_working(self.tokenizer, by_id[c["prompt_id"]], c["token_ids"])
            rows += [(i, before, ids, weight) for ids, weight in golds]
        if not rows:
            return
        responses = [before + ids for _, before, ids, _ in rows]
        logprobs = self.token_logprobs([prompts[i] for i, *_ in rows], responses).double()
        terms = defaultdict(list)  # of each candidate: (log-probability, weight) of each gold answer
        for (i, before, ids, weight), row in zip(rows, logprobs):
            terms[i].append((row[len(before):len(before) + len(ids)].sum().item(), weight))
        for i, of_candidate in terms.items():
            candidates[i]["gt_prob"] = gold_probability(*zip(*of_candidate))

    # ------------------------------------------------------------ rewards

    def rewards_of(self, *columns):
        """compute_rewards() of prompts, responses and answers, those of BATCH_SIZE prompts at a time; its
        scores, checked, and the parts it left behind."""
        def score(*some):
            self.reward_parts = {}
            return call_reward("compute_rewards", self.compute_rewards, *some), self.reward_parts

        with whole(self.reward_model):
            scores, parts = dealt_rewards(score, BATCH_SIZE * GROUP_SIZE, *columns)
        return scores.to(self.device), parts

    def compute_rewards(self, prompts, responses, answers):
        """Score of each response, (rows,); edit or override freely. self.reward_parts is what is logged."""
        total = torch.zeros(len(responses))
        if self.reward_model:
            self.reward_parts["reward_model"] = self.reward_model_score(prompts, responses).cpu()
            total += REWARD_MODEL_WEIGHT * self.reward_parts["reward_model"]
        for name, function, weight in self.reward_functions:
            self.reward_parts[name] = call_reward(name, function, prompts, responses, answers)
            total += weight * self.reward_parts[name]
        return total

    def reward_model_score(self, prompts, responses):
        """The reward model's score of each response, (rows,); two strings give one number."""
        if isinstance(prompts, str):
            return self.reward_model_score([prompts], [responses])[0]
        return classify(self.reward_model, self.reward_tokenizer, prompts, responses)

    # ------------------------------------------------------------ evaluation and what is logged

    def measure(self):
        """What the run's evaluations log: the pick on the prompts held back, the held-out set, and how many
        responses were proposed so far. Empty where there is nothing to evaluate."""
        metrics = {**self.validate(), **self.evaluate()}
        if metrics:
            metrics["responses"] = self.state.responses
        return metrics

    def validate(self):
        """How often the policy's own pick, its likeliest verified candidate, is right on the prompts held
        back; no reward is called."""
        pairs = [(row["ids"], c["token_ids"]) for row, candidates in self.validation for c in candidates]
        if not pairs:
            return {}
        logprobs = iter(self.sequence_logprobs(*zip(*pairs)))
        right = []
        for _, candidates in self.validation:
            tokens = [len(c["token_ids"]) if LENGTH_NORMALISE else 1 for c in candidates]
            scores = [next(logprobs) / n for n in tokens]
            right.append(candidates[scores.index(max(scores))]["hard"])
        return {"pick_accuracy": sum(right) / len(right)}

    def evaluate(self, prompts=None, answers=None):
        """Metrics of greedy and sampled responses to prompts (texts or chats; default: held-out). Override to
        add yours. The samples have their own random stream, so evaluating never changes training."""
        rows = self.eval_rows
        if prompts is not None:
            rows = encode_texts(prompts, answers, "evaluate", self.tokenizer, self.readers, self.run.say)
        if not rows:
            return {}
        prompts, answers, ids = ([row[key] for row in rows] for key in ("prompt", "answer", "ids"))
        generator = torch.Generator().manual_seed(SEED + 1)
        uniform = torch.rand(len(rows) * EVAL_SAMPLES, MAX_NEW_TOKENS, generator=generator)
        greedy = respond(self.actor, self.tokenizer, ids, None)
        batch = respond(self.actor, self.tokenizer, ids, uniform, EVAL_SAMPLES)
        many, golds = ([x for x in xs for _ in range(EVAL_SAMPLES)] for xs in (prompts, answers))
        metrics = {}
        if None not in answers:
            right = self.accuracy(many, batch.responses, golds).view(-1, EVAL_SAMPLES)
            metrics["accuracy_greedy"] = self.accuracy(prompts, greedy.responses, answers).mean().item()
            metrics["accuracy_sampled"] = metrics["pass@1"] = right.mean().item()
            metrics[f"pass@{EVAL_SAMPLES}"] = right.amax(1).mean().item()
        scores, parts = self.rewards_of(many, batch.responses, golds)
        return {**metrics, **response_metrics(batch, scores, parts)}

    def accuracy(self, *columns):
        """Whether each response is right, (rows,), in float64; of prompts, responses and answers."""
        def score(*some):
            return call_reward("ACCURACY_FUNCTION", self.accuracy_function, *some), {}

        return dealt_rewards(score, BATCH_SIZE * GROUP_SIZE, *columns)[0].double()

    def generate_response(self, prompt, greedy=True):
        """One response to a prompt, a text or a chat; greedy=False samples from the global random stream."""
        rows = encode_texts([prompt], None, "generate_response", self.tokenizer, self.readers, self.run.say)
        if not rows:
            raise UserError(f"the prompt is longer than MAX_PROMPT_TOKENS = {MAX_PROMPT_TOKENS}")
        uniform = None if greedy else torch.rand(1, MAX_NEW_TOKENS)
        return respond(self.actor, self.tokenizer, [rows[0]["ids"]], uniform).responses[0]

    def introduction(self):
        """What a run begins with, on the terminal."""
        name = "/".join(Path(ACTOR_MODEL).parts[-2:])
        name = f"{name}: {size_of(self.actor)} on {self.device}, {DTYPE}"
        prompts = f"{len(self.rows)} prompts to mine, {len(self.eval_rows)} held out"
        which = f"round {min(self.state.round, self.rounds)} of {self.rounds}"
        steps = f"steps {self.run.step} to {self.run.total_steps} at most"
        return f"{name}; {prompts}; {which}, {steps}; writing to {OUTPUT_DIR}"

    def record(self, batch, metrics):
        """The step's metrics, a few of its candidates and its line on the terminal, for the run to write."""
        lengths = batch.response_lengths.float()
        row_rewards = torch.tensor(batch.rewards)
        metrics = {
            "epoch": self.state.epoch,
            "round": self.state.round,
            **metrics,
            **batch.facts,
            "reward": row_rewards.mean().item(),
            "weighted_reward": (batch.weights.cpu() * row_rewards).sum().item() / batch.prompts,
            "candidates": len(batch.rows),
            "response_length": lengths.mean().item()}
        samples = []
        for i in torch.linspace(0, len(batch.rows) - 1, min(LOG_SAMPLES, len(batch.rows))).long().tolist():
            row, c = batch.rows[i], batch.candidates[i]
            samples.append({
                "id": row["id"], "prompt": transcript(row["prompt"]), "response": c["text"],
                "answer": row["answer"], **{key: c.get(key) for key in ("source", "hard", "soft", "gt_prob")},
                "reward": batch.rewards[i], "weight": batch.weights[i].item()})
        line = ("Epoch {epoch}/{epochs}: PL:{policy_loss:.4f} R:{weighted_reward:.2f} "
                "N:{effective_candidates:.1f} E:{entropy:.3f} LR:{learning_rate:.2e}")
        line = line.format(epochs=NUM_EPOCHS * self.rounds, **metrics)
        self.run.record(metrics, lengths.sum().item(), samples, line)


# ==== block: language models
# Loading, sampling, scoring, and the one optimizer step they all share. The plain ways come first; what is
# faster and not as plain comes last and says what it measured. Edit it freely in a copy of your own; the
# repository keeps it byte-identical in every trainer of language models (tests/blocks.py).
import bisect
import functools
import inspect
import json
import math
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForSequenceClassification, AutoTokenizer)
from transformers.cache_utils import DynamicLayer, get_layer_types_and_kwargs
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer


# ---------------------------------------------------------------- loading

def load_config(path, constant):
    """The model's config without what differs between one forward pass and the next: dropout, which layers
    recomputed in training mode would apply; nor with a router's logits, which the loss of load balancing
    takes for whole rows'."""
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


def load_model(auto_class, path, constant, device, new_head=False, dtype=torch.float32):
    """The model in evaluation mode, every weight accounted for. With new_head, weights outside the base model
    may be left over or absent; the absent ones start at zero."""
    if (Path(path) / "adapter_config.json").exists():
        whole_ones = "take the best/policy of its run, where it is merged with its base"
        raise UserError(f"{constant} = {str(path)!r} is an adapter, not a model: {whole_ones}")
    config = load_config(path, constant)
    if new_head:
        config.num_labels = 1
    options = {"config": config, "dtype": dtype, "output_loading_info": True}
    model, info = load_pretrained(auto_class, path, constant, **options)
    missing = set(info["missing_keys"]) | {key[0] for key in info["mismatched_keys"]}
    wrong = missing | set(info["unexpected_keys"])
    if new_head:
        wrong = {key for key in wrong if key in missing and key.startswith(model.base_model_prefix + ".")}
    if wrong:
        weights = f"missing or unexpected weights {', '.join(sorted(wrong))}"
        raise UserError(f"{constant} = {str(path)!r} does not fit {type(model).__name__}: {weights}")
    for name, parameter in model.named_parameters():
        # A file's memory map begins at any byte, and the last bit of a product depends on it
        parameter.data = parameter.data.clone()
        if name in missing:
            torch.nn.init.zeros_(parameter)
    if model._supports_attention_backend and model.config._attn_implementation == "sdpa":
        if layer_windows(model) is not None:  # others look at the name, and would leave their own masks out
            model.set_attn_implementation("shared_prompts")  # attend(), below; a user's own models keep sdpa
    model.eval()  # and it stays so: dropout is off in rollout and update alike
    return shard(model, device) if globals().get("SHARD") == "fsdp2" else model.to(device)


def load_trained(auto_class, path, constant, device, saved=None, new_head=False):
    """The model that is trained: that of a checkpoint's folder `saved`, or of path. With LORA_RANK path's
    weights are frozen; an adapter on them, the saved one or one that changes nothing yet, is trained, and a
    new head."""
    if BASE_DTYPE == "bfloat16" and (DTYPE != BASE_DTYPE or not LORA_RANK):
        needs = "is for frozen weights and computes in it: it needs LORA_RANK and the same DTYPE"
        raise UserError(f"BASE_DTYPE = {BASE_DTYPE!r} {needs}")
    if LORA_RANK and globals().get("SHARD") == "fsdp2":
        todo = "SHARD = 'fsdp2' shards whole models alone: set one of the two"
        raise UserError(f"LORA_RANK = {LORA_RANK}: {todo}")
    if saved and bool(LORA_RANK) != (saved / "adapter_config.json").exists():
        made = f"{saved} was made {'without' if LORA_RANK else 'with'} an adapter"
        raise UserError(f"LORA_RANK = {LORA_RANK}: {made}: resume it as it was, or set RESUME=no")
    if not LORA_RANK:
        return load_model(auto_class, saved or path, constant, device, new_head and not saved)
    model = load_model(auto_class, path, constant, device, new_head, getattr(torch, BASE_DTYPE or DTYPE))
    model.base_digest = bits_digest(model.parameters())
    if Path(path).exists():
        model.name_or_path = str(Path(path).resolve())  # what the adapter's config names
    add_adapter(model, constant, new_head)
    if saved:
        load_adapter(model, saved)
    return model


def add_adapter(model, constant, new_head):
    """Freeze the model and put an adapter on it, in float32, that changes nothing yet; a head stays whole."""
    try:
        import peft
    except ImportError as error:
        todo = "pip install -r requirements.txt"
        raise UserError(f"LORA_RANK = {LORA_RANK} needs peft ({first_line(error)}): {todo}") from None
    outside = [name for name, _ in model.named_children() if name != model.base_model_prefix]
    heads = [name for name in outside if new_head and list(getattr(model, name).parameters())]
    targets = LORA_TARGETS if LORA_TARGETS == "all-linear" else LORA_TARGETS.replace(" ", "").split(",")
    config = peft.LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=targets, lora_dropout=0.0,
        modules_to_save=heads or None, task_type="TOKEN_CLS" if new_head else "CAUSAL_LM")
    names = [name for name, _ in model.named_modules()]
    absent = [] if targets == LORA_TARGETS else [
        target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]
    try:
        if absent:
            linear = {n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
            raise ValueError(f"{constant} has no layer {absent[0]!r}, but {', '.join(sorted(linear))}")
        warnings.filterwarnings("ignore", "Model has .tie_word_embeddings")  # refused below, in a sentence
        model.add_adapter(config)
    except ValueError as error:
        said = first_line(error).rstrip("(")
        raise UserError(f"LORA_TARGETS = {LORA_TARGETS!r} gives no adapter: {said}") from None
    held = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    for name, layer in model.named_modules():
        if hasattr(layer, "get_delta_weight") and held.count(id(layer.get_base_layer().weight)) > 1:
            tied = f"{name} shares its weight with another layer of {constant}, and could not be merged"
            raise UserError(f"LORA_TARGETS = {LORA_TARGETS!r}: {tied}: leave it out")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    config.target_modules = sorted(config.target_modules)  # a set's order differs from run to run
    model.eval()


@torch.no_grad()
def load_adapter(model, saved):
    """Fill the model's adapter from a checkpoint's folder."""
    own = {f"base_model.model.{name}": x for name, x in model.get_adapter_state_dict().items()}
    try:
        state = load_file(saved / "adapter_model.safetensors")
        then = json.loads((saved / "adapter_config.json").read_text())
        same = (then["r"], then["lora_alpha"]) == (LORA_RANK, LORA_ALPHA)
    except Exception as error:  # safetensors raises kinds of its own
        why = f"cannot be loaded ({first_line(error)}): take an older checkpoint"
        raise UserError(f"the adapter in {saved} {why}, or set RESUME=no") from None
    if not same or {name: x.shape for name, x in own.items()} != {name: x.shape for name, x in state.items()}:
        made = "was made with another LORA_RANK, LORA_ALPHA or LORA_TARGETS"
        raise UserError(f"{saved} {made}: resume it as it was, or set RESUME=no")
    for name, x in own.items():
        x.copy_(state[name])


@contextmanager
def without_adapter(model):
    """Inside the block the model is what it was before it got an adapter, if it has one."""
    adapted = hasattr(model, "peft_config")
    if adapted:
        model.disable_adapters()
    try:
        yield
    finally:
        if adapted:
            model.enable_adapters()


@contextmanager
def in_float32(model):
    """Inside the block weights in bfloat16 are in float32 while their layer computes: one layer's at a time,
    since the whole model may not fit."""
    narrow = {id(p): p for p in model.parameters() if p.dtype == torch.bfloat16}

    def cast(module, dtype):
        for parameter in module.parameters(recurse=False):
            if id(parameter) in narrow:
                parameter.data = parameter.data.to(dtype)

    def widen(module, inputs):
        cast(module, torch.float32)

    def shrink(module, inputs, outputs):
        cast(module, torch.bfloat16)

    hooks = [module.register_forward_pre_hook(widen) for module in model.modules() if narrow]
    hooks += [module.register_forward_hook(shrink) for module in model.modules() if narrow]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in narrow.values():
            parameter.data = parameter.data.bfloat16()


def shard(model, device):
    """Each process keeps its part of every parameter, gradient and optimizer state (FSDP2): the layers' other
    parts come when one is read, in the update."""
    mesh = init_device_mesh(device.type, (processes(),))
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing is done in place
    for part in (*(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)), model):
        fully_shard(part, mesh=mesh)  # in float32: autocast narrows, a policy of its own loses Packed's hint
        part.set_gradient_divide_factor(1.0)  # sums: losses are divided by the whole step's tokens already
        part.set_force_sum_reduction_for_comms(True)
    with torch.no_grad():  # or the first layer that is read would take itself for the whole model
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device))
    model.reset_iter_state()
    return model


@contextmanager
def whole(*models):
    """Inside the block each process has all parameters of sharded models, and may read and sample with them
    as often as it likes: nothing waits for another process, in decoding least of all. Models that are not
    sharded stay as they are."""
    models = [m for m in models if isinstance(m, FSDPModule) and not m.__dict__.get("is_whole")]
    for model in models:
        model.is_whole = True
        model.set_reshard_after_forward(False)
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.unshard()
    try:
        yield
    finally:
        for model in models:
            model.reset_iter_state()  # a prefetch that is left over would wait for the others
            model.set_reshard_after_forward(True)
            model.is_whole = False


def load_tokenizer(path, constant):
    tokenizer = load_pretrained(AutoTokenizer, path, constant)
    if tokenizer.eos_token_id is None:
        why = "its tokenizer has no EOS token, so no response could ever end; set eos_token in it"
        raise UserError(f"{constant} = {str(path)!r}: {why}")
    return tokenizer


def load_reward_model(path, device):
    """A one-label sequence classifier, frozen, and its tokenizer; (None, None) for None."""
    if path is None:
        return None, None
    model = load_model(AutoModelForSequenceClassification, path, "REWARD_MODEL", device).requires_grad_(False)
    if model.config.num_labels != 1 or not hasattr(model, "score"):
        must = f"must be a decoder with a classification head of one label, not {model.config.num_labels}"
        raise UserError(f"REWARD_MODEL = {path!r} {must}")
    return model, load_tokenizer(path, "REWARD_MODEL")


def known_ids(model):
    """How many token ids model has an embedding for."""
    return len(model.get_input_embeddings().weight)


def end_ids(model, tokenizer):
    """The ids that end a response, a tensor: the tokenizer's and the generation config's, often several."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return torch.tensor(sorted({tokenizer.eos_token_id, *ends} - {None}), device=model.device)


def padding_id(model, tokenizer):
    """An id to pad with: no model looks at it, but all look it up."""
    pad = tokenizer.pad_token_id
    return tokenizer.eos_token_id if pad is None or pad >= known_ids(model) else pad


def positions_of(model):
    """(How many tokens model can read, why no more); inf where its config knows no bound."""
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
        if rope.get("rope_type") in ("longrope", "dynamic"):
            first = rope.get("original_max_position_embeddings")
            first = first or getattr(config, "original_max_position_embeddings", None) or longest
            change = f"its rotary positions ({rope['rope_type']}) change beyond"
            return first, f"{change}, so what is sampled and what is trained would differ"
    if isinstance(longest, int) and longest > 0:
        return longest, "it has no more positions"
    return math.inf, ""


def conversation(prompt):
    """The messages that a prompt is to the model: a chat's own, or its text in PROMPT_TEMPLATE; SYSTEM_PROMPT
    goes first where there is no system message."""
    messages = getattr(prompt, "messages", None)
    if messages is None:
        messages = [{"role": "user", "content": PROMPT_TEMPLATE.replace("{input}", prompt)}]
    has_one = any(message["role"] in ("system", "developer") for message in messages)
    first = [] if SYSTEM_PROMPT is None or has_one else [{"role": "system", "content": SYSTEM_PROMPT}]
    return first + messages


def render(tokenizer, messages, where, go_on):
    """Messages as text by the chat template; go_on: with what begins the assistant's next turn."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=go_on)
    except Exception as error:  # a template may refuse roles, or their order, by any kind
        why = f"{tokenizer.name_or_path!r} does not take these messages ({first_line(error)})"
        raise UserError(f"{where}: the chat template of {why}") from None


def chat(tokenizer, prompt, where, response=None):
    """The ids of a prompt, a text or a chat, or of one with its response, which may know its turns, in the
    tokenizer's chat template; a text can do without one. where: what an error names."""
    prompt = read_prompt(prompt, where)
    messages = conversation(prompt)
    turns = [] if response is None else [{"role": "assistant", "content": response}]
    turns = getattr(response, "messages", None) or turns
    if tokenizer.chat_template:
        text = render(tokenizer, messages + turns, where, response is None)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(messages) > 1 or getattr(prompt, "messages", None):
        needs = "a list of messages or SYSTEM_PROMPT needs a chat template"
        todo = "put a file chat_template.jinja beside it, such as that of its chat version"
        raise UserError(f"{where}: {needs}, and {tokenizer.name_or_path!r} has none: {todo}")
    text = messages[0]["content"]
    ends = {"assistant": tokenizer.eos_token}
    ids = tokenizer(text + "".join(m["content"] + ends.get(m["role"], "") for m in turns))["input_ids"]
    # Some tokenizers end every text: a response would begin after the end, or end twice
    if response is None:
        ended = ids[-1:] == [tokenizer.eos_token_id] and not text.endswith(tokenizer.eos_token)
        return ids[:-1] if ended else ids
    twice = ids[-2:] == [tokenizer.eos_token_id] * 2 and not response.endswith(tokenizer.eos_token)
    return ids[:-1] if twice else ids


def encode(rows, constant, tokenizer, readers, say):
    """Add the prompt's ids to each row ({"prompt", ...}); rows longer than MAX_PROMPT_TOKENS are left out,
    and said so. readers: the models that read them, each by its constant, the actor first."""
    known = known_ids(next(iter(readers.values())))
    for row in rows:
        which = row.get("id", "the prompt")
        row["ids"] = chat(tokenizer, row["prompt"], f"{constant}: {which}")
        row["prompt"] = with_facts(row["prompt"], messages=conversation(row["prompt"]))
        if not row["ids"]:
            raise UserError(f"{constant}: {which}: its tokenizer makes no token of it; mend or delete it")
        if max(row["ids"]) >= known:
            gives = f"its tokenizer gives the id {max(row['ids'])} ({constant}: {which})"
            gives = f"{gives}, its model knows {known} ids"
            todo = "take the tokenizer it was trained with, or resize its embeddings"
            raise UserError(f"ACTOR_MODEL = {ACTOR_MODEL!r}: {gives}: {todo}")
    kept = [row for row in rows if len(row["ids"]) <= MAX_PROMPT_TOKENS]
    if len(kept) < len(rows):
        longest = max(len(row["ids"]) for row in rows)
        left_out = f"left out {len(rows) - len(kept)} of {len(rows)} prompts (longest {longest})"
        say(f"{constant}: {left_out}, longer than MAX_PROMPT_TOKENS = {MAX_PROMPT_TOKENS}")
    needed = max((len(row["ids"]) for row in kept), default=0) + MAX_NEW_TOKENS
    for whose, model in readers.items():
        most, why = positions_of(model)
        if needed > most:
            have = f"a prompt of {constant} and MAX_NEW_TOKENS = {MAX_NEW_TOKENS} are {needed}"
            todo = "lower MAX_NEW_TOKENS, or MAX_PROMPT_TOKENS, which leaves longer prompts out"
            raise UserError(f"{whose} reads {most} tokens at most ({why}); {have}: {todo}")
    return kept


def encode_texts(prompts, answers, what, tokenizer, readers, say):
    """Rows of texts or chats that a caller gives, those that encode() keeps."""
    answers = answers or [None] * len(prompts)
    rows = [{"prompt": read_prompt(p, what), "answer": answer} for p, answer in zip(prompts, answers)]
    return encode(rows, what, tokenizer, readers, say)


def load_prompts(datasets, constant, limit, tokenizer, readers, say):
    """The rows of data sets that encode() keeps; those to train on must be some."""
    if "{input}" not in PROMPT_TEMPLATE:
        must = "must contain {input}, where the prompt goes"
        raise UserError(f"PROMPT_TEMPLATE = {PROMPT_TEMPLATE!r} {must}")
    rows = encode(load_rows(datasets, constant, limit), constant, tokenizer, readers, say)
    if not rows and constant == "TRAIN_DATASETS":
        todo = "raise MAX_PROMPT_TOKENS or give it data"
        raise UserError(f"{constant} leaves no prompt to train on: {todo}")
    seen = [[row["id"], row["ids"], row["answer"], row["prompt"].facts] for row in rows]
    must_agree({f"rows in {constant}": seen})
    return rows


# ---------------------------------------------------------------- tensors

def pad_left(rows, value):
    """Lists of ids as one tensor, (rows, longest)."""
    width = max(map(len, rows))
    return torch.tensor([[value] * (width - len(row)) + list(row) for row in rows])


def pad_right(rows, value):
    width = max(map(len, rows))
    return torch.tensor([list(row) + [value] * (width - len(row)) for row in rows])


def same_prompt(batch, rows):
    """A number for each of the rows, (rows,), equal where the prompts are."""
    prompts = torch.cat([batch.prompt_lengths[rows, None], batch.prompt_ids[rows]], 1)
    return prompts.unique(dim=0, return_inverse=True)[1]


def micro_batches(batch, rows, size):
    """Cut rows into micro-batches of at most `size`, rows of one prompt together, prompts of like length."""
    if not len(rows):
        return ()
    prompt = same_prompt(batch, rows)
    lengths = (batch.prompt_lengths + batch.response_lengths)[rows]
    longest = torch.zeros_like(lengths).scatter_reduce(0, prompt, lengths, "amax")[prompt]
    return rows[(longest * len(rows) + prompt).argsort(descending=True, stable=True)].split(size)


@functools.cache
def room_for_logits(device):
    """Bytes for a micro-batch's logits: 64 MiB, on a GPU 1/16 of the smallest memory of all processes' cards,
    since all must cut the same micro-batches."""
    return min(exchange(torch.cuda.mem_get_info(device)[1] // 16 if device.type == "cuda" else 2**26))


def rows_at_once(model, batch):
    """Rows of a micro-batch: those of BATCH_SIZE prompts, but at most 64, and fewer where their logits would
    not fit into room_for_logits() (a large vocabulary)."""
    a_row = 4 * model.config.get_text_config().vocab_size * batch.response_ids.shape[1]
    return max(1, min(64, BATCH_SIZE * GROUP_SIZE, room_for_logits(model.device) // a_row))


def autocast(model):
    return torch.autocast(model.device.type, torch.bfloat16) if DTYPE == "bfloat16" else nullcontext()


# ---------------------------------------------------------------- sampling

def find_in_cdf(weights, at):
    """Where the fraction at (rows, 1) of the sum of weights (rows, n) is reached, and how far into that
    one."""
    cumulative = weights.double().cumsum(-1)
    target = at * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, target, right=True).clamp(max=weights.shape[1] - 1)
    weight = weights.double().gather(-1, found)
    return found, (1 - (cumulative.gather(-1, found) - target) / weight).clamp(0, 1 - 2**-40)


def full_logprobs(logits, temperature):
    """Log-probabilities (..., vocabulary) of all tokens, in float32; a reference is scored by these."""
    logits = logits.float()
    return (logits / temperature if temperature != 1 else logits).log_softmax(-1)


def entropy_of(logprobs):
    """Entropy (...) of a distribution's log-probabilities (..., vocabulary), in nats."""
    return -(logprobs.exp() * logprobs.clamp(min=-1e30)).sum(-1)  # 0 times -inf is no number


def sample_tokens(probabilities, uniform):
    """One id a row by inverting the cumulative distribution: probabilities (rows, vocabulary), uniform
    (rows,) in [0, 1). First among blocks of 128 ids, then within the block: four times as fast as over a
    whole large vocabulary."""
    if probabilities.device.type == "mps":  # has no float64
        return sample_tokens(probabilities.cpu(), uniform.cpu()).to(probabilities.device)
    missing = -probabilities.shape[1] % 128
    blocks = torch.nn.functional.pad(probabilities, (0, missing)).unflatten(1, (-1, 128))
    block, at = find_in_cdf(blocks.sum(-1), uniform.double().unsqueeze(-1))
    inside, _ = find_in_cdf(blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, 128)).squeeze(1), at)
    return (block * 128 + inside).squeeze(-1).clamp(max=probabilities.shape[1] - 1)


class Uncached:
    """Decoding without a cache: every row anew at every token. Slow, and right for any causal model."""

    shared = ()

    def __init__(self, model, prompts, group_size, max_new_tokens, pad_id):
        width = max(map(len, prompts)) + max_new_tokens
        rows = [list(p) + [pad_id] * (width - len(p)) for p in prompts for _ in range(group_size)]
        self.model = model
        self.ids = torch.tensor(rows, device=model.device)
        lengths = torch.tensor([len(p) for p in prompts], device=model.device)
        self.lengths = lengths.repeat_interleave(group_size)
        self.logits = self.last_logits()

    def last_logits(self):
        logits = row_logits(self.model, self.ids[:, :int(self.lengths.max())])
        return logits[torch.arange(len(logits), device=logits.device), self.lengths - 1]

    def next(self, tokens):
        """Logits (rows, vocabulary) after one more token (rows,) a row."""
        self.ids.scatter_(1, self.lengths.unsqueeze(-1), tokens.unsqueeze(-1))
        self.lengths = self.lengths + 1
        return self.last_logits()

    def keep(self, rows):
        """Go on with these rows alone."""
        self.ids = self.ids[rows]
        self.lengths = self.lengths[rows]


class Cached:
    """Decoding with the model's own cache. Each prompt is prefilled once and its cache expanded to group_size
    rows; with share, layers that hold all keys keep a prompt's once for all its rows (see GroupedLayer)."""

    def __init__(self, model, prompts, group_size, max_new_tokens, pad_id, share):
        device, rows = model.device, len(prompts) * group_size
        names = inspect.signature(model.forward).parameters
        prompt_ids = pad_left(prompts, pad_id).to(device)  # (prompts, P)
        width = prompt_ids.shape[1]
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        mask = (torch.arange(width, device=device) >= width - lengths[:, None]).long()
        self.model = model
        self.cache_name = "cache_params" if "cache_params" in names else "past_key_values"
        self.positioned = "position_ids" in names
        self.options = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        out = self.forward(prompt_ids, mask, (mask.cumsum(1) - 1).clamp(min=0), None)
        self.cache = getattr(out, self.cache_name)
        self.logits = out.logits[:, -1].repeat_interleave(group_size, 0)  # (rows, vocabulary)
        row_to_prompt = torch.arange(rows, device=device) // group_size
        hidden = torch.finfo(torch.float32).min
        self.groups = Groups(row_to_prompt, torch.where(mask[:, None, None] > 0, 0, hidden))
        self.layers = getattr(self.cache, "layers", None) or [self.cache]
        for i, layer in enumerate(self.layers):  # a sliding window's layer stays what it is
            if share and type(layer) is DynamicLayer and layer.is_initialized:
                self.layers[i] = GroupedLayer(layer, self.groups)
            else:
                layer.reorder_cache(row_to_prompt)
        self.shared = [layer for layer in self.layers if isinstance(layer, GroupedLayer)]
        self.mask = torch.cat([mask.repeat_interleave(group_size, 0), mask.new_ones(rows, max_new_tokens)], 1)
        self.seen = width
        self.positions = lengths.repeat_interleave(group_size)  # (rows,) of the next token

    def forward(self, ids, mask, positions, cache):
        options = {**self.options, self.cache_name: cache}
        if self.positioned:
            options["position_ids"] = positions
        return self.model(input_ids=ids, attention_mask=mask, use_cache=True, **options)

    def next(self, tokens):
        """Logits (rows, vocabulary) after one more token (rows,) a row."""
        self.seen += 1
        all_shared = len(self.shared) == len(self.layers)  # they hide the padding themselves
        mask = None if all_shared else self.mask[:, :self.seen]
        out = self.forward(tokens.unsqueeze(-1), mask, self.positions.unsqueeze(-1), self.cache)
        self.positions = self.positions + 1
        return out.logits[:, -1]

    def keep(self, rows):
        """Go on with these rows alone."""
        prompts, row_to_prompt = self.groups.row_to_prompt[rows].unique(return_inverse=True)
        self.groups = Groups(row_to_prompt, self.groups.bias[prompts])
        for layer in self.layers:
            if isinstance(layer, GroupedLayer):
                layer.select(rows, prompts, self.groups)
            else:
                layer.reorder_cache(rows)
        self.mask = self.mask[rows]
        self.positions = self.positions[rows]


_LOOK_EVERY = {"cpu": 1}  # tokens from one look at who has finished to the next; a GPU stops for each answer


@torch.no_grad()
def generate(model, prompts, uniform, group_size, max_new_tokens, temperature, eos_ids, pad_id):
    """Respond to each prompt (a list of ids) group_size times; rows of one prompt are neighbours.

    uniform (rows, max_new_tokens) decides every token; None takes the likeliest one. model.sampled_by
    (grouped | cached | uncached) is what choose_sampling() found. Returns ids (rows, max_new_tokens), lengths
    (rows,), and of the sampling distribution each id's log-probability and the entropy, as the ids. A row
    holds its first EOS and pad after it; a row cut at max_new_tokens holds no EOS."""
    device, rows = model.device, len(prompts) * group_size
    way = getattr(model, "sampled_by", "grouped")
    if way == "uncached":
        decoder = Uncached(model, prompts, group_size, max_new_tokens, pad_id)
    else:
        share = way == "grouped" and shared_windows(model) is not None
        decoder = Cached(model, prompts, group_size, max_new_tokens, pad_id, share)
    ids = torch.full((rows, max_new_tokens), pad_id, device=device)
    lengths = torch.zeros(rows, dtype=torch.long, device=device)
    logprobs, entropies = torch.zeros(2, rows, max_new_tokens, device=device)
    rows = torch.arange(rows, device=device)  # which row of the result each row of the decoder is
    unfinished = torch.ones_like(rows, dtype=torch.bool)
    logits = decoder.logits
    look_every = _LOOK_EVERY.get(device.type, 16)
    for t in range(max_new_tokens):
        scaled = sampling_logprobs(logits, temperature).clamp_(min=-1e30)  # (rows still there, vocabulary)
        probabilities = scaled.exp()
        tokens = scaled.argmax(-1) if uniform is None else sample_tokens(probabilities, uniform[rows, t])
        ids[rows, t] = tokens
        logprobs[rows, t] = scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        entropies[rows, t] = -(probabilities * scaled).sum(-1)
        lengths[rows] += unfinished
        unfinished &= ~torch.isin(tokens, eos_ids)
        left = int(unfinished.sum()) if t % look_every == 0 else len(rows)
        if left == 0 or t + 1 == max_new_tokens:
            break
        if left <= 0.75 * len(rows):  # drop the finished rows, but not for every single one
            keep = unfinished.nonzero().squeeze(-1)
            decoder.keep(keep)
            rows = rows[keep]
            tokens = tokens[keep]
            unfinished = unfinished[keep]
        logits = decoder.next(tokens)
        if t == 0 and not all(layer.attended for layer in decoder.shared):
            # The model changes keys or values before attention sees them: attend() could not add the prompt's
            model.sampled_by = "cached"
            return generate(model, prompts, uniform, group_size, max_new_tokens, temperature, eos_ids, pad_id)
    # what finished rows said after their end
    over = torch.arange(max_new_tokens, device=device) >= lengths[:, None]
    ids = ids.masked_fill(over, pad_id)
    return ids, lengths, logprobs.masked_fill(over, 0), entropies.masked_fill(over, 0)


def respond(model, tokenizer, prompts, uniform, group_size=1, temperature=None, at_once=None):
    """generate() over lists of ids, at_once (BATCH_SIZE) at a time; uniform None is greedy. A batch whose
    tensors are (rows, R): R is the longest response, response_mask is 1 up to and with the first EOS."""
    size = at_once or BATCH_SIZE
    eos_ids = end_ids(model, tokenizer)
    pad_id = padding_id(model, tokenizer)

    def some(i):
        chunk = None
        if uniform is not None:
            chunk = uniform[i * group_size:(i + size) * group_size].to(model.device)
        with autocast(model):
            return generate(
                model, prompts[i:i + size], chunk, group_size, MAX_NEW_TOKENS,
                temperature or TEMPERATURE, eos_ids, pad_id)

    with whole(model):
        parts = dealt(range(0, len(prompts), size), some)
    ids, lengths, logprobs, entropies = (torch.cat(x) for x in zip(*parts))
    width = int(lengths.max())
    rows = [row[:n] for row, n in zip(ids.tolist(), lengths.tolist())]
    last = ids.gather(1, lengths[:, None] - 1).squeeze(1)
    repeated = [p for p in prompts for _ in range(group_size)]
    return SimpleNamespace(
        prompt_ids=pad_left(repeated, pad_id).to(model.device),
        prompt_lengths=torch.tensor([len(p) for p in repeated], device=model.device),
        response_ids=ids[:, :width],
        response_lengths=lengths,
        response_mask=(torch.arange(width, device=model.device) < lengths[:, None]).float(),
        logprobs=logprobs[:, :width],
        entropies=entropies[:, :width],
        truncated=~torch.isin(last, eos_ids),
        responses=[
            with_facts(text, response_ids=row)
            for text, row in zip(tokenizer.batch_decode(rows, skip_special_tokens=True), rows)])


# ---------------------------------------------------------------- scoring

def row_logits(model, ids, last=0):
    """Logits of whole rows (rows, T), the last so many columns or, with 0, all. Padding stands on the right,
    where a causal model cannot see it: no mask, no positions, no cache."""
    wanted = {"use_cache": False, "logits_to_keep": last}
    names = inspect.signature(model.forward).parameters
    options = {key: value for key, value in wanted.items() if key in names}
    return model(input_ids=ids, **options).logits[:, -last:]


def logits_by_rows(model, batch, rows):
    """What the model says where it predicts a response token whose response_mask is 1, (tokens, labels), row
    after row, and where those tokens are, (rows, R) of bool. Each row is read with its prompt."""
    prompts = batch.prompt_lengths[rows, None]
    responses = batch.response_lengths[rows, None]
    wide = batch.prompt_ids.shape[1]
    column = torch.arange(int((prompts + responses).max()), device=rows.device).expand(len(rows), -1)
    in_prompt = batch.prompt_ids[rows].gather(1, (wide - prompts + column).clamp(max=wide - 1))
    last = batch.response_ids.shape[1] - 1
    in_response = batch.response_ids[rows].gather(1, (column - prompts).clamp(0, last))
    ids = torch.where(column < prompts, in_prompt, in_response)
    first = int(prompts.min()) - 1  # the first column that predicts a response token
    logits = row_logits(model, ids, ids.shape[1] - first)
    mask = batch.response_mask[rows, :int(responses.max())] > 0  # (rows, R)
    row, token = mask.nonzero(as_tuple=True)
    predicted_at = prompts.squeeze(-1)[row] - 1 + token
    return logits[row, predicted_at - first], mask


def response_logits(model, batch, rows):
    """As logits_by_rows(), in the way model.scored_by (packed | rows) says; see choose_scoring()."""
    windows = shared_windows(model)
    if windows is None or getattr(model, "scored_by", "packed") == "rows":
        return logits_by_rows(model, batch, rows)
    return logits_by_packing(model, batch, rows, windows)


def response_logprobs(model, batch, rows, temperature, distribution=None):
    """Log-probabilities of the responses' ids in a distribution (None: sampling_logprobs) and its entropy at
    each: two (rows, R), float32, 0 where response_mask is. One tensor of the logits' size waits for the
    backward pass, which computes the entropy's anew."""
    with autocast(model):
        logits, mask = response_logits(model, batch, rows)
    ids = batch.response_ids[rows, :mask.shape[1]][mask]
    every = (distribution or sampling_logprobs)(logits, temperature)  # (tokens, vocabulary)
    logprobs = every.gather(-1, ids.unsqueeze(-1)).squeeze(-1).clamp(min=-1e30)
    entropy = checkpoint(entropy_of, every, use_reentrant=False, preserve_rng_state=False)
    zeros = torch.zeros(mask.shape, device=mask.device)
    return zeros.masked_scatter(mask, logprobs), zeros.masked_scatter(mask, entropy)


def response_values(model, batch, rows):
    """What a model of one label says before each response token is seen: (rows, R), float32, 0 where
    response_mask is."""
    with autocast(model):
        values, mask = response_logits(model, batch, rows)
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values[:, 0].float())


@torch.no_grad()
def by_micro_batches(say, batch, micros):
    """say(rows) (micro-batch, R) of all rows, as one tensor (rows, R); the micro-batches are dealt out."""
    found = torch.zeros_like(batch.response_mask)
    for rows, values in zip(micros, dealt(micros, say)):
        found[rows, :values.shape[1]] = values
    return found


def every_micro_batch(model, batch):
    """The micro-batches of all rows of a batch."""
    every = torch.arange(len(batch.response_lengths), device=model.device)
    return micro_batches(batch, every, rows_at_once(model, batch))


def all_logprobs(model, batch, micros=None, distribution=None):
    """Log-probabilities of a batch's responses under model, (rows, R), without a gradient."""
    def say(rows):
        return response_logprobs(model, batch, rows, TEMPERATURE, distribution)[0]

    with whole(model):
        return by_micro_batches(say, batch, micros or every_micro_batch(model, batch))


def all_values(model, batch):
    """What a model of one label says before each response token of a batch, (rows, R), without a gradient."""
    def say(rows):
        return response_values(model, batch, rows)

    with whole(model):
        return by_micro_batches(say, batch, every_micro_batch(model, batch))


@torch.no_grad()
def classify(model, tokenizer, prompts, responses):
    """A reward model's score of each prompt with its response, (rows,), read at the last real token."""
    rows = [chat(tokenizer, p, "REWARD_MODEL", r) for p, r in zip(prompts, responses)]
    most, why = positions_of(model)
    longest = max(map(len, rows))
    if longest > most:
        reads = f"reads {most} tokens at most ({why}); a prompt with its response has {longest}"
        raise UserError(f"REWARD_MODEL = {REWARD_MODEL!r} {reads}")
    scores = torch.zeros(len(rows), device=model.device)
    lengths = torch.tensor([len(row) for row in rows])
    for chunk in lengths.argsort(stable=True).split(min(64, BATCH_SIZE * GROUP_SIZE)):
        ids = pad_right([rows[i] for i in chunk], 0).to(model.device)  # where a causal model cannot see it
        last = (lengths[chunk] - 1).to(model.device)
        with autocast(model):
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            said = model.score(hidden[torch.arange(len(chunk), device=model.device), last])
        scores[chunk.to(model.device)] = said.squeeze(-1).float()
    return scores


# ---------------------------------------------------------------- the optimizer step

def make_optimizer(model, learning_rate):
    """AdamW over a model, whose activations are recomputed with GRADIENT_CHECKPOINTING. All its groups are
    scheduled (see set_rates), clipped and stepped."""
    if GRADIENT_CHECKPOINTING:
        model.activation_checkpointing_enable({"use_reentrant": False})
    fused = model.device.type != "mps"
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=learning_rate, weight_decay=WEIGHT_DECAY, fused=fused)


def set_rates(optimizer, rate):
    """Give each group the learning rate, or the multiple of it that make_optimizer() gave it."""
    made = optimizer.defaults["lr"]
    for group in optimizer.param_groups:
        group["lr"] = rate * group.setdefault("multiple", group["lr"] / made if made else 1.0)


@contextmanager
def recomputing(models):
    """Activations are recomputed inside the block, with GRADIENT_CHECKPOINTING: that is for layers in
    training mode, so only they are put into it, and nothing else that training mode would change."""
    layers = []
    if GRADIENT_CHECKPOINTING:
        layers = [m for model in models for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def backward(model, loss):
    """loss.backward(), by kernels whose sums always come in one order where the device has them (see
    try_strict_kernels); the gradient becomes a part of the step's sum (see summed)."""
    if getattr(model, "idle", False):
        loss = 0 * loss
    strict = getattr(model, "strict", False)
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    try:
        loss.backward()
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def summed(models, parts, metrics):
    """Go through the parts of one optimizer step in rounds, a part a process: yields this process's with a
    dict for what it measures, to a body that calls backward(). After a round all processes add its gradients
    in the order of the parts, so that their sum has the same bits on any number of processes; with EXACT_SUMS
    = False they add up once, at the end. metrics gets the sums of what was measured; of names that end in
    _max the greatest."""
    parameters = [p for model in models for p in model.parameters() if p.requires_grad]
    sharded = any(isinstance(model, FSDPModule) for model in models)  # FSDP2 adds up in each backward pass
    for parameter in parameters:  # even where nothing comes: momentum moves the weights
        parameter.grad = None if sharded else torch.zeros_like(parameter)
    in_rounds = EXACT_SUMS and processes() > 1 and not sharded
    totals = [torch.zeros_like(p) for p in parameters if in_rounds]
    measured = []
    for first in range(0, len(parts), processes()):
        number = first + rank()
        share = {}
        for model in models:
            model.idle = number >= len(parts)  # FSDP2 waits for all processes in each part
        if number < len(parts) or sharded:
            yield parts[min(number, len(parts) - 1)], share
        found = exchange((len(parts), share))
        if len(counts := {count for count, _ in found}) > 1:
            raise UserError(f"the processes cut one optimizer step into {sorted(counts)} micro-batches")
        measured += [share for _, share in found]
        for parameter, total in zip(parameters, totals):
            gradients = [torch.empty_like(total) for _ in found]
            dist.all_gather(gradients, parameter.grad)
            for gradient in gradients:
                total += gradient
            parameter.grad.zero_()
    for model in models:
        model.idle = False
    for parameter, total in zip(parameters, totals):
        parameter.grad = total
    for parameter in parameters:
        if processes() > 1 and not in_rounds and not sharded:
            dist.all_reduce(parameter.grad)
    for share in measured[:len(parts)]:
        for key, value in share.items():
            both = (metrics[key], value) if key in metrics else (value,)
            metrics[key] = max(both) if key.endswith("_max") else sum(both)


def check_first_ratio(steps, step):
    """The run's first optimizer step sees the policy that sampled: its ratios are 1, but for rounding."""
    apart = [metrics.pop("log_ratio") for metrics in steps][0]  # mean |log ratio|, nats a token
    first = steps[0]["ratio_max"]
    if step == 0 and DTYPE == "float32" and first > 1e-3:
        why = "ACTOR_MODEL scores a response otherwise than it sampled it"
        sees = f"the first update sees a ratio {first:.2g} away from 1"
        raise UserError(f"{sees}: {why}, or an edit changed one of the two")
    if step == 0 and apart > 0.05:
        sees = f"the first update sees log-probabilities {apart:.2g} nats a token away from the sampler's"
        raise UserError(f"{sees}: DTYPE = {DTYPE!r} does not suit ACTOR_MODEL")


def clip_and_step(optimizers, loss, run, ids):
    """Clip and step each optimizer; returns the gradient norms. Where loss or a norm is not finite the
    weights stay as they are, and run.count_skipped() names the prompts' ids."""
    norms = []
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        norms.append(full(norm).item())
    finite = all(map(math.isfinite, (loss, *norms)))
    for optimizer in optimizers:
        if finite:
            optimizer.step()
        optimizer.zero_grad()
    run.count_skipped(finite, ids)
    return norms


# ---------------------------------------------------------------- what is logged

def size_of(model):
    """How many parameters a model has and, with an adapter, how many of them are trained."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    adapted = f", {trained:,} of them trained," if LORA_RANK else ""
    return f"{model.num_parameters():,} parameters{adapted}"


def headline(run, actor, train_rows, eval_rows):
    """What a run begins with, on the terminal."""
    name = "/".join(Path(ACTOR_MODEL).parts[-2:])
    name = f"{name}: {size_of(actor)} on {actor.device}, {DTYPE}"
    prompts = f"{len(train_rows)} prompts to train on, {len(eval_rows)} held out"
    each = f"{BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS} x {GROUP_SIZE} responses each"
    return f"{name}; {prompts}; steps {run.step} to {run.total_steps}, {each}; writing to {OUTPUT_DIR}"


def a_response(scores):
    """Scores (rows,) of scores a response or a token: (rows,) or (rows, R)."""
    return scores.reshape(len(scores), -1).sum(1)


def response_metrics(batch, scores, parts):
    """Means over responses: of the scores and their parts, lengths, how many were cut."""
    return {
        "reward": a_response(scores).mean().item(),
        **{f"reward/{name}": values.mean().item() for name, values in parts.items()},
        "response_length": batch.response_mask.sum(1).mean().item(),
        "truncated_fraction": batch.truncated.float().mean().item()}


def sample_records(batch, advantages):
    """LOG_SAMPLES of a step's rows for samples.jsonl; advantages (rows,)."""
    records = []
    for i in torch.linspace(0, len(batch.rows) - 1, min(LOG_SAMPLES, len(batch.rows))).long().tolist():
        row = batch.rows[i]
        records.append({
            "id": row["id"], "prompt": transcript(row["prompt"]), "response": transcript(batch.responses[i]),
            "answer": row["answer"], "truncated": bool(batch.truncated[i]), "reward": batch.scores[i].item(),
            **{f"reward/{name}": float(values[i]) for name, values in batch.parts.items()},
            "advantage": advantages[i].item()})
    return records


# ---------------------------------------------------------------- models are tried before they are used

@torch.no_grad()
def single_rows(model, batch):
    """logits_by_rows() of a model that reads each row alone: no padding, mask, cache or other row."""
    own = model.config._attn_implementation
    if own == "shared_prompts":
        model.set_attn_implementation("sdpa")  # as transformers has it: a model may look at the name
    said = []
    lengths = zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist())
    try:
        for i, (p, n) in enumerate(lengths):
            ids = torch.cat([batch.prompt_ids[i, -p:], batch.response_ids[i, :n]])
            said.append(row_logits(model, ids[None])[0, p - 1:-1].float())
    finally:
        if own == "shared_prompts":
            model.set_attn_implementation(own)
    return torch.cat(said)


def first_that_agrees(model, constant, kind, ways, attempt):
    """Set model.<kind> to the first of the ways whose attempt() gives (what it found, what it should have
    found, a result) that agree; returns the result."""
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
        if apart <= 1e-3 * (1 + wanted.std(correction=0).item()):  # mistakes are as large as logits are
            return result
        why = f"with other tokens around them, the same tokens get values {apart:.2g} apart"
    name = f"a model of the type {model.config.model_type!r}"
    todo = "It must be causal; try it in transformers, or take another"
    raise UserError(f"{constant}: {name} cannot be used here, {why}. {todo}")


@torch.no_grad()
def choose_sampling(model, constant, prompts, pad_id):
    """Set model.sampled_by to the fastest way to decode that gives each token the log-probability it has in a
    forward pass of its row alone. In float32 whatever DTYPE is: no mistake hides in bfloat16's noise. Returns
    the samples, a batch."""
    twice = [p for p in prompts for _ in range(2)]
    ends = torch.arange(0, known_ids(model), 7, device=model.device)  # rows leave at different times
    uniform = torch.rand(len(twice), 10, generator=torch.Generator().manual_seed(0)).to(model.device)

    def attempt():
        ids, lengths, logprobs, _ = generate(model, prompts, uniform, 2, 10, 1.5, ends, pad_id)
        mask = torch.arange(10, device=model.device) < lengths[:, None]
        batch = SimpleNamespace(
            prompt_ids=pad_left(twice, pad_id).to(model.device),
            prompt_lengths=torch.tensor([len(p) for p in twice], device=model.device),
            response_ids=ids, response_lengths=lengths, response_mask=mask)
        alone = sampling_logprobs(single_rows(model, batch), 1.5)
        return logprobs[mask], alone.gather(1, ids[mask].unsqueeze(-1)).squeeze(-1), batch

    ways = ("cached", "uncached") if shared_windows(model) is None else ("grouped", "cached", "uncached")
    return first_that_agrees(model, constant, "sampled_by", ways, attempt)


@torch.no_grad()
def choose_scoring(model, constant, batch):
    """Set model.scored_by to "packed" or, where that says something else than single_rows(), to "rows"."""
    rows = torch.arange(len(batch.response_lengths), device=model.device)
    zeros = [p for p in model.parameters() if not p.any()]
    generator = torch.Generator().manual_seed(0)

    def attempt():
        return response_logits(model, batch, rows)[0].float(), single_rows(model, batch), None

    for parameter in zeros:  # a new value head says 0 whatever it reads
        parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    try:
        ways = ("rows",) if shared_windows(model) is None else ("packed", "rows")
        first_that_agrees(model, constant, "scored_by", ways, attempt)
    finally:
        for parameter in zeros:
            parameter.zero_()


def try_strict_kernels(models, batch, say):
    """Whether each model's backward pass can do without kernels whose sums come in another order on another
    run. Attention on a GPU has such kernels, and takes others only where nothing else is tolerated."""
    for model in models:
        model.strict = True
        rows = torch.arange(len(batch.response_lengths), device=model.device)
        try:
            with recomputing([model]):
                with autocast(model):
                    logits = response_logits(model, batch, rows)[0]
                backward(model, logits.float().logsumexp(-1).sum())
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            model.strict = False
            say(f"WARNING: on this device a resumed run is not the same to the last bit: {first_line(error)}")
        model.zero_grad()


def check_models(readers, trained, rows, pad_id, say):
    """Find out how each model samples and scores what it should, on four prompts cut to mixed lengths; draws
    none of the run's random numbers. readers: models by their constants, the actor first; trained: those with
    a backward pass."""
    prompts = [rows[i % len(rows)]["ids"][:length] for i, length in enumerate((32, 3, 17, 8))]
    constant, actor = next(iter(readers.items()))
    room_for_logits(actor.device)  # all processes ask at one place
    with whole(actor), in_float32(actor):
        batch = choose_sampling(actor, constant, prompts, pad_id)
    for constant, model in readers.items():
        with whole(model), in_float32(model):
            choose_scoring(model, constant, batch)
    if actor.device.type == "cuda":
        try_strict_kernels(trained, batch, say)


# ---------------------------------------------------------------- faster: rows of one prompt share it

def shared_windows(model):
    """How many of the keys before it each layer's query sees (None: all), a number a layer; None where rows
    of one prompt cannot share it: there tokens meet in something else than attend(), or the config has a
    window that no layer is said to have."""
    shares = getattr(getattr(model, "config", None), "_attn_implementation", None) == "shared_prompts"
    return layer_windows(model) if shares else None


def layer_windows(model):
    """A window a layer (None: all keys), by the config; None for other kinds of layer, or where it has a
    window that no layer is said to have."""
    try:
        config = model.config.get_text_config(decoder=True)
        kinds, options = get_layer_types_and_kwargs(config)
    except AttributeError:  # such as Mamba's
        return None
    if not {"full_attention", "sliding_attention"}.issuperset(kinds):
        return None
    windows = [option.get("sliding_window") for option in options]
    named = [value for key, value in vars(config).items() if key.endswith(("window", "window_size"))]
    hidden = any(type(value) is int and value > 0 for value in named) and not any(windows)
    return None if hidden else windows


class Groups:
    """Rows of one prompt side by side: row_to_prompt (rows,), in order; bias (prompts, 1, 1, P) hides the
    prompts' padding."""

    def __init__(self, row_to_prompt, bias):
        counts = row_to_prompt.bincount(minlength=len(bias))
        first = counts.cumsum(0) - counts
        self.row_to_prompt = row_to_prompt
        self.bias = bias
        self.most = int(counts.max())
        place = torch.arange(len(row_to_prompt), device=row_to_prompt.device) - first[row_to_prompt]
        self.slots = row_to_prompt * self.most + place
        self.full = len(row_to_prompt) == len(bias) * self.most

    def together(self, x):
        """(rows, heads, n, width) to (prompts, heads, most * n, width), zeros where a prompt has fewer rows
        than the most."""
        if not self.full:
            x = x.new_zeros(len(self.bias) * self.most, *x.shape[1:]).index_copy_(0, self.slots, x)
        return x.unflatten(0, (-1, self.most)).transpose(1, 2).flatten(2, 3)

    def apart(self, x):
        """The inverse of together()."""
        x = x.unflatten(2, (self.most, -1)).transpose(1, 2).flatten(0, 1)
        return x if self.full else x.index_select(0, self.slots)


class GroupedLayer(DynamicLayer):
    """One layer's keys and values while decoding: each prompt's once for all its responses, and what every
    response adds. Measured: 0.15 of the rollout's time with prompts of 512 tokens, 0.8 to 0.95 with 45; room
    that grows by a half, where DynamicLayer copies everything at every token, was 39% of a rollout's time."""

    def __init__(self, layer, groups):
        super().__init__()
        self.is_initialized = True
        self.dtype = layer.dtype
        self.device = layer.device
        self.groups = groups
        self.prompt = (layer.keys, layer.values)
        self.room = [x.new_empty(len(groups.row_to_prompt), x.shape[1], 0, x.shape[3]) for x in self.prompt]
        self.length = 0
        self.handed_out = (None, None)
        self.attended = False

    def get_seq_length(self):
        return self.prompt[0].shape[2] + self.length

    def update(self, keys, values, *args, **kwargs):
        if self.length == self.room[0].shape[2]:
            more = 16 + self.length // 2
            wider = [x.new_empty(*x.shape[:2], self.length + more, x.shape[3]) for x in self.room]
            for new, room in zip(wider, self.room):
                new[:, :, :self.length] = room
            self.room = wider
        for room, new in zip(self.room, (keys, values)):
            room[:, :, self.length] = new[:, :, 0]
        self.length += 1
        self.handed_out = tuple(room[:, :, :self.length] for room in self.room)
        self.handed_out[0].grouped = self  # for attend()
        return self.handed_out

    def select(self, rows, prompts, groups):
        self.room = [x.index_select(0, rows) for x in self.room]
        self.prompt = [x.index_select(0, prompts) for x in self.prompt]
        self.groups = groups


class CopyPrompts(torch.autograd.Function):
    """A prompt's keys or values (prompts, heads, P, width) for each row; row_to_prompt (rows,). The gradient
    is a product with ones and zeros: the same sum on every run, and quicker than indexing's, which took 22 ms
    of an update of 356."""

    @staticmethod
    def forward(ctx, prompts, row_to_prompt):
        ctx.save_for_backward(row_to_prompt)
        ctx.prompts = len(prompts)
        return prompts.index_select(0, row_to_prompt)

    @staticmethod
    def backward(ctx, grad):
        row_to_prompt, = ctx.saved_tensors
        share = torch.nn.functional.one_hot(row_to_prompt, ctx.prompts).to(grad.dtype)
        return (share.T @ grad.flatten(1)).unflatten(1, grad.shape[1:]), None


class Packed:
    """Rows of a batch as one sequence of tokens, almost without padding: each prompt once, then the responses
    without their last tokens, in blocks of like length that are padded to their longest. A response attends
    to its prompt and to itself. Measured against whole rows in micro-batches of 64: 0.78 of GRPO's step on
    the tiny model, 0.52 of PPO's."""

    def __init__(self, batch, rows, windows=()):
        device = rows.device
        self.windows = windows  # a layer's number: its window
        prompt = same_prompt(batch, rows)
        some = prompt.new_zeros(int(prompt.max()) + 1)
        one = rows[some.scatter_(0, prompt, torch.arange(len(rows), device=device))]  # a row of each prompt
        lengths = batch.prompt_lengths[one]
        sizes = batch.response_lengths[rows]
        wide = batch.prompt_ids.shape[1]
        column = torch.arange(int(lengths.max()), device=device)
        # padded to the right
        ids = batch.prompt_ids[one].gather(1, (wide - lengths[:, None] + column).clamp(max=wide - 1))
        # positions of keys; a padding's is out of sight
        seen = torch.where(column < lengths[:, None], column, 2**40)
        # Of each block: its ids, the positions of its queries and of the keys they may see, which prompt each
        # row has
        self.blocks = [(ids, column.expand_as(ids), seen, None)]
        starts = torch.zeros_like(rows)
        offset = ids.numel()
        order = sizes.argsort(stable=True)
        ordered = sizes[order].tolist()
        end = 0
        while end < len(rows):
            begin = end
            end = bisect.bisect_right(ordered, 1.2 * ordered[begin] + 2)
            part = order[begin:end]
            n = ordered[end - 1] - 1
            if n:
                positions = lengths[prompt[part], None] + torch.arange(n, device=device)
                keys_at = torch.cat([seen[prompt[part]], positions], 1)
                self.blocks.append((batch.response_ids[rows[part], :n], positions, keys_at, prompt[part]))
                starts[part] = offset + n * torch.arange(len(part), device=device)
                offset += n * len(part)
        step = torch.arange(ordered[-1], device=device)
        self.mask = batch.response_mask[rows, :len(step)] > 0  # (rows, R)
        last = prompt * len(column) + lengths[prompt] - 1  # each row's last prompt token
        self.predicted_at = torch.where(step > 0, starts[:, None] + step - 1, last[:, None])[self.mask]
        self.masks = {}
        # four dimensions: models hand it on; no other attention can take it
        hint = torch.zeros(1, 1, offset, 0, device=device)
        hint.packed = self
        ids, positions = (torch.cat([block[i].flatten() for block in self.blocks])[None] for i in (0, 1))
        self.inputs = {
            "input_ids": ids, "position_ids": positions, "attention_mask": hint, "use_cache": False}

    def mask_of(self, number, window, dtype):
        """What is added to a block's scores, (rows, 1, n, keys); one tensor for all layers, since each keeps
        its own for the backward pass."""
        if (number, window) not in self.masks:
            _, at, seen, _ = self.blocks[number]
            back = (at[:, :, None] - seen[:, None])[:, None]
            rows, one, n, keys = back.shape
            # a GPU's kernels copy other widths in each layer
            aligned = torch.zeros(rows, one, n, keys + -keys % 8, dtype=dtype, device=back.device)
            out_of_sight = (back < 0) | (back >= (window or 2**40))
            self.masks[number, window] = aligned[..., :keys].masked_fill_(out_of_sight, -torch.inf)
        return self.masks[number, window]

    def attend(self, module, query, key, value, sliding_window=None, **options):
        """Queries (1, heads, tokens, width), keys and values as they are, to (1, tokens, heads, width). The
        window is the config's: not every model says it here."""
        if options.get("position_bias") is not None:
            raise ValueError("a bias of whole rows cannot be packed")
        window = self.windows[module.layer_idx]
        sizes = [ids.numel() for ids, *_ in self.blocks]
        parts = zip(*(x.squeeze(0).split(sizes, 1) for x in (query, key, value)))
        out = []
        for number, ((ids, _, _, row_to_prompt), part) in enumerate(zip(self.blocks, parts)):
            q, k, v = (x.unflatten(1, ids.shape).transpose(0, 1) for x in part)  # (rows, heads, n, width)
            if row_to_prompt is None:
                prompt = k, v
            else:
                k = torch.cat([CopyPrompts.apply(prompt[0], row_to_prompt), k], 2)
                v = torch.cat([CopyPrompts.apply(prompt[1], row_to_prompt), v], 2)
            causal = row_to_prompt is None and not window
            mask = None if causal else self.mask_of(number, window, q.dtype)
            out.append(sdpa_attention_forward(module, q, k, v, mask, **options)[0].flatten(0, 1))
        return torch.cat(out)[None]


def logits_by_packing(model, batch, rows, windows):
    """As logits_by_rows(), of one packed sequence: where tokens meet in attention alone, and that is
    attend()'s."""
    packed = Packed(batch, rows, windows)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return model(**packed.inputs, logits_to_keep=packed.predicted_at).logits.squeeze(0), packed.mask
    return model(**packed.inputs).logits.squeeze(0)[packed.predicted_at], packed.mask


def attend(module, query, key, value, attention_mask, scaling=None, **options):
    """transformers' sdpa attention, but for two layouts: while decoding, a GroupedLayer's keys of a prompt
    are read once for all its rows; of a Packed sequence each response attends to its prompt and to itself."""
    packed = getattr(attention_mask, "packed", None)
    if packed is not None:
        return packed.attend(module, query, key, value, scaling=scaling, **options), None
    layer = getattr(key, "grouped", None)
    if layer is None or value is not layer.handed_out[1] or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    layer.attended = True
    rows, heads, _, width = query.shape
    query = query.reshape(rows, key.shape[1], -1, width) * (width ** -0.5 if scaling is None else scaling)
    groups = layer.groups
    prompt_keys, prompt_values = layer.prompt
    # (rows, kv heads, heads / kv heads, P)
    prompt = groups.apart(groups.together(query) @ prompt_keys.mT + groups.bias)
    weights = torch.cat([prompt, query @ key.mT], -1).softmax(-1, dtype=torch.float32).to(value.dtype)
    of_prompt, of_response = weights.split([prompt.shape[-1], key.shape[2]], -1)
    out = groups.apart(groups.together(of_prompt) @ prompt_values) + of_response @ value
    return out.reshape(rows, 1, heads, -1), None


AttentionInterface.register("shared_prompts", attend)
AttentionMaskInterface.register("shared_prompts", sdpa_mask)
# ==== end of block: language models


# ==== block: data and rewards
# Rows from files and the hub; calling reward functions and checking what they return. Edit it freely in a
# copy of your own; the repository keeps it byte-identical in every trainer that has it (tests/blocks.py).
import copy
import faulthandler
import inspect
import json
import math
import sys
from contextlib import contextmanager
from numbers import Number
from pathlib import Path

import torch


class Text(str):
    """A prompt or response that knows more than its text: what reward functions may ask for beside it (facts,
    by the names of their parameters); a chat, whose last user message is the text, its messages; a response
    of several turns, of which the last is the text, those."""

    messages = None
    facts = {}


def with_facts(text, **facts):
    """The text as a Text that knows these facts too."""
    found = Text(text)
    found.messages = getattr(text, "messages", None)
    found.facts = {**getattr(text, "facts", {}), **facts}
    return found


def transcript(text):
    """A prompt or response as a person reads it: of a chat every message."""
    messages = getattr(text, "messages", None)
    if not messages:
        return str(text)
    calls = (json.dumps(m["tool_calls"], default=str) if "tool_calls" in m else "" for m in messages)
    return "\n".join(f"{m['role']}: {m['content']}{call}" for m, call in zip(messages, calls))


def without_nulls(value):
    """Nested records without keys that hold null: parquet and the hub fill those in that a record lacks."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, (list, tuple)) else value


def read_prompt(value, where):
    """A text as it is; a chat, a list of {"role", "content"} messages, as a Text: its last user message's."""
    if isinstance(value, str):
        return value
    messages = without_nulls(value.tolist() if hasattr(value, "tolist") else value)  # NumPy's, of pandas
    for message in messages if isinstance(messages, list) and messages else [None]:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            form = 'a text or a list such as [{"role": "user", "content": "How many?"}]'
            raise UserError(f"{where}: a prompt is {form}, not {repr(value)[:80]}")
        if message.get("tool_calls"):
            message.setdefault("content", "")
        parts = message.get("content")
        if isinstance(parts, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in parts):
            message["content"] = "".join(str(part.get("text", "")) for part in parts)
        if not isinstance(message.get("content"), str):
            holds = f"content of a {message['role']!r} message is {repr(message.get('content'))[:80]}"
            raise UserError(f"{where}: {holds}; it must be a text: no lists of parts, such as images")
    asked = [message["content"] for message in messages if message["role"] == "user"]
    if not asked or not asked[-1].strip():
        raise UserError(f"{where}: a chat must have a 'user' message, the last of which is not empty")
    if messages[-1]["role"] == "assistant":
        todo = "delete it, a prompt ends with what is to be answered (answers have a column of their own)"
        raise UserError(f"{where}: the last message is the assistant's: {todo}")
    prompt = Text(asked[-1])
    prompt.messages = messages
    return prompt


def extra_columns():
    """{parameter of a reward function: column} of EXTRA_COLUMNS; of a path such as "extra_info.index" the
    parameter is its last word."""
    found = {}
    taken = {"prompts", "responses", "answers", "messages", "response_ids", "turns"}
    for column in EXTRA_COLUMNS:
        name = column.rpartition(".")[2] if isinstance(column, str) else ""
        if not name.isidentifier() or name in taken | set(found):
            must = "a column's last word must be the name of a parameter, of its own"
            raise UserError(f"EXTRA_COLUMNS = {EXTRA_COLUMNS}: {must}; mend {column!r}")
        found[name] = column
    return found


def load_rows(datasets, constant, limit=None):
    """[{"id", "prompt", "answer"}] of all data sets, one after the other; answer is None without an output
    column. A prompt is a Text, which knows EXTRA_COLUMNS."""
    rows = []
    extra = extra_columns()
    for spec in datasets:
        if not isinstance(spec, dict) or not all(isinstance(x, str) for x in (*spec, *spec.values())):
            example = "{'path': 'data.jsonl', 'type': 'jsonl', 'input': 'problem'}"
            raise UserError(f"{constant}: a data set is a dict of texts, such as {example}, not {spec!r}")
        where = f"{constant}: {spec.get('path')}"
        columns = [c for c in (spec.get("input"), spec.get("output")) if c]
        unknown = set(spec) - {"path", "type", "input", "output", "name", "split"}
        if odd := unknown or {"path", "type", "input"} - set(spec):
            has = "a data set has path, type, input and, if you like, output, name, split"
            raise UserError(f"{where}: {has}; mend {sorted(odd)}")
        before = len(rows)
        for number, record in read_records(spec, columns, where, extra.values()):
            row = read_row(spec, record, columns, f"{where} line {number}", chats=True)
            facts = {name: look_up(record, column) for name, column in extra.items()}
            prompt = with_facts(row["prompt"], **facts)
            rows.append({**row, "prompt": prompt, "id": f"{Path(spec['path']).name}:{number}"})
        if len(rows) == before:
            raise UserError(f"{where}: the data set is empty")
    for name, column in extra.items():
        if constant == "TRAIN_DATASETS" and all(row["prompt"].facts[name] is None for row in rows):
            raise UserError(f"{constant}: no row has the column {column!r} of EXTRA_COLUMNS")
    return rows[:limit]


def read_row(spec, record, columns, where, chats=False):
    """{"prompt", "answer"} of a record; an answer that is a list stays one, of texts. With chats, a prompt
    may be a list of messages, and an answer one whose last message's text it is."""
    for column in columns:
        if look_up(record, column) is None:
            has = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise UserError(f"{where}: there is no value for column {column!r}; the row has {has}")
    prompt = look_up(record, spec["input"])
    if chats and isinstance(prompt, list):
        prompt = read_prompt(prompt, f"{where}: {spec['input']!r}")
    if not isinstance(prompt, str) or not prompt.strip():
        must = "must be a text that is not empty" + inside(prompt, "input", spec)
        raise UserError(f"{where}: {spec['input']!r} {must}")
    answer = look_up(record, spec["output"]) if spec.get("output") else None
    last = answer[-1] if chats and isinstance(answer, list) and answer else None
    if isinstance(last, dict) and "role" in last:
        answer = last.get("content") or answer
    if answer is not None:
        kind = "texts" if isinstance(answer, list) else "text"
        answer = read_as(kind, answer, f"{where}: {spec['output']!r}", inside(answer, "output", spec))
    return {"prompt": read_as("text", prompt, f"{where}: {spec['input']!r}"), "answer": answer}


def read_as(kind, value, where, hint=""):
    """A value that a file gives as its kind: "text" (a number becomes one), "number" or "texts" (a list of
    texts, or one). Any other is an error, of `where`: file, line and column."""
    if kind == "texts" and isinstance(value, (list, tuple)) and value:
        return [read_as("text", item, where, hint) for item in value]
    if kind == "number" and isinstance(value, (str, bool)) or not is_plain(value):
        takes = {"text": "a text or a number", "number": "a number", "texts": "a text or a list of texts"}
        raise UserError(f"{where} must be {takes[kind]}{hint}, not {repr(value)[:80]}: mend or delete it")
    if kind == "number":
        return value
    text = transcript(value)
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        half = "half of a surrogate pair, such as \\ud800, is no character"
        raise UserError(f"{where}: {half}; mend or delete it")
    text = value if isinstance(value, str) else str(value)
    return [text] if kind == "texts" else text


def next_rows(rows, state, count):
    """The next `count` rows or fewer at an epoch's end; each epoch has its own permutation. state has cursor,
    epoch and order."""
    if state.cursor == 0:
        state.epoch += 1
        generator = torch.Generator().manual_seed(SEED + state.epoch)
        state.order = torch.randperm(len(rows), generator=generator)
    chosen = state.order[state.cursor:state.cursor + count].tolist()
    state.cursor = (state.cursor + len(chosen)) % len(rows)
    return [rows[i] for i in chosen]


def look_up(record, path):
    """What stands at a path such as "answers.text" in nested records, None where nothing does. A name that
    has a dot itself wins."""
    for head, rest in splits(path):
        if isinstance(record, dict) and head in record:
            return look_up(record[head], rest) if rest else record[head]


def splits(path):
    """[(head, rest)] of a path, cut at each of its dots, the longest head first: "a.b" gives ("a.b", ""),
    ("a", "b")."""
    words = path.split(".")
    return [(".".join(words[:n]), ".".join(words[n:])) for n in range(len(words), 0, -1)]


def is_plain(value):
    """Whether a value is a text, a bool or a number, which NaN and infinity are not."""
    return isinstance(value, (str, Number)) and not (isinstance(value, float) and not math.isfinite(value))


def inside(value, key, spec):
    """Where a nested record stands in place of a text: how to name what is in it."""
    names = [name for name in value if name] if isinstance(value, dict) else []
    example = f"{spec[key]}.{names[0]}" if names else ""
    return f", or name what is in it, such as {key!r}: {example!r}" if names else ""


def read_records(spec, columns, where, extra=()):
    """(line number from 1, record) of one data set; columns it must have, extra ones it may have."""
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
                    why = f"not a line of JSON ({getattr(error, 'msg', error)})"
                    raise UserError(f"{where} line {number}: {why}; mend or delete it") from None
        return
    try:
        if spec["type"] == "parquet":
            import pyarrow.parquet

            names = pyarrow.parquet.read_schema(spec["path"]).names
            heads = [next((head for head, _ in splits(path) if head in names), path) for path in columns]
            if absent := [head for head in heads if head not in names]:
                raise ValueError(f"it has no column {absent[0]!r}, but {', '.join(names)}")
            heads += [head for path in extra for head, _ in splits(path) if head in names]
            table = pyarrow.parquet.read_table(spec["path"], columns=list(dict.fromkeys(heads)))
            records = table.to_pylist()
        else:
            import datasets

            records = datasets.load_dataset(spec["path"], spec.get("name"), split=spec.get("split", "train"))
    except Exception as error:  # both libraries raise many kinds
        raise UserError(f"{where}: cannot be read as {spec['type']} ({first_line(error)})") from None
    yield from enumerate(records, 1)


def resolve_rewards(functions, constant):
    """[(name, function, weight)] of names in rewards/ or functions."""
    for pair in functions:
        right = isinstance(pair, (tuple, list)) and len(pair) == 2
        right = right and (callable(pair[0]) or isinstance(pair[0], str))
        if not right or not isinstance(pair[1], (int, float)) or not math.isfinite(pair[1]):
            takes = "it takes pairs (function, or its name in rewards/; weight)"
            raise UserError(f"{constant}: {takes}, not {pair!r}")
        if not callable(pair[0]) and not callable(getattr(rewards, pair[0], None)):
            raise UserError(f"{constant}: rewards/ has no function {pair[0]!r}")
    found = {}
    for function, weight in functions:
        function = function if callable(function) else getattr(rewards, function)
        name = first = reward_name(function)
        number = 1
        while name in found:  # such as two lambdas
            number += 1
            name = f"{first}_{number}"
        found[name] = (name, function, weight)
    return list(found.values())


def reward_name(function):
    """A function's name, of a functools.partial its function's, of another object its class's: the same at
    every start and in every process."""
    function = getattr(function, "func", function)
    return getattr(function, "__name__", type(function).__name__)


def holds_lists(values):
    """Whether a reward function returned lists of numbers in place of numbers."""
    try:
        return len(values) > 0 and any(isinstance(x, (list, tuple)) or getattr(x, "ndim", 0) for x in values)
    except TypeError:  # not even a list
        return False


def check_token_rewards(name, values, responses, width):
    """A number a token as a float32 tensor (rows, width), 0 after each response's end."""
    found = torch.zeros(len(responses), width)
    if len(values) != len(responses):
        must = f"{name} must return a list for each of {len(responses)} responses"
        raise UserError(f"{must}; it returned {len(values)}")
    for i, (value, response) in enumerate(zip(values, responses)):
        count = len(getattr(response, "facts", {}).get("response_ids", value))
        try:
            numbers = torch.as_tensor(value, dtype=torch.float32).detach().cpu()
        except (TypeError, ValueError, RuntimeError):
            numbers = torch.tensor(math.nan)
        if numbers.shape != (count,) or not numbers.isfinite().all():
            must = f"must return {count} finite numbers for response {i}, one for each of its response_ids"
            returned = f"{len(value)}, {repr(value)[:60]}" if hasattr(value, "__len__") else f"{value!r}"
            raise UserError(f"{name} {must}, or one number a response; it returned {returned}")
        found[i, :count] = numbers
    return found


def check_scores(name, values, count):
    """The values as a float32 tensor (count,); anything else is the reward function's mistake."""
    must = f"{name} must return {count} finite numbers, one a response; it returned"
    if holds_lists(values):
        raise UserError(f"{must} lists of numbers, as compute_rewards of ppo/ppo.py alone may (one a token)")
    try:
        numbers = torch.as_tensor(values, dtype=torch.float32).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{must} {repr(values)[:100]}") from None
    if numbers.shape != (count,) or not numbers.isfinite().all():
        shape = str(len(numbers)) if numbers.dim() == 1 else f"a shape of {tuple(numbers.shape)}"
        raise UserError(f"{must} {shape}, {int((~numbers.isfinite()).sum())} of them not finite")
    return numbers


_CALLING = []  # reward functions that are running, the outermost first


def further_arguments(name, function, prompts, responses):
    """{parameter: list, one value a response} for the parameters that a reward function has after its first
    three: what the prompts and responses know by these names (messages, response_ids, turns,
    EXTRA_COLUMNS)."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of a builtin it is not known
        return {}
    first = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:3]
    others = [p for p in parameters if p not in first and p.kind != p.VAR_POSITIONAL]
    if not others:
        return {}
    facts = [{**getattr(p, "facts", {}), **getattr(r, "facts", {})} for p, r in zip(prompts, responses)]
    known = [key for key in (facts[0] if facts else ()) if all(key in each for each in facts)]
    takes_all = any(p.kind == p.VAR_KEYWORD for p in others)
    for p in others:
        if p.kind != p.VAR_KEYWORD and p.default is p.empty and p.name not in known and facts:
            todo = "set ENVIRONMENT" if p.name == "turns" else "name its column in EXTRA_COLUMNS"
            todo += ", or give the parameter a default"
            raise UserError(f"{name} takes {p.name!r}, which these prompts do not know: {todo}")
    wanted = known if takes_all else [p.name for p in others if p.name in known]
    # copies: a judge may append the response to its messages
    return {key: [copy.deepcopy(each[key]) for each in facts] for key in wanted}


@contextmanager
def watched(what, function):
    """Inside the block a user's function runs: what it raises goes on with a note that names it. If it takes
    longer than REWARD_TIMEOUT the program ends and shows where it hangs, be it outside Python. One process of
    several runs it for its share alone, so there it may not draw from the generators that all have alike."""
    drawn = rng_digest() if processes() > 1 else None
    if REWARD_TIMEOUT and sys.__stderr__ and not _CALLING:
        # not sys.stderr, which a notebook or a test may have replaced by something without a file
        faulthandler.dump_traceback_later(REWARD_TIMEOUT, exit=True, file=sys.__stderr__)
    _CALLING.append(what)
    try:
        yield
        if drawn and rng_digest() != drawn:
            todo = "with several processes it needs a generator of its own"
            raise UserError(f"{what} draws random numbers from random, numpy or torch: {todo}")
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, ValueError) and getattr(function, "__module__", None) == rewards.__name__:
            raise UserError(str(error)) from None  # what its data must have
        if not hasattr(error, "__notes__"):  # the innermost function's name is enough
            error.add_note(f"(raised by {what})")
        raise
    finally:
        _CALLING.pop()
        if not _CALLING:
            faulthandler.cancel_dump_traceback_later()


def call_reward(name, function, prompts, responses, answers, width=None):
    """What a reward function gives, checked, (rows,); with a width (rows, width) where it returns a list of
    numbers a response, one a token."""
    more = further_arguments(name, function, prompts, responses)
    with watched(f"the reward function {name}", function):
        values = function(prompts, responses, answers, **more)
    if width and holds_lists(values):
        return check_token_rewards(name, values, responses, width)
    return check_scores(name, values, len(responses))


def dealt_rewards(score, size, *columns):
    """score(*columns) gives scores and a dict of parts; it is called for `size` rows of the columns at a
    time, which are dealt out to the processes. Scores (rows,) and {part: its values (rows,)} of all rows."""
    def work(i):
        scores, parts = score(*(column[i:i + size] for column in columns))
        return scores, {k: check_scores(f"reward_parts[{k!r}]", v, len(scores)) for k, v in parts.items()}

    scores, parts = zip(*dealt(range(0, len(columns[0]), size), work))
    names = {key for some in parts for key in some}
    if odd := [key for key in sorted(names) if not all(key in some for some in parts)]:
        raise UserError(f"reward_parts has {odd[0]!r} for some batches of responses only: set it for all")
    if len({numbers.dim() for numbers in scores}) > 1:
        raise UserError("compute_rewards must return numbers for all responses, or lists for all, not both")
    return torch.cat(scores), {key: torch.cat([some[key] for some in parts]) for key in parts[0]}
# ==== end of block: data and rewards


# ==== block: the run
# What a trainer does beside its algorithm: constants and errors, OUTPUT_DIR and its lock, checkpoints and
# resume, logs, plots, signals. Edit it freely in a copy of your own; the repository keeps it byte-identical
# in every trainer: change it in one, then `python tests/blocks.py FILE` copies it to the others.
import ast
import copy
import csv
import difflib
import hashlib
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
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import filelock
import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from tqdm import tqdm


class UserError(Exception):
    """Something the user can mend, said in one sentence; the program ends with exit code 2."""


class ErrorElsewhere(Exception):
    """Another process of this run has failed, or is gone."""


def constants():
    """Every constant of this file, as it is now."""
    return {k: v for k, v in globals().items() if k.isupper() and not k.startswith("_") and k != "ROOT"}


def plain_name(value):
    """What stands for a value that is not JSON, without addresses, and of a set in order: it stays the same
    from run to run."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    return getattr(value, "__name__", re.sub(" at 0x[0-9a-f]+", "", repr(value)))


def printable(text):
    """Text without control characters and terminal escapes: data and errors may hold them, and a terminal
    obeys them."""
    plain = (c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return "".join(plain)


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def load_pretrained(auto_class, path, constant, **options):
    """from_pretrained with one clear sentence when that fails; `constant` is what the user set to `path`."""
    try:
        return auto_class.from_pretrained(path, trust_remote_code=False, **options)
    except Exception as error:  # transformers, safetensors and tokenizers raise many kinds
        nowhere = "there is no such folder, and the hub gave no such model"
        why = "cannot be loaded" if Path(path).exists() else nowhere
        raise UserError(f"{constant} = {str(path)!r}: {why} ({first_line(error)})") from None


def apply_overrides(words):
    """Set constants from KEY=VALUE words; a value has the type that its constant has in the file."""
    annotate = globals().get("__annotate__")  # Python 3.14 makes annotations when asked (PEP 649)
    annotations = annotate(1) if annotate else globals().get("__annotations__", {})
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in constants():
            near = difflib.get_close_matches(key.upper(), constants(), 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{word!r} is not KEY=VALUE with a constant of this file{hint}")
        kind = type(globals()[key]).__name__
        kind = str(annotations.get(key, kind))  # such as "int | None"
        value = text
        if "str" not in kind or "None" in kind and text == "None":
            try:
                value = ast.literal_eval(text)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                value = {"true": True, "false": False}.get(text.lower(), text)
        if "float" in kind and type(value) is int:
            value = float(value)
        if type(value).__name__.replace("NoneType", "None") not in kind.split(" | "):
            takes = f"{key} takes {kind.replace('|', 'or')}, as in {key}={globals()[key]}"
            raise UserError(f"{key}={text} does not fit: {takes}")
        globals()[key] = value


def check_constants():
    """Refuse numbers out of range and unknown words before anything is loaded or written."""
    for keys, allowed in _LIMITS.items():
        for key in keys.split():
            value = globals()[key]
            if isinstance(allowed, list) and value is not None and value not in allowed:
                raise UserError(f"{key} = {value!r} is unknown: it takes {' or '.join(allowed)}")
            if isinstance(allowed, tuple) and value is not None and not allowed[0] <= value <= allowed[1]:
                upper = f"to {allowed[1]:g}" if allowed[1] < 1e6 else "or more"
                raise UserError(f"{key} = {value} is out of range: it takes {allowed[0]:g} {upper}")
    for key, value in constants().items():
        if isinstance(value, str) and (not value.strip() or "\0" in value):
            raise UserError(f"{key} = {value!r}: it takes a text that is not empty")


def find_device():
    """The device that DEVICE names; auto takes the best there is, each process of a machine its own GPU. The
    processes that torchrun began meet here."""
    join_processes()
    found = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    name = found if DEVICE == "auto" else DEVICE
    if name == "cuda" and processes() > 1:
        name = f"cuda:{os.environ.get('LOCAL_RANK', rank())}"
    try:
        device = torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError):
        raise UserError(f"DEVICE = {name!r} is not here; auto takes {found}, one for each process") from None
    if device.type == "mps" and processes() > 1:
        raise UserError("several processes work on CPUs and CUDA alone: set DEVICE=cpu, or start with python")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


# ---------------------------------------------------------------- processes

def rank():
    """Which of the processes this is, from 0, which alone asks, writes and prints."""
    return int(os.environ.get("RANK", 0))


def processes():
    """How many of them make this run: torchrun --nproc_per_node=N."""
    return int(os.environ.get("WORLD_SIZE", 1))


def join_processes():
    """Meet the others. Objects go by gloo, gradients by the device's own way, in one order of addition."""
    sharded = globals().get("SHARD") == "fsdp2"
    if processes() == 1 and not sharded or dist.is_initialized():
        return
    if "PROCESS_TIMEOUT" not in globals():
        raise UserError("it runs as one process: start it with python, not torchrun")
    if "MASTER_ADDR" not in os.environ:
        raise UserError("SHARD = 'fsdp2' needs torchrun --nproc_per_node=N, for one process too")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    wait = timedelta(seconds=PROCESS_TIMEOUT)
    try:
        store = next(dist.rendezvous("env://", timeout=wait))[0]
        store = dist.PrefixStore(name_of_start(store), store)
        _STORE.append(store)
        dist.init_process_group(
            backend, store=store, timeout=wait, world_size=processes(), rank=rank())
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the {processes()} processes did not meet ({first_line(error)})") from None
    files = [Path(__file__), *Path(rewards.__file__).parent.rglob("*.py")]
    must_agree({str(path.name): file_digest(path) for path in sorted(files)})
    must_agree(constants())


def name_of_start(store):
    """A name for this start that all its processes agree on. torchrun keeps its store over a restart, with
    the addresses of processes that are gone, and on several machines each counts restarts by itself. So every
    process calls by a word of its own, until the first has answered to that word."""
    word = os.urandom(8).hex()
    if rank() > 0:
        store.set(f"call {rank()}", word)
        name = store.get(f"answer {word}").decode()  # waits for it
        store.set(f"{name} {rank()}", "heard")
        return name
    silent = list(range(1, processes()))
    until = time.monotonic() + PROCESS_TIMEOUT
    while silent:
        if time.monotonic() > until:
            raise RuntimeError(f"nothing was heard of processes {silent} for {PROCESS_TIMEOUT:g} s")
        for number in silent:
            if store.check([f"call {number}"]):  # perhaps of an earlier start
                store.set(f"answer {store.get(f'call {number}').decode()}", word)
        time.sleep(0.05)
        silent = [number for number in silent if not store.check([f"{word} {number}"])]
    return word


def exchange(value=None, error=None):
    """What every process gives, a list by rank: plain types and tensors, each on the own device. Where one
    gives an error instead, or is gone, it is raised on all."""
    if not dist.is_initialized():
        return [value]
    data = io.BytesIO()
    torch.save((error, value), data)
    found = [None] * processes()
    try:
        dist.all_gather_object(found, data.getvalue())
    except RuntimeError as lost:
        gone = f"another process of this run is gone, or was silent for {PROCESS_TIMEOUT:g} s"
        raise ErrorElsewhere(f"{gone} ({first_line(lost)})") from None

    def here(storage, location):
        return storage.cuda() if location.startswith("cuda") else storage

    found = [torch.load(io.BytesIO(x), map_location=here, weights_only=True) for x in found]
    for number, (failed, _) in enumerate(found):
        if failed and not error:
            raise ErrorElsewhere(f"process {number}: {failed}")
    return [value for _, value in found]


def first_says(function):
    """What function() gives to the first process, which alone calls it; plain types or tensors."""
    return exchange(function() if rank() == 0 else None)[0]


_STORE = []  # that the processes met by
_DEALING = []  # not empty: this process is at its share, which is its own alone


def dealt(parts, work):
    """[work(part)] in the order of the parts: each is done by one process and told to all."""
    parts = list(parts)
    if _DEALING or processes() == 1:
        return [work(part) for part in parts]
    _DEALING.append(work)
    try:
        mine = [work(part) for part in parts[rank()::processes()]]
    finally:
        _DEALING.pop()
    everyone = exchange(mine)
    if sum(map(len, everyone)) != len(parts):
        raise UserError("the processes cut their work into unlike parts: their devices or settings differ")
    return [everyone[i % len(everyone)][i // len(everyone)] for i in range(len(parts))]


def must_agree(values):
    """Raise on all processes where one has another of these values, {name: JSON}: they would make another run
    each."""
    def digest(value):
        return hashlib.sha256(json.dumps(value, default=plain_name).encode()).hexdigest()

    found = exchange({name: digest(value) for name, value in values.items()})
    for number, digests in enumerate(found):
        if other := [name for name in found[0] if digests.get(name) != found[0][name]]:
            raise UserError(f"process {number} has another {other[0]} than process 0: make them the same")


def full(tensor):
    """A tensor that is perhaps sharded, whole; then all processes call this, in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_for_first(tensor):
    """full() on the CPU of the first process, which writes it; the others keep nothing of it."""
    if not isinstance(tensor, DTensor):
        return tensor
    tensor = tensor.full_tensor()
    return tensor.cpu() if rank() == 0 else None


def full_state(model):
    """The weights of a sharded model, whole, for save_pretrained(); None for others, which have them."""
    if not isinstance(model, FSDPModule):
        return None
    found = {}  # tied weights stay one tensor
    state = model.state_dict(keep_vars=True)
    return {key: found.setdefault(id(x), full_for_first(x.detach())) for key, x in state.items()}


def full_optimizer_state(optimizer):
    """Its state_dict(), whole."""
    saved = optimizer.state_dict()
    for number, some in saved["state"].items():
        saved["state"][number] = {key: full_for_first(x) for key, x in some.items()}
    return saved


def load_optimizer(optimizer, saved):
    """Load what full_optimizer_state() gave, each process its part."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, some in saved["state"].items():
        like = parameters[number]
        if isinstance(like, DTensor):
            for key in (key for key, x in some.items() if x.shape == like.shape and x.dim()):
                whole = some[key].to(like.device)
                some[key] = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    optimizer.load_state_dict(saved)


def digest_of(tensors):
    """One number for the bytes of tensors."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return total.hexdigest()


def bits_digest(tensors):
    """One number for the bits of weights, quick on any device: sums of them as integers have no order."""
    whole_numbers = {2: torch.int16, 4: torch.int32}
    flat = (x.detach().flatten() for x in tensors)
    return digest_of(x.view(whole_numbers[x.element_size()]).sum(dtype=torch.int64) for x in flat)


def merged(model):
    """A copy of a model with an adapter, which is added to the weights, in float32: plain from_pretrained()
    loads it. Other weights are shared if they are in float32. A model without an adapter is itself."""
    if not hasattr(model, "peft_config"):
        return model
    frozen = [p for p in model.parameters() if not p.requires_grad]
    copied = copy.deepcopy(model, {id(p): p for p in frozen if p.dtype == torch.float32}).float()
    for name, layer in list(copied.named_modules()):
        if hasattr(layer, "get_delta_weight"):
            base = layer.get_base_layer()
            base.weight = torch.nn.Parameter((base.weight + layer.get_delta_weight("default")).detach())
            copied.set_submodule(name, base)
    copied._hf_peft_config_loaded = False
    del copied.peft_config
    return copied


def seed_everything(seed):
    """Seed every generator and ask for deterministic kernels: without them gradients that meet at one index
    (a prompt shared by its responses) are added in whatever order the threads come, and no two runs are
    equal, on the CPU either."""
    with suppress(ImportError):
        # Where it is installed transformers imports it somewhere within a run, and it takes a random number
        import sklearn.metrics  # noqa: F401
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time


def get_rng_state():
    """The state of Python's, NumPy's and torch's generators, as plain types and a tensor."""
    name, words, *rest = np.random.get_state()
    numpy = (name, words.tolist(), *rest)
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}


def set_rng_state(state):
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def rng_digest():
    """One value for the states of Python's, NumPy's and torch's generators."""
    state = get_rng_state()
    text = repr((state["python"], state["numpy"])).encode()
    return hashlib.sha256(text + state["torch"].numpy().tobytes()).hexdigest()


def fsync(path):
    handle = os.open(path, os.O_RDONLY)  # works for folders too
    os.fsync(handle)
    os.close(handle)


def file_digest(path):
    with open(path, "rb") as file:
        return {"size": os.path.getsize(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def not_saved(path, error):
    full = shutil.disk_usage(path.parent).free < 2**26
    why = "the disk is full" if full else first_line(error)
    todo = "make room and start again, training goes on from the last good checkpoint"
    return UserError(f"{path} could not be saved: {why}; {todo}")


def write_whole(path, fill, folder=False, manifest=False):
    """fill(tmp) writes a file, or a folder's files; then the manifest, fsync and rename, so that `path` is
    there whole or not at all. What is there already is replaced; killed between a folder's two renames,
    restore_folder() puts the old one back."""
    tmp = path.with_name(path.name + ".tmp")
    old = path.with_name(path.name + ".old")
    shutil.rmtree(tmp, ignore_errors=True)
    try:
        if folder:
            tmp.mkdir(parents=True)
        fill(tmp)
        if manifest:
            digests = {str(p.relative_to(tmp)): file_digest(p) for p in sorted(tmp.rglob("*")) if p.is_file()}
            (tmp / "manifest.json").write_text(json.dumps(digests, indent=1))
        for part in [*tmp.rglob("*"), tmp]:
            fsync(part)
        if folder and path.exists():
            os.rename(path, old)
        os.rename(tmp, path)
        fsync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:  # an OSError, torch.save's RuntimeError, safetensors' own
        shutil.rmtree(tmp, ignore_errors=True)
        restore_folder(path)
        raise not_saved(path, error) from None


def restore_folder(folder):
    """What write_whole() was about to replace when it was killed comes back."""
    old = folder.with_name(folder.name + ".old")
    if old.exists() and not folder.exists():
        os.rename(old, folder)
    shutil.rmtree(old, ignore_errors=True)


def checkpoint_fault(folder):
    """Why a checkpoint cannot be trusted, or None: its files must be those of its manifest, to the byte."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        found = [p for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json"]
        files = {str(p.relative_to(folder)): p for p in found}
        for name in sorted({"training_state.pt", *manifest, *files}):
            if name not in files or file_digest(files[name]) != manifest.get(name):
                return f"{name} is {'not what was saved' if name in files else 'missing'}"
            if folder.resolve() not in files[name].resolve().parents:
                return f"{name} points out of the checkpoint"
    except (OSError, ValueError, AttributeError) as error:
        return f"manifest.json: {error}"


def list_checkpoints(output_dir):
    """[(N, step_N/)] of a run, oldest first."""
    return sorted((int(p.name[5:]), p) for p in Path(output_dir).glob("step_*") if p.name[5:].isdecimal())


def choose_checkpoint(resume, output_dir, say):
    """The checkpoint to go on from, or None to start afresh; asks at a terminal when RESUME is "ask". Of a
    run's folder it is the newest. What torchrun has started again goes on with what it had begun."""
    begun = Path(output_dir) / ".torchrun"
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) and list_checkpoints(output_dir):
        resume = "yes" if begun.exists() and begun.read_text() == launch_name() else resume
    if resume not in ("ask", "yes", "no"):
        if list_checkpoints(resume):
            return choose_checkpoint("yes", resume, say)
        if fault := checkpoint_fault(Path(resume)):
            raise UserError(f"the checkpoint {resume} cannot be resumed from: {fault}")
        return Path(resume)
    found = list_checkpoints(output_dir) if resume != "no" else []
    for _, folder in reversed(found):
        if fault := checkpoint_fault(folder):
            say(f"WARNING: skipping the broken checkpoint {folder}: {fault}")
            continue
        say(f"Found checkpoint: {folder}")
        if resume == "yes" or processes() > 1 or not sys.stdin or not sys.stdin.isatty():
            say("Resuming from it (RESUME=no starts afresh)")
            return folder
        while (reply := input("Resume training from it? (y/n): ").strip().lower()[:1]) not in ("y", "n"):
            pass
        return folder if reply == "y" else None
    if found:
        afresh = f"start afresh with RESUME=no, which keeps the run in {output_dir}/old_<time>/"
        raise UserError(f"no checkpoint in {output_dir} is whole: put a good copy back, or {afresh}")


def move_aside(paths, output_dir, say):
    """Keep what a new start would overwrite: move it to OUTPUT_DIR/old_<time>/."""
    if not paths:
        return
    old = Path(output_dir) / time.strftime("old_%Y%m%d_%H%M%S")
    while old.exists():  # two within a second
        old = old.with_name(old.name + "_")
    old.mkdir()
    for path in paths:
        os.rename(path, old / path.name)
    say(f"Moved {', '.join(sorted(p.name for p in paths))} of an earlier run to {old}")


def launch_name():
    """What torchrun calls this launch, the same after a restart of its own; empty without it."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def run_facts(device):
    """Versions, git commit and device, for training_config.json."""
    commit = None
    if shutil.which("git"):
        git = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
        commit = git.stdout.strip() or None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} ({platform.machine()})"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "git_commit": commit,
        "processes": processes(),
        "threads": torch.get_num_threads(),
        "device": name}


def learning_rate_scale(step, total, warmup, kind, halvings):
    """Factor of the learning rate at step (from 0): linear warm-up, then the schedule; None stays at 1."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return {None: 1.0, "linear": 1 - progress, "cosine": cosine, "plateau": 0.5 ** halvings}[kind]


_WAYS = ("sampled_by", "scored_by", "base_digest")


def get_ways(model):
    """What check_models() found, for a checkpoint: the same way after a resume,
    whatever the trained weights would choose."""
    return {key: getattr(model, key) for key in _WAYS if hasattr(model, key)}


def set_ways(model, ways):
    for key in _WAYS:
        if key in (ways or {}):
            setattr(model, key, ways[key])


def read_metrics(path):
    """The records of metrics.jsonl with their finite numbers; a line that is none, by a hand's or a disk's
    doing, is left out."""
    records = []
    with open(path, errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                continue
            numbers = {k: v for k, v in record.items() if isinstance(v, (int, float)) and abs(v) < 1e300}
            if record.get("phase") in ("train", "eval") and "step" in numbers:
                records.append({"phase": record["phase"], **numbers})
    return records


def plot_metric(axis, records, phase, key, color, label):
    """A metric by step: training faint with its rolling mean, evaluation as points from a dashed start."""
    points = [(r["step"], r[key]) for r in records if r["phase"] == phase and r.get(key) is not None]
    axis.xaxis.get_major_locator().set_params(integer=True)
    if points and phase == "train":
        x, y = np.array(points, dtype=float).T
        window = max(1, len(y) // 12)
        rolling = [y[max(0, i - window):i].mean() for i in range(1, len(y) + 1)]
        axis.plot(x, y, color=color, alpha=0.25)
        axis.plot(x, rolling, color=color, label=f"{label}, mean of {window}")
    elif points:
        axis.plot(*zip(*points), "o-", color=color, markersize=5, linewidth=0.8, label=f"{label}, held out")
        axis.axhline(points[0][1], color=color, linestyle="--", linewidth=0.8)


def draw_plot(records, path, title, panels):
    """A grid of panels, each (y label, metrics)."""
    from matplotlib.figure import Figure

    height = math.ceil(len(panels) / 3)
    figure = Figure(figsize=(16, 0.8 + 3.4 * height))
    inch = 1 / figure.get_figheight()
    # matplotlib's own layouts draw everything twice
    sides = {"left": 0.055, "right": 0.99, "bottom": 0.5 * inch, "top": 1 - 0.6 * inch}
    figure.subplots_adjust(**sides, wspace=0.22, hspace=0.25)
    figure.suptitle(title, y=1 - 0.2 * inch)
    for number, (label, keys) in enumerate(panels, 1):
        axis = figure.add_subplot(height, 3, number, xlabel="training step", ylabel=label)
        axis.grid(alpha=0.3)
        axis.ticklabel_format(axis="y", scilimits=(-3, 4), useOffset=False)  # short labels stay inside
        for which, (key, phase) in enumerate((key, phase) for key in keys for phase in ("train", "eval")):
            plot_metric(axis, records, phase, key, f"C{which}", key)
        if axis.lines:
            axis.legend(fontsize=8)
    write_whole(path, partial(figure.savefig, format="png", dpi=100))


def with_unit(key):
    """A metric's name with its unit, for the plots."""
    units = {"response_length": "tokens", **dict.fromkeys(("entropy", "kl", "approx_kl"), "nats a token")}
    unit = "s" if key.startswith("seconds/") else units.get(key)
    return f"{key} ({unit})" if unit else key


class Run:
    """One run in OUTPUT_DIR: its lock, log files, bar, plots, checkpoints, signals and counters.

    The Trainer says what a checkpoint holds (keep), what the step it made was like (record) and how many
    there are (total_steps). name is that of the plots; `files` are what a new start moves aside, beside
    logs/; best_by are the metrics of an evaluation that best/ and patience follow, the first that is there;
    later_of_equal: of equally good policies best/ keeps the later; `logs` are names of
    csv files in logs/, for append()."""

    saved = (  # of its attributes, in a checkpoint
        "step", "evaluated_at", "best_value", "patience_value", "evals_since_best", "halvings", "skipped",
        "log_bytes", "wandb_id", "threads", "evaluation")

    def __init__(self, name, resume, device, files=(), best_by=("reward",), later_of_equal=False, logs=()):
        self.name = name
        self.device = device
        self.files = ("step_*", "best", "training_*", f"{name}_*.png", *files)
        self.best_by = best_by
        self.later_of_equal = later_of_equal
        self.csv_files = dict.fromkeys(logs)  # by name, open while training
        self.step = 0  # steps done
        self.total_steps = 0
        self.evaluated_at = -1  # the step of the last evaluation
        self.best_value = -math.inf  # the highest yet, whose policy is in best/
        self.patience_value = -math.inf  # the last that was better by more than EARLY_STOPPING_THRESHOLD
        self.evals_since_best = 0  # evaluations since then
        self.halvings = 0  # of the learning rate, by LR_SCHEDULER_TYPE = "plateau"
        self.skipped = 0  # optimizer steps in a row that were not finite
        self.log_bytes = {}
        self.wandb_id = None
        self.threads = torch.get_num_threads()  # a sum's last bits depend on it
        self.evaluation = {}  # the last one's metrics
        self.signal = None  # that this process has got
        self.stop_signal = None  # that all have agreed to stop by
        self.last_word = None  # what finish() says in place of its own
        self.times = {}
        self.log = None
        self.unlogged = []  # what was said before there was a log file
        self.wandb = None
        self.bar = None
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.folder = Path(OUTPUT_DIR)
        self.lock = filelock.FileLock(self.folder / ".lock", blocking=False, thread_local=False)
        chosen = first_says(lambda: self.choose(resume or RESUME))
        self.checkpoint = Path(chosen) if chosen else None
        seed_everything(SEED)

    def choose(self, resume):
        """The path of the checkpoint to go on from, or None; the folder is this run's from here on."""
        if self.folder.is_dir():
            self.take_lock()
            restore_folder(self.folder / "best")
        found = choose_checkpoint(resume, OUTPUT_DIR, self.say)
        return found and str(found)

    # ------------------------------------------------------------ what the Trainer calls

    def keep(self, state, models, optimizers, tokenizer):
        """What a checkpoint holds beside the run's counters: state, a namespace of numbers, texts and
        tensors; models and optimizers by their folder's name; the tokenizer, if any, is saved beside each
        model. Where a checkpoint is resumed from, state and optimizers become what it holds."""
        self.state = state
        self.models = models
        self.optimizers = optimizers
        self.tokenizer = tokenizer
        if self.checkpoint:
            self.load_checkpoint(self.checkpoint)
        must_agree({"state of the weights": self.weights_digest()})

    @contextmanager
    def opened(self, headline):
        """Around the whole of training: OUTPUT_DIR ready, its files open, signals caught; at the end a
        checkpoint."""
        self.signal = None
        self.open_files(headline)
        handlers = self.catch_signals()
        try:
            yield self
            self.listen()
            self.save()
            self.finish()
            exchange()  # who ends first would take the others with it
        finally:
            self.bar.close()
            self.lock.release()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def listen(self):
        """Whether a signal has come to one of the processes; all call it at the same places. There they find
        out, too, whether one has drawn random numbers that the others have not."""
        signals, drawn = zip(*exchange((self.signal or 0, rng_digest())))
        if len(set(drawn)) > 1:
            todo = "a function of yours (a reward's, say) that draws them needs a generator of its own"
            raise UserError(f"the processes have drawn different random numbers: {todo}")
        self.stop_signal = max(signals) or None
        return self.stop_signal is not None

    def goes_on(self):
        """Whether another step is to be done."""
        out_of_patience = 0 < EARLY_STOPPING_PATIENCE <= self.evals_since_best
        return not self.listen() and not out_of_patience and self.step < self.total_steps

    def steps(self, evaluate, until=math.inf):
        """The numbers, from 0, of the steps to be done, each of which the loop's body ends with record().
        evaluate() gives metrics: before the first step, every EVAL_EVERY_N_STEPS and after the last."""
        if self.evaluated_at < 0 and self.goes_on():
            if self.total_steps <= until and not 0 < EVAL_EVERY_N_STEPS < self.total_steps:
                alone = f"evaluates before and after the {self.total_steps} steps alone"
                self.warn_of_idle_patience(f"EVAL_EVERY_N_STEPS = {EVAL_EVERY_N_STEPS} {alone}")
            self.evaluate(evaluate)
        self.clock = (time.perf_counter(), self.step)
        while self.goes_on() and self.step < until:
            yield self.step
            last = self.step in (until, self.total_steps)
            if last or EVAL_EVERY_N_STEPS and self.step % EVAL_EVERY_N_STEPS == 0:
                self.evaluate(evaluate)
            if SAVE_EVERY_N_STEPS and self.step % SAVE_EVERY_N_STEPS == 0 and self.step != until:
                self.save()

    @contextmanager
    def timed(self, what):
        """Count the seconds of the block as seconds/<what> of this step."""
        started = time.perf_counter()
        yield
        self.times[what] = self.times.get(what, 0.0) + time.perf_counter() - started

    def record(self, metrics, count, samples, line, unit="tokens"):
        """A step is done: its object in metrics.jsonl, with how many tokens (or another unit) it made a
        second, some of its responses in samples.jsonl, its line on the terminal."""
        self.step += 1
        seconds = {f"seconds/{what}": value for what, value in self.times.items()}
        speed = {f"{unit}_per_second": count / sum(self.times.values())} if self.times else {}
        self.write_metrics("train", {**metrics, **speed, **seconds})
        self.times = {}
        if rank() == 0:
            self.samples_file.writelines(json.dumps({"step": self.step, **x}) + "\n" for x in samples)
            self.samples_file.flush()
        started, first = self.clock
        left = (time.perf_counter() - started) / (self.step - first) * (self.total_steps - self.step)
        self.show(line, f"step {self.step}/{self.total_steps}, {tqdm.format_interval(left)} left")

    def append(self, name, rows):
        """Rows, dicts of the same keys, to one of the csv logs, each with the step before them."""
        if rank() > 0:
            return
        writer = csv.DictWriter(self.csv_files[name], ["step", *rows[0]])
        if not self.csv_files[name].tell():
            writer.writeheader()
        writer.writerows({"step": self.step, **row} for row in rows)
        self.csv_files[name].flush()

    def show(self, line, progress):
        """A line beside the bar and, with how far things are, in the log; without a terminal in both."""
        self.bar.total = self.total_steps
        self.bar.set_description_str(line, refresh=False)
        self.bar.update(self.step - self.bar.n)
        self.say(f"{line}  {progress}", terminal=self.bar.disable)

    def say(self, text, terminal=True):
        """One line to the terminal, above the bar, and to the log file."""
        if rank() > 0:
            return
        text = printable(text)
        if terminal:
            tqdm.write(text)
            sys.stdout.flush()
        if self.log:
            self.log.write(text + "\n")
            self.log.flush()
        else:
            self.unlogged.append(text)

    def write_metrics(self, phase, metrics):
        if rank() > 0:
            return
        # NaN is not JSON
        metrics = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self.metrics_file.write(json.dumps({"phase": phase, "step": self.step, **metrics}) + "\n")
        self.metrics_file.flush()
        if self.wandb:
            self.wandb.log({f"{phase}/{key}": value for key, value in metrics.items()}, step=self.step)

    def count_skipped(self, finite, ids):
        """After an optimizer step that was taken or, its loss or gradient not finite, skipped: then its
        prompts are named, and five in a row end the run."""
        if finite:
            self.skipped = 0
            return
        self.skipped += 1
        prompts = " ".join(sorted(set(ids)))
        what = "loss or gradient not finite, optimizer step skipped"
        self.say(f"WARNING: step {self.step + 1}: {what}; prompts {prompts}")
        if self.skipped == 5:
            todo = "lower LEARNING_RATE, or look at the prompts named in the log"
            raise UserError(f"five optimizer steps in a row were not finite: {todo}")

    def warn_of_idle_patience(self, why):
        """Early stopping and plateau act on evaluations: where there are none during the run, say so."""
        idle = [f"EARLY_STOPPING_PATIENCE = {EARLY_STOPPING_PATIENCE}"] if EARLY_STOPPING_PATIENCE else []
        if USE_LR_SCHEDULER and LR_SCHEDULER_TYPE == "plateau":
            idle.append("LR_SCHEDULER_TYPE = 'plateau'")
        if idle:
            self.say(f"WARNING: nothing comes of {' and '.join(idle)}: {why}")

    def save(self):
        """Write step_N/ whole or not at all, prune, redraw the plots."""
        must_agree({"state of the weights": self.weights_digest()})
        folder = self.checkpoint = self.folder / f"step_{self.step}"  # train() again goes on from it
        if first_says(folder.exists):
            return
        self.gather(self.models, self.optimizers)
        if rank() > 0:
            return
        self.say(f"Saving {folder}")
        write_whole(folder, self.fill_checkpoint, folder=True, manifest=True)
        for _, old in list_checkpoints(OUTPUT_DIR)[:-KEEP_LAST_N_CHECKPOINTS]:
            shutil.rmtree(old)
        self.draw_plots()

    def weights_digest(self):
        """Of this process's own copies, those under an adapter as they were loaded; nothing where there is
        one process, or each has its part."""
        bases = [getattr(model, "base_digest", None) for model in self.models.values()]
        every = [p for model, base in zip(self.models.values(), bases)
                 for p in model.parameters() if p.requires_grad or not base]
        return [*bases, digest_of(p for p in every if processes() > 1 and not isinstance(p, DTensor))]

    # ------------------------------------------------------------ evaluation

    def evaluate(self, evaluate):
        """Log what evaluate() finds, keep the best policy, count patience."""
        started = time.perf_counter()
        metrics = {key: x.item() if hasattr(x, "item") else x for key, x in (evaluate() or {}).items()}
        metrics = exchange(metrics)[0]  # what follows from them is the same on all
        self.evaluated_at = self.step
        self.evaluation = metrics
        if not metrics:
            if self.step == 0:
                self.warn_of_idle_patience("EVAL_DATASETS gives nothing to evaluate")
            return
        self.write_metrics("eval", {**metrics, "seconds/evaluate": time.perf_counter() - started})
        shown = (f"{k} {v:,}" if isinstance(v, int) else f"{k} {v:.3f}" for k, v in metrics.items())
        self.say(f"step {self.step}, held out: " + "  ".join(shown))
        value = next((metrics[key] for key in self.best_by if key in metrics), None)
        if value is None:
            raise UserError(f"evaluate() must give {' or '.join(self.best_by)}: best/ and patience follow it")
        self.count_patience(value)
        if value > self.best_value or self.later_of_equal and value == self.best_value:
            self.best_value = value
            self.gather({"policy": self.models["policy"]})
            if rank() == 0:
                fill = partial(self.fill_best, metrics=metrics)
                write_whole(self.folder / "best", fill, folder=True)

    def begin_part(self):
        """Another part of the training begins, which is evaluated anew: best/, patience and halvings know
        nothing of what was reached before it."""
        self.evaluated_at = -1
        self.best_value = -math.inf
        self.patience_value = -math.inf
        self.evals_since_best = 0
        self.halvings = 0

    def count_patience(self, value):
        """Count evaluations that are not better, by more than EARLY_STOPPING_THRESHOLD, than the last one
        that was. best/ is kept apart from this: it follows the highest value, by however little."""
        if value > self.patience_value + EARLY_STOPPING_THRESHOLD:
            self.patience_value = value
            self.evals_since_best = 0
            return
        self.evals_since_best += 1
        if self.evals_since_best % PLATEAU_PATIENCE == 0:
            self.halvings += 1

    def gather(self, models, optimizers=None):
        """Before files are written: what is sharded, whole, from all processes."""
        self.full_weights = {name: full_state(model) for name, model in models.items()}
        states = {name: full_optimizer_state(optimizer) for name, optimizer in (optimizers or {}).items()}
        self.full_optimizers = states

    def save_model(self, model, folder, weights=None):
        model.save_pretrained(folder, state_dict=weights)
        if self.tokenizer:
            self.tokenizer.save_pretrained(folder)

    def fill_best(self, folder, metrics):
        self.save_model(merged(self.models["policy"]), folder / "policy", self.full_weights["policy"])
        (folder / "metrics.json").write_text(json.dumps({"step": self.step, **metrics}, indent=1))

    # ------------------------------------------------------------ files

    def take_lock(self):
        """Held until the process ends, however it ends. Another run that wants the folder is told who has
        it."""
        owner = self.folder / ".lock_owner"
        try:
            self.lock.acquire()
        except filelock.Timeout:
            who = owner.read_text().strip() if owner.exists() else "?"
            if who == str(os.getpid()):
                return  # another trainer of this very process
            used = f"is in use by another run (process {who})"
            todo = "wait for it, stop it, or set another OUTPUT_DIR"
            raise UserError(f"OUTPUT_DIR = {OUTPUT_DIR!r} {used}: {todo}") from None
        except (OSError, NotImplementedError) as error:
            if isinstance(error, PermissionError):
                raise
            return  # a file system without locks
        owner.write_text(str(os.getpid()))

    def open_files(self, headline):
        if rank() == 0:
            self.open_folder()
        self.best_value = exchange(self.best_value)[0]
        self.say(headline)
        hidden = rank() > 0 or not sys.stderr.isatty()
        self.bar = tqdm(
            total=self.total_steps, initial=self.step, disable=hidden, dynamic_ncols=True,
            leave=False, bar_format="{percentage:3.0f}%|{bar:8}| {remaining} left  {desc}")
        self.started = time.perf_counter()
        self.clock = (self.started, self.step)

    def open_folder(self):
        """Make OUTPUT_DIR ready: cut the logs back to the checkpoint, or move an earlier run aside; open the
        files."""
        logs = self.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        if not self.lock.is_locked:
            self.take_lock()
        if USE_WANDB:
            self.open_wandb()
        for pattern in ("step_*.tmp", "best.tmp", "*.png.tmp"):  # what a kill left half written
            for stale in self.folder.glob(pattern):
                shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        if self.checkpoint and self.checkpoint.resolve().parent == self.folder.resolve():
            # a broken checkpoint beyond this one, or one of a future given up, would be found by the next
            # resume
            beyond = [path for step, path in list_checkpoints(OUTPUT_DIR) if step > self.step]
            if beyond and self.step_of_best() > self.step:
                beyond.append(self.folder / "best")
                self.best_value = -math.inf  # the next evaluation's policy is the best that is left
            move_aside(beyond, OUTPUT_DIR, self.say)
            self.cut_logs(logs)
        else:
            earlier = [path for pattern in self.files for path in self.folder.glob(pattern)]
            move_aside(earlier + [logs] * any(logs.iterdir()), OUTPUT_DIR, self.say)
            logs.mkdir(exist_ok=True)
            self.log_bytes = {}
        names = [name for name in self.log_bytes if name.startswith("training_")]
        names.append(time.strftime("training_%Y%m%d_%H%M%S.log"))
        self.log = open(logs / names[0], "a")
        self.metrics_file = open(logs / "metrics.jsonl", "a")
        self.samples_file = open(logs / "samples.jsonl", "a")
        self.csv_files = {name: open(logs / name, "a", newline="") for name in self.csv_files}
        self.log.writelines(text + "\n" for text in self.unlogged)
        if launch_name():
            (self.folder / ".torchrun").write_text(launch_name())
        config = {"constants": constants(), **run_facts(self.device)}
        (self.folder / "training_config.json").write_text(json.dumps(config, indent=1, default=plain_name))

    def open_wandb(self):
        import wandb

        options = {"project": WANDB_PROJECT, "dir": OUTPUT_DIR, "config": constants()}
        try:
            self.wandb = wandb.init(**options, id=self.wandb_id, resume="allow")
        except Exception as error:  # wandb's own kinds
            todo = "run `wandb login`, or set WANDB_MODE=offline or USE_WANDB=False"
            raise UserError(f"USE_WANDB = True: wandb does not start ({first_line(error)}): {todo}") from None
        self.wandb_id = self.wandb.id

    def step_of_best(self):
        """The step whose policy is in best/; -1 where there is none."""
        try:
            return json.loads((self.folder / "best/metrics.json").read_text())["step"]
        except (OSError, ValueError, KeyError):
            return -1

    def cut_logs(self, logs):
        """Back to their lengths when the checkpoint was saved: each step stands in them exactly once."""
        for name, size in self.log_bytes.items():
            path = logs / name
            has = path.stat().st_size if path.exists() else 0
            if has > size:
                os.truncate(path, size)
            elif has < size:
                lost = f"has lost {size - has} bytes since the checkpoint"
                self.say(f"WARNING: {path} {lost}; what they said is gone")

    def fill_checkpoint(self, folder):
        for name, model in self.models.items():
            self.save_model(model, folder / name, self.full_weights[name])
        files = self.log, self.metrics_file, self.samples_file, *self.csv_files.values()
        logs = [Path(file.name) for file in files]
        for path in logs:
            fsync(path)
        self.log_bytes = {path.name: path.stat().st_size for path in logs}
        torch.save({
            "trainer": self.name,
            "run": {key: getattr(self, key) for key in self.saved},
            "state": vars(self.state),
            "ways": {name: get_ways(model) for name, model in self.models.items()},
            "optimizers": self.full_optimizers,
            "rng": [get_rng_state()],
        }, folder / "training_state.pt")
        (folder / "config.json").write_text(json.dumps(constants(), indent=1, default=plain_name))

    def load_checkpoint(self, folder):
        """State, optimizers and generators as they were; the models were loaded from the same folder."""
        try:  # weights_only: nothing in the file is run
            saved = torch.load(folder / "training_state.pt", map_location="cpu", weights_only=True)
            then = json.loads((folder / "config.json").read_text())
            self.check_state(saved, then)
        except Exception as error:
            todo = f"take a checkpoint that this version of {Path(__file__).name} made"
            what = f"{folder}/training_state.pt or config.json cannot be used ({first_line(error)})"
            raise UserError(f"{what}: {todo}") from None
        now, before = getattr(self.state, "prompts", None), saved["state"].get("prompts")
        if now != before:
            made = f"{folder} was made with {before} training prompts, TRAIN_DATASETS now gives {now}"
            raise UserError(f"{made}: a resumed run needs the same data (RESUME=no starts afresh)")
        for key in self.saved:
            setattr(self, key, saved["run"][key])
        if self.threads != torch.get_num_threads():
            was = f"Threads a process were {self.threads}, are {torch.get_num_threads()}"
            self.say(f"{was}: from here on the run is the same to rounding only (set OMP_NUM_THREADS)")
            self.threads = torch.get_num_threads()
        vars(self.state).update(saved["state"])
        for name, model in self.models.items():  # as the run began, whatever check_models() sees now
            ways = saved["ways"].get(name) or {}
            if ways.get("base_digest") != getattr(model, "base_digest", None):
                other = "is an adapter of other weights, or of another BASE_DTYPE, than are there now"
                raise UserError(f"{folder}/{name} {other}: put them back, or set RESUME=no")
            set_ways(model, ways)
        for name, optimizer in self.optimizers.items():
            fresh = [dict(group) for group in optimizer.param_groups]
            load_optimizer(optimizer, saved["optimizers"][name])
            for group, now in zip(optimizer.param_groups, fresh):
                group.clear()
                group.update(now)  # a changed constant counts from here on
        set_rng_state(saved["rng"][0])
        constants_now = json.loads(json.dumps(constants(), default=plain_name))
        for key in sorted({*then, *constants_now} - {"RESUME", "OUTPUT_DIR", "STAGE"}):
            if then.get(key) != constants_now.get(key):
                change = f"{key} was {then.get(key)!r}, is {constants_now.get(key)!r}"
                self.say(f"Changed since the checkpoint: {change}")

    def check_state(self, saved, then):
        """Raise ValueError where a file is not what fill_checkpoint() writes: it may come from anywhere."""
        known = {"run": {key: getattr(self, key) for key in self.saved}, "state": vars(self.state)}
        parts = {"trainer", "run", "state", "ways", "optimizers", "rng"}
        right = isinstance(then, dict) and set(saved) == parts
        right = right and saved["trainer"] == self.name and set(saved["optimizers"]) == set(self.optimizers)
        for part, values in known.items():
            right = right and set(saved[part]) == set(values)
            kinds = {key: type(value) for key, value in values.items() if value is not None}
            right = right and all(isinstance(saved[part][key], kind) for key, kind in kinds.items())
        if not right or not all(isinstance(way, dict) for way in saved["ways"].values()):
            raise ValueError("it is no state of this trainer")

    def draw_plots(self):
        """Every metric, and the algorithm's own, from metrics.jsonl alone."""
        records = read_metrics(self.metrics_file.name)
        if not records:
            return
        keys = dict.fromkeys(key for record in records for key in record if key not in ("phase", "step"))
        every = [(with_unit(key), [key]) for key in keys]
        own = [(with_unit(label), keys) for label, keys in self.panels]
        title = f"{self.title}: every metric"
        draw_plot(records, self.folder / "training_metrics_detailed.png", title, every)
        draw_plot(records, self.folder / f"{self.name}_metrics_with_entropy.png", self.title, own)

    # ------------------------------------------------------------ the end

    def catch_signals(self):
        """Ctrl-C, SIGTERM and a closed terminal end the run after the current step; a second Ctrl-C leaves at
        once."""
        def handler(number, frame):
            if self.signal and number == signal.SIGINT:
                os._exit(130)
            self.signal = number
            if number == signal.SIGHUP:  # the terminal is gone: what is written to it would raise
                for stream in (sys.stdout, sys.stderr):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if rank() == 0:
                print("\nStopping after this step, then saving; Ctrl-C again leaves at once", flush=True)

        if threading.current_thread() is not threading.main_thread():
            return {}  # there signals are somebody else's
        ends = [signal.SIGINT, signal.SIGTERM]
        ends += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []  # nohup's
        return {number: signal.signal(number, handler) for number in ends}

    def finish(self):
        best = self.folder / "best/policy"
        kept = f"best policy: {best}"
        if not best.exists():
            last = f"{self.folder}/step_{self.step}/policy"
            kept = f"no evaluation has kept a best policy here; the last one: {last}"
        why = "No better evaluation for a while: stopped early"
        if self.stop_signal:
            why = "Stopped"
            kept = "run again to go on"
        elif self.step == self.total_steps:
            why = "Done"
        seconds = time.perf_counter() - self.started
        said = f"{why} at step {self.step} of {self.total_steps} after {seconds:.0f} s"
        said = f"{said}. Plots: {OUTPUT_DIR}/*.png; {kept}"
        self.say(said if self.stop_signal or not self.last_word else self.last_word)
        if self.wandb:
            self.wandb.finish()


def run_main(trainer_class):
    """Run the trainer as a program: exit code 0, 2 for what the user can mend, 130, 143 or 129 after Ctrl-C,
    SIGTERM or SIGHUP. What a reward function raised, and what we did not foresee, keeps its traceback and
    exits with 1. An error of one process ends all of them; the first says so."""
    try:
        apply_overrides(sys.argv[1:])
        trainer = trainer_class()
        trainer.train()
        sys.exit(128 + trainer.run.stop_signal if trainer.run.stop_signal else 0)
    except (KeyboardInterrupt, EOFError):  # Ctrl-C or Ctrl-D where a question was asked
        sys.exit(130)
    except ErrorElsewhere as error:
        complain(error)
        sys.exit(2)
    except Exception as error:
        text = sentence_of(error)
        words = text or f"{type(error).__name__}: {first_line(error)}"
        if globals().get("SHARD") == "fsdp2" and _STORE:
            leave_sharded(words, text)
        with suppress(ErrorElsewhere):
            exchange(error=words)
        if text is None:
            raise
        complain(text)
        sys.exit(2)
    finally:
        if dist.is_initialized():  # a thread of gloo's that is left at the end may abort the program
            dist.destroy_process_group()


def leave_sharded(words, text):
    """End a process of a sharded run by its error: a sentence (text), or a traceback. The others may wait in
    a collective of FSDP2's, which an exchange() would break: they fail by themselves, or torchrun ends them,
    and are silent where the store knows of an earlier failure."""
    first = _STORE[0].compare_set("failed", "", f"{rank()}: {words}").decode()
    if first == f"{rank()}: {words}":
        print(text or traceback.format_exc(), file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(2 if text else 1)


def complain(text):
    if rank() == 0:
        print(printable(f"\n{Path(__file__).name}: {text}"), file=sys.stderr)


def sentence_of(error):
    """What the user can do about an error; None where a traceback says more."""
    # torch has no type for it on the CPU
    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    if hasattr(error, "__notes__"):  # a reward function's
        return None
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or OUTPUT_DIR}: {error.strerror or error}"
    if on_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        less = "lower BATCH_SIZE and raise GRADIENT_ACCUMULATION_STEPS"
        return f"out of memory ({first_line(error)}): {less}, or lower GROUP_SIZE or MAX_NEW_TOKENS"
# ==== end of block: the run


# ==== block: mining and check-up
# Candidates: their weights, the parts they are mined in, what they are worth. Edit it freely in a copy of
# your own; the repository keeps it byte-identical in the trainers that mine (tests/blocks.py).
import json
import math
import shutil
import time

import numpy as np
from tqdm import tqdm


def rce_weights(r, tau, kind="raw"):
    """Weights of one prompt's candidates, (candidates,): softmax(r / tau) of their rewards r; zscore scales
    those to deviation 1 first, ddof 1."""
    r = torch.as_tensor(r, dtype=torch.float64)
    if kind == "zscore":
        r = (r - r.mean()) / (r.std() + 1e-4)
    return (r / tau).softmax(0)


def tau_at(step, total):
    """TAU at a step (or epoch) of so many, on its way to TAU_END by equal factors."""
    return TAU * ((TAU_END or TAU) / TAU) ** (min(step, total - 1) / max(1, total - 1))


def gold_probability(logprobs, weights):
    """Sum of weight * exp(log-probability) over a prompt's distinct gold answers, at most 1."""
    return min(1.0, sum(w * math.exp(x) for x, w in zip(logprobs, weights)))


def rewards_by_mode(candidates, score=None):
    """r of one prompt's candidates by REWARD_MODE; `score` is the column that some modes mix in."""
    keys = ("hard", "soft", "gt_prob", score)
    columns = [[c.get(key) for c in candidates] for key in keys]
    try:
        return getattr(rewards, REWARD_MODE)(*columns)
    except TypeError:  # arithmetic with None
        lacking = ", ".join(key for key, column in zip(keys, columns) if key and None in column)
        todo = "take another mode, or mine what it needs"
        raise UserError(f"REWARD_MODE = {REWARD_MODE!r}: candidates lack {lacking}: {todo}") from None


def usable(candidates):
    """Those that were verified and did not fail."""
    return [c for c in candidates if c["hard"] is not None and not c["eval_failed"]]


def is_flat(values):
    return max(values) - min(values) < 1e-6


def mining_facts(**facts):
    """What candidates depend on, as JSON has it: `facts` and the constants in _MINING."""
    facts |= {key: constants()[key] for key in _MINING}
    return json.loads(json.dumps(facts, default=plain_name))


def check_facts(path, mined_with, facts, keys, todo):
    """Refuse a file that was mined under another value of one of the keys."""
    for key in keys:
        if mined_with.get(key) != facts[key]:
            change = f"{key} = {mined_with.get(key)!r}, it is {facts[key]!r} now"
            raise UserError(f"{path} was mined with {change}: set it back, or {todo}")


def read_part(path, facts, read, say):
    """The records of a part that an earlier start mined; None where there is none or it is broken."""
    if not path.exists():
        return None
    try:
        records, mined_with = read(path)
    except UserError as error:
        say(f"WARNING: {error}; mining it again")
        return None
    check_facts(path, mined_with, facts, facts, "start afresh with RESUME=no")
    return records


def mine_by_parts(run, path, rows, size, facts, mine, read, write):
    """Whether `path` has what mine(rows) gives; False after a signal. Each part, of `size` rows, is whole on
    disk before the next is begun and depends on policy and constants alone, so a killed run goes on."""
    folder = path.with_suffix(".parts")
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    started = time.perf_counter()
    for i in range(0, len(rows), size * processes()):
        done = min(i + size * processes(), len(rows))
        parts = {n: folder / f"{n:08d}{path.suffix}" for n in range(i, done, size)}
        found = first_says(lambda: {n: read_part(parts[n], facts, read, run.say) for n in parts})
        lacking = [n for n in parts if found[n] is None]
        for n, mined in zip(lacking, dealt(lacking, lambda n: mine(rows[n:n + size]))):
            found[n] = mined
            first_says(lambda: write(mined, parts[n], facts))
        records += [record for n in parts for record in found[n]]
        left = tqdm.format_interval((time.perf_counter() - started) / done * (len(rows) - done))
        run.show(f"{path.stem}: mined {done}/{len(rows)}", f"{left} left in mining")
        if run.listen():
            return False
    first_says(lambda: write(records, path, facts))
    first_says(lambda: shutil.rmtree(folder))
    return True


def own_pick(candidates):
    """The number of the policy's own: its greedy response, else its best beam, else the likeliest."""
    def preference(c):
        scores = [c.get("beam_score"), c.get("logprob")]  # 0.0 is a log-probability too
        return "greedy" in c["source"], *(-math.inf if x is None else x for x in scores)

    return max(range(len(candidates)), key=lambda i: preference(candidates[i]))


def check_up(groups, proposed, path, say):
    """{name: figure} of candidates, one list a prompt, printed; shares are of those that are usable.
    tools/check_up.py makes a picture and a verdict too."""
    good = [usable(group) for group in groups if usable(group)]
    right = [[c["hard"] for c in group] for group in good]
    shares = {
        "positive rate": sum(right, []),
        "prompts without a positive": [not any(hard) for hard in right],
        "prompts with flat reward": [is_flat(shaped_rewards(group)) for group in good],
        "accuracy of the policy's pick": [hard[own_pick(group)] for hard, group in zip(right, good)],
        "accuracy of the oracle": [any(hard) for hard in right]}
    figures = {"prompts": len(groups), "candidates": sum(map(len, groups)), "proposed": proposed}
    figures |= {name: float(np.mean(values)) if values else math.nan for name, values in shares.items()}
    table = [f"    {name:<32}{value:>9,.{0 if value > 1 else 3}f}" for name, value in figures.items()]
    say("\n".join([f"Check-up; more of it: python tools/check_up.py {path}", *table]))
    if failed := [c.get("eval_error") for group in groups for c in group if c["eval_failed"]]:
        kept = f"{len(failed)} of {figures['candidates']} candidates, kept but not trained on"
        say(f"WARNING: scoring failed for {kept}: {failed[0]}")
    return figures
# ==== end of block: mining and check-up


# ================================================================ candidates: tensors, tokens, files
import json
import re
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq


def pack(prompts, responses, pad_id, device):
    """Lists of ids as the tensors of a batch: prompts (rows, P) padded left, responses (rows, R) right."""
    lengths = torch.tensor([len(r) for r in responses], device=device)
    width = int(lengths.max())
    return SimpleNamespace(
        prompt_ids=pad_left(prompts, pad_id).to(device),
        prompt_lengths=torch.tensor([len(p) for p in prompts], device=device),  # (rows,)
        response_ids=pad_right(responses, pad_id).to(device),
        response_lengths=lengths,
        response_mask=(torch.arange(width, device=device) < lengths[:, None]).float())


def response_lists(batch):
    """The ids of each response, a list, without what pads it."""
    return [ids[:n] for ids, n in zip(batch.response_ids.tolist(), batch.response_lengths.tolist())]


# ---------------------------------------------------------------- proposals and what the reward says of them

def beam_search(model, prompts, eos, pad_id):
    """BEAMS responses a prompt, each up to its first EOS, by transformers' beam search without any filter of
    the model's own."""
    ids = pad_left(prompts, pad_id).to(model.device)
    mask = pad_left([[1] * len(p) for p in prompts], 0).to(model.device)
    search = GenerationConfig(
        num_beams=BEAMS, num_return_sequences=BEAMS, do_sample=False, early_stopping=True,
        max_new_tokens=MAX_NEW_TOKENS, use_cache=model.sampled_by != "uncached",
        eos_token_id=eos, pad_token_id=pad_id)
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        with autocast(model):
            # not synced_gpus: the model is whole here, and the other processes have other prompts
            out = model.generate(ids, attention_mask=mask, generation_config=search, synced_gpus=False)
    finally:
        model.generation_config = own
    responses = []
    for row in out[:, ids.shape[1]:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        responses.append(row[:end])
    return responses


def solutions(tokenizer, row):
    """The ids of the data's own solutions that MAX_NEW_TOKENS has room for."""
    texts = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    texts = [text for text in texts if text is not None]
    every = [tokenizer(x, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for x in texts]
    return [ids for ids in every if len(ids) <= MAX_NEW_TOKENS]


def check_logprobs(candidates):
    """Refuse a policy whose log-probabilities are not finite, or not what the sampler said of the greedy
    responses: no reward could be trusted."""
    apart = []  # nats per token
    for c in candidates:
        if not math.isfinite(c["logprob"]):
            gives = f"gives {c['prompt_id']} a response with log-probability {c['logprob']}"
            raise UserError(f"the policy {gives}: its weights are broken, or DTYPE does not suit it")
        if "greedy" in c["source"]:
            apart.append(abs(c.pop("sampler_logprob") - c["logprob"]) / max(10, len(c["token_ids"])))
    if apart and sum(apart) / len(apart) > (1e-3 if DTYPE == "float32" else 0.05):
        what = f"scores responses {sum(apart) / len(apart):.2g} nats per token from what it gave them"
        raise UserError(f"ACTOR_MODEL = {ACTOR_MODEL!r} {what} (DTYPE = {DTYPE}): no reward could be trusted")


def take_parts(c, parts):
    """Enter the reward's parts, {name: value}, into a candidate; its hard and soft reward are two of them."""
    for constant, name in (("HARD_REWARD", HARD_REWARD), ("SOFT_REWARD", SOFT_REWARD)):
        if name not in parts:
            raise UserError(f"{constant} = {name!r} is no part of the reward: it has {', '.join(parts)}")
    c.update({f"reward/{name}": value for name, value in parts.items()})
    soft = parts[SOFT_REWARD]
    if SOFT_REWARD == "reward_model":
        soft = 1 / (1 + math.exp(min(700.0, -soft)))
    c.update(eval_mode="verified", hard=parts[HARD_REWARD], soft=soft)
    if c["hard"] not in (0, 1) or not 0 <= soft <= 1:
        gave = f"{HARD_REWARD} gave {c['hard']:g}, {SOFT_REWARD} {soft:g}"
        raise UserError(f"HARD_REWARD must give 0 or 1 and SOFT_REWARD 0 to 1; {gave}")


def part_or_failure(c, parts_of, by_id):
    """parts_of() one candidate; None where the reward raises, which is written into the candidate."""
    try:
        return parts_of([c], by_id)[0]
    except Exception as error:  # a reward function may raise anything
        why = " ".join([str(error), *getattr(error, "__notes__", ())])
        if not isinstance(error, UserError):
            why = f"{type(error).__name__}: {why}"
        c.update(eval_failed=True, eval_mode="failed", eval_error=why, hard=None, soft=None)
        return None


def gold_after_working(tokenizer, row, token_ids):
    """(ids, [(ids, weight)]): a response's working, up to the last of ANSWER_FORM's mark, and each distinct
    gold answer of the row after it, with what ends it: the rest of ANSWER_FORM, else EOS.

        #### {answer}     "2 + 3 = 6\n#### 6", gold 5           "2 + 3 = 6\n####"     " 5<eos>"
        #### {answer}     "2 + 3 = 5", gold 5                   "2 + 3 = 5\n####"     " 5<eos>"
        \\boxed{{answer}}  "\\boxed{4}", golds 5 and -5          "\\boxed"             "{5}" and "{-5}"

    In the last line a token, `{-`, holds the mark's end and an answer's beginning: the working ends before
    it, for all answers of the row, so that their probabilities are of one place and exclude one another."""
    mark, rest = ANSWER_FORM.split("{answer}")
    mark = mark.rstrip()
    golds = rewards.gold_answers(row["answer"]) if row["answer"] is not None else []
    golds = [ANSWER_FORM.replace("{answer}", gold.strip()) for gold in golds if gold.strip()]
    if not golds:
        return [], []
    text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    place = text.rfind(mark)
    head = "" if not mark else text[:place] if place >= 0 else text + "\n"
    texts = [head + mark, *(head + gold for gold in golds)]
    base, *forms = tokenizer(texts, add_special_tokens=False)["input_ids"]
    border = min(len(os.path.commonprefix([base, ids])) for ids in forms)
    end = [] if rest else [tokenizer.eos_token_id]
    counts = Counter(tuple(ids[border:]) for ids in forms)
    weights = [(list(ids) + end, min(1.0, count / GOLD_FULL_COUNT)) for ids, count in counts.items()]
    return base[:border], weights


# ---------------------------------------------------------------- files

# What candidates depend on: parts of one file are never mined under two settings
_MINING = """
    ACTOR_MODEL REWARD_MODEL DTYPE TRAIN_DATASETS PROMPT_TEMPLATE SYSTEM_PROMPT EXTRA_COLUMNS
    MAX_TRAIN_PROMPTS REWARD_FUNCTIONS
    REWARD_MODEL_WEIGHT HARD_REWARD SOFT_REWARD SIMILARITY ANSWER_FORM GOLD_FULL_COUNT MINE_PROMPTS GREEDY
    BEAMS GROUP_SIZE SAMPLE_TEMPERATURES INCLUDE_REFERENCE CHEAP_SIGNAL VERIFY_TOP VERIFY_RANDOM
    MAX_PROMPT_TOKENS MAX_NEW_TOKENS TEMPERATURE BATCH_SIZE SEED""".split()

# One row a candidate; source and temperature list every way it was proposed; reward/<part> columns follow
_COLUMNS = pa.schema([
    ("prompt_id", pa.string()),
    ("prompt", pa.string()),
    ("token_ids", pa.list_(pa.int32())),
    ("text", pa.string()),
    ("source", pa.list_(pa.string())),
    ("temperature", pa.list_(pa.float64())),
    ("truncated", pa.bool_()),
    ("logprob", pa.float64()),
    ("hard", pa.float64()),
    ("soft", pa.float64()),
    ("gt_prob", pa.float64()),
    ("eval_mode", pa.string()),
    ("eval_failed", pa.bool_()),
    ("eval_error", pa.string()),
])


def candidates_path(number):
    """The candidates of round `number`, from 1."""
    if CANDIDATES and number == 1:
        return Path(CANDIDATES)
    return Path(OUTPUT_DIR) / f"candidates_round_{number}.parquet"


def candidates_after(number):
    """The files of later rounds' candidates."""
    files = Path(OUTPUT_DIR).glob("candidates_round_*")
    return [path for path in files if int("0" + re.sub(r"\D", "", path.name)) > number]


def write_parquet(records, path, facts):
    """Candidates as parquet with checksums and what they were mined with, there whole or not at all."""
    parts = sorted({key for record in records for key in record if key.startswith("reward/")})
    columns = [*_COLUMNS, *((key, pa.float64()) for key in parts)]
    schema = pa.schema(columns, metadata={"mined_with": json.dumps(facts)})
    table = pa.Table.from_pylist(records, schema)
    write_whole(path, lambda tmp: pq.write_table(table, tmp, write_page_checksum=True))


def read_parquet(path):
    """(records, what they were mined with) of a parquet file; a broken one is a UserError."""
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        facts = json.loads((table.schema.metadata or {}).get(b"mined_with", b"{}"))
        return table.to_pylist(), facts
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read as parquet ({first_line(error)})") from None


def read_candidates(path, rows, vocabulary):
    """[(row, its candidates)] in the file's order. The mapping is strict: a prompt or token id that is not
    known is an error."""
    groups = {}
    for number, record in enumerate(read_parquet(path)[0], 1):
        try:
            key, ids, hard = record["prompt_id"], record["token_ids"], record["hard"]
            told, failed = record["prompt"], record["eval_failed"]
        except KeyError as error:
            raise UserError(f"{path}: there is no column {error}; docs/rce.md lists those it takes") from None
        if key not in rows or transcript(rows[key]["prompt"]) != told:
            fault = f"prompt_id {key!r} with this prompt is not in TRAIN_DATASETS"
        elif not ids or min(ids) < 0 or max(ids) >= vocabulary:
            fault = f"token_ids must be 1 or more ids below {vocabulary}, those of ACTOR_MODEL's tokenizer"
        elif hard not in (0, 1, None) and not failed:
            fault = f"hard is {hard}; it takes 0, 1 or, where it was not verified, null"
        else:
            fault = None
        if fault:
            raise UserError(f"{path} row {number}: {fault}")
        candidate = {"text": "", "source": ["given"], "temperature": [None], **record}
        groups.setdefault(key, []).append(candidate)
    if not groups:
        raise UserError(f"{path}: there are no candidates in it")
    return [(rows[key], candidates) for key, candidates in groups.items()]


def train_main():
    run_main(RCETrainer)


if __name__ == "__main__":
    train_main()
