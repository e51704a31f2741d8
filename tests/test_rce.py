"""RCE's maths against hand-worked numbers and independent sums; mining, the check-up, training; its runs,
killed and unbroken."""

import copy
import itertools
import json
import math
import os
import re
import shutil
import signal
import time
from contextlib import nullcontext

import pyarrow.parquet as pq
import pytest
import torch
from conftest import (
    NATS,
    ROOT,
    TINY,
    assert_same_state,
    distance,
    load_script,
    policy_with_two_ends,
    read,
    reward_batch,
    small,
    untimed,
    walk,
)
from program import Program
from test_ppo import algorithm_of, differences, digits, nudge, tiny_files, vowels
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SMALL = small(
    "rce/rce.py",
    MAX_STEPS=None,
    MINE_PROMPTS=15,
    GROUP_SIZE=6,
    SAMPLE_TEMPERATURES=[0.7, 1.0, 1.3],
    BEAMS=2,
    ROUNDS=1,
    NUM_EPOCHS=1,
)
module = load_script("rce/rce.py")


@pytest.fixture
def rce(tmp_path):
    return lambda **constants: load_script(
        "rce/rce.py", **{**SMALL, "OUTPUT_DIR": str(tmp_path / "run"), **constants}
    )


def command(*words):
    return [
        ROOT / "rce/rce.py",
        *(f"{k}={v}" for k, v in SMALL.items()),
        *map(str, words),
    ]


@pytest.fixture
def run(started):
    """run("KEY=value", ...): the program, begun in this process."""
    return lambda *words: started("rce/rce.py", *(f"{k}={v}" for k, v in SMALL.items()), *words)


def candidate(hard, soft=0.0, gt_prob=0.0, source=("sample",), temperature=(1.0,), **more):
    return {
        "prompt_id": "p",
        "prompt": "q",
        "token_ids": [5, 1],
        "text": "",
        "hard": hard,
        "soft": soft,
        "gt_prob": gt_prob,
        "source": list(source),
        "temperature": list(temperature),
        "logprob": -1.0,
        "eval_mode": "verified",
        "eval_failed": False,
        **more,
    }


@pytest.fixture(scope="module")
def mined(tmp_path_factory):
    """A finished STAGE=mine of 15 prompts, every candidate verified."""
    out = tmp_path_factory.mktemp("mined") / "run"
    load_script(
        "rce/rce.py", **{**SMALL, "STAGE": "mine", "OUTPUT_DIR": str(out), "SAVE_EVERY_N_STEPS": 0}
    ).RCETrainer().train()
    return out / "candidates_round_1.parquet"


def prepared(script):
    """A trainer whose first round is ready to train."""
    trainer = script.RCETrainer()
    trainer.run.open_files()
    trainer.prepare_round()
    return trainer


# ---------------------------------------------------------------- weights and loss


def test_weights_sum_to_one_and_a_constant_changes_nothing():
    r = [0.3, 2.0, -1.0, 0.3]
    for kind in ("raw", "zscore"):
        w = module.rce_weights(r, 0.7, kind)
        assert w.sum().item() == pytest.approx(1) and w[0] == w[3] and not w.requires_grad
        assert torch.allclose(w, module.rce_weights([x + 100 for x in r], 0.7, kind))
    e = [math.exp(x / 0.7) for x in r]
    assert module.rce_weights(r, 0.7).tolist() == pytest.approx([x / sum(e) for x in e])


def test_a_small_tau_takes_the_best_alone_and_a_large_one_all_alike():
    assert module.rce_weights([0.0, 1.0, 0.5], 1e-6).tolist() == [0, 1, 0]
    assert module.rce_weights([0.0, 1.0, 0.5], 1e6).tolist() == pytest.approx([1 / 3] * 3, abs=1e-6)


def test_zscore_normalises_once_by_the_prompts_own_deviation():
    r = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    expected = ((r - 3) / (math.sqrt(7) + 1e-4) / 0.5).softmax(0)  # ddof 1
    assert torch.allclose(module.rce_weights(r, 0.5, "zscore"), expected)
    assert torch.allclose(module.rce_weights(r * 10, 0.5, "zscore"), expected, atol=1e-3)
    assert not torch.allclose(module.rce_weights(r * 10, 5), module.rce_weights(r, 5), atol=0.1)


@pytest.fixture
def step(rce, mined):
    def make(**constants):
        trainer = prepared(
            rce(STAGE="train", CANDIDATES=str(mined), BATCH_SIZE=8, EVAL_DATASETS=[], **constants)
        )
        trainer.optimizers["policy"].step = lambda: trainer.__setattr__(
            "gradient", torch.cat([p.grad.flatten() for p in trainer.actor.parameters()])
        )
        return trainer, trainer.next_batch()

    return make


def alone(trainer, row, c):
    """log pi of one candidate, by itself: no padding, no sharing."""
    ids = torch.tensor([row["ids"] + c["token_ids"]])
    logits = trainer.actor(ids).logits[0, len(row["ids"]) - 1 : -1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(c["token_ids"])[:, None]).sum()


@pytest.mark.parametrize("length_normalise", [False, True])
@pytest.mark.parametrize("tau", [1e-6, 0.3, 1e6])
def test_the_loss_is_the_mean_over_prompts_of_the_weighted_cross_entropy(step, tau, length_normalise):
    trainer, batch = step(
        TAU=tau, LENGTH_NORMALISE=length_normalise, REWARD_MODE="hard_plus_soft", MAX_GRAD_NORM=1e9
    )
    rows = trainer.train_rows
    assert batch.num_prompts == 8 and len({row["id"] for row in batch.rows}) == 8
    chosen = [row for row in rows if row["id"] in {r["id"] for r in batch.rows}]
    expected = 0
    for row in chosen:
        ce = torch.stack(
            [
                -alone(trainer, row, c) / (len(c["token_ids"]) if length_normalise else 1)
                for c in row["candidates"]
            ]
        )
        r = torch.tensor(row["rewards"], dtype=torch.float64)
        if tau == 1e-6:
            expected = (
                expected + ce[r >= r.max() - 1e-9].mean() / 8
            )  # the top candidate's own cross entropy; equal ones share it
        elif tau == 1e6:
            expected = expected + ce.mean() / 8
        else:
            expected = expected + (ce * (r / tau).softmax(0)).sum() / 8
    trainer.actor.zero_grad()
    expected.backward()
    wanted = torch.cat([p.grad.flatten() for p in trainer.actor.parameters()])
    trainer.actor.zero_grad()
    metrics = trainer.update(batch)
    assert metrics["policy_loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert distance(trainer.gradient, wanted) < 1e-4
    if tau == 1e-6:
        assert len(batch.rows) == sum(row["rewards"].count(max(row["rewards"])) for row in chosen)


def test_how_a_step_is_cut_changes_nothing(rce, mined):
    found = []
    for size, steps in ((1, 8), (4, 2), (8, 1)):
        trainer = prepared(
            rce(
                STAGE="train",
                CANDIDATES=str(mined),
                BATCH_SIZE=size,
                GRADIENT_ACCUMULATION_STEPS=steps,
                GROUP_SIZE=2,
                EVAL_DATASETS=[],
                RESUME="no",
            )
        )
        trainer.optimizers["policy"].step = lambda: found.append(
            torch.cat([p.grad.flatten() for p in trainer.actor.parameters()])
        )
        metrics = trainer.update(trainer.next_batch())
        found[-1] = found[-1], metrics["policy_loss"]
    for gradient, loss in found[1:]:
        assert distance(gradient, found[0][0]) < 1e-4 and loss == pytest.approx(found[0][1], rel=1e-4)


def test_facts_of_the_weights(step):
    trainer, batch = step(TAU=0.5)
    weights = {}
    for row, w in zip(batch.rows, batch.weights.tolist()):
        weights.setdefault(row["id"], []).append(w)
    assert all(sum(w) == pytest.approx(1, rel=1e-5) for w in weights.values())
    assert batch.facts["effective_candidates"] == pytest.approx(
        sum(math.exp(-sum(x * math.log(x) for x in w)) for w in weights.values()) / 8, rel=1e-5
    )
    assert batch.facts["weight_on_best"] == pytest.approx(sum(max(w) for w in weights.values()) / 8, rel=1e-5)


def test_tau_moves_by_equal_factors_to_its_end(step):
    trainer, _ = step(TAU=1.0, TAU_END=0.01, NUM_EPOCHS=3)
    seen = []
    for trainer.run.step in range(1, trainer.run.total_steps + 1):
        seen.append(trainer.next_batch().facts["tau"])
    assert (
        seen[0] == 1.0
        and seen[-1] == pytest.approx(0.01)
        and all(b / a == pytest.approx(seen[1] / seen[0]) for a, b in itertools.pairwise(seen))
        and len(seen) > 2
    )


# ---------------------------------------------------------------- gt_prob


def save_random_model(folder, vocabulary, seed, std):
    """A Llama of two layers whose matrices are normal with deviation std."""
    torch.manual_seed(seed)
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2)
    ends = dict(eos_token_id=1, pad_token_id=0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_hidden_layers=2, **sizes, **ends))
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.normal_(layer.weight, std=std)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A random model over pad, EOS, a, b and a mark, small enough to enumerate every answer."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, decoders

    words = Tokenizer(
        models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "#": 4, "\n": 5}, unk_token="<pad>")
    )
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split(Regex(r"."), "isolated"), decoders.Fuse()
    folder = tmp_path_factory.mktemp("toy")
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        folder / "model"
    )
    save_random_model(folder / "model", vocabulary=6, seed=3, std=0.6)
    answers = ["".join(x) for n in (1, 2, 3) for x in itertools.product("ab", repeat=n)]
    (folder / "data.jsonl").write_text(
        "".join(
            json.dumps({"problem": p, "solution": s}) + "\n"
            for p, s in (("ab", answers), ("ba", ["a", "a", "b"]), ("bb", "a"))
        )
    )
    data = [{"path": str(folder / "data.jsonl"), "type": "jsonl", "input": "problem", "output": "solution"}]
    return dict(
        ACTOR_MODEL=str(folder / "model"),
        TRAIN_DATASETS=data,
        EVAL_DATASETS=[],
        ANSWER_FORM="#{answer}",
        MAX_NEW_TOKENS=5,
    )


def probability(trainer, before, ids):
    """Product of next-token probabilities, one forward pass each."""
    p = 1.0
    for i, token in enumerate(ids):
        p *= trainer.actor(torch.tensor([before + ids[:i]])).logits[0, -1].double().softmax(-1)[token].item()
    return p


@torch.no_grad()
def test_gt_prob_of_a_toy_model_by_enumeration(rce, toy):
    trainer = rce(**toy).RCETrainer()
    rows = trainer.train_rows
    candidates = [
        {"prompt_id": row["id"], "token_ids": ids}
        for row in rows
        for ids in ([3, 4, 2, 1], [2, 2, 3, 1], [4, 4, 3])
    ]
    trainer.score_gold(candidates)
    workings = [
        [3, 4],
        [2, 2, 3, 5, 4],
        [4, 4],
    ]  # up to the last mark; without one, the mark on a line of its own
    for i, row in enumerate(rows):
        for c, working in zip(candidates[3 * i : 3 * i + 3], workings):
            golds = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
            each = {
                g: probability(trainer, row["ids"] + working, [{"a": 2, "b": 3}[x] for x in g] + [1])
                for g in golds
            }  # distinct, ended by EOS
            assert c["gt_prob"] == pytest.approx(sum(each.values()), rel=4 * NATS)  # up to four tokens
    # all answers of one to three letters, and every other way the text could go on, are all of probability
    first, others = candidates[0], 0.0
    before = rows[0]["ids"] + workings[0]
    for n in range(4):
        for middle in itertools.product((2, 3), repeat=n):
            for last in (0, 4, 5) + ((2, 3) if n == 3 else ()) + ((1,) if n == 0 else ()):
                others += probability(trainer, before, [*middle, last])
    assert first["gt_prob"] + others == pytest.approx(1, rel=4 * NATS) and 0 < first["gt_prob"] < 1


def test_gold_answers_weigh_by_their_count_and_never_reach_above_one(rce, toy):
    script = rce(**toy, GOLD_FULL_COUNT=3)
    trainer = script.RCETrainer()
    _, golds = script.gold_after_working(trainer.tokenizer, trainer.train_rows[1], [3, 4, 2, 1])
    assert golds == [([2, 1], 2 / 3), ([3, 1], 1 / 3)]
    assert module.gold_probability([math.log(0.5), math.log(0.25)], [1.0, 0.5]) == pytest.approx(0.625)
    assert module.gold_probability([math.log(0.75), math.log(0.25) + 1e-9], [1.0, 1.0]) == 1.0
    assert module.gold_probability([2 * math.log(0.1)], [1.0]) == pytest.approx(
        0.01
    )  # the product, not its root


