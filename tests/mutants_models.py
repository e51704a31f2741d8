"""Mutants of how models are loaded, tried and read. The program that plants them is mutants.py."""

PPO, GRPO, RCE = "ppo/ppo.py", "grpo/grpo.py", "rce/rce.py"
IN_MODELS = "tests/test_models.py::test_"

MUTANTS = [
    # decoding
    (
        "grpo/grpo.py",
        "after_eos = is_eos.cumsum(1) > is_eos",
        "after_eos = is_eos.cumsum(1) > 1",
        "tests/test_models.py::test_looking_seldom_who_has_finished_changes_no_sample",
    ),
    (
        "grpo/grpo.py",
        "finished |= torch.isin(",
        "finished = torch.isin(",
        "tests/test_models.py::test_looking_seldom_who_has_finished_changes_no_sample",
    ),
    # scoring
    # the trial at load
    (
        "grpo/grpo.py",
        "        check_first_ratio(steps[0], run.step)\n",
        "",
        "tests/test_models.py::test_in_bfloat16_a_first_update_that_sees_other_probabilities_ends_the_run[grpo]",
    ),
    (
        RCE,
        'tolerance = 1e-3 if DTYPE == "float32" else 0.05',
        'tolerance = 1e-3 if DTYPE == "float32" else 5.0',
        IN_MODELS + "in_bfloat16_mining_ends_where_greedy_responses_score_otherwise",
    ),
    # configs, tokenizers, positions
    (
        GRPO,
        "                setattr(part, name, 0.0)\n",
        "                pass\n",
        IN_MODELS + "a_layers_own_dropout_is_off_while_activations_are_recomputed[grpo]",
    ),
    (
        GRPO,
        '"drop" in name and type(value) is float',
        'name == "dropout"',
        IN_MODELS + "no_dropout_is_left_in_a_config",
    ),
    (
        "ppo/ppo.py",
        "if pad is None or pad >= vocab_size(model):",
        "if pad is None:",
        "tests/test_models.py::test_a_pad_id_beyond_the_embedding_is_not_used[ppo]",
    ),
    (
        "grpo/grpo.py",
        "        return ids[:-1]\n",
        "        return ids\n",
        "tests/test_models.py::test_a_prompt_does_not_end_with_the_eos_that_its_tokenizer_puts_there",
    ),
    (
        "grpo/grpo.py",
        'max(row["ids"]) >= num_ids:',
        'max(row["ids"]) > num_ids:',
        "tests/test_models.py::test_ids_that_the_model_does_not_know_are_named",
    ),
    (
        PPO,
        "for row in kept), default=0) + MAX_NEW_TOKENS",
        "for row in kept), default=0)",
        IN_MODELS + "prompts_and_responses_longer_than_a_models_positions_are_refused[ACTOR_MODEL]",
    ),
    (
        GRPO,
        'in ("longrope", "dynamic")',
        'in ("longrope",)',
        IN_MODELS + "rotary_positions_that_change_with_the_length_are_refused_beyond_it[dynamic]",
    ),
    (
        GRPO,
        "    if lengths.max() > max_positions(model):",
        "    if False:",
        IN_MODELS + "a_text_longer_than_the_reward_models_positions_is_refused",
    ),
    (
        GRPO,
        "torch.arange(len(chunk)), lengths[chunk] - 1]",
        "torch.arange(len(chunk)), 0 * chunk - 1]",
        IN_MODELS + "the_reward_model_reads_few_rows_at_a_time_and_keeps_no_cache",
    ),
    (
        GRPO,
        "argsort(stable=True).split(min(64, BATCH_SIZE * GROUP_SIZE))",
        "argsort(stable=True).split(BATCH_SIZE * GROUP_SIZE)",
        IN_MODELS + "the_reward_model_reads_few_rows_at_a_time_and_keeps_no_cache",
    ),
    (
        "grpo/grpo.py",
        'any("bf16" in name and has for name, has in',
        'any("bf16" in name for name, has in',
        "tests/test_models.py::test_a_processor_that_is_slower_in_bfloat16_is_said",
    ),
]
