"""rce_icl.py with images: readers of the three families of image-text models, and vectors of images."""

import importlib.util
import json
import math
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from old import ROOT, load_script
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPProcessor,
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    SiglipConfig,
    SiglipModel,
    SiglipProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.processing_utils import ProcessorMixin

pytestmark = pytest.mark.usefixtures("no_pictures")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{% if part.type == 'image' %}IMAGE"
    "{% else %}{{ part.text }}{% endif %}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIP = {**SIZES, "image_size": 28, "patch_size": 14}


def byte_tokenizer(words):
    """One token per byte, and special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({word: n for n, word in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    return tokenizer


def text_sizes(tokenizer):
    ids = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    return {**SIZES, "vocab_size": len(tokenizer), "max_position_embeddings": 500, **ids}


def qwen():
    words = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = byte_tokenizer(words)
    template = TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56)
    start, end, image, video = tokenizer.convert_tokens_to_ids(words)
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen2_5_VLConfig(
        text_config={**text_sizes(tokenizer), "num_key_value_heads": 1, "rope_parameters": rope},
        vision_config={**vision, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [0]},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    processor = Qwen2_5_VLProcessor(images, tokenizer, None, chat_template=template)
    return Qwen2_5_VLForConditionalGeneration(config), processor


def llava():
    tokenizer = byte_tokenizer(["<image>"])
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    )
    config = LlavaConfig(
        text_config=LlamaConfig(**text_sizes(tokenizer)),
        vision_config=CLIPVisionConfig(**CLIP),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return LlavaForConditionalGeneration(config), processor


def idefics3():
    parts = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    words = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *parts]
    tokenizer = byte_tokenizer(words)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}, do_image_splitting=False
    )
    template = TEMPLATE.replace("IMAGE", "<image>")
    config = Idefics3Config(
        text_config=LlamaConfig(**text_sizes(tokenizer)),
        vision_config=CLIP,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    processor = Idefics3Processor(images, tokenizer, image_seq_len=1, chat_template=template)
    return Idefics3ForConditionalGeneration(config), processor


@pytest.fixture(scope="module", params=[qwen, llava, idefics3], ids=["qwen", "llava", "idefics3"])
def family(request, tmp_path_factory):
    """A folder with a random model whose answers are short words of a and b, and its processor."""
    folder = tmp_path_factory.mktemp("vision")
    check = ProcessorMixin.check_argument_for_proper_class
    with pytest.MonkeyPatch.context() as patch:  # Qwen's has one of videos, too, which needs torchvision
        patch.setattr(
            ProcessorMixin,
            "check_argument_for_proper_class",
            lambda self, name, value: value and check(self, name, value),
        )
        torch.manual_seed(0)
        model, processor = request.param()
    tokenizer = processor.tokenizer
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.3)
        # A hidden size that is large after every token: by it the head prefers four words to all others
        model.get_input_embeddings().weight[:, 0] = 15
        head = model.get_output_embeddings().weight
        head.zero_()
        for word in ("a", "b", "Ċ", "<eos>"):
            head[tokenizer.convert_tokens_to_ids(word)] = torch.randn(32) / 2
            head[tokenizer.convert_tokens_to_ids(word), 0] = {"Ċ": 1}.get(word, 3)
    model.save_pretrained(folder)
    return str(folder), processor


@pytest.fixture
def reader(family, tmp_path, monkeypatch):
    """reader(KEY=value, ...): a VisionReader of the family."""
    folder, processor = family

    def make(**constants):
        script = load_script("rce/rce_icl.py", OUTPUT_DIR=str(tmp_path / "run"), READER=folder, **constants)
        load_pretrained = script.load_pretrained

        def load(auto_class, *arguments, **options):
            if auto_class.__name__ == "AutoProcessor":
                processor.tokenizer.padding_side = options["padding_side"]
                return processor
            return load_pretrained(auto_class, *arguments, **options)

        script.load_pretrained = load
        assert script.reads_images(folder)
        return script.VisionReader(folder, torch.device("cpu"))

    return make


def rows_with_images(folder, count=4):
    rows = []
    for n in range(count):
        pixels = np.random.RandomState(n).randint(0, 255, (40 + 20 * n, 80 - 10 * n, 3), dtype=np.uint8)
        path = folder / f"{n}.png"
        Image.fromarray(pixels).save(path)
        text = f"what {'so ' * n}is it"
        rows.append({"id": f"row {n}", "text": text, "image": str(path), "golds": ["ab"], "answer": "ab"})
    return rows


def all_asked(rows):
    """Prompts with two, three, one and no images."""
    without = {**rows[0], "image": None, "text": "no image"}
    return [(rows[0], [rows[1]]), (rows[1], [rows[2], rows[3]]), (rows[2], []), (without, [])]


@pytest.mark.parametrize("chats", [True, False])
def test_gold_probabilities_of_a_batch_are_those_of_each_prompt_read_alone_token_by_token(
    reader, tmp_path, chats
):
    made = reader(CHAT_TEMPLATE=chats, READER_BATCH_SIZE=2)
    asked = all_asked(rows_with_images(tmp_path))
    for pair, probability in zip(asked, made.gold_probabilities(asked)):
        text = made.prompt(*pair) + ("" if chats else " ")
        wanted = 1.0
        for token in ("a", "b", None):
            inputs = made.inputs([text], [pair])
            chances = made.model(**inputs).logits[0, -1].softmax(-1)
            if token is None:
                wanted *= chances[made.ends].sum().item()
            else:
                wanted *= chances[made.tokenizer.convert_tokens_to_ids(token)].item()
                text += token
        if chats:
            assert probability == pytest.approx(wanted, rel=1e-3) and 0 < probability < 1


def test_gt_prob_is_how_often_the_reader_gives_the_gold(reader, tmp_path):
    made = reader(MAX_ANSWER_TOKENS=7)
    rows = rows_with_images(tmp_path)
    torch.manual_seed(0)
    for query, demos in all_asked(rows)[:3]:
        texts = made.answers([(query, demos)] * 200, do_sample=True, top_k=0)
        commonest = max(
            {text for text in texts if 0 < len(text) < 7 and set(text) <= set("ab")}, key=texts.count
        )
        (probability,) = made.gold_probabilities([({**query, "golds": [commonest]}, demos)])
        assert probability == pytest.approx(texts.count(commonest) / 200, abs=0.1)


def test_answers_of_a_batch_with_different_numbers_of_images_are_those_of_each_prompt_alone(reader, tmp_path):
    made = reader(MAX_ANSWER_TOKENS=4)
    asked = all_asked(rows_with_images(tmp_path))
    together = made.answers(asked)
    assert together == [made.answers([pair])[0] for pair in asked]


def test_another_image_gives_another_probability_and_the_order_counts(reader, tmp_path):
    made = reader()
    rows = rows_with_images(tmp_path)
    texts_of = {**rows[1], "image": rows[2]["image"]}
    found = made.gold_probabilities([(rows[0], [rows[1]]), (rows[0], [texts_of]), (rows[0], [])])
    assert len({round(math.log(x), 3) for x in found}) == 3


def test_images_stand_before_the_texts_they_belong_to(reader, tmp_path):
    made = reader(INSTRUCTION="Say. ", QUERY="Q: {text} A: ", DEMONSTRATION="Q: {text} A: {answer}\n")
    rows = rows_with_images(tmp_path)
    place = made.processor.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}])
    place = place.removeprefix("user: ").removesuffix(" ")
    text = made.prompt(rows[0], [rows[1], {**rows[2], "image": None}])
    demos = f"{place}Q: what so is it A: ab\nQ: what so so is it A: ab\n"
    assert text == f"user: Say. {demos}{place}Q: what is it A: assistant: "


def test_the_images_go_to_the_processor_in_the_order_of_the_texts(reader, tmp_path):
    made = reader()
    rows = rows_with_images(tmp_path)
    pair = (rows[0], [rows[1], rows[2]])
    images = [Image.open(rows[n]["image"]) for n in (1, 2, 0)]
    wanted = made.processor(text=[made.prompt(*pair)], images=[images], return_tensors="pt")
    found = made.inputs([made.prompt(*pair)], [pair])
    assert torch.allclose(found["pixel_values"], wanted["pixel_values"].float())


def test_a_large_image_is_made_smaller_and_a_small_one_stays(tmp_path):
    script = load_script("rce/rce_icl.py", MAX_IMAGE_PIXELS=1000)
    for size, wanted in (((200, 50), (63, 15)), ((30, 30), (30, 30)), ((100000, 1), (10000, 1))):
        Image.new("L", size).save(tmp_path / "image.png")
        image = script.read_image({"id": "row", "image": str(tmp_path / "image.png")})
        assert image.mode == "RGB" and image.size == wanted


def test_a_broken_image_names_its_row(tmp_path):
    script = load_script("rce/rce_icl.py")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    with pytest.raises(script.UserError, match=r"test.jsonl:7: .*image.png is no image"):
        script.read_image({"id": "test.jsonl:7", "image": str(tmp_path / "image.png")})


def png_header(width, height):
    """A PNG that says it has so many pixels, and has none."""
    png = b"\x89PNG\r\n\x1a\n"
    for name, data in ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IEND", b"")):
        png += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return png


def test_an_image_too_large_to_open_names_its_row(tmp_path):
    script = load_script("rce/rce_icl.py")
    (tmp_path / "image.png").write_bytes(png_header(100_000, 100_000))
    with pytest.raises(script.UserError, match=r"test.jsonl:7: .*image.png is no image .*10000000000 pixels"):
        script.read_image({"id": "test.jsonl:7", "image": str(tmp_path / "image.png")})


@pytest.mark.parametrize(
    "row, says",
    [
        ({"image": "nowhere.png"}, "rows.jsonl line 2: there is no image 'nowhere.png'"),
        ({"image": None}, "rows.jsonl line 2: there is no value for column 'image'"),
        ({}, r"no value for column 'image'; the row has \['answers', 'question'\]"),
    ],
)
def test_a_row_without_its_image_is_named(tmp_path, row, says):
    script = load_script("rce/rce_icl.py")
    (first,) = rows_with_images(tmp_path, 1)
    rows = [{"image": first["image"]}, row]
    lines = [json.dumps({"question": "what", "answers": ["a"], **row}) + "\n" for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    spec = {"path": str(tmp_path / "rows.jsonl"), "type": "jsonl", "input": "question", "output": "answers"}
    with pytest.raises(script.UserError, match=says):
        script.load_examples({**spec, "image": "image"}, "TRAIN_DATASET", "train")


def test_more_images_than_the_context_holds_is_one_message(reader, tmp_path):
    made = reader()
    rows = rows_with_images(tmp_path)
    with pytest.raises(Exception, match=r"reads 500 tokens, a prompt and its answer have \d+: lower SHOTS"):
        made.answers([(rows[0], rows * 5)])


def test_the_words_that_stand_for_an_image_are_refused_in_the_data(reader, tmp_path):
    made = reader()
    row = rows_with_images(tmp_path)[0]
    row["text"] = f"see {made.processor.image_token}"
    with pytest.raises(Exception, match="row 0 has the text .* which stands for an image"):
        made.answers([(row, [])])


# ---------------------------------------------------------------- vectors of images


@pytest.fixture(scope="module", params=["clip", "siglip"])
def embedder_folder(request, tmp_path_factory):
    """A folder with a random CLIP or SigLIP and its processor."""
    folder = tmp_path_factory.mktemp("embedder")
    tokenizer = byte_tokenizer([])
    tokenizer.model_max_length = 60
    sizes = {key: value for key, value in text_sizes(tokenizer).items() if key != "max_position_embeddings"}
    text = {**sizes, "max_position_embeddings": 60}
    torch.manual_seed(0)
    if request.param == "clip":
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=CLIP, projection_dim=16))
        images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
        processor = CLIPProcessor(images, tokenizer)
    else:
        model = SiglipModel(SiglipConfig(text_config={**text, "projection_size": 32}, vision_config=CLIP))
        processor = SiglipProcessor(SiglipImageProcessorPil(size={"height": 28, "width": 28}), tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def embedder(folder, way):
    script = load_script("rce/rce_icl.py", EMBEDDING=folder, IMAGE_VECTORS=way, READER_BATCH_SIZE=3)
    return script.make_embedder([], torch.device("cpu"))


def test_vectors_of_images_and_texts_are_joined_as_the_constant_says(embedder_folder, tmp_path):
    rows = rows_with_images(tmp_path)
    rows[1]["image"] = None
    found = {way: embedder(embedder_folder, way).vectors(rows) for way in ("text", "image", "mean", "both")}
    assert np.allclose(np.linalg.norm(found["text"], axis=1), 1)
    assert np.allclose(found["mean"], found["text"] + found["image"])
    assert np.array_equal(found["both"], np.hstack([found["text"], found["image"]]))
    assert not found["image"][1].any() and np.allclose(np.linalg.norm(found["image"], axis=1), [1, 0, 1, 1])
    assert np.abs(found["image"][0] - found["image"][2]).max() > 1e-3


def test_a_vector_does_not_depend_on_the_rows_beside_it(embedder_folder, tmp_path):
    rows = rows_with_images(tmp_path)
    made = embedder(embedder_folder, "both")
    together = made.vectors(rows)
    assert np.allclose(together, [made.vectors([row])[0] for row in rows], atol=1e-5)


@pytest.fixture
def with_vectors(tmp_path):
    """with_vectors(train array, test array): rce_icl.py on a small data set whose vectors lie in files."""

    def make(train, test):
        specs = []
        for name, array in (("train", train), ("test", test)):
            lines = "".join(f"question {n},{'ab'[n % 2]}\n" for n in range(30))
            (tmp_path / f"{name}.csv").write_text("q,a\n" + lines)
            spec = {"path": str(tmp_path / f"{name}.csv"), "type": "csv", "input": "q", "output": "a"}
            if array is not None:
                np.save(tmp_path / f"{name}.npy", array)
                spec["vectors"] = str(tmp_path / f"{name}.npy")
            specs.append(spec)
        folder = str(tmp_path / "run")
        return load_script(
            "rce/rce_icl.py", TRAIN_DATASET=specs[0], TEST_DATASET=specs[1], OUTPUT_DIR=folder, RESUME="no"
        )

    return make


def test_vectors_of_a_file_are_those_of_its_rows(with_vectors, monkeypatch):
    train, test = np.random.RandomState(0).randn(2, 30, 5)
    script = with_vectors(train, test)
    splits, demos = script.load_splits(lambda text: None)
    script.embed_splits(splits, demos, torch.device("cpu"), lambda text: None, True)
    for rows, array in ((splits["test"], test), (demos, train), (splits["validation"], train)):
        for row in rows:
            wanted = array[row["number"]] / np.linalg.norm(array[row["number"]])
            assert np.allclose(row["vector"], wanted, atol=1e-6)


@pytest.mark.parametrize(
    "train, test, says",
    [
        (np.ones((29, 5)), np.ones((30, 5)), r"TRAIN_DATASET: .*train.npy is an array of \(29, 5\)"),
        (np.ones(30), np.ones((30, 5)), r"train.npy is an array of \(30,\): it needs one vector"),
        (np.full((30, 5), np.nan), np.ones((30, 5)), "vector of finite numbers for each of 30 rows"),
        (np.ones((30, 5)), np.ones((30, 4)), "must be of one size, not 5 and 4 numbers"),
        (np.ones((30, 5)), None, "must be of one size, not 5 and 0 numbers"),
    ],
)
def test_vectors_that_do_not_fit_the_rows_are_refused(with_vectors, train, test, says):
    script = with_vectors(train, test)
    with pytest.raises(script.UserError, match=says):
        script.load_splits(lambda text: None)


def test_images_and_a_reader_of_texts_alone_are_refused(tmp_path):
    script = load_script("rce/rce_icl.py", READER="gpt2-like")
    script.reads_images = lambda name: False
    trainer = object.__new__(script.ICLTrainer)
    trainer.demos = rows_with_images(tmp_path)
    with pytest.raises(script.UserError, match="READER = 'gpt2-like' reads no images, but row 0 has one"):
        trainer.load_reader()


# ---------------------------------------------------------------- data/make_vqa.py


@pytest.fixture
def make_vqa(monkeypatch, capsys):
    """make_vqa(KEY=value, ...): exit code, what was printed, what went to stderr."""
    script = load_script_of_data("make_vqa")

    def run(**constants):
        monkeypatch.setattr("sys.argv", ["make_vqa.py", *(f"{key}={x}" for key, x in constants.items())])
        code = 0
        try:
            script.main()
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def load_script_of_data(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"data/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def official(tmp_path):
    """Paths of official files of three questions about two images."""
    asked = [(7, 12, "what is it"), (8, 12, "how many"), (9, 345, "what is it")]
    questions = [{"question_id": n, "image_id": image, "question": text} for n, image, text in asked]
    answers = [
        {"answer": word, "raw_answer": f"raw {word}", "answer_id": n} for n, word in enumerate("aabbbbcdef")
    ]
    annotations = [
        {"question_id": n, "image_id": image, "question_type": "what", "answers": answers}
        for n, image, _ in reversed(asked)
    ]
    (tmp_path / "questions.json").write_text(json.dumps({"questions": questions}))
    (tmp_path / "annotations.json").write_text(json.dumps({"annotations": annotations}))
    (tmp_path / "images").mkdir()
    for image in (12, 345):
        Image.new("RGB", (8, 8), (image % 255, 0, 0)).save(tmp_path / f"images/COCO_val2014_{image:012d}.jpg")
    names = {"QUESTIONS": "questions.json", "ANNOTATIONS": "annotations.json", "IMAGES": "images"}
    return {key: tmp_path / name for key, name in names.items()} | {"OUT": tmp_path / "out/rows.jsonl"}


def test_official_files_become_rows_that_the_trainer_reads(make_vqa, official, tmp_path):
    code, out, err = make_vqa(**official)
    assert code == 0 and out == f"3 questions about 2 images: {official['OUT']}\n", err
    spec = {
        "path": str(official["OUT"]),
        "type": "jsonl",
        "input": "question",
        "output": "answers",
        "image": "image",
    }
    script = load_script("rce/rce_icl.py", GOLDS="annotators")
    rows = script.load_examples(spec, "TRAIN_DATASET", "train")
    assert [row["text"] for row in rows] == ["what is it", "how many", "what is it"]
    assert [Path(row["image"]).name[-8:-4] for row in rows] == ["0012", "0012", "0345"]
    assert rows[0]["golds"] == list("aabbbbcdef") and rows[0]["answer"] == "b"
    assert script.gold_weights(rows[0]["golds"])["b"] == 1.0


@pytest.mark.parametrize(
    "answers", [["a", "b"], [{"answer": "a"}, {"answer": "b"}], {"answer": ["a", "b"], "answer_id": [1, 2]}]
)
def test_answers_come_in_three_shapes_and_as_one_text(answers):
    make_row = load_script_of_data("make_vqa").make_row
    question = {"question": "q", "question_id": 1}
    assert make_row(question, {"answers": answers}, "x.png")["answers"] == ["a", "b"]
    assert make_row(question, {"answers": "yes"}, "x.png")["answers"] == ["yes"]


@pytest.mark.parametrize(
    "fault, says",
    [
        ("no annotation", "question 9 has no annotation in"),
        ("no image", "question 9: .* has no image 000000000345"),
        ("broken image", "question 9: .*345.jpg is no image"),
        ("huge image", "question 9: .*345.jpg is no image .*10000000000 pixels"),
        ("no questions", "is no official file of questions"),
        ("half", "give OUT, and either QUESTIONS, ANNOTATIONS and IMAGES, or DATASET"),
        ("no folder", "IMAGES = '.*images.zip' is no folder: give the folder of the images, unpacked"),
        ("no ending", "OUT = '.*rows' is the name of a file, such as test.jsonl"),
        ("no answers", "question 7: its answers are .*None, not a list of texts"),
    ],
)
def test_what_is_wrong_with_official_files_is_one_message(make_vqa, official, fault, says):
    image = official["IMAGES"] / "COCO_val2014_000000000345.jpg"
    if fault == "no annotation":
        kept = json.loads(official["ANNOTATIONS"].read_text())["annotations"][1:]
        official["ANNOTATIONS"].write_text(json.dumps({"annotations": kept}))
    elif fault == "no image":
        image.unlink()
    elif fault == "broken image":
        image.write_bytes(b"not an image")
    elif fault == "huge image":
        image.write_bytes(png_header(100_000, 100_000))
    elif fault == "no questions":
        official["QUESTIONS"].write_text("[]")
    elif fault == "no folder":
        official["IMAGES"] = official["IMAGES"].with_suffix(".zip")
    elif fault == "no ending":
        official["OUT"] = official["OUT"].with_suffix("")
    elif fault == "no answers":
        text = official["ANNOTATIONS"].read_text()
        records = json.loads(text)["annotations"]
        records[-1]["answers"] = None
        official["ANNOTATIONS"].write_text(json.dumps({"annotations": records}))
    else:
        del official["IMAGES"]
    code, _, err = make_vqa(**official)
    assert code == 2 and re.search(says, err) and err.count("\n") == 1
    assert not official["OUT"].exists()


def test_a_data_set_with_a_column_of_images_becomes_rows_and_files(make_vqa, tmp_path):
    import datasets

    features = {"question": datasets.Value("string"), "image": datasets.Image()}
    features["answers"] = datasets.List(datasets.Value("string"))
    rows = {"question": ["what", "who"], "answers": [["a"] * 10, ["b"] * 10]}
    rows["image"] = [Image.new("RGB", (9, 9), colour) for colour in ("red", "blue")]
    file = tmp_path / "rows.parquet"
    datasets.Dataset.from_dict(rows, datasets.Features(features)).to_parquet(file)
    code, out, err = make_vqa(DATASET=file, OUT=tmp_path / "made.jsonl")
    assert code == 0 and out.startswith("2 questions about 2 images"), err
    made = [json.loads(line) for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    assert [row["question"] for row in made] == ["what", "who"] and made[1]["answers"] == ["b"] * 10
    assert [Image.open(row["image"]).getpixel((0, 0)) for row in made] == [(255, 0, 0), (0, 0, 255)]
