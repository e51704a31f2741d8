"""tools/memory.py: it counts what models, gradients and AdamW hold; the rest by hand; what it refuses."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, load_script, small
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import AutoModelForTokenClassification

GRPO, PPO = str(ROOT / "grpo/grpo.py"), str(ROOT / "ppo/ppo.py")
ACTOR = f"ACTOR_MODEL={TINY / 'policy'}"


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("memory", ROOT / "tools/memory.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def estimate(tool):
    """estimate(trainer, "KEY=VALUE", ...): {what: bytes} for the shipped policy."""

    def run(trainer, *words):
        return tool.estimate(trainer, tool.override(tool.read_constants(trainer), [ACTOR, *words]))

    return run


def held_bytes(model):
    """Returns the bytes of a model's weights, and of its gradients and AdamW's two moments after a step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    bytes_of = [sum(x.numel() * x.element_size() for x in some) for some in (model.parameters(), moments)]
    return bytes_of[0], bytes_of[1] + sum(p.grad.numel() * p.grad.element_size() for p in trained)


def actor_row(rows):
    return rows["actor: weights"], rows["actor: gradients, optimizer state"]


def test_whole_models_are_counted_as_they_lie_in_memory(estimate):
    rows = estimate(PPO, "KL_COEF=0.1", f"REWARD_MODEL={TINY / 'reward_model'}")
    assert actor_row(rows) == held_bytes(AutoModelForCausalLM.from_pretrained(TINY / "policy"))
    critic = AutoModelForTokenClassification.from_pretrained(TINY / "policy", num_labels=1)
    assert (rows["critic: weights"], rows["critic: gradients, optimizer state"]) == held_bytes(critic)
    reward = AutoModelForSequenceClassification.from_pretrained(TINY / "reward_model")
    assert rows["reward model: weights"] == held_bytes(reward)[0]
    assert rows["reference: weights"] == rows["actor: weights"]


def test_only_ppo_has_a_critic_and_only_a_kl_a_reference(estimate):
    assert not [name for name in estimate(GRPO) if name.startswith(("critic", "reference", "reward"))]
    assert "critic: weights" in estimate(PPO, "REWARD_MODEL=None") and "reference: weights" in estimate(
        GRPO, "KL_COEF=0.1"
    )
    assert "reference: weights" not in estimate(GRPO, "KL_COEF=0.1", "LORA_RANK=4"), "the frozen actor is it"
    other = estimate(GRPO, "KL_COEF=0.1", "LORA_RANK=4", f"REFERENCE_MODEL={TINY / 'policy'}")
    assert "reference: weights" in other


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_counted_beside_a_frozen_actor(estimate, tmp_path, dtype):
    constants = {"LORA_RANK": 4, "DTYPE": dtype}
    script = load_script("grpo/grpo.py", **small("grpo/grpo.py", OUTPUT_DIR=str(tmp_path), **constants))
    model = script.GRPOTrainer().actor
    assert actor_row(estimate(GRPO, "LORA_RANK=4", f"DTYPE={dtype}")) == held_bytes(model)


def test_fsdp2_divides_every_model_between_the_processes(estimate):
    words = ("KL_COEF=0.1", f"REWARD_MODEL={TINY / 'reward_model'}")
    whole = estimate(PPO, *words)
    parts = estimate(PPO, *words, "PROCESSES=4", "SHARD=fsdp2")
    for name in whole:
        if "weights" in name or "optimizer" in name:
            assert parts[name] == whole[name] / 4 and ":" in name
    # While it samples, every process holds the actor whole
    rollout = "caches and logits of a rollout"
    assert parts[rollout] - whole[rollout] == whole["actor: weights"] * 3 / 4


def test_gradients_that_are_added_in_order_are_held_twice(estimate):
    weights, state = actor_row(estimate(GRPO))
    assert actor_row(estimate(GRPO, "PROCESSES=2")) == (weights, state + weights)
    assert actor_row(estimate(GRPO, "PROCESSES=2", "DETERMINISTIC_GRADIENTS=False")) == (weights, state)
    assert actor_row(estimate(GRPO, "PROCESSES=2", "SHARD=fsdp2")) == (weights / 2, state / 2)


