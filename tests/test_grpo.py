"""GRPO's maths against hand-worked numbers and independent float64 sums; the classic bugs that concern it;
its runs."""

import copy
import json
import math
import shutil
import signal
import time
from contextlib import nullcontext
from types import SimpleNamespace

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
    small,
    untimed,
    walk,
    words_of,
)
from program import Program
from test_ppo import ENDS, algorithm_of, differences, digits, nudge, tiny_files, vowels
from transformers import AutoModelForCausalLM, AutoTokenizer

module = load_script("grpo/grpo.py")
LOSS_TYPES = ["grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo"]
GSPO = dict(LOSS_TYPE="gspo", CLIP_RANGE=3e-4, CLIP_RANGE_HIGH=4e-4)


def scored_batch(trainer, count=8):
    torch.manual_seed(5)
    batch = trainer.score(trainer.rollout(trainer.train_rows[:count]))
    trainer.compute_advantages(batch)
    trainer.select_tokens(batch)
    batch.sampled_logprobs = batch.logprobs  # update() does both
    return batch


def flat_weights(model):
    """All weights as one vector, a copy."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def every_row(batch):
    return list(range(len(batch.rows)))


def gradient(trainer, batch):
    """The metrics of an optimizer step, and the gradient at the moment the optimizer would step."""
    found = []

    def keep_gradient():
        found.append(torch.cat([p.grad.flatten() for p in trainer.actor.parameters()]))

    trainer.optimizers["policy"].step = keep_gradient
    return trainer.optimizer_step(batch, every_row(batch)), found[0]


def watch_scoring(script, monkeypatch):
    """A list that grows by (whether with a gradient, rows) at each call of response_logprobs()."""
    calls = []
    score = script.response_logprobs

    def spy(model, batch, rows, temperature):
        calls.append((torch.is_grad_enabled(), sorted(rows)))
        return score(model, batch, rows, temperature)

    monkeypatch.setattr(script, "response_logprobs", spy)
    return calls


# ---------------------------------------------------------------- advantages


def test_advantages_of_two_groups_of_three_by_hand():
    scores = torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0, 3.0])
    centred = torch.tensor([-2.0, -1.0, 3.0, -1.0, -1.0, 2.0])
    std = torch.tensor([math.sqrt(7)] * 3 + [math.sqrt(3)] * 3)  # ddof 1
    assert torch.allclose(module.group_advantages(scores, 3, "group", False), centred / (std + 1e-4))
    assert torch.allclose(module.group_advantages(scores, 3, "batch", False), centred / (scores.std() + 1e-4))
    assert torch.allclose(module.group_advantages(scores, 3, "none", False), centred)
    others = torch.tensor([1 - 4, 2 - 3.5, 6 - 1.5, 0 - 1.5, 0 - 1.5, 3 - 0.0])
    assert torch.allclose(module.group_advantages(scores, 3, "none", True), others)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_equal_scores_gets_zeros_not_nan(scale):
    got = module.group_advantages(torch.tensor([0.1, 0.1, 0.1, 0.1]), 2, scale, True)
    assert got.abs().max() < 1e-3 and got.isfinite().all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_one_has_no_advantage(scale):
    assert module.group_advantages(torch.tensor([0.3, 2.0, 5.0]), 1, scale, True).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "constants, says",
    [
        (
            {"GROUP_SIZE": 1},
            "GROUP_SIZE = 1 has nothing to compare with: take 2 or more, or distil: rewards of",
        ),
        (
            {"GROUP_SIZE": 1, "REWARD_FUNCTIONS": [("exact_answer", 0.0)]},
            "GROUP_SIZE = 1 has nothing",
        ),  # no KL
        ({"GROUP_SIZE": 1, "KL_COEF": 1.0}, "GROUP_SIZE = 1 has nothing"),
        (
            {"KL_COEF": 1.0, "REWARD_FUNCTIONS": [("exact_answer", 0.0)], "RESAMPLE_FLAT_GROUPS": 2},
            "RESAMPLE_FLAT_GROUPS = 2: with rewards of weight 0 all groups are flat: set it to 0",
        ),
    ],
)
def test_a_group_of_one_is_for_distillation_which_has_only_flat_groups(grpo, constants, says):
    script = grpo(**constants)
    with pytest.raises(script.UserError, match=says):
        script.GRPOTrainer()


DISTIL = dict(REWARD_FUNCTIONS=[("exact_answer", 0.0)], KL_COEF=0.7)


def test_distillation_has_the_gradient_of_half_the_squared_log_ratio_to_the_teacher(grpo, tmp_path):
    """The mean over tokens of KL_COEF (log pi - log pi_teacher) grad log pi, from one response a prompt."""
    teacher = moved_policy(tmp_path / "teacher")
    trainer = grpo(**DISTIL, GROUP_SIZE=1, REFERENCE_MODEL=teacher, MAX_GRAD_NORM=1e9).GRPOTrainer()
    batch = scored_batch(trainer, 6)
    assert batch.advantages.tolist() == [0] * 6
    got = gradient(trainer, batch)[1]
    loss = 0
    ours = AutoModelForCausalLM.from_pretrained(TINY / "policy", dtype=torch.float64)
    theirs = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    for row, ids, n in zip(batch.rows, batch.response_ids.tolist(), batch.response_lengths.tolist()):
        whole = torch.tensor([row["ids"] + ids[:n]])
        chosen = whole[0, -n:, None]
        logs = [m(whole).logits[0, -n - 1 : -1].log_softmax(-1).gather(1, chosen) for m in (ours, theirs)]
        loss = loss + 0.7 * ((logs[0] - logs[1].detach()) ** 2 / 2).sum() / batch.response_mask.sum()
    loss.backward()
    assert distance(got, torch.cat([p.grad.flatten() for p in ours.parameters()])) < 1e-4


def test_best_follows_the_kl_to_the_teacher_where_all_rewards_have_weight_0(grpo, tmp_path):
    """A student goes to its teacher; too large a rate then leads it away again."""
    teacher = moved_policy(tmp_path / "teacher", 1.3)
    terms = dict(REFERENCE_MODEL=teacher, MAX_STEPS=3, EVAL_EVERY_N_STEPS=1, GROUP_SIZE=1, BATCH_SIZE=8)
    script = grpo(**DISTIL, **terms, KL_ESTIMATOR="k2")

    class Trainer(script.GRPOTrainer):
        def update(self, batch):
            script.LEARNING_RATE = [1e-3, 1e-3, 1e-1][self.run.step - 1]
            return super().update(batch)

        def evaluate(self, prompts=None, answers=None):
            self.seen = []
            metrics = super().evaluate(prompts, answers)
            tokens = sum(mask.sum().item() for _, mask in self.seen)
            apart = sum((values * mask).sum().item() for values, mask in self.seen)
            assert metrics["kl"] == pytest.approx(apart / tokens, rel=1e-5)
            return metrics

        def reference_logprobs(self, batch):
            found = super().reference_logprobs(batch)
            self.seen = [((batch.logprobs - found) ** 2 / 2, batch.response_mask)]
            return found

    trainer = Trainer()
    trainer.train()
    records = [r for r in read(tmp_path / "run/logs/metrics.jsonl") if r["phase"] == "eval"]
    kl = [r["kl"] for r in records]
    assert [r["minus_kl"] for r in records] == [-x for x in kl] and [r["reward"] for r in records] == [0] * 4
    assert kl[0] > kl[1] > kl[2] > 0 and kl[3] > kl[2]
    assert json.loads((tmp_path / "run/best/metrics.json").read_text())["step"] == 2


def test_a_run_with_a_reward_has_best_follow_that(grpo):
    for constants in ({"KL_COEF": 0.1}, {**DISTIL, "OVERLONG_BUFFER": 4}, {**DISTIL, "KL_COEF": 0.0}):
        trainer = grpo(**constants).GRPOTrainer()
        assert not trainer.distils and trainer.run.best_by == ["reward"]


def test_overlong_penalty_by_hand():
    got = module.overlong_penalty(torch.tensor([10.0, 60, 70, 80, 100]), 100, 40)
    assert got.tolist() == pytest.approx([0, 0, -0.25, -0.5, -1])
    assert module.overlong_penalty(torch.ones(2), 100, 0).tolist() == [0, 0]


# ---------------------------------------------------------------- losses


def by_hand(loss_type, new, old, advantages, lengths, low, high, dual, max_new):
    """The loss of a step in float64, token by token, straight from the papers' sums."""
    total = 0.0
    rows = len(lengths)
    tokens = sum(lengths)
    for i, n in enumerate(lengths):
        a = advantages[i]
        logs = [float(new[i][t].detach() - old[i][t]) for t in range(n)]
        weight = {
            "grpo": 1 / n / rows,
            "gspo": 1 / n / rows,
            "sapo": 1 / n / rows,
            "dapo": 1 / tokens,
            "cispo": 1 / tokens,
            "dr_grpo": 1 / (rows * max_new),
        }[loss_type]
        for t in range(n):
            rho = math.exp(sum(logs) / n if loss_type == "gspo" else logs[t])
            if loss_type == "cispo":
                loss = -min(rho, 1 + high) * a * float(new[i][t].detach())
            elif loss_type == "sapo":
                tau = 1.0 if a > 0 else 1.05
                loss = -4 / tau / (1 + math.exp(-tau * (rho - 1))) * a
            else:
                gain = min(rho * a, min(max(rho, 1 - low), 1 + high) * a)
                loss = -(max(gain, dual * a) if dual and a < 0 else gain)
            total += loss * weight
    return total


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("dual", [None, 1.5])
def test_each_loss_against_an_independent_sum_in_float64(loss_type, dual):
    torch.manual_seed(0)
    lengths = [7, 1, 4, 5]
    max_new = 9
    mask = (torch.arange(7) < torch.tensor(lengths)[:, None]).double()
    old = -torch.rand(4, 7, dtype=torch.float64) * mask
    new = (old + 0.6 * torch.randn(4, 7, dtype=torch.float64) * mask).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0], dtype=torch.float64)
    losses, ratio = module.policy_loss(new, old, advantages[:, None], mask, loss_type, 0.2, 0.3, dual)
    got = (losses * module.token_weights(mask, loss_type, max_new)).sum()
    want = by_hand(loss_type, new, old, advantages.tolist(), lengths, 0.2, 0.3, dual, max_new)
    assert got.item() == pytest.approx(want, abs=1e-7 if loss_type == "sapo" else 1e-12)  # tau is float32
    got.backward()
    assert new.grad.abs().sum() > 0
    assert (new.grad[mask == 0] == 0).all()


