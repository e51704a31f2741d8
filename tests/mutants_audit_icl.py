"""Mutants that undo what was mended in rce_icl.py and check_up.py after an audit. mutants.py plants them."""

ICL, CHECK = "rce/rce_icl.py", "tools/check_up.py"
IN_ICL = "tests/test_icl.py::test_"
IN_CHECK = "tests/test_check_up.py::test_"
IMAGES = IN_ICL + "vectors_are_made_anew_when_an_image_changes"
CODE = IN_ICL + "vectors_are_made_anew_when_the_embedders_code_changes"
FOLDER = IN_ICL + "vectors_are_made_anew_when_the_files_of_a_models_folder_change"
AFRESH = IN_ICL + "a_fresh_start_makes_the_vectors_of_an_own_embedder_again_and_a_resumed_one_does_not"
FLAT = IN_ICL + "advantages_of_equal_rewards_are_exactly_zero"
GRADIENTS = IN_ICL + "both_losses_have_the_gradient_of_each_list_read_alone_in_float64"
MARKED = IN_ICL + "lists_marked_by_another_reader_class_or_vectors_are_not_trained_on"
CHANGED = IN_ICL + "lists_marked_by_a_reader_that_has_changed_are_not_trained_on"
WEIGHTS = IN_ICL + "each_mode_weighs_its_hard_and_its_graded_part"
MENDED = IN_ICL + "what_a_user_can_mend_is_said_in_one_sentence"
ELSEWHERE = IN_ICL + "a_run_goes_on_in_another_folder_as_in_its_own"
REFUSED = IN_ICL + "another_folder_without_the_candidates_is_refused_before_anything_is_saved"
FIGURES = IN_CHECK + "its_figures_are_the_trainers_own"
A_SENTENCE = IN_CHECK + "what_cannot_be_checked_is_a_sentence"

