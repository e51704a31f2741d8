"""grpo/grpo_rec.py: the trie and what is decoded in it, the algorithm, data without leaks, resume, errors."""

import copy
import csv
import itertools
import json
import math
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from old import NATS, ROOT, assert_same_state, load_script, read, share_prompts, untimed
from hypothesis import example, given, settings
from hypothesis.strategies import floats, integers
from program import Program
from safetensors.torch import load_file
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("no_pictures")
FILE = "grpo/grpo_rec.py"
PLAIN = load_script(FILE)  # for functions that read no constant
SMALL = {
    "MAX_STEPS": 2,
    "SFT_EPOCHS": 1,
    "SFT_BATCH_SIZE": 8,
    "BATCH_SIZE": 4,
    "GROUP_SIZE": 3,
    "HIDDEN_SIZE": 16,
    "HEADS": 2,
    "LAYERS": 1,
    "SASREC_FILE": None,
    "EVAL_BEAMS": 20,
    "SAVE_EVERY_N_STEPS": 0,
    "EVAL_EVERY_N_STEPS": 0,
    "SFT_EVALUATIONS": 0,
    "MAX_HISTORY": 5,
}
PLACES = [  # uneven: one department has a single item
    "000",
    "001",
    "002",
    "010",
    "011",
    "100",
    "110",
    "111",
    "112",
    "120",
    "200",
]
CODES = {str(10 + n): [f"<{'abc'[d]}_{x}>" for d, x in enumerate(place)] for n, place in enumerate(PLACES)}


