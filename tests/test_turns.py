"""Turns: what an environment says is read and never trained; what the policy said stays as it was sampled."""

import json
import re
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    NATS,
    Program,
    ROOT,
    TINY,
    assert_same_state,
    load_script,
    read,
    share_prompts,
    small,
    untimed,
    words_of,
)
from test_chats import with_template
from test_processes import Processes, assert_same_run
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import get_json_schema

GRPO = load_script("grpo/grpo.py")
CHATML = """{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
# as Qwen3 does: only the last turn keeps its thoughts, if a user speaks next
FORGETS = CHATML.replace(
    "m['content']",
    "(m['content'] if loop.last or m['role'] == 'user' or messages[-1]['role'] == 'tool'"
    " else m['content'].split('</think>')[-1])",
)
UNCLOSED = CHATML.replace("+ eos_token + ", "+ '.' + ")


def again(messages, response, answer):
    """Goes on twice, in other words each time."""
    spoken = sum(message["role"] == "assistant" for message in messages)
    return f"{len(response)}+{spoken}=" if spoken < 2 else None


def conversed(grpo, rows=6, group_size=2, greedy=False, **constants):
    """(Module, trainer, a batch of episodes) of the tiny policy and again()."""
    script = grpo(**{"ENVIRONMENT": again, "MAX_CONTEXT_TOKENS": 512, **constants})
    trainer = script.GRPOTrainer()
    generator = torch.Generator().manual_seed(3)
    uniform = torch.rand(script.max_turns(), rows * group_size, script.MAX_NEW_TOKENS, generator=generator)
    some = trainer.train_rows[:rows]
    batch = script.converse(
        trainer.actor, trainer.tokenizer, some, None if greedy else uniform, 1 if greedy else group_size
    )
    return script, trainer, batch


def spans(mask):
    """Of a row of response_mask, the runs of equal values: [(value, begin, end)]."""
    found = []
    for at, value in enumerate(mask):
        if found and found[-1][0] == value:
            found[-1][2] = at + 1
        else:
            found.append([value, at, at + 1])
    return found


# ---------------------------------------------------------------- what an episode holds


def test_an_episode_holds_each_turn_as_it_was_sampled_and_the_environments_between(grpo):
    script, trainer, batch = conversed(grpo)
    eos = trainer.tokenizer.eos_token_id
    several = 0
    for i, response in enumerate(batch.responses):
        length = batch.response_lengths[i]
        ids = batch.response_ids[i, :length].tolist()
        assert batch.columns["response_ids"][i] == ids
        assert not batch.response_mask[i, length:].any()
        parts = spans(batch.response_mask[i, :length].tolist())
        assert [value for value, _, _ in parts] == [1.0, 0.0] * (len(parts) // 2) + [1.0]
        turns = batch.columns["turns"][i]
        assert [m["role"] for m in turns] == (["assistant", "user"] * len(parts))[: len(parts)]
        for (value, begin, end), message in zip(parts, turns):
            ended = value and ids[end - 1] == eos
            text = trainer.tokenizer.decode(ids[begin : end - 1 if ended else end])
            assert text == message["content"] + ("" if value else "\n")  # the tiny template's own
            assert ids[begin:end].count(eos) == bool(ended)
        last = ids[parts[-1][1] :]
        assert response == trainer.tokenizer.decode(last, skip_special_tokens=True)
        assert bool(batch.truncated[i]) == (ids[-1] != eos)
        several += len(parts) == 5
    assert several > 3  # the policy spoke three times


@pytest.mark.parametrize("ids, truncated, text", [([9, 0, 8, 1], False, "9<pad>8"), ([9, 0], True, "9<pad>")])
def test_a_message_holds_the_special_tokens_but_the_end(ids, truncated, text):
    tokenizer = AutoTokenizer.from_pretrained(TINY / "policy")
    zeros = torch.zeros(1, 6)
    said = SimpleNamespace(
        response_ids=torch.tensor([ids + [0] * (6 - len(ids))]),
        response_lengths=torch.tensor([len(ids)]),
        logprobs=zeros,
        entropies=zeros,
        truncated=torch.tensor([truncated]),
        responses=["98"],
    )
    episode = SimpleNamespace(ids=[], mask=[], logprobs=[], entropies=[], messages=[])
    GRPO.add_turn([episode], said, tokenizer)
    text = text.replace("9", tokenizer.decode([9])).replace("8", tokenizer.decode([8]))
    assert episode.messages == [{"role": "assistant", "content": text}] and episode.response == "98"
    assert episode.ids == ids and episode.mask == [1.0] * len(ids)


def test_the_sampler_and_the_scorer_agree_on_all_turns(grpo):
    script, trainer, batch = conversed(grpo)
    unsaid = batch.response_mask == 0
    for shared in (True, False):
        share_prompts(script, trainer.actor, scoring=shared)
        scored = script.batch_logprobs(trainer.actor, batch, None)
        torch.testing.assert_close(scored, batch.logprobs, rtol=0, atol=NATS)
        assert not scored[unsaid].any() and not batch.logprobs[unsaid].any()
    _, entropy = script.response_logprobs(trainer.actor, batch, list(range(len(unsaid))), 1.0)
    torch.testing.assert_close(entropy, batch.entropies, rtol=0, atol=1e-2)


def test_what_the_environment_is_asked(grpo):
    calls = []

    def note(messages, response, answer):
        calls.append((json.dumps(messages), response, answer))
        said = again(messages, response, answer)
        messages.append("no harm")
        return said

    _, trainer, _ = conversed(grpo, ENVIRONMENT=note)
    answers = {row["prompt"]: row["answer"] for row in trainer.train_rows}
    for messages, response, answer in calls:
        messages = json.loads(messages)
        assert answers[messages[0]["content"]] == answer
        assert [m["role"] for m in messages] == ["user", *["assistant", "user"] * 2][: len(messages)]
        assert isinstance(response, str) and len(messages) in (1, 3, 5)
    assert len(set(calls)) > 12


def test_an_environment_may_do_what_it_likes_with_messages(grpo):
    def spoils(messages, response, answer):
        said = again(messages, response, answer)
        for message in messages:
            message["content"] = "spoilt"
        return said

    _, _, batch = conversed(grpo, ENVIRONMENT=spoils)
    _, _, wanted = conversed(grpo)
    assert batch.columns["turns"] == wanted.columns["turns"]


def test_each_turn_has_random_numbers_of_its_own(grpo):
    """A row's later turns, each sampled alone from its context and its own numbers, are the same."""

    def sometimes(messages, response, answer):
        return again(messages, response, answer) if len(response) % 3 else None

    script, trainer, batch = conversed(grpo, ENVIRONMENT=sometimes)
    generator = torch.Generator().manual_seed(3)
    uniform = torch.rand(4, len(batch.rows), 32, generator=generator)
    tried = 0
    for i, _response in enumerate(batch.responses):
        parts = spans(batch.response_mask[i, : batch.response_lengths[i]].tolist())
        for number, (_, begin, end) in enumerate(parts[2::2], 1):
            ids = batch.columns["response_ids"][i]
            alone = script.respond(
                trainer.actor,
                trainer.tokenizer,
                [batch.rows[i]["ids"] + ids[:begin]],
                uniform[number, i : i + 1],
            )
            assert alone.response_ids[0].tolist() == ids[begin:end]
            tried += 1
    spoken = [len(turns) for turns in batch.columns["turns"]]
    assert tried > 6 and 1 in spoken[:6] and max(spoken[6:]) > 1


