"""PPO's formulas against numbers worked out by hand in float64, and its trainer."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, load

T = torch.tensor


def double(x):
    return T(x, dtype=torch.float64)


@pytest.fixture
def ppo():
    return load("ppo/ppo.py")


def test_whitened_values_have_mean_0_and_variance_1_over_the_mask(ppo):
    x, mask = double([[1, 2, 3], [6, 100, -100]]), double([[1, 1, 1], [1, 0, 0]])
    white = ppo.whiten(x, mask)
    std = math.sqrt((4 + 1 + 0 + 9) / 4 + 1e-8)
    assert white.tolist() == [pytest.approx([-2 / std, -1 / std, 0]), pytest.approx([3 / std, 0, 0])]
    assert ppo.whiten(torch.ones(2, 3), torch.ones(2, 3)).tolist() == [[0, 0, 0]] * 2


def test_the_score_comes_at_the_last_token_and_the_kl_penalty_at_each(ppo):
    # A tool wrote one token
    batch = SimpleNamespace(scores=double([5, 7]), mask=double([[1, 1, 0], [1, 0, 1]]))
    batch.logprobs, batch.ref_logprobs = double([[-1, -2, -3], [-1] * 3]), double([[-2, -2, -1], [-3, 0, 0]])
    rewards = ppo.per_token_rewards(batch, 0.1)
    batch.ref_logprobs[0, 0] = -1e30  # excluded by top-p: no reward of 1e29
    assert ppo.per_token_rewards(batch, 0.1)[0, 0].item() == pytest.approx(-2)
    assert rewards.tolist() == [pytest.approx([-0.1, 5, 0]), pytest.approx([-0.2, 0, 7.1])]


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.9, 0.0)])
def test_gae_by_hand_for_three_tokens(ppo, gamma, lam):
    r, v = [0.5, -1.0, 2.0], [0.3, 0.7, -0.4]
    d2 = r[2] - v[2]
    d1 = r[1] + gamma * v[2] - v[1]
    d0 = r[0] + gamma * v[1] - v[0]
    want = [d0 + gamma * lam * (d1 + gamma * lam * d2), d1 + gamma * lam * d2, d2]
    got = ppo.gae(double([r]), double([v]), double([[1, 1, 1]]), gamma, lam)
    assert got[0].tolist() == pytest.approx(want)


def test_gae_skips_tokens_that_the_policy_did_not_write(ppo):
    mask = double([[1, 0, 0, 1, 1, 0]])
    rewards, values = double([[0.5, 9, 9, -1, 2, 9]]), double([[0.3, 8, 8, 0.7, -0.4, 8]])
    got = ppo.gae(rewards, values, mask, 0.9, 0.8)
    kept = mask[0] > 0
    want = ppo.gae(rewards[:, kept], values[:, kept], double([[1, 1, 1]]), 0.9, 0.8)
    assert torch.equal(got[:, kept], want) and got[:, ~kept].abs().sum() == 0


@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.1, 1.5])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("high", [None, 0.28])
def test_the_clip_stops_the_gradient_on_the_right_side(ppo, ratio, advantage, high):
    ppo.CLIP_RANGE_HIGH = high
    upper = 1 + (high or 0.2)
    logprobs = double([[math.log(ratio)]]).requires_grad_()
    loss = ppo.policy_loss(logprobs, double([[0.0]]), double([[advantage]]))
    loss.sum().backward()
    is_clipped = ratio > upper if advantage > 0 else ratio < 0.8
    limit = upper if advantage > 0 else 0.8
    assert loss.item() == pytest.approx(-advantage * (limit if is_clipped else ratio))
    assert logprobs.grad.item() == pytest.approx(0 if is_clipped else -advantage * ratio)


def test_a_huge_ratio_overflows_nowhere(ppo):
    logprobs, old, advantages = T([[500.0]]).requires_grad_(), T([[0.0]]), T([[-1.0]])
    ppo.policy_loss(logprobs, old, advantages).sum().backward()
    assert logprobs.grad.isfinite().all()
    assert all(x.isfinite().all() for x in ppo.ppo_stats(logprobs, old, advantages).values())


def test_values_are_clipped_around_the_rollouts_value(ppo):
    values, returns = double([[1.0, 0.5, 0.1, -0.5]]), double([[2.0, 0.0, -1.0, 0.0]])
    loss = ppo.value_loss(values, double([[0.0, 0.4, 0.0, 0.0]]), returns)
    want = [(0.2 - 2) ** 2, (0.5 - 0) ** 2, (0.1 + 1) ** 2, (-0.5 - 0) ** 2]
    assert loss[0].tolist() == pytest.approx([x / 2 for x in want])
    ppo.VALUE_CLIP_RANGE = 0.0
    assert ppo.value_loss(values, values + 9, returns)[0, 0].item() == pytest.approx(0.5)


def test_what_is_logged_of_a_token(ppo):
    old = double([[-1.0] * 8])
    logprobs = old + double([[1.5, 1.5, 0.5, 0.5, 1.1, 0.9, 1.5, 0.5]]).log()
    stats = ppo.ppo_stats(logprobs, old, double([[0.5, -0.5, 0.5, -0.5, 1, -1, 0, 0]]))
    assert stats["clip_fraction"].tolist() == [[1, 0, 0, 1, 0, 0, 0, 0]]
    assert stats["approx_kl"][0, 0].item() == pytest.approx(0.5 - math.log(1.5))
    assert stats["approx_kl"][0, 4].item() == pytest.approx(0.1 - math.log(1.1))


def test_the_kl_coefficient_follows_its_target(ppo):
    ppo.KL_TARGET, ppo.KL_HORIZON = 0.1, 1000
    assert ppo.adapt_kl_coef(0.5, 0.3, 100) == pytest.approx(0.5 * (1 + 0.2 * 0.1))
    assert ppo.adapt_kl_coef(0.5, 0.105, 100) == pytest.approx(0.5 * (1 + 0.05 * 0.1))
    assert ppo.adapt_kl_coef(0.5, 0.0, 100) == pytest.approx(0.5 * (1 - 0.2 * 0.1))
    assert ppo.adapt_kl_coef(0.5, 0.3, 10_000) == pytest.approx(0.5 * 1.2)
    assert ppo.adapt_kl_coef(0.5, 0.0, 10_000) == pytest.approx(0.5 * 0.8)


def test_scores_of_whole_numbers_are_used_and_reward_parts_stay(make):
    trainer = make("ppo/ppo.py", MISSING_EOS_PENALTY=5.0, MAX_NEW_TOKENS=2, KL_COEF=0.0)

    def compute_rewards(prompts, responses, answers, **columns):
        trainer.reward_parts["ones"] = torch.ones(len(prompts), dtype=torch.long)
        return trainer.reward_parts["ones"]

    trainer.compute_rewards = compute_rewards
    metrics = trainer.evaluate()
    assert metrics["reward/ones"] == 1 and metrics["reward"] == 1 - 5 * metrics["truncated_fraction"] < 1
    batch = trainer.rollout(trainer.train_rows[:2])
    trainer.compute_advantages(batch)
    trainer.state.step = 1
    assert "kl" not in trainer.update(batch)  # there is no reference


def test_each_group_of_parameters_keeps_the_proportion_of_its_learning_rate(make):
    trainer = make("ppo/ppo.py", USE_LR_SCHEDULER=True, MAX_STEPS=4)
    parameters = list(trainer.actor.parameters())
    groups = [{"params": parameters[:1], "lr": 1e-5}, {"params": parameters[1:]}]
    trainer.optimizers["policy"] = torch.optim.AdamW(groups, lr=1e-4)
    trainer.train()
    rates = [group["lr"] for group in trainer.optimizers["policy"].param_groups]
    assert rates == pytest.approx([0.25e-5, 0.25e-4])


def test_the_values_start_at_0_and_only_the_critic_trains_in_its_warm_up(make):
    trainer = make("ppo/ppo.py", CRITIC_WARMUP_STEPS=1, MAX_STEPS=1, CRITIC_LEARNING_RATE=1e-3)
    before = [p.clone() for p in trainer.actor.parameters()]
    assert trainer.critic.score.weight.abs().sum() == 0
    trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.actor.parameters()))
    assert trainer.critic.score.weight.abs().sum() > 0
    trainer.state.step = 2
    trainer.seed_step()
    batch = trainer.rollout(trainer.next_prompts())
    trainer.compute_advantages(batch)
    trainer.update(batch)
    assert not all(torch.equal(a, b) for a, b in zip(before, trainer.actor.parameters()))


def test_the_critic_can_begin_as_a_reward_model(make):
    trainer = make("ppo/ppo.py", CRITIC_MODEL=str(TINY / "reward_model"))
    batch = trainer.rollout(trainer.train_rows[:2])
    prompts = [row["prompt"] for row in batch.rows]
    last = batch.lengths - 1  # the value before the end is not the score, but both come from one head
    assert batch.values[range(len(last)), last].abs().sum() > 0
    assert torch.equal(trainer.critic.score.weight, trainer.reward_model.score.weight)
    assert trainer.reward_model_score(prompts, batch.texts).shape == (len(prompts),)


def test_the_loss_has_the_gradient_of_the_kl_penalty_and_of_the_entropy(make):
    """On one policy and one token the expected gradients are known: checked by finite differences."""
    trainer = make("ppo/ppo.py", ENTROPY_COEF=0.5, KL_COEF=0.0, REWARD_MODEL=None, WHITEN_ADVANTAGES=False)
    trainer.state.step = 1
    batch = trainer.rollout(trainer.train_rows[:1])
    trainer.compute_advantages(batch)
    batch.advantages = torch.zeros_like(batch.advantages)
    weight = trainer.actor.model.norm.weight
    recorded = []
    trainer.optimizers["policy"].step = lambda: recorded.append(weight.grad.clone())
    trainer.module.MAX_GRAD_NORM = 1e9
    trainer.optimizer_step(batch, torch.arange(4))

    def mean_entropy(shift):
        with torch.no_grad():
            weight[0] += shift
            _, entropy = trainer.module.logprobs_and_entropy(trainer.actor, batch, torch.arange(4))
            weight[0] -= shift
        mask = batch.mask[:, : entropy.shape[1]]
        return ((entropy * mask).sum() / mask.sum()).item()

    slope = (mean_entropy(1e-2) - mean_entropy(-1e-2)) / 2e-2
    assert recorded[0][0].item() == pytest.approx(-0.5 * slope, rel=2e-2)
