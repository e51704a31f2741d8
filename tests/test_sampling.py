"""What is sampled, where it ends, and that the update reads the very same tokens."""

import json
import shutil

import pytest
import torch
import transformers
from conftest import TINY, load

PATHS = ["ppo/ppo.py", "grpo/grpo.py"]


def copied_policy(folder, generation=None, **tokenizer):
    """Returns a copy of the tiny policy whose settings are changed."""
    shutil.copytree(TINY / "policy", folder)
    for name, changes in {"generation_config": generation or {}, "tokenizer_config": tokenizer}.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return str(folder)


def test_sample_tokens_inverts_the_cumulative_distribution():
    grpo = load("grpo/grpo.py")
    probabilities = torch.tensor([[0.2, 0.0, 0.3, 0.5]] * 5)
    uniform = torch.tensor([0.0, 0.19999, 0.2001, 0.5001, 0.99999994])
    assert grpo.sample_tokens(probabilities, uniform).tolist() == [0, 0, 2, 3, 3]


def test_greedy_responses_are_those_of_generate(make):
    trainer = make("grpo/grpo.py", MAX_NEW_TOKENS=24)
    batch = trainer.respond(trainer.eval_rows, None)
    for row, ids in zip(trainer.eval_rows, batch.response_ids):
        prompt = torch.tensor([row["ids"]])
        options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": trainer.end_ids}
        want = trainer.actor.generate(prompt, **options)
        assert ids == want[0, prompt.shape[1] :].tolist()
    assert trainer.generate_response(trainer.eval_rows[0]["prompt"]) == batch.texts[0]


@pytest.mark.parametrize("path", PATHS)
def test_the_mask_holds_the_first_end_and_nothing_after_it(make, path):
    trainer = make(path)
    module = trainer.module
    end, x = trainer.end_ids[0], 40
    ids = torch.tensor([[x, end, x, end], [end, x, x, x], [x, x, x, x], [x, x, x, end]])
    module.MAX_NEW_TOKENS = 4
    module.generate = lambda *arguments: (ids, torch.full((4, 4), -1.0), torch.ones(4, 4))
    batch = trainer.respond(trainer.train_rows[:4], torch.zeros(4, 4))
    assert batch.mask.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert batch.lengths.tolist() == [2, 1, 4, 4]
    assert batch.truncated.tolist() == [False, False, True, False]
    assert batch.response_ids == [[x, end], [end], [x] * 4, [x, x, x, end]]
    assert batch.texts == [trainer.tokenizer.decode([x] * n) for n in (1, 0, 4, 3)]
    assert batch.logprobs.tolist() == (-batch.mask).tolist()


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 0.03)])
def test_long_responses_are_sampled_by_what_the_update_reads(make, dtype, tolerance):
    trainer = make("grpo/grpo.py", MAX_NEW_TOKENS=150, DTYPE=dtype)  # the cache gets room beyond 256
    numbers = torch.randint(9, 60, (8, 250), generator=torch.Generator().manual_seed(4))
    rows = [{**trainer.train_rows[0], "ids": ids[: 180 + 10 * i]} for i, ids in enumerate(numbers.tolist())]
    batch = trainer.respond(rows, torch.rand(8, 150, generator=torch.Generator().manual_seed(5)))
    assert batch.lengths.max() > 120 and batch.lengths.min() < 100
    assert (trainer.module.all_logprobs(trainer.actor, batch) - batch.logprobs).abs().mean() < tolerance


