"""Mutants of grpo/grpo_rec.py and its rewards. The program that plants them is mutants.py."""

REC = "grpo/grpo_rec.py"
REWARDS = "rewards/__init__.py"
BASELINES = "bench/rec_baselines.py"
MAKE = "data/make_rec.py"
SASREC = "data/sasrec.py"
STITCH = "data/stitch.py"
CODES = "data/make_codes.py"
IN_CODES = "tests/test_codes.py::test_"
BY_TIME = IN_CODES + "the_split_by_time_asks_for_what_is_later_than_all_that_is_trained_on"
BY_USER = IN_CODES + "the_split_by_users_asks_for_the_last_and_the_one_before"
IN_ORDER = IN_CODES + "a_users_interactions_are_ordered_by_time_and_equal_times_as_in_the_log"
LEVELS = IN_CODES + "each_level_cuts_what_the_one_before_left_and_the_last_is_by_what_was_bought"
WRITTEN = IN_CODES + "what_it_writes_is_trained_on_whole_and_tested_on_what_is_later"
IN_REC = "tests/test_rec.py::test_"
EVERY_FIGURE = IN_REC + "every_figure_of_the_table_by_hand_and_best_is_by_validation"
BEFORE = IN_REC + "what_the_test_asks_for_changes_nothing_before_the_test"
A_STEP = IN_REC + "the_metrics_of_a_step_by_hand"

