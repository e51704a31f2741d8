"""Every program on a GPU that is not there (pretend_gpu.py): no mix of devices, the CPU's bits, and how often
the host waits. A run on the device is cut in two by a resume; the CPU's is not."""

import itertools
import json
import shutil
from types import SimpleNamespace

import gpu
import pytest
import torch
from conftest import ROOT, TINY, TRAINERS, load_script, read, untimed, walk
from pretend_gpu import WAITS
from program import Program
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="pretended on a CPU build of PyTorch")
SMALL = {
    "BATCH_SIZE": 2,
    "GRADIENT_ACCUMULATION_STEPS": 2,
    "GROUP_SIZE": 3,
    "MAX_TRAIN_PROMPTS": 24,
    "MAX_EVAL_PROMPTS": 2,
    "MAX_NEW_TOKENS": 20,
    "EVAL_EVERY_N_STEPS": 1,
    "SAVE_EVERY_N_STEPS": 1,
    "LOG_SAMPLES": 2,
}
NARROW = {"DTYPE": "bfloat16", "LORA_RANK": 2, "GRADIENT_CHECKPOINTING": True}
USE = """
import json, sys
from pretend_gpu import load
path, name, constants = sys.argv[1:4]
program = load(path, "program")
vars(program).update(json.loads(constants))
trainer = getattr(program, name)()
trainer.train()
found = trainer.evaluate(["What is 2 + 3?", "What is 7 - 4?"], ["5", "3"])
texts = [trainer.generate_response("What is 2 + 3?", greedy) for greedy in (True, False)]
print("FOUND", json.dumps([{k: float(v) for k, v in found.items()}, texts]))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder of the tiny policy's and reward model's first two layers; responses have many ends."""
    folder = tmp_path_factory.mktemp("models")
    kinds = {"policy": AutoModelForCausalLM, "reward_model": AutoModelForSequenceClassification}
    for name, kind in kinds.items():
        shutil.copytree(TINY / name, folder / name)
        model = kind.from_pretrained(TINY / name)
        model.model.layers = model.model.layers[:2]
        model.config.num_hidden_layers = 2
        model.config.layer_types = None
        if name == "policy":
            model.generation_config.eos_token_id = [1, *range(20, 500, 24)]
        model.save_pretrained(folder / name)
    return folder


def run(folder, program, *words, meant=()):
    """A program on the pretended GPU, or with the word DEVICE=cpu beside it; what it said and asked of the
    device. Lines with a word of `meant` may draw the device's random numbers and run models on the CPU."""
    log = folder.with_suffix(".json")
    words = [ROOT / "tests/pretend_gpu.py", program, *words]
    ended = Program(*words, cwd=ROOT, environment={"LOG": str(log)}).wait()
    assert ended.returncode == 0, ended.stderr[-3000:]
    ended.log = read(log)[0]
    wrong = [x for x in ended.log if x["kind"] in ("mix", "missing", "random", "other", "host")]
    wrong = [x for x in wrong if x["kind"] == "other" or not any(word in x["line"] for word in meant)]
    assert not wrong, wrong
    return ended


def assert_same(one, two):
    """Two runs wrote the same metrics, weights and states, to the bit."""
    metrics = [untimed(folder / "logs/metrics.jsonl") for folder in (one, two)]
    for record in itertools.chain(*metrics):
        record.pop("gpu_memory_gib", None)  # of a GPU alone
    assert metrics[0] == metrics[1]
    weights = sorted(path.relative_to(one) for path in one.glob("step_*/**/*.safetensors"))
    assert weights
    for path in weights:
        assert (one / path).read_bytes() == (two / path).read_bytes(), path
    last = max(one.glob("step_*"), key=lambda path: int(path.name[5:])).name
    states = []
    for folder in (one, two):
        state = torch.load(folder / last / "training_state.pt", map_location="cpu", weights_only=True)
        states.append({key: dict(walk(state[key])) for key in ("optimizers", "rng", "state")})
        states[-1]["rng"] = {k: x for k, x in states[-1]["rng"].items() if not k.startswith("/cuda")}
    for key, other in states[1].items():
        assert states[0][key].keys() == other.keys()
        for name, x in states[0][key].items():
            assert torch.equal(x, other[name]) if isinstance(x, torch.Tensor) else x == other[name], name