@pytest.mark.parametrize("labels", [1, 2])
def test_an_encoder_with_one_label_can_be_the_reward_model(make, tmp_path, labels):
    encoder = str(tmp_path / "encoder")
    transformers.AutoTokenizer.from_pretrained(TINY / "policy").save_pretrained(encoder)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=82, num_labels=labels, pad_token_id=0, **size)
    transformers.BertForSequenceClassification(config).save_pretrained(encoder)
    if labels == 2:
        with pytest.raises(ValueError, match="must have one label"):
            make("grpo/grpo.py", REWARD_MODEL=encoder)
        return
    trainer = make("grpo/grpo.py", REWARD_MODEL=encoder, MICRO_BATCH_ROWS=1)
    assert trainer.reward_model_score([], []).shape == (0,)
    scores = trainer.reward_model_score(["What is 1 + 1?", "What is 2 + 3?"], ["2", "Two and three are 5."])
    alone = trainer.reward_model_score(["What is 1 + 1?"], ["2"])
    assert scores[0].item() == pytest.approx(alone.item(), abs=1e-5)


def test_the_end_token_is_trained(make):
    """The gradient at the end is not 0: with the mask one token short, a policy never learns to stop."""
    trainer = make("grpo/grpo.py")
    batch = trainer.rollout(trainer.train_rows[:4])
    row = int(batch.lengths.argmin())
    logprobs, _ = trainer.module.logprobs_and_entropy(trainer.actor, batch, torch.tensor([row]))
    assert not batch.truncated[row] and logprobs.shape[1] == batch.lengths[row]
    assert batch.ids[row, logprobs.shape[1] - 1].item() in trainer.end_ids
    logprobs[0, -1].backward()
    assert trainer.actor.lm_head.weight.grad.abs().sum() > 0


def test_gradient_checkpointing_gives_the_same_gradient_without_dropout(make, tmp_path):
    policy = copied_policy(tmp_path / "policy")
    config = tmp_path / "policy/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attention_dropout": 0.5}))
    gradients = []
    for checkpointing in (False, True):
        trainer = make("grpo/grpo.py", ACTOR_MODEL=policy, GRADIENT_CHECKPOINTING=checkpointing)
        trainer.seed_step()
        batch = trainer.rollout(trainer.train_rows[:2])
        logprobs, _ = trainer.module.logprobs_and_entropy(trainer.actor, batch, torch.arange(8))
        (logprobs * batch.mask[:, : logprobs.shape[1]]).sum().backward()
        gradients.append([p.grad for p in trainer.actor.parameters()])
        assert not any(module.training for module in trainer.actor.modules())
    assert all(torch.allclose(a, b, atol=1e-3, rtol=1e-3) for a, b in zip(*gradients))


def test_the_cache_is_bfloat16_where_the_model_computes_in_bfloat16(make):
    trainer = make("grpo/grpo.py", DTYPE="bfloat16")
    with torch.no_grad():
        decoder = trainer.module.Decoder(trainer.actor, [row["ids"] for row in trainer.train_rows[:2]])
    assert {layer.keys.dtype for layer in decoder.cache.layers} == {torch.bfloat16}
    assert decoder.logits.dtype == torch.float32  # of a head that is not rounded
    assert {p.dtype for p in trainer.actor.parameters()} == {torch.float32}


def test_each_distinct_prompt_is_read_once_for_all_its_rows(make):
    trainer = make("grpo/grpo.py")
    sizes = []
    embeddings = trainer.actor.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda module, inputs: sizes.append(tuple(inputs[0].shape)))
    rows = [row for row in trainer.train_rows[:3] for _ in range(4)]
    trainer.respond(rows, torch.rand(12, 32))
    assert sizes[0] == (3, max(len(row["ids"]) for row in rows)) and sizes[1] == (12, 1)


