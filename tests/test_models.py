"""How models are loaded, tried and read: whatever their architecture, what samples and what scores are the model's own forward pass."""
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import SMALL, TINY, load_script
from tokenizers.processors import TemplateProcessing
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, DeepseekV2Config, DiffLlamaConfig, GPT2Config, LlamaConfig, OPTConfig,
                          PhimoeConfig)

module = load_script("grpo/grpo.py")
TRAINERS = {"ppo": "PPOTrainer", "grpo": "GRPOTrainer", "rce": "RCETrainer"}


@pytest.fixture
def trainer_of(tmp_path):
    """trainer_of(name, KEY=value, ...): a trainer with small constants, writing below tmp_path."""
    def make(name, **constants):
        small = {key: value for key, value in SMALL.items() if name != "rce" or key != "KL_COEF"}
        script = load_script(f"{name}/{name}.py", **{**small, "OUTPUT_DIR": str(tmp_path / "run"), **constants})
        make.script = script
        return getattr(script, TRAINERS[name])()
    return make


def saved(config, folder, **tokenizer_changes):
    """A random model of a config in a folder, with the tiny policy's tokenizer."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(TINY / "policy")
    for key, value in tokenizer_changes.items():
        setattr(tokenizer, key, value)
    tokenizer.save_pretrained(folder)
    return str(folder)


COMMON = dict(vocab_size=82, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, eos_token_id=1, bos_token_id=None,
              pad_token_id=0, initializer_range=0.4)
LATENT = DeepseekV2Config(**COMMON, num_key_value_heads=4, kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
                          first_k_dense_replace=2)
SPLIT_VALUES = DiffLlamaConfig(**COMMON, num_key_value_heads=2, head_dim=8)


# ---------------------------------------------------------------- sampling

@pytest.mark.parametrize("config", [LATENT, SPLIT_VALUES], ids=["keys", "values"])
def test_a_model_that_changes_what_the_cache_gives_it_is_decoded_without_sharing(config):
    """Latent attention expands the keys, DiffLlama cuts the values; nobody asked check_models() here."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15]]
    ids, lengths, logprobs, _ = module.generate(model, prompts, torch.rand(9, 6), 3, 6, 1.3, torch.tensor([1, 20]), 0)
    assert model.sampled_by == "cached"
    for i in range(9):
        whole, n = prompts[i // 3] + ids[i, :lengths[i]].tolist(), int(lengths[i])
        with torch.no_grad():
            want = (model(torch.tensor([whole])).logits[0, -n - 1:-1] / 1.3).log_softmax(-1)
        torch.testing.assert_close(logprobs[i, :n], want.gather(1, ids[i, :n, None])[:, 0], rtol=1e-4, atol=1e-4)


def test_every_way_to_decode_gives_the_same_samples(trainer_of):
    trainer = trainer_of("grpo")
    assert trainer.actor.sampled_by == "grouped"
    prompts, uniform = [row["ids"] for row in trainer.train_rows[:5]], torch.rand(20, 32)
    found = {}
    for way in ("grouped", "cached", "uncached"):
        trainer.actor.sampled_by = way
        found[way] = module.generate(trainer.actor, prompts, uniform, 4, 32, 1.2, trainer.eos_ids, 0)
    for way in ("cached", "uncached"):
        assert torch.equal(found["grouped"][0], found[way][0]) and torch.equal(found["grouped"][1], found[way][1])
        torch.testing.assert_close(found["grouped"][2], found[way][2], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found["grouped"][3], found[way][3], rtol=1e-4, atol=1e-4)


def test_looking_seldom_who_has_finished_changes_no_sample(trainer_of, monkeypatch):
    trainer = trainer_of("grpo")
    prompts, uniform = [row["ids"] for row in trainer.train_rows[:5]], torch.rand(20, 40)
    often = module.generate(trainer.actor, prompts, uniform, 4, 40, 1.2, trainer.eos_ids, 0)
    monkeypatch.setattr(module, "_LOOK_EVERY", {})  # as on a GPU
    seldom = module.generate(trainer.actor, prompts, uniform, 4, 40, 1.2, trainer.eos_ids, 0)
    assert torch.equal(often[0], seldom[0]) and torch.equal(often[1], seldom[1]) and often[1].min() < often[1].max() - 16
    torch.testing.assert_close(often[2], seldom[2], rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- scoring

def test_packed_and_whole_rows_say_the_same(trainer_of):
    trainer = trainer_of("grpo", GROUP_SIZE=3)
    batch = trainer.rollout(trainer.train_rows[:6])
    rows = torch.tensor([4, 0, 17, 9, 5, 2])
    assert trainer.actor.scored_by == "packed"
    packed = module.response_logprobs(trainer.actor, batch, rows, 0.9)
    trainer.actor.scored_by = "rows"
    whole = module.response_logprobs(trainer.actor, batch, rows, 0.9)
    for a, b in zip(packed, whole):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_window_that_only_the_mask_knows_is_kept_in_a_packed_sequence(tmp_path, trainer_of):
    config = PhimoeConfig(**COMMON, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, sliding_window=6)
    trainer = trainer_of("grpo", ACTOR_MODEL=saved(config, tmp_path / "model"))
    batch = trainer.rollout(trainer.train_rows[:4])
    assert trainer.actor.scored_by == "packed" and batch.prompt_lengths.min() > 12
    logprobs, _ = module.response_logprobs(trainer.actor, batch, torch.arange(8), 1.0)
    torch.testing.assert_close(logprobs, batch.logprobs, rtol=1e-3, atol=1e-3)


def test_a_window_in_the_config_that_no_layer_is_said_to_have_is_not_shared():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**COMMON))
    assert module.shared_windows(model) == [None, None]
    model.config.attention_window = 8
    assert module.shared_windows(model) is None


