"""The programs of examples/ over grpo_rec.py: imported as they are, on small data."""

import importlib.util
import json
import sys

import pytest
from old import ROOT, read

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def example(monkeypatch):
    """example("rec_diversity", KEY=value, ...): that program, over a fresh trainer."""

    def load(name, **constants):
        trainer = "grpo_rec"
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


def test_unlike_neighbours_are_rewarded(example, tmp_path):
    module, script = example("rec_diversity", **rec_words(tmp_path, GROUP_SIZE=4))
    index = json.loads((tmp_path / "world/index.json").read_text())
    items = list(index)
    same = [item for item in items if index[item][0] == index[items[0]][0]][:3]
    other = next(item for item in items if index[item][0] != index[items[0]][0])
    alike = [*same, *(3 - len(same)) * [same[0]], other]
    values = module.diversity(None, alike + [other] * 4, None)
    assert values == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0, 0, 0, 0, 0])
    script.RecTrainer().train()
    samples = read(tmp_path / "run/logs/samples.jsonl")
    for sample in samples:
        parts = {key: value for key, value in sample.items() if key.startswith("reward/")}
        weights = {
            "reward/value": script.VALUE_WEIGHT,
            "reward/rule": script.RULE_WEIGHT,
            "reward/diversity": 0.3,
        }
        assert sample["reward"] == pytest.approx(sum(weights[key] * value for key, value in parts.items()))
    assert len(samples) > 0


def test_grpo_samples_items_for_titles_too(example, tmp_path):
    policy = str(ROOT / "data/tiny/policy")
    words = rec_words(tmp_path, ACTOR_MODEL=policy, PROMPT_TEMPLATE="{history} ?", BATCH_SIZE=60)
    module, script = example("rec_titles_in_rl", **words)
    script.VALUE_WEIGHT, script.VALUES_FILE = 0.0, None
    trainer = script.RecTrainer()
    by_title = [row for row in trainer.rl_rows if row["history"] == []]
    assert {row["target"] for row in by_title} == set(range(len(trainer.catalogue.items)))
    trainer.train()
    metrics = [record for record in read(tmp_path / "run/logs/metrics.jsonl") if "reward/rule" in record]
    assert [record["phase"] for record in metrics] == ["eval", "train", "eval"] and set(metrics[1]) > {
        "reward/rule",
        "reward",
    }
    assert "reward/value" not in metrics[1]
