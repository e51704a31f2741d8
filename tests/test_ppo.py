"""PPO's maths, its conventions on tensors and the classic bugs of DESIGN.md section 10, each imported from
ppo/ppo.py."""

import copy
import itertools
import json
import math
import re
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import NATS, ROOT, TINY, distance, load_script, reward_batch, share_prompts, small
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

import rewards

module = load_script("ppo/ppo.py")


def make_batch(prompts, responses, extra=0, pad=0):
    """A batch of hand-made ids; extra columns of padding change nothing that matters."""
    batch = module.make_batch(prompts, responses, torch.device("cpu"))
    batch.response_ids = torch.nn.functional.pad(module.pad_right(responses, pad), (0, extra), value=pad)
    batch.response_mask = torch.nn.functional.pad(batch.response_mask, (0, extra))
    batch.rows = [{"id": str(i)} for i in range(len(prompts))]
    return batch


class Script:
    """A Scripted model's cache: which script each row follows, and how many tokens of it were said."""

    def __init__(self, who):
        self.who = who
        self.said = 0

    def reorder_cache(self, rows):
        self.who = [self.who[i] for i in rows]


class Scripted(torch.nn.Module):
    """A model that says given ids whatever it sees; one script a prompt, found by the prompt's last id."""

    device = torch.device("cpu")

    def __init__(self, scripts, vocabulary=10):
        super().__init__()
        self.scripts = scripts
        self.vocabulary = vocabulary

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None, **_):
        cache = past_key_values or Script(input_ids[:, -1].tolist())
        tokens = torch.tensor([self.scripts[w][cache.said] for w in cache.who])
        cache.said += 1
        logits = torch.nn.functional.one_hot(tokens, self.vocabulary).float()[:, None] * 50
        return SimpleNamespace(logits=logits, past_key_values=cache)


def copies(model):
    return [p.detach().clone() for p in model.parameters()]


