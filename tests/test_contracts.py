"""A forgotten call, a loop that is left early, a method called by hand: it works, or says what is wrong."""

import numpy as np
import pytest
import torch
from conftest import ROOT, TRAINERS, load_script, read, small
from matplotlib.figure import Figure


def test_a_run_whose_steps_are_never_recorded_still_ends(each, tmp_path):
    module, trainer_class = each(MAX_STEPS=2)

    class Silent(trainer_class):
        def record(self, batch, metrics):
            """Forgets run.log_step()."""

    trainer = Silent()
    trainer.train()
    assert trainer.run.step == 2
    assert (tmp_path / "run/step_2/policy").is_dir()
    assert not [r for r in read(tmp_path / "run/logs/metrics.jsonl") if r["phase"] == "train"]


def test_a_training_loop_that_is_left_early_saves_what_it_did_and_is_resumed(ppo, tmp_path):
    """As for a bound on the KL: three lines in train()."""
    script = ppo(MAX_STEPS=3)
    trainer = script.PPOTrainer()
    run = trainer.run
    with run.session("here"):
        while run.next_step():
            batch = trainer.rollout(trainer.next_prompts())
            trainer.score(batch)
            trainer.compute_advantages(batch)
            trainer.record(batch, trainer.update(batch))
            break
    assert (tmp_path / "run/step_1/training_state.pt").exists() and not (tmp_path / "run/step_3").exists()
    run.lock.release(force=True)
    again = ppo(MAX_STEPS=3, RESUME="yes").PPOTrainer()
    again.train()
    assert again.run.step == 3
    steps = [r["step"] for r in read(tmp_path / "run/logs/metrics.jsonl") if r["phase"] == "train"]
    assert steps == [1, 2, 3]


@pytest.mark.parametrize("path", ["ppo/ppo.py", "grpo/grpo.py", "rce/rce.py"])
def test_leaving_the_micro_batches_early_is_an_error_at_once(path, tmp_path):
    from conftest import load_script, small

    script = load_script(path, **small(path, OUTPUT_DIR=str(tmp_path / "run")))
    model = torch.nn.Linear(2, 1)
    model.device = torch.device("cpu")
    gradients = script.GradientSum([model])
    with pytest.raises(RuntimeError, match="left early: do not break out of it"):
        gradients.finish()
    for _ in gradients.deal([[0], [1]]):
        break
    with pytest.raises(RuntimeError, match="left early: do not break out of it"):
        gradients.finish()


def test_a_number_whose_maximum_is_logged_has_a_name_that_says_so(ppo):
    script = ppo()
    with pytest.raises(AssertionError, match="ratio: its name must begin with max_"):
        script.GradientSum([]).log_max("ratio", 1.0)


def average_the_loss(module, name):
    """A common edit that is wrong: the function of the loss returns its mean."""
    own = getattr(module, name)

    def averaged(*args, **kwargs):
        found = own(*args, **kwargs)
        return (found[0].mean(), *found[1:]) if isinstance(found, tuple) else found.mean()

    setattr(module, name, averaged)


@pytest.mark.parametrize("path", ["ppo/ppo.py", "grpo/grpo.py"])
def test_a_loss_that_is_a_mean_already_is_an_error_before_the_optimizer_steps(path, tmp_path):
    module = load_script(path, **small(path, OUTPUT_DIR=str(tmp_path / "run")))
    average_the_loss(module, "policy_loss")
    trainer = getattr(module, TRAINERS[path])()
    with pytest.raises(
        ValueError, match=r"policy_loss has the shape \(\), not \(\d+, \d+\): return one number"
    ):
        trainer.train()


def test_a_metric_is_one_number(ppo):
    script = ppo()
    found = script.as_numbers({"a": torch.tensor(2.5), "b": np.float32(1), "c": 3, "d": torch.tensor(4)})
    assert found == {"a": 2.5, "b": 1.0, "c": 3, "d": 4}
    assert [type(value) for value in found.values()] == [float, float, int, int]
    for wrong, shown in ((torch.ones(2), r"\[1.0, 1.0\]"), ("much", "'much'"), (None, "None")):
        with pytest.raises(TypeError, match=f"the metric 'mine' must be one number, not {shown}"):
            script.as_numbers({"mine": wrong})


def test_metrics_of_a_step_may_be_tensors(ppo, tmp_path):
    script = ppo(MAX_STEPS=1)

    class Mine(script.PPOTrainer):
        def update(self, batch):
            return {**super().update(batch), "longest": batch.response_mask.sum(1).max()}

    Mine().train()
    (record,) = [r for r in read(tmp_path / "run/logs/metrics.jsonl") if r["phase"] == "train"]
    assert record["longest"] > 1


