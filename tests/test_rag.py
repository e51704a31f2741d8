"""PPO over retrieval: formulas in float64, figures recomputed from table.jsonl, the system that answers, its
cache, data of one's own, killed runs."""

import importlib.util
import itertools
import json
import os
import shutil
import signal
import unicodedata
from collections import Counter
from copy import deepcopy
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, load, read

PATH = "ppo/ppo_rag.py"
SMALL = {"SAMPLE": 40, "TOP_KS": (1, 3), "FIXED_ACTION": (3, 0.7, 0), "N_STEPS": 16, "BATCH_SIZE": 8}
SMALL |= {"MAX_STEPS": 6, "SAVE_EVERY_N_STEPS": 2, "EVAL_EVERY_N_STEPS": 2}
CORPUS = [
    {"title": "Robert Merrow", "text": "a sculptor, born in the town of Rudholm in 1815."},
    {"title": "Mary Tinsel", "text": "a poet, born in the town of Velvale in 1863."},
    {"title": "Rudholm", "text": "a town of sculptors on the river Wend."},
    {"title": "Robert Hale", "text": "a poet, born in Ostgate."},
]


@pytest.fixture
def rag(tmp_path, tmp_path_factory):
    cache = str(tmp_path_factory.getbasetemp() / "rag_cache")

    def make(draws=False, **constants):
        words = SMALL | {"OUTPUT_DIR": str(tmp_path / "run"), "CACHE_DIR": cache, "RESUME": "no"}
        module = load(PATH, **{**words, **constants})
        module.draw_grid = module.draw_grid if draws else lambda *arguments: None
        return module

    return make


class FakeSystem:
    """Answers right if a "plain" question has one paragraph, another one two."""

    def __init__(self, corpus):
        self.corpus, self.reranker, self.log = corpus, None, []
        self.generator = SimpleNamespace(prompt=self.prompt, answers=self.answers, limit=9)

    def search(self, question, count):
        return self.corpus[:count], np.ones(1)

    def ranked(self, question, rerank):
        return self.corpus

    def prompt(self, question, paragraphs):
        return f"{question} {len(paragraphs)}", len(paragraphs)

    def answers(self, prompts, temperature):
        self.log.append(prompts)
        wanted = ["1" if "plain" in prompt else "2" for prompt in prompts]
        return [("right" if p.endswith(number) else "wrong", 10) for p, number in zip(prompts, wanted)]

    def observe(self, question):
        return [float("plain" in question), 1.0]


@pytest.fixture
def fake(rag, tmp_path):
    def make(count=60, **constants):
        kinds = ["plain" if i % 2 else "other" for i in range(count)]
        rows = [{"question": f"{x} {i} ?", "answer": "right", "type": x} for i, x in enumerate(kinds)]
        write(tmp_path / "questions.jsonl", rows)
        write(tmp_path / "corpus.jsonl", CORPUS)
        own = {"DATASET": str(tmp_path), "CACHE_DIR": str(tmp_path / "cache"), "SAMPLE": None}
        own |= {"TOP_KS": (1, 2), "TEMPERATURES": (0.0,), "FIXED_ACTION": None}
        module = rag(**{**own, **constants})
        module.QASystem = FakeSystem
        trainer = module.RAGTrainer()
        trainer.module = module
        return trainer

    return make


def write(path, rows):
    form = path.suffix[1:].replace("jsonl", "json")
    getattr(datasets.Dataset.from_list(rows), f"to_{form}")(path)


