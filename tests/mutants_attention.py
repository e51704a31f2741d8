"""Mutants of decoding and scoring: caches, prompts that rows share, the check of models at load."""

GRPO = "grpo/grpo.py"
PPO = "ppo/ppo.py"
IN_SPEED = "tests/test_speed.py::test_"
IN_MODELS = "tests/test_models.py::test_"
PLAIN = IN_SPEED + "decoding_is_a_plain_forward_pass"
GROUPED = IN_SPEED + "grouped_rows_are_plain_forward_passes"
WRONG = IN_MODELS + "where_groups_are_wrong_whole_rows_are_read"

MUTANTS = [
    # decoding
    (GRPO, "        self.positions = self.positions + 1\n", "", PLAIN),
    (
        GRPO,
        "self.read(ids, (self.mask.cumsum(1) - 1).clamp(min=0), self.mask)",
        "self.read(ids, self.mask.cumsum(1), self.mask)",
        PLAIN,
    ),
    (
        GRPO,
        "        return self.prompt[0].shape[2] + self.keys.shape[2]",
        "        return self.keys.shape[2]",
        IN_SPEED + "a_caches_room_grows_seldom_and_a_prompts_keys_are_kept_once",
    ),
    # scoring
    (
        GRPO,
        "((owner[:, None] == 0) | (owner[:, None] == owner[:, :, None]))",
        "(owner[:, None] >= 0)",
        GROUPED,
    ),
    (
        GRPO,
        "(owner[:, None] == 0) | (owner[:, None] == owner[:, :, None])",
        "owner[:, None] == owner[:, :, None]",
        GROUPED,
    ),
    (GRPO, "sequences.append((list(prompt), ", "sequences.append((prompt[1:] + prompt[:1], ", GROUPED),
    # the check at load
    (
        PPO,
        "generator=torch.Generator().manual_seed(0)).to(actor.device)",
        "generator=None).to(actor.device)",
        IN_MODELS + "trying_the_models_draws_none_of_the_runs_random_numbers[ppo]",
    ),
    (
        PPO,
        "            for parameter in zeros:\n                parameter.zero_()\n",
        "",
        IN_MODELS + "a_new_value_head_is_still_zero_after_it_was_tried",
    ),
    (
        PPO,
        "parameter.copy_(torch.linspace(-0.02, 0.02, parameter.numel()).view_as(parameter))",
        "pass",
        WRONG + "[float32-ppo]",
    ),
    (
        GRPO,
        "        wanted = sampling_logprobs(unbatched_logits(actor, batch), 1.5)",
        "        wanted = (unbatched_logits(actor, batch) / 1.5).log_softmax(-1)",
        "tests/test_models.py::test_an_edit_of_the_sampling_distribution_passes_the_check_at_load_and_trains",
    ),
    (
        GRPO,
        'warn_only = not DETERMINISTIC_GRADIENTS or model.device.type != "cuda"',
        "warn_only = True",
        IN_MODELS + "on_a_gpu_a_sum_without_an_order_is_refused_unless_the_constant_allows_it",
    ),
    (
        GRPO,
        'warn_only = not DETERMINISTIC_GRADIENTS or model.device.type != "cuda"',
        'warn_only = model.device.type != "cuda"',
        IN_MODELS + "on_a_gpu_a_sum_without_an_order_is_refused_unless_the_constant_allows_it",
    ),
    # adapters
    (
        GRPO,
        'warnings.filterwarnings("error", "Model has',
        'warnings.filterwarnings("ignore", "Model has',
        "tests/test_lora.py::test_what_cannot_be_done_right_is_refused[tied]",
    ),
    (
        GRPO,
        "constant, device, new_head, getattr(torch, DTYPE))",
        "constant, device, new_head, torch.float32)",
        "tests/test_lora.py::test_a_base_in_bfloat16_under_adapters_in_float32",
    ),
    (
        GRPO,
        "torch.nn.functional.pad(self.mask, (0, 1), value=1)",
        "torch.nn.functional.pad(self.mask, (0, 1), value=0)",
        PLAIN,
    ),
    (GRPO, "self.mask = self.mask[index]", "self.mask = self.mask[: len(index)]", PLAIN),
    (GRPO, "self.positions = self.positions[index]", "self.positions = self.positions[: len(index)]", PLAIN),
    (
        GRPO,
        "[buffer.index_select(0, rows) for buffer in self.buffers]",
        "[x[torch.arange(len(rows)) % len(x)] for x in self.buffers]",
        PLAIN,
    ),
    (GRPO, "buffer[:, :, before:after] = new", "buffer[:, :, after - 2 : after] = new", PLAIN),
    (
        GRPO,
        "(0, 0, 0, 16 + after // 2)",
        "(0, 0, 0, 1)",
        "tests/test_speed.py::test_a_caches_room_grows_seldom_and_a_prompts_keys_are_kept_once",
    ),
    (
        GRPO,
        "if type(layer) is DynamicLayer and layer.is_initialized]",
        "if False]",
        "tests/test_speed.py::test_a_caches_room_grows_seldom_and_a_prompts_keys_are_kept_once",
    ),
    (
        GRPO,
        "layer.prompt = [x.index_select(1, kept) for x in layer.prompt]",
        "layer.prompt = [x[:, : len(kept)] for x in layer.prompt]",
        PLAIN,
    ),
    (GRPO, "self.bias = self.bias[kept]", "self.bias = self.bias[: len(kept)]", PLAIN),
    (
        GRPO,
        "slot_of_row = prompt_of_row * size + np.arange(len(rows)) - first_row[prompt_of_row]",
        "slot_of_row = prompt_of_row * size",
        PLAIN,
    ),
    (
        GRPO,
        "np.minimum(first_row[:, None] + np.arange(size), len(rows) - 1)",
        "np.minimum(first_row[:, None] + 0 * np.arange(size), len(rows) - 1)",
        PLAIN,
    ),
    (
        GRPO,
        "self.prompt_of_row = size, prompt_of_row",
        "self.prompt_of_row = size, self.prompt_of_row[rows]",
        "tests/test_speed.py::test_prompts_without_a_row_are_dropped_again_and_again",
    ),
    (
        GRPO,
        "by_row(by_prompt(query) @ prompt_keys.mT + shared_prompts.bias)",
        "by_row(by_prompt(query) @ prompt_keys.mT)",
        PLAIN,
    ),
    (GRPO, "visible = (distance >= 0) & (", "visible = (distance >= -1) & (", GROUPED),
    (
        GRPO,
        "hidden = ~visible | (distance >= (window or math.inf))",
        "hidden = ~visible | (distance > (window or math.inf))",
        "tests/test_speed.py::test_grouped_rows_are_plain_forward_passes[sdpa-window-responses1]",
    ),
    (
        GRPO,
        "hidden = ~visible | (distance >= (window or math.inf))",
        "hidden = ~visible",
        "tests/test_models.py::test_a_window_that_only_the_mask_knows_is_kept_in_a_groups_sequence",
    ),
    (
        GRPO,
        "positions += range(prompt_length, prompt_length + added)",
        "positions += range(len(ids) - added, len(ids))",
        GROUPED,
    ),
    (
        GRPO,
        "            if t > 0:\n                predicted_at",
        "            if True:\n                predicted_at",
        GROUPED,
    ),
    (
        GRPO,
        "pad_right(ids, 0, 8), device)\n    positions = to_device(pad_right(positions, 0, 8), device)\n    owner = to_device(pad_right(owner, -1, 8), device)",
        "pad_right(ids, 0), device)\n    positions = to_device(pad_right(positions, 0), device)\n    owner = to_device(pad_right(owner, -1), device)",
        "tests/test_speed.py::test_a_sequence_holds_a_prompt_once_and_a_bounded_number_of_response_tokens",
    ),
    (
        GRPO,
        "if prompt != last_prompt or len(sequences[-1][0]) + added > prompt_length + _RESPONSE_TOKENS:",
        "if prompt != last_prompt:",
        "tests/test_speed.py::test_a_sequence_holds_a_prompt_once_and_a_bounded_number_of_response_tokens",
    ),
    (
        GRPO,
        "if prompt != last_prompt or len(sequences[-1][0]) + added > prompt_length + _RESPONSE_TOKENS:",
        "if True:",
        "tests/test_speed.py::test_a_sequence_holds_a_prompt_once_and_a_bounded_number_of_response_tokens",
    ),
    (GRPO, "if prompt != last_prompt or", "if len(prompt) != len(last_prompt or ()) or", GROUPED),
    (
        GRPO,
        "places += [(i, len(prompt) - 1 + t, t)",
        "places += [(i, len(prompt) + t, t)",
        "tests/test_models.py::test_groups_and_whole_rows_say_the_same",
    ),
    (
        PPO,
        "places += [(i, len(prompt) - 1 + t, t)",
        "places += [(i, len(prompt) + t, t)",
        "tests/test_ppo.py::test_left_padding_with_absolute_positions_changes_nothing[False]",
    ),
    (
        GRPO,
        "if has_window and not any(windows.values()):",
        "if False:",
        "tests/test_models.py::test_a_window_in_the_config_that_no_layer_is_said_to_have_is_not_shared",
    ),
    (
        GRPO,
        "        size = size // GROUP_SIZE * GROUP_SIZE  #",
        "        size = size  #",
        "tests/test_speed.py::test_micro_batches_are_bounded_by_their_logits_and_keep_prompts_together",
    ),
    (
        GRPO,
        "_SHARED_DECODING.discard(actor)\n            sampling_fault = disagreement(actor, sampled_and_scored)",
        'sampling_fault = ""',
        "tests/test_models.py::test_a_model_that_changes_what_the_cache_gives_it_is_decoded_without_sharing",
    ),
    (
        GRPO,
        "if not fault and not disagreement_of(model, logits_of_shared_prompts):",
        "if not fault:",
        "tests/test_models.py::test_where_groups_are_wrong_whole_rows_are_read[bfloat16-grpo]",
    ),
    (
        "rce/rce.py",
        "            fault = fault or disagreement_of(model, logits_of_rows)\n",
        "",
        "tests/test_models.py::test_a_model_that_no_way_reads_right_is_refused_by_name[rce-logits_of_rows]",
    ),
    (
        "rce/rce.py",
        "_SHARED_DECODING.discard(actor)\n            sampling_fault = disagreement(actor, sampled_and_scored)",
        '_SHARED_DECODING.discard(actor)\n            sampling_fault = ""\n            disagreement(actor, sampled_and_scored)',
        "tests/test_models.py::test_a_model_that_no_way_reads_right_is_refused_by_name[rce-generate]",
    ),
    (
        GRPO,
        "tolerance = 0.1",
        "tolerance = 1e-3",
        "tests/test_lora.py::test_a_base_in_bfloat16_under_adapters_in_float32",
    ),
    (
        PPO,
        "    if deviation > bound:",
        "    if deviation > 1e9:",
        "tests/test_models.py::test_in_bfloat16_a_first_update_that_sees_other_probabilities_ends_the_run[ppo]",
    ),
    (
        GRPO,
        '    if targets != "all-linear":\n        check_targets',
        "    if False:\n        check_targets",
        "tests/test_lora.py::test_what_cannot_be_done_right_is_refused[absent]",
    ),
]
