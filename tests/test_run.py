"""What a user meets: overrides, data, errors, files, resume, signals. Runs ppo/ppo.py as a user does where that matters."""
import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from conftest import ROOT, SMALL, TINY, load_script, run_script
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer


def read(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def jsonl(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines) + b"\n")
    return {"path": str(path), "type": "jsonl", "input": "problem", "output": "solution"}


# ---------------------------------------------------------------- overrides

@pytest.mark.parametrize("word, value", [
    ("BATCH_SIZE=3", 3), ("LEARNING_RATE=1", 1.0), ("LEARNING_RATE=1e-6", 1e-6), ("USE_WANDB=true", True), ("USE_LR_SCHEDULER=True", True), ("MAX_STEPS=None", None),
    ("MAX_STEPS=7", 7), ("KL_TARGET=0.1", 0.1), ("CRITIC_MODEL=None", None), ("CRITIC_MODEL=some/model", "some/model"), ("OUTPUT_DIR=a=b", "a=b"),
    ("REWARD_FUNCTIONS=[('f1', 0.5)]", [("f1", 0.5)]), ("ACTOR_MODEL=123", "123"), ("OUTPUT_DIR=None", "None"),
])
def test_an_override_takes_the_constants_own_type(ppo, word, value):
    script = ppo()
    script.apply_overrides([word])
    got = getattr(script, word.partition("=")[0])
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("word, says", [
    ("BATCHSIZE=3", "did you mean BATCH_SIZE?"), ("learning_rate=1", "did you mean LEARNING_RATE?"), ("nonsense", "KEY=VALUE"), ("BATCH_SIZE=2.5", "BATCH_SIZE takes int"),
    ("BATCH_SIZE=True", "takes int"), ("BATCH_SIZE=", "takes int"), ("LEARNING_RATE=fast", "takes float"), ("USE_WANDB=1", "takes bool"), ("MAX_STEPS=x", "takes int or None"),
    ("TRAIN_DATASETS=x.jsonl", "takes list"), ("_RANGES={}", "KEY=VALUE"), ("ROOT=/", "KEY=VALUE"), ("BATCH_SIZE=" + "[" * 5000, "takes int"),
])
def test_a_wrong_override_names_what_to_do(ppo, word, says):
    script = ppo()
    with pytest.raises(script.UserError, match=says.replace("?", r"\?")):
        script.apply_overrides([word])


@pytest.mark.parametrize("constant, value", [
    ("BATCH_SIZE", 0), ("TEMPERATURE", 0.0), ("GAMMA", 1.5), ("LEARNING_RATE", float("nan")), ("KL_COEF", -1.0), ("DTYPE", "float16"), ("LR_SCHEDULER_TYPE", "step"),
    ("MAX_GRAD_NORM", -1.0), ("DEVICE", "cuda:99"), ("REWARD_FUNCTIONS", [("exact", 1.0)]), ("REWARD_FUNCTIONS", []), ("ACTOR_MODEL", "/no/such/model"),
    ("RESUME", "/no/such/checkpoint"), ("MAX_PROMPT_TOKENS", 3),
])
def test_a_constant_that_cannot_be_is_named_before_anything_is_written(ppo, tmp_path, constant, value):
    script = ppo(**{constant: value})
    with pytest.raises(script.UserError) as error:
        script.PPOTrainer()
    assert str(error.value).splitlines() == [str(error.value)]
    assert (constant if constant != "RESUME" else "/no/such/checkpoint") in str(error.value)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- data

def test_jsonl_parquet_and_hub_rows_mix(ppo, tmp_path):
    first = jsonl(tmp_path / "a.jsonl", {"problem": "Tom has 1 apples.", "solution": "#### 1"}, b"", {"problem": "Tom has 2 apples.", "solution": 2})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"question": "Tom has 3 apples.", "answer": "#### 3"}]), tmp_path / "b.parquet")
    second = {"path": str(tmp_path / "b.parquet"), "type": "parquet", "input": "question", "output": "answer"}
    (tmp_path / "hub").mkdir()
    shutil.copy(tmp_path / "b.parquet", tmp_path / "hub/train.parquet")  # the datasets library takes a folder where a hub name goes
    third = {"path": str(tmp_path / "hub"), "type": "hub", "input": "question"}
    rows = ppo(TRAIN_DATASETS=[first, second, third]).PPOTrainer().train_rows
    assert [row["answer"] for row in rows] == ["#### 1", "2", "#### 3", None]
    assert [row["id"] for row in rows[:3]] == ["a.jsonl:1", "a.jsonl:3", "b.parquet:1"]


@pytest.mark.parametrize("lines, says", [
    ([{"problem": "x", "solution": "y"}, b'{"problem": "x"'], r"line 2: not a line of JSON"), ([b"\xff\xfe"], "line 1: not a line of JSON"),
    ([{"problem": "x"}], "line 1: there is no value for column 'solution'; the row has \\['problem'\\]"), ([[1]], "line 1: .*list"),
    ([{"problem": " ", "solution": "y"}], "line 1: 'problem' must be a text that is not empty"), ([{"problem": 5, "solution": "y"}], "must be a text"),
    ([], "the data set is empty"), ([b"", b" "], "the data set is empty"),
])
def test_a_bad_line_is_named(ppo, tmp_path, lines, says):
    script = ppo(TRAIN_DATASETS=[jsonl(tmp_path / "bad.jsonl", *lines)])
    with pytest.raises(script.UserError, match=f"bad.jsonl.*{says}"):
        script.PPOTrainer()


@pytest.mark.parametrize("change, says", [
    ({"path": "/no/such/file"}, "no such file"), ({"type": "csv"}, "jsonl, parquet or hub"), ({"input": "question"}, "no value for column 'question'"),
    ({"colour": "red"}, "colour"), ({"type": "parquet"}, "cannot be read as parquet"),
])
def test_a_bad_data_set_is_named(ppo, change, says):
    good = {"path": str(TINY / "train.jsonl"), "type": "jsonl", "input": "problem", "output": "solution"}
    script = ppo(TRAIN_DATASETS=[{**good, **change}])
    with pytest.raises(script.UserError, match=says):
        script.PPOTrainer()