def test_a_step_has_the_gradient_and_the_metrics_of_the_formulas_in_float64(fake):
    trainer = fake(VALUE_LOSS_COEF=0.7, ENTROPY_COEF=0.3, MAX_GRAD_NORM=1e9, LEARNING_RATE=0.01)
    batch = trainer.rollout()
    trainer.compute_advantages(batch)
    raw = (batch.rewards - batch.values).double()
    assert torch.allclose(batch.advantages.double(), (raw - raw.mean()) / raw.std(correction=0), atol=1e-5)
    for _ in range(3):  # moves the policy
        trainer.optimizer_step(batch, torch.arange(16))
    policy = deepcopy(trainer.policy).double()
    rows, actions, advantages = batch.questions[4:12], batch.actions[4:12], batch.advantages[4:12].double()
    logprobs, values = policy(trainer.observations[rows].double())
    ratio = (logprobs[torch.arange(8), actions] - batch.logprobs[4:12].double()).exp()
    clip = trainer.module.CLIP_RANGE = (ratio - 1).abs().mean().item()  # some ratios leave it
    metrics = trainer.optimizer_step(batch, torch.arange(4, 12))
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    value_loss = ((values - batch.rewards[4:12].double()) ** 2 / 2).mean()
    entropy = -(logprobs.exp() * logprobs).sum(1).mean()
    loss = -surrogate.mean() + 0.7 * value_loss - 0.3 * entropy
    gradients = torch.autograd.grad(loss, list(policy.parameters()))
    for parameter, gradient in zip(trainer.policy.parameters(), gradients):
        assert torch.allclose(parameter.grad.double(), gradient, atol=1e-6)
    outside = ((ratio > 1 + clip) & (advantages > 0)) | ((ratio < 1 - clip) & (advantages < 0))
    assert outside.any() and not outside.all(), ratio
    wanted = {"policy_loss": -surrogate.mean(), "value_loss": value_loss, "entropy": entropy}
    wanted |= {"approx_kl": (ratio - 1 - ratio.log()).mean(), "clip_fraction": outside.double().mean()}
    wanted["policy_grad_norm"] = sum((gradient**2).sum() for gradient in gradients) ** 0.5
    assert metrics == pytest.approx({name: x.item() for name, x in wanted.items()}, abs=1e-5)
    trainer.module.MAX_GRAD_NORM = 0.01
    trainer.optimizer_step(batch, torch.arange(4, 12))
    norm = sum((p.grad**2).sum().item() for p in trainer.policy.parameters()) ** 0.5
    assert norm == pytest.approx(0.01, rel=1e-3)


def test_an_update_takes_each_episode_once_per_pass_at_the_constants_rate(fake):
    trainer = fake(GROUP_EPOCHS=3)
    seen = []
    trainer.optimizer_step = lambda batch, episodes: seen.append(episodes) or {"policy_loss": 0.0}
    batch = trainer.rollout()
    trainer.module.LEARNING_RATE = 0.5  # as in a run that is resumed with another one
    assert trainer.update(batch)["learning_rate"] == trainer.optimizer.param_groups[0]["lr"] == 0.5
    assert [sorted(torch.cat(seen[n : n + 2]).tolist()) for n in (0, 2, 4)] == [list(range(16))] * 3
    train = trainer.splits["train"]
    assert len(batch.questions.unique()) == 16 and set(batch.questions.tolist()) <= set(train.tolist())
    assert len(batch.actions.unique()) > 2  # of four: sampled, for two kinds of questions
    assert torch.equal(batch.rewards, trainer.rewards[batch.questions, batch.actions])
    assert torch.equal(trainer.policy.mean, trainer.observations[train].mean(0))


def test_the_reward_by_hand(fake):
    trainer = fake(EM_WEIGHT=2.0, COST_WEIGHT=0.1, COST_TOKENS=10.0, COST_PAIRS=2.0)
    table = {"question": ["q", "q"], "response": ["a red fox", "The fox!"], "answer": ["fox", ["dog", "fox"]]}
    table |= {"tokens": [20, 30], "pairs": [0, 4]}
    table |= {name: [0.0, 1.0] for name in ("recall", "top_k", "temperature", "rerank")}
    found = trainer.compute_rewards(table)
    assert found["em"].tolist() == [0, 1] and found["cost"].tolist() == [2, 5]
    assert found["reward"].tolist() == pytest.approx([0.5 * 2 / 3 - 0.2, 2 + 0.5 - 0.5])
    trainer.module.ROUGE_WEIGHT = 3.0
    rouge = [0.5, 2 / 3]  # one of three, of two words is right, and one of one found
    wanted = [0.5 * 2 / 3 + 3 * rouge[0] - 0.2, 2 + 0.5 + 3 * rouge[1] - 0.5]
    assert trainer.compute_rewards(table)["reward"].tolist() == pytest.approx(wanted)
    table |= {"response": ["5", "C#"], "answer": ["-5", "C++"]}
    for is_strict in (False, True):
        trainer.module.STRICT = is_strict
        found = trainer.compute_rewards(table)
        assert found["em"].tolist() == found["f1"].tolist() == [1 - is_strict] * 2


