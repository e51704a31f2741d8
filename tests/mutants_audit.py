"""Mutants that undo what was mended after an audit. The program that plants them is mutants.py."""

PPO, GRPO, RCE = "ppo/ppo.py", "grpo/grpo.py", "rce/rce.py"
IN_GRPO = "tests/test_grpo.py::test_"
IN_PPO = "tests/test_ppo.py::test_"
IN_RCE = "tests/test_rce.py::test_"
IN_RUN = "tests/test_run.py::test_"

MUTANTS = [
    (
        PPO,
        "import sklearn.metrics  # noqa: F401",
        "pass",
        IN_RUN + "scikit_learns_import_takes_no_random_number_of_the_run",
    ),
    # best and patience, told apart
    (
        "ppo/ppo.py",
        "return value > self.best_value",
        "return value > self.best_value + EARLY_STOPPING_THRESHOLD",
        "tests/test_run.py::test_best_is_the_highest_and_patience_waits_for_the_threshold[ppo]",
    ),
    (
        "rce/rce.py",
        "return value >= self.best_value",
        "return value >= self.best_value + EARLY_STOPPING_THRESHOLD",
        "tests/test_run.py::test_best_is_the_highest_and_patience_waits_for_the_threshold[rce]",
    ),
    (
        PPO,
        "if value > self.patience_value + EARLY_STOPPING_THRESHOLD:",
        "if value > self.best_value + EARLY_STOPPING_THRESHOLD:",
        IN_RUN + "best_is_the_highest_and_patience_waits_for_the_threshold[ppo]",
    ),
    (
        PPO,
        "if value > self.patience_value + EARLY_STOPPING_THRESHOLD:",
        "if value > self.patience_value:",
        IN_RUN + "best_is_the_highest_and_patience_waits_for_the_threshold[ppo]",
    ),
    (
        PPO,
        "if value > self.patience_value + EARLY_STOPPING_THRESHOLD:",
        "if value > self.patience_value - EARLY_STOPPING_THRESHOLD:",
        IN_RUN + "best_is_the_highest_and_patience_waits_for_the_threshold[ppo]",
    ),
    (
        RCE,
        "            self.halvings += 1\n",
        "            pass\n",
        IN_RUN + "best_is_the_highest_and_patience_waits_for_the_threshold[rce]",
    ),
    (
        "grpo/grpo.py",
        'update(saved["run"])',
        'update(saved["run"] | {"patience_value": saved["run"]["best_value"]})',
        "tests/test_run.py::test_best_and_patience_resume_apart[grpo]",
    ),
    # what does nothing is said or refused
    (
        PPO,
        "if KL_TARGET and KL_COEF == 0:",
        "if False:",
        IN_PPO + "a_kl_target_without_a_reference_is_refused",
    ),
    (
        GRPO,
        'if LOSS_TYPE in ("cispo", "sapo") and DUAL_CLIP is not None:',
        "if False:",
        IN_GRPO + "cispo_with_a_dual_clip_is_refused[cispo]",
    ),
    # the KL controller, the schedules
    (
        PPO,
        "return kl_coef * max(0.8, min(1.2, factor))",
        "return kl_coef * factor",
        IN_PPO + "the_kl_coefficient_stays_positive_and_moves_by_a_fifth_at_most",
    ),
    (
        PPO,
        "return kl_coef * max(0.8, min(1.2, factor))",
        "return kl_coef * max(0.0, min(1.2, factor))",
        IN_PPO + "the_kl_coefficient_stays_positive_and_moves_by_a_fifth_at_most",
    ),
    (
        "ppo/ppo.py",
        "(steps_done - warmup) / max(1, total - warmup)",
        "(steps_done - warmup) / max(1, total - warmup - 1)",
        "tests/test_ppo.py::test_the_last_step_still_has_a_learning_rate",
    ),
    # paths into records, answers that are none
    (
        PPO,
        "value = value.get(key) if isinstance(value, dict) else None",
        "value = value.get(key)",
        IN_RUN + "a_column_may_be_a_path_into_nested_records[ppo-jsonl]",
    ),
    (
        "ppo/ppo.py",
        "        keys = [path]\n",
        "        pass\n",
        "tests/test_run.py::test_a_column_may_be_a_path_into_nested_records[ppo-jsonl]",
    ),
    (PPO, "or value != value:  # NaN", ":", IN_RUN + "an_answer_that_is_no_text_is_named_with_its_line"),
    # resampling within the epochs
    (
        "grpo/grpo.py",
        "if is_flat.any() and not is_end:",
        "if is_flat.any():",
        "tests/test_grpo.py::test_further_prompts_come_out_of_the_runs_own_epochs",
    ),
    (
        GRPO,
        "self.state.cursor == 0 and self.state.epoch >= NUM_EPOCHS",
        "self.state.epoch >= NUM_EPOCHS",
        IN_GRPO + "further_prompts_come_out_of_the_runs_own_epochs",
    ),
    (
        GRPO,
        "self.state.cursor == 0 and self.state.epoch >= NUM_EPOCHS",
        "self.state.cursor == 0",
        IN_GRPO + "further_prompts_come_out_of_the_runs_own_epochs",
    ),
    (
        "grpo/grpo.py",
        "run.total_steps = last_step(self.state, run.step)  # fewer",
        "pass  # fewer",
        "tests/test_grpo.py::test_further_prompts_come_out_of_the_runs_own_epochs",
    ),
    (
        "grpo/grpo.py",
        "math.ceil((-state.cursor % state.prompts) / prompts_per_step)",
        "(-state.cursor % state.prompts) // prompts_per_step",
        "tests/test_grpo.py::test_further_prompts_come_out_of_the_runs_own_epochs",
    ),
    (
        "grpo/grpo.py",
        (
            "        self.run.register(self.state, self.models, self.optimizers, self.tokenizer)\n"
            "        self.run.total_steps = last_step(self.state, self.run.step)\n"
        ),
        (
            "        self.run.total_steps = last_step(self.state, self.run.step)\n"
            "        self.run.register(self.state, self.models, self.optimizers, self.tokenizer)\n"
        ),
        "tests/test_grpo.py::test_a_run_that_resampled_resumes_to_the_same_end",
    ),
    # gspo in bfloat16
    (
        "grpo/grpo.py",
        'if LOSS_TYPE == "gspo" and DTYPE == "bfloat16" and not steps:',
        "if False:",
        "tests/test_grpo.py::test_gspo_clips_nothing_on_policy_in_bfloat16",
    ),
    (
        "grpo/grpo.py",
        'if LOSS_TYPE == "gspo" and DTYPE == "bfloat16" and not steps:',
        'if LOSS_TYPE == "gspo" and DTYPE == "bfloat16":',
        "tests/test_grpo.py::test_gspos_old_log_probabilities_are_those_before_the_first_update",
    ),
    (
        "grpo/grpo.py",
        'if LOSS_TYPE == "gspo" and DTYPE == "bfloat16" and not steps:',
        'if LOSS_TYPE == "gspo" and not steps:',
        "tests/test_grpo.py::test_gspo_in_float32_takes_the_samplers_own",
    ),
    # gold answers and what precedes them
    (
        RCE,
        "border = min(len(os.path",
        "border = max(len(os.path",
        IN_RCE + "the_working_ends_where_the_gold_ids_begin",
    ),
    (
        RCE,
        "[mark_ids, ids])) for ids in gold_ids)",
        "[mark_ids, ids])) for ids in gold_ids[:1])",
        IN_RCE + "the_working_ends_where_the_gold_ids_begin",
    ),
    (
        RCE,
        "    return mark_ids[:border], weights\n",
        "    return mark_ids, weights\n",
        IN_RCE + "the_working_ends_where_the_gold_ids_begin",
    ),
    (
        RCE,
        "    texts = [head + mark, *(head",
        "    texts = [text + mark, *(head",
        IN_RCE + "the_working_ends_where_the_gold_ids_begin",
    ),
    (RCE, 'head = text + "\\n"\n', "head = text\n", IN_RCE + "the_working_ends_where_the_gold_ids_begin"),
    (
        RCE,
        "[-math.inf if score is None else score for",
        "[score or -math.inf for",
        IN_RCE + "a_log_probability_of_exactly_zero_is_the_likeliest",
    ),
]
