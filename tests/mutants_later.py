"""Bugs that readers of the tools, the data programs and the examples found, and of resumed runs."""

PPO = "ppo/ppo.py"
GRPO = "grpo/grpo.py"
RCE = "rce/rce.py"
IN_RCE = "tests/test_rce.py::test_"
REC = "grpo/grpo_rec.py"
ICL = "rce/rce_icl.py"
DPO = "rce/dpo.py"
E = "examples/"
IN_RUN = "tests/test_run.py::test_"
HOME = "tests/test_home.py::test_"
IN_ICL = "tests/test_icl.py::test_"
IN_EXAMPLES = "tests/test_examples.py::test_"
IN_TOOLS = "tests/test_tools.py::test_"
CHECK_UP = "tests/test_check_up.py::test_"
CODES = "tests/test_codes.py::test_"
IN_REC = "tests/test_rec.py::test_"
VISION = "tests/test_vision.py::test_"
IN_MEMORY = "tests/test_memory.py::test_"
SCORES = IN_RUN + "scores_of_other_rewards_do_not_keep_a_later_best_away"
KEPT = HOME + "evaluations_with_other_settings_of_one_name_are_all_kept"
CONSTANTS = HOME + "after_an_evaluation_from_python_the_constants_are_what_they_were"
STOPPED = IN_EXAMPLES + "a_program_in_a_row_may_save_when_both_are_stopped"
JOIN = "tools/join_candidates.py"
MUTANTS = [
    # best/ and scores that do not compare
    (PPO, "self.has_other_scores |= key in _CHANGE_SCORES", "pass", SCORES + "[ppo]"),
    (GRPO, "            self.evaluated_at, self.evals_since_best = -1, 0\n", "", SCORES + "[grpo]"),
    (RCE, "self.best_value = self.patience_value = -math.inf\n\n", "pass\n\n", SCORES + "[rce]"),
    (
        PPO,
        'archive_old_run(list(self.folder.glob("best")), OUTPUT_DIR, self.log)',
        "pass",
        SCORES + "[ppo]",
    ),
    (
        GRPO,
        "    EVAL_DATASETS MAX_EVAL_PROMPTS REWARD_FUNCTIONS",
        "    EVAL_DATASETS MAX_EVAL_PROMPTS",
        SCORES + "[grpo]",
    ),
    # grpo.py: what an update logs, what an evaluation loads, which reference can be moved
    (
        GRPO,
        "log_means(clipped, trained, batch.trained[step_index].sum()",
        "log_means(clipped, mask, step_mask.sum()",
        "tests/test_grpo.py::test_clip_fraction_is_of_the_tokens_that_are_trained[False]",
    ),
    (
        GRPO,
        '"evaluate", policy, 0, 0.0, None',
        '"evaluate", policy, 0, KL_COEF, None',
        HOME + "the_policy_to_score_is_the_actor_without_an_adapter[grpo]",
    ),
    (
        GRPO,
        "if shapes[0] != shapes[1]:",
        "if False:",
        "tests/test_grpo.py::test_a_reference_of_other_layers_cannot_be_moved",
    ),
    # rce.py: candidates that are given, rewards of one's own; the rows of a hub data set's subsets
    (
        RCE,
        "if record.get(name) is None}",
        "if name not in record}",
        IN_RCE + "a_column_that_may_be_missing_may_also_be_null",
    ),
    (
        RCE,
        "if any(value is None for value in shaped):",
        "if False:",
        IN_RCE + "candidates_without_what_the_mode_needs_are_refused[soft_only]",
    ),
    (
        RCE,
        "        if not lacking:  # a fault of your own function",
        "        if False:  # a fault of your own function",
        IN_RCE + "a_fault_of_a_reward_mode_of_ones_own_is_not_hidden",
    ),
    (
        RCE,
        '            self.run.log(f"WARNING: {fault}: now one by one")',
        "            pass",
        IN_RCE + "a_reward_that_cannot_be_asked_about_many_is_asked_one_by_one_which_is_logged",
    ),
    (
        RCE,
        'rows.sort(key=lambda row: row["id"] not in given)',
        "pass",
        IN_RCE + "given_candidates_are_the_first_rounds_prompts_whatever_they_are",
    ),
    (
        RCE,
        "        if tokens > max_positions(self.actor):",
        "        if False:",
        IN_RCE + "the_mapping_is_strict",
    ),
    (
        PPO,
        'parts = [spec["path"], spec.get("name"), spec.get("split")]',
        'parts = [spec["path"]]',
        "tests/test_run.py::test_rows_of_two_subsets_of_a_hub_data_set_have_names_of_their_own",
    ),
    # what ends a run
    (
        PPO,
        ', *self.folder.glob("step_*.old")]',
        "]",
        "tests/test_safety.py::test_a_checkpoint_that_was_being_replaced_comes_back",
    ),
    (
        PPO,
        "if broadcast_from_rank0(folder.exists) and not self.is_stopped:",
        "if broadcast_from_rank0(folder.exists):",
        "tests/test_run.py::test_a_run_that_is_stopped_after_its_checkpoint_stays_stopped",
    ),
    # evaluations
    (PPO, "        globals().update(before)", "        pass", CONSTANTS + "[ppo]"),
    (RCE, "@keeping_constants()\n", "", CONSTANTS + "[rce]"),
    (GRPO, "if all(written.get(key) == value", "if any(written.get(key) == value", KEPT + "[grpo]"),
    (PPO, "        number += 1\n        path = ", "        number += 2\n        path = ", KEPT + "[ppo]"),
    (
        GRPO,
        "    trainer.run.lock.release(force=True)\n    return figures",
        "    return figures",
        HOME + "an_evaluation_from_python_leaves_the_folder_to_other_programs[grpo]",
    ),
    (
        RCE,
        '            trainer.run.log(f"NOTE: no majority@',
        '            str(f"NOTE: no majority@',
        HOME + "an_evaluation_says_why_it_has_no_majority[rce]",
    ),
    # resuming
    (
        PPO,
        '.read_text().replace(f"{ROOT}/", ""))',
        ".read_text())",
        IN_RUN + "a_repository_that_was_moved_has_changed_nothing[ppo]",
    ),
    (
        GRPO,
        'json.loads(json.dumps(constants()).replace(f"{ROOT}/", ""))',
        "constants()",
        IN_RUN + "a_repository_that_was_moved_has_changed_nothing[grpo]",
    ),
    (
        RCE,
        "for file in (__file__, started) if",
        "for file in (__file__,) if",
        IN_RUN + "the_program_that_was_started_decides_too[rce]",
    ),
    (
        PPO,
        "            self.save()\n            self.has_failed = False\n",
        "            self.has_failed = False\n            self.save()\n",
        IN_RUN + "train_after_a_failed_last_save_is_refused[ppo]",
    ),
    (
        GRPO,
        "json.dumps(without_nan(record))",
        "json.dumps(record)",
        IN_RUN + "no_log_has_a_number_that_json_lacks[grpo]",
    ),
    (
        RCE,
        'if key == "exp_avg" and type(optimizer) is torch.optim.AdamW and x.shape != parameter.shape:',
        "if False:",
        IN_RUN + "moments_of_another_order_of_parameters_are_refused[rce]",
    ),
    (
        GRPO,
        "    except (MemoryError, torch.OutOfMemoryError):\n        raise\n",
        "",
        "tests/test_models.py::test_memory_that_is_too_small_for_the_check_is_not_the_models_fault",
    ),
    (
        PPO,
        "(is_cut and self.has_changed)",
        "False",
        IN_RUN + "a_run_that_goes_on_elsewhere_has_its_own_wandb_run[cut-False]",
    ),
    (
        PPO,
        "(is_cut and self.has_changed)",
        "self.has_changed",
        IN_RUN + "a_run_that_goes_on_elsewhere_has_its_own_wandb_run[newest-True]",
    ),
    (
        GRPO,
        "            if trainer != name:",
        "            if False:",
        "tests/test_safety.py::test_a_checkpoint_of_another_trainer_or_kind_is_refused",
    ),
    (
        PPO,
        'return parts[-3:] if parts[-1] in ("policy", "reward_model") else parts[-1:]',
        "return parts[-1:]",
        HOME + "a_run_does_not_go_on_from_another_model[ppo]",
    ),
    (
        GRPO,
        'return parts[-3:] if parts[-1] in ("policy", "reward_model") else parts[-1:]',
        "return parts",
        HOME + "a_run_does_not_go_on_from_another_model[grpo]",
    ),
    (
        ICL,
        "if not is_new and len(self.train_rows) != self.state.queries:",
        "if False:",
        IN_ICL + "a_reward_that_leaves_other_queries_to_train_on_ends_a_resumed_run",
    ),
    (
        DPO,
        "lower EVAL_BATCH_SIZE",
        "wait",
        "tests/test_safety.py::test_out_of_memory_names_what_an_evaluation_needs",
    ),
    (
        PPO,
        "if not (isinstance(panel, list) and len(panel) == 2",
        "if not (isinstance(panel, list)",
        IN_RUN + "a_panel_of_another_shape_is_named",
    ),
    # examples
    (
        E + "vllm_server.py",
        "        if self.is_stale:",
        "        if True:",
        "tests/test_vllm.py::test_the_server_has_each_steps_weights_and_every_prompt_its_request",
    ),
    (
        E + "grpo_after_rce.py",
        "signal.SIGINT: lambda number, frame: None",
        "signal.SIGINT: signal.SIG_DFL",
        STOPPED,
    ),
    (E + "dpo_from_candidates.py", "lambda *_: child.terminate()", "signal.SIG_DFL", STOPPED),
    (
        E + "dpo_from_candidates.py",
        'os.environ.get("WORLD_SIZE", "1")) > 1',
        'os.environ.get("WORLD_SIZE", "1")) > 9',
        IN_EXAMPLES + "what_both_programs_need_and_several_processes_are_refused",
    ),
    (
        E + "distillation.py",
        "if tokenizer.get_vocab() != self.tokenizer.get_vocab():",
        "if False:",
        IN_EXAMPLES + "a_teacher_of_another_tokenizer_is_refused",
    ),
    (
        E + "offloaded_adamw.py",
        "for key, x in state.items()}\n\n    def step",
        "for key, x in {}.items()}\n\n    def step",
        IN_EXAMPLES + "offloaded_moments_go_to_the_cpu_when_a_run_resumes",
    ),
    (
        E + "judge.py",
        "grpo.as_text(prompt)",
        "prompt",
        IN_EXAMPLES + "the_judge_reads_chats_as_texts_and_no_missing_answer",
    ),
    (
        E + "token_rewards.py",
        "ended = lines if is_last else lines[:-1]",
        "ended = lines[:-1]",
        IN_EXAMPLES + "token_rewards_come_where_each_right_line_ends",
    ),
    (
        E + "reasoning_gym_tasks.py",
        'if entry["question"] not in known)',
        "if True)",
        IN_EXAMPLES + "reasoning_gym_makes_rows_and_asks_the_tasks_own_score",
    ),
    (
        E + "curriculum.py",
        "return answers[0].count",
        "return str(answers).count",
        IN_EXAMPLES + "the_curriculum_counts_the_lines_of_the_first_solution",
    ),
    # tools
    (
        JOIN,
        "    if Path(out).exists():",
        "    if out in paths:",
        IN_ICL + "a_join_replaces_no_file_and_mixes_no_kinds",
    ),
    (
        JOIN,
        "for candidate in lists}) > 1:",
        "for candidate in lists}) > 9:",
        IN_ICL + "a_join_replaces_no_file_and_mixes_no_kinds",
    ),
    (
        JOIN,
        'candidates.setdefault(tuple(candidate["pointer"]), candidate)',
        "candidates[len(candidates)] = candidate",
        IN_ICL + "a_list_of_two_files_stands_once_in_the_joined_one",
    ),
    (
        "tools/check_up.py",
        "if table.exists() and not table",
        "if False and not table",
        CHECK_UP + "a_csv_of_the_users_is_not_replaced",
    ),
    (
        "tools/check_up.py",
        'failures / (failures + figures["verified"])',
        'failures / figures["candidates"]',
        CHECK_UP + "lists_that_are_skipped_are_no_failures_and_few_scored_ones_count",
    ),
    (
        "tools/check_up.py",
        '                c["hard"] = None',
        '                c["eval_failed"] = True',
        CHECK_UP + "lists_that_are_skipped_are_no_failures_and_few_scored_ones_count",
    ),
    (
        "tools/check_up.py",
        '    if not figures["verified"]:',
        "    if False:",
        CHECK_UP + "a_file_without_verified_candidates_and_other_files_beside_a_run",
    ),
    (
        "tools/memory.py",
        '{"true": "True", "false": "False"}.get(text, text)',
        "text",
        IN_MEMORY + "true_and_false_are_read_as_the_trainers_read_them",
    ),
    (
        "tools/memory.py",
        "if key in WORDS and value not in WORDS[key]:",
        "if False:",
        IN_MEMORY + "what_cannot_be_counted_is_one_message",
    ),
    (
        "tools/show.py",
        'if samples and not any("reward" in sample for sample in samples):',
        "if False:",
        IN_TOOLS + "samples_without_a_reward_are_not_ordered_by_it",
    ),
    # data
    (
        "data/make_codes.py",
        "                if None in record:",
        "                if False:",
        CODES + "bad_input_is_one_sentence",
    ),
    ("data/make_codes.py", "strict=True", "strict=False", CODES + "bad_input_is_one_sentence"),
    ("data/make_codes.py", "    if longest < STRIDE:", "    if False:", CODES + "bad_input_is_one_sentence"),
    (
        "data/make_codes.py",
        "        if path.parent == folder and",
        "        if False and",
        CODES + "bad_input_is_one_sentence",
    ),
    (
        "data/make_codes.py",
        "if titles.setdefault(item, title) != title:",
        "if titles.setdefault(item, title) is None:",
        CODES + "bad_input_is_one_sentence",
    ),
    (
        "data/make_banking77.py",
        "    if Path(OUT).resolve() == Path(SOURCE).resolve():",
        "    if False:",
        IN_TOOLS + "banking77_is_left_as_it_is_until_its_source_is_good",
    ),
    (
        "data/make_vqa.py",
        '        answers = answers.get("answer")',
        "        answers = list(answers)",
        VISION + "answers_come_in_three_shapes_and_as_one_text",
    ),
    (
        "data/make_vqa.py",
        "        answers = [answers]\n",
        "        answers = list(answers)\n",
        VISION + "answers_come_in_three_shapes_and_as_one_text",
    ),
]
