"""Mutants that undo what was mended in the language trainers after an audit: equal scores (C1), rows that are
left out (H2), distillation (H3, M6), advantages per token (H4), edited samplers in RCE (H5), wandb's runs
(M1), critic warm-up (M3) and smaller findings. mutants.py plants them."""

PPO, GRPO, RCE = "ppo/ppo.py", "grpo/grpo.py", "rce/rce.py"
REC, RAG, ICL = "grpo/grpo_rec.py", "ppo/ppo_rag.py", "rce/rce_icl.py"
TEST = "tests/test_audit_core.py::test_"
RUN = "tests/test_run.py::test_"
EQUAL = TEST + "equal_scores_have_exactly_no_advantage"
RECIPES = TEST + "recipes_give_equal_scores_exactly_no_advantage"
WHITENED = TEST + "equal_advantages_are_whitened_to_exactly_zero"
BEGINS = TEST + "a_term_that_begins_away_from_the_sampler_leaves_no_row_out"
OWN = TEST + "an_own_reward_or_advantage_is_no_distillation"
UPDATES = TEST + "distillation_with_several_updates_per_step_is_refused"
PER_TOKEN = TEST + "equal_advantages_per_token_are_one_advantage_per_response[dapo]"
OWN_TOKENS = TEST + "advantages_per_token_train_their_own_tokens"
WARMUP = TEST + "the_critics_warm_up_leaves_actor_moments_and_kl_coefficient_alone"
NAMED = TEST + "a_constant_without_effect_or_far_from_its_paper_is_named"
WANDB = RUN + "a_run_that_goes_on_elsewhere_has_its_own_wandb_run"
REC_CHUNKS = "tests/test_rec.py::test_rewards_get_the_histories_items_and_targets_of_their_own_chunk"
REC_LISTS = "tests/test_rec.py::test_best_items_and_baselines_are_of_each_row_beyond_the_first_chunk"
ICL_PICKS = "tests/test_icl.py::test_the_policy_picks_for_each_query_beyond_the_first_chunk"
RAG_BLOCKS = "tests/test_rag.py::test_greedy_answers_do_not_depend_on_how_many_questions_are_answered_at_once"
DESCRIBED = RUN + "what_is_no_list_of_numbers_is_described"

