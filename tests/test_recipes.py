"""The recipes of docs/ppo.md and docs/grpo.md: each is applied to a copy of its trainer and compared with numbers
worked out by hand, so that none goes stale."""
import re
import types

import pytest
import torch
from conftest import ROOT, load_script, small


def recipe(page, name):
    """The text of the fenced block after <!-- recipe: NAME --> in docs/PAGE."""
    after = (ROOT / "docs" / page).read_text().split(f"<!-- recipe: {name} -->\n")[1]
    return re.match(r"```\w+\n(.*?)```", after, re.DOTALL)[1]


def patched(path, name, **constants):
    """A trainer's module with a recipe's lines: those after '-' make place for those after '+'."""
    text = (ROOT / path).read_text()
    page = path.split("/")[1].replace(".py", ".md")
    for hunk in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", recipe(page, name), re.MULTILINE):
        old, new = (re.sub("^[-+]", "", lines, flags=re.MULTILINE) for lines in hunk)
        assert text.count(old) == 1, old
        text = text.replace(old, new)
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
        want = [sum(lam ** k * delta[t + k] for k in range(n - t)) for t in range(n)]
        assert batch.raw_advantages[row, :n].tolist() == pytest.approx(want, abs=1e-5)
