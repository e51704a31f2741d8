"""Nothing is lost, nothing hangs, nothing foreign is run: locks, time limits, rewards and malformed input of
every kind. tests/chaos.py kills and starves whole runs (CI does, after the suite)."""

import errno
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch
from conftest import ROOT, TRAINERS, load_script, reward_batch, run_script, small
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

import rewards

PPO = load_script("ppo/ppo.py")  # for pure functions; constants are put back by each test
fuzz = settings(max_examples=150, deadline=None, derandomize=True)


# ---------------------------------------------------------------- one run at a time


def run_in(script, folder):
    """A Run in a folder, as a trainer makes it, and no more."""
    script.OUTPUT_DIR = str(folder)
    return script.Run("ppo", "no", torch.device("cpu"))


def test_a_folder_in_use_is_refused_and_a_dead_runs_lock_is_not(tmp_path):
    hold = f"""
import sys, time
sys.argv = ["ppo.py"]
sys.path.insert(0, {str(ROOT / "ppo")!r})
import ppo
ppo.OUTPUT_DIR = {str(tmp_path)!r}
run = ppo.Run("ppo", "no", "cpu")
print("held", flush=True)
time.sleep(600)"""
    holder = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    script = load_script("ppo/ppo.py")
    with pytest.raises(script.UserError, match="in use by another run"):
        run_in(script, tmp_path)
    holder.kill()
    holder.wait()
    run = run_in(script, tmp_path)
    assert run.lock.is_locked
    run_in(script, tmp_path)  # the same process may, as in a notebook
    run.lock.release(force=True)


def test_the_lock_is_let_go_after_training(ppo):
    script = ppo(MAX_STEPS=1)
    trainer = script.PPOTrainer()
    taken = []
    trainer.run.draw_plots = lambda: taken.append(trainer.run.lock.is_locked)
    trainer.train()
    assert taken == [True]
    assert not trainer.run.lock.is_locked


# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    "values, says",
    [
        (["good", "bad"], r"\['good', 'bad'\]"),
        (None, "None"),
        ([1.0], r"\[1.0\], of shape \(1,\)"),
        ([1.0, float("nan")], r"\[1.0, nan\]"),
        ([float("inf"), 1e39], r"\[inf, 1e\+39\]"),
        ([[1.0], [2.0]], r"\[\[1.0\], \[2.0\]\], of shape \(2, 1\)"),
        (3.0, "3.0"),
        ([1.0, None], r"\[1.0, None\]"),
    ],
)
def test_a_reward_that_returns_nonsense_is_named(values, says):
    must = "^judge must return 2 finite numbers, one per response; it returned "
    with pytest.raises(PPO.UserError, match=must + says):
        PPO.call_reward("judge", lambda p, r, a: values, ["x", "y"], ["a", "b"], [None, None])


NUMBERS = [
    [True, False],
    (1, 0),
    torch.ones(2, dtype=torch.bfloat16),
    torch.ones(2, requires_grad=True),
    [1, 2.5],
]


@pytest.mark.parametrize("values", NUMBERS)
def test_numbers_of_every_kind_are_taken(values):
    scores = PPO.call_reward("judge", lambda *_: values, ["x", "y"], ["a", "b"], [None, None])
    assert scores.dtype == torch.float32 and scores.shape == (2,) and not scores.requires_grad


ERRORS = [
    KeyError("x"),
    IndexError(),
    ZeroDivisionError("no"),
    RuntimeError("a\nb"),
    AssertionError(),
    StopIteration(),
    OSError(5, "io"),
]


@pytest.mark.parametrize("error", ERRORS)
def test_what_a_reward_raises_keeps_its_line_and_names_the_function(error):
    def judge(prompts, responses, answers):
        raise error

    def compute_rewards(*lists):  # as a trainer's own calls each function
        return PPO.call_reward("judge", judge, *lists)

    with pytest.raises(type(error)) as caught:
        PPO.call_reward("compute_rewards", compute_rewards, ["x"], ["a"], [None])
    assert caught.value is error
    assert error.__notes__ == ["(raised by the reward function judge)"]  # once, and of the innermost
    last = caught.traceback[-1]
    assert last.path.name == "test_safety.py" and str(last.statement).strip() == "raise error"


