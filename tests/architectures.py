"""What the trainers do with each model type of AutoModelForCausalLM: a table that is a test.

    python tests/architectures.py                       # all of them, as Markdown
    python tests/architectures.py llama mistral+window  # these
    python tests/architectures.py --write docs/architectures.md

Each type is built tiny, with random weights large enough that attention and every state matter, and saved
with the tiny policy's tokenizer. grpo.py then samples responses to prompts of mixed lengths, scores them and
takes a training step. The oracle is a second load of the same folder that no trainer has touched: each row by
itself, unpadded, without a cache or a mask, in float32 with transformers' eager attention.

    equal      sampler, scorer and oracle agree; the first update sees ratios of 1 and has the oracle's
               gradient, with GRADIENT_CHECKPOINTING too
    refused    the trainer says in one sentence that it does not take the model
    wrong      it sampled, scored or trained by other numbers, whether or not the first update then stopped it
    traceback  it ended in an exception that is no sentence
    not built  there is no tiny model to try
"""

import argparse
import contextlib
import copy
import dataclasses
import json
import math
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from conftest import SMALL, TINY, load_script

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers import GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TEMPERATURE = 1.3
TOLERANCE = 1e-3  # nats; what the trainer allows a first ratio. Rounding gives 1e-5, a real error .1 and more
PROMPT_WORDS = (3, 7, 14, 26)
EOS_IDS = [1, 5]
LARGEST = 8_000_000  # parameters of a model called tiny

# ================================================================ tiny configs

# The value of each field that a config class has. Four layers, so that hybrid models have all kinds of theirs
COMMON = dict(
    vocab_size=82,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=1,
    decoder_start_token_id=1,
    # sizes
    hidden_size=32,
    d_model=32,
    n_embd=32,
    emb_dim=32,
    embedding_size=32,
    embedding_dim=32,
    word_embed_proj_dim=32,
    intermediate_size=64,
    intermediate_size_mlp=64,
    dense_intermediate_size=64,
    feed_forward_size=64,
    d_inner=64,
    ffn_dim=64,
    decoder_ffn_dim=64,
    encoder_ffn_dim=64,
    ffn_hidden_size=64,
    n_inner=64,
    dff=64,
    dim_ff=64,
    num_hidden_layers=4,
    num_layers=4,
    n_layer=4,
    n_layers=4,
    decoder_layers=4,
    encoder_layers=4,
    num_decoder_layers=4,
    num_encoder_layers=4,
    max_window_layers=2,
    # the longest sequence
    max_position_embeddings=128,
    n_positions=128,
    n_ctx=128,
    max_seq_len=128,
    max_target_positions=128,
    context_length=128,
    model_max_length=128,
    # attention
    num_attention_heads=4,
    n_head=4,
    n_heads=4,
    num_heads=4,
    attention_heads=4,
    decoder_attention_heads=4,
    encoder_attention_heads=4,
    num_decoder_attention_heads=4,
    num_encoder_attention_heads=4,
    num_key_value_heads=2,
    num_kv_heads=2,
    head_dim=8,
    kv_channels=8,
    attention_head_size=8,
    dim_head=8,
    d_head=8,
    query_pre_attn_scalar=8,
    rotary_dim=4,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    index_head_dim=8,
    index_n_heads=16,
    index_topk=128,
    # experts
    num_experts=4,
    n_routed_experts=4,
    num_local_experts=4,
    moe_num_experts=4,
    first_k_dense_replace=1,
    num_experts_per_tok=2,
    num_experts_per_token=2,
    moe_topk=2,
    moe_k=2,
    num_dense_layers=1,
    n_group=2,
    num_expert_group=2,
    topk_group=1,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    shared_intermediate_size=16,
    shared_experts_intermediate_size=16,
    expert_ffn_hidden_size=16,
    moe_shared_expert_intermediate_size=16,
    # states
    mamba_d_state=8,
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_d_ssm=64,
    mamba_num_heads=8,
    mamba_head_dim=8,
    mamba_chunk_size=8,
    mamba_dt_rank=4,
    time_step_rank=4,
    ssm_state_size=8,
    state_size=8,
    chunk_size=8,
    n_groups=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_head_dim=8,
    linear_num_heads=4,
)
WINDOWS = [
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "local_attention",
    "window_size",
    "attention_chunk_size",
    "keep_window_size",
]

