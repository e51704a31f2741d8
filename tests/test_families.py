"""Sampling, scoring and the update agree for the usual families of models, and with transformers' own plain
forward pass of each row."""

import pytest
import torch
import transformers
from conftest import TINY, load

ENDS = list(range(60, 70))  # ids at which sampling stops: responses of many lengths
SHAPE = {"vocab_size": 82, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
SHAPE |= {"bos_token_id": None, "eos_token_id": ENDS, "pad_token_id": 0}
GPT2 = {"vocab_size": 82, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "eos_token_id": ENDS}
HEADS = {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": ENDS}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
LINEAR |= {
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen3": transformers.Qwen3Config(**SHAPE),
    "mistral with a window": transformers.MistralConfig(**SHAPE, sliding_window=7),
    "gemma2": transformers.Gemma2Config(**SHAPE, sliding_window=7, query_pre_attn_scalar=8),
    "gemma3": transformers.Gemma3TextConfig(**SHAPE, sliding_window=7, query_pre_attn_scalar=8),
    "gpt2": transformers.GPT2Config(**GPT2, bos_token_id=1),
    "gpt_neox": transformers.GPTNeoXConfig(**SHAPE),
    "phi3": transformers.Phi3Config(**SHAPE),
    "olmo2": transformers.Olmo2Config(**SHAPE),
    "capped logits": transformers.Gemma2Config(**SHAPE, sliding_window=4, final_logit_softcapping=5.0),
    "scaled logits": transformers.CohereConfig(**SHAPE, logit_scale=0.25),
    "experts": transformers.MixtralConfig(**SHAPE, num_local_experts=4, output_router_logits=True),
    "opt": transformers.OPTConfig(vocab_size=82, ffn_dim=48, **HEADS),
    "gated delta net": transformers.Qwen3NextConfig(**SHAPE | LINEAR),
    "alibi": transformers.FalconConfig(vocab_size=82, alibi=True, **HEADS),
}
OF_PPO = ("qwen3", "gemma3", "gpt2", "mistral with a window")
OF_SFT = ("capped logits", "scaled logits", "experts", "gpt2")


def random_model(name):
    """Returns a model whose weights are large enough to tell tokens and positions apart."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[name]).eval()
    for key, parameter in model.named_parameters():
        if parameter.dim() == 2 and "norm" not in key:
            parameter.data.mul_(4)
    return model


@pytest.fixture
def make_family(make, tmp_path):
    """make_family(path, name, KEY=value) returns a trainer of a random model of that family."""

    def make_trainer(path, name, **options):
        random_model(name).save_pretrained(tmp_path / "model")
        transformers.AutoTokenizer.from_pretrained(TINY / "policy").save_pretrained(tmp_path / "model")
        options |= {"ACTOR_MODEL": str(tmp_path / "model"), "EVAL_DATASETS": [], "GROUP_SIZE": 2}
        return make(path, **options, TEMPERATURE=2.0, MAX_NEW_TOKENS=24)

    return make_trainer


@pytest.mark.parametrize("name", OF_PPO)
def test_sampling_scoring_values_and_the_update_agree_with_a_plain_forward_pass(make_family, name):
    trainer = make_family("ppo/ppo.py", name, REWARD_MODEL=None, KL_COEF=0.0)
    torch.nn.init.normal_(trainer.critic.score.weight)
    trainer.state.step = 1
    batch = trainer.rollout(trainer.next_prompts())  # prompts and responses of different lengths
    assert batch.lengths.min() < batch.lengths.max()
    sampled = zip(batch.rows, batch.ids, batch.lengths, batch.logprobs, batch.values)
    for row, ids, length, logprobs, values in sampled:
        whole = torch.tensor([row["ids"] + ids[:length].tolist()])
        first = len(row["ids"]) - 1
        with torch.no_grad():
            logits = trainer.actor(whole).logits[0, first:-1]
            hidden = trainer.critic.get_decoder()(whole).last_hidden_state[0, first:-1]
        wanted = (logits / 2.0).log_softmax(-1).gather(1, ids[:length, None])[:, 0]
        assert torch.allclose(logprobs[:length], wanted, atol=1e-3)
        assert torch.allclose(values[:length], trainer.critic.score(hidden)[:, 0], atol=1e-3)
    trainer.compute_advantages(batch)
    assert trainer.update(batch)["rollout_mismatch"] < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_grpo_samples_scores_and_trains_what_a_plain_forward_pass_gives(make_family, name):
    """Also where logits are capped or scaled; a cache is fixed where all layers have full attention."""
    trainer = make_family("grpo/grpo.py", name)
    module = trainer.module
    module.DECODE_BLOCK, module.LOGIT_CHUNK = 16, 5
    trainer.state.step = 1
    batch = trainer.rollout(trainer.next_prompts())
    assert batch.lengths.min() < batch.lengths.max()
    wanted = []
    for row, ids, length, logprobs in zip(batch.rows, batch.ids, batch.lengths, batch.logprobs):
        whole = torch.tensor([row["ids"] + ids[:length].tolist()])
        logits = trainer.actor(whole).logits[0, len(row["ids"]) - 1 : -1]
        wanted.append((logits / 2.0).log_softmax(-1).gather(1, ids[:length, None])[:, 0])
        assert torch.allclose(logprobs[:length], wanted[-1], atol=1e-3)
    parameters = list(trainer.actor.parameters())
    gradients = torch.autograd.grad(sum(x.square().sum() for x in wanted), parameters)
    logprobs, _ = module.logprobs_and_entropy(trainer.actor, batch, torch.arange(len(batch.rows)))
    logprobs.square().sum().backward()
    for one, parameter in zip(gradients, parameters):
        assert torch.allclose(one, parameter.grad, atol=2e-3 * (1 + one.abs().max().item()))
    trainer.optimizers["policy"].zero_grad()
    trainer.compute_advantages(batch)
    assert trainer.update(batch)["rollout_mismatch"] < 1e-4
    decoder = module.Decoder(trainer.actor, [[5, 6]])
    others = ("mistral with a window", "gemma2", "gemma3", "capped logits", "gated delta net", "alibi")
    assert (decoder.cache.place is None) == (name in others)


# ---------------------------------------------------------------- answers that are given: sft.py, dpo.py

ROWS = [{"ids": [5, 6, 7, 8, 9, 10, 11, 2], "mask": [0, 0, 0, 1, 1, 0, 1, 1]}]
ROWS += [{"ids": [12, 13, 14, 2], "mask": [0, 1, 1, 1]}, {"ids": [15, 2], "mask": [0, 1]}]


@pytest.mark.parametrize("name", OF_SFT)
def test_logprobs_are_those_of_a_plain_forward_pass_and_so_is_the_gradient(name):
    sft = load("ppo/sft.py", LOGITS_AT_ONCE=3)
    model, wanted, is_likeliest = random_model(name), [], []
    for row in ROWS:
        logits = model(torch.tensor([row["ids"]])).logits[0]
        for t, is_trained in enumerate(row["mask"]):
            if is_trained:
                wanted.append(logits[t - 1].log_softmax(-1)[row["ids"][t]])
                is_likeliest.append(float(logits[t - 1].argmax() == row["ids"][t]))
    weights = torch.linspace(0.5, 1.5, len(wanted))
    gradients = torch.autograd.grad((torch.stack(wanted) * weights).sum(), list(model.parameters()))
    logprobs, likeliest = sft.answer_logprobs(model, ROWS)
    assert torch.allclose(logprobs, torch.stack(wanted), atol=1e-4) and likeliest.tolist() == is_likeliest
    (logprobs * weights).sum().backward()
    for one, parameter in zip(gradients, model.parameters()):
        assert torch.allclose(one, parameter.grad, atol=1e-4 * (1 + one.abs().max().item()))
    with torch.no_grad():
        assert torch.equal(sft.answer_logprobs(model, ROWS)[0], logprobs)


def test_logits_are_held_for_a_few_tokens_and_computed_again():
    sft = load("ppo/sft.py", LOGITS_AT_ONCE=3)
    model, sizes = random_model("capped logits"), []
    model.lm_head.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[1]))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        logprobs, _ = sft.answer_logprobs(model, ROWS)
    assert sizes == [3, 3, 2] and not any(shape[-1:] == (82,) for shape in kept)
    logprobs.sum().backward()
    assert sorted(sizes) == [2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_gradient_checkpointing_gives_the_same_gradient_without_dropout(name, tmp_path):
    """OPT's layers call dropout themselves."""
    random_model(name).save_pretrained(tmp_path)
    gradients, calls = [], []
    for checkpointing in (False, True):
        sft = load("ppo/sft.py", GRADIENT_CHECKPOINTING=checkpointing)
        model = sft.load_trained(transformers.AutoModelForCausalLM, tmp_path, None)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5
        count = []
        layer = next(x for x in model.modules() if isinstance(x, sft.GradientCheckpointingLayer))
        layer.get_submodule("mlp.c_fc" if name == "gpt2" else "fc1").register_forward_pre_hook(
            lambda *_: count.append(1)
        )
        sft.answer_logprobs(model, ROWS)[0].sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        calls.append(len(count))
        assert not any(module.training for module in model.modules())
    assert calls == [1, 2] and all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*gradients))
