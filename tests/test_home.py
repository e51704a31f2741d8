"""A user's own model and data: what the first lines of a run say of them, what a misspelt name gets, and how
a trained policy is scored (STAGE=evaluate)."""

import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, load_script, read, reward_batch
from rewards import exact_answer
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForSequenceClassification


def own_data(folder):
    file = folder / "questions.jsonl"
    file.write_text("\n".join(json.dumps({"q": f"What is {i} + 1?", "a": str(i + 1)}) for i in range(8)))
    return [{"path": str(file), "type": "jsonl", "input": "q", "output": "a"}]


def notes(started, path, *words):
    """Returns the NOTE among the first lines of a run; "" if there is none."""
    run = started(path, *words)
    assert "prompts to train on" in run.stdout, run.stderr
    return next((line for line in run.stdout.splitlines() if line.startswith("NOTE")), "")


def test_a_run_of_the_shipped_model_and_data_has_no_note(started, path, tmp_path):
    assert notes(started, path, f"OUTPUT_DIR={tmp_path / 'run'}") == ""
    assert load_script(path).unsuited_constants() == [], "with the default constants"


def test_what_lies_in_the_repositorys_data_is_shipped(ppo, tmp_path, monkeypatch):
    script = ppo()
    assert script.is_shipped(TINY / "policy")
    assert not script.is_shipped(ROOT / "checkpoints/ppo/best/policy") and not script.is_shipped(tmp_path)
    monkeypatch.chdir(ROOT)
    assert script.is_shipped("data/tiny/train.jsonl") and not script.is_shipped("data/../grpo")


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
    if path == "rce/rce.py":
        changed += ("MINE_PROMPTS=24",)
    note = notes(
        started, path, f"OUTPUT_DIR={tmp_path / 'run2'}", f"ACTOR_MODEL={tmp_path / 'mine'}", *changed
    )
    assert note == ""


def test_other_data_alone_leave_what_the_model_decides_out_of_the_note(path, tmp_path):
    data = [{"path": str(tmp_path / "mine.jsonl"), "type": "jsonl", "input": "problem", "output": "solution"}]
    (note,) = load_script(path, TRAIN_DATASETS=data).unsuited_constants()
    assert "OUTPUT_DIR = " in note and "LEARNING_RATE" not in note and "TOKENS" not in note


def test_own_data_with_the_shipped_evaluation_are_told_so(each, tmp_path):
    shutil.copy(TINY / "train.jsonl", tmp_path / "mine.jsonl")
    data = [{"path": str(tmp_path / "mine.jsonl"), "type": "jsonl", "input": "problem", "output": "solution"}]
    module, trainer_class = each()
    trainer = trainer_class()
    assert module.shipped_evaluation(trainer) == []
    module.TRAIN_DATASETS = data + module.TRAIN_DATASETS
    (note,) = module.shipped_evaluation(trainer)
    assert "NOTE: TRAIN_DATASETS is your own data, but EVAL_DATASETS" in note and "still the shipped" in note
    assert note in module.run_summary(trainer, 1) and "set EVAL_DATASETS to held-out rows" in note
    module.EVAL_DATASETS = data
    assert module.shipped_evaluation(trainer) == []
    trainer = each(TRAIN_DATASETS=data, EVAL_DATASETS=[])[1]()
    module.EVAL_DATASETS, trainer.eval_rows = module.TRAIN_DATASETS[1:], []
    assert module.shipped_evaluation(trainer) == [], "MAX_EVAL_PROMPTS=0: nothing is evaluated"