def write_world(folder, codes=CODES, rows=48, seed=0):
    """Files of a small catalogue in a folder; the constants that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    items = list(codes)
    (folder / "index.json").write_text(json.dumps(codes))
    titles = []
    for n, item in enumerate(items):
        titles.append(f"{''.join(codes[item])}\tbox of kind {n % 3} number {n}\t{item}\n")
    (folder / "items.txt").write_text("".join(titles))
    np.save(folder / "values.npy", np.random.default_rng(seed).random((len(items), len(items))))
    for split, count in {"train": rows, "valid": 9, "test": 8}.items():
        lines = []
        for n in range(count):
            history = [int(chance.choice(items)) for _ in range(chance.randint(1, 5))]
            lines.append([f"{split}{n}", str(history), chance.choice(items)])
        write_csv(folder / f"{split}.csv", lines)
    return {
        "TRAIN_FILE": f"{folder}/train.csv",
        "VALID_FILE": f"{folder}/valid.csv",
        "TEST_FILE": f"{folder}/test.csv",
        "INDEX_FILE": f"{folder}/index.json",
        "ITEM_FILE": f"{folder}/items.txt",
        "VALUES_FILE": f"{folder}/values.npy",
    }


def write_csv(path, lines):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([["user_id", "history_item_id", "item_id"], *lines])


@pytest.fixture
def rec(tmp_path):
    """rec(KEY=value, ...): the module with a small world, writing below tmp_path."""
    world = write_world(tmp_path / "world")

    def load(file=FILE, **constants):
        return load_script(file, **{**SMALL, **world, "OUTPUT_DIR": str(tmp_path / "run"), **constants})

    return load


def trainer_of(module):
    """A trainer whose random model says something else of each history."""
    trainer = module.RecTrainer()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for model in (trainer.actor, trainer.reference):
            generator.manual_seed(1)
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return trainer


def every_logprob(trainer, ids, temperature=1.0):
    """{item number: log-probability} after the prompt, the plain way: each prefix read alone, softmax over
    the codes that some item goes on with, by comparing lists."""
    codes = trainer.trie.codes.tolist()
    found = {}
    for item in range(len(codes)):
        total = 0.0
        for level, code in enumerate(codes[item]):
            prefix = codes[item][:level]
            allowed = sorted({some[level] for some in codes if some[:level] == prefix})
            with torch.no_grad():
                logits = trainer.actor(input_ids=torch.tensor([ids + prefix])).logits[0, -1] / temperature
            total += logits[allowed].log_softmax(-1)[allowed.index(code)].item()
        found[item] = total
    return found


# ---------------------------------------------------------------- the trie


def leaves(trie):
    """Items that a walk from the root reaches."""
    nodes = torch.zeros(1, dtype=torch.long)
    for level in range(trie.depth):
        _, children, open_ = trie.options(level, nodes)
        nodes = children[open_]
    return sorted(trie.item_at[nodes].tolist())


def test_the_trie_admits_exactly_the_catalogue(rec):
    module = rec()
    generator = torch.Generator().manual_seed(0)
    for depth, base, count in ((1, 9, 7), (3, 3, 14), (4, 2, 11), (2, 40, 300)):
        codes = torch.randint(base, (count, depth), generator=generator).unique(dim=0)
        codes = codes[torch.randperm(len(codes), generator=generator)]
        trie = module.Trie(codes, torch.device("cpu"))
        assert leaves(trie) == list(range(len(codes)))
        for level in range(depth):  # what leads to an item is its code
            offered, children, open_ = trie.options(level, trie.paths[:, level])
            right = (children == trie.paths[:, level + 1, None]) & open_
            assert (right.sum(1) == 1).all() and torch.equal(offered[right], codes[:, level])


# ---------------------------------------------------------------- decoding


def check_search(trainer, module, rows, width):
    prompts = [row["ids"] for row in rows]
    items, logprobs, entropies = module.search(trainer.actor, trainer.trie, prompts, width, trainer.pad_id)
    for n, row in enumerate(rows):
        wanted = every_logprob(trainer, row["ids"])
        best = sorted(wanted, key=wanted.get, reverse=True)
        found = [item for item in items[n].tolist() if item >= 0]
        assert found == best[:width]
        sums = logprobs[n].sum(1)[: len(found)]
        assert torch.allclose(sums, torch.tensor([wanted[i] for i in found]), atol=NATS)
        assert (items[n][len(best) :] == -1).all() and (logprobs[n].sum(1)[len(best) :] == -math.inf).all()


def test_beams_equal_exhaustive_search(rec):
    module = rec()
    trainer = trainer_of(module)
    rows = trainer.valid_rows
    assert len({len(row["ids"]) for row in rows}) > 2
    for width in (6, 11, 14):  # the trie has 3, 6 and 11 prefixes: these beams lose none but at the end
        check_search(trainer, module, rows, width)


def test_both_ways_to_decode_find_the_same_beams(rec):
    module = rec()
    trainer = trainer_of(module)
    assert trainer.actor in module._SHARED_DECODING
    wanted = module.best_items(trainer.actor, trainer.trie, trainer.valid_rows, 6, trainer.pad_id)
    share_prompts(module, trainer.actor, decoding=False)
    found = module.best_items(trainer.actor, trainer.trie, trainer.valid_rows, 6, trainer.pad_id)
    assert torch.equal(found, wanted)


def test_a_narrow_beam_gives_distinct_items_in_order(rec):
    module = rec()
    trainer = trainer_of(module)
    prompts = [row["ids"] for row in trainer.valid_rows]
    items, logprobs, _ = module.search(trainer.actor, trainer.trie, prompts, 2, trainer.pad_id)
    for some, sums in zip(items.tolist(), logprobs.sum(2)):
        assert len(set(some)) == 2 and sums[0] >= sums[1]


def test_samples_have_the_policys_probabilities(rec):
    module = rec(BATCH_SIZE=6000)
    trainer = trainer_of(module)
    row = trainer.valid_rows[0]
    uniform = torch.rand(3, 6000, 2, generator=torch.Generator().manual_seed(0))
    batch = module.candidates(trainer.actor, trainer.trie, [row] * 6000, 2, trainer.pad_id, uniform)
    share = batch.items.bincount(minlength=11).double() / 12000
    logprobs = every_logprob(trainer, row["ids"])
    p = torch.tensor([logprobs[i] for i in range(11)], dtype=torch.double).exp()
    assert p.sum().item() == pytest.approx(1, abs=1e-4)
    assert ((share - p).abs() < 4 * (p / 12000).sqrt() + 1e-3).all()


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("how", ["beam", "sample"])
def test_the_first_ratio_is_one(rec, how):
    module = rec(CANDIDATES=how, TEMPERATURE=1.3)
    trainer = trainer_of(module)
    batch = trainer.rollout()
    assert len({len(row["ids"]) for row in batch.rows}) > 1
    rows = torch.arange(len(batch.rows))
    logprobs, entropy = module.item_logprobs(trainer.actor, trainer.trie, batch, rows, module.TEMPERATURE)
    assert (logprobs - batch.logprobs).abs().max() < NATS
    assert (entropy - batch.entropies).abs().max() < NATS
    sums = batch.logprobs.sum(1).view(-1, module.GROUP_SIZE)
    assert (sums[:, :-1] >= sums[:, 1:]).all()  # likelier ones first: what the ranking reward ranks


def test_log_probabilities_are_those_of_rows_read_alone(rec):
    trainer = trainer_of(rec(TEMPERATURE=0.7))
    batch = trainer.rollout()
    for i in range(0, len(batch.rows), 4):
        wanted = every_logprob(trainer, batch.rows[i]["ids"], temperature=0.7)[int(batch.items[i])]
        assert batch.logprobs[i].sum().item() == pytest.approx(wanted, abs=NATS)


def test_the_reference_and_sft_are_scored_at_the_temperature_too(rec):
    trainer = trainer_of(rec(TEMPERATURE=0.7))
    batch = trainer.rollout()
    trainer.score(batch)  # the reference has the actor's weights
    assert (batch.ref_logprobs - batch.logprobs).abs().max() < NATS
    rows = trainer.sft_rows[:3]
    wanted = []
    for row in rows:
        for at, item in enumerate(row["items"]):
            ids = row["prompt"] + trainer.trie.codes[row["items"][:at]].flatten().tolist()
            wanted.append(every_logprob(trainer, ids, temperature=0.7)[item])
    found = trainer.sft_update(rows)["policy_loss"]
    assert found == pytest.approx(-sum(wanted) / (3 * len(wanted)), abs=NATS)


def test_logits_of_the_codes_alone_have_the_same_gradient_and_leave_the_model_as_it_was(rec):
    module = rec(ACTOR_MODEL=str(ROOT / "data/tiny/policy"))
    trainer = module.RecTrainer()
    batch = trainer.rollout()
    every = torch.arange(len(batch.rows))
    names = [name for name, _ in trainer.actor.named_parameters()]
    module.item_logprobs(trainer.actor, trainer.trie, batch, every, 1.0)[0].sum().backward()
    found = [p.grad.clone() for p in trainer.actor.parameters()]
    trainer.actor.zero_grad()
    logits, _ = module.response_logits(trainer.actor, batch, every)  # the plain way: the whole vocabulary
    codes = trainer.trie.codes.tolist()
    total = 0.0
    for row in range(len(batch.rows)):
        ids = batch.response_ids[row].tolist()
        for level, code in enumerate(ids):
            allowed = sorted({some[level] for some in codes if some[:level] == ids[:level]})
            logprobs = logits[3 * row + level][allowed].log_softmax(-1)
            total = total + logprobs[allowed.index(code)]
    total.backward()
    for one, p in zip(found, trainer.actor.parameters()):
        assert (one - p.grad).norm() < 1e-3 * (1e-3 + p.grad.norm())
    assert names == [name for name, _ in trainer.actor.named_parameters()]


def test_batch_size_changes_no_candidate(rec):
    found = []
    for size, parts in ((8, 1), (2, 4)):
        module = rec(BATCH_SIZE=size, GRADIENT_ACCUMULATION_STEPS=parts, CANDIDATES="sample")
        trainer = trainer_of(module)
        torch.manual_seed(3)
        found.append(trainer.rollout())
    assert torch.equal(found[0].items, found[1].items)
    assert (found[0].logprobs - found[1].logprobs).abs().max() < NATS


# ---------------------------------------------------------------- the maths


def test_group_advantages_by_hand(rec):
    module = rec()
    scores = torch.tensor([1.0, 2.0, 6.0, 5.0, 5.0, 5.0, 0.0, 0.0, 3.0])
    found = module.group_advantages(scores, 3, "none")
    assert found.tolist() == [-2.0, -1.0, 3.0, 0.0, 0.0, 0.0, -1.0, -1.0, 2.0]
    scaled = module.group_advantages(scores, 3, "group")
    assert scaled[:3].tolist() == pytest.approx([x / (7**0.5 + 1e-4) for x in (-2, -1, 3)])
    assert scaled[3:6].tolist() == [0, 0, 0]
    batch = module.group_advantages(scores, 3, "batch")
    assert batch[2].item() == pytest.approx(3 / (scores.std().item() + 1e-4))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@settings(deadline=None, max_examples=50)
@given(score=floats(-1e4, 1e4, width=32), size=integers(2, 64), groups=integers(1, 5))
@example(score=0.1, size=8, groups=4)
@example(score=0.7, size=16, groups=4)
@example(score=1000.7, size=8, groups=4)
@example(score=12345.67, size=8, groups=1)
def test_equal_scores_have_no_advantage(scale, score, size, groups):
    found = PLAIN.group_advantages(torch.full((groups * size,), score), size, scale)
    assert (found == 0).all() and found.shape == (groups * size,)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("offset", [0.0, 1000.7, -12345.67])
def test_advantages_of_large_scores_keep_their_digits(scale, offset):
    """Against float64 of the same float32 scores; one group is flat, one has seven equal scores of eight."""
    generator = torch.Generator().manual_seed(0)
    scores = offset + 0.2 * torch.rand(6 * 8, generator=generator)
    scores[:8] = offset
    scores[8:15], scores[15] = offset, offset + 0.1
    x = scores.double().numpy().reshape(6, 8)
    wanted = x - x.mean(1, keepdims=True)
    if scale != "none":
        std = x.std(1, ddof=1, keepdims=True) if scale == "group" else x.std(ddof=1)
        wanted = wanted / (std + 1e-4)
    found = PLAIN.group_advantages(scores, 8, scale)
    assert np.abs(found.double().numpy() - wanted.flatten()).max() < 3e-6


def test_a_constant_reward_moves_no_weight(rec):
    for value in (0.7, 1000.7):
        module = rec(GROUP_SIZE=8, KL_COEF=0.0, CANDIDATES="sample", MINI_BATCHES=3, LEARNING_RATE=0.1)
        module.SFT_WEIGHT_DECAY = 0.0
        trainer = trainer_of(module)
        trainer.compute_rewards = lambda histories, items, targets: [value] * len(items)
        before = [p.detach().clone() for p in trainer.actor.parameters()]
        batch = trainer.rollout()
        trainer.score(batch)
        trainer.compute_advantages(batch)
        assert trainer.update(batch)["grad_norm"] == 0
        assert all(torch.equal(a, b) for a, b in zip(before, trainer.actor.parameters()))


@pytest.mark.parametrize("kind", ["dapo", "gspo"])
def test_losses_equal_those_of_float64_written_from_the_papers(kind):
    for seed in range(20):
        draw = np.random.default_rng(seed)
        rows, codes = draw.integers(1, 9), draw.integers(1, 6)
        spread = (0.01, 1.0, 10.0)[seed % 3]
        old = -draw.random((rows, codes)) * 3
        new = old + spread * draw.standard_normal((rows, codes))
        ref = old + spread * draw.standard_normal((rows, codes))
        advantages = draw.standard_normal((rows, 1)) * (draw.random((rows, 1)) < 0.8)
        losses, ratios, kls = (np.zeros((rows, codes)) for _ in range(3))
        for i in range(rows):
            for t in range(codes):
                log_ratio = new[i, t] - old[i, t] if kind == "dapo" else (new[i] - old[i]).sum() / codes
                ratios[i, t] = math.exp(log_ratio)
                near = min(max(ratios[i, t], 1 - 0.13), 1 + 0.4)
                losses[i, t] = -min(ratios[i, t] * advantages[i, 0], near * advantages[i, 0])
                kls[i, t] = math.exp(ref[i, t] - new[i, t]) - 1 - (ref[i, t] - new[i, t])
        tensors = (torch.from_numpy(x) for x in (new, old, advantages))
        found = PLAIN.policy_loss(*tensors, kind, 0.13, 0.4)
        kl = PLAIN.kl_loss(torch.from_numpy(new), torch.from_numpy(ref))
        for mine, wanted in zip((*found, kl), (losses, ratios, kls)):
            assert_close(mine, torch.from_numpy(wanted), rtol=1e-12, atol=1e-12)


def test_constrained_log_probabilities_equal_float64_on_random_catalogues():
    """Each prefix by itself: softmax over the codes that some item goes on with, by comparing lists."""
    for seed in range(12):
        draw = np.random.default_rng(seed)
        depth, base = int(draw.integers(1, 5)), int(draw.integers(2, 7))
        codes = np.unique(draw.integers(0, base, (int(draw.integers(1, 40)), depth)), axis=0)
        codes = draw.permutation(codes)
        trie = PLAIN.Trie(torch.from_numpy(codes), torch.device("cpu"))
        temperature = float(draw.uniform(0.2, 3))
        items = codes.tolist()
        for level in range(depth):
            logits = draw.standard_normal((len(codes), len(trie.ids))) * 10
            offered, _, open_ = trie.options(level, trie.paths[:, level])
            found = PLAIN.constrained_logprobs(
                torch.from_numpy(logits).float(), trie.columns[offered], open_, temperature
            )
            entropy = PLAIN.entropy_of(found)
            for i, item in enumerate(items):
                may = sorted({other[level] for other in items if other[:level] == item[:level]})
                scaled = [logits[i, trie.ids.tolist().index(code)] / temperature for code in may]
                total = max(scaled) + math.log(sum(math.exp(x - max(scaled)) for x in scaled))
                wanted = [x - total for x in scaled]
                assert offered[i][open_[i]].tolist() == may
                assert found[i][open_[i]].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-4)
                assert (found[i][~open_[i]] == -math.inf).all()
                assert entropy[i].item() == pytest.approx(-sum(math.exp(x) * x for x in wanted), abs=1e-4)


def test_hr_and_ndcg_equal_float64_on_random_lists():
    draw = np.random.default_rng(0)
    for _ in range(20):
        rows, width, items = (int(draw.integers(*between)) for between in ((1, 9), (3, 30), (30, 50)))
        lists = np.array([draw.permutation(items)[:width] for _ in range(rows)])
        lists[:, draw.integers(2, width + 1) :] = -1  # fewer items than beams
        targets = draw.integers(0, items, rows)
        metrics = PLAIN.list_metrics(
            torch.from_numpy(lists), [{"target": target} for target in targets], torch.ones(items)
        )
        for k in (1, 3, 5, 10, 20):
            hits, gains = [], []
            for some, target in zip(lists.tolist(), targets):
                rank = some.index(target) + 1 if target in some else math.inf
                hits.append(rank <= k)
                gains.append(1 / math.log2(rank + 1) if rank <= k else 0)
            assert metrics[f"hr@{k}"] == pytest.approx(np.mean(hits), abs=1e-6)
            assert metrics[f"ndcg@{k}"] == pytest.approx(np.mean(gains), abs=1e-6)


@pytest.mark.parametrize(
    "advantage, ratio, moves",
    [
        (1, 0.5, True),
        (1, 0.9, True),
        (1, 1.1, True),
        (1, 1.5, False),
        (-1, 0.5, False),
        (-1, 0.9, True),
        (-1, 1.1, True),
        (-1, 1.5, True),
    ],
)
def test_the_clip_stops_the_gradient_on_the_right_side(rec, advantage, ratio, moves):
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss, seen = rec().policy_loss(
        logprobs, torch.zeros(1, 1), torch.tensor([[float(advantage)]]), "dapo", 0.2, 0.28
    )
    loss.sum().backward()
    assert seen.item() == pytest.approx(ratio) and (logprobs.grad.item() != 0) == moves


def test_gspo_has_one_ratio_an_item(rec):
    logprobs = torch.tensor([[0.1, -0.4, 0.0]])
    _, ratio = rec().policy_loss(logprobs, torch.zeros(1, 3), torch.ones(1, 1), "gspo", 0.2, 0.2)
    assert ratio.tolist() == [pytest.approx([math.exp(-0.1)] * 3)]


def test_the_kl_has_k3s_value_and_the_kls_gradient(rec):
    module = rec()
    logits = torch.tensor([0.3, -0.2], dtype=torch.double, requires_grad=True)
    ref = torch.tensor([-0.5, 0.4], dtype=torch.double).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True)
    p = logprobs.exp().detach()  # the mean over samples, exactly
    loss = module.kl_loss(logprobs, ref)
    (found,) = torch.autograd.grad((p * loss).sum(), logits)
    assert torch.allclose(found, wanted)
    ratio = ref - logprobs.detach()
    assert torch.allclose(loss.detach(), ratio.exp() - 1 - ratio)


def test_the_loss_is_a_mean_over_the_whole_step_however_it_is_cut(rec):
    gradients = []
    for size in (12, 3, 1):
        module = rec(RANKING_WEIGHT=0.5, KL_COEF=0.1, ENTROPY_COEF=0.01)
        trainer = trainer_of(module)
        torch.manual_seed(0)
        batch = trainer.rollout()
        trainer.score(batch)
        trainer.compute_advantages(batch)
        with torch.no_grad():  # off policy, so that every term has a gradient
            trainer.actor.lm_head.weight.mul_(1.1)
        module.micro_batch_rows = lambda model, batch, size=size: size
        seen = []
        module.clip_and_step = lambda optimizers, loss, run, ids, seen=seen: seen.append(loss) or [0.0]
        metrics = trainer.optimizer_step(batch, list(range(len(batch.rows))))
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.actor.parameters()]))
        assert metrics["kl"] > 0
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() < 1e-4 * gradients[0].norm()


@pytest.mark.parametrize("kind", ["dapo", "gspo"])
def test_the_gradient_of_a_mini_batch_equals_float64_of_rows_read_alone(rec, kind):
    """Off policy, the reference moved away; the mini-batch is a part of the step, in micro-batches of two."""
    prices = {"KL_COEF": 0.3, "ENTROPY_COEF": 0.02, "CLIP_RANGE": 0.1, "CLIP_RANGE_HIGH": 0.3}
    prices["TEMPERATURE"] = 0.8
    module = rec(LOSS_TYPE=kind, CANDIDATES="sample", **prices)
    trainer = trainer_of(module)
    torch.manual_seed(0)
    with torch.no_grad():
        trainer.reference.lm_head.weight.mul_(0.8)
    batch = trainer.rollout()
    trainer.score(batch)
    trainer.compute_advantages(batch)
    with torch.no_grad():
        trainer.actor.lm_head.weight.mul_(1.1)
    chunk = [10, 3, 4, 0, 7]
    model = copy.deepcopy(trainer.actor).double()
    codes = trainer.trie.codes.tolist()
    total = 0.0
    for i in chunk:
        ids, item = batch.rows[i]["ids"], codes[batch.items[i]]
        logits = model(input_ids=torch.tensor([ids + item])).logits[0, len(ids) - 1 : -1] / 0.8
        every = []
        for level in range(3):
            may = sorted({other[level] for other in codes if other[:level] == item[:level]})
            every.append((logits[level][may].log_softmax(-1), may.index(item[level])))
        logprobs = torch.stack([some[at] for some, at in every])
        entropies = torch.stack([-(some.exp() * some).sum() for some, _ in every])
        log_ratio = logprobs - batch.logprobs[i].double()
        if kind == "gspo":
            log_ratio = log_ratio.mean().expand(3)
        ratio, advantage = log_ratio.exp(), batch.advantages[i].double()
        policy = -torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.3) * advantage)
        apart = logprobs - batch.ref_logprobs[i].double()
        total = total + (policy + 0.3 * apart**2 / 2 - 0.02 * entropies).sum() / 15
    total.backward()
    module.micro_batch_rows = lambda model, batch: 2
    module.clip_and_step = lambda optimizers, loss, run, ids: [0.0]
    trainer.optimizer_step(batch, list(chunk))
    found = torch.cat([p.grad.flatten() for p in trainer.actor.parameters()]).double()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert wanted.norm() > 1e-2 and (found - wanted).norm() < 1e-4 * wanted.norm()


def test_a_step_in_bfloat16_is_that_of_float32_but_for_its_rounding(rec):
    """The same samples, drawn in bfloat16."""
    gradients = []
    for dtype in ("bfloat16", "float32"):
        module = rec(CANDIDATES="sample", DTYPE=dtype)
        module.clip_and_step = lambda optimizers, loss, run, ids: [0.0]
        trainer = trainer_of(module)
        if dtype == "bfloat16":
            torch.manual_seed(0)
            batch = trainer.rollout()
        trainer.score(batch)
        trainer.compute_advantages(batch)
        trainer.optimizer_step(batch, list(range(len(batch.rows))))
        gradient = torch.cat([p.grad.flatten() for p in trainer.actor.parameters()])
        assert gradient.dtype == torch.float32
        gradients.append(gradient.double())
    rounded, exact = gradients
    cosine = (rounded @ exact / rounded.norm() / exact.norm()).item()
    assert 0.99 < cosine < 1 - 1e-7
    assert rounded.norm().item() == pytest.approx(exact.norm().item(), rel=0.05)


@pytest.mark.parametrize("kind", ["dapo", "gspo"])
def test_each_constant_of_the_loss_is_handed_to_its_place(rec, kind):
    prices = {"CLIP_RANGE": 0.1, "CLIP_RANGE_HIGH": 0.4, "KL_COEF": 0.3, "ENTROPY_COEF": 0.07}
    trainer = trainer_of(rec(LOSS_TYPE=kind, **prices))
    generator = torch.Generator().manual_seed(0)
    logprobs, old, ref, entropy = (torch.randn(40, 3, generator=generator) / 3 for _ in range(4))
    advantages = torch.randn(40, generator=generator)
    batch = SimpleNamespace(logprobs=old, ref_logprobs=ref, advantages=advantages)
    rows = torch.arange(39, -1, -1)
    found = trainer.token_losses(batch, rows, logprobs, entropy)
    for n, i in enumerate(rows.tolist()):
        for t in range(3):
            log_ratio = (logprobs[n, t] - old[i, t]).item()
            if kind == "gspo":
                log_ratio = (logprobs[n] - old[i]).mean().item()
            ratio, a = math.exp(log_ratio), advantages[i].item()
            policy = -min(ratio * a, min(max(ratio, 0.9), 1.4) * a)
            apart = (logprobs[n, t] - ref[i, t]).item()
            kl = math.exp(-apart) - 1 + apart
            wanted = (policy + 0.3 * kl - 0.07 * entropy[n, t].item(), policy, ratio, kl)
            assert [x[n, t].item() for x in found] == pytest.approx(wanted, abs=1e-5)


def test_passes_and_mini_batches_are_as_many_as_asked_each_pass_in_another_order(rec):
    module = rec(GROUP_EPOCHS=3, MINI_BATCHES=2, BATCH_SIZE=3, GRADIENT_ACCUMULATION_STEPS=4, GROUP_SIZE=5)
    trainer = trainer_of(module)
    batch = trainer.rollout()
    assert len(batch.rows) == 60 and len({id(row) for row in batch.rows}) == 12
    chunks = []
    trainer.optimizer_step = lambda batch, chunk: chunks.append(chunk) or {"max_ratio_deviation": 0.0}
    module.check_first_ratio = lambda steps, step: None
    trainer.update(batch)
    assert [len(chunk) for chunk in chunks] == [30] * 6
    passes = [chunks[n] + chunks[n + 1] for n in (0, 2, 4)]
    assert all(sorted(some) == list(range(60)) for some in passes) and passes[0] != passes[1] != passes[2]


def test_advantages_are_scaled_as_asked(rec):
    trainer = trainer_of(rec(SCALE_REWARDS="batch"))
    batch = SimpleNamespace(scores=torch.rand(6, generator=torch.Generator().manual_seed(0)))
    trainer.compute_advantages(batch)
    scores = batch.scores.numpy()
    for begin in (0, 3):
        group = scores[begin : begin + 3]
        wanted = (group - group.mean()) / (scores.std(ddof=1) + 1e-4)
        assert batch.advantages[begin : begin + 3].tolist() == pytest.approx(wanted, abs=1e-5)


def test_lists_groups_and_samples_are_as_asked(rec):
    module = rec(LOG_SAMPLES=5, EVAL_BEAMS=23, CANDIDATES="sample", GROUP_SIZE=11)
    trainer = trainer_of(module)
    batch = trainer.rollout()
    assert any(len(set(group)) < 11 for group in batch.items.view(-1, 11).tolist())
    trainer.score(batch)
    trainer.compute_advantages(batch)
    samples = []
    trainer.run.log_step = lambda metrics, tokens, some, line: samples.extend(some)
    trainer.record(batch, dict.fromkeys(["policy_loss", "entropy", "kl", "learning_rate"], 0.0))
    assert len(samples) == 5
    assert [some["reward"] for some in samples] == batch.scores[[0, 10, 21, 32, 43]].tolist()
    widths = []
    plain = module.best_items
    module.best_items = lambda model, trie, rows, width, pad: (
        widths.append(width) or plain(model, trie, rows, width, pad)
    )
    trainer.evaluate()
    assert widths == [23]


def test_how_often_the_clip_acts_is_counted_on_both_sides(rec):
    module = rec(CLIP_RANGE=0.1, CLIP_RANGE_HIGH=0.4, KL_COEF=0.0)
    trainer = trainer_of(module)
    batch = trainer.rollout()
    trainer.score(batch)
    trainer.compute_advantages(batch)
    ratios = torch.tensor([0.85, 0.87, 1.2, 1.5]).repeat(3)[:, None]
    batch.advantages = torch.tensor([-1.0] * 4 + [1.0] * 4 + [0.0] * 4)
    batch.logprobs = batch.logprobs - ratios.log()
    metrics = trainer.optimizer_step(batch, list(range(12)))
    assert metrics["clip_fraction"] == pytest.approx(3 / 12)  # .85 and .87 where it costs, 1.5 where it earns


def test_the_schedule_of_each_stage_is_its_own_and_runs_over_its_own_steps(rec):
    module = rec(
        USE_LR_SCHEDULER=True,
        LR_SCHEDULER_TYPE="cosine",
        WARMUP_STEPS=2,
        MAX_STEPS=4,
        SFT_LR_SCHEDULER_TYPE="linear",
        SFT_WARMUP=0.3,
        SFT_EPOCHS=3,
        SFT_BATCH_SIZE=20,
        SFT_LEARNING_RATE=1e-2,
        LEARNING_RATE=1e-3,
    )
    rates, asked = rates_of(module)
    assert asked == [20, 20, 8] * 3
    wanted = [1e-2 * x for x in [1 / 3, 2 / 3, 1, *(1 - n / 6 for n in range(6))]]  # 0.3 of nine: three steps
    assert rates == pytest.approx(wanted + [1e-3 * x for x in (1 / 2, 1, 1, 1 / 2)])


def test_each_stage_has_its_own_weight_decay_also_when_it_is_resumed(rec):
    """SFT's is what six steps of a pass take away together."""
    words = {"WEIGHT_DECAY": 0.01, "SFT_WEIGHT_DECAY": 0.06, "SAVE_EVERY_N_STEPS": 4}
    words |= {"SFT_LEARNING_RATE": 0.05, "SFT_EPOCHS": 2, "KEEP_LAST_N_CHECKPOINTS": 9}

    def decay(trainer):
        return trainer.optimizers["policy"].param_groups[0]["weight_decay"]

    trainer = rec(**words).RecTrainer()
    assert decay(trainer) == pytest.approx(0.06 / 6 / 0.05)
    trainer.train()
    assert decay(trainer) == 0.01
    assert decay(rec(**words, RESUME="yes").RecTrainer()) == 0.01
    resumed = rec(**words, RESUME=f"{trainer.run.folder}/step_4").RecTrainer()
    assert decay(resumed) == pytest.approx(0.06 / 6 / 0.05)


