"""grpo/grpo_rec.py: formulas and decoding against brute force, data, models, resume, wrong input."""

import itertools
import json
import math
import random
import sys

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, write_csv, load, without_clock, words_of
from program import Program

PATH = "grpo/grpo_rec.py"
TINY = str(ROOT / "data/tiny/policy")
ITEMS, HEAD = 20, "user_id,history_item_id,item_id"


@pytest.fixture
def world(tmp_path):
    """Writes 20 items of three codes and rows of random histories. Returns the constants of a small run."""
    draw = random.Random(0)
    index = {f"i{n}": [f"<a_{n // 8}>", f"<b_{n // 2 % 4}>", f"<c_{n % 2}>"] for n in range(ITEMS)}
    (tmp_path / "index.json").write_text(json.dumps(index))
    lines = [f"{''.join(codes)}\t$ the number {name[1:]}\t{name}\n" for name, codes in index.items()]
    (tmp_path / "items.txt").write_text("".join(lines))
    for split, count in (("train", 24), ("valid", 9), ("test", 8)):
        rows = []
        for user in range(count):
            items = [f"i{draw.randrange(ITEMS)}" for _ in range(draw.randrange(2, 7))]
            rows.append((f"{split}{user}", items[:-1], items[-1]))
        write_csv(tmp_path / f"{split}.csv", HEAD, rows)
    values = torch.rand(ITEMS, ITEMS, generator=torch.Generator().manual_seed(0)).numpy()
    np.save(tmp_path / "values.npy", values)
    names = {f"{split.upper()}_FILE": f"{split}.csv" for split in ("train", "valid", "test")}
    names |= {"INDEX_FILE": "index.json", "ITEM_FILE": "items.txt", "VALUES_FILE": "values.npy"}
    names |= {"BASELINES_FILE": "baselines.npz", "OUTPUT_DIR": "run"}
    sizes = {"SFT_EPOCHS": 2, "SFT_BATCH_SIZE": 8, "BATCH_SIZE": 6, "GROUP_SIZE": 4, "EVAL_BEAMS": 20}
    sizes |= {"MAX_STEPS": 3, "SAVE_EVERY_N_STEPS": 2, "EVAL_EVERY_N_STEPS": 2, "RESUME": "no"}
    return {**{key: str(tmp_path / name) for key, name in names.items()}, **sizes}


@pytest.fixture
def make(world):
    """make(KEY=value) returns a trainer of the small world, with its module as trainer.module. noise makes
    the actor's weights, and so the items, less alike than they are at first."""

    def make_trainer(noise=0.0, **constants):
        module = load(PATH, **{**world, **constants})
        module.draw_grid = lambda *arguments: None
        trainer = module.RecTrainer()
        trainer.module = module
        trainer.run.log = print
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in trainer.actor.parameters():
                parameter.add_(noise * torch.randn(parameter.shape))
        return trainer

    return make_trainer


def plain_logprobs(trainer, model, history, item):
    """Returns the log-probability of each code: one row, no cache, prefixes compared with all, float64."""
    prompt = trainer.prompt(history)
    paths = trainer.trie.codes.tolist()
    result = []
    for level, code in enumerate(paths[item]):
        ids = prompt + paths[item][:level]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double() / trainer.module.TEMPERATURE
        allowed = sorted({path[level] for path in paths if path[:level] == paths[item][:level]})
        result.append((logits[code] - logits[allowed].logsumexp(0)).item())
    return result


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_beams_and_their_log_probabilities_are_those_of_brute_force(make, tmp_path, family):
    words = {}
    if family == "gpt2":  # its positions are learnt; a folder without weights
        words["ACTOR_MODEL"] = str(tmp_path / "gpt2")
        transformers.AutoTokenizer.from_pretrained(ROOT / "data/rec/llama").save_pretrained(tmp_path / "gpt2")
        shape = {"vocab_size": 3, "n_embd": 32, "n_layer": 2, "n_head": 2}
        shape |= {"bos_token_id": 1, "eos_token_id": 1}
        transformers.GPT2Config(**shape).save_pretrained(tmp_path / "gpt2")
    trainer = make(noise=0.2, TEMPERATURE=0.7, MICRO_BATCH_ROWS=4, **words)
    items, logprobs = trainer.search_rows(trainer.actor, trainer.valid_rows, ITEMS)
    for row, found, found_logprobs in zip(trainer.valid_rows, items.tolist(), logprobs):
        wanted = [plain_logprobs(trainer, trainer.actor, row["history"], item) for item in range(ITEMS)]
        totals = [sum(codes) for codes in wanted]
        assert math.fsum(map(math.exp, totals)) == pytest.approx(1)
        assert found == sorted(range(ITEMS), key=lambda item: -totals[item])
        assert torch.allclose(found_logprobs, torch.tensor([wanted[item] for item in found]), atol=1e-5)