MUTANTS = [
    # what vectors depend on
    (
        ICL,
        'answers, {image: file_digest(image)["sha256"] for image in images}]',
        "answers]",
        IMAGES,
    ),
    (
        ICL,
        '{image: file_digest(image)["sha256"] for image in images}]\n'
        '    facts += map(itemgetter("id", "text", "split", "image"), examples)\n',
        'sorted({file_digest(image)["sha256"] for image in images})]\n'
        '    facts += map(itemgetter("id", "text", "split"), examples)\n',
        IMAGES,
    ),
    (ICL, "name_of(make_embedder), source_of(make_embedder)]", "name_of(make_embedder)]", CODE),
    (ICL, "facts.append([name, source_of(value)])", "facts.append(name)", CODE),
    (ICL, "facts.append([name, value])", "facts.append(name)", CODE),
    (ICL, "{**named.globals, **named.nonlocals}", "{**named.globals}", CODE),
    (ICL, "        return inspect.getsource(thing)", "        return json_name(thing)", CODE),
    (ICL, "        if path.is_file():\n            facts", "        if False:\n            facts", FOLDER),
    (
        ICL,
        '[str(path.relative_to(folder)), file_digest(path)["sha256"]]',
        "[str(path.relative_to(folder)), path.stat().st_size]",
        FOLDER,
    ),
    (ICL, "afresh = self.resumed_from is None and STAGE", "afresh = False and STAGE", AFRESH),
    (
        ICL,
        "    if vectors.ndim != 2 or len(vectors) != len(rows) or not np.isfinite(vectors).all():",
        "    if vectors.ndim != 2 or len(vectors) != len(rows):",
        IN_ICL + "vectors_of_an_own_embedder_that_are_none_are_refused",
    ),
    (
        ICL,
        "    if vectors.ndim != 2 or len(vectors) != len(rows) or not np.isfinite(vectors).all():",
        "    if not np.isfinite(vectors).all():",
        IN_ICL + "vectors_of_an_own_embedder_that_are_none_are_refused",
    ),
    (
        ICL,
        '                row["id"] = f"test {row[\'id\']}"\n',
        "                pass\n",
        IN_ICL + "queries_of_two_files_of_one_name_are_told_apart",
    ),
    # what a reward is made of
    (ICL, '("soft", SOFT_WEIGHT), ("gt_prob", SOFT_WEIGHT)):', '("soft", SOFT_WEIGHT)):', WEIGHTS),
    (
        ICL,
        '("soft", SOFT_WEIGHT), ("gt_prob", SOFT_WEIGHT)):',
        '("soft", SOFT_WEIGHT), ("gt_prob", HARD_WEIGHT)):',
        WEIGHTS,
    ),
    (
        ICL,
        '            candidate["relevance"] = 0.0',
        "            pass",
        IN_ICL + "a_right_list_gets_nothing_for_relevance_though_hard_has_no_weight",
    ),
    (
        ICL,
        'if REWARD_MODE in ("soft_only", "hard_only", "hybrid") and',
        'if REWARD_MODE in ("soft_only",) and',
        MENDED,
    ),
    (
        ICL,
        'if REWARD_MODE in ("soft_only", "hard_only", "hybrid") and',
        'if REWARD_MODE in ("hard_only", "hybrid") and',
        MENDED,
    ),
    (ICL, 'and HYBRID_MIX_SCORE == "beam_score" and GRPO_EPOCHS and ON_POLICY:', "and False:", MENDED),
    (
        ICL,
        "                self.miner.add_logprobs(groups)\n",
        "                pass\n",
        IN_ICL + "fresh_lists_of_hybrid_have_the_log_probabilities_of_the_policy_that_drew_them",
    ),
    # advantages and losses
    (ICL, "    r = r - r[0]  #", "    #", FLAT),
    (
        ICL,
        "    r = r - r[0]  #",
        "    r = r - r[0] + 0.7  #",
        IN_ICL + "equal_rewards_of_fresh_lists_move_no_weight",
    ),
    (
        ICL,
        "    if len(r) < 2:\n        return r\n",
        "",
        IN_ICL + "advantages_are_normalised_once_and_equal_rewards_give_none",
    ),
    (
        ICL,
        "votes.new_zeros(*taken.shape[:2], int(rows.max()) + 1)",
        "torch.zeros(*taken.shape[:2], int(rows.max()) + 1)",
        IN_ICL + "the_policy_reads_in_float64_what_it_reads_in_float32",
    ),
    (
        ICL,
        "policy_loss = (losses * batch.present).sum() / batch.present.sum()",
        "policy_loss = losses.mean()",
        GRADIENTS,
    ),
    (
        ICL,
        "kl = (choice_kl(all_logprobs, ref_logprobs) * chosen).sum() / chosen.sum()",
        "kl = choice_kl(all_logprobs, ref_logprobs).mean()",
        GRADIENTS,
    ),
    (ICL, "ratio.clamp(1 - clip_range, 1 + clip_range)", "ratio.clamp(1 - clip_range, 1.28)", GRADIENTS),
    (ICL, "return -(weights * logprobs).sum(1).mean()", "return -(weights * logprobs).mean()", GRADIENTS),
    (ICL, "return (chosen * (pointers >= 0)).sum(2)", "return (chosen * (pointers >= 0)).mean(2)", GRADIENTS),
    # marks
    (ICL, '"reader class": name_of(reader), "embedder"', '"embedder"', MARKED + "[reader]"),
    (ICL, ', "embedder": name_of(make_embedder)}', "}", MARKED + "[embedder]"),
    (ICL, "facts = [list(map(source_of, reader_class.__mro__[:-1])), f", "facts = [f", CHANGED + "[class]"),
    (
        ICL,
        "list(map(source_of, reader_class.__mro__[:-1])), f",
        "source_of(reader_class), f",
        CHANGED + "[base]",
    ),
    (ICL, "[:-1])), folder_facts(name)]", "[:-1]))]", CHANGED + "[files]"),
    (ICL, '    facts |= {"MAX_IMAGE_PIXELS": MAX_IMAGE_PIXELS, ', "    facts |= {", CHANGED + "[pixels]"),
    (
        ICL,
        'return name if thing.__module__ == __name__ else f"{name} of another file"',
        "return name",
        MARKED,
    ),
    (ICL, "[key for key in facts if key in mined_with]", "[*facts]", MARKED),
    (
        ICL,
        "    if len(values) != len(asked):\n        counts",
        "    if False:\n        counts",
        IN_ICL + "a_reader_that_gives_too_few_values_or_odd_ones_is_an_error",
    ),
    (
        ICL,
        "ask_reader(self.reader.answers, list(new.values()))",
        "self.reader.answers(list(new.values()))",
        IN_ICL + "a_reader_that_gives_too_few_answers_in_evaluation_is_an_error",
    ),
    (
        ICL,
        "    if not isinstance(text, str):\n",
        "    if False:\n",
        IN_ICL + "a_reader_that_gives_too_few_values_or_odd_ones_is_an_error",
    ),
    (
        ICL,
        "    if isinstance(value, str) or not 0 <= value <= 1:",
        "    if not 0 <= value <= 1:",
        IN_ICL + "a_reader_that_gives_too_few_values_or_odd_ones_is_an_error",
    ),
    (
        ICL,
        "self.probability(votes, rewards.normalise_vqa(gold))",
        "self.probability(votes, gold)",
        IN_ICL + "votes_count_answers_that_are_written_differently_as_one",
    ),
    (
        ICL,
        '            answer = rewards.normalise_vqa(demo["answer"])',
        '            answer = demo["answer"]',
        IN_ICL + "votes_count_answers_that_are_written_differently_as_one",
    ),
    (
        ICL,
        'answers = list(map(rewards.normalise_vqa, column(demos, "answer")))',
        'answers = column(demos, "answer")',
        IN_ICL + "votes_count_answers_that_are_written_differently_as_one",
    ),
    (
        ICL,
        'if self.train_rows and not any(column(self.train_rows, "held_out")):',
        "if False:",
        IN_ICL + "a_run_none_of_whose_queries_trains_the_weights_says_so",
    ),
    (
        ICL,
        'max(c["hard"] if c["soft"] is None else c["soft"] for',
        'max(c["soft"] or 0.0 for',
        IN_ICL + "the_oracle_of_lists_that_are_marked_right_or_wrong_alone_is_of_those_marks",
    ),
    # a run that goes on in another folder
    (ICL, "write_atomically(path, lambda tmp: shutil.copy(source, tmp))", "pass", ELSEWHERE),
    (ICL, "            if self.state.candidates:\n                self.find_candidates()\n", "", REFUSED),
    # check_up.py
    (CHECK, 'float(constants["HARD_WEIGHT"]) * c["hard"]', 'c["hard"]', FIGURES),
    (CHECK, '        weight = float(constants["SOFT_WEIGHT"])\n', "        weight = 1.0\n", FIGURES),
    (
        CHECK,
        '    "SOFT_WEIGHT": 1.0,\n',
        "",
        IN_CHECK + "the_weights_of_a_run_are_those_of_its_file_or_given",
    ),
    (CHECK, 'r if c["hard"] else r + 0.1 * c["relevance"] for', 'r + 0.1 * c["relevance"] for', FIGURES),
    (
        CHECK,
        "graded_by = MODES[reward_mode][1] if soft_weight else None",
        "graded_by = MODES[reward_mode][1]",
        IN_CHECK + "a_mark_that_has_no_weight_does_not_make_the_verdict",
    ),
    (
        CHECK,
        '        if constants["SKIP_FALLBACK"]:',
        "        if False:",
        IN_CHECK + "marks_of_the_sources_fallback_are_left_out_where_the_run_leaves_them_out",
    ),
    (
        CHECK,
        '        if constants["SKIP_FALLBACK"]:',
        "        if True:",
        IN_CHECK + "marks_of_the_sources_fallback_are_left_out_where_the_run_leaves_them_out",
    ),
    (
        CHECK,
        "scores = [c[column(name)] for c in candidates]",
        "scores = [c[column(name)] or 0.0 for c in candidates]",
        A_SENTENCE,
    ),
    (CHECK, "TypeError, AttributeError) as error:  #", "TypeError) as error:  #", A_SENTENCE),
    (CHECK, "        except ValueError:\n", "        except KeyError:\n", A_SENTENCE),
    (CHECK, "(OSError, ValueError, LookupError, TypeError) as error:\n", "OSError as error:\n", A_SENTENCE),
    (ICL, "if not path.exists() or (afresh and of_your_own):", "if not path.exists():", AFRESH),
    (
        ICL,
        "if not path.exists() or (afresh and of_your_own):",
        "if not path.exists() or of_your_own:",
        AFRESH,
    ),
    (ICL, "if not path.exists() or (afresh and of_your_own):", "if not path.exists() or afresh:", AFRESH),
    (ICL, 'if self.state.stage == "grpo" and not (run.folder / "rce").exists():', "if False:", ELSEWHERE),
    (
        ICL,
        "partial(self.run.save_model, self.reference)",
        "partial(self.run.save_model, self.policy)",
        ELSEWHERE,
    ),
    (
        ICL,
        'if not run.stop_signal and not (run.folder / "best").exists():',
        "if False:",
        "tests/test_icl.py::test_a_run_whose_rce_has_ended_is_tested_in_another_folder",
    ),
]
