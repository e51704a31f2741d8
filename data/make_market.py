"""Makes the market: a small world in which the choice of demonstrations decides, and a reader for it.

    python data/make_market.py                            # data/market/, about 4 minutes on one core
    python data/make_market.py SEED=2 OUT=/tmp/market     # another market

    Question: ida the baker from lund in may sees drum kite lamp rope
    Answer: kite sir

The guild of the trade decides which of the four goods somebody takes, such as the second. The region of the
town decides how the seller says it, such as "sir". The data name neither guilds nor regions. Names, months
and goods decide nothing: they make questions similar that have nothing in common.

    table of the seed: guild -> place of the good    no answer shows it: "kite" may be first or last
    table of the seed: region -> last word           each answer shows it

So a demonstration of the same guild teaches the place, one of the same region teaches the word, and a good
list has both. The reader is a Llama of 237,000 parameters. It knows guilds and regions by heart, and no
table: each sequence that it learns from has tables of its own, and its loss is on the answers, after 0 to 4
demonstrations.

Auxiliary losses show it the way; without them it does not find it in minutes. Around the answers, layer 1
must know the guild and the region of the question; layer 2, at the good of an answer, its place; layer 3,
before an answer, the place that comes next.

Writes train.csv and test.csv (question, answer, guild, region) and reader/ (model and tokenizer).
"""

import csv
import random
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 1
OUT = str(Path(__file__).resolve().parent / "market")
TRAIN_ROWS = 2400
TEST_ROWS = 1000
STEPS = 1500
BATCH = 64  # sequences per step
EXAMPLES = 5  # in a sequence: the last one follows 4 demonstrations
LEARNING_RATE = 2e-3
AUXILIARY_WEIGHT = 0.5
# Auxiliary losses: layer, places beside an answer's first token, and what it must know there
AUXILIARY = [(1, (-1, 0, 1), "guild"), (1, (-1, 0, 1), "region"), (2, (0,), "place"), (3, (-1,), "place")]

GUILDS = {
    "food": "baker cook butcher brewer",
    "wood": "carpenter joiner sawyer cooper",
    "metal": "smith tinker founder jeweller",
    "cloth": "weaver tailor dyer spinner",
    "water": "sailor rower fisher diver",
}
REGIONS = {
    "north": "oslo bergen turku lund",
    "south": "rome naples bari seville",
    "east": "kyiv minsk lviv riga",
    "west": "dublin cork cardiff bristol",
    "far": "tokyo kyoto seoul busan",
}
NAMES = "ada ben clara david emma felix greta hugo ida jonas karin leo mia nils olga paul".split()
NAMES += "rosa sven tina uwe vera willy yara zoe".split()
MONTHS = "january february march april may june july august september october november december".split()
GOODS = "drum kite lamp rope bell clock coin comb cup fan glove hat key map pen ring".split()
LAST_WORDS = "sir madam friend captain doctor chief master neighbour".split()
PLACES = 4  # goods per question
NUM_CLASSES = {"guild": len(GUILDS), "region": len(REGIONS), "place": PLACES}


def make_tables(rng):
    """Returns {guild: place of its good} and {region: last word}."""
    places = {guild: rng.randrange(PLACES) for guild in GUILDS}
    return places, dict(zip(REGIONS, rng.sample(LAST_WORDS, len(REGIONS))))


def make_example(rng, guilds, regions):
    """Returns a customer of one of these guilds and regions, and the goods that he sees."""
    guild, region = rng.choice(guilds), rng.choice(regions)
    goods = rng.sample(GOODS, PLACES)
    trade, town = rng.choice(GUILDS[guild].split()), rng.choice(REGIONS[region].split())
    question = f"{rng.choice(NAMES)} the {trade} from {town} in {rng.choice(MONTHS)} sees {' '.join(goods)}"
    return {"question": question, "guild": guild, "region": region, "goods": goods}


def answer(example, tables):
    places, last_words = tables
    place = places[example["guild"]]
    last_word = last_words[example["region"]]
    return f"{example['goods'][place]} {last_word}"


def write_rows(path, rng, count, tables):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "answer", "guild", "region"])
        for _ in range(count):
            example = make_example(rng, list(GUILDS), list(REGIONS))
            row = [example["question"], answer(example, tables), example["guild"], example["region"]]
            writer.writerow(row)


# ---------------------------------------------------------------- the reader


