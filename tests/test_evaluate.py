"""tools/evaluate.py: the policy of any run, or of the hub, answers as in its run, and is scored."""

import json
import runpy
import shutil
from types import SimpleNamespace

import pytest
import transformers
from conftest import ROOT, TINY, load, read, small, words_of
from program import Program, run_program

LENGTHS = {"MAX_NEW_TOKENS": 24, "MAX_EVAL_PROMPTS": 3, "MAX_STEPS": 1}
ANSWERS = {"MAX_NEW_TOKENS": 24, "MAX_STEPS": 1, "ACCURACY_FUNCTION": "exact_answer"}
RUNS = {
    "ppo/ppo.py": small("ppo/ppo.py", **LENGTHS),
    "grpo/grpo.py": small("grpo/grpo.py", **LENGTHS, LORA_RANK=2, LEARNING_RATE=0.1),  # far from its start
    "rce/rce.py": small("rce/rce.py", **LENGTHS),
    "ppo/sft.py": small("ppo/sft.py", **ANSWERS, MAX_EVAL_ROWS=3),
    "rce/dpo.py": small("rce/dpo.py", **ANSWERS, MAX_EVAL_PAIRS=3),
}
TOOL = SimpleNamespace(**runpy.run_path(str(ROOT / "tools/evaluate.py")))


def figures(printed):
    """Returns {name: mean} of what the tool printed."""
    return {line.split()[0]: float(line.split()[1]) for line in printed.splitlines()[1:]}


