"""Mutants of what came with chats, further columns and rewards a token. The program is mutants.py."""

PPO, GRPO, RCE = "ppo/ppo.py", "grpo/grpo.py", "rce/rce.py"
IN_CHATS = "tests/test_chats.py::test_"
IN_DENSE = "tests/test_dense.py::test_"

MUTANTS = [
    # what the model reads
    (
        PPO,
        "if SYSTEM_PROMPT is None or any(",
        "if SYSTEM_PROMPT is None or not any(",
        IN_CHATS + "a_system_prompt_goes_before_what_has_none[ppo]",
    ),
    (
        PPO,
        "if SYSTEM_PROMPT is None or any(",
        "if SYSTEM_PROMPT is None or messages is prompt or any(",
        IN_CHATS + "a_system_prompt_goes_before_what_has_none[ppo]",
    ),
    (
        GRPO,
        "if len(messages) > 1 or not isinstance(prompt, str):",
        "if len(messages) > 1:",
        IN_CHATS + "without_a_chat_template_a_chat_is_refused_with_what_to_do[grpo]",
    ),
    (
        GRPO,
        'rows = [encode_chat(tokenizer, p, "REWARD_MODEL", r) for p, r in zip(prompts, responses)]',
        'rows = [encode_chat(tokenizer, str(p), "REWARD_MODEL", r) for p, r in zip(prompts, responses)]',
        IN_CHATS + "the_policy_reads_the_chat_and_the_reward_model_the_response_too[grpo]",
    ),
    (
        PPO,
        "    except Exception as error:  # a template may refuse roles, or their order, by any kind\n",
        "    except KeyError as error:\n",
        IN_CHATS + "roles_that_a_chat_template_refuses_are_said_with_their_line",
    ),
    # rows
    (
        PPO,
        (
            "    messages = json.loads(\n"
            "        text, object_hook=lambda record: {key: item for key, item in record.items() if item is not None}\n"
            "    )\n"
        ),
        "    messages = json.loads(text, object_hook=lambda record: {key: item for key, item in record.items()})\n",
        IN_CHATS + "nulls_that_parquet_puts_into_records_are_taken_out_again",
    ),
    (
        PPO,
        'answer = answer[-1].get("content")  # of messages the last one\'s',
        "pass",
        IN_CHATS + "rows_as_trl_and_verl_publish_them_are_read_as_they_are[ppo-jsonl]",
    ),
    (
        PPO,
        'answer[-1].get("content")',
        'str(answer[-1].get("content"))',
        IN_CHATS + "an_answer_of_messages_without_a_text_is_named",
    ),
    (
        PPO,
        '    if not right or messages[-1]["role"] == "assistant":',
        "    if not right:",
        IN_CHATS + "a_prompt_that_is_none_is_named_with_its_line",
    ),
    (
        PPO,
        '        right = right and isinstance(message.get("role"), str) and',
        '        right = isinstance(message.get("role"), str) and',
        IN_CHATS + "a_prompt_that_is_none_is_named_with_its_line",
    ),
    # what reward functions get
    (
        PPO,
        "[copy.deepcopy(row) for row in batch.rows[chunk]]",
        "batch.rows[chunk]",
        IN_CHATS + "functions_get_messages_and_columns_if_they_take_them[ppo]",
    ),
    (
        PPO,
        "(takes_all or k in signature.parameters)",
        "k in signature.parameters",
        IN_CHATS + "functions_get_messages_and_columns_if_they_take_them[ppo]",
    ),
    (
        PPO,
        "first = [*signature.parameters][:3]",
        "first = []",
        IN_CHATS + "a_parameter_that_nothing_fills_is_a_sentence",
    ),
    (
        PPO,
        'row["columns"]["messages"] = as_messages(row["prompt"])',
        'row["columns"]["messages"] = row["prompt"]',
        IN_CHATS + "functions_get_messages_and_columns_if_they_take_them[ppo]",
    ),
    (
        RCE,
        'rows=[by_id[c["prompt_id"]] for c in some]',
        "rows=[next(iter(by_id.values())) for c in some]",
        IN_CHATS + "in_mining_the_reward_sees_the_chat_of_each_candidate",
    ),
    (
        RCE,
        'list(dict.fromkeys(as_text(row["prompt"]) for row, _ in groups))',
        'list(dict.fromkeys(str(row["prompt"]) for row, _ in groups))',
        IN_CHATS + "in_mining_the_reward_sees_the_chat_of_each_candidate",
    ),
    (
        RCE,
        "TRAIN_DATASETS PROMPT_TEMPLATE SYSTEM_PROMPT\n",
        "TRAIN_DATASETS PROMPT_TEMPLATE\n",
        IN_CHATS + "in_mining_the_reward_sees_the_chat_of_each_candidate",
    ),
    # rewards a token
    (
        PPO,
        "        rewarded += dense\n",
        "        pass\n",
        IN_DENSE + "only_rewards_a_token_tell_two_tokens_apart",
    ),
    (PPO, "        scores = scores - dense.sum(1)\n", "", IN_DENSE + "token_rewards_add_up_by_hand"),
    (
        PPO,
        (
            "        rewarded = token_rewards(\n"
            "            batch.scores, batch.logprobs, batch.ref_logprobs, mask, self.state.kl_coef, batch.token_scores\n"
            "        )\n"
        ),
        "        rewarded = token_rewards(batch.scores, batch.logprobs, batch.ref_logprobs, mask, self.state.kl_coef)\n",
        IN_DENSE + "only_rewards_a_token_tell_two_tokens_apart",
    ),
    (
        PPO,
        "        if scores.shape == (count,) and",
        "        if scores.dim() == 1 and",
        IN_DENSE + "a_list_that_does_not_fit_its_response_is_a_sentence",
    ),
    (
        PPO,
        "scores = scores.view(len(scores), -1).sum(1) - MISSING_EOS_PENALTY * sampled.truncated",
        "scores = scores.view(len(scores), -1)[:, 0] - MISSING_EOS_PENALTY * sampled.truncated",
        IN_DENSE + "a_run_logs_the_sums",
    ),
]