def test_words_that_the_tokenizer_does_not_know_are_counted(each, tmp_path, capsys):
    file = tmp_path / "mine.jsonl"
    prompts = ["Tom has 3 apples.", "Zebras have 3 apples."]
    file.write_text("\n".join(json.dumps({"q": prompt, "a": "3"}) for prompt in prompts))
    data = [{"path": str(file), "type": "jsonl", "input": "q", "output": "a"}]
    module, trainer_class = each(TRAIN_DATASETS=data, MAX_EVAL_PROMPTS=4)
    trainer = trainer_class()
    ids = [row["ids"] for row in trainer.train_rows]
    unknown = trainer.tokenizer.unk_token_id
    assert unknown not in ids[0] and unknown in ids[1]
    part = ids[1].count(unknown) / (len(ids[0]) + len(ids[1]))
    said = f"WARNING: TRAIN_DATASETS: {part:.1%} of the tokens, in 1 of 2 rows (the first: mine.jsonl:2: '"
    found = capsys.readouterr().out
    assert found.count(said) == 1
    shown, rest = found.split(said)[1].split("')", 1)
    assert rest.startswith(", are <unk>") and "<unk><unk> 3 apples." in shown
    trainer.tokenizer.eos_token = "<unk>"  # as GPT-2's: no word becomes it
    module.warn_of_unknown_tokens(trainer, trainer.train_rows, "TRAIN_DATASETS")
    assert "WARNING" not in capsys.readouterr().out, "the shipped prompts have none"


@pytest.mark.parametrize("file", ["ppo/ppo.py", "grpo/grpo.py"])
def test_ten_steps_of_equal_rewards_in_a_row_are_warned_of_once(ppo, grpo, file, capsys):
    make, name = {"ppo/ppo.py": (ppo, "PPOTrainer"), "grpo/grpo.py": (grpo, "GRPOTrainer")}[file]
    words = {"MAX_STEPS": 13, "NUM_EPOCHS": 9, "MAX_NEW_TOKENS": 4, "MAX_EVAL_PROMPTS": 0, "BATCH_SIZE": 2}
    module = make(**words)

    class Mine(getattr(module, name)):
        def compute_rewards(self, prompts, responses, answers, **columns):
            return [float(self.run.step == 12 and i == 0) for i in range(len(responses))]

    trainer = Mine()
    trainer.train()
    said = capsys.readouterr().out
    assert said.count("WARNING: in the last 10 steps all responses") == 1 and "logs/samples.jsonl" in said
    assert said.index("WARNING: in the last 10 steps") > said.index("step 10/13")
    assert trainer.steps_without_signal == 1, "step 12 had another reward, step 13 none"


def test_unequal_rewards_of_tokens_with_equal_sums_are_a_signal(ppo, capsys):
    module = ppo(MAX_STEPS=10, NUM_EPOCHS=9, MAX_NEW_TOKENS=4, MAX_EVAL_PROMPTS=0, BATCH_SIZE=2)

    class Mine(module.PPOTrainer):
        def compute_rewards(self, prompts, responses, answers, response_ids, **columns):
            return [[1.0] + [0.0] * (len(ids) - 1) for ids in response_ids]

    trainer = Mine()
    trainer.train()
    assert trainer.run.step == 10 and "WARNING: in the last" not in capsys.readouterr().out


def test_distillation_has_no_reward_to_be_warned_of(grpo, capsys):
    module = grpo(
        MAX_STEPS=11, NUM_EPOCHS=9, MAX_NEW_TOKENS=4, MAX_EVAL_PROMPTS=0, BATCH_SIZE=2, GROUP_SIZE=1
    )
    module.KL_COEF, module.REWARD_FUNCTIONS = 1.0, [("exact_answer", 0.0)]
    trainer = module.GRPOTrainer()
    assert trainer.distils
    trainer.train()
    assert "WARNING" not in capsys.readouterr().out


def test_the_note_names_only_constants_of_the_file_with_their_values_as_they_stand_there(path):
    script = load_script(path)
    for name, (tuned, hint) in script._TUNED_FOR_TINY.items():
        assert getattr(script, name) == tuned, f"{name} has another default now"
        assert hint
    assert {"OUTPUT_DIR", "LEARNING_RATE", "MAX_NEW_TOKENS"} <= script._TUNED_FOR_TINY.keys()


