"""ppo_rag.py on its default world: test reward by seed, beside baselines, what can be learnt, and sb3's PPO.

    python bench/rag.py seeds 1 2 3 4 5     # the default run of each seed, rules and regressors
    python bench/rag.py splits 0 1 2 3 4 5  # the default run of seed 1 on each SPLIT_SEED, and rules
    python bench/rag.py sb3 1 2 3           # stable-baselines3's PPO on the same table, beside ours
    python bench/rag.py recall FILE ...     # BM25's recall on HotpotQA's files, titles counted once and twice

seeds and sb3 need `pip install -r bench/requirements-rag.txt`, best in an environment of their own. Rules and
regressors see the whole table of the training questions, every action's reward, of which PPO sees one action
at a time. The rule "best by type" gives a question the action that is best on the training questions of its
type; it is told the type, which the policy has to tell from the observation. Of three regressors of every
action's reward from the observation the one counts whose choices are best on the validation questions.
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


def environment(table):
    """One training question an episode, for Gymnasium: an action answers it, and the episode ends."""
    import gymnasium
    import numpy as np

    class RAGEnv(gymnasium.Env):
        action_space = gymnasium.spaces.Discrete(len(table.actions))
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, table.observations.shape[1:], np.float32)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.row = int(self.np_random.choice(table.splits["train"]))
            return table.observations[self.row].numpy().copy(), {}

        def step(self, action):
            draw = int(self.np_random.integers(table.rewards.shape[2]))
            reward = table.rewards[self.row, action, draw].item()
            return table.observations[self.row].numpy().copy(), reward, True, False, {}

    return RAGEnv()


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


def best_by_type(table):
    """Test reward where each type of question gets the action that is best on its training questions."""
    rewards = table.rewards.double().mean(2)  # (questions, actions)
    kinds = [row["type"] for row in table.questions]
    best = {kind: rewards[[q for q in table.splits["train"] if kinds[q] == kind]].mean(0).argmax()
            for kind in set(kinds)}
    return statistics.mean(rewards[q, best[kinds[q]]].item() for q in table.splits["test"])


def greedy_oracle(table):
    """Test reward of the best action of each question, after the fact, among those of temperature 0: the
    oracle over all actions takes the luckiest of the sampled answers too."""
    greedy = [n for n, (_, temperature, _) in enumerate(table.actions) if temperature == 0]
    return table.rewards.double().mean(2)[table.splits["test"]][:, greedy].amax(1).mean().item()


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


def tested(folder, *words):
    """eval_test.json of a run with these words, as a user starts it."""
    command = [sys.executable, SCRIPT, *words, f"OUTPUT_DIR={folder}"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return json.loads((Path(folder) / "eval_test.json").read_text())


def splits(numbers):
    """The default run on other splits of the same questions: PPO beside rules."""
    out = Path(tempfile.mkdtemp(prefix="rag_splits_"))
    found = []
    for number in numbers:
        run = tested(out / number, f"SPLIT_SEED={number}", "SEED=1")
        _, trainer = load_trainer(out / "table" / number, SPLIT_SEED=int(number))
        ppo, fixed, oracle = (run[name]["reward"] for name in ("policy", "best_fixed", "oracle"))
        found.append((fixed, ppo, best_by_type(trainer.table), greedy_oracle(trainer.table), oracle))
        low, high = run["interval"]
        print(f"SPLIT_SEED {number}: gain over best fixed {ppo - fixed:+.3f} ({low:+.3f} to {high:+.3f})")
    for n, name in enumerate(("best fixed", "PPO", "best by type", "oracle, greedy answers", "oracle")):
        values = [row[n] for row in found]
        print(f"{name:24}" + "  ".join(f"{x:.3f}" for x in values) + f"  mean {statistics.mean(values):.3f}")
    fixed, ppo, rule, *_ = (statistics.mean(values) for values in zip(*found))
    print(f"PPO gains {(ppo - fixed) / (rule - fixed):.0%} of what best by type gains over best fixed")


def seeds(numbers):
    """The default run of each seed, as a user starts it."""
    out = Path(tempfile.mkdtemp(prefix="rag_"))
    results = []
    for seed in numbers:
        started = time.time()
        found = tested(out / seed, f"SEED={seed}")
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
    rule = best_by_type(trainer.table)
    print(f"oracle over greedy answers {greedy_oracle(trainer.table):.3f}")
    for name, reached in (("best by type", rule), reference(trainer.table)):
        share = (statistics.mean(rewards) - fixed) / (reached - fixed)
        print(f"{name} {reached:.3f}: PPO gains {share:.0%} of what it gains over best fixed")


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
            model = PPO("MlpPolicy", environment(trainer.table), seed=int(seed), device="cpu", **options)
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
    sections = {"seeds": seeds, "splits": splits, "sb3": sb3, "recall": recall}
    if len(sys.argv) < 3 or sys.argv[1] not in sections:
        sys.exit(__doc__)
    sections[sys.argv[1]](sys.argv[2:])
