"""A reward model and DPO: their losses and steps by hand, how pairs are read, the reference; and the run of
all three trainers that learn from given answers."""

import json
import math
import runpy
import sys

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import torch
import transformers
from conftest import CHATML, END, PAIRS, ROOT, SMALL, START, TINY, bot, load, read, spec_of, user, write_rows
from program import Program

SFT, RM, DPO = "ppo/sft.py", "ppo/reward_model.py", "rce/dpo.py"
BEST = {SFT: "policy", RM: "reward_model", DPO: "policy"}
MODEL = {SFT: "ACTOR_MODEL", RM: "BASE_MODEL", DPO: "ACTOR_MODEL"}
each_trainer = pytest.mark.parametrize("path", [SFT, RM, DPO])
of_pairs = pytest.mark.parametrize("path", [RM, DPO])


# ---------------------------------------------------------------- the losses, in float64

CHOSEN, REJECTED = torch.tensor([[2.0, -1.0, 0.5, 0.0], [1.0, 1.5, 0.5, -4.0]]).double()


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def test_the_loss_of_a_pair_is_that_of_bradley_and_terry_with_margin_and_centre():
    module = load(RM, CENTER_COEF=0.3)
    margins = [0.0, 0.5, 1.0, 2.0]
    found = module.preference_loss(CHOSEN, REJECTED, torch.tensor(margins).double())
    scores = zip(CHOSEN.tolist(), REJECTED.tolist(), margins)
    wanted = [-log_sigmoid(c - r - m) + 0.3 * (c + r) ** 2 for c, r, m in scores]
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)
    stats = {name: x.tolist() for name, x in module.pair_stats(CHOSEN, REJECTED).items()}
    assert stats["accuracy"] == [1.0, 0.0, 0.5, 1.0] and stats["margin"] == [1.0, -2.5, 0.0, 4.0]
    assert stats["chosen_score"] == CHOSEN.tolist() and stats["rejected_score"] == REJECTED.tolist()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_dpo_loss_of_a_pair_with_label_smoothing(smoothing):
    found = load(DPO, BETA=0.5, LABEL_SMOOTHING=smoothing).dpo_loss(CHOSEN, REJECTED)
    h = (0.5 * (CHOSEN - REJECTED)).tolist()
    wanted = [-(1 - smoothing) * log_sigmoid(x) - smoothing * log_sigmoid(-x) for x in h]
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)


def test_the_ipo_loss_of_a_pair_is_a_squared_distance():
    found = load(DPO, BETA=0.25, LOSS_TYPE="ipo").dpo_loss(CHOSEN, REJECTED)
    assert found.tolist() == [(c - r - 2) ** 2 for c, r in zip(CHOSEN.tolist(), REJECTED.tolist())]


def test_what_dpo_logs_of_a_pair():
    numbers = torch.tensor([[-1.0, -2.0, -1.0], [-3.0, -1.0, -1.0], [-2.0, -2.0, -1.0], [-2.5, -2.0, -1.0]])
    stats = {name: x.tolist() for name, x in load(DPO, BETA=0.5).dpo_stats(*numbers).items()}
    assert stats["chosen_reward"] == [0.5, 0.0, 0.0] and stats["rejected_reward"] == [-0.25, 0.5, 0.0]
    assert stats["reward_margin"] == [0.75, -0.5, 0.0] and stats["reward_accuracy"] == [1.0, 0.0, 0.5]
    assert stats["chosen_logprob"] == [-1, -2, -1] and stats["rejected_logprob"] == [-3, -1, -1]


# ---------------------------------------------------------------- one optimizer step


def assert_same_gradients(model, wanted):
    for (name, one), two in zip(model.named_parameters(), wanted.parameters()):
        assert torch.allclose(one.grad, two.grad, atol=2e-5, rtol=1e-3), name


