"""Mutants of ppo/ppo.py, and of what the trainers have alike. The program that plants them is mutants.py."""

PPO, GRPO, RCE = "ppo/ppo.py", "grpo/grpo.py", "rce/rce.py"
IN_PPO = "tests/test_ppo.py::test_"
IN_RUN = "tests/test_run.py::test_"
IN_SAFETY = "tests/test_safety.py::test_"

MUTANTS = [
    # order of the prompts
    (
        PPO,
        "    chosen = state.order[state.cursor : state.cursor + count].tolist()\n",
        "    chosen = state.order[state.cursor : min(state.cursor + count, len(rows) - 1)].tolist()\n",
        IN_RUN + "every_epoch_sees_every_prompt_once_in_an_order_of_its_own[ppo]",
    ),
    (
        GRPO,
        "state.cursor = (state.cursor + len(chosen)) % len(rows)",
        "state.cursor = (state.cursor + len(chosen)) % (len(rows) - 1)",
        IN_RUN + "every_epoch_sees_every_prompt_once_in_an_order_of_its_own[grpo]",
    ),
    (
        PPO,
        "manual_seed(SEED + state.epoch)",
        "manual_seed(SEED)",
        IN_RUN + "every_epoch_sees_every_prompt_once_in_an_order_of_its_own[ppo]",
    ),
    (
        RCE,
        "state.epoch += 1",
        "state.epoch = 1",
        IN_RUN + "every_epoch_sees_every_prompt_once_in_an_order_of_its_own[rce]",
    ),
    # what a checkpoint keeps
    (
        PPO,
        'vars(self.state).update(saved["state"])',
        'vars(self.state).update(saved["state"], kl_coef=KL_COEF)',
        IN_RUN + "a_checkpoint_keeps_every_field_of_the_state_by_itself[ppo]",
    ),
    (
        PPO,
        '            set_rng_state(saved["rng"])\n',
        "",
        IN_RUN + "the_second_step_of_a_resumed_run_is_that_of_the_unbroken_one",
    ),
    (
        PPO,
        '    torch.set_rng_state(torch.ByteTensor(state["torch"]))',
        "    pass",
        IN_RUN + "generators_of_python_numpy_and_torch_are_restored",
    ),
    (
        PPO,
        '    np.random.set_state(state["numpy"])',
        "    pass",
        IN_RUN + "generators_of_python_numpy_and_torch_are_restored",
    ),
    (
        PPO,
        "path = REFERENCE_MODEL or ACTOR_MODEL",
        'path = at / "policy" if at else REFERENCE_MODEL or ACTOR_MODEL',
        IN_RUN + "the_second_step_of_a_resumed_run_is_that_of_the_unbroken_one",
    ),
    (
        PPO,
        'vars(self.state).update(saved["state"])',
        'vars(self.state).update(saved["state"], cursor=0)',
        IN_RUN + "the_second_step_of_a_resumed_run_is_that_of_the_unbroken_one",
    ),
    (
        PPO,
        "file_digest(folder / name) != manifest[name]",
        'file_digest(folder / name)["size"] != manifest[name]["size"]',
        IN_SAFETY + "a_checkpoint_whose_files_are_not_those_of_its_manifest_is_told[ppo/ppo.py]",
    ),
    (
        GRPO,
        '("training_state.pt", *manifest)',
        '("training_state.pt",)',
        IN_SAFETY + "a_checkpoint_whose_files_are_not_those_of_its_manifest_is_told[grpo/grpo.py]",
    ),
    (
        PPO,
        "            self.lock.acquire(blocking=False)\n",
        "            pass\n",
        IN_SAFETY + "a_folder_in_use_is_refused_and_a_dead_runs_lock_is_not",
    ),
    (PPO, "            self.lock.release(force=True)\n", "", IN_SAFETY + "the_lock_is_let_go_after_training"),
    (
        PPO,
        'map_location="cpu", weights_only=True)',
        'map_location="cpu", weights_only=False)',
        IN_SAFETY + "a_pickle_bomb_does_not_go_off",
    ),
    # the best policy, patience, plateau
    (
        PPO,
        "self.evals_since_best += 1\n",
        "self.evals_since_best = 1\n",
        IN_RUN + "early_stopping_and_plateau_count_evaluations_without_a_better_reward",
    ),
    (
        PPO,
        "if self.evals_since_best % PLATEAU_PATIENCE == 0:",
        "if self.evals_since_best >= PLATEAU_PATIENCE - 1:",
        IN_RUN + "early_stopping_and_plateau_count_evaluations_without_a_better_reward",
    ),
    (
        PPO,
        "0 < EARLY_STOPPING_PATIENCE <= self.evals",
        "0 < EARLY_STOPPING_PATIENCE < self.evals",
        IN_RUN + "early_stopping_and_plateau_count_evaluations_without_a_better_reward",
    ),
    # the KL coefficient
    (
        PPO,
        "max(-0.2, min(0.2, kl / target - 1))",
        "max(-0.2, min(0.2, 1 - kl / target))",
        IN_PPO + "kl_controller",
    ),
    (
        PPO,
        'metrics["kl"] = masked_mean(batch.logprobs - batch.ref_logprobs,',
        'metrics["kl"] = masked_mean(batch.ref_logprobs - batch.logprobs,',
        IN_PPO + "the_coefficient_rises_where_kl_is_above_its_target_and_the_next_step_pays_it",
    ),
    (
        PPO,
        "        if not KL_TARGET:\n",
        "        if True:",
        IN_PPO + "the_coefficient_rises_where_kl_is_above_its_target_and_the_next_step_pays_it",
    ),
    # optimizers
    (
        PPO,
        'set_learning_rate(self.optimizers["critic"], CRITIC_LEARNING_RATE * scale)',
        'set_learning_rate(self.optimizers["critic"], CRITIC_LEARNING_RATE)',
        IN_PPO + "actor_and_critic_each_move_by_their_own_scheduled_rate",
    ),
    (
        PPO,
        'parameters = [p for group in optimizer.param_groups for p in group["params"]]\n        norm',
        'parameters = optimizer.param_groups[0]["params"]\n        norm',
        IN_RUN + "every_group_of_an_optimizer_is_scheduled_clipped_stepped_and_resumed",
    ),
    (
        GRPO,
        "logprobs.clamp(min=-1e30)).sum",
        "logprobs).sum",
        "tests/test_models.py::test_an_edit_of_the_sampling_distribution_passes_the_check_at_load_and_trains",
    ),
    (
        PPO,
        "lr=learning_rate, weight_decay=WEIGHT_DECAY,",
        "lr=learning_rate,",
        IN_RUN + "each_optimizer_has_its_own_rate_and_the_weight_decay[ppo]",
    ),
    (
        RCE,
        "lr=learning_rate, weight_decay=WEIGHT_DECAY,",
        "lr=learning_rate, weight_decay=0.0,",
        IN_RUN + "each_optimizer_has_its_own_rate_and_the_weight_decay[rce]",
    ),
    (
        PPO,
        'groups = optimizer.state_dict()["param_groups"]',
        'groups = saved["optimizers"][name]["param_groups"]',
        IN_RUN + "a_changed_constant_counts_after_a_resume",
    ),
    (
        PPO,
        "clip_grad_norm_(parameters, MAX_GRAD_NORM)",
        "clip_grad_norm_(parameters, 1e9)",
        IN_RUN + "each_models_gradient_is_clipped_to_max_grad_norm[ppo]",
    ),
    (
        GRPO,
        "clip_grad_norm_(parameters, MAX_GRAD_NORM)",
        "clip_grad_norm_(parameters, 1.0)",
        IN_RUN + "each_models_gradient_is_clipped_to_max_grad_norm[grpo]",
    ),
    (
        PPO,
        "(parameters, MAX_GRAD_NORM)",
        "(parameters, math.inf if norms else MAX_GRAD_NORM)",
        IN_RUN + "each_models_gradient_is_clipped_to_max_grad_norm[ppo]",
    ),
    (
        PPO,
        "        if finite:\n            optimizer",
        "        if True:\n            optimizer",
        IN_PPO + "a_step_that_is_not_finite_is_skipped_and_five_end_the_run",
    ),
    (
        PPO,
        "            optimizer.step()\n",
        "            pass\n",
        IN_PPO + "one_by_eight_four_by_two_and_eight_by_one_are_the_same_run",
    ),
    (
        PPO,
        "        optimizer.zero_grad()\n    run.count_skipped_step",
        "    run.count_skipped_step",
        "tests/test_lora.py::test_the_adapter_alone_is_trained_in_float32_and_the_base_never_changes[ppo]",
    ),
    # the losses
    (
        PPO,
        "(VALUE_LOSS_COEF * value_losses * mask)",
        "(value_losses * mask)",
        IN_PPO + "the_value_loss_has_its_coefficient_and_only_the_critic_feels_it",
    ),
    (
        PPO,
        "losses = policy_losses - ENTROPY_COEF * entropy",
        "losses = policy_losses - ENTROPY_COEF * entropy.detach()",
        IN_PPO + "entropy_bonus_has_a_gradient_and_raises_entropy",
    ),
    (
        PPO,
        "losses = policy_losses - ENTROPY_COEF * entropy",
        "losses = policy_losses + ENTROPY_COEF * entropy",
        IN_PPO + "entropy_bonus_has_a_gradient_and_raises_entropy",
    ),
    (
        PPO,
        "objective = torch.min(ratio * advantages",
        "objective = torch.max(ratio * advantages",
        IN_PPO + "policy_clip",
    ),
    (
        PPO,
        "torch.min(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range_high) * advantages)",
        "torch.min(ratio, ratio.clamp(1 - clip_range, 1 + clip_range_high)) * advantages",
        IN_PPO + "policy_clip",
    ),
    (
        PPO,
        "clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)",
        "clipped = returns + (values - returns).clamp(-clip_range, clip_range)",
        IN_PPO + "value_clip",
    ),
    (
        PPO,
        "return 0.5 * torch.max((values - returns) ** 2",
        "return 0.5 * torch.min((values - returns) ** 2",
        IN_PPO + "value_clip",
    ),
    # rewards of tokens, advantages, values
    (PPO, "    values = values * mask\n", "", IN_PPO + "gae_of_unequal_lengths_equals_each_row_alone"),
    (
        PPO,
        "    running = next_value = 0.0\n",
        "    running, next_value = 0.0, values[:, -1]\n",
        IN_PPO + "gae_of_three_tokens_by_hand",
    ),
    (
        PPO,
        "running = (delta + gamma * lam * running) * mask[:, t]",
        "running = delta + gamma * lam * running",
        IN_PPO + "gae_of_unequal_lengths_equals_each_row_alone",
    ),
    (
        PPO,
        "(delta + gamma * lam * running)",
        "(delta + lam * running)",
        IN_PPO + "gae_of_three_tokens_by_hand",
    ),
    (
        PPO,
        "whitened = (x - masked_mean(x, mask)) * torch.rsqrt(masked_variance(x, mask) + 1e-8) * mask",
        "whitened = (x - x.mean()) * torch.rsqrt(x.var(correction=0) + 1e-8) * mask",
        IN_PPO + "whitening_by_hand_and_blind_to_padding",
    ),
    (
        PPO,
        "torch.rsqrt(masked_variance(x, mask) + 1e-8) * mask",
        "torch.rsqrt(masked_variance(x, mask) + 1e-8)",
        IN_PPO + "whitening_by_hand_and_blind_to_padding",
    ),
    (
        PPO,
        "batch.returns = batch.raw_advantages + batch.values",
        "batch.returns = whiten(batch.raw_advantages, mask) + batch.values",
        IN_PPO + "returns_come_from_the_advantages_as_they_are_not_whitened",
    ),
    (
        PPO,
        "CRITIC_MODEL or ACTOR_MODEL",
        "ACTOR_MODEL",
        IN_PPO + "reference_and_critic_come_from_their_own_models",
    ),
    (
        PPO,
        "path = REFERENCE_MODEL or ACTOR_MODEL",
        "path = ACTOR_MODEL",
        IN_PPO + "reference_and_critic_come_from_their_own_models",
    ),
    (
        PPO,
        "rows, TEMPERATURE, distribution)[0]",
        "rows, 1.0, distribution)[0]",
        IN_PPO + "at_another_temperature_the_first_ratio_is_one_and_the_first_kl_is_zero",
    ),
    (
        PPO,
        "response_logprobs(self.actor, batch, micro, TEMPERATURE)",
        "response_logprobs(self.actor, batch, micro, 1.0)",
        IN_PPO + "at_another_temperature_the_first_ratio_is_one_and_the_first_kl_is_zero",
    ),
    (
        PPO,
        "            total += weight * self.reward_parts[name]",
        "            total += self.reward_parts[name]",
        IN_PPO + "rewards_add_up_with_their_weights",
    ),
    (
        PPO,
        "torch.arange(len(chunk)), lengths[chunk] - 1]",
        "torch.arange(len(chunk)), 0 * lengths[chunk]]",
        IN_PPO + "reward_model_scores_of_a_batch_equal_single_scores",
    ),
    (
        PPO,
        "scores[chunk] = model.score(",
        "scores[: len(chunk)] = model.score(",
        IN_PPO + "reward_model_scores_of_a_batch_equal_single_scores",
    ),
    # texts and ids
    (
        PPO,
        'return tokenizer(text, add_special_tokens=False)["input_ids"]',
        'return tokenizer(text)["input_ids"]',
        IN_RUN + "a_prompt_begins_with_one_bos_with_and_without_a_chat_template[ppo]",
    ),
    (
        RCE,
        'ids = tokenizer(text)["input_ids"]',
        'ids = tokenizer(text, add_special_tokens=False)["input_ids"]',
        IN_RUN + "a_prompt_begins_with_one_bos_with_and_without_a_chat_template[rce]",
    ),
    (
        PPO,
        'return tokenizer(text, add_special_tokens=False)["input_ids"]',
        'return tokenizer(text, add_special_tokens=response is not None)["input_ids"]',
        IN_RUN + "the_reward_model_reads_one_bos_and_one_eos_with_and_without_a_chat_template[ppo]",
    ),
    (
        PPO,
        "*ends} - {None}",
        "None} - {None}",
        IN_RUN + "the_eos_ids_of_the_generation_config_end_a_response_too[ppo]",
    ),
    (
        RCE,
        "*ends} - {None}",
        "None} - {None}",
        IN_RUN + "the_eos_ids_of_the_generation_config_end_a_response_too[rce]",
    ),
    (
        PPO,
        'if len(row["ids"]) <= MAX_PROMPT_TOKENS]',
        'if len(row["ids"]) < MAX_PROMPT_TOKENS]',
        IN_RUN + "a_prompt_of_max_prompt_tokens_is_kept_and_one_more_is_not[ppo]",
    ),
    (
        GRPO,
        'if len(row["ids"]) <= MAX_PROMPT_TOKENS]',
        'if len(row["ids"]) <= MAX_PROMPT_TOKENS + 1]',
        IN_RUN + "a_prompt_of_max_prompt_tokens_is_kept_and_one_more_is_not[grpo]",
    ),
    # sampling and scoring
    (
        PPO,
        "response_mask=(torch.arange(ids.shape[1], device=device) < lengths",
        "response_mask=(torch.arange(ids.shape[1], device=device) <= lengths",
        IN_PPO + "the_mask_covers_every_sampled_token_and_the_first_eos",
    ),
    (
        PPO,
        "batch.truncated = ~torch.isin(",
        "batch.truncated = torch.isin(",
        IN_PPO + "the_mask_covers_every_sampled_token_and_the_first_eos",
    ),
    (
        PPO,
        "sample_tokens(probabilities, uniform[rows, t])",
        "sample_tokens(probabilities.where(scaled >= scaled.topk(5).values[:, -1:], 0), uniform[rows, t])",
        IN_PPO + "a_token_beyond_the_likeliest_few_is_sampled_too",
    ),
    (
        PPO,
        "MAX_NEW_TOKENS, generator=generator)",
        "MAX_NEW_TOKENS, generator=None)",
        IN_PPO + "evaluating_never_changes_training",
    ),
    # what is logged
    (
        PPO,
        "masked_variance(batch.returns - batch.values, mask) / (variance + 1e-8)",
        "masked_mean((batch.returns - batch.values) ** 2, mask) / (variance + 1e-8)",
        IN_PPO + "samples_and_metrics_of_a_step_are_those_of_its_rows",
    ),
    (
        PPO,
        "variance = masked_variance(batch.returns, mask)",
        "variance = masked_variance(batch.values, mask)",
        IN_PPO + "samples_and_metrics_of_a_step_are_those_of_its_rows",
    ),
]