MUTANTS = [
    # trie and decoding
    (
        REC,
        "self.first.append((count.cumsum(0) - count).to(device))",
        "self.first.append(count.cumsum(0).to(device))",
        IN_REC + "the_trie_admits_exactly_the_catalogue",
    ),
    (
        REC,
        "allowed = step < self.count[level][nodes].unsqueeze(-1)",
        "allowed = step <= self.count[level][nodes].unsqueeze(-1)",
        IN_REC + "the_trie_admits_exactly_the_catalogue",
    ),
    (
        REC,
        "logprobs = scores.masked_fill(~allowed, -math.inf).log_softmax(-1)",
        "logprobs = scores.log_softmax(-1)",
        IN_REC + "beams_equal_exhaustive_search",
    ),
    (
        REC,
        "scores = logits.float().gather(-1, codes) / temperature",
        "scores = logits.float().gather(-1, codes)",
        IN_REC + "log_probabilities_are_those_of_rows_read_alone",
    ),
    (
        REC,
        "            parent = chosen // num_options\n",
        "            parent = chosen % num_prefixes\n",
        IN_REC + "beams_equal_exhaustive_search",
    ),
    (
        REC,
        "goes_on = trie.count[level + 1][nodes] > 1",
        "goes_on = trie.count[level + 1][nodes] > 2",
        IN_REC + "beams_equal_exhaustive_search",
    ),
    (
        REC,
        "chosen).flatten()[rows]",
        "chosen).flatten()[:len(rows)]",
        IN_REC + "beams_equal_exhaustive_search",
    ),
    (
        REC,
        "entropy_of(option_logprobs).gather(1, parent)",
        "entropy_of(option_logprobs)[:, :1].expand_as(parent)",
        IN_REC + "the_first_ratio_is_one",
    ),
    (
        REC,
        "order = logprobs.sum(2).argsort(dim=1, descending=True, stable=True)",
        "order = logprobs.sum(2).argsort(dim=1, stable=True)",
        IN_REC + "the_first_ratio_is_one",
    ),
    (
        REC,
        "uniform[:, chunk].to(model.device)",
        "uniform[:, : len(rows[chunk])].to(model.device)",
        IN_REC + "batch_size_changes_no_candidate",
    ),
    # log-probabilities and the maths
    (
        REC,
        "positions = (row[of_level], place[of_level])",
        "positions = (row[: len(of_level)], place[: len(of_level)])",
        IN_REC + "the_first_ratio_is_one",
    ),
    (
        REC,
        "batch.response_mask * learn.repeat_interleave(trie.depth, 1)",
        "batch.response_mask",
        IN_REC + "sequences_of_sft_have_the_loss_of_a_row_for_each_prefix",
    ),
    (
        REC,
        "groups = scores.view(-1, group_size)\n    # A",
        "groups = scores.view(group_size, -1).T\n    # A",
        IN_REC + "group_advantages_by_hand",
    ),
    (
        REC,
        "return k2 + (k3 - k2).detach()",
        "return k3",
        IN_REC + "the_kl_has_k3s_value_and_the_kls_gradient",
    ),
    (
        REC,
        "objective = torch.min(ratio * advantages,",
        "objective = torch.max(ratio * advantages,",
        IN_REC + "the_clip_stops_the_gradient_on_the_right_side",
    ),
    (
        REC,
        "log_ratio = log_ratio.mean(1, keepdim=True).expand_as(logprobs)",
        "log_ratio = log_ratio.sum(1, keepdim=True).expand_as(logprobs)",
        IN_REC + "gspo_has_one_ratio_an_item",
    ),
    # rewards and metrics
    (
        REWARDS,
        "discounts = [1 / math.log2(rank + 2) for rank in range(len(hits))]",
        "discounts = [1 / math.log2(rank + 3) for rank in range(len(hits))]",
        IN_REC + "ranking_reward_by_hand",
    ),
    (
        REWARDS,
        "for back in range(len(history) - 1, -1, -1)]",
        "for back in range(len(history))]",
        IN_REC + "value_and_min_max_by_hand",
    ),
    (
        REC,
        "rewards.ranking_reward(is_hit[begin : begin + GROUP_SIZE])",
        "rewards.ranking_reward(is_hit)[begin : begin + GROUP_SIZE]",
        IN_REC + "each_group_is_ranked_by_itself_and_parts_add_up",
    ),
    (
        REC,
        "discounts = 1 / torch.log2(torch.arange(min(k, lists.shape[1])) + 2.0)",
        "discounts = 1 / torch.log2(torch.arange(min(k, lists.shape[1])) + 3.0)",
        IN_REC + "metrics_by_hand",
    ),
    (
        REC,
        'last = torch.tensor([row["history"][-1] for row in rows])',
        'last = torch.tensor([row["history"][0] for row in rows])',
        IN_REC + "baselines_count_what_they_say",
    ),
    (
        REC,
        "after = (counts[:, nodes] * within + above)",
        "after = (counts[:, nodes] + above)",
        IN_REC + "counts_back_off_from_items_to_their_codes_and_to_popularity",
    ),
    (
        REC,
        "above = self.smoothing * after\n",
        "above = self.smoothing * self.shares\n",
        IN_REC + "counts_back_off_from_items_to_their_codes_and_to_popularity",
    ),
    (
        REC,
        "(counts.sum(1, keepdim=True) + self.smoothing)",
        "(counts.sum(1, keepdim=True) + 1)",
        IN_REC + "counts_back_off_from_items_to_their_codes_and_to_popularity",
    ),
    (
        REC,
        "for back, item in enumerate(reversed(history)):",
        "for back, item in enumerate(history):",
        IN_REC + "counts_back_off_from_items_to_their_codes_and_to_popularity",
    ),
    (
        REC,
        "                weights[n, item] += self.decay**back  # 0 ** 0 is 1\n",
        "                weights[n, item] = self.decay**back  # 0 ** 0 is 1\n",
        IN_REC + "counts_back_off_from_items_to_their_codes_and_to_popularity",
    ),
    (
        REC,
        "counts = Counts(rows, paths, smoothing, decay)",
        "counts = Counts(rows, paths, smoothing, 0.8)",
        IN_REC + "smoothing_and_decay_are_those_of_the_best_ndcg_on_validation",
    ),
    (
        REC,
        '            "counts": best_counts(self.train_rows, paths, self.valid_rows),\n',
        '            "counts": best_counts(self.train_rows, paths, self.test_rows),\n',
        IN_REC + "smoothing_and_decay_are_those_of_the_best_ndcg_on_validation",
    ),
    # data
    (
        REC,
        "        if prefixes and key in seen:\n",
        "        if not prefixes:\n",
        IN_REC + "a_transition_in_two_rows_of_a_user_is_trained_on_once",
    ),
    (
        REC,
        '        sequence = row["sequence"][-MAX_HISTORY - 1 :]\n',
        '        sequence = row["sequence"][: MAX_HISTORY + 1]\n',
        IN_REC + "long_histories_are_cut_from_the_left_and_counted",
    ),
    (
        REC,
        "kept = list(itertools.filterfalse(is_asked, train))",
        "kept = train",
        IN_REC + "nothing_that_is_asked_later_is_trained_on",
    ),
    (
        REC,
        '        history = row["whole_history"]\n',
        '        history = tuple(row["history"])\n',
        IN_REC + "what_the_test_asks_for_is_not_trained_on_whatever_the_window",
    ),
    (
        REC,
        "            if history[-shorter:] == other[-shorter:]:\n",
        "            if history == other:\n",
        IN_REC + "what_the_test_asks_for_is_not_trained_on_whatever_the_window",
    ),
    (
        REC,
        "            if history[-shorter:] == other[-shorter:]:\n",
        "            if True:\n",
        IN_REC + "what_the_test_asks_for_is_not_trained_on_whatever_the_window",
    ),
    (
        REC,
        "for row in valid + test:",
        "for row in test:",
        IN_REC + "nothing_that_is_asked_later_is_trained_on",
    ),
    (
        REC,
        '            key = (row["user"], whole_history, sequence[place])',
        '            key = (row["user"], tuple(sequence[:place]), sequence[place])',
        IN_REC + "windows_of_one_transition_are_trained_on_once",
    ),
    (
        REC,
        "[:MAX_TRAIN_ROWS]",
        "[:MAX_EVAL_ROWS]",
        IN_REC + "limits_of_rows_are_each_of_its_own_file",
    ),
    (
        REC,
        "torch.linspace(0, len(valid) - 1, MAX_EVAL_ROWS).long()",
        "torch.arange(MAX_EVAL_ROWS)",
        IN_REC + "limits_of_rows_are_each_of_its_own_file",
    ),
    (
        REC,
        "for name in names if name not in catalogue.number]",
        "for name in names[:-1] if name not in catalogue.number]",
        IN_REC + "bad_data_is_one_sentence",
    ),
    (
        REC,
        "except Exception as error:  # NumPy",
        "except (OSError, ValueError, EOFError) as error:  # NumPy",
        IN_REC + "bad_data_is_one_sentence",
    ),
    (
        REC,
        "array = array[catalogue.rows].astype(np.float64)",
        "array = array[catalogue.rows]",
        IN_REC + "vectors_from_a_file",
    ),
    (
        REC,
        "round(TITLE_HISTORY_ROWS * len(train_rows))",
        "round(TITLE_ROWS * len(train_rows))",
        IN_REC + "a_hub_like_tokenizer_gains_and_saves_the_codes",
    ),
    (
        REC,
        "return list(itertools.compress(rows, ~held_out)),",
        "return list(rows),",
        IN_REC + "without_a_validation_file_users_are_held_out_whole",
    ),
    (
        REC,
        "            self.number[item] = number\n",
        "            self.number[item] = len(self.items) - 1\n",
        IN_REC + "items_of_the_same_codes_are_named_counted_and_one",
    ),
    (
        REC,
        "return array[:, catalogue.rows] if square else array",
        "return array",
        IN_REC + "items_of_the_same_codes_are_named_counted_and_one",
    ),
    (
        REC,
        "    tokenizer.add_tokens(new)\n",
        "    tokenizer.add_tokens(new[1:])\n",
        IN_REC + "a_hub_like_tokenizer_gains_and_saves_the_codes",
    ),
    # stages and resume
    (
        REC,
        "            self.reference.load_state_dict(self.actor.state_dict())\n",
        "            pass\n",
        IN_REC + "the_reference_is_the_best_policy_of_sft_and_starts_grpo",
    ),
    (
        REC,
        "        self.actor.load_state_dict(self.reference.state_dict())\n",
        "",
        IN_REC + "the_reference_is_the_best_policy_of_sft_and_starts_grpo",
    ),
    (
        REC,
        "        self.run.reset_best()\n",
        "",
        IN_REC + "the_reference_is_the_best_policy_of_sft_and_starts_grpo",
    ),
    (
        REC,
        "uniform = torch.rand(self.trie.depth, len(rows), GROUP_SIZE, generator=generator)",
        "uniform = torch.rand(self.trie.depth, len(rows), GROUP_SIZE)",
        IN_REC + "evaluating_draws_none_of_the_runs_random_numbers",
    ),
    (
        REC,
        "            if checkpoint:\n                path",
        "            if False:\n                path",
        IN_REC + "a_run_killed_in_both_stages_equals_an_unbroken_one_to_the_byte",
    ),
    # what a figure is made of: split, policy, temperature, schedule, and which constant is handed where
    (
        SASREC,
        "[x if at in asked else -100 for at, x in enumerate(sequence)]",
        "list(sequence)",
        IN_REC + "sasrec_learns_what_is_trained_on_and_its_epoch_is_by_validation",
    ),
    (
        SASREC,
        "    model.load_state_dict(weights)\n    return model, best",
        "    return model, found",
        IN_REC + "sasrec_learns_what_is_trained_on_and_its_epoch_is_by_validation",
    ),
    (
        REC,
        '"popularity": Counts(self.train_rows, paths[:, :1])',
        '"popularity": Counts([*self.train_rows, *self.test_rows], paths[:, :1])',
        IN_REC + "every_figure_of_the_table_by_hand_and_best_is_by_validation",
    ),
    (
        REC,
        '"markov": Counts(self.train_rows, paths[:, [0, -1]])',
        '"markov": Counts([*self.train_rows, *self.valid_rows], paths[:, [0, -1]])',
        IN_REC + "every_figure_of_the_table_by_hand_and_best_is_by_validation",
    ),
    (
        REC,
        'targets = torch.tensor(column(self.train_rows, "target"))',
        'targets = torch.tensor(column(self.train_rows + self.test_rows, "target"))',
        IN_REC + "every_figure_of_the_table_by_hand_and_best_is_by_validation",
    ),
    (
        REC,
        "total = self.end - self.state.begin",
        "total = self.run.total_steps - self.state.begin",
        IN_REC + "the_schedule_of_each_stage_runs_over_its_own_steps",
    ),
    (
        REC,
        "next_rows(self.sft_rows, self.state, SFT_BATCH_SIZE)",
        "next_rows(self.sft_rows, self.state, BATCH_SIZE)",
        IN_REC + "the_schedule_of_each_stage_runs_over_its_own_steps",
    ),
    (
        REC,
        "        self.halvings = 0  # of",
        '        self.halvings = getattr(self, "halvings", 0)  # of',
        IN_REC + "plateau_and_patience_of_sft_do_not_outlive_it",
    ),
    (
        REC,
        "        self.evals_since_best = 0  # eval",
        '        self.evals_since_best = getattr(self, "evals_since_best", 0)  # eval',
        IN_REC + "plateau_and_patience_of_sft_do_not_outlive_it",
    ),
    (
        REC,
        "advantages, LOSS_TYPE, CLIP_RANGE, CLIP_RANGE_HIGH\n",
        "advantages, LOSS_TYPE, CLIP_RANGE, CLIP_RANGE\n",
        IN_REC + "each_constant_of_the_loss_is_handed_to_its_place",
    ),
    (
        REC,
        "advantages, LOSS_TYPE, CLIP_RANGE, CLIP_RANGE_HIGH\n",
        'advantages, "dapo", CLIP_RANGE, CLIP_RANGE_HIGH\n',
        IN_REC + "each_constant_of_the_loss_is_handed_to_its_place",
    ),
    (
        REC,
        "ratio > 1 + CLIP_RANGE_HIGH, ratio < 1 - CLIP_RANGE)",
        "ratio > 1 + CLIP_RANGE, ratio < 1 - CLIP_RANGE_HIGH)",
        IN_REC + "how_often_the_clip_acts_is_counted_on_both_sides",
    ),
    (
        REC,
        "            for _ in range(GROUP_EPOCHS):\n",
        "            for _ in range(MINI_BATCHES):\n",
        IN_REC + "passes_and_mini_batches_are_as_many_as_asked_each_pass_in_another_order",
    ),
    (
        REC,
        "BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS)",
        "BATCH_SIZE)",
        IN_REC + "passes_and_mini_batches_are_as_many_as_asked_each_pass_in_another_order",
    ),
    (
        REC,
        "rewards.rule_reward, RULE_WEIGHT",
        "rewards.rule_reward, VALUE_WEIGHT",
        IN_REC + "each_part_has_its_own_weight_and_groups_are_rewarded_whole",
    ),
    (
        REC,
        "self.semantic_reward, SEMANTIC_WEIGHT",
        "self.semantic_reward, COLLABORATIVE_WEIGHT",
        IN_REC + "each_part_has_its_own_weight_and_groups_are_rewarded_whole",
    ),
    (
        REC,
        "start > BATCH_SIZE * GROUP_SIZE:",
        "start > BATCH_SIZE:",
        IN_REC + "each_part_has_its_own_weight_and_groups_are_rewarded_whole",
    ),
    (
        REC,
        "ref.lerp_(parameter, REFERENCE_SYNC_ALPHA)",
        "ref.lerp_(parameter, 1 - REFERENCE_SYNC_ALPHA)",
        IN_REC + "the_reference_follows_the_actor_when_asked",
    ),
    (
        REC,
        "rows = self.valid_rows if rows is None else rows",
        "rows = self.test_rows if rows is None else rows",
        IN_REC + "every_figure_of_the_table_by_hand_and_best_is_by_validation",
    ),
    (
        REC,
        "best_value(self.values, rows, GROUP_SIZE)",
        "best_value(self.values, rows, 1)",
        IN_REC + "every_figure_of_the_table_by_hand_and_best_is_by_validation",
    ),
    (
        REC,
        "total += np.sort(worth)[-count:].mean()",
        "total += np.sort(worth)[-1]",
        IN_REC + "every_figure_of_the_table_by_hand_and_best_is_by_validation",
    ),
    (
        REC,
        "rewards.history_value(values, history, item, VALUE_DECAY)",
        "rewards.history_value(values, history, item, 0.5)",
        IN_REC + "every_figure_of_the_table_by_hand_and_best_is_by_validation",
    ),
    (
        REC,
        "best_items(self.best_policy(), self.trie,",
        "best_items(self.actor, self.trie,",
        IN_REC + "every_figure_of_the_table_by_hand_and_best_is_by_validation",
    ),
    (
        REC,
        "search(self.best_policy(), self.trie,",
        "search(self.actor, self.trie,",
        IN_REC + "every_figure_of_the_table_by_hand_and_best_is_by_validation",
    ),
    (
        REC,
        'by_row["grpo"][key] - by_row["sft"][key]',
        'by_row["sft"][key] - by_row["grpo"][key]',
        IN_REC + "every_figure_of_the_table_by_hand_and_best_is_by_validation",
    ),
    (
        REC,
        ("        num_hidden_layers=LAYERS,\n        num_attention_heads=HEADS,\n"),
        ("        num_hidden_layers=HEADS,\n        num_attention_heads=LAYERS,\n"),
        IN_REC + "the_small_model_is_as_large_as_asked",
    ),
    (
        REC,
        "batch.scores, GROUP_SIZE, SCALE_REWARDS)",
        'batch.scores, GROUP_SIZE, "group")',
        IN_REC + "advantages_are_scaled_as_asked",
    ),
    (
        REC,
        'if CANDIDATES == "sample":  # drawn',
        "if False:  # drawn",
        IN_REC + "lists_groups_and_samples_are_as_asked",
    ),
    (
        REC,
        "lists = best_items(self.actor, self.trie, rows, EVAL_BEAMS, self.pad_id)",
        "lists = best_items(self.actor, self.trie, rows, GROUP_SIZE, self.pad_id)",
        IN_REC + "lists_groups_and_samples_are_as_asked",
    ),
    (
        SASREC,
        "        if found > best:\n",
        "        if found >= 0:\n",
        IN_REC + "sasrec_learns_what_is_trained_on_and_its_epoch_is_by_validation",
    ),
    (
        REC,
        "SFT_EPOCHS * math.ceil(len(self.sft_rows) / SFT_BATCH_SIZE)",
        "SFT_EPOCHS * math.ceil(len(self.train_rows) / SFT_BATCH_SIZE)",
        IN_REC + "the_schedule_of_each_stage_runs_over_its_own_steps",
    ),
    (
        REC,
        "rewards.history_value(self.values, history, item, VALUE_DECAY)",
        "rewards.history_value(self.values, history, item, 0.5)",
        IN_REC + "every_figure_of_the_table_by_hand_and_best_is_by_validation",
    ),
    (
        REC,
        "best_items(self.reference, self.trie,",
        "best_items(self.actor, self.trie,",
        IN_REC + "every_figure_of_the_table_by_hand_and_best_is_by_validation",
    ),
    (
        REC,
        "figure['reward/value'] / possible['value']",
        "figure['reward'] / possible['value']",
        IN_REC + "every_figure_of_the_table_by_hand_and_best_is_by_validation",
    ),
    (
        MAKE,
        "exposure[quality == REGRETTED] *= PROMOTION",
        "exposure[quality == 1.0] *= PROMOTION",
        IN_REC + "the_log_of_the_made_world_knows_nothing_of_quality_and_shows_what_is_regretted",
    ),
    (
        MAKE,
        "return fits, (fits * quality).astype(np.float16),",
        "return fits * quality, fits * quality,",
        IN_REC + "the_log_of_the_made_world_knows_nothing_of_quality_and_shows_what_is_regretted",
    ),
    (
        BASELINES,
        "self.price = (1 + popularity) ** power",
        "self.price = 1 + popularity",
        IN_REC + "the_rules_of_the_bench_are_the_baselines_and_counts_over_popularity",
    ),
    (
        BASELINES,
        "    for some, row in zip(lists[:, : rec.GROUP_SIZE].tolist(), rows):\n",
        "    for some, row in zip(lists.tolist(), rows):\n",
        IN_REC + "the_rules_of_the_bench_are_the_baselines_and_counts_over_popularity",
    ),
    # programs in data/ that read the same rows
    (REC, "if is_known and str(arrays", "if str(arrays", IN_REC + "a_sasrec_of_other_rows_is_no_baseline"),
    (
        REC,
        'if is_known and str(arrays["trained_on"]) == rows_digest(train_rows):',
        "if is_known:",
        IN_REC + "a_sasrec_of_other_rows_is_no_baseline",
    ),
    (
        STITCH,
        "        for at in sorted(asked):\n",
        "        for at in range(1, len(sequence)):\n",
        IN_REC + "stitched_rows_are_logged_pairs_or_siblings_each_as_often_as_logged",
    ),
    (
        STITCH,
        "        if at not in source[1]:\n",
        "        if at >= len(source[0]):\n",
        IN_REC + "stitched_rows_are_logged_pairs_or_siblings_each_as_often_as_logged",
    ),
    (
        STITCH,
        "logged = draw.random() * (len(known) + extra) < len(known)",
        "logged = draw.random() < 0.9",
        IN_REC + "stitched_rows_are_logged_pairs_or_siblings_each_as_often_as_logged",
    ),
    (
        STITCH,
        "siblings[codes[sequence[at]][:-1]].append(",
        "siblings[codes[sequence[at - 1]][:-1]].append(",
        IN_REC + "stitched_rows_are_logged_pairs_or_siblings_each_as_often_as_logged",
    ),
    (
        STITCH,
        "siblings[some[:-1]]) for item",
        "siblings[some[:-2]]) for item",
        IN_REC + "stitched_rows_are_logged_pairs_or_siblings_each_as_often_as_logged",
    ),
    (
        STITCH,
        "        if (known or extra) and draw",
        "        if known and draw",
        IN_REC + "stitched_rows_are_logged_pairs_or_siblings_each_as_often_as_logged",
    ),
    (
        STITCH,
        "            if len(some) > 1:\n",
        "            if len(some) > 2:\n",
        IN_REC + "stitched_rows_are_written_beside_what_was_held_out",
    ),
    # codes and splits of a plain log
    (
        CODES,
        "for share in (VALID_SHARE + TEST_SHARE, TEST_SHARE)",
        "for share in (VALID_SHARE, TEST_SHARE)",
        BY_TIME,
    ),
    (CODES, "bisect_left(some, (begin,))", "bisect_left(some, (begin, '~'))", BY_TIME),
    (CODES, "range(max(1, trained), known)", "range(1, known)", BY_TIME),
    (CODES, "range(max(1, known), count)", "range(max(1, trained), count)", BY_TIME),
    (CODES, "(count - 2, count - 1) if count > 2", "(count - 2, count - 1) if count > 1", BY_USER),
    (CODES, "range(trained, 1, -STRIDE)][::-1]", "range(trained, 1, -STRIDE)]", BY_USER),
    (CODES, "sorted(some, key=lambda event: event[0])", "sorted(some)", IN_ORDER),
    (CODES, "event: event[0])[-LONGEST:]", "event: event[0])[:LONGEST]", IN_ORDER),
    (CODES, "        rest = rest - centres[group]\n", "", LEVELS),
    (CODES, "sorted(some, key=lambda item: -bought[item])", "sorted(some)", LEVELS),
    (CODES, "[place] if len(same) < len(items) else []", "[place]", LEVELS),
    (CODES, 'in dict(rows["train"]).values():', 'in dict(rows["test"]).values():', WRITTEN),
    (
        CODES,
        "(hidden * mask).sum(1) / mask.sum(1)",
        "hidden.mean(1)",
        IN_CODES + "a_models_vectors_are_the_means_of_a_titles_own_last_hidden_states",
    ),
    (
        CODES,
        "moved = np.where(sizes > 0, sums / np.maximum(sizes, 1), centres)",
        "moved = centres",
        IN_CODES + "k_means_finds_groups_and_their_means",
    ),
    # titles in both stages
    (
        REC,
        '        return sft_rows, train_rows + [row for row in title_rows if "history" in row]\n',
        "        return sft_rows, train_rows\n",
        IN_REC + "stages_ask_by_titles_where_nothing_stands_behind_the_history",
    ),
    (
        REC,
        '        return sft_rows, train_rows + [row for row in title_rows if "history" in row]\n',
        "        return sft_rows, train_rows + []\n",
        IN_REC + "a_hub_like_tokenizer_gains_and_saves_the_codes",
    ),
    (
        REC,
        "next_rows(self.rl_rows, self.state,",
        "next_rows(self.train_rows, self.state,",
        IN_REC + "a_hub_like_tokenizer_gains_and_saves_the_codes",
    ),
    # lines of eval_test.json and of a step
    (
        REC,
        "for key, values in by_row[name].items():",
        "for key, values in by_row['markov'].items():",
        EVERY_FIGURE,
    ),
    (
        REC,
        "interval = bootstrap_interval(gained)",
        'interval = bootstrap_interval(by_row["grpo"][key])',
        EVERY_FIGURE,
    ),
    (REC, "scores[::GROUP_SIZE].mean().item()", "scores[:len(rows)].mean().item()", EVERY_FIGURE),
    (
        REC,
        "scores.view(-1, GROUP_SIZE).mean(1).cpu()",
        "scores.view(-1, GROUP_SIZE).amax(1).cpu()",
        EVERY_FIGURE,
    ),
    (
        REC,
        "(popularity[:, None] > popularity).float()",
        "(popularity[:, None] >= popularity).float()",
        EVERY_FIGURE,
    ),
    (REC, "len(top.unique()) / len(popularity)", "len(top.unique()) / top.shape[-1]", EVERY_FIGURE),
    (REC, "np.quantile(means, (0.025, 0.975))", "np.quantile(means, (0.05, 0.95))", EVERY_FIGURE),
    (
        REC,
        "top_items(model, self.valid_rows), self.valid_rows)",
        "top_items(model, self.test_rows), self.test_rows)",
        BEFORE,
    ),
    (
        REC,
        'targets = torch.tensor(column(self.train_rows, "target"))',
        'targets = torch.tensor(column(self.test_rows, "target"))',
        BEFORE,
    ),
    (REC, "        metrics = self.evaluate()\n", "        metrics = self.evaluate(self.test_rows)\n", BEFORE),
    (REC, "(groups == groups[:, :1]).all(1)", "(groups == groups[:, :1]).any(1)", A_STEP),
    (
        REC,
        "batch.logprobs.sum(1).exp().mean().item() * GROUP_SIZE",
        "batch.logprobs.sum(1).exp().mean().item()",
        A_STEP,
    ),
    (
        BASELINES,
        '(("validation", valid_rows), ("test", test_rows))',
        '(("validation", test_rows), ("test", valid_rows))',
        IN_REC + "the_rules_of_the_bench_are_the_baselines_and_counts_over_popularity",
    ),
    (REC, ' or not "".join(codes).isprintable():', ":", IN_REC + "bad_data_is_one_sentence"),
]
