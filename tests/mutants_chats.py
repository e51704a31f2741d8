"""Mutants of what came with chats, further columns and rewards a token. The program is mutants.py."""

PPO, GRPO, RCE = "ppo/ppo.py", "grpo/grpo.py", "rce/rce.py"
IN_CHATS = "tests/test_chats.py::test_"
IN_DENSE = "tests/test_dense.py::test_"

MUTANTS = [
    # what the model reads
    (PPO, "first = [] if SYSTEM_PROMPT is None or has_one else", "first = [] if SYSTEM_PROMPT is None else",
     IN_CHATS + "a_system_prompt_goes_before_what_has_none[ppo]"),
    (PPO, "first = [] if SYSTEM_PROMPT is None or has_one else",
     "first = [] if SYSTEM_PROMPT is None or getattr(prompt, 'messages', None) else",
     IN_CHATS + "a_system_prompt_goes_before_what_has_none[ppo]"),
    (GRPO, 'if len(messages) > 1 or getattr(prompt, "messages", None):', "if len(messages) > 1:",
     IN_CHATS + "without_a_chat_template_a_chat_is_refused_with_what_to_do[grpo]"),
    (GRPO, 'rows = [chat(tokenizer, p, "REWARD_MODEL", r) for p, r in zip(prompts, responses)]',
     'rows = [chat(tokenizer, str(p), "REWARD_MODEL", r) for p, r in zip(prompts, responses)]',
     IN_CHATS + "the_policy_reads_the_chat_and_the_reward_model_the_response_too[grpo]"),
    (PPO, "    except Exception as error:  # a template may refuse roles, or their order, by any kind\n",
     "    except KeyError as error:\n",
     IN_CHATS + "roles_that_a_chat_template_refuses_are_said_with_their_line"),

    # rows
    (PPO, "    messages = without_nulls(value.tolist()", "    messages = list(value.tolist()",
     IN_CHATS + "nulls_that_parquet_puts_into_records_are_taken_out_again"),
    (PPO, '        answer = last.get("content") or answer\n', "        pass\n",
     IN_CHATS + "rows_as_trl_and_verl_publish_them_are_read_as_they_are[ppo-jsonl]"),
    (PPO, 'answer = last.get("content") or answer\n', 'answer = last.get("content")\n',
     IN_CHATS + "an_answer_of_messages_without_a_text_is_named"),
    (PPO, '    if messages[-1]["role"] == "assistant":\n', "    if False:\n",
     IN_CHATS + "a_chat_that_is_none_is_named_with_its_line"),
    (PPO, "    text = transcript(value)\n    if not", "    text = str(value)\n    if not",
     IN_CHATS + "a_chat_that_is_none_is_named_with_its_line"),
    (PPO, "            heads += [head for path in extra", "            heads += [path for path in extra",
     IN_CHATS + "parquet_reads_the_further_columns_too_and_no_others"),

    # what reward functions get
    (PPO, "[copy.deepcopy(each[key]) for each in facts]", "[each[key] for each in facts]",
     IN_CHATS + "functions_get_messages_and_columns_if_they_take_them[ppo]"),
    (PPO, "wanted = known if takes_all else", "wanted = [] if takes_all else",
     IN_CHATS + "functions_get_messages_and_columns_if_they_take_them[ppo]"),
    (PPO, "p.POSITIONAL_OR_KEYWORD)][:3]", "p.POSITIONAL_OR_KEYWORD)][:0]",
     IN_CHATS + "a_parameter_that_nothing_fills_is_a_sentence"),
    (PPO, '        row["prompt"] = with_facts(row["prompt"], messages=conversation(row["prompt"]))\n',
     '        row["prompt"] = with_facts(row["prompt"], messages=row["prompt"].messages)\n',
     IN_CHATS + "functions_get_messages_and_columns_if_they_take_them[ppo]"),
    (RCE, 'prompts, answers = ([row[key] for row in rows] for key in ("prompt", "answer"))',
     'prompts, answers = [c["prompt"] for c in candidates], [row["answer"] for row in rows]',
     IN_CHATS + "in_mining_the_reward_sees_the_chat_of_each_candidate"),
    (RCE, 'list(dict.fromkeys(transcript(row["prompt"]) for row, _ in groups))',
     'list(dict.fromkeys(str(row["prompt"]) for row, _ in groups))',
     IN_CHATS + "in_mining_the_reward_sees_the_chat_of_each_candidate"),
    (RCE, "PROMPT_TEMPLATE SYSTEM_PROMPT EXTRA_COLUMNS", "PROMPT_TEMPLATE EXTRA_COLUMNS",
     IN_CHATS + "in_mining_the_reward_sees_the_chat_of_each_candidate"),

    # rewards a token
    (PPO, "        rewarded += dense\n", "        pass\n",
     IN_DENSE + "only_rewards_a_token_tell_two_tokens_apart"),
    (PPO, "        scores = scores - dense.sum(1)\n", "",
     IN_DENSE + "token_rewards_add_up_by_hand"),
    (PPO, "mask, self.state.kl_coef, batch.dense)", "mask, self.state.kl_coef)",
     IN_DENSE + "only_rewards_a_token_tell_two_tokens_apart"),
    (PPO, "        if numbers.shape != (count,) or", "        if numbers.dim() != 1 or",
     IN_DENSE + "a_list_that_does_not_fit_its_response_is_a_sentence"),
    (PPO, '"reward": a_response(scores).mean().item(),', '"reward": scores.mean().item(),',
     IN_DENSE + "a_run_logs_the_sums"),
]
