"""Formulas that several trainers have in common, against numbers worked out by hand."""

import math

import pytest
import torch
from conftest import load

T = torch.tensor
SAMPLERS = ("ppo/ppo.py", "grpo/grpo.py", "rce/rce.py")
OTHERS = ("ppo/sft.py", "ppo/reward_model.py", "rce/dpo.py")


@pytest.mark.parametrize("path", SAMPLERS)
def test_sampling_logprobs_divide_by_the_temperature(path):
    module = load(path, TEMPERATURE=2.0)
    temperature = [2.0] if path == "rce/rce.py" else []
    want = [x / 2 - math.log(math.exp(0.5) + math.exp(1.5)) for x in (1.0, 3.0)]
    assert module.sampling_logprobs(T([1.0, 3.0]), *temperature).tolist() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("path", [*SAMPLERS, *OTHERS])
def test_the_learning_rate_rises_and_then_follows_its_schedule(path):
    module = load(path, WARMUP_STEPS=4, USE_LR_SCHEDULER=False)
    halvings = [3] if path in SAMPLERS else []
    found = [module.learning_rate_scale(n, 12, *halvings) for n in (0, 1, 2, 3, 4, 11)]
    assert found == [0.25, 0.5, 0.75, 1, 1, 1]
    shapes = {"linear": [1, 0.75, 0.5, 0.25], "cosine": [1, 0.853553, 0.5, 0.146447], "plateau": [0.125] * 4}
    module.USE_LR_SCHEDULER = True
    for name in list(shapes)[: 2 + len(halvings)]:
        module.LR_SCHEDULER_TYPE = name
        found = [module.learning_rate_scale(n, 12, *halvings) for n in (4, 6, 8, 10)]
        assert found == pytest.approx(shapes[name], abs=1e-6)
    module.LR_SCHEDULER_TYPE = "linear"
    assert module.learning_rate_scale(4, 4, *halvings) == 1  # a run that is all warm-up


@pytest.mark.parametrize("path", ["grpo/grpo.py", "grpo/grpo_rec.py"])
def test_the_kl_estimators_and_their_gradients(path):
    """k2 has the gradient of KL(pi || ref), k3 that of KL(ref || pi): exact means over three tokens."""
    ref = T([1.0, 0.2, -0.5], dtype=torch.float64).log_softmax(0)
    logits = T([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    exact = {"k2": logprobs.exp() * (logprobs - ref), "k3": ref.exp() * (ref - logprobs)}
    values = {"k2": 0.125, "k3": math.exp(-0.5) - 1 + 0.5}
    for estimator in exact:
        module = load(path, KL_ESTIMATOR=estimator)
        mean = (logprobs.exp().detach() * module.kl_loss(logprobs, ref)).sum()
        gradients = [
            torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (mean, exact[estimator])
        ]
        assert torch.allclose(*gradients)
        by_value = module.kl_loss(T([-1.0, -400.0]), T([-1.5, 0.0]))
        assert by_value[0].item() == pytest.approx(values[estimator]) and by_value.isfinite().all()
