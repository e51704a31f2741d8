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
from old import ROOT, load_script

pytestmark = pytest.mark.usefixtures("no_pictures")
tool = load_script("tools/check_up.py")
icl = load_script("rce/rce_icl.py")
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
        scores = ("soft", "gt_prob", "logprob", "beam_score", "relevance", "reward/rouge_l")
        some = [candidate(int(draw.random() < 0.3)) for _ in range(5)]
        for c in some:
            c.update({key: draw.random() for key in scores}, prompt_id=f"p{n}")
            c["eval_failed"] = draw.random() < 0.1
        groups.append(some)
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
    figures = tool.check_up(hand_made(), 11, tool.CONSTANTS)
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
    soft = tool.check_up(hand_made(), 11, {**tool.CONSTANTS, "REWARD_MODE": "hard_plus_soft"})
    assert soft["prompts with flat reward"] == 0
    assert soft["oracle's reward above the pick's, mean"] == pytest.approx((0 + (2.0 - 0.6) + 0.3) / 3)
    none = tool.check_up([[candidate(None)]], 1, tool.CONSTANTS)
    assert math.isnan(none["accuracy of the oracle"]) and math.isnan(none["Spearman of soft with hard"])


def test_relevance_is_compared_with_the_accuracy_where_the_file_has_it():
    marks = ((1, 1.0, 1.0), (1, 0.3, 0.5), (0, 0.0, 0.2), (0, 0.0, 0.0))
    group = [candidate(hard, soft, relevance=relevance) for hard, soft, relevance in marks]
    figures = tool.check_up([group], 4, tool.CONSTANTS)
    # ranks of relevance 4 3 2 1, of hard 3.5 3.5 1.5 1.5, of soft 4 3 1.5 1.5
    assert figures["Spearman of relevance with hard"] == pytest.approx(4 / math.sqrt(5 * 4))
    assert figures["Spearman of relevance with soft"] == pytest.approx(4.5 / math.sqrt(5 * 4.5))


@pytest.mark.parametrize(
    "constants",
    [
        *({"REWARD_MODE": mode} for mode in icl._VALID_RANGES["REWARD_MODE"]),
        *({"REWARD_MODE": mode, "HARD_WEIGHT": 0.3, "SOFT_WEIGHT": 4.0} for mode in tool.MODES),
        *({"REWARD_MODE": mode, "HARD_WEIGHT": 0.0} for mode in tool.MODES),
        {"REWARD_MODE": "hybrid", "HYBRID_MIX_SCORE": "beam_score"},
        {"REWARD_MODE": "hybrid", "HYBRID_MIX_SCORE": "infoscore", "HYBRID_ALPHA": 0.7},
        {"REWARD_MODE": "hybrid", "HYBRID_ALPHA": 0.2, "HARD_WEIGHT": 3.0},
    ],
)
def test_its_figures_are_the_trainers_own(monkeypatch, constants):
    for key, value in constants.items():
        monkeypatch.setattr(icl, key, value)
    groups = [[{**c, "pointer": (1, 2)} for c in group] for group in drawn()]
    figures = tool.check_up(groups, 250, {**tool.CONSTANTS, **constants})
    own = icl.check_up(groups, 250, "c", lambda text: None)
    assert own == {key: pytest.approx(figures[key]) for key in own}
    for group in groups[:5]:
        assert tool.shaped_rewards(group, {**tool.CONSTANTS, **constants}) == pytest.approx(
            icl.shaped_rewards(group)
        )
        assert tool.policy_pick(group) == icl.policy_pick(group)


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
    figures = tool.check_up(groups, 9, {**tool.CONSTANTS, "REWARD_MODE": mode})
    assert tool.find_verdict(figures, mode).startswith(says)


def test_a_run_is_checked_by_its_newest_candidates_and_its_own_constants(tmp_path, capsys, drawing):
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


def test_a_mark_that_has_no_weight_does_not_make_the_verdict():
    groups = [[candidate(0, gt_prob=0.9), candidate(1, gt_prob=0.1), candidate(0, **GREEDY)]] * 4
    constants = {**tool.CONSTANTS, "REWARD_MODE": "hard_plus_gtprob"}
    figures = tool.check_up(groups, 9, constants)
    assert tool.find_verdict(figures, "hard_plus_gtprob", 1.0).startswith("fix the reward: gt_prob hardly")
    assert tool.find_verdict(figures, "hard_plus_gtprob", 0.0).startswith("train:")


def test_the_weights_of_a_run_are_those_of_its_file_or_given(tmp_path, capsys):
    lists = [
        {"pointer": [n], "vqa_correct": 1, "vqa_gt_prob": g, "logprob_score": -n, "temperature": None}
        for n, g in ((3, 0.2), (4, 0.6))
    ]
    records = [(str(n), {"pointer_candidates": lists}) for n in range(4)]
    icl.write_candidates(records, tmp_path / "candidates.json", {})
    constants = {"REWARD_MODE": "hard_plus_gtprob", "HARD_WEIGHT": 5.0, "SOFT_WEIGHT": 3.0}
    (tmp_path / "training_config.json").write_text(json.dumps({"constants": constants}))
    for words, gap, flat in (((), 1.2, 0), (("SOFT_WEIGHT=2",), 0.8, 0), (("SOFT_WEIGHT=0",), 0.0, 1)):
        tool.main(str(tmp_path), *words)
        figures = dict(csv.reader(open(tmp_path / "candidates.csv")))
        assert float(figures["oracle's reward above the pick's, mean"]) == pytest.approx(gap)
        assert float(figures["prompts with flat reward"]) == flat
    assert "Verdict: " in capsys.readouterr().out


