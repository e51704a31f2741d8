"""Planted bugs in the documents and in tools/constants.py; mutants.py plants them."""

TEST = "tests/test_docs.py::test_"
CONSTANTS = "tools/constants.py"
HAS_ALL = TEST + "the_page_of_constants_has_each_trainers_constants_with_their_comments"
IS_NEW = TEST + "the_page_of_constants_is_what_the_trainers_say"
COMMAND = TEST + "each_command_has_a_program_that_exists_and_constants_that_it_takes"
LINK = TEST + "every_link_leads_to_a_file_and_a_heading"
PROGRAM = TEST + "each_program_of_a_page_trains_a_step"

MUTANTS = [
    (CONSTANTS, '        if target.id.startswith("_"):\n', "        if False:\n", HAS_ALL),
    (CONSTANTS, "        if len(set(texts)) > 1:\n", "        if False:\n", HAS_ALL),
    (CONSTANTS, ".setdefault((name, meaning), {})", '.setdefault((name, ""), {})', HAS_ALL),
    (CONSTANTS, "    while index > 0 and ", "    if index > 0 and ", IS_NEW),
    (CONSTANTS, "text) if starts_section else text", "text) if False else text", IS_NEW),
    ("docs/constants.md", "| `GROUP_SIZE` | `8` |", "| `GROUP_SIZE` | `9` |", IS_NEW),
    (
        "docs/architectures.md",
        "`mamba2`, `hunyuan_v1_dense` |",
        "`mamba`, `hunyuan_v1_dense` |",
        TEST + "the_short_list_of_architectures_is_what_its_table_says",
    ),
    (
        "docs/reference.md",
        "(troubleshooting.md#metric-by-metric)",
        "(troubleshooting.md#metrics)",
        LINK + "[docs/reference.md]",
    ),
    ("README.md", "(docs/lab/README.md)", "(docs/lab/index.md)", LINK + "[README.md]"),
    (
        "README.md",
        "[lab notes](docs/lab/README.md)",
        "lab notes",
        TEST + "every_page_is_linked_from_the_readme_or_a_page_that_it_links",
    ),
    (
        "docs/several-gpus.md",
        "python grpo/grpo.py LORA_RANK=8 LEARNING_RATE=1e-3\n",
        "python grpo/grpo.py LORA_RANKS=8 LEARNING_RATE=1e-3\n",
        COMMAND + "[docs/several-gpus.md]",
    ),
    (
        "docs/published.md",
        'python ppo/ppo_rag.py "${hotpot[@]}" BASELINE_ONLY=True',
        'python ppo/rag.py "${hotpot[@]}" BASELINE_ONLY=True',
        COMMAND + "[docs/published.md]",
    ),
    (
        "docs/your-reward.md",
        '        self.reward_parts["diversity"] = diversity\n',
        "",
        PROGRAM + "[docs/your-reward.md]",
    ),
    (
        "docs/turns-and-tools.md",
        "grpo.ENVIRONMENT = calculator\n",
        "environment = calculator\n",
        PROGRAM + "[docs/turns-and-tools.md]",
    ),
    (
        "docs/quickstart.md",
        "optimizer steps of the policy: 1\n",
        "updates of the policy: 1\n",
        TEST + "the_quickstart_shows_what_a_run_prints_and_writes",
    ),
    (
        "docs/quickstart.md",
        "  logs/metrics.jsonl    ",
        "  logs/metrics.json     ",
        TEST + "the_quickstart_shows_what_a_run_prints_and_writes",
    ),
    (
        "docs/troubleshooting.md",
        "LR_SCHEDULER_TYPE=cosine EARLY_STOPPING_PATIENCE=3",
        "LR_SCHEDULER_TYPE=linear EARLY_STOPPING_PATIENCE=3",
        "tests/test_run.py::test_the_presets_run[quick experiment]",
    ),
    (
        "docs/troubleshooting.md",
        "| `advantage_abs` | fall",
        "| `advantage_mean_abs` | fall",
        TEST + "what_troubleshooting_names_exists",
    ),
    (
        "docs/troubleshooting.md",
        '| "in use by another run" |',
        '| "is in use by a run" |',
        TEST + "what_troubleshooting_names_exists",
    ),
]