# What a type needs beside COMMON
MIXED = ["linear_attention", "full_attention"] * 2
SLIDING = ["sliding_attention", "full_attention"] * 2
OVERRIDES = {
    "bamba": dict(attn_layer_indices=[1, 3]),
    "big_bird": dict(attention_type="original_full"),
    "bigbird_pegasus": dict(attention_type="original_full"),
    "blt": dict(
        cross_attn_k=1,
        encoder_hash_byte_group_size=[3, 4],
        encoder_hash_byte_group_vocab=50,
        encoder_config=dict(hidden_size_global=32, cross_attn_k=1),
        decoder_config=dict(hidden_size_global=32, cross_attn_k=1),
    ),
    "cohere": dict(logit_scale=1.0),
    "cohere2": dict(logit_scale=1.0),
    "cohere_compass_text": dict(
        layer_types=SLIDING,
        rope_parameters={
            kind: dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]) for kind in SLIDING
        },
    ),
    "dbrx": dict(
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
        ffn_config=dict(moe_top_k=2),
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8),
    ),
    "deepseek_v2": dict(topk_method="group_limited_greedy"),
    "diffllama": dict(attention_dropout=0.0),  # it refuses another
    "dots1": dict(n_shared_experts=1),
    "dots3_note_text": dict(
        swa_num_attention_heads=2,
        swa_num_key_value_heads=2,
        swa_q_lora_rank=16,
        swa_kv_lora_rank=16,
        swa_head_dim=16,
        swa_qk_nope_head_dim=8,
        swa_v_head_dim=8,
        head_dim=16,
        n_group=1,
    ),
    "gemma3n_text": dict(
        layer_types=SLIDING,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=82,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "gemma4_text": dict(
        layer_types=SLIDING,
        num_kv_shared_layers=1,
        vocab_size_per_layer_input=82,
        hidden_size_per_layer_input=8,
        global_head_dim=8,
    ),
    "gemma4_unified_text": dict(global_head_dim=8, layer_types=SLIDING),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]]),
    "granitemoehybrid": dict(layer_types=MIXED),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "laguna": dict(layer_types=SLIDING),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "mamba2": dict(num_heads=8, head_dim=8),
    "mellum": dict(layer_types=SLIDING),
    "minicpm3": dict(dim_model_base=32),
    "qwen4_exp_text": dict(
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=128,
        indexer_compress_ratio=4,
    ),
    "reformer": dict(
        is_decoder=True,
        attn_layers=["local", "lsh"] * 2,
        axial_pos_shape=[8, 16],
        axial_pos_embds_dim=[16, 16],
        local_attn_chunk_length=8,
        lsh_attn_chunk_length=8,
        num_buckets=4,
    ),
    "roc_bert": dict(
        pronunciation_vocab_size=20, shape_vocab_size=20, pronunciation_embed_dim=16, shape_embed_dim=16
    ),
    "xlstm": dict(hidden_size=64, embedding_dim=64, num_heads=2, qk_dim_factor=1.0),
    "xmod": dict(default_language="en_XX"),
    "zamba": dict(
        num_hidden_layers=6,
        layers_block_type=["linear_attention", "linear_attention", "hybrid"] * 2,
        num_key_value_heads=4,
        attention_head_dim=16,
    ),
    "zamba2": dict(
        layers_block_type=["linear_attention", "hybrid"] * 2, num_key_value_heads=4, n_mamba_heads=4
    ),
    "zaya": dict(num_experts_per_tok=1),
}
OVERRIDES["dots3_note"] = dict(
    text_config=OVERRIDES["dots3_note_text"],
    audio_config=dict(adapter_input_size=32, adapter_out_dim=32),
    vision_config=dict(pyramid_num_routed=[-1] * 4, adapter_in_dim=32, adapter_out_dim=32),
)
OVERRIDES["gemma4_unified"] = dict(
    text_config=OVERRIDES["gemma4_unified_text"],
    vision_config=dict(mm_embed_dim=32, mm_posemb_size=16, output_proj_dims=32),
)
OVERRIDES["gemma4"] = dict(text_config=OVERRIDES["gemma4_text"])
OVERRIDES["qwen4_exp"] = dict(text_config=OVERRIDES["qwen4_exp_text"])

