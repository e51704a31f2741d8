"""What an audit of the language trainers found, each with a test that fails without its mend: equal scores
(C1), rows that are left out (H2), distillation (H3), advantages per token (H4), edited samplers in RCE (H5),
critic warm-up (M3), several updates in distillation (M6), and its smaller findings 1, 7, 8 and 9."""

import math
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from conftest import TINY, TRAINERS, distance, load_script, read, small
from hypothesis import example, given, settings
from test_recipes import patched, subclass

PPO = load_script("ppo/ppo.py")
GRPO = load_script("grpo/grpo.py")
REC = load_script("grpo/grpo_rec.py")
LOSSES = ["grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo"]
SCALES = ["group", "batch", "none"]


def weights_of(model):
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def gradient_of_update(trainer, batch):
    """(gradient of one optimizer step, metrics); the weights stay."""
    seen = []

    def keep():
        seen.append(torch.cat([parameter.grad.flatten().clone() for parameter in trainer.actor.parameters()]))

    trainer.optimizers["policy"].step = keep
    metrics = trainer.update(batch)
    return seen[0], metrics


def scored_batch(trainer, prompts=4):
    """A batch of the trainer's first prompts with scores and advantages."""
    trainer.run.step = 1
    batch = trainer.score(trainer.rollout(trainer.train_rows[:prompts]))
    trainer.compute_advantages(batch)
    return batch


def by_length(prompts, responses, answers):
    """Scores that differ within a group."""
    return [math.sin(7.0 * len(response)) for response in responses]


def equal(prompts, responses, answers):
    return [1000.7] * len(responses)


# ---------------------------------------------------------------- C1: equal scores


CONSTANTS = st.floats(-1e5, 1e5, allow_nan=False, width=32)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("leave_one_out", [False, True])
@settings(max_examples=60, deadline=None)
@given(scores=st.lists(CONSTANTS, min_size=1, max_size=4), group_size=st.integers(2, 65))
@example(scores=[0.1], group_size=8)
@example(scores=[0.7], group_size=8)
@example(scores=[1000.7], group_size=16)
@example(scores=[12345.67, 0.3], group_size=64)
def test_equal_scores_have_exactly_no_advantage(scale, leave_one_out, scores, group_size):
    rows = torch.tensor(scores).repeat_interleave(group_size)
    advantages = GRPO.group_advantages(rows, group_size, scale, leave_one_out)
    assert advantages.tolist() == [0.0] * len(rows)


@pytest.mark.parametrize("scale", SCALES)
@settings(max_examples=60, deadline=None)
@given(score=CONSTANTS, group_size=st.integers(2, 65))
@example(score=0.7, group_size=8)
@example(score=1000.7, group_size=16)
def test_equal_scores_have_exactly_no_advantage_in_grpo_rec(scale, score, group_size):
    advantages = REC.group_advantages(torch.full((group_size,), score), group_size, scale)
    assert advantages.tolist() == [0.0] * group_size


def test_recipes_give_equal_scores_exactly_no_advantage(tmp_path):
    maxrl = patched("grpo/grpo.py", "maxrl")
    gdpo = subclass(
        "gdpo", tmp_path, GROUP_SIZE=8, REWARD_FUNCTIONS=[("exact_answer", 1.0), (by_length, 2.0)]
    )
    for score in (0.1, 0.7, 1000.7):
        scores = torch.full((32,), score)
        assert maxrl.group_advantages(scores, 8, "group", False).tolist() == [0.0] * 32
        batch = SimpleNamespace(reward_parts={"exact_answer": scores, "by_length": 3 * scores})
        gdpo.compute_advantages(batch)
        assert batch.advantages.tolist() == [0.0] * 32
        mixed = torch.cat([scores, torch.rand(32, generator=torch.Generator().manual_seed(0))])
        batch = SimpleNamespace(reward_parts={"exact_answer": mixed, "by_length": 3 * mixed})
        gdpo.compute_advantages(batch)
        assert batch.advantages[:32].tolist() == [0.0] * 32
        assert (batch.advantages[32:] != 0).all()


