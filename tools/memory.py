"""Computes the memory that a set of constants takes, from the models' configs: in rollout, scoring and update
of ppo.py, grpo.py and rce.py, in the update of sft.py, reward_model.py and dpo.py.

    python tools/memory.py @recipes/ppo_gsm8k.txt [KEY=VALUE ...]    # the trainer is named in the recipe
    python tools/memory.py grpo/grpo.py DTYPE=bfloat16 ACTOR_MODEL=Qwen/Qwen2.5-0.5B-Instruct [KEY=VALUE ...]

Bytes per number: trained weights 4, their gradients 4, AdamW's moments 8. Frozen linear layers are stored in
DTYPE, other frozen weights in float32. Activations: 80 bytes per token, layer and hidden unit. What the
allocator wastes comes on top.
"""

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]


def load_constants(arguments):
    """Returns the constants of a trainer after KEY=VALUE arguments, a namespace."""
    path = arguments[0]
    if path.startswith("@"):
        path = re.search(r"python (\S+\.py) @", Path(path[1:]).read_text())[1]
    else:
        arguments = arguments[1:]
    spec = importlib.util.spec_from_file_location("trainer", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.apply_overrides(arguments)
    return SimpleNamespace(**module.constants())


def measure(name):
    """Returns the sizes of a model, from its config: numbers of parameters and widths."""
    config = transformers.AutoConfig.from_pretrained(name).get_text_config()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    layers = [x for x in model.modules() if isinstance(x, torch.nn.Linear) and x is not head]
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return SimpleNamespace(
        parameters=sum(p.numel() for p in model.parameters()),
        linear=sum(layer.weight.numel() for layer in layers),
        adapter=sum(layer.in_features + layer.out_features for layer in layers),  # per rank of LoRA
        activations=80 * config.num_hidden_layers * config.hidden_size,  # bytes per token, with a graph
        layer=80 * config.hidden_size,  # bytes per token in one layer
        cache=2 * config.num_hidden_layers * key_heads * head_size,  # numbers per token
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
    )


def memory(c):
    """Returns {phase: bytes} for constants c."""
    width = {"float32": 4, "bfloat16": 2}[c.DTYPE]
    model = measure(c.BASE_MODEL if hasattr(c, "BASE_MODEL") else c.ACTOR_MODEL)

    def frozen(sizes):
        return width * sizes.linear + 4 * (sizes.parameters - sizes.linear)

    copies = 1 + hasattr(c, "CRITIC_MODEL")
    trained = copies * model.parameters
    casts = copies * model.linear * (width % 4)  # autocast's copies of trained weights
    held = 0
    if c.LORA_RANK:
        trained = copies * c.LORA_RANK * model.adapter
        casts = 0
        held = copies * frozen(model)
    elif getattr(c, "KL_COEF", 0) > 0:
        held = frozen(model)  # the reference
    if getattr(c, "REWARD_MODEL", None):
        held += frozen(measure(c.REWARD_MODEL))
    held += 12 * trained + casts

    logits = 24 * model.vocabulary  # bytes per token of a chunk, with the backward pass
    activations = model.activations
    if c.GRADIENT_CHECKPOINTING:
        activations = 4 * model.layers * model.hidden + model.layer
    if hasattr(c, "MAX_TOKENS"):
        rows = c.BATCH_SIZE * (1 + (hasattr(c, "BASE_MODEL") or hasattr(c, "BETA")))  # a pair has two answers
        chunk = logits * getattr(c, "LOGITS_AT_ONCE", 0)
        return {"update": held + 4 * trained + rows * c.MAX_TOKENS * activations + chunk}
    tokens = c.MAX_PROMPT_TOKENS + c.MAX_NEW_TOKENS
    sampled = c.BATCH_SIZE * c.GROUP_SIZE
    scored = 4 * c.MICRO_BATCH_ROWS
    chunk = logits * c.LOGIT_CHUNK
    return {
        "rollout": held + sampled * (tokens * model.cache * width + 32 * model.vocabulary),
        "scoring": held + scored * tokens * (model.cache * width + model.layer) + chunk,
        "update": held + 4 * trained + c.MICRO_BATCH_ROWS * tokens * activations + chunk,
    }


def describe(c):
    """Returns the line that recipes give."""
    return ", ".join(f"{size / 1e9:.1f} GB in the {phase}" for phase, size in memory(c).items())


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    print(describe(load_constants(sys.argv[1:])))