@pytest.mark.parametrize(
    "advantage, ratio, gradient",
    [
        (1, 0.5, True),
        (1, 0.9, True),
        (1, 1.1, True),
        (1, 1.5, False),
        (-1, 0.5, False),
        (-1, 0.9, True),
        (-1, 1.1, True),
        (-1, 1.5, True),
        (-1, 4.0, False),
    ],
)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "gspo"])
def test_the_clip_has_a_gradient_exactly_where_it_should(loss_type, advantage, ratio, gradient):
    logprobs = torch.full((1, 2), math.log(ratio), dtype=torch.float64).requires_grad_()
    advantages = torch.tensor([[float(advantage)]])
    mask = torch.ones(1, 2)
    losses, _ = module.policy_loss(logprobs, torch.zeros(1, 2), advantages, mask, loss_type, 0.2, 0.2, 3.0)
    losses.mean().backward()
    assert logprobs.grad.sum().item() == pytest.approx(-advantage * ratio if gradient else 0.0)


def test_cispo_keeps_the_gradient_of_clipped_tokens_with_a_bounded_weight():
    logprobs = torch.tensor([[math.log(9.0), math.log(0.5)]], dtype=torch.float64, requires_grad=True)
    losses, _ = module.policy_loss(
        logprobs, torch.zeros(1, 2), torch.ones(1, 1), torch.ones(1, 2), "cispo", 0.2, 3.0
    )
    losses.sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx([-4.0, -0.5])


@pytest.mark.parametrize("advantage, tau", [(2.0, 1.0), (-2.0, 1.05)])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
def test_sapos_gradient_is_grpos_on_policy_and_falls_to_either_side(advantage, tau, ratio):
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    losses, _ = module.policy_loss(
        logprobs, torch.zeros(1, 1), torch.tensor([[advantage]]), torch.ones(1, 1), "sapo", 0.2, 0.2
    )
    losses.sum().backward()
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert logprobs.grad.item() == pytest.approx(-4 * gate * (1 - gate) * ratio * advantage, rel=1e-6)
    assert ratio != 1 or logprobs.grad.item() == pytest.approx(-advantage)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_of_a_two_token_policy_has_the_analytic_gradient(estimator):
    theta = torch.tensor([0.3, -0.5], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.9, 0.1], dtype=torch.float64).log()
    analytic = (theta.softmax(0) * (theta.log_softmax(0) - ref)).sum()
    (want,) = torch.autograd.grad(analytic, theta)
    logprobs = theta.log_softmax(0)
    # on policy: each token as often as it is sampled
    mean = (logprobs.exp().detach() * module.kl_loss(logprobs, ref, estimator)).sum()
    (got,) = torch.autograd.grad(mean, theta)
    assert torch.allclose(got, want)
    assert want.abs().max() > 0.1
    if estimator != "k2":
        assert mean.item() == pytest.approx(analytic.item())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradients_and_metrics_do_not_depend_on_the_micro_batch_or_padding(grpo, loss_type):
    reference = None
    for size, extra in ((8, 0), (3, 0), (1, 0), (8, 5)):
        terms = dict(LOSS_TYPE=loss_type, KL_COEF=0.1, ENTROPY_COEF=0.01)
        trainer = grpo(**terms, BATCH_SIZE=size, MAX_GRAD_NORM=1e9).GRPOTrainer()
        batch = scored_batch(trainer)
        assert len(set(batch.response_lengths.tolist())) > 3
        assert batch.advantages.abs().max() > 0.4
        batch.logprobs = batch.logprobs - 0.1 * batch.response_mask
        for key, values in list(vars(batch).items()):
            if isinstance(values, torch.Tensor) and values.dim() == 2:
                setattr(batch, key, torch.nn.functional.pad(values, (0, extra)))
        metrics, got = gradient(trainer, batch)
        reference = reference or (metrics, got)
        assert distance(got, reference[1]) < 1e-4
        assert metrics == pytest.approx(reference[0], rel=1e-3, abs=1e-5)


def test_dr_grpo_does_not_divide_by_a_std(grpo):
    trainer = grpo(LOSS_TYPE="dr_grpo").GRPOTrainer()
    batch = scored_batch(trainer)
    groups = batch.scores.view(-1, 2)
    assert torch.equal(batch.advantages, (groups - groups.mean(1, keepdim=True)).flatten())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_trains_and_the_first_ratio_is_one(grpo, loss_type):
    sizes = dict(MAX_STEPS=2, BATCH_SIZE=12, GROUP_SIZE=4)
    trainer = grpo(LOSS_TYPE=loss_type, **sizes, EVAL_DATASETS=[]).GRPOTrainer()
    before = [p.detach().clone() for p in trainer.actor.parameters()]
    trainer.train()
    records = read(trainer.run.logs["metrics.jsonl"].name)
    assert len(records) == 2
    assert all(r["first_ratio_deviation"] < NATS for r in records)
    assert all(math.isfinite(r["grad_norm"]) and r["grad_norm"] > 0 for r in records)
    assert all((p != q).any() for p, q in zip(trainer.actor.parameters(), before))


# ---------------------------------------------------------------- what is trained


def test_masked_truncated_responses_have_no_gradient_and_the_others_all_of_theirs(grpo):
    trainer = grpo(MASK_TRUNCATED=True, MAX_NEW_TOKENS=14, LOSS_TYPE="dapo", MAX_GRAD_NORM=1e9).GRPOTrainer()
    batch = scored_batch(trainer)
    assert 0 < batch.truncated.sum() < len(batch.truncated)
    assert (batch.trained[batch.truncated] == 0).all()
    assert torch.equal(batch.trained[~batch.truncated], batch.response_mask[~batch.truncated])
    batch.advantages = torch.where(batch.truncated, 1.0, 0.0)
    assert (gradient(trainer, batch)[1] == 0).all()


def test_only_the_top_entropy_tokens_are_trained(grpo):
    trainer = grpo(TOP_ENTROPY_FRACTION=0.2).GRPOTrainer()
    batch = scored_batch(trainer)
    mask = batch.response_mask > 0
    least = batch.entropies[mask].quantile(0.8)  # the paper's; quantile() itself takes 2**24 tokens at most
    assert torch.equal(batch.trained > 0, mask & (batch.entropies >= least))
    assert (batch.trained[~mask] == 0).all()
    assert batch.entropies[batch.trained > 0].min() >= batch.entropies[mask & (batch.trained == 0)].max()


def test_entropy_bonus_has_a_gradient(grpo):
    for coefficient in (0.0, 0.5):
        trainer = grpo(ENTROPY_COEF=coefficient).GRPOTrainer()
        batch = scored_batch(trainer)
        batch.advantages = torch.zeros_like(batch.advantages)
        assert (gradient(trainer, batch)[1].abs().max() > 0) == (coefficient > 0)


def test_kl_in_the_loss_has_a_gradient_once_the_actor_has_moved(grpo):
    trainer = grpo(KL_COEF=0.5).GRPOTrainer()
    with torch.no_grad():
        for p in trainer.actor.parameters():
            p.mul_(1.02)
    batch = scored_batch(trainer)
    batch.advantages = torch.zeros_like(batch.advantages)
    metrics, got = gradient(trainer, batch)
    assert got.abs().max() > 0 and metrics["kl"] > 0


def equal_scores(trainer, groups):
    """A batch of 8 groups of 2 whose scores are equal within these groups, and differ within the others."""
    batch = scored_batch(trainer)
    batch.scores = torch.tensor([1.0, 0.0] * 8)
    for group in groups:
        batch.scores[2 * group : 2 * group + 2] = 1.0
    trainer.compute_advantages(batch)
    return batch