@pytest.mark.parametrize("max_steps, end", [(2, "MAX_STEPS"), (None, "NUM_EPOCHS"), (1000, "NUM_EPOCHS")])
def test_the_first_lines_say_what_ends_the_run(each, max_steps, end):
    module, trainer_class = each(
        MAX_STEPS=max_steps, NUM_EPOCHS=1, BATCH_SIZE=2, GRADIENT_ACCUMULATION_STEPS=2
    )
    trainer = trainer_class()
    summary = module.run_summary(trainer, 3)
    assert f"where {end} ends the run" in summary
    assert "4 prompts x 2 responses; optimizer steps of the policy: 3" in summary
    assert "24 prompts to train on, 4 held out" in summary
    assert module.memory_summary(trainer) in summary


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


def test_gibibytes_are_counted_per_process(ppo, monkeypatch):
    """Of large models without memory: 2**28 weights are 1 GiB in float32."""
    module = ppo()

    def model(dtype=torch.float32, trained=False):
        return torch.nn.Linear(2**14, 2**14, bias=False, device="meta", dtype=dtype).requires_grad_(trained)

    trainer = SimpleNamespace(device=torch.device("cpu"), reward_model=model())
    trainer.models_by_constant = {
        "ACTOR_MODEL": model(trained=True),
        "REFERENCE_MODEL": model(torch.bfloat16),
    }
    assert "state take 5.50 GiB of the" in module.memory_summary(trainer)
    memory = int(re.search(r"MemTotal: +(\d+) kB", open("/proc/meminfo").read())[1]) * 1024
    assert f"of the {memory / 2**30:.1f} GiB of cpu" in module.memory_summary(trainer)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "state take 5.50 GiB of the" in module.memory_summary(trainer), "every process has whole models"
    module.SHARD = "fsdp2"
    assert "state take 2.75 GiB of the" in module.memory_summary(trainer)
    del trainer.reward_model
    assert "state take 2.25 GiB of the" in module.memory_summary(trainer)


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_prints_the_docstring_and_every_constant(path, word):
    command = [sys.executable, str(ROOT / path), word]
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


def test_only_a_near_word_is_proposed(ppo):
    script = ppo()
    assert script.did_you_mean("NUM_EPOCH", script.constants()) == "; did you mean NUM_EPOCHS?"
    assert script.did_you_mean("SHOE_SIZE", ["GAMMA", "LAM"]) == ""


def test_a_constant_that_nothing_reads_is_warned_of(each, capsys):
    module, trainer_class = each()
    module.NUM_EPOCHES = 3
    trainer_class()
    assert "nothing reads the constant NUM_EPOCHES; did you mean NUM_EPOCHS?" in capsys.readouterr().out


def test_a_constant_pasted_at_the_top_of_the_file_is_warned_of_once(path, tmp_path, monkeypatch, capsys):
    (tmp_path / "rewards").symlink_to(ROOT / "rewards")
    mine = tmp_path / "mine.py"
    mine.write_text((ROOT / path).read_text().replace("\nSEED = ", "\nBATCH_SIZES = 3\nSEED = "))
    script = load_script(mine)
    script.check_constants()
    assert capsys.readouterr().out.count("WARNING: nothing reads the constant BATCH_SIZES; did") == 1
    monkeypatch.setenv("RANK", "1")
    script.check_constants()
    assert capsys.readouterr().out == "", "the first process says it"


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
    trainer = ppo(REWARD_MODEL=folder, BATCH_SIZE=1).PPOTrainer()  # two rows at a time
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
    # What training needs is not loaded
    words += ("TRAIN_DATASETS=[{'path': 'gone.jsonl', 'type': 'jsonl', 'input': 'problem'}]",)
    if path == "ppo/ppo.py":
        words += ("KL_COEF=0.1", "REFERENCE_MODEL=nowhere")
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
        answers = [record["answer"]] * 3
        assert record["sampled_correct"] == exact_answer(None, record["sampled"], answers)
        assert [record["greedy_correct"]] == exact_answer(None, [record["greedy"]], answers[:1])
    assert not (tmp_path / "logs").exists() and not list(tmp_path.glob("step_*"))


