"""Fine-tuning: the loss and its gradient against transformers' own, what of a chat is trained, how data is
read, and what is sampled. Of answer_logprobs(), encode_answer() and respond() dpo.py has the same text."""

import json
import shutil

import pytest
import torch
import transformers
from conftest import CHATML, END, START, TINY, bot, read, spec_of, user, write_rows

SFT, CHAT = "ppo/sft.py", {"messages": "messages"}


@pytest.fixture
def make_rows(make, chat_policy, tmp_path):
    """make_rows(record, ...) returns the rows of these records, read with the policy of chat_policy(template)
    and shown as texts whose trained parts stand in brackets."""

    def rows_of(*records, template=CHATML, policy=None, columns=None, **constants):
        write_rows(tmp_path / "rows.jsonl", *records)
        data = spec_of(tmp_path / "rows.jsonl", **(columns or CHAT))
        policy = policy or chat_policy(template)
        trainer = make(SFT, ACTOR_MODEL=policy, TRAIN_DATASETS=data, EVAL_DATASETS=[], **constants)
        return [show(trainer.tokenizer, row) for row in trainer.train_rows]

    return rows_of


def show(tokenizer, row):
    text, before = "", 0
    for token, is_trained in zip(row["ids"], row["mask"]):
        text += {1: "[", 0: "", -1: "]"}[is_trained - before] + tokenizer.decode([token])
        before = is_trained
    return text + "]" * before


# ---------------------------------------------------------------- the loss