def test_a_sentence_that_a_reward_raises_stays_one():
    """An override of compute_rewards() may raise UserError itself."""
    error = PPO.UserError("set X")

    def judge(*_):
        raise error

    with pytest.raises(PPO.UserError, match="^set X$"):
        PPO.call_reward("judge", judge, ["x"], ["a"], [None])
    assert not hasattr(error, "__notes__")


def ended(judge):
    """Exit code and standard error of a fork of this process that calls a reward function in time_limit()."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(writer, 2)
            signal.alarm(30)  # the test's own end, where the limit does nothing
            PPO.REWARD_TIMEOUT = 0.3
            with PPO.time_limit():
                PPO.call_reward("judge", judge, ["x"], ["a"], [None])
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said


def sleeps(*_):
    time.sleep(60)


def spins(*_):
    while True:
        pass


def catches(*_):
    while True:
        with suppress(BaseException):
            time.sleep(60)


def holds_the_lock(*_):
    """Of the interpreter: no other thread of Python gets a turn."""
    re.match("(a+)+b", "a" * 60)


def calls_another(*lists):
    """The inner one's end does not lift the limit of the outer one."""
    PPO.call_reward("quick", lambda *_: [0.0], *lists)
    time.sleep(60)


@pytest.mark.parametrize("judge", [sleeps, spins, catches, holds_the_lock, calls_another])
def test_a_reward_that_hangs_ends_the_program_and_shows_where(judge):
    code, said = ended(judge)
    assert code == 1
    assert "Timeout (0:00:00.300000)!" in said
    assert f" in {judge.__name__}" in said and " in call_reward" in said


def test_all_rewards_are_asked_within_the_time_limit(ppo, monkeypatch):
    """Of a batch, the score and the accuracy; the limit is lifted between them."""
    script = ppo()
    trainer = script.PPOTrainer()
    limits = []
    monkeypatch.setattr(script.faulthandler, "dump_traceback_later", lambda *a, **_: limits.append(a[0]))
    monkeypatch.setattr(script.faulthandler, "cancel_dump_traceback_later", lambda: limits.append("off"))
    batch = reward_batch(["x"], ["a"], ["1"])
    trainer.score_responses(batch)
    trainer.accuracy(batch)
    assert limits == [script.REWARD_TIMEOUT, "off"] * 2


def test_a_reward_that_ends_in_time_leaves_no_limit_behind(monkeypatch):
    """Nor does one that raises."""
    monkeypatch.setattr(PPO, "REWARD_TIMEOUT", 0.2)

    def raises(*_):
        raise KeyError("x")

    for judge in (lambda *_: [0.0], raises):
        with suppress(KeyError), PPO.time_limit():
            assert PPO.call_reward("judge", judge, ["x"], ["a"], [None]).tolist() == [0.0]
    time.sleep(0.4)  # or this process would end here


def test_the_time_limit_leaves_sigalrm_and_other_threads_alone():
    """math-verify sets SIGALRM's timer and handler for itself."""
    half = [r"\boxed{\frac{1}{2}}"], [r"\boxed{\frac{2}{4}}"]
    with PPO.time_limit():
        assert PPO.call_reward("exact_answer", rewards.exact_answer, ["x"], *half).tolist() == [1.0]
    found = []

    def score():
        with PPO.time_limit():
            found.append(PPO.call_reward("judge", lambda *_: [2.0], ["x"], ["a"], [None]).tolist())

    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    assert found == [[2.0]]


OF_THE_MACHINE = [OSError(5, "io"), MemoryError(), RuntimeError("DefaultCPUAllocator: no memory")]


@pytest.mark.parametrize("error", OF_THE_MACHINE)
@pytest.mark.parametrize("of_a_reward", [True, False])
def test_what_a_reward_raises_is_never_taken_for_the_machines(error, of_a_reward, monkeypatch):
    """The same error is a sentence where no reward raised it, and a traceback where one did."""

    class Trainer:
        def train(self):
            raise error

    monkeypatch.setattr(sys, "argv", ["ppo.py"])
    vars(error).pop("__notes__", None)
    if of_a_reward:
        error.add_note("(raised by the reward function judge)")
    with pytest.raises(type(error) if of_a_reward else SystemExit):
        PPO.run_main(Trainer)


