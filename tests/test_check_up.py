"""tools/check_up.py: its figures by hand and as the trainers have them, its verdict, its files."""

import ast
import csv
import json
import math
import random
import re
import sys

import pyarrow.parquet
import pytest
from conftest import ROOT, load

tool = load("tools/check_up.py")
icl = load("rce/rce_icl.py")
rce = load("rce/rce.py")
GREEDY = {"source": ["greedy"], "temperature": [None]}


def candidate(hard, soft=0.0, gt_prob=0.0, source=("sample",), temperature=(1.0,), **more):
    return {
        "prompt_id": "p",
        "prompt": "q",
        "token_ids": [5, 1],
        "text": "",
        "truncated": False,
        "hard": hard,
        "soft": soft,
        "gt_prob": gt_prob,
        "source": list(source),
        "temperature": list(temperature),
        "logprob": -1.0,
        "eval_mode": "verified",
        "eval_failed": False,
        "eval_error": None,
        **more,
    }


def hand_made():
    return [
        [
            candidate(1, 0.9, 0.8, ["greedy", "sample"], [None, 1.0]),
            candidate(0, 0.5, 0.1),
            candidate(0, 0.2, 0.0, ["beam"], [None]),
        ],
        [
            candidate(0, 0.6, 0.3, **GREEDY),
            candidate(1, 1.0, 0.9, ["sample", "sample"], [0.5, 1.0]),
            candidate(None, None, None, eval_failed=True, eval_mode="failed"),
        ],
        [
            candidate(0, 0.1, 0.0, **GREEDY),
            candidate(0, 0.4, 0.2, ["beam"], [None]),
            candidate(None, None, 0.05, eval_mode="cheap"),
        ],
    ]


def drawn(count=40):
    """Groups of candidates with all that a reward may be made of, of both trainers."""
    draw = random.Random(0)
    groups = []
    for n in range(count):
        group = [candidate(int(draw.random() < 0.3), prompt_id=f"p{n}") for _ in range(5)]
        for c in group:
            c.update({key: draw.random() for key in ("soft", "gt_prob", "logprob")})
        groups.append(group)
    return groups


