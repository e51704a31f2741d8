"""Fine-tuning, reward models and DPO: losses against formulas in float64, what is trained of a row, odd rows,
and runs that are the same after a kill and on two processes."""

import json
import math
import runpy
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
import torch
from old import NATS, ROOT, TINY, Processes, assert_same_state, load_script, read, untimed
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import BertConfig, BertForSequenceClassification, DebertaV2Config, DistilBertConfig
from transformers import LlamaConfig, MistralConfig, MistralForCausalLM

pytestmark = pytest.mark.usefixtures("no_pictures")
SFT, RM, DPO = "ppo/sft.py", "ppo/reward_model.py", "rce/dpo.py"
CLASSES = {SFT: "SFTTrainer", RM: "RewardModelTrainer", DPO: "DPOTrainer"}
BEST = {SFT: "policy", RM: "reward_model", DPO: "policy"}
SHORT = {
    "BATCH_SIZE": 3,
    "GRADIENT_ACCUMULATION_STEPS": 2,
    "EVAL_EVERY_N_STEPS": 0,
    "SAVE_EVERY_N_STEPS": 0,
    "MAX_STEPS": 2,
}
sft, rm, dpo = (load_script(path) for path in CLASSES)
rng = np.random.default_rng(0)


def short(path, **constants):
    """SHORT with few rows, and `constants`."""
    rows = "PROMPTS" if path == SFT else "PAIRS"
    few = {**SHORT, f"MAX_TRAIN_{rows}": 14, f"MAX_EVAL_{rows}": 4}
    if path != RM:
        few["ACCURACY_FUNCTION"] = None
    return {**few, **constants}


def make(path, folder, **constants):
    """A trainer of a fresh module, small, writing to a folder."""
    script = load_script(path, **short(path, OUTPUT_DIR=str(folder), **constants))
    return getattr(script, CLASSES[path])()


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pairs(path, **columns):
    """A data set of pairs in a file."""
    names = {"chosen": "chosen", "rejected": "rejected", **columns}
    return [{"path": path, "type": "jsonl", **names}]


def log_of(folder):
    return next((folder / "logs").glob("training_*.log")).read_text()


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


@pytest.fixture(params=CLASSES, ids=["sft", "reward_model", "dpo"])
def path(request):
    return request.param


# ---------------------------------------------------------------- the losses, in float64


def test_the_loss_of_a_pair_is_that_of_bradley_and_terry_with_margin_tie_and_centre():
    chosen, rejected, margins = rng.normal(size=(3, 6))
    is_tie = [False, True, False, False, True, False]
    want = []
    for c, r, m, tie in zip(chosen, rejected, margins, is_tie):
        loss = -log_sigmoid(c - r - m)
        if tie:
            loss = -0.5 * log_sigmoid(c - r) - 0.5 * log_sigmoid(r - c)
        want.append(loss + 0.3 * (c + r) ** 2)
    got = rm.preference_loss(*map(torch.tensor, (chosen, rejected, margins, is_tie)), 0.3)
    assert got.tolist() == pytest.approx(want, rel=1e-12, abs=1e-12)


def test_a_loss_that_is_a_mean_already_is_an_error(path, tmp_path):
    script = load_script(path, **short(path, OUTPUT_DIR=str(tmp_path / "run")))
    name = {SFT: "sft_loss", RM: "preference_loss"}.get(path, "dpo_loss")
    own = getattr(script, name)
    setattr(script, name, lambda *args: own(*args).mean())
    with pytest.raises(
        ValueError, match=r"loss has the shape \(\), not \(\d+,\): return one number per token"
    ):
        getattr(script, CLASSES[path])().train()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_dpo_loss_of_a_pair_with_label_smoothing(smoothing):
    chosen, rejected = rng.normal(size=(2, 6)) * 5
    want = []
    for h in 0.3 * (chosen - rejected):
        want.append(-(1 - smoothing) * log_sigmoid(h) - smoothing * log_sigmoid(-h))
    got = dpo.dpo_loss(torch.tensor(chosen), torch.tensor(rejected), 0.3, smoothing)
    assert got.tolist() == pytest.approx(want, rel=1e-12, abs=1e-12)


def test_the_ipo_loss_of_a_pair_is_a_squared_distance():
    chosen, rejected = rng.normal(size=(2, 6))
    want = (chosen - rejected - 1 / 0.6) ** 2
    got = dpo.dpo_loss(torch.tensor(chosen), torch.tensor(rejected), 0.3, loss_type="ipo")
    assert got.tolist() == pytest.approx(want.tolist(), rel=1e-12)


def test_what_dpo_logs_of_a_pair():
    numbers = torch.tensor([[-1.0, -2.0], [-3.0, -1.0], [-2.0, -2.0], [-2.5, -2.0]]).double()
    stats = {name: values.tolist() for name, values in dpo.dpo_stats(*numbers, 0.5).items()}
    assert stats["chosen_reward"] == [0.5, 0.0] and stats["rejected_reward"] == [-0.25, 0.5]
    assert stats["reward_margin"] == [0.75, -0.5] and stats["reward_accuracy"] == [1, 0]
    assert stats["chosen_logprob"] == [-1, -2] and stats["rejected_logprob"] == [-3, -1]


def test_the_figures_of_a_reward_model_by_hand():
    chosen, rejected = torch.tensor([[2.0, 0.0, 1.0, 1.0], [0.0, 1.0, 1.0, -3.0]]).double()
    lengths = torch.tensor([5, 5, 9, 7]), torch.tensor([4, 5, 9, 8])
    figures = rm.pair_figures(chosen, rejected, *lengths)
    assert figures["accuracy"] == pytest.approx(2.5 / 4)  # equal scores count a half
    assert figures["accuracy_low"] < 2.5 / 4 < figures["accuracy_high"]
    assert figures["margin"] == pytest.approx((2 - 1 + 0 + 4) / 4)
    assert figures["accuracy_equal_length"] == pytest.approx(0.5 / 2)
    one, two, four = (1 / (1 + math.exp(-x)) for x in (1, 2, 4))
    # five bins of confidence: 0.5 (right by half), 0.73 (wrong), 0.88 (right), 0.98 (right)
    want = [[0.5, 0.5, 1], [one, 0, 1], [two, 1, 1], [four, 1, 1]]
    assert [x for point in rm.reliability(chosen, rejected) for x in point] == pytest.approx(
        [x for point in want for x in point]
    )
    assert figures["calibration_error"] == pytest.approx((0 + one + (1 - two) + (1 - four)) / 4)