MUTANTS = [
    # C1: equal scores
    (GRPO, "    groups = groups - groups[:, :1]\n", "", EQUAL),
    (GRPO, "groups = groups - groups[:, :1]\n", "groups = groups - groups[:1, :1]\n", EQUAL),
    (
        GRPO,
        "groups = groups - groups[:, :1]\n",
        "groups = groups + 0 * groups[:, :1]\n",
        TEST + "a_step_of_equal_scores_moves_no_weight[1000.7-dapo]",
    ),
    (GRPO, "    groups = groups - groups[:, :1]\n", "    groups = groups * 1\n", RECIPES),
    (
        "docs/change-the-algorithm.md",
        "batch.advantages = total / (",
        "batch.advantages = (total - total.mean()) / (",
        RECIPES,
    ),
    (PPO, "    return whitened.masked_fill(are_equal, 0.0)\n", "    return whitened\n", WHITENED),
    (PPO, "((x == x[0, 0]) | (mask == 0)).all()", "(x == x[0, 0]).all()", WHITENED),
    (
        PPO,
        "((x == x[0, 0]) | (mask == 0)).all()",
        "((x == x[0, 0]) | (mask == 0)).any()",
        "tests/test_ppo.py::test_whitening_by_hand_and_blind_to_padding",
    ),
    # H2: rows that are left out
    (
        GRPO,
        "for offset in (-3.0, -0.3, -0.01, 0.0, 0.01, 0.3, 3.0):",
        "for offset in (-0.01, 0.0, 0.01):",
        BEGINS + "[hinge]",
    ),
    (
        GRPO,
        "(entropy * math.exp(-abs(offset)))",
        "(1.0 * entropy)",
        TEST + "a_bonus_that_begins_at_half_the_rollouts_entropy_leaves_no_row_out",
    ),
    (
        GRPO,
        "(trained * trainer.token_losses(",
        "(1.0 * trainer.token_losses(",
        TEST + "a_row_whose_tokens_are_not_trained_is_left_out",
    ),
    # H3, M6: distillation
    (
        GRPO,
        "        cls.compute_rewards is not GRPOTrainer.compute_rewards\n        or cls",
        "        cls",
        OWN + "[compute_rewards]",
    ),
    (
        GRPO,
        "\n        or cls.compute_advantages is not GRPOTrainer.compute_advantages",
        "",
        OWN + "[compute_advantages]",
    ),
    (
        GRPO,
        '            self.run.log("Only',
        '            False and self.run.log("Only',
        TEST + "a_run_that_distils_says_so_before_it_trains",
    ),
    (
        GRPO,
        "if trainer.distils and GROUP_EPOCHS * MINI_BATCHES > 1:",
        "if trainer.distils and MINI_BATCHES > 1:",
        UPDATES + "[constants0]",
    ),
    (
        GRPO,
        "if trainer.distils and GROUP_EPOCHS * MINI_BATCHES > 1:",
        "if trainer.distils and GROUP_EPOCHS > 1:",
        UPDATES + "[constants1]",
    ),
    (
        GRPO,
        "    if REFERENCE_MODEL and KL_COEF == 0:\n",
        "    if False:\n",
        TEST + "a_reference_model_that_nothing_reads_is_refused[grpo]",
    ),
    (
        PPO,
        "        if REFERENCE_MODEL and KL_COEF == 0:\n",
        "        if False:\n",
        TEST + "a_reference_model_that_nothing_reads_is_refused[ppo]",
    ),
    # H4: advantages per token
    (
        GRPO,
        "if batch.advantages.shape not in (shape[:1], shape):",
        "if False:",
        TEST + "advantages_of_another_shape_are_refused_at_once",
    ),
    (
        GRPO,
        "view(len(batch.advantages), -1)[index, :width]",
        "view(len(batch.advantages), -1)[index, :1]",
        OWN_TOKENS,
    ),
    (
        GRPO,
        "view(len(batch.advantages), -1)[index, :width]",
        "view(len(batch.advantages), -1)[index, -width:]",
        OWN_TOKENS,
    ),
    (GRPO, "        if advantages.dim() == 2:", "        if False:", PER_TOKEN),
    # H5: RCE with an edited sampler
    (
        RCE,
        "response_logprobs(self.actor, batch, rows, TEMPERATURE, full_logprobs)",
        "response_logprobs(self.actor, batch, rows, TEMPERATURE)",
        TEST + "rces_loss_stays_finite_and_its_gradient_whole_under_an_edited_sampler",
    ),
    (
        RCE,
        "make_batch(prompts, responses, self.device), full_logprobs).cpu()",
        "make_batch(prompts, responses, self.device), sampling_logprobs).cpu()",
        TEST + "rce_scores_candidates_by_all_tokens_under_an_edited_sampler",
    ),
    (
        RCE,
        "scored = batch_logprobs(model, batch, sampling_logprobs)",
        "scored = batch_logprobs(model, batch, full_logprobs)",
        TEST + "rce_scores_candidates_by_all_tokens_under_an_edited_sampler",
    ),
    # M1: wandb's run of another folder
    (
        PPO,
        "            self.wandb_id = None\n        self.start_wandb()",
        "            pass\n        self.start_wandb()",
        WANDB + "[beside-False]",
    ),
    (
        PPO,
        "        if not continues_here or (is_cut and self.has_changed)",
        "        if not continues_here or is_cut",
        WANDB + "[given up, again-True]",
    ),
    (
        PPO,
        "        if not continues_here or (is_cut",
        "        if (is_cut",
        WANDB + "[beside-False]",
    ),
    (
        PPO,
        "        if not continues_here or (is_cut",
        "        if True or (is_cut",
        WANDB + "[newest-True]",
    ),
    # M3: critic warm-up
    (PPO, "return steps_done < CRITIC_WARMUP_STEPS", "return steps_done <= CRITIC_WARMUP_STEPS", WARMUP),
    (
        PPO,
        'trained = ["critic"] if self.trains_critic_alone() else ["policy", "critic"]',
        'trained = ["policy", "critic"]',
        WARMUP,
    ),
    (
        PPO,
        "                steps_done - first, run.total_steps",
        "                steps_done, run.total_steps",
        WARMUP,
    ),
    (
        PPO,
        " and not self.trains_critic_alone():\n            self.state",
        ":\n            self.state",
        WARMUP,
    ),
    # what a reward function returns
    (
        PPO,
        "if different := reward_parts.keys() ^ chunk_parts[0].keys():",
        "if different := reward_parts.keys() - chunk_parts[0].keys():",
        RUN + "parts_that_differ_from_call_to_call_are_named",
    ),
    (
        PPO,
        "        if isinstance(values, (list, tuple)):\n            returned +=",
        "        if False:\n            returned +=",
        DESCRIBED,
    ),
    (
        PPO,
        "        if isinstance(values, Iterator):  # a generator\n",
        "        if False:\n",
        RUN + "a_generator_of_rewards_is_read",
    ),
    # smaller findings
    (
        GRPO,
        "        self.select_tokens(batch)\n        batch.sampled_logprobs",
        "        batch.sampled_logprobs",
        TEST + "an_own_compute_advantages_needs_no_call_of_the_old_one",
    ),
    ("LICENSE", "MIT License\n", "A licence\n", "tests/test_tools.py::test_the_readme_names_the_licences"),
    (
        GRPO,
        'if LOSS_TYPE == "dr_grpo" and SCALE_REWARDS == "batch":',
        "if False:",
        NAMED,
    ),
    (GRPO, 'if LOSS_TYPE == "dr_grpo" and SCALE_REWARDS == "batch":', 'if LOSS_TYPE == "dr_grpo":', NAMED),
    (GRPO, 'if LOSS_TYPE == "gspo" and CLIP_RANGE > 0.01:', "if False:", NAMED),
    (
        GRPO,
        "* mask).clamp(max=80)  # exp",
        "* mask)  # exp",
        TEST + "a_ratio_beyond_float32_gives_no_nan",
    ),
    (
        GRPO,
        "            if file_names[file_name] > 1:\n",
        "            if False:\n",
        TEST + "rows_of_two_files_of_one_name_have_ids_of_their_own",
    ),
    (
        GRPO,
        "(not isinstance(text, str) or not text):",
        "not isinstance(text, str):",
        "tests/test_turns.py::test_an_environment_that_returns_no_text_is_told",
    ),
    (
        "docs/change-the-algorithm.md",
        "            if name not in weights:\n",
        "            if False:\n",
        TEST + "gdpo_names_a_part_that_has_no_weight",
    ),
    # bfloat16
    (
        GRPO,
        '    if DTYPE == "bfloat16":\n        return torch.autocast',
        "    if False:\n        return torch.autocast",
        "tests/test_audit.py::test_a_step_in_bfloat16_is_that_of_float32_but_for_its_rounding[grpo]",
    ),
    # chunks of the other trainers
    (
        REC,
        'target = self.catalogue.items[row["target"]]',
        'target = self.catalogue.items[rows[0]["target"]]',
        REC_CHUNKS,
    ),
    (
        REC,
        "repeated_rows = np.repeat(rows, GROUP_SIZE).tolist()",
        "repeated_rows = rows * GROUP_SIZE",
        "tests/test_rec.py::test_every_figure_of_the_table_by_hand_and_best_is_by_validation",
    ),
    (
        REC,
        'column(rows[chunk], "ids"), width',
        'column(rows[: min(chunk_size, len(rows) - begin)], "ids"), width',
        REC_LISTS,
    ),
    (
        REC,
        "histories[begin : begin + 512]",
        "histories[: min(512, len(rows) - begin)]",
        REC_LISTS,
    ),
    (
        ICL,
        "chunk = queries[start : start + 64]\n            pointers",
        "chunk = queries[: min(64, len(queries) - start)]\n            pointers",
        ICL_PICKS,
    ),
    (
        RAG,
        "qa.generator.answers(list(prompts), temperature",
        "qa.generator.answers(list(prompts[:1]) * len(prompts), temperature",
        RAG_BLOCKS,
    ),
    (
        RAG,
        "top_k=top_k), questions, rankings[rerank]))",
        "top_k=top_k), questions, rankings[rerank][:1] * len(questions)))",
        RAG_BLOCKS,
    ),
]
