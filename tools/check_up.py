"""What a run's candidates are worth: a table, a picture and a verdict (mine more, fix the reward, or train).

    python tools/check_up.py checkpoints/rce                              # the newest candidates of rce.py
    python tools/check_up.py checkpoints/rce_icl REWARD_MODE=hard_only    # of rce_icl.py, by another reward
    python tools/check_up.py my.parquet                                   # a file

REWARD_MODE is that of the file training_config.json beside the candidates, unless it is given. The figures
and the picture go there too, as .csv and .png. Shares are of the candidates that were verified and did not
fail. The policy's pick is its greedy response or list, else the likeliest.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pandas
from matplotlib.figure import Figure

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
MARKS = ("hard", "soft", "gt_prob", "logprob")


def stop(sentence):
    print(f"check_up.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def find_candidates(path):
    """Returns the file that is meant: `path` itself, or the newest candidates in a run's OUTPUT_DIR."""
    if path.is_file():
        return path
    rounds = sorted(path.glob("candidates_round_*.parquet"), key=lambda file: int(file.stem.split("_")[2]))
    files = [*path.glob("candidates.jsonl"), *rounds]
    return files[-1] if files else stop(f"there are no candidates at {path}: mine first, or give a file")


def read_candidates(path):
    """Returns a table of candidates: a parquet of rce.py or a .jsonl of rce_icl.py."""
    if path.suffix != ".jsonl":
        return complete(pandas.read_parquet(path))
    rows = []
    lines = path.read_text().rpartition("\n")[0].splitlines()  # without a line half-written
    for number, line in enumerate(lines):
        rows += [{"prompt_id": number, **candidate} for candidate in json.loads(line)["lists"]]
    return complete(pandas.DataFrame(rows))


def complete(table):
    """Returns a table that has all columns that are read here; what is unknown is NaN."""
    empty = {"source": [["given"]] * len(table), "temperature": [[None]] * len(table), "eval_failed": False}
    table = table.assign(**{key: value for key, value in empty.items() if key not in table})
    return table.assign(**{key: table[key].astype(float) if key in table else np.nan for key in MARKS})


def shaped_rewards(table, reward_mode):
    """Returns r of each candidate, as the trainer has it."""
    weight, graded_by = MODES[reward_mode]
    if graded_by is None:
        return weight * table.hard
    grades = table[graded_by]
    if reward_mode == "hybrid":
        by_prompt = grades.groupby(table.prompt_id)
        lowest = by_prompt.transform("min")
        width = (by_prompt.transform("max") - lowest).replace(0, 1)
        grades = (grades - lowest) / width / 2
    return weight * table.hard + grades


def check_up(table, reward_mode):
    """Returns {figure's name: value} of a table of candidates."""
    verified = table[table.hard.notna() & ~table.eval_failed.astype(bool)]
    verified = verified.assign(reward=shaped_rewards(verified, reward_mode))
    figures = {"prompts": table.prompt_id.nunique(), "candidates": len(table), "verified": len(verified)}
    figures["failed"] = int(table.eval_failed.sum())
    figures["positive rate"] = verified.hard.mean()
    by_source = verified.explode(["source", "temperature"])
    by_source["source"] += by_source.temperature.map(lambda t: "" if pandas.isna(t) else f" at {t:g}")
    for name, rate in by_source.groupby("source").hard.mean().items():
        figures[f"positive rate, {name}"] = rate
    by_prompt = verified.groupby("prompt_id")
    has_right, highest = by_prompt.hard.max(), by_prompt.reward.max()
    figures["positives per prompt"] = by_prompt.hard.sum().mean()
    figures["prompts without a positive"] = (has_right == 0).mean()
    figures["prompts of equal rewards"] = (highest - by_prompt.reward.min() < 1e-6).mean()
    for key, other in (("gt_prob", "hard"), ("soft", "hard"), ("gt_prob", "soft")):
        varies = verified[key].nunique() > 1 < verified[other].nunique()
        correlation = verified[key].corr(verified[other], "spearman") if varies else np.nan
        figures[f"Spearman of {key} with {other}"] = correlation
    is_greedy = verified.source.map(lambda names: "greedy" in names)
    ordered = verified.assign(is_greedy=is_greedy).sort_values(["is_greedy", "logprob"], ascending=False)
    picks = ordered.drop_duplicates("prompt_id").set_index("prompt_id")
    figures["accuracy of the policy's pick"] = picks.hard.mean()
    figures["accuracy of the best candidate"] = has_right.mean()
    figures["best reward above the pick's, mean"] = (highest - picks.reward).mean()
    return figures


