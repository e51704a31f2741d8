"""Mutants that an audit found alive, and others of their kind: normalisers of mini-batches, rows and columns
of others, arguments of one type in another order, recipes, stand-ins for servers. mutants.py plants them."""

PPO, GRPO, RCE = "ppo/ppo.py", "grpo/grpo.py", "rce/rce.py"
RAG, REC, ICL = "ppo/ppo_rag.py", "grpo/grpo_rec.py", "rce/rce_icl.py"
VLLM, TOOLS, PAGE = "examples/vllm_server.py", "examples/schema_tools.py", "docs/change-the-algorithm.md"
TOP_P, LOSS, ASK = "examples/top_p.py", "examples/custom_loss.py", "examples/judge.py"
TEST = "tests/test_audit.py::test_"
GRPO_ROWS = TEST + "grpos_mini_batches_have_the_gradients_of_their_own_rows"
PPO_ROWS = TEST + "ppos_mini_batches_have_the_gradients_of_their_own_rows"
RCE_ROWS = TEST + "rces_last_short_step_counts_the_prompts_that_it_has"
CHUNKS = TEST + "every_chunk_gets_the_columns_answers_and_parts_of_its_own_rows"
SERVER = TEST + "a_servers_tokens_weigh_by_the_truncated_ratio_of_their_own_row"
REC_ROWS = "tests/test_rec.py::test_the_gradient_of_a_mini_batch_equals_float64_of_rows_read_alone[dapo]"
RAG_STEP = "tests/test_rag.py::test_an_optimizer_step_by_hand_with_no_two_constants_equal"
ICL_LISTS = "tests/test_icl.py::test_both_losses_have_the_gradient_of_each_list_read_alone_in_float64"