def test_prompts_that_are_too_long_are_left_out_and_counted(ppo, capsys):
    trainer = ppo(MAX_PROMPT_TOKENS=26, EVAL_DATASETS=[]).PPOTrainer()
    said = capsys.readouterr().out
    assert f"left out {24 - len(trainer.train_rows)} of 24 prompts, longer than MAX_PROMPT_TOKENS = 26" in said
    assert 0 < len(trainer.train_rows) < 24 and max(len(row["ids"]) for row in trainer.train_rows) <= 26


# ---------------------------------------------------------------- models

def test_models_with_missing_or_unexpected_weights_are_refused(ppo, tmp_path):
    from safetensors.torch import load_file, save_file
    for name, change in (("missing", lambda w: w.pop("model.layers.1.mlp.up_proj.weight")), ("unexpected", lambda w: w.update(extra=torch.zeros(1)))):
        shutil.copytree(TINY / "policy", tmp_path / name)
        weights = load_file(tmp_path / name / "model.safetensors")
        change(weights)
        save_file(weights, tmp_path / name / "model.safetensors", {"format": "pt"})
        script = ppo(ACTOR_MODEL=str(tmp_path / name))
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


@pytest.mark.parametrize("reward, says", [
    (lambda p, r, a: [1.0], "must return 4 finite numbers, one a response; it returned 1"), (lambda p, r, a: [float("nan")] * 4, "4 of them not finite"),
    (lambda p, r, a: ["good"] * 4, "<lambda>"), (lambda p, r, a: None, "<lambda>"),
])
def test_a_reward_function_that_returns_nonsense_is_named(ppo, reward, says):
    script = ppo(REWARD_FUNCTIONS=[(reward, 1.0)])
    with pytest.raises(script.UserError, match=says):
        script.PPOTrainer().rewards_of(["q"] * 4, ["r"] * 4, ["a"] * 4)


def test_data_without_answers_is_said_to_need_them(ppo):
    spec = {"path": str(TINY / "train.jsonl"), "type": "jsonl", "input": "problem"}
    script = ppo(TRAIN_DATASETS=[spec])
    with pytest.raises(script.UserError, match='exact_answer.*"output" column'):
        script.PPOTrainer().train()


# ---------------------------------------------------------------- a run and its files

def test_a_run_writes_what_the_design_says(ppo, tmp_path, capsys):
    out = tmp_path / "run"
    trainer = ppo(MAX_STEPS=3, SAVE_EVERY_N_STEPS=1, KEEP_LAST_N_CHECKPOINTS=2, EVAL_EVERY_N_STEPS=1, KL_COEF=0.1, REWARD_MODEL=str(TINY / "reward_model")).PPOTrainer()
    metrics = trainer.train()
    assert sorted(p.name for p in out.glob("[!.]*")) == ["best", "logs", "ppo_metrics_with_entropy.png", "step_2", "step_3", "training_config.json", "training_metrics_detailed.png"]
    records = read(out / "logs/metrics.jsonl")
    assert [(r["phase"], r["step"]) for r in records] == [("eval", 0), ("train", 1), ("eval", 1), ("train", 2), ("eval", 2), ("train", 3), ("eval", 3)]
    wanted = ("step epoch policy_loss value_loss reward reward/reward_model reward/exact_answer advantage entropy kl approx_kl clip_fraction ratio_max_first "
              "grad_norm learning_rate response_length truncated_fraction zero_variance_groups explained_variance tokens_per_second "
              "seconds/rollout seconds/score seconds/update").split()
    assert set(wanted) <= records[1].keys() and all(math.isfinite(records[1][key]) for key in wanted)
    assert metrics == {k: v for k, v in records[-1].items() if k not in ("phase", "step", "seconds/evaluate")}
    samples = read(out / "logs/samples.jsonl")
    assert [s["step"] for s in samples] == [1] * 4 + [2] * 4 + [3] * 4 and {"prompt", "response", "reward", "reward/exact_answer", "advantage"} <= samples[0].keys()
    log, = (out / "logs").glob("training_*.log")
    said = capsys.readouterr().out
    assert "Epoch 1/1: PL:" in said and all(line in log.read_text().splitlines() for line in said.strip().splitlines())
    config = json.loads((out / "training_config.json").read_text())
    assert config["constants"]["MAX_STEPS"] == 3 and config["torch"] == torch.__version__
    for folder, auto in (("step_3/policy", AutoModelForCausalLM), ("step_3/critic", AutoModelForTokenClassification), ("best/policy", AutoModelForCausalLM)):
        model, info = auto.from_pretrained(out / folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and len(AutoTokenizer.from_pretrained(out / folder)) == 82
    model = AutoModelForCausalLM.from_pretrained(out / "step_3/policy")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), trainer.actor.parameters()))
    state = torch.load(out / "step_3/training_state.pt", weights_only=True)
    assert state["step"] == 3 and state["optimizers"]["policy"]["state"] and state["optimizers"]["critic"]["state"]
    best = json.loads((out / "best/metrics.json").read_text())
    assert best["reward"] == max(r["reward"] for r in records if r["phase"] == "eval")


def words(out, **more):
    return [f"{k}={v}" for k, v in {"OUTPUT_DIR": out, "MAX_STEPS": 6, "SAVE_EVERY_N_STEPS": 3, "EVAL_EVERY_N_STEPS": 2, "MINI_BATCHES": 2, "KL_COEF": 0.1,
                                    "KL_TARGET": 0.01, "USE_LR_SCHEDULER": True, "LR_SCHEDULER_TYPE": "plateau", **more}.items()]


def untimed(path):
    return [{k: v for k, v in record.items() if "second" not in k} for record in read(path)]


