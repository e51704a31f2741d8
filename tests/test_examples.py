"""The programs of examples/: each is imported as it is and trains for a step or two on the shipped model.
Further tests of them: test_turns.py, test_audit.py, test_vllm.py, test_pretend_gpu.py."""

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from conftest import NATS, ROOT, TINY, Program, load_script, read, small, words_of

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ONE_STEP = {"MAX_STEPS": 1, "EVAL_DATASETS": []}  # and no evaluation


def steps_of(folder):
    """The records of a run's training steps."""
    return [record for record in read(folder / "logs/metrics.jsonl") if record["phase"] == "train"]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_says_what_it_shows_what_to_change_and_how_to_start_it(file):
    text = file.read_text()
    docstring = text.split('"""')[1]
    assert "\nShows " in docstring and "\nChange: " in docstring
    assert f"python examples/{file.name}" in docstring
    row = rf"^\| \[{file.stem}\]\({file.name}\) \| .+ \| `.*python examples/{file.name}.*` \|$"
    assert len(re.findall(row, (ROOT / "examples/README.md").read_text(), re.MULTILINE)) == 1
    assert text.count("\n") <= 85 or file.name in ("vllm_server.py", "reasoning_gym_tasks.py")


# ---------------------------------------------------------------- rewards


def test_own_rewards_by_hand_and_in_a_run(example, tmp_path):
    module = example("own_reward", **ONE_STEP)
    assert module.short(None, ["", "x" * 50, "x" * 200], None) == [1.0, 0.5, 0.0]
    responses = ["34-23=11\n11+40=51\n#### 51", "1+1=3\n2*2=4", "51", "3-5=1"]
    assert module.right_steps(None, responses, None) == [1.0, 0.5, 0.0, 0.0]
    assert module.as_many_lines(None, ["a\nb", "a"], None, ["c\nd", "c\nd"]) == [1.0, 0.0]
    module.grpo.GRPOTrainer().train()
    parts = {"exact_answer": 1.0, "short": 0.2, "right_steps": 0.3, "as_many_lines": 0.0}
    samples = read(tmp_path / "run/logs/samples.jsonl")
    for sample in samples:
        total = sum(weight * sample[f"reward/{name}"] for name, weight in parts.items())
        assert sample["reward"] == pytest.approx(total)
    assert len({sample["reward"] for sample in samples}) > 1


def test_the_whole_score_is_the_product_of_its_parts(example, tmp_path):
    module = example("whole_score", REWARD_MODEL=str(TINY / "reward_model"), **ONE_STEP)
    assert module.brevity(["", "x" * 40, "x" * 80]).tolist() == [1.0, 1.0, 0.5]
    assert module.variety(["a\nb", "a\na\na\nb", "a"]).tolist() == [1.0, 0.5, 1.0]
    module.OwnScoreTrainer().train()
    for sample in read(tmp_path / "run/logs/samples.jsonl"):
        quality, brevity = sample["reward/quality"], sample["reward/brevity"]
        assert sample["reward"] == pytest.approx(quality * brevity * sample["reward/variety"])
        assert 0 < quality < 1


def test_token_rewards_come_where_each_right_line_ends(example, tmp_path):
    module = example("token_rewards", **ONE_STEP)
    trainer = module.StepTrainer()
    said = "34-23=11\n11+40=50\n#### 51<eos>"
    ids = trainer.tokenizer(said)["input_ids"]
    (row,) = trainer.compute_rewards(["q"], ["#### 51"], ["51"], [ids])
    ends = [i for i, token in enumerate(ids) if trainer.tokenizer.decode([token]) == "\n"]
    assert len(ends) == 2 and row == [0.1 * (i == ends[0]) + (i == len(ids) - 1) for i in range(len(ids))]
    ids = trainer.tokenizer("34-23=11\n11+40=51<eos>")["input_ids"]  # the last line has no end of its own
    (row,) = trainer.compute_rewards(["q"], ["x"], ["51"], [ids])
    assert sum(row) == pytest.approx(0.2) and row[-1] == pytest.approx(0.1)
    trainer.train()
    (step,) = steps_of(tmp_path / "run")
    assert step["reward"] > 0 and step["grad_norm"] > 0


