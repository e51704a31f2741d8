"""rewards/: final answers are read and compared rightly, and a trainer calls reward functions safely."""

# ruff: noqa: RUF001
import functools
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, strategies

from rewards import UserError, answer_format, answer_in, answers_equal, call_reward, em, exact_answer, f1
from rewards import final_answer, find_function, find_functions, last_number, length_penalty
from rewards import rouge_l, strict_em, tagged_answer

# ---------------------------------------------------------------- answers

# Tables: rows end at " || " or the end of a line, cells at " | ", and "\n" in a cell is a line break
STATED = r"""
7 | 3+4=7\n#### 7 | ####7 | #### 7\nI hope this helps. | Write it after ####.\n#### 7 | #### 6\n#### 7
7 | so \boxed{7}. | \fbox{7} | $\boxed 7$ | }}{ \boxed{7} | \boxed{7}, in \boxed as asked | \boxed {7}
7 | \boxed7 | \framebox{7} || \frac{1}{2} | \boxed{\frac{1}{2}} | #### \frac{1}{2} | \boxed\frac{1}{2}
7 | #### 6 #### 7 | \boxed{6} \boxed{7} | \boxed{6} #### 7 | #### 6 \boxed{7} | \boxed{\boxed{7}}
7 | ####\n7 | ####\n\n7\nso | #### 7 #### | #### 7\n\n#### Note | ## 6\n#### 7\n##### 8 | \fbox{6} \boxed{7}
7 | \boxed{7} no, #### | \boxed{7} \boxed{ } | \boxed{7} #### **Note** | \boxed{7}\boxed{} | $\boxed{7}$. ####
\frac{\sqrt{3}}{2} | \boxed{\frac{\sqrt{3}}{2}} | $\boxed\frac{\sqrt{3}}{2}$ || Paris | #### A\n#### Paris
None |  | 7 | # 7 | #### | {7} | \boxed{7 | \boxed{} | \boxedx{7} | \boxed{7} no, \boxed{8 | \fbox
"""  # final answer | texts that state it
ANSWERS = r"""
18 | 18.00 | $18 | \$18 | $18$ | 18% | **18** | 18. | 018 | +18 | 18 dollars | 18° | != | 18 18 | 81
18 | 18\text{ dollars} | 18\text{ cm}^2 | 18^\circ | \frac{36}{2} | 2 \cdot 3^2 | != | 18! | 182
18 | 18 m | 18cm | 18\,\mathrm{m/s} | 18元 | 18 square feet | 18 TVs | != | 18m | 18 метров | 18ドル | 18万
5 | x=5 | 5 km/h | 5 miles per hour | \textcolor{blue}{5} | \underline{5} | \[5\] | answer: 5 | != | 50
5 | {5} | != | 4=5 | 5=4 | 5\\6 | 5! | 5:1 | \frac{5}{6} | -5 | 5+ | 0.\overline{5} | 5 thousand | 5 out of 6
2 | \sqrt4 | != | 2x | 2 x | 2² | 2π | 2 pi | 2-3 | -2 | 21 | two | ٢ | 2 and a half | 2 or 3 | 2xy | 2α | 2m
2 | 4/2 | != | 2 thirds | 2 halves | 2 out of 5 | 2 squared | 1/2 | 2 1/2 | 2!! | 2k | 2 dozen
12 | 12.0 | != | 1/2 | 1,2 | 1 2 | 1  2 | 1.2 | 12/0 | 1,2, | /12 | 12.1.1 | 11 1/2
-1234.5 | -$1,234.50 | −1234.5 | -1,\!234.5 | -1.2345e3 | – 1{,}234.5 | -\$1\,234.5 | -1 234.5 | != | 1234.5
0.5 | .5 | 1/2 | 5e-1 | \frac{1}{2} | $\frac12$ | \frac{1}{2}\text{ cm} | {\color{red}0.5} | != | 50\%
1e+16 | 10000000000000000 | 1E16 | 10,000,000,000,000,000 | 10^{16} | != | 1 | 16 | 1e9999
1e-05 | 0.00001 | 1/100000 | 10^{-5} | != | 10^{-6} | 0 || 5\text{ kg} | 5kg | != | 5\text{ g}
5 m | 5\text{ m} | 5\ \text{m} | 5~\mathrm{m} | x = 5 m | != | 5 km | 5 cm | 5\% | 5 m^2 | 5 m/s | \$5
5\text{ km} | 5 km | 5 | != | 5\text{ m} | 5\text{ kg} | 6 km | 5 km/h
5\text{ m} | 5 m | != | 5\text{ cm} | 5\% || 3000000 | 3 million | 3 million people | != | 3
$5 million | 5,000,000 dollars | \$5{,}000{,}000 | 5000000 | 5 million | 0.005 billion | != | 500万 | €5
5 million | 5000000 | != | 5 | 5 thousand | 5\text{ thousand} | 6 million | 5 Millionen | 5 millionths | 5万
10 AM | 10 | != | 10 PM | 10\text{ PM} || 50 percent | 50\% | 50 % | 50 | != | 0.5 | 50 km
120 | 5! | \binom{10}{3} | \dbinom{16}{2} | 10 dozen | 10 dozen eggs | != | 5!! | \binom{5}{2}
-3/2 | -1\frac{1}{2} | -1 1/2 | -\frac32 | x = -1.5 | − 1.5 | != | 1.5 | -1/2
1.5 | 1 1/2 | 1\frac{1}{2} | 3/2 cups | != | 11/2 || 2^{2023}+1 | 2^{2023} + 1 | != | 2^{2023}-1 | 2^{2023}
1/6 | 0.1\overline{6} | \frac{0.5}{3} | \dfrac16 | != | 0.1666666666666666666666666666666
\frac13 | 0.\overline{3} | 1/3 | != | 0.3333333333333333333333333 | 0.3 || x=1, y=2 | y=2, x=1 | != | x=2, y=1
\frac{1}{2^{99}} | 2^{-99} | != | \frac{1}{2^{98}} | -\frac{1}{2^{99}} || (1,200) | (1, 200) | != | 1200
1 - \frac{1}{\mathrm{e}} | 1-\frac{1}{e} | \frac{e-1}{e} | != | 1 + \frac{1}{\mathrm{e}} | 1-\frac{1}{e^2}
\sqrt{2} | \frac{2}{\sqrt2} | 2^{1/2} | != | 1.41421356237309504880168872 | 2 | \sqrt3
2\pi r | r \cdot 2\pi | 2π r | \pi \cdot 2r | != | 2r | 6.28r | 2\pi \ln 2 | 6\pi\ln || no | no | != | on
\sin 2x | $\sin 2x$ | != | x\sin 2 | \sin 2 | 2x || x = 5 | x=5.0 | 5 | != | y = 5 | x = 6 | 5 = 4
2x+1 | 2x + 1 | 1+2x | 2(x+1)-1 | y = 2x+1 | f(x) = 1 + 2x | \frac{4x^2-1}{2x-1} | != | 2x-1 | 2X+1 | 2y+1
Paris | \text{Paris} | **Paris** | \underline{\text{Paris}} | (Paris) | != | London | siraP | \text{siraP}
(1,2) | (1, 2) | \left(1,2\right) | (1,\frac{4}{2}) | != | (2,1) | 12 | [1,2] | 1,2 | (1,2,3) | [1,2)
1,2 | 2,1 | \{1,2\} | != | 1,1,2 | 1 | 12 || 1,1,2 | 2,1,1 | != | 1,2 | 1,2,2 | 112
[5,6) | x \in [5, 6) | != | [5,6] | (5,6) || (5,6) | 5<x<6 | != | (5,7) | [5,6)
"""  # an answer | other forms of it | != | answers that are not it
CASES = r"""
exact_answer | #### | != |  | #### | nothing | \boxed{} || last_number | 9500 | \boxed{\$9{,}500} | != | 500
exact_answer | \boxed{} | != |  | #### | nothing | \boxed{} || last_number | 1200 | 1\,200 | != | 200
exact_answer | so \boxed {7} | \boxed{7}\boxed{} | \fbox{7} | != | \boxed{7}\boxed{8}
exact_answer | \boxed{7}. \n\n#### Note | \boxed{7} | != | \boxed{Note} | #### Note
exact_answer | so $\boxed\frac{1}{2}$ | \boxed{\frac12} | \boxed\frac12 | != | \boxed{12} | 1/2
last_number | #### 7 | 3 + 4 = 7 apples. | 9-7 | 9 - 7 | 1–7 | 1, 7, | $7.00. | != | 7, 8 | it is -7
last_number | -0.5 | so -1/2 | it is −.5 | -\frac{1}{2} | != | 5-0.5 | 0.5 | -1\frac{1}{2}
last_number | 1e+16 | so 10000000000000000 | 1e16. | != | 16 | 1
last_number | 3 | The answers are 1,2,3 | (x, 3) | != | so the answer is –3 | x = - 3 | (-3)
last_number | -3 | x = - 3 | so −3 | is –3 | (-3) | != | 3 | 5 - 3
last_number | -5 | - $5 | = -\$5 | $-5$ | != | -€5 | 5 | 9 - 5
last_number | 5 | $5 | 4–5 | != | = -\$5 | - $5 | $-5$ || last_number | 1234.5 | $1,234.50! | != | 234.5
last_number | 10000 | that is 10 000 | 10 000 | != | 10 000 000 | 000
last_number | 500 | 2020, 500 | != | \boxed{\$9{,}500}
last_number | 1.5 | so 1 1/2 cups | 1\frac{1}{2} | != | 1/2
strict_f1 | -5 | -5. | != | 5 || strict_em | B | b | != |  | A | B-
strict_em | 15 | 15. | != | 1.5 | -15 | 1/5 || strict_em | -5 | (-5) | -$5 | != | 5 | -.5
strict_em | C# | c# | != | C++ | C || strict_em | A | A | (a). | A. | != | the |  | an | B
strict_em | ... | ... | != |  | !? || strict_em | 9-to-5 (U.S.) | The 9to5, US! | != | 9 to 5 us
strict_f1 | A | A | != | the |  | -5 || strict_em | <5 | <5. | != | >5 | 5
strict_em | 10:30 | 10:30! | != | 1030 || strict_em | 1,5 | 1,5 | != | 15
strict_em | the band | Band. | != | the || strict_em | vitamin A | Vitamin A! | != | vitamin
strict_em | + | + | != | - || em | A | the |  | != | B || em | -5 | 5 | != | 6 || em | C# | C++ | != | D
em | 3.5 | 35 | != | 3 5 || f1 | A | != | A
"""  # reward function | gold answer | right responses | != | wrong responses
NASTY = r"""
9^{9^{9}} | 9^(9^9) | 9^{-9^9} | 9^{\frac{9^9}{1}} | 9^{{(9)}^9} | 9^\left(9^9\right) | (x+1)^{9999} | 9!!!
((9^{999})^{999})^{999} | 9^{99\cdot99\cdot99} | 9^{99999999} | (9!)! | 99999! | \binom{999999}{499999}
\sum_{n=1}^{999999} \frac{1}{n^2} | (a+b+c+d+e+f)^{30} | (x+y+z)^{99} | (\sqrt{2}^{999})^{99999}
\sqrt[0.00001]{2} | \sqrt[999]{2^{9999}} | 1e999 | \sqrt{2}^{999} | 2^{0.5}^{9}
"""
REPEATED = r"( { 2^ 1000! 9^{99} (x+1)^{99} 1, (1, <x< 1{,} million \sin( \frac \sqrt{ \text{ \pi^{0.5}"
LONG = ["-", " ", "#### ", "(", "1 ", "1 1/2 ", *r"# \boxed{ 9 1, <answer>x \boxed1 \fbox\a{".split()]


