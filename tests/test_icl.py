"""rce/rce_icl.py: formulas by hand, mining against all lists, rules, answers, resume, data, errors."""

import importlib
import itertools
import json
import math
import random
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, first_lines, load, read, words_of, write_csv

MARKET = {"path": f"{ROOT}/data/market/train.csv", "type": "csv", "input": "question", "output": "answer"}
SMALL = {"VALIDATION_QUESTIONS": 20, "TEST_QUESTIONS": 20, "MINE_QUESTIONS": 24, "TEST_ORACLE": 4}
SMALL |= {"RCE_EPOCHS": 2, "GRPO_EPOCHS": 1, "EVAL_EVERY_N_STEPS": 5, "SAVE_EVERY_N_STEPS": 3}
SMALL |= {"BATCH_SIZE": 16, "RESUME": "no"}  # a run of seconds


def few_rows(count):
    """Returns the data sets of the market, for training with the first rows alone."""
    train = {**MARKET, "path": first_lines("market/train.csv", count + 1)}
    return {"TRAIN_DATASET": train, "TEST_DATASET": {**MARKET, "path": f"{ROOT}/data/market/test.csv"}}


@pytest.fixture
def icl(tmp_path):
    """icl(KEY=value) returns a fresh module with small constants; it draws no pictures."""

    def make(**constants):
        constants = {"OUTPUT_DIR": str(tmp_path / "run"), **SMALL, **few_rows(300), **constants}
        module = load("rce/rce_icl.py", **constants)
        module.draw_grid = lambda *arguments: None
        return module

    return make


# ---------------------------------------------------------------- formulas, in float64


def test_the_losses_by_hand(icl):
    module = icl(TAU=0.5, CLIP_RANGE=0.2)
    weights = module.rce_weights(torch.tensor([1.0, 0.0], dtype=torch.float64))
    share = math.exp(2) / (math.exp(2) + 1)
    assert weights.tolist() == pytest.approx([share, 1 - share], abs=1e-12)
    both = torch.stack([weights, torch.tensor([1.0, 0.0])])  # the second group has one list; padding weighs 0
    loss = module.rce_loss(torch.tensor([[-1.0, -3.0], [-2.0, 0.0]], dtype=torch.float64), both).item()
    assert loss == pytest.approx((share * 1 + (1 - share) * 3 + 2) / 2, abs=1e-12)
    assert module.group_advantages(torch.tensor([0.7, 0.7, 0.7], dtype=torch.float64)).tolist() == [0, 0, 0]
    advantages = module.group_advantages(torch.tensor([3.0, 1.0], dtype=torch.float64)).tolist()
    assert advantages == pytest.approx([1 / (2**0.5 + 1e-4), -1 / (2**0.5 + 1e-4)], abs=1e-12)
    table = {(0.5, 1): -0.5, (1.1, 1): -1.1, (1.5, 1): -1.2, (0.5, -1): 0.8, (0.9, -1): 0.9, (1.5, -1): 1.5}
    for (ratio, advantage), wanted in table.items():
        logprob = torch.tensor([[math.log(ratio)]], dtype=torch.float64)
        loss, rho = module.grpo_loss(logprob, torch.zeros(1, 1), torch.tensor([[float(advantage)]]))
        assert (loss.item(), rho.item()) == pytest.approx((wanted, ratio), abs=1e-7)
    logp, logq = torch.tensor([[0.2, 0.8, 1.0], [0.5, 0.5, 1.0]], dtype=torch.float64).log()
    logp[2] = logq[2] = -1e9  # it cannot be chosen
    wanted = 0.2 * math.log(0.2 / 0.5) + 0.8 * math.log(0.8 / 0.5)
    assert module.choice_kl(logp, logq).item() == pytest.approx(wanted, abs=1e-12)
    entropy = -0.2 * math.log(0.2) - 0.8 * math.log(0.8)
    assert module.choice_entropy(logp).item() == pytest.approx(entropy)