def assert_same_run(a, b):
    """Two finished runs are equal to the bit: weights, optimizer state, generators, metrics, samples."""
    for name in ("policy/model.safetensors", "critic/model.safetensors"):
        assert (a / "step_6" / name).read_bytes() == (b / "step_6" / name).read_bytes(), name
    states = [torch.load(x / "step_6/training_state.pt", weights_only=True) for x in (a, b)]
    flat = [dict(walk({k: v for k, v in s.items() if k != "log_bytes"})) for s in states]  # timings differ in length
    assert flat[0].keys() == flat[1].keys()
    for key, x in flat[0].items():
        assert torch.equal(x, flat[1][key]) if isinstance(x, torch.Tensor) else x == flat[1][key], key
    assert untimed(a / "logs/metrics.jsonl") == untimed(b / "logs/metrics.jsonl")
    assert (a / "logs/samples.jsonl").read_bytes() == (b / "logs/samples.jsonl").read_bytes()
    assert (a / "best/policy/model.safetensors").read_bytes() == (b / "best/policy/model.safetensors").read_bytes()
    steps = [line.split("  step ")[0] for x in (a, b) for log in (x / "logs").glob("training_*.log") for line in log.read_text().splitlines() if line.startswith("Epoch")]
    assert steps[:6] == steps[6:] and len(steps) == 12


def walk(value, path=""):
    if isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from walk(item, f"{path}/{key}")
    else:
        yield path, value


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "run"
    done = run_script("ppo/ppo.py", *words(out))
    assert done.returncode == 0, done.stderr
    return out


def start_and_signal(out, number, step, *more):
    """Start a run, send it a signal as soon as a step stands in its metrics; returns its exit code and output."""
    small = [f"{k}={v}" for k, v in SMALL.items()]
    process = subprocess.Popen([sys.executable, str(ROOT / "ppo/ppo.py"), *small, *words(out), *more], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline, metrics = time.time() + 120, out / "logs/metrics.jsonl"
    while time.time() < deadline and process.poll() is None:
        if metrics.exists() and f'"phase": "train", "step": {step},' in metrics.read_text():
            process.send_signal(number)
            break
        time.sleep(0.005)
    return process.wait(120), process.stdout.read()


def test_six_steps_equal_three_a_kill_a_resume_and_three_bit_for_bit(unbroken, tmp_path):
    out = tmp_path / "run"
    code, _ = start_and_signal(out, signal.SIGKILL, 4)
    assert code == -signal.SIGKILL and (out / "step_3").exists() and not (out / "step_6").exists()
    done = run_script("ppo/ppo.py", *words(out))
    assert done.returncode == 0 and f"Found checkpoint: {out}/step_3" in done.stdout and "Changed" not in done.stdout, done.stderr
    assert_same_run(unbroken, out)


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_sigterm_and_ctrl_c_finish_the_step_save_draw_and_leave(unbroken, tmp_path, number, code):
    out = tmp_path / "run"
    got, said = start_and_signal(out, number, 1)
    assert got == code and "Traceback" not in said and "Stopped at step" in said
    saved, = out.glob("step_*")
    assert 1 <= int(saved.name[5:]) <= 3 and (out / "ppo_metrics_with_entropy.png").exists()
    assert run_script("ppo/ppo.py", *words(out)).returncode == 0
    assert_same_run(unbroken, out)


def copy_run(run, tmp_path):
    """A copy of a finished run, with the checkpoint of step 3 as its newest."""
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/step_6")
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["policy/model.safetensors", "training_state.pt", "manifest.json", "config.json"])
@pytest.mark.parametrize("fault", ["truncate", "flip", "delete"])
def test_a_broken_checkpoint_is_named_and_skipped(unbroken, ppo, tmp_path, name, fault, capsys):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    file = out / "step_6" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    {"truncate": lambda: os.truncate(file, 10), "flip": lambda: file.write_bytes(data), "delete": file.unlink}[fault]()
    script = ppo()
    assert script.choose_checkpoint("yes", out, print) == out / "step_3"
    said = capsys.readouterr().out
    assert f"WARNING: skipping the broken checkpoint {out}/step_6" in said
    with pytest.raises(script.UserError, match=f"{out}/step_6 cannot be resumed from: "):
        script.choose_checkpoint(str(out / "step_6"), out, print)


