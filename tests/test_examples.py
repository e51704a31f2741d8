"""The programs of examples/: each trains for a step or two, and what it changes is seen."""

import importlib
import io
import json
import shutil
import sys
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import ROOT, SOLUTIONS, TINY, TRAINERS, few, load, read, small
from matplotlib.figure import Figure
from program import save_nothing

GRPO, PPO = "grpo/grpo.py", "ppo/ppo.py"
BY_LENGTH = [("length_penalty", 1.0)]  # a reward by which no group is flat


@pytest.fixture
def example(tmp_path, monkeypatch):
    """example("judge", KEY=value) imports examples/judge.py over a fresh and small trainer, its `script`. The
    module gets make(), which gives a trainer, and train(): the trainer and the records of its steps."""
    monkeypatch.setattr(Figure, "savefig", save_nothing)
    monkeypatch.syspath_prepend(ROOT / "examples")

    def run(name, path=GRPO, **constants):
        once = {"MAX_STEPS": 1, "EVAL_DATASETS": [], "OUTPUT_DIR": str(tmp_path / name)}
        script = load(path, **small(path, **once))
        script.GRPOTrainer = getattr(script, TRAINERS[path])  # turns.py stands over ppo.py, too
        monkeypatch.setitem(sys.modules, "grpo", script)
        monkeypatch.setitem(sys.modules, "ppo", script)
        sys.modules.pop("turns", None)
        sys.modules.pop(name, None)
        module = importlib.import_module(name)
        vars(script).update(once | constants)

        def train(trainer=None):
            trainer = trainer or module.make()
            trainer.train()
            return trainer, [x for x in read(tmp_path / name / "logs/metrics.jsonl") if x["phase"] == "train"]

        module.make = lambda: getattr(script, TRAINERS[path])()
        module.script, module.train = script, train
        return module

    return run


def test_own_reward_adds_to_the_rewards_of_the_constants(example):
    _, (step,) = example("own_reward", REWARD_FUNCTIONS=[("last_number", 1.0)]).train()
    assert step["reward/right_steps"] > 0 and 0 < step["reward/as_many_lines"] < 1
    of_constants = step["reward/last_number"]
    assert step["reward"] == pytest.approx(of_constants + 0.3 * step["reward/right_steps"])


def test_token_rewards(example):
    module = example("token_rewards", PPO, KL_COEF=0.0, LAM=0.0)
    trainer = module.make()
    batch = trainer.rollout(trainer.next_prompts())
    trainer.compute_advantages(batch)
    rewards = trainer.line_rewards(batch)
    for row, text in enumerate(batch.texts):
        right = Counter(batch.rows[row]["answer"].splitlines())
        lines = Counter(line.strip() for line in text.split("\n"))
        assert rewards[row].sum() == (right & lines).total()
    # A fresh critic says 0, so with LAM = 0 advantages are the rewards of the tokens
    scores = module.original(batch, 0.0)
    assert rewards.any() and torch.allclose(batch.raw_advantages, rewards + scores)


def reply_of_a_judge(content):
    return io.BytesIO(json.dumps({"choices": [{"message": {"content": content}}]}).encode())


def test_judge_adds_to_the_rewards_of_the_constants(example, monkeypatch):
    grades = iter([None, *range(12), *range(16)])  # None: an error

    def urlopen(request, timeout):
        assert "Reference answer: " in json.loads(request.data)["messages"][0]["content"]
        if (number := next(grades)) is None:
            raise OSError("busy")
        return reply_of_a_judge(f"{number} of 10")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    module = example("judge", REWARD_FUNCTIONS=[("last_number", 1.0)])
    module.WAITS = [0, 0]
    monkeypatch.setattr(module, "ThreadPoolExecutor", lambda max_workers: ThreadPoolExecutor(1))
    assert module.judge("q" * 12, "r" * 12, "a" * 12) == [min(10, i) / 10 for i in range(12)]
    (step,) = module.train()[1]
    assert step["reward/judge"] == pytest.approx((sum(range(10)) / 10 + 6) / 16)
    assert step["reward"] == pytest.approx(step["reward/last_number"] + 0.2 * step["reward/judge"])


def test_the_grade_of_a_judge_is_the_last_number_of_its_reply(example, monkeypatch):
    module = example("judge")
    replies = {"<think>2 + 2 = 4</think> 7": 0.7, "7/10": 0.7, "8.5 out of 10.": 0.85, "10": 1.0, "25": 1.0}
    for content, value in {**replies, "": 0.0, None: 0.0, "good": 0.0}.items():
        monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **options: reply_of_a_judge(content))
        assert module.grade("q", "r", "a") == pytest.approx(value)


