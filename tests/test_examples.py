"""The programs of examples/: each trains for a step or two, and what it changes is seen."""

import importlib.util
import io
import json
import shutil
import sys
import urllib.request
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, TRAINERS, load, read, small
from matplotlib.figure import Figure
from program import save_nothing

GRPO, PPO = "grpo/grpo.py", "ppo/ppo.py"
BY_LENGTH = [("length_penalty", 1.0)]  # a reward by which no group is flat


@pytest.fixture
def example(tmp_path, monkeypatch):
    """example("judge", KEY=value) imports examples/judge.py over a fresh and small trainer, its `script`. The
    module gets make(), which gives a trainer, and train(): the trainer and the records of its steps."""
    monkeypatch.setattr(Figure, "savefig", save_nothing)
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])

    def run(name, path=GRPO, **constants):
        once = {"MAX_STEPS": 1, "EVAL_DATASETS": [], "SAVE_EVERY_N_STEPS": 0, "OUTPUT_DIR": str(tmp_path)}
        script = load(path, **small(path, **once))
        script.GRPOTrainer = getattr(script, TRAINERS[path])  # turns.py stands over ppo.py, too
        monkeypatch.setitem(sys.modules, "grpo", script)
        monkeypatch.setitem(sys.modules, "ppo", script)
        sys.modules.pop("turns", None)
        spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        vars(script).update(once | constants)

        def train(trainer=None):
            trainer = trainer or module.make()
            trainer.train()
            return trainer, [x for x in read(tmp_path / "logs/metrics.jsonl") if x["phase"] == "train"]

        module.make = lambda: getattr(script, TRAINERS[path])()
        module.script, module.train = script, train
        return module

    return run


def test_the_readme_says_how_to_start_each_example():
    readme = (ROOT / "examples/README.md").read_text()
    assert all(f"python examples/{file.name}" in readme for file in (ROOT / "examples").glob("*.py"))


def test_own_reward(example):
    _, (step,) = example("own_reward").train()
    assert step["reward/right_steps"] > 0 and 0 < step["reward/as_many_lines"] < 1
    assert step["reward"] == pytest.approx(step["reward/exact_answer"] + 0.3 * step["reward/right_steps"])


def test_whole_score(example):
    trainer, (step,) = example("whole_score", PPO).train()
    score = trainer.compute_rewards(["q"], ["1+1=2\n" * 20], [None])
    assert score == trainer.reward_parts["quality"] * 40 / 120 and 0 < step["reward/quality"] < 1


def test_token_rewards(example):
    module = example("token_rewards", PPO, KL_COEF=0.0, LAM=0.0)
    trainer = module.make()
    batch = trainer.rollout(trainer.next_prompts())
    trainer.compute_advantages(batch)
    rewards = trainer.line_rewards(batch)
    for row, text in enumerate(batch.texts):
        assert rewards[row].sum() == pytest.approx(0.1 * sum(map(module.is_right, text.split("\n"))))
    assert rewards.any() and not trainer.tokenizer.decode(batch.ids[rewards > 0]).strip()
    # A fresh critic says 0, so with LAM = 0 advantages are the rewards of the tokens
    scores = module.script.per_token_rewards(batch.scores, batch.logprobs, batch.logprobs, batch.mask, 0.0)
    assert torch.allclose(batch.raw_advantages, rewards + scores)


def test_judge(example, monkeypatch):
    replies = iter([None, *range(12), *range(16)])  # None: an error

    def urlopen(request, timeout):
        assert "Reference answer: " in json.loads(request.data)["messages"][0]["content"]
        if (grade := next(replies)) is None:
            raise OSError("busy")
        return io.BytesIO(json.dumps({"choices": [{"message": {"content": f"{grade} of 10"}}]}).encode())

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    module = example("judge")
    module.WAITS, module.THREADS = [0, 0], 1
    assert module.judge("q" * 12, "r" * 12, "a" * 12) == [min(10, i) / 10 for i in range(12)]
    assert module.train()[1][0]["reward"] == pytest.approx((sum(range(10)) / 10 + 6) / 16)


def test_custom_loss(example):
    module = example("custom_loss", REWARD_FUNCTIONS=BY_LENGTH)
    losses = []
    for module.POSITIVE_WEIGHT in (1.0, 0.1):
        losses.append(module.train()[1][0]["policy_loss"])
    assert losses[1] > losses[0] + 0.1  # the part of positive advantages is negative