@pytest.mark.parametrize("size", [1, 4])
def test_a_step_is_that_of_transformers_own_loss(make, size):
    trainer = make(SFT, BATCH_SIZE=size, LOGITS_AT_ONCE=7, MAX_GRAD_NORM=1e9, USE_LR_SCHEDULER=False)
    rows = trainer.train_rows[:6]
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY / "policy")
    ids = torch.zeros(6, max(len(row["ids"]) for row in rows), dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        texts = row["prompt"] + "\n", row["answer"]
        prompt, answer = (trainer.tokenizer(text)["input_ids"] for text in texts)
        whole = torch.tensor([*prompt, *answer, trainer.tokenizer.eos_token_id])
        ids[i, : len(whole)] = whole
        labels[i, len(prompt) : len(whole)] = whole[len(prompt) :]
    output = model(ids, attention_mask=(ids > 0).long(), labels=labels)
    output.loss.backward()
    is_trained = labels[:, 1:] != -100
    is_right = output.logits[:, :-1].argmax(-1) == labels[:, 1:]
    trainer.optimizers["policy"].zero_grad = lambda: None
    trainer.state.step = 4  # of five to warm up
    metrics = trainer.update(rows)
    assert metrics["loss"] == pytest.approx(output.loss.item(), abs=1e-5)
    assert metrics["token_accuracy"] == pytest.approx(is_right[is_trained].float().mean().item(), abs=1e-6)
    assert metrics["trained_tokens"] == is_trained.sum() and metrics["learning_rate"] == pytest.approx(4e-4)
    for (name, one), two in zip(model.named_parameters(), trainer.actor.parameters()):
        assert torch.allclose(one.grad, two.grad, atol=1e-6, rtol=1e-3), name


# ---------------------------------------------------------------- what of a chat is trained


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CALLS, RESULT = {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}
SHOWN = '<call>{"name": "add", "arguments": {"a": 1, "b": 2}}</call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HI, ASK = f"{START}user\nHi{END}\n", f"{START}assistant\n"
GOOD = {"messages": [user("Hi"), bot("Yes?")]}
TWO_TURNS = {"messages": [*GOOD["messages"], user("Bye"), bot("So long")]}
FIRST = f"{HI}{ASK}[Yes?{END}]"
TEXT, IMAGE = {"type": "text", "text": "Hi"}, {"type": "image", "image": "cat.png"}
CHATS = {
    "every turn": (TWO_TURNS["messages"], f"{FIRST}\n{START}user\nBye{END}\n{ASK}[So long{END}]"),
    "calls of tools, not their results": (
        [user("Hi"), CALLS, RESULT, bot("It is 3")],
        f"{HI}{ASK}[{SHOWN}{END}]\n{START}tool\n3{END}\n{ASK}[It is 3{END}]",
    ),
    "a call beside words": ([user("Hi"), bot("Wait", tool_calls=[CALL])], f"{HI}{ASK}[Wait{SHOWN}{END}]"),
    "not the first message": ([bot("Welcome"), *GOOD["messages"]], f"{ASK}Welcome{END}\n{FIRST}"),
    "no empty turn, nothing after": ([*GOOD["messages"], user("Bye"), bot(" "), user("Hi")], FIRST),
    "no calls and no thoughts": ([user("Hi"), bot("Yes?", tool_calls=[], thinking="")], FIRST),
    "parts that are texts": ([user([TEXT]), bot([TEXT, TEXT])], f"{HI}{ASK}[HiHi{END}]"),
    "up to the first end of an answer": ([user("Hi"), bot(f"Yes{END}No")], f"{HI}{ASK}[Yes{END}]"),
}


@pytest.mark.parametrize("case", CHATS)
def test_of_a_chat_is_trained(make_rows, case):
    messages, wanted = CHATS[case]
    assert make_rows({"messages": messages}) == [wanted]


@pytest.mark.parametrize(
    "mark, value", [("weight", 0), ("train", False), ("loss_mask", 0.0), ("trainable", 0)]
)
def test_a_turn_that_is_marked_is_not_trained(make_rows, mark, value):
    messages = [user("Hi"), bot("No", **{mark: value}), user("Hi"), bot("Yes?", **{mark: 1})]
    assert make_rows({"messages": messages}) == [f"{HI}{ASK}No{END}\n{FIRST}"]


def test_thoughts_are_trained_if_the_template_shows_them(make_rows):
    template = CHATML.replace("{{ m.content", "{{ m.thinking or '' }}{{ m.content")
    (row,) = make_rows({"messages": [user("Hi"), bot("Yes?", thinking="Hm. ")]}, template=template)
    assert row == f"{HI}{ASK}[Hm. Yes?{END}]"


def test_the_answer_to_a_prompt_may_be_messages(make_rows):
    columns = {"input": "question", "output": "answer"}
    turns = [{**CALLS, "content": None}, RESULT, bot("3")]
    records = [{"question": "1+2?", "answer": turns}, {"question": [user("1+2?")], "answer": turns}]
    shown = f"{START}user\n%s{END}\n{ASK}[{SHOWN}{END}]\n{START}tool\n3{END}\n{ASK}[3{END}]"
    rows = make_rows(*records, columns=columns, PROMPT_TEMPLATE="Sum: {input}")
    assert rows == [shown % "Sum: 1+2?", shown % "1+2?"]
    of_system = [{"role": "system", "content": "A"}]
    records = [{"question": "1+2?", "answer": 3}, {"question": of_system, "answer": "3"}]
    system = f"{START}system\n%s{END}\n"
    assert make_rows(*records, columns=columns, SYSTEM_PROMPT="Be brief") == [
        system % "Be brief" + f"{START}user\n1+2?{END}\n{ASK}[3{END}]",
        system % "A" + f"{ASK}[3{END}]",
    ]


def test_tools_reach_the_template_as_a_list_or_as_json(make_rows):
    records = [{**GOOD, "tools": tools} for tools in ([TOOL], json.dumps([TOOL]), None)]
    listed, as_json, without = make_rows(*records, columns={**CHAT, "tools": "tools"})
    assert listed == as_json == f"{START}tools\n{json.dumps([TOOL])}{END}\n" + without
    assert without == f"{HI}{ASK}[Yes?{END}]"


def test_another_end_of_turn_than_eos_is_trained_and_saved(make, chat_policy, tmp_path):
    policy = chat_policy(special=["<|endoftext|>"])
    config = tmp_path / "chat_policy/tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": "<|endoftext|>"}))
    data = spec_of(write_rows(tmp_path / "rows.jsonl", GOOD), **CHAT)
    trainer = make(SFT, ACTOR_MODEL=policy, TRAIN_DATASETS=data, EVAL_DATASETS=[], MAX_STEPS=1)
    eos = trainer.tokenizer.eos_token_id
    assert trainer.end_ids == [0, eos] and eos == 2
    assert show(trainer.tokenizer, trainer.train_rows[0]).endswith(f"[Yes?{END}]")
    trainer.train()
    saved = json.loads((tmp_path / "run/best/policy/generation_config.json").read_text())
    assert saved["eos_token_id"] == [0, eos]


