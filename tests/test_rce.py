"""RCE's formulas against numbers worked out by hand in float64, its mining, and its rounds."""

import math
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import torch
from conftest import load, read

T = torch.tensor


def double(x):
    return T(x, dtype=torch.float64)


@pytest.fixture
def rce():
    return load("rce/rce.py")


def candidates_of(trainer, number=1):
    return pyarrow.parquet.read_table(trainer.run.folder / f"candidates_round_{number}.parquet").to_pylist()


# ---------------------------------------------------------------- the maths


def test_weights_are_a_softmax_of_the_rewards_over_tau(rce):
    rewards = double([1.0, 0.0, 0.5])
    want = [math.exp(r / 0.25) for r in (1.0, 0.0, 0.5)]
    assert rce.rce_weights(rewards, 0.25).tolist() == pytest.approx([x / sum(want) for x in want])
    rce.WEIGHT_REWARDS = "zscore"
    want = [math.exp((r - 0.5) / (0.5 + 1e-4) / 0.25) for r in (1.0, 0.0, 0.5)]
    assert rce.rce_weights(rewards, 0.25).tolist() == pytest.approx([x / sum(want) for x in want])


def test_tau_moves_by_equal_factors(rce):
    rce.TAU = 0.8
    assert rce.tau_at(3, 10) == 0.8
    rce.TAU_END = 0.1
    assert [rce.tau_at(n, 4) for n in range(6)] == pytest.approx([0.8, 0.4, 0.2, 0.1, 0.1, 0.1])
    assert rce.tau_at(0, 1) == 0.8 and rce.tau_at(1, 2) == pytest.approx(0.1)


@pytest.mark.parametrize("length_normalise", [False, True])
def test_the_loss_and_its_gradient(rce, length_normalise):
    rce.LENGTH_NORMALISE = length_normalise
    logprobs = double([[-1.0, -2.0, -4.0], [-0.5, -9.0, -9.0]]).requires_grad_()
    mask, weights = double([[1, 1, 1], [1, 0, 0]]), double([0.7, 0.3])
    loss = rce.rce_loss(logprobs, mask, weights)
    loss.backward()
    tokens = 3 if length_normalise else 1
    assert loss.item() == pytest.approx(0.7 * 7 / tokens + 0.3 * 0.5)
    assert logprobs.grad.tolist() == [pytest.approx([-0.7 / tokens] * 3), pytest.approx([-0.3, 0, 0])]


MODES = {
    "hard_only": [1, 0, 1],
    "soft_only": [0.25, 0.5, 1],
    "hard_plus_soft": [1.25, 0.5, 2],
    "separated": [2.25, 0.5, 3],
    "hard_plus_gtprob": [1.1, 0.6, 1.9],
    "hard_plus_gtprob_separated": [2.1, 0.6, 2.9],
    "hybrid": [(1 + 0.5) / 2, 0 / 2, (1 + 1) / 2],
}


@pytest.mark.parametrize("mode", MODES)
def test_reward_modes(rce, mode):
    rce.REWARD_MODE = mode
    names = ("hard", "soft", "gt_prob", "logprob")
    values = [(1, 0.25, 0.1, -4.0), (0, 0.5, 0.6, -6.0), (1, 1, 0.9, -2.0)]
    candidates = [SimpleNamespace(**dict(zip(names, row))) for row in values]
    assert rce.shaped_rewards(candidates).tolist() == pytest.approx(MODES[mode])
    assert set(rce.reward_modes) == set(MODES)


def test_equal_scores_make_no_hybrid_reward_of_their_own(rce):
    assert rce.hybrid(double([1, 0]), None, None, double([-3, -3])).tolist() == [0.5, 0]
    assert rce.hybrid(double([1, 0]), None, None, double([-3, -2.5])).tolist() == [0.5, 0.5]


def test_a_reward_mode_of_ones_own(rce):
    rce.REWARD_MODE = lambda hard, soft, gt_prob, logprob: 3 * soft
    candidates = [rce.Candidate({}, [], soft=0.5), rce.Candidate({}, [], soft=1)]
    assert rce.shaped_rewards(candidates).tolist() == [1.5, 3]


