"""Mutants that undo what issue 42 mended in the blocks, the recipes and the repository's frame."""

PPO, RCE, GRPO = "ppo/ppo.py", "rce/rce.py", "grpo/grpo.py"
COOKBOOK = "docs/cookbook.md"
ASK, GYM_FILE, TOOLS_FILE = "examples/judge.py", "examples/reasoning_gym_tasks.py", "examples/schema_tools.py"
RUN = "tests/test_run.py::test_"
RECIPES = "tests/test_recipes.py::test_"
TOOLS = "tests/test_tools.py::test_"
TURNS = "tests/test_turns.py::test_"
STATE = RECIPES + "a_recipes_own_state_is_resumed"
FIELD = RUN + "a_field_of_the_state_that_could_not_be_resumed_is_named"
GROUPS = RUN + "the_responses_to_one_prompt_are_scored_in_one_call"
CSV = RUN + "a_csv_file_with_a_column_twice_is_refused_with_its_name"
ELSEWHERE = RUN + "rce_goes_on_in_another_folder_with_the_candidates_of_the_first"
MISSING = RUN + "candidates_that_are_missing_are_named_before_anything_is_written"
ASYNC = RUN + "a_reward_function_that_is_async_is_told"
ANSWERS = RUN + "an_evaluation_of_prompts_without_answers_says_what_it_needs"
LINES = RUN + "without_a_terminal_a_line_about_every_30_seconds_says_how_far_it_is"
BAR = RUN + "on_a_terminal_a_bar_stands_below_the_lines_and_vanishes"
JUDGE = "tests/test_examples.py::test_a_judge_that_fails_is_asked_thrice_and_then_ends_the_run_with_its_name"
GYM = "tests/test_examples.py::test_reasoning_gym_makes_rows_and_asks_the_tasks_own_score"
SOURCE = TOOLS + "banking77_is_not_cut_without_its_source"
ARCHIVE = TOOLS + "the_program_that_plants_mutants_knows_an_archives_files"
IGNORED = TOOLS + "git_keeps_the_page_of_the_checkpoints_and_nothing_else_of_them"
PINNED = TOOLS + "every_package_that_is_imported_is_pinned"