def test_a_turn_that_was_cut_ends_the_episode(grpo):
    asked = []

    def note(messages, response, answer):
        asked.append(response)
        return "+"

    _, trainer, batch = conversed(grpo, ENVIRONMENT=note, MAX_NEW_TOKENS=12, MAX_TURNS=2)
    first = [i for i, turns in enumerate(batch.columns["turns"]) if len(turns) == 1]
    assert first and all(batch.truncated[i] for i in first) and len(asked) == len(batch.rows) - len(first) > 0


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_than_max_turns(grpo, most):
    _, _, batch = conversed(grpo, MAX_TURNS=most)
    spoken = [sum(m["role"] == "assistant" for m in turns) for turns in batch.columns["turns"]]
    assert max(spoken) == most
    assert all(turns[-1]["role"] == "assistant" for turns in batch.columns["turns"])


def test_an_episode_that_no_longer_fits_ends_and_is_marked(grpo):
    limits = {"MAX_PROMPT_TOKENS": 60, "MAX_CONTEXT_TOKENS": 105}
    script, trainer, batch = conversed(grpo, **limits)
    _, _, free = conversed(grpo, MAX_PROMPT_TOKENS=60)
    ended = batch.response_ids.gather(1, batch.response_lengths[:, None] - 1).squeeze(1) == 1
    assert (ended & batch.truncated).any() and not batch.truncated.all()
    for i, turns in enumerate(batch.columns["turns"]):
        messages = free.columns["turns"][i]
        assert turns == messages[: len(turns)]  # the same, but it may end earlier
        assert turns[-1]["role"] == "assistant"
        cut = len(turns) < len(messages)
        assert bool(batch.truncated[i]) == (cut or bool(free.truncated[i]))
    assert max(len(prompt) + len(response) for prompt, response, _ in batch.sequences) <= 105


