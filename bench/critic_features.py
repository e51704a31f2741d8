"""Which numbers should value_features() of ppo/ppo.py hold? Sets of them, compared on the same steps.

    python bench/critic_features.py [seed ...] [KEY=VALUE ...]

By default seeds 1 2 3. It runs 20 steps of ppo/ppo.py per seed, keeps what the fit sees, and predicts each
step from the steps before it: by the critic's model plus a fit of each set. Printed is

    1 - Var(return - value) / Var(return)

over all tokens, the mean of steps 5 to 10 and of steps 11 to 20. Add a set to SETS to try it.
"""

import math
import statistics
import sys
import tempfile

import torch
from critic import load_ppo


def before(x):
    """Sums over the earlier tokens."""
    return x.cumsum(1) - x


def parts(ppo, batch):
    """Returns {name: (rows, R)} of which the sets are made."""
    mask = batch.response_mask
    surprise = -batch.logprobs * mask
    found = {"one": torch.ones_like(mask), "position": mask.cumsum(1) / ppo.MAX_NEW_TOKENS}
    for probability in (0.7, 0.5, 0.2, 0.1):
        is_unlikely = (surprise > -math.log(probability)).to(mask)
        found[f"p<{probability}"] = (before(is_unlikely) > 0).to(mask)
    found["two p<0.5"] = (before((surprise > math.log(2)).to(mask)) > 1).to(mask)
    found["surprise"] = before(surprise.clamp(max=5))
    groups = batch.scores.view(-1, ppo.GROUP_SIZE)
    others = (groups.sum(1, keepdim=True) - groups) / max(1, ppo.GROUP_SIZE - 1)
    found["others"] = others.view(-1, 1).expand_as(mask)
    return found


SHIPPED = ["one", "position", "p<0.5", "others", "others*p<0.5"]
SETS = {
    "as shipped": SHIPPED,
    "without the others": ["one", "position", "p<0.5"],
    "without p < 0.5": ["one", "position", "others"],
    "p < 0.7 instead": ["one", "position", "p<0.7", "others", "others*p<0.7"],
    "p < 0.2 instead": ["one", "position", "p<0.2", "others", "others*p<0.2"],
    "p < 0.1, too": [*SHIPPED, "p<0.1", "others*p<0.1"],
    "a second slip, too": [*SHIPPED, "two p<0.5", "others*two p<0.5"],
    "sum of -log p instead": ["one", "position", "surprise", "others", "others*surprise"],
    "sum of -log p, too": [*SHIPPED, "surprise", "others*surprise"],
    "products with position, too": [*SHIPPED, "position*p<0.5", "others*position"],
}


def record(seed, words):
    """Runs ppo/ppo.py. Returns of each step {set: features (tokens, F)}, the returns and the values of the
    critic's model, (tokens,)."""
    ppo = load_ppo(["MAX_STEPS=20", "EVAL_EVERY_N_STEPS=0", "MAX_EVAL_PROMPTS=8", "SAVE_EVERY_N_STEPS=0"])
    steps = []

    class Recorded(ppo.PPOTrainer):
        def update_value_fit(self, batch):
            super().update_value_fit(batch)
            mask = batch.response_mask.bool()
            made = {name: x[mask].double().cpu() for name, x in parts(ppo, batch).items()}
            features = {}
            for name, columns in SETS.items():
                columns = [math.prod(made[part] for part in column.split("*")) for column in columns]
                features[name] = torch.stack(columns, 1)
            model_values = (batch.values - batch.fitted_values)[mask].double().cpu()
            steps.append((features, batch.returns[mask].double().cpu(), model_values))

    with tempfile.TemporaryDirectory() as folder:
        ppo.apply_overrides([f"SEED={seed}", f"OUTPUT_DIR={folder}/run", "RESUME=no", *words])
        decay = ppo.VALUE_FIT_DECAY
        Recorded().train()
    return steps, decay


def explained(steps, name, decay):
    """Returns the explained variance of each step but the first."""
    xx = xy = 0.0
    found = []
    for number, (features, returns, model_values) in enumerate(steps):
        x = features[name]
        if number:
            weights = torch.linalg.solve(xx + torch.eye(x.shape[1], dtype=x.dtype), xy)
            found.append(1 - (returns - model_values - x @ weights).var().item() / returns.var().item())
        xx = decay * xx + x.T @ x
        xy = decay * xy + x.T @ (returns - model_values)
    return found


def main():
    words = [word for word in sys.argv[1:] if "=" in word]
    seeds = [int(word) for word in sys.argv[1:] if word.isdecimal()] or [1, 2, 3]
    runs = [record(seed, words) for seed in seeds]
    print(f"\n{'':28} steps 5 to 10 (each seed)      steps 11 to 20 (each seed)")
    for name in SETS:
        text = f"{name:28}"
        for chosen in (slice(3, 9), slice(9, None)):
            means = [statistics.mean(explained(steps, name, decay)[chosen]) for steps, decay in runs]
            each = " ".join(f"{mean:.3f}" for mean in means)
            text += f" {statistics.mean(means):.3f} ({each})       "
        print(text.rstrip(), flush=True)


if __name__ == "__main__":
    main()