def with_length_term(script, coefficient=0.1):
    """A trainer whose loss has a term of the user's own: long responses become less likely."""

    class Shorter(script.GRPOTrainer):
        def token_losses(self, batch, rows, logprobs, entropy):
            losses, *others = super().token_losses(batch, rows, logprobs, entropy)
            return losses + coefficient * batch.response_lengths[rows, None] * logprobs, *others

    return Shorter()


@pytest.mark.parametrize("skip", [True, False])
def test_a_term_added_to_the_loss_is_trained_on_groups_whose_scores_are_equal(grpo, monkeypatch, skip):
    script = grpo(SKIP_FLAT_GROUPS=skip, MAX_GRAD_NORM=1e9)
    trainer = with_length_term(script)
    batch = equal_scores(trainer, range(8))
    assert not batch.advantages.any()
    calls = watch_scoring(script, monkeypatch)
    _, got = gradient(trainer, batch)
    assert [learn for learn, _ in calls] == [True] * len(calls)
    assert sorted(i for _, rows in calls for i in rows) == list(range(16))  # each row once
    trainer.actor.zero_grad()
    logprobs, _ = module.response_logprobs(trainer.actor, batch, every_row(batch), 1.0)
    losses = 0.1 * batch.response_lengths[:, None] * logprobs
    (losses.sum() / batch.response_mask.sum()).backward()
    wanted = torch.cat([p.grad.flatten() for p in trainer.actor.parameters()])
    assert wanted.norm() > 0.01
    assert distance(got, wanted) < 1e-4


def test_a_term_added_to_the_loss_is_trained_beside_the_policys_own(grpo):
    found = []
    for skip, term in ((True, 0.0), (True, 0.1), (False, 0.1)):
        script = grpo(SKIP_FLAT_GROUPS=skip, MAX_GRAD_NORM=1e9)
        trainer = with_length_term(script, term)
        found.append(gradient(trainer, equal_scores(trainer, [1, 2, 5, 7]))[1])
    without, skipping, every = found
    assert distance(skipping, every) < 1e-4
    assert distance(skipping, without) > 0.1


@pytest.mark.parametrize("moves", [-1, 1])
def test_a_term_that_counts_only_where_the_policy_has_moved_is_trained(grpo, monkeypatch, moves):
    script = grpo()

    class Careful(script.GRPOTrainer):
        def token_losses(self, batch, rows, logprobs, entropy):
            losses, *others = super().token_losses(batch, rows, logprobs, entropy)
            apart = logprobs - batch.logprobs[rows, : logprobs.shape[1]]
            return losses + (moves * apart).relu() ** 2, *others

    trainer = Careful()
    batch = equal_scores(trainer, [1, 2, 5, 7])
    batch.logprobs = batch.logprobs - 0.1 * moves * batch.response_mask
    calls = watch_scoring(script, monkeypatch)
    trainer.optimizer_step(batch, every_row(batch))
    assert sorted(i for learn, rows in calls if learn for i in rows) == list(range(16))


@pytest.mark.parametrize("constants", [{}, GSPO, {"LOSS_TYPE": "cispo"}], ids=["dapo", "gspo", "cispo"])
def test_without_a_term_flat_groups_alone_are_left_out_and_the_gradient_is_the_same(
    grpo, monkeypatch, constants
):
    """Whatever the clip range: a tight one must not take a negative advantage for none."""
    learning = {}
    found = []
    for skip in (True, False):
        script = grpo(**constants, SKIP_FLAT_GROUPS=skip, MAX_GRAD_NORM=1e9)
        trainer = script.GRPOTrainer()
        batch = equal_scores(trainer, [1, 2, 5, 7])
        calls = watch_scoring(script, monkeypatch)
        found.append(gradient(trainer, batch))
        learning[skip] = sorted(i for learn, rows in calls if learn for i in rows)
    assert learning == {True: [0, 1, 6, 7, 8, 9, 12, 13], False: list(range(16))}
    (some_metrics, some), (all_metrics, every) = found
    assert distance(some, every) < 1e-4
    assert some_metrics == pytest.approx(all_metrics, rel=1e-3, abs=NATS)


def test_rows_that_are_masked_out_are_left_out_whatever_the_loss(grpo, monkeypatch):
    script = grpo(MASK_TRUNCATED=True, MAX_NEW_TOKENS=14, ENTROPY_COEF=0.1)
    trainer = with_length_term(script)
    batch = equal_scores(trainer, [1, 2, 5, 7])
    calls = watch_scoring(script, monkeypatch)
    trainer.optimizer_step(batch, every_row(batch))
    learning = [i for learn, rows in calls if learn for i in rows]
    assert sorted(learning) == (~batch.truncated).nonzero().flatten().tolist()
    assert 0 < len(learning) < 16


def test_flat_groups_make_place_for_further_prompts(grpo):
    script = grpo(RESAMPLE_FLAT_GROUPS=3, BATCH_SIZE=6, GROUP_SIZE=2)
    trainer = script.GRPOTrainer()
    batch = trainer.rollout_and_score()
    assert len(batch.rows) == 12
    assert script.flat_groups(batch.scores).sum() < 6 * batch.flat_groups
    assert trainer.state.cursor > 6  # further prompts were taken
    ids = [row["id"] for row in batch.rows]
    assert ids[::2] == ids[1::2]
    assert len(set(ids)) == 6
    with torch.no_grad():  # the joined batch is whole: ids, masks and log-probabilities still belong together
        scored, _ = module.response_logprobs(trainer.actor, batch, torch.arange(12), 1.0)
    assert torch.allclose(scored * batch.response_mask, batch.logprobs, atol=NATS)
    assert batch.response_mask.sum(1).tolist() == batch.response_lengths.tolist()
    assert [prompt for prompt, _, _ in batch.sequences] == [row["ids"] for row in batch.rows]
    answers = [row["answer"] for row in batch.rows]
    assert batch.scores.tolist() == trainer.accuracy_function([], batch.responses, answers)
    trainer.compute_advantages(batch)
    trainer.update(batch)


def all_equal(prompts, responses, answers):
    return [1.0] * len(responses)


def test_resampling_is_bounded(grpo, monkeypatch):
    trainer = grpo(RESAMPLE_FLAT_GROUPS=2, REWARD_FUNCTIONS=[(all_equal, 1.0)]).GRPOTrainer()
    rollout = trainer.rollout
    calls = []

    def spy(prompts):
        calls.append(len(prompts))
        return rollout(prompts)

    monkeypatch.setattr(trainer, "rollout", spy)
    batch = trainer.rollout_and_score()
    assert calls == [4, 4, 4]
    assert batch.flat_groups == 1.0


def test_rewards_and_overlong_penalty_add_up(grpo):
    model = dict(REWARD_MODEL=str(TINY / "reward_model"), REWARD_MODEL_WEIGHT=0.5)
    functions = [("exact_answer", 2.0), ("answer_format", 0.1)]
    overlong = dict(OVERLONG_BUFFER=16, OVERLONG_PENALTY=3.0)
    trainer = grpo(**model, **overlong, REWARD_FUNCTIONS=functions).GRPOTrainer()
    batch = scored_batch(trainer)
    parts = batch.reward_parts
    penalty = module.overlong_penalty(batch.response_lengths.float(), 32, 16)
    want = 0.5 * parts["reward_model"] + 2 * parts["exact_answer"] + 0.1 * parts["answer_format"]
    assert torch.allclose(batch.scores, want + 3 * penalty, atol=1e-5)
    assert penalty.min() < 0


def test_rewards_are_asked_about_whole_groups(grpo):
    """Some compare the responses to one prompt."""
    asked = []

    def note(prompts, responses, answers):
        asked.append(prompts)
        return [0.0] * len(responses)

    trainer = grpo(BATCH_SIZE=3, GROUP_SIZE=4, REWARD_FUNCTIONS=[(note, 1.0)]).GRPOTrainer()
    scored_batch(trainer, 8)
    prompts = [row["prompt"] for row in trainer.train_rows[:8] for _ in range(4)]
    assert asked == [prompts[:12], prompts[12:24], prompts[24:]]


def test_the_reference_follows_the_actor_when_asked(grpo):
    follow = dict(KL_COEF=0.1, REFERENCE_SYNC_STEPS=2, REFERENCE_SYNC_ALPHA=0.25)
    script = grpo(**follow, MAX_STEPS=3, EVAL_DATASETS=[])
    actors = []

    class Spy(script.GRPOTrainer):
        def sync_reference(self):
            actors.append(flat_weights(self.actor))
            super().sync_reference()

    trainer = Spy()
    first = flat_weights(trainer.reference)
    trainer.train()
    reference = flat_weights(trainer.reference)
    assert len(actors) == 3
    assert torch.allclose(reference, 0.75 * first + 0.25 * actors[1], atol=1e-7)  # after the second step
    assert (reference != first).any()


@pytest.mark.parametrize("path, name", [("grpo/grpo.py", "GRPOTrainer"), ("ppo/ppo.py", "PPOTrainer")])
def test_the_greatest_ratio_of_a_step_is_that_of_its_passes(path, name, tmp_path):
    script = load_script(path, **small(path, OUTPUT_DIR=str(tmp_path / "run"), GROUP_EPOCHS=3))
    trainer = getattr(script, name)()
    passes = iter([0.0, 0.5, 0.25])
    trainer.optimizer_step = lambda *some, **more: {
        "max_ratio_deviation": next(passes),
        "loss": 1.0,
        "mean_abs_log_ratio": 0.0,
    }
    zeros = torch.zeros(2, 3)
    metrics = trainer.update(
        SimpleNamespace(
            rows=[0, 1], logprobs=zeros, ref_logprobs=zeros, entropies=zeros, response_mask=zeros + 1
        )
    )
    assert (metrics["max_ratio_deviation"], metrics["first_ratio_deviation"], metrics["loss"]) == (
        0.5,
        0.0,
        1.0,
    )