def make_policy(module, pool=5, questions=2, size=6):
    """Returns a policy with random weights, its inputs in float64, and the tensors that these are of."""
    torch.manual_seed(0)
    candidates = torch.randn(questions * pool, size, dtype=torch.float64)
    pools = torch.arange(questions * pool).view(questions, pool)
    vectors = torch.randn(questions, size - 2, dtype=torch.float64)
    similarity = torch.rand(questions, pool, dtype=torch.float64)
    inputs = SimpleNamespace(vectors=vectors, candidates=candidates, pool=pools, similarity=similarity)
    inputs.is_padding = torch.zeros(questions, pool, dtype=torch.bool)
    policy = module.Pointer(size).double()
    torch.nn.init.normal_(policy.output.weight)
    return policy, inputs


def test_the_score_of_a_choice_is_the_docstrings(icl):
    module = icl(HIDDEN_SIZE=8)
    policy, inputs = make_policy(module)
    found = policy(inputs, torch.tensor([[[2, 4]], [[0, 1]]]))

    def norm(x, layer):
        x = (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt()
        return x * layer.weight + layer.bias

    project, cell = policy.projection, policy.cell
    question = torch.cat([inputs.vectors[0], torch.zeros(2)])
    state = norm(project.weight @ question + project.bias, policy.question_norm)
    keys = [norm(project.weight @ x + project.bias, policy.candidate_norm) for x in inputs.candidates[:5]]
    taken = []
    for count, choice in enumerate([2, 4]):
        scores = []
        for j in range(5):
            score = policy.similarity_weight * inputs.similarity[0, j] / module.POINTER_TEMPERATURE
            scores.append(score + keys[j] @ (policy.output.weight @ state) / 8**0.5)
        scores = torch.stack(scores)
        scores[taken] = -1e9
        assert torch.allclose(found[0, 0, count], scores.log_softmax(0), atol=1e-12)
        taken.append(choice)
        reset, update, new = (cell.weight_ih @ keys[choice] + cell.bias_ih).chunk(3)
        reset_h, update_h, new_h = (cell.weight_hh @ state + cell.bias_hh).chunk(3)
        gate = torch.sigmoid(update + update_h)
        state = (1 - gate) * torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h) + gate * state


def test_the_probabilities_of_all_lists_sum_to_1_and_sampling_follows_them(icl):
    module = icl(HIDDEN_SIZE=8)
    policy, inputs = make_policy(module)
    every = list(itertools.permutations(range(5), 2))
    pointers = torch.tensor(every).expand(2, -1, -1)
    with torch.no_grad():
        chances = module.list_logprobs(policy(inputs, pointers), pointers).exp()
        assert chances.sum(1).tolist() == pytest.approx([1, 1], abs=1e-9)
        short = torch.cat([pointers[:, :, :1], torch.full_like(pointers[:, :, :1], -1)], 2)
        first = module.list_logprobs(policy(inputs, short), short).exp()
        assert first[0, ::4].sum().item() == pytest.approx(1)  # what follows the end of a list counts 0
        drawn = policy.draw(inputs, 2, [1.0] * 4000, torch.Generator().manual_seed(1))
        greedy = policy.draw(inputs, 2, [0.0], torch.Generator())
    counts = np.zeros(len(every))
    for numbers in drawn[0].tolist():
        counts[every.index(tuple(numbers))] += 1
    assert np.abs(counts / 4000 - chances[0].numpy()).max() < 0.03
    assert greedy[0, 0, 0] == chances[0].view(5, 4).sum(1).argmax().item()
    whole = policy(inputs, pointers)
    inputs.is_padding[1, 3:] = True  # a smaller pool beside it
    assert torch.equal(policy(inputs, pointers)[0], whole[0])
    assert policy(inputs, pointers)[1, :, :, 3:].max() < -1e8


# ---------------------------------------------------------------- mining, rules, answers


class Known:
    """A reader whose gt_prob is a function of the demonstrations' numbers; above 0.5 its answer is right."""

    def __init__(self, value):
        self.value = value

    def gold_probabilities(self, asked):
        return [self.value([demo["number"] for demo in demonstrations]) for _, demonstrations in asked]

    def answers(self, asked):
        pairs = zip(asked, self.gold_probabilities(asked))
        return [question["golds"][0] if value > 0.5 else "wrong" for (question, _), value in pairs]


def with_reader(module, value):
    module.ICLTrainer.load_reader = lambda trainer: Known(value)
    trainer = module.ICLTrainer()
    trainer.module = module
    for number, demo in enumerate(trainer.demos):
        demo["number"] = number
    return trainer