def test_the_rank_correlation_shares_the_ranks_of_equal_numbers():
    assert rm.average_ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1, 3.5, 2]
    assert rm.rank_correlation(np.array([1, 2, 3, 10.0]), np.array([-9.0, -5, 0, 1])) == pytest.approx(1)
    want = np.corrcoef([3.5, 1, 3.5, 2], [1, 2, 3, 4])[0, 1]
    assert rm.rank_correlation(np.array([3.0, 1, 3, 2]), np.array([1.0, 2, 3, 4])) == pytest.approx(want)
    assert rm.rank_correlation(np.ones(3), np.arange(3.0)) == 0


# ---------------------------------------------------------------- one optimizer step


def plain_logprobs(model, ids, first):
    """log-probabilities of ids[first:], read alone, in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return torch.tensor([logits[t - 1, ids[t]] for t in range(first, len(ids))])


@pytest.mark.parametrize("size", [1, 4, 6])
def test_the_sft_loss_is_the_mean_over_all_answer_tokens_of_the_step(tmp_path, size):
    trainer = make(SFT, tmp_path, BATCH_SIZE=size)
    rows = trainer.train_rows[:6]
    model = AutoModelForCausalLM.from_pretrained(TINY / "policy")
    starts = [len(trainer.tokenizer(row["prompt"] + "\n")["input_ids"]) for row in rows]
    logprobs = torch.cat([plain_logprobs(model, row["ids"], start) for row, start in zip(rows, starts)])
    metrics = trainer.update(rows)
    assert metrics["loss"] == pytest.approx(-logprobs.mean().item(), abs=1e-5)
    assert metrics["trained_tokens"] == len(logprobs) == sum(len(row["trained"]) for row in rows)
    # one step equals that of the plain way: the library's own labels
    labels = [[-100] * start + row["ids"][start:] for row, start in zip(rows, starts)]
    ids = sft.pad_right([row["ids"] for row in rows], 0)
    model(ids, labels=sft.pad_right(labels, -100)).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("size", [1, 4, 6])
def test_the_loss_of_a_reward_model_is_the_mean_over_the_pairs_of_the_step(tmp_path, size):
    trainer = make(RM, tmp_path, BATCH_SIZE=size, BASE_MODEL=str(TINY / "reward_model"), CENTER_COEF=0.1)
    rows = trainer.train_rows[:6]
    rows[2]["is_tie"], rows[4]["margin"] = True, 2.0
    model = AutoModelForSequenceClassification.from_pretrained(TINY / "reward_model")
    scores = []
    for row in rows:
        texts = [f"{row['prompt']}\n{row[key]}<eos>" for key in ("chosen", "rejected")]
        ids = [torch.tensor([trainer.tokenizer(text)["input_ids"]]) for text in texts]
        scores.append([model(x).logits.item() for x in ids])
    want = 0.0
    for (c, r), row in zip(scores, rows):
        loss = -log_sigmoid(c - r - row["margin"])
        if row["is_tie"]:
            loss = -0.5 * log_sigmoid(c - r) - 0.5 * log_sigmoid(r - c)
        want += (loss + 0.1 * (c + r) ** 2) / 6
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.run.total_steps = trainer.run.step = 1
    metrics = trainer.update(rows)
    assert metrics["loss"] == pytest.approx(want, abs=1e-5)
    assert metrics["margin"] == pytest.approx(sum(c - r for c, r in scores) / 6, abs=1e-5)
    assert metrics["accuracy"] == pytest.approx(sum(c > r for c, r in scores) / 6)
    assert metrics["chosen_score"] == pytest.approx(sum(c for c, _ in scores) / 6, abs=1e-5)
    assert any((p != q).any() for p, q in zip(trainer.model.parameters(), before))


@pytest.mark.parametrize("loss_type, size", [("dpo", 1), ("dpo", 6), ("ipo", 4)])
def test_the_dpo_loss_of_a_step_by_the_plain_way(tmp_path, loss_type, size):
    """Sums of the answers' log-probabilities, their means for IPO, less those of the reference."""
    trainer = make(DPO, tmp_path, BATCH_SIZE=size, LOSS_TYPE=loss_type, BETA=0.2)
    rows = trainer.train_rows[:6]
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.actor.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    reference = AutoModelForCausalLM.from_pretrained(TINY / "policy")
    want = 0.0
    for row in rows:
        ratios = []
        for key in ("chosen", "rejected"):
            ids = trainer.tokenizer(f"{row['prompt']}\n{row[key]}<eos>")["input_ids"]
            first = len(trainer.tokenizer(row["prompt"] + "\n")["input_ids"])
            ratio = plain_logprobs(trainer.actor, ids, first) - plain_logprobs(reference, ids, first)
            ratios.append(ratio.sum().item() if loss_type == "dpo" else ratio.mean().item())
        h = ratios[0] - ratios[1]
        want += (-log_sigmoid(0.2 * h) if loss_type == "dpo" else (h - 1 / 0.4) ** 2) / 6
    assert trainer.update(rows)["loss"] == pytest.approx(want, rel=1e-4)


def test_at_the_first_step_dpo_equals_its_reference(tmp_path):
    trainer = make(DPO, tmp_path, LABEL_SMOOTHING=0.1)
    metrics = trainer.update(trainer.train_rows[:6])
    assert metrics["loss"] == pytest.approx(math.log(2), abs=NATS)
    assert abs(metrics["chosen_reward"]) < NATS and abs(metrics["rejected_reward"]) < NATS