def test_the_figures_of_the_test_follow_from_the_table(rag, tmp_path):
    module = rag(draws=True)
    trainer = module.RAGTrainer()
    trainer.train()
    figures = json.loads((tmp_path / "run/test.json").read_text())
    table = {}  # {question: {action's name: record}}
    for record in read(tmp_path / "run/table.jsonl"):
        name = f"k={record['top_k']} T={record['temperature']} rerank={record['rerank']}"
        table.setdefault(record["question"], {})[name] = record
        assert record["recall"] == np.mean([title in record["titles"] for title in record["gold"]])
    test, train = ([r["question"] for r in trainer.questions if r["split"] == x] for x in ("test", "train"))
    types = {row["question"]: row["type"] for row in trainer.questions}

    def best_of(questions):
        totals = {name: sum(table[q][name]["reward"] for q in questions) for name in trainer.action_names}
        return max(totals, key=totals.get)

    policy = module.Policy(trainer.observations, 8)
    policy.load_state_dict(torch.load(tmp_path / "run/best/policy/policy.pt"))
    chosen = {name: dict.fromkeys(test, name) for name in trainer.action_names}
    chosen |= {"fixed": chosen["k=3 T=0.7 rerank=0"], "best_fixed": dict.fromkeys(test, best_of(train))}
    chosen |= {"best_by_type": {}, "oracle": {q: best_of([q]) for q in test}, "policy": {}}
    for q in test:
        alike = [other for other in train if types[other] == types[q]]
        chosen["best_by_type"][q] = best_of(alike or train)
        logits, _ = policy(torch.tensor([trainer.qa.observe(q)], dtype=torch.float32))
        chosen["policy"][q] = trainer.action_names[int(logits.argmax())]
    for name, actions in chosen.items():
        for metric in ("reward", "em", "f1", "cost", "recall", "top_k"):
            wanted = np.mean([table[q][actions[q]][metric] for q in test])
            assert figures[name][metric] == pytest.approx(wanted, abs=1e-5), (name, metric)
        gains = [table[q][chosen["policy"][q]]["reward"] - table[q][actions[q]]["reward"] for q in test]
        assert figures[name]["gain"] == pytest.approx(np.mean(gains), abs=1e-5)
        assert figures[name]["interval"] == pytest.approx(1.96 * np.std(gains) / len(test) ** 0.5, abs=1e-5)
        same = np.mean([chosen["policy"][q] == actions[q] for q in test])
        assert figures[name]["same"] == pytest.approx(same, abs=1e-5)
    answer, action = trainer.answer(test[0])
    name = chosen["policy"][test[0]]
    assert action == trainer.actions[trainer.action_names.index(name)]
    assert action[1] > 0 or answer == table[test[0]][name]["response"]
    everything = np.mean([record["reward"] for q in test for record in table[q].values()])
    assert figures["random"]["reward"] == pytest.approx(everything, abs=1e-5)


def test_rules_know_no_reward_of_a_test_question(fake):
    trainer = fake()
    for seed in range(5):
        torch.manual_seed(seed)
        trainer.observations, trainer.rewards = torch.rand(60, 5), torch.rand(60, 4)
        before = trainer.fit_rules()
        trainer.rewards[trainer.splits["test"]] *= -10
        for name, probabilities in trainer.fit_rules().items():
            assert torch.equal(before[name], probabilities) == (name != "oracle"), name


def test_ppo_finds_the_better_action_of_each_type(fake, tmp_path):
    fake(count=120, MAX_STEPS=40, N_STEPS=64, LEARNING_RATE=0.01, SAVE_EVERY_N_STEPS=0).train()
    figures = json.loads((tmp_path / "run/test.json").read_text())
    assert figures["policy"]["em"] == figures["oracle"]["em"] == figures["tree"]["em"] == 1
    assert figures["best_fixed"]["em"] < 0.7


def test_best_is_the_policy_of_the_best_evaluation_and_is_tested(fake, tmp_path):
    trainer = fake(MAX_STEPS=8, LEARNING_RATE=0.05)
    first = deepcopy(trainer.policy)
    trainer.evaluate = lambda: {"reward": -trainer.state.step}
    trainer.train()
    saved = torch.load(tmp_path / "run/best/policy/policy.pt")
    assert str(saved) == str(first.state_dict()) != str(trainer.policy.state_dict())
    tested = json.loads((tmp_path / "run/test.json").read_text())["policy"]["reward"]
    one, two = (trainer.measure(trainer.splits["test"], trainer.choose(x)) for x in (first, trainer.policy))
    assert one["reward"] == tested != two["reward"]


