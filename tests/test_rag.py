"""PPO over retrieval: what is read, what is answered, what it costs, what is learnt from it; on a toy world
with random tiny models."""

import copy
import functools
import json
import math
import re
import runpy
import shutil
import statistics
import zlib
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from old import ROOT, assert_same_state, load_script, read, untimed
from hypothesis import example, given, settings
from hypothesis.strategies import floats, integers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

pytestmark = pytest.mark.usefixtures("no_pictures")
BASELINES = "fixed random best_fixed best_by_type tree oracle_greedy oracle every_action".split()
NAMES = "Ada Bea Cid Dov Eli Fay Gus Hal Ida Jon Kim Leo Mia Ned Ola Pia".split()
TOWNS = "Arle Bryn Cole Dune".split()


def make_tokenizer(**options):
    """Words and signs of the toy world, and eighty more, so that more than fifty can follow."""
    words = "Answer ONLY with the correct answer as a short phrase based strictly on provided CONTEXTS"
    words = f"{words} QUESTION ANSWER was born in Where is town or older who When year lives it near sea"
    words = [*words.split(), *NAMES, *TOWNS, *"0123456789[]:,.?", *(f"w{n}" for n in range(80))]
    vocabulary = {word: n for n, word in enumerate(["<pad>", "</s>", "<unk>", *dict.fromkeys(words)])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(), pre_tokenizers.Digits(True)]
    )
    ends = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **ends, **options)


def save(model, tokenizer, folder):
    with torch.no_grad():  # far from uniform, so that greedy answers differ
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A folder with a toy corpus, questions and random tiny models: llama/, t5/, reranker/."""
    folder = tmp_path_factory.mktemp("world")
    corpus = []
    for n, name in enumerate(NAMES):
        corpus.append({"title": name, "text": f"{name} was born in {TOWNS[n % 4]} in {1900 + n} ."})
    corpus += [{"title": town, "text": f"{town} is a town near the sea ."} for town in TOWNS]
    asked = []
    for n, name in enumerate(NAMES):
        one = {"question": f"Where was {name} born?", "answer": TOWNS[n % 4], "gold": [name], "type": "one"}
        two = {"question": f"Who is older, {name} or {NAMES[n - 1]}?", "answer": name, "type": "two"}
        asked += [one, {**two, "gold": [name, NAMES[n - 1]]}]
    for name, rows in (("corpus", corpus), ("questions", asked)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1}
    llama = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        **sizes,
    }
    save(LlamaForCausalLM(LlamaConfig(**llama)), tokenizer, folder / "llama")
    save(LlamaForSequenceClassification(LlamaConfig(num_labels=1, **llama)), tokenizer, folder / "reranker")
    t5 = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    ended = make_tokenizer(model_max_length=128)
    save(T5ForConditionalGeneration(T5Config(**t5, **sizes)), ended, folder / "t5")
    return folder


def toy(world, out, **constants):
    small = {
        "DATASET": {"path": str(world), "type": "folder"},
        "GENERATOR": f"{world}/llama",
        "RERANKER": f"{world}/reranker",
        "CACHE_DIR": str(out / "cache"),
        "OUTPUT_DIR": str(out / "run"),
        "VALIDATION_QUESTIONS": 6,
        "TEST_QUESTIONS": 8,
        "MAX_NEW_TOKENS": 4,
        "TOP_KS": (1, 3),
        "TEMPERATURES": (0.0, 1.0),
        "FIXED_ACTION": (3, 1.0, 0),
        "RERANK_DEPTH": 6,
        "QUESTIONS_AT_ONCE": 8,
        "N_STEPS": 16,
        "BATCH_SIZE": 8,
        "GROUP_EPOCHS": 2,
        "MAX_STEPS": 4,
        "EVAL_EVERY_N_STEPS": 2,
        "SAVE_EVERY_N_STEPS": 0,
        "HIDDEN_SIZE": 8,
    }
    return load_script("ppo/ppo_rag.py", **{**small, **constants})


@pytest.fixture
def rag(world, tmp_path):
    """rag(KEY=value, ...): ppo/ppo_rag.py on the toy world, writing below tmp_path."""
    return lambda **constants: toy(world, tmp_path, **constants)


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    """(module, trainer) of a short finished run: weights, costs and seeds are unlike the defaults, answers
    are guesses."""
    weights = {"EM_WEIGHT": 1.3, "F1_WEIGHT": 0.7, "COST_WEIGHT": 0.09}
    others = {"COST_TOKENS": 50.0, "COST_PAIRS": 7.0, "SEED": 5, "SPLIT_SEED": 3, "DRAWS": 2}
    script = toy(world, tmp_path_factory.mktemp("trained"), **weights, **others)

    def guesses(self, prompts, temperature, seed):
        """Towns, right now and then, which a random model's answers never are."""
        keys = [zlib.crc32(f"{prompt} {seed if temperature else 0}".encode()) for prompt in prompts]
        return [(f"{TOWNS[key % 4]}{' near' * (key % 3)}", 20 + key % 7) for key in keys]

    script.Generator.answers = guesses
    trainer = script.RAGTrainer()
    trainer.train()
    return script, trainer


# ---------------------------------------------------------------- maths


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.1, 1.5])
def test_the_clip_stops_the_gradient_where_the_ratio_left_the_range_as_the_advantage_wants(advantage, ratio):
    script = load_script("ppo/ppo_rag.py")
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = script.policy_loss(logprobs, torch.zeros(1), torch.tensor([advantage]), 0.2)
    loss.sum().backward()
    clipped = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
    assert logprobs.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_the_value_loss_is_clipped_around_the_rollouts_value():
    script = load_script("ppo/ppo_rag.py")
    tensors = torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0])  # value, old value, return
    losses = [script.value_loss(*tensors, clip).item() for clip in (0, 0.2)]
    assert losses == pytest.approx([0.0, 0.5 * 0.8**2])


def test_whitened_advantages_have_mean_zero_and_variance_one():
    x = load_script("ppo/ppo_rag.py").whiten(torch.tensor([1.0, 2.0, 6.0]))
    assert x.mean().item() == pytest.approx(0, abs=1e-6) and (x**2).mean().item() == pytest.approx(1)


@settings(deadline=None, max_examples=50)
@given(value=floats(-1e4, 1e4, width=32), count=integers(1, 300))
@example(value=0.1, count=256)
@example(value=0.7, count=256)
@example(value=1000.7, count=100)
def test_equal_advantages_are_whitened_to_zero(value, count):
    found = load_script_once().whiten(torch.full((count,), value))
    assert (found == 0).all() and found.shape == (count,)


@functools.cache
def load_script_once():
    """The program, for functions that read no constant."""
    return load_script("ppo/ppo_rag.py")


@pytest.mark.parametrize("offset, error", [(0.0, 3e-6), (100.3, 3e-4)])  # REWARD_CLIP is 100
def test_advantages_are_whitened_as_in_float64(offset, error):
    x = offset + 0.5 * torch.randn(256, generator=torch.Generator().manual_seed(0))
    exact = x.double().numpy()
    wanted = (exact - exact.mean()) / math.sqrt(exact.var() + 1e-8)
    assert np.abs(load_script_once().whiten(x).double().numpy() - wanted).max() < error


def test_losses_equal_those_of_float64_written_from_the_paper():
    """Random batches of 1 to 9 episodes, ratios near 1 and far from it, value clipping on and off."""
    script = load_script_once()
    for seed in range(30):
        draw = np.random.default_rng(seed)
        rows = int(draw.integers(1, 10))
        drawn = draw.standard_normal((6, rows)) * (0.01, 1, 9)[seed % 3]
        new, old, advantages, values, before, returns = drawn
        clip, near_value = draw.uniform(0.05, 0.5), draw.choice([0.0, 0.3])
        policy, value = [], []
        for i in range(rows):
            ratio = math.exp(new[i] - old[i])
            policy.append(-min(ratio * advantages[i], min(max(ratio, 1 - clip), 1 + clip) * advantages[i]))
            clipped = before[i] + min(max(values[i] - before[i], -near_value), near_value)
            errors = [values[i] - returns[i], clipped - returns[i] if near_value else 0.0]
            value.append(max(error**2 for error in errors) / 2)
        tensors = {
            name: torch.from_numpy(x)
            for name, x in (
                ("new", new),
                ("old", old),
                ("advantages", advantages),
                ("values", values),
                ("before", before),
                ("returns", returns),
            )
        }
        found = script.policy_loss(tensors["new"], tensors["old"], tensors["advantages"], clip)
        assert found.tolist() == pytest.approx(policy, rel=1e-12, abs=1e-12)
        found = script.value_loss(tensors["values"], tensors["before"], tensors["returns"], near_value)
        assert found.tolist() == pytest.approx(value, rel=1e-12, abs=1e-12)


def test_log_probabilities_entropy_and_metrics_of_a_step_equal_float64(rag, world):
    """The joint softmax over TOP_KS x TEMPERATURES x RERANKS, by numpy from the weights."""
    script, trainer = quick(rag, world, N_STEPS=13, LEARNING_RATE=0.0)
    torch.manual_seed(2)
    with torch.no_grad():
        trainer.policy.scale.mul_(0.1)  # some are beyond the clamp
        for parameter in trainer.policy.parameters():
            parameter.normal_()
    batch = trainer.rollout()
    trainer.compute_advantages(batch)
    weights = {name: x.double().numpy() for name, x in trainer.policy.state_dict().items()}

    def layer(name, x):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    seen = (batch.observations.double().numpy() - weights["mean"]) / weights["scale"]
    assert np.abs(seen).max() > 5
    hidden = np.tanh(layer("second", np.tanh(layer("first", seen.clip(-5, 5)))))
    logits = layer("actor", hidden)
    assert logits.shape == (13, 8)
    top = logits.max(1, keepdims=True)
    every = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
    wanted = every[range(13), batch.actions.numpy()]
    assert batch.logprobs.tolist() == pytest.approx(wanted.tolist(), abs=1e-4)
    assert batch.values.tolist() == pytest.approx(layer("critic", hidden)[:, 0].tolist(), abs=1e-4)
    chunk = torch.tensor([12, 3, 7, 0, 1])
    metrics = trainer.optimizer_step(batch, chunk)
    entropy = -(np.exp(every) * every).sum(1)[chunk.numpy()].mean()
    assert metrics["entropy"] == pytest.approx(entropy, abs=1e-4)
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6) and metrics["clip_fraction"] == 0
    batch.logprobs -= 0.5  # the policy has moved: every ratio is exp(.5)
    metrics = trainer.optimizer_step(batch, chunk)
    assert metrics["approx_kl"] == pytest.approx(math.exp(0.5) - 1.5, abs=1e-4)
    assert metrics["max_ratio_deviation"] == pytest.approx(math.exp(0.5) - 1, abs=1e-4)
    gains = (batch.advantages[chunk] > 0).float().mean().item()
    assert metrics["clip_fraction"] == pytest.approx(gains) and 0 < gains < 1


def test_the_entropy_bonus_has_a_gradient(rag):
    found = []
    for coef in (0.0, 0.5):
        torch.manual_seed(3)
        trainer = rag(ENTROPY_COEF=coef, RESUME="no").RAGTrainer()
        with torch.no_grad():  # far from uniform, where the entropy is flat
            trainer.policy.actor.bias.copy_(torch.arange(8.0))
        torch.manual_seed(4)
        batch = trainer.rollout()
        trainer.compute_advantages(batch)
        trainer.optimizer_step(batch, torch.arange(16))
        found.append(trainer.policy.actor.bias.grad.clone())
    assert (found[0] - found[1]).abs().max() > 1e-3


def quick(rag, world, **constants):
    """A trainer whose answers other tests may have made: the seconds go into what is tested."""
    script = rag(CACHE_DIR=str(world / "cache"), RERANKER="lexical", RESUME="no", **constants)
    return script, script.RAGTrainer()


