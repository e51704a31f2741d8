"""Arguments, constants, messages and exit codes, as a user meets them."""

import functools
import math
import subprocess
import sys

import pytest
from conftest import ROOT, SAMPLERS, TINY, TRAINERS, load, small, words_of
from program import Program

PATHS = list(SAMPLERS)


def run(path, *words, **environment):
    """Runs a trainer without a terminal, and with the small constants unless `words` say otherwise."""
    constants = {"MAX_NEW_TOKENS": 16, **small(path)}
    return Program(ROOT / path, *words_of(constants), *words, cwd=ROOT, environment=environment).wait()


def test_an_argument_has_the_type_of_its_constant(grpo, monkeypatch):
    words = ["LEARNING_RATE=1", "MAX_STEPS=None", "GROUP_SIZE=3", "ACTOR_MODEL=12", "USE_WANDB=True"]
    words += ["REWARD_FUNCTIONS=[('last_number', 0.5)]", "OUTPUT_DIR=~/run", "CLIP_RANGE_HIGH=0.3"]
    monkeypatch.setenv("HOME", "/home/someone")
    grpo.apply_overrides(words)
    values = (grpo.LEARNING_RATE, grpo.MAX_STEPS, grpo.GROUP_SIZE, grpo.ACTOR_MODEL, grpo.USE_WANDB)
    assert values == (1.0, None, 3, "12", True) and type(grpo.LEARNING_RATE) is float
    assert grpo.REWARD_FUNCTIONS == [("last_number", 0.5)] and grpo.OUTPUT_DIR == "/home/someone/run"
    assert grpo.CLIP_RANGE_HIGH == 0.3


