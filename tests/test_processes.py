"""Several processes: the same bytes on any number of them, what one of them does that the others do not,
sums of gradients in one order, models sharded by FSDP2. Processes begin as torchrun begins them, but in a
moment; torchrun itself stands in the last tests. Further numbers of processes: python -m pytest -m sweep
tests/test_processes.py."""

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, SMALL, assert_same_state, distance, read, untimed, walk
from program import Program
from safetensors.torch import load_file

REC = "grpo/grpo_rec.py"
FILES = ["ppo/ppo.py", "grpo/grpo.py", "rce/rce.py", REC]
# Four chunks of prompts a step and more micro-batches than processes; the epoch ends with fewer
WORDS = {
    **SMALL,
    "BATCH_SIZE": 2,
    "GRADIENT_ACCUMULATION_STEPS": 4,
    "MAX_TRAIN_PROMPTS": 13,
    "MAX_EVAL_PROMPTS": 3,
    "MAX_NEW_TOKENS": 12,
    "NUM_EPOCHS": 2,
    "MAX_STEPS": 3,
    "EVAL_EVERY_N_STEPS": 2,
    "KL_COEF": 0.05,
}
MORE = {
    "ppo/ppo.py": {"MINI_BATCHES": 2},
    "grpo/grpo.py": {"RESAMPLE_FLAT_GROUPS": 1, "REFERENCE_SYNC_STEPS": 2},
    "rce/rce.py": {
        "MAX_TRAIN_PROMPTS": 16,
        "MINE_PROMPTS": 7,
        "ROUNDS": 2,
        "NUM_EPOCHS": 1,
        "BEAMS": 2,
        "MAX_NEW_TOKENS": 48,
        "INCLUDE_REFERENCE": True,
        "EVAL_SAMPLES": 2,
    },
}
REC_WORDS = {
    "MAX_TRAIN_ROWS": 60,
    "MAX_EVAL_ROWS": 70,
    "EVAL_BEAMS": 20,
    "SFT_EPOCHS": 1,
    "SFT_BATCH_SIZE": 32,
    "BATCH_SIZE": 2,
    "GRADIENT_ACCUMULATION_STEPS": 3,
    "GROUP_SIZE": 4,
    "MAX_STEPS": 2,
    "EVAL_EVERY_N_STEPS": 1,
    "CANDIDATES": "sample",
    "SAVE_EVERY_N_STEPS": 0,
}


def words_of(file, **more):
    """The words of a run of several chunks."""
    words = {**WORDS, **MORE.get(file, {})} if file != REC else REC_WORDS
    words = {key: value for key, value in words.items() if key != "KL_COEF" or file != "rce/rce.py"}
    return [f"{key}={value}" for key, value in {**words, **more}.items()]


def free_port():
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]


class Processes:
    """count programs that torchrun would have begun: `file` with words; environment is theirs beside that. As
    torchrun's agent does, this process holds their store."""

    def __init__(self, count, file, *words, **environment):
        port = free_port()
        common = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", **environment}
        if "MASTER_PORT" not in environment:
            self.store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        self.programs = []
        for rank in range(count):
            own = {**common, "RANK": rank, "LOCAL_RANK": rank} if count > 1 or environment else {}
            own = {key: str(value) for key, value in own.items()}
            self.programs.append(Program(file, *words, cwd=ROOT, environment=own))

    def wait(self):
        return [program.wait() for program in self.programs]

    def wait_for(self, path, seconds=60):
        end = time.monotonic() + seconds
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.02)
        assert path.exists(), [program.wait(1) for program in self.programs]


def run(count, file, folder, **more):
    """A run on count processes that ends well; what the first one said."""
    ended = Processes(count, ROOT / file, *words_of(file, OUTPUT_DIR=folder, **more)).wait()
    assert [end.returncode for end in ended] == [0] * count, ended
    assert not any(end.stdout for end in ended[1:])
    return ended[0].stdout


def last_checkpoint(folder):
    return max(folder.glob("step_*"), key=lambda path: int(path.name[5:]))


