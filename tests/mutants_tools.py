"""Mutants of the programs in tools/. The program is mutants.py."""

SHOW, PLOT = "tools/show.py", "tools/plot.py"
IN = "tests/test_tools.py::test_"
VLLM, IN_VLLM = "examples/vllm_server.py", "tests/test_vllm.py::test_"
CHECK, IN_CHECK = "tools/check_up.py", "tests/test_check_up.py::test_"

MUTANTS = [
    # show.py
    (
        SHOW,
        "textwrap.indent(printable(str(value)),",
        "textwrap.indent(str(value),",
        IN + "escapes_are_printed_safely_and_colours_at_a_terminal_alone",
    ),
    (
        SHOW,
        'facts.append(printable(f"{key} {value}"))',
        'facts.append(f"{key} {value}")',
        IN + "escapes_are_printed_safely_and_colours_at_a_terminal_alone",
    ),
    (
        SHOW,
        'sys.stdout.isatty() and "NO_COLOR" not in os.environ',
        "sys.stdout.isatty()",
        IN + "escapes_are_printed_safely_and_colours_at_a_terminal_alone",
    ),
    (
        SHOW,
        'reverse=by == "best")[:10]',
        'reverse=by == "worst")[:10]',
        IN + "a_step_and_the_worst_or_best_can_be_asked_for",
    ),
    (
        SHOW,
        'samples = [sample for sample in samples if sample.get("reward") is not None]',
        "pass",
        IN + "a_step_and_the_worst_or_best_can_be_asked_for",
    ),
    (
        SHOW,
        "with suppress(ValueError):",
        "with suppress(OSError):",
        IN + "a_run_in_progress_is_shown_as_far_as_it_goes",
    ),
    (
        SHOW,
        'if sample["step"] == int(step)]',
        'if sample["step"] >= int(step)]',
        "tests/test_tools.py::test_a_step_and_the_worst_or_best_can_be_asked_for",
    ),
    (
        SHOW,
        "    except BrokenPipeError:",
        "    except KeyError:",
        IN + "a_reader_that_has_seen_enough_ends_it_quietly",
    ),
    # plot.py
    (
        PLOT,
        "return len(values) == 1 or len(set(values)) > 1",
        "return True",
        IN + "every_metric_of_a_run_is_drawn_as_far_as_it_goes",
    ),
    (
        PLOT,
        "with suppress(ValueError):  # a line half-written",
        "with suppress(OSError):",
        IN + "every_metric_of_a_run_is_drawn_as_far_as_it_goes",
    ),
    (PLOT, " and math.isfinite(value):", ":", IN + "numbers_that_are_not_finite_are_left_out_of_a_curve"),
    (
        PLOT,
        "                parts = [values[max(0, i - window) : i] for i in range(1, len(values) + 1)]\n",
        "                parts = [values[max(0, i - window) : i + 1] for i in range(1, len(values) + 1)]\n",
        IN + "every_metric_of_a_run_is_drawn_as_far_as_it_goes",
    ),
    (
        PLOT,
        "all(key in metrics for metrics in others) and any(",
        "any(",
        IN + "several_runs_are_drawn_where_they_share_a_metric_each_in_its_colour",
    ),
    (
        PLOT,
        "names = names if len(set(names)) == len(names) else words.runs",
        "pass",
        IN + "several_runs_are_drawn_where_they_share_a_metric_each_in_its_colour",
    ),
    (
        PLOT,
        'f"C{n}" if len(runs) <= 10 else many(n)',
        'f"C{n}"',
        IN + "several_runs_are_drawn_where_they_share_a_metric_each_in_its_colour",
    ),
    # check_up.py
    (
        CHECK,
        "spearmanr(pairs).statistic",
        "np.corrcoef(np.array(pairs).T)[0, 1]",
        IN_CHECK + "figures_of_a_hand_made_table",
    ),
    (
        CHECK,
        "mean([gap > 0.2 for gap in gaps])",
        "mean([gap > 2 for gap in gaps])",
        IN_CHECK + "figures_of_a_hand_made_table",
    ),
    (
        CHECK,
        'if c["hard"] is not None and not c["eval_failed"]] for group in groups]\n    good = [group',
        'if c["hard"] is not None] for group in groups]\n    good = [group',
        IN_CHECK + "its_figures_are_the_trainers_own",
    ),
    (
        CHECK,
        '"hard_plus_gtprob_separated": (2,',
        '"hard_plus_gtprob_separated": (1,',
        IN_CHECK + "its_figures_are_the_trainers_own",
    ),
    (
        CHECK,
        "rounds[max(rounds)]",
        "rounds[min(rounds)]",
        IN_CHECK + "a_run_is_checked_by_its_newest_candidates_and_its_own_constants",
    ),
    (CHECK, "constants |= dict(", "dict(", IN_CHECK + "a_file_of_lists_is_read_and_a_reward_can_be_given"),
    # examples/vllm_server.py
    (
        VLLM,
        ".exp().clamp(max=CAP)",
        ".exp()",
        IN_VLLM + "tokens_that_the_server_found_less_likely_weigh_more_up_to_the_cap",
    ),
    (
        VLLM,
        "(batch.logprobs - batch.server_logprobs)[rows",
        "(batch.server_logprobs - batch.logprobs)[rows",
        IN_VLLM + "tokens_that_the_server_found_less_likely_weigh_more_up_to_the_cap",
    ),
    (
        VLLM,
        "return losses * weight,",
        "return losses,",
        IN_VLLM + "tokens_that_the_server_found_less_likely_weigh_more_up_to_the_cap",
    ),
    (
        VLLM,
        "        self.is_stale = True\n        return",
        "        return",
        IN_VLLM + "the_server_has_each_steps_weights_and_every_prompt_its_request",
    ),
]