def test_an_optimizer_step_by_hand_with_no_two_constants_equal(rag, world):
    """Gradient and weights in float64, from the formula in the program's header and AdamW's."""
    numbers = {
        "CLIP_RANGE": 0.13,
        "VALUE_CLIP_RANGE": 0.07,
        "VALUE_LOSS_COEF": 0.6,
        "ENTROPY_COEF": 0.03,
        "MAX_GRAD_NORM": 0.4,
        "LEARNING_RATE": 0.011,
        "WEIGHT_DECAY": 0.21,
        "HIDDEN_SIZE": 5,
        "N_STEPS": 12,
    }
    script, trainer = quick(rag, world, **numbers)
    assert trainer.policy.first.out_features == trainer.policy.second.out_features == 5
    torch.manual_seed(1)
    with torch.no_grad():
        trainer.policy.actor.weight.normal_(std=0.5)
    batch = trainer.rollout()
    batch.logprobs += 0.3 * torch.randn(12)
    batch.values += 0.2 * torch.randn(12)
    script.WHITEN_ADVANTAGES = False
    trainer.compute_advantages(batch)
    assert torch.equal(batch.advantages, batch.rewards - batch.values)
    script.WHITEN_ADVANTAGES = True
    trainer.compute_advantages(batch)
    chunk = torch.tensor([0, 2, 3, 5, 7, 8, 11])
    policy = copy.deepcopy(trainer.policy).double()
    every, values = policy(batch.observations[chunk].double())
    r, old, seen = (x[chunk].double() for x in (batch.rewards, batch.logprobs, batch.values))
    ratio = (every[range(7), batch.actions[chunk]] - old).exp()
    whole = batch.rewards.double() - batch.values.double()
    advantage = ((whole - whole.mean()) / (whole.var(unbiased=False) + 1e-8).sqrt())[chunk]
    policy_losses = -torch.minimum(ratio * advantage, ratio.clip(0.87, 1.13) * advantage)
    near = seen + (values - seen).clip(-0.07, 0.07)
    value_losses = torch.maximum((values - r) ** 2, (near - r) ** 2) / 2
    entropy = -(every.exp() * every).sum(1)
    loss = (policy_losses + 0.6 * value_losses - 0.03 * entropy).mean()
    loss.backward()
    norm = torch.cat([x.grad.flatten() for x in policy.parameters()]).norm()
    assert norm > 0.4 and ((ratio < 0.87) | (ratio > 1.13)).any() and (near != values).any()
    metrics = trainer.optimizer_step(batch, chunk)
    parts = {"policy_loss": policy_losses, "value_loss": value_losses, "entropy": entropy}
    for key, want in parts.items():
        assert metrics[key] == pytest.approx(want.mean().item(), abs=1e-5), key
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for mine, own in zip(policy.parameters(), trainer.policy.parameters()):
        gradient = mine.grad * 0.4 / norm
        assert torch.allclose(own.grad.double(), gradient, atol=1e-6)
        want = mine * (1 - 0.011 * 0.21) - 0.011 * gradient / (gradient.abs() + 1e-8)
        assert torch.allclose(own.double()[gradient.abs() > 1e-5], want[gradient.abs() > 1e-5], atol=1e-4)


def test_an_update_passes_over_all_episodes_as_often_as_it_says_at_the_schedules_rates(rag, world):
    """Both ends of warm-up and of each schedule."""
    numbers = {"N_STEPS": 10, "BATCH_SIZE": 4, "GROUP_EPOCHS": 3, "MAX_STEPS": 11, "LEARNING_RATE": 0.02}
    script, trainer = quick(rag, world, **numbers, WARMUP_STEPS=3)
    chunks = []

    def spy(batch, chunk):
        chunks.append(chunk.tolist())
        rates.append(trainer.optimizer.param_groups[0]["lr"] / 0.02)
        return {"max_ratio_deviation": 0.0}

    trainer.optimizer_step = spy
    trainer.run.halvings = 2
    warm = {0: 1 / 3, 1: 2 / 3, 2: 1.0}
    for use, kind, want in (
        (True, "linear", {**warm, 3: 1.0, 5: 0.75, 10: 1 / 8}),
        (True, "cosine", {**warm, 3: 1.0, 5: 0.5 + 0.5**1.5, 10: 0.5 - 0.5 * math.cos(math.pi / 8)}),
        (True, "plateau", {**warm, 3: 0.25, 10: 0.25}),
        (False, "linear", {**warm, 3: 1.0, 10: 1.0}),
    ):
        script.USE_LR_SCHEDULER, script.LR_SCHEDULER_TYPE = use, kind
        found = {}
        for steps_done in want:
            trainer.run.step = steps_done + 1
            chunks.clear()
            rates = []
            metrics = trainer.update(None)
            assert [len(chunk) for chunk in chunks] == [4, 4, 2] * 3
            passes = [[row for chunk in chunks[n : n + 3] for row in chunk] for n in (0, 3, 6)]
            assert all(sorted(rows) == list(range(10)) for rows in passes) and passes[0] != passes[1]
            (found[steps_done],) = set(rates)
            assert metrics["learning_rate"] == pytest.approx(0.02 * rates[0])
        assert found == pytest.approx(want), (use, kind)


def test_a_rollout_asks_every_training_question_once_an_epoch_and_every_draw(rag, world):
    script, trainer = quick(rag, world, DRAWS=3, N_STEPS=9)  # 18 questions to train on
    batches = [trainer.rollout() for _ in range(4)]
    rows = [batch.rows.tolist() for batch in batches]
    train = trainer.table.splits["train"]
    assert sorted(rows[0] + rows[1]) == sorted(rows[2] + rows[3]) == sorted(train) and rows[:2] != rows[2:]
    assert {draw for batch in batches for draw in batch.draws.tolist()} == {0, 1, 2}
    for batch in batches:
        got = trainer.table.rewards[batch.rows, batch.actions, batch.draws]
        assert torch.equal(batch.rewards, got)


def test_which_questions_are_in_which_split_is_the_split_seeds_alone(rag):
    found = {}
    for seeds in ((1, 0), (2, 0), (1, 7)):
        script = rag(SEED=seeds[0], SPLIT_SEED=seeds[1], SAMPLE=25)
        found[seeds] = [(row["question"], row["split"]) for row in script.load_questions(print)[0]]
    assert found[1, 0] == found[2, 0] != found[1, 7]
    assert {len(rows) for rows in found.values()} == {25}


def test_each_part_of_the_reward_has_its_own_weight(rag, world):
    script, trainer = quick(rag, world, EM_WEIGHT=1.3, F1_WEIGHT=0.7, ROUGE_WEIGHT=0.1)
    responses = ["Arle town", "town Arle near", "x"]  # F1 1, .8, 0; ROUGE-L 1, .4, 0
    found = trainer.compute_rewards(["?"] * 3, responses, ["Arle town"] * 3)
    assert found.tolist() == pytest.approx([2.1, 0.7 * 0.8 + 0.1 * 0.4, 0])


def test_the_clocks_seconds_are_a_cost_too(rag, world):
    small = {"TEMPERATURES": (0.0,), "TOP_KS": (1,), "FIXED_ACTION": (1, 0.0, 0)}
    script, trainer = quick(rag, world, **small, COST="seconds", COST_WEIGHT=3.0, EM_WEIGHT=1.5)
    parts = trainer.table.metrics
    assert torch.equal(parts["cost"], parts["seconds"]) and parts["seconds"].min() > 0
    assert torch.allclose(trainer.table.rewards, 1.5 * parts["em"] + 0.5 * parts["f1"] - 3 * parts["seconds"])


# ---------------------------------------------------------------- what is read and answered


def test_top_k_decides_how_many_paragraphs_the_generator_reads(rag, monkeypatch):
    script = rag(TEMPERATURES=(0.0,), RERANKS=(0,), FIXED_ACTION=(3, 0.0, 0))
    seen = {}
    answers = script.Generator.answers

    def spy(self, prompts, temperature, seed):
        for prompt in prompts:
            seen.setdefault(len(re.findall(r"^\[\d+\]", prompt, re.MULTILINE)), []).append(prompt)
        return answers(self, prompts, temperature, seed)

    monkeypatch.setattr(script.Generator, "answers", spy)
    table = script.RAGTrainer().table
    assert sorted(seen) == [1, 3] and len(seen[1]) == len(seen[3]) == len(table.questions)
    one = next(prompt for prompt in seen[1] if "Where was Ada born?" in prompt)
    assert "[1] Ada: Ada was born in Arle in 1900 ." in one
    assert one.endswith("QUESTION: Where was Ada born?\nANSWER:")


@pytest.mark.parametrize("limit", [34, 45, 60, 75, 90, 105, 1000])
def test_a_prompt_has_the_most_paragraphs_that_fit_and_says_how_many(rag, world, limit):
    script = rag()
    generator = script.Generator(script.GENERATOR, torch.device("cpu"))
    paragraphs = [{"title": name, "text": f"{name} was born in Arle ."} for name in NAMES[:8]]
    whole = [generator.prompt("Where was Ada born?", paragraphs[:n]) for n in range(9)]
    assert [n for _, n in whole] == list(range(9))
    lengths = [len(generator.tokenizer(prompt)["input_ids"]) for prompt, _ in whole]
    generator.limit = limit
    prompt, fit = generator.prompt("Where was Ada born?", paragraphs)
    assert fit == max(n for n in range(9) if lengths[n] <= limit)
    assert prompt == whole[fit][0]


def test_prompts_that_do_not_fit_are_counted_and_said(rag, capsys):
    script = rag(MAX_PROMPT_TOKENS=55)
    script.RAGTrainer()
    said = capsys.readouterr().out
    assert re.search(r"WARNING: \d+ of 256 prompts left out paragraphs that do not fit 55 tokens", said)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_an_answer_does_not_depend_on_the_batch_and_its_tokens_are_counted(rag, world, kind):
    script = rag(GENERATOR=f"{world}/{kind}")
    generator = script.Generator(script.GENERATOR, torch.device("cpu"))
    prompts = ["Where was Ada born?", "QUESTION: Who is older, Ada or Bea? ANSWER:", "Kim lives in a town"]
    together = generator.answers(prompts, 0.0, 0)
    assert together == [generator.answers([prompt], 0.0, 0)[0] for prompt in prompts]
    assert len({text for text, _ in together}) > 1
    for prompt, (_text, tokens) in zip(prompts, together):
        own = len(generator.tokenizer(prompt)["input_ids"])
        assert own < tokens <= own + 4


@pytest.mark.parametrize("kind, before", [("llama", [5, 5]), ("t5", [0])])
def test_answers_of_unequal_length_end_where_they_end(rag, world, monkeypatch, kind, before):
    script = rag(GENERATOR=f"{world}/{kind}")
    generator = script.Generator(script.GENERATOR, torch.device("cpu"))
    town, near, end, pad = (
        generator.tokenizer.convert_tokens_to_ids(word) for word in ("Arle", "near", "</s>", "<pad>")
    )
    wrote = torch.tensor([[*before, town, end, pad, pad], [*before, near, town, near, end]])
    monkeypatch.setattr(generator.model, "generate", lambda **read: wrote)
    assert generator.answers(["Ada Bea", "Cid Dov"], 0.0, 0) == [("Arle", 4), ("near Arle near", 6)]


def test_a_temperature_samples_the_whole_distribution_and_zero_is_greedy(rag, world):
    """No hidden top-k of 50: more than fifty different first words among 600 warm answers."""
    script = rag(MAX_NEW_TOKENS=1)
    generator = script.Generator(script.GENERATOR, torch.device("cpu"))
    prompts = ["Where was Ada born?"] * 600
    cold = {text for text, _ in generator.answers(prompts, 0.0, 1)}
    warm = [text for text, _ in generator.answers(prompts, 50.0, 1)]
    assert len(cold) == 1 and len(set(warm)) > 60
    assert warm == [text for text, _ in generator.answers(prompts, 50.0, 1)]  # of its seed alone
    assert warm != [text for text, _ in generator.answers(prompts, 50.0, 2)]


def test_each_block_draw_and_temperature_has_its_own_seed(rag, monkeypatch):
    """Else the twin answers of two blocks are drawn by the same random numbers."""
    script = rag(DRAWS=2, TEMPERATURES=(0.5, 1.0), RERANKS=(0,), FIXED_ACTION=(3, 1.0, 0))
    seeds = {}
    answers = script.Generator.answers

    def spy(self, prompts, temperature, seed):
        seeds.setdefault((temperature, tuple(prompts)), []).append(seed)
        return answers(self, prompts, temperature, seed)

    monkeypatch.setattr(script.Generator, "answers", spy)
    script.RAGTrainer()
    every = [seed for some in seeds.values() for seed in some]
    assert len(every) == len(set(every)) == 4 * 2 * 2 * 2  # blocks, top_ks, temperatures, draws
    again = dict(seeds)
    seeds.clear()
    for path in Path(script.CACHE_DIR).glob("*"):
        path.unlink()
    script.SEED = 9
    script.RAGTrainer()
    assert seeds == again  # whatever SEED is


def test_sampling_for_the_table_leaves_the_runs_random_numbers_alone(rag, monkeypatch):
    script = rag()
    generator = script.Generator(script.GENERATOR, torch.device("cpu"))
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    forks = []
    fork_rng = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: forks.append(devices) or fork_rng(devices))
    generator.answers(["Where was Ada born?"], 1.0, 7)
    assert torch.equal(torch.rand(3), want)
    assert forks == [[]]  # on the CPU no GPU's