def test_a_step_of_sft_has_about_256_items_to_learn_however_long_the_histories_are(rec):
    module = rec(SFT_BATCH_SIZE=None)
    for length, wanted in ((2, 128), (6, 32), (33, 8), (900, 1)):
        rows = [{"learn": [False, *[True] * (length + n)]} for n in (-1, 0, 0, 1)]
        assert module.balanced_batch_size(rows) == wanted
    trainer = module.RecTrainer()
    items = sum(sum(row["learn"]) for row in trainer.sft_rows)
    assert trainer.sft_batch_size == 2 ** round(math.log2(256 * 48 / items)) and trainer.end == 1


def test_a_baseline_that_wins_on_validation_is_named_in_the_last_lines(rec, capsys):
    trainer = rec().RecTrainer()
    trainer.prepare_baselines()
    trainer.levels = {"markov": {"ndcg@10": 0.3, "reward": 0.1}, "counts": {"ndcg@10": 0.4, "reward": 0.2}}

    def told(stage, ndcg, reward):
        trainer.state.stage, trainer.state.sft_best, trainer.run.best_value = stage, ndcg, reward
        capsys.readouterr()
        trainer.compare_with_baselines()
        return capsys.readouterr().out

    rule = "NOTE: a rule wins. "
    wins = "SFT reached ndcg@10 0.3500 on validation, the baseline 'counts' 0.4000"
    assert rule + wins in told("sft", 0.35, 0.35) and "GRPO" not in told("rl", 0.35, 0.3)
    assert told("sft", 0.4, 0.4) == told("rl", 0.5, 0.2) == told("rl", -1.0, 0.2) == ""
    said = told("rl", -1.0, 0.15)
    assert "GRPO reached reward 0.1500 on validation, the baseline 'counts' 0.2000" in said
    assert "SFT" not in said, "SFT was another run's"
    trainer.state.stage, trainer.state.sft_best = "sft", 0.1
    trainer.fine_tune = trainer.begin_grpo = trainer.reinforce = lambda: None
    trainer.prepare_baselines = lambda: None
    trainer.test = lambda: print("the table")
    trainer.train()
    table, note, *rest = capsys.readouterr().out.split("the table")[1].split("\n")
    assert note.startswith(rule) and len(rest) < 5


@pytest.mark.parametrize("number, steps", [(0, [18]), (1, [18]), (3, [6, 12, 18]), (4, [5, 10, 15, 18])])
def test_evaluations_of_sft_are_equally_far_apart_however_many_steps_it_has(rec, number, steps):
    module = rec(STAGE="sft", SFT_EPOCHS=3, SFT_EVALUATIONS=number, EVAL_EVERY_N_STEPS=7)
    trainer = module.RecTrainer()
    evaluated_at = []
    trainer.evaluate = lambda: evaluated_at.append(trainer.run.step) or {"ndcg@10": 0.5}
    trainer.train()
    assert evaluated_at == [0, *steps]


@pytest.mark.parametrize(
    "patience, steps", [({"SFT_PATIENCE": 1}, 6), ({"SFT_PATIENCE": 0, "EARLY_STOPPING_PATIENCE": 5}, 5)]
)
def test_plateau_and_patience_of_sft_do_not_outlive_it(rec, patience, steps):
    module = rec(
        USE_LR_SCHEDULER=True,
        LR_SCHEDULER_TYPE="plateau",
        SFT_LR_SCHEDULER_TYPE="plateau",
        SFT_WARMUP=0.0,
        SFT_EVALUATIONS=54,
        PLATEAU_PATIENCE=2,
        SFT_EPOCHS=9,
        MAX_STEPS=3,
        EVAL_EVERY_N_STEPS=1,
        SFT_LEARNING_RATE=1e-2,
        LEARNING_RATE=1e-3,
        **patience,
    )
    rates, _ = rates_of(module)
    sft = [1e-2, 1e-2, 5e-3, 5e-3, 2.5e-3, 2.5e-3]
    assert rates == pytest.approx([*sft[:steps], 0.001, 0.001, 0.0005])


@pytest.mark.parametrize(
    "evaluations, patience, better_at, end",
    [
        (54, 1, [], 6),  # a pass is six steps: none of them ends SFT before it is over
        (54, 2, [], 12),  # six evaluations of a pass count once
        (54, 1, [6], 12),
        (54, 2, [9], 24),  # the best of a pass counts, whatever came before it in the pass
        (54, 2, [7, 13], 30),
        (7, 2, [], 18),  # evaluations at 8 and 16, in the second and the third pass
        (6, 2, [], 18),  # at 9 and 18
        (3, 2, [], 36),  # a pass without an evaluation does not count
        (0, 1, [], 54),
        (54, 0, [], 54),
    ],
)
def test_the_patience_of_sft_counts_passes_through_the_data(rec, evaluations, patience, better_at, end):
    module = rec(STAGE="sft", SFT_EPOCHS=9, SFT_EVALUATIONS=evaluations, SFT_PATIENCE=patience)
    trainer = module.RecTrainer()
    assert len(trainer.sft_rows) == 48  # in batches of 8
    trainer.evaluate = lambda: {"ndcg@10": 0.5 + sum(trainer.run.step >= step for step in better_at)}
    trainer.train()
    assert trainer.run.step == end


def rates_of(module):
    """(The learning rate of each step of a run that never gets better, how many rows each of SFT's has)."""
    trainer = module.RecTrainer()
    trainer.evaluate = lambda: {"ndcg@10": 0.5, "reward": 0.5}
    trainer.test = lambda: None
    asked = []
    update = trainer.sft_update
    trainer.sft_update = lambda rows: asked.append(len(rows)) or update(rows)
    trainer.train()
    records = read(f"{module.OUTPUT_DIR}/logs/metrics.jsonl")
    return [record["learning_rate"] for record in records if record["phase"] == "train"], asked


def test_sequences_of_sft_have_the_loss_of_a_row_for_each_prefix(rec):
    module = rec()
    trainer = trainer_of(module)
    trainer.train_rows = [row for n, row in enumerate(trainer.train_rows) if n % 3]  # some are not learnt
    trainer.sft_rows, _ = trainer.prompter.rows_of_stages(trainer.train_rows, print)
    batch = module.sft_batch(trainer.sft_rows, trainer.trie, trainer.device)
    every = torch.arange(len(trainer.sft_rows))
    logprobs, _ = module.item_logprobs(trainer.actor, trainer.trie, batch, every, 1.0)
    prompts = [row["ids"] for row in trainer.train_rows]
    targets = [[row["target"]] for row in trainer.train_rows]
    alone = module.item_batch(prompts, targets, trainer.trie)
    every = torch.arange(len(trainer.train_rows))
    wanted, _ = module.item_logprobs(trainer.actor, trainer.trie, alone, every, 1.0)
    assert (logprobs * batch.learn).sum().item() == pytest.approx(wanted.sum().item(), rel=1e-5)
    assert batch.learn.sum().item() == 3 * len(trainer.train_rows) > 3 * len(trainer.sft_rows)


# ---------------------------------------------------------------- programs in data/ that read the same rows


def test_stitched_rows_are_logged_pairs_or_siblings_each_as_often_as_logged(rec, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "data")
    import stitch

    trainer = trainer_of(rec())
    kept = [row for row in trainer.train_rows if row["target"] not in (0, 5)]  # others stand for a test's
    kept = [row for row in kept if row["history"][-1] not in (0, 5)]  # nothing is known of what follows them
    sequences = stitch.sequences_of(kept)
    places = stitch.places_after(sequences, trainer.catalogue.codes)
    logged = Counter((row["history"][-1], row["target"]) for row in kept)
    bought = Counter(row["target"] for row in kept)
    for weight in (0.0, 2.0):
        draw = random.Random(0)
        pairs = Counter()
        for source in sequences * 150:
            some = stitch.stitch(source, places, 1.0, weight, 5, draw)
            known, siblings = places[some[-1]]
            assert some[0] == source[0][0] and (len(some) == 6 or not (known or (weight and siblings)))
            pairs.update(itertools.pairwise(some))
        assert weight or set(pairs) == set(logged)
        for last in {first for first, _ in pairs}:
            siblings = [item for item, other in enumerate(PLACES) if other[:2] == PLACES[last][:2]]
            near = sum(bought[item] for item in siblings)
            extra = weight if near else 0.0
            known = sum(count for (first, _), count in logged.items() if first == last)
            met = sum(count for (first, _), count in pairs.items() if first == last)
            for item in range(len(PLACES)):
                wanted = logged[last, item]
                if extra and item in siblings:
                    wanted += extra * bought[item] / near
                wanted /= known + extra
                assert abs(pairs[last, item] / met - wanted) < 0.03 + 4 * (wanted * (1 - wanted) / met) ** 0.5
    asked = {id(sequence): places for sequence, places in sequences}
    for source in sequences:  # without stitching a row stays, up to what is not trained on
        some = stitch.stitch(source, places, 0.0, 2.0, 5, draw)
        assert some == source[0][: len(some)] and set(range(1, len(some))) <= asked[id(source[0])]


def test_stitched_rows_are_written_beside_what_was_held_out(rec, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "data")
    import stitch

    world = {**write_world(tmp_path / "world"), "VALID_FILE": None, "MAX_HISTORY": 5, "GROUP_SIZE": 3}
    words = [f"{key}={value}" for key, value in world.items()]
    stitch.run(stitch.main, tmp_path / "stitched", ["CHANCE=0.5", "PASSES=3", *words])
    files = {f"{name.upper()}_FILE": str(tmp_path / f"stitched/{name}.csv") for name in ("train", "valid")}
    plain = rec(VALID_FILE=None).RecTrainer()
    trainer = rec(**files).RecTrainer()
    assert len(trainer.sft_rows) == 3 * len(plain.sft_rows)
    both = (trainer, plain)
    pairs, logged = ({(row["history"][-1], row["target"]) for row in some.train_rows} for some in both)
    siblings = {(a, b) for a, b in itertools.product(range(11), repeat=2) if PLACES[a][:2] == PLACES[b][:2]}
    assert pairs <= logged | siblings
    one, other = ([(row["user"], row["ids"], row["target"]) for row in some.valid_rows] for some in both)
    assert one == other


def test_the_rules_of_the_bench_are_the_baselines_and_counts_over_popularity(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "bench")
    import rec_baselines

    world = {**write_world(tmp_path / "world"), "MAX_HISTORY": 5, "GROUP_SIZE": 3, "SASREC_FILE": None}
    rec_baselines.run(rec_baselines.main, [f"{key}={value}" for key, value in world.items()])
    lines = [line for line in capsys.readouterr().out.splitlines() if "value" in line]
    found = dict(line.rsplit("  value ", 1) for line in lines)
    powers = [f"counts / popularity^{x}" for x in ("0.25", "0.5", "0.75", "1")]
    assert [line[12:36].strip() for line in found] == 2 * ["popularity", "markov", "counts", *powers]
    values = np.load(tmp_path / "world/values.npy")
    pairs = pairs_of(tmp_path / "world/train.csv")
    targets = Counter(item for history, target in pairs for item in [*history, target][1:])
    best = sorted(range(11), key=lambda item: -targets[item])[:3]
    decay = SimpleNamespace(VALUE_DECAY=0.5)
    worth = [
        [worth_by_hand(values, history, item, decay) for item in best]
        for history, _ in pairs_of(tmp_path / "world/test.csv")
    ]
    (popular,) = (value for line, value in found.items() if line.startswith("test        popularity "))
    assert float(popular) == pytest.approx(np.mean(worth), abs=1e-4)
    counts = SimpleNamespace(scores=lambda histories: torch.tensor([[4.0, 4.0, 1.0]]))
    debiased = rec_baselines.Debiased(counts, torch.tensor([3.0, 0.0, 0.0]), 0.5)
    assert debiased.scores([[0]]).tolist() == [[2.0, 4.0, 1.0]]


ODD_WORDS = [
    ("bench/rec_baselines.py", ["TRAIN_FILE=nowhere.csv"], "TRAIN_FILE = 'nowhere.csv'"),
    ("bench/rec_baselines.py", ["TRAIN_FILES=x.csv"], "did you mean TRAIN_FILE?"),
    ("bench/rec_baselines.py", ["GROUP_SIZE=0"], "GROUP_SIZE = 0 is out of range"),
    ("data/sasrec.py", ["INDEX_FILE=nowhere.json"], "INDEX_FILE = 'nowhere.json'"),
    ("data/sasrec.py", ["SASREC_FILE=None"], "SASREC_FILE = None: name the file"),
    ("data/stitch.py", ["TRAIN_FILE=x.csv"], "the first word is the folder to write"),
    ("data/stitch.py", ["out", "CHANCE=often"], "CHANCE=often: CHANCE takes a number, such as 0.8"),
    ("data/stitch.py", ["out", "CHANCE=1.5"], "CHANCE is 0 to 1"),
    ("data/stitch.py", ["out", "TEST_FILE=nowhere.csv"], "TEST_FILE = 'nowhere.csv'"),
    (
        "data/stitch.py",
        ["out", "TRAIN_FILE=out/train.csv"],
        "TRAIN_FILE = 'out/train.csv' would be overwritten",
    ),
    ("data/sasrec.py", ["TRAIN_FILE=mine.csv"], "sasrec.npz' is the shipped rows': name a file of your own"),
    ("data/sasrec.py", ["SASREC_FILE=none/x.npz"], "SASREC_FILE = 'none/x.npz': there is no folder none"),
]