def test_a_narrow_beam_keeps_the_best_prefixes_of_each_level(make, tmp_path):
    lines = (tmp_path / "items.txt").read_text().replace("$ the", 'a 3/4" bolt, the')
    (tmp_path / "items.txt").write_text(lines)
    trainer = make(noise=0.2, EVAL_BEAMS=20)
    paths = trainer.trie.codes.tolist()
    for row in trainer.valid_rows[:4]:
        logprobs = [plain_logprobs(trainer, trainer.actor, row["history"], item) for item in range(ITEMS)]
        prefixes = [()]
        for level in range(3):
            scores = {}
            for path, codes in zip(paths, logprobs):
                if tuple(path[:level]) in prefixes:
                    scores[tuple(path[: level + 1])] = sum(codes[: level + 1])
            prefixes = sorted(scores, key=lambda prefix: -scores[prefix])[:3]
        items, _ = trainer.search_rows(trainer.actor, [row], 3)
        assert [tuple(paths[item]) for item in items[0]] == prefixes
    best = max(range(ITEMS), key=lambda item: sum(logprobs[item]))
    (found,) = trainer.recommend(trainer.catalogue.names(row["history"]), k=1)
    assert found[:2] == (f"i{best}", f'a 3/4" bolt, the number {best}')
    assert found[2] == pytest.approx(math.exp(sum(logprobs[best])), rel=1e-3)
    everything = trainer.recommend(["i3", "i1"], k=ITEMS)
    new = trainer.recommend(["i3", "i1"], k=ITEMS, is_new=True)
    assert len(everything) == ITEMS and new == [x for x in everything if x[0] not in ("i3", "i1")]