def test_a_reward_function_that_fails_ends_the_program_and_the_run_goes_on_without(started, tmp_path):
    words = [f"OUTPUT_DIR={tmp_path}/run", "SAVE_EVERY_N_STEPS=1"]
    faulty = "REWARD_FUNCTIONS=[('exact_answer', 1.0), ('ranking_reward', 1.0), ('em_score', 1.0)]"
    done = run_script("ppo/ppo.py", *words, faulty)  # which take other arguments
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "ranking_reward: too many positional arguments" in done.stderr
    done = run_script("ppo/ppo.py", *words, "REWARD_FUNCTIONS=[('vqa_accuracies', 1.0)]")
    assert done.returncode == 2
    assert started("ppo/ppo.py", *words).returncode == 0


# ---------------------------------------------------------------- fuzz: no traceback, no hang, no blow-up

texts = st.one_of(
    st.text(),
    st.text("0123456789.,/$-+ #\\boxed{}()=^_\n", max_size=80),
    st.sampled_from(["#### 7", r"\boxed{\frac{1}{2}}", "####", r"\boxed{", "-", "1/0", "1e999", "٣", "½"]),
)


@fuzz
@given(texts, texts)
@example("#### 1/0", "#### 1/0")
@example("#### " + "9" * 5000, "#### 9")
def test_answer_parsers_take_any_text(response, answer):
    final_answer = rewards.final_answer(response)
    assert final_answer is None or final_answer in response
    for function in (rewards.exact_answer, rewards.em, rewards.f1, rewards.rouge_l):
        (value,) = function(["p"], [response], [answer])
        assert isinstance(value, float) and 0 <= value <= 1
    assert rewards.exact_answer(["p"], [response], [[answer, "#### 1"]])[0] in (0.0, 1.0)
    assert len(rewards.answer_format(["p"], [response], [None])) == 1


@pytest.mark.parametrize(
    "text",
    [
        "#### " * 200_000,
        r"\boxed{" * 140_000,
        "#" * 1_000_000,
        "1," * 500_000,
        "#### " + "1" * 1_000_000,
        "\\boxed{" + "{" * 900_000,
        " " * 1_000_000,
        "#### " + "1,000" * 200_000,
        "####" + " " * 1_000_000 + "7",
        "a " * 500_000,
        "####\t" * 200_000,
        "/1" * 500_000,
        "-$" * 500_000,
    ],
)
def test_answer_parsers_are_linear(text):
    """A megabyte each: what is linear takes a moment, what is quadratic would take hours."""
    previous = PPO.REWARD_TIMEOUT
    PPO.REWARD_TIMEOUT = 60.0  # ends this process, and shows where
    try:
        for function in (rewards.exact_answer, rewards.em, rewards.f1, rewards.answer_format):
            with PPO.time_limit():
                PPO.call_reward("parser", function, ["p"], [text], ["#### 7"])
                PPO.call_reward("parser", function, ["p"], ["#### 7"], [text])
    finally:
        PPO.REWARD_TIMEOUT = previous


def as_line(value):
    return json.dumps(value).encode()


def nested(values):
    keys = st.sampled_from(["problem", "solution", "x"])
    return st.lists(values, max_size=3) | st.dictionaries(keys, values, max_size=3)


plain_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
json_values = st.recursive(plain_values, nested, max_leaves=8)
lines = st.one_of(
    st.binary(max_size=60),
    json_values.map(as_line),
    st.fixed_dictionaries({"problem": json_values, "solution": json_values}).map(as_line),
)


def data_set(path, kind="jsonl"):
    return [{"path": str(path), "type": kind, "input": "problem", "output": "solution"}]


@fuzz
@given(st.lists(lines, max_size=4), st.sampled_from([b"\n", b"\r\n"]), st.booleans())
def test_the_loader_takes_any_file(tmp_path_factory, parts, end, bom):
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" * bom + end.join(parts))
    for kind in ("jsonl", "parquet", "csv"):
        try:
            rows = PPO.load_rows(data_set(path, kind), "TRAIN_DATASETS")
        except PPO.UserError as error:
            assert str(error).startswith("TRAIN_DATASETS: ") and "fuzz.jsonl" in str(error)
        else:
            assert rows and all(isinstance(row["prompt"], str) and row["prompt"].strip() for row in rows)
            "".join(row["prompt"] for row in rows).encode()


