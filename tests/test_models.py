"""How models are loaded, tried and read: whatever their architecture, what samples and what scores are the
model's own forward pass."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, TRAINERS, load_script, read, share_prompts, small
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DeepseekV2Config,
    DiffLlamaConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PhimoeConfig,
    RobertaConfig,
)

module = load_script("grpo/grpo.py")
NAMES = [path.split("/")[0] for path in TRAINERS]
SAME = dict(rtol=1e-4, atol=1e-4)  # rounding; a bug is 1e-2 nats or more


@pytest.fixture
def trainer_of(tmp_path):
    """trainer_of(name, KEY=value, ...): a trainer with small constants, writing below tmp_path; its module is
    trainer_of.script."""

    def make(name, **constants):
        path = f"{name}/{name}.py"
        script = load_script(path, **{**small(path, OUTPUT_DIR=str(tmp_path / "run")), **constants})
        make.script = script
        return getattr(script, TRAINERS[path])()

    return make


def saved(config, folder):
    """A random model of a config in a folder, with the tiny policy's tokenizer."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY / "policy").save_pretrained(folder)
    return str(folder)


def policy_with(tokenizer, folder):
    """The tiny policy in a folder, with another tokenizer."""
    shutil.copytree(TINY / "policy", folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def one_row():
    """A batch of one prompt and one response."""
    return module.make_batch([[5, 6, 7]], [[8, 9]], torch.device("cpu"))


def try_models(script, trainer):
    """What the trainer's constructor did with its models, once more."""
    script.check_models(trainer.models_by_constant, trainer.train_rows, trainer.pad_id)


COMMON = dict(
    vocab_size=82,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    eos_token_id=1,
    bos_token_id=None,
    pad_token_id=0,
    initializer_range=0.4,
)
LATENT = DeepseekV2Config(
    **COMMON,
    num_key_value_heads=4,
    kv_lora_rank=8,
    q_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    first_k_dense_replace=2,
)
SPLIT_VALUES = DiffLlamaConfig(**COMMON, num_key_value_heads=2, head_dim=8)
OPT = dict(
    vocab_size=82,
    hidden_size=32,
    ffn_dim=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    word_embed_proj_dim=32,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize("config", [LATENT, SPLIT_VALUES], ids=["keys", "values"])
def test_a_model_that_changes_what_the_cache_gives_it_is_decoded_without_sharing(
    config, tmp_path, trainer_of
):
    """Latent attention expands the keys, DiffLlama cuts the values."""
    torch.manual_seed(0)
    trainer = trainer_of("grpo", ACTOR_MODEL=saved(config, tmp_path / "model"))
    model = trainer.actor
    assert model.config._attn_implementation == "shared_prompts"
    assert model not in trainer_of.script._SHARED_DECODING
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15]]
    ends = torch.tensor([1, 20])
    ids, lengths, logprobs, *_ = module.generate(model, prompts, torch.rand(9, 6), 3, 6, 1.3, ends, 0)
    for i, n in enumerate(lengths.tolist()):
        whole = prompts[i // 3] + ids[i, :n].tolist()
        with torch.no_grad():
            want = (model(torch.tensor([whole])).logits[0, -n - 1 : -1] / 1.3).log_softmax(-1)
        want = want.gather(1, ids[i, :n, None]).squeeze(1)
        torch.testing.assert_close(logprobs[i, :n], want, **SAME)


def test_both_ways_to_decode_give_the_same_samples(trainer_of):
    trainer = trainer_of("grpo")
    assert trainer.actor in trainer_of.script._SHARED_DECODING
    prompts = [row["ids"] for row in trainer.train_rows[:5]]
    uniform = torch.rand(20, 32)
    ends = module.ids_of_ends(trainer.actor, trainer.tokenizer)
    found = []
    for shared in (True, False):
        share_prompts(module, trainer.actor, decoding=shared)
        found.append(module.generate(trainer.actor, prompts, uniform, 4, 32, 1.2, ends, 0))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, **SAME)