def test_another_reference_is_read_where_one_is_named(tmp_path):
    shutil.copytree(TINY / "policy", tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(TINY / "policy")
    with torch.no_grad():
        model.model.embed_tokens.weight *= 1.5
    model.save_pretrained(tmp_path / "other")
    trainer = make(DPO, tmp_path / "run", REFERENCE_MODEL=str(tmp_path / "other"))
    row = trainer.train_rows[0]
    answer = row["rejected_answer"]
    want = plain_logprobs(model, answer["ids"], answer["trained"].start).sum().item()
    assert row["ref_rejected"] == pytest.approx(want, rel=1e-4)


of_pairs = pytest.mark.parametrize("path", [RM, DPO], ids=["reward_model", "dpo"])


def readers(path, trainer):
    """The two ways in which a trainer can read pairs, the joined one first, and its model."""
    names = type(trainer).update.__globals__
    if path == RM:
        return trainer.joined_scores, trainer.pair_scores, trainer.model
    return names["joined_logprobs"], names["pair_logprobs"], trainer.actor


@of_pairs
def test_a_pair_is_read_with_one_prompt_and_gives_the_numbers_of_two_texts(path, tmp_path):
    base = {"BASE_MODEL": str(TINY / "reward_model")} if path == RM else {}
    trainer = make(path, tmp_path, **base)
    joined, separate, model = readers(path, trainer)
    assert trainer.read_pairs == joined
    num_read = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda *args: num_read.append(args[1][0].numel())
    )
    rows = trainer.train_rows[:6]
    with torch.no_grad():
        got, want = torch.stack(joined(model, rows)), torch.stack(separate(model, rows))
    hook.remove()
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)
    assert num_read[0] < 0.75 * num_read[1]


def test_joined_pairs_share_what_both_begin_with_and_nothing_else():
    model = SimpleNamespace(device="cpu")
    ids, options, places = rm.join_pairs(model, [([5, 6, 7, 8], [5, 6, 9]), ([5, 6], [5, 6, 7])])
    assert ids.tolist() == [[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]]
    assert options["position_ids"].tolist() == [[0, 1, 2, 3, 2], [0, 1, 2, 0, 0]]
    assert places == [[0, 1, 4], [0, 1, 2]]  # of the second text's ids
    seen = options["attention_mask"][0, 0].int().tolist()
    assert seen == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]


@of_pairs
def test_a_model_that_cannot_read_joined_pairs_reads_each_answer_with_its_prompt(path, tmp_path, monkeypatch):
    """Here the model ignores the mask. Its losses are those of the plain way."""
    base = {"BASE_MODEL": str(TINY / "reward_model")} if path == RM else {}
    want = make(path, tmp_path / "a", **base)
    script = load_script(path, **short(path, OUTPUT_DIR=str(tmp_path / "b"), **base))
    forward = script.forward

    def no_mask(model, ids, **options):
        options.pop("attention_mask", None)
        return forward(model, ids, **options)

    monkeypatch.setattr(script, "forward", no_mask)
    trainer = getattr(script, CLASSES[path])()
    assert trainer.read_pairs == readers(path, trainer)[1]
    rows = slice(0, 6)
    losses = [t.update(t.train_rows[rows])["loss"] for t in (want, trainer)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_an_attention_window_shorter_than_the_longest_pair_is_noticed(tmp_path):
    """The first rows fit the window, the longest does not: a mask of our own would undo the window."""
    config = MistralConfig(vocab_size=82, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    config.update(
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "sliding_window": 40,
            "eos_token_id": 1,
            "initializer_range": 0.5,
        }
    )
    torch.manual_seed(0)
    MistralForCausalLM(config).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(TINY / "policy").save_pretrained(tmp_path / "base")
    rows = [{"prompt": "1+2", "chosen": "3", "rejected": "4"}] * 4
    rows.append({"prompt": "1+2", "chosen": "3" * 60, "rejected": "4" * 60})
    data = pairs(write(tmp_path / "a.jsonl", *rows), prompt="prompt")
    trainer = make(
        DPO, tmp_path / "run", TRAIN_DATASETS=data, EVAL_DATASETS=[], ACTOR_MODEL=str(tmp_path / "base")
    )
    assert trainer.read_pairs.__name__ == "pair_logprobs"


def test_a_reference_that_cannot_read_joined_pairs_is_read_the_plain_way(tmp_path, monkeypatch):
    script = load_script(DPO, **short(DPO, OUTPUT_DIR=str(tmp_path), REFERENCE_MODEL=str(TINY / "policy")))
    read = []
    reads_joined, map_rows = script.reads_joined, script.map_rows
    answers = iter([True, False])  # of the actor, of the reference
    monkeypatch.setattr(script, "reads_joined", lambda *args: next(answers) and reads_joined(*args))
    monkeypatch.setattr(
        script, "map_rows", lambda compute, *args: read.append(compute) or map_rows(compute, *args)
    )
    script.DPOTrainer()
    assert [function.__name__ for function in read] == ["pair_logprobs"]


# ---------------------------------------------------------------- what is trained of a row


def tokenizer_with(template):
    tokenizer = AutoTokenizer.from_pretrained(TINY / "policy")
    tokenizer.chat_template = template
    return tokenizer


def coder(template):
    """What encode_answer() and encode_turns() take of a trainer."""
    tokenizer = tokenizer_with(template)
    model = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=range(82)))
    return SimpleNamespace(tokenizer=tokenizer, end_ids=[1], actor=model)