@settings(max_examples=60, deadline=None)
@given(score=CONSTANTS, lengths=st.lists(st.integers(1, 9), min_size=1, max_size=40))
@example(score=0.1, lengths=[3, 1, 9, 4] * 16)
@example(score=1000.7, lengths=[3, 1, 9, 4] * 16)
def test_equal_advantages_are_whitened_to_exactly_zero(score, lengths):
    """PPO with a constant score, LAM = 1 and a critic that says 0; what stands after a response's end does
    not count."""
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).float()
    whitened = PPO.whiten(torch.full(mask.shape, score) * mask, mask)
    assert whitened.shape == mask.shape
    assert (whitened == 0).all()


def test_a_first_step_of_equal_scores_moves_no_actor(ppo):
    """The critic begins at 0, so that with LAM = 1 each token's advantage is the score."""
    script = ppo(LAM=1.0, LEARNING_RATE=1e-2, BATCH_SIZE=8, REWARD_FUNCTIONS=[(equal, 1.0)])
    trainer = script.PPOTrainer()
    with torch.no_grad():
        for parameter in trainer.critic.parameters():
            parameter.zero_()
    before = weights_of(trainer.actor)
    trainer.run.step = 1
    batch = trainer.rollout(trainer.train_rows[:8])
    trainer.score(batch)
    trainer.compute_advantages(batch)
    assert batch.raw_advantages[0, 0] == torch.tensor(1000.7)
    metrics = trainer.update(batch)
    assert metrics["grad_norm"] == 0
    assert metrics["critic_grad_norm"] > 0
    assert torch.equal(weights_of(trainer.actor), before)


@pytest.mark.parametrize("offset", [0.1, 1000.7, -54321.0])
def test_an_offset_of_all_scores_changes_no_advantage(offset):
    scores = torch.tensor([0.0, 1.0, 0.5, 0.25, 1.0, 0.0, 0.0, 0.75])
    plain = GRPO.group_advantages(scores, 4, "group", False)
    rounding = 4 * abs(offset) * 2**-23 / 0.4  # of a score, in standard deviations
    moved = GRPO.group_advantages(scores + offset, 4, "group", False)
    assert (moved - plain).abs().max() <= rounding


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("constant", [0.7, 1000.7])
def test_a_step_of_equal_scores_moves_no_weight(grpo, loss_type, constant):
    script = grpo(LOSS_TYPE=loss_type, GROUP_SIZE=8, SKIP_FLAT_GROUPS=False, LEARNING_RATE=1e-2)
    trainer = script.GRPOTrainer()
    trainer.compute_rewards = lambda prompts, responses, answers, **columns: torch.full(
        (len(responses),), constant
    )
    before = weights_of(trainer.actor)
    metrics = trainer.update(scored_batch(trainer, 2))
    assert metrics["grad_norm"] == 0
    assert torch.equal(weights_of(trainer.actor), before)


# ---------------------------------------------------------------- H2: rows that are left out