def test_gold_probability_counts_the_answer_alone(rce):
    assert rce.gold_probability(T([-9.0, -0.5, -0.25, 0.0]), 1) == pytest.approx(math.exp(-0.75))


# ---------------------------------------------------------------- mining


@pytest.mark.parametrize("width", [1, 4])
def test_beams_are_those_of_transformers(make, width):
    trainer = make("rce/rce.py", BEAMS=width, MAX_NEW_TOKENS=20)
    rows = trainer.train_rows[:6]
    got = trainer.module.beam_search(trainer.actor, [row["ids"] for row in rows], trainer.end_ids)
    assert len(got) == 6 * width
    options = {"num_beams": width, "num_return_sequences": width, "length_penalty": 0.0}
    for i, row in enumerate(rows):
        ids = T([row["ids"]])
        want = trainer.actor.generate(ids, max_new_tokens=20, do_sample=False, **options)
        for response, sequence in zip(got[i * width : (i + 1) * width], want[:, ids.shape[1] :].tolist()):
            assert response == sequence[: len(response)] and set(sequence[len(response) :]) <= {0, 1}


def test_gt_prob_is_the_probability_of_the_gold_answer_after_the_reasoning(make):
    trainer = make("rce/rce.py")
    row = trainer.train_rows[0]
    gold = row["answer"].rpartition("#### ")[2]
    new = trainer.module.Candidate
    candidates = [new(row, [5], text) for text in ("1+1=2\n#### 9", "1+1=2")]
    trainer.score_gold(candidates)
    for candidate in candidates:
        reasoning = trainer.tokenizer("1+1=2\n####", add_special_tokens=False)["input_ids"]
        whole = trainer.tokenizer(f"1+1=2\n#### {gold}", add_special_tokens=False)["input_ids"]
        answer = [*whole[len(reasoning) :], trainer.tokenizer.eos_token_id]
        with torch.no_grad():
            logits = trainer.actor(T([row["ids"] + reasoning + answer])).logits[0].double()
        logprobs = logits.log_softmax(-1)[-len(answer) - 1 : -1]
        want = logprobs.gather(1, T(answer)[:, None]).sum().exp().item()
        assert candidate.gt_prob == pytest.approx(want, rel=1e-4)
    without = new({**row, "answer": None}, [5], "1")
    trainer.score_gold([without])
    assert without.gt_prob is None
    trainer.module.ANSWER_FORM = None
    with_answer = new(row, [5], "1")
    trainer.score_gold([with_answer])
    assert with_answer.gt_prob is None


def test_equal_responses_are_one_candidate_with_all_its_sources(make):
    trainer = make("rce/rce.py", GROUP_SIZE=6, SAMPLE_TEMPERATURES=[0.01, 1.0], INCLUDE_REFERENCE=True)
    trainer.seed_step()
    rows = trainer.train_rows[:4]
    groups = trainer.propose(rows, torch.rand(4, 6, 32))
    for row, group in zip(rows, groups):
        assert len({tuple(c.token_ids) for c in group}) == len(group)
        sources = [pair for c in group for pair in zip(c.source, c.temperature)]
        assert sources.count(("greedy", None)) == 1 and sources.count(("beam", None)) == 2
        assert sources.count(("sample", 0.01)) == sources.count(("sample", 1.0)) == 3
        greedy = next(c for c in group if "greedy" in c.source)
        assert ("sample", 0.01) in zip(greedy.source, greedy.temperature)
        if len(trainer.tokenizer(row["answer"])["input_ids"]) < 32:
            reference = next(c for c in group if "reference" in c.source)
            assert reference.text == row["answer"] and not reference.truncated


