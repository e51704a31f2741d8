"""rewards/: final answers are read and compared rightly, and a trainer calls reward functions safely."""

import functools
import json
import threading
import time

import numpy as np
import pytest
import torch
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st

from rewards import UserError, answer_format, answer_in, answers_equal, call_reward, em, exact_answer, f1
from rewards import final_answer, find_function, gold_answers, last_number, length_penalty, rouge_l
from rewards import tagged_answer

# ---------------------------------------------------------------- answers

STATED = [  # (final answer, texts that state it)
    ("7", ["3+4=7\n#### 7", "####7", "#### 7\nI hope this helps.", "Write it after ####.\n#### 7"]),
    ("7", [r"so \boxed{7}.", r"\fbox{7}", r"$\boxed 7$", r"}}{ \boxed{7}", r"\boxed{7}, in \boxed as asked"]),
    ("7", ["#### 6\n#### 7", "#### 6 #### 7", r"\boxed{6} \boxed{7}", r"\boxed{6} #### 7"]),
    ("7", [r"#### 6 \boxed{7}", r"\boxed{\boxed{7}}", r"\fbox{6} \boxed{7}"]),
    (r"\frac{1}{2}", [r"\boxed{\frac{1}{2}}", r"#### \frac{1}{2}"]),
    (None, ["", "7", "# 7", "#### ", "####\n7", "{7}", r"\boxed{7", r"\boxed{}", r"\boxedx{7}"]),
    (None, [r"\boxed{7} no, \boxed{8", r"\boxed{7} no, ####"]),
]
SAME = [  # (answer, other forms of it)
    ("18", ["18.00", "$18", r"\$18", "$18$", "18%", "**18**", "18.", "018", "+18", "18 dollars", "18°"]),
    ("18", [r"18\text{ dollars}", r"18\text{ cm}^2", r"18^\circ", "18 km²", r"\frac{36}{2}", r"2 \cdot 3^2"]),
    ("-1234.5", ["-$1,234.50", "\u22121234.5", r"-1,\!234.5", "-1.2345e3"]),
    ("0.5", [".5", "1/2", "5e-1", r"\frac{1}{2}", r"$\frac12$"]),
    ("1e+16", ["10000000000000000", "1E16", "10,000,000,000,000,000", "10^{16}"]),
    ("1e-05", ["0.00001", "1/100000", "10^{-5}"]),
    ("2x+1", ["2x + 1", "1+2x", "2(x+1)-1"]),
    ("Paris", [" Paris ", r"\text{Paris}", "**Paris**"]),
    ("(1,2)", ["(1, 2)", r"\left(1,2\right)"]),
]
OTHER = [  # (answer, answers that are not it)
    ("", ["", " ", "0", None]),
    ("2", ["2x", "2 x", "2²", "2π", "2 pi", "2-3", "-2", "21", "two", "\u0662", "2 and a half", "2 or 3"]),
    ("12", ["1/2", "1,2", "1 2", "1  2", "1.2", "12/0", "1,2,", "/12", "12.1.1", "11 1/2"]),
    ("5 million", ["5 thousand", r"5\text{ thousand}", "6 million"]),
    ("10 AM", ["10 PM", r"10\text{ PM}"]),
    ("1e+16", ["1", "16", "1e9999"]),
    ("Paris", ["London", "siraP", r"\text{siraP}"]),
    ("(1,2)", ["(2,1)", "12", "[1,2]"]),
]
ENDLESS = ["9^{9^{9}}", "9^(9^9)", "9^{-9^9}", r"9^{\frac{9^9}{1}}", "9^{{(9)}^9}", r"9^\left(9^9\right)"]
ENDLESS += [
    "((9^{999})^{999})^{999}",
    r"9^{99\cdot99\cdot99}",
    "9^{99999999}",
    "(x+1)^{9999}",
    "(9!)!",
    "9!!!",
]
ENDLESS += ["99999!", r"\binom{999999}{499999}", r"\sum_{n=1}^{999999} \frac{1}{n^2}", "(" * 300, "{" * 300]
LONG = ["#", r"\boxed{", "9", "1,", "-", " ", "#### ", "<answer>x", "(", "1 ", r"\boxed 1"]


def in_a_thread(function):
    """Returns what `function` returns in another thread, or None after a minute."""
    values = []
    thread = threading.Thread(target=lambda: values.append(function()), daemon=True)
    thread.start()
    thread.join(60)
    return values[0] if values else None


@pytest.mark.parametrize("answer, texts", STATED)
def test_the_final_answer_is_the_last_one_that_is_marked(answer, texts):
    assert [final_answer(text) for text in texts] == [answer] * len(texts)


@pytest.mark.parametrize("answer, forms", SAME)
def test_the_same_answer_in_another_form_is_right(answer, forms):
    for form in forms:
        assert answers_equal(form, answer) is answers_equal(answer, form) is True, form


