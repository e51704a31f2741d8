"""The path from preferences to a policy on the shipped world, for several seeds: SFT and a reward model; from
the SFT policy best-of-n, DPO at two values of BETA, and PPO on the reward model with and without a KL
penalty. Prints the held-out evaluations of each run, then true accuracy, KL from the SFT policy and learned
score of each method, and draws them as checkpoints/preferences/preferences.png. Some 20 minutes of one core
per seed; a run that is there is not repeated.

    python bench/preferences.py 1 2 3

DPO's KL is measured on samples of the policy itself, on the 200 held-out problems. PPO's KL is the one that
the last training step before the evaluation logs: that of the policy before the step's update, on the step's
training prompts.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import torch
from kept import run_once
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "checkpoints/preferences"
KL_COEFS = {"PPO, KL_COEF = 0.1": 0.1, "PPO, no KL penalty": 1e-6}  # 1e-6: none, but the KL is logged
BETAS = (0.1, 0.03)
DPO_STEPS = (19, 38)
NUM_SAMPLES = 16  # answers to each problem, of which the best is taken
PROBLEMS = 200  # held-out ones
sys.path.insert(0, str(ROOT))
import rewards


def runs_of(seed):
    """Returns {folder: command words} of one seed, in the order in which they need each other."""
    policy, reward_model = OUT / f"sft_{seed}/best/policy", OUT / f"rm_{seed}/best/reward_model"
    runs = {
        f"sft_{seed}": ["ppo/sft.py"],
        f"rm_{seed}": ["ppo/reward_model.py"],
        f"dpo_{seed}": ["rce/dpo.py"],
    }
    for beta in BETAS:
        words = ["rce/dpo.py", f"ACTOR_MODEL={policy}", f"BETA={beta}", f"SAVE_EVERY_N_STEPS={DPO_STEPS[0]}"]
        words += ["EVAL_EVERY_N_STEPS=0", "ACCURACY_FUNCTION=None", "MAX_EVAL_PAIRS=100"]
        runs[f"sft_dpo_{beta}_{seed}"] = words
    for kl_coef in KL_COEFS.values():
        words = ["ppo/ppo.py", f"ACTOR_MODEL={policy}", f"REWARD_MODEL={reward_model}", f"KL_COEF={kl_coef}"]
        words += ["REWARD_FUNCTIONS=[]", "REWARD_MODEL_WEIGHT=1.0", "MAX_STEPS=45", "EVAL_EVERY_N_STEPS=15"]
        runs[f"ppo_{kl_coef}_{seed}"] = [*words, "SAVE_EVERY_N_STEPS=0"]
    return runs


def evaluations(folder):
    """Returns the held-out evaluations of a run, each with the KL per response of its training step."""
    records = [json.loads(line) for line in (OUT / folder / "logs/metrics.jsonl").read_text().splitlines()]
    kl = {0: 0.0}
    for record in records:
        if "kl" in record and record["phase"] == "train":
            kl[record["step"]] = record["kl"] * record["response_length"]  # it is logged per token
    return [{**r, "kl": kl.get(r["step"])} for r in records if r["phase"] == "eval"]


# ---------------------------------------------------------------- what is measured of a policy


def answer_logprobs(model, ids, mask, num_prompt):
    """Returns log pi of answers, (rows,), from ids (rows, T) with num_prompt ids of a prompt first."""
    logits = model(ids, attention_mask=mask).logits[:, num_prompt - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, num_prompt:, None]).squeeze(-1)
    return (logprobs * mask[:, num_prompt:]).sum(-1)


@torch.no_grad()
def measure(policy, seed, num_samples):
    """Returns {"accuracy", "score", "log_ratio"}, (PROBLEMS, num_samples): of answers that the policy
    samples, whether each is right, its score by the learned reward model, and log pi - log pi_sft. Prompts
    are padded on the left, which these models' relative positions allow."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(policy, padding_side="left")
    actor = AutoModelForCausalLM.from_pretrained(policy).eval()
    sft_policy = OUT / f"sft_{seed}/best/policy"
    sft = AutoModelForCausalLM.from_pretrained(sft_policy).eval()
    reward_folder = OUT / f"rm_{seed}/best/reward_model"
    reward_model = AutoModelForSequenceClassification.from_pretrained(reward_folder).eval()
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "max_new_tokens": 64}
    results = {"accuracy": [], "score": [], "log_ratio": []}
    lines = (ROOT / "data/tiny/test.jsonl").read_text().splitlines()[:PROBLEMS]
    problems = [json.loads(line) for line in lines]
    for first in range(0, PROBLEMS, 8):
        rows = [row for row in problems[first : first + 8] for _ in range(num_samples)]
        prompts = tokenizer([row["problem"] + "\n" for row in rows], return_tensors="pt", padding=True)
        width = prompts["input_ids"].shape[1]
        ids = actor.generate(prompts["input_ids"], attention_mask=prompts["attention_mask"], **options)
        ended = (ids[:, width:] == tokenizer.eos_token_id).long().cumsum(-1)
        is_answer = torch.cat([torch.ones_like(ended[:, :1]), (ended[:, :-1] == 0).long()], -1)
        mask = torch.cat([prompts["attention_mask"], is_answer], -1)
        ids = torch.where(mask == 1, ids, tokenizer.pad_token_id)
        log_ratio = torch.zeros(len(rows))
        if policy != sft_policy:
            log_ratio = answer_logprobs(actor, ids, mask, width) - answer_logprobs(sft, ids, mask, width)
        texts = tokenizer.batch_decode(ids[:, width:], skip_special_tokens=True)
        solutions = [row["solution"] for row in rows]
        right = torch.tensor(list(map(float, rewards.exact_answer([None] * len(rows), texts, solutions))))
        scores = reward_model(ids, attention_mask=mask).logits[:, 0]
        for key, values in (("accuracy", right), ("score", scores), ("log_ratio", log_ratio)):
            results[key] += values.view(-1, num_samples).tolist()
    return results