def assert_same_run(a, b):
    """Two finished runs are equal to the byte, but for the clock."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert untimed(a / "logs" / name) == untimed(b / "logs" / name)
    one, two = last_checkpoint(a), last_checkpoint(b)
    assert one.name == two.name
    files = [path.relative_to(one) for path in one.rglob("*.safetensors")]
    assert files
    for name in files:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    assert_same_state(one / "training_state.pt", two / "training_state.pt")
    for path in [*a.glob("best/policy/*.safetensors"), *a.glob("candidates_*.parquet"), *a.glob("*.json")]:
        if path.name != "training_config.json":
            assert path.read_bytes() == (b / path.relative_to(a)).read_bytes(), path


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """alone(file): the folder of its run on one process."""
    made = {}

    def get(file):
        if file not in made:
            made[file] = tmp_path_factory.mktemp("alone") / "run"
            run(1, file, made[file])
        return made[file]

    return get


# ---------------------------------------------------------------- the same bytes

USUAL = [("ppo/ppo.py", 2), ("grpo/grpo.py", 3), *((file, 2) for file in FILES[2:])]
SWEEP = [(file, count) for file in FILES for count in (2, 3, 4) if (file, count) not in USUAL]


@pytest.mark.parametrize(
    "file, count", [*USUAL, *(pytest.param(*case, marks=pytest.mark.sweep) for case in SWEEP)]
)
def test_a_run_is_the_same_to_the_byte_on_any_number_of_processes(file, count, alone, tmp_path):
    run(count, file, tmp_path / "run")
    assert_same_run(alone(file), tmp_path / "run")


# An adapter's base is frozen, and the reference too: of the weights that are compared alone a part is trained
LORA = {"LORA_RANK": 4, "LEARNING_RATE": 1e-3, "MAX_STEPS": 2}


@pytest.mark.parametrize(
    "file, more",
    [
        ("grpo/grpo.py", {"REFERENCE_SYNC_STEPS": 0}),
        pytest.param("ppo/ppo.py", {}, marks=pytest.mark.sweep),
        pytest.param("rce/rce.py", {}, marks=pytest.mark.sweep),
    ],
)
def test_adapters_are_the_same_to_the_byte_on_two_processes(file, more, tmp_path):
    for count, folder in (1, tmp_path / "alone"), (2, tmp_path / "two"):
        run(count, file, folder, **LORA, **more)
    assert_same_run(tmp_path / "alone", tmp_path / "two")


@pytest.mark.parametrize(
    "file, before, after",
    [
        ("ppo/ppo.py", 4, 1),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (
                ("rce/rce.py", 1, 3),
                ("ppo/ppo.py", 1, 3),
                ("rce/rce.py", 4, 1),
                ("grpo/grpo.py", 4, 1),
            )
        ),
    ],
)
def test_a_run_killed_on_some_processes_goes_on_on_others(file, before, after, alone, tmp_path):
    folder = tmp_path / "run"
    begun = Processes(before, ROOT / file, *words_of(file, OUTPUT_DIR=folder, SAVE_EVERY_N_STEPS=1))
    begun.wait_for(folder / "step_1/manifest.json")
    begun.programs[-1].send_signal(signal.SIGKILL)
    codes = [end.returncode for end in begun.wait()]
    assert codes[-1] == -signal.SIGKILL
    assert set(codes[:-1]) <= {0, 2}  # the others notice, or had done already
    run(after, file, folder)
    assert_same_run(alone(file), folder)


def test_a_signal_to_one_process_stops_all_after_the_same_step(alone, tmp_path):
    folder = tmp_path / "run"
    words = words_of("ppo/ppo.py", OUTPUT_DIR=folder, SAVE_EVERY_N_STEPS=1)
    begun = Processes(3, ROOT / "ppo/ppo.py", *words)
    begun.wait_for(folder / "step_1")
    begun.programs[2].send_signal(signal.SIGTERM)
    ended = begun.wait()
    assert [end.returncode for end in ended] == [143] * 3, ended
    assert "Stopped at step" in ended[0].stdout
    assert int(last_checkpoint(folder).name[5:]) < 3
    run(2, "ppo/ppo.py", folder)
    assert_same_run(alone("ppo/ppo.py"), folder)


# ---------------------------------------------------------------- what one process alone does

SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import ppo
{body}
ppo.train_main()
"""


def run_edited(count, tmp_path, body, **more):
    """ppo.py with some of its names replaced, as programs of several processes."""
    file = tmp_path / "edited.py"
    file.write_text(SCRIPT.format(folder=str(ROOT / "ppo"), body=body))
    words = words_of("ppo/ppo.py", OUTPUT_DIR=tmp_path / "run", **more)
    began = time.monotonic()
    ended = Processes(count, file, *words).wait()
    assert time.monotonic() - began < 100
    return ended