MUTANTS = [
    # alive in the audit, in its order
    (
        GRPO,
        "token_weights(step_mask, LOSS_TYPE, MAX_NEW_TOKENS) * ",
        "token_weights(batch.response_mask, LOSS_TYPE, MAX_NEW_TOKENS)[step_index] * ",
        GRPO_ROWS + "[dapo]",
    ),
    (PPO, "copy.deepcopy(values[chunk])", "copy.deepcopy(values[: len(rows)])", CHUNKS + "[ppo]"),
    (
        GRPO,
        "kl_loss(batch.logprobs, self.reference_logprobs(batch), KL_ESTIMATOR)",
        "kl_loss(self.reference_logprobs(batch), batch.logprobs, KL_ESTIMATOR)",
        TEST + "evaluations_kl_is_that_of_the_student_to_its_teacher[k1]",
    ),
    (
        GRPO,
        "self.needs_mask = len(plain) < len(layers)",
        "self.needs_mask = not plain",
        TEST + "a_sliding_layer_keeps_the_mask_of_the_prompts",
    ),
    (VLLM, "[rows, : losses.shape[1]]", "[: len(rows), : losses.shape[1]]", SERVER),
    (VLLM, "batch.logprobs, batch.entropies = scored(0), scored(1)", "batch.logprobs = scored(0)", SERVER),
    (
        TOOLS,
        "answered(call) for call in calls",
        "answered(calls[0]) for call in calls",
        TEST + "every_call_of_a_response_gets_its_own_answer",
    ),
    (
        GRPO,
        "length + MAX_NEW_TOKENS > MAX_CONTEXT_TOKENS",
        "length + MAX_NEW_TOKENS >= MAX_CONTEXT_TOKENS",
        TEST + "an_episode_goes_on_if_another_turn_just_fits",
    ),
    (
        GRPO,
        "manual_seed(SEED + 1)",
        "manual_seed(SEED + 1 + self.run.step)",
        TEST + "evaluation_draws_the_same_numbers_at_every_step[grpo]",
    ),
    (
        RCE,
        'else f"reward/{HYBRID_SCORE}"',
        'else f"reward/{SIMILARITY}"',
        TEST + "hybrid_and_similarity_name_parts_of_their_own",
    ),
    (
        RCE,
        "batch.num_prompts = len(chosen)",
        "batch.num_prompts = BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS",
        RCE_ROWS,
    ),
    (PAGE, "mean >= 0.9]", "mean > 0.9]", TEST + "prompts_of_exactly_nine_tenths_are_solved"),
    (
        PAGE,
        "batch.scores.double().view",
        "batch.scores.view",
        TEST + "prompts_of_exactly_nine_tenths_are_solved",
    ),
    (
        GRPO,
        "with without_adapter(self.reference):",
        "with nullcontext() if self.distils else without_adapter(self.reference):",
        TEST + "the_reference_of_an_adapter_is_its_base_whether_it_distils_or_not[True]",
    ),
    # normalisers of mini-batches
    (
        GRPO,
        "trained, batch.trained[step_index].sum()",
        "trained, batch.trained.sum()",
        GRPO_ROWS + "[dapo]",
    ),
    (
        GRPO,
        "mask / (len(mask) * max_new_tokens)\n",
        "mask / (len(mask) * mask.shape[1])\n",
        GRPO_ROWS + "[dr_grpo]",
    ),
    (
        PPO,
        "num_tokens = batch.response_mask[to_device(rows, self.device)].sum()",
        "num_tokens = batch.response_mask.sum() / MINI_BATCHES",
        PPO_ROWS,
    ),
    (
        REC,
        "num_codes = batch.response_mask[to_device(rows, self.device)].sum()",
        "num_codes = batch.response_mask.sum() / MINI_BATCHES",
        REC_ROWS,
    ),
    (
        ICL,
        "* batch.present).sum() / batch.present.sum()\n        ratio",
        "* batch.present).mean()\n        ratio",
        ICL_LISTS,
    ),
    (
        VLLM,
        "(k3.sum() / batch.response_mask.sum())",
        "k3.mean()",
        TEST + "sampler_kl_is_the_mean_over_tokens_of_k3",
    ),
    # rows and columns of others
    (
        GRPO,
        "weights = batch.weights[index, :width]",
        "weights = batch.weights[: len(micro), :width]",
        GRPO_ROWS + "[grpo]",
    ),
    (
        GRPO,
        "old_logprobs = batch.logprobs[index, :width]",
        "old_logprobs = batch.logprobs[: len(rows), :width]",
        GRPO_ROWS + "[dapo]",
    ),
    (
        GRPO,
        "batch.ref_logprobs[index, :width]",
        "batch.ref_logprobs[: len(rows), :width]",
        GRPO_ROWS + "[dapo]",
    ),
    (
        GRPO,
        ".view(len(batch.advantages), -1)[index, :width]",
        ".view(len(batch.advantages), -1)[: len(index), :width]",
        GRPO_ROWS + "[dapo]",
    ),
    (
        PPO,
        "old_values = batch.values[index, :width]",
        "old_values = batch.values[: len(micro), :width]",
        PPO_ROWS,
    ),
    (
        PPO,
        "returns = batch.returns[index, :width]",
        "returns = batch.returns[: len(micro), :width]",
        PPO_ROWS,
    ),
    (
        RCE,
        "mask, batch.weights[index], batch.num_prompts",
        "mask, batch.weights[: len(rows)], batch.num_prompts",
        RCE_ROWS,
    ),
    (
        REC,
        "kl_loss(logprobs, batch.ref_logprobs[rows])",
        "kl_loss(logprobs, batch.ref_logprobs[: len(rows)])",
        REC_ROWS,
    ),
    (
        RAG,
        "old_logprobs = batch.logprobs[chunk]\n",
        "old_logprobs = batch.logprobs[: len(chunk)]\n",
        RAG_STEP,
    ),
    (
        RCE,
        "torch.cat([values[part] for values in chunk_parts])",
        "torch.cat([chunk_parts[0][part] for values in chunk_parts])[: len(batch.rows)]",
        CHUNKS + "[rce]",
    ),
    (
        GRPO,
        'records = column(rows, "columns")',
        'records = column(batch.rows[: len(rows)], "columns")',
        CHUNKS + "[grpo]",
    ),
    # arguments of one type in another order
    (
        GRPO,
        "kl_loss(logprobs, batch.ref_logprobs[index, :width], KL_ESTIMATOR)",
        "kl_loss(batch.ref_logprobs[index, :width], logprobs, KL_ESTIMATOR)",
        GRPO_ROWS + "[dapo]",
    ),
    (
        GRPO,
        "LOSS_TYPE, CLIP_RANGE, CLIP_RANGE_HIGH)\n            gradients",
        "LOSS_TYPE, CLIP_RANGE_HIGH, CLIP_RANGE)\n            gradients",
        GRPO_ROWS + "[dapo]",
    ),
    (
        PPO,
        "value_losses = value_loss(values, old_values, returns,",
        "value_losses = value_loss(values, returns, old_values,",
        PPO_ROWS,
    ),
    (
        PPO,
        "ppo_stats(logprobs.detach(), old_logprobs,",
        "ppo_stats(old_logprobs, logprobs.detach(),",
        PPO_ROWS,
    ),
    (
        RAG,
        "value_loss(values, batch.values[chunk], batch.rewards[chunk],",
        "value_loss(values, batch.rewards[chunk], batch.values[chunk],",
        RAG_STEP,
    ),
    (
        ICL,
        "(choice_kl(all_logprobs, ref_logprobs) * chosen)",
        "(choice_kl(ref_logprobs, all_logprobs) * chosen)",
        ICL_LISTS,
    ),
    # recipes
    (
        PAGE,
        "(logprobs.exp() - old_logprobs.exp())",
        "(old_logprobs.exp() - logprobs.exp())",
        TEST + "dppo_is_the_papers_in_float64[1]",
    ),
    (PAGE, "(moved <= clip_range)", "(moved <= clip_range_high)", TEST + "dppo_is_the_papers_in_float64[2]"),
    (
        PAGE,
        "advantages / (scores.view(-1, group_size).mean(1, keepdim=True) + 1e-4)",
        "advantages / (groups.mean(1, keepdim=True) + 1e-4)",
        TEST + "maxrl_is_the_papers_in_float64[2]",
    ),
    (PAGE, "total + weights[name] * alone", "total + alone", TEST + "gdpo_is_the_papers_in_float64[0]"),
    (
        TOP_P,
        "ordered.exp().cumsum(-1) - ordered.exp() > TOP_P",
        "ordered.exp().cumsum(-1) > TOP_P",
        TEST + "the_examples_top_p_keeps_the_fewest_tokens_of_enough_probability",
    ),
    (
        LOSS,
        "batch.response_mask[rows].sum(1) > MAX_LENGTH",
        "batch.response_lengths[: len(rows)] > MAX_LENGTH",
        TEST + "the_examples_own_term_is_of_each_rows_own_length",
    ),
    # a stand-in that answers every row alike
    (
        ASK,
        "for row in zip(prompts, responses, answers)]\n\n\ngrpo.REWARD",
        "for row in zip(answers, responses, prompts)]\n\n\ngrpo.REWARD",
        TEST + "the_judge_is_told_question_response_and_reference_each_in_its_place",
    ),
]