@pytest.mark.parametrize(
    "text, working",
    [
        ("2+2=4\n#### 4", "2+2=4\n####"),
        ("#### 1 2\n#### 3", "#### 1 2\n####"),
        ("2+2=4\n", "2+2=4\n\n####"),
        ("", "\n####"),
        ("2+2=4\n####", "2+2=4\n####"),
    ],
)
def test_the_working_ends_with_the_mark(rce, text, working):
    script = rce()
    tokenizer = script.RCETrainer().tokenizer
    ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
    before, ((gold, weight),) = script.gold_after_working(tokenizer, {"answer": "1+1=2\n#### 42"}, ids)
    assert tokenizer.decode(before) == working and tokenizer.decode(gold) == " 42<eos>" and weight == 1


def test_a_form_without_a_mark_gives_the_answers_own_probability(rce, toy):
    trainer = rce(**{**toy, "ANSWER_FORM": "{answer}"}).RCETrainer()
    row = trainer.train_rows[2]
    candidates = [{"prompt_id": row["id"], "token_ids": ids} for ids in ([2, 1], [3, 3, 1])]
    trainer.score_gold(candidates)
    want = probability(trainer, row["ids"], [2, 1])
    assert [c["gt_prob"] for c in candidates] == pytest.approx([want] * 2, rel=2 * NATS)


# ---------------------------------------------------------------- mining