def test_the_reranker_scores_a_pair_alone_as_in_a_batch_and_sorts_by_it(rag, world):
    script = rag()
    qa = script.QASystem(*script.load_questions(print)[1:], torch.device("cpu"))
    texts = [f"{name} was born in Arle ." + " near" * (7 * n % 16) for n, name in enumerate(NAMES)]
    asked = "Where was Ada born?"
    alone = [qa.reranker.scores(asked, [text]).item() for text in texts]
    assert qa.reranker.scores(asked, texts).tolist() == pytest.approx(alone, abs=1e-4)
    question = "Where was Cid born?"
    best = qa.retriever.search(question, script.RERANK_DEPTH)[0]
    paragraphs = [qa.corpus[i] for i in best]
    scores = qa.reranker.scores(question, [f"{p['title']}: {p['text']}" for p in paragraphs])
    assert qa.ranked(question, 0) == best[:3]
    assert qa.ranked(question, 1) == [best[n] for n in scores.argsort(descending=True, stable=True)[:3]]


def test_trigrams_find_an_old_spelling_and_prefer_what_is_rare(rag):
    people = ("Ada Merrow", "Ada Tinsel", "Ada Corman")
    corpus = [{"title": name, "text": "was born in Arle ."} for name in people]
    script = rag(RERANKER="lexical")
    qa = script.Trigrams(corpus)
    texts = [script.paragraph_text(paragraph) for paragraph in corpus]
    scores = qa.scores("Where was Ada Tinsele born?", texts)
    assert scores.argmax() == 1 and scores[1] > 1.3 * scores.sort().values[1]
    assert set(qa.grams.build_analyzer()("Ada, 7!")) == {" ad", "ada", "da ", " 7 "}
    counts = {" ad": 3, "ada": 3, "da ": 3, " ar": 1, "arl": 1, "rl ": 1}  # of three texts, one word each
    alone = script.Trigrams([{"title": "Ada", "text": ""}] * 2 + [{"title": "Ada", "text": "Arl"}])
    rare = {gram: (1 + math.log(4 / (1 + count))) ** 2 for gram, count in counts.items()}
    shared = rare[" ad"] + rare["ada"] + rare["da "]
    wanted = shared / (shared * sum(rare.values())) ** 0.5
    assert alone.scores("ada", ["Ada: Arl"]).item() == pytest.approx(wanted)
    assert alone.scores("ada ada arl", ["Ada: Arl"]).item() == pytest.approx(1.0)  # a repeat counts once
    assert qa.scores(texts[0], [texts[0]]).item() == pytest.approx(1.0)
    assert qa.scores("zzz", texts).tolist() == [0.0] * 3
    trainer = rag(RERANKER="lexical").RAGTrainer()
    assert {rerank for _, _, rerank in trainer.table.actions} == {0, 1}


def test_below_the_rerankers_depth_stands_what_bm25_found(rag, world):
    script = rag(RERANK_DEPTH=3, TOP_KS=(2, 8), FIXED_ACTION=(2, 1.0, 0), RERANKER="lexical")
    qa = script.QASystem(*script.load_questions(print)[1:], torch.device("cpu"))
    for question in ("Where was Cidde born near Arle?", "Who is older, Adah or Pia?"):
        plain, sorted_ = qa.ranked(question, 0), qa.ranked(question, 1)
        assert len(plain) == 8 and sorted_[3:] == plain[3:] and sorted(sorted_[:3]) == sorted(plain[:3])
        texts = [script.paragraph_text(qa.corpus[i]) for i in sorted_[:3]]
        scores = qa.reranker.scores(question, texts)
        assert scores.tolist() == sorted(scores.tolist(), reverse=True)


def test_a_rerankers_pairs_fit_whatever_their_length_and_it_needs_no_pad_token(rag, tmp_path):
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_labels=1,
        pad_token_id=None,
        bos_token_id=None,
        max_position_embeddings=96,
    )
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    save(LlamaForSequenceClassification(config), tokenizer, tmp_path / "padless")
    reranker = rag().Reranker(str(tmp_path / "padless"), torch.device("cpu"))
    texts = ["Ada : born in Arle", "near", "sea " * 700]
    for question in ("Where was Ada born?", "Ada " * 700):
        alone = [reranker.scores(question, [text]).item() for text in texts]
        assert reranker.scores(question, texts).tolist() == pytest.approx(alone, abs=1e-4)
    assert reranker.limit == 96


def test_bm25_finds_the_words_and_equal_scores_keep_the_corpus_order(rag):
    script = rag()
    texts = ["sea", "old mill", "sea", "town sea"]
    corpus = [{"title": f"t{n}", "text": text} for n, text in enumerate(texts)]
    ids, scores = script.Retriever(corpus).search("the sea?", 4)
    assert ids == [0, 2, 3, 1] and scores[0] == scores[1] > scores[2] > scores[3] == 0
    for wordless in ("?", "W 5 ?", "", "what of the"):
        ids, scores = script.Retriever(corpus).search(wordless, 3)
        assert ids == [0, 1, 2] and scores.tolist() == [0, 0, 0]
    with pytest.raises(script.UserError, match="no paragraph has a word of two letters"):
        script.Retriever([{"title": "The", "text": "of a"}])


def test_a_titles_words_count_as_often_as_its_weight(rag):
    corpus = [{"title": "Ada Cole", "text": "sea mill"}, {"title": "Bea Dune", "text": "Ada Ada"}]
    found = [rag(TITLE_WEIGHT=weight).Retriever(corpus).search("Ada?", 2)[0] for weight in (0, 1, 3)]
    assert found == [[1, 0], [1, 0], [0, 1]]


def test_the_observation_entry_by_entry(rag):
    script = rag()
    paragraphs = [{"title": "Ada", "text": "Ada was born in Arle"}]
    paragraphs.append({"title": "Bea Cole", "text": "near the sea"})
    scores = np.array([4.0, 3.0, 1.0])
    vocabulary = {"where", "was", "ada", "or", "born"}
    got = script.observe("Where was Ada or Zed born?", scores, paragraphs, vocabulary)
    assert tuple(got) == script._OBSERVATION
    want = {
        "words": 6,
        "capitalised": 2,
        "unknown": 1 / 6,
        "has_or": 1,
        "commas": 0,
        "has_where": 1,
        "has_who": 0,
        "yes_no": 0,
        "s1": 4,
        "s1_per_word": 4 / 6,
        "s2/s1": 0.75,
        "s3/s1": 0.25,
        "s4/s1": 0,
        "s20/s1": 0,
        "gap": 0.25,
        "near": 1,
        "overlap1": 3 / 6,
        "overlap2": 3 / 6,
        "names1": 0.5,
        "names2": 0.5,
        "title1": 1,
        "title2": 0,
    }
    assert {key: got[key] for key in want} == pytest.approx(want)
    more = [*paragraphs, {"title": "x", "text": "born"}, {"title": "y", "text": "zed or"}, {"title": "where"}]
    more[-1]["text"] = "was"  # the fifth counts no more
    got = script.observe("Where was Ada or Zed born?", scores, more, vocabulary)
    four = {"overlap1": 3 / 6, "overlap2": 3 / 6, "overlap4": 5 / 6, "names2": 0.5, "names4": 1.0}
    assert {key: got[key] for key in four} == pytest.approx(four)
    assert script.observe("Was Ada born?", scores, paragraphs, vocabulary)["yes_no"] == 1
    assert np.isfinite(list(script.observe("?", np.array([]), [], set()).values())).all()


# ---------------------------------------------------------------- data


def test_no_question_of_the_test_is_trained_on(rag, world, tmp_path):
    again = tmp_path / "again"
    again.mkdir()
    (again / "corpus.jsonl").write_text((world / "corpus.jsonl").read_text())
    lines = (world / "questions.jsonl").read_text()
    (again / "questions.jsonl").write_text(lines + lines.replace("Where was", "where  WAS"))  # each twice
    questions, corpus = rag(DATASET={"path": str(again), "type": "folder"}).load_questions(print)
    texts = {}
    for row in questions:
        texts.setdefault(row["split"], []).append(" ".join(row["question"].lower().split()))
    assert {split: len(rows) for split, rows in texts.items()} == {"test": 8, "validation": 6, "train": 18}
    assert len({text for rows in texts.values() for text in rows}) == 32
    assert questions[0].keys() == {"id", "question", "answer", "gold_docs", "type", "split"}
    for row in questions:
        titles = {corpus[n]["title"] for n in row["gold_docs"]}
        assert titles <= set(row["question"].replace("?", "").replace(",", "").split())


def test_only_the_training_questions_scale_the_observation(rag):
    trainer = rag().RAGTrainer()
    seen = trainer.table.observations[trainer.table.splits["train"]]
    assert torch.allclose(trainer.policy.mean, seen.mean(0))
    assert not torch.allclose(trainer.policy.mean, trainer.table.observations.mean(0))


HOTPOT = {
    "question": "Where was the maker born?",
    "answer": "Arle",
    "type": "bridge",
    "level": "easy",
    "_id": "1",
    "supporting_facts": [["Mill", 0], ["Ada", 0]],
    "context": [["Mill", ["Ada made it.", " It is old."]], ["Ada", ["Born in Arle."]], ["Cole", ["A town."]]],
}


def test_hotpots_own_file_is_read_its_paragraphs_once(rag, tmp_path):
    second = {**HOTPOT, "question": "What is old?", "supporting_facts": [["Mill", 1]], "answer": "Mill"}
    (tmp_path / "hotpot.json").write_text(json.dumps([HOTPOT, second]))
    spec = {"path": str(tmp_path / "hotpot.json"), "type": "hotpotqa"}
    script = rag(DATASET=spec, VALIDATION_QUESTIONS=1, TEST_QUESTIONS=1)
    with pytest.raises(
        script.UserError, match="2 questions leave none to train on beside TEST_QUESTIONS = 1 and VALID"
    ):
        script.load_questions(print)
    questions, corpus = script.from_hotpot([(1, HOTPOT), (2, second)], "x")
    assert [title for title, _ in corpus] == ["Mill", "Ada", "Cole"]
    assert list(corpus)[0][1] == "Ada made it. It is old."
    assert [row["gold_docs"] for row in questions] == [[0, 1], [0]]
    columns = {"title": ["Mill", "Ada", "Cole"], "sentences": [s for _, s in HOTPOT["context"]]}
    facts = {"title": ["Mill", "Ada"], "sent_id": [0, 0]}
    hub = {**HOTPOT, "context": columns, "supporting_facts": facts}
    assert script.from_hotpot([(1, hub)], "x") == script.from_hotpot([(1, HOTPOT)], "x")
    far = {**HOTPOT, "supporting_facts": [["Gone", 0], ["Ada", 0]]}  # as in the fullwiki format
    assert script.from_hotpot([(1, far)], "x")[0][0]["gold_docs"] == [1]


# ---------------------------------------------------------------- table, cache, reward


def test_a_kill_while_the_cache_fills_loses_one_block_and_the_table_is_the_same(rag, tmp_path, monkeypatch):
    whole = rag(CACHE_DIR=str(tmp_path / "other"), DRAWS=2).RAGTrainer().table
    script = rag(DRAWS=2)
    made = []
    answer_block = script.answer_block

    def killed(qa, questions, missing):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(questions)
        return answer_block(qa, questions, missing)

    monkeypatch.setattr(script, "answer_block", killed)
    with pytest.raises(KeyboardInterrupt):
        script.RAGTrainer()
    (cache,) = (tmp_path / "cache").glob("answers_*.jsonl")
    assert len(script.read_cache(cache)) == 2 * 8 * (2 * 2 * (1 + 2))
    script = rag(DRAWS=2)
    made = []
    answer_block_2 = script.answer_block
    monkeypatch.setattr(script, "answer_block", lambda *a: made.append(a[1]) or answer_block_2(*a))
    table = script.RAGTrainer().table
    assert len(made) == 2 and table.responses == whole.responses and torch.equal(table.read, whole.read)
    made.clear()
    script.RAGTrainer()
    assert not made


def cached(folder):
    (path,) = Path(folder).glob("*.jsonl")
    return [record for line in path.read_text().splitlines() if line for record in json.loads(line)]


