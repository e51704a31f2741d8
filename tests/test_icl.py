"""rce/rce_icl.py: the pointer network, mining, RCE and GRPO, the readers, resume and errors, on a toy world
of questions whose answers a reader can only know from demonstrations."""

import copy
import csv
import importlib.util
import itertools
import json
import math
import random
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from old import ROOT, assert_same_state, load_script, read, untimed
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5Model,
)

pytestmark = pytest.mark.usefixtures("no_pictures")
FILE = "rce/rce_icl.py"
MATHS = load_script(FILE)  # for its formulas, which take no constants
INTENTS = "card loan cash rate lost fees".split()
OTHERS = "please where when how my the bank now why can".split()


def write_rows(path, count, seed):
    draw = random.Random(seed)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "category"])
        for _n in range(count):
            intent = draw.choice(INTENTS)
            words = [intent, *draw.sample(OTHERS, 3), f"w{draw.randrange(12)}"]
            draw.shuffle(words)
            writer.writerow([" ".join(words), f"{intent}_topic"])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    write_rows(folder / "train.csv", 120, 1)
    write_rows(folder / "test.csv", 12, 2)
    return folder


TOY = {
    "VALIDATION_QUERIES": 12,
    "MINE_QUERIES": 40,
    "POOL_SIZE": 16,
    "EMBEDDING_SIZE": 12,
    "RANDOM": 8,
    "SHOTS": 2,
    "BEAMS": 2,
    "SAMPLES": 1,
    "LOCAL": 6,
    "LOCAL_TOP": 2,
    "KEEP_TOP": 4,
    "KEEP_RANDOM": 2,
    "MINE_BATCH_SIZE": 16,
    "HIDDEN_SIZE": 8,
    "HEADS": 2,
    "BATCH_SIZE": 10,
    "RCE_EPOCHS": 2,
    "EVAL_SHOTS": (1, 2),
    "SAVE_EVERY_N_STEPS": 0,
    "EVAL_EVERY_N_STEPS": 3,
}


def toy_constants(world, out, **constants):
    kinds = {"type": "csv", "input": "text", "output": "category"}
    files = {
        "TRAIN_DATASET": {"path": f"{world}/train.csv", **kinds},
        "TEST_DATASET": {"path": f"{world}/test.csv", **kinds},
        "OUTPUT_DIR": str(out / "run"),
    }
    return {**files, **TOY, **constants}


def toy(world, out, **constants):
    return load_script(FILE, **toy_constants(world, out, **constants))


@pytest.fixture
def icl(world, tmp_path):
    """icl(KEY=value, ...): rce/rce_icl.py on the toy world, writing below tmp_path."""
    return lambda **constants: toy(world, tmp_path, **constants)


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    """(module, trainer, folder) of a finished run of RCE and GRPO."""
    folder = tmp_path_factory.mktemp("trained")
    script = toy(world, folder, GRPO_EPOCHS=1)
    trainer = script.ICLTrainer()
    trainer.train()
    return script, trainer, folder / "run"


def pointer(script, queries=3, pool=7, seed=0, layers=2):
    """A policy, and (queries, vectors, pool, known) that it reads."""
    torch.manual_seed(seed)
    policy = script.Pointer(
        script.PointerConfig(
            query_size=5,
            candidate_size=6,
            hidden_size=8,
            layers=layers,
            heads=2,
            dropout=0.3,
            pointer_temperature=0.1,
        )
    ).eval()
    first, first_and_last = [1.0, 2, 3, 1, 0, 0], [2, 1, 2, 3, 0, 0]
    later, last = [-1, 1, 2, 2, 2, 1], [1, -1, 1, 2, 1, 2]
    policy.choice_weights.data = torch.tensor([[first, first_and_last], [later, last]]) / 90
    pools = torch.stack([torch.randperm(20)[:pool] % 5 for _ in range(queries)])  # answers occur twice
    known = torch.rand(queries, 3, pool) * torch.tensor([1.0, -1.0, 1.0])[:, None]
    return policy, (torch.randn(queries, 5), torch.randn(20, 6), pools, known)


# ---------------------------------------------------------------- the pointer network


def test_log_probabilities_equal_a_step_by_step_computation():
    script = load_script(FILE)
    policy, (queries, vectors, pool, known) = pointer(script)
    pointers = torch.tensor([[[0, 3, 6], [6, 3, 0]], [[1, 2, 4], [5, 0, 1]], [[2, 6, 1], [3, 4, 5]]])
    with torch.no_grad():
        found = script.list_logprobs(policy(queries, vectors, pool, known, pointers), pointers)
    p = {name: x.detach() for name, x in policy.named_parameters()}

    def norm(x, name):
        return torch.nn.functional.layer_norm(x, (8,), p[f"{name}.weight"], p[f"{name}.bias"])

    for q, i in itertools.product(range(3), range(2)):
        keys = norm(
            vectors[pool[q]] @ p["candidate_projection.weight"].T + p["candidate_projection.bias"],
            "candidate_norm",
        )
        state = 5 * queries[q] @ p["query_projection.0.weight"].T + p["query_projection.0.bias"]
        state = state * (1 + torch.erf(state / math.sqrt(2))) / 2
        state = state @ p["query_projection.3.weight"].T + p["query_projection.3.bias"]
        state = norm(state, "query_norm")
        for layer in range(2):
            weights, biases = (p[f"attention.{layer}.in_proj_{x}"].chunk(3) for x in ("weight", "bias"))
            query, key, value = (x @ w.T + b for x, w, b in zip((state[None], keys, keys), weights, biases))
            heads = []
            for h in (slice(0, 4), slice(4, 8)):
                share = (query[:, h] @ key[:, h].T / 2).softmax(-1)
                heads.append(share @ value[:, h])
            out = torch.cat(heads, -1)[0] @ p[f"attention.{layer}.out_proj.weight"].T
            state = norm(state + out + p[f"attention.{layer}.out_proj.bias"], f"attention_norm.{layer}")
        total = 0.0
        left = list(range(7))
        for count, choice in enumerate(pointers[q, i].tolist()):
            weights = 30 * p["choice_weights"][min(count, 1), int(count == 2)]
            cosines = torch.stack([torch.cosine_similarity(state, keys[j], dim=0) for j in left])
            shown = set(range(7)) - set(left)
            votes = {i: max(0.0, known[q, 0, i].item()) + 1e-3 for i in shown}
            of_answer = [sum(votes[i] for i in shown if pool[q, i] == pool[q, j]) for j in left]
            share = torch.tensor(of_answer) / max(1e-9, sum(votes.values()))
            similar, classifier, place = known[q][:, left]
            by_rule = place == place.min()
            scores = (
                weights[0] * similar + weights[1] * classifier + weights[2] * cosines + weights[3] * by_rule
            )
            scores = (scores + share * (weights[4] + weights[5] * similar)) / 0.1
            total += scores.log_softmax(0)[left.index(choice)].item()
            left.remove(choice)
            both = torch.cat([state, keys[choice]])
            gate = torch.sigmoid(both @ p["gate.weight"].T + p["gate.bias"])
            state = gate * state + (1 - gate) * keys[choice]
        assert found[q, i].item() == pytest.approx(total, abs=1e-4)


def test_the_policy_reads_in_float64_what_it_reads_in_float32():
    script = load_script(FILE)
    for seed in range(3):
        policy, inputs = pointer(script, seed=seed, layers=seed)
        pointers = torch.stack([torch.stack([torch.randperm(7)[:4] for _ in range(6)]) for _ in range(3)])
        with torch.no_grad():
            single = script.list_logprobs(policy(*inputs, pointers), pointers)
            inputs = [x.double() if x.is_floating_point() else x for x in inputs]
            double = script.list_logprobs(policy.double()(*inputs, pointers), pointers)
        assert double.dtype == torch.float64 and torch.allclose(single.double(), double, atol=1e-4)


def test_a_new_policy_is_similarity(icl):
    """What it learns of little data starts there, and best/ is never worse on validation."""
    script = icl(SHOTS=3)
    trainer = script.ICLTrainer()
    queries = trainer.splits["validation"]
    similar = script.baseline_accuracies(trainer, {"similarity": 0}, queries, 3)["similarity"]
    picked = trainer.pick(queries, 3)
    for query, numbers in zip(queries, picked):
        cosines = trainer.corpus.similarity(query, trainer.corpus.pool_of(query)).sort(descending=True).values
        found = trainer.corpus.similarity(query, torch.tensor(numbers))
        assert found.tolist() == pytest.approx(cosines[:3].tolist(), abs=1e-6)
    assert trainer.accuracy_of(queries, picked).mean() == similar.mean()


def test_all_ordered_lists_have_probabilities_that_sum_to_one():
    script = load_script(FILE)
    policy, inputs = pointer(script, queries=1, pool=5)
    every = torch.tensor([list(itertools.permutations(range(5), 2))])
    logprobs = script.list_logprobs(policy(*inputs, every), every)
    assert logprobs.exp().sum().item() == pytest.approx(1, abs=1e-5)
    assert len(set(logprobs[0].tolist())) > 15  # order matters


def test_beams_are_the_likeliest_lists_and_one_beam_is_greedy():
    script = load_script(FILE)
    policy, inputs = pointer(script, queries=2, pool=4)
    every = torch.tensor([list(itertools.permutations(range(4), 2))] * 2)
    with torch.no_grad():
        logprobs = script.list_logprobs(policy(*inputs, every), every)
        lists, scores = policy.search(*inputs, 2, beams=12)
        greedy, _ = policy.search(*inputs, 2)
    for q in range(2):
        assert scores[q].tolist() == pytest.approx(sorted(logprobs[q].tolist(), reverse=True), abs=1e-4)
        assert lists[q].tolist() == every[q][logprobs[q].argsort(descending=True)].tolist()
        first = int(policy(*inputs, greedy)[q, 0, 0].argmax())
        assert greedy[q, 0, 0] == first


def test_samples_follow_the_policys_probabilities_and_never_repeat_a_choice():
    script = load_script(FILE)
    policy, inputs = pointer(script, queries=1, pool=4)
    policy.choice_weights.data[1, 1] = torch.tensor([0.1, 0, 0, 0, 0, 0])  # of the last choice
    every = list(itertools.permutations(range(4), 2))
    with torch.no_grad():
        pointers = torch.tensor([every])
        wanted = script.list_logprobs(policy(*inputs, pointers), pointers).exp()[0]
        drawn = policy.sample(*inputs, torch.rand(1, 4000, 2, 4, generator=torch.Generator().manual_seed(1)))
        last = policy.sample(*inputs, torch.zeros(1, 1, 2, 4))[0, 0].tolist()
    counts = [(drawn[0] == torch.tensor(pointer)).all(1).float().mean().item() for pointer in every]
    assert sum(counts) == pytest.approx(1)  # so none repeats
    assert counts == pytest.approx(wanted.tolist(), abs=0.03)
    assert len(set(last)) == 2


def test_a_shorter_pool_has_the_log_probabilities_it_has_alone():
    script = load_script(FILE)
    policy, (queries, vectors, pool, known) = pointer(script, queries=2)
    ragged = pool.clone()
    ragged[0, 4:] = -1
    pointers = torch.tensor([[[1, 3]], [[5, 6]]])
    together = script.list_logprobs(policy(queries, vectors, ragged, known, pointers), pointers)[0]
    inputs = queries[:1], vectors, pool[:1, :4], known[:1, :, :4]
    alone = script.list_logprobs(policy(*inputs, pointers[:1]), pointers[:1])[0]
    assert together.item() == pytest.approx(alone.item(), abs=1e-5)
    with torch.no_grad():
        lists, _ = policy.search(queries, vectors, ragged, known, 4)
    assert sorted(lists[0, 0].tolist()) == [0, 1, 2, 3]


def test_choices_after_a_lists_end_count_nothing():
    script = load_script(FILE)
    policy, inputs = pointer(script)
    pointers = torch.tensor([[[0, 3], [2, -1], [4, 1], [2, -1]]] * 3)  # before the last, after it
    found = script.list_logprobs(policy(*inputs, pointers), pointers)
    one = script.list_logprobs(policy(*inputs, pointers[:, 1:2, :1]), pointers[:, 1:2, :1])
    for n in (1, 3):
        assert found[:, n].tolist() == pytest.approx(one[:, 0].tolist(), abs=1e-5)
    policy.choice_weights.data[0, 1] = 0  # of a list's only choice
    found = script.list_logprobs(policy(*inputs, pointers), pointers)
    assert found[:, 1].tolist() == pytest.approx([-math.log(7)] * 3, abs=1e-5)


def test_the_weights_learn_from_queries_held_out_and_the_network_from_the_others():
    script = load_script(FILE)
    policy, inputs = pointer(script)
    pointers = torch.tensor([[[0, 3], [6, 2]]] * 3)
    plain = script.list_logprobs(policy(*inputs, pointers), pointers)
    held_out = torch.tensor([True, False, True])
    found = script.list_logprobs(policy(*inputs, pointers, held_out), pointers)
    assert torch.equal(found[held_out], plain[held_out])
    for n, weights_learn in ((0, True), (1, False)):
        policy.zero_grad()
        found[n].sum().backward(retain_graph=True)
        moved = {name for name, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
        assert moved == {"choice_weights"} if weights_learn else "choice_weights" not in moved
        assert weights_learn or {"query_projection.0.weight", "gate.weight"} <= moved
    # What the others see: neither classifier nor rule
    policy.choice_weights.data[..., 1:4] = torch.tensor([0.0, 1 / 30, 0.0])
    alone = script.list_logprobs(policy(*inputs, pointers), pointers)
    assert alone[1].tolist() == pytest.approx(found[1].tolist(), abs=1e-5)


def test_the_classifier_has_not_seen_the_query_nor_any_that_asks_the_same(icl, world, tmp_path):
    from sklearn.linear_model import LogisticRegression

    rows = (world / "train.csv").read_text().splitlines()
    (tmp_path / "train.csv").write_text("\n".join([*rows, *rows[1:9]]) + "\n")  # eight questions twice
    script = icl(
        TRAIN_DATASET={"path": f"{tmp_path}/train.csv", "type": "csv", "input": "text", "output": "category"}
    )
    trainer = script.ICLTrainer()
    corpus, answers = trainer.corpus, [demo["answer"] for demo in trainer.demos]
    asked = [script.what_is_asked(demo) for demo in trainer.demos]
    numbers = torch.tensor([0, 3, 5])
    twice = next(q for q in trainer.splits["train"] if asked.count(script.what_is_asked(q)) == 2)
    for query in (twice, trainer.splits["test"][0]):
        found = corpus.log_likelihood(query, numbers)
        number = corpus.number.get(script.what_is_asked(query))
        kept = [n for n in range(len(asked)) if number is None or corpus.asked[n] % 5 != number % 5]
        assert script.what_is_asked(query) not in [asked[n] for n in kept]
        model = LogisticRegression(C=10, max_iter=1000).fit(
            corpus.demo_vectors[kept].numpy(), [answers[n] for n in kept]
        )
        column = dict(zip(model.classes_, model.predict_log_proba(query["vector"][None])[0]))
        wanted = [max(-1, column[answers[n]] / 10) for n in numbers]
        assert found.tolist() == pytest.approx(wanted, abs=1e-6)
    for pool in (corpus.pool_of(twice), corpus.pool_of(twice).flip(0)):  # what is kept is of one pool alone
        twice["pool"] = pool
        known = corpus.inputs([twice])[3]
        assert known[0, 0].tolist() == corpus.similarity(twice, pool).tolist()
        assert known[0, 1].tolist() == corpus.log_likelihood(twice, pool).tolist()
    script = icl(CLASSIFIER_C=0.0)
    assert not script.ICLTrainer().corpus.log_likelihood(twice, numbers).any()


def test_an_answer_that_no_kept_row_has_is_the_least_likely_and_one_alone_is_certain(icl):
    script = icl()
    corpus = script.ICLTrainer().corpus
    query = corpus.demos[0]
    fold = corpus.number[script.what_is_asked(query)] % 5
    corpus.answer_of = (corpus.asked % 5 == fold).long()
    other = int((corpus.asked % 5 == fold).nonzero()[1])
    same = int((corpus.asked % 5 != fold).nonzero()[0])
    assert corpus.log_likelihood(query, torch.tensor([other, same])).tolist() == [-1, 0]


# ---------------------------------------------------------------- the maths


def test_rce_weights_by_hand_and_zscored_once():
    script = load_script(FILE)
    r = [3.0, 1.0]
    wanted = [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))]
    assert script.rce_weights(r, 2.0).tolist() == pytest.approx(wanted)
    scaled = 1 / math.sqrt(2)
    wanted = torch.tensor([scaled, -scaled], dtype=torch.float64).softmax(0).tolist()
    assert script.rce_weights(r, 1.0, "zscore").tolist() == pytest.approx(wanted, rel=1e-3)
    loss = script.rce_loss(torch.tensor([[-1.0, -2.0], [-4.0, 0.0]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    assert loss.item() == pytest.approx((1.5 + 4.0) / 2)


def test_tau_goes_to_its_end_by_equal_factors_over_the_epochs():
    script = load_script(FILE, RCE_EPOCHS=3, TAU=2.0, TAU_END=0.5)
    assert [script.tau_at(epoch, 3) for epoch in (0, 1, 2, 3)] == pytest.approx([2.0, 1.0, 0.5, 0.5])


def test_advantages_are_normalised_once_and_equal_rewards_give_none():
    script = load_script(FILE)
    assert script.group_advantages([3.0, 1.0]).tolist() == pytest.approx([0.7071, -0.7071], abs=1e-3)
    assert script.group_advantages([2.0, 2.0, 2.0]).tolist() == [0, 0, 0]
    assert script.group_advantages([0.7]).tolist() == [0]


@given(st.floats(-1e6, 1e6), st.integers(1, 64))
@example(0.7, 7)
@example(1000.7, 3)
def test_advantages_of_equal_rewards_are_exactly_zero(reward, count):
    assert MATHS.group_advantages([reward] * count).tolist() == [0] * count


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20), st.floats(0.01, 100))
def test_weights_and_advantages_equal_their_formulas_in_float64(rewards, tau):
    r = np.array(rewards)
    advantages = (r - r.mean()) / (r.std(ddof=1) + 1e-4)
    assert np.allclose(MATHS.group_advantages(rewards), advantages, atol=1e-8)
    for kind, scaled in (("raw", r), ("zscore", advantages)):
        powers = np.exp((scaled - scaled.max()) / tau)
        assert np.allclose(MATHS.rce_weights(rewards, tau, kind), powers / powers.sum(), atol=1e-6)


def test_equal_rewards_of_fresh_lists_move_no_weight(icl, monkeypatch):
    """The mean of seven times 0.7 is not 0.7; AdamW makes a step of the rounding."""
    script = icl(
        GRPO_EPOCHS=1,
        ON_POLICY=True,
        GROUP_SIZE=7,
        RCE_EPOCHS=1,
        EVAL_SHOTS=(2,),
        KL_COEF=0.0,
        KL_TARGET=None,
        WEIGHT_DECAY=0.0,
    )
    shaped = script.shaped_rewards
    trainer = script.ICLTrainer()
    begin_grpo = trainer.begin_grpo

    def begin_flat():
        begin_grpo()
        monkeypatch.setattr(script, "shaped_rewards", lambda lists: [0.7] * len(shaped(lists)))

    trainer.begin_grpo = begin_flat
    trainer.train()
    records = untimed(trainer.run.folder / "logs/metrics.jsonl")
    norms = [record["grad_norm"] for record in records if record.get("max_ratio_deviation") is not None]
    assert norms == [0, 0, 0, 0]
    for now, before in zip(trainer.policy.parameters(), trainer.reference.parameters()):
        assert torch.equal(now, before)


def test_both_losses_have_the_gradient_of_each_list_read_alone_in_float64(icl):
    script = icl(STAGE="train", DROPOUT=0.0, KL_COEF=0.3, KL_TARGET=None, GRPO_EPOCHS=1, TAU=0.7, SHOTS=3)
    trainer = script.ICLTrainer()
    groups = trainer.miner.mine(trainer.splits["train"][:5], 3)
    trainer.oracle = math.nan
    trainer.train_rows = []
    for k, group in enumerate(groups):
        candidates = group.candidates[: 3 + k]  # rows of the batch have lists to fill up
        rewards = [n % 3 + 0.1 * n for n in range(len(candidates))]
        trainer.train_rows.append(
            {
                "id": group.query["id"],
                "query": group.query,
                "pool": group.pool,
                "candidates": candidates,
                "held_out": False,
                "rewards": rewards,
            }
        )
    batch = trainer.next_batch()
    torch.manual_seed(1)
    for parameter in trainer.policy.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    trainer.state.stage = "grpo"
    policy, reference = copy.deepcopy(trainer.policy).double(), copy.deepcopy(trainer.reference).double()

    def every_choice(model, row, c):
        queries, vectors, pool, known = trainer.corpus.inputs([row["query"]])
        pointers = torch.tensor([[c["pointer"]]])
        found = model(queries.double(), vectors.double(), pool, known.double(), pointers)[0, 0]
        return found, found.gather(1, pointers[0, 0][:, None]).sum()

    surrogate, kls = [], []
    for row in batch.rows:
        r = np.array(row["rewards"])
        advantages = (r - r.mean()) / (r.std(ddof=1) + 1e-4)
        for c, advantage in zip(row["candidates"], advantages.tolist()):
            now, logprob = every_choice(policy, row, c)
            before, old = every_choice(reference, row, c)
            ratio = (logprob - old.detach()).exp()
            surrogate.append(torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
            for place in range(len(c["pointer"])):
                free = [j for j in range(now.shape[1]) if j not in c["pointer"][:place]]
                p, q = now[place, free], before[place, free].detach()
                kls.append((p.exp() * (p - q)).sum())
    loss = -torch.stack(surrogate).mean() + 0.3 * torch.stack(kls).mean()
    loss.backward()
    wanted = torch.cat([x.grad.flatten() for x in policy.parameters() if x.grad is not None])
    inputs = *batch.inputs, batch.pointers
    every = trainer.policy.eval()(*inputs)
    found, metrics = trainer.grpo(batch, every, script.list_logprobs(every, batch.pointers), inputs)
    found.backward()
    gradient = torch.cat([x.grad.flatten() for x in trainer.policy.parameters() if x.grad is not None])
    assert metrics["clip_fraction"] > 0 and found.item() == pytest.approx(loss.item(), rel=1e-4)
    assert (gradient - wanted).norm() < 1e-4 * wanted.norm()

    policy.zero_grad()
    losses = []
    for row in batch.rows:
        r = np.array(row["rewards"])
        weights = np.exp((r - r.max()) / 0.7)
        weights /= weights.sum()
        losses.append(-sum(w * every_choice(policy, row, c)[1] for w, c in zip(weights, row["candidates"])))
    loss = torch.stack(losses).mean()
    loss.backward()
    wanted = torch.cat([x.grad.flatten() for x in policy.parameters() if x.grad is not None])
    trainer.policy.zero_grad()
    found = script.rce_loss(script.list_logprobs(trainer.policy(*inputs), batch.pointers), batch.weights)
    found.backward()
    gradient = torch.cat([x.grad.flatten() for x in trainer.policy.parameters() if x.grad is not None])
    assert found.item() == pytest.approx(loss.item(), rel=1e-4)
    assert (gradient - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize("advantage, ratio", [(a, r) for a in (1.0, -1.0) for r in (0.5, 0.9, 1.1, 1.5)])
def test_the_clip_stops_the_gradient_on_the_right_side(advantage, ratio):
    script = load_script(FILE)
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    script.grpo_loss(logprobs, torch.zeros(1, 1), torch.tensor([[advantage]]), 0.2).sum().backward()
    clipped = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
    assert logprobs.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_the_kl_of_a_choice_is_exact_and_masked_candidates_count_nothing():
    script = load_script(FILE)
    p, q = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])
    taken = torch.tensor([-1e9])
    found = script.choice_kl(torch.cat([p.log(), taken]), torch.cat([q.log(), taken]))
    assert found.item() == pytest.approx((p * (p / q).log()).sum().item())
    assert script.adapt_kl_coef(1.0, 10.0, 1.0) == pytest.approx(1.02)
    assert script.adapt_kl_coef(1.0, 0.9, 1.0) == pytest.approx(0.99)


def test_gold_answers_weigh_by_how_many_gave_them():
    script = load_script(FILE, GOLDS="annotators")
    assert script.gold_weights(["red", "Red.", "blue", "the red", "blue", "x"]) == pytest.approx(
        {"red": 1.0, "blue": 2 / 3, "x": 1 / 3}
    )
    assert script.gold_weights(["red"]) == {"red": 1.0}


@pytest.mark.parametrize("agreeing, wanted", [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)])
def test_vqa_accuracy_is_the_official_leave_one_out_mean(agreeing, wanted):
    script = load_script(FILE)
    golds = ["yes"] * agreeing + [f"other {n}" for n in range(10 - agreeing)]
    assert script.vqa_accuracy("Yes.", golds) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "said, same",
    [
        ("The  two dogs", "2 dogs"),
        ("dont", "don't"),
        ("1,000", "1000"),
        ("2.5", "2.5"),
        ("None", "0"),
        ("red/blue", "red blue"),
        ("Its", "its"),
        ("what?", "what"),
        ("an apple\n", "apple"),
        ("hed", "he'd"),
        ("couldn'tve", "couldn't've"),
        ("couldnt've", "couldn't've"),
        ("'ows'at", "'ow's'at"),
    ],
)
def test_answers_are_normalised_as_the_vqa_evaluation_does(said, same):
    assert load_script(FILE).normalise_vqa(said) == load_script(FILE).normalise_vqa(same)


