"""How much of the returns' variance could a critic of ppo/ppo.py explain, and how much does ours?

    python ppo/ppo.py SAVE_EVERY_N_STEPS=10 KEEP_LAST_N_CHECKPOINTS=9 OUTPUT_DIR=/tmp/run RESUME=no
    python bench/critic.py base /tmp/run/step_10 /tmp/run/step_50 [PLACES=4] [KEY=VALUE ...]

base is the policy before training; KEY=VALUE sets ppo.py's constants.

From each checkpoint the policy answers the prompts of one training step. At PLACES random tokens of each
response it starts again, CONTINUATIONS times, from the response so far, up to MAX_NEW_TOKENS in total. The
mean of their scores is an estimate of the expected return at that token. With R a response's score, E that
mean, V the critic's value:

    possible  1 - Var(R - E) / Var(R), corrected for the variance of a mean of so few continuations: the most
              that a critic which sees the prompt and the response so far can explain
    ours      1 - Var(R - V) / Var(R), the explained_variance of lambda 1 and KL_COEF 0

Both are printed over all tokens and by quarters of the response, with a 95% interval that resamples prompts.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
PLACES = 4  # tokens of each response at which it is continued
CONTINUATIONS = 16


def load_ppo(words):
    """A fresh copy of ppo/ppo.py with constants overridden, and not resumed."""
    spec = importlib.util.spec_from_file_location("ppo", ROOT / "ppo/ppo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.apply_overrides(words)
    return module


def trainer_of(ppo, checkpoint):
    """A trainer with the policy and the critic of a checkpoint; "base": as a run begins."""
    ppo.KL_COEF, ppo.MAX_EVAL_PROMPTS = 0.0, 0
    if checkpoint != "base":
        ppo.ACTOR_MODEL, ppo.CRITIC_MODEL = f"{checkpoint}/policy", None
    trainer = ppo.PPOTrainer(resume_from_checkpoint="no")
    if checkpoint != "base":  # CRITIC_MODEL makes a new head
        trainer.critic = ppo.load_model(
            ppo.AutoModelForTokenClassification, f"{checkpoint}/critic", "CRITIC_MODEL", trainer.device
        )
        saved = torch.load(f"{checkpoint}/training_state.pt", map_location="cpu", weights_only=True)
        trainer.state.value_moments = saved["state"]["value_moments"]
    return trainer


def joined(starts, continuations, longest, end_ids):
    """Returns each start with its continuation, lists of ids, cut to `longest` ids, and whether each is
    truncated: its last id is no end."""
    whole = [(start + more)[:longest] for start, more in zip(starts, continuations)]
    return whole, [ids[-1] not in end_ids for ids in whole]


def expected_scores(ppo, trainer, batch, rows, tokens):
    """The mean score of CONTINUATIONS continuations of each response from its token on, and their
    variance."""
    prefixes, kept = [], []
    for row, token in zip(rows, tokens):
        prompt, response, _ = batch.sequences[row]
        prefixes.append(prompt + response[:token])
        kept += [response[:token]] * CONTINUATIONS
    uniform = torch.rand(len(kept), ppo.MAX_NEW_TOKENS)
    found = ppo.respond(trainer.actor, trainer.tokenizer, prefixes, uniform, CONTINUATIONS)
    end_ids = set(ppo.ids_of_ends(trainer.actor, trainer.tokenizer).tolist())
    continuations = [response for _, response, _ in found.sequences]
    whole, truncated = joined(kept, continuations, ppo.MAX_NEW_TOKENS, end_ids)
    found.truncated = torch.tensor(truncated, device=trainer.device)
    found.responses = trainer.tokenizer.batch_decode(whole, skip_special_tokens=True)
    found.columns = {"response_ids": whole}
    found.rows = ppo.repeat_each([batch.rows[row] for row in rows], CONTINUATIONS)
    scores, _, _ = trainer.score_responses(found)
    scores = scores.cpu().double().view(-1, CONTINUATIONS)
    return scores.mean(1).numpy(), scores.var(1).numpy()


def explained(scores, predictions, noise=0.0):
    """1 - Var(R - prediction) / Var(R); noise: the mean variance of the predictions' own error."""
    if scores.var() == 0:
        return float("nan")
    return 1 - ((scores - predictions).var() - noise) / scores.var()


def measure(ppo, checkpoint):
    trainer = trainer_of(ppo, checkpoint)
    batch = trainer.rollout(trainer.next_prompts())
    trainer.score(batch)
    values = batch.values.cpu().numpy()
    generator = np.random.default_rng(0)
    rows = np.arange(len(batch.rows)).repeat(PLACES)
    lengths = batch.response_lengths.cpu().numpy()[rows]
    tokens = (generator.random(len(rows)) * lengths).astype(int)
    means, variances = expected_scores(ppo, trainer, batch, rows.tolist(), tokens.tolist())
    scores = batch.scores.cpu().double().numpy()[rows]
    found = values[rows, tokens]
    prompts = rows // ppo.GROUP_SIZE
    print(f"{checkpoint}: mean score {batch.scores.mean():.3f}, variance {batch.scores.var():.4f}")
    parts = [("all tokens", np.ones(len(rows), dtype=bool))]
    for quarter in range(4):
        parts.append((f"quarter {quarter + 1}", (4 * tokens // lengths) == quarter))
    for name, chosen in parts:
        possible, ours = [], []
        for draw in range(501):  # the first as it is, 500 resampled
            weights = np.ones(prompts.max() + 1, dtype=int)
            if draw:
                weights = np.bincount(
                    generator.integers(len(weights), size=len(weights)), minlength=len(weights)
                )
            index = np.flatnonzero(chosen).repeat(weights[prompts[chosen]])
            noise = variances[index].mean() / CONTINUATIONS
            possible.append(explained(scores[index], means[index], noise))
            ours.append(explained(scores[index], found[index]))
        text = f"  {name:11}"
        for title, draws in (("possible", possible), ("ours", ours)):
            low, high = np.nanpercentile(draws[1:], [2.5, 97.5])
            text += f"  {title} {draws[0]:6.3f} ({low:.3f} to {high:.3f})"
        print(text, flush=True)


def main():
    global PLACES
    words, checkpoints = [], []
    for word in sys.argv[1:]:
        if word.startswith("PLACES="):
            PLACES = int(word.removeprefix("PLACES="))
        elif "=" in word:
            words.append(word)
        else:
            checkpoints.append(word)
    if not checkpoints:
        sys.exit(__doc__)
    words.append("OUTPUT_DIR=/tmp/bench_critic")
    for checkpoint in checkpoints:
        measure(load_ppo(words), checkpoint)


if __name__ == "__main__":
    main()