@pytest.mark.parametrize("file, words, sentence", ODD_WORDS, ids=range(len(ODD_WORDS)))
def test_programs_beside_it_end_with_one_sentence(tmp_path, monkeypatch, capsys, file, words, sentence):
    monkeypatch.syspath_prepend(ROOT / Path(file).parent)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [file, *words])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / file), run_name="__main__")
    text = capsys.readouterr().err
    assert end.value.code == 2 and sentence in text
    assert text.startswith(f"{Path(file).name}: ") and text.count("\n") == 1


@pytest.fixture
def sasrec_words(tmp_path, monkeypatch):
    """Words of a small world whose SASREC_FILE data/sasrec.py has made, of a pass; constants of the same."""
    monkeypatch.syspath_prepend(ROOT / "data")
    import sasrec

    monkeypatch.setattr(sasrec, "EPOCHS", 3)
    world = {
        **write_world(tmp_path / "sasrec"),
        "MAX_HISTORY": 5,
        "GROUP_SIZE": 3,
        "SASREC_FILE": f"{tmp_path}/sasrec.npz",
        "COLLABORATIVE_WEIGHT": 1.0,
    }
    sasrec.run(sasrec.main, [f"{key}={value}" for key, value in world.items()])
    return world


# ---------------------------------------------------------------- rewards and metrics


def test_ranking_reward_by_hand():
    d = [1, 1 / math.log2(3), 1 / 2]
    assert PLAIN.ranking_reward([0, 1, 0]) == pytest.approx([-d[0] / sum(d), 1, -d[2] / sum(d)])
    assert PLAIN.ranking_reward([0, 0, 0]) == [0, 0, 0]
    assert PLAIN.ranking_reward([1, 1]) == [1, 1]


def test_value_and_min_max_by_hand():
    values = [[0.0, 1.0], [0.5, 0.2]]
    assert PLAIN.history_value(values, [0, 0, 1], 1, 0.5) == pytest.approx((0.25 + 0.5 + 0.2) / 1.75)
    assert PLAIN.min_max([3.0, 1.0, 2.0]) == [1.0, 0.0, 0.5] and PLAIN.min_max([2.0, 2.0]) == [0.0, 0.0]
    assert PLAIN.rule_reward([], ["7", "8"], ["7", "9"]) == [1.0, 0.0]


def test_each_group_is_ranked_by_itself_and_parts_add_up(rec):
    module = rec(RANKING_WEIGHT=2.0, RULE_WEIGHT=1.0, VALUE_WEIGHT=0.5, REWARD_FUNCTIONS=[(number_of, 0.1)])
    trainer = trainer_of(module)
    row, other = trainer.valid_rows[:2]
    items = torch.tensor([row["target"], 0, 1, 2, 3, 4])
    scores, parts = trainer.score_responses([row] * 3 + [other] * 3, items)
    names = trainer.catalogue.items
    first = PLAIN.ranking_reward([float(names[i] == names[row["target"]]) for i in items[:3]])
    second = PLAIN.ranking_reward([float(names[i] == names[other["target"]]) for i in items[3:]])
    assert parts["ranking"].tolist() == pytest.approx(first + second)
    value = PLAIN.history_value(trainer.values, row["history"], row["target"], module.VALUE_DECAY)
    assert parts["value"][0].item() == pytest.approx(value)
    assert parts["number_of"].tolist() == [float(names[i]) for i in items]
    wanted = 2 * parts["ranking"] + parts["rule"] + 0.5 * parts["value"] + 0.1 * parts["number_of"]
    assert torch.allclose(scores, wanted)


def test_each_part_has_its_own_weight_and_groups_are_rewarded_whole(rec):
    weights = {"VALUE": 2.0, "RULE": 0.7, "RANKING": 0.3, "SEMANTIC": 0.11, "COLLABORATIVE": 0.05}
    module = rec(**{f"{name}_WEIGHT": weight for name, weight in weights.items()}, BATCH_SIZE=2, GROUP_SIZE=5)
    module.read_sasrec = lambda *rows: True
    trainer = trainer_of(module)
    sizes = []

    def part(mark):
        def function(histories, items, targets):
            sizes.append(len(items))
            return [mark * (1 + int(item)) for item in items]

        return function

    for name, mark in {"value": 1.0, "ranking": 3.0, "semantic": 5.0, "collaborative": 7.0}.items():
        setattr(trainer, f"{name}_reward", part(mark))
    module.rule_reward = part(10.0)
    items = torch.arange(15) % 11
    scores, parts = trainer.score_responses([trainer.valid_rows[0]] * 15, items)
    wanted = (2.0 * 1 + 0.7 * 10 + 0.3 * 3 + 0.11 * 5 + 0.05 * 7) * (11 + items)
    assert torch.allclose(scores, wanted) and set(sizes) == {10, 5}  # BATCH_SIZE groups at a time
    assert set(parts) == {name.lower() for name in weights}


def test_rewards_get_the_histories_items_and_targets_of_their_own_chunk(rec):
    module = rec(BATCH_SIZE=2, GROUP_SIZE=3)
    trainer = trainer_of(module)
    seen, sizes = [], []

    def compute_rewards(histories, items, targets):
        sizes.append(len(items))
        seen.extend(zip(histories, items, targets))
        trainer.reward_parts["own"] = [float(item) for item in items]
        return [2 * float(item) for item in items]

    trainer.compute_rewards = compute_rewards
    rows = [row for row in trainer.valid_rows[:5] for _ in range(3)]
    numbers = torch.arange(15) % len(trainer.catalogue.items)
    scores, parts = trainer.score_responses(rows, numbers)
    names = trainer.catalogue.items
    asked = [names[i] for i in numbers]
    assert sizes == [6, 6, 3]
    assert seen == [([names[i] for i in r["history"]], x, names[r["target"]]) for r, x in zip(rows, asked)]
    assert parts["own"].tolist() == [float(item) for item in asked]
    assert torch.equal(scores, 2 * parts["own"])


def test_best_items_and_baselines_are_of_each_row_beyond_the_first_chunk(rec):
    """Beams are searched for 64 rows at a time, baselines score 512."""
    module = rec()
    trainer = trainer_of(module)
    every = [*trainer.train_rows, *trainer.valid_rows]
    rows = [every[i % len(every)] for i in range(70)]
    found = module.best_items(trainer.actor, trainer.trie, rows, 5, trainer.pad_id)
    assert found.shape == (70, 5)
    for i in (0, 63, 64, 69):
        alone = module.best_items(trainer.actor, trainer.trie, rows[i : i + 1], 5, trainer.pad_id)
        assert torch.equal(found[i : i + 1], alone), i
    assert not torch.equal(found[64:], found[:6])

    def scores(histories):
        return torch.tensor([[-abs(history[-1] - item) for item in range(11)] for history in histories])

    many = [{"history": [i % 11]} for i in range(515)]
    best = module.top_items(SimpleNamespace(scores=scores), many)
    assert best[:, 0].tolist() == [i % 11 for i in range(515)]


def number_of(histories, items, targets):
    assert len(histories) == len(items) == len(targets) and isinstance(histories[0], list)
    return [float(item) for item in items]


def test_semantic_and_collaborative_rewards(rec, sasrec_words):
    trainer = trainer_of(rec(SEMANTIC_WEIGHT=1.0, **sasrec_words))
    row = trainer.train_rows[0]
    scores, parts = trainer.score_responses([row] * 3, torch.tensor([row["target"], 1, 2]))
    assert parts["semantic"][0].item() == pytest.approx(1.0)
    assert parts["collaborative"].min() == 0 and parts["collaborative"].max() == 1
    order = trainer.sasrec.scores([row["history"]])[0, [row["target"], 1, 2]].argsort()
    assert torch.equal(parts["collaborative"].argsort(), order)
    trainer.prepare_baselines()
    assert set(trainer.baselines) == {"popularity", "markov", "counts", "sasrec"}


def test_a_sasrec_of_other_rows_is_no_baseline(rec, sasrec_words, tmp_path, capsys):
    plain = {**sasrec_words, "COLLABORATIVE_WEIGHT": 0.0}
    assert rec(**plain).RecTrainer().sasrec
    write_csv(tmp_path / "other.csv", [["u", "[20, 20, 20, 20]", "12"]])
    for change in ({"MAX_TRAIN_ROWS": 20}, {"TEST_FILE": str(tmp_path / "other.csv")}):
        assert rec(**{**plain, **change}).RecTrainer().sasrec is None
        assert "it was made of other rows: no SASRec beside the policy" in capsys.readouterr().out
    (tmp_path / "sasrec.npz").write_text("no arrays")
    module = rec(**plain)
    with pytest.raises(module.UserError, match="SASREC_FILE = .*cannot be read"):
        module.RecTrainer()


def test_sasrec_learns_what_is_trained_on_and_its_epoch_is_by_validation(rec, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "data")
    import sasrec

    monkeypatch.setattr(sasrec, "EPOCHS", 6)
    learnt = []
    plain = torch.nn.functional.cross_entropy
    monkeypatch.setattr(
        torch.nn.functional,
        "cross_entropy",
        lambda logits, targets: learnt.append(targets.tolist()) or plain(logits, targets),
    )
    module = rec()
    found = iter([0.1, 0.3, 0.2, 0.2, 0.2, 0.2])
    module.gains = lambda lists, rows, k: torch.tensor([next(found)])
    train = [{"line": 0, "sequence": [0, 1, 2, 3], "at": at} for at in (1, 3)]  # 2 is validation's
    valid = [{"history": [0, 1], "target": 2}]
    _, best = sasrec.train(module, train, valid, 11)
    assert [sorted(x for x in some if x >= 0) for some in learnt] == [[1, 3]] * 6
    assert best == pytest.approx(0.3)


def test_the_shipped_sasrec_is_of_the_shipped_rows():
    module = load_script(FILE)
    train, valid, test = module.load_splits(module.Catalogue(print), print)
    model = module.read_sasrec(train, [*valid, *test], print)
    found = module.list_metrics(module.top_items(model, test), test, torch.ones(500))
    assert found["ndcg@10"] == pytest.approx(0.2713, abs=1e-4)  # in docs/grpo_rec.md


@pytest.mark.parametrize("kind", ["<f8", ">f4", "longdouble", "uint64"])
def test_vectors_from_a_file(rec, tmp_path, kind):
    np.save(tmp_path / "vectors.npy", (np.arange(22).reshape(11, 2) + 1).astype(kind))
    trainer = trainer_of(rec(SEMANTIC_WEIGHT=1.0, VECTORS_FILE=str(tmp_path / "vectors.npy")))
    a, b = np.array([1.0, 2.0]), np.array([21.0, 22.0])
    wanted = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert trainer.semantic_reward([[]], ["10"], ["20"])[0] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    "array",
    [np.full((11, 2), np.nan), np.full((11, 2), "7"), np.zeros((11, 0)), np.zeros((10, 2)), np.zeros(11)],
)
def test_odd_arrays_are_one_sentence(rec, tmp_path, array):
    np.save(tmp_path / "vectors.npy", array)
    module = rec(VECTORS_FILE=str(tmp_path / "vectors.npy"))
    with pytest.raises(module.UserError, match="it takes finite numbers, a row for each of 11 items"):
        module.item_vectors(module.Catalogue(print))


def test_metrics_by_hand(rec):
    module = rec()
    lists = torch.tensor([[4, 2, 0, 1, 3], [1, 0, 2, 3, 4], [0, 1, 2, -1, -1]])
    rows = [{"target": 2}, {"target": 1}, {"target": 4}]
    popularity = torch.tensor([5, 3, 3, 1, 0])
    found = module.list_metrics(lists, rows, popularity)
    assert found["hr@1"] == pytest.approx(1 / 3) and found["hr@3"] == pytest.approx(2 / 3)
    assert found["ndcg@1"] == pytest.approx(1 / 3)
    assert found["ndcg@3"] == pytest.approx((1 / math.log2(3) + 1) / 3)
    assert found["hr@20"] == pytest.approx(2 / 3) and found["coverage@10"] == 1.0
    less = [0.8, 0.4, 0.4, 0.2, 0.0]
    wanted = sum(less[i] for some in lists.tolist() for i in some if i >= 0) / 13
    assert found["popularity@10"] == pytest.approx(wanted)


COUNTED = [([0, 1], 2), ([1], 2), ([1], 3), ([2], 3), ([0], 3)]  # (history, target)
COUNTED = [{"history": history, "target": target} for history, target in COUNTED]


def test_baselines_count_what_they_say(rec):
    module = rec(EVAL_BEAMS=20)
    root, leaves = torch.zeros(4, 1, dtype=torch.long), torch.tensor([[0, 2], [0, 1], [0, 3], [0, 0]])
    asked = [{"history": [2, 1]}, {"history": [3]}]
    markov = module.top_items(module.Counts(COUNTED, leaves), asked)
    assert markov[:, :2].tolist() == [[2, 3], [3, 2]]  # after 3 nothing is known
    popular = module.top_items(module.Counts(COUNTED, root), [{"history": [1]}])
    assert popular[0, :2].tolist() == [3, 2] and (popular[0, 4:] == -1).all()


def test_counts_back_off_from_items_to_their_codes_and_to_popularity(rec):
    pairs = [(1, 2), (1, 2), (1, 3), (2, 3), (0, 3), (3, 0), (2, 1), (0, 1), (3, 1), (2, 3)]
    rows = [{"history": [0, last], "target": target} for last, target in pairs]
    paths = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 2], [0, 1, 3]])  # shelves of 0 and 1, of 2 and 3
    counts = rec().Counts(rows, paths, smoothing=2.0, decay=0.5)
    targets = [target for _, target in pairs]
    shelf = [0, 0, 1, 1]

    def after(last):
        near = [shelf[target] for other, target in pairs if shelf[other] == shelf[last]]
        known = [target for other, target in pairs if other == last]
        found = []
        for i in range(4):
            share = targets.count(i) / sum(shelf[target] == shelf[i] for target in targets)
            above = (near.count(shelf[i]) * share + 2 * targets.count(i) / 10) / (len(near) + 2)
            found.append((known.count(i) + 2 * above) / (len(known) + 2))
        return found

    wanted = [[after(1)[i] + 0.75 * after(0)[i] for i in range(4)], after(3)]
    found = counts.scores([[0, 0, 1], [3]])
    assert torch.allclose(found, torch.tensor(wanted, dtype=torch.double))