def test_candidates_have_the_columns_that_are_promised(mined):
    table = pq.read_table(mined)
    records = table.to_pylist()
    promised = (ROOT / "docs/reference-rce.md").read_text().split("## Candidates")[1].split("## ")[0]
    columns = re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\| (`.*?) \|", promised, re.MULTILINE)))
    assert {*columns, "reward/exact_answer", "reward/rouge_l"} == set(table.column_names)
    groups = {}
    for c in records:
        groups.setdefault(c["prompt_id"], []).append(c)
    assert len(groups) == 15
    tokenizer = AutoTokenizer.from_pretrained(TINY / "policy")
    for group in groups.values():
        ways = [(s, t) for c in group for s, t in zip(c["source"], c["temperature"])]
        assert sorted(ways, key=str) == sorted(
            [("greedy", None)]
            + [("beam", None)] * 2
            + [("sample", t) for t in (0.7, 0.7, 1.0, 1.0, 1.3, 1.3)],
            key=str,
        )  # merged, none forgotten
        assert len({tuple(c["token_ids"]) for c in group}) == len(group)
        for c in group:
            assert c["text"] == tokenizer.decode(c["token_ids"], skip_special_tokens=True) and c[
                "truncated"
            ] == (c["token_ids"][-1] != tokenizer.eos_token_id)
            assert (
                c["hard"] == c["reward/exact_answer"]
                and c["soft"] == c["reward/rouge_l"]
                and 0 <= c["gt_prob"] <= 1
                and c["eval_mode"] == "verified"
                and not c["eval_failed"]
            )
    assert sum(len(c["source"]) for c in records) == 15 * 9 > len(records)


def test_the_logprob_is_the_policys_own(rce, mined):
    trainer = rce().RCETrainer()
    for c in pq.read_table(mined).to_pylist()[::7]:
        want = alone(trainer, trainer.rows[c["prompt_id"]], c).item()
        assert c["logprob"] == pytest.approx(want, abs=8 * NATS)


def test_equal_candidates_merge_and_keep_every_source(rce):
    trainer = rce(
        TEMPERATURE=1e-3, SAMPLE_TEMPERATURES=[0.001], BEAMS=1
    ).RCETrainer()  # all ways give the greedy response
    (group,) = trainer.propose(trainer.train_rows[:1])
    assert [c["source"] for c in group] == [["greedy", "beam"] + ["sample"] * 6] and group[0][
        "temperature"
    ] == [None, None] + [0.001] * 6


def test_a_beam_is_one_of_the_likeliest_and_no_filter_of_the_model_touches_it(rce, toy):
    script = rce(**{**toy, "MAX_NEW_TOKENS": 2}, BEAMS=3)
    trainer = script.RCETrainer()
    (
        trainer.actor.generation_config.repetition_penalty,
        trainer.actor.generation_config.no_repeat_ngram_size,
    ) = (50.0, 1)
    prompts = [row["ids"] for row in trainer.train_rows]
    beams = script.beam_search(trainer.actor, prompts, trainer.eos_ids.tolist(), trainer.pad_id)
    assert len(beams) == 9
    for i, _prompt in enumerate(prompts):
        ended = [[1]] + [[x, y] for x in (0, 2, 3, 4, 5) for y in range(6)]
        got = beams[3 * i : 3 * i + 3]
        assert all(x in ended for x in got) and len(set(map(tuple, got))) == 3
    assert trainer.actor.generation_config.repetition_penalty == 50.0  # put back
    script = rce(**{**toy, "MAX_NEW_TOKENS": 5}, BEAMS=1)
    trainer = script.RCETrainer()
    (
        trainer.actor.generation_config.repetition_penalty,
        trainer.actor.generation_config.no_repeat_ngram_size,
    ) = (50.0, 1)
    greedy = script.respond(trainer.actor, trainer.tokenizer, prompts, None)
    assert any(
        len(set(ids)) < len(ids) for ids in greedy.response_ids.tolist()
    )  # a filter would have changed this one
    beams = script.beam_search(trainer.actor, prompts, trainer.eos_ids.tolist(), trainer.pad_id)
    lengths = greedy.response_lengths.tolist()
    assert beams == [ids[:n] for ids, n in zip(greedy.response_ids.tolist(), lengths)]


def test_how_prompts_are_cut_changes_no_sample(rce):
    found = []
    for size in (2, 5):
        trainer = rce(BATCH_SIZE=size).RCETrainer()
        found.append(
            [
                [c["token_ids"] for c in group]
                for i in range(0, 10, size)
                for group in trainer.propose(trainer.train_rows[i : i + size])
            ]
        )
    assert found[0] == found[1]
    trainer.state.round = 2
    assert [[c["token_ids"] for c in group] for group in trainer.propose(trainer.train_rows[:5])] != found[0][
        :5
    ]  # another round draws anew


def test_the_datas_own_solution_is_a_candidate_when_wanted(rce):
    trainer = rce(
        INCLUDE_REFERENCE=True, GREEDY=False, BEAMS=0, GROUP_SIZE=1, SAMPLE_TEMPERATURES=[1.0]
    ).RCETrainer()
    rows = trainer.train_rows[:4]
    records = trainer.mine_chunk(rows)
    references = [c for c in records if "reference" in c["source"]]
    assert [c["text"] for c in references] == [row["answer"] for row in rows] and all(
        c["hard"] == 1 and not c["truncated"] for c in references
    )
    trainer = rce(
        INCLUDE_REFERENCE=True,
        GREEDY=False,
        BEAMS=0,
        GROUP_SIZE=1,
        SAMPLE_TEMPERATURES=[1.0],
        MAX_NEW_TOKENS=3,
    ).RCETrainer()
    assert not [
        c for group in trainer.propose(rows) for c in group if "reference" in c["source"]
    ]  # longer than MAX_NEW_TOKENS


def test_only_the_best_by_the_cheap_signal_and_a_few_others_are_verified(rce, mined):
    script = rce(VERIFY_TOP=2, VERIFY_RANDOM=1)
    trainer = script.RCETrainer()
    calls = []
    compute = trainer.compute_rewards
    trainer.compute_rewards = lambda prompts, responses, answers: (
        calls.append(len(responses)) or compute(prompts, responses, answers)
    )
    truth = {(c["prompt_id"], tuple(c["token_ids"])): c["hard"] for c in pq.read_table(mined).to_pylist()}
    rows = trainer.round_rows()[:4]  # as STAGE=mine cut them
    records, cheap = trainer.mine_chunk(rows), 0
    for row in rows:
        group = [c for c in records if c["prompt_id"] == row["id"]]
        ranked = sorted(group, key=lambda c: -c["gt_prob"])
        verified = [c for c in group if c["eval_mode"] == "verified"]
        cheap += len(group) - len(verified)
        assert all(c in verified for c in ranked[:2]) and all(
            "greedy" not in c["source"] or c in verified for c in group
        )
        assert all(
            c["hard"] is None and c["soft"] is None and not c["eval_failed"]
            for c in group
            if c not in verified
        )
        hards, possible = (
            {c["hard"] for c in verified},
            {truth[c["prompt_id"], tuple(c["token_ids"])] for c in group},
        )
        assert hards == possible  # a right and a wrong one, where they exist
        if len(verified) < len(group):
            assert len(verified) <= 4
    assert cheap > 0 and calls[0] <= 4 * 4
    again = rce(VERIFY_TOP=2, VERIFY_RANDOM=1).RCETrainer()
    assert [c["eval_mode"] for c in again.mine_chunk(rows)] == [c["eval_mode"] for c in records]


def test_a_candidate_whose_scoring_raised_is_kept_and_is_no_negative(rce, tmp_path, capsys):
    def picky(prompts, responses, answers):
        if any(len(r) % 5 == 0 for r in responses):
            raise ZeroDivisionError("a length of five")
        return [float(len(r) % 2) for r in responses]

    script = rce(REWARD_FUNCTIONS=[(picky, 1.0)], HARD_REWARD="picky", SOFT_REWARD="picky", EVAL_DATASETS=[])
    trainer = prepared(script)
    records = pq.read_table(tmp_path / "run/candidates_round_1.parquet").to_pylist()
    failed = [c for c in records if c["eval_failed"]]
    assert (
        failed == [c for c in records if len(c["text"]) % 5 == 0]
        and failed
        and all(
            c["hard"] is None and c["eval_mode"] == "failed" and "five" in c["eval_error"] for c in failed
        )
    )
    assert all(not c["eval_failed"] for row in trainer.train_rows for c in row["candidates"])
    assert "scoring failed for" in capsys.readouterr().out


@pytest.mark.parametrize(
    "function, constants, says",
    [
        (lambda p, r, a: 1 / 0, {}, "the reward failed for every one of .*division by zero"),
        (lambda p, r, a: [0.5] * len(r), {}, "HARD_REWARD must give 0 or 1.*gave 0.5"),
        (lambda p, r, a: [math.nan] * len(r), {}, "finite"),
        (
            lambda p, r, a: [1.0] * len(r),
            {"HARD_REWARD": "exact", "SOFT_REWARD": "rouge"},
            "HARD_REWARD = 'exact' and SOFT_REWARD = 'rouge': the reward has no part of this name. Its parts "
            "are: mine. Name one of them",
        ),
        (
            lambda p, r, a: [1.0] * len(r),
            {"SOFT_REWARD": "rouge_l"},
            "^SOFT_REWARD = 'rouge_l': .* or add the missing one to REWARD_FUNCTIONS with weight 0.0",
        ),
        (lambda p, r, a: ["x"] * len(r), {}, "failed for every one"),
        (
            lambda p, r, a: [1.0] * len(r),
            {"REWARD_FUNCTIONS": [("f1", 1.0)], "HARD_REWARD": "f1", "SOFT_REWARD": "f1"},
            "HARD_REWARD must give 0 or 1",
        ),
    ],
)
def test_a_reward_that_cannot_be_used_ends_the_run_with_a_sentence(rce, function, constants, says):
    function.__name__ = "mine"
    script = rce(
        **{
            "REWARD_FUNCTIONS": [(function, 1.0)],
            "HARD_REWARD": "mine",
            "SOFT_REWARD": "mine",
            "EVAL_DATASETS": [],
            **constants,
        }
    )
    with pytest.raises(script.UserError, match=says):
        prepared(script)


def test_rewards_are_asked_about_batch_size_prompts_candidates_at_a_time(rce):
    def note(prompts, responses, answers):
        asked.append(len(responses))
        return [1.0] * len(responses)

    asked = []
    trainer = rce(BATCH_SIZE=3, GROUP_SIZE=4, REWARD_FUNCTIONS=[(note, 1.0)]).RCETrainer()
    trainer.score_responses(reward_batch(["a"] * 30, ["b"] * 30, ["c"] * 30))
    assert asked == [12, 12, 6]


def test_the_reward_model_is_squashed_into_the_soft_reward(rce):
    trainer = rce(REWARD_MODEL=str(TINY / "reward_model"), SOFT_REWARD="reward_model").RCETrainer()
    for c in trainer.mine_chunk(trainer.train_rows[:2]):
        assert c["soft"] == pytest.approx(1 / (1 + math.exp(-c["reward/reward_model"])), rel=1e-5)


def test_a_model_that_scores_otherwise_than_it_answers_is_refused(rce, monkeypatch):
    script = rce()
    trainer = script.RCETrainer()
    right = script.respond
    for wrong in (-1, math.nan):

        def respond(*arguments):
            batch = right(*arguments)
            batch.logprobs = batch.logprobs + wrong
            return batch

        monkeypatch.setattr(script, "respond", respond)
        with pytest.raises(script.UserError, match="nats per token off what sampling gave them"):
            trainer.mine_chunk(trainer.train_rows[:2])


def test_a_candidate_whose_logprob_is_not_finite_ends_the_mining(rce):
    script = rce(GREEDY=False)
    trainer = script.RCETrainer()
    trainer.sequence_logprobs = lambda candidates: [math.nan] * len(candidates)
    with pytest.raises(script.UserError, match="gives a response the log-probability nan"):
        trainer.mine_chunk(trainer.train_rows[:2])


# ---------------------------------------------------------------- the check-up


def table():
    one = [
        candidate(1, 0.9, 0.8, ["greedy", "sample"], [None, 1.0]),
        candidate(0, 0.5, 0.1),
        candidate(0, 0.2, 0.0, ["beam"], [None]),
    ]  # the pick is right
    two = [
        candidate(0, 0.6, 0.3, ["greedy"], [None]),
        candidate(1, 1.0, 0.9, ["sample", "sample"], [0.5, 1.0]),
        candidate(None, None, None, eval_failed=True, eval_mode="failed"),
    ]
    three = [
        candidate(0, 0.1, 0.0, ["greedy"], [None]),
        candidate(0, 0.4, 0.2, ["beam"], [None]),
        candidate(None, None, 0.05, eval_mode="cheap"),
    ]
    return [one, two, three]


def test_check_up_figures_of_a_hand_made_table(rce, capsys):
    figures = rce(REWARD_MODE="hard_only").check_up(table(), 11, "c.parquet", print)
    wanted = {
        "prompts": 3,
        "candidates": 9,
        "proposed": 11,
        "positive rate": 2 / 7,
        "prompts without a positive": 1 / 3,
        "prompts with flat reward": 1 / 3,
        "accuracy of the policy's pick": 1 / 3,
        "accuracy of the oracle": 2 / 3,
    }
    assert figures == pytest.approx(wanted) and [*figures] == [*wanted]
    said = capsys.readouterr().out
    assert "tools/check_up.py c.parquet" in said and re.search("positive rate +0.286\n", said)
    soft = rce(REWARD_MODE="hard_plus_soft").check_up(table(), 11, "c.parquet", print)
    assert soft["prompts with flat reward"] == 0


def test_the_check_up_says_how_many_could_not_be_scored(rce, mined, capsys, tmp_path):
    script = rce(STAGE="train", CANDIDATES=str(tmp_path / "c.parquet"), EVAL_DATASETS=[])
    records = pq.read_table(mined).to_pylist()
    for c in records[:2]:
        c.update(eval_failed=True, eval_error="no")
    script.write_parquet(records, script.candidates_path(1), {})
    trainer = prepared(script)
    said = capsys.readouterr().out
    assert f"WARNING: scoring failed for 2 of {len(records)} candidates" in said
    (record,) = [r for r in read(trainer.run.folder / "logs/metrics.jsonl") if r["phase"] == "mine"]
    assert record["responses"] == record["proposed"] == sum(len(c["source"]) for c in records)


# ---------------------------------------------------------------- what is trained on


def test_the_mapping_is_strict(rce, mined, tmp_path):
    records = pq.read_table(mined).to_pylist()
    faults = [
        (
            {"prompt_id": "train.jsonl:99999"},
            "row 3: prompt_id 'train.jsonl:99999' with this prompt is not in TRAIN_DATASETS",
        ),
        ({"prompt": "another"}, "row 3: prompt_id"),
        ({"token_ids": [5, 82]}, "row 3: token_ids must be 1 or more ids below 82"),
        ({"token_ids": []}, "row 3: token_ids"),
        ({"token_ids": [-1]}, "row 3: token_ids"),
        ({"hard": 0.5}, "row 3: hard is 0.5"),
    ]
    faults.append(({"token_ids": [5] * 2000}, "a candidate has 20.. tokens with its prompt, and ACTOR_MODEL"))
    script = rce(STAGE="train", CANDIDATES=str(tmp_path / "c.parquet"))
    script.max_positions = lambda model: 512
    for change, says in faults:
        script.write_parquet(
            [{**c, **change} if i == 2 else c for i, c in enumerate(records)], tmp_path / "c.parquet", {}
        )
        with pytest.raises(script.UserError, match=says):
            script.RCETrainer().prepare_round()
    for table, says in (
        (pq.read_table(mined).drop_columns(["hard"]), "there is no column 'hard'"),
        (pq.read_table(mined).slice(0, 0), "there are no candidates in it"),
    ):
        pq.write_table(table, tmp_path / "c.parquet")
        with pytest.raises(script.UserError, match=says):
            script.RCETrainer().prepare_round()
    data = bytearray(mined.read_bytes())
    data[200] ^= 1
    for broken in (data, data[:1000], b""):
        (tmp_path / "c.parquet").write_bytes(broken)
        with pytest.raises(script.UserError, match="c.parquet cannot be read as parquet"):
            script.RCETrainer().prepare_round()


def test_prompts_are_split_by_their_text_and_those_held_back_are_never_trained_on(rce, tmp_path):
    lines = [
        json.dumps({"problem": f"Tom has {i // 2} apples.", "solution": f"#### {i // 2}"}) for i in range(40)
    ]  # each prompt twice
    (tmp_path / "twice.jsonl").write_text("\n".join(lines))
    data = [
        {"path": str(tmp_path / "twice.jsonl"), "type": "jsonl", "input": "problem", "output": "solution"}
    ]
    script = rce(
        TRAIN_DATASETS=data,
        MAX_TRAIN_PROMPTS=None,
        MINE_PROMPTS=None,
        REWARD_MODE="soft_only",
        EVAL_DATASETS=[],
        BATCH_SIZE=8,
    )
    trainer = prepared(script)
    assert (
        len(trainer.held_back) == 4 and len(trainer.validation) == 8
    )  # a fifth of 20 texts, both rows of each
    first = [script.next_rows(trainer.train_rows, trainer.state, 8)[0] for _ in range(20)]
    trained = {row["prompt"] for row in first + trainer.train_rows}
    assert trained and not trained & trainer.held_back


def test_flat_prompts_are_skipped_and_two_with_one_difference_are_not(rce, mined):
    hard, soft = (
        prepared(rce(STAGE="train", CANDIDATES=str(mined), REWARD_MODE=mode, RESUME="no", EVAL_DATASETS=[]))
        for mode in ("hard_only", "soft_only")
    )
    assert all(len({c["hard"] for c in row["candidates"]}) == 2 for row in hard.train_rows)
    assert len(hard.train_rows) < len(soft.train_rows) and all(
        len(set(row["rewards"])) > 1 for row in soft.train_rows
    )


def test_candidates_that_are_all_alike_are_said_to_teach_nothing(rce, mined, tmp_path):
    script = rce(STAGE="train", CANDIDATES=str(tmp_path / "c.parquet"), EVAL_DATASETS=[])
    script.write_parquet(
        [{**c, "hard": 1.0} for c in pq.read_table(mined).to_pylist()], tmp_path / "c.parquet", {}
    )
    with pytest.raises(script.UserError, match="nothing to train on"):
        prepared(script)


def test_the_pick_is_the_likeliest_candidate(rce):
    trainer = rce(EVAL_DATASETS=[]).RCETrainer()
    rows = trainer.train_rows[:2]
    trainer.validation = [
        (rows[0], [candidate(0), candidate(1)]),
        (rows[1], [candidate(1), candidate(0, token_ids=[5, 6, 7, 1]), candidate(0)]),
    ]
    trainer.sequence_logprobs = lambda candidates: [-5.0, -4.0, -3.0, -2.0, -9.0]
    assert trainer.validate() == {"pick_accuracy": 0.5}
    trainer = rce(EVAL_DATASETS=[], LENGTH_NORMALISE=True).RCETrainer()
    trainer.validation = [(rows[1], [candidate(1), candidate(0, token_ids=[5, 6, 7, 1])])]
    trainer.sequence_logprobs = lambda candidates: [-1.5, -2.0]  # -.75 and -.5 a token
    assert trainer.validate() == {"pick_accuracy": 0.0}


def test_best_is_by_the_picks_accuracy_and_the_later_of_equal_ones(rce, tmp_path, monkeypatch):
    trainer = prepared(rce(EVAL_DATASETS=[]))
    saved = []

    def write_best(metrics, policy, weights, folder):
        folder.mkdir()
        saved.append(metrics["pick_accuracy"])

    monkeypatch.setattr(trainer.run, "write_best", write_best)
    monkeypatch.setattr(trainer, "evaluate", lambda: {"reward": 0.0})
    trainer.run.best_value, trainer.run.evals_since_best = 0.1, 0
    for value in (0.5, 0.4, 0.5, 0.6):
        monkeypatch.setattr(trainer, "validate", lambda: {"pick_accuracy": value})
        trainer.run.log_evaluation(trainer.measure())
    assert saved == [0.5, 0.5, 0.6] and trainer.run.evals_since_best == 0


# ---------------------------------------------------------------- runs


def words(out, **more):
    return [
        f"{k}={v}"
        for k, v in {
            "OUTPUT_DIR": out,
            "MINE_PROMPTS": 12,
            "ROUNDS": 2,
            "BATCH_SIZE": 3,
            "SAVE_EVERY_N_STEPS": 2,
            "EVAL_EVERY_N_STEPS": 2,
            "USE_LR_SCHEDULER": True,
            "REWARD_MODE": "hard_plus_soft",
            "VERIFY_TOP": 3,
            **more,
        }.items()
    ]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "run"
    done = Program(*command(*words(out, KEEP_LAST_N_CHECKPOINTS=99)), cwd=ROOT).wait()
    assert done.returncode == 0, done.stderr
    return out


def assert_same_run(a, b):
    (last,) = {max(int(p.name[5:]) for p in x.glob("step_*")) for x in (a, b)}
    for name in (
        f"step_{last}/policy/model.safetensors",
        "best/policy/model.safetensors",
        "candidates_round_1.parquet",
        "candidates_round_2.parquet",
        "logs/samples.jsonl",
    ):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    assert_same_state(*(x / f"step_{last}/training_state.pt" for x in (a, b)))
    assert untimed(a / "logs/metrics.jsonl") == untimed(b / "logs/metrics.jsonl")


MOMENTS = {  # when the run is killed
    "while it mines": lambda out: (out / "candidates_round_1.parts/00000003.parquet").exists(),
    "while it trains": lambda out: (
        (out / "logs/metrics.jsonl").exists()
        and '"phase": "train", "step": 3,' in (out / "logs/metrics.jsonl").read_text()
    ),
    "while it mines again": lambda out: (out / "candidates_round_2.parts/00000000.parquet").exists(),
}


@pytest.mark.parametrize(
    "number, moment",
    [
        (signal.SIGKILL, "while it mines"),
        (signal.SIGKILL, "while it trains"),
        *(
            pytest.param(number, "while it mines again", marks=pytest.mark.sweep)
            for number in (signal.SIGKILL, signal.SIGTERM)
        ),
    ],
)
def test_a_run_killed_and_resumed_equals_an_unbroken_one_bit_for_bit(unbroken, run, tmp_path, moment, number):
    out = tmp_path / "run"
    process = Program(*command(*words(out)), cwd=ROOT, merged=True)
    while not MOMENTS[moment](out):
        assert process.poll() is None, process.wait().stdout
        time.sleep(0.002)
    process.send_signal(number)
    done = process.wait()
    said, code = done.stdout, done.returncode
    assert code == (-9 if number == signal.SIGKILL else 143) and "Traceback" not in said, said
    assert not any(
        (out / f"candidates_round_{n}.parquet").exists()
        for n in (1, 2)
        if "mines" in moment and (out / f"candidates_round_{n}.parts").exists()
    )
    done = run(*words(out))
    assert done.returncode == 0 and "Found checkpoint" in done.stdout and "Changed" not in done.stdout, (
        done.stdout + done.stderr
    )
    assert_same_run(unbroken, out)


def test_what_an_unbroken_run_wrote(unbroken):
    last = max(int(p.name[5:]) for p in unbroken.glob("step_*"))
    names = {p.name for p in unbroken.iterdir() if not p.name.startswith(("step_", ".lock"))}
    assert names == {
        "best",
        "logs",
        "training_config.json",
        "training_metrics_detailed.png",
        "rce_metrics_with_entropy.png",
        *(f"candidates_round_{n}.parquet" for n in (1, 2)),
    }
    records = read(unbroken / "logs/metrics.jsonl")
    assert [(r["step"], r["round"]) for r in records if r["phase"] == "mine"][0] == (0, 1) and [
        r["round"] for r in records if r["phase"] == "mine"
    ] == [1, 2]
    assert (
        [r["step"] for r in records if r["phase"] == "train"] == list(range(1, last + 1))
        and records[1]["phase"] == "eval"
        and records[1]["step"] == 0
    )
    wanted = (
        "step epoch round policy_loss entropy grad_norm learning_rate tau effective_candidates "
        "weight_on_best reward weighted_reward candidates response_length "
        "tokens_per_second seconds/update"
    ).split()
    train = [r for r in records if r["phase"] == "train"]
    assert set(wanted) <= train[0].keys() and all(math.isfinite(r[key]) for r in train for key in wanted)
    evals = [r for r in records if r["phase"] == "eval"]
    assert {"pick_accuracy", "accuracy_greedy", "accuracy_sampled", "pass@4", "reward"} <= evals[
        0
    ].keys() and evals[-1]["step"] == last
    assert evals[-1]["responses"] == sum(r["proposed"] for r in records if r["phase"] == "mine")
    first, second = (
        {c["prompt"]: c for c in pq.read_table(unbroken / f"candidates_round_{n}.parquet").to_pylist()}
        for n in (1, 2)
    )
    assert (
        not first.keys() & second.keys() and len(second) == 10
    )  # as many as the first trained on: 12 without the 2 held back
    AutoModelForCausalLM.from_pretrained(unbroken / "best/policy")


def test_the_second_round_is_mined_with_the_policy_so_far(unbroken, rce):
    steps = [r for r in read(unbroken / "logs/metrics.jsonl") if r["phase"] == "mine"][1]["step"]
    assert steps > 0
    states = {int(p.name[5:]): p for p in unbroken.glob("step_*")}
    records = pq.read_table(unbroken / "candidates_round_2.parquet").to_pylist()[:5]
    base = rce(BATCH_SIZE=3).RCETrainer()
    before = [alone(base, base.rows[c["prompt_id"]], c).item() for c in records]
    assert max(abs(c["logprob"] - x) for c, x in zip(records, before)) > 0.01  # not the base
    if steps in states:
        base.actor = AutoModelForCausalLM.from_pretrained(states[steps] / "policy")
        want = [alone(base, base.rows[c["prompt_id"]], c).item() for c in records]
        assert [c["logprob"] for c in records] == pytest.approx(want, abs=8 * NATS)


def test_stage_by_stage_is_the_same_as_all_at_once(run, tmp_path):
    a, b = tmp_path / "all", tmp_path / "stages"
    rarely = {"ROUNDS": 1, "SAVE_EVERY_N_STEPS": 0, "EVAL_EVERY_N_STEPS": 0}
    for out, stage in ((a, "all"), (b, "mine"), (b, "train")):
        done = run(*words(out, **rarely, STAGE=stage))
        assert done.returncode == 0, done.stderr
    last = max(int(p.name[5:]) for p in a.glob("step_*"))
    assert (a / f"step_{last}/policy/model.safetensors").read_bytes() == (
        b / f"step_{last}/policy/model.safetensors"
    ).read_bytes()
    # another training on the same candidates keeps them and puts the first one aside
    done = run(*words(b, **rarely, STAGE="train", RESUME="no", TAU=1.0))
    assert (
        done.returncode == 0
        and (b / "candidates_round_1.parquet").exists()
        and list(b.glob(f"old_*/step_{last}"))
    ), done.stderr


def test_going_back_to_an_earlier_checkpoint_puts_later_candidates_aside(unbroken, run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    boundary = [r for r in read(out / "logs/metrics.jsonl") if r["phase"] == "mine"][1]["step"]
    for p in list(out.glob("step_*")):
        if int(p.name[5:]) >= boundary:
            os.truncate(p / "manifest.json", 3)
    done = run(*words(out, KEEP_LAST_N_CHECKPOINTS=99))
    assert done.returncode == 0 and "skipping the broken checkpoint" in done.stdout, done.stderr
    assert list(out.glob("old_*/candidates_round_2.parquet"))
    assert_same_run(unbroken, out)


def test_parts_of_other_constants_are_refused_and_a_broken_part_is_mined_again(rce, mined, run, tmp_path):
    out = tmp_path / "run"
    script = rce(STAGE="mine")
    trainer = script.RCETrainer()
    trainer.run.open_files()
    trainer.run.save()
    trainer.run.signal = signal.SIGTERM
    assert not trainer.mine(out / "candidates_round_1.parquet")
    trainer.run.lock.release()
    done = run("STAGE=mine", f"OUTPUT_DIR={out}", "GROUP_SIZE=5")
    assert (
        done.returncode == 2
        and "was mined with GROUP_SIZE = 6; it is 5 now" in done.stderr
        and "Traceback" not in done.stderr
    )
    os.truncate(out / "candidates_round_1.parts/00000000.parquet", 100)
    done = run("STAGE=mine", f"OUTPUT_DIR={out}")
    assert done.returncode == 0 and "mining it again" in done.stdout, done.stderr
    assert pq.read_table(out / "candidates_round_1.parquet").equals(pq.read_table(mined))


def test_candidates_changed_under_a_run_are_refused(run, tmp_path):
    out = tmp_path / "run"
    assert run(*words(out, ROUNDS=1, MAX_STEPS=2)).returncode == 0
    path = out / "candidates_round_1.parquet"
    path.write_bytes(path.read_bytes() + b" ")
    done = run(*words(out, ROUNDS=1, MAX_STEPS=3))
    assert done.returncode == 2 and "is not the file that this run was trained on" in done.stderr


def test_more_rounds_go_on_from_a_finished_run(unbroken, run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    done = run(*words(out))
    assert done.returncode == 0 and "Done at step" in done.stdout, done.stderr
    done = run(*words(out, ROUNDS=3))
    assert (
        done.returncode == 0
        and "Changed since the checkpoint: ROUNDS was 2, is 3" in done.stdout
        and (out / "candidates_round_3.parquet").exists()
    ), done.stderr


@pytest.mark.parametrize(
    "word, says",
    [
        ("STAGE=train", "run STAGE=mine first"),
        ("STAGE=dig", "STAGE = 'dig' is unknown"),
        ("REWARD_MODE=hard", "hard_only or soft_only"),
        ("SAMPLE_TEMPERATURES=[0]", "SAMPLE_TEMPERATURES = [0]"),
        ("ANSWER_FORM=####", "must contain {answer} once"),
        ("TAU=0", "TAU = 0.0 is out of range"),
        ("CANDIDATES=/no/such.parquet", "there are no candidates at /no/such.parquet"),
        ("TEMPERATURES=[1]", "did you mean"),
    ],
)
def test_errors_are_one_sentence(rce, word, says):
    script = rce()
    with pytest.raises(script.UserError, match=re.escape(says)):
        script.apply_overrides([word])
        script.RCETrainer().train()


def test_an_error_at_the_command_line_is_one_sentence_and_exit_code_2(run, tmp_path):
    done = run(f"OUTPUT_DIR={tmp_path / 'run'}", "STAGE=train")
    assert done.returncode == 2 and "run STAGE=mine first" in done.stderr and "Traceback" not in done.stderr


def test_data_without_answers_is_said_to_need_them(rce):
    data = [{"path": str(TINY / "train.jsonl"), "type": "jsonl", "input": "problem"}]
    script = rce(TRAIN_DATASETS=data, EVAL_DATASETS=[])
    with pytest.raises(script.UserError, match="CHEAP_SIGNAL = 'gt_prob' needs gold answers"):
        script.RCETrainer().mine_chunk(script.RCETrainer().train_rows[:2])
    script = rce(
        TRAIN_DATASETS=data,
        EVAL_DATASETS=[],
        CHEAP_SIGNAL="logprob",
        REWARD_FUNCTIONS=[("answer_format", 1.0)],
        HARD_REWARD="answer_format",
        SOFT_REWARD="answer_format",
    )
    assert all(
        c["gt_prob"] is None and c["hard"] in (0, 1)
        for c in script.RCETrainer().mine_chunk(script.RCETrainer().train_rows[:2])
    )


def test_grpo_goes_on_from_its_checkpoint(unbroken, started, tmp_path):
    out = tmp_path / "run"
    done = started("grpo/grpo.py", f"ACTOR_MODEL={unbroken / 'best/policy'}", f"OUTPUT_DIR={out}")
    assert done.returncode == 0 and (out / "step_2/policy/model.safetensors").exists(), done.stderr


# ---------------------------------------------------------------- what an audit found


@pytest.fixture(scope="module")
def merging(tmp_path_factory):
    """A random model whose tokenizer, a BPE over characters, makes one token of `{-` and of `#7`."""
    from tokenizers import Tokenizer, decoders, models

    words = ["<pad>", "<eos>", *"\\boxed{}-57a#\n", "{-", "#7"]
    merges = [("{", "-"), ("#", "7")]
    bpe = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges, unk_token="<pad>"))
    bpe.decoder = decoders.Fuse()
    folder = tmp_path_factory.mktemp("merging")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder / "model")
    save_random_model(folder / "model", vocabulary=len(words), seed=4, std=0.4)
    answers = ["\\boxed{-5}", "\\boxed{5}", ["\\boxed{5}", "\\boxed{-5}", "\\boxed{57}"]]
    lines = [json.dumps({"problem": p, "solution": s}) + "\n" for p, s in zip(("a5", "a7", "aa"), answers)]
    (folder / "data.jsonl").write_text("".join(lines))
    data = [{"path": str(folder / "data.jsonl"), "type": "jsonl", "input": "problem", "output": "solution"}]
    return dict(
        ACTOR_MODEL=str(folder / "model"),
        TRAIN_DATASETS=data,
        EVAL_DATASETS=[],
        MAX_NEW_TOKENS=20,
        ANSWER_FORM="\\boxed{{answer}}",
    )


