"""Mutants of decoding and scoring: caches, prompts that rows share, the check of models at load."""

GRPO = "grpo/grpo.py"
PPO = "ppo/ppo.py"
RCE = "rce/rce.py"
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
        "        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)",
        "        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=0)",
        PLAIN,
    ),
    (
        GRPO,
        "self.read(ids, (self.mask.cumsum(1) - 1).clamp(min=0), self.mask)",
        "self.read(ids, self.mask.cumsum(1), self.mask)",
        PLAIN,
    ),
    (GRPO, "        self.mask = self.mask[rows]\n", "        self.mask = self.mask[:len(rows)]\n", PLAIN),
    (
        GRPO,
        "        self.positions = self.positions[rows]\n",
        "        self.positions = self.positions[:len(rows)]\n",
        PLAIN,
    ),
    (
        GRPO,
        "self.room = [x.index_select(0, rows) for x in self.room]",
        "self.room = [x[torch.arange(len(rows)) % len(x)] for x in self.room]",
        PLAIN,
    ),
    (
        GRPO,
        "            x[:, :, before:after] = new\n",
        "            x[:, :, after - 2:after] = new\n",
        PLAIN,
    ),
    (
        GRPO,
        "more = (0, 0, 0, 16 + after // 2)",
        "more = (0, 0, 0, 1)",
        IN_SPEED + "a_caches_room_grows_seldom_and_a_prompts_keys_are_kept_once",
    ),
    (
        GRPO,
        "if type(layer) is DynamicLayer and layer.is_initialized:",
        "if False:",
        IN_SPEED + "a_caches_room_grows_seldom_and_a_prompts_keys_are_kept_once",
    ),
    (
        GRPO,
        "        self.prompt = [x.index_select(1, prompts) for x in self.prompt]",
        "        self.prompt = [x[:, :len(prompts)] for x in self.prompt]",
        PLAIN,
    ),
    (
        GRPO,
        "        self.bias = self.bias[prompts]\n",
        "        self.bias = self.bias[:len(prompts)]\n",
        PLAIN,
    ),
    (
        GRPO,
        "slots = [prompts.index(p) * most + i - owners.index(p)",
        "slots = [prompts.index(p) * most",
        PLAIN,
    ),
    (
        GRPO,
        "at = [min(owners.index(p) + i, len(owners) - 1)",
        "at = [min(owners.index(p), len(owners) - 1)",
        PLAIN,
    ),
    (
        GRPO,
        "            owners = [prompts.index(p) for p in owners]\n",
        "",
        IN_MODELS + "looking_seldom_who_has_finished_changes_no_sample",
    ),
    (
        GRPO,
        "layer.by_prompt(query) @ layer.prompt[0].mT + layer.bias)",
        "layer.by_prompt(query) @ layer.prompt[0].mT)",
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
    (GRPO, "seen = (back >= 0) & (", "seen = (back >= -1) & (", GROUPED),
    (
        GRPO,
        "hidden = ~seen | (back >= (window or math.inf))",
        "hidden = ~seen | (back > (window or math.inf))",
        GROUPED + "[sdpa-window-responses1]",
    ),
    (
        GRPO,
        "hidden = ~seen | (back >= (window or math.inf))",
        "hidden = ~seen",
        IN_MODELS + "a_window_that_only_the_mask_knows_is_kept_in_a_groups_sequence",
    ),
    (
        GRPO,
        "positions += range(first, first + more)",
        "positions += range(len(ids) - more, len(ids))",
        GROUPED,
    ),
    (GRPO, "(len(ids) + t if t else first) - 1, t)", "len(ids) + t - 1, t)", GROUPED),
    (GRPO, "sequences.append((list(prompt), ", "sequences.append((prompt[1:] + prompt[:1], ", GROUPED),
    (
        GRPO,
        "pad_right(part, value, 8)",
        "pad_right(part, value)",
        IN_SPEED + "a_sequence_holds_a_prompt_once_and_a_bounded_number_of_response_tokens",
    ),
    (
        GRPO,
        "if prompt != last or len(sequences[-1][0]) + more > first + _RESPONSE_TOKENS:",
        "if prompt != last:",
        IN_SPEED + "a_sequence_holds_a_prompt_once_and_a_bounded_number_of_response_tokens",
    ),
    (
        GRPO,
        "if prompt != last or len(sequences[-1][0]) + more > first + _RESPONSE_TOKENS:",
        "if True:",
        IN_SPEED + "a_sequence_holds_a_prompt_once_and_a_bounded_number_of_response_tokens",
    ),
    (GRPO, "if prompt != last or", "if len(prompt) != len(last or ()) or", GROUPED),
    (
        GRPO,
        "places = [(i, len(prompt) - 1 + t, t)",
        "places = [(i, len(prompt) + t, t)",
        IN_MODELS + "groups_and_whole_rows_say_the_same",
    ),
    (
        PPO,
        "places = [(i, len(prompt) - 1 + t, t)",
        "places = [(i, len(prompt) + t, t)",
        "tests/test_ppo.py::test_left_padding_with_absolute_positions_changes_nothing[False]",
    ),
    (
        GRPO,
        "return {} if hidden or not windows",
        "return {} if not windows",
        IN_MODELS + "a_window_in_the_config_that_no_layer_is_said_to_have_is_not_shared",
    ),
    (
        GRPO,
        "    size = size // GROUP_SIZE * GROUP_SIZE or size",
        "    size = size",
        IN_SPEED + "micro_batches_are_bounded_by_their_logits_and_keep_prompts_together",
    ),
    # the check at load
    (
        GRPO,
        "            if not wrong:\n",
        "            if True:\n",
        IN_MODELS + "a_model_that_changes_what_the_cache_gives_it_is_decoded_without_sharing",
    ),
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
        'model.shares_prompts = "logits_of_shared_prompts" in globals() and not compare(logits_of_shared_prompts)',
        "model.shares_prompts = True",
        WRONG + "[bfloat16-grpo]",
    ),
    (
        RCE,
        "            wrong = wrong or compare(logits_of_rows)\n",
        "",
        IN_MODELS + "a_model_that_no_way_reads_right_is_refused_by_name[rce-logits_of_rows]",
    ),
    (
        RCE,
        "            wrong = disagreement(actor, sample)\n",
        "            wrong = ''\n",
        IN_MODELS + "a_model_that_no_way_reads_right_is_refused_by_name[rce-generate]",
    ),
    (
        GRPO,
        "        wanted = sampling_logprobs(unbatched_logits(actor, batch), 1.5)",
        "        wanted = (unbatched_logits(actor, batch) / 1.5).log_softmax(-1)",
        "tests/test_models.py::test_an_edit_of_the_sampling_distribution_passes_the_check_at_load_and_trains",
    ),
    (
        GRPO,
        "tolerance = (1e-3 if exact else 0.1)",
        "tolerance = 1e-3",
        "tests/test_lora.py::test_a_base_in_bfloat16_under_adapters_in_float32",
    ),
    (
        PPO,
        'if step == 0 and apart > (1e-3 if DTYPE == "float32" else 0.05):',
        "if step == 0 and apart > 1e9:",
        IN_MODELS + "in_bfloat16_a_first_update_that_sees_other_probabilities_ends_the_run[ppo]",
    ),
    (
        GRPO,
        'strict = DETERMINISTIC_GRADIENTS and model.device.type == "cuda"',
        "strict = False",
        IN_MODELS + "on_a_gpu_a_sum_without_an_order_is_refused_unless_the_constant_allows_it",
    ),
    (
        GRPO,
        'strict = DETERMINISTIC_GRADIENTS and model.device.type == "cuda"',
        'strict = model.device.type == "cuda"',
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
        "for target in [] if targets == LORA_TARGETS else targets:",
        "for target in []:",
        "tests/test_lora.py::test_what_cannot_be_done_right_is_refused[absent]",
    ),
    (
        GRPO,
        "constant, device, new_head, getattr(torch, DTYPE))",
        "constant, device, new_head, torch.float32)",
        "tests/test_lora.py::test_a_base_in_bfloat16_under_adapters_in_float32",
    ),
]