NOT_BUILT = {
    "gemma3n": "its vision tower needs the package timm; gemma3n_text is its language model",
    "gemma4_assistant": "it drafts from another model's hidden states and has no input of its own",
    "gemma4_unified_assistant": "it drafts from another model's hidden states and has no input of its own",
    "musicgen": "it writes codes of sound, several at a time, from an encoder's output",
    "musicgen_melody": "it writes codes of sound, several at a time, from an encoder's output",
}

# Windows and sparse keys that a plain forward pass of a short row does not read (moshi's cache alone keeps
# one), or that give a weight its shape
NOT_SEEN = [
    "moshi+window",
    "nemotron_h+window",
    "zaya+window",
    "deepseek_v4+sparse",
    "inkling_text+window",
    "inkling2_text+window",
]

# Other configs of a type, by the name behind the plus: what is changed
LONGROPE = dict(
    rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 4.0, 6.0, 8.0]
)
VARIANTS = {
    "llama+dynamic RoPE within its length": dict(
        rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
    ),
    "llama+dynamic RoPE beyond its length": dict(
        max_position_embeddings=32, rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
    ),
    "llama+yarn": dict(
        rope_parameters=dict(
            rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32
        )
    ),
    "phi3+longrope within its length": dict(
        original_max_position_embeddings=128,
        max_position_embeddings=256,
        rope_parameters=dict(**LONGROPE, original_max_position_embeddings=128),
    ),
    "phi3+longrope beyond its length": dict(
        original_max_position_embeddings=32,
        max_position_embeddings=128,
        rope_parameters=dict(**LONGROPE, original_max_position_embeddings=32),
    ),
    "mixtral+router logits": dict(output_router_logits=True),
    "xlm+causal": dict(causal=True),
    "falcon+alibi": dict(alibi=True),
    "falcon+new decoder": dict(new_decoder_architecture=True),
    "deepseek_v2+greedy": dict(topk_method="greedy"),
}


def fields(config_class):
    """Names of the fields a config takes, with their defaults."""
    return {name: field.default for name, field in config_class.__dataclass_fields__.items()}


def tiny_values(config_class, overrides):
    """COMMON's values for a config's fields, sub-configs included; overrides win."""
    known = fields(config_class)
    aliases = config_class.attribute_map
    values = {key: value for key, value in COMMON.items() if key in known or key in aliases}
    for alias, real in aliases.items():
        if alias in values and real in values:
            del values[alias]
    if "kv_lora_rank" in known and "num_key_value_heads" in values:
        values["num_key_value_heads"] = 4  # latent attention has as many as heads
    for key, sub_class in config_class.sub_configs.items():
        spec = config_class.sub_configs_defaults.get(key)
        change = overrides.get(key, {})
        if sub_class is not AutoConfig:
            values[key] = tiny_values(sub_class, change)
        elif kind := change.get("model_type", getattr(spec, "model_type", None)):
            values[key] = {"model_type": kind, **tiny_values(CONFIG_MAPPING[kind], change)}
    values.update({key: value for key, value in overrides.items() if key not in config_class.sub_configs})
    values.pop("model_type", None)
    for key, default in known.items():
        if ("drop" in key or "jitter" in key) and isinstance(default, float) and key not in overrides:
            values[key] = 0.5  # so that dropout left on in the update is seen
    return values


