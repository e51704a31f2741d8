"""Readers and vectors of rce/rce_icl.py: probabilities and answers token by token; images and CLIP."""

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, TINY, byte_tokenizer, load
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{% if part.type == 'image' %}IMAGE"
    "{% else %}{{ part.text }}{% endif %}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIP = {**SIZES, "image_size": 28, "patch_size": 14}
CPU = torch.device("cpu")


def make_rows(folder=None):
    rows = []
    for number in range(4):
        row = {"id": f"row {number}", "text": f"what {'so ' * number}is it", "image": None}
        if folder:
            pixels = np.random.RandomState(number).randint(0, 255, (40, 80 - 10 * number, 3), dtype=np.uint8)
            row["image"] = str(folder / f"{number}.png")
            Image.fromarray(pixels).save(row["image"])
        rows.append({**row, "golds": ["ab", "b"], "answer": "ab"})
    return rows


def make_asked(rows):
    """Prompts with two, three, one and no demonstrations, and one without an image."""
    without = {**rows[0], "image": None, "text": "nothing to see"}
    asked = [(rows[0], [rows[1]]), (rows[1], [rows[2], rows[3]]), (rows[2], []), (without, [])]
    return asked


def check_reader(reader, asked):
    """Compares gt_prob and answers of a batch with each prompt and gold read alone, without padding."""
    for pair, probability in zip(asked, reader.gold_probabilities(asked)):
        prompt = reader.prompt(*pair)
        start = reader.inputs([prompt], [pair])["input_ids"].shape[1]
        wanted = 0.0
        for gold in pair[0]["golds"]:
            inputs = reader.inputs([prompt + reader.answer_start + gold], [pair])
            chances = reader.model(**inputs).logits[0].double().softmax(-1)
            of_gold = chances[-1, reader.end_ids].sum()
            for place in range(start, len(chances)):
                of_gold = of_gold * chances[place - 1, inputs["input_ids"][0, place]]
            wanted += of_gold.item()
        assert probability == pytest.approx(wanted, rel=2e-3) and 0 < probability < 1
    assert reader.answers(asked) == [reader.answers([pair])[0] for pair in asked]


@pytest.mark.parametrize("chats", [True, False])
def test_gt_prob_and_answers_of_a_causal_model(chats):
    module = load("rce/rce_icl.py", CHAT_TEMPLATE=chats, READER_BATCH_SIZE=3)
    reader = module.ModelReader(str(TINY / "policy"), CPU)
    if chats:
        reader.tokenizer.chat_template = "Q: {{ messages[0].content }} A: "
        reader.chats = True
    asked = [({**question, "golds": ["12", "#### 7"]}, demos) for question, demos in make_asked(make_rows())]
    check_reader(reader, asked)


FORMS = [  # DEMONSTRATION, QUESTION, chats; how the prompt ends and what the reader writes for ab
    ("Q: {text}\nA: {answer}\n\n", "Q: {text}\nA:", False, "A:", " ab"),
    ("Q: {text}\nA: {answer}\n", "Now answer.\nQ: {text}\nA: ", False, "A:", " ab"),
    ("{text}\n{answer}\n", "{text}\n", False, "what is it\n", "ab"),
    ("Q: {text}\nA:\n{answer}\n", "Q: {text}\nA:", False, "A:\n", "ab"),
    ("Q: {text}\nA:\t{answer}\n", "Q: {text}\nA:", False, "A:\t", "ab"),
    ("Q: {text}\nA:{answer}.\n", "Q: {text}\nA:", False, "A:", "ab."),
    ("Q: {text}\nA: '{answer}'\n", "Q: {text}\nLabel:", False, "Label: '", "ab'"),
    ('{"q": "{text}", "a": "{answer}"}\n', '{"q": "{text}"', False, 'it", "a": "', 'ab"}'),
    ("Q: {text}\nA: {answer}\n", "Q: {text}\nA:", True, "A: A: ", "ab"),
    ("Q: {text}\nA:\n'{answer}'\n", "Q: {text}\nA:", True, "A: A: ", "'ab'"),
]


@pytest.mark.parametrize("demonstration, question, chats, end, written", FORMS)
def test_a_gold_is_asked_for_as_demonstrations_show_it(demonstration, question, chats, end, written):
    module = load("rce/rce_icl.py", DEMONSTRATION=demonstration, QUESTION=question, CHAT_TEMPLATE=chats)
    reader = module.ModelReader(str(TINY / "policy"), CPU)
    reader.processor.chat_template = "Q: {{ messages[0].content }} A: "
    asked = [({**make_rows()[0], "golds": ["ab"]}, make_rows()[1:3])]
    read, make_inputs = [], reader.inputs
    reader.inputs = lambda texts, asked: read.extend(texts) or make_inputs(texts, asked)
    reader.gold_probabilities(asked)
    assert read[0] == reader.prompt(*asked[0]) + written and reader.prompt(*asked[0]).endswith(end)
    reader.model.generate = lambda input_ids, **options: input_ids
    reader.tokenizer.batch_decode = lambda ids, **options: [written + "\nQ: more"]
    assert reader.answers(asked) == ["ab"]


def test_prompts_longer_than_the_readers_positions_are_refused_and_cut_answers_named(capsys):
    module = load("rce/rce_icl.py", MAX_ANSWER_TOKENS=3)
    reader = module.ModelReader(str(TINY / "policy"), CPU)
    rows = [*make_rows(), {**make_rows()[0], "id": "long", "text": "12 + 7 " * 200, "answer": "1 + 2 + 3"}]
    reader.check_lengths(rows[:4], rows[:4])
    assert capsys.readouterr().out == ""
    with pytest.raises(
        module.UserError, match=r"has 512 positions, 2 demonstrations such as long .* lower SHOTS"
    ):
        reader.check_lengths(rows[:4], rows)
    with pytest.raises(module.UserError, match="lower SHOTS"):
        reader.check_lengths(rows, rows[:4])
    assert "WARNING: '1 + 2 + 3' has" in capsys.readouterr().out


