"""Mutants of readers of images, of vectors of images, and of data/make_vqa.py."""

ICL, VQA = "rce/rce_icl.py", "data/make_vqa.py"
VISION = "tests/test_vision.py::test_"
ALONE = VISION + "gold_probabilities_of_a_batch_are_those_of_each_prompt_read_alone_token_by_token"
JOINED = VISION + "vectors_of_images_and_texts_are_joined_as_the_constant_says"
OFFICIAL = VISION + "official_files_become_rows_that_the_trainer_reads"

MUTANTS = [
    (
        ICL,
        "for row in (*demonstrations, query) if row",
        "for row in (query, *demonstrations) if row",
        VISION + "the_images_go_to_the_processor_in_the_order_of_the_texts[llava]",
    ),
    (ICL, "return {}  # Qwen's", "return super().position_ids(mask)  # Qwen's", ALONE + "[qwen-True]"),
    (
        ICL,
        "[asked[number] for number in numbers]",
        "asked[: len(numbers)]",
        ALONE + "[llava-True]",
    ),
    (
        ICL,
        """            if example["image"]:
                content.append({"type": "image", "text": self.processor.image_token})
            content.append({"type": "text", "text": text})""",
        """            content.append({"type": "text", "text": text})
            if example["image"]:
                content.append({"type": "image", "text": self.processor.image_token})""",
        VISION + "images_stand_before_the_texts_they_belong_to[llava]",
    ),
    (
        ICL,
        "    if scale < 1:\n",
        "    if scale > 1:\n",
        VISION + "a_large_image_is_made_smaller_and_a_small_one_stays",
    ),
    (
        ICL,
        "max(1, int(side * scale))",
        "int(side * scale)",
        VISION + "a_large_image_is_made_smaller_and_a_small_one_stays",
    ),
    (
        ICL,
        "if self.processor.image_token in text:",
        "if not text:",
        VISION + "the_words_that_stand_for_an_image_are_refused_in_the_data[llava]",
    ),
    (
        ICL,
        "self.check_length(prompt_length + MAX_ANSWER_TOKENS)",
        "pass",
        VISION + "more_images_than_the_context_holds_is_one_message[llava]",
    ),
    (
        ICL,
        'if with_images := [demo for demo in self.demos if demo["image"]]:',
        "if with_images := []:",
        VISION + "images_and_a_reader_of_texts_alone_are_refused",
    ),
    (ICL, "image[places] = scaled(", "image[: len(places)] = scaled(", JOINED + "[clip]"),
    (ICL, "np.hstack([text, image])", "np.hstack([image, text])", JOINED + "[clip]"),
    (
        ICL,
        'text = scaled(getattr(text, "pooler_output", text).cpu().numpy())',
        'text = getattr(text, "pooler_output", text).cpu().numpy()',
        JOINED + "[clip]",
    ),
    (
        ICL,
        "zip(examples, scaled(array)):",
        "zip(examples, array):",
        VISION + "vectors_of_a_file_are_those_of_its_rows",
    ),
    (
        ICL,
        "array.ndim != 2 or len(array) < len(examples)",
        "array.ndim != 2",
        VISION + "vectors_that_do_not_fit_the_rows_are_refused",
    ),
    (
        ICL,
        "if sizes[0] != sizes[1]:",
        "if not sizes:",
        VISION + "vectors_that_do_not_fit_the_rows_are_refused",
    ),
    (
        ICL,
        "(OSError, SyntaxError, Image.DecompressionBombError)",
        "(OSError, SyntaxError)",
        VISION + "an_image_too_large_to_open_names_its_row",
    ),
    (
        ICL,
        "if not Path(image).is_file():",
        "if not image:",
        VISION + "a_row_without_its_image_is_named",
    ),
    (
        VQA,
        "(OSError, SyntaxError, Image.DecompressionBombError)",
        "(OSError, SyntaxError)",
        VISION + "what_is_wrong_with_official_files_is_one_message",
    ),
    (VQA, "names[int(digits)] = path", "names.setdefault(0, path)", OFFICIAL),
    (VQA, '{row["question_id"]: row for row', '{row["image_id"]: row for row', OFFICIAL),
    (VQA, 'answer["answer"] if', 'answer["raw_answer"] if', OFFICIAL),
    (
        VQA,
        "        check_image(path, where)\n",
        "",
        VISION + "what_is_wrong_with_official_files_is_one_message",
    ),
]