@pytest.mark.parametrize("shots", [1, 2, 3])
def test_mining_finds_the_best_list_of_all(icl, shots):
    def value(numbers):  # each member adds; the last one counts twice
        return sum(random.Random(number).random() for number in [*numbers, *numbers[-1:]]) / 5

    module = icl(SHOTS=shots, POOL_SIZE=6, LOCAL=400, KEEP_TOP=3, KEEP_RANDOM=2)
    trainer = with_reader(module, value)
    for question in trainer.splits["train"][:3]:
        lists = trainer.mine_question(question, shots)
        assert lists[0].source == ["greedy"] and len({tuple(x.shown) for x in lists}) == len(lists)
        for length in range(1, shots + 1):
            of_length = [x for x in lists if len(x.shown) == length]
            best = max(map(value, itertools.permutations(question["pool"].tolist(), length)))
            assert max(x.gt_prob for x in of_length) == pytest.approx(best)
            assert len(of_length) <= 3 + 2 + 1
        for x in lists:
            assert x.gt_prob == value(x.shown)
            assert x.hard == (x.gt_prob > 0.5)
            assert set(x.shown) <= set(question["pool"].tolist())
        assert lists == trainer.mine_question(question, shots)  # the same numbers each time


def test_the_rules_by_hand(icl, tmp_path):
    forms = [("red apple", "fruit a"), ("red brick", "stone b"), ("old brick", "stone old")]
    rows = [(f"{text}{' again' * n}", label) for n in range(12) for text, label in forms]
    write_csv(tmp_path / "own.csv", "text,label", rows)
    data = {"path": str(tmp_path / "own.csv"), "type": "csv", "input": "text", "output": "label"}
    trainer = with_reader(icl(TRAIN_DATASET=data, TEST_DATASET=None, POOL_SIZE=99), lambda numbers: 0.5)
    assert set(map(trainer.module.answer_format, trainer.demos)) == {"fruit a", "stone b", "stone *"}
    question = {**trainer.splits["test"][0], "text": "old old brick", "key": None}
    trainer.corpus.add_pools([question], 99)
    for rule in trainer.rules.names:
        (numbers,) = trainer.rules.pick(rule, [question], 99)
        texts = [" ".join(trainer.demos[number]["text"].split()[:2]) for number in numbers]
        count = texts.count("old brick")
        assert texts[:count] == ["old brick"] * count, rule
        if rule in ("similarity", "format, similarity"):
            assert texts[count] == "red brick", rule
        elif rule == "classifier, fillers":
            assert texts[count] == "red apple", rule  # the least similar come next


def test_vqas_accuracy_and_what_counts_as_the_same(icl):
    module = icl(GOLDS="annotators")
    assert {module.normalise(text) for text in ("The two dogs!", "2 dogs", "two  Dogs.")} == {"2 dogs"}
    assert module.normalise("A") == "a" and module.normalise("a dog") == "dog"
    assert module.normalise("dont") == module.normalise("don't")
    assert module.normalise("1.5") != module.normalise("15") == module.normalise("15!")
    assert module.normalise("-1") == "-1" and module.normalise("so-called") == "so called"
    assert module.normalise("!") == "!"
    golds = ["red", "red", "Red."] + ["blue"] * 7
    # 3 of 10 agree: without one of them it is 2/3, without another 1
    assert module.vqa_accuracy("red", golds) == pytest.approx((3 * 2 / 3 + 7) / 10)
    assert module.vqa_accuracy("blue", golds) == 1 and module.vqa_accuracy("red", ["red"]) == 1
    weights = module.gold_weights(["a b", "c", "C."] + ["d"] * 7)
    assert weights == pytest.approx({"a b": 1 / 3, "c": 2 / 3, "d": 1})