def test_a_reward_that_raises_on_one_process_ends_all_and_shows_where(tmp_path):
    ended = run_edited(
        3,
        tmp_path,
        """
def wrong(prompts, responses, answers):
    return [1 / (ppo.rank() - 1)] * len(responses)
ppo.REWARD_FUNCTIONS = [(wrong, 1.0)]""",
    )
    assert [end.returncode for end in ended] == [2, 1, 2]
    assert "ZeroDivisionError" in ended[1].stderr and "raised by the reward function wrong" in ended[1].stderr
    assert ended[0].stderr == ended[2].stderr == ""


def test_a_disk_that_fills_ends_all_with_one_sentence(tmp_path):
    ended = run_edited(
        2,
        tmp_path,
        """
def fill(self, *parts):
    raise OSError(28, "No space left on device")
ppo.Run.write_checkpoint = fill""",
        SAVE_EVERY_N_STEPS=1,
    )
    assert [end.returncode for end in ended] == [2, 2]
    assert "could not be saved" in ended[0].stderr and ended[1].stderr == ""


SOURCE = """
from pathlib import Path
copied = Path(sys.argv[0]).parent / f"{ppo.rank()}" / "ppo.py"
copied.parent.mkdir()
copied.write_text("#" * ppo.rank())
ppo.__file__ = str(copied)"""
DRAWS_LATER = """
import random
say = ppo.Run.log_step
def record(*words):
    [random.random() for _ in range(ppo.rank())]
    return say(*words)
ppo.Run.log_step = record"""
DIFFER = {
    "constants": ("ppo.SEED += ppo.rank()", "SEED differs between the processes: make it the same"),
    "source": (SOURCE, "ppo.py differs between the processes: make it the same"),
    "later": (DRAWS_LATER, "drew different random numbers"),
    "numpy": (DRAWS_LATER.replace("import random", "import numpy.random as random"), "drew different random"),
    "torch": (
        DRAWS_LATER.replace("import random", "import torch").replace("random.random()", "torch.rand(1)"),
        "drew different random",
    ),
}
MORE_SELDOM = {"torch", "numpy"}


@pytest.mark.parametrize(
    "body, sentence",
    [
        pytest.param(*case, id=name, marks=pytest.mark.sweep if name in MORE_SELDOM else ())
        for name, case in DIFFER.items()
    ],
)
def test_processes_that_would_make_different_runs_end_with_a_sentence(body, sentence, tmp_path):
    ended = run_edited(2, tmp_path, body)
    assert [end.returncode for end in ended] == [2, 2], ended
    (said,) = [end.stderr for end in ended if end.stderr]  # by the first that fails
    assert sentence in said


def test_rewards_are_called_a_chunk_at_a_time_and_dealt_out(tmp_path):
    body = """
def note(prompts, responses, answers):
    with open({path!r} + str(ppo.rank()), "a") as file:
        file.write(f"{{len(responses)}} ")
    return [float(len(r)) for r in responses]
ppo.REWARD_FUNCTIONS = [(note, 1.0)]""".format(path=str(tmp_path / "calls_"))
    ended = run_edited(2, tmp_path, body, MAX_STEPS=1, MAX_EVAL_PROMPTS=1, EVAL_EVERY_N_STEPS=0)
    assert [end.returncode for end in ended] == [0, 0], ended
    calls = [(tmp_path / f"calls_{rank}").read_text().split() for rank in range(2)]
    # one prompt evaluated before and after; eight prompts of two responses, two prompts at a time
    assert calls == [["1", "4", "4", "1"], ["4", "4"]]


def test_only_the_first_process_writes_prints_and_locks(tmp_path):
    run(2, "ppo/ppo.py", tmp_path / "run", SAVE_EVERY_N_STEPS=1, MAX_STEPS=2)
    logs = sorted(path.name for path in (tmp_path / "run/logs").iterdir())
    assert len(logs) == 3
    assert [line["step"] for line in read(tmp_path / "run/logs/metrics.jsonl")] == [0, 1, 2, 2]


@pytest.mark.parametrize("file", ["ppo/ppo_rag.py", "rce/rce_icl.py"])
def test_trainers_of_one_process_say_so(file, tmp_path):
    ended = Processes(2, ROOT / file, f"OUTPUT_DIR={tmp_path}/run").wait()
    assert [end.returncode for end in ended] == [2, 2]
    assert "runs as one process" in ended[0].stderr and ended[1].stderr == ""


