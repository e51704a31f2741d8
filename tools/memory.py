"""Computes the memory that a set of constants takes, from the models' configs: in rollout, scoring and update
of ppo.py, grpo.py and rce.py, in the update of sft.py, reward_model.py and dpo.py.

    python tools/memory.py @recipes/ppo_gsm8k.txt [KEY=VALUE ...]    # the trainer is named in the recipe
    python tools/memory.py grpo/grpo.py DTYPE=bfloat16 ACTOR_MODEL=Qwen/Qwen2.5-0.5B-Instruct [KEY=VALUE ...]

Bytes per number: trained weights 4, their gradients 4, AdamW's moments 8. Frozen linear layers are stored in
DTYPE, other frozen weights in float32. Activations are those of a Llama with attention "sdpa". Prompts and
responses have the largest lengths; prompts of a step are distinct. What the allocator wastes comes on top.
"""

import importlib.util
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]


def load_constants(arguments):
    """Returns the constants of a trainer after KEY=VALUE arguments, a namespace."""
    path, *words = arguments
    if path.startswith("@"):
        words = arguments
        path = re.search(r"python (\S+\.py) @", Path(path[1:]).read_text())[1]
    spec = importlib.util.spec_from_file_location("trainer", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module = getattr(module, "grpo", module)  # an example changes a trainer
    module.apply_overrides(words)
    return SimpleNamespace(**{name: getattr(module, name) for name in module.constants()})


def measure(name, width):
    """Returns the sizes of a model, from its config: numbers, but `frozen` is in bytes."""
    config = transformers.AutoConfig.from_pretrained(name).get_text_config()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    linear = [x for x in model.modules() if isinstance(x, torch.nn.Linear) and x is not head]
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    parameters = sum(p.numel() for p in model.parameters())
    return SimpleNamespace(
        parameters=parameters,
        frozen=4 * parameters - (4 - width) * sum(layer.weight.numel() for layer in linear),
        adapter=sum(layer.in_features + layer.out_features for layer in linear),  # per rank of LoRA
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        queries=config.num_attention_heads * head_size,  # numbers per token and layer
        cache=2 * key_heads * head_size,  # the same
        vocabulary=config.vocab_size,
    )


def memory(c):
    """Returns {phase: bytes} for constants c."""
    width = {"float32": 4, "bfloat16": 2}[c.DTYPE]
    model = measure(c.BASE_MODEL if hasattr(c, "BASE_MODEL") else c.ACTOR_MODEL, width)
    copies = 1 + hasattr(c, "CRITIC_MODEL")
    trained = copies * model.parameters
    held = copies * (4 * model.parameters - model.frozen)  # autocast's copies of linear layers in bfloat16
    if c.LORA_RANK:
        trained = copies * c.LORA_RANK * model.adapter
        held = copies * model.frozen
    elif getattr(c, "KL_COEF", 0) > 0:
        held += model.frozen  # the reference
    if getattr(c, "REWARD_MODEL", None):
        held += measure(c.REWARD_MODEL, width).frozen
    held += 12 * trained
    hidden, layers = model.hidden, model.layers
    # Bytes per token that a layer keeps for the backward pass; keys and values that are grouped are repeated
    kept = 16 * hidden + width * (2 * hidden + 3 * model.queries + 4 * model.intermediate)
    keys = width * (model.cache + 2 * model.queries * (model.cache < 2 * model.queries))
    sequence = kept + keys if c.GRADIENT_CHECKPOINTING else layers * (kept + keys)
    inputs = 4 * layers * hidden * c.GRADIENT_CHECKPOINTING
    join = max if c.GRADIENT_CHECKPOINTING else sum  # logits are gone when layers are computed again
    logits = (20 if getattr(c, "ENTROPY_COEF", 0) else 12) * model.vocabulary  # bytes per token
    chunk = logits * getattr(c, "LOGIT_CHUNK", getattr(c, "LOGITS_AT_ONCE", 0))
    head = 4 * model.vocabulary * hidden * (chunk > 0 and c.LORA_RANK == 0)  # its gradient in a chunk
    if hasattr(c, "MAX_TOKENS"):
        tokens = c.MAX_TOKENS * c.BATCH_SIZE * (1 + (hasattr(c, "BASE_MODEL") or hasattr(c, "BETA")))  # pairs
        return {"update": held + 4 * trained + tokens * inputs + join((tokens * sequence, chunk + head))}
    prompt, tokens = c.MAX_PROMPT_TOKENS, c.MAX_PROMPT_TOKENS + c.MAX_NEW_TOKENS
    sampled = c.BATCH_SIZE * c.GROUP_SIZE
    rows = c.MICRO_BATCH_ROWS
    scored = min(sampled, 4 * rows)
    cache = width * model.cache * tokens  # bytes per row and layer
    in_layer = scored * c.MAX_NEW_TOKENS * (8 * hidden + width * (hidden + 3 * model.intermediate))
    update = rows * tokens * (sequence + width * tokens)
    if not c.GRADIENT_CHECKPOINTING:  # prompts are read once; in them each layer keeps a mask of its own
        prompts = rows if hasattr(c, "HARD_REWARD") else math.ceil(rows / c.GROUP_SIZE)
        update = (prompts * prompt + rows * c.MAX_NEW_TOKENS) * kept + rows * tokens * keys
        update = layers * (update + width * prompts * prompt**2) + width * rows * c.MAX_NEW_TOKENS * tokens
    return {
        "rollout": held + sampled * ((layers + 1) * cache + 32 * model.vocabulary),
        "scoring": held + scored * layers * cache + max(in_layer, chunk),
        "update": held + 4 * trained + rows * tokens * inputs + join((update, chunk + head)),
    }


def describe(c):
    """Returns the line that recipes give."""
    return ", ".join(f"{size / 1e9:.1f} GB in the {phase}" for phase, size in memory(c).items())


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    print(describe(load_constants(sys.argv[1:])))
