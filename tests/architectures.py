"""What the trainers do with each model type of AutoModelForCausalLM: a table that is a test.

    python tests/architectures.py                       # all of them, as Markdown
    python tests/architectures.py llama mistral+window  # these
    python tests/architectures.py --write docs/architectures.md

Each type is built tiny, with random weights large enough that attention and every state matter, and saved with the tiny
policy's tokenizer. grpo.py then samples responses to prompts of mixed lengths, scores them and takes a training step. The
oracle is a second load of the same folder that no trainer has touched: each row by itself, unpadded, without a cache or a
mask, in float32 with transformers' eager attention.

    equal      sampler, scorer and oracle agree, and the first update sees ratios of 1, with gradient checkpointing too
    refused    the trainer says in one sentence that it does not take the model
    wrong      it went on with other numbers
    traceback  it ended in an exception that is no sentence
    not built  there is no tiny model to try
"""
import argparse
import dataclasses
import inspect
import json
import math
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from conftest import ROOT, SMALL, TINY, load_script  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

TEMPERATURE = 1.3
TOLERANCE = 1e-3  # nats; what the trainer itself allows a first ratio. Rounding gives about 1e-5, a real error .1 and more
PROMPT_WORDS = (3, 7, 14, 26)
EOS_IDS = [1, 5]
LARGEST = 2_000_000  # parameters of a model called tiny

# ================================================================ tiny configs

# The value of each field that a config class has. Four layers, so that hybrid models have all kinds of theirs.
COMMON = dict(
    vocab_size=82, pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=1, max_position_embeddings=128,
    n_positions=128, n_ctx=128, max_seq_len=128, max_target_positions=128, context_length=128, model_max_length=128,
    hidden_size=32, d_model=32, n_embd=32, emb_dim=32, embedding_size=32, embedding_dim=32, word_embed_proj_dim=32,
    num_hidden_layers=4, num_layers=4, n_layer=4, n_layers=4, decoder_layers=4, encoder_layers=1, num_decoder_layers=4,
    num_encoder_layers=1,
    num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, attention_heads=4, decoder_attention_heads=4,
    encoder_attention_heads=4, num_decoder_attention_heads=4, num_encoder_attention_heads=4,
    num_key_value_heads=2, num_kv_heads=2, head_dim=8, kv_channels=8, attention_head_size=8, dim_head=8, d_head=8,
    global_head_dim=8, query_pre_attn_scalar=8, rotary_dim=4,
    intermediate_size=64, ffn_dim=64, decoder_ffn_dim=64, encoder_ffn_dim=64, ffn_hidden_size=64, d_inner=64, dff=64,
    dim_ff=64, n_inner=64, feed_forward_size=64, intermediate_size_mlp=64, dense_intermediate_size=64,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, shared_intermediate_size=16,
    shared_experts_intermediate_size=16, expert_ffn_hidden_size=16, moe_shared_expert_intermediate_size=16,
    num_experts=4, n_routed_experts=4, num_local_experts=4, moe_num_experts=4, num_experts_per_tok=2, moe_topk=2, moe_k=2,
    num_experts_per_token=2, n_group=2, topk_group=1, num_expert_group=2, first_k_dense_replace=1, num_dense_layers=1,
    kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    index_head_dim=8, index_n_heads=2, index_topk=128, max_window_layers=2,
    mamba_d_state=8, mamba_n_heads=8, mamba_d_head=8, mamba_chunk_size=8, mamba_d_ssm=64, mamba_num_heads=8, mamba_head_dim=8,
    ssm_state_size=8, state_size=8, chunk_size=8, time_step_rank=4, mamba_dt_rank=4, n_groups=2,
    linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_head_dim=8,
    linear_num_heads=4,
)
WINDOWS = "sliding_window sliding_window_size attention_window_size local_attention window_size attention_chunk_size keep_window_size".split()

# What a type needs beside COMMON
OVERRIDES = {
}

# Other configs of a type, by the name behind the plus: what is changed
VARIANTS = {
    "llama+dynamic RoPE within its length": dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)),
    "llama+dynamic RoPE beyond its length": dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0), max_position_embeddings=32),
    "llama+yarn": dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)),
    "phi3+longrope within its length": dict(original_max_position_embeddings=128, max_position_embeddings=256, rope_parameters=dict(
        rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 4.0, 6.0, 8.0],
        original_max_position_embeddings=128)),
    "phi3+longrope beyond its length": dict(original_max_position_embeddings=32, max_position_embeddings=128, rope_parameters=dict(
        rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 4.0, 6.0, 8.0],
        original_max_position_embeddings=32)),
    "mixtral+router logits": dict(output_router_logits=True),
}


def fields(config_class):
    """Names of the fields a config takes, with their defaults."""
    return {name: field.default for name, field in config_class.__dataclass_fields__.items()}