ABSURD = (
    "nan",
    "-inf",
    "1e999",
    "-1",
    "0",
    "10**9",
    "None",
    "True",
    "[1]",
    "(1,)",
    "'x'",
    "\0",
    "1_000",
    "0x10",
    "1j",
    "b'x'",
    "...",
    "{}",
    "[[",
    "9" * 5000,
    "lambda: 0",
)


@pytest.mark.parametrize("path", TRAINERS)
def test_any_override_is_taken_or_refused(path):
    script = load_script(path)
    before = script.constants()
    values = st.one_of(st.text(max_size=30), json_values.map(repr), st.sampled_from(ABSURD))
    overrides = st.tuples(st.sampled_from(sorted(before)), values).map("=".join)

    @settings(fuzz, max_examples=300)
    @given(st.one_of(st.text(max_size=40), overrides))
    def check(word):
        for key, value in before.items():
            setattr(script, key, value)
        try:
            script.apply_overrides([word])
            script.check_constants()
        except script.UserError as error:
            assert str(error)
        else:
            after = script.constants()
            assert set(after) == set(before)
            for key, value in after.items():
                assert not isinstance(value, float) or value == value, f"{key} is NaN"
                assert value is None or before[key] is None or type(value) is type(before[key]), key

    check()


def test_plots_are_drawn_from_metrics_that_are_not_finite(ppo, tmp_path, drawing):
    run = ppo(MAX_STEPS=1).PPOTrainer().run
    run.open_files()
    for value in (1.0, math.nan, -math.inf):
        run.write_metrics("train", {"reward": value, "entropy": 1.0})
    run.draw_plots()
    pictures = [path.read_bytes()[:4] for path in (tmp_path / "run").glob("*.png")]
    assert pictures == [b"\x89PNG"] * 2
    run.lock.release(force=True)


# ---------------------------------------------------------------- data and constants by hand


@pytest.mark.parametrize(
    "line, says",
    [
        (b"[1, 2]", "line 1: not a JSON object"),
        (b'"problem"', "line 1: not a JSON object"),
        (b'{"problem": "x"', "line 1: not a JSON object"),
        (b'{"problem": "\xff"}', "line 1: not a JSON object"),
        ('{"problem": "\u200b", "solution": "1"}'.encode(), ""),
    ],
)
def test_odd_texts_are_named_or_taken(ppo, tmp_path, line, says):
    (tmp_path / "odd.jsonl").write_bytes(line + b"\n")
    script = ppo(TRAIN_DATASETS=data_set(tmp_path / "odd.jsonl"), EVAL_DATASETS=[])
    if says:
        with pytest.raises(script.UserError, match=f"odd.jsonl {says}"):
            script.PPOTrainer()
    else:
        assert script.PPOTrainer().train_rows[0]["ids"]


def test_a_prompt_without_tokens_is_named(ppo):
    script = ppo()
    trainer = script.PPOTrainer()

    def tokenizer(text, **_):
        return {"input_ids": []}

    tokenizer.chat_template = None
    tokenizer.eos_token, tokenizer.eos_token_id = "$", 1
    trainer.tokenizer = tokenizer
    rows = [{"id": "a.jsonl:3", "prompt": "x", "columns": {}}]
    says = "TRAIN_DATASETS: a.jsonl:3: the tokenizer gives no token"
    with pytest.raises(script.UserError, match=says):
        script.encode(trainer, rows, "TRAIN_DATASETS")


@pytest.mark.parametrize("path", TRAINERS)
@pytest.mark.parametrize(
    "constant, value, says",
    [
        ("PROMPT_TEMPLATE", "Solve this:", "PROMPT_TEMPLATE.*has no {input}"),
        ("ACTOR_MODEL", " ", "ACTOR_MODEL"),
        ("TRAIN_DATASETS", [{"path": "x", "type": "jsonl"}], "TRAIN_DATASETS: a data set needs path"),
        ("REWARD_FUNCTIONS", ["exact_answer"], "REWARD_FUNCTIONS takes pairs"),
        ("ACCURACY_FUNCTION", "no_such", "ACCURACY_FUNCTION: rewards/ has no function 'no_such'"),
        ("REWARD_TIMEOUT", 0.0, "REWARD_TIMEOUT"),
    ],
)
def test_absurd_constants_are_named(path, tmp_path, monkeypatch, constant, value, says):
    monkeypatch.chdir(tmp_path)
    script = load_script(path, **{"OUTPUT_DIR": str(tmp_path / "run"), constant: value})
    with pytest.raises(script.UserError, match=says):
        getattr(script, TRAINERS[path])()
    assert [path.name for path in tmp_path.glob("*/*")] in ([], [".lock"])


