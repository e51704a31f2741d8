"""What a user meets: overrides, data, errors, files, resume, signals. Runs ppo/ppo.py as a user does where
that matters; what a block does that all trainers have is tried in each of them."""

import errno
import functools
import gc
import io
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from conftest import (
    ROOT,
    TINY,
    TRAINERS,
    assert_same_state,
    load_script,
    policy_with_two_ends,
    read,
    reward_batch,
    run_script,
    small,
    untimed,
    words_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from program import Program
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

# The other trainers by -m sweep: what is tested stands in the blocks that they share
SOME = [pytest.param("ppo/ppo.py", marks=pytest.mark.sweep), "grpo/grpo.py"]
SOME += [pytest.param("rce/rce.py", marks=pytest.mark.sweep)]


def jsonl(path, *lines):
    """A .jsonl file of these objects, or lines as they are; the data set that it is."""
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return {"path": str(path), "type": "jsonl", "input": "problem", "output": "solution"}


loaded = functools.cache(load_script)


def joined(tensors):
    return torch.cat([x.detach().flatten().clone() for x in tensors])


# ---------------------------------------------------------------- the first line


@pytest.mark.parametrize("path", [*TRAINERS, "ppo/ppo_rag.py", "grpo/grpo_rec.py", "rce/rce_icl.py"])
def test_the_first_line_stands_before_torch_is_imported(tmp_path, path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch')")
    for number, says in (("0", f"{Path(path).name} loads torch, models and data\n"), ("1", "")):
        words = {"env": {**os.environ, "PYTHONPATH": str(tmp_path), "RANK": number}, "text": True}
        done = subprocess.run([sys.executable, ROOT / path], capture_output=True, **words)
        assert (done.stdout, done.stderr) == (says, "torch\n")


# ---------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    "word, value",
    [
        ("BATCH_SIZE=3", 3),
        ("LEARNING_RATE=1", 1.0),
        ("LEARNING_RATE=1e-6", 1e-6),
        ("USE_WANDB=true", True),
        ("USE_LR_SCHEDULER=True", True),
        ("MAX_STEPS=None", None),
        ("MAX_STEPS=7", 7),
        ("KL_TARGET=0.1", 0.1),
        ("CRITIC_MODEL=None", None),
        ("CRITIC_MODEL=some/model", "some/model"),
        ("OUTPUT_DIR=a=b", "a=b"),
        ("REWARD_FUNCTIONS=[('f1', 0.5)]", [("f1", 0.5)]),
        ("ACTOR_MODEL=123", "123"),
        ("OUTPUT_DIR=None", "None"),
    ],
)
def test_an_override_takes_the_constants_own_type(ppo, word, value):
    script = ppo()
    script.apply_overrides([word])
    got = getattr(script, word.partition("=")[0])
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    "word, says",
    [
        ("BATCHSIZE=3", "did you mean BATCH_SIZE?"),
        ("learning_rate=1", "did you mean LEARNING_RATE?"),
        ("nonsense", "KEY=VALUE"),
        ("BATCH_SIZE=2.5", "BATCH_SIZE takes int"),
        ("BATCH_SIZE=True", "takes int"),
        ("BATCH_SIZE=", "takes int"),
        ("OUTPUT_DIR=", "OUTPUT_DIR takes str"),
        ("ACTOR_MODEL= ", "takes str"),
        ("LEARNING_RATE=fast", "takes float"),
        ("USE_WANDB=1", "takes bool"),
        ("MAX_STEPS=x", "takes int or None"),
        ("TRAIN_DATASETS=x.jsonl", "takes list"),
        ("_VALID_RANGES={}", "KEY=VALUE"),
        ("ROOT=/", "KEY=VALUE"),
        ("BATCH_SIZE=" + "[" * 5000, "takes int"),
    ],
)
def test_a_wrong_override_names_what_to_do(ppo, word, says):
    script = ppo()
    with pytest.raises(script.UserError, match=says.replace("?", r"\?")):
        script.apply_overrides([word])


ALL_TRAINERS = [*TRAINERS, "ppo/sft.py", "ppo/reward_model.py", "rce/dpo.py"]
ALL_TRAINERS += ["ppo/ppo_rag.py", "grpo/grpo_rec.py", "rce/rce_icl.py"]


def test_a_file_of_overrides_is_read_line_by_line(ppo, tmp_path):
    """Blanks within a value stay; a later argument wins."""
    script = ppo()
    (tmp_path / "words.txt").write_text(
        "\ufeff# mine\n\nSEED=7\r\n  PROMPT_TEMPLATE=Solve {input} now  \nMAX_STEPS=3"
    )
    script.apply_overrides(["MAX_STEPS=2", f"@{tmp_path}/words.txt", "SEED=8"])
    assert (script.SEED, script.MAX_STEPS, script.PROMPT_TEMPLATE) == (8, 3, "Solve {input} now")