def test_samples_have_the_policys_probabilities_however_many_rows_are_read_at_a_time(make):
    trainer = make(noise=0.2)
    rows = trainer.valid_rows[:1] * 300
    found = []
    for trainer.module.MICRO_BATCH_ROWS in (300, 7):
        torch.manual_seed(0)
        found.append(trainer.search_rows(trainer.actor, rows, ITEMS, is_sampled=True)[0])
    assert torch.equal(*found)
    shares = found[0].flatten().bincount(minlength=ITEMS) / found[0].numel()
    history = rows[0]["history"]
    for item, share in enumerate(shares.tolist()):
        wanted = math.exp(sum(plain_logprobs(trainer, trainer.actor, history, item)))
        assert share == pytest.approx(wanted, abs=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_ratios_are_1_before_the_first_update_or_the_run_ends(make, dtype):
    trainer = make(noise=0.1, DTYPE=dtype)
    batch = trainer.rollout(trainer.next_rows(trainer.rl_rows, 6))
    batch.advantages = trainer.module.group_advantages(batch.scores)
    limit = {"float32": 1e-5, "bfloat16": 0.02}[dtype]
    assert trainer.update(batch)["rollout_mismatch"] < limit
    trainer.module.TEMPERATURE = 0.3
    with pytest.raises(ValueError, match="update and rollout differ"):
        trainer.update(batch)


@pytest.mark.parametrize("scale, divisor", [("none", 1), ("group", 7**0.5 + 1e-4), ("batch", None)])
def test_group_advantages_by_hand_and_exact_zeros(scale, divisor):
    module = load(PATH, SCALE_REWARDS=scale)
    scores = torch.tensor([[1.0, 2.0, 6.0], [0.7, 0.7, 0.7]])
    wanted = torch.tensor([[-2.0, -1.0, 3.0], [0, 0, 0]]) / (divisor or scores.std() + 1e-4)
    assert torch.allclose(module.group_advantages(scores), wanted)
    assert torch.equal(module.group_advantages(scores)[1], torch.zeros(3))


def test_the_policy_loss_is_the_clipped_formula_on_both_sides():
    module = load(PATH, CLIP_RANGE=0.2, CLIP_RANGE_HIGH=0.3)
    draw = random.Random(0)
    for sign, _ in itertools.product((1.0, -1.0), range(20)):
        ratios = [draw.choice((0.5, 0.75, 0.9, 1.1, 1.25, 1.5)) for _ in range(3)]
        logprobs = torch.tensor([[ratios]], dtype=torch.float64).log().requires_grad_()
        losses, _ = module.policy_loss(logprobs, torch.zeros(1, 1, 3), torch.full((1, 1, 1), sign))
        clipped = [min(max(ratio, 0.8), 1.3) for ratio in ratios]
        wanted = [-min(r * sign, c * sign) for r, c in zip(ratios, clipped)]
        assert losses.flatten().tolist() == pytest.approx(wanted)
        losses.sum().backward()
        slope = [-sign * r * (r < 1.3 if sign > 0 else r > 0.8) for r in ratios]  # 0 where it is clipped
        assert logprobs.grad.flatten().tolist() == pytest.approx(slope)


def test_rewards_by_hand(make):
    def own(histories, items, targets):
        return [len(h) + 10.0 * (i == t) for h, i, t in zip(histories, items, targets)]

    weights = {"VALUE_WEIGHT": 2.0, "RULE_WEIGHT": 3.0, "VALUE_DECAY": 0.5}
    trainer = make(**weights, REWARD_FUNCTIONS=[(own, 7.0)])
    rows = [{"history": [3, 1], "target": 4}, {"history": [2], "target": 9}]
    scores, parts = trainer.compute_rewards(rows, torch.tensor([[5, 4, 6], [5, 4, 6]]))
    values = trainer.values
    first = [(0.5 * values[3, item] + values[1, item]) / 1.5 for item in (5, 4, 6)]
    wanted = {
        "value": [first, [values[2, item] for item in (5, 4, 6)]],
        "rule": [[0, 1, 0], [0, 0, 0]],
        "own": [[2, 12, 2], [1, 1, 1]],
    }
    for name, by_hand in wanted.items():
        assert torch.allclose(parts[name], torch.tensor(by_hand, dtype=torch.float32)), name
    assert torch.allclose(scores, sum(w * parts[n] for n, w in zip(wanted, (2, 3, 7))))
    own.__name__ = "rule"
    with pytest.raises(trainer.module.UserError, match=r"rename rule\(\)"):
        make(REWARD_FUNCTIONS=[(own, 7.0)])


def test_ndcg_and_hit_rate_against_brute_force(make):
    trainer = make()
    draw = random.Random(1)
    lists = [draw.sample(range(ITEMS), 20) for _ in trainer.valid_rows]
    figures = trainer.list_figures(torch.tensor(lists), trainer.valid_rows)
    for number, (row, items) in enumerate(zip(trainer.valid_rows, lists)):
        rank = items.index(row["target"]) + 1
        for k in (1, 3, 5, 10, 20):
            assert figures[f"hr@{k}"][number] == (rank <= k)
            gain = 1 / math.log2(rank + 1) if rank <= k else 0
            assert figures[f"ndcg@{k}"][number].item() == pytest.approx(gain)
    covered = {item for items in lists for item in items[:10]}
    assert figures["coverage@10"].item() == pytest.approx(len(covered) / ITEMS)


def test_the_gradient_is_that_of_the_formula_however_it_is_cut(make):
    def gradients_of(trainer):
        return torch.cat([p.grad.flatten() for p in trainer.actor.parameters() if p.grad is not None])

    found = []
    for size in (6, 2, 1):
        trainer = make(noise=0.1, ENTROPY_COEF=0.1, MICRO_BATCH_ROWS=size)
        module = trainer.module
        trainer.clip_and_step = lambda sums: {"rollout_mismatch": 0.0}
        batch = trainer.rollout(trainer.next_rows(trainer.rl_rows, 6))
        batch.advantages = module.group_advantages(batch.scores)
        batch.ref_logprobs = batch.logprobs - 0.3
        trainer.optimizer_step(batch, torch.arange(6))
        found.append(gradients_of(trainer))
        trainer.actor.zero_grad()
    for other in found[1:]:
        assert torch.allclose(found[0], other, atol=1e-6)
    paths = trainer.trie.codes.tolist()
    total = 0.0
    for number, row in enumerate(batch.rows):
        for place, item in enumerate(batch.items[number].tolist()):
            logits = trainer.actor(torch.tensor([row["ids"] + paths[item]])).logits[0, -4:-1]
            for level in range(3):
                allowed = sorted({p[level] for p in paths if p[:level] == paths[item][:level]})
                distribution = logits[level, allowed].log_softmax(0)
                logprob = distribution[allowed.index(paths[item][level])]
                entropy = -(distribution.exp() * distribution).sum()
                kl = 0.5 * (logprob - logprob.detach() + 0.3) ** 2
                ratio = (logprob - logprob.detach()).exp()
                loss = -ratio * batch.advantages[number, place] + module.KL_COEF * kl - 0.1 * entropy
                total = total + loss / batch.logprobs.numel()
    total.backward()
    assert torch.allclose(found[0], gradients_of(trainer), atol=1e-6)


def test_sft_learns_each_logged_item_once_and_none_that_is_asked_for(make, tmp_path):
    rows = [("u", ["i1", "i2", "i3"], "i4"), ("u", ["i2"], "i3"), ("w", ["i5"], "i6")]
    write_csv(tmp_path / "train.csv", HEAD, rows)
    write_csv(tmp_path / "valid.csv", HEAD, [("u", ["i9", "i3"], "i4"), ("x", ["i1"], "i2")])
    trainer = make(MAX_HISTORY=2, SFT_BATCH_SIZE=2)
    pairs = [(row["history"], row["target"]) for row in trainer.rl_rows]
    # i1 is cut off, (i3, i4) is asked for in validation, (i2, i3) of the second row stood in the first
    assert pairs == [([2], 3), ([5], 6)]
    assert [row["history"] for row in trainer.valid_rows] == [[9, 3], [1]]
    wanted = [plain_logprobs(trainer, trainer.actor, history, target) for history, target in pairs]
    trainer.state.step = 1
    metrics = trainer.sft_update(trainer.sft_rows)
    assert metrics["sft_loss"] == pytest.approx(-sum(map(sum, wanted)) / 6, abs=1e-5)


def test_text_behind_the_history_and_a_chat_template_give_the_same_loss_row_by_row(make, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = "{{ '#' + messages[0]['content'] + ' are' }}"
    tokenizer.save_pretrained(tmp_path / "chat")
    transformers.AutoModelForCausalLM.from_pretrained(TINY).save_pretrained(tmp_path / "chat")
    trainer = make(ACTOR_MODEL=str(tmp_path / "chat"), PROMPT_TEMPLATE="({input})", VALUE_WEIGHT=0.0)
    codes = "".join(itertools.chain(*(trainer.catalogue.codes[item] for item in (3, 7))))
    assert trainer.tokenizer.decode(trainer.prompt([3, 7])).replace(" ", "") == f"#({codes})are"
    assert len(trainer.sft_rows) == len(trainer.rl_rows) > 24  # lines of train.csv
    rows = trainer.sft_rows[:5]
    wanted = [plain_logprobs(trainer, trainer.actor, row["history"], row["target"]) for row in rows]
    trainer.state.step = 1
    assert trainer.sft_update(rows)["sft_loss"] == pytest.approx(-sum(map(sum, wanted)) / 15, abs=1e-4)


def test_title_rows_ask_for_items_by_titles(make):
    trainer = make(ACTOR_MODEL=TINY, TITLE_HISTORY_ROWS=0.5, TITLE_ROWS=1.0)
    by_code = make(ACTOR_MODEL=TINY, OUTPUT_DIR=str(trainer.run.folder) + "2")
    added = trainer.rl_rows[len(by_code.rl_rows) :]
    assert len(added) == round(0.5 * len(by_code.rl_rows))
    titles = "\n".join(trainer.catalogue.titles[item] for item in added[0]["history"])
    assert added[0]["ids"] == trainer.tokenizer(titles + "\n")["input_ids"]  # its chat template
    assert {row["items"][0] for row in trainer.sft_rows[-ITEMS:]} == set(range(ITEMS))
    trainer.train()


def test_baselines_belong_to_their_rows_and_stand_in_the_table(make, world, tmp_path):
    words = words_of({key: world[key] for key in world if key.endswith("_FILE")})
    done = Program(ROOT / "data/rec_baselines.py", *words, cwd=ROOT).wait()
    assert done.returncode == 0, done.stderr
    trainer = make()
    counts = torch.tensor([row["target"] for row in trainer.rl_rows]).bincount(minlength=ITEMS)
    wanted = counts.argsort(descending=True, stable=True).tolist()
    assert trainer.module.baseline_lists(trainer.test_rows)["popularity"].tolist() == [wanted] * 8
    assert trainer.module.baseline_lists([{"history": [0, 1, 2, 3, 4, 5]}]) == {}
    trainer.train()
    table = json.loads((tmp_path / "run/eval_test.json").read_text())
    rules = "popularity markov counts product sasrec".split()
    assert list(table) == [*rules, "sft", "grpo", "grpo - sft", "possible"]
    gain = table["grpo"]["ndcg@10"] - table["sft"]["ndcg@10"]
    assert table["grpo - sft"]["ndcg@10"] == pytest.approx(gain, abs=1e-6)
    trainer.module.GROUP_SIZE = ITEMS + 1  # the lists are shorter
    assert trainer.module.baseline_lists(trainer.test_rows) == {}
    write_csv(tmp_path / "train.csv", HEAD, [("u", ["i1"], "i2")])
    assert make().module.baseline_lists(trainer.test_rows) == {}


def test_grpo_raises_what_is_rewarded_and_a_constant_reward_moves_nothing(make):
    def even(histories, items, targets):
        return [1.0 - int(item[1:]) % 2 for item in items]

    options = {"VALUE_WEIGHT": 0.0, "RULE_WEIGHT": 0.0, "KL_COEF": 0.0, "SFT_EPOCHS": 0}
    options["LEARNING_RATE"] = 3e-3
    trainer = make(**options, MAX_STEPS=30, REWARD_FUNCTIONS=[(even, 1.0)])
    assert trainer.evaluate()["reward_sampled"] < 0.6 and trainer.train()["reward_sampled"] > 0.9
    trainer = make(**options, REWARD_FUNCTIONS=[(lambda histories, items, targets: [0.7] * len(items), 1.0)])
    trainer.train()
    assert all(map(torch.equal, trainer.reference.parameters(), trainer.actor.parameters()))


def test_sft_alone_is_continued_by_grpo(make, tmp_path):
    make(OUTPUT_DIR=str(tmp_path / "one")).train()
    sft = make(OUTPUT_DIR=str(tmp_path / "two"), MAX_STEPS=0)
    sft.train()
    metrics = without_clock(tmp_path / "two/logs/metrics.jsonl")
    best = max(record["ndcg@10"] for record in metrics if record["phase"] == "eval")
    sft.actor = sft.reference  # keeps the best policy of SFT
    assert sft.evaluate()["ndcg@10"] == best
    make(OUTPUT_DIR=str(tmp_path / "two"), RESUME="yes").train()
    last = sorted(path.name for path in (tmp_path / "one").glob("step_*"))[-1]
    for name in (f"{last}/policy/model.safetensors", "eval_test.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    (tmp_path / "index.json").write_text((tmp_path / "index.json").read_text().replace("i19", "i20"))
    with pytest.raises(ValueError, match="index.json' has other codes than the run"):
        make(OUTPUT_DIR=str(tmp_path / "two"), RESUME="yes")


BAD = {
    "a misspelt constant": ({"RULE_WEIGTH": 1}, {}, "such as RULE_WEIGHT"),
    "a missing file": ({"TRAIN_FILE": "nowhere.csv"}, {}, "TRAIN_FILE = 'nowhere.csv' cannot be read"),
    "an unknown item": ({}, {"train.csv": [("u", ["i1"], "i99")]}, "line 2 (KeyError: 'i99')"),
    "values of another catalogue": ({"VALUES_FILE": ROOT / "data/rec/values.npy"}, {}, "a row and a column"),
    "no model": ({"ACTOR_MODEL": "nowhere/at/all"}, {}, "ACTOR_MODEL=nowhere/at/all"),
    "titles without words": ({"TITLE_ROWS": 1.0}, {}, "does not know the titles' words"),
    "an item without a title": ({"TITLE_ROWS": 1.0}, {"items.txt": "<a>\tx\ti1\n"}, "19 items have no title"),
    "codes as one text": ({}, {"index.json": '{"i1": "<a_1><b_2>"}'}, "item 'i1' has '<a_1><b_2>': it takes"),
    "codes as numbers": ({}, {"index.json": '{"i1": [1, 2]}'}, "item 'i1' has [1, 2]: it takes"),
    "an empty code": ({}, {"index.json": '{"i1": ["<a_1>", ""]}'}, "item 'i1' has ['<a_1>', '']: it takes"),
    "codes as objects": (
        {},
        {"index.json": '[{"item": "i1", "codes": ["<a_1>"]}]'},
        "it takes {item: codes}",
    ),
    "no items": ({}, {"index.json": "{}"}, "it takes {item: codes}"),
    "a share in percent": ({"TITLE_ROWS": 20.0}, {}, "TITLE_ROWS is at most 1"),
    "no learning rate": ({"SFT_LEARNING_RATE": 0.0}, {}, "SFT_LEARNING_RATE is above 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_input_is_one_line_and_exit_code_2(world, tmp_path, name, refusal):
    constants, files, message = BAD[name]
    for file, content in files.items():
        if isinstance(content, str):
            (tmp_path / file).write_text(content)
        else:
            write_csv(tmp_path / file, HEAD, content)
    assert message in refusal(PATH, *words_of({**world, **constants}))


def test_the_shipped_data_is_what_its_program_makes(tmp_path):
    load("data/make_rec.py").main(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (ROOT / "data/rec" / path.name).read_bytes(), path.name


def test_the_examples_rewards_by_hand(world, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "data"), *sys.path])
    for name in ("rec_baselines", "grpo_rec"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    example = load("examples/rec_rewards.py")
    vars(example.rec).update(world)
    example.rec_baselines.EPOCHS = 1
    trainer = example.Trainer()
    rewards = trainer.list_rewards([{"history": [3, 1], "target": 4}], torch.tensor([[4, 1, 9, 17]]))
    assert rewards["diversity"][0].tolist() == pytest.approx([2 / 3, 2 / 3, 1, 1])
    assert rewards["semantic"][0, 0].item() == pytest.approx(1)
    scores = trainer.sasrec.scores([[3, 1]])[0, [4, 1, 9, 17]]
    wanted = (scores - scores.min()) / (scores.max() - scores.min())
    assert torch.allclose(rewards["collaborative"][0], wanted)
