"""Mutants of what came with the blocks: Run, reward calls, whole folders, the attention's own name, and the
program that keeps the copies equal. The program that plants them is mutants.py."""

PPO, GRPO, RCE = "ppo/ppo.py", "grpo/grpo.py", "rce/rce.py"
BLOCKS = "tests/blocks.py"
IN_BLOCKS = "tests/test_blocks.py::test_"
IN_RUN = "tests/test_run.py::test_"
IN_SAFETY = "tests/test_safety.py::test_"
IN_SPEED = "tests/test_speed.py::test_"

MUTANTS = [
    # when a run evaluates and saves
    (
        PPO,
        "last = self.step in (until, self.total_steps)",
        "last = self.step == until",
        IN_RUN + "a_run_evaluates_first_last_and_every_so_many_steps",
    ),
    (
        PPO,
        "last = self.step in (until, self.total_steps)",
        "last = self.step == self.total_steps",
        IN_RUN + "a_run_evaluates_first_last_and_every_so_many_steps",
    ),
    (
        PPO,
        "if self.evaluated_at < 0 and self.should_continue():",
        "if self.should_continue():",
        IN_RUN + "a_run_evaluates_first_last_and_every_so_many_steps",
    ),
    (
        PPO,
        "self.step % SAVE_EVERY_N_STEPS == 0 and self.step != until:",
        "self.step % SAVE_EVERY_N_STEPS == 0:",
        IN_RUN + "a_run_evaluates_first_last_and_every_so_many_steps",
    ),
    (
        PPO,
        '        "evaluated_at",\n',
        "",
        IN_RUN + "a_checkpoint_keeps_every_field_of_the_state_by_itself[ppo]",
    ),
    # folders that are there whole or not at all
    (
        PPO,
        '            finish_replacing(self.folder / "best")\n',
        "",
        IN_SAFETY + "best_is_replaced_whole_and_comes_back_where_a_kill_came_between",
    ),
    (
        GRPO,
        "        finish_replacing(path)\n        todo =",
        "        todo =",
        IN_SAFETY + "a_best_that_cannot_be_replaced_stays[grpo/grpo.py]",
    ),
    (
        PPO,
        "    if old.exists() and not folder.exists():\n",
        "    if False:\n",
        IN_SAFETY + "best_is_replaced_whole_and_comes_back_where_a_kill_came_between",
    ),
    (
        PPO,
        "    if old.exists() and not folder.exists():\n",
        "    if old.exists():\n",
        IN_SAFETY + "best_is_replaced_whole_and_comes_back_where_a_kill_came_between",
    ),
    (
        GRPO,
        "            os.rename(path, old)\n",
        "            shutil.rmtree(path)\n",
        IN_SAFETY + "a_best_that_cannot_be_replaced_stays[grpo/grpo.py]",
    ),
    (
        PPO,
        "        if path.is_dir():\n",
        "        if path.exists():\n",
        IN_SAFETY + "a_file_is_replaced_in_one_step_when_it_is_written_and_on_disk",
    ),
    (
        PPO,
        "            fsync(part)\n",
        "            pass\n",
        IN_SAFETY + "a_file_is_replaced_in_one_step_when_it_is_written_and_on_disk",
    ),
    (
        PPO,
        '    tmp = path.with_name(path.name + ".tmp")\n',
        "    tmp = path\n",
        IN_SAFETY + "a_file_is_replaced_in_one_step_when_it_is_written_and_on_disk",
    ),
    (
        PPO,
        '        (folder / "manifest.json").write_text(',
        "        print(",
        IN_RUN + "best_and_patience_resume_apart[ppo]",
    ),
    # calling a reward function
    (
        PPO,
        'error.add_note(f"(raised by the reward function {name})")',
        "pass",
        IN_SAFETY + "what_a_reward_raises_keeps_its_line_and_names_the_function",
    ),
    (
        PPO,
        'if not isinstance(error, UserError) and not hasattr(error, "__notes__"):',
        "if not isinstance(error, UserError):",
        IN_SAFETY + "what_a_reward_raises_keeps_its_line_and_names_the_function",
    ),
    (
        PPO,
        'if not isinstance(error, UserError) and not hasattr(error, "__notes__"):',
        'if not hasattr(error, "__notes__"):',
        IN_SAFETY + "a_sentence_that_a_reward_raises_stays_one",
    ),
    (
        PPO,
        "    try:\n        yield\n    finally:\n        faulthandler.cancel_dump_traceback_later()\n",
        "    try:\n        yield\n    finally:\n        pass\n",
        IN_SAFETY + "a_reward_that_ends_in_time_leaves_no_limit_behind",
    ),
    (
        PPO,
        "        with time_limit():\n            scores = call_reward(",
        "        if True:\n            scores = call_reward(",
        IN_SAFETY + "all_rewards_are_asked_within_the_time_limit",
    ),
    (
        PPO,
        'if hasattr(error, "__notes__"):  # a reward',
        "if False:  # a reward",
        IN_SAFETY + "what_a_reward_raises_is_never_taken_for_the_machines",
    ),
    (
        PPO,
        ' or "DefaultCPUAllocator" in str(error):',
        ":",
        IN_SAFETY + "what_a_reward_raises_is_never_taken_for_the_machines",
    ),
    # the attention has a name of its own
    (
        GRPO,
        'AttentionInterface.register("shared_prompts", shared_prompt_attention)',
        'AttentionInterface.register("shared_prompts", shared_prompt_attention)\nAttentionInterface.register("sdpa", shared_prompt_attention)',
        IN_SPEED + "a_users_own_model_says_the_same_beside_a_trainer[sdpa]",
    ),
    (
        GRPO,
        'model.set_attn_implementation("shared_prompts")',
        "pass",
        IN_SPEED + "a_users_own_model_says_the_same_beside_a_trainer[eager]",
    ),
    # the copies, and the program that compares and spreads them
    (
        RCE,
        "make room and start again",
        "make room and start again ",
        IN_BLOCKS + "the_blocks_of_all_trainers_are_equal",
    ),
    (
        BLOCKS,
        "if block != wanted:",
        "if block.split() != wanted.split():",
        IN_BLOCKS + "a_planted_difference_is_shown_with_both_files",
    ),
    (
        BLOCKS,
        "if block != wanted:",
        "if block.splitlines() != wanted.splitlines():",
        IN_BLOCKS + "a_difference_in_line_ends_alone_is_one",
    ),
    (
        BLOCKS,
        "in reversed(places(file, text).items()):",
        "in places(file, text).items():",
        IN_BLOCKS + "spreading_mends_it_and_leaves_the_rest_of_the_file_alone",
    ),
    (
        BLOCKS,
        "    for name in HAVE.get(file, ()):\n",
        "    for name in ():\n",
        IN_BLOCKS + "markers_that_do_not_fit_are_named_and_nothing_is_spread",
    ),
    (
        BLOCKS,
        "found[name] = path.read_bytes().decode()",
        "found[name] = path.read_text()",
        IN_BLOCKS + "a_difference_in_line_ends_alone_is_one",
    ),
    (
        BLOCKS,
        '        sys.exit("\\n\\n".join(wrong))',
        '        print("\\n\\n".join(wrong))',
        IN_BLOCKS + "a_difference_ends_the_program_with_exit_code_1",
    ),
]