def test_a_file_holds_arguments(grpo, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    file = tmp_path / "recipe.txt"
    file.write_text("# a recipe\n\n GROUP_SIZE=16\nPROMPT_TEMPLATE=Sum: {input}\\n= ?\nOUTPUT_DIR=~/run\n")
    grpo.apply_overrides([f"@{file}", "GROUP_SIZE=4"])
    assert (grpo.GROUP_SIZE, grpo.PROMPT_TEMPLATE) == (4, "Sum: {input}\n= ?")
    assert grpo.OUTPUT_DIR == "/home/someone/run"


def test_constants_describe_functions_and_objects_alike_in_every_process(grpo):
    grpo.REWARD_FUNCTIONS = [(functools.partial(load, path="x"), 1.0), (object(), 0.5)]
    assert grpo.constants()["REWARD_FUNCTIONS"] == [["load", 1.0], ["<object object>", 0.5]]
    assert math.isinf(load("grpo/grpo.py", MAX_GRAD_NORM=math.inf).constants()["MAX_GRAD_NORM"])
    load("grpo/grpo.py", MAX_GRAD_NORM=math.inf).check_constants()


LINES = {
    "OUTPUT_DIR=runs/x  # my run": ("OUTPUT_DIR", "runs/x"),
    "OUTPUT_DIR='runs/# 1'  # it's mine": ("OUTPUT_DIR", "runs/# 1"),
    'PROMPT_TEMPLATE="{input} Answer: "': ("PROMPT_TEMPLATE", "{input} Answer: "),
    "PROMPT_TEMPLATE={input} é": ("PROMPT_TEMPLATE", "{input} é"),
    "REWARD_FUNCTIONS=[('em', 0.5)]  # half": ("REWARD_FUNCTIONS", [("em", 0.5)]),
    "LEARNING_RATE = 1e-5 # small": ("LEARNING_RATE", 1e-5),
    "PROMPT_TEMPLATE={input} End with #### and a number": (
        *("PROMPT_TEMPLATE", "{input} End with #### and a number"),
    ),
    r"PROMPT_TEMPLATE={input}\nAnswer:\n": ("PROMPT_TEMPLATE", "{input}\nAnswer:\n"),
    r"PROMPT_TEMPLATE={input} where $x \\neq 0$ in \boxed{}": (
        *("PROMPT_TEMPLATE", r"{input} where $x \neq 0$ in \boxed{}"),
    ),
    r"PROMPT_TEMPLATE={input}\nnote \\n": ("PROMPT_TEMPLATE", "{input}\nnote \\n"),
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_a_file_of_constants(grpo, tmp_path, line):
    name, value = LINES[line]
    (tmp_path / "recipe.txt").write_text("\ufeff# a recipe\n" + line + "\n", encoding="utf-8")
    grpo.apply_overrides([f"@{tmp_path}/recipe.txt"])
    assert getattr(grpo, name) == value


WRONG = {"GROUPSIZE=4": "GROUP_SIZE", "learning_rate=1": "LEARNING_RATE", "GROUP_SIZE=2.5": "GROUP_SIZE"}
WRONG |= {"GROUP_SIZE=two": "GROUP_SIZE", "USE_WANDB=yes": "USE_WANDB", "MAX_STEPS=": "MAX_STEPS"}
WRONG |= {"--help-me": "KEY=VALUE"}


@pytest.mark.parametrize("word, message", WRONG.items())
def test_a_wrong_argument_is_named(grpo, word, message):
    with pytest.raises(ValueError, match=message):
        grpo.apply_overrides([word])


@pytest.mark.parametrize(
    "path, constants",
    [
        ("grpo/grpo.py", {"LOSS_TYPE": "grop"}),
        ("grpo/grpo.py", {"KL_ESTIMATOR": "k1"}),
        ("grpo/grpo.py", {"SCALE_REWARDS": "std"}),
        ("grpo/grpo.py", {"GROUP_SIZE": 1}),
        ("grpo/grpo.py", {"REFERENCE_SYNC_STEPS": 5}),
        ("ppo/ppo.py", {"KL_TARGET": 0.1, "KL_COEF": 0.0}),
        ("ppo/ppo.py", {"LAM": 1.5}),
        *((path, {"DTYPE": "float16"}) for path in TRAINERS),
        *((path, {"TEMPERATURE": 0.0}) for path in [*PATHS, "ppo/sft.py", "rce/dpo.py"]),
        *((path, {"MAX_GRAD_NORM": 0.0}) for path in TRAINERS),
        *((path, {"LR_SCHEDULER_TYPE": "constant"}) for path in TRAINERS),
        *((path, {"PROMPT_TEMPLATE": "Question:"}) for path in TRAINERS),
        *((path, {"REWARD_FUNCTIONS": [], "REWARD_MODEL": None}) for path in PATHS[:2]),
        *((path, {"TRAIN_DATASETS": []}) for path in TRAINERS),
        *((path, {"CLIP_RANGE_HIGH": 0.0}) for path in PATHS[:2]),
        ("rce/rce.py", {"TAU_END": 0.0}),
        ("rce/dpo.py", {"LOSS_TYPE": "kto"}),
        ("rce/dpo.py", {"BETA": 0.0}),
        *(("rce/dpo.py", {"LABEL_SMOOTHING": x}) for x in (0.5, -0.1)),
        ("rce/dpo.py", {"LABEL_SMOOTHING": 0.1, "LOSS_TYPE": "ipo"}),
        ("rce/rce.py", {"REWARD_MODE": "hard"}),
        ("rce/rce.py", {"ANSWER_FORM": "####"}),
        ("grpo/grpo.py", {"REFERENCE_MODEL": "data/tiny/policy"}),
    ],
)
def test_a_constant_that_would_be_silently_wrong_is_refused(path, constants):
    module = load(path, **constants)
    name = next(iter(constants))
    with pytest.raises(ValueError, match="reward function" if name == "REWARD_FUNCTIONS" else name):
        module.check_constants()


SYSTEMS = ("grpo/grpo_rec.py", "ppo/ppo_rag.py", "rce/rce_icl.py")
NUMBERS = [(path, "KEEP_LAST_N_CHECKPOINTS", 0) for path in (*TRAINERS, *SYSTEMS)]
NUMBERS += [(path, "LEARNING_RATE", x) for path in (*TRAINERS, *SYSTEMS) for x in (-1e-4, math.nan)]
NUMBERS += [(path, "MAX_STEPS", 0) for path in TRAINERS] + [(path, "LORA_RANK", -1) for path in TRAINERS]
NUMBERS += [(path, "SAVE_EVERY_N_STEPS", -1) for path in TRAINERS]
NUMBERS += [("ppo/ppo.py", name, 0) for name in ("GROUP_SIZE", "GROUP_EPOCHS", "MINI_BATCHES", "KL_HORIZON")]
NUMBERS += [("grpo/grpo.py", "SEED", 10**20), ("grpo/grpo.py", "KL_COEF", -0.1), ("rce/rce.py", "ROUNDS", 0)]
NUMBERS += [(path, name, 0) for path in PATHS for name in ("EVAL_SAMPLES", "MAX_NEW_TOKENS", "NUM_EPOCHS")]


@pytest.mark.parametrize("path, name, value", NUMBERS)
def test_a_number_that_is_negative_or_that_makes_an_empty_run_is_refused(path, name, value):
    module = load(path, **{name: value})
    with pytest.raises(ValueError, match=name):
        module.check_constants()


SAMPLER, PAIRS = "grpo/grpo.py", "rce/dpo.py"
NO_FILE = "TRAIN_DATASETS=[{'path': 'no.jsonl', 'type': 'jsonl', 'input': 'x'}]"
NO_COLUMN = f"TRAIN_DATASETS=[{{'path': '{TINY}/pairs.jsonl', 'type': 'jsonl', 'prompt': 'q'}}]"


@pytest.mark.parametrize(
    "path, word, named",
    [
        (SAMPLER, "ACTOR_MODEL=no/such/model", "no/such/model"),
        (SAMPLER, "ACTOR_MODEL=data/tiny/pairs.jsonl", "data/tiny/pairs.jsonl"),
        (SAMPLER, "RESUME=no/such/run", "no/such/run"),
        (SAMPLER, "@no_such_file", "no_such_file"),
        (SAMPLER, "REWARD_FUNCTIONS=[('exakt_answer', 1.0)]", "exakt_answer"),
        (SAMPLER, "REWARD_FUNCTIONS=['exact_answer']", "exact_answer"),
        (SAMPLER, NO_FILE, "no.jsonl"),
        (SAMPLER, "DEVICE=cuda", "CUDA"),
        (PAIRS, NO_FILE, "no.jsonl"),
        (PAIRS, NO_COLUMN, "'prompt': 'q'"),
        (PAIRS, "ACTOR_MODEL=nowhere", "ACTOR_MODEL=nowhere"),
        ("ppo/sft.py", "ACTOR_MODEL=nowhere", "ACTOR_MODEL=nowhere"),
        ("ppo/reward_model.py", "BASE_MODEL=nowhere", "BASE_MODEL=nowhere"),
    ],
)
def test_what_a_user_gets_wrong_ends_with_one_line_and_exit_code_2(tmp_path, refusal, path, word, named):
    assert named in refusal(path, *words_of(small(path, OUTPUT_DIR=tmp_path / "run")), word)


def test_a_fault_in_a_users_reward_function_keeps_its_traceback(tmp_path):
    program = tmp_path / "mine.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'grpo')!r})\nimport grpo\n"
        "def mine(prompts, responses, answers):\n    return [1 / 0]\n"
        "grpo.REWARD_FUNCTIONS = [(mine, 1.0)]\ngrpo.train_main()\n"
    )
    words = words_of(small("grpo/grpo.py", OUTPUT_DIR=tmp_path / "run"))
    done = Program(program, *words, cwd=ROOT).wait()
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr and "in mine" in done.stderr


def test_without_rewards_a_copy_says_what_it_lacks(tmp_path):
    (tmp_path / "mine.py").write_text((ROOT / "grpo/grpo.py").read_text())
    done = subprocess.run([sys.executable, tmp_path / "mine.py"], capture_output=True, text=True)
    assert done.returncode == 1 and "copy the folder rewards/" in done.stderr and "Trace" not in done.stderr


def test_two_runs_do_not_write_into_one_folder(make, tmp_path):
    trainer = make("grpo/grpo.py")
    done = run("grpo/grpo.py", f"OUTPUT_DIR={trainer.run.folder}")
    assert done.returncode == 2 and f"{tmp_path}/run.lock" in done.stderr


@pytest.mark.parametrize("path", TRAINERS)
def test_help_prints_the_docstring_and_the_constants(path):
    done = Program(ROOT / path, "-h", cwd=ROOT).wait()
    assert done.returncode == 0 and "To change" in done.stdout and "SEED = 1" in done.stdout
    assert "def " not in done.stdout


def test_a_launchers_leftovers_in_the_environment_change_nothing(tmp_path):
    leftovers = {"RANK": "16", "WORLD_SIZE": "2", "LOCAL_RANK": "3"}
    for names in (["RANK"], ["WORLD_SIZE", "LOCAL_RANK"]):
        environment = {name: leftovers[name] for name in names}
        done = run("grpo/grpo.py", f"OUTPUT_DIR={tmp_path}/run", **environment)
        assert done.returncode == 0 and "Done at step 2" in done.stdout, done.stderr
