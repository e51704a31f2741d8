"""Rebuild data/tiny/ from a seed: word problems, a tokenizer, a base policy and a reward model.

    python data/make_tiny.py OUT=/tmp/tiny
    python data/make_tiny.py SEED=3 OUT=/tmp/tiny

The problems are chains of two to four sums with one- and two-digit numbers; the solutions
are written line by line and end in `#### answer`. The base policy learns to write solutions of which
most follow a bad habit (stop a step early, guess, repeat a step), so it *can* solve the problems but
mostly does not: reinforcement learning has something to find, and its climb is honest.
The reward model starts from the policy's weights and learns to prefer a right solution to a wrong one.
ppo/sft.py and ppo/reward_model.py train the two. The shipped models were made with the same data, steps and
rates, by loops that stood here before those scripts existed.

Writes train.jsonl, test.jsonl, train.parquet, policy/, reward_model/ and facts.json.
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 1
ROOT = Path(__file__).resolve().parents[1]
OUT = str(ROOT / "data/tiny")
TRAIN_ROWS = 3000
PARQUET_ROWS = 1000
TEST_ROWS = 400
SFT_STEPS = 2600
SFT_BATCH = 64
SFT_LEARNING_RATE = 2e-3
REWARD_STEPS = 1600
REWARD_BATCH = 32
REWARD_LEARNING_RATE = 5e-4
HABITS = {"right": 0.22, "stop_early": 0.46, "guess": 0.16, "repeat": 0.16}  # share of SFT solutions

NAMES = "Tom Anna Ben Lucy Sam Mia Leo Zoe Max Eva".split()
ITEMS = "apples books coins cards shells stamps pens stones".split()
GAIN = ["{n} buys {b} more.", "{n} finds {b} more.", "A friend gives {n} {b} more.", "{n} wins {b} {i}."]
LOSE = ["{n} gives away {b}.", "{n} loses {b} of them.", "{n} sells {b} {i}.", "A friend takes {b}."]
TIMES = ["Then the number of {i} doubles.", "Then the number of {i} triples."]


# ---------------------------------------------------------------- problems


def make_problem(rng):
    """One problem: {"problem": text, "steps": ["12+7=19", ...], "answer": 14}; every number is within 0 to
    99."""
    name = rng.choice(NAMES)
    item = rng.choice(ITEMS)
    steps = []
    if rng.random() < 0.3:
        k = rng.randint(2, 9)
        each = rng.randint(2, 9)
        value = k * each
        text = f"{name} has {k} boxes of {each} {item}."
        steps.append(f"{k}*{each}={value}")
    else:
        value = rng.randint(2, 60)
        text = f"{name} has {value} {item}."
    length = rng.choice([2, 2, 3, 3, 4])
    while len(steps) < length:
        kind = rng.random()
        if kind < 0.12 and value * 3 <= 99 and value > 0:
            k = rng.randint(2, 3)
            text += " " + TIMES[k - 2].format(i=item)
            steps.append(f"{value}*{k}={value * k}")
            value *= k
        elif kind < 0.56 and value < 95:
            b = rng.randint(2, min(40, 99 - value))
            text += " " + rng.choice(GAIN).format(n=name, b=b, i=item)
            steps.append(f"{value}+{b}={value + b}")
            value += b
        elif value > 3:
            b = rng.randint(2, min(40, value))
            text += " " + rng.choice(LOSE).format(n=name, b=b, i=item)
            steps.append(f"{value}-{b}={value - b}")
            value -= b
    return {"problem": f"{text} How many {item} are there now?", "steps": steps, "answer": value}


def write_solution(steps, answer):
    return "\n".join([*steps, f"#### {answer}"])


def result(step):
    """What a step comes to, as text: of "12+7=19" the "19"."""
    return step.split("=")[1]


def habit_solution(problem, habit, rng):
    """The solution as someone with that habit would write it; only "right" is always right."""
    steps, answer = problem["steps"], problem["answer"]
    if habit == "stop_early":
        return write_solution(steps[:-1], result(steps[-2]))
    if habit == "guess":
        return write_solution([], rng.randint(0, 99))
    if habit == "repeat":
        first_number = steps[0].replace("*", "+").replace("-", "+").split("+")[0]
        return write_solution(steps[:1] * 2, first_number)
    return write_solution(steps, answer)


def steps_with_a_slip(steps, rng):
    """The steps where one sum goes wrong and the rest follows from the wrong number."""
    at = rng.randrange(len(steps))
    wrong = []
    value = None
    for i, step in enumerate(steps):
        left, right = step.split("=")
        if value is not None:
            op = next(c for c in left if c in "+-*")
            left = f"{value}{op}{left.split(op)[1]}"
            a, b = (int(x) for x in left.split(op))
            right = str(max(0, {"+": a + b, "-": a - b, "*": a * b}[op]))
        if i == at:
            right = str(max(0, int(right) + rng.choice([-11, -10, -9, -2, -1, 1, 2, 9, 10, 11])))
        value = int(right) if i >= at else None
        wrong.append(f"{left}={right}")
    return wrong


def wrong_solution(problem, rng):
    """A solution whose answer is wrong: a habit, a slip in a sum, a wrong last number, or steps gone
    astray."""
    steps, answer = problem["steps"], problem["answer"]
    while True:
        kind = rng.choice(
            ["stop_early", "stop_early", "guess", "repeat", "slip", "last", "twice", "short", "other"]
        )
        if kind in HABITS:
            text = habit_solution(problem, kind, rng)
        elif kind == "slip":
            wrong = steps_with_a_slip(steps, rng)
            text = write_solution(wrong, result(wrong[-1]))
        elif kind == "last":
            text = write_solution(steps, max(0, answer + rng.choice([-20, -10, -3, -1, 1, 3, 10, 20])))
        elif kind == "twice":  # one step more
            left = steps[-1].split("=")[0]
            extra = steps[-1].replace(left, f"{answer}+{rng.randint(1, 9)}")
            text = write_solution([*steps, extra], rng.randint(0, 99))
        elif kind == "short":
            text = write_solution(steps[1:], rng.randint(0, 99))
        else:
            other = make_problem(rng)
            text = write_solution(other["steps"], other["answer"])
        if int(text.rsplit("#### ", 1)[1]) != answer:
            return text


# ---------------------------------------------------------------- tokenizer


def make_tokenizer():
    """Whole words with their leading space, single digits, signs; decoding gives the text back exactly."""
    split = Regex(r" ?[A-Za-z]+|[0-9]|\n|####| |[^\sA-Za-z0-9]")
    rng = random.Random(0)
    pieces = set("0123456789+-*/=. ?,:()$#") | {"\n", "####"}
    splitter = pre_tokenizers.Split(split, "isolated")
    for _ in range(3000):
        pieces |= {piece for piece, _ in splitter.pre_tokenize_str(make_problem(rng)["problem"])}
    vocab = {t: i for i, t in enumerate(["<pad>", "<eos>", "<unk>", *sorted(pieces)])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = splitter
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}"
        "{{ '\\n' if m['role'] == 'user' else eos_token }}{% endfor %}"
    )
    return tokenizer


# ---------------------------------------------------------------- training, by the scripts of ppo/


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(script, folder, **constants):
    """Runs a trainer from start to end in `folder`. Returns the folder of its last checkpoint and its last
    evaluation."""
    common = {"WEIGHT_DECAY": 0.01, "WARMUP_STEPS": 100, "LR_SCHEDULER_TYPE": "cosine", "NUM_EPOCHS": 1}
    common |= {"GRADIENT_ACCUMULATION_STEPS": 1, "EVAL_EVERY_N_STEPS": 0, "SAVE_EVERY_N_STEPS": 0}
    common |= {"SEED": SEED, "RESUME": "no", "OUTPUT_DIR": folder}
    words = [f"{key}={value}" for key, value in {**common, **constants}.items()]
    subprocess.check_call([sys.executable, str(ROOT / script), *words])
    evaluations = []
    for line in (folder / "logs/metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["phase"] == "eval":
            evaluations.append(record)
    return folder / f"step_{evaluations[-1]['step']}", evaluations[-1]


def train_policy(start, test_file, out, work, rng):
    """Trains the model of the folder `start` on solutions of which most follow a bad habit, each problem
    once, and copies it to `out`. Returns the last evaluation: how often it solves the held-out problems."""
    held_out = {json.loads(line)["problem"] for line in test_file.read_text().splitlines()}
    rows = []
    while len(rows) < SFT_STEPS * SFT_BATCH:
        problem = make_problem(rng)
        if problem["problem"] not in held_out:
            habit = rng.choices(list(HABITS), list(HABITS.values()))[0]
            rows.append({"input": problem["problem"], "output": habit_solution(problem, habit, rng)})
    write_rows(work / "habits.jsonl", rows)
    columns = {"type": "jsonl", "input": "input", "output": "output"}
    test_columns = {"type": "jsonl", "input": "problem", "output": "solution"}
    checkpoint, evaluation = train(
        "ppo/sft.py",
        work / "sft",
        ACTOR_MODEL=start,
        TRAIN_DATASETS=json.dumps([{"path": str(work / "habits.jsonl"), **columns}]),
        EVAL_DATASETS=json.dumps([{"path": str(test_file), **test_columns}]),
        BATCH_SIZE=SFT_BATCH,
        LEARNING_RATE=SFT_LEARNING_RATE,
    )
    # The last one, not best/: most demonstrations are wrong, and the held-out solutions are right
    shutil.copytree(checkpoint / "policy", out, dirs_exist_ok=True)
    return evaluation


def reward_pairs(count, rng, refuse=()):
    """Returns `count` pairs of a right and a wrong solution."""
    rows = []
    while len(rows) < count:
        problem = make_problem(rng)
        if problem["problem"] not in refuse:
            right = write_solution(problem["steps"], problem["answer"])
            wrong = wrong_solution(problem, rng)
            rows.append({"prompt": problem["problem"], "chosen": right, "rejected": wrong})
    return rows


def train_reward_model(policy, test_file, out, work, rng):
    """Trains a reward model from the policy's weights and copies it to `out`. Returns the last evaluation."""
    held_out = {json.loads(line)["problem"] for line in test_file.read_text().splitlines()}
    write_rows(work / "pairs.jsonl", reward_pairs(REWARD_STEPS * REWARD_BATCH, rng, held_out))
    write_rows(work / "pairs_test.jsonl", reward_pairs(1000, random.Random(SEED + 1)))
    columns = {"type": "jsonl", "prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    checkpoint, evaluation = train(
        "ppo/reward_model.py",
        work / "reward_model",
        BASE_MODEL=policy,
        TRAIN_DATASETS=json.dumps([{"path": str(work / "pairs.jsonl"), **columns}]),
        EVAL_DATASETS=json.dumps([{"path": str(work / "pairs_test.jsonl"), **columns}]),
        MAX_EVAL_PAIRS=1000,
        BATCH_SIZE=REWARD_BATCH,
        LEARNING_RATE=REWARD_LEARNING_RATE,
    )
    shutil.copytree(checkpoint / "reward_model", out, dirs_exist_ok=True)
    return evaluation