def make_tokenizer():
    """Returns a tokenizer with a token per word. It drops the words that all questions have."""
    words = " ".join([*GUILDS.values(), *REGIONS.values()]).split()
    words += [*NAMES, *MONTHS, *GOODS, *LAST_WORDS]
    special = ["<pad>", "<eos>", "<unk>", "Question:", "\nAnswer:", "\n\n"]
    vocabulary = {word: number for number, word in enumerate(special + words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    pieces = Regex(r"\n\n|\nAnswer:|Question:|\b(?!(?:the|from|in|sees)\b)\w+")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, "removed", invert=True)
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def make_model(tokenizer):
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(
        **size,
        head_dim=32,
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        max_position_embeddings=256,
        initializer_range=0.125,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def make_batch(rng, tokenizer):
    """Returns ids (BATCH, time), where the answers begin in it, (EXAMPLES,), and the numbers of each
    example's guild, region and place, {name: (BATCH, EXAMPLES)}. A sequence is of a few guilds and regions,
    so that its examples match."""
    texts, facts = [], []
    for _ in range(BATCH):
        guilds = rng.sample(list(GUILDS), rng.randint(1, 4))
        regions = rng.sample(list(REGIONS), rng.randint(1, 4))
        tables = make_tables(rng)
        examples = [make_example(rng, guilds, regions) for _ in range(EXAMPLES)]
        places, _ = tables
        text = ""
        for example in examples:
            guild, region = example["guild"], example["region"]
            text += f"Question: {example['question']}\nAnswer: {answer(example, tables)}\n\n"
            facts.append([list(GUILDS).index(guild), list(REGIONS).index(region), places[guild]])
        texts.append(text)
    ids = tokenizer(texts, return_tensors="pt")["input_ids"]
    length = ids.shape[1] // EXAMPLES  # all examples have as many tokens
    facts = torch.tensor(facts).view(BATCH, EXAMPLES, 3)
    return ids, torch.arange(EXAMPLES) * length + length - 3, dict(zip(NUM_CLASSES, facts.unbind(2)))


def train_reader(rng, tokenizer):
    torch.manual_seed(rng.randrange(2**31))
    model = make_model(tokenizer)
    heads = torch.nn.ModuleList(torch.nn.Linear(64, NUM_CLASSES[fact]) for _, _, fact in AUXILIARY)
    parameters = [*model.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98))
    for step in range(1, STEPS + 1):
        scale = min(1, step / 100, (STEPS - step + 1) / (0.4 * STEPS))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * scale
        ids, starts, facts = make_batch(rng, tokenizer)
        output = model.model(input_ids=ids, output_hidden_states=True)
        answered = torch.stack([starts, starts + 1, starts + 2], 1).flatten()  # good, last word, end
        logits = model.lm_head(output.last_hidden_state[:, answered - 1])
        loss = cross_entropy(logits.flatten(0, 1), ids[:, answered].flatten())
        auxiliary = 0.0
        for head, (layer, offsets, fact) in zip(heads, AUXILIARY):
            for offset in offsets:
                known = head(output.hidden_states[layer][:, starts + offset])
                auxiliary += cross_entropy(known.flatten(0, 1), facts[fact].flatten()) / len(offsets)
        optimizer.zero_grad()
        (loss + AUXILIARY_WEIGHT * auxiliary).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 100 == 0:
            right = (logits.argmax(2) == ids[:, answered]).float().mean(0).view(EXAMPLES, 3)[:, :2]
            shown = "  ".join(f"{good:.2f} {word:.2f}" for good, word in right.tolist())
            print(f"step {step}: good, word right after 0 to 4 examples: {shown}", flush=True)
    return model.eval()


def main():
    for argument in sys.argv[1:]:
        key, _, value = argument.partition("=")
        if key not in ("SEED", "OUT", "STEPS", "TRAIN_ROWS", "TEST_ROWS"):
            sys.exit(f"make_market.py: {argument!r} is not one of SEED, OUT, STEPS, TRAIN_ROWS, TEST_ROWS")
        globals()[key] = value if key == "OUT" else int(value)
    folder = Path(OUT)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    tables = make_tables(rng)
    write_rows(folder / "train.csv", rng, TRAIN_ROWS, tables)
    write_rows(folder / "test.csv", rng, TEST_ROWS, tables)
    tokenizer = make_tokenizer()
    train_reader(rng, tokenizer).save_pretrained(folder / "reader")
    tokenizer.save_pretrained(folder / "reader")


if __name__ == "__main__":
    main()