def test_what_an_evaluation_was_not_told_again_is_said(each, tmp_path):
    module, trainer_class = each(MAX_STEPS=1, MAX_NEW_TOKENS=8, TEMPERATURE=0.9)
    trainer_class().train()
    module, trainer_class = each(EVALUATE_SAMPLES=1, MAX_EVAL_PROMPTS=2, MAX_NEW_TOKENS=12, TEMPERATURE=0.9)
    said = []
    log = module.Run.log
    module.Run.log = lambda run, text: (said.append(text), log(run, text))
    module.EVALUATE_POLICY = "step_1"
    module.evaluate_policy(trainer_class)
    lines = [text for text in said if text.startswith("Other than in the run of")]
    changed = [line.rpartition(": ")[2] for line in lines]
    assert changed == ["MAX_EVAL_PROMPTS was 4, is 2", "MAX_NEW_TOKENS was 8, is 12"]


def test_a_folder_without_a_model_is_named_by_its_constant(each, tmp_path):
    (tmp_path / "town").mkdir()
    module, trainer_class = each(EVALUATE_POLICY=str(tmp_path / "town"))
    with pytest.raises(module.UserError, match="EVALUATE_POLICY = .*town': that folder holds no model"):
        module.evaluate_policy(trainer_class)
    module.ACTOR_MODEL = str(tmp_path / "town")
    with pytest.raises(
        module.UserError, match="ACTOR_MODEL = .*town': that folder holds no model, no config.json$"
    ):
        trainer_class()
    for name in ("step_2", "best"):
        (tmp_path / "town" / name / "policy").mkdir(parents=True)
        (tmp_path / "town" / name / "policy/config.json").write_text("{}")
    with pytest.raises(module.UserError, match="holds no model, no config.json; .*town/best/policy does"):
        trainer_class()


def test_two_splits_of_a_data_set_are_written_to_two_files(ppo, tmp_path):
    script = ppo(
        STAGE="evaluate", EVALUATE_POLICY=str(TINY / "policy"), EVALUATE_SAMPLES=1, MAX_EVAL_PROMPTS=2
    )
    for split in ("train", "test"):
        script.EVAL_DATASETS = [{**script.EVAL_DATASETS[0], "split": split}]
        script.evaluate_policy(script.PPOTrainer)
    names = sorted(path.name for path in (tmp_path / "run").glob("eval_*.json"))
    assert names == ["eval_tiny_policy_test_test.json", "eval_tiny_policy_test_train.json"]


def test_evaluations_with_other_settings_of_one_name_are_all_kept(each, tmp_path):
    """Two data files of one name, and two temperatures; the first once more replaces its own file."""
    (tmp_path / "other").mkdir()
    shutil.copy(TINY / "test.jsonl", tmp_path / "other/test.jsonl")
    module, trainer_class = each(
        EVALUATE_POLICY=str(TINY / "policy"), EVALUATE_SAMPLES=1, MAX_EVAL_PROMPTS=2, MAX_NEW_TOKENS=4
    )
    shipped = module.EVAL_DATASETS
    other = [{**shipped[0], "path": str(tmp_path / "other/test.jsonl")}]
    for module.EVAL_DATASETS, module.TEMPERATURE in (
        (shipped, 1.0),
        (other, 1.0),
        (other, 0.5),
        (shipped, 1.0),
    ):
        module.evaluate_policy(trainer_class)
    facts = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "run").glob("eval_*.json")}
    name = "eval_tiny_policy_test"
    found = {key: (fact["datasets"], fact["temperature"]) for key, fact in facts.items()}
    assert found == {name: (shipped, 1.0), f"{name}_2": (other, 1.0), f"{name}_3": (other, 0.5)}
    assert len(list((tmp_path / "run").glob("eval_*.jsonl"))) == 3


def test_after_an_evaluation_from_python_the_constants_are_what_they_were(each, tmp_path):
    module, trainer_class = each(
        EVALUATE_POLICY=str(TINY / "policy"), EVALUATE_SAMPLES=1, MAX_EVAL_PROMPTS=2, LORA_RANK=2
    )
    before = module.constants()
    module.evaluate_policy(trainer_class)
    assert module.constants() == before
    module.EVALUATE_POLICY = str(tmp_path)
    with pytest.raises(module.UserError):
        module.evaluate_policy(trainer_class)
    assert module.constants() == {**before, "EVALUATE_POLICY": str(tmp_path)}


