"""The files of a run, its order of rows, its evaluations, its end, and the question at its start."""

import json
import math
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT, SAMPLERS, TRAINERS, read, small, words_of
from program import Program

PATHS = list(SAMPLERS)
BEST = {**dict.fromkeys(TRAINERS, "policy"), "ppo/reward_model.py": "reward_model"}


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


@pytest.mark.parametrize("path", TRAINERS)
def test_a_run_writes_what_is_promised_and_moves_an_earlier_runs_files_aside(make, tmp_path, path):
    run, weights = tmp_path / "run", f"{BEST[path]}/model.safetensors"
    yours = ("eval.jsonl", "logs/slurm-1.out", "best.txt", "best/notes.txt", "step_1/notes.txt")
    for name in yours:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("mine")
    trainer = make(path, draws=path == "grpo/grpo.py")
    evaluation = trainer.train()
    assert list(tmp_path.glob("run_old_*")) == []
    step = f"step_{trainer.state.step}"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files(run / "best" / BEST[path]))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files(run / step / BEST[path]))
    if path == "grpo/grpo.py":
        pictures = ("training_metrics_detailed.png", "grpo_metrics_with_entropy.png")
        assert all((run / picture).read_bytes()[:4] == b"\x89PNG" for picture in pictures)
    config = json.loads((run / "training_config.json").read_text())
    assert config["constants"]["BATCH_SIZE"] == 4 and "ROOT" not in config["constants"]
    records = read(run / "logs/metrics.jsonl")
    assert records[-1] == {"phase": "eval", "step": trainer.state.step, **evaluation}
    if path != "rce/rce.py":
        phases = [(record["phase"], record["step"]) for record in records]
        assert phases == [("eval", 0), ("train", 1), ("train", 2), ("eval", 2)]
    optional = {"accuracy_greedy", "accuracy_sampled", "kl", "pick_accuracy"}
    assert set(trainer.module.PANELS) - optional <= set().union(*records)
    samples = read(run / "logs/samples.jsonl")
    if path in PATHS:
        assert {"step", "id", "prompt", "answer", "response", "reward"} <= samples[0].keys()
    assert len([r for r in samples if r["step"] == 1]) == (4 if path in PATHS else 2)
    assert "Done at step" in next((run / "logs").glob("training_*.log")).read_text()
    first = {name: (run / name).read_bytes() for name in ("logs/metrics.jsonl", f"best/{weights}")}
    again = make(path, LEARNING_RATE=1e-5)
    again.run.open(again.state, False)
    assert all((run / name).read_text() == "mine" for name in yours)
    (old,) = tmp_path.glob("run_old_*")
    assert {name: (old / name).read_bytes() for name in first} == first
    assert (old / "training_config.json").exists()
    assert not any("slurm" in name or "eval.jsonl" in name or "notes" in name for name in files(old))


