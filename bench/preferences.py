"""The path from preferences to a policy, and simple rules beside it: the figures of docs/preferences.md.

    python bench/preferences.py 1 2 3          # seeds, on the shipped world
    python bench/preferences.py real 1 2 3     # MiniLM (bench/real.py get) on pairs of solutions of GSM8K

The shipped world: SFT; a reward model; from the SFT policy best of n, DPO at two values of BETA, and PPO on
the reward model with and without a KL penalty. Answers to held-out problems are sampled and checked, scored
by the reward model, and give the KL divergence from the SFT policy. Runs and the picture go to
checkpoints/preferences; runs that have ended are not repeated.
"""

import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "ppo")]
import reward_model
import rewards
import sft

OUT = ROOT / "checkpoints/preferences"
GSM8K = ROOT / "data/real/example_model_solutions.jsonl"  # of github.com/openai/grade-school-math
PROBLEMS = 200  # held-out ones
CLASSIFIER = transformers.AutoModelForSequenceClassification
LEARNED = ["REWARD_FUNCTIONS=[]", "REWARD_MODEL_WEIGHT=1.0", "MAX_STEPS=45"]
METHODS = {  # run: (label, command words, steps whose checkpoints are measured)
    "dpo_0.1": ("DPO, BETA = 0.1", ["rce/dpo.py", "BETA=0.1"], (19, 38)),
    "dpo_0.03": ("DPO, BETA = 0.03", ["rce/dpo.py", "BETA=0.03"], (19, 38)),
    "ppo_0.1": ("PPO, KL_COEF = 0.1", ["ppo/ppo.py", *LEARNED, "KL_COEF=0.1"], (15, 30, 45)),
    "ppo_0": ("PPO, KL_COEF = 0", ["ppo/ppo.py", *LEARNED, "KL_COEF=0"], (15, 30, 45)),
}


def run(name, seed, *words):
    """Runs a trainer, or finishes its run. Returns the metrics of its evaluations, dicts."""
    folder = OUT / f"{name}_{seed}"
    seconds = -sum(os.times()[2:4])  # CPU time of child processes
    command = [sys.executable, *words, f"SEED={seed}", f"OUTPUT_DIR={folder}", "RESUME=yes"]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    seconds += sum(os.times()[2:4])
    print(f"{name}, seed {seed}: {seconds:.0f} CPU seconds", flush=True)
    records = read_rows(folder / "logs/metrics.jsonl")
    return [record for record in records if record.pop("phase") == "eval"]


def print_means(title, by_seed):
    """Prints figures, a dict of each seed, as their mean (the least to the most)."""
    print(title)
    for key in by_seed[0]:
        values = sft.column(by_seed, key)
        print(f"    {key:32} {np.mean(values):.4g} ({min(values):.4g} to {max(values):.4g})", flush=True)


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def load(folder, auto_class=transformers.AutoModelForCausalLM):
    return transformers.AutoTokenizer.from_pretrained(folder), sft.load_model(auto_class, folder)


# ================================================================ rules and reward models on pairs


def arithmetic_rule(problem, answer):
    """Returns minus the faults that someone who knows the problems of data/tiny finds: wrong sums, steps too
    many or too few, and a last line that is not the last step's result."""
    *steps, last = answer.split("\n")
    faults = abs(len(steps) + 1 - len(re.findall(r"\d+|double|triple|half|halve", problem)))
    result = None
    for step in steps:
        x, sign, y, result = re.fullmatch(r"(\d+)([-+*])(\d+)=(\d+)", step).groups()
        x, y = int(x), int(y)
        faults += {"+": x + y, "-": x - y, "*": x * y}[sign] != int(result)
    return -faults - (last != f"#### {result}")


