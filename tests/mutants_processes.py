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
    (
        PPO,
        "if self.adds_gradients and not DETERMINISTIC_GRADIENTS:",
        "if False:",
        "tests/test_processes.py::test_plain_sums_run_too_and_are_near",
    ),
    (
        PPO,
        "in rounds_by_rank[number % world_size()][number // world_size()].items():",
        "in rounds_by_rank[0][number // world_size()].items():",
        "tests/test_processes.py::test_a_run_is_the_same_to_the_byte_on_any_number_of_processes[ppo/ppo.py-2]",
    ),
    (
        PPO,
        "for number in range(self.num_micro_batches):",
        "for number in range(world_size() * len(rounds_by_rank[0])):",
        "tests/test_processes.py::test_what_is_measured_is_added_up_in_the_order_of_the_parts",
    ),
    (
        PPO,
        "return [results[i % world_size()][i // world_size()] for i",
        "return [sum(results, [])[i] for i",
        "tests/test_processes.py::test_a_run_is_the_same_to_the_byte_on_any_number_of_processes[ppo/ppo.py-2]",
    ),
    (
        PPO,
        "progress(range(0, len(micro_batches), world_size()),",
        "progress(range(0, len(micro_batches) - world_size() + 1, world_size()),",
        ORDER,
    ),
    (
        PPO,
        "parameter.grad = None if is_sharded() else torch.zeros_like(parameter)",
        "parameter.grad = None",
        ORDER,
    ),
    (PPO, 'add = max if name.startswith("max_") else operator.add', "add = operator.add", ORDER),
    (
        PPO,
        "        if len(set(rng_states)) > 1:",
        "        if False:",
        "tests/test_processes.py::test_processes_that_would_make_different_runs_end_with_a_sentence",
    ),
    (
        PPO,
        "if any(other.get(name) != value for other in fingerprints):",
        "if False:",
        "tests/test_processes.py::test_processes_that_would_make_different_runs_end_with_a_sentence",
    ),
    (
        PPO,
        ', "GPU": gpu, "OMP_NUM_THREADS": torch.get_num_threads()}',
        ', "GPU": gpu}',
        "tests/test_processes.py::test_another_number_of_threads_is_said_at_a_resume",
    ),
    (
        PPO,
        "        module.set_gradient_divide_factor(1.0)",
        "        pass",
        "tests/test_processes.py::test_sharded_models_make_the_same_run_to_rounding",
    ),
    (
        PPO,
        "    model.reset_iter_state()\n    return model\n",
        "    return model\n",
        "tests/test_processes.py::test_sharded_models_make_the_same_run_to_rounding",
    ),
    (
        PPO,
        "            loss = 0 * loss\n",
        "            pass\n",
        "tests/test_processes.py::test_sharded_models_make_the_same_run_to_rounding",
    ),
    (
        PPO,
        "state[key] = distribute_tensor(x.to(parameter.device), mesh, placements, src_data_rank=None)",
        "pass",
        "tests/test_processes.py::test_whole_and_sharded_runs_go_on_from_each_others_checkpoints",
    ),
]
