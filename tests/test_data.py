"""Data is read exactly, and what cannot be used is refused in one line that names the place."""

import json
import re
import sys
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import transformers
from conftest import TINY, spec_of, write_rows

COLUMNS = {"input": "question", "output": "answer"}


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY / "policy")


@pytest.fixture
def read(grpo, tokenizer, tmp_path):
    """read(text, type) writes the text into a file and returns the rows of that data set."""

    def read_text(text, file_type="jsonl", **spec):
        file = tmp_path / "data"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return grpo.load_rows([{"path": str(file), "type": file_type, **COLUMNS, **spec}], tokenizer)

    return read_text


def answers(rows):
    return [row["answer"] for row in rows]


ANSWERS = ["007", "12.50", "1e5", "  x ", "#### 3", "NA", "true", "9007199254740993"]


@pytest.mark.parametrize("file_type", ["jsonl", "csv", "parquet"])
def test_answers_stay_as_the_file_has_them(read, tmp_path, file_type):
    if file_type == "jsonl":
        rows = read("\n".join(json.dumps({"question": "1+1?", "answer": x}) for x in ANSWERS))
    if file_type == "csv":
        rows = read("question,answer\n" + "".join(f'1+1?,"{x}"\n' for x in ANSWERS), "csv")
    if file_type == "parquet":
        table = pyarrow.table({"question": ["1+1?"] * len(ANSWERS), "answer": ANSWERS})
        pyarrow.parquet.write_table(table, tmp_path / "table")
        rows = read((tmp_path / "table").read_bytes(), "parquet")
    assert answers(rows) == ANSWERS


def test_a_json_number_is_compared_as_the_number_it_is(read):
    from rewards import exact_answer, last_number

    numbers = ("1e16", "1e-05", "7")
    rows = read("\n".join(f'{{"question": "a", "answer": {number}}}' for number in numbers))
    right = ["#### 10000000000000000", "#### 0.00001", "#### 7"]
    assert exact_answer([""] * 3, right, answers(rows)) == [1.0, 1.0, 1.0]
    assert last_number([""] * 3, ["16", "so 5", "7"], answers(rows)) == [0.0, 0.0, 1.0]


def test_a_null_beside_integers_does_not_change_them(read, tmp_path):
    numbers = pyarrow.array([10**16 + 1, None], pyarrow.int64())
    table = pyarrow.table({"question": ["a", "b"], "answer": numbers})
    pyarrow.parquet.write_table(table, tmp_path / "table")
    assert answers(read((tmp_path / "table").read_bytes(), "parquet")) == ["10000000000000001", None]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("keys", [("question", "answer"), ("question", "answer", "level")])
def test_an_array_of_records_is_read_as_such(read, indent, keys):
    records = [dict(zip(keys, ("4+3?", "7", 1))), dict(zip(keys, ("4+4?", "8", 2)))]
    rows = read(json.dumps(records, indent=indent))
    assert [row["prompt"] for row in rows] == ["4+3?", "4+4?"] and answers(rows) == ["7", "8"]


def test_byte_order_marks_blank_lines_and_line_ends_of_windows_are_read(read):
    json_lines = b'\xef\xbb\xbf{"question": "a", "answer": "1"}\r\n\r\n{"question": "b", "answer": "2"}\r\n'
    assert answers(read(json_lines)) == ["1", "2"]
    assert answers(read(b'\xef\xbb\xbfquestion,answer\r\n"a\nb",1\r\nc,2\r\n', "csv")) == ["1", "2"]
    line = json.dumps({"question": "a\u2028b", "answer": "1"}, ensure_ascii=False)
    assert read(line)[0]["prompt"] == "a\u2028b"


def test_all_columns_reach_the_rows_whatever_their_names(read, grpo):
    rows = read('{"question": "a", "answer": "1", "prompts": 5, "answers": [1], "level": {"x": 2}}')
    assert rows[0]["columns"]["level"] == {"x": 2}
    batch = SimpleNamespace(rows=rows, texts=["1"], response_ids=[[1]])
    prompts, texts, gold, columns = grpo.reward_arguments(batch)
    assert (prompts, texts, gold) == (["a"], ["1"], ["1"])
    assert columns == {"question": ["a"], "answer": ["1"], "level": [{"x": 2}], "response_ids": [[1]]}


def test_a_chat_is_wrapped_by_the_template_and_gets_the_system_prompt(read, grpo, tokenizer):
    chat = [{"role": "user", "content": "1+1?", "name": None}]
    grpo.SYSTEM_PROMPT = "Be brief"
    rows = read(json.dumps({"question": chat, "answer": ["2", 2]}))
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "1+1?"}]
    want = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert rows[0]["ids"] == want and rows[0]["answer"] == ["2", "2"]
    grpo.PROMPT_TEMPLATE = "3+{input}"
    assert tokenizer.decode(grpo.encode(tokenizer, "1+1?")).count("3+1+1?") == 1