BOXED = ["\\", "b", "o", "x", "e", "d"]


@pytest.mark.parametrize(
    "said, answer, working, golds",
    [
        ("a\\boxed{5}", "5", [*"a", *BOXED, "{"], [["5", "}"]]),
        ("a\\boxed{5}", "-5", ["a", *BOXED], [["{-", "5", "}"]]),
        # never with the candidate's own sign
        ("a\\boxed{-5}", "7", ["a", *BOXED, "{"], [["7", "}"]]),
        ("a\\boxed{-5}", "-7", ["a", *BOXED], [["{-", "7", "}"]]),
        # all from one place, so that they exclude one another
        (
            "\\boxed{-5}\\boxed{7}",
            ["5", "-5", "57"],
            [*BOXED, "{-", "5", "}", *BOXED],
            [["{", "5", "}"], ["{-", "5", "}"], ["{", "5", "7", "}"]],
        ),
        ("a", "5", ["a", "\n", *BOXED, "{"], [["5", "}"]]),
        ("a", "-5", ["a", "\n", *BOXED], [["{-", "5", "}"]]),
    ],
)
def test_the_working_ends_where_the_gold_ids_begin(rce, merging, said, answer, working, golds):
    script = rce(**merging)
    tokenizer = script.RCETrainer().tokenizer
    answers = [answer] if isinstance(answer, str) else answer
    row = {"answer": [f"\\boxed{{{one}}}" for one in answers]}
    before, found = script.gold_after_working(tokenizer, row, tokenizer(said)["input_ids"] + [1])
    assert tokenizer.convert_ids_to_tokens(before) == working
    assert [tokenizer.convert_ids_to_tokens(ids) for ids, _ in found] == golds


