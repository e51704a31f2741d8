"""Reward functions of texts, and how a trainer finds and calls them: the one module that trainers share.

A reward function takes three lists of equal length and returns one finite number per response:

    f(prompts: list[str], responses: list[str], answers: list) -> list[float]

A prompt that is a chat is a list of messages. An answer is a text or a number, or a list of several gold
answers, of which the best counts. It is None where the data has no answer.
"""

import functools
import inspect
import math
import re
import string
from collections import Counter
from types import SimpleNamespace

from .answers import answers_equal, count_marks, final_answer, find_last_number

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
    """Returns [(name, function, weight)] of REWARD_FUNCTIONS. A name that is taken gets a number: f, f_2.

    "reward_model" is taken: trainers log the score of the reward model under this name.
    """
    if not isinstance(specs, (list, tuple)):
        specs = [specs]  # the error message shows it
    found = []
    taken = {"reward_model"}
    for spec in specs:
        is_pair = isinstance(spec, (list, tuple)) and len(spec) == 2
        if not is_pair or not isinstance(spec[1], (int, float)) or not math.isfinite(spec[1]):
            wanted = 'REWARD_FUNCTIONS = [("exact_answer", 1.0)], pairs of a function and its weight'
            raise UserError(f"{spec!r:.100} is no reward function with a finite weight. Write {wanted}")
        function = find_function(spec[0])
        name = base = _name_of(function)
        number = 1
        while name in taken:
            number += 1
            name = f"{base}_{number}"
        taken.add(name)
        found.append((name, function, spec[1]))
    return found


def _name_of(function):
    """Returns the name of a function, of the function inside a functools.partial, or of an object's type."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def call_reward(function, prompts, responses, answers, columns):
    """Returns the values of a reward function, one float per response.

    Its fourth and later parameters get the columns of their names, {name: one value per response}. A `**`
    parameter gets all columns.
    """
    if not responses:  # of a process without a prompt
        return []
    name = "the reward function " + _name_of(function)
    keywords = _choose_columns(name, inspect.signature(function).parameters.values(), columns)
    values = []
    try:
        returned = _to_python(function(prompts, responses, answers, **keywords))
        if hasattr(returned, "__iter__") and not isinstance(returned, (dict, set)):
            values = [_to_python(value) for value in returned]
    except SystemExit as error:  # would end the run without a word, as if it were done
        raise RuntimeError(f"{name} called exit(). Run generated code in a process of its own") from error

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


def _score_each(name, score, prompts, responses, answers):
    """Returns score(response, gold answer) of each row. Of several gold answers the best counts."""
    scores = []
    for row, (response, answer) in enumerate(zip(responses, answers)):
        golds = _as_texts(answer)
        if not golds:
            prompt = f"{prompts[row]!r:.100}" if row < len(prompts) else f"row {row}"
            hint = "set the data set's output column, or leave such rows out"
            raise UserError(f"{name} needs the true answer of each row, and {prompt} has none: {hint}")
        scores.append(max(float(score(response, gold)) for gold in golds))
    return scores


def _as_texts(answer):
    """Returns the gold answers of a row as texts, without missing ones: None, NaN and empty texts."""
    golds = answer if isinstance(answer, list) else [answer]
    return [str(gold) for gold in golds if gold is not None and str(gold).strip() not in ("", "nan")]


# ---------------------------------------------------------------- final answers


def gold_answers(answer):
    """Returns the bare gold answers of a row, a list of texts: of a solution its final answer, "" if none."""
    return [final_answer(text) or ("" if count_marks(text) else text) for text in _as_texts(answer)]


def exact_answer(prompts, responses, answers):
    """1.0 where the final answer equals that of the gold text (a solution or the bare answer), else 0.0."""
    return _match("exact_answer", final_answer, prompts, responses, answers)


def last_number(prompts, responses, answers):
    """1.0 where the last number equals the last one of the gold text, whatever stands around, else 0.0."""
    return _match("last_number", find_last_number, prompts, responses, answers)


def answer_in(pattern):
    """Returns a reward function for answers in a format of yours, such as answer_in("Final: (.*)")."""
    if re.compile(pattern).groups != 1:
        raise UserError(f'answer_in({pattern!r}): the pattern must have one group, as "Final: (.*)" has')

    def read(text):
        found = [None, *re.findall(pattern, text)][-1]
        return found and (final_answer(found) or found)

    def tagged_answer(prompts, responses, answers):
        return _match("tagged_answer", read, prompts, responses, answers)

    return tagged_answer


tagged_answer = answer_in("(?s)<answer>((?:(?!<answer>).)*?)</answer>")


def _match(name, read, prompts, responses, answers):
    """1.0 where `read` finds the same answer in the response and in the gold answer, else 0.0."""

    def is_right(response, gold):
        [bare] = gold_answers(gold)
        return answers_equal(read(response), read(bare) or bare)

    return _score_each(name, is_right, prompts, responses, answers)


# ---------------------------------------------------------------- words, form, length


# Punctuation that changes the meaning: of -5, 1.5, 1/2 and .5, of one letter as in C#, C++ and B-
_MEANINGFUL = (
    r"(?<![\w-])-(?=[$.]?[0-9])|(?<=[0-9])[./](?=[0-9])|(?<![\w.])\.(?=[0-9])|(?<=\b[a-z])[-+#]+(?!\w)"
)


def normalise_answer(text):
    """Returns a text in lower case without punctuation, articles and extra blanks (hotpot_evaluate_v1.py).

    Unlike there, signs and decimal points stay, and what would leave nothing is not removed: "A", "...".
    """
    text = text.lower()
    words = re.sub(f"({_MEANINGFUL})|[{re.escape(string.punctuation)}]", r"\1", text)
    without_articles = re.sub(r"\b(a|an|the)\b", " ", words)
    for kept in (without_articles, words):
        if kept.strip():
            return " ".join(kept.split())
    return text.strip()


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
    return _score_each("em", em_score, prompts, responses, answers)


def f1(prompts, responses, answers):
    """Word F1 of each response with its answer, 0 to 1."""
    return _score_each("f1", f1_score, prompts, responses, answers)


def rouge_l(prompts, responses, answers):
    """ROUGE-L of each response with its answer, 0 to 1."""
    return _score_each("rouge_l", rouge_l_score, prompts, responses, answers)


def answer_format(prompts, responses, answers):
    """1.0 where the response states one final answer and ends with it, or with what closes its formula."""
    scores = []
    for response in responses:
        _, answer, rest = response.rpartition(final_answer(response) or "\0")  # "\0": in no response
        is_end = re.fullmatch(r"(?:[.$*\s}]|\\\)|\\\]|\\end\{\w+\*?\})*", rest)
        scores.append(float(answer != "" and is_end is not None and count_marks(response) == 1))
    return scores


def length_penalty(prompts, responses, answers):
    """Minus the number of characters. Its weight is the price of one character."""
    return [-float(len(response)) for response in responses]
