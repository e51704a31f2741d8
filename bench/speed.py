"""Speed, memory and rounding of the trainers: beside transformers, trl and another checkout.

    python bench/speed.py rollout 20M                      # our sampling against transformers' generate
    python bench/speed.py rollout 20M 512 1024 2           # prompts of 512 tokens, 1,024 new ones, 2 prompts
    python bench/speed.py rollout /tmp/before 20M 512 1024 2    # CPU seconds per token, before and now
    python bench/speed.py step /tmp/before smollm2         # CPU seconds of a GRPO step, before and now
    python bench/speed.py trl                              # GRPO, SFT, reward model and DPO against trl's
    python bench/speed.py trl smollm2 dpo sft              # of one model, of two stages
    OMP_NUM_THREADS=2 python bench/speed.py trl 20M grpo   # two threads: seconds by the clock
    python bench/speed.py response . grpo/grpo.py 8192 [KEY=VALUE ...]        # memory of a backward pass
    MALLOC_MMAP_THRESHOLD_=262144 python bench/speed.py phases grpo/grpo.py 4 384 1024 32768 [KEY=VALUE ...]
    python bench/speed.py ratios                           # first ratios of families of models

One thread, CPU seconds. Models are "tiny" (the shipped one), "20M" (a random Llama of 19.7 million
parameters and 32,768 ids) and "smollm2" (bench/real.py makes it). Sides alternate. `git worktree add
/tmp/before COMMIT` makes another checkout.

`rollout` samples 8 responses to each of 32 prompts of data/tiny, up to 64 tokens. With numbers, prompts have
random tokens, and a response ends at each token with a probability of 1 / 300 on both sides. Beside generate
it says where our time goes, by torch.profiler.

`trl` needs an environment with bench/requirements-trl.txt, and has a process per measurement. Both sides read
the same rows in the same micro-batches, in float32, without recomputed activations. GRPO also has trl with
all rows of a step in one pass; KL_COEF is 0.04 on both sides, rewards are all different, so every row is
trained. Memory is the peak until the last step, of the whole process and beyond what it held after the
imports. Both ask DPO's reference once, before training (trl: precompute_ref_log_probs), which is counted in.
On a CPU trl's DPO computes logits of the prompts, too; here it scores the answers alone, as it does on a GPU.

`response`: one response to 32 tokens, by the trainer of the checkout that is named; a random Qwen2 with 2
layers of width 64 and 151,936 ids. `phases`: peaks of two GRPO or PPO steps beside tools/memory.py; a random
Llama with so many layers, hidden and intermediate units, and ids. MALLOC_MMAP_THRESHOLD_ makes the process
give back what it freed. `ratios`: the models of tests/test_families.py, mean |log ratio| before an update.
"""

import ctypes
import importlib.util
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

# One thread: CPU seconds, which other programs change little
clock = time.process_time if os.environ["OMP_NUM_THREADS"] == "1" else time.perf_counter
time.perf_counter = clock  # what the trainers measure their activities by

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "data/tiny/policy"
sys.path += [str(ROOT / "tools"), str(ROOT / "tests")]
ROUNDS = 3
SHAPES = {"20M": {"vocab_size": 32768, "hidden_size": 384, "intermediate_size": 1024}}
SHAPES["20M"] |= {"num_hidden_layers": 4, "num_attention_heads": 6, "max_position_embeddings": 2048}
MODELS = {  # rows of SFT or GRPO per micro-batch (pairs: half of it), steps after the first one, rounds
    "tiny": (32, 8, 3),
    "20M": (16, 3, 3),
    "smollm2": (8, 2, 2),
}
GRPO_SIZES = {"tiny": (32, 64), "20M": (8, 64), "smollm2": (4, 48)}  # prompts a step, new tokens at most
STAGES = {  # our file, trainer and constant with the model; trl's trainer
    "grpo": ("grpo/grpo.py", "GRPOTrainer", "ACTOR_MODEL", "GRPOTrainer"),
    "sft": ("ppo/sft.py", "SFTTrainer", "ACTOR_MODEL", "SFTTrainer"),
    "reward_model": ("ppo/reward_model.py", "RewardModelTrainer", "BASE_MODEL", "RewardTrainer"),
    "dpo": ("rce/dpo.py", "DPOTrainer", "ACTOR_MODEL", "DPOTrainer"),
}
ACCUMULATION = 2  # micro-batches per step


