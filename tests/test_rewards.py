import math
import time

import pytest

import rewards


@pytest.mark.parametrize(
    "text, answer",
    [
        ("2+2=4\n#### 4", "4"),
        ("####4", "4"),
        ("#### -4", "-4"),
        ("#### 1,234", "1,234"),
        ("#### 0", "0"),
        ("#### $5.50 ", "$5.50"),
        ("#### 4\n#### 5", "5"),  # the last one counts
        ("####\n5", None),
        ("#### ", None),
        ("", None),
        ("the answer is 4", None),
        ("# 4", None),
        (r"so \boxed{7}", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{7", None),
        (r"\boxed{}", None),
        (r"\boxed{7} then \boxed{8}", "8"),
        (r"\boxed{7} #### 8", "8"),
        (r"#### 8 so \boxed{7}", "7"),
        (r"so $\boxed 7$", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed{7} or \fbox{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxedx{7}", None),
        (r"\boxed{5}, written in \boxed as asked", "5"),
        (r"so \boxed -7.", "-7"),
    ],
)
def test_final_answer_reads_what_is_stated_and_nothing_else(text, answer):
    assert rewards.final_answer(text) == answer


@pytest.mark.parametrize(
    "answer, gold, equal",
    [
        ("4", "4", True),
        ("4.0", "4", True),
        ("04", "4", True),
        ("-4", "4", False),
        ("+4", "4", True),
        ("\u22124", "-4", True),
        ("-$4", "-4", True),
        ("0", "0", True),
        ("-0", "0", True),
        ("0", "", False),
        ("", "0", False),
        ("", "", False),
        (None, None, False),
        (None, "0", False),
        ("0", None, False),
        ("1,234", "1234", True),
        ("1,2", "12", False),
        ("1.2.3", "1.2", False),
        ("/1", "1", False),
        ("-/2", "2", False),
        ("12.", "12", True),
        (".5", "0.5", True),
        ("1/2", "0.5", True),
        ("1/0", "1", False),
        ("12 apples", "12", True),
        ("12 13", "12", False),
        ("5%", "5", True),
        ("2x+1", "2", False),
        ("12-3", "12", False),
        ("12-x", "12", False),
        ("5*x", "5", False),
        ("1e5", "1", False),
        ("41", "4", False),
        ("4", "41", False),
        ("four", "4", False),
        ("Paris", "Paris", True),
        ("Paris", "London", False),
        ("\u0664", "4", False),
        (r"\frac{1}{2}", "0.5", True),
        ("3^2", "9", True),
        (r"(x+1)^2", "x^2+2x+1", True),
        (r"\frac{1}{3}", "0.5", False),
        ("2x", "2", False),
        ("2x", "2y", False),
        ("2ab", "2", False),
        ("2x", "2 x", True),
        ("5 million", "5", True),
        ("5 million", "5 thousand", False),
        ("4 quarters", "4", True),
        ("5th", "5", True),
        ("12pm", "12", True),
        ("4 and a half", "4", False),
        ("10 AM", "10 PM", False),
        ("10 a.m.", "10", True),
        ("10 a.m.", "10 am", True),
        ("3√2", "3", False),
        ("4√x", "4", False),
        ("3 times π", "3", False),
        ("2²", "2", False),
        ("2π", "2", False),
        ("5km", "5", True),
        ("5m", "5", True),
        ("7h", "7 hours", True),
        ("12 cm²", "12", True),
        ("2n²", "2", False),
        ("5 apples and a pear", "5", True),
        ("10AM", "10PM", False),
        ("5million", "5thousand", False),
        ("9^{9^{9}}", "81", False),
        (r"\left(99999\right)!", "1", False),
        ("123456!", "2", False),
        ("3^{4}", "81", True),
        ("5!", "120", False),
        ("5 m", "5", True),
        ("12apples", "12", True),
        ("3 inches", "3", True),
        ("6 animals", "6", True),
    ],
)
def test_answers_equal_is_not_fooled(answer, gold, equal):
    assert rewards.answers_equal(answer, gold) is equal


@pytest.mark.parametrize(
    "text, number",
    [
        ("-$1,234.50", -1234.5),
        ("12 apples", 12),
        ("1,2", None),
        ("1,234,5", None),
        ("x", None),
        ("0", 0),
        ("+.5", 0.5),
    ],
)
def test_the_number_that_a_text_begins_with(text, number):
    assert rewards._number(text) == number


def test_a_very_long_answer_takes_no_time_and_is_wrong():
    for text in (
        "#### " + "9" * 10**6,
        "#### " + "1," * 10**5,
        r"\boxed{" * 10**5,
        "#" * 10**6,
        "#### " + "(" * 10**5,
        "####" + " " * 10**6,
    ):
        assert rewards.exact_answer([""], [text], ["#### 4"]) == [0.0]


@pytest.mark.parametrize(
    "response, gold, score",
    [
        ("2+2=4\n#### 4", "so\n#### 4", 1.0),
        ("#### 4", "4", 1.0),
        ("4", "4", 0.0),
        ("#### 5", "#### 4", 0.0),
        ("", "#### 4", 0.0),
        ("#### ", "#### ", 0.0),
        ("nothing", "", 0.0),
        ("#### 0", "#### 0", 1.0),
        ("#### 4 or 5", "4", 0.0),
        (r"\boxed{4}", "#### 4", 1.0),
    ],
)
def test_exact_answer(response, gold, score):
    assert rewards.exact_answer(["q"], [response], [gold]) == [score]


def test_rewards_that_need_answers_say_so():
    for name in ("exact_answer", "em", "f1", "rouge_l"):
        with pytest.raises(ValueError, match="output"):
            getattr(rewards, name)(["q"], ["r"], [None])


@pytest.mark.parametrize(
    "response, gold, em, f1",
    [  # by the official script's rules
        ("The Beatles!", "beatles", 1, 1),
        ("a b c", "b c d", 0, 2 * (2 / 2 * 2 / 3) / (2 / 2 + 2 / 3)),
        ("yes", "yes.", 1, 1),
        ("yes it is", "yes", 0, 0),
        ("yes", "no", 0, 0),
        ("noanswer", "no answer", 0, 0),
        ("", "x", 0, 0),
        ("", "", 1, 0),
        ("the", "", 1, 0),
        ("x x", "x", 0, 2 / 3),
        ("theatre", "atre", 0, 0),
    ],
)
def test_em_and_f1_are_those_of_hotpotqa(response, gold, em, f1):
    assert rewards.em([""], [response], [gold]) == [em]
    assert rewards.f1([""], [response], [gold]) == pytest.approx([f1])


def test_rouge_l_by_hand():
    assert rewards.rouge_l(
        [""] * 3, ["the cat sat", "sat cat", ""], ["the cat sat", "the cat sat", "x"]
    ) == pytest.approx([1.0, 2 * (1 / 2 * 1 / 3) / (1 / 2 + 1 / 3), 0.0])


def test_rouge_l_reads_every_script():
    assert rewards.rouge_l([""] * 2, ["красный кот", "apfel"], ["красный кот", "äpfel"]) == [1.0, 0.0]
    assert rewards.rouge_l([""], ["The cat_sat!"], ["the cat sat"]) == [1.0]


def test_mathematics_is_compared_in_threads_too():
    golds = [r"\boxed{\frac{1}{2}}", "#### 5", r"\boxed{(x+1)}"]
    responses = [r"\boxed{0.5}", "#### 5", r"\boxed{(1+x)}"]
    function = rewards.threaded(rewards.exact_answer, 2)
    assert function([""] * 3, responses, golds) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("pattern", ["Final: .*", "(Final|Answer): (.*)"])
def test_a_pattern_without_its_one_group_is_refused(pattern):
    with pytest.raises(ValueError, match="answer_in.*: it takes one group, as"):
        rewards.answer_in(pattern)
    rewards.answer_in("(?:Final|Answer): (.*)")


@pytest.mark.parametrize(
    "response, score",
    [
        ("1+1=2\n#### 2", 1),
        ("#### 2\n", 1),
        (r"so \boxed{2}.", 1),
        (r"so \[\boxed{2}\]", 1),
        (r"so \(\boxed{\frac{1}{2}}\).", 1),
        (r"**\boxed{2}**", 1),
        ("so $$\n\\boxed{2}\n$$", 1),
        (r"\boxed{5} so it is \frac{1}{2}", 0),
        (r"\boxed{5} and {x}", 0),
        (r"\text{so \boxed{5}}", 1),
        (r"\begin{align*} x &= \boxed{5} \end{align*}", 1),
        (r"\fbox{5}", 1),
        (r"\fbox{1} #### 5", 0),
        (r"\boxed{}", 0),
        (r"\boxed{5", 0),
        ("#### 2\nand more", 0),
        ("#### 1\n#### 2", 0),
        ("####", 0),
        ("2", 0),
        ("", 0),
    ],
)
def test_answer_format(response, score):
    assert rewards.answer_format([""], [response], [None]) == [score]


def test_length_penalty_is_minus_the_characters():
    assert (
        rewards.length_penalty(["", ""], ["", "abc"], [None, None]) == [0, -3]
        and math.copysign(1, rewards.length_penalty([""], ["a"], [None])[0]) < 0
    )


@pytest.mark.parametrize(
    "function, response, golds, score",
    [
        ("exact_answer", "#### 4", ["5", "so\n#### 4"], 1.0),
        ("exact_answer", "#### 4", ["5", "6"], 0.0),
        ("exact_answer", "#### ", ["####", ""], 0.0),
        ("em", "The cat", ["dog", "cat"], 1.0),
        ("f1", "a red cat", ["dog", "cat"], 2 / 3),
        ("rouge_l", "red cat", ["dog", "red cat"], 1.0),
    ],
)
def test_of_several_gold_answers_the_best_counts(function, response, golds, score):
    assert getattr(rewards, function)([""], [response], [golds]) == [pytest.approx(score)]


def test_gold_answers_are_bare_and_keep_repeats():
    assert rewards.gold_answers("1+1=2\n#### 2") == ["2"] and rewards.gold_answers(
        ["2", "#### 2", r"\boxed{3}", "#### "]
    ) == ["2", "2", "3", ""]


# ---------------------------------------------------------------- reward modes, of one prompt's candidates

HARD, SOFT, GT, SCORE = [1, 0, 0, 1], [0.25, 1.0, 0.0, 1.0], [0.5, 0.0, 1.0, 1.0], [-4.0, 2.0, 4.0, 0.0]


@pytest.mark.parametrize(
    "mode, wanted",
    [
        ("hard_only", [1, 0, 0, 1]),
        ("soft_only", SOFT),
        ("hard_plus_soft", [1.25, 1.0, 0.0, 2.0]),
        ("hard_plus_soft_v2", [2.25, 1.0, 0.0, 3.0]),
        ("separated", [2.25, 1.0, 0.0, 3.0]),
        ("hard_plus_gtprob", [1.5, 0.0, 1.0, 2.0]),
        ("hard_plus_gtprob_separated", [2.5, 0.0, 1.0, 3.0]),
        ("hybrid", [0.5, 0.375, 0.5, 0.75]),
    ],
)
def test_reward_modes_by_hand(mode, wanted):
    assert getattr(rewards, mode)(HARD, SOFT, GT, SCORE) == pytest.approx(wanted)


def test_hybrid_scales_within_the_prompt_and_mixes():
    assert rewards.hybrid([0, 1], [], [], [10.0, 30.0], mix=0.25) == [0.0, 1.0] and rewards.hybrid(
        [1, 0], [], [], [10.0, 30.0], mix=0.25
    ) == [0.75, 0.25]
    assert rewards.hybrid([0, 1], [], [], [7.0, 7.0]) == [
        0.0,
        0.5,
    ]  # equal scores tell nothing, and are no division by zero


def test_similarity_orders_wrong_candidates_and_leaves_right_ones_alone():
    assert rewards.shape_wrong([2.0, 0.0, 0.5], [1, 0, 0], [1.0, 0.5, 1.0], 0.2) == pytest.approx(
        [2.0, 0.1, 0.7]
    )


@pytest.mark.parametrize("mode", ["hard_plus_soft_v2", "separated", "hard_plus_gtprob_separated"])
def test_separated_modes_keep_every_right_one_above_every_wrong_one(mode):
    corners = [(h, s, g) for h in (0, 1) for s in (0.0, 1.0) for g in (0.0, 1.0)]
    values = getattr(rewards, mode)(*map(list, zip(*corners)), [0.0] * 8)
    assert (
        min(v for v, c in zip(values, corners) if c[0])
        >= max(v for v, c in zip(values, corners) if not c[0]) + 1
    )


@pytest.mark.parametrize(
    "response, gold, right",
    [
        ("so he has 3 + 4 = 7 apples.", "3+4=7\n#### 7", 1.0),
        ("7 of them, 8 in all", "#### 7", 0.0),  # the last one counts
        ("it costs $1,234.50.", "1234.5", 1.0),
        ("it is -4", "-4", 1.0),
        ("it is \u22124.", "4", 0.0),
        ("he took 5-2", "2", 1.0),  # no sign
        ("(3)-2", "-2", 0.0),
        ("-$4", "-4", 1.0),
        ("half: 1/2", ".5", 1.0),
        ("0.5", "1/2", 1.0),
        ("1, 2, 3,", "3", 1.0),
        ("7%", "the answer is 7 apples", 1.0),
        ("about \\boxed{-7}", "7", 0.0),
        ("none", "7", 0.0),
        ("none", "nothing", 0.0),  # two without a number are not equal
        ("", "7", 0.0),
        ("7", ["6", "7"], 1.0),
    ],
)
def test_last_number_reads_a_number_whatever_stands_around_it(response, gold, right):
    assert rewards.last_number(["q"], [response], [gold]) == [right]


@pytest.mark.parametrize(
    "response, right",
    [
        ("<answer>7</answer>", 1.0),
        ("I think.\n<answer>\n 7.0 </answer> so", 1.0),
        ("<answer> \\boxed{7} </answer>", 1.0),
        ("<answer>8</answer> no, <answer>7</answer>", 1.0),
        ("<answer>7</answer> no, <answer>8</answer>", 0.0),
        ("<answer>8 <answer>7</answer>", 1.0),
        ("<answer>7</answer> </answer>", 1.0),
        ("<answer>7", 0.0),
        ("7</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("#### 7", 0.0),
    ],
)
def test_a_tagged_answer_is_what_stands_between_the_last_tags(response, right):
    assert rewards.tagged_answer(["q"], [response], ["3+4=7\n#### 7"]) == [right]


def test_a_format_of_the_users_is_a_regular_expression():
    final = rewards.answer_in("Final: (.*)")
    assert final(["q"] * 3, ["Final: 7\nyes", "Final: 7 Final: 8", "7"], ["7"] * 3) == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="tagged_answer compares with the true answer"):
        final(["q"], ["Final: 7"], [None])
    with pytest.raises(ValueError, match="last_number compares with the true answer"):
        rewards.last_number(["q"], ["7"], [None])


def test_reading_the_last_number_or_tag_of_a_long_response_takes_no_time():
    for text in ("1," * 50000, "-" * 100000, "<answer>" * 20000, "9" * 100000, "<answer>" + "x" * 100000):
        begun = time.process_time()
        rewards.last_number(["q"], [text], ["7"])
        rewards.tagged_answer(["q"], [text], ["7"])
        assert time.process_time() - begun < 1