FAULTS = {  # replies that a judge gives on a bad day: (status, length that is promised, body)
    "error": (500, 3, b"500"),
    "cut short": (200, 500, b'{"choices": [{"mess'),
    "no JSON": (200, 20, b"<html>busy</html>   "),
    "another JSON": (200, 16, b'{"error": "too"}'),
    "no content": (200, 45, b'{"choices": [{"message": {"content": null}}]}'),
}


@contextmanager
def judge_server(fail=0, fault="error"):
    """A server of OpenAI's protocol that grades by the last word of the response, the later ones sooner; its
    first `fail` replies are faults. Gives its address and [most requests at a time, requests]."""
    seen = [0, 0]
    lock = threading.Lock()
    open_requests = set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            numbers = re.findall(r"(\d+)\nReference answer", body["messages"][0]["content"]) or [0]
            number = min(12, int(numbers[0]))
            with lock:
                seen[1] += 1
                failed = seen[1] <= fail
                open_requests.add(self)
                seen[0] = max(seen[0], len(open_requests))
            time.sleep(0.02 * (12 - number))
            with lock:
                open_requests.remove(self)
            body = json.dumps({"choices": [{"message": {"content": f"Grade: {number}"}}]}).encode()
            status, length, body = FAULTS[fault] if failed else (200, len(body), body)
            self.send_response(status)
            self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1/chat/completions", seen
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def asked(example, monkeypatch):
    """asked(url, KEY=value): examples/judge.py that asks there, without waiting between tries."""

    def load(url, **constants):
        monkeypatch.setenv("JUDGE_URL", url)
        module = example("judge", **constants)
        module.time = types.SimpleNamespace(sleep=lambda seconds: None)
        return module

    return load


def test_a_judge_over_http_is_asked_concurrently_and_answers_in_order(asked):
    lists = ["2 + 2?"] * 12, [f"it is {i}" for i in range(12)], ["4"] * 12
    with judge_server() as (url, seen):
        module = asked(url)
        function, weight = module.grpo.REWARD_FUNCTIONS[0]
        scores = module.grpo.call_reward("judge", function, *lists)
    assert scores.tolist() == pytest.approx([min(10, i) / 10 for i in range(12)])
    assert seen[0] > 4 and seen[1] == 12 and function.__name__ == "judge" and weight == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_judge_that_fails_is_asked_thrice_and_then_ends_the_run_with_its_name(asked, fault):
    lists = ["2 + 2?"], ["it is 7"], ["4"]
    with judge_server(2, fault) as (url, seen):
        module = asked(url)
        function = module.grpo.REWARD_FUNCTIONS[0][0]
        assert module.grpo.call_reward("judge", function, *lists).tolist() == pytest.approx([0.7])
        assert seen[1] == 3
    with judge_server(3, fault) as (module.URL, seen), pytest.raises(Exception) as error:
        module.grpo.call_reward("judge", function, *lists)
    assert seen[1] == 3 and error.value.__notes__ == ["(raised by the reward function judge)"]


def test_the_judge_reads_chats_as_texts_and_no_missing_answer(asked):
    module = asked("http://127.0.0.1:9")
    chat = [{"role": "user", "content": "2 + 2?"}]
    assert module.question(chat, "4", None) == (
        "Question: user: 2 + 2?\nResponse: 4\nGrade the response from 0 to 10. Write the number alone."
    )
    assert "\nReference answer: 4 or four\n" in module.question("2 + 2?", "4", ["4", "four"])
    module.ASK = "{grade}"
    with pytest.raises(KeyError):  # a fault of one's own is not asked thrice
        module.judge(["q"], ["r"], ["a"])


def test_a_run_asks_the_judge_about_each_response(asked, tmp_path):
    with judge_server() as (url, seen):
        module = asked(url, **ONE_STEP)
        module.grpo.GRPOTrainer().train()
    (step,) = steps_of(tmp_path / "run")
    assert seen[1] == 8 and step["reward"] == step["reward/judge"]


