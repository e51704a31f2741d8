"""What makes the trainers fast changes nothing they compute. (How fast they are: bench/speed.py; nothing is
timed here.)"""

from types import SimpleNamespace

import pytest
import torch
from conftest import NATS, TINY, distance, load_script, share_prompts
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers import Gemma3TextConfig, Llama4TextConfig, MistralConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

module = load_script("grpo/grpo.py")


def plain_pass(model, prompt, response, temperature):
    """Log-probabilities of a response's ids and the entropies, (R,), by a forward pass of the row alone."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, torch.tensor(response)[:, None]).squeeze(1), entropy


def flat_weights(model):
    """All weights as one vector, a copy."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


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
    assert logprobs[0, ids].isfinite().all()
    assert len(set(ids.tolist())) > 5
    at = uniform.double() * cumulative[-1]
    below = torch.where(ids > 0, cumulative[(ids - 1).clamp(min=0)], 0)
    assert (at >= below - 1e-6).all()
    assert (at <= cumulative[ids] + 1e-6).all()


# ---------------------------------------------------------------- one prompt's keys for all its responses


@pytest.mark.parametrize("kind, shared", [("shared_prompts", True), ("sdpa", False), ("eager", False)])
def test_decoding_is_a_plain_forward_pass(grpo, kind, shared):
    script = grpo()
    trainer = script.GRPOTrainer()
    model = trainer.actor
    assert model in script._SHARED_DECODING
    model.set_attn_implementation(kind)
    share_prompts(module, model, decoding=shared)
    torch.manual_seed(1)
    prompts = [row["ids"] for row in trainer.train_rows[:5]]
    assert len({len(p) for p in prompts}) > 2
    eos_ids = module.ids_of_ends(model, trainer.tokenizer)
    ids, lengths, *found = module.generate(model, prompts, torch.rand(20, 32), 4, 32, 1.3, eos_ids, 0)
    # rows were dropped on the way, of some prompts more than of others
    assert lengths.min() < 0.7 * lengths.max()
    for i, n in enumerate(lengths.tolist()):
        wanted = plain_pass(model, prompts[i // 4], ids[i, :n].tolist(), 1.3)
        for got, want in zip(found, wanted):
            assert torch.allclose(got[i, :n], want, atol=NATS)
        for rows in (ids, *found):
            assert (rows[i, n:] == 0).all()


def test_prompts_without_a_row_are_dropped_again_and_again():
    """Of three prompts of 1, 2 and 3 tokens with two rows each; rows are numbered anew after each drop."""
    shared = module.SharedPrompts({}, torch.tensor([[0, 0, 1], [0, 1, 1], [1, 1, 1]]))
    for rows, lengths in (([0, 0, 1, 1, 2, 2], [1, 2, 3]), ([2, 3, 4], [2, 3]), ([2], [3])):
        shared.select_rows(rows)
        assert (shared.bias == 0).sum((1, 2)).tolist() == lengths


@pytest.mark.parametrize("shared", [True, False])
def test_a_caches_room_grows_seldom_and_a_prompts_keys_are_kept_once(grpo, monkeypatch, shared):
    trainer = grpo().GRPOTrainer()
    share_prompts(module, trainer.actor, decoding=shared)
    name = "SharedPromptLayer" if shared else "PreallocatedCacheLayer"
    layers = []

    class Spy(getattr(module, name)):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            layers.append(self)

    monkeypatch.setattr(module, name, Spy)
    grown = []
    pad = torch.nn.functional.pad
    monkeypatch.setattr(
        torch.nn.functional,
        "pad",
        lambda x, *more, **options: (grown.append(x.dim()), pad(x, *more, **options))[1],
    )
    prompts = [row["ids"] for row in trainer.train_rows[:3]]
    module.generate(trainer.actor, prompts, torch.rand(24, 12), 8, 12, 1.0, torch.tensor([99]), 0)
    assert len(layers) == trainer.actor.config.num_hidden_layers
    assert grown.count(4) == 2 * len(layers)  # keys and values once, for eleven tokens
    for layer in layers:
        assert len(layer.keys) == 24
        assert not shared or layer.prompt[0].shape[1] == 3
        assert layer.keys.shape[2] == 11 + (0 if shared else max(map(len, prompts)))
        assert layer.get_seq_length() == 11 + max(map(len, prompts))


# ---------------------------------------------------------------- other models beside ours


def test_rows_that_share_nothing_get_transformers_own_attention():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
    owner = SimpleNamespace(num_key_value_groups=1, is_causal=True)
    got, _ = module.shared_prompt_attention(owner, q, k, v, None)
    assert torch.equal(got, sdpa_attention_forward(owner, q, k, v, None)[0])


def outputs(model):
    """What a model of the user's own says: of padded rows, and while it generates."""
    ids = torch.tensor([[0, 0, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14]])
    mask = (ids > 0).long()
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        generated = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=6,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return torch.cat([logits.flatten(), *(step.flatten() for step in generated.logits)])


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_a_users_own_model_says_the_same_beside_a_trainer(grpo, kind, tmp_path):
    # What other tests of this process imported has changed nothing
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward
    assert AttentionMaskInterface()["sdpa"] is sdpa_mask
    assert AttentionMaskInterface()["eager"] is eager_mask
    assert "eager" not in AttentionInterface()  # it is the model's own function
    own = AutoModelForCausalLM.from_pretrained(TINY / "policy", attn_implementation=kind)
    before = outputs(own)
    script = grpo(MAX_STEPS=1, EVAL_DATASETS=[], KL_COEF=0.1, ACTOR_MODEL=str(TINY / "policy"))
    trainer = script.GRPOTrainer()
    trainer.train()
    assert trainer.actor.config._attn_implementation == "shared_prompts"
    assert own.config._attn_implementation == kind
    assert torch.equal(outputs(own), before)
    later = AutoModelForCausalLM.from_pretrained(TINY / "policy", attn_implementation=kind)
    assert torch.equal(outputs(later), before)
    # and a policy that was trained is a plain model again where it is loaded
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "run/step_1/policy")
    assert policy.config._attn_implementation == "sdpa"


# ---------------------------------------------------------------- each prompt once, responses without padding


def packed_batch(prompts, responses, share):
    """Rows with random ids: lengths of the prompts and of the responses, share rows a prompt."""
    torch.manual_seed(0)
    ids = [torch.randint(3, 80, (n,)).tolist() for n in prompts for _ in range(share)]
    ids = [ids[i - i % share] for i in range(len(ids))]
    return module.make_batch(
        ids, [torch.randint(3, 80, (n,)).tolist() for n in responses], torch.device("cpu")
    )


def test_a_sequence_holds_a_prompt_once_and_a_bounded_number_of_response_tokens(monkeypatch):
    batch = packed_batch([9, 5, 7], [4, 6, 3, 5, 2, 2, 2, 2, 90, 20, 80, 1], 4)
    seen = []

    def spy(model, ids, at, **options):
        seen.append((ids.shape, options["attention_mask"].shape))
        return torch.zeros(len(at[0]), 1)

    monkeypatch.setattr(module, "logits_at", spy)
    monkeypatch.setattr(module, "_RESPONSE_TOKENS", 100)
    model = AutoModelForCausalLM.from_config(CONFIGS["all"])
    logits, (row, token) = module.logits_of_shared_prompts(model, batch, torch.arange(12))
    assert len(logits) == len(row) == len(token) == batch.response_lengths.sum()
    # Three prompts, the last in two sequences; the longest is 7 + 89 (a GPU's kernels want widths by eights)
    assert seen == [((4, 112), (4, 1, 112, 112))]  # 7 + 19 + 79


LAYERS = dict(
    vocab_size=82,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.5,
)
CHUNKS = Llama4TextConfig(
    **LAYERS,
    attention_chunk_size=8,
    num_local_experts=2,
    intermediate_size_mlp=32,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
)
MIXED = ["sliding_attention", "full_attention"]
CONFIGS = {
    "all": MistralConfig(**LAYERS, sliding_window=None),
    "window": MistralConfig(**LAYERS, sliding_window=3),
    "mixed": Gemma3TextConfig(**LAYERS, sliding_window=3, layer_types=MIXED, query_pre_attn_scalar=8),
}


@pytest.mark.parametrize("responses", [[1] * 6, [1, 5, 1, 1, 30, 2], [4] * 6])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_grouped_rows_are_plain_forward_passes(responses, name, kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=kind).eval()
    share_prompts(module, model, scoring=True)
    batch = packed_batch([3, 6, 3], responses, 2)  # neighbours of one length are not of one prompt
    rows = [3, 2, 0, 5, 4]
    found = module.response_logprobs(model, batch, rows, 0.8)
    for i, row in enumerate(rows):
        n = int(batch.response_lengths[row])
        prompt, response, _ = batch.sequences[row]
        wanted = plain_pass(model, prompt, response, 0.8)
        for got, want in zip(found, wanted):
            assert torch.allclose(got[i, :n], want, atol=NATS)
            assert (got[i, n:] == 0).all()


def test_layers_of_another_kind_share_nothing():
    model = AutoModelForCausalLM.from_config(CHUNKS)
    assert module.attention_windows(model) == {}
    with pytest.raises(KeyError):  # and check_models() sees that
        module.logits_of_shared_prompts(model, packed_batch([4, 4], [3, 5, 2, 2], 2), torch.arange(4))


# ---------------------------------------------------------------- log-probabilities of a large vocabulary


def soft_cap(logits, temperature):
    return module.full_logprobs(5 * torch.tanh(logits.float() / 5), temperature)


def without_some(logits, temperature):
    return module.full_logprobs(logits.float().masked_fill(logits < -1, -torch.inf), temperature)


@pytest.mark.parametrize("edit", [None, soft_cap, without_some])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_entropy", [0.0, 0.3])
def test_logprobs_entropy_and_their_gradients_are_autograds_whatever_the_edit(edit, dtype, of_entropy, grpo):
    script = grpo()
    script.sampling_logprobs = edit or script.sampling_logprobs
    torch.manual_seed(0)
    logits = (3 * torch.randn(24, 50)).to(dtype).requires_grad_()
    ids = logits.argmax(-1).view(4, 6)
    script.response_logits = lambda *words: (logits, torch.ones(4, 6).nonzero(as_tuple=True))
    batch = script.make_batch([[0]] * 4, ids.tolist(), torch.device("cpu"))
    got = script.response_logprobs(SimpleNamespace(device=torch.device("cpu")), batch, torch.arange(4), 0.7)
    every = (edit or module.full_logprobs)(logits.double(), 0.7).double()
    spread = (every.exp() * torch.where(every.isinf(), 0, every)).sum(-1)
    want = every.gather(-1, ids.view(-1, 1)).view(4, 6), -spread.view(4, 6)
    weights = torch.randn(2, 4, 6)

    def gradient(said, entropy):
        return torch.autograd.grad((weights[0] * said + of_entropy * weights[1] * entropy).sum(), logits)[0]

    for a, b in zip(got, want):
        assert distance(a, b) < 1e-5  # float32 sums of 50
    assert distance(gradient(*got), gradient(*want)) < (1e-5 if dtype == torch.float32 else 2**-8)


def test_micro_batches_are_bounded_by_their_logits_and_keep_prompts_together(grpo, monkeypatch):
    script = grpo(BATCH_SIZE=6, GROUP_SIZE=4)
    trainer = script.GRPOTrainer()
    batch = trainer.rollout(trainer.train_rows[:6])
    micro_batch_rows = script.micro_batch_rows
    assert micro_batch_rows(trainer.actor, batch) == 24
    for size, rows, prompts in ((8, 8, 2), (11, 8, 2), (4, 4, 1)):  # no prompt's rows are cut in two
        monkeypatch.setattr(script, "micro_batch_rows", lambda model, batch, size=size: size)
        micros = script.micro_batches(trainer.actor, batch, torch.randperm(24).tolist())
        assert sorted(i for m in micros for i in m) == list(range(24))
        for micro in micros:
            assert len(micro) == rows
            assert len({i // 4 for i in micro}) == prompts
    monkeypatch.setattr(
        script, "micro_batch_rows", lambda model, batch: 3
    )  # but where they are more than that
    assert [len(micro) for micro in script.micro_batches(trainer.actor, batch)] == 8 * [3]
    script.micro_batch_rows = micro_batch_rows
    monkeypatch.setattr(script, "BATCH_SIZE", 100)
    assert script.micro_batch_rows(trainer.actor, batch) == 64
    for vocabulary, rows in ((2**24 // batch.response_ids.shape[1] // 5, 5), (2**40, 1)):
        monkeypatch.setattr(trainer.actor.config, "vocab_size", vocabulary)
        assert script.micro_batch_rows(trainer.actor, batch) == rows


# ---------------------------------------------------------------- groups that teach nothing


def test_flat_groups_are_left_out_or_go_forward_only_and_the_update_is_the_same(grpo, monkeypatch):
    groups = [[1.0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 1]]
    weights = []
    graded = []
    metrics = []
    for constants in ({}, {"SKIP_FLAT_GROUPS": False}, {"ENTROPY_COEF": 1e-12}):
        script = grpo(**constants, BATCH_SIZE=6, GROUP_SIZE=4, LEARNING_RATE=1e-3, GROUP_EPOCHS=2)
        trainer = script.GRPOTrainer()
        before = flat_weights(trainer.actor)
        batch = trainer.score(trainer.rollout(trainer.train_rows[:6]))
        batch.scores = torch.tensor(groups).flatten()
        trainer.compute_advantages(batch)
        score = script.response_logprobs
        calls = []

        def spy(model, batch, rows, temperature):
            calls.append((torch.is_grad_enabled(), len(rows)))
            return score(model, batch, rows, temperature)

        monkeypatch.setattr(script, "response_logprobs", spy)
        metrics.append(trainer.update(batch))
        graded.append(calls)
        weights.append(flat_weights(trainer.actor))
    skipping, every, with_bonus = graded
    assert skipping == [(True, 12), (True, 12)]
    assert every == with_bonus == [(True, 24)] * 2  # any entropy bonus gives every row a gradient
    assert (weights[0] - before).abs().max() > 5e-4  # they did move
    for other, other_metrics in zip(weights[1:], metrics[1:]):
        # Adam divides by the gradient's size: a gradient that is zero but for rounding takes a step either
        # way
        assert ((weights[0] - other).abs() > 1e-4).float().mean() < 1e-3
        assert metrics[0]["grad_norm"] == pytest.approx(other_metrics["grad_norm"], rel=1e-3)
        for key in ("clip_fraction", "policy_loss"):
            assert metrics[0][key] == pytest.approx(other_metrics[key], abs=NATS)


def test_a_step_of_flat_groups_alone_reads_one_row_and_moves_no_weight(grpo, monkeypatch):
    script = grpo(BATCH_SIZE=3, GROUP_SIZE=2)
    trainer = script.GRPOTrainer()
    batch = trainer.score(trainer.rollout(trainer.train_rows[:3]))
    batch.scores = torch.full((6,), 0.7)  # whose float32 mean is another number
    trainer.compute_advantages(batch)
    score, calls = script.response_logprobs, []

    def spy(model, batch, rows, temperature):
        calls.append(len(rows))
        return score(model, batch, rows, temperature)

    monkeypatch.setattr(script, "response_logprobs", spy)
    before = flat_weights(trainer.actor)
    assert trainer.update(batch)["grad_norm"] == 0 and calls == [1]
    assert torch.equal(flat_weights(trainer.actor), before)
    state = trainer.optimizers["policy"].state[next(trainer.actor.parameters())]
    assert state["step"] == 1