def test_an_evaluation_from_python_leaves_the_folder_to_other_programs(each, tmp_path):
    module, trainer_class = each(
        EVALUATE_POLICY=str(TINY / "policy"), EVALUATE_SAMPLES=1, MAX_EVAL_PROMPTS=2, MAX_NEW_TOKENS=4
    )
    trainers = []

    class Kept(trainer_class):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            trainers.append(self)  # else its lock would end with it

    module.evaluate_policy(Kept)
    other = module.filelock.FileLock(tmp_path / "run/.lock")  # as another process would take it
    other.acquire(blocking=False)
    other.release()


def test_an_evaluation_says_why_it_has_no_majority(each, capsys):
    module, trainer_class = each(EVALUATE_SAMPLES=2)
    trainer = trainer_class()
    batch = reward_batch(["a"] * 2, ["#### 5", "x"], ["#### 5"] * 2)
    trainer.score_responses = lambda batch: (torch.zeros(2), {})
    greedy = reward_batch(["a"], ["#### 5"], ["#### 5"])
    greedy.rows[0]["id"] = "1"
    for accuracy_function, is_said in ((exact_answer, False), (lambda p, r, a: [0.0] * len(r), True)):
        trainer.accuracy_function = accuracy_function
        figures, _ = module.policy_scores(trainer, greedy, batch)
        note = "NOTE: no majority@2: ACCURACY_FUNCTION = 'exact_answer' cannot take a response as the answer"
        assert (note in capsys.readouterr().out) == is_said
        assert ("majority@2" in figures) != is_said


def test_the_policy_to_score_is_the_actor_without_an_adapter(each, tmp_path):
    policy = AutoModelForCausalLM.from_pretrained(TINY / "policy")
    with torch.no_grad():
        policy.lm_head.weight.mul_(1.5)
    policy.save_pretrained(tmp_path / "mine")
    AutoTokenizer.from_pretrained(TINY / "policy").save_pretrained(tmp_path / "mine")
    module, trainer_class = each(LORA_RANK=4)
    if hasattr(module, "KL_COEF"):
        module.KL_COEF = 0.1  # in training it needs a reference
    trainer = module.trainer_to_evaluate(trainer_class, str(tmp_path / "mine"))
    assert getattr(trainer, "reference", None) is None
    actor = trainer.actor
    assert torch.equal(actor.lm_head.weight, policy.lm_head.weight) and not hasattr(actor, "peft_config")


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
    step = json.loads((tmp_path / "best/metrics.json").read_text())["step"]
    assert f"{tmp_path}/best/policy (step {step}): 4 prompts, 2 samples each" in run.stdout
    assert "Found checkpoint" not in run.stdout, "the policy is EVALUATE_POLICY's, not a checkpoint's"


@pytest.mark.parametrize("policy", ["best", "step_7"])
def test_without_a_trained_policy_the_evaluation_says_what_to_do(started, path, tmp_path, policy):
    run = started(path, f"OUTPUT_DIR={tmp_path}", "STAGE=evaluate", f"EVALUATE_POLICY={policy}")
    assert run.returncode == 2
    assert f"EVALUATE_POLICY = {policy!r}: there is no" in run.stderr and "train first" in run.stderr


def test_the_majority_is_the_answer_that_most_responses_state(each, monkeypatch):
    module, trainer_class = each(EVALUATE_SAMPLES=4)
    trainer = trainer_class()
    first = ["#### 5", "#### 7", "so #### 7", "nothing"]
    second = ["#### 1", "#### 2", "#### 3", "#### 3.0"]
    third = ["nothing"] * 4
    batch = reward_batch(["a"] * 4 + ["b"] * 4 + ["c"] * 4, first + second + third, ["#### 7"] * 12)
    assert module.majority_votes(trainer, batch).tolist() == [1, 2, 0]
    trainer.accuracy_function = lambda prompts, responses, answers: [0.0] * len(responses)
    assert module.majority_votes(trainer, batch) is None, "a function that cannot compare two responses"