def tiny_config(name):
    """The config of a variant, such as "llama" or "mistral+window"."""
    kind, _, variant = name.partition("+")
    config_class = CONFIG_MAPPING[kind]
    change = dict(OVERRIDES.get(kind, {}))
    if variant:
        change.update(variants(kind)[variant])
    config = config_class(**tiny_values(config_class, change))
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if kinds and "layer_types" not in change:  # the kinds of layers that the type has when it is large
        full = list(dict.fromkeys(type(text)().layer_types))
        if set(full) - set(kinds) and "layer_types" in fields(type(text)):
            text.layer_types = [full[i % len(full)] for i in range(len(kinds))]
    return config


def variants(kind):
    """What changes in each variant of a model type, by its name."""
    known = fields(CONFIG_MAPPING[kind])
    found = {}
    if window := {key: 8 for key in WINDOWS if key in known}:
        found["window"] = window
        if "use_sliding_window" in known:
            window["use_sliding_window"] = True
    if "index_topk" in known:
        found["sparse"] = {"index_topk": 8}
    if "is_decoder" in known and "hidden_dropout_prob" in known and kind != "reformer":
        found["decoder"] = {"is_decoder": True}
    for name, change in VARIANTS.items():
        if name.startswith(f"{kind}+"):
            found[name.partition("+")[2]] = change
    return found


def names():
    """Every model type, each followed by its variants."""
    found = []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        found += [kind, *(f"{kind}+{variant}" for variant in variants(kind))]
    return found


# ================================================================ tiny models


@torch.no_grad()
def enlarge(model):
    """Weights whose products neither vanish nor explode: every matrix gets the standard deviation
    1.5 / sqrt(inputs), biases and norms a random part. What does not look like a random matrix (a state's
    decay) keeps its own values."""
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape)
        spread = parameter.float().std() if parameter.numel() > 1 else torch.zeros(())
        wanted = 1.5 / math.sqrt(parameter.shape[-1]) if parameter.dim() else 0.0
        if parameter.dim() < 2:
            parameter += 0.1 * noise
        elif spread == 0:
            parameter += wanted * noise
        elif parameter.float().mean().abs() < 0.5 * spread:
            parameter *= wanted / spread
    for module in model.modules():
        # Gemma 3n takes the root of an embedding's size, which has no gradient where a pad's is zero
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx].normal_(0, 0.1)


def build(name, folder):
    """Save a tiny model of that type with the tiny policy's tokenizer; returns its class's name."""
    config = tiny_config(name)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count:,} parameters are not tiny")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    enlarge(model)
    model.generation_config = GenerationConfig(eos_token_id=EOS_IDS, pad_token_id=0)
    model.save_pretrained(folder)
    if model.config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        # A text model without an Auto class: its checkpoints have the whole model's config
        config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY / "policy").save_pretrained(folder)
    return type(model).__name__


# ================================================================ the oracle


def load_oracle(folder):
    """The model with eager attention, or with its default where the two disagree; a remark on that."""
    eager, default = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
        for options in ({"attn_implementation": "eager"}, {})
    )
    for model in (eager, default):
        model.config.use_cache = False
    ids = [7 + 11 * i % 70 for i in range(40)]
    with torch.no_grad():
        if largest(oracle_logprobs(eager, ids, 1), oracle_logprobs(default, ids, 1)) < TOLERANCE:
            return eager, ""
    return default, "transformers' eager attention gives other numbers than its default, compared here"


def oracle_logprobs(model, ids, prompt_length):
    """Log-probability of each response token in one row of ids, alone and unpadded, (response,)."""
    logits = model(input_ids=torch.tensor([ids])).logits[0].float() / TEMPERATURE
    said = torch.tensor(ids[prompt_length:])
    return logits[prompt_length - 1 : -1].log_softmax(-1).gather(-1, said[:, None]).squeeze(-1)


def oracle_rows(batch):
    """[(ids without padding, prompt length)] of a batch."""
    return [(prompt + response, len(prompt)) for prompt, response, _ in batch.sequences]


