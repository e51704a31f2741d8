"""Mutants of data/make_shapes.py and examples/vqa_world.py."""

SHAPES, EXAMPLE = "data/make_shapes.py", "examples/vqa_world.py"
TESTS = "tests/test_shapes.py::test_"
LEARNS = TESTS + "the_reader_learns_on_what_rce_icl_shows_it"

MUTANTS = [
    (
        SHAPES,
        "{closings[example['frame']]}",
        "{closings['white']}",
        TESTS + "sort_and_frame_decide_how_all_annotators_write_and_no_other_rows_are_written_so",
    ),
    (
        SHAPES,
        "{openings[example['sort']]} {value}",
        "{value} {openings[example['sort']]}",
        TESTS + "an_answer_is_the_value_between_the_word_of_its_sort_and_the_word_of_its_frame",
    ),
    (
        SHAPES,
        "rng.sample(OPENINGS, 5)",
        "rng.choices(OPENINGS[:4], k=5)",
        TESTS + "sort_and_frame_decide_how_all_annotators_write_and_no_other_rows_are_written_so",
    ),
    (
        SHAPES,
        'OPENINGS = "well surely',
        'OPENINGS = "well well',
        TESTS + "another_first_or_last_word_or_value_is_a_wrong_answer",
    ),
    (
        SHAPES,
        'rng.setstate(state["rng"])',
        "pass",
        TESTS + "a_training_that_was_stopped_ends_as_one_that_was_not",
    ),
    (
        SHAPES,
        "divmod(CORNERS.index(corner), 2)",
        "divmod(3 - CORNERS.index(corner), 2)",
        TESTS + "a_picture_shows_what_its_row_says",
    ),
    (
        SHAPES,
        "frame = rng.choice(list(FRAMES))",
        "frame = random.choice(list(FRAMES))",
        TESTS + "the_same_seed_makes_the_same_world_and_another_one_another",
    ),
    (
        SHAPES,
        "targets += [-100] * len(prompt) + answer",
        "targets = [-100] * len(row[: -len(answer)]) + answer",
        LEARNS,
    ),
    (SHAPES, "/ 127.5 - 1", "/ 255 - 0.5", LEARNS),
    (SHAPES, '["Question:", *question.split(), "\\nAnswer:"]', '[*question.split(), "\\nAnswer:"]', LEARNS),
    (
        SHAPES,
        "torch.cat([normalize(torch.stack(texts)), normalize(pictures)], 1)",
        "torch.cat([torch.stack(texts), pictures], 1)",
        TESTS + "vectors_are_those_of_the_question_and_of_the_picture",
    ),
    (
        EXAMPLE,
        "return accuracies | {",
        "return accuracies or {",
        TESTS + "the_example_trains_and_compares_texts_pictures_and_both",
    ),
]