def table(text):
    """Returns the rows of a table as lists of cells."""
    rows = text.strip("\n").replace("\n", " || ").split(" || ")
    return [row.replace("\\n", "\n").split(" | ") for row in rows]


@pytest.mark.parametrize("row", table(STATED), ids=str)
def test_the_final_answer_is_the_last_one_that_is_marked(row):
    assert {str(final_answer(text)) for text in row[1:]} == {row[0]}


@pytest.mark.parametrize("row", table(ANSWERS), ids=str)
def test_an_answer_equals_its_other_forms_and_no_other_answer(row):
    end = row.index("!=")
    for other in row[1:end]:
        assert answers_equal(other, row[0]) is answers_equal(row[0], other) is True, other
    for other in ["", " ", None, *row[end + 1 :]]:
        assert answers_equal(other, row[0]) is answers_equal(row[0], other) is False, other


@given(strategies.floats(allow_nan=False, allow_infinity=False), strategies.integers())
def test_every_number_equals_its_renderings_and_no_other_number(number, other):
    assert answers_equal(str(number), f"{number} apples")
    assert answers_equal(f"{other:,}", str(other))
    responses = [f"#### {number}", f"#### {other}"]
    for function in (exact_answer, last_number):
        assert function(["", ""], responses, [number, number]) == [1.0, float(number == other)]


