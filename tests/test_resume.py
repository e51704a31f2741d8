"""A run that is killed at any moment and started again ends with the bytes of one that was not."""

import random
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TRAINERS, first_lines, load, small, spec_of, without_clock, words_of
from program import Program
from torch.utils._pytree import tree_leaves

REC = {name: first_lines(f"rec/{name}.csv", 21) for name in ("train", "valid", "test")}
MARKET = {"type": "csv", "input": "question", "output": "answer"}
RUNS = [
    (
        "ppo/ppo.py",
        {
            **{"LORA_RANK": 4, "MINI_BATCHES": 2, "KL_TARGET": 0.01, "USE_LR_SCHEDULER": True},
            **{"WARMUP_STEPS": 2, "MAX_STEPS": 4},
        },
    ),
    (
        "grpo/grpo.py",
        {
            **{"KL_COEF": 0.1, "REFERENCE_SYNC_STEPS": 2, "RESAMPLE_ZERO_VARIANCE_GROUPS": 1, "MAX_STEPS": 5},
            **{"USE_LR_SCHEDULER": True, "LR_SCHEDULER_TYPE": "plateau"},
        },
    ),
    ("rce/rce.py", {"ROUNDS": 2, "NUM_EPOCHS": 2, "TAU_END": 0.5, "SAVE_EVERY_N_STEPS": 1, "VERIFY_TOP": 2}),
    ("ppo/sft.py", {"MAX_STEPS": 5, "ACCURACY_FUNCTION": "last_number"}),
    ("ppo/reward_model.py", {"LORA_RANK": 4, "MAX_STEPS": 5}),
    ("rce/dpo.py", {"LEARNING_RATE": 1e-3, "MAX_STEPS": 5}),
    ("grpo/grpo_rec.py", {"MINI_BATCHES": 2, "GROUP_EPOCHS": 2}),
    ("ppo/ppo_rag.py", {"SAMPLE": 40, "TOP_KS": (1, 3), "FIXED_ACTION": None, "MAX_STEPS": 20}),
    ("rce/rce_icl.py", {"VALIDATION_QUESTIONS": 20, "TEST_QUESTIONS": 20, "MINE_QUESTIONS": 24}),
]
MOMENTS = {
    "rce/rce_icl.py": (0.1, 0.4, 0.7),  # while it mines, in RCE, in GRPO
    "ppo/ppo_rag.py": (0.75,),  # after its table of answers, which has most of the lines
}
# It takes along what it needs, such as candidates, into another folder
MOVED = ("ppo/ppo.py", "rce/rce.py", "ppo/ppo_rag.py", "rce/rce_icl.py")
OTHERS = {  # the constants of a run of seconds that conftest.py does not have
    "grpo/grpo_rec.py": {
        **{"TRAIN_FILE": REC["train"], "VALID_FILE": REC["valid"], "TEST_FILE": REC["test"]},
        **{"SFT_EPOCHS": 2, "SFT_BATCH_SIZE": 8, "BATCH_SIZE": 6, "GROUP_SIZE": 4, "EVAL_BEAMS": 20},
        **{"MAX_STEPS": 5, "SAVE_EVERY_N_STEPS": 2, "EVAL_EVERY_N_STEPS": 2},
    },
    "ppo/ppo_rag.py": {"N_STEPS": 16, "BATCH_SIZE": 8, "SAVE_EVERY_N_STEPS": 5, "EVAL_EVERY_N_STEPS": 2},
    "rce/rce_icl.py": {
        "TRAIN_DATASET": {**MARKET, "path": first_lines("market/train.csv", 301)},
        "TEST_DATASET": {**MARKET, "path": first_lines("market/test.csv", 101)},
        **{"RCE_EPOCHS": 2, "GRPO_EPOCHS": 1, "EVAL_EVERY_N_STEPS": 5, "SAVE_EVERY_N_STEPS": 3},
        **{"BATCH_SIZE": 16, "TEST_ORACLE": 4},
    },
}


def start(path, folder, options):
    options = {**options, "OUTPUT_DIR": folder, "RESUME": options.get("RESUME", "yes")}
    words = small(path, **options) if path in TRAINERS else {**OTHERS[path], **options}
    if path == "ppo/ppo_rag.py":
        words["CACHE_DIR"] = f"{folder}_cache"
    return Program(ROOT / path, *words_of(words), cwd=ROOT)


def finish(path, folder, options):
    done = start(path, folder, options).wait()
    assert done.returncode == 0, done.stderr


def lines(folder):
    """Returns how many lines the logs of a run have. A run that begins again writes some of them again, and
    first moves those of a run without a checkpoint away, maybe after they are listed here."""
    count = 0
    for path in [*folder.glob("logs/*"), *folder.glob("*.jsonl")]:
        with suppress(FileNotFoundError):
            count += path.read_bytes().count(b"\n")
    return count


def tensors(folder):
    """Returns the tensors of a checkpoint: of the optimizers and, in some trainers, of the models."""
    state = torch.load(folder / "training_state.pt", weights_only=True)
    return [leaf for leaf in tree_leaves(state) if torch.is_tensor(leaf)]