@pytest.mark.parametrize("size", [1, 4])
def test_a_step_of_a_reward_model_is_the_mean_over_its_pairs(make, size):
    options = {"BASE_MODEL": str(TINY / "reward_model"), "CENTER_COEF": 0.1, "MAX_GRAD_NORM": 1e9}
    trainer = make(RM, BATCH_SIZE=size, USE_LR_SCHEDULER=False, **options)
    rows = trainer.train_rows[:6]
    rows[4]["margin"] = 2.0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(TINY / "reward_model")
    losses = []
    for row in rows:
        texts = [f"{row['prompt']}\n{row[name]}<eos>" for name in ("chosen", "rejected")]
        ids = [torch.tensor([trainer.tokenizer(text)["input_ids"]]) for text in texts]
        c, r = (model(x).logits[0, 0] for x in ids)
        losses.append(-torch.nn.functional.logsigmoid(c - r - row["margin"]) + 0.1 * (c + r) ** 2)
    torch.stack(losses).mean().backward()
    trainer.optimizers["reward_model"].zero_grad = lambda: None
    trainer.state.step = 4
    metrics = trainer.update(rows)
    assert metrics["loss"] == pytest.approx(sum(losses).item() / 6, abs=1e-5)
    assert metrics["learning_rate"] == pytest.approx(4e-4)
    assert_same_gradients(trainer.model, model)


@pytest.mark.parametrize("loss_type, size", [("dpo", 1), ("dpo", 4), ("ipo", 4)])
def test_a_step_of_dpo_by_plain_forward_passes(make, tmp_path, loss_type, size):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY / "policy")
    reference = transformers.AutoModelForCausalLM.from_pretrained(TINY / "policy")
    for parameter in reference.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    reference.save_pretrained(tmp_path / "reference")
    options = {"REFERENCE_MODEL": str(tmp_path / "reference"), "LOSS_TYPE": loss_type, "MAX_GRAD_NORM": 1e9}
    trainer = make(DPO, BATCH_SIZE=size, LOGITS_AT_ONCE=11, BETA=0.3, WARMUP_STEPS=0, **options)
    rows = trainer.train_rows[:6]
    losses, margins = [], []
    for row in rows:
        ratios = []
        for name in ("chosen", "rejected"):
            first = len(trainer.tokenizer(f"{row['prompt']}\n")["input_ids"])
            ids = torch.tensor([trainer.tokenizer(f"{row['prompt']}\n{row[name]}<eos>")["input_ids"]])
            logprobs = [m(ids).logits[0, first - 1 : -1].log_softmax(-1) for m in (model, reference)]
            one, two = (x.gather(1, ids[0, first:, None]) for x in logprobs)
            ratio = one - two.detach()
            ratios.append(ratio.mean() if loss_type == "ipo" else ratio.sum())
        h = ratios[0] - ratios[1]
        losses.append((h - 1 / 0.6) ** 2 if loss_type == "ipo" else -torch.nn.functional.logsigmoid(0.3 * h))
        margins.append(0.3 * h.item())
    torch.stack(losses).mean().backward()
    trainer.optimizers["policy"].zero_grad = lambda: None
    trainer.state.step = 1
    metrics = trainer.update(rows)
    assert metrics["loss"] == pytest.approx(sum(losses).item() / 6, abs=1e-4)
    assert metrics["reward_margin"] == pytest.approx(sum(margins) / 6, abs=1e-4)
    assert metrics["learning_rate"] == 1e-4
    assert_same_gradients(trainer.actor, model)


@each_trainer
def test_held_out_metrics_are_means_however_rows_are_cut(make, path):
    metrics = [make(path, BATCH_SIZE=size).evaluate() for size in (1, 4)]
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-4)
    trainer = make(path)
    step = trainer.update(trainer.eval_rows)
    assert {name: step[name] for name in metrics[0]} == pytest.approx(metrics[0], abs=1e-4)
    assert make(path, EVAL_DATASETS=[]).evaluate() == {}


@each_trainer
def test_gradient_checkpointing_and_bfloat16_are_near_a_plain_step(make, path):
    gradients, losses = [], []
    for options in ({}, {"GRADIENT_CHECKPOINTING": True}, {"DTYPE": "bfloat16"}):
        trainer = make(path, MAX_GRAD_NORM=1e9, **options)
        (model,), (optimizer,) = trainer.models.values(), trainer.optimizers.values()
        count = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: count.append(1))
        optimizer.zero_grad = lambda: None
        optimizer.step = lambda: None
        losses.append(trainer.update(trainer.train_rows[:4])["loss"])
        assert len(count) == (2 if "GRADIENT_CHECKPOINTING" in options else 1)
        gradients.append([p.grad for p in model.parameters()])
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert not any(module.training for module in model.modules())
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients[:2]))
    assert losses[0] == losses[1] == pytest.approx(losses[2], abs=0.05)