def tiny_values(config_class, overrides):
    """COMMON's values for a config's fields, sub-configs included; overrides win."""
    known = fields(config_class)
    values = {key: value for key, value in COMMON.items() if key in known or key in config_class.attribute_map}
    for alias, real in config_class.attribute_map.items():
        if alias in values and real in values:
            del values[alias]
    if "kv_lora_rank" in known and "num_key_value_heads" in values:
        values["num_key_value_heads"] = 4  # latent attention has as many as heads
    for key, sub_class in config_class.sub_configs.items():
        if sub_class is not AutoConfig:
            values[key] = tiny_values(sub_class, overrides.get(key, {}))
    for key, value in overrides.items():
        values[key] = {**values[key], **value} if isinstance(values.get(key), dict) and key in config_class.sub_configs else value
    for key, default in known.items():
        if ("drop" in key or "jitter" in key) and isinstance(default, float) and key not in overrides:
            values[key] = 0.5  # so that dropout left on in the update is seen
    return values


def tiny_config(name):
    """The config of a variant, such as "llama" or "mistral+window"."""
    kind, _, variant = name.partition("+")
    config_class = CONFIG_MAPPING[kind]
    change = dict(OVERRIDES.get(kind, {}))
    if variant == "window":
        change.update(window_change(config_class))
    elif variant:
        change.update(VARIANTS[name])
    config = config_class(**tiny_values(config_class, change))
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if kinds and "layer_types" not in change:  # the kinds of layers that the type has when it is large
        full = list(dict.fromkeys(type(text)().layer_types))
        if set(full) - set(kinds):
            text.layer_types = [full[i % len(full)] for i in range(len(kinds))]
    return config


def window_change(config_class):
    known = fields(config_class)
    change = {key: 8 for key in WINDOWS if key in known}
    if "use_sliding_window" in known:
        change["use_sliding_window"] = True
    return change


def names():
    """Every model type and its variants."""
    found = []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        found.append(kind)
        if window_change(CONFIG_MAPPING[kind]):
            found.append(f"{kind}+window")
        found += [name for name in VARIANTS if name.partition("+")[0] == kind]
    return found


# ================================================================ tiny models

@torch.no_grad()
def enlarge(model):
    """Weights whose products neither vanish nor explode: every matrix gets the standard deviation 1.5 / sqrt(inputs), biases
    and norms a random part. What does not look like a random matrix (a state's decay) keeps its own values."""
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape)
        spread = parameter.float().std() if parameter.numel() > 1 else torch.zeros(())
        if parameter.dim() < 2:
            parameter += 0.1 * noise
        elif spread == 0:
            parameter += noise * 1.5 / math.sqrt(parameter.shape[-1])
        elif parameter.float().mean().abs() < 0.5 * spread:
            parameter *= 1.5 / math.sqrt(parameter.shape[-1]) / spread


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
    AutoTokenizer.from_pretrained(TINY / "policy").save_pretrained(folder)
    return type(model).__name__


# ================================================================ the oracle

