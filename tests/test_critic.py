"""What PPO's values are made of: the critic's model, and the least-squares fit of what the sampler knows."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import load_script

module = load_script("ppo/ppo.py")


def features_of(probabilities, mask, scores=None, group_size=1):
    scores = torch.zeros(len(mask)) if scores is None else torch.tensor(scores)
    return module.value_features(torch.tensor(probabilities).log(), torch.tensor(mask), scores, group_size, 8)


def test_value_features_are_known_before_the_token():
    probabilities = [[0.9, 0.4, 0.9, 0.9], [0.51, 0.6, 0.3, 0.2]]
    features = features_of(probabilities, [[1.0, 1, 1, 1], [1, 1, 1, 0]])
    assert features.shape == (2, 4, 5)
    assert features[:, :, 0].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert features[0, :, 1].tolist() == [0.125, 0.25, 0.375, 0.5]
    # The second token of the first row is unlikely: the tokens after it know that, itself does not
    assert features[0, :, 2].tolist() == [0, 0, 1, 1]
    assert features[1, :, 2].tolist() == [0, 0, 0, 1]
    assert features[:, :, 3:].abs().max() == 0  # one response per prompt
    # Two slips count as one
    assert features_of([[0.1] * 4], [[1.0] * 4])[0, :, 2].tolist() == [0, 1, 1, 1]
    # What stands outside the mask is no token of the response: it can be no slip
    assert features_of(probabilities[:1], [[1.0, 0, 1, 1]])[0, :, 2].tolist() == [0, 0, 0, 0]


def test_a_responses_own_score_is_no_feature_of_it():
    probabilities, mask = [[0.4, 0.9]] * 6, [[1.0, 1.0]] * 6
    features = features_of(probabilities, mask, [1.0, 2, 6, 0, 0, 3], group_size=3)
    others = [4, 3.5, 1.5, 1.5, 1.5, 0]
    assert features[:, 0, 3].tolist() == features[:, 1, 3].tolist() == others
    assert features[:, 0, 4].tolist() == [0] * 6
    assert features[:, 1, 4].tolist() == others


def test_the_fit_is_ridge_regression_with_forgetting():
    generator = torch.Generator().manual_seed(3)
    moments = None
    assert module.fitted_values(moments, torch.ones(2, 5, 3)).tolist() == [[0.0] * 5] * 2
    rows, wanted = [], []
    for step in range(3):
        features = torch.rand(4, 5, 3, generator=generator)
        targets = torch.rand(4, 5, generator=generator)
        mask = (torch.rand(4, 5, generator=generator) > 0.3).float()
        moments = module.fit_values(moments, features, targets, mask, 0.25)
        share = 0.25 ** (2 - step)  # a step that is n steps old counts 0.25 ** n
        chosen = mask.bool()
        rows.append(features[chosen].double().numpy() * math.sqrt(share))
        wanted.append(targets[chosen].double().numpy() * math.sqrt(share))
    x, y = np.concatenate([*rows, np.eye(3)]), np.concatenate([*wanted, np.zeros(3)])  # the penalty as rows
    weights = np.linalg.lstsq(x, y, rcond=None)[0]
    features = torch.rand(2, 5, 3, generator=generator)
    found = module.fitted_values(moments, features)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), features.numpy() @ weights, rtol=1e-5)


LENGTH = [(lambda prompts, responses, answers: [float(len(r)) for r in responses], 1.0)]


def step_of(trainer):
    """A batch after rollout, scoring, advantages and update."""
    batch = trainer.rollout(trainer.next_prompts())
    trainer.score(batch)
    trainer.compute_advantages(batch)
    trainer.update(batch)
    trainer.update_value_fit(batch)
    return batch


def test_a_value_is_the_critics_model_plus_the_fit_of_the_steps_before(ppo):
    trainer = ppo(
        REWARD_FUNCTIONS=[(lambda prompts, responses, answers: [float(len(r)) for r in responses], 1.0)],
        REWARD_MODEL=None,
        MAX_NEW_TOKENS=16,
        GROUP_SIZE=2,
    ).PPOTrainer()
    first = step_of(trainer)
    assert first.fitted_values.abs().max() == 0  # nothing was seen yet
    sizes = 2, 16
    features = module.value_features(first.logprobs, first.response_mask, first.scores, *sizes)
    moments = module.fit_values(None, features, first.returns - first.values, first.response_mask, 0.5)
    for found, expected in zip(trainer.state.value_moments, moments):
        torch.testing.assert_close(found, expected)

    second = trainer.rollout(trainer.next_prompts())
    trainer.score(second)
    mask = second.response_mask
    features = module.value_features(second.logprobs, mask, second.scores, *sizes)
    fitted = module.fitted_values(moments, features) * mask
    assert fitted.abs().max() > 1
    torch.testing.assert_close(second.fitted_values, fitted)
    model_values = module.map_micro_batches(module.response_values, trainer.critic, second)
    torch.testing.assert_close(second.values, model_values + fitted)
    # What is left for the next fit is what the model does not predict, whatever the last fit said
    trainer.compute_advantages(second)
    trainer.update(second)
    trainer.update_value_fit(second)
    expected = module.fit_values(moments, features, second.returns - model_values, mask, 0.5)
    for found, wanted in zip(trainer.state.value_moments, expected):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_without_a_decay_the_value_is_that_of_the_critics_model_alone(ppo):
    trainer = ppo(VALUE_FIT_DECAY=None).PPOTrainer()
    step_of(trainer)
    assert trainer.state.value_moments is None
    batch = trainer.rollout(trainer.next_prompts())
    trainer.score(batch)
    expected = module.map_micro_batches(module.response_values, trainer.critic, batch)
    assert torch.equal(batch.values, expected)


def test_the_critics_loss_is_that_of_model_and_fit_together(ppo):
    trainer = ppo(VALUE_CLIP_RANGE=0.0, REWARD_MODEL=None).PPOTrainer()
    batch = trainer.rollout(trainer.next_prompts())
    trainer.score(batch)
    generator = torch.Generator().manual_seed(1)
    batch.fitted_values = torch.rand(batch.values.shape, generator=generator) * batch.response_mask
    trainer.compute_advantages(batch)
    model_values = batch.values  # of a step whose fit was zero
    metrics = trainer.optimizer_step(batch, list(range(len(batch.rows))))
    errors = (model_values + batch.fitted_values - batch.returns).double() ** 2 * batch.response_mask
    wanted = 0.5 * errors.sum() / batch.response_mask.sum()
    assert metrics["value_loss"] == pytest.approx(wanted.item(), rel=1e-5)


def test_the_critics_targets_are_the_sums_of_the_rewards_that_came(ppo):
    trainer = ppo(KL_COEF=0.0, REWARD_MODEL=None, LAM=0.5, GAMMA=1.0).PPOTrainer()
    batch = trainer.rollout(trainer.next_prompts())
    trainer.score(batch)
    batch.values = torch.rand(batch.values.shape) * batch.response_mask
    batch.scores = torch.arange(len(batch.rows)).float()
    trainer.compute_advantages(batch)
    expected = batch.scores[:, None] * batch.response_mask
    torch.testing.assert_close(batch.returns * batch.response_mask, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("explained, is_said", [(0.04, True), (0.06, False), (-3.0, True)])
def test_a_critic_that_explains_nothing_is_said_once(ppo, explained, is_said):
    trainer = ppo().PPOTrainer()
    said = []
    trainer.run.log = said.append
    for _ in range(10):
        trainer.check_critic(0.9)  # the first ten steps do not count
    for _ in range(9):
        trainer.check_critic(explained)
    assert said == []
    trainer.check_critic(explained)
    trainer.check_critic(explained)
    assert len(said) == is_said
    if is_said:
        share = f"{max(0, round(100 * explained))}%"
        assert f"the critic explained {share} of the returns' variance" in said[0]
        assert "CRITIC_LEARNING_RATE" in said[0]


def test_record_hands_the_explained_variance_on(ppo, tmp_path):
    functions = [(lambda prompts, responses, answers: [float(len(r)) for r in responses], 1.0)]
    trainer = ppo(REWARD_MODEL=None, REWARD_FUNCTIONS=functions).PPOTrainer()
    trainer.run.open_files()
    trainer.run.next_step()
    batch = trainer.rollout(trainer.next_prompts())
    trainer.score(batch)
    trainer.compute_advantages(batch)
    trainer.record(batch, trainer.update(batch))
    (record,) = [json.loads(line) for line in open(tmp_path / "run/logs/metrics.jsonl")]
    assert trainer.explained_variances == [pytest.approx(record["explained_variance"])]


def test_equal_returns_have_no_explained_variance(ppo, tmp_path):
    functions = [(lambda prompts, responses, answers: [1.0] * len(responses), 1.0)]
    trainer = ppo(REWARD_MODEL=None, REWARD_FUNCTIONS=functions, KL_COEF=0.0).PPOTrainer()
    trainer.run.open_files()
    trainer.run.next_step()
    torch.nn.init.normal_(trainer.critic.score.weight)
    batch = trainer.rollout(trainer.next_prompts())
    trainer.score(batch)
    trainer.compute_advantages(batch)
    trainer.record(batch, trainer.update(batch))
    (record,) = [json.loads(line) for line in open(tmp_path / "run/logs/metrics.jsonl")]
    assert record["explained_variance"] is None or math.isnan(record["explained_variance"])
    assert trainer.explained_variances == []


def test_a_step_that_is_not_finite_leaves_the_fit_as_it_was(ppo):
    trainer = ppo(REWARD_MODEL=None, REWARD_FUNCTIONS=LENGTH).PPOTrainer()
    batch = step_of(trainer)
    before = trainer.state.value_moments
    assert before[1].abs().max() > 0
    batch.returns[0, 0] = math.nan
    trainer.update_value_fit(batch)
    assert trainer.state.value_moments is before


def test_a_run_that_resumes_without_the_fit_has_none(ppo, tmp_path):
    settings = dict(REWARD_MODEL=None, REWARD_FUNCTIONS=LENGTH, MAX_STEPS=1, EVAL_DATASETS=[])
    trainer = ppo(**settings).PPOTrainer()
    trainer.train()
    assert trainer.state.value_moments[1].abs().max() > 0
    folder = str(tmp_path / "run/step_1")
    trainer.run.lock.release(force=True)
    resumed = ppo(**settings).PPOTrainer(resume_from_checkpoint=folder)
    assert all(map(torch.equal, resumed.state.value_moments, trainer.state.value_moments))
    resumed.run.lock.release(force=True)
    resumed = ppo(**settings, VALUE_FIT_DECAY=None).PPOTrainer(resume_from_checkpoint=folder)
    assert resumed.run.step == 1
    assert resumed.state.value_moments is None


def test_a_checkpoints_fit_of_other_features_is_refused_with_what_to_do():
    moments = module.fit_values(None, torch.ones(2, 3, 4), torch.ones(2, 3), torch.ones(2, 3), 0.5)
    with pytest.raises(module.UserError) as refused:
        module.fitted_values(moments, torch.ones(2, 3, 5))
    expected = "value_features() gives 5 numbers, the checkpoint's fit has 4: resume once with"
    assert str(refused.value).startswith(expected)


def test_a_sixth_feature_is_one_edit(ppo):
    edited = ppo(REWARD_MODEL=None, REWARD_FUNCTIONS=LENGTH)
    five = edited.value_features
    edited.value_features = lambda *args: torch.cat([five(*args), five(*args)[:, :, 1:2] ** 2], 2)
    trainer = edited.PPOTrainer()
    step_of(trainer)
    assert step_of(trainer).fitted_values.abs().max() > 1
    assert trainer.state.value_moments[0].shape == (6, 6)
