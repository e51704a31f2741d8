"""Rewards inside a response: compute_rewards of ppo/ppo.py may return a list of numbers, one a token."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import load_script, read

PPO = load_script("ppo/ppo.py")
ONE = torch.ones(1, dtype=torch.long)


def with_rewards(script, compute_rewards):
    """A trainer whose compute_rewards this is."""

    class Mine(script.PPOTrainer):
        pass

    Mine.compute_rewards = compute_rewards
    return Mine()


def first_good_second_bad(self, prompts, responses, answers, response_ids):
    return [[1.0, -1.0] + [0.0] * (len(ids) - 2) for ids in response_ids]


def its_sums(self, prompts, responses, answers, response_ids):
    return [sum(row) for row in first_good_second_bad(self, prompts, responses, answers, response_ids)]


def rolled_out(trainer, count=4):
    torch.manual_seed(5)
    batch = trainer.rollout(trainer.train_rows[:count])
    trainer.score(batch)
    trainer.compute_advantages(batch)
    assert (batch.response_lengths > 2).all()
    return batch


def test_token_rewards_add_up_by_hand():
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    dense = torch.tensor([[1.0, 2, 3], [4, 4.5, 0]])
    scores = dense.sum(1)
    got = PPO.per_token_rewards(scores, -1.0 * mask, -3.0 * mask, mask, 0.1, dense)
    assert torch.allclose(got, torch.tensor([[0.8, 1.8, 2.8], [3.8, 4.3, 0]]))


def test_only_rewards_a_token_tell_two_tokens_apart(ppo):
    """Each response's first token is good, its second as bad: their sum, 0, teaches nothing at all."""
    moved = {}
    for compute_rewards in (first_good_second_bad, its_sums):
        constants = {"LAM": 0.0, "WHITEN_ADVANTAGES": False, "GROUP_EPOCHS": 1, "LEARNING_RATE": 0.1}
        trainer = with_rewards(ppo(**constants, TEMPERATURE=4.0), compute_rewards)
        # Adam takes a step of full size however small the gradient
        trainer.optimizers["policy"] = torch.optim.SGD(trainer.actor.parameters())
        batch = rolled_out(trainer)
        assert (batch.scores == 0).all()
        trainer.update(batch)
        logprobs, _ = PPO.response_logprobs(trainer.actor, batch, torch.arange(len(batch.rows)), 4.0)
        change = (logprobs - batch.logprobs)[:, :2].mean(0)
        moved[compute_rewards] = batch.advantages, *change.tolist()
    advantages, first, second = moved[first_good_second_bad]
    assert (advantages[:, 0] == 1).all() and (advantages[:, 1] == -1).all() and (advantages[:, 2:] == 0).all()
    assert first > 0.01 and second < -0.01
    advantages, first, second = moved[its_sums]
    assert (advantages == 0).all() and abs(first) < 1e-5 and abs(second) < 1e-5


def test_a_score_is_a_reward_of_the_last_token(ppo):
    """To the bit: the dense form of a score a response is the score's own."""

    def a_token(self, prompts, responses, answers, response_ids):
        return [[0.0] * (len(ids) - 1) + [len(ids) / 7] for ids in response_ids]

    def a_response(self, prompts, responses, answers, response_ids):
        return [len(ids) / 7 for ids in response_ids]

    constants = {"KL_COEF": 0.1, "MISSING_EOS_PENALTY": 0.5, "MAX_NEW_TOKENS": 18}
    one, two = (rolled_out(with_rewards(ppo(**constants), f)) for f in (a_token, a_response))
    assert one.truncated.any() and not one.truncated.all()
    assert torch.equal(one.scores, two.scores) and torch.equal(one.advantages, two.advantages)
    assert one.token_scores.shape == one.logprobs.shape and two.token_scores is None


def test_a_run_logs_the_sums(ppo, tmp_path):
    def two_a_token(self, prompts, responses, answers, response_ids):
        self.reward_parts["tokens"] = torch.tensor([2.0 * len(ids) for ids in response_ids])
        return [torch.full((len(ids),), 2) for ids in response_ids]

    trainer = with_rewards(ppo(MAX_STEPS=1), two_a_token)
    trainer.train()
    for record in read(tmp_path / "run/logs/metrics.jsonl"):
        assert record["reward"] == record["reward/tokens"] == 2 * record["response_length"]
    for sample in read(tmp_path / "run/logs/samples.jsonl"):
        assert sample["reward"] == sample["reward/tokens"]


def of_three(values):
    return f"must return 3 finite numbers, one per token of response 1; it returned {values}"


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda rows: [rows[0], rows[1][:-1]], of_three(r"\[0.5, 0.5\], of shape \(2,\)")),
        (lambda rows: [rows[0], [*rows[1], 0.0]], of_three(r"\[0.5, 0.5, 0.5, 0.0\]")),
        (lambda rows: [rows[0], [math.nan, 0, 0]], of_three(r"\[nan, 0, 0\]")),
        (lambda rows: [rows[0], 1.0], of_three("1.0")),
        (
            lambda rows: rows[:1],
            r"must return 2 finite numbers, one per response; it returned \[\[0.5, 0.5\]\]",
        ),
    ],
)
def test_a_list_that_does_not_fit_its_response_is_a_sentence(change, says):
    def score_responses(prompts, responses, answers, response_ids):
        return change([[0.5] * len(ids) for ids in response_ids])

    columns = {"response_ids": [[5, 1], [5, 6, 1]]}
    with pytest.raises(PPO.UserError, match=f"^compute_rewards {says}"):
        PPO.call_reward(
            "compute_rewards", score_responses, ["x"] * 2, ["a", "b"], [None] * 2, columns, width=4
        )


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_each_response_may_have_rewards_of_any_kind(kind):
    columns = {"response_ids": [[5, 1], [5, 6, 1]]}
    values = [kind([1.0, 2.0]), kind([3.0, 4.0, 5.0])]
    found = PPO.call_reward("judge", lambda *_: values, ["x"] * 2, ["a", "b"], [None] * 2, columns, width=4)
    assert found.tolist() == [[1, 2, 0, 0], [3, 4, 5, 0]]


def test_trainers_without_a_critic_refuse_them(each):
    script, trainer_class = each(EVAL_DATASETS=[])
    trainer = trainer_class()
    trainer.compute_rewards = lambda prompts, responses, answers: [[1.0]] * len(responses)
    row = {"prompt": "x", "answer": "1", "columns": {}}
    batch = SimpleNamespace(rows=[row], responses=["a"], columns={"response_ids": [[1]]})
    batch.truncated, batch.response_mask, batch.response_lengths = torch.zeros(1), torch.ones(1, 32), ONE
    if each.path == "ppo/ppo.py":
        assert trainer.score_responses(batch)[1].tolist() == [[1.0] + [0.0] * 31]
        return
    says = r"^compute_rewards must return 1 finite numbers, one per response; it returned \[\[1.0\]\]"
    with pytest.raises(script.UserError, match=says):
        trainer.score_responses(batch)