# ---------------------------------------------------------------- the reference of DPO


@pytest.mark.parametrize("rank", [0, 4])
def test_at_the_first_step_the_policy_is_its_reference_which_a_resumed_run_reads_again(make, tmp_path, rank):
    options = {"LORA_RANK": rank, "LEARNING_RATE": 1e-2, "WARMUP_STEPS": 0, "MAX_STEPS": 3}
    trainer = make(DPO, **options)
    before = [row["reference"] for row in trainer.train_rows]
    trainer.train()
    first = next(r for r in read(tmp_path / "run/logs/metrics.jsonl") if r["phase"] == "train")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6) and abs(first["reward_margin"]) < 1e-5
    last = trainer.evaluate()
    assert abs(last["reward_margin"]) > 0.01
    again = make(DPO, **options, RESUME="yes")
    assert [row["reference"] for row in again.train_rows] == before
    assert again.state.step == 3 and again.evaluate() == pytest.approx(last, abs=1e-4)


def test_a_reference_that_does_not_know_all_tokens_is_refused(make, tmp_path):
    config = transformers.AutoConfig.from_pretrained(TINY / "policy")
    config.vocab_size = 40
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "few")
    with pytest.raises(ValueError, match="few has 40 embeddings: too few"):
        make(DPO, REFERENCE_MODEL=str(tmp_path / "few"))


# ---------------------------------------------------------------- how pairs are read


def call(name):
    return bot(None, tool_calls=[{"type": "function", "function": {"name": name, "arguments": {"a": 1}}}])


ONE, TWO = [user("1+1?")], [user("1+1?"), bot("2"), user("And 1?")]
ASK = f"{START}assistant\n"
ASKED = f"{START}user\n1+1?{END}\n"
IS_2, IS_3, OTHER = [bot("2")], [bot("3")], [bot("4"), user("No"), bot("3")]
DIALOGUE = "\n\nHuman: 1+1?\n\nAssistant: 2\n\nHuman: And 1?\n\nAssistant: "
FORMS = {  # the record; the prompt, the chosen and the rejected answer that are read
    "texts": ({"prompt": "1+1?", "chosen": "2", "rejected": "3"}, ("1+1?", "2", "3")),
    "messages": ({"prompt": ONE, "chosen": IS_2, "rejected": IS_3}, (ONE, IS_2, IS_3)),
    "ultrafeedback": ({"prompt": "1+1?", "chosen": ONE + IS_2, "rejected": ONE + IS_3}, (ONE, IS_2, IS_3)),
    "several turns": ({"chosen": TWO + IS_3, "rejected": TWO + OTHER}, (TWO, IS_3, OTHER)),
    "one is longer": ({"chosen": ONE + IS_2 + IS_3, "rejected": ONE + IS_2}, (ONE, IS_2 + IS_3, IS_2)),
    "hh-rlhf": (
        {"chosen": f"{DIALOGUE}3\n\nfor sure", "rejected": f"{DIALOGUE}Human: 4"},
        (TWO, [bot("3\n\nfor sure")], [bot("Human: 4")]),
    ),
}


