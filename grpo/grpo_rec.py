"""GRPO for generative recommendation, in one file: a language model whose tokens are the codes of items.

A history of items is a prompt of their codes, <a_7><b_120><c_3>, the next item is the response. Decoding
walks a trie of the catalogue: softmax runs over the codes that some item goes on with, so the policy can say
nothing but items,

    pi(item | history) = prod_t pi(c_t | history, c_<t),    pi(c | prefix) = softmax over the trie's children

and every log-probability below, sampled or trained, is of this constrained distribution. Two stages:

    SFT    L = -mean_t log pi(c_t of the logged next item)               best validation NDCG@10 goes on
    GRPO   GROUP_SIZE candidates of a history, of scores s_i, are each other's baseline (2402.03300):
           A_i = (s_i - mean of its group) / (std + 1e-4),   rho_t = pi(c_t) / pi_old(c_t)
           clip_t = clip(rho_t, 1 - CLIP_RANGE, 1 + CLIP_RANGE_HIGH)
           L   = -mean_t w_i min(rho_t A_i, clip_t A_i) + KL_COEF kl_t

LOSS_TYPE "gspo" has rho = exp(mean_t log rho_t) of the whole item (2507.18071); "dapo" and "grpo" are one,
since all responses are as long. kl_t has k3's value against the best SFT policy and k2's gradient, that of
KL(pi || pi_ref). What the gradient estimates depends on CANDIDATES:
- "sample" with REPLACEMENT: that of the expected reward, as in GRPO;
- "sample" without (Gumbel top-k, 1903.06059): distinct items, each item in the group with another probability
  than pi: biased towards rarer items, of lower variance;
- "beam": no samples, the GROUP_SIZE likeliest items: sum_i A_i grad log pi(i) ranks the list, better items up
  and worse ones down, whatever their probability. It knows nothing of items beyond the list.
GROUP_WEIGHTS = "policy" weighs an item by w_i = GROUP_SIZE pi(i) / sum of pi over its group, the baseline and
the KL too: then the two latter are the exact gradient of the expected reward of pi renormalised over the
group. Measured (docs/grpo_rec.md): it raises what a *sample* earns, and with it the few likeliest items;
beams with "uniform" raise what a *list* earns, which is what is shown to a user, and are the default. There
the KL term is no KL: it pulls the log-probabilities of the listed items to the reference's.

    python grpo/grpo_rec.py                          # edit the constants below, or override: KEY=VALUE
    python grpo/grpo_rec.py STAGE=sft, then STAGE=rl
    python grpo/grpo_rec.py STAGE=recommend 'HISTORY=[3, 17, 204]'
    python grpo/grpo_rec.py TRAIN_FILE=train.csv VALID_FILE=None TEST_FILE=test.csv INDEX_FILE=index.json \\
        ITEM_FILE=info.txt VALUES_FILE=None VALUE_WEIGHT=0 RULE_WEIGHT=1

Writes into OUTPUT_DIR: training_config.json, logs/ (training_*.log, metrics.jsonl, samples.jsonl), step_N/
checkpoints, sft/policy/ (the best of SFT), best/policy/, sasrec.pt, eval_test.json, rec_learning.png,
training_metrics_detailed.png and grpo_rec_metrics_with_entropy.png. docs/grpo_rec.md defines every metric.

To change      see
the loss       policy_loss, token_losses; sft_update     the data       TRAIN_FILE ...; read_rows
the advantage  group_advantages, compute_advantages      a metric       RecTrainer.record, list_metrics
the reward     RULE_WEIGHT ...; compute_rewards          a plot         self.run.panels; draw_learning
candidates     constrained_logprobs, search              the prompt     PROMPT_TEMPLATE; Prompter
"""
import copy
import csv
import io
import math
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch loads: faster beside busy programs
import torch  # noqa: E402
from transformers import AutoModelForCausalLM

ROOT = next((p for p in Path(__file__).resolve().parents if (p / "rewards").is_dir()), None)
if ROOT is None:
    sys.exit("grpo_rec.py needs the folder rewards/ beside it or above it: copy it from the repository")
sys.path.insert(0, str(ROOT))
import rewards  # noqa: E402

# ================================================================ constants

STAGE = "all"  # all | sft | rl | recommend: rl goes on from SFT's best, or from ACTOR_MODEL
HISTORY = []  # STAGE=recommend: items bought, the oldest first
TOP = 10  # STAGE=recommend: how many items

# Models: a folder or a hub name, whose tokenizer gains the codes; None: a small Llama that knows codes alone
ACTOR_MODEL: str | None = None
HIDDEN_SIZE = 64  # of the small Llama
LAYERS = 2
HEADS = 4
LORA_RANK = 0  # 0: whole models are trained; else, in STAGE=rl, an adapter of this rank (2106.09685)
LORA_ALPHA = 32.0  # an adapter's product counts LORA_ALPHA / LORA_RANK
LORA_TARGETS = "all-linear"  # which layers get one: all-linear (but the heads), or names: q_proj,v_proj
BASE_DTYPE: str | None = None  # float32 | bfloat16: of the weights under an adapter; None: DTYPE
DTYPE = "float32"  # float32 | bfloat16 (autocast; weights and optimizer state stay float32)
DEVICE = "auto"  # auto | cpu | cuda | cuda:1 | mps
GRADIENT_CHECKPOINTING = False  # recompute activations in the update: less memory, a third more time

# Data: csv files of a history and the next item
TRAIN_FILE = f"{ROOT}/data/rec/train.csv"
VALID_FILE: str | None = f"{ROOT}/data/rec/valid.csv"  # None: VALID_FRACTION of TRAIN_FILE's users
TEST_FILE: str | None = f"{ROOT}/data/rec/test.csv"  # seen once, at the end
VALID_FRACTION = 0.1
USER_COLUMN = "user_id"
HISTORY_COLUMN = "history_item_id"  # such as "[3, 17, 204]", the oldest first
TARGET_COLUMN = "item_id"
INDEX_FILE = f"{ROOT}/data/rec/index.json"  # {item: its codes}
ITEM_FILE: str | None = f"{ROOT}/data/rec/items.txt"  # lines of codes, title, item, tab between
TRAIN_PREFIXES = True  # a history's own items are targets too, of what stands before them
MAX_HISTORY = 10  # items; longer histories are cut from the left, and counted
MAX_TRAIN_ROWS: int | None = None  # only the first so many of the file; None: all
MAX_EVAL_ROWS: int | None = 300  # of validation
PROMPT_TEMPLATE = "{history}"  # the tokenizer's chat template, if any, goes around it
TITLE_HISTORY_ROWS = 0.0  # SFT: share of the rows also asked with titles in place of codes (a model of words)
TITLE_ROWS = 0.0  # SFT: share of the items whose title alone asks for them (a model of words)
EXCLUDE_HISTORY = False  # items of the history cannot be recommended

# Rewards: the score is the sum of weight * part
VALUE_WEIGHT = 1.0  # what the user values by VALUES_FILE, 0 to 1
RULE_WEIGHT = 1.0  # 1 for the logged target
RANKING_WEIGHT = 0.0  # 1 for it; where it is in the group, the others cost the more the higher they stand
SEMANTIC_WEIGHT = 0.0  # cosine of the item's vector with the target's
COLLABORATIVE_WEIGHT = 0.0  # SASRec's score, 0 to 1 within the group
REWARD_FUNCTIONS = []  # yours of histories, items, targets: (function, or name in rewards/; weight)
VALUES_FILE: str | None = f"{ROOT}/data/rec/values.npy"  # (items, items): the second's worth after the first
VALUE_DECAY = 0.5  # weight of an item of the history relative to the next one
VECTORS_FILE: str | None = None  # (items, width) for the semantic reward; None: TF-IDF of the titles
REWARD_TIMEOUT: float | None = 600.0  # seconds that scoring one batch may take; None: any

# SFT
SFT_EPOCHS = 20
SFT_BATCH_SIZE = 64  # histories an optimizer step
SFT_LEARNING_RATE = 3e-3
SFT_STITCH = 0.0  # chance, at each item, that a sequence goes on as another did after it: augments small data
SFT_SIBLINGS = 0.0  # stitched: items of the same codes but the last come next as if so often logged
SFT_AVERAGE = 0.0  # decay of the running mean of SFT's weights, which is the policy; 0: the weights are
SFT_PATIENCE = 3  # evaluations without a better NDCG@10 before SFT ends; 0: never

# Rollout
CANDIDATES = "beam"  # beam | sample
REPLACEMENT = False  # sample: the same item may come twice in a group
BATCH_SIZE = 32  # histories in memory at a time, with GROUP_SIZE candidates each
GRADIENT_ACCUMULATION_STEPS = 1  # batches a training step: BATCH_SIZE * this = histories a step
GROUP_SIZE = 16  # candidates a history; >= 2, since they are each other's baseline
TEMPERATURE = 1.0  # > 0; of the distribution that is sampled and scored

# Optimisation of GRPO (MAX_GRAD_NORM, WEIGHT_DECAY and WARMUP_STEPS: of SFT too)
LEARNING_RATE = 5e-4
MAX_GRAD_NORM = 1.0  # > 0
WEIGHT_DECAY = 0.0
USE_LR_SCHEDULER = False
LR_SCHEDULER_TYPE = "linear"  # linear | cosine (to 0 after the last step) | plateau (halves)
PLATEAU_PATIENCE = 2  # evaluations without a better reward (SFT: NDCG@10) before plateau halves
WARMUP_STEPS = 0

# Algorithm
LOSS_TYPE = "dapo"  # dapo | gspo
GROUP_WEIGHTS = "uniform"  # uniform | policy: see above
GROUP_EPOCHS = 1  # passes over each step's candidates
MINI_BATCHES = 1  # optimizer steps a pass
SCALE_REWARDS = "group"  # group | batch | none: the standard deviation that advantages are divided by
CLIP_RANGE = 0.2  # > 0; gspo wants about 3e-4
CLIP_RANGE_HIGH = 0.2  # > 0; DAPO's clip-higher: 0.28
ENTROPY_COEF = 0.0
KL_COEF = 2.0  # weight of the KL in the loss
REFERENCE_SYNC_STEPS = 0  # every so many the reference moves towards the actor (2404.09656); 0: never
REFERENCE_SYNC_ALPHA = 0.6  # reference = ALPHA * actor + (1 - ALPHA) * reference; 0 to 1
MAX_STEPS = 150  # of GRPO

# Evaluation
EVAL_BEAMS = 50
SASREC_EPOCHS = 30  # of the baseline SASRec, which the collaborative reward takes too; 0: none
BOOTSTRAP = 2000  # resamples of the test rows

# Bookkeeping
SAVE_EVERY_N_STEPS = 100  # 0: only at the end
KEEP_LAST_N_CHECKPOINTS = 3
EVAL_EVERY_N_STEPS = 50  # 0: only before and after each stage
EARLY_STOPPING_PATIENCE = 0  # evaluations without a better reward (SFT: NDCG@10) that end a stage; 0: never
EARLY_STOPPING_THRESHOLD = 0.0  # by how much better is better for patience; best/ follows the highest
LOG_SAMPLES = 4  # candidates a step written to samples.jsonl
RESUME = "ask"  # ask | yes | no | a checkpoint's path
OUTPUT_DIR = f"{ROOT}/checkpoints/grpo_rec"
SEED = 1
USE_WANDB = False
WANDB_PROJECT = "hackable-rlhf"

# Processes: torchrun --nproc_per_node=2 grpo/grpo_rec.py
EXACT_SUMS = True  # of gradients: the same bits on any number of processes; each micro-batch's are sent
PROCESS_TIMEOUT = 1800.0  # seconds that one process waits for another

_LIMITS = {  # least and greatest value of each number, or the words that a constant takes
    "TOP HIDDEN_SIZE LAYERS HEADS MAX_HISTORY MAX_TRAIN_ROWS MAX_EVAL_ROWS SFT_EPOCHS": (1, 1e12),
    "SFT_BATCH_SIZE BATCH_SIZE GRADIENT_ACCUMULATION_STEPS GROUP_EPOCHS MINI_BATCHES": (1, 1e12),
    "MAX_STEPS PLATEAU_PATIENCE KEEP_LAST_N_CHECKPOINTS BOOTSTRAP": (1, 1e12),
    "GROUP_SIZE": (2, 1e12),
    "EVAL_BEAMS": (20, 1e12),
    "WARMUP_STEPS SAVE_EVERY_N_STEPS EVAL_EVERY_N_STEPS EARLY_STOPPING_PATIENCE LOG_SAMPLES SEED": (0, 2**62),
    "SFT_PATIENCE REFERENCE_SYNC_STEPS SASREC_EPOCHS": (0, 2**62),
    "LEARNING_RATE SFT_LEARNING_RATE WEIGHT_DECAY KL_COEF EARLY_STOPPING_THRESHOLD SFT_SIBLINGS": (0, 1e6),
    "VALUE_WEIGHT RULE_WEIGHT RANKING_WEIGHT SEMANTIC_WEIGHT COLLABORATIVE_WEIGHT ENTROPY_COEF": (-1e6, 1e6),
    "REFERENCE_SYNC_ALPHA TITLE_HISTORY_ROWS TITLE_ROWS VALUE_DECAY SFT_STITCH": (0, 1),
    "SFT_AVERAGE": (0, 0.9999),
    "VALID_FRACTION": (1e-6, 0.9),
    "CLIP_RANGE CLIP_RANGE_HIGH": (1e-6, 1e6),
    "TEMPERATURE": (1e-3, 1e3),
    "LORA_RANK": (0, 65536),
    "LORA_ALPHA": (1e-6, 1e6),
    "MAX_GRAD_NORM": (1e-12, 1e12),
    "REWARD_TIMEOUT PROCESS_TIMEOUT": (1e-3, 1e6),
    "STAGE": ["all", "sft", "rl", "recommend"],
    "DTYPE BASE_DTYPE": ["float32", "bfloat16"],
    "CANDIDATES": ["beam", "sample"],
    "LR_SCHEDULER_TYPE": ["linear", "cosine", "plateau"],
    "LOSS_TYPE": ["dapo", "gspo"],
    "GROUP_WEIGHTS": ["uniform", "policy"],
    "SCALE_REWARDS": ["group", "batch", "none"],
}
_KS = (1, 3, 5, 10, 20)  # of HR@K and NDCG@K

# ================================================================ the maths of GRPO over items


def sampling_logprobs(logits, temperature):
    """Log-probabilities (..., vocabulary) of the distribution that is sampled *and* trained: change it here
    (top-p, say), and the first ratios stay 1. A token that must not come gets -inf."""
    return full_logprobs(logits, temperature)


def constrained_logprobs(logits, codes, open_, temperature):
    """Log-probabilities of the codes that may come next, (..., width), float32, -inf where not open. This
    distribution is sampled *and* scored, everywhere. logits (..., all codes), codes, open_ (..., width)."""
    scores = logits.float().gather(-1, codes) / temperature
    logprobs = scores.masked_fill(~open_, -math.inf).log_softmax(-1)
    return logprobs.masked_fill(~open_, -math.inf)  # also where nothing is open: no NaN


def conditional_gumbels(logprobs, perturbed, uniform):
    """Perturbed log-probabilities of all children, (..., width), given that their maximum is their parent's,
    perturbed (..., 1): the k greatest of a whole level are a sample without replacement. logprobs (...,
    width) are of whole prefixes. Source: Kool et al. 2019 (1903.06059), appendix B.3."""
    gumbels = logprobs - (-uniform.clamp(1e-30, 1 - 1e-7).log()).log()
    greatest = gumbels.amax(-1, keepdim=True)
    v = perturbed - gumbels + torch.log1p(-(gumbels - greatest).exp())
    shifted = perturbed - v.clamp(min=0) - torch.log1p((-v.abs()).exp())
    return torch.where(logprobs.isfinite(), shifted, -math.inf)


