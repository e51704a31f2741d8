"""Speed and memory side by side, from one run on this machine:

    python bench/speed.py                      # everything but old, about 25 minutes on 2 cores
    python bench/speed.py rollout growth       # some of: trl rollout phases growth gpu
    python bench/speed.py old c193812          # against an older commit, about 40 minutes
    python bench/speed.py phases --quick       # fewer rounds and steps: does it run, not how fast is it
    python bench/speed.py smollm2              # trl, on the model that bench/real.py makes, about 12 minutes

    trl         a GRPO step against trl 1.16.0's on the same work, on the CPU (needs
                bench/requirements-trl.txt, in an environment of its own). trl's update takes all rows in one
                pass; ours cuts them into micro-batches of at most 64 rows, which needs less memory
    rollout     our generate() against transformers' model.generate: lengths even and heavy-tailed, prompts of
                32 and 512 tokens
    smollm2     trl on SmolLM2-135M-Instruct, 8 word problems x 8 responses of at most 48 tokens, and a reward
                that tells all responses apart, so that every row is trained; not among everything
    phases      seconds of rollout, scoring and update of GRPO and PPO at equal samples, all rows trained;
                model FLOPs against this machine's matrix products
    growth      time and memory as the samples of a step grow from 64 to 1,024 while BATCH_SIZE stays
    gpu         Qwen2.5-0.5B's shape with random weights, bf16, where there is a GPU
    old COMMIT  the default step of GRPO and of PPO, with the shipped model and 20M, against that commit's
                files, with today's rewards/ and data/; wall time, and processor time, which other programs
                on the machine change less

Every figure comes from a fresh process; sides alternate, the table has medians of the rounds. "20M" is a
Llama of 19.7 million random parameters with 32,768 ids, "tiny" the shipped one. Peak memory is the whole
process's, the libraries' 0.5 GB included.
"""

import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
import itertools

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "data/tiny/policy"
WARM_UP = 2  # steps that are not counted
os.environ["HF_HUB_OFFLINE"] = "1"

SHAPES = {
    "20M": {
        "vocab_size": 32768,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "max_position_embeddings": 2048,
    },
    "qwen": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
}


# ---------------------------------------------------------------- what a child process measures


def trainer_file(name, root=ROOT):
    return f"{root}/{name}/{name}.py"