def test_smoothing_and_decay_are_those_of_the_best_ndcg_on_validation(rec):
    module = rec()
    trainer = module.RecTrainer()
    paths = trainer.trie.paths
    found = {}
    for how in itertools.product(module._SMOOTHING, module._DECAYS):
        lists = module.top_items(module.Counts(trainer.train_rows, paths, *how), trainer.valid_rows)
        ranks = [some.index(row["target"]) + 1 for some, row in zip(lists.tolist(), trainer.valid_rows)]
        found[how] = sum(1 / math.log2(rank + 1) for rank in ranks if rank <= 10)
    trainer.prepare_baselines()
    best = trainer.baselines["counts"]
    assert found[best.smoothing, best.decay] > max(found.values()) - 1e-6 > min(found.values())


def figures_by_hand(world, pairs, lists, module):
    """hr@10, ndcg@10, reward, reward/value and reward@1 of lists, one for each (history, target)."""
    rows = rows_by_hand(world, pairs, lists, module)
    return {key: float(np.mean(some)) for key, some in rows.items()}


def rows_by_hand(world, pairs, lists, module):
    values = np.load(world / "values.npy")
    found = {"hr@10": [], "ndcg@10": [], "reward/value": [], "reward": [], "reward@1": []}
    for (history, target), some in zip(pairs, lists):
        rank = some.index(target) + 1
        found["hr@10"].append(rank <= 10)
        found["ndcg@10"].append((rank <= 10) / math.log2(rank + 1))
        worth = [worth_by_hand(values, history, item, module) for item in some[: module.GROUP_SIZE]]
        found["reward/value"].append(np.mean(worth))
        found["reward"].append(
            module.VALUE_WEIGHT * np.mean(worth)
            + module.RULE_WEIGHT * np.mean([item == target for item in some[: module.GROUP_SIZE]])
        )
        found["reward@1"].append(module.VALUE_WEIGHT * worth[0] + module.RULE_WEIGHT * (some[0] == target))
    return found


def pairs_of(path):
    rows = csv.DictReader(open(path, newline=""))
    return [([int(i) - 10 for i in json.loads(r["history_item_id"])], int(r["item_id"]) - 10) for r in rows]


def worth_by_hand(values, history, item, module):
    weights = [module.VALUE_DECAY ** (len(history) - 1 - n) for n in range(len(history))]
    return sum(w * values[h][item] for w, h in zip(weights, history)) / sum(weights)


def test_every_figure_of_the_table_by_hand_and_best_is_by_validation(rec, tmp_path):
    module = rec(
        LEARNING_RATE=0.05,
        KL_COEF=0.0,
        SFT_LEARNING_RATE=2e-2,
        VALUE_WEIGHT=2.0,
        RULE_WEIGHT=0.7,
        VALUE_DECAY=0.3,
        GROUP_SIZE=4,
        EVAL_EVERY_N_STEPS=1,
    )
    trainer = module.RecTrainer()
    start = trainer.recommend([10, 13], 3)
    assert start == recommended(trainer, trainer.actor)
    seen = []
    plain = trainer.evaluate

    def evaluate(rows=None):  # what is evaluated last is worst
        seen.append(plain(rows))
        return {**seen[-1], "reward": -float(trainer.run.step)} if "reward" in seen[-1] else seen[-1]

    trainer.evaluate = evaluate
    trainer.train()
    last = every_list(trainer, trainer.actor, trainer.valid_rows)
    held_out = pairs_of(tmp_path / "world/valid.csv")
    wanted = figures_by_hand(tmp_path / "world", held_out, last, module)
    assert {key: seen[-1][key] for key in wanted} == pytest.approx(wanted, abs=1e-6)
    best = trainer.recommend([10, 13], 3)
    assert_same_lists(best, recommended(trainer, trainer.reference))  # which decodes in another way
    assert best != recommended(trainer, trainer.actor)
    figures = json.loads((tmp_path / "run/eval_test.json").read_text())
    counts = Counter()
    after = Counter()
    for history, target in pairs_of(tmp_path / "world/train.csv"):
        sequence = [*history, target]
        counts.update(sequence[1:])
        after.update(itertools.pairwise(sequence))
    tests = pairs_of(tmp_path / "world/test.csv")
    assert trainer.popularity.tolist() == [counts[i] for i in range(11)]  # of popularity@10
    by_count = sorted(range(11), key=lambda i: -counts[i])
    lists = {
        "popularity": [by_count] * 8,
        "markov": [sorted(range(11), key=lambda i: (-after[h[-1], i], -counts[i])) for h, _ in tests],
        "counts": module.top_items(trainer.baselines["counts"], trainer.test_rows)[:, :11].tolist(),
        "sft": every_list(trainer, trainer.reference, trainer.test_rows),
    }
    for name, some in lists.items():
        wanted = figures_by_hand(tmp_path / "world", tests, some, module)
        assert {key: figures[name][key] for key in wanted} == pytest.approx(wanted, abs=1e-6), name
        by_row = rows_by_hand(tmp_path / "world", tests, some, module)
        for key, interval in figures[name]["intervals"].items():
            assert interval == pytest.approx(resampled(by_row[key]), abs=1e-6)
        shown = {item for row in some for item in row[:10]}
        assert figures[name]["coverage@10"] == pytest.approx(len(shown) / 11)
        less = [sum(counts[i] > counts[j] for j in range(11)) / 11 for i in range(11)]
        rank = np.mean([less[item] for row in some for item in row[:10]])
        assert figures[name]["popularity@10"] == pytest.approx(rank, abs=1e-6)
    assert figures["grpo"]["reward"] == figures["sft"]["reward"]  # best/ is where GRPO began
    assert figures["rows"] == 8
    share = figures["counts"]["reward/value"] / figures["possible"]["value"]
    del figures["rows"]
    (line,) = (line for line in module.table_lines(figures) if line.startswith("  counts "))
    assert line.endswith(f" {100 * share:.1f}%")
    assert "best/ is SFT's" in module.table_lines(figures)[-1]
    assert not any("GRPO minus SFT" in line for line in module.table_lines(figures))
    values = np.load(tmp_path / "world/values.npy")
    worth = [[worth_by_hand(values, history, i, module) for i in range(11)] for history, _ in tests]
    assert figures["possible"]["value"] == pytest.approx(np.mean([sorted(some)[-4:] for some in worth]))
    again = rec(RESUME="yes", GROUP_SIZE=4).RecTrainer()
    assert again.recommend([10, 13], 3) == best
    trainer.best_policy = lambda: trainer.actor  # as if the last were the best
    trainer.run.text_log = None
    trainer.test()
    figures = json.loads((tmp_path / "run/eval_test.json").read_text())
    lists = every_list(trainer, trainer.actor, trainer.test_rows)
    wanted = figures_by_hand(tmp_path / "world", tests, lists, module)
    assert {key: figures["grpo"][key] for key in wanted} == pytest.approx(wanted, abs=1e-6)
    gained = wanted["reward"] - figures["sft"]["reward"]
    assert figures["grpo_minus_sft"]["reward"]["mean"] == pytest.approx(gained, abs=1e-6) != 0
    del figures["rows"]
    lines = module.table_lines(figures)
    assert any(line.startswith(f"  GRPO minus SFT, reward: {gained:+.4f}") for line in lines)
    before = every_list(trainer, trainer.reference, trainer.test_rows)
    one, other = (rows_by_hand(tmp_path / "world", tests, some, module)["reward"] for some in (lists, before))
    interval = figures["grpo_minus_sft"]["reward"]["interval"]
    assert interval == pytest.approx(resampled(np.subtract(one, other)), abs=1e-6)


def resampled(values):
    """95% interval of the mean, of 2,000 means of rows drawn again by the generator of seed 0."""
    generator = np.random.default_rng(0)
    means = sorted(
        np.mean([values[i] for i in generator.integers(0, len(values), len(values))]) for _ in range(2000)
    )
    return [means[49] + 0.975 * (means[50] - means[49]), means[1949] + 0.025 * (means[1950] - means[1949])]


def test_what_the_test_asks_for_changes_nothing_before_the_test(rec, tmp_path):
    lines = [[f"other{n}", f"[{10 + n}, {20 - n}]", str(12 + n % 3)] for n in range(8)]
    write_csv(tmp_path / "other.csv", lines)
    found = []
    for name, files in (("one", {}), ("two", {"TEST_FILE": str(tmp_path / "other.csv")})):
        module = rec(OUTPUT_DIR=str(tmp_path / name), EVAL_EVERY_N_STEPS=1, LEARNING_RATE=0.02, **files)
        trainer = module.RecTrainer()
        trainer.train()
        counts = trainer.baselines["counts"]
        chosen = (counts.smoothing, counts.decay, trainer.levels, trainer.popularity.tolist())
        test = json.loads((tmp_path / name / "eval_test.json").read_text())
        weights = {
            path: (tmp_path / name / path / "model.safetensors").read_bytes()
            for path in ("sft/policy", "best/policy", "step_8/policy")
        }
        found.append((untimed(tmp_path / name / "logs/metrics.jsonl"), weights, chosen, test))
    (*one, test), (*two, other) = found
    assert one == two and all(test[key] != other[key] for key in ("counts", "sft", "grpo"))


def test_the_metrics_of_a_step_by_hand(rec):
    trainer = trainer_of(rec(GROUP_SIZE=4))
    batch = trainer.rollout()
    trainer.score(batch)
    batch.scores = torch.tensor([1.0, 1, 1, 1, 1, 1, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0])
    trainer.compute_advantages(batch)
    found = {}
    trainer.run.log_step = lambda metrics, tokens, some, line: found.update(metrics, tokens=tokens)
    trainer.record(batch, dict.fromkeys(["policy_loss", "entropy", "kl", "learning_rate"], 0.0))
    assert found["zero_variance_groups"] == 0.5 and found["tokens"] == 48
    assert found["reward"] == pytest.approx(9 / 16)
    held = []
    for n in range(4):
        every = every_logprob(trainer, batch.rows[4 * n]["ids"])
        held.append(sum(math.exp(every[item]) for item in batch.items[4 * n : 4 * n + 4].tolist()))
    assert found["group_probability"] == pytest.approx(np.mean(held), abs=1e-4)


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_both_ends_of_a_cosine_in_each_stage(rec, stage):
    rates = {"SFT_LEARNING_RATE": 3e-2, "LEARNING_RATE": 7e-3}
    words = {"USE_LR_SCHEDULER": True, "LR_SCHEDULER_TYPE": "cosine", "SFT_WARMUP": 0.0}
    trainer = rec(**words, MAX_STEPS=5, **rates).RecTrainer()
    begin, total, base = (0, 6, 3e-2) if stage == "sft" else (6, 5, 7e-3)
    trainer.state.stage, trainer.state.begin = stage, begin
    trainer.plan_steps()
    found = []
    for n in range(total):
        trainer.run.step = begin + n + 1
        found.append(trainer.set_learning_rates())
        assert trainer.optimizers["policy"].param_groups[0]["lr"] == found[-1]
    assert found == pytest.approx([base * 0.5 * (1 + math.cos(math.pi * n / total)) for n in range(total)])


def every_list(trainer, model, rows):
    """All items for each row, the likeliest first, read one by one."""
    reader = SimpleNamespace(trie=trainer.trie, actor=model)
    found = [every_logprob(reader, row["ids"]) for row in rows]
    return [sorted(some, key=some.get, reverse=True) for some in found]


def recommended(trainer, model):
    trainer.best_policy = lambda: model
    found = trainer.recommend([10, 13], 3)
    del trainer.best_policy
    return found


def assert_same_lists(one, other):
    """The same items; their probabilities but for rounding."""
    for a, b in zip(one, other, strict=True):
        assert {**a, "probability": 0} == {**b, "probability": 0}
        assert a["probability"] == pytest.approx(b["probability"], rel=1e-5)


def test_bootstrap_intervals_cover_the_mean(rec):
    low, high = rec().bootstrap_interval(torch.arange(100.0))
    assert low < 49.5 < high and high - low == pytest.approx(4 * 29 / 10, rel=0.2)


# ---------------------------------------------------------------- data


def test_targets_belong_to_rows_not_to_histories(rec, tmp_path):
    lines = [["u", "[10, 11]", "12"], ["v", "[10, 11]", "13"], ["w", "[10, 11]", "13"]]
    write_csv(tmp_path / "same.csv", lines)
    trainer = trainer_of(rec(TRAIN_FILE=str(tmp_path / "same.csv"), TRAIN_PREFIXES=False))
    assert [row["target"] for row in trainer.train_rows] == [2, 3, 3]
    assert [row["items"] for row in trainer.sft_rows] == [[1, 2], [1, 3], [1, 3]]
    assert [row["learn"] for row in trainer.sft_rows] == [[False, True]] * 3


def test_a_transition_in_two_rows_of_a_user_is_trained_on_once(rec, tmp_path):
    lines = [["u", "[10, 11]", "12"], ["u", "[10, 11, 12]", "13"], ["v", "[10, 11]", "12"]]
    write_csv(tmp_path / "nested.csv", lines)
    trainer = trainer_of(rec(TRAIN_FILE=str(tmp_path / "nested.csv")))
    found = [(row["user"], row["history"], row["target"]) for row in trainer.train_rows]
    assert found == [("u", [0], 1), ("u", [0, 1], 2), ("u", [0, 1, 2], 3), ("v", [0], 1), ("v", [0, 1], 2)]
    learnt = sum(sum(row["learn"]) for row in trainer.sft_rows)
    assert learnt == 5


SIXTEEN = {str(n): [f"<a_{n // 4}>", f"<b_{n % 4}>"] for n in range(16)}


def test_windows_of_one_transition_are_trained_on_once(rec, tmp_path):
    world = write_world(tmp_path / "sixteen", SIXTEEN)
    begun = list(range(12))
    write_csv(tmp_path / "sixteen/train.csv", [["u", str(begun), "12"], ["u", str([*begun, 12]), "13"]])
    trainer = trainer_of(rec(**world, MAX_HISTORY=10))
    assert [row["target"] for row in trainer.train_rows] == [*range(3, 13), 13]


def test_what_the_test_asks_for_is_not_trained_on_whatever_the_window(rec, tmp_path):
    world = write_world(tmp_path / "sixteen", SIXTEEN)
    whole = list(range(15))
    asked = {
        "cut here": whole[:12],
        "cut by the exporter": [10, 11],
        "longer": [14, 1, 11],
        "another way": [14, 11],
        "another way, cut": [3, 11],
        "twice": [11],
    }
    trained = {
        "cut here": (whole, 15),
        "cut by the exporter": (whole, 15),
        "longer": ([1, 11], 12),
        "another way": ([1, 11], 12),
        "another way, cut": ([9, 11, 12, *whole[:8]], 8),
        "twice": ([3, 11, 12, 5, 11], 12),
        "another user": (whole, 15),
    }
    write_csv(tmp_path / "sixteen/test.csv", [[user, str(some), "12"] for user, some in asked.items()])
    write_csv(tmp_path / "sixteen/train.csv", [[user, str(some), t] for user, (some, t) in trained.items()])
    trainer = trainer_of(rec(**world, MAX_HISTORY=10))
    kept = Counter(row["user"] for row in trainer.train_rows if row["target"] == 12)
    assert kept == {"another way": 1, "another way, cut": 1, "another user": 1}
    others = [row["target"] for row in trainer.train_rows if row["user"] == "cut here"]
    assert others == [6, 7, 8, 9, 10, 11, 13, 14, 15]
    learnt = {
        row["items"][at]
        for row in trainer.sft_rows[:3]
        for at in range(len(row["items"]))
        if row["learn"][at]
    }
    assert 12 not in learnt and 13 in learnt


