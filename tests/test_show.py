"""SHOW=OUTPUT_DIR: what the policy says, as a person reads it."""
import json
import os
import sys

import pytest
from conftest import TRAINERS, load_script

SAMPLES = [
    {"step": step, "id": f"a.jsonl:{n}", "prompt": f"Tom has {n} apples.\nHow many?",
     "response": f"say {step}.{n}", "answer": None, "truncated": False, "reward": reward,
     "reward/exact_answer": reward, "advantage": -0.5}
    for step, n, reward in ((1, 1, 0.25), (1, 2, -1.0), (2, 3, 1.0), (2, 4, 0.0))]


def write(folder, *samples, end=""):
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(sample) + "\n" for sample in samples)
    (folder / "logs/samples.jsonl").write_text(lines + end)
    return folder


@pytest.fixture
def shown(started):
    """What a trainer prints for these words."""
    def show(*words, path="grpo/grpo.py"):
        return started(path, *words, shrink=False)
    return show


def responses(done):
    """The samples printed, by their responses, in order."""
    assert done.returncode == 0, done.stderr
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("    say ")]


@pytest.mark.parametrize("path", [*TRAINERS, "ppo/ppo_rag.py", "grpo/grpo_rec.py", "rce/rce_icl.py"])
def test_samples_are_printed_without_a_model_or_a_lock(path, shown, tmp_path):
    run = write(tmp_path / "run", SAMPLES[0])
    done = shown(f"SHOW={run}", path=path)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == """\
step 1  id a.jsonl:1  truncated False  reward 0.250  reward/exact_answer 0.250  advantage -0.500
prompt
    Tom has 1 apples.
    How many?
response
    say 1.1

"""
    assert sorted(str(file.relative_to(run)) for file in run.rglob("*")) == ["logs", "logs/samples.jsonl"]


def test_a_step_and_the_worst_or_best_can_be_asked_for(shown, tmp_path):
    run = f"SHOW={write(tmp_path, *SAMPLES)}"
    assert responses(shown(run)) == ["1.1", "1.2", "2.3", "2.4"]
    assert responses(shown("STEP=2", run)) == ["2.3", "2.4"]
    assert responses(shown(run, "BY=worst")) == ["1.2", "2.4", "1.1", "2.3"]
    assert responses(shown(run, "BY=best", "STEP=1")) == ["1.1", "1.2"]
    write(tmp_path, *SAMPLES, {**SAMPLES[0], "step": 3, "response": "say 3.1"})
    assert responses(shown(run, "STEP=2")) == ["2.3", "2.4"]  # neither an earlier step nor a later one
    many = [{**SAMPLES[0], "response": f"say {n}", "reward": n} for n in range(30)]
    none = [{**SAMPLES[0], "reward": None}, {**SAMPLES[0], "reward": float("nan")}]
    write(tmp_path, *many[15:], *none, *many[:15])
    assert responses(shown(run, "BY=best")) == [str(n) for n in range(29, 19, -1)]
    assert responses(shown(run, "BY=worst")) == [str(n) for n in range(10)]
    assert len(responses(shown(run))) == 32


def test_escapes_are_printed_safely_and_colours_at_a_terminal_alone(shown, tmp_path, monkeypatch):
    nasty = {**SAMPLES[2], "response": "say \033[2J\x07 5 \u202e", "id": "\033]0;x\x07"}
    run = write(tmp_path, nasty)
    done = shown(f"SHOW={run}")
    assert "\033" not in done.stdout and "\x07" not in done.stdout and "\u202e" not in done.stdout
    assert "    say \\x1b[2J\\x07 5 \\u202e\n" in done.stdout
    script = load_script("ppo/ppo.py")
    assert script.show_sample(SAMPLES[2], False) == script.show_sample(SAMPLES[2], True).replace(
        "\033[1;32m", "").replace("\033[2m", "").replace("\033[0m", "")
    assert "\033[1;31m" in script.show_sample(SAMPLES[3], True)
    for terminal, no_colour, coloured in ((True, False, True), (True, True, False), (False, False, False)):
        monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
        monkeypatch.setattr("os.environ", {"NO_COLOR": "1"} if no_colour else {})
        assert ("\033[0m" in shown(f"SHOW={run}").stdout) == coloured


def test_a_run_in_progress_and_a_spoilt_file_are_shown_as_far_as_they_go(shown, tmp_path):
    odd = {"step": 7, "prompt": [1], "reward": "x"}
    run = write(tmp_path, [1], {"step": "x"}, *SAMPLES, odd, end='{"step": 3, "pro')
    assert responses(shown(f"SHOW={run}")) == ["1.1", "1.2", "2.3", "2.4"]
    spoilt = b"\xff\xfe\n" + b"[" * 10**5 + b"\n" + json.dumps(SAMPLES[0]).encode()
    (run / "logs/samples.jsonl").write_bytes(spoilt)
    assert responses(shown(f"SHOW={run}")) == ["1.1"]


@pytest.mark.parametrize("words, says", [
    (["SHOW={none}"], "there is no {none}/logs/samples.jsonl: SHOW takes the OUTPUT_DIR of a run"),
    (["SHOW="], "there is no logs/samples.jsonl"),
    (["SHOW={run}", "STEP=9"], "{run}/logs/samples.jsonl has no such sample: its steps are 1 to 2"),
    (["SHOW={empty}"], "{empty}/logs/samples.jsonl has no such sample: it is empty"),
    (["SHOW={run}", "STEP=x"], "takes STEP=n and BY=worst or BY=best beside it"),
    (["SHOW={run}", "BY=reward"], "takes STEP=n and BY=worst or BY=best beside it"),
    (["SHOW={run}", "SEED=3"], "takes STEP=n and BY=worst or BY=best beside it"),
    (["STEP=1"], "'STEP=1' is not KEY=VALUE with a constant"),
])
def test_what_cannot_be_shown_is_a_sentence(shown, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    folders = {"none": "none", "run": write(tmp_path / "run", *SAMPLES), "empty": write(tmp_path / "empty")}
    done = shown(*(word.format(**folders) for word in words))
    assert done.returncode == 2 and done.stdout == ""
    assert says.format(**folders) in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_reader_that_has_seen_enough_ends_it_quietly(tmp_path, monkeypatch):
    run = write(tmp_path, *SAMPLES * 2000)
    end, written = os.pipe()
    os.close(end)
    with os.fdopen(written, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        load_script("grpo/grpo.py").show_samples([f"SHOW={run}"])
        print("to nowhere", flush=True)
