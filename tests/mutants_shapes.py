"""Mutants of data/make_shapes.py and examples/vqa_world.py."""

SHAPES, EXAMPLE = "data/make_shapes.py", "examples/vqa_world.py"
TESTS = "tests/test_shapes.py::test_"
LEARNS = TESTS + "the_reader_learns_on_what_rce_icl_shows_it"

MUTANTS = [
    (
        SHAPES,
        "WORDS[value][languages[frame]]",
        "WORDS[value][0]",
        TESTS + "an_answer_is_the_value_in_the_language_of_the_frame_and_the_phrasing_of_the_sort",
    ),
    (
        SHAPES,
        "losange losango",
        "losange losange",
        TESTS + "no_two_languages_or_values_share_a_word_as_the_marking_compares_them",
    ),
    (
        SHAPES,
        "rng.sample(PHRASINGS, len(PHRASINGS))",
        "rng.choices(PHRASINGS, k=len(PHRASINGS))",
        TESTS + "frame_and_sort_decide_how_most_annotators_write_and_no_one_else_writes_so",
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
