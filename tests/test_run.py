"""The files of a run, its evaluations, its end, and the question at its start."""

import json
import os
import pty
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT, SAMPLERS, TRAINERS, load, read, small
from program import Program

PATHS = list(SAMPLERS)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


@pytest.mark.parametrize("path", PATHS)
def test_a_run_writes_what_the_documents_promise(make, tmp_path, path):
    trainer = make(path, draws=True)
    evaluation = trainer.train()
    run, name = tmp_path / "run", Path(path).stem
    step = f"step_{trainer.state.step}"
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (run / "best/policy" / file).exists() and (run / step / "policy" / file).exists()
    pictures = ("training_metrics_detailed.png", f"{name}_metrics_with_entropy.png")
    assert all((run / picture).read_bytes()[:4] == b"\x89PNG" for picture in pictures)
    config = json.loads((run / "training_config.json").read_text())
    assert config["constants"]["BATCH_SIZE"] == 4 and "ROOT" not in config["constants"]
    records = read(run / "logs/metrics.jsonl")
    assert {r["phase"] for r in records} >= {"train", "eval"}
    last = [r for r in records if r["phase"] == "eval"][-1]
    assert {k: x for k, x in last.items() if k not in ("phase", "step")} == evaluation
    samples = read(run / "logs/samples.jsonl")
    assert {"step", "id", "prompt", "answer", "response", "reward"} <= samples[0].keys()
    assert len([r for r in samples if r["step"] == 1]) == 4
    assert "Done at step" in next((run / "logs").glob("training_*.log")).read_text()


def test_old_checkpoints_are_deleted_but_not_what_no_run_wrote(make, tmp_path):
    (tmp_path / "run/step_1").mkdir(parents=True)
    (tmp_path / "run/step_1/notes.txt").write_text("mine")
    make("grpo/grpo.py", SAVE_EVERY_N_STEPS=1, MAX_STEPS=4, KEEP_LAST_N_CHECKPOINTS=2).train()
    folders = {path.name for path in (tmp_path / "run").glob("step_*")}
    assert folders == {"step_1", "step_3", "step_4"}
    assert (tmp_path / "run/step_1/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("path", PATHS)
def test_a_new_run_moves_the_earlier_runs_files_aside_and_leaves_yours(make, tmp_path, path):
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    for name in ("eval.jsonl", "logs/slurm-1.out", "best.txt"):
        (run / name).write_text("mine")
    make(path).train()
    assert [p.name for p in tmp_path.iterdir() if "_old_" in p.name] == []
    first = (run / "logs/metrics.jsonl").read_bytes()
    make(path).train()
    assert all((run / name).read_text() == "mine" for name in ("eval.jsonl", "logs/slurm-1.out", "best.txt"))
    (old,) = (p for p in tmp_path.iterdir() if "_old_" in p.name)
    assert (old / "logs/metrics.jsonl").read_bytes() == first
    assert (old / "best/policy/model.safetensors").exists() and (old / "training_config.json").exists()
    assert not any("slurm" in name or "eval.jsonl" in name for name in files(old))


def test_two_trainers_in_one_process_keep_to_their_folders(tmp_path):
    """OUTPUT_DIR is read once: another value later moves neither files nor checkpoints of the first."""
    module = load(
        "grpo/grpo.py", **small("grpo/grpo.py", SAVE_EVERY_N_STEPS=1, OUTPUT_DIR=str(tmp_path / "d"))
    )
    module.GRPOTrainer().train()
    module.OUTPUT_DIR, module.KEEP_LAST_N_CHECKPOINTS = str(tmp_path / "c"), 1
    trainer = module.GRPOTrainer()
    module.OUTPUT_DIR = str(tmp_path / "d")
    trainer.train()
    assert sorted(p.name for p in (tmp_path / "d").glob("step_*")) == ["step_1", "step_2"]
    assert sorted(p.name for p in (tmp_path / "c").glob("step_*")) == ["step_2"]


def test_a_relative_output_dir_stays_where_it_was(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = make("grpo/grpo.py", OUTPUT_DIR="here")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    trainer.train()
    assert (tmp_path / "here/step_2").exists() and files(tmp_path / "elsewhere") == []


# ---------------------------------------------------------------- evaluation


@pytest.mark.parametrize("path", ["ppo/ppo.py", "grpo/grpo.py"])
def test_evaluate_counts_correct_responses_and_changes_no_random_numbers(make, path):
    trainer = make(path, EVAL_SAMPLES=3, MAX_EVAL_PROMPTS=5)
    before = torch.get_rng_state(), trainer.generator.get_state()
    metrics = trainer.evaluate()
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], trainer.generator.get_state())
    rows = trainer.eval_rows
    uniform = torch.rand(5, 3, 32, generator=torch.Generator().manual_seed(2)).flatten(0, 1)
    batch = trainer.respond([row for row in rows for _ in range(3)], uniform)
    golds = [row["answer"] for row in rows for _ in range(3)]
    correct = torch.tensor(trainer.accuracy_function(None, batch.texts, golds)).view(5, 3)
    assert metrics["accuracy_sampled"] == pytest.approx(correct.mean().item())
    assert metrics["pass@3"] == pytest.approx(correct.amax(1).mean().item())
    greedy = trainer.respond(rows, None).texts
    right = trainer.accuracy_function(None, greedy, [row["answer"] for row in rows])
    assert metrics["accuracy_greedy"] == pytest.approx(sum(right) / 5)


@pytest.mark.parametrize("path", PATHS)
def test_evaluate_takes_prompts_and_answers_of_ones_own(make, path):
    trainer = make(path)
    row = trainer.eval_rows[0]
    metrics = trainer.evaluate([row["prompt"]] * 2, [row["answer"]] * 2)
    assert 0 <= metrics["accuracy_sampled"] <= 1 and "accuracy_greedy" in metrics