@of_pairs
@pytest.mark.parametrize("form", FORMS)
def test_pairs_are_read_as_they_are_published(make, chat_policy, tmp_path, path, form):
    record, wanted = FORMS[form]
    data = spec_of(write_rows(tmp_path / "pairs.jsonl", record), **{name: name for name in record})
    trainer = make(path, **{MODEL[path]: chat_policy(), "TRAIN_DATASETS": data, "EVAL_DATASETS": []})
    (row,) = trainer.train_rows
    assert (row["prompt"], row["chosen"], row["rejected"]) == wanted
    messages = row["prompt"] if isinstance(row["prompt"], list) else ONE
    for name in ("chosen", "rejected"):
        answer = row[name] if isinstance(row[name], list) else [bot(row[name])]
        chat = trainer.tokenizer.apply_chat_template([*messages, *answer], tokenize=False)
        if path == RM:
            assert trainer.tokenizer.decode(row[f"{name}_inputs"]["input_ids"]) == chat
        else:
            ids, mask = row[f"{name}_answer"].values()
            assert trainer.tokenizer.decode(ids) + "\n" == chat
            trained = trainer.tokenizer.decode([token for token, is_trained in zip(ids, mask) if is_trained])
            assert trained == "".join(turn["content"] + END for turn in answer if turn["role"] == "assistant")
            prompt = trainer.tokenizer.decode(row["prompt_ids"])
            assert prompt.endswith(messages[-1]["content"] + f"{END}\n{ASK}")


@of_pairs
def test_tool_calls_of_both_answers_are_read_also_from_parquet(make, chat_policy, tmp_path, path):
    chosen, rejected = [call("add"), {"role": "tool", "content": "2"}, bot("2")], [call("sub")]
    tools = json.dumps([{"type": "function", "function": {"name": "add"}}])
    record = {"prompt": ONE, "chosen": chosen, "rejected": rejected, "tools": tools}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "pairs")
    data = spec_of(tmp_path / "pairs", "parquet", **PAIRS, tools="tools")
    options = {"TRAIN_DATASETS": data, "EVAL_DATASETS": []}
    trainer = make(path, **{MODEL[path]: chat_policy()}, **options)
    (row,) = trainer.train_rows
    inputs = [row[f"{name}_{'inputs' if path == RM else 'answer'}"] for name in ("chosen", "rejected")]
    texts = [trainer.tokenizer.decode(x["input_ids" if path == RM else "ids"]) for x in inputs]
    before = f"{START}tools\n{tools}{END}\n{ASKED}{ASK}"
    shown = '<call>{{"name": "{}", "arguments": {{"a": 1}}}}</call>' + END
    assert texts[0].removesuffix("\n") == f"{before}{shown.format('add')}\n{START}tool\n2{END}\n{ASK}2{END}"
    assert texts[1].removesuffix("\n") == before + shown.format("sub")
    hidden = chat_policy(CHATML.replace("m.tool_calls or []", "[]"))
    with pytest.raises(ValueError, match="1/pairs:1.*shows no tool_calls"):
        make(path, **{MODEL[path]: hidden}, **options)


@of_pairs
def test_pairs_that_teach_nothing_are_left_out_and_counted(make, tmp_path, capsys, path):
    """Equal answers also where only what is read is equal: an answer is read up to its first end."""
    good = {"prompt": "1+1=?", "chosen": "2", "rejected": "3"}
    odd = [{"chosen": "3"}, {"chosen": ""}, {"rejected": None}, {"chosen": " "}, {"rejected": "5" * 50}]
    odd.append({"chosen": "q", "rejected": "z"})  # two letters that the tokenizer does not know
    odd.append({"chosen": "2<eos>1", "rejected": "2<eos>"})
    rows = [good, *(good | change for change in odd)]
    data = spec_of(write_rows(tmp_path / "pairs.jsonl", *rows), **PAIRS)
    options = {"TRAIN_DATASETS": data, "EVAL_DATASETS": []}
    trainer = make(path, **options, MAX_TOKENS=len("1+1=?\n") + 50)  # one token less than the sixth has
    assert [row["id"] for row in trainer.train_rows] == ["1/pairs.jsonl:1"]
    shown, count = capsys.readouterr().out, len(rows)
    assert f"left out 1 of {count} rows, longer than MAX_TOKENS; the first is 1/pairs.jsonl:6" in shown
    assert f"left out 3 of {count} rows, without an answer; the first is 1/pairs.jsonl:3" in shown
    assert f"left out 3 of {count} rows, whose answers are equal; the first is 1/pairs.jsonl:2" in shown


