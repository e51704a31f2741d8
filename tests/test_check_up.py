"""tools/check_up.py: its figures by hand and as the trainers have them, its verdict, its files."""

import csv
import json
import math
import random
import re
from types import SimpleNamespace

import pandas
import pytest
from conftest import load

tool = load("tools/check_up.py")
GREEDY = {"source": ("greedy",), "temperature": (None,)}


def candidate(hard, soft=0.0, gt_prob=0.0, source=("sample",), temperature=(1.0,), **more):
    marks = {"hard": hard, "soft": soft, "gt_prob": gt_prob, "logprob": -1.0, "eval_failed": False}
    return {**marks, "source": list(source), "temperature": list(temperature), **more}


def table(groups):
    rows = []
    for number, group in enumerate(groups):
        rows += [{"prompt_id": number, **c} for c in group]
    return tool.complete(pandas.DataFrame(rows))


HAND_MADE = [
    [
        candidate(1, 0.9, 0.8, ["greedy", "sample"], [None, 1.0]),
        candidate(0, 0.5, 0.1),
        candidate(0, 0.2, 0.0, ["beam"], [None]),
    ],
    [
        candidate(0, 0.6, 0.3, **GREEDY),
        candidate(1, 1.0, 0.9, ["sample", "sample"], [0.5, 1.0]),
        candidate(None, None, None, eval_failed=True),
    ],
    [
        candidate(0, 0.1, 0.0, **GREEDY),
        candidate(0, 0.4, 0.2, ["beam"], [None]),
        candidate(None, None, 0.05),
    ],
]


def drawn(count=40):
    """Groups of candidates with all that a reward may be made of, of both trainers."""
    draw = random.Random(0)
    groups = []
    for _ in range(count):
        group = [candidate(int(draw.random() < 0.3)) for _ in range(5)]
        for c in group:
            c.update({key: draw.random() for key in ("soft", "gt_prob", "logprob")})
        groups.append(group)
    return groups


def test_figures_of_a_hand_made_table():
    figures = tool.check_up(table(HAND_MADE), "hard_only")
    wanted = {
        "prompts": 3,
        "candidates": 9,
        "verified": 7,
        "failed": 1,
        "positive rate": 2 / 7,
        "positive rate, greedy": 1 / 3,
        "positive rate, beam": 0.0,
        "positive rate, sample at 1": 2 / 3,
        "positive rate, sample at 0.5": 1.0,
        "positives per prompt": 2 / 3,
        "prompts without a positive": 1 / 3,
        "prompts of equal rewards": 1 / 3,
        # ranks of soft .9 .5 .2 .6 1. .1 .4: 6 4 2 5 7 1 3, of hard 1 0 0 0 1 0 0: 6.5 3 3 3 6.5 3 3
        "Spearman of soft with hard": 17.5 / math.sqrt(28 * 17.5),
        # gt_prob .8 .1 0 .3 .9 0 .2: ranks 6 3 1.5 5 7 1.5 4
        "Spearman of gt_prob with hard": 17.5 / math.sqrt(27.5 * 17.5),
        # ranks 6 3 1.5 5 7 1.5 4 with 6 4 2 5 7 1 3
        "Spearman of gt_prob with soft": 26.5 / math.sqrt(27.5 * 28),
        "accuracy of the policy's pick": 1 / 3,
        "accuracy of the best candidate": 2 / 3,
        "best reward above the pick's, mean": 1 / 3,
    }
    assert figures == pytest.approx(wanted)
    assert tool.find_verdict(figures, "hard_only").startswith("fix the reward: scoring failed for 12% of")
    soft = tool.check_up(table(HAND_MADE), "hard_plus_soft")
    assert soft["prompts of equal rewards"] == 0
    assert soft["best reward above the pick's, mean"] == pytest.approx((0 + (2.0 - 0.6) + 0.3) / 3)


@pytest.mark.parametrize("path", ["rce/rce.py", "rce/rce_icl.py"])
def test_its_rewards_are_the_trainers(path):
    trainer = load(path)
    groups = drawn()
    for mode in trainer.reward_modes:
        trainer.REWARD_MODE = mode
        found = tool.shaped_rewards(table(groups), mode).tolist()
        wanted = []
        for group in groups:
            candidates = [SimpleNamespace(**candidate) for candidate in group]
            wanted += trainer.shaped_rewards(candidates).tolist()
        assert found == pytest.approx(wanted)