MUTANTS = [
    # own fields of the state
    (
        GRPO,
        'vars(self.state).keys() - saved["state"].keys()):',
        'vars(self.state).keys() ^ saved["state"].keys()):',
        STATE + "[adaptive entropy-entropy_coef]",
    ),
    (
        GRPO,
        'vars(self.state).keys() - saved["state"].keys()):',
        'saved["state"].keys() - vars(self.state).keys()):',
        STATE + "[solved prompts-solved]",
    ),
    (
        GRPO,
        '            vars(self.state).update(saved["state"])\n',
        '            vars(self.state).update({k: saved["state"][k] for k in vars(self.state)})\n',
        STATE + "[adaptive entropy-entropy_coef]",
    ),
    (PPO, "torch.load(buffer, weights_only=True)", "torch.load(buffer, weights_only=False)", FIELD),
    # groups stay whole
    (
        PPO,
        "for _, group in itertools.groupby(rows, key=id):",
        "for group in [rows[i : i + GROUP_SIZE] for i in range(0, len(rows), GROUP_SIZE)]:",
        GROUPS,
    ),
    (
        GRPO,
        "for _, group in itertools.groupby(rows, key=id):",
        "for group in [[row] for row in rows]:",
        RUN + "an_evaluation_hands_over_whole_groups[grpo/grpo.py]",
    ),
    (
        RCE,
        "for _, group in itertools.groupby(rows, key=id):",
        "for group in [[row] for row in rows]:",
        RUN + "the_candidates_of_a_prompt_are_verified_in_one_call",
    ),
    # what a reward function returns
    (
        PPO,
        "    if inspect.isawaitable(values) or inspect.isasyncgen(values):",
        "    if inspect.isawaitable(values):",
        ASYNC + "[generator]",
    ),
    (
        PPO,
        "    if inspect.isawaitable(values) or inspect.isasyncgen(values):",
        "    if inspect.isasyncgen(values):",
        ASYNC + "[object]",
    ),
    (PPO, "    if len(answers) != len(prompts):\n", "    if False:\n", ANSWERS),
    ("rewards/__init__.py", ", or evaluate() the answers", "", ANSWERS),
    # data, another folder
    (PPO, "                if name and reader.fieldnames.count(name) > 1:", "                if False:", CSV),
    (
        PPO,
        "                if name and reader.fieldnames.count(name) > 1:",
        "                if reader.fieldnames.count(name) > 1:",
        CSV,
    ),
    (
        RCE,
        "        for source, path in self.to_copy.items():",
        "        for source, path in ():",
        ELSEWHERE,
    ),
    (
        RCE,
        "archived = list(filter(Path.exists, self.to_copy.values()))",
        "archived = []",
        ELSEWHERE,
    ),
    (
        RCE,
        "        if is_ours and checkpoint.resolve().parent != Path(OUTPUT_DIR).resolve():",
        "        if checkpoint.resolve().parent != Path(OUTPUT_DIR).resolve():",
        RUN + "candidates_given_by_a_path_are_not_copied",
    ),
    (RCE, "            source = checkpoint.parent / path.name\n", "", MISSING),
    (RCE, "        if not source.exists():", "        if False:", MISSING),
    (RCE, '        if file_digest(source)["sha256"] != digest:', "        if False:", MISSING),
    # progress
    (
        PPO,
        "    if rank() > 0 or len(items) == 1:",
        "    if len(items) == 1:",
        RUN + "process_0_alone_shows_how_far_it_is",
    ),
    (
        PPO,
        "    if rank() > 0 or len(items) == 1:",
        "    if rank() > 0:",
        RUN + "process_0_alone_shows_how_far_it_is",
    ),
    (PPO, "leave=False, file=sys.stdout", "leave=True, file=sys.stdout", BAR),
    (PPO, "leave=False, file=sys.stdout", "leave=False, file=sys.stderr", BAR),
    (PPO, "        tqdm.write(text, file=sys.stdout)\n", "        print(text)\n", BAR),
    (PPO, "now - printed > 30:", "now - printed > 3:", LINES),
    # recipes and turns
    (
        ASK,
        "FAULTS = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)",
        "FAULTS = (OSError, ValueError, LookupError, TypeError)",
        JUDGE + "[cut short]",
    ),
    (
        ASK,
        "FAULTS = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)",
        "FAULTS = (OSError, http.client.HTTPException, LookupError, TypeError)",
        JUDGE + "[no JSON]",
    ),
    (
        ASK,
        "FAULTS = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)",
        "FAULTS = (OSError, http.client.HTTPException, ValueError, TypeError)",
        JUDGE + "[another JSON]",
    ),
    (
        ASK,
        "FAULTS = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)",
        "FAULTS = (OSError, http.client.HTTPException, ValueError, LookupError)",
        JUDGE + "[no content]",
    ),
    (GYM_FILE, 'folder = Path(grpo.OUTPUT_DIR) / "gym"', 'folder = Path(".")', GYM),
    (GYM_FILE, "grpo.broadcast_from_rank0(write)", "write()", GYM),
    (
        TOOLS_FILE,
        'return text or "(no output)"',
        "return text",
        TURNS + "calls_are_run_and_what_is_wrong_with_them_is_their_answer",
    ),
    (
        "docs/troubleshooting.md",
        "| the smallest step in memory, `ppo/ppo.py` (",
        "| the smallest step in memory (",
        "tests/test_run.py::test_the_presets_name_their_trainer",
    ),
    # the frame
    ("data/make_banking77.py", "    if not SOURCE or missing:", "    if not SOURCE:", SOURCE),
    ("data/make_banking77.py", 'SOURCE = ""', 'SOURCE = "/work/shared/data/banking77"', SOURCE),
    ("tests/mutants.py", '    if (root / ".git").exists():', "    if True:", ARCHIVE),
    ("tests/mutants.py", "name not in LEFT_BEHIND and not name.startswith", "not name.startswith", ARCHIVE),
    (
        "tests/mutants.py",
        'name not in LEFT_BEHIND and not name.startswith(".")',
        "name not in LEFT_BEHIND",
        ARCHIVE,
    ),
    ("tests/mutants.py", "if name and (root / name).is_file()]", "if name]", ARCHIVE),
    (".gitignore", "!checkpoints/README.md\n", "", IGNORED),
    (".gitignore", "checkpoints/*\n", "", IGNORED),
    ("requirements.txt", "tqdm==4.70.1\n", "", PINNED),
    ("requirements.txt", "scipy==1.17.1\n", "", PINNED),
    (PPO, "        check_state(vars(self.state))\n", "", FIELD),
    (
        PPO,
        "if end > start and end + group_size - start > BATCH_SIZE * GROUP_SIZE:",
        "if end - start >= BATCH_SIZE * GROUP_SIZE:",
        GROUPS,
    ),
    (
        PPO,
        "end + group_size - start > BATCH_SIZE * GROUP_SIZE:",
        "end + group_size - start >= BATCH_SIZE * GROUP_SIZE:",
        GROUPS,
    ),
    (PPO, "if end > start and end + group_size", "if end + group_size", GROUPS),
    (
        PPO,
        "chunks.append(slice(start, end))\n            start = end\n",
        "chunks.append(slice(start, end))\n            start = end + group_size\n",
        GROUPS,
    ),
    (
        PPO,
        "copy.deepcopy(values[chunk])",
        "copy.deepcopy(values[: chunk.stop - chunk.start])",
        "tests/test_run.py::test_each_call_gets_the_columns_of_its_own_responses",
    ),
    (PPO, "batch.responses[chunk], column", "batch.responses[: chunk.stop - chunk.start], column", GROUPS),
    (
        PPO,
        "if different := reward_parts.keys() ^ chunk_parts[0].keys():",
        "if different := chunk_parts[0].keys() - reward_parts.keys():",
        "tests/test_run.py::test_parts_that_differ_from_call_to_call_are_named",
    ),
    (
        PPO,
        "    for reward_parts in chunk_parts:",
        "    for reward_parts in chunk_parts[-1:]:",
        "tests/test_run.py::test_parts_that_differ_from_call_to_call_are_named",
    ),
    (
        PPO,
        "values.close()  # otherwise",
        "pass  # otherwise",
        "tests/test_run.py::test_a_reward_function_that_is_async_is_told[function]",
    ),
    (PPO, "(now - started) / done * (len(items) - done))", "(now - started) / done * len(items))", LINES),
]
