"""Lists of messages as prompts, further columns for reward functions, and rewards a token."""

import json
import re
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import TINY, load_script, read

PPO = load_script("ppo/ppo.py")

# As trl publishes them (trl-lib/DeepMath-103K: prompt, solution; prompt and completion as messages), and verl
# (examples/data_preprocess/gsm8k.py writes parquet)
USER = {"role": "user", "content": "Tom has 1 apples."}
TRL = [
    {"prompt": [USER], "solution": "1"},
    {"prompt": [{"role": "system", "content": "$"}, USER], "solution": "1"},
]
TRL_COMPLETION = {"prompt": [USER], "completion": [{"role": "assistant", "content": "#### 1"}]}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"content": "Tom has 1 apples.", "role": "user"}],
    "ability": "math",
    "reward_model": {"ground_truth": "1", "style": "rule"},
    "extra_info": {"answer": "#### 1", "index": 7, "question": "Tom has 1 apples.", "split": "train"},
}
TURNS = [
    {"role": "system", "content": "$"},
    {"role": "user", "content": "Ann has 2 apples."},
    {"role": "assistant", "content": "#### 2"},
    {"role": "user", "content": "Tom has 1 apples."},
]
ROLES = """{%- for m in messages %}
    {%- if m['role'] == 'user' %}{{ '(' + m['content'] + ')' }}
    {%- elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}
    {%- else %}{{ m['content'] }}{% endif %}
{%- endfor %}"""


def data_set(path, *rows, **columns):
    """A data set of these rows, whose kind the path's ending names."""
    kind = path.suffix[1:]
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.mkdir(exist_ok=True) if kind == "hub" else None
        file = path / "train.parquet" if kind == "hub" else path
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    return {"path": str(path), "type": kind, **columns}


def with_template(folder, source="policy", template=ROLES):
    """A copy of a tiny model that has this chat template, or none."""
    shutil.copytree(TINY / source, folder)
    (folder / "chat_template.jinja").unlink()
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def chat_rows(path, *chats, **more):
    rows = [{"prompt": chat, "solution": "#### 1", **more} for chat in chats]
    return data_set(path, *rows, input="prompt", output="solution")


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
def test_rows_as_trl_and_verl_publish_them_are_read_as_they_are(path, kind, tmp_path):
    script = load_script(path)
    sets = [
        (TRL, {"input": "prompt", "output": "solution"}, "1"),
        ([TRL_COMPLETION], {"input": "prompt", "output": "completion"}, "#### 1"),
        ([VERL], {"input": "prompt", "output": "reward_model.ground_truth"}, "1"),
        ([VERL], {"input": "prompt", "output": "extra_info.answer"}, "#### 1"),
    ]
    for number, (rows, columns, answer) in enumerate(sets):
        spec = data_set(tmp_path / f"{number}.{kind}", *rows, **columns)
        found = script.load_rows([spec], "TRAIN_DATASETS")
        assert [row["prompt"] for row in found] == [row["prompt"] for row in rows]
        assert [row["columns"] for row in found] == rows
        assert [row["answer"] for row in found] == [answer] * len(rows)


