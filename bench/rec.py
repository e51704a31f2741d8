"""Figures of grpo/grpo_rec.py: the tables and the picture of docs/grpo_rec.md.

    python bench/rec.py default 1 2 3      # default runs of these seeds in three shops, test rows
    python bench/rec.py tradeoff 1         # NDCG@10 against reward, docs/grpo_rec_tradeoff.png

KEY=VALUE arguments, which follow the seeds, are grpo_rec.py's.

default: data/make_rec.py makes a shop from each seed of WORLDS, and data/rec_baselines.py trains the other
methods on it. A cell is the mean of the runs' seeds and its standard error over rows. "all" is the mean of
the shops; "seeds" are its smallest and largest value among the runs' seeds.

tradeoff: scores 2,000 users of the shipped shop that no file has, so that no setting is chosen by test rows.
GRPO starts from one policy of SFT with each of KL_COEFS. A rerank adds b times an item's value to its log
probability, for each b of BONUSES: it must know the value when it recommends, which GRPO need not.
"""

import contextlib
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "checkpoints/bench_rec"
FIGURES = ("ndcg@10", "hr@10", "reward", "reward/value")
WORLDS = (7, 8, 9)  # the first one is shipped
KL_COEFS = (2.0, 1.0, 0.5, 0.25)
BONUSES = (0.5, 1.0, 2.0, 4.0)
NEW_USERS = 2000


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(arguments, **constants):
    """Returns a trainer that has been trained."""
    rec = load("grpo/grpo_rec.py", "grpo_rec")
    rec.apply_overrides(arguments)
    vars(rec).update(RESUME="no", **constants)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = rec.RecTrainer()
        trainer.train()
    if trainer.run.signal:
        sys.exit("stopped")
    return trainer


def make_shop(world):
    """Makes a shop and the other methods' lists. Returns its files as constants."""
    folder = OUT / f"shop_{world}"
    load("data/make_rec.py", "make_rec").main(folder, world)
    names = {"TRAIN_FILE": "train.csv", "VALID_FILE": "valid.csv", "TEST_FILE": "test.csv"}
    names |= {"INDEX_FILE": "index.json", "ITEM_FILE": "items.txt", "VALUES_FILE": "values.npy"}
    names["BASELINES_FILE"] = "baselines.npz"
    files = {key: str(folder / name) for key, name in names.items()}
    words = [f"{key}={path}" for key, path in files.items()]
    subprocess.run([sys.executable, ROOT / "data/rec_baselines.py", *words], check=True)
    return files


def default_runs(seeds, arguments):
    tables = {}  # (world, seed): {method: {figure: value}}
    for world in WORLDS:
        files = make_shop(world)
        for seed in seeds:
            folder = OUT / f"default_{world}_{seed}"
            train(arguments, SEED=seed, OUTPUT_DIR=str(folder), **files)
            tables[world, seed] = json.loads((folder / "eval_test.json").read_text())
            print(f"world {world}, seed {seed}: done", flush=True)
    methods = [name for name in tables[WORLDS[0], seeds[0]] if name != "possible"]
    for figure in FIGURES:
        print(f"\n| {figure} | " + " | ".join(f"world {world}" for world in WORLDS) + " | all | seeds |")
        print("|" + "---|" * (len(WORLDS) + 3))
        for method in methods:
            values = np.array([[tables[world, seed][method][figure] for seed in seeds] for world in WORLDS])
            errors = [tables[world, seeds[0]][method][f"{figure} +-"] / 1.96 for world in WORLDS]
            cells = [f"{mean:.4f} ±{error:.4f}" for mean, error in zip(values.mean(1), errors)]
            cells.append(f"{values.mean():.4f} ±{np.linalg.norm(errors) / len(errors):.4f}")
            by_seed = values.mean(0)
            print(f"| {method} | " + " | ".join(cells) + f" | {by_seed.min():.4f} to {by_seed.max():.4f} |")


# ---------------------------------------------------------------- the trade-off


def draw_rows(trainer):
    """Returns rows of new users of the shipped shop, and what the shop's own probabilities of the items are
    after each history, if the camp is not known, (rows, items): no list can expect a higher NDCG."""
    make_rec = load("data/make_rec.py", "make_rec")
    codes, probabilities, _ = make_rec.build_world(np.random.default_rng(make_rec.SEED))
    pairs = make_rec.make_histories(np.random.default_rng(101), codes, probabilities, NEW_USERS)
    rows, scores = [], []
    for history, target in pairs:
        rows.append({"history": history, "target": target, "ids": trainer.prompt(history)})
        department = codes[history, 0]
        camps = np.log(probabilities[:, department[:-1], history[1:]]).sum(1)  # (camps,)
        camps += np.log(probabilities.mean(1)[:, history[0]])
        camps = np.exp(camps - camps.max())
        scores.append(camps @ probabilities[:, department[-1]] / camps.sum())
    return rows, torch.tensor(np.array(scores))