def test_how_prompts_are_cut_into_batches_does_not_matter(grpo):
    found = []
    for size in (1, 4, 6):
        _, _, batch = conversed(grpo, BATCH_SIZE=size)
        found.append(batch.columns["response_ids"])
    assert found[0] == found[1] == found[2]


def test_turns_are_the_policys_own(grpo):
    """An episode of three turns has two of the environment's between them: it counts 3, not 5."""
    script, _, batch = conversed(grpo)
    rows = zip(batch.response_mask.tolist(), batch.response_lengths.tolist())
    said = [sum(value > 0 for value, _, _ in spans(mask[:length])) for mask, length in rows]
    assert max(said) == 3
    others = batch.response_lengths.sum().item() - batch.response_mask.sum().item()
    wanted = {"turns": sum(said) / len(said), "environment_tokens": others / len(said)}
    assert script.turn_metrics(batch) == pytest.approx(wanted)


def test_greedy_turns_and_single_responses(grpo):
    script, trainer, batch = conversed(grpo, greedy=True)
    one = trainer.generate_response(trainer.train_rows[0]["prompt"])
    assert one == batch.responses[0] and len(batch.columns["turns"][0]) >= 3
    assert trainer.evaluate()["turns"] > 1
    trainer.generate_response(trainer.train_rows[0]["prompt"], greedy=False)


# ---------------------------------------------------------------- what is learnt from it


def test_what_the_environment_said_is_never_trained_and_in_no_mean(grpo):
    def update(poison):
        torch.manual_seed(0)
        script, trainer, batch = conversed(grpo, KL_COEF=0.05, ENTROPY_COEF=0.01, KL_ESTIMATOR="k1")
        trainer.score(batch)
        batch.flat_groups = 0.0
        batch.scores = torch.arange(float(len(batch.rows))) % 3
        if poison:
            unsaid = batch.response_mask == 0
            assert unsaid.any()
            for values in (batch.logprobs, batch.ref_logprobs, batch.entropies):
                values[unsaid] = 3.0
        trainer.compute_advantages(batch)
        metrics = trainer.update(batch)
        weights = torch.cat([p.detach().flatten() for p in trainer.actor.parameters()])
        return metrics, weights, batch, script

    (metrics, weights, batch, script), (again_metrics, again_weights, _, _) = update(False), update(True)
    assert metrics == again_metrics and torch.equal(weights, again_weights)
    said = batch.response_mask.sum(1)
    assert script.response_metrics(batch, batch.scores, {})["response_length"] == said.mean().item()
    assert said.tolist() != batch.response_lengths.tolist()
    assert metrics["first_ratio_deviation"] < 1e-3
    entropy = (batch.entropies * batch.response_mask).sum() / batch.response_mask.sum()
    assert metrics["entropy"] == pytest.approx(entropy.item(), rel=1e-3)


def test_rewards_see_the_last_turn_and_by_name_all(grpo):
    seen = []

    def reward(prompts, responses, answers, turns, response_ids):
        seen.append((list(responses), turns, response_ids))
        return [float(len(t)) for t in turns]

    script, trainer, batch = conversed(grpo, REWARD_FUNCTIONS=[(reward, 1.0)])
    trainer.score(batch)
    responses = [text for texts, _, _ in seen for text in texts]
    turns = [turn for _, many, _ in seen for turn in many]
    assert responses == batch.responses
    assert [m[-1]["content"].replace("<pad>", "") for m in turns] == responses
    assert batch.scores.tolist() == [len(m) for m in turns] and {1, 3, 5} >= set(map(len, turns))