def test_caches_and_logits_by_hand(tool):
    """Of a model of 3 layers with 2 key heads of width 5 and 100 tokens."""
    config = SimpleNamespace(num_hidden_layers=3, num_key_value_heads=2, head_dim=5, hidden_size=20)
    config.num_attention_heads, config.intermediate_size, config.vocab_size = 4, 30, 100
    c = SimpleNamespace(DTYPE="bfloat16", BATCH_SIZE=2, GROUP_SIZE=4, MAX_PROMPT_TOKENS=6, MAX_NEW_TOKENS=8)
    c.GPU_GIB, c.MICRO_BATCH_ROWS, c.GRADIENT_CHECKPOINTING = 0, None, False
    per_token = 2 * 3 * 2 * 5 * 2
    assert tool.rollout_bytes(config, c) == per_token * (2 * 6 + 1.5 * 8 * 8) + 8 * 100 * (2 + 12)
    c.DTYPE = "float32"
    assert tool.rollout_bytes(config, c) == 2 * per_token * (2 * 6 + 1.5 * 8 * 8) + 8 * 100 * 16
    tokens = 8 * 8 + 2 * 6  # all eight responses, two prompts
    layer = tokens * 4 * (10 * 20 + 5 * 30)
    logits = 8 * 8 * 8 * 100 * 4 + 20 * 100 * 4
    assert tool.update_bytes(config, c) == 3 * layer + logits
    c.GRADIENT_CHECKPOINTING = True
    assert tool.update_bytes(config, c) == layer + 3 * tokens * 4 * 20 + logits
    c.GRADIENT_CHECKPOINTING, c.MICRO_BATCH_ROWS = False, 4
    half = 4 * (4 * 8 + 6) * (10 * 20 + 5 * 30)
    assert tool.update_bytes(config, c) == 3 * half + 8 * 4 * 8 * 100 * 4 + 20 * 100 * 4


@pytest.mark.parametrize("gib, rows", [(0, 2), (16, 32)])
def test_rows_of_an_update_are_those_that_the_trainer_chooses(tool, monkeypatch, gib, rows):
    """Of a vocabulary of 2**16 and 128 tokens a row's logits take 32 MiB."""
    script = load_script("grpo/grpo.py", BATCH_SIZE=8, GROUP_SIZE=8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, gib * 2**30))
    text_config = SimpleNamespace(vocab_size=2**16)
    model = SimpleNamespace(device=torch.device("cuda" if gib else "cpu"))
    model.config = SimpleNamespace(get_text_config=lambda: text_config)
    batch = SimpleNamespace(response_mask=torch.ones(64, 128))
    assert script.micro_batch_rows(model, batch) == rows
    config = SimpleNamespace(hidden_size=8, intermediate_size=8, num_hidden_layers=0, vocab_size=2**16)
    c = SimpleNamespace(DTYPE="float32", BATCH_SIZE=8, GROUP_SIZE=8, MAX_PROMPT_TOKENS=6, MAX_NEW_TOKENS=128)
    c.GPU_GIB, c.MICRO_BATCH_ROWS, c.GRADIENT_CHECKPOINTING = gib, None, False
    assert tool.update_bytes(config, c) == 8 * rows * 128 * 2**16 * 4 + 8 * 2**16 * 4


def test_constants_are_the_trainers_unless_a_word_overrides_them(tool, path):
    script = load_script(path)
    read = tool.read_constants(str(ROOT / path))
    for name, value in read.items():
        if name in script.constants():
            assert getattr(script, name) == value, name
    assert {"ACTOR_MODEL", "MAX_NEW_TOKENS", "LORA_RANK", "REWARD_MODEL", "SHARD"} <= read.keys()
    words = ["MAX_NEW_TOKENS=7", "DTYPE=bfloat16", "REWARD_MODEL=None", "PROCESSES=3"]
    c = tool.override(read, words)
    assert (c.MAX_NEW_TOKENS, c.DTYPE, c.REWARD_MODEL, c.PROCESSES) == (7, "bfloat16", None, 3)