def test_the_picture_of_one_step_shows_it(ppo, drawing):
    script = ppo()
    axis = Figure().add_subplot()
    script.plot_metric(
        axis, [{"phase": "train", "step": 1, "reward": 2.0}], "train", "reward", "C0", "reward"
    )
    markers = {line.get_marker(): line.get_xydata().tolist() for line in axis.lines}
    assert markers["."] == [[1.0, 2.0]]


def test_metrics_of_several_optimizer_steps_are_means_or_maxima(ppo):
    steps = [{"loss": 1.0, "max_ratio": 5.0}, {"loss": 2.0, "max_ratio": 3.0}]
    assert ppo().over_optimizer_steps(steps) == {"loss": 1.5, "max_ratio": 5.0}


def test_an_optimizer_keeps_the_rate_that_it_was_made_with(path, tmp_path):
    """As Muon, which needs about a hundred times AdamW's rate: one line of make_optimizer() is edited."""
    text = (ROOT / path).read_text()
    line = "torch.optim.AdamW(trained, lr=learning_rate, weight_decay=WEIGHT_DECAY, fused=True)"
    assert text.count(line) == 1
    (tmp_path / "edited.py").write_text(text.replace(line, "torch.optim.SGD(trained, lr=0.1)"))
    (tmp_path / "rewards").symlink_to(ROOT / "rewards")
    module = load_script(tmp_path / "edited.py", LEARNING_RATE=1e-4)
    model = torch.nn.Linear(2, 1)
    optimizer = module.make_optimizer(model, 1e-4)
    module.set_learning_rate(optimizer, 1e-4 / 4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 4)


def test_a_reward_function_of_weight_0_is_a_metric_of_the_responses(each, tmp_path):
    module, trainer_class = each(MAX_STEPS=1)

    def words(prompts, responses, answers):
        return [float(len(response.split())) for response in responses]

    module.REWARD_FUNCTIONS = [*module.REWARD_FUNCTIONS, (words, 0.0)]
    trainer = trainer_class()
    trainer.train()
    scores = trainer.compute_rewards(["1 + 1?"], ["a b c"], ["2"])
    assert scores == trainer.compute_rewards(["1 + 1?"], ["a"], ["2"])
    records = read(tmp_path / "run/logs/metrics.jsonl")
    phases = {record["phase"] for record in records if record.get("reward/words", 0) > 1}
    assert phases == {"train", "eval"} or (trainer.run.name == "rce" and phases)


def test_compute_rewards_works_by_hand(each):
    _, trainer_class = each()
    trainer = trainer_class()
    row = trainer.train_rows[0]
    assert trainer.compute_rewards([row["prompt"]] * 2, [row["answer"], "none"], [row["answer"]] * 2)[0] > 0
    assert "exact_answer" in trainer.reward_parts


def test_an_update_by_hand_before_the_first_step_is_the_first_step(each):
    """run.step is 0 before the loop: the schedule must not take it for another step."""
    module, trainer_class = each(USE_LR_SCHEDULER=True, LEARNING_RATE=1e-3, MAX_STEPS=4)
    if each.path == "rce/rce.py":
        return  # its batches come from candidates; test_rce.py
    trainer = trainer_class()
    batch = trainer.rollout(trainer.train_rows[:4])
    trainer.score(batch)
    trainer.compute_advantages(batch)
    batch.flat_groups = 0.0
    metrics = trainer.update(batch)
    assert metrics["learning_rate"] == 1e-3
    with pytest.raises(RuntimeError, match=r"open only inside `with run.session"):
        trainer.record(batch, metrics)


@pytest.mark.parametrize("rows", [1, 3, None])
def test_the_size_of_a_micro_batch_is_a_constant_and_changes_no_gradient(grpo, rows):
    found = []
    for size in (rows, 1000):
        script = grpo(MICRO_BATCH_ROWS=size, MAX_GRAD_NORM=1e9, SKIP_FLAT_GROUPS=False)
        trainer = script.GRPOTrainer()
        torch.manual_seed(3)
        batch = trainer.score(trainer.rollout(trainer.train_rows[:4]))
        trainer.compute_advantages(batch)
        trainer.select_tokens(batch)
        batch.sampled_logprobs = batch.logprobs
        sizes = [len(micro) for micro in script.micro_batches(trainer.actor, batch)]
        assert max(sizes) <= (size or 64) and sum(sizes) == 8
        gradient = []
        trainer.optimizers["policy"].step = lambda g=gradient, t=trainer: g.extend(
            p.grad.flatten() for p in t.actor.parameters()
        )
        trainer.optimizer_step(batch, list(range(8)))
        found.append(torch.cat(gradient))
    assert (found[0] - found[1]).norm() < 1e-4 * found[1].norm() + 1e-7
