"""Bugs of grpo_rec.py away from home: STAGE=evaluate, logs of long histories. mutants.py plants them."""

REC, MAKE_REC, CODES = "grpo/grpo_rec.py", "data/make_rec.py", "data/make_codes.py"
IN_REC = "tests/test_rec.py::test_"
TABLE = IN_REC + "scoring_best_and_sft_gives_the_figures_of_the_runs_table_and_changes_none_of_its_files"
RECORDS = IN_REC + "a_policy_of_another_folder_is_scored_on_any_file_with_a_record_for_each_row"
NO_POLICY = IN_REC + "without_a_trained_policy_the_evaluation_says_what_to_do[step_7]"
OTHER_CATALOGUE = IN_REC + "a_policy_is_neither_scored_nor_trained_further_with_another_catalogue"
SCHEDULE = IN_REC + "the_schedule_of_each_stage_is_its_own_and_runs_over_its_own_steps"
DECAY = IN_REC + "each_stage_has_its_own_weight_decay_also_when_it_is_resumed"
BATCH = IN_REC + "a_step_of_sft_has_about_256_items_to_learn_however_long_the_histories_are"
RHYTHM = IN_REC + "evaluations_of_sft_are_equally_far_apart_however_many_steps_it_has[4-steps3]"
WINS = IN_REC + "a_baseline_that_wins_on_validation_is_named_in_the_last_lines"
SERIES = IN_REC + "in_the_long_log_a_series_goes_on_and_nobody_takes_an_item_twice"
POPULAR = IN_REC + "without_tastes_and_series_the_long_log_is_drawn_by_popularity"
DRIFTS = IN_REC + "a_users_taste_shows_in_the_long_log_and_drifts"
HISTORY = (
    "tests/test_codes.py::test_max_history_is_chosen_from_the_log_and_training_rows_end_that_many_items_apart"
)
MUTANTS = [
    # STAGE=evaluate
    (REC, '    if STAGE == "evaluate":\n        return [], [], test\n', "", TABLE),
    (
        REC,
        "scores.view(-1, GROUP_SIZE).mean(1).cpu()\n    for name",
        "scores[::GROUP_SIZE].cpu()\n    for name",
        TABLE,
    ),
    (
        REC,
        "values.view(-1, GROUP_SIZE).mean(1).cpu()\n    names",
        "values[::GROUP_SIZE].cpu()\n    names",
        TABLE,
    ),
    (REC, 'f"ndcg@{k}": gains(lists, rows, k)}', 'f"ndcg@{k}": gains(lists, rows, 10)}', TABLE),
    (
        REC,
        '    if EVALUATE_POLICY in ("best", "sft") or',
        '    if EVALUATE_POLICY == "best" or',
        TABLE,
    ),
    (REC, 'STAGE, ACTOR_MODEL, LORA_RANK = "evaluate", policy, 0', "LORA_RANK = 0", TABLE),
    (
        REC,
        '"RESUME OUTPUT_DIR STAGE EVALUATE_POLICY".split()',
        '"RESUME OUTPUT_DIR STAGE".split()',
        TABLE,
    ),
    (REC, '    if (policy / "policy").exists():\n        policy = policy / "policy"\n', "", RECORDS),
    (REC, "lists[i, :10].tolist() if item >= 0]", "lists[0, :10].tolist() if item >= 0]", RECORDS),
    (REC, 'names(row["history"]), "target"', 'names(row["history"][:1]), "target"', RECORDS),
    (REC, 'by_row["ndcg@10"][i].item()', 'by_row["ndcg@3"][i].item()', RECORDS),
    (REC, '    if not (policy / "config.json").exists() and', "    if False and", NO_POLICY),
    (REC, "    if not TEST_FILE:\n", "    if False:\n", NO_POLICY),
    (
        REC,
        'model.config.update({"catalogue": catalogue.digest})',
        'model.config.update({"catalog": catalogue.digest})',
        OTHER_CATALOGUE,
    ),
    (
        REC,
        'if known != catalogue.digest and (STAGE in ("rl", "evaluate") or checkpoint):',
        'if known != catalogue.digest and (STAGE == "evaluate" or checkpoint):',
        OTHER_CATALOGUE,
    ),
    (
        REC,
        "json.dumps(sorted(zip(self.items, self.codes)))",
        "json.dumps(sorted(self.codes))",
        OTHER_CATALOGUE,
    ),
    # SFT of logs of any shape
    (REC, "warmup = round(SFT_WARMUP * total)", "warmup = WARMUP_STEPS", SCHEDULE),
    (REC, "SFT_WEIGHT_DECAY / (SFT_LEARNING_RATE * steps_per_pass)", "SFT_WEIGHT_DECAY", DECAY),
    (
        REC,
        '        if self.state.stage == "sft":\n            # AdamW',
        '        if STAGE != "rl":\n            # AdamW',
        DECAY,
    ),
    (REC, 'sum(map(sum, column(rows, "learn")))', 'sum(map(len, column(rows, "learn")))', BATCH),
    (REC, "SFT_BATCH_SIZE or balanced_batch_size(self.sft_rows)", "SFT_BATCH_SIZE or 64", BATCH),
    (REC, "math.ceil(self.end / SFT_EVALUATIONS) if", "self.end // SFT_EVALUATIONS if", RHYTHM),
    (REC, "if run.is_due(evaluate_every) or", "if run.is_due(EVAL_EVERY_N_STEPS) or", RHYTHM),
    (REC, "if -math.inf < value < best:\n", "if -math.inf < value <= best:\n", WINS),
    (REC, "        if self.state.sft_best >= 0:", "        if True:", WINS),
    (REC, "                self.compare_with_baselines()\n", "", WINS),
    (
        REC,
        "max(self.levels, key=lambda name: self.levels[name][key])",
        "next(iter(self.levels))",
        WINS,
    ),
    # the long log
    (MAKE_REC, "            worth[last] = 0\n", "", SERIES),
    (MAKE_REC, "chances[sequel] += SEQUEL", "chances[last] += SEQUEL", SERIES),
    (MAKE_REC, "(chances > chances[last]).sum()) + 1", "(chances > chances[last]).sum())", POPULAR),
    (MAKE_REC, "taste = unit(taste + DRIFT *", "taste = unit(taste + 0 *", DRIFTS),
    (MAKE_REC, "np.exp(LONG_SHARPNESS * factors @ taste)", "np.exp(0 * factors @ taste)", DRIFTS),
    # what make_codes.py chooses
    (
        CODES,
        "ends = range(len(items), 1, -(STRIDE or longest))",
        "ends = range(len(items), 1, -(STRIDE or 5))",
        HISTORY,
    ),
    (CODES, "return min(50, max(10, lengths", "return min(60, max(10, lengths", HISTORY),
    (CODES, "return min(50, max(10, lengths", "return min(50, max(5, lengths", HISTORY),
    (
        CODES,
        "math.ceil(HISTORY_SHARE * len(lengths)) - 1",
        "math.ceil(HISTORY_SHARE * len(lengths)) - 2",
        HISTORY,
    ),
    (
        CODES,
        '    words.append(f"MAX_HISTORY={longest}")\n',
        "",
        "tests/test_codes.py::test_what_it_writes_is_trained_on_whole_and_tested_on_what_is_later",
    ),
]