def load(path, words=(), **constants):
    """Returns a trainer's file as a module, with the rewards/ beside it and those constants that it has."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "rewards"]:
        del sys.modules[name]
    spec = importlib.util.spec_from_file_location(f"{Path(path).stem}_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in constants.items():
        if name in module.constants():
            setattr(module, name, value)
    module.apply_overrides(words)
    return module


def random_model(folder, name):
    """Writes a Llama with random weights and the tiny tokenizer (ids beyond it decode to nothing)."""
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    ids = {f"{token}_token_id": getattr(tokenizer, f"{token}_token_id") for token in ("bos", "eos", "pad")}
    config = transformers.LlamaConfig(tie_word_embeddings=True, **ids, **SHAPES[name])
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def find_model(name, folder):
    """Returns the path of a model; "20M" is made in `folder`."""
    if name in SHAPES:
        random_model(f"{folder}/{name}", name)
    paths = {"tiny": TINY, "20M": f"{folder}/20M", "smollm2": ROOT / "data/real/smollm2"}
    return str(paths.get(name, name))


def process_bytes(name):
    """Returns the memory of this process: VmRSS is what it holds, VmHWM its peak."""
    return 1024 * int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])


def table_head(*columns):
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns), flush=True)


def table_row(*cells):
    print("| " + " | ".join(cells) + " |", flush=True)


def shown(value):
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def show(name, old, new, third=None):
    """Prints medians of two lists of seconds, their ratio with its range over rounds, and a third median."""
    ratios = [b / a for a, b in zip(old, new)]
    medians = statistics.median(old), statistics.median(new)
    spread = f"{medians[1] / medians[0]:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    table_row(name, *map(shown, medians), spread, *([shown(statistics.median(third))] if third else []))


def set_end(model, inputs, output):
    """Gives the end of a response a probability of 1 / 300 at each token."""
    end = model.config.eos_token_id
    output.logits[..., end] = -1e9
    output.logits[..., end] = output.logits.logsumexp(-1) - math.log(299)


def compare_with_generate(model="tiny", prompt_tokens=None, new_tokens=64, prompts=32):
    folder = tempfile.mkdtemp()
    options = {"ACTOR_MODEL": find_model(model, folder), "OUTPUT_DIR": f"{folder}/run", "EVAL_DATASETS": []}
    grpo = load(ROOT / "grpo/grpo.py", MAX_NEW_TOKENS=int(new_tokens), **options)
    trainer = grpo.GRPOTrainer("no")
    rows = trainer.train_rows[: int(prompts)]
    if prompt_tokens:
        for row in rows:
            row["ids"] = torch.randint(9, 80, (int(prompt_tokens),)).tolist()
        trainer.actor.register_forward_hook(set_end)
    rows = [row for row in rows for _ in range(8)]
    ids, mask = grpo.pad_left([row["ids"] for row in rows], trainer.device)
    end = trainer.end_ids[0]
    sampling = {"do_sample": True, "top_k": 0, "max_new_tokens": grpo.MAX_NEW_TOKENS, "pad_token_id": end}

    def generate_ours():
        return int(trainer.respond(rows, torch.rand(len(rows), grpo.MAX_NEW_TOKENS)).lengths.sum())

    def generate_theirs():
        with torch.no_grad():
            output = trainer.actor.generate(ids, attention_mask=mask, **sampling)[:, ids.shape[1] :]
        is_end = (output == end).int()
        return int((is_end.cumsum(1) - is_end == 0).sum())

    sides = {"generate": generate_theirs, "ours": generate_ours}
    seconds = {side: [] for side in sides}
    for number in range(ROUNDS + 1 - bool(prompt_tokens)):
        for side, function in sides.items():
            started = clock()
            tokens = function()
            if number or prompt_tokens:  # otherwise the first round warms up
                seconds[side].append((clock() - started) / tokens)
    table_head("seconds of a token", "generate", "ours", "ours / generate")
    show(model, *seconds.values())
    if prompt_tokens:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            generate_ours()
        times = Counter({event.key: event.self_cpu_time_total for event in profile.key_averages()})
        for name, time_of_all in times.most_common(8):
            print(f"{time_of_all / times.total():7.1%}  {name}")


def write_rows(path, stage, rows_per_step, steps):
    """Writes chats of data/tiny, sorted by length within a step, as our trainers sort them."""
    source, columns = "pairs.jsonl", {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    if stage == "sft":
        source, columns = "demonstrations.jsonl", {"problem": "prompt", "solution": "completion"}
    if stage == "grpo":
        source, columns = "train.jsonl", {"problem": "prompt"}
    rows = [json.loads(line) for line in (ROOT / "data/tiny" / source).read_text().splitlines()]
    with open(path, "w") as file:
        for first in range(0, rows_per_step * steps, rows_per_step):
            for row in sorted(rows[first : first + rows_per_step], key=lambda row: -len(str(row))):
                chats = {}
                for name, column in columns.items():
                    role = "user" if column == "prompt" else "assistant"
                    chats[column] = [{"role": role, "content": row[name]}]
                file.write(json.dumps(chats) + "\n")


def timed(method, seconds):
    """Returns a method that also adds its seconds to a list."""

    def call(*arguments):
        started = clock()
        result = method(*arguments)
        seconds.append(clock() - started)
        return result

    return call


def reward(prompts, responses, answers):
    """All rewards of a group differ, so every row is trained."""
    return [float(number % 8) for number in range(len(responses))]


def our_trainer(stage, model, data, sizes, folder, stamp, seconds):
    file, name, model_constant, _ = STAGES[stage]
    script = load(ROOT / file)
    stamp()
    columns = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    if stage == "sft":
        columns = {"input": "prompt", "output": "completion"}
    if stage == "grpo":
        columns = {"input": "prompt"}
    settings = {"TRAIN_DATASETS": [{"path": data, "type": "jsonl", **columns}], "EVAL_DATASETS": []}
    settings |= {"BATCH_SIZE": sizes.micro, "GRADIENT_ACCUMULATION_STEPS": sizes.parts, "NUM_EPOCHS": 1}
    settings |= {"LEARNING_RATE": 1e-5, "OUTPUT_DIR": f"{folder}/run"}
    if stage == "grpo":
        settings |= {"BATCH_SIZE": sizes.prompts, "GRADIENT_ACCUMULATION_STEPS": 1, "KL_COEF": 0.04}
        settings |= {"MICRO_BATCH_ROWS": sizes.micro, "MAX_NEW_TOKENS": sizes.tokens, "MAX_STEPS": None}
        settings |= {"REWARD_FUNCTIONS": [(reward, 1.0)], "EVAL_EVERY_N_STEPS": 0, "SAVE_EVERY_N_STEPS": 0}
    for key, value in {**settings, model_constant: model}.items():
        assert key in script.constants(), key
        setattr(script, key, value)
    if stage == "dpo":
        script.DPOTrainer.add_reference = timed(script.DPOTrainer.add_reference, seconds["reference"])
    trainer = getattr(script, name)("no")
    record, rows = trainer.record, iter(trainer.train_rows)
    trainer.next_rows = trainer.next_prompts = lambda: list(itertools.islice(rows, sizes.prompts))

    def record_and_stamp(batch, *arguments):
        record(batch, *arguments)
        for part, value in getattr(trainer, "seconds", {}).items():
            seconds[part].append(value)
        stamp()

    trainer.record = record_and_stamp
    return trainer


def trl_trainer(stage, model, data, sizes, folder, stamp, seconds):
    import datasets
    import trl
    import trl.trainer.utils

    name = STAGES[stage][3]
    trainer_class, config_class = getattr(trl, name), getattr(trl, name.replace("Trainer", "Config"))
    stamp()
    trl.trainer.utils._use_triton = lambda device: True  # logits of the answers alone
    settings = {"per_device_train_batch_size": sizes.micro, "gradient_accumulation_steps": sizes.parts}
    settings |= {"num_train_epochs": 1, "learning_rate": 1e-5, "output_dir": folder, "save_strategy": "no"}
    settings |= {"bf16": False, "use_cpu": True, "gradient_checkpointing": False}
    settings |= {"report_to": [], "disable_tqdm": True}
    extra = {}
    if stage == "grpo":
        settings |= {"num_generations": 8, "max_completion_length": sizes.tokens, "beta": 0.04, "top_k": 0}
        settings |= {"shuffle_dataset": False, "loss_type": "dapo"}
        extra = {"reward_funcs": lambda prompts, completions, **_: reward(prompts, completions, None)}
        for method, part in (("_generate", "rollout"), ("_generate_and_score_completions", "score")):
            setattr(trainer_class, method, timed(getattr(trainer_class, method), seconds[part]))
    else:
        settings["train_sampling_strategy"] = "sequential"
    if stage == "reward_model":
        settings["center_rewards_coefficient"] = 0.01
    if stage == "dpo":
        settings["precompute_ref_log_probs"] = True
        precompute = trainer_class._precompute_ref_logps
        trainer_class._precompute_ref_logps = timed(precompute, seconds["reference"])

    class Stamp(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            stamp()

    rows = datasets.Dataset.from_list([json.loads(line) for line in open(data)])
    extra |= {"args": config_class(**settings), "train_dataset": rows, "callbacks": [Stamp()]}
    return trainer_class(model, **extra)


def measure(side, stage, model, data, sizes):
    """Trains once. Prints a line of JSON: seconds per step after the first, and memory in MiB."""
    sizes = SimpleNamespace(**json.loads(sizes))
    if side == "trl, all at once":
        sizes.micro, sizes.parts = sizes.micro * sizes.parts, 1
    stamps, peaks = [], []  # after the imports, and after each step
    seconds = {"rollout": [], "score": [], "update": [], "reference": []}

    def stamp():
        stamps.append(clock())
        peaks.append(process_bytes("VmHWM") / 2**20)

    with tempfile.TemporaryDirectory() as folder:
        make_trainer = our_trainer if side == "ours" else trl_trainer
        make_trainer(stage, model, data, sizes, folder, stamp, seconds).train()
    steps = [end - start for start, end in itertools.pairwise(stamps[1:])]
    result = {"seconds": statistics.median(steps) + sum(seconds["reference"]) / (len(steps) + 1)}
    if stage == "grpo":
        parts = {part: statistics.median(values[1:]) for part, values in seconds.items() if values}
        if side != "ours":
            parts["score"] -= parts["rollout"]  # trl's method does both
        parts["update"] = result["seconds"] - parts["rollout"] - parts["score"]
        result |= parts
    print(json.dumps({**result, "peak memory": peaks[-1], "beyond imports": peaks[-1] - peaks[0]}))


def compare_with_trl(*words):
    if unknown := set(words) - {*MODELS, *STAGES}:
        sys.exit(f"unknown: {', '.join(unknown)}\n{__doc__}")
    table_head("a step: seconds, MiB", "trl", "ours", "ours / trl (range of rounds)", "trl, all rows at once")
    with tempfile.TemporaryDirectory() as folder:
        for model in [word for word in words if word in MODELS] or MODELS:
            path = find_model(model, folder)
            for stage in [word for word in words if word in STAGES] or STAGES:
                rows, steps, rounds = MODELS[model]
                sizes = {"micro": rows if stage in ("sft", "grpo") else rows // 2, "parts": 2}
                sizes["prompts"] = sizes["micro"] * sizes["parts"]
                if stage == "grpo":
                    sizes["prompts"], sizes["tokens"] = GRPO_SIZES[model]
                    sizes["parts"] = 8 * sizes["prompts"] // sizes["micro"]
                data = f"{folder}/data.jsonl"
                write_rows(data, stage, sizes["prompts"], steps + 1)
                sides = ["trl", "ours"] + ["trl, all at once"] * (stage == "grpo")
                results = {side: [] for side in sides}
                for number in range(rounds):
                    for side in sides if number % 2 else reversed(sides):
                        command = [sys.executable, __file__, "measure", side, stage, path, data]
                        command.append(json.dumps(sizes))
                        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                        results[side].append(json.loads(output.splitlines()[-1]))
                for key in results["ours"][0]:
                    values = [[result[key] for result in results[side]] for side in sides]
                    show(f"{model}, {stage}, {key}", *values)


# ---------------------------------------------------------------- beside another checkout, and memory


def forget_peak():
    """Gives free memory back; the peak VmHWM begins again with what is held now."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def make_trainer(module):
    trainer = next(x for name, x in vars(module).items() if name.endswith("Trainer"))("no")
    trainer.run.open(trainer.state, *[False] * (module.Run.open.__code__.co_argcount - 2))
    trainer.state.step = 1
    trainer.seed_step()
    return trainer