def test_the_shipped_reader_reads_its_demonstrations(tmp_path):
    """One of the guild and one of the region teach the answer; others do not."""
    module = load("rce/rce_icl.py", OUTPUT_DIR=str(tmp_path / "run"))
    trainer = module.ICLTrainer()
    facts = {}
    for name in ("train", "test"):
        for record in module.read_records({"path": f"{ROOT}/data/market/{name}.csv", "type": "csv"}):
            facts[record["question"]] = record["guild"], record["region"]
    told, others = [], []
    for question in trainer.splits["test"][:150]:
        matches = {True: {}, False: {}}
        for demo in module.take(trainer.demos, question["pool"].tolist()):
            for fact, of_demo in zip(facts[question["text"]], facts[demo["text"]]):
                matches[fact == of_demo].setdefault(fact, demo)
        if len(matches[True]) == 2:
            told.append((question, list(matches[True].values())))
            strangers = [x for x in trainer.demos if not set(facts[x["text"]]) & set(facts[question["text"]])]
            others.append((question, strangers[:2]))
    for asked, least, most in ((told, 0.97, 1), (others, 0, 0.1)):
        texts = trainer.reader.answers(asked)
        right = [text == question["golds"][0] for text, (question, _) in zip(texts, asked)]
        assert least <= np.mean(right) <= most and len(asked) > 100


# ---------------------------------------------------------------- images


def text_sizes(tokenizer):
    ids = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    return {**SIZES, "vocab_size": len(tokenizer), "max_position_embeddings": 500, **ids}


def qwen():
    words = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = byte_tokenizer(["<pad>", "<eos>", *words], eos_token="<eos>", pad_token="<pad>")
    start, end, image, video = tokenizer.convert_tokens_to_ids(words)
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**text_sizes(tokenizer), "num_key_value_heads": 1, "rope_parameters": rope},
        vision_config={**vision, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [0]},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56)
    template = TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    processor = transformers.Qwen2_5_VLProcessor(images, tokenizer, None, chat_template=template)
    return transformers.Qwen2_5_VLForConditionalGeneration(config), processor


@pytest.mark.parametrize("chats", [True, False])
def test_a_reader_of_images_sees_them_in_the_order_of_the_texts(chats, tmp_path, monkeypatch):
    # Qwen's processor has one of videos, too, which needs torchvision
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *arguments: None)
    torch.manual_seed(0)
    model, processor = qwen()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.2)
    model.save_pretrained(tmp_path / "model")
    module = load("rce/rce_icl.py", CHAT_TEMPLATE=chats, READER_BATCH_SIZE=3, MAX_ANSWER_TOKENS=4)
    processor.tokenizer.padding_side = "left"
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda name, **options: processor)
    reader = module.ModelReader(str(tmp_path / "model"), CPU)
    rows = make_rows(tmp_path)
    check_reader(reader, make_asked(rows))
    swapped = {**rows[1], "image": rows[2]["image"]}
    found = reader.gold_probabilities([(rows[0], [rows[1]]), (rows[0], [swapped]), (rows[1], [rows[0]])])
    assert len({round(float(np.log(x)), 4) for x in found}) == 3
    text = reader.prompt(rows[0], [rows[1], {**rows[2], "image": None}])
    image = processor.image_token
    assert text.count(image) == 2 and text.index(image) < text.index("what so")


def test_clips_vectors_of_images_and_texts(tmp_path):
    tokenizer = byte_tokenizer(["<pad>", "<eos>"], eos_token="<eos>", pad_token="<pad>", model_max_length=60)
    text = {**text_sizes(tokenizer), "max_position_embeddings": 60}
    torch.manual_seed(0)
    config = transformers.CLIPConfig(text_config=text, vision_config=CLIP, projection_dim=16)
    model = transformers.CLIPModel(config)
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = transformers.CLIPProcessor(images, tokenizer)
    model.save_pretrained(tmp_path / "clip")
    processor.save_pretrained(tmp_path / "clip")
    module = load("rce/rce_icl.py", EMBEDDING=str(tmp_path / "clip"), READER_BATCH_SIZE=3)
    embed = module.make_embedder([], CPU)
    rows = make_rows(tmp_path)
    rows[1]["image"] = None
    vectors = embed(rows)
    texts, images = np.split(vectors, 2, axis=1)
    assert np.allclose(np.linalg.norm(texts, axis=1), 1) and not images[1].any()
    assert np.allclose(np.linalg.norm(images, axis=1), [1, 0, 1, 1], atol=1e-5)
    assert np.allclose(embed(rows[2:3])[0], vectors[2], atol=1e-5)  # whatever rows stand beside it
    (tmp_path / "broken.png").write_text("no image")
    with pytest.raises(OSError, match="broken.png"):
        embed([{**rows[0], "image": str(tmp_path / "broken.png")}])


def test_vectors_of_a_sentence_model_are_means_over_the_tokens():
    module = load("rce/rce_icl.py", EMBEDDING=str(TINY / "policy"))
    rows = [{"text": "Tom has 3 books."}, {"text": "Anna has 12 coins and 5 pens."}]
    together = module.make_embedder(rows, CPU)(rows)
    model = transformers.AutoModel.from_pretrained(TINY / "policy")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY / "policy")
    for row, vector in zip(rows, together):
        states = model(tokenizer(row["text"], return_tensors="pt").input_ids).last_hidden_state[0]
        assert np.allclose(vector, states.mean(0).detach().numpy(), atol=1e-4)
