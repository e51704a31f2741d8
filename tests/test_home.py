"""A user's own model and data: what the first lines of a run say of them, what a misspelt name gets, and how
a trained policy is scored (STAGE=evaluate)."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY, load_script, read, reward_batch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification


def own_data(folder):
    file = folder / "questions.jsonl"
    file.write_text("\n".join(json.dumps({"q": f"What is {i} + 1?", "a": str(i + 1)}) for i in range(8)))
    return [{"path": str(file), "type": "jsonl", "input": "q", "output": "a"}]


def notes(started, path, *words):
    """The NOTE among the first lines of a run; "" if there is none."""
    run = started(path, *words)
    assert "prompts to train on" in run.stdout, run.stderr
    return next((line for line in run.stdout.splitlines() if line.startswith("NOTE")), "")


def test_a_run_of_the_shipped_model_and_data_has_no_note(started, path, tmp_path):
    assert notes(started, path, f"OUTPUT_DIR={tmp_path / 'run'}") == ""


def test_another_model_is_told_which_constants_were_tuned_for_the_shipped_one(started, path, tmp_path):
    shutil.copytree(TINY / "policy", tmp_path / "mine")
    note = notes(started, path, f"OUTPUT_DIR={tmp_path / 'run'}", f"ACTOR_MODEL={tmp_path / 'mine'}")
    assert "LEARNING_RATE = 0.000" in note and "MAX_PROMPT_TOKENS = 256" in note
    assert "MAX_NEW_TOKENS" not in note and "OUTPUT_DIR" not in note, "these were set by the command"
    changed = ("LEARNING_RATE=1e-6", "MAX_PROMPT_TOKENS=128")
    if path == "rce/rce.py":
        changed += ("MINE_PROMPTS=24",)
    if path == "ppo/ppo.py":
        changed += ("CRITIC_LEARNING_RATE=1e-5",)
    note = notes(
        started, path, f"OUTPUT_DIR={tmp_path / 'run2'}", f"ACTOR_MODEL={tmp_path / 'mine'}", *changed
    )
    assert note == ""


def test_other_data_alone_leave_the_learning_rate_out_of_the_note(started, path, tmp_path):
    words = (f"OUTPUT_DIR={tmp_path / 'run'}", f"TRAIN_DATASETS={own_data(tmp_path)}", "EVAL_DATASETS=[]")
    if path == "rce/rce.py":
        words += ("EVAL_DATASETS=" + str(own_data(tmp_path)),)
    note = notes(started, path, *words)
    assert "MAX_PROMPT_TOKENS = 256" in note and "LEARNING_RATE" not in note


def test_the_note_names_only_constants_of_the_file_with_their_values_as_they_stand_there(path):
    script = load_script(path)
    for name, (tuned, hint) in script._TUNED_FOR_TINY.items():
        assert getattr(script, name) == tuned, f"{name} has another default now"
        assert hint
    assert {"OUTPUT_DIR", "LEARNING_RATE", "MAX_NEW_TOKENS"} <= script._TUNED_FOR_TINY.keys()


@pytest.mark.parametrize("max_steps, end", [(2, "MAX_STEPS"), (None, "NUM_EPOCHS"), (1000, "NUM_EPOCHS")])
def test_the_first_lines_say_what_ends_the_run(each, max_steps, end):
    module, trainer_class = each(MAX_STEPS=max_steps, NUM_EPOCHS=1)
    trainer = trainer_class()
    summary = module.run_summary(trainer, 3)
    assert f"where {end} ends the run" in summary
    assert "each has 4 x 2 responses and 3 optimizer steps" in summary


def test_the_memory_of_the_models_is_counted(ppo):
    """Actor and critic have weights, gradients and two moments, 16 bytes per parameter; others 4."""
    module = ppo(KL_COEF=0.1, REWARD_MODEL=f"{TINY}/reward_model")
    trainer = module.PPOTrainer()
    count = {name: sum(p.numel() for p in model.parameters()) for name, model in trainer.models.items()}
    frozen = sum(p.numel() for m in (trainer.reference, trainer.reward_model) for p in m.parameters())
    total = 16 * sum(count.values()) + 4 * frozen
    assert f"take {total / 2**30:.2f} GiB of the" in module.memory_summary(trainer)
    trainer.critic.requires_grad_(False)
    module.world_size = lambda: 2  # whole models: each process has all of it
    fewer = total - 12 * count["critic"]
    assert f"take {fewer / 2**30:.2f} GiB" in module.memory_summary(trainer)


def test_help_prints_the_docstring_and_every_constant(path):
    command = [sys.executable, str(ROOT / path), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    script = load_script(path)
    assert script.__doc__.strip() in text
    for name in script.constants():
        assert re.search(rf"^{name}\b.* = ", text, re.M), name
    assert "_VALID_RANGES = " not in text and "def " not in text


def test_a_misspelt_key_of_a_data_set_names_the_nearest_one(started, path, tmp_path):
    data = own_data(tmp_path)
    data[0]["inputs"] = data[0].pop("input")
    run = started(path, f"TRAIN_DATASETS={data}", f"OUTPUT_DIR={tmp_path / 'run'}")
    assert run.returncode == 2
    assert "unknown key 'inputs'" in run.stderr and "did you mean input?" in run.stderr


def test_a_constant_that_nothing_reads_is_warned_of(each, capsys):
    module, trainer_class = each()
    module.NUM_EPOCHES = 3
    trainer_class()
    assert "nothing reads the constant NUM_EPOCHES; did you mean NUM_EPOCHS?" in capsys.readouterr().out


def test_no_constant_of_the_file_itself_is_warned_of(each, capsys):
    module, _ = each()
    module.check_constants()
    assert "WARNING" not in capsys.readouterr().out


def test_an_own_compute_rewards_without_answers_is_told_what_it_is_called_with(ppo):
    """Guides show compute_rewards(self, prompts, responses)."""
    module = ppo()

    class Mine(module.PPOTrainer):
        def compute_rewards(self, prompts, responses):
            return [0.0] * len(responses)

    with pytest.raises(module.UserError, match="compute_rewards: .* called with prompts, responses, answers"):
        Mine().evaluate()


def small_encoder(folder):
    """A random BERT with a head of one label and the tiny tokenizer; returns its folder."""
    tokenizer = AutoTokenizer.from_pretrained(TINY / "policy")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), num_labels=1, initializer_range=0.5, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_reward_model_may_be_an_encoder(ppo, tmp_path):
    """Each score is that of the pair alone, whatever stands beside it; without a label it is refused."""
    folder = small_encoder(tmp_path / "encoder")
    trainer = ppo(REWARD_MODEL=folder).PPOTrainer()
    prompts = ["Tom has 1 apples.", "Ann has 2 apples. How many apples are there now?", "Leo has 34 pens."]
    responses = ["#### 1", "1+1=2\n#### 2", "34-23=11\n11+40=51\n#### 51"]
    scores = trainer.reward_model_score(prompts, responses)
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    for prompt, response, score in zip(prompts, responses, scores):
        inputs = trainer.tokenizer(prompt, response, return_tensors="pt")
        assert score.item() == pytest.approx(model(**inputs).logits.item(), abs=1e-4)
    assert len(set(scores.tolist())) == 3
    with pytest.raises(Exception, match="reads at most 512 tokens"):
        trainer.reward_model_score(["Tom has 1 apples. " * 300], ["#### 1"])


# ---------------------------------------------------------------- STAGE=evaluate


def digests(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_policy_is_scored_with_every_response_beside_the_figures(started, path, tmp_path):
    words = (f"OUTPUT_DIR={tmp_path}", "STAGE=evaluate", f"EVALUATE_POLICY={TINY / 'policy'}")
    run = started(path, *words, "EVALUATE_SAMPLES=3", "MAX_EVAL_PROMPTS=6")
    assert run.returncode == 0, run.stderr
    facts = json.loads((tmp_path / "eval_tiny_policy_test.json").read_text())
    records = read(tmp_path / "eval_tiny_policy_test.jsonl")
    assert facts["prompts"] == len(records) == 6 and facts["samples"] == 3
    means = {name: figure["mean"] for name, figure in facts["figures"].items()}
    marks = [record["sampled_correct"] for record in records]
    assert all(len(record["sampled"]) == len(record["rewards"]) == 3 for record in records)
    assert means["pass@1"] == pytest.approx(sum(map(sum, marks)) / 18)
    assert means["pass@3"] == pytest.approx(sum(map(max, marks)) / 6)
    assert means["accuracy_greedy"] == pytest.approx(sum(r["greedy_correct"] for r in records) / 6)
    assert means["reward"] == pytest.approx(sum(sum(r["rewards"]) for r in records) / 18)
    for figure in facts["figures"].values():
        assert figure["low"] <= figure["mean"] <= figure["high"]
    for record in records:
        assert record["answer"].split()[-1] in record["answer"] and record["prompt"]
    assert not (tmp_path / "logs").exists() and not list(tmp_path.glob("step_*"))


def test_evaluating_best_changes_no_file_of_the_run(started, path, tmp_path):
    words = (f"OUTPUT_DIR={tmp_path}", "MAX_EVAL_PROMPTS=4")
    assert started(path, *words).returncode == 0
    before = digests(tmp_path)
    run = started(path, *words, "STAGE=evaluate", "EVALUATE_SAMPLES=2")
    assert run.returncode == 0, run.stderr
    after = digests(tmp_path)
    assert {p.name for p in after.keys() - before.keys()} == {"eval_best_test.json", "eval_best_test.jsonl"}
    assert all(after[p] == text for p, text in before.items())
    assert "95% interval" in run.stdout and "eval_best_test.json" in run.stdout


def test_without_a_trained_policy_the_evaluation_says_what_to_do(started, path, tmp_path):
    run = started(path, f"OUTPUT_DIR={tmp_path}", "STAGE=evaluate")
    assert run.returncode == 2
    assert "EVALUATE_POLICY = 'best': there is no" in run.stderr and "train first" in run.stderr


def test_the_majority_is_the_answer_that_most_responses_state(each, monkeypatch):
    module, trainer_class = each(EVALUATE_SAMPLES=4)
    trainer = trainer_class()
    first = ["#### 5", "#### 7", "so #### 7", "nothing"]
    second = ["#### 1", "#### 2", "#### 3", "#### 3.0"]
    batch = reward_batch(["a"] * 4 + ["b"] * 4, first + second, ["#### 7"] * 8)
    assert module.majority_votes(trainer, batch).tolist() == [1, 2]
    trainer.accuracy_function = lambda prompts, responses, answers: [0.0] * len(responses)
    assert module.majority_votes(trainer, batch) is None, "a function that cannot compare two responses"