def test_out_of_memory_is_a_sentence(started, tmp_path):
    done = started("grpo/grpo.py", "GROUP_SIZE=1000000000000", f"OUTPUT_DIR={tmp_path}/run")
    assert done.returncode == 2
    assert "grpo.py: out of memory" in done.stderr and "MICRO_BATCH_ROWS=1" in done.stderr
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- things from elsewhere


def one_step(script):
    script.PPOTrainer().train()


def test_a_checkpoint_of_another_trainer_or_kind_is_refused(ppo, tmp_path):
    one_step(ppo(MAX_STEPS=1))
    step = tmp_path / "run/step_1"
    grpo = load_script("grpo/grpo.py", **small("grpo/grpo.py", OUTPUT_DIR=str(tmp_path / "other")))
    says = "step_1 is of the trainer 'ppo', not 'grpo': set another OUTPUT_DIR or, to begin anew, RESUME=no"
    with pytest.raises(grpo.UserError, match=says):
        grpo.GRPOTrainer(resume_from_checkpoint=str(step))


@pytest.mark.parametrize(
    "path, says",
    [
        ("ppo/sft.py", "or, if it was an evaluation, lower EVAL_BATCH_SIZE"),
        ("rce/dpo.py", "or, if it was an evaluation, lower EVAL_BATCH_SIZE"),
        ("grpo/grpo_rec.py", "or, if it was an evaluation, lower EVAL_BEAMS"),
    ],
)
def test_out_of_memory_names_what_an_evaluation_needs(path, says):
    assert load_script(path).user_message(MemoryError("none left")).endswith(says)


@pytest.mark.parametrize("path", TRAINERS)
def test_a_checkpoint_whose_files_are_not_those_of_its_manifest_is_told(path, tmp_path):
    script = load_script(path)

    def fill(folder):
        (folder / "policy").mkdir(parents=True)
        for name in ("training_state.pt", "policy/weights", "config.json"):
            (folder / name).write_bytes(name.encode() * 10)
        manifest = {str(p.relative_to(folder)): script.file_digest(p) for p in folder.rglob("*.*")}
        manifest["policy/weights"] = script.file_digest(folder / "policy/weights")
        (folder / "manifest.json").write_text(json.dumps(manifest))

    faults = {
        # of the same size
        "policy/weights is not the file that was saved": lambda step: (step / "policy/weights").write_bytes(
            b"X" * 140
        ),
        "[Errno 2] No such file": lambda step: (step / "config.json").unlink(),
        "training_state.pt is not the file that was saved": lambda step: os.truncate(
            step / "training_state.pt", 5
        ),
        "Expecting value": lambda step: (step / "manifest.json").write_text(""),
    }
    for number, (says, spoil) in enumerate(faults.items()):
        step = tmp_path / f"step_{number}"
        script.write_atomically(step, fill)
        assert script.checkpoint_error(step) is None
        spoil(step)
        assert script.checkpoint_error(step).startswith(says)