TURNS = (
    "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}<eos>{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
CHAT = [
    {"role": "user", "content": "1+2"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "4+4"},
    {"role": "assistant", "content": "8"},
]


def trained_text(coding, ids, trained):
    return coding.tokenizer.decode([ids[t] for t in trained])


def test_the_answer_is_trained_up_to_its_end_token_and_nothing_after_it():
    coding = coder(TURNS)  # writes a line break after the end token
    ids, trained = sft.encode_answer(coding, "1+2", "3", "here")
    assert trained_text(coding, ids, trained) == "3<eos>"
    assert ids[: trained.start] == sft.encode_chat(coding.tokenizer, "1+2", "here")
    assert ids[-1] == 1


def test_every_turn_of_the_assistant_is_trained_and_nothing_else():
    coding = coder(TURNS)
    prompt, ids, trained = sft.encode_turns(coding, CHAT, "here")
    assert trained_text(coding, ids, trained) == "3<eos>8<eos>"
    assert prompt == CHAT[:3] and ids[-1] == 1
    start = sft.start_of_last_turn(trained)
    assert ids[:start] == sft.encode_chat(coding.tokenizer, CHAT[:3], "here")


def test_the_markers_of_a_chat_template_say_what_is_trained():
    marked = TURNS.replace(
        "{{ m['content'] }}<eos>",
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<eos>{% endgeneration %}"
        "{% else %}{{ m['content'] }}<eos>{% endif %}",
    )
    want = sft.encode_turns(coder(TURNS), CHAT, "here")
    got = sft.encode_turns(coder(marked), CHAT, "here")
    assert got[1] == want[1] and list(got[2]) == list(want[2])


@pytest.mark.parametrize("shown", ["loop.last", "loop.last or m['role'] == 'user'"])
def test_a_template_that_writes_earlier_turns_otherwise_is_refused(shown):
    hides = TURNS.replace("{{ m['content'] }}", "{% if " + shown + " %}{{ m['content'] }}{% endif %}")
    with pytest.raises(sft.UserError, match="here: the chat template writes a turn .* put {% generation %}"):
        sft.encode_turns(coder(hides), CHAT, "here")


def test_a_prompt_that_the_tokenizer_joins_with_its_answer_is_refused():
    coding = coder(None)
    with pytest.raises(sft.UserError, match="here: the ids of the prompt .* end PROMPT_TEMPLATE"):
        sft.encode_answer(coding, "How man", "y", "here")  # one word
    ids, trained = sft.encode_answer(coding, "How many?\n", "7", "here")
    assert trained_text(coding, ids, trained) == "7<eos>"


def test_the_end_of_an_answer_is_its_first_end_token():
    assert sft.num_until_end([5, 1, 6, 1], [1, 2]) == 2
    assert sft.num_until_end([5, 6], [1]) == 2


def test_samples_show_what_is_read_and_what_of_it_is_trained(tmp_path):
    trainer = make(SFT, tmp_path, LOG_SAMPLES=1, MAX_STEPS=1, EVAL_DATASETS=[])
    trainer.train()
    (sample,) = read(tmp_path / "logs/samples.jsonl")
    row = next(row for row in trainer.train_rows if row["id"] == sample["id"])
    assert sample["text"] == f"{row['prompt']}\n{row['answer']}<eos>"
    assert sample["trained"] == f"{row['answer']}<eos>"
    show = runpy.run_path(str(ROOT / "tools/show.py"))["show_sample"]
    assert "trained\n    " + row["answer"].split("\n")[0] in show(sample, False)


def test_a_model_that_sees_the_padding_is_refused(tmp_path, monkeypatch):
    trainer = make(SFT, tmp_path)
    forward = trainer.actor.forward

    def leaky(input_ids, **options):
        out = forward(input_ids=input_ids, **options)
        out.logits = out.logits * (1 + input_ids.shape[1])
        return out

    sft.check_padding(trainer.actor, trainer.train_rows)
    monkeypatch.setattr(trainer.actor, "forward", leaky)
    monkeypatch.setattr(trainer.actor, "get_output_embeddings", lambda: None)
    with pytest.raises(sft.UserError, match="a 'llama' model cannot be trained here"):
        sft.check_padding(trainer.actor, trainer.train_rows)


# ---------------------------------------------------------------- rows of data sets


def test_odd_demonstrations_are_left_out_counted_and_named(tmp_path):
    rows = [
        {"q": "1+2", "a": "3"},
        {"q": "1+3", "a": " "},
        {"q": "1 " * 40, "a": "3"},
        {"q": "2+2", "a": "4"},
    ]
    chats = [{"m": CHAT}, {"m": CHAT[:1]}, {"m": [*CHAT[:3], {"role": "assistant", "content": ""}]}]
    data = [
        {"path": write(tmp_path / "a.jsonl", *rows), "type": "jsonl", "input": "q", "output": "a"},
        {"path": write(tmp_path / "b.jsonl", *chats), "type": "jsonl", "messages": "m"},
    ]
    trainer = make(SFT, tmp_path / "run", TRAIN_DATASETS=data, EVAL_DATASETS=[], MAX_TOKENS=30, MAX_STEPS=1)
    assert [row["id"] for row in trainer.train_rows] == ["a.jsonl:1", "a.jsonl:4", "b.jsonl:1"]
    trainer.train()
    said = log_of(tmp_path / "run")
    assert "left out 2 of 7 rows, with an empty answer (the first: a.jsonl:2)" in said
    assert "left out 1 of 7 rows, longer than MAX_TOKENS = 30 (the first: a.jsonl:3)" in said
    assert "left out 1 of 7 rows, without a turn of the assistant (the first: b.jsonl:2)" in said


ASK = [{"role": "user", "content": "1+2"}]
RIGHT, WRONG = ({"role": "assistant", "content": text} for text in "34")
FORMS = [  # the same pair, as it is published
    ({"prompt": "1+2", "chosen": "3", "rejected": "4"}, True),
    ({"prompt": ASK, "chosen": [RIGHT], "rejected": [WRONG]}, True),
    ({"prompt": ASK, "chosen": [*ASK, RIGHT], "rejected": [*ASK, WRONG]}, True),
    ({"prompt": "1+2", "chosen": [*ASK, RIGHT], "rejected": "4"}, True),
    ({"chosen": [*ASK, RIGHT], "rejected": [*ASK, WRONG]}, False),
    (
        {"chosen": "\n\nHuman: 1+2\n\nAssistant: 3", "rejected": "\n\nHuman: 1+2\n\nAssistant: 4"},
        False,
    ),
]


@pytest.mark.parametrize("record, has_prompt", FORMS)
def test_pairs_are_read_in_the_forms_in_which_they_are_published(record, has_prompt):
    spec = pairs("x", prompt="prompt")[0] if has_prompt else pairs("x")[0]
    pair, reason = rm.read_pair(record, spec, "here")
    assert reason is None and (pair["chosen"], pair["rejected"]) == ("3", "4")
    assert rm.as_messages(pair["prompt"]) == ASK


@pytest.mark.parametrize("path", [RM, DPO], ids=["reward_model", "dpo"])
def test_odd_pairs_are_left_out_counted_and_named(path, tmp_path):
    other = [{"role": "user", "content": "9+9"}, RIGHT]
    rows = [
        {"chosen": [*ASK, RIGHT], "rejected": [*ASK, WRONG]},
        {"chosen": [*ASK, RIGHT], "rejected": [*ASK, RIGHT]},
        {"chosen": other, "rejected": [*ASK, WRONG]},
        {"chosen": [*ASK, {**RIGHT, "content": ""}], "rejected": [*ASK, WRONG]},
        {"chosen": [*ASK, {**RIGHT, "content": "3" * 50}], "rejected": [*ASK, WRONG]},
        {"chosen": [RIGHT], "rejected": [WRONG]},
        {"chosen": [*ASK, RIGHT], "rejected": ASK},
        {"chosen": [*ASK, RIGHT, RIGHT], "rejected": [*ASK, RIGHT, WRONG]},
    ]
    data = pairs(write(tmp_path / "a.jsonl", *rows))
    more = {"TRAIN_DATASETS": data, "EVAL_DATASETS": [], "MAX_TOKENS": 30, "MAX_STEPS": 1}
    trainer = make(path, tmp_path / "run", **more)
    assert [row["id"] for row in trainer.train_rows] == ["a.jsonl:1"]
    trainer.train()
    said = log_of(tmp_path / "run")
    reasons = {
        2: "1 of 8 rows, whose chosen and rejected answers are equal",
        3: "1 of 8 rows, whose chosen and rejected answers do not continue one prompt",
        4: "1 of 8 rows, with an empty answer",
        5: "1 of 8 rows, longer than MAX_TOKENS = 30",
        6: "2 of 8 rows, without a prompt that asks for an answer",
        7: "1 of 8 rows, whose rejected answer does not end with a turn of the assistant",
    }
    for number, reason in reasons.items():
        assert f"left out {reason} (the first: a.jsonl:{number})" in said


@pytest.mark.parametrize(
    "changes, columns, message",
    [
        ({"chosen": "1 a", "rejected": "1 b"}, {}, "answers begin with their prompt"),
        ({}, {"prompt": None}, 'line 1: .chosen. is a text, and the data set has no "prompt"'),
        ({"m": "x"}, {"margin": "m"}, "line 1: 'm' must be a finite number"),
        ({"m": 2}, {"tie": "m"}, "line 1: 'm' must be true or false"),
        ({"chosen": {"a": 1}}, {}, "line 1: 'chosen': a chat is"),
        ({"rejected": "a"}, {}, "leaves no row to train on"),
        ({}, {"promt": "prompt"}, "did you mean prompt"),
        ({}, {"prompt": "q"}, "line 1: there is no value for column 'q'"),
    ],
)
def test_a_fault_of_the_pairs_is_named_with_its_line(changes, columns, message, tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "1", "chosen": "a", "rejected": "b", **changes})
    columns = {"prompt": "prompt", **columns}
    data = pairs(path, **{key: name for key, name in columns.items() if name})
    with pytest.raises(Exception, match=message) as error:
        make(RM, tmp_path / "run", TRAIN_DATASETS=data, EVAL_DATASETS=[])
    assert type(error.value).__name__ == "UserError"


