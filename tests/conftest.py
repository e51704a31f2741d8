"""What all tests share: one thread for each, no network, and trainers as modules."""

import csv
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

# Several tests run at a time (pytest.ini): threads of theirs would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "data/tiny"
SAMPLERS = {"ppo/ppo.py": "PPOTrainer", "grpo/grpo.py": "GRPOTrainer", "rce/rce.py": "RCETrainer"}
TRAINERS = {**SAMPLERS, "ppo/sft.py": "SFTTrainer", "rce/dpo.py": "DPOTrainer"}
TRAINERS["ppo/reward_model.py"] = "RewardModelTrainer"
sys.path.insert(0, str(ROOT))

FEW = tempfile.TemporaryDirectory()


def first_lines(name, count):
    """Returns the path of a file with the first lines of data/NAME, which a trainer reads whole."""
    path = Path(FEW.name) / f"{count}_{name.replace('/', '_')}"
    lines = (ROOT / "data" / name).read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:count]))
    return str(path)


def few(name, count, **columns):
    return [{"path": first_lines(f"tiny/{name}", count), "type": "jsonl", **columns}]


PAIRS = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
TRAIN_PAIRS = {"TRAIN_DATASETS": few("pairs.jsonl", 40, **PAIRS), "MAX_STEPS": 2}
TEST_PAIRS = few("pairs_test.jsonl", 6, **PAIRS)
SOLUTIONS = {"input": "problem", "output": "solution"}
SMALL = {  # a run of seconds; rce.py has the constants in its second part only
    "all": {
        **{"BATCH_SIZE": 4, "GRADIENT_ACCUMULATION_STEPS": 1, "EVAL_EVERY_N_STEPS": 2},
        **{"SAVE_EVERY_N_STEPS": 2, "RESUME": "no"},
    },
    "samplers": {
        **{"GROUP_SIZE": 4, "MAX_NEW_TOKENS": 32, "MAX_EVAL_PROMPTS": 6, "EVAL_SAMPLES": 2},
        "TRAIN_DATASETS": few("train.jsonl", 300, **SOLUTIONS),  # to read them all takes longer than a step
        "EVAL_DATASETS": few("test.jsonl", 10, **SOLUTIONS),
    },
    "ppo/ppo.py": {"MAX_STEPS": 2},
    "grpo/grpo.py": {"MAX_STEPS": 2},
    "rce/rce.py": {"MINE_PROMPTS": 12, "ROUNDS": 1, "NUM_EPOCHS": 1, "SAMPLE_TEMPERATURES": [1.0]},
    "ppo/sft.py": {
        "TRAIN_DATASETS": few("demonstrations.jsonl", 40, **SOLUTIONS),
        "EVAL_DATASETS": few("test.jsonl", 6, **SOLUTIONS),
        "ACCURACY_FUNCTION": None,
        "MAX_STEPS": 2,
    },
    "ppo/reward_model.py": {**TRAIN_PAIRS, "EVAL_DATASETS": TEST_PAIRS},
    "rce/dpo.py": {
        **TRAIN_PAIRS,
        "EVAL_DATASETS": [{**TEST_PAIRS[0], "output": "solution"}],
        "ACCURACY_FUNCTION": None,
    },
}


def small(path, **constants):
    of_samplers = SMALL["samplers"] if path in SAMPLERS else {}
    return {**SMALL["all"], **of_samplers, **SMALL[path], **constants}


def load(path, **constants):
    """Returns a fresh module of a trainer with these constants."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in constants.items():
        assert name in module.constants(), name
        setattr(module, name, value)
    return module


def words_of(constants):
    """Returns the command-line arguments that set these constants."""
    return [f"{name}={value}" for name, value in constants.items()]


@pytest.fixture
def grpo():
    return load("grpo/grpo.py")


@pytest.fixture
def refusal(monkeypatch, capsys):
    """refusal(path, word, ...) runs a trainer that ends with exit code 2 and one line, which it returns."""

    def run(path, *words):
        monkeypatch.setattr(sys, "argv", [path, *words])
        with pytest.raises(SystemExit) as end:
            load(path).train_main()
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert end.value.code == 2 and line.startswith(f"{Path(path).name}: ")
        return line

    return run


@pytest.fixture
def make(tmp_path):
    """make("ppo/ppo.py", KEY=value) returns a small trainer, and its module as trainer.module. It draws no
    pictures, which take longer than its steps, unless draws=True."""

    def make_trainer(path, draws=False, **constants):
        constants = {"OUTPUT_DIR": str(tmp_path / "run"), **constants}
        module = load(path, **small(path, **constants))
        if not draws:
            module.draw_grid = lambda *arguments: None
        trainer = getattr(module, TRAINERS[path])()
        trainer.module = module
        return trainer

    return make_trainer


CHATML = (  # its tools and tool calls are shown
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


START, END = "<|im_start|>", "<|im_end|>"


def user(text):
    return {"role": "user", "content": text}


def bot(text, **more):
    return {"role": "assistant", "content": text, **more}


def byte_tokenizer(special, **options):
    """Returns a tokenizer with `special` tokens and then a token for each byte."""
    import tokenizers
    import transformers

    tokens = [*special, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: number for number, token in enumerate(tokens)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(special)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **options)


@pytest.fixture
def chat_policy(tmp_path):
    """chat_policy(template, ...) returns the folder of a small random policy whose tokenizer has a token for
    each byte, `special` tokens and this chat template, or these by their names."""

    def write(template=CHATML, special=()):
        import transformers

        options = {"eos_token": END, "pad_token": END, "chat_template": template}
        tokenizer = byte_tokenizer([END, START, *special], **options)
        size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        size |= {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 0}
        config = transformers.LlamaConfig(**size)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "chat_policy")
        tokenizer.save_pretrained(tmp_path / "chat_policy")
        return str(tmp_path / "chat_policy")

    return write


def write_rows(path, *records):
    """Writes a .jsonl file. Returns its path as a text."""
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def write_csv(path, head, rows):
    """Writes a .csv file with the columns that `head` names, comma between."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([head.split(","), *rows])


def spec_of(path, file_type="jsonl", **columns):
    """Returns a list of data sets, of which there is one."""
    return [{"path": str(path), "type": file_type, **columns}]


def read(path):
    """Returns the records of a .jsonl file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def without_clock(path):
    """Returns the records of metrics.jsonl without what a clock says."""
    return [{name: x for name, x in record.items() if "second" not in name} for record in read(path)]