@pytest.mark.parametrize(
    "text, says",
    [
        (None, "words.txt: the file cannot be read .*No such file.*one KEY=VALUE per line"),
        ("", "words.txt: the file has no line: it takes a text file with one KEY=VALUE per line"),
        ("# nothing\n\n", "words.txt: the file has no line"),
        (b"\xff\xfe\x00", "words.txt: the file cannot be read .*codec"),
        ("SEED=3\nMAX_STEP=9", "'MAX_STEP=9' is not KEY=VALUE .* did you mean MAX_STEPS"),
    ],
)
def test_a_file_of_overrides_that_is_missing_or_empty_is_refused(ppo, tmp_path, text, says):
    """$(cat words.txt) of a missing file leaves no argument, and the shipped data would be trained on."""
    script = ppo()
    if text is not None:
        (tmp_path / "words.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(script.UserError, match=says):
        script.apply_overrides([f"@{tmp_path}/words.txt"])


def test_a_constant_of_another_trainer_is_answered_with_this_ones():
    modules = {file: load_script(file) for file in ALL_TRAINERS}
    names = {file: module.constants().keys() for file, module in modules.items()}
    for file, module in modules.items():
        for key, here in module._INSTEAD_HERE.items():
            assert key not in names[file] and any(key in others for others in names.values()), (file, key)
            known = re.findall(r"[A-Z0-9]+_[A-Z_]+|[A-Z]{4,}", here)
            assert known and set(known) <= names[file], (file, here)
            with pytest.raises(
                module.UserError, match=f"{key} is a constant of other trainers; here set {here.split()[0]}"
            ):
                module.apply_overrides([f"{key}=3"])
    icl = modules["rce/rce_icl.py"]
    with pytest.raises(icl.UserError, match="MAX_STEPS=5: .* here set RCE_EPOCHS and GRPO_EPOCHS"):
        icl.apply_overrides(["MAX_STEPS=5"])


@pytest.mark.parametrize(
    "constant, value",
    [
        ("BATCH_SIZE", 0),
        ("TEMPERATURE", 0.0),
        ("GAMMA", 1.5),
        ("LEARNING_RATE", float("nan")),
        ("KL_COEF", -1.0),
        ("DTYPE", "float16"),
        ("LR_SCHEDULER_TYPE", "step"),
        ("MAX_GRAD_NORM", -1.0),
        ("DEVICE", "cuda:99"),
        ("REWARD_FUNCTIONS", [("exact", 1.0)]),
        ("REWARD_FUNCTIONS", []),
        ("ACTOR_MODEL", "/no/such/model"),
        ("RESUME", "/no/such/checkpoint"),
        ("MAX_PROMPT_TOKENS", 3),
    ],
)
def test_a_constant_that_cannot_be_is_named_before_anything_is_written(ppo, tmp_path, constant, value):
    script = ppo(**{constant: value})
    with pytest.raises(script.UserError) as error:
        script.PPOTrainer()
    assert str(error.value).splitlines() == [str(error.value)]
    assert (constant if constant != "RESUME" else "/no/such/checkpoint") in str(error.value)
    assert [path.name for path in tmp_path.glob("*/*")] in ([], [".lock"])


# ---------------------------------------------------------------- data


def test_jsonl_parquet_and_hub_rows_mix(ppo, tmp_path):
    lines = [
        {"problem": "Tom has 1 apples.", "solution": "#### 1"},
        b"",
        {"problem": "Tom has 2 apples.", "solution": 2},
    ]
    first = jsonl(tmp_path / "a.jsonl", *lines)
    table = pyarrow.Table.from_pylist([{"question": "Tom has 3 apples.", "answer": "#### 3"}])
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    second = {"path": str(tmp_path / "b.parquet"), "type": "parquet", "input": "question", "output": "answer"}
    (tmp_path / "hub").mkdir()  # the datasets library takes a folder where a hub name goes
    shutil.copy(tmp_path / "b.parquet", tmp_path / "hub/train.parquet")
    third = {"path": str(tmp_path / "hub"), "type": "hub", "input": "question"}
    rows = ppo(TRAIN_DATASETS=[first, second, third]).PPOTrainer().train_rows
    assert [row["answer"] for row in rows] == ["#### 1", "2", "#### 3", None]
    assert [row["id"] for row in rows[:3]] == ["a.jsonl:1", "a.jsonl:3", "b.parquet:1"]


@pytest.mark.parametrize(
    "lines, says",
    [
        ([{"problem": "x", "solution": "y"}, b'{"problem": "x"'], "line 2: not a JSON object"),
        ([b"\xff\xfe"], "line 1: not a JSON object"),
        ([{"problem": "x"}], "line 1: there is no value for column 'solution'; the row has \\['problem'\\]"),
        ([[1]], "line 1: not a JSON object"),
        ([{"problem": " ", "solution": "y"}], "line 1: 'problem': a prompt is a text"),
        ([{"problem": 5, "solution": "y"}], "'problem': a prompt is a text"),
        ([], "the data set is empty"),
        ([b"", b" "], "the data set is empty"),
    ],
)
def test_a_bad_line_is_named(ppo, tmp_path, lines, says):
    script = ppo(TRAIN_DATASETS=[jsonl(tmp_path / "bad.jsonl", *lines)])
    with pytest.raises(script.UserError, match=f"bad.jsonl.*{says}"):
        script.PPOTrainer()


@pytest.mark.parametrize(
    "change, says",
    [
        ({"path": "/no/such/file"}, "No such file"),
        ({"type": "csv"}, "line 2: there is no value for column 'problem'"),
        ({"type": "tsv"}, "cannot be read as tsv .the types are jsonl, csv, parquet and hub"),
        ({"input": "question"}, "line 1: there is no value for column 'question'"),
        ({"colour": "red"}, "colour"),
        ({"type": "parquet"}, "cannot be read as parquet"),
    ],
)
def test_a_bad_data_set_is_named(ppo, change, says):
    good = {"path": str(TINY / "train.jsonl"), "type": "jsonl", "input": "problem", "output": "solution"}
    script = ppo(TRAIN_DATASETS=[{**good, **change}])
    with pytest.raises(script.UserError, match=says):
        script.PPOTrainer()


def test_rows_of_a_csv_file_are_read_with_the_lines_they_end_on(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbfproblem,solution,level\r\n"How many,\r\nin all?",3,easy\r\nNow?,"4",\r\n')
    data = [{"path": str(path), "type": "csv", "input": "problem", "output": "solution"}]
    for script in map(load_script, TRAINERS):
        first, second = script.load_rows(data, "TRAIN_DATASETS")
        assert (first["id"], first["prompt"], first["answer"]) == ("rows.csv:3", "How many,\r\nin all?", "3")
        assert (second["id"], second["columns"]["level"]) == ("rows.csv:4", None)
        for odd in (b"one\n", b"one,2,easy,too much\n"):
            (tmp_path / "odd.csv").write_bytes(path.read_bytes() + odd)
            with pytest.raises(script.UserError, match="odd.csv line 5: its number of fields differs"):
                script.load_rows([{**data[0], "path": str(tmp_path / "odd.csv")}], "TRAIN_DATASETS")
        with pytest.raises(script.UserError, match="line 3: there is no value for column 'question'"):
            script.load_rows([{**data[0], "input": "question"}], "TRAIN_DATASETS")
        for odd, says in (
            (b'"so', "cannot be read as csv .unexpected"),
            (b"one,,\n", "there is no value for column 'solution'"),
        ):
            (tmp_path / "odd.csv").write_bytes(path.read_bytes() + odd)
            with pytest.raises(script.UserError, match=f"odd.csv line 5: {says}"):
                script.load_rows([{**data[0], "path": str(tmp_path / "odd.csv")}], "TRAIN_DATASETS")


def test_prompts_that_are_too_long_are_left_out_and_counted(ppo, capsys):
    rows = ppo(MAX_PROMPT_TOKENS=26, EVAL_DATASETS=[]).PPOTrainer().train_rows
    said = capsys.readouterr().out
    assert f"left out {24 - len(rows)} of 24 prompts" in said
    assert "longer than MAX_PROMPT_TOKENS = 26" in said
    assert 0 < len(rows) < 24 and max(len(row["ids"]) for row in rows) <= 26


# ---------------------------------------------------------------- models


def drop_one(weights):
    del weights["model.layers.1.mlp.up_proj.weight"]


def add_one(weights):
    weights["extra"] = torch.zeros(1)


def test_models_with_missing_or_unexpected_weights_are_refused(ppo, tmp_path):
    from safetensors.torch import load_file, save_file

    for change in (drop_one, add_one):
        folder = tmp_path / change.__name__
        shutil.copytree(TINY / "policy", folder)
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        script = ppo(ACTOR_MODEL=str(folder))
        with pytest.raises(script.UserError, match="ACTOR_MODEL.*(model.layers.1.mlp.up_proj.weight|extra)"):
            script.PPOTrainer()
    script = ppo(REWARD_MODEL=str(TINY / "policy"))
    with pytest.raises(script.UserError, match="REWARD_MODEL.*score.weight"):
        script.PPOTrainer()


def test_a_tokenizer_without_eos_is_refused(ppo, tmp_path):
    shutil.copytree(TINY / "policy", tmp_path / "model")
    config = json.loads((tmp_path / "model/tokenizer_config.json").read_text())
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    script = ppo(ACTOR_MODEL=str(tmp_path / "model"))
    with pytest.raises(script.UserError, match="no EOS token"):
        script.PPOTrainer()


@pytest.mark.parametrize(
    "reward, says",
    [
        (lambda p, r, a: [1.0], "must return 4 finite numbers, one per response; it returned .1.0., of"),
        (lambda p, r, a: [float("nan")] * 4, "it returned .nan, nan, nan, nan"),
        (lambda p, r, a: ["good"] * 4, "<lambda>"),
        (lambda p, r, a: None, "<lambda>"),
    ],
)
def test_a_reward_function_that_returns_nonsense_is_named(ppo, reward, says):
    script = ppo(REWARD_FUNCTIONS=[(reward, 1.0)])
    with pytest.raises(script.UserError, match=says):
        script.PPOTrainer().score_responses(reward_batch(["q"] * 4, ["r"] * 4, ["a"] * 4))


def test_rewards_without_a_name_of_their_own_get_one_that_stays(ppo):
    class Judge:
        def __call__(self, *columns):
            return [1.0] * len(columns[0])

    script = ppo()
    functions = [Judge(), *[lambda *x: 0] * 3, "exact_answer"]
    resolved = script.resolve_rewards([(function, 1.0) for function in functions], "REWARD_FUNCTIONS")
    names = [name for name, *_ in resolved]
    assert names == ["Judge", "<lambda>", "<lambda>_2", "<lambda>_3", "exact_answer"]


@pytest.mark.parametrize(
    "second, says",
    [
        (({"length": [1.0]}, [1.0, 2.0]), r"reward_parts\['length'\] must return 2 finite numbers"),
        (({"length": [1.0, math.nan]}, [1.0, 2.0]), r"reward_parts\['length'\] must return 2 finite numbers"),
    ],
)
def test_parts_are_a_number_per_response(ppo, second, says):
    script = ppo(BATCH_SIZE=1)
    calls = iter([({"length": [1.0, 2.0]}, [1.0, 2.0]), second])
    trainer = SimpleNamespace()

    def score(*lists):
        trainer.reward_parts, scores = next(calls)
        return scores

    with pytest.raises(script.UserError, match=says):
        script.score_over_ranks(trainer, "score", score, reward_batch(*["abcd"] * 3))


def test_a_reward_on_another_device_or_with_a_gradient_is_taken(ppo):
    class Elsewhere(torch.Tensor):
        def cpu(self):
            return torch.tensor([1.0, 2.0])

    script = ppo()
    values = torch.zeros(2).as_subclass(Elsewhere)
    assert script.check_scores("judge", values, 2).tolist() == [1.0, 2.0]


def test_data_without_answers_is_said_to_need_them(ppo):
    spec = {"path": str(TINY / "train.jsonl"), "type": "jsonl", "input": "problem"}
    script = ppo(TRAIN_DATASETS=[spec])
    with pytest.raises(script.UserError, match='^exact_answer compares .* "output" column'):
        script.PPOTrainer().train()


def test_an_evaluation_without_what_best_follows_is_named(ppo):
    script = ppo()
    trainer = script.PPOTrainer()
    trainer.evaluate = lambda: {"my_metric": 1.0}
    with pytest.raises(
        script.UserError, match=r"evaluate\(\) must return the metric reward, which best/ and patience"
    ):
        trainer.train()


# ---------------------------------------------------------------- a run and its files

METRICS = """
step epoch policy_loss value_loss reward reward/reward_model reward/exact_answer advantage_mean entropy kl
approx_kl clip_fraction first_ratio_deviation max_ratio_deviation mean_abs_log_ratio grad_norm learning_rate
response_length truncated_fraction zero_variance_groups explained_variance tokens_per_second seconds/rollout
seconds/score seconds/update
""".split()


def test_a_run_writes_what_the_design_says(ppo, tmp_path, capsys, drawing):
    out = tmp_path / "run"
    script = ppo(
        MAX_STEPS=3,
        SAVE_EVERY_N_STEPS=1,
        KEEP_LAST_N_CHECKPOINTS=2,
        EVAL_EVERY_N_STEPS=1,
        KL_COEF=0.1,
        REWARD_MODEL=str(TINY / "reward_model"),
    )
    trainer = script.PPOTrainer()
    metrics = trainer.train()
    assert sorted(p.name for p in out.glob("[!.]*")) == [
        "best",
        "logs",
        "ppo_metrics_with_entropy.png",
        "step_2",
        "step_3",
        "training_config.json",
        "training_metrics_detailed.png",
    ]
    assert sorted(p.name for p in out.glob(".*")) == [".lock"]

    records = read(out / "logs/metrics.jsonl")
    steps = [(record["phase"], record["step"]) for record in records]
    assert steps == [("eval", 0)] + [(phase, step) for step in (1, 2, 3) for phase in ("train", "eval")]
    assert set(METRICS) <= records[1].keys()
    assert all(math.isfinite(records[1][key]) for key in METRICS)
    assert metrics == {k: v for k, v in records[-1].items() if k not in ("phase", "step", "seconds/evaluate")}
    samples = read(out / "logs/samples.jsonl")
    assert [sample["step"] for sample in samples] == [1] * 4 + [2] * 4 + [3] * 4
    assert {"prompt", "response", "reward", "reward/exact_answer", "advantage"} <= samples[0].keys()
    (log,) = (out / "logs").glob("training_*.log")
    said = capsys.readouterr().out
    assert "Epoch 1/1: PL:" in said
    assert set(said.strip().splitlines()) <= set(log.read_text().splitlines())
    config = json.loads((out / "training_config.json").read_text())
    assert config["constants"]["MAX_STEPS"] == 3 and config["torch"] == torch.__version__

    kinds = {
        "step_3/policy": AutoModelForCausalLM,
        "step_3/critic": AutoModelForTokenClassification,
        "best/policy": AutoModelForCausalLM,
    }
    for folder, auto in kinds.items():
        model, info = auto.from_pretrained(out / folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert len(AutoTokenizer.from_pretrained(out / folder)) == 82
    model = AutoModelForCausalLM.from_pretrained(out / "step_3/policy")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), trainer.actor.parameters()))
    state = torch.load(out / "step_3/training_state.pt", weights_only=True)
    assert state["run"]["step"] == 3
    assert state["optimizers"]["policy"]["state"] and state["optimizers"]["critic"]["state"]
    best = json.loads((out / "best/metrics.json").read_text())
    assert best["reward"] == max(record["reward"] for record in records if record["phase"] == "eval")


def words(out, **more):
    """The command line of a run of six steps that saves twice and moves all that a checkpoint keeps."""
    constants = {
        "OUTPUT_DIR": out,
        "MAX_STEPS": 6,
        "SAVE_EVERY_N_STEPS": 3,
        "EVAL_EVERY_N_STEPS": 2,
        "MINI_BATCHES": 2,
        "KL_COEF": 0.1,
        "KL_TARGET": 0.01,
        "USE_LR_SCHEDULER": True,
        "LR_SCHEDULER_TYPE": "plateau",
        **more,
    }
    return [f"{key}={value}" for key, value in constants.items()]


def assert_same_run(a, b):
    """Two finished runs are equal to the bit: weights, optimizer state, generators, metrics, samples."""
    files = (
        "step_6/policy/model.safetensors",
        "step_6/critic/model.safetensors",
        "best/policy/model.safetensors",
        "logs/samples.jsonl",
    )
    for name in files:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    assert_same_state(a / "step_6/training_state.pt", b / "step_6/training_state.pt")
    assert untimed(a / "logs/metrics.jsonl") == untimed(b / "logs/metrics.jsonl")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "run"
    done = run_script("ppo/ppo.py", *words(out))
    assert done.returncode == 0, done.stderr
    return out


def start_and_signal(out, number, step):
    """Start a run, send it a signal as soon as a step stands in its metrics; its exit code and output."""
    process = Program(ROOT / "ppo/ppo.py", *words_of("ppo/ppo.py", *words(out)), cwd=ROOT, merged=True)
    deadline = time.time() + 120
    metrics = out / "logs/metrics.jsonl"
    while time.time() < deadline and process.poll() is None:
        if metrics.exists() and f'"phase": "train", "step": {step},' in metrics.read_text():
            process.send_signal(number)
            break
        time.sleep(0.005)
    done = process.wait(120)
    return done.returncode, done.stdout


def test_six_steps_equal_three_a_kill_a_resume_and_three_bit_for_bit(unbroken, tmp_path):
    out = tmp_path / "run"
    code, _ = start_and_signal(out, signal.SIGKILL, 4)
    assert code == -signal.SIGKILL
    assert (out / "step_3").exists() and not (out / "step_6").exists()
    done = run_script("ppo/ppo.py", *words(out))
    assert done.returncode == 0, done.stderr
    assert f"Found checkpoint: {out}/step_3" in done.stdout and "Changed" not in done.stdout
    assert_same_run(unbroken, out)


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_sigterm_and_ctrl_c_finish_the_step_save_draw_and_leave(unbroken, started, tmp_path, number, code):
    out = tmp_path / "run"
    got, said = start_and_signal(out, number, 1)
    assert got == code and "Traceback" not in said and "Stopped at step" in said
    (saved,) = out.glob("step_*")
    assert 1 <= int(saved.name[5:]) <= 3 and (out / "ppo_metrics_with_entropy.png").exists()
    assert started("ppo/ppo.py", *words(out)).returncode == 0
    assert_same_run(unbroken, out)