def test_the_observation_entry_by_entry(rag):
    module = rag()
    vocabulary = set(module.words_of(" ".join(map(module.paragraph_text, CORPUS))))
    question = "Was Robert Merrow born in Rudholm, or elsewhere?"
    paragraphs = [CORPUS[i] for i in (0, 2, 3, 1)]
    entries = module.observe(question, np.array([4.0, 3.0, 1.0, 0.0]), paragraphs, vocabulary)
    wanted = {"words": 8, "unknown": 3 / 8, "has_or": 1, "has_who": 0}
    wanted |= {"yes_no": 1, "s1": 4, "s1_per_word": 0.5, "s2/s1": 0.75, "s20/s1": 0, "near": 1}
    wanted |= {"overlap1": 5 / 8, "overlap2": 5 / 8, "title": 1}
    wanted["spread"] = np.std([4, 3, 1] + [0] * 17) / 0.4
    assert {name: entries[name] for name in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_greedy_answers_are_the_likeliest_tokens_and_all_tokens_are_counted(rag, tmp_path, kind):
    module = rag(MAX_NEW_TOKENS=5)
    if kind == "t5":
        torch.manual_seed(5)
        sizes = {"vocab_size": 1522, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
        config = transformers.T5Config(**sizes, decoder_start_token_id=0)
        transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
        transformers.AutoTokenizer.from_pretrained(module.GENERATOR).save_pretrained(tmp_path)
        module.GENERATOR = str(tmp_path)
    generator = module.Generator()
    prompts = [generator.prompt("Where was Robert Merrow born?", CORPUS[:n])[0] for n in (1, 4, 2)]
    for prompt, (text, count) in zip(prompts, generator.answers(prompts, 0.0)):
        ids = generator.tokenizer(prompt, return_tensors="pt")["input_ids"]
        written = []
        while len(written) < 5 and written[-1:] != [1]:
            new = torch.tensor([written], dtype=torch.long)
            inputs = {"input_ids": torch.cat([ids, new], 1)}
            if kind == "t5":
                inputs = {"input_ids": ids, "decoder_input_ids": torch.nn.functional.pad(new, (1, 0))}
            written.append(int(generator.model(**inputs).logits[0, -1].argmax()))
        assert text == generator.tokenizer.decode(written, skip_special_tokens=True).strip()
        assert count == ids.shape[1] + sum(id != 0 for id in written)
    sampled = generator.answers(prompts * 9, 2.0)
    assert sampled == generator.answers(prompts * 9, 2.0)
    assert len(set(sampled)) > 3  # equal prompts have unlike samples


def test_a_prompt_has_the_most_paragraphs_that_fit_and_a_chat_template(rag, capsys):
    question = "Where was Robert Merrow born?"
    texts = [f"[{i}] {p['title']}: {p['text']}" for i, p in enumerate(CORPUS, 1)]
    prompts = [rag().PROMPT.format(contexts="\n".join(texts[:n]), question=question) for n in range(5)]
    for limit in (30, 45, 60, 75, 1000):
        generator = rag(MAX_PROMPT_TOKENS=limit).Generator()
        sizes = [len(generator.tokenizer(prompt)["input_ids"]) for prompt in prompts]
        count = max([n for n, size in enumerate(sizes) if size <= limit], default=0)
        assert generator.prompt(question, CORPUS) == (prompts[count], count)
    generator.tokenizer.chat_template = "<{{ messages[0].role }}>{{ messages[0].content }}<bot>"
    generator.is_chat = True
    assert generator.prompt(question, CORPUS) == (f"<user>{prompts[4]}<bot>", 4)
    rag(SAMPLE=20, MAX_PROMPT_TOKENS=40).RAGTrainer()
    assert "of 160 prompts lack paragraphs beyond 40 tokens" in capsys.readouterr().out


def test_a_cross_encoder_sorts_by_its_score_and_two_labels_are_refused(rag, tmp_path):
    module = rag(RERANKER=str(tmp_path / "ranker"))
    sizes = {"vocab_size": 1522, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, num_attention_heads=2, num_labels=1)
    torch.manual_seed(3)
    transformers.AutoTokenizer.from_pretrained(module.GENERATOR).save_pretrained(tmp_path / "ranker")
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "ranker")
    qa = module.QASystem(CORPUS)
    texts = list(map(module.paragraph_text, qa.ranked("Where was Mary born?", 1)))
    scores = qa.reranker.scores("Where was Mary born?", texts)
    assert scores.tolist() == sorted(scores, reverse=True) and len({*scores.tolist()}) == 4
    assert qa.reranker.scores("Where was Mary born?", texts[2:3])[0] == pytest.approx(scores[2], abs=1e-5)
    config.num_labels = 2  # what transformers takes if a model has no head
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "ranker")
    with pytest.raises(ValueError, match="must have one label"):
        module.QASystem(CORPUS)