# ---------------------------------------------------------------- what is refused or left out

WITH_CALL = {"messages": [user("Hi"), bot("Wait", tool_calls=[CALL]), user("Bye"), bot("So long")]}
NO_CALLS = CHATML.replace("m.tool_calls or []", "[]")
NO_HISTORY = CHATML.replace("m.content or ''", "m.content if loop.last or m.role != 'assistant' else 'cut'")
NO_END = CHATML.replace(END, "")
REFUSED = {
    "a template that hides tool calls": (WITH_CALL, {"template": NO_CALLS}, "rows.jsonl:2.*no tool_calls"),
    "a template that cuts turns": (TWO_TURNS, {"template": NO_HISTORY}, "rows.jsonl:2.*each turn a row"),
    "a template that ends no turn": (GOOD, {"template": NO_END}, "rows.jsonl:1.*nothing ends"),
    "no template": (GOOD, {"template": None}, "rows.jsonl:1.*need a tokenizer with a chat template"),
    "half an emoji": ({"messages": [user("Hi \ud83d"), bot("Yes")]}, {}, "rows.jsonl:2.*surrogates"),
    "an image": ({"messages": [user([TEXT, IMAGE]), bot("Yes")]}, {}, "rows.jsonl:2.*image"),
    "thoughts that the template hides": (
        {"messages": [user("Hi"), bot("Yes", thinking="Hm")]},
        {},
        "rows.jsonl:2.*shows no thinking",
    ),
    "an unknown key": ({"messages": [user("Hi"), bot("Yes", thoughts="Hm")]}, {}, "rows.jsonl:2.*thoughts"),
    "half a mark": ({"messages": [user("Hi"), bot("Yes", weight=0.5)]}, {}, "rows.jsonl:2.*a weight is 0"),
    "an answer to an answer": (
        {"messages": [bot("Hi"), bot("Yes")]},
        {},
        "rows.jsonl:2.*ends before the assistant",
    ),
    "a chat that is a text": ({"messages": "Hi"}, {}, "rows.jsonl:2.*a chat is a list"),
    "no words": ({"messages": [user("Hi"), bot(None)]}, {}, "rows.jsonl:2.*its content is a text"),
    "another format": ({"messages": [{"from": "human", "value": "Hi"}]}, {}, "rows.jsonl:2.*value"),
    "tools that are no list": (
        {**GOOD, "tools": TOOL},
        {"columns": {**CHAT, "tools": "tools"}},
        "rows.jsonl:2.*tools are a list",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_row_is_refused_in_one_line_that_names_it(make_rows, case):
    record, options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as error:
        make_rows({**GOOD, "tools": None}, record, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change", [{"q": None}, {"q": 5}, {"q": " "}, {"a": 7.0}, {"a": float("nan")}, {"a": True}]
)
def test_what_is_no_text_is_refused_and_a_whole_number_is_one(make_rows, change):
    rows = [{"q": "3+4?", "a": 7}, {"q": "3+4?", "a": 7, **change}]
    options = {"columns": {"input": "q", "output": "a"}}
    assert make_rows(rows[0], **options) == [f"{START}user\n3+4?{END}\n{ASK}[7{END}]"]
    with pytest.raises(ValueError, match="rows.jsonl:2: ValueError: (an answer|a prompt) is a text"):
        make_rows(*rows, **options)


def test_a_prompt_that_the_tokenizer_joins_with_its_answer_is_refused(make_rows, tmp_path):
    shutil.copytree(TINY / "policy", tmp_path / "policy")
    (tmp_path / "policy/chat_template.jinja").unlink()
    options = {"columns": {"input": "q", "output": "a"}, "policy": str(tmp_path / "policy")}
    record = {"q": "How man", "a": "y apples"}
    with pytest.raises(ValueError, match="rows.jsonl:1.*end PROMPT_TEMPLATE with a line break"):
        make_rows(record, **options)
    (row,) = make_rows(record, **options, PROMPT_TEMPLATE="{input}\n")
    assert row.endswith("\n[<unk> apples<eos>]")


def test_rows_that_cannot_be_trained_are_left_out_and_counted(make_rows, capsys):
    long = {"messages": [user("Hi"), bot("x" * 100)]}
    empty = [{"messages": [user("Hi"), bot(x)]} for x in ("", " \n")] + [{"messages": [bot("Yes")]}]
    cut = {"messages": [user("Hi"), bot("Yes"), user("x" * 100)]}
    assert len(make_rows(long, GOOD, *empty, cut, MAX_TOKENS=60)) == 2
    shown = capsys.readouterr().out
    assert "left out 1 of 6 rows, longer than MAX_TOKENS; the first is 1/rows.jsonl:1" in shown
    assert "left out 3 of 6 rows, without an answer; the first is 1/rows.jsonl:3" in shown
    length = len(f"user\nHi\nassistant\n{'x' * 100}") + 4  # four special tokens
    assert len(make_rows(long, MAX_TOKENS=length)) == 1
    with pytest.raises(ValueError, match="no row of .* can be trained"):
        make_rows(long, MAX_TOKENS=length - 1)


# ---------------------------------------------------------------- evaluation

FILTERS = {"top_k": 2, "top_p": 0.1, "temperature": 0.01, "repetition_penalty": 5.0, "do_sample": True}
FILTERS |= {"min_p": 0.9, "typical_p": 0.1, "no_repeat_ngram_size": 1, "num_beams": 2, "min_new_tokens": 20}


@pytest.mark.parametrize("rank", [0, 2])
def test_samples_ignore_the_models_own_filters_which_are_kept(make, tmp_path, rank):
    shutil.copytree(TINY / "policy", tmp_path / "policy")
    config = tmp_path / "policy/generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **FILTERS}))
    texts = []
    for policy in (TINY / "policy", tmp_path / "policy"):
        trainer = make(SFT, ACTOR_MODEL=str(policy), LORA_RANK=rank, MAX_NEW_TOKENS=20)
        prompts = [row["prompt_ids"] for row in trainer.eval_rows]
        texts.append([trainer.respond(prompts, greedy) for greedy in (True, False, True, False)])
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1] and texts[0][:2] == texts[0][2:]
    trainer.save_best()
    saved = json.loads((tmp_path / "run/best/policy/generation_config.json").read_text())
    assert {name: saved[name] for name in FILTERS} == FILTERS


def test_responses_are_of_the_policy_at_its_temperature(make):
    trainer = make(SFT, MAX_NEW_TOKENS=1, TEMPERATURE=1e6)
    prompts = [trainer.eval_rows[0]["prompt_ids"]] * 600
    assert len(set(trainer.respond(prompts, greedy=False))) > 60  # all 82 tokens are alike
    trainer.module.TEMPERATURE, trainer.module.MAX_NEW_TOKENS = 1e-4, 24
    rows = trainer.eval_rows
    prompts = [row["prompt_ids"] for row in rows]
    greedy = trainer.respond(prompts, greedy=True)
    assert trainer.respond(prompts, greedy=False) == greedy
    trainer.module.EVAL_BATCH_SIZE = 4
    assert trainer.respond(prompts, greedy=True) == greedy
    assert "<eos>" not in "".join(greedy)
    for row, text in zip(rows, greedy):
        assert row["prompt_ids"] == trainer.tokenizer(row["prompt"] + "\n")["input_ids"]
        ids = trainer.actor.generate(torch.tensor([row["prompt_ids"]]), do_sample=False, max_new_tokens=24)
        assert trainer.tokenizer.decode(ids[0, len(row["prompt_ids"]) :]).removesuffix("<eos>") == text


@pytest.mark.parametrize("path", [SFT, "rce/dpo.py", "grpo/grpo.py"])
def test_samples_that_would_pass_the_models_positions_are_refused_at_the_start(make, path):
    options = {} if path == "grpo/grpo.py" else {"ACCURACY_FUNCTION": "exact_answer"}
    options["MAX_NEW_TOKENS"] = 510
    with pytest.raises(ValueError, match="tiny/policy has 512 positions"):
        make(path, **options)


def say(trainer, *texts):
    """Makes the policy answer these texts, one after the other."""
    answers = iter(texts)

    def generate(ids, **options):
        new = [trainer.tokenizer(next(answers) + END)["input_ids"] for _ in ids]
        width = max(map(len, new))
        rows = [row + [0] * (width - len(row)) for row in new]
        return torch.cat([ids, torch.tensor(rows)], 1)

    trainer.actor.generate = generate


@pytest.mark.parametrize("tags", [[], ["<answer>", "</answer>"]])
def test_gold_answers_with_tags_are_compared_as_the_reward_does(make, chat_policy, tmp_path, tags):
    """Also where the tags are special tokens: they are kept in the text."""
    golds = ["<answer>7</answer>", "<answer>8</answer>"]
    rows = [{"question": "4+3?", "answer": golds[0]}, {"question": "4+4?", "answer": golds[1]}]
    data = spec_of(write_rows(tmp_path / "rows.jsonl", *rows), input="question", output="answer")
    options = {"ACTOR_MODEL": chat_policy(special=tags), "TRAIN_DATASETS": data, "EVAL_DATASETS": data}
    trainer = make(SFT, **options, ACCURACY_FUNCTION="tagged_answer")
    say(trainer, *golds, golds[1], golds[1])
    metrics = trainer.evaluate()
    assert (metrics["accuracy_greedy"], metrics["accuracy_sampled"]) == (1.0, 0.5)


def test_the_gold_answer_of_a_chat_is_its_last_trained_turn(make, chat_policy, tmp_path):
    chats = [[*TWO_TURNS["messages"], user("Hm")], [user("Hi"), bot("So long")]]
    data = spec_of(write_rows(tmp_path / "rows.jsonl", *({"messages": chat} for chat in chats)), **CHAT)
    options = {"ACTOR_MODEL": chat_policy(), "TRAIN_DATASETS": data, "EVAL_DATASETS": data}
    trainer = make(SFT, **options, ACCURACY_FUNCTION="em")
    say(trainer, *["So long"] * 4)
    assert trainer.evaluate()["accuracy_greedy"] == 1.0
    (row, _) = trainer.eval_rows
    assert row["prompt"] == TWO_TURNS["messages"][:3] and row["answer"] == "So long"
    assert trainer.tokenizer.decode(row["prompt_ids"]).endswith(f"Bye{END}\n{ASK}")


def test_accuracies_are_of_all_gold_answers_and_samples_show_what_was_trained(make, tmp_path):
    trainer = make(SFT, ACCURACY_FUNCTION="exact_answer", MAX_NEW_TOKENS=48, MAX_STEPS=1)
    rows = trainer.eval_rows
    texts = trainer.respond([row["prompt_ids"] for row in rows], greedy=False)
    right = sum(text.split("#### ")[-1] == row["answer"].split("#### ")[-1] for text, row in zip(texts, rows))
    assert trainer.evaluate()["accuracy_sampled"] == pytest.approx(right / len(rows)) and right
    trainer.train()
    samples = read(tmp_path / "run/logs/samples.jsonl")
    assert len(samples) == 2 and all(sample["read"].endswith("\n" + sample["trained"]) for sample in samples)
    answers = {row["answer"] + "<eos>" for row in trainer.train_rows}
    assert {sample["trained"] for sample in samples} <= answers


def test_evaluations_do_not_change_the_training(make, tmp_path):
    weights = []
    for every in (0, 1):
        options = {"ACCURACY_FUNCTION": "exact_answer", "MAX_NEW_TOKENS": 4, "MAX_STEPS": 3}
        trainer = make(SFT, EVAL_EVERY_N_STEPS=every, OUTPUT_DIR=str(tmp_path / f"run{every}"), **options)
        assert "accuracy_sampled" in trainer.train()
        weights.append((tmp_path / f"run{every}/step_3/policy/model.safetensors").read_bytes())
    assert weights[0] == weights[1]
