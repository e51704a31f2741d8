"""Rebuild data/tiny/ from a seed: word problems, a tokenizer, a base policy and a reward model.

    python data/make_tiny.py            # about 15 minutes on 2 cores
    python data/make_tiny.py SEED=3 OUT=/tmp/tiny

The problems are chains of two to four sums with one- and two-digit numbers; the solutions
are written line by line and end in `#### answer`. The base policy learns to write solutions of which
most follow a bad habit (stop a step early, guess, repeat a step), so it *can* solve the problems but
mostly does not: reinforcement learning has something to find, and its climb is honest.
The reward model starts from the policy's weights and learns, by the Bradley-Terry loss, to
prefer a right solution to a wrong one; its accuracy on held-out pairs is printed.

Writes train.jsonl, test.jsonl, train.parquet, policy/, reward_model/ and facts.json.
"""

import json
import random
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

SEED = 1
OUT = str(Path(__file__).resolve().parent / "tiny")
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


# ---------------------------------------------------------------- training


def pad_right(rows, pad):
    width = max(map(len, rows))
    ids = torch.tensor([r + [pad] * (width - len(r)) for r in rows])
    mask = torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows])
    return ids, mask


def cosine_scale(step, total, warmup=100):
    """Factor of the learning rate: a linear warm-up, then half a cosine down to 0.01."""
    cosine = torch.cos(torch.tensor(step / total * torch.pi)).item()
    return min((step + 1) / warmup, 0.5 * (1 + cosine) + 0.01)


def train_policy(model, tokenizer, held_out, rng):
    optimizer = torch.optim.AdamW(model.parameters(), lr=SFT_LEARNING_RATE, weight_decay=0.01, fused=True)
    started = time.time()
    for step in range(SFT_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = SFT_LEARNING_RATE * cosine_scale(step, SFT_STEPS)
        prompts = []
        solutions = []
        while len(prompts) < SFT_BATCH:
            problem = make_problem(rng)
            if problem["problem"] not in held_out:
                habit = rng.choices(list(HABITS), list(HABITS.values()))[0]
                prompts.append(problem["problem"] + "\n")
                solutions.append(habit_solution(problem, habit, rng) + tokenizer.eos_token)
        prompt_ids = tokenizer(prompts)["input_ids"]
        solution_ids = tokenizer(solutions)["input_ids"]
        ids, mask = pad_right([p + s for p, s in zip(prompt_ids, solution_ids)], tokenizer.pad_token_id)
        labels = ids.masked_fill(mask == 0, -100)
        for row, p in zip(labels, prompt_ids):
            row[: len(p)] = -100
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == SFT_STEPS - 1:
            seconds = time.time() - started
            print(f"policy  step {step:5d}/{SFT_STEPS}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)


def reward_pairs(count, tokenizer, rng, refuse=()):
    """ids of `count` right solutions, then of `count` wrong ones of the same problems."""
    texts = []
    while len(texts) < count:
        problem = make_problem(rng)
        if problem["problem"] not in refuse:
            right = write_solution(problem["steps"], problem["answer"])
            wrong = wrong_solution(problem, rng)
            texts.append([f"{problem['problem']}\n{text}{tokenizer.eos_token}" for text in (right, wrong)])
    rights, wrongs = zip(*texts)
    return tokenizer([*rights, *wrongs])["input_ids"]


def reward_scores(model, rows, pad):
    ids, mask = pad_right(rows, pad)
    hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    last = hidden[torch.arange(len(rows)), mask.sum(1) - 1]  # (rows, width) at the last real token
    return model.score(last)[:, 0]  # (rows,)


def train_reward_model(model, tokenizer, held_out, rng):
    optimizer = torch.optim.AdamW(model.parameters(), lr=REWARD_LEARNING_RATE, weight_decay=0.01, fused=True)
    started = time.time()
    for step in range(REWARD_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = REWARD_LEARNING_RATE * cosine_scale(step, REWARD_STEPS)
        pairs = reward_pairs(REWARD_BATCH, tokenizer, rng, held_out)
        scores = reward_scores(model, pairs, tokenizer.pad_token_id)
        margin = scores[:REWARD_BATCH] - scores[REWARD_BATCH:]
        near_zero = 0.01 * scores.square().mean()
        loss = -F.logsigmoid(margin).mean() + near_zero
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == REWARD_STEPS - 1:
            right = (margin > 0).float().mean()
            seconds = time.time() - started
            done = f"step {step:5d}/{REWARD_STEPS}  loss {loss.item():.4f}"
            print(f"reward  {done}  right pairs {right:.2f}  {seconds:.0f} s", flush=True)


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
        (out / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(in_parquet), out / "train.parquet")
    held_out = {row["problem"] for row in parts["test.jsonl"]}

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
    train_policy(policy, tokenizer, held_out, rng)
    policy.save_pretrained(out / "policy")
    tokenizer.save_pretrained(out / "policy")

    reward_model = LlamaForSequenceClassification.from_pretrained(out / "policy", num_labels=1)
    train_reward_model(reward_model, tokenizer, held_out, rng)
    reward_model.save_pretrained(out / "reward_model")
    tokenizer.save_pretrained(out / "reward_model")

    with torch.no_grad():
        pairs = reward_pairs(1000, tokenizer, random.Random(SEED + 1))
        right, wrong = reward_scores(reward_model, pairs, tokenizer.pad_token_id).chunk(2)
    facts = {
        "seed": SEED,
        "sft_steps": SFT_STEPS,
        "reward_steps": REWARD_STEPS,
        "reward_model_pair_accuracy": (right > wrong).float().mean().item(),
        "reward_model_mean_right": right.mean().item(),
        "reward_model_mean_wrong": wrong.mean().item(),
    }
    (out / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