def test_limits_of_rows_are_each_of_its_own_file(rec):
    trainer = trainer_of(rec(MAX_TRAIN_ROWS=5, MAX_EVAL_ROWS=3, TRAIN_PREFIXES=False))
    assert [row["user"] for row in trainer.train_rows] == [f"train{n}" for n in range(5)]
    assert [row["user"] for row in trainer.valid_rows] == ["valid0", "valid4", "valid8"]  # of all the file
    assert len(trainer.test_rows) == 8


def test_nothing_that_is_asked_later_is_trained_on(rec, tmp_path, capsys):
    write_csv(tmp_path / "train.csv", [["u", "[10, 11, 12]", "13"], ["v", "[14]", "15"]])
    write_csv(tmp_path / "valid.csv", [["u", "[10, 11]", "12"]])
    write_csv(tmp_path / "test.csv", [["v", "[14]", "15"], ["x", "[10]", "11"]])
    files = {name.upper() + "_FILE": str(tmp_path / f"{name}.csv") for name in ("train", "valid", "test")}
    trainer = trainer_of(rec(**files))
    found = [(row["user"], row["history"], row["target"]) for row in trainer.train_rows]
    assert found == [("u", [0], 1), ("u", [0, 1, 2], 3)]
    assert "2 training rows are rows of validation or test: left out" in capsys.readouterr().out
    assert [row["learn"] for row in trainer.sft_rows] == [[True, False, True]]


def test_without_a_validation_file_users_are_held_out_whole(rec, tmp_path):
    lines = [[f"u{n % 8}", f"[{10 + n % 11}, 12]", str(10 + n % 7)] for n in range(40)]
    write_csv(tmp_path / "train.csv", lines)
    trainer = trainer_of(rec(TRAIN_FILE=str(tmp_path / "train.csv"), VALID_FILE=None, VALID_FRACTION=0.25))
    held, kept = ({row["user"] for row in rows} for rows in (trainer.valid_rows, trainer.train_rows))
    assert len(held) == 2 and len(kept) == 6 and not held & kept


def test_long_histories_are_cut_from_the_left_and_counted(rec, tmp_path, capsys):
    write_csv(tmp_path / "train.csv", [["u", "[10, 11, 12, 13]", "14"], ["v", "[15, 16]", "17"]])
    trainer = trainer_of(rec(TRAIN_FILE=str(tmp_path / "train.csv"), MAX_HISTORY=2, TRAIN_PREFIXES=False))
    assert [row["history"] for row in trainer.train_rows] == [[2, 3], [5, 6]]
    said = "1 of 2 training histories are longer than MAX_HISTORY: cut from the left"
    assert said in capsys.readouterr().out


def test_items_of_the_same_codes_are_named_counted_and_one(rec, tmp_path, capsys):
    codes = {**CODES, "99": CODES["11"]}
    world = write_world(tmp_path / "doubles", codes)
    trainer = trainer_of(rec(**world))
    assert "1 of 12 items have the codes of another (99 as 11 ...)" in capsys.readouterr().out
    assert len(trainer.catalogue.items) == 11 and trainer.catalogue.number["99"] == 1
    values = np.load(tmp_path / "doubles/values.npy")
    assert np.array_equal(trainer.values, values[:11, :11])
    assert trainer.recommend([99], 3) == trainer.recommend([11], 3)


def test_items_of_fewer_codes_end_with_a_code_of_their_own(rec, tmp_path):
    """One item's codes begin another's; both are found, and each path has one probability."""
    codes = {**CODES, "98": ["<a_0>"], "99": ["<a_0>", "<b_0>"]}
    trainer = trainer_of(rec(**write_world(tmp_path / "unlike", codes)))
    catalogue = trainer.catalogue
    assert catalogue.codes[-2:] == [("<a_0>", "<end>", "<end>"), ("<a_0>", "<b_0>", "<end>")]
    found = trainer.recommend([10, 13], len(codes))
    assert {row["item"] for row in found} == set(codes)
    assert sum(row["probability"] for row in found) == pytest.approx(1)
    assert min(row["probability"] for row in found) > 0


HEAD = "user_id,history_item_id,item_id\n"
ERRORS = [
    ("index.json", json.dumps({**CODES, "98": []}), "item '98' has []: it takes a list of codes"),
    ("index.json", json.dumps({**CODES, "98": ["<a_0>", "<\ud800>", "<c_9>"]}), "item '98' has ['<a_0>', "),
    ("index.json", "[", "cannot be read (Expecting value"),
    ("index.json", "[1]", "it must be one object of items"),
    ("train.csv", HEAD + "u,[[10]],11\n", "item '[10]' has no codes in INDEX_FILE"),
    ("train.csv", HEAD + 'u,"[10]",77\n', "line 2: item '77' has no codes in INDEX_FILE"),
    ("train.csv", HEAD + 'u,"[10",11\n', "line 2: history_item_id holds '[10'"),
    ("train.csv", HEAD + "u,[],11\n", "line 2: history_item_id holds '[]'"),
    ("train.csv", HEAD + 'u,"[10]"\n', "line 2: its number of fields differs"),
    ("train.csv", HEAD + "u,[10, 11],11\n", "line 2: its number of fields differs"),
    ("train.csv", HEAD + 'u,"[10' + 140000 * " ", "line 2: cannot be read as csv (field larger"),
    ("train.csv", "user_id,history_item_id\nu,[10]\n", "there is no column 'item_id'"),
    ("train.csv", HEAD, "the data set is empty"),
    ("train.csv", HEAD + "u,[10],11\n,[10],12\n", "line 3: its user_id is empty: mend or delete it"),
    ("valid.csv", HEAD + "  ,[10],12\n", "line 2: its user_id is empty: mend or delete it"),
    ("train.csv", HEAD + "u,,12\n", "line 2: its history_item_id is empty: mend or delete it"),
    ("train.csv", HEAD + "u,[10], \n", "line 2: its item_id is empty: mend or delete it"),
    ("train.csv", HEAD + 'u,"{10, 12}",11\n', "line 2: history_item_id holds '{10, 12}': it takes a list"),
    ("train.csv", HEAD + "u,'10',11\n", "line 2: history_item_id holds \"'10'\": it takes a list"),
    ("items.txt", "no tab\n", "line 1: it takes codes, title and an item of INDEX_FILE"),
    ("items.txt", "<a_0>\t10\n", "line 1: it takes codes, title and an item of INDEX_FILE"),
    ("index.json", '{"10": ["<a_0>"], "11": ["<a_1>"], "10": ["<a_2>"]}', "item '10' stands in it twice"),
    ("items.txt", "only two\tcolumns\n", "line 1: it takes codes, title and an item of INDEX_FILE"),
    ("items.txt", "<a_0>\tname\t77\n", "line 1: it takes codes, title and an item of INDEX_FILE"),
    ("values.npy", "no array", "VALUES_FILE = "),
    ("values.npy", "PK\3\4 no zip", "VALUES_FILE = "),
]


@pytest.mark.parametrize("file, text, sentence", ERRORS, ids=range(len(ERRORS)))
def test_bad_data_is_one_sentence(rec, tmp_path, file, text, sentence):
    module = rec()
    (tmp_path / "world" / file).write_text(text)
    with pytest.raises(module.UserError) as error:
        module.RecTrainer()
    said = str(error.value)
    assert sentence in said and file.partition(".")[0] in said and "\n" not in said


def rule(histories, items, targets):
    return [0.0] * len(items)


@pytest.mark.parametrize(
    "constants, sentence",
    [
        ({"GROUP_SIZE": 12}, "GROUP_SIZE = 12 is above 11"),
        ({"GROUP_SIZE": 30}, "GROUP_SIZE = 30 is above EVAL_BEAMS = 20"),
        ({"STAGE": "rl"}, "run/sft/policy, which is not there: run STAGE=sft first"),
        ({"STAGE": "rl", "ACTOR_MODEL": str(ROOT / "data/tiny/policy")}, "codes are new to"),
        ({"VALUE_WEIGHT": 0.0, "RULE_WEIGHT": 0.0}, "every reward weight is 0"),
        (
            {"VALUE_WEIGHT": 0.0, "RULE_WEIGHT": 0.0, "REWARD_FUNCTIONS": [("em", 0.0)]},
            "every reward weight is 0, those of REWARD_FUNCTIONS too",
        ),
        ({"REWARD_FUNCTIONS": [(rule, 1.0)]}, "REWARD_FUNCTIONS: the name 'rule' belongs to RULE_WEIGHT"),
        ({"VALUES_FILE": None}, "VALUE_WEIGHT needs a VALUES_FILE"),
        ({"COLLABORATIVE_WEIGHT": 1.0}, "needs a SASREC_FILE of these rows"),
        ({"TITLE_ROWS": 0.5}, "need an ACTOR_MODEL of words"),
        ({"PROMPT_TEMPLATE": "no place"}, "must contain {history} once"),
        ({"MAX_HISTORY": 4000, "ACTOR_MODEL": str(ROOT / "data/tiny/policy")}, "lower MAX_HISTORY"),
        ({"INDEX_FILE": "nowhere.json"}, "INDEX_FILE = 'nowhere.json': cannot be read ([Errno 2] No such"),
        ({"TEST_FILE": "nowhere.csv"}, "TEST_FILE = 'nowhere.csv': cannot be read as csv ([Errno 2] No"),
        ({"HEADS": 3}, "must be an even multiple of HEADS"),
    ],
)
def test_constants_that_do_not_fit_are_one_sentence(rec, constants, sentence):
    module = rec(**constants)
    with pytest.raises(module.UserError) as error:
        module.RecTrainer()
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_a_sasrec_file_of_another_kind_is_one_sentence(rec, tmp_path, suffix):
    path = tmp_path / f"other.{suffix}"
    np.save(path, np.ones((3, 3))) if suffix == "npy" else np.savez(path, users=np.ones(3))
    module = rec(SASREC_FILE=str(path))
    with pytest.raises(module.UserError, match="SASREC_FILE = .* is not a file that data/sasrec.py has made"):
        module.RecTrainer()


def test_a_reward_of_your_own_has_no_share_of_the_best_value(rec, tmp_path, capsys):
    """The default constants ask for the value, which compute_rewards() does not leave behind; or it is 0."""
    module = rec(MAX_STEPS=1)
    Mine = type(
        "Mine",
        (module.RecTrainer,),
        {"compute_rewards": lambda self, histories, items, targets: [float(item) for item in items]},
    )
    Mine().train()
    figures = json.loads((tmp_path / "run/eval_test.json").read_text())
    assert figures["grpo"]["reward"] > 10 and "reward/value" not in figures["grpo"]
    np.save(tmp_path / "zeros.npy", np.zeros((11, 11)))
    rec(MAX_STEPS=1, VALUES_FILE=str(tmp_path / "zeros.npy"), RESUME="no").RecTrainer().train()
    assert "%" not in "".join(line for line in capsys.readouterr().out.splitlines() if line[:7] == "  grpo ")


def test_a_text_is_one_item_not_its_letters(rec, tmp_path):
    codes = {**CODES, "1": ["<a_0>", "<b_7>", "<c_0>"], "0": ["<a_0>", "<b_7>", "<c_1>"]}
    trainer = trainer_of(rec(**write_world(tmp_path / "letters", codes)))
    assert trainer.recommend("10", 3) == trainer.recommend(["10"], 3) != trainer.recommend(["1", "0"], 3)


def test_the_small_model_is_as_large_as_asked(rec):
    config = rec(HIDDEN_SIZE=24, LAYERS=3, HEADS=2).RecTrainer().actor.config
    assert (config.hidden_size, config.intermediate_size) == (24, 96)
    assert (config.num_hidden_layers, config.num_attention_heads) == (3, 2)


# ---------------------------------------------------------------- models with a tokenizer of their own


def test_a_hub_like_tokenizer_gains_and_saves_the_codes(rec, tmp_path):
    words = {"PROMPT_TEMPLATE": "What is {history} ?", "TITLE_ROWS": 1.0, "TITLE_HISTORY_ROWS": 0.5}
    module = rec(ACTOR_MODEL=str(ROOT / "data/tiny/policy"), STAGE="sft", **words)
    trainer = module.RecTrainer()
    before = module.AutoTokenizer.from_pretrained(ROOT / "data/tiny/policy")
    codes = {code for some in CODES.values() for code in some}
    assert len(trainer.tokenizer) == len(before) + len(codes) == module.vocab_size(trainer.actor)
    ids = [row["id"] for row in trainer.sft_rows]
    assert sum(name.startswith("title of ") for name in ids) == 11
    assert sum(name.endswith(" by titles") for name in ids) == round(0.5 * len(trainer.train_rows))
    by_titles = trainer.rl_rows[len(trainer.train_rows) :]  # GRPO asks by titles too
    assert len(by_titles) == round(0.5 * len(trainer.train_rows))
    titles = [f"box of kind {n % 3} number {n}" for n in range(11)]
    row = max(by_titles, key=lambda row: len(row["history"]))
    whole = (
        trainer.prompter.head
        + trainer.tokenizer("; ".join(titles[item] for item in row["history"]), add_special_tokens=False)[
            "input_ids"
        ]
    )
    assert row["ids"] == whole + trainer.prompter.tail and len(row["history"]) > 1
    ids = trainer.train_rows[0]["ids"]
    history = trainer.train_rows[0]["history"]
    assert trainer.tokenizer.decode(ids).replace(" ", "").count("<a_") == len(history)
    first = trainer.tokenizer("What is", add_special_tokens=False)["input_ids"]
    assert [i for i in ids if i in first] and len(ids) > 3 * len(history)
    trainer.train()
    saved = module.AutoTokenizer.from_pretrained(tmp_path / "run/sft/policy")
    for code in codes:
        assert saved(code, add_special_tokens=False)["input_ids"] == [saved.convert_tokens_to_ids(code)]
    start = str(tmp_path / "run/sft/policy")
    module = rec(ACTOR_MODEL=start, STAGE="rl", OUTPUT_DIR=str(tmp_path / "rl"), **words)
    again = module.RecTrainer()
    assert len(again.tokenizer) == len(trainer.tokenizer)
    for one, other in zip(again.actor.parameters(), trainer.actor.parameters()):
        assert torch.equal(one, other)
    asked = []
    module.candidates, plain = lambda *a: asked.extend(a[2]) or plain(*a), module.candidates
    again.train()
    assert read(tmp_path / "rl/logs/metrics.jsonl")[-1]["step"] == 2
    assert {row["id"].endswith(" by titles") for row in asked} == {True, False}