def step_with(grpo, skip, trainer_class=None, group_epochs=3, **constants):
    """(weights after one step of update(), its metrics) with SKIP_FLAT_GROUPS on or off; two of the four
    groups have equal scores."""

    def half_flat(prompts, responses, answers):
        scores = by_length(prompts, responses, answers)
        return [score if i // 2 % 2 else 0.3 for i, score in enumerate(scores)]

    script = grpo(
        SKIP_FLAT_GROUPS=skip,
        GROUP_EPOCHS=group_epochs,
        LEARNING_RATE=1e-3,
        REWARD_FUNCTIONS=[(half_flat, 1.0)],
        **constants,
    )
    base = script.GRPOTrainer
    trainer = (trainer_class(base) if trainer_class else base)()
    metrics = trainer.update(scored_batch(trainer))
    return weights_of(trainer.actor), metrics


def test_flat_groups_are_left_out_without_a_change_of_the_gradient(grpo):
    (one, metrics), (other, wanted) = step_with(grpo, True), step_with(grpo, False)
    assert metrics["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
    assert distance(one, other) < 1e-6


def hinge(base):
    class Hinged(base):
        """A trust region: the term is zero on policy and begins at a ratio of 0.9."""

        def token_losses(self, *arguments):
            losses, policy_losses, ratio, kl = super().token_losses(*arguments)
            return losses + torch.relu(0.9 - ratio) + torch.relu(ratio - 1.1), policy_losses, ratio, kl

    return Hinged


def bonus(base):
    class Bonus(base):
        """An entropy bonus that begins below a part of a nat."""

        def token_losses(self, batch, rows, logprobs, entropy):
            losses, *others = super().token_losses(batch, rows, logprobs, entropy)
            return losses - 0.1 * entropy.clamp(max=0.02), *others

    return Bonus


@pytest.mark.parametrize("term", [hinge, bonus])
def test_a_term_that_begins_away_from_the_sampler_leaves_no_row_out(grpo, term):
    (one, _), (other, _) = step_with(grpo, True, term), step_with(grpo, False, term)
    assert torch.equal(one, other)


def test_a_bonus_that_begins_at_half_the_rollouts_entropy_leaves_no_row_out(grpo):
    """All groups are flat; at the sampler's own entropies no token has a gradient."""
    script = grpo(SKIP_FLAT_GROUPS=True, REWARD_FUNCTIONS=[(equal, 1.0)])

    class Bonus(script.GRPOTrainer):
        def token_losses(self, batch, rows, logprobs, entropy):
            losses, *others = super().token_losses(batch, rows, logprobs, entropy)
            return losses - torch.minimum(entropy, 0.5 * batch.entropies[rows]), *others

    trainer = Bonus()
    batch = scored_batch(trainer)
    trainer.select_tokens(batch)
    assert script.rows_with_gradient(trainer, batch, list(range(8))) == list(range(8))


@pytest.mark.parametrize("constants", [{"ENTROPY_COEF": 0.01}, {"KL_COEF": 0.1}])
def test_an_entropy_or_kl_term_leaves_no_row_out(grpo, constants):
    one, other = step_with(grpo, True, **constants)[0], step_with(grpo, False, **constants)[0]
    assert torch.equal(one, other)


def test_a_row_whose_tokens_are_not_trained_is_left_out(grpo):
    script = grpo(SKIP_FLAT_GROUPS=True, REWARD_FUNCTIONS=[(by_length, 1.0)])
    trainer = script.GRPOTrainer()
    batch = scored_batch(trainer)
    batch.advantages = torch.ones_like(batch.advantages)
    trainer.select_tokens(batch)
    batch.trained[3] = 0
    assert script.rows_with_gradient(trainer, batch, list(range(8))) == [0, 1, 2, 4, 5, 6, 7]


# ---------------------------------------------------------------- H3 and M6: distillation


DISTIL = {"REWARD_FUNCTIONS": [("exact_answer", 0.0)], "KL_COEF": 0.05, "REFERENCE_MODEL": f"{TINY}/policy"}


@pytest.mark.parametrize("name", ["compute_rewards", "compute_advantages"])
def test_an_own_reward_or_advantage_is_no_distillation(grpo, name):
    script = grpo(**DISTIL)
    assert script.GRPOTrainer().distils

    class Own(script.GRPOTrainer):
        pass

    setattr(Own, name, lambda self, *arguments, **columns: None)
    trainer = Own()
    assert not trainer.distils
    assert "minus_kl" not in trainer.run.best_by


def test_a_run_that_distils_says_so_before_it_trains(grpo, capsys):
    script = grpo(**DISTIL, MAX_STEPS=1, GROUP_SIZE=1)
    script.GRPOTrainer().train()
    text = capsys.readouterr().out
    told = text.index("distillation): best/ follows minus_kl")
    assert told < text.index("Epoch 1/")
    assert grpo().GRPOTrainer().train() is not None
    assert "distillation" not in capsys.readouterr().out


@pytest.mark.parametrize("constants", [{"GROUP_EPOCHS": 2}, {"MINI_BATCHES": 2}])
def test_distillation_with_several_updates_per_step_is_refused(grpo, constants):
    script = grpo(**DISTIL, **constants)
    with pytest.raises(script.UserError, match="distillation makes one update per step"):
        script.GRPOTrainer()
    grpo(**DISTIL).GRPOTrainer()


@pytest.mark.parametrize("path", ["ppo/ppo.py", "grpo/grpo.py"], ids=["ppo", "grpo"])
def test_a_reference_model_that_nothing_reads_is_refused(path):
    script = load_script(path, **small(path, REFERENCE_MODEL=f"{TINY}/policy", KL_COEF=0.0))
    with pytest.raises(script.UserError, match="is not used at KL_COEF = 0: set KL_COEF"):
        getattr(script, TRAINERS[path])("no")


# ---------------------------------------------------------------- H4: advantages per token


def updated(grpo, change, loss_type="dapo"):
    """(gradient, metrics) of one step whose advantages `change` has edited."""
    script = grpo(
        LOSS_TYPE=loss_type, REWARD_FUNCTIONS=[(by_length, 1.0)], MAX_GRAD_NORM=1e9, MICRO_BATCH_ROWS=1
    )
    trainer = script.GRPOTrainer()
    batch = scored_batch(trainer)
    change(batch)
    trainer.run.open_files()
    gradient, metrics = gradient_of_update(trainer, batch)
    batch.flat_groups = 0.0
    trainer.record(batch, dict(metrics))
    trainer.run.lock.release()
    return gradient, metrics


def per_token(batch):
    batch.advantages = batch.advantages[:, None].expand_as(batch.response_mask).clone()


@pytest.mark.parametrize("loss_type", LOSSES)
def test_equal_advantages_per_token_are_one_advantage_per_response(grpo, loss_type):
    one, metrics = updated(grpo, lambda batch: None, loss_type)
    other, wanted = updated(grpo, per_token, loss_type)
    assert distance(other, one) < 1e-6
    assert metrics["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-6)
    assert metrics["clip_fraction"] == wanted["clip_fraction"]


def test_advantages_per_token_train_their_own_tokens(grpo):
    """Only the second token of each response has an advantage: its loss alone is in the gradient."""

    def second(batch):
        batch.advantages = torch.zeros_like(batch.response_mask)
        batch.advantages[:, 1] = torch.linspace(-1, 1, len(batch.rows))

    got, _ = updated(grpo, second)
    script = grpo(REWARD_FUNCTIONS=[(by_length, 1.0)])
    trainer = script.GRPOTrainer()
    batch = scored_batch(trainer)
    total = 0.0
    for row, advantage in enumerate(torch.linspace(-1, 1, len(batch.rows))):
        prompt, response, _ = batch.sequences[row]
        logits = trainer.actor(torch.tensor([prompt + list(response)])).logits[0, len(prompt)]
        total = total - advantage * logits.log_softmax(-1)[response[1]]
    (total / batch.response_mask.sum()).backward()
    want = torch.cat([parameter.grad.flatten() for parameter in trainer.actor.parameters()])
    assert distance(got, want) < 1e-4


@pytest.mark.parametrize("shape", ["(rows, 1)", "(R,)", "one row too few"])
def test_advantages_of_another_shape_are_refused_at_once(grpo, shape):
    script = grpo(REWARD_FUNCTIONS=[(by_length, 1.0)])
    trainer = script.GRPOTrainer()
    batch = scored_batch(trainer)
    before = weights_of(trainer.actor)
    batch.advantages = {
        "(rows, 1)": batch.advantages[:, None],
        "(R,)": torch.ones(batch.response_mask.shape[1] + 1),
        "one row too few": batch.advantages[1:],
    }[shape]
    with pytest.raises(script.UserError, match="batch.advantages has the shape .* one per response"):
        trainer.update(batch)
    assert torch.equal(weights_of(trainer.actor), before)


# ---------------------------------------------------------------- H5: RCE with an edited sampler


def top_p(script, share):
    def sampling_logprobs(logits, temperature):
        logs = script.full_logprobs(logits, temperature)
        ordered = logs.sort(-1, descending=True)
        above = ordered.values.exp().cumsum(-1) - ordered.values.exp()
        dropped = torch.zeros_like(logs, dtype=torch.bool).scatter(-1, ordered.indices, above >= share)
        return logs.masked_fill(dropped, -math.inf).log_softmax(-1)

    return sampling_logprobs


def test_rce_scores_candidates_by_all_tokens_under_an_edited_sampler(rce):
    """With top-p 0.5 most gold answers have a token outside of the nucleus. Mining works, and gt_prob and
    logprob are those of the whole distribution."""
    script = rce()
    trainer = script.RCETrainer()
    plain = trainer.mine_chunk(trainer.train_rows[:4])
    whole = {(*c["token_ids"], c["prompt_id"]): c for c in plain}
    script.sampling_logprobs = top_p(script, 0.5)
    edited = trainer.mine_chunk(trainer.train_rows[:4])
    assert any(c["truncated"] is False and "sample" in c["source"] for c in edited)
    compared = 0
    for candidate in edited:
        assert candidate["gt_prob"] > 0
        wanted = whole.get((*candidate["token_ids"], candidate["prompt_id"]))
        if wanted:
            compared += 1
            assert candidate["gt_prob"] == pytest.approx(wanted["gt_prob"], rel=1e-3)
            assert candidate["logprob"] == pytest.approx(wanted["logprob"], abs=1e-3)
    assert compared >= 4


def test_rces_loss_stays_finite_and_its_gradient_whole_under_an_edited_sampler(rce):
    """A token outside of the nucleus has the gradient that the whole distribution gives it."""
    gradients = []
    for edit in (False, True):
        script = rce(MAX_GRAD_NORM=1e9)
        trainer = script.RCETrainer()
        row = trainer.train_rows[0]
        if edit:
            script.sampling_logprobs = top_p(script, 0.3)
        trainer.run.step, trainer.run.total_steps = 1, 4
        batch = script.make_batch([row["ids"]] * 2, [[20, 21, 1], [30, 1]], trainer.device)
        batch.rows = [row, row]
        batch.weights, batch.num_prompts = torch.tensor([0.75, 0.25]), 1
        gradient, metrics = gradient_of_update(trainer, batch)
        assert metrics["policy_loss"] < 100
        gradients.append(gradient)
    assert torch.equal(*gradients)


# ---------------------------------------------------------------- M3: critic warm-up


def test_the_critics_warm_up_leaves_actor_moments_and_kl_coefficient_alone(ppo):
    script = ppo(
        CRITIC_WARMUP_STEPS=2,
        WARMUP_STEPS=2,
        MAX_STEPS=6,
        KL_COEF=0.05,
        KL_TARGET=0.1,
        KL_HORIZON=8,
        USE_LR_SCHEDULER=False,
        LEARNING_RATE=1e-4,
    )
    trainer = script.PPOTrainer()
    actor, critic = weights_of(trainer.actor), weights_of(trainer.critic)
    rates, seen = [], []
    record = trainer.record

    def spy(batch, metrics):
        rates.append(metrics["learning_rate"])
        is_first = len(rates) <= 2
        moments = trainer.optimizers["policy"].state
        seen.append((torch.equal(weights_of(trainer.actor), actor), len(moments) == 0))
        assert (metrics["grad_norm"] == 0) == is_first
        assert metrics["critic_grad_norm"] > 0
        if is_first:
            assert metrics["kl_coef"] == 0.05
        record(batch, metrics)

    trainer.record = spy
    trainer.train()
    assert seen[:2] == [(True, True)] * 2
    assert not any(same for same, _ in seen[2:])
    assert not torch.equal(weights_of(trainer.critic), critic)
    assert rates[:2] == [0, 0]
    assert rates[2:] == pytest.approx([0.5e-4, 1e-4, 1e-4, 1e-4])
    assert trainer.state.kl_coef != 0.05


def test_patience_does_not_run_out_while_the_critic_is_trained_alone(ppo, tmp_path):
    """The policy stays as it is, so its reward cannot rise. It is evaluated again when it is trained."""
    script = ppo(
        CRITIC_WARMUP_STEPS=3,
        MAX_STEPS=5,
        EVAL_EVERY_N_STEPS=1,
        EARLY_STOPPING_PATIENCE=2,
        EARLY_STOPPING_THRESHOLD=1e9,
        USE_LR_SCHEDULER=True,
        LR_SCHEDULER_TYPE="plateau",
        PLATEAU_PATIENCE=1,
    )
    trainer = script.PPOTrainer()
    trainer.train()
    records = read(tmp_path / "run/logs/metrics.jsonl")
    assert [record["step"] for record in records if record["phase"] == "eval"] == [0, 4, 5]
    assert trainer.run.step == 5 and trainer.run.evals_since_best == trainer.run.halvings == 2


def test_a_run_cut_within_the_critics_warm_up_equals_a_whole_one(ppo, tmp_path):
    """The actor's optimizer has no moments yet when it is saved."""
    constants = dict(CRITIC_WARMUP_STEPS=2, EVAL_DATASETS=[], LEARNING_RATE=1e-4)
    ppo(**constants, MAX_STEPS=3, OUTPUT_DIR=str(tmp_path / "whole")).PPOTrainer().train()
    for steps, resume in ((1, "no"), (3, "yes")):
        ppo(
            **constants, MAX_STEPS=steps, OUTPUT_DIR=str(tmp_path / "cut"), RESUME=resume
        ).PPOTrainer().train()
    for name in ("policy", "critic"):
        whole, cut = (tmp_path / folder / f"step_3/{name}/model.safetensors" for folder in ("whole", "cut"))
        assert whole.read_bytes() == cut.read_bytes()


# ---------------------------------------------------------------- the smaller findings


@pytest.mark.parametrize(
    "constants, says",
    [
        ({"LOSS_TYPE": "dr_grpo", "SCALE_REWARDS": "batch"}, "SCALE_REWARDS = 'batch' has no effect"),
        ({"LOSS_TYPE": "gspo", "CLIP_RANGE": 0.2}, "LOSS_TYPE = 'gspo' with CLIP_RANGE = 0.2: its paper"),
    ],
)
def test_a_constant_without_effect_or_far_from_its_paper_is_named(grpo, capsys, constants, says):
    grpo(**constants, MAX_STEPS=1).GRPOTrainer().train()
    assert says in capsys.readouterr().out
    grpo(LOSS_TYPE="dr_grpo", SCALE_REWARDS="group", MAX_STEPS=1).GRPOTrainer().train()
    assert says not in capsys.readouterr().out


def test_an_own_compute_advantages_needs_no_call_of_the_old_one(grpo):
    script = grpo(REWARD_FUNCTIONS=[(by_length, 1.0)], TOP_ENTROPY_FRACTION=0.5, MAX_STEPS=1)

    class Own(script.GRPOTrainer):
        def compute_advantages(self, batch):
            batch.advantages = batch.scores - batch.scores.mean()

    trainer = Own()
    before = weights_of(trainer.actor)
    trainer.train()
    assert not torch.equal(weights_of(trainer.actor), before)


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_a_ratio_beyond_float32_gives_no_nan(loss_type, advantage, dual_clip):
    """A server with other weights: the log-ratio is 200. Where the loss clips it, the gradient is 0."""
    logprobs = torch.full((1, 3), -1.0, requires_grad=True)
    losses, ratio = GRPO.policy_loss(
        logprobs,
        torch.full((1, 3), -201.0),
        torch.full((1, 1), advantage),
        torch.ones(1, 3),
        loss_type,
        0.2,
        0.28,
        dual_clip,
    )
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert torch.isfinite(ratio).all()
    assert torch.isfinite(logprobs.grad).all()
    if advantage > 0 and loss_type in ("grpo", "dapo", "dr_grpo", "gspo"):
        assert logprobs.grad.abs().max() == 0


def test_rows_of_two_files_of_one_name_have_ids_of_their_own(grpo, tmp_path):
    datasets = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "rows.jsonl"
        path.write_text('{"problem": "1 + 1 =", "solution": "#### 2"}\n')
        datasets.append({"path": str(path), "type": "jsonl", "input": "problem", "output": "solution"})
    trainer = grpo(TRAIN_DATASETS=datasets).GRPOTrainer()
    ids = {row["id"] for row in trainer.train_rows}
    assert len(ids) == 2, ids


def test_gdpo_names_a_part_that_has_no_weight(tmp_path):
    trainer = subclass("gdpo", tmp_path)
    batch = SimpleNamespace(reward_parts={"own": torch.zeros(4)})
    with pytest.raises(
        trainer.compute_advantages.__globals__["grpo"].UserError, match="^reward_parts\\['own'\\] has no"
    ):
        trainer.compute_advantages(batch)


def test_groups_of_equal_scores_are_counted_as_they_are(grpo):
    script = grpo(GROUP_SIZE=2)
    assert script.flat_groups(torch.tensor([0.7, 0.7, 0.7, 0.70001])).tolist() == [True, False]
