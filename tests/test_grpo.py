"""GRPO's formulas against plain loops in float64, and its trainer."""

import math

import pytest
import torch
from conftest import load

T = torch.tensor
LOSSES = ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo")


def double(x):
    return T(x, dtype=torch.float64)


@pytest.fixture
def grpo():
    return load("grpo/grpo.py", GROUP_SIZE=2)


# ---------------------------------------------------------------- advantages

SCORES = [1.0, 4.0, 1.0, 2.0, 3.0, 7.0]  # two groups
STD = {"group": [3**0.5] * 3 + [7**0.5] * 3, "batch": [5.2**0.5] * 6, "none": [1 - 1e-4] * 6}


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("scale", ["group", "batch", "none", "dr_grpo"])
def test_advantages(grpo, scale, leave_one_out):
    grpo.GROUP_SIZE, grpo.SCALE_REWARDS, grpo.LEAVE_ONE_OUT = 3, scale, leave_one_out
    if scale == "dr_grpo":  # it divides by no standard deviation
        grpo.LOSS_TYPE, grpo.SCALE_REWARDS, scale = "dr_grpo", "group", "none"
    of_others = [2.5, 1.0, 2.5, 5.0, 4.5, 2.5]
    baseline = of_others if leave_one_out else [2.0] * 3 + [4.0] * 3
    want = [(s - b) / (std + 1e-4) for s, b, std in zip(SCORES, baseline, STD[scale])]
    assert grpo.group_advantages(double(SCORES)).tolist() == pytest.approx(want)


@pytest.mark.parametrize("score", [0.1, 0.7, 1000.7, -3e7])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_equal_scores_have_exactly_no_advantage(grpo, score, scale, leave_one_out):
    grpo.GROUP_SIZE, grpo.SCALE_REWARDS, grpo.LEAVE_ONE_OUT = 7, scale, leave_one_out
    scores = T([score] * 7 + [1.0] * 6 + [0.0])
    assert grpo.group_advantages(scores)[:7].tolist() == [0] * 7
    assert grpo.has_zero_variance(scores).tolist() == [True] * 7 + [False] * 7


def test_overlong_responses_lose_up_to_the_penalty(grpo):
    grpo.MAX_NEW_TOKENS, grpo.OVERLONG_BUFFER, grpo.OVERLONG_PENALTY = 100, 20, 0.5
    assert grpo.overlong_penalty(T([10, 80, 85, 100])).tolist() == pytest.approx([0, 0, 0.125, 0.5])
    assert grpo.overlong_penalty(T([130])).item() == 0.5  # a tool wrote a part
    grpo.OVERLONG_BUFFER = 0
    assert grpo.overlong_penalty(T([10, 100])).tolist() == [0, 0]
    grpo.OVERLONG_BUFFER = 1
    assert grpo.overlong_penalty(T([99, 100])).tolist() == [0, 0.5]


# ---------------------------------------------------------------- losses

MASK = [[1, 1, 0, 1], [1, 0, 0, 0]]  # a tool wrote the third token of the first response
OLD = [[-1.0, -0.5, -9.0, -2.0], [-0.7, 0.0, 0.0, 0.0]]
NEW = [[-0.6, -0.55, -1.0, -2.4], [-0.3, 3.0, 3.0, 3.0]]


