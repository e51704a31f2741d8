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
        "grpo/grpo.py",
        'encode_chat(tokenizer, p, "REWARD_MODEL", response)',
        'encode_chat(tokenizer, str(p), "REWARD_MODEL", response)',
        "tests/test_chats.py::test_the_policy_reads_the_chat_and_the_reward_model_the_response_too[grpo]",
    ),
    (
        "ppo/ppo.py",
        "except Exception as error:  # a template may",
        "except KeyError as error:  # a template may",
        "tests/test_chats.py::test_roles_that_a_chat_template_refuses_are_said_with_their_line",
    ),
    # rows
    (
        "ppo/ppo.py",
        " for key, item in value.items() if item is not None}",
        " for key, item in value.items()}",
        "tests/test_chats.py::test_nulls_that_parquet_puts_into_records_are_taken_out_again",
    ),
    (
        "ppo/ppo.py",
        'value = value[-1].get("content")',
        "pass",
        "tests/test_chats.py::test_rows_as_trl_and_verl_publish_them_are_read_as_they_are[ppo-jsonl]",
    ),
    (
        "ppo/ppo.py",
        'value = value[-1].get("content")',
        'value = str(value[-1].get("content"))',
        "tests/test_chats.py::test_an_answer_of_messages_without_a_text_is_named",
    ),
    (
        "ppo/ppo.py",
        ' and messages[-1]["role"] != "assistant"\n',
        "\n",
        "tests/test_chats.py::test_a_prompt_that_is_none_is_named_with_its_line",
    ),
    (
        "ppo/ppo.py",
        'not isinstance(value, dict) or not isinstance(value.get("role"), str)',
        "not isinstance(value, dict)",
        "tests/test_chats.py::test_a_prompt_that_is_none_is_named_with_its_line",
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
        "rows=self.rows_of(candidates), responses",
        "rows=self.rows_of(candidates[:1] * len(candidates)), responses",
        IN_CHATS + "in_mining_the_reward_sees_the_chat_of_each_candidate",
    ),
    (
        RCE,
        'map(as_text, column(prompts, "prompt"))',
        'map(str, column(prompts, "prompt"))',
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
        "ppo/ppo.py",
        "return token_rewards + token_scores\n",
        "return token_rewards\n",
        "tests/test_dense.py::test_only_rewards_a_token_tell_two_tokens_apart",
    ),
    (
        "ppo/ppo.py",
        "batch.response_lengths - 1] -= penalties",
        "batch.response_lengths - 1] -= 0 * penalties",
        "tests/test_dense.py::test_a_score_is_a_reward_of_the_last_token",
    ),
    (
        "ppo/ppo.py",
        "self.state.kl_coef, batch.token_scores\n",
        "self.state.kl_coef, None\n",
        "tests/test_dense.py::test_only_rewards_a_token_tell_two_tokens_apart",
    ),
    (
        PPO,
        "        if scores.shape == (count,) and",
        "        if scores.dim() == 1 and",
        IN_DENSE + "a_list_that_does_not_fit_its_response_is_a_sentence",
    ),
    (
        "ppo/ppo.py",
        "return token_scores.sum(1), token_scores, logged",
        "return token_scores[:, 0], token_scores, logged",
        "tests/test_dense.py::test_a_run_logs_the_sums",
    ),
]
