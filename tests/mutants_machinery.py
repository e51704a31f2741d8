"""Mutants of which constant is handed where, and of data, splits, seeds and schedules; first those that an
audit of the machinery planted and that lived. The program that plants them is mutants.py."""

PPO, GRPO, RCE = "ppo/ppo.py", "grpo/grpo.py", "rce/rce.py"
IN_GRPO = "tests/test_grpo.py::test_"
IN_MODELS = "tests/test_models.py::test_"
IN_PPO = "tests/test_ppo.py::test_"
IN_RCE = "tests/test_rce.py::test_"
IN_TURNS = "tests/test_turns.py::test_"
UNLIKE = "a_step_whose_constants_are_all_unlike_is_the_papers_in_float64"
FORMULAS = "a_step_whose_constants_are_all_unlike_is_the_formulas_in_float64"
BY_ITSELF = "each_constant_by_itself_changes_what_it_should_and_nothing_else"
EVALUATION = "evaluation_samples_the_held_out_prompts_by_the_seed_after_the_runs"

MUTANTS = [
    # what the audit planted
    (
        GRPO,
        "start > BATCH_SIZE * GROUP_SIZE:",
        "start > BATCH_SIZE:",
        IN_GRPO + "rewards_are_asked_about_whole_groups",
    ),
    (
        RCE,
        "start > BATCH_SIZE * GROUP_SIZE:",
        "start > BATCH_SIZE:",
        IN_RCE + "rewards_are_asked_about_batch_size_prompts_candidates_at_a_time",
    ),
    (
        PPO,
        "start > BATCH_SIZE * GROUP_SIZE:",
        "start > BATCH_SIZE:",
        IN_PPO + "parts_of_several_calls_stay_beside_their_responses",
    ),
    (
        GRPO,
        'roles.count("assistant") / len(others)',
        "len(roles) / len(others)",
        IN_TURNS + "turns_are_the_policys_own",
    ),
    (PPO, "old_values, returns, VALUE_CLIP_RANGE)", "old_values, returns, CLIP_RANGE)", IN_PPO + UNLIKE),
    # which constant is handed where
    (PPO, "batch.values, mask, GAMMA, LAM)", "batch.values, mask, LAM, GAMMA)", IN_PPO + UNLIKE),
    (PPO, "actor_losses - ENTROPY_COEF * entropy", "actor_losses - KL_COEF * entropy", IN_PPO + UNLIKE),
    (PPO, "(VALUE_LOSS_COEF * value_losses", "(0.5 * value_losses", IN_PPO + UNLIKE),
    (PPO, "total += REWARD_MODEL_WEIGHT * self", "total += 0.1 * self", IN_PPO + UNLIKE),
    (
        GRPO,
        ("LOSS_TYPE, CLIP_RANGE, CLIP_RANGE_HIGH, DUAL_CLIP\n"),
        ("LOSS_TYPE, CLIP_RANGE_HIGH, CLIP_RANGE, DUAL_CLIP\n"),
        IN_GRPO + UNLIKE + "[dr_grpo]",
    ),
    (
        GRPO,
        "CLIP_RANGE, CLIP_RANGE_HIGH, DUAL_CLIP\n",
        "CLIP_RANGE, CLIP_RANGE_HIGH, 1 + CLIP_RANGE_HIGH\n",
        IN_GRPO + UNLIKE + "[grpo]",
    ),
    (
        GRPO,
        "MAX_NEW_TOKENS, OVERLONG_BUFFER)",
        "MAX_PROMPT_TOKENS, OVERLONG_BUFFER)",
        IN_GRPO + UNLIKE + "[dapo]",
    ),
    (
        GRPO,
        "LOSS_TYPE, MAX_NEW_TOKENS) * batch.trained",
        "LOSS_TYPE, MAX_PROMPT_TOKENS) * batch.trained",
        IN_GRPO + UNLIKE + "[dr_grpo]",
    ),
    (
        GRPO,
        "group_advantages(batch.scores, GROUP_SIZE,",
        "group_advantages(batch.scores, EVAL_SAMPLES,",
        IN_GRPO + UNLIKE + "[dapo]",
    ),
    (RCE, 'row["rewards"], tau, WEIGHT_REWARDS)', 'row["rewards"], TAU, WEIGHT_REWARDS)', IN_RCE + FORMULAS),
    (
        RCE,
        "rewards.shape_wrong(shaped, hard, similarities, SIMILARITY_WEIGHT)",
        "rewards.shape_wrong(shaped, hard, hard, SIMILARITY_WEIGHT)",
        IN_RCE + FORMULAS,
    ),
    (
        RCE,
        'similarities = [c.get(f"reward/{SIMILARITY}")',
        'similarities = [c.get(f"reward/{HYBRID_SCORE}")',
        IN_RCE + FORMULAS,
    ),
    (RCE, "order[:VERIFY_RANDOM]", "order[:VERIFY_TOP]", IN_RCE + BY_ITSELF + "[VERIFY_RANDOM]"),
    (
        RCE,
        "divmod(GROUP_SIZE, len",
        "divmod(EVAL_SAMPLES, len",
        IN_RCE + BY_ITSELF + "[GROUP_SIZE]",
    ),
    # data and splits
    (
        RCE,
        "order[: int(VALIDATION_FRACTION * len(texts))]",
        "order[: int((1 - VALIDATION_FRACTION) * len(texts))]",
        IN_RCE + FORMULAS,
    ),
    (
        PPO,
        "self.state, BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS)",
        "self.state, BATCH_SIZE * GROUP_SIZE)",
        IN_PPO + UNLIKE,
    ),
    # seeds
    (PPO, "manual_seed(SEED + 1)", "manual_seed(SEED + self.state.epoch)", IN_PPO + EVALUATION),
    (GRPO, "manual_seed(SEED + 1)", "manual_seed(SEED)", IN_GRPO + EVALUATION),
    (RCE, "manual_seed(SEED + 1)", "manual_seed(1)", IN_RCE + EVALUATION),
    (GRPO, "manual_seed(SEED + state.epoch)", "manual_seed(state.epoch)", IN_GRPO + UNLIKE + "[dapo]"),
    (
        RCE,
        "torch.randperm(len(texts), generator=torch.Generator().manual_seed(SEED))",
        "torch.randperm(len(texts), generator=torch.Generator().manual_seed(self.state.round))",
        IN_RCE + FORMULAS,
    ),
    (PPO, "seed_everything(SEED)", "seed_everything(1)", IN_PPO + EVALUATION),
    (GRPO, "seed_everything(SEED)", "seed_everything(1)", IN_GRPO + EVALUATION),
    (
        RCE,
        'seed = f"{SEED} {self',
        'seed = f"{self',
        IN_RCE + "each_prompt_round_and_use_has_a_random_stream_of_its_own",
    ),
    # schedules
    (
        GRPO,
        "max(0, NUM_EPOCHS - state.epoch)",
        "max(0, 1 - state.epoch)",
        IN_GRPO + UNLIKE + "[dapo]",
    ),
    (
        RCE,
        "self.state.round_start + rounds_left * steps",
        "self.state.round_start + steps",
        IN_RCE + FORMULAS,
    ),
    (
        GRPO,
        "ratio.clamp(min=2e-9).log()",
        "ratio.log()",
        IN_MODELS + "a_token_that_leaves_the_nucleus_in_a_later_pass_has_ratio_0_and_finite_metrics[grpo]",
    ),
    (
        GRPO,
        "torch.where(logprobs > -1e29, logprobs - ref_logprobs, 0.0)",
        "logprobs - ref_logprobs",
        IN_MODELS + "a_lost_tokens_kl_is_finite_and_has_no_gradient",
    ),
    (
        PPO,
        'os.environ.get("RANK", "0") == "0":\n    print(',
        "True:\n    print(",
        "tests/test_run.py::test_the_first_line_stands_before_torch_is_imported[ppo/ppo.py]",
    ),
    (
        GRPO,
        'if __name__ == "__main__" and os.environ',
        'import torch\nif __name__ == "__main__" and os.environ',
        "tests/test_run.py::test_the_first_line_stands_before_torch_is_imported[grpo/grpo.py]",
    ),
    (
        PPO,
        '"mean_abs_log_ratio": log_ratio.abs(),',
        '"mean_abs_log_ratio": log_ratio,',
        "tests/test_models.py::test_in_bfloat16_a_first_update_that_sees_other_probabilities_ends_the_run[ppo]",
    ),
    (
        GRPO,
        '"mean_abs_log_ratio": log_ratio.abs()}',
        '"mean_abs_log_ratio": log_ratio}',
        "tests/test_models.py::test_in_bfloat16_a_first_update_that_sees_other_probabilities_ends_the_run[grpo]",
    ),
    (
        GRPO,
        "- batch.sampled_logprobs[index, :width])",
        "- batch.logprobs[index, :width])",
        "tests/test_models.py::test_gspos_rescored_probabilities_do_not_hide_a_wrong_sampler",
    ),
    (
        PPO,
        "torch.cat([values[part] for values in chunk_parts])",
        "torch.cat([values[part] for values in chunk_parts[::-1]])",
        "tests/test_ppo.py::test_parts_of_several_calls_stay_beside_their_responses",
    ),
    (
        GRPO,
        '{**trainer.models_by_constant, "REWARD_MODEL": trainer.reward_model or trainer.actor}',
        "trainer.models_by_constant",
        "tests/test_turns.py::test_what_turns_cannot_do_is_refused_at_the_start",
    ),
    (
        PPO,
        "            for _ in range(GROUP_EPOCHS):\n                for rows in mini_batches(len(batch.rows)):",
        "            chunks = mini_batches(len(batch.rows))\n            for _ in range(GROUP_EPOCHS):\n                for rows in chunks:",
        "tests/test_ppo.py::test_mini_batches_share_out_every_row_once",
    ),
    (
        GRPO,
        "batch.ref_logprobs[index, :width], KL_ESTIMATOR)",
        'batch.ref_logprobs[index, :width], "k3")',
        "tests/test_grpo.py::test_a_step_whose_constants_are_all_unlike_is_the_papers_in_float64[dapo]",
    ),
    (
        PPO,
        "logprobs, old_logprobs, advantages, CLIP_RANGE, clip_range_high, DUAL_CLIP",
        "logprobs, old_logprobs, advantages, VALUE_CLIP_RANGE, clip_range_high, DUAL_CLIP",
        "tests/test_ppo.py::test_a_step_whose_constants_are_all_unlike_is_the_papers_in_float64",
    ),
    (
        PPO,
        "KL_TARGET, num_responses, KL_HORIZON)",
        "KL_TARGET, KL_HORIZON, num_responses)",
        "tests/test_ppo.py::test_a_step_whose_constants_are_all_unlike_is_the_papers_in_float64",
    ),
    (
        PPO,
        'self.adapt_kl(metrics["kl"], len(batch.rows))',
        'self.adapt_kl(metrics["kl"], len(batch.rows) // GROUP_SIZE)',
        "tests/test_ppo.py::test_a_step_whose_constants_are_all_unlike_is_the_papers_in_float64",
    ),
    (
        GRPO,
        "clipped = ratio > 1 + clip_range_high",
        "clipped = ratio > 1 + clip_range",
        "tests/test_grpo.py::test_a_step_whose_constants_are_all_unlike_is_the_papers_in_float64[cispo]",
    ),
    (
        GRPO,
        "losses = losses - ENTROPY_COEF * entropy",
        "losses = losses - KL_COEF * entropy",
        "tests/test_grpo.py::test_a_step_whose_constants_are_all_unlike_is_the_papers_in_float64[gspo]",
    ),
    (
        GRPO,
        "self.reference and self.run.is_due(REFERENCE_SYNC_STEPS):",
        "self.reference and (self.run.step - 1) % REFERENCE_SYNC_STEPS == 0:",
        "tests/test_grpo.py::test_a_step_whose_constants_are_all_unlike_is_the_papers_in_float64[dapo]",
    ),
    (
        PPO,
        '"TRAIN_DATASETS", MAX_TRAIN_PROMPTS)',
        '"TRAIN_DATASETS", MAX_EVAL_PROMPTS)',
        "tests/test_ppo.py::test_each_constant_by_itself_changes_what_it_should_and_nothing_else[MAX_TRAIN_PROMPTS]",
    ),
    (
        GRPO,
        'load_prompts(self, EVAL_DATASETS, "EVAL_DATASETS", MAX_EVAL_PROMPTS)',
        'load_prompts(self, EVAL_DATASETS, "EVAL_DATASETS", MAX_TRAIN_PROMPTS)',
        "tests/test_grpo.py::test_each_constant_by_itself_changes_what_it_should_and_nothing_else[MAX_EVAL_PROMPTS]",
    ),
    (
        PPO,
        "load_prompts(self, EVAL_DATASETS,",
        "load_prompts(self, TRAIN_DATASETS,",
        "tests/test_ppo.py::test_evaluation_samples_the_held_out_prompts_by_the_seed_after_the_runs",
    ),
    (
        GRPO,
        "load_prompts(self, EVAL_DATASETS,",
        "load_prompts(self, TRAIN_DATASETS,",
        "tests/test_grpo.py::test_evaluation_samples_the_held_out_prompts_by_the_seed_after_the_runs",
    ),
    (
        RCE,
        "load_prompts(self, EVAL_DATASETS,",
        "load_prompts(self, TRAIN_DATASETS,",
        "tests/test_rce.py::test_evaluation_samples_the_held_out_prompts_by_the_seed_after_the_runs",
    ),
    (
        PPO,
        "max(0, NUM_EPOCHS - state.epoch)",
        "max(0, 1 - state.epoch)",
        "tests/test_ppo.py::test_a_step_whose_constants_are_all_unlike_is_the_papers_in_float64",
    ),
    (
        PPO,
        "steps_done = max(0, run.step - 1)  # run.step is 0 before the first step\n        schedule",
        "steps_done = max(0, run.step - 1) % max(1, run.total_steps // NUM_EPOCHS)\n        schedule",
        "tests/test_ppo.py::test_a_step_whose_constants_are_all_unlike_is_the_papers_in_float64",
    ),
    (
        RCE,
        "learning_rate_scale(steps_done, run.total_steps, WARMUP",
        "learning_rate_scale(steps_done, self.round_end, WARMUP",
        "tests/test_rce.py::test_a_step_whose_constants_are_all_unlike_is_the_formulas_in_float64",
    ),
    (
        RCE,
        "tau_at(max(0, self.run.step - 1), self.run.total_steps)",
        "tau_at(max(0, self.run.step - 1), self.round_end)",
        "tests/test_rce.py::test_a_step_whose_constants_are_all_unlike_is_the_formulas_in_float64",
    ),
    (
        PPO,
        "log_ratio = (logprobs - old_logprobs).clamp(min=-20)",
        "log_ratio = logprobs - old_logprobs",
        "tests/test_models.py::test_a_token_that_leaves_the_nucleus_in_a_later_pass_has_ratio_0_and_finite_metrics[ppo]",
    ),
    (
        GRPO,
        "[index, :width]).clamp(-20, 20)",
        "[index, :width])",
        "tests/test_models.py::test_a_token_that_leaves_the_nucleus_in_a_later_pass_has_ratio_0_and_finite_metrics[grpo]",
    ),
    (
        GRPO,
        "difference = difference.square().mean(1).sqrt().max()",
        "difference = difference.abs().max()",
        "tests/test_models.py::test_bfloat16s_rounding_is_told_from_a_mistake_by_a_positions_mean",
    ),
    (
        GRPO,
        "difference = difference.abs().max()",
        "difference = difference.square().mean(1).sqrt().max()",
        "tests/test_models.py::test_bfloat16s_rounding_is_told_from_a_mistake_by_a_positions_mean",
    ),
]
