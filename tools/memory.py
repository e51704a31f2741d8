"""Estimate how much memory a run takes on each device, from the model's config alone: no weights are loaded.

    python tools/memory.py ACTOR_MODEL=Qwen/Qwen2.5-0.5B-Instruct MAX_NEW_TOKENS=512
    python tools/memory.py ppo/ppo.py ACTOR_MODEL=meta-llama/Llama-3.1-8B LORA_RANK=16 DTYPE=bfloat16
    python tools/memory.py ACTOR_MODEL=Qwen/Qwen2.5-7B-Instruct SHARD=fsdp2 PROCESSES=4 GPU_GIB=80

The first word names the trainer: grpo/grpo.py (the default), ppo/ppo.py, rce/rce.py, or a copy of one. The
others override its constants, as on its own command line. PROCESSES: of torchrun. GPU_GIB: the memory of one
GPU, as nvidia-smi shows it; it decides how many responses are read at a time. 0: a CPU. A hub name needs the
network.

Weights, gradients and optimizer state are counted exactly, but without the critic's head of LoRA. Caches and
activations are estimated for a decoder with attention and a gated feed-forward layer, such as Llama or Qwen
(docs/your-model.md compares it with what processes took).
"""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
FLOAT = 4  # bytes
# An interpreter with torch and transformers, before any model; a GPU's context takes as much
PYTHON = 0.45 * GIB
WORDS = {"DTYPE": ("float32", "bfloat16"), "SHARD": ("none", "fsdp2")}


def stop(message):
    print(f"memory.py: {message}", file=sys.stderr)
    sys.exit(2)


def read_constants(trainer):
    """Returns the constants of a trainer's file: those whose values can be read without running it."""
    constants = {"PROCESSES": 1, "GPU_GIB": 0, "KL_COEF": 0.0, "REFERENCE_MODEL": None}
    for node in ast.parse(Path(trainer).read_text()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id.isupper() and node.value:
            try:
                expression = compile(ast.Expression(node.value), trainer, "eval")
                constants[target.id] = eval(expression, {"ROOT": ROOT, "__builtins__": {}})
            except Exception:  # it calls something
                continue
    return constants


def override(constants, words):
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in constants:
            stop(f"{word!r} is not KEY=VALUE with a constant of the trainer, PROCESSES or GPU_GIB")
        default = constants[key]
        try:
            value = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
        except (ValueError, SyntaxError):
            value = text
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(default, bool) and not isinstance(value, bool):
            stop(f"{word}: {key} takes True or False")
        if isinstance(default, (int, float)) and not isinstance(default, bool) and not is_number:
            stop(f"{word}: {key} takes a number, such as {default}")
        if key in WORDS and value not in WORDS[key]:
            stop(f"{word}: {key} takes {' or '.join(WORDS[key])}")
        constants[key] = value
    if constants["PROCESSES"] < 1:
        stop(f"PROCESSES = {constants['PROCESSES']}: it takes 1 or more")
    return SimpleNamespace(**constants)


def empty_model(path, constant, auto_class, **changes):
    """Returns the model of a folder's or hub name's config, without weights."""
    import torch
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, **changes)
        with torch.device("meta"):
            return auto_class.from_config(config)
    except Exception as error:  # transformers raises many types
        stop(f"{constant} = {str(path)!r} cannot be read ({str(error).splitlines()[0]})")


def adapter_parameters(model, rank):
    """Returns the parameters of LoRA adapters on every linear layer except the heads."""
    import torch

    heads = ("lm_head", "score", "classifier")
    layers = [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and not name.endswith(heads)
    ]
    return sum(rank * (layer.in_features + layer.out_features) for layer in layers)


def trained_bytes(model, c):
    """Returns the bytes per process of a trained model's (weights, gradients and AdamW's moments)."""
    number = sum(p.numel() for p in model.parameters())
    if c.LORA_RANK:
        frozen = number * (2 if c.DTYPE == "bfloat16" else FLOAT)
        number = adapter_parameters(model, c.LORA_RANK)
        weights = frozen + FLOAT * number
    else:
        weights = FLOAT * number
    state = 3 * FLOAT * number
    if c.PROCESSES > 1 and c.SHARD == "none" and c.DETERMINISTIC_GRADIENTS:
        state += FLOAT * number  # the sum in a fixed order
    parts = c.PROCESSES if c.SHARD == "fsdp2" else 1
    return weights / parts, state / parts


