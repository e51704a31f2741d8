"""Mutants of ppo/ppo_rag.py. The program that plants them is mutants.py."""

RAG = "ppo/ppo_rag.py"
IN_RAG = "tests/test_rag.py::test_"
CLIP = IN_RAG + "the_clip_stops_the_gradient_where_the_ratio_left_the_range_as_the_advantage_wants"
SIX = IN_RAG + "six_steps_equal_three_a_kill_a_resume_and_three_bit_for_bit"
FILES = IN_RAG + "the_first_ratio_is_one_and_every_file_is_there"
WEIGHTS_FREE = IN_RAG + "the_reward_is_its_parts_and_weights_cost_nothing"
WEIGHTS = IN_RAG + "each_part_of_the_reward_has_its_own_weight"
STEP = IN_RAG + "an_optimizer_step_by_hand_with_no_two_constants_equal"
UPDATE = IN_RAG + "an_update_passes_over_all_episodes_as_often_as_it_says_at_the_schedules_rates"
ROLLOUT = IN_RAG + "a_rollout_asks_every_training_question_once_an_epoch_and_every_draw"
FIGURES = IN_RAG + "every_figure_is_of_its_split_and_comes_out_of_the_files_a_second_way"
BEFORE = IN_RAG + "what_the_test_questions_are_worth_changes_nothing_before_the_test"
BLOCKS = IN_RAG + "each_block_draw_and_temperature_has_its_own_seed"
TERMINAL = IN_RAG + "the_table_on_the_terminal_is_of_the_training_questions_and_the_baselines_of_the_tests"
DEPTH = IN_RAG + "below_the_rerankers_depth_stands_what_bm25_found"
RULES = IN_RAG + "the_rules_are_learnt_from_the_training_questions_and_the_trees_size_from_the_validation"
TAKEN = IN_RAG + "odd_input_that_makes_sense_is_taken"
ODD = IN_RAG + "odd_input_is_one_sentence_and_a_run_stays"
EVALUATED = IN_RAG + "an_evaluation_has_the_figures_of_the_test_and_changes_no_file_of_the_run"
BY_HAND = IN_RAG + "figures_of_an_evaluation_by_hand"
OTHER_POLICY = IN_RAG + "a_checkpoint_or_a_folder_of_another_run_is_evaluated_too"
BLOCKS_OF_TEST = IN_RAG + "only_the_test_questions_are_answered_and_as_in_the_table_of_the_training"
ANOTHER = IN_RAG + "another_data_set_is_scored_whole_without_the_training_data"
LACKS = IN_RAG + "what_an_evaluation_lacks_is_one_sentence"
STAGE = IN_RAG + "the_stage_is_chosen_on_the_command_line_and_its_constants_may_change_on_resuming"
SHARES = IN_RAG + "action_shares_by_hand"
OWN_FILES = IN_RAG + "a_folder_may_hold_csv_parquet_or_texts"
TEXTS = IN_RAG + "paragraphs_of_a_text_end_at_blank_lines_and_headings_are_their_titles"
FAULTS = IN_RAG + "faults_of_a_folder_are_one_sentence"
SPLITS = IN_RAG + "the_splits_shrink_with_the_data_unless_they_are_set"
OWN_SECONDS = IN_RAG + "a_questions_own_seconds_are_measured_where_they_are_the_cost"
SAYS_SO = IN_RAG + "more_paragraphs_than_there_are_are_all_that_there_are_and_it_says_so"
PICTURE = IN_RAG + "the_picture_of_actions_counts_every_episode"