def load(path):
    """A trainer's file as a module."""
    spec = importlib.util.spec_from_file_location(f"{Path(path).stem}_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_model(folder, name):
    """A Llama or Qwen2 with random weights and the tiny tokenizer (ids beyond it decode to nothing)."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = {f"{token}_token_id": getattr(tokenizer, f"{token}_token_id") for token in ("bos", "eos", "pad")}
    config = Qwen2Config if name == "qwen" else LlamaConfig
    model = Qwen2ForCausalLM if name == "qwen" else LlamaForCausalLM
    model(config(tie_word_embeddings=True, **ids, **SHAPES[name])).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def peak():
    """Most memory this process held, MiB: the GPU's where there is one."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_trainer(path, constants):
    """Train with the file at path: its module, its trainer, its metrics of each step and when each ended, as
    (wall time, processor time)."""
    module = load(path)
    unmeasured = {"EVAL_DATASETS": [], "SAVE_EVERY_N_STEPS": 0, "RESUME": "no"}
    for key, value in {**unmeasured, **constants}.items():
        assert hasattr(module, key), key
        setattr(module, key, value)
    stamps = []
    with tempfile.TemporaryDirectory() as folder:
        module.OUTPUT_DIR = folder
        trainer = getattr(module, Path(path).stem.upper() + "Trainer")()
        step_done = "record" if hasattr(trainer, "record") else "log_step"  # its name in older commits
        record = getattr(trainer, step_done)

        def record_and_stamp(batch, metrics):
            record(batch, metrics)
            stamps.append((time.perf_counter(), time.process_time()))

        setattr(trainer, step_done, record_and_stamp)
        trainer.train()
        with open(f"{folder}/logs/metrics.jsonl") as file:
            records = [json.loads(line) for line in file]
    return module, trainer, [r for r in records if r["phase"] == "train"], stamps


def seconds_a_step(stamps, clock=0):
    """Median time from one step's end to the next one's, after the first steps. clock: 0 for wall time, 1 for
    processor time."""
    counted = [stamp[clock] for stamp in stamps[WARM_UP - 1 :]]
    return statistics.median(after - before for before, after in itertools.pairwise(counted))


def train_steps(script, model, seed=1, **constants):
    """Run a trainer: medians of its own metrics after the first steps, the wall time of a step, FLOPs and the
    reward curve."""
    common = {"SEED": seed, "ACTOR_MODEL": str(model), "REWARD_MODEL": None, "LEARNING_RATE": 1e-4}
    if str(model) != str(TINY):
        common["REWARD_FUNCTIONS"] = [(distinct_letters, 1.0)]
    constants = {**common, "MAX_NEW_TOKENS": 40, **constants}
    module, trainer, records, stamps = run_trainer(trainer_file(script), constants)
    counted = records[WARM_UP:]
    keys = ("seconds/rollout", "seconds/score", "seconds/update", "response_length")
    medians = {key: statistics.median(r[key] for r in counted) for key in keys}
    samples = module.BATCH_SIZE * module.GRADIENT_ACCUMULATION_STEPS * module.GROUP_SIZE
    responses = samples * medians["response_length"]  # tokens of them
    prompts = samples / module.GROUP_SIZE * statistics.mean(len(row["ids"]) for row in trainer.train_rows)
    # Useful work alone: 2 FLOPs a weight and token forward, 4 backward; each prompt once; the head where a
    # response's token is predicted
    matrices = [(name, p.numel()) for name, p in trainer.actor.named_parameters() if p.dim() == 2]
    body = sum(count for name, count in matrices if "embed" not in name and "lm_head" not in name)
    head = trainer.actor.get_output_embeddings().weight.numel()
    actor_forward = 2 * (body * (prompts + responses) + head * responses)
    critic_forward = 2 * body * (prompts + responses) if script == "ppo" else 0
    passes = 1 + 3 * module.GROUP_EPOCHS  # a backward pass is two forward ones
    flops = passes * (actor_forward + critic_forward)
    if trainer.reference:
        flops += actor_forward
    seconds = seconds_a_step(stamps)
    return {
        "seconds": seconds,
        "tokens_per_second": responses / seconds,
        "peak": peak(),
        "curve": [r["reward"] for r in records],
        "flops": flops,
        **medians,
    }


def default_steps(path, steps, seed, model=None):
    """Times of a step of the trainer at path as its constants are, and what it held. model: the folder of one
    of random weights, in place of the default."""
    constants = {"SEED": seed, "MAX_STEPS": WARM_UP + steps}
    if model:
        functions = [(distinct_letters, 1.0)]
        constants |= {"ACTOR_MODEL": model, "REWARD_MODEL": None, "REWARD_FUNCTIONS": functions}
    module, _, records, stamps = run_trainer(path, constants)
    samples = module.BATCH_SIZE * module.GRADIENT_ACCUMULATION_STEPS * module.GROUP_SIZE
    length = statistics.median(r["response_length"] for r in records[WARM_UP:])
    seconds = seconds_a_step(stamps)
    rewards = [r["reward"] for r in records]
    return {
        "seconds": seconds,
        "processor": seconds_a_step(stamps, 1),
        "tokens_per_second": samples * length / seconds,
        "peak": peak(),
        "curve": rewards,
    }


def hide_gpu():
    """Makes a process compute on the CPU. It must be called before torch is imported."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def ours(model, prompts, steps, seed, **constants):
    """A GRPO step of ours, on the CPU as trl's."""
    hide_gpu()
    own = {"BATCH_SIZE": prompts, "GROUP_SIZE": 8, "MAX_STEPS": WARM_UP + steps}
    return train_steps("grpo", model, seed, **own, **constants)


def distinct_letters(prompts, responses, answers):
    """How many different characters a response has: groups whose rewards are all equal, as a random model's
    would be, GRPO's update leaves out."""
    return [float(len(set(response))) for response in responses]


def trls(model, prompts, steps, seed, **constants):
    """The same step of trl's. It updates on all rows in one pass, ours on micro-batches."""
    hide_gpu()
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    sys.path.insert(0, str(ROOT))
    import rewards

    data = load_dataset("json", data_files=str(ROOT / "data/tiny/train.jsonl"), split="train")
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    data = data.map(
        lambda row: {
            "prompt": [{"role": "user", "content": row["problem"]}] if constants else row["problem"] + "\n"
        }
    )
    stamps = []

    class Stamp(TrainerCallback):
        def on_step_end(self, *_, **__):
            stamps.append((time.perf_counter(), time.process_time()))

    def reward(prompts, completions, solution, **_):
        if model != str(TINY):
            texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
            return distinct_letters(prompts, texts, solution)
        return rewards.exact_answer(prompts, completions, solution)

    folder = tempfile.TemporaryDirectory()
    config = GRPOConfig(
        output_dir=folder.name,
        seed=seed,
        per_device_train_batch_size=prompts * 8,
        gradient_accumulation_steps=1,
        num_generations=8,
        max_completion_length=constants.get("MAX_NEW_TOKENS", 40),
        beta=0.0,
        learning_rate=constants.get("LEARNING_RATE", 1e-4),
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type="dapo",
        max_steps=WARM_UP + steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        reward,
        config,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Stamp()],
    )
    trainer.train()
    folder.cleanup()
    logs = [r for r in trainer.state.log_history if "reward" in r]
    seconds = seconds_a_step(stamps)
    tokens = statistics.median(r["completions/mean_length"] for r in logs[WARM_UP:]) * prompts * 8
    curve = [r["reward"] for r in logs]
    return {"seconds": seconds, "tokens_per_second": tokens / seconds, "peak": peak(), "curve": curve}