def flat_weights(model):
    """All weights as one vector, a copy."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def scored_batch(trainer, count=8):
    torch.manual_seed(5)
    batch = trainer.rollout(trainer.train_rows[:count])
    trainer.score(batch)
    trainer.compute_advantages(batch)
    return batch


def every_row(batch):
    return list(range(len(batch.rows)))


def gradients(trainer, batch):
    """Gradients of actor and critic at the moment the optimizers would step."""
    found = []

    def keep_gradient(model):
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))

    for name, model in trainer.models.items():
        trainer.optimizers[name].step = partial(keep_gradient, model)
    metrics = trainer.optimizer_step(batch, every_row(batch))
    return torch.cat(found), metrics


# ---------------------------------------------------------------- the maths, by hand


def test_gae_of_three_tokens_by_hand():
    rewarded = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    values = torch.tensor([[0.5, 0.4, 0.2]], dtype=torch.float64)
    mask = torch.ones(1, 3)
    d = [0.9 * 0.4 - 0.5, 0.9 * 0.2 - 0.4, 1 - 0.2]  # V after the last token is 0
    want = [d[0] + 0.72 * (d[1] + 0.72 * d[2]), d[1] + 0.72 * d[2], d[2]]
    assert module.gae(rewarded, values, mask, 0.9, 0.8)[0].tolist() == pytest.approx(want)


def test_gae_of_unequal_lengths_equals_each_row_alone():
    torch.manual_seed(0)
    rewarded, values = torch.randn(2, 3, 5, dtype=torch.float64)
    lengths = [5, 2, 3]
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).float()
    together = module.gae(rewarded, values, mask, 0.99, 0.9)
    for i, n in enumerate(lengths):
        alone = module.gae(rewarded[i : i + 1, :n], values[i : i + 1, :n], torch.ones(1, n), 0.99, 0.9)
        assert torch.allclose(together[i, :n], alone[0])
        assert (together[i, n:] == 0).all()


def test_with_lambda_and_gamma_one_the_return_is_the_sum_of_rewards_to_come():
    rewarded = torch.tensor([[1.0, 2.0, 3.0]]).double()
    values = torch.randn(1, 3, dtype=torch.float64)
    returns = module.gae(rewarded, values, torch.ones(1, 3), 1, 1) + values
    assert returns[0].tolist() == pytest.approx([6, 5, 3])


def test_the_score_is_added_once_at_the_last_token_and_kl_everywhere():
    mask = torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    scores = torch.tensor([5.0, 7.0])
    got = module.per_token_rewards(scores, -1.0 * mask, -3.0 * mask, mask, 0.1)
    assert torch.allclose(got, torch.tensor([[-0.2, -0.2, 4.8], [6.8, 0, 0]]))


@pytest.mark.parametrize(
    "advantage, ratio, loss, gradient",
    [  # gradient with respect to log pi: -ratio * A, or 0 where clipped
        (1, 0.5, -0.5, True),
        (1, 0.9, -0.9, True),
        (1, 1.25, -1.25, True),  # below the upper bound, which is its own
        (1, 1.5, -1.3, False),
        (-1, 0.75, 0.8, False),
        (-1, 0.9, 0.9, True),
        (-1, 1.1, 1.1, True),
        (-1, 1.5, 1.5, True),
        (-1, 3.5, 3.0, False),  # the dual clip
        (1, 3.5, -1.3, False),
    ],
)
def test_policy_clip(advantage, ratio, loss, gradient):
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    got = module.policy_loss(logprobs, torch.zeros(1), torch.tensor([float(advantage)]), 0.2, 0.3, 3.0)
    got.sum().backward()
    assert got.item() == pytest.approx(loss)
    assert logprobs.grad.item() == pytest.approx(-advantage * ratio if gradient else 0.0)


@pytest.mark.parametrize(
    "value, old, target, clip, loss",
    [
        (0.5, 0.0, 1.0, 0.2, 0.5 * 0.8**2),  # clipped around the rollout's value, not around the return
        (0.1, 0.0, 1.0, 0.2, 0.5 * 0.9**2),
        (0.5, 0.0, 0.5, 0.2, 0.5 * 0.3**2),
        (2.0, 0.0, 0.0, 0.2, 2.0),
        (0.5, 0.0, 1.0, 0.0, 0.5 * 0.25),
    ],
)
def test_value_clip(value, old, target, clip, loss):
    numbers = torch.tensor([[value], [old], [target]], dtype=torch.float64)
    assert module.value_loss(*numbers, clip).item() == pytest.approx(loss)


def test_whitening_by_hand_and_blind_to_padding():
    x = torch.tensor([[1.0, 3.0], [5.0, 99.0]]).double()
    mask = torch.tensor([[1.0, 1], [1, 0]])
    got = module.whiten(x, mask)
    want = torch.tensor([[-2, 0], [2, 0]]).double() / math.sqrt(8 / 3)
    assert torch.allclose(got, want, rtol=1e-7)  # whiten() adds 1e-8 to the variance
    wide = torch.cat([x, torch.full((2, 3), 7.0)], 1)
    padded = module.whiten(wide, torch.cat([mask, torch.zeros(2, 3)], 1))
    assert torch.allclose(padded[:, :2], got)
    assert (padded[:, 2:] == 0).all()
    assert (module.whiten(torch.ones(2, 2), mask) == 0).all()  # equal advantages: zeros, not NaN


def test_kl_controller():
    assert module.adapt_kl_coef(0.1, 0.3, 0.1, 100, 1000) == pytest.approx(0.1 * 1.02)  # error clipped at 0.2
    assert module.adapt_kl_coef(0.1, 0.09, 0.1, 100, 1000) == pytest.approx(0.1 * 0.99)


def test_learning_rate_schedules():
    scale = module.learning_rate_scale
    assert [scale(s, 10, 4, None, 0) for s in (0, 1, 3, 4, 9)] == [0.25, 0.5, 1, 1, 1]
    assert [scale(s, 12, 2, "linear", 0) for s in (2, 7, 12)] == [1, 0.5, 0]
    assert [scale(s, 12, 2, "cosine", 0) for s in (2, 7, 12)] == pytest.approx([1, 0.5, 0])
    assert scale(5, 10, 0, "plateau", 3) == 0.125


# ---------------------------------------------------------------- sampling


def test_sampling_follows_the_distribution_and_never_takes_the_impossible():
    logprobs = torch.tensor([0.5, 0.0, 0.3, 0.2, 0.0]).log()
    uniform = (torch.arange(10000) + 0.5) / 10000
    counts = torch.bincount(module.sample_tokens(logprobs.exp().expand(10000, 5), uniform), minlength=5)
    assert counts.tolist() == [5000, 0, 3000, 2000, 0]
    edge = module.sample_tokens(logprobs.exp().expand(2, 5), torch.tensor([0.0, 1 - 2**-24]))
    assert edge.tolist() == [0, 3]


def test_a_token_beyond_the_likeliest_few_is_sampled_too():
    shares = torch.tensor([1, 300, 200, 100, 90, 85, 84, 70, 50, 20]) / 1000

    def says(input_ids, **_):
        return SimpleNamespace(logits=shares.log().expand(len(input_ids), 1, 10), past_key_values=Script([0]))

    model = Scripted({})
    model.forward = says
    uniform = (torch.arange(1000)[:, None] + 0.5) / 1000
    ids, *_ = module.generate(model, [[1]], uniform, 1000, 1, 1.0, torch.tensor([9]), 0)
    counts = torch.bincount(ids.flatten(), minlength=10)
    assert (counts - 1000 * shares).abs().max() <= 1  # a sample on the edge of two tokens may fall to either


@pytest.mark.parametrize("pad", [0, 9])  # 9 is also EOS
def test_a_response_ends_with_its_first_eos_and_holds_nothing_after_it(pad):
    model = Scripted({1: [3, 9, 4, 4], 2: [9, 9, 9, 9], 3: [4, 5, 6, 7], 4: [5, 5, 5, 9]})
    prompts = [[5, 1], [2], [3], [4]]
    uniform = torch.full((8, 4), 0.5)
    ids, lengths, logprobs, *_ = module.generate(model, prompts, uniform, 2, 4, 1.0, torch.tensor([9]), pad)
    assert lengths.tolist() == [2, 2, 1, 1, 4, 4, 4, 4]
    want = [[3, 9], [9], [4, 5, 6, 7], [5, 5, 5, 9]]  # the third is cut and has no EOS
    assert ids.tolist() == [row + [pad] * (4 - len(row)) for row in want for _ in range(2)]
    assert all((logprobs[i, n:] == 0).all() for i, n in enumerate(lengths))


def test_the_mask_covers_every_sampled_token_and_the_first_eos(ppo, monkeypatch):
    script = ppo(BATCH_SIZE=2)
    trainer = script.PPOTrainer()
    eos = trainer.tokenizer.eos_token_id

    def generate(*_):
        ids = torch.tensor([[5, eos, 0, 0], [5, 6, 7, 8], [eos, 0, 0, 0]])
        return ids, torch.tensor([2, 4, 1]), torch.zeros(3, 4)

    monkeypatch.setattr(script, "generate", generate)
    batch = script.respond(trainer.actor, trainer.tokenizer, [[1], [2]], None)
    assert batch.response_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert batch.truncated.tolist() == [False, True, False]


@pytest.mark.parametrize("shared", [True, False])  # groups and whole rows
def test_eos_is_trained_even_where_it_is_also_the_pad(ppo, shared):
    script = ppo(BATCH_SIZE=2)
    trainer = script.PPOTrainer()
    share_prompts(script, trainer.actor, scoring=shared)
    eos = trainer.tokenizer.eos_token_id
    batch = make_batch([[5, 6], [7]], [[8, eos], [8, 9, eos]], pad=eos)
    logits = []

    def keep_logits(model, arguments, out):
        out.logits.retain_grad()
        logits.append(out.logits)

    trainer.actor.register_forward_hook(keep_logits)
    logprobs, _ = module.response_logprobs(trainer.actor, batch, torch.tensor([0, 1]), 1.0)
    (logprobs * batch.response_mask).sum().backward()
    # of the logits that predict each response token, row after row: nothing is predicted after a response
    assert logits[0].shape[:2] == (1, 5)
    gradient = logits[0].grad[0]
    assert gradient[1, eos] > 0 and gradient[4, eos] > 0  # the first EOS pulls


def test_the_sampler_uses_no_hidden_filter(ppo):
    trainer = ppo(BATCH_SIZE=8, MAX_NEW_TOKENS=24, TEMPERATURE=1.5).PPOTrainer()
    trainer.actor.generation_config.update(top_k=1, top_p=0.1, temperature=0.1, do_sample=True)
    torch.manual_seed(0)
    batch = trainer.rollout(trainer.train_rows[:8])
    scored, _ = module.response_logprobs(trainer.actor, batch, torch.arange(16), 1.5)
    assert torch.allclose(scored * batch.response_mask, batch.logprobs, atol=NATS)
    assert len(set(batch.responses)) > 8  # two samples of a prompt differ: not greedy


def test_the_groups_rows_are_neighbours_and_belong_to_their_prompt(ppo):
    trainer = ppo(BATCH_SIZE=3, GROUP_SIZE=3).PPOTrainer()
    batch = trainer.rollout(trainer.train_rows[:5])
    assert [row["id"] for row in batch.rows] == [f"train.jsonl:{i}" for i in range(1, 6) for _ in range(3)]
    assert [prompt for prompt, _, _ in batch.sequences] == [row["ids"] for row in batch.rows]


def test_how_prompts_are_cut_into_batches_does_not_change_the_samples(ppo):
    ids = []
    for size in (1, 3, 8):
        trainer = ppo(BATCH_SIZE=size).PPOTrainer()
        torch.manual_seed(3)
        ids.append(trainer.rollout(trainer.train_rows[:8]).response_ids)
    assert torch.equal(ids[0], ids[1]) and torch.equal(ids[0], ids[2])


# ---------------------------------------------------------------- rollout and update agree


def test_first_pass_ratio_is_one_over_mixed_lengths_paddings_and_batch_sizes(ppo, monkeypatch):
    script = ppo(BATCH_SIZE=5, GROUP_SIZE=3)
    trainer = script.PPOTrainer()
    assert trainer.actor in script._SHARED_SCORING
    batch = trainer.rollout(trainer.train_rows[:10])
    assert len({len(prompt) for prompt, _, _ in batch.sequences}) > 3
    assert len(set(batch.response_lengths.tolist())) > 3
    for size in (1, 4, 30):
        monkeypatch.setattr(module, "micro_batch_rows", lambda model, batch, size=size: size)
        for rows in module.micro_batches(trainer.actor, batch):
            with torch.no_grad():
                logprobs, _ = module.response_logprobs(trainer.actor, batch, rows, 1.0)
            width = logprobs.shape[1]
            ratio = ((logprobs - batch.logprobs[rows, :width]) * batch.response_mask[rows, :width]).exp()
            assert (ratio - 1).abs().max() < NATS


SAME = dict(vocab_size=82, eos_token_id=1, bos_token_id=None, initializer_range=0.3)
COMMON = dict(**SAME, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
ARCHITECTURES = {
    "qwen2": Qwen2Config(**COMMON, num_key_value_heads=2),
    "qwen3": Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=16),
    "phi3": Phi3Config(**COMMON, pad_token_id=0),
    "mistral with a window of 8": MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=8),
    "gpt-neox": GPTNeoXConfig(**COMMON),
    "gpt2": GPT2Config(**SAME, n_positions=128, n_embd=64, n_layer=2, n_head=4),
}


def give_tokenizer(folder):
    """The tiny policy's tokenizer, beside a model; returns the folder as a text."""
    AutoTokenizer.from_pretrained(TINY / "policy").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures_train_and_their_first_ratio_is_one(ppo, tmp_path, name):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(ARCHITECTURES[name]).save_pretrained(tmp_path / "model")
    path = give_tokenizer(tmp_path / "model")
    script = ppo(ACTOR_MODEL=path, KL_COEF=0.1, GROUP_SIZE=4, TEMPERATURE=0.7)
    trainer = script.PPOTrainer()
    assert trainer.actor in script._SHARED_SCORING
    batch = scored_batch(trainer)
    assert len(set(batch.response_lengths.tolist())) > 1
    assert len({len(prompt) for prompt, _, _ in batch.sequences}) > 1
    assert trainer.update(batch)["first_ratio_deviation"] < NATS