def find_verdict(figures, reward_mode):
    """Returns what to do next, in a sentence: fix the reward, mine more, or train."""
    failed = figures["failed"] / (figures["failed"] + figures["verified"])
    without = figures["prompts without a positive"]
    equal = figures["prompts of equal rewards"]
    best = figures["accuracy of the best candidate"]
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
    if best - pick < 0.02:
        what = "the candidates are hardly better than the policy's own pick"
        return f"mine more: {what}; take harder prompts, higher SAMPLE_TEMPERATURES or a larger pool"
    if equal > 0.5:
        return f"fix the reward: {equal:.0%} of the prompts have equal rewards; take one that grades"
    right = f"the best candidate is right for {best:.0%} of the prompts"
    return f"train: {right}, the policy's own pick for {pick:.0%}"


def draw(table, figures, title, path):
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle(title)
    counts, shares = figure.subplots(1, 2)
    right = table[table.hard.notna()].groupby("prompt_id").hard.sum()
    counts.hist(right, bins=np.arange(right.max() + 2) - 0.5, color="C0", edgecolor="white")
    counts.set(xlabel="right candidates per prompt", ylabel="prompts")
    sources = {key.split(", ")[1]: rate for key, rate in figures.items() if key.startswith("positive rate, ")}
    shares.barh([*sources], [*sources.values()], color="C0")
    shares.axvline(figures["positive rate"], color="C1", linestyle="--", label="all candidates, each once")
    shares.set(xlabel="share of right candidates, by source", xlim=(0, 1))
    shares.legend(fontsize=8)
    for axis in (counts, shares):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def main(path="", *words):
    if not path or not all(word.startswith("REWARD_MODE=") for word in words):
        stop("it takes an OUTPUT_DIR or a file of candidates, then REWARD_MODE=")
    path = find_candidates(Path(path))
    output, picture = path.with_suffix(".csv"), path.with_suffix(".png")
    if output.exists() and not output.read_text(errors="replace").startswith("figure,value"):
        stop(
            f"{output} is not of this program, which would replace it: move it, or the candidates, elsewhere"
        )
    config = path.parent / "training_config.json"
    known = json.loads(config.read_text())["constants"] if config.is_file() else {}
    mode = known.get("REWARD_MODE", "hard_only")
    for word in words:
        mode = word.removeprefix("REWARD_MODE=")
    if mode not in MODES:
        stop(f"REWARD_MODE = {mode!r}: it takes {', '.join(MODES)}")
    try:
        table = read_candidates(path)
        figures = check_up(table, mode)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        stop(f"{path} cannot be read ({type(error).__name__}: {error})")
    if not figures["verified"]:
        stop(f"{path}: none of its {figures['candidates']} candidates was verified")
    verdict = find_verdict(figures, mode)
    title = f"Check-up of {path.name}, REWARD_MODE = {mode}"
    print(title)
    for name, value in figures.items():
        print(f"    {name:<40}{value:>9,}" if isinstance(value, int) else f"    {name:<40}{value:>9.3f}")
    print(f"Verdict: {verdict}")
    pandas.Series({**figures, "verdict": verdict}, name="value").to_csv(output, index_label="figure")
    draw(table, figures, f"{title}\n{verdict}", picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