def group_weights(logprobs, group_size, kind):
    """Weight of each candidate, (rows,), 1 in the mean of a group; logprobs (rows,) of whole items."""
    if kind == "uniform":
        return torch.ones_like(logprobs)
    return group_size * logprobs.view(-1, group_size).softmax(1).flatten()


def group_advantages(scores, weights, group_size, scale):
    """Advantage of each candidate, (rows,); rows of a group are neighbours. Equal scores get zeros."""
    groups = scores.view(-1, group_size)
    baseline = (groups * weights.view(-1, group_size)).mean(1, keepdim=True)
    advantages = groups - baseline
    if scale != "none":
        std = groups.std(1, keepdim=True) if scale == "group" else scores.std()
        advantages = advantages / (std + 1e-4)
    return torch.where(groups.amax(1, keepdim=True) > groups.amin(1, keepdim=True), advantages, 0.0).flatten()


def policy_loss(logprobs, old_logprobs, advantages, loss_type, clip_range, clip_range_high):
    """Loss of each token and the ratio it saw, (rows, codes); advantages (rows, 1)."""
    log_ratio = logprobs - old_logprobs
    if loss_type == "gspo":
        log_ratio = log_ratio.mean(1, keepdim=True).expand_as(logprobs)
    ratio = log_ratio.exp()
    objective = torch.min(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range_high) * advantages)
    return -objective, ratio


def kl_loss(logprobs, ref_logprobs):
    """k3's value with k2's gradient, (rows, codes): in the mean that of KL(pi || pi_ref) on policy."""
    log_ratio = logprobs - ref_logprobs
    k2 = 0.5 * log_ratio ** 2
    k3 = (-log_ratio).exp() - 1 + log_ratio
    return k2 + (k3 - k2).detach()


# ================================================================ the trainer


class RecTrainer:
    """Catalogue, model, data and the algorithm; self.run has the files. resume_from_checkpoint overrides the
    constant RESUME: a path, "ask", "yes" or "no"."""

    def __init__(self, resume_from_checkpoint=None):
        check_constants()
        check_sizes()
        self.device = find_device()
        made = () if STAGE == "rl" else ("sft",)  # what rl starts from, it does not move aside
        files = (*made, "rec_learning.png", "eval_test.json", "sasrec.pt")
        # An evaluation has a reward in the stage of GRPO alone
        self.run = Run("grpo_rec", resume_from_checkpoint, self.device, files, ("reward", "ndcg@10"))
        self.run.title = f"GRPO for recommendation, {Path(TRAIN_FILE).parent.name}, seed {SEED}"
        # Drawn in grpo_rec_metrics_with_entropy.png, (label, metrics); training_metrics_detailed.png has all
        names = "ndcg@10 hr@10 reward reward_sampled entropy policy_loss grad_norm kl clip_fraction"
        self.run.panels = [(name, [name]) for name in [*names.split(), "coverage@10"]]
        self.catalogue = Catalogue(self.run.say)
        self.load_models()
        self.train_rows, self.valid_rows, self.test_rows = load_splits(self.catalogue, self.run.say)
        self.sft_rows = self.prompter.sft_rows(self.train_rows, self.run.say)
        self.goes_on = places_after(self.sft_rows, self.prompter.lists)
        for row in [*self.train_rows, *self.valid_rows, *self.test_rows]:
            row["ids"] = self.prompter.ids(row["history"])
        check_models({"ACTOR_MODEL": self.actor}, [self.actor], self.train_rows, self.pad_id, self.run.say)
        check_head(self.actor, self.trie, self.train_rows[0]["ids"])
        for model in (self.reference, self.learner):
            set_ways(model, get_ways(self.actor))
        targets = torch.tensor([row["target"] for row in self.train_rows])
        self.popularity = targets.bincount(minlength=len(self.catalogue.items))  # how often each is a target
        self.load_rewards()
        # What a checkpoint keeps beside weights, optimizers and generators; order is this epoch's
        # permutation, begin the step at which the stage began
        self.state = SimpleNamespace(
            epoch=0, order=None, cursor=0, prompts=len(self.train_rows), begin=0,
            stage="rl" if STAGE == "rl" else "sft", sft_best=-1.0, sft_waited=0)
        self.best = SimpleNamespace(model=None, value=None)  # for recommend()
        self.run.keep(self.state, self.models, self.optimizers, self.tokenizer, merged)
        if STAGE == "sft" and self.state.stage == "rl":
            raise UserError(f"{self.run.checkpoint} is in its second stage: STAGE=rl or all goes on with it")
        check_average(self)
        self.plan_steps()

    def load_models(self):
        """Actor and reference come from the checkpoint when there is one. The reference is the best policy of
        SFT so far; in GRPO it is what KL_COEF holds the actor to."""
        at = self.run.checkpoint
        self.tokenizer, self.actor = load_actor(at / "policy" if at else None, self.catalogue, self.device)
        self.pad_id = padding_id(self.actor, self.tokenizer)
        self.prompter = Prompter(self.tokenizer, self.catalogue, self.actor)
        self.trie = Trie(self.prompter.codes, self.device)
        self.models = {"policy": self.actor}  # saved, by its folder's name
        self.reference = self.actor  # with LORA_RANK: its adapter switched off
        if not LORA_RANK:
            self.reference = copy.deepcopy(self.actor)
            if at:
                self.reference = load_model(AutoModelForCausalLM, at / "reference", "RESUME", self.device)
            self.reference.requires_grad_(False)
            self.models["reference"] = self.reference
        rate = LEARNING_RATE if STAGE == "rl" else SFT_LEARNING_RATE
        self.learner = load_learner(at, self.actor)  # what SFT updates
        if self.learner is not self.actor:
            self.models["learner"] = self.learner
        self.optimizers = {"policy": make_optimizer(self.learner, rate)}

    def load_rewards(self):
        """What compute_rewards() needs: values, vectors, functions."""
        self.values = read_values(self.catalogue) if VALUE_WEIGHT else None
        self.vectors = item_vectors(self.catalogue) if SEMANTIC_WEIGHT else None
        if COLLABORATIVE_WEIGHT and not SASREC_EPOCHS:
            raise UserError("COLLABORATIVE_WEIGHT needs a SASRec: set SASREC_EPOCHS to 1 or more")
        weights = (VALUE_WEIGHT, RULE_WEIGHT, RANKING_WEIGHT, SEMANTIC_WEIGHT, COLLABORATIVE_WEIGHT)
        if STAGE != "sft" and not any(weights) and not REWARD_FUNCTIONS:
            raise UserError("every reward weight is 0 and REWARD_FUNCTIONS is empty: give at least one")
        self.rewards = resolve_rewards(REWARD_FUNCTIONS, "REWARD_FUNCTIONS")
        self.rewarded = any(weights) or bool(self.rewards)
        self.sasrec = None

    # ------------------------------------------------------------ the algorithm

    def train(self):
        """Fine-tune, then GRPO from the best of that, then the test rows. Returns the last evaluation."""
        with self.run.opened(self.headline()):
            self.prepare_baselines()
            if self.state.stage == "sft":
                self.fine_tune()
            if self.state.stage == "rl":
                for _ in self.run.steps(self.evaluate):
                    batch = self.rollout()
                    self.score(batch)
                    self.compute_advantages(batch)
                    metrics = self.update(batch)
                    self.sync_reference()
                    self.record(batch, metrics)
            if not self.run.stop_signal:
                self.test()
        return self.run.evaluation

    def fine_tune(self):
        """SFT on the logged items; then its best policy is the actor and the reference of GRPO."""
        for _ in self.run.steps(self.evaluate_sft, until=self.end):
            if 0 < SFT_PATIENCE <= self.state.sft_waited:
                break
            rows = next_rows(self.sft_rows, self.state, SFT_BATCH_SIZE)
            self.record_sft(self.sft_update(rows))
        if self.run.stop_signal:
            return
        self.run.say(f"SFT ends at step {self.run.step}; best NDCG@10 {self.state.sft_best:.4f}")
        copy_weights(self.reference, self.actor)
        folder = self.run.folder / "sft"
        if rank() == 0:
            write_whole(folder, self.save_sft, folder=True)
        if STAGE == "sft":
            self.run.last_word = f"SFT is done: {folder}/policy; STAGE=rl goes on from it"
            return
        self.state.stage = "rl"
        self.state.begin = self.run.step
        self.state.epoch = self.state.cursor = 0
        self.optimizers["policy"] = make_optimizer(self.actor, LEARNING_RATE)
        self.learner = self.actor
        self.models.pop("learner", None)
        self.run.begin_part()
        self.plan_steps()

    def save_sft(self, folder):
        self.run.save_model(self.actor, folder / "policy")

    def plan_steps(self):
        """The step at which the stage ends if nothing ends it before, and the run's last one."""
        steps = MAX_STEPS
        more = 0
        if self.state.stage == "sft":
            steps = SFT_EPOCHS * math.ceil(len(self.sft_rows) / SFT_BATCH_SIZE)
            more = 0 if STAGE == "sft" else MAX_STEPS
        self.end = self.state.begin + steps
        self.run.total_steps = self.end + more

    def learning_rate(self, base):
        """Set and return this step's learning rate."""
        kind = LR_SCHEDULER_TYPE if USE_LR_SCHEDULER else None
        step = self.run.step - self.state.begin
        total = self.end - self.state.begin
        rate = base * learning_rate_scale(step, total, WARMUP_STEPS, kind, self.run.halvings)
        set_rates(self.optimizers["policy"], rate)
        return rate

    def sft_update(self, rows):
        """One optimizer step on the items that were logged; returns its metrics."""
        rate = self.learning_rate(SFT_LEARNING_RATE)
        metrics = {}  # of the whole step; share is a micro-batch's
        with self.run.timed("update"), recomputing([self.learner]):
            if SFT_STITCH:
                rows = [stitch(row, self.goes_on) for row in rows]
            batch = sft_batch(rows, self.trie, self.pad_id, self.device)
            weights = batch.learn / batch.learn.sum()
            for micro, share in summed([self.learner], every_micro_batch(self.learner, batch), metrics):
                logprobs, entropy = item_logprobs(self.learner, self.trie, batch, micro, TEMPERATURE)
                weight = weights[micro, :logprobs.shape[1]]
                loss = -(weight * logprobs).sum()
                backward(self.learner, loss)
                share["policy_loss"] = loss.item()
                share["entropy"] = (weight * entropy.detach()).sum().item()
            ids = [row["id"] for row in rows]
            norms = clip_and_step(self.optimizers.values(), metrics["policy_loss"], self.run, ids)
            if self.learner is not self.actor:
                # Weights of the first steps are soon forgotten
                decay = min(SFT_AVERAGE, (self.run.step + 2) / (self.run.step + 11))
                average_weights(self.learner, self.actor, decay)
        self.tokens = int(batch.learn.sum())
        return {**metrics, "grad_norm": norms[0], "learning_rate": rate}

    def rollout(self):
        """GROUP_SIZE candidates for each of a step's histories, likelier ones first: a batch, its tensors
        (histories * GROUP_SIZE, ...)."""
        with self.run.timed("rollout"):
            rows = next_rows(self.train_rows, self.state, BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS)
            # drawn at once: BATCH_SIZE does not matter to it
            uniform = draw_uniform(self.trie, len(rows), GROUP_SIZE, CANDIDATES, REPLACEMENT)
            return candidates(self.actor, self.trie, rows, GROUP_SIZE, CANDIDATES, self.pad_id, uniform)

    @torch.no_grad()
    def score(self, batch):
        """Scores of the candidates and the reference's log-probabilities of their codes."""
        with self.run.timed("score"):
            batch.scores, batch.parts = self.rewards_of(batch.rows, batch.items)
            batch.ref_logprobs = batch.logprobs
            if KL_COEF > 0:
                def say(rows):
                    return item_logprobs(self.reference, self.trie, batch, rows, TEMPERATURE)[0]

                with without_adapter(self.reference):
                    batch.ref_logprobs = by_micro_batches(say, batch, every_micro_batch(self.actor, batch))

    def rewards_of(self, rows, items):
        """compute_rewards(), checked, and the parts it left behind; items (rows,), groups are neighbours."""
        names = self.catalogue.items
        histories = [[names[i] for i in row["history"]] for row in rows]
        chosen = [names[i] for i in items.tolist()]
        targets = [names[row["target"]] for row in rows]

        def score(*some):
            self.reward_parts = {}
            return call_reward("compute_rewards", self.compute_rewards, *some), self.reward_parts

        scores, parts = dealt_rewards(score, BATCH_SIZE * GROUP_SIZE, histories, chosen, targets)
        return scores.to(self.device), parts

    def compute_rewards(self, histories, items, targets):
        """Score of each item, (rows,); edit or override freely. The candidates of a history are neighbours,
        GROUP_SIZE of them, likelier ones first. self.reward_parts is what is logged."""
        parts = {
            "value": (VALUE_WEIGHT, self.value_reward),
            "rule": (RULE_WEIGHT, rewards.rule_reward),
            "ranking": (RANKING_WEIGHT, self.ranking_reward),
            "semantic": (SEMANTIC_WEIGHT, self.semantic_reward),
            "collaborative": (COLLABORATIVE_WEIGHT, self.collaborative_reward)}
        for name, function, weight in self.rewards:
            parts[name] = (weight, function)
        total = torch.zeros(len(items))
        for name, (weight, function) in parts.items():
            if weight:
                self.reward_parts[name] = call_reward(name, function, histories, items, targets)
                total += weight * self.reward_parts[name]
        return total

    def value_reward(self, histories, items, targets):
        number = self.catalogue.number
        rows = [[number[item] for item in history] for history in histories]
        chosen = [number[item] for item in items]
        return [rewards.history_value(self.values, h, i, VALUE_DECAY) for h, i in zip(rows, chosen)]

    def ranking_reward(self, histories, items, targets):
        hits = rewards.rule_reward(histories, items, targets)
        found = []
        for n in range(0, len(hits), GROUP_SIZE):
            found += rewards.ranking_reward(hits[n:n + GROUP_SIZE])
        return found

    def semantic_reward(self, histories, items, targets):
        number = self.catalogue.number
        a, b = ([number[item] for item in some] for some in (items, targets))
        return (self.vectors[a] * self.vectors[b]).sum(1).tolist()

    def collaborative_reward(self, histories, items, targets):
        number = self.catalogue.number
        rows = [[number[item] for item in history] for history in histories[::GROUP_SIZE]]
        chosen = torch.tensor([number[item] for item in items]).view(-1, GROUP_SIZE)
        scores = self.sasrec.scores(rows).gather(1, chosen)
        return [score for group in scores.tolist() for score in rewards.min_max(group)]

    def compute_advantages(self, batch):
        """Compare each candidate with its group."""
        logprobs = batch.logprobs.sum(1)
        batch.weights = group_weights(logprobs, GROUP_SIZE, GROUP_WEIGHTS)
        batch.advantages = group_advantages(batch.scores, batch.weights, GROUP_SIZE, SCALE_REWARDS)

    def update(self, batch):
        """GROUP_EPOCHS passes of MINI_BATCHES optimizer steps over the batch; returns the step's metrics."""
        rate = self.learning_rate(LEARNING_RATE)
        steps = []
        with self.run.timed("update"), recomputing([self.actor]):
            for _ in range(GROUP_EPOCHS):
                rows = (torch.randperm if MINI_BATCHES > 1 else torch.arange)(len(batch.rows))
                for chunk in rows.to(self.device).chunk(MINI_BATCHES):
                    steps.append(self.optimizer_step(batch, chunk))
            check_first_ratio(steps, self.run.step - self.state.begin)
        metrics = {key: sum(step[key] for step in steps) / len(steps) for key in steps[0]}
        return {**metrics, "ratio_max_first": steps[0]["ratio_max"], "learning_rate": rate}

    def optimizer_step(self, batch, chunk):
        """One optimizer step on `chunk`, in micro-batches whose gradients add up to that of the whole."""
        metrics = {}  # of the whole step; share is a micro-batch's
        tokens = batch.response_mask[chunk].sum()
        micros = micro_batches(batch, chunk, rows_at_once(self.actor, batch))
        for rows, share in summed([self.actor], micros, metrics):
            logprobs, entropy = item_logprobs(self.actor, self.trie, batch, rows, TEMPERATURE)
            losses, policy_losses, ratio, kl = self.token_losses(batch, rows, logprobs, entropy)
            backward(self.actor, losses.sum() / tokens)  # the whole step's tokens, not the micro-batch's
            share["policy_loss"] = (policy_losses.sum() / tokens).item()
            share["log_ratio"] = ((logprobs - batch.logprobs[rows]).abs().sum() / tokens).item()
            ratio = ratio.detach()
            advantages = batch.advantages[rows, None]
            clipped = torch.where(advantages > 0, ratio > 1 + CLIP_RANGE_HIGH, ratio < 1 - CLIP_RANGE)
            clipped = (clipped & (advantages != 0)).float()
            approx_kl = ratio - 1 - ratio.log()
            means = {"entropy": entropy, "kl": kl, "clip_fraction": clipped, "approx_kl": approx_kl}
            for key, values in means.items():
                share[key] = (values.sum() / tokens).item()
            share["ratio_max"] = (ratio - 1).abs().max().item()
        ids = [batch.rows[i]["id"] for i in chunk.tolist()]
        metrics["grad_norm"], = clip_and_step(self.optimizers.values(), metrics["policy_loss"], self.run, ids)
        return metrics

    def token_losses(self, batch, rows, logprobs, entropy):
        """Loss of each token, the policy's part of it, the ratio and the KL: each (rows, codes). Edit or
        override freely."""
        policy_losses, ratio = policy_loss(
            logprobs, batch.logprobs[rows], batch.advantages[rows, None], LOSS_TYPE, CLIP_RANGE,
            CLIP_RANGE_HIGH)
        policy_losses = batch.weights[rows, None] * policy_losses
        kl = batch.weights[rows, None] * kl_loss(logprobs, batch.ref_logprobs[rows])
        return policy_losses + KL_COEF * kl - ENTROPY_COEF * entropy, policy_losses, ratio, kl

    @torch.no_grad()
    def sync_reference(self):
        """Move the reference towards the actor every REFERENCE_SYNC_STEPS steps."""
        done = self.run.step + 1 - self.state.begin
        if REFERENCE_SYNC_STEPS and done % REFERENCE_SYNC_STEPS == 0:
            for ref, parameter in zip(self.reference.parameters(), self.actor.parameters()):
                ref.lerp_(parameter, REFERENCE_SYNC_ALPHA)

    # ------------------------------------------------------------ evaluation and what is logged

    def evaluate(self, rows=None):
        """Metrics of the EVAL_BEAMS best items for each row (default: validation). In the stage of GRPO also
        reward, of the GROUP_SIZE best as if they were a group, and reward_sampled, of samples that have their
        own random stream. Override to add yours."""
        rows = self.valid_rows if rows is None else rows
        lists = best_items(self.actor, self.trie, rows, EVAL_BEAMS, self.pad_id)
        metrics = list_metrics(lists, rows, self.popularity)
        if self.state.stage == "rl":
            metrics |= self.reward_metrics(rows, lists)
        return metrics

    def reward_metrics(self, rows, lists):
        """reward with its parts and reward@1, of the best of lists (rows, EVAL_BEAMS); reward_sampled."""
        every = [row for row in rows for _ in range(GROUP_SIZE)]
        scores, parts = self.rewards_of(every, lists[:, :GROUP_SIZE].flatten())
        metrics = {"reward": scores.mean().item(), "reward@1": scores[::GROUP_SIZE].mean().item()}
        metrics |= {f"reward/{name}": values.mean().item() for name, values in parts.items()}
        generator = torch.Generator().manual_seed(SEED + 1)
        uniform = draw_uniform(self.trie, len(rows), GROUP_SIZE, "sample", True, generator)
        batch = candidates(self.actor, self.trie, rows, GROUP_SIZE, "sample", self.pad_id, uniform)
        metrics["reward_sampled"] = self.rewards_of(batch.rows, batch.items)[0].mean().item()
        return metrics

    def evaluate_sft(self):
        """evaluate(); the best policy so far is kept in the reference, whatever happens to best/."""
        metrics = self.evaluate()
        self.state.sft_waited += 1
        if metrics["ndcg@10"] > self.state.sft_best:
            self.state.sft_best = metrics["ndcg@10"]
            self.state.sft_waited = 0
            copy_weights(self.actor, self.reference)
        return metrics

    def record_sft(self, metrics):
        metrics = {"epoch": self.state.epoch, **metrics}
        line = "SFT, epoch {epoch}: loss:{policy_loss:.4f} E:{entropy:.3f} LR:{learning_rate:.2e}"
        self.run.record(metrics, self.tokens, [], line.format(**metrics))

    def record(self, batch, metrics):
        """The step's metrics, a few of its candidates and its line on the terminal, for the run to write."""
        metrics = {
            "epoch": self.state.epoch, **metrics, "reward": batch.scores.mean().item(),
            **{f"reward/{name}": values.mean().item() for name, values in batch.parts.items()},
            "advantage": batch.advantages.abs().mean().item(),
            "zero_variance_groups": flat_groups(batch.scores),
            "group_probability": batch.logprobs.sum(1).exp().mean().item() * GROUP_SIZE}
        line = ("GRPO, epoch {epoch}: PL:{policy_loss:.4f} R:{reward:.3f} A:{advantage:.2f} "
                "E:{entropy:.3f} KL:{kl:.4f} LR:{learning_rate:.2e}").format(**metrics)
        self.run.record(metrics, batch.response_ids.numel(), sample_records_of(batch, self.catalogue), line)

    def recommend(self, history, k=10):
        """The k items of highest probability after a history (items, the oldest first), best first: [{"item",
        "title", "codes", "probability"}], by the best policy as in STAGE=recommend."""
        row = self.prompter.row_of(history, "recommend")
        width = max(k, min(EVAL_BEAMS, len(self.catalogue.items)))
        return recommendations(best_policy(self), self.trie, self.catalogue, row, k, width, self.pad_id)

    # ------------------------------------------------------------ beside the algorithm

    def headline(self):
        name = f"{self.actor.config.model_type}: {size_of(self.actor)} on {self.device}"
        items = f"{len(self.catalogue.items)} items of {self.trie.depth} codes"
        rows = f"{len(self.train_rows)} rows to train on, {len(self.valid_rows)} for validation"
        stages = f"stage {self.state.stage}, steps {self.run.step} to {self.run.total_steps}"
        return f"{name}, {DTYPE}; {items}; {rows}, {len(self.test_rows)} for the test; {stages}; {OUTPUT_DIR}"

    def prepare_baselines(self):
        """Popularity, Markov counts and SASRec, of the rows that the model is trained on, and their lists for
        validation."""
        markov = Markov(self.train_rows, self.popularity)
        self.baselines = {"popularity": Popularity(self.popularity), "markov": markov}
        self.sasrec = None
        if SASREC_EPOCHS:
            self.sasrec = trained_sasrec(self.train_rows, self.valid_rows, len(self.popularity), self.run)
            self.baselines["sasrec"] = self.sasrec
        self.levels = {}  # of validation, for the pictures
        for name, model in self.baselines.items():
            lists = top_items(model, self.valid_rows)
            self.levels[name] = list_metrics(lists, self.valid_rows, self.popularity)
            if self.rewarded:
                every = [row for row in self.valid_rows for _ in range(GROUP_SIZE)]
                scores, _ = self.rewards_of(every, lists[:, :GROUP_SIZE].flatten())
                self.levels[name]["reward"] = scores.mean().item()
            found = self.levels[name]
            shown = f"HR@10 {found['hr@10']:.4f}, NDCG@10 {found['ndcg@10']:.4f}"
            self.run.say(f"{name:10} on validation: {shown}")

    def test(self):
        """Baselines, SFT's best policy and GRPO's on the test rows: a table, eval_test.json, the picture."""
        rows = self.test_rows
        if not rows:
            return
        lists = {name: top_items(model, rows) for name, model in self.baselines.items()}
        policies = {}
        if self.state.stage == "sft" or not REFERENCE_SYNC_STEPS:
            policies["sft"] = self.reference
        if self.state.stage == "rl":
            policies["grpo"] = best_policy(self)
        for name, model in policies.items():
            with without_adapter(model):
                lists[name] = best_items(model, self.trie, rows, EVAL_BEAMS, self.pad_id)
        figures = {}
        for name, some in lists.items():
            figures[name] = self.test_figures(rows, some)
        if {"sft", "grpo"} <= set(lists):
            figures["grpo_minus_sft"] = differences(figures["grpo"].pop("rows"), figures["sft"].pop("rows"))
        for figure in figures.values():
            figure.pop("rows", None)
        if self.values is not None:
            figures["possible"] = {"value": best_value(self.values, rows, GROUP_SIZE)}
        for line in table_lines(figures):
            self.run.say(line)
        if rank() > 0:
            return
        write_json(self.run.folder / "eval_test.json", {"rows": len(rows), **figures})
        records = read_metrics(self.run.folder / "logs/metrics.jsonl")
        draw_learning(records, self.run.folder, self.run.title, self.levels, figures)

    def test_figures(self, rows, lists):
        """list_metrics() and, where there is a reward, that of the GROUP_SIZE first; with intervals."""
        found = list_metrics(lists, rows, self.popularity)
        per_row = {"hr@10": hits(lists, rows, 10), "ndcg@10": gains(lists, rows, 10)}
        if self.rewarded:
            every = [row for row in rows for _ in range(GROUP_SIZE)]
            scores, parts = self.rewards_of(every, lists[:, :GROUP_SIZE].flatten())
            per_row["reward"] = scores.view(-1, GROUP_SIZE).mean(1).cpu()
            found["reward"] = scores.mean().item()
            found |= {f"reward/{name}": values.mean().item() for name, values in parts.items()}
        found["intervals"] = {key: bootstrap_interval(values) for key, values in per_row.items()}
        return {**found, "rows": per_row}