@pytest.fixture
def said(tool, monkeypatch, capsys):
    """said("KEY=VALUE", ...): (exit code, stdout, stderr) of the command."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["memory.py", *words])
        try:
            code = tool.main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


def test_the_total_is_what_is_always_there_and_the_larger_phase(said):
    words = ("GPU_GIB=8", "BATCH_SIZE=64", "GROUP_SIZE=64", "MAX_NEW_TOKENS=512")
    code, out, err = said(PPO, ACTOR, *words)
    assert code is None, err
    sizes = {line[:40].strip(): float(line[40:].split()[0]) for line in out.splitlines()}
    total = sizes.pop("at the most, per process")
    rollout = sizes.pop("caches and logits of a rollout")
    update = sizes.pop("activations and logits of an update")
    assert total == pytest.approx(sum(sizes.values()) + max(rollout, update), abs=0.05)
    assert min(rollout, update) > 0.1 and out.endswith(" GiB of 8\n")


def test_true_and_false_are_read_as_the_trainers_read_them(tool):
    for text, value in (("true", True), ("false", False), ("True", True)):
        words = [f"GRADIENT_CHECKPOINTING={text}"]
        assert tool.override(tool.read_constants(GRPO), words).GRADIENT_CHECKPOINTING is value


def test_a_copy_of_ppo_has_its_critic(said, tmp_path):
    (tmp_path / "mine.py").write_text((ROOT / "ppo/ppo.py").read_text())
    code, out, err = said(str(tmp_path / "mine.py"), ACTOR, "REWARD_MODEL=None")
    assert code is None and "critic: weights" in out, err
    assert "of a CPU; for a GPU give its memory, such as GPU_GIB=80" in out
    assert "critic" not in said(GRPO, ACTOR)[1]


def test_without_a_trainer_it_is_grpo_and_without_words_the_help(said, tool):
    assert said(ACTOR) == said(GRPO, ACTOR)
    for words in ([], ["-h"], [PPO, "--help"]):
        assert said(*words) == (tool.__doc__, "", "")


@pytest.mark.parametrize(
    "words, says",
    [
        ([ACTOR, "MAX_TOKENS=3"], "'MAX_TOKENS=3' is not KEY=VALUE with a constant of the trainer"),
        ([PPO, ACTOR, "quickly"], "'quickly' is not KEY=VALUE"),
        (["ppo/other.py", ACTOR], "there is no trainer ppo/other.py"),
        (["ACTOR_MODEL=/nowhere/model"], "ACTOR_MODEL = '/nowhere/model' cannot be read"),
        ([ACTOR, "REWARD_MODEL=/nowhere"], "REWARD_MODEL = '/nowhere' cannot be read"),
        ([ACTOR, "DTYPE=bf16"], "DTYPE=bf16: DTYPE takes float32 or bfloat16"),
        ([ACTOR, "SHARD=fsdp"], "SHARD=fsdp: SHARD takes none or fsdp2"),
        ([ACTOR, "GRADIENT_CHECKPOINTING=yes"], "GRADIENT_CHECKPOINTING takes True or False"),
        ([ACTOR, "MAX_NEW_TOKENS=many"], "MAX_NEW_TOKENS=many: MAX_NEW_TOKENS takes a number, such as"),
        ([ACTOR, "BATCH_SIZE=None"], "BATCH_SIZE takes a number"),
        ([ACTOR, "GPU_GIB=80GB"], "GPU_GIB=80GB: GPU_GIB takes a number"),
        ([ACTOR, "PROCESSES=0"], "PROCESSES = 0: it takes 1 or more"),
        ([str(ROOT / "ppo/sft.py"), ACTOR], "ppo/sft.py has no REWARD_MODEL: the estimate is of ppo/ppo.py"),
        ([str(ROOT / "ppo/ppo_rag.py"), "SEED=1"], "ppo/ppo_rag.py has no ACTOR_MODEL"),
    ],
)
def test_what_cannot_be_counted_is_one_message(said, words, says):
    code, out, err = said(*words)
    assert (code, out) == (2, "")
    (line,) = err.strip().splitlines()
    assert line.startswith("memory.py: ") and says in line
