"""data/make_codes.py: a plain log and titles become what grpo/grpo_rec.py trains on."""

import csv
import itertools
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from old import ROOT, load_script

pytestmark = pytest.mark.usefixtures("no_pictures")
CONSTANTS = """LOG TITLES USER ITEM TIME TITLE SPLIT VALID_SHARE TEST_SHARE LONGEST STRIDE MAX_HISTORY
    HISTORY_SHARE LEVELS CODES MODEL WIDTH SEED""".split()
WORDS = "red blue green iron steel wooden".split()
THINGS = "hammer saw drill lamp".split()


@pytest.fixture
def codes(tmp_path, monkeypatch):
    """The program, in a folder of its own with a log and titles; its constants come back."""
    monkeypatch.syspath_prepend(ROOT / "data")
    import make_codes

    for name in CONSTANTS:
        monkeypatch.setattr(make_codes, name, getattr(make_codes, name))
    monkeypatch.chdir(tmp_path)
    write("titles.csv", "item,title", [(f"i{n}", f"{WORDS[n % 6]} {THINGS[n // 6]}") for n in range(24)])
    chance = np.random.default_rng(0)
    rows = [
        (f"u{n}", f"i{chance.integers(24)}", 1000 * chance.integers(9) + n)
        for n in range(30)
        for _ in range(1 + n % 12)
    ]
    write("log.csv", "user,item,time", rows)
    return make_codes


