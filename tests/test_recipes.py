"""The recipes of docs/change-the-algorithm.md: each is applied to a copy of its trainer and compared with
numbers worked out by hand, so that none goes stale. test_examples.py tests those of examples/."""

import math
import time
import types

import pytest
import torch
from bench import learning_curves
from bench.learning_curves import recipe
from conftest import ROOT, Program, assert_same_state, load_script, small, untimed

PAGE = "change-the-algorithm.md"


def patched(path, name, **constants):
    """A trainer's module with a recipe's lines."""
    text = learning_curves.patched((ROOT / path).read_text(), recipe(PAGE, name))
    module = types.ModuleType("patched")
    module.__file__ = str(ROOT / path)
    exec(compile(text, path, "exec"), vars(module))
    for key, value in constants.items():
        setattr(module, key, value)
    return module


def scored_batch(trainer, count=4):
    torch.manual_seed(5)
    batch = trainer.rollout(trainer.train_rows[:count])
    trainer.score(batch)
    return batch


# ---------------------------------------------------------------- PPO


def test_length_adaptive_lambda_is_1_less_1_over_alpha_times_the_length(tmp_path):
    module = patched("ppo/ppo.py", "length-adaptive lambda", **small("ppo/ppo.py", OUTPUT_DIR=str(tmp_path)))
    trainer = module.PPOTrainer()
    batch = scored_batch(trainer)
    batch.values = torch.rand_like(batch.values) * batch.response_mask
    trainer.compute_advantages(batch)
    lengths = batch.response_lengths.tolist()
    assert len(set(lengths)) > 2
    for row, n in enumerate(lengths):
        lam = 1 - 1 / max(1.0, 0.5 * n)
        v = [*batch.values[row, :n].double().tolist(), 0.0]
        delta = [v[t + 1] - v[t] + (batch.scores[row].item() if t == n - 1 else 0.0) for t in range(n)]
        want = [sum(lam**k * delta[t + k] for k in range(n - t)) for t in range(n)]
        assert batch.raw_advantages[row, :n].tolist() == pytest.approx(want, abs=1e-5)


# ---------------------------------------------------------------- GRPO


def loss_of(module, loss_type, advantage, old, new):
    """Loss of one token whose probability went from old to new, and its gradient by log new, in float64."""
    logprobs = torch.tensor([[math.log(new)]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[math.log(old)]], dtype=torch.float64)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    losses, _ = module.policy_loss(logprobs, old, advantages, torch.ones(1, 1), loss_type, 0.2, 0.2)
    losses.sum().backward()
    return losses.item(), logprobs.grad.item()


@pytest.mark.parametrize(
    "advantage, old, new, learns",
    [
        (1.0, 0.5, 0.69, True),
        (1.0, 0.5, 0.71, False),
        (1.0, 0.5, 0.1, True),
        (1.0, 0.01, 0.2, True),
        (-1.0, 0.5, 0.31, True),
        (-1.0, 0.5, 0.29, False),
        (-1.0, 0.5, 0.9, True),
        (-1.0, 0.1, 0.001, True),
    ],
)
def test_dppo_leaves_out_tokens_whose_probability_moved_by_a_fifth(advantage, old, new, learns):
    loss, gradient = loss_of(patched("grpo/grpo.py", "dppo"), "dapo", advantage, old, new)
    assert loss == pytest.approx(-new / old * advantage * learns) and gradient == pytest.approx(loss)


def test_maxrl_divides_by_the_groups_mean():
    scores = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    got = patched("grpo/grpo.py", "maxrl").group_advantages(scores, 4, "group", False)
    want = [3.0, -1, -1, -1, 1, 1, -1, -1, 0, 0, 0, 0]
    assert got.tolist() == pytest.approx(want, abs=2e-3)


