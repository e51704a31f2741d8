"""Reward functions of texts, and how a trainer finds and calls them: the one module that trainers share.

A reward function takes three lists of equal length and returns one finite number per response:

    f(prompts: list[str], responses: list[str], answers: list) -> list[float]

A prompt that is a chat is a list of messages. An answer is a text or a number, or a list of several gold
answers, of which the best counts. It is None where the data has no answer.
"""

import inspect
import logging
import re
import string
import threading
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

# ---------------------------------------------------------------- found and called by the trainers

_LISTS = ["prompts", "responses", "answers"]


class UserError(ValueError):
    """Something that the user can correct, in one message. A trainer then ends with exit code 2."""


def find_function(function):
    """Returns a reward function, which may be given by its name in this module."""
    if callable(function):
        return function
    known = {}
    for name, value in globals().items():
        if inspect.isfunction(value) and list(inspect.signature(value).parameters)[:3] == _LISTS:
            known[name] = value
    if function not in known:
        raise UserError(f"rewards/ has no function {function!r}; it has {', '.join(known)}")
    return known[function]


def find_functions(specs):
    return [(f if isinstance(f, str) else f.__name__, find_function(f), w) for f, w in specs]


def call_reward(function, prompts, responses, answers, columns):
    """Returns the values of a reward function, one float per response.

    Its fourth and later parameters get the columns of their names, {name: one value per response}. A `**`
    parameter gets all columns.
    """
    if not responses:  # of a process without a prompt
        return []
    name = "the reward function " + getattr(function, "__name__", type(function).__name__)
    keywords = _choose_columns(name, inspect.signature(function).parameters.values(), columns)
    returned = _to_python(function(prompts, responses, answers, **keywords))
    values = []
    if hasattr(returned, "__iter__") and not isinstance(returned, (dict, set)):
        values = [_to_python(value) for value in returned]

    numbers = [float(v) for v in values if isinstance(v, (int, float)) and abs(v) < 3e38]  # float32's range
    if len(numbers) != len(values) or len(numbers) != len(responses):
        wanted = f"must return {len(responses)} finite numbers"
        raise UserError(f"{name} {wanted}, not {values or returned!r:.200}")
    return numbers