def main():
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key not in ("SEED", "OUT", "SFT_STEPS", "REWARD_STEPS"):
            sys.exit(f"make_tiny.py takes SEED=, OUT=, SFT_STEPS= and REWARD_STEPS=, not {word!r}")
        globals()[key] = value if key == "OUT" else int(value)
    out = Path(OUT)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    rng = random.Random(SEED)

    seen = set()
    rows = []
    while len(rows) < TRAIN_ROWS + PARQUET_ROWS + TEST_ROWS:
        problem = make_problem(rng)
        if problem["problem"] not in seen:
            seen.add(problem["problem"])
            solution = write_solution(problem["steps"], problem["answer"])
            rows.append({"problem": problem["problem"], "solution": solution})
    in_parquet = rows[TRAIN_ROWS + TEST_ROWS :]
    parts = {"train.jsonl": rows[:TRAIN_ROWS], "test.jsonl": rows[TRAIN_ROWS : TRAIN_ROWS + TEST_ROWS]}
    for name, part in parts.items():
        write_rows(out / name, part)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(in_parquet), out / "train.parquet")

    tokenizer = make_tokenizer()
    for row in rows:
        text = row["problem"] + "\n" + row["solution"]
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text, text

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    policy = LlamaForCausalLM(config)
    print(f"vocabulary {len(tokenizer)}, policy {policy.num_parameters():,} parameters", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        policy.save_pretrained(work / "start")
        tokenizer.save_pretrained(work / "start")
        solved = train_policy(work / "start", out / "test.jsonl", out / "policy", work, rng)
        scored = train_reward_model(out / "policy", out / "test.jsonl", out / "reward_model", work, rng)
    facts = {
        "seed": SEED,
        "sft_steps": SFT_STEPS,
        "reward_steps": REWARD_STEPS,
        "policy_accuracy_greedy": solved["accuracy_greedy"],
        "policy_accuracy_sampled": solved["accuracy_sampled"],
        "reward_model_pair_accuracy": scored["accuracy"],
        "reward_model_mean_right": scored["chosen_score"],
        "reward_model_mean_wrong": scored["rejected_score"],
    }
    (out / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