@torch.no_grad()
def test_gt_prob_of_a_negative_answer_is_the_policys_own(rce, merging):
    trainer = rce(**merging).RCETrainer()
    rows, ids_of = trainer.train_rows, trainer.tokenizer.convert_tokens_to_ids
    says = (["a", *BOXED, "{", "5", "}"], ["a", *BOXED, "{-", "7", "}"], ["7", "7"])
    each = [(row, [*ids_of(tokens), 1]) for row in rows for tokens in says]
    candidates = [{"prompt_id": row["id"], "token_ids": ids} for row, ids in each]
    trainer.score_gold(candidates)
    wanted = []
    marks = (BOXED, [*BOXED, "{"], BOXED)  # up to where every gold answer of the row begins
    for row, golds, mark in zip(rows, (["{-5}"], ["5}"], ["{5}", "{-5}", "{57}"]), marks):
        golds = [trainer.tokenizer(gold)["input_ids"] for gold in golds]
        for before in (["a", *mark], ["a", *mark], ["7", "7", "\n", *mark]):
            wanted.append(sum(probability(trainer, row["ids"] + ids_of(before), ids) for ids in golds))
    assert [c["gt_prob"] for c in candidates] == pytest.approx(wanted, rel=1e-4) and min(wanted) > 0


def test_a_mark_that_is_one_token_with_the_answer_is_the_answers(rce, merging):
    script = rce(**{**merging, "ANSWER_FORM": "#{answer}"})
    tokenizer = script.RCETrainer().tokenizer
    ids = tokenizer("a#5")["input_ids"]
    before, ((gold, _),) = script.gold_after_working(tokenizer, {"answer": "7"}, ids)
    assert tokenizer.convert_ids_to_tokens(before + gold) == ["a", "#7", "<eos>"] and len(before) == 1
    assert script.gold_after_working(tokenizer, {"answer": None}, [5]) == ([], [])


def test_a_mark_of_characters_of_several_tokens_is_whole_in_the_working(rce, monkeypatch):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {letter: i for i, letter in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    bytewise = Tokenizer(models.BPE(alphabet, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    script = rce(ANSWER_FORM="→{answer}")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<eos>")
    ids = tokenizer("2+2→4")["input_ids"]
    before, ((gold, _),) = script.gold_after_working(tokenizer, {"answer": "-5"}, ids)
    assert len(ids) == 7 and before == ids[:6] and tokenizer.decode(gold[:2]) == "-5"


def test_a_log_probability_of_exactly_zero_is_the_likeliest(rce):
    certain = candidate(1, logprob=0.0)
    assert rce().policy_pick([candidate(0, logprob=-0.5), certain, candidate(0, logprob=None)]) == 1


def flat_rng(script):
    """The generators' states as something that == compares."""
    return {key: x.tolist() if isinstance(x, torch.Tensor) else x for key, x in walk(script.get_rng_state())}


def test_evaluating_and_validating_take_nothing_from_the_random_streams_of_training(rce, mined):
    script = rce(STAGE="train", CANDIDATES=str(mined))
    trainer, before = prepared(script), flat_rng(script)
    first = trainer.evaluate()
    assert trainer.validate() and flat_rng(script) == before
    torch.manual_seed(99)
    assert trainer.evaluate() == first


def test_evaluation_logs_the_mean_of_each_part(rce):
    def length(prompts, responses, answers):
        seen.append([float(len(r)) for r in responses])
        return seen[-1]

    seen = []
    metrics = rce(REWARD_FUNCTIONS=[(length, 0.5)], EVAL_SAMPLES=2).RCETrainer().evaluate()
    mean = sum(seen[0]) / len(seen[0])
    assert len(seen[0]) == 8 and max(seen[0]) > mean
    assert metrics["reward/length"] == pytest.approx(mean) and metrics["reward"] == pytest.approx(mean / 2)


def after_evaluations(trainer, monkeypatch, values):
    """At which of these picks' accuracies best/ was saved; the patience and the halvings after each."""
    saved, patience, halvings = [], [], []

    def write_best(metrics, policy, weights, folder):
        folder.mkdir()
        saved.append(metrics["pick_accuracy"])

    monkeypatch.setattr(trainer.run, "write_best", write_best)
    monkeypatch.setattr(trainer.run, "write_metrics", lambda *x: None)
    others = "reward", "accuracy_greedy"  # these fall all the time
    monkeypatch.setattr(trainer, "evaluate", lambda: dict.fromkeys(others, -len(patience)))
    for value in values:
        monkeypatch.setattr(trainer, "validate", lambda: {"pick_accuracy": value})
        trainer.run.log_evaluation(trainer.measure())
        patience.append(trainer.run.evals_since_best)
        halvings.append(trainer.run.halvings)
    return saved, patience, halvings


def test_a_pick_that_is_hardly_better_does_not_renew_patience(rce, monkeypatch):
    trainer = rce(EARLY_STOPPING_THRESHOLD=0.2).RCETrainer()
    assert after_evaluations(trainer, monkeypatch, [0.3, 0.4, 0.45])[1] == [0, 1, 2]


def test_best_is_the_highest_pick_and_patience_counts_from_the_last_one_counted(rce, monkeypatch):
    trainer = rce(EARLY_STOPPING_THRESHOLD=0.2).RCETrainer()
    saved, patience, _ = after_evaluations(trainer, monkeypatch, [0.3, 0.4, 0.35, 0.45, 0.51, 0.51, 0.2])
    assert saved == [0.3, 0.4, 0.45, 0.51, 0.51]  # of equal ones the later
    assert patience == [0, 1, 2, 3, 0, 1, 2]  # .51 passes .3 + .2


def test_plateau_halves_the_rate_each_time_that_patience_runs_out(rce, mined, monkeypatch):
    script = rce(
        STAGE="train",
        CANDIDATES=str(mined),
        EVAL_DATASETS=[],
        VALIDATION_FRACTION=0.0,
        BATCH_SIZE=2,
        USE_LR_SCHEDULER=True,
        LR_SCHEDULER_TYPE="plateau",
        PLATEAU_PATIENCE=2,
        LEARNING_RATE=1e-3,
    )
    trainer = prepared(script)
    assert trainer.run.best_value == -math.inf  # nothing was evaluated yet
    _, _, halvings = after_evaluations(trainer, monkeypatch, [0.5, 0.4, 0.5, 0.1, 0.2])
    assert halvings == [0, 0, 1, 1, 2]
    metrics = trainer.update(trainer.next_batch())
    assert metrics["learning_rate"] == trainer.optimizers["policy"].param_groups[0]["lr"] == 1e-3 / 4


def test_early_stopping_ends_the_run(rce):
    trainer = rce(EARLY_STOPPING_PATIENCE=2).RCETrainer()
    for evaluations, goes_on in ((1, True), (2, False)):
        trainer.run.evals_since_best = evaluations
        trainer.run.total_steps = 9
        assert trainer.run.is_over() != goes_on


def test_at_another_temperature_the_loss_is_of_the_tempered_policy(step):
    trainer, batch = step(TEMPERATURE=0.7, TAU=0.5, LENGTH_NORMALISE=False)
    expected = 0.0
    with torch.no_grad():
        for row, c, weight in zip(batch.rows, batch.candidates, batch.weights.tolist()):
            ids = c["token_ids"]
            logits = trainer.actor(torch.tensor([row["ids"] + ids])).logits[0, len(row["ids"]) - 1 : -1]
            logprobs = (logits.double() / 0.7).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])
            expected -= weight * logprobs.sum().item() / batch.num_prompts
    assert trainer.update(batch)["policy_loss"] == pytest.approx(expected, rel=1e-4)


def test_at_another_temperature_a_candidates_logprob_is_of_the_tempered_policy(rce):
    trainer = rce(TEMPERATURE=0.7, GROUP_SIZE=2, BEAMS=0, SAMPLE_TEMPERATURES=[1.0]).RCETrainer()
    for c in trainer.mine_chunk(trainer.train_rows[:2]):
        before, ids = trainer.rows[c["prompt_id"]]["ids"], c["token_ids"]
        with torch.no_grad():
            logits = trainer.actor(torch.tensor([before + ids])).logits[0, len(before) - 1 : -1]
        logprobs = (logits.double() / 0.7).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])
        assert c["logprob"] == pytest.approx(logprobs.sum().item(), rel=1e-4, abs=1e-4)


def test_samples_are_drawn_at_their_own_temperature(rce):
    trainer = rce(TEMPERATURE=1.0, SAMPLE_TEMPERATURES=[0.001, 2.0], GROUP_SIZE=6, BEAMS=0).RCETrainer()
    for group in trainer.propose(trainer.train_rows[:3]):
        cold = [c for c in group if 0.001 in c["temperature"]]
        assert len(cold) == 1 and cold[0]["temperature"].count(0.001) == 3 and "greedy" in cold[0]["source"]
        assert len(group) > 1


def test_each_prompt_round_and_use_has_a_random_stream_of_its_own(rce):
    script = rce()
    trainer = script.RCETrainer()
    first, second = trainer.train_rows[:2]

    def draw(row, use):
        return torch.rand(2, generator=trainer.prompt_generator(row, use)).tolist()

    drawn = [draw(first, "a"), draw(second, "a"), draw(first, "b")]
    assert draw(first, "a") == drawn[0]
    trainer.state.round = 2
    drawn.append(draw(first, "a"))
    script.SEED += 1
    drawn.append(draw(first, "a"))
    assert len(set(map(tuple, drawn))) == 5


def test_so_many_others_are_verified_at_random(rce):
    trainer = rce(
        VERIFY_TOP=1, VERIFY_RANDOM=2, GREEDY=False, BEAMS=0, GROUP_SIZE=8, SAMPLE_TEMPERATURES=[1.5]
    ).RCETrainer()
    trainer.verify = lambda candidates: None  # so that no second look adds to those chosen
    records, ranks = trainer.mine_chunk(trainer.train_rows[:4]), set()
    for row in trainer.train_rows[:4]:
        group = sorted((c for c in records if c["prompt_id"] == row["id"]), key=lambda c: -c["gt_prob"])
        verified = [i for i, c in enumerate(group) if c["eval_mode"] == "verified"]
        assert len(group) > 4 and verified[0] == 0 and len(verified) == 3
        ranks.add(tuple(verified))
    assert len(ranks) > 1  # not always the same ones


def test_weights_can_be_of_scaled_rewards(step):
    trainer, batch = step(WEIGHT_REWARDS="zscore", REWARD_MODE="hard_plus_soft", TAU=0.5)
    wanted = {}
    for row in trainer.train_rows:
        rewards = torch.tensor(row["rewards"], dtype=torch.float64)
        wanted[row["id"]] = ((rewards - rewards.mean()) / (rewards.std() + 1e-4) / 0.5).softmax(0).tolist()
    got = {}
    for row, weight in zip(batch.rows, batch.weights.tolist()):
        got.setdefault(row["id"], []).append(weight)
    assert len(got) == 8 and all(got[key] == pytest.approx(wanted[key], rel=1e-5) for key in got)


def test_where_the_verified_are_all_wrong_the_others_are_verified_too(rce):
    trainer = rce(VERIFY_TOP=2, VERIFY_RANDOM=0).RCETrainer()
    rows = trainer.train_rows[:2]
    texts = [[rows[0]["answer"], "no", "no"], ["no", "no", rows[1]["answer"]]]

    def propose(rows):
        return [
            [
                {
                    "prompt_id": row["id"],
                    "prompt": row["prompt"],
                    "token_ids": [5 + i, 1],
                    "text": text,
                    "source": ["sample"],
                }
                for i, text in enumerate(group)
            ]
            for row, group in zip(rows, texts)
        ]

    def score_gold(candidates):
        for c in candidates:
            c["gt_prob"] = 1 / c["token_ids"][0]  # falls along the group

    trainer.propose, trainer.score_gold = propose, score_gold
    trainer.sequence_logprobs = lambda candidates: [-1.0] * len(candidates)
    records = trainer.mine_chunk(rows)
    assert [c["hard"] for c in records] == [1, 0, None, 0, 0, 1]
    assert [c["eval_mode"] for c in records] == [
        "verified",
        "verified",
        "cheap",
        "verified",
        "verified",
        "verified",
    ]