def test_resuming_past_a_broken_checkpoint_keeps_it_aside(unbroken, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    os.truncate(out / "step_6/training_state.pt", 100)
    assert run_script("ppo/ppo.py", *words(out)).returncode == 0
    assert_same_run(unbroken, out)
    assert len(list(out.glob("old_*/step_6"))) == 1


def test_answering_n_starts_afresh_and_keeps_the_old_run(unbroken, ppo, tmp_path, monkeypatch, capsys):
    out = copy_run(unbroken, tmp_path)
    old = (out / "logs/metrics.jsonl").read_bytes()
    replies = iter(["maybe", "n"])
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", lambda prompt: next(replies))
    trainer = ppo(MAX_STEPS=1).PPOTrainer()
    assert trainer.state.step == 0 and "Found checkpoint" in capsys.readouterr().out
    trainer.train()
    kept, = out.glob("old_*")
    assert (kept / "logs/metrics.jsonl").read_bytes() == old and (kept / "step_3/manifest.json").exists()
    assert [r["step"] for r in read(out / "logs/metrics.jsonl")] == [0, 1, 1]


def test_answering_y_and_naming_a_checkpoint_from_python_resume(unbroken, ppo, tmp_path, monkeypatch, capsys):
    out = copy_run(unbroken, tmp_path)
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", lambda prompt: "Y")
    assert ppo().PPOTrainer().state.step == 3
    trainer = ppo(RESUME="no", LEARNING_RATE=3e-4).PPOTrainer(resume_from_checkpoint=str(out / "step_3"))
    assert trainer.state.step == 3 and f"Changed since the checkpoint: LEARNING_RATE was {ppo().LEARNING_RATE}, is 0.0003" in capsys.readouterr().out


def test_a_changed_constant_counts_after_a_resume(unbroken, ppo, tmp_path):
    out = copy_run(unbroken, tmp_path)
    trainer = ppo(RESUME="yes", KL_COEF=0.7, WEIGHT_DECAY=0.3, LEARNING_RATE=7e-5, MAX_STEPS=4).PPOTrainer()
    assert trainer.optimizers["policy"].param_groups[0]["weight_decay"] == 0.3
    trainer.train()
    last = [r for r in read(out / "logs/metrics.jsonl") if r["phase"] == "train"][-1]
    assert last["step"] == 4 and last["kl_coef"] == 0.7 and last["learning_rate"] == 7e-5


def test_a_finished_run_says_so_and_other_data_is_refused(unbroken, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    before = (out / "logs/metrics.jsonl").read_bytes()
    done = run_script("ppo/ppo.py", *words(out))
    assert done.returncode == 0 and "step 6 of 6" in done.stdout and (out / "logs/metrics.jsonl").read_bytes() == before
    done = run_script("ppo/ppo.py", *words(out, MAX_TRAIN_PROMPTS=20))
    assert done.returncode == 2 and "24 training prompts" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("path, name", [("ppo/ppo.py", "PPOTrainer"), ("grpo/grpo.py", "GRPOTrainer"), ("rce/rce.py", "RCETrainer")])
def test_a_step_of_the_default_size_is_the_same_every_time(path, name, tmp_path, request):
    """Many rows share a prompt, and threads must not decide in which order their gradients are added."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    found = set()
    for i in range(4):
        more = {"MINE_PROMPTS": 32, "STAGE": "mine" if i == 0 else "train"} if name == "RCETrainer" else {}
        script = load_script(path, OUTPUT_DIR=str(tmp_path / "run" if more else tmp_path / str(i)), MAX_EVAL_PROMPTS=2, MAX_TRAIN_PROMPTS=64, RESUME="no", **more)
        trainer = getattr(script, name)()
        if i == 0 and more:
            trainer.train()
            continue
        if more:
            trainer.open_run()
            trainer.prepare_round()
            trainer.update(trainer.next_batch())
        else:
            batch = trainer.rollout(trainer.next_rows())
            trainer.score(batch)
            trainer.compute_advantages(batch)
            trainer.update(batch)
        found.add(torch.cat([p.detach().flatten() for model in trainer.models.values() for p in model.parameters()]).numpy().tobytes())
    assert len(found) == 1


def test_runs_put_aside_within_a_second_do_not_meet(ppo, tmp_path):
    script = ppo()
    for text in "abc":
        (tmp_path / "best").mkdir()
        (tmp_path / "best/file").write_text(text)
        script.move_aside([tmp_path / "best"], tmp_path, print)
    assert sorted(p.read_text() for p in tmp_path.glob("old_*/best/file")) == ["a", "b", "c"]


def test_several_gold_answers_stay_a_list(ppo, tmp_path):
    lines = [{"problem": "Tom has 1 apples.", "solution": answer} for answer in (["1", 2, True], 2.5)]
    data = jsonl(tmp_path / "a.jsonl", *lines)
    rows = ppo(TRAIN_DATASETS=[data]).PPOTrainer().train_rows
    assert [row["answer"] for row in rows] == [["1", "2", "True"], "2.5"]


def test_generators_of_python_numpy_and_torch_are_restored(ppo):
    script = ppo()
    draw = lambda: (random.random(), np.random.rand(), torch.rand(1).item())
    draw()
    state = torch.load(torch_bytes(script.get_rng_state()), weights_only=True)
    first = draw()
    script.set_rng_state(state)
    assert draw() == first


def torch_bytes(value):
    import io
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def test_a_disk_that_fills_while_saving_leaves_the_last_good_checkpoint(ppo, tmp_path, monkeypatch):
    script = ppo(MAX_STEPS=4, SAVE_EVERY_N_STEPS=1)
    trainer = script.PPOTrainer()
    fill = trainer.fill_checkpoint

    def full(folder):
        fill(folder)
        if trainer.state.step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(trainer, "fill_checkpoint", full)
    with pytest.raises(script.UserError, match="step_2 could not be saved.*last good checkpoint"):
        trainer.train()
    out = tmp_path / "run"
    assert sorted(p.name for p in out.glob("step_*")) == ["step_1"] and script.checkpoint_fault(out / "step_1") is None


def test_errors_at_the_command_line_are_one_sentence_and_exit_code_2(tmp_path):
    for word, says in (("ACTOR_MODEL=/no/such/model", "ACTOR_MODEL"), ("BATCHSIZE=1", "BATCH_SIZE"), (f"TRAIN_DATASETS=[{{'path': '{tmp_path}/x', 'type': 'jsonl', 'input': 'q'}}]", "no such file")):
        done = run_script("ppo/ppo.py", f"OUTPUT_DIR={tmp_path}/run", word)
        assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_early_stopping_and_plateau_count_evaluations_without_a_better_reward(ppo, monkeypatch):
    trainer = ppo(MAX_STEPS=9, EVAL_EVERY_N_STEPS=1, EARLY_STOPPING_PATIENCE=3, PLATEAU_PATIENCE=2, USE_LR_SCHEDULER=True, LR_SCHEDULER_TYPE="plateau", LEARNING_RATE=1e-5).PPOTrainer()
    rewards = iter([0.1, 0.5, 0.4, 0.5, 0.3, 0.9])
    monkeypatch.setattr(trainer, "evaluate", lambda: {"reward": next(rewards)})
    monkeypatch.setattr(trainer, "draw_plots", lambda: None)  # most of the time
    trainer.train()
    assert trainer.state.step == 4 and trainer.state.best_reward == 0.5
    rates = [r["learning_rate"] for r in read(trainer.metrics_file.name) if r["phase"] == "train"]
    assert rates == pytest.approx([1e-5, 1e-5, 1e-5, 0.5e-5])
    assert json.loads(Path(trainer.metrics_file.name).parents[1].joinpath("best/metrics.json").read_text())["step"] == 1


def test_wandb_offline_writes_a_real_run(tmp_path):
    pytest.importorskip("wandb")
    out = tmp_path / "run"
    done = run_script("ppo/ppo.py", f"OUTPUT_DIR={out}", "USE_WANDB=True", env={**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    assert done.returncode == 0, done.stderr
    assert list(out.glob("wandb/offline-run-*/run-*.wandb"))[0].stat().st_size > 1000


# ---------------------------------------------------------------- what every trainer does: see mutants.py

def test_every_epoch_sees_every_prompt_once_in_an_order_of_its_own(each):
    script, trainer_class = each(BATCH_SIZE=2, GRADIENT_ACCUMULATION_STEPS=2)
    state = SimpleNamespace(epoch=0, order=None, cursor=0)
    trainer = SimpleNamespace(train_rows=list(range(10)), state=state)
    orders = []
    for epoch in (1, 2, 3):
        steps = [trainer_class.next_rows(trainer) for _ in range(3)]
        assert [len(rows) for rows in steps] == [4, 4, 2] and trainer.state.epoch == epoch
        orders.append(sum(steps, []))
        assert sorted(orders[-1]) == list(range(10)) != orders[-1]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_a_checkpoint_keeps_every_field_of_the_state_by_itself(each, tmp_path):
    script, trainer_class = each(RESUME="no")
    trainer = trainer_class()
    trainer.open_run()
    numbers = [key for key, value in vars(trainer.state).items() if isinstance(value, (int, float))]
    numbers.remove("prompts")  # must fit the data
    assert {"evals_since_best", "halvings", "best_reward", "cursor", "epoch", "skipped"} <= set(numbers)
    for number, key in enumerate(numbers, 2):  # each its own, so that no two can change places
        setattr(trainer.state, key, type(getattr(trainer.state, key))(number))
    trainer.state.order = torch.arange(24).flip(0)
    folder = tmp_path / "run/step_9"
    script.write_checkpoint(folder, trainer.fill_checkpoint)
    trainer.lock.close()
    again = trainer_class(str(folder))
    for key, value in vars(trainer.state).items():
        got = getattr(again.state, key)
        assert torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value, key


def graded(trainer):
    """Give every weight of every model a gradient; returns them, by the model's name."""
    torch.manual_seed(0)
    for model in trainer.models.values():
        for p in model.parameters():
            p.grad = torch.randn_like(p)
    return {name: joined(p.grad for p in model.parameters()) for name, model in trainer.models.items()}


def joined(tensors):
    return torch.cat([x.detach().flatten().clone() for x in tensors])


def test_each_models_gradient_is_clipped_to_max_grad_norm(each):
    script, trainer_class = each(MAX_GRAD_NORM=0.25)
    trainer = trainer_class()
    before, stepped = graded(trainer), {}
    for name, model in trainer.models.items():
        def step(name=name, model=model):
            stepped[name] = joined(p.grad for p in model.parameters())
        trainer.optimizers[name].step = step
    norms = trainer.clip_and_step(0.0, None, None)
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
    trainer.clip_and_step(0.0, None, None)
    for name, model in trainer.models.items():  # AdamW without a gradient only shrinks: w (1 - rate decay)
        rate = 0.03 if name == "critic" else 0.01
        want = before[name] * (1 - rate * 0.5)
        torch.testing.assert_close(joined(model.parameters()), want, rtol=1e-6, atol=0)


def test_a_prompt_of_max_prompt_tokens_is_kept_and_one_more_is_not(each):
    script, trainer_class = each(EVAL_DATASETS=[])
    trainer = trainer_class()
    row = {"id": "a:1", "prompt": trainer.train_rows[0]["prompt"]}
    length = len(trainer.train_rows[0]["ids"])
    for longest, kept in ((length + 1, 1), (length, 1), (length - 1, 0)):
        script.MAX_PROMPT_TOKENS = longest
        assert len(trainer.encode([dict(row)], "here")) == kept


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
        script, trainer_class = each(ACTOR_MODEL=model, EVAL_DATASETS=[])
        trainer = trainer_class()
        row = trainer.train_rows[0]
        plain = trainer.tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        assert row["ids"] == ([50, 51, *plain, 52] if template else [50, *plain])


def test_the_reward_model_reads_one_bos_and_one_eos_with_and_without_a_chat_template(each, tmp_path):
    for template in ("", CHAT):
        model = with_bos(tmp_path / f"model {len(template)}", TINY / "reward_model", template)
        script, trainer_class = each(REWARD_MODEL=model, EVAL_DATASETS=[])
        trainer, seen = trainer_class(), []

        def look(module, args, kwargs):
            seen.extend(kwargs["input_ids"].tolist())
        trainer.reward_model.base_model.register_forward_pre_hook(look, with_kwargs=True)
        trainer.reward_model_score("Tom has 1 apples.", "#### 1")
        text = "$(Tom has 1 apples.)#### 1<eos>" if template else "$Tom has 1 apples.#### 1<eos>"
        assert seen == [trainer.reward_tokenizer(text, add_special_tokens=False)["input_ids"]]
        assert seen[0].count(50) == seen[0].count(1) == 1


def test_the_eos_ids_of_the_generation_config_end_a_response_too(each, tmp_path):
    shutil.copytree(TINY / "policy", tmp_path / "model")
    config = json.loads((tmp_path / "model/generation_config.json").read_text())
    config["eos_token_id"] = [3, 1]  # 3 is the end of a line
    (tmp_path / "model/generation_config.json").write_text(json.dumps(config))
    script, trainer_class = each(ACTOR_MODEL=str(tmp_path / "model"), EVAL_DATASETS=[])
    trainer = trainer_class()
    batch = trainer.respond([row["ids"] for row in trainer.train_rows[:4]], None)
    last = batch.response_ids.gather(1, batch.response_lengths[:, None] - 1).squeeze(1)
    assert 3 in last.tolist() and not batch.truncated[last == 3].any()
    before_the_last = torch.arange(batch.response_ids.shape[1]) < batch.response_lengths[:, None] - 1
    assert not (batch.response_ids[before_the_last] == 3).any()


def judged(trainer, monkeypatch, evaluations):
    """Which evaluations made evaluate_and_log() keep a best policy, and evals_since_best after each."""
    monkeypatch.setattr(trainer, "write_metrics", lambda *_: None)
    monkeypatch.setattr(trainer, "say", lambda *_: None)
    monkeypatch.setattr(trainer, "validate", dict, raising=False)  # rce's; without it rce goes by the reward
    saved, waited = [], []
    for number, (reward, greedy) in enumerate(evaluations):
        monkeypatch.setattr(trainer, "evaluate", lambda: {"accuracy_greedy": greedy, "reward": reward})
        monkeypatch.setattr(trainer, "save_best", lambda metrics: saved.append(number))
        trainer.evaluate_and_log()
        waited.append(trainer.state.evals_since_best)
    return saved, waited


EVALUATIONS = [(0.1, 0.9), (0.5, 0.1), (0.55, 0.2), (0.5, 0.95), (0.62, 0.0)]  # reward, greedy accuracy


@pytest.mark.parametrize("threshold", [0.0, 0.1])
def test_the_best_policy_is_that_of_the_highest_reward_whatever_the_threshold(each, monkeypatch, threshold):
    script, trainer_class = each(EARLY_STOPPING_THRESHOLD=threshold)
    assert judged(trainer_class(), monkeypatch, EVALUATIONS)[0] == [0, 1, 2, 4]


def test_patience_counts_evaluations_that_are_not_better_by_more_than_the_threshold(each, monkeypatch):
    for threshold, want in ((0.0, [0, 0, 0, 1, 0]), (0.1, [0, 0, 1, 2, 0])):
        script, trainer_class = each(EARLY_STOPPING_THRESHOLD=threshold)
        assert judged(trainer_class(), monkeypatch, EVALUATIONS)[1] == want


def test_the_second_step_of_a_resumed_run_is_that_of_the_unbroken_one(ppo, tmp_path):
    """The kill and resume above in short: weights, both optimizers, generators, cursor, coefficient, logs."""
    constants = dict(MAX_STEPS=2, SAVE_EVERY_N_STEPS=1, MAX_TRAIN_PROMPTS=6, MAX_NEW_TOKENS=16,
                     MINI_BATCHES=2, KL_COEF=0.1, KL_TARGET=0.01, EVAL_DATASETS=[], RESUME="yes")

    def run(out):
        trainer = ppo(**constants, OUTPUT_DIR=str(out)).PPOTrainer()
        trainer.draw_plots = lambda: None  # most of the time
        trainer.train()
    one, two = tmp_path / "unbroken", tmp_path / "resumed"
    run(one)
    shutil.copytree(one, two)
    shutil.rmtree(two / "step_2")
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    run(two)
    for file in ("step_2/policy/model.safetensors", "step_2/critic/model.safetensors", "logs/samples.jsonl"):
        assert (one / file).read_bytes() == (two / file).read_bytes(), file
    assert untimed(one / "logs/metrics.jsonl") == untimed(two / "logs/metrics.jsonl")
    flat = []
    for out in (one, two):
        state = torch.load(out / "step_2/training_state.pt", weights_only=True)
        del state["log_bytes"]  # timings differ in length
        flat.append(dict(walk(state)))
    assert flat[0].keys() == flat[1].keys()
    for key, value in flat[0].items():
        other = flat[1][key]
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, key


# ---------------------------------------------------------------- the guide's ways of working

SCENARIOS = {
    "8 GB card": dict(BATCH_SIZE=1, GRADIENT_ACCUMULATION_STEPS=8, GROUP_SIZE=1, SAVE_EVERY_N_STEPS=200, EVAL_EVERY_N_STEPS=100),
    "quick experiment, 16 GB": dict(BATCH_SIZE=4, GRADIENT_ACCUMULATION_STEPS=1, GROUP_SIZE=2, USE_LR_SCHEDULER=True, LR_SCHEDULER_TYPE="cosine", EARLY_STOPPING_PATIENCE=3),
    "production": dict(BATCH_SIZE=8, GRADIENT_ACCUMULATION_STEPS=2, GROUP_SIZE=4, USE_LR_SCHEDULER=True, LR_SCHEDULER_TYPE="plateau", EARLY_STOPPING_PATIENCE=10,
                       SAVE_EVERY_N_STEPS=500, EVAL_EVERY_N_STEPS=100, USE_WANDB=True),
    "debug": dict(BATCH_SIZE=2, NUM_EPOCHS=1, SAVE_EVERY_N_STEPS=10, EVAL_EVERY_N_STEPS=5, USE_WANDB=False, MAX_TRAIN_PROMPTS=5, MAX_EVAL_PROMPTS=2),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_guides_scenarios(name, tmp_path):
    chosen = SCENARIOS[name]
    readme = (ROOT / "README.md").read_text()
    assert " ".join(f"{k}={v}" for k, v in chosen.items()) in readme  # the README gives this very list
    out = tmp_path / "run"
    small = {"MAX_NEW_TOKENS": 24, "MAX_STEPS": 3, "MAX_TRAIN_PROMPTS": 48, "MAX_EVAL_PROMPTS": 4}
    process = subprocess.run([sys.executable, "ppo.py", *(f"{k}={v}" for k, v in {"OUTPUT_DIR": out, **small, **chosen}.items())], cwd=ROOT / "ppo",
                             stdin=subprocess.DEVNULL, capture_output=True, text=True, env={**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}, timeout=240)
    assert process.returncode == 0, process.stderr
    train = [r for r in read(out / "logs/metrics.jsonl") if r["phase"] == "train"]
    prompts, per_step = min(48, chosen.get("MAX_TRAIN_PROMPTS", 48)), chosen["BATCH_SIZE"] * chosen.get("GRADIENT_ACCUMULATION_STEPS", 2)
    assert len(train) == min(3, math.ceil(prompts / per_step))
    assert f"{per_step} x {chosen.get('GROUP_SIZE', 4)} responses each" in process.stdout
    assert bool(list(out.glob("wandb/offline-run-*"))) == chosen.get("USE_WANDB", False)
    rates = [r["learning_rate"] for r in train]
    assert (rates[-1] < rates[0]) == (chosen.get("LR_SCHEDULER_TYPE") == "cosine")
    assert [p.name for p in out.glob("step_*")] == [f"step_{len(train)}"]  # not due earlier: saved at the end


def test_the_readmes_custom_reward_recipe_runs(ppo):
    script = ppo(REWARD_MODEL=str(TINY / "reward_model"), MAX_STEPS=1)
    recipe = (ROOT / "README.md").read_text().split("<!-- recipe: custom reward -->\n```python\n")[1].split("```")[0]
    space = {"ppo": script}
    exec(recipe.replace("import ppo\n", ""), space)
    trainer = space["MyTrainer"]()
    trainer.train()
    assert {"reward/reward_model", "reward/length_penalty", "reward/diversity"} <= read(trainer.metrics_file.name)[1].keys()


def test_a_custom_metric_by_overriding_evaluate(ppo):
    script = ppo(MAX_STEPS=1)

    class Mine(script.PPOTrainer):
        def evaluate(self, prompts=None, answers=None):
            return {**super().evaluate(prompts, answers), "mine": 7.0}
    trainer = Mine()
    assert trainer.train()["mine"] == 7.0 and read(trainer.metrics_file.name)[0]["mine"] == 7.0
    assert set(trainer.evaluate(["Tom has 1 apples. How many apples are there now?"], ["#### 1"])) >= {"accuracy_greedy", "accuracy_sampled", "reward"}


def test_the_file_and_rewards_alone_are_a_working_trainer(tmp_path):
    shutil.copy(ROOT / "ppo/ppo.py", tmp_path / "ppo.py")
    shutil.copytree(ROOT / "rewards", tmp_path / "rewards")
    shutil.copytree(TINY, tmp_path / "mine")
    data = "[{'path': 'mine/test.jsonl', 'type': 'jsonl', 'input': 'problem', 'output': 'solution'}]"
    small = [f"{k}={v}" for k, v in SMALL.items()]
    done = subprocess.run([sys.executable, "ppo.py", *small, "ACTOR_MODEL=mine/policy", f"TRAIN_DATASETS={data}", f"EVAL_DATASETS={data}", "OUTPUT_DIR=out"],
                          cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and (tmp_path / "out/step_2/manifest.json").exists(), done.stderr
    shutil.rmtree(tmp_path / "rewards")
    done = subprocess.run([sys.executable, "ppo.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "rewards/" in done.stderr and "Traceback" not in done.stderr


def test_the_shipped_data_is_small_and_its_answers_parse():
    assert sum(p.stat().st_size for p in TINY.rglob("*") if p.is_file()) < 8_000_000
    import rewards
    for name in ("train.jsonl", "test.jsonl"):
        golds = [row["solution"] for row in read(TINY / name)]
        assert rewards.exact_answer(golds, golds, golds) == [1.0] * len(golds)
    assert not {r["problem"] for r in read(TINY / "train.jsonl")} & {r["problem"] for r in read(TINY / "test.jsonl")}


# ---------------------------------------------------------------- what an audit found

TRAINERS = [("ppo/ppo.py", "PPOTrainer"), ("grpo/grpo.py", "GRPOTrainer"), ("rce/rce.py", "RCETrainer")]


def untrained(path, name, out, **constants):
    """A trainer, its files open, that has not trained."""
    small = {key: value for key, value in SMALL.items() if path != "rce/rce.py" or key != "KL_COEF"}
    script = load_script(path, **{**small, "OUTPUT_DIR": str(out), **constants})
    trainer = getattr(script, name)()
    trainer.open_run()
    trainer.validate = dict  # only rce.py's is asked
    return trainer


@pytest.mark.parametrize("path, name", TRAINERS)
def test_best_is_the_highest_and_patience_waits_for_the_threshold(path, name, tmp_path, monkeypatch):
    trainer = untrained(path, name, tmp_path / "run", EARLY_STOPPING_THRESHOLD=0.1, PLATEAU_PATIENCE=2)
    saved, state = [], trainer.state
    monkeypatch.setattr(trainer, "save_best", lambda metrics: saved.append(metrics["reward"]))
    seen = []
    for value in (0.5, 0.55, 0.52, 0.59, 0.65, 0.7, 0.6, 0.8):
        monkeypatch.setattr(trainer, "evaluate", lambda: {"reward": value})
        trainer.evaluate_and_log()
        seen.append((state.best_reward, state.patience_reward, state.evals_since_best, state.halvings))
    assert saved == [0.5, 0.55, 0.59, 0.65, 0.7, 0.8]  # each the highest so far, by however little
    assert seen == [(0.5, 0.5, 0, 0), (0.55, 0.5, 1, 0), (0.55, 0.5, 2, 1), (0.59, 0.5, 3, 1),
                    (0.65, 0.65, 0, 1), (0.7, 0.65, 1, 1), (0.7, 0.65, 2, 2), (0.8, 0.8, 0, 2)]


@pytest.mark.parametrize("path, name", TRAINERS)
def test_best_and_patience_resume_apart(path, name, tmp_path, monkeypatch):
    trainer = untrained(path, name, tmp_path / "run")
    kept = {"best_reward": 0.7, "patience_reward": 0.6, "evals_since_best": 3, "halvings": 2}
    vars(trainer.state).update(step=1, **kept)
    monkeypatch.setattr(trainer, "draw_plots", lambda: None)
    trainer.save_checkpoint()
    trainer.lock.close()
    again = untrained(path, name, tmp_path / "run", RESUME="yes").state
    assert {key: getattr(again, key) for key in kept} == kept


PATIENT, PLATEAU = {"EARLY_STOPPING_PATIENCE": 3}, {"LR_SCHEDULER_TYPE": "plateau"}


@pytest.mark.parametrize("path, name", TRAINERS[:2])
@pytest.mark.parametrize("constants, says", [
    (PATIENT, "nothing comes of EARLY_STOPPING_PATIENCE = 3: EVAL_EVERY_N_STEPS = 0 evaluates before and"),
    ({**PATIENT, "EVAL_EVERY_N_STEPS": 2}, "EVAL_EVERY_N_STEPS = 2 evaluates before and after the 2 steps"),
    ({"USE_LR_SCHEDULER": True, **PLATEAU}, "nothing comes of LR_SCHEDULER_TYPE = 'plateau': EVAL_EVERY"),
    ({**PATIENT, "EVAL_EVERY_N_STEPS": 1, "EVAL_DATASETS": []}, "3: EVAL_DATASETS gives nothing to evaluate"),
    ({**PATIENT, "EVAL_EVERY_N_STEPS": 1}, ""), (PLATEAU, ""), ({}, ""),
])
def test_patience_that_nothing_can_try_is_said(path, name, constants, says, tmp_path, capsys):
    trainer = untrained(path, name, tmp_path / "run", **constants)
    trainer.evaluate_and_log()
    said = capsys.readouterr().out
    assert said.count("WARNING") == bool(says) and says in said
    trainer.log.flush()
    assert says in Path(trainer.log.name).read_text()


@pytest.mark.parametrize("path, name", TRAINERS)
def test_a_run_names_the_policy_that_it_kept(path, name, tmp_path, capsys):
    for evaluated in (False, True):
        out = tmp_path / str(evaluated)
        trainer = untrained(path, name, out)
        if evaluated:
            trainer.evaluate = lambda: {"reward": 0.5}
            trainer.evaluate_and_log()
        trainer.finish()
        said = capsys.readouterr().out
        assert (f"best policy: {out}/best/policy" in said) == evaluated
        none = f"no evaluation has kept a best policy here; the last one: {out}/step_0/policy"
        assert (none in said) != evaluated


SQUAD = {"q": {"text": "Tom has 1 apples."}, "answers": {"text": ["1", "one"], "answer_start": [0, 0]},
         "answers.start": "dotted", "more": {"a.b": {"c": 3}}}


def squad(path, kind, output):
    return [{"path": str(path), "type": kind, "input": "q.text", "output": output}]


@pytest.mark.parametrize("path, name", TRAINERS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
def test_a_column_may_be_a_path_into_nested_records(path, name, kind, tmp_path):
    jsonl(tmp_path / "a.jsonl", SQUAD)
    (tmp_path / "a.hub").mkdir()
    for file in ("a.parquet", "a.hub/train.parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([SQUAD]), tmp_path / file)
    script = load_script(path)
    for output, answer in (("answers.text", ["1", "one"]), ("answers.start", "dotted"), ("more.a.b.c", "3")):
        row, = script.load_rows(squad(tmp_path / f"a.{kind}", kind, output), "TRAIN_DATASETS")
        assert (row["prompt"], row["answer"]) == ("Tom has 1 apples.", answer)
    with pytest.raises(script.UserError, match="line 1: there is no value for column 'answers.texts'"):
        script.load_rows(squad(tmp_path / "a.jsonl", "jsonl", "answers.texts"), "TRAIN_DATASETS")


def test_parquet_reads_only_the_columns_it_needs(tmp_path, monkeypatch):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([SQUAD]), tmp_path / "a.parquet")
    asked, read_table = [], pyarrow.parquet.read_table

    def spy(path, columns):
        asked.append(columns)
        return read_table(path, columns=columns)
    monkeypatch.setattr(pyarrow.parquet, "read_table", spy)
    script = load_script("ppo/ppo.py")
    for output in ("answers.text", "answers.start"):
        script.load_rows(squad(tmp_path / "a.parquet", "parquet", output), "TRAIN_DATASETS")
    assert asked == [["q", "answers"], ["q", "answers.start"]]


@pytest.mark.parametrize("solution, says", [
    ({"text": ["1"], "answer_start": [0]}, "such as 'output': 'solution.text'"), ([], "not empty, or delete"),
    ([["1"]], "a list of such"), (["1", None], "a list of such"), ([{"text": "1"}], "a list of such"),
    ({}, "that is not empty, or delete"), (math.nan, "write a text, a number"), ([1.0, math.inf], "a number"),
])
def test_an_answer_that_is_no_text_is_named_with_its_line(ppo, tmp_path, solution, says):
    lines = {"problem": "x", "solution": 1}, {"problem": "y", "solution": solution}
    script = ppo(TRAIN_DATASETS=[jsonl(tmp_path / "a.jsonl", *lines)])
    match = f"TRAIN_DATASETS: .*a.jsonl line 2: 'solution' holds .*{says}"
    with pytest.raises(script.UserError, match=match) as error:
        script.PPOTrainer()
    assert len(str(error.value).splitlines()) == 1


def test_a_prompt_that_is_a_record_is_named_with_what_to_write(ppo, tmp_path):
    script = ppo(TRAIN_DATASETS=[jsonl(tmp_path / "a.jsonl", {"problem": {"text": "x"}, "solution": 1})])
    says = "must be a text that is not empty, or name what is in it, such as 'input': 'problem.text'$"
    with pytest.raises(script.UserError, match=f"line 1: 'problem' {says}"):
        script.PPOTrainer()