def train(tmp_path, models, path, **constants):
    """Two steps on the CPU; one on the device, and one more after a resume; the same came of them."""
    own = {**SMALL, "ACTOR_MODEL": str(models / "policy"), **constants}
    if path == "rce/rce.py":
        own |= {
            "MINE_PROMPTS": 8,
            "ROUNDS": 1,
            "USE_LR_SCHEDULER": False,
            "BEAMS": 2,
            "EVAL_SAMPLES": 2,
            "REWARD_MODE": "hard_plus_gtprob",
        }
    own |= {"OUTPUT_DIR": str(tmp_path / "gpu"), "MAX_STEPS": 1}
    words = [f"{key}={value}" for key, value in own.items()]
    run(tmp_path / "one", ROOT / path, *words, "RESUME=no")
    (tmp_path / "use.py").write_text(USE)
    said = {}
    for device in ("gpu", "cpu"):
        own |= {"OUTPUT_DIR": str(tmp_path / device), "MAX_STEPS": 2}
        own |= {"gpu": {"DEVICE": "cuda", "RESUME": "yes"}, "cpu": {"DEVICE": "cpu", "RESUME": "no"}}[device]
        words = [ROOT / path, TRAINERS[path], json.dumps(own)] + ["DEVICE=cpu"] * (device == "cpu")
        ended = run(tmp_path / device, tmp_path / "use.py", *words)
        said[device] = ended.stdout.partition("FOUND")[2]
    assert said["cpu"] and said["gpu"] == said["cpu"]
    assert_same(tmp_path / "gpu", tmp_path / "cpu")


def test_ppo(tmp_path, models):
    reward_model = str(models / "reward_model")
    train(
        tmp_path,
        models,
        "ppo/ppo.py",
        REWARD_MODEL=reward_model,
        KL_TARGET=0.1,
        ENTROPY_COEF=0.01,
        MINI_BATCHES=2,
    )


@pytest.mark.sweep
def test_ppo_narrow(tmp_path, models):
    train(tmp_path, models, "ppo/ppo.py", REWARD_MODEL=None, GROUP_EPOCHS=1, **NARROW)


def test_grpo(tmp_path, models):
    train(
        tmp_path,
        models,
        "grpo/grpo.py",
        REWARD_MODEL=str(models / "reward_model"),
        KL_COEF=0.1,
        REFERENCE_SYNC_STEPS=1,
        ENTROPY_COEF=0.01,
        MINI_BATCHES=2,
    )


@pytest.mark.sweep
def test_grpo_narrow(tmp_path, models):
    train(tmp_path, models, "grpo/grpo.py", KL_COEF=0.1, **NARROW)


def test_rce(tmp_path, models):
    train(tmp_path, models, "rce/rce.py", REWARD_MODEL=str(models / "reward_model"))


@pytest.mark.sweep
def test_rce_narrow(tmp_path, models):
    train(tmp_path, models, "rce/rce.py", **NARROW)


# ---------------------------------------------------------------- the three systems


def run_system(tmp_path, path, steps, meant=(), **constants):
    """As train(), of a program that ends after so many steps: the last is taken away before the resume."""
    for device in ("cpu", "gpu"):
        own = {**constants, "OUTPUT_DIR": tmp_path / device, "SAVE_EVERY_N_STEPS": 1}
        if "rag" in path:
            own["CACHE_DIR"] = tmp_path / f"{device}_cache"
        words = [f"{key}={value}" for key, value in own.items()]
        words += ["DEVICE=cpu"] * (device == "cpu")
        run(tmp_path / device, ROOT / path, *words, "RESUME=no", meant=meant)
    if not constants.get("DROPOUT"):
        assert_same(tmp_path / "gpu", tmp_path / "cpu")
    shutil.copytree(tmp_path / "gpu", tmp_path / "whole")
    shutil.rmtree(tmp_path / f"gpu/step_{steps}")
    run(tmp_path / "gpu", ROOT / path, *words, "RESUME=yes", meant=meant)
    assert_same(tmp_path / "gpu", tmp_path / "whole")


def test_ppo_rag(tmp_path):
    # its policy, a few thousand weights, is meant to stay on the CPU
    run_system(
        tmp_path,
        "ppo/ppo_rag.py",
        2,
        meant=("RAGTrainer", "answers"),
        SAMPLE=24,
        VALIDATION_QUESTIONS=4,
        TEST_QUESTIONS=4,
        TOP_KS="(1,)",
        TEMPERATURES="(0.0, 1.0)",
        FIXED_ACTION="(1, 1.0, 0)",
        RERANKS="(0,)",
        MAX_NEW_TOKENS=3,
        N_STEPS=16,
        BATCH_SIZE=8,
        MAX_STEPS=2,
    )