def measured(folder, policy, seed, num_samples):
    """Returns measure() of a policy of a run, best or step_N, as tensors. It is kept in the run's folder, so
    that it goes when the run does."""
    file = OUT / folder / f"samples_{policy}.json"
    if not file.exists():
        file.write_text(json.dumps(measure(OUT / folder / policy / "policy", seed, num_samples)))
    return {key: torch.tensor(values) for key, values in json.loads(file.read_text()).items()}


def best_of(samples, n):
    """Returns the mean accuracy and score of the answer with the best score among n, over all choices of n of
    the samples: the i-th best of N is the best of (N - i choose n - 1) of them."""
    total = samples["score"].shape[1]
    order = samples["score"].argsort(-1, descending=True)
    weights = [math.comb(total - 1 - i, n - 1) / math.comb(total, n) for i in range(total)]
    weights = torch.tensor(weights)
    means = [
        (samples[key].gather(-1, order) * weights).sum(-1).mean().item() for key in ("accuracy", "score")
    ]
    return {"kl": math.log(n) - (n - 1) / n, "accuracy": means[0], "score": means[1]}


def curves(seed):
    """Returns {method: points {"kl", "accuracy", "score"}} of a seed; scores less that of the SFT policy."""
    sft = measured(f"sft_{seed}", "best", seed, NUM_SAMPLES)
    start = best_of(sft, 1)
    found = {"best of n = 1, 2, ... 16": [best_of(sft, 2**i) for i in range(5)]}
    for beta in BETAS:
        points = [start]
        for step in DPO_STEPS:
            samples = measured(f"sft_dpo_{beta}_{seed}", f"step_{step}", seed, 4)
            point = {"kl": samples["log_ratio"].mean().item(), "accuracy": samples["accuracy"].mean().item()}
            points.append({**point, "score": samples["score"].mean().item()})
        found[f"DPO, BETA = {beta}"] = points
    for label, kl_coef in KL_COEFS.items():
        points = [start]
        for record in evaluations(f"ppo_{kl_coef}_{seed}")[1:]:
            point = {"kl": record["kl"], "accuracy": record["accuracy_sampled"], "score": record["reward"]}
            points.append(point)
        found[label] = points
    for points in found.values():
        for i, point in enumerate(points):
            points[i] = {**point, "score": point["score"] - start["score"]}
    return found


def draw(by_seed):
    figure = Figure(figsize=(8.5, 4.0), layout="tight")
    labels = {"accuracy": "true accuracy, sampled (200 held-out problems)"}
    labels["score"] = "learned score, above that of SFT"
    colors = {"best": "C2", "DPO, BETA = 0.3": "#c5b0d5", "DPO, BETA = 0.1": "C4", "DPO": "#5b2a86"}
    colors |= {"PPO, KL": "C0", "PPO": "C3"}
    for place, (key, y_label) in enumerate(labels.items(), 1):
        axis = figure.add_subplot(1, 2, place, xlabel="KL from the SFT policy (nats per response)")
        axis.set_xscale("function", functions=(lambda x: x.clip(0) ** 0.5, lambda x: x**2))
        axis.set_xticks([0, 0.1, 0.5, 1, 2, 3, 5])
        axis.set_ylabel(y_label, fontsize=9)
        axis.grid(alpha=0.3)
        for method in by_seed[0]:
            color = next(color for begin, color in colors.items() if method.startswith(begin))
            lines = [[(max(0.0, p["kl"]), p[key]) for p in curve[method]] for curve in by_seed]
            for line in lines:
                axis.plot(*zip(*line), "-", color=color, linewidth=0.7, alpha=0.35)
            mean = torch.tensor(lines).mean(0).tolist()
            axis.plot(*zip(*mean), "o-", color=color, markersize=4, linewidth=1.8, label=method)
    figure.axes[1].legend(fontsize=8)
    figure.suptitle(f"From the SFT policy; thick: mean of {len(by_seed)} seeds, thin: each seed", fontsize=10)
    figure.savefig(OUT / "preferences.png", dpi=100)


def main(seeds):
    for seed in seeds:
        for folder, words in runs_of(seed).items():
            command = [sys.executable, *words, f"SEED={seed}"]
            run_once(command, OUT / folder, cwd=ROOT, stdout=subprocess.DEVNULL)
            for record in evaluations(folder):
                figures = {
                    key: x for key, x in record.items() if isinstance(x, float) and "second" not in key
                }
                texts = [f"{key} {x:.3f}" for key, x in figures.items()]
                print(f"{folder:18} step {record['step']:3}  " + "  ".join(texts), flush=True)
    by_seed = [curves(seed) for seed in seeds]
    for method in by_seed[0]:
        for number in range(len(by_seed[0][method])):
            texts = []
            for key in ("kl", "accuracy", "score"):
                values = [curve[method][number][key] for curve in by_seed]
                mean = sum(values) / len(values)
                texts.append(f"{key} {mean:.3f} ({min(values):.3f} to {max(values):.3f})")
            print(f"{method:26} point {number}  " + "  ".join(texts))
    draw(by_seed)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [1, 2, 3])