def write(path, head, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([head.split(","), *rows])


EVENTS = {  # by time, as read_log() gives them
    "u": [(1, "a"), (2, "b"), (2, "c"), (6, "d"), (8, "e"), (9, "f")],
    "v": [(3, "a"), (4, "b"), (7, "a")],
    "w": [(5, "c")],
}


def test_the_split_by_time_asks_for_what_is_later_than_all_that_is_trained_on(codes):
    codes.VALID_SHARE, codes.TEST_SHARE, codes.STRIDE = 0.2, 0.3, 2
    rows, *_ = codes.split_rows(EVENTS)  # of ten the test has those from 7 on, validation 5 and 6
    assert rows == {
        "train": [("u", ["a", "b", "c"]), ("v", ["a", "b"])],
        "valid": [("u", list("abcd"))],
        "test": [("u", list("abcde")), ("u", list("abcdef")), ("v", list("aba"))],
    }


def test_the_split_by_users_asks_for_the_last_and_the_one_before(codes):
    codes.SPLIT = "last"
    codes.STRIDE = 2
    rows, *_ = codes.split_rows({**EVENTS, "x": [(1, "a"), (2, "b")]})
    assert rows == {
        "train": [("u", ["a", "b"]), ("u", list("abcd")), ("x", ["a", "b"])],
        "valid": [("u", list("abcde")), ("v", ["a", "b"])],
        "test": [("u", list("abcdef")), ("v", list("aba"))],
    }


def test_max_history_is_chosen_from_the_log_and_training_rows_end_that_many_items_apart(codes):
    """Users' lengths are such that validation asks after 39 items, and after 0 to 7 where most are short."""
    codes.SPLIT = "last"

    def log_of(lengths):
        return {f"u{n}": [(i, f"i{i % 9}") for i in range(length)] for n, length in enumerate(lengths)}

    rows, longest, _ = codes.split_rows(
        log_of([41, 41, 41, 300])
    )  # validation: 39, 39, 39 and 298 items before it
    assert longest == 39
    assert [len(items) for user, items in rows["train"] if user == "u3"] == [*range(298 % 39, 299, 39)]
    assert codes.split_rows(log_of([41, 41, 300, 300]))[1] == 50
    assert codes.split_rows(log_of([9, 9, 9, 300]))[1] == 10
    codes.HISTORY_SHARE = 1.0
    assert codes.split_rows(log_of([41, 41, 41, 47]))[1] == 45
    codes.MAX_HISTORY, codes.STRIDE = 20, 7
    rows, longest, _ = codes.split_rows(log_of([41]))
    assert longest == 20 and [len(items) for _, items in rows["train"]] == [4, 11, 18, 25, 32, 39]


def test_a_users_interactions_are_ordered_by_time_and_equal_times_as_in_the_log(codes):
    dates = ["2024-03-02", "2024-03-01T23:59:59", "2024-03-02T00:00:00+00:00", "2024-03-01T23:59:58Z"]
    write("log.csv", "time,who,user,item", [(dates[n], "-", "u", f"i{3 - n}") for n in range(4)])
    titles = {f"i{n}": "" for n in range(4)}
    assert [item for _, item in codes.read_log(titles)["u"]] == ["i0", "i2", "i3", "i1"]
    codes.LONGEST = 2
    assert [item for _, item in codes.read_log(titles)["u"]] == ["i3", "i1"]


def test_k_means_finds_groups_and_their_means(codes):
    chance = np.random.default_rng(0)
    middles = np.array([[0, 0], [9, 0], [0, 9], [9, 9]])
    wanted = chance.integers(4, size=80)
    vectors = middles[wanted] + 0.1 * chance.standard_normal((80, 2))
    group, centres = codes.k_means(vectors, 4, np.random.default_rng(1))
    assert len(set(zip(group, wanted))) == 4
    for n in range(4):
        assert np.allclose(centres[n], vectors[group == n].mean(0))
    group, centres = codes.k_means(np.repeat(middles, 3, 0), 9, np.random.default_rng(1))
    assert len(centres) == 4  # there are no more that differ


def test_each_level_cuts_what_the_one_before_left_and_the_last_is_by_what_was_bought(codes):
    codes.CODES, codes.LEVELS = 2, 2
    far, near = np.array([10.0, 0.0]), np.array([0.0, 1.0])
    vectors = np.array([far + near, far - near, -far + near, -far - near, far + near, far + near])
    found = codes.make_codes(list("abcdef"), vectors, Counter("eeffba"))
    assert [[code[:3] for code in some] for some in found.values()] == [["<a_", "<b_", "<c_"]] * 6
    first, second, third = ([some[n][3:-1] for some in found.values()] for n in range(3))
    assert first[0] == first[1] == first[4] == first[5] != first[2] == first[3]
    assert second[0] == second[2] == second[4] == second[5] != second[1] == second[3]  # not within the first
    assert third == ["2", "0", "0", "0", "0", "1"]
    found = codes.make_codes(list("abcd"), vectors[:4], Counter())
    assert {len(some) for some in found.values()} == {2}  # no two are the same


def test_titles_of_the_same_words_are_near(codes):
    vectors = codes.tfidf_vectors(["Steel hammer, 16 oz", "steel hammers 20oz", "Desk lamp", "desk lamps"])
    near = vectors @ vectors.T
    assert near[0, 1] > 3 * abs(near[0, 2:]).max() and near[2, 3] > 3 * abs(near[2, :2]).max()


def test_a_models_vectors_are_the_means_of_a_titles_own_last_hidden_states(codes):
    codes.MODEL = str(ROOT / "data/tiny/policy")
    texts = ["7", "What is 3 + 4 * 5 ?"]  # the first is padded beside the second
    found = codes.model_vectors(texts)
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = (some.from_pretrained(codes.MODEL) for some in (AutoTokenizer, AutoModel))
    for text, vector in zip(texts, found):
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        assert np.allclose(vector, hidden.mean(0).numpy(), atol=1e-5)


def test_what_it_writes_is_trained_on_whole_and_tested_on_what_is_later(codes, tmp_path, capsys):
    codes.main(["mine", "STRIDE=3", "CODES=3", "LEVELS=1"])
    said = capsys.readouterr().out
    assert "24 items" in said and f"STAGE=sft @{tmp_path}/mine/words.txt" in said
    before = {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    codes.main(["mine"])
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    small = {"SFT_EPOCHS": 1, "HIDDEN_SIZE": 8, "LAYERS": 1, "MAX_HISTORY": 3, "EVAL_BEAMS": 20}
    module = load_script("grpo/grpo_rec.py", STAGE="sft", **small)
    module.apply_overrides([f"@{tmp_path}/mine/words.txt"])
    assert module.MAX_HISTORY == 10, "the words say so"
    trainer = module.RecTrainer()
    names = trainer.catalogue.items
    assert len(names) == 24 == len(set(trainer.catalogue.codes))
    trained, *asked = (
        [(row["user"], names[row["history"][-1]], names[row["target"]]) for row in some]
        for some in (trainer.train_rows, trainer.valid_rows, trainer.test_rows)
    )
    wanted = Counter()
    events = codes.read_log(dict.fromkeys(names, "title"))
    times = sorted(seconds for some in events.values() for seconds, _ in some)
    valid, test = (times[int(share * len(times))] for share in (0.8, 0.9))
    later = {"valid": 0, "test": 0}
    bought = Counter()
    for user, some in events.items():
        bought.update([item for seconds, item in some if seconds < valid])
        for (_, last), (seconds, item) in itertools.pairwise(some):
            wanted[user, last, item] += seconds < valid
            later["test" if seconds >= test else "valid"] += seconds >= valid
    assert Counter(trained) == Counter({key: count for key, count in wanted.items() if count})
    assert {"valid": len(asked[0]), "test": len(asked[1])} == later
    places = {item: (some[0], int(some[1][3:-1])) for item, some in zip(names, trainer.catalogue.codes)}
    for one, other in itertools.permutations(places, 2):
        if places[one][0] == places[other][0] and bought[one] > bought[other] + 3:
            assert places[one][1] < places[other][1]
    trainer.train()
    found = trainer.recommend(["i3", "i7"], 2)
    with torch.no_grad():
        for parameter in trainer.actor.parameters():
            parameter.zero_()
    assert trainer.recommend(["i3", "i7"], 2) == found  # by best/
    assert found[0]["title"].split()[0] in WORDS


BAD = [
    (
        "log.csv",
        "user,item\nu,i1\n",
        [],
        "LOG = 'log.csv': it needs one column 'time'; it has ['user', 'item",
    ),
    ("log.csv", "", [], "LOG = 'log.csv': it needs one column 'user'; it has None"),
    ("log.csv", "user,item,time\n", [], "LOG = 'log.csv': it has no line below its columns"),
    ("log.csv", "user,item,time\nu,x9,1\n", [], "line 2: item 'x9' has no title in titles.csv: add it"),
    ("log.csv", "user,item,time\nu,i1,noon\n", [], "line 2: time 'noon' cannot be read: it takes a number"),
    ("log.csv", "user,item,time\nu,i1,nan\n", [], "line 2: time 'nan' cannot be read"),
    ("log.csv", "user,item,time\nu,i1,1\nu,i2,2024-03-01\n", [], "line 3: time '2024-03-01': dates"),
    ("log.csv", "user,item,time\nu,,1\n", [], "LOG = 'log.csv' line 2: item is empty"),
    ("log.csv", "user,item,time\nu,i1\n", [], "LOG = 'log.csv' line 2: time is empty"),
    ("log.csv", "user,item,time\nu,i1,1\nu,i2,2\n", [], "2 interactions of 1 users give rows 0 for"),
    ("log.csv", "user,item,time\nu,i1,1\nu,i2,2\n", ["SPLIT=last"], "users of three interactions or more"),
    ("log.csv", b"user,item,time\n\xff\xfe,i1,1\n", [], "LOG = 'log.csv': 'utf-8' codec can't decode"),
    ("titles.csv", "item,name\ni1,x\n", [], "TITLES = 'titles.csv': it needs one column 'title'"),
    ("titles.csv", "item,title\ni1,\n", [], "TITLES = 'titles.csv' line 2: title is empty"),
    ("titles.csv", "item,title\ni1,a, b\n", [], "line 2: it has more than 2 fields, the number of columns"),
    ("titles.csv", "item,title\ni1\n", [], "line 2: title is empty"),
    ("titles.csv", "item,title,title\ni1,a,b\n", [], "it needs one column 'title'"),
    ("titles.csv", "item,title\ni1,a\ni2,b\ni1,c\n", [], "line 4: item 'i1' has two titles: delete one"),
    ("log.csv", 'user,item,time\nu,i1,1\n"u,i2,2\n', [], "LOG = 'log.csv': unexpected end of data"),
    ("mine/train.csv", "x", ["LOG=mine/train.csv"], "train.csv' would be overwritten: name another folder"),
    ("other.csv", "", ["STRIDE=60"], "STRIDE = 60 is above MAX_HISTORY = 10"),
    ("titles.csv", 'item,title\ni1,"x' + 140000 * "y", [], "TITLES = 'titles.csv': field larger than"),
    ("other.csv", "", ["LOG=nowhere.csv"], "LOG = 'nowhere.csv': [Errno 2] No such file"),
    ("other.csv", "", ["MODEL=nowhere/at/all"], "MODEL = 'nowhere/at/all' gives no vectors of titles"),
    ("other.csv", "", ["LOGS=log.csv"], "'LOGS=log.csv' is not KEY=VALUE with a constant of this file; did "),
    ("other.csv", "", ["LOG_FILE=log.csv"], "did you mean LOG?"),
    ("other.csv", "", ["QQ=2"], "constant of this file: LOG, TITLES, USER, ITEM, TIME, TITLE, SPLIT, "),
    ("other.csv", "", ["UTC=1"], "'UTC=1' is not KEY=VALUE with a constant"),
    ("other.csv", "", ["CODES=many"], "CODES=many: CODES takes a number"),
    ("other.csv", "", ["SPLIT=users"], "SPLIT = 'users': it takes time or last"),
    ("other.csv", "", ["TEST_SHARE=0.95"], "must be above 0, their sum below 1"),
    ("other.csv", "", ["LEVELS=0"], "LEVELS is 1 to 11"),
    ("other.csv", "", ["STRIDE=20", "MAX_HISTORY=9"], "STRIDE = 20 is above MAX_HISTORY = 9"),
    ("other.csv", "", ["HISTORY_SHARE=0"], "HISTORY_SHARE = 0.0 must be above 0"),
]


@pytest.mark.parametrize("file, text, words, sentence", BAD, ids=range(len(BAD)))
def test_bad_input_is_one_sentence(codes, tmp_path, monkeypatch, file, text, words, sentence):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(codes.UserError) as error:
        codes.main(["mine", *words])
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_a_file_in_place_of_the_folder_is_refused(codes, tmp_path):
    (tmp_path / "given.csv").write_text("x")
    with pytest.raises(codes.UserError, match="the folder to write, and .*given.csv is a file"):
        codes.main(["given.csv"])


def test_the_program_ends_with_2_and_a_sentence(tmp_path):
    command = [sys.executable, ROOT / "data/make_codes.py", "LOG=log.csv"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "the first word is the folder to write" in done.stderr
