"""Mutants of what issue 31 brought: distillation, PPO's corrections, further losses, concurrent rewards."""

PPO, GRPO = "ppo/ppo.py", "grpo/grpo.py"
IN_GRPO = "tests/test_grpo.py::test_"
BEST = IN_GRPO + "best_follows_the_kl_to_the_teacher_where_all_rewards_have_weight_0"
HAS_REWARD = IN_GRPO + "a_run_with_a_reward_has_best_follow_that"
ALONE = IN_GRPO + "a_group_of_one_is_for_distillation_which_has_only_flat_groups"

MUTANTS = [
    # distillation
    (GRPO, 'metrics["minus_kl"] = -metrics["kl"]', 'metrics["minus_kl"] = metrics["kl"]', BEST),
    (GRPO, '"minus_kl" if self.distils else "reward"', '"reward"', BEST),
    (GRPO, "((kl * batch.response_mask).sum() / batch.response_mask.sum())", "kl.mean()", BEST),
    (GRPO, "kl = kl_loss(batch.logprobs, self.reference_logprobs(batch), KL_ESTIMATOR)",
     'kl = kl_loss(batch.logprobs, self.reference_logprobs(batch), "k3")', BEST),
    (GRPO, "not any(weights) and not OVERLONG_BUFFER\n", "not any(weights)\n", HAS_REWARD),
    (GRPO, "self.distils = self.reference is not None and not", "self.distils = not", HAS_REWARD),
    (GRPO, "is not None and not any(weights) and", "is not None and", HAS_REWARD),
    (GRPO, "if GROUP_SIZE == 1 and not trainer.distils:", "if False:", ALONE),
    (GRPO, "if RESAMPLE_FLAT_GROUPS and trainer.distils:", "if False:", ALONE),
    (GRPO, 'if scale != "none" and group_size > 1:', 'if scale != "none":',
     IN_GRPO + "a_group_of_one_has_no_advantage"),
    (GRPO, "group_size / max(1, group_size - 1)", "group_size / (group_size - 1)",
     IN_GRPO + "a_group_of_one_has_no_advantage"),
]
