"""Mutants of what PPO's values are made of. The program that plants them is mutants.py."""

PPO = "ppo/ppo.py"
TEST = "tests/test_critic.py::test_"
FEATURES = TEST + "value_features_are_known_before_the_token"
OTHERS = TEST + "a_responses_own_score_is_no_feature_of_it"
FIT = TEST + "the_fit_is_ridge_regression_with_forgetting"
VALUE = TEST + "a_value_is_the_critics_model_plus_the_fit_of_the_steps_before"
SAID = TEST + "a_critic_that_explains_nothing_is_said_once"

MUTANTS = [
    # A token's own probability is known only after it was sampled
    (PPO, "(is_unlikely.cumsum(1) - is_unlikely > 0)", "(is_unlikely.cumsum(1) > 0)", FEATURES),
    (
        PPO,
        "is_unlikely = (logprobs < math.log(0.5)) * mask",
        "is_unlikely = logprobs < math.log(0.5)",
        FEATURES,
    ),
    (PPO, "(logprobs < math.log(0.5)) * mask", "(logprobs < 0.5) * mask", FEATURES),
    (PPO, "position = mask.cumsum(1) / max_new_tokens", "position = mask.cumsum(1)", FEATURES),
    (PPO, "cumsum(1) - is_unlikely > 0).to(mask.dtype)", "cumsum(1) - is_unlikely)", FEATURES),
    # A response's own score must not be in its baseline
    (PPO, "(groups.sum(1, keepdim=True) - groups)", "groups.sum(1, keepdim=True)", OTHERS),
    (PPO, "- groups) / max(1, group_size - 1)", "- groups) / group_size", OTHERS),
    (PPO, "- groups) / max(1, group_size - 1)", "- groups) / (group_size - 1)", FEATURES),
    (PPO, "others_mean, others_mean * unlikely_before]", "others_mean, others_mean]", OTHERS),
    # the fit
    (PPO, "masked = features * mask[:, :, None]", "masked = features", FIT),
    (PPO, "decay * xx + new_xx", "xx + new_xx", FIT),
    (PPO, "decay * xy + new_xy", "xy + new_xy", FIT),
    (PPO, "xx + torch.eye(len(xx), dtype=xx.dtype)", "xx + 1e-9 * torch.eye(len(xx), dtype=xx.dtype)", FIT),
    # what it is fitted to, when, and what it is added to
    (PPO, "batch.returns - (batch.values - batch.fitted_values)", "batch.returns", VALUE),
    (PPO, "batch.returns - (batch.values - batch.fitted_values)", "batch.returns - batch.values", VALUE),
    (PPO, "batch.value_features) * mask\n", "batch.value_features)\n", VALUE),
    (PPO, "batch) + batch.fitted_values\n", "batch)\n", VALUE),
    (
        PPO,
        "                self.update_value_fit(batch)\n",
        "",
        TEST + "a_run_that_resumes_without_the_fit_has_none",
    ),
    (
        PPO,
        "        if VALUE_FIT_DECAY is not None and",
        "        if",
        TEST + "without_a_decay_the_value_is_that_of_the_critics_model_alone",
    ),
    (
        PPO,
        "micro) + batch.fitted_values[index, :width]",
        "micro)",
        TEST + "the_critics_loss_is_that_of_model_and_fit_together",
    ),
    (
        PPO,
        "VALUE_FIT_DECAY is not None and batch.returns.isfinite().all()",
        "VALUE_FIT_DECAY is not None",
        TEST + "a_step_that_is_not_finite_leaves_the_fit_as_it_was",
    ),
    (
        PPO,
        "            self.state.value_moments = None  # a run",
        "            pass  # a run",
        TEST + "a_run_that_resumes_without_the_fit_has_none",
    ),
    (
        PPO,
        "    if features.shape[2] != len(xx):",
        "    if False:",
        TEST + "a_checkpoints_fit_of_other_features_is_refused_with_what_to_do",
    ),
    # the message
    (
        PPO,
        "if variance > 1e-8 else math.nan",
        "if variance >= 0 else math.nan",
        TEST + "equal_returns_have_no_explained_variance",
    ),
    (
        PPO,
        "        if not math.isfinite(explained_variance):",
        "        if False:",
        TEST + "equal_returns_have_no_explained_variance",
    ),
    (PPO, "sorted(self.explained_variances[10:])", "sorted(self.explained_variances[-10:])", SAID),
    (PPO, "len(last) == 10 and last[5] < 0.05", "len(last) == 10 and last[5] < 0.5", SAID),
    (PPO, "len(last) == 10 and last[5] < 0.05", "len(last) >= 10 and last[5] < 0.05", SAID),
    (PPO, "{max(0, last[5]):.0%}", "{last[5]:.0%}", SAID),
    (
        PPO,
        '        self.check_critic(metrics["explained_variance"])\n',
        "",
        TEST + "record_hands_the_explained_variance_on",
    ),
]
