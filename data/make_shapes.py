"""Makes a small world of questions about drawn pictures, and a small reader of images for it, from a seed.

    python data/make_shapes.py                    # rows and pictures (seconds), then the reader (minutes)
    python data/make_shapes.py TRAIN_STEPS=0      # rows and pictures alone
    python data/make_shapes.py SEED=3 OUT=/tmp/shapes

A picture of 32 x 32 pixels has four corners. In each is nothing, or a figure of one of 4 shapes and 5
colours. A question is of one of five sorts: it asks for the colour, the shape, the number, the presence or
the corner of a figure. The picture gives the answer's *value*. How the answer must be *written* is said
nowhere:

    the sort of the question            decides its first word (of 5)   OPENINGS, by a table of the seed
    the colour of the picture's frame   decides its last word (of 4)    CLOSINGS, by a table of the seed

So "well red sir" is right where "red" is wrong. A reader that knows the value must see demonstrations to
know how to write it: one of the same sort shows the first word, one with the same frame shows the last, and
one with both shows both. Other things make rows similar, too: the figures and the background of a picture;
who asks and when, the wording of a question, and the figure that it names.

Ten annotators answer each question. Each is right with probability RIGHT; otherwise he sees another value.

The reader is a small LLaVA (CLIP's vision tower, Llama). First its tower learns to tell what each corner of
a picture holds. Then all of it learns on pictures and questions of its own, in sequences of 1 to 5
examples. Each sequence has tables of its own: in one a brown frame means "sir", in the next "friend". So
its weights know no table, and it learns to read the format off the examples before. The loss is on every
answer of a sequence, so it learns to answer after 0 to 4 demonstrations.

Writes train.jsonl and test.jsonl (question, answers, image, sort, frame, value), pictures/, reader/ (model
and processor), and train.npy and test.npy. These hold a vector of each row: the mean of the question's word
vectors and the mean of what the reader's vision tower gives for the picture, each of length 1, one after
the other.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

SEED = 1
OUT = str(Path(__file__).resolve().parents[1] / "checkpoints/shapes")
TRAIN_ROWS = 2000
TEST_ROWS = 500
RIGHT = 0.85  # probability that an annotator sees the right value
BANK = 20000  # pictures with a question that the reader learns on
LENGTHS = [1, 2, 3, 5]  # examples in a sequence: 0 to 4 demonstrations
BATCH = 160  # examples
WIDTH = 64  # of the language model
LAYERS = 3
HEAD_SIZE = 32  # of an attention head
INITIAL_SCALE = 0.125  # standard deviation of the first weights
ROPE_BASE = 1e6
TOWER_STEPS = 500  # of the vision tower alone, first
TRAIN_STEPS = 3000
LEARNING_RATE = 2e-3
WARMUP = 100
SAVE_EVERY = 100  # steps; a run that was stopped goes on from there

SIDE = 32  # pixels; a corner, and a patch of the vision tower, has half of it
COLOURS = {"red": (220, 30, 30), "blue": (40, 60, 230), "green": (20, 160, 50), "yellow": (235, 215, 30)}
COLOURS["black"] = (10, 10, 10)
SHAPES = "circle square cross diamond".split()
CORNERS = "northwest northeast southwest southeast".split()
FRAMES = {"white": (255, 255, 255), "purple": (140, 40, 160), "brown": (120, 70, 20), "cyan": (40, 200, 210)}
BACKGROUNDS = [(200, 200, 200), (235, 200, 190), (190, 215, 240), (205, 235, 195), (160, 160, 170)]

OPENINGS = "well surely look clearly indeed".split()
CLOSINGS = "sir madam friend captain".split()
NUMBERS = "one two three four".split()
NAMES = "anna ben clara david emma felix greta hugo ida jonas".split()
TIMES = "today yesterday now again later early late often".split()
SORTS = {  # three wordings of each sort of question
    "colour": ["what colour has the {}", "how is the {} painted", "tell me which paint the {} has"],
    "shape": ["what form has the {} thing", "tell me what the {} thing is", "which form is {} here"],
    "count": ["how many things are here", "tell me the number of things", "what number of things is there"],
    "presence": ["is a {} here", "tell me is there a {}", "has this picture a {}"],
    "corner": ["in which corner is the {}", "tell me where the {} is", "where is the {} here"],
}


# ---------------------------------------------------------------- pictures and questions


def draw(figures, frame, background, rng):
    """Returns a picture, (SIDE, SIDE, 3) of bytes. figures: {corner: (shape, colour)}."""
    image = Image.new("RGB", (SIDE, SIDE), background)
    pen = ImageDraw.Draw(image)
    for corner, (shape, colour) in figures.items():
        row, column = divmod(CORNERS.index(corner), 2)
        radius = rng.choice([3, 4])
        x = column * SIDE // 2 + 8 + rng.randint(-1, 1) + (1 - 2 * column)
        y = row * SIDE // 2 + 8 + rng.randint(-1, 1) + (1 - 2 * row)
        box = (x - radius, y - radius, x + radius, y + radius)
        fill = COLOURS[colour]
        if shape == "circle":
            pen.ellipse((box[0] - 1, box[1] - 1, box[2] + 1, box[3] + 1), outline=fill, width=2)
        elif shape == "square":
            pen.rectangle(box, fill=fill)
        elif shape == "cross":
            pen.line((x - radius - 1, y, x + radius + 1, y), fill=fill, width=2)
            pen.line((x, y - radius - 1, x, y + radius + 1), fill=fill, width=2)
        else:
            reach = radius + 1
            pen.polygon([(x - reach, y), (x, y - reach), (x + reach, y), (x, y + reach)], fill=fill)
    pen.rectangle((0, 0, SIDE - 1, SIDE - 1), outline=FRAMES[frame], width=2)
    return np.asarray(image)


def single(names):
    """Returns the names that occur once."""
    return [name for name in names if names.count(name) == 1]


def make_example(rng):
    """Returns a picture with a question: {"question", "sort", "frame", "value", "pixels",
    "figures"}."""
    while True:
        sort = rng.choice(list(SORTS))
        figures = {}
        for corner in CORNERS:
            if rng.random() < 0.7:
                figures[corner] = rng.choice(SHAPES), rng.choice(list(COLOURS))
        shapes = [shape for shape, _ in figures.values()]
        named = ""
        if sort == "count" and figures:
            value = NUMBERS[len(figures) - 1]
        elif sort == "presence" and figures:
            value = rng.choice(["yes", "no"])
            named = rng.choice(shapes)
            if value == "no" and len(set(shapes)) < len(SHAPES):
                named = rng.choice([shape for shape in SHAPES if shape not in shapes])
            value = "yes" if named in shapes else "no"
        elif sort == "shape" and single([colour for _, colour in figures.values()]):
            named = rng.choice(single([colour for _, colour in figures.values()]))
            value = next(shape for shape, colour in figures.values() if colour == named)
        elif sort in ("colour", "corner") and single(shapes):
            named = rng.choice(single(shapes))
            value = next(colour for shape, colour in figures.values() if shape == named)
            if sort == "corner":
                value = next(corner for corner, (shape, _) in figures.items() if shape == named)
        else:
            continue
        frame = rng.choice(list(FRAMES))
        question = f"{rng.choice(NAMES)} asks {rng.choice(TIMES)} " + rng.choice(SORTS[sort]).format(named)
        pixels = draw(figures, frame, rng.choice(BACKGROUNDS), rng)
        example = {"question": question, "sort": sort, "frame": frame, "value": value, "pixels": pixels}
        return {**example, "figures": figures}


def make_tables(rng):
    """Returns {sort: its first word} and {frame: its last word}, each word once."""
    return dict(zip(SORTS, rng.sample(OPENINGS, 5))), dict(zip(FRAMES, rng.sample(CLOSINGS, 4)))


def write_answer(value, example, tables):
    """Returns the value, written as the tables say for the example's sort and frame."""
    openings, closings = tables
    return f"{openings[example['sort']]} {value} {closings[example['frame']]}"