def test_what_the_server_of_a_judge_refuses_is_shown(example, monkeypatch):
    def refuse(request, timeout):
        text = io.BytesIO(b'{\n  "error": "max_tokens is not supported"\n}')
        raise urllib.error.HTTPError(module.URL, 400, "Bad Request", {}, text)

    module = example("judge")
    module.WAITS = [0]
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(ValueError, match=r'Bad Request: \{ "error": "max_tokens is not supported" \}'):
        module.grade("q", "r", "a")


def test_custom_loss(example):
    module = example("custom_loss", REWARD_FUNCTIONS=BY_LENGTH)
    losses = []
    for module.POSITIVE_WEIGHT in (1.0, 0.1):
        losses.append(module.train()[1][0]["policy_loss"])
    assert losses[1] > losses[0] + 0.1  # the part of positive advantages is negative


def test_curriculum_and_distillation(example):
    module = example("curriculum", MAX_STEPS=20)
    trainer = module.make()
    for trainer.state.step, expected in ((1, {2}), (19, {2, 3, 4})):
        trainer.seed_step()
        assert {module.difficulty(row) for _ in range(8) for row in trainer.next_prompts()} == expected
    module.train(trainer)
    options = {"MAX_STEPS": 2, "LEARNING_RATE": 3e-4, "WARMUP_STEPS": 0, "NUM_EPOCHS": 2, "BATCH_SIZE": 8}
    options["TRAIN_DATASETS"] = few("train.jsonl", 8, **SOLUTIONS)  # the same prompts in both steps
    module = example("distillation", REFERENCE_MODEL=str(TINY / "policy"), **options)
    trainer = module.make()
    for parameter in trainer.reference.parameters():
        parameter.mul_(1.1)
    _, (first, second) = module.train(trainer)
    assert first["policy_loss"] == first["advantage_abs"] == 0 < first["policy_grad_norm"]
    assert second["kl"] < 0.9 * first["kl"], (first["kl"], second["kl"])
    with pytest.raises(ValueError, match="needs REFERENCE_MODEL"):
        example("distillation", REFERENCE_MODEL=None).make()


def test_a_teacher_with_another_tokenizer_is_refused(example, chat_policy):
    with pytest.raises(ValueError, match="another tokenizer"):
        example("distillation", REFERENCE_MODEL=chat_policy()).make()


@pytest.mark.parametrize("path", [GRPO, PPO])
def test_top_p(example, path):
    module = example("top_p", path, KL_COEF=0.0)
    probabilities = module.script.sampling_logprobs(torch.tensor([0.5, 0.3, 0.17, 0.03]).log()).exp()
    assert probabilities.tolist() == pytest.approx([0.5 / 0.97, 0.3 / 0.97, 0.17 / 0.97, 0.0])
    trainer, (step,) = module.train()
    unlikeliest = trainer.respond(trainer.train_rows[:8], torch.full((8, 32), 0.9999))
    assert step["rollout_mismatch"] < 1e-4 and unlikeliest.logprobs.min() > -5
    assert trainer.respond(trainer.train_rows[:8], None).texts[0] != unlikeliest.texts[0]


def test_muon_and_offloaded_adamw(example):
    module = example("muon", REWARD_FUNCTIONS=BY_LENGTH, USE_LR_SCHEDULER=True, MAX_STEPS=2, RESUME="yes")
    optimizer = module.train()[0].optimizers["policy"]
    muon, adamw = (inner.param_groups[0] for inner in optimizer.optimizers)
    assert {tuple(optimizer.state[matrix]) for matrix in muon["params"]} == {("momentum_buffer",)}
    assert muon["lr"] == adamw["lr"] == pytest.approx(0.5e-4)  # the second of two steps
    module.script.MAX_STEPS = 3
    resumed = module.make()
    one, two = (x.state_dict()["state"] for x in (resumed.optimizers["policy"], optimizer))
    assert repr(one) == repr(two)
    resumed.train()
    assert not any(map(torch.equal, optimizer.param_groups[0]["params"], resumed.actor.parameters()))
    trainer = example("offloaded_adamw", REWARD_FUNCTIONS=BY_LENGTH).make()
    moves = []
    trainer.optimizers["policy"].move_state = lambda parameter, device: moves.append(str(device))
    trainer.train()
    assert len(moves) == 2 * len(list(trainer.actor.parameters()))  # to the device and back
    module = example("custom_loss", REWARD_FUNCTIONS=BY_LENGTH)
    module.POSITIVE_WEIGHT = 1.0
    plain, _ = module.train()
    assert all(map(torch.equal, trainer.actor.parameters(), plain.actor.parameters()))