def assert_equal_files(one, two, *patterns):
    for pattern in patterns:
        names = [sorted(str(p.relative_to(folder)) for p in folder.glob(pattern)) for folder in (one, two)]
        assert names[0] == names[1]
        for name in names[0]:
            assert (one / name).read_bytes() == (two / name).read_bytes(), name


@pytest.mark.parametrize("path, options", RUNS)
def test_a_killed_run_ends_with_the_same_bytes(tmp_path, path, options):
    whole, killed, other = (tmp_path / name for name in ("whole", "killed", "other"))
    finish(path, whole, options)
    draw = random.Random(path)
    for share in MOMENTS.get(path, [0.5]):
        moment = (share + 0.3 * draw.random()) * lines(whole)
        program = start(path, killed, options)
        while program.poll() is None and lines(killed) < moment:
            time.sleep(0.005)
        with suppress(ProcessLookupError):  # it has ended
            program.send_signal(9)
        program.wait()
    assert list(killed.glob("step_*")), "it was killed before its first checkpoint"
    finish(path, killed, options)
    assert without_clock(whole / "logs/metrics.jsonl") == without_clock(killed / "logs/metrics.jsonl")
    written = ("best/*/*", "step_*/*/*.safetensors", "candidates*.*", "eval_test.json", "rce/*/*")
    assert_equal_files(whole, killed, "logs/samples.jsonl", *written)
    checkpoints = sorted(whole.glob("step_*"), key=lambda folder: int(folder.name[5:]))
    one, two = tensors(checkpoints[-1]), tensors(killed / checkpoints[-1].name)
    assert len(one) == len(two) > 0 and all(map(torch.equal, one, two))
    if path in MOVED:
        finish(path, other, {**options, "RESUME": checkpoints[0]})
        assert_equal_files(whole, other, f"{checkpoints[-1].name}/*/*.safetensors", "candidates*.*")
        assert all(map(torch.equal, one, tensors(other / checkpoints[-1].name)))


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(make, tmp_path):
    """Half a folder has another name, and is written again."""
    trainer = make("ppo/sft.py")
    trainer.train()
    half = tmp_path / "run/step_9.tmp"
    half.mkdir()
    (half / "training_state.pt").write_bytes(b"half")
    assert trainer.module.list_checkpoints(tmp_path / "run")[-1].name == "step_2"
    with pytest.raises(RuntimeError), trainer.module.atomic_folder(tmp_path / "run/step_9") as folder:
        (Path(folder) / "policy").write_text("half")
        raise RuntimeError("the power fails")
    assert not (tmp_path / "run/step_9").exists()


def test_an_earlier_checkpoint_can_be_continued_and_the_abandoned_branch_is_moved_aside(make, tmp_path):
    for resume in ("no", str(tmp_path / "run/step_2")):
        make("grpo/grpo.py", MAX_STEPS=4, RESUME=resume).train()
    metrics = without_clock(tmp_path / "run/logs/metrics.jsonl")
    assert [r["step"] for r in metrics if r["phase"] == "train"] == [1, 2, 3, 4]
    (old,) = tmp_path.glob("run_old_*")
    assert sorted(p.name for p in old.iterdir()) == ["best", "step_4"]
    assert (tmp_path / "run/best/policy/model.safetensors").exists()
    assert_equal_files(old, tmp_path / "run", "step_4/policy/*")


def test_constants_that_change_at_a_restart_count_and_are_named(make, capsys):
    make("grpo/grpo.py").train()
    again = make("grpo/grpo.py", RESUME="yes", WEIGHT_DECAY=0.5, LEARNING_RATE=5e-5, MAX_STEPS=3)
    (group,) = again.optimizers["policy"].param_groups
    assert group["weight_decay"] == 0.5 and len(again.optimizers["policy"].state) > 0
    again.train()
    assert group["lr"] == 5e-5
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("Constants that changed"))
    assert "LEARNING_RATE=5e-05" in line and "MAX_STEPS=3" in line and "GROUP_SIZE" not in line


def test_a_checkpoint_that_cannot_be_loaded_is_one_message_that_names_resume(make, tmp_path):
    make("grpo/grpo.py", LORA_RANK=4).train()
    with pytest.raises(ValueError, match=r"RESUME=.*step_2 cannot be loaded"):
        make("grpo/grpo.py", LORA_RANK=8, RESUME="yes")
    (tmp_path / "run/step_2/training_state.pt").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"RESUME=.*step_2 cannot be loaded") as error:
        make("grpo/grpo.py", LORA_RANK=4, RESUME="yes")
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- what changed since the checkpoint