# ---------------------------------------------------------------- evaluation and runs


def test_pass_at_k_counts_a_problem_that_any_of_k_samples_solves(grpo, monkeypatch):
    script = grpo(EVAL_SAMPLES=2)
    trainer = script.GRPOTrainer()
    golds = [r["answer"] for r in trainer.eval_rows]
    said = [golds[0], "no", "no", "no", golds[2], golds[2], "no", golds[3]]
    respond = script.respond

    def scripted(model, tokenizer, prompts, uniform, group_size=1):
        batch = respond(model, tokenizer, prompts, uniform, group_size)
        batch.responses = ["no"] * 4 if uniform is None else said
        return batch

    monkeypatch.setattr(script, "respond", scripted)
    metrics = trainer.evaluate()
    assert metrics["pass@1"] == metrics["accuracy_sampled"] == 0.5
    assert metrics["pass@2"] == 0.75
    assert metrics["accuracy_greedy"] == 0


# As much state as there can be: an epoch's end, further prompts, a reference that follows, mini-batches
KILLED = (
    "MAX_STEPS=6",
    "SAVE_EVERY_N_STEPS=3",
    "EVAL_EVERY_N_STEPS=2",
    "MINI_BATCHES=2",
    "KL_COEF=0.1",
    "GROUP_SIZE=3",
    "REFERENCE_SYNC_STEPS=2",
    "RESAMPLE_FLAT_GROUPS=1",
    "NUM_EPOCHS=3",
)


def test_six_steps_equal_three_a_kill_a_resume_and_three_bit_for_bit(tmp_path, started):
    whole = tmp_path / "unbroken"
    killed = tmp_path / "killed"
    path = "grpo/grpo.py"
    assert started(path, *KILLED, f"OUTPUT_DIR={whole}").returncode == 0
    process = Program(ROOT / path, *words_of(path, *KILLED, f"OUTPUT_DIR={killed}"), cwd=ROOT)
    metrics = killed / "logs/metrics.jsonl"
    while not (metrics.exists() and '"phase": "train", "step": 4,' in metrics.read_text()):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait().returncode == -signal.SIGKILL
    assert not (killed / "step_6").exists()
    assert started(path, *KILLED, f"OUTPUT_DIR={killed}", "RESUME=yes").returncode == 0
    same = ("step_6/policy/model.safetensors", "step_6/reference/model.safetensors", "logs/samples.jsonl")
    for name in same:
        assert (whole / name).read_bytes() == (killed / name).read_bytes()
    assert_same_state(whole / "step_6/training_state.pt", killed / "step_6/training_state.pt")
    assert untimed(whole / "logs/metrics.jsonl") == untimed(metrics)


def test_a_run_writes_its_files_and_metrics(grpo, tmp_path):
    trainer = grpo(MAX_STEPS=2, EVAL_EVERY_N_STEPS=1, GROUP_SIZE=4).GRPOTrainer()
    trainer.train()
    out = tmp_path / "run"
    assert sorted(p.name for p in out.glob("[!.]*")) == [
        "best",
        "grpo_metrics_with_entropy.png",
        "logs",
        "step_2",
        "training_config.json",
        "training_metrics_detailed.png",
    ]
    wanted = """step epoch policy_loss reward reward/exact_answer advantage_abs entropy kl approx_kl
        clip_fraction first_ratio_deviation grad_norm learning_rate response_length truncated_fraction 
        zero_variance_groups
        tokens_per_second seconds/rollout seconds/score seconds/update"""
    train = next(r for r in read(out / "logs/metrics.jsonl") if r["phase"] == "train")
    assert set(wanted.split()) <= train.keys()
    assert len(read(out / "logs/samples.jsonl")) == 8
    # the policy of one run is the actor of the next
    again = grpo(OUTPUT_DIR=str(tmp_path / "next"), ACTOR_MODEL=str(out / "best/policy"), MAX_STEPS=1)
    trainer = again.GRPOTrainer()
    trainer.train()


# ---------------------------------------------------------------- what an audit found


def flat_script(grpo, **constants):
    """A script whose groups are all flat, so it asks for all the prompts it may; and the ids that it rolls
    out."""
    resample = dict(REWARD_FUNCTIONS=[(all_equal, 1.0)], RESAMPLE_FLAT_GROUPS=1)
    sizes = dict(MAX_STEPS=None, EVAL_DATASETS=[], MAX_TRAIN_PROMPTS=10, MAX_NEW_TOKENS=4)
    script = grpo(**{**resample, **sizes, **constants})
    taken = []

    class Spy(script.GRPOTrainer):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)

        def rollout(self, prompts):
            taken.extend(row["id"] for row in prompts)
            return super().rollout(prompts)

    script.GRPOTrainer = Spy
    return script, taken


@pytest.mark.parametrize("epochs, rounds, steps", [(2, 1, 3), (2, 2, 2), (2, 9, 1), (1, 1, 2)])
def test_further_prompts_come_out_of_the_runs_own_epochs(grpo, epochs, rounds, steps, capsys):
    held_out = module.EVAL_DATASETS
    script, taken = flat_script(grpo, NUM_EPOCHS=epochs, RESAMPLE_FLAT_GROUPS=rounds, EVAL_DATASETS=held_out)
    trainer = script.GRPOTrainer()
    assert trainer.run.total_steps == 3 * epochs  # of 4 + 4 + 2 prompts, if none were flat
    trainer.train()
    assert len(taken) == 10 * epochs
    for i in range(0, len(taken), 10):
        assert len(set(taken[i : i + 10])) == 10
    records = read(trainer.run.logs["metrics.jsonl"].name)
    assert len([r for r in records if r["phase"] == "train"]) == steps
    assert trainer.run.step == trainer.run.total_steps == steps
    last = records[-1]
    assert (last["phase"], last["step"]) == ("eval", steps)  # the end is known, and evaluated
    assert f"Done at step {steps} of {steps}" in capsys.readouterr().out


def test_a_run_that_resampled_resumes_to_the_same_end(grpo, tmp_path):
    constants = dict(NUM_EPOCHS=3, SAVE_EVERY_N_STEPS=1, KEEP_LAST_N_CHECKPOINTS=9, USE_LR_SCHEDULER=True)
    script, taken = flat_script(grpo, **constants)
    script.GRPOTrainer().train()
    script, again = flat_script(grpo, OUTPUT_DIR=str(tmp_path / "again"), **constants)
    trainer = script.GRPOTrainer(resume_from_checkpoint=str(tmp_path / "run/step_2"))
    trainer.train()
    assert len(again) < 30 == len(taken)
    assert taken[-len(again) :] == again
    steps = [line for line in untimed(tmp_path / "run/logs/metrics.jsonl") if line["step"] > 2]
    assert untimed(trainer.run.logs["metrics.jsonl"].name) == steps
    assert len({line["learning_rate"] for line in steps}) == len(steps) > 1


def first_step_of_gspo(grpo, dtype, **constants):
    """The trainer, its batch and the metrics of its optimizer steps."""
    script = grpo(**GSPO, DTYPE=dtype, GROUP_SIZE=4, BATCH_SIZE=8, **constants)
    steps = []

    class Spy(script.GRPOTrainer):
        def optimizer_step(self, *arguments, **options):
            steps.append(super().optimizer_step(*arguments, **options))
            return steps[-1]

    trainer = Spy()
    batch = scored_batch(trainer)
    batch.scores = torch.tensor([1.0, 0, 0, 1] * 8)
    trainer.compute_advantages(batch)
    sampled = batch.logprobs.clone()
    trainer.update(batch)
    assert torch.equal(batch.sampled_logprobs, sampled)
    return trainer, batch, steps


@pytest.mark.parametrize("constants", [{}, {"MINI_BATCHES": 2}, {"GRADIENT_CHECKPOINTING": True}])
def test_gspo_clips_nothing_on_policy_in_bfloat16(grpo, constants):
    trainer, batch, steps = first_step_of_gspo(grpo, "bfloat16", **constants)
    noise = (batch.logprobs - batch.sampled_logprobs).abs().max()
    assert noise > 1e-3  # which the clip range would take for a change of the policy
    assert steps[0]["clip_fraction"] == 0
    assert steps[0]["max_ratio_deviation"] < 3e-4


def test_gspos_old_log_probabilities_are_those_before_the_first_update(grpo):
    _, batch, steps = first_step_of_gspo(grpo, "bfloat16", GROUP_EPOCHS=2, MINI_BATCHES=2, LEARNING_RATE=3e-3)
    assert len(steps) == 4
    assert (
        min(step["max_ratio_deviation"] for step in steps[1:]) > 3e-3
    )  # later steps see that the policy has moved
    script = grpo(DTYPE="bfloat16", BATCH_SIZE=8, GROUP_SIZE=4)
    fresh = script.GRPOTrainer()
    with torch.no_grad():
        before, _ = script.response_logprobs(fresh.actor, batch, every_row(batch), 1.0)
    assert torch.allclose(batch.logprobs, before, rtol=0.02, atol=0.02)


