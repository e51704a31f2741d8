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
        PPO,
        '                "log_ratio": log_ratio.abs(),\n',
        '                "log_ratio": log_ratio,\n',
        IN_MODELS + "in_bfloat16_a_first_update_that_sees_other_probabilities_ends_the_run[ppo]",
    ),
    (
        GRPO,
        "- batch.sampled_logprobs[micro, :width]).abs()",
        "- batch.sampled_logprobs[micro, :width])",
        IN_MODELS + "in_bfloat16_a_first_update_that_sees_other_probabilities_ends_the_run[grpo]",
    ),
    (
        GRPO,
        "- batch.sampled_logprobs[micro, :width]).abs()",
        "- batch.logprobs[micro, :width]).abs()",
        IN_MODELS + "gspos_rescored_probabilities_do_not_hide_a_wrong_sampler",
    ),
    (
        PPO,
        "{k: torch.cat([some[k] for some in parts])",
        "{k: torch.cat([some[k] for some in parts[::-1]])",
        IN_PPO + "parts_of_several_calls_stay_beside_their_responses",
    ),
    (
        GRPO,
        "    size = BATCH_SIZE * GROUP_SIZE\n",
        "    size = BATCH_SIZE\n",
        IN_GRPO + "rewards_are_asked_about_whole_groups",
    ),
    (
        RCE,
        "    size = BATCH_SIZE * GROUP_SIZE\n",
        "    size = BATCH_SIZE\n",
        IN_RCE + "rewards_are_asked_about_batch_size_prompts_candidates_at_a_time",
    ),
    (
        PPO,
        "    size = BATCH_SIZE * GROUP_SIZE\n",
        "    size = BATCH_SIZE\n",
        IN_PPO + "parts_of_several_calls_stay_beside_their_responses",
    ),
    (
        GRPO,
        '{**trainer.models_by_constant, "REWARD_MODEL": trainer.reward_model or trainer.actor}',
        "trainer.models_by_constant",
        IN_TURNS + "what_turns_cannot_do_is_refused_at_the_start",
    ),
    (
        PPO,
        "            for _ in range(GROUP_EPOCHS):\n"
        "                rows = (torch.randperm if MINI_BATCHES > 1 else torch.arange)(len(batch.rows))\n",
        "            rows = (torch.randperm if MINI_BATCHES > 1 else torch.arange)(len(batch.rows))\n"
        "            for _ in range(GROUP_EPOCHS):\n",
        IN_PPO + "mini_batches_share_out_every_row_once",
    ),
    (
        GRPO,
        'sum(m["role"] == "assistant" for turns',
        'sum(m["role"] != "" for turns',
        IN_TURNS + "turns_are_the_policys_own",
    ),
    (PPO, "old_values, returns, VALUE_CLIP_RANGE)", "old_values, returns, CLIP_RANGE)", IN_PPO + UNLIKE),
    (GRPO, "ref_logprobs, KL_ESTIMATOR)", 'ref_logprobs, "k3")', IN_GRPO + UNLIKE + "[dapo]"),
    # which constant is handed where
    (
        PPO,
        "old_logprobs, advantages, CLIP_RANGE,",
        "old_logprobs, advantages, VALUE_CLIP_RANGE,",
        IN_PPO + UNLIKE,
    ),
    (PPO, "batch.values, mask, GAMMA, LAM)", "batch.values, mask, LAM, GAMMA)", IN_PPO + UNLIKE),
    (PPO, "policy_losses - ENTROPY_COEF * entropy", "policy_losses - KL_COEF * entropy", IN_PPO + UNLIKE),
    (PPO, "(VALUE_LOSS_COEF * value_losses", "(0.5 * value_losses", IN_PPO + UNLIKE),
    (PPO, "total += REWARD_MODEL_WEIGHT * self", "total += 0.1 * self", IN_PPO + UNLIKE),
    (
        PPO,
        '                self.state.kl_coef, metrics["kl"], KL_TARGET, len(batch.rows), KL_HORIZON\n',
        '                self.state.kl_coef, metrics["kl"], KL_TARGET, KL_HORIZON, len(batch.rows)\n',
        IN_PPO + UNLIKE,
    ),
    (PPO, "KL_TARGET, len(batch.rows),", "KL_TARGET, len(batch.rows) // GROUP_SIZE,", IN_PPO + UNLIKE),
    (
        GRPO,
        ("            CLIP_RANGE,\n            CLIP_RANGE_HIGH,\n"),
        ("            CLIP_RANGE_HIGH,\n            CLIP_RANGE,\n"),
        IN_GRPO + UNLIKE + "[dr_grpo]",
    ),
    (
        GRPO,
        "            DUAL_CLIP,\n",
        "            1 + CLIP_RANGE_HIGH,\n",
        IN_GRPO + UNLIKE + "[grpo]",
    ),
    (
        GRPO,
        "clipped = ratio > 1 + CLIP_RANGE_HIGH",
        "clipped = ratio > 1 + CLIP_RANGE",
        IN_GRPO + UNLIKE + "[cispo]",
    ),
    (
        GRPO,
        "losses - ENTROPY_COEF * entropy if",
        "losses - KL_COEF * entropy if",
        IN_GRPO + UNLIKE + "[gspo]",
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
    (
        GRPO,
        "(self.run.step + 1) % REFERENCE_SYNC_STEPS",
        "self.run.step % REFERENCE_SYNC_STEPS",
        IN_GRPO + UNLIKE + "[dapo]",
    ),
    (RCE, 'row["rewards"], tau, WEIGHT_REWARDS)', 'row["rewards"], TAU, WEIGHT_REWARDS)', IN_RCE + FORMULAS),
    (
        RCE,
        "rewards.shape_wrong(shaped, hard, grades, SIMILARITY_WEIGHT)",
        "rewards.shape_wrong(shaped, hard, hard, SIMILARITY_WEIGHT)",
        IN_RCE + FORMULAS,
    ),
    (
        RCE,
        "for key in (HYBRID_SCORE, SIMILARITY))",
        "for key in (HYBRID_SCORE, HYBRID_SCORE))",
        IN_RCE + FORMULAS,
    ),
    (RCE, "order[:VERIFY_RANDOM]", "order[:VERIFY_TOP]", IN_RCE + BY_ITSELF + "[VERIFY_RANDOM]"),
    (
        RCE,
        "len(range(k, GROUP_SIZE, len",
        "len(range(k, EVAL_SAMPLES, len",
        IN_RCE + BY_ITSELF + "[GROUP_SIZE]",
    ),
    # data and splits
    (
        PPO,
        '"TRAIN_DATASETS", MAX_TRAIN_PROMPTS,',
        '"TRAIN_DATASETS", MAX_EVAL_PROMPTS,',
        IN_PPO + BY_ITSELF + "[MAX_TRAIN_PROMPTS]",
    ),
    (
        GRPO,
        '"EVAL_DATASETS", MAX_EVAL_PROMPTS,',
        '"EVAL_DATASETS", MAX_TRAIN_PROMPTS,',
        IN_GRPO + BY_ITSELF + "[MAX_EVAL_PROMPTS]",
    ),
    (PPO, "load_prompts(EVAL_DATASETS,", "load_prompts(TRAIN_DATASETS,", IN_PPO + EVALUATION),
    (GRPO, "load_prompts(EVAL_DATASETS,", "load_prompts(TRAIN_DATASETS,", IN_GRPO + EVALUATION),
    (RCE, "load_prompts(EVAL_DATASETS,", "load_prompts(TRAIN_DATASETS,", IN_RCE + EVALUATION),
    (
        RCE,
        "        self.held_back = {texts[i] for i in order[: int(VALIDATION_FRACTION * len(texts))]}\n",
        "        self.held_back = {texts[i] for i in order[: int((1 - VALIDATION_FRACTION) * len(texts))]}\n",
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
        'words = f"{SEED} {self',
        'words = f"{self',
        IN_RCE + "each_prompt_round_and_use_has_a_random_stream_of_its_own",
    ),
    # schedules
    (PPO, "min(NUM_EPOCHS * steps_an_epoch, MAX", "min(steps_an_epoch, MAX", IN_PPO + UNLIKE),
    (
        GRPO,
        "max(0, NUM_EPOCHS - self.state.epoch)",
        "max(0, 1 - self.state.epoch)",
        IN_GRPO + UNLIKE + "[dapo]",
    ),
    (
        PPO,
        "learning_rate_scale(run.step, run.total_steps,",
        "learning_rate_scale(run.step % max(1, run.total_steps // NUM_EPOCHS), run.total_steps,",
        IN_PPO + UNLIKE,
    ),
    (
        RCE,
        "learning_rate_scale(run.step, run.total_steps,",
        "learning_rate_scale(run.step, self.round_end,",
        IN_RCE + FORMULAS,
    ),
    (
        RCE,
        "tau_at(self.run.step, self.run.total_steps)",
        "tau_at(self.run.step, self.round_end)",
        IN_RCE + FORMULAS,
    ),
    (
        RCE,
        "self.state.round_start + rounds_left * steps",
        "self.state.round_start + steps",
        IN_RCE + FORMULAS,
    ),
    (
        PPO,
        "- old_logprobs).clamp(min=-20) * mask",
        "- old_logprobs) * mask",
        IN_MODELS + "a_token_that_leaves_the_nucleus_in_a_later_pass_has_ratio_0_and_finite_metrics[ppo]",
    ),
    (
        GRPO,
        "ratio.clamp(min=2e-9).log()",
        "ratio.log()",
        IN_MODELS + "a_token_that_leaves_the_nucleus_in_a_later_pass_has_ratio_0_and_finite_metrics[grpo]",
    ),
    (
        GRPO,
        ".abs().clamp(max=20)",
        ".abs()",
        IN_MODELS + "a_token_that_leaves_the_nucleus_in_a_later_pass_has_ratio_0_and_finite_metrics[grpo]",
    ),
    (
        GRPO,
        "torch.where(logprobs > -1e29, logprobs - ref_logprobs, 0.0)",
        "logprobs - ref_logprobs",
        IN_MODELS + "a_lost_tokens_kl_is_finite_and_has_no_gradient",
    ),
    (
        GRPO,
        "apart.square().mean(1).sqrt()",
        "apart.abs()",
        IN_MODELS + "bfloat16s_rounding_is_told_from_a_mistake_by_a_positions_mean",
    ),
    (
        GRPO,
        "(apart.abs() if exact else",
        "(",
        IN_MODELS + "bfloat16s_rounding_is_told_from_a_mistake_by_a_positions_mean",
    ),
    (
        PPO,
        'os.environ.get("RANK", "0") == "0":\n    print(',
        "True:\n    print(",
        "tests/test_run.py::test_the_first_line_stands_before_torch_is_imported[ppo/ppo.py]",
    ),
    (
        GRPO,
        'if __name__ == "__main__" and',
        'import torch\nif __name__ == "__main__" and',
        "tests/test_run.py::test_the_first_line_stands_before_torch_is_imported[grpo/grpo.py]",
    ),
]