def largest(a, b):
    """Largest difference; infinite where one is not a number."""
    difference = (a - b).abs()
    return math.inf if difference.isnan().any() else difference.max().item() if len(difference) else 0.0


def relative(a, b):
    return abs(a / b - 1) if math.isfinite(a) and b else math.inf


# ================================================================ one type


@dataclass
class Result:
    name: str
    model: str = ""
    outcome: str = "?"  # equal | refused | wrong | traceback | not built
    decoding: str = "?"  # shared | rows
    scoring: str = "?"  # shared | rows
    error: float = 0.0  # largest, in nats
    sentence: str = ""
    errors: dict = dataclasses.field(default_factory=dict)  # by what was compared
    notes: list = dataclasses.field(default_factory=list)  # what makes the comparison doubtful
    remark: str = ""
    seconds: float = 0.0


def where(error):
    """An exception's last line, its innermost frame and the innermost in grpo.py."""
    frames = traceback.extract_tb(error.__traceback__)
    shown = [frame for frame in frames[:-1] if frame.filename.endswith("grpo.py")][-1:] + frames[-1:]
    places = []
    for frame in shown:
        file = "/".join(Path(frame.filename).parts[-2:])
        places.append(f"{file} line {frame.lineno}, {frame.name}")
    text = " ".join(str(error).split())[:160]
    return f"{type(error).__name__}: {text} ({'; '.join(places)})"


def by_position(prompts, responses, answers):
    """A reward that differs within each group, whatever the responses are."""
    return [float(i % 3) for i in range(len(responses))]


@cache
def grpo():
    """grpo.py, loaded once; each examination sets its constants."""
    return load_script("grpo/grpo.py")


def set_constants(folder, **more):
    script = grpo()
    data = [{"path": f"{folder}/prompts.jsonl", "type": "jsonl", "input": "problem", "output": "solution"}]
    constants = {
        **SMALL,
        "ACTOR_MODEL": str(folder),
        "OUTPUT_DIR": f"{folder}/run",
        "SEED": 1,
        "TRAIN_DATASETS": data,
        "EVAL_DATASETS": data,
        "REWARD_FUNCTIONS": [(by_position, 1.0)],
        "GROUP_SIZE": 4,
        "TEMPERATURE": TEMPERATURE,
        "MAX_NEW_TOKENS": 24,
        "MAX_PROMPT_TOKENS": 48,
        "GRADIENT_CHECKPOINTING": False,
        **more,
    }
    for key, value in constants.items():
        assert key in script.constants(), key
        setattr(script, key, value)
    return script


def write_prompts(folder):
    """Prompts of mixed lengths."""
    rows = [json.loads(line) for line in open(TINY / "test.jsonl")]
    long = [row["problem"].split() for row in rows if len(row["problem"].split()) >= max(PROMPT_WORDS)]
    with open(f"{folder}/prompts.jsonl", "w") as file:
        for words, count in zip(long, PROMPT_WORDS):
            file.write(json.dumps({"problem": " ".join(words[:count]), "solution": "1"}) + "\n")