def test_it_imports_nothing_of_ours():
    names = set()
    for node in ast.walk(ast.parse((ROOT / "tools/check_up.py").read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    assert names - set(sys.stdlib_module_names) == {"numpy", "pyarrow", "matplotlib", "scipy"}


def test_figures_of_a_hand_made_table():
    figures = tool.check_up(hand_made(), "hard_only")
    wanted = {
        "prompts": 3,
        "candidates": 9,
        "proposed": 11,
        "verified": 7,
        "positive rate": 2 / 7,
        "positive rate, greedy": 1 / 3,
        "positive rate, beam": 0.0,
        "positive rate, sample at 1": 2 / 3,
        "positive rate, sample at 0.5": 1.0,
        "positives per prompt, min": 0,
        "positives per prompt, p25": 0.5,
        "positives per prompt, median": 1,
        "positives per prompt, p75": 1,
        "positives per prompt, max": 1,
        "prompts without a positive": 1 / 3,
        "prompts with flat reward": 1 / 3,
        # ranks of soft .9 .5 .2 .6 1. .1 .4: 6 4 2 5 7 1 3, of hard 1 0 0 0 1 0 0: 6.5 3 3 3 6.5 3 3
        "Spearman of soft with hard": 17.5 / math.sqrt(28 * 17.5),
        # gt_prob .8 .1 0 .3 .9 0 .2: ranks 6 3 1.5 5 7 1.5 4
        "Spearman of gt_prob with hard": 17.5 / math.sqrt(27.5 * 17.5),
        # ranks 6 3 1.5 5 7 1.5 4 with 6 4 2 5 7 1 3
        "Spearman of gt_prob with soft": 26.5 / math.sqrt(27.5 * 28),
        "accuracy of the policy's pick": 1 / 3,
        "accuracy of the oracle": 2 / 3,
        "oracle's reward above the pick's, mean": 1 / 3,
        "oracle above the pick by .2, prompts": 1 / 3,
        "eval mode cheap": 1 / 9,
        "eval mode failed": 1 / 9,
        "eval mode verified": 7 / 9,
    }
    assert figures == pytest.approx(wanted)
    assert tool.find_verdict(figures, "hard_only").startswith("fix the reward: scoring failed for 12% of")
    soft = tool.check_up(hand_made(), "hard_plus_soft")
    assert soft["prompts with flat reward"] == 0
    assert soft["oracle's reward above the pick's, mean"] == pytest.approx((0 + (2.0 - 0.6) + 0.3) / 3)
    none = tool.check_up([[candidate(None)]], "hard_only")
    assert math.isnan(none["accuracy of the oracle"]) and math.isnan(none["Spearman of soft with hard"])


@pytest.mark.parametrize("mode", tool.MODES)
def test_its_rewards_are_the_trainers(monkeypatch, mode):
    for group in drawn():
        found = tool.shaped_rewards(group, mode)
        for trainer in (rce, icl):
            if mode in trainer.reward_modes:
                monkeypatch.setattr(trainer, "REWARD_MODE", mode)
                assert found == pytest.approx(trainer.shaped_rewards(group).tolist())
    assert set(icl.reward_modes) <= set(tool.MODES) >= set(rce.reward_modes)


@pytest.mark.parametrize(
    "mode, groups, says",
    [
        (
            "hard_only",
            [[candidate(1, **GREEDY), candidate(0)]] * 2 + [[candidate(0, **GREEDY), candidate(1)]],
            "train: the best candidate is right for 100%",
        ),
        (
            "hard_only",
            [[candidate(0), candidate(0)]] * 3 + [[candidate(1), candidate(0)]],
            "mine more: 75% of the prompts have no right candidate",
        ),
        (
            "hard_only",
            [[candidate(1, **GREEDY), candidate(0)], [candidate(0, **GREEDY), candidate(0)]] * 2,
            "mine more: the candidates are hardly",
        ),
        (
            "hard_only",
            [[candidate(1, **GREEDY), candidate(0)]] * 4,
            "mine harder prompts: the policy's own pick is right for 100% of these",
        ),
        (
            "hard_only",
            [[candidate(1), candidate(1)]] * 3 + [[candidate(0, **GREEDY), candidate(1)]],
            "fix the reward: 75% of the prompts have equal rewards",
        ),
        (
            "hard_plus_soft",
            [[candidate(0, 0.9), candidate(1, 0.1)]] * 4,
            "fix the reward: soft hardly goes with being right (Spearman -1.00)",
        ),
    ],
)
def test_the_verdict_names_what_to_do(mode, groups, says):
    figures = tool.check_up(groups, mode)
    assert tool.find_verdict(figures, mode).startswith(says)


def test_a_run_is_checked_by_its_newest_candidates_and_its_own_constants(tmp_path, capsys):
    config = {"constants": {"REWARD_MODE": "soft_only", "SEED": 3}}
    (tmp_path / "training_config.json").write_text(json.dumps(config))
    for number, count in ((2, 9), (10, 8)):
        records = [c for group in drawn(count) for c in group]
        path = tmp_path / f"candidates_round_{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    tool.main(str(tmp_path))
    said = capsys.readouterr().out
    saved = dict(csv.reader(open(tmp_path / "candidates_round_10.csv")))
    assert "candidates_round_10.parquet, REWARD_MODE = soft_only" in said and saved["prompts"] == "8"
    assert f"Verdict: {saved['verdict']}" in said
    assert (tmp_path / "candidates_round_10.png").read_bytes()[:4] == b"\x89PNG"


def test_few_scored_candidates_that_failed_count(tmp_path):
    """Of 20 candidates four were scored, two of them failed."""
    group = [candidate(1, eval_failed=i < 2) for i in range(4)] + [candidate(None) for _ in range(16)]
    figures = tool.check_up([group], "hard_only")
    assert tool.find_verdict(figures, "hard_only").startswith("fix the reward: scoring failed for 50%")


def write_lists(path, groups):
    path.write_text("".join(json.dumps({"id": "7", "lists": lists}) + "\n" for lists in groups))


def test_a_csv_of_the_users_is_not_replaced(tmp_path, capsys):
    write_lists(tmp_path / "my.jsonl", drawn(2))
    (tmp_path / "my.csv").write_text("text,label\nmy,data\n")
    with pytest.raises(SystemExit, match="2"):
        tool.main(str(tmp_path / "my.jsonl"))
    assert "my.csv is not of this program" in capsys.readouterr().err
    assert (tmp_path / "my.csv").read_text() == "text,label\nmy,data\n"


def test_lists_of_rce_icl_are_read_and_a_reward_can_be_given(tmp_path, capsys):
    lists = [icl.new_list([n], "alone", None) | icl.score_answer("ab"[n % 2], ["a"]) for n in range(4)]
    groups = [[{**x, "gt_prob": 0.1 * n} for n, x in enumerate(lists)]] * 3
    write_lists(tmp_path / "candidates.jsonl", groups)
    (tmp_path / "training_config.json").write_text('{"constants": {"REWARD_MODE": "soft_only"}}')
    tool.main(str(tmp_path), "REWARD_MODE=hard_plus_gtprob")
    said = capsys.readouterr().out
    figures = dict(csv.reader(open(tmp_path / "candidates.csv")))
    assert "REWARD_MODE = hard_plus_gtprob\n" in said and figures["positive rate, alone"] == "0.5"
    assert float(figures["oracle's reward above the pick's, mean"]) == pytest.approx(1.2 - 1.0)


@pytest.mark.parametrize(
    "words, says",
    [
        ((), "it takes an OUTPUT_DIR or a file of candidates"),
        (("{}", "TAU=3"), "it takes an OUTPUT_DIR"),
        (("{}",), "there are no candidates at .*: mine first"),
        (("{}/odd.parquet",), "odd.parquet cannot be read"),
        (("{}/odd.parquet", "REWARD_MODE=best"), "REWARD_MODE = 'best': it takes hard_only, "),
        (("{}/none.jsonl",), "none of its 2 candidates was verified"),
        (("{}/lacking.jsonl", "REWARD_MODE=hybrid"), "lacks what REWARD_MODE needs"),
    ],
)
def test_what_cannot_be_checked_is_a_sentence(tmp_path, capsys, words, says):
    (tmp_path / "odd.parquet").write_text("no parquet")
    write_lists(tmp_path / "none.jsonl", [[candidate(None), candidate(None)]])
    write_lists(tmp_path / "lacking.jsonl", [[{"hard": 1, "source": ["alone"], "temperature": [None]}]])
    with pytest.raises(SystemExit) as end:
        tool.main(*(word.format(tmp_path) for word in words))
    said = capsys.readouterr().err
    assert end.value.code == 2 and re.search(says, said) and len(said.splitlines()) == 1