def copy_run(run, tmp_path):
    """A copy of a finished run, with the checkpoint of step 3 as its newest."""
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/step_6")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "name", ["policy/model.safetensors", "training_state.pt", "manifest.json", "config.json"]
)
@pytest.mark.parametrize("fault", ["truncate", "flip", "delete"])
def test_a_broken_checkpoint_is_named_and_skipped(unbroken, ppo, tmp_path, name, fault, capsys):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    file = out / "step_6" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if fault == "truncate":
        os.truncate(file, 10)
    elif fault == "flip":
        file.write_bytes(data)
    else:
        file.unlink()
    script = ppo()
    assert script.choose_checkpoint("yes", out, print) == out / "step_3"
    said = capsys.readouterr().out
    assert f"WARNING: skipping the broken checkpoint {out}/step_6" in said
    with pytest.raises(script.UserError, match=f"no checkpoint in {out}/step_6 is whole"):
        script.choose_checkpoint(str(out / "step_6"), out, print)


def test_resuming_past_a_broken_checkpoint_keeps_it_aside(unbroken, started, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    os.truncate(out / "step_6/training_state.pt", 100)
    assert started("ppo/ppo.py", *words(out)).returncode == 0
    assert_same_run(unbroken, out)
    assert len(list(out.glob("old_*/step_6"))) == 1


def test_going_back_to_an_earlier_checkpoint_keeps_the_best_policy_of_the_future_given_up(ppo, tmp_path):
    out = tmp_path / "run"

    def train(rewards, **more):
        every = {"SAVE_EVERY_N_STEPS": 1, "EVAL_EVERY_N_STEPS": 1, "KEEP_LAST_N_CHECKPOINTS": 9}
        script = ppo(MAX_STEPS=4, **every, **more)
        trainer = script.PPOTrainer()
        trainer.evaluate = lambda: {"reward": rewards[trainer.run.step]}
        trainer.train()
        return json.loads((out / "best/metrics.json").read_text())

    assert train([0.0, 1.0, 2.0, 3.0, 4.0])["step"] == 4
    assert train([0.0, 1.0, 0.5, 0.2, 0.3], RESUME=str(out / "step_1"), LEARNING_RATE=0.0)["step"] == 2
    (kept,) = out.glob("old_*/best/metrics.json")
    assert json.loads(kept.read_text())["reward"] == 4.0
    # a best policy of before the checkpoint stays where it is
    assert train([0.0, 1.0, 0.5, 0.2, 0.3], RESUME=str(out / "step_3"), LEARNING_RATE=1e-4)["step"] == 2
    assert len(list(out.glob("old_*/best"))) == 1


def test_a_run_that_goes_on_in_another_folder_has_a_best_policy_there(ppo, tmp_path):
    for folder, steps, resume in (("one", 2, "no"), ("two", 4, str(tmp_path / "one/step_2"))):
        script = ppo(OUTPUT_DIR=str(tmp_path / folder), MAX_STEPS=steps, RESUME=resume, EVAL_EVERY_N_STEPS=1)
        trainer = script.PPOTrainer()
        trainer.evaluate = lambda: {"reward": [0.0, 5.0, 4.0, 3.0, 2.0][trainer.run.step]}
        trainer.train()
    assert json.loads((tmp_path / "one/best/metrics.json").read_text())["step"] == 1
    assert json.loads((tmp_path / "two/best/metrics.json").read_text())["step"] == 3


@pytest.mark.parametrize(
    "word",
    [
        "PLATEAU_PATIENCE=0",
        "MAX_TRAIN_PROMPTS=-3",
        "MAX_EVAL_PROMPTS=-1",
        "WARMUP_STEPS=-1",
        "LOG_SAMPLES=-1",
        "WEIGHT_DECAY=-0.1",
        "SAVE_EVERY_N_STEPS=-1",
        "EVAL_EVERY_N_STEPS=-1",
    ],
)
def test_a_number_that_would_be_taken_for_another_is_refused(path, word):
    script = load_script(path)
    script.apply_overrides([word])
    with pytest.raises(script.UserError, match=f"{word.replace('=', ' = ')} is out of range: it takes"):
        script.check_constants()


def test_what_was_logged_after_the_checkpoint_of_its_step_is_logged_once(ppo, tmp_path):
    """RCE's mining and the second stage of a recommender write records of step N after N's checkpoint."""

    def start(**more):
        trainer = ppo(MAX_STEPS=1, **more).PPOTrainer()
        trainer.run.open_files()
        return trainer.run

    run = start()
    run.write_metrics("eval", {"reward": 0.0})
    run.save()
    run.write_metrics("mine", {"round": 1})
    run.lock.release(force=True)  # killed here
    run = start(RESUME="yes")
    run.write_metrics("mine", {"round": 1})
    run.lock.release(force=True)
    phases = [(record["phase"], record["step"]) for record in read(tmp_path / "run/logs/metrics.jsonl")]
    assert phases == [("eval", 0), ("mine", 0)]


def test_training_again_in_one_process_goes_on(ppo, tmp_path):
    script = ppo(MAX_STEPS=2, EVAL_EVERY_N_STEPS=1)
    trainer = script.PPOTrainer()
    trainer.train()
    trainer.run.signal = signal.SIGTERM  # of the training before
    trainer.run.total_steps = 3
    trainer.train()
    out = tmp_path / "run"
    assert not list(out.glob("old_*")) and (out / "best").exists()
    assert [r["step"] for r in read(out / "logs/metrics.jsonl") if r["phase"] == "train"] == [1, 2, 3]


def test_training_a_finished_run_gives_its_last_evaluation(ppo, tmp_path):
    first = ppo(MAX_STEPS=1).PPOTrainer().train()
    assert first and ppo(MAX_STEPS=1, RESUME="yes").PPOTrainer().train() == first


def test_the_folder_of_a_run_names_its_newest_checkpoint(unbroken, tmp_path, ppo):
    out = copy_run(unbroken, tmp_path)
    trainer = ppo(RESUME=str(out), OUTPUT_DIR=str(tmp_path / "other")).PPOTrainer()
    assert trainer.run.step == 3 and trainer.run.checkpoint == out / "step_3"


def test_a_wandb_that_does_not_start_is_said_before_a_move(unbroken, started, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def init(**options):
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr("wandb.init", init)
    out = copy_run(unbroken, tmp_path)
    ended = started("ppo/ppo.py", *words(out), "RESUME=no", "USE_WANDB=True")
    assert ended.returncode == 2 and "USE_WANDB = True: No API key" in ended.stderr
    assert (out / "step_3").exists() and not list(out.glob("old_*"))


KINDS = {"MAX_STEPS": int | None, "KL_TARGET": float | None}


@pytest.mark.parametrize("annotate", [None, lambda form: KINDS])
def test_overrides_read_annotations_as_python_314_keeps_them_too(ppo, annotate):
    script = ppo()
    if annotate:
        del script.__annotations__
        script.__annotate__ = annotate
    script.apply_overrides(["MAX_STEPS=7", "KL_TARGET=1"])
    assert (script.MAX_STEPS, script.KL_TARGET) == (7, 1.0)
    with pytest.raises(script.UserError, match="MAX_STEPS takes int or None"):
        script.apply_overrides(["MAX_STEPS=many"])


class Terminal:
    """A standard input where a person sits."""

    def isatty(self):
        return True


def test_answering_n_starts_afresh_and_keeps_the_old_run(unbroken, ppo, tmp_path, monkeypatch, capsys):
    out = copy_run(unbroken, tmp_path)
    old = (out / "logs/metrics.jsonl").read_bytes()
    replies = iter(["maybe", "n"])
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda prompt: next(replies))
    trainer = ppo(MAX_STEPS=1).PPOTrainer()
    assert trainer.run.step == 0 and "Found checkpoint" in capsys.readouterr().out
    trainer.train()
    (kept,) = out.glob("old_*")
    assert (kept / "logs/metrics.jsonl").read_bytes() == old
    assert (kept / "step_3/manifest.json").exists() and (kept / "best/metrics.json").exists()
    assert [r["step"] for r in read(out / "logs/metrics.jsonl")] == [0, 1, 1]


def test_answering_y_and_naming_a_checkpoint_from_python_resume(unbroken, ppo, tmp_path, monkeypatch, capsys):
    out = copy_run(unbroken, tmp_path)
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda prompt: "Y")
    assert ppo().PPOTrainer().run.step == 3
    trainer = ppo(RESUME="no", LEARNING_RATE=3e-4).PPOTrainer(resume_from_checkpoint=str(out / "step_3"))
    assert trainer.run.step == 3
    change = f"LEARNING_RATE was {ppo().LEARNING_RATE}, is 0.0003"
    assert f"Changed since the checkpoint: {change}" in capsys.readouterr().out


def test_scores_of_other_rewards_do_not_keep_a_later_best_away(each, tmp_path, capsys):
    """The rewards are a tenth of what they were. Without another step best/ stays; with one, the policies
    that follow are compared among themselves, and the best/ before is kept."""
    parts = {"MAX_EVAL_PROMPTS": 4, "EVAL_EVERY_N_STEPS": 1}
    module, trainer_class = each(MAX_STEPS=2, **parts)
    trainer_class().train()
    best = tmp_path / "run/best/metrics.json"
    before = best.read_bytes()
    changed = {"REWARD_FUNCTIONS": [(name, weight / 10) for name, weight in module.REWARD_FUNCTIONS]}
    if each.path == "rce/rce.py":  # its best/ follows pick_accuracy
        changed = {"TEMPERATURE": 0.9}
    constants = {"RESUME": "yes", **changed, **parts}
    said = "Earlier scores do not compare with the new ones: best/ and patience begin anew"
    module, trainer_class = each(MAX_STEPS=2, **constants)
    trainer_class().train()
    assert best.read_bytes() == before and said in capsys.readouterr().out
    module, trainer_class = each(MAX_STEPS=3, **constants)
    trainer = trainer_class()
    assert (trainer.run.evals_since_best, trainer.run.best_value) == (0, -math.inf)
    trainer.train()
    (old,) = (tmp_path / "run").glob("old_*/best/metrics.json")
    assert old.read_bytes() == before
    found = json.loads(best.read_text())
    records = [r for r in read(tmp_path / "run/logs/metrics.jsonl") if r["phase"] == "eval"]
    assert [r["step"] for r in records][-2:] == [2, 3] and found["step"] in (2, 3)
    by = trainer.run.best_by[0]
    assert found[by] == trainer.run.best_value == max(r[by] for r in records[-2:])
    capsys.readouterr()
    each(MAX_STEPS=4, **constants)[1]()
    assert said not in capsys.readouterr().out, "the checkpoint is of the new scores"


def test_a_repository_that_was_moved_has_changed_nothing(each, tmp_path):
    module, trainer_class = each(MAX_STEPS=1)
    trainer_class().train()
    path = tmp_path / "run/step_1/config.json"
    assert str(ROOT) not in path.read_text()
    path.write_text(json.dumps({**json.loads(path.read_text()), "ACTOR_MODEL": f"{ROOT}/data/tiny/policy"}))
    module, trainer_class = each(MAX_STEPS=1, RESUME=str(path.parent))
    manifest = path.parent / "manifest.json"  # as an older checkpoint would have it
    entries = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**entries, "config.json": module.file_digest(path)}))
    assert not trainer_class().run.has_changed