def rollout_bytes(config, c):
    """Returns the bytes of the caches and of the tensors of the size (rows, vocabulary) while responses are
    sampled. Prompts are cached once for all their responses; buffers grow by half."""
    number = 2 if c.DTYPE == "bfloat16" else FLOAT
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * width * number
    prompts = c.BATCH_SIZE
    rows = c.BATCH_SIZE * c.GROUP_SIZE
    caches = per_token * (prompts * c.MAX_PROMPT_TOKENS + 1.5 * rows * c.MAX_NEW_TOKENS)
    return caches + rows * config.vocab_size * (number + 3 * FLOAT)


def update_bytes(config, c):
    """Returns the bytes of the activations and logits of one micro-batch."""
    logit_bytes = GIB / 16
    if c.GPU_GIB:
        logit_bytes = 2 ** (int(c.GPU_GIB * GIB).bit_length() - 1) // 16
    rows = logit_bytes // (FLOAT * config.vocab_size * c.MAX_NEW_TOKENS)
    rows = c.MICRO_BATCH_ROWS or max(1, min(64, c.BATCH_SIZE * c.GROUP_SIZE, rows))
    prompts = max(1, rows / c.GROUP_SIZE)
    tokens = rows * c.MAX_NEW_TOKENS + prompts * c.MAX_PROMPT_TOKENS
    number = 2 if c.DTYPE == "bfloat16" else FLOAT
    feed_forward = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    layer = tokens * number * (10 * config.hidden_size + 5 * feed_forward)
    layers = config.num_hidden_layers * layer
    if c.GRADIENT_CHECKPOINTING:
        layers = layer + config.num_hidden_layers * tokens * number * config.hidden_size
    # Log-probabilities, their gradients, and what the entropy computes again; then the embedding's gradient
    logits = 8 * rows * c.MAX_NEW_TOKENS * config.vocab_size * FLOAT
    return layers + logits + config.hidden_size * config.vocab_size * FLOAT


def estimate(trainer, c):
    """Returns {what: bytes per process}; the largest of the phases counts, beside what is always there."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    actor = empty_model(c.ACTOR_MODEL, "ACTOR_MODEL", AutoModelForCausalLM)
    config = actor.config.get_text_config()
    rows = {}
    rows["actor: weights"], rows["actor: gradients, optimizer state"] = trained_bytes(actor, c)
    if hasattr(c, "CRITIC_MODEL"):
        path = c.CRITIC_MODEL or c.ACTOR_MODEL
        critic = empty_model(path, "CRITIC_MODEL", AutoModelForTokenClassification, num_labels=1)
        rows["critic: weights"], rows["critic: gradients, optimizer state"] = trained_bytes(critic, c)
    parts = c.PROCESSES if c.SHARD == "fsdp2" else 1
    if c.KL_COEF and (c.REFERENCE_MODEL or not c.LORA_RANK):
        reference = empty_model(c.REFERENCE_MODEL or c.ACTOR_MODEL, "REFERENCE_MODEL", AutoModelForCausalLM)
        rows["reference: weights"] = FLOAT * sum(p.numel() for p in reference.parameters()) / parts
    if c.REWARD_MODEL:
        reward = empty_model(c.REWARD_MODEL, "REWARD_MODEL", AutoModelForSequenceClassification, num_labels=1)
        rows["reward model: weights"] = FLOAT * sum(p.numel() for p in reward.parameters()) / parts
    rows["Python, torch, libraries"] = PYTHON
    rollout, update = rollout_bytes(config, c), update_bytes(config, c)
    if c.SHARD == "fsdp2":  # every process holds all weights of the actor while it samples
        rollout += FLOAT * sum(p.numel() for p in actor.parameters()) * (1 - 1 / c.PROCESSES)
    rows["caches and logits of a rollout"] = rollout
    rows["activations and logits of an update"] = update
    return rows


def main():
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & set(words):
        sys.exit(__doc__)
    trainer = str(ROOT / "grpo/grpo.py")
    if "=" not in words[0]:
        trainer = words.pop(0)
        if not Path(trainer).is_file():
            stop(f"there is no trainer {trainer}")
    constants = read_constants(trainer)
    for name in ("ACTOR_MODEL", "REWARD_MODEL", "GROUP_SIZE", "SHARD", "MICRO_BATCH_ROWS"):
        if name not in constants:
            stop(
                f"{trainer} has no {name}: the estimate is of ppo/ppo.py, grpo/grpo.py, rce/rce.py and copies"
            )
    c = override(constants, words)
    rows = estimate(trainer, c)
    for name, size in rows.items():
        print(f"{name:40} {size / GIB:8.2f} GiB")
    *always, rollout, update = rows.values()
    total = sum(always) + max(rollout, update)
    note = f" of {c.GPU_GIB}" if c.GPU_GIB else " of a CPU; for a GPU give its memory, such as GPU_GIB=80"
    print(f"{'at the most, per process':40} {total / GIB:8.2f} GiB{note}")


if __name__ == "__main__":
    main()