@torch.no_grad()
def load_oracle(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    model.config.use_cache = False
    return model


@torch.no_grad()
def oracle_logprobs(model, ids, prompt_length):
    """Log-probability of each response token in one row of ids, alone and unpadded, (response,)."""
    logits = model(input_ids=torch.tensor([ids])).logits[0].float() / TEMPERATURE
    said = torch.tensor(ids[prompt_length:])
    return logits[prompt_length - 1:-1].log_softmax(-1).gather(-1, said[:, None]).squeeze(-1)


def oracle_rows(batch):
    """[(ids without padding, prompt length)] of a batch."""
    rows = []
    for prompt, response, n, m in zip(batch.prompt_ids, batch.response_ids, batch.prompt_lengths, batch.response_lengths):
        rows.append((prompt[len(prompt) - n:].tolist() + response[:m].tolist(), int(n)))
    return rows


def largest(a, b):
    """Largest difference; infinite where one is not a number."""
    difference = (a - b).abs()
    return math.inf if difference.isnan().any() else difference.max().item() if len(difference) else 0.0


# ================================================================ one type

@dataclass
class Result:
    name: str
    model: str = ""
    outcome: str = "?"  # equal | refused | wrong | traceback | not built
    sampled_by: str = "?"
    scored_by: str = "?"
    error: float = 0.0  # largest, in nats
    sentence: str = ""
    errors: dict = dataclasses.field(default_factory=dict)  # by what was compared
    seconds: float = 0.0


def where(error):
    """An exception's last line and its innermost frame."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:160]
    return f"{type(error).__name__}: {text} ({'/'.join(Path(frame.filename).parts[-2:])} line {frame.lineno}, {frame.name})"


def by_position(prompts, responses, answers):
    """A reward that differs within each group, whatever the responses are."""
    return [float(i % 3) for i in range(len(responses))]


@cache
def grpo():
    """grpo.py, loaded once; each examination sets its constants."""
    return load_script("grpo/grpo.py")


def set_constants(folder, **more):
    script, data = grpo(), [{"path": f"{folder}/prompts.jsonl", "type": "jsonl", "input": "problem", "output": "solution"}]
    constants = {
        **SMALL, "GROUP_SIZE": 4, "TEMPERATURE": TEMPERATURE, "MAX_NEW_TOKENS": 24, "MAX_PROMPT_TOKENS": 48, "SEED": 1,
        "ACTOR_MODEL": str(folder), "OUTPUT_DIR": f"{folder}/run", "TRAIN_DATASETS": data, "EVAL_DATASETS": data,
        "REWARD_FUNCTIONS": [(by_position, 1.0)], "GRADIENT_CHECKPOINTING": False, **more}
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
    result, started = Result(name), time.perf_counter()
    try:
        result.model = build(name, folder)
        write_prompts(folder)
        oracle = load_oracle(folder)
    except Exception as error:
        result.outcome, result.sentence = "not built", where(error)
        return result
    script, stage = set_constants(folder), "GRPOTrainer()"
    try:
        trainer = script.GRPOTrainer()
        stage = "rollout"
        batch = trainer.rollout_and_score()
        result.sampled_by = getattr(trainer.actor, "sampled_by", "?")
        stage = "score"
        compare(result, script, trainer, batch, oracle)
        stage = "step"
        result.errors["first ratio"] = step(trainer, batch)
        if trainer.actor.supports_gradient_checkpointing:
            stage = "step with GRADIENT_CHECKPOINTING"
            trainer = set_constants(folder, GRADIENT_CHECKPOINTING=True).GRPOTrainer()
            result.errors["first ratio, checkpointing"] = step(trainer, trainer.rollout_and_score())
    except script.UserError as error:
        late = stage in ("step", "step with GRADIENT_CHECKPOINTING")
        result.outcome, result.sentence = "wrong" if late else "refused", f"{stage}: {error}" if stage != "GRPOTrainer()" else str(error)
    except Exception as error:
        result.outcome, result.sentence = "traceback", f"{stage}: {where(error)}"
    result.error = max(result.errors.values(), default=0.0)
    if result.outcome == "?":
        result.outcome = "equal" if result.error < TOLERANCE else "wrong"
    if result.outcome == "wrong" and not result.sentence:
        result.sentence = ", ".join(f"{key} {value:.2g}" for key, value in result.errors.items() if not value < TOLERANCE)
    result.seconds = time.perf_counter() - started
    return result


@torch.no_grad()
def compare(result, script, trainer, batch, oracle):
    """Sampler and scorer against the oracle, and the oracle against itself."""
    scored = torch.zeros_like(batch.logprobs)
    for rows in script.micro_batches(batch, torch.arange(len(scored)), 5):
        said = script.response_logprobs(trainer.actor, batch, rows, TEMPERATURE)[0]
        scored[rows, :said.shape[1]] = said
    result.scored_by = getattr(trainer.actor, "scored_by", "?")
    rows = oracle_rows(batch)
    true = [oracle_logprobs(oracle, ids, n) for ids, n in rows]
    for key, found in (("sampler", batch.logprobs), ("scorer", scored)):
        result.errors[key] = max(largest(row[:len(said)], said) for row, said in zip(found, true))
    result.notes = []
    ids, n = max(rows, key=lambda row: len(row[0]) - row[1])
    said = oracle_logprobs(oracle, ids, n)
    other = list(ids)
    other[max(0, n - 3)] = ids[max(0, n - 3)] % 70 + 4
    if not largest(oracle_logprobs(oracle, other, n), said) > 0.05:
        result.notes.append("the oracle does not see its prompt")
    cut = n + (len(ids) - n) // 2
    if not largest(oracle_logprobs(oracle, ids[:cut], n), said[:cut - n]) < TOLERANCE:
        result.notes.append("the oracle's numbers depend on later tokens")


def step(trainer, batch):
    """The first ratio's distance from 1 in a training step."""
    trainer.compute_advantages(batch)
    return trainer.update(batch)["ratio_max_first"]


def examine_apart(name):
    """examine() in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="architecture_"))
    try:
        return examine(name, folder)
    finally:
        shutil.rmtree(folder)


# ================================================================ the table

def row(result):
    kind, _, variant = result.name.partition("+")
    found = f"{result.error:.0e}" if result.errors and result.outcome in ("equal", "wrong") else ""
    said = "; ".join([result.sentence] * bool(result.sentence) + getattr(result, "notes", [])).replace("|", "\\|").replace("\n", " ")
    what = result.model + f", {variant}" * bool(variant)
    return f"| {kind} | {what} | {result.outcome} | {result.sampled_by} | {result.scored_by} | {found} | {said} |"


HEAD = "| model type | class, variant | outcome | sampled by | scored by | largest error (nats) | |\n|---|---|---|---|---|---|---|"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", metavar="FILE")
    words = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(HEAD, flush=True)
    results = []
    for name in words.names or names():
        results.append(examine_apart(name))
        print(row(results[-1]), flush=True)
    counts = {}
    for result in results:
        counts[result.outcome] = counts.get(result.outcome, 0) + 1
    print("\n" + ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())))


if __name__ == "__main__":
    main()
