"""Several processes: the trainers that are not yet rewritten."""

import pytest
from old import ROOT, Processes, assert_same_state, untimed

REC = "grpo/grpo_rec.py"
WORDS = {
    "MAX_TRAIN_ROWS": 60,
    "MAX_EVAL_ROWS": 70,
    "EVAL_BEAMS": 20,
    "SFT_EPOCHS": 1,
    "SFT_BATCH_SIZE": 32,
    "BATCH_SIZE": 2,
    "GRADIENT_ACCUMULATION_STEPS": 3,
    "GROUP_SIZE": 4,
    "MAX_STEPS": 2,
    "EVAL_EVERY_N_STEPS": 1,
    "CANDIDATES": "sample",
    "SAVE_EVERY_N_STEPS": 0,
}


def test_recommendation_is_the_same_to_the_byte_on_two_processes(tmp_path):
    runs = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        words = [f"{key}={value}" for key, value in {**WORDS, "OUTPUT_DIR": folder}.items()]
        ended = Processes(count, ROOT / REC, *words).wait()
        assert [end.returncode for end in ended] == [0] * count, ended
        assert not any(end.stdout for end in ended[1:])
        (saved,) = folder.glob("step_*")
        runs.append((folder, saved))
    (one, first), (two, second) = runs
    assert first.name == second.name
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert untimed(one / "logs" / name) == untimed(two / "logs" / name)
    weights = [path.relative_to(one) for path in one.rglob("*.safetensors")]
    assert weights and all((one / path).read_bytes() == (two / path).read_bytes() for path in weights)
    assert_same_state(first / "training_state.pt", second / "training_state.pt")


@pytest.mark.parametrize("file", ["ppo/ppo_rag.py", "rce/rce_icl.py"])
def test_trainers_of_one_process_say_so(file, tmp_path):
    ended = Processes(2, ROOT / file, f"OUTPUT_DIR={tmp_path}/run").wait()
    assert [end.returncode for end in ended] == [2, 2]
    assert "runs as one process" in ended[0].stderr and ended[1].stderr == ""