def test_without_a_template_a_text_is_read_as_it_is_and_a_chat_is_refused(read, grpo, tokenizer):
    plain = transformers.AutoTokenizer.from_pretrained(TINY / "policy")
    plain.chat_template = None
    assert grpo.encode(plain, "1+1?") == plain("1+1?")["input_ids"]
    assert grpo.encode(plain, "1+1?", "2") == plain("1+1?2")["input_ids"] + [plain.eos_token_id]
    with pytest.raises(ValueError, match="chat template"):
        grpo.encode(plain, [{"role": "user", "content": "1+1?"}])


def test_long_prompts_are_left_out_and_counted(read, grpo, capsys):
    grpo.MAX_PROMPT_TOKENS = 20
    rows = read('{"question": "1+1?", "answer": "2"}\n' + json.dumps({"question": "1+" * 50, "answer": "3"}))
    assert answers(rows) == ["2"] and "left out 1 of 2 prompts" in capsys.readouterr().out
    grpo.MAX_PROMPT_TOKENS = 1
    with pytest.raises(ValueError, match="MAX_PROMPT_TOKENS = 1"):
        read('{"question": "1+1?", "answer": "2"}')


GOOD = '{"question": "a", "answer": "1"}\n'
BAD = {
    "no such column": (GOOD + '{"problem": "a", "answer": "1"}', "jsonl", "data:2.*question"),
    "not JSON": (GOOD + "{'question': 1}", "jsonl", "data:2: JSONDecodeError"),
    "a record that is a text": (GOOD + '"question"', "jsonl", "data:2"),
    "an array of texts": ('["a", "b"]', "jsonl", "data:1"),
    "half an emoji": (GOOD + r'{"question": "a \ud83d", "answer": "1"}', "jsonl", "data:2"),
    "a prompt that is null": (GOOD + '{"question": null, "answer": "1"}', "jsonl", "data:2"),
    "a list of records as answer": (GOOD + '{"question": "a", "answer": [{"x": 1}]}', "jsonl", "data:2"),
    "a number as prompt": ('{"question": 5, "answer": "1"}', "jsonl", "data:1.*text or a list of messages"),
    "texts as prompt": ('{"question": ["a", "b"], "answer": "1"}', "jsonl", "data:1.*list of messages"),
    "NaN as prompt": ('{"question": NaN, "answer": "1"}', "jsonl", "data:1.*not nan"),
    "a blank prompt": ("question,answer\na,1\n ,2\n", "csv", "data:2.*not ' '"),
    "a comma too many": ("question,answer\na,1\nb, c,2\n", "csv", "data:2.*more fields"),
    "a quote that is not closed": ('question,answer\n"a,1\nb,2\n', "csv", "data"),
    "no parquet": ("question,answer\na,1\n", "parquet", "data"),
    "an unknown type": ("x", "json5", "jsonl, csv, parquet and hub"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_is_refused_with_its_place(read, case):
    text, file_type, message = BAD[case]
    with pytest.raises(ValueError, match=message) as error:
        read(text, file_type)
    assert "\n" not in str(error.value)


USER = {"role": "user", "content": "1+1?"}
IMAGE = {"type": "image_url", "image_url": "x.png"}
CHATS = {  # the last message of a chat, and what its refusal names
    "a misspelt key": ({"role": "user", "contents": "1+1?"}, "contents"),
    "thoughts": ({**USER, "reasoning_content": "so 2"}, "reasoning_content"),
    "a weight": ({**USER, "weight": 0}, "weight"),
    "images": ({**USER, "images": ["x.png"]}, "images"),
    "a part that is an image": ({"role": "user", "content": [{"type": "text", "text": "1"}, IMAGE]}, "image"),
    "a number": ({"role": "user", "content": 5}, "'content': 5"),
    "NaN": ({"role": "user", "content": float("nan")}, "nan"),
    "nothing": ({"role": "user", "content": None}, "content"),
    "a role of another format": ({"role": "human", "content": "1+1?"}, "human"),
    "the answer": ({"role": "assistant", "content": "2"}, "before the assistant's message"),
}


@pytest.mark.parametrize("case", CHATS)
def test_a_message_that_would_be_read_in_another_meaning_is_refused(read, case):
    message, named = CHATS[case]
    with pytest.raises(ValueError, match=f"data:1.*{named}"):
        read(json.dumps({"question": [USER, message], "answer": "2"}))


def test_parts_that_are_texts_are_one_text(read):
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]
    chats = [[USER], [{"role": "user", "content": parts}]]
    rows = read("\n".join(json.dumps({"question": chat, "answer": "2"}) for chat in chats))
    assert rows[0]["ids"] == rows[1]["ids"]


def test_a_tool_call_of_parquet_has_no_arguments_that_were_filled_in(read, tmp_path):
    calls = [{"type": "function", "function": {"name": "f", "arguments": {name: "x"}}} for name in "ab"]
    chats = [[{"role": "assistant", "tool_calls": [call]}, USER] for call in calls]
    pyarrow.parquet.write_table(pyarrow.table({"question": chats, "answer": ["1", "2"]}), tmp_path / "table")
    rows = read((tmp_path / "table").read_bytes(), "parquet")
    assert [row["prompt"] for row in rows] == chats


def test_arguments_given_as_json_are_those_of_a_dict(grpo):
    plain = transformers.AutoTokenizer.from_pretrained(TINY / "policy")
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    plain.chat_template = "{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    ids = []
    for arguments in ({"x": 1}, '{"x": 1}'):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        ids.append(grpo.encode(plain, [{"role": "assistant", "tool_calls": [call]}, USER]))
    assert ids[0] == ids[1]
    call["function"]["arguments"] = "{'x': 1}"
    with pytest.raises(ValueError, match="arguments of a tool call are a dict"):
        grpo.encode(plain, [{"role": "assistant", "tool_calls": [call]}, USER])


def test_a_template_that_drops_a_message_is_refused(grpo, tokenizer):
    plain = transformers.AutoTokenizer.from_pretrained(TINY / "policy")
    plain.chat_template = (
        "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert plain.decode(grpo.encode(plain, "1+1?")) == "1+1?"
    grpo.SYSTEM_PROMPT = "Be brief"
    with pytest.raises(ValueError, match="does not show the system's message"):
        grpo.encode(plain, "1+1?")


@pytest.mark.parametrize("key", [{"outputs": "answer"}, {"split": "train[:2]"}, {"name": "main"}])
def test_an_unknown_key_of_a_data_set_is_refused(read, key):
    with pytest.raises(ValueError, match="the keys are path, type, input, output"):
        read(GOOD, **key)


def test_an_empty_answer_is_none_and_refused_at_the_start_if_a_reward_needs_it(grpo, read):
    from rewards import UserError, find_functions

    empty = (
        '{"question": "a", "answer": ""}\n{"question": "b", "answer": NaN}\n{"question": "c", "answer": []}'
    )
    rows = read(GOOD + empty)
    assert answers(rows) == ["1", None, None, None]
    grpo.check_answers(find_functions([("length_penalty", 1.0)]), rows)
    with pytest.raises(UserError, match="exact_answer.*data:2"):
        grpo.check_answers(find_functions([("length_penalty", 1.0), ("exact_answer", 1.0)]), rows)


def test_a_column_that_some_data_sets_have_is_none_elsewhere(make, tmp_path):
    tests = write_rows(tmp_path / "tests", *[{"question": f"{n}+1?", "tests": n, "self": 1} for n in (1, 2)])
    plain = write_rows(tmp_path / "plain", *[{"question": f"{n}+2?"} for n in range(9)])
    seen = []

    def tested(prompts, responses, answers, tests):
        seen.extend(tests)
        return [0.0] * len(responses)

    specs = [*spec_of(tests, input="question"), *spec_of(plain, input="question")]
    options = {"TRAIN_DATASETS": specs, "EVAL_DATASETS": specs, "MAX_EVAL_PROMPTS": 1, "MAX_STEPS": 3}
    trainer = make("grpo/grpo.py", REWARD_FUNCTIONS=[(tested, 1.0)], **options)
    assert [row["prompt"] for row in trainer.eval_rows] == ["1+1?", "0+2?"]  # the first of each data set
    trainer.train()
    assert set(seen) == {None, 1, 2}


def test_what_may_be_a_mistake_in_the_data_is_said(make, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows", *[{"question": f"Quel est le {n}e nombre premier?"} for n in (1, 2)])
    spec = spec_of(rows, input="question")
    make("ppo/ppo.py", TRAIN_DATASETS=spec, EVAL_DATASETS=spec, REWARD_FUNCTIONS=[])
    said = capsys.readouterr().out
    assert "2 of 2 held-out prompts are also trained" in said
    assert re.search("tokens are unknown to the tokenizer of .*tiny/reward_model", said)


def test_a_data_set_of_the_hub_is_read_by_datasets(grpo, tokenizer, monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return [{"question": "1+1?", "answer": "2"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    rows = grpo.load_rows([{"path": "openai/gsm8k", "type": "hub", "name": "main", **COLUMNS}], tokenizer)
    assert asked == [(("openai/gsm8k", "main"), {"split": "train"})] and answers(rows) == ["2"]


def test_rows_of_all_data_sets_have_names_of_their_own(grpo, tokenizer, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text(GOOD * 2)
    specs = [{"path": str(tmp_path / x / "train.jsonl"), "type": "jsonl", **COLUMNS} for x in "ab"]
    assert len({row["id"] for row in grpo.load_rows(specs, tokenizer)}) == 4