def test_a_reward_model_reads_all_turns(grpo):
    script, trainer, batch = conversed(grpo)
    for row, turns, response_ids in zip(batch.rows, batch.columns["turns"], batch.columns["response_ids"]):
        ids = script.encode_chat(trainer.tokenizer, row["prompt"], "here", turns)
        sampled = row["ids"] + response_ids + ([] if response_ids[-1] == 1 else [1])
        said, wanted = (trainer.tokenizer.decode(x, skip_special_tokens=True) for x in (ids, sampled))
        assert said == wanted and ids.count(1) == sampled.count(1)  # a sampled <pad> is no text


def test_a_reward_model_is_given_all_turns(grpo):
    script, trainer, batch = conversed(grpo, rows=2)
    trainer.reward_model = torch.nn.Linear(1, 1)
    given = []
    trainer.reward_model_score = lambda prompts, turns: given.extend(turns) or torch.zeros(len(turns))
    trainer.score_responses(batch)
    assert given == batch.columns["turns"]


def test_a_reward_model_without_a_template_reads_all_turns(grpo):
    class Plain:
        chat_template, eos_token, eos_token_id = None, "$", 1

        def __call__(self, text):
            return {"input_ids": text}

    script, _, batch = conversed(grpo, rows=2)
    for row, turns in zip(batch.rows, batch.columns["turns"]):
        said = "".join(m["content"] + "$" * (m["role"] == "assistant") for m in turns)
        assert script.encode_chat(Plain(), row["prompt"], "here", turns) == row["prompt"] + said


def test_groups_that_join_keep_their_turns(grpo):
    script, trainer, batch = conversed(grpo, rows=3)
    _, _, more = conversed(grpo, rows=2, MAX_TURNS=2)
    for some in (batch, more):
        some.parts = {}
        some.scores = torch.zeros(len(some.rows))
    joined = script.replace_flat_groups(batch, torch.tensor([True, False, True]), more)
    for name in ("turns", "response_ids"):
        assert joined.columns[name] == batch.columns[name][2:4] + more.columns[name]
    scored = script.batch_logprobs(trainer.actor, joined, None)
    torch.testing.assert_close(scored, joined.logprobs, rtol=0, atol=NATS)
    assert joined.response_mask.sum(1).tolist() == [
        *batch.response_mask.sum(1)[2:4].tolist(),
        *more.response_mask.sum(1).tolist(),
    ]


def test_a_run_with_turns_learns_from_samples_that_are_told_and_resumes_to_the_byte(tmp_path):
    def run(out, **more):
        words = small("grpo/grpo.py", ENVIRONMENT=again, OUTPUT_DIR=str(out), MAX_STEPS=4, **more)
        script = load_script("grpo/grpo.py", **{**words, "SAVE_EVERY_N_STEPS": 2})
        trainer = script.GRPOTrainer()
        trainer.train()

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole)
    shutil.copytree(whole, cut)
    for folder in ("step_4", "best"):
        shutil.rmtree(cut / folder)
    run(cut, RESUME="yes")
    assert untimed(cut / "logs/metrics.jsonl") == untimed(whole / "logs/metrics.jsonl")
    assert_same_state(cut / "step_4/training_state.pt", whole / "step_4/training_state.pt")
    assert "assistant: " in (whole / "logs/samples.jsonl").read_text()
    records = read(whole / "logs/metrics.jsonl")
    assert all(r["turns"] > 1 and r["environment_tokens"] > 0 for r in records)
    lengths = [r for r in records if r["phase"] == "train"]
    assert all(r["first_ratio_deviation"] < 1e-3 for r in lengths)


@pytest.mark.sweep
def test_the_examples_calculator_runs_alike_on_two_processes(tmp_path):
    words = words_of("grpo/grpo.py", "BATCH_SIZE=4", "MAX_STEPS=2", "EVAL_EVERY_N_STEPS=1")
    for count in (1, 2):
        more = [*words, f"OUTPUT_DIR={tmp_path / str(count)}"]
        ended = Processes(count, ROOT / "examples/turns.py", *more, OMP_NUM_THREADS=1).wait()
        assert [end.returncode for end in ended] == [0] * count, ended
    assert_same_run(tmp_path / "1", tmp_path / "2")
    assert "user: " in (tmp_path / "1/logs/samples.jsonl").read_text()