def logistic_scores(train, held_out, tokenize):
    """Returns scores of the held-out answers by a logistic regression on counts of tokens and token pairs. It
    is fitted to differences of training pairs; cross-validation on them chooses its penalty."""
    vectorizer = CountVectorizer(tokenizer=tokenize, lowercase=False, token_pattern=None, ngram_range=(1, 2))
    counts = vectorizer.fit_transform(train)
    signs = np.where(np.arange(len(train) // 2) % 2, 1, -1)  # half of the pairs in reversed order
    differences = (counts[::2] - counts[1::2]).multiply(signs[:, None]).tocsr()
    model = LogisticRegression(fit_intercept=False, max_iter=5000)
    search = GridSearchCV(model, {"C": np.logspace(-4, 2, 7)}, cv=5).fit(differences, signs)
    return vectorizer.transform(held_out) @ search.best_estimator_.coef_[0]


@torch.no_grad()
def sequence_logprobs(model, rows):
    """Returns log pi of the trained tokens of rows {"ids", "mask"}, (rows,)."""
    logprobs, _ = sft.answer_logprobs(model, rows)
    lengths = list(map(sum, sft.column(rows, "mask")))
    return torch.stack([x.sum() for x in logprobs.split(lengths)])


@torch.no_grad()
def learned_scores(tokenizer, model, prompts, answers):
    """Returns a reward model's scores of answers, (rows,)."""
    inputs = [reward_model.encode_scored(model, tokenizer, *pair) for pair in zip(prompts, answers)]
    batches = (inputs[first : first + 32] for first in range(0, len(inputs), 32))
    return torch.cat([reward_model.answer_scores(model, tokenizer, batch) for batch in batches])


def flat(pairs):
    """Returns prompts and answers, two lists: of each pair the chosen one, then the rejected one."""
    answers = [row[name] for row in pairs for name in ("chosen", "rejected")]
    return [row["prompt"] for row in pairs for _ in range(2)], answers


def pair_figures(train, held_out, reward_folder, policy_folder=None):
    """Returns how often rules and a reward model order the held-out pairs rightly, and more of the model. If
    there is a policy, it is one of the rules, and the pairs are those of data/tiny."""
    tokenizer, model = load(reward_folder, CLASSIFIER)
    prompts, answers = flat(held_out)
    lengths = list(map(len, map(tokenizer.tokenize, answers)))
    scores = {"the longer answer": lengths}
    scores["logistic regression"] = logistic_scores(flat(train)[1], answers, tokenizer.tokenize)
    if policy_folder:
        _, policy = load(policy_folder)
        end_ids = sft.find_end_ids(policy, tokenizer)
        rows = [sft.encode_answer(tokenizer, *pair, end_ids) for pair in zip(prompts, answers)]
        scores["the policy's log-probability"] = sequence_logprobs(policy, rows).numpy()
        scores["arithmetic by hand"] = list(map(arithmetic_rule, prompts, answers))
        scores["the truth"] = np.equal(answers, np.repeat(sft.column(held_out, "solution"), 2)).astype(int)
    scores["reward model"] = learned_scores(tokenizer, model, prompts, answers).numpy()
    margins = {name: np.subtract(x[::2], x[1::2]) for name, x in scores.items()}
    agreement = {name: 0.5 + 0.5 * np.sign(x) for name, x in margins.items()}  # 0.5 if the scores are equal
    figures = {name: x.mean() for name, x in agreement.items()}
    confidence = 1 / (1 + np.exp(-abs(margins["reward model"])))  # 0.5 to 1: that the order is right
    bins = np.minimum((confidence - 0.5) * 10, 4).astype(int)
    errors = np.bincount(bins, confidence - agreement["reward model"])  # sum over the pairs of each of 5 bins
    figures["calibration error"] = abs(errors).sum() / len(held_out)
    figures["Spearman of score and length"] = spearmanr(scores["reward model"], lengths).statistic
    is_equal = margins["the longer answer"] == 0
    figures["pairs of equal length"] = is_equal.sum()
    return figures | {"reward model, on these": agreement["reward model"][is_equal].mean()}


# ================================================================ sampled answers


@torch.no_grad()
def measure(policy, seed, num_samples=4):
    """Returns {"kl", "accuracy", "score"}, (PROBLEMS, num_samples): of answers that a policy samples,
    log pi - log pi_sft, whether each is right, and its score by the learned reward model."""
    torch.manual_seed(seed)
    tokenizer, actor = load(OUT / policy / "policy")
    _, sft_policy = load(OUT / f"sft_{seed}/best/policy")
    scorer = load(OUT / f"rm_{seed}/best/reward_model", CLASSIFIER)
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "max_new_tokens": 64}
    results = {"kl": [], "accuracy": [], "score": []}
    problems = np.repeat(read_rows(ROOT / "data/tiny/test.jsonl")[:PROBLEMS], num_samples).tolist()
    for first in range(0, len(problems), 128):
        texts, solutions = (sft.column(problems[first : first + 128], x) for x in ("problem", "solution"))
        chats = [sft.render(tokenizer, sft.as_messages(text), is_open=True) for text in texts]
        prompts = [sft.tokenize(tokenizer, chat) for chat in chats]
        ids, mask = sft.pad_left(prompts, "cpu")
        sampled = actor.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :].tolist()
        rows = []
        answers = tokenizer.batch_decode(sampled, skip_special_tokens=True)
        for prompt, response in zip(prompts, sampled):
            if tokenizer.eos_token_id in response:
                response = response[: response.index(tokenizer.eos_token_id) + 1]
            rows.append({"ids": prompt + response, "mask": [0] * len(prompt) + [1] * len(response)})
        results["accuracy"] += rewards.exact_answer(texts, answers, solutions)
        results["score"] += learned_scores(*scorer, texts, answers).tolist()
        results["kl"] += sequence_logprobs(actor, rows) - sequence_logprobs(sft_policy, rows)
    return {key: np.array(values, dtype=float).reshape(PROBLEMS, -1) for key, values in results.items()}