def test_looking_seldom_who_has_finished_changes_no_sample(trainer_of, monkeypatch):
    trainer = trainer_of("grpo")
    prompts = [row["ids"] for row in trainer.train_rows[:5]]
    uniform = torch.rand(20, 40)
    ends = module.ids_of_ends(trainer.actor, trainer.tokenizer)
    left = []  # rows, at each token
    step = module.Decoder.next
    monkeypatch.setattr(module.Decoder, "next", lambda *words: (left.append(len(words[1])), step(*words))[1])
    ids, lengths, logprobs, *_ = module.generate(trainer.actor, prompts, uniform, 4, 40, 1.2, ends, 0)
    assert lengths.min() < lengths.max() - 16
    assert all(some <= (lengths > t).sum() / 0.75 for t, some in enumerate(left))  # the others were dropped
    monkeypatch.setattr(module, "_EOS_CHECK_EVERY", {"cpu": 16})  # as on a GPU
    seldom = module.generate(trainer.actor, prompts, uniform, 4, 40, 1.2, ends, 0)
    assert torch.equal(ids, seldom[0])
    assert torch.equal(lengths, seldom[1])
    torch.testing.assert_close(logprobs, seldom[2], **SAME)


# ---------------------------------------------------------------- scoring


def test_groups_and_whole_rows_say_the_same(trainer_of):
    trainer = trainer_of("grpo", GROUP_SIZE=3)
    batch = trainer.rollout(trainer.train_rows[:6])
    rows = [4, 0, 17, 9, 5, 2]
    assert trainer.actor in trainer_of.script._SHARED_SCORING
    share_prompts(module, trainer.actor, scoring=True)
    groups = module.response_logprobs(trainer.actor, batch, rows, 0.9)
    share_prompts(module, trainer.actor, scoring=False)
    whole = module.response_logprobs(trainer.actor, batch, rows, 0.9)
    for a, b in zip(groups, whole):
        torch.testing.assert_close(a, b, **SAME)


def test_a_window_that_only_the_mask_knows_is_kept_in_a_groups_sequence(tmp_path, trainer_of):
    experts = dict(num_local_experts=2, num_experts_per_tok=1)
    config = PhimoeConfig(**COMMON, **experts, num_key_value_heads=2, sliding_window=6)
    trainer = trainer_of("grpo", ACTOR_MODEL=saved(config, tmp_path / "model"))
    batch = trainer.rollout(trainer.train_rows[:4])
    assert trainer.actor in trainer_of.script._SHARED_SCORING
    share_prompts(module, trainer.actor, scoring=True)
    assert min(len(prompt) for prompt, _, _ in batch.sequences) > 12
    logprobs, _ = module.response_logprobs(trainer.actor, batch, torch.arange(8), 1.0)
    torch.testing.assert_close(logprobs, batch.logprobs, rtol=1e-3, atol=1e-3)


def test_a_window_in_the_config_that_no_layer_is_said_to_have_is_not_shared():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**COMMON))
    assert module.attention_windows(model) == {"full_attention": None}
    model.config.attention_window = 8
    assert module.attention_windows(model) == {}


# ---------------------------------------------------------------- models are tried before they are used


@pytest.mark.parametrize("name", NAMES)
def test_trying_the_models_draws_none_of_the_runs_random_numbers(trainer_of, name):
    trainer = trainer_of(name)
    script = trainer_of.script
    before = script.get_rng_state()
    weights = [p.clone() for p in trainer.actor.parameters()]
    try_models(script, trainer)
    assert script.get_rng_state() == before
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.actor.parameters()))


def test_a_new_value_head_is_still_zero_after_it_was_tried(trainer_of):
    trainer = trainer_of("ppo")
    assert trainer.critic in trainer_of.script._SHARED_SCORING
    assert not trainer.critic.score.weight.any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_groups_are_wrong_whole_rows_are_read(trainer_of, monkeypatch, name, dtype):
    trainer = trainer_of(name, DTYPE=dtype)
    script = trainer_of.script
    right = script.logits_of_shared_prompts

    def wrong(*arguments):
        logits, at = right(*arguments)
        return 0.9 * logits, at

    monkeypatch.setattr(script, "logits_of_shared_prompts", wrong)
    try_models(script, trainer)
    assert trainer.actor not in script._SHARED_SCORING
    assert trainer.actor in script._SHARED_DECODING
    assert name != "ppo" or trainer.critic not in script._SHARED_SCORING  # though its head says 0 to all


@pytest.mark.parametrize("way", ["generate", "logits_of_rows"])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_no_way_reads_right_is_refused_by_name(trainer_of, monkeypatch, name, way):
    trainer = trainer_of(name)
    script = trainer_of.script
    right = getattr(script, way)

    def wrong(*arguments):
        return [x * 0.9 if torch.is_tensor(x) and x.is_floating_point() else x for x in right(*arguments)]

    monkeypatch.setattr(script, way, wrong)
    says = "ACTOR_MODEL: a 'llama' model cannot be used here"
    with pytest.raises(script.UserError, match=says):
        try_models(script, trainer)


