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
    (PPO, "        number = first + rank()", "        number = first", f"{ANY}[ppo/ppo.py-2]"),
    (
        "rce/rce.py",
        "        starts = missing[done : done + world_size()]\n",
        "        starts = missing[done : done + 1]\n",
        f"{ANY}[rce/rce.py-2]",
    ),
    (
        "grpo/grpo_rec.py",
        "    chunks = map_over_ranks(range(0, len(rows), chunk_size), search_chunk)",
        "    chunks = [search_chunk(i) for i in range(0, len(rows), chunk_size)][rank():]",
        f"{ANY}[grpo/grpo_rec.py-2]",
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
        "grpo/grpo.py",
        'dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)',
        'dist.PrefixStore("0", store)',
        T + "test_a_start_does_not_meet_the_processes_of_an_earlier_one",
    ),
    # sharded
    (
        "rce/rce.py",
        "generation_config=search, synced_gpus=False)",
        "generation_config=search)",
        T + "test_sharded_models_make_the_same_run_to_rounding",
    ),
]