def tradeoff(seeds, arguments):
    """Prints a line per method and setting, and draws them."""
    points = {}  # (method, setting): a list per seed of (NDCG@10, its error, reward, its error)
    rec = load("grpo/grpo_rec.py", "grpo_rec")
    rec.apply_overrides(arguments)
    for seed in seeds:
        folder = OUT / f"sft_{seed}"
        sft = train(arguments, SEED=seed, OUTPUT_DIR=str(folder), MAX_STEPS=0, TEST_FILE=None)
        rows, possible = draw_rows(sft)
        histories = [row["history"] for row in rows]
        values = rec.history_values(sft.values, histories)

        def add(method, setting, lists, trainer=sft, rows=rows):
            figures = trainer.list_figures(lists[:, :20], rows)
            point = []
            for name in ("ndcg@10", "reward"):
                point += [figures[name].mean().item(), figures[name].std().item() / len(rows) ** 0.5]
            points.setdefault((method, setting), []).append(point)
            means = np.mean(points[method, setting], 0)
            text = "NDCG@10 {:.4f} ±{:.4f}  reward {:.4f} ±{:.4f}".format(*means)
            print(f"seed {seed}  {method:20} {setting:6}  {text}", flush=True)

        add("possible NDCG@10", "", possible.topk(20).indices)
        items, logprobs = sft.search_rows(sft.reference, rows, len(sft.catalogue.items))
        sft_scores = torch.zeros(len(rows), items.shape[1]).scatter(1, items.cpu(), logprobs.sum(2).cpu())
        baselines = load("data/rec_baselines.py", "rec_baselines")
        baselines.rec.apply_overrides(arguments)
        sequences, valid_rows, _ = baselines.rec.load_splits(sft.catalogue)
        torch.manual_seed(seed)
        for name, scores_of in baselines.train_methods(sft.catalogue, sequences, valid_rows).items():
            scores = scores_of(histories)
            add(name, "", scores.topk(20).indices)
            if name == "product":
                for bonus in BONUSES:
                    add("product, reranked", f"b={bonus:g}", (scores + bonus * values).topk(20).indices)
        add("SFT", "", sft_scores.topk(20).indices)
        for bonus in BONUSES:
            add("SFT, reranked", f"b={bonus:g}", (sft_scores + bonus * values).topk(20).indices)
        for kl_coef in KL_COEFS:
            fixed = {"SFT_EPOCHS": 0, "TEST_FILE": None, "MAX_EVAL_ROWS": 50, "EVAL_EVERY_N_STEPS": 0}
            fixed |= {"ACTOR_MODEL": str(folder / "sft/policy"), "OUTPUT_DIR": str(OUT / "grpo")}
            grpo = train(arguments, SEED=seed, KL_COEF=kl_coef, **fixed)
            add("GRPO", f"KL {kl_coef:g}", grpo.search_rows(grpo.actor, rows, 50)[0], grpo)
    draw({key: np.mean(found, 0) for key, found in points.items()})


def draw(points):
    figure = Figure(figsize=(8.5, 5.2), layout="tight")
    axis = figure.add_subplot(xlabel="reward of the 10 best items", ylabel="NDCG@10 of the logged item")
    axis.grid(alpha=0.3)
    lines = {}  # {method: [(setting, point)]}
    for (method, setting), point in points.items():
        lines.setdefault(method, []).append((setting, point))
    for method, settings in lines.items():
        ndcg, ndcg_error, reward, reward_error = np.array([point for _, point in settings]).T
        style = "s"
        if len(settings) > 1:
            style = "o-" if method == "GRPO" else "o--"  # a rerank must know the value
        if method == "possible NDCG@10":
            axis.axhline(ndcg[0], color="grey", linestyle="--", label="best possible NDCG@10")
            continue
        axis.errorbar(reward, ndcg, ndcg_error, reward_error, style, label=method, ms=4, elinewidth=0.7)
        for (setting, _), x, y in zip(settings, reward, ndcg):
            offset = (-8, 20) if method == "GRPO" else (-4, -26)  # beyond the error bars
            axis.annotate(setting, (x, y), xytext=offset, textcoords="offset points", fontsize=7)
    axis.legend(fontsize=8, loc="lower right")
    figure.savefig(ROOT / "docs/grpo_rec_tradeoff.png", dpi=110)


def main(words):
    seeds = [int(word) for word in words if word.isdecimal()]
    programs = {"default": default_runs, "tradeoff": tradeoff}
    if not seeds or words[0] not in programs:
        sys.exit(__doc__)
    OUT.mkdir(parents=True, exist_ok=True)
    programs[words[0]](seeds, [word for word in words if "=" in word])


if __name__ == "__main__":
    main(sys.argv[1:])
