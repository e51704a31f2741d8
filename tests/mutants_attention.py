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
        "constant, device, new_head, getattr(torch, DTYPE))",
        "constant, device, new_head, torch.float32)",
        "tests/test_lora.py::test_a_base_in_bfloat16_under_adapters_in_float32",
    ),
]