@pytest.mark.parametrize("shared", [True, False])  # groups and whole rows
def test_left_padding_with_absolute_positions_changes_nothing(shared):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=2)).eval()
    share_prompts(module, model, scoring=shared)
    prompts = [[5, 6, 7, 8], [9], [3, 4]]
    responses = [[1, 2], [7, 7, 7, 7], [8]]
    with torch.no_grad():
        padded = make_batch(prompts, responses, extra=3)
        together, _ = module.response_logprobs(model, padded, torch.arange(3), 1.0)
        for i, (prompt, response) in enumerate(zip(prompts, responses)):
            logits = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
            alone = [logits[len(prompt) - 1 + t, token].item() for t, token in enumerate(response)]
            assert together[i, : len(response)].tolist() == pytest.approx(alone, abs=NATS)
        ids, lengths, logprobs, *_ = module.generate(
            model, prompts, torch.rand(3, 5), 1, 5, 1.0, torch.tensor([0]), 0
        )
        batch = make_batch(prompts, [row[:n] for row, n in zip(ids.tolist(), lengths.tolist())])
        again, _ = module.response_logprobs(model, batch, torch.arange(3), 1.0)
    first = logprobs[:, : again.shape[1]]
    assert torch.allclose(again * batch.response_mask, first * batch.response_mask, atol=NATS)


@pytest.mark.parametrize("spread", ["whole groups", "some rows of some groups"])
def test_sharing_a_prompts_pass_changes_neither_log_probabilities_nor_gradients(ppo, spread):
    script = ppo(BATCH_SIZE=5, GROUP_SIZE=4)
    trainer = script.PPOTrainer()
    batch = trainer.rollout(trainer.train_rows[:20])
    rows = list(range(80)) if spread == "whole groups" else [0, 1, 3, 17, 18, 40, 41, 77]
    passes = []

    def count_tokens(model, arguments, options):
        passes.append(options["input_ids"].numel())

    trainer.actor.register_forward_pre_hook(count_tokens, with_kwargs=True)
    found = []
    for shared in (True, False):
        share_prompts(script, trainer.actor, scoring=shared)
        logprobs, entropy = script.response_logprobs(trainer.actor, batch, rows, 1.3)
        mask = batch.response_mask[rows, : logprobs.shape[1]]
        trainer.actor.zero_grad()
        ((logprobs**2 + entropy) * mask).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in trainer.actor.parameters()])
        found.append((logprobs * mask, entropy * mask, gradient))
    for shared, plain in zip(*found):
        assert distance(shared, plain) < 1e-4
    shared, plain = passes
    assert shared < 0.8 * plain  # and it saves tokens


def test_what_is_trained_is_the_very_object_that_was_sampled(ppo, monkeypatch):
    script = ppo(MAX_STEPS=1, EVAL_DATASETS=[])
    seen = []

    class Spy(script.PPOTrainer):
        def rollout(self, prompts):
            batch = super().rollout(prompts)
            seen.append(batch.response_ids)
            return batch

        def update(self, batch):
            seen.append(batch.response_ids)
            return super().update(batch)

    def decode(rows, **options):
        return ["#### 7"] * len(rows)  # a text that encodes to other ids

    trainer = Spy()
    monkeypatch.setattr(trainer.tokenizer, "batch_decode", decode)
    trainer.train()
    sampled, trained = seen
    assert sampled is trained


def test_values_are_those_predicted_before_the_token_is_seen_and_padding_does_not_matter(ppo):
    trainer = ppo().PPOTrainer()
    torch.nn.init.normal_(trainer.critic.score.weight)
    prompts = [[5, 6, 7], [9]]
    responses = [[8, 9], [10, 11, 12, 13]]
    with torch.no_grad():
        padded = make_batch(prompts, responses, extra=2)
        together = module.response_values(trainer.critic, padded, torch.tensor([0, 1]))
        for i, (p, r) in enumerate(zip(prompts, responses)):
            alone = trainer.critic(torch.tensor([p + r])).logits[0, len(p) - 1 : -1, 0]
            assert distance(together[i, : len(r)], alone) < 1e-4


def test_a_new_critic_says_zero_and_starts_from_the_actors_weights(ppo):
    trainer = ppo().PPOTrainer()
    assert (trainer.critic.score.weight == 0).all()
    assert (trainer.critic.score.bias == 0).all()
    actor = trainer.actor.base_model.state_dict()
    critic = trainer.critic.base_model.state_dict()
    assert actor.keys() == critic.keys()
    assert all(torch.equal(actor[k], critic[k]) for k in actor)


def test_weights_lie_where_no_file_put_them(ppo):
    """Two files of the same weights keep them at other bytes; products of what is mapped from there differ in
    the last bit."""
    trainer = ppo(KL_COEF=0.1).PPOTrainer()
    for model in (trainer.actor, trainer.critic, trainer.reference):
        assert all(p.data_ptr() % 64 == 0 for p in model.parameters())


def test_reward_model_scores_of_a_batch_equal_single_scores(ppo):
    trainer = ppo(REWARD_MODEL=str(TINY / "reward_model"), BATCH_SIZE=3).PPOTrainer()
    prompts = [row["prompt"] for row in trainer.train_rows[:7]]
    responses = [row["answer"][: 10 * i] for i, row in enumerate(trainer.train_rows[:7])]
    together = trainer.reward_model_score(prompts, responses)
    alone = torch.stack([trainer.reward_model_score(p, r) for p, r in zip(prompts, responses)])
    assert distance(together, alone) < 1e-4 and alone.std() > 0.1
    # and the library agrees, on its own padding, since EOS is not the pad here
    tokenizer = trainer.reward_tokenizer
    texts = [f"{p}\n{r}{tokenizer.eos_token}" for p, r in zip(prompts, responses)]
    inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        logits = trainer.reward_model(inputs["input_ids"], inputs["attention_mask"]).logits
    assert distance(logits[:, 0], together) < 1e-4


# ---------------------------------------------------------------- the update


def test_returns_come_from_the_advantages_as_they_are_not_whitened(ppo):
    found = []
    for whiten in (True, False):
        trainer = ppo(WHITEN_ADVANTAGES=whiten, GAMMA=1.0, LAM=1.0).PPOTrainer()
        torch.nn.init.normal_(trainer.critic.score.weight)
        batch = scored_batch(trainer)
        # with gamma and lambda 1 and no KL; float32 sums of up to 32 values that cancel
        rounding = 32 * 2**-23 * batch.values.abs().max().item()
        assert torch.allclose(batch.returns, batch.scores[:, None] * batch.response_mask, atol=rounding)
        found.append(batch.advantages)
    assert not torch.allclose(*found) and abs(found[0].sum() / batch.response_mask.sum()) < 1e-5


def test_gradients_and_metrics_do_not_depend_on_the_micro_batch(ppo):
    reference = None
    for size in (8, 4, 1):
        trainer = ppo(BATCH_SIZE=size, MAX_GRAD_NORM=1e9, KL_COEF=0.1, ENTROPY_COEF=0.01).PPOTrainer()
        batch = scored_batch(trainer)
        assert len(set(batch.response_lengths.tolist())) > 3
        batch.logprobs = batch.logprobs - 0.1 * batch.response_mask  # off policy: ratios other than 1
        got, metrics = gradients(trainer, batch)
        reference = reference or (got, metrics)
        assert distance(got, reference[0]) < 1e-4
        assert metrics == pytest.approx(reference[1], rel=1e-3, abs=1e-5)


def test_padding_changes_neither_gradients_nor_metrics(ppo):
    trainer = ppo(MAX_GRAD_NORM=1e9).PPOTrainer()
    batch = scored_batch(trainer)
    plain, metrics = gradients(trainer, batch)
    for key in ("response_ids", "response_mask", "logprobs", "values", "returns", "advantages"):
        setattr(batch, key, torch.nn.functional.pad(getattr(batch, key), (0, 5)))
    padded, padded_metrics = gradients(trainer, batch)
    assert distance(padded, plain) < 1e-4
    assert metrics == pytest.approx(padded_metrics, rel=1e-3, abs=NATS)