def test_prompts_are_copied_to_their_rows_exactly_and_with_the_gradient_of_indexing():
    torch.manual_seed(0)
    prompts, which = torch.randn(3, 2, 5, 4, dtype=torch.float64, requires_grad=True), torch.tensor([2, 0, 0, 1, 2])
    weight = torch.randn(5, 2, 5, 4, dtype=torch.float64)
    copied = module.CopyPrompts.apply(prompts, which)
    assert torch.equal(copied, prompts[which])
    gradient, = torch.autograd.grad((copied * weight).sum(), prompts)
    wanted, = torch.autograd.grad((prompts[which] * weight).sum(), prompts)
    torch.testing.assert_close(gradient, wanted)


def test_what_is_not_finite_in_one_prompt_stays_there():
    prompts = torch.zeros(2, 1, 1, 1)
    prompts[0] = torch.inf
    assert module.CopyPrompts.apply(prompts, torch.tensor([1, 0])).flatten().tolist() == [0, torch.inf]


def test_the_masks_rows_begin_where_a_gpus_kernels_want_them():
    batch = SimpleNamespace(prompt_ids=torch.randint(3, 80, (4, 9)), prompt_lengths=torch.full((4,), 9), response_ids=torch.randint(3, 80, (4, 7)),
                            response_lengths=torch.tensor([7, 7, 6, 7]))
    packed = module.Packed(batch, torch.arange(4))
    for number in range(len(packed.blocks)):
        mask = packed.mask_of(number, None, torch.float32)
        assert mask.shape[-1] % 8 and all(stride % 8 == 0 for stride in mask.stride()[:-1])


# ---------------------------------------------------------------- models are tried before they are used

@pytest.mark.parametrize("name", TRAINERS)
def test_trying_the_models_draws_none_of_the_runs_random_numbers(trainer_of, monkeypatch, name):
    trainer = trainer_of(name)
    before = trainer_of.script.get_rng_state()
    weights = [p.clone() for p in trainer.actor.parameters()]
    trainer.check_models()
    after = trainer_of.script.get_rng_state()
    assert torch.equal(before["torch"], after["torch"]) and (before["python"], before["numpy"]) == (after["python"], after["numpy"])
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.actor.parameters()))