def test_the_program_that_was_started_decides_too(each, tmp_path, monkeypatch):
    module, trainer_class = each(MAX_STEPS=1)
    program = tmp_path / "mine.py"
    program.write_text("COEF = 1")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(program), raising=False)
    trainer_class().train()
    for text, changed in (("COEF = 1", False), ("COEF = 2", True)):
        program.write_text(text)
        module, trainer_class = each(MAX_STEPS=1, RESUME="yes")
        trainer = trainer_class()
        trainer.run.lock.release(force=True)
        assert trainer.run.has_changed == changed


def test_train_after_a_failed_last_save_is_refused(each, monkeypatch):
    module, trainer_class = each(MAX_STEPS=1)
    trainer = trainer_class()

    def full(path, write):
        raise OSError(28, "no space left")

    with monkeypatch.context() as patched, pytest.raises(OSError):
        patched.setattr(
            module, "write_atomically", lambda path, write: path.name == "best" or full(path, write)
        )
        patched.setattr(module, "open_log", lambda path, lines: open(path, "a"))
        trainer.train()
    with pytest.raises(RuntimeError, match="make a new trainer, which resumes"):
        trainer.train()


def test_no_log_has_a_number_that_json_lacks(each, tmp_path):
    module, trainer_class = each()
    run = trainer_class().run
    with run.session("begun"):
        run.write("samples.jsonl", {"advantage": math.nan, "reward": -math.inf, "id": "a"})
    (record,) = read(tmp_path / "run/logs/samples.jsonl")
    assert record == {"advantage": None, "reward": None, "id": "a"}


def test_moments_of_another_order_of_parameters_are_refused(each):
    module, _ = each()
    shapes = ((3, 2), (2, 5))
    optimizers = []
    for order in (shapes, shapes[::-1]):
        parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in order]
        optimizers.append(torch.optim.AdamW(parameters))
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizers[-1].step()
    saved = optimizers[0].state_dict()
    module.load_optimizer_state(torch.optim.AdamW([torch.nn.Parameter(torch.ones(s)) for s in shapes]), saved)
    with pytest.raises(ValueError, match="its optimizer's parameters have another order or other shapes"):
        module.load_optimizer_state(optimizers[1], saved)


def test_what_changes_scores_is_a_constant_of_its_file():
    for path in ALL_TRAINERS:
        script = load_script(path)
        assert set(script._CHANGE_SCORES) <= script.constants().keys(), path
        assert not set(script._CHANGE_SCORES) & set(script._MAY_CHANGE), path


@pytest.mark.parametrize("panel", ["kl", ("kl",), ("kl", "kl"), ("kl", ["kl"], 3)])
def test_a_panel_of_another_shape_is_named(each, panel):
    module, trainer_class = each(PLOT_PANELS=[("reward", ["reward"]), panel])
    with pytest.raises(module.UserError, match=r"PLOT_PANELS: .*kl.* is not a panel, such as \("):
        trainer_class()


def test_a_changed_constant_counts_after_a_resume(unbroken, ppo, tmp_path):
    out = copy_run(unbroken, tmp_path)
    trainer = ppo(RESUME="yes", KL_COEF=0.7, WEIGHT_DECAY=0.3, LEARNING_RATE=7e-5, MAX_STEPS=4).PPOTrainer()
    assert trainer.optimizers["policy"].param_groups[0]["weight_decay"] == 0.3
    trainer.train()
    last = [r for r in read(out / "logs/metrics.jsonl") if r["phase"] == "train"][-1]
    assert last["step"] == 4 and last["kl_coef"] == 0.7 and last["learning_rate"] == 7e-5