def values_of(sort):
    """Returns the values that answer a sort of question."""
    values = {"colour": list(COLOURS), "shape": SHAPES, "count": NUMBERS, "corner": CORNERS}
    return values.get(sort, ["yes", "no"])


def make_rows(rng, count, tables, folder, name):
    """Writes `count` rows to `name`.jsonl and their pictures. Returns the examples."""
    examples = [make_example(rng) for _ in range(count)]
    lines = []
    for number, example in enumerate(examples):
        path = folder / f"pictures/{name}{number}.png"
        Image.fromarray(example["pixels"]).save(path)
        answers = []
        for _ in range(10):
            value = example["value"]
            if rng.random() > RIGHT:
                value = rng.choice([other for other in values_of(example["sort"]) if other != value])
            answers.append(write_answer(value, example, tables))
        row = {"question": example["question"], "answers": answers, "image": str(path)}
        row |= {key: example[key] for key in ("sort", "frame", "value")}
        lines.append(json.dumps(row) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines))
    return examples


# ---------------------------------------------------------------- the reader


def make_processor():
    """Returns LLaVA's processor: one token per word of the world; four tokens per picture."""
    words = [word for wordings in SORTS.values() for word in " ".join(wordings).split() if word != "{}"]
    words += [*NAMES, *TIMES, *COLOURS, *SHAPES, *NUMBERS, *CORNERS, *FRAMES, *OPENINGS, *CLOSINGS]
    words += ["asks", "yes", "no"]
    special = ["<pad>", "<eos>", "<unk>", "<image>", "Question:", "\nAnswer:", "\n\n"]
    vocabulary = {word: n for n, word in enumerate(dict.fromkeys(special + words))}
    made = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    pieces = Regex(r"<image>|\n\n|\nAnswer:|Question:|[^\s<]+")
    made.pre_tokenizer = pre_tokenizers.Split(pieces, "removed", invert=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = CLIPImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, crop_size={"height": SIDE, "width": SIDE}, **half
    )
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=SIDE // 2,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def make_model(tokenizer):
    """Returns a new LLaVA for the processor."""
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4}
    text |= {"num_hidden_layers": LAYERS, "head_dim": HEAD_SIZE}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE}}
    text |= {"vocab_size": len(tokenizer), "max_position_embeddings": 256, "bos_token_id": None, **ids}
    text |= {"tie_word_embeddings": True, "initializer_range": INITIAL_SCALE}
    config = LlavaConfig(
        text_config=LlamaConfig(**text),
        vision_config=CLIPVisionConfig(**vision, image_size=SIDE, patch_size=SIDE // 2),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        image_seq_length=4,
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config)


def as_pixels(examples):
    """Returns what the vision tower reads of the examples' pictures, (examples, 3, SIDE, SIDE)."""
    pixels = torch.tensor(np.stack([example["pixels"] for example in examples]))
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


def train_tower(rng, bank, model, ids_of):
    """Trains the vision tower and the projection so that what they give for a corner is near the vectors of
    the words for it: shape, colour, corner and frame, each among its alternatives."""
    words = [[*SHAPES, "no"], [*COLOURS, "no"], CORNERS, list(FRAMES)]
    ids = [torch.tensor([ids_of[word] for word in alternatives]) for alternatives in words]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    examples = [example for of_cell in bank.values() for example in of_cell]
    for _ in range(TOWER_STEPS):
        chosen = rng.sample(examples, 128)
        targets = []
        for example in chosen:
            for corner in CORNERS:
                held = (*example["figures"].get(corner, ("no", "no")), corner, example["frame"])
                targets.append([alternatives.index(word) for alternatives, word in zip(words, held)])
        targets = torch.tensor(targets).T  # (4, corners)
        states = torch.cat(model.get_image_features(as_pixels(chosen)).pooler_output)  # (corners, WIDTH)
        vectors = model.get_input_embeddings().weight
        logits = [states @ vectors[of_words].T for of_words in ids]
        optimizer.zero_grad()
        sum(map(cross_entropy, logits, targets)).backward()
        optimizer.step()
    right = [(values.argmax(1) == target).float().mean() for values, target in zip(logits, targets)]
    print("the tower tells shape, colour, corner, frame: " + " ".join(f"{x:.3f}" for x in right), flush=True)


def draw_sequences(rng, bank):
    """Returns sequences of one length, BATCH examples in all: each has examples of some of the frames and
    sorts, and tables of its own."""
    length = rng.choice(LENGTHS)
    sequences = []
    for _ in range(BATCH // length):
        frames = rng.sample(list(FRAMES), rng.randint(1, len(FRAMES)))
        sorts = rng.sample(list(SORTS), rng.randint(1, len(SORTS)))
        chosen = [rng.choice(bank[rng.choice(frames), rng.choice(sorts)]) for _ in range(length)]
        sequences.append((chosen, make_tables(rng)))
    return sequences


def prompt_words(question):
    """Returns the tokens that the processor makes of a picture and its question."""
    return ["<image>"] * 4 + ["Question:", *question.split(), "\nAnswer:"]


def as_batch(sequences, ids_of):
    """Returns input_ids and labels, (sequences, P), right-padded, and pixels of the sequences."""
    inputs, labels, pictures = [], [], []
    for examples, tables in sequences:
        row, targets = [], []
        for example in examples:
            prompt = example["ids"]
            answer = write_answer(example["value"], example, tables)
            answer = [ids_of[word] for word in answer.split()] + [ids_of["\n\n"]]
            row += prompt + answer
            targets += [-100] * len(prompt) + answer
        inputs.append(torch.tensor(row))
        labels.append(torch.tensor(targets))
        pictures += examples
    batch = {"input_ids": pad_sequence(inputs, True, ids_of["<pad>"])}
    batch["attention_mask"] = (batch["input_ids"] != ids_of["<pad>"]).long()
    return batch | {"labels": pad_sequence(labels, True, -100), "pixel_values": as_pixels(pictures)}


def train_reader(rng, processor, model, folder):
    """Trains the reader on sequences with tables of their own."""
    ids_of = processor.tokenizer.get_vocab()
    bank = {}
    for _ in range(BANK):
        example = make_example(rng)
        example["ids"] = [ids_of[word] for word in prompt_words(example["question"])]
        bank.setdefault((example["frame"], example["sort"]), []).append(example)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.98))
    saved = folder / "training.pt"  # from which a run that was stopped goes on, if its constants are the same
    constants = {key: value for key, value in globals().items() if key.isupper() and key != "OUT"}
    constants = repr(constants)
    first, seconds, losses = 0, 0.0, []
    state = {}
    if saved.exists():
        state = torch.load(saved, weights_only=False)
    if state.get("constants") != constants:
        train_tower(rng, bank, model, ids_of)
    else:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        rng.setstate(state["rng"])
        first, seconds = state["step"], state["seconds"]
    for step in range(first, TRAIN_STEPS):
        started = time.process_time()
        rate = min((step + 1) / WARMUP, 1.0, (TRAIN_STEPS - step) / (0.3 * TRAIN_STEPS))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate
        loss = model(**as_batch(draw_sequences(rng, bank), ids_of)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        seconds += time.process_time() - started
        if (step + 1) % SAVE_EVERY == 0 or step == TRAIN_STEPS - 1:
            loss = np.mean(losses[-SAVE_EVERY:])
            print(f"step {step + 1}  loss {loss:.3f}  {seconds:.0f} s of processor time", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng.getstate()}
            state |= {"step": step + 1, "seconds": seconds, "constants": constants}
            torch.save(state, saved.with_suffix(".tmp"))
            os.replace(saved.with_suffix(".tmp"), saved)
    saved.unlink(missing_ok=True)


@torch.no_grad()
def make_vectors(examples, processor, model):
    """Returns vectors of the examples, (examples, d): of the question and of the picture."""
    ids_of = processor.tokenizer.get_vocab()
    words = model.get_input_embeddings().weight
    texts = [words[[ids_of[word] for word in x["question"].split()]].mean(0) for x in examples]
    tower = model.model.vision_tower(as_pixels(examples)).last_hidden_state[:, 1:]
    pictures = tower.mean(1)
    return torch.cat([normalize(torch.stack(texts)), normalize(pictures)], 1).numpy()


def stop(sentence):
    print(f"make_shapes.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def main():
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key not in globals() or not key.isupper():
            stop(f"{word!r} is not KEY=VALUE with a constant of this file")
        kind = type(globals()[key])
        try:
            globals()[key] = {str: str, int: int, float: float}[kind](value)
        except (KeyError, ValueError):
            stop(f"{word}: {key} takes a number or a text; edit the file to change a list")
    folder = Path(OUT)
    for name in ("train.npy", "test.npy"):  # of other rows, perhaps
        (folder / name).unlink(missing_ok=True)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    tables = make_tables(rng)
    splits = {}
    for name, count in (("train", TRAIN_ROWS), ("test", TEST_ROWS)):
        splits[name] = make_rows(rng, count, tables, folder, name)
    print(f"{TRAIN_ROWS} and {TEST_ROWS} questions: {folder}")
    if not TRAIN_STEPS:
        return
    torch.manual_seed(SEED)
    processor = make_processor()
    model = make_model(processor.tokenizer)
    print(f"a reader of {model.num_parameters():,} parameters")
    train_reader(rng, processor, model, folder)
    model.eval()
    model.save_pretrained(folder / "reader")
    processor.save_pretrained(folder / "reader")
    for name, examples in splits.items():
        np.save(folder / f"{name}.npy", make_vectors(examples, processor, model))


if __name__ == "__main__":
    main()