def examine(name, folder):
    """Build a type in an empty folder and see what the trainer does with it."""
    result = Result(name)
    started = time.perf_counter()
    if why := NOT_BUILT.get(name.partition("+")[0]):
        result.outcome = "not built"
        result.sentence = why
        return result
    try:
        result.model = build(name, folder)
        write_prompts(folder)
        oracle, result.remark = load_oracle(folder)
    except Exception as error:
        result.outcome = "not built"
        result.sentence = where(error)
        return result
    script = set_constants(folder)
    stage = "GRPOTrainer()"
    try:
        trainer = script.GRPOTrainer()
        stage = "rollout"
        batch = trainer.rollout_and_score()
        result.decoding = "shared" if trainer.actor in script._SHARED_DECODING else "rows"
        result.scoring = "shared" if trainer.actor in script._SHARED_SCORING else "rows"
        stage = "score"
        compare(result, script, trainer, batch, oracle)
        stage = "step"
        result.errors["first ratio"], norm = step(trainer, batch)
        true_norm = oracle_gradient(oracle, batch)
        result.errors["gradient"] = relative(norm, true_norm)
        if trainer.actor.supports_gradient_checkpointing:
            stage = "step with GRADIENT_CHECKPOINTING"
            trainer = set_constants(folder, GRADIENT_CHECKPOINTING=True).GRPOTrainer()
            result.errors["first ratio, checkpointing"], norm = step(trainer, trainer.rollout_and_score())
            result.errors["gradient, checkpointing"] = relative(norm, true_norm)
    except script.UserError as error:
        result.outcome = "wrong" if stage.startswith("step") else "refused"
        result.sentence = str(error) if stage == "GRPOTrainer()" else f"{stage}: {error}"
    except Exception as error:
        result.outcome = "traceback"
        result.sentence = f"{stage}: {where(error)}"
    result.error = max(result.errors.values(), default=0.0)
    if result.outcome == "?":
        result.outcome = "equal" if result.error < TOLERANCE else "wrong"
    if result.outcome == "wrong":
        off = ", ".join(f"{key} {value:.2g}" for key, value in result.errors.items() if not value < TOLERANCE)
        result.sentence = "; ".join(filter(None, (off, result.sentence)))
    result.seconds = time.perf_counter() - started
    return result


@torch.no_grad()
def compare(result, script, trainer, batch, oracle):
    """Sampler and scorer against the oracle, and the oracle against itself."""
    scored = torch.zeros_like(batch.logprobs)
    for rows in torch.arange(len(scored)).split(5):
        said = script.response_logprobs(trainer.actor, batch, rows, TEMPERATURE)[0]
        scored[rows, : said.shape[1]] = said
    rows = oracle_rows(batch)
    fresh = copy.deepcopy  # a RoPE that grows with the longest row would remember it
    true = [oracle_logprobs(fresh(oracle), ids, n) for ids, n in rows]
    for key, found in (("sampler", batch.logprobs), ("scorer", scored)):
        result.errors[key] = max(largest(row[: len(said)], said) for row, said in zip(found, true))
    early = [oracle_logprobs(fresh(oracle), ids[: n + 1], n) for ids, n in rows]
    if not max(largest(a, b[:1]) for a, b in zip(early, true)) < TOLERANCE:
        result.notes.append("the oracle's numbers depend on later tokens")
    widest = max(range(len(rows)), key=lambda i: len(true[i]))
    ids, n = rows[widest]
    other = [token % 70 + 4 for token in ids[: n - 2]] + ids[n - 2 :]
    if not largest(oracle_logprobs(oracle, other, n), true[widest]) > 0.05:
        result.notes.append("the oracle does not see its prompt")
    kind, _, variant = result.name.partition("+")
    if variant in ("window", "sparse") and result.name not in NOT_SEEN:
        plain = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32).eval()
        plain.load_state_dict(oracle.state_dict())
        if not largest(oracle_logprobs(plain, ids, n), true[widest]) > 0.05:
            result.notes.append(f"the {variant} changes nothing")


def step(trainer, batch):
    """The first ratio's distance from 1 in a training step, and its gradient's norm."""
    trainer.compute_advantages(batch)
    metrics = trainer.update(batch)
    return metrics["first_ratio_deviation"], metrics["grad_norm"]


def oracle_gradient(oracle, batch):
    """The norm of what the step's gradient should be, that of minus the mean over the tokens of advantage
    times log-probability."""
    tokens = batch.response_mask.sum().item()
    for (ids, n), advantage in zip(oracle_rows(batch), batch.advantages.tolist()):
        if advantage:
            (-advantage / tokens * oracle_logprobs(oracle, ids, n).sum()).backward()
    gradients = [p.grad for p in oracle.parameters() if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).item()


def examine_apart(name):
    """examine() in a folder of its own, which no sentence names."""
    parent = tempfile.mkdtemp(prefix="architecture_")
    try:
        folder = Path(parent) / name.partition("+")[0]
        folder.mkdir()
        result = examine(name, folder)
        result.sentence = result.sentence.replace(f"{parent}/", "")
        return result
    finally:
        shutil.rmtree(parent)