# ==== block: language models
# Loading, sampling, scoring, and the one optimizer step they all share. The plain ways come first; what is
# faster and not as plain comes last and says what it measured. Edit it freely in a copy of your own; the
# repository keeps it byte-identical in every trainer of language models (tests/blocks.py).
import bisect
import copy
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
from torch.distributed.tensor import DTensor, distribute_tensor
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
    model.register_state_dict_post_hook(gather_weights)
    return model


def full(tensor):
    """A tensor that is perhaps sharded, whole; then all processes call this, in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_for_first(tensor):
    """full() on the CPU of the first process, which writes it; the others keep nothing of it."""
    if not isinstance(tensor, DTensor):
        return tensor
    tensor = tensor.full_tensor()
    return tensor.cpu() if rank() == 0 else None


def gather_weights(model, state, *_):
    """A hook: state_dict() of a sharded model has whole tensors, on the CPU of the first process, which
    writes them; all processes call it."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    gathered = {}  # tied weights stay one tensor
    for key, x in state.items():
        like = id(parameters.get(key, x))
        if like not in gathered:
            gathered[like] = full_for_first(x)
        state[key] = gathered[like]


def gather_moments(optimizer, saved):
    """As gather_weights(), of its optimizer."""
    for number, state in saved["state"].items():
        saved["state"][number] = {key: full_for_first(x) for key, x in state.items()}