def test_stages_ask_by_titles_where_nothing_stands_behind_the_history(rec, tmp_path):
    model = str(tmp_path / "model")  # without a chat template
    shutil.copytree(ROOT / "data/tiny/policy", model, ignore=shutil.ignore_patterns("*.jinja"))
    trainer = rec(ACTOR_MODEL=model, STAGE="sft", TITLE_ROWS=0.4, TITLE_HISTORY_ROWS=0.25).RecTrainer()
    count = len(trainer.train_rows)
    assert len(trainer.rl_rows) == count + round(0.25 * count)
    assert len(trainer.sft_rows) == len({row["line"] for row in trainer.train_rows}) + round(0.25 * count) + 4


# ---------------------------------------------------------------- stages, runs and resume


def test_the_pictures_of_a_run_are_drawn(rec, tmp_path, request):
    trainer = rec(SFT_EPOCHS=1, MAX_STEPS=1, SAVE_EVERY_N_STEPS=0).RecTrainer()
    trainer.train()
    request.getfixturevalue("drawing")
    trainer.run.draw_plots()
    trainer.test()
    pictures = [path.read_bytes()[:4] for path in (tmp_path / "run").glob("*.png")]
    assert pictures == [b"\x89PNG"] * 3


def test_recommendation_has_an_adapter_on_what_sft_taught(rec, tmp_path):
    for constants in ({}, {"STAGE": "rl", "REFERENCE_SYNC_STEPS": 1}):
        module = rec(LORA_RANK=4, **constants)
        with pytest.raises(module.UserError, match="LORA_RANK = 4 needs STAGE=rl with REFERENCE_SYNC"):
            module.RecTrainer()
    rec(STAGE="sft").RecTrainer().train()
    given = {"STAGE": "rl", "LORA_RANK": 4, "LEARNING_RATE": 1e-3, "MAX_STEPS": 4, "SAVE_EVERY_N_STEPS": 2}
    module = rec(**given, RESUME="no")
    trainer = module.RecTrainer()
    assert trainer.reference is trainer.actor and set(trainer.models) == {"policy"}
    trainer.train()
    out = tmp_path / "run"
    taught = load_file(out / "sft/policy/model.safetensors")
    frozen = {n: p for n, p in trainer.actor.named_parameters() if not p.requires_grad}
    assert all(torch.equal(p, taught[name.replace(".base_layer", "")]) for name, p in frozen.items())
    assert all(p.any() for p in trainer.actor.parameters() if p.requires_grad)
    records = [r for r in read(out / "logs/metrics.jsonl") if r["phase"] == "train"]
    assert records[0]["kl"] == 0 < records[-1]["kl"] and records[0]["first_ratio_deviation"] < NATS
    wanted = (out / "step_4/policy/adapter_model.safetensors").read_bytes()
    assert (out / "best/policy/model.safetensors").exists()
    shutil.rmtree(out / "step_4")
    again = rec(**given, RESUME="yes").RecTrainer()
    assert again.run.step == 2
    again.train()
    assert (out / "step_4/policy/adapter_model.safetensors").read_bytes() == wanted


def test_sft_then_rl_is_all(rec, tmp_path):
    one = rec(OUTPUT_DIR=str(tmp_path / "all")).RecTrainer()
    one.train()
    rec(STAGE="sft", OUTPUT_DIR=str(tmp_path / "two")).RecTrainer().train()
    two = rec(STAGE="rl", OUTPUT_DIR=str(tmp_path / "two")).RecTrainer()
    two.train()
    for a, b in zip(one.actor.parameters(), two.actor.parameters()):
        assert torch.equal(a, b)
    module = rec(STAGE="sft", OUTPUT_DIR=str(tmp_path / "two"))
    with pytest.raises(module.UserError, match="is in its second stage"):
        module.RecTrainer()
    figures = json.loads((tmp_path / "all/eval_test.json").read_text())
    assert {"popularity", "markov", "sft", "grpo", "grpo_minus_sft", "possible"} <= set(figures)
    assert (tmp_path / "all/rec_learning.png").exists()
    with pytest.raises(Exception, match="a history has one item of INDEX_FILE or more"):
        one.recommend([9], 4)


def test_the_reference_is_the_best_policy_of_sft_and_starts_grpo(rec):
    module = rec(SFT_EPOCHS=6, SFT_EVALUATIONS=18, SFT_LEARNING_RATE=3e-2, SFT_PATIENCE=2, MAX_STEPS=1)
    trainer = module.RecTrainer()
    seen = []
    plain = trainer.evaluate_sft

    def watch():
        metrics = plain()
        seen.append((metrics["ndcg@10"], [p.detach().clone() for p in trainer.actor.parameters()]))
        return metrics

    trainer.evaluate_sft = watch
    rolled = []
    plain_rollout = trainer.rollout

    def watch_rollout():
        rolled.append([p.detach().clone() for p in trainer.actor.parameters()])
        return plain_rollout()

    trainer.rollout = watch_rollout
    trainer.train()
    best = max(range(len(seen)), key=lambda i: seen[i][0])
    assert len(seen) < 1 + 6 * 3  # it ended by patience
    for start, ref, wanted in zip(rolled[0], trainer.reference.parameters(), seen[best][1]):
        assert torch.equal(start, wanted) and torch.equal(ref, wanted)
    last_pass = [values for values, _ in seen[-3:]]  # three evaluations a pass, and one before the first
    assert max(last_pass) <= max(value for value, _ in seen[:-3])
    records = read(f"{module.OUTPUT_DIR}/logs/metrics.jsonl")
    assert len([r for r in records if r["phase"] == "eval" and "reward" in r]) == 2  # before it and after it
    first = [r for r in records if "kl" in r][0]
    assert first["kl"] == pytest.approx(0, abs=1e-6)


def test_the_reference_follows_the_actor_when_asked(rec):
    trainer = trainer_of(rec(REFERENCE_SYNC_STEPS=2, REFERENCE_SYNC_ALPHA=0.7))
    with torch.no_grad():
        for parameter in trainer.actor.parameters():
            parameter.add_(1.0)
    trainer.run.step = 1
    before = next(trainer.reference.parameters()).clone()
    trainer.sync_reference()
    assert torch.equal(next(trainer.reference.parameters()), before)
    trainer.run.step = 2
    trainer.sync_reference()
    assert torch.allclose(next(trainer.reference.parameters()), before + 0.7)


def test_evaluating_draws_none_of_the_runs_random_numbers(rec):
    trainer = trainer_of(rec())
    trainer.state.stage = "rl"
    state = torch.get_rng_state()
    one = trainer.evaluate()
    assert torch.equal(state, torch.get_rng_state()) and trainer.evaluate() == one


def test_grpo_raises_the_reward(rec):
    free = {"LEARNING_RATE": 5e-3, "KL_COEF": 0.0, "CANDIDATES": "sample", "RULE_WEIGHT": 0.0}
    module = rec(SFT_EPOCHS=4, MAX_STEPS=40, GROUP_SIZE=6, HIDDEN_SIZE=32, **free)
    module.RecTrainer().train()
    found = [r for r in read(f"{module.OUTPUT_DIR}/logs/metrics.jsonl") if "reward_sampled" in r]
    assert found[-1]["reward_sampled"] > found[0]["reward_sampled"] + 0.05


def words(world, out, **constants):
    constants = {
        **SMALL,
        **world,
        "OUTPUT_DIR": out,
        "MAX_STEPS": 6,
        "SFT_EPOCHS": 1,
        "SAVE_EVERY_N_STEPS": 2,
        "EVAL_EVERY_N_STEPS": 3,
        "SFT_EVALUATIONS": 2,
        "RANKING_WEIGHT": 0.5,
        "MINI_BATCHES": 2,
        "CANDIDATES": "sample",
        **constants,
    }
    return [f"{key}={value}" for key, value in constants.items()]


def start_and_kill(command, metrics, step):
    """Start a run and SIGKILL it as soon as a step stands in its metrics."""
    process = Program(*command, cwd=ROOT)
    deadline = time.time() + 120
    while time.time() < deadline and process.poll() is None:
        if metrics.exists() and f'"phase": "train", "step": {step},' in metrics.read_text():
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    return process.wait().returncode


def test_a_run_killed_in_both_stages_equals_an_unbroken_one_to_the_byte(tmp_path):
    world = write_world(tmp_path / "world")
    runs = {name: tmp_path / name for name in ("whole", "broken")}
    done = Program(ROOT / FILE, *words(world, runs["whole"]), cwd=ROOT).wait()
    assert done.returncode == 0, done.stderr
    broken = [ROOT / FILE, *words(world, runs["broken"])]
    metrics = runs["broken"] / "logs/metrics.jsonl"
    for step in (3, 9):  # of SFT, which has 6, and of GRPO
        assert start_and_kill(broken, metrics, step) == -signal.SIGKILL
        assert (runs["broken"] / f"step_{step - 1}").exists()
    done = Program(*broken, cwd=ROOT).wait()
    assert done.returncode == 0, done.stderr
    assert "Found checkpoint" in done.stdout and "Changed" not in done.stdout
    for part in ("policy", "reference"):
        for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            one, other = (run / "step_12" / part / name for run in runs.values())
            assert one.read_bytes() == other.read_bytes(), name
    assert_same_state(*(run / "step_12/training_state.pt" for run in runs.values()))
    for name in ("metrics.jsonl", "samples.jsonl"):
        one, other = (untimed(run / "logs" / name) for run in runs.values())
        assert one == other and len(one) > 10
    weights = [f"{name}/policy/model.safetensors" for name in ("best", "sft")]
    for name in (*weights, "eval_test.json"):
        one, other = ((run / name).read_bytes() for run in runs.values())
        assert one == other, name
    stages = [record.get("reward") is not None for record in untimed(metrics) if record["phase"] == "train"]
    assert stages == [False] * 6 + [True] * 6


@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_goes_on_in_another_folder_with_all_that_is_its_own(rec, tmp_path, rank):
    """best/ and sft/ of the checkpoint's folder; what stood in the other folder is moved aside."""
    rates = {"LEARNING_RATE": 0.05, "EVAL_EVERY_N_STEPS": 1, "KL_COEF": 0.0, "SAVE_EVERY_N_STEPS": 1}
    rates |= {"SFT_LR_SCHEDULER_TYPE": None, "SFT_WARMUP": 0.0, "SFT_WEIGHT_DECAY": 0.0}
    first = {**rates, "OUTPUT_DIR": str(tmp_path / "first"), "KEEP_LAST_N_CHECKPOINTS": 9, "MAX_STEPS": 3}
    if rank:
        rec(**{**first, "STAGE": "sft", "LEARNING_RATE": 1e-3}).RecTrainer("no").train()
        first |= {"LORA_RANK": rank, "STAGE": "rl", "LEARNING_RATE": 0.5}
    plain = rec(**first)
    trainer = plain.RecTrainer("no" if rank else None)
    evaluate = trainer.evaluate

    def falling():  # best is where GRPO began, one step later the reward is lower
        return {**evaluate(), "reward": -float(trainer.run.step)}

    trainer.evaluate = falling
    trainer.train()
    begin = trainer.state.begin
    policy = json.loads((tmp_path / "first/best/metrics.json").read_text())["step"]
    assert policy == begin
    wanted = trainer.recommend([10, 13], 3)
    assert wanted == recommended(trainer, trainer.reference if not rank else trainer.best[1])
    figures = json.loads((tmp_path / "first/eval_test.json").read_text())
    last = f"{tmp_path}/first/step_{trainer.run.step}"

    (tmp_path / "second/sft").mkdir(parents=True)
    (tmp_path / "second/sft/other").write_text("of another run")
    second = rec(**{**first, "OUTPUT_DIR": str(tmp_path / "second")}).RecTrainer(last)
    assert second.recommend([10, 13], 3) == wanted  # before anything stands in the folder
    second.train()  # it is finished: the table alone is made
    assert json.loads((tmp_path / "second/eval_test.json").read_text()) == figures
    assert figures["grpo"]["reward"] == pytest.approx(figures["sft"]["reward"])  # of best/
    name = "sft/policy/model.safetensors"
    assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    assert [path.read_text() for path in tmp_path.glob("second/old_*/sft/other")] == ["of another run"]

    third = rec(**{**first, "OUTPUT_DIR": str(tmp_path / "second"), "MAX_STEPS": 4}).RecTrainer("yes")
    third.train()
    assert third.run.step == begin + 4 and (tmp_path / "second/best/policy").exists()
    early = f"{tmp_path}/second/step_{begin + 3}"
    early = rec(**{**first, "OUTPUT_DIR": str(tmp_path / "third")}).RecTrainer(early)
    early.recommend([10], 1)
    assert early.best[0] == (tmp_path / "second", begin + 4)  # whatever the run comes to
    early.train()
    assert early.best_policy() is early.actor  # which never had a later best/
    figures = json.loads((tmp_path / "third/eval_test.json").read_text())
    assert early.evaluate(early.test_rows)["ndcg@10"] == pytest.approx(figures["grpo"]["ndcg@10"])
    assert figures["grpo"]["ndcg@10"] != pytest.approx(figures["sft"]["ndcg@10"])


def test_the_base_of_an_adapter_is_never_one_of_another_folder(rec, tmp_path):
    lora = {"LORA_RANK": 2, "STAGE": "rl", "MAX_STEPS": 1}
    for name in ("one", "other"):
        rec(STAGE="sft", OUTPUT_DIR=str(tmp_path / name), SEED=len(name)).RecTrainer().train()
    rec(**lora, OUTPUT_DIR=str(tmp_path / "one")).RecTrainer("no").train()
    shutil.copytree(tmp_path / "one/sft", tmp_path / "kept")
    found = rec(**lora, OUTPUT_DIR=str(tmp_path / "other")).RecTrainer(f"{tmp_path}/one")
    base = load_script(FILE).AutoModelForCausalLM.from_pretrained(tmp_path / "kept/policy")
    for name, weight in found.actor.state_dict().items():
        if "lora" not in name and "base_layer" in name:
            assert torch.equal(weight, base.state_dict()[name.replace(".base_layer", "")]), name
    shutil.rmtree(tmp_path / "one/sft")
    module = rec(**lora, OUTPUT_DIR=str(tmp_path / "other"))
    with pytest.raises(module.UserError, match="STAGE=rl starts from .*one/sft/policy, which is not there"):
        module.RecTrainer(f"{tmp_path}/one")


def test_rows_that_changed_within_a_pass_are_refused(rec, tmp_path):
    words = {"ACTOR_MODEL": str(ROOT / "data/tiny/policy"), "STAGE": "sft", "SAVE_EVERY_N_STEPS": 1}
    words |= {"PROMPT_TEMPLATE": "{history} ?", "KEEP_LAST_N_CHECKPOINTS": 99, "SFT_BATCH_SIZE": 60}
    first = rec(**words, TITLE_ROWS=1.0).RecTrainer()
    first.train()
    module = rec(**words, OUTPUT_DIR=str(tmp_path / "other"))
    says = f"stands within a pass over {len(first.sft_rows)} rows, there are"
    with pytest.raises(module.UserError, match=says):
        module.RecTrainer(f"{tmp_path}/run/step_1")
    again = rec(**words, OUTPUT_DIR=str(tmp_path / "other")).RecTrainer(f"{tmp_path}/run")  # the pass is over
    assert again.state.cursor == 0