def test_greedy_answers_do_not_depend_on_how_many_questions_are_answered_at_once(rag, tmp_path):
    """Greedy answers: what is sampled has a seed of each block."""
    tables = []
    for count in (5, 1000):
        script = rag(
            QUESTIONS_AT_ONCE=count,
            TEMPERATURES=(0.0,),
            FIXED_ACTION=(3, 0.0, 0),
            CACHE_DIR=str(tmp_path / f"{count}"),
        )
        tables.append(script.RAGTrainer().table)
    one, other = tables
    assert one.responses == other.responses and len({str(row) for row in one.responses}) > 1
    for name in ("read", "observations", "rewards"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_draws_of_an_action_differ_and_a_greedy_one_has_but_one(rag, tmp_path):
    table = rag(DRAWS=3).RAGTrainer().table
    warm = [a for a, (_, temperature, _) in enumerate(table.actions) if temperature > 0]
    cold = [a for a in range(len(table.actions)) if a not in warm]
    assert all(len(set(row[a])) == 1 for row in table.responses for a in cold)
    assert sum(len(set(row[a])) > 1 for row in table.responses for a in warm) > 30
    records = cached(tmp_path / "cache")
    assert {r["draw"] for r in records if r["temperature"] == 0} == {0}


def test_more_actions_answer_only_what_is_missing(rag, monkeypatch):
    rag().RAGTrainer()
    script = rag(TOP_KS=(1, 2, 3))
    asked = []
    answer_block = script.answer_block

    def spy(qa, questions, missing):
        asked.extend(missing)
        return answer_block(qa, questions, missing)

    monkeypatch.setattr(script, "answer_block", spy)
    script.RAGTrainer()
    assert {top_k for top_k, *_ in asked} == {2}


@pytest.mark.parametrize(
    "constant, value",
    [
        ("PROMPT", "{contexts} {question}"),
        ("PARAGRAPH", "{title} {text}"),
        ("MAX_NEW_TOKENS", 3),
        ("CHAT_TEMPLATE", False),
        ("RERANK_DEPTH", 5),
        ("TITLE_WEIGHT", 1),
    ],
)
def test_what_an_answer_depends_on_is_in_the_caches_name(rag, constant, value):
    paths = []
    for changed in ({}, {constant: value}, {"EM_WEIGHT": 2.0, "SEED": 9}):
        script = rag(**changed)
        qa = script.QASystem([{"title": "Ada", "text": "Born in Arle ."}], torch.device("cpu"))
        paths.append(script.cache_path(qa))
    assert paths[0] != paths[1] and paths[0] == paths[2]


@pytest.mark.parametrize(
    "name, method",
    [("Retriever", "search"), ("Reranker", "scores"), ("Generator", "answers"), ("QASystem", "ranked")],
)
def test_a_part_that_is_replaced_gets_answers_of_its_own(rag, name, method):
    """A subclass that overrides a method; a comment is no other part."""
    paths = []
    for replaced in (False, True, True):
        script = rag()
        if replaced:
            plain = getattr(getattr(script, name), method)
            mine = {method: lambda self, *rest, plain=plain: plain(self, *rest)}
            setattr(script, name, type("Mine", (getattr(script, name),), mine))
        trainer = script.RAGTrainer()
        paths.append(script.cache_path(trainer.qa))
    assert paths[0] != paths[1] == paths[2] and all(path.exists() for path in paths)


def test_a_comment_in_a_part_leaves_its_answers_in_use(rag):
    script = rag()

    class One:
        def search(self):
            return 1

    class Other:
        def search(self):
            # the same
            return 1  # as above

    one, other = (script.source_of(some()) for some in (One, Other))
    assert one == other != script.source_of(script.Trigrams([{"title": "Ada", "text": "Ada"}]))


def test_a_chat_template_goes_around_the_prompt_unless_told_not_to(rag):
    prompts = []
    for wanted in (True, False):
        script = rag(CHAT_TEMPLATE=wanted, PROMPT="{contexts}Q {question}")
        generator = script.Generator(script.GENERATOR, torch.device("cpu"))
        generator.tokenizer.chat_template = "<{{ messages[0].role }}>{{ messages[0].content }}"
        prompts.append(generator.prompt("where", [])[0])
    assert prompts == ["<user>Q where", "Q where"]


def test_a_chat_has_one_beginning_of_the_text(rag, monkeypatch):
    """The template writes it, and so does the tokenizer of a Llama."""
    script = rag(PROMPT="{contexts}Q {question}")
    generator = script.Generator(script.GENERATOR, torch.device("cpu"))
    tokenizer = generator.tokenizer
    begin = tokenizer.eos_token
    pieces = {"single": f"{begin} $A", "special_tokens": [(begin, tokenizer.eos_token_id)]}
    tokenizer._tokenizer.post_processor = TemplateProcessing(**pieces)
    read = []

    def generate(input_ids, **options):
        read.append(input_ids[0].tolist().count(tokenizer.eos_token_id))
        return input_ids

    monkeypatch.setattr(generator.model, "generate", generate)
    for template in (None, "{{ eos_token }}{{ messages[0].content }}"):
        tokenizer.chat_template = template
        generator.answers([generator.prompt("where", [])[0]], 0.0, 0)
    assert read == [1, 1]


def test_lines_of_the_cache_that_are_half_written_are_answered_again(rag, tmp_path, monkeypatch):
    table = rag().RAGTrainer().table
    (cache,) = (tmp_path / "cache").glob("*.jsonl")
    cache.write_bytes(cache.read_bytes()[:-40])
    again = rag().RAGTrainer().table
    assert again.responses == table.responses
    script = rag()
    monkeypatch.setattr(script, "answer_block", None)  # all is there
    assert script.RAGTrainer().table.responses == table.responses


def test_the_reward_is_its_parts_and_weights_cost_nothing(rag, tmp_path):
    weights = {"EM_WEIGHT": 2.0, "F1_WEIGHT": 0.25, "ROUGE_WEIGHT": 0.5, "COST_WEIGHT": 0.1}
    rag().RAGTrainer()
    script = rag(**weights, COST_TOKENS=10.0)
    script.answer_block = None  # nothing is answered again
    table = script.RAGTrainer().table
    parts = table.metrics
    want = 2 * parts["em"] + 0.25 * parts["f1"] + 0.5 * parts["rouge_l"] - 0.1 * parts["cost"]
    assert torch.allclose(table.rewards, want)
    script.REWARD_CLIP = 0.1
    clipped = script.RAGTrainer().table.rewards
    assert torch.allclose(clipped, want.clamp(-0.1, 0.1)) and want.abs().max() > 0.1
    row = table.questions[3]
    records = cached(tmp_path / "cache")
    for a, (top_k, temperature, rerank) in enumerate(table.actions):
        action = (row["question"], top_k, temperature, rerank)
        (record,) = [r for r in records if tuple(r[key] for key in script._KEYS[:4]) == action]
        assert table.responses[3][a] == [record["response"]] and record["pairs"] == 6 * rerank
        assert parts["cost"][3, a, 0].item() == pytest.approx(record["tokens"] / 10 + 6 * rerank / 4)
        assert parts["em"][3, a, 0].item() == script.rewards.em_score(record["response"], row["answer"])


def hand_table(script):
    """Four questions (two to train on), two actions, one draw."""
    rewards = torch.tensor([[1.0, 0.0], [0.4, 0.6], [0.0, 1.0], [1.0, 0.2]])[:, :, None]
    questions = [{"type": kind, "gold_docs": [1], "ranked_0": [0, 0, 1], "ranked_1": [1]} for kind in "aabb"]
    return script.SimpleNamespace(
        questions=questions,
        actions=[(1, 0.0, 0), (3, 1.0, 0)],
        rewards=rewards,
        observations=torch.ones(4, 1),
        metrics={"reward": rewards, "em": rewards},
        types=np.array(list("aabb")),
        splits={"train": [0, 1], "validation": [2], "test": [2, 3]},
    )


def test_baselines_and_oracle_by_hand(rag):
    script = rag()
    figures = script.baseline_figures(hand_table(script))
    assert figures["best_fixed"]["action"] == {"top_k": 1, "temperature": 0.0, "rerank": 0}
    got = {name: figure["test"]["reward"] for name, figure in figures.items() if name != "every_action"}
    assert got == pytest.approx(
        {
            "fixed": 0.6,
            "random": 0.55,
            "best_fixed": 0.5,
            "best_by_type": 0.5,
            "tree": 0.5,
            "oracle_greedy": 0.5,
            "oracle": 1.0,
        }
    )
    assert figures["best_fixed"]["train"]["reward"] == pytest.approx(0.7)
    assert [f["test"]["reward"] for f in figures["every_action"]] == pytest.approx([0.5, 0.6])


def test_the_table_on_the_terminal_is_of_the_training_questions_and_the_baselines_of_the_tests(rag):
    script = rag(TEMPERATURES=(0.0,), FIXED_ACTION=(3, 0.0, 1))
    table = hand_table(script)
    table.actions = [(1, 0.0, 0), (3, 0.0, 1)]
    table.metrics = {key: table.rewards for key in ("reward", "em", "f1", "cost")}
    table.shown = list(table.metrics)
    figures = script.baseline_figures(table)
    lines = script.table_lines(table, figures, ["random", "best_fixed", "oracle"])
    assert [line.split()[-5:] for line in lines[:2]] == [
        ["BM25", "@1", "0.000", "@3", "1.000"],
        ["reranked", "@1", "1.000", "@3", "1.000"],
    ]
    assert [line.split() for line in lines[4:-4]] == [["a", "0.700*", "0.300"]]  # "b" is not trained on
    assert [line.split("em")[0].split() for line in lines[-3:]] == [
        ["random", "reward", "0.550"],
        ["best", "fixed", "reward", "0.500"],
        ["oracle", "reward", "1.000"],
    ]


def test_the_gain_is_paired_with_each_rule_and_its_interval_resamples_questions(rag):
    script = rag()
    table = hand_table(script)
    found = script.test_figures(table, [2, 3], torch.tensor([1, 0]), script.baseline_figures(table))
    assert found["random"]["reward"] == pytest.approx(0.55)
    assert set(found["gains"]) == {"best_fixed", "best_by_type", "tree"}
    for gain in found["gains"].values():
        assert gain == {"gain": pytest.approx(0.5), "interval": [0.0, 1.0]}
    table.shown = ["reward", "em", "f1", "cost"]
    *_, last = script.test_lines(table, {**found, "policy": table_means(1.0)})
    assert last.split() == "tree 0.500, gain over it +0.500 (95% interval +0.000 to +1.000)".split()
    low, high = script.bootstrap_interval(torch.linspace(0, 1, 400, dtype=torch.float64))
    assert (0.5 - low, high - 0.5) == pytest.approx((1.96 * 0.289 / 20,) * 2, rel=0.08)


def table_means(value):
    return dict.fromkeys(("reward", "em", "f1", "cost"), value)


def test_the_rules_are_learnt_from_the_training_questions_and_the_trees_size_from_the_validation(rag):
    """By hand: type "a" is best with action 0, "b" with 1; what is observed tells more."""
    script = rag()
    kinds = ["a"] * 30 + ["b"] * 30 + ["new"]
    x = torch.arange(61) % 30
    rewards = torch.zeros(61, 3, 1)
    rewards[:30, 0], rewards[:30, 1] = 0.8, 0.1
    rewards[30:, 0], rewards[30:, 1] = 0.1, 0.7
    rewards[x < 10, 2] = 1.0  # within both types
    train = [q for q in range(60) if q % 3]
    rest = [q for q in range(60) if q % 3 == 0]
    table = script.SimpleNamespace(
        types=np.array(kinds),
        rewards=rewards,
        actions=[(1, 0.0, 0)] * 3,
        observations=torch.stack([x.float(), (torch.arange(61) >= 30).float()], 1),
        splits={"train": train, "validation": rest[::2], "test": [*rest[1::2], 60]},
    )
    found = {name: actions.tolist() for name, actions in script.rules(table).items()}
    best = rewards[train].mean(0).argmax().item()
    assert found["best_fixed"] == [best] * 61
    assert found["best_by_type"] == [0] * 30 + [1] * 30 + [best]
    assert found["tree"] == [2 if n < 10 else int(q >= 30) for q, n in enumerate(x.tolist())]
    rewards[rest[::2]] = torch.tensor([9.0, 0.0, 0.0])[:, None]  # the validation questions' choice
    changed = script.rules(table)
    assert changed["tree"].tolist() != found["tree"]
    rewards[table.splits["test"]] = torch.tensor([0.0, 0.0, 99.0])[:, None]  # changes nothing
    assert all(torch.equal(actions, changed[name]) for name, actions in script.rules(table).items())


def test_recall_by_hand(rag):
    rows = [{"gold_docs": [1, 2], "ranked_0": [2, 5, 1]}, {"gold_docs": [7], "ranked_0": [1, 2, 3]}]
    rows += [{"gold_docs": [], "ranked_0": [1, 2, 3]}]  # names none
    recall = rag().recall_at
    assert [recall(rows, 0, k) for k in (1, 2, 3)] == [0.25, 0.25, 0.5]
    assert math.isnan(recall(rows[2:], 0, 1))


# ---------------------------------------------------------------- runs


def test_the_pictures_of_a_run_are_drawn(trained, drawing):
    script, trainer = trained
    trainer.run.draw_plots()
    script.draw_learning(trainer.run.folder, trainer.run.title, trainer.table, trainer.figures)
    tested = json.loads((trainer.run.folder / "eval_test.json").read_text())
    script.draw_actions(trainer.run.folder, trainer.run.title, tested["actions"])
    pictures = [path.read_bytes()[:4] for path in trainer.run.folder.glob("*.png")]
    assert pictures == [b"\x89PNG"] * 4


def test_the_picture_of_actions_counts_every_episode(trained):
    """Whatever decimals a temperature has; samples of other actions do not count."""
    script, trainer = trained
    episodes = read(trainer.run.folder / "logs/samples.jsonl")
    found = script.sampled_actions(episodes, trainer.table.actions)
    assert len(found) == len(episodes) == 64 and found[-1][0] == 4
    chosen = [trainer.table.actions[number] for _, number in found]
    assert chosen == [tuple(episode[key] for key in script._ACTION) for episode in episodes]
    third = {"step": 7, "top_k": 1.0, "temperature": 0.333333, "rerank": 0.0}
    assert script.sampled_actions([third, {**third, "rerank": 1.0}], [(1, 1, 0), (1, 1 / 3, 0)]) == [(7, 1)]


def test_the_first_ratio_is_one_and_every_file_is_there(trained):
    script, trainer = trained
    out = trainer.run.folder
    records = read(out / "logs/metrics.jsonl")
    train = [r for r in records if r["phase"] == "train"]
    assert [r["step"] for r in train] == [1, 2, 3, 4]
    assert all(r["first_ratio_deviation"] < 1e-5 for r in train)
    wanted = (
        "reward em f1 cost seconds policy_loss value_loss entropy approx_kl clip_fraction grad_norm "
        "advantage_mean learning_rate explained_variance top_k temperature rerank episodes_per_second epoch"
    ).split()
    assert all(math.isfinite(r[key]) for r in train for key in wanted)
    assert [r["timesteps"] for r in train] == [16, 32, 48, 64]
    clock = [r["wall_seconds"] for r in train]
    assert sorted(clock) == clock and clock[0] > 0
    names = {p.name for p in out.iterdir() if not p.name.startswith(".")}
    assert names == {
        "best",
        "logs",
        "step_4",
        "training_config.json",
        "eval_test.json",
        "rag_learning.png",
        "rag_actions.png",
        "training_metrics_detailed.png",
        "ppo_rag_metrics_with_entropy.png",
        *(f"eval_baseline_{n}.json" for n in BASELINES),
    }
    episodes = read(out / "logs/samples.jsonl")
    assert len(episodes) == 4 * 16
    columns = "step id question answer response reward em f1 cost seconds top_k temperature rerank".split()
    assert list(episodes[0]) == columns
    means = [sum(e["reward"] for e in episodes if e["step"] == n) / 16 for n in (1, 2, 3, 4)]
    assert means == pytest.approx([r["reward"] for r in train], abs=1e-5)
    found = json.loads((out / "eval_test.json").read_text())
    for rule, gain in found["gains"].items():
        assert gain["gain"] == pytest.approx(found["policy"]["reward"] - found[rule]["reward"]), rule


def test_the_policy_is_saved_with_its_actions_and_loads_again(trained):
    script, trainer = trained
    policy = script.Policy.from_pretrained(trainer.run.folder / "best/policy")
    assert policy.config.actions == [list(action) for action in trainer.table.actions]
    rows = trainer.table.splits["test"]
    found = json.loads((trainer.run.folder / "eval_test.json").read_text())
    assert found["policy"] == trainer.measure(rows, trainer.choose(rows, policy=policy))


def test_every_figure_is_of_its_split_and_comes_out_of_the_files_a_second_way(trained):
    """best/, eval_test and baselines from the cache alone, with the rewards that `trained` sets."""
    script, trainer = trained
    out = trainer.run.folder
    asked = trainer.table.questions
    answers = {}
    for r in cached(script.CACHE_DIR):
        answers.setdefault((r["question"], r["top_k"], r["temperature"], r["rerank"]), []).append(r)
    actions = [(k, t, r) for k in (1, 3) for t in (0.0, 1.0) for r in (0, 1)]
    worth = []
    for row in asked:
        worth.append([])
        for action in actions:
            found = []
            for r in answers[row["question"], *action]:
                cost = r["tokens"] / 50 + r["pairs"] / 7
                em, f1 = (
                    score(r["response"], row["answer"])
                    for score in (script.rewards.em_score, script.rewards.f1_score)
                )
                found.append(1.3 * em + 0.7 * f1 - 0.09 * cost)
            worth[-1].append(sum(found) / len(found))
    worth = torch.tensor(worth, dtype=torch.float64)
    splits = {}
    for q, row in enumerate(asked):
        splits.setdefault(row["split"], []).append(q)
    best_fixed = worth[splits["train"]].mean(0).argmax()
    by_type = {
        kind: worth[[q for q in splits["train"] if asked[q]["type"] == kind]].mean(0).argmax()
        for kind in ("one", "two")
    }

    def reward(split, policy, generator=None):
        rows = splits[split]
        logprobs = policy(trainer.table.observations[rows])[0]
        chosen = logprobs.argmax(1)
        if generator:
            chosen = torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
        return worth[rows, chosen].mean().item()

    best = script.Policy.from_pretrained(out / "best/policy")
    kept = json.loads((out / "best/metrics.json").read_text())
    test = json.loads((out / "eval_test.json").read_text())
    log = [record for record in read(out / "logs/metrics.jsonl") if record["phase"] == "eval"]
    rows = splits["test"]
    got = [
        kept["reward"],
        log[-1]["reward"],
        log[-1]["sampled_reward"],
        max(r["reward"] for r in log),
        test["policy"]["reward"],
        *(
            test[name]["reward"]
            for name in ("random", "best_fixed", "best_by_type", "oracle_greedy", "oracle")
        ),
    ]
    stream = torch.Generator().manual_seed(6)  # SEED + 1
    want = [
        reward("validation", best),
        reward("validation", trainer.policy),
        reward("validation", trainer.policy, stream),
        reward("validation", best),
        reward("test", best),
        worth[rows].mean().item(),
        worth[rows, best_fixed].mean().item(),
        statistics.mean(worth[q, by_type[asked[q]["type"]]].item() for q in rows),
        worth[rows][:, [0, 1, 4, 5]].amax(1).mean().item(),
        worth[rows].amax(1).mean().item(),
    ]
    assert got == pytest.approx(want, abs=1e-5)
    for name, chosen in (("fixed", actions.index((3, 1.0, 0))), ("best_fixed", best_fixed)):
        figure = json.loads((out / f"eval_baseline_{name}.json").read_text())
        for split, part in splits.items():
            assert figure[split]["reward"] == pytest.approx(worth[part, chosen].mean().item(), abs=1e-5)


def test_what_the_test_questions_are_worth_changes_nothing_before_the_test(rag, world, tmp_path):
    found = []
    for name, worth in (("one", 0.0), ("two", 5.0)):
        small = {"OUTPUT_DIR": str(tmp_path / name), "EVAL_EVERY_N_STEPS": 1, "MAX_STEPS": 3}
        script, trainer = quick(rag, world, **small)
        rows = trainer.table.splits["test"]
        noise = torch.rand(len(rows), 8, 1, generator=torch.Generator().manual_seed(0))
        trainer.table.rewards[rows] += worth * noise
        trainer.table.metrics["seconds"] = torch.zeros(len(trainer.table.questions), 8, 1)
        trainer.train()
        test = json.loads((tmp_path / name / "eval_test.json").read_text())
        rules = {
            rule: json.loads((tmp_path / name / f"eval_baseline_{rule}.json").read_text())["validation"]
            for rule in ("best_fixed", "best_by_type", "tree")
        }
        weights = (tmp_path / name / "best/policy/model.safetensors").read_bytes()
        found.append((untimed(tmp_path / name / "logs/metrics.jsonl"), weights, rules, test))
    (*one, test), (*two, other) = found
    assert one == two and test["policy"]["reward"] + 1 < other["policy"]["reward"]


def test_explained_variance_and_the_means_of_a_step_by_hand(rag, world):
    script, trainer = quick(rag, world, N_STEPS=4, BATCH_SIZE=4)
    parts = {"reward": torch.tensor([1.0, 0.0, 0.5, 0.5]), "em": torch.tensor([1.0, 0, 0, 1])}
    batch = script.SimpleNamespace(
        rewards=parts["reward"],
        values=torch.tensor([0.8, 0.1, 0.5, 0.2]),
        metrics={**parts, "f1": parts["em"], "cost": parts["em"]},
        rows=torch.arange(4),
        actions=[0, 1, 2, 3],
        draws=[0] * 4,
    )
    found = {}
    trainer.run.log_step = lambda metrics, count, *others, **more: found.update(metrics, count=count)
    trainer.run.next_step()
    trainer.record(batch, dict.fromkeys(["policy_loss", "value_loss", "entropy"], 0.0))
    assert found["reward"] == 0.5 and found["em"] == 0.5 and found["count"] == 4
    assert found["advantage_mean"] == pytest.approx((0.2 - 0.1 + 0 + 0.3) / 4)
    unexplained = statistics.variance([0.2, -0.1, 0, 0.3]) / statistics.variance([1.0, 0, 0.5, 0.5])
    assert found["explained_variance"] == pytest.approx(1 - unexplained, abs=1e-4)


def test_answers_after_training_are_best_s_and_before_its_end_the_policys_as_it_is(rag, world):
    script, trainer = quick(rag, world, MAX_STEPS=2)
    number = len(trainer.table.actions)

    def prefer(action):
        with torch.no_grad():
            trainer.policy.actor.bias.copy_(50.0 * torch.nn.functional.one_hot(torch.tensor(action), number))

    prefer(2)
    assert trainer.answer("Where was Ada born?")[1] == trainer.table.actions[2]
    trainer.evaluate = lambda: {"reward": -float(trainer.run.step)}  # the first is the best
    trainer.train()
    prefer(1)
    assert trainer.answer("Where was Ada born?")[1] == trainer.table.actions[2]
    again = script.RAGTrainer("yes")  # another day
    with torch.no_grad():
        again.policy.actor.bias.copy_(trainer.policy.actor.bias)
    assert again.answer("Where was Ada born?")[1] == trainer.table.actions[2]


def test_one_question_is_answered_as_in_the_table(trained):
    script, trainer = trained
    row = trainer.table.splits["test"][0]
    text, action = trainer.answer(trainer.table.questions[row]["question"])
    chosen = trainer.choose([row], policy=trainer.best).item()
    assert action == trainer.table.actions[chosen]
    if action[1] == 0:
        assert text == trainer.table.responses[row][chosen][0]


def test_six_steps_equal_three_a_kill_a_resume_and_three_bit_for_bit(rag, tmp_path, monkeypatch):
    constants = {"MAX_STEPS": 6, "SAVE_EVERY_N_STEPS": 3, "DRAWS": 2, "USE_LR_SCHEDULER": True}
    one, two = tmp_path / "one", tmp_path / "two"
    rag(**constants, OUTPUT_DIR=str(one)).RAGTrainer().train()
    script = rag(**constants, OUTPUT_DIR=str(two))
    trainer = script.RAGTrainer()
    update = trainer.update

    def killed(batch):
        if trainer.run.step == 4:
            raise KeyboardInterrupt
        return update(batch)

    monkeypatch.setattr(trainer, "update", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert (two / "step_3").exists() and not (two / "step_6").exists()
    torch.manual_seed(99)
    rag(**constants, OUTPUT_DIR=str(two)).RAGTrainer("yes").train()
    same = (
        "step_6/policy/model.safetensors",
        "best/policy/model.safetensors",
        "logs/samples.jsonl",
        "eval_test.json",
    )
    for name in same:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    assert_same_state(one / "step_6/training_state.pt", two / "step_6/training_state.pt")
    assert untimed(one / "logs/metrics.jsonl") == untimed(two / "logs/metrics.jsonl")


def test_evaluating_never_changes_training(rag, tmp_path):
    for every in (0, 1):
        out = {"OUTPUT_DIR": str(tmp_path / str(every)), "EVAL_EVERY_N_STEPS": every}
        rag(**out).RAGTrainer().train()
    name = "step_4/policy/model.safetensors"
    assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "1" / name).read_bytes()


def test_a_finished_run_goes_on_from_its_last_policy_though_the_test_took_the_best(rag, tmp_path):
    """The checkpoint at the end is made after the test."""
    whole = tmp_path / "whole"
    longer = tmp_path / "longer"

    def train(out, steps):
        script = rag(OUTPUT_DIR=str(out), MAX_STEPS=steps, EVAL_EVERY_N_STEPS=0, SAVE_EVERY_N_STEPS=0)
        trainer = script.RAGTrainer()
        trainer.evaluate = lambda: {"reward": -float(trainer.run.step)}  # the first is the best
        trainer.train()

    train(whole, 6)
    train(longer, 3)
    train(longer, 6)
    last = (whole / "step_6/policy/model.safetensors").read_bytes()
    assert last == (longer / "step_6/policy/model.safetensors").read_bytes()
    assert last != (whole / "best/policy/model.safetensors").read_bytes()


def test_evaluating_needs_no_run(rag):
    metrics = rag().RAGTrainer().evaluate()
    assert {"reward", "em", "f1", "cost", "sampled_reward"} <= metrics.keys()


def test_a_cache_that_cannot_be_written_is_one_sentence(rag, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    script = rag(CACHE_DIR=str(tmp_path / "file"))
    monkeypatch.setattr("sys.argv", ["ppo_rag.py"])
    with pytest.raises(SystemExit) as end:
        script.train_main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and "\nppo_rag.py: CACHE_DIR = " in said


def test_ppo_finds_the_better_action_of_each_kind_of_question(rag):
    """A table where one action is right for one kind of question and another for the other."""
    script = rag(MAX_STEPS=60, N_STEPS=64, BATCH_SIZE=32, LEARNING_RATE=0.01, EVAL_EVERY_N_STEPS=0)
    trainer = script.RAGTrainer()
    table = trainer.table
    table.rewards[:] = 0.0
    for q, row in enumerate(table.questions):
        table.rewards[q, 1 if row["type"] == "one" else 6] = 1.0
    trainer.train()
    rows = table.splits["test"]
    want = [1 if table.questions[q]["type"] == "one" else 6 for q in rows]
    assert trainer.choose(rows).tolist() == want


def test_baseline_only_trains_nothing_and_leaves_a_run_alone(rag, tmp_path):
    rag(MAX_STEPS=2).RAGTrainer().train()
    before = (tmp_path / "run/logs/metrics.jsonl").read_bytes()
    figures = rag(BASELINE_ONLY=True).RAGTrainer().train()
    assert figures["oracle"]["test"]["reward"] >= figures["best_fixed"]["test"]["reward"]
    assert (tmp_path / "run/logs/metrics.jsonl").read_bytes() == before
    assert (tmp_path / "run/step_2").exists() and not list((tmp_path / "run").glob("old_*"))


def test_a_reward_of_your_own_takes_over(rag, capsys):
    script = rag()

    class Mine(script.RAGTrainer):
        def compute_rewards(self, questions, responses, answers):
            self.reward_parts["words"] = torch.tensor([float(len(r.split())) for r in responses])
            return self.reward_parts["words"]

    trainer = Mine()
    table = trainer.table
    assert torch.allclose(table.rewards, table.metrics["words"] - 0.05 * table.metrics["cost"])
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if " words " in line and " cost " in line]
    assert [line.split()[0] for line in shown if line.startswith("  ")][:3] == ["fixed", "random", "best"]
    assert any(line.startswith("Test: reward ") for line in shown)
    assert sum(line.startswith("R:") and " words:" in line for line in lines) == 4


def test_after_ctrl_c_the_best_policy_answers(rag):
    trainer = rag(EVAL_EVERY_N_STEPS=1).RAGTrainer()
    record = trainer.record

    def interrupted(batch, metrics):
        record(batch, metrics)
        trainer.run.signal = 2

    trainer.record = interrupted
    trainer.train()
    assert trainer.run.step == 1 and trainer.best is not None


@pytest.mark.parametrize(
    "name, values, says",
    [
        ("reward", [1.0] * 256, "the name 'reward' belongs to a metric of the trainer"),
        ("cost", [1.0] * 256, "the name 'cost' belongs to a metric of the trainer"),
        ("top_k", [1.0] * 256, "the name 'top_k' belongs to a metric of the trainer"),
        ("entropy", [1.0] * 256, "the name 'entropy' belongs to a metric of the trainer"),
        ("response", [1.0] * 256, "the name 'response' belongs to a metric of the trainer"),
        ("mine", [1.0] * 3, "reward_parts['mine'] must return 256 finite numbers"),
        ("mine", [math.nan] * 256, "reward_parts['mine'] must return 256 finite numbers"),
    ],
)
def test_parts_of_an_own_reward_that_cannot_be_are_refused(rag, world, name, values, says):
    script = rag(CACHE_DIR=str(world / "cache"), RERANKER="lexical")

    class Mine(script.RAGTrainer):
        def compute_rewards(self, questions, responses, answers):
            self.reward_parts[name] = values
            return [0.0] * len(responses)

    with pytest.raises(script.UserError, match=re.escape(says)):
        Mine()


def test_one_action_has_its_table(rag, world):
    only = {"TOP_KS": (1,), "TEMPERATURES": (0.0,), "RERANKS": (0,), "FIXED_ACTION": (1, 0.0, 0)}
    figures = quick(rag, world, **only, BASELINE_ONLY=True)[1].train()
    assert figures["tree"]["test"] == figures["fixed"]["test"] == figures["oracle"]["test"]


def test_more_paragraphs_than_there_are_are_all_that_there_are_and_it_says_so(rag, world, capsys):
    actions = {"TOP_KS": (20, 100), "TEMPERATURES": (0.0,), "FIXED_ACTION": (20, 0.0, 0)}
    table = quick(rag, world, **actions, MAX_NEW_TOKENS=2)[1].table
    assert "TOP_KS = (20, 100): all from 20 up read the whole corpus" in capsys.readouterr().out
    for rerank in (0, 1):  # the corpus has 20
        less, more = (table.actions.index((k, 0.0, rerank)) for k in (20, 100))
        assert [row[less] for row in table.responses] == [row[more] for row in table.responses]
        assert torch.equal(table.rewards[:, less], table.rewards[:, more])


# ---------------------------------------------------------------- STAGE=evaluate


@pytest.fixture
def trained_copy(trained, tmp_path, monkeypatch):
    """(module, trainer, folder): a copy of the trained run, which its module evaluates; no answer is new."""
    script, trainer = trained
    folder = tmp_path / "mine"
    shutil.copytree(trainer.run.folder, folder)
    monkeypatch.setattr(script, "OUTPUT_DIR", str(folder))
    monkeypatch.setattr(script, "STAGE", "evaluate")
    monkeypatch.setattr(script, "answer_block", None)
    return script, trainer, folder


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_an_evaluation_has_the_figures_of_the_test_and_changes_no_file_of_the_run(trained_copy, capsys):
    script, trainer, folder = trained_copy
    before = contents(folder)
    figures = script.evaluate_policy(script.RAGTrainer)
    after = contents(folder)
    name = f"eval_best_{Path(script.DATASET['path']).stem}"
    assert after.keys() - before.keys() == {f"{name}.json", f"{name}.jsonl"}
    assert all(after[file] == content for file, content in before.items())
    tested = json.loads((folder / "eval_test.json").read_text())
    facts = json.loads((folder / f"{name}.json").read_text())
    records = read(folder / f"{name}.jsonl")
    assert facts["figures"] == figures and facts["questions"] == len(records) == 8
    assert facts["actions"] == tested["actions"] and facts["policy"] == str(folder / "best/policy")
    assert facts["settings"]["EM_WEIGHT"] == 1.3 and facts["settings"]["GENERATOR"] == script.GENERATOR
    assert {"reward", "em", "f1", "cost", "seconds", "top_k"} < tested["policy"].keys() < figures.keys()
    for key, figure in figures.items():
        assert figure["low"] <= figure["mean"] <= figure["high"]
        mean = sum(record[key] for record in records) / 8
        assert mean == pytest.approx(figure["mean"], abs=1e-6)
    for key, value in tested["policy"].items():
        assert figures[key]["mean"] == pytest.approx(value), key
    assert figures["fixed_reward"]["mean"] == pytest.approx(tested["fixed"]["reward"])
    assert figures["oracle_reward"]["mean"] == pytest.approx(tested["oracle"]["reward"])
    for record in records:
        em = sum(script.rewards.em_score(response, record["answer"]) for response in record["responses"])
        assert len(record["responses"]) == 2 and record["em"] == pytest.approx(em / 2)
        assert len(record["paragraphs"]) == record["top_k"]
    said = capsys.readouterr().out.splitlines()
    assert sum("95% interval" in line for line in said) == len(figures)
    step = json.loads((folder / "best/metrics.json").read_text())["step"]
    shown = f"{folder}/best/policy (step {step}): 8 questions"
    assert said[-1] == f"{shown}; written to {folder / name}.json and .jsonl"


def test_a_checkpoint_or_a_folder_of_another_run_is_evaluated_too(trained_copy, monkeypatch):
    script, trainer, folder = trained_copy
    world = Path(script.DATASET["path"]).stem
    for policy, name in (("step_4", "step_4"), (f"{folder}/best", "mine_best")):
        monkeypatch.setattr(script, "EVALUATE_POLICY", policy)
        script.evaluate_policy(script.RAGTrainer)
        facts = json.loads((folder / f"eval_{name}_{world}.json").read_text())
        assert facts["policy"] == f"{folder / Path(policy).name}/policy"
    monkeypatch.setattr(script, "EVALUATE_POLICY", f"{folder}/best/policy")
    assert script.policy_to_evaluate() == folder / "best/policy"


def test_only_the_test_questions_are_answered_and_as_in_the_table_of_the_training(rag, tmp_path):
    """Blocks of three: the ninth question completes the third block, or its sampled answers would differ."""
    constants = {"QUESTIONS_AT_ONCE": 3, "TOP_KS": (3,), "RERANKS": (0,), "MAX_STEPS": 1}
    whole = rag(**constants).RAGTrainer()
    whole.train()
    script = rag(**constants, STAGE="evaluate", CACHE_DIR=str(tmp_path / "new"))
    script.evaluate_policy(script.RAGTrainer)
    assert len(cached(tmp_path / "new")) == 9 * 2
    again = script.RAGTrainer("no")
    assert again.table.responses == whole.table.responses[:9]
    assert again.table.splits["test"] == whole.table.splits["test"]


def test_another_data_set_is_scored_whole_without_the_training_data(rag, world, tmp_path):
    """Its corpus is another, and SAMPLE bounds it."""
    actions = {"RERANKER": "lexical", "TEMPERATURES": (0.0,), "FIXED_ACTION": (1, 0.0, 0)}
    rag(**actions, MAX_STEPS=1).RAGTrainer().train()
    (tmp_path / "new").mkdir()
    (tmp_path / "new/corpus.csv").write_text("title,text\nArle,Ada was born in Arle .\nCole,A town .\n")
    lines = "".join(f"Where was {name} born?,Arle\n" for name in NAMES[:5])
    (tmp_path / "new/questions.csv").write_text("question,answer\n" + lines)
    data = {"path": str(tmp_path / "new"), "type": "folder"}
    for sample, count in ((None, 5), (3, 3)):
        script = rag(**actions, STAGE="evaluate", EVAL_DATASET=data, DATASET={}, SAMPLE=sample)
        script.evaluate_policy(script.RAGTrainer)
        name = "eval_best_new" if sample is None else "eval_best_new_2"  # other questions: another file
        assert json.loads((tmp_path / f"run/{name}.json").read_text())["questions"] == count
    records = read(tmp_path / "run/eval_best_new_2.jsonl")
    assert all(set(record["paragraphs"]) <= {"Arle", "Cole"} for record in records)


def test_figures_of_an_evaluation_by_hand(rag):
    """Of the test questions the first is answered by action 1, the second by action 0, each the best."""
    script = rag(FIXED_ACTION=(3, 1.0, 0))
    table = hand_table(script)
    corpus = [{"title": title} for title in ("zero", "one")]
    for row in table.questions:
        row |= {"id": "7", "question": "?", "answer": "!"}
    table.responses = [["a0", "a1"], ["b0", "b1"], ["c0", "c1"], ["d0", "d1"]]
    logprobs = torch.tensor([[0.3, 0.7], [0.9, 0.1]]).log()
    trainer = script.SimpleNamespace(
        table=table, policy=lambda observations: (logprobs, None), qa=script.SimpleNamespace(corpus=corpus)
    )
    by_question, records, shares = script.policy_scores(trainer)
    figures = {name: values.tolist() for name, values in by_question.items()}
    assert figures.pop("expected_reward") == pytest.approx([0.7, 0.92])
    wanted = {"reward": [1, 1], "em": [1, 1], "fixed_reward": [1, 0.2], "best_action_reward": [1, 0.2]}
    wanted |= {"oracle_reward": [1, 1], "gain_over_fixed": [0, 0.8], "gain_over_best_action": [0, 0.8]}
    assert {name: pytest.approx(values) for name, values in wanted.items()} == figures
    assert [record["responses"] for record in records] == ["c1", "d0"]
    assert [record["paragraphs"] for record in records] == [["zero", "zero", "one"], ["zero"]]
    assert [list(entry.values()) for entry in shares] == [[1, 0.0, 0, 0.5, 0.5], [3, 1.0, 0, 0.5, 0.5]]


def test_action_shares_by_hand(rag):
    script = rag()
    shares = script.action_shares(hand_table(script), [0, 1, 2, 2], torch.tensor([1, 0, 1, 0]))
    assert shares[0] == {"top_k": 1, "temperature": 0.0, "rerank": 0, "chosen": 0.5, "oracle": 0.25}
    assert shares[1] == {"top_k": 3, "temperature": 1.0, "rerank": 0, "chosen": 0.5, "oracle": 0.75}


@pytest.mark.parametrize(
    "constants, says",
    [
        (
            {"EVALUATE_POLICY": "step_7"},
            "EVALUATE_POLICY = 'step_7': there is no policy of this trainer in .*step_7: train first",
        ),
        (
            {"EVALUATE_POLICY": "{world}/none"},
            "there is no policy of this trainer in .*none: train first, or give the folder",
        ),
        ({"EVALUATE_POLICY": "{world}/llama"}, "there is no policy of this trainer in .*llama: train first"),
        ({"TOP_KS": (1, 2, 3)}, r"actions TOP_KS = \(1, 3\) TEMPERATURES = \(0.0, 1.0\) .*: take those$"),
        (
            {"SPLIT_SEED": 4},
            "has perhaps learnt from these test questions: .* SPLIT_SEED and TEST_QUESTIONS as",
        ),
        ({"TEST_QUESTIONS": 9}, "EVALUATE_POLICY = 'best' has perhaps learnt from these test questions"),
        (
            {"EVAL_DATASET": {"path": "/no/such", "type": "folder"}},
            "EVAL_DATASET: there is no folder /no/such",
        ),
        ({"EVAL_DATASET": {"path": "/no/such"}}, "EVAL_DATASET = .*: it takes {'path'"),
    ],
)
def test_what_an_evaluation_lacks_is_one_sentence(trained_copy, world, monkeypatch, constants, says):
    script, trainer, folder = trained_copy
    for key, value in constants.items():
        if key == "EVALUATE_POLICY":
            value = value.replace("{world}", str(world))
        monkeypatch.setattr(script, key, value)
    with pytest.raises(script.UserError, match=says) as error:
        script.evaluate_policy(script.RAGTrainer)
    assert len(str(error.value).splitlines()) == 1


def test_the_stage_is_chosen_on_the_command_line_and_its_constants_may_change_on_resuming(
    rag, world, tmp_path, monkeypatch, capsys
):
    small = {"MAX_STEPS": 1, "TEMPERATURES": (0.0,), "TOP_KS": (1,), "RERANKS": (0,)}
    small |= {"FIXED_ACTION": (1, 0.0, 0), "CACHE_DIR": str(world / "cache")}
    rag(**small).RAGTrainer().train()
    script = rag(**small)
    monkeypatch.setattr("sys.argv", ["ppo_rag.py", "STAGE=evaluate"])
    with pytest.raises(SystemExit) as end:
        script.train_main()
    assert end.value.code == 0 and list((tmp_path / "run").glob("eval_best_*.jsonl"))
    capsys.readouterr()
    data = {"path": "elsewhere", "type": "folder"}
    rag(**small, EVALUATE_POLICY="step_1", EVAL_DATASET=data).RAGTrainer("yes")
    said = capsys.readouterr().out
    assert "Resuming" in said and "Changed since" not in said


# ---------------------------------------------------------------- files of one's own


def own_folder(folder, corpus, questions):
    """DATASET: a folder of these files, {name: text}."""
    for name, text in {**corpus, **questions}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)