def test_without_a_judge_the_program_ends_before_it_loads_anything(monkeypatch, capsys):
    script = load_script("grpo/grpo.py")
    monkeypatch.setitem(sys.modules, "grpo", script)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("JUDGE_URL", "http://127.0.0.1:9/v1")
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "examples/judge.py"), run_name="__main__")
    assert end.value.code == 2
    assert "JUDGE_URL = http://127.0.0.1:9/v1: no judge replies" in capsys.readouterr().err


# ---------------------------------------------------------------- the loss, the sampler, the optimizer


def test_the_custom_loss_moves_the_policy_elsewhere(example, tmp_path):
    """By its own term alone: all scores are equal, so GRPO itself trains nothing."""
    norms = []
    for longest in (0, 1000):
        constants = {**ONE_STEP, "REWARD_FUNCTIONS": [("exact_answer", 0.0)]}
        module = example("custom_loss", **constants, OUTPUT_DIR=str(tmp_path / str(longest)))
        module.MAX_LENGTH = longest
        module.ShorterTrainer().train()
        norms.append(steps_of(tmp_path / str(longest))[0]["grad_norm"])
    assert norms[0] > 1e-4 and norms[1] == 0


def test_top_p_is_what_is_sampled_and_what_is_trained(example, tmp_path):
    module = example("top_p", **ONE_STEP)
    trainer = module.grpo.GRPOTrainer()
    trainer.train()
    assert all(step["first_ratio_deviation"] < 1e-3 for step in steps_of(tmp_path / "run"))
    batch = trainer.rollout(trainer.train_rows[:8])
    full = module.grpo.batch_logprobs(trainer.actor, batch, module.grpo.full_logprobs)
    gained = batch.logprobs - full  # the tokens that were cut
    assert gained.min() > -NATS and gained.max() > 0.01


def test_muon_steps_the_matrices_and_adamw_the_rest_at_one_rate_and_both_resume(example, tmp_path):
    constants = {"USE_LR_SCHEDULER": True, "MAX_STEPS": 2, "EVAL_DATASETS": [], "RESUME": "yes"}
    constants["REWARD_FUNCTIONS"] = [(by_length, 1.0)]
    module = example("muon", **constants)
    trainer = module.MuonTrainer()
    before = {name: value.clone() for name, value in trainer.actor.state_dict().items()}
    groups = {key: optimizer.param_groups[0]["params"] for key, optimizer in trainer.optimizers.items()}
    assert {parameter.dim() for parameter in groups["muon"]} == {2}
    assert sum(map(len, groups.values())) == len(list(trainer.actor.parameters()))
    assert any(p is trainer.actor.get_input_embeddings().weight for p in groups["policy"])
    trainer.train()
    rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers.values()]
    assert rates == pytest.approx([0.5e-4] * 2)  # the second of two steps of a linear schedule
    for name, value in trainer.actor.state_dict().items():
        assert not torch.equal(value, before[name]), name
    again = module.MuonTrainer()
    for one, two in zip(trainer.optimizers.values(), again.optimizers.values()):
        assert repr(one.state_dict()["state"]) == repr(two.state_dict()["state"])


def by_length(prompts, responses, answers):
    return [len(response) / 10 for response in responses]