def test_best_policy_is_that_of_the_highest_reward_and_patience_ends_a_run(make, tmp_path):
    rewards = iter([0.2, 0.5, 0.4, 0.505, 0.3, 0.9])
    trainer = make(
        "grpo/grpo.py",
        EVAL_EVERY_N_STEPS=1,
        MAX_STEPS=9,
        EARLY_STOPPING_PATIENCE=3,
        EARLY_STOPPING_THRESHOLD=0.01,
    )
    trainer.evaluate = lambda: {"reward": next(rewards)}
    best = {}
    save = trainer.save_best
    trainer.save_best = lambda: (save(), best.update(step=trainer.state.step))
    trainer.train()
    assert trainer.state.step == 4 and best["step"] == 3 and trainer.state.halvings == 1


def test_without_held_out_data_best_is_the_last_policy(make, tmp_path):
    trainer = make("grpo/grpo.py", EVAL_DATASETS=[])
    trainer.train()
    best = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/best/policy")
    assert torch.equal(best.lm_head.weight, trainer.actor.lm_head.weight)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("held_out", [True, False])
def test_the_best_policy_of_a_lora_run_loads_without_peft(make, tmp_path, path, held_out):
    options = {} if held_out else {"EVAL_DATASETS": []}
    if path == "rce/rce.py" and not held_out:
        options["VALIDATION_FRACTION"] = 0.0
    trainer = make(path, LORA_RANK=4, LEARNING_RATE=1e-2, **options)
    trainer.save_best()
    trainer.train()
    best = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/best/policy").eval()
    ids = torch.tensor([trainer.train_rows[0]["ids"]])
    assert list((tmp_path / "run/best/policy").glob("adapter*")) == []
    if not held_out:
        with torch.no_grad():
            assert torch.allclose(best(ids).logits, trainer.actor(ids).logits, atol=1e-4)


# ---------------------------------------------------------------- its end


@pytest.mark.parametrize("path", TRAINERS)
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_after_its_step_and_saves(tmp_path, path, number, code):
    words = small(path, OUTPUT_DIR=tmp_path / "run", SAVE_EVERY_N_STEPS=0, EVAL_EVERY_N_STEPS=0)
    words["NUM_EPOCHS"] = 1000
    if path != "rce/rce.py":
        words["MAX_STEPS"] = 1000
    program = Program(ROOT / path, *(f"{k}={v}" for k, v in words.items()), cwd=ROOT)
    metrics = tmp_path / "run/logs/metrics.jsonl"
    while program.poll() is None and not (metrics.exists() and '"train"' in metrics.read_text()):
        pass
    program.send_signal(number)
    done = program.wait()
    assert done.returncode == code and "Stopped at step" in done.stdout, done.stderr
    step = read(metrics)[-1]["step"]
    assert (tmp_path / f"run/step_{step}/training_state.pt").exists()


def test_an_optimizer_step_that_is_not_finite_is_skipped_and_said(make, tmp_path, capsys):
    trainer = make("grpo/grpo.py", MAX_STEPS=1, EVAL_DATASETS=[])
    before = [p.clone() for p in trainer.actor.parameters()]
    trainer.compute_advantages = lambda batch: vars(batch).update(
        advantages=torch.full((len(batch.rows), 1), float("nan")), trained=batch.mask
    )
    trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.actor.parameters()))
    assert "not finite" in capsys.readouterr().out
    record = read(tmp_path / "run/logs/metrics.jsonl")[0]
    assert record["policy_loss"] is None


# ---------------------------------------------------------------- the question


def ask(path, tmp_path, answer):
    """Starts a trainer at a terminal where a checkpoint is, and types the answer. Returns what it showed."""
    words = [f"{k}={v}" for k, v in small(path, OUTPUT_DIR=tmp_path / "run", RESUME="ask").items()]
    shown = []

    def on_output(descriptor):
        data = os.read(descriptor, 1024)
        shown.append(data.decode())
        if "(y/n)" in shown[-1]:
            os.write(descriptor, answer)
        return data

    status = pty.spawn([sys.executable, str(ROOT / path), *words], on_output, lambda descriptor: b"")
    return os.waitstatus_to_exitcode(status), "".join(shown)


@pytest.mark.parametrize("answer", [b"y\n", b"n\n"])
def test_at_a_terminal_a_run_asks_whether_to_continue(make, tmp_path, answer):
    make("grpo/grpo.py", MAX_STEPS=2).train()
    result = []
    thread = threading.Thread(target=lambda: result.append(ask("grpo/grpo.py", tmp_path, answer)))
    thread.start()
    thread.join(100)
    code, shown = result[0]
    assert code == 0 and f"Found checkpoint: {tmp_path}/run/step_2" in shown
    assert ("step 1/2" in shown) == (answer == b"n\n"), shown


def test_resuming_names_the_constants_that_changed(make, capsys):
    make("grpo/grpo.py").train()
    make("grpo/grpo.py", RESUME="yes", LEARNING_RATE=5e-5, MAX_STEPS=3).train()
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("Constants that changed"))
    assert "LEARNING_RATE=5e-05" in line and "MAX_STEPS=3" in line and "GROUP_SIZE" not in line


def test_a_checkpoint_that_cannot_be_read_is_one_message_that_names_resume(make, tmp_path):
    make("grpo/grpo.py").train()
    (tmp_path / "run/step_2/training_state.pt").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"RESUME=.*step_2 cannot be loaded") as error:
        make("grpo/grpo.py", RESUME="yes")
    assert "\n" not in str(error.value)