# ---------------------------------------------------------------- templates and tokenizers


def turns_of(folder, role="user", end=1):
    """turn_text() of a tokenizer: what follows a first response that ended in this id."""
    GRPO.ENVIRONMENT_ROLE = role
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return GRPO.turn_text(tokenizer, [{"role": "user", "content": "Tom"}], "3", [0, 1], end)


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_turn_is_what_the_template_puts_after_the_eos(role, tmp_path):
    with_template(tmp_path / "chatml", template=CHATML)
    wanted = f"\n<{role}>3<eos>\n<assistant>"
    assert turns_of(tmp_path / "chatml", role) == wanted
    # after another of the model's ends the template's own follows
    assert turns_of(tmp_path / "chatml", role, end=0) == "<eos>" + wanted


def test_without_a_template_a_turn_is_its_text(tmp_path):
    assert turns_of(with_template(tmp_path / "plain", template=None)) == "3"


def test_a_template_that_forgets_is_refused_for_the_role_it_forgets_with(grpo, tmp_path):
    folder = with_template(tmp_path / "forgets", template=FORGETS)
    said = "chat template rewrites earlier turns when one of the role 'user' follows"
    for constants, fits in (({}, False), ({"ENVIRONMENT_ROLE": "tool"}, True)):
        script = grpo(ENVIRONMENT=again, ACTOR_MODEL=folder, **constants)
        if fits:
            script.GRPOTrainer()
            continue
        with pytest.raises(script.UserError, match=said) as caught:
            script.GRPOTrainer()
        assert folder in str(caught.value)


def test_a_template_that_adds_thoughts_which_were_not_sampled_is_refused(grpo, tmp_path):
    adds = CHATML.replace("m['content']", "('!' if m['role'] == 'assistant' else '') + m['content']")
    script = grpo(ENVIRONMENT=again, ACTOR_MODEL=with_template(tmp_path / "adds", template=adds))
    with pytest.raises(script.UserError, match="rewrites earlier turns"):
        script.GRPOTrainer()


def test_a_template_that_does_not_show_the_environments_text_is_refused(grpo, tmp_path):
    hides = CHATML.replace("m['content']", "('' if m['role'] == 'tool' else m['content'])")
    folder = with_template(tmp_path / "hides", template=hides)
    script = grpo(ENVIRONMENT=again, ACTOR_MODEL=folder, ENVIRONMENT_ROLE="tool")
    with pytest.raises(script.UserError, match="does not show a text of the role 'tool': take the other"):
        script.GRPOTrainer()
    grpo(ENVIRONMENT=again, ACTOR_MODEL=folder).GRPOTrainer()


@pytest.mark.parametrize("opened, fits", [("", False), ("<think>", True), ("<think></think>", True)])
def test_a_template_is_asked_with_the_thoughts_that_it_knows(grpo, opened, fits, tmp_path):
    """One that shows a turn's thoughts as it was told them, but for the word that opens them, which it says
    itself where it does."""
    template = CHATML.replace("{{ '<assistant>' }}", "{{ '<assistant>" + opened + "' }}").replace(
        "m['content']",
        "('" + opened + "' if m['role'] == 'assistant' else '') + "
        "(m['content'].removeprefix('<think>') if '</think>' else '')",
    )
    script = grpo(ENVIRONMENT=again, ACTOR_MODEL=with_template(tmp_path / "thinks", template=template))
    if fits:
        script.GRPOTrainer()
    else:
        with pytest.raises(script.UserError, match="rewrites earlier turns"):
            script.GRPOTrainer()


def test_a_template_without_the_models_end_is_refused(grpo, tmp_path):
    script = grpo(ENVIRONMENT=again, ACTOR_MODEL=with_template(tmp_path / "unclosed", template=UNCLOSED))
    with pytest.raises(script.UserError, match="does not end a turn by the model's EOS alone: take a"):
        script.GRPOTrainer()


def test_a_tokenizer_that_begins_texts_with_a_space_adds_none_in_the_middle(tmp_path):
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "▁a": 2, "a": 3}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")
    assert tokenizer("a")["input_ids"] == [2]
    assert said_by(lambda *asked: "a", tokenizer).ids == [9, 1, 3]