# ================================================================ the table


def row(result):
    kind, _, variant = result.name.partition("+")
    found = f"{result.error:.0e}" if result.errors and result.outcome in ("equal", "wrong") else ""
    said = " ".join("; ".join(filter(None, (result.sentence, result.remark, *result.notes))).split())
    said = said.replace("|", "\\|")
    what = result.model + f", {variant}" * bool(variant)
    cells = kind, what, result.outcome, result.decoding, result.scoring, found, said
    return f"| {' | '.join(cells)} |"


HEAD = """| model type | class, variant | outcome | decoding | scoring | largest error (nats) | |
|---|---|---|---|---|---|---|"""


WRITTEN = """# Which architectures work

| | model types |
|---|---|
| work | `llama` (Llama 2 and 3), `mistral`, `ministral`, `mixtral`, `qwen2` (Qwen2 and 2.5), `qwen2_moe`, `qwen3`, `qwen3_moe`, `qwen3_next`, `qwen3_5_text`, `gemma`, `gemma2`, `gemma3_text`, `gemma4_text`, `phi`, `phi3` (Phi 3 and 4), `phimoe`, `smollm3`, `olmo`, `olmo2`, `olmo3`, `olmoe`, `granite`, `glm`, `glm4`, `deepseek_v2`, `deepseek_v3`, `gpt_oss`, `cohere`, `cohere2`, `exaone4`, `ernie4_5`, `lfm2`, `falcon`, `falcon_h1`, `starcoder2`, `stablelm`, `gpt2`, `gpt_neox`, `opt`, `bloom`, `mamba2`, `hunyuan_v1_dense` |
| are refused with a message | `bart`, `mamba`, `falcon_mamba`, `rwkv`, `recurrent_gemma`, `nemotron_h`, `zamba2`, `xlstm`, `deepseek_v4`, `roberta`; `bert` unless it is built as a decoder |

`"model_type"` in a model's `config.json` is its type. PPO also needs a token classification class for the critic: Gemma 3 and OLMo 2
have none.

## How it was found

`python tests/architectures.py --write docs/architectures.md` wrote this page with transformers {version}. It builds
every model type of AutoModelForCausalLM tiny, with random weights, samples from it, scores it and trains one step with
grpo/grpo.py in float32. It compares with a plain forward pass of each row alone. {summary}.
ppo.py, grpo.py, rce.py and grpo_rec.py share this code. The tests try a dozen types;
`python -m pytest -m sweep tests/test_architectures.py` tries all. A row is about text: no image or sound was put in.

- shared: rows of a prompt share its keys while decoding, its pass while scoring; rows: each has its own
- equal: sampler, scorer and plain pass agree to {tolerance} nats, the first step's ratios are 1, and its
  gradient is that of the plain pass, also with GRADIENT_CHECKPOINTING if the model has it
- refused: the trainer ends with the message shown
- wrong: it sampled, scored or trained with other numbers, whether or not the first update then stopped it
- traceback: it ended without a message
- not built: there was no tiny model to try, for the reason shown

## Every type
"""  # noqa: E501


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", metavar="FILE")
    words = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(HEAD, flush=True)
    results = []
    for name in words.names or names():
        with contextlib.redirect_stdout(sys.stderr):  # the trainer's own lines
            results.append(examine_apart(name))
        print(row(results[-1]), flush=True)
    counts = Counter(result.outcome for result in results)
    built = {result.name.partition("+")[0] for result in results if result.outcome != "not built"}
    summary = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
    summary += f", {len(built)} model types built"
    print(f"\n{summary}")
    if words.write:
        text = WRITTEN.format(version=transformers.__version__, summary=summary, tolerance=TOLERANCE)
        Path(words.write).write_text("\n".join([text, HEAD, *map(row, results), ""]))
    sys.exit(int(bool({"wrong", "traceback"} & set(counts))))


if __name__ == "__main__":
    main()
