"""ppo_rag.py on its default world: test reward by seed and by split, beside rules and sb3's PPO.

    python bench/rag.py splits 0 1 2 3 4    # the default run on each SPLIT_SEED, seed 1
    python bench/rag.py seeds 1 2 3         # the default run of each seed, on the shipped split
    python bench/rag.py sb3 1 2 3           # stable-baselines3's PPO on the same table, beside ours
    python bench/rag.py recall FILE ...     # BM25's recall on HotpotQA's files, titles counted once and twice

sb3 needs `pip install -r bench/requirements-rag.txt`, best in an environment of its own. After the numbers of
splits, seeds and sb3 constants of ppo_rag.py may follow (MAX_STEPS=300). sb3's PPO keeps its own settings,
but gets as many episodes as ours. The rules (`rules` in ppo_rag.py) see the whole table of the training
questions, every action's reward, of which PPO sees one action at a time.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "ppo/ppo_rag.py"


def network_inputs(trainer):
    """Returns the observations as Policy.forward() in ppo_rag.py scales them for its network, (questions,
    inputs)."""
    policy = trainer.policy
    return ((trainer.table.observations - policy.mean) / policy.scale).clamp(-5, 5)


def environment(table, inputs):
    """One training question per episode, for Gymnasium: an action answers it, and the episode ends. Its
    observation is the question's row of inputs."""
    import gymnasium
    import numpy as np

    class RAGEnv(gymnasium.Env):
        action_space = gymnasium.spaces.Discrete(len(table.actions))
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, inputs.shape[1:], np.float32)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.row = int(self.np_random.choice(table.splits["train"]))
            return inputs[self.row].numpy().copy(), {}

        def step(self, action):
            draw = int(self.np_random.integers(table.rewards.shape[2]))
            reward = table.rewards[self.row, action, draw].item()
            return inputs[self.row].numpy().copy(), reward, True, False, {}

    return RAGEnv()


def load_module():
    spec = importlib.util.spec_from_file_location("ppo_rag", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_trainer(folder, words, **constants):
    """The module and its trainer, with the KEY=VALUE words and these constants set."""
    module = load_module()
    module.apply_overrides(words)
    for key, value in {"OUTPUT_DIR": str(folder), "RESUME": "no", **constants}.items():
        setattr(module, key, value)
    return module, module.RAGTrainer()


def tested(folder, *words):
    """eval_test.json of a run with these words, as a user starts it."""
    command = [sys.executable, SCRIPT, *words, f"OUTPUT_DIR={folder}"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return json.loads((Path(folder) / "eval_test.json").read_text())


def split_words(words):
    """Returns the numbers and the KEY=VALUE words."""
    return [word for word in words if "=" not in word], [word for word in words if "=" in word]


def compare(constant, words):
    """The default run for each value of a constant: test rewards beside the baselines', gains over rules."""
    values, others = split_words(words)
    out = Path(tempfile.mkdtemp(prefix="rag_"))
    results = []
    for value in values:
        started = time.time()
        results.append(tested(out / value, f"{constant}={value}", *others))
        print(f"{constant}={value}: {time.time() - started:.0f} s", flush=True)
        for name, gain in results[-1]["gains"].items():
            low, high = gain["interval"]
            print(f"  gain over {name:14}{gain['gain']:+.3f} ({low:+.3f} to {high:+.3f})", flush=True)
    print(f"{'test reward':16}" + "  ".join(f"{value:>5}" for value in values) + "   mean")
    for name in [name for name in results[0] if name not in ("gains", "actions")]:
        rewards = [found[name]["reward"] for found in results]
        print(f"{name:16}" + "  ".join(f"{x:.3f}" for x in rewards) + f"  {statistics.mean(rewards):.3f}")


def splits(words):
    """The default run on other splits of the same questions."""
    compare("SPLIT_SEED", words)


def seeds(words):
    """The default run of other seeds."""
    compare("SEED", words)


def sb3(words):
    """Ours and sb3's on the same table and the same inputs, for as many episodes; mean greedy reward on the
    test questions."""
    import torch
    from stable_baselines3 import PPO

    numbers, others = split_words(words)
    folder = Path(tempfile.mkdtemp(prefix="rag_sb3_"))
    settings = {
        "sb3, its defaults": {},
        "sb3, the source's settings": {"n_steps": 32, "batch_size": 32, "gamma": 0.95, "learning_rate": 3e-4},
    }
    found = {}
    for seed in numbers:
        module, trainer = load_trainer(folder / seed, others, SEED=int(seed), EVAL_EVERY_N_STEPS=0)
        inputs = network_inputs(trainer)
        episodes = module.MAX_STEPS * module.N_STEPS
        rows = trainer.table.splits["test"]
        started = time.time()
        for trainer.run.step in range(1, module.MAX_STEPS + 1):  # the learning rate depends on it
            batch = trainer.rollout()
            trainer.compute_advantages(batch)
            trainer.update(batch)
        reward = trainer.measure(rows, trainer.choose(rows))["reward"]
        found.setdefault("ours", []).append((reward, time.time() - started))
        for name, options in settings.items():
            model = PPO(
                "MlpPolicy", environment(trainer.table, inputs), seed=int(seed), device="cpu", **options
            )
            started = time.time()
            model.learn(episodes)
            seconds = time.time() - started
            actions, _ = model.predict(inputs[rows].numpy(), deterministic=True)
            reward = trainer.measure(rows, torch.from_numpy(actions))["reward"]
            found.setdefault(name, []).append((reward, seconds))
        for name, results in found.items():
            reward, seconds = results[-1]
            print(f"seed {seed}, {episodes} episodes, {name}: {reward:.3f}, {seconds:.0f} s", flush=True)
    for name, results in found.items():
        rewards = [reward for reward, _ in results]
        seconds = statistics.median(seconds for _, seconds in results)
        spread = f"{min(rewards):.3f} to {max(rewards):.3f}"
        print(f"{name}: mean {statistics.mean(rewards):.3f} ({spread}), {seconds:.0f} s")


def recall(files):
    """Share of the gold paragraphs among BM25's first k of all files' paragraphs, mean over questions."""
    module = load_module()
    records = [record for file in files for record in json.loads(Path(file).read_text())]
    questions, told = module.from_hotpot(enumerate(records, 1), "HotpotQA")
    corpus = [{"title": title, "text": text} for title, text in told]
    print(f"{len(questions)} questions, {len(corpus)} paragraphs")
    for weight in (1, 2):
        module.TITLE_WEIGHT = weight
        retriever = module.Retriever(corpus)
        for row in questions:
            row["ranked_0"] = retriever.search(row["question"], 50)[0]
        for kind in [*sorted({row["type"] for row in questions}), "all"]:
            rows = [row for row in questions if kind in (row["type"], "all")]
            shares = (f"@{k} {module.recall_at(rows, 0, k):.3f}" for k in (1, 2, 5, 10, 20, 50))
            print(f"titles counted {weight} times, {kind:10} {len(rows)}: " + "  ".join(shares))


if __name__ == "__main__":
    sections = {"seeds": seeds, "splits": splits, "sb3": sb3, "recall": recall}
    if len(sys.argv) < 3 or sys.argv[1] not in sections:
        sys.exit(__doc__)
    sections[sys.argv[1]](sys.argv[2:])
