"""Planted bugs in tools/results.py and in the trainers' pictures. mutants.py plants them."""

RESULTS, RCE, ICL, IN = "tools/results.py", "rce/rce.py", "rce/rce_icl.py", "tests/test_results.py::test_"
MUTANTS = [
    (
        RESULTS,
        "    if other and not write:\n",
        "    if False:\n",
        IN + "check_names_a_figure_that_differs_and_write_puts_it_in",
    ),
    (
        RESULTS,
        'scale = 100 if unit == "%" else 1',
        "scale = 1",
        IN + "check_names_a_figure_that_differs_and_write_puts_it_in",
    ),
    (
        RESULTS,
        'values = record["spread"] if form == "range" else [record["value"]]',
        'values = [record["value"]]',
        IN + "check_names_a_figure_that_differs_and_write_puts_it_in",
    ),
    (
        RESULTS,
        'if text.count("<!--r:") != len(MARKED.findall(text)):',
        "if False:",
        IN + "a_wrong_mark_is_named_with_its_page",
    ),
    (RESULTS, "for key in sorted(records)]", "for key in [key]]", IN + "a_record_replaces_the_one_of_its_id"),
    (
        RCE,
        "if len(values) == 1 or len(set(values)) > 1:",
        "if values:",
        IN + "a_picture_leaves_out_panels_in_which_nothing_changes",
    ),
    (
        RCE,
        'if record["phase"] in phases and record.get(key) is not None:',
        "if record.get(key) is not None:",
        IN + "a_picture_leaves_out_panels_in_which_nothing_changes",
    ),
    (
        RCE,
        "if len(keys) > 1:\n                labels",
        "if keys:\n                labels",
        IN + "the_legend_says_what_each_line_is",
    ),
    (
        RCE,
        "window = max(1, len(y) // 12)",
        "window = max(1, len(y) // 24)",
        IN + "the_legend_says_what_each_line_is",
    ),
    (
        ICL,
        'if not name.startswith(("oracle", "RCE"))}\n        rule = max(',
        'if name != "oracle"}\n        rule = max(',
        IN + "the_picture_of_demonstrations_compares_the_policy_with_the_best_rule",
    ),
]