def test_margins_and_ties_come_from_their_columns_and_ties_are_in_no_accuracy(tmp_path):
    rows = [
        {"prompt": "1+2", "chosen": "3", "rejected": "4", "m": "1.5", "t": "False"},
        {"prompt": "1+3", "chosen": "4", "rejected": "5", "m": 0, "t": True},
    ]
    data = pairs(write(tmp_path / "a.jsonl", *rows), prompt="prompt", margin="m", tie="t")
    trainer = make(RM, tmp_path / "run", TRAIN_DATASETS=data, EVAL_DATASETS=data)
    assert [(row["margin"], row["is_tie"]) for row in trainer.train_rows] == [(1.5, False), (0.0, True)]
    metrics = trainer.evaluate()
    assert metrics["accuracy"] in (0.0, 0.5, 1.0) and len(trainer.held_out[0]) == 1
    score = trainer.reward_model_score
    margins = [(score("1+2", "3") - score("1+2", "4")).item(), (score("1+3", "4") - score("1+3", "5")).item()]
    assert metrics["margin"] == pytest.approx(margins[0], abs=1e-5)


# ---------------------------------------------------------------- runs


def finished(path, folder, **constants):
    trainer = make(path, folder, **constants)
    trainer.train()
    return trainer


def same_runs(path, one, two):
    """Two finished runs are equal to the byte, but for the clock."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert untimed(one / "logs" / name) == untimed(two / "logs" / name)
    for file in (f"step_4/{BEST[path]}/model.safetensors", f"best/{BEST[path]}/model.safetensors"):
        assert (one / file).read_bytes() == (two / file).read_bytes(), file
    assert_same_state(one / "step_4/training_state.pt", two / "step_4/training_state.pt")


FOUR = {"MAX_STEPS": 4, "SAVE_EVERY_N_STEPS": 2, "EVAL_EVERY_N_STEPS": 2, "NUM_EPOCHS": 2}


def test_a_run_that_was_killed_and_resumed_equals_one_that_was_not_and_so_does_one_on_two_processes(
    path, tmp_path, monkeypatch
):
    """Four steps over two epochs of 14 rows; the second process gets the shorter half of each step."""
    more = {**FOUR, "ACCURACY_FUNCTION": "exact_answer", "MAX_NEW_TOKENS": 4} if path != RM else FOUR
    finished(path, tmp_path / "whole", **more)
    trainer = make(path, tmp_path / "cut", **more)
    update = trainer.update

    def killed(rows):
        if trainer.run.step == 4:
            raise KeyboardInterrupt
        return update(rows)

    monkeypatch.setattr(trainer, "update", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    finished(path, tmp_path / "cut", **more, RESUME="yes")
    same_runs(path, tmp_path / "whole", tmp_path / "cut")

    words = [f"{key}={value}" for key, value in short(path, **more, OUTPUT_DIR=tmp_path / "two").items()]
    ended = Processes(2, ROOT / path, *words).wait()
    assert [end.returncode for end in ended] == [0, 0], ended
    same_runs(path, tmp_path / "whole", tmp_path / "two")


@pytest.mark.parametrize("path", [RM])
def test_a_model_that_two_processes_share_takes_the_same_steps(path, tmp_path):
    """FSDP2: equal to rounding."""
    finished(path, tmp_path / "whole", MAX_STEPS=1)
    more = {"MAX_STEPS": 1, "SHARD": "fsdp2", "OUTPUT_DIR": tmp_path / "shared"}
    words = [f"{key}={value}" for key, value in short(path, **more).items()]
    ended = Processes(2, ROOT / path, *words).wait()
    assert [end.returncode for end in ended] == [0, 0], ended
    one, two = (untimed(tmp_path / name / "logs/metrics.jsonl") for name in ("whole", "shared"))
    for record, other in zip(one, two, strict=True):
        assert record.pop("phase") == other.pop("phase")
        assert record == pytest.approx(other, rel=1e-4, abs=1e-5)


def test_one_by_six_and_six_by_one_are_the_same_step(path, tmp_path):
    moved = []
    for size, accumulation in ((1, 6), (6, 1)):
        sizes = {"BATCH_SIZE": size, "GRADIENT_ACCUMULATION_STEPS": accumulation}
        trainer = make(path, tmp_path / str(size), **sizes)
        assert trainer.run.total_steps == 2
        rows = sft.next_rows(trainer.train_rows, trainer.state, 6)
        metrics = trainer.update(rows)
        moved.append((metrics["loss"], metrics["grad_norm"]))
    assert moved[0] == pytest.approx(moved[1], rel=1e-3)


def test_the_library_reads_the_trained_reward_model_as_it_was_trained(tmp_path):
    trainer = finished(RM, tmp_path / "run", EVAL_DATASETS=[])
    row = trainer.train_rows[0]
    prompts, answers = [row["prompt"]] * 2, [row["chosen"], row["rejected"]]
    texts = [f"{p}\n{a}<eos>" for p, a in zip(prompts, answers)]
    inputs = trainer.tokenizer(texts, padding=True, return_tensors="pt")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/step_2/reward_model")
    with torch.no_grad():
        library = loaded(inputs["input_ids"], inputs["attention_mask"]).logits[:, 0]
    assert torch.allclose(library, trainer.reward_model_score(prompts, answers), atol=1e-5)


def test_an_encoder_is_trained(tmp_path):
    AutoTokenizer.from_pretrained(TINY / "policy").save_pretrained(tmp_path / "base")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=82, num_labels=1, pad_token_id=0, **sizes)
    BertForSequenceClassification(config).bert.save_pretrained(tmp_path / "base")
    words = {"BASE_MODEL": str(tmp_path / "base"), "WARMUP_STEPS": 0, "LEARNING_RATE": 0.01}
    trainer = make(RM, tmp_path / "run", **words)
    first = trainer.evaluate()["loss"]
    trainer.train()
    assert trainer.run.evaluation["loss"] != first


def test_an_adapter_is_trained_resumed_and_merged_into_best(path, tmp_path):
    lora = {"LORA_RANK": 2, "LEARNING_RATE": 1e-2, "WARMUP_STEPS": 0, "USE_LR_SCHEDULER": False}
    trainer = finished(path, tmp_path / "run", **lora, SAVE_EVERY_N_STEPS=1, EVAL_EVERY_N_STEPS=1)
    again = make(path, tmp_path / "run", **lora, MAX_STEPS=3, RESUME=str(tmp_path / "run/step_2"))
    rows = trainer.eval_rows
    assert again.evaluate(again.eval_rows)["loss"] == pytest.approx(trainer.evaluate(rows)["loss"], abs=1e-6)
    metrics = json.loads((tmp_path / "run/best/metrics.json").read_text())
    constant = {"BASE_MODEL" if path == RM else "ACTOR_MODEL": str(tmp_path / "run/best" / BEST[path])}
    if path == DPO:
        constant["REFERENCE_MODEL"] = str(TINY / "policy")
    merged = make(path, tmp_path / "merged", **constant)
    assert merged.evaluate()["loss"] == pytest.approx(metrics["loss"], rel=1e-3)
    names = load_file(tmp_path / "run/best" / BEST[path] / "model.safetensors")
    assert not any("lora" in name or "modules_to_save" in name for name in names)


def test_sampled_answers_use_no_filter_and_draw_nothing_from_the_training(tmp_path, monkeypatch):
    trainer = make(SFT, tmp_path)
    trainer.actor.generation_config.update(top_k=1, repetition_penalty=5.0, temperature=0.1)
    torch.rand(1)  # so that the state is that of no seed
    before = torch.get_rng_state()
    prompts = [row["prompt_ids"] for row in trainer.train_rows[:1]] * 12
    sampled = sft.sample_answers(trainer.actor, trainer.tokenizer, prompts, False)
    greedy = sft.sample_answers(trainer.actor, trainer.tokenizer, prompts, True)
    assert torch.equal(before, torch.get_rng_state())
    assert len(set(greedy)) == 1 and len(set(sampled)) > 2  # the likeliest token alone would be one answer
    monkeypatch.setattr(sft, "TEMPERATURE", 0.001)
    assert sft.sample_answers(trainer.actor, trainer.tokenizer, prompts, False) == greedy
    # At a temperature at which all 82 tokens are alike, more than the likeliest 50 are sampled
    monkeypatch.setattr(sft, "TEMPERATURE", 1e6)
    monkeypatch.setattr(sft, "MAX_NEW_TOKENS", 1)
    assert len(set(sft.sample_answers(trainer.actor, trainer.tokenizer, prompts[:1] * 600, False))) > 60


def test_the_held_out_accuracy_counts_correct_answers(tmp_path, monkeypatch):
    trainer = make(DPO, tmp_path, ACCURACY_FUNCTION="exact_answer")
    golds = [row["answer"] for row in trainer.eval_rows]

    def say(model, tokenizer, prompts, greedy):
        assert prompts == [row["prompt_ids"] for row in trainer.eval_rows]
        return golds if greedy else [golds[0], "no", "no", "no"]

    functions = type(trainer).evaluate.__wrapped__.__globals__
    monkeypatch.setitem(functions, "sample_answers", say)
    metrics = trainer.evaluate()
    assert (metrics["accuracy_greedy"], metrics["accuracy_sampled"]) == (1.0, 0.25)


def test_the_picture_of_held_out_pairs_is_written(tmp_path, drawing):
    trainer = make(RM, tmp_path)
    trainer.evaluate()
    rm.draw_pairs(trainer.run, trainer.held_out)
    assert (tmp_path / "reward_model_pairs.png").stat().st_size > 10000


def test_the_shipped_pairs_and_demonstrations_come_from_their_seed(tmp_path, monkeypatch):
    shutil.copy(TINY / "test.jsonl", tmp_path)
    monkeypatch.setattr(sys, "argv", ["make_preferences.py", f"OUT={tmp_path}"])
    runpy.run_path(str(ROOT / "data/make_preferences.py"), run_name="__main__")
    for name in ("demonstrations.jsonl", "pairs.jsonl", "pairs_test.jsonl"):
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes()
    held_out = {row["problem"] for row in read(TINY / "test.jsonl")}
    assert not held_out & {row["problem"] for row in read(TINY / "demonstrations.jsonl")}
    assert not held_out & {row["prompt"] for row in read(TINY / "pairs.jsonl")}


def test_the_shipped_world_is_made_by_the_scripts(tmp_path, monkeypatch, started):
    """The problems are the shipped ones; policy and reward model come from ppo/sft.py and
    ppo/reward_model.py, here after one step each."""
    ran = []

    def run_here(words):
        ran.append(dict(word.split("=", 1) for word in words[2:]))
        limit = "MAX_EVAL_PROMPTS=4" if words[1] == str(ROOT / SFT) else "MAX_EVAL_PAIRS=4"
        assert started(words[1], *words[2:], limit).returncode == 0

    monkeypatch.setattr("subprocess.check_call", run_here)
    monkeypatch.setattr(sys, "argv", ["make_tiny.py", f"OUT={tmp_path}", "SFT_STEPS=1", "REWARD_STEPS=1"])
    runpy.run_path(str(ROOT / "data/make_tiny.py"), run_name="__main__")
    for name in ("train.jsonl", "test.jsonl", "policy/tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes()
    assert ran[1]["BASE_MODEL"] == str(tmp_path / "policy")
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts.keys() >= {"policy_accuracy_sampled", *json.loads((TINY / "facts.json").read_text())}
    shipped = load_file(TINY / "policy/model.safetensors")
    assert load_file(tmp_path / "policy/model.safetensors").keys() == shipped.keys()
    assert "score.weight" in load_file(tmp_path / "reward_model/model.safetensors")


def test_the_best_and_the_worst_candidate_of_a_prompt_are_a_pair(tmp_path, monkeypatch, capsys):
    """Right before wrong, then by the grade; not what failed, was not verified or is all alike."""
    rows = []
    for name, facts in {
        "a": [(0, 0.2), (1, 0.4), (1, 0.9), (0, 0.1), (None, None)],
        "b": [(1, 0.5), (1, 0.5)],
        "c": [(0, 0.3)],
    }.items():
        for i, (hard, soft) in enumerate(facts):
            record = {"prompt_id": name, "prompt": f"{name}?", "text": f"{name}{i}", "eval_failed": False}
            rows.append({**record, "hard": hard, "soft": soft})
    rows.append({**rows[0], "text": "failed", "hard": 0, "soft": -1.0, "eval_failed": True})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    words = ["pairs.py", str(tmp_path / "c.parquet"), str(tmp_path / "pairs.jsonl")]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(ROOT / "tools/pairs.py"), run_name="__main__")
    (pair,) = read(tmp_path / "pairs.jsonl")
    assert pair == {"prompt": "a?", "chosen": "a2", "rejected": "a3", "margin": pytest.approx(1.8)}
    assert capsys.readouterr().out.startswith("1 pairs of 3 prompts")


# ---------------------------------------------------------------- found by a first reader of the files


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("path", ["ppo/sft.py", "rce/dpo.py"])
def test_answers_that_end_in_another_token_than_sampling_does_are_refused(path, tmp_path):
    """As Qwen2.5-0.5B: the template ends a turn by <|im_end|>, sampling by EOS."""
    script = load_script(path, OUTPUT_DIR=str(tmp_path / "run"), MAX_STEPS=1)
    trainer = trainer_of(script)
    assert len(script.encode_answer(trainer, "What is 2 + 2?", "4", "row 1")[1]) > 1
    trainer.tokenizer.chat_template = CHATML
    with pytest.raises(
        script.UserError, match="row 1: an answer ends in .* but sampling stops at .*EOS_TOKEN"
    ):
        script.encode_answer(trainer, "What is 2 + 2?", "4", "row 1")


def trainer_of(script):
    """The one trainer class of a module."""
    (name,) = [name for name in vars(script) if name.endswith("Trainer")]
    return getattr(script, name)()


def test_a_first_message_of_the_assistant_is_not_trained(tmp_path, capsys):
    hello = {"role": "assistant", "content": "Hello"}
    chats = [[hello, {"role": "user", "content": "2"}, {"role": "assistant", "content": "4"}], [hello]]
    lines = "".join(json.dumps({"chat": chat}) + "\n" for chat in chats)
    (tmp_path / "chats.jsonl").write_text(lines)
    spec = {"path": str(tmp_path / "chats.jsonl"), "type": "jsonl", "messages": "chat"}
    script = load_script("ppo/sft.py", OUTPUT_DIR=str(tmp_path / "run"))
    trainer = trainer_of(script)
    trainer.tokenizer.chat_template = CHATML.replace("<|im_end|>", "{{ eos_token }}")
    (row,) = script.load_demonstrations(trainer, [spec], "TRAIN_DATASETS", None)
    trained = trainer.tokenizer.decode([row["ids"][t] for t in row["trained"]])
    assert "4" in trained and "Hello" not in trained and trained.endswith(trainer.tokenizer.eos_token)
    assert "in which only the first message is the assistant's" in capsys.readouterr().out


@pytest.mark.parametrize("path", ["ppo/sft.py", "rce/dpo.py"])
def test_the_models_own_filters_do_not_change_sampled_answers(path, tmp_path):
    script = load_script(path, OUTPUT_DIR=str(tmp_path / "run"), MAX_NEW_TOKENS=12)
    trainer = trainer_of(script)
    prompts = [row["prompt_ids"] for row in trainer.eval_rows[:8]]

    def sampled():
        return script.sample_answers(trainer.actor, trainer.tokenizer, prompts, False)

    plain = sampled()
    trainer.actor.generation_config.min_p = 0.9
    trainer.actor.generation_config.no_repeat_ngram_size = 2
    assert sampled() == plain and trainer.actor.generation_config.min_p == 0.9


def test_prompts_to_train_on_need_no_room_for_a_sampled_answer(tmp_path, monkeypatch):
    script = load_script("ppo/sft.py", OUTPUT_DIR=str(tmp_path / "run"))
    trainer = SimpleNamespace(accuracy_function=len, actor=None)
    monkeypatch.setattr(script, "max_positions", lambda model: 50)
    rows = [{"length": 45, "prompt_ids": [5] * 40}]
    script.check_lengths(trainer, rows, "TRAIN_DATASETS")
    with pytest.raises(script.UserError, match="reads at most 50 tokens, but a row may have"):
        script.check_lengths(trainer, rows, "EVAL_DATASETS")


def test_a_reference_that_does_not_know_all_tokens_is_refused(tmp_path):
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    config = LlamaConfig(**sizes, vocab_size=40)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "small")
    words = dict(OUTPUT_DIR=str(tmp_path / "run"), REFERENCE_MODEL=str(tmp_path / "small"))
    script = load_script("rce/dpo.py", **words)
    with pytest.raises(script.UserError, match="REFERENCE_MODEL = .* cannot read all answers"):
        trainer_of(script)


@pytest.mark.parametrize("config_class", [DistilBertConfig, DebertaV2Config])
def test_heads_of_several_layers_are_trained_whole_beside_adapters(config_class, tmp_path):
    names = dict(vocab_size=500, max_position_embeddings=64, num_labels=2)
    if config_class is DistilBertConfig:
        config = config_class(**names, dim=16, n_layers=1, n_heads=2, hidden_dim=16)
    else:
        sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
        config = config_class(**names, **sizes)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "base")
    script = load_script("ppo/reward_model.py", LORA_RANK=2)
    where = (tmp_path / "base", "BASE_MODEL", torch.device("cpu"))
    model = script.load_adapted(AutoModelForSequenceClassification, *where, None, True)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    heads = [name for name in trained if not name.startswith(model.base_model_prefix)]
    assert len(heads) == 4 and all("modules_to_save" in name for name in heads)  # two layers with biases
    assert any("lora_A" in name for name in trained)
    assert model.config.num_labels == 1  # the base had two


def test_another_end_token_is_trained_and_saved_with_the_policy(tmp_path):
    words = dict(OUTPUT_DIR=str(tmp_path / "run"), MAX_STEPS=1, MAX_EVAL_PROMPTS=4, BATCH_SIZE=4)
    script = load_script("ppo/sft.py", **words)
    plain = trainer_of(script).tokenizer
    other = next(token for token in ("+", "*", "=") if token in plain.get_vocab())
    script = load_script("ppo/sft.py", **words, RESUME="no", EOS_TOKEN=other)
    trainer = trainer_of(script)
    row = trainer.train_rows[0]
    assert row["ids"][row["trained"][-1]] == plain.convert_tokens_to_ids(other)
    trainer.train()
    saved = AutoTokenizer.from_pretrained(tmp_path / "run/best/policy")
    config = json.loads((tmp_path / "run/best/policy/generation_config.json").read_text())
    assert saved.eos_token == other and set(config["eos_token_id"]) == set(trainer.end_ids)
    script = load_script("ppo/sft.py", **words, RESUME="no", EOS_TOKEN="<none>")
    with pytest.raises(script.UserError, match="EOS_TOKEN = '<none>' is no token of ACTOR_MODEL"):
        trainer_of(script)
