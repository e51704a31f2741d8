"""What a run's candidates are worth: a table, a picture and a verdict (mine more, fix the reward, or train).

    python tools/check_up.py checkpoints/rce                              # the newest candidates of rce.py
    python tools/check_up.py checkpoints/rce_icl REWARD_MODE=hard_only    # of rce_icl.py, by another reward
    python tools/check_up.py my.parquet                                   # a file

REWARD_MODE is that of the file training_config.json beside the candidates, unless it is given. The figures
and the picture go there too, as .csv and .png. Shares are of the candidates that were verified and did not
fail.
"""

import csv
import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from matplotlib.figure import Figure
from scipy.stats import spearmanr

# r = hard_weight * hard + grade, as in the trainers: {mode: (hard_weight, what grades)}
MODES = {
    "hard_only": (1, None),
    "soft_only": (0, "soft"),
    "hard_plus_soft": (1, "soft"),
    "separated": (2, "soft"),
    "hard_plus_gtprob": (1, "gt_prob"),
    "hard_plus_gtprob_separated": (2, "gt_prob"),
    "hybrid": (0.5, "logprob"),  # rce.py: half the log-probability, scaled to 0 to 1 within the prompt
}


def stop(sentence):
    print(f"check_up.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def find_candidates(path):
    """The file that is meant: `path` itself, or the newest candidates in a run's OUTPUT_DIR."""
    if path.is_file():
        return path
    rounds = {}
    for file in path.glob("candidates_round_*.parquet"):
        if found := re.fullmatch(r"candidates_round_(\d+)", file.stem):
            rounds[int(found[1])] = file
    files = [rounds[max(rounds)]] if rounds else [*path.glob("candidates.jsonl")]
    return files[0] if files else stop(f"there are no candidates at {path}: mine first, or give a file")


def read_groups(path):
    """[candidates of a prompt] of a parquet of rce.py or a .jsonl of rce_icl.py."""
    if path.suffix == ".jsonl":
        return [json.loads(line)["lists"] for line in path.read_text().splitlines()]
    groups = defaultdict(list)
    empty = {"source": ["given"], "temperature": [None], "eval_failed": False, "hard": None}
    for record in pq.read_table(path).to_pylist():
        groups[record["prompt_id"]].append({**empty, **record})
    return [*groups.values()]


def shaped_rewards(candidates, reward_mode):
    """r of one prompt's candidates, as the trainer has it."""
    weight, graded = MODES[reward_mode]
    grades = [c[graded] if graded else 0.0 for c in candidates]
    if reward_mode == "hybrid":
        width = max(grades) - min(grades) or 1.0
        grades = [(grade - min(grades)) / width / 2 for grade in grades]
    return [weight * c["hard"] + grade for c, grade in zip(candidates, grades)]


def policy_pick(candidates):
    """The number of the policy's own: its greedy response or list, else the likeliest."""

    def preference(c):
        logprob = c.get("logprob")
        return "greedy" in c["source"], -np.inf if logprob is None else logprob

    return max(range(len(candidates)), key=lambda i: preference(candidates[i]))


def verified_of(group):
    return [c for c in group if c["hard"] is not None and not c.get("eval_failed")]


def mean(values):
    return float(np.mean(values)) if values else float("nan")


def check_up(groups, reward_mode):
    """{figure's name: value} of [candidates of a prompt]."""
    every = [c for group in groups for c in group]
    good = [verified_of(group) for group in groups]
    good = [group for group in good if group]
    verified = [c for group in good for c in group]
    right = [sum(c["hard"] for c in group) for group in good]
    shaped = [shaped_rewards(group, reward_mode) for group in good]
    picks = [policy_pick(group) for group in good]
    gaps = [max(r) - r[i] for r, i in zip(shaped, picks)]
    figures = {
        "prompts": len(groups),
        "candidates": len(every),
        "proposed": sum(len(c["source"]) for c in every),
        "verified": len(verified),
        "positive rate": mean([c["hard"] for c in verified]),
    }
    sources = defaultdict(list)
    for c in verified:
        for name, temperature in zip(c["source"], c["temperature"]):
            sources[name if temperature is None else f"{name} at {temperature:g}"].append(c["hard"])
    figures |= {f"positive rate, {name}": mean(values) for name, values in sorted(sources.items())}
    for name, percent in (("min", 0), ("p25", 25), ("median", 50), ("p75", 75), ("max", 100)):
        figures[f"positives per prompt, {name}"] = float(np.percentile(right or [np.nan], percent))
    figures["prompts without a positive"] = mean([n == 0 for n in right])
    figures["prompts with flat reward"] = mean([max(r) - min(r) < 1e-6 for r in shaped])
    marks = [("gt_prob", "hard"), ("soft", "hard"), ("gt_prob", "soft")]
    for key, other in marks:
        pairs = [(c[key], c[other]) for c in verified if None not in (c.get(key), c.get(other))]
        vary = bool(pairs) and all(len(set(column)) > 1 for column in zip(*pairs))
        correlation = float(spearmanr(pairs).statistic) if vary else float("nan")
        figures[f"Spearman of {key} with {other}"] = correlation
    figures["accuracy of the policy's pick"] = mean([group[i]["hard"] for group, i in zip(good, picks)])
    figures["accuracy of the oracle"] = mean([n > 0 for n in right])
    figures["oracle's reward above the pick's, mean"] = mean(gaps)
    figures["oracle above the pick by .2, prompts"] = mean([gap > 0.2 for gap in gaps])
    modes = Counter("failed" if c.get("eval_failed") else c.get("eval_mode") or "given" for c in every)
    return figures | {f"eval mode {mode}": count / len(every) for mode, count in sorted(modes.items())}


def find_verdict(figures, reward_mode):
    """What to do next, in a sentence: fix the reward, mine more, or train."""
    failures = figures.get("eval mode failed", 0) * figures["candidates"]
    failed = failures / (failures + figures["verified"])
    without = figures["prompts without a positive"]
    flat = figures["prompts with flat reward"]
    oracle = figures["accuracy of the oracle"]
    pick = figures["accuracy of the policy's pick"]
    graded_by = MODES[reward_mode][1]
    correlation = figures.get(f"Spearman of {graded_by} with hard", 1.0)
    if failed > 0.1:
        return f"fix the reward: scoring failed for {failed:.0%} of the candidates that were scored"
    if correlation < 0.1:
        what = f"{graded_by} hardly goes with being right (Spearman {correlation:.2f})"
        return f"fix the reward: {what}; take another REWARD_MODE, or look at what says the end of an answer"
    if without > 0.5:
        return f"mine more: {without:.0%} of the prompts have no right candidate; propose more, or references"
    if pick >= 0.98:
        return f"mine harder prompts: the policy's own pick is right for {pick:.0%} of these"
    if oracle - pick < 0.02:
        what = "the candidates are hardly better than the policy's own pick"
        return f"mine more: {what}; take harder prompts, higher SAMPLE_TEMPERATURES or a larger pool"
    if flat > 0.5:
        return f"fix the reward: {flat:.0%} of the prompts have equal rewards; take a REWARD_MODE that grades"
    best = f"the best candidate is right for {oracle:.0%} of the prompts"
    return f"train: {best}, the policy's own pick for {pick:.0%}"


def draw(groups, figures, title, path):
    """Right candidates a prompt, shares of right ones by source, gt_prob and soft of right and wrong ones."""
    figure = Figure(figsize=(16, 8), layout="constrained")
    figure.suptitle(title)
    (counts, shares), graded = figure.subplots(2, 2)
    good = [verified_of(group) for group in groups]
    right = [int(sum(c["hard"] for c in group)) for group in good if group]
    counts.hist(right, bins=np.arange(max(right, default=0) + 2) - 0.5, color="C0", edgecolor="white")
    counts.set(xlabel="right candidates a prompt", ylabel="prompts")
    counts.xaxis.get_major_locator().set_params(integer=True)
    named = [key for key in figures if key.startswith("positive rate, ")]
    shares.barh([key.split(", ")[1] for key in named], [figures[key] for key in named], color="C0")
    every = figures["positive rate"]
    shares.axvline(every, color="C1", linestyle="--", label="all candidates, each once")
    shares.set(xlabel="share of right candidates", xlim=(0, 1))
    shares.legend(fontsize=8)
    for axis, key in zip(graded, ("gt_prob", "soft")):
        known = [c for group in good for c in group if c.get(key) is not None]
        for color, (hard, name) in enumerate(((1, "right"), (0, "wrong"))):
            values = [c[key] for c in known if c["hard"] == hard]
            axis.hist(values, bins=np.linspace(0, 1, 41), alpha=0.6, color=f"C{color}", label=name)
        axis.set(xlabel=key, ylabel="candidates (log)", yscale="log" if known else "linear")
        axis.legend(fontsize=8)
    for axis in (counts, shares, *graded):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def find_mode(config, words):
    """REWARD_MODE as given in words, else as the run's file has it."""
    known = json.loads(config.read_text())["constants"] if config.is_file() else {}
    mode = dict(word.split("=", 1) for word in words).get(
        "REWARD_MODE", known.get("REWARD_MODE", "hard_only")
    )
    return mode if mode in MODES else stop(f"REWARD_MODE = {mode!r}: it takes {', '.join(MODES)}")


def main(path="", *words):
    if not path or not all(word.startswith("REWARD_MODE=") for word in words):
        stop("it takes an OUTPUT_DIR or a file of candidates, then REWARD_MODE=")
    path = find_candidates(Path(path))
    table, picture = path.with_suffix(".csv"), path.with_suffix(".png")
    if table.exists() and not table.read_text(errors="replace").startswith("figure,value"):
        stop(f"{table} is not of this program, which would replace it: move it, or the candidates, elsewhere")
    mode = find_mode(path.parent / "training_config.json", words)
    try:
        groups = read_groups(path)
        figures = check_up(groups, mode)
    except (OSError, ValueError, LookupError, TypeError) as error:  # pyarrow's are such ones
        what = "cannot be read, or lacks what REWARD_MODE needs"
        stop(f"{path} {what} ({type(error).__name__}: {error})")
    if not figures["verified"]:
        stop(f"{path}: none of its {figures['candidates']} candidates was verified")
    verdict = find_verdict(figures, mode)
    title = f"Check-up of {path.name}, REWARD_MODE = {mode}"
    print(title)
    for name, value in figures.items():
        print(f"    {name:<40}{value:>9,}" if isinstance(value, int) else f"    {name:<40}{value:>9.3f}")
    print(f"Verdict: {verdict}")
    with open(table, "w", newline="") as file:
        csv.writer(file).writerows([("figure", "value"), *figures.items(), ("verdict", verdict)])
    draw(groups, figures, f"{title}\n{verdict}", picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
