"""What makes the trainers fast changes nothing they compute. (How fast they are: bench/run.py; nothing is timed here.)"""
from types import SimpleNamespace

import pytest
import torch
from conftest import NATS, SMALL, distance, load_script
from transformers import AutoModelForCausalLM, Llama4TextConfig, MistralConfig

module = load_script("grpo/grpo.py")


@pytest.fixture
def grpo(tmp_path):
    return lambda **constants: load_script("grpo/grpo.py", **{**SMALL, "OUTPUT_DIR": str(tmp_path / "run"), **constants})


# ---------------------------------------------------------------- sampling in two levels

@pytest.mark.parametrize("vocabulary", [82, 128, 1000, 4096])
def test_sampling_by_blocks_inverts_the_same_distribution(vocabulary):
    torch.manual_seed(0)
    logprobs = (4 * torch.randn(1, vocabulary)).log_softmax(-1)
    logprobs[0, torch.rand(vocabulary) < 0.5] = -torch.inf
    logprobs[0, 128:256] = -torch.inf  # a block without any mass
    cumulative = logprobs[0].double().exp().cumsum(0)
    uniform = torch.cat([(torch.arange(20000) + 0.5) / 20000, torch.tensor([0.0, 1 - 2**-24])])
    ids = module.sample_tokens(logprobs.exp().expand(len(uniform), -1), uniform)
    assert logprobs[0, ids].isfinite().all() and len(set(ids.tolist())) > 5
    at = uniform.double() * cumulative[-1]
    below = torch.where(ids > 0, cumulative[(ids - 1).clamp(min=0)], 0)
    assert (at >= below - 1e-6).all() and (at <= cumulative[ids] + 1e-6).all()


# ---------------------------------------------------------------- one prompt's keys for all its responses