def deal_moments(optimizer, saved):
    """A hook: load_state_dict() takes what gather_moments() gave, each process its part."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, state in saved["state"].items():
        like = parameters[number]
        for key, x in state.items():
            if isinstance(like, DTensor) and x.dim() and x.shape == like.shape:
                mesh, placements = like.device_mesh, like.placements
                state[key] = distribute_tensor(x.to(like.device), mesh, placements, src_data_rank=None)


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
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=WEIGHT_DECAY, fused=fused)
    optimizer.register_state_dict_post_hook(gather_moments)
    optimizer.register_load_state_dict_pre_hook(deal_moments)
    return optimizer


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


_WAYS = ("sampled_by", "scored_by")


def get_ways(model):
    """What check_models() found."""
    return {key: getattr(model, key) for key in _WAYS if hasattr(model, key)}


def set_ways(model, ways):
    for key in _WAYS:
        if key in ways:
            setattr(model, key, ways[key])


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
# What a trainer does beside its algorithm: constants and errors, processes, OUTPUT_DIR and its lock,
# checkpoints and resume, logs, plots, signals. Edit it freely in a copy of your own; the repository keeps it
# byte-identical in every trainer: change it in one, `python tests/blocks.py FILE` copies it to the others.
import ast
import difflib
import hashlib
import io
import json
import math
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
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
from tqdm import tqdm


class UserError(Exception):
    """Something the user can mend, said in one sentence; the program ends with exit code 2."""


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def run_main(trainer_class):
    """Run the trainer as a program: exit code 0, 2 for what the user can mend, 130 or 143 after Ctrl-C or
    SIGTERM. What a reward function raised, and what we did not foresee, keeps its traceback and exits with 1.
    An error of one process ends all of them; the first that fails prints it."""
    try:
        apply_overrides(sys.argv[1:])
        trainer = trainer_class()
        trainer.train()
        code = 128 + trainer.run.stop_signal if trainer.run.stop_signal else 0
    except (KeyboardInterrupt, EOFError):  # Ctrl-C or Ctrl-D where a question was asked
        code = 130
    except Exception as error:
        text = sentence_of(error)
        if text is None and not dist.is_initialized():
            raise
        code = 1 if text is None else 2
        if fails_first():
            print(f"\n{Path(__file__).name}: {text}" if text else traceback.format_exc(), file=sys.stderr)
    if dist.is_initialized():  # at once: others may wait in a collective, and gloo's threads may abort us
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def sentence_of(error):
    """What the user can do about an error; None where a traceback says more."""
    if hasattr(error, "__notes__"):  # a reward function's
        return None
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or OUTPUT_DIR}: {error.strerror or error}"
    if type(error).__module__.startswith("wandb"):
        return f"USE_WANDB = True: {first_line(error)}"
    if isinstance(error, dist.DistError) or "/gloo/" in str(error):  # gloo has no type for it
        return f"another process of this run is gone, or was silent ({first_line(error)})"
    on_cpu = "DefaultCPUAllocator" in str(error)  # nor torch for this
    if on_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return f"out of memory ({first_line(error)}): lower BATCH_SIZE, GROUP_SIZE or MAX_NEW_TOKENS"


def fails_first():
    """True on the first process of the run that calls it; before they have met, on process 0."""
    if not _STORE:
        return rank() == 0
    with suppress(RuntimeError):  # the store may be gone with the process that held it
        return _STORE[0].compare_set("failed", "", str(rank())).decode() == str(rank())
    return False


def constants():
    """Every constant of this file, as it is now."""
    return {k: v for k, v in globals().items() if k.isupper() and not k.startswith("_") and k != "ROOT"}


def plain_name(value):
    """What stands in JSON for a function or an object, the same from run to run."""
    return getattr(value, "__name__", type(value).__name__)


def settings():
    """What makes a run what it is, as JSON has it: constants, this file, and the threads of a process, on
    which the last bits of sums depend."""
    values = {**constants(), "OMP_NUM_THREADS": torch.get_num_threads()}
    values[Path(__file__).name] = file_digest(__file__)["sha256"][:12]
    return json.loads(json.dumps(values, default=plain_name))


def apply_overrides(words):
    """Set constants from KEY=VALUE words; a value has the type that its constant has in the file."""
    annotate = globals().get("__annotate__")  # Python 3.14 makes annotations when asked (PEP 649)
    annotations = annotate(1) if annotate else __annotations__
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in constants():
            near = difflib.get_close_matches(key.upper(), constants(), 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{word!r} is not KEY=VALUE with a constant of this file{hint}")
        kind = str(annotations.get(key, type(globals()[key]).__name__))  # such as "int | None"
        value = text
        if "str" not in kind or "None" in kind and text == "None":
            with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                value = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
        if "float" in kind and type(value) is int:
            value = float(value)
        if type(value).__name__.replace("NoneType", "None") not in kind.split(" | "):
            takes = f"{key} takes {kind.replace('|', 'or')}, as in {key}={globals()[key]}"
            raise UserError(f"{key}={text} does not fit: {takes}")
        globals()[key] = value


def check_constants():
    """Refuse numbers out of range, unknown words and empty texts before anything is loaded or written."""
    for keys, allowed in _LIMITS.items():
        for key in keys.split():
            value = globals()[key]
            if isinstance(allowed, list) and value is not None and value not in allowed:
                raise UserError(f"{key} = {value!r} is unknown: it takes {' or '.join(allowed)}")
            if isinstance(allowed, tuple) and value is not None and not allowed[0] <= value <= allowed[1]:
                raise UserError(f"{key} = {value} is out of range: it takes {allowed[0]:g} to {allowed[1]:g}")
    for key, value in constants().items():
        if isinstance(value, str) and not value.strip():
            raise UserError(f"{key} = {value!r}: it takes a text that is not empty")


def load_pretrained(auto_class, path, constant, **options):
    """from_pretrained() with one sentence when that fails; `constant` is what the user set to `path`."""
    try:
        return auto_class.from_pretrained(path, trust_remote_code=False, **options)
    except Exception as error:  # transformers, safetensors and tokenizers raise many kinds
        why = "cannot be loaded" if Path(path).exists() else "no such folder, and the hub gave no such model"
        raise UserError(f"{constant} = {str(path)!r}: {why} ({first_line(error)})") from None


def find_device():
    """The device that DEVICE names; auto takes the best there is, each process of a machine its own GPU. The
    processes that torchrun began meet here."""
    join_processes()
    mps = torch.backends.mps.is_available() and processes() == 1  # gloo does not know it
    best = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    name = best if DEVICE == "auto" else DEVICE
    if name == "cuda" and processes() > 1:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError):
        raise UserError(f"DEVICE = {name!r} is not here; auto takes {best}, one for each process") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def seed_everything(seed):
    """Seed every generator and ask for deterministic kernels: without them gradients that meet at one index
    (a prompt shared by its responses) are added in whatever order the threads come, on the CPU too."""
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
    """One value for the state of all generators."""
    state = get_rng_state()
    text = repr((state["python"], state["numpy"])).encode()
    return hashlib.sha256(text + state["torch"].numpy().tobytes()).hexdigest()


# ---------------------------------------------------------------- processes

def rank():
    """Which of the processes this is, from 0, which alone asks, writes and prints."""
    return int(os.environ.get("RANK", 0))


def processes():
    """How many of them make this run: torchrun --nproc_per_node=N."""
    return int(os.environ.get("WORLD_SIZE", 1))


_STORE = []  # by which the processes met
_DEALING = []  # not empty: this process is at its share, which is its own alone


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
    options = {"timeout": timedelta(seconds=PROCESS_TIMEOUT), "world_size": processes(), "rank": rank()}
    store = next(dist.rendezvous("env://", timeout=options["timeout"]))[0]
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":  # several machines count restarts each for itself
        # torchrun keeps its store over a restart, with the addresses of processes that are gone
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    _STORE.append(store)
    dist.init_process_group(backend, store=store, **options)
    first, *others = exchange(settings())
    for number, other in enumerate(others, 1):
        if differ := [name for name in first if other.get(name) != first[name]]:
            raise UserError(f"process {number} has another {differ[0]} than process 0: make them the same")


def exchange(value=None):
    """What every process gives, a list by rank: plain types and tensors, each on the own device."""
    if not dist.is_initialized():
        return [value]
    data = io.BytesIO()
    torch.save(value, data)
    everyone = [None] * processes()
    dist.all_gather_object(everyone, data.getvalue())

    def here(storage, location):
        return storage.cuda() if location.startswith("cuda") else storage

    return [torch.load(io.BytesIO(x), map_location=here, weights_only=True) for x in everyone]


def first_says(function):
    """What function() gives to the first process, which alone calls it; plain types or tensors."""
    return exchange(function() if rank() == 0 else None)[0]


def dealt(parts, work):
    """[work(part)] in the order of the parts: each is done by one process and told to all."""
    parts = list(parts)
    if _DEALING or processes() == 1:
        return [work(part) for part in parts]
    _DEALING.append(work)
    mine = [work(part) for part in parts[rank()::processes()]]
    _DEALING.pop()
    everyone = exchange(mine)
    return [everyone[i % processes()][i // processes()] for i in range(len(parts))]


# ---------------------------------------------------------------- files

def fsync(path):
    handle = os.open(path, os.O_RDONLY)  # works for folders too
    os.fsync(handle)
    os.close(handle)


def file_digest(path):
    with open(path, "rb") as file:
        return {"size": os.path.getsize(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_whole(path, fill, folder=False):
    """fill(tmp) writes a file, or a folder's files, which get a manifest; then fsync and rename: `path` is
    there whole or not at all. What is there already is replaced; killed between a folder's two renames,
    restore_folder() puts the old one back."""
    tmp = path.with_name(path.name + ".tmp")
    old = path.with_name(path.name + ".old")
    shutil.rmtree(tmp, ignore_errors=True)
    try:
        if folder:
            tmp.mkdir(parents=True)
        fill(tmp)
        if folder:
            files = [p for p in sorted(tmp.rglob("*")) if p.is_file()]
            digests = {str(p.relative_to(tmp)): file_digest(p) for p in files}
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
        why = "the disk is full" if shutil.disk_usage(path.parent).free < 2**26 else first_line(error)
        todo = "make room and start again, training goes on from the last good checkpoint"
        raise UserError(f"{path} could not be saved: {why}; {todo}") from None


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
        for name in ("training_state.pt", *manifest):
            if file_digest(folder / name) != manifest[name]:
                return f"{name} is not what was saved"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return first_line(error)


def list_checkpoints(output_dir):
    """[(N, step_N/)] of a run, oldest first."""
    return sorted((int(p.name[5:]), p) for p in Path(output_dir).glob("step_*") if p.name[5:].isdecimal())


def choose_checkpoint(resume, output_dir, say):
    """The newest whole checkpoint of a run, or the one that RESUME names, or None to start afresh; asks at a
    terminal when resume is "ask"."""
    named = resume not in ("ask", "yes", "no")
    run = resume if named else output_dir
    checkpoints = list_checkpoints(run) if resume != "no" else []
    if named and not checkpoints:
        checkpoints = [(0, Path(resume))]
    for _, folder in reversed(checkpoints):
        if fault := checkpoint_fault(folder):
            say(f"WARNING: skipping the broken checkpoint {folder}: {fault}")
            continue
        say(f"Found checkpoint: {folder}")
        if resume != "ask" or processes() > 1 or not sys.stdin.isatty():
            say("Resuming from it (RESUME=no starts afresh)")
            return folder
        while (reply := input("Resume training from it? (y/n): ").strip().lower()[:1]) not in ("y", "n"):
            pass
        return folder if reply == "y" else None
    if checkpoints:
        todo = "put a good copy back, or start afresh with RESUME=no, which keeps the old run"
        raise UserError(f"no checkpoint in {run} is whole: {todo}")


def move_aside(paths, output_dir, say):
    """Keep what a new start would overwrite: move it to OUTPUT_DIR/old_<time>/."""
    if paths:
        old = Path(output_dir) / time.strftime("old_%Y%m%d_%H%M%S")
        old.mkdir(exist_ok=True)
        for path in paths:
            os.rename(path, old / path.name)
        say(f"Moved {', '.join(sorted(p.name for p in paths))} of an earlier run to {old}")


def run_facts(device):
    """Versions, git commit and device, for training_config.json."""
    words = ["git", "-C", ROOT, "rev-parse", "HEAD"]
    git = shutil.which("git") and subprocess.run(words, capture_output=True, text=True).stdout.strip()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} ({platform.machine()})"
    return {
        "python": platform.python_version(), "torch": torch.__version__, "git_commit": git or None,
        "transformers": transformers.__version__, "processes": processes(),
        "threads": torch.get_num_threads(), "device": name}


def learning_rate_scale(step, total, warmup, kind, halvings):
    """Factor of the learning rate at step (from 0): linear warm-up, then the schedule; None stays at 1."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return {None: 1.0, "linear": 1 - progress, "cosine": cosine, "plateau": 0.5 ** halvings}[kind]


def read_metrics(path):
    """The records of metrics.jsonl; a line that is none, by a hand's or a disk's doing, is left out."""
    records = []
    for line in Path(path).read_text(errors="replace").splitlines():
        with suppress(ValueError):
            records.append(json.loads(line))
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
    figure.subplots_adjust(0.055, 0.5 * inch, 0.99, 1 - 0.6 * inch, wspace=0.22, hspace=0.25)
    figure.suptitle(title, y=1 - 0.2 * inch)
    for number, (label, keys) in enumerate(panels, 1):
        label += " (nats per token)" * (label in ("entropy", "kl", "approx_kl"))
        axis = figure.add_subplot(height, 3, number, xlabel="training step", ylabel=label)
        axis.grid(alpha=0.3)
        axis.ticklabel_format(axis="y", scilimits=(-3, 4), useOffset=False)  # short labels stay inside
        for color, (key, phase) in enumerate((key, phase) for key in keys for phase in ("train", "eval")):
            plot_metric(axis, records, phase, key, f"C{color}", key)
        if axis.lines:
            axis.legend(fontsize=8)
    write_whole(path, partial(figure.savefig, format="png", dpi=100))