def test_figures_and_records_of_two_prompts_by_hand(each):
    """Of "b" all responses differ: the first counts as the majority's, and is wrong."""
    module, trainer_class = each(EVALUATE_SAMPLES=3)
    trainer = trainer_class()
    answers = ["#### 7", "#### 2"]
    greedy = reward_batch(["a", "b"], ["#### 7", "#### 9"], answers)
    sampled_texts = ["#### 5", "#### 7", "so #### 7", "#### 1", "#### 2", "#### 3"]
    sampled = reward_batch(["a"] * 3 + ["b"] * 3, sampled_texts, np.repeat(answers, 3).tolist())
    for number, row in enumerate(greedy.rows):
        row["id"] = f"test:{number}"
    scores = torch.tensor([1.0, 2.0, 6.0, 0.5, 0.5, 0.5])
    trainer.score_responses = lambda batch: (scores, None)
    by_prompt, records = module.policy_scores(trainer, greedy, sampled)
    figures = {name: values.tolist() for name, values in by_prompt.items()}
    assert figures.pop("pass@1") == pytest.approx([2 / 3, 1 / 3])
    wanted = {"reward": [3.0, 0.5], "accuracy_greedy": [1, 0], "pass@3": [1, 1], "majority@3": [1, 0]}
    assert figures == wanted
    assert records[1] == {
        "id": "test:1",
        "prompt": "b",
        "answer": "#### 2",
        "greedy": "#### 9",
        "sampled": sampled_texts[3:],
        "rewards": [0.5] * 3,
        "greedy_correct": 0.0,
        "sampled_correct": [0, 1, 0],
    }


def test_the_interval_holds_95_percent_of_resampled_means(ppo):
    """Of 400 values of which half are 1, the mean's standard error is 0.025."""
    low, high = ppo().bootstrap_interval(np.repeat([0.0, 1.0], 200))
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.004)
    assert high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.004)


def test_an_accuracy_function_of_a_column_votes_too(each):
    """It gets the column's value of the prompt and the ids of the very responses that it compares."""
    module, trainer_class = each(EVALUATE_SAMPLES=2)
    trainer = trainer_class()
    seen = []

    def accuracy(prompts, responses, answers, level, response_ids):
        seen.append((level, response_ids))
        return [float(a == r) for a, r in zip(answers, responses)]

    trainer.accuracy_function = accuracy
    batch = reward_batch(
        ["a", "a", "b", "b"], ["x", "y", "z", "z"], ["x"] * 4, response_ids=[[1], [2], [3], [4]]
    )
    for row, level in zip(batch.rows, (5, 5, 6, 6)):
        row["columns"] = {"level": level}
    assert module.majority_votes(trainer, batch).tolist() == [0, 0]
    assert seen == [([5, 5], [[1], [2]])] * 2 + [([6, 6], [[3], [4]])] * 2


@pytest.mark.parametrize("word", ["EVAL_DATASETS=[]", "MAX_EVAL_PROMPTS=0"])
def test_an_evaluation_without_prompts_names_what_it_needs(started, path, tmp_path, word):
    run = started(
        path, f"OUTPUT_DIR={tmp_path}", "STAGE=evaluate", f"EVALUATE_POLICY={TINY / 'policy'}", word
    )
    assert run.returncode == 2 and "needs EVAL_DATASETS, and MAX_EVAL_PROMPTS above 0 or None" in run.stderr


def test_a_fault_of_the_data_to_score_names_its_constant(started, path, tmp_path):
    data = own_data(tmp_path)
    data[0]["input"] = "nowhere"
    words = ("STAGE=evaluate", f"EVALUATE_POLICY={TINY / 'policy'}", f"EVAL_DATASETS={data}")
    run = started(path, f"OUTPUT_DIR={tmp_path}", *words)
    assert run.returncode == 2 and "EVAL_DATASETS: " in run.stderr and "TRAIN_DATASETS" not in run.stderr


# ---------------------------------------------------------------- found by a first reader of ppo.py