@pytest.mark.parametrize(
    "labels, more",
    [
        (["1", "-1", "+1", "1.0", "10", "$1"], []),
        (["+", "-", "\U0001f44d", "\U0001f44e", ":)", ":("], []),
        (["C", "C++", "C#", "c", "the C"], []),  # lower case and articles count here
        (["red dog", "no"], ["A red  dog.", "'Red dog'", "NO!"]),
    ],
)
def test_labels_that_differ_in_a_sign_are_not_the_same(icl, labels, more):
    module = icl()
    exact = module.find_exact([{"answer": label} for label in labels])
    for label in labels:
        right = [text for text in labels if module.score_answer(text, [label], exact)["hard"]]
        assert right == [label] and module.score_answer(f" {label}", [label, "x"], exact)["soft"] == 1
    for text in more:
        assert sum(module.score_answer(text, [label], exact)["hard"] for label in labels) == 1
    assert module.score_answer("-1", ["1"])["soft"] == 0
    assert module.score_answer("red", ["red dog"])["soft"] == pytest.approx(2 / 3)


# ---------------------------------------------------------------- runs


def test_rce_learns_what_no_rule_sees_and_grpo_goes_on(icl, tmp_path):
    """The shipped market: lists that pair a row of the same guild with one of the same region."""
    constants = {"MINE_QUESTIONS": 150, "VALIDATION_QUESTIONS": 150, "RCE_EPOCHS": 8, "BATCH_SIZE": 32}
    module = icl(**few_rows(900), **constants, EVAL_EVERY_N_STEPS=0, SAVE_EVERY_N_STEPS=0)
    trainer = module.ICLTrainer()
    trainer.test = lambda: None
    trainer.train()
    evaluations = [r["accuracy@2"] for r in read(tmp_path / "run/logs/metrics.jsonl") if r["phase"] == "eval"]
    assert evaluations[-1] > evaluations[0] + 0.15 and trainer.state.best_score > trainer.state.rules["kNN"]
    (chosen,) = trainer.pick(trainer.splits["test"][:1], 2)
    assert len(set(chosen)) == 2
    assert len(trainer.select("ida the baker from lund in may sees drum kite lamp rope")) == 2


# ---------------------------------------------------------------- data and errors


def test_no_question_is_in_two_splits_or_in_its_own_pool(icl, tmp_path, capsys):
    signs = [(f"what is 7 {sign} {number}", f"{sign}{number}") for sign in "+-" for number in range(30)]
    again = [(f"What is  7 - {number}?", ["no", f"-{number}"][number < 25]) for number in range(30)]
    write_csv(tmp_path / "rows.csv", "text,label", [*signs, *again])
    write_csv(
        tmp_path / "test.csv",
        "text,label",
        [("What is 7 + 1 ?!", "8"), ("what is 5!", "120"), ("what is 5", "5")],
    )
    data = {"path": str(tmp_path / "rows.csv"), "type": "csv", "input": "text", "output": "label"}
    constants = {"TRAIN_DATASET": data, "POOL": "similarity", "POOL_SIZE": 60}
    module = icl(**constants, TEST_DATASET={**data, "path": str(tmp_path / "test.csv")})
    assert len(module.split_rows()[0]["test"]) == 3
    assert (
        "TRAIN_DATASET: 31 of 90 rows are left out: other rows ask the same (5 have another answer)"
        in capsys.readouterr().out
    )
    trainer = with_reader(icl(**constants, TEST_DATASET=None), lambda numbers: 0.5)
    questions = [question for rows in trainer.splits.values() for question in rows]
    assert len({question["key"] for question in questions}) == len(questions) == 60
    for question in questions:
        assert question["key"] not in [trainer.demos[i]["key"] for i in question["pool"].tolist()]


def test_patience_in_rce_goes_on_with_grpo_from_the_best_of_rce(icl, tmp_path):
    module = icl(EARLY_STOPPING_PATIENCE=2, EVAL_EVERY_N_STEPS=1, RCE_EPOCHS=9, TEST_ORACLE=0, SHOTS=1)
    trainer = with_reader(module, lambda numbers: numbers[0] % 7 / 7 if numbers else 0.0)
    accuracies = iter([0.1, 0.2, 0.5, 0.4, 0.3, *[0.2] * 99])
    trainer.evaluate = lambda **_: {"accuracy": next(accuracies)}
    trainer.state.rules = {"similarity": 0.0}
    kept = {}
    trainer.start_grpo = lambda: kept.update(step=trainer.state.step) or module.ICLTrainer.start_grpo(trainer)
    trainer.train()
    assert kept["step"] == 4 and trainer.state.step == 6  # two evaluations without a gain, of each stage
    start = module.Pointer(trainer.corpus.candidates.shape[1]).state_dict()
    assert not all(torch.equal(start[name], x) for name, x in trainer.reference.state_dict().items())