MUTANTS = [
    # PPO
    (RAG, "return -torch.min(ratio * advantages", "return -torch.max(ratio * advantages", CLIP),
    (
        RAG,
        "ratio = (logprobs - old_logprobs).exp()\n    return",
        "ratio = (old_logprobs - logprobs).exp()\n    return",
        CLIP,
    ),
    (
        RAG,
        "clipped = old_values + (values - old_values)",
        "clipped = returns + (values - old_values)",
        IN_RAG + "the_value_loss_is_clipped_around_the_rollouts_value",
    ),
    (
        RAG,
        "torch.rsqrt(x.var(unbiased=False) + 1e-8)",
        "torch.rsqrt(x.var() + 1e-8)",
        IN_RAG + "whitened_advantages_have_mean_zero_and_variance_one",
    ),
    (
        RAG,
        "batch.advantages = batch.rewards - batch.values",
        "batch.advantages = batch.values - batch.rewards",
        IN_RAG + "ppo_finds_the_better_action_of_each_kind_of_question",
    ),
    (
        RAG,
        "                logprobs=logprobs.gather(1, actions[:, None])[:, 0],\n",
        "                logprobs=logprobs.amax(1),\n",
        FILES,
    ),
    (
        RAG,
        "if finite:\n            self.optimizer.step()",
        "if not finite:\n            self.optimizer.step()",
        IN_RAG + "ppo_finds_the_better_action_of_each_kind_of_question",
    ),
    (
        RAG,
        "ENTROPY_COEF * entropy).mean()",
        "ENTROPY_COEF * entropy.detach()).mean()",
        IN_RAG + "the_entropy_bonus_has_a_gradient",
    ),
    # what is read and answered
    (
        RAG,
        "question, [self.corpus[i] for i in ids[:top_k]]",
        "question, [self.corpus[i] for i in ids]",
        IN_RAG + "top_k_decides_how_many_paragraphs_the_generator_reads",
    ),
    (
        RAG,
        "question, [self.corpus[i] for i in ids[:top_k]]",
        "question, [self.corpus[i] for i in ids[:3]]",
        IN_RAG + "top_k_decides_how_many_paragraphs_the_generator_reads",
    ),
    (
        RAG,
        "for count in range(len(paragraphs), -1, -1):",
        "for count in range(len(paragraphs), 0, -1):",
        IN_RAG + "a_prompt_has_the_most_paragraphs_that_fit_and_says_how_many",
    ),
    (
        RAG,
        '"left_out": len(ids[:top_k]) - count}',
        '"left_out": 0}',
        IN_RAG + "prompts_that_do_not_fit_are_counted_and_said",
    ),
    (
        RAG,
        '"top_k": 0}',
        '"top_k": 50}',
        IN_RAG + "a_temperature_samples_the_whole_distribution_and_zero_is_greedy",
    ),
    (
        RAG,
        "if temperature > 0 else {}",
        "if temperature > 100 else {}",
        IN_RAG + "a_temperature_samples_the_whole_distribution_and_zero_is_greedy",
    ),
    (
        RAG,
        "with torch.random.fork_rng(gpus):",
        "if True:",
        IN_RAG + "sampling_for_the_table_leaves_the_runs_random_numbers_alone",
    ),
    (
        RAG,
        'padding_side="left")',
        'padding_side="right")',
        IN_RAG + "an_answer_does_not_depend_on_the_batch_and_its_tokens_are_counted[llama]",
    ),
    (
        RAG,
        '(written != self.tokenizer.pad_token_id).sum(1) + inputs["attention_mask"].sum(1)',
        'written.shape[1] + inputs["attention_mask"].sum(1)',
        IN_RAG + "answers_of_unequal_length_end_where_they_end[t5-before1]",
    ),
    (
        RAG,
        "scores.argsort(descending=True, stable=True)",
        "scores.argsort(stable=True)",
        IN_RAG + "the_reranker_scores_a_pair_alone_as_in_a_batch_and_sorts_by_it",
    ),
    (
        RAG,
        'np.argsort(-scores, kind="stable")',
        'np.argsort(scores, kind="stable")',
        IN_RAG + "bm25_finds_the_words_and_equal_scores_keep_the_corpus_order",
    ),
    (
        RAG,
        "binary=True)",
        "binary=True, use_idf=False)",
        IN_RAG + "trigrams_find_an_old_spelling_and_prefer_what_is_rare",
    ),
    (
        RAG,
        "ngram_range=(3, 3), binary=True",
        "ngram_range=(3, 3)",
        IN_RAG + "trigrams_find_an_old_spelling_and_prefer_what_is_rare",
    ),
    (
        RAG,
        '[p["title"]] * TITLE_WEIGHT',
        '[p["title"]]',
        IN_RAG + "a_titles_words_count_as_often_as_its_weight",
    ),
    # data
    (
        RAG,
        "    questions = list(unique.values())[::-1]\n",
        "",
        IN_RAG + "no_question_of_the_test_is_trained_on",
    ),
    (
        RAG,
        'self.table.observations[self.table.splits["train"]]\n        policy.mean',
        "self.table.observations\n        policy.mean",
        IN_RAG + "only_the_training_questions_scale_the_observation",
    ),
    (RAG, "if title in gold_titles:", "if title:", IN_RAG + "hotpots_own_file_is_read_its_paragraphs_once"),
    # table and reward
    (
        RAG,
        "        add_to_cache(path, records)\n",
        "",
        IN_RAG + "a_kill_while_the_cache_fills_loses_one_block_and_the_table_is_the_same",
    ),
    (
        RAG,
        'file.write("\\n" + json.dumps(records)',
        "file.write(json.dumps(records)",
        IN_RAG + "lines_of_the_cache_that_are_half_written_are_answered_again",
    ),
    (
        RAG,
        "json.dumps([questions, *key])",
        "json.dumps([questions, *key[:3]])",
        IN_RAG + "draws_of_an_action_differ_and_a_greedy_one_has_but_one",
    ),
    (
        RAG,
        "MAX_PROMPT_TOKENS, MAX_NEW_TOKENS]",
        "MAX_PROMPT_TOKENS]",
        IN_RAG + "what_an_answer_depends_on_is_in_the_caches_name[MAX_NEW_TOKENS-3]",
    ),
    (
        RAG,
        "prompt = [PROMPT, PARAGRAPH,",
        "prompt = [PROMPT,",
        IN_RAG + "what_an_answer_depends_on_is_in_the_caches_name[PARAGRAPH-{title} {text}]",
    ),
    (
        RAG,
        "PARAGRAPH, CHAT_TEMPLATE, MAX",
        "PARAGRAPH, MAX",
        IN_RAG + "what_an_answer_depends_on_is_in_the_caches_name[CHAT_TEMPLATE-False]",
    ),
    (
        RAG,
        "bool(CHAT_TEMPLATE and self.tokenizer",
        "bool(self.tokenizer",
        IN_RAG + "a_chat_template_goes_around_the_prompt_unless_told_not_to",
    ),
    (
        RAG,
        "scores.view(shape) - COST_WEIGHT * cost",
        "scores.view(shape)",
        IN_RAG + "the_reward_is_its_parts_and_weights_cost_nothing",
    ),
    (
        RAG,
        ' + torch.tensor(column("pairs")) / COST_PAIRS',
        "",
        IN_RAG + "the_reward_is_its_parts_and_weights_cost_nothing",
    ),
    # figures
    (
        RAG,
        "best_fixed = mean[train].mean(0)",
        'best_fixed = mean[table.splits["test"]].mean(0)',
        IN_RAG + "baselines_and_oracle_by_hand",
    ),
    (
        RAG,
        "split_means(table, torch.full_like(mean, 1 / len(table.actions)))",
        "split_means(table, torch.zeros(len(mean), dtype=torch.long))",
        IN_RAG + "baselines_and_oracle_by_hand",
    ),
    (
        RAG,
        "gains = mean[rows, actions] - mean[rows, chosen[rows]]",
        "gains = mean[rows, actions] - mean[rows].mean(1)",
        IN_RAG + "the_gain_is_paired_with_each_rule_and_its_interval_resamples_questions",
    ),
    (
        RAG,
        "means = [generator.choice(values, len(values)).mean()",
        "means = [generator.choice(values)",
        IN_RAG + "the_gain_is_paired_with_each_rule_and_its_interval_resamples_questions",
    ),
    (
        RAG,
        'row[f"ranked_{rerank}"][:top_k]',
        'row[f"ranked_{rerank}"][:1]',
        IN_RAG + "recall_by_hand",
    ),
    # runs
    (
        RAG,
        "        actions = self.choose(rows, policy=self.best)\n",
        "        self.policy.load_state_dict(self.best.state_dict())\n        actions = self.choose(rows)\n",
        IN_RAG + "a_finished_run_goes_on_from_its_last_policy_though_the_test_took_the_best",
    ),
    (
        RAG,
        'self.best = load_pretrained(Policy, str(best), "OUTPUT_DIR")',
        "self.best = Policy(self.policy.config)",
        IN_RAG + "the_policy_is_saved_with_its_actions_and_loads_again",
    ),
    (RAG, "1, generator=generator)[:, 0]", "1)[:, 0]", IN_RAG + "evaluating_never_changes_training"),
    (
        RAG,
        'return load_pretrained(Policy, str(folder / "policy"), "RESUME")',
        "return None",
        IN_RAG + "answers_after_training_are_best_s_and_before_its_end_the_policys_as_it_is",
    ),
    (
        RAG,
        "        logprobs, _ = (self.best or self.policy)(observation[None])",
        "        logprobs, _ = self.policy(observation[None])",
        IN_RAG + "answers_after_training_are_best_s_and_before_its_end_the_policys_as_it_is",
    ),
    # which constant is handed where
    (RAG, "batch.rewards[chunk], VALUE_CLIP_RANGE)", "batch.rewards[chunk], CLIP_RANGE)", STEP),
    (RAG, "old_logprobs, advantages, CLIP_RANGE)", "old_logprobs, advantages, 0.2)", STEP),
    (
        RAG,
        "policy_losses + VALUE_LOSS_COEF * value_losses",
        "policy_losses + MAX_GRAD_NORM * value_losses",
        STEP,
    ),
    (
        RAG,
        "lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)",
        "lr=LEARNING_RATE, weight_decay=VALUE_CLIP_RANGE)",
        STEP,
    ),
    (RAG, "        if WHITEN_ADVANTAGES:\n", "        if True:\n", STEP),
    (RAG, '"hidden_size": HIDDEN_SIZE}', '"hidden_size": BATCH_SIZE}', STEP),
    (RAG, "torch.randperm(N_STEPS).split(BATCH_SIZE)", "torch.arange(N_STEPS).split(BATCH_SIZE)", UPDATE),
    (RAG, "for _ in range(GROUP_EPOCHS):", "for _ in range(4):", UPDATE),
    (RAG, 'torch.tensor(column("pairs")) / COST_PAIRS', 'torch.tensor(column("pairs")) / 20.0', FIGURES),
    (RAG, '"em": (EM_WEIGHT, rewards.em)', '"em": (1.0, rewards.em)', WEIGHTS),
    (RAG, '"f1": (F1_WEIGHT, rewards.f1)', '"f1": (EM_WEIGHT, rewards.f1)', WEIGHTS),
    (RAG, "(ROUGE_WEIGHT, rewards.rouge_l)", "(F1_WEIGHT, rewards.rouge_l)", WEIGHTS),
    (
        RAG,
        'table.seconds if COST == "seconds" else table.read',
        "table.read",
        IN_RAG + "the_clocks_seconds_are_a_cost_too",
    ),
    (
        RAG,
        "np.random.default_rng(SPLIT_SEED)",
        "np.random.default_rng(SEED)",
        IN_RAG + "which_questions_are_in_which_split_is_the_split_seeds_alone",
    ),
    (RAG, "temperature, seed)\n        seconds = ", "temperature, SEED)\n        seconds = ", BLOCKS),
    # which questions, seeds and paragraphs
    (
        RAG,
        '        rows = self.table.splits["validation"]\n',
        '        rows = self.table.splits["test"]\n',
        FIGURES,
    ),
    (
        RAG,
        "torch.Generator().manual_seed(SEED + 1)",
        "torch.Generator().manual_seed(SPLIT_SEED + 1)",
        FIGURES,
    ),
    (
        RAG,
        'rows += next_rows(self.table.splits["train"],',
        'rows += next_rows(self.table.splits["validation"],',
        ROLLOUT,
    ),
    (
        RAG,
        "draws = torch.randint(DRAWS, (N_STEPS,))",
        "draws = torch.zeros(N_STEPS, dtype=torch.long)",
        ROLLOUT,
    ),
    (
        RAG,
        "(torch.tensor(best)[order].tolist() + ids[RERANK_DEPTH:])",
        "torch.tensor(best)[order].tolist()",
        DEPTH,
    ),
    (
        RAG,
        "self.retriever.search(question, max(depth, RERANK_DEPTH))",
        "self.retriever.search(question, depth)",
        IN_RAG + "the_reranker_scores_a_pair_alone_as_in_a_batch_and_sorts_by_it",
    ),
    (RAG, "json.dumps([questions, *key])", "json.dumps(key)", BLOCKS),
    (RAG, "json.dumps([questions, *key])", "json.dumps([questions, *key[1:]])", BLOCKS),
    (
        RAG,
        "map(paragraph_text, paragraphs[:n])",
        "map(paragraph_text, paragraphs[: min(n, 3)])",
        IN_RAG + "the_observation_entry_by_entry",
    ),
    # figures
    (
        RAG,
        "np.quantile(means, (0.025, 0.975))",
        "np.quantile(means, (0.05, 0.95))",
        IN_RAG + "the_gain_is_paired_with_each_rule_and_its_interval_resamples_questions",
    ),
    (RAG, 'test = {name: baseline["test"] for', 'test = {name: baseline["validation"] for', FIGURES),
    (RAG, '"oracle": mean.argmax(1)}', '"oracle": table.rewards[:, :, 0].argmax(1)}', FIGURES),
    (
        RAG,
        '    mean = table.rewards.double().mean(2)\n    train = np.array(table.splits["train"])\n',
        '    mean = table.rewards.double().mean(2)\n    train = np.array(table.splits["test"])\n',
        TERMINAL,
    ),
    (RAG, """{figures[name]['test'][key]:.3f}""", """{figures[name]['train'][key]:.3f}""", TERMINAL),
    (RAG, "best = mean[train[table.types[train] == name]]", "best = mean[table.types == name]", RULES),
    (RAG, "by_type = best_fixed.clone()", "by_type = torch.zeros_like(best_fixed) + mean.argmin()", RULES),
    (
        RAG,
        "reward = mean[validation, actions[validation]]",
        "reward = mean[train, actions[train]]",
        RULES,
    ),
    (RAG, "tree.fit(observations[train], mean[train])", "tree.fit(observations, mean)", RULES),
    (RAG, "if reward > best_reward:", "if leaves == 2:", RULES),
    (
        RAG,
        "mean.masked_fill(temperatures > min(TEMPERATURES), -math.inf)",
        "mean.masked_fill(temperatures < 0, -math.inf)",
        FIGURES,
    ),
    (RAG, '        if row["gold_docs"]:\n', "        if True:\n", IN_RAG + "recall_by_hand"),
    # a file's values
    (RAG, 'if record.get("gold"):', 'if "gold" in record:', TAKEN),
    (RAG, 'if "" in map(str.strip, texts):', "if False:", IN_RAG + "bad_lines_are_named"),
    (RAG, "            qa.generator.prompt(text, [])\n", "            pass\n", ODD),
    (RAG, ' or row["question"]] = row', "] = row", TAKEN),
    (
        RAG,
        "        self.model.config.pad_token_id = self.tokenizer.pad_token_id\n",
        "",
        IN_RAG + "a_rerankers_pairs_fit_whatever_their_length_and_it_needs_no_pad_token",
    ),
    (
        RAG,
        "    if unknown > 0.01:",
        "    if unknown > 0.5:",
        IN_RAG + "words_that_the_generator_does_not_know_are_said",
    ),
    (
        RAG,
        'if device.type == "cuda" else []',
        'if device.type == "cuda" else [0]',
        IN_RAG + "sampling_for_the_table_leaves_the_runs_random_numbers_alone",
    ),
    (
        RAG,
        "if (policy.config.inputs, policy.config.actions) != (len(_OBSERVATION), actions):",
        "if policy.config.inputs != len(_OBSERVATION):",
        IN_RAG + "resuming_with_other_actions_is_refused",
    ),
    # what the source logs and clips
    (RAG, ".clamp(-REWARD_CLIP, REWARD_CLIP)", "", WEIGHTS_FREE),
    (RAG, ".clamp(-REWARD_CLIP, REWARD_CLIP)", ".clamp(max=REWARD_CLIP)", WEIGHTS_FREE),
    (
        RAG,
        "unexplained = errors.var() / (batch.rewards.var() + 1e-8)",
        "unexplained = errors.var() / (batch.values.var() + 1e-8)",
        IN_RAG + "explained_variance_and_the_means_of_a_step_by_hand",
    ),
    (RAG, "best_fixed = mean[train].mean(0).argmax()", "best_fixed = mean.mean(0).argmax()", BEFORE),
    (
        RAG,
        '        rows = self.table.splits["validation"]\n',
        '        rows = self.table.splits["validation"] + self.table.splits["test"]\n',
        BEFORE,
    ),
    (
        RAG,
        '        rows = self.table.splits["test"]\n',
        '        rows = self.table.splits["validation"]\n',
        FIGURES,
    ),
    (
        RAG,
        "gains = mean[rows, actions] - mean[rows, chosen[rows]]",
        "gains = mean[rows, actions] - mean[rows].amax(1)",
        IN_RAG + "the_gain_is_paired_with_each_rule_and_its_interval_resamples_questions",
    ),
    (RAG, 'map(itemgetter("question"), questions), *corpus)', 'map(itemgetter("question"), questions))', ODD),
    (RAG, 'if not isinstance(data.get("path"), str) or', 'if "path" not in data or', ODD),
    (RAG, "run.total_steps, WARMUP_STEPS, schedule", "run.total_steps, 0, schedule", UPDATE),
    (RAG, "run.total_steps, WARMUP_STEPS, schedule", "N_STEPS, WARMUP_STEPS, schedule", UPDATE),
    (RAG, "steps_done = max(0, run.step - 1)", "steps_done = run.step", UPDATE),
    (RAG, "schedule, run.halvings)", "schedule, 0)", UPDATE),
    (RAG, "answers if isinstance(answer, list) else answers[0]", "answers", TAKEN),
    (RAG, '"timesteps": self.run.step * N_STEPS', '"timesteps": (self.run.step - 1) * N_STEPS', FILES),
    (
        RAG,
        '"advantage_mean": errors.mean().item()',
        '"advantage_mean": batch.rewards.mean().item()',
        "tests/test_rag.py::test_explained_variance_and_the_means_of_a_step_by_hand",
    ),
    # STAGE=evaluate
    (RAG, 'trainer = trainer_class(resume_from_checkpoint="no")', "trainer = trainer_class()", EVALUATED),
    (RAG, "actions = logprobs.argmax(1)\n", "actions = logprobs.argmin(1)\n", EVALUATED),
    (
        RAG,
        "by_question[name] = values[rows, actions].double().mean(1)",
        "by_question[name] = values[rows, actions].double()[:, 0]",
        EVALUATED,
    ),
    (
        RAG,
        "rewards_of_actions = table.rewards.double().mean(2)[rows]",
        "rewards_of_actions = table.rewards.double().mean(2)[: len(rows)]",
        BY_HAND,
    ),
    (RAG, "(logprobs.double().exp() * rewards_of_actions).sum(1)", "rewards_of_actions.mean(1)", BY_HAND),
    (RAG, "rewards_of_actions[:, rewards_of_actions.mean(0).argmax()]", "rewards_of_actions[:, 0]", BY_HAND),
    (
        RAG,
        'by_question["oracle_reward"] = rewards_of_actions.amax(1)',
        'by_question["oracle_reward"] = rewards_of_actions.mean(1)',
        BY_HAND,
    ),
    (
        RAG,
        'by_question["gain_over_fixed"] = by_question["reward"] - fixed',
        'by_question["gain_over_fixed"] = fixed - by_question["reward"]',
        BY_HAND,
    ),
    (
        RAG,
        '{"responses": table.responses[row][action], "paragraphs"',
        '{"responses": table.responses[n][action], "paragraphs"',
        BY_HAND,
    ),
    (
        RAG,
        'question[f"ranked_{rerank}"][:top_k]]\n        record',
        'question[f"ranked_{rerank}"]]\n        record',
        EVALUATED,
    ),
    (
        RAG,
        "folder = Path(OUTPUT_DIR) / EVALUATE_POLICY\n",
        'folder = Path(OUTPUT_DIR) / "best"\n',
        OTHER_POLICY,
    ),
    (RAG, '    if (folder / "policy").is_dir():\n', "    if True:\n", OTHER_POLICY),
    (
        RAG,
        "*Path(EVALUATE_POLICY).parts[-2:], Path(data",
        "*Path(EVALUATE_POLICY).parts[-1:], Path(data",
        OTHER_POLICY,
    ),
    (
        RAG,
        "questions[: math.ceil(number / block_size()) * block_size()]",
        "questions[:number]",
        BLOCKS_OF_TEST,
    ),
    (
        RAG,
        "            questions = questions_to_evaluate(questions, self.policy)\n",
        "            pass\n",
        BLOCKS_OF_TEST,
    ),
    (RAG, 'return ["test"] * count\n', 'return ["test"] * 2 + ["train"] * (count - 2)\n', ANOTHER),
    (RAG, 'return EVAL_DATASET if data_constant() == "EVAL_DATASET" else DATASET', "return DATASET", ANOTHER),
    (RAG, "if not EVAL_DATASET and learnt_from not in", "if learnt_from not in", ANOTHER),
    (RAG, "learnt_from not in (None, questions_digest(questions))", "learnt_from == 0", LACKS),
    (RAG, """not config.exists() or '"actions"' not in config.read_text()""", "not config.exists()", LACKS),
    (RAG, 'STAGE EVALUATE_POLICY EVAL_DATASET".split()', 'STAGE EVAL_DATASET".split()', STAGE),
    (RAG, "        evaluate_policy(trainer_class)\n        return 0", "        return 0", STAGE),
    # Which actions are chosen
    (
        RAG,
        "chosen = (actions == a).double().mean().item()",
        "chosen = (best == a).double().mean().item()",
        SHARES,
    ),
    (
        RAG,
        "best = table.rewards.double().mean(2)[rows].argmax(1)\n    shares",
        "best = table.rewards.double().mean(2)[rows].argmin(1)\n    shares",
        SHARES,
    ),
    (
        RAG,
        'figures["actions"] = action_shares(self.table, rows, actions)',
        'figures["actions"] = action_shares(self.table, rows, 0 * actions)',
        EVALUATED,
    ),
    (RAG, ".double().round(decimals=6).tolist())] = number", ".tolist())] = number", PICTURE),
    # A user's files and splits
    (
        "data/make_rag.py",
        '(key != "OUT" and not value.isdecimal())',
        "False",
        IN_RAG + "the_worlds_maker_takes_numbers_and_a_folder",
    ),
    (
        RAG,
        'if name == "em" and not values.any():',
        'if name == "em" and not values.all():',
        IN_RAG + "a_generator_that_answers_nothing_right_is_said",
    ),
    (RAG, ', f"{name}.parquet"]', "]", OWN_FILES),
    (RAG, 'if path.suffix not in (".txt", ".md"):', "if not path.is_file():", TEXTS),
    (RAG, 'title = block.strip("# ")', "title = path.stem", TEXTS),
    (RAG, 're.fullmatch(r"#+ .*", block)', 're.match(r"#+ .*", block)', TEXTS),
    (RAG, "    if len(files) > 1:", "    if len(files) > 2:", FAULTS),
    (RAG, "if len(corpus) < max(TOP_KS):", "if len(corpus) < min(TOP_KS):", SAYS_SO),
    (
        RAG,
        '        if number == 0:\n            raise UserError(f"{where} has no {name}")',
        "        pass",
        FAULTS,
    ),
    (RAG, "test = min(400, max(1, count * 4 // 15))", "test = min(400, count)", SPLITS),
    (RAG, "validation = min(200, max(1, count * 2 // 15))", "validation = min(200, count * 2 // 15)", SPLITS),
    (RAG, 'return 1 if COST == "seconds" else QUESTIONS_AT_ONCE', "return QUESTIONS_AT_ONCE", OWN_SECONDS),
    (RAG, "        facts.append(COST)\n", "        pass\n", OWN_SECONDS),
]