class Run:
    """One run in OUTPUT_DIR: its lock, log files, bar, plots, checkpoints, signals and counters. name is that
    of the plots; `files` are what a new start moves aside, beside its own; best_by are the metrics of an
    evaluation that best/ and patience follow, the first that is there; later_of_equal: of equally good
    policies best/ keeps the later; `logs` are further files in logs/, for write()."""

    saved = (  # of its attributes, in a checkpoint
        "step", "evaluated_at", "best_value", "patience_value", "evals_since_best", "halvings", "skipped",
        "log_lines", "wandb_id", "evaluation")

    def __init__(self, name, resume, device, files=(), best_by=("reward",), later_of_equal=False, logs=()):
        self.name = name
        self.device = device
        self.files = ("logs", "step_*", "best", "training_*", f"{name}_*.png", *files)
        self.best_by = best_by
        self.later_of_equal = later_of_equal
        self.logs = dict.fromkeys(("metrics.jsonl", "samples.jsonl", *logs))  # by name, open while training
        self.log_lines = {}  # how many each had when the checkpoint was saved
        self.log = None  # of the texts that say() prints
        self.unlogged = []  # those from before it was there
        self.step = 0  # steps done
        self.total_steps = 0
        self.begin_part()
        self.evaluation = {}  # the last one's metrics
        self.skipped = 0  # optimizer steps in a row that were not finite
        self.times = {}
        self.wandb = self.wandb_id = None
        self.signal = None  # that this process has got
        self.stop_signal = None  # that all have agreed to stop by
        self.last_word = None  # what is said at the end in place of its own
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.folder = Path(OUTPUT_DIR)
        of_process = {"thread_local": False, "is_singleton": True}  # a notebook may make another trainer
        self.lock = filelock.FileLock(self.folder / ".lock", blocking=False, **of_process)
        chosen = ""
        if rank() == 0:
            if self.folder.is_dir():
                self.take_lock()
                restore_folder(self.folder / "best")
            chosen = str(choose_checkpoint(resume or RESUME, OUTPUT_DIR, self.say) or "")
        chosen = exchange(chosen)[0]
        self.checkpoint = Path(chosen) if chosen else None  # to go on from
        seed_everything(SEED)

    def begin_part(self):
        """Another part of the training begins: best/ and patience know nothing of the one before."""
        self.evaluated_at = -1  # the step of the last evaluation
        self.best_value = -math.inf  # the highest yet, whose policy is in best/
        self.patience_value = -math.inf  # the last that was better by more than EARLY_STOPPING_THRESHOLD
        self.evals_since_best = 0  # evaluations since then
        self.halvings = 0  # of the learning rate, by LR_SCHEDULER_TYPE = "plateau"

    def take_lock(self):
        """Released when the process exits, even after SIGKILL."""
        try:
            self.lock.acquire()
        except filelock.Timeout:
            todo = "wait for it, stop it, or set another OUTPUT_DIR"
            raise UserError(f"OUTPUT_DIR = {OUTPUT_DIR!r} is in use by another run: {todo}") from None

    def keep(self, state, models, optimizers, tokenizer, merged=None):
        """What a checkpoint holds beside the run's counters: state, a namespace of numbers, texts and
        tensors; models and optimizers by their folder's name; the tokenizer, if any, is saved beside each
        model. Where a checkpoint is resumed from, state and optimizers become what it holds. best/ keeps
        merged(policy)."""
        self.state = state
        self.models = models
        self.optimizers = optimizers
        self.tokenizer = tokenizer
        self.merged = merged
        if self.checkpoint:
            self.load_checkpoint(self.checkpoint)

    @contextmanager
    def opened(self, headline):
        """The whole of training, files open, signals caught; at the end a checkpoint."""
        self.signal = None
        self.open_files(headline)
        handlers = {n: signal.signal(n, self.on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
            self.listen()
            self.save()
            self.say_the_end()
            exchange()  # who ends first would take the others with it
        finally:
            self.bar.close()
            self.lock.release(force=True)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def on_signal(self, number, frame):
        """Ctrl-C and SIGTERM end the run after the current step; a second Ctrl-C leaves at once."""
        if self.signal and number == signal.SIGINT:
            os._exit(130)
        self.signal = number
        if rank() == 0:
            print("\nStopping after this step, then saving; Ctrl-C again leaves at once", flush=True)

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
        self.write("samples.jsonl", [json.dumps({"step": self.step, **sample}) for sample in samples])
        started, first = self.clock
        left = (time.perf_counter() - started) / (self.step - first) * (self.total_steps - self.step)
        self.show(line, f"step {self.step}/{self.total_steps}, {tqdm.format_interval(left)} left")

    def write_metrics(self, phase, metrics):
        metrics = {k: v if math.isfinite(v) else None for k, v in metrics.items()}  # NaN is not JSON
        self.write("metrics.jsonl", [json.dumps({"phase": phase, "step": self.step, **metrics})])
        if self.wandb:
            self.wandb.log({f"{phase}/{key}": value for key, value in metrics.items()}, step=self.step)

    def write(self, name, lines):
        """Lines to one of the logs that a resumed run goes on with."""
        if rank() == 0:
            self.logs[name].writelines(line + "\n" for line in lines)
            self.logs[name].flush()

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
        if terminal:
            tqdm.write(text)
            sys.stdout.flush()
        self.unlogged.append(text)
        if self.log:
            print(*self.unlogged, sep="\n", file=self.log, flush=True)
            self.unlogged = []

    def count_skipped(self, finite, ids):
        """After an optimizer step that was taken or, its loss or gradient not finite, skipped: then its
        prompts are named, and five in a row end the run."""
        self.skipped = 0 if finite else self.skipped + 1
        if not finite:
            what = f"step {self.step + 1}: loss or gradient not finite, skipped"
            self.say(f"WARNING: {what}; prompts {' '.join(sorted(set(ids)))}")
        if self.skipped == 5:
            raise UserError("five optimizer steps in a row were not finite: lower LEARNING_RATE")

    def evaluate(self, evaluate):
        """Log what evaluate() finds; keep the policy of the highest value in best/; count how many are not
        better by EARLY_STOPPING_THRESHOLD than the last one that was."""
        started = time.perf_counter()
        metrics = {key: x.item() if hasattr(x, "item") else x for key, x in (evaluate() or {}).items()}
        metrics = exchange(metrics)[0]  # what follows from them is the same on all
        self.evaluated_at = self.step
        self.evaluation = metrics
        if not metrics:
            return
        self.write_metrics("eval", {**metrics, "seconds/evaluate": time.perf_counter() - started})
        shown = (f"{k} {v:,}" if isinstance(v, int) else f"{k} {v:.3f}" for k, v in metrics.items())
        self.say(f"step {self.step}, held out: " + "  ".join(shown))
        value = next((metrics[key] for key in self.best_by if key in metrics), None)
        if value is None:
            raise UserError(f"evaluate() must give {' or '.join(self.best_by)}: best/ and patience follow it")
        self.evals_since_best += 1
        if value > self.patience_value + EARLY_STOPPING_THRESHOLD:
            self.patience_value = value
            self.evals_since_best = 0
        elif self.evals_since_best % PLATEAU_PATIENCE == 0:
            self.halvings += 1
        if value > self.best_value or self.later_of_equal and value == self.best_value:
            self.best_value = value
            policy = self.models["policy"]
            policy = self.merged(policy) if self.merged else policy
            fill = partial(self.fill_best, metrics, policy, policy.state_dict())
            if rank() == 0:
                write_whole(self.folder / "best", fill, folder=True)

    def save(self):
        """Write step_N/ whole or not at all, prune, redraw the plots."""
        folder = self.checkpoint = self.folder / f"step_{self.step}"  # train() again goes on from it
        if first_says(folder.exists):
            return
        # by all processes: see gather_weights()
        weights = {name: model.state_dict() for name, model in self.models.items()}
        optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        if rank() > 0:
            return
        self.say(f"Saving {folder}")
        write_whole(folder, partial(self.fill_checkpoint, weights, optimizers), folder=True)
        for _, old in list_checkpoints(OUTPUT_DIR)[:-KEEP_LAST_N_CHECKPOINTS]:
            shutil.rmtree(old)
        self.draw_plots()

    def fill_checkpoint(self, weights, optimizers, folder):
        for name, model in self.models.items():
            self.save_model(model, folder / name, weights[name])
        for name, file in self.logs.items():
            fsync(file.name)
            self.log_lines[name] = Path(file.name).read_bytes().count(b"\n")
        run = {key: getattr(self, key) for key in self.saved}
        saved = {"trainer": self.name, "run": run, "state": vars(self.state), "optimizers": optimizers}
        torch.save({**saved, "rng": get_rng_state()}, folder / "training_state.pt")
        (folder / "config.json").write_text(json.dumps(settings(), indent=1))

    def fill_best(self, metrics, policy, weights, folder):
        self.save_model(policy, folder / "policy", weights)
        (folder / "metrics.json").write_text(json.dumps({"step": self.step, **metrics}, indent=1))

    def save_model(self, model, folder, weights=None):
        model.save_pretrained(folder, state_dict=weights)
        if self.tokenizer:
            self.tokenizer.save_pretrained(folder)

    def load_checkpoint(self, folder):
        """State, optimizers and generators as they were; the models were loaded from the same folder."""
        prompts = getattr(self.state, "prompts", None)
        try:  # weights_only: nothing in the file is run
            saved = torch.load(folder / "training_state.pt", map_location="cpu", weights_only=True)
            before = json.loads((folder / "config.json").read_text())
            if saved["trainer"] != self.name or saved["state"].keys() != vars(self.state).keys():
                raise ValueError("it is no state of this trainer")
            if saved["state"]["prompts"] != prompts:
                raise ValueError(f"of {saved['state']['prompts']} training prompts, there are {prompts}")
            vars(self).update({key: saved["run"][key] for key in self.saved})
            vars(self.state).update(saved["state"])
            for name, optimizer in self.optimizers.items():
                options = [dict(group) for group in optimizer.param_groups]
                optimizer.load_state_dict(saved["optimizers"][name])
                for group, now in zip(optimizer.param_groups, options):
                    group.clear()
                    group.update(now)  # a changed constant counts from here on
            set_rng_state(saved["rng"])
        except Exception as error:
            todo = f"take one that this version of {Path(__file__).name} made of the same data, or RESUME=no"
            raise UserError(f"{folder} cannot be used ({first_line(error)}): {todo}") from None
        for key, value in settings().items():
            if before.get(key) != value and key not in ("RESUME", "OUTPUT_DIR", "STAGE"):
                self.say(f"Changed since the checkpoint: {key} was {before.get(key)!r}, is {value!r}")

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
        """Move aside what a new start or a future given up has left, cut the logs back, open the files."""
        logs = self.folder / "logs"
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.lock.is_locked:
            self.take_lock()
        if USE_WANDB:
            import wandb

            options = {"project": WANDB_PROJECT, "dir": OUTPUT_DIR, "config": constants()}
            self.wandb = wandb.init(**options, id=self.wandb_id, resume="allow")
            self.wandb_id = self.wandb.id
        for stale in self.folder.glob("*.tmp"):  # what a kill left half written
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        if self.checkpoint and self.checkpoint.resolve().parent == self.folder.resolve():
            # a checkpoint beyond this one, broken or of a future given up, would be found by the next resume
            earlier = [path for step, path in list_checkpoints(OUTPUT_DIR) if step > self.step]
            best = self.folder / "best/metrics.json"
            if earlier and best.exists() and json.loads(best.read_text())["step"] > self.step:
                earlier.append(best.parent)
                self.best_value = -math.inf  # the next evaluation's policy is the best that is left
        else:
            earlier = [path for pattern in self.files for path in self.folder.glob(pattern)]
            self.log_lines = {}
        move_aside(earlier, OUTPUT_DIR, self.say)
        logs.mkdir(exist_ok=True)
        for name in self.logs:  # cut to what they held at the checkpoint: each step stands in them once
            path = logs / name
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            write_whole(path, lambda tmp: tmp.write_bytes(b"".join(lines[:self.log_lines.get(name, 0)])))
            self.logs[name] = open(path, "a")
        self.log = open(logs / time.strftime("training_%Y%m%d_%H%M%S.log"), "a")
        config = {"constants": constants(), **run_facts(self.device)}
        (self.folder / "training_config.json").write_text(json.dumps(config, indent=1, default=plain_name))

    def draw_plots(self):
        """Every metric, and the algorithm's own, from metrics.jsonl alone."""
        records = read_metrics(self.folder / "logs/metrics.jsonl")
        if not records:
            return
        keys = dict.fromkeys(key for record in records for key in record if key not in ("phase", "step"))
        every = self.folder / "training_metrics_detailed.png"
        draw_plot(records, every, f"{self.title}: every metric", [(key, [key]) for key in keys])
        draw_plot(records, self.folder / f"{self.name}_metrics_with_entropy.png", self.title, self.panels)

    def say_the_end(self):
        best = self.folder / "best/policy"
        policy = best if best.exists() else self.checkpoint / "policy"
        seconds = time.perf_counter() - self.started
        why = "Done" if self.step == self.total_steps else "Stopped early"
        end = f"{why} at step {self.step} of {self.total_steps} after {seconds:.0f} s"
        end = self.last_word or f"{end}. Plots: {OUTPUT_DIR}/*.png; policy: {policy}"
        self.say(f"Stopped at step {self.step}: run again to go on" if self.stop_signal else end)
        if self.wandb:
            self.wandb.finish()
# ==== end of block: the run


# ================================================================ the trie of the catalogue, and decoding

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, PreTrainedTokenizerFast


class Trie:
    """All items' codes as flat tensors, a few a level. A level's nodes are its distinct prefixes in lexical
    order, so a node's children are neighbours on the next level: `first` and `count` of a node say where.
    codes (items, depth) of token ids, all rows distinct."""

    def __init__(self, codes, device):
        self.codes = codes.to(device)
        self.depth = codes.shape[1]
        self.first = []  # of each level: (nodes,) its first child's number on the next level
        self.count = []  # (nodes,) how many children
        self.code = []  # (children,) the code that leads to each
        self.below = []  # (children,) items below each
        self.width = []  # the most children that a node has
        paths = [torch.zeros(len(codes), dtype=torch.long)]  # (items,) its node on each level
        for level in range(self.depth):
            prefixes, at, below = codes[:, :level + 1].unique(dim=0, return_inverse=True, return_counts=True)
            parent = torch.zeros(len(prefixes), dtype=torch.long).scatter(0, at, paths[-1])
            count = parent.bincount()
            self.first.append((count.cumsum(0) - count).to(device))
            self.count.append(count.to(device))
            self.code.append(prefixes[:, -1].to(device))
            self.below.append(below.to(device))
            self.width.append(int(count.max()))
            paths.append(at)
        self.paths = torch.stack(paths, 1).to(device)  # (items, depth + 1)
        self.item_at = torch.zeros(len(codes), dtype=torch.long, device=device)  # of a leaf
        self.item_at[self.paths[:, -1]] = torch.arange(len(codes), device=device)
        self.ids = self.codes.unique()  # of tokens that are codes
        self.columns = torch.zeros(int(self.ids.max()) + 1, dtype=torch.long, device=device)
        self.columns[self.ids] = torch.arange(len(self.ids), device=device)  # of each in CodeHead's logits

    def options(self, level, nodes, excluded=None):
        """What may follow the nodes (...) of a level: codes, the nodes they lead to, and which of them are
        there at all, all (..., width). excluded (..., H) are distinct items that may not, -1 for none: a
        prefix is closed when all items below it are excluded."""
        step = torch.arange(self.width[level], device=nodes.device)
        open_ = step < self.count[level][nodes].unsqueeze(-1)
        children = (self.first[level][nodes].unsqueeze(-1) + step).clamp(max=len(self.code[level]) - 1)
        if excluded is not None:
            gone_at = torch.where(excluded >= 0, self.paths[excluded, level + 1], -1)  # (..., H)
            gone = (children.unsqueeze(-1) == gone_at.unsqueeze(-2)).sum(-1)
            open_ = open_ & (gone < self.below[level][children])
        return self.code[level][children], children, open_


class CodeHead(torch.nn.Module):
    """A model's output layer for some ids alone: no logits of words that are no codes. Of a vocabulary of
    32,000 they took most of the time of decoding."""

    def __init__(self, head, ids):
        super().__init__()
        self.head = head
        self.ids = ids

    def forward(self, hidden):
        bias = self.head.bias
        return torch.nn.functional.linear(
            hidden, self.head.weight[self.ids], None if bias is None else bias[self.ids])


@contextmanager
def codes_alone(model, trie):
    """Inside the block the model's logits are those of trie.ids."""
    head = model.get_output_embeddings()
    model.set_output_embeddings(CodeHead(head, trie.ids))
    try:
        yield
    finally:
        model.set_output_embeddings(head)


@torch.no_grad()
def check_head(model, trie, ids):
    """A model whose logits are not its output layer's, one by one, cannot be narrowed to the codes."""
    prompt = torch.tensor([ids], device=model.device)
    wanted = row_logits(model, prompt)[0, -1, trie.ids]
    try:
        with codes_alone(model, trie):
            found = row_logits(model, prompt)[0, -1]
        right = found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-3, rtol=1e-3)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        right = False
    if not right:
        kind = f"a model of the type {model.config.model_type!r}"
        todo = "take one whose logits are a linear layer's"
        raise UserError(f"ACTOR_MODEL = {ACTOR_MODEL!r}: {kind} gives no logits of the codes alone: {todo}")


def excluded_items(rows, device):
    """(rows, H) distinct items of each history, -1 for none; None without EXCLUDE_HISTORY."""
    if not EXCLUDE_HISTORY:
        return None
    return pad_right([sorted(set(row["history"])) for row in rows], -1).to(device)


def decoder_of(model, prompts, steps, pad_id):
    """A decoder of the block "language models", in the way that choose_sampling() found."""
    way = getattr(model, "sampled_by", "grouped")
    if way == "uncached":
        return Uncached(model, prompts, 1, steps, pad_id)
    return Cached(model, prompts, 1, steps, pad_id, way == "grouped" and shared_windows(model) is not None)


@torch.no_grad()
def search(model, trie, prompts, width, pad_id, uniform=None, excluded=None):
    """walk(), with logits of the codes alone."""
    with codes_alone(model, trie):
        return walk(model, trie, prompts, width, pad_id, uniform, excluded)


def walk(model, trie, prompts, width, pad_id, uniform, excluded):
    """`width` items for each prompt (a list of ids), level by level down the trie: their numbers, the
    log-probabilities of their codes and the entropy at each: (prompts, width), twice (prompts, width, depth).
    Each prompt is read once; its cache is expanded to the prefixes that go on.

    uniform None: beam search, best first. A list of (prompts, prefixes, children), a level each: Gumbel
    top-k, a sample without replacement. A list of (prompts, width): with replacement. Where the catalogue has
    fewer items, the rest are -1 with a log-probability of -inf."""
    count = len(prompts)
    decoder = decoder_of(model, prompts, trie.depth, pad_id)
    nodes = torch.zeros(count, 1, dtype=torch.long, device=model.device)
    total = torch.zeros(count, 1, device=model.device)  # log-probability of each prefix
    perturbed = torch.zeros(count, 1, device=model.device)
    logprobs = torch.zeros(count, 1, 0, device=model.device)
    entropies = torch.zeros(count, 1, 0, device=model.device)
    logits = decoder.logits
    for level in range(trie.depth):
        among = None if excluded is None else excluded[:, None]
        codes, children, open_ = trie.options(level, nodes, among)  # (prompts, prefixes, options)
        said = logits.view(count, nodes.shape[1], -1)
        some = constrained_logprobs(said, trie.columns[codes], open_, TEMPERATURE)
        whole = torch.where(total.isfinite(), total, -math.inf).unsqueeze(-1) + some
        options = some.shape[-1]
        if uniform is not None and uniform[level].dim() == 2:
            chosen = draw(some.expand(-1, width, -1), uniform[level])
            parent = torch.arange(width, device=model.device).expand(count, -1) % nodes.shape[1]
            keys = whole.flatten(1)
            chosen = parent * options + chosen
        else:
            keys = whole
            if uniform is not None:
                keys = conditional_gumbels(whole, perturbed.unsqueeze(-1), uniform[level])
            keys = keys.flatten(1)
            chosen = keys.topk(min(width, keys.shape[1])).indices  # (prompts, prefixes of the next level)
            parent = chosen // options
        perturbed = keys.gather(1, chosen)
        total = whole.flatten(1).gather(1, chosen)
        nodes = children.flatten(1).gather(1, chosen)
        tokens = codes.flatten(1).gather(1, chosen)
        at = parent.unsqueeze(-1)
        spread = entropy_of(some).gather(1, parent).unsqueeze(-1)
        entropies = torch.cat([entropies.gather(1, at.expand(-1, -1, level)), spread], 2)
        step = some.flatten(1).gather(1, chosen).unsqueeze(-1)
        logprobs = torch.cat([logprobs.gather(1, at.expand(-1, -1, level)), step], 2)
        if level + 1 < trie.depth:
            first = torch.arange(count, device=model.device)[:, None] * (len(logits) // count)
            # Where the last code is the only one left nothing needs to be computed
            needed = torch.ones_like(nodes) if level + 2 < trie.depth else trie.count[level + 1][nodes] > 1
            rows = needed.flatten().nonzero().squeeze(-1)
            logits = logits.new_zeros(nodes.numel(), logits.shape[-1])
            if len(rows):
                decoder.keep((first + parent).flatten()[rows])
                logits[rows] = decoder.next(tokens.flatten()[rows]).to(logits.dtype)
    items = torch.where(total.isfinite(), trie.item_at[nodes], -1)
    return items, logprobs, entropies


def draw(logprobs, uniform):
    """One of the options for each row by inverting the cumulative distribution, (...): logprobs (..., width),
    uniform (...) in [0, 1)."""
    cumulative = logprobs.double().exp().cumsum(-1)
    found = torch.searchsorted(cumulative, (uniform.double() * cumulative[..., -1]).unsqueeze(-1), right=True)
    last = (logprobs > -math.inf).long().cumsum(-1).argmax(-1, keepdim=True)  # the last that is open
    return torch.minimum(found, last).squeeze(-1)


def draw_uniform(trie, rows, width, how, replacement, generator=None):
    """The random numbers of search() for so many rows, a tensor a level; None for beam search."""
    if how == "beam":
        return None
    prefixes = 1
    found = []
    for options in trie.width:
        shape = (rows, width) if replacement else (rows, prefixes, options)
        found.append(torch.rand(shape, generator=generator))
        prefixes = min(width, prefixes * options)
    return found


def entropy_of(logprobs):
    """Entropy (...) of log-probabilities (..., width), some of them -inf."""
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == -math.inf, 0.0)).sum(-1)