def episode_that_said(said):
    return SimpleNamespace(
        row={"ids": [5], "prompt": "Tom", "answer": None},
        ids=[9, 1],
        mask=[1.0, 1.0],
        truncated=False,
        logprobs=[0.0, 0.0],
        entropies=[0.0, 0.0],
        messages=[{"role": "assistant", "content": said}],
    )


def asked_on(environment, tokenizer, episodes, role="user"):
    """The episodes that go on when the environment was asked."""
    GRPO.ENVIRONMENT, GRPO.ENVIRONMENT_ROLE = environment, role
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=1), device="cpu")
    return GRPO.ask_environment(episodes, model, tokenizer)


def said_by(environment, tokenizer, said="x", role="user"):
    """An episode of one turn that the environment was asked to go on with."""
    (episode,) = asked_on(environment, tokenizer, [episode_that_said(said)], role)
    return episode


@pytest.mark.parametrize("said", ["<think>foo</think>hi", "a</think>b</think>c", ""])
def test_thoughts_that_are_written_oddly_end_no_run(said, tmp_path):
    """What the policy says makes no difference to what is put after it."""
    tokenizer = AutoTokenizer.from_pretrained(with_template(tmp_path / "forgets", template=FORGETS))
    episodes = [said_by(lambda *asked: "3", tokenizer, said=text, role="tool") for text in (said, "x")]
    assert episodes[0].ids == episodes[1].ids and len(episodes[0].ids) > 5


def test_the_first_turn_has_the_random_numbers_of_a_run_without_turns(grpo):
    first = []
    for constants in ({"MAX_TURNS": 3}, {"MAX_TURNS": 1}, {"ENVIRONMENT": None}):
        torch.manual_seed(0)
        script = grpo(**{"ENVIRONMENT": again, **constants})
        trainer = script.GRPOTrainer()
        batch = trainer.rollout(trainer.train_rows[:3])
        ids = batch.columns["response_ids"]
        first.append([some[: some.index(1) + 1] for some in ids if 1 in some])
    assert first[0] == first[1] == first[2]


def test_so_many_episodes_ask_at_once_as_there_are_threads(monkeypatch):
    """Eight calls by four threads take two waits: each waits for three others, and no fifth is under way."""
    tokenizer = AutoTokenizer.from_pretrained(TINY / "policy")
    monkeypatch.setattr(GRPO, "ENVIRONMENT_THREADS", 4)
    others = threading.Barrier(4, timeout=5)
    under_way = []
    most = []

    def waits(messages, response, answer):
        under_way.append(response)
        most.append(len(under_way))
        others.wait()
        time.sleep(0.01 * (8 - int(response)))  # the last to be asked answers first
        under_way.remove(response)
        return f"{response}+"

    episodes = [episode_that_said(str(i)) for i in range(8)]
    going_on = asked_on(waits, tokenizer, episodes)
    assert max(most) == 4 and len(most) == 8
    assert [e.messages[1]["content"] for e in going_on] == [f"{i}+" for i in range(8)]


def test_threads_change_no_byte_of_the_episodes(grpo):
    def jittered(messages, response, answer):
        time.sleep(0.002 * (len(response) % 4))
        return again(messages, response, answer)

    _, _, one = conversed(grpo, ENVIRONMENT=jittered)
    _, _, five = conversed(grpo, ENVIRONMENT=jittered, ENVIRONMENT_THREADS=5)
    assert one.columns == five.columns and one.responses == five.responses
    for key in ("response_ids", "response_mask", "logprobs", "entropies", "truncated"):
        assert torch.equal(getattr(one, key), getattr(five, key)), key


def test_one_thread_is_the_main_one(grpo):
    found = set()

    def where(messages, response, answer):
        found.add(threading.current_thread() is threading.main_thread())

    conversed(grpo, ENVIRONMENT=where)
    assert found == {True}


@pytest.mark.parametrize("threads, waits", [(1, 3), (2, 2), (8, 1)])
def test_each_call_of_an_environment_has_its_own_time_limit(grpo, monkeypatch, threads, waits):
    limits = []
    script, trainer, _ = conversed(grpo, rows=1)
    monkeypatch.setattr(script.faulthandler, "dump_traceback_later", lambda *a, **k: limits.append(a))
    asked = []
    script.ENVIRONMENT = lambda *some: asked.append(some)
    script.ENVIRONMENT_THREADS = threads
    script.converse(trainer.actor, trainer.tokenizer, trainer.train_rows[:3], None)
    assert len(limits) == waits and len(asked) == 3


