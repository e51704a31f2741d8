"""Memory, speed and rounding of sampling, scoring and update, also beside another checkout of the repository.

    python bench/engine.py response . grpo/grpo.py 8192 [KEY=VALUE ...]          # memory of a backward pass
    MALLOC_MMAP_THRESHOLD_=262144 python bench/engine.py phases grpo/grpo.py 4 384 1024 32768 [KEY=VALUE ...]
    python bench/engine.py rollout /tmp/before 20M 512 1024 2    # CPU seconds per token, before and now
    python bench/engine.py step /tmp/before smollm2              # CPU seconds of a GRPO step, before and now
    python bench/engine.py ratios                                # first ratios of families of models

`response`: one response to 32 tokens, by the trainer of the checkout that is named; a random Qwen2 with 2
layers of width 64 and 151,936 ids. `phases`: peaks of two GRPO or PPO steps beside tools/memory.py; a random
Llama with so many layers, hidden and intermediate units, and ids. MALLOC_MMAP_THRESHOLD_ makes the process
give back what it freed. `ratios`: the models of tests/test_families.py, mean |log ratio| before an update.
`git worktree add /tmp/before COMMIT` makes another checkout.
"""

import ctypes
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import speed  # one thread
import torch
import transformers

sys.path += [str(speed.ROOT / "tools"), str(speed.ROOT / "tests")]


def process_bytes(name):
    return 1024 * int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])


def forget_peak():
    """Gives free memory back; the peak VmHWM begins again with what is held now."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def load(path, root, words=(), **constants):
    """Returns a trainer's module with those of the constants that it has."""
    module = speed.load(f"{root}/{path}")
    for name, value in constants.items():
        if name in module.constants():
            setattr(module, name, value)
    module.apply_overrides(word for word in words if word.partition("=")[0] in module.constants())
    return module


def make_trainer(module):
    trainer = next(x for name, x in vars(module).items() if name.endswith("Trainer"))("no")
    trainer.run.open(trainer.state, *[False] * (module.Run.open.__code__.co_argcount - 2))
    trainer.state.step = 1
    trainer.seed_step()
    return trainer


def response(root, path, tokens, *words):
    module = load(path, root, words)
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
    speed.SHAPES["random"] = shape
    speed.random_model(f"{folder}/model", "random")
    options = {"ACTOR_MODEL": f"{folder}/model", "OUTPUT_DIR": f"{folder}/run", "EVAL_DATASETS": []}
    module = load(path, speed.ROOT, words, **options, REWARD_MODEL=None)
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
    for name, place in (("before", root), ("now", speed.ROOT)):
        options = {"ACTOR_MODEL": speed.find_model(model, folder), "OUTPUT_DIR": f"{folder}/{name}"}
        module = load("grpo/grpo.py", place, **constants, **options, EVAL_DATASETS=[])
        sys.modules[name] = module  # which make_trainer's annotations are looked up in
        trainers[name] = make_trainer(module)
    for order in (("before", "now"), ("now", "before")):
        seconds = {name: measure(trainers[name]) for name in order}
        ratio = seconds["now"] / seconds["before"]
        print(f"before {seconds['before']:.4g} s, now {seconds['now']:.4g} s, now / before {ratio:.3f}")


def rollout(root, model, prompt_tokens, new_tokens, prompts):
    ids = torch.randint(9, 80, (int(prompts), int(prompt_tokens))).tolist()
    uniform = torch.rand(8 * int(prompts), int(new_tokens))

    def measure(trainer):
        hook = trainer.actor.register_forward_hook(speed.set_end)
        rows = [{**trainer.train_rows[0], "ids": prompt} for prompt in ids for _ in range(8)]
        started = time.process_time()
        tokens = int(trainer.respond(rows, uniform).lengths.sum())
        hook.remove()
        return (time.process_time() - started) / tokens

    alternate(root, model, {"MAX_NEW_TOKENS": int(new_tokens)}, measure)


def step(root, model):
    prompts, new_tokens = speed.GRPO_SIZES[model]
    data = f"{tempfile.mkdtemp()}/rows.jsonl"
    speed.write_rows(data, "grpo", prompts, 2)
    constants = {
        "BATCH_SIZE": prompts,
        "MAX_NEW_TOKENS": new_tokens,
        "MICRO_BATCH_ROWS": speed.MODELS[model][0],
    }
    constants |= {"KL_COEF": 0.04, "LEARNING_RATE": 1e-5, "REWARD_FUNCTIONS": [(speed.reward, 1.0)]}
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
            transformers.AutoTokenizer.from_pretrained(speed.TINY).save_pretrained(folder / "model")
            options = {
                "ACTOR_MODEL": str(folder / "model"),
                "OUTPUT_DIR": str(folder / "run"),
                "DTYPE": dtype,
            }
            options |= {"EVAL_DATASETS": [], "GROUP_SIZE": 8, "MAX_NEW_TOKENS": 24}
            options["TEMPERATURE"] = 2.0
            module = load("grpo/grpo.py", speed.ROOT, **conftest.small("grpo/grpo.py", **options))
            trainer = make_trainer(module)
            batch = trainer.rollout(trainer.next_prompts())
            rows = torch.arange(len(batch.rows))
            logprobs, _ = module.logprobs_and_entropy(trainer.actor, batch, rows)
            batch.logprobs, batch.mask = [x[:, : logprobs.shape[1]] for x in (batch.logprobs, batch.mask)]
            difference = ((logprobs.detach() - batch.logprobs).abs() * batch.mask).sum() / batch.mask.sum()
            shown.append(f"{dtype} {difference:.1e}")
        entropy = batch.entropies.sum() / batch.mask.sum()
        print(f"{family}: {', '.join(shown)}; entropy {entropy:.2f}")


if __name__ == "__main__":
    stages = {f.__name__: f for f in (response, phases, rollout, step, ratios)}
    if len(sys.argv) < 2 or sys.argv[1] not in stages:
        sys.exit(__doc__)
    stages[sys.argv[1]](*sys.argv[2:])