def test_the_best_and_some_others_are_verified_then_the_rest_of_one_sided_prompts(make):
    trainer = make("rce/rce.py", VERIFY_TOP=1, VERIFY_RANDOM=1, GROUP_SIZE=8, BEAMS=0)
    trainer.train()
    groups = {}
    for candidate in candidates_of(trainer):
        groups.setdefault(candidate["prompt_id"], []).append(candidate)
    sizes = set()
    for group in groups.values():
        verified = [c for c in group if c["eval_mode"] == "verified"]
        best = max(group, key=lambda c: c["gt_prob"])
        assert best["eval_mode"] == "verified" and all(c["hard"] is not None for c in verified)
        is_mixed = {c["hard"] for c in verified} == {0, 1}
        assert len(verified) == len(group) or (is_mixed and len(verified) == 2)
        sizes.add(len(verified) == len(group))
    assert sizes == {True, False}


def test_a_reward_that_raises_marks_its_candidate_and_no_other(make):
    def picky(prompts, responses, answers):
        if any("9" in response for response in responses):
            raise KeyError("nine")
        return [float(len(response) % 2) for response in responses]

    rewards = [(picky, 1.0), ("rouge_l", 0.0)]
    trainer = make("rce/rce.py", REWARD_FUNCTIONS=rewards, HARD_REWARD="picky", EVAL_DATASETS=[])
    trainer.train()
    candidates = candidates_of(trainer)
    assert any(c["eval_failed"] for c in candidates) and not all(c["eval_failed"] for c in candidates)
    for candidate in candidates:
        assert candidate["eval_failed"] == ("9" in candidate["text"])
        assert candidate["eval_failed"] == (candidate["hard"] is None)
        assert not candidate["eval_failed"] or "nine" in candidate["eval_error"]
    trained = [c.text for group in trainer.train_groups for c in group]
    assert trained and not any("9" in text for text in trained)


def test_a_reward_outside_its_range_is_refused(make):
    def large(prompts, responses, answers):
        return [2.0] * len(responses)

    trainer = make("rce/rce.py", REWARD_FUNCTIONS=[(large, 1.0), ("rouge_l", 0.0)], HARD_REWARD="large")
    with pytest.raises(ValueError, match="HARD_REWARD gives 0 or 1"):
        trainer.train()


# ---------------------------------------------------------------- rounds and validation


def test_validation_prompts_are_never_trained_on(make):
    trainer = make("rce/rce.py", VALIDATION_FRACTION=0.5, MINE_PROMPTS=20, ROUNDS=2, EVAL_DATASETS=[])
    trainer.train()
    module = trainer.module
    held = {group[0].row["prompt"] for group in trainer.validation_groups}
    trained = {group[0].row["prompt"] for group in trainer.train_groups}
    assert held and trained and not held & trained
    assert all(not module.is_for_validation({"prompt": prompt}) for prompt in trained)
    rows = trainer.train_rows
    share = sum(map(module.is_for_validation, rows)) / len(rows)
    assert share == pytest.approx(0.5, abs=0.05)
    first = {c["prompt_id"] for c in candidates_of(trainer, 1)}
    second = {c["prompt_id"] for c in candidates_of(trainer, 2)}
    assert len(first) == 20 and second and not first & second
    assert not {c["prompt"] for c in candidates_of(trainer, 2)} & held


def test_pick_accuracy_is_that_of_the_likeliest_candidate(make):
    trainer = make("rce/rce.py")
    row = trainer.train_rows[0]
    likely = trainer.respond([row], None).response_ids[0]
    unlikely = [*reversed(likely[:-1]), likely[-1]]
    for likely_is_right in (1.0, 0.0):
        pair = [
            trainer.module.Candidate(row, unlikely, hard=1 - likely_is_right),
            trainer.module.Candidate(row, likely, hard=likely_is_right),
        ]
        trainer.validation_groups = [pair]
        assert trainer.validate() == {"pick_accuracy": likely_is_right}
    trainer.validation_groups = []
    assert trainer.validate() == {}


