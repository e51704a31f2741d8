"""Mutants of Run, reward calls, whole folders and the attention's own name. The program that plants them is
mutants.py."""

PPO, GRPO, RCE = "ppo/ppo.py", "grpo/grpo.py", "rce/rce.py"
IN_RUN = "tests/test_run.py::test_"
IN_SAFETY = "tests/test_safety.py::test_"
IN_SPEED = "tests/test_speed.py::test_"

MUTANTS = [
    # when a run evaluates and saves
    (
        PPO,
        '("step", "evaluated_at", "best_value"',
        '("step", "best_value"',
        IN_RUN + "a_checkpoint_keeps_every_field_of_the_state_by_itself[ppo]",
    ),
    # folders that are there whole or not at all
    (
        PPO,
        'for old in [*self.folder.glob("best.old"), ',
        "for old in [",
        IN_SAFETY + "best_is_replaced_whole_and_comes_back_where_a_kill_came_between",
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
    (
        PPO,
        "if evaluates or run.is_last_step():",
        "if evaluates:",
        "tests/test_run.py::test_a_run_evaluates_first_last_and_every_so_many_steps",
    ),
    (
        PPO,
        "return self.evaluated_at < 0 and not self.is_over()",
        "return not self.is_over()",
        "tests/test_run.py::test_a_run_evaluates_first_last_and_every_so_many_steps",
    ),
    (
        GRPO,
        "        finish_replacing(path)\n        # The disk",
        "        # The disk",
        "tests/test_safety.py::test_a_best_that_cannot_be_replaced_stays[grpo/grpo.py]",
    ),
    (
        PPO,
        "            fsync(written)\n",
        "            pass\n",
        "tests/test_safety.py::test_a_file_is_replaced_in_one_step_when_it_is_written_and_on_disk",
    ),
    (
        PPO,
        'if any("raised by" in note',
        'if any("raised at" in note',
        "tests/test_safety.py::test_what_a_reward_raises_is_never_taken_for_the_machines",
    ),
]