def test_one_by_eight_four_by_two_and_eight_by_one_are_the_same_run(ppo, tmp_path):
    def metrics(record):
        """What must be alike: no timing, and no noise around a ratio of 1."""
        left_out = {"phase", "max_ratio_deviation", "first_ratio_deviation"}
        if not record.get("kl_coef"):
            left_out.add("kl")  # there is no reference
        if record.get("explained_variance") is None:
            left_out.add("explained_variance")  # all returns are equal
        return {key: x for key, x in record.items() if "second" not in key and key not in left_out}

    runs = []
    for size, accumulation in ((1, 8), (4, 2), (8, 1)):
        sizes = dict(BATCH_SIZE=size, GRADIENT_ACCUMULATION_STEPS=accumulation, MAX_STEPS=2)
        folder = tmp_path / str(size)
        trainer = ppo(**sizes, EVAL_DATASETS=[], OUTPUT_DIR=str(folder)).PPOTrainer()
        start = flat_weights(trainer.actor)
        trainer.train()
        moved = flat_weights(trainer.actor) - start
        assert trainer.run.step == 2
        assert (moved != 0).float().mean() > 0.5  # the optimizer did step
        runs.append((moved, [json.loads(line) for line in open(folder / "logs/metrics.jsonl")]))
    wanted, wanted_records = runs[2]
    for moved, records in runs[:2]:
        assert (moved - wanted).abs().mean() < 0.01 * moved.abs().mean()
        for got, want in zip(records, wanted_records, strict=True):
            assert metrics(got) == pytest.approx(metrics(want), rel=0.02, abs=1e-4)


def test_mini_batches_share_out_every_row_once(ppo, monkeypatch):
    trainer = ppo(MINI_BATCHES=3, GROUP_EPOCHS=2).PPOTrainer()
    batch = scored_batch(trainer, 4)
    step = trainer.optimizer_step
    seen = []

    def spy(batch, rows):
        seen.append(rows)
        return step(batch, rows)

    monkeypatch.setattr(trainer, "optimizer_step", spy)
    trainer.update(batch)
    assert len(seen) == 6
    passes = [list(itertools.chain(*a_pass)) for a_pass in (seen[:3], seen[3:])]
    assert [sorted(rows) for rows in passes] == [list(range(8))] * 2
    assert len({tuple(rows) for rows in (*passes, range(8))}) == 3  # each pass in an order of its own


def test_entropy_bonus_has_a_gradient_and_raises_entropy(ppo):
    found = {}
    for coefficient in (0.0, 0.5):
        trainer = ppo(ENTROPY_COEF=coefficient, MAX_GRAD_NORM=1e9).PPOTrainer()
        batch = scored_batch(trainer)
        batch.advantages = torch.zeros_like(batch.advantages)
        found[coefficient], _ = gradients(trainer, batch)
    actor = slice(0, sum(p.numel() for p in trainer.actor.parameters()))
    assert (found[0.0][actor] == 0).all() and found[0.5][actor].abs().max() > 0
    trainer = ppo(ENTROPY_COEF=0.5, GROUP_EPOCHS=3).PPOTrainer()
    batch = scored_batch(trainer)
    batch.advantages = torch.zeros_like(batch.advantages)
    trainer.run.step = 2  # the first step's own check is not meant here
    entropies = [trainer.update(batch)["entropy"] for _ in range(3)]
    assert entropies[0] < entropies[1] < entropies[2]


def test_bfloat16_does_not_swallow_small_updates(ppo):
    rates = dict(LEARNING_RATE=1e-6, CRITIC_LEARNING_RATE=1e-6)
    trainer = ppo(**rates, DTYPE="bfloat16", GROUP_EPOCHS=1).PPOTrainer()
    batch = scored_batch(trainer)
    assert all(p.dtype == torch.float32 for p in trainer.actor.parameters())
    before = flat_weights(trainer.actor)
    step = trainer.optimizers["policy"].step
    gradient = []

    def spy():
        gradient.extend(p.grad.flatten() for p in trainer.actor.parameters())
        return step()

    trainer.optimizers["policy"].step = spy
    trainer.optimizer_step(batch, every_row(batch))
    touched = torch.cat(gradient) != 0
    changed = (flat_weights(trainer.actor) != before)[touched]
    assert changed.float().mean() > 0.99
    assert len(changed) > 100_000


def test_gradient_checkpointing_gives_the_same_gradients(ppo):
    found = []
    for on in (False, True):
        script = ppo(GRADIENT_CHECKPOINTING=on, MAX_GRAD_NORM=1e9)
        trainer = script.PPOTrainer()
        batch = scored_batch(trainer)
        seen = []
        layer = trainer.actor.model.layers[0]
        layer.register_forward_pre_hook(lambda layer, inputs, seen=seen: seen.append(layer.training))
        found.append(gradients(trainer, batch)[0])
        assert set(seen) == {on}
        assert not any(m.training for m in trainer.actor.modules())
    assert distance(*found) < 1e-4


def test_an_optimizer_of_ones_own_keeps_gradient_checkpointing(ppo):
    script = ppo(GRADIENT_CHECKPOINTING=True)
    script.make_optimizer = lambda model, learning_rate: torch.optim.SGD(model.parameters(), learning_rate)
    trainer = script.PPOTrainer()
    assert trainer.actor.model.layers[0].gradient_checkpointing
    assert trainer.critic.model.layers[0].gradient_checkpointing


def test_dropout_is_off_everywhere(ppo, tmp_path):
    torch.manual_seed(0)
    dropout = dict(resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)
    sizes = dict(vocab_size=82, n_positions=128, n_embd=32, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, eos_token_id=1, bos_token_id=None))
    model.save_pretrained(tmp_path / "gpt2")
    path = give_tokenizer(tmp_path / "gpt2")
    script = ppo(ACTOR_MODEL=path, MAX_STEPS=1, GRADIENT_CHECKPOINTING=True)
    trainer = script.PPOTrainer()
    trainer.train()  # GPT-2's other layout: value head "classifier", absolute positions
    first = trainer.update(scored_batch(trainer))
    assert first["first_ratio_deviation"] < NATS
    for _ in script.GradientSum([trainer.actor]).deal([[0]]):
        assert not any(m.training for m in trainer.actor.modules() if isinstance(m, torch.nn.Dropout))


def test_a_step_that_is_not_finite_is_skipped_and_five_end_the_run(ppo, capsys):
    script = ppo(MAX_STEPS=10)
    trainer = script.PPOTrainer()
    batch = scored_batch(trainer)
    before = flat_weights(trainer.actor)
    batch.advantages[0, 0] = float("nan")
    for _ in range(4):
        trainer.optimizer_step(batch, every_row(batch))
    assert torch.equal(flat_weights(trainer.actor), before)
    assert "train.jsonl:1 " in capsys.readouterr().out
    with pytest.raises(script.UserError, match="five optimizer steps"):
        trainer.optimizer_step(batch, every_row(batch))
    batch.advantages[0, 0] = 0.0
    trainer.run.skipped = 4
    trainer.optimizer_step(batch, every_row(batch))
    assert trainer.run.skipped == 0
    assert not torch.equal(flat_weights(trainer.actor), before)


def test_a_model_that_scores_otherwise_than_it_samples_is_caught_on_the_first_step(ppo, monkeypatch):
    script = ppo(EVAL_DATASETS=[])
    trainer = script.PPOTrainer()
    score = script.response_logprobs

    def late(*arguments):
        """One token late."""
        return tuple(x.roll(1, 1) for x in score(*arguments))

    monkeypatch.setattr(script, "response_logprobs", late)
    with pytest.raises(script.UserError, match="ratio"):
        trainer.train()


# ---------------------------------------------------------------- what a constant does: see mutants.py


def test_actor_and_critic_each_move_by_their_own_scheduled_rate(ppo):
    rates = dict(LEARNING_RATE=1e-3, CRITIC_LEARNING_RATE=1e-2, USE_LR_SCHEDULER=True)
    trainer = ppo(**rates, GROUP_EPOCHS=1).PPOTrainer()
    trainer.run.total_steps = 8
    trainer.run.step = 7  # linear: before the seventh of eight steps a quarter is left
    batch = scored_batch(trainer)
    before = {name: copies(model) for name, model in trainer.models.items()}
    metrics = trainer.update(batch)
    for name, rate in (("policy", 1e-3 / 4), ("critic", 1e-2 / 4)):
        assert trainer.optimizers[name].param_groups[0]["lr"] == pytest.approx(rate)
        # Adam's first step moves each weight by the rate, whatever its gradient; a weight is rounded to 1e-7
        after = trainer.models[name].parameters()
        moved = max((p - q).abs().max().item() for p, q in zip(after, before[name]))
        assert moved == pytest.approx(rate, rel=1e-2)
    assert metrics["learning_rate"] == pytest.approx(1e-3 / 4)