@pytest.mark.parametrize(
    "record, message",
    [
        ({"chosen": "2", "rejected": "3"}, "Human: Hi"),
        ({"chosen": ONE + IS_2, "rejected": [user("2+2?"), bot("4")]}, "do not begin with"),
        ({"prompt": "Be brief", "chosen": ONE + IS_2, "rejected": ONE + IS_3}, "another prompt.*Be brief"),
        ({"prompt": [user("2+2?")], "chosen": ONE + IS_2, "rejected": ONE + IS_3}, "another prompt"),
        ({"prompt": "2+2?", "chosen": f"{DIALOGUE}3", "rejected": f"{DIALOGUE}4"}, "another prompt"),
        ({"prompt": "1+1?", "chosen": "2", "rejected": 3.0}, "an answer is a text.*3.0"),
        ({"prompt": "1+1?", "chosen": "2 \ud83d", "rejected": "3"}, "surrogates"),
        ({"prompt": ONE, "chosen": [bot("2", thinking="1")], "rejected": IS_3}, "shows no thinking"),
    ],
)
def test_wrong_pairs_are_refused_in_one_line(make, chat_policy, tmp_path, record, message):
    data = spec_of(write_rows(tmp_path / "pairs.jsonl", record), **{name: name for name in record})
    with pytest.raises(ValueError, match=f"pairs.jsonl:1.*{message}") as error:
        make(DPO, ACTOR_MODEL=chat_policy(), TRAIN_DATASETS=data)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- the reward model and who uses it


def encoder(folder, config):
    """Writes an encoder that has a head for two labels, or none, and the tokenizer of the tiny policy."""
    config.initializer_range = 0.4  # so that texts have different scores
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY / "policy")
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <eos>", pair="$A <eos> $B:1 <eos>:1", special_tokens=[("<eos>", 1)]
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
DISTILBERT = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 256, "bos_token_id": 1, "eos_token_id": 1}
BASES = {
    "a decoder": None,
    "a decoder of absolute positions": transformers.GPT2Config(**GPT2, vocab_size=82),
    "an encoder": transformers.BertConfig(**BERT, vocab_size=82, num_labels=2, pad_token_id=0),
    "an encoder with a head of two layers": transformers.DistilBertConfig(**DISTILBERT, vocab_size=82),
}


@pytest.mark.parametrize("base, rank", zip(BASES, [2, 0, 0, 2]))
def test_ppo_is_rewarded_by_what_was_trained(make, tmp_path, base, rank):
    """It is scored at the same tokens, alone or in a batch, and its training goes on from a checkpoint."""
    options = {"LORA_RANK": rank, "LEARNING_RATE": 1e-2, "WARMUP_STEPS": 0}
    if BASES[base]:
        options["BASE_MODEL"] = encoder(tmp_path / "base", BASES[base])
    trainer = make(RM, **options)
    before = trainer.evaluate()["loss"]
    trainer.train()
    rows = trainer.eval_rows
    prompts = [row["prompt"] for row in rows] * 2
    answers = [row["chosen"] for row in rows] + [row["rejected"] for row in rows]
    scores = trainer.reward_model_score(prompts, answers)
    alone = [trainer.reward_model_score([p], [a]).item() for p, a in zip(prompts, answers)]
    assert scores.tolist() == pytest.approx(alone, abs=1e-5) and trainer.evaluate()["loss"] != before
    trainer.save_best()  # it may be of an earlier step
    best = str(tmp_path / "run/best/reward_model")
    ppo = make("ppo/ppo.py", REWARD_MODEL=best, OUTPUT_DIR=str(tmp_path / "ppo"))
    assert ppo.reward_model_score(prompts, answers).tolist() == pytest.approx(scores.tolist(), abs=1e-4)
    resumed = make(RM, **options, RESUME="yes", SEED=2)
    assert resumed.reward_model_score(prompts, answers).tolist() == pytest.approx(scores.tolist(), abs=1e-5)