def test_a_cache_that_is_fixed_gives_the_samples_of_one_that_grows(make):
    """In blocks that are filled more than once, with rows that end; prompts of one and of several lengths."""
    trainer = make("grpo/grpo.py", MAX_NEW_TOKENS=40)
    uniform = torch.rand(12, 40, generator=torch.Generator().manual_seed(6))
    for rows in (trainer.train_rows[:6], trainer.train_rows[:1]):
        prompts = [row["ids"] for row in rows for _ in range(12 // len(rows))]
        results = []
        for attention, block in (("sdpa", 16), ("sdpa", 128), ("eager", 128)):  # eager: it grows
            trainer.module.DECODE_BLOCK = block
            trainer.actor.set_attn_implementation(attention)
            results.append(trainer.module.generate(trainer.actor, prompts, uniform, trainer.end_ids))
            is_fixed = trainer.module.Decoder(trainer.actor, prompts).cache.place is not None
            assert is_fixed == (attention == "sdpa")
        (ids, *others), *more = results
        is_end = torch.isin(ids, torch.tensor(trainer.end_ids)).long()
        mask = is_end.cumsum(1) - is_end == 0
        for other_ids, *values in more:
            same = ((ids == other_ids) | ~mask).all(1)
            assert same.all()
            assert all(((a - b) * mask).abs().max() < 1e-4 for a, b in zip(others, values))


class Casts(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts casts of float32 matrices to bfloat16."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            self.sizes += [result.numel()] if args[0].data_ptr() in self.weights else []
        return result


@pytest.mark.parametrize("rank", [0, 4])
def test_no_weight_is_cast_again_at_each_token(make, rank):
    trainer = make("grpo/grpo.py", DTYPE="bfloat16", LORA_RANK=rank, MAX_NEW_TOKENS=4)
    count = Casts()
    count.weights, count.sizes = {p.data_ptr() for p in trainer.actor.parameters()}, []
    with count:
        trainer.respond(trainer.train_rows[:2], torch.rand(2, 4))
    trained = [p for p in trainer.actor.parameters() if p.requires_grad and p.dim() == 2]
    assert 0 < len(count.sizes) <= len(trained)


def test_frozen_linear_layers_are_stored_as_autocast_would_cast_them(make):
    """The same bits, in half the memory; what is trained stays float32, and a merged adapter is float32."""
    trainer = make("grpo/grpo.py", DTYPE="bfloat16", KL_COEF=0.1, REFERENCE_MODEL=str(TINY / "policy"))
    batch = trainer.rollout(trainer.train_rows[:2])
    layers = [m for m in trainer.reference.modules() if isinstance(m, torch.nn.Linear)]
    assert [m.weight.dtype for m in layers].count(torch.bfloat16) == len(layers) - 1  # not the head
    assert torch.equal(trainer.module.all_logprobs(trainer.actor, batch), batch.ref_logprobs)
    lora = make("grpo/grpo.py", DTYPE="bfloat16", LORA_RANK=4, KL_COEF=0.1, MAX_STEPS=1)
    assert {p.dtype for p in lora.actor.parameters() if p.requires_grad} == {torch.float32}
    lora.train()
    saved = transformers.AutoModelForCausalLM.from_pretrained(lora.run.folder / "best/policy", dtype="auto")
    assert saved.dtype == torch.float32


def test_logits_are_held_for_a_chunk_of_tokens_and_computed_again(make):
    trainer = make("grpo/grpo.py", ENTROPY_COEF=0.1)
    trainer.seed_step()
    batch = trainer.rollout(trainer.train_rows[:2])
    results = []
    for size in (10_000, 7):
        trainer.module.LOGIT_CHUNK = size
        kept, sizes = [], []
        hook = trainer.actor.lm_head.register_forward_hook(lambda m, i, x: sizes.append(x.shape[1]))
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
            pair = trainer.module.logprobs_and_entropy(trainer.actor, batch, torch.arange(8))
        assert not any(shape[-1:] == (82,) for shape in kept) and max(sizes) <= size
        (pair[0].sum() - pair[1].sum()).backward()
        assert sum(sizes) == 2 * batch.lengths.sum()
        hook.remove()
        results.append([*pair, *(p.grad.clone() for p in trainer.actor.parameters())])
        trainer.actor.zero_grad()
    assert all(torch.allclose(a, b, atol=1e-4, rtol=1e-4) for a, b in zip(*results))


def test_all_layers_keep_one_mask_of_attention_for_the_backward_pass(make):
    trainer = make("grpo/grpo.py")
    trainer.seed_step()
    batch = trainer.rollout(trainer.train_rows[:2])
    width = max(len(row["ids"]) for row in batch.rows) + int(batch.lengths.max()) - 1
    masks = []

    def keep(x):
        if x.shape[-1] == width and x.shape[-2] == batch.lengths.max() - 1:
            masks.append(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        trainer.module.logprobs_and_entropy(trainer.actor, batch, torch.arange(len(batch.rows)))
    assert len(masks) == 4 and len(set(masks)) == 1  # of 4 layers


# ---------------------------------------------------------------- where a response ends


def test_the_token_by_which_the_template_ends_a_turn_ends_a_response(make, tmp_path):
    """A base model with a chat template: its EOS is another token than the one that ends a turn. So do all
    ends of the generation config."""
    folder = copied_policy(tmp_path / "policy", {"eos_token_id": [3, 0]}, eos_token="<pad>")
    template = tmp_path / "policy/chat_template.jinja"
    template.write_text(template.read_text().replace("eos_token", "'<eos>'"))
    trainer = make("grpo/grpo.py", ACTOR_MODEL=folder)
    assert trainer.end_ids == [1, 0, 3]  # the turn's end comes first
    batch = trainer.rollout(trainer.train_rows[:4])
    assert batch.truncated.float().mean() < 0.5
    trainer.run.open(trainer.state, False)
    trainer.save_best()
    saved = json.loads((trainer.run.folder / "best/policy/generation_config.json").read_text())
    assert saved["eos_token_id"] == [1, 0, 3]


def test_token_ids_without_an_embedding_or_no_end_are_refused(make, tmp_path):
    """At the start for the end and the prompts, in the reward model before it reads."""
    folder = copied_policy(tmp_path / "policy", {"eos_token_id": 82})
    with pytest.raises(ValueError, match="policy has 82 embeddings"):
        make("grpo/grpo.py", ACTOR_MODEL=folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY / "reward_model")
    shutil.copytree(TINY / "reward_model", tmp_path / "reward_model")
    tokenizer.add_tokens(["Response"])
    tokenizer.save_pretrained(tmp_path / "reward_model")
    trainer = make("grpo/grpo.py", REWARD_MODEL=str(tmp_path / "reward_model"))
    with pytest.raises(ValueError, match="reward_model has 82 embeddings"):
        trainer.reward_model_score(["x"], ["Response"])
    folder = copied_policy(tmp_path / "endless", {"eos_token_id": None}, eos_token=None)
    (tmp_path / "endless/chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no EOS token"):
        make("grpo/grpo.py", ACTOR_MODEL=folder)


def test_rewards_see_special_tokens_but_not_the_end(make, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY / "policy")
    special = tokenizer.convert_ids_to_tokens(41)
    folder = copied_policy(tmp_path / "policy", extra_special_tokens=[special])
    trainer = make("grpo/grpo.py", ACTOR_MODEL=folder)
    assert special in trainer.tokenizer.all_special_tokens
    ids = torch.full((1, 32), 40)
    ids[0, 1], ids[0, 2] = 41, trainer.end_ids[0]
    trainer.module.generate = lambda *arguments: (ids, torch.zeros(1, 32), torch.zeros(1, 32))
    batch = trainer.respond(trainer.train_rows[:1], torch.zeros(1, 32))
    assert special in batch.texts[0] and "eos" not in batch.texts[0]


# ---------------------------------------------------------------- micro-batches


def test_micro_batches_take_the_longest_rows_first(make):
    trainer = make("grpo/grpo.py", GROUP_SIZE=2)
    batch = trainer.rollout(trainer.train_rows[:6])
    chunks = trainer.module.micro_batches(batch, torch.arange(12), 5)
    assert [len(chunk) for chunk in chunks] == [5, 5, 2]
    assert sorted(i for chunk in chunks for i in chunk.tolist()) == list(range(12))
    longest = [batch.lengths[chunk].max().item() for chunk in chunks]
    assert longest == sorted(longest, reverse=True)