def test_nulls_that_parquet_puts_into_records_are_taken_out_again(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    other = {"type": "function", "function": {"name": "not", "arguments": {"x": True}}}
    chat = [
        {"role": "user", "content": "Tom has 1 apples."},
        {"role": "assistant", "content": None, "tool_calls": [call, other]},
        {"role": "tool", "name": "add", "content": "1"},
    ]
    for kind in ("parquet", "jsonl"):
        (row,) = PPO.load_rows([chat_rows(tmp_path / f"a.{kind}", chat)], "TRAIN_DATASETS")
        wanted = [chat[0], {"role": "assistant", "content": "", "tool_calls": [call, other]}, chat[2]]
        assert row["prompt"] == wanted and "add" in PPO.as_text(row["prompt"])


@pytest.mark.parametrize(
    "chat",
    [
        [],
        ["Tom"],
        " ",
        {"text": "Tom"},
        [{"from": "human", "value": "Tom"}],
        [{"role": "user", "content": [{"type": "image"}]}],
        [USER, {"role": "user"}],
        [{"role": "user"}, USER],
        [{"content": "Tom"}],
        [USER, {"role": "assistant", "content": "x"}],
    ],
)
def test_a_prompt_that_is_none_is_named_with_its_line(tmp_path, chat):
    spec = chat_rows(tmp_path / "a.jsonl", [USER], chat)
    says = "^TRAIN_DATASETS: .*a.jsonl line 2: 'prompt': a prompt is a text, or messages such as .* this is "
    with pytest.raises(PPO.UserError, match=says + re.escape(repr(chat))) as error:
        PPO.load_rows([spec], "TRAIN_DATASETS")
    assert len(str(error.value).splitlines()) == 1


def test_an_answer_of_messages_without_a_text_is_named(tmp_path):
    for completion in ([{"role": "assistant", "content": None}], [{"role": "assistant"}], [{"text": "1"}]):
        data = data_set(tmp_path / "a.jsonl", {"q": [USER], "a": completion}, input="q", output="a")
        with pytest.raises(PPO.UserError, match="a.jsonl line 1: 'a' must be a text or a number"):
            PPO.load_rows([data], "TRAIN_DATASETS")


# ---------------------------------------------------------------- what models read


def ids_of(trainer, text):
    return trainer.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_policy_reads_the_chat_and_the_reward_model_the_response_too(each, tmp_path):
    data = [chat_rows(tmp_path / "a.jsonl", TURNS, "Tom has 1 apples.")]
    models = {
        "ACTOR_MODEL": with_template(tmp_path / "policy"),
        "REWARD_MODEL": with_template(tmp_path / "reward", "reward_model"),
    }
    script, trainer_class = each(TRAIN_DATASETS=data, EVAL_DATASETS=[], **models)
    trainer = trainer_class()
    first, second = trainer.train_rows
    before = "$(Ann has 2 apples.)#### 2<eos>"
    assert first["ids"] == ids_of(trainer, f"{before}(Tom has 1 apples.)")
    assert second["ids"] == ids_of(trainer, "(Tom has 1 apples.)")
    seen = []

    def look(module, args, kwargs):
        seen.append(kwargs["input_ids"].tolist())

    trainer.reward_model.base_model.register_forward_pre_hook(look, with_kwargs=True)
    for prompt in (first["prompt"], TURNS):
        trainer.reward_model_score([prompt], ["#### 1"])
        assert seen.pop() == [ids_of(trainer, f"{before}(Tom has 1 apples.)#### 1<eos>")]


def test_a_system_prompt_goes_before_what_has_none(each, tmp_path):
    data = [chat_rows(tmp_path / "a.jsonl", TURNS, [USER], "Tom has 1 apples.")]
    model = with_template(tmp_path / "policy")
    options = {"SYSTEM_PROMPT": "How many?", "PROMPT_TEMPLATE": "{input}+", "EVAL_DATASETS": []}
    script, trainer_class = each(TRAIN_DATASETS=data, ACTOR_MODEL=model, **options)
    trainer = trainer_class()
    wanted = [
        "$(Ann has 2 apples.)#### 2<eos>(Tom has 1 apples.)",
        "How many?(Tom has 1 apples.)",
        "How many?(Tom has 1 apples.+)",
    ]  # the template is for texts alone
    assert [row["ids"] for row in trainer.train_rows] == [ids_of(trainer, text) for text in wanted]
    system = {"role": "system", "content": "How many?"}
    asked = {"role": "user", "content": "Tom has 1 apples.+"}
    known = [row["columns"]["messages"] for row in trainer.train_rows]
    assert known == [TURNS, [system, USER], [system, asked]]
    assert [row["prompt"] for row in trainer.train_rows] == [TURNS, [USER], "Tom has 1 apples."]


def test_without_a_chat_template_a_chat_is_refused_with_what_to_do(each, tmp_path):
    model = with_template(tmp_path / "policy", template=None)
    for chat, system in (([USER], None), ("Tom has 1 apples.", "How many?")):
        data = [chat_rows(tmp_path / "a.jsonl", chat)]
        constants = {"ACTOR_MODEL": model, "SYSTEM_PROMPT": system, "EVAL_DATASETS": []}
        script, trainer_class = each(TRAIN_DATASETS=data, OUTPUT_DIR=str(tmp_path / str(system)), **constants)
        says = "TRAIN_DATASETS: a.jsonl:1: messages and SYSTEM_PROMPT need a chat template"
        with pytest.raises(script.UserError, match=f"^{says}, which .*/policy' lacks: put a file chat_temp"):
            trainer_class()
    data = [chat_rows(tmp_path / "a.jsonl", "Tom has 1 apples.")]
    script, trainer_class = each(TRAIN_DATASETS=data, ACTOR_MODEL=model, EVAL_DATASETS=[])
    assert trainer_class().train_rows[0]["ids"]  # a text can do without


def test_roles_that_a_chat_template_refuses_are_said_with_their_line(ppo, tmp_path):
    template = "{{ raise_exception('no system role') if messages[0]['role'] == 'system' else '' }}" + ROLES
    model = with_template(tmp_path / "policy", template=template)
    script = ppo(TRAIN_DATASETS=[chat_rows(tmp_path / "a.jsonl", [USER], TURNS)], ACTOR_MODEL=model)
    says = "^TRAIN_DATASETS: a.jsonl:2: the chat template of .* does not take these .*no system role"
    with pytest.raises(script.UserError, match=says):
        script.PPOTrainer()


def test_evaluate_and_generate_response_take_chats(each, tmp_path):
    script, trainer_class = each(ACTOR_MODEL=with_template(tmp_path / "policy"), EVAL_DATASETS=[])
    trainer = trainer_class()
    greedy = trainer.generate_response(TURNS)
    text = "$(Ann has 2 apples.)#### 2<eos>(Tom has 1 apples.)"
    alone = script.respond(trainer.actor, trainer.tokenizer, [ids_of(trainer, text)], None)
    assert greedy == alone.responses[0]
    seen = []
    compute_rewards = trainer.compute_rewards

    def look(prompts, responses, answers, messages, **columns):
        seen.extend(messages)
        return compute_rewards(prompts, responses, answers, messages=messages, **columns)

    trainer.compute_rewards = look
    table = np.array(TURNS, dtype=object)  # as pandas reads parquet
    metrics = trainer.evaluate([table, "Tom has 1 apples."], ["1", "1"])
    assert "accuracy_greedy" in metrics
    assert seen[0] == TURNS and seen[-1] == [{"role": "user", "content": "Tom has 1 apples."}]
    for wrong in (TURNS[0], 7):
        with pytest.raises(script.UserError, match="^generate_response: a prompt is a text, or mess"):
            trainer.generate_response(wrong)


# ---------------------------------------------------------------- what reward functions get


def test_functions_get_messages_and_columns_if_they_take_them(each, tmp_path):
    """As do an override of compute_rewards and the accuracy; who takes three lists gets three."""
    more = {"index": 7, "extra": {"level": "hard"}}
    data = [chat_rows(tmp_path / "a.jsonl", TURNS, [USER], **more)]
    data.append(data_set(tmp_path / "b.jsonl", {"q": "Tom has 1 apples.", "a": "1"}, input="q", output="a"))
    seen = {}

    def three(prompts, responses, answers):
        seen["three"] = prompts, responses, answers
        return [0.0] * len(responses)

    def everything(prompts, responses, answers, **known):
        seen["everything"] = known
        return [2.0] * len(responses)

    def more_of_it(prompts, responses, answers, messages, extra, index=None, other=5):
        seen["more"] = [len(m) for m in messages], extra, index, other
        messages[0].append("mine")  # not the row's
        return [1.0] * len(responses)

    functions = [(three, 1.0), (everything, 1.0), (more_of_it, 1.0)]
    model = with_template(tmp_path / "policy")
    options = {"TRAIN_DATASETS": data, "EVAL_DATASETS": [], "REWARD_FUNCTIONS": functions}
    script, trainer_class = each(ACTOR_MODEL=model, **options)
    trainer = trainer_class()
    rows = [row for row in trainer.train_rows for _ in range(2)]
    batch = script.respond(trainer.actor, trainer.tokenizer, [row["ids"] for row in rows], None)
    batch.rows = rows
    for _ in range(2):  # a step like the one before
        total = trainer.score_responses(batch)[0]
        assert total.tolist() == [3.0] * 6
        chats = [TURNS] * 2 + [[USER]] * 2 + ["Tom has 1 apples."] * 2
        assert seen["three"] == (chats, batch.responses, ["#### 1"] * 4 + ["1"] * 2)
        none = [None] * 2
        assert seen["more"] == ([4] * 2 + [1] * 4, [{"level": "hard"}] * 4 + none, [7] * 4 + none, 5)
        ids = [row[:n] for row, n in zip(batch.response_ids.tolist(), batch.response_lengths.tolist())]
        known = seen["everything"]
        assert known["messages"][2:] == [[USER]] * 4 and known["messages"][1] == TURNS
        assert set(known) == {"prompt", "solution", "index", "extra", "q", "a", "messages", "response_ids"}
        assert known["response_ids"] == ids and known["q"] == [None] * 4 + ["Tom has 1 apples."] * 2


def test_a_run_trains_on_chats_and_its_samples_are_readable(path, started, tmp_path):
    problems = [(row["problem"], row["solution"]) for row in read(TINY / "train.jsonl")[:16]]
    rows = [{"prompt": [*TURNS[:3], {"role": "user", "content": q}], "solution": a} for q, a in problems]
    data = [data_set(tmp_path / "a.parquet", *rows, input="prompt", output="solution")]
    model = with_template(tmp_path / "policy", template="{{ messages[-1]['content'] }}\n\n")  # as it learnt
    words = [f"TRAIN_DATASETS={data}", f"EVAL_DATASETS={data}", f"ACTOR_MODEL={model}", "MAX_STEPS=1"]
    words += ["ROUNDS=1", "BEAMS=0", "GROUP_SIZE=4"] if path == "rce/rce.py" else []
    done = started(path, *words, f"OUTPUT_DIR={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    wanted = [f"system: $\nuser: Ann has 2 apples.\nassistant: #### 2\nuser: {q}" for q, _ in problems]
    for sample in read(tmp_path / "run/logs/samples.jsonl"):
        assert sample["prompt"] == wanted[int(sample["id"].partition(":")[2]) - 1]
    if path == "rce/rce.py":
        found = pyarrow.parquet.read_table(tmp_path / "run/candidates_round_1.parquet").to_pylist()
        assert {c["prompt"] for c in found} == set(wanted)


def test_in_mining_the_reward_sees_the_chat_of_each_candidate(rce, tmp_path):
    """And chats that end alike are told apart where prompts are held back."""
    chats = [[{"role": "system", "content": f"{n}"}, USER] for n in range(6)]
    seen = []

    def judge(prompts, responses, answers, messages, response_ids, index):
        for prompt, chat, ids, number in zip(prompts, messages, response_ids, index):
            seen.append((prompt[-1]["content"], chat[0]["content"], number, bool(ids)))
        return [float(len(response) % 2) for response in responses]

    rows = [{"prompt": chat, "solution": "#### 1", "index": n} for n, chat in enumerate(chats)]
    data = [data_set(tmp_path / "a.jsonl", *rows, input="prompt", output="solution")]
    constants = {"TRAIN_DATASETS": data, "EVAL_DATASETS": []}
    functions = {"REWARD_FUNCTIONS": [(judge, 1.0)], "HARD_REWARD": "judge", "SOFT_REWARD": "judge"}
    options = {"ACTOR_MODEL": with_template(tmp_path / "policy"), "VALIDATION_FRACTION": 0.5, "BEAMS": 0}
    script = rce(**constants, **functions, **options, GROUP_SIZE=4, STAGE="mine")
    trainer = script.RCETrainer()
    trainer.train()
    assert {(chat, number) for _, chat, number, _ in seen} == {(str(n), n) for n in range(6)}
    assert all(prompt == "Tom has 1 apples." and has_ids for prompt, *_, has_ids in seen)
    assert len(trainer.held_back) == 3 and trainer.held_back < {script.as_text(chat) for chat in chats}
    before = script.mining_facts()
    script.SYSTEM_PROMPT = "x"
    assert script.mining_facts() != before
    rows[0]["prompt"] = [USER]  # another chat under the same id, with the same end
    data_set(tmp_path / "a.jsonl", *rows, input="prompt", output="solution")
    changed = {row["id"]: row for row in script.load_rows(data, "TRAIN_DATASETS")}
    with pytest.raises(script.UserError, match="with this prompt is not in TRAIN_DATASETS"):
        script.read_candidates(tmp_path / "run/candidates_round_1.parquet", changed, 1e9)


def test_a_parameter_that_nothing_fills_is_a_sentence():
    def judge(prompts, responses, answers, difficulty):
        return [0.0]

    says = (
        "^judge: missing a required argument: 'difficulty'; .*; the columns of these rows are \\['level'\\]$"
    )
    with pytest.raises(PPO.UserError, match=says):
        PPO.call_reward("judge", judge, ["x"], ["a"], [None], {"level": [1]})
    with pytest.raises(PPO.UserError, match="^judge: too many positional arguments"):
        PPO.call_reward("judge", lambda responses: [1.0], ["x"], ["a"], [None])
    columns = {"answers": ["SQuAD's"], "n": [3.0]}  # what stands in the first three places is no column
    for judge in (
        lambda p, r, answers, n: n,
        lambda *lists: [float(len(lists))],
        lambda messages, r, a: [3],
        lambda p, r, answers, **known: known["n"],
    ):
        assert PPO.call_reward("judge", judge, ["x"], ["a"], [None], columns).tolist() == [3.0]
