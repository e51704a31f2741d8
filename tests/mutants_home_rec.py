"""Bugs of grpo_rec.py away from home: STAGE=evaluate, logs of long histories. mutants.py plants them."""

REC = "grpo/grpo_rec.py"
IN_REC = "tests/test_rec.py::test_"
TABLE = IN_REC + "scoring_best_and_sft_gives_the_figures_of_the_runs_table_and_changes_none_of_its_files"
RECORDS = IN_REC + "a_policy_of_another_folder_is_scored_on_any_file_with_a_record_for_each_row"
NO_POLICY = IN_REC + "without_a_trained_policy_the_evaluation_says_what_to_do[step_7]"
OTHER_CATALOGUE = IN_REC + "a_policy_is_neither_scored_nor_trained_further_with_another_catalogue"
MUTANTS = [
    # STAGE=evaluate
    (REC, '    if STAGE == "evaluate":\n        return [], [], test\n', "", TABLE),
    (
        REC,
        "scores.view(-1, GROUP_SIZE).mean(1).cpu()\n    for name",
        "scores[::GROUP_SIZE].cpu()\n    for name",
        TABLE,
    ),
    (
        REC,
        "values.view(-1, GROUP_SIZE).mean(1).cpu()\n    names",
        "values[::GROUP_SIZE].cpu()\n    names",
        TABLE,
    ),
    (REC, 'f"ndcg@{k}": gains(lists, rows, k)}', 'f"ndcg@{k}": gains(lists, rows, 10)}', TABLE),
    (
        REC,
        '    if EVALUATE_POLICY in ("best", "sft") or',
        '    if EVALUATE_POLICY == "best" or',
        TABLE,
    ),
    (REC, "    ACTOR_MODEL, LORA_RANK = policy, 0\n", "    LORA_RANK = 0\n", TABLE),
    (
        REC,
        '"RESUME OUTPUT_DIR STAGE EVALUATE_POLICY".split()',
        '"RESUME OUTPUT_DIR STAGE".split()',
        TABLE,
    ),
    (REC, '    if (policy / "policy").exists():\n        policy = policy / "policy"\n', "", RECORDS),
    (REC, "lists[i, :10].tolist() if item >= 0]", "lists[0, :10].tolist() if item >= 0]", RECORDS),
    (REC, 'names(row["history"]), "target"', 'names(row["history"][:1]), "target"', RECORDS),
    (REC, 'by_row["ndcg@10"][i].item()', 'by_row["ndcg@20"][i].item()', RECORDS),
    (REC, '    if not (policy / "config.json").exists():\n', "    if False:\n", NO_POLICY),
    (REC, "    if not TEST_FILE:\n", "    if False:\n", NO_POLICY),
    (
        REC,
        'model.config.update({"catalogue": catalogue.digest})',
        'model.config.update({"catalog": catalogue.digest})',
        OTHER_CATALOGUE,
    ),
    (
        REC,
        'if known != catalogue.digest and (STAGE in ("rl", "evaluate") or checkpoint):',
        'if known != catalogue.digest and (STAGE == "evaluate" or checkpoint):',
        OTHER_CATALOGUE,
    ),
    (
        REC,
        "json.dumps(sorted(zip(self.items, self.codes)))",
        "json.dumps(sorted(self.codes))",
        OTHER_CATALOGUE,
    ),
]
