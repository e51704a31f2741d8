"""Mutants that undo what was mended in grpo_rec.py and ppo_rag.py after an audit. mutants.py plants them."""

REC, RAG = "grpo/grpo_rec.py", "ppo/ppo_rag.py"
IN_REC = "tests/test_rec.py::test_"
IN_RAG = "tests/test_rag.py::test_"
PATIENCE = IN_REC + "the_patience_of_sft_counts_passes_through_the_data"
EQUAL = IN_REC + "equal_scores_have_no_advantage"
DIGITS = IN_REC + "advantages_of_large_scores_keep_their_digits"
CONSTANT = IN_REC + "a_constant_reward_moves_no_weight"
LOSSES = IN_REC + "losses_equal_those_of_float64_written_from_the_papers"
CONSTRAINED = IN_REC + "constrained_log_probabilities_equal_float64_on_random_catalogues"
LISTS = IN_REC + "hr_and_ndcg_equal_float64_on_random_lists"
BAD_DATA = IN_REC + "bad_data_is_one_sentence"
NOT_FIT = IN_REC + "constants_that_do_not_fit_are_one_sentence"
SASREC = IN_REC + "a_sasrec_file_of_another_kind_is_one_sentence"
ELSEWHERE = IN_REC + "a_run_goes_on_in_another_folder_with_all_that_is_its_own"
BASE = IN_REC + "the_base_of_an_adapter_is_never_one_of_another_folder"
SHARE = IN_REC + "a_reward_of_your_own_has_no_share_of_the_best_value"
WHITEN = IN_RAG + "equal_advantages_are_whitened_to_zero"
PAPER = IN_RAG + "losses_equal_those_of_float64_written_from_the_paper"
JOINT = IN_RAG + "log_probabilities_entropy_and_metrics_of_a_step_equal_float64"
REPLACED = IN_RAG + "a_part_that_is_replaced_gets_answers_of_its_own"
PARTS = IN_RAG + "parts_of_an_own_reward_that_cannot_be_are_refused"
OWN = IN_RAG + "a_reward_of_your_own_takes_over"
ERRORS = IN_RAG + "errors_are_one_sentence"
HOTPOT = IN_RAG + "a_file_that_is_not_hotpots_is_refused"
FINISHED = IN_RAG + "a_finished_run_goes_on_in_another_folder_by_its_best_policy"