def test_a_folder_may_hold_csv_parquet_or_texts(rag, tmp_path):
    script = rag()
    asked = {"questions.csv": "question,answer,gold\nHow much?,5 euros,Card\nWhen?,nine,\n"}
    told = {"corpus.csv": 'title,text\nCard,"It costs 5 euros, yearly."\nHours,From nine.\n'}
    texts = {"corpus/a/Hours.txt": "From nine.\n", "corpus/Card.txt": "It costs 5 euros, yearly.\n"}
    folders = [own_folder(tmp_path / "csv", told, asked), own_folder(tmp_path / "texts", texts, asked)]
    table = pyarrow.csv.read_csv(f"{folders[0]}/corpus.csv")
    (tmp_path / "parquet").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "parquet/corpus.parquet")
    folders.append(own_folder(tmp_path / "parquet", {}, asked))
    for folder in folders:
        questions, corpus = script.from_folder(folder)
        assert list(corpus) == [("Card", "It costs 5 euros, yearly."), ("Hours", "From nine.")]
        assert [(row["question"], row["answer"], row["gold_docs"]) for row in questions] == [
            ("How much?", "5 euros", [0]),
            ("When?", "nine", []),
        ]


def test_paragraphs_of_a_text_end_at_blank_lines_and_headings_are_their_titles(rag, tmp_path):
    """A heading with text right below it is text; other files are left alone."""
    text = "\n\nBefore.\nStill.\n \nNext.\n\n# Fines, 2024 #\n\nTen cents.\n\n## Cards\nFive euros.\n\n"
    folder = own_folder(tmp_path, {"rules.md": text, "empty.txt": " \n", "photo.png": "no"}, {})
    rows = [record for _, record in rag().text_paragraphs(folder)]
    assert [(row["title"], row["text"]) for row in rows] == [
        ("rules", "Before.\nStill."),
        ("rules", "Next."),
        ("Fines, 2024", "Ten cents."),
        ("Fines, 2024", "## Cards\nFive euros."),
    ]


