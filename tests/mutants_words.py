"""Bugs of arguments from a file, of notes and warnings to new users, of last lines, of EVAL_DATASET and InfoScore in
rce_icl.py, and of the recipes over rce_icl.py and grpo_rec.py. mutants.py plants them."""

PPO, GRPO, RCE = "ppo/ppo.py", "grpo/grpo.py", "rce/rce.py"
REC, ICL, CHECK, CODES = "grpo/grpo_rec.py", "rce/rce_icl.py", "tools/check_up.py", "data/make_codes.py"
RUN, HOME = "tests/test_run.py::test_", "tests/test_home.py::test_"
IN_ICL, IN_REC = "tests/test_icl.py::test_", "tests/test_rec.py::test_"
EXAMPLES = "tests/test_examples_icl_rec.py::test_"
WORDS = RUN + "a_file_of_overrides_is_read_line_by_line"
REFUSED = RUN + "a_file_of_overrides_that_is_missing_or_empty_is_refused"
OTHERS = RUN + "a_constant_of_another_trainer_is_answered_with_this_ones"
SHIPPED = HOME + "own_data_with_the_shipped_evaluation_are_told_so"
UNKNOWN = HOME + "words_that_the_tokenizer_does_not_know_are_counted"
FLAT = HOME + "ten_steps_of_equal_rewards_in_a_row_are_warned_of_once"
KEPT = RUN + "a_run_names_the_policy_that_it_kept"
VERDICT = "tests/test_check_up.py::test_the_verdict_names_what_to_do"
BAD_WORD = "tests/test_codes.py::test_bad_input_is_one_sentence"
TABLE = IN_REC + "every_figure_of_the_table_by_hand_and_best_is_by_validation"
BEST_OTHERS = IN_ICL + "the_terminal_names_the_best_of_the_others"
ANOTHER_FILE = IN_ICL + "another_file_is_scored_whatever_the_run_was_tested_on"
HELD_OUT = IN_ICL + "with_a_file_of_its_own_the_rows_held_out_for_the_test_are_no_demonstrations"
INFOSCORE = IN_ICL + "infoscore_is_what_a_list_adds_to_the_log_probability_of_the_golds"
MUTANTS = [
    (PPO, 'encoding="utf-8-sig").splitlines', 'encoding="utf-8").splitlines', WORDS),
    (PPO, 'if line.strip() and not line.strip().startswith("#")', "if line.strip()", WORDS),
    (PPO, "lines.append(line.strip())", "lines += line.split()", WORDS),
    (
        PPO,
        '        if not lines:\n            raise UserError(f"{argument}: the',
        '        if False:\n            raise UserError(f"{argument}: the',
        REFUSED,
    ),
    (
        PPO,
        '        except (OSError, UnicodeError) as error:\n            raise UserError(f"{argument}',
        '        except UnicodeError as error:\n            raise UserError(f"{argument}',
        REFUSED,
    ),
    (
        PPO,
        '        except (OSError, UnicodeError) as error:\n            raise UserError(f"{argument}',
        '        except OSError as error:\n            raise UserError(f"{argument}',
        REFUSED,
    ),
    (ICL, "        if key in _INSTEAD_HERE:\n", "        if False:\n", OTHERS),
    (ICL, '"MAX_STEPS": "RCE_EPOCHS and', '"MAX_STEPS": "NUM_EPOCHS and', OTHERS),
    (GRPO, "    trains_on_own = not all(map", "    trains_on_own = not any(map", SHIPPED + "[grpo]"),
    (
        GRPO,
        'map(is_shipped, column(EVAL_DATASETS, "path"))',
        'map(is_shipped, column(TRAIN_DATASETS, "path"))',
        SHIPPED + "[grpo]",
    ),
    (
        GRPO,
        "not evaluates_on_shipped or not trainer.eval_rows:",
        "not evaluates_on_shipped:",
        SHIPPED + "[grpo]",
    ),
    (RCE, "        *shipped_evaluation(trainer),\n", "", SHIPPED + "[rce]"),
    (RCE, "    warn_of_unknown_tokens(trainer, rows, constant)\n", "", UNKNOWN + "[rce]"),
    (
        RCE,
        "if unknown is None or unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id):",
        "if unknown is None:",
        UNKNOWN + "[rce]",
    ),
    (
        RCE,
        '            unknown_tokens += row["ids"].count(unknown)',
        "            unknown_tokens += 1",
        UNKNOWN + "[rce]",
    ),
    (
        PPO,
        "    trainer.steps_without_signal += 1\n    if has_signal:\n",
        "    trainer.steps_without_signal += 1\n    if False:\n",
        FLAT + "[ppo/ppo.py]",
    ),
    (
        GRPO,
        "    if trainer.steps_without_signal == 10:\n",
        "    if trainer.steps_without_signal >= 10:\n",
        FLAT + "[grpo/grpo.py]",
    ),
    (
        PPO,
        "has_signal = batch.token_scores is not None or ",
        "has_signal = ",
        HOME + "unequal_rewards_of_tokens_with_equal_sums_are_a_signal",
    ),
    (
        GRPO,
        "bool(batch.advantages.any()) or self.distils",
        "bool(batch.advantages.any())",
        HOME + "distillation_has_no_reward_to_be_warned_of",
    ),
    (
        GRPO,
        "        if step == first and self.step > first:\n",
        "        if step == first:\n",
        KEPT + "[grpo]",
    ),
    (GRPO, "{policy}{self.step_of_best()}", "{policy}", KEPT + "[grpo]"),
    (PPO, "def step_of_best(self, first=0):", "def step_of_best(self, first=1):", KEPT + "[ppo]"),
    (
        ICL,
        'if is_shipped(spec["path"]) and not',
        "if not",
        IN_ICL + "own_data_with_the_shipped_test_are_told_so",
    ),
    (
        ICL,
        'and not is_shipped(TRAIN_DATASET["path"])',
        "",
        IN_ICL + "own_data_with_the_shipped_test_are_told_so",
    ),
    (CHECK, "    if pick >= 0.98:\n", "    if oracle >= 0.98:\n", VERDICT),
    (CHECK, "    if pick >= 0.98:\n", "    if pick >= 1.98:\n", VERDICT),
    (CODES, "key.upper(), known, 1, 0.5)", "key.upper(), known, 1, 0.99)", BAD_WORD),
    (CODES, "type(value) in (str, int, float)", "True", BAD_WORD),
    (REC, "    if gains_over_sft and not any(", "    if gains_over_sft and any(", TABLE),
    (
        REC,
        '["<end>"] * (depth - len(codes))',
        '["<end>"] * (len(codes) < depth)',
        IN_REC + "items_of_fewer_codes_end_with_a_code_of_their_own",
    ),
    (ICL, 'if gain > 0 else f"{-gain:.3f} below', 'if gain > 9 else f"{-gain:.3f} below', BEST_OTHERS),
    (ICL, "        if gain:\n            compared", "        if True:\n            compared", BEST_OTHERS),
    (
        ICL,
        'if STAGE == "evaluate" and EVAL_DATASET is not None:',
        "if EVAL_DATASET is not None:",
        ANOTHER_FILE,
    ),
    (ICL, 'if STAGE == "evaluate" and EVAL_DATASET is not None:', "if False:", ANOTHER_FILE),
    (ICL, "    dataset = test_data()[1]\n", "    dataset = TEST_DATASET\n", ANOTHER_FILE),
    (
        ICL,
        "    if TEST_DATASET is None:\n        order",
        "    if test_data()[1] is None:\n        order",
        HELD_OUT,
    ),
    (
        ICL,
        "return [{name: demo[name] for name in fields} for demo in demonstrations]",
        "return demonstrations",
        IN_ICL + "select_gives_rows_of_the_training_data",
    ),
    (ICL, 'math.log(max(candidate["gt_prob"], 1e-6))', 'max(candidate["gt_prob"], 1e-6)', INFOSCORE),
    (
        ICL,
        "in REWARD_MODE or uses_infoscore:",
        "in REWARD_MODE:",
        IN_ICL + "fresh_lists_get_gt_prob_if_infoscore_needs_it[infoscore]",
    ),
    (
        CHECK,
        'math.log(max(c["gt_prob"], 1e-6))',
        'c["gt_prob"]',
        "tests/test_check_up.py::test_its_figures_are_the_trainers_own",
    ),
    (
        "examples/icl_vector_similarity.py",
        "vectors[1:] @ vectors[0]).max()",
        "vectors[1:] @ vectors[0]).min()",
        EXAMPLES + "relevance_is_the_cosine_of_vectors",
    ),
    (
        "examples/icl_vector_similarity.py",
        "        self.miner = Sim",
        "        self.other_miner = Sim",
        EXAMPLES + "relevance_is_the_cosine_of_vectors",
    ),
    (
        "examples/icl_legacy_reward.py",
        "(score - mean)",
        "score",
        EXAMPLES + "the_legacy_reward_by_hand_and_in_a_run",
    ),
    (
        "examples/icl_legacy_reward.py",
        "rce_icl.shaped_rewards = ",
        "rce_icl.own_rewards = ",
        EXAMPLES + "the_legacy_reward_by_hand_and_in_a_run",
    ),
    (
        "examples/rec_diversity.py",
        "(count[group] - 1) / others",
        "count[group] / others",
        EXAMPLES + "unlike_neighbours_are_rewarded",
    ),
    (
        "examples/rec_titles_in_rl.py",
        '{"history": [], **row}',
        "row",
        EXAMPLES + "grpo_samples_items_for_titles_too",
    ),
]