def plain_loss(new, kind, advantages, low, high, max_new_tokens):
    """The loss of the two responses, by loops over tokens."""
    total = 0.0
    lengths = [sum(row) for row in MASK]
    for i, row in enumerate(new):
        tokens = [t for t in range(4) if MASK[i][t]]
        log_ratios = {t: row[t] - OLD[i][t] for t in tokens}
        for t in tokens:
            log_ratio = sum(log_ratios.values()) / len(tokens) if kind == "gspo" else log_ratios[t]
            ratio, a = math.exp(log_ratio), advantages[i]
            loss = -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
            if kind == "cispo":
                # The ratio has no gradient
                loss = -min(math.exp(NEW[i][t] - OLD[i][t]), 1 + high) * a * row[t]
            if kind == "sapo":
                tau = 1.0 if a > 0 else 1.05
                loss = -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * a
            weight = {"dapo": 1 / 4, "cispo": 1 / 4, "dr_grpo": 1 / (2 * max_new_tokens)}
            total += loss * weight.get(kind, 1 / lengths[i] / 2)
    return total


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("advantages", [[1.3, -0.7], [-1.3, 0.7]])
@pytest.mark.parametrize("high", [None, 0.28])
def test_losses_and_their_gradients(grpo, kind, advantages, high):
    grpo.LOSS_TYPE, grpo.CLIP_RANGE_HIGH, grpo.MAX_NEW_TOKENS = kind, high, 10
    new, mask = double(NEW).requires_grad_(), double(MASK)
    losses, _ = grpo.policy_loss(new, double(OLD), double(advantages).unsqueeze(1), mask)
    loss = (losses * grpo.token_weights(mask)).sum()
    loss.backward()
    arguments = (kind, advantages, 0.2, high or 0.2, 10)
    assert loss.item() == pytest.approx(plain_loss(NEW, *arguments), abs=1e-7)
    for i in range(2):
        for t in range(4):
            sides = []
            for shift in (1e-6, -1e-6):
                moved = [list(row) for row in NEW]
                moved[i][t] += shift
                sides.append(plain_loss(moved, *arguments))
            slope = (sides[0] - sides[1]) / 2e-6
            assert new.grad[i, t].item() == pytest.approx(slope, abs=1e-6), (i, t)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_huge_ratio_overflows_nowhere(grpo, kind):
    grpo.LOSS_TYPE = kind
    new = T([[500.0], [-500.0]]).requires_grad_()
    losses, ratio = grpo.policy_loss(new, T([[0.0], [0.0]]), T([[-1.0], [1.0]]), T([[1.0], [1.0]]))
    losses.sum().backward()
    stats = grpo.grpo_stats(new, T([[0.0], [0.0]]), ratio, T([[-1.0], [1.0]]))
    assert new.grad.isfinite().all() and all(x.isfinite().all() for x in stats.values())


@pytest.mark.parametrize("kind", LOSSES)
def test_a_response_without_a_token_of_the_policy_changes_nothing(grpo, kind):
    grpo.LOSS_TYPE = kind
    mask = T([[1.0, 1.0], [0.0, 0.0]])
    losses, _ = grpo.policy_loss(T([[-1.0, -2.0]] * 2), T([[-1.0, -2.0]] * 2), T([[1.0], [1.0]]), mask)
    assert (losses * grpo.token_weights(mask)).sum(1)[1] == 0


@pytest.mark.parametrize("kind, want", [("dapo", "10010000"), ("cispo", "11000010"), ("sapo", "00000000")])
def test_what_counts_as_clipped(grpo, kind, want):
    grpo.LOSS_TYPE = kind
    ratio, old = double([1.5, 1.5, 0.5, 0.5, 1.1, 0.9, 1.5, 0.5]), double([-1.0] * 8)
    stats = grpo.grpo_stats(old + ratio.log(), old, ratio, double([0.5, -0.5, 0.5, -0.5, 1, -1, 0, 0]))
    assert stats["clip_fraction"].tolist() == list(map(int, want))
    assert stats["approx_kl"][0].item() == pytest.approx(0.5 - math.log(1.5))


# ---------------------------------------------------------------- the trainer


def one_step(trainer):
    """Returns the batch and the metrics of the first step."""
    trainer.state.step = 1
    trainer.seed_step()
    batch = trainer.rollout(trainer.next_prompts())
    trainer.replace_zero_variance_groups(batch)
    trainer.compute_advantages(batch)
    return batch, trainer.update(batch)


def first_gradients(trainer, batch):
    """Returns the gradients of an optimizer step on all rows."""
    recorded = []
    optimizer = trainer.optimizers["policy"]
    parameters = optimizer.param_groups[0]["params"]
    optimizer.step = lambda: recorded.extend(p.grad.clone() for p in parameters)
    trainer.module.MAX_GRAD_NORM = 1e9
    trainer.update(batch)
    return recorded


@pytest.mark.parametrize("kind", LOSSES[:4])  # the ways to divide by tokens and rows
def test_the_gradient_does_not_depend_on_the_micro_batches(make, kind):
    trainer = make("grpo/grpo.py", LOSS_TYPE=kind, GROUP_SIZE=4, KL_COEF=0.1, ENTROPY_COEF=0.01)
    trainer.state.step = 1
    batch = trainer.rollout(trainer.next_prompts()[:2])
    assert batch.lengths.min() < batch.lengths.max()
    batch.scores = torch.arange(8.0) % 3
    trainer.compute_advantages(batch)
    whole = first_gradients(trainer, batch)
    for rows in (4, 1):
        trainer.module.MICRO_BATCH_ROWS = rows
        for a, b in zip(whole, first_gradients(trainer, batch)):
            assert torch.allclose(a, b, atol=1e-6), rows