def test_another_number_of_threads_is_said_at_a_resume(tmp_path):
    run(1, "ppo/ppo.py", tmp_path / "run", MAX_STEPS=1)
    (ended,) = run_edited(1, tmp_path, "import torch\ntorch.set_num_threads(2)", MAX_STEPS=2)
    assert ended.returncode == 0, ended
    assert "Changed since the checkpoint: OMP_NUM_THREADS was 1, is 2" in ended.stdout


# ---------------------------------------------------------------- sums of gradients


class OneNumber(torch.nn.Module):
    """A model whose gradient is what the loss says."""

    device = torch.device("cpu")

    def __init__(self, size=1000):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))
        self.unused = torch.nn.Parameter(torch.zeros(3))


def sum_of(script, model, gradients, others=()):
    """The gradient of an optimizer step of parts with these gradients; others: this is the first of two
    processes, and sees every other one."""
    mine = gradients[::2] if others else gradients
    total = script.GradientSum([model])
    for part, gradient in enumerate(total.deal(gradients)):
        assert gradient is mine[part]
        total.backward(model, (model.weight * gradient).sum())
        total.log_sum("parts", 1.0)
        total.log_max("max_width", gradient.abs().max())
    metrics = total.finish()
    assert metrics["parts"] == len(mine)
    assert metrics["max_width"] == max(gradient.abs().max().item() for gradient in mine)
    return model.weight.grad


def some_gradients(parts=7):
    """Gradients whose float32 sum depends on their order."""
    generator = torch.Generator().manual_seed(3)
    sizes = 10.0 ** torch.randint(-6, 1, (parts, 1), generator=generator)
    return list(sizes * torch.randn(parts, 1000, generator=generator))


def in_order(gradients):
    total = torch.zeros(1000)
    for gradient in gradients:
        total += gradient
    return total


@pytest.mark.parametrize("parts", [6, 7])  # the second process has a part in the last round, or none
def test_two_processes_add_up_in_the_order_of_the_parts_as_one_does(parts, ppo, monkeypatch):
    gradients = some_gradients(parts)
    assert not torch.equal(in_order(gradients), in_order(gradients[::2] + gradients[1::2]))
    script = ppo()
    assert torch.equal(sum_of(script, OneNumber(), gradients), in_order(gradients))

    second = [*gradients[1::2], torch.zeros(1000)]
    others = iter([g for gradient in second for g in (gradient, torch.zeros(3))])  # of each parameter

    def all_gather(found, mine):
        found[0].copy_(mine)
        found[1].copy_(next(others))

    monkeypatch.setattr(script, "world_size", lambda: 2)
    monkeypatch.setattr(script.dist, "all_gather", all_gather)
    monkeypatch.setattr(script, "all_gather", lambda shares: [shares, [{}] * len(shares)])
    assert torch.equal(sum_of(script, OneNumber(), gradients, others=True), in_order(gradients))


def test_what_is_measured_is_added_up_in_the_order_of_the_parts(ppo, monkeypatch):
    script = ppo(DETERMINISTIC_GRADIENTS=False)
    # of two processes; the second has no part in the last round
    everyone = [[{"x": 1e100}, {"x": -1e100}], [{"x": 1.0}, {"x": 7.0}]]
    monkeypatch.setattr(script, "world_size", lambda: 2)
    monkeypatch.setattr(script.dist, "all_reduce", lambda total: None)
    monkeypatch.setattr(script, "all_gather", lambda shares: everyone)
    total = script.GradientSum([OneNumber()])
    for _ in total.deal([1, 2, 3]):
        pass
    assert total.finish()["x"] == 0.0  # out of order it is 1


def test_a_loop_over_micro_batches_that_is_left_early_is_an_error(ppo):
    total = ppo().GradientSum([OneNumber()])
    for _ in total.deal(some_gradients(3)):
        break
    with pytest.raises(RuntimeError, match="left early: do not break out of it"):
        total.finish()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_stays_so(value, ppo):
    gradients = some_gradients()
    gradients[2][5] = value
    total = sum_of(ppo(), OneNumber(), gradients)
    assert not total[5].isfinite() and total[6].isfinite()


def test_parameters_without_a_gradient_get_zeros(ppo):
    model = OneNumber()
    sum_of(ppo(), model, some_gradients())
    assert model.unused.grad.tolist() == [0.0] * 3


