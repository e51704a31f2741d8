"""Mutants of what issue 31 brought: distillation, PPO's corrections, further losses, concurrent rewards."""

PPO, GRPO, REWARDS = "ppo/ppo.py", "grpo/grpo.py", "rewards/__init__.py"
IN_GRPO = "tests/test_grpo.py::test_"
BEST = IN_GRPO + "best_follows_the_kl_to_the_teacher_where_all_rewards_have_weight_0"
IN_RECIPES = "tests/test_recipes.py::test_"
IN_PPO = "tests/test_ppo.py::test_"
UNLIKE = IN_PPO + "a_step_whose_constants_are_all_unlike_is_the_papers_in_float64"
ALONE = IN_GRPO + "a_group_of_one_is_for_distillation_which_has_only_flat_groups"
SAPO = IN_GRPO + "sapos_gradient_is_grpos_on_policy_and_falls_to_either_side"

MUTANTS = [
    # distillation
    (GRPO, 'metrics["minus_kl"] = -metrics["kl"]', 'metrics["minus_kl"] = metrics["kl"]', BEST),
    (GRPO, "((kl * batch.response_mask).sum() / batch.response_mask.sum())", "kl.mean()", BEST),
    (
        GRPO,
        "kl = kl_loss(batch.logprobs, self.reference_logprobs(batch), KL_ESTIMATOR)",
        'kl = kl_loss(batch.logprobs, self.reference_logprobs(batch), "k3")',
        BEST,
    ),
    (GRPO, 'if GROUP_SIZE == 1 and STAGE == "train" and not trainer.distils:', "if False:", ALONE),
    (GRPO, "if trainer.distils and RESAMPLE_FLAT_GROUPS:", "if False:", ALONE),
    (
        GRPO,
        'if scale != "none" and group_size > 1:',
        'if scale != "none":',
        IN_GRPO + "a_group_of_one_has_no_advantage",
    ),
    (
        GRPO,
        "group_size / max(1, group_size - 1)",
        "group_size / (group_size - 1)",
        IN_GRPO + "a_group_of_one_has_no_advantage",
    ),
    # losses
    (GRPO, "torch.where(advantages > 0, 1.0, 1.05)", "torch.where(advantages > 0, 1.05, 1.0)", SAPO),
    (GRPO, "return -4 / tau * torch.sigmoid", "return -4 * torch.sigmoid", SAPO),
    (GRPO, "torch.sigmoid(tau * (ratio - 1))", "torch.sigmoid(tau * ratio)", SAPO),
    (
        GRPO,
        'if loss_type in ("grpo", "gspo", "sapo"):',
        'if loss_type in ("grpo", "gspo"):',
        IN_GRPO + "each_loss_against_an_independent_sum_in_float64[None-sapo]",
    ),
    # PPO's corrections
    (PPO, "mask, GAMMA, CRITIC_LAM)", "mask, GAMMA, LAM)", UNLIKE),
    (PPO, "1 + clip_range_high)", "1 + clip_range)", IN_PPO + "policy_clip"),
    (
        PPO,
        "torch.max(objective, dual_clip * advantages)",
        "torch.min(objective, dual_clip * advantages)",
        IN_PPO + "policy_clip",
    ),
    (
        PPO,
        "torch.where(advantages < 0, torch.max(",
        "torch.where(advantages > 0, torch.max(",
        IN_PPO + "policy_clip",
    ),
    (
        PPO,
        "high = CLIP_RANGE_HIGH or CLIP_RANGE",
        "high = CLIP_RANGE_HIGH or 0.2",
        IN_PPO + "one_clip_range_clips_both_ways",
    ),
    # concurrent rewards
    (
        REWARDS,
        "parts = pool.map(call, range(0, len(responses), rows))",
        "parts = map(call, range(0, len(responses), rows))",
        "tests/test_examples.py::test_a_judge_over_http_is_asked_concurrently_and_answers_in_order",
    ),
    (
        REWARDS,
        "{name: values[part] for name, values in columns.items()}",
        "columns",
        IN_RECIPES + "threads_change_no_value_and_hand_on_the_columns",
    ),
    (
        REWARDS,
        "part = slice(start, start + rows)",
        "part = slice(start, start + rows - (rows > 1))",
        IN_RECIPES + "threads_change_no_value_and_hand_on_the_columns",
    ),
    (
        REWARDS,
        "            if len(values) != len(responses[part]):",
        "            if False:",
        IN_RECIPES + "values_that_do_not_fit_their_responses_are_an_error_though_their_sum_does",
    ),
    (
        REWARDS,
        "    @functools.wraps(function)\n    def concurrently",
        "    def concurrently",
        IN_RECIPES + "threads_change_no_value_and_hand_on_the_columns",
    ),
    (GRPO, 'self.run.best_by = ["minus_kl"]', 'self.run.best_by = ["reward"]', BEST),
    (
        GRPO,
        "    if OVERLONG_BUFFER:\n        weights",
        "    if False:\n        weights",
        "tests/test_grpo.py::test_a_run_with_a_reward_has_best_follow_that",
    ),
    (
        GRPO,
        "return trainer.reference is not None and not any",
        "return not any",
        "tests/test_grpo.py::test_a_run_with_a_reward_has_best_follow_that",
    ),
    (
        GRPO,
        "is not None and not any(weights) and",
        "is not None and",
        "tests/test_grpo.py::test_a_run_with_a_reward_has_best_follow_that",
    ),
    (
        GRPO,
        '    if loss_type == "sapo":\n        clipped',
        "    if False:\n        clipped",
        "tests/test_grpo.py::test_clip_fraction_counts_the_side_that_is_clipped[sapo]",
    ),
    (
        PPO,
        "gae(token_rewards, batch.values, mask, GAMMA, LAM)",
        "gae(token_rewards, batch.values, mask, GAMMA, CRITIC_LAM)",
        UNLIKE,
    ),
    (
        PPO,
        "return steps_done < CRITIC_WARMUP_STEPS",
        "return False",
        "tests/test_audit_core.py::test_the_critics_warm_up_leaves_actor_moments_and_kl_coefficient_alone",
    ),
    (
        PPO,
        "logprobs, old_logprobs, advantages, CLIP_RANGE, clip_range_high, DUAL_CLIP",
        "logprobs, old_logprobs, advantages, clip_range_high, CLIP_RANGE, DUAL_CLIP",
        UNLIKE,
    ),
    (
        PPO,
        "logprobs, old_logprobs, advantages, CLIP_RANGE, clip_range_high, DUAL_CLIP",
        "logprobs, old_logprobs, advantages, CLIP_RANGE, clip_range_high, None",
        UNLIKE,
    ),
    (
        PPO,
        "too_high = ratio > 1 + clip_range_high",
        "too_high = ratio > 1 + clip_range",
        "tests/test_ppo.py::test_clip_fraction_counts_the_tokens_whose_gradient_the_clip_took[1.25-1-0]",
    ),
]