def test_gspo_in_float32_takes_the_samplers_own(grpo):
    trainer, batch, steps = first_step_of_gspo(grpo, "float32")
    assert batch.logprobs is batch.sampled_logprobs
    assert steps[0]["clip_fraction"] == 0


@pytest.mark.parametrize("loss_type", ["cispo", "sapo"])
def test_cispo_with_a_dual_clip_is_refused(grpo, loss_type):
    script = grpo(LOSS_TYPE=loss_type, DUAL_CLIP=3.0)
    says = f"DUAL_CLIP = 3.0 does nothing with LOSS_TYPE = '{loss_type}': set it to None"
    with pytest.raises(script.UserError, match=says):
        script.GRPOTrainer()
    grpo(LOSS_TYPE="gspo", DUAL_CLIP=3.0).GRPOTrainer()


def moved_policy(folder, factor=1.05):
    """The tiny policy with every weight times a factor, saved in folder."""
    shutil.copytree(TINY / "policy", folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    model.save_pretrained(folder)
    return str(folder)


def test_evaluating_takes_nothing_from_the_random_streams_of_training(grpo):
    def generators():
        """Plain values only: torch's tensor as its numbers."""
        return [(key, getattr(x, "tolist", lambda: x)()) for key, x in walk(script.get_rng_state())]

    script = grpo()
    trainer = script.GRPOTrainer()
    before = generators()
    first = trainer.evaluate()
    assert generators() == before
    torch.manual_seed(99)
    assert trainer.evaluate() == first


def after_evaluations(trainer, monkeypatch, values, greedy=None):
    """The rewards at which best/ was saved, and the patience and halvings after each of these evaluations;
    greedy: their greedy accuracies."""
    saved = []
    patience = []
    halvings = []

    def write_best(metrics, policy, weights, folder):
        folder.mkdir()
        saved.append(metrics["reward"])

    def write_metrics(phase, metrics):
        assert phase == "eval"

    run = trainer.run
    monkeypatch.setattr(run, "write_best", write_best)
    monkeypatch.setattr(run, "write_metrics", write_metrics)
    for reward, accuracy in zip(values, greedy or values, strict=True):
        run.log_evaluation({"reward": reward, "accuracy_greedy": accuracy})
        patience.append(run.evals_since_best)
        halvings.append(run.halvings)
    return saved, patience, halvings


def test_best_follows_the_sampled_reward_and_not_the_greedy_accuracy(grpo, monkeypatch):
    trainer = grpo().GRPOTrainer()
    greedy = [0.9, 0.2, 1.0, 0.1]
    saved, patience, _ = after_evaluations(trainer, monkeypatch, [0.3, 0.5, 0.4, 0.6], greedy)
    assert saved == [0.3, 0.5, 0.6]
    assert patience == [0, 0, 1, 0]


def test_patience_counts_evaluations_that_do_not_pass_the_threshold(grpo, monkeypatch):
    trainer = grpo(EARLY_STOPPING_THRESHOLD=0.2).GRPOTrainer()
    _, patience, _ = after_evaluations(trainer, monkeypatch, [0.3, 0.4, 0.45, 0.51, 0.6, 0.2])
    assert patience == [0, 1, 2, 0, 1, 2]  # .51 passes .3 + .2, .6 does not pass .51 + .2


def test_best_is_the_highest_reward_ever_seen_whatever_the_threshold(grpo, monkeypatch):
    trainer = grpo(EARLY_STOPPING_THRESHOLD=0.2).GRPOTrainer()
    saved, _, _ = after_evaluations(trainer, monkeypatch, [0.3, 0.4, 0.35, 0.45, 0.51, 0.2])
    assert saved == [0.3, 0.4, 0.45, 0.51]


def test_plateau_halves_the_rate_each_time_that_patience_runs_out(grpo, monkeypatch):
    script = grpo(USE_LR_SCHEDULER=True, LR_SCHEDULER_TYPE="plateau", PLATEAU_PATIENCE=2, LEARNING_RATE=1e-3)
    trainer = script.GRPOTrainer()
    _, _, halvings = after_evaluations(trainer, monkeypatch, [0.5, 0.4, 0.5, 0.1, 0.2])
    assert halvings == [0, 0, 1, 1, 2]
    metrics = trainer.update(scored_batch(trainer, 2))
    assert metrics["learning_rate"] == trainer.optimizers["policy"].param_groups[0]["lr"] == 1e-3 / 4


def test_the_entropy_bonus_alone_raises_the_entropy(grpo):
    script = grpo(ENTROPY_COEF=1.0, LEARNING_RATE=1e-4)
    trainer = script.GRPOTrainer()
    batch = scored_batch(trainer)
    batch.advantages = torch.zeros_like(batch.advantages)
    trainer.update(batch)
    with torch.no_grad():
        _, entropies = script.response_logprobs(trainer.actor, batch, every_row(batch), 1.0)
    before = (batch.entropies * batch.response_mask).sum() / batch.response_mask.sum()
    assert entropies.sum() / batch.response_mask.sum() > 1.02 * before


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_every_scale_with_every_baseline_by_hand(grpo, scale, leave_one_out):
    scores = torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0, 3.0])
    batch = SimpleNamespace(scores=scores, response_mask=torch.ones(6, 2))
    if leave_one_out:  # minus the mean of the two others
        above = [1 - 4.0, 2 - 3.5, 6 - 1.5, 0 - 1.5, 0 - 1.5, 3 - 0.0]
    else:  # the groups' means are 3 and 1
        above = [1 - 3.0, 2 - 3.0, 6 - 3.0, 0 - 1.0, 0 - 1.0, 3 - 1.0]
    deviation = {"group": [7**0.5] * 3 + [3**0.5] * 3, "batch": [(26 / 5) ** 0.5] * 6}  # ddof 1
    if scale != "none":
        above = [x / (d + 1e-4) for x, d in zip(above, deviation[scale])]
    script = grpo(GROUP_SIZE=3, SCALE_REWARDS=scale, LEAVE_ONE_OUT=leave_one_out)
    script.GRPOTrainer.compute_advantages(None, batch)
    assert batch.advantages.tolist() == pytest.approx(above, rel=1e-5)


def test_at_another_temperature_sampler_reference_and_update_agree(grpo):
    trainer = grpo(TEMPERATURE=0.7, KL_COEF=0.1).GRPOTrainer()
    batch = scored_batch(trainer)
    mask = batch.response_mask
    torch.testing.assert_close(batch.ref_logprobs * mask, batch.logprobs * mask, rtol=1e-4, atol=1e-4)
    metrics, _ = gradient(trainer, batch)
    assert metrics["max_ratio_deviation"] < 1e-3 and abs(metrics["kl"]) < 1e-6


def test_a_second_end_that_the_generation_config_names_ends_a_response(grpo, tmp_path):
    path, (newline, _) = policy_with_two_ends(tmp_path / "policy")
    trainer = grpo(ACTOR_MODEL=path).GRPOTrainer()
    assert newline == trainer.tokenizer("\n", add_special_tokens=False)["input_ids"][-1]
    assert module.ids_of_ends(trainer.actor, trainer.tokenizer).tolist() == sorted([1, newline])
    batch = trainer.rollout(trainer.train_rows[:4])
    rows = [row[:n] for row, n in zip(batch.response_ids.tolist(), batch.response_lengths.tolist())]
    for row, truncated in zip(rows, batch.truncated.tolist()):
        assert newline not in row[:-1]
        assert truncated == (row[-1] not in (1, newline))
    assert newline in batch.response_ids


def test_a_reference_of_its_own_is_what_the_kl_is_measured_from(grpo, tmp_path):
    path = moved_policy(tmp_path / "reference")
    trainer = grpo(KL_COEF=0.1, REFERENCE_MODEL=path).GRPOTrainer()
    wanted = AutoModelForCausalLM.from_pretrained(path).parameters()
    assert all(torch.equal(a, b) for a, b in zip(trainer.reference.parameters(), wanted))
    batch = scored_batch(trainer)
    with torch.no_grad():
        logprobs, _ = module.response_logprobs(trainer.reference, batch, every_row(batch), 1.0)
    torch.testing.assert_close(batch.ref_logprobs * batch.response_mask, logprobs, rtol=1e-4, atol=1e-4)
    assert gradient(trainer, batch)[0]["kl"] > 1e-3


def test_weight_decay_shrinks_the_weights_where_no_gradient_is(grpo):
    trainer = grpo(WEIGHT_DECAY=0.5, LEARNING_RATE=0.1).GRPOTrainer()
    batch = scored_batch(trainer, 2)
    batch.advantages = torch.zeros_like(batch.advantages)
    before = [p.detach().clone() for p in trainer.actor.parameters()]
    trainer.update(batch)
    for p, q in zip(trainer.actor.parameters(), before):
        torch.testing.assert_close(p.detach(), q * (1 - 0.1 * 0.5), rtol=1e-5, atol=0)


