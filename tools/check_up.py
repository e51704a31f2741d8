"""What a run's candidates are worth: a table, a picture and a verdict (mine more, fix the reward, or train).

    python tools/check_up.py checkpoints/rce                              # the newest candidates of rce.py
    python tools/check_up.py checkpoints/rce_icl REWARD_MODE=hard_only    # of rce_icl.py, by another reward
    python tools/check_up.py my.parquet SIMILARITY_WEIGHT=0.2             # a file

REWARD_MODE, HARD_WEIGHT, SOFT_WEIGHT, HYBRID_SCORE, HYBRID_MIX_SCORE, HYBRID_ALPHA, SIMILARITY,
SIMILARITY_WEIGHT and SKIP_FALLBACK are those of the file training_config.json beside the candidates, unless
they are given. The figures and the picture go there too, as .csv and .png. Shares are of the candidates that
were verified and did not fail.
"""

import csv
import json
import math
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from matplotlib.figure import Figure
from scipy.stats import spearmanr

CONSTANTS = {  # those on which the reward depends, with the value that counts where a trainer has none
    "REWARD_MODE": "hard_only",
    "HARD_WEIGHT": 1.0,
    "SOFT_WEIGHT": 1.0,
    "HYBRID_SCORE": "logprob",
    "HYBRID_MIX_SCORE": "logprob",
    "HYBRID_ALPHA": 0.5,
    "SIMILARITY": "rouge_l",
    "SIMILARITY_WEIGHT": 0.0,
    "SKIP_FALLBACK": False,
}
NUMBERS = ("HARD_WEIGHT", "SOFT_WEIGHT", "HYBRID_ALPHA", "SIMILARITY_WEIGHT")
MODES = {  # (a, mark): r = a * HARD_WEIGHT * hard + SOFT_WEIGHT * mark; the same as in rewards/
    "hard_only": (1, None),
    "soft_only": (0, "soft"),
    "hard_plus_soft": (1, "soft"),
    "hard_plus_soft_v2": (2, "soft"),
    "separated": (2, "soft"),
    "hard_plus_gtprob": (1, "gt_prob"),
    "hard_plus_gtprob_separated": (2, "gt_prob"),
    "hard_plus_gtprob_plus_rel": (2, "gt_prob"),  # and a tenth of the relevance of a wrong one
    "hybrid": (1, None),  # times 1 - HYBRID_ALPHA; and HYBRID_ALPHA times the score, scaled within the prompt
}
NAMES = {  # of a list in rce_icl.py's file: its name here
    "gen_methods": "source",
    "temperatures": "temperature",
    "logprob_score": "logprob",
    "vqa_correct": "hard",
    "vqa_acc_score": "soft",
    "vqa_gt_prob": "gt_prob",
    "vqa_rel_score": "relevance",
    "vqa_eval_mode": "eval_mode",
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
    files = [rounds[max(rounds)]] if rounds else [*path.glob("candidates.json")]
    hint = "run STAGE=mine first, or give the file that CANDIDATES names"
    return files[0] if files else stop(f"there are no candidates at {path}: {hint}")


def read_groups(path):
    """([candidates of a prompt], how many were proposed) of a file of rce.py or, JSON, of rce_icl.py."""
    empty = {"source": ["given"], "temperature": [None], "eval_failed": False, "hard": None}
    if path.suffix != ".json":
        groups = defaultdict(list)
        for record in pq.read_table(path).to_pylist():
            groups[record["prompt_id"]].append({**empty, **record})
        return [*groups.values()], sum(len(c["source"]) for group in groups.values() for c in group)
    groups = []
    proposed = 0
    for key, record in json.loads(path.read_text()).items():
        if key != "_meta":
            lists = record["pointer_candidates"]
            lists = [empty | {NAMES.get(name, name): value for name, value in c.items()} for c in lists]
            for c in lists:
                if "gen_method" in c:  # Lever-Plus's files name one source of a list, not several
                    c["source"] = [c["gen_method"]]
                if not isinstance(c["temperature"], list):
                    c["temperature"] = [c["temperature"]]
            groups.append(lists)
            proposed += record.get("proposed") or len(lists)
    return groups, proposed


def skip_fallback(groups):
    """Candidates that the source's fallback metric marked count as not verified: the trainer leaves them
    out."""
    for group in groups:
        for c in group:
            if c.get("eval_mode") == "fallback":
                c["hard"] = None


def shaped_rewards(candidates, constants):
    """r of one prompt's candidates, as the trainer has it."""

    def column(name):
        return name if name in candidates[0] else f"reward/{name}"

    mode = constants["REWARD_MODE"]
    times, graded = MODES[mode]
    shaped = [times * float(constants["HARD_WEIGHT"]) * c["hard"] for c in candidates]
    if graded:
        weight = float(constants["SOFT_WEIGHT"])
        shaped = [r + weight * c[graded] for c, r in zip(candidates, shaped)]
    if mode == "hybrid":
        is_list = "pointer" in candidates[0]
        name = constants["HYBRID_MIX_SCORE" if is_list else "HYBRID_SCORE"]
        if name == "infoscore":
            scores = [math.log(max(c["gt_prob"], 1e-6)) for c in candidates]
        else:
            scores = [c[column(name)] for c in candidates]
        width = max(scores) - min(scores) or 1.0
        alpha = float(constants["HYBRID_ALPHA"])
        scaled = [(score - min(scores)) / width for score in scores]
        shaped = [alpha * score + (1 - alpha) * r for r, score in zip(shaped, scaled)]
    if mode == "hard_plus_gtprob_plus_rel":
        shaped = [r if c["hard"] else r + 0.1 * c["relevance"] for c, r in zip(candidates, shaped)]
    if weight := float(constants["SIMILARITY_WEIGHT"]):
        similar = column(constants["SIMILARITY"])
        shaped = [r if c["hard"] else r + weight * c[similar] for c, r in zip(candidates, shaped)]
    return shaped


def policy_pick(candidates):
    """The number of the policy's own: its greedy response, else its best beam, else the likeliest."""

    def preference(c):
        scores = [c.get("beam_score"), c.get("logprob")]
        return "greedy" in c["source"], *(-np.inf if x is None else x for x in scores)

    return max(range(len(candidates)), key=lambda i: preference(candidates[i]))


def mean(values):
    return float(np.mean(values)) if values else float("nan")


def check_up(groups, proposed, constants):
    """{figure's name: value} of [candidates of a prompt]."""
    every = [c for group in groups for c in group]
    good = [[c for c in group if c["hard"] is not None and not c["eval_failed"]] for group in groups]
    good = [group for group in good if group]
    verified = [c for group in good for c in group]
    right = [sum(c["hard"] for c in group) for group in good]
    shaped = [shaped_rewards(group, constants) for group in good]
    picks = [policy_pick(group) for group in good]
    gaps = [max(r) - r[i] for r, i in zip(shaped, picks)]
    figures = {
        "prompts": len(groups),
        "candidates": len(every),
        "proposed": proposed,
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
    if any(c.get("relevance") is not None for c in verified):
        marks += [("relevance", "hard"), ("relevance", "soft")]
    for key, other in marks:
        pairs = [(c[key], c[other]) for c in verified if None not in (c.get(key), c.get(other))]
        vary = bool(pairs) and all(len(set(column)) > 1 for column in zip(*pairs))
        correlation = float(spearmanr(pairs).statistic) if vary else float("nan")
        figures[f"Spearman of {key} with {other}"] = correlation
    figures["accuracy of the policy's pick"] = mean([group[i]["hard"] for group, i in zip(good, picks)])
    figures["accuracy of the oracle"] = mean([n > 0 for n in right])
    figures["oracle's reward above the pick's, mean"] = mean(gaps)
    figures["oracle above the pick by .2, prompts"] = mean([gap > 0.2 for gap in gaps])
    modes = Counter("failed" if c["eval_failed"] else c.get("eval_mode") or "given" for c in every)
    return figures | {f"eval mode {mode}": count / len(every) for mode, count in sorted(modes.items())}


def find_verdict(figures, reward_mode, soft_weight=1.0):
    """What to do next, in a sentence: fix the reward, mine more, or train."""
    failures = figures.get("eval mode failed", 0) * figures["candidates"]
    failed = failures / (failures + figures["verified"])
    without = figures["prompts without a positive"]
    flat = figures["prompts with flat reward"]
    oracle = figures["accuracy of the oracle"]
    pick = figures["accuracy of the policy's pick"]
    graded_by = MODES[reward_mode][1] if soft_weight else None
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
    good = [[c for c in group if c["hard"] is not None and not c["eval_failed"]] for group in groups]
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


def read_constants(config, words):
    """{name: value} of CONSTANTS: as given in words, else as the run's file has them."""
    try:
        known = json.loads(config.read_text())["constants"] if config.is_file() else {}
    except (OSError, ValueError, LookupError, TypeError) as error:
        stop(f"{config} is not what a trainer wrote ({type(error).__name__}: {error}): mend or delete it")
    constants = {key: known.get(key, value) for key, value in CONSTANTS.items()}
    constants |= dict(word.split("=", 1) for word in words)
    if constants["REWARD_MODE"] not in MODES:
        stop(f"REWARD_MODE = {constants['REWARD_MODE']!r}: it takes {', '.join(MODES)}")
    for key in NUMBERS:
        try:
            constants[key] = float(constants[key])
        except ValueError:
            stop(f"{key} = {constants[key]!r}: it takes a number")
    skips = str(constants["SKIP_FALLBACK"]).lower()
    if skips not in ("true", "false"):
        stop(f"SKIP_FALLBACK = {constants['SKIP_FALLBACK']!r}: it takes True or False")
    constants["SKIP_FALLBACK"] = skips == "true"
    return constants


def main(path="", *words):
    if not path or not all(word.partition("=")[0] in CONSTANTS and "=" in word for word in words):
        stop(f"it takes an OUTPUT_DIR or a file of candidates, then {'=, '.join(CONSTANTS)}=")
    path = find_candidates(Path(path))
    table, picture = path.with_suffix(".csv"), path.with_suffix(".png")
    if table.exists() and not table.read_text(errors="replace").startswith("figure,value"):
        stop(f"{table} is not of this program, which would replace it: move it, or the candidates, elsewhere")
    config = path.parent / "training_config.json"
    constants = read_constants(config, words)
    try:
        groups, proposed = read_groups(path)
        if constants["SKIP_FALLBACK"]:
            skip_fallback(groups)
        figures = check_up(groups, proposed, constants)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # pyarrow's are such ones
        what = "cannot be read, or lacks what REWARD_MODE needs"
        stop(f"{path} {what} ({type(error).__name__}: {error})")
    if not figures["verified"]:
        stop(f"{path}: none of its {figures['candidates']} candidates was verified")
    verdict = find_verdict(figures, constants["REWARD_MODE"], constants["SOFT_WEIGHT"])
    title = f"Check-up of {path.name}, REWARD_MODE = {constants['REWARD_MODE']}"
    print(title)
    print(f"Other constants are those of {config}" if config.is_file() else "Other constants are defaults")
    for name, value in figures.items():
        print(f"    {name:<40}{value:>9,}" if isinstance(value, int) else f"    {name:<40}{value:>9.3f}")
    print(f"Verdict: {verdict}")
    try:
        with open(table, "w", newline="") as file:
            csv.writer(file).writerows([("figure", "value"), *figures.items(), ("verdict", verdict)])
        draw(groups, figures, f"{title}\n{verdict}", picture)
    except OSError as error:
        stop(f"{error.filename or path.parent} cannot be written ({error.strerror})")


if __name__ == "__main__":
    main(*sys.argv[1:])
