"""Sampling, scoring and the update agree for the usual families of models, and with transformers' own plain
forward pass of each row."""

import pytest
import torch
import transformers
from conftest import TINY, load, small

ENDS = list(range(60, 70))  # ids at which sampling stops: responses of many lengths
SHAPE = {
    "vocab_size": 82,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": ENDS,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 82, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "eos_token_id": ENDS}
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
}


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """Returns a folder with a random model whose weights are large enough to tell positions apart."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "norm" not in name:
                parameter.mul_(4)
    model.save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(TINY / "policy").save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_sampling_scoring_values_and_the_update_agree_with_a_plain_forward_pass(family, tmp_path):
    options = {"ACTOR_MODEL": family, "REWARD_MODEL": None, "KL_COEF": 0.0, "MAX_NEW_TOKENS": 24}
    options |= {"EVAL_DATASETS": [], "OUTPUT_DIR": str(tmp_path / "run"), "GROUP_SIZE": 2, "TEMPERATURE": 2.0}
    module = load("ppo/ppo.py", **small("ppo/ppo.py", **options))
    trainer = module.PPOTrainer()
    torch.nn.init.normal_(trainer.critic.score.weight)
    trainer.state.step = 1
    batch = trainer.rollout(trainer.next_prompts())  # prompts and responses of different lengths
    assert batch.lengths.min() < batch.lengths.max()
    for row, ids, length, logprobs, values in zip(
        batch.rows, batch.ids, batch.lengths, batch.logprobs, batch.values
    ):
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
