"""data/make_codes.py: a plain log becomes what grpo/grpo_rec.py trains on."""

import json
import random
from collections import Counter

import numpy as np
import pytest
from conftest import ROOT, load, write_csv
from program import Program

HEAD = "user,item,timestamp,title"
THINGS = [f"{color} {name}" for color in ("red", "green", "blue") for name in "hammer saw drill lamp".split()]


@pytest.fixture
def codes():
    return load("data/make_codes.py")


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


def test_alike_vectors_share_codes_and_no_two_items_share_all(codes):
    codes.CODES, codes.LEVELS = 2, 1
    vectors = np.array([[1.0, 0], [0, 1], [1, 0], [1, 0]])
    paths = list(codes.make_codes(list("abcd"), vectors, Counter("ddc")).values())
    assert paths[0][0] == paths[2][0] == paths[3][0] != paths[1][0]
    assert [path[1] for path in paths] == ["<b_2>", "<b_0>", "<b_1>", "<b_0>"]  # d was bought most


def test_one_csv_file_is_enough_from_any_folder(tmp_path):
    draw = random.Random(0)
    rows = []
    for user in sorted(draw.choices(range(30), k=180)):
        day = f"2024-{draw.randrange(1, 13):02}-{draw.randrange(1, 29):02}"
        item = draw.randrange(len(THINGS))
        rows.append((f"u{user}", f"SKU-{item}", day, THINGS[item], "other"))
    write_csv(tmp_path / "log.csv", f"{HEAD},price", rows)
    for program, *words in (
        ("data/make_codes.py", "mine", "LOG=log.csv"),
        ("data/rec_baselines.py", "@mine/words.txt"),
        ("grpo/grpo_rec.py", "@mine/words.txt", "SFT_EPOCHS=1", "MAX_STEPS=1"),
    ):
        done = Program(ROOT / program, *words, cwd=tmp_path).wait()
        assert done.returncode == 0, done.stderr
    table = json.loads((tmp_path / "mine/run/eval_test.json").read_text())
    assert {"counts", "sasrec", "sft", "grpo"} <= table.keys()
    index = json.loads((tmp_path / "mine/index.json").read_text())
    lines = (tmp_path / "mine/items.txt").read_text().splitlines()
    wanted = [["".join(codes), THINGS[int(item[4:])], item] for item, codes in index.items()]
    assert [line.split("\t") for line in lines] == wanted


def test_what_is_left_out_is_counted(codes, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    taken = [("u", day) for day in range(4)] + [("v", 1), ("v", 2)]
    rows = [(user, THINGS[day], day, THINGS[day]) for user, day in taken]
    write_csv("log.csv", HEAD, [*rows, *rows])
    codes.main(["mine", "SPLIT=last"])
    said = capsys.readouterr().out
    assert "6 of 12 lines repeat" in said and "1 of 2 users are asked for in the test" in said
    assert len((tmp_path / "mine/test.csv").read_text().splitlines()) == 2


BAD = {
    "another column": (("u", "i", 1, "t"), ["TIME=day"], "one column 'day'; it has ['user', 'item'"),
    "an empty cell": (("u", "", 1, "t"), [], "line 2: a cell is empty"),
    "a comma without quotes": (("u", "i", 1, "t", "x"), [], "line 2: a cell is empty, or a text with commas"),
    "a time": (("u", "i", "noon", "t"), [], "line 2: timestamp 'noon' cannot be read"),
    "one user": (("u", "i", 1, "t"), [], "give rows 0 for train"),
    "seconds and milliseconds": (
        [("u", "i", 1.7e9, "t"), ("v", "i", 1.7e12, "t")],
        [],
        "line 2 has timestamp 1700000000.0, line 3 has timestamp 1700000000000.0: times of different units",
    ),
    "seconds and dates": ([("u", "i", 1.7e9, "t"), ("u", "i", "2024-03-01", "t")], [], "of different units"),
    "a time that is missing": ([("u", "i", 1.7e9, "t"), ("u", "i", 0, "t")], [], "of different units"),
    "a count below 0": (("u", "i", 1, "t"), ["LONGEST=-1"], "counts are not negative"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(codes, tmp_path, monkeypatch, name):
    rows, words, message = BAD[name]
    monkeypatch.chdir(tmp_path)
    write_csv("log.csv", HEAD, rows if isinstance(rows, list) else [rows])
    with pytest.raises(codes.UserError) as error:
        codes.main(["mine", *words])
    assert message in str(error.value) and "\n" not in str(error.value)