def test_a_run_does_not_go_on_from_another_model(each, tmp_path):
    module, trainer_class = each(MAX_STEPS=1, MAX_EVAL_PROMPTS=2)
    trainer_class().train()
    for name in ("another", "run_2/best/policy", "moved/data/tiny/policy"):
        shutil.copytree(TINY / "policy", tmp_path / name)
    resumed = dict(MAX_STEPS=2, MAX_EVAL_PROMPTS=2, RESUME="yes")
    for name in ("another", "run_2/best/policy"):
        module, trainer_class = each(**resumed, ACTOR_MODEL=str(tmp_path / name))
        says = f"was trained from ACTOR_MODEL = .*, not .*{name}': give that"
        with pytest.raises(module.UserError, match=says):
            trainer_class()
    module, trainer_class = each(**resumed, ACTOR_MODEL=str(tmp_path / "moved/data/tiny/policy"))
    assert trainer_class().run.step == 1


def test_a_model_of_the_runs_own_folder_is_refused(each, tmp_path):
    shutil.copytree(TINY / "policy", tmp_path / "run/best/policy")
    module, trainer_class = each(ACTOR_MODEL=str(tmp_path / "run/best/policy"), RESUME="no")
    with pytest.raises(module.UserError, match="ACTOR_MODEL = .* lies in OUTPUT_DIR, .* set another"):
        trainer_class()
    module, trainer_class = each(ACTOR_MODEL=str(tmp_path / "run/best/policy"), RESUME="no")
    module.OUTPUT_DIR = str(tmp_path / "other")
    trainer_class()


def test_a_target_revives_a_coefficient_of_zero(ppo):
    ppo(MAX_STEPS=1, MAX_EVAL_PROMPTS=2).PPOTrainer().train()
    resumed = dict(MAX_STEPS=2, MAX_EVAL_PROMPTS=2, RESUME="yes")
    assert ppo(**resumed, KL_COEF=0.01, KL_TARGET=0.05).PPOTrainer().state.kl_coef == 0.01


@pytest.mark.parametrize(
    "path", ["ppo/ppo.py", "grpo/grpo.py", "ppo/sft.py", "ppo/reward_model.py", "rce/dpo.py"]
)
def test_the_last_step_is_that_of_the_prompts_that_are_left(path, tmp_path):
    module = load_script(path, BATCH_SIZE=4, GRADIENT_ACCUMULATION_STEPS=1, NUM_EPOCHS=2, MAX_STEPS=None)

    def last_step(step, **state):
        return module.last_step(SimpleNamespace(prompts=10, **state), step)

    assert last_step(0, epoch=0, cursor=0) == 6
    assert last_step(1, epoch=1, cursor=4) == 6
    assert last_step(7, epoch=1, cursor=7) == 7 + 1 + 3  # seven steps of one prompt
    assert last_step(6, epoch=2, cursor=0) == 6
    module.MAX_STEPS = 5
    assert last_step(1, epoch=1, cursor=4) == 5


def test_a_run_that_failed_is_resumed_by_a_new_trainer(each, monkeypatch):
    module, trainer_class = each(MAX_STEPS=1, MAX_EVAL_PROMPTS=2)
    trainer = trainer_class()

    def fails(*words):
        raise ValueError("a reward failed")

    monkeypatch.setattr(trainer, "record", fails)
    with pytest.raises(ValueError, match="a reward failed"):
        trainer.train()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="make a new trainer, which resumes"):
        trainer.train()