@pytest.mark.parametrize(
    "corpus, questions, says",
    [
        (
            {},
            {"questions.csv": "question,answer\na,b\n"},
            "own: it takes corpus.jsonl or corpus.csv or corpus.parquet or corpus/ with .txt or .md files$",
        ),
        (
            {"corpus/a.txt": "b\n", "corpus.csv": "title,text\na,b\n"},
            {"questions.csv": "question,answer\na,b\n"},
            "own: there are corpus.csv and corpus/ with .txt or .md files: keep one$",
        ),
        (
            {"corpus.csv": "title,text\na,b\n", "corpus.jsonl": ""},
            {"questions.csv": "question,answer\na,b\n"},
            "own: there are corpus.jsonl and corpus.csv: keep one",
        ),
        (
            {"corpus.csv": "title,text\na,b\n"},
            {},
            "own: it takes questions.jsonl or questions.csv or questions.parquet$",
        ),
        ({"corpus.csv": "title,text\na,b\n"}, {"questions.csv": "question,answer\n"}, "has no question"),
        ({"corpus.csv": "title,text\n"}, {"questions.csv": "question,answer\na,b\n"}, "has no paragraph"),
        (
            {"corpus/a.txt": ""},
            {"questions.csv": "question,reply\na,b\n"},
            r"csv line 2: there is no value for column 'answer'; the row has \['question', 'reply'\]",
        ),
        ({"corpus/a.txt": "b\n"}, {"questions.csv": "question,answer\na,\n"}, "for column 'answer'"),
        (
            {"corpus/a.txt": "b\n"},
            {"questions.csv": "question,answer\na,b\nc,d\n"},
            "2 questions leave none to",
        ),
    ],
)
def test_faults_of_a_folder_are_one_sentence(rag, tmp_path, corpus, questions, says):
    folder = own_folder(tmp_path / "own", corpus, questions)
    script = rag(DATASET={"path": folder, "type": "folder"}, TEST_QUESTIONS=None, VALIDATION_QUESTIONS=None)
    with pytest.raises(script.UserError, match=says) as error:
        script.load_questions(print)
    assert len(str(error.value).splitlines()) == 1