def test_offloaded_adamw_trains_the_weights_of_plain_adamw(example, grpo, tmp_path):
    constants = {**ONE_STEP, "REWARD_FUNCTIONS": [(by_length, 1.0)], "WEIGHT_DECAY": 0.1}
    module = example("offloaded_adamw", **constants)
    weights = []
    for script in (module.grpo, grpo(**constants, OUTPUT_DIR=str(tmp_path / "plain"))):
        trainer = script.GRPOTrainer()
        is_offloaded = isinstance(trainer.optimizers["policy"], module.OffloadedAdamW)
        assert is_offloaded == (script is module.grpo)
        trainer.train()
        weights.append(trainer.actor.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


# ---------------------------------------------------------------- data, turns, a teacher


def test_the_curriculum_counts_the_lines_of_the_first_solution(example):
    module = example("curriculum")
    assert module.difficulty({"id": "1", "answer": ["a\nb\nc", "a"]}) == 2
    for answer in (None, []):
        with pytest.raises(module.grpo.UserError, match="curriculum.py: a.jsonl:3 has no solution"):
            module.difficulty({"id": "a.jsonl:3", "answer": answer})


def test_a_whole_score_needs_its_reward_model(example):
    module = example("whole_score", REWARD_MODEL=None)
    with pytest.raises(module.ppo.UserError, match="whole_score.py needs a REWARD_MODEL"):
        module.OwnScoreTrainer()


def test_the_metrics_example_runs_without_an_evaluation(example):
    module = example("own_metric", EVAL_DATASETS=[])
    assert "headroom" not in module.MetricTrainer().evaluate()


def test_offloaded_moments_go_to_the_cpu_when_a_run_resumes(example, monkeypatch):
    module = example("offloaded_adamw")
    optimizer = module.OffloadedAdamW([torch.nn.Parameter(torch.ones(3))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()
    other = module.OffloadedAdamW([torch.nn.Parameter(torch.ones(3))])
    moved = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: moved.append(x) or x)
    other.load_state_dict(optimizer.state_dict())
    assert len(moved) == 3  # step, exp_avg and exp_avg_sq


def test_the_curriculum_takes_problems_with_few_steps_first_and_each_once(example, tmp_path):
    module = example("curriculum", **ONE_STEP)
    assert module.grpo.MAX_TRAIN_PROMPTS == 1280
    module.grpo.MAX_TRAIN_PROMPTS = 64
    trainer = module.grpo.GRPOTrainer()
    state = types.SimpleNamespace(epoch=0, order=None, cursor=0)
    seen = [row for _ in range(8) for row in module.next_rows(trainer.train_rows, state, 8)]
    in_order = sorted(trainer.train_rows, key=module.difficulty)
    assert sorted(row["id"] for row in seen) == sorted(row["id"] for row in in_order)
    assert [module.difficulty(row) for row in seen] == [module.difficulty(row) for row in in_order]
    assert module.difficulty(seen[0]) == 2 and module.difficulty(seen[-1]) == 4
    assert [row["id"] for row in seen] != [row["id"] for row in in_order]  # ties are in random order
    trainer.train()
    asked = {sample["prompt"] for sample in read(tmp_path / "run/logs/samples.jsonl")}
    assert asked and asked <= {row["prompt"] for row in seen[:4]}


def test_the_calculator_answers_each_sum_and_the_run_has_its_turns(example, tmp_path):
    module = example("turns", **ONE_STEP)
    response = "34-23=12\n2*3=\nso 4+4=8\n3-5=1"
    assert module.calculator([], response, None) == "34-23=11\n2*3=6\n3-5=-2"
    assert module.calculator([], "#### 51", None) is None
    module.grpo.GRPOTrainer().train()
    (step,) = steps_of(tmp_path / "run")
    assert step["turns"] > 1 and step["environment_tokens"] > 0
    assert re.search(r"user: \d+[-+*]\d+=-?\d+", (tmp_path / "run/logs/samples.jsonl").read_text())


def test_distillation_follows_the_teacher_and_names_a_missing_one(example, tmp_path):
    module = example("distillation", REFERENCE_MODEL=str(TINY / "policy"), MAX_STEPS=1, MAX_EVAL_PROMPTS=2)
    module.DistillationTrainer().train()
    first = read(tmp_path / "run/logs/metrics.jsonl")[0]
    assert first["minus_kl"] == pytest.approx(0, abs=1e-6)  # it is its own teacher
    module.grpo.REFERENCE_MODEL = str(tmp_path / "none")
    with pytest.raises(
        module.grpo.UserError, match=r"no teacher at .*none: train one by `python grpo/grpo.py`"
    ):
        module.DistillationTrainer()


def test_a_teacher_of_another_tokenizer_is_refused(example, tmp_path):
    shutil.copytree(TINY / "policy", tmp_path / "teacher")
    file = tmp_path / "teacher/tokenizer.json"
    text = file.read_text()
    vocab = json.loads(text)["model"]["vocab"]
    one, two = [key for key, number in vocab.items() if number in (10, 11)]
    swapped = {**json.loads(text)}
    swapped["model"]["vocab"] = {**vocab, one: vocab[two], two: vocab[one]}
    file.write_text(json.dumps(swapped))
    module = example("distillation", REFERENCE_MODEL=str(tmp_path / "teacher"))
    with pytest.raises(
        module.grpo.UserError, match="teacher: it has another tokenizer; its log-probabilities"
    ):
        module.DistillationTrainer()


def test_reasoning_gym_makes_rows_and_asks_the_tasks_own_score(example, tmp_path, monkeypatch):
    """With a stand-in for the package: n - 2 n, where a wrong answer that is even is worth a tenth."""

    def create_dataset(task, size, seed, **settings):
        def entry(n):
            return {"question": f"{n} - {2 * n} =", "answer": str(-n), "metadata": {"n": n, "seed": seed}}

        first = seed // 10_000
        made = Made(entry(n) for n in range(first, first + size))
        made.settings = settings
        return made

    class Made(list):
        def score_answer(self, answer, entry):
            assert entry["metadata"]["n"] == -int(entry["answer"]) and self.settings["max_terms"] == 2
            return 1.0 if answer == entry["answer"] else 0.1 if answer and int(answer) % 2 == 0 else 0.0

    package = types.SimpleNamespace(create_dataset=create_dataset)
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "train.jsonl"
    own.write_text("mine")
    gym = example("reasoning_gym_tasks", MAX_STEPS=1, MAX_EVAL_PROMPTS=2)
    module = gym.grpo
    assert list(tmp_path.iterdir()) == [own]  # an import writes nothing
    monkeypatch.setattr(module, "rank", lambda: 1)  # another process: the first one writes
    with pytest.raises(module.UserError, match="gym/train.jsonl.*cannot be read"):
        gym.GymTrainer("no")
    monkeypatch.setattr(module, "rank", lambda: 0)
    gym.GymTrainer("no").train()
    assert own.read_text() == "mine"
    assert sorted(path.name for path in (tmp_path / "run/gym").iterdir()) == ["test.jsonl", "train.jsonl"]
    rows = module.load_rows(module.EVAL_DATASETS, "EVAL_DATASETS")
    turns = [(turn["role"], turn["content"]) for turn in rows[3]["prompt"]]
    assert len(rows) == 64 and rows[3]["answer"] == "-103"
    assert turns == [
        ("user", "200 - 400 ="),
        ("assistant", "-200"),
        ("user", "201 - 402 ="),
        ("assistant", "-201"),
        ("user", "202 - 404 ="),
        ("assistant", "-202"),
        ("user", "203 - 406 ="),
        ("assistant", "-203"),
        ("user", "103 - 206 ="),
    ]
    trained = module.load_rows(module.TRAIN_DATASETS, "TRAIN_DATASETS")
    asked = [{row["prompt"][-1]["content"] for row in of_file} for of_file in (rows, trained)]
    assert len(trained) == 3000 and not asked[0] & asked[1], "no question of the test is trained on"
    columns = {"entry": [row["columns"]["entry"] for row in rows[:4]]}
    said = ["100 - 200 = -100", "it is -4.", "I do not know", "103 - 206 = -103"]
    ((function, weight),) = module.REWARD_FUNCTIONS
    scores = module.call_reward("solved", function, ["?"] * 4, said, [None] * 4, columns)
    assert scores.tolist() == pytest.approx([1, 0.1, 0, 1]) and weight == 1
    assert module.resolve_rewards([(module.ACCURACY_FUNCTION, 1.0)], "")[0][0] == "solved"
    gym.TRAIN_SIZE = 3
    monkeypatch.setattr(package, "create_dataset", lambda *x, **y: create_dataset(*x, **y)[:5])
    with pytest.raises(module.UserError, match="TASK = 'chain_sum': it has 0 problems beside the test's"):
        gym.problems(4, 0, gym.problems(5, 0))


# ---------------------------------------------------------------- metrics


def test_a_metric_a_panel_a_schedule_and_an_end_by_kl(example, tmp_path):
    module = example("own_metric", MAX_STEPS=3, MAX_EVAL_PROMPTS=2)
    scale = [module.learning_rate_scale(n, 40, 2, None, 0) for n in (0, 1, 2, 30, 35, 39)]
    assert scale == pytest.approx([0.5, 1, 1, 1, 0.5, 0.1])
    module.MAX_KL = -1.0
    trainer = module.MetricTrainer()
    assert ("headroom", ["headroom"]) in trainer.run.panels
    assert trainer.train()["headroom"] == 1 - trainer.run.evaluation["accuracy_sampled"]
    assert {"headroom", "accuracy_greedy", "reward"} <= trainer.evaluate(["How many?"], ["#### 1"]).keys()
    first, step, last = read(tmp_path / "run/logs/metrics.jsonl")
    assert [record["step"] for record in (first, step, last)] == [0, 1, 1]
    assert last["headroom"] == 1 - last["accuracy_sampled"] and 0 < step["distinct_responses"] <= 1
    assert "is above MAX_KL = -1.0" in next((tmp_path / "run/logs").glob("training_*.log")).read_text()
    assert (tmp_path / "run/step_1/manifest.json").exists()
    resumed = module.MetricTrainer(resume_from_checkpoint="yes")
    assert resumed.run.total_steps == 3
    resumed.train()
    assert resumed.run.step == 1 and not (tmp_path / "run/step_2").exists()


def test_distinct_responses_are_counted_in_each_group(example, monkeypatch):
    module = example("own_metric", GROUP_SIZE=3)
    logged = []
    monkeypatch.setattr(
        module.grpo.GRPOTrainer, "record", lambda self, batch, metrics: logged.append(metrics)
    )
    batch = types.SimpleNamespace(responses=["a", "a", "b", "c", "c", "c"])
    object.__new__(module.MetricTrainer).record(batch, {"kl": 0.0})
    assert logged[0]["distinct_responses"] == 0.5


def test_wandb_offline_writes_a_real_run_whose_table_has_the_samples(tmp_path):
    """Started from another folder, as a program."""
    pytest.importorskip("wandb")
    out = tmp_path / "run"
    words = words_of("grpo/grpo.py", f"OUTPUT_DIR={out}", "LOG_SAMPLES=2")
    silent = {"WANDB_SILENT": "true"}
    done = Program(ROOT / "examples/wandb_samples.py", *words, cwd=tmp_path, environment=silent).wait()
    assert done.returncode == 0, done.stderr
    assert list(out.glob("wandb/offline-run-*/run-*.wandb"))[0].stat().st_size > 1000
    (file,) = out.glob("wandb/offline-run-*/files/media/table/samples_2_*.table.json")
    table = json.loads(file.read_text())
    samples = read(out / "logs/samples.jsonl")
    assert len(samples) == 4 and table["columns"] == list(samples[0])
    assert table["data"] == [list(sample.values()) for sample in samples]


# ---------------------------------------------------------------- several programs


@pytest.fixture
def in_process(monkeypatch):
    """in_process(NAME, folder, *words): runs an example whose programs run in this process;
    in_process.programs are their names."""

    programs = []

    def run(name, folder, *words):
        programs.clear()

        def start(command):
            file = command[1]
            programs.append(file.removeprefix(f"{ROOT}/"))
            with monkeypatch.context() as patched, pytest.raises(SystemExit) as end:
                patched.setattr(sys, "argv", command[1:])
                if "/tools/" in file:
                    runpy.run_path(file, run_name="__main__")
                    sys.exit()
                load_script(programs[-1]).train_main()
            return types.SimpleNamespace(wait=lambda: end.value.code)

        module = load_script(f"examples/{name}.py")
        module.FOLDER = folder
        module.subprocess = types.SimpleNamespace(Popen=start)
        few = words_of("rce/rce.py", "MINE_PROMPTS=8", "BEAMS=0", "GROUP_SIZE=4", "MAX_TRAIN_PROMPTS=8")
        module.MINE = [*module.MINE, *few]
        monkeypatch.setattr(sys, "argv", [name, *words])
        module.main()

    run.programs = programs
    return run


def test_dpo_trains_on_the_best_and_worst_candidates_that_rce_mined(in_process, tmp_path):
    words = ["MAX_STEPS=1", "EVAL_DATASETS=[]"]
    in_process("dpo_from_candidates", tmp_path, *words)
    assert in_process.programs == ["rce/rce.py", "tools/pairs.py", "rce/dpo.py"]
    pairs = {pair["prompt"] for pair in read(tmp_path / "pairs.jsonl")}
    (step,) = steps_of(tmp_path / "dpo")
    sampled = {sample["prompt"] for sample in read(tmp_path / "dpo/logs/samples.jsonl")}
    assert step["grad_norm"] > 0 and sampled and sampled <= pairs
    with pytest.raises(SystemExit) as end:
        in_process("dpo_from_candidates", tmp_path, "BETA=-1")
    assert end.value.code == 2  # that of the program that failed
    assert in_process.programs == ["tools/pairs.py", "rce/dpo.py"]  # nothing was mined again


def test_grpo_goes_on_from_the_best_policy_of_rce(monkeypatch, tmp_path):
    """The words of both programs; that a trainer takes another's best/policy is tested in test_grpo.py."""
    module = load_script("examples/grpo_after_rce.py")
    found = []

    def start(command):
        script = load_script(command[1].removeprefix(f"{ROOT}/"))
        script.apply_overrides(command[2:])
        found.append(script)
        return types.SimpleNamespace(wait=lambda: 0)

    module.FOLDER = tmp_path
    module.subprocess = types.SimpleNamespace(Popen=start)
    module.SHARED = ["SYSTEM_PROMPT=Think."]
    monkeypatch.setattr(sys, "argv", ["grpo_after_rce.py", "MAX_STEPS=7"])
    module.main()
    rce, grpo = found
    assert rce.SYSTEM_PROMPT == grpo.SYSTEM_PROMPT == "Think."
    assert hasattr(rce, "RCETrainer") and hasattr(grpo, "GRPOTrainer")
    assert f"{rce.OUTPUT_DIR}/best/policy" == grpo.ACTOR_MODEL and rce.OUTPUT_DIR != grpo.OUTPUT_DIR
    assert rce.STAGE == "all" and grpo.MAX_STEPS == 7 and rce.MAX_STEPS is None


@pytest.mark.parametrize("name", ["dpo_from_candidates", "grpo_after_rce"])
def test_what_both_programs_need_and_several_processes_are_refused(name, monkeypatch, capsys):
    module = load_script(f"examples/{name}.py")
    for word, size, says in (
        ("ACTOR_MODEL=mine", "1", "ACTOR_MODEL=mine: both programs must have it: put it into SHARED"),
        ("TRAIN_DATASETS=[]", "1", "TRAIN_DATASETS=..: both programs must have it"),
        ("SEED=2", "2", "it starts two programs in a row: start each of them by torchrun instead"),
    ):
        monkeypatch.setattr(sys, "argv", [name, word])
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(SystemExit) as end:
            module.main()
        assert end.value.code == 2 and re.search(f"{name}.py: {says}", capsys.readouterr().err)


@pytest.mark.parametrize("name", ["dpo_from_candidates", "grpo_after_rce"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_program_in_a_row_may_save_when_both_are_stopped(name, number, tmp_path):
    """The signal goes to the group, as Ctrl-C does, or to the first program alone."""
    (tmp_path / "child.py").write_text(
        "import signal, sys, time, pathlib\n"
        "def save(number, frame):\n"
        "    time.sleep(1)\n"
        f"    pathlib.Path({str(tmp_path / 'saved')!r}).touch()\n"
        "    sys.exit(130)\n"
        "signal.signal(signal.SIGINT, save); signal.signal(signal.SIGTERM, save)\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(60)\n"
    )
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r}); import {name} as m\n"
    code += f"m.run({str(tmp_path / 'child.py')!r})\nprint('went on')"
    parent = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    if number == signal.SIGINT:
        os.killpg(parent.pid, number)
    else:
        parent.send_signal(number)
    said = parent.communicate(timeout=60)[0]
    assert parent.returncode == 130 and (tmp_path / "saved").exists() and not said


def test_a_variant_brings_the_data_that_its_trainer_names(tmp_path):
    main = load_script("examples/own_variant.py").main
    for trainer, folder in (
        ("rce/rce_icl.py", "banking77"),
        ("grpo/grpo_rec.py", "rec"),
        ("ppo/ppo_rag.py", "rag"),
    ):
        mine = tmp_path / folder
        main([trainer, str(mine)])
        assert (mine / "data" / folder).is_dir(), trainer


def test_a_variant_has_all_that_its_trainer_needs(tmp_path, capsys, monkeypatch):
    """That a trainer runs with rewards/ alone is tested in test_run.py."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    main = load_script("examples/own_variant.py").main
    mine = tmp_path / "mine"
    main(["grpo/grpo.py", str(mine)])
    assert f"python {mine}/grpo.py" in capsys.readouterr().out
    script = load_script(mine / "grpo.py")
    assert mine == script.ROOT
    for path in (
        script.ACTOR_MODEL,
        *(data["path"] for data in script.TRAIN_DATASETS + script.EVAL_DATASETS),
    ):
        assert path.startswith(f"{mine}/data/tiny/") and (mine / path).exists()
    for trainer, folder, says in (
        ("grpo/grpo.py", mine, f"{mine} exists already: name a new folder"),
        ("grpo.py", tmp_path / "new", "there is no trainer grpo.py"),
    ):
        with pytest.raises(SystemExit) as end:
            main([trainer, str(folder)])
        assert end.value.code == 2 and f"own_variant.py: {says}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="A variant of your own"):
        main([])


# ---------------------------------------------------------------- the notebook


def test_the_notebooks_cells_run_in_order_and_its_outputs_are_of_a_run(tmp_path, monkeypatch):
    """With fewer steps, in a folder of its own that holds a link to grpo.py."""
    file = ROOT / "examples/first_run.ipynb"
    assert file.stat().st_size < 200_000
    cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    shown = json.dumps(outputs)
    assert "step 20, held out" in shown and "step 30, held out" in shown and "image/png" in shown
    assert "Traceback" not in shown and "/work/" not in shown and "stderr" not in shown

    script = load_script("grpo/grpo.py", **small("grpo/grpo.py", MAX_EVAL_PROMPTS=1, MAX_TRAIN_PROMPTS=8))
    monkeypatch.setitem(sys.modules, "grpo", script)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    (tmp_path / "grpo").symlink_to(ROOT / "grpo")
    steps = {
        "MAX_STEPS = 20": "MAX_STEPS = 1",
        "MAX_STEPS = 10": "MAX_STEPS = 1",
        "MAX_STEPS = 30": "MAX_STEPS = 2",
    }
    text = "\n".join("".join(cell["source"]) for cell in cells)
    for long, short in steps.items():
        assert text.count(long) == 1
        text = text.replace(long, short)
    space = {}
    exec(text, space)
    records = read(tmp_path / "checkpoints/first_run/logs/metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 1, 2, 2]  # the evaluation of step 1 is kept
    (step,) = steps_of(tmp_path / "checkpoints/first_run_short")
    assert step["reward"] == step["reward/short"] < 0
    assert space["tokenizer"].decode(space["ids"][0]).startswith(space["row"]["prompt"])