def test_the_gradient_is_clipped_to_its_greatest_norm_and_logged_as_it_was(grpo):
    trainer = grpo(MAX_GRAD_NORM=1e-3).GRPOTrainer()
    metrics, got = gradient(trainer, scored_batch(trainer))
    assert metrics["grad_norm"] > 1e-2
    assert got.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_the_schedule_reaches_the_optimizer(grpo):
    schedule = dict(USE_LR_SCHEDULER=True, LR_SCHEDULER_TYPE="linear", WARMUP_STEPS=2)
    trainer = grpo(**schedule, MAX_STEPS=6, LEARNING_RATE=1e-6).GRPOTrainer()
    batch = scored_batch(trainer, 2)
    rates = []
    for trainer.run.step in range(1, 7):
        rates.append(trainer.update(batch)["learning_rate"])
        assert trainer.optimizers["policy"].param_groups[0]["lr"] == rates[-1]
    assert rates == pytest.approx([x * 1e-6 for x in (1 / 2, 1, 1, 3 / 4, 2 / 4, 1 / 4)])


def test_a_prompt_of_exactly_the_greatest_length_is_kept_and_one_longer_is_not(grpo):
    lengths = [len(row["ids"]) for row in grpo().GRPOTrainer().train_rows]
    bound = next(n for n in sorted(set(lengths)) if n + 1 in lengths)
    trainer = grpo(MAX_PROMPT_TOKENS=bound).GRPOTrainer()
    assert [len(row["ids"]) for row in trainer.train_rows] == [n for n in lengths if n <= bound]


def test_each_line_of_samples_is_of_one_response_and_metrics_are_means(grpo):
    functions = [("exact_answer", 1.0), ("answer_format", 1.0)]
    trainer = grpo(LOG_SAMPLES=3, BATCH_SIZE=4, REWARD_FUNCTIONS=functions).GRPOTrainer()
    trainer.run.open_files()
    trainer.run.next_step()
    batch = scored_batch(trainer, 4)
    metrics = trainer.update(batch)
    batch.flat_groups = 0.0
    batch.responses = [f"response {i}" for i in range(8)]
    batch.reward_parts = {"exact_answer": torch.arange(8.0) + 10, "answer_format": torch.arange(8.0) ** 2}
    batch.scores = torch.arange(8.0) + 30
    batch.advantages = torch.arange(8.0) - 4
    batch.truncated = torch.tensor([False, True, True, True, False, True, True, True])
    trainer.record(batch, metrics)
    samples = read(trainer.run.logs["samples.jsonl"].name)
    for i, sample in zip((0, 3, 7), samples, strict=True):
        assert sample == {
            "step": 1,
            **{key: batch.rows[i][key] for key in ("id", "prompt", "answer")},
            "response": f"response {i}",
            "truncated": bool(i % 4),
            "reward": 30 + i,
            "advantage": i - 4,
            "reward/exact_answer": 10 + i,
            "reward/answer_format": i * i,
        }
    (record,) = read(trainer.run.logs["metrics.jsonl"].name)
    wanted = {
        "reward": 33.5,
        "reward/exact_answer": 13.5,
        "reward/answer_format": 17.5,
        "advantage_abs": 2.0,
        "truncated_fraction": 0.75,
    }
    assert {key: record[key] for key in wanted} == pytest.approx(wanted)
    assert record["response_length"] == pytest.approx(batch.response_lengths.float().mean().item())


def test_evaluation_logs_the_mean_of_each_part(grpo):
    seen = []

    def length(prompts, responses, answers):
        lengths = [float(len(r)) for r in responses]
        seen.extend(lengths)
        return lengths

    metrics = grpo(REWARD_FUNCTIONS=[(length, 0.5)], EVAL_SAMPLES=2).GRPOTrainer().evaluate()
    assert len(seen) == 8
    mean = sum(seen) / 8
    assert max(seen) > mean
    assert metrics["reward/length"] == pytest.approx(mean)
    assert metrics["reward"] == pytest.approx(mean / 2)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_clip_fraction_counts_the_side_that_is_clipped(grpo, loss_type):
    constants = {"CLIP_RANGE": 0.2, "CLIP_RANGE_HIGH": 0.4, "SKIP_FLAT_GROUPS": False}
    trainer = grpo(LOSS_TYPE=loss_type, **constants).GRPOTrainer()
    batch = scored_batch(trainer, 4)
    ratios = torch.tensor([1.5, 1.3, 0.5, 0.7, 1.5, 1.5, 3.0, 0.9])
    batch.advantages = torch.tensor([1.0, 1, 1, -1, -1, 0, 2, -2])
    # cispo bounds the ratio from above, whatever the advantage's sign
    clipped = {"cispo": [0, 4, 6], "sapo": []}.get(loss_type, [0, 3, 6])
    batch.logprobs = (batch.logprobs - ratios.log()[:, None]) * batch.response_mask
    metrics, _ = gradient(trainer, batch)
    share = batch.response_lengths[clipped].sum() / batch.response_lengths.sum()
    assert metrics["clip_fraction"] == pytest.approx(share.item(), rel=1e-5)


@pytest.mark.parametrize("skip", [True, False])
def test_clip_fraction_is_of_the_tokens_that_are_trained(grpo, skip):
    trainer = grpo(MASK_TRUNCATED=True, MAX_NEW_TOKENS=14, SKIP_FLAT_GROUPS=skip).GRPOTrainer()
    batch = scored_batch(trainer)
    batch.advantages = torch.tensor([1.0, -1, -1, -1]).repeat(4)
    batch.logprobs = (batch.logprobs - 1) * batch.response_mask  # every ratio is e
    metrics, _ = gradient(trainer, batch)
    trained = batch.response_lengths * ~batch.truncated
    assert batch.truncated[::4].any() and trained[::4].sum() > 0
    assert metrics["clip_fraction"] == pytest.approx((trained[::4].sum() / trained.sum()).item(), rel=1e-5)