def best_of(samples, n):
    """Returns a point of the answer with the best score among n: means over all choices of n of N samples,
    in (N - i choose n - 1) of which the i-th best is the best."""
    total = samples["score"].shape[1]
    order = (-samples["score"]).argsort(1)
    weights = [math.comb(total - 1 - i, n - 1) / math.comb(total, n) for i in range(total)]
    point = {"kl": math.log(n) - (n - 1) / n}
    for key in ("accuracy", "score"):
        point[key] = (np.take_along_axis(samples[key], order, 1) @ weights).mean()
    return point


def curves(seed):
    """Returns {method: points {"kl", "accuracy", "score"}} of a seed; scores less that of the SFT policy."""
    samples = measure(f"sft_{seed}/best", seed, 16)
    lines = {"best of n": [best_of(samples, n) for n in (1, 2, 4, 8, 16)]}
    start = dict(lines["best of n"][0])
    for name, (label, _, steps) in METHODS.items():
        lines[label] = [dict(start)]
        for step in steps:
            samples = measure(f"{name}_{seed}/step_{step}", seed)
            lines[label].append({key: x.mean() for key, x in samples.items()})
    for points in lines.values():
        for point in points:
            point["score"] -= start["score"]
    return lines


def draw(by_seed):
    figure = Figure(figsize=(8.5, 4.0), layout="tight")
    labels = {"accuracy": "share of correct answers, sampled", "score": "learned score, above that of SFT"}
    for place, (key, y_label) in enumerate(labels.items(), 1):
        axis = figure.add_subplot(1, 2, place, xlabel="KL from the SFT policy (nats per response)")
        axis.set_ylabel(y_label)
        axis.grid(alpha=0.3)
        for method, color in zip(by_seed[0], ("C2", "C4", "#5b2a86", "C0", "C3")):
            lines = [(sft.column(x, "kl"), sft.column(x, key)) for x in sft.column(by_seed, method)]
            for line in lines:
                axis.plot(*line, "-", color=color, linewidth=0.7, alpha=0.35)
            axis.plot(*np.mean(lines, 0), "o-", color=color, markersize=4, label=method)
    figure.axes[1].legend(fontsize=8)
    figure.suptitle(f"From the SFT policy; thick: mean of {len(by_seed)} seeds, thin: each seed", fontsize=10)
    figure.savefig(OUT / "preferences.png", dpi=100)


