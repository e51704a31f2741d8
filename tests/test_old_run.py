"""What a user meets in each of the three trainers that are not yet rewritten: the first line, an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from old import ROOT, TRAINERS


@pytest.mark.parametrize("path", TRAINERS)
def test_the_first_line_stands_before_torch_is_imported(tmp_path, path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch')")
    for number, says in (("0", f"{Path(path).name} loads torch, models and data\n"), ("1", "")):
        words = {"env": {**os.environ, "PYTHONPATH": str(tmp_path), "RANK": number}, "text": True}
        done = subprocess.run([sys.executable, ROOT / path], capture_output=True, **words)
        assert (done.stdout, done.stderr) == (says, "torch\n")


@pytest.mark.parametrize("path", TRAINERS)
def test_a_wrong_word_is_one_sentence_and_exit_code_2(path, started, tmp_path):
    done = started(path, f"OUTPUT_DIR={tmp_path}/run", "BATCHSIZE=1")
    assert done.returncode == 2 and "BATCH_SIZE" in done.stderr
    assert done.stderr.startswith(f"\n{Path(path).name}: ") and len(done.stderr.strip().splitlines()) == 1
