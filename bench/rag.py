"""ppo_rag.py on its default world: test reward by seed, beside baselines, what can be learnt, and sb3's PPO.

    python bench/rag.py seeds 1 2 3 4 5     # the default run of each seed, and the upper reference
    python bench/rag.py sb3 1 2 3           # stable-baselines3's PPO on the same RAGEnv, beside ours
    python bench/rag.py recall FILE ...     # BM25's recall on HotpotQA's files, titles counted once and twice

The first two need `pip install -r bench/requirements-rag.txt`, best in an environment of their own. The upper
reference is a strong regressor fitted to the whole table of the training questions (every action's reward,
which PPO never sees at once): of three, the one whose choices are best on the validation questions. What can
be learnt from the observation is its test reward less that of the best fixed action.
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


def load_module():
    spec = importlib.util.spec_from_file_location("ppo_rag", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_trainer(folder, **constants):
    """The module and its trainer, with some constants set."""
    module = load_module()
    for key, value in {"OUTPUT_DIR": str(folder), "RESUME": "no", **constants}.items():
        setattr(module, key, value)
    return module, module.RAGTrainer()


def reference(table):
    """(name, test reward) of the best of three regressors of every action's reward."""
    from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingRegressor, RandomForestRegressor
    from sklearn.multioutput import MultiOutputRegressor

    seen = table.observations.numpy()
    rewards = table.rewards.double().mean(2).numpy()  # (questions, actions)
    train, validation, test = (table.splits[name] for name in ("train", "validation", "test"))
    many = {"n_estimators": 500, "min_samples_leaf": 5, "random_state": 0}
    boosted = HistGradientBoostingRegressor(max_iter=100, learning_rate=0.05, random_state=0)
    found = []
    for model in (RandomForestRegressor(**many), ExtraTreesRegressor(**many), MultiOutputRegressor(boosted)):
        model.fit(seen[train], rewards[train])
        reached = []
        for rows in (validation, test):
            chosen = model.predict(seen[rows]).argmax(1)
            reached.append(rewards[rows, chosen].mean())
        boosts = isinstance(model, MultiOutputRegressor)
        found.append((*reached, type(boosted if boosts else model).__name__))
        print(f"{found[-1][2]:32} validation {reached[0]:.3f}  test {reached[1]:.3f}")
    best = max(found)
    return best[2], best[1]


def seeds(numbers):
    """The default run of each seed, as a user starts it."""
    out = Path(tempfile.mkdtemp(prefix="rag_"))
    results = []
    for seed in numbers:
        started = time.time()
        command = [sys.executable, SCRIPT, f"SEED={seed}", f"OUTPUT_DIR={out}/{seed}"]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        found = json.loads((out / seed / "eval_test.json").read_text())
        results.append(found)
        policy = "  ".join(f"{key} {found['policy'][key]:.3f}" for key in ("reward", "em", "f1", "cost"))
        low, high = found["interval"]
        gain = f"gain {found['gain_over_best_fixed']:+.3f} ({low:+.3f} to {high:+.3f})"
        print(f"seed {seed}: {policy}  {gain}  {time.time() - started:.0f} s", flush=True)
    rewards = [found["policy"]["reward"] for found in results]
    spread = f"{min(rewards):.3f} to {max(rewards):.3f}"
    fixed = results[0]["best_fixed"]["reward"]
    print(f"mean test reward {statistics.mean(rewards):.3f} ({spread})")
    for name in ("random", "best_fixed", "oracle"):
        values = "  ".join(f"{key} {results[0][name][key]:.3f}" for key in ("reward", "em", "f1", "cost"))
        print(f"{name:12} {values}")
    _, trainer = load_trainer(out / "reference")
    name, reward = reference(trainer.table)
    share = (statistics.mean(rewards) - fixed) / (reward - fixed)
    print(f"upper reference ({name}) {reward:.3f}: PPO reaches {share:.0%} of what it gains over best fixed")


def sb3(numbers):
    """Ours and sb3's on the same table, for as many episodes; mean greedy reward on the test questions."""
    import torch
    from stable_baselines3 import PPO

    folder = Path(tempfile.mkdtemp(prefix="rag_sb3_"))
    settings = {
        "sb3, its defaults": {},
        "sb3, the seed's": {"n_steps": 32, "batch_size": 32, "gamma": 0.95, "learning_rate": 3e-4}}
    found = {}
    for seed in numbers:
        module, trainer = load_trainer(folder / seed, SEED=int(seed), EVAL_EVERY_N_STEPS=0)
        episodes = module.MAX_STEPS * module.N_STEPS
        rows = trainer.table.splits["test"]
        started = time.time()
        for _ in range(module.MAX_STEPS):
            batch = trainer.rollout()
            trainer.compute_advantages(batch)
            trainer.update(batch)
        reward = trainer.measure(rows, trainer.choose(rows))["reward"]
        found.setdefault("ours", []).append((reward, time.time() - started))
        for name, options in settings.items():
            model = PPO("MlpPolicy", module.RAGEnv(trainer.table), seed=int(seed), device="cpu", **options)
            started = time.time()
            model.learn(episodes)
            seconds = time.time() - started
            actions, _ = model.predict(trainer.table.observations[rows].numpy(), deterministic=True)
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
    questions, corpus = module.from_hotpot(records, "HotpotQA")
    print(f"{len(questions)} questions, {len(corpus)} paragraphs")
    for weight in (1, 2):
        module.TITLE_WEIGHT = weight
        retriever = module.Retriever(corpus)
        for row in questions:
            row["ranked_0"] = retriever.search(row["question"], 50)[0]
        for kind in sorted({row["type"] for row in questions}) + ["all"]:
            rows = [row for row in questions if kind in (row["type"], "all")]
            shares = (f"@{k} {module.recall_at(rows, 0, k):.3f}" for k in (1, 2, 5, 10, 20, 50))
            print(f"titles counted {weight} times, {kind:10} {len(rows)}: " + "  ".join(shares))


if __name__ == "__main__":
    sections = {"seeds": seeds, "sb3": sb3, "recall": recall}
    if len(sys.argv) < 3 or sys.argv[1] not in sections:
        sys.exit(__doc__)
    sections[sys.argv[1]](sys.argv[2:])