def test_vllm_server(example):
    module = example("vllm_server", MAX_STEPS=2, REWARD_FUNCTIONS=BY_LENGTH)
    sampler = example("custom_loss").make()  # the server, which rounds otherwise
    paths = []

    def post(path, prompt=None, **request):
        paths.append(path)
        if path == "/collective_rpc":
            sampler.actor = type(sampler.actor).from_pretrained(request["kwargs"]["weights_path"]).eval()
        if path == "/v1/completions":
            batch = sampler.respond([{"ids": prompt}], torch.rand(1, 32))
            logprobs = {"token_logprobs": (batch.logprobs - 0.01)[0, : batch.lengths[0]].tolist()}
            return {"choices": [{"token_ids": batch.response_ids[0], "logprobs": logprobs}]}

    module.post, module.THREADS = post, 1
    trainer, steps = module.train()
    assert paths == (["/collective_rpc", "/reset_prefix_cache"] + ["/v1/completions"] * 16) * 2
    assert [step["sampler_kl"] for step in steps] == pytest.approx([5e-5] * 2, rel=0.05)
    batch = trainer.rollout(trainer.train_rows[:4])
    trainer.compute_advantages(batch)
    plain = module.script.group_advantages(batch.scores)
    assert torch.allclose(batch.advantages[:, 0], 1.01005 * plain, atol=1e-3)  # exp(0.01)
    with pytest.raises(ValueError, match="LORA_RANK=0"):
        example("vllm_server", LORA_RANK=2).make()


@pytest.mark.parametrize("path", [GRPO, PPO])
def test_tokens_of_the_environment_stand_in_the_batch_and_are_not_trained(example, path):
    module = example("turns", path, MAX_NEW_TOKENS=64, MAX_STEPS=2)
    updates = []
    plain = module.script.logprobs_and_entropy

    def logprobs_and_entropy(model, batch, rows):
        result = plain(model, batch, rows)
        if result[0].requires_grad:
            result[0].retain_grad()
            updates.append((batch, rows, result[0]))
        return result

    module.script.logprobs_and_entropy = logprobs_and_entropy
    trainer, steps = module.train(module.TurnsTrainer())
    assert all(step["rollout_mismatch"] < 1e-4 for step in steps)
    tutor = trainer.tokenizer(module.ASK_AGAIN + "\n")["input_ids"]
    for batch, rows, logprobs in updates:
        assert logprobs.grad[batch.mask[rows, : logprobs.shape[1]] == 0].eq(0).all() and logprobs.grad.any()
        for i in rows.tolist():
            ids = batch.ids[i, : len(batch.response_ids[i])]
            num_replies = batch.texts[i].count("<eos>" + module.ASK_AGAIN + "\n")
            assert ids.tolist() == batch.response_ids[i]
            assert ids[batch.mask[i, : len(ids)] == 0].tolist() == tutor * num_replies
    assert any(text.count("<eos>" + module.ASK_AGAIN + "\n") == 2 for text in batch.texts)


def test_schema_tools(example, tmp_path):
    shutil.copytree(TINY / "policy", tmp_path / "policy")
    with open(tmp_path / "policy/chat_template.jinja", "a") as template:
        template.write("{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}")
    module = example("schema_tools", ACTOR_MODEL=str(tmp_path / "policy"), MAX_NEW_TOKENS=64)
    trainer = module.ToolTrainer()
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
    assert trainer.reply({}, f"so {call}{call}") == "42\n42" and trainer.reply({}, "#### 1") is None
    assert trainer.train_rows[0]["ids"][-1] == trainer.tokenizer.unk_token_id  # the name of the tool
    module.ToolTrainer.reply = lambda self, row, text: "42" if "-" in text else None
    assert module.train(trainer)[1][0]["rollout_mismatch"] < 1e-4
    assert "<eos>42<eos>" in (tmp_path / "schema_tools/logs/samples.jsonl").read_text()
    with pytest.raises(ValueError, match="does not render tools"):
        example("schema_tools").ToolTrainer()