def test_memory_that_is_too_small_for_the_check_is_not_the_models_fault(trainer_of, monkeypatch):
    def exhausted(*arguments, **options):
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    trainer = trainer_of("grpo")
    monkeypatch.setattr(trainer.actor.model, "forward", exhausted)
    with pytest.raises(torch.OutOfMemoryError) as error:
        try_models(trainer_of.script, trainer)
    assert "MICRO_BATCH_ROWS=1" in trainer_of.script.user_message(error.value)


def test_a_model_that_raises_is_refused_with_what_it_raised(trainer_of, monkeypatch):
    def divide(*arguments, **options):
        return 1 / 0

    trainer = trainer_of("grpo")
    monkeypatch.setattr(trainer.actor.model, "forward", divide)
    says = (
        "'llama' model cannot be used here, it raises ZeroDivisionError: division by zero. It must be causal"
    )
    with pytest.raises(trainer_of.script.UserError, match=says):
        try_models(trainer_of.script, trainer)


def test_bfloat16s_rounding_is_told_from_a_mistake_by_a_positions_mean():
    torch.manual_seed(0)
    wanted = 8 * torch.randn(10, 5000)
    noise = 0.1 * torch.randn(10, 5000)
    noise[3, 7] = 1.5  # more than a tenth of the logits' standard deviation: SmolLM2 has such
    other = torch.where(torch.arange(10)[:, None] == 4, wanted.roll(1, 0), wanted)
    rounded, exact = SimpleNamespace(dtype=torch.bfloat16), SimpleNamespace(dtype=torch.float32)
    assert module.disagreement(rounded, lambda: (wanted + noise, wanted)) == ""
    assert "values" in module.disagreement(exact, lambda: (wanted + noise.eq(1.5) * 0.1, wanted))
    assert "values" in module.disagreement(rounded, lambda: (other, wanted))
    assert "values" in module.disagreement(rounded, lambda: (wanted[0] + noise[3], wanted[0]))


@pytest.mark.parametrize(
    "dtype, has, slower",
    [
        ("bfloat16", {"avx2": True, "avx512_bf16": False, "amx_bf16": False}, True),
        ("bfloat16", {"avx512_bf16": False, "amx_bf16": True}, False),
        ("float32", {"avx2": True}, False),
    ],
)
def test_a_processor_that_is_slower_in_bfloat16_is_said(trainer_of, monkeypatch, dtype, has, slower):
    trainer = trainer_of("grpo", DTYPE=dtype)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    says = trainer_of.script.run_summary(trainer, 1)
    assert f"on cpu, {dtype}" in says and ("slower than float32" in says) == slower


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_in_bfloat16_a_first_update_that_sees_other_probabilities_ends_the_run(trainer_of, name):
    trainer = trainer_of(name, DTYPE="bfloat16", LEARNING_RATE=0.0)
    batch = trainer.rollout(trainer.train_rows[:4])
    trainer.score(batch)
    trainer.compute_advantages(batch)
    batch.advantages = batch.advantages + 0.1  # every row teaches
    trainer.update(batch)  # rounding is no mistake
    says = "a ratio differs from 1 by 0.2[0-9]*: .* DTYPE = 'bfloat16'"
    sampled = batch.logprobs
    up_and_down = 1 - 2 * (torch.arange(sampled.shape[1]) % 2)  # in the mean over a response nearly none
    for signs in (1, up_and_down):
        batch.logprobs = sampled - 0.2 * signs * batch.response_mask
        with pytest.raises(trainer_of.script.UserError, match=says):
            trainer.update(batch)


def test_gspos_rescored_probabilities_do_not_hide_a_wrong_sampler(trainer_of):
    """In bfloat16 gspo takes the update's own log-probabilities for old ones: the guard must not."""
    trainer = trainer_of("grpo", DTYPE="bfloat16", LEARNING_RATE=0.0, LOSS_TYPE="gspo")
    batch = trainer.score(trainer.rollout(trainer.train_rows[:4]))
    trainer.compute_advantages(batch)
    batch.advantages = batch.advantages + 0.1  # every row teaches
    sampled = batch.logprobs
    trainer.update(batch)
    batch.logprobs = sampled - 0.2 * batch.response_mask
    with pytest.raises(trainer_of.script.UserError, match="a ratio differs from 1 by 0.2"):
        trainer.update(batch)