@pytest.mark.parametrize("answer, others", OTHER)
def test_another_answer_is_wrong(answer, others):
    for other in others:
        assert answers_equal(other, answer) is answers_equal(answer, other) is False, other


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers())
def test_every_number_equals_its_renderings_and_no_other_number(number, other):
    assert answers_equal(str(number), f"{number} apples")
    assert answers_equal(f"{other:,}", str(other))
    responses = [f"#### {number}", f"#### {other}"]
    for function in (exact_answer, last_number):
        assert function(["", ""], responses, [number, number]) == [1.0, float(number == other)]


@given(st.text(r"01-+.,/$%e{}^()\ab ", max_size=12), st.text(r"01-+.,/$%e{}^()\ab ", max_size=12))
def test_no_text_is_too_odd_to_compare(answer, gold):
    assert isinstance(answers_equal(answer, gold), bool)
    assert exact_answer([""], [rf"\boxed{{{answer}"], [f"#### {gold}"])[0] in (0.0, 1.0)


@pytest.mark.parametrize("file", ["train.jsonl", "test.jsonl"])
def test_every_gold_answer_that_ships_equals_itself_and_its_renderings(file):
    golds = [json.loads(line)["solution"] for line in (TINY / file).read_text().splitlines()]
    bare = [gold_answers(gold)[0] for gold in golds]
    assert set(exact_answer(golds, golds, golds)) == {1.0}
    assert set(last_number(golds, golds, bare)) == {1.0}
    assert set(exact_answer(golds, [rf"so \boxed{{\${b}\text{{ dollars}}}}." for b in bare], golds)) == {1.0}
    assert set(exact_answer(golds, [f"#### {b}1" for b in bare], golds)) == {0.0}