def test_old_checkpoints_are_deleted_and_each_trainer_keeps_to_its_folder(make, tmp_path, monkeypatch):
    """OUTPUT_DIR is read once: neither another value nor another working directory changes it later."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/step_1").mkdir(parents=True)
    (tmp_path / "run/step_1/notes.txt").write_text("mine")
    options = {"OUTPUT_DIR": "run", "SAVE_EVERY_N_STEPS": 1, "MAX_STEPS": 4, "KEEP_LAST_N_CHECKPOINTS": 2}
    trainer = make("grpo/grpo.py", **options)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    trainer.module.OUTPUT_DIR = "."
    trainer.train()
    assert {path.name for path in (tmp_path / "run").glob("step_*")} == {"step_1", "step_3", "step_4"}
    assert files(tmp_path / "run/step_1") == ["notes.txt"] and files(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("path", ["ppo/ppo.py", "grpo/grpo.py", "ppo/sft.py"])
def test_each_epoch_has_its_own_order_of_all_rows(make, path):
    trainer = make(path, MAX_STEPS=None, NUM_EPOCHS=2)
    trainer.train_rows = trainer.train_rows[:10]
    trainer.steps_per_epoch = 3
    next_rows = trainer.next_prompts if path in PATHS else trainer.next_rows
    epochs = [[], []]
    for step in range(1, 7):
        trainer.state.step = step
        rows = [row["id"] for row in next_rows()]
        assert len(rows) == (4 if step % 3 else 2)
        epochs[(step - 1) // 3] += rows
    names = sorted(row["id"] for row in trainer.train_rows)
    assert sorted(epochs[0]) == sorted(epochs[1]) == names and epochs[0] != epochs[1] != names


# ---------------------------------------------------------------- evaluation


def test_evaluate_counts_correct_responses_and_changes_no_random_numbers(make):
    trainer = make("grpo/grpo.py", EVAL_SAMPLES=3, MAX_EVAL_PROMPTS=5)
    before = torch.get_rng_state(), trainer.generator.get_state()
    rows = trainer.eval_rows
    metrics = trainer.evaluate()
    assert trainer.evaluate(*([row[name] for row in rows] for name in ("prompt", "answer"))) == metrics
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], trainer.generator.get_state())
    uniform = torch.rand(5, 3, 32, generator=torch.Generator().manual_seed(2)).flatten(0, 1)
    batch = trainer.respond([row for row in rows for _ in range(3)], uniform)
    golds = [row["answer"] for row in rows for _ in range(3)]
    correct = torch.tensor(trainer.accuracy_function(None, batch.texts, golds)).view(5, 3)
    assert metrics["accuracy_sampled"] == pytest.approx(correct.mean().item())
    assert metrics["pass@3"] == pytest.approx(correct.amax(1).mean().item())
    greedy = trainer.respond(rows, None).texts
    right = trainer.accuracy_function(None, greedy, [row["answer"] for row in rows])
    assert metrics["accuracy_greedy"] == pytest.approx(sum(right) / 5)


@pytest.mark.parametrize("path", ["grpo/grpo.py", "rce/rce.py", "ppo/reward_model.py"])
def test_the_best_model_has_the_best_evaluation_and_patience_ends_a_run(make, path):
    scores = iter([0.2, 0.5, 0.4, 0.505, 0.505, 0.9])  # the fifth equals the best
    longer = {"NUM_EPOCHS": 9} if path == "rce/rce.py" else {"MAX_STEPS": 9}
    patience = {"EARLY_STOPPING_PATIENCE": 3, "EARLY_STOPPING_THRESHOLD": 0.01}
    trainer = make(path, EVAL_EVERY_N_STEPS=1, **longer, **patience)
    name, sign = ("reward", 1) if path in PATHS else ("loss", -1)
    trainer.evaluate = lambda *rows: {name: sign * next(scores)}
    trainer.validate = dict  # of rce.py
    saved = []
    trainer.save_best = lambda: saved.append(trainer.state.step)
    (trainer.run.folder / "best" / BEST[path]).mkdir(parents=True)
    trainer.train()
    assert saved == ([0, 1, 3, 4] if path == "rce/rce.py" else [0, 1, 3])
    assert trainer.state.step == 4
    assert path not in PATHS or trainer.state.halvings == 1


@pytest.mark.parametrize("path", ["ppo/ppo.py", "rce/rce.py", "rce/dpo.py"])
def test_the_best_model_of_a_lora_run_loads_without_peft(make, tmp_path, path):
    """Without held-out data it is the last one."""
    options = {"LORA_RANK": 4, "LEARNING_RATE": 1e-2, "WARMUP_STEPS": 0, "EVAL_DATASETS": []}
    trainer = make(path, **options, **({"VALIDATION_FRACTION": 0.0} if path == "rce/rce.py" else {}))
    trainer.train()
    model = trainer.models[BEST[path]]
    is_adapted = {p.requires_grad for name, p in model.named_parameters() if "lora" in name}
    assert is_adapted == {True} and not all(p.requires_grad for p in model.parameters())
    folder = tmp_path / "run/best" / BEST[path]
    folders = (folder, ROOT / "data/tiny/policy")
    best, plain = (transformers.AutoModel.from_pretrained(x).eval() for x in folders)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        hidden, merged, start = (m(ids).last_hidden_state for m in (model.get_decoder(), best, plain))
    assert torch.allclose(merged, hidden, atol=1e-3) and not torch.allclose(start, hidden, atol=1e-2)
    assert not list(folder.glob("adapter*"))


# ---------------------------------------------------------------- its end and its start


SIGNALS = {"ppo/ppo.py": signal.SIGINT, "rce/rce.py": signal.SIGTERM, "ppo/sft.py": signal.SIGTERM}


@pytest.mark.parametrize("path, number", SIGNALS.items())
def test_a_signal_ends_a_run_after_its_step_and_saves(tmp_path, path, number):
    words = small(path, OUTPUT_DIR=tmp_path / "run", SAVE_EVERY_N_STEPS=0, EVAL_EVERY_N_STEPS=0)
    words |= {"NUM_EPOCHS": 1000} if path == "rce/rce.py" else {"MAX_STEPS": 1000}
    program = Program(ROOT / path, *words_of(words), cwd=ROOT)
    metrics = tmp_path / "run/logs/metrics.jsonl"
    while program.poll() is None and not (metrics.exists() and '"train"' in metrics.read_text()):
        time.sleep(0.01)
    program.send_signal(number)
    done = program.wait()
    assert done.returncode == 128 + number and "Stopped at step" in done.stdout, done.stderr
    step = read(metrics)[-1]["step"]
    assert (tmp_path / f"run/step_{step}/training_state.pt").exists()


@pytest.mark.parametrize("path", PATHS)
def test_a_policy_that_has_diverged_ends_the_run_with_one_line(make, path):
    trainer = make(path)
    trainer.actor.lm_head.weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match="not finite: lower LEARNING_RATE"):
        trainer.train()


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


def test_at_a_terminal_a_run_asks_whether_to_continue(make, monkeypatch):
    """None: standard input is closed, and so no terminal."""
    make("grpo/grpo.py").train()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for answer, step in (("y", 2), ("n", 0), (None, 2)):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        monkeypatch.setattr(sys, "stdin", answer and sys.stdout)
        assert make("grpo/grpo.py", RESUME="ask").state.step == step