def test_a_new_value_head_is_still_zero_after_it_was_tried(trainer_of):
    trainer = trainer_of("ppo")
    assert trainer.critic.scored_by == "packed" and not trainer.critic.score.weight.any()


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_packing_is_wrong_whole_rows_are_read(trainer_of, monkeypatch, name, dtype):
    trainer = trainer_of(name, DTYPE=dtype)
    right = trainer_of.script.Packed.attend
    monkeypatch.setattr(trainer_of.script.Packed, "attend", lambda *a, **b: 0.9 * right(*a, **b))
    trainer.check_models()
    assert trainer.actor.scored_by == "rows" and trainer.actor.sampled_by == "grouped"
    assert name != "ppo" or trainer.critic.scored_by == "rows"  # though its head says 0 to all


@pytest.mark.parametrize("name", TRAINERS)
def test_a_model_that_no_way_reads_right_is_refused_by_name(trainer_of, monkeypatch, name):
    trainer = trainer_of(name)
    for way in ("generate", "response_logits"):
        with monkeypatch.context() as patch:
            right = getattr(trainer_of.script, way)
            patch.setattr(trainer_of.script, way, lambda *a: [x * 0.9 if x.is_floating_point() else x for x in right(*a)])
            with pytest.raises(trainer_of.script.UserError, match="ACTOR_MODEL: a model of the type 'llama' cannot be used here"):
                trainer.check_models()


def test_a_model_that_raises_is_refused_with_what_it_raised(trainer_of, monkeypatch):
    trainer = trainer_of("grpo")
    monkeypatch.setattr(trainer.actor.model, "forward", lambda *a, **b: 1 / 0)
    with pytest.raises(trainer_of.script.UserError, match="'llama' cannot be used here, it raises ZeroDivisionError: division by zero"):
        trainer.check_models()


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_in_bfloat16_a_first_update_that_sees_other_probabilities_ends_the_run(trainer_of, name):
    trainer = trainer_of(name, DTYPE="bfloat16")
    batch = trainer.rollout(trainer.train_rows[:4])
    trainer.score(batch)
    trainer.compute_advantages(batch)
    batch.advantages = batch.advantages + 0.1  # every row teaches
    trainer.check_first_ratio([dict(trainer.optimizer_step(batch, torch.arange(8)))])  # rounding is no mistake
    batch.logprobs = batch.logprobs - 0.2
    with pytest.raises(trainer_of.script.UserError, match="0.2[0-9]* nats a token away from the sampler's: DTYPE = 'bfloat16'"):
        trainer.update(batch)


def test_in_bfloat16_mining_ends_where_greedy_responses_score_otherwise(trainer_of, monkeypatch):
    trainer = trainer_of("rce", DTYPE="bfloat16", BEAMS=0)
    rows = trainer.train_rows[:4]
    assert trainer.mine_part(rows)
    right = trainer.respond
    monkeypatch.setattr(trainer, "respond", lambda *a: [setattr(b, "logprobs", b.logprobs - 0.2) or b for b in [right(*a)]][0])
    with pytest.raises(trainer_of.script.UserError, match="nats a token .*DTYPE = 'bfloat16' does not suit ACTOR_MODEL"):
        trainer.mine_part(rows)


def test_a_resumed_run_reads_its_models_as_it_began(tmp_path, trainer_of):
    trainer = trainer_of("ppo", MAX_STEPS=1)
    trainer.actor.sampled_by, trainer.critic.scored_by = "cached", "rows"
    trainer.train()
    again = trainer_of("ppo", RESUME="yes")
    assert (again.actor.sampled_by, again.actor.scored_by, again.critic.scored_by) == ("cached", "packed", "rows")


# ---------------------------------------------------------------- what a model and its tokenizer bring along

def test_no_dropout_is_left_in_a_config(tmp_path):
    saved(OPTConfig(vocab_size=82, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32, dropout=0.5,
                    attention_dropout=0.5, layerdrop=0.5, max_position_embeddings=128), tmp_path / "opt")
    config = module.load_config(tmp_path / "opt", "ACTOR_MODEL")
    assert (config.dropout, config.attention_dropout, config.layerdrop) == (0, 0, 0)