def test_a_finished_run_says_so_and_other_data_is_refused(unbroken, started, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    before = (out / "logs/metrics.jsonl").read_bytes()
    done = started("ppo/ppo.py", *words(out))
    assert done.returncode == 0 and "step 6 of 6" in done.stdout
    assert (out / "logs/metrics.jsonl").read_bytes() == before
    done = started("ppo/ppo.py", *words(out, MAX_TRAIN_PROMPTS=20))
    assert done.returncode == 2 and "24 training prompts" in done.stderr and "Traceback" not in done.stderr


def test_a_checkpoint_of_an_earlier_version_is_refused_in_a_sentence(unbroken, ppo, tmp_path):
    """One whose state was not yet in parts: the counters stood beside the optimizers."""
    out = copy_run(unbroken, tmp_path)
    script = ppo(RESUME="yes")
    state = torch.load(out / "step_3/training_state.pt", weights_only=True)
    old = {**state["run"], **state["state"], "optimizers": state["optimizers"], "rng": state["rng"]}
    torch.save(old, out / "step_3/training_state.pt")
    manifest = json.loads((out / "step_3/manifest.json").read_text())
    manifest["training_state.pt"] = script.file_digest(out / "step_3/training_state.pt")
    (out / "step_3/manifest.json").write_text(json.dumps(manifest))
    says = "step_3 cannot be used, choose another: "
    with pytest.raises(script.UserError, match=says) as error:
        script.PPOTrainer()
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("path", SOME, ids=["ppo", "grpo", "rce"])
def test_a_step_of_the_default_size_is_the_same_every_time(path, tmp_path, request):
    """Many rows share a prompt, and threads must not decide in which order their gradients are added."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    constants = {"MAX_EVAL_PROMPTS": 2, "MAX_TRAIN_PROMPTS": 64, "MAX_NEW_TOKENS": 32, "RESUME": "no"}
    if path == "rce/rce.py":
        mine = {"MINE_PROMPTS": 32, "OUTPUT_DIR": str(tmp_path / "mined")}
        load_script(path, **constants, **mine, STAGE="mine").RCETrainer().train()
        constants["CANDIDATES"] = str(tmp_path / "mined/candidates_round_1.parquet")
        constants["STAGE"] = "train"
    found = set()
    for i in range(3):
        script = load_script(path, **constants, OUTPUT_DIR=str(tmp_path / str(i)))
        trainer = getattr(script, TRAINERS[path])()
        if path == "rce/rce.py":
            trainer.run.open_files()
            trainer.prepare_round()
            batch = trainer.next_batch()
        elif path == "grpo/grpo.py":
            batch = trainer.rollout_and_score()
            trainer.compute_advantages(batch)
            trainer.select_tokens(batch)
        else:
            batch = trainer.rollout(trainer.next_prompts())
            trainer.score(batch)
            trainer.compute_advantages(batch)
        trainer.update(batch)
        weights = joined(p for model in trainer.models.values() for p in model.parameters())
        found.add(weights.numpy().tobytes())
    assert len(found) == 1


def test_several_gold_answers_stay_a_list(ppo, tmp_path):
    lines = [{"problem": "Tom has 1 apples.", "solution": answer} for answer in (["1", 2, True], 2.5)]
    data = jsonl(tmp_path / "a.jsonl", *lines)
    rows = ppo(TRAIN_DATASETS=[data]).PPOTrainer().train_rows
    assert [row["answer"] for row in rows] == [["1", "2", "true"], "2.5"]


def draw():
    """A number of each generator."""
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_generators_of_python_numpy_and_torch_are_restored(ppo):
    script = ppo()
    draw()
    buffer = io.BytesIO()
    torch.save(script.get_rng_state(), buffer)
    first = draw()
    buffer.seek(0)
    script.set_rng_state(torch.load(buffer, weights_only=True))
    assert draw() == first


def test_a_disk_that_fills_while_saving_leaves_the_last_good_checkpoint(ppo, tmp_path, monkeypatch):
    script = ppo(MAX_STEPS=4, SAVE_EVERY_N_STEPS=1)
    trainer = script.PPOTrainer()
    run = trainer.run
    fill = run.write_checkpoint

    def full(*parts):
        fill(*parts)
        if run.step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run, "write_checkpoint", full)
    with pytest.raises(script.UserError, match="step_2 could not be saved.*last good checkpoint"):
        trainer.train()
    out = tmp_path / "run"
    assert [p.name for p in out.glob("step_*")] == ["step_1"]
    assert script.checkpoint_error(out / "step_1") is None


NO_FILE = "TRAIN_DATASETS=[{'path': '/no/such/file', 'type': 'jsonl', 'input': 'q'}]"


@pytest.mark.parametrize(
    "word, says",
    [
        ("ACTOR_MODEL=/no/such/model", "ACTOR_MODEL"),
        ("BATCHSIZE=1", "BATCH_SIZE"),
        (NO_FILE, "No such file"),
    ],
)
def test_errors_at_the_command_line_are_one_sentence_and_exit_code_2(path, started, tmp_path, word, says):
    done = started(path, f"OUTPUT_DIR={tmp_path}/run", word)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith(f"\n{Path(path).name}: ")


def test_an_error_of_a_program_is_one_sentence_and_exit_code_2(tmp_path):
    """As above, in a process of its own."""
    done = run_script("ppo/ppo.py", f"OUTPUT_DIR={tmp_path}/run", "ACTOR_MODEL=/no/such/model")
    assert done.returncode == 2 and "ACTOR_MODEL" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_early_stopping_and_plateau_count_evaluations_without_a_better_reward(ppo, monkeypatch, tmp_path):
    script = ppo(
        MAX_STEPS=9,
        EVAL_EVERY_N_STEPS=1,
        EARLY_STOPPING_PATIENCE=3,
        PLATEAU_PATIENCE=2,
        USE_LR_SCHEDULER=True,
        LR_SCHEDULER_TYPE="plateau",
        LEARNING_RATE=1e-5,
    )
    trainer = script.PPOTrainer()
    values = iter([0.1, 0.5, 0.4, 0.5, 0.3, 0.9])
    monkeypatch.setattr(trainer, "evaluate", lambda: {"reward": next(values)})
    trainer.train()
    assert trainer.run.step == 4 and trainer.run.best_value == 0.5
    records = read(tmp_path / "run/logs/metrics.jsonl")
    rates = [record["learning_rate"] for record in records if record["phase"] == "train"]
    assert rates == pytest.approx([1e-5, 1e-5, 1e-5, 0.5e-5])
    assert json.loads((tmp_path / "run/best/metrics.json").read_text())["step"] == 1


# ---------------------------------------------------------------- what every trainer does: see mutants.py


def test_every_epoch_sees_every_prompt_once_in_an_order_of_its_own(each):
    script, _ = each()
    state = SimpleNamespace(epoch=0, order=None, cursor=0)
    every = list(range(10))
    orders = []
    for epoch in (1, 2, 3):
        steps = [script.next_rows(every, state, 4) for _ in range(3)]
        assert [len(rows) for rows in steps] == [4, 4, 2] and state.epoch == epoch
        orders.append([row for rows in steps for row in rows])
        assert sorted(orders[-1]) == every != orders[-1]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def numbers_of(values):
    return [key for key, value in values.items() if isinstance(value, (int, float)) and key != "prompts"]


def test_a_checkpoint_keeps_every_field_of_the_state_by_itself(each, tmp_path):
    constants = {"RESUME": "no"}
    if each.path == "ppo/ppo.py":  # otherwise KL_COEF decides, not the checkpoint
        constants |= {"KL_COEF": 0.1, "KL_TARGET": 0.1}
    _, trainer_class = each(**constants)
    trainer = trainer_class()
    run = trainer.run
    run.open_files()
    counters = {key: getattr(run, key) for key in run.checkpointed_fields}
    kept = {"step", "evaluated_at", "best_value", "patience_value", "evals_since_best", "halvings", "skipped"}
    assert kept <= set(numbers_of(counters))
    assert {"epoch", "cursor"} <= set(numbers_of(vars(trainer.state)))
    number = 2  # each its own, so that no two can change places
    for holder, values in ((run, counters), (trainer.state, dict(vars(trainer.state)))):
        for key in numbers_of(values):
            setattr(holder, key, type(values[key])(number))
            number += 1
    run.wandb_id = "an id"
    trainer.state.order = torch.arange(24).flip(0)
    folder = tmp_path / "run/step_9"
    run.step = 9
    run.save()
    run.lock.release(force=True)
    again = trainer_class(str(folder))
    for key in run.checkpointed_fields:
        assert getattr(again.run, key) == getattr(run, key), key
    for key, value in vars(trainer.state).items():
        got = getattr(again.state, key)
        if isinstance(value, tuple):
            assert all(map(torch.equal, got, value)), key
            continue
        assert torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value, key


def graded(trainer):
    """Give every weight of every model a gradient; returns them, by the model's name."""
    torch.manual_seed(0)
    for model in trainer.models.values():
        for p in model.parameters():
            p.grad = torch.randn_like(p)
    return {name: joined(p.grad for p in model.parameters()) for name, model in trainer.models.items()}


def test_each_models_gradient_is_clipped_to_max_grad_norm(each):
    script, trainer_class = each(MAX_GRAD_NORM=0.25)
    trainer = trainer_class()
    before = graded(trainer)
    stepped = {}
    for name, model in trainer.models.items():

        def step(name=name, model=model):
            stepped[name] = joined(p.grad for p in model.parameters())

        trainer.optimizers[name].step = step
    norms = script.clip_and_step(trainer.optimizers.values(), 0.0, trainer.run, [])
    assert stepped.keys() == before.keys()
    # norms are sums of squares of a few hundred thousand float32 numbers
    assert norms == pytest.approx([g.double().norm().item() for g in before.values()], rel=1e-5)
    for name, gradient in before.items():
        want = gradient * (0.25 / gradient.double().norm()).float()
        torch.testing.assert_close(stepped[name], want, rtol=1e-5, atol=0)


def test_each_optimizer_has_its_own_rate_and_the_weight_decay(each):
    script, trainer_class = each(WEIGHT_DECAY=0.5, LEARNING_RATE=0.01)
    if hasattr(script, "CRITIC_LEARNING_RATE"):
        script.CRITIC_LEARNING_RATE = 0.03
    trainer = trainer_class()
    for model in trainer.models.values():
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    before = {name: joined(model.parameters()) for name, model in trainer.models.items()}
    script.clip_and_step(trainer.optimizers.values(), 0.0, trainer.run, [])
    for name, model in trainer.models.items():  # AdamW without a gradient only shrinks: w (1 - rate decay)
        rate = 0.03 if name == "critic" else 0.01
        want = before[name] * (1 - rate * 0.5)
        torch.testing.assert_close(joined(model.parameters()), want, rtol=1e-6, atol=0)


def test_a_prompt_of_max_prompt_tokens_is_kept_and_one_more_is_not(each):
    script, trainer_class = each(EVAL_DATASETS=[])
    trainer = trainer_class()
    row = {"id": "a:1", "prompt": trainer.train_rows[0]["prompt"], "columns": {}}
    length = len(trainer.train_rows[0]["ids"])
    for longest, kept in ((length + 1, 1), (length, 1), (length - 1, 0)):
        script.MAX_PROMPT_TOKENS = longest
        rows = script.encode(trainer, [dict(row)], "here")
        assert len(rows) == kept


def with_bos(folder, source, chat_template):
    """A copy of a model whose tokenizer puts "$" before every text by itself, as Llama's does its BOS."""
    shutil.copytree(source, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "$", "type_id": 0}})
    tokenizer["post_processor"]["special_tokens"] = {"$": {"id": "$", "ids": [50], "tokens": ["$"]}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").unlink()
    if chat_template:
        (folder / "chat_template.jinja").write_text(chat_template)
    return str(folder)


CHAT = """{{ '$' }}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}{{ '(' + m['content'] }}
    {%- else %}{{ ')' + m['content'] + '<eos>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ ')' }}{% endif %}"""


def test_a_prompt_begins_with_one_bos_with_and_without_a_chat_template(each, tmp_path):
    for template in ("", CHAT):
        model = with_bos(tmp_path / f"model {len(template)}", TINY / "policy", template)
        _, trainer_class = each(ACTOR_MODEL=model, EVAL_DATASETS=[])
        trainer = trainer_class()
        row = trainer.train_rows[0]
        plain = trainer.tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        assert row["ids"] == ([50, 51, *plain, 52] if template else [50, *plain])


def test_the_reward_model_reads_one_bos_and_one_eos_with_and_without_a_chat_template(each, tmp_path):
    for template in ("", CHAT):
        model = with_bos(tmp_path / f"model {len(template)}", TINY / "reward_model", template)
        _, trainer_class = each(REWARD_MODEL=model, EVAL_DATASETS=[])
        trainer = trainer_class()
        seen = []

        def look(module, args, kwargs):
            seen.extend(kwargs["input_ids"].tolist())

        trainer.reward_model.base_model.register_forward_pre_hook(look, with_kwargs=True)
        trainer.reward_model_score("Tom has 1 apples.", "#### 1")
        text = "$(Tom has 1 apples.)#### 1<eos>" if template else "$Tom has 1 apples.#### 1<eos>"
        assert seen == [trainer.reward_tokenizer(text, add_special_tokens=False)["input_ids"]]
        assert seen[0].count(50) == seen[0].count(1) == 1


def test_the_eos_ids_of_the_generation_config_end_a_response_too(each, tmp_path):
    path, (line_end, _) = policy_with_two_ends(tmp_path / "model")
    script, trainer_class = each(ACTOR_MODEL=path, EVAL_DATASETS=[])
    trainer = trainer_class()
    prompts = [row["ids"] for row in trainer.train_rows[:4]]
    batch = script.respond(trainer.actor, trainer.tokenizer, prompts, None)
    last = batch.response_ids.gather(1, batch.response_lengths[:, None] - 1).squeeze(1)
    assert line_end in last.tolist() and not batch.truncated[last == line_end].any()
    before_the_last = torch.arange(batch.response_ids.shape[1]) < batch.response_lengths[:, None] - 1
    assert not (batch.response_ids[before_the_last] == line_end).any()


SHORT = {
    "MAX_STEPS": 2,
    "SAVE_EVERY_N_STEPS": 1,
    "MAX_TRAIN_PROMPTS": 6,
    "MAX_NEW_TOKENS": 16,
    "MINI_BATCHES": 2,
    "KL_COEF": 0.1,
    "EVAL_DATASETS": [],
    "RESUME": "yes",
}


def test_scikit_learns_import_takes_no_random_number_of_the_run(tmp_path, monkeypatch):
    """It does take one, and transformers imports it when it generates: found by killing runs."""
    script = load_script("ppo/ppo.py")
    (tmp_path / "sklearn/metrics").mkdir(parents=True)
    (tmp_path / "sklearn/__init__.py").write_text("")
    (tmp_path / "sklearn/metrics/__init__.py").write_text("import random\nrandom.random()\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    script.seed_everything(1)
    state = random.getstate()
    import sklearn.metrics

    assert sklearn.metrics.__file__.startswith(str(tmp_path)) and random.getstate() == state
    for name in ("sklearn", "sklearn.metrics"):
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    "file, more",
    [
        ("ppo/ppo.py", {"KL_TARGET": 0.01}),
        ("grpo/grpo.py", {"REFERENCE_SYNC_STEPS": 1}),
    ],
)
def test_the_second_step_of_a_resumed_run_is_that_of_the_unbroken_one(file, more, tmp_path):
    """The kill and resume above in short: every model, optimizer and generator, cursor, coefficient, logs."""

    def run(out):
        script = load_script(file, **{**small(file), **SHORT, **more, "OUTPUT_DIR": str(out)})
        trainer = getattr(script, TRAINERS[file])()
        trainer.train()

    one = tmp_path / "unbroken"
    two = tmp_path / "resumed"
    run(one)
    shutil.copytree(one, two)
    shutil.rmtree(two / "step_2")
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    run(two)
    weights = [path.relative_to(one) for path in one.glob("step_2/*/model.safetensors")]
    assert len(weights) == 2
    for name in (*weights, "logs/samples.jsonl"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    assert untimed(one / "logs/metrics.jsonl") == untimed(two / "logs/metrics.jsonl")
    assert_same_state(one / "step_2/training_state.pt", two / "step_2/training_state.pt")


# ---------------------------------------------------------------- the presets of docs/troubleshooting.md

SCENARIOS = {
    "smallest step": {
        "BATCH_SIZE": 1,
        "GRADIENT_ACCUMULATION_STEPS": 8,
        "GROUP_SIZE": 1,
        "SAVE_EVERY_N_STEPS": 200,
        "EVAL_EVERY_N_STEPS": 100,
    },
    "quick experiment": {
        "BATCH_SIZE": 4,
        "GRADIENT_ACCUMULATION_STEPS": 1,
        "GROUP_SIZE": 2,
        "USE_LR_SCHEDULER": True,
        "LR_SCHEDULER_TYPE": "cosine",
        "EARLY_STOPPING_PATIENCE": 3,
    },
    "long run": {
        "BATCH_SIZE": 8,
        "GRADIENT_ACCUMULATION_STEPS": 2,
        "GROUP_SIZE": 4,
        "USE_LR_SCHEDULER": True,
        "LR_SCHEDULER_TYPE": "plateau",
        "EARLY_STOPPING_PATIENCE": 10,
        "SAVE_EVERY_N_STEPS": 500,
        "EVAL_EVERY_N_STEPS": 100,
        "USE_WANDB": True,
    },
    "look at the code": {
        "BATCH_SIZE": 2,
        "NUM_EPOCHS": 1,
        "SAVE_EVERY_N_STEPS": 10,
        "EVAL_EVERY_N_STEPS": 5,
        "USE_WANDB": False,
        "MAX_TRAIN_PROMPTS": 5,
        "MAX_EVAL_PROMPTS": 2,
    },
}


def documentation():
    """The README and what it links to."""
    return "\n".join(path.read_text() for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))))