def greedy_response(folder, prompt):
    """Returns a response by transformers' own generate()."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": prompt}]
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    inputs = tokenizer.apply_chat_template(chat, **options)
    ids = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("path", RUNS)
def test_a_policy_of_each_trainer_answers_as_in_its_run_and_every_response_is_written(tmp_path, path):
    run_program(ROOT / path, *words_of({**RUNS[path], "OUTPUT_DIR": tmp_path}), cwd=ROOT)
    for name in ("best", "step_1"):  # step_1 of grpo.py is an adapter
        printed = run_program(ROOT / "tools/evaluate.py", tmp_path / name, "SAMPLES=4", cwd=ROOT)
        records = read(tmp_path / f"evaluation_{name}.jsonl")
        assert [record["kind"] for record in records] == ["greedy"] * 3 + ["sampled"] * 12
        for record in records[:3]:
            assert record["response"] == greedy_response(tmp_path / name / "policy", record["prompt"])
        means = figures(printed)
        assert list(means) == ["greedy", "pass@1", "pass@2", "pass@4", "majority@4"]
        for kind, figure in {"greedy": "greedy", "sampled": "pass@1"}.items():
            correct = [record["correct"] for record in records if record["kind"] == kind]
            assert means[figure] == pytest.approx(sum(correct) / len(correct), abs=6e-4)
    if path == "grpo/grpo.py":
        assert records[0]["response"] != greedy_response(TINY / "policy", records[0]["prompt"])


def test_a_model_of_the_hub_takes_recipes(tmp_path):
    shutil.copytree(TINY / "policy", tmp_path / "organisation/model")
    data = {"path": str(TINY / "test.jsonl"), "type": "jsonl", "input": "problem", "output": "solution"}
    (tmp_path / "recipe.txt").write_text(f"# a comment\nEVAL_DATASETS=[{data}]\nMAX_EVAL_PROMPTS=3\n")
    words = ("organisation/model", "@recipe.txt", "MAX_NEW_TOKENS=24", "SAMPLES=2", "OUT=out.jsonl")
    assert "pass@2" in figures(run_program(ROOT / "tools/evaluate.py", *words, cwd=tmp_path))
    assert len(read(tmp_path / "out.jsonl")) == 3 + 3 * 2


def test_a_function_in_the_file_of_the_trainer_decides(tmp_path):
    (tmp_path / "rewards").symlink_to(ROOT / "rewards")
    own = "\ndef own(prompts, responses, answers):\n    return [1.0] * len(responses)\n"
    (tmp_path / "mine.py").write_text((ROOT / "grpo/grpo.py").read_text() + own)
    config = {"file": str(tmp_path / "mine.py"), "constants": {"ACCURACY_FUNCTION": "own"}}
    module = TOOL.load_trainer(config)
    assert TOOL.make_sampler(module, TINY / "policy").accuracy_function is module.own


@pytest.mark.parametrize(
    "function, texts, answer, wanted",
    [
        ("exact_answer", ["#### 7", "so #### 8", "#### 8.0", "8", "8", "8"], "#### 8", 1),  # 8: no vote
        ("exact_answer", ["#### 7", "#### 7", "#### 8"], "#### 8", 0),
        ("last_number", ["It is 7.", "2 + 6 = 8", "8 apples"], "#### 8", 1),
    ],
)
def test_majority_by_hand(function, texts, answer, wanted):
    grpo = load("grpo/grpo.py")
    trainer = grpo.GRPOTrainer.__new__(grpo.GRPOTrainer)
    trainer.accuracy_function = grpo.find_function(function)
    rows = [{"prompt": "?", "answer": answer, "columns": {}}] * (len(texts) + 1)
    batch = SimpleNamespace(rows=rows, texts=["another prompt's", *texts], response_ids=[[1]] * len(rows))
    correct = TOOL.judge(trainer, batch)[1:]
    assert TOOL.majority(trainer, batch, slice(1, len(rows)), correct) == wanted


def test_pass_at_k_and_intervals_by_hand():
    assert TOOL.pass_at([1, 0, 0, 1], 2) == pytest.approx(5 / 6)  # 1 of 6 pairs has no correct one
    assert TOOL.pass_at([0, 0, 1], 3) == 1
    assert TOOL.interval([1] * 2 + [0] * 8) == pytest.approx((0.2, 0.0567, 0.5098), abs=1e-4)
    assert TOOL.interval([0] * 10) == pytest.approx((0, 0, 0.2775), abs=1e-4)
    assert TOOL.interval([0, 0.5, 1, 0.5]) == pytest.approx((0.5, 0.2152, 0.7848), abs=1e-4)  # as 4 of 8


def write_config(run, **facts):
    run.mkdir(exist_ok=True)
    facts = {"file": str(ROOT / "grpo/grpo.py"), "constants": {"ACCURACY_FUNCTION": "last_number"}, **facts}
    (run / "training_config.json").write_text(json.dumps(facts))


def test_a_run_of_another_machine_takes_the_trainer_and_the_data_of_this_repository(capsys):
    data = [{"path": "{ROOT}/q.jsonl"}, {"path": "/home/q.jsonl"}]
    config = {"file": "/other/rlhf/grpo/grpo.py", "constants": {"EVAL_DATASETS": data}}
    module = TOOL.load_trainer(config)
    paths = [f"{ROOT}/q.jsonl", "/home/q.jsonl"]
    assert module.ROOT == ROOT and [spec["path"] for spec in module.EVAL_DATASETS] == paths
    assert "/other/rlhf/grpo/grpo.py is not on this machine" in capsys.readouterr().out


def test_a_run_of_an_example_is_said_to_be_evaluated_without_it(capsys):
    config = {"file": str(ROOT / "grpo/grpo.py"), "program": "/x/turns.py", "constants": {}}
    TOOL.load_trainer(config)
    assert "by grpo.py alone, without the changes of /x/turns.py" in capsys.readouterr().out
    TOOL.load_trainer({**config, "program": config["file"]})
    assert capsys.readouterr().out == ""


def test_an_adapter_outside_its_run_is_put_on_the_model_that_its_config_names(tmp_path):
    module = load("grpo/grpo.py", LORA_RANK=2, LORA_ALPHA=8.0)
    causal = module.transformers.AutoModelForCausalLM
    trained = module.load_trained(causal, str(TINY / "policy"), None)
    for name, parameter in trained.named_parameters():
        parameter.data += 0.1 * ("lora" in name)
    trained.save_pretrained(tmp_path)
    loaded = TOOL.load_policy(load("grpo/grpo.py", ACTOR_MODEL=TOOL.base_of(tmp_path)), tmp_path)
    ids = module.torch.arange(9).unsqueeze(0)
    assert module.torch.equal(loaded(ids).logits, trained(ids).logits)


def test_rows_of_pairs_become_prompts_without_what_grpo_does_not_know():
    pairs = {"path": "p.csv", "type": "csv", "prompt": "q", "chosen": "c", "rejected": "r", "output": "a"}
    prompts = {"path": "p.csv", "type": "csv", "input": "q", "output": "a"}
    assert TOOL.prompts_of([pairs, {"path": "c.csv", "type": "csv", "messages": "m"}]) == [prompts]


def test_what_cannot_be_scored_is_one_line(tmp_path):
    policy = TINY / "policy"
    write_config(tmp_path)
    for name in ("grpo_rec", "reward_model"):
        write_config(tmp_path / name, file=f"/x/{name}.py", constants={})
    for words, said in (
        *((("no/model", f"SAMPLES={count}"), f"SAMPLES={count}") for count in (0, -2, "abc")),
        ((tmp_path / "grpo_rec",), "grpo_rec.py trained it"),
        ((tmp_path / "reward_model",), "reward_model.py trained it"),
        ((tmp_path / "step_9",), "holds no policy"),
        (("no/model",), "no/model"),
        ((tmp_path,), "holds no policy"),
        ((policy, "MAX_NEW_TOKEN=5"), "MAX_NEW_TOKEN=5"),
        ((policy, "EVAL_DATASETS=[]"), "EVAL_DATASETS"),
        ((policy, "ACCURACY_FUNCTION=rouge_l", "MAX_EVAL_PROMPTS=2"), "0 or 1"),
    ):
        done = Program(ROOT / "tools/evaluate.py", *words, cwd=tmp_path).wait()
        assert done.returncode == 2
        assert said in done.stderr and len(done.stderr.strip().splitlines()) == 1