def test_grpo_rec(tmp_path):
    run_system(
        tmp_path,
        "grpo/grpo_rec.py",
        3,
        MAX_TRAIN_ROWS=4,
        MAX_EVAL_ROWS=4,
        TEST_FILE=ROOT / "data/rec/valid.csv",
        SFT_EPOCHS=1,
        SFT_BATCH_SIZE=8,
        BATCH_SIZE=2,
        GROUP_SIZE=3,
        EVAL_BEAMS=20,
        RANKING_WEIGHT=0.5,
        MINI_BATCHES=2,
        MAX_STEPS=2,
        HIDDEN_SIZE=16,
        LAYERS=1,
    )


@pytest.mark.parametrize("dropout", [0, pytest.param(0.3, marks=pytest.mark.sweep)])
def test_rce_icl(tmp_path, models, dropout):
    """Dropout on a GPU is drawn by its own generator: such a run is compared with itself alone."""
    for name in ("train", "test"):
        lines = [f"{n} and {n * n % 7},{n % 3}" for n in range(40)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,category", *lines]))
    kinds = {"type": "csv", "input": "text", "output": "category"}
    reader = "votes" if dropout else models / "policy"
    run_system(
        tmp_path,
        "rce/rce_icl.py",
        4,
        meant=("encode", "LanguageReader.answers"),
        TEST_QUERIES=4,
        TRAIN_DATASET={"path": f"{tmp_path}/train.csv", **kinds},
        VALIDATION_QUERIES=4,
        MINE_QUERIES=8,
        TEST_DATASET={"path": f"{tmp_path}/test.csv", **kinds},
        POOL_SIZE=8,
        EMBEDDING_SIZE=8,
        RANDOM=4,
        LOCAL=4,
        MINE_BATCH_SIZE=8,
        HIDDEN_SIZE=8,
        HEADS=2,
        BATCH_SIZE=4,
        RCE_EPOCHS=2 if dropout else 1,
        GRPO_EPOCHS=0 if dropout else 1,
        EVAL_SHOTS="(2,)",
        ON_POLICY=not dropout,
        READER=reader,
        MAX_ANSWER_TOKENS=3,
        DROPOUT=dropout,
    )


# ---------------------------------------------------------------- waits and kernels

# At most: of a decoded token the waits, the kernels of attention and its cache (four layers) and the others
# of ours, all of a rollout counted; of a micro-batch the waits and kernels, all of a step's update counted.
# docs/lab/gpu.md says of which lines they are
MOST = {"ppo": (0.088, 63, 38.2, 2, 1456), "grpo": (0.088, 63, 38.2, 2, 939)}


@pytest.mark.parametrize("name", MOST)
def test_how_often_the_host_waits(tmp_path, name):
    own = {
        "BATCH_SIZE": 4,
        "GRADIENT_ACCUMULATION_STEPS": 2,
        "GROUP_SIZE": 4,
        "MAX_TRAIN_PROMPTS": 24,
        "MAX_STEPS": 1,
        "GROUP_EPOCHS": 1,
        "MAX_NEW_TOKENS": 64,
        "EVAL_DATASETS": [],
        "RESUME": "no",
        "TEMPERATURE": 3.0,
        "REWARD_FUNCTIONS": [("rouge_l", 1.0)],
        "OUTPUT_DIR": tmp_path / "run",
    }
    words = [f"{key}={value}" for key, value in own.items()]
    log = run(tmp_path / "run", ROOT / f"{name}/{name}.py", *words).log

    def count(phase, *kinds):
        return sum(x["count"] for x in log if x["phase"] == phase and x["kind"] in kinds)

    def kernels_of(*names):
        some = [x for x in log if x["phase"] == "rollout" and x["kind"] == "kernel"]
        return sum(x["count"] for x in some if any(name in x["line"] for name in names)) / tokens

    def units(phase, unit):
        return sum(x["count"] for x in log if (x["phase"], x["kind"], x["what"]) == (phase, "unit", unit))

    tokens = units("rollout", "token")
    micros = units("update", "backward") // (2 if name == "ppo" else 1)  # actor and critic
    assert tokens >= 64 and micros == 2
    attention = kernels_of(" shared_prompt_attention", "Layer.", "SharedPrompts.", "by_prompt", "by_row")
    ours = count("rollout", "kernel") / tokens - attention - kernels_of("forward")  # transformers'
    found = (
        count("rollout", *WAITS) / tokens,
        attention,
        ours,
        count("update", *WAITS) / micros,
        count("update", "kernel") / micros,
    )
    assert all(x <= most for x, most in zip(found, MOST[name])), found


# ---------------------------------------------------------------- gpu.py, which asks a real one


def test_a_stage_that_is_done_is_kept_and_one_that_fails_is_named(tmp_path, monkeypatch, capsys):
    def works(out, small):
        asked.append(small)
        return [("how many", 3), ("what it said", "one\ntwo")]

    def fails(out, small):
        raise RuntimeError("no such card")

    asked = []
    monkeypatch.setattr(gpu, "STAGES", {"first": works, "second": fails})
    for _ in range(2):
        gpu.main([str(tmp_path)])
        said = capsys.readouterr().out
        assert "second failed: RuntimeError: no such card" in said
        assert said.endswith((tmp_path / "gpu.md").read_text())
    assert len(asked) == 1
    assert "| first, 0 s | how many | 3 |" in said and said.endswith("\nwhat it said:\n\none\ntwo\n")


@pytest.mark.sweep
def test_what_the_profiler_is_asked_of(tmp_path):
    small = {**gpu.COUNTED, "MAX_NEW_TOKENS": 4, "DEVICE": "cpu"}
    found = gpu.measured("waits", "grpo", tmp_path / "run", small)
    assert found["rollout"][0] == 2 * 3  # batches, tokens after the first
    assert found["update"][0] > 0
    assert gpu.same(tmp_path / "run", tmp_path / "run")


def test_the_examples_offloaded_optimizer_steps_as_adamw_and_resumes(example):
    offloaded_class = example("offloaded_adamw").OffloadedAdamW
    torch.manual_seed(0)
    first, second = ([torch.nn.Parameter(torch.ones(n)) for n in (3, 5)] for _ in range(2))
    options = {"lr": 0.1, "weight_decay": 0.1, "fused": True}
    plain, offloaded = torch.optim.AdamW(first, **options), offloaded_class(second, **options)
    for number in range(4):
        for one, two in zip(first, second):
            one.grad = torch.randn(one.shape)
            two.grad = one.grad.clone()
        plain.step()
        offloaded.step()
        assert all(torch.equal(*pair) for pair in zip(first, second))
        if number == 1:
            saved = offloaded.state_dict()
            offloaded = offloaded_class(second, **options)
            offloaded.load_state_dict(saved)


# ---------------------------------------------------------------- what neither has: patched


@pytest.fixture
def ppo():
    return load_script("ppo/ppo.py")


def test_cards_of_one_kind_cut_micro_batches_alike(ppo, monkeypatch):
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=2**17))
    model = SimpleNamespace(device=torch.device("cuda"), config=config)
    batch = SimpleNamespace(response_mask=torch.zeros(1, 2**10))  # 2**29 bytes of logits a row
    found = []
    for gib in (15.7, 79.1, 79.6, 139.8):  # a T4, two H100 with other things on them, an H200
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, gib=gib: (0, int(gib * 2**30)))
        found.append(ppo.micro_batch_rows(model, batch))
    assert found == [1, 8, 8, 16]  # of at most a sixteenth: .5, 4, 4 and 8 GiB