def test_plain_sums_run_too_and_are_near(alone, tmp_path):
    run(2, "ppo/ppo.py", tmp_path / "run", DETERMINISTIC_GRADIENTS=False, MAX_STEPS=1)
    folders = alone("ppo/ppo.py"), tmp_path / "run"
    one, two = (untimed(folder / "logs/metrics.jsonl")[1] for folder in folders)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


# ---------------------------------------------------------------- models in parts


def nearly(a, b):
    """Two runs' weights and train metrics are equal to rounding."""
    one, two = last_checkpoint(a), last_checkpoint(b)
    assert one.name == two.name
    for path in one.rglob("*.safetensors"):
        mine, other = load_file(path), load_file(two / path.relative_to(one))
        assert mine.keys() == other.keys()
        assert all(distance(other[key], mine[key]) < 1e-3 for key in mine if mine[key].any())
    states = [torch.load(folder / "training_state.pt", weights_only=True) for folder in (one, two)]
    leaves = [dict(walk(state["optimizers"])) for state in states]
    shapes = [{name: getattr(leaf, "shape", None) for name, leaf in some.items()} for some in leaves]
    assert shapes[0] == shapes[1]
    for first, second in zip(*(untimed(folder / "logs/metrics.jsonl") for folder in (a, b))):
        assert first.keys() == second.keys()
        keys = {"grad_norm", "critic_grad_norm", "policy_loss", "value_loss", "entropy", "kl"}
        for key in keys & set(first):
            assert second[key] == pytest.approx(first[key], rel=0.01, abs=1e-4), key


@pytest.mark.parametrize(
    "file, count, dtype",
    [
        ("ppo/ppo.py", 2, "bfloat16"),
        # on three some have nothing to mine in the last turn
        *(
            pytest.param(*case, "float32", marks=pytest.mark.sweep)
            for case in (
                ("rce/rce.py", 3),
                ("ppo/ppo.py", 3),
                ("ppo/ppo.py", 1),
                ("ppo/ppo.py", 2),
                ("grpo/grpo.py", 2),
            )
        ),
    ],
)
def test_sharded_models_make_the_same_run_to_rounding(file, count, dtype, tmp_path):
    more = {"REWARD_MODEL": ROOT / "data/tiny/reward_model", "SHARD": "fsdp2", "DTYPE": dtype}
    words = words_of(file, OUTPUT_DIR=tmp_path / "parts", MAX_STEPS=2, **more)
    ended = Processes(count, ROOT / file, *words, OMP_NUM_THREADS=1).wait()
    assert [end.returncode for end in ended] == [0] * count, ended
    assert "Warning" not in ended[0].stderr
    run(1, file, tmp_path / "whole", MAX_STEPS=2, **{**more, "SHARD": "none"})
    nearly(tmp_path / "whole", tmp_path / "parts")


