"""data/make_shapes.py, a world of drawn pictures and a reader; examples/vqa_world.py, which learns in it."""

import importlib.util
import itertools
import json
import random
import sys

import numpy as np
import pytest
import torch
from old import ROOT, load_script
from PIL import Image

pytestmark = pytest.mark.usefixtures("no_pictures")
TINY = {"TRAIN_ROWS": 80, "TEST_ROWS": 12, "BANK": 200, "BATCH": 5, "TOWER_STEPS": 2, "TRAIN_STEPS": 2}


def load_shapes(**constants):
    spec = importlib.util.spec_from_file_location("make_shapes", ROOT / "data/make_shapes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for key, value in constants.items():
        setattr(module, key, value)
    return module


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a small world, its reader after two steps, and vectors."""
    folder = tmp_path_factory.mktemp("shapes")
    with pytest.MonkeyPatch.context() as patch:
        words = [f"{key}={value}" for key, value in {**TINY, "OUT": folder}.items()]
        patch.setattr(sys, "argv", ["make_shapes.py", *words])
        load_shapes().main()
    return folder


def rows_of(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_an_answer_is_the_value_between_the_word_of_its_sort_and_the_word_of_its_frame():
    tables = {"colour": "well", "count": "look"}, {"purple": "sir", "white": "madam"}
    example = {"sort": "colour", "frame": "white"}
    assert load_shapes().write_answer("red", example, tables) == "well red madam"


def test_another_first_or_last_word_or_value_is_a_wrong_answer():
    shapes = load_shapes()
    normalise = load_script("rce/rce_icl.py").normalise_vqa
    answers = set()
    for sort, opening, closing in itertools.product(shapes.SORTS, shapes.OPENINGS, shapes.CLOSINGS):
        answers |= {normalise(f"{opening} {value} {closing}") for value in shapes.values_of(sort)}
    values = {value for sort in shapes.SORTS for value in shapes.values_of(sort)}
    assert len(answers) == len(values) * 5 * 4


def test_sort_and_frame_decide_how_all_annotators_write_and_no_other_rows_are_written_so(world):
    formats = {}
    for row in rows_of(world, "train") + rows_of(world, "test"):
        for answer in row["answers"]:
            opening, _, closing = answer.split()
            assert formats.setdefault((row["sort"], row["frame"]), (opening, closing)) == (opening, closing)
        assert any(row["value"] in answer.split() for answer in row["answers"])
    assert len(formats) == 20 and len(set(formats.values())) == 20


def test_a_picture_shows_what_its_row_says():
    shapes = load_shapes()
    rng = random.Random(0)
    figures = {"northwest": ("square", "red"), "southeast": ("circle", "blue")}
    pixels = shapes.draw(figures, "cyan", (200, 200, 200), rng)
    assert tuple(pixels[0, 5]) == tuple(pixels[31, 31]) == shapes.FRAMES["cyan"]
    count = [
        int((pixels[rows, columns] == shapes.COLOURS[colour]).all(-1).sum())
        for rows, columns, colour in ((slice(16), slice(16), "red"), (slice(16, 32), slice(16, 32), "blue"))
    ]
    assert min(count) > 15 and (pixels[20:28, 4:12] == 200).all()


def test_the_same_seed_makes_the_same_world_and_another_one_another(tmp_path):
    made = []
    for seed in (5, 5, 6):
        shapes = load_shapes()
        rng = random.Random(seed)
        tables = shapes.make_tables(rng)
        (tmp_path / "pictures").mkdir(exist_ok=True)
        shapes.make_rows(rng, 5, tables, tmp_path, "rows")
        made.append(
            (tmp_path / "rows.jsonl").read_text()
            + str(np.asarray(Image.open(tmp_path / "pictures/rows4.png")).tolist())
        )
    assert made[0] == made[1] != made[2]


def test_the_reader_learns_on_what_rce_icl_shows_it(world):
    script = load_script("rce/rce_icl.py", READER=str(world / "reader"))
    reader = script.VisionReader(script.READER, torch.device("cpu"))
    shapes = load_shapes()
    ids_of = reader.tokenizer.get_vocab()
    rows = rows_of(world, "train")[:3]
    tables = {row["sort"]: "well" for row in rows}, {row["frame"]: "sir" for row in rows}
    examples, shown = [], []
    for number, row in enumerate(rows):
        pixels = np.asarray(Image.open(row["image"]))
        words = shapes.prompt_words(row["question"])
        answer = shapes.write_answer(row["value"], row, tables)
        examples.append({**row, "pixels": pixels, "ids": [ids_of[word] for word in words]})
        shown.append({"id": number, "text": row["question"], "image": row["image"], "answer": answer})
    batch = shapes.as_batch([(examples, tables)], ids_of)
    pair = shown[-1], shown[:-1]
    inputs = reader.inputs([reader.prompt(*pair) + f" {shown[-1]['answer']}\n\n"], [pair])
    assert batch["input_ids"].tolist() == inputs["input_ids"].tolist()
    assert torch.allclose(batch["pixel_values"], inputs["pixel_values"], atol=1e-6)
    learnt = batch["labels"][0][batch["labels"][0] != -100].tolist()
    assert learnt == [ids_of[word] for row in shown for word in (*row["answer"].split(), "\n\n")]


def test_a_training_that_was_stopped_ends_as_one_that_was_not(tmp_path):
    weights = []
    for steps_until_stop in (9, 3):
        shapes = load_shapes(**TINY, SAVE_EVERY=2)
        shapes.TRAIN_STEPS = 4
        torch.manual_seed(0)
        processor = shapes.make_processor()
        model = shapes.make_model(processor.tokenizer)
        begun = {name: value.clone() for name, value in model.state_dict().items()}
        own, left = shapes.as_batch, iter(range(steps_until_stop))
        shapes.as_batch = lambda *arguments: next(left) >= 0 and own(*arguments)
        if steps_until_stop < 4:
            with pytest.raises(StopIteration):
                shapes.train_reader(random.Random(0), processor, model, tmp_path)
            model.load_state_dict(begun)
            shapes.as_batch = own
        shapes.train_reader(random.Random(0), processor, model, tmp_path)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not list(tmp_path.iterdir())


def test_vectors_are_those_of_the_question_and_of_the_picture(world):
    vectors = np.load(world / "train.npy")
    rows = rows_of(world, "train")
    assert vectors.shape == (TINY["TRAIN_ROWS"], 64 + 64)
    assert np.allclose(np.linalg.norm(vectors[:, :64], axis=1), 1, atol=1e-5)
    assert np.allclose(np.linalg.norm(vectors[:, 64:], axis=1), 1, atol=1e-5)
    script = load_script("rce/rce_icl.py", READER=str(world / "reader"))
    reader = script.VisionReader(script.READER, torch.device("cpu"))
    words = reader.model.get_input_embeddings().weight
    ids = reader.tokenizer(rows[3]["question"])["input_ids"]
    wanted = words[ids].mean(0).detach()
    assert np.allclose(vectors[3, :64], wanted / wanted.norm(), atol=1e-5)


def test_the_example_trains_and_compares_texts_pictures_and_both(world, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for name in ("rce_icl", "vqa_world"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("VQA_WORLD", str(world))
    import vqa_world

    script = vqa_world.rce_icl
    # This reader has learnt nothing: it gives every gold answer about 1e-8, which counts as equal
    monkeypatch.setattr(script, "is_flat", lambda rewards: False)
    sizes = "MINE_QUERIES=6 VALIDATION_QUERIES=5 POOL_SIZE=8 TEST_QUERIES=6 TEST_ORACLE=False RCE_EPOCHS=1"
    words = [
        *sizes.split(),
        "BEAMS=1",
        "SAMPLES=1",
        "RANDOM=2",
        "LOCAL=2",
        f"OUTPUT_DIR={tmp_path / 'run'}",
        "RESUME=no",
    ]
    monkeypatch.setattr(sys, "argv", ["vqa_world.py", *words])
    with pytest.raises(SystemExit) as end:
        script.train_main()
    assert not end.value.code, capsys.readouterr().err
    figures = json.loads((tmp_path / "run/eval_test.json").read_text())["shots"]
    for shots in ("1", "2"):
        names = {"RCE", "similarity", "similarity of texts", "similarity of pictures", "same format"}
        assert names <= set(figures[shots]["accuracy"])