def test_rows_without_advantage_are_left_out_without_a_change_of_the_gradient(make):
    trainer = make("grpo/grpo.py", MICRO_BATCH_ROWS=4)
    trainer.state.step = 1
    batch = trainer.rollout(trainer.next_prompts()[:3])
    batch.scores = T([0.0, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0])
    trainer.compute_advantages(batch)
    rows_read = []
    original = trainer.module.micro_batches
    trainer.module.micro_batches = lambda *a: rows_read.append(sorted(a[1].tolist())) or original(*a)
    skipping = first_gradients(trainer, batch)
    assert rows_read[0] == [0, 1, 2, 3, 8, 9, 10, 11]
    trainer.module.ENTROPY_COEF = 1e-12  # a term that needs all rows
    for a, b in zip(skipping, first_gradients(trainer, batch)):
        assert torch.allclose(a, b, atol=1e-7)
    assert rows_read[1] == list(range(12))


def test_dynamic_sampling_replaces_whole_flat_groups(make):
    trainer = make("grpo/grpo.py", RESAMPLE_ZERO_VARIANCE_GROUPS=1)
    trainer.state.step = 1
    batch = trainer.rollout(trainer.next_prompts()[:3])
    before = {name: x.clone() for name, x in vars(batch).items() if torch.is_tensor(x)}
    batch.scores[:4], batch.scores[4:8], batch.scores[8:] = T([0.0, 1, 0, 0]), 1.0, T([1.0, 0, 0, 0])
    rows = list(batch.rows)
    trainer.replace_zero_variance_groups(batch)
    assert trainer.zero_variance_fraction == pytest.approx(1 / 3)
    assert batch.rows[:4] == rows[:4] and batch.rows[8:] == rows[8:]
    assert len({row["id"] for row in batch.rows[4:8]}) == 1 and batch.rows[4] is not rows[4]
    assert torch.equal(batch.ids[:4], before["ids"][:4])
    for i in range(4, 8):  # each field is that of the new response
        text = trainer.tokenizer.decode(batch.ids[i, : batch.lengths[i]])
        assert text.startswith(batch.texts[i]) and batch.mask[i].sum() == batch.lengths[i]


def test_truncated_responses_and_tokens_of_low_entropy_can_be_left_out(make):
    trainer = make("grpo/grpo.py", MASK_TRUNCATED=True, TOP_ENTROPY_FRACTION=0.25, MAX_NEW_TOKENS=16)
    batch = trainer.rollout(trainer.train_rows[:4])
    assert 0 < batch.truncated.sum() < len(batch.rows)
    trainer.compute_advantages(batch)
    entropies = sorted(batch.entropies[batch.mask > 0].tolist(), reverse=True)
    limit = entropies[round(0.25 * len(entropies)) - 1]
    want = (batch.entropies >= limit) & (batch.mask > 0) & ~batch.truncated[:, None]
    assert torch.equal(batch.trained > 0, want)


def test_a_reference_moves_towards_the_actor_and_is_saved(make, tmp_path):
    options = {"KL_COEF": 0.1, "REFERENCE_SYNC_STEPS": 2, "REFERENCE_SYNC_ALPHA": 0.25, "MAX_STEPS": 2}
    trainer = make("grpo/grpo.py", **options)
    start = [p.clone() for p in trainer.reference.parameters()]
    trainer.train()
    for old, moved, new in zip(start, trainer.reference.parameters(), trainer.actor.parameters()):
        assert torch.allclose(moved, 0.25 * new + 0.75 * old, atol=1e-7)
    again = make("grpo/grpo.py", **options, RESUME="yes")
    for a, b in zip(again.reference.parameters(), trainer.reference.parameters()):
        assert torch.equal(a, b)


def test_gspo_has_ratio_1_in_the_first_optimizer_step_even_in_bfloat16(make):
    trainer = make("grpo/grpo.py", LOSS_TYPE="gspo", CLIP_RANGE=3e-4, DTYPE="bfloat16", BATCH_SIZE=8)
    _, metrics = one_step(trainer)
    assert metrics["clip_fraction"] == 0 and metrics["rollout_mismatch"] > 0


def test_the_guard_ends_a_run_whose_update_does_not_see_what_was_sampled(make):
    trainer = make("grpo/grpo.py")
    one_step(trainer)
    trainer.state.step = 2  # it looks at every step, not at the first alone
    batch = trainer.rollout(trainer.next_prompts())
    trainer.replace_zero_variance_groups(batch)
    trainer.compute_advantages(batch)
    batch.logprobs -= 1e-3 * batch.mask
    with pytest.raises(ValueError, match="update and rollout differ"):
        trainer.update(batch)
