"""Mutants of the turns. The program that plants them is mutants.py."""

PPO, GRPO = "ppo/ppo.py", "grpo/grpo.py"
TOOLS = "examples/schema_tools.py"
T = "tests/test_turns.py::test_"
CALLS = T + "calls_are_run_and_what_is_wrong_with_them_is_their_answer"

MUTANTS = [
    # what is trained and counted
    (
        GRPO,
        "for values in (episode.mask, episode.logprobs, episode.entropies):",
        "episode.mask += [1.0] * len(ids)\n        for values in (episode.logprobs, episode.entropies):",
        T + "an_episode_holds_each_turn_as_it_was_sampled_and_the_environments_between",
    ),
    (
        GRPO,
        'sampled = [np.flatnonzero(mask).tolist() for mask in columns["mask"]]',
        'sampled = [range(len(mask)) for mask in columns["mask"]]',
        T + "the_sampler_and_the_scorer_agree_on_all_turns",
    ),
    (
        GRPO,
        "batch.response_mask.sum(1).mean().item()",
        "batch.response_lengths.float().mean().item()",
        T + "what_the_environment_said_is_never_trained_and_in_no_mean",
    ),
    # what is said
    (
        GRPO,
        "respond(model, tokenizer, contexts, turn_uniform)",
        "respond(model, tokenizer, contexts, uniform[0])",
        T + "each_turn_has_random_numbers_of_its_own",
    ),
    (
        GRPO,
        "uniform[turn][[episode.number for episode in unfinished]]",
        "uniform[0][[e.number for e in unfinished]]",
        T + "each_turn_has_random_numbers_of_its_own",
    ),
    (
        GRPO,
        "uniform[turn][[episode.number for episode in unfinished]]",
        "uniform[turn][:len(unfinished)]",
        T + "each_turn_has_random_numbers_of_its_own",
    ),
    (
        GRPO,
        'copy.deepcopy(messages), turn["content"],',
        'messages, turn["content"],',
        T + "an_environment_may_do_what_it_likes_with_messages",
    ),
    (
        GRPO,
        'turn["content"], episode.row["answer"])',
        'turn["content"], None)',
        T + "what_the_environment_is_asked",
    ),
    (GRPO, "if not episode.truncated]", "]", T + "a_turn_that_was_cut_ends_the_episode"),
    # the context
    (
        GRPO,
        ("MAX_CONTEXT_TOKENS:\n            vars(episode).update(truncated=True)\n"),
        ("MAX_CONTEXT_TOKENS:\n            pass\n"),
        T + "an_episode_that_no_longer_fits_ends_and_is_marked",
    ),
    (
        GRPO,
        "length + MAX_NEW_TOKENS > MAX_CONTEXT_TOKENS:",
        "length > MAX_CONTEXT_TOKENS:",
        T + "an_episode_that_no_longer_fits_ends_and_is_marked",
    ),
    (
        GRPO,
        'len(episode.row["ids"]) + len(episode.ids) + len(ids)',
        "len(episode.ids) + len(ids)",
        T + "an_episode_that_no_longer_fits_ends_and_is_marked",
    ),
    # templates
    (
        GRPO,
        "    if tail == after:",
        "    if False:",
        T + "a_template_that_forgets_is_refused_for_the_role_it_forgets_with",
    ),
    (
        GRPO,
        "tail = after.removeprefix(before + response)",
        "tail = after.removeprefix(before)",
        T + "a_template_that_adds_thoughts_which_were_not_sampled_is_refused",
    ),
    (
        GRPO,
        '    if "</think>" in str(tokenizer.chat_template) and not',
        "    if False and not",
        T + "a_template_that_forgets_is_refused_for_the_role_it_forgets_with",
    ),
    (
        GRPO,
        'begin = "" if before.rstrip().endswith("<think>") else "',
        'begin = "',
        T + "a_template_is_asked_with_the_thoughts_that_it_knows[<think>-True]",
    ),
    (
        GRPO,
        ' and not before.rstrip().endswith("</think>"):',
        ":",
        T + "a_template_is_asked_with_the_thoughts_that_it_knows[<think></think>-True]",
    ),
    (
        GRPO,
        '    if "345" not in turn_text(',
        '    if "" not in turn_text(',
        T + "a_template_that_does_not_show_the_environments_text_is_refused",
    ),
    (
        GRPO,
        "    if not tail.startswith(tuple(tokenizer.batch_decode([[i] for i in ends]))):",
        "    if False:",
        T + "a_template_without_the_models_end_is_refused",
    ),
    (
        GRPO,
        "    return tail.removeprefix(tokenizer.decode([end]))",
        "    return tail",
        T + "a_turn_is_what_the_template_puts_after_the_eos[user]",
    ),
    (
        GRPO,
        "tail.removeprefix(tokenizer.decode([end]))",
        "tail.removeprefix(tokenizer.eos_token)",
        T + "a_turn_is_what_the_template_puts_after_the_eos[user]",
    ),
    (
        GRPO,
        'tokenizer(tail, add_special_tokens=False)["input_ids"][1:]',
        'tokenizer(tail.removeprefix(tokenizer.eos_token), add_special_tokens=False)["input_ids"]',
        T + "a_tokenizer_that_begins_texts_with_a_space_adds_none_in_the_middle",
    ),
    (
        GRPO,
        "        text = tokenizer.decode(ids[: length if truncated else length - 1])\n",
        "        text = str(response)\n",
        T + "a_message_holds_the_special_tokens_but_the_end[ids0-False-9<pad>8]",
    ),
    # who sees what
    (
        GRPO,
        'columns["turns"] if ENVIRONMENT else responses',
        "responses",
        T + "a_reward_model_is_given_all_turns",
    ),
    (
        GRPO,
        '"turns": columns["messages"]}',
        '"turns": [[] for _ in episodes]}',
        T + "rewards_see_the_last_turn_and_by_name_all",
    ),
    (
        GRPO,
        'batch.responses = first.rows, columns["response"]',
        ('batch.responses = first.rows, [str(messages[0]["content"]) for messages in columns["messages"]]'),
        T + "rewards_see_the_last_turn_and_by_name_all",
    ),
    (
        "grpo/grpo.py",
        '        if turn["role"] == "assistant":\n            text += tokenizer.eos_token',
        "        text += tokenizer.eos_token",
        "tests/test_turns.py::test_a_reward_model_without_a_template_reads_all_turns",
    ),
    (
        "grpo/grpo.py",
        "torch.rand(max_turns(), len(prompts) * GROUP_SIZE, MAX_NEW_TOKENS)",
        "torch.rand(len(prompts) * GROUP_SIZE, max_turns(), MAX_NEW_TOKENS).transpose(0, 1)",
        "tests/test_turns.py::test_the_first_turn_has_the_random_numbers_of_a_run_without_turns",
    ),
    (
        GRPO,
        '        error.add_note(f"(raised by {name})")',
        "        pass",
        T + "what_an_environment_raises_is_named[1]",
    ),
    # tools
    (TOOLS, "(?:</tool_call>|\\Z)", "</tool_call>", CALLS),
    (TOOLS, " for call in calls) or None", " for call in calls)", CALLS),
    (TOOLS, 'if asked["name"] not in named:', "if False:", CALLS),
    (
        TOOLS,
        "text = value if isinstance(value, str) else json.dumps(value)",
        "text = json.dumps(value)",
        CALLS,
    ),
    (
        TOOLS,
        "functools.partial(plain, tools=schemas)",
        "plain",
        T + "tools_are_shown_to_the_policy_and_their_answers_come_as_the_role_tool",
    ),
    (
        TOOLS,
        "for tool in TOOLS if tool.__name__ not in shown]:",
        "for tool in []]:",
        T + "a_template_that_shows_no_tools_is_refused",
    ),
    # episodes that ask at once
    (
        GRPO,
        "list(pool.map(next_text, episodes))",
        "list(map(next_text, episodes))",
        T + "so_many_episodes_ask_at_once_as_there_are_threads",
    ),
    (
        GRPO,
        "return list(map(next_text, episodes))",
        "return list(pool.map(next_text, episodes))",
        T + "one_thread_is_the_main_one",
    ),
    (
        GRPO,
        "ThreadPoolExecutor(ENVIRONMENT_THREADS) as pool",
        "ThreadPoolExecutor(3) as pool",
        T + "so_many_episodes_ask_at_once_as_there_are_threads",
    ),
    (
        GRPO,
        "with time_limit(), ThreadPoolExecutor(",
        "with ThreadPoolExecutor(",
        T + "each_call_of_an_environment_has_its_own_time_limit[2-2]",
    ),
    (
        GRPO,
        (
            "    chunks = [episodes[i : i + ENVIRONMENT_THREADS] for i in range(0, len(episod"
            "es), ENVIRONMENT_THREADS)]\n"
        ),
        "    chunks = [episodes] or [None for i in range(0, len(episodes), ENVIRONMENT_THREADS)]\n",
        T + "each_call_of_an_environment_has_its_own_time_limit[2-2]",
    ),
]