def test_a_sharded_policy_is_scored_again_by_processes_with_unequal_shares(tmp_path):
    """gspo in bfloat16 scores before its first update: two processes share three micro-batches."""
    more = {"LOSS_TYPE": "gspo", "CLIP_RANGE": 3e-4, "CLIP_RANGE_HIGH": 4e-4, "DTYPE": "bfloat16"}
    more |= {"MAX_STEPS": 1, "EVAL_DATASETS": [], "BATCH_SIZE": 3, "GRADIENT_ACCUMULATION_STEPS": 1}
    more |= {"GROUP_SIZE": 4, "MICRO_BATCH_ROWS": 4}
    words = words_of("grpo/grpo.py", OUTPUT_DIR=tmp_path / "parts", **more, SHARD="fsdp2")
    ended = Processes(2, ROOT / "grpo/grpo.py", *words, PROCESS_TIMEOUT=20.0, OMP_NUM_THREADS=1).wait()
    assert [end.returncode for end in ended] == [0, 0], ended
    run(1, "grpo/grpo.py", tmp_path / "whole", **more)
    nearly(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.sweep
def test_whole_and_sharded_runs_go_on_from_each_others_checkpoints(alone, tmp_path):
    for first, then in (("fsdp2", "none"), ("none", "fsdp2")):
        folder = tmp_path / first
        run(2, "ppo/ppo.py", folder, SHARD=first, MAX_STEPS=2)
        shutil.rmtree(folder / "best")
        run(2, "ppo/ppo.py", folder, SHARD=then)
        nearly(alone("ppo/ppo.py"), folder)


def test_sharding_without_torchrun_is_refused(started):
    ended = started("ppo/ppo.py", "SHARD=fsdp2")
    assert ended.returncode == 2 and "needs torchrun" in ended.stderr


# ---------------------------------------------------------------- torchrun itself


def torchrun(*words):
    """torchrun as a user starts it, in its own session."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, words)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def children_of(pid):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return sorted(int(word) for word in listed.stdout.split())


@pytest.mark.sweep
def test_torchrun_begins_a_killed_run_again_and_it_goes_on(alone, tmp_path):
    folder = tmp_path / "run"
    words = words_of("ppo/ppo.py", OUTPUT_DIR=folder, SAVE_EVERY_N_STEPS=1)
    agent = torchrun("--nproc_per_node=2", "--max-restarts=2", "ppo/ppo.py", *words)
    try:
        end = time.monotonic() + 120
        while not (folder / "step_1/manifest.json").exists() and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(children_of(agent.pid)[-1], signal.SIGKILL)
        said, _ = agent.communicate(timeout=200)
    finally:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
    assert agent.returncode == 0, said
    assert "Resuming from it" in said
    assert_same_run(alone("ppo/ppo.py"), folder)


def test_a_start_does_not_meet_the_processes_of_an_earlier_one(tmp_path):
    """torchrun keeps its store over a restart."""
    port = free_port()
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for steps in (1, 2):
        kept = {"MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": steps}
        words = words_of("grpo/grpo.py", OUTPUT_DIR=tmp_path / "run", MAX_STEPS=steps, PROCESS_TIMEOUT=20.0)
        ended = Processes(2, ROOT / "grpo/grpo.py", *words, **kept).wait()
        assert [end.returncode for end in ended] == [0, 0], ended
    # No start reads another's keys; which of its addresses it would wait for is chance
    assert {key.partition("/")[0] for key in store.list_keys()} == {"1", "2"}
    assert last_checkpoint(tmp_path / "run").name == "step_2"
    del store


@pytest.mark.sweep
def test_two_nodes_make_the_run_of_one_process(alone, tmp_path):
    port = free_port()
    words = words_of("ppo/ppo.py", OUTPUT_DIR=tmp_path / "run")
    nodes = [
        torchrun(
            "--nnodes=2",
            "--nproc_per_node=1",
            f"--node_rank={n}",
            "--master_addr=127.0.0.1",
            f"--master_port={port}",
            "ppo/ppo.py",
            *words,
        )
        for n in range(2)
    ]
    try:
        said = [node.communicate(timeout=200)[0] for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
    assert [node.returncode for node in nodes] == [0, 0], said
    assert_same_run(alone("ppo/ppo.py"), tmp_path / "run")


def test_an_objects_reward_and_a_set_among_the_constants_are_the_same_on_all(tmp_path):
    body = """
import functools
class Judge:
    def __call__(self, prompts, responses, answers):
        return [float(len(response)) for response in responses]
def scaled(prompts, responses, answers, by):
    return [by] * len(responses)
ppo.STOP_WORDS = {"a", "b", "c", "d", "e", "f"}
ppo.REWARD_FUNCTIONS = [(Judge(), 1.0), (functools.partial(scaled, by=2.0), 1.0), (Judge(), 0.5)]"""
    ended = run_edited(2, tmp_path, body, MAX_STEPS=1)
    assert [end.returncode for end in ended] == [0, 0], ended
    line = read(tmp_path / "run/logs/metrics.jsonl")[1]
    assert line["reward/Judge"] == line["reward/Judge_2"] and line["reward/partial"] == 2.0


def test_an_error_of_one_process_of_a_sharded_run_is_shown(tmp_path):
    body = """
step = ppo.PPOTrainer.optimizer_step
def fails(self, *words):
    if ppo.rank() == 1:
        raise ppo.UserError("this card is full")
    return step(self, *words)
ppo.PPOTrainer.optimizer_step = fails"""
    ended = run_edited(2, tmp_path, body, SHARD="fsdp2", MAX_STEPS=1, PROCESS_TIMEOUT=20.0)
    assert [end.returncode != 0 for end in ended] == [True, True]
    assert ended[1].returncode == 2 and ended[1].stderr.count("this card is full") == 1
    assert "Traceback" not in ended[0].stderr + ended[1].stderr