def _to_python(value):
    """Returns a tensor or an array as lists and numbers, anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _choose_columns(name, parameters, columns):
    """Returns the keyword arguments of a reward function: the columns that its parameters name."""
    first = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:3]
    for parameter, wanted in zip(first, _LISTS):
        if parameter != wanted and parameter in (*_LISTS, "completions", "completion_ids"):
            raise UserError(f"{name} is called with (prompts, responses, answers), not ({', '.join(first)})")

    keywords = {}
    for parameter in parameters:
        if parameter.kind == parameter.VAR_KEYWORD:
            keywords |= {key: values for key, values in columns.items() if key not in first}
        elif parameter.name in first or parameter.kind == parameter.VAR_POSITIONAL:
            continue
        elif parameter.name in columns:
            keywords[parameter.name] = columns[parameter.name]
        elif parameter.default is parameter.empty:
            known = ", ".join(columns) or "none"
            raise UserError(f"{name} needs the column {parameter.name!r}; the columns are: {known}")
    return keywords


def _score_each(name, score, responses, answers):
    """Returns score(response, gold answer) of each row. Of several gold answers the best counts."""
    scores = []
    for response, answer in zip(responses, answers):
        golds = _as_texts(answer)
        if not golds:
            raise UserError(f"{name} needs the true answer of each row: set the data set's output column")
        scores.append(max(float(score(response, gold)) for gold in golds))
    return scores


def _as_texts(answer):
    """Returns the one or several gold answers of a row as a list of texts."""
    golds = answer if isinstance(answer, list) else [answer]
    return [str(gold) for gold in golds if gold is not None]


# ---------------------------------------------------------------- final answers

_MAX_ANSWER_CHARS = 300  # no real final answer is longer

# A number with at most one word: -$1,234.50, 1/2, 1e-05, 12%, 18 dollars. "2 x" and "3 pi" are mathematics
_QUANTITY = re.compile(
    r"([-+]?)\s*[$€£]?\s*"
    r"((?=\.?[0-9])(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:/[1-9][0-9]*|(?:\.[0-9]+)?(?:e[-+]?[0-9]{1,3})?))"
    r"\s*[$€£%°]?(?:\s+((?!pi\b)[^\W\d_²³]{2,}[²³]?))?\.?\$?",
    re.IGNORECASE,
)
_ANY_NUMBER = re.compile(  # the minus of "5-2" is no sign
    r"(?:(?<![\w)])[-\u2212]\$?)?(?:[0-9](?:[0-9,./]*[0-9])?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}\b)?"
)

# What could keep math-verify busy for hours
_ENDLESS = re.compile(
    r"\^(?!\s*(?:-?\w|\\[a-z]++(?!\s*[{(])|[{(](?:[^\^{}()]|\{[^\^{}]*\})*[)}]))"  # a power in an exponent
    r"|\^\s*[{(](?:[^\d)}]*\d){4}"  # four digits in an exponent
    r"|\^\W*\d+\W*(?:right\W*)?\^"  # a power of a power
    r"|(?:\d{4}|[)}!])\s*!|\\(?:sum|prod|int|d?binom)(?![a-z])"  # a large factorial, a sum
)


def final_answer(text):
    """Returns what stands after the last `####` or in the last `\\boxed{}`, whichever is later, or None."""
    # MATH also writes \fbox{5} and \boxed 5
    text = re.sub(r"\\boxed +(-?[0-9][0-9.,/]*)", r"\\boxed{\1}", text.replace("\\fbox{", "\\boxed{"))
    _, box, content = text.rpartition("\\boxed{")
    _, mark, line = content.rpartition("####")
    if mark:
        return line.split("\n", 1)[0].strip() or None
    depth = 1
    for end, char in enumerate(content[:_MAX_ANSWER_CHARS]):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if box and depth == 0:
            return content[:end].strip() or None
    return None


def gold_answers(answer):
    """Returns the bare gold answers of a row, a list of texts: of a solution its final answer, "" if none."""
    bare = []
    for text in _as_texts(answer):
        is_marked = "####" in text or "\\boxed" in text
        bare.append(final_answer(text) or ("" if is_marked else text))
    return bare


def answers_equal(answer, gold):
    """Returns whether two final answers are the same: as texts, as numbers, or as mathematics (math-verify).

    One word may follow a number: "18 dollars" is "18", and "5 million" is not "5 thousand". An answer that is
    None or empty equals nothing.
    """
    if answer is None or gold is None or not answer.strip() or not gold.strip():
        return False
    if _without_blanks(answer) == _without_blanks(gold):
        return True
    if max(len(answer), len(gold)) > _MAX_ANSWER_CHARS:
        return False
    number, unit = _quantity(answer)
    gold_number, gold_unit = _quantity(gold)
    if number is not None and gold_number is not None:
        return number == gold_number and (unit == gold_unit or "" in (unit, gold_unit))
    if not re.search(r"[\\^{}=()+]", answer + gold) or _ENDLESS.search(f"{answer} {gold}"):
        return False

    from math_verify import parse, verify

    # Its time limit is a signal, which only the main thread may set. In other threads it warns of having none
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    formula = parse(f"${number or answer}$", parsing_timeout=limit)
    gold_formula = parse(f"${gold_number or gold}$", parsing_timeout=limit)
    return bool(verify(gold_formula, formula, timeout_seconds=limit))


def _without_blanks(text):
    """Returns a text without bold type and without blanks, except those between two digits."""
    return re.sub(r"(?<![0-9]) | (?![0-9])", "", " ".join(text.strip("* \n").split()))


def _quantity(text):
    """Returns (number, unit or "") of a text that is a number and at most one word, else (None, "")."""
    text = re.sub(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", r" \1", text)
    text = re.sub(r"\\[!,;: ]|\\(?=[$%])", "", text).replace("\u2212", "-")
    match = _QUANTITY.fullmatch(text.strip("* \t\n"))
    if match is None:
        return None, ""
    sign, number, unit = match.groups(default="")
    return Fraction(sign + number.replace(",", "")), unit.lower()


def exact_answer(prompts, responses, answers):
    """1.0 where the final answer equals that of the gold text (a solution or the bare answer), else 0.0."""
    return _match("exact_answer", final_answer, responses, answers)


def last_number(prompts, responses, answers):
    """1.0 where the last number equals the last one of the gold text, whatever stands around, else 0.0."""
    return _match("last_number", lambda text: [None, *_ANY_NUMBER.findall(text)][-1], responses, answers)


def answer_in(pattern):
    """Returns a reward function for answers in a format of yours, such as answer_in("Final: (.*)")."""
    if re.compile(pattern).groups != 1:
        raise UserError(f'answer_in({pattern!r}): the pattern must have one group, as "Final: (.*)" has')

    def read(text):
        found = [None, *re.findall(pattern, text)][-1]
        return found and (final_answer(found) or found)

    def tagged_answer(prompts, responses, answers):
        return _match("tagged_answer", read, responses, answers)

    return tagged_answer


tagged_answer = answer_in("(?s)<answer>((?:(?!<answer>).)*?)</answer>")


def _match(name, read, responses, answers):
    """1.0 where `read` finds the same answer in the response and in the gold answer, else 0.0."""

    def is_right(response, gold):
        [bare] = gold_answers(gold)
        return answers_equal(read(response), read(bare) or bare)

    return _score_each(name, is_right, responses, answers)


# ---------------------------------------------------------------- words, form, length


def normalise_answer(text):
    """Returns a text in lower case without punctuation, articles and extra blanks (hotpot_evaluate_v1.py)."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def em_score(response, answer):
    """1.0 if both normalise to the same text, else 0.0 (hotpot_evaluate_v1.py, exact_match_score)."""
    return float(normalise_answer(response) == normalise_answer(answer))