RIGHT_PICK = [candidate(1, **GREEDY), candidate(0)]
WRONG_PICK = [candidate(0, **GREEDY), candidate(1)]
ALL_WRONG = [candidate(0, **GREEDY), candidate(0)]


@pytest.mark.parametrize(
    "groups, says",
    [
        ([RIGHT_PICK, RIGHT_PICK, WRONG_PICK], "train: the best candidate is right for 100%"),
        ([ALL_WRONG, ALL_WRONG, WRONG_PICK], "mine more: 67% of the prompts have no right candidate"),
        ([RIGHT_PICK, ALL_WRONG], "mine more: the candidates are hardly"),
        ([RIGHT_PICK], "mine harder prompts: the policy's own pick is right for 100% of these"),
        ([[candidate(1), candidate(1)]] * 3 + [WRONG_PICK], "fix the reward: 75% of the prompts have equal"),
        ([[candidate(0, 0.9), candidate(1, 0.1)]], "fix the reward: soft hardly goes with being right"),
    ],
)
def test_the_verdict_names_what_to_do(groups, says):
    mode = "hard_plus_soft" if "soft" in says else "hard_only"
    assert tool.find_verdict(tool.check_up(table(groups), mode), mode).startswith(says)


def test_a_run_is_checked_by_its_newest_candidates_and_its_own_constants(tmp_path, capsys):
    (tmp_path / "training_config.json").write_text('{"constants": {"REWARD_MODE": "soft_only"}}')
    for number, count in ((2, 9), (10, 8)):
        table(drawn(count)).to_parquet(tmp_path / f"candidates_round_{number}.parquet")
    tool.main(str(tmp_path))
    printed = capsys.readouterr().out
    saved = dict(csv.reader(open(tmp_path / "candidates_round_10.csv")))
    assert "candidates_round_10.parquet, REWARD_MODE = soft_only" in printed and saved["prompts"] == "8"
    assert f"Verdict: {saved['verdict']}" in printed
    assert (tmp_path / "candidates_round_10.png").read_bytes()[:4] == b"\x89PNG"


def write_lists(path, groups):
    path.write_text("".join(json.dumps({"id": "7", "lists": lists}) + "\n" for lists in groups))


def test_lists_of_rce_icl_are_read_and_a_reward_can_be_given(tmp_path, capsys):
    icl = load("rce/rce_icl.py")
    lists = []
    for n in range(4):
        scores = icl.score_answer("ab"[n % 2], ["a"])
        lists.append(vars(icl.DemoList([n], ["alone"], [None], gt_prob=0.1 * n, **scores)))
    groups = [lists] * 3
    write_lists(tmp_path / "candidates.jsonl", groups)
    with open(tmp_path / "candidates.jsonl", "a") as file:
        file.write('{"id": "8", "lists": [{"sho')  # the run goes on
    (tmp_path / "training_config.json").write_text('{"constants": {"REWARD_MODE": "soft_only"}}')
    tool.main(str(tmp_path), "REWARD_MODE=hard_plus_gtprob")
    figures = dict(csv.reader(open(tmp_path / "candidates.csv")))
    assert "REWARD_MODE = hard_plus_gtprob\n" in capsys.readouterr().out
    assert figures["positive rate, alone"] == "0.5"
    assert float(figures["best reward above the pick's, mean"]) == pytest.approx(1.2 - 1.0)


@pytest.mark.parametrize(
    "words, says",
    [
        ((), "it takes an OUTPUT_DIR or a file of candidates"),
        (("{}", "TAU=3"), "it takes an OUTPUT_DIR"),
        (("{}",), "there are no candidates at .*: mine first"),
        (("{}/odd.parquet",), "odd.parquet cannot be read"),
        (("{}/odd.parquet", "REWARD_MODE=best"), "REWARD_MODE = 'best': it takes hard_only, "),
        (("{}/none.jsonl",), "none of its 2 candidates was verified"),
        (("{}/mine.jsonl",), "mine.csv is not of this program"),
    ],
)
def test_what_cannot_be_checked_is_a_sentence(tmp_path, capsys, words, says):
    (tmp_path / "odd.parquet").write_text("no parquet")
    write_lists(tmp_path / "none.jsonl", [[candidate(None), candidate(None)]])
    write_lists(tmp_path / "mine.jsonl", [RIGHT_PICK])
    (tmp_path / "mine.csv").write_text("text,label\nmy,data\n")
    with pytest.raises(SystemExit) as end:
        tool.main(*(word.format(tmp_path) for word in words))
    said = capsys.readouterr().err
    assert end.value.code == 2 and re.search(says, said) and len(said.splitlines()) == 1