def test_in_bfloat16_mining_ends_where_greedy_responses_score_otherwise(trainer_of, monkeypatch):
    trainer = trainer_of("rce", DTYPE="bfloat16", BEAMS=0)
    script = trainer_of.script
    rows = trainer.train_rows[:4]
    assert trainer.mine_chunk(rows)
    right = script.respond

    def unlikely(*arguments):
        batch = right(*arguments)
        batch.logprobs = batch.logprobs - 0.2
        return batch

    monkeypatch.setattr(script, "respond", unlikely)
    says = "nats per token off what sampling gave them .DTYPE = bfloat16"
    with pytest.raises(script.UserError, match=says):
        trainer.mine_chunk(rows)


# ---------------------------------------------------------------- what a model and its tokenizer bring along


def test_no_dropout_is_left_in_a_config(tmp_path):
    AutoModelForCausalLM.from_config(OPTConfig(**OPT)).save_pretrained(tmp_path / "opt")
    OPTConfig(**OPT, dropout=0.5, attention_dropout=0.5, layerdrop=0.5).save_pretrained(tmp_path / "opt")
    config = module.load_model(AutoModelForCausalLM, tmp_path / "opt", "ACTOR_MODEL", "cpu").config
    assert (config.dropout, config.attention_dropout, config.layerdrop) == (0, 0, 0)


@pytest.mark.parametrize("name", ["grpo", "rce"])  # OPT has no class for a critic
def test_a_layers_own_dropout_is_off_while_activations_are_recomputed(tmp_path, trainer_of, name):
    path = saved(OPTConfig(**OPT, dropout=0.5), tmp_path / "model")
    trainer = trainer_of(name, ACTOR_MODEL=path, GRADIENT_CHECKPOINTING=True)
    script = trainer_of.script
    for _ in script.GradientSum([trainer.actor]).deal([[0]]):
        assert any(layer.training for layer in trainer.actor.modules())
        first, second = (script.response_logprobs(trainer.actor, one_row(), [0], 1.0)[0] for _ in range(2))
    assert not any(layer.training for layer in trainer.actor.modules())
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", NAMES)
def test_a_pad_id_beyond_the_embedding_is_not_used(tmp_path, trainer_of, name):
    tokenizer = AutoTokenizer.from_pretrained(TINY / "policy")
    tokenizer.add_special_tokens({"pad_token": "<a new pad>"})
    # nobody resized the model
    assert tokenizer.pad_token_id == AutoConfig.from_pretrained(TINY / "policy").vocab_size
    path = policy_with(tokenizer, tmp_path / "model")
    short = {"STAGE": "mine", "MINE_PROMPTS": 4} if name == "rce" else {"MAX_STEPS": 1, "EVAL_DATASETS": []}
    trainer = trainer_of(name, ACTOR_MODEL=path, **short)
    assert trainer.pad_id == tokenizer.eos_token_id
    trainer.train()


def test_ids_that_the_model_does_not_know_are_named(tmp_path, trainer_of):
    tokenizer = AutoTokenizer.from_pretrained(TINY / "policy")
    tokenizer.add_tokens(["apples"])
    path = policy_with(tokenizer, tmp_path / "model")
    says = "gives the id 82, but the model has only 82: ACTOR_MODEL = "
    with pytest.raises(Exception, match=says):
        trainer_of("grpo", ACTOR_MODEL=path)


def test_a_critic_that_knows_fewer_tokens_is_named(tmp_path, trainer_of):
    critic = saved(LlamaConfig(**{**COMMON, "vocab_size": 60}), tmp_path / "critic")
    with pytest.raises(Exception, match="CRITIC_MODEL.*must know all tokens"):
        trainer_of("ppo", CRITIC_MODEL=critic)


def test_a_prompt_does_not_end_with_the_eos_that_its_tokenizer_puts_there(tmp_path, trainer_of):
    tokenizer = AutoTokenizer.from_pretrained(TINY / "policy")
    eos = tokenizer.eos_token_id
    special = [(tokenizer.eos_token, eos)]
    template = f"$A {tokenizer.eos_token}"
    tokenizer._tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    tokenizer.chat_template = None  # with one no token is added
    path = policy_with(tokenizer, tmp_path / "model")
    Path(path, "chat_template.jinja").unlink(missing_ok=True)
    assert AutoTokenizer.from_pretrained(path)("Tom has").input_ids[-1] == eos
    trainer = trainer_of("grpo", ACTOR_MODEL=path)
    assert all(row["ids"] and eos not in row["ids"] for row in trainer.train_rows)