MUTANTS = [
    # patience of SFT
    (REC, "        elif self.state.sft_judged < self.state.epoch:\n", "        else:\n", PATIENCE),
    (
        REC,
        "            self.state.sft_waited = 0\n            self.state.sft_judged = self.state.epoch\n",
        "            self.state.sft_waited = 0\n",
        PATIENCE,
    ),
    (
        REC,
        "            self.state.sft_waited += 1\n            self.state.sft_judged = self.state.epoch\n",
        "            self.state.sft_waited += 1\n",
        PATIENCE,
    ),
    (REC, "            self.state.sft_waited = 0\n", "", PATIENCE),
    # equal scores, large scores
    (REC, "    shifted = groups - groups[:, :1]\n", "    shifted = groups\n", EQUAL),
    (REC, "    shifted = groups - groups[:, :1]\n", "    shifted = groups - 0 * groups[:, :1]\n", CONSTANT),
    (REC, "    shifted = groups - groups[:, :1]\n", "    shifted = groups - groups[:, :1] * 0\n", DIGITS),
    (REC, "else (scores - scores[0]).std()", "else shifted.std()", DIGITS),
    (RAG, "    if (x == x[0]).all():  # their", "    if False:  # their", WHITEN),
    (
        RAG,
        "(x - x.mean()) * torch.rsqrt(x.var(unbiased=False) + 1e-8)",
        "(x - x.mean()) * torch.rsqrt((x ** 2).mean() + 1e-8)",
        IN_RAG + "advantages_are_whitened_as_in_float64",
    ),
    (RAG, "if WHITEN_ADVANTAGES and N_STEPS == 1:", "if False:", ERRORS),
    # formulas
    (
        REC,
        "log_ratio = log_ratio.mean(1, keepdim=True)",
        "log_ratio = log_ratio.median(1, keepdim=True)[0]",
        LOSSES,
    ),
    (
        REC,
        "ratio.clamp(1 - clip_range, 1 + clip_range_high)",
        "ratio.clamp(1 - clip_range_high, 1 + clip_range)",
        LOSSES,
    ),
    (REC, "k3 = (-log_ratio).exp() - 1 + log_ratio", "k3 = log_ratio.exp() - 1 - log_ratio", LOSSES),
    (
        REC,
        "scores = logits.float().gather(-1, codes) / temperature",
        "scores = logits.float().gather(-1, codes) * temperature",
        CONSTRAINED,
    ),
    (
        REC,
        "allowed = step < self.count[level][nodes]",
        "allowed = step <= self.count[level][nodes]",
        CONSTRAINED,
    ),
    (
        REC,
        "discounts = 1 / torch.log2(torch.arange(min(k, lists.shape[1])) + 2.0)",
        "discounts = 1 / torch.log(torch.arange(min(k, lists.shape[1])) + 2.0)",
        LISTS,
    ),
    (
        REC,
        "return ((lists[:, :k] == targets[:, None]) * discounts)",
        "return ((lists[:, :k] == targets[:, None]) * discounts[0])",
        LISTS,
    ),
    (
        RAG,
        "ratio.clamp(1 - clip_range, 1 + clip_range)",
        "ratio.clamp(1 / (1 + clip_range), 1 + clip_range)",
        PAPER,
    ),
    (
        RAG,
        "clipped = old_values + (values - old_values).clamp(",
        "clipped = returns + (values - returns).clamp(",
        PAPER,
    ),
    (RAG, ".clamp(-5, 5)", ".clamp(-2, 2)", JOINT),
    (
        RAG,
        "entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)",
        "entropy = -(all_logprobs.exp() * all_logprobs).mean(-1)",
        JOINT,
    ),
    (RAG, '"approx_kl": (ratio - 1 - log_ratio)', '"approx_kl": (ratio - 1 + log_ratio)', JOINT),
    (
        REC,
        "kl = kl_loss(logprobs, batch.ref_logprobs[rows])",
        "kl = kl_loss(batch.ref_logprobs[rows], logprobs)",
        IN_REC + "each_constant_of_the_loss_is_handed_to_its_place",
    ),
    # rows, files and constants of grpo_rec
    (REC, "if not record[name].strip():", "if False:", BAD_DATA),
    (REC, "if not record[name].strip():", "if not record[name]:", BAD_DATA),
    (REC, "if not isinstance(items, (list, tuple)) or not items:", "if not items:", BAD_DATA),
    (REC, "if len(fields) < 3 or item not in number:", "if item not in number:", BAD_DATA),
    (REC, "        item = fields[-1].strip()\n", "        item = fields[2].strip()\n", BAD_DATA),
    (REC, "            if item in index:\n", "            if False:\n", BAD_DATA),
    (
        REC,
        "            weights.append(weight)\n",
        "            weights.append(1)\n",
        NOT_FIT,
    ),
    (REC, 'if name in ("value", "rule", "ranking",', 'if name in ("value", "ranking",', NOT_FIT),
    (REC, 'set(getattr(arrays, "files", ())):', "set(arrays.files):", SASREC),
    (REC, 'if not {"users", "items", "histories", "trained_on"} <=', 'if not {"users"} <=', SASREC),
    (
        REC,
        "        if isinstance(history, str):\n",
        "        if False:\n",
        IN_REC + "a_text_is_one_item_not_its_letters",
    ),
    (REC, 'has_value = "reward/value" in figure', "has_value = True", SHARE),
    (REC, 'if has_value and possible and possible["value"] > 0:', "if has_value and possible:", SHARE),
    (
        REC,
        "if self.state.cursor and len(self.state.order) != len(rows):",
        "if False:",
        IN_REC + "rows_that_changed_within_a_pass_are_refused",
    ),
    (
        REC,
        "if self.state.cursor and len(self.state.order) != len(rows):",
        "if self.state.order is not None and len(self.state.order) != len(rows):",
        IN_REC + "rows_that_changed_within_a_pass_are_refused",
    ),
    # another folder
    (
        REC,
        "self.best_folders = [self.run.checkpoint.parent] if self.run.checkpoint else []",
        "self.best_folders = [self.run.folder]",
        ELSEWHERE,
    ),
    (REC, "            self.best_folders.append(source)\n", "            pass\n", ELSEWHERE),
    (
        REC,
        'if best.exists() and json.loads(best.read_text())["step"] <= self.run.step:',
        "if best.exists():",
        ELSEWHERE,
    ),
    (
        REC,
        'if self.state.stage == "rl" and (source / "sft").exists() and rank() == 0:',
        "if False:",
        ELSEWHERE,
    ),
    (
        REC,
        '            archive_old_run([*self.run.folder.glob("sft")], OUTPUT_DIR, self.run.log)\n',
        '            shutil.rmtree(self.run.folder / "sft", ignore_errors=True)\n',
        ELSEWHERE,
    ),
    (
        REC,
        '            with without_adapter(self.reference):\n                lists["sft"]',
        '            if True:\n                lists["sft"]',
        ELSEWHERE,
    ),
    (
        REC,
        "run_folder = checkpoint.parents[1] if checkpoint else Path(OUTPUT_DIR)",
        "run_folder = Path(OUTPUT_DIR)",
        BASE,
    ),
    (REC, "        if not path.exists():\n            todo", "        if False:\n            todo", BASE),
    (
        RAG,
        "        if best.is_dir():  # it is missing where",
        "        if True:  # it is missing where",
        FINISHED,
    ),
    (RAG, "self.best = self.load_best(math.inf)", "self.best = None", FINISHED),
    (RAG, '["step"] > last_step:', '["step"] > math.inf:', FINISHED),
    # what ppo_rag is given
    (RAG, "TITLE_WEIGHT, RERANK_DEPTH, sources]", "TITLE_WEIGHT, RERANK_DEPTH]", REPLACED),
    (
        RAG,
        'components = [qa, qa.retriever, qa.generator, getattr(qa, "reranker", None)]',
        'components = [qa.retriever, qa.generator, getattr(qa, "reranker", None)]',
        REPLACED,
    ),
    (
        RAG,
        'components = [qa, qa.retriever, qa.generator, getattr(qa, "reranker", None)]',
        "components = [qa, qa.retriever, qa.generator]",
        REPLACED,
    ),
    (
        RAG,
        "source = ast.unparse(ast.parse(textwrap.dedent(source)))",
        "pass",
        IN_RAG + "a_comment_in_a_part_leaves_its_answers_in_use",
    ),
    (
        RAG,
        'if name in ("reward", "cost", "seconds", *_ACTION) or name in others:',
        'if name in ("cost", "seconds", *_ACTION) or name in others:',
        PARTS,
    ),
    (
        RAG,
        'if name in ("reward", "cost", "seconds", *_ACTION) or name in others:',
        'if name in ("reward", "cost", "seconds"):',
        PARTS,
    ),
    (
        RAG,
        'check_scores(f"reward_parts[{name!r}]", values, len(responses))',
        "torch.as_tensor(values)",
        PARTS,
    ),
    (
        RAG,
        'table.shown = ["reward", *reward_parts, "cost"]',
        'table.shown = ["reward", "em", "f1", "cost"]',
        OWN,
    ),
    (
        RAG,
        "predicted.reshape(mean.shape).argmax(1)",
        "predicted.argmax(1)",
        IN_RAG + "one_action_has_its_table",
    ),
    (
        RAG,
        "isinstance(x, number_type) and least <= x < math.inf",
        "isinstance(x, number_type) and least <= x",
        ERRORS,
    ),
    (RAG, "isinstance(x, number_type) and least <= x < math.inf", "least <= x < math.inf", ERRORS),
    (
        RAG,
        'if "" in map(str.strip, texts):',
        "if not any(map(str.strip, texts)):",
        IN_RAG + "odd_input_is_one_sentence_and_a_run_stays",
    ),
    (RAG, "        if not isinstance(records, list):\n", "        if False:\n", HOTPOT),
    (
        RAG,
        "                if not isinstance(title, str):\n",
        "                if False:\n",
        HOTPOT,
    ),
    (
        RAG,
        "if (policy.config.inputs, policy.config.actions) != (len(_OBSERVATION), actions):",
        "if policy.config.actions != actions:",
        IN_RAG + "resuming_with_other_observations_is_refused",
    ),
    (REC, "return pass_is_over and 0 < SFT_PATIENCE", "return 0 < SFT_PATIENCE", PATIENCE),
    (
        REC,
        "num_codes = batch.response_mask[to_device(rows, self.device)].sum()",
        "num_codes = batch.response_mask.sum()",
        "tests/test_rec.py::test_the_gradient_of_a_mini_batch_equals_float64_of_rows_read_alone",
    ),
    (
        REC,
        "losses.sum() / num_codes)",
        "losses.sum() / batch.response_mask[index].sum())",
        "tests/test_rec.py::test_the_gradient_of_a_mini_batch_equals_float64_of_rows_read_alone",
    ),
    (
        REC,
        "micro, TEMPERATURE)\n            losses",
        "micro, 1.0)\n            losses",
        "tests/test_rec.py::test_the_gradient_of_a_mini_batch_equals_float64_of_rows_read_alone",
    ),
    (RAG, "self.best = self.load_best(run.step)", "self.best = None", FINISHED),
]
