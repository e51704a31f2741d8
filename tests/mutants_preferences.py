"""Bugs of fine-tuning, reward models and DPO: masks, the order of a pair, margins, ties, the reference, label
smoothing, what a row is read as. mutants.py plants them."""

SFT, RM, DPO = "ppo/sft.py", "ppo/reward_model.py", "rce/dpo.py"
DATA, PAIRS = "data/make_preferences.py", "tools/pairs.py"
TINY_WORLD = "data/make_tiny.py"
HERE = "tests/test_preferences.py::test_"
BRADLEY_TERRY = HERE + "the_loss_of_a_pair_is_that_of_bradley_and_terry_with_margin_tie_and_centre"
SMOOTHED = HERE + "the_dpo_loss_of_a_pair_with_label_smoothing[0.2]"
SFT_STEP = HERE + "the_sft_loss_is_the_mean_over_all_answer_tokens_of_the_step[4]"
RM_STEP = HERE + "the_loss_of_a_reward_model_is_the_mean_over_the_pairs_of_the_step[4]"
DPO_STEP = HERE + "the_dpo_loss_of_a_step_by_the_plain_way[dpo-1]"
IPO_STEP = HERE + "the_dpo_loss_of_a_step_by_the_plain_way[ipo-4]"
FIGURES = HERE + "the_figures_of_a_reward_model_by_hand"
ODD_ROWS = HERE + "odd_demonstrations_are_left_out_counted_and_named"
ODD_PAIRS = HERE + "odd_pairs_are_left_out_counted_and_named[dpo]"
TIES = HERE + "margins_and_ties_come_from_their_columns_and_ties_are_in_no_accuracy"
TURNS = HERE + "every_turn_of_the_assistant_is_trained_and_nothing_else"
SAME_RUN = HERE + "a_run_that_was_killed_and_resumed_equals_one_that_was_not_and_so_does_one_on_two_processes"
ADAPTER = HERE + "an_adapter_is_trained_resumed_and_merged_into_best"
JOINED = HERE + "a_pair_is_read_with_one_prompt_and_gives_the_numbers_of_two_texts"
SEPARATE = HERE + "a_model_that_cannot_read_joined_pairs_reads_each_answer_with_its_prompt"
WINDOW = HERE + "an_attention_window_shorter_than_the_longest_pair_is_noticed"
OTHER_REFERENCE = HERE + "a_reference_that_cannot_read_joined_pairs_is_read_the_plain_way"
MINED = HERE + "the_best_and_the_worst_candidate_of_a_prompt_are_a_pair"
SAMPLED = HERE + "sampled_answers_use_no_filter_and_draw_nothing_from_the_training"

