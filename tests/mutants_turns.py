"""Mutants of the turns. The program that plants them is mutants.py."""

GRPO = "grpo/grpo.py"
T = "tests/test_turns.py::test_"

MUTANTS = [
    # what is trained and counted
    (GRPO, "        for values in (episode.mask, episode.logprobs, episode.entropies):\n"
     "            values += [0.0] * len(ids)",
     "        for values in (episode.logprobs, episode.entropies):\n            values += [0.0] * len(ids)\n"
     "        episode.mask += [1.0] * len(ids)",
     T + "an_episode_holds_each_turn_as_it_was_sampled_and_the_environments_between"),
    (GRPO, "    mask = batch.response_mask[rows, :int(responses.max())] > 0  # (rows, R)",
     "    mask = torch.arange(int(responses.max()), device=rows.device) < responses",
     T + "the_sampler_and_the_scorer_agree_on_all_turns"),
    (GRPO, "        self.mask = batch.response_mask[rows, :len(step)] > 0",
     "        self.mask = step < sizes[:, None]",
     T + "the_sampler_and_the_scorer_agree_on_all_turns"),
    (GRPO, "batch.response_mask.sum(1).mean().item()", "batch.response_lengths.float().mean().item()",
     T + "what_the_environment_said_is_never_trained_and_in_no_mean"),
    (GRPO, "tokens = batch.response_mask[rows].sum()", "tokens = batch.response_lengths[rows].sum()",
     T + "what_the_environment_said_is_never_trained_and_in_no_mean"),

    # what is said
    (GRPO, "said = respond(model, tokenizer, contexts, some,",
     "said = respond(model, tokenizer, contexts, columns[0],",
     T + "each_turn_has_random_numbers_of_its_own"),
    (GRPO, "columns[turn][[episode.number for episode in going_on]]",
     "columns[0][[e.number for e in going_on]]",
     T + "each_turn_has_random_numbers_of_its_own"),
    (GRPO, "columns[turn][[episode.number for episode in going_on]]", "columns[turn][:len(going_on)]",
     T + "each_turn_has_random_numbers_of_its_own"),
    (GRPO, "copy.deepcopy(messages[:-1])", "messages[:-1]",
     T + "an_environment_may_do_what_it_likes_with_messages"),
    (GRPO, 'messages[-1]["content"], row["answer"])', 'messages[-1]["content"], None)',
     T + "what_the_environment_is_asked"),
    (GRPO, "    for turn in range(turns()):", "    for turn in range(turns() + 1):",
     T + "no_more_than_max_turns"),
    (GRPO, "if not episode.truncated]", "]", T + "a_turn_that_was_cut_ends_the_episode"),

    # the context
    (GRPO, " MAX_CONTEXT_TOKENS:\n            episode.truncated = True\n",
     " MAX_CONTEXT_TOKENS:\n",
     T + "an_episode_that_no_longer_fits_ends_and_is_marked"),
    (GRPO, "        if context + MAX_NEW_TOKENS > MAX_CONTEXT_TOKENS:",
     "        if context > MAX_CONTEXT_TOKENS:",
     T + "an_episode_that_no_longer_fits_ends_and_is_marked"),
    (GRPO, "len(episode.row[\"ids\"]) + len(episode.ids) + len(ids)", "len(episode.ids) + len(ids)",
     T + "an_episode_that_no_longer_fits_ends_and_is_marked"),

    # templates
    (GRPO, "        if not after.startswith(before):", "        if False:",
     T + "a_template_that_forgets_is_refused_for_the_role_it_forgets_with"),
    (GRPO, 'for said in ("x", "<think>\\nx\\n</think>\\n\\nx"):', 'for said in ("x",):',
     T + "a_template_that_forgets_is_refused_for_the_role_it_forgets_with"),
    (GRPO, "        if before[closed:].strip():", "        if False:",
     T + "a_template_without_the_models_end_is_refused"),
    (GRPO, "        tail = after[closed:]", "        tail = after[len(before):]",
     T + "a_turn_is_what_the_template_puts_after_the_eos[user]"),
    (GRPO, 'tokenizer(tokenizer.eos_token + tail, add_special_tokens=False)["input_ids"][1:]',
     'tokenizer(tail, add_special_tokens=False)["input_ids"]',
     T + "a_tokenizer_that_begins_texts_with_a_space_adds_none_in_the_middle"),

    # who sees what
    (GRPO, "    response.messages = episode.messages", "    pass",
     T + "a_reward_model_reads_all_turns"),
    (GRPO, "response_ids=episode.ids, turns=episode.messages)", "response_ids=episode.ids)",
     T + "rewards_see_the_last_turn_and_by_name_all"),
    (GRPO, 'with_facts(episode.messages[-1]["content"],', 'with_facts(episode.messages[0]["content"],',
     T + "rewards_see_the_last_turn_and_by_name_all"),
    (GRPO, 'm["content"] + ends.get(m["role"], "") for m in turns',
     'm["content"] + tokenizer.eos_token for m in turns',
     T + "a_reward_model_without_a_template_reads_all_turns"),
    (GRPO, 'uniform = torch.rand(len(prompts) * GROUP_SIZE, turns() * MAX_NEW_TOKENS)',
     'uniform = torch.rand(len(prompts) * GROUP_SIZE, turns() * MAX_NEW_TOKENS)[:, :MAX_NEW_TOKENS]',
     T + "a_run_with_turns_learns_from_samples_that_are_told_and_resumes_to_the_byte"),
    (GRPO, "        with watched(f\"ENVIRONMENT, {plain_name(ENVIRONMENT)}\", ENVIRONMENT):",
     "        if True:",
     T + "what_an_environment_raises_is_named"),
]