class Bomb:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_a_pickle_bomb_does_not_go_off(ppo, tmp_path):
    script = ppo(MAX_STEPS=1)
    one_step(script)
    step = tmp_path / "run/step_1"
    mark = tmp_path / "pwned"
    for name in ("training_state.pt", "policy/pytorch_model.bin"):
        (step / name).write_bytes(pickle.dumps(Bomb(mark)))
        if name != "training_state.pt":
            (step / "policy/model.safetensors").unlink()
        files = [p for p in step.rglob("*") if p.is_file() and p.name != "manifest.json"]
        manifest = {str(p.relative_to(step)): script.file_digest(p) for p in files}
        (step / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(script.UserError, match="cannot be (used|loaded)"):
            script.PPOTrainer(resume_from_checkpoint="yes")
        assert not mark.exists()


def test_all_checkpoints_broken_is_an_error_that_touches_nothing(ppo, tmp_path):
    one_step(ppo(MAX_STEPS=2, SAVE_EVERY_N_STEPS=1))
    out = tmp_path / "run"

    def files():
        return {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}

    for step in out.glob("step_*"):
        (step / "training_state.pt").write_bytes(b"")
    before = files()
    script = ppo(MAX_STEPS=2)
    with pytest.raises(script.UserError, match="no checkpoint in .* is whole"):
        script.PPOTrainer(resume_from_checkpoint="yes")
    assert before == files()
    afresh = ppo(MAX_STEPS=1, RESUME="no")
    one_step(afresh)  # and this keeps them
    assert list(out.glob("old_*/step_2"))


def test_best_is_replaced_whole_and_comes_back_where_a_kill_came_between(tmp_path):
    """Two renames replace best/: what was there before a kill is there after the next start."""
    (tmp_path / "best.old/policy").mkdir(parents=True)
    (tmp_path / "best.old/metrics.json").write_text("old")
    run = run_in(load_script("ppo/ppo.py"), tmp_path)
    run.lock.release(force=True)
    assert (tmp_path / "best/metrics.json").read_text() == "old"
    (tmp_path / "best.old").mkdir()
    (tmp_path / "best.old/metrics.json").write_text("older")  # killed after both renames
    run_in(load_script("ppo/ppo.py"), tmp_path).lock.release()
    assert (tmp_path / "best/metrics.json").read_text() == "old"
    assert not (tmp_path / "best.old").exists()


def test_a_checkpoint_that_was_being_replaced_comes_back(ppo, tmp_path):
    """A run that was stopped after its checkpoint replaces it, see Run.save()."""
    one_step(ppo(MAX_STEPS=1))
    (tmp_path / "run/step_1").rename(tmp_path / "run/step_1.old")
    trainer = ppo(MAX_STEPS=1, RESUME="yes").PPOTrainer()
    assert trainer.run.step == 1 and not (tmp_path / "run/step_1.old").exists()


@pytest.mark.parametrize("path", TRAINERS)
def test_a_best_that_cannot_be_replaced_stays(path, tmp_path, monkeypatch):
    script = load_script(path)
    best = tmp_path / "best"
    rename = os.rename

    def fails_at_the_second(source, target):
        if source.name == "best.tmp":
            raise OSError(5, "Input/output error")
        rename(source, target)

    def fill(folder):
        folder.mkdir()
        (folder / "metrics.json").write_text("new" if best.exists() else "old")

    script.write_atomically(best, fill)
    monkeypatch.setattr(os, "rename", fails_at_the_second)
    with pytest.raises(script.UserError, match="best could not be saved"):
        script.write_atomically(best, fill)
    assert (best / "metrics.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_file_is_replaced_in_one_step_when_it_is_written_and_on_disk(tmp_path, monkeypatch):
    script = load_script("ppo/ppo.py")
    path = tmp_path / "table.csv"
    done = []

    def noted(name, function):
        monkeypatch.setattr(os, name, lambda *a: (done.append(name), function(*a))[1])

    def breaks(tmp):
        tmp.write_text("ne")
        raise OSError(28, "No space left on device")

    for text in ("old", "new"):
        noted("rename", os.rename)
        noted("fsync", os.fsync)
        script.write_atomically(path, lambda tmp: tmp.write_text(text))
        assert path.read_text() == text and done == ["fsync", "rename", "fsync"]  # the file, then its folder
        monkeypatch.undo()
        done.clear()
    with pytest.raises(script.UserError, match="table.csv could not be saved"):
        script.write_atomically(path, breaks)
    assert path.read_text() == "new"


def test_what_an_edited_save_model_raises_is_not_taken_for_a_full_disk(tmp_path):
    """torch.save and safetensors raise types of their own when the disk is full."""
    path = tmp_path / "best"
    PPO.write_atomically(path, lambda tmp: tmp.mkdir())

    def raises(error):
        def write(tmp):
            tmp.mkdir()
            raise error

        return write

    with pytest.raises(KeyError, match="head"):
        PPO.write_atomically(path, raises(KeyError("head")))
    full = [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ]
    for error in full:
        with pytest.raises(PPO.UserError, match="best could not be saved.*make room"):
            PPO.write_atomically(path, raises(error))
    with pytest.raises(PPO.UserError, match="best could not be saved.*make room"):
        PPO.write_atomically(path, lambda tmp: torch.save(torch.zeros(10_000), "/dev/full"))
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