def response(root, path, tokens, *words):
    module = load(f"{root}/{path}", words)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 151_936, "max_position_embeddings": 16_384}
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**sizes)).eval()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = SimpleNamespace(rows=[{"ids": list(range(5, 37)), "id": 0}])
    batch.ids, batch.lengths = torch.randint(5, 151_900, (1, int(tokens))), torch.tensor([int(tokens)])
    forget_peak()
    before = process_bytes("VmRSS")
    logprobs, entropies = module.logprobs_and_entropy(model, batch, torch.tensor([0]))
    loss = -logprobs.sum()
    if getattr(module, "ENTROPY_COEF", 0):
        loss = loss - module.ENTROPY_COEF * entropies.sum()
    loss.backward()
    peak = process_bytes("VmHWM") - before
    print(f"{path} {tokens} {' '.join(words)}: {peak / 2**30:.2f} GiB beyond the model and its gradients")


def phases(path, layers, hidden, intermediate, vocabulary, *words):
    import memory

    folder = tempfile.mkdtemp()
    shape = {"num_hidden_layers": int(layers), "hidden_size": int(hidden), "vocab_size": int(vocabulary)}
    shape |= {"intermediate_size": int(intermediate), "num_attention_heads": int(hidden) // 64}
    SHAPES["random"] = shape
    random_model(f"{folder}/model", "random")
    options = {"ACTOR_MODEL": f"{folder}/model", "OUTPUT_DIR": f"{folder}/run", "EVAL_DATASETS": []}
    module = load(ROOT / path, words, **options, REWARD_MODEL=None)
    trainer = make_trainer(module)
    models = [trainer.actor, trainer.reference or trainer.actor, getattr(trainer, "critic", trainer.actor)]
    weights = {p.data_ptr(): p.nbytes for model in models for p in model.parameters()}
    forget_peak()
    start = process_bytes("VmRSS") - sum(weights.values())
    for row in trainer.train_rows:
        row["ids"] = torch.randint(9, 80, (module.MAX_PROMPT_TOKENS,)).tolist()

    def never_end(model, inputs, output):
        output.logits[..., trainer.end_ids] = -1e9

    trainer.actor.register_forward_hook(never_end)
    trainer.compute_rewards = lambda prompts, *_, **__: torch.rand(len(prompts))
    respond = trainer.respond
    peaks = {}

    def measure_respond(*arguments):
        forget_peak()
        batch = respond(*arguments)
        peaks["rollout"] = process_bytes("VmHWM") - start
        forget_peak()
        return batch

    trainer.respond = measure_respond
    for first in (0, module.BATCH_SIZE):  # in the second step the optimizer has its state
        batch = trainer.rollout(trainer.train_rows[first : first + module.BATCH_SIZE])
        peaks["scoring"] = process_bytes("VmHWM") - start
        trainer.compute_advantages(batch)
        forget_peak()
        trainer.update(batch)
        peaks["update"] = process_bytes("VmHWM") - start
    constants = SimpleNamespace(**module.constants() | options)
    for phase, computed in memory.memory(constants).items():
        print(f"{phase}: {peaks[phase] / 1e6:,.0f} MB, computed {computed / 1e6:,.0f} MB")


def alternate(root, model, constants, measure):
    """Prints measure(trainer) of the checkout `root` and of this one, in two rounds that alternate."""
    folder = tempfile.mkdtemp()
    trainers = {}
    for name, place in (("before", root), ("now", ROOT)):
        options = {"ACTOR_MODEL": find_model(model, folder), "OUTPUT_DIR": f"{folder}/{name}"}
        module = load(f"{place}/grpo/grpo.py", **constants, **options, EVAL_DATASETS=[])
        sys.modules[name] = module  # which make_trainer's annotations are looked up in
        trainers[name] = make_trainer(module)
    for order in (("before", "now"), ("now", "before")):
        seconds = {name: measure(trainers[name]) for name in order}
        ratio = seconds["now"] / seconds["before"]
        print(f"before {seconds['before']:.4g} s, now {seconds['now']:.4g} s, now / before {ratio:.3f}")


def rollout_before(root, model, prompt_tokens, new_tokens, prompts):
    ids = torch.randint(9, 80, (int(prompts), int(prompt_tokens))).tolist()
    uniform = torch.rand(8 * int(prompts), int(new_tokens))

    def measure(trainer):
        hook = trainer.actor.register_forward_hook(set_end)
        rows = [{**trainer.train_rows[0], "ids": prompt} for prompt in ids for _ in range(8)]
        started = time.process_time()
        tokens = int(trainer.respond(rows, uniform).lengths.sum())
        hook.remove()
        return (time.process_time() - started) / tokens

    alternate(root, model, {"MAX_NEW_TOKENS": int(new_tokens)}, measure)


def step(root, model):
    prompts, new_tokens = GRPO_SIZES[model]
    data = f"{tempfile.mkdtemp()}/rows.jsonl"
    write_rows(data, "grpo", prompts, 2)
    constants = {"BATCH_SIZE": prompts, "MAX_NEW_TOKENS": new_tokens, "MICRO_BATCH_ROWS": MODELS[model][0]}
    constants |= {"KL_COEF": 0.04, "LEARNING_RATE": 1e-5, "REWARD_FUNCTIONS": [(reward, 1.0)]}
    constants["TRAIN_DATASETS"] = [{"path": data, "type": "jsonl", "input": "prompt"}]

    def measure(trainer):
        started = time.process_time()
        batch = trainer.rollout(trainer.train_rows[:prompts])
        trainer.compute_advantages(batch)
        trainer.update(batch)
        print(" ".join(f"{name} {x:.2f}" for name, x in trainer.seconds.items()), end="; ")
        trainer.seconds.clear()
        return time.process_time() - started

    alternate(root, model, constants, measure)


def ratios():
    import conftest
    import test_families

    for family in test_families.FAMILIES:
        shown = []
        for dtype in ("float32", "bfloat16"):
            folder = Path(tempfile.mkdtemp())
            test_families.random_model(family).save_pretrained(folder / "model")
            transformers.AutoTokenizer.from_pretrained(TINY).save_pretrained(folder / "model")
            options = {"ACTOR_MODEL": str(folder / "model"), "OUTPUT_DIR": str(folder / "run")}
            options |= {"DTYPE": dtype, "TEMPERATURE": 2.0, "GROUP_SIZE": 8, "MAX_NEW_TOKENS": 24}
            module = load(
                ROOT / "grpo/grpo.py", **conftest.small("grpo/grpo.py", **options), EVAL_DATASETS=[]
            )
            trainer = make_trainer(module)
            batch = trainer.rollout(trainer.next_prompts())
            rows = torch.arange(len(batch.rows))
            logprobs, _ = module.logprobs_and_entropy(trainer.actor, batch, rows)
            batch.logprobs, batch.mask = [x[:, : logprobs.shape[1]] for x in (batch.logprobs, batch.mask)]
            difference = ((logprobs.detach() - batch.logprobs).abs() * batch.mask).sum() / batch.mask.sum()
            shown.append(f"{dtype} {difference:.1e}")
        entropy = batch.entropies.sum() / batch.mask.sum()
        print(f"{family}: {', '.join(shown)}; entropy {entropy:.2f}")


def rollout(*words):
    if words and Path(words[0]).is_dir():
        rollout_before(*words)
    else:
        compare_with_generate(*words)


def main(what=None, *words):
    commands = {f.__name__: f for f in (rollout, step, measure, response, phases, ratios)}
    commands["trl"] = compare_with_trl
    if what not in commands:
        sys.exit(__doc__)
    commands[what](*words)


if __name__ == "__main__":
    main(*sys.argv[1:])