@pytest.mark.parametrize("pad, rank", [("<eos>", 0), (None, 2)])
def test_transformers_reads_the_score_at_the_same_token_padded_on_either_side(make, tmp_path, pad, rank):
    """All texts end in EOS, so it must not be the pad token. A run goes on with the same one."""
    base = encoder(tmp_path / "base", BASES["a decoder of absolute positions"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY / "policy")
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(base)
    options = {"BASE_MODEL": base, "LORA_RANK": rank, "LEARNING_RATE": 1e-2, "WARMUP_STEPS": 0}
    make(RM, **options, MAX_STEPS=1).train()
    trainer = make(RM, **options, RESUME="yes")
    trainer.train()
    prompts, answers = ["1+1=?", "What is 12+30?"], ["2", "12+30=42"]
    scores = trainer.reward_model_score(prompts, answers).tolist()
    trainer.save_best()
    best = tmp_path / "run/best/reward_model"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(best)
    tokenizer = transformers.AutoTokenizer.from_pretrained(best)
    texts = [f"{prompt}\n{answer}<eos>" for prompt, answer in zip(prompts, answers)]
    for side in ("left", "right"):
        batch = tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        assert model(**batch).logits[:, 0].tolist() == pytest.approx(scores, abs=1e-4)


def test_an_encoder_reads_no_chats(make, tmp_path):
    record = {"prompt": ONE, "chosen": "2", "rejected": "3"}
    data = spec_of(write_rows(tmp_path / "pairs.jsonl", record), **PAIRS)
    with pytest.raises(ValueError, match="pairs.jsonl:1.*an encoder reads texts, not chats"):
        make(RM, BASE_MODEL=encoder(tmp_path / "base", BASES["an encoder"]), TRAIN_DATASETS=data)


def test_margins_are_finite_numbers_from_their_column(make, tmp_path):
    pair = {"prompt": "1+1=?", "chosen": "2", "rejected": "3"}
    rows = [{**pair, "margin": margin} for margin in (0, 1.5, "2")]
    data = spec_of(write_rows(tmp_path / "pairs.jsonl", *rows), **PAIRS, margin="margin")
    assert [row["margin"] for row in make(RM, TRAIN_DATASETS=data).train_rows] == [0.0, 1.5, 2.0]
    for margin in (None, "", float("nan"), float("inf"), "much"):
        write_rows(tmp_path / "pairs.jsonl", rows[0], {**pair, "margin": margin})
        with pytest.raises(ValueError, match="pairs.jsonl:2.*a margin is a finite number"):
            make(RM, TRAIN_DATASETS=data)


@pytest.mark.parametrize("path, key", [(SFT, "messages"), (RM, "output"), (DPO, "split")])
def test_a_key_of_a_data_set_that_nothing_reads_is_refused(make, path, key):
    (spec,) = SMALL[path]["TRAIN_DATASETS"]
    with pytest.raises(ValueError, match="the keys are path, type, "):
        make(path, TRAIN_DATASETS=[{**spec, key: "prompt"}])


# ---------------------------------------------------------------- the programs that make the data


def test_the_shipped_data_come_from_their_seeds_and_the_models_from_the_trainers(tmp_path, monkeypatch):
    """The models here after one step each."""

    def run_here(words):
        limit = "MAX_EVAL_ROWS=4" if words[1].endswith(SFT) else "MAX_EVAL_PAIRS=4"
        done = Program(*words[1:], limit, cwd=ROOT).wait()
        assert done.returncode == 0, done.stderr

    monkeypatch.setattr("subprocess.check_call", run_here)
    for name, steps in (("make_tiny", ["SFT_STEPS=1", "REWARD_STEPS=1"]), ("make_preferences", [])):
        monkeypatch.setattr(sys, "argv", [name, f"OUT={tmp_path}", *steps])
        runpy.run_path(str(ROOT / f"data/{name}.py"), run_name="__main__")
    made = "train.jsonl test.jsonl policy/tokenizer.json demonstrations.jsonl pairs.jsonl pairs_test.jsonl"
    for name in made.split():
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes()
    for name in ("policy/model.safetensors", "reward_model/model.safetensors"):
        assert (tmp_path / name).stat().st_size == (TINY / name).stat().st_size
    seen = {row["problem"] for row in read(TINY / "demonstrations.jsonl")}
    seen |= {row["prompt"] for row in read(TINY / "pairs.jsonl")}
    assert not seen & {row["problem"] for row in read(TINY / "test.jsonl")}