def test_a_file_that_is_no_text_is_named(rag, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    script = rag()
    with pytest.raises(script.UserError, match=r"DATASET: .*a\.txt: cannot be read"):
        list(script.text_paragraphs(tmp_path))


@pytest.mark.parametrize(
    "count, sizes", [(1500, (400, 200, 900)), (9000, (400, 200, 8400)), (300, (80, 40, 180)), (3, (1, 1, 1))]
)
def test_the_splits_shrink_with_the_data_unless_they_are_set(rag, count, sizes):
    script = rag(TEST_QUESTIONS=None, VALIDATION_QUESTIONS=None)
    names = script.split_names(count)
    assert tuple(map(names.count, ("test", "validation", "train"))) == sizes and names[0] == "test"
    script = rag(TEST_QUESTIONS=2, VALIDATION_QUESTIONS=1)
    assert script.split_names(5) == ["test", "test", "validation", "train", "train"]


def test_a_questions_own_seconds_are_measured_where_they_are_the_cost(rag, tmp_path, monkeypatch):
    """Answers that were timed in batches are not used."""
    small = {"TEMPERATURES": (0.0,), "TOP_KS": (1,), "RERANKS": (0,), "FIXED_ACTION": (1, 0.0, 0)}
    rag(**small).RAGTrainer()
    script = rag(**small, COST="seconds")
    batches = []
    answer_block = script.answer_block

    def spy(qa, questions, missing):
        batches.append(len(questions))
        return answer_block(qa, questions, missing)

    monkeypatch.setattr(script, "answer_block", spy)
    seconds = script.RAGTrainer().table.seconds
    assert batches == [1] * 32 and len(set(seconds.flatten().tolist())) > 20


# ---------------------------------------------------------------- bad input


def spoil(folder, name, line):
    """A copy of the toy world's folder whose file `name` ends in a line."""
    return lambda world: [
        (folder / f"{n}.jsonl").write_text((world / f"{n}.jsonl").read_text() + (line if n == name else ""))
        for n in ("corpus", "questions")
    ]


@pytest.mark.parametrize(
    "name, line, says",
    [
        (
            "questions",
            '{"question": "Who?", "gold": ["Ada"]}\n',
            "questions.jsonl line 33: there is no value for column 'answer'",
        ),
        (
            "questions",
            '{"question": "Who?", "answer": "x", "gold": ["Zed"]}\n',
            "line 33: its gold paragraph 'Zed' is not in the corpus",
        ),
        (
            "questions",
            '{"question": " ", "answer": "x", "gold": ["Ada"]}\n',
            "questions.jsonl line 33: its question is empty",
        ),
        ("questions", "no json\n", "questions.jsonl line 33: not a JSON object"),
        ("corpus", '{"title": "Z"}\n', "corpus.jsonl line 21: there is no value for column 'text'"),
    ],
)
def test_bad_lines_are_named(rag, world, tmp_path, name, line, says):
    folder = tmp_path / "bad"
    folder.mkdir()
    spoil(folder, name, line)(world)
    script = rag(DATASET={"path": str(folder), "type": "folder"})
    with pytest.raises(script.UserError, match=re.escape(says)):
        script.RAGTrainer()


def with_lines(world, folder, corpus=(), questions=()):
    """DATASET: the toy world and further records."""
    folder.mkdir()
    for name, more in (("corpus", corpus), ("questions", questions)):
        lines = "".join(json.dumps(row) + "\n" for row in more)
        (folder / f"{name}.jsonl").write_text((world / f"{name}.jsonl").read_text() + lines)
    return {"path": str(folder), "type": "folder"}


def asked(**others):
    return {"question": "Where lives Ida?", "answer": "Arle", "gold": ["Ida"], "type": "one", **others}


LONG = {"questions": [asked(question="Ada " * 6000)]}


@pytest.mark.parametrize(
    "lines, constants, says",
    [
        ({"questions": [asked(question=["Who?"])]}, {}, "questions.jsonl line 33: 'question' must be a text"),
        ({"questions": [asked(answer={"text": "Arle"})]}, {}, "line 33: 'answer' must be a text or a number"),
        ({"questions": [asked(answer=["Arle", " "])]}, {}, "questions.jsonl line 33: its answer is empty"),
        ({"questions": [asked(gold=7)]}, {}, "line 33: its gold paragraph '7' is not in the corpus"),
        (LONG, {}, "the question 'Ada Ada Ada"),
        ({}, {"GENERATOR": "{world}/gpt2"}, "MAX_PROMPT_TOKENS = 4096 allow 20"),
        ({}, {"PROMPT": "{contexts} {question} {foo}"}, "{foo}': it takes {contexts}, {question}; a"),
        ({}, {"PROMPT": "{contexts} {question} {"}, "a brace itself is written twice"),
        ({}, {"PROMPT": "{contexts}"}, "it takes {contexts}, {question}; a brace"),
        ({}, {"PROMPT": "{question}"}, "it takes {contexts}, {question}; a brace"),
        ({}, {"PARAGRAPH": "{titel}: {text}"}, "{titel}: {text}': it takes {text}, {n}, {title}; a"),
        ({}, {"PARAGRAPH": "{n} {title}"}, "it takes {text}, {n}, {title}; a brace"),
        ({}, {"DATASET": {"type": "folder"}}, "it takes {'path': ..., 'type'"),
        ({}, {"DATASET": {"path": 3, "type": "folder"}}, "it takes {'path': ..., 'type'"),
        ({"questions": [asked(question="Who \ud800?")]}, {}, r"'Who \ud800?' has a lone surrogate"),
        ({"corpus": [{"title": "Zed", "text": "\udc00"}]}, {}, r"'\udc00' has a lone surrogate"),
    ],
)
def test_odd_input_is_one_sentence_and_a_run_stays(
    rag, world, tmp_path, monkeypatch, capsys, lines, constants, says
):
    learned = GPT2Config(n_positions=24, n_embd=8, n_layer=1, n_head=1, vocab_size=200, eos_token_id=1)
    if not (world / "gpt2").exists():
        save(GPT2LMHeadModel(learned), make_tokenizer(), world / "gpt2")
    before = tmp_path / "run/step_2"
    before.mkdir(parents=True)
    constants = {
        key: x.replace("{world}", str(world)) if key == "GENERATOR" else x for key, x in constants.items()
    }
    data = with_lines(world, tmp_path / "data", **lines)
    answered = tmp_path / "answered"
    script = rag(**{"DATASET": data, "RESUME": "no", "CACHE_DIR": str(answered), **constants})
    monkeypatch.setattr("sys.argv", ["ppo_rag.py"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        script.train_main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and len(said.strip().splitlines()) == 1 and says in said
    assert before.is_dir() and not list(answered.rglob("answers_*.jsonl"))  # told before the hours


@pytest.mark.parametrize(
    "lines",
    [
        {"corpus": [{"title": 1984, "text": 7}], "questions": [asked(gold=[1984], answer=0)]},
        {"questions": [asked(gold="Ida")]},
        {"questions": [asked(gold=None), asked(question="Where lives Leo?", gold=[])]},
        {"questions": [asked(answer=["Arle", 7])]},
        {"questions": [asked(type=None)]},
        {"questions": [asked(type=3), asked(question="Where lives Leo?", type="two")]},
        {"questions": [asked(question="???"), asked(question="W 5 ?"), asked(question="!")]},
    ],
    ids=["numbers", "one gold", "no gold", "two answers", "no type", "mixed types", "no words"],
)
def test_odd_input_that_makes_sense_is_taken(rag, world, tmp_path, lines):
    places = {"CACHE_DIR": str(world / "cache"), "DATASET": with_lines(world, tmp_path / "data", **lines)}
    script = rag(**places, TEMPERATURES=(0.0,), TOP_KS=(1,), FIXED_ACTION=(1, 0.0, 0))
    trainer = script.RAGTrainer()
    assert len(trainer.table.questions) == 32 + len(lines["questions"])
    for row in lines["questions"]:
        (found,) = [q for q in trainer.table.questions if q["question"] == row["question"]]
        several = isinstance(row["answer"], list)
        assert found["answer"] == ([str(a) for a in row["answer"]] if several else str(row["answer"]))
        assert found["type"] == str(row["type"] or "")
        want = row["gold"] if isinstance(row["gold"], list) else [row["gold"]] if row["gold"] else []
        assert [trainer.qa.corpus[n]["title"] for n in found["gold_docs"]] == [str(title) for title in want]
    assert trainer.answer("?")[1] in trainer.table.actions


def test_words_that_the_generator_does_not_know_are_said(rag, world, tmp_path, capsys):
    more = [{"title": f"Zyx{n}", "text": "xa xb xc xd xe xf"} for n in range(8)]
    small = {"TEMPERATURES": (0.0,), "TOP_KS": (1,), "FIXED_ACTION": (1, 0.0, 0)}
    rag(DATASET=with_lines(world, tmp_path / "data", corpus=more), **small).RAGTrainer()
    tokens = make_tokenizer()
    lines = [(tmp_path / f"data/{name}.jsonl").read_text().splitlines() for name in ("questions", "corpus")]
    asked, told = ([json.loads(line) for line in some] for some in lines)
    texts = [row["question"] for row in asked] + [f"{row['title']}: {row['text']}" for row in told]
    ids = [token for text in texts for token in tokens(text)["input_ids"]]
    share = ids.count(tokens.unk_token_id) / len(ids)
    said = capsys.readouterr().out
    assert f"llama' reads <unk> in place of {share:.0%} of the words of DATASET (data/rag" in said
    assert share > 0.1
    script = rag(**small)
    script.warn_of_unknown_words(
        [{"question": "Where was Ada born?"}],
        script.SimpleNamespace(
            generator=script.SimpleNamespace(tokenizer=tokens), corpus=[{"title": "Ada", "text": "born"}]
        ),
        print,
    )
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "constants, says",
    [
        ({"TOP_KS": ()}, "TOP_KS = (): it takes different whole numbers from 1"),
        ({"TOP_KS": (1, 1)}, "TOP_KS = (1, 1): it takes different whole numbers"),
        ({"TEMPERATURES": (-1.0,)}, "TEMPERATURES = (-1.0,)"),
        ({"TEMPERATURES": ("hot",)}, "TEMPERATURES = ('hot',): it takes different numbers from 0"),
        ({"TEMPERATURES": (math.inf,)}, "TEMPERATURES = (inf,): it takes different numbers from 0"),
        ({"TOP_KS": (1.5,)}, "TOP_KS = (1.5,): it takes different whole numbers from 1"),
        ({"N_STEPS": 1}, "N_STEPS = 1: whitening makes one advantage 0"),
        ({"RERANKS": (0, 2)}, "RERANKS = (0, 2)"),
        ({"RERANKER": None}, "RERANKS = (0, 1): it takes 0 and, where RERANKER"),
        ({"FIXED_ACTION": (20, 0.7, 0)}, "FIXED_ACTION = (20, 0.7, 0) is none of"),
        ({"DATASET": {"path": "x", "type": "csv"}}, "it takes {'path': ..., 'type': 'folder' | 'hotpotqa' |"),
        ({"DATASET": {"path": "/no/such", "type": "folder"}}, "DATASET: there is no folder /no/such"),
        ({"DATASET": {"path": "/no/such.json", "type": "hotpotqa"}}, "/no/such.json cannot be read as JSON"),
        ({"GENERATOR": "/no/such"}, "GENERATOR = '/no/such': no such folder"),
        ({"TEST_QUESTIONS": 30}, "32 questions leave none to train on beside TEST_QUESTIONS = 30 and VALID"),
    ],
)
def test_errors_are_one_sentence(rag, constants, says):
    script = rag(**constants)
    with pytest.raises(script.UserError, match=re.escape(says)) as error:
        script.RAGTrainer()
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "text, says",
    [
        ("[]", "bad.json has no question"),
        ('{"a": 1}', "is not HotpotQA's format: it takes a list of records"),
        ("[1", "cannot be read as JSON"),
        ("5", "is not HotpotQA's format: it takes a list of records"),
        (json.dumps([{**HOTPOT, "context": [[3, ["a"]]]}]), "record 1 is not HotpotQA's"),
        ('[{"question": "x"}]', "record 1 is not HotpotQA's"),
        (json.dumps([{**HOTPOT, "answer": {"a": 1}}]), "record 1: 'answer' must be a text or a number"),
        (json.dumps([{**HOTPOT, "supporting_facts": 3}]), "record 1 is not HotpotQA's"),
    ],
)
def test_a_file_that_is_not_hotpots_is_refused(rag, tmp_path, text, says):
    (tmp_path / "bad.json").write_text(text)
    script = rag(DATASET={"path": str(tmp_path / "bad.json"), "type": "hotpotqa"})
    with pytest.raises(script.UserError, match=re.escape(says)):
        script.RAGTrainer()


def test_a_generator_that_says_nothing_is_refused(rag, monkeypatch):
    script = rag()
    monkeypatch.setattr(script.Generator, "answers", lambda self, prompts, *rest: [("", 5)] * len(prompts))
    with pytest.raises(script.UserError, match="answered none of 64 prompts: does it fit"):
        script.RAGTrainer()


def test_a_generator_that_answers_nothing_right_is_said(rag, world, capsys):
    script, trainer = quick(rag, world)
    table = trainer.table
    said = capsys.readouterr().out
    example = f"{table.responses[0][0][0]!r} where {table.questions[0]['answer']!r} is right: see PROMPT"
    assert f"WARNING: em is 0 for all 256 answers, such as {example}" in said
    table.responses[3][0][0] = table.questions[3]["answer"]
    trainer.score()
    assert "WARNING: em" not in capsys.readouterr().out


def test_a_reranker_of_two_labels_is_refused(rag, world, tmp_path):
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_labels=2,
        pad_token_id=0,
    )
    save(LlamaForSequenceClassification(config), make_tokenizer(), tmp_path / "two")
    script = rag(RERANKER=str(tmp_path / "two"))
    with pytest.raises(script.UserError, match="has 2 labels: it takes one of one label"):
        script.RAGTrainer()