def rollout(path, prompt_tokens, lengths, prompts, rounds, new_tokens, shared=True):
    """Tokens a second of our generate() and of transformers' on the same prompts and the same law of lengths,
    alternating."""
    grpo = load(trainer_file("grpo"))
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    our_model = grpo.load_model(AutoModelForCausalLM, path, "ACTOR_MODEL", device)
    if shared:
        grpo._SHARED_DECODING.add(our_model)  # as check_models() finds
    their_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to(device)
    eos = their_model.config.eos_token_id

    def end_by_law(module, args, kwargs, out):
        """Make P(length > t) = (20 / (t + 20))^1.5, a heavy tail with mean 40, or let no response end before
        the last token."""
        t = (kwargs["position_ids"][:, -1:] - prompt_tokens + 1).clamp(min=0).float()
        chance = torch.full_like(t, 1e-9)
        if lengths == "heavy":
            chance = 1 - ((t + 20) / (t + 21)) ** 1.5
        logits = out.logits[:, -1]
        logits[:, eos] = -1e30
        others = logits.logsumexp(-1, keepdim=True)
        logits[:, eos : eos + 1] = others + (chance / (1 - chance)).log()
        out.logits = logits[:, None]
        return out

    for model in (our_model, their_model):
        model.register_forward_hook(end_by_law, with_kwargs=True)
    ids = [torch.randint(3, 80, (prompt_tokens,)).tolist() for _ in range(prompts)]
    repeated = torch.tensor([row for row in ids for _ in range(8)], device=device)
    eos_ids = torch.tensor([eos], device=device)

    def generate_ours():
        uniform = torch.rand(prompts * 8, new_tokens, device=device)
        _, response_lengths, *_ = grpo.generate(our_model, ids, uniform, 8, new_tokens, 1.0, eos_ids, 0)
        return int(response_lengths.sum())

    def generate_theirs():
        options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
        mask = torch.ones_like(repeated)
        with torch.no_grad():
            out = their_model.generate(repeated, attention_mask=mask, max_new_tokens=new_tokens, **options)
        ended = (out[:, prompt_tokens:] == eos).long()
        return int((ended.cumsum(1) - ended == 0).sum())

    rates = {"ours": [], "generate": []}
    for number in range(rounds + 1):
        for side, generate in (("ours", generate_ours), ("generate", generate_theirs)):
            started = time.perf_counter()
            tokens = generate()
            if device == "cuda":
                torch.cuda.synchronize()
            if number:  # the first round warms up
                rates[side].append(tokens / (time.perf_counter() - started))
    return {side: statistics.median(values) for side, values in rates.items()}