def subclass(name, tmp_path, **constants):
    """A recipe's class over grpo/grpo.py with small constants, made."""
    constants = small("grpo/grpo.py", OUTPUT_DIR=str(tmp_path / "run"), **constants)
    space = {"grpo": load_script("grpo/grpo.py", **constants)}
    exec(recipe(PAGE, name).replace("import grpo\n", ""), space)
    return next(value for key, value in space.items() if key.endswith("Trainer"))("no")


def right(prompts, responses, answers):
    return [float(i % 3 == 0) for i in range(len(responses))]


def long(prompts, responses, answers):
    return [100.0 + i for i in range(len(responses))]


def test_gdpo_standardises_each_reward_in_its_group_and_the_sum_over_the_step(tmp_path):
    trainer = subclass("gdpo", tmp_path, GROUP_SIZE=4, REWARD_FUNCTIONS=[(right, 2.0), (long, 0.5)])
    batch = trainer.score(trainer.rollout(trainer.train_rows[:2]))
    trainer.compute_advantages(batch)
    trainer.select_tokens(batch)
    total = torch.zeros(8, dtype=torch.float64)
    for function, weight in ((right, 2.0), (long, 0.5)):
        groups = torch.tensor(function(None, [0] * 8, None), dtype=torch.float64).view(2, 4)
        alone = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        total += weight * alone.flatten()
    want = (total - total.mean()) / (total.std() + 1e-4)
    assert batch.advantages.tolist() == pytest.approx(want.tolist(), abs=1e-4)
    assert trainer.update(batch)["grad_norm"] > 0


def test_adaptive_entropy_pays_below_its_target_alone_and_goes_up_and_down(tmp_path):
    trainer = subclass("adaptive entropy", tmp_path, LEARNING_RATE=0.0)
    batch = trainer.score(trainer.rollout(trainer.train_rows[:4]))
    trainer.compute_advantages(batch)
    trainer.select_tokens(batch)
    paid = []
    for entropy in (0.1, 0.1, 0.3, 0.1, 0.3, 0.3, 0.3):
        batch.entropies = torch.full_like(batch.entropies, entropy)
        paid.append(trainer.update(batch)["entropy_coef"])
    assert paid == pytest.approx([0.005, 0.01, 0, 0.01, 0, 0, 0])
    assert trainer.state.entropy_coef == 0
    rows = list(range(8))
    trainer.bonus = 0.5
    width = batch.entropies.shape[1]
    seen = rows, batch.logprobs, batch.entropies
    plain = trainer.__class__.__mro__[1].token_losses(trainer, batch, *seen)[0]
    found = trainer.token_losses(batch, *seen)[0]
    assert torch.allclose(plain - found, torch.full((8, width), 0.15))


def test_a_prompt_that_is_solved_is_not_asked_again(tmp_path):
    asked = []

    def known(prompts, responses, answers):
        asked.append(sorted(set(prompts)))
        return [float("e" in prompt[:12]) for prompt in prompts]

    constants = dict(MAX_TRAIN_PROMPTS=8, BATCH_SIZE=8, NUM_EPOCHS=2, REWARD_FUNCTIONS=[(known, 1.0)])
    constants |= dict(MAX_EVAL_PROMPTS=1, OUTPUT_DIR=str(tmp_path / "run"))
    module = patched("grpo/grpo.py", "solved prompts", **{**small("grpo/grpo.py"), **constants})
    trainer = module.GRPOTrainer("no")
    trainer.train()
    solved = [row["prompt"] for row in trainer.train_rows if "e" in row["prompt"][:12]]
    assert 0 < len(solved) < 8
    first, second = [prompts for prompts in asked if len(prompts) > 1]
    assert len(first) == 8 and second == sorted(set(first) - set(solved))
    ids = {row["id"] for row in trainer.train_rows if row["prompt"] in solved}
    assert set(trainer.state.solved) == ids