def test_the_value_loss_has_its_coefficient_and_only_the_critic_feels_it(ppo):
    found = []
    for coefficient in (0.5, 2.0):
        trainer = ppo(VALUE_LOSS_COEF=coefficient, MAX_GRAD_NORM=1e9).PPOTrainer()
        found.append(gradients(trainer, scored_batch(trainer))[0])
    actor = sum(p.numel() for p in trainer.actor.parameters())
    assert torch.equal(found[0][:actor], found[1][:actor])
    assert found[0][actor:].abs().max() > 0
    torch.testing.assert_close(found[0][actor:] * 4, found[1][actor:], rtol=1e-6, atol=0)


def test_at_another_temperature_the_first_ratio_is_one_and_the_first_kl_is_zero(ppo):
    trainer = ppo(TEMPERATURE=0.7, KL_COEF=0.1, GROUP_EPOCHS=1).PPOTrainer()
    batch = scored_batch(trainer)
    assert (batch.logprobs - batch.ref_logprobs).abs().max() < NATS
    metrics = trainer.update(batch)
    assert metrics["first_ratio_deviation"] < NATS and abs(metrics["kl"]) < NATS


def test_the_coefficient_rises_where_kl_is_above_its_target_and_the_next_step_pays_it(ppo):
    trainer = ppo(KL_COEF=0.1, KL_TARGET=0.5, KL_HORIZON=100).PPOTrainer()
    batch = scored_batch(trainer)
    batch.ref_logprobs = batch.logprobs - batch.response_mask  # a nat below the actor's at every token
    kl = trainer.update(batch)["kl"]
    assert kl == pytest.approx(1, rel=1e-5)
    trainer.adapt_kl(kl, len(batch.rows))
    risen = 0.1 * (1 + 0.2 * 16 / 100)
    assert trainer.state.kl_coef == pytest.approx(risen)
    batch.scores = torch.zeros_like(batch.scores)
    batch.values = torch.zeros_like(batch.values)
    trainer.compute_advantages(batch)
    last = batch.response_lengths - 1
    paid = batch.raw_advantages.gather(1, last[:, None])
    torch.testing.assert_close(paid, torch.full_like(paid, -risen), rtol=1e-5, atol=0)


def test_reference_and_critic_come_from_their_own_models(ppo, tmp_path):
    for name, factor in (("reference", 0.5), ("critic", 0.25)):
        model = AutoModelForCausalLM.from_pretrained(TINY / "policy")
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(factor)
        model.save_pretrained(tmp_path / name)
    models = dict(REFERENCE_MODEL=str(tmp_path / "reference"), CRITIC_MODEL=str(tmp_path / "critic"))
    trainer = ppo(**models, KL_COEF=0.1).PPOTrainer()
    actor = dict(trainer.actor.base_model.named_parameters())
    for model, factor in ((trainer.reference, 0.5), (trainer.critic, 0.25)):
        weights = dict(model.base_model.named_parameters())
        assert weights.keys() == actor.keys()
        assert all(torch.equal(weights[key], factor * actor[key]) for key in actor)


def test_samples_and_metrics_of_a_step_are_those_of_its_rows(ppo, tmp_path):
    def size(prompts, responses, answers):
        return [float(len(prompt) + 100 * len(response)) for prompt, response in zip(prompts, responses)]

    functions = [("exact_answer", 1.0), (size, 0.001)]
    trainer = ppo(BATCH_SIZE=5, REWARD_FUNCTIONS=functions, MAX_NEW_TOKENS=24, KL_COEF=0.1).PPOTrainer()
    torch.nn.init.normal_(trainer.critic.score.weight)
    trainer.run.open_files()
    trainer.run.next_step()
    batch = scored_batch(trainer, 5)
    trainer.record(batch, trainer.update(batch))
    samples = [json.loads(line) for line in open(tmp_path / "run/logs/samples.jsonl")]
    (record,) = [json.loads(line) for line in open(tmp_path / "run/logs/metrics.jsonl")]

    lengths = batch.response_lengths.tolist()
    columns = batch.advantages, batch.raw_advantages, batch.returns, batch.values
    whitened, raw, returns, values = (x.double().tolist() for x in columns)
    for i, sample in zip((0, 3, 6, 9), samples, strict=True):
        row = batch.rows[i]
        lists = [row["prompt"]], [batch.responses[i]], [row["answer"]]
        mean = sum(whitened[i][: lengths[i]]) / lengths[i]
        assert sample.pop("advantage") == pytest.approx(mean, rel=1e-4, abs=1e-5)
        assert sample == {
            "step": 1,
            "id": row["id"],
            "prompt": row["prompt"],
            "response": batch.responses[i],
            "answer": row["answer"],
            "truncated": bool(batch.truncated[i]),
            "reward": batch.scores[i].item(),
            "reward/exact_answer": rewards.exact_answer(*lists)[0],
            "reward/size": size(*lists)[0],
        }
    assert len({sample["reward/size"] for sample in samples}) == 4

    def tokens(*rows):
        """The values of all response tokens, row after row."""
        return [x for row, n in zip(*rows, lengths) for x in row[:n]]

    def variance(numbers):
        centre = sum(numbers) / len(numbers)
        return sum((x - centre) ** 2 for x in numbers) / len(numbers)

    left = [r - v for r, v in zip(tokens(returns), tokens(values))]
    part = batch.reward_parts["size"].tolist()
    assert max(part) > 1.01 * sum(part) / 10
    assert record["reward/size"] == pytest.approx(sum(part) / 10, rel=1e-6)
    assert record["reward"] == pytest.approx(sum(batch.scores.tolist()) / 10, rel=1e-6)
    assert record["advantage_mean"] == pytest.approx(sum(tokens(raw)) / sum(lengths), rel=1e-4, abs=1e-4)
    explained = 1 - variance(left) / variance(tokens(returns))
    assert record["explained_variance"] == pytest.approx(explained, rel=1e-3, abs=1e-3)
    assert record["response_length"] == pytest.approx(sum(lengths) / 10)
    assert record["truncated_fraction"] == pytest.approx(sum(batch.truncated.tolist()) / 10)


def test_one_clip_range_clips_both_ways(ppo):
    trainer = ppo(MAX_NEW_TOKENS=16, CLIP_RANGE=0.4).PPOTrainer()
    batch = scored_batch(trainer, 4)
    for ratio, clipped in ((1.3, 0), (1.5, 1)):
        moved = SimpleNamespace(**vars(batch))
        moved.logprobs = batch.logprobs - math.log(ratio) * batch.response_mask
        moved.advantages = torch.ones_like(batch.advantages)
        assert gradients(trainer, moved)[1]["clip_fraction"] == pytest.approx(clipped, abs=1e-6)


@pytest.mark.parametrize(
    "ratio, advantage, clipped",
    [(1.5, 1, 1), (1.5, -1, 0), (0.5, 1, 0), (0.5, -1, 1), (1.25, 1, 0), (0.75, -1, 1), (0.9, -1, 0)],
)
def test_clip_fraction_counts_the_tokens_whose_gradient_the_clip_took(ppo, ratio, advantage, clipped):
    trainer = ppo(MAX_NEW_TOKENS=16, CLIP_RANGE_HIGH=0.3).PPOTrainer()
    batch = scored_batch(trainer, 4)
    batch.logprobs = batch.logprobs - math.log(ratio) * batch.response_mask
    batch.advantages = torch.full_like(batch.advantages, advantage)
    _, metrics = gradients(trainer, batch)
    assert metrics["clip_fraction"] == pytest.approx(clipped, abs=1e-6)  # a mean of ones or of zeros


# ---------------------------------------------------------------- the reference, the score