def test_a_reference_of_other_layers_cannot_be_moved(grpo, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(TINY / "policy")
    model.config.num_hidden_layers += 1
    AutoModelForCausalLM.from_config(model.config).save_pretrained(tmp_path / "larger")
    AutoTokenizer.from_pretrained(TINY / "policy").save_pretrained(tmp_path / "larger")
    settings = dict(KL_COEF=0.1, REFERENCE_MODEL=str(tmp_path / "larger"))
    grpo(**settings).GRPOTrainer().run.lock.release(force=True)
    script = grpo(**settings, REFERENCE_SYNC_STEPS=4)
    with pytest.raises(
        script.UserError, match="REFERENCE_SYNC_STEPS = 4: REFERENCE_MODEL = .* has other layers"
    ):
        script.GRPOTrainer()


@pytest.mark.parametrize("sizes", [[5, 5, 5, 5, 4], [23, 1], [24]])
def test_an_epoch_gives_every_prompt_once_and_the_next_one_in_another_order(sizes):
    state = SimpleNamespace(epoch=0, order=None, cursor=0)
    epochs = []
    for _ in range(3):
        parts = [module.next_rows(range(24), state, sizes[0]) for _ in sizes]
        assert [len(part) for part in parts] == sizes
        epochs.append([row for part in parts for row in part])
    for epoch in epochs:
        assert sorted(epoch) == list(range(24))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_reference_that_follows_is_saved_and_comes_back(grpo, tmp_path):
    settings = dict(KL_COEF=0.1, REFERENCE_SYNC_STEPS=1, MAX_STEPS=1, LEARNING_RATE=1e-3, EVAL_DATASETS=[])
    trainer = grpo(**settings).GRPOTrainer()
    first = flat_weights(trainer.reference)
    trainer.train()
    saved = flat_weights(trainer.reference)
    loaded = flat_weights(grpo(**settings, RESUME="yes").GRPOTrainer().reference)
    assert torch.equal(loaded, saved)
    assert (loaded != first).float().mean() > 0.5
    # A run that no longer moves it keeps it, too
    settings |= dict(REFERENCE_SYNC_STEPS=0, RESUME="yes")
    grpo(**{**settings, "MAX_STEPS": 2}).GRPOTrainer().train()
    last = grpo(**{**settings, "MAX_STEPS": 3}).GRPOTrainer()
    assert last.run.step == 2 and torch.equal(flat_weights(last.reference), saved)


def test_skipped_rows_do_not_dilute_the_kl_of_an_update(grpo):
    trainer = grpo().GRPOTrainer()
    batch = scored_batch(trainer, 4)
    batch.advantages = torch.tensor([1.0, -1, 0, 0, 0, 0, 0, 0])
    batch.logprobs = batch.logprobs + 0.1  # every ratio is exp(-0.1)
    metrics = trainer.optimizer_step(batch, every_row(batch))
    assert metrics["approx_kl"] == pytest.approx(math.exp(-0.1) - 1 + 0.1, rel=1e-3)


def test_advantages_per_token_are_logged_as_means_over_each_response(grpo, monkeypatch):
    trainer = grpo().GRPOTrainer()
    batch = scored_batch(trainer, 4)
    signs = 1 - 2 * (torch.arange(batch.response_mask.shape[1]) % 2)
    batch.advantages = (3.0 * signs).expand_as(batch.response_mask)  # also in the padding
    logged = {}
    monkeypatch.setattr(trainer.run, "log_step", lambda metrics, *rest: logged.update(metrics))
    zeros = dict.fromkeys(["policy_loss", "entropy", "learning_rate"], 0.0)
    trainer.record(batch, zeros)
    assert logged["advantage_abs"] == pytest.approx(3.0)


def test_with_a_reference_flat_groups_are_trained_too(grpo, monkeypatch):
    script = grpo(KL_COEF=0.1)
    trainer = script.GRPOTrainer()
    batch = scored_batch(trainer, 4)
    batch.advantages = torch.tensor([1.0, -1, 0, 0, 0, 0, 0, 0])
    calls = watch_scoring(script, monkeypatch)
    trainer.optimizer_step(batch, every_row(batch))
    assert calls == [(True, list(range(8)))]


def test_the_parts_of_a_resampled_batch_stay_beside_their_responses(grpo):
    trainer = grpo(RESAMPLE_FLAT_GROUPS=2, BATCH_SIZE=6).GRPOTrainer()
    batch = trainer.rollout_and_score()
    assert batch.flat_groups > 0
    assert torch.equal(batch.reward_parts["exact_answer"], batch.scores)
    assert batch.scores.unique().numel() == 2


@pytest.mark.parametrize(
    "advantage, ratio, dual, loss",
    [(1.0, 3.0, None, -1.4), (-1.0, 0.5, None, 0.8), (-1.0, 3.0, None, 3.0), (-1.0, 3.0, 1.5, 1.5)],
)
def test_the_clip_constants_reach_the_loss(grpo, advantage, ratio, dual, loss):
    trainer = grpo(CLIP_RANGE=0.2, CLIP_RANGE_HIGH=0.4, DUAL_CLIP=dual).GRPOTrainer()
    batch = scored_batch(trainer, 2)
    batch.advantages = torch.full_like(batch.advantages, advantage)
    batch.logprobs = (batch.logprobs - math.log(ratio)) * batch.response_mask
    assert gradient(trainer, batch)[0]["policy_loss"] == pytest.approx(loss, rel=1e-4)


# ---------------------------------------------------------------- which constant is handed where
# Every value differs from the default and from its neighbours': one in another's place is seen.

UPDATE = {"policy_loss", "norm", "gradients"}
SCORES = {"scores", "evaluation", "advantages", *UPDATE}
ALL = {*SCORES, "responses", "trained", "kl", "clipped"}
CONSTANTS = {  # its value, another, and what that alone changes
    "REWARD_FUNCTIONS": ([(vowels, 0.6)], [(vowels, 0.65)], SCORES),
    "REWARD_MODEL_WEIGHT": (0.31, 0.37, SCORES),
    "OVERLONG_BUFFER": (9, 10, SCORES),
    "OVERLONG_PENALTY": (0.73, 0.79, SCORES),
    "ACCURACY_FUNCTION": (vowels, digits, {"evaluation"}),
    "BATCH_SIZE": (3, 5, {*ALL, "calls", "passes", "plan", "rates"} - {"evaluation"}),
    "GRADIENT_ACCUMULATION_STEPS": (2, 3, {*ALL, "calls", "passes", "plan", "rates"} - {"evaluation"}),
    "GROUP_SIZE": (4, 5, {*ALL, "calls", "passes"} - {"evaluation"}),
    "EVAL_SAMPLES": (3, 5, {"evaluation"}),
    "MAX_PROMPT_TOKENS": (38, 29, {*ALL, "plan", "rates"}),
    "MAX_NEW_TOKENS": (14, 16, ALL),
    "TEMPERATURE": (1.7, 1.9, ALL),
    "LEARNING_RATE": (1e-3, 2e-3, {"rates"}),
    "MAX_GRAD_NORM": (0.041, 0.043, {"gradients"}),
    "USE_LR_SCHEDULER": (True, False, {"rates"}),
    "LR_SCHEDULER_TYPE": ("cosine", "linear", {"rates"}),
    "WARMUP_STEPS": (5, 6, {"rates"}),
    "LOSS_TYPE": ("dapo", "grpo", UPDATE),
    "GROUP_EPOCHS": (3, 4, {"passes"}),
    "MINI_BATCHES": (1, 2, {"passes", "kl", "clipped", *UPDATE}),
    "SCALE_REWARDS": ("batch", "group", {"advantages", *UPDATE}),
    "LEAVE_ONE_OUT": (True, False, {"advantages", *UPDATE}),
    "CLIP_RANGE": (0.12, 0.04, {"clipped", *UPDATE}),
    "CLIP_RANGE_HIGH": (0.17, 0.21, {"clipped", *UPDATE}),
    "DUAL_CLIP": (1.4, 1.3, UPDATE),
    "ENTROPY_COEF": (0.021, 0.043, UPDATE - {"policy_loss"}),
    "TOP_ENTROPY_FRACTION": (0.7, 0.6, {"trained", "clipped", *UPDATE}),
    "MASK_TRUNCATED": (True, False, {"trained", "kl", "clipped", *UPDATE}),
    "KL_COEF": (0.16, 0.18, UPDATE - {"policy_loss"}),
    "KL_ESTIMATOR": ("k1", "k3", {"kl"}),
    "REFERENCE_SYNC_STEPS": (4, 3, {"reference"}),
    "REFERENCE_SYNC_ALPHA": (0.25, 0.35, {"reference"}),
    "NUM_EPOCHS": (3, 4, {"plan", "rates"}),
    "MAX_STEPS": (31, 9, {"plan", "rates"}),
    "MAX_TRAIN_PROMPTS": (29, 40, {*ALL, "plan", "rates"} - {"evaluation"}),
    "MAX_EVAL_PROMPTS": (3, 2, {"evaluation"}),
    "SEED": (11, 12, ALL),
}


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """one_step(KEY=value, ...): the module, the trainer, and what its eighth step was like with CONSTANTS but
    for these: its rollout by one actor, its update by one that has moved on; the gradients of its first
    optimizer step."""
    constants = small("grpo/grpo.py", **{name: value for name, (value, _, _) in CONSTANTS.items()})
    constants |= tiny_files(tmp_path_factory.mktemp("constants"))
    script = load_script("grpo/grpo.py", **constants)
    first = script.GRPOTrainer()
    weights = [copy.deepcopy(model.state_dict()) for model in first.models.values()]
    script.check_models = lambda *_: None  # once is enough

    class Spy(script.GRPOTrainer):
        def load_models(self):
            """Those that are there."""
            names = "tokenizer actor pad_id models models_by_constant reference reward_model reward_tokenizer"
            for name in [*names.split(), "optimizers", "distils"]:
                setattr(self, name, getattr(first, name))
            self.reward_functions = script.resolve_rewards(script.REWARD_FUNCTIONS, "REWARD_FUNCTIONS")
            self.accuracy_function = script.resolve_rewards([(script.ACCURACY_FUNCTION, 1.0)], "")[0][1]

        def compute_rewards(self, prompts, responses, answers, **columns):
            self.seen["calls"].append(len(responses))
            return super().compute_rewards(prompts, responses, answers, **columns)

        def optimizer_step(self, batch, rows):
            self.seen["passes"].append(len(rows))
            if len(self.seen["passes"]) == 1:
                self.first_step = super().optimizer_step(batch, rows)
            return dict(self.first_step)

        def update(self, batch):
            nudge(self.actor, 1)
            metrics = super().update(batch)
            passes = list(self.seen["passes"])
            for self.run.step in (3, 8):  # in the warm-up and after it
                super().update(batch)
                self.seen["rates"].append(self.optimizers["policy"].param_groups[0]["lr"])
            self.seen["passes"] = passes
            return metrics

        def record(self, batch, metrics):
            self.batch, self.metrics = batch, metrics

    def take_step(**changed):
        for name, value in {**constants, **changed}.items():
            setattr(script, name, value)
        for model, before in zip(first.models.values(), weights):
            model.load_state_dict(before)
        trainer = Spy()
        trainer.weights = weights
        trainer.seen = seen = {"calls": [], "passes": [], "gradients": [], "rates": []}

        def keep_gradient():
            seen["gradients"] += [p.grad.clone() for p in trainer.actor.parameters()]

        def log_evaluation(metrics):
            seen["evaluation"] = metrics
            seen["calls"].clear()

        def eighth_step():
            trainer.run.step += 8
            return trainer.run.step == 8

        trainer.optimizers["policy"].step = keep_gradient
        seen["plan"] = trainer.run.total_steps
        trainer.run.session = lambda summary: nullcontext()
        trainer.run.needs_first_evaluation = lambda: True
        trainer.run.log_evaluation = log_evaluation
        trainer.run.next_step = eighth_step
        trainer.run.is_due = lambda interval: (
            interval == script.REFERENCE_SYNC_STEPS and trainer.run.step % interval == 0
        )
        trainer.run.is_last_step = lambda: False
        trainer.train()
        batch, metrics = trainer.batch, trainer.metrics
        seen.update({key: getattr(batch, key) for key in ("scores", "advantages", "trained")})
        seen.update(
            responses=batch.response_ids,
            policy_loss=metrics["policy_loss"],
            kl=metrics["kl"],
            clipped=metrics["clip_fraction"],
            norm=metrics["grad_norm"],
            reference=flat_weights(trainer.reference),
        )
        return script, trainer, seen

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
    elsewhere = (
        "MICRO_BATCH_ROWS REWARD_TIMEOUT WEIGHT_DECAY PLATEAU_PATIENCE RESAMPLE_FLAT_GROUPS SKIP_FLAT_GROUPS "
    )
    # by test_turns.py
    elsewhere += "ENVIRONMENT ENVIRONMENT_ROLE ENVIRONMENT_THREADS MAX_TURNS MAX_CONTEXT_TOKENS"
    assert algorithm_of("grpo/grpo.py") - set(elsewhere.split()) <= CONSTANTS.keys()


@pytest.mark.parametrize(
    "changed",
    [
        {"KL_ESTIMATOR": "k1"},
        {"LOSS_TYPE": "grpo", "KL_ESTIMATOR": "k2"},
        {"LOSS_TYPE": "dr_grpo"},
        {"LOSS_TYPE": "gspo", "KL_ESTIMATOR": "k3"},
        {"LOSS_TYPE": "cispo", "DUAL_CLIP": None},
    ],
    ids=["dapo", "grpo", "dr_grpo", "gspo", "cispo"],
)
def test_a_step_whose_constants_are_all_unlike_is_the_papers_in_float64(one_step, changed):
    c, trainer, seen = one_step(**changed)
    batch = trainer.batch
    count = c.BATCH_SIZE * c.GRADIENT_ACCUMULATION_STEPS * c.GROUP_SIZE

    # what is asked: the first epoch's permutation of the prompts that are short enough
    prompts = [row["id"] for row in trainer.train_rows]
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(c.SEED + 1)).tolist()
    assert [row["id"] for row in batch.rows] == [prompts[i] for i in order[:6] for _ in range(4)]
    assert seen["calls"] == [c.BATCH_SIZE * c.GROUP_SIZE] * 2 and seen["passes"] == [count] * 3
    assert seen["plan"] == 3 * math.ceil(len(prompts) / 6)

    # log-probabilities, each row alone
    actor, moved, reference = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        for path in (c.ACTOR_MODEL, c.ACTOR_MODEL, c.REFERENCE_MODEL)
    )
    moved.load_state_dict(trainer.actor.state_dict())
    lengths = batch.response_lengths.tolist()
    ids = [row["ids"] + said[:n] for row, said, n in zip(batch.rows, batch.response_ids.tolist(), lengths)]

    def logprobs(model):
        """[(log-probabilities, entropies)] of each response's tokens."""
        found = []
        for row, n in zip(ids, lengths):
            logs = (model(torch.tensor([row])).logits[0, -n - 1 : -1] / c.TEMPERATURE).log_softmax(-1)
            found.append((logs.gather(1, torch.tensor(row[-n:])[:, None])[:, 0], -(logs.exp() * logs).sum(1)))
        return found

    with torch.no_grad():
        old, ref = logprobs(actor), logprobs(reference)
    new = logprobs(moved)

    # scores and advantages
    judged = trainer.reward_model_score([row["prompt"] for row in batch.rows], batch.responses).tolist()
    begin = c.MAX_NEW_TOKENS - c.OVERLONG_BUFFER
    overlong = [max(0, n - begin) / c.OVERLONG_BUFFER for n in lengths]
    each = zip(judged, vowels(None, batch.responses, None), overlong)
    scores = [0.31 * m + 0.6 * v - 0.73 * x for m, v, x in each]
    assert len(set(overlong)) > 3 and seen["scores"].tolist() == pytest.approx(scores, rel=1e-4, abs=1e-4)
    deviation = 1.0 if c.LOSS_TYPE == "dr_grpo" else torch.tensor(scores).std().item() + 1e-4
    groups = [scores[i - i % 4 : i - i % 4 + 4] for i in range(count)]
    advantages = [(s - (sum(group) - s) / 3) / deviation for s, group in zip(scores, groups)]
    assert seen["advantages"].tolist() == pytest.approx(advantages, rel=1e-3, abs=1e-3)

    # what is trained: of the whole responses' tokens those of a high entropy among all
    cut = [row[-1] not in ENDS for row in ids]
    trained = [x[:n] for x, n in zip(seen["trained"], lengths)]
    assert 0 < sum(cut) < count and all(not x.any() for x, is_cut in zip(trained, cut) if is_cut)
    entropies = torch.cat([h for _, h in old])
    least = entropies.sort().values[round(0.3 * len(entropies))]
    for x, (_, h), is_cut in zip(trained, old, cut):
        sure = (h - least).abs() > 0.02  # the tokens about the border may fall to either side
        assert is_cut or torch.equal(x[sure] > 0, (h > least)[sure])

    # the loss, and its gradient at the moment the optimizer would step
    tokens = sum(lengths)
    trained_tokens = sum(n for n, learns in zip(lengths, trained) if learns.any())
    loss = policy = kl = clipped = 0.0
    for (p, h), (p_old, _), (q, _), a, n, learns in zip(new, old, ref, advantages, lengths, trained):
        weight = {"grpo": 1 / n / count, "gspo": 1 / n / count, "dr_grpo": 1 / count / c.MAX_NEW_TOKENS}
        weight = weight.get(c.LOSS_TYPE, 1 / tokens) * learns
        rho = (p - p_old).exp()
        if c.LOSS_TYPE == "gspo":
            rho = (p - p_old).mean().exp().expand(n)
        low, high = 1 - c.CLIP_RANGE, 1 + c.CLIP_RANGE_HIGH
        gain = torch.min(rho * a, rho.clip(low, high) * a)
        if a < 0 and c.DUAL_CLIP:
            gain = gain.clip(min=c.DUAL_CLIP * a)
        if c.LOSS_TYPE == "cispo":
            gain = rho.detach().clip(max=high) * a * p
        is_clipped = rho > high if a > 0 or c.LOSS_TYPE == "cispo" else rho < low
        clipped += (is_clipped * learns).sum().item() / sum(x.sum().item() for x in trained)
        apart = p - q
        value = {"k1": apart, "k2": apart**2 / 2, "k3": (-apart).exp() - 1 + apart}[c.KL_ESTIMATOR]
        kl += value.sum().item() / trained_tokens if learns.any() else 0
        policy -= (weight * gain).sum().item()
        loss = loss + (weight * (c.KL_COEF * apart**2 / 2 - c.ENTROPY_COEF * h - gain)).sum()
    assert 0.02 < clipped < 0.95 and seen["clipped"] == pytest.approx(clipped, abs=1e-6)
    assert seen["kl"] == pytest.approx(kl, rel=1e-3)
    assert seen["policy_loss"] == pytest.approx(policy, rel=1e-3, abs=1e-5)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in moved.parameters()])
    assert seen["norm"] == pytest.approx(gradient.norm().item(), rel=1e-3) and seen["norm"] > c.MAX_GRAD_NORM
    wanted = gradient * c.MAX_GRAD_NORM / gradient.norm()
    assert distance(torch.cat([x.flatten() for x in seen["gradients"]]), wanted) < 1e-3

    # afterwards: the reference, which moves every fourth step; rates of the third and the eighth step
    alpha = c.REFERENCE_SYNC_ALPHA
    towards = alpha * flat_weights(moved) + (1 - alpha) * flat_weights(reference)
    assert distance(seen["reference"], towards) < 1e-6
    cosine = 0.5 * (1 + math.cos(math.pi * (7 - c.WARMUP_STEPS) / (seen["plan"] - c.WARMUP_STEPS)))
    assert seen["rates"] == pytest.approx([c.LEARNING_RATE * scale for scale in (3 / c.WARMUP_STEPS, cosine)])