@pytest.mark.parametrize("name", ["grpo", "rce"])  # OPT has no class for a critic
def test_a_layers_own_dropout_is_off_while_activations_are_recomputed(tmp_path, trainer_of, name):
    config = OPTConfig(vocab_size=82, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32, dropout=0.5,
                       max_position_embeddings=128, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    trainer = trainer_of(name, ACTOR_MODEL=saved(config, tmp_path / "model"), GRADIENT_CHECKPOINTING=True)
    batch = SimpleNamespace(prompt_ids=torch.tensor([[5, 6, 7]]), prompt_lengths=torch.tensor([3]), response_ids=torch.tensor([[8, 9]]),
                            response_lengths=torch.tensor([2]))
    trainer.recompute(True)
    first, second = (trainer_of.script.response_logprobs(trainer.actor, batch, torch.tensor([0]), 1.0)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_pad_id_beyond_the_embedding_is_not_used(tmp_path, trainer_of, name):
    tokenizer = AutoTokenizer.from_pretrained(TINY / "policy")
    tokenizer.add_special_tokens({"pad_token": "<a new pad>"})
    assert tokenizer.pad_token_id == AutoConfig.from_pretrained(TINY / "policy").vocab_size  # nobody resized the model
    shutil.copytree(TINY / "policy", tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    trainer = trainer_of(name, ACTOR_MODEL=str(tmp_path / "model"), **({"MAX_STEPS": 1} if name != "rce" else {"STAGE": "mine", "MINE_PROMPTS": 4}))
    assert trainer.pad_id == tokenizer.eos_token_id
    trainer.train()


def test_ids_that_the_model_does_not_know_are_named(tmp_path, trainer_of):
    tokenizer = AutoTokenizer.from_pretrained(TINY / "policy")
    tokenizer.add_tokens(["apples"])
    shutil.copytree(TINY / "policy", tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(Exception, match="ACTOR_MODEL.*its tokenizer gives the id 82 .*its model knows 82 ids"):
        trainer_of("grpo", ACTOR_MODEL=str(tmp_path / "model"))


def test_a_critic_that_knows_fewer_tokens_is_named(tmp_path, trainer_of):
    critic = saved(LlamaConfig(**{**COMMON, "vocab_size": 60}), tmp_path / "critic")
    with pytest.raises(Exception, match="CRITIC_MODEL.*knows fewer tokens"):
        trainer_of("ppo", CRITIC_MODEL=critic)


def test_a_prompt_does_not_end_with_the_eos_that_its_tokenizer_puts_there(tmp_path, trainer_of):
    shutil.copytree(TINY / "policy", tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").unlink()  # with a template no token is added
    tokenizer = AutoTokenizer.from_pretrained(TINY / "policy")
    tokenizer.chat_template, eos = None, tokenizer.eos_token
    tokenizer._tokenizer.post_processor = TemplateProcessing(single=f"$A {eos}", special_tokens=[(eos, tokenizer.eos_token_id)])
    tokenizer.save_pretrained(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("Tom has").input_ids[-1] == tokenizer.eos_token_id
    trainer = trainer_of("grpo", ACTOR_MODEL=str(tmp_path / "model"))
    assert all(row["ids"] and tokenizer.eos_token_id not in row["ids"] for row in trainer.train_rows)


@pytest.mark.parametrize("constant", ["ACTOR_MODEL", "CRITIC_MODEL", "REFERENCE_MODEL"])
def test_prompts_and_responses_longer_than_a_models_positions_are_refused(tmp_path, trainer_of, constant):
    short = saved(GPT2Config(vocab_size=82, n_positions=60, n_embd=32, n_layer=1, n_head=2, eos_token_id=1, bos_token_id=None), tmp_path / "short")
    with pytest.raises(Exception, match=f"^{constant} reads 60 tokens at most .*TRAIN_DATASETS and MAX_NEW_TOKENS = 32 are [0-9]+: lower"):
        trainer_of("ppo", **{constant: short}, KL_COEF=0.1)
    trainer_of("ppo", **{constant: short}, KL_COEF=0.1, MAX_NEW_TOKENS=8, MAX_PROMPT_TOKENS=52)


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                                  {"rope_type": "longrope", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64,
                                   "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}], ids=["dynamic", "longrope"])
def test_rotary_positions_that_change_with_the_length_are_refused_beyond_it(tmp_path, trainer_of, rope):
    longest = 64 if rope["rope_type"] == "dynamic" else 128
    model = saved(LlamaConfig(**COMMON, max_position_embeddings=longest, rope_parameters=rope), tmp_path / "model")
    with pytest.raises(Exception, match=f"ACTOR_MODEL reads 64 tokens at most .*{rope['rope_type']}"):
        trainer_of("grpo", ACTOR_MODEL=model)
    trainer_of("grpo", ACTOR_MODEL=model, MAX_NEW_TOKENS=8, MAX_PROMPT_TOKENS=50)


def test_a_text_longer_than_the_reward_models_positions_is_refused(tmp_path, trainer_of):
    shutil.copytree(TINY / "reward_model", tmp_path / "reward")
    config = json.loads((tmp_path / "reward/config.json").read_text())
    (tmp_path / "reward/config.json").write_text(json.dumps({**config, "max_position_embeddings": 20}))
    trainer = trainer_of("grpo", REWARD_MODEL=str(tmp_path / "reward"))
    assert trainer.reward_model_score("Tom has 2 apples.", "2").isfinite()
    with pytest.raises(trainer_of.script.UserError, match="REWARD_MODEL.*reads 20 tokens at most"):
        trainer.reward_model_score("Tom has 2 apples. " * 5, "2")


def test_the_reward_model_reads_few_rows_at_a_time_and_keeps_no_cache(trainer_of, monkeypatch):
    trainer = trainer_of("grpo", REWARD_MODEL=str(TINY / "reward_model"), BATCH_SIZE=100, GROUP_SIZE=2)
    sizes, options = [], []
    trainer.reward_model.base_model.register_forward_pre_hook(
        lambda m, a, given: (sizes.append(len(given["input_ids"])), options.append(given["use_cache"]))[2:] or None, with_kwargs=True)
    prompts = [row["prompt"] for row in trainer.train_rows] * 4
    many = trainer.reward_model_score(prompts, ["1"] * len(prompts))
    assert sizes == [64, len(prompts) - 64] and not any(options)
    single = torch.stack([trainer.reward_model_score(prompt, "1") for prompt in prompts[:24]])  # of many lengths
    torch.testing.assert_close(many[:24], single, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- deterministic kernels

class Unordered(torch.autograd.Function):
    """Its backward pass calls a kernel without a deterministic form."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clone().put_(torch.tensor([0]), grad.flatten()[:1].clone())


@pytest.mark.parametrize("name", TRAINERS)
def test_a_device_without_deterministic_kernels_is_named_and_the_run_goes_on(trainer_of, monkeypatch, capsys, name):
    trainer = trainer_of(name)
    batch = SimpleNamespace(prompt_ids=torch.tensor([[5, 6, 7]]), prompt_lengths=torch.tensor([3]), response_ids=torch.tensor([[8, 9]]),
                            response_lengths=torch.tensor([2]))
    assert not trainer.strict  # on a CPU every kernel we use is
    trainer.try_strict_kernels(batch)
    assert trainer.strict and all(p.grad is None for p in trainer.actor.parameters())
    script = trainer_of.script
    monkeypatch.setattr(script, "response_logits", lambda *a: (Unordered.apply(module.response_logits(*a)[0]), None))
    trainer.try_strict_kernels(batch)
    assert not trainer.strict and "a resumed run is not the same to the last bit: put_" in capsys.readouterr().out
    assert torch.is_deterministic_algorithms_warn_only_enabled() and all(p.grad is None for p in trainer.actor.parameters())
    monkeypatch.setattr(script, "response_logits", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.try_strict_kernels(batch)