def test_weights_shrink_by_weight_decay_and_gradients_are_clipped(rce, mined):
    trainer = prepared(
        rce(
            STAGE="train",
            CANDIDATES=str(mined),
            EVAL_DATASETS=[],
            BATCH_SIZE=2,
            WEIGHT_DECAY=0.5,
            USE_LR_SCHEDULER=False,
            LEARNING_RATE=0.1,
            MAX_GRAD_NORM=1e-3,
        )
    )
    batch, norms, take = trainer.next_batch(), [], trainer.optimizers["policy"].step

    def spy():
        norms.append(torch.cat([p.grad.flatten() for p in trainer.actor.parameters()]).norm().item())
        for p in trainer.actor.parameters():
            p.grad.zero_()
        take()

    trainer.optimizers["policy"].step = spy
    before = [p.detach().clone() for p in trainer.actor.parameters()]
    metrics = trainer.update(batch)
    assert metrics["grad_norm"] > 1e-2 and norms == pytest.approx([1e-3], rel=1e-3)
    for p, q in zip(trainer.actor.parameters(), before):
        torch.testing.assert_close(p.detach(), q * (1 - 0.1 * 0.5), rtol=1e-5, atol=0)


def test_the_schedule_reaches_the_optimizer(rce, mined):
    trainer = prepared(
        rce(
            STAGE="train",
            CANDIDATES=str(mined),
            EVAL_DATASETS=[],
            BATCH_SIZE=2,
            USE_LR_SCHEDULER=True,
            LR_SCHEDULER_TYPE="linear",
            WARMUP_STEPS=2,
            MAX_STEPS=4,
            NUM_EPOCHS=4,
            LEARNING_RATE=1e-6,
        )
    )
    assert trainer.run.total_steps == 4
    batch, rates = trainer.next_batch(), []
    for trainer.run.step in range(1, 5):
        rates.append(trainer.update(batch)["learning_rate"])
        assert trainer.optimizers["policy"].param_groups[0]["lr"] == rates[-1]
    assert rates == pytest.approx([x * 1e-6 for x in (1 / 2, 1, 1, 1 / 2)])


def test_a_second_end_that_the_generation_config_names_ends_every_proposal(rce, tmp_path):
    path, (newline, _) = policy_with_two_ends(tmp_path / "policy")
    trainer = rce(ACTOR_MODEL=path).RCETrainer()
    candidates = [c for group in trainer.propose(trainer.train_rows[:3]) for c in group]
    assert {source for c in candidates for source in c["source"]} == {"greedy", "beam", "sample"}
    assert any(c["token_ids"][-1] == newline for c in candidates)
    for c in candidates:
        *before, last = c["token_ids"]
        assert newline not in before and c["truncated"] == (last not in (1, newline))


def test_beams_know_every_end(rce, monkeypatch):
    trainer, ends = rce().RCETrainer(), []
    trainer.eos_ids = torch.tensor([1, 9])
    generate = trainer.actor.generate

    def spy(*inputs, generation_config, **options):
        ends.append(generation_config.eos_token_id)
        return generate(*inputs, generation_config=generation_config, **options)

    monkeypatch.setattr(trainer.actor, "generate", spy)
    trainer.propose(trainer.train_rows[:1])
    assert ends == [[1, 9]]


def test_every_proposal_goes_to_its_own_prompt(rce, monkeypatch):
    script = rce(SAMPLE_TEMPERATURES=[1.0])
    trainer = script.RCETrainer()

    def respond(model, tokenizer, prompts, uniform, group_size=1, temperature=None):
        ids = [[10 + i, 1] for i in range(len(prompts)) for _ in range(group_size)]
        batch = script.make_batch([prompt for prompt in prompts for _ in range(group_size)], ids, "cpu")
        batch.logprobs = script.batch_logprobs(model, batch, script.full_logprobs)
        batch.columns = {"response_ids": ids}
        return batch

    def beam_search(model, prompts, eos, pad_id):
        return [[30 + i, beam, 1] for i in range(len(prompts)) for beam in (2, 3)]

    monkeypatch.setattr(script, "respond", respond)
    monkeypatch.setattr(script, "beam_search", beam_search)
    for i, group in enumerate(trainer.propose(trainer.train_rows[:3])):
        assert [c["token_ids"] for c in group] == [[10 + i, 1], [30 + i, 2, 1], [30 + i, 3, 1]]
        assert [c["source"] for c in group] == [["greedy"] + ["sample"] * 6, ["beam"], ["beam"]]


def test_candidates_that_differ_in_their_last_token_stay_two(rce, monkeypatch):
    script = rce(GREEDY=False, GROUP_SIZE=1, SAMPLE_TEMPERATURES=[1.0])
    trainer = script.RCETrainer()

    def beam_search(model, prompts, eos, pad_id):
        return [[5, 6, 1], [5, 6, 7]] * len(prompts)

    monkeypatch.setattr(script, "beam_search", beam_search)
    for group in trainer.propose(trainer.train_rows[:2]):
        assert [c["token_ids"] for c in group][:2] == [[5, 6, 1], [5, 6, 7]]
        assert [c["truncated"] for c in group][:2] == [False, True]


def given(script, rows, path):
    """Candidates of some prompts, a right one and a wrong one each, written by hand."""
    records = []
    for row in rows:
        for hard in (1, 0):
            facts = {"prompt_id": row["id"], "prompt": row["prompt"], "token_ids": [5 + hard, 1]}
            records.append({**candidate(hard), **facts, "truncated": False, "eval_error": None})
    script.write_parquet(records, path, {})


@pytest.fixture
def second_round(rce, tmp_path):
    """A trainer before its second round, and the prompts of the first: 10 of 24, of which 2 are held back."""
    script = rce(MINE_PROMPTS=10, ROUNDS=4, EVAL_DATASETS=[])
    trainer = script.RCETrainer()
    trainer.run.open_files()
    first = trainer.round_rows()
    given(script, first, tmp_path / "run/candidates_round_1.parquet")
    trainer.prepare_round()
    trainer.run.step, trainer.state.round = 3, 2
    yield script, trainer, first
    trainer.run.lock.release()


def test_later_rounds_go_on_where_the_one_before_ended_and_leave_no_prompt_out(second_round):
    script, trainer, first = second_round
    assert len(first) == 10 and len(trainer.held_back) == 2
    trained = [row["id"] for row in first if row["prompt"] not in trainer.held_back]
    for trainer.state.round in (2, 3, 4):
        trained += [row["id"] for row in trainer.round_rows()]
    assert len(trained) == 4 * 8 and len(set(trained[:22])) == 22  # every prompt but those held back
    assert trained[22:] == trained[:10]  # then from the start


def test_the_second_round_validates_on_the_prompts_that_the_first_held_back(second_round, tmp_path):
    script, trainer, first = second_round
    held_back, rows = set(trainer.held_back), trainer.round_rows()
    given(script, rows, tmp_path / "run/candidates_round_2.parquet")
    trainer.prepare_round()
    assert trainer.held_back == held_back == {row["prompt"] for row, _ in trainer.validation}
    assert held_back <= {row["prompt"] for row in first}
    # none of its own is held back
    assert {row["id"] for row in trainer.train_rows} == {row["id"] for row in rows}


def test_candidates_of_a_round_given_up_are_put_aside(rce, tmp_path):
    out = tmp_path / "run"
    script = rce(ROUNDS=2, EVAL_DATASETS=[], RESUME="yes")
    trainer = script.RCETrainer()
    trainer.run.open_files()
    trainer.run.save()
    trainer.run.lock.release()
    for number in (1, 2):
        given(script, trainer.train_rows[:4], out / f"candidates_round_{number}.parquet")
    again = script.RCETrainer()
    assert again.run.checkpoint == out / "step_0"
    again.run.is_over = lambda: True  # as after a signal before its first step
    again.train()
    assert (out / "candidates_round_1.parquet").exists() and not (out / "candidates_round_2.parquet").exists()
    assert list(out.glob("old_*/candidates_round_2.parquet"))