@given(*[strategies.text(r"01-+.,/$%e{}^()\ab ", max_size=12)] * 2)
def test_no_text_is_too_odd_to_compare(answer, gold):
    assert isinstance(answers_equal(answer, gold), bool)
    assert exact_answer([""], [rf"\boxed{{{answer}"], [f"#### {gold}"])[0] in (0.0, 1.0)


def test_no_formula_takes_long_in_any_thread():
    nasty = [answer for row in table(NASTY) for answer in row]
    for text in REPEATED.split():
        nasty += [(text * 300)[:300], text * 20 + "2"]
    values = []

    def compare():
        for answer in nasty:
            values.append(answers_equal(answer, "82") or answers_equal(answer + "+1", answer))

    thread = threading.Thread(target=compare, daemon=True)
    thread.start()
    thread.join(20)
    assert values == [False] * len(nasty)


@pytest.mark.parametrize("text", LONG)
def test_many_characters_are_read_in_linear_time(text):
    many = text * (150_000 // len(text))
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


@pytest.mark.parametrize("row", table(CASES), ids=str)
def test_a_response_is_right_or_wrong(row):
    end = row.index("!=")
    check(find_function(row[0]), row[1], row[2:end], row[end + 1 :])


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


@pytest.mark.parametrize("function", [exact_answer, last_number, tagged_answer, em, f1, rouge_l, strict_em])
def test_a_missing_gold_answer_is_an_error_that_names_the_prompt(function):
    for answer in (None, [], [None], "", " ", float("nan"), "nan"):
        with pytest.raises(UserError, match=f"{function.__name__} .*second prompt"):
            function(["first prompt", "second prompt"], ["r", "r"], ["7", answer])


def test_em_and_f1_are_those_of_hotpotqa():
    responses = ["The Beatles!", "a b c", "yes it is", "noanswer", "", "x x", "a red cat"]
    golds = ["beatles", "b c d", "yes", "no answer", "x", "x", ["dog", "cat"]]
    assert em(responses, responses, golds) == [1, 0, 0, 0, 0, 0, 0]
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


def test_reward_functions_get_names_that_differ():
    class Judge:
        def __call__(self, prompts, responses, answers):
            return [0.0 for _ in responses]

    def reward_model(prompts, responses, answers):
        return [0.0 for _ in responses]

    functions = [answer_in("A: (.*)"), tagged_answer, functools.partial(reward_model), Judge(), em]
    found = find_functions([*((function, 0.5) for function in functions), ["tagged_answer", 1]])
    names = ["tagged_answer", "tagged_answer_2", "reward_model_2", "Judge", "em", "tagged_answer_3"]
    assert found == [*zip(names, [*functions, tagged_answer], [0.5] * 5 + [1])]


WRONG = [["em"], ("em", 1.0), "em", [("em", "1")], [("em", float("nan"))], [("em", 1, 2)], [(None, 1)]]


@pytest.mark.parametrize("specs", WRONG, ids=repr)
def test_other_reward_functions_are_an_error(specs):
    with pytest.raises(UserError, match="exact_answer"):
        find_functions(specs)


def test_a_reward_function_that_exits_is_an_error_and_no_quiet_end():
    def runs_code(prompts, responses, answers):
        yield from (exec("exit()") for _ in responses)

    with pytest.raises(RuntimeError, match="runs_code") as raised:
        call(runs_code)
    assert isinstance(raised.value.__cause__, SystemExit)


@pytest.mark.parametrize("values", GOOD, ids=repr)
def test_one_finite_number_per_response_is_taken(values):
    assert call(lambda p, r, a: values) == call(lambda p, r, a: (value for value in values)) == [1.0, 2.0]


@pytest.mark.parametrize("values", BAD, ids=range(len(BAD)))
def test_other_values_are_one_error_that_names_the_function(values):
    with pytest.raises(UserError, match="<lambda>"):
        call(lambda prompts, responses, answers: values)


def test_later_parameters_get_the_columns_of_their_names():
    columns = {"source": [1, 2], "prompts": [3, 4], "level": [5, 6]}
    assert call(lambda p, r, a, source: source, columns) == [1.0, 2.0]
    assert call(lambda p, r, a, *, source, other=7: [other, source[1]], columns) == [7.0, 2.0]
    assert call(lambda prompts, r, a, **named: [len(named), named["level"][0]], columns) == [2.0, 5.0]
    scaled = functools.partial(lambda scale, p, r, a, source: [scale, source[0]], 9)
    assert call(scaled, columns) == [9.0, 1.0]


def test_a_function_that_would_get_something_else_is_refused():
    needs_a_column = lambda prompts, responses, answers, source: [0.0, 0.0]  # noqa: E731
    for_trl = lambda prompts, completions, completion_ids, **columns: [0.0, 0.0]  # noqa: E731
    in_another_order = lambda responses, prompts, answers: [0.0, 0.0]  # noqa: E731
    for function in (needs_a_column, for_trl, in_another_order):
        with pytest.raises(UserError, match="<lambda>"):
            call(function, {"level": [5, 6]})


def test_a_reward_function_is_not_asked_about_no_response():
    assert call_reward(lambda prompts, responses, answers: 1 / 0, [], [], [], {}) == []