def test_a_batch_may_have_fewer_questions_than_lists_have_demonstrations(icl):
    trainer = with_reader(icl(SHOTS=2), lambda numbers: 0.5)
    trainer.seed_step()
    (group,) = trainer.fresh_groups(trainer.splits["train"][:1])
    assert all(len(x.shown) == 1 for x in group.lists)


def test_grpo_goes_on_from_the_best_policy_of_rce(icl):
    module = icl(EVAL_EVERY_N_STEPS=1, RCE_EPOCHS=2, TEST_ORACLE=0, SHOTS=1)
    trainer = with_reader(module, lambda numbers: numbers[0] % 7 / 7 if numbers else 0.0)
    accuracies = iter([0.1, 0.2, 0.5, *[0.3] * 99])  # the second step's is the best
    trainer.evaluate = lambda **_: {"accuracy": next(accuracies)}
    trainer.state.rules = {"similarity": 0.0}
    after_step = []
    trainer.record = lambda batch, metrics: after_step.append(deepcopy(trainer.policy.state_dict()))
    trainer.train()
    assert trainer.rce.steps > 2
    kept = trainer.reference.state_dict()
    assert all(torch.equal(x, after_step[1][name]) for name, x in kept.items())
    assert not all(torch.equal(x, after_step[-1][name]) for name, x in kept.items())


def test_one_csv_of_ones_own_is_enough(icl, tmp_path):
    """Labels such as None stay texts; a fifth is held out."""
    labels = [["None", "yes", "a, b"][number % 3] for number in range(100)]
    rows = [(f"Ask {label} about word{number % 40}", label) for number, label in enumerate(labels)]
    write_csv(tmp_path / "mine.csv", "text,label", rows)
    data = {"path": str(tmp_path / "mine.csv"), "type": "csv", "input": "text", "output": "label"}
    module = icl(TRAIN_DATASET=data, TEST_DATASET=None)
    trainer = with_reader(module, lambda numbers: 0.1 + 0.8 * (sum(numbers) % 2))
    counts = {name: len(rows) for name, rows in trainer.splits.items()}
    assert counts == {"test": 20, "validation": 20, "train": 60}
    assert {demo["answer"] for demo in trainer.demos} == {"None", "yes", "a, b"}
    assert {len(question["pool"]) for question in trainer.splits["train"]} == {module.POOL_SIZE}
    trainer.train()
    assert (tmp_path / "run/eval_test.json").exists()
    other = icl(TRAIN_DATASET=data, TEST_DATASET=None, RESUME="yes", QUESTION="Ask: {text}\nAnswer:")
    with pytest.raises(ValueError, match="the mined lists of .* are of QUESTION='Question: "):
        with_reader(other, lambda numbers: 0.5).train()
    rows = [json.dumps({"text": f"what is it{n}", "label": ["x"] * 6 + ["y"] * 4}) for n in range(60)]
    (tmp_path / "vqa.jsonl").write_text("\n".join(rows))
    data |= {"path": str(tmp_path / "vqa.jsonl"), "type": "jsonl"}
    trainer = with_reader(icl(TRAIN_DATASET=data, TEST_DATASET=None, POOL="similarity"), lambda numbers: 0.5)
    assert trainer.demos[0]["answer"] == "x" and len(trainer.demos[0]["golds"]) == 10
    similarity = trainer.splits["test"][0]["similarity"].tolist()
    assert similarity == sorted(similarity, reverse=True)


BAD = {  # file: its content, and what the refusal of it says
    "empty.csv": (
        "question,answer\nwho,me\nwho, \n",
        "empty.csv:2: ValueError: ' ' is no question or answer",
    ),
    "cell.csv": (
        "question,answer\nwho,\"['me', 'you']\"\n",
        "cell.csv:1: ValueError: \"['me', 'you']\" is a list",
    ),
    "nan.jsonl": ('{"question": "who", "answer": NaN}', "nan.jsonl:1: ValueError: nan is no question"),
    "dict.jsonl": ('{"question": "who", "answer": {"text": "me"}}', "dict.jsonl:1: ValueError: {'text'"),
    "few.csv": ("question,answer\n" + "who,me\n" * 60, "the data sets are too small: 1 rows"),
}