def test_each_line_of_samples_is_of_one_candidate_and_metrics_are_means(step):
    trainer, batch = step(LOG_SAMPLES=3, TAU=1.0, REWARD_MODE="hard_plus_soft")
    metrics = trainer.update(batch)
    n = len(batch.rows)
    batch.rewards, batch.weights = [i / 4 for i in range(n)], torch.arange(n) / 8
    parts = [{"source": [f"source {i}"], "hard": i, "soft": i + 1, "gt_prob": i + 2} for i in range(n)]
    batch.candidates = [{"text": f"text {i}", **parts[i]} for i in range(n)]
    trainer.run.next_step()
    trainer.record(batch, metrics)
    for i, sample in zip((0, (n - 1) // 2, n - 1), read(trainer.run.logs["samples.jsonl"].name), strict=True):
        assert sample == {
            "step": 1,
            **{key: batch.rows[i][key] for key in ("id", "prompt", "answer")},
            "response": f"text {i}",
            **parts[i],
            "reward": i / 4,
            "weight": i / 8,
        }
    record = next(r for r in read(trainer.run.logs["metrics.jsonl"].name) if r["phase"] == "train")
    weighted = sum(i * i for i in range(n)) / 32 / batch.num_prompts
    wanted = {"reward": (n - 1) / 8, "weighted_reward": weighted, "candidates": n}
    assert {key: record[key] for key in wanted} == pytest.approx(wanted, rel=1e-5)
    assert record["response_length"] == pytest.approx(batch.response_lengths.float().mean().item())


@pytest.mark.parametrize("sizes", [[5, 5, 5, 5, 4], [23, 1], [24]])
def test_an_epoch_gives_every_prompt_once_and_the_next_one_in_another_order(rce, sizes):
    script = rce(BATCH_SIZE=sizes[0])
    trainer = script.RCETrainer()
    epochs = []
    for _ in range(3):
        parts = [script.next_rows(trainer.train_rows, trainer.state, sizes[0]) for _ in sizes]
        assert [len(part) for part in parts] == sizes
        epochs.append([row["id"] for part in parts for row in part])
    everything = sorted(row["id"] for row in trainer.train_rows)
    assert len(everything) == 24 and all(sorted(epoch) == everything for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_prompt_of_exactly_the_greatest_length_is_kept_and_one_longer_is_not(rce):
    lengths = [len(row["ids"]) for row in rce().RCETrainer().train_rows]
    bound = next(n for n in sorted(set(lengths)) if n + 1 in lengths)
    trainer = rce(MAX_PROMPT_TOKENS=bound).RCETrainer()
    assert [len(row["ids"]) for row in trainer.train_rows] == [n for n in lengths if n <= bound]


def test_rewards_are_flat_only_where_they_are_equal():
    assert module.is_flat([0.1 + 0.2, 0.3]) and not module.is_flat([0.5, 0.501, 0.5])


def test_the_check_ups_pick_is_the_greedy_response_else_the_likeliest(rce):
    greedy = candidate(1, source=["greedy"], temperature=[None], logprob=-3.0)
    groups = [[candidate(0, logprob=-0.5), greedy], [candidate(0, logprob=-4.0), candidate(1, logprob=-2.0)]]
    assert [rce().policy_pick(group) for group in groups] == [1, 1]
    assert rce().policy_pick([candidate(0, logprob=-1.0), candidate(0, logprob=-2.0, beam_score=-2.0)]) == 1


def test_failed_candidates_are_neither_trained_nor_validated_on(rce, tmp_path):
    path = tmp_path / "given.parquet"
    script = rce(STAGE="train", CANDIDATES=str(path), EVAL_DATASETS=[], VALIDATION_FRACTION=0.5)
    records = []
    for row in script.RCETrainer().train_rows[:4]:
        facts = {"prompt_id": row["id"], "prompt": row["prompt"], "truncated": False, "eval_error": None}
        records += [{**candidate(hard), **facts, "token_ids": [5 + hard, 1]} for hard in (0, 1)]
        records.append({**candidate(0, eval_failed=True), **facts, "token_ids": [9, 1]})  # and called wrong
    script.write_parquet(records, path, {})
    trainer = prepared(script)
    trainer.run.lock.release()
    groups = [row["candidates"] for row in trainer.train_rows] + [
        candidates for _, candidates in trainer.validation
    ]
    assert len(trainer.train_rows) == len(trainer.validation) == 2
    assert all([c["token_ids"] for c in group] == [[5, 1], [6, 1]] for group in groups)


def test_a_kill_while_a_file_of_candidates_is_written_does_not_keep_the_run_from_going_on(rce, tmp_path):
    out = tmp_path / "run"
    script = rce(ROUNDS=2, EVAL_DATASETS=[], RESUME="yes")
    trainer = script.RCETrainer()
    trainer.run.open_files()
    trainer.run.save()
    trainer.run.lock.release()
    given(script, trainer.train_rows[:4], out / "candidates_round_1.parquet")
    for name in ("1.parquet.tmp", "2.parquet.tmp"):  # half written
        (out / f"candidates_round_{name}").write_bytes(b"PAR1")
    again = script.RCETrainer()
    again.run.is_over = lambda: True  # as after a signal before its first step
    again.train()
    assert (out / "candidates_round_1.parquet").exists()
    assert not list(out.rglob("*.tmp"))


@pytest.mark.parametrize("error", [KeyError("x"), ZeroDivisionError("no"), RuntimeError("a")])
def test_whatever_a_reward_raises_for_one_candidate_is_written_into_it(rce, error):
    def picky(prompts, responses, answers):
        if "odd" in responses:
            raise error
        return [float(r == "right") for r in responses]

    constants = {"REWARD_FUNCTIONS": [(picky, 1.0)], "HARD_REWARD": "picky", "SOFT_REWARD": "picky"}
    script = rce(EVAL_DATASETS=[], **constants)
    trainer = script.RCETrainer()
    row = trainer.train_rows[0]
    some = [
        {"prompt_id": row["id"], "text": text, "token_ids": [5], "eval_failed": False, "eval_error": None}
        for text in ("right", "odd", "wrong")
    ]
    some[1]["hard"] = None  # as choose_verified() leaves it
    trainer.verify(some)
    assert [c["hard"] for c in some] == [1, None, 0]
    assert [c["eval_failed"] for c in some] == [False, True, False]
    assert some[1]["eval_error"] == f"{type(error).__name__}: {error} (raised by the reward function picky)"


# ---------------------------------------------------------------- which constant is handed where
# Every value differs from the default and from its neighbours': one in another's place is seen.


def even(prompts, responses, answers):
    return [float(n % 2 == 0) for n in digits(prompts, responses, answers)]


def share(prompts, responses, answers):
    return [n / 30 for n in vowels(prompts, responses, answers)]


def hundredths(prompts, responses, answers):
    return [len(response) / 100 for response in responses]


def odd(prompts, responses, answers):
    return [1 - value for value in even(prompts, responses, answers)]


FUNCTIONS = [(even, 0.6), (share, 0.2), (hundredths, 0.0), (odd, 0.0)]
LEARNT = {"policy_loss", "norm", "gradient"}
WEIGHED = {"weights", *LEARNT}
SHAPED = {"shaped", *WEIGHED}
VERIFIED = {"eval_mode", "hard", "soft", *SHAPED}
PROPOSED = {"proposed", "logprob", "gt_prob", *VERIFIED}
PROMPTS = {"asked", "held_back", "evaluation", *PROPOSED}
MINED = {  # its value, another, and what that alone changes
    "REWARD_FUNCTIONS": (FUNCTIONS, [(even, 0.7), *FUNCTIONS[1:]], {"evaluation"}),
    "REWARD_MODEL_WEIGHT": (0.31, 0.37, {"evaluation"}),
    "HARD_REWARD": ("even", "odd", {"hard", *SHAPED}),
    "SOFT_REWARD": ("share", "hundredths", {"soft"}),
    "ANSWER_FORM": ("= {answer}", "* {answer}", {"gt_prob", *VERIFIED}),
    "GOLD_FULL_COUNT": (2, 3, {"gt_prob"}),
    "MINE_PROMPTS": (6, 5, PROMPTS),
    "GREEDY": (True, False, PROPOSED),
    "BEAMS": (2, 3, PROPOSED),
    "GROUP_SIZE": (7, 8, PROPOSED),
    "SAMPLE_TEMPERATURES": ([0.9, 1.6], [0.9, 1.5], PROPOSED),
    "CHEAP_SIGNAL": ("gt_prob", "logprob", VERIFIED),
    "VERIFY_TOP": (4, 5, VERIFIED),
    "VERIFY_RANDOM": (1, 3, VERIFIED),
    "MAX_PROMPT_TOKENS": (38, 29, PROMPTS),
    "MAX_NEW_TOKENS": (10, 12, {"evaluation", *PROPOSED}),
    "TEMPERATURE": (1.7, 2.5, {"evaluation", *PROPOSED} - {"proposed", "shaped", "weights"}),
    "MAX_TRAIN_PROMPTS": (29, 40, PROMPTS),
    "SEED": (11, 12, PROMPTS),
}
TRAINED = {  # and of what has no part in mining
    "VALIDATION_FRACTION": (0.34, 0.51, {"asked", "held_back", "evaluation", "plan", "rates", *SHAPED}),
    "REWARD_MODE": ("hybrid", "hard_plus_soft", SHAPED),
    "HYBRID_SCORE": ("share", "logprob", SHAPED),
    "SIMILARITY_WEIGHT": (0.13, 0.17, SHAPED),
    "SIMILARITY": ("hundredths", "share", SHAPED),
    "ACCURACY_FUNCTION": (even, share, {"evaluation"}),
    "EVAL_SAMPLES": (2, 3, {"evaluation"}),
    "BATCH_SIZE": (3, 4, {"asked", "plan", "rates", *WEIGHED}),
    "GRADIENT_ACCUMULATION_STEPS": (1, 2, {"asked", "plan", "rates", *WEIGHED}),
    "TAU": (0.23, 0.29, WEIGHED),
    "TAU_END": (0.37, 0.41, WEIGHED),
    "WEIGHT_REWARDS": ("zscore", "raw", WEIGHED),
    "LENGTH_NORMALISE": (True, False, LEARNT),
    "LEARNING_RATE": (1e-3, 2e-3, {"rates"}),
    "MAX_GRAD_NORM": (0.041, 0.043, {"gradient"}),
    "USE_LR_SCHEDULER": (True, False, {"rates"}),
    "LR_SCHEDULER_TYPE": ("cosine", "linear", {"rates"}),
    "WARMUP_STEPS": (5, 6, {"rates"}),
    "NUM_EPOCHS": (5, 6, {"plan", "rates", *WEIGHED}),
    "ROUNDS": (3, 4, {"plan", "rates", *WEIGHED}),
    "MAX_STEPS": (131, 12, {"plan", "rates", *WEIGHED}),
    "MAX_EVAL_PROMPTS": (3, 2, {"evaluation"}),
}
CONSTANTS = {**MINED, **TRAINED}


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """one_step(KEY=value, ...): the module, the trainer, and what its first round and its eighth step were
    like with CONSTANTS but for these: mined by one policy, trained on by one that has moved on. Where these
    have no part in mining, the candidates are those of the first call."""
    constants = {**SMALL, **{name: value for name, (value, _, _) in CONSTANTS.items()}}
    constants |= tiny_files(tmp_path_factory.mktemp("constants"))
    del constants["REFERENCE_MODEL"]
    script = load_script("rce/rce.py", **constants)
    first = script.RCETrainer()
    weights = copy.deepcopy(first.actor.state_dict())
    script.check_models = lambda *_: None  # once is enough
    mined = []

    class Spy(script.RCETrainer):
        def load_models(self):
            """Those that are there."""
            names = "tokenizer actor pad_id eos_ids models models_by_constant reward_model"
            names += " reward_tokenizer optimizers"
            for name in names.split():
                setattr(self, name, getattr(first, name))
            self.reward_functions = script.resolve_rewards(script.REWARD_FUNCTIONS, "REWARD_FUNCTIONS")
            self.accuracy_function = script.resolve_rewards([(script.ACCURACY_FUNCTION, 1.0)], "")[0][1]

        def check_up(self, *_):
            self.state.responses = 5

        def update(self, batch):
            self.batch = batch
            nudge(self.actor, 1)
            self.metrics = super().update(batch)
            seen = dict(self.seen)
            for self.run.step in (3, 8):  # in the warm-up and after it
                seen["rates"] = [*seen["rates"], super().update(batch)["learning_rate"]]
            self.seen = seen
            return self.metrics

    def take_step(**changed):
        for name, value in {**constants, **changed}.items():
            setattr(script, name, value)
        first.actor.load_state_dict(weights)
        shutil.rmtree(script.OUTPUT_DIR, ignore_errors=True)
        trainer = Spy()
        path = script.candidates_path(1)
        path.parent.mkdir(exist_ok=True)
        if mined and not changed.keys() & MINED.keys():
            path.write_bytes(mined[0])
        trainer.weights = weights
        trainer.seen = {"rates": []}

        def keep_gradient():
            trainer.seen["gradient"] = torch.cat([p.grad.flatten() for p in trainer.actor.parameters()])

        def log_evaluation(metrics):
            trainer.seen["evaluation"] = metrics
            metrics.pop("responses")  # how many were proposed

        def eighth_step():
            begins = trainer.run.step == 0
            trainer.run.step = 8
            return begins

        trainer.optimizers["policy"].step = keep_gradient
        trainer.run.session = lambda summary: nullcontext()
        trainer.run.needs_first_evaluation = lambda: True
        trainer.run.log_evaluation = log_evaluation
        trainer.run.next_step = eighth_step
        trainer.run.is_due = lambda interval: False
        trainer.run.is_last_step = lambda: False
        trainer.run.save = lambda: None
        trainer.run.log = trainer.run.write_metrics = lambda *_: None
        trainer.run.is_over = iter([False, True]).__next__
        trainer.record = lambda batch, metrics: None
        trainer.train()
        mined.append(path.read_bytes())
        candidates = pq.read_table(path).to_pylist()
        trainer.candidates = candidates
        batch = trainer.batch
        proposal = ("prompt_id", "token_ids", "source", "temperature")
        columns = ("logprob", "gt_prob", "hard", "soft", "eval_mode")
        return (
            script,
            trainer,
            {
                **trainer.seen,
                "plan": [trainer.round_end, trainer.run.total_steps],
                "proposed": [[x[key] for key in proposal] for x in candidates],
                **{key: [x[key] for x in candidates] for key in columns},
                "held_back": sorted(trainer.held_back),
                "shaped": [row["rewards"] for row in trainer.train_rows],
                "asked": list(dict.fromkeys(row["id"] for row in batch.rows)),
                "weights": batch.weights,
                "policy_loss": trainer.metrics["policy_loss"],
                "norm": trainer.metrics["grad_norm"],
            },
        )

    yield take_step
    first.run.lock.release()


@pytest.fixture(scope="module")
def usual(one_step):
    return one_step()[2]


@pytest.mark.parametrize("name", CONSTANTS)
def test_each_constant_by_itself_changes_what_it_should_and_nothing_else(one_step, usual, name):
    _, value, wanted = CONSTANTS[name]
    assert differences(one_step(**{name: value})[2], usual) == wanted


def test_no_constant_of_the_algorithm_was_forgotten():
    elsewhere = {"MICRO_BATCH_ROWS", "REWARD_TIMEOUT", "WEIGHT_DECAY", "PLATEAU_PATIENCE"}
    elsewhere |= {"INCLUDE_REFERENCE"}  # above
    assert algorithm_of("rce/rce.py") - elsewhere <= CONSTANTS.keys()


def test_a_step_whose_constants_are_all_unlike_is_the_formulas_in_float64(one_step, usual):
    c, trainer, seen = one_step()

    def shuffled(values, seed):
        order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed)).tolist()
        return [values[i] for i in order]

    # which prompts are mined, held back, and asked first
    mined = list(dict.fromkeys(x["prompt_id"] for x in trainer.candidates))
    assert mined == shuffled(list(trainer.rows), c.SEED)[: c.MINE_PROMPTS]
    texts = [trainer.rows[key]["prompt"] for key in mined]
    assert seen["held_back"] == sorted(shuffled(texts, c.SEED)[: int(c.VALIDATION_FRACTION * len(texts))])
    left = [key for key in mined if trainer.rows[key]["prompt"] not in seen["held_back"]]
    assert [row["id"] for row in trainer.train_rows] == left
    asked = shuffled(left, c.SEED + 1)[: c.BATCH_SIZE * c.GRADIENT_ACCUMULATION_STEPS]
    assert seen["asked"] == asked
    a_round = c.NUM_EPOCHS * math.ceil(len(left) / (c.BATCH_SIZE * c.GRADIENT_ACCUMULATION_STEPS))
    assert seen["plan"] == [a_round, c.ROUNDS * a_round]

    # log-probabilities, each candidate alone
    policy = AutoModelForCausalLM.from_pretrained(c.ACTOR_MODEL, dtype=torch.float64)

    def logprobs(key, ids):
        before = trainer.rows[key]["ids"]
        logs = policy(torch.tensor([before + ids])).logits[0, len(before) - 1 : -1] / c.TEMPERATURE
        return logs.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]

    right = []
    with torch.no_grad():
        for candidate in trainer.candidates[:20]:
            key, ids = candidate["prompt_id"], candidate["token_ids"]
            assert candidate["logprob"] == pytest.approx(logprobs(key, ids).sum().item(), abs=1e-3)
            before, ((gold, weight),) = c.gold_after_working(trainer.tokenizer, trainer.rows[key], ids)
            wanted = logprobs(key, before + gold)[len(before) :].sum().exp().item() / c.GOLD_FULL_COUNT
            assert candidate["gt_prob"] == pytest.approx(wanted, rel=1e-2) and weight == 1 / c.GOLD_FULL_COUNT
        for _, candidates in trainer.validation:
            each = [logprobs(x["prompt_id"], x["token_ids"]).mean().item() for x in candidates]
            right.append(candidates[each.index(max(each))]["hard"])
    assert seen["evaluation"]["pick_accuracy"] == sum(right) / len(right)

    # rewards, weights, the loss, and its gradient at the moment the optimizer would step
    policy.load_state_dict(trainer.actor.state_dict())
    tau = c.TAU * (c.TAU_END / c.TAU) ** (7 / (c.ROUNDS * a_round - 1))
    loss = 0.0
    weights = []
    for key in asked:
        candidates = [x for x in trainer.candidates if x["prompt_id"] == key and x["hard"] is not None]
        scores = torch.tensor([x["reward/share"] for x in candidates], dtype=torch.float64)
        hard = torch.tensor([x["reward/even"] for x in candidates], dtype=torch.float64)
        near = torch.tensor([x["reward/hundredths"] for x in candidates], dtype=torch.float64)
        scaled = (scores - scores.min()) / (scores.max() - scores.min())
        r = scaled / 2 + hard / 2 + c.SIMILARITY_WEIGHT * near * (1 - hard)
        w = ((r - r.mean()) / (r.std() + 1e-4) / tau).softmax(0)
        weights += w.tolist()
        for x, share_of_it in zip(candidates, w):
            loss = loss - share_of_it * logprobs(key, x["token_ids"]).mean() / len(asked)
    assert seen["weights"].tolist() == pytest.approx(weights, rel=1e-4, abs=1e-7)
    assert seen["policy_loss"] == pytest.approx(loss.item(), rel=1e-4)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert seen["norm"] == pytest.approx(gradient.norm().item(), rel=1e-4) and seen["norm"] > c.MAX_GRAD_NORM
    assert distance(seen["gradient"], gradient * c.MAX_GRAD_NORM / gradient.norm()) < 1e-4

    # rates of the third and the eighth step
    total = c.ROUNDS * a_round
    cosine = 0.5 * (1 + math.cos(math.pi * (7 - c.WARMUP_STEPS) / (total - c.WARMUP_STEPS)))
    assert seen["rates"] == pytest.approx([c.LEARNING_RATE * scale for scale in (3 / c.WARMUP_STEPS, cosine)])