def test_marks_of_the_sources_fallback_are_left_out_where_the_run_leaves_them_out(tmp_path):
    modes = ("fallback", "file", "fallback", "file")
    lists = [
        {"pointer": [n], "vqa_correct": n % 2, "vqa_eval_mode": mode, "temperature": None}
        for n, mode in enumerate(modes)
    ]
    icl.write_candidates([("7", {"pointer_candidates": lists})], tmp_path / "candidates.json", {})
    for skip, verified in ((True, "2"), (False, "4")):
        config = {"constants": {"REWARD_MODE": "hard_only", "SKIP_FALLBACK": skip}}
        (tmp_path / "training_config.json").write_text(json.dumps(config))
        tool.main(str(tmp_path))
        assert dict(csv.reader(open(tmp_path / "candidates.csv")))["verified"] == verified


def test_lists_that_are_skipped_are_no_failures_and_few_scored_ones_count(tmp_path):
    """Of 20 candidates four were scored, two of them failed; of others the fallback is left out."""
    group = [candidate(1, eval_failed=i < 2) for i in range(4)] + [candidate(None) for _ in range(16)]
    figures = tool.check_up([group], 20, tool.CONSTANTS)
    assert tool.find_verdict(figures, "hard_only").startswith("fix the reward: scoring failed for 50%")
    group = [candidate(i % 2, eval_mode="fallback" if i < 4 else "verified") for i in range(8)]
    tool.skip_fallback([group])
    figures = tool.check_up([group], 8, tool.CONSTANTS)
    assert figures["verified"] == 4 and figures["eval mode fallback"] == 0.5
    assert "scoring failed" not in tool.find_verdict(figures, "hard_only")


def test_a_csv_of_the_users_is_not_replaced(tmp_path, capsys):
    icl.write_candidates([("7", {"pointer_candidates": []})], tmp_path / "my.json", {})
    (tmp_path / "my.csv").write_text("text,label\nmy,data\n")
    with pytest.raises(SystemExit, match="2"):
        tool.main(str(tmp_path / "my.json"))
    assert "my.csv is not of this program" in capsys.readouterr().err
    assert (tmp_path / "my.csv").read_text() == "text,label\nmy,data\n"


def test_a_file_without_verified_candidates_and_other_files_beside_a_run(tmp_path, capsys):
    icl.write_candidates([("7", {"pointer_candidates": [{"pointer": [3]}]})], tmp_path / "c.json", {})
    (tmp_path / "candidates_round_1_copy.parquet").write_bytes(b"")
    with pytest.raises(SystemExit, match="2"):
        tool.main(str(tmp_path / "c.json"))
    assert "none of its 1 candidates was verified" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        tool.main(str(tmp_path))
    assert "there are no candidates at" in capsys.readouterr().err


def test_a_file_of_lists_is_read_and_a_reward_can_be_given(tmp_path, capsys):
    lists = [{name: c.get(key) for key, name in icl._FIELDS.items()} for c in drawn(1)[0]]
    of_source = {"pointer": [3], "gen_method": "beam", "temperature": None, "vqa_correct": 1}
    records = [("7", {"pointer_candidates": [*lists, of_source], "proposed": 60})]
    icl.write_candidates(records, tmp_path / "candidates.json", {})
    groups, proposed = tool.read_groups(tmp_path / "candidates.json")
    assert proposed == 60 and groups[0].pop()["source"] == ["beam"]
    assert [c["soft"] for c in groups[0]] == [c["soft"] for c in drawn(1)[0]]
    (tmp_path / "training_config.json").write_text('{"constants": {"REWARD_MODE": "soft_only"}}')
    tool.main(str(tmp_path / "candidates.json"), "REWARD_MODE=hard_only")
    assert "REWARD_MODE = hard_only\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, says",
    [
        ((), "it takes an OUTPUT_DIR or a file of candidates"),
        (("{}", "TAU=3"), "it takes an OUTPUT_DIR"),
        (("{}",), "there are no candidates at .*: run STAGE=mine first"),
        (("{}/odd.parquet",), "odd.parquet cannot be read"),
        (("{}/odd.parquet", "REWARD_MODE=best"), "REWARD_MODE = 'best': it takes hard_only, "),
        (("{}/odd.parquet", "SOFT_WEIGHT=much"), "SOFT_WEIGHT = 'much': it takes a number"),
        (("{}/odd.parquet", "SKIP_FALLBACK=1"), "SKIP_FALLBACK = '1': it takes True or False"),
        (("{}/list.json",), "list.json cannot be read, or lacks .*AttributeError"),
        (
            ("{}/scores.json", "REWARD_MODE=hybrid", "HYBRID_MIX_SCORE=beam_score"),
            "lacks what REWARD_MODE needs",
        ),
        (("{}/odd/list.json",), "training_config.json is not what a trainer wrote"),
    ],
)
def test_what_cannot_be_checked_is_a_sentence(tmp_path, capsys, words, says):
    (tmp_path / "odd.parquet").write_text("no parquet")
    (tmp_path / "odd").mkdir()
    for folder in (tmp_path, tmp_path / "odd"):
        (folder / "list.json").write_text("[]")
    (tmp_path / "odd/training_config.json").write_text("{")
    lists = [{"pointer": [3], "vqa_correct": 1, "temperature": None, "beam_score": x} for x in (1, None)]
    (tmp_path / "scores.json").write_text(json.dumps({"7": {"pointer_candidates": lists}}))
    with pytest.raises(SystemExit) as end:
        tool.main(*(word.format(tmp_path) for word in words))
    said = capsys.readouterr().err
    assert end.value.code == 2 and re.search(says, said) and len(said.splitlines()) == 1