def test_own_variant(example):
    module = example("own_variant")
    module.K = 2
    advantages = module.script.group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    # Of the 6 pairs 3 have the right response; of the 3 with a given wrong one, 1 has it
    assert advantages.tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3], abs=1e-3)
    assert module.script.group_advantages(torch.tensor([1.0, 1.0, 1.0, 0.0])).eq(0).all()
    module.train()


def test_distillation(example):
    module = example("distillation", REFERENCE_MODEL=str(TINY / "policy"), MAX_STEPS=2)
    trainer = module.make()
    for parameter in trainer.reference.parameters():
        parameter.mul_(1.02)
    _, (first, second) = module.train(trainer)
    assert first["policy_loss"] == first["advantage_abs"] == 0 < first["policy_grad_norm"]
    assert second["kl"] < first["kl"]


@pytest.mark.parametrize("path", [GRPO, PPO])
def test_top_p(example, path):
    module = example("top_p", path, KL_COEF=0.0)
    probabilities = module.script.sampling_logprobs(torch.tensor([0.5, 0.3, 0.17, 0.03]).log()).exp()
    assert probabilities.tolist() == pytest.approx([0.5 / 0.97, 0.3 / 0.97, 0.17 / 0.97, 0.0])
    trainer, (step,) = module.train()
    unlikeliest = trainer.respond(trainer.train_rows[:8], torch.full((8, 32), 0.9999))
    assert step["rollout_mismatch"] < 1e-4 and unlikeliest.logprobs.min() > -5
    assert trainer.respond(trainer.train_rows[:8], None).texts[0]


def test_muon(example):
    module = example("muon", REWARD_FUNCTIONS=BY_LENGTH, USE_LR_SCHEDULER=True, MAX_STEPS=2, RESUME="yes")
    trainer, _ = module.train()
    optimizer = trainer.optimizers["policy"]
    muon, adamw = (inner.param_groups[0] for inner in optimizer.optimizers)
    assert {tuple(optimizer.state[matrix]) for matrix in muon["params"]} == {("momentum_buffer",)}
    assert muon["lr"] == adamw["lr"] == pytest.approx(0.5e-4)  # the second of two steps
    module.script.MAX_STEPS = 3
    resumed = module.make()
    assert repr(resumed.optimizers["policy"].state_dict()) == repr(optimizer.state_dict())
    resumed.train()
    assert not any(map(torch.equal, trainer.actor.parameters(), resumed.actor.parameters()))


def test_offloaded_adamw(example):
    trainer = example("offloaded_adamw", REWARD_FUNCTIONS=BY_LENGTH).make()
    moves = []
    trainer.optimizers["policy"].move_state = lambda parameter, device: moves.append(str(device))
    trainer.train()
    assert len(moves) == 2 * len(list(trainer.actor.parameters()))  # to the device and back
    plain, _ = example("own_reward", REWARD_FUNCTIONS=BY_LENGTH).train()
    assert all(map(torch.equal, trainer.actor.parameters(), plain.actor.parameters()))


def test_curriculum(example):
    module = example("curriculum", MAX_STEPS=20)
    trainer = module.make()
    for trainer.state.step, expected in ((1, {2}), (19, {2, 3, 4})):
        trainer.seed_step()
        assert {module.difficulty(row) for _ in range(8) for row in trainer.next_prompts()} == expected
    module.train(trainer)


def test_own_metric(example):
    trainer, (step,) = example("own_metric", EVAL_DATASETS=load(GRPO).EVAL_DATASETS).train()
    assert 0 < step["unlikely_tokens"] < 0.5 and 1 / 16 < step["distinct_responses"] <= 1
    last = trainer.state.evaluation
    assert last["gain_of_more_samples"] == last["pass@2"] - last["accuracy_sampled"]


def test_wandb_samples(example, monkeypatch):
    tables = []
    run = SimpleNamespace(id="1", finish=bool, log=lambda values, step: tables.append(values.get("samples")))
    module = example("wandb_samples", MAX_STEPS=2)
    module.EVERY_N_STEPS = 2
    monkeypatch.setattr(module.wandb, "init", lambda **options: run)
    module.train()
    assert tables[:2] == [None, None] and len(tables[2].data) == 16  # the second step's, after its metrics