def candidates(model, trie, rows, width, how, pad_id, uniform):
    """`width` candidates for each row, likelier ones first: a batch, its tensors (rows * width, ...), that
    item_logprobs() takes."""
    def some_rows(begin):
        some = rows[begin:begin + BATCH_SIZE]
        noise = None
        if uniform is not None:
            noise = [numbers[begin:begin + BATCH_SIZE].to(model.device) for numbers in uniform]
        with autocast(model):
            prompts = [row["ids"] for row in some]
            items, logprobs, entropies = search(
                model, trie, prompts, width, pad_id, noise, excluded_items(some, model.device))
        order = logprobs.sum(2).argsort(dim=1, descending=True, stable=True)
        at = order.unsqueeze(-1).expand(-1, -1, trie.depth)
        return items.gather(1, order), logprobs.gather(1, at), entropies.gather(1, at)

    found = dealt(range(0, len(rows), BATCH_SIZE), some_rows)
    items, logprobs, entropies = (torch.cat(parts).flatten(0, 1) for parts in zip(*found))
    every = [row for row in rows for _ in range(width)]
    batch = item_batch([row["ids"] for row in every], [[item] for item in items.tolist()], trie, pad_id)
    batch.rows = every
    batch.items = items
    batch.logprobs = logprobs
    batch.entropies = entropies
    batch.excluded = excluded_items(every, model.device)
    return batch


