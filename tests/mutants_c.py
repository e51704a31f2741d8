"""Mutants that undo what an audit's mends did: (file, old text that occurs once in it, new text, the test that fails then)."""

RUN, PPO, GRPO, RCE = "tests/test_run.py::", "tests/test_ppo.py::", "tests/test_grpo.py::", "tests/test_rce.py::"
PATIENCE = RUN + "test_best_is_the_highest_and_patience_waits_for_the_threshold"
NESTED = RUN + "test_a_column_may_be_a_path_into_nested_records"
NO_TEXT = RUN + "test_an_answer_that_is_no_text_is_named_with_its_line"
IDLE = RUN + "test_patience_that_nothing_can_try_is_said"
EPOCHS = GRPO + "test_further_prompts_come_out_of_the_runs_own_epochs"
GSPO = GRPO + "test_gspo_clips_nothing_on_policy_in_bfloat16"
WORKING = RCE + "test_the_working_ends_where_the_gold_ids_begin"
GOLD = RCE + "test_gold_ids_hold_the_whole_answer_where_a_token_straddles_the_mark"
NEGATIVE = RCE + "test_gt_prob_of_a_negative_answer_is_the_policys_own"

MUTANTS = [
    # best and patience, told apart
    *((file, 'if metrics["reward"] > state.best_reward:', 'if metrics["reward"] > state.best_reward + EARLY_STOPPING_THRESHOLD:',
       f"{PATIENCE}[{file}-{name}]") for file, name in (("ppo/ppo.py", "PPOTrainer"), ("grpo/grpo.py", "GRPOTrainer"))),
    ("rce/rce.py", "if value >= state.best_reward:", "if value >= state.best_reward + EARLY_STOPPING_THRESHOLD:",
     PATIENCE + "[rce/rce.py-RCETrainer]"),
    *((file, "if value > state.patience_reward + EARLY_STOPPING_THRESHOLD:", new, f"{PATIENCE}[{file}-{name}]")
      for file, name in (("ppo/ppo.py", "PPOTrainer"), ("grpo/grpo.py", "GRPOTrainer"), ("rce/rce.py", "RCETrainer"))
      for new in ("if value > state.best_reward + EARLY_STOPPING_THRESHOLD:", "if value > state.patience_reward:",
                  "if value > state.patience_reward - EARLY_STOPPING_THRESHOLD:")),
    ("rce/rce.py", "state.halvings += state.evals_since_best % PLATEAU_PATIENCE == 0", "pass",
     PATIENCE + "[rce/rce.py-RCETrainer]"),
    ("grpo/grpo.py", "self.state = SimpleNamespace(**{key: saved[key] for key in vars(self.state)})",
     'self.state = SimpleNamespace(**{**{key: saved[key] for key in vars(self.state)}, "patience_reward": saved["best_reward"]})',
     RUN + "test_best_and_patience_resume_apart[grpo/grpo.py-GRPOTrainer]"),
    # what does nothing is said or refused
    ("ppo/ppo.py", "if not 0 < EVAL_EVERY_N_STEPS < self.total_steps:", "if False:", IDLE),
    ("ppo/ppo.py", "if not 0 < EVAL_EVERY_N_STEPS < self.total_steps:", "if not 0 < EVAL_EVERY_N_STEPS <= self.total_steps:", IDLE),
    ("grpo/grpo.py", "        elif state.step == 0:\n", "        elif False:\n", IDLE),
    ("grpo/grpo.py", 'if USE_LR_SCHEDULER and LR_SCHEDULER_TYPE == "plateau":', 'if LR_SCHEDULER_TYPE == "plateau":', IDLE),
    ("grpo/grpo.py", "        if not Path(best).exists():", "        if False:",
     RUN + "test_a_run_names_the_policy_that_it_kept[grpo/grpo.py-GRPOTrainer]"),
    ("ppo/ppo.py", "if KL_TARGET and KL_COEF == 0:", "if False:", PPO + "test_a_kl_target_without_a_reference_is_refused"),
    ("grpo/grpo.py", 'if LOSS_TYPE == "cispo" and DUAL_CLIP is not None:', "if False:", GRPO + "test_cispo_with_a_dual_clip_is_refused"),
    # the KL controller, the schedules
    ("ppo/ppo.py", "return kl_coef * max(0.8, min(1.2, factor))", "return kl_coef * factor",
     PPO + "test_the_kl_coefficient_stays_positive_and_moves_by_a_fifth_at_most"),
    ("ppo/ppo.py", "return kl_coef * max(0.8, min(1.2, factor))", "return kl_coef * max(0.0, min(1.2, factor))",
     PPO + "test_the_kl_coefficient_stays_positive_and_moves_by_a_fifth_at_most"),
    ("ppo/ppo.py", "progress = (step - warmup) / max(1, total - warmup)", "progress = (step - warmup) / max(1, total - warmup - 1)",
     PPO + "test_the_last_step_still_has_a_learning_rate"),
    # paths into records, answers that are none
    *(("ppo/ppo.py", old, new, NESTED) for old, new in (
        ("return look_up(record[head], rest) if rest else record[head]", "return record[head]"),
        ("for n in range(len(words), 0, -1)]", "for n in range(1, len(words) + 1)]"),
        ('columns=list(dict.fromkeys(heads))', "columns=columns"))),
    ("ppo/ppo.py", "columns=list(dict.fromkeys(heads))", "columns=names", RUN + "test_parquet_reads_only_the_columns_it_needs"),
    ("ppo/ppo.py", "if answer is not None and not (golds and all(map(is_plain, golds))):", "if False:", NO_TEXT),
    ("ppo/ppo.py", "not (golds and all(map(is_plain, golds)))", "not all(map(is_plain, golds))", NO_TEXT),
    ("ppo/ppo.py", "not (golds and all(map(is_plain, golds)))", "not (golds and is_plain(golds[0]))", NO_TEXT),
    ("ppo/ppo.py", "and not (isinstance(value, float) and not math.isfinite(value))", "", NO_TEXT),
    ("ppo/ppo.py", 'if names else ""', 'if False else ""', NO_TEXT),
    # resampling within the epochs
    ("grpo/grpo.py", "if not flat.any() or state.cursor == 0 and state.epoch >= NUM_EPOCHS:", "if not flat.any():", EPOCHS),
    ("grpo/grpo.py", "state.cursor == 0 and state.epoch >= NUM_EPOCHS", "state.epoch >= NUM_EPOCHS", EPOCHS),
    ("grpo/grpo.py", "state.cursor == 0 and state.epoch >= NUM_EPOCHS", "state.cursor == 0", EPOCHS),
    ("grpo/grpo.py", "                state.step += 1\n                self.plan_steps()\n", "                state.step += 1\n", EPOCHS),
    ("grpo/grpo.py", "math.ceil((-self.state.cursor % count) / per_step)", "(-self.state.cursor % count) // per_step", EPOCHS),
    ("grpo/grpo.py", "            self.load_checkpoint(self.checkpoint)\n        self.plan_steps()\n",
     "            self.plan_steps()\n            self.load_checkpoint(self.checkpoint)\n        else:\n            self.plan_steps()\n",
     GRPO + "test_a_run_that_resampled_resumes_to_the_same_end"),
    # gspo in bfloat16
    ("grpo/grpo.py", 'if not steps and LOSS_TYPE == "gspo" and DTYPE == "bfloat16":', "if False:", GSPO),
    ("grpo/grpo.py", 'if not steps and LOSS_TYPE == "gspo" and DTYPE == "bfloat16":', 'if LOSS_TYPE == "gspo" and DTYPE == "bfloat16":',
     GRPO + "test_gspos_old_log_probabilities_are_those_before_the_first_update"),
    ("grpo/grpo.py", 'if not steps and LOSS_TYPE == "gspo" and DTYPE == "bfloat16":', 'if not steps and LOSS_TYPE == "gspo":',
     GRPO + "test_gspo_in_float32_takes_the_samplers_own"),
    ("grpo/grpo.py", "batch.logprobs = torch.zeros_like(batch.sampled_logprobs)", "batch.sampled_logprobs = batch.logprobs", GSPO),
    # gold answers and what precedes them
    ("rce/rce.py", "            full, ends = self.token_ends(text, cut)\n",
     '            full, ends = self.token_ends(text, cut)\n            ends[cut] = len(self.tokenizer("\\\\boxed{")["input_ids"])\n', GOLD),
    ("rce/rce.py", "shared = set.intersection(*(", "shared = set.union(*(", GOLD),
    ("rce/rce.py", 'before = self.working(c["token_ids"], cuts[c["prompt_id"]])', 'before = self.working(c["token_ids"])', NEGATIVE),
    ("rce/rce.py", "        if len(decode(low)) == end:\n            return ids[:low]\n", "        return ids[:low]\n", WORKING),
    ("rce/rce.py", "return ids[:low] + (form[ends[begun]:] if begun in ends else missing)", "return ids[:low]", WORKING),
    ("rce/rce.py", 'self.tokenizer(f"\\n{wanted}", add_special_tokens=False)', 'self.tokenizer(f"\\n{mark}", add_special_tokens=False)', WORKING),
    ("rce/rce.py", "        while not text.startswith(decode(low)):  # in the middle of a character of several tokens\n            low += 1\n", "",
     RCE + "test_a_mark_of_characters_of_several_tokens_is_whole_in_the_working"),
    ("rce/rce.py", "if mark and max(shared) == 0:", "if False:", RCE + "test_a_mark_that_cannot_be_cut_from_the_answer_is_refused"),
    ("rce/rce.py", '-math.inf if c.get("logprob") is None else c["logprob"]', 'c.get("logprob") or -math.inf',
     RCE + "test_a_log_probability_of_exactly_zero_is_the_likeliest"),
]