def test_resuming_with_other_observations_is_refused(rag):
    rag(MAX_STEPS=2).RAGTrainer().train()
    script = rag(MAX_STEPS=4)
    count = len(script._OBSERVATION)
    script._OBSERVATION = (*script._OBSERVATION, "length")
    says = f"was trained with {count} observed numbers and actions .*: take those, or RESUME=no"
    with pytest.raises(script.UserError, match=says):
        script.RAGTrainer("yes")


def test_a_finished_run_goes_on_in_another_folder_by_its_best_policy(rag, tmp_path):
    """The table is made there; best/ of a later step than the checkpoint is never taken."""
    first = rag(MAX_STEPS=4, EVAL_EVERY_N_STEPS=1, SAVE_EVERY_N_STEPS=1, LEARNING_RATE=0.05).RAGTrainer()
    evaluate = first.evaluate
    first.evaluate = lambda: {**evaluate(), "reward": float(first.run.step == 3)}
    first.train()
    best = {name: weight.clone() for name, weight in first.best.state_dict().items()}
    assert not all(torch.equal(best[name], weight) for name, weight in first.policy.state_dict().items())
    wanted = json.loads((tmp_path / "run/eval_test.json").read_text())
    there = {"OUTPUT_DIR": str(tmp_path / "other"), "MAX_STEPS": 4}
    second = rag(**there).RAGTrainer(f"{tmp_path}/run/step_4")
    second.train()
    assert json.loads((tmp_path / "other/eval_test.json").read_text()) == wanted
    assert all(torch.equal(best[name], weight) for name, weight in second.best.state_dict().items())
    early = rag(**{**there, "MAX_STEPS": 2}).RAGTrainer(f"{tmp_path}/run/step_2")
    assert early.best is not None
    early.train()
    assert early.best is None and (tmp_path / "other/eval_test.json").exists()


def test_resuming_with_other_actions_is_refused(rag):
    rag(MAX_STEPS=2).RAGTrainer().train()
    script = rag(MAX_STEPS=4, TOP_KS=(1, 2, 3))
    with pytest.raises(script.UserError, match="was trained with .* actions .*: take those, or RESUME=no"):
        script.RAGTrainer("yes")


# ---------------------------------------------------------------- the shipped world


@pytest.mark.parametrize("word", ["SEED=one", "SEED=", "QUESTIONS=3", "help"])
def test_the_worlds_maker_takes_numbers_and_a_folder(monkeypatch, word):
    maker = runpy.run_path(str(ROOT / "data/make_rag.py"))
    monkeypatch.setattr("sys.argv", ["make_rag.py", word])
    with pytest.raises(SystemExit, match=f"takes SEED=number, OUT=folder and READER.* not '{word}'"):
        maker["main"]()


def test_the_shipped_world_is_small_whole_and_its_reader_reads(tmp_path):
    """A few questions of each type, greedily: what makes the actions differ is there."""
    folder = ROOT / "data/rag"
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 10_000_000
    places = {"OUTPUT_DIR": str(tmp_path / "run"), "CACHE_DIR": str(tmp_path / "cache")}
    few = {"SAMPLE": 80, "VALIDATION_QUESTIONS": 4, "TEST_QUESTIONS": 4, "TEMPERATURES": (0.0,)}
    few |= {"TOP_KS": (1, 8), "FIXED_ACTION": (8, 0.0, 0)}
    script = load_script("ppo/ppo_rag.py", **few, **places, BASELINE_ONLY=True)
    trainer = script.RAGTrainer()
    table = trainer.table
    em = table.metrics["em"][:, :, 0]
    titles = [trainer.qa.corpus[row["gold_docs"][0]]["title"] for row in table.questions]
    exact = [f"{title}e" not in row["question"] for title, row in zip(titles, table.questions)]

    def means(kinds, spelling=(True, False)):
        rows = [q for q, row in enumerate(table.questions) if row["type"] in kinds and exact[q] in spelling]
        return dict(zip(table.actions, em[rows].mean(0).tolist()))

    plain, reranked, many = (1, 0.0, 0), (1, 0.0, 1), (8, 0.0, 0)
    people = ("one-hop", "reworded")
    assert means(people, [True])[plain] > 0.8 and means(people, [False])[reranked] > 0.6  # within one type
    assert means(people, [False])[plain] < 0.4 and means(["work"])[plain] > 0.6
    assert means(["two-hop"])[plain] < 0.1 and means(["two-hop"])[many] > 0.2