def best_items(model, trie, rows, width, pad_id):
    """The width best items of each row by beam search, best first, (rows, width), -1 where there are none."""
    width_here = min(width, len(trie.codes))
    at_once = max(1, min(64, 2**28 // (4 * len(trie.ids) * width_here)))

    def some_rows(begin):
        some = rows[begin:begin + at_once]
        with autocast(model):
            prompts = [row["ids"] for row in some]
            return search(
                model, trie, prompts, width_here, pad_id, excluded=excluded_items(some, model.device))[0]

    found = dealt(range(0, len(rows), at_once), some_rows)
    return torch.nn.functional.pad(torch.cat(found).cpu(), (0, width - width_here), value=-1)


def item_batch(prompts, items, trie, pad_id):
    """A batch of prompts (lists of ids) and, for each, the items (a list of numbers) that follow it."""
    device = trie.codes.device
    depth = trie.depth
    sizes = torch.tensor([depth * len(some) for some in items], device=device)
    width = int(sizes.max())
    numbers = pad_right(items, 0).to(device)  # (rows, most items)
    return SimpleNamespace(
        prompt_ids=pad_left(prompts, pad_id).to(device),
        prompt_lengths=torch.tensor([len(p) for p in prompts], device=device),
        response_ids=trie.codes[numbers].flatten(1),
        response_lengths=sizes,
        response_mask=(torch.arange(width, device=device) < sizes[:, None]).float(),
        paths=trie.paths[numbers, :depth].flatten(1),  # the node that each code is read at
        children=trie.paths[numbers, 1:].flatten(1),  # and the one it leads to
        excluded=None)


def sft_batch(rows, trie, pad_id, device):
    """A batch of SFT's rows {"prompt", "items", "learn"}; its learn is 1 for the items to learn."""
    batch = item_batch([row["prompt"] for row in rows], [row["items"] for row in rows], trie, pad_id)
    learn = pad_right([row["learn"] for row in rows], False).to(device)
    batch.learn = batch.response_mask * learn.repeat_interleave(trie.depth, 1)
    return batch


def places_after(sft_rows, codes):
    """For each item of codes two lists of places [(row of SFT, where in it)], of what is to be learnt: what
    came after it; where an item stands that shares all its codes but the last, a sibling or itself."""
    after = defaultdict(list)
    siblings = defaultdict(list)
    for row in sft_rows:
        before = [row["first"], *row["items"]]
        for at, learn in enumerate(row["learn"]):
            if learn and before[at] is not None:
                after[before[at]].append((row, at))
                siblings[tuple(codes[row["items"][at]][:-1])].append((row, at))
    return [(after[item], siblings[tuple(some[:-1])]) for item, some in enumerate(codes)]


def stitch(row, after):
    """A row of SFT whose sequence goes on, at each item with the chance SFT_STITCH, as some sequence did
    after the same item: each pair of neighbours is one that was logged, what stands before it is not. With
    few users to learn from, a model remembers them by the items further back. Most pairs to come were never
    logged: an item's siblings count as SFT_SIBLINGS places after it, each as often as it was bought, so they
    come next the more the less is known of the item."""
    if row["first"] is None:
        return row
    last = row["first"]
    source = row
    at = 0
    items = []
    learn = []
    while len(items) < MAX_HISTORY:
        places, siblings = after[last]
        weight = SFT_SIBLINGS if siblings else 0.0
        if (places or weight) and torch.rand(()) < SFT_STITCH:
            if weight and torch.rand(()) * (len(places) + weight) >= len(places):
                places = siblings
            source, at = places[int(torch.randint(len(places), ()))]
        if at == len(source["items"]):
            break
        last = source["items"][at]
        items.append(last)
        learn.append(source["learn"][at])
        at += 1
    return {**row, "items": items, "learn": learn} if any(learn) else row


def item_logprobs(model, trie, batch, rows, temperature):
    """Constrained log-probabilities of the items' codes and the entropy at each: two (rows, R), float32, 0
    after the end."""
    with autocast(model), codes_alone(model, trie):
        logits, mask = response_logits(model, batch, rows)  # (tokens, codes), (rows, R)
    row, token = mask.nonzero(as_tuple=True)
    nodes, children = (x[rows][:, :mask.shape[1]][mask] for x in (batch.paths, batch.children))
    found = []
    for level in range(trie.depth):
        at = (token % trie.depth == level).nonzero().squeeze(-1)
        excluded = None if batch.excluded is None else batch.excluded[rows[row[at]]]
        codes, _, open_ = trie.options(level, nodes[at], excluded)
        logprobs = constrained_logprobs(logits[at], trie.columns[codes], open_, temperature)
        chosen = children[at] - trie.first[level][nodes[at]]
        found.append((at, logprobs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), entropy_of(logprobs)))
    back = torch.cat([at for at, _, _ in found]).argsort()
    zeros = torch.zeros(mask.shape, device=mask.device)
    logprobs, entropy = (torch.cat([part[i] for part in found])[back] for i in (1, 2))
    return zeros.masked_scatter(mask, logprobs), zeros.masked_scatter(mask, entropy)


# ================================================================ catalogue, rows and prompts


class Catalogue:
    """The items of INDEX_FILE with their codes and ITEM_FILE's titles. Items of the same codes are one: items
    (a name each), codes and titles go by its number; number has the names of all."""

    def __init__(self, say):
        index = read_index()
        self.items = []
        self.codes = []
        self.rows = []  # which row of INDEX_FILE each one is
        self.number = {}
        known = {}
        doubles = []
        for row, (item, codes) in enumerate(index.items()):
            codes = tuple(codes)
            if codes in known:
                doubles.append((item, self.items[known[codes]]))
            else:
                known[codes] = len(self.items)
                self.items.append(item)
                self.codes.append(codes)
                self.rows.append(row)
            self.number[item] = known[codes]
        self.size = len(index)
        if doubles:
            named = ", ".join(f"{a} as {b}" for a, b in doubles[:3])
            say(f"WARNING: {len(doubles)} of {self.size} items have the codes of another ({named} ...): each "
                f"pair is one item to the model, and a hit on one counts for both")
        self.titles = read_titles(self) if ITEM_FILE else [""] * len(self.items)


def read_index():
    """{item: [codes]} of INDEX_FILE, checked."""
    where = f"INDEX_FILE = {INDEX_FILE!r}"
    try:
        index = json.loads(read_text(INDEX_FILE, "INDEX_FILE"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({first_line(error)})") from None
    if not isinstance(index, dict) or not index:
        raise UserError(f"{where}: it must be one object of items and their codes, {{item: [code, ...]}}")
    lengths = {}
    for item, codes in index.items():
        right = isinstance(codes, list) and all(isinstance(c, str) and c.strip() for c in codes)
        if not right or not codes:
            has = f"item {item!r} has no codes but {repr(codes)[:60]}"
            raise UserError(f"{where}: {has}: it takes a list of texts")
        for text in (item, *codes):
            read_as("text", text, f"{where}: item {item!r}")
        lengths.setdefault(len(codes), item)
    if len(lengths) > 1:
        (a, one), (b, other) = list(lengths.items())[:2]
        unequal = f"item {one!r} has {a} codes and item {other!r} has {b}"
        raise UserError(f"{where}: {unequal}: all items must have equally many")
    return index


def read_text(path, constant):
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{constant} = {path!r}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{constant} = {path!r}: not UTF-8 ({error.reason} at byte {error.start})") from None


def read_titles(catalogue):
    """The title of each item; lines are codes, title and item, tab between."""
    titles = [""] * len(catalogue.items)
    for number, line in enumerate(read_text(ITEM_FILE, "ITEM_FILE").split("\n"), 1):
        if not line.strip():
            continue
        where = f"ITEM_FILE = {ITEM_FILE!r} line {number}"
        parts = line.split("\t")
        if len(parts) < 3:
            raise UserError(f"{where}: {len(parts)} columns: it takes codes, title and item, tab between")
        item = parts[-1].strip()
        if item not in catalogue.number:
            lacks = f"item {item!r} has no codes in INDEX_FILE"
            raise UserError(f"{where}: {lacks}: add it there, or delete the line")
        titles[catalogue.number[item]] = titles[catalogue.number[item]] or "\t".join(parts[1:-1])
    return titles


def read_rows(path, constant, catalogue, limit=None):
    """[{"id", "user", "sequence"}] of a csv file; sequence: the history's item numbers, then the target's."""
    where = f"{constant} = {str(path)!r}"
    rows = []
    reader = csv.reader(io.StringIO(read_text(path, constant), newline=""), strict=True)
    try:
        names = next(reader, [])
        for column in (USER_COLUMN, HISTORY_COLUMN, TARGET_COLUMN):
            if names.count(column) != 1:
                there = "are two columns" if column in names else "is no column"
                raise UserError(f"{where}: there {there} {column!r}; it has {names}")
        for fields in reader:
            at = f"{where} line {reader.line_num}"
            if fields and len(fields) != len(names):
                unlike = f"{len(fields)} fields where the header has {len(names)}"
                raise UserError(f"{at}: {unlike}; mend or delete it")
            if fields:
                row = read_row_of(dict(zip(names, fields)), at, catalogue)
                rows.append({"id": f"{Path(path).name}:{reader.line_num}", **row})
    except csv.Error as error:
        why = f"not a line of csv ({error})"
        raise UserError(f"{where} line {reader.line_num}: {why}; mend or delete it") from None
    if not rows:
        raise UserError(f"{where}: the data set is empty")
    return rows[:limit]


def read_row_of(record, at, catalogue):
    text = record[HISTORY_COLUMN]
    try:
        history = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        history = None
    if not isinstance(history, (list, tuple)) or not history:
        takes = f"{HISTORY_COLUMN} holds {text[:60]!r}: it takes a list of one item or more, such as [3, 17]"
        raise UserError(f"{at}: {takes}; mend or delete it")
    names = names_of(history, f"{at}: an item of {HISTORY_COLUMN}")
    numbers = [catalogue.number.get(name) for name in names]
    if None in numbers:
        lacks = f"the history's item {names[numbers.index(None)]!r} has no codes in INDEX_FILE"
        raise UserError(f"{at}: {lacks}: add it there, or delete the line")
    target = catalogue.number.get(record[TARGET_COLUMN].strip())
    if target is None:
        outside = f"the target {record[TARGET_COLUMN]!r} is outside the catalogue INDEX_FILE"
        raise UserError(f"{at}: {outside}: add it there, or delete the line")
    return {"user": record[USER_COLUMN], "sequence": [*numbers, target]}


def names_of(history, where):
    """A history's items as texts; they may be numbers."""
    try:
        return [read_as("text", item, where) for item in history]
    except ValueError:
        long = "a number of so many digits is no item"
        raise UserError(f"{where}: {long}; mend or delete it") from None


def transitions(rows, prefixes, say, name):
    """[{"id", "user", "history", "target", "line", "at", "sequence"}]: each row's target and, with prefixes,
    the items of its history too; what stands in several rows of a user (one row's history goes on in the
    next) once. `at` is the target's place in the sequence, which is cut to MAX_HISTORY."""
    found = []
    seen = set()
    cut = sum(len(row["sequence"]) - 1 > MAX_HISTORY for row in rows)
    if cut:
        longer = f"{cut} of {len(rows)} {name} histories are longer than MAX_HISTORY = {MAX_HISTORY}"
        say(f"{longer}: cut from the left")
    for line, row in enumerate(rows):
        sequence = row["sequence"][-MAX_HISTORY - 1:]
        cut = len(row["sequence"]) - len(sequence)
        for at in range(1 if prefixes else len(sequence) - 1, len(sequence)):
            key = (row["user"], tuple(row["sequence"][:cut + at + 1]))  # the same in every window
            if prefixes and key in seen:
                continue
            seen.add(key)
            found.append({
                "id": f"{row['id']}#{at}" if prefixes else row["id"], "user": row["user"], "line": line,
                "at": at, "history": sequence[:at], "target": sequence[at], "sequence": sequence})
    return found


def load_splits(catalogue, say):
    """Training, validation and test rows. A transition of a user that validation or test ask for is not
    trained on, whatever file it stands in and wherever its history is cut."""
    rows = read_rows(TRAIN_FILE, "TRAIN_FILE", catalogue, MAX_TRAIN_ROWS)
    if VALID_FILE is None:
        users = list(dict.fromkeys(row["user"] for row in rows))
        order = torch.randperm(len(users), generator=torch.Generator().manual_seed(0)).tolist()
        held_out = {users[i] for i in order[:math.ceil(VALID_FRACTION * len(users))]}
        held = [row for row in rows if row["user"] in held_out]
        rows = [row for row in rows if row["user"] not in held_out]
        if not rows:
            few = "one user is too few to hold some out"
            raise UserError(f"TRAIN_FILE = {TRAIN_FILE!r}: {few}: set VALID_FILE")
    else:
        held = read_rows(VALID_FILE, "VALID_FILE", catalogue)
    asked = read_rows(TEST_FILE, "TEST_FILE", catalogue) if TEST_FILE else []
    valid = transitions(held, False, say, "validation")
    test = transitions(asked, False, say, "test")
    if MAX_EVAL_ROWS and len(valid) > MAX_EVAL_ROWS:
        valid = [valid[i] for i in torch.linspace(0, len(valid) - 1, MAX_EVAL_ROWS).long().tolist()]
    secret = defaultdict(list)  # {(user, last item, target): histories, as the files have them}
    for row in [*(held[row["line"]] for row in valid), *asked]:
        *history, target = row["sequence"]
        secret[row["user"], history[-1], target].append(history)

    def is_secret(row):
        whole = rows[row["line"]]["sequence"]
        history = whole[:len(whole) - len(row["sequence"]) + row["at"]]
        others = secret.get((row["user"], history[-1], row["target"]), ())
        return any(a[-len(b):] == b[-len(a):] for a, b in ((history, other) for other in others))

    train = transitions(rows, TRAIN_PREFIXES, say, "training")
    kept = [row for row in train if not is_secret(row)]
    if len(kept) < len(train):
        leaked = f"{len(train) - len(kept)} training rows are rows of validation or test"
        say(f"WARNING: {leaked}: left out of training")
    if not kept:
        raise UserError(f"TRAIN_FILE = {TRAIN_FILE!r}: nothing to train on is left beside the other rows")
    if EXCLUDE_HISTORY:
        lost = sum(row["target"] in row["history"] for row in valid)
        stand = f"{lost} of {len(valid)} validation targets stand in their own history"
        say(f"EXCLUDE_HISTORY: {stand}: they are never hit")
    return kept, valid, test


class Prompter:
    """How histories become ids: PROMPT_TEMPLATE, inside the tokenizer's chat template if it has one, around
    the codes of the items. codes (items, depth) are the tokens' ids."""

    def __init__(self, tokenizer, catalogue, model):
        self.tokenizer = tokenizer
        self.catalogue = catalogue
        self.codes = torch.tensor([tokenizer.convert_tokens_to_ids(list(codes)) for codes in catalogue.codes])
        self.lists = self.codes.tolist()
        text = PROMPT_TEMPLATE
        if tokenizer.chat_template:
            turns = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        before, after = text.split("{history}")
        self.head = tokenizer(before, add_special_tokens=not tokenizer.chat_template)["input_ids"]
        if self.head[-1:] == [tokenizer.eos_token_id]:  # some tokenizers end every text
            self.head = self.head[:-1]
        self.tail = tokenizer(after, add_special_tokens=False)["input_ids"] if after else []
        if self.tail and SFT_STITCH:
            stands = f"something stands behind the history: {after!r}"
            raise UserError(f"SFT_STITCH = {SFT_STITCH} needs whole sequences, and {stands}: set it to 0")
        longest = len(self.head) + len(self.tail) + self.codes.shape[1] * (MAX_HISTORY + 1)
        most, why = positions_of(model)
        if longest > most:
            reads = f"reads {most} tokens at most ({why})"
            makes = f"MAX_HISTORY = {MAX_HISTORY} items make {longest}"
            raise UserError(f"ACTOR_MODEL = {ACTOR_MODEL!r} {reads}; {makes}: lower MAX_HISTORY")
        self.most = most

    def ids(self, history):
        return [*self.head, *(code for item in history for code in self.lists[item]), *self.tail]

    def text_ids(self, text):
        return [*self.head, *self.tokenizer(text, add_special_tokens=False)["input_ids"], *self.tail]

    def row_of(self, history, what):
        """A row to recommend for, from items' names."""
        names = names_of(history, f"{what}: an item")
        for name in names:
            if name not in self.catalogue.number:
                raise UserError(f"{what}: item {name!r} has no codes in INDEX_FILE")
        if not names:
            raise UserError(f"{what}: the history is empty; it takes one item or more, such as [3, 17]")
        numbers = [self.catalogue.number[name] for name in names][-MAX_HISTORY:]
        return {"history": numbers, "ids": self.ids(numbers)}

    def sft_rows(self, train_rows, say):
        """What SFT learns, [{"id", "prompt", "items", "learn", "first"}]. Where nothing stands behind the
        history, one pass over a sequence asks for each of its items: the same loss as a row for each, at a
        fifth of the time; first is then the item that the prompt is."""
        found = []
        if self.tail:
            for row in train_rows:
                found.append({
                    "id": row["id"], "prompt": self.ids(row["history"]), "items": [row["target"]],
                    "learn": [True], "first": None})
        else:
            lines = {}
            for row in train_rows:
                lines.setdefault(row["line"], []).append(row)
            for some in lines.values():
                asked = {row["at"] for row in some}
                end = max(asked) + 1
                sequence = some[0]["sequence"]
                found.append({
                    "id": some[0]["id"], "prompt": self.ids(sequence[:1]), "items": sequence[1:end],
                    "learn": [at in asked for at in range(1, end)], "first": sequence[0]})
        return found + self.title_rows(train_rows, say)

    def title_rows(self, train_rows, say):
        """Rows whose prompt has titles: of the history, or of the wanted item itself."""
        generator = torch.Generator().manual_seed(0)
        found = []
        order = torch.randperm(len(train_rows), generator=generator).tolist()
        for i in order[:round(TITLE_HISTORY_ROWS * len(train_rows))]:
            titles = [self.catalogue.titles[item] for item in train_rows[i]["history"]]
            found.append(("; ".join(titles), train_rows[i]["target"], f"{train_rows[i]['id']} by titles"))
        items = torch.randperm(len(self.catalogue.items), generator=generator).tolist()
        for item in items[:round(TITLE_ROWS * len(items))]:
            found.append((self.catalogue.titles[item], item, f"title of {self.catalogue.items[item]}"))
        rows = []
        for text, item, name in found:
            ids = self.text_ids(text)
            if text and len(ids) + self.codes.shape[1] <= self.most:
                rows.append({"id": name, "prompt": ids, "items": [item], "learn": [True], "first": None})
        if len(rows) < len(found):
            say(f"{len(found) - len(rows)} of {len(found)} rows of titles are empty or too long: left out")
        return rows


def check_sizes():
    """Constants that do not fit each other."""
    if LORA_RANK and (STAGE != "rl" or REFERENCE_SYNC_STEPS):
        why = "is for STAGE=rl with REFERENCE_SYNC_STEPS = 0: SFT teaches a whole model what codes are"
        raise UserError(f"LORA_RANK = {LORA_RANK} {why}; run STAGE=sft first")
    if HIDDEN_SIZE % HEADS or (HIDDEN_SIZE // HEADS) % 2:
        raise UserError(f"HIDDEN_SIZE = {HIDDEN_SIZE} must be an even multiple of HEADS = {HEADS}")
    if GROUP_SIZE > EVAL_BEAMS:
        raise UserError(f"GROUP_SIZE = {GROUP_SIZE} is above EVAL_BEAMS = {EVAL_BEAMS}: raise EVAL_BEAMS")
    read_as("text", PROMPT_TEMPLATE, "PROMPT_TEMPLATE")
    if PROMPT_TEMPLATE.count("{history}") != 1:
        raise UserError(f"PROMPT_TEMPLATE = {PROMPT_TEMPLATE!r} must contain {{history}} once")
    if SFT_SIBLINGS and not SFT_STITCH:
        raise UserError(f"SFT_SIBLINGS = {SFT_SIBLINGS} does nothing without SFT_STITCH: set one otherwise")
    if REPLACEMENT and CANDIDATES == "beam":
        raise UserError("REPLACEMENT = True does nothing with CANDIDATES = 'beam': set one of them otherwise")
    if ACTOR_MODEL is None and (TITLE_HISTORY_ROWS or TITLE_ROWS or PROMPT_TEMPLATE != "{history}"):
        knows = "the small model knows codes alone"
        raise UserError(f"ACTOR_MODEL = None: {knows}: no PROMPT_TEMPLATE, TITLE_HISTORY_ROWS or TITLE_ROWS")
    if (TITLE_HISTORY_ROWS or TITLE_ROWS) and not ITEM_FILE:
        raise UserError("TITLE_HISTORY_ROWS and TITLE_ROWS need the titles of an ITEM_FILE")


def check_group(catalogue):
    """A group of distinct items must be there: the list that evaluation rewards is one."""
    there = len(catalogue.items) - (MAX_HISTORY if EXCLUDE_HISTORY else 0)
    if GROUP_SIZE > there:
        few = f"a group of distinct items takes GROUP_SIZE = {GROUP_SIZE} of {there}"
        raise UserError(f"INDEX_FILE = {INDEX_FILE!r}: {few}: lower it")


# ================================================================ the model


def small_model(depth):
    """A Llama of random weights for items of so many codes; its tokenizer will know codes alone."""
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=HIDDEN_SIZE, intermediate_size=4 * HIDDEN_SIZE,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=depth * (MAX_HISTORY + 1) + 16,
        bos_token_id=None, eos_token_id=1, pad_token_id=0, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.set_attn_implementation("shared_prompts")  # as load_model() does
    return tokenizer, model


def load_actor(checkpoint, catalogue, device):
    """Tokenizer and model, from a checkpoint if there is one, with a token for each code."""
    path = ACTOR_MODEL if LORA_RANK else checkpoint or ACTOR_MODEL
    sft = Path(OUTPUT_DIR) / "sft/policy"
    if path is None and STAGE == "rl":
        if not sft.exists():
            raise UserError("STAGE=rl has nothing to start from: run STAGE=sft first, or set ACTOR_MODEL")
        path = sft
    if path is None:
        tokenizer, model = small_model(len(catalogue.codes[0]))
        model = model.to(device)
    else:
        tokenizer = load_tokenizer(path, "ACTOR_MODEL")
        for key in ("is_local", "local_files_only"):  # where it came from, which it would save
            tokenizer.init_kwargs.pop(key, None)
        model = load_trained(AutoModelForCausalLM, path, "ACTOR_MODEL", device, checkpoint)
    known = tokenizer.get_vocab()
    codes = sorted({code for codes in catalogue.codes for code in codes})
    new = [code for code in codes if code not in known]
    tokenizer.add_tokens(new)
    for code in codes:
        if tokenizer(code, add_special_tokens=False)["input_ids"] != [tokenizer.convert_tokens_to_ids(code)]:
            reads = f"the tokenizer does not read the code {code!r} as one token"
            raise UserError(f"INDEX_FILE = {INDEX_FILE!r}: {reads}: take codes such as <a_7>")
    if new and (STAGE == "rl" or checkpoint):
        lacks = f"{len(new)} of the catalogue's codes are new to {path}, such as {new[0]}"
        raise UserError(f"{lacks}: train it with STAGE=sft or all first, on this INDEX_FILE")
    if len(tokenizer) > known_ids(model):
        model.resize_token_embeddings(len(tokenizer))
    check_group(catalogue)
    return tokenizer, model.eval()


def load_learner(checkpoint, actor):
    """Without SFT_AVERAGE, and in GRPO, the actor itself."""
    if checkpoint and (checkpoint / "learner").is_dir():
        return load_model(AutoModelForCausalLM, checkpoint / "learner", "RESUME", actor.device)
    if SFT_AVERAGE and STAGE != "rl" and not checkpoint:
        return copy.deepcopy(actor)
    return actor


def check_average(trainer):
    if trainer.state.stage == "sft" and bool(SFT_AVERAGE) != (trainer.learner is not trainer.actor):
        was = "without" if SFT_AVERAGE else "with"
        todo = "resume as it was, or start afresh with RESUME=no"
        raise UserError(f"SFT_AVERAGE = {SFT_AVERAGE}: {trainer.run.checkpoint} was made {was} it; {todo}")


@torch.no_grad()
def average_weights(source, to, decay):
    """The weights of `to` become decay * theirs + (1 - decay) * those of source."""
    for parameter, other in zip(source.parameters(), to.parameters()):
        other.lerp_(parameter, 1 - decay)


@torch.no_grad()
def copy_weights(source, to):
    for parameter, other in zip(source.parameters(), to.parameters()):
        other.copy_(parameter)


def flat_groups(scores):
    """Share of groups whose scores are all equal."""
    groups = scores.view(-1, GROUP_SIZE)
    return (groups == groups[:, :1]).all(1).float().mean().item()


def sample_records_of(batch, catalogue):
    """LOG_SAMPLES of a step's candidates for samples.jsonl."""
    records = []
    for i in torch.linspace(0, len(batch.rows) - 1, min(LOG_SAMPLES, len(batch.rows))).long().tolist():
        row = batch.rows[i]
        item = int(batch.items[i])
        records.append({
            "id": row["id"], "history": [catalogue.items[n] for n in row["history"]],
            "item": catalogue.items[item], "title": catalogue.titles[item],
            "target": catalogue.items[row["target"]],
            "logprob": batch.logprobs[i].sum().item(), "reward": batch.scores[i].item(),
            **{f"reward/{name}": float(values[i]) for name, values in batch.parts.items()},
            "advantage": batch.advantages[i].item()})
    return records


def best_policy(trainer):
    """The policy of best/, read anew when there is a better one; before the first evaluation the actor."""
    value = trainer.run.best_value
    if value == -math.inf:
        return trainer.actor
    if trainer.best.value != value:
        path = trainer.run.folder / "best/policy"
        model = load_model(AutoModelForCausalLM, path, "OUTPUT_DIR", trainer.device)
        set_ways(model, get_ways(trainer.actor))
        trainer.best = SimpleNamespace(model=model, value=value)
    return trainer.best.model


def recommendations(model, trie, catalogue, row, k, width, pad_id):
    """The k best items for a row, as RecTrainer.recommend() says them."""
    excluded = excluded_items([row], model.device)
    width = min(width, len(trie.codes))
    items, logprobs, _ = search(model, trie, [row["ids"]], width, pad_id, excluded=excluded)
    found = []
    for item, logprob in zip(items[0].tolist()[:k], logprobs[0].sum(1).tolist()):
        if item >= 0:
            found.append({
                "item": catalogue.items[item], "title": catalogue.titles[item],
                "codes": "".join(catalogue.codes[item]), "probability": math.exp(logprob)})
    return found


def recommend_main():
    """STAGE=recommend: the best policy of OUTPUT_DIR says what a user of HISTORY will want next."""
    if processes() > 1:
        raise UserError("STAGE=recommend runs as one process: start it with python, not torchrun")
    check_constants()
    check_sizes()
    transformers.utils.logging.disable_progress_bar()
    device = find_device()
    catalogue = Catalogue(say_plainly)
    folders = [Path(OUTPUT_DIR) / name for name in ("best/policy", "sft/policy")]
    folder = next((folder for folder in folders if folder.exists()), None)
    if folder is None:
        raise UserError(f"OUTPUT_DIR = {OUTPUT_DIR!r} has no best/policy: train first, with STAGE=all")
    tokenizer, model = load_actor(folder, catalogue, device)
    prompter = Prompter(tokenizer, catalogue, model)
    row = prompter.row_of(HISTORY, "HISTORY")
    trie = Trie(prompter.codes, device)
    pad_id = padding_id(model, tokenizer)
    prompts = [{"ids": row["ids"]}]
    check_models({"ACTOR_MODEL": model}, [], prompts, pad_id, say_plainly)
    best = recommendations(model, trie, catalogue, row, TOP, max(TOP, EVAL_BEAMS), pad_id)
    for place, found in enumerate(best, 1):
        named = f"{found['item']}  {found['codes']}  {found['title']}"
        say_plainly(f"{place:3}  {found['probability']:.4f}  {named}")


def say_plainly(text):
    print(text, flush=True)


# ================================================================ item values and vectors


def read_array(path, constant):
    try:
        array = np.asarray(np.load(path, allow_pickle=False))
    except Exception as error:  # NumPy raises many kinds
        raise UserError(f"{constant} = {path!r}: cannot be read as .npy ({first_line(error)})") from None
    if array.dtype.kind not in "fiu" or not (np.abs(array) < 1e15).all():  # squares must be finite
        raise UserError(f"{constant} = {path!r}: it must be an array of numbers below 1e15, none NaN")
    return array


def read_values(catalogue):
    """VALUES_FILE by the catalogue's numbers, (items, items)."""
    if VALUES_FILE is None:
        raise UserError("VALUE_WEIGHT needs a VALUES_FILE; without one set VALUE_WEIGHT=0 and another weight")
    array = read_array(VALUES_FILE, "VALUES_FILE")
    if array.shape != (catalogue.size, catalogue.size):
        must = f"a row and a column for each of {catalogue.size} items of INDEX_FILE"
        raise UserError(f"VALUES_FILE = {VALUES_FILE!r} has shape {array.shape}: it takes {must}")
    return array[np.ix_(catalogue.rows, catalogue.rows)].astype(np.float64)


def item_vectors(catalogue):
    """Unit vectors of the items, (items, width), for the semantic reward."""
    if VECTORS_FILE is None:
        return title_vectors(catalogue.titles)
    array = read_array(VECTORS_FILE, "VECTORS_FILE")
    if array.ndim != 2 or len(array) != catalogue.size or not array.size:
        must = f"(items, width) with {catalogue.size} items, in INDEX_FILE's order"
        raise UserError(f"VECTORS_FILE = {VECTORS_FILE!r} has shape {array.shape}: it takes {must}")
    return torch.nn.functional.normalize(torch.tensor(array[catalogue.rows].astype(np.float32)))


def title_vectors(titles):
    """TF-IDF of the titles' words, of unit length, (items, words); words of one item alone tell nothing of
    two and are left out."""
    words = [["".join(c if c.isalnum() else " " for c in title.lower())] for title in titles]
    words = [text[0].split() for text in words]
    counts = {}
    for some in words:
        for word in set(some):
            counts[word] = counts.get(word, 0) + 1
    common = {word: n for n, word in enumerate(w for w in counts if counts[w] > 1)}
    if not common:
        raise UserError("SEMANTIC_WEIGHT: no word stands in two titles of ITEM_FILE: set VECTORS_FILE")
    vectors = torch.zeros(len(titles), len(common))
    for item, some in enumerate(words):
        for word in some:
            if word in common:
                vectors[item, common[word]] += math.log(len(titles) / counts[word])
    return torch.nn.functional.normalize(vectors)


# ================================================================ baselines


class Popularity:
    """Every user gets the items that were most often a target."""

    def __init__(self, counts):
        self.counts = counts.float()

    def scores(self, histories):
        return self.counts.expand(len(histories), -1)


class Markov:
    """How often an item followed the history's last one; where equal, popularity."""

    def __init__(self, rows, popularity):
        self.popularity = popularity.float() / (1 + popularity.max())  # below 1: it only breaks ties
        self.after = defaultdict(lambda: defaultdict(int))
        for row in rows:
            self.after[row["history"][-1]][row["target"]] += 1

    def scores(self, histories):
        scores = self.popularity.repeat(len(histories), 1)
        for n, history in enumerate(histories):
            for item, count in self.after.get(history[-1], {}).items():
                scores[n, item] += count
        return scores


class SASRec(torch.nn.Module):
    """Self-attention over the history's items (Kang and McAuley 2018, 1808.09781), trained with the softmax
    over all items, which does better than the paper's sampled one."""

    def __init__(self, items, width=64, layers=2, heads=2, dropout=0.3):
        super().__init__()
        self.items = torch.nn.Embedding(items + 1, width, padding_idx=items)
        self.places = torch.nn.Embedding(MAX_HISTORY, width)
        layer = torch.nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout, "gelu", batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = torch.nn.LayerNorm(width)
        self.dropout = torch.nn.Dropout(dropout)
        torch.nn.init.normal_(self.items.weight, std=0.02)
        torch.nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, histories):
        """Scores of all items after each place: histories (rows, T), padded on the right, to (rows, T,
        items)."""
        size = histories.shape[1]
        hidden = self.dropout(self.items(histories) + self.places.weight[:size])
        causal = torch.triu(torch.ones(size, size, dtype=torch.bool), 1)
        hidden = self.norm(self.layers(hidden, mask=causal))
        return hidden @ self.items.weight[:-1].T

    @torch.no_grad()
    def scores(self, histories):
        """Scores of all items after each history, (histories, items)."""
        self.eval()
        pad = self.items.padding_idx
        found = []
        for begin in range(0, len(histories), 256):
            some = histories[begin:begin + 256]
            last = torch.tensor([len(history) - 1 for history in some])
            found.append(self(pad_right(some, pad))[torch.arange(len(some)), last])
        return torch.cat(found)


def trained_sasrec(train_rows, valid_rows, items, run):
    """A SASRec of the training rows, of the epoch with the best validation NDCG@10. It has its own random
    stream and stays in sasrec.pt, so that a resumed run has the very same."""
    sequences = {}
    for row in train_rows:
        asked = sequences.setdefault(row["line"], (row["sequence"], set()))[1]
        asked.add(row["at"])
    made_of = [[sequence, sorted(asked)] for sequence, asked in sequences.values()]
    held_out = [[row["history"], row["target"]] for row in valid_rows]
    facts = json.dumps([made_of, held_out, items, SASREC_EPOCHS, SEED, MAX_HISTORY])
    digest = hashlib.sha256(facts.encode()).hexdigest()
    path = run.folder / "sasrec.pt"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = SASRec(items)
        if path.exists():
            try:
                saved = torch.load(path, weights_only=True)
            except Exception as error:  # torch raises many kinds
                todo = "delete it, it will be made anew"
                raise UserError(f"{path} cannot be read ({first_line(error)}): {todo}") from None
            if saved.get("digest") == digest:
                model.load_state_dict(saved["weights"])
                return model
        weights = fit_sasrec(model, made_of, valid_rows, items)
    model.load_state_dict(weights)
    if rank() == 0:
        write_whole(path, partial(torch.save, {"digest": digest, "weights": weights}))
    return model


def fit_sasrec(model, sequences, valid_rows, items):
    inputs = pad_right([sequence[:-1] for sequence, _ in sequences], items)
    targets = []
    for sequence, asked in sequences:
        learnt = [item if at in asked else -100 for at, item in enumerate(sequence)]
        targets.append(learnt[1:])
    targets = pad_right(targets, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    best = -1.0
    waited = 0
    for _ in range(SASREC_EPOCHS):
        model.train()
        for chunk in torch.randperm(len(inputs)).split(128):
            logits = model(inputs[chunk])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[chunk].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found = gains(top_items(model, valid_rows), valid_rows, 10).mean().item()
        waited += 1
        if found > best:
            best = found
            waited = 0
            weights = {key: value.clone() for key, value in model.state_dict().items()}
        if waited == 4:
            break
    return weights


def top_items(model, rows):
    """The EVAL_BEAMS best items of each row by a baseline's scores, (rows, EVAL_BEAMS), -1 where there are
    fewer."""
    found = []
    for begin in range(0, len(rows), 512):
        some = rows[begin:begin + 512]
        scores = model.scores([row["history"] for row in some]).clone()
        if EXCLUDE_HISTORY:
            for n, row in enumerate(some):
                scores[n, row["history"]] = -math.inf
        best = scores.sort(dim=1, descending=True, stable=True)
        found.append(torch.where(best.values > -math.inf, best.indices, -1)[:, :EVAL_BEAMS])
    lists = torch.cat(found)
    return torch.nn.functional.pad(lists, (0, EVAL_BEAMS - lists.shape[1]), value=-1)


# ================================================================ metrics, figures and pictures


def targets_of(rows):
    return torch.tensor([row["target"] for row in rows])


def hits(lists, rows, k):
    """Whether the target is among the first k, (rows,)."""
    return (lists[:, :k] == targets_of(rows)[:, None]).any(1).float()


def gains(lists, rows, k):
    """NDCG of one target: 1 / log2(rank + 1) where it is among the first k, rank from 1, (rows,)."""
    discounts = 1 / torch.log2(torch.arange(min(k, lists.shape[1])) + 2.0)
    return ((lists[:, :k] == targets_of(rows)[:, None]) * discounts).sum(1)


def list_metrics(lists, rows, popularity):
    """HR and NDCG at _KS of the best items (rows, EVAL_BEAMS) of rows; coverage@10, the share of the
    catalogue in some list; popularity@10, the mean share of items that are less popular; invalid_items, the
    share of what was said that is no item."""
    metrics = {}
    for k in _KS:
        metrics[f"hr@{k}"] = hits(lists, rows, k).mean().item()
        metrics[f"ndcg@{k}"] = gains(lists, rows, k).mean().item()
    items = len(popularity)
    said = lists[:, :min(lists.shape[1], items - MAX_HISTORY * EXCLUDE_HISTORY)]
    metrics["invalid_items"] = ((said < 0) | (said >= items)).float().mean().item()
    top = lists[:, :10]
    top = top[top >= 0]
    less_popular = (popularity[:, None] > popularity).float().mean(1)  # (items,)
    metrics["coverage@10"] = len(top.unique()) / items
    metrics["popularity@10"] = less_popular[top].mean().item()
    return metrics


def bootstrap_interval(values):
    """95% interval of the mean of values (rows,), resampling rows."""
    generator = torch.Generator().manual_seed(0)
    means = []
    for _ in range(BOOTSTRAP):
        means.append(values[torch.randint(len(values), (len(values),), generator=generator)].mean())
    means = torch.stack(means).sort().values
    return [means[int(0.025 * BOOTSTRAP)].item(), means[min(BOOTSTRAP - 1, int(0.975 * BOOTSTRAP))].item()]


def differences(one, other):
    """Mean and interval of the paired differences of two policies, of what both have by row."""
    found = {}
    for key in one:
        gained = one[key] - other[key]
        found[key] = {"mean": gained.mean().item(), "interval": bootstrap_interval(gained)}
    return found


def best_value(values, rows, count):
    """The highest mean value that a list of so many distinct items can have, over rows."""
    total = 0.0
    every = range(len(values))
    for row in rows:
        worth = np.array([rewards.history_value(values, row["history"], item, VALUE_DECAY) for item in every])
        total += np.sort(worth)[-count:].mean()
    return total / len(rows)


def table_lines(figures):
    """Lines for the terminal: each policy on the test rows, the gain over SFT, what is possible."""
    keys = ["hr@1", "hr@10", "ndcg@10", "hr@20", "reward", "coverage@10", "popularity@10"]
    lines = ["Test rows:" + " " * 6 + "".join(f"{key:>15}" for key in keys)]
    for name, figure in figures.items():
        if "hr@10" in figure and "intervals" in figure:
            cells = [f"{figure[key]:>15.4f}" if key in figure else " " * 15 for key in keys]
            lines.append(f"  {name:14}" + "".join(cells))
    for key, gained in figures.get("grpo_minus_sft", {}).items():
        low, high = gained["interval"]
        interval = f"95% interval {low:+.4f} to {high:+.4f}"
        lines.append(f"  GRPO minus SFT, {key}: {gained['mean']:+.4f} ({interval})")
    if "possible" in figures:
        possible = figures["possible"]["value"]
        line = f"  the best possible value of {GROUP_SIZE} items: {possible:.4f}"
        for name in ("sft", "grpo"):
            if "reward/value" in figures.get(name, {}):
                line += f"; {name} reaches {figures[name]['reward/value'] / possible:.1%}"
        lines.append(line)
    return lines


def write_json(path, value):
    write_whole(path, lambda tmp: tmp.write_text(json.dumps(value, indent=1) + "\n"))


def draw_learning(records, folder, title, levels, figures):
    """rec_learning.png, from the logs: HR and NDCG of validation over the steps of both stages, with the
    baselines as dashed lines; rewards, entropy and KL; the test rows' table as bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 9), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 3)
    trained = [record for record in records if record["phase"] == "train"]
    begin = next((record["step"] - 1 for record in trained if "reward" in record), None)
    for axis, key in ((axes[0, 0], "hr@10"), (axes[0, 1], "ndcg@10"), (axes[0, 2], "reward")):
        plot_metric(axis, records, "train", key, "C0", "the candidates")
        plot_metric(axis, records, "eval", key, "C0", "the best items")
        for number, (name, level) in enumerate(levels.items(), 1):
            if key in level:
                axis.axhline(level[key], linestyle="--", color=f"C{number}", label=name)
        axis.set(xlabel="training step", ylabel=key)
    parts = [key for key in (trained or [{}])[-1] if key.startswith("reward/")]
    for number, key in enumerate(parts):
        plot_metric(axes[1, 0], records, "train", key, f"C{number}", key.partition("/")[2])
    axes[1, 0].set(xlabel="training step", ylabel="reward parts of the candidates")
    plot_metric(axes[1, 1], records, "train", "entropy", "C0", "entropy")
    axes[1, 1].set(xlabel="training step", ylabel="entropy (nats a code)")
    for axis in axes.flat[:5]:
        if begin and axis is not axes[1, 0]:
            axis.axvline(begin, color="grey", linewidth=0.8, label="SFT ends, GRPO begins")
    axis = axes[1, 2]
    names = [name for name in figures if "intervals" in figures[name]]
    for side, key in enumerate(("hr@10", "ndcg@10")):
        means = [figures[name][key] for name in names]
        low, high = zip(*(figures[name]["intervals"][key] for name in names))
        spread = [[m - a for m, a in zip(means, low)], [b - m for m, b in zip(means, high)]]
        at = [n + 0.4 * side for n in range(len(names))]
        axis.bar(at, means, 0.38, yerr=spread, capsize=3, label=f"{key}, test rows, 95% interval")
        axis.set_ylim(0, max(axis.get_ylim()[1], 1.25 * max(high)))  # room for the legend
    axis.set_xticks([n + 0.2 for n in range(len(names))], names)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            at = {"loc": "lower right", "bbox_to_anchor": (1, 0.1)} if axis is axes[0, 2] else {}
            axis.legend(fontsize=8, **at)
    write_whole(folder / "rec_learning.png", partial(figure.savefig, format="png", dpi=100))


def start():
    """What STAGE asks for, to run_main(): to recommend, nothing is trained, written or locked."""
    if STAGE == "recommend":
        return SimpleNamespace(run=SimpleNamespace(stop_signal=None), train=recommend_main)
    return RecTrainer()


def train_main():
    run_main(start)


if __name__ == "__main__":
    train_main()