def matrix_rate():
    """FLOPs a second of a float32 (bf16 on a GPU) matrix product, the best of 20."""
    import torch

    gpu = torch.cuda.is_available()
    device, dtype, size = ("cuda", torch.bfloat16, 8192) if gpu else ("cpu", torch.float32, 1024)
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = 0
    for _ in range(20):
        started = time.perf_counter()
        a @ a
        if gpu:
            torch.cuda.synchronize()
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


# ---------------------------------------------------------------- tables


def child(function, *args, **kwargs):
    """What the function returns in a fresh process."""
    words = [sys.executable, __file__, "child", function, json.dumps([args, kwargs])]
    done = subprocess.run(words, capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        sys.exit(f"{function}{args} failed:\n{done.stderr[-3000:]}")
    return json.loads(line.removeprefix("RESULT "))


def table_head(*columns):
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns), flush=True)


def table_row(*cells):
    print("| " + " | ".join(cells) + " |", flush=True)


def shown(value):
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def spread(values):
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def compare(results):
    """Medians of two sides, {side: [result of each round]}, and of the ratios of neighbours in time: the
    machine's speed drifts."""
    first, second = results
    table_head("", first, second, f"{first} / {second}, median of rounds (least to most)")
    titles = {"seconds": "seconds a step", "processor": "processor seconds a step"}
    titles |= {"tokens_per_second": "tokens a second", "peak": "peak memory, MiB"}
    for key, title in titles.items():
        if any(key not in r for side in results.values() for r in side):
            continue
        medians = (shown(statistics.median(r[key] for r in results[side])) for side in results)
        ratios = sorted(a[key] / b[key] for a, b in zip(*results.values()))
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        table_row(title, *medians, ratio)