def test_files_that_are_not_the_runs_stay_in_its_folder(each, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("notes.tmp", "training_data.jsonl", "best.tmp"):
        (run / name).write_text("mine")
    module, trainer_class = each(RESUME="no", MAX_STEPS=1, MAX_EVAL_PROMPTS=2)
    trainer_class().run.open_files()
    assert (run / "notes.tmp").exists() and (run / "training_data.jsonl").exists()
    assert not (run / "best.tmp").exists()


def test_a_best_policy_of_a_future_with_other_constants_is_moved_aside(each, tmp_path):
    module, trainer_class = each(MAX_STEPS=1, MAX_EVAL_PROMPTS=2)
    trainer_class().train()
    figures = tmp_path / "run/best/metrics.json"
    step = json.loads((tmp_path / "run/logs/metrics.jsonl").read_text().splitlines()[-1])["step"]
    figures.write_text(json.dumps({"step": step + 1}))
    resumed = dict(MAX_STEPS=1, MAX_EVAL_PROMPTS=2, RESUME="yes")
    module, trainer_class = each(**resumed)
    trainer_class().run.open_files()
    assert figures.exists()
    module, trainer_class = each(**resumed, LEARNING_RATE=1e-5)
    trainer_class().run.open_files()
    assert not figures.exists() and list((tmp_path / "run").glob("old_*/best/metrics.json"))


def test_a_plot_without_panels_is_no_error(ppo, tmp_path):
    ppo().draw_plot([], tmp_path / "a.png", "title", [], {"train": "training", "eval": "held out"})
    assert not (tmp_path / "a.png").exists()


def test_processes_on_the_cpu_of_a_machine_with_one_gpu_are_told_apart_by_nothing(ppo, monkeypatch):
    module = ppo()
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(module.torch.cuda, "get_device_name", lambda number: ["card"][number])
    assert module.run_fingerprint()["GPU"] == "card"


def test_a_reward_that_samples_from_a_sharded_model_is_refused(ppo, monkeypatch):
    module = ppo()
    model = torch.nn.Linear(1, 1)
    monkeypatch.setattr(module, "FSDPModule", torch.nn.Linear)
    monkeypatch.setattr(module, "_INSIDE_RANK_MAP", ["compute"])
    refused = pytest.raises(module.UserError, match="a reward function cannot sample with a model")
    with refused, module.full_parameters(model):
        pass


def test_an_accuracy_function_that_cannot_read_responses_gives_no_majority(each):
    module, _ = each(EVALUATE_SAMPLES=2)
    rows = [{"prompt": "p", "columns": {}}] * 4
    batch = SimpleNamespace(responses=["a", "b", "1", "1"], rows=rows, columns={})
    for function, votes in (
        (lambda p, r, a: [float(int(x) == int(y)) for x, y in zip(r, a)], None),
        (lambda p, r, a: [float(x == y) for x, y in zip(r, a)], [0, 0]),
    ):
        trainer = SimpleNamespace(accuracy_function=function)
        found = module.majority_votes(trainer, batch)
        assert (found is None) if votes is None else found.tolist() == votes


def test_odd_columns_weights_data_sets_and_rewards_are_no_tracebacks(ppo):
    module = ppo()

    class Owner:
        def score(self, prompts, responses, answers, **columns):
            return [float(len(columns))]

    columns = {"self": ["x"], "other": ["y"]}
    assert module.call_reward("score", Owner().score, ["p"], ["r"], ["a"], columns).tolist() == [1.0]
    with pytest.raises(module.UserError, match="the weight of 'exact_answer' is a number, not 'x'"):
        module.resolve_rewards([("exact_answer", "x")], "REWARD_FUNCTIONS")
    with pytest.raises(module.UserError, match="TRAIN_DATASETS: a data set is .*, not 'a.jsonl'"):
        module.load_rows(["a.jsonl"], "TRAIN_DATASETS")
    with pytest.raises(module.UserError, match="must return 1 finite numbers"):
        module.check_scores("mine", [10**400], 1)
    assert module.cell_text(True, "row") == "true" and module.cell_text(1, "row") == "1"


def test_a_path_to_resume_from_must_exist(each, tmp_path):
    module, trainer_class = each(RESUME=str(tmp_path / "typo"))
    with pytest.raises(module.UserError, match="RESUME = .*typo': no such folder. It takes ask, yes, no, or"):
        trainer_class()


def test_a_quoted_argument_is_read_as_python_reads_it(each):
    module, _ = each()
    module.apply_overrides(['PROMPT_TEMPLATE="{input}\\nAnswer:"', "ACCURACY_FUNCTION='rouge_l'"])
    assert module.PROMPT_TEMPLATE == "{input}\nAnswer:" and module.ACCURACY_FUNCTION == "rouge_l"