def test_each_process_takes_its_own_gpu_and_gradients_meet_by_nccl(ppo, monkeypatch):
    taken = []
    monkeypatch.setattr(ppo, "world_size", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(ppo.dist, "init_process_group", lambda backend, **options: taken.append(backend))
    monkeypatch.setattr(ppo.dist, "rendezvous", lambda *args, **options: iter([(None, 1, 2)]))
    monkeypatch.setattr(ppo.dist, "PrefixStore", lambda *args: None)
    monkeypatch.setattr(ppo, "all_gather", lambda value=None: [value, value])
    monkeypatch.setattr(ppo, "run_fingerprint", lambda: {})
    for key, value in {"LOCAL_RANK": "1", "RANK": "1", "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(torch, "zeros", lambda n, device: SimpleNamespace(device=torch.device(device)))
    assert ppo.find_device() == torch.device("cuda:1")
    assert taken == ["cpu:gloo,cuda:nccl", torch.device("cuda:1")]


def test_only_a_gpu_of_cuda_gets_copies_that_do_not_block(ppo, monkeypatch):
    """mps reads the CPU's memory after to() has returned, when the tensor may be gone."""
    seen = []
    fake = SimpleNamespace(to=lambda device, non_blocking: seen.append(non_blocking))
    monkeypatch.setattr(torch, "as_tensor", lambda values: fake)
    for device in ("cuda:1", "mps", "cpu"):
        ppo.to_device(torch.zeros(1), torch.device(device))
    assert seen == [True, False, False]