def alternate(rounds, sides):
    """{side: [what it measured in each round]}; a side is (function, its arguments), the round's number its
    seed. Every other round begins with the other side."""
    results = {side: [] for side in sides}
    for number in range(1, rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            function, arguments = sides[side]
            results[side].append(child(function, seed=number, **arguments))
    return results


# ---------------------------------------------------------------- the sections


def section_trl(models, quick):
    if not importlib.util.find_spec("trl"):
        print("trl is not installed here: pip install -r bench/requirements-trl.txt\n")
        return
    for name, prompts, steps, rounds in (("tiny", 32, 20, 5), ("20M", 8, 3, 3)):
        if quick and name != "tiny":
            continue
        rounds = 1 if quick else rounds
        arguments = {"model": models[name], "prompts": prompts, "steps": steps}
        results = alternate(rounds, {"ours": ("ours", arguments), "trl": ("trls", arguments)})
        work = f"{prompts} prompts x 8 responses of at most 40 tokens"
        print(f"GRPO, {name}, {work}, {steps} steps, medians of {rounds} rounds\n")
        compare(results)
        if name == "tiny":
            print()
            table_head("reward at step", f"ours, mean of {rounds} seeds (least to most)", "trl")
            for step in (1, 7, 13, 19, 22):
                curves = ([r["curve"][step - 1] for r in results[side]] for side in results)
                table_row(str(step), *map(spread, curves))
        print(flush=True)


def section_smollm2(models, quick):
    model = ROOT / "data/real/smollm2"
    if not model.exists() or not importlib.util.find_spec("trl"):
        print("smollm2 needs trl (bench/requirements-trl.txt) and the model (python bench/real.py get)\n")
        return
    arguments = {"model": str(model), "prompts": 8, "steps": 2, "MAX_NEW_TOKENS": 48, "LEARNING_RATE": 1e-5}
    rounds = 1 if quick else 2
    results = alternate(rounds, {"ours": ("ours", arguments), "trl": ("trls", arguments)})
    print(f"GRPO, SmolLM2-135M-Instruct, 8 prompts x 8 responses of at most 48 tokens, {rounds} rounds\n")
    compare(results)
    print(flush=True)


def section_rollout(models, quick):
    print("Rollout, 8 responses a prompt, response tokens a second\n")
    table_head("model", "prompts", "tokens of each", "lengths", "ours", "generate", "ours / generate")
    for name, prompts, rounds in (("tiny", 8, 3), ("tiny", 32, 3), ("20M", 8, 2)):
        for prompt_tokens in (32, 512):
            for lengths, new_tokens in (("even", 64), ("heavy", 256)):
                minutes = prompts == 32 or (name == "20M" and lengths == "heavy")  # of generate()
                if (prompt_tokens == 512 and minutes) or (quick and (name != "tiny" or lengths == "heavy")):
                    continue
                rounds = 1 if quick else rounds
                r = child("rollout", models[name], prompt_tokens, lengths, prompts, rounds, new_tokens)
                what = [name, str(prompts), str(prompt_tokens), f"{lengths}, at most {new_tokens}"]
                ratio = r["ours"] / r["generate"]
                table_row(*what, f"{r['ours']:,.0f}", f"{r['generate']:,.0f}", f"{ratio:.1f}")
    print()


def phase_head():
    table_head("", "rollout", "score", "update", "step", "peak MiB", "share of that rate")


def phase_row(title, r, rate):
    phases = [f"{r[key]:.3f}" for key in ("seconds/rollout", "seconds/score", "seconds/update", "seconds")]
    table_row(title, *phases, f"{r['peak']:,.0f}", f"{r['flops'] / r['seconds'] / rate:.0%}")


def section_phases(models, quick):
    rate = child("matrix_rate")
    print(f"Phases of a step, seconds; matrix products reach {rate / 1e9:,.0f} GFLOP/s here\n")
    phase_head()
    passes = {"GRADIENT_ACCUMULATION_STEPS": 1, "GROUP_EPOCHS": 1, "MINI_BATCHES": 1}
    for name, prompts, steps in (("tiny", 32, 10), ("20M", 8, 4)):
        if quick and name != "tiny":
            continue
        steps = 2 if quick else steps
        for script in ("grpo", "ppo"):
            work = {"BATCH_SIZE": prompts, "GROUP_SIZE": 8, "MAX_STEPS": WARM_UP + steps, **passes}
            if script == "grpo":
                work["SKIP_FLAT_GROUPS"] = False  # the FLOPs count all rows
            r = child("train_steps", script, models[name], **work)
            phase_row(f"{script}, {name}, {prompts * 8} samples", r, rate)
    print()


def section_growth(models, quick):
    print("Growth, GRPO, BATCH_SIZE 8, GROUP_SIZE 8\n")
    table_head("model", "samples a step", "seconds", "milliseconds a sample", "peak MiB")
    for name, sizes, steps in (("tiny", (1, 4, 16), 6), ("20M", (1, 4), 4)):
        if quick and name != "tiny":
            continue
        for batches in sizes[:2] if quick else sizes:
            work = {"BATCH_SIZE": 8, "GROUP_SIZE": 8, "GRADIENT_ACCUMULATION_STEPS": batches}
            r = child("train_steps", "grpo", models[name], MAX_STEPS=4 if quick else steps, **work)
            samples = 64 * batches
            each = 1000 * r["seconds"] / samples
            table_row(name, f"{samples:,}", f"{r['seconds']:.2f}", f"{each:.1f}", f"{r['peak']:,.0f}")
    print()


def section_gpu(models, quick):
    import torch

    if not torch.cuda.is_available():
        print("No GPU here: its section is left out\n")
        return
    rate = child("matrix_rate")
    what = "Qwen2.5-0.5B's shape, random weights, bf16"
    reach = f"matrix products reach {rate / 1e12:,.0f} TFLOP/s"
    print(f"{torch.cuda.get_device_name()}, {what}; {reach}; peak is of GPU memory\n")
    phase_head()
    for tokens in (256,) if quick else (256, 1024):
        work = {"BATCH_SIZE": 16, "GROUP_SIZE": 8, "MAX_STEPS": 6, "MAX_NEW_TOKENS": tokens}
        r = child("train_steps", "grpo", models["qwen"], **work, DTYPE="bfloat16", LEARNING_RATE=1e-6)
        phase_row(f"grpo, 128 samples of {tokens} tokens", r, rate)
    for prompt_tokens in (32, 512):
        for lengths in ("even",) if quick else ("even", "heavy"):
            r = child("rollout", models["qwen"], prompt_tokens, lengths, 16, 2, 256)
            rates = f"ours {r['ours']:,.0f}, generate {r['generate']:,.0f} tokens a second"
            ratio = r["ours"] / r["generate"]
            print(f"rollout, float32, prompt {prompt_tokens}, {lengths}: {rates}, {ratio:.1f}", flush=True)
    print()


def section_old(commit, models, quick):
    """The default step, with the shipped model and with 20M, now against a commit's. The same seed is the
    same work on both sides, if what the trainers compute has not changed: their rewards are compared."""
    rounds = 1 if quick else 5
    steps = 2 if quick else 10
    with tempfile.TemporaryDirectory() as folder:
        for shared in ("rewards", "data"):
            os.symlink(ROOT / shared, f"{folder}/{shared}")
        for script in ("grpo", "ppo"):
            source = f"{commit}:{script}/{script}.py"
            git = subprocess.run(["git", "-C", ROOT, "show", source], capture_output=True)
            if git.returncode:
                sys.exit(f"git show {source}: {git.stderr.decode().strip()}")
            old_file = Path(trainer_file(script, folder))
            old_file.parent.mkdir()
            old_file.write_bytes(git.stdout)
            files = {"now": trainer_file(script), commit: str(old_file)}
            for name, model in (("the shipped model", None), ("20M", models["20M"])):
                given = {"steps": steps if model is None else steps // 2, "model": model}
                sides = {side: ("default_steps", {"path": path, **given}) for side, path in files.items()}
                results = alternate(rounds, sides)
                work = f"{given['steps']} steps after {WARM_UP}, {rounds} rounds"
                print(f"{script}, its default step, {name}, {work}\n")
                compare(results)
                pairs = [(a, b) for x, y in zip(*results.values()) for a, b in zip(x["curve"], y["curve"])]
                apart = max(abs(a - b) for a, b in pairs)
                print(f"\nrewards of the steps differ by {apart:.1g} at most\n", flush=True)


def main():
    if sys.argv[1:2] == ["child"]:
        args, kwargs = json.loads(sys.argv[3])
        result = globals()[sys.argv[2]](*args, **kwargs)
        print("\nRESULT " + json.dumps(result))
        return
    words = [word for word in sys.argv[1:] if word != "--quick"]
    quick = "--quick" in sys.argv
    every = ["trl", "rollout", "phases", "growth", "gpu", "smollm2"]
    commit = None
    if "old" in words:
        at = words.index("old")
        if at + 1 == len(words):
            sys.exit("old needs a commit: python bench/speed.py old c193812")
        commit = words[at + 1]
        del words[at : at + 2]
    elif not words:
        words = every[:-1]
    if unknown := [word for word in words if word not in every]:
        sys.exit(f"unknown section {unknown[0]}: there are {', '.join(every)}, old COMMIT")
    import torch

    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        with open("/proc/cpuinfo") as file:
            cpu = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), cpu)
    machine = f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    print(f"{machine}, torch {torch.__version__}, Python {platform.python_version()}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        models = {"tiny": str(TINY), **{name: f"{folder}/{name}" for name in SHAPES}}
        random_model(models["20M"], "20M")
        if "gpu" in words and torch.cuda.is_available():
            random_model(models["qwen"], "qwen")
        for section in words:
            globals()[f"section_{section}"](models, quick)
        if commit:
            section_old(commit, models, quick)


if __name__ == "__main__":
    main()
