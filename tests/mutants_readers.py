"""Bugs that first readers of the files found, planted again."""

PPO = "ppo/ppo.py"
GRPO = "grpo/grpo.py"
RCE = "rce/rce.py"
RAG = "ppo/ppo_rag.py"
REC = "grpo/grpo_rec.py"
ICL = "rce/rce_icl.py"
SFT = "ppo/sft.py"
RM = "ppo/reward_model.py"
DPO = "rce/dpo.py"
IN_GRPO = "tests/test_grpo.py::test_"
IN_RCE = "tests/test_rce.py::test_"
IN_RAG = "tests/test_rag.py::test_"
IN_REC = "tests/test_rec.py::test_"
IN_ICL = "tests/test_icl.py::test_"
HOME = "tests/test_home.py::test_"
PREFERENCES = "tests/test_preferences.py::test_"
AGAIN = "tests/test_processes.py::test_a_sharded_policy_is_scored_again_by_processes_with_unequal_shares"
FOLLOWS = IN_GRPO + "a_reference_that_follows_is_saved_and_comes_back"
ADAPTER = IN_REC + "an_adapter_does_not_go_on_from_a_whole_models_checkpoint"
ODD = HOME + "odd_columns_weights_data_sets_and_rewards_are_no_tracebacks"
HEADS = PREFERENCES + "heads_of_several_layers_are_trained_whole_beside_adapters"
FIRST = PREFERENCES + "a_first_message_of_the_assistant_is_not_trained"
MINED = IN_RCE + "finished_candidates_are_not_taken_for_those_of_other_constants"
LATER = IN_RCE + "candidates_of_later_rounds_are_moved_aside_when_training_starts_anew"
LEFT = HOME + "the_last_step_is_that_of_the_prompts_that_are_left"
ALONE = IN_ICL + "lists_of_one_demonstration_that_were_asked_alone_are_kept_once_with_the_pick"
MODEL = HOME + "a_run_does_not_go_on_from_another_model"
ENDS = PREFERENCES + "another_end_token_is_trained_and_saved_with_the_policy"
MUTANTS = [
    # grpo.py
    (
        GRPO,
        "    with full_parameters(trainer.actor):\n        for rows, logprobs in zip(micros",
        "    if True:\n        for rows, logprobs in zip(micros",
        AGAIN,
    ),
    (
        GRPO,
        "gradients.log_means(stats, mask, num_tokens_read)",
        "gradients.log_means(stats, mask, step_mask.sum())",
        IN_GRPO + "skipped_rows_do_not_dilute_the_kl_of_an_update",
    ),
    (GRPO, "if REFERENCE_SYNC_STEPS or has_moved:", "if REFERENCE_SYNC_STEPS:", FOLLOWS),
    (
        GRPO,
        "sizes = (sizes * batch.response_mask).sum(1) / num_tokens",
        "sizes = sizes.mean(1) * 2",
        IN_GRPO + "advantages_per_token_are_logged_as_means_over_each_response",
    ),
    # rce.py
    (
        RCE,
        "        self.verify(unverified)\n",
        '        self.verify(unverified)\n        assert not all(c["eval_failed"] for c in unverified)\n',
        "tests/test_rce.py::test_failed_candidates_of_one_prompt_do_not_end_the_mining",
    ),
    (RCE, '"candidates_round_[!1]*", ', "", LATER),
    (RCE, ', "candidates_round_1[0-9]*"]', "]", LATER),
    (
        RCE,
        'if STAGE == "train" or CANDIDATES:',
        'if STAGE == "train":',
        IN_RCE + "given_candidates_in_the_runs_folder_stay_where_they_are",
    ),
    (
        RCE,
        'facts, keys, "start afresh with RESUME=no")\n            return True',
        'facts, (), "start afresh with RESUME=no")\n            return True',
        MINED,
    ),
    (RCE, "            if mined_with:  # else", "            if True:  # else", MINED),
    (
        RCE,
        "        if self.state.round > 1:  # its prompts",
        "        if False:  # its prompts",
        IN_RCE + "what_is_held_back_decides_which_prompts_later_rounds_mine",
    ),
    (
        RCE,
        "if not is_new and len(self.train_rows) != self.state.to_train:",
        "if False:",
        IN_RCE + "a_round_goes_on_with_as_many_prompts_as_it_began_with_or_not_at_all",
    ),
    (
        RCE,
        '            if self.state.round == 1:\n                raise UserError(f"{path}: {fault}")',
        '            if True:\n                raise UserError(f"{path}: {fault}")',
        IN_RCE + "a_later_round_without_prompts_to_train_on_ends_the_run",
    ),
    (
        RCE,
        "        if longest > max_positions(self.actor):",
        "        if False:",
        IN_RCE + "a_gold_answer_must_fit_the_model_too",
    ),
    (
        RCE,
        'stage = "train" if self.state.round == 1 else "all"',
        'stage = "train"',
        IN_RCE + "what_to_do_after_mining_depends_on_the_round",
    ),
    # ppo_rag.py
    (RAG, '"add_special_tokens": not self.is_chat(), ', "", IN_RAG + "a_chat_has_one_beginning_of_the_text"),
    (
        RAG,
        '                self.best = load_pretrained(Policy, str(best), "OUTPUT_DIR")',
        "                pass",
        IN_RAG + "after_ctrl_c_the_best_policy_answers",
    ),
    (
        RAG,
        " or name in others:",
        ":",
        IN_RAG
        + "parts_of_an_own_reward_that_cannot_be_are_refused[entropy-values3-the name 'entropy' belongs to a metric of the trainer]",
    ),
    # rce_icl.py
    (ICL, ' or c["source"] != ["alone"]]', "]", ALONE),
    (
        ICL,
        'if STAGE != "train" and not CANDIDATES:',
        'if STAGE != "train":',
        IN_ICL + "given_candidates_in_the_runs_folder_stay_where_they_are",
    ),
    (
        ICL,
        "        facts.append(IMAGE_VECTORS)",
        "        pass",
        IN_ICL + "the_digest_of_vectors_knows_how_images_are_read_and_which_are_given",
    ),
    (
        ICL,
        'facts.append(file_digest(TRAIN_DATASET["vectors"])["sha256"])',
        "pass",
        IN_ICL + "the_digest_of_vectors_knows_how_images_are_read_and_which_are_given",
    ),
    # grpo_rec.py
    (
        REC,
        ' and not (self.state.sft_is_done and STAGE == "rl"):',
        ":",
        IN_REC + "sft_that_has_ended_is_not_taken_up_again_by_stage_rl",
    ),
    (
        REC,
        'self.state.sft_is_done and STAGE == "rl"',
        "self.state.sft_is_done",
        IN_REC + "sft_that_has_ended_is_not_taken_up_again_by_stage_rl",
    ),
    (REC, '    if not (saved / "adapter_config.json").exists():', "    if False:", ADAPTER),
    (REC, ' and not (policy / "adapter_config.json").exists():', ":", ADAPTER),
    (
        REC,
        '        if KL_COEF == 0:\n            metrics["kl"]',
        '        if False:\n            metrics["kl"]',
        IN_REC + "without_a_kl_term_no_kl_is_logged",
    ),
    (
        REC,
        "            self.state.reference_has_moved = True",
        "            pass",
        IN_REC + "a_reference_that_has_moved_is_not_tested_as_sfts_policy",
    ),
    (
        REC,
        "                run.save()  # before a test that may fail\n",
        "",
        IN_REC + "the_last_step_is_saved_before_the_test",
    ),
    (REC, "len(users)), len(users) - 1)", "len(users)), len(users))", IN_REC + "one_user_stays_to_train_on"),
    (REC, "    if ITEM_FILE is None and (", "    if False and (", IN_REC + "titles_need_their_file"),
    # ppo.py and what the trainers share
    (
        PPO,
        "if is_model and model_name(value) != model_name(before.get(key)):",
        "if False:",
        MODEL + "[ppo]",
    ),
    (
        PPO,
        "if is_model and model_name(value) != model_name(before.get(key)):",
        "if is_model:",
        MODEL + "[ppo]",
    ),
    (
        PPO,
        "if any(Path(value).resolve().is_relative_to(folder) for folder in folders):",
        "if False:",
        HOME + "a_model_of_the_runs_own_folder_is_refused[ppo]",
    ),
    (
        PPO,
        "if not KL_TARGET or not self.state.kl_coef:",
        "if not KL_TARGET:",
        HOME + "a_target_revives_a_coefficient_of_zero",
    ),
    (
        PPO,
        "steps_left = math.ceil((-state.cursor % state.prompts) / prompts_per_step)",
        "steps_left = 0",
        LEFT + "[ppo/ppo.py]",
    ),
    (SFT, "(-state.cursor % state.prompts)", "(state.prompts - state.cursor)", LEFT + "[ppo/sft.py]"),
    (
        PPO,
        "        self.has_failed = True  # until",
        "        self.has_failed = False  # until",
        HOME + "a_run_that_failed_is_resumed_by_a_new_trainer[ppo]",
    ),
    (
        PPO,
        '"training_config.json", "training_metrics_*.png"]',
        '"training_*"]',
        HOME + "files_that_are_not_the_runs_stay_in_its_folder[ppo]",
    ),
    (
        PPO,
        'self.folder.glob(f"{pattern}.tmp")',
        'self.folder.glob("*.tmp")',
        HOME + "files_that_are_not_the_runs_stay_in_its_folder[ppo]",
    ),
    (
        PPO,
        "if is_later and (to_archive or self.has_changed):",
        "if is_later and to_archive:",
        HOME + "a_best_policy_of_a_future_with_other_constants_is_moved_aside[ppo]",
    ),
    (
        PPO,
        "if is_later and (to_archive or self.has_changed):",
        "if is_later:",
        HOME + "a_best_policy_of_a_future_with_other_constants_is_moved_aside[ppo]",
    ),
    (PPO, "    if not panels:\n        return\n", "", HOME + "a_plot_without_panels_is_no_error"),
    (
        PPO,
        " % torch.cuda.device_count())",
        ")",
        HOME + "processes_on_the_cpu_of_a_machine_with_one_gpu_are_told_apart_by_nothing",
    ),
    (
        PPO,
        "    if sharded and _INSIDE_RANK_MAP:",
        "    if False:",
        HOME + "a_reward_that_samples_from_a_sharded_model_is_refused",
    ),
    (
        PPO,
        "            except Exception:  # of any type: it cannot read",
        "            except UserError:  # of any type: it cannot read",
        HOME + "an_accuracy_function_that_cannot_read_responses_gives_no_majority[ppo]",
    ),
    (PPO, 'taken = {*first, "self"}', "taken = {*first}", ODD),
    (PPO, "        if not isinstance(weight, (int, float)):", "        if False:", ODD),
    (PPO, "        if not isinstance(spec, dict):", "        if False:", ODD),
    (
        PPO,
        "(TypeError, ValueError, RuntimeError, OverflowError)",
        "(TypeError, ValueError, RuntimeError)",
        ODD,
    ),
    (PPO, "    if isinstance(value, bool):\n        return json.dumps(value)\n", "", ODD),
    (
        PPO,
        "    if is_path and not Path(resume).exists():",
        "    if False:",
        HOME + "a_path_to_resume_from_must_exist[ppo]",
    ),
    (
        PPO,
        'if is_quoted or "str" not in allowed',
        'if "str" not in allowed',
        HOME + "a_quoted_argument_is_read_as_python_reads_it[ppo]",
    ),
    (
        PPO,
        "        return bound - padding - 1",
        "        return bound",
        "tests/test_models.py::test_positions_that_begin_after_the_padding_id_are_not_promised",
    ),
    # sft.py, reward_model.py, dpo.py
    (SFT, "            self.tokenizer.eos_token = EOS_TOKEN  # saved", "            pass  # saved", ENDS),
    (SFT, "            self.actor.generation_config.eos_token_id = self.end_ids", "            pass", ENDS),
    (
        SFT,
        "    if not set(trained_ids) & set(trainer.end_ids):",
        "    if False:",
        PREFERENCES + "answers_that_end_in_another_token_than_sampling_does_are_refused[ppo/sft.py]",
    ),
    (SFT, 'if role != "assistant" or i == 0:', 'if role != "assistant":', FIRST),
    (
        SFT,
        "            if not trained:\n                left_out",
        "            if False:\n                left_out",
        FIRST,
    ),
    (
        DPO,
        "            model.generation_config = GenerationConfig()",
        "            pass",
        PREFERENCES + "the_models_own_filters_do_not_change_sampled_answers[rce/dpo.py]",
    ),
    (
        SFT,
        ' and constant == "EVAL_DATASETS":',
        ":",
        PREFERENCES + "prompts_to_train_on_need_no_room_for_a_sampled_answer",
    ),
    (
        DPO,
        "            if largest >= vocab_size(reference) or",
        "            if False and",
        PREFERENCES + "a_reference_that_does_not_know_all_tokens_is_refused",
    ),
    (
        RM,
        "        config.modules_to_save = heads",
        '        config.modules_to_save = ["score", "classifier"]',
        HEADS + "[DebertaV2Config]",
    ),
    (RM, 'options["ignore_mismatched_sizes"] = new_head', "pass", HEADS + "[DebertaV2Config]"),
]