def shipped(seeds):
    evaluations = {name: [] for name in ("sft", "rm", "dpo", *METHODS)}
    pairs = []
    for seed in seeds:
        policy, scorer = OUT / f"sft_{seed}/best/policy", OUT / f"rm_{seed}/best/reward_model"
        evaluations["sft"].append(run("sft", seed, "ppo/sft.py"))
        evaluations["rm"].append(run("rm", seed, "ppo/reward_model.py", f"BASE_MODEL={policy}"))
        evaluations["dpo"].append(run("dpo", seed, "rce/dpo.py"))  # from the shipped policy
        for name, (_, words, steps) in METHODS.items():
            words = [*words, f"ACTOR_MODEL={policy}", f"SAVE_EVERY_N_STEPS={steps[0]}"]
            if "ppo/ppo.py" in words:
                words += [f"REWARD_MODEL={scorer}", f"EVAL_EVERY_N_STEPS={steps[0]}"]
            evaluations[name].append(run(name, seed, *words))
        data = [read_rows(ROOT / "data/tiny" / name) for name in ("pairs.jsonl", "pairs_test.jsonl")]
        pairs.append(pair_figures(*data, scorer, policy))
    for name, by_seed in evaluations.items():
        for records in zip(*by_seed):
            print_means(name, records)
    print_means("held-out pairs in the right order", pairs)
    by_seed = list(map(curves, seeds))
    for method in by_seed[0]:
        for points in zip(*sft.column(by_seed, method)):
            print_means(method, points)
    draw(by_seed)


# ================================================================ real text


def solution_pairs(seed):
    """Returns a right and a wrong solution of each problem of GSM8K for which models gave both."""
    rng = random.Random(seed)
    pairs = []
    for record in read_rows(GSM8K):
        solutions = {True: [], False: []}
        for value in record.values():
            if isinstance(value, dict):
                solutions[value["is_correct"]].append(value["solution"])
        if solutions[True] and solutions[False]:
            pair = {"chosen": rng.choice(solutions[True]), "rejected": rng.choice(solutions[False])}
            pairs.append({"prompt": record["question"], **pair})
    return rng.sample(pairs, len(pairs))


def real(seeds):
    figures = []
    for seed in seeds:
        pairs = solution_pairs(seed)
        parts = {"TRAIN_DATASETS": pairs[:500], "EVAL_DATASETS": pairs[500:]}
        words = [f"BASE_MODEL={ROOT}/data/real/minilm", "LEARNING_RATE=5e-5", "NUM_EPOCHS=1", "BATCH_SIZE=8"]
        for key, rows in parts.items():
            path = OUT / f"gsm8k_{key}_{seed}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            spec = {"path": str(path), "type": "jsonl"}
            words.append(f"{key}={[spec | {name: name for name in ('prompt', 'chosen', 'rejected')}]}")
        run("gsm8k", seed, "ppo/reward_model.py", *words, "EVAL_EVERY_N_STEPS=0")
        figures.append(pair_figures(*parts.values(), OUT / f"gsm8k_{seed}/best/reward_model"))
    print_means("held-out pairs of GSM8K in the right order", figures)


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    seeds = list(map(int, filter(str.isdecimal, sys.argv[1:])))
    if not seeds:
        sys.exit(__doc__)
    if "real" in sys.argv:
        real(seeds)
    else:
        shipped(seeds)