def test_no_formula_takes_long_in_any_thread():
    def compare():
        return [answers_equal(answer, "82") for answer in ENDLESS]

    begun = time.monotonic()
    assert compare() == in_a_thread(compare) == [False] * len(ENDLESS)
    assert in_a_thread(lambda: answers_equal(r"\frac{1}{2}", "0.5")) is True
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("text", LONG)
def test_half_a_million_characters_are_read_in_linear_time(text):
    many = text * (500_000 // len(text))
    for response in (f"#### {many}", rf"\boxed{{{many}", f"<answer>{many}</answer>"):
        begun = time.process_time()
        answer_format([""], [response], [None])
        for function in (exact_answer, last_number, tagged_answer):
            assert function([""], [response], ["7"]) == [0.0]
        assert time.process_time() - begun < 5


# ---------------------------------------------------------------- functions of a batch


def check(function, gold, right, wrong):
    responses = right + wrong
    wanted = [1.0] * len(right) + [0.0] * len(wrong)
    assert function(responses, responses, [gold] * len(responses)) == wanted


@pytest.mark.parametrize("gold", ["4", 4, 4.0, "so\n#### 4", r"so $\boxed{4}$", ["5", "#### 4"], [None, 4]])
def test_an_exact_answer_is_a_final_answer_that_equals_a_gold_one(gold):
    check(exact_answer, gold, ["2+2=4\n#### 4", r"\boxed{4.0}"], ["4", "#### 6", "#### 4 or 6", "", "#### "])


def test_a_gold_answer_that_is_empty_equals_nothing():
    for gold in ("#### ", "", r"\boxed{}"):
        check(exact_answer, gold, [], ["#### ", "", r"\boxed{}", "nothing"])


def test_the_last_number_counts_whatever_stands_around_it():
    check(last_number, "#### 7", ["3 + 4 = 7 apples.", "9-7", "1, 7,", "$7.00."], ["7, 8", "it is -7", ""])
    check(last_number, "-0.5", ["so -1/2", "it is \u2212.5"], ["5-0.5", "0.5"])
    check(last_number, "1e+16", ["so 10000000000000000", "1e16."], ["16", "1"])
    check(last_number, [1e-05, "nothing"], ["0.00001"], ["5", "none"])


@pytest.mark.parametrize("gold", ["7", 7, "#### 7", "<answer>7</answer>", r"<answer>\boxed{7}</answer>"])
def test_a_tagged_answer_is_what_stands_between_the_last_tags(gold):
    right = ["so\n<answer>\n 7.0 </answer>.", r"<answer> \boxed{7} </answer>", "<answer>8 <answer>7</answer>"]
    wrong = ["<answer>7</answer> no, <answer>8</answer>", "<answer>7", "<answer></answer>", "#### 7"]
    check(tagged_answer, gold, right, wrong)


def test_a_format_of_the_users_is_a_pattern_with_one_group():
    for gold in ("7", "Final: 7"):
        check(answer_in("Final: (.*)"), gold, ["Final: 7\nyes"], ["Final: 7 Final: 8", "7"])
    for pattern in ("Final: .*", "(Final|Answer): (.*)"):
        with pytest.raises(UserError, match="answer_in"):
            answer_in(pattern)


@pytest.mark.parametrize("function", [exact_answer, last_number, tagged_answer, em, f1, rouge_l])
@pytest.mark.parametrize("answer", [None, [], [None]])
def test_a_missing_gold_answer_is_an_error_and_no_wrong_response(function, answer):
    with pytest.raises(UserError, match=function.__name__):
        function(["q", "q"], ["r", "r"], ["7", answer])


def test_em_and_f1_are_those_of_hotpotqa():
    responses = ["The Beatles!", "a b c", "yes it is", "noanswer", "", "x x", "a red cat"]
    golds = ["beatles", "b c d", "yes", "no answer", "", "x", ["dog", "cat"]]
    assert em(responses, responses, golds) == [1, 0, 0, 0, 1, 0, 0]
    assert f1(responses, responses, golds) == pytest.approx([1, 0.8, 0, 0, 0, 2 / 3, 2 / 3])


def test_rouge_l_reads_words_of_every_script():
    responses = ["the cat sat", "sat cat", "", "красный кот", "The cat_sat!", "apfel"]
    golds = ["the cat sat", "the cat sat", "x", "красный кот", ["dog", "the cat sat"], "äpfel"]
    assert rouge_l(responses, responses, golds) == pytest.approx([1, 0.4, 0, 1, 1, 0])


def test_the_format_is_one_final_answer_at_the_end():
    aligned = r"\begin{align*} x &= \boxed{5} \end{align*}"
    right = ["1+1=2\n#### 2\n", r"so \boxed{2}.", r"so \(\boxed{\frac{1}{2}}\).", aligned, r"$\boxed 5$"]
    wrong = [r"\boxed{5} or 6", r"\fbox{1} #### 5", r"\boxed{5", "#### 2\nso", "#### 1\n#### 2", "####", "2"]
    check(answer_format, None, right, wrong)


# ---------------------------------------------------------------- calling

GOOD = [[1, 2.0], (True, 2), np.array([1, 2]), torch.tensor([1.0, 2.0]), [torch.tensor(1), np.float32(2)]]
BAD = [[1], [1, 2, 3], [1, None], ["1", "2"], "12", None, 3.0, [[1], [2]], {0: 1, 1: 2}, {1, 2}, [1, 2j]]
BAD += [torch.ones(2, 1), torch.tensor(1.0), [1, float("nan")], [1, float("-inf")], [1, 10**400]]


def call(function, columns=None):
    return call_reward(function, ["p", "q"], ["a", "bc"], ["1", None], columns or {})


def test_a_function_is_found_by_its_name_or_given():
    assert call(find_function("length_penalty")) == [-1.0, -2.0]
    assert find_function(length_penalty) is length_penalty
    for name in ("exact_anser", "re", "find_function", None):
        with pytest.raises(UserError, match="exact_answer"):
            find_function(name)


@pytest.mark.parametrize("values", GOOD, ids=repr)
def test_one_finite_number_per_response_is_taken(values):
    assert call(lambda p, r, a: values) == call(lambda p, r, a: (value for value in values)) == [1.0, 2.0]


@pytest.mark.parametrize("values", BAD, ids=range(len(BAD)))
def test_other_values_are_one_error_that_names_the_function(values):
    def odd(prompts, responses, answers):
        return values

    with pytest.raises(UserError, match="odd"):
        call(odd)


def test_later_parameters_get_the_columns_of_their_names():
    columns = {"source": [1, 2], "prompts": [3, 4], "level": [5, 6]}
    assert call(lambda p, r, a, source: source, columns) == [1.0, 2.0]
    assert call(lambda p, r, a, *, source, other=7: [other, source[1]], columns) == [7.0, 2.0]
    assert call(lambda prompts, r, a, **named: [len(named), named["level"][0]], columns) == [2.0, 5.0]
    scaled = functools.partial(lambda scale, p, r, a, source: [scale, source[0]], 9)
    assert call(scaled, columns) == [9.0, 1.0]


def test_a_function_that_would_get_something_else_is_refused():
    def needs_a_column(prompts, responses, answers, source):
        return [0.0, 0.0]

    def for_trl(prompts, completions, completion_ids, **columns):
        return [0.0, 0.0]

    def in_another_order(responses, prompts, answers):
        return [0.0, 0.0]

    for function in (needs_a_column, for_trl, in_another_order):
        with pytest.raises(UserError, match=function.__name__):
            call(function, {"level": [5, 6]})


def test_a_reward_function_is_not_asked_about_no_response():
    assert call_reward(lambda prompts, responses, answers: 1 / 0, [], [], [], {}) == []