@pytest.mark.parametrize(
    "word, says",
    [
        ("MINE_QUERIES=4", "such as MINE_QUEST"),
        ("REWARD_MODE=best", "REWARD_MODE is a function or one of hard_only, "),
        ("TAU=0", "TAU, MAX_GRAD_NORM and temperatures are above 0"),
        ("SAMPLE_TEMPERATURES=[-1.0]", "temperatures are above 0"),
        ("SHOTS=0", "SHOTS = 0"),
        ("QUESTION=Q: {question}", "QUESTION contains {text}"),
        ("DEMONSTRATION={text} {answer}; ", "{answer} and then a line break"),
        ("POOL_SIZE=1", "has 1 demonstrations: lower SHOTS"),
        ("READER=no/such", "READER=no/such cannot be loaded"),
        ("EMBEDDING=no/such", "EMBEDDING=no/such cannot be loaded"),
        ("RESUME=no/such", "RESUME = 'no/such'"),
        (f"TRAIN_DATASET={ {**MARKET, 'path': 'no.csv'} }", "No such file or directory: 'no.csv'"),
        (f"TRAIN_DATASET={ {**MARKET, 'output': 'label'} }", "['question', 'answer'"),
        (f"TRAIN_DATASET={ {**MARKET, 'type': 'tsv'} }", "the types are jsonl, csv, parquet and hub"),
        (f"TRAIN_DATASET={ {**MARKET, 'images': 'path'} }", "ValueError: it must have "),
        (f"TRAIN_DATASET={ {**MARKET, 'image': 'answer'} }", "train.csv:1: ValueError: there is no image"),
        *BAD.items(),
    ],
)
def test_what_a_user_can_correct_is_one_line(refusal, tmp_path, word, says):
    constants = {**SMALL, **few_rows(300), "OUTPUT_DIR": tmp_path / "run"}
    if word in BAD:
        content, says = says
        (tmp_path / word).write_text(content)
        spec = {**MARKET, "path": str(tmp_path / word), "type": word.rpartition(".")[2]}
        word = f"TRAIN_DATASET={spec}"
    assert says in refusal("rce/rce_icl.py", *words_of(constants), word)


def test_candidates_of_other_pools_and_logarithms_are_named(icl, tmp_path):
    trainer = with_reader(icl(), lambda numbers: 0.5)
    (tmp_path / "mined.jsonl").write_text(json.dumps({"id": "other", "pool": [1]}) + "\n")
    with pytest.raises(ValueError, match="mined.jsonl is of other data or pools: set the constants back"):
        trainer.mine_lists(tmp_path / "mined.jsonl", trainer.splits["train"], 2)
    trainer.reader.value = lambda numbers: -0.5  # a logarithm
    with pytest.raises(ValueError, match="hold -0.5: not a probability"):
        trainer.mine_lists(tmp_path / "new.jsonl", trainer.splits["train"], 2)


def test_the_example_with_a_reader_of_its_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    votes = importlib.import_module("icl_votes")
    constants = {**SMALL, "POOL_SIZE": 32, "GRPO_EPOCHS": 0, "OUTPUT_DIR": str(tmp_path / "run")}
    data = {**votes.rce_icl.TRAIN_DATASET, "path": first_lines("banking77/train.csv", 601)}
    for name, value in {**constants, "TRAIN_DATASET": data, "TEST_DATASET": None}.items():
        monkeypatch.setattr(votes.rce_icl, name, value)
    votes.rce_icl.draw_grid = lambda *arguments: None
    trainer = votes.VoteTrainer()
    question, demos = trainer.splits["test"][0], trainer.demos[:2]
    golds = sorted({demo["answer"] for demo in trainer.demos})
    asked = [({**question, "golds": [gold]}, demos) for gold in golds]
    assert sum(trainer.reader.gold_probabilities(asked)) == pytest.approx(1)
    best = golds[int(np.argmax(trainer.reader.gold_probabilities(asked)))]
    assert trainer.reader.answers([(question, demos)]) == [best]
    trainer.train()
    assert len(json.loads((tmp_path / "run/eval_test.json").read_text())["best/"]) == votes.rce_icl.SHOTS
