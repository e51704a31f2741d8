"""Several processes: the trainers that are not yet rewritten."""

import pytest
from old import ROOT, Processes


@pytest.mark.parametrize("file", ["rce/rce_icl.py"])
def test_trainers_of_one_process_say_so(file, tmp_path):
    ended = Processes(2, ROOT / file, f"OUTPUT_DIR={tmp_path}/run").wait()
    assert [end.returncode for end in ended] == [2, 2]
    assert "runs as one process" in ended[0].stderr and ended[1].stderr == ""