def f1_score(response, answer):
    """F1 over the bags of normalised words, 0 to 1 (hotpot_evaluate_v1.py, f1_score)."""
    words = normalise_answer(response)
    gold = normalise_answer(answer)
    if words != gold and {words, gold} & {"yes", "no", "noanswer"}:
        return 0.0
    common = sum((Counter(words.split()) & Counter(gold.split())).values())
    return 2 * common / max(1, len(words.split()) + len(gold.split()))


def rouge_l_score(response, answer):
    """F-measure of the longest common subsequence of words, 0 to 1 (Lin 2004; library rouge-score)."""
    from rouge_score.rouge_scorer import RougeScorer

    # Words of any script. The library's own have a-z and 0-9 only
    words = SimpleNamespace(tokenize=lambda text: re.findall(r"[^\W_]+", text.lower()))
    return float(RougeScorer(["rougeL"], tokenizer=words).score(answer, response)["rougeL"].fmeasure)


def em(prompts, responses, answers):
    """Exact match of each response with its answer, 0 or 1."""
    return _score_each("em", em_score, responses, answers)


def f1(prompts, responses, answers):
    """Word F1 of each response with its answer, 0 to 1."""
    return _score_each("f1", f1_score, responses, answers)


def rouge_l(prompts, responses, answers):
    """ROUGE-L of each response with its answer, 0 to 1."""
    return _score_each("rouge_l", rouge_l_score, responses, answers)


def answer_format(prompts, responses, answers):
    """1.0 where the response states one final answer and ends with it, or with what closes its formula."""
    scores = []
    for response in responses:
        _, answer, rest = response.rpartition(final_answer(response) or "\0")  # "\0": in no response
        is_end = re.fullmatch(r"(?:[.$*\s}]|\\\)|\\\]|\\end\{\w+\*?\})*", rest)
        marks = re.findall(r"####|\\boxed|\\fbox", response)
        scores.append(float(answer != "" and is_end is not None and len(marks) == 1))
    return scores


def length_penalty(prompts, responses, answers):
    """Minus the number of characters. Its weight is the price of one character."""
    return [-float(len(response)) for response in responses]