@pytest.mark.parametrize("constant", ["ACTOR_MODEL", "CRITIC_MODEL", "REFERENCE_MODEL"])
def test_prompts_and_responses_longer_than_a_models_positions_are_refused(tmp_path, trainer_of, constant):
    sizes = dict(vocab_size=82, n_positions=60, n_embd=32, n_layer=1, n_head=2)
    short = saved(GPT2Config(**sizes, eos_token_id=1, bos_token_id=None), tmp_path / "short")
    needs = "[0-9]+ .TRAIN_DATASETS.: lower"
    with pytest.raises(Exception, match=f"^{constant} reads at most 60 tokens, but .*{needs}"):
        trainer_of("ppo", **{constant: short}, KL_COEF=0.1)
    trainer_of("ppo", **{constant: short}, KL_COEF=0.1, MAX_NEW_TOKENS=8, MAX_PROMPT_TOKENS=52)


ROPES = {  # the longest sequence, and what else the type wants
    "dynamic": (128, dict(original_max_position_embeddings=64)),
    "longrope": (
        128,
        dict(original_max_position_embeddings=64, short_factor=[1.0] * 4, long_factor=[2.0] * 4),
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_positions_that_change_with_the_length_are_refused_beyond_it(tmp_path, trainer_of, kind):
    longest, more = ROPES[kind]
    rope = dict(rope_type=kind, factor=2.0, rope_theta=1e4, **more)
    config = LlamaConfig(**COMMON, max_position_embeddings=longest, rope_parameters=rope)
    model = saved(config, tmp_path / "model")
    with pytest.raises(Exception, match="ACTOR_MODEL reads at most 64 tokens"):
        trainer_of("grpo", ACTOR_MODEL=model)
    trainer_of("grpo", ACTOR_MODEL=model, MAX_NEW_TOKENS=8, MAX_PROMPT_TOKENS=50)


def test_a_text_longer_than_the_reward_models_positions_is_refused(tmp_path, trainer_of):
    shutil.copytree(TINY / "reward_model", tmp_path / "reward")
    config = json.loads((tmp_path / "reward/config.json").read_text())
    (tmp_path / "reward/config.json").write_text(json.dumps({**config, "max_position_embeddings": 20}))
    trainer = trainer_of("grpo", REWARD_MODEL=str(tmp_path / "reward"))
    assert trainer.reward_model_score("Tom has 2 apples.", "2").isfinite()
    with pytest.raises(trainer_of.script.UserError, match="REWARD_MODEL.*reads at most 20 tokens"):
        trainer.reward_model_score("Tom has 2 apples. " * 5, "2")


def test_the_reward_model_reads_few_rows_at_a_time_and_keeps_no_cache(trainer_of, monkeypatch):
    trainer = trainer_of("grpo", REWARD_MODEL=str(TINY / "reward_model"), BATCH_SIZE=100, GROUP_SIZE=2)
    calls = []

    def keep_call(model, arguments, options):
        calls.append((len(options["input_ids"]), options["use_cache"]))

    trainer.reward_model.base_model.register_forward_pre_hook(keep_call, with_kwargs=True)
    prompts = [row["prompt"] for row in trainer.train_rows] * 4
    many = trainer.reward_model_score(prompts, ["1"] * len(prompts))
    assert calls == [(64, False), (len(prompts) - 64, False)]
    single = [trainer.reward_model_score(prompt, "1") for prompt in prompts[:24]]  # of many lengths
    torch.testing.assert_close(many[:24], torch.stack(single), **SAME)


# ---------------------------------------------------------------- deterministic kernels


class Unordered(torch.autograd.Function):
    """Its backward pass calls a kernel without a deterministic form."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clone().put_(torch.tensor([0]), grad.flatten()[:1].clone())


@pytest.mark.parametrize("exact", [True, False])
def test_on_a_gpu_a_sum_without_an_order_is_refused_unless_the_constant_allows_it(monkeypatch, exact):
    monkeypatch.setattr(module, "DETERMINISTIC_GRADIENTS", exact)
    gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    x = torch.ones(3, requires_grad=True)
    loss = Unordered.apply(x).sum()
    if exact:
        with pytest.raises(
            module.UserError, match="DETERMINISTIC_GRADIENTS = True: put_ does not .*: set it to False"
        ):
            module.GradientSum([]).backward(gpu, loss)
    else:
        module.GradientSum([]).backward(gpu, loss)
        assert x.grad is not None
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    with pytest.raises(RuntimeError, match="does not require grad"):  # another reason stays what it is
        module.GradientSum([]).backward(gpu, torch.ones(()))


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_a_token_that_leaves_the_nucleus_in_a_later_pass_has_ratio_0_and_finite_metrics(
    trainer_of, monkeypatch, name
):
    trainer = trainer_of(name, KL_COEF=0.1)
    script = trainer_of.script
    batch = trainer.rollout(trainer.train_rows[:4])
    trainer.score(batch)
    trainer.compute_advantages(batch)
    batch.advantages = batch.advantages + 0.1  # every row teaches
    common = batch.response_ids[batch.response_mask > 0].mode().values
    plain = script.sampling_logprobs

    def without(logits, temperature):
        return plain(logits, temperature).index_fill(-1, common, -torch.inf)

    monkeypatch.setattr(script, "sampling_logprobs", without)
    check = script.check_first_ratio
    apart = []  # in the mean of tokens, which bfloat16 is judged by

    def spy(metrics, step):
        apart.append(metrics["mean_abs_log_ratio"])
        check(metrics, step)

    monkeypatch.setattr(script, "check_first_ratio", spy)
    trainer.run.step = 2
    metrics = trainer.update(batch)
    assert metrics["max_ratio_deviation"] == 1 and 0 < apart[0] < 20
    assert 0 < metrics["approx_kl"] < 20 and abs(metrics["kl"]) < 20
    assert 0 < metrics["grad_norm"] < math.inf
    trainer.run.step = 1
    with pytest.raises(script.UserError, match=r"a ratio differs from 1 by \S{1,5}: ACTOR_MODEL"):
        trainer.update(batch)


def test_a_lost_tokens_kl_is_finite_and_has_no_gradient():
    logprobs = torch.tensor([-1e30, -1.0], requires_grad=True)
    for estimator in ("k1", "k2", "k3"):
        loss = module.kl_loss(logprobs, torch.tensor([-2.0, -1.5]), estimator)
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert loss[0] == 0 and loss[1] > 0 and gradient.tolist() == [0.0, 0.5]


@pytest.mark.parametrize("name", [pytest.param("banned", marks=pytest.mark.sweep), "top_p"])
def test_an_edit_of_the_sampling_distribution_passes_the_check_at_load_and_trains(name, grpo):
    script = grpo(MAX_STEPS=1, KL_COEF=0.05, ENTROPY_COEF=0.01)
    plain = script.sampling_logprobs

    def banned(logits, temperature):
        logits = logits.float().clone()
        logits[..., 20] = -torch.inf
        return plain(logits, temperature)

    def top_p(logits, temperature):
        logprobs = plain(logits, temperature)
        ordered, order = logprobs.sort(-1, descending=True)
        cut = ordered.exp().cumsum(-1) - ordered.exp() > 0.95
        return plain(logprobs.masked_fill(cut.gather(-1, order.argsort(-1)), -torch.inf), 1)

    script.sampling_logprobs = {"banned": banned, "top_p": top_p}[name]
    trainer = script.GRPOTrainer()
    batch = trainer.score(trainer.rollout(trainer.train_rows[:4]))
    gained = (batch.logprobs - batch.ref_logprobs)[batch.response_mask > 0]
    # a reference of the same weights is scored whole: what the cut took, the sampled tokens have gained
    assert gained.min() > -1e-3 and gained.max() < 100
    assert name == "banned" or gained.max() > 1e-3  # this policy hardly ever says 20
    trainer.train()
    assert trainer.run.step == 1
    record = read(Path(script.OUTPUT_DIR) / "logs/metrics.jsonl")[1]
    assert record["grad_norm"] > 0 and record["entropy"] > 0
    assert name != "banned" or not (batch.response_ids[batch.response_mask > 0] == 20).any()


def test_positions_that_begin_after_the_padding_id_are_not_promised():
    """RoBERTa's table has 20 rows here, of which a text can use 18; BERT's has 20."""
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    module = load_script("ppo/ppo.py")
    for config_class, bound in ((RobertaConfig, 18), (BertConfig, 20)):
        config = config_class(**sizes, max_position_embeddings=20, num_labels=1)
        model = AutoModelForSequenceClassification.from_config(config).eval()
        assert module.max_positions(model) == bound
        assert model(torch.full((1, bound), 5)).logits.shape == (1, 1)
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, bound + 1), 5))