def test_a_reference_is_held_only_for_its_price_and_the_first_kl_is_zero(ppo):
    assert ppo(KL_COEF=0.0).PPOTrainer().reference is None
    trainer = ppo(KL_COEF=0.1).PPOTrainer()
    batch = scored_batch(trainer)
    assert (batch.logprobs - batch.ref_logprobs).abs().max() < NATS
    assert not any(p.requires_grad for p in trainer.reference.parameters())
    assert trainer.update(batch)["kl"] == pytest.approx(0, abs=NATS)
    batch = scored_batch(trainer)
    # the actor has moved, the reference has not
    assert (batch.logprobs - batch.ref_logprobs).abs().max() > 1e-3


def test_kl_target_moves_the_coefficient(ppo):
    trainer = ppo(KL_COEF=0.1, KL_TARGET=0.5, KL_HORIZON=100).PPOTrainer()
    batch = scored_batch(trainer)
    trainer.adapt_kl(trainer.update(batch)["kl"], len(batch.rows))
    assert trainer.state.kl_coef == pytest.approx(0.1 * (1 - 0.2 * 16 / 100))


def test_missing_eos_is_penalised(ppo):
    trainer = ppo(MISSING_EOS_PENALTY=3.0, MAX_NEW_TOKENS=12).PPOTrainer()
    batch = scored_batch(trainer)
    assert 0 < batch.truncated.sum() < len(batch.truncated)
    assert torch.equal(batch.scores, batch.reward_parts["exact_answer"] - 3.0 * batch.truncated)


def test_rewards_add_up_with_their_weights(ppo):
    def twice(prompts, responses, answers):
        return [2.0] * len(responses)

    functions = [("exact_answer", 3.0), (twice, 0.1)]
    model = dict(REWARD_MODEL=str(TINY / "reward_model"), REWARD_MODEL_WEIGHT=0.5)
    trainer = ppo(**model, REWARD_FUNCTIONS=functions).PPOTrainer()
    row = trainer.train_rows[0]
    batch = reward_batch([row["prompt"]] * 2, [row["answer"], "#### 1000"], [row["answer"]] * 2)
    total, _, parts = trainer.score_responses(batch)
    assert parts["exact_answer"].tolist() == [1, 0]
    assert parts["twice"].tolist() == [2, 2]
    assert torch.allclose(total, 0.5 * parts["reward_model"] + 3 * parts["exact_answer"] + 0.2, atol=1e-5)
    assert parts["reward_model"][0] > parts["reward_model"][1]


def test_parts_of_several_calls_stay_beside_their_responses(ppo):
    def size(prompts, responses, answers):
        sizes.append(len(responses))
        return [float(len(response)) for response in responses]

    sizes = []
    trainer = ppo(BATCH_SIZE=3, REWARD_FUNCTIONS=[(size, 0.5)]).PPOTrainer()
    batch = scored_batch(trainer, 8)
    assert sizes == [6, 6, 4]  # rows of 3 prompts each, then of 2
    lengths = [len(response) for response in batch.responses]
    assert batch.reward_parts["size"].tolist() == lengths != lengths[::-1]
    assert batch.scores.tolist() == [0.5 * n for n in lengths]


def test_evaluating_never_changes_training(ppo, tmp_path):
    weights = []
    for every in (0, 1):
        folder = str(tmp_path / str(every))
        trainer = ppo(MAX_STEPS=3, EVAL_EVERY_N_STEPS=every, OUTPUT_DIR=folder).PPOTrainer()
        trainer.train()
        weights.append(flat_weights(trainer.actor))
    assert torch.equal(*weights)