@pytest.mark.parametrize("kind", ["sdpa", "eager"])  # eager cannot share: it must be right too
def test_decoding_with_shared_prompts_is_a_plain_forward_pass(grpo, kind):
    trainer = grpo().GRPOTrainer()
    model = trainer.actor
    model.set_attn_implementation(kind)
    torch.manual_seed(1)
    prompts = [row["ids"] for row in trainer.train_rows[:5]]
    assert len({len(p) for p in prompts}) > 2
    ids, lengths, logprobs, entropies = module.generate(model, prompts, torch.rand(20, 32), 4, 32, 1.3, trainer.eos_ids, 0)
    assert lengths.min() < 0.7 * lengths.max()  # rows were dropped on the way, of some prompts more than of others
    for i in range(20):
        whole, n = prompts[i // 4] + ids[i, :lengths[i]].tolist(), int(lengths[i])
        with torch.no_grad():
            want = (model(torch.tensor([whole])).logits[0, -n - 1:-1] / 1.3).log_softmax(-1)
        assert torch.allclose(logprobs[i, :n], want.gather(1, ids[i, :n, None])[:, 0], atol=NATS)
        assert torch.allclose(entropies[i, :n], -(want.exp() * want).sum(-1), atol=NATS)
        assert (ids[i, n:] == 0).all() and (logprobs[i, n:] == 0).all() and (entropies[i, n:] == 0).all()
    assert model.sampled_by == "grouped"  # sharing is given up where it is wrong


def test_a_prompts_keys_are_kept_once(grpo, monkeypatch):
    trainer, layers = grpo().GRPOTrainer(), []
    made = module.GroupedLayer.__init__
    monkeypatch.setattr(module.GroupedLayer, "__init__", lambda self, *a: (made(self, *a), layers.append(self))[0])
    prompts = [row["ids"] for row in trainer.train_rows[:3]]
    module.generate(trainer.actor, prompts, torch.rand(24, 4), 8, 4, 1.0, torch.tensor([99]), 0)
    assert len(layers) == trainer.actor.config.num_hidden_layers
    for layer in layers:
        assert len(layer.prompt[0]) == 3 and len(layer.room[0]) == 24 and layer.room[0].shape[2] < 32


def test_other_models_attention_is_untouched():
    """The function registered for sdpa hands everything else on to transformers' own."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
    owner = SimpleNamespace(num_key_value_groups=1, is_causal=True)
    assert torch.equal(module.attend(owner, q, k, v, None)[0], module.sdpa_attention_forward(owner, q, k, v, None)[0])


# ---------------------------------------------------------------- each prompt once, responses without padding

def packed_batch(prompts, responses, share):
    """Rows with random ids: lengths of the prompts and of the responses, share rows a prompt."""
    torch.manual_seed(0)
    prompt_lengths = torch.tensor(prompts).repeat_interleave(share)
    ids = [torch.randint(3, 80, (n,)).tolist() for n in prompts for _ in range(share)]
    ids = [ids[i - i % share] for i in range(len(ids))]
    lengths = torch.tensor(responses)
    return SimpleNamespace(prompt_ids=module.pad_left(ids, 0), prompt_lengths=prompt_lengths, response_lengths=lengths,
                           response_ids=torch.randint(3, 80, (len(lengths), int(lengths.max()))))


def test_a_packed_sequence_holds_each_prompt_once_and_hardly_any_padding():
    lengths = (20 / torch.rand(64, generator=torch.Generator().manual_seed(0)) ** (1 / 1.5) - 18).clamp(2, 256).long()  # a heavy tail
    batch = packed_batch([9, 5, 7, 9, 8, 9, 6, 9], lengths.tolist(), 8)
    packed = module.Packed(batch, torch.arange(64))
    tokens, needed = packed.inputs["input_ids"].shape[1], int(lengths.sum()) - 64
    assert needed + 62 <= tokens < 1.1 * needed + 8 * 9
    assert packed.mask.sum(1).tolist() == lengths.tolist() and len(packed.said) == lengths.sum()


LAYERS = dict(vocab_size=82, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.5)


@pytest.mark.parametrize("responses", [[1] * 6, [1, 5, 1, 1, 30, 2], [4] * 6])
@pytest.mark.parametrize("config", [MistralConfig(**LAYERS, sliding_window=None), MistralConfig(**LAYERS, sliding_window=3), Llama4TextConfig(
    **LAYERS, attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=32, pad_token_id=0, bos_token_id=None, eos_token_id=1)], ids=["all", "window", "chunks"])
def test_packed_rows_are_plain_forward_passes(responses, config):  # but chunks cannot be packed
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    batch, rows = packed_batch([1, 6, 3], responses, 2), torch.tensor([3, 0, 5, 2, 4])
    logprobs, entropy = module.response_logprobs(model, batch, rows, 0.8)
    for i, row in enumerate(rows.tolist()):
        p, n = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        ids = torch.cat([batch.prompt_ids[row, -p:], batch.response_ids[row, :n]])
        want = (model(ids[None]).logits[0, p - 1:-1] / 0.8).log_softmax(-1)
        assert torch.allclose(logprobs[i, :n], want.gather(1, ids[p:, None])[:, 0], atol=NATS)
        assert torch.allclose(entropy[i, :n], -(want.exp() * want).sum(-1), atol=NATS)
        assert (logprobs[i, n:] == 0).all() and (entropy[i, n:] == 0).all()


def test_no_other_attention_can_take_a_packed_sequence_for_a_row():
    packed = module.Packed(packed_batch([4, 4], [3, 5, 2, 2], 2), torch.arange(4))
    tokens = packed.inputs["input_ids"].shape[1]
    q, k, v = (torch.randn(1, 4, tokens, 8) for _ in range(3))
    with pytest.raises(RuntimeError):
        module.sdpa_attention_forward(SimpleNamespace(num_key_value_groups=1, is_causal=True), q, k, v, packed.inputs["attention_mask"])


# ---------------------------------------------------------------- log-probabilities of a large vocabulary

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1, 0.7])
@pytest.mark.parametrize("of_entropy", [0.0, 0.3])
def test_token_logprobs_and_their_gradient_are_autograds(dtype, temperature, of_entropy):
    torch.manual_seed(0)
    logits, ids = (3 * torch.randn(4, 6, 50)).to(dtype).requires_grad_(), torch.randint(50, (4, 6))
    weight = torch.randn(2, 4, 6)
    logprobs = (logits.float() / temperature).log_softmax(-1)
    want = logprobs.gather(-1, ids[..., None])[..., 0], -(logprobs.exp() * logprobs).sum(-1)
    want_grad, = torch.autograd.grad((weight[0] * want[0] + of_entropy * weight[1] * want[1]).sum(), logits)
    got = module.TokenLogprobs.apply(logits, ids, temperature)
    grad, = torch.autograd.grad((weight[0] * got[0] + of_entropy * weight[1] * got[1]).sum(), logits)
    assert all(distance(a, b) < 1e-5 for a, b in zip(got, want))  # float32 sums of 50; bfloat16 keeps 8 bits
    assert grad.dtype == dtype and distance(grad, want_grad) < (1e-5 if dtype == torch.float32 else 2 ** -8)


def test_micro_batches_are_bounded_by_their_logits_and_keep_prompts_together(grpo, monkeypatch):
    trainer = grpo(BATCH_SIZE=6, GROUP_SIZE=4).GRPOTrainer()
    batch = trainer.rollout(trainer.train_rows[:6])
    assert trainer.rows_at_once(batch) == 24
    micros = module.micro_batches(batch, torch.randperm(24), 8)
    assert sorted(i for m in micros for i in m.tolist()) == list(range(24))
    for micro in micros:
        assert len(micro) == 8 and len({i // 4 for i in micro.tolist()}) == 2
    monkeypatch.setitem(trainer.rows_at_once.__globals__, "BATCH_SIZE", 100)
    assert trainer.rows_at_once(batch) == 64
    for vocabulary, rows in ((2**24 // batch.response_ids.shape[1] // 5, 5), (2**40, 1)):
        monkeypatch.setattr(trainer.actor.config, "vocab_size", vocabulary)
        assert trainer.rows_at_once(batch) == rows


# ---------------------------------------------------------------- groups that teach nothing

def test_flat_groups_are_left_out_or_go_forward_only_and_the_update_is_the_same(grpo, monkeypatch):
    weights, graded, metrics = [], [], []
    for entropy_coef in (0.0, 1e-12):  # any entropy bonus gives every row a gradient
        script = grpo(BATCH_SIZE=6, GROUP_SIZE=4, ENTROPY_COEF=entropy_coef, LEARNING_RATE=1e-3, GROUP_EPOCHS=2)
        trainer, seen = script.GRPOTrainer(), []
        batch = trainer.score(trainer.rollout(trainer.train_rows[:6]))
        batch.scores = torch.tensor([[1.0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 1]]).flatten()
        trainer.compute_advantages(batch)
        score = script.response_logprobs
        monkeypatch.setattr(script, "response_logprobs", lambda m, b, rows, t: (seen.append((torch.is_grad_enabled(), len(rows))), score(m, b, rows, t))[1])
        metrics.append(trainer.update(batch))
        graded.append(seen)
        weights.append(torch.cat([p.detach().flatten() for p in trainer.actor.parameters()]))
    assert graded == [[(True, 12), (True, 12), (False, 12)], [(True, 24)] * 2]  # at first the sampler's own figures will do
    before = torch.cat([p.detach().flatten() for p in AutoModelForCausalLM.from_pretrained(module.ACTOR_MODEL).parameters()])
    assert (weights[0] - before).abs().max() > 5e-4  # they did move
    # Adam divides by the gradient's size: a gradient that is zero but for rounding takes a step either way
    assert ((weights[0] - weights[1]).abs() > 1e-4).float().mean() < 1e-3
    assert metrics[0]["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=1e-3)
    for key in ("entropy", "approx_kl", "clip_fraction", "policy_loss"):
        assert metrics[0][key] == pytest.approx(metrics[1][key], abs=NATS)


def test_a_step_of_flat_groups_alone_still_takes_its_optimizer_step(grpo):
    script = grpo(BATCH_SIZE=3, GROUP_SIZE=2)
    trainer = script.GRPOTrainer()
    batch = trainer.score(trainer.rollout(trainer.train_rows[:3]))
    batch.scores = torch.ones(6)
    trainer.compute_advantages(batch)
    assert trainer.update(batch)["grad_norm"] == 0
    state = trainer.optimizers["policy"].state[next(trainer.actor.parameters())]
    assert state["step"] == 1
