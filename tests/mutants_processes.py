"""Bugs of several processes, of sums in one order and of sharding."""

PPO = "ppo/ppo.py"
T = "tests/test_processes.py::"
ANY = T + "test_a_run_is_the_same_to_the_byte_on_any_number_of_processes"
ORDER = T + "test_two_processes_add_up_in_the_order_of_the_parts_as_one_does"
MUTANTS = [
    # what one process draws, adds up or says alone
    (PPO, "torch.manual_seed(seed)", "torch.manual_seed(seed + rank())", f"{ANY}[ppo/ppo.py-2]"),
    (PPO, "            for gradient in gradients:", "            for gradient in gradients[::-1]:", ORDER),
    (PPO, "            parameter.grad.zero_()\n", "", ORDER),
    (
        PPO,
        "for parameter in parameters if added_here and not DETERMINISTIC_GRADIENTS else ():",
        "for parameter in ():",
        T + "test_plain_sums_run_too_and_are_near",
    ),
    (
        PPO,
        "in everyone[number % world_size()][number // world_size()].items():",
        "in everyone[0][number // world_size()].items():",
        f"{ANY}[ppo/ppo.py-2]",
    ),
    (
        PPO,
        "    for number in range(len(parts)):\n        for key, value",
        "    for number in range(world_size() * len(everyone[0])):\n        for key, value",
        T + "test_what_is_measured_is_added_up_in_the_order_of_the_parts",
    ),
    (
        PPO,
        "return [everyone[i % world_size()][i // world_size()] for i",
        "return [sum(everyone, [])[i] for i",
        f"{ANY}[ppo/ppo.py-2]",
    ),
    (PPO, "        number = first + rank()", "        number = first", f"{ANY}[ppo/ppo.py-2]"),
    (
        PPO,
        "progress(range(0, len(parts), world_size()),",
        "progress(range(0, len(parts) - world_size() + 1, world_size()),",
        ORDER,
    ),
    (
        "rce/rce.py",
        "    for i in range(0, len(rows), size * world_size()):",
        "    for i in range(0, len(rows), size):",
        f"{ANY}[rce/rce.py-2]",
    ),
    (
        "grpo/grpo_rec.py",
        "    found = map_over_ranks(range(0, len(rows), at_once), some_rows)",
        "    found = [some_rows(i) for i in range(0, len(rows), at_once)][rank():]",
        f"{ANY}[grpo/grpo_rec.py-2]",
    ),
    (
        PPO,
        "parameter.grad = None if sharded else torch.zeros_like(parameter)",
        "parameter.grad = None",
        ORDER,
    ),
    (
        PPO,
        'metrics[key] = max(both) if key.endswith("_max") else sum(both)',
        "metrics[key] = sum(both)",
        ORDER,
    ),
    # what all must know of
    (
        PPO,
        "        if fails_first():",
        "        if rank() == 0:",
        T + "test_a_reward_that_raises_on_one_process_ends_all_and_shows_where",
    ),
    (
        PPO,
        "        self.stop_signal = max(signals) or None",
        "        self.stop_signal = self.signal",
        T + "test_a_signal_to_one_process_stops_all_after_the_same_step",
    ),
    (
        PPO,
        "        if len(set(drawn)) > 1:",
        "        if False:",
        T + "test_processes_that_would_make_different_runs_end_with_a_sentence",
    ),
    (
        PPO,
        "if any(other.get(name) != value for other in everyone):",
        "if False:",
        T + "test_processes_that_would_make_different_runs_end_with_a_sentence",
    ),
    (
        PPO,
        "        if rank() > 0:\n            return\n        tqdm.write(",
        "        tqdm.write(",
        T + "test_only_the_first_process_writes_prints_and_locks",
    ),
    (
        PPO,
        "        if rank() == 0:\n            self.open_files()",
        "        self.open_files()",
        T + "test_only_the_first_process_writes_prints_and_locks",
    ),
    (
        PPO,
        '**here, "OMP_NUM_THREADS": torch.get_num_threads()}',
        "**here}",
        T + "test_another_number_of_threads_is_said_at_a_resume",
    ),
    (
        "grpo/grpo.py",
        'dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)',
        'dist.PrefixStore("0", store)',
        T + "test_a_start_does_not_meet_the_processes_of_an_earlier_one",
    ),
    # sharded
    (
        PPO,
        "        part.set_gradient_divide_factor(1.0)",
        "        pass",
        T + "test_sharded_models_make_the_same_run_to_rounding",
    ),
    (
        PPO,
        "    model.reset_iter_state()\n    model.register",
        "    model.register",
        T + "test_sharded_models_make_the_same_run_to_rounding",
    ),
    (
        "rce/rce.py",
        "generation_config=search, synced_gpus=False)",
        "generation_config=search)",
        T + "test_sharded_models_make_the_same_run_to_rounding",
    ),
    (
        PPO,
        "(0 * loss if getattr(",
        "(loss if getattr(",
        T + "test_sharded_models_make_the_same_run_to_rounding",
    ),
    (
        PPO,
        "state[key] = distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None)",
        "pass",
        T + "test_whole_and_sharded_runs_go_on_from_each_others_checkpoints",
    ),
]
