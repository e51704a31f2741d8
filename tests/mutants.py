"""How we know what the tests are worth: bugs as data, planted one by one, each killed by the test it names.

    python tests/mutants.py                     # all of them, two at a time
    python tests/mutants.py --some 10           # ten at random
    python tests/mutants.py --only next_rows    # those whose file, texts or test contain it

A mutant is (file, old text that occurs exactly once in it, new text, pytest id of the test that must fail).
First the named tests run once as they are and must pass. Then each mutant is planted in a copy of the tree:
    killed  its test failed
    ALIVE   its test passed
    STALE   the old text is not there exactly once
    BROKEN  pytest neither passed nor failed, or the planted file is not Python
Last line `N planted, M alive`; all but killed count as alive, and the exit code is 1 if there is any.
Other lists of mutants beside this file, mutants_*.py, are joined to its own.
"""
import argparse
import os
import queue
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
JOBS = 2
SECONDS = 600  # a test may take with a mutant planted

PPO, GRPO, RCE = "ppo/ppo.py", "grpo/grpo.py", "rce/rce.py"
RUN, PPO_TESTS, SAFETY, SPEED = (f"tests/test_{name}.py::" for name in ("run", "ppo", "safety", "speed"))

MUTANTS = [
    # order of the prompts
    (PPO, "chosen = state.order[state.cursor:state.cursor + (count or BATCH_SIZE * "
          "GRADIENT_ACCUMULATION_STEPS)].tolist()",
     "chosen = state.order[state.cursor:min(state.cursor + (count or BATCH_SIZE * "
     "GRADIENT_ACCUMULATION_STEPS), len(state.order) - 1)].tolist()",
     RUN + "test_every_epoch_sees_every_prompt_once_in_an_order_of_its_own[ppo]"),
    (GRPO, "state.cursor = (state.cursor + len(chosen)) % len(self.train_rows)",
     "state.cursor = (state.cursor + len(chosen)) % (len(self.train_rows) - 1)",
     RUN + "test_every_epoch_sees_every_prompt_once_in_an_order_of_its_own[grpo]"),
    (PPO, "manual_seed(SEED + state.epoch))", "manual_seed(SEED))",
     RUN + "test_every_epoch_sees_every_prompt_once_in_an_order_of_its_own[ppo]"),
    (RCE, "state.epoch += 1", "state.epoch = 1",
     RUN + "test_every_epoch_sees_every_prompt_once_in_an_order_of_its_own[rce]"),

    # what a checkpoint keeps
    (PPO, "saved[key] for key in vars(self.state)})",
     "saved[key] for key in vars(self.state)} | {'halvings': 0})",
     RUN + "test_a_checkpoint_keeps_every_field_of_the_state_by_itself[ppo]"),
    (PPO, "saved[key] for key in vars(self.state)})",
     "saved[key] for key in vars(self.state)} | {'kl_coef': KL_COEF})",
     RUN + "test_a_checkpoint_keeps_every_field_of_the_state_by_itself[ppo]"),
    (GRPO, "saved[key] for key in vars(self.state)})",
     "saved[key] for key in vars(self.state)} | {'evals_since_best': 0})",
     RUN + "test_a_checkpoint_keeps_every_field_of_the_state_by_itself[grpo]"),
    (RCE, "saved[key] for key in vars(self.state)})",
     "saved[key] for key in vars(self.state)} | {'evals_since_best': saved['halvings']})",
     RUN + "test_a_checkpoint_keeps_every_field_of_the_state_by_itself[rce]"),
    (GRPO, "saved[key] for key in vars(self.state)})",
     "saved[key] for key in vars(self.state)} | {'best_reward': -math.inf})",
     RUN + "test_a_checkpoint_keeps_every_field_of_the_state_by_itself[grpo]"),
    (PPO, '        set_rng_state(saved["rng"][0])\n', "",
     RUN + "test_the_second_step_of_a_resumed_run_is_that_of_the_unbroken_one"),
    (PPO, '    torch.set_rng_state(state["torch"])', "    pass",
     RUN + "test_generators_of_python_numpy_and_torch_are_restored"),
    (PPO, '    np.random.set_state(state["numpy"])', "    pass",
     RUN + "test_generators_of_python_numpy_and_torch_are_restored"),
    (PPO, '            optimizer.load_state_dict(saved["optimizers"][name])',
     '            name == "critic" or optimizer.load_state_dict(saved["optimizers"][name])',
     RUN + "test_the_second_step_of_a_resumed_run_is_that_of_the_unbroken_one"),
    (PPO, 'load_model(AutoModelForCausalLM, at / "policy" if at else ACTOR_MODEL, "ACTOR_MODEL")',
     'load_model(AutoModelForCausalLM, ACTOR_MODEL, "ACTOR_MODEL")',
     RUN + "test_the_second_step_of_a_resumed_run_is_that_of_the_unbroken_one"),
    (PPO, 'at / "critic" if at else critic, "CRITIC_MODEL", new_head=not at)',
     'critic, "CRITIC_MODEL", new_head=True)',
     RUN + "test_the_second_step_of_a_resumed_run_is_that_of_the_unbroken_one"),
    (PPO, 'REFERENCE_MODEL or ACTOR_MODEL, "REFERENCE_MODEL")',
     'at / "policy" if at else REFERENCE_MODEL or ACTOR_MODEL, "REFERENCE_MODEL")',
     RUN + "test_the_second_step_of_a_resumed_run_is_that_of_the_unbroken_one"),
    (PPO, "saved[key] for key in vars(self.state)})",
     "saved[key] for key in vars(self.state)} | {'cursor': 0})",
     RUN + "test_the_second_step_of_a_resumed_run_is_that_of_the_unbroken_one"),
    (PPO, "                    os.truncate(logs / name, size)", "                    pass",
     RUN + "test_the_second_step_of_a_resumed_run_is_that_of_the_unbroken_one"),
    (PPO, "files[name]) != manifest.get(name)", 'files[name])["size"] != manifest.get(name, {}).get("size")',
     SAFETY + "test_a_checkpoint_whose_files_are_not_those_of_its_manifest_is_told[ppo/ppo.py]"),
    (GRPO, 'sorted({"training_state.pt", *manifest, *files})', 'sorted({"training_state.pt", *files})',
     SAFETY + "test_a_checkpoint_whose_files_are_not_those_of_its_manifest_is_told[grpo/grpo.py]"),
    (PPO, "        if fault := checkpoint_fault(folder):\n            say(",
     "        if not folder.exists():\n            say(",
     SAFETY + "test_all_checkpoints_broken_is_an_error_that_touches_nothing"),
    (PPO, "raise not_saved(folder, error) from None", "return",
     RUN + "test_a_disk_that_fills_while_saving_leaves_the_last_good_checkpoint"),
    (PPO, "manifest = {str(p.relative_to(tmp)): file_digest(p) for p in",
     "manifest = {str(p.name): file_digest(p) for p in",
     SAFETY + "test_a_checkpoint_whose_files_are_not_those_of_its_manifest_is_told[ppo/ppo.py]"),
    (PPO, "        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)", "        pass",
     SAFETY + "test_a_folder_in_use_is_refused_and_a_dead_runs_lock_is_not"),
    (PPO, "            self.lock.close()\n", "",
     SAFETY + "test_the_lock_is_let_go_after_training"),
    (PPO, 'map_location="cpu", weights_only=True)', 'map_location="cpu", weights_only=False)',
     SAFETY + "test_a_pickle_bomb_does_not_go_off"),

    # the best policy, patience, plateau
    (PPO, 'if metrics["reward"] > state.best_reward', 'if metrics["accuracy_greedy"] > state.best_reward',
     RUN + "test_the_best_policy_is_that_of_the_highest_reward_whatever_the_threshold[ppo-0.0]"),
    (PPO, "_reward + EARLY_STOPPING_THRESHOLD:", "_reward - EARLY_STOPPING_THRESHOLD:",
     RUN + "test_patience_counts_evaluations_that_are_not_better_by_more_than_the_threshold[ppo]"),
    (GRPO, "_reward + EARLY_STOPPING_THRESHOLD:", "_reward:",
     RUN + "test_patience_counts_evaluations_that_are_not_better_by_more_than_the_threshold[grpo]"),
    (PPO, "state.evals_since_best += 1\n", "state.evals_since_best = 1\n",
     RUN + "test_early_stopping_and_plateau_count_evaluations_without_a_better_reward"),
    (PPO, "state.halvings += state.evals_since_best % PLATEAU_PATIENCE == 0",
     "state.halvings += state.evals_since_best >= PLATEAU_PATIENCE - 1",
     RUN + "test_early_stopping_and_plateau_count_evaluations_without_a_better_reward"),
    (PPO, "not 0 < EARLY_STOPPING_PATIENCE <= state.evals_since_best",
     "not 0 < EARLY_STOPPING_PATIENCE < state.evals_since_best",
     RUN + "test_early_stopping_and_plateau_count_evaluations_without_a_better_reward"),

    # the KL coefficient
    (PPO, "max(-0.2, min(0.2, kl / target - 1))", "max(-0.2, min(0.2, 1 - kl / target))",
     PPO_TESTS + "test_kl_controller"),
    (PPO, 'adapt_kl_coef(state.kl_coef, metrics["kl"],', 'adapt_kl_coef(state.kl_coef, -metrics["kl"],',
     PPO_TESTS + "test_the_coefficient_rises_where_kl_is_above_its_target_and_the_next_step_pays_it"),
    (PPO, 'metrics["kl"] = masked_mean(batch.logprobs - batch.ref_logprobs,',
     'metrics["kl"] = masked_mean(batch.ref_logprobs - batch.logprobs,',
     PPO_TESTS + "test_the_coefficient_rises_where_kl_is_above_its_target_and_the_next_step_pays_it"),
    (PPO, "state.kl_coef = state.kl_coef if KL_TARGET else KL_COEF", "state.kl_coef = KL_COEF",
     PPO_TESTS + "test_the_coefficient_rises_where_kl_is_above_its_target_and_the_next_step_pays_it"),
    (PPO, "mask, state.kl_coef)", "mask, KL_COEF)",
     PPO_TESTS + "test_the_coefficient_rises_where_kl_is_above_its_target_and_the_next_step_pays_it"),

    # optimizers
    (PPO, "zip(self.optimizers.values(), (LEARNING_RATE, CRITIC_LEARNING_RATE)):",
     "zip(self.optimizers.values(), (CRITIC_LEARNING_RATE, LEARNING_RATE)):",
     PPO_TESTS + "test_actor_and_critic_each_move_by_their_own_scheduled_rate"),
    (PPO, "zip(self.models.items(), (LEARNING_RATE, CRITIC_LEARNING_RATE))}",
     "zip(self.models.items(), (CRITIC_LEARNING_RATE, LEARNING_RATE))}",
     RUN + "test_each_optimizer_has_its_own_rate_and_the_weight_decay[ppo]"),
    (PPO, 'optimizer.param_groups[0]["lr"] = rate * scale',
     'optimizer.param_groups[0]["lr"] = rate * (scale if rate == LEARNING_RATE else 1)',
     PPO_TESTS + "test_actor_and_critic_each_move_by_their_own_scheduled_rate"),
    (PPO, 'optimizer.param_groups[0]["lr"] = rate * scale', 'optimizer.param_groups[0]["lr"] = rate',
     PPO_TESTS + "test_actor_and_critic_each_move_by_their_own_scheduled_rate"),
    (PPO, "kind = LR_SCHEDULER_TYPE if USE_LR_SCHEDULER else None", "kind = None",
     PPO_TESTS + "test_actor_and_critic_each_move_by_their_own_scheduled_rate"),
    (PPO, "lr=rate, weight_decay=WEIGHT_DECAY,", "lr=rate,",
     RUN + "test_each_optimizer_has_its_own_rate_and_the_weight_decay[ppo]"),
    (RCE, "lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY,", "lr=LEARNING_RATE, weight_decay=0.0,",
     RUN + "test_each_optimizer_has_its_own_rate_and_the_weight_decay[rce]"),
    (PPO, 'optimizer.param_groups[0]["weight_decay"] = WEIGHT_DECAY', "pass",
     RUN + "test_a_changed_constant_counts_after_a_resume"),
    (PPO, '["params"], MAX_GRAD_NORM).item()', '["params"], 1e9).item()',
     RUN + "test_each_models_gradient_is_clipped_to_max_grad_norm[ppo]"),
    (GRPO, '["params"], MAX_GRAD_NORM).item()', '["params"], 1.0).item()',
     RUN + "test_each_models_gradient_is_clipped_to_max_grad_norm[grpo]"),
    (PPO, '["params"], MAX_GRAD_NORM).item()',
     '["params"], MAX_GRAD_NORM if optimizer is self.optimizers["policy"] else math.inf).item()',
     RUN + "test_each_models_gradient_is_clipped_to_max_grad_norm[ppo]"),
    (PPO, "            if finite:\n", "            if True:\n",
     PPO_TESTS + "test_a_step_that_is_not_finite_is_skipped_and_five_end_the_run"),
    (PPO, "self.state.skipped = 0 if finite else self.state.skipped + 1", "self.state.skipped += not finite",
     PPO_TESTS + "test_a_step_that_is_not_finite_is_skipped_and_five_end_the_run"),
    (PPO, "                optimizer.step()\n", "                pass\n",
     PPO_TESTS + "test_one_by_eight_four_by_two_and_eight_by_one_are_the_same_run"),
    (PPO, "            optimizer.zero_grad()\n        self.state.skipped", "        self.state.skipped",
     PPO_TESTS + "test_padding_changes_neither_gradients_nor_metrics"),
    (PPO, "parameter.data = parameter.data.clone()", "pass",
     PPO_TESTS + "test_weights_lie_where_no_file_put_them"),

    # the losses
    (PPO, "self.backward(mean(VALUE_LOSS_COEF * value_losses))", "self.backward(mean(value_losses))",
     PPO_TESTS + "test_the_value_loss_has_its_coefficient_and_only_the_critic_feels_it"),
    (PPO, "mean(policy_losses - ENTROPY_COEF * entropy)",
     "mean(policy_losses - ENTROPY_COEF * entropy.detach())",
     PPO_TESTS + "test_entropy_bonus_has_a_gradient_and_raises_entropy"),
    (PPO, "mean(policy_losses - ENTROPY_COEF * entropy)", "mean(policy_losses + ENTROPY_COEF * entropy)",
     PPO_TESTS + "test_entropy_bonus_has_a_gradient_and_raises_entropy"),
    (PPO, "return -torch.min(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages)",
     "return -torch.max(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages)",
     PPO_TESTS + "test_policy_clip"),
    (PPO, "return -torch.min(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages)",
     "return -torch.min(ratio, ratio.clamp(1 - clip_range, 1 + clip_range)) * advantages",
     PPO_TESTS + "test_policy_clip"),
    (PPO, "clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)",
     "clipped = returns + (values - returns).clamp(-clip_range, clip_range)",
     PPO_TESTS + "test_value_clip"),
    (PPO, "return 0.5 * torch.max((values - returns) ** 2", "return 0.5 * torch.min((values - returns) ** 2",
     PPO_TESTS + "test_value_clip"),
    (PPO, "mean = lambda x: (x * mask).sum() / tokens", "mean = lambda x: (x * mask).sum() / mask.sum()",
     PPO_TESTS + "test_gradients_and_metrics_do_not_depend_on_the_micro_batch"),
    (PPO, "((ratio - 1) * advantages.sign() > CLIP_RANGE)", "((ratio - 1).abs() > CLIP_RANGE)",
     PPO_TESTS + "test_clip_fraction_counts_the_tokens_whose_gradient_the_clip_took[1.5--1-0]"),
    (PPO, "((ratio - 1) * advantages.sign() > CLIP_RANGE)", "((1 - ratio) * advantages.sign() > CLIP_RANGE)",
     PPO_TESTS + "test_clip_fraction_counts_the_tokens_whose_gradient_the_clip_took[1.5-1-1]"),
    (PPO, "((ratio - 1) * advantages.sign() > CLIP_RANGE)", "(ratio - 1 > CLIP_RANGE)",
     PPO_TESTS + "test_clip_fraction_counts_the_tokens_whose_gradient_the_clip_took[0.5--1-1]"),

    # rewards of tokens, advantages, values
    (PPO, "rewards[torch.arange(len(scores)), mask.sum(1).long() - 1] += scores", "rewards[:, -1] += scores",
     PPO_TESTS + "test_the_score_is_added_once_at_the_last_token_and_kl_everywhere"),
    (PPO, "rewards = -kl_coef * (logprobs - ref_logprobs) * mask",
     "rewards = kl_coef * (logprobs - ref_logprobs) * mask",
     PPO_TESTS + "test_the_score_is_added_once_at_the_last_token_and_kl_everywhere"),
    (PPO, "advantages, running, next_value, values = torch.zeros_like(values), 0.0, 0.0, values * mask",
     "advantages, running, next_value = torch.zeros_like(values), 0.0, 0.0",
     PPO_TESTS + "test_gae_of_unequal_lengths_equals_each_row_alone"),
    (PPO, "torch.zeros_like(values), 0.0, 0.0, values * mask",
     "torch.zeros_like(values), 0.0, values[:, -1], values * mask",
     PPO_TESTS + "test_gae_of_three_tokens_by_hand"),
    (PPO, "advantages[:, t] = running = (delta + gamma * lam * running) * mask[:, t]",
     "advantages[:, t] = running = delta + gamma * lam * running",
     PPO_TESTS + "test_gae_of_unequal_lengths_equals_each_row_alone"),
    (PPO, "(delta + gamma * lam * running)", "(delta + lam * running)",
     PPO_TESTS + "test_gae_of_three_tokens_by_hand"),
    (PPO, "return (x - masked_mean(x, mask)) * torch.rsqrt(masked_variance(x, mask) + 1e-8) * mask",
     "return (x - x.mean()) * torch.rsqrt(x.var(correction=0) + 1e-8) * mask",
     PPO_TESTS + "test_whitening_by_hand_and_blind_to_padding"),
    (PPO, "torch.rsqrt(masked_variance(x, mask) + 1e-8) * mask",
     "torch.rsqrt(masked_variance(x, mask) + 1e-8)",
     PPO_TESTS + "test_whitening_by_hand_and_blind_to_padding"),
    (PPO, "batch.returns = batch.raw_advantages + batch.values",
     "batch.returns = whiten(batch.raw_advantages, mask) + batch.values",
     PPO_TESTS + "test_returns_come_from_the_advantages_as_they_are_not_whitened"),
    (PPO, "batch.advantages = whiten(batch.raw_advantages, mask) if WHITEN_ADVANTAGES else "
          "batch.raw_advantages",
     "batch.advantages = batch.raw_advantages",
     PPO_TESTS + "test_returns_come_from_the_advantages_as_they_are_not_whitened"),
    (PPO, "masked_scatter(mask, values[:, 0].float())", "masked_scatter(mask, values[:, 0].float().roll(-1))",
     PPO_TESTS + "test_values_are_those_predicted_before_the_token_is_seen_and_padding_does_not_matter"),
    (PPO, "            torch.nn.init.zeros_(parameter)", "            torch.nn.init.normal_(parameter)",
     PPO_TESTS + "test_a_new_critic_says_zero_and_starts_from_the_actors_weights"),
    (PPO, "CRITIC_MODEL or ACTOR_MODEL", "ACTOR_MODEL",
     PPO_TESTS + "test_reference_and_critic_come_from_their_own_models"),
    (PPO, "load_model(AutoModelForCausalLM, REFERENCE_MODEL or ACTOR_MODEL,",
     "load_model(AutoModelForCausalLM, ACTOR_MODEL,",
     PPO_TESTS + "test_reference_and_critic_come_from_their_own_models"),
    (PPO, "response_logprobs(self.reference, batch, rows, TEMPERATURE)",
     "response_logprobs(self.reference, batch, rows, 1.0)",
     PPO_TESTS + "test_at_another_temperature_the_first_ratio_is_one_and_the_first_kl_is_zero"),
    (PPO, "response_logprobs(self.actor, batch, micro, TEMPERATURE)",
     "response_logprobs(self.actor, batch, micro, 1.0)",
     PPO_TESTS + "test_at_another_temperature_the_first_ratio_is_one_and_the_first_kl_is_zero"),
    (PPO, "batch.scores = scores - MISSING_EOS_PENALTY * batch.truncated",
     "batch.scores = scores - MISSING_EOS_PENALTY * ~batch.truncated",
     PPO_TESTS + "test_missing_eos_is_penalised"),
    (PPO, "            total += weight * self.reward_parts[name]",
     "            total += self.reward_parts[name]",
     PPO_TESTS + "test_rewards_add_up_with_their_weights"),
    (PPO, "(lengths[chunk] - 1).to(self.device)]", "0 * (lengths[chunk] - 1).to(self.device)]",
     PPO_TESTS + "test_reward_model_scores_of_a_batch_equal_single_scores"),
    (PPO, "scores[chunk.to(self.device)] =", "scores[:len(chunk)] =",
     PPO_TESTS + "test_reward_model_scores_of_a_batch_equal_single_scores"),

    # texts and ids
    (PPO, 'row["ids"] = tokenizer(text, add_special_tokens=not tokenizer.chat_template)',
     'row["ids"] = tokenizer(text)',
     RUN + "test_a_prompt_begins_with_one_bos_with_and_without_a_chat_template[ppo]"),
    (RCE, 'row["ids"] = tokenizer(text, add_special_tokens=not tokenizer.chat_template)',
     'row["ids"] = tokenizer(text, add_special_tokens=False)',
     RUN + "test_a_prompt_begins_with_one_bos_with_and_without_a_chat_template[rce]"),
    (PPO, "            ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template)",
     "            ids = tokenizer(text)",
     RUN + "test_the_reward_model_reads_one_bos_and_one_eos_with_and_without_a_chat_template[ppo]"),
    (GRPO, "if tokenizer.chat_template else text + response + tokenizer.eos_token",
     "if tokenizer.chat_template else text + response",
     RUN + "test_the_reward_model_reads_one_bos_and_one_eos_with_and_without_a_chat_template[grpo]"),
    (PPO, "*(ends if isinstance(ends, list) else [ends])", "None",
     RUN + "test_the_eos_ids_of_the_generation_config_end_a_response_too[ppo]"),
    (RCE, "*(ends if isinstance(ends, list) else [ends])", "None",
     RUN + "test_the_eos_ids_of_the_generation_config_end_a_response_too[rce]"),
    (PPO, 'if len(row["ids"]) <= MAX_PROMPT_TOKENS]', 'if len(row["ids"]) < MAX_PROMPT_TOKENS]',
     RUN + "test_a_prompt_of_max_prompt_tokens_is_kept_and_one_more_is_not[ppo]"),
    (GRPO, 'if len(row["ids"]) <= MAX_PROMPT_TOKENS]', 'if len(row["ids"]) <= MAX_PROMPT_TOKENS + 1]',
     RUN + "test_a_prompt_of_max_prompt_tokens_is_kept_and_one_more_is_not[grpo]"),

    # sampling and scoring
    (PPO, "lengths[rows] += going", "lengths[rows] += going & ~torch.isin(tokens, eos_ids)",
     PPO_TESTS + "test_a_response_ends_with_its_first_eos_and_holds_nothing_after_it"),
    (GRPO, "return ids.masked_fill(over, pad_id), lengths, logprobs.masked_fill(over, 0)",
     "return ids.masked_fill(over, pad_id), lengths, logprobs",
     SPEED + "test_decoding_with_shared_prompts_is_a_plain_forward_pass[sdpa]"),
    (PPO, "< lengths[:, None]).float(),\n            truncated",
     "<= lengths[:, None]).float(),\n            truncated",
     PPO_TESTS + "test_the_mask_covers_every_sampled_token_and_the_first_eos"),
    (PPO, "truncated=~torch.isin(", "truncated=torch.isin(",
     PPO_TESTS + "test_the_mask_covers_every_sampled_token_and_the_first_eos"),
    (PPO, "        probabilities = scaled.exp()\n",
     "        probabilities = scaled.exp()\n        probabilities = probabilities.where(scaled >= "
     "scaled.topk(5).values[:, -1:], 0)\n",
     PPO_TESTS + "test_a_token_beyond_the_likeliest_few_is_sampled_too"),
    (PPO, "scaled = (logits.float() / temperature if temperature != 1 else logits.float())",
     "scaled = logits.float()",
     PPO_TESTS + "test_the_sampler_uses_no_hidden_filter"),
    (PPO, "torch.cat(x) for x in zip(*parts))",
     "torch.cat(x).unflatten(0, (-1, group_size)).transpose(0, 1).flatten(0, 1) for x in zip(*parts))",
     PPO_TESTS + "test_first_pass_ratio_is_one_over_mixed_lengths_paddings_and_batch_sizes"),
    (PPO, "uniform[i * group_size:i * group_size + size].to(self.device)", "uniform[:size].to(self.device)",
     PPO_TESTS + "test_how_prompts_are_cut_into_batches_does_not_change_the_samples"),
    (PPO, "generator=torch.Generator().manual_seed(SEED + 1))", "generator=None)",
     PPO_TESTS + "test_evaluating_never_changes_training"),
    (PPO, "logits[row, prompts.squeeze(-1)[row] - 1 - first + at]",
     "logits[row, prompts.squeeze(-1)[row] - first + at]",
     PPO_TESTS + "test_eos_is_trained_even_where_it_is_also_the_pad[eager]"),
    (PPO, "torch.where(step > 0, starts[:, None] + step - 1, last[:, None])[self.mask]",
     "torch.where(step > 0, starts[:, None] + step - 1, last[:, None] - 1)[self.mask]",
     PPO_TESTS + "test_first_pass_ratio_is_one_over_mixed_lengths_paddings_and_batch_sizes"),
    (PPO, "masked_fill_((back < 0) | (back >= (window or 2**40)), -torch.inf)",
     "masked_fill_(back < 0, -torch.inf)",
     PPO_TESTS + "test_other_architectures_train_and_their_first_ratio_is_one[mistral with a window of 8]"),
    (GRPO, "masked_fill_((back < 0) | (back >= (window or 2**40)), -torch.inf)",
     "masked_fill_(back >= 2**20, -torch.inf)",
     SPEED + "test_packed_rows_are_plain_forward_passes"),
    (GRPO, "seen = torch.where(column < lengths[:, None], column, 2**40)", "seen = column.expand_as(prompts)",
     SPEED + "test_packed_rows_are_plain_forward_passes"),
    (GRPO, "CopyPrompts.apply(p, which), x]", "CopyPrompts.apply(p, which.flip(0)), x]",
     SPEED + "test_packed_rows_are_plain_forward_passes"),
    (GRPO, "return x if self.full else x.index_select(0, self.slots)",
     "return x if self.full else x[:len(self.slots)]",
     SPEED + "test_decoding_with_shared_prompts_is_a_plain_forward_pass[sdpa]"),
    (GRPO, "self.groups = Groups(which, self.groups.bias[alive])",
     "self.groups = Groups(which, self.groups.bias[:len(alive)])",
     SPEED + "test_decoding_with_shared_prompts_is_a_plain_forward_pass[sdpa]"),
    (GRPO, "factor = factor - grad_entropy * (logprobs + entropy.unsqueeze(-1))",
     "factor = factor - grad_entropy * logprobs",
     SPEED + "test_token_logprobs_and_their_gradient_are_autograds"),
    (PPO, "                layer.training = on\n",
     "                layer.train(on)\n                model.train(on)\n",
     PPO_TESTS + "test_dropout_is_off_everywhere"),

    # what is logged
    (PPO, '"response": batch.responses[i],', '"response": batch.responses[0],',
     PPO_TESTS + "test_samples_and_metrics_of_a_step_are_those_of_its_rows"),
    (PPO, "float(v[i]) for k, v in batch.parts.items()", "float(v[0]) for k, v in batch.parts.items()",
     PPO_TESTS + "test_samples_and_metrics_of_a_step_are_those_of_its_rows"),
    (PPO, "masked_mean(batch.advantages[i], mask[i])", "masked_mean(batch.raw_advantages[i], mask[i])",
     PPO_TESTS + "test_samples_and_metrics_of_a_step_are_those_of_its_rows"),
    (PPO, '**{f"reward/{k}": v.mean().item() for k, v in batch.parts.items()}',
     '**{f"reward/{k}": v.max().item() for k, v in batch.parts.items()}',
     PPO_TESTS + "test_samples_and_metrics_of_a_step_are_those_of_its_rows"),
    (PPO, "masked_variance(batch.returns - batch.values, mask) / (variance + 1e-8)",
     "masked_mean((batch.returns - batch.values) ** 2, mask) / (variance + 1e-8)",
     PPO_TESTS + "test_samples_and_metrics_of_a_step_are_those_of_its_rows"),
    (PPO, "variance = masked_variance(batch.returns, mask)", "variance = masked_variance(batch.values, mask)",
     PPO_TESTS + "test_samples_and_metrics_of_a_step_are_those_of_its_rows"),
    (PPO, '"advantage": masked_mean(batch.raw_advantages, mask).item()',
     '"advantage": masked_mean(batch.advantages, mask).item()',
     PPO_TESTS + "test_samples_and_metrics_of_a_step_are_those_of_its_rows"),
]