def test_a_long_pair_is_cut_to_the_rerankers_positions(rag, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(rag().GENERATOR, model_max_length=10**30)
    sizes = {"vocab_size": 1522, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    for kind, positions, pad in (("Bert", 32, 0), ("Roberta", 34, 1)):  # RoBERTa's first position is pad + 1
        config = getattr(transformers, f"{kind}Config")(**sizes, num_attention_heads=2, num_labels=1)
        config.update({"max_position_embeddings": positions, "pad_token_id": pad, "initializer_range": 0.5})
        folder = str(tmp_path / kind)
        getattr(transformers, f"{kind}ForSequenceClassification")(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        ranker = rag(RERANKER=folder).CrossEncoder()
        texts = ["born in Rudholm " * n for n in (1, 10, 11, 40)]
        for text, score in zip(texts, ranker.scores("Where?", texts)):
            ids = ranker.tokenizer("Where?", text, return_tensors="pt")["input_ids"][:, :32]
            assert ranker.model(ids).logits.item() == pytest.approx(score.item(), abs=1e-5)


WORDS = """
What does vitamin A do? | Vitamin A | Vitamin D || Apollo 8? | Apollo 8 | Apollo 1 || who wrote it | It | Us
Who made C++? | C++ | C# || Who made C#? | C# | C++ || Straße? | STRASSE | Strand
Malm\u00f6? | Malmo\u0308 | Malmo || MALMO\u0308? | malm\u00f6 | malmo || メロスの友人 | 走れメロス | スロメ
挪威的首都是哪里 | 奥斯陆是挪威的首都 | 北京是中国的首都 || 猫 | 黑猫 | 犬
ＧＰＴとは | GPT模型 | 模型 || नॉर्वे की राजधानी | ओस्लो नॉर्वे | नाव के रोज || เมืองหลวงของไทย | ไทย | ยไท
"""  # a question | the title that it asks for | another title


@pytest.mark.parametrize("row", WORDS.strip().replace("\n", " || ").split(" || "))
def test_words_of_one_character_signs_and_all_scripts_are_found(rag, row):
    question, title, other = row.split(" | ")
    module = rag()
    module.Generator = SimpleNamespace
    qa = module.QASystem([{"title": x, "text": "."} for x in (other, title)])
    (first, *_), scores = qa.search(question, 2)
    assert first["title"] == title and scores[0] > scores[1]
    forms = [qa.observe(unicodedata.normalize(form, question)) for form in ("NFC", "NFD")]
    assert forms[0] == forms[1] and module.words_of("Oslo_1, (a)!") == ["oslo", "1", "a"]


def test_a_generators_own_penalties_and_beams_stay_out(rag, tmp_path):
    module = rag()
    prompts = ["QUESTION: Where was Robert Merrow born?"] * 9
    plain = module.Generator()
    shutil.copytree(module.GENERATOR, tmp_path / "reader")
    path = tmp_path / "reader/generation_config.json"
    own = {"repetition_penalty": 9.0, "num_beams": 4, "top_k": 1, "min_p": 0.9, "min_new_tokens": 9}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    module.GENERATOR = str(tmp_path / "reader")
    other = module.Generator()
    for temperature in (0.0, 2.0):
        assert other.answers(prompts, temperature) == plain.answers(prompts, temperature)


def test_another_model_in_the_same_folder_answers_anew(rag, tmp_path):
    shutil.copytree(rag().GENERATOR, tmp_path / "reader")
    path = tmp_path / "reader/tokenizer.json"
    module, times = rag(GENERATOR=str(tmp_path / "reader")), os.stat(path)
    qa = module.QASystem(CORPUS)
    before = module.system_digest(qa)
    others = [module.system_digest(module.QASystem(corpus)) for corpus in (CORPUS, CORPUS[1:])]
    assert others[0] == before != others[1]
    path.write_text(path.read_text().replace("Rudholm", "Rudhelm"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert before != module.system_digest(qa)


def test_only_missing_answers_are_made_and_half_a_line_is_made_again(fake, tmp_path):
    whole = fake()  # four blocks of 16 questions, four actions
    assert len(whole.qa.log) == 16
    (path,) = tmp_path.glob("cache/*")
    path.write_text(path.read_text()[:-200])
    again = fake()
    assert len(again.qa.log) == 1
    assert whole.table == again.table and whole.run.facts["data"] == again.run.facts["data"]
    assert fake(EM_WEIGHT=2.0).run.facts["data"] != whole.run.facts["data"]  # a resumed run says so
    assert fake(SPLIT_SEED=3).qa.log == fake(SEED=2).qa.log == []
    assert {prompts[0][-1] for prompts in fake(TOP_KS=(1, 2, 4)).qa.log} == {"4"}
    assert len(fake(PARAGRAPH="{text}").qa.log) == 16


@pytest.mark.parametrize("form", ["jsonl", "array", "csv", "parquet"])
def test_all_forms_of_a_folder_are_read_alike(rag, tmp_path, capsys, form):
    rows = [{"question": f"Who is {i}?", "answer": "007", "type": "", "gold": "Rudholm"} for i in range(20)]
    tables = {"corpus": [*CORPUS, CORPUS[0]], "questions": [*rows, {**rows[3], "question": " who IS  3"}]}
    for name, table in tables.items():
        if form == "array":
            (tmp_path / f"{name}.jsonl").write_text(json.dumps(table, indent=1))
        else:
            write(tmp_path / f"{name}.{form}", table)
    questions, corpus = rag(DATASET=str(tmp_path), SAMPLE=None).load_questions()
    assert corpus == CORPUS and len(questions) == 20
    assert {q["answer"] for q in questions} == {"007"} and questions[0]["gold"] == ["Rudholm"]
    assert Counter(q["split"] for q in questions) == {"test": 5, "validation": 2, "train": 13}
    assert capsys.readouterr().out.count("WARNING: 1 questions stand there twice") == 1


ANSWERS = [  # a gold answer in the file, and as it is read
    *((5, "5"), (5.0, "5"), (-2.5, "-2.5"), ("5.0", "5.0"), (["x", 7.0, None], ["x", "7"])),
    *(([3], "3"), ("[1, 2)", "[1, 2)"), ("Malmo\u0308", "Malm\u00f6")),
]


def test_numbers_lists_and_marks_are_read_as_the_texts_that_they_are(rag, tmp_path, capsys):
    corpus = [{"title": 1984, "text": "a novel"}, {"title": "Malmo\u0308", "text": ["a town", "a port"]}]
    golds = itertools.cycle([1984, [1984.0], "Malm\u00f6"])
    rows = [{"question": f"q{i:02}", "answer": a[0], "gold": next(golds)} for i, a in enumerate(ANSWERS * 2)]
    (tmp_path / "corpus.jsonl").write_text(json.dumps(corpus))
    (tmp_path / "questions.jsonl").write_text(json.dumps(rows))
    module = rag(DATASET=str(tmp_path), SAMPLE=None)
    questions, corpus = module.load_questions()
    assert [q["answer"] for q in questions] == [wanted for _, wanted in ANSWERS * 2]
    titles = [row["title"] for row in corpus]
    assert all(module.fraction_found(q["gold"], titles) == 1 for q in questions)
    assert corpus[1]["text"] == "a town a port" and "WARNING" not in capsys.readouterr().out
    (tmp_path / "questions.jsonl").unlink()
    lines = [f'q{i},"[""x"", 7]","[1984, ""Oslo""]"\n' for i in range(8)]
    (tmp_path / "questions.csv").write_text("question,answer,gold\n" + "".join(lines))
    questions, _ = module.load_questions()
    assert questions[0]["answer"] == ["x", "7"] and questions[0]["gold"] == ["1984", "Oslo"]
    assert "8 gold titles are not in the corpus, such as 'Oslo'" in capsys.readouterr().out


GOLDS = [(["5", "-5"], ["-5", "5"]), (["3.5", "35"], ["3.5", "35"]), (["C#", "C++"], ["c#", "c++"])]
GOLDS += [(["A"], ["", "a"]), (["+"], ["", "+"])]
GOLDS += [(["The Beatles", "Beatles.", "U.S.", "US", "1,234", "1234"], None)]


@pytest.mark.parametrize("golds, example", GOLDS)
def test_golds_that_em_and_f1_take_for_the_same_are_said(rag, tmp_path, capsys, golds, example):
    texts = ["7 + 3", "7 - 3", "-7 + 3", "C++", "C#", "C", "A+", "A-", "x\u00b2", "x2"]  # ten questions
    write(tmp_path / "questions.jsonl", [{"question": f"{x}?", "answer": golds} for x in texts])
    write(tmp_path / "corpus.jsonl", CORPUS)
    for is_strict in (False, True):
        questions, _ = rag(DATASET=str(tmp_path), SAMPLE=None, STRICT=is_strict).load_questions()
        said = capsys.readouterr().out
        assert len(questions) == 10 and ("EM and F1" in said) == (example is not None and not is_strict)
        assert is_strict or example is None or f"such as {example}" in said


def test_a_list_has_several_right_answers_and_gold_may_be_missing(rag, tmp_path):
    rows = [{"question": f"Was Robert Merrow born, {i}?", "answer": ["Rudholm", "1815"]} for i in range(15)]
    write(tmp_path / "corpus.jsonl", CORPUS)
    write(tmp_path / "questions.parquet", rows)
    trainer = rag(DATASET=str(tmp_path)).RAGTrainer()
    assert trainer.questions[0]["answer"] == ["Rudholm", "1815"] and "recall" not in trainer.metrics
    trainer.train()
    assert all(record["recall"] is None for record in read(tmp_path / "run/table.jsonl"))


def test_hotpotqas_file_and_texts_become_a_folder(tmp_path):
    spec = importlib.util.spec_from_file_location("make_corpus", ROOT / "data/make_corpus.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    record = {"question": "Who?", "answer": "yes", "type": "bridge", "level": "easy"}
    record |= {"context": [["A", ["One.", " Two."]], ["B", ["Three."]]]}
    record |= {"supporting_facts": [["B", 0], ["A", 1], ["B", 1], ["elsewhere", 0]]}
    (tmp_path / "hotpot.json").write_text(json.dumps([record, record]))
    maker.main(str(tmp_path / "hotpot.json"), str(tmp_path / "made"))
    question = {"question": "Who?", "answer": "yes", "type": "bridge", "gold": ["A", "B"]}
    paragraphs = [{"title": "A", "text": "One. Two."}, {"title": "B", "text": "Three."}]
    assert read(tmp_path / "made/questions.jsonl") == [question] * 2
    assert read(tmp_path / "made/corpus.jsonl") == paragraphs
    record["context"] = {"title": ["A", "B"], "sentences": [["One.", " Two."], ["Three."]]}  # as on the hub
    record["supporting_facts"] = {"title": ["B", "A"], "sent_id": [0, 1]}
    assert maker.from_hotpot([record]) == ([question], paragraphs)
    (tmp_path / "rules.md").write_text("We open at nine.\n\n# Fines\n\nTen cents\na day.\n \n\nNo more.")
    wanted = [("rules", "We open at nine."), ("Fines", "Ten cents\na day."), ("Fines", "No more.")]
    assert [(p["title"], p["text"]) for p in maker.read_texts(tmp_path)] == wanted
    (tmp_path / "old.txt").write_bytes("Malmö".encode("latin-1"))
    with pytest.raises(SystemExit, match="old.txt is not in UTF-8"):
        maker.read_texts(tmp_path)


GOOD = {"corpus.csv": "title,text\na,b\n", "questions.csv": "question,answer\nq,a\n"}
LONG = "question,answer\n" + "".join(f"{n}{' who' * 11 * n},a\n" for n in range(10))
ERRORS = [
    ({"corpus.csv": "title,text\na,b,c\n"}, "DATA", "corpus.csv: record 1: this is no object, or has too"),
    ({"questions.csv": "question,reply\nq,a\n"}, "DATA", "questions.csv: record 1: no answer in"),
    ({"questions.csv": "question,answer\nq,a\nq,nan\n"}, "DATA", "questions.csv: record 2: no answer in"),
    ({"questions.csv": "question,answer\nq,['a']\n"}, "DATA", "record 1: a cell with [ is a JSON list"),
    ({"corpus.csv": 'title,text\na,"b\n'}, "DATA", "corpus.csv: record 1: unexpected end of data"),
    ({"corpus.jsonl": "{}"}, "DATA", "needs one of corpus.jsonl, corpus.csv, corpus.parquet"),
    ({}, "DATA", "has 1 questions and 1 paragraphs: that is too few"),
    ({"questions.csv": LONG}, "MAX_PROMPT_TOKENS=99 DATA", "tokens, more than 99, the limit of"),
    ({}, "GENERATOR=/nowhere/model", "/nowhere/model"),
    ({}, "TOP_KS=(5,10)", "FIXED_ACTION is None or one of the actions"),
    ({}, "TEMPERATURES=(-1.0,)", "TEMPERATURES are 0 or above"),
    ({}, "RERANKER=None", "RERANKS are 0 and, with a RERANKER, 1"),
    ({}, "DTYPE=float16", "DTYPE is float32 or bfloat16"),
]
LINES = [
    ("[1, 2]\n[3]\n", "record 1: Extra data"),
    ("\n{}\n[1]\n", "record 1: no question in"),
    ('[{"question": "q", "answer": "a"}, ["q", "a"]]', "record 2: this is no object"),
    ('{"question": "q", "answer": {"text": ["a"]}}', "is no text or number"),
    ("", "has 0 questions"),
]
ERRORS += [({"questions.csv": None, "questions.jsonl": text}, "DATA", says) for text, says in LINES]


@pytest.mark.parametrize("files, word, says", ERRORS)
def test_a_users_error_is_one_line(tmp_path, refusal, files, word, says):
    for name, text in (GOOD | files).items():
        if text is not None:
            (tmp_path / name).write_text(text)
    words = word.replace("DATA", f"DATASET={tmp_path}").split()
    assert says in refusal(PATH, f"OUTPUT_DIR={tmp_path}/run", f"CACHE_DIR={tmp_path}/cache", *words)
    assert not list(tmp_path.glob("cache/*"))  # before anything is answered


def test_a_signal_ends_the_run_after_its_step_and_saves(rag, tmp_path):
    trainer = rag().RAGTrainer()
    trainer.rollout = lambda: os.kill(os.getpid(), signal.SIGTERM) or type(trainer).rollout(trainer)
    trainer.train()
    assert (tmp_path / "run/step_1").exists() and not (tmp_path / "run/test.json").exists()


def test_an_earlier_run_is_moved_aside(rag, tmp_path):
    rag(MAX_STEPS=0, draws=True).RAGTrainer().train()  # the table alone
    rag(RESUME="yes").RAGTrainer().train()
    notes = tmp_path / "run/notes.txt"
    notes.write_text("mine")
    samples = (tmp_path / "run/logs/samples.jsonl").read_bytes()
    rag().RAGTrainer().train()
    (old,) = tmp_path.glob("run_old_*")
    assert (old / "logs/samples.jsonl").read_bytes() == samples and (old / "step_6").exists()
    assert (tmp_path / "run/logs/samples.jsonl").read_bytes() == samples and notes.exists()
    with pytest.raises(ValueError, match="was trained with other actions"):
        rag(RESUME="yes", TOP_KS=(2, 3)).RAGTrainer()


def test_a_kill_after_the_last_checkpoint_leaves_nothing_undone(fake, tmp_path):
    """Not an old checkpoint, nor a half of one, and not the plots. A folder without its state is written."""
    run, drawn = tmp_path / "run", []
    fake(KEEP_LAST_N_CHECKPOINTS=1).train()
    shutil.copytree(run / "step_6", run / "step_4")
    (run / "step_2.tmp/policy").mkdir(parents=True)
    trainer = fake(KEEP_LAST_N_CHECKPOINTS=1, RESUME="yes")
    trainer.module.draw_grid = lambda folder, name, *rest: drawn.append(name)
    trainer.train()
    assert [path.name for path in run.glob("step_*")] == ["step_6"] and len(drawn) == 2
    (run / "step_4").mkdir()
    fake().train()
    assert [path.name for path in trainer.module.list_checkpoints(run)] == ["step_2", "step_4", "step_6"]


def test_a_kill_while_an_earlier_run_is_moved_aside_leaves_nothing_of_it_in_the_next(
    fake, tmp_path, monkeypatch
):
    fake().train()
    move, paths = shutil.move, []

    def move_seven(*names):
        paths.append(names)
        if len(paths) == 8:
            raise KeyboardInterrupt
        move(*names)

    trainer = fake()
    monkeypatch.setattr(shutil, "move", move_seven)
    with pytest.raises(KeyboardInterrupt):
        trainer.run.move_old_files(trainer.state, tmp_path / "old_1")
    trainer.run.move_old_files(trainer.state, tmp_path / "old_2")
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