def test_evaluation_samples_the_held_out_prompts_by_the_seed_after_the_runs(one_step):
    c, trainer, seen = one_step()
    trainer.actor.load_state_dict(trainer.weights[0])
    rows = trainer.eval_rows
    generator = torch.Generator().manual_seed(c.SEED + 1)
    uniform = torch.rand(len(rows) * c.EVAL_SAMPLES, c.MAX_NEW_TOKENS, generator=generator)
    ids = [row["ids"] for row in rows]
    said = c.respond(trainer.actor, trainer.tokenizer, ids, uniform, c.EVAL_SAMPLES).responses
    right = vowels(None, said, None)
    best = [max(right[i : i + 3]) for i in range(0, len(right), 3)]
    assert seen["evaluation"]["pass@1"] == pytest.approx(sum(right) / len(right))
    assert seen["evaluation"]["pass@3"] == pytest.approx(sum(best) / len(best))
    assert all(row["id"].startswith("test.jsonl:") for row in rows) and 1 < len(rows) <= c.MAX_EVAL_PROMPTS

    # and training those of its step by the run's own
    torch.manual_seed(c.SEED)
    uniform = torch.rand(len(trainer.batch.rows), c.MAX_NEW_TOKENS)
    asked = [row["ids"] for row in trainer.batch.rows[:: c.GROUP_SIZE]]
    said = c.respond(trainer.actor, trainer.tokenizer, asked, uniform, c.GROUP_SIZE)
    assert torch.equal(said.response_ids, seen["responses"])