def test_generate_response_is_the_librarys_greedy_one(ppo):
    trainer = ppo().PPOTrainer()
    prompt = trainer.train_rows[0]["prompt"]
    model = AutoModelForCausalLM.from_pretrained(TINY / "policy")
    tokenizer = AutoTokenizer.from_pretrained(TINY / "policy")
    inputs = tokenizer(prompt + "\n", return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    response = out[0, inputs["input_ids"].shape[1] :]
    assert trainer.generate_response(prompt) == tokenizer.decode(response, skip_special_tokens=True)


# ---------------------------------------------------------------- what an audit found


@pytest.mark.parametrize("kl", [0.0, 0.01, 5.0])
@pytest.mark.parametrize("responses, horizon", [(128, 1), (50, 10), (1000, 100)])
def test_the_kl_coefficient_stays_positive_and_moves_by_a_fifth_at_most(kl, responses, horizon):
    got = module.adapt_kl_coef(0.1, kl, 0.5, responses, horizon)
    assert got == pytest.approx(0.12 if kl > 0.5 else 0.08)
    for _ in range(50):
        got = module.adapt_kl_coef(got, kl, 0.5, responses, horizon)
    assert got > 0


def test_a_small_error_of_the_kl_moves_the_coefficient_by_its_share():
    assert module.adapt_kl_coef(0.1, 0.505, 0.5, 500, 100) == pytest.approx(0.1 * 1.05)
    assert module.adapt_kl_coef(0.1, 0.505, 0.5, 100, 500) == pytest.approx(0.1 * 1.002)


def test_a_kl_target_without_a_reference_is_refused(ppo, tmp_path):
    script = ppo(KL_TARGET=0.1, KL_COEF=0.0)
    with pytest.raises(script.UserError, match="KL_TARGET = 0.1 needs a KL_COEF to start from, such as 0.01"):
        script.PPOTrainer()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind, last", [("linear", 0.1), ("cosine", 0.5 * (1 + math.cos(0.9 * math.pi)))])
def test_the_last_step_still_has_a_learning_rate(kind, last):
    assert module.learning_rate_scale(11, 12, 2, kind, 0) == pytest.approx(last)
    assert module.learning_rate_scale(0, 1, 0, kind, 0) == 1  # a single step is a whole one


# ---------------------------------------------------------------- which constant is handed where
# Every value differs from the default and from its neighbours': one in another's place is seen.


def vowels(prompts, responses, answers):
    return [float(sum(letter in "aeiou0" for letter in response)) for response in responses]


def digits(prompts, responses, answers):
    return [float(sum(letter.isdigit() for letter in response)) for response in responses]


def nudge(model, seed):
    """Move all weights a little."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data.mul_(1 + 0.05 * torch.randn(p.shape, generator=generator))


def tiny_files(folder):
    """The constants of small random models, the reference near the policy, and of 60 rows of the data."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**COMMON, "num_hidden_layers": 1}))
    model.generation_config.eos_token_id = ENDS
    judge = LlamaForSequenceClassification(LlamaConfig(**{**COMMON, "num_hidden_layers": 1, "num_labels": 1}))
    constants = {"OUTPUT_DIR": f"{folder}/run", "RESUME": "no"}
    for constant in ("ACTOR_MODEL", "REFERENCE_MODEL", "REWARD_MODEL"):
        constants[constant] = give_tokenizer(folder / constant)
        (judge if constant == "REWARD_MODEL" else model).save_pretrained(folder / constant)
        nudge(model, 0)
    for constant, name in (("TRAIN_DATASETS", "train.jsonl"), ("EVAL_DATASETS", "test.jsonl")):
        (folder / name).write_text("".join(open(TINY / name).readlines()[:60]))
        row = {"path": f"{folder}/{name}", "type": "jsonl", "input": "problem", "output": "solution"}
        constants[constant] = [row]
    return constants


ENDS = [1, 20, 30, 40]  # so that about half of the responses end
UPDATE = {"policy_loss", "value_loss", "norms", "gradients"}
LEARNT = {"advantages", *UPDATE}
SCORES = {"scores", "evaluation", *LEARNT}
ALL = {*SCORES, "responses", "kl", "kl_coef"}
CONSTANTS = {  # its value, another, and what that alone changes
    "REWARD_FUNCTIONS": ([(vowels, 0.6)], [(vowels, 0.65)], SCORES),
    "REWARD_MODEL_WEIGHT": (0.31, 0.37, SCORES),
    "MISSING_EOS_PENALTY": (0.73, 0.79, SCORES),
    "ACCURACY_FUNCTION": (vowels, digits, {"evaluation"}),
    "BATCH_SIZE": (3, 5, {*ALL, "calls", "passes", "plan", "rates"} - {"evaluation"}),
    "GRADIENT_ACCUMULATION_STEPS": (2, 3, {*ALL, "calls", "passes", "plan", "rates"} - {"evaluation"}),
    "GROUP_SIZE": (4, 5, {*ALL, "calls", "passes"} - {"evaluation"}),
    "MAX_PROMPT_TOKENS": (38, 29, {*ALL, "plan", "rates"}),
    "MAX_NEW_TOKENS": (14, 16, ALL),
    "TEMPERATURE": (1.7, 1.9, ALL),
    "LEARNING_RATE": (1e-3, 2e-3, {"rates"}),
    "CRITIC_LEARNING_RATE": (3e-3, 5e-3, {"rates"}),
    "MAX_GRAD_NORM": (0.41, 0.43, {"gradients"}),
    "USE_LR_SCHEDULER": (True, False, {"rates"}),
    "LR_SCHEDULER_TYPE": ("cosine", "linear", {"rates"}),
    "WARMUP_STEPS": (5, 6, {"rates"}),
    "GROUP_EPOCHS": (3, 4, {"passes"}),
    "MINI_BATCHES": (1, 2, {"passes", *UPDATE}),
    "CLIP_RANGE": (0.12, 0.08, {"policy_loss", "norms", "gradients"}),
    "CLIP_RANGE_HIGH": (0.14, 0.17, {"policy_loss", "norms", "gradients"}),
    "DUAL_CLIP": (1.4, 1.3, {"policy_loss", "norms", "gradients"}),
    "VALUE_CLIP_RANGE": (0.07, 0.09, {"value_loss", "norms", "gradients"}),
    "VALUE_LOSS_COEF": (0.05, 0.06, {"norms", "gradients"}),
    "ENTROPY_COEF": (0.021, 0.023, {"norms", "gradients"}),
    "KL_COEF": (0.16, 0.18, {"kl_coef", *LEARNT}),
    "KL_TARGET": (0.11, 0.105, {"kl_coef"}),
    "KL_HORIZON": (250, 270, {"kl_coef"}),
    "GAMMA": (0.93, 0.91, LEARNT),
    "LAM": (0.61, 0.66, LEARNT - {"value_loss"}),
    "CRITIC_LAM": (0.72, 0.77, UPDATE - {"policy_loss"}),
    "CRITIC_WARMUP_STEPS": (2, 3, {"rates"}),
    "WHITEN_ADVANTAGES": (True, False, LEARNT - {"value_loss"}),
    "NUM_EPOCHS": (3, 4, {"plan", "rates"}),
    "MAX_STEPS": (31, 9, {"plan", "rates"}),
    "MAX_TRAIN_PROMPTS": (29, 40, {*ALL, "plan", "rates"} - {"evaluation"}),
    "MAX_EVAL_PROMPTS": (3, 2, {"evaluation"}),
    "SEED": (11, 12, ALL),
}


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """one_step(KEY=value, ...): the module, the trainer, and what its eighth step was like with CONSTANTS but
    for these: its rollout by one actor, its update by one that has moved on; the gradients of its first
    optimizer step."""
    folder = tmp_path_factory.mktemp("constants")
    constants = small("ppo/ppo.py", **{name: value for name, (value, _, _) in CONSTANTS.items()})
    constants |= tiny_files(folder)
    script = load_script("ppo/ppo.py", **constants)
    first = script.PPOTrainer()
    torch.nn.init.normal_(first.critic.score.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    weights = [copy.deepcopy(model.state_dict()) for model in first.models.values()]
    script.check_models = lambda *_: None  # once is enough

    class Spy(script.PPOTrainer):
        def load_models(self):
            """Those that are there."""
            names = "tokenizer actor critic pad_id models models_by_constant reference optimizers"
            for name in [*names.split(), "reward_model", "reward_tokenizer"]:
                setattr(self, name, getattr(first, name))
            self.reward_functions = script.resolve_rewards(script.REWARD_FUNCTIONS, "REWARD_FUNCTIONS")
            self.accuracy_function = script.resolve_rewards([(script.ACCURACY_FUNCTION, 1.0)], "")[0][1]

        def compute_rewards(self, prompts, responses, answers, **columns):
            self.seen["calls"].append(len(responses))
            return super().compute_rewards(prompts, responses, answers, **columns)

        def optimizer_step(self, batch, rows):
            self.seen["passes"].append(len(rows))
            if len(self.seen["passes"]) == 1:
                self.first_step = super().optimizer_step(batch, rows)
            return dict(self.first_step)

        def update(self, batch):
            for model in self.models.values():
                nudge(model, 1)
            self.metrics = super().update(batch)
            passes = list(self.seen["passes"])
            for self.run.step in (3, 8):  # in the warm-up and after it
                super().update(batch)
                self.seen["rates"] += [opt.param_groups[0]["lr"] for opt in self.optimizers.values()]
            self.seen["passes"] = passes
            return self.metrics

        def record(self, batch, metrics):
            self.batch = batch

        def adapt_kl(self, kl, num_responses):
            super().adapt_kl(kl, num_responses)
            self.seen["kl_coef"] = self.state.kl_coef

    def take_step(**changed):
        for name, value in {**constants, **changed}.items():
            setattr(script, name, value)
        for model, before in zip(first.models.values(), weights):
            model.load_state_dict(before)
        trainer = Spy()
        trainer.weights = weights
        trainer.seen = seen = {"calls": [], "passes": [], "gradients": [], "rates": []}
        for name, optimizer in trainer.optimizers.items():

            def keep_gradient(model=trainer.models[name]):
                seen["gradients"] += [p.grad.clone() for p in model.parameters() if p.grad is not None]

            optimizer.step = keep_gradient

        def log_evaluation(metrics):
            seen["evaluation"] = metrics
            seen["calls"].clear()

        def eighth_step():
            trainer.run.step += 8
            return trainer.run.step == 8

        trainer.run.session = lambda summary: nullcontext()
        trainer.run.needs_first_evaluation = lambda: True
        trainer.run.log_evaluation = log_evaluation
        trainer.run.next_step = eighth_step
        trainer.run.is_due = lambda interval: False
        trainer.run.is_last_step = lambda: False
        trainer.train()
        metrics, batch = trainer.metrics, trainer.batch
        seen.update({key: metrics[key] for key in ("policy_loss", "value_loss", "kl")})
        seen.update({key: getattr(batch, key) for key in ("scores", "advantages")})
        seen.update(
            plan=trainer.run.total_steps,
            responses=batch.response_ids,
            norms=[metrics["grad_norm"], metrics["critic_grad_norm"]],
        )
        return script, trainer, seen

    yield take_step
    first.run.lock.release()


def differences(a, b):
    """The names of what is not the same in two steps, but for the last bits."""

    def same(x, y):
        if isinstance(x, torch.Tensor):
            return x.shape == y.shape and distance(x, y) < 1e-6
        if isinstance(x, list):
            return len(x) == len(y) and all(map(same, x, y))
        return x == y or (type(x) is type(y) is float and x == pytest.approx(y, rel=1e-5))

    return {key for key in a if not same(a[key], b[key])}


@pytest.fixture(scope="module")
def usual(one_step):
    return one_step()[2]


@pytest.mark.parametrize("name", CONSTANTS)
def test_each_constant_by_itself_changes_what_it_should_and_nothing_else(one_step, usual, name):
    _, value, wanted = CONSTANTS[name]
    assert differences(one_step(**{name: value})[2], usual) == wanted


def algorithm_of(path):
    """The constants of a trainer from its rewards to its schedule."""
    text = (ROOT / path).read_text()
    text = text[text.index("\n# Rewards:") : text.index("\n# Bookkeeping")]
    return set(re.findall("^([A-Z_]+)[ :]", text, re.M))


def test_no_constant_of_the_algorithm_was_forgotten():
    elsewhere = {
        "MICRO_BATCH_ROWS",
        "REWARD_TIMEOUT",
        "WEIGHT_DECAY",
        "PLATEAU_PATIENCE",
        "VALUE_FIT_DECAY",
    }  # test_safety.py, test_run.py, test_critic.py
    assert algorithm_of("ppo/ppo.py") - elsewhere <= CONSTANTS.keys()


def test_a_step_whose_constants_are_all_unlike_is_the_papers_in_float64(one_step):
    c, trainer, seen = one_step()
    batch = trainer.batch
    rows = c.BATCH_SIZE * c.GRADIENT_ACCUMULATION_STEPS * c.GROUP_SIZE

    # what is asked: the first epoch's permutation of the prompts that are short enough
    prompts = [row["id"] for row in trainer.train_rows]
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(c.SEED + 1)).tolist()
    assert [row["id"] for row in batch.rows] == [prompts[i] for i in order[:6] for _ in range(4)]
    assert max(len(row["ids"]) for row in trainer.train_rows) == c.MAX_PROMPT_TOKENS
    assert seen["calls"] == [c.BATCH_SIZE * c.GROUP_SIZE] * 2 and seen["passes"] == [rows] * 3
    steps_an_epoch = math.ceil(len(prompts) / 6)
    assert seen["plan"] == 3 * steps_an_epoch

    # log-probabilities and values, each row alone
    def plain(kind, weights):
        model = kind.from_pretrained(c.ACTOR_MODEL, dtype=torch.float64, num_labels=1)
        model.load_state_dict(weights)
        return model

    causal, labels = AutoModelForCausalLM, AutoModelForTokenClassification
    actor, critic = (plain(*x) for x in zip((causal, labels), trainer.weights))
    models = zip((causal, labels), trainer.models.values())
    moved = [plain(kind, model.state_dict()) for kind, model in models]
    reference = causal.from_pretrained(c.REFERENCE_MODEL, dtype=torch.float64)
    lengths = batch.response_lengths.tolist()
    ids = [row["ids"] + said[:n] for row, said, n in zip(batch.rows, batch.response_ids.tolist(), lengths)]

    def logprobs(model):
        """[(log-probabilities, entropies)] of each response's tokens."""
        found = []
        for row, n in zip(ids, lengths):
            logs = (model(torch.tensor([row])).logits[0, -n - 1 : -1] / c.TEMPERATURE).log_softmax(-1)
            found.append((logs.gather(1, torch.tensor(row[-n:])[:, None])[:, 0], -(logs.exp() * logs).sum(1)))
        return found

    def values(model):
        return [model(torch.tensor([row])).logits[0, -n - 1 : -1, 0] for row, n in zip(ids, lengths)]

    with torch.no_grad():
        old, ref, old_values = logprobs(actor), logprobs(reference), values(critic)
    tokens = sum(lengths)
    kl = sum((p - q).sum().item() for (p, _), (q, _) in zip(old, ref)) / tokens
    assert seen["kl"] == pytest.approx(kl, abs=1e-4)
    towards = 1 + min(0.2, max(-0.2, kl / c.KL_TARGET - 1)) * rows / c.KL_HORIZON
    assert seen["kl_coef"] == pytest.approx(c.KL_COEF * towards, rel=1e-3)

    # scores and advantages
    said = batch.responses
    judged = trainer.reward_model_score([row["prompt"] for row in batch.rows], said).tolist()
    cut = [row[-1] not in ENDS for row in ids]
    assert 0 < sum(cut) < rows
    scores = [0.31 * m + 0.6 * v - 0.73 * t for m, v, t in zip(judged, vowels(None, said, None), cut)]
    assert seen["scores"].tolist() == pytest.approx(scores, rel=1e-4, abs=1e-4)
    raw = []
    targets = []
    for score, (p, _), (q, _), v in zip(scores, old, ref, old_values):
        r = -c.KL_COEF * (p - q)
        r[-1] += score
        delta = r + c.GAMMA * torch.cat([v[1:], torch.zeros(1)]) - v
        n = len(v)
        for lam, sums in ((c.LAM, raw), (c.CRITIC_LAM, targets)):
            ahead = [sum((c.GAMMA * lam) ** k * delta[t + k] for k in range(n - t)) for t in range(n)]
            sums.append(torch.stack(ahead))
    every = torch.cat(raw)
    white = [(x - every.mean()) / every.std(correction=0) for x in raw]
    got = [x[:n] for x, n in zip(seen["advantages"], lengths)]
    assert distance(torch.cat(got), torch.cat(white)) < 1e-4

    # the losses, and their gradients at the moment the optimizers would step
    new, new_values = logprobs(moved[0]), values(moved[1])
    policy_loss = value_loss = entropy = clipped = 0.0
    for (p, h), (p_old, _), a, v, v_old, ahead in zip(new, old, white, new_values, old_values, targets):
        rho = (p - p_old).exp()
        low, high = 1 - c.CLIP_RANGE, 1 + c.CLIP_RANGE_HIGH
        gain = torch.min(rho * a, rho.clip(low, high) * a)
        policy_loss = policy_loss - torch.where(a < 0, gain.clip(min=c.DUAL_CLIP * a), gain).sum() / tokens
        near = v_old + (v - v_old).clip(-c.VALUE_CLIP_RANGE, c.VALUE_CLIP_RANGE)
        target = ahead + v_old
        value_loss = value_loss + torch.max((v - target) ** 2, (near - target) ** 2).sum() / 2 / tokens
        clipped += ((v - v_old).abs() > c.VALUE_CLIP_RANGE).sum().item() / tokens
        entropy = entropy + h.sum() / tokens
    assert 0.05 < trainer.metrics["clip_fraction"] < 0.95 and 0.05 < clipped < 0.95
    assert seen["policy_loss"] == pytest.approx(policy_loss.item(), rel=1e-3)
    assert seen["value_loss"] == pytest.approx(value_loss.item(), rel=1e-4)
    (policy_loss - c.ENTROPY_COEF * entropy).backward()
    (c.VALUE_LOSS_COEF * value_loss).backward()
    assert seen["norms"][0] > c.MAX_GRAD_NORM > seen["norms"][1]
    wanted = []
    for model, norm in zip(moved, seen["norms"]):
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert norm == pytest.approx(gradient.norm().item(), rel=1e-4)
        wanted.append(gradient * min(1, c.MAX_GRAD_NORM / gradient.norm()))
    assert distance(torch.cat([x.flatten() for x in seen["gradients"]]), torch.cat(wanted)) < 1e-4

    # rates of the third and the eighth step
    cosine = 0.5 * (1 + math.cos(math.pi * (7 - c.WARMUP_STEPS) / (seen["plan"] - c.WARMUP_STEPS)))
    later = c.CRITIC_WARMUP_STEPS  # the actor's schedule begins after the critic's warm-up
    progress = (7 - later - c.WARMUP_STEPS) / (seen["plan"] - later - c.WARMUP_STEPS)
    of_actor = 0.5 * (1 + math.cos(math.pi * progress))
    scales = [(2 - later + 1) / c.WARMUP_STEPS, (2 + 1) / c.WARMUP_STEPS, of_actor, cosine]
    rates = [c.LEARNING_RATE, c.CRITIC_LEARNING_RATE] * 2
    assert seen["rates"] == pytest.approx([rate * scale for rate, scale in zip(rates, scales)])


def test_evaluation_samples_the_held_out_prompts_by_the_seed_after_the_runs(one_step):
    c, trainer, seen = one_step()
    trainer.actor.load_state_dict(trainer.weights[0])
    rows = trainer.eval_rows
    numbers = [int(row["id"].removeprefix("test.jsonl:")) for row in rows]
    assert numbers == sorted(numbers) and 1 < max(numbers) <= c.MAX_EVAL_PROMPTS
    uniform = torch.rand(len(rows), c.MAX_NEW_TOKENS, generator=torch.Generator().manual_seed(c.SEED + 1))
    for kind, noise in (("greedy", None), ("sampled", uniform)):
        said = c.respond(trainer.actor, trainer.tokenizer, [row["ids"] for row in rows], noise).responses
        right = vowels(None, said, None)
        assert seen["evaluation"][f"accuracy_{kind}"] == pytest.approx(sum(right) / len(right))
    assert seen["evaluation"]["reward/vowels"] == pytest.approx(sum(right) / len(right))

    # and training those of its step by the run's own
    torch.manual_seed(c.SEED)
    uniform = torch.rand(len(trainer.batch.rows), c.MAX_NEW_TOKENS)
    asked = [row["ids"] for row in trainer.batch.rows[:: c.GROUP_SIZE]]
    said = c.respond(trainer.actor, trainer.tokenizer, asked, uniform, c.GROUP_SIZE)
    assert torch.equal(said.response_ids, seen["responses"])