def test_evaluation_samples_the_held_out_prompts_by_the_seed_after_the_runs(one_step):
    c, trainer, seen = one_step()
    trainer.actor.load_state_dict(trainer.weights)
    rows = trainer.eval_rows
    generator = torch.Generator().manual_seed(c.SEED + 1)
    uniform = torch.rand(len(rows) * c.EVAL_SAMPLES, c.MAX_NEW_TOKENS, generator=generator)
    ids = [row["ids"] for row in rows]
    said = c.respond(trainer.actor, trainer.tokenizer, ids, uniform, c.EVAL_SAMPLES).responses
    right = even(None, said, None)
    best = [max(right[i : i + 2]) for i in range(0, len(right), 2)]
    assert seen["evaluation"]["pass@1"] == pytest.approx(sum(right) / len(right))
    assert seen["evaluation"]["pass@2"] == pytest.approx(sum(best) / len(best))
    assert all(row["id"].startswith("test.jsonl:") for row in rows) and 1 < len(rows) <= c.MAX_EVAL_PROMPTS


# ---------------------------------------------------------------- found by a first reader of the file


def test_failed_candidates_of_one_prompt_do_not_end_the_mining(rce):
    script = rce(
        VERIFY_TOP=1, VERIFY_RANDOM=0, CHEAP_SIGNAL="logprob", HARD_REWARD="mine", SOFT_REWARD="mine"
    )
    calls = []

    def mine(prompts, responses, answers):
        if len(calls) > 1:
            raise ValueError("an odd response")
        return [0.0] * len(responses)

    script.REWARD_FUNCTIONS = [(mine, 1.0)]
    trainer = script.RCETrainer()
    verify = trainer.verify

    def counted(candidates):
        calls.append(len(candidates))
        verify(candidates)

    trainer.verify = counted
    candidates = trainer.mine_chunk(trainer.train_rows[:2])
    assert len(calls) == 2 and calls[1] > 0
    assert sum(c["eval_failed"] for c in candidates) == calls[1]
    assert "odd response" in next(c["eval_error"] for c in candidates if c["eval_failed"])


def test_candidates_of_later_rounds_are_moved_aside_when_training_starts_anew(rce, mined, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    for number in (1, 2, 10):
        shutil.copyfile(mined, out / f"candidates_round_{number}.parquet")
    rce(STAGE="train", RESUME="no", MAX_STEPS=1, EVAL_DATASETS=[]).RCETrainer().train()
    assert [path.name for path in out.glob("candidates*")] == ["candidates_round_1.parquet"]
    moved = {path.name for path in out.glob("old_*/candidates*")}
    assert moved == {"candidates_round_2.parquet", "candidates_round_10.parquet"}


def test_given_candidates_in_the_runs_folder_stay_where_they_are(rce, mined, tmp_path):
    given = tmp_path / "run/candidates_round_1.parquet"
    given.parent.mkdir()
    shutil.copyfile(mined, given)
    rce(STAGE="all", CANDIDATES=str(given), RESUME="no", MAX_STEPS=1, EVAL_DATASETS=[]).RCETrainer().train()
    assert given.exists()


def test_finished_candidates_are_not_taken_for_those_of_other_constants(rce, mined, tmp_path):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run/candidates_round_1.parquet"
    shutil.copyfile(mined, path)
    trainer = rce(STAGE="mine").RCETrainer()
    assert trainer.mine(path)
    script = rce(STAGE="mine", GROUP_SIZE=7)
    trainer = script.RCETrainer()
    with pytest.raises(script.UserError, match="was mined with GROUP_SIZE = 6; it is 7 now.*RESUME=no"):
        trainer.prepare_round()
    script.write_parquet(script.read_parquet(path)[0], path, {})  # not mined by this program
    assert trainer.mine(path)


def test_what_is_held_back_decides_which_prompts_later_rounds_mine(rce, mined, monkeypatch, tmp_path):
    script = rce(CANDIDATES=str(mined), ROUNDS=2)
    facts = []
    monkeypatch.setattr(script, "mine_in_chunks", lambda *args: facts.append(args[4]))
    trainer = script.RCETrainer()
    for trainer.state.round in (1, 2):
        trainer.mine(tmp_path / "none.parquet")
    first, second = facts
    assert second == first | {"VALIDATION_FRACTION": script.VALIDATION_FRACTION} != first


def test_a_round_goes_on_with_as_many_prompts_as_it_began_with_or_not_at_all(rce, mined):
    settings = dict(CANDIDATES=str(mined), EVAL_DATASETS=[], BATCH_SIZE=2, SAVE_EVERY_N_STEPS=1)
    rce(**settings, MAX_STEPS=1).RCETrainer().train()
    script = rce(**settings, MAX_STEPS=2, RESUME="yes", VALIDATION_FRACTION=0.7)
    with pytest.raises(script.UserError, match="prompts to train on, and left .* RESUME=no"):
        script.RCETrainer().train()
    trainer = rce(**settings, MAX_STEPS=2, RESUME="yes").RCETrainer()
    trainer.train()
    assert trainer.run.step == 2


def test_a_later_round_without_prompts_to_train_on_ends_the_run(rce, mined, monkeypatch, capsys):
    script = rce(CANDIDATES=str(mined), ROUNDS=2, EVAL_DATASETS=[])
    trainer = script.RCETrainer()
    choose_rows = trainer.choose_rows

    def choose(groups):
        choose_rows(groups)
        if trainer.state.round == 2:
            trainer.train_rows = []

    trainer.choose_rows = choose
    trainer.train()
    said = capsys.readouterr().out
    assert "Round 2 ends the run, because in " in said and "Done at step " in said


def test_a_column_that_may_be_missing_may_also_be_null(rce, mined, tmp_path):
    """As it is where records of one's own are added to a mined file."""
    records = pq.read_table(mined).to_pylist()
    own = [{**c, "source": None, "temperature": None, "text": None} for c in records]
    script = rce()
    script.write_parquet(records + own, tmp_path / "c.parquet", {})
    rows = script.RCETrainer().rows
    found = script.read_candidates(tmp_path / "c.parquet", rows, 82)
    for (_, before), (_, after) in zip(script.read_candidates(mined, rows, 82), found):
        assert after[: len(before)] == before and len(after) == 2 * len(before)
        assert all(c["source"] == ["given"] and c["text"] == "" for c in after[len(before) :])


@pytest.mark.parametrize("mode", ["soft_only", "hard_plus_soft_v2"])
def test_candidates_without_what_the_mode_needs_are_refused(rce, mined, tmp_path, mode):
    names = ["prompt_id", "prompt", "token_ids", "hard", "eval_failed"]
    pq.write_table(pq.read_table(mined).select(names), tmp_path / "c.parquet")
    script = rce(STAGE="train", CANDIDATES=str(tmp_path / "c.parquet"), REWARD_MODE=mode, EVAL_DATASETS=[])
    with pytest.raises(
        script.UserError, match=f"REWARD_MODE = '{mode}' needs soft, .*which the candidates lack"
    ):
        script.RCETrainer().prepare_round()


def test_a_fault_of_a_reward_mode_of_ones_own_is_not_hidden(rce, monkeypatch):
    script = rce()
    monkeypatch.setattr(script.rewards, "mine", lambda hard, soft: hard, raising=False)
    script.REWARD_MODE = "mine"
    with pytest.raises(TypeError, match="takes 2 positional arguments but 4 were given"):
        script.rewards_by_mode([candidate(1.0), candidate(0.0)])


def test_a_reward_that_cannot_be_asked_about_many_is_asked_one_by_one_which_is_logged(rce, capsys):
    script = rce()
    trainer = script.RCETrainer()
    candidates = list(itertools.chain(*trainer.propose(trainer.train_rows[:1])))
    script.RCETrainer.reward_parts_of = lambda self, some: (
        [{"exact_answer": 1.0, "rouge_l": 1.0}] * (len(some) if len(some) == 1 else 1 // 0)
    )
    trainer.verify(candidates)
    assert all(c["hard"] == 1.0 for c in candidates)
    assert f"WARNING: scoring {len(candidates)} candidates at once failed (" in capsys.readouterr().out


def test_given_candidates_are_the_first_rounds_prompts_whatever_they_are(rce, mined, tmp_path):
    """Of another seed here: the second round must not mine them again."""
    script = rce(CANDIDATES=str(mined), ROUNDS=2, SEED=5, MAX_TRAIN_PROMPTS=60)
    trainer = script.RCETrainer()
    given = {row["id"] for row, _ in script.read_candidates(mined, trainer.rows, 82)}
    trainer.state.round = 2
    rows = trainer.round_rows()
    assert len(given) == 15 and rows and not given & {row["id"] for row in rows}


def test_a_gold_answer_must_fit_the_model_too(rce, monkeypatch):
    script = rce()
    trainer = script.RCETrainer()
    candidates = list(itertools.chain(*trainer.propose(trainer.train_rows[:1])))
    monkeypatch.setattr(script, "max_positions", lambda model: 10)
    with pytest.raises(script.UserError, match="reads at most 10 tokens, .* a gold answer have "):
        trainer.score_gold(candidates)


def test_what_to_do_after_mining_depends_on_the_round(rce):
    trainer = rce(STAGE="mine", ROUNDS=2).RCETrainer()
    assert trainer.run.final_message().endswith("STAGE=train trains on it")
    trainer.run.state.round = 2
    assert trainer.run.final_message().endswith("candidates_round_2.parquet; STAGE=all trains on it")


def test_a_data_set_that_is_given_twice_is_refused(rce):
    script = rce(MAX_TRAIN_PROMPTS=None)
    script.TRAIN_DATASETS = [script.TRAIN_DATASETS[0]] * 2
    with pytest.raises(script.UserError, match="has a data set twice"):
        script.RCETrainer()