MUTANTS = [
    # The loss of a pair
    (
        RM,
        "    difference = chosen - rejected\n    losses",
        "    difference = rejected - chosen\n    losses",
        BRADLEY_TERRY,
    ),
    (RM, "-logsigmoid(difference - margins)", "-logsigmoid(difference + margins)", BRADLEY_TERRY),
    (RM, "-logsigmoid(difference - margins)", "-logsigmoid(difference)", BRADLEY_TERRY),
    (RM, "torch.where(is_tie, tie_losses, losses)", "torch.where(is_tie, losses, tie_losses)", BRADLEY_TERRY),
    (RM, "torch.where(is_tie, tie_losses, losses)", "losses", BRADLEY_TERRY),
    (RM, "-0.5 * (logsigmoid(difference)", "-1.0 * (logsigmoid(difference)", BRADLEY_TERRY),
    (RM, "center_coef * (chosen + rejected) ** 2", "center_coef * (chosen - rejected) ** 2", BRADLEY_TERRY),
    (
        DPO,
        "    difference = chosen_logratios - rejected_logratios",
        "    difference = rejected_logratios - chosen_logratios",
        SMOOTHED,
    ),
    (
        DPO,
        "(1 - label_smoothing) * as_labelled + label_smoothing",
        "(1 - label_smoothing) * as_labelled - label_smoothing",
        SMOOTHED,
    ),
    (DPO, "(1 - label_smoothing) * as_labelled", "as_labelled", SMOOTHED),
    (DPO, "-logsigmoid(-beta * difference)", "-logsigmoid(beta * difference)", SMOOTHED),
    (DPO, "1 / (2 * beta)", "1 / beta", HERE + "the_ipo_loss_of_a_pair_is_a_squared_distance"),
    (
        DPO,
        '"reward_margin": chosen_reward - rejected_reward',
        '"reward_margin": rejected_reward - chosen_reward',
        HERE + "what_dpo_logs_of_a_pair",
    ),
    (
        DPO,
        "rejected_reward = beta * (rejected - ref_rejected)",
        "rejected_reward = beta * (rejected - ref_chosen)",
        HERE + "what_dpo_logs_of_a_pair",
    ),
    # One optimizer step
    (
        SFT,
        "gradients.backward(self.actor, losses.sum() / num_tokens)",
        "gradients.backward(self.actor, losses.mean())",
        SFT_STEP,
    ),
    (SFT, "        places += [(i, t - 1, row", "        places += [(i, t, row", SFT_STEP),
    (SFT, "return ids, range(start, len(ids))", "return ids, range(1, len(ids))", SFT_STEP),
    (SFT, "return ids, range(start, len(ids))", "return ids, range(start, len(ids) - 1)", SFT_STEP),
    (
        RM,
        'column(rows, "chosen_inputs") + column(rows, "rejected_inputs")',
        'column(rows, "rejected_inputs") + column(rows, "chosen_inputs")',
        RM_STEP,
    ),
    (RM, "gradients.backward(self.model, losses.sum() / len(rows))", "pass", RM_STEP),
    (RM, 'last = [[len(answer["input_ids"]) - 1]', "last = [[ids.shape[1] - 1]", RM_STEP),
    (
        RM,
        '        margins = to_device(column(rows, "margin"), chosen.device)',
        "        margins = torch.zeros_like(chosen)",
        RM_STEP,
    ),
    (
        DPO,
        'column(rows, "chosen_answer") + column(rows, "rejected_answer")',
        'column(rows, "rejected_answer") + column(rows, "chosen_answer")',
        DPO_STEP,
    ),
    (DPO, "dpo_loss(chosen - ref_chosen, rejected - ref_rejected,", "dpo_loss(chosen, rejected,", DPO_STEP),
    (
        DPO,
        "dpo_loss(chosen - ref_chosen, rejected - ref_rejected,",
        "dpo_loss(chosen - ref_rejected, rejected - ref_chosen,",
        DPO_STEP,
    ),
    (DPO, "rejected - ref_rejected, BETA,", "rejected - ref_rejected, 0.1,", DPO_STEP),
    (DPO, "BETA, LABEL_SMOOTHING, LOSS_TYPE)", "BETA, LABEL_SMOOTHING)", IPO_STEP),
    (
        DPO,
        "torch.stack([values.mean() for values in by_answer])",
        "torch.stack([values.sum() for values in by_answer])",
        IPO_STEP,
    ),
    # The reference
    (
        DPO,
        "            path = REFERENCE_MODEL or ACTOR_MODEL\n            reference = load_model(",
        "            path = ACTOR_MODEL\n            reference = load_model(",
        HERE + "another_reference_is_read_where_one_is_named",
    ),
    (
        DPO,
        "        if REFERENCE_MODEL or actor_has_moved:",
        "        if REFERENCE_MODEL:",
        SAME_RUN + "[dpo]",
    ),
    (DPO, "        with without_adapter(reference):", "        if True:", ADAPTER + "[dpo]"),
    # What is trained of a row
    (
        SFT,
        "start + num_until_end(ids[start:], trainer.end_ids)]",
        "len(ids)]",
        HERE + "the_answer_is_trained_up_to_its_end_token_and_nothing_after_it",
    ),
    (SFT, "len(before) + num_until_end(turn, trainer.end_ids))", "len(after))", TURNS),
    (SFT, "trained += range(len(before),", "trained = range(len(before),", TURNS),
    (
        SFT,
        "            before = ids_of_chat(tokenizer, messages[:i], where, True)",
        "            before = ids_of_chat(tokenizer, messages[:i], where, False)",
        TURNS,
    ),
    (
        SFT,
        "    return messages[:last_answer], ids, trained",
        "    return messages[: last_answer + 1], ids, trained",
        TURNS,
    ),
    (SFT, "    while start - 1 in places:", "    while False:", TURNS),
    (
        SFT,
        "or ids[: len(after)] != after:",
        ":",
        HERE + "a_template_that_writes_earlier_turns_otherwise_is_refused[loop.last or m['role'] == 'user']",
    ),
    (
        SFT,
        "    if ids[: len(prompt_ids)] != prompt_ids:",
        "    if False:",
        HERE + "a_prompt_that_the_tokenizer_joins_with_its_answer_is_refused",
    ),
    (
        SFT,
        '        trained = np.flatnonzero(encoded["assistant_masks"]).tolist()',
        "        trained = list(range(len(ids)))",
        HERE + "the_markers_of_a_chat_template_say_what_is_trained",
    ),
    (
        SFT,
        "        if token in end_ids:\n            return number",
        "        if token in end_ids:\n            return number - 1",
        HERE + "the_end_of_an_answer_is_its_first_end_token",
    ),
    (
        SFT,
        "    if not difference <= tolerance * (1 + alone.abs().mean()):",
        "    if False:",
        HERE + "a_model_that_sees_the_padding_is_refused",
    ),
    (
        SFT,
        'trained = [row["ids"][t] for t in row["trained"]]',
        'trained = row["ids"]',
        HERE + "samples_show_what_is_read_and_what_of_it_is_trained",
    ),
    # Rows
    (SFT, "if not all(turn.strip() for turn in turns):", "if False:", ODD_ROWS),
    (SFT, "        if len(ids) > MAX_TOKENS:", "        if False:", ODD_ROWS),
    (SFT, "(the first: {row_ids[0]})", "(the first: {row_ids[-1]})", ODD_ROWS),
    (DPO, "    if any(chat != as_chats[0] for chat in as_chats):", "    if False:", ODD_PAIRS),
    (DPO, '    if answers["chosen"] == answers["rejected"]:', "    if False:", ODD_PAIRS),
    (
        DPO,
        '    if not answers["chosen"].strip() or not answers["rejected"].strip():',
        '    if not answers["rejected"].strip():',
        ODD_PAIRS,
    ),
    (DPO, '            if row["length"] > MAX_TOKENS:', "            if False:", ODD_PAIRS),
    (DPO, '        row["length"] = max(', '        row["length"] = min(', ODD_PAIRS),
    (DPO, '            if value[-1]["role"] != "assistant":', "            if False:", ODD_PAIRS),
    (DPO, 'or as_chats[0][-1]["role"] == "assistant":', ":", ODD_PAIRS),
    (
        RM,
        "            if len(value) > 1 or not prompts:",
        "            if True:",
        HERE + "pairs_are_read_in_the_forms_in_which_they_are_published[record1-True]",
    ),
    (
        RM,
        '    roles = {"Human": "user", "Assistant": "assistant"}',
        '    roles = {"Human": "user", "Assistant": "system"}',
        HERE + "pairs_are_read_in_the_forms_in_which_they_are_published[record5-False]",
    ),
    (
        RM,
        "    if len(repeats_prompt) > len(rows) / 2:",
        "    if False:",
        HERE
        + "a_fault_of_the_pairs_is_named_with_its_line[changes0-columns0-answers begin with their prompt]",
    ),
    (RM, '        if "margin" in spec:', "        if False:", TIES),
    (RM, '"1": True, "false": False', '"1": True, "false": True', TIES),
    (RM, "            is_ordered = ~torch.tensor(", "            is_ordered = torch.tensor(", TIES),
    # Figures
    (RM, "+ 0.5 * (chosen == rejected)", "+ 1.0 * (chosen == rejected)", FIGURES),
    (
        RM,
        "    is_equal = chosen_lengths == rejected_lengths",
        "    is_equal = chosen_lengths >= rejected_lengths",
        FIGURES,
    ),
    (RM, "(chosen - rejected).abs().sigmoid()", "(chosen - rejected).sigmoid()", FIGURES),
    (
        RM,
        "    return (counts.cumsum() - (counts - 1) / 2)[inverse]",
        "    return counts.cumsum()[inverse]",
        HERE + "the_rank_correlation_shares_the_ranks_of_equal_numbers",
    ),
    # Runs
    (
        SFT,
        "GradientSum([self.actor])\n",
        "GradientSum([self.actor])\n        num_tokens += rank()\n",
        SAME_RUN + "[sft]",
    ),
    (
        RM,
        'folder / "reward_model", weights)',
        'folder / "model", weights)',
        "tests/test_preferences.py::test_ppo_reads_the_trained_reward_model_as_it_was_trained",
    ),
    (
        RM,
        '        elif hasattr(layer, "modules_to_save"):',
        "        elif False:",
        ADAPTER + "[reward_model]",
    ),
    (RM, "            model = merge_adapter(model)\n", "            pass\n", ADAPTER + "[reward_model]"),
    (
        RM,
        "        parameter.data = parameter.data.clone()\n    model.eval()",
        "        parameter.data = torch.zeros_like(parameter)\n    model.eval()",
        HERE + "an_encoder_is_trained_as_ppo_reads_it",
    ),
    (
        RM,
        "inputs = dict(tokenizer(as_text(prompt), as_text(response)))",
        "inputs = dict(tokenizer(as_text(response), as_text(prompt)))",
        HERE + "an_encoder_is_trained_as_ppo_reads_it",
    ),
    (SFT, "            model.generation_config = GenerationConfig()\n", "", SAMPLED),
    (SFT, '"top_k": 0, ', "", SAMPLED),
    (SFT, 'settings |= {"temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0}', "settings |= {}", SAMPLED),
    (SFT, "with autocast(model), torch.random.fork_rng():", "with autocast(model):", SAMPLED),
    (
        DPO,
        '(("accuracy_greedy", True), ("accuracy_sampled", False))',
        '(("accuracy_greedy", False), ("accuracy_sampled", True))',
        HERE + "the_held_out_accuracy_counts_correct_answers",
    ),
    (
        RM,
        '    write_atomically(run.folder / "reward_model_pairs.png"',
        '    write_atomically(run.folder / "pairs.png"',
        HERE + "the_picture_of_held_out_pairs_is_written",
    ),
    (
        DATA,
        "    if rng.random() < NOISE:",
        "    if rng.random() > NOISE:",
        HERE + "the_shipped_pairs_and_demonstrations_come_from_their_seed",
    ),
    (
        TINY_WORLD,
        'shutil.copytree(checkpoint / "reward_model", out',
        "shutil.copytree(policy, out",
        HERE + "the_shipped_world_is_made_by_the_scripts",
    ),
    (
        TINY_WORLD,
        "    rng = random.Random(SEED)\n",
        "    rng = random.Random(SEED + 1)\n",
        HERE + "the_shipped_world_is_made_by_the_scripts",
    ),
    # Pairs of mined candidates
    (
        PAIRS,
        "    best, worst = max(usable, key=rank_of), min(usable, key=rank_of)",
        "    worst, best = max(usable, key=rank_of), min(usable, key=rank_of)",
        MINED,
    ),
    (
        PAIRS,
        '    return candidate["hard"], candidate.get("soft") or 0.0',
        '    return candidate["hard"], 0.0',
        MINED,
    ),
    (PAIRS, ' and not c["eval_failed"]', "", MINED),
    (PAIRS, '    if best["text"] == worst["text"]:', "    if False:", MINED),
    (RM, "return output[rows, columns].squeeze", "return output[rows, columns - 1].squeeze", RM_STEP),
    # Both answers of a pair behind one prompt
    (
        RM,
        "self.read_pairs = self.joined_scores",
        "self.read_pairs = self.pair_scores",
        JOINED + "[reward_model]",
    ),
    (RM, "last = [(len(first) - 1, places[-1])", "last = [(len(first) - 1, -1)", JOINED + "[reward_model]"),
    (
        DPO,
        "(i, rejected_places[i][t - 1], answer",
        "(i, t - 1, answer",
        JOINED + "[dpo]",
    ),
    (DPO, "return joined_logprobs if reads_joined", "return pair_logprobs if reads_joined", JOINED + "[dpo]"),
    (
        DPO,
        "is_visible = (owner[:, None, :] == 0) | (owner[:, None, :] == owner[:, :, None])",
        "is_visible = owner[:, None, :] <= owner[:, :, None]",
        JOINED + "[dpo]",
    ),
    (DPO, "is_visible.tril()[:, None]", "is_visible[:, None]", JOINED + "[dpo]"),
    (
        DPO,
        "positions.append([*range(len(first)), *range(num_common, len(second))])",
        "positions.append(list(range(len(rows[-1]))))",
        JOINED + "[dpo]",
    ),
    (
        DPO,
        "    return bool((got - want)",
        "    return True or bool((got - want)",
        SEPARATE + "[dpo]",
    ),
    (DPO, "    rows = [max(rows, key=lambda row: row", "    rows = [min(rows, key=lambda row: row", WINDOW),
    (DPO, "            read = pair_reader(reference, rows)\n", "", OTHER_REFERENCE),
    (
        "tools/show.py",
        '"text", "trained", "chosen"',
        '"text", "chosen"',
        HERE + "samples_show_what_is_read_and_what_of_it_is_trained",
    ),
]