def test_mining_and_training_apart_give_what_they_give_together(make, tmp_path):
    def run(folder, **constants):
        trainer = make("rce/rce.py", EVAL_DATASETS=[], OUTPUT_DIR=str(tmp_path / folder), **constants)
        trainer.train()
        return trainer

    whole = run("whole")
    run("apart", STAGE="mine")
    apart = run("apart", STAGE="train", RESUME="yes")
    file = tmp_path / "apart/candidates_round_1.parquet"
    third = run("third", STAGE="train", CANDIDATES=str(file))
    for trainer in (apart, third):
        for a, b in zip(whole.actor.parameters(), trainer.actor.parameters()):
            assert torch.equal(a, b)
    table = pyarrow.parquet.read_table(file)
    pyarrow.parquet.write_table(table.set_column(1, "prompt", pyarrow.array(["another"] * len(table))), file)
    with pytest.raises(ValueError, match="a prompt that TRAIN_DATASETS lack"):
        run("other", CANDIDATES=str(file))


def test_the_check_up_and_the_weights_are_logged(make, tmp_path):
    trainer = make("rce/rce.py", TAU=1e-3)
    trainer.train()
    records = read(tmp_path / "run/logs/metrics.jsonl")
    mined = next(record for record in records if record["phase"] == "mine")
    candidates = candidates_of(trainer)
    groups = {}
    for candidate in candidates:
        groups.setdefault(candidate["prompt_id"], []).append(candidate["hard"])
    assert mined["best_of_n_accuracy"] == pytest.approx(sum(map(max, groups.values())) / len(groups))
    mixed = [max(hard) > min(hard) for hard in groups.values()]
    assert mined["mixed_prompts"] == pytest.approx(sum(mixed) / len(groups))
    greedy = [c["hard"] for c in candidates if "greedy" in c["source"]]
    assert mined["accuracy/greedy"] == pytest.approx(sum(greedy) / len(greedy))
    step = next(record for record in records if record["phase"] == "train")
    right = [sum(c.hard for c in group) for group in trainer.train_groups]
    assert 1 <= step["effective_candidates"] <= max(right) and step["tau"] == 1e-3
    assert step["weighted_reward"] == pytest.approx(1)


def test_scoring_that_differs_from_sampling_ends_the_run(make):
    trainer = make("rce/rce.py")
    original = trainer.module.all_logprobs
    trainer.module.all_logprobs = lambda model, batch: original(model, batch) - 0.01
    with pytest.raises(ValueError, match="scoring and sampling differ"):
        trainer.train()


@pytest.mark.parametrize("change", [{}, {"INCLUDE_REFERENCE": True}])
def test_parts_of_an_interrupted_mining_count_only_with_equal_constants(make, tmp_path, change):
    trainer = make("rce/rce.py", EVAL_DATASETS=[])
    trainer.run.open(trainer.state, False)
    trainer.mine_prompts = lambda rows, mine=trainer.mine_prompts: (
        setattr(trainer.run, "signal", 2) or mine(rows)
    )
    assert not trainer.mine(tmp_path / "run/candidates_round_1.parquet")
    trainer.run.close(trainer.state)
    again, mined = make("rce/rce.py", EVAL_DATASETS=[], **change), []
    again.mine_prompts = lambda rows, mine=again.mine_prompts: mined.append(len(rows)) or mine(rows)
    again.run.move_old_files = lambda *arguments: None
    again.train()
    assert sum(mined) == (12 if change else 8)


def test_a_round_without_unequal_rewards_is_passed_over(make):
    def first_and_third(prompts, responses, answers):
        is_second = trainer.state.round == 2
        return [float(len(response) % 2 and not is_second) for response in responses]

    rewards = [(first_and_third, 1.0), ("rouge_l", 0.0)]
    options = {"REWARD_FUNCTIONS": rewards, "HARD_REWARD": "first_and_third", "EVAL_DATASETS": []}
    trainer = make("rce/rce.py", ROUNDS=3, BEAMS=0, **options)
    trainer.train()
    candidates = trainer.run.folder / "candidates_round_3.parquet"
    assert candidates.exists() and trainer.state.round == 4
