import math

import pytest

import rewards


@pytest.mark.parametrize("text, answer", [
    ("2+2=4\n#### 4", "4"), ("####4", "4"), ("#### -4", "-4"), ("#### 1,234", "1,234"), ("#### 0", "0"), ("#### $5.50 ", "$5.50"),
    ("#### 4\n#### 5", "5"),  # the last one counts
    ("####\n5", None), ("#### ", None), ("", None), ("the answer is 4", None), ("# 4", None),
    (r"so \boxed{7}", "7"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{7", None), (r"\boxed{}", None),
    (r"\boxed{7} #### 8", "8"), (r"#### 8 so \boxed{7}", "7"),
])
def test_final_answer_reads_what_is_stated_and_nothing_else(text, answer):
    assert rewards.final_answer(text) == answer


@pytest.mark.parametrize("answer, gold, equal", [
    ("4", "4", True), ("4.0", "4", True), ("04", "4", True), ("-4", "4", False), ("+4", "4", True), ("\u22124", "-4", True), ("-$4", "-4", True),
    ("0", "0", True), ("-0", "0", True), ("0", "", False), ("", "0", False), ("", "", False), (None, None, False), (None, "0", False), ("0", None, False),
    ("1,234", "1234", True), ("1,2", "12", False), ("1.2.3", "1.2", False), ("12.", "12", True), (".5", "0.5", True), ("1/2", "0.5", True), ("1/0", "1", False),
    ("12 apples", "12", True), ("12 13", "12", False), ("5%", "5", True), ("2x+1", "2", False), ("12-3", "12", False), ("1e5", "1", False),
    ("41", "4", False), ("4", "41", False), ("four", "4", False), ("Paris", "Paris", True), ("Paris", "London", False), ("\u0664", "4", False),
    (r"\frac{1}{2}", "0.5", True), ("3^2", "9", True), (r"(x+1)^2", "x^2+2x+1", True), (r"\frac{1}{3}", "0.5", False),
])
def test_answers_equal_is_not_fooled(answer, gold, equal):
    assert rewards.answers_equal(answer, gold) is equal


def test_a_very_long_answer_takes_no_time_and_is_wrong():
    for text in ("#### " + "9" * 10**6, "#### " + "1," * 10**5, r"\boxed{" * 10**5, "#" * 10**6, "#### " + "(" * 10**5, "####" + " " * 10**6):
        assert rewards.exact_answer([""], [text], ["#### 4"]) == [0.0]


@pytest.mark.parametrize("response, gold, score", [
    ("2+2=4\n#### 4", "so\n#### 4", 1.0), ("#### 4", "4", 1.0), ("4", "4", 0.0), ("#### 5", "#### 4", 0.0), ("", "#### 4", 0.0),
    ("#### ", "#### ", 0.0), ("nothing", "", 0.0), ("#### 0", "#### 0", 1.0), ("#### 4 or 5", "4", 0.0), (r"\boxed{4}", "#### 4", 1.0),
])
def test_exact_answer(response, gold, score):
    assert rewards.exact_answer(["q"], [response], [gold]) == [score]


def test_rewards_that_need_answers_say_so():
    for name in ("exact_answer", "em", "f1", "rouge_l"):
        with pytest.raises(ValueError, match="output"):
            getattr(rewards, name)(["q"], ["r"], [None])


@pytest.mark.parametrize("response, gold, em, f1", [  # by the official script's rules
    ("The Beatles!", "beatles", 1, 1), ("a b c", "b c d", 0, 2 * (2 / 2 * 2 / 3) / (2 / 2 + 2 / 3)), ("yes", "yes.", 1, 1), ("yes it is", "yes", 0, 0),
    ("yes", "no", 0, 0), ("noanswer", "no answer", 0, 0), ("", "x", 0, 0), ("", "", 1, 0), ("the", "", 1, 0), ("x x", "x", 0, 2 / 3), ("theatre", "atre", 0, 0),
])
def test_em_and_f1_are_those_of_hotpotqa(response, gold, em, f1):
    assert rewards.em([""], [response], [gold]) == [em]
    assert rewards.f1([""], [response], [gold]) == pytest.approx([f1])


def test_rouge_l_by_hand():
    assert rewards.rouge_l([""] * 3, ["the cat sat", "sat cat", ""], ["the cat sat", "the cat sat", "x"]) == pytest.approx([1.0, 2 * (1 / 2 * 1 / 3) / (1 / 2 + 1 / 3), 0.0])


@pytest.mark.parametrize("response, score", [
    ("1+1=2\n#### 2", 1), ("#### 2\n", 1), (r"so \boxed{2}.", 1), ("#### 2\nand more", 0), ("#### 1\n#### 2", 0), ("####", 0), ("2", 0), ("", 0),
])
def test_answer_format(response, score):
    assert rewards.answer_format([""], [response], [None]) == [score]


def test_length_penalty_is_minus_the_characters():
    assert rewards.length_penalty(["", ""], ["", "abc"], [None, None]) == [0, -3] and math.copysign(1, rewards.length_penalty([""], ["a"], [None])[0]) < 0
