"""The path from preferences to a policy on pretrained models (those of bench/real.py get) and real text:

    python bench/preferences_real.py sums      # SmolLM2-135M-Instruct: SFT, reward model, PPO, DPO, on sums
    python bench/preferences_real.py gsm8k     # MiniLM as a reward model on pairs of solutions of GSM8K

sums: SFT on solved sums; a reward model from pairs of a right and a wrong sum; PPO on that model alone, with
a KL penalty, if the model is better than chance; DPO on the same pairs. Each stage's held-out figures are
printed, and how often the policy's own probabilities order a held-out pair rightly.

gsm8k: ../shared/data/gsm8k has four models' solutions to each of 1,319 problems, and whether each is correct.
A pair is a right and a wrong solution to one problem, one pair per problem; 500 problems are trained on, 231
held out. Beside the reward model stand the rules that a model must beat, fitted on the same training pairs:
the longer or the shorter solution, and a logistic regression on counts of words and pairs of words.

Data and runs go to checkpoints/preferences_real, each with the seed in its name; a run that is there is not
repeated. SEED=2 as a second word sets the seed.
"""

import itertools
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

import torch
from kept import run_once

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "checkpoints/preferences_real"
SMOLLM2 = ROOT / "data/real/smollm2"
MINILM = ROOT / "data/real/minilm"
GSM8K = ROOT.parent / "shared/data/gsm8k/example_model_solutions.jsonl"
QUESTIONS = ["What is {x} + {y}?", "Tom has {x} apples and buys {y} more. How many has he?"]
SLIPS = [-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20]  # of a wrong sum
DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"
TRAIN_PROBLEMS = 500  # of the 731 problems of GSM8K that have right and wrong solutions


def write(name, rows):
    path = OUT / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def data_set(path, **columns):
    return json.dumps([{"path": str(path), "type": "jsonl", **columns}])


def run(folder, *words):
    """Runs a trainer, unless its folder is there, and prints its evaluations."""
    run_once([sys.executable, *words, "SAVE_EVERY_N_STEPS=0"], OUT / folder, cwd=ROOT)
    for record in evaluations(folder):
        figures = [f"{key} {x:.3f}" for key, x in record.items() if isinstance(x, float)]
        print(f"{folder:12} step {record['step']:3}  " + "  ".join(figures), flush=True)


