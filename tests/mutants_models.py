"""Mutants of how models are loaded, tried and read. The program that plants them is mutants.py."""

PPO, GRPO, RCE = "ppo/ppo.py", "grpo/grpo.py", "rce/rce.py"
IN_MODELS = "tests/test_models.py::test_"

MUTANTS = [
    # decoding
    (
        GRPO,
        "over = ended.cumsum(1) > ended",
        "over = ended.cumsum(1) > 1",
        IN_MODELS + "looking_seldom_who_has_finished_changes_no_sample",
    ),
    (
        GRPO,
        "            ended |= torch.isin(",
        "            ended = torch.isin(",
        IN_MODELS + "looking_seldom_who_has_finished_changes_no_sample",
    ),
    # scoring
    # the trial at load
    (
        GRPO,
        "            check_first_ratio(steps, run.step)\n",
        '            [step.pop("log_ratio") for step in steps]\n',
        IN_MODELS + "in_bfloat16_a_first_update_that_sees_other_probabilities_ends_the_run[grpo]",
    ),
    (
        RCE,
        'mean <= (1e-3 if DTYPE == "float32" else 0.05)',
        'mean <= (1e-3 if DTYPE == "float32" else 5.0)',
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
        PPO,
        "if pad is None or pad >= vocab_size(model) else pad",
        "if pad is None else pad",
        IN_MODELS + "a_pad_id_beyond_the_embedding_is_not_used[ppo]",
    ),
    (
        GRPO,
        "    return ids[:-1] if ids[-len(ended) :] == ended and not said else ids\n",
        "    return ids\n",
        IN_MODELS + "a_prompt_does_not_end_with_the_eos_that_its_tokenizer_puts_there",
    ),
    (
        GRPO,
        'max(row["ids"]) >= known:',
        'max(row["ids"]) > known:',
        IN_MODELS + "ids_that_the_model_does_not_know_are_named",
    ),
    (
        PPO,
        "for name, model in readers.items():",
        "for name, model in list(readers.items())[:1]:",
        IN_MODELS + "prompts_and_responses_longer_than_a_models_positions_are_refused[CRITIC_MODEL]",
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
        "split(min(64, BATCH_SIZE * GROUP_SIZE))",
        "split(BATCH_SIZE * GROUP_SIZE)",
        IN_MODELS + "the_reward_model_reads_few_rows_at_a_time_and_keeps_no_cache",
    ),
    (
        GRPO,
        'any(has for name, has in torch.cpu.get_capabilities().items() if "bf16" in name)',
        'any("bf16" in name for name in torch.cpu.get_capabilities())',
        "tests/test_models.py::test_a_processor_that_is_slower_in_bfloat16_is_said",
    ),
]
