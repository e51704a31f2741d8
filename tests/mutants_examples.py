"""Mutants of examples/. The program that plants them is mutants.py."""

E = "examples/"
T = "tests/test_examples.py::test_"
REWARDS = T + "own_rewards_by_hand_and_in_a_run"
SCORE = T + "the_whole_score_is_the_product_of_its_parts"
TOKENS = T + "token_rewards_come_where_each_right_line_ends"
MUON = T + "muon_steps_the_matrices_and_adamw_the_rest_at_one_rate_and_both_resume"
OFFLOADED = T + "offloaded_adamw_trains_the_weights_of_plain_adamw"
MOMENTS = "tests/test_pretend_gpu.py::test_the_examples_offloaded_optimizer_steps_as_adamw_and_resumes"
CURRICULUM = T + "the_curriculum_takes_problems_with_few_steps_first_and_each_once"
CALCULATOR = T + "the_calculator_answers_each_sum_and_the_run_has_its_turns"
DISTILLATION = T + "distillation_follows_the_teacher_and_names_a_missing_one"
METRIC = T + "a_metric_a_panel_a_schedule_and_an_end_by_kl"
DISTINCT = T + "distinct_responses_are_counted_in_each_group"
TABLE = T + "wandb_offline_writes_a_real_run_whose_table_has_the_samples"
PAIRS = T + "dpo_trains_on_the_best_and_worst_candidates_that_rce_mined"
AFTER = T + "grpo_goes_on_from_the_best_policy_of_rce"
VARIANT = T + "a_variant_has_all_that_its_trainer_needs"
NO_JUDGE = T + "without_a_judge_the_program_ends_before_it_loads_anything"
NOTEBOOK = T + "the_notebooks_cells_run_in_order_and_its_outputs_are_of_a_run"

MUTANTS = [
    (E + "own_reward.py", "re.MULTILINE)", "0)", REWARDS),
    (E + "own_reward.py", "sum(right) / max(1, len(right))", "float(all(right))", REWARDS),
    (E + "own_reward.py", "(as_many_lines, 0.0)", "(as_many_lines, 0.1)", REWARDS),
    (E + "whole_score.py", "return quality * short * varied", "return quality * short", SCORE),
    (E + "whole_score.py", "len(set(lines)) / len(lines)", "len(set(lines))", SCORE),
    (E + "token_rewards.py", "values[-1] += right", "values[0] += right", TOKENS),
    (E + "token_rewards.py", "== int(found[4])", "!= int(found[4])", TOKENS),
    (E + "judge.py", "        sys.exit(2)\n", "", NO_JUDGE),
    (
        E + "judge.py",
        'os.environ.get("JUDGE_URL", ',
        "str(",
        T + "a_run_asks_the_judge_about_each_response",
    ),
    (
        E + "custom_loss.py",
        "losses + COEF * too_long",
        "losses - 0 * too_long",
        T + "the_custom_loss_moves_the_policy_elsewhere",
    ),
    (
        E + "top_p.py",
        "grpo.sampling_logprobs = sampling_logprobs\n",
        "",
        T + "top_p_is_what_is_sampled_and_what_is_trained",
    ),
    (E + "muon.py", " and parameter not in ends", "", MUON),
    (E + "muon.py", 'grpo.set_learning_rate(self.optimizers["muon"], rate)', "pass", MUON),
    (E + "muon.py", '"muon": torch.optim.Muon(matrices', '"muon": torch.optim.Muon(matrices[1:]', MUON),
    (E + "offloaded_adamw.py", "grpo.make_optimizer = make_optimizer\n", "", OFFLOADED),
    (E + "offloaded_adamw.py", "        self.param_groups = all_groups\n", "", MOMENTS),
    (E + "curriculum.py", "        order.sort(key=lambda i: difficulty(rows[i]))\n", "", CURRICULUM),
    (
        E + "curriculum.py",
        "torch.randperm(len(rows), generator=seeded)",
        "torch.arange(len(rows))",
        CURRICULUM,
    ),
    (E + "curriculum.py", "grpo.next_rows = next_rows\n", "", CURRICULUM),
    (E + "turns.py", "'-': a - b", "'-': b - a", CALCULATOR),
    (E + "turns.py", 're.findall(r"^(', 're.findall(r"(', CALCULATOR),
    (E + "turns.py", "grpo.ENVIRONMENT = calculator\n", "", CALCULATOR),
    (E + "distillation.py", '("exact_answer", 0.0)', '("exact_answer", 1.0)', DISTILLATION),
    (E + "distillation.py", "and not teacher.exists()", "and False", DISTILLATION),
    (E + "own_metric.py", "self.run.is_stopped = True", "pass", METRIC),
    # a stop is kept by the checkpoint, and ends what is forgotten with reset_best()
    ("grpo/grpo.py", '"evaluation", "is_stopped")', '"evaluation")', METRIC),
    ("grpo/grpo.py", "return self.is_stopped or self.step >=", "return self.step >=", METRIC),
    (E + "own_metric.py", "COOLDOWN * total", "COOLDOWN", METRIC),
    (E + "own_metric.py", "grpo.PLOT_PANELS += ", "panels = ", METRIC),
    (E + "own_metric.py", "set(batch.responses[i : i + grpo.GROUP_SIZE])", "set(batch.responses)", DISTINCT),
    (E + "wandb_samples.py", 'os.environ.setdefault("WANDB_MODE", "offline")', "pass", TABLE),
    (E + "wandb_samples.py", "splitlines()[-100:]", "splitlines()[-1:]", TABLE),
    (E + "dpo_from_candidates.py", "    if not candidates.exists():\n", "    if True:\n", PAIRS),
    (E + "dpo_from_candidates.py", "        sys.exit(code)", "        pass", PAIRS),
    (E + "dpo_from_candidates.py", 'run("rce/dpo.py", *SHARED, data, ', 'run("rce/dpo.py", ', PAIRS),
    (E + "grpo_after_rce.py", 'run("grpo/grpo.py", *SHARED, actor, ', 'run("grpo/grpo.py", *SHARED, ', AFTER),
    (E + "grpo_after_rce.py", 'run("grpo/grpo.py", *SHARED, actor, ', 'run("grpo/grpo.py", actor, ', AFTER),
    (E + "own_variant.py", 'and f"data/{p.name}/" in text]', 'and p.name == "rec"]', VARIANT),
    (
        E + "own_variant.py",
        'and f"data/{p.name}/" in text]',
        'and p.name == "tiny"]',
        "tests/test_examples.py::test_a_variant_brings_the_data_that_its_trainer_names",
    ),
    (E + "own_variant.py", "    if folder.exists():\n", "    if False:\n", VARIANT),
    (E + "first_run.ipynb", 'grpo.RESUME = \\"yes\\"', 'grpo.RESUME = \\"no\\"', NOTEBOOK),
]