def test_an_environment_may_be_an_object_or_a_partial(tmp_path):
    """Its address is no part of its name: processes compare it, a resumed run says what has changed."""
    script = tmp_path / "object.py"
    script.write_text(
        f"import functools, sys\nsys.path.insert(0, {str(ROOT / 'grpo')!r})\nimport grpo\n"
        "def environment(word, messages, response, answer):\n    return word if len(messages) < 2 else None\n"
        "grpo.ENVIRONMENT = functools.partial(environment, '1+1=2')\ngrpo.train_main()\n"
    )
    words = words_of("grpo/grpo.py", f"OUTPUT_DIR={tmp_path / 'run'}")
    for count, steps in ((2, 1), (1, 2)):
        ended = Processes(count, script, *words, f"MAX_STEPS={steps}").wait()
        assert [end.returncode for end in ended] == [0] * count, ended
    assert "Changed" in ended[0].stdout and "ENVIRONMENT" not in ended[0].stdout


# ---------------------------------------------------------------- tools: examples/schema_tools.py

# in the shape of Qwen2.5's
WITH_TOOLS = """{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages -%}
{{ m['role'] + ':' + m['content'] + eos_token }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""


@pytest.fixture
def tools(example, tmp_path):
    """examples/schema_tools.py over a small trainer whose template shows tools."""
    folder = with_template(tmp_path / "tools", template=WITH_TOOLS)
    return example("schema_tools", ACTOR_MODEL=folder, MAX_PROMPT_TOKENS=460, MAX_CONTEXT_TOKENS=512)


@pytest.mark.parametrize(
    "response, text",
    [
        ('<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>', "42"),
        (
            'So\n<tool_call>\n{"name": "multiply",\n"arguments": {"a": 2, "b": 3}}\n</tool_call> and '
            '<tool_call>{"name": "say", "arguments": {"word": "yes"}}',
            "6\nyes",
        ),
        (
            '<tool_call>{"name": "fails", "arguments": {}}</tool_call>',
            "Error: ZeroDivisionError: division by zero",
        ),
        (
            '<tool_call>{"name": "divide", "arguments": {}}</tool_call>',
            "Error: there is no tool 'divide'; there are multiply, fails, say, nothing",
        ),
        (
            "<tool_call>multiply(6, 7)</tool_call>",
            "Error: JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        ),
        ("<tool_call>[1]</tool_call>", "Error: TypeError: list indices must be integers or slices, not str"),
        ('<tool_call>{"name": "multiply"}</tool_call>', "Error: KeyError: 'arguments'"),
        ('<tool_call>{"name": "nothing", "arguments": {}}</tool_call>', "(no output)"),
        ("#### 42", None),
    ],
)
def test_calls_are_run_and_what_is_wrong_with_them_is_their_answer(example, response, text):
    tools = example("schema_tools")

    def fails():
        return 1 / 0

    def say(word):
        return word

    def nothing():
        return ""

    tools.TOOLS += [fails, say, nothing]
    assert tools.run_tools([{"role": "user", "content": "6 * 7?"}], response, "42") == text


def test_a_call_with_wrong_arguments_is_told(example):
    tools = example("schema_tools")
    call = '<tool_call>{"name": "multiply", "arguments": {"c": 1}}</tool_call>'
    assert re.match(r"Error: TypeError: multiply\(\) .*'c'", tools.run_tools([], call, None))


def test_tools_are_shown_to_the_policy_and_their_answers_come_as_the_role_tool(tools, tmp_path):
    trainer = tools.ToolTrainer()
    schema = get_json_schema(tools.multiply)
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    row = trainer.train_rows[0]
    shown = f"{json.dumps(schema)}\nuser:{row['prompt']}<eos>assistant:"
    assert row["ids"] == trainer.tokenizer(shown, add_special_tokens=False)["input_ids"]
    episode = episode_that_said('<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>')
    assert tools.grpo.ask_environment([episode], trainer.actor, trainer.tokenizer) == [episode]
    assert episode.messages[-1] == {"role": "tool", "content": "42"}
    added = trainer.tokenizer("tool:42<eos>assistant:", add_special_tokens=False)["input_ids"]
    assert episode.ids == [9, 1, *added] and episode.mask == [1.0, 1.0] + [0.0] * len(added)
    trainer.tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.chat_template == trainer.tokenizer.chat_template
    trainer.train()
    assert trainer.run.step == 2


def test_a_template_that_shows_no_tools_is_refused(example):
    tools = example("schema_tools")
    says = "chat template does not show the tool multiply: take a model"
    with pytest.raises(tools.grpo.UserError, match=says):
        tools.ToolTrainer()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "constants, says",
    [
        ({"ENVIRONMENT_ROLE": "system"}, "ENVIRONMENT_ROLE = 'system' is unknown: it takes user or tool"),
        ({"OVERLONG_BUFFER": 8}, "OVERLONG_BUFFER = 8 is for single responses: set it to 0"),
        ({"MAX_CONTEXT_TOKENS": 200}, "MAX_CONTEXT_TOKENS = 200 is less than .* one turn .*288: raise it"),
        ({"MAX_CONTEXT_TOKENS": 4096}, "MAX_CONTEXT_TOKENS = 4096: ACTOR_MODEL reads 512 at most"),
        ({"MAX_TURNS": 0}, "MAX_TURNS = 0 is out of range"),
        ({"ENVIRONMENT_THREADS": 0}, "ENVIRONMENT_THREADS = 0 is out of range"),
        (
            {"REWARD_MODEL": 400, "MAX_CONTEXT_TOKENS": 401},
            "MAX_CONTEXT_TOKENS = 401: REWARD_MODEL reads 400 ",
        ),
    ],
)
def test_what_turns_cannot_do_is_refused_at_the_start(grpo, constants, says, tmp_path):
    if positions := constants.get("REWARD_MODEL"):
        shutil.copytree(TINY / "reward_model", tmp_path / "reward")
        config = json.loads((tmp_path / "reward/config.json").read_text())
        config["max_position_embeddings"] = positions
        (tmp_path / "reward/config.json").write_text(json.dumps(config))
        constants = {**constants, "REWARD_MODEL": str(tmp_path / "reward")}
    script = grpo(**{"ENVIRONMENT": again, **constants})
    with pytest.raises(script.UserError, match=says):
        script.GRPOTrainer()


def test_an_environment_is_no_word_of_the_command_line(started):
    end = started("grpo/grpo.py", "ENVIRONMENT=calculator")
    assert end.returncode == 2 and "ENVIRONMENT takes function or None" in end.stderr


@pytest.mark.parametrize("value", [7, ["1"], b"1", ""])
def test_an_environment_that_returns_no_text_is_told(grpo, value):
    def wrong(messages, response, answer):
        return value

    with pytest.raises(Exception, match=r"ENVIRONMENT \(wrong\) must return a text .* or None") as caught:
        conversed(grpo, ENVIRONMENT=wrong)
    assert type(caught.value).__name__ == "UserError"


@pytest.mark.parametrize("threads", [1, 3])
def test_what_an_environment_raises_is_named(grpo, threads):
    def broken(messages, response, answer):
        return 1 / 0

    with pytest.raises(ZeroDivisionError) as caught:
        conversed(grpo, ENVIRONMENT=broken, ENVIRONMENT_THREADS=threads)
    assert caught.value.__notes__ == ["(raised by ENVIRONMENT (broken))"]


def test_an_environment_that_hangs_ends_the_program(tmp_path):
    """The second of three calls at once."""
    script = tmp_path / "hangs.py"
    script.write_text(
        f"import itertools, sys, time\nsys.path.insert(0, {str(ROOT / 'grpo')!r})\nimport grpo\n"
        "count = itertools.count()\n"
        "grpo.ENVIRONMENT = lambda *asked: time.sleep(60 * (next(count) == 1))\n"
        "grpo.ENVIRONMENT_THREADS = 3\ngrpo.train_main()\n"
    )
    words = words_of("grpo/grpo.py", "REWARD_TIMEOUT=1", f"OUTPUT_DIR={tmp_path / 'run'}")
    end = Program(script, *words, cwd=ROOT, environment={}).wait()
    assert end.returncode == 1 and "Timeout (0:00:01)!" in end.stderr
