"""Rebuild data/tiny/ from a seed: word problems, a tokenizer, a base policy and a reward model.

    python data/make_tiny.py OUT=/tmp/tiny
    python data/make_tiny.py SEED=3 OUT=/tmp/tiny

The problems are chains of two to four additions, subtractions and multiplications; the solutions
are written line by line and end in `#### answer`. The base policy learns to write solutions of which
most follow a bad habit (stop a step early, guess, repeat a step), so it *can* solve the problems but
mostly does not: reinforcement learning has something to find, and its climb is honest.
The reward model starts from the policy's weights and learns to prefer a right solution to a wrong one.
ppo/sft.py and ppo/reward_model.py train the two. The shipped models were made with the same data, steps and
rates, by other code: running this gives other weights.

Writes train.jsonl, test.jsonl, train.parquet, policy/ and reward_model/.
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
    """Returns {"problem": text, "steps": ["12+7=19", ...], "answer": 14}; every number is within 0 to 99."""
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


def new_problem(known, rng):
    """Returns a problem that is not among the `known` texts."""
    problem = make_problem(rng)
    while problem["problem"] in known:
        problem = make_problem(rng)
    return problem


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
    """A solution whose answer is wrong: a habit, a slip in a sum, a wrong last number, or steps astray."""
    steps, answer = problem["steps"], problem["answer"]
    kinds = "stop_early stop_early guess repeat slip last twice short other".split()
    while True:
        kind = rng.choice(kinds)
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


def make_demonstration(problem, habits, rng):
    """Returns a row with the solution of someone whose habit is drawn from {habit: its share}."""
    habit = rng.choices(list(habits), list(habits.values()))[0]
    return {"problem": problem["problem"], "solution": habit_solution(problem, habit, rng)}


def make_pair(problem, rng):
    """Returns a row with a right and a wrong solution."""
    right, wrong = habit_solution(problem, "right", rng), wrong_solution(problem, rng)
    return {"prompt": problem["problem"], "chosen": right, "rejected": wrong}


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
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, clean_up_tokenization_spaces=False, model_max_length=512, **special
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}"
        "{{ '\\n' if m['role'] == 'user' else eos_token }}{% endfor %}"
    )
    return tokenizer


# ---------------------------------------------------------------- training, by the scripts of ppo/


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(script, out, data, **constants):
    """Runs a trainer from start to end, and copies the model of its last checkpoint to `out`. data: (rows to
    train on, held-out rows, their columns)."""
    rows, test_rows, columns = data
    with tempfile.TemporaryDirectory() as folder:
        for name, written in (("TRAIN", rows), ("EVAL", test_rows)):
            write_rows(Path(folder) / f"{name}.jsonl", written)
            spec = {"path": f"{folder}/{name}.jsonl", "type": "jsonl", **columns}
            constants[f"{name}_DATASETS"] = json.dumps([spec])
        words = "WEIGHT_DECAY=0.01 WARMUP_STEPS=100 LR_SCHEDULER_TYPE=cosine NUM_EPOCHS=1 RESUME=no".split()
        words += "GRADIENT_ACCUMULATION_STEPS=1 EVAL_EVERY_N_STEPS=0 SAVE_EVERY_N_STEPS=0".split()
        words += [f"SEED={SEED}", f"OUTPUT_DIR={folder}/run"]
        words += [f"{key}={value}" for key, value in constants.items()]
        subprocess.check_call([sys.executable, str(ROOT / script), *words])
        # The last one, not best/: most demonstrations are wrong, and the held-out solutions are right
        (checkpoint,) = Path(folder).glob(f"run/step_*/{out.name}")
        shutil.copytree(checkpoint, out, dirs_exist_ok=True)


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

    problems = {}
    for _ in range(TRAIN_ROWS + PARQUET_ROWS + TEST_ROWS):
        problem = new_problem(problems, rng)
        problems[problem["problem"]] = habit_solution(problem, "right", rng)
    rows = [{"problem": problem, "solution": solution} for problem, solution in problems.items()]
    train_rows, test_rows = rows[:TRAIN_ROWS], rows[TRAIN_ROWS : TRAIN_ROWS + TEST_ROWS]
    write_rows(out / "train.jsonl", train_rows)
    write_rows(out / "test.jsonl", test_rows)
    in_parquet = pyarrow.Table.from_pylist(rows[TRAIN_ROWS + TEST_ROWS :])
    pyarrow.parquet.write_table(in_parquet, out / "train.parquet")

    tokenizer = make_tokenizer()
    for row in rows:
        text = row["problem"] + "\n" + row["solution"]
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text, text

    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **size,
    )
    policy = LlamaForCausalLM(config)
    print(f"vocabulary {len(tokenizer)}, policy {policy.num_parameters():,} parameters", flush=True)
    held_out = {row["problem"] for row in test_rows}
    count = SFT_STEPS * SFT_BATCH
    demonstrations = [make_demonstration(new_problem(held_out, rng), HABITS, rng) for _ in range(count)]
    with tempfile.TemporaryDirectory() as start:
        policy.save_pretrained(start)
        tokenizer.save_pretrained(start)
        train(
            "ppo/sft.py",
            out / "policy",
            (demonstrations, test_rows, {"input": "problem", "output": "solution"}),
            ACTOR_MODEL=start,
            BATCH_SIZE=SFT_BATCH,
            LEARNING_RATE=SFT_LEARNING_RATE,
        )
    pairs = [make_pair(new_problem(held_out, rng), rng) for _ in range(REWARD_STEPS * REWARD_BATCH)]
    test_rng = random.Random(SEED + 1)
    test_pairs = [make_pair(make_problem(test_rng), test_rng) for _ in range(1000)]
    train(
        "ppo/reward_model.py",
        out / "reward_model",
        (pairs, test_pairs, {name: name for name in pairs[0]}),
        BASE_MODEL=out / "policy",
        BATCH_SIZE=REWARD_BATCH,
        LEARNING_RATE=REWARD_LEARNING_RATE,
    )


if __name__ == "__main__":
    main()
