"""Bugs that two audits found in the machinery, planted again: issue "What two more audits found"."""

PPO = "ppo/ppo.py"
GRPO = "grpo/grpo.py"
RCE = "rce/rce.py"
RUN = "tests/test_run.py::test_"
PROCESSES = "tests/test_processes.py::test_"
DIFFERENT = PROCESSES + "processes_that_would_make_different_runs_end_with_a_sentence"
BACK = RUN + "going_back_to_an_earlier_checkpoint_keeps_the_best_policy_of_the_future_given_up"
CSV = RUN + "rows_of_a_csv_file_are_read_with_the_lines_they_end_on"
LINES = RUN + "without_a_terminal_a_line_about_every_30_seconds_says_how_far_it_is"
MUTANTS = [
    # several processes
    (
        PPO,
        'file_digest(file)["sha256"][:12]',
        'file_digest(file)["sha256"][:0]',
        DIFFERENT + "[source]",
    ),
    (
        PPO,
        "json_name(function)",
        'getattr(function, "__name__", str(function))',
        PROCESSES + "an_objects_reward_and_a_set_among_the_constants_are_the_same_on_all",
    ),
    (
        PPO,
        '"failed", "", str(rank())',
        '"failed", "-", str(rank())',
        PROCESSES + "an_error_of_one_process_of_a_sharded_run_is_shown",
    ),
    # a run
    (PPO, "        if done and now - printed > 30:", "        if done and now - started > 30:", LINES),
    (PPO, "            printed = now\n", "            pass\n", LINES),
    (
        PPO,
        'for t in progress(range(max_new_tokens), "tokens"):',
        "for t in range(max_new_tokens):",
        RUN + "every_long_part_of_a_run_is_tracked",
    ),
    (PPO, 'best.exists() and json.loads(best.read_text())["step"] > self.step', "best.exists()", BACK),
    (
        PPO,
        'folder = self.checkpoint = self.folder / f"step_',
        'folder = self.folder / f"step_',
        RUN + "training_again_in_one_process_goes_on",
    ),
    (
        PPO,
        '"wandb_id", "evaluation", ',
        '"wandb_id", ',
        RUN + "training_a_finished_run_gives_its_last_evaluation",
    ),
    (
        PPO,
        '    if type(error).__module__.startswith("wandb"):',
        "    if False:",
        RUN + "a_wandb_that_does_not_start_is_said_before_a_move",
    ),
    (
        PPO,
        "annotations = annotate(1) if annotate else __annotations__",
        "annotations = __annotations__",
        RUN + "overrides_read_annotations_as_python_314_keeps_them_too",
    ),
    (
        PPO,
        ', "param_groups": groups})',
        "})",
        RUN + "every_group_of_an_optimizer_is_scheduled_clipped_stepped_and_resumed",
    ),
    # models
    (
        GRPO,
        "len(model.get_input_embeddings().weight)",
        "model.get_input_embeddings().num_embeddings",
        "tests/test_lora.py::test_untied_embeddings_may_have_an_adapter",
    ),
    # records, rewards, prompts
    (
        PPO,
        " PLATEAU_PATIENCE MAX_TRAIN_PROMPTS",
        "",
        RUN + "a_number_that_would_be_taken_for_another_is_refused[ppo-PLATEAU_PATIENCE=0]",
    ),
    (PPO, '        elif spec["type"] != "hub":\n', "        elif False:\n", RUN + "a_bad_data_set_is_named"),
    (PPO, "None in (*record, *record.values())", "None in record", CSV),
    (PPO, "None in (*record, *record.values())", "None in record.values()", CSV),
    (PPO, "[(reader.line_num, record) for", "[(reader.line_num - 1, record) for", CSV),
    (PPO, '.decode("utf-8-sig")\n', ".decode()\n", CSV),
    (PPO, 'newline=""), strict=True)', 'newline=""))', CSV),
    (PPO, "{reader.reader.line_num}", "{reader.line_num}", CSV),
    (PPO, "{key: text or None for key, text in record.items()}", "dict(record)", CSV),
    (
        PPO,
        "scores = torch.as_tensor(values, dtype=torch.float32).detach().cpu()",
        "scores = torch.as_tensor(values, dtype=torch.float32).detach()",
        RUN + "a_reward_on_another_device_or_with_a_gradient_is_taken",
    ),
    (
        GRPO,
        "(len(ordered) - 1) - 1e-6)",
        "(len(ordered) - 1) - 1)",
        "tests/test_grpo.py::test_only_the_top_entropy_tokens_are_trained",
    ),
    (
        PPO,
        "repr(rng_state)",
        'repr({**rng_state, "numpy": 0})',
        "tests/test_processes.py::test_processes_that_would_make_different_runs_end_with_a_sentence[numpy]",
    ),
    (
        PPO,
        "repr(rng_state)",
        'repr({**rng_state, "python": 0})',
        "tests/test_processes.py::test_processes_that_would_make_different_runs_end_with_a_sentence[later]",
    ),
    (
        PPO,
        "repr(rng_state)",
        'repr({**rng_state, "torch": 0})',
        "tests/test_processes.py::test_processes_that_would_make_different_runs_end_with_a_sentence[torch]",
    ),
    (PPO, "if is_later and (to_archive or self.has_changed):", "if False:", BACK),
    (
        PPO,
        "        self.signal = None\n        self.clock = None\n        if rank",
        "        self.clock = None\n        if rank",
        "tests/test_run.py::test_training_again_in_one_process_goes_on",
    ),
    (
        PPO,
        "checkpoints = list_checkpoints(run)",
        "checkpoints = [] if is_path else list_checkpoints(run)",
        "tests/test_run.py::test_the_folder_of_a_run_names_its_newest_checkpoint",
    ),
    (
        PPO,
        '        if not (self.folder / "best").exists():\n            self.best_value',
        "        if False:\n            self.best_value",
        "tests/test_run.py::test_a_run_that_goes_on_in_another_folder_has_a_best_policy_there",
    ),
    (
        PPO,
        "        if counts[name] > 1:",
        "        if False:",
        "tests/test_run.py::test_rewards_without_a_name_of_their_own_get_one_that_stays",
    ),
    (
        PPO,
        'check_scores(f"reward_parts[{part!r}]", values, len(scores))',
        "torch.as_tensor(values)",
        "tests/test_run.py::test_parts_are_a_number_per_response",
    ),
    # what a stranger's first edit meets
    (
        PPO,
        "            if x.shape != mask.shape:",
        "            if False:",
        "tests/test_contracts.py::test_a_loss_that_is_a_mean_already_is_an_error_before_the_optimizer_steps",
    ),
    (
        GRPO,
        'log_means({"policy_loss": policy_losses}, weights, 1)',
        'log_sum("policy_loss", (weights * policy_losses).sum().detach())',
        "tests/test_contracts.py::test_a_loss_that_is_a_mean_already_is_an_error_before_the_optimizer_steps",
    ),
    (
        "ppo/sft.py",
        "gradients.log_means(stats, torch.ones_like(logprobs), num_tokens)",
        "gradients.log_means(stats, torch.ones_like(losses), num_tokens)",
        "tests/test_preferences.py::test_a_loss_that_is_a_mean_already_is_an_error[sft]",
    ),
    (
        "ppo/reward_model.py",
        "gradients.log_means(stats, torch.ones_like(chosen), len(rows))",
        "gradients.log_means(stats, torch.ones_like(losses), len(rows))",
        "tests/test_preferences.py::test_a_loss_that_is_a_mean_already_is_an_error[reward_model]",
    ),
    (
        PPO,
        "        if not isinstance(value, (int, float)):",
        "        if False:",
        "tests/test_contracts.py::test_a_metric_is_one_number",
    ),
    (
        PPO,
        "numbers = without_nan(as_numbers(metrics))",
        "numbers = without_nan(metrics)",
        "tests/test_contracts.py::test_metrics_of_a_step_may_be_tensors",
    ),
    (
        RCE,
        '        if (folder / "metrics.json").exists():',
        "        if False:",
        "tests/test_home.py::test_evaluating_best_changes_no_file_of_the_run[rce]",
    ),
    (
        GRPO,
        'sorted([*Path(path).glob("*/config.json"), *Path(path).glob("*/*/config.json")])',
        '[*Path(path).glob("*/config.json")]',
        "tests/test_home.py::test_a_folder_without_a_model_is_named_by_its_constant[grpo]",
    ),
    (
        PPO,
        '{text!r})"',
        '?)"',
        "tests/test_home.py::test_words_that_the_tokenizer_does_not_know_are_counted[ppo]",
    ),
    (
        PPO,
        "        if len(x) == 1:  # a line",
        "        if False:  # a line",
        "tests/test_contracts.py::test_the_picture_of_one_step_shows_it",
    ),
]