def test_vqas_table_of_contractions_has_its_own_keys_alone():
    normalise = load_script(FILE).normalise_vqa
    for said in ("lets go", "im", "ive", "couldntve", "its"):  # none of them is a key
        assert normalise(said) == said
    assert normalise("somebody'd") == "somebodyd"  # the one that goes the other way there


def test_of_several_golds_the_best_counts_unless_they_are_annotators():
    script = load_script(FILE)
    golds = ["NYC", "New York"]
    assert [script.answer_accuracy(text, golds) for text in ("nyc.", "new york", "york")] == [1, 1, 0]
    assert script.gold_weights([*golds, "nyc"]) == {"NYC": 1, "New York": 1}
    taken = script.new_candidate((0, 1))
    script.take_answer(taken, "New York", {"golds": golds})
    assert (taken["soft"], taken["hard"], taken["eval_mode"]) == (1, 1, "exact")
    script.GOLDS = "annotators"
    assert script.answer_accuracy("nyc", golds) == pytest.approx(1 / 6)
    assert script.vqa_accuracy("nyc", golds) == pytest.approx(1 / 6)
    assert script.gold_weights([*golds, "nyc"]) == pytest.approx({"NYC": 2 / 3, "New York": 1 / 3})
    script.take_answer(taken, "New York", {"golds": golds})
    assert taken["eval_mode"] == "vqa" and taken["soft"] == pytest.approx(1 / 6)


def test_the_two_more_reward_modes_by_hand():
    modes = load_script(FILE)
    columns = [1, 0], [1.0, 0.0], [0.9, 0.4], [0.5, 0.5]
    assert modes.hard_plus_gtprob_plus_rel(*columns) == pytest.approx([2.9, 0.45])


# ---------------------------------------------------------------- readers


def test_votes_by_hand(icl):
    script = icl(PRIOR_STRENGTH=0.5)
    demos = [{"answer": a, "vector": np.array(v)} for a, v in (("x", [1.0, 0.0]), ("y", [0.0, 1.0]))]
    demos.append({"answer": "x", "vector": np.array([-1.0, 0.0])})
    reader = script.VoteReader(demos)
    query = {"vector": np.array([0.8, 0.6]), "golds": ["x"]}
    total = 0.5 + 0.8 + 0.6 + 0.002
    (probability,) = reader.gold_probabilities([({**query, "golds": ["y"]}, demos[:2])])
    assert probability == pytest.approx((0.5 / 3 + 0.601) / total)
    asked = [(query, demos[:2]), (query, [demos[1]]), (query, [])]
    assert reader.answers(asked) == ["x", "y", "x"]  # of no demonstration the commonest
    both = [reader.probability(reader.votes(query, demos), answer) for answer in "xy"]
    assert sum(both) == pytest.approx(1)