def evaluations(folder):
    records = map(json.loads, (OUT / folder / "logs/metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["phase"] == "eval"]


# ---------------------------------------------------------------- sums


def sum_rows(seed):
    """Returns {part: rows}: demonstrations, held-out rows, prompts of PPO and pairs. No x + y occurs twice,
    but 12 + 34 and 34 + 12 may both occur."""
    rng = random.Random(seed)
    cases = [(rng.choice(QUESTIONS), x, y) for x in range(10, 100) for y in range(2, 50)]
    rng.shuffle(cases)
    rows = []
    for form, x, y in cases[:1744]:
        right, wrong = (f"{x} + {y} = {x + y + slip}." for slip in (0, rng.choice(SLIPS)))
        prompt = form.format(x=x, y=y)
        rows.append({"prompt": prompt, "chosen": right, "rejected": wrong, "answer": str(x + y)})
    return {"demos": rows[:320], "held_out": rows[320:384], "prompts": rows[384:784], "pairs": rows[784:]}


def sums(seed):
    parts = sum_rows(seed)
    paths = {name: write(f"sums_{name}_{seed}.jsonl", part) for name, part in parts.items()}
    pair = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    common = [f"SEED={seed}", f"DTYPE={DTYPE}", "EVAL_EVERY_N_STEPS=20"]
    answered = ["ACCURACY_FUNCTION=last_number", "MAX_NEW_TOKENS=20", "MAX_EVAL_PROMPTS=64"]
    run(
        f"sums_sft_{seed}",
        "ppo/sft.py",
        *common,
        *answered,
        f"ACTOR_MODEL={SMOLLM2}",
        f"TRAIN_DATASETS={data_set(paths['demos'], input='prompt', output='chosen')}",
        f"EVAL_DATASETS={data_set(paths['held_out'], input='prompt', output='chosen')}",
        "BATCH_SIZE=16",
        "GRADIENT_ACCUMULATION_STEPS=1",
        "NUM_EPOCHS=1",
        "LEARNING_RATE=1e-5",
    )
    policy = OUT / f"sums_sft_{seed}/best/policy"
    run(
        f"sums_rm_{seed}",
        "ppo/reward_model.py",
        *common,
        f"BASE_MODEL={policy}",
        f"TRAIN_DATASETS={data_set(paths['pairs'], **pair)}",
        f"EVAL_DATASETS={data_set(paths['held_out'], **pair)}",
        "BATCH_SIZE=16",
        "GRADIENT_ACCUMULATION_STEPS=1",
        "NUM_EPOCHS=1",
        "LEARNING_RATE=5e-5",
    )
    if evaluations(f"sums_rm_{seed}")[-1]["accuracy_low"] > 0.5:
        run(
            f"sums_ppo_{seed}",
            "ppo/ppo.py",
            *common,
            *answered,
            f"ACTOR_MODEL={policy}",
            f"REWARD_MODEL={OUT / f'sums_rm_{seed}/best/reward_model'}",
            "REWARD_FUNCTIONS=[]",
            "REWARD_MODEL_WEIGHT=1.0",
            "KL_COEF=0.1",
            f"TRAIN_DATASETS={data_set(paths['prompts'], input='prompt', output='answer')}",
            f"EVAL_DATASETS={data_set(paths['held_out'], input='prompt', output='answer')}",
            "BATCH_SIZE=8",
            "GROUP_SIZE=4",
            "GRADIENT_ACCUMULATION_STEPS=1",
            "GROUP_EPOCHS=1",
            "LEARNING_RATE=1e-5",
            "CRITIC_LEARNING_RATE=2e-5",
            "LAM=1.0",
            "MAX_STEPS=10",
        )
    else:
        print(f"sums_ppo_{seed} left out: the reward model's interval reaches chance", flush=True)
    print_logprob_rule(policy, parts["held_out"])
    run(
        f"sums_dpo_{seed}",
        "rce/dpo.py",
        *common,
        "ACCURACY_FUNCTION=last_number",
        "MAX_NEW_TOKENS=20",
        "MAX_EVAL_PAIRS=64",
        f"ACTOR_MODEL={policy}",
        f"TRAIN_DATASETS={data_set(paths['pairs'], **pair)}",
        f"EVAL_DATASETS={data_set(paths['held_out'], **pair, output='answer')}",
        "BATCH_SIZE=16",
        "GRADIENT_ACCUMULATION_STEPS=1",
        "MAX_STEPS=20",
        "LEARNING_RATE=5e-6",
    )


def print_logprob_rule(policy, pairs):
    """Prints how often the policy itself gives the right answer the higher probability: a rule that needs no
    reward model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(policy), AutoModelForCausalLM.from_pretrained(policy)
    right = 0
    for pair in pairs:
        logprobs = []
        for answer in (pair["chosen"], pair["rejected"]):
            prompt = [{"role": "user", "content": pair["prompt"]}]
            start = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(start + answer, add_special_tokens=False, return_tensors="pt")["input_ids"]
            first = len(tokenizer(start, add_special_tokens=False)["input_ids"])
            with torch.no_grad():
                found = model(ids).logits[0, first - 1 : -1].log_softmax(1)
            logprobs.append(found.gather(1, ids[0, first:, None]).sum().item())
        right += logprobs[0] > logprobs[1]
    print(
        f"the policy's own probability: {right / len(pairs):.3f} of {len(pairs)} held-out pairs", flush=True
    )


# ---------------------------------------------------------------- GSM8K


def gsm8k_pairs(seed):
    """Returns the pairs of the training problems and of the others."""
    rng = random.Random(seed)
    problems = []
    for record in map(json.loads, GSM8K.read_text().splitlines()):
        solutions = [value for value in record.values() if isinstance(value, dict)]
        right = [s["solution"] for s in solutions if s["is_correct"]]
        wrong = [s["solution"] for s in solutions if not s["is_correct"]]
        pairs = [(chosen, rejected) for chosen in right for rejected in wrong]
        if pairs:
            chosen = [rng.choice(pairs)]
            problems.append([{"prompt": record["question"], "chosen": c, "rejected": r} for c, r in chosen])
    rng.shuffle(problems)
    train, held_out = problems[:TRAIN_PROBLEMS], problems[TRAIN_PROBLEMS:]
    return [pair for pairs in train for pair in pairs], [pair for pairs in held_out for pair in pairs]


def counts(text):
    """Returns how often words, numbers, signs and pairs of neighbours stand in a text."""
    words = re.findall(r"[a-z]+|[0-9.]+|[^\s\w]", text.lower())
    return Counter(words) + Counter(map(" ".join, itertools.pairwise(words)))


def print_baselines(train, held_out):
    """The accuracy of simple rules on the held-out pairs."""
    import numpy as np
    from sklearn.feature_extraction import DictVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, GroupKFold
    from sklearn.preprocessing import MaxAbsScaler

    def longer(pairs):
        lengths = np.array([[len(pair[key]) for key in ("chosen", "rejected")] for pair in pairs])
        return (np.sign(lengths[:, 0] - lengths[:, 1]) + 1) / 2  # equal lengths count a half

    rule, accuracy = "the longer solution", longer(held_out).mean()
    if longer(train).mean() < 0.5:
        rule, accuracy = "the shorter solution", 1 - accuracy
    print(f"{rule}: {accuracy:.3f} of {len(held_out)} held-out pairs")
    vectorizer, scaler = DictVectorizer(), MaxAbsScaler()
    texts = [counts(pair[key]) for pair in train for key in ("chosen", "rejected")]
    fitted = scaler.fit_transform(vectorizer.fit_transform(texts))
    differences = fitted[::2] - fitted[1::2]
    signs = np.where(np.arange(len(train)) % 2, 1, -1)  # half of the pairs in reversed order
    groups = [pair["prompt"] for pair in train]
    folds = list(GroupKFold(5).split(signs, groups=groups))  # the penalty is chosen on training problems
    features = differences.multiply(signs[:, None]).tocsr()
    best = GridSearchCV(
        LogisticRegression(fit_intercept=False, max_iter=2000),
        {"C": np.logspace(-4, 2, 7).tolist()},
        cv=folds,
    ).fit(features, signs)
    texts = [counts(pair[key]) for pair in held_out for key in ("chosen", "rejected")]
    scores = scaler.transform(vectorizer.transform(texts)) @ best.best_estimator_.coef_[0]
    right = (np.sign(scores[::2] - scores[1::2]) + 1) / 2
    print(f"logistic regression on words and pairs of words: {right.mean():.3f}", flush=True)


def gsm8k(seed):
    if not GSM8K.exists():
        source = "grade_school_math/data of github.com/openai/grade-school-math"
        sys.exit(f"{GSM8K} is missing: take {GSM8K.name} from {source}")
    train, held_out = gsm8k_pairs(seed)
    print(f"{len(train)} training pairs of {TRAIN_PROBLEMS} problems", flush=True)
    print_baselines(train, held_out)
    pair = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    run(
        f"gsm8k_{seed}",
        "ppo/reward_model.py",
        f"BASE_MODEL={MINILM}",
        f"TRAIN_DATASETS={data_set(write(f'gsm8k_train_{seed}.jsonl', train), **pair)}",
        f"EVAL_DATASETS={data_set(write(f'gsm8k_test_{seed}.jsonl', held_out), **pair)}",
        f"SEED={seed}",
        f"DTYPE={DTYPE}",
        "MAX_TOKENS=256",
        "MAX_EVAL_PAIRS=None",
        "BATCH_SIZE=16",
        "GRADIENT_ACCUMULATION_STEPS=1",
        "LEARNING_RATE=5e-5",
        "NUM_EPOCHS=1",
        "EVAL_EVERY_N_STEPS=0",
    )


def main(words):
    if not words or words[0] not in ("sums", "gsm8k"):
        sys.exit(__doc__)
    seed = int(words[1].removeprefix("SEED=")) if words[1:] else 1
    OUT.mkdir(parents=True, exist_ok=True)
    {"sums": sums, "gsm8k": gsm8k}[words[0]](seed)


if __name__ == "__main__":
    main(sys.argv[1:])