def test_the_presets_name_their_trainer(grpo):
    """A constant that some trainers refuse has its trainer in the first column."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    rows = re.findall(r"^\| (.+) \| `(BATCH_SIZE=.+)` \|$", page, re.MULTILINE)
    assert len(rows) == len(SCENARIOS)
    for name, words in rows:
        script = grpo()
        script.apply_overrides(words.split())
        script.MAX_TRAIN_PROMPTS, script.MAX_EVAL_PROMPTS = 4, 2
        if "`ppo/ppo.py`" in name:
            with pytest.raises(script.UserError, match="GROUP_SIZE = 1"):
                script.GRPOTrainer()
        else:
            script.USE_WANDB = False
            script.GRPOTrainer().run.lock.release(force=True)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_presets_run(name, tmp_path, started, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(ROOT / "ppo")
    chosen = SCENARIOS[name]
    # the page gives this very list
    assert " ".join(f"{key}={value}" for key, value in chosen.items()) in documentation()
    out = tmp_path / "run"
    fewer = {"MAX_NEW_TOKENS": 24, "MAX_STEPS": 3, "MAX_TRAIN_PROMPTS": 48, "MAX_EVAL_PROMPTS": 4}
    constants = {"OUTPUT_DIR": out, **fewer, **chosen}
    done = started("ppo/ppo.py", *(f"{key}={value}" for key, value in constants.items()), shrink=False)
    assert done.returncode == 0, done.stderr
    train = [record for record in read(out / "logs/metrics.jsonl") if record["phase"] == "train"]
    prompts = min(48, chosen.get("MAX_TRAIN_PROMPTS", 48))
    per_step = chosen["BATCH_SIZE"] * chosen.get("GRADIENT_ACCUMULATION_STEPS", 2)
    assert len(train) == min(3, math.ceil(prompts / per_step))
    assert f"In each step: {per_step} prompts x {chosen.get('GROUP_SIZE', 4)} responses" in done.stdout
    assert bool(list(out.glob("wandb/offline-run-*"))) == chosen.get("USE_WANDB", False)
    rates = [record["learning_rate"] for record in train]
    assert (rates[-1] < rates[0]) == (chosen.get("LR_SCHEDULER_TYPE") == "cosine")
    # not due earlier: saved at the end
    assert [path.name for path in out.glob("step_*")] == [f"step_{len(train)}"]


@pytest.mark.parametrize("path", SOME, ids=["ppo", "grpo", "rce"])
def test_the_file_and_rewards_alone_are_a_working_trainer(path, tmp_path):
    """One step in a folder that has nothing else of the repository but models and data."""
    name = Path(path).name
    shutil.copy(ROOT / path, tmp_path / name)
    shutil.copytree(ROOT / "rewards", tmp_path / "rewards")
    shutil.copytree(TINY, tmp_path / "mine")
    data = "[{'path': 'mine/test.jsonl', 'type': 'jsonl', 'input': 'problem', 'output': 'solution'}]"
    words = ["ACTOR_MODEL=mine/policy", f"TRAIN_DATASETS={data}", f"EVAL_DATASETS={data}", "OUTPUT_DIR=out"]
    words += ["MINE_PROMPTS=12", "BEAMS=0", "ROUNDS=1"] if path == "rce/rce.py" else []
    plain = {"cwd": tmp_path, "capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    done = subprocess.run([sys.executable, name, *words_of(path, *words)], **plain)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "out").glob("step_[12]/manifest.json"))
    shutil.rmtree(tmp_path / "rewards")
    done = subprocess.run([sys.executable, name], **plain)
    assert done.returncode != 0 and "rewards/" in done.stderr and "Traceback" not in done.stderr


def test_the_shipped_data_is_small_and_its_answers_parse():
    assert sum(p.stat().st_size for p in TINY.rglob("*") if p.is_file()) < 8_000_000
    import rewards

    for name in ("train.jsonl", "test.jsonl"):
        golds = [row["solution"] for row in read(TINY / name)]
        assert rewards.exact_answer(golds, golds, golds) == [1.0] * len(golds)
    train, test = ({row["problem"] for row in read(TINY / f"{name}.jsonl")} for name in ("train", "test"))
    assert not train & test


# ---------------------------------------------------------------- what an audit found


def untrained(each, **constants):
    """A trainer, its files open, that has not trained."""
    _, trainer_class = each(**constants)
    trainer = trainer_class()
    trainer.run.open_files()
    return trainer


@pytest.mark.parametrize("every, evaluated, later", [(2, [0, 2, 4, 5], [6]), (0, [0, 5], [6])])
def test_a_run_evaluates_first_last_and_every_so_many_steps(each, every, evaluated, later):
    """A round of rce.py ends at step 3. A resumed run evaluates nothing twice."""
    constants = {"EVAL_EVERY_N_STEPS": every, "SAVE_EVERY_N_STEPS": 3, "MAX_NEW_TOKENS": 16, "RESUME": "yes"}
    saved, later_saved = [3, 5], [6, 6]
    if each.path == "rce/rce.py":
        constants |= {"ROUNDS": 2, "NUM_EPOCHS": 3, "MAX_TRAIN_PROMPTS": 15, "BEAMS": 0}
        evaluated = sorted({*evaluated, 3})
        saved, later_saved = [0, 3, 5], [5, 6, 6]  # the first of a round, its end, and that of the run
    for steps, evaluations, saves in ((5, evaluated, saved), (6, later, later_saved)):
        _, trainer_class = each(MAX_STEPS=steps, **constants)
        trainer = trainer_class()
        run = trainer.run
        asked = []
        called = []
        save = run.save

        def evaluate():
            asked.append(run.step)
            return {}

        def noted_save():
            called.append(run.step)
            save()

        setattr(trainer, "measure" if each.path == "rce/rce.py" else "evaluate", evaluate)
        run.save = noted_save
        trainer.train()
        assert (asked, called) == (evaluations, saves)


def test_best_is_the_highest_and_patience_waits_for_the_threshold(each, monkeypatch):
    run = untrained(each, EARLY_STOPPING_THRESHOLD=0.1, PLATEAU_PATIENCE=2).run
    saved = []

    def write_best(metrics, policy, weights, folder):
        folder.mkdir()
        saved.append(metrics["reward"])

    monkeypatch.setattr(run, "write_best", write_best)
    seen = []
    for value in (0.5, 0.55, 0.52, 0.59, 0.65, 0.7, 0.6, 0.8):
        run.log_evaluation({"reward": value})
        seen.append((run.best_value, run.patience_value, run.evals_since_best, run.halvings))
    assert saved == [0.5, 0.55, 0.59, 0.65, 0.7, 0.8]  # each the highest so far, by however little
    assert seen == [
        (0.5, 0.5, 0, 0),
        (0.55, 0.5, 1, 0),
        (0.55, 0.5, 2, 1),
        (0.59, 0.5, 3, 1),
        (0.65, 0.65, 0, 1),
        (0.7, 0.65, 1, 1),
        (0.7, 0.65, 2, 2),
        (0.8, 0.8, 0, 2),
    ]


def test_best_and_patience_resume_apart(each):
    run = untrained(each).run
    kept = {"best_value": 0.7, "patience_value": 0.6, "evals_since_best": 3, "halvings": 2}
    vars(run).update(step=1, **kept)
    run.save()
    (run.folder / "best").mkdir()
    run.lock.release(force=True)
    again = untrained(each, RESUME="yes").run
    assert {key: getattr(again, key) for key in kept} == kept


def test_a_run_names_the_policy_that_it_kept(each, tmp_path, capsys):
    """With its step; one from before the training says that none was better."""
    run = untrained(each).run
    run.checkpoint = tmp_path / "run/step_0"
    assert run.final_message().endswith(f"; policy: {tmp_path}/run/step_0/policy")
    run.log_evaluation({"reward": 0.5})
    best = f"; policy: {tmp_path}/run/best/policy"
    assert run.final_message().endswith(f"{best} (of step 0)")
    run.step = 3
    assert run.final_message().endswith(f"{best} (of step 0: no later one was better in evaluation)")
    assert run.step_of_best(1) == " (of step 0)", "a stage of this run began at step 1"
    run.log_evaluation({"reward": 0.6})
    assert run.final_message().endswith(f"{best} (of step 3)")
    capsys.readouterr()


SQUAD = {
    "q": {"text": "Tom has 1 apples."},
    "answers": {"text": ["1", "one"], "answer_start": [0, 0]},
    "answers.start": "dotted",
    "more": {"b": {"c": 3}},
}


def squad(path, kind, output):
    return [{"path": str(path), "type": kind, "input": "q.text", "output": output}]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
def test_a_column_may_be_a_path_into_nested_records(path, kind, tmp_path):
    jsonl(tmp_path / "a.jsonl", SQUAD)
    (tmp_path / "a.hub").mkdir()
    for file in ("a.parquet", "a.hub/train.parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([SQUAD]), tmp_path / file)
    script = load_script(path)
    for output, answer in (("answers.text", ["1", "one"]), ("answers.start", "dotted"), ("more.b.c", "3")):
        (row,) = script.load_rows(squad(tmp_path / f"a.{kind}", kind, output), "TRAIN_DATASETS")
        assert (row["prompt"], row["answer"]) == ("Tom has 1 apples.", answer)
    for output in ("answers.texts", "answers.text.first"):
        with pytest.raises(script.UserError, match=f"line 1: there is no value for column '{output}'"):
            script.load_rows(squad(tmp_path / "a.jsonl", "jsonl", output), "TRAIN_DATASETS")


@pytest.mark.parametrize(
    "solution, says",
    [
        ({"text": ["1"], "answer_start": [0]}, "a text or a number, not {'text'"),
        ([], "a text or a number, not \\[\\]: correct or delete"),
        ([["1"]], "a text or a number, not \\['1'\\]: correct or delete"),
        (["1", None], "a text or a number, not None: correct or delete"),
        ({}, "a text or a number, not {}: correct or delete"),
        (math.nan, "a text or a number, not nan: correct or delete"),
        ([1.0, math.nan], "a text or a number, not nan: correct or delete"),
    ],
)
def test_an_answer_that_is_no_text_is_named_with_its_line(ppo, tmp_path, solution, says):
    lines = {"problem": "x", "solution": 1}, {"problem": "y", "solution": solution}
    script = ppo(TRAIN_DATASETS=[jsonl(tmp_path / "a.jsonl", *lines)])
    match = f"TRAIN_DATASETS: .*a.jsonl line 2: 'solution' must be {says}"
    with pytest.raises(script.UserError, match=match) as error:
        script.PPOTrainer()
    assert len(str(error.value).splitlines()) == 1


def test_an_objects_name_has_no_address(ppo):
    script = ppo()
    assert script.json_name(functools.partial(sum, start=1)) == "partial"
    assert script.json_name(object()) == "object" and script.json_name(sum) == "sum"


def test_every_group_of_an_optimizer_is_scheduled_clipped_stepped_and_resumed(ppo, tmp_path):
    """As of Muon for matrices with AdamW for the rest: make_optimizer alone is edited."""

    def load(multiple=10, **constants):
        script = ppo(USE_LR_SCHEDULER=True, MAX_STEPS=3, MAX_GRAD_NORM=1e-3, **constants)

        def make_optimizer(model, learning_rate):
            matrices = [p for p in model.parameters() if p.dim() == 2]
            others = [p for p in model.parameters() if p.dim() != 2]
            groups = [{"params": matrices, "lr_multiplier": multiple}, {"params": others, "lr_multiplier": 1}]
            return torch.optim.SGD(groups, learning_rate)

        script.make_optimizer = make_optimizer
        trainer = script.PPOTrainer()
        trainer.set_learning_rate = script.set_learning_rate
        return trainer

    trainer = load(LEARNING_RATE=0.1)
    trainer.reward_functions = [("length", lambda p, r, a: [float(len(x)) for x in r], 1.0)]
    before = [p.clone() for p in trainer.actor.parameters()]
    trainer.train()
    groups = trainer.optimizers["policy"].param_groups
    assert [group["lr"] for group in groups] == pytest.approx([1.0 / 3, 0.1 / 3])
    moved = torch.cat([(p - q).flatten() for p, q in zip(trainer.actor.parameters(), before)]).norm()
    assert 0 < moved < 6 * 1e-3 * 1.0  # six optimizer steps of rate 1 at most
    again = load(LEARNING_RATE=0.2, RESUME="yes")
    assert again.run.step == 3
    again.set_learning_rate(again.optimizers["policy"], 0.2)
    assert [group["lr"] for group in again.optimizers["policy"].param_groups] == pytest.approx([2.0, 0.2])
    other = load(multiple=5, LEARNING_RATE=0.2, RESUME="yes")  # an edit counts from here on
    other.set_learning_rate(other.optimizers["policy"], 0.1)
    assert [group["lr"] for group in other.optimizers["policy"].param_groups] == pytest.approx([0.5, 0.1])
    script = ppo(RESUME="yes")  # whose optimizer has one group
    with pytest.raises(script.UserError, match="step_3 cannot be used"):
        script.PPOTrainer()


def run_without_lock(script):
    run = script.Run("ppo", "no", torch.device("cpu"))
    run.lock.release(force=True)
    return run


def test_without_a_terminal_a_line_about_every_30_seconds_says_how_far_it_is(ppo, monkeypatch, capsys):
    script = ppo()
    run = run_without_lock(script)
    with run.timed("rollout"):
        clock = iter(range(0, 1000, 10))
        monkeypatch.setattr(script.time, "perf_counter", lambda: next(clock))
        assert list(script.progress(range(11), "tokens")) == list(range(11))
    shown = "3 of 11 tokens, 01:46 left\n7 of 11 tokens, 00:45 left\n"
    assert capsys.readouterr() == (shown, "")


def screen(text):
    """The lines that a terminal shows of a text with carriage returns and moves of the cursor."""
    lines = [[]]
    row = column = 0
    for part in re.findall(r"\033\[A|\033\[K|.|\n", text, re.DOTALL):
        if part == "\033[A":
            row -= 1
        elif part == "\n":
            row, column = row + 1, 0
            lines += [[]] * (row == len(lines))
        elif part == "\r":
            column = 0
        else:
            lines[row] = [
                *lines[row][:column],
                *" " * (column - len(lines[row])),
                part,
                *lines[row][column + 1 :],
            ]
            column += 1
    return ["".join(line).rstrip() for line in lines]


def test_on_a_terminal_a_bar_stands_below_the_lines_and_vanishes(ppo, monkeypatch, capsys):
    script = ppo()
    run = run_without_lock(script)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    text = ""
    shown = []
    with run.timed("rollout"):
        for n in script.progress(range(3), "tokens"):
            for _ in script.progress(range(2), "parts"):
                pass
            run.log(f"line {n}")
            text += capsys.readouterr().out
            shown.append(screen(text))
        text += capsys.readouterr().out
    assert screen(text) == ["line 0", "line 1", "line 2", ""]
    for n, (*said, bar) in enumerate(lines[: n + 2] for n, lines in enumerate(shown)):
        assert said == [f"line {i}" for i in range(n + 1)]
        assert re.match(r" *\d+%\|.*\| \d/3 \[00:00<.* tokens/s\]$", bar), bar


def test_a_bar_vanishes_though_its_loop_is_left_early(ppo, monkeypatch, capsys):
    script = ppo()
    run_without_lock(script)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for _ in script.progress(range(3), "tokens"):
        break
    text = capsys.readouterr().out
    assert "0/3" in text and screen(text) == [""]


def test_process_0_alone_shows_how_far_it_is(ppo, monkeypatch, capsys):
    script = ppo()
    run_without_lock(script)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert list(script.progress([7], "parts")) == [7]  # of a single one there is nothing to tell
    monkeypatch.setattr(script, "rank", lambda: 1)
    assert list(script.progress(range(3), "tokens")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_every_long_part_of_a_run_is_tracked(ppo):
    script = ppo(MAX_STEPS=1)
    doing = ["load"]
    seen = set()
    timed = script.Run.timed

    @contextmanager
    def noted(run, activity):
        doing.append(activity)
        with timed(run, activity):
            yield
        doing.pop()

    def progress(items, unit):
        seen.add((doing[-1], unit))
        return items

    script.Run.timed = noted
    script.progress = progress
    script.PPOTrainer().train()
    assert seen == {
        ("load", "tokens"),
        ("evaluate", "tokens"),
        ("evaluate", "batches"),
        ("rollout", "tokens"),
        ("rollout", "batches"),
        ("score", "batches"),
        ("update", "micro-batches"),
    }


def test_the_held_out_reward_is_after_the_penalty_as_the_trained_one_is(ppo):
    free, fined = (ppo(MISSING_EOS_PENALTY=x, MAX_NEW_TOKENS=2).PPOTrainer().evaluate() for x in (0.0, 5.0))
    assert free["truncated_fraction"] == fined["truncated_fraction"] > 0
    assert free["reward"] - fined["reward"] == pytest.approx(5 * free["truncated_fraction"])


def test_a_step_without_timed_blocks_is_recorded(ppo, tmp_path):
    trainer = ppo(MAX_STEPS=1).PPOTrainer()
    with trainer.run.session("here"):
        while trainer.run.next_step():
            trainer.run.log_step({"reward": 1.0}, 7, [], "line")
    assert read(tmp_path / "run/logs/metrics.jsonl")[0] == {"phase": "train", "step": 1, "reward": 1.0}


def test_an_evaluation_of_ones_own_within_a_step_does_not_slow_it_in_the_log(ppo, tmp_path):
    trainer = ppo(MAX_STEPS=1, EVAL_EVERY_N_STEPS=1).PPOTrainer()
    run, update, tokens = trainer.run, trainer.update, []

    def update_and_evaluate(batch):
        tokens.append(batch.response_lengths.sum().item())
        with run.timed("evaluate"):
            time.sleep(0.5)
        return update(batch)

    trainer.update = update_and_evaluate
    trainer.train()
    first, step, last = read(tmp_path / "run/logs/metrics.jsonl")
    seconds = sum(step[f"seconds/{activity}"] for activity in ("rollout", "score", "update"))
    assert step["tokens_per_second"] == pytest.approx(tokens[0] / seconds)
    assert "seconds/evaluate" not in step and last["seconds/evaluate"] > 0.5


def test_a_misspelt_metric_of_a_panel_is_named_once(ppo, tmp_path, capsys):
    panels = [("accuracy", ["acuracy_greedy"]), ("reward", ["reward"])]
    ppo(MAX_STEPS=2, SAVE_EVERY_N_STEPS=1, PLOT_PANELS=panels).PPOTrainer().train()
    notes = [line for line in capsys.readouterr().out.splitlines() if "panel" in line]
    assert len(notes) == 1 and "'acuracy_greedy'" in notes[0] and "did you mean accuracy_greedy?" in notes[0]


# ---------------------------------------------------------------- groups are whole wherever rewards are asked


@pytest.mark.parametrize("path", ["ppo/ppo.py", "grpo/grpo.py", "rce/rce.py", "grpo/grpo_rec.py"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_responses_to_one_prompt_are_scored_in_one_call(path, data):
    script = loaded(path)
    batch_size, group_size = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 9))
    counts = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=12))  # responses per prompt
    rows = [{"prompt": "q", "answer": None, "columns": {"number": i}} for i in range(len(counts))]
    rows = [row for row, count in zip(rows, counts) for _ in range(count)]
    batch = SimpleNamespace(rows=rows, responses=[str(i) for i in range(len(rows))], columns={})
    calls = []

    def score(prompts, responses, answers, number):
        calls.append(number)
        return [float(response) for response in responses]

    script.BATCH_SIZE, script.GROUP_SIZE = batch_size, group_size
    scores, _ = script.score_over_ranks(SimpleNamespace(), "score", score, batch)
    assert scores.tolist() == list(range(len(rows)))
    seen = [number for call in calls for number in set(call)]
    assert len(seen) == len(set(seen)) == len(counts)  # no prompt is in two calls
    size = batch_size * group_size
    assert all(len(call) <= size or len(set(call)) == 1 for call in calls)
    for call, following in pairwise(calls):  # no call that could be spared
        assert len(call) + counts[following[0]] > size


@pytest.mark.parametrize("path", ["grpo/grpo.py", "rce/rce.py"])
def test_an_evaluation_hands_over_whole_groups(path, tmp_path):
    calls = []

    def ranked(prompts, responses, answers):
        calls.append(Counter(prompts))
        return [0.0] * len(responses)

    constants = {"BATCH_SIZE": 5, "GROUP_SIZE": 3, "EVAL_SAMPLES": 4, "MAX_EVAL_PROMPTS": 7}
    constants |= {"MAX_NEW_TOKENS": 4, "REWARD_FUNCTIONS": [(ranked, 1.0)], "ACCURACY_FUNCTION": ranked}
    script = load_script(path, **small(path, OUTPUT_DIR=str(tmp_path / "run"), **constants))
    trainer = getattr(script, TRAINERS[path])()
    calls.clear()
    trainer.evaluate()
    sampled = [call for call in calls if max(call.values()) > 1]
    assert sum(call.total() for call in sampled) == 2 * 28  # of the reward and of the accuracy
    assert all(set(call.values()) == {4} for call in sampled)


def test_the_candidates_of_a_prompt_are_verified_in_one_call(tmp_path):
    calls = []

    def ranked(prompts, responses, answers):
        calls.append(set(prompts))
        return [0.0] * len(responses)

    constants = {"BATCH_SIZE": 3, "GROUP_SIZE": 3, "OUTPUT_DIR": str(tmp_path / "run")}
    constants["REWARD_FUNCTIONS"] = [("exact_answer", 1.0), ("rouge_l", 0.0), (ranked, 1.0)]
    script = load_script("rce/rce.py", **small("rce/rce.py", **constants))
    trainer = script.RCETrainer()
    candidates = [
        {"prompt_id": row["id"], "text": f"#### {i}", "token_ids": [5, 1], "eval_failed": False}
        for row, count in zip(trainer.train_rows, (2, 5, 4, 3))
        for i in range(count)
    ]
    trainer.verify(candidates)
    prompts = [row["prompt"] for row in trainer.train_rows[:4]]
    assert calls == [set(prompts[:2]), set(prompts[2:])]


def test_each_call_gets_the_columns_of_its_own_responses(ppo):
    script = ppo(BATCH_SIZE=1, GROUP_SIZE=2)
    seen = []

    def score(prompts, responses, answers, response_ids):
        seen.extend(response_ids)
        return [0.0] * len(responses)

    batch = reward_batch(*["abcdefg"] * 3, response_ids=[[i] for i in range(7)])
    script.score_over_ranks(SimpleNamespace(), "score", score, batch)
    assert seen == [[i] for i in range(7)]


# ---------------------------------------------------------------- what a reward function may return


def test_parts_that_differ_from_call_to_call_are_named(ppo):
    script = ppo(BATCH_SIZE=1)
    trainer = SimpleNamespace()
    for names in (["early", "late", "late"], ["late", "early", "late"], ["late", "late", "early"]):
        left_behind = iter(names)

        def score(prompts, responses, answers):
            values = [0.0] * len(responses)
            trainer.reward_parts = {"always": values, next(left_behind): values}
            return values

        says = r"^compute_rewards sets reward_parts\['early'\] in some calls only: set it in every call$"
        with pytest.raises(script.UserError, match=says):
            script.score_over_ranks(trainer, "compute_rewards", score, reward_batch(*["abcdef"] * 3))


async def waits(prompts, responses, answers):
    return [1.0] * len(responses)


async def yields(prompts, responses, answers):
    yield 1.0


class Judge:
    async def __call__(self, prompts, responses, answers):
        return [1.0] * len(responses)


@pytest.mark.filterwarnings("error::RuntimeWarning")  # Python's own: never awaited
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("reward", [waits, yields, Judge()], ids=["function", "generator", "object"])
def test_a_reward_function_that_is_async_is_told(ppo, reward):
    script = ppo()
    with pytest.raises(script.UserError, match="^judge is async: make it a plain function; rewards.threaded"):
        script.call_reward("judge", reward, *["abc"] * 3)
        gc.collect()


def numbers(prompts, responses, answers):
    for response in responses:
        yield float(response)


def test_a_generator_of_rewards_is_read(ppo):
    script = ppo()
    lists = "abc", "123", "abc"
    assert script.call_reward("numbers", numbers, *lists).tolist() == [1.0, 2.0, 3.0]
    columns = {"response_ids": [[4], [4, 5], [6]]}
    scores = script.call_reward(
        "tokens", lambda p, r, a: ([float(x)] * (1 + (x == "2")) for x in r), *lists, columns, 3
    )
    assert scores.tolist() == [[1, 0, 0], [2, 2, 0], [3, 0, 0]]
    with pytest.raises(ValueError) as caught:  # what it raises has its name, though it raises late
        script.call_reward("numbers", numbers, "abc", "12x", "abc")
    assert caught.value.__notes__ == ["(raised by the reward function numbers)"]


@pytest.mark.parametrize(
    "values, says",
    [
        (
            ["good"] * 4,
            "['good', 'good', 'good', 'good'], a list of 4 values, which cannot be read as numbers",
        ),
        ([None] * 3, "[None, None, None], a list of 3 values, which cannot be read as numbers"),
        (None, "None, which cannot be read as numbers"),
        ("good", "'good', which cannot be read as numbers"),
        ([[1.0]] * 4, "[[1.0], [1.0], [1.0], [1.0]], of shape (4, 1)"),
    ],
)
def test_what_is_no_list_of_numbers_is_described(ppo, values, says):
    script = ppo()
    says = f"score must return 4 finite numbers, one per response; it returned {says}"
    with pytest.raises(script.UserError, match=re.escape(says)):
        script.call_reward("score", lambda p, r, a: values, *["abcd"] * 3)


def test_an_evaluation_of_prompts_without_answers_says_what_it_needs(each):
    script, trainer_class = each(EVAL_DATASETS=[])
    trainer = trainer_class()
    says = '^exact_answer compares .* prompt has none: give .* an "output" column, or evaluate.. the answers$'
    with pytest.raises(script.UserError, match=says):
        trainer.evaluate(["2+2?"])
    with pytest.raises(script.UserError, match="^evaluate got 2 prompts and 1 answers: give one per prompt$"):
        trainer.evaluate(["2+2?", "2+3?"], ["4"])
    assert "accuracy_greedy" in trainer.evaluate(["2+2?"], ["4"])


# ---------------------------------------------------------------- data, state, another folder


def test_a_csv_file_with_a_column_twice_is_refused_with_its_name(ppo, tmp_path):
    path = tmp_path / "rows.csv"
    script = ppo()
    data = [{"path": str(path), "type": "csv", "input": "problem", "output": "solution"}]
    path.write_text("problem,solution,solution\n1+1?,2,3\n")
    says = "rows.csv: cannot be read as csv .its first line has the column 'solution' twice: rename one"
    with pytest.raises(script.UserError, match=says):
        script.load_rows(data, "TRAIN_DATASETS")
    path.write_text("problem,solution,,\n1+1?,2,,\n")  # columns without a name, as spreadsheets leave them
    assert script.load_rows(data, "TRAIN_DATASETS")[0]["answer"] == "2"


@pytest.mark.parametrize(
    "value, plain",
    [
        (0.5, True),
        ({"a": [1, (2, None)], "b": torch.ones(2)}, True),
        (np.float64(0.5), False),
        (SimpleNamespace(), False),
        (lambda: 0, False),
    ],
)
def test_a_field_of_the_state_that_could_not_be_resumed_is_named(ppo, tmp_path, value, plain):
    script = ppo()
    trainer = script.PPOTrainer()
    trainer.run.open_files()
    trainer.state.mine = value
    if plain:
        trainer.run.save()
    else:
        says = f"^self.state.mine is of type {type(value).__name__}, but a checkpoint takes numbers, texts"
        with pytest.raises(script.UserError, match=says):
            trainer.run.save()
        assert not list((tmp_path / "run").glob("step_*"))
    trainer.run.lock.release(force=True)
    if plain:
        again = ppo(RESUME="yes").PPOTrainer().state.mine
        assert again == value if isinstance(value, float) else again["a"] == value["a"]


@pytest.mark.parametrize(
    "where, same_run",
    [("beside", False), ("given up", False), ("given up, again", True), ("cut", False), ("newest", True)],
)
def test_a_run_that_goes_on_elsewhere_has_its_own_wandb_run(ppo, tmp_path, monkeypatch, where, same_run):
    begun = []

    def init(id=None, **options):
        begun.append(id)
        return SimpleNamespace(id=id or f"run {len(begun)}", log=lambda *_, **__: None, finish=lambda: None)

    spec = ModuleSpec("wandb", None)  # accelerate asks for it
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=spec))
    constants = {"USE_WANDB": True, "SAVE_EVERY_N_STEPS": 1, "EVAL_DATASETS": []}
    first = 3 if where == "given up, again" else 2  # the same constants give the same steps again
    ppo(MAX_STEPS=first, **constants).PPOTrainer().train()
    resume = "step_1" if where.startswith("given up") else "step_2"
    if where == "cut":  # it went on after its last checkpoint, and its constants are others now
        with open(tmp_path / "run/logs/metrics.jsonl", "a") as file:
            file.write('{"phase": "train", "step": 3}\n')
    constants |= {"RESUME": str(tmp_path / "run" / resume), "MAX_STEPS": 3}
    if where == "beside":
        constants["OUTPUT_DIR"] = str(tmp_path / "other")
    trainer = ppo(**constants).PPOTrainer()
    trainer.train()
    assert trainer.run.step == 3 and begun == [None, "run 1" if same_run else None]
    if where in ("beside", "given up"):
        trainer = ppo(**{**constants, "RESUME": "yes", "MAX_STEPS": 4}).PPOTrainer()
        trainer.train()
        assert trainer.run.step == 4 and begun[2:] == ["run 2"]  # and keeps it


def test_rows_of_two_subsets_of_a_hub_data_set_have_names_of_their_own(monkeypatch):
    record = {"problem": "1 + 1", "solution": "2"}
    script = load_script("ppo/ppo.py")
    monkeypatch.setattr(script, "read_records", lambda spec, where: [(1, dict(record))])
    spec = {"path": "some/math", "type": "hub", "input": "problem"}
    specs = [{**spec, "name": "algebra"}, {**spec, "name": "geometry"}, {**spec, "split": "test"}]
    names = ["some/math:algebra:1", "some/math:geometry:1", "some/math:test:1"]
    assert [row["id"] for row in script.load_rows(specs, "TRAIN_DATASETS")] == names


def test_a_run_that_is_stopped_after_its_checkpoint_stays_stopped(ppo):
    trainer = ppo(MAX_STEPS=3, SAVE_EVERY_N_STEPS=1).PPOTrainer()
    save = trainer.run.save

    def save_then_stop():
        save()
        trainer.run.is_stopped = True

    trainer.run.save = save_then_stop
    trainer.train()
    assert trainer.run.step == 1
    assert "Done at step 1 of 3, where is_stopped = True ended the run. " in trainer.run.final_message()
    again = ppo(MAX_STEPS=3, SAVE_EVERY_N_STEPS=1, RESUME="yes").PPOTrainer()
    again.train()
    assert again.run.step == 1
    again.run.is_stopped = False
    again.train()
    assert again.run.step == 3 and "Done at step 3 of 3. " in again.run.final_message()


@pytest.fixture(scope="module")
def rce_run(tmp_path_factory):
    """A folder with a run of rce.py, two steps of each of two rounds; its constants."""
    out = tmp_path_factory.mktemp("rce") / "a"
    constants = {"MAX_TRAIN_PROMPTS": 15, "SAVE_EVERY_N_STEPS": 1, "KEEP_LAST_N_CHECKPOINTS": 99}
    constants |= {"MAX_STEPS": 4, "ROUNDS": 2, "NUM_EPOCHS": 2, "EVAL_DATASETS": [], "OUTPUT_DIR": str(out)}
    load_script("rce/rce.py", **small("rce/rce.py", **constants)).RCETrainer().train()
    return out, constants


def rce_goes_on(rce_run, tmp_path, step, **more):
    """That run, copied to tmp_path/a, goes on from a step in tmp_path/b."""
    shutil.copytree(rce_run[0], tmp_path / "a")
    folders = {"RESUME": str(tmp_path / f"a/{step}"), "OUTPUT_DIR": str(tmp_path / "b")}
    return load_script("rce/rce.py", **small("rce/rce.py", **{**rce_run[1], **folders, **more}))


@pytest.mark.parametrize("stage, step, last", [("all", 3, 4), ("train", 1, 2)])
def test_rce_goes_on_in_another_folder_with_the_candidates_of_the_first(rce_run, tmp_path, stage, step, last):
    out = tmp_path / "b"
    out.mkdir()
    (out / "candidates_round_1.parquet").write_bytes(b"another run's")
    script = rce_goes_on(rce_run, tmp_path, f"step_{step}", STAGE=stage)
    script.RCETrainer().train()
    (kept,) = out.glob("old_*/candidates_round_1.parquet")
    assert kept.read_bytes() == b"another run's"
    same = [f"candidates_round_{number}.parquet" for number in range(1, 3 if stage == "all" else 2)]
    if stage == "all":  # the learning rate depends on the number of rounds
        same.append("step_4/policy/model.safetensors")
    for name in same:
        assert (out / name).read_bytes() == (rce_run[0] / name).read_bytes()
    shutil.rmtree(tmp_path / "a")  # from here on it needs no other folder
    script.RESUME = str(out / f"step_{step}")
    trainer = script.RCETrainer()
    trainer.train()
    assert trainer.run.step == last


@pytest.mark.parametrize(
    "fault, says",
    [
        (
            lambda path: path.unlink(),
            "is gone, but this run was trained on it: put it back, or start afresh with RESUME=no",
        ),
        (
            lambda path: path.write_bytes(b"PAR1"),
            "is not the file that this run was trained on: put it back, or start afresh",
        ),
    ],
)
def test_candidates_that_are_missing_are_named_before_anything_is_written(rce_run, tmp_path, fault, says):
    script = rce_goes_on(rce_run, tmp_path, "step_4")
    fault(tmp_path / "a/candidates_round_1.parquet")
    says = f"{tmp_path}/a/candidates_round_1.parquet {says}"
    with pytest.raises(script.UserError, match=re.escape(says)):
        script.RCETrainer()
    assert [path.name for path in (tmp_path / "b").iterdir()] == [".lock"]


def test_candidates_given_by_a_path_are_not_copied(rce_run, tmp_path):
    given = tmp_path / "given.parquet"
    shutil.copy(rce_run[0] / "candidates_round_1.parquet", given)
    constants = small("rce/rce.py", **rce_run[1]) | {"CANDIDATES": str(given), "ROUNDS": 1, "NUM_EPOCHS": 2}
    constants |= {"OUTPUT_DIR": str(tmp_path / "a"), "MAX_STEPS": 1}
    load_script("rce/rce.py", **constants).RCETrainer().train()
    constants |= {"RESUME": str(tmp_path / "a/step_1"), "OUTPUT_DIR": str(tmp_path / "b"), "MAX_STEPS": 2}
    trainer = load_script("rce/rce.py", **constants).RCETrainer()
    trainer.train()
    assert trainer.run.step == 2 and not list((tmp_path / "b").glob("candidates_*"))
