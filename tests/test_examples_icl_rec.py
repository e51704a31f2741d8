"""The programs of examples/ over rce_icl.py: imported as they are, on small data."""

import importlib.util
import json
import math
import sys

import pytest
from old import ROOT
from test_icl import toy_constants, write_rows

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def example(monkeypatch):
    """example("icl_legacy_reward", KEY=value, ...): that program, over a fresh trainer."""

    def load(name, **constants):
        trainer = "rce_icl"
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.delitem(sys.modules, trainer, raising=False)
        spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        script = sys.modules.pop(trainer)
        for key, value in constants.items():
            assert key in script.constants(), key
            setattr(script, key, value)
        return module, script

    return load


def icl_words(tmp_path, **constants):
    write_rows(tmp_path / "train.csv", 120, 1)
    write_rows(tmp_path / "test.csv", 6, 2)
    words = toy_constants(tmp_path, tmp_path, RCE_EPOCHS=1, EVAL_SHOTS=(1,), TEST_ORACLE=False, RESUME="no")
    return {**words, **constants}


def test_relevance_is_the_cosine_of_vectors(example, tmp_path):
    """Wrong answers are graded by it; a right answer is its gold, and a stranger has nothing in common."""
    module, script = example("icl_vector_similarity", **icl_words(tmp_path))
    trainer = module.SimilarityTrainer()
    miner = trainer.miner
    demo = trainer.demos[0]["text"]
    assert miner.similarity(demo, ("no such word", demo)) == pytest.approx(1.0, abs=1e-5)
    assert miner.similarity("zzz", (demo,)) == 0.0
    trainer.mine(tmp_path / "run/candidates.json", trainer.splits["train"][:4], 2)
    records = json.loads((tmp_path / "run/candidates.json").read_text())
    rows = {row["id"]: row for row in trainer.splits["train"]}
    seen = 0
    for key, record in records.items():
        for candidate in record.get("pointer_candidates", ()):
            golds = next(row["golds"] for row in rows.values() if str(row["number"]) == key)
            wanted = miner.similarity(candidate["vqa_pred_answer"], tuple(golds))
            assert candidate["vqa_rel_score"] == pytest.approx(wanted)
            seen += 1
    assert seen > 8 and script.REWARD_MODE == "hard_plus_gtprob_plus_rel"


def test_the_legacy_reward_by_hand_and_in_a_run(example, tmp_path):
    module, script = example("icl_legacy_reward", **icl_words(tmp_path))
    lists = [{"hard": h, "gt_prob": p} for h, p in ((1, 0.5), (0, 0.5 * math.exp(-2)), (0, 0.0))]
    logs = [math.log(0.5), math.log(0.5) - 2, math.log(1e-6)]
    mean = sum(logs) / 3
    wanted = [0.2 * (logs[0] - mean) + 1, 0.2 * (logs[1] - mean) - 1, 0.2 * (logs[2] - mean) - 1]
    assert script.shaped_rewards(lists) == pytest.approx(wanted)
    module.CLIP = 1.5
    assert script.shaped_rewards(lists) == pytest.approx([min(1.5, wanted[0]), wanted[1], -1.5])
    module.CLIP = 5.0
    trainer = script.ICLTrainer()
    trainer.test = lambda: None
    trainer.train()
    row = trainer.train_rows[0]
    assert row["rewards"] == pytest.approx(module.shaped_rewards(row["candidates"]))