def test_a_copy_with_another_loss_trains_under_the_same_recipe(tmp_path):
    """Without a terminal. A complete run ends with 0 if nothing changed, and with 2 if its file changed."""
    for name in ("data", "rewards"):
        (tmp_path / name).symlink_to(ROOT / name)
    words = words_of(small("grpo/grpo.py", RESUME="ask", OUTPUT_DIR=f"{tmp_path}/run_{{file}}"))
    (tmp_path / "recipe.txt").write_text("\n".join(words))
    first, copy = tmp_path / "first.py", tmp_path / "copy.py"
    first.write_text((ROOT / "grpo/grpo.py").read_text())
    copy.write_text(first.read_text().replace("return -torch.min(ratio", "return -0.5 * torch.min(ratio"))

    def run(file, *words):
        return Program(file, f"@{tmp_path}/recipe.txt", *words, cwd=tmp_path).wait()

    done = [run(first), run(copy), run(copy)]
    assert [x.returncode for x in done] == [0, 0, 0] and "Done at step 2" in done[1].stdout
    assert "complete at step 2" in done[2].stdout and "Done" not in done[2].stdout
    metrics = [without_clock(tmp_path / name / "logs/metrics.jsonl")[1] for name in ("run_first", "run_copy")]
    assert metrics[1]["policy_loss"] == pytest.approx(metrics[0]["policy_loss"] / 2)
    copy.write_text(copy.read_text() + "# changed\n")
    again, longer = run(copy), run(copy, "MAX_STEPS=3")
    assert again.returncode == 2 and "complete at step 2, but the file changed since step 2" in again.stderr
    assert longer.returncode == 0 and "the file changed since step 2" in longer.stdout


@pytest.mark.parametrize("path", ["grpo/grpo.py", "rce/rce.py", "ppo/reward_model.py"])
def test_a_complete_run_does_not_end_as_if_other_constants_were_trained(make, tmp_path, capsys, path):
    make(path).train()
    make(path, RESUME="yes").train()
    assert "complete at step" in capsys.readouterr().out
    for _ in range(2):  # what was refused is refused again
        with pytest.raises(ValueError, match="complete at step .*WEIGHT_DECAY=0.5.*RESUME=no"):
            make(path, RESUME="yes", WEIGHT_DECAY=0.5).train()
    with pytest.raises(ValueError, match="the weights of .* are of .*_MODEL=.*tiny/policy"):
        name = "BASE_MODEL" if path == "ppo/reward_model.py" else "ACTOR_MODEL"
        make(path, RESUME="yes", NUM_EPOCHS=9, **{name: f"{ROOT}/data/tiny/../tiny/policy"}).train()


def test_what_a_start_changed_without_reaching_a_checkpoint_does_not_count(make, capsys):
    make("grpo/grpo.py").train()
    again = make("grpo/grpo.py", RESUME="yes", MAX_STEPS=9, WEIGHT_DECAY=0.5)
    again.run.open(again.state, False)  # and is killed
    again.run.lock.release(force=True)
    capsys.readouterr()
    make("grpo/grpo.py", RESUME="yes").train()
    assert "Constants that changed: none" in capsys.readouterr().out


def test_other_rows_in_the_same_file_are_said(make, tmp_path, capsys):
    lines = (ROOT / "data/tiny/train.jsonl").read_text().splitlines(keepends=True)
    spec = spec_of(tmp_path / "rows.jsonl", input="problem", output="solution")
    for steps, rows in enumerate((lines[:8], lines[:8], lines[1:9], lines[1:8]), 1):
        (tmp_path / "rows.jsonl").write_text("".join(rows))
        make("ppo/sft.py", TRAIN_DATASETS=spec, RESUME="yes", MAX_STEPS=steps, NUM_EPOCHS=9).train()
        changed = f"the data changed since step {steps - 1}"
        assert (changed in capsys.readouterr().out) == (steps > 2)


OPTIMIZERS = {
    "the first parameters are frozen": lambda parameters: torch.optim.AdamW(parameters[2:]),
    "in two groups": lambda p: torch.optim.AdamW([{"params": p[:2]}, {"params": p[2:]}]),
    "another class": torch.optim.RAdam,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_of_other_parameters_or_of_another_optimizer_are_refused(make, tmp_path, name):
    make("ppo/ppo.py").train()
    module = load("ppo/ppo.py", **small("ppo/ppo.py", OUTPUT_DIR=str(tmp_path / "run"), RESUME="yes"))
    module.make_optimizer = lambda model, rate: OPTIMIZERS[name](list(model.parameters()))
    with pytest.raises(ValueError, match=r"RESUME=.*step_2.*trained other parameters"):
        module.PPOTrainer()


def test_a_tensor_in_the_state_is_restored_where_an_optimizer_trains_it(make, tmp_path):
    module = load("grpo/grpo.py", **small("grpo/grpo.py", OUTPUT_DIR=str(tmp_path / "run")))

    class PriceTrainer(module.GRPOTrainer):
        def load_models(self, checkpoint):
            super().load_models(checkpoint)
            self.state.price = torch.tensor(0.0, requires_grad=True)
            self.optimizer = torch.optim.SGD([self.state.price], lr=1.0)

    first = PriceTrainer()
    first.state.price.data += 3
    first.train()
    module.RESUME = "yes"
    second = PriceTrainer()
    assert second.optimizer.param_groups[0]["params"][0] is second.state.price
    assert second.state.price.item() == 3 and second.state.price.requires_grad


def test_resume_yes_without_a_checkpoint_is_said(make, capsys):
    make("grpo/grpo.py", RESUME="yes")
    assert "RESUME=yes" in capsys.readouterr().out