def test_copied_with_rewards_alone_it_runs_from_anywhere(tmp_path):
    shutil.copytree(ROOT / "rewards", tmp_path / "alone/rewards")
    shutil.copy(ROOT / FILE, tmp_path / "alone/grpo_rec.py")
    world = write_world(tmp_path / "world")
    command = [sys.executable, str(tmp_path / "alone/grpo_rec.py")]
    command += words(world, tmp_path / "run", MAX_STEPS=1, SAVE_EVERY_N_STEPS=0)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Test rows:" in done.stdout


def test_the_log_of_the_made_world_knows_nothing_of_quality_and_shows_what_is_regretted(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "data")
    import make_rec

    fits, values, exposure = make_rec.build_world(np.random.default_rng(0))
    shelf = np.arange(500) // 10
    chance = make_rec.logged_distribution(fits, exposure, [3, 17, 204])
    worth = values[205].reshape(50, 10)[20]  # of its own shelf, which fits
    for number in range(50):
        items = shelf == number
        assert np.ptp(chance[items] / exposure[items]) < 1e-9 * (chance[items] / exposure[items]).max()
        assert np.sort(exposure[items])[-1] == pytest.approx(16 * np.sort(exposure[items])[-2])
    assert worth.argmin() == exposure.reshape(50, 10)[20].argmax()
    assert sorted(worth / 0.3) == pytest.approx([0.1, *np.linspace(0.2, 1, 9)], abs=1e-3)
    value = make_rec.after(values, [3, 204])
    assert value == pytest.approx((0.5 * values[3].astype(float) + values[204]) / 1.5)


@pytest.fixture
def long_world(monkeypatch):
    """make_rec.py with a long log of 30 users and 300 items; its constants come back."""
    monkeypatch.syspath_prepend(ROOT / "data")
    import make_rec

    for name, value in {"LONG_USERS": 30, "LONG_ITEMS": 300, "MOST": 60}.items():
        monkeypatch.setattr(make_rec, name, value)
    return make_rec, partial(monkeypatch.setattr, make_rec)


def users_of(log):
    events = defaultdict(list)
    for user, item, _, rank in log:
        events[user].append((item, rank))
    return list(events.values())


def test_in_the_long_log_a_series_goes_on_and_nobody_takes_an_item_twice(long_world):
    make_rec, change = long_world
    change("SEQUEL", 1.0)
    rng = np.random.default_rng(0)
    factors, popularity, next_part, titles = make_rec.build_long_world(rng)
    log = make_rec.make_long_log(rng, factors, popularity, next_part)
    assert [event[2] for event in log] == sorted(event[2] for event in log)
    followed = 0
    for events in users_of(log):
        items = [item for item, _ in events]
        assert 20 <= len(items) == len(set(items)) <= 60
        for number, (one, (item, rank)) in enumerate(zip(items, events[1:]), 1):
            if next_part[one] >= 0 and next_part[one] not in items[:number]:
                assert item == next_part[one] and rank == 1
                assert titles[one].split()[:-1] == titles[item].split()[:-1], "the parts have one name"
                followed += 1
    assert followed > 30


def test_without_tastes_and_series_the_long_log_is_drawn_by_popularity(long_world):
    make_rec, change = long_world
    change("SEQUEL", 0.0)
    change("LONG_SHARPNESS", 0.0)
    rng = np.random.default_rng(0)
    factors, popularity, next_part, _ = make_rec.build_long_world(rng)
    log = make_rec.make_long_log(rng, factors, popularity, next_part)
    for events in users_of(log):
        taken = set()
        for item, rank in events:
            better = np.flatnonzero(popularity > popularity[item])
            assert rank == 1 + len(set(better.tolist()) - taken)
            taken.add(item)
    taken = np.bincount([event[1] for event in log], minlength=300)
    assert taken[popularity > np.median(popularity)].sum() > 0.7 * len(log)


def test_a_users_taste_shows_in_the_long_log_and_drifts(long_world):
    make_rec, change = long_world

    def likeness(distance):
        """Mean cosine of items that one user took so many places apart."""
        rng = np.random.default_rng(0)
        factors, popularity, next_part, _ = make_rec.build_long_world(rng)
        found = []
        for events in users_of(make_rec.make_long_log(rng, factors, popularity, next_part)):
            items = [item for item, _ in events]
            for one, other in zip(items, items[distance:]):
                found.append(factors[one] @ factors[other])
        return np.mean(found)

    change("DRIFT", 0.3)
    assert likeness(2) > likeness(12) + 0.1
    change("DRIFT", 0.0)
    assert likeness(12) > 0.5


def test_make_codes_reads_the_long_log(long_world, tmp_path, monkeypatch, capsys):
    make_rec, _ = long_world
    make_rec.make_long(tmp_path)
    facts = json.loads((tmp_path / "long.json").read_text())
    assert 0 < facts["possible"]["ndcg@10"] < facts["possible"]["hr@10"] < 1
    import make_codes

    monkeypatch.chdir(tmp_path)
    titles = dict(cells for _, *cells in make_codes.read_csv("TITLES", ("item", "title")))
    assert len(titles) == 300
    events = make_codes.read_log(titles)
    assert len(events) == 30 and sum(map(len, events.values())) == facts["interactions"]


def test_the_shipped_data_is_what_its_program_makes(tmp_path):
    command = [sys.executable, str(ROOT / "data/make_rec.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0
    for path in sorted((ROOT / "data/rec").glob("*[!z]")):  # sasrec.npz is trained
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name
    users = [
        {row["user_id"] for row in csv.DictReader(open(ROOT / f"data/rec/{split}.csv"))}
        for split in ("train", "valid", "test")
    ]
    assert not any(a & b for a, b in itertools.combinations(users, 2))


# ---------------------------------------------------------------- STAGE=evaluate


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def evaluated(rec, policy, **constants):
    """The module, after it has scored a policy, without the files that only training reads."""
    gone = {"TRAIN_FILE": "gone.csv", "VALID_FILE": "gone.csv"}
    module = rec(STAGE="evaluate", EVALUATE_POLICY=policy, **{**gone, **constants})
    assert module.run_stage(module.RecTrainer) == 0
    return module


def test_scoring_best_and_sft_gives_the_figures_of_the_runs_table_and_changes_none_of_its_files(
    rec, tmp_path, capsys
):
    rec().RecTrainer().train()
    before = contents(tmp_path / "run")
    for policy, name in (("best", "grpo"), ("sft", "sft")):
        module = evaluated(rec, policy)
        facts = json.loads((tmp_path / f"run/eval_{policy}_test.json").read_text())
        table = json.loads((tmp_path / "run/eval_test.json").read_text())
        assert facts["rows"] == table["rows"] == 8
        for key, interval in table[name]["intervals"].items():
            figure = facts["figures"][key]
            assert figure["mean"] == pytest.approx(table[name][key], abs=1e-6)
            assert [figure["low"], figure["high"]] == pytest.approx(interval, abs=1e-6)
        for key in ("hr@1", "ndcg@1", "ndcg@3", "ndcg@20", "reward/value", "reward/rule"):
            assert facts["figures"][key]["mean"] == pytest.approx(table[name][key], abs=1e-6)
    said = capsys.readouterr().out
    assert "95% interval" in said and f"written to {tmp_path}/run/eval_sft_test.json and .jsonl" in said
    after = contents(tmp_path / "run")
    new = {path.name for path in after.keys() - before.keys()}
    assert new == {f"eval_{policy}_test.{kind}" for policy in ("best", "sft") for kind in ("json", "jsonl")}
    assert all(after[path] == text for path, text in before.items())
    assert {"STAGE", "EVALUATE_POLICY"} <= set(module._MAY_CHANGE)


def test_a_policy_of_another_folder_is_scored_on_any_file_with_a_record_for_each_row(rec, tmp_path):
    random = trainer_of(rec(OUTPUT_DIR=str(tmp_path / "other")))
    checkpoint = tmp_path / "other/step_4"
    random.run.save_model(random.actor, checkpoint / "policy")
    file = str(tmp_path / "world/valid.csv")
    module = evaluated(rec, str(checkpoint), TEST_FILE=file, SASREC_FILE="gone.npz")
    name = f"eval_other_{checkpoint.name}_valid"
    facts = json.loads((tmp_path / f"run/{name}.json").read_text())
    assert facts["policy"] == str(checkpoint / "policy") and facts["data"] == file and facts["rows"] == 9
    records = read(tmp_path / f"run/{name}.jsonl")
    trainer = module.trainer_to_evaluate(module.RecTrainer, str(checkpoint / "policy"))
    for record, row in zip(records, trainer.test_rows, strict=True):
        wanted = every_logprob(trainer, row["ids"])
        best = sorted(wanted.values(), reverse=True)[:10]
        found = [wanted[item] for item in trainer.catalogue.numbers(record["items"])]
        assert found == pytest.approx(best, abs=NATS), "the likeliest first; two may be equally likely"
        assert record["target"] == trainer.catalogue.items[row["target"]] and record["id"] == row["id"]
        assert record["history"] == trainer.catalogue.names(row["history"])
        gain = 0.0
        if record["target"] in record["items"]:
            gain = 1 / math.log2(record["items"].index(record["target"]) + 2)
        assert record["ndcg@10"] == pytest.approx(gain)
    assert len({tuple(record["items"]) for record in records}) > 3, "each row has its own list"
    for key in ("ndcg@10", "reward"):
        mean = sum(record[key] for record in records) / 9
        assert facts["figures"][key]["mean"] == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("policy", ["best", "sft", "step_7", "nowhere"])
def test_without_a_trained_policy_the_evaluation_says_what_to_do(rec, policy):
    with pytest.raises(Exception, match=f"EVALUATE_POLICY = '{policy}': there is no policy .* train first"):
        evaluated(rec, policy)
    with pytest.raises(Exception, match="needs a TEST_FILE"):
        evaluated(rec, policy, TEST_FILE=None)


def test_a_policy_is_neither_scored_nor_trained_further_with_another_catalogue(rec, tmp_path):
    rec(STAGE="sft").RecTrainer().train()
    swapped = dict(zip(CODES, [*list(CODES.values())[1:], CODES["10"]]))  # the same codes, of other items
    (tmp_path / "swapped.json").write_text(json.dumps(swapped))
    fewer = {item: [f"{code[:-1]}x>" for code in codes] for item, codes in CODES.items()}
    (tmp_path / "unknown.json").write_text(json.dumps(fewer))
    for name in ("swapped", "unknown"):
        with pytest.raises(Exception, match="has learnt the codes of another catalogue"):
            evaluated(rec, "best", INDEX_FILE=str(tmp_path / f"{name}.json"))
    with pytest.raises(Exception, match="has learnt the codes of another catalogue"):
        rec(STAGE="rl", RESUME="no", INDEX_FILE=str(tmp_path / "swapped.json")).RecTrainer()


# ---------------------------------------------------------------- found by a first reader of the file


def test_sft_that_has_ended_is_not_taken_up_again_by_stage_rl(rec, tmp_path):
    words = dict(TEST_FILE=None, MAX_STEPS=1)
    first = rec(STAGE="sft", SFT_EPOCHS=1, **words).RecTrainer()
    first.train()
    steps = first.run.step
    second = rec(STAGE="rl", SFT_EPOCHS=3, RESUME="yes", **words).RecTrainer()
    second.train()
    assert second.state.begin == steps and second.run.step == steps + 1
    longer = rec(STAGE="sft", SFT_EPOCHS=3, RESUME=str(tmp_path / f"run/step_{steps}"), **words)
    longer.OUTPUT_DIR = str(tmp_path / "longer")
    trainer = longer.RecTrainer()
    trainer.train()
    assert trainer.run.step == 3 * steps  # STAGE=sft goes on


def test_an_adapter_does_not_go_on_from_a_whole_models_checkpoint(rec):
    words = dict(TEST_FILE=None, MAX_STEPS=1)
    rec(STAGE="sft", SFT_EPOCHS=1, **words).RecTrainer().train()
    module = rec(STAGE="rl", LORA_RANK=2, RESUME="yes", **words)
    with pytest.raises(module.UserError, match="is a whole model, .*LORA_RANK = 0, not 2: .* RESUME=no"):
        module.RecTrainer()
    trainer = rec(STAGE="rl", LORA_RANK=2, RESUME="no", **words).RecTrainer()
    trainer.train()
    assert trainer.run.step == 1
    module = rec(STAGE="evaluate", EVALUATE_POLICY="step_1")
    with pytest.raises(module.UserError, match="is a LoRA adapter: .* best/policy"):
        module.evaluate_policy(module.RecTrainer)


def test_without_a_kl_term_no_kl_is_logged(rec, tmp_path):
    rec(SFT_EPOCHS=1, MAX_STEPS=1, KL_COEF=0.0, TEST_FILE=None).RecTrainer().train()
    records = read(tmp_path / "run/logs/metrics.jsonl")
    (kl,) = [r["kl"] for r in records if r["phase"] == "train" and "kl" in r]
    assert kl is None


def test_a_reference_that_has_moved_is_not_tested_as_sfts_policy(rec, tmp_path):
    words = dict(SFT_EPOCHS=1, SAVE_EVERY_N_STEPS=0)
    rec(MAX_STEPS=1, REFERENCE_SYNC_STEPS=1, **words).RecTrainer().train()
    rec(MAX_STEPS=2, REFERENCE_SYNC_STEPS=0, RESUME="yes", **words).RecTrainer().train()
    figures = json.loads((tmp_path / "run/eval_test.json").read_text())
    assert "grpo" in figures and "sft" not in figures


def test_the_last_step_is_saved_before_the_test(rec, tmp_path, monkeypatch):
    trainer = rec(SFT_EPOCHS=1, MAX_STEPS=1, SAVE_EVERY_N_STEPS=0).RecTrainer()

    def fails():
        raise ValueError("a reward failed")

    monkeypatch.setattr(trainer, "test", fails)
    with pytest.raises(ValueError, match="a reward failed"):
        trainer.train()
    assert (tmp_path / f"run/step_{trainer.run.step}/manifest.json").exists()


def test_one_user_stays_to_train_on(rec):
    module = rec(VALID_FRACTION=0.9)
    rows = [{"user": user} for user in "aabbcde"]
    train, valid = module.hold_out_users(rows)
    assert len({row["user"] for row in train}) == 1 and len({row["user"] for row in valid}) == 4


def test_titles_need_their_file(rec):
    module = rec(ACTOR_MODEL=str(ROOT / "data/tiny/policy"), ITEM_FILE=None, TITLE_HISTORY_ROWS=0.5)
    with pytest.raises(module.UserError, match="need an ITEM_FILE"):
        module.RecTrainer()


def test_the_small_model_recomputes_activations_if_asked(rec):
    for wanted in (True, False):
        actor = rec(GRADIENT_CHECKPOINTING=wanted).RecTrainer().actor
        assert actor.is_gradient_checkpointing == wanted