def with_state(name, out, **constants):
    """A trainer of a recipe that adds a field to self.state; it writes into out."""
    constants |= dict(OUTPUT_DIR=str(out), MAX_TRAIN_PROMPTS=8, NUM_EPOCHS=2, EVAL_DATASETS=[])
    constants |= dict(SAVE_EVERY_N_STEPS=2, RESUME="yes", REWARD_FUNCTIONS=[(some_right, 1.0)])
    constants = small("grpo/grpo.py", **constants)
    if name == "solved prompts":
        return patched("grpo/grpo.py", name, **constants).GRPOTrainer()
    space = {"grpo": load_script("grpo/grpo.py", **constants)}
    exec(recipe(PAGE, name).replace("import grpo\n", ""), space)
    return space["AdaptiveEntropyTrainer"]()


def some_right(prompts, responses, answers):
    """1 for all responses to some prompts; the others' responses differ."""
    return [1.0 if len(p) % 2 else float(len(r) % 2) for p, r in zip(prompts, responses)]


@pytest.mark.parametrize("name, field", [("adaptive entropy", "entropy_coef"), ("solved prompts", "solved")])
def test_a_recipes_own_state_is_resumed(tmp_path, name, field):
    whole = with_state(name, tmp_path / "whole", MAX_STEPS=4)
    whole.train()
    with_state(name, tmp_path / "parts", MAX_STEPS=2).train()
    resumed = with_state(name, tmp_path / "parts", MAX_STEPS=4)
    assert resumed.run.step == 2 and getattr(resumed.state, field)
    resumed.train()
    assert getattr(resumed.state, field) == getattr(whole.state, field)
    one, two = tmp_path / "whole", tmp_path / "parts"
    assert untimed(one / "logs/metrics.jsonl") == untimed(two / "logs/metrics.jsonl")
    assert len(untimed(one / "logs/metrics.jsonl")) == 4
    assert_same_state(one / "step_4/training_state.pt", two / "step_4/training_state.pt")


def test_learning_curves_makes_a_program_of_a_recipe(tmp_path):
    for name in ("maxrl", "gdpo"):
        (tmp_path / name).mkdir()
        program = learning_curves.with_recipe(ROOT / "grpo/grpo.py", name, tmp_path / name)
        ends = {"maxrl": "    train_main()\n", "gdpo": "grpo.run_main(GDPOTrainer)\n"}
        assert program.read_text().endswith(ends[name])
    words = ["CLIP_RANGE=-1", f"OUTPUT_DIR={tmp_path / 'run'}"]
    end = Program(program, *words, cwd=tmp_path, environment={}).wait()
    assert end.returncode == 2 and "CLIP_RANGE = -1.0 is out of range" in end.stderr


# ---------------------------------------------------------------- rewards that wait


@pytest.mark.parametrize("threads, rows", [(1, 1), (3, 2), (8, 5), (2, 100)])
def test_threads_change_no_value_and_hand_on_the_columns(threads, rows):
    def scored(prompts, responses, answers, response_ids, source):
        time.sleep(0.003 * (7 - int(responses[0])))
        assert len(prompts) == len(answers) == len(source) == len(responses) <= rows
        return [int(r) + ids[0] / 8 + len(s) for r, ids, s in zip(responses, response_ids, source)]

    module = load_script("grpo/grpo.py")
    columns = {"response_ids": [[i] for i in range(7)], "source": ["ab"] * 7, "unused": [None] * 7}
    lists = ["?"] * 7, [str(i) for i in range(7)], [None] * 7
    threaded = module.rewards.threaded(scored, threads, rows)
    values = module.call_reward("scored", threaded, *lists, columns)
    assert values.tolist() == [i + i / 8 + 2 for i in range(7)]


def test_values_that_do_not_fit_their_responses_are_an_error_though_their_sum_does():
    def wrong(prompts, responses, answers):
        return [0.0] * (3 if responses[0] == "0" else 1)

    module = load_script("grpo/grpo.py")
    with pytest.raises(ValueError, match="3 values for 2 responses"):
        module.call_reward("wrong", module.rewards.threaded(wrong, 2, 2), ["?"] * 4, list("0123"), [None] * 4)