def tiny_tokenizer():
    """A token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: n for n, word in enumerate(["<pad>", "</s>", "<other>", *alphabet])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


LLAMA = {
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 600,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def save_random(model, folder, *parts):
    with torch.no_grad():  # far from uniform
        for parameter in model.parameters():
            parameter.mul_(4)
    for part in (model, *parts):
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    """A folder with a random reader."""
    folder = tmp_path_factory.mktemp("readers")
    torch.manual_seed(0)
    save_random(LlamaForCausalLM(LlamaConfig(**LLAMA)), folder / "llama", tiny_tokenizer())
    return folder


def asked_rows():
    rows = [
        {"text": f"what is {'so ' * n}{n}", "answer": f"a{n}", "golds": [f"a{n}"], "image": None}
        for n in range(5)
    ]
    rows[1]["golds"] = ["a1", "b", "b", "b", "cc"]
    return [(rows[0], [rows[1]]), (rows[1], [rows[2], rows[4]]), (rows[2], [])]


def test_a_language_models_gold_probability_is_that_of_each_gold_read_alone(icl, readers):
    script = icl(READER_BATCH_SIZE=2, GOLDS="annotators")
    reader = script.LanguageReader(f"{readers}/llama", torch.device("cpu"))
    found = reader.gold_probabilities(asked_rows())
    for (query, demos), probability in zip(asked_rows(), found):
        shown = "".join(f"Question: {d['text']}\nAnswer: {d['answer']}\n\n" for d in demos)
        prompt = reader.tokenizer(f"{shown}Question: {query['text']}\nAnswer:")["input_ids"]
        wanted = 0.0
        weights = {"a1": 1 / 3, "b": 1.0, "cc": 1 / 3}
        weights = weights if len(query["golds"]) > 1 else {query["golds"][0]: 1.0}
        for gold, weight in weights.items():
            ids = reader.tokenizer(f" {gold}")["input_ids"]
            logits = reader.model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
            product = sum(logits[len(prompt) + n - 1, token].item() for n, token in enumerate(ids))
            ends = reader.tokenizer("\n")["input_ids"] + [1]  # and EOS
            wanted += weight * math.exp(product) * logits[-1, ends].exp().sum().item()
        assert probability == pytest.approx(wanted, rel=1e-3) and 0 < probability < 1
        assert reader.gold_probabilities([(query, demos)]) == [pytest.approx(wanted, rel=1e-3)]


QWEN = (  # how Qwen2.5's tokenizer, and Llama 3's but for numbers, cut a text before merging
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COLOURS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black"}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Folders of a base and a chat model that have learnt COLOURS (coal is dark one time in four), by a
    tokenizer that cuts as Qwen2.5's."""
    draw = random.Random(0)
    told = [(q, a) for q, a in COLOURS.items() for _ in range(4)]
    told[-1] = ("coal", "dark")
    shown = "Question: {}\nAnswer: {}\n\n"
    turns = "<|im_start|>user\nQuestion: {}\nAnswer:<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>"
    documents = {
        "base": ["".join(shown.format(*pair) for pair in draw.sample(told, 3)) for _ in range(64)],
        "chat": [turns.format(*pair) for pair in draw.sample(told * 4, 64)],
    }
    made = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(QWEN), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        documents["base"] * 9,
        trainers.BpeTrainer(
            vocab_size=340,
            special_tokens=["<pad>", "</s>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    folder = tmp_path_factory.mktemp("qwen")
    for name, texts in documents.items():
        end = "<|im_end|>" if name == "chat" else "</s>"
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token=end)
        tokenizer.chat_template = CHATML if name == "chat" else None
        torch.manual_seed(0)
        sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64}
        config = {**LLAMA, **sizes, "initializer_range": 0.2, "eos_token_id": tokenizer.eos_token_id}
        model = LlamaForCausalLM(LlamaConfig(**config))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for n in range(60):
            ids = tokenizer(texts[n % 4 * 16 :][:16], return_tensors="pt", padding=True)["input_ids"]
            model(input_ids=ids, labels=ids.masked_fill(ids == 0, -100)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.generation_config.repetition_penalty = 1.5  # Qwen2.5-0.5B-Instruct has one, of 1.1
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("name", ["base", "chat"])
def test_gt_prob_is_how_often_a_reader_gives_the_gold_where_two_newlines_are_a_token(icl, qwen, name):
    """P("\\n") was taken, where the reader writes "\\n\\n", or a chat's end."""
    script = icl(READER=f"{qwen}/{name}")
    reader = script.LanguageReader(f"{qwen}/{name}", torch.device("cpu"))
    assert len(reader.tokenizer("\n\n")["input_ids"]) == 1
    rows = [{"text": q, "answer": a, "golds": [a]} for q, a in COLOURS.items()]
    asked = [(query, [] if name == "chat" else rows[:2]) for query in rows]
    assert reader.answers(asked) == list(COLOURS.values())
    scored = reader.gold_probabilities(asked)
    drawn = [reader.answers([pair] * 60, do_sample=True, top_k=0) for pair in asked]
    often = [np.mean([text == pair[0]["answer"] for text in texts]) for pair, texts in zip(asked, drawn)]
    assert scored == pytest.approx(often, abs=0.15) and min(scored) < 0.9 < max(scored)
    reader.ends = torch.tensor(reader.tokenizer("\n")["input_ids"])
    assert max(reader.gold_probabilities(asked)) < 0.1


def test_what_ends_an_answer_is_every_token_that_begins_with_a_newline_and_eos(icl, qwen):
    reader = icl().LanguageReader(f"{qwen}/chat", torch.device("cpu"))
    texts = {reader.tokenizer.decode([n]) for n in reader.ends.tolist()}
    assert {"<|im_end|>", "\n", "\n\n"} <= texts and all(text[0] in " \n\r<" for text in texts)


def test_a_chat_is_the_readers_own_template_around_the_prompt(icl, qwen):
    row = {"text": "sky", "golds": ["blue"]}
    reader = icl(INSTRUCTION="Say. ").LanguageReader(f"{qwen}/chat", torch.device("cpu"))
    assert reader.prompt(row, []) == (
        "<|im_start|>user\nSay. Question: sky\nAnswer:<|im_end|>\n<|im_start|>assistant\n"
    )
    script = icl(CHAT_TEMPLATE=False, QUERY="Q: {text} A: ")
    reader = script.LanguageReader(f"{qwen}/chat", torch.device("cpu"))
    assert reader.prompt(row, []) == "Q: sky A:"  # the blank is the answer's


def test_golds_begin_where_a_tokenizer_merges_nothing_with_the_prompt(icl, readers):
    """Two letters are a token: a prompt of odd length has one that an answer's beginning merges with."""
    script = icl(READER_BATCH_SIZE=2, GOLDS="annotators")
    reader = script.LanguageReader(f"{readers}/llama", torch.device("cpu"))
    asked = []
    reader.ids_of = lambda texts: [[text[n : n + 2] for n in range(0, len(text), 2)] for text in texts]
    chances = [math.log(0.3)] * 2
    reader.inputs = lambda texts, pairs: reader.ids_of(texts)
    reader.answer_logprobs = lambda rows, lengths: asked.extend(zip(rows, lengths)) or chances
    reader.prompt = lambda query, demos: query["text"]
    rows = [{"text": "abcde", "golds": ["fg"]}, {"text": "abcd", "golds": ["fg", "h", "h", "h"]}]
    assert reader.gold_probabilities([(row, []) for row in rows]) == pytest.approx([0.3, 0.1 + 0.3])
    assert asked == [(["ab", "cd", "e ", "fg"], 2), (["ab", "cd", " f", "g"], 2), (["ab", "cd", " h"], 1)]


def test_a_language_models_answers_do_not_depend_on_the_batch_and_end_with_the_line(icl, readers):
    script = icl(READER_BATCH_SIZE=3, MAX_ANSWER_TOKENS=6)
    reader = script.LanguageReader(f"{readers}/llama", torch.device("cpu"))
    together = reader.answers(asked_rows())
    assert together == [reader.answers([pair])[0] for pair in asked_rows()] and len(set(together)) > 1
    reader.tokenizer.batch_decode = lambda *of, **options: [" red one \nQuestion: what"]
    assert reader.answers(asked_rows()[:1]) == ["red one"]
    long = {"text": "x" * 700, "golds": ["a"], "answer": "a"}
    with pytest.raises(script.UserError, match="reads 600 tokens, a prompt and its answer have"):
        reader.answers([(long, [])])


def test_a_whole_run_with_a_language_model_for_a_reader(icl, readers):
    script = icl(
        READER=f"{readers}/llama",
        VALIDATION_QUERIES=3,
        MINE_QUERIES=6,
        TEST_QUERIES=2,
        RANDOM=2,
        LOCAL=2,
        KEEP_TOP=2,
        KEEP_RANDOM=1,
        MAX_ANSWER_TOKENS=2,
        EVAL_SHOTS=(2,),
        RCE_EPOCHS=1,
        POOL_SIZE=8,
        REWARD_MODE="hybrid",
    )
    trainer = script.ICLTrainer()
    trainer.train()
    kept = [c for row in trainer.train_rows for c in row["candidates"]]
    assert all(0 < c["gt_prob"] < 1 for c in kept) and len({c["gt_prob"] for c in kept}) > 3


def test_a_whole_run_of_questions_with_images_ten_golds_and_a_reader_of_ones_own(icl, tmp_path):
    for name, count in (("train", 20), ("test", 2)):
        rows = []
        for n in range(count):
            golds = ["red"] * (n % 5) + ["blue"] * (10 - n % 5)
            question = f"what colour is thing{n % 9} on{n % 4}"
            rows.append({"q": question, "a": golds, "i": f"{tmp_path}/{n}.png"})
            (tmp_path / f"{n}.png").touch()
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind = {"type": "jsonl", "input": "q", "output": "a", "image": "i"}
    script = icl(
        TRAIN_DATASET={"path": f"{tmp_path}/train.jsonl", **kind},
        TEST_DATASET={"path": f"{tmp_path}/test.jsonl", **kind},
        VALIDATION_QUERIES=3,
        MINE_QUERIES=4,
        RANDOM=2,
        BEAMS=1,
        SAMPLES=0,
        RETRIEVED=1,
        LOCAL=0,
        KEEP_TOP=2,
        KEEP_RANDOM=1,
        EVAL_SHOTS=(2,),
        RCE_EPOCHS=1,
        POOL_SIZE=6,
        REWARD_MODE="hybrid",
        GOLDS="annotators",
    )
    seen = set()

    class Sees:
        def answers(self, asked):
            seen.update(row["image"] for query, demos in asked for row in (query, *demos))
            return ["red" for _ in asked]

        def gold_probabilities(self, asked):
            return [1 / (2 + query["number"] + sum(d["number"] for d in demos)) for query, demos in asked]

    class Trainer(script.ICLTrainer):
        def load_reader(self):
            return Sees()

    trainer = Trainer()
    trainer.train()
    candidate = trainer.train_rows[0]["candidates"][0]
    assert candidate["eval_mode"] == "vqa" and 0 < candidate["gt_prob"] < 1
    assert seen <= {f"{tmp_path}/{n}.png" for n in range(20)} and len(seen) > 10


@pytest.mark.parametrize("kind", ["bert", "gpt2", "t5"])
def test_a_hub_models_vectors_do_not_depend_on_padding(icl, tmp_path, kind):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer = tiny_tokenizer()
    if kind == "bert":
        model = BertModel(BertConfig(vocab_size=259, **sizes))
    elif kind == "gpt2":  # it has no pad token
        tokenizer.pad_token = None
        model = GPT2Model(GPT2Config(vocab_size=259, n_embd=16, n_layer=1, n_head=2))
    else:
        model = T5Model(T5Config(vocab_size=259, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    folder = save_random(model, tmp_path / "model", tokenizer)
    script = icl(EMBEDDING=folder, READER_BATCH_SIZE=2)
    embedder = script.HubEmbedder(folder, torch.device("cpu"))
    texts = ["a", "a longer text", "third"]
    together = embedder.vectors([{"text": text} for text in texts])
    assert together.shape == (3, 16)
    for text, vector in zip(texts, together):
        assert np.allclose(embedder.vectors([{"text": text}])[0], vector, atol=1e-4)
    trainer = script.ICLTrainer()
    assert trainer.corpus.sizes == (16, 6)  # six answers, whose vectors an SVD decorrelates


# ---------------------------------------------------------------- mining


def test_a_pool_as_large_as_the_data_holds_and_proposes_nothing_but_its_candidates(icl, world, tmp_path):
    """Padding was taken for a candidate: the last demonstration, its own query's answer too."""
    rows = (world / "train.csv").read_text().splitlines()
    (tmp_path / "train.csv").write_text("\n".join([*rows, rows[1], rows[2], rows[2]]) + "\n")
    script = icl(
        POOL_SIZE=300,
        RANDOM=70,
        TRAIN_DATASET={
            "path": str(tmp_path / "train.csv"),
            "type": "csv",
            "input": "text",
            "output": "category",
        },
    )
    trainer = script.ICLTrainer()
    last = next(q for q in trainer.splits["train"] if q["number"] == trainer.demos[-1]["number"])
    same = [q for q in trainer.splits["train"] if q["number"] in (0, 1, 120, 121, 122)]
    queries = [last, *same, *trainer.splits["train"][:5], *trainer.splits["validation"][:5]]
    groups = trainer.miner.mine(queries, 2)
    assert len({len(group.pool) for group in groups}) > 2
    for query, group in zip(queries, groups):
        shown = [trainer.demos[j]["text"] for j in group.pool]
        assert group.pool.min() >= 0 and len(set(group.pool.tolist())) == len(shown)
        assert query["text"] not in shown
        for c in group.candidates:
            assert len(set(c["pointer"])) == len(c["pointer"]) <= 2
            assert 0 <= min(c["pointer"]) <= max(c["pointer"]) < len(shown)
    tried = {j for c in trainer.miner.propose([last], 2)[0].candidates for j in c["pointer"]}
    assert len(tried) > len(groups[0].pool) - 2  # all but an odd one of random lists
    records = [script.group_record(group, trainer.demos) for group in groups]
    script.write_candidates(records, tmp_path / "c.json", {})
    again = script.read_candidates(tmp_path / "c.json", trainer.splits, trainer.demos, trainer.reader)
    assert len(again) == len(dict(records))


def test_a_masked_candidate_is_never_chosen(icl):
    """Where all are masked all are alike, and a masked one was chosen."""
    script = icl(RANDOM=0, RETRIEVED=0)
    policy, (queries, vectors, _, known) = pointer(script, queries=2)
    inputs = queries, vectors, torch.tensor([[4, 3, 9], [6, 5, -1]]), known[:, :, :3]
    lists, scores = policy.search(*inputs, 2, beams=6)
    assert (scores[0] > -1e8).sum() == 6 and (scores[1] > -1e8).sum() == 2
    assert all(set(row) == {0, 1} for row in lists[1, :2].tolist())
    assert set(policy.sample(*inputs, torch.rand(2, 40, 2, 3))[1].flatten().tolist()) == {0, 1}
    for choose in (lambda: policy.search(*inputs, 3), lambda: policy.sample(*inputs, torch.rand(2, 4, 3, 3))):
        with pytest.raises(script.UserError, match="a query's pool holds 2 candidates, a list of 3 needs"):
            choose()
    trainer = script.ICLTrainer()
    few = trainer.splits["test"][0]
    few["pool"] = torch.tensor([7, 8])
    script.BEAMS = 5
    groups = trainer.miner.propose([few, trainer.splits["test"][1]], 2)
    beams = [[c["pointer"] for c in group.candidates if "beam" in c["source"]] for group in groups]
    assert sorted(beams[0]) == [(0, 1), (1, 0)] and len(beams[1]) == 5
    few["pool"] = torch.tensor([7])
    with pytest.raises(script.UserError, match="a query's pool holds 1 candidates"):  # it was an endless loop
        trainer.miner.propose([few], 2)


def test_minings_log_probabilities_equal_trainings(trained):
    script, trainer, folder = trained
    policy = script.load_pointer(folder / "rce/policy", trainer.corpus.sizes)
    miner = script.Miner(trainer.corpus, policy, trainer.reader)
    groups = miner.mine(trainer.splits["train"][:7], 2)
    trainer.policy.load_state_dict(policy.state_dict())
    rows = [
        {
            "id": g.query["id"],
            "query": g.query,
            "pool": g.pool,
            "candidates": g.candidates,
            "rewards": script.shaped_rewards(g.candidates),
        }
        for g in groups
    ]
    trainer.train_rows, trainer.state.cursor = rows, 0
    batch = trainer.next_batch()
    trainer.policy.eval()
    inputs = *batch.inputs, batch.pointers
    logprobs = script.list_logprobs(trainer.policy(*inputs), batch.pointers)
    beams = 0
    for candidates, values in zip(batch.lists, logprobs.tolist()):
        for c, value in zip(candidates, values):
            assert c["logprob"] == pytest.approx(value, abs=1e-4)
            if c["beam_score"] is not None:
                beams += 1
                assert c["beam_score"] == pytest.approx(value, abs=1e-4)
    assert beams


def test_lists_are_distinct_in_order_and_keep_every_source(icl):
    script = icl(BEAMS=4, POOL_SIZE=4, RANDOM=40, RETRIEVED=2, EVAL_SHOTS=(1, 2))
    trainer = script.ICLTrainer()
    (group,) = trainer.miner.propose(trainer.splits["train"][:1], 2)
    pointers = [c["pointer"] for c in group.candidates]
    assert len(set(pointers)) == len(pointers) and len({frozenset(p) for p in pointers}) < len(pointers)
    sources = {source for c in group.candidates for source in c["source"]}
    assert sources == {"beam", "sample", "retrieval", "rule", "random"}
    assert sum(len(c["source"]) for c in group.candidates) == 4 + 3 + 2 + 2 * 2 + 40
    assert all(len(c["source"]) == len(c["temperature"]) for c in group.candidates)
    many = [c for c in group.candidates if "random" in c["source"] and "beam" in c["source"]]
    assert many and all(c["beam_score"] is not None for c in many)


def test_the_share_of_doubles_is_kept_for_each_query_and_logged(icl, mined):
    script = icl()
    trainer = script.ICLTrainer()
    lists = (
        {"pointer": (0, 1), "source": ["beam", "random", "random"]},
        {"pointer": (1, 0), "source": ["rule"]},
    )
    assert script.share_of_doubles(lists) == 0.5
    groups = trainer.miner.propose(trainer.splits["train"][:3], 2)
    for group in groups:
        ways = sum(len(c["source"]) for c in group.candidates)
        assert group.doubles == 1 - len(group.candidates) / ways and 0 < group.doubles < 1
    records = json.loads((mined / "candidates.json").read_text())
    del records["_meta"]
    of_queries = [record["share_of_doubles"] for record in records.values()]
    metrics = [json.loads(line) for line in open(mined / "logs/metrics.jsonl")]
    assert metrics[0]["share of doubles"] == pytest.approx(np.mean(of_queries)) and len(set(of_queries)) > 1


def test_the_rules_lists_are_proposed_forwards_and_backwards(icl):
    trainer = icl(RETRIEVED=2, POOL_SIZE=8).ICLTrainer()
    trainer.corpus.rule = ("classifier, fillers", 3.0)
    query = trainer.splits["train"][0]
    (group,) = trainer.miner.propose([query], 3)
    found = {c["pointer"] for c in group.candidates if "rule" in c["source"]}
    order = trainer.corpus.rule_order(query, "classifier, fillers", 3.0).tolist()
    assert found == {tuple(x) for x in (order[:3], order[3:6], order[2::-1], order[5:2:-1])}


def test_random_lists_try_the_whole_pool_not_its_first_few(icl):
    """The source drew random pointers from as many candidates as a vector has numbers."""
    script = icl(BEAMS=0, SAMPLES=0, RETRIEVED=0, RANDOM=30, POOL_SIZE=60)
    trainer = script.ICLTrainer()
    (group,) = trainer.miner.propose(trainer.splits["train"][:1], 2)
    assert {j for c in group.candidates for j in c["pointer"]} == set(range(60))


def test_no_pool_holds_the_query_or_another_row_that_asks_the_same(icl, world, tmp_path):
    rows = (world / "train.csv").read_text().splitlines()
    (tmp_path / "train.csv").write_text("\n".join([*rows, rows[1].upper(), rows[2]]) + "\n")
    script = icl(
        POOL_SIZE=200,
        TRAIN_DATASET={
            "path": str(tmp_path / "train.csv"),
            "type": "csv",
            "input": "text",
            "output": "category",
        },
    )
    trainer = script.ICLTrainer()
    for query in (*trainer.splits["train"], *trainer.splits["validation"]):
        asked = [trainer.demos[j]["text"].lower() for j in trainer.corpus.pool_of(query).tolist()]
        assert query["text"].lower() not in asked and len(asked) > 90


def test_held_out_queries_are_neither_demonstrations_nor_trained_on(trained):
    script, trainer, folder = trained
    demos = {demo["id"] for demo in trainer.demos}
    validation = {query["id"] for query in trainer.splits["validation"]}
    assert len(validation) == 12 and not demos & validation
    assert not {row["id"] for row in trainer.train_rows} & validation


def test_held_out_pools_are_the_same_under_every_seed_and_training_ones_not(icl):
    found = []
    for seed in (1, 2):
        trainer = icl(SEED=seed, RESUME="no").ICLTrainer()
        first = min(trainer.splits["train"], key=lambda row: row["number"])
        queries = first, trainer.splits["test"][0]
        found.append([trainer.corpus.pool_of(query).tolist() for query in queries])
    assert found[0][0] != found[1][0] and found[0][1] == found[1][1]


def test_similar_pools_hold_the_most_similar(icl):
    trainer = icl(POOL="similarity", POOL_SIZE=5).ICLTrainer()
    query = trainer.splits["test"][0]
    scores = trainer.corpus.demo_vectors @ torch.tensor(query["vector"])
    pool = trainer.corpus.pool_of(query)
    assert scores[pool].min() >= scores[[j for j in range(len(scores)) if j not in pool]].max() - 1e-6


def test_kept_are_the_best_by_gt_prob_some_others_and_the_policys_own(icl):
    script = icl(KEEP_TOP=3, KEEP_RANDOM=2)
    trainer = script.ICLTrainer()
    (group,) = trainer.miner.propose(trainer.splits["train"][:1], 2)
    trainer.miner.score_gold([group])
    every = list(group.candidates)
    own = max((c for c in every if c["beam_score"] is not None), key=lambda c: c["beam_score"])
    own["gt_prob"] = 0.0
    group.alone = []
    trainer.miner.choose_kept(group)
    best = sorted((c["gt_prob"] for c in every), reverse=True)[:3]
    assert sorted((c["gt_prob"] for c in group.candidates), reverse=True)[:3] == best
    assert any(c is own for c in group.candidates) and len(group.candidates) in (5, 6)


def test_recombined_lists_begin_with_what_is_right_alone(icl):
    """A reader blind to order cannot tell (wrong, right) from (right, wrong): the policy would learn both."""
    script = icl(LOCAL_TOP=2, LOCAL=100, KEEP_TOP=100)
    trainer = script.ICLTrainer()
    (group,) = trainer.miner.propose(trainer.splits["train"][:1], 2)
    trainer.miner.score_gold([group])
    pairs = itertools.permutations(group.candidates, 2)
    one, other = next(x for x in pairs if len({*x[0]["pointer"]} & {*x[1]["pointer"]}) == 1)
    one["gt_prob"], other["gt_prob"] = 1.0, 0.99  # the two best share a member
    before = list(group.candidates)
    ranked = sorted(before, key=script.gold_first)
    second = next(c for c in ranked if not set(c["pointer"]) & set(ranked[0]["pointer"]))
    members = {*ranked[0]["pointer"], *second["pointer"]}
    trainer.miner.take_apart(group)
    assert {c["pointer"] for c in group.alone} == {(j,) for j in members} and len(members) == 4
    assert all(c["source"] == ["alone"] for c in group.alone)
    trainer.miner.verify([group], "alone")
    assert all((c["hard"] is None) == (len(c["pointer"]) == 2) for c in group.candidates)
    right = {c["pointer"][0]: n % 2 for n, c in enumerate(group.alone)}
    for c in group.alone:
        c["hard"] = right[c["pointer"][0]]
    known = len(group.candidates)
    trainer.miner.recombine(group, 3)
    new = group.candidates[known:]
    assert len(new) > 20 and all(c["source"] == ["local"] and len(set(c["pointer"])) == 3 for c in new)
    good = {j for j in members if right[j]}
    assert all(set(c["pointer"][: len(good)]) == good for c in new)
    assert {c["pointer"][0] for c in new} == good  # each of them begins some
    assert {c["pointer"][2] for c in new} == set(range(16)) - good  # any row of the pool is a filler
    for c in new:
        c["gt_prob"] = 0.0
    trainer.miner.choose_kept(group)
    for c in group.candidates:
        marks = [right.get(j, 0) for j in c["pointer"]]
        assert marks == sorted(marks, reverse=True) or "beam" in c["source"]
    assert group.candidates[-2:] == [c for c in group.alone if c["hard"]]  # the short ones stand behind


def test_members_are_answered_alone_before_they_are_recombined(icl):
    trainer = icl().ICLTrainer()
    asked = []
    answers = trainer.reader.answers
    trainer.reader.answers = lambda pairs: asked.append([len(shown) for _, shown in pairs]) or answers(pairs)
    groups = trainer.miner.mine(trainer.splits["train"][:3], 2)
    assert len(asked) == 2 and set(asked[0]) == {1} and set(asked[1]) == {2}
    for group in groups:
        assert all(c["hard"] is not None and c["gt_prob"] is not None for c in group.candidates)


def test_a_reader_that_raises_marks_the_list_and_it_is_not_trained_on(icl, capsys):
    script = icl(STAGE="mine")

    class Broken(script.VoteReader):
        def answers(self, asked):
            for query, demonstrations in asked:
                if query["number"] % 3 == 0 and "card_topic" in [d["answer"] for d in demonstrations]:
                    raise RuntimeError("cannot see")
            return super().answers(asked)

    class Trainer(script.ICLTrainer):
        def load_reader(self):
            return Broken(self.demos)

    Trainer().train()
    said = capsys.readouterr().out
    assert "WARNING: the reader failed (cannot see): the policy starts as similarity" in said
    assert "scoring failed" in said
    records = json.loads((script.candidates_path()).read_text())
    del records["_meta"]
    failed = [c for r in records.values() for c in r["pointer_candidates"] if c["eval_failed"]]
    assert failed and all(c["vqa_correct"] is None and "RuntimeError" in c["eval_error"] for c in failed)
    trainer = Trainer()
    groups = script.read_candidates(script.candidates_path(), trainer.splits, trainer.demos, trainer.reader)
    kept = [c for g in groups for c in script.usable(g.candidates)]
    assert len(kept) == sum(len(g.candidates) for g in groups) - len(failed)


def test_a_reader_that_always_raises_ends_the_run_with_a_sentence(icl):
    script = icl()

    class Trainer(script.ICLTrainer):
        def load_reader(self):
            reader = script.VoteReader(self.demos)
            reader.answers = None
            return reader

    with pytest.raises(script.UserError, match=r"the reader failed for every one of \d+ lists: TypeError"):
        Trainer().train()


def test_a_probability_above_one_is_an_error_that_names_the_query(icl):
    script = icl()
    with pytest.raises(script.UserError, match="gives train.csv:7 gt_prob 1.5: it must be from 0 to 1"):
        script.take_gold({}, 1.5, {"id": "train.csv:7"})


@pytest.mark.parametrize(
    "method, gives, says",
    [
        (
            "answers",
            lambda asked: ["x"] * (len(asked) - 1),
            r"gave \d+ values for \d+ lists: it must give one",
        ),
        ("answers", lambda asked: [None] * len(asked), "answers train.csv:.* with None: it must be a text"),
        (
            "gold_probabilities",
            lambda asked: [0.5],
            r"gave 1 values for \d+ lists: it must give one for each",
        ),
        ("gold_probabilities", lambda asked: ["1"] * len(asked), "gt_prob '1': it must be from 0 to 1"),
    ],
)
def test_a_reader_that_gives_too_few_values_or_odd_ones_is_an_error(icl, method, gives, says):
    script = icl()
    trainer = script.ICLTrainer()
    setattr(trainer.reader, method, gives)
    with pytest.raises(script.UserError, match=says):
        trainer.train()


def test_a_reader_that_gives_too_few_answers_in_evaluation_is_an_error(icl):
    script = icl()
    trainer = script.ICLTrainer()
    trainer.reader.answers = lambda asked: ["x"] * (len(asked) - 1)
    with pytest.raises(script.UserError, match="gave 1 values for 2 lists: it must give one for each"):
        trainer.accuracy_of(trainer.splits["test"][:2], [[0], [0]])


def test_votes_count_answers_that_are_written_differently_as_one(icl):
    script = icl()
    vector = np.array([1.0, 0.0], dtype=np.float32)
    demos = [{"answer": answer, "vector": vector} for answer in ("Red.", "red", "blue")]
    reader = script.VoteReader(demos)
    query = {"id": "q", "vector": vector, "golds": ["the red"]}
    assert reader.prior == pytest.approx({"red": 2 / 3, "blue": 1 / 3})
    wanted = (0.2 * 2 / 3 + 2 * 1.001) / (0.2 + 3 * 1.001)
    assert reader.gold_probabilities([(query, demos)]) == pytest.approx([wanted])
    assert reader.answers([(query, demos)]) == ["Red."]  # right by answer_accuracy, which gt_prob now knows
    assert script.answer_accuracy("Red.", query["golds"]) == 1


# ---------------------------------------------------------------- files


def test_json_comes_back_as_it_was_written(trained, tmp_path):
    script, trainer, folder = trained
    groups = trainer.miner.mine(trainer.splits["train"][:3], 2)
    for group in groups:
        group.candidates[0].update(eval_failed=True, eval_error="x", hard=None)
    records = [script.group_record(group, trainer.demos) for group in groups]
    path = tmp_path / "candidates.json"
    script.write_candidates(records, path, {"program": "x"})
    again = script.read_candidates(path, trainer.splits, trainer.demos, trainer.reader)
    for one, other in zip(groups, again):
        assert one.query is other.query and one.pool.tolist() == other.pool.tolist()
        assert [dict(c) for c in one.candidates] == other.candidates
    assert [script.group_record(group, trainer.demos) for group in again] == records


def source_file(tmp_path, numbers, **changed):
    """A file as the seeds' own program wrote it: no pools, fallback marks."""
    records = {}
    for n in numbers:
        others = [m for m in numbers if m != n]
        lists = []
        for i in range(4):
            lists.append(
                {
                    "pointer": [others[i], others[i + 1]],
                    "gen_method": "beam" if i else "random",
                    "beam_score": -i,
                    "logprob_score": -i,
                    "vqa_pred_answer": "a",
                    "vqa_correct": i % 2,
                    "vqa_acc_score": 0.6 * (i % 2),
                    "vqa_eval_mode": "fallback" if i == 3 else "file",
                }
            )
        lists[0].update(changed)
        records[str(n)] = {"pointer_candidates": lists}
    path = tmp_path / "source.json"
    path.write_text(json.dumps(records))
    return str(path)


def test_files_of_the_source_are_read_and_trained_on(icl, tmp_path):
    numbers = list(range(5, 40))
    script = icl(CANDIDATES=source_file(tmp_path, numbers), REWARD_MODE="hard_plus_soft", RCE_EPOCHS=1)
    trainer = script.ICLTrainer()
    assert len(trainer.demos) == 120 and {q["number"] for q in trainer.splits["train"]} < set(numbers)
    trainer.train()
    row = trainer.train_rows[0]
    assert row["rewards"] == pytest.approx([0.0, 1.6, 0.0, 1.6])
    first = row["candidates"][1]
    pool = [trainer.demos[j]["number"] for j in trainer.corpus.pool_of(row["query"])]
    others = [m for m in numbers if m != row["query"]["number"]]
    assert set(pool) == set(range(5, 11)) - {row["query"]["number"]}  # whatever a list points to
    assert [pool[j] for j in first["pointer"]] == others[1:3]


def test_lists_that_the_sources_fallback_marked_can_be_left_out(icl, tmp_path):
    script = icl(CANDIDATES=source_file(tmp_path, range(5, 40)), SKIP_FALLBACK=True)
    trainer = script.ICLTrainer()
    groups = script.read_candidates(script.candidates_path(), trainer.splits, trainer.demos, trainer.reader)
    assert all(len(script.usable(group.candidates)) == 3 for group in groups)


JOIN = load_script("tools/join_candidates.py")


def test_files_of_several_numbers_of_shots_are_joined_and_trained_on(icl, tmp_path, capsys):
    script = icl()
    trainer = script.ICLTrainer()
    trainer.run.log = trainer.run.agree_on_stop = lambda *x: None
    queries = trainer.splits["train"][:10]
    for shots in (1, 2):
        trainer.mine(tmp_path / f"shots{shots}.json", queries[: 4 + 6 * (shots - 1)], shots)
    JOIN.main(str(tmp_path / "all.json"), str(tmp_path / "shots*.json"))
    assert "all.json: 10 queries and " in capsys.readouterr().out
    groups = {}
    for name in ("shots1", "shots2", "all"):
        found = script.read_candidates(
            tmp_path / f"{name}.json", trainer.splits, trainer.demos, trainer.reader
        )
        groups[name] = {group.query["id"]: group for group in found}
    for query in queries:
        of_files = [groups[name][query["id"]] for name in ("shots1", "shots2") if query["id"] in groups[name]]
        joined = groups["all"][query["id"]]
        lists = [c["pointer"] for group in of_files for c in group.candidates]
        assert [c["pointer"] for c in joined.candidates] == list(dict.fromkeys(lists))
        assert joined.pool.tolist() == of_files[0].pool.tolist()  # both of POOL_SIZE, drawn for the query
        assert joined.proposed == sum(group.proposed for group in of_files)
    meta = json.loads((tmp_path / "all.json").read_text())["_meta"]
    assert list(meta["shots"].values()) == [1, 2] and meta["READER"] == "votes"


@pytest.mark.parametrize(
    "words", [["a.json", "b.json"], ["new/all.json", "a.json"], ["all.json", "a.json", "old.json"]]
)
def test_a_join_replaces_no_file_and_mixes_no_kinds(tmp_path, monkeypatch, capsys, words):
    """The first word is the file to write; marked lists and those with a score alone are two kinds."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        records = {"1": {"pointer_candidates": [{"pointer": [3], "vqa_correct": 1}]}}
        (tmp_path / f"{name}.json").write_text(json.dumps(records))
    (tmp_path / "old.json").write_text(json.dumps({"1": {"id_list": [[4]], "score_list": [0.5]}}))
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    with pytest.raises(SystemExit, match="2"):
        JOIN.main(*words)
    said = capsys.readouterr().err
    assert re.search(
        "is there already|there is no folder|have lists with marks, and others with a score alone", said
    )
    assert before == {path.name: path.read_text() for path in tmp_path.iterdir()}


def test_a_list_of_two_files_stands_once_in_the_joined_one():
    records = [{"pointer_candidates": [{"pointer": [3], "vqa_correct": mark}]} for mark in (1, 0)]
    (one,) = JOIN.join_records("1", records)["pointer_candidates"]
    assert one["vqa_correct"] == 1


def test_a_join_of_different_pools_is_their_union(icl, tmp_path):
    records = [
        {"candidate_pool_ids": pool, "pointer_candidates": [{"pointer": pool[:1]}]}
        for pool in ([3, 4], [4, 7])
    ]
    joined = JOIN.join_records("1", records)
    assert joined["candidate_pool_ids"] == [3, 4, 7] and joined["proposed"] == 2
    assert [each["pointer"] for each in joined["pointer_candidates"]] == [[3], [4]]


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"READER": "other"}, "was mined with READER = .*/b.json': 'other'.*; it is 'votes' now"),
        ({"program": None}, "b.json does not say what it was mined with, but others do"),
        ({"text": "other"}, "has another text in another file: they are of different data"),
        ({"lists": 3}, "b.json is no file of candidates .TypeError"),
    ],
)
def test_files_that_do_not_belong_together_are_not_joined(icl, mined, tmp_path, capsys, changed, says):
    records = json.loads((mined / "candidates.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(records))
    query = next(iter(record for key, record in records.items() if key != "_meta"))
    query["query"]["text"] = changed.pop("text", query["query"]["text"])
    query["pointer_candidates"] = changed.pop("lists", query["pointer_candidates"])
    records["_meta"] = {} if "program" in changed else {**records["_meta"], **changed}
    (tmp_path / "b.json").write_text(json.dumps(records))
    paths = [str(tmp_path / name) for name in ("all.json", "a.json", "b.json")]
    if "READER" not in changed:
        with pytest.raises(SystemExit, match="2"):
            JOIN.main(*paths)
        assert re.search(says, capsys.readouterr().err) and not (tmp_path / "all.json").exists()
        return
    JOIN.main(*paths)
    script = icl(CANDIDATES=paths[0])
    with pytest.raises(script.UserError, match=says):
        script.ICLTrainer().train()


def test_the_sources_oldest_files_are_converted_and_trained_on_by_their_score(icl, tmp_path):
    records = {}
    for n in range(30):
        lists = [[n + 1, n + 2, n], [n + 3, n + 1, n], [n + 2, n + 1, n]]
        records[str(n)] = {"id_list": lists, "score_list": [0.5, -0.25, 0.0]}
    (tmp_path / "old.json").write_text(json.dumps(records))
    JOIN.main(str(tmp_path / "new.json"), str(tmp_path / "old.json"))
    constants = {
        "REWARD_MODE": "hybrid",
        "HYBRID_MIX_SCORE": "beam_score",
        "HYBRID_ALPHA": 1.0,
        "RCE_EPOCHS": 1,
    }
    trainer = icl(
        CANDIDATES=str(tmp_path / "new.json"), TEST_ORACLE=False, EVAL_SHOTS=(2,), **constants
    ).ICLTrainer()
    trainer.train()
    row = trainer.train_rows[0]
    n = row["query"]["number"]
    pool = [trainer.demos[j]["number"] for j in trainer.corpus.pool_of(row["query"])]
    chosen = [[pool[j] for j in c["pointer"]] for c in row["candidates"]]
    assert chosen == [[n + 1, n + 2], [n + 3, n + 1], [n + 2, n + 1]]
    assert row["rewards"] == pytest.approx([1.0, 0.0, 1 / 3])


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"pointer": [7, 99]}, "7, 99. has 99, which is no demonstration of the data or not in the pool"),
        ({"pointer": [7, 7]}, "names a demonstration twice"),
        ({"vqa_correct": 3}, "cannot be read .ValueError: vqa_correct takes 0 or 1"),
        ({"pointer": None}, "cannot be read .TypeError"),
    ],
)
def test_an_index_outside_the_pool_is_an_error_that_names_it(icl, tmp_path, changed, says):
    script = icl(CANDIDATES=source_file(tmp_path, range(5, 40)))
    trainer = script.ICLTrainer()
    path = tmp_path / "source.json"
    records = json.loads(path.read_text())
    for key, record in records.items():
        record["candidate_pool_ids"] = [n for n in range(5, 60) if n != int(key)]
    records["6"]["pointer_candidates"][0].update(changed)
    path.write_text(json.dumps(records))
    with pytest.raises(script.UserError, match=f"query 6.*{says}"):
        script.read_candidates(path, trainer.splits, trainer.demos, trainer.reader)


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"candidate_pool_ids": [7, 8, 6]}, "its pool has row 6, which asks what the query asks"),
        ({"candidate_pool_ids": [7, 8, 120]}, "its pool has row 120, which asks what"),
        ({"candidate_pool_ids": [7, 8, 9, 8]}, "its pool is empty or names a demonstration twice"),
        (
            {"pointer_candidates": [{"pointer": [7, 6], "vqa_correct": 1}]},
            "pointer .7, 6. has row 6, which asks",
        ),
        ({"pointer_candidates": [{"pointer": [120, 7], "vqa_correct": 1}]}, "pointer .* has row 120, which"),
    ],
)
def test_no_file_shows_a_query_its_own_answer_or_a_demonstration_twice(icl, world, tmp_path, changed, says):
    rows = (world / "train.csv").read_text().splitlines()
    (tmp_path / "train.csv").write_text("\n".join([*rows, rows[7].upper()]) + "\n")
    script = icl(
        CANDIDATES=source_file(tmp_path, range(5, 40)),
        TRAIN_DATASET={
            "path": str(tmp_path / "train.csv"),
            "type": "csv",
            "input": "text",
            "output": "category",
        },
    )
    records = json.loads((tmp_path / "source.json").read_text())
    records["6"]["pointer_candidates"] = [{"pointer": [7, 8], "vqa_correct": 1}]
    records["6"].update(changed)
    (tmp_path / "source.json").write_text(json.dumps(records))
    splits, demos = script.load_splits(print)
    with pytest.raises(script.UserError, match=f"query 6: {says}"):
        script.read_candidates(tmp_path / "source.json", splits, demos, script.VoteReader(demos))


def test_the_sources_newer_pointers_are_places_in_the_pool_and_the_global_ones_rows(icl, tmp_path):
    script = icl(CANDIDATES=source_file(tmp_path, range(5, 40)))
    path = tmp_path / "source.json"
    records = json.loads(path.read_text())
    for key, record in records.items():
        record["candidate_pool_ids"] = [n for n in range(119, -1, -1) if n != int(key)]
        for c in record["pointer_candidates"]:
            c["pointer_global"] = c["pointer"]
            c["pointer"] = [record["candidate_pool_ids"].index(n) for n in c["pointer"]]
    path.write_text(json.dumps(records))
    splits, demos = script.load_splits(print)
    groups = script.read_candidates(path, splits, demos, script.VoteReader(demos))
    for group in groups:
        found = [demos[group.pool[j]]["number"] for j in group.candidates[0]["pointer"]]
        key = str(group.query["number"])
        assert found == records[key]["pointer_candidates"][0]["pointer_global"]


@pytest.fixture(scope="module")
def mined(world, tmp_path_factory):
    """The folder of a run that has mined, and been tested with TEST_QUERIES = 12."""
    folder = tmp_path_factory.mktemp("mined")
    toy(world, folder, RCE_EPOCHS=1, EVAL_SHOTS=(2,)).ICLTrainer().train()
    return folder / "run"


@pytest.mark.parametrize(
    "key, value",
    [
        ("PRIOR_STRENGTH", 5.0),
        ("POOL_SIZE", 15),
        ("POOL", "similarity"),
        ("EMBEDDING_SIZE", 9),
        ("GOLDS", "annotators"),
        ("SPLIT_SEED", 7),
    ],
)
def test_lists_mined_under_another_reader_or_pool_are_not_trained_on(icl, mined, tmp_path, key, value):
    (tmp_path / "run").mkdir()
    shutil.copy(mined / "candidates.json", tmp_path / "run")
    script = icl(STAGE="train", **{key: value})
    with pytest.raises(script.UserError, match=f"was mined with {key} = .*; it is {value!r} now: set"):
        script.ICLTrainer().train()


def test_a_reward_that_leaves_other_queries_to_train_on_ends_a_resumed_run(icl, tmp_path):
    """state.order is over the queries whose lists differ in reward."""
    script = icl(RCE_EPOCHS=1)
    trainer = script.ICLTrainer()
    trainer.train()
    assert trainer.state.queries == len(trainer.train_rows)
    trainer.run.lock.release(force=True)
    again = icl(RCE_EPOCHS=2, RESUME="yes").ICLTrainer()
    again.state.queries += 1
    with pytest.raises(
        Exception, match="queries to train on, and left .* before the run was stopped: set RE"
    ):
        again.prepare()


@pytest.mark.parametrize("what", ["reader", "embedder"])
def test_lists_marked_by_another_reader_class_or_vectors_are_not_trained_on(icl, mined, tmp_path, what):
    (tmp_path / "run").mkdir()
    shutil.copy(mined / "candidates.json", tmp_path / "run")
    script = icl(STAGE="train", RCE_EPOCHS=1, EVAL_SHOTS=(2,))

    class VoteReader(script.VoteReader):  # its name is that of the file's own
        pass

    class Trainer(script.ICLTrainer):
        def load_reader(self):
            return VoteReader(self.demos) if what == "reader" else super().load_reader()

    if what == "embedder":
        script.make_embedder = lambda demos, device: script.TfidfEmbedder(demos)
    was = "reader class = 'VoteReader'" if what == "reader" else "embedder = 'make_embedder'"
    with pytest.raises(script.UserError, match=f"was mined with {was}; it is '.* of another file' now: set"):
        Trainer().train()
    path = tmp_path / "run/candidates.json"
    records = json.loads(path.read_text())
    for key in ("reader class", "embedder", "digest of the reader's code and files"):
        del records["_meta"][key]  # a file from before these were noted
    path.write_text(json.dumps(records))
    trainer = Trainer()
    trainer.train()
    assert trainer.run.step == 4


READERS = """
class Base:
    best = 1

class MyReader(Base):
    def answers(self, asked):
        return ["cash_topic"] * len(asked)

    def gold_probabilities(self, asked):
        return [0.5] * len(asked)
"""


@pytest.mark.parametrize("what", ["class", "base", "files", "pixels", "nothing"])
def test_lists_marked_by_a_reader_that_has_changed_are_not_trained_on(icl, tmp_path, what):
    changes = {"class": ("[0.5]", "[0.6]"), "base": ("best = 1", "best = 2")}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights").write_text("1")
    path = tmp_path / "run/candidates.json"
    for turn in range(2):
        script = icl(READER=str(tmp_path / "model"))
        text = READERS
        if turn:
            text = READERS.replace(*changes.get(what, ("", "")))
            (tmp_path / "model/weights").write_text("2" if what == "files" else "1")
            script.MAX_IMAGE_PIXELS -= what == "pixels"
        reader = module_of(tmp_path / f"reader{turn}.py", text).MyReader()
        trainer_class = type(
            "Trainer", (script.ICLTrainer,), {"load_reader": lambda self, reader=reader: reader}
        )
        trainer = trainer_class(resume_from_checkpoint="no")
        if not turn:
            trainer.run.log = trainer.run.agree_on_stop = lambda *x: None
            trainer.mine(path, trainer.splits["train"][:6], 2)
    if what == "nothing":
        return script.read_candidates(path, trainer.splits, trainer.demos, trainer.reader)
    said = "MAX_IMAGE_PIXELS" if what == "pixels" else "digest of the reader's code and files"
    with pytest.raises(script.UserError, match=f"was mined with {said} = "):
        script.read_candidates(path, trainer.splits, trainer.demos, trainer.reader)


def test_lists_of_another_search_are_trained_on(icl, mined, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copy(mined / "candidates.json", tmp_path / "run")
    script = icl(STAGE="train", KEEP_TOP=9, HIDDEN_SIZE=4, RCE_EPOCHS=1, EVAL_SHOTS=(2,), TEST_QUERIES=3)
    trainer = script.ICLTrainer()
    trainer.train()
    assert trainer.run.step == 4


@pytest.mark.parametrize("key, value, was", [("TEST_QUERIES", 7, 12), ("KEEP_TOP", 5, 4)])
def test_the_oracle_is_of_the_test_as_it_is_now(icl, mined, tmp_path, key, value, was):
    shutil.copytree(mined, tmp_path / "run")
    script = icl(RESUME="yes", RCE_EPOCHS=1, EVAL_SHOTS=(2,), **{key: value})
    said = f"test_candidates_2_step_4.json was mined with {key} = {was}; it is {value} now: set it back"
    with pytest.raises(script.UserError, match=f"{said}, or delete it"):
        script.ICLTrainer().train()


def test_given_candidates_validate_on_the_pools_that_their_oracle_is_of(icl, tmp_path):
    script = icl(CANDIDATES=source_file(tmp_path, range(5, 40)), REWARD_MODE="hard_plus_soft", RCE_EPOCHS=1)
    trainer = script.ICLTrainer()
    groups = script.read_candidates(script.candidates_path(), trainer.splits, trainer.demos, trainer.reader)
    trainer.choose_rows(groups)
    held_back = [group for group in groups if group.query["split"] == "validation"]
    assert len(held_back) == 7
    for group in held_back:
        assert trainer.corpus.pool_of(group.query).tolist() == group.pool.tolist()


def test_the_oracle_of_lists_that_are_marked_right_or_wrong_alone_is_of_those_marks(icl, tmp_path):
    path = source_file(tmp_path, range(5, 40))
    records = json.loads(Path(path).read_text())
    for record in records.values():
        for c in record["pointer_candidates"]:
            del c["vqa_acc_score"]
    Path(path).write_text(json.dumps(records))
    script = icl(CANDIDATES=path, REWARD_MODE="hard_only", RCE_EPOCHS=1)
    trainer = script.ICLTrainer()
    trainer.choose_rows(script.read_candidates(Path(path), trainer.splits, trainer.demos, trainer.reader))
    assert trainer.oracle == 1.0


def test_a_query_that_the_data_does_not_have_is_an_error(trained, tmp_path):
    script, trainer, folder = trained
    records = json.loads((folder / "candidates.json").read_text())
    key = next(key for key in records if key != "_meta")
    records[key]["query"]["text"] = "another"
    (tmp_path / "x.json").write_text(json.dumps(records))
    with pytest.raises(script.UserError, match=f"query {key}: there is no such query in the data"):
        script.read_candidates(tmp_path / "x.json", trainer.splits, trainer.demos, trainer.reader)


@pytest.mark.parametrize("fault", ["missing", "unexpected", "size"])
def test_a_checkpoint_with_a_wrong_weight_is_an_error(trained, tmp_path, fault):
    from safetensors.torch import load_file, save_file

    script, trainer, folder = trained
    trainer.policy.save_pretrained(tmp_path / "policy")
    weights = load_file(tmp_path / "policy/model.safetensors")
    if fault == "missing":
        del weights["gate.bias"]
    elif fault == "unexpected":
        weights["gate.more"] = torch.zeros(2)
    sizes = (trainer.corpus.sizes[0], 3) if fault == "size" else trainer.corpus.sizes
    save_file(weights, tmp_path / "policy/model.safetensors", {"format": "pt"})
    says = {
        "missing": "missing_keys.*gate.bias",
        "unexpected": "unexpected_keys.*gate.more",
        "size": "reads vectors of",
    }
    with pytest.raises(script.UserError, match=says[fault]):
        script.load_pointer(tmp_path / "policy", sizes)


# ---------------------------------------------------------------- RCE, then GRPO


def test_grpos_first_ratio_is_one_since_old_means_where_grpo_starts(trained):
    """The source took them from before RCE."""
    script, trainer, folder = trained
    records = [r for r in untimed(folder / "logs/metrics.jsonl") if "max_ratio_deviation" in r]
    assert (
        len(records) == 4
        and records[0]["max_ratio_deviation"] < 1e-5
        and records[-1]["max_ratio_deviation"] > 1e-5
    )
    assert records[0]["kl"] == pytest.approx(0, abs=1e-6)


def test_grpo_starts_from_the_best_policy_of_rce_and_freezes_the_projections(trained):
    script, trainer, folder = trained
    before = script.load_pointer(folder / "rce/policy", trainer.corpus.sizes).state_dict()
    after = script.load_pointer(folder / "step_12/policy", trainer.corpus.sizes).state_dict()
    reference = script.load_pointer(folder / "step_12/reference", trainer.corpus.sizes).state_dict()
    for key in before:
        assert torch.equal(before[key], reference[key])
        assert torch.equal(before[key], after[key]) == ("projection" in key), key


def test_grpo_begins_with_an_optimizer_of_its_own_and_the_best_policy_not_the_last(icl):
    script = icl(GRPO_EPOCHS=1, RCE_EPOCHS=1, EVAL_SHOTS=(2,))
    moments = []
    best = {}

    class Trainer(script.ICLTrainer):
        def begin_grpo(self):
            moments.append(len(self.optimizers["policy"].state))
            best.update(script.load_pointer(self.run.folder / "best/policy", self.corpus.sizes).state_dict())
            for parameter in self.policy.parameters():
                parameter.data.neg_()
            super().begin_grpo()
            for model in (self.policy, self.reference):
                assert all(torch.equal(value, best[key]) for key, value in model.state_dict().items())
            moments.append(len(self.optimizers["policy"].state))

    Trainer().train()
    assert moments[0] > 0 and moments[1] == 0


def test_dropout_is_on_in_rce_and_off_in_grpo(icl):
    script = icl(GRPO_EPOCHS=1, DROPOUT=0.5, RCE_EPOCHS=1, EVAL_SHOTS=(2,))
    modes = []

    class Trainer(script.ICLTrainer):
        def record(self, batch, metrics):
            modes.append((self.state.stage, self.policy.training, self.reference.training))
            super().record(batch, metrics)

    Trainer().train()
    assert set(modes) == {("rce", True, False), ("grpo", False, False)}


def test_every_list_counts_and_rewards_are_normalised_once(trained):
    """The source kept five lists and normalised twice."""
    script, trainer, folder = trained
    trainer.state.stage, trainer.state.cursor = "grpo", 0
    trainer.train_rows = [
        {**row, "candidates": row["candidates"][:6], "rewards": [3.0, 0.0, 0.0, 1.0, 0.0, 0.0]}
        for row in trainer.train_rows
    ]
    batch = trainer.next_batch()
    assert batch.present.sum(1).tolist() == [len(c) for c in batch.lists]
    rewards = torch.tensor(batch.rewards[0])
    assert batch.advantages[0].tolist() == pytest.approx(
        ((rewards - rewards.mean()) / rewards.std()).tolist(), rel=1e-3
    )


def test_fresh_lists_are_the_policys_own_and_their_ratio_is_one(icl):
    script = icl(GRPO_EPOCHS=1, ON_POLICY=True, GROUP_SIZE=3, RCE_EPOCHS=1, EVAL_SHOTS=(2,))
    trainer = script.ICLTrainer()
    trainer.train()
    records = untimed(trainer.run.folder / "logs/metrics.jsonl")
    ratios = [r["max_ratio_deviation"] for r in records if "max_ratio_deviation" in r]
    assert len(ratios) == 4 and max(ratios) == 0
    samples = [json.loads(line) for line in open(trainer.run.folder / "logs/samples.jsonl")]
    assert samples[-1]["source"] == ["sample"] and samples[0]["source"] != ["sample"]


@pytest.mark.parametrize("mode, reads", [("hard_only", 0), ("hard_plus_gtprob_plus_rel", 1)])
def test_fresh_lists_are_read_for_gt_prob_only_if_the_reward_has_it(icl, monkeypatch, mode, reads):
    script = icl(ON_POLICY=True, GRPO_EPOCHS=1, GROUP_SIZE=3, REWARD_MODE=mode)
    trainer = script.ICLTrainer()
    calls = []
    score = trainer.reader.gold_probabilities
    monkeypatch.setattr(trainer.reader, "gold_probabilities", lambda asked: calls.append(1) or score(asked))
    queries = trainer.splits["train"][:2]
    rows = [{"query": query, "candidates": []} for query in queries]
    lists, rewards = trainer.fresh_lists(SimpleNamespace(rows=rows, inputs=trainer.corpus.inputs(queries)))
    assert len(calls) == reads and all(c["hard"] in (0, 1) for group in lists for c in group)
    assert all((c["gt_prob"] is not None) == bool(reads) for group in lists for c in group)


def test_fresh_lists_of_hybrid_have_the_log_probabilities_of_the_policy_that_drew_them(icl):
    script = icl(
        GRPO_EPOCHS=1, ON_POLICY=True, GROUP_SIZE=3, RCE_EPOCHS=1, EVAL_SHOTS=(2,), REWARD_MODE="hybrid"
    )
    trainer = script.ICLTrainer()
    seen = []
    update = trainer.update

    def look(batch):
        if trainer.state.stage == "grpo":
            every = trainer.policy.eval()(*batch.inputs, batch.pointers)
            found = [[c["logprob"] for c in lists] for lists in batch.lists]
            assert script.list_logprobs(every, batch.pointers).tolist() == [
                pytest.approx(row, abs=1e-5) for row in found
            ]
            seen.append(batch)
        return update(batch)

    trainer.update = look
    trainer.train()
    assert len(seen) == 4 and any(len(set(r)) > 1 for batch in seen for r in batch.rewards)


def test_a_run_none_of_whose_queries_trains_the_weights_says_so(icl, capsys):
    small = {"MINE_QUERIES": 4, "RCE_EPOCHS": 1, "EVAL_SHOTS": (2,), "TEST_QUERIES": 2, "RESUME": "no"}
    icl(WEIGHT_QUERIES=1e-6, **small).ICLTrainer().train()
    assert "WARNING: none of them trains the terms' weights" in capsys.readouterr().out
    icl(WEIGHT_QUERIES=1.0, **small).ICLTrainer().train()
    assert "trains the terms' weights" not in capsys.readouterr().out


def test_validation_queries_and_flat_ones_are_not_trained_on(trained):
    script, trainer, folder = trained
    groups = script.read_candidates(folder / "candidates.json", trainer.splits, trainer.demos, trainer.reader)
    for c in groups[-1].candidates:
        c.update(hard=0, gt_prob=0.25)
    trainer.choose_rows(groups)
    asked = {row["id"] for row in trainer.train_rows}
    assert groups[-1].query["id"] not in asked
    assert asked == {g.query["id"] for g in groups[12:-1]}
    assert trainer.oracle == np.mean([max(c["soft"] for c in g.candidates) for g in groups[:12]])
    held_out = [row["held_out"] for row in trainer.train_rows]
    assert 0 < sum(held_out) < len(held_out) / 3  # a tenth of 40, drawn by each query's own stream


def test_it_learns_what_the_reader_needs(world, tmp_path, drawing):
    """Above similarity on queries that it has not seen."""
    write_rows(tmp_path / "train.csv", 500, 3)
    write_rows(tmp_path / "test.csv", 100, 4)
    script = toy(
        tmp_path,
        tmp_path,
        MINE_QUERIES=None,
        RCE_EPOCHS=5,
        BATCH_SIZE=16,
        HIDDEN_SIZE=32,
        POOL_SIZE=12,
        LEARNING_RATE=5e-3,
        EMBEDDING_SIZE=25,
        RANDOM=12,
        LOCAL=20,
        SAVE_EVERY_N_STEPS=0,
    )
    script.ICLTrainer().train()
    found = json.loads((tmp_path / "run/eval_test.json").read_text())["shots"]["2"]
    accuracy = found["accuracy"]
    assert (tmp_path / "run/icl_results.png").read_bytes()[:4] == b"\x89PNG"
    assert accuracy["random"] < accuracy["similarity"] < accuracy["RCE"] <= accuracy["oracle"]
    assert found["share_of_gap"] > 0.4


# ---------------------------------------------------------------- which constant, row and seed goes where


def test_each_number_of_the_search_is_handed_where_it_belongs(icl):
    """Four of them are 4 by default."""
    script = icl(
        BEAMS=3,
        SAMPLES=2,
        SAMPLE_TEMPERATURES=[0.5, 3.0, 9.0],
        RETRIEVED=5,
        RANDOM=13,
        LOCAL_TOP=4,
        LOCAL=11,
        KEEP_TOP=7,
        KEEP_RANDOM=6,
        POOL_SIZE=30,
    )
    trainer = script.ICLTrainer()
    (group,) = trainer.miner.propose(trainer.splits["train"][:1], 3)
    assert {len(c["pointer"]) for c in group.candidates} == {3} and len(group.pool) == 30
    counts = {}
    for c in group.candidates:
        for key in zip(c["source"], c["temperature"]):
            counts[key] = counts.get(key, 0) + 1
    assert counts == {
        ("beam", None): 3,
        ("sample", 0.5): 2,
        ("sample", 3.0): 2,
        ("sample", 9.0): 2,
        ("retrieval", None): 5,
        ("rule", None): 10,
        ("random", None): 13,
    }
    for c in group.candidates:  # the pick is among the best
        c["gt_prob"] = 0.9 if "beam" in c["source"] else 0.1 + 0.01 * group.candidates.index(c)
    best = sorted(group.candidates, key=script.gold_first)[:4]
    trainer.miner.take_apart(group)
    assert len(group.alone) == 4 * 3 and {c["pointer"][0] for c in group.alone} >= {*best[0]["pointer"]}
    before = len(group.candidates)
    trainer.miner.recombine(group, 3)
    assert 8 < len(group.candidates) - before <= 11
    trainer.miner.choose_kept(group)
    assert len(group.candidates) == 7 + 6


def test_samples_of_each_temperature_and_query_are_drawn_from_a_stream_of_their_own(icl):
    script = icl(BEAMS=0, RETRIEVED=0, RANDOM=0, SAMPLES=3, SAMPLE_TEMPERATURES=[50.0, 60.0])
    trainer = script.ICLTrainer()
    queries = trainer.splits["train"][:2]
    for query in queries:
        query["vector"], query["pool"] = queries[0]["vector"], torch.arange(16)  # alike but for their streams
    drawn = []
    for group in trainer.miner.propose(queries, 2):
        for temperature in (50.0, 60.0):
            drawn.append([c["pointer"] for c in group.candidates if temperature in c["temperature"]])
    assert all(one != other for one, other in itertools.combinations(drawn, 2))


def test_the_networks_constants_are_handed_to_it_and_to_one_that_is_loaded(icl, tmp_path):
    shape = {"HIDDEN_SIZE": 12, "LAYERS": 2, "HEADS": 3, "DROPOUT": 0.15, "POINTER_TEMPERATURE": 0.7}
    script = icl(**shape)
    policy = script.load_pointer(None, (5, 6))
    got = policy.config
    assert (got.query_size, got.candidate_size, got.hidden_size, got.layers, got.heads) == (5, 6, 12, 2, 3)
    assert (got.dropout, got.pointer_temperature, policy.query_projection[2].p) == (0.15, 0.7, 0.15)
    policy.save_pretrained(tmp_path / "policy")
    script = icl(**{**shape, "DROPOUT": 0.4, "POINTER_TEMPERATURE": 0.9})
    again = script.load_pointer(tmp_path / "policy", (5, 6))
    assert (again.query_projection[2].p, again.config.pointer_temperature) == (0.4, 0.9)


def test_both_stages_have_their_own_rate_and_schedule(trained):
    """RCE has 8 steps here and GRPO 4; each falls to its own end."""
    script, trainer, folder = trained
    rates = [r["learning_rate"] for r in untimed(folder / "logs/metrics.jsonl") if r["phase"] == "train"]
    wanted = [3e-3 * (1 - n / 8) for n in range(8)] + [1e-4 * (1 - n / 4) for n in range(4)]
    assert rates == pytest.approx(wanted)


@pytest.mark.parametrize(
    "kind, wanted",
    [
        ("linear", [0.5, 1, 1, 0.75]),
        ("cosine", [0.5, 1, 1, (1 + math.sqrt(0.5)) / 2]),
        (None, [0.5, 1, 1, 1]),
        ("plateau", [0.5, 1, 0.25, 0.25]),
    ],
)
def test_the_rate_warms_up_and_then_follows_its_schedule(kind, wanted):
    script = load_script(FILE)
    found = [script.learning_rate_scale(step, 6, 2, kind, 2 if step > 1 else 0) for step in range(4)]
    assert found == pytest.approx(wanted)


def test_an_update_takes_its_own_constants(icl, monkeypatch):
    script = icl(
        STAGE="train",
        LEARNING_RATE=7e-3,
        GRPO_LEARNING_RATE=2e-4,
        WEIGHT_DECAY=0.03,
        MAX_GRAD_NORM=0.6,
        CLIP_RANGE=0.35,
        KL_COEF=0.7,
        KL_TARGET=0.05,
        WARMUP_STEPS=5,
        TAU=4.0,
        TAU_END=1.0,
        RCE_EPOCHS=3,
        WEIGHT_REWARDS="zscore",
        BATCH_SIZE=3,
        GROUP_SIZE=5,
        SHOTS=2,
        GRPO_EPOCHS=1,
    )
    trainer = script.ICLTrainer()
    groups = trainer.miner.mine(trainer.splits["train"][:9], 2)
    trainer.oracle = math.nan
    trainer.train_rows = [
        {
            "id": g.query["id"],
            "query": g.query,
            "pool": g.pool,
            "candidates": g.candidates,
            "held_out": False,
            "rewards": [n % 3 + c["gt_prob"] for n, c in enumerate(g.candidates)],
        }
        for g in groups
    ]
    norms = []
    one = torch.ones(())
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda _, most: norms.append(most) or one)
    taus = []
    for _ in range(7):  # three steps an epoch
        batch = trainer.next_batch()
        taus.append(batch.facts["tau"])
        wanted = script.rce_weights(batch.rewards[0], taus[-1], "zscore")
        assert batch.weights[0][: len(wanted)].tolist() == pytest.approx(wanted.tolist(), rel=1e-4)
    assert taus == pytest.approx([4] * 3 + [2] * 3 + [1]) and len(batch.rows) == 3
    found = trainer.update(batch)
    optimizer = trainer.optimizers["policy"]
    assert found["learning_rate"] == pytest.approx(7e-3 / 5) == optimizer.param_groups[0]["lr"]
    assert optimizer.param_groups[0]["weight_decay"] == 0.03 and norms == [0.6]
    assert not trainer.policy.choice_weights.grad.any()  # no query was held out for them

    trainer.state.stage = "grpo"
    assert trainer.update(batch)["learning_rate"] == pytest.approx(2e-4 / 5)
    assert trainer.policy.choice_weights.grad.any()
    assert trainer.make_optimizer(0.5).param_groups[0]["lr"] == 0.5
    trainer.state.kl_coef = script.KL_COEF
    inputs = *batch.inputs, batch.pointers
    every = trainer.policy(*inputs)
    clips = []
    grpo_loss = script.grpo_loss
    monkeypatch.setattr(script, "grpo_loss", lambda *x: clips.append(x[-1]) or grpo_loss(*x))
    loss, metrics = trainer.grpo(batch, every, script.list_logprobs(every, batch.pointers), inputs)
    assert clips == [0.35] and metrics["kl_coef"] == 0.7 and metrics["kl"] > 0
    assert loss.item() == pytest.approx(metrics["policy_loss"] + 0.7 * metrics["kl"], rel=1e-5)
    assert trainer.state.kl_coef == script.adapt_kl_coef(0.7, metrics["kl"], 0.05) != 0.7
    assert [len(x) for x in trainer.fresh_lists(batch)[0]] == [5, 5, 5]


def test_the_score_of_hybrid_is_the_one_that_is_named():
    lists = [{"hard": 0, "soft": 0, "gt_prob": 0, "logprob": x, "beam_score": -x} for x in (1.0, 0.0)]
    for name, wanted in (("logprob", [0.5, 0.0]), ("beam_score", [0.0, 0.5])):
        script = load_script(FILE, REWARD_MODE="hybrid", HYBRID_MIX_SCORE=name)
        assert script.shaped_rewards(lists) == wanted


def test_infoscore_is_what_a_list_adds_to_the_log_probability_of_the_golds():
    """By hand: of four lists, beside the 0.02 that the golds have without demonstrations."""
    lists = [{"hard": h, "soft": 0.0, "gt_prob": p} for h, p in ((0, 0.02), (1, 0.5), (0, 0.1), (1, 0.0))]
    gains = [math.log(p / 0.02) for p in (0.02, 0.5, 0.1, 1e-6)]
    scaled = [(gain - min(gains)) / (max(gains) - min(gains)) for gain in gains]
    script = load_script(FILE, REWARD_MODE="hybrid", HYBRID_MIX_SCORE="infoscore", HYBRID_ALPHA=1.0)
    assert script.shaped_rewards(lists) == pytest.approx(scaled)
    script.HYBRID_ALPHA = 0.25
    wanted = [0.25 * x + 0.75 * c["hard"] for x, c in zip(scaled, lists)]
    assert script.shaped_rewards(lists) == pytest.approx(wanted)
    with pytest.raises(script.UserError, match="needs .*infoscore, which the candidates lack"):
        script.shaped_rewards([{"hard": 1, "soft": 1.0}, {"hard": 0, "soft": 0.0}])


@pytest.mark.parametrize("score", ["logprob", "infoscore"])
def test_fresh_lists_get_gt_prob_if_infoscore_needs_it(icl, mined, score):
    words = {"GRPO_EPOCHS": 1, "ON_POLICY": True, "REWARD_MODE": "hybrid", "HYBRID_MIX_SCORE": score}
    trainer = icl(CANDIDATES=str(mined / "candidates.json"), GROUP_SIZE=3, **words).ICLTrainer()
    with trainer.run.session(""):
        trainer.prepare()
    trainer.state.stage = "grpo"
    lists = trainer.next_batch().lists
    known = {c["gt_prob"] is not None for of_query in lists for c in of_query}
    assert known == {score == "infoscore"}


def test_a_run_may_imitate_given_beams_and_a_second_one_goes_on_from_its_policy(icl, mined, tmp_path):
    """The scores of the beams alone weigh, then the marks of the reader."""
    records = json.loads((mined / "candidates.json").read_text())
    for key, record in records.items():
        if key != "_meta":
            for n, candidate in enumerate(record["pointer_candidates"]):
                candidate |= {"beam_score": -float(n), "vqa_correct": 0}
    (tmp_path / "beams.json").write_text(json.dumps(records))
    words = {"REWARD_MODE": "hybrid", "HYBRID_MIX_SCORE": "beam_score", "HYBRID_ALPHA": 1.0}
    first = icl(CANDIDATES=str(tmp_path / "beams.json"), OUTPUT_DIR=str(tmp_path / "first"), **words)
    trainer = first.ICLTrainer()
    trainer.test = lambda: None
    trainer.train()
    for row in trainer.train_rows:
        assert row["rewards"].index(max(row["rewards"])) == 0, "the first beam weighs most"
    policy = sorted((tmp_path / "first").glob("step_*/policy"))[-1]
    second = icl(CANDIDATES=str(mined / "candidates.json"), POINTER_POLICY=str(policy)).ICLTrainer()
    assert torch.equal(second.policy.gate.weight, trainer.policy.gate.weight)


def test_rows_are_split_by_their_own_numbers_and_seeds(icl):
    one = icl(VALIDATION_QUERIES=9, TEST_QUERIES=7, MINE_QUERIES=11)
    other = icl(VALIDATION_QUERIES=9, TEST_QUERIES=7, SEED=5)
    third = icl(VALIDATION_QUERIES=9, TEST_QUERIES=7, SPLIT_SEED=5)
    (a, demos), (b, _), (c, _) = (script.load_splits(print) for script in (one, other, third))
    numbers = [{name: [row["number"] for row in rows] for name, rows in x.items()} for x in (a, b, c)]
    assert {name: len(rows) for name, rows in a.items()} == {"train": 111, "validation": 9, "test": 7}
    assert len(demos) == 111 and numbers[0]["test"] == list(range(7))
    assert numbers[0]["validation"] == numbers[1]["validation"] != numbers[2]["validation"]
    assert numbers[0]["train"] != numbers[1]["train"] and set(numbers[0]["train"]) == set(numbers[1]["train"])
    trainer = one.ICLTrainer()
    asked = []
    trainer.mine = lambda path, queries, shots: asked.append((queries, shots))
    assert not trainer.prepare()
    assert asked == [(trainer.splits["validation"] + trainer.splits["train"][:11], 2)]


def test_one_file_is_enough_a_fifth_of_it_is_held_out(icl, world, tmp_path, capsys):
    script = icl(TEST_DATASET=None, MINE_QUERIES=20, POOL_SIZE=300, RCE_EPOCHS=1)
    splits, demos = script.load_splits(print)
    said = "TEST_DATASET is None: 24 rows of TRAIN_DATASET are the test, 96 are left"
    assert said in capsys.readouterr().out
    numbers = [{row["number"] for row in rows} for rows in (*splits.values(), demos)]
    train, validation, test, shown = numbers
    assert len(test) == 24 and len(validation) == 12 and shown == train
    assert len(train | validation | test) == 120
    rows = list(csv.DictReader(open(world / "train.csv")))
    assert all(rows[row["number"]]["text"] == row["text"] for row in (*splits["test"], *demos))
    assert {row["split"] for row in splits["test"]} == {"test"}
    for seed, same in (("SEED", True), ("SPLIT_SEED", False)):
        other = icl(TEST_DATASET=None, **{seed: 5}).load_splits(print)[0]["test"]
        assert ({row["number"] for row in other} == test) == same
    assert len(icl(TEST_DATASET=None, TEST_QUERIES=7).load_splits(print)[0]["test"]) == 7
    trainer = script.ICLTrainer()
    trainer.train()
    asked = set(json.loads((trainer.run.folder / "candidates.json").read_text())) - {"_meta"}
    assert not {int(number) for number in asked} & test and len(trainer.select("where is my card", 2)) == 2


def test_nothing_is_fitted_on_a_text_that_is_held_out(icl, monkeypatch):
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    fitted = []
    fit = TfidfVectorizer.fit_transform
    monkeypatch.setattr(
        TfidfVectorizer, "fit_transform", lambda self, x: fitted.append(list(x)) or fit(self, x)
    )
    script = icl()
    trainer = script.ICLTrainer()
    trainer.corpus.embedder = None
    trainer.corpus.embed_query({"text": "card", "image": None})
    assert fitted == [[demo["text"] for demo in trainer.demos]] * 2
    vectors = []
    fit_logistic = LogisticRegression.fit
    monkeypatch.setattr(
        LogisticRegression, "fit", lambda self, x, y: vectors.extend(x) or fit_logistic(self, x, y)
    )
    for query in trainer.splits["train"] + trainer.splits["test"]:
        trainer.corpus.log_likelihood(query, torch.tensor([0]))
    script.choose_rules(trainer)
    known = {demo["vector"].tobytes() for demo in trainer.demos}
    assert {vector.astype(np.float32).tobytes() for vector in vectors} <= known and len(vectors) > len(known)
    prior = {script.normalise_vqa(demo["answer"]) for demo in trainer.demos}
    assert set(trainer.reader.prior) == prior and sum(trainer.reader.prior.values()) == pytest.approx(1)


def test_the_policy_that_is_kept_is_chosen_on_validation_queries_alone(icl):
    script = icl(EVAL_SHOTS=(1, 4))
    trainer = script.ICLTrainer()
    trainer.oracle = 0.75
    trainer.corpus.rule = ("kNN", 5)
    asked = []
    marks = iter([[0.0, 0, 1, 1], [0, 0, 1, 0], [1, 0, 1, 1], [1, 0, 1, 1]])  # the rule's, the policy's
    trainer.accuracy_of = lambda queries, lists: asked.append((queries, lists)) or np.array(next(marks))
    found = trainer.evaluate()
    # Means over two shots: 0, 0, 1, .5 and 1, 0, 1, 1; paired differences 1, 0, 0, .5: mean .375, error .207
    assert found["clear_gain"] == pytest.approx(0.375 - 2 * np.std([1, 0, 0, 0.5]) / 2)
    assert (found["pick_accuracy"], found["oracle_accuracy"]) == (0.75, 0.75)
    queries = trainer.splits["validation"]
    assert all(asked_of is queries for asked_of, _ in asked)
    by_rule = [script.rule_lists(trainer, queries, "kNN", 5, shots) for shots in (1, 2)]
    by_policy = [trainer.pick(queries, shots) for shots in (1, 2)]
    assert [lists for _, lists in asked] == by_rule + by_policy
    pools = [set(trainer.corpus.pool_of(query).tolist()) for query in queries]
    assert all(set(x) <= pool for lists in by_policy for x, pool in zip(lists, pools))


@pytest.mark.parametrize("more, wrong, kept", [(2, 0, 0), (4, 0, 1), (4, 1, 0), (6, 1, 1)])
def test_best_leaves_the_rule_for_a_clear_gain_alone(icl, more, wrong, kept):
    """Of 12 questions two more are right: .167 less 2 x .108. Or four: .333 less 2 x .136. Or four, and one
    wrong that was right: .25 less 2 x .172."""
    trainer = icl(SHOTS=1, EVAL_SHOTS=(1,)).ICLTrainer()
    trainer.oracle = math.nan
    rule, picked = np.zeros(12), np.zeros(12)
    picked[:more] = 1
    rule[12 - wrong :] = 1
    gain = picked - rule
    marks = iter([rule, rule, rule, picked])  # step 0, step 1
    trainer.accuracy_of = lambda queries, lists: next(marks)
    trainer.run.write_metrics = lambda *_: None
    for trainer.run.step in (0, 1):
        trainer.run.log_evaluation(trainer.evaluate())
    assert (gain.mean() > 2 * gain.std() / 12**0.5) == bool(kept)
    assert json.loads((trainer.run.folder / "best/metrics.json").read_text())["step"] == kept


@pytest.mark.parametrize(
    "name, setting", [("similarity", 0), ("kNN", 5), ("classifier", 3.0), ("classifier, fillers", 3.0)]
)
def test_a_new_policy_shows_what_its_rule_shows_to_the_last_row(icl, name, setting):
    script = icl(POOL_SIZE=12)
    trainer = script.ICLTrainer()
    trainer.corpus.rule = (name, setting)
    queries = [*trainer.splits["validation"], *trainer.splits["train"][:9]]
    assert trainer.pick(queries, 12) == script.rule_lists(trainer, queries, name, setting, 12)
    assert trainer.pick(queries, 2) == script.rule_lists(trainer, queries, name, setting, 2)


def test_rce_starts_as_the_rule_that_is_best_on_validation_and_remembers_it(icl, monkeypatch, capsys):
    script = icl(STAGE="mine", SHOTS=3)
    settings = {"similarity": 0, "kNN": 20, "classifier": 3.0, "classifier, fillers": 3.0}
    monkeypatch.setattr(script, "choose_rules", lambda trainer: settings)
    trainer = script.ICLTrainer()
    values = {"similarity": 0.8, "kNN": 0.8, "classifier": 0.5, "classifier, fillers": 0.6}

    def mean_accuracy(queries, lists_of):
        assert queries is trainer.splits["validation"]
        (name,) = {
            name
            for name, setting in settings.items()
            if lists_of(3) == script.rule_lists(trainer, queries, name, setting, 3)
        }
        return np.full(12, values[name])

    trainer.mean_accuracy = mean_accuracy
    trainer.train()
    said = capsys.readouterr().out
    assert "similarity 0.800, kNN 0.800, classifier 0.500, classifier, fillers 0.600" in said
    assert "the policy starts as kNN" in said
    resumed = icl(STAGE="mine", SHOTS=3, RESUME="yes").ICLTrainer()
    assert tuple(resumed.corpus.rule) == ("kNN", 20)
    queries = resumed.splits["test"]
    assert resumed.pick(queries, 3) == script.rule_lists(trainer, queries, "kNN", 20, 3)


def test_neighbours_vote_as_scikit_learns_do_and_never_with_the_querys_own_answer(icl):
    from sklearn.neighbors import KNeighborsClassifier

    script = icl()
    trainer = script.ICLTrainer()
    corpus = trainer.corpus
    for query in (trainer.splits["test"][0], trainer.splits["train"][0]):
        number = corpus.number.get(script.what_is_asked(query))
        kept = [n for n in range(len(trainer.demos)) if number is None or corpus.asked[n] % 5 != number % 5]
        model = KNeighborsClassifier(7, weights="distance", metric="cosine", algorithm="brute")
        model.fit(corpus.demo_vectors[kept].numpy(), corpus.answer_of[kept].numpy())
        found = corpus.answer_probabilities(query, "kNN", 7)
        assert found[model.classes_] == pytest.approx(model.predict_proba(query["vector"][None])[0], abs=1e-3)
        assert found.sum() == pytest.approx(1)
    assert number is not None and number not in corpus.asked[kept]


def test_each_baseline_shows_the_rows_that_its_name_says(icl):
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier

    script = icl()
    trainer = script.ICLTrainer()
    queries = trainer.splits["test"][:4]
    answers = [demo["answer"] for demo in trainer.demos]
    vectors = trainer.corpus.demo_vectors.numpy()
    models = {"kNN": KNeighborsClassifier(10, weights="distance", metric="cosine").fit(vectors, answers)}
    models["classifier"] = LogisticRegression(C=3.0, max_iter=1000).fit(vectors, answers)
    settings = {"similarity": 0, "kNN": 10, "classifier": 3.0, "classifier, fillers": 3.0}
    trainer.accuracy_of = lambda _, lists: lists
    found = script.baseline_accuracies(trainer, settings, queries, 3)
    assert list(found) == [
        "no demonstrations",
        "random",
        "similarity",
        "kNN",
        "classifier",
        "classifier, fillers",
    ]
    assert found["no demonstrations"] == [[]] * 4
    places = set()
    for query, drawn, similar in zip(queries, found["random"], found["similarity"]):
        pool = trainer.corpus.pool_of(query).tolist()
        cosines = {j: float(trainer.demos[j]["vector"] @ query["vector"]) for j in pool}
        assert sorted((cosines[j] for j in similar), reverse=True) == pytest.approx(
            sorted(cosines.values(), reverse=True)[:3], abs=1e-6
        )
        assert cosines[similar[0]] >= cosines[similar[1]] >= cosines[similar[2]]
        places.add(tuple(pool.index(j) for j in drawn))
        assert len(set(drawn)) == 3
    assert len(places) == 4  # each query's own draw
    for name, n in itertools.product(("kNN", "classifier"), range(4)):
        pool = trainer.corpus.pool_of(queries[n]).tolist()
        scores = models[name].predict_proba(queries[n]["vector"][None])[0]
        score = dict(zip(models[name].classes_, scores))
        cosines = {j: float(trainer.demos[j]["vector"] @ queries[n]["vector"]) for j in pool}
        order = sorted(pool, key=lambda j: (-score[trainer.demos[j]["answer"]], -cosines[j]))
        wanted = [cosines[j] for j in order[:3]]
        assert [cosines[j] for j in found[name][n]] == pytest.approx(wanted, abs=1e-6)
        if name == "classifier":
            first = trainer.demos[order[0]]["answer"]
            own = [j for j in order if trainer.demos[j]["answer"] == first]
            others = sorted((j for j in pool if j not in own), key=cosines.get)
            wanted = [cosines[j] for j in [*own, *others][:3]]
            assert [cosines[j] for j in found["classifier, fillers"][n]] == pytest.approx(wanted, abs=1e-6)


def test_the_baselines_settings_are_chosen_on_validation_at_one_shot(icl):
    script = icl()
    trainer = script.ICLTrainer()
    asked = []
    values = iter([0.1, 0.9, 0.2, 0.3, 0.5, 0.4, 0.8])
    trainer.accuracy_of = lambda queries, lists: asked.append((queries, lists)) or np.array([next(values)])
    settings = script.choose_rules(trainer)
    assert settings == {"similarity": 0, "kNN": 10, "classifier": 30.0, "classifier, fillers": 30.0}
    for queries, lists in asked:
        assert queries is trainer.splits["validation"] and {len(x) for x in lists} == {1}
    many = [{**demo, "answer": f"answer {n}"} for n, demo in enumerate(trainer.demos * 6)]
    trainer.corpus = script.Corpus(many, trainer.device)
    assert script.choose_rules(trainer) == {"similarity": 0}  # an answer each: nothing to classify


def test_the_policy_picks_for_each_query_beyond_the_first_chunk(icl):
    """64 queries at a time."""
    trainer = icl().ICLTrainer()
    queries = [*trainer.splits["validation"], *trainer.splits["test"], *trainer.splits["train"]]
    queries = [queries[i % len(queries)] for i in range(70)]
    found = trainer.pick(queries, 2)
    assert len(found) == 70
    for i in (0, 63, 64, 69):
        assert found[i] == trainer.pick([queries[i]], 2)[0], i
    assert found[64:] != found[:6]


def test_answers_are_remembered_by_query_and_order(icl):
    trainer = icl().ICLTrainer()
    trainer.reader = SimpleNamespace(
        answers=lambda asked: [f"{query['id']} {demos[0]['number']}" for query, demos in asked]
    )
    one, other = trainer.splits["test"][:2]
    numbers = trainer.demos[3]["number"], trainer.demos[4]["number"]
    for query, lists, wanted in ((one, [3, 4], 0), (one, [4, 3], 1), (other, [3, 4], 0)):
        asked = {**query, "golds": [f"{query['id']} {numbers[wanted]}"]}
        assert trainer.accuracy_of([asked], [lists]).tolist() == [1.0]


def test_the_tests_oracle_is_the_best_accuracy_of_lists_of_as_many_shots(icl, monkeypatch):
    script = icl(EVAL_SHOTS=(1, 3))
    trainer = script.ICLTrainer()
    trainer.run.log = trainer.run.agree_on_stop = lambda *x: None
    queries = trainer.splits["test"]
    read = script.read_candidates

    def graded(*x):
        groups = read(*x)
        for n, group in enumerate(groups):
            assert {len(c["pointer"]) for c in group.candidates} == {1, 3}
            for c in group.candidates:
                c["soft"], c["hard"] = (0.3, 1) if c is group.candidates[0] and n else (0.0, 0)
        return groups

    monkeypatch.setattr(script, "read_candidates", graded)
    assert script.test_oracle(trainer, queries, 3, queries).tolist() == [0.0] + [0.3] * 11


@pytest.mark.parametrize("value, name", [(3, "oracle, 3 queries"), (12, "oracle"), (False, None)])
def test_the_oracle_is_of_as_many_test_queries_as_are_asked_for(icl, mined, tmp_path, capsys, value, name):
    shutil.copytree(mined, tmp_path / "run")
    icl(RESUME="yes", RCE_EPOCHS=1, EVAL_SHOTS=(2,), TEST_ORACLE=value).ICLTrainer().train()
    saved = json.loads((tmp_path / "run/eval_test.json").read_text())
    found = saved["shots"]["2"]
    assert [key for key in found["accuracy"] if key.startswith("oracle")] == [name] * bool(name)
    said = capsys.readouterr().out
    assert ("to the oracle" in said) == (found["share_of_gap"] is not None)
    assert re.findall(r"oracle, \d+ queries", said) == [name] * (value == 3)
    assert name or "oracle " not in said.partition("Test accuracy")[2]
    files = [*(tmp_path / "run").glob("test_candidates_*first*")]
    assert saved["queries"] == 12 and len(files) == (value == 3)
    for path in files:
        records = json.loads(path.read_text())
        assert sorted(records.keys() - {"_meta"}) == ["0", "1", "2"]


def test_the_policy_picks_the_likeliest_of_its_beams(icl):
    script = icl(PICK_BEAMS=16, EMBED_ANSWERS=False)
    trainer = script.ICLTrainer()
    torch.manual_seed(0)
    for parameter in trainer.policy.parameters():
        parameter.data.normal_(0, 0.5)
    trainer.policy.choice_weights.data[:] = torch.tensor([0.0, 0, 0.03, 0, 0, 0])
    query = trainer.splits["test"][1]
    inputs = trainer.corpus.inputs([query])
    lists = torch.tensor([[*itertools.permutations(range(16), 2)]])
    logprobs = MATHS.list_logprobs(trainer.policy.eval()(*inputs, lists), lists)[0]
    greedy = trainer.policy.search(*inputs, 2)[0][0, 0]
    best = lists[0, logprobs.argmax()]
    assert greedy.tolist() != best.tolist()
    assert trainer.pick([query], 2) == [trainer.corpus.pool_of(query)[best].tolist()]


# ---------------------------------------------------------------- STAGE=evaluate


def files_of(folder):
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_policy_is_scored_as_the_runs_own_test_scores_it_and_no_file_changes(icl, trained, tmp_path):
    folder = shutil.copytree(trained[2], tmp_path / "run")
    before = files_of(folder)
    script = icl(STAGE="evaluate", OUTPUT_DIR=str(folder), CANDIDATES=None, MINE_QUERIES=1)
    assert script.run_stage(script.ICLTrainer) == 0
    after = files_of(folder)
    assert after.keys() - before.keys() == {"eval_best_test.json", "eval_best_test.jsonl"}
    assert all(after[name] == text for name, text in before.items())
    found = json.loads(after["eval_best_test.json"])
    records = [json.loads(line) for line in after["eval_best_test.jsonl"].splitlines()]
    rows = {row["id"]: row for row in trained[1].splits["test"]}
    assert found["queries"] == len(records) == 12 and {record["id"] for record in records} == set(rows)
    for shots, of_shots in json.loads(before["eval_test.json"])["shots"].items():
        wanted = {name: x for name, x in of_shots["accuracy"].items() if name not in ("RCE", "oracle")}
        wanted["policy"] = wanted.pop("RCE + GRPO")
        means = {name: found["figures"][f"{name}@{shots}"]["mean"] for name in wanted}
        assert means == pytest.approx(wanted)
        for record in records:
            shown, row = record["shots"][shots], rows[record["id"]]
            assert len(shown["demonstrations"]) == int(shots) and record["query"] == row["text"]
            assert shown["accuracy"]["policy"] == (shown["response"] == row["answer"])
        marks = [record["shots"][shots]["accuracy"]["policy"] for record in records]
        assert np.mean(marks) == pytest.approx(wanted["policy"])
    for figure in found["figures"].values():
        assert figure["low"] <= figure["mean"] <= figure["high"]


def test_another_file_is_scored_whatever_the_run_was_tested_on(icl, trained, tmp_path):
    """Its queries, under its name; what the policy was trained on stays as it was."""
    write_rows(tmp_path / "new.csv", 5, 9)
    data = {**trained[0].TEST_DATASET, "path": f"{tmp_path}/new.csv"}
    gone = {"EVAL_DATASET": data, "TEST_DATASET": {**data, "path": "gone.csv"}}
    given = {"EVALUATE_POLICY": str(trained[2] / "best"), "EVAL_SHOTS": (1,)}
    script = icl(STAGE="evaluate", **gone, **given)
    script.evaluate_policy(script.ICLTrainer)
    facts = json.loads((tmp_path / "run/eval_run_best_new.json").read_text())
    records = read(tmp_path / "run/eval_run_best_new.jsonl")
    assert facts["dataset"] == data and facts["queries"] == 5
    rows = (tmp_path / "new.csv").read_text().splitlines()[1:]
    assert [record["query"] for record in records] == [row.rpartition(",")[0] for row in rows]
    mean = np.mean([record["shots"]["1"]["accuracy"]["policy"] for record in records])
    assert facts["figures"]["policy@1"]["mean"] == pytest.approx(mean)
    with pytest.raises(Exception, match="EVAL_DATASET: nowhere.csv: cannot be read"):
        script = icl(STAGE="evaluate", EVAL_DATASET={**data, "path": "nowhere.csv"}, **given)
        script.evaluate_policy(script.ICLTrainer)
    script = icl(EVAL_DATASET=data)  # while training it is not read
    assert script.test_data() == ("TEST_DATASET", script.TEST_DATASET)


def test_own_data_with_the_shipped_test_are_told_so(icl, capsys):
    own = icl().TEST_DATASET
    shipped = {
        "path": f"{ROOT}/data/tiny/test.jsonl",
        "type": "jsonl",
        "input": "problem",
        "output": "solution",
    }
    note = "NOTE: TRAIN_DATASET is your own data, but TEST_DATASET is still the shipped one: set it"
    for test, train, is_told in ((shipped, own, True), (own, own, False), (shipped, shipped, False)):
        icl(TEST_DATASET=test, TRAIN_DATASET=train, TEST_QUERIES=3).load_splits(print)
        assert (note in capsys.readouterr().out) == is_told


def test_with_a_file_of_its_own_the_rows_held_out_for_the_test_are_no_demonstrations(icl, tmp_path, world):
    data = {**icl().TEST_DATASET, "path": f"{world}/test.csv"}
    held_out, demos = icl(TEST_DATASET=None).load_splits(print)
    splits, same_demos = icl(TEST_DATASET=None, STAGE="evaluate", EVAL_DATASET=data).load_splits(print)
    assert [demo["id"] for demo in same_demos] == [demo["id"] for demo in demos]
    assert len(splits["test"]) == 12 and splits["test"] != held_out["test"]


@pytest.mark.parametrize("name", ["step_8", "best/policy"])
def test_a_checkpoint_or_a_folder_is_the_policy_that_is_scored(icl, trained, tmp_path, name):
    given = name if name.startswith("step") else str(trained[2] / name)
    script = icl(STAGE="evaluate", EVALUATE_POLICY=given, TEST_QUERIES=3, EVAL_SHOTS=(1,))
    if name.startswith("step"):
        shutil.copytree(trained[2] / "step_12", tmp_path / "run" / name)
    script.evaluate_policy(script.ICLTrainer)
    facts = [json.loads(path.read_text()) for path in (tmp_path / "run").glob("eval_*_test.json")]
    wanted = tmp_path / "run/step_8/policy" if name.startswith("step") else Path(given)
    assert [(fact["policy"], fact["queries"]) for fact in facts] == [(str(wanted), 3)]
    policy = script.trainer_to_evaluate(script.ICLTrainer, str(wanted)).policy
    assert torch.equal(policy.gate.weight, script.Pointer.from_pretrained(str(wanted)).gate.weight)


@pytest.mark.parametrize(
    "constants, says",
    [
        ({}, "EVALUATE_POLICY = 'best': there is no policy in .*run/best: train first"),
        (
            {"EVALUATE_POLICY": "step_3"},
            "EVALUATE_POLICY = 'step_3': there is no policy in .*run/step_3: train",
        ),
        (
            {"EVALUATE_POLICY": "trained", "SPLIT_SEED": 5},
            "trained on other demonstrations, or other vectors",
        ),
        ({"EVALUATE_POLICY": "trained", "EMBEDDING_SIZE": 11}, r"reads vectors of \(12, .*\) numbers"),
    ],
)
def test_a_policy_that_is_missing_or_of_other_data_is_not_scored(icl, trained, constants, says):
    if constants.get("EVALUATE_POLICY") == "trained":
        constants = {**constants, "EVALUATE_POLICY": str(trained[2] / "best")}
    script = icl(STAGE="evaluate", **constants)
    with pytest.raises(Exception, match=says):
        script.run_stage(script.ICLTrainer)


# ---------------------------------------------------------------- evaluation


def test_the_test_compares_at_each_number_of_shots(trained):
    script, trainer, folder = trained
    found = json.loads((folder / "eval_test.json").read_text())
    wanted = ["no demonstrations", "random", "similarity", "kNN", "classifier", "classifier, fillers"]
    wanted += ["RCE", "RCE + GRPO", "oracle"]
    assert found["queries"] == 12 and list(found["shots"]) == ["1", "2"]
    for at in found["shots"].values():
        assert list(at["accuracy"]) == wanted and at["accuracy"]["oracle"] == max(at["accuracy"].values())
        assert set(at["intervals_of_gains"]) == set(wanted) - {"RCE + GRPO"}


def test_the_test_is_of_best_though_the_run_went_on(icl):
    """best/ is similarity, since no later policy is said to be better; the last shows the least similar."""
    script = icl()
    trainer = script.ICLTrainer()
    trainer.begin_with_a_rule = lambda: None
    trainer.evaluate = lambda: {"clear_gain": float(-trainer.run.step)}

    def test():
        trainer.policy.choice_weights.data[:] = torch.tensor([-1.0, 0, 0, 0, 0, 0])
        script.test_policies(trainer)

    trainer.test = test
    trainer.train()
    shots = json.loads((trainer.run.folder / "eval_test.json").read_text())["shots"]
    assert trainer.run.step > 0 and shots["1"]["accuracy"]["similarity"] > 0.3
    for at in shots.values():
        assert at["accuracy"]["RCE"] == at["accuracy"]["similarity"] and at["gain_over_similarity"] == 0
        assert at["intervals_of_gains"]["similarity"] == [0, 0]


def test_what_the_test_questions_are_changes_nothing_before_the_test(icl, world, tmp_path):
    """Two runs with the same file of training rows and test files of other texts and answers, of one name."""
    found = []
    spec = {"path": f"{tmp_path}/test.csv", "type": "csv", "input": "text", "output": "category"}
    other = "text,category\nwhy now,fees_topic\ncash,xyz\n"
    for n, text in enumerate(((world / "test.csv").read_text(), other)):
        (tmp_path / "test.csv").write_text(text)
        script = icl(OUTPUT_DIR=str(tmp_path / f"run{n}"), TEST_DATASET=spec)
        trainer = script.ICLTrainer()
        trainer.test = lambda: None
        trainer.train()
        files = ["candidates.json", "best/policy/model.safetensors"]
        metrics = untimed(trainer.run.folder / "logs/metrics.jsonl")
        found.append((metrics, [(trainer.run.folder / name).read_bytes() for name in files]))
    assert found[0] == found[1]


def test_an_earlier_policy_mines_and_is_trained_on(icl, trained, tmp_path):
    script, trainer, folder = trained
    earlier = str(folder / "best/policy")
    new = icl(POINTER_POLICY=earlier, STAGE="mine", HIDDEN_SIZE=16).ICLTrainer()
    wanted = script.load_pointer(earlier, trainer.corpus.sizes).state_dict()
    for model in (new.policy, new.reference):
        assert all(torch.equal(weights, wanted[name]) for name, weights in model.state_dict().items())
    new.train()
    _, facts = script.read_json(new.run.folder / "candidates.json")
    assert facts["POINTER_POLICY"] == earlier


def test_hard_and_soft_have_weights_of_their_own():
    candidates = [{"hard": 1, "soft": 0.6, "gt_prob": 0.3}, {"hard": 0, "soft": 0.0, "gt_prob": 0.1}]
    script = load_script(FILE, REWARD_MODE="hard_plus_soft", HARD_WEIGHT=3.0, SOFT_WEIGHT=0.5)
    assert script.shaped_rewards(candidates) == pytest.approx([3.3, 0.0])
    script = load_script(FILE, HARD_WEIGHT=3.0, SOFT_WEIGHT=0.5)
    assert script.shaped_rewards(candidates) == pytest.approx([6.15, 0.05])
    candidates[0]["soft"] = None  # a file's that has no such mark
    assert script.shaped_rewards(candidates) == pytest.approx([6.15, 0.05])


@pytest.mark.parametrize(
    "mode, wanted",
    [
        ("hard_only", [3.0, 0.0]),
        ("soft_only", [0.15, 0.05]),
        ("hard_plus_soft", [3.15, 0.05]),
        ("hard_plus_soft_v2", [6.15, 0.05]),
        ("separated", [6.15, 0.05]),
        ("hard_plus_gtprob", [3.4, 0.1]),
        ("hard_plus_gtprob_separated", [6.4, 0.1]),
        ("hard_plus_gtprob_plus_rel", [6.4, 0.15]),
        ("hybrid", [2.0, 0.0]),
    ],
)
def test_each_mode_weighs_its_hard_and_its_graded_part(mode, wanted):
    """The weights are 3 and 0.5; a seed wrote reward = hard_weight * hard + soft_weight * gt_prob."""
    candidates = [
        {"hard": 1, "soft": 0.3, "gt_prob": 0.8, "relevance": 1.0, "logprob": -1.0},
        {"hard": 0, "soft": 0.1, "gt_prob": 0.2, "relevance": 0.5, "logprob": -2.0},
    ]
    script = load_script(FILE, REWARD_MODE=mode, HARD_WEIGHT=3.0, SOFT_WEIGHT=0.5)
    assert script.shaped_rewards(candidates) == pytest.approx(wanted)


def test_hybrid_weighs_the_scaled_score_by_its_alpha(icl):
    lists = [
        {"hard": h, "soft": 0.0, "gt_prob": 0.0, "logprob": x} for h, x in ((1, -4.0), (0, -2.0), (0, -3.0))
    ]
    script = icl(REWARD_MODE="hybrid", HYBRID_ALPHA=0.2, HARD_WEIGHT=3.0)
    assert script.shaped_rewards(lists) == pytest.approx([0.8 * 3, 0.2, 0.1])
    assert icl(REWARD_MODE="hybrid").shaped_rewards(lists) == pytest.approx([0.5, 0.5, 0.25])


def test_a_right_list_gets_nothing_for_relevance_though_hard_has_no_weight():
    candidates = [{"hard": hard, "soft": 0.0, "gt_prob": 0.5, "relevance": 1.0} for hard in (1, 0)]
    script = load_script(FILE, REWARD_MODE="hard_plus_gtprob_plus_rel", HARD_WEIGHT=0.0)
    assert script.shaped_rewards(candidates) == pytest.approx([0.5, 0.6])


def test_the_terminal_names_the_best_of_the_others(icl):
    script = icl()
    right = {"similarity": 1, "kNN": 3, "classifier": 2, "RCE": 4, "oracle": 5}
    results = {2: {name: np.array([1.0] * n + [0.0] * (5 - n)) for name, n in right.items()}}
    text = script.test_lines(script.test_figures(results, "RCE"))
    assert "RCE at 2 shots: +0.200 over kNN, the best of the others" in text
    assert "75% of the way from similarity to the oracle" in text
    for count, words in ((3, "level with kNN, the best of the others"), (1, "0.400 below kNN, the best of")):
        results[2]["RCE"] = np.array([1.0] * count + [0.0] * (5 - count))
        assert f"RCE at 2 shots: {words}" in script.test_lines(script.test_figures(results, "RCE"))


def test_the_share_of_the_gap_and_the_paired_interval_by_hand(icl):
    script = icl()
    results = {
        2: {
            "similarity": np.array([0.0, 0, 1, 0]),
            "RCE": np.array([1.0, 0, 1, 0]),
            "oracle": np.array([1.0, 1, 1, 0]),
        }
    }
    found = script.test_figures(results, "RCE")["shots"]["2"]
    assert found["gain_over_similarity"] == 0.25 and found["share_of_gap"] == pytest.approx(0.5)
    low, high = found["intervals_of_gains"]["oracle"]
    assert low < -0.25 < high <= 0  # paired: RCE is never above the oracle
    results[2]["oracle, 2 queries"] = np.array([1.0, 1, np.nan, np.nan])
    del results[2]["oracle"]
    figures = script.test_figures(results, "RCE")
    found = figures["shots"]["2"]
    assert found["accuracy"] == {"similarity": 0.25, "RCE": 0.5, "oracle, 2 queries": 1.0}
    assert (
        found["gain_over_similarity"] == 0.25 and found["share_of_gap"] == 0.5
    )  # of the first two: 1/2, not 1/3
    assert script.bootstrap_interval(np.array([0.0, -1])) == found["intervals_of_gains"]["oracle, 2 queries"]
    assert "+0.250 over similarity, the best of the others" in script.test_lines(figures)


def test_select_gives_rows_of_the_training_data(trained, world):
    script, trainer, folder = trained
    rows = trainer.select("where is my card please", 3)
    assert len(rows) == 3 and {row["id"] for row in rows} <= {demo["id"] for demo in trainer.demos}
    assert [list(row) for row in rows] == [["id", "text", "image", "golds", "answer"]] * 3
    assert json.loads(json.dumps(rows)) == rows, "no vectors"
    everything = {**trainer.splits["test"][0], "split": "select", "text": "new"}
    everything.pop("pool")
    assert sorted(trainer.corpus.pool_of(everything).tolist()) == list(range(108))  # not POOL_SIZE of them
    best = script.load_pointer(folder / "best/policy", trainer.corpus.sizes)
    query = {**trainer.splits["test"][0], "id": "select where is my card please", "split": "select"}
    query["vector"] = trainer.corpus.embed_query({"text": "where is my card please", "image": None})
    query.pop("pool")
    for parameter in trainer.policy.parameters():  # select() is of best/, whatever the last policy is
        parameter.data.neg_()
    assert trainer.select("where is my card please", 3) == rows
    assert [trainer.demos[j]["id"] for j in trainer.pick([query], 3, best)[0]] == [row["id"] for row in rows]
    assert [trainer.demos[j]["id"] for j in trainer.pick([query], 3)[0]] != [row["id"] for row in rows]
    for parameter in trainer.policy.parameters():
        parameter.data.neg_()
    vector = trainer.corpus.embed_query(trainer.splits["test"][0])
    assert np.allclose(vector, trainer.splits["test"][0]["vector"], atol=1e-5)


# ---------------------------------------------------------------- data and embeddings


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_rows_are_read_from_each_kind_of_file_with_one_gold_or_ten(icl, tmp_path, kind):
    import pyarrow
    import pyarrow.parquet

    golds = "red" if kind == "csv" else ["blue", "red", "red"]
    rows = [{"q": f"what {n}", "a": golds} for n in range(3)]
    path = tmp_path / f"rows.{kind}"
    if kind == "csv":
        path.write_text("q,a\n" + "".join(f'"what {n}","red"\n' for n in range(3)))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    script = icl()
    found = script.load_examples({"path": str(path), "type": kind, "input": "q", "output": "a"}, "X", "train")
    assert [row["text"] for row in found] == ["what 0", "what 1", "what 2"]
    assert found[1]["golds"] == (["red"] if kind == "csv" else golds) and found[1]["answer"] == "red"
    assert found[2]["number"] == 2


def test_embeddings_are_kept_and_made_anew_when_the_texts_change(icl, world, tmp_path, capsys):
    script = icl()
    script.ICLTrainer()
    assert "Embedded" in capsys.readouterr().out
    script.ICLTrainer()
    assert "Embedded" not in capsys.readouterr().out
    icl(EMBEDDING_SIZE=7).ICLTrainer()
    assert "Embedded 132 texts" in capsys.readouterr().out


PICTURES = """
class Embedder:
    def vectors(self, rows):
        return [[FACTOR * len(row["text"]), n % 5, 1.0] for n, row in enumerate(rows)]


def make_embedder(demos, device):
    return Embedder()
"""


def module_of(path, text):
    """A module of a file, as import gives it."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def vectors_kept(script, afresh=False):
    """The files of vectors in OUTPUT_DIR after one more start, and whether that one made vectors."""
    said = []
    splits, demos = script.load_splits(said.append)
    script.embed_splits(splits, demos, torch.device("cpu"), said.append, afresh)
    return sorted(Path(script.OUTPUT_DIR).glob("*.npz")), any("Embedded" in text for text in said)


def test_vectors_are_made_anew_when_an_image_changes(icl, tmp_path):
    rows = [{"q": f"card {n} w{n % 7}", "a": "x", "i": str(tmp_path / f"{n % 3}.png")} for n in range(40)]
    for n in range(3):
        (tmp_path / f"{n}.png").write_text(f"picture {n}")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {"path": str(tmp_path / "rows.jsonl"), "type": "jsonl", "input": "q", "output": "a", "image": "i"}
    script = icl(TRAIN_DATASET=spec, TEST_DATASET=None)
    assert [made for _, made in (vectors_kept(script), vectors_kept(script))] == [True, False]
    (tmp_path / "1.png").write_text("another picture")  # at the same path
    files, made = vectors_kept(script)
    assert made and len(files) == 2
    shutil.copy(tmp_path / "2.png", tmp_path / "9.png")  # the same picture, at another path
    rows[2]["i"] = str(tmp_path / "9.png")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert vectors_kept(script)[1]


def test_vectors_are_made_anew_when_the_embedders_code_changes(icl, tmp_path):
    script = icl()
    assert vectors_kept(script)[1]
    for factor, name in ((1, "mine_one"), (2, "mine_two")):  # the function is the same, the class is not
        mine = module_of(tmp_path / f"{name}.py", PICTURES.replace("FACTOR", str(factor)))
        script.make_embedder = mine.make_embedder
        assert [vectors_kept(script)[1] for _ in range(2)] == [True, False]
        del sys.modules[name]
    script.make_embedder = mine.Embedder  # a class in its place
    mine.Embedder.__init__ = lambda self, demos, device: None
    files, made = vectors_kept(script)
    assert made and len(files) == 4
    size = 5

    def embedder(demos, device):
        kept = size  # a value of the function around it
        return SimpleNamespace(vectors=lambda rows: np.ones((len(rows), kept)))

    script.make_embedder = embedder
    assert vectors_kept(script)[1]
    size = 6
    assert vectors_kept(script)[1]

    def embedder(demos, device):  # the same names and values in other code
        kept = 2 * size
        return SimpleNamespace(vectors=lambda rows: np.ones((len(rows), kept)))

    script.make_embedder = embedder
    assert vectors_kept(script)[1]


def test_vectors_are_made_anew_when_the_files_of_a_models_folder_change(icl, tmp_path):
    config = BertConfig(
        vocab_size=259, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        script = icl(EMBEDDING=save_random(BertModel(config), tmp_path / "model", tiny_tokenizer()))
        assert [vectors_kept(script)[1] for _ in range(2)] == [True, False]
        found.append(script.ICLTrainer().demos[0]["vector"])
    assert np.abs(found[0] - found[1]).max() > 0.01


def test_a_fresh_start_makes_the_vectors_of_an_own_embedder_again_and_a_resumed_one_does_not(icl, tmp_path):
    (tmp_path / "size").write_text("3")  # what the digest cannot see
    calls = []

    def embedder(demos, device):
        calls.append(1)
        size = int((tmp_path / "size").read_text())
        return SimpleNamespace(vectors=lambda rows: np.random.default_rng(0).normal(size=(len(rows), size)))

    script = icl(STAGE="mine", RESUME="yes")
    script.make_embedder = embedder
    trainer = script.ICLTrainer()
    assert trainer.corpus.sizes[0] == 3
    trainer.train()
    (tmp_path / "size").write_text("5")
    assert script.ICLTrainer().corpus.sizes[0] == 3 and len(calls) == 1  # as the policy was trained
    script.RESUME, script.STAGE = "no", "evaluate"
    assert script.ICLTrainer().corpus.sizes[0] == 3 and len(calls) == 1
    script.STAGE = "mine"
    assert script.ICLTrainer().corpus.sizes[0] == 5
    script = icl(RESUME="no")
    script.ICLTrainer()
    assert not vectors_kept(script, afresh=True)[1]  # the file's own: an equal digest says equal vectors


@pytest.mark.parametrize(
    "vectors",
    [
        lambda rows: np.ones(len(rows)),
        lambda rows: np.ones((1, 4)),
        lambda rows: np.full((len(rows), 4), np.nan),
    ],
)
def test_vectors_of_an_own_embedder_that_are_none_are_refused(icl, vectors):
    script = icl()
    script.make_embedder = lambda demos, device: SimpleNamespace(vectors=vectors)
    with pytest.raises(script.UserError, match=r"must give finite numbers of shape \(132, d\), not an array"):
        script.ICLTrainer()


def test_queries_of_two_files_of_one_name_are_told_apart(icl, world, tmp_path):
    """Their ids were the same, so that test queries got the classifier's word on training queries."""
    (tmp_path / "test").mkdir()
    shutil.copy(world / "test.csv", tmp_path / "test/train.csv")
    kinds = {"type": "csv", "input": "text", "output": "category"}
    found = []
    for path in (world / "test.csv", tmp_path / "test/train.csv"):
        trainer = icl(TEST_DATASET={"path": str(path), **kinds}, RESUME="no").ICLTrainer()
        queries = trainer.splits["train"] + trainer.splits["validation"] + trainer.splits["test"]
        assert len({query["id"] for query in queries}) == len(queries)
        numbers = torch.arange(len(trainer.demos))
        every = [trainer.corpus.log_likelihood(query, numbers) for query in queries]
        found.append(torch.stack(every)[-12:])
    assert torch.equal(*found)
    assert trainer.splits["test"][0]["id"] == "test train.csv:2"


def test_a_candidates_vector_holds_its_answers(icl):
    trainer = icl().ICLTrainer()
    by_answer = {}
    for demo in trainer.demos:
        by_answer.setdefault(demo["answer"], set()).add(demo["candidate_vector"].tobytes())
    assert all(len(vectors) == 1 for vectors in by_answer.values())
    vectors = np.stack([np.frombuffer(x, np.float32) for (x,) in by_answer.values()])
    assert vectors @ vectors.T == pytest.approx(np.eye(6), abs=1e-5)  # none says anything of another
    assert len(trainer.corpus.vectors) == 6
    for j, demo in enumerate(trainer.demos):
        vector = trainer.corpus.vectors[trainer.corpus.vector_of[j]]
        assert vector.tolist() == demo["candidate_vector"].tolist()
    demos = icl(EMBED_ANSWERS=False).ICLTrainer().demos
    assert all(np.array_equal(demo["candidate_vector"], demo["vector"]) for demo in demos)


# ---------------------------------------------------------------- runs and errors


class Killed(BaseException):
    """In place of SIGKILL: nothing of the program catches it."""


def test_a_run_killed_while_mining_and_in_both_stages_equals_an_unbroken_one(world, tmp_path):
    options = {"GRPO_EPOCHS": 1, "RESUME": "yes", "SAVE_EVERY_N_STEPS": 2, "EVAL_SHOTS": (2,)}
    whole = toy(world, tmp_path / "whole", **options)
    whole.ICLTrainer().train()
    mined = []
    for stop in ("mine 2", "step 5", "step 10", None):
        script = toy(world, tmp_path / "broken", **options)
        trainer = script.ICLTrainer()
        mine, update = trainer.miner.mine, trainer.update

        def mine_or_die(queries, shots, mine=mine, stop=stop):
            if stop == "mine 2" and len(mined) == 2:
                raise Killed
            mined.append(shots)
            return mine(queries, shots)

        def update_or_die(batch, update=update, trainer=trainer, stop=stop):
            if stop == f"step {trainer.run.step}":
                raise Killed
            return update(batch)

        trainer.miner.mine, trainer.update = mine_or_die, update_or_die
        if stop:
            with pytest.raises(Killed):
                trainer.train()
            trainer.run.lock.release()
        else:
            trainer.train()
    assert mined[:4] == [2] * 4  # 52 queries in parts of 16: none is mined twice
    runs = [tmp_path / name / "run" for name in ("whole", "broken")]
    names = ["candidates.json", "eval_test.json"]
    names += [f"{part}/policy/model.safetensors" for part in ("rce", "best")]
    names += [f"step_12/{part}/model.safetensors" for part in ("policy", "reference")]
    for name in names:
        one, other = (run / name for run in runs)
        assert one.read_bytes() == other.read_bytes(), name
    assert_same_state(*(run / "step_12/training_state.pt" for run in runs))
    for name in ("metrics.jsonl", "samples.jsonl"):
        one, other = (untimed(run / "logs" / name) for run in runs)
        assert one == other and len(one) > 10


def test_a_run_that_resumes_in_grpo_has_the_reference_that_it_began_with(world, trained, tmp_path):
    """Under another seed, since a new policy of the same seed may be that reference."""
    shutil.copytree(trained[2], tmp_path / "run")
    trainer = toy(world, tmp_path, GRPO_EPOCHS=1, RESUME="yes", SEED=5).ICLTrainer()
    assert trainer.state.stage == "grpo"
    saved = trained[1].reference.state_dict()
    found = trainer.reference.state_dict()
    assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)


def test_a_changed_setting_never_joins_parts_that_were_mined_under_another(icl):
    script = icl(STAGE="mine", RESUME="yes")
    trainer = script.ICLTrainer()
    mine = trainer.miner.mine
    calls = []

    def once(queries, shots):
        calls.append(1)
        if len(calls) > 1:
            raise Killed
        return mine(queries, shots)

    trainer.miner.mine = once
    with pytest.raises(Killed):
        trainer.train()
    trainer.run.lock.release()
    script = icl(STAGE="mine", RESUME="yes", KEEP_TOP=5)
    with pytest.raises(script.UserError, match="was mined with KEEP_TOP = 4; it is 5 now"):
        script.ICLTrainer().train()


def test_stages_one_by_one_give_what_all_at_once_gives(icl, trained, tmp_path):
    for stage in ("mine", "train"):
        script = icl(STAGE=stage, GRPO_EPOCHS=1, RESUME="yes")
        script.ICLTrainer().train()
    script, trainer, folder = trained
    for name in ("candidates.json", "eval_test.json", "best/policy/model.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "run" / name).read_bytes(), name


@pytest.fixture(scope="module")
def with_steps(world, tmp_path_factory):
    """The folder of a whole run of both stages, and all of its checkpoints."""
    folder = tmp_path_factory.mktemp("steps")
    toy(world, folder, **STEPS).ICLTrainer().train()
    return folder / "run"


STEPS = {"GRPO_EPOCHS": 1, "SAVE_EVERY_N_STEPS": 2, "EVAL_SHOTS": (2,), "KEEP_LAST_N_CHECKPOINTS": 99}


@pytest.mark.parametrize("step", [4, 8, 10, 12])
def test_a_run_goes_on_in_another_folder_as_in_its_own(icl, with_steps, tmp_path, step):
    trainer = icl(RESUME=str(with_steps / f"step_{step}"), **STEPS).ICLTrainer()
    trainer.train()
    ours = tmp_path / "run"
    assert trainer.run.step == 12
    names = ["candidates.json"]
    if step > 4:  # else GRPO starts from the best of what this folder has seen
        names += [f"step_12/{part}/model.safetensors" for part in ("policy", "reference")]
        names += ["rce/policy/model.safetensors", "rce/policy/config.json"]
    for name in names:
        assert (ours / name).read_bytes() == (with_steps / name).read_bytes(), name
    figures = json.loads((ours / "eval_test.json").read_text())
    assert {"RCE", "RCE + GRPO"} < set(figures["shots"]["2"]["accuracy"])


def test_a_run_whose_rce_has_ended_is_tested_in_another_folder(icl, mined, tmp_path):
    icl(RESUME=str(mined / "step_4"), RCE_EPOCHS=1, EVAL_SHOTS=(2,)).ICLTrainer().train()
    assert json.loads((tmp_path / "run/best/metrics.json").read_text())["step"] == 4
    assert (tmp_path / "run/eval_test.json").exists()


def test_another_folder_without_the_candidates_is_refused_before_anything_is_saved(icl, with_steps, tmp_path):
    (tmp_path / "first").mkdir()
    shutil.copytree(with_steps / "step_4", tmp_path / "first/step_4")
    options = {"RESUME": str(tmp_path / "first/step_4"), **STEPS}
    says = "candidates.json is not the file this run was trained on, or is missing: put it back"
    for _ in range(2):
        script = icl(**options)
        with pytest.raises(script.UserError, match=says):
            script.ICLTrainer().train()
        assert not list((tmp_path / "run").glob("step_*"))
    (tmp_path / "first/candidates.json").write_text("{}")
    with pytest.raises(script.UserError, match="candidates.json is not the file this run was trained on"):
        script.ICLTrainer().train()


def test_candidates_that_changed_under_a_run_are_refused(icl, tmp_path):
    script = icl(RCE_EPOCHS=1, EVAL_SHOTS=(2,))
    script.ICLTrainer().train()
    path = tmp_path / "run/candidates.json"
    path.write_text(path.read_text() + " ")
    script = icl(RESUME="yes", RCE_EPOCHS=3)
    with pytest.raises(script.UserError, match="is not the file this run was trained on"):
        script.ICLTrainer().train()


@pytest.mark.parametrize(
    "constants, says",
    [
        ({"POOL_SIZE": 1}, "POOL_SIZE = 1 holds fewer than the rows"),
        ({"HEADS": 3}, "HIDDEN_SIZE = 8 must be a multiple of HEADS = 3"),
        ({"EVAL_SHOTS": ()}, "EVAL_SHOTS"),
        ({"SAMPLE_TEMPERATURES": [0.0]}, "SAMPLE_TEMPERATURES"),
        ({"REWARD_MODE": "best"}, "REWARD_MODE = 'best' is unknown"),
        ({"REWARD_MODE": "hard_only", "SOFT_WEIGHT": 0.5}, "SOFT_WEIGHT = 0.5 does nothing with REWARD_MODE"),
        ({"REWARD_MODE": "hybrid", "SOFT_WEIGHT": 0.0}, "SOFT_WEIGHT = 0.0 does nothing with REWARD_MODE"),
        ({"REWARD_MODE": "soft_only", "HARD_WEIGHT": 2.0}, "HARD_WEIGHT = 2.0 does nothing with REWARD_MODE"),
        (
            {"REWARD_MODE": "hybrid", "HYBRID_MIX_SCORE": "beam_score", "ON_POLICY": True, "GRPO_EPOCHS": 1},
            "ON_POLICY: sampled lists have no beam_score",
        ),
        ({"CANDIDATES": "nowhere.json"}, "nowhere.json cannot be read"),
        ({"STAGE": "train"}, "run STAGE=mine first"),
        ({"READER": "/nowhere"}, "READER = '/nowhere': no such folder"),
        ({"EMBEDDING": "/nowhere"}, "EMBEDDING = '/nowhere': no such folder"),
        ({"BEAMS": 0, "SAMPLES": 0, "RETRIEVED": 0, "RANDOM": 0}, "nothing proposes a list"),
    ],
)
def test_what_a_user_can_mend_is_said_in_one_sentence(icl, constants, says):
    script = icl(**constants)
    with pytest.raises(script.UserError, match=says) as error:
        script.ICLTrainer().train()
    assert "\n" not in str(error.value)


def data_of(texts, **changed):
    """Constants: training rows of these texts."""

    def write(folder):
        rows = [f'"{text}",x{n % 3}' for n, text in enumerate(texts)]
        (folder / "odd.csv").write_text("text,category\n" + "\n".join(rows) + "\n")
        spec = {"path": str(folder / "odd.csv"), "type": "csv", "input": "text", "output": "category"}
        return {"TRAIN_DATASET": {**spec, **changed}}

    return write


def lines_of(**row):
    """Constants: training rows of a jsonl file, of which the 30th is odd."""

    def write(folder):
        picture = str(folder / "x.png")
        Path(picture).touch()
        rows = [{"q": f"card {n} w{n % 7}", "a": "x", "i": picture} for n in range(40)]
        rows[29].update(row)
        (folder / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = {"path": str(folder / "odd.jsonl"), "type": "jsonl", "input": "q", "output": "a"}
        return {"TRAIN_DATASET": {**spec, **({"image": "i"} if "i" in row else {})}}

    return write


def lists_of(queries=35, record=None, **changed):
    """Constants: given candidates of so many queries, of which one list, and one record, are changed."""

    def write(folder):
        path = source_file(folder, list(range(5, 40)))
        records = json.loads((folder / "source.json").read_text())
        records["6"]["pointer_candidates"][1].update(changed)
        records["6"].update(record or {})
        (folder / "source.json").write_text(json.dumps(dict(list(records.items())[:queries])))
        return {"CANDIDATES": path, "REWARD_MODE": "hard_plus_soft"}

    return write


MODEL = {"type": "csv", "input": "text", "output": "category"}
ODD = {  # what makes the constants of a run in a folder, and what its one sentence says
    "one text in all rows": (data_of(["my card"] * 60), "a query.s pool holds 0 candidates, a list of 2"),
    "two texts, one of them once": (data_of(["my card"] * 60 + ["a loan"]), "a query.s pool holds"),
    "signs alone": (data_of([chr(128512 + n % 60) for n in range(120)]), "finds too few words"),
    "words of one row alone": (data_of([f"word{n}" for n in range(150)]), "finds too few words"),
    "four rows": (data_of(["card a", "card b", "loan c", "loan d"]), "has 4 queries: it needs at least 5"),
    "no path": (lambda _: {"TRAIN_DATASET": {**MODEL, "path": None}}, "TRAIN_DATASET = .* a dict of texts"),
    "no data set": (lambda _: {"TEST_DATASET": {}}, "TEST_DATASET = {}: it takes a dict of texts"),
    "a number for a column": (data_of(["a card"] * 9, input=0), "a dict of texts"),
    "an unknown key": (data_of(["a card"] * 9, outptu="x"), "a dict of texts: path, type, input, output and"),
    "a key for images": (data_of(["a card"] * 9, images="i"), "a dict of texts"),
    "a gold within a gold": (lines_of(a=[["x"]]), "line 30: 'a' must be a text"),
    "golds without any": (lines_of(a=[]), "line 30: 'a' must be a text"),
    "a gold with a key": (lines_of(a={"text": "x"}), "line 30: 'a' must be a text or a number, not"),
    "an image of a list": (lines_of(i=["x.png"]), "line 30: 'i' must be a text"),
    "candidates of four queries": (lists_of(4), "source.json' has 4 queries: it needs at least 5"),
    "gt_prob of 37": (lists_of(vqa_gt_prob=37), "query 6: cannot be read .ValueError: .*0 to 1, not .*37"),
    "a pointer of halves": (lists_of(pointer=[7.5, 8]), "query 6: cannot be read .TypeError: .*float"),
    "a pool of a number": (lists_of(record={"candidate_pool_ids": 7}), "query 6: cannot be read .TypeError"),
    "lists of a number": (lists_of(record={"pointer_candidates": 7}), "query 6: cannot be read"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_input_ends_with_one_sentence(started, world, tmp_path, name):
    """Of these 17 ended with a traceback, and some were taken for what they are not."""
    write, says = ODD[name]
    constants = {**write(tmp_path), "RCE_EPOCHS": 1, "EVAL_SHOTS": (2,), "TEST_QUERIES": 2}
    words = (f"{key}={value}" for key, value in toy_constants(world, tmp_path, **constants).items())
    ended = started(FILE, *words)
    assert ended.returncode == 2 and re.search(says, ended.stderr), ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "text, says",
    [
        ("text,category\na\n", "line 2: its number of fields differs"),
        ("text,category\nq,\n", "line 2: there is no value"),
        ("words,category\nq,x\n", "no value for column 'text'"),
        ("text,category\n", "the data set is empty"),
    ],
)
def test_a_faulty_csv_is_named_with_its_line(icl, tmp_path, text, says):
    script = icl()
    (tmp_path / "x.csv").write_text(text)
    spec = {"path": str(tmp_path / "x.csv"), "type": "csv", "input": "text", "output": "category"}
    with pytest.raises(script.UserError, match=says):
        script.load_examples(spec, "TRAIN_DATASET", "train")


def test_the_shipped_data_is_what_its_program_says(tmp_path):
    facts = json.loads((ROOT / "data/banking77/facts.json").read_text())
    for name in ("train.csv", "test.csv"):
        rows = list(csv.DictReader(open(ROOT / "data/banking77" / name, newline="", encoding="utf-8")))
        assert len(rows) == facts[name]["rows"] and len({row["category"] for row in rows}) == 77
    assert "CC BY 4.0" in (ROOT / "data/banking77/LICENCE.md").read_text()


def test_lists_of_one_demonstration_that_were_asked_alone_are_kept_once_with_the_pick(icl):
    script = icl(KEEP_TOP=1, KEEP_RANDOM=0, LOCAL=0, LOCAL_TOP=4)
    trainer = script.ICLTrainer()
    (group,) = trainer.miner.propose(trainer.splits["train"][:1], 1)
    trainer.miner.score_gold([group])
    pick = max((c for c in group.candidates if c["beam_score"] is not None), key=lambda c: c["beam_score"])
    pick["gt_prob"] = 1.0  # so that it is asked alone
    trainer.miner.take_apart(group)
    trainer.miner.verify([group], "alone")
    assert pick["pointer"] in script.by_pointer(group.alone)
    for c in group.alone:
        c["hard"] = 0.0
    trainer.miner.choose_kept(group)
    pointers = [c["pointer"] for c in group.candidates]
    assert len(pointers) == len(set(pointers)) == 1 + len(group.alone)
    kept = group.candidates[script.policy_pick(group.candidates)]
    assert kept is pick and kept["hard"] == 0.0


def test_given_candidates_in_the_runs_folder_stay_where_they_are(icl, trained, tmp_path):
    given = tmp_path / "run/candidates_of_mine.json"
    given.parent.mkdir(parents=True)
    shutil.copyfile(trained[2] / "candidates.json", given)
    trainer = icl(CANDIDATES=str(given), RESUME="no").ICLTrainer()
    trainer.run.open_files()
    assert given.exists()


def test_the_digest_of_vectors_knows_how_images_are_read_and_which_are_given(icl, tmp_path):
    demos = [{"text": "a", "answer": "b", "image": None}]
    script = icl()
    before = script.vectors_digest(demos)
    script.IMAGE_VECTORS = "image"
    assert script.vectors_digest(demos) == before
    demos[0]["image"] = "a.png"
    digests = []
    for script.IMAGE_VECTORS in ("image", "text"):
        digests.append(script.vectors_digest(demos))
    for number in (1.0, 2.0):
        np.save(tmp_path / "v.npy", np.full((1, 2), number))
        script.TRAIN_DATASET = {**script.TRAIN_DATASET, "vectors": str(tmp_path / "v.npy")}
        digests.append(script.vectors_digest(demos))
    assert len({before, *digests}) == 5