for path in sorted(Path(__file__).parent.glob("mutants_*.py")):  # lists of other files
    MUTANTS += runpy.run_path(str(path))["MUTANTS"]


def copy_repository(folder):
    """The tracked files as they are in the working tree; data/ as a link, since no test writes there."""
    command = ["git", "-C", ROOT, "ls-files", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        if name and not name.startswith("data/") and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / "data").symlink_to(ROOT / "data")
    return folder


def run_tests(folder, tests):
    """Exit code of pytest and what it said; no bytecode: it may outlive a planted file of the same size."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *tests]
    limit = SECONDS * len(tests)
    options = dict(stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit)
    try:
        done = subprocess.run(command, cwd=folder, env=env, **options)
    except subprocess.TimeoutExpired:
        return None, f"no end within {limit} s"
    return done.returncode, done.stdout + done.stderr


def short(text):
    return repr(" ".join(text.split())[:60])


def plant(folder, mutant):
    """One word for what became of a mutant planted in the copy in `folder`, which is put back as it was."""
    file, old, new, test = mutant
    text = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
    if text.count(old) != 1:
        return "STALE"
    planted = text.replace(old, new)
    try:
        compile(planted, file, "exec")
    except SyntaxError:
        return "BROKEN"
    (folder / file).write_text(planted)
    code, _ = run_tests(folder, [test])
    (folder / file).write_text(text)
    return {0: "ALIVE", 1: "killed"}.get(code, "BROKEN")


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--some", type=int, metavar="K", help="K mutants at random")
    parser.add_argument("--seed", type=int, help="of --some")
    parser.add_argument("--only", metavar="TEXT", help="mutants whose file, texts or test contain TEXT")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"mutants at a time (default {JOBS})")
    words = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not words.only or words.only in "\n".join(mutant)]
    if words.some is not None:
        chosen = random.Random(words.seed).sample(chosen, min(words.some, len(chosen)))

    with tempfile.TemporaryDirectory() as parent:
        folders = queue.Queue()
        for number in range(max(1, words.jobs)):
            folders.put(copy_repository(Path(parent) / str(number)))

        tests = list(dict.fromkeys(test for *_, test in chosen))
        print(f"{len(tests)} tests without a mutant", flush=True)
        code, said = run_tests(Path(parent) / "0", tests) if tests else (0, "")
        if code != 0:
            print(f"{said}\nThe named tests must pass without a mutant: mend them first")
            sys.exit(1)

        def judge(mutant):
            folder = folders.get()
            try:
                word = plant(folder, mutant)
            finally:
                folders.put(folder)
            file, old, new, test = mutant
            print(f"{word:6}  {file}: {short(old)} -> {short(new)}  {test.partition('::')[2]}", flush=True)
            return word

        with ThreadPoolExecutor(max(1, words.jobs)) as pool:
            found = list(pool.map(judge, chosen))
    alive = sum(word != "killed" for word in found)
    print(f"{len(found)} planted, {alive} alive")
    sys.exit(alive > 0)


if __name__ == "__main__":
    main()