def test_reasoning_gym_tasks(example, monkeypatch):
    """With a stand-in for the package, whose seeds have questions in common."""

    class Task(list):
        def __init__(self, task, seed, size, **settings):
            super().__init__({"question": f"{n % 97}?", "answer": "4"} for n in range(seed, seed + size))

        def score_answer(self, answer, entry):
            return float(answer == entry["answer"])

    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=Task))
    module = example("reasoning_gym_tasks")
    trainer, (step,) = module.train()
    assert "reward/solved" in step
    contents = {message["content"] for row in trainer.train_rows for message in row["prompt"]}
    held_out = {record["chat"][-1]["content"] for record in module.read_records(module.TEST)}
    assert len(held_out) == 64 and not held_out & contents


def test_vllm_server(example):
    """The server is the trainer's own sampler, with other random numbers, and rounds otherwise."""
    module = example("vllm_server", MAX_STEPS=2, REWARD_FUNCTIONS=BY_LENGTH)
    sampler = example("own_reward").make()
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
    for step in steps:
        assert step["rollout_mismatch"] < 1e-4 and step["sampler_kl"] == pytest.approx(5e-5, rel=0.05)
    batch = trainer.rollout(trainer.train_rows[:4])
    trainer.compute_advantages(batch)
    plain = module.script.group_advantages(batch.scores)
    assert torch.allclose(batch.advantages[:, 0], 1.01005 * plain, atol=1e-3)  # exp(0.01)


def test_dpo_from_candidates(example, tmp_path):
    module = example("dpo_from_candidates")
    module.FOLDER = tmp_path
    module.MINE += ["MINE_PROMPTS=24", "EVAL_DATASETS=[]"]
    with pytest.raises(SystemExit, match="0"):  # the end of dpo.py
        module.main(["MAX_STEPS=1", "EVAL_DATASETS=[]"])
    assert read(tmp_path / "pairs.jsonl") and (tmp_path / "dpo/step_1/policy").is_dir()


@pytest.mark.parametrize("path", [GRPO, PPO])
def test_tokens_of_the_environment_stand_in_the_batch_and_are_not_trained(example, path):
    module = example("turns", path, MAX_NEW_TOKENS=64, MAX_STEPS=2)
    updates = []
    plain = module.script.logprobs_and_entropy

    def logprobs_and_entropy(model, batch, rows):
        logprobs, entropy = plain(model, batch, rows)
        if logprobs.requires_grad:
            logprobs.retain_grad()
            updates.append((batch, rows, logprobs))
        return logprobs, entropy

    module.script.logprobs_and_entropy = logprobs_and_entropy
    trainer, steps = module.train(module.TurnsTrainer())
    assert all(step["rollout_mismatch"] < 1e-4 for step in steps)
    tutor = trainer.tokenizer(module.ASK_AGAIN + "\n")["input_ids"]
    for batch, rows, logprobs in updates:
        mask = batch.mask[rows, : logprobs.shape[1]]
        assert logprobs.grad[mask == 0].eq(0).all() and logprobs.grad[mask > 0].any()
        for i in rows.tolist():
            ids = batch.response_ids[i]
            assert batch.ids[i, : len(ids)].tolist() == ids
            foreign = [token for token, is_own in zip(ids, batch.mask[i]) if not is_own]
            assert foreign == tutor * batch.texts[i].count("<eos>" + module.ASK_AGAIN + "\n")
    assert any(text.count("<eos>") == 2 for text in batch.texts)


def test_schema_tools(example, tmp_path):
    shutil.copytree(TINY / "policy", tmp_path / "policy")
    template = tmp_path / "policy/chat_template.jinja"
    tools = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    template.write_text(tools + template.read_text().replace("'user'", "'tool'"))
    module = example("schema_tools", ACTOR_MODEL=str(tmp_path / "policy"), MAX_NEW_TOKENS=64)
    trainer = module.ToolTrainer()
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
    assert trainer.reply({}, f"so {call}{call}") == "42\n42" and trainer.reply({}, "#### 1") is None
    assert trainer.train_rows[0]["ids"][0] == trainer.tokenizer.unk_token_id  # the name of the tool
    module.ToolTrainer.reply = lambda self, row, text: "42" if "-" in text else None
    assert module.train(trainer)[1][0]["rollout_mismatch"] < 1e-4
    assert "<eos>42\\n" in (tmp_path / "logs/samples.jsonl").read_text()
    with pytest.raises(ValueError, match="does not render tools"):
        example("schema_tools").ToolTrainer()
