"""Reward functions of texts, and how a trainer finds and calls them: the one module that trainers share. They
take (prompts, responses, answers), lists of one length, and return a number for each row. An answer is a
text, a number, a list of gold answers of which the best counts, or None."""

import ast
import functools
import math
import operator as op
import random
import re
import string
from collections import Counter
from decimal import Context, Decimal, DivisionByZero, InvalidOperation, Overflow, Underflow, localcontext
from inspect import isfunction, signature
from types import SimpleNamespace

_LISTS = ["prompts", "responses", "answers"]


class UserError(ValueError):
    """Something that the user can correct, in one message. A trainer then ends with exit code 2."""


def find_function(function):
    """Returns a reward function, which may be given by its name in this module."""
    if callable(function):
        return function
    known = {k: f for k, f in globals().items() if isfunction(f) and [*signature(f).parameters] == _LISTS}
    if function not in known:
        raise UserError(f"rewards/ has no function {function!r}; it has {', '.join(known)}")
    return known[function]


def find_functions(specs):
    """Returns [(name, function, weight)] of REWARD_FUNCTIONS. A name that is taken gets a number: f, f_2."""
    found = []
    names = ["reward_model"]  # trainers log the score of the reward model under this name
    for spec in specs:
        match spec:
            case [function, int() | float() as weight] if math.isfinite(weight):
                function = find_function(function)
            case _:
                raise UserError(f"{spec!r:.99} is no (function, finite weight), as ('exact_answer', 1.0) is")
        name = getattr(getattr(function, "func", function), "__name__", type(function).__name__)
        candidates = [name] + [f"{name}_{number}" for number in range(2, len(names) + 2)]
        names.append(next(name for name in candidates if name not in names))
        found.append((names[-1], function, weight))
    return found


def call_reward(function, prompts, responses, answers, columns):
    """Returns one float per response. Later parameters of the function get the columns of their names."""
    if not responses:  # of a process without a prompt
        return []
    name = getattr(getattr(function, "func", function), "__name__", type(function).__name__)
    parameters = signature(function).parameters
    first = list(parameters)[:3]
    for parameter, wanted in zip(first, _LISTS):
        if parameter != wanted and parameter in (*_LISTS, "completions", "completion_ids"):
            raise UserError(f"{name} must take (prompts, responses, answers), not {first}")
    takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    keywords = {k: v for k, v in columns.items() if k not in first and (takes_all or k in parameters)}
    try:
        signature(function).bind(prompts, responses, answers, **keywords)
    except TypeError as error:
        raise UserError(f"{name}: {error}; the columns are: {', '.join(columns)}") from error
    values = []
    try:
        returned = function(prompts, responses, answers, **keywords)
        is_row = hasattr(returned, "__iter__") and getattr(returned, "ndim", 1) == 1
        if is_row and not isinstance(returned, (dict, set)):
            values = [value.tolist() if hasattr(value, "tolist") else value for value in returned]
    except SystemExit as error:  # would end the run without a word, as if it were done
        raise RuntimeError(f"{name} called exit(). Run generated code in a process of its own") from error
    numbers = [float(v) for v in values if isinstance(v, (int, float)) and abs(v) < 3e38]  # float32's range
    if len(numbers) != len(values) or len(numbers) != len(responses):
        raise UserError(f"{name} must return {len(responses)} finite numbers, not {values or returned!r:.99}")
    return numbers


def _per_row(name, score, read=None):
    """Returns a reward function of score(response, gold answer), or of what `read` finds in both."""

    def function(prompts, responses, answers):
        scores = []
        for row, (response, answer) in enumerate(zip(responses, answers)):
            golds = _as_texts(answer)
            if not golds:
                raise UserError(f"{name} needs the true answers (`output`); {prompts[row]!r:.99} has none")
            if read:
                response = read(response)
                golds = [read(bare) or bare for bare in gold_answers(golds)]
            scores.append(max(float(score(response, gold)) for gold in golds))
        return scores

    function.__name__ = name
    return function


def _as_texts(answer):
    golds = answer if isinstance(answer, list) else [answer]
    return [str(gold) for gold in golds if gold is not None and str(gold).strip() not in ("", "nan")]


_MARK = re.compile(r"(?<!#)####(?!#)|\\(?:boxed|fbox|framebox)(?![A-Za-z])")
_INSIDE = r"[^{}]*(?:\{[^{}]*(?:\{[^{}]*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^{}]*)*\}[^{}]*)*\}[^{}]*)*"
_MARKED = re.compile(  # a line, {a box}, or a box without braces, which may be empty
    rf"####\s*(.*?)(?:####|\n|$)"
    rf"|\\[a-z]+?\s*(?:\{{({_INSIDE})\}}|(-?(?:\d[\d.,/]*|\\[a-z]+(?:\d|\{{{_INSIDE}\}})*))|(?!\{{|[a-z])())"
)
_LAST_NUMBER = (
    r"((?:(?<![\w)}%])(?<![\d)}%] )[-\u2010-\u2015\u2212] ?\\?[$€£]? ?)?"  # the minus of "5-2" is no sign
    r"(?:(?:\d+ ?)?\\[dt]?frac\{\d+\}\{\d+\}|\d+ \d+/\d+|\d{1,3}(?:(?:,|\{,\}|\\,|[ \u202f])\d{3})+(?!\d)"
    r"(?:\.\d+)?|(?:\d+|(?=\.\d))(?:[./]\d+)*(?:[eE][-+]?\d{1,3}\b)?))"
)
_REWRITES = [  # (pattern, replacement), in this order
    (r"(?<!\\)\$(.*?)(?<!\\)\$", r"\1"),  # a single $ is a currency
    (r"\*\*|(?<!\\)\\[()\[\]]|\\(left|right|underline)(?![a-z])|\\(text)?color ?\{\w+\}", ""),
    (r"\\(?=[$%#&])|\\!|(?<=\\)[dt](?=frac|binom)|^(?i:answer)( is|:) ?|^[a-z] ?\\in ", ""),
    (r"\\(text\w*|mathrm|mbox) ?\{([^{}]*)\}", r" \2 "),
    (r"((?<!\\)\\[,;: ]|\\q?quad(?![a-z])|[~\u202f ])+", " "),
    (r"[\u2010-\u2015\u2212]", "-"),
    (r"([0-9]*\.[0-9]*)\\overline ?\{?([0-9]{1,9})\}?", lambda match: match[1] + match[2] * 120),
    (r"^ ?\\?\{([^{}]*?)\\?\} ?$", r"\1"),
    (r"\\(cdot|times)(?![a-z])|[\u00d7·]", "*"),
    (r"\\pi(?![a-z])", "π"),
    (r"\\(frac|binom|sqrt) ?([0-9])", r"\\\1{\2}"),
    (r"(\\(?:frac|binom)\{[^{}]*\}) ?([0-9])", r"\1{\2}"),
    (r"(?<![\d.,(\[{])\d{1,3}((,| |\{,\})\d{3})+(?![\d)\]])", lambda match: re.sub("[, {}]", "", match[0])),
    (r"(?<![\w.,/^}])(\d+)(?: ?\\frac\{(\d+)\}\{| (\d+)/)(\d+)\}?(?! ?[\^!]|[\w.])", r"(\1+\2\3/\4)"),
    (r"^([-+]? ?[0-9.]+)[eE]([-+]?[0-9]{1,3})(?![\w.])", r"\1*10^(\2)"),
    (r"(?<![0-9.])([0-9]{1,2})!(?!!)", lambda match: f"({math.factorial(int(match[1]))})"),
    (r"\\binom\{(\d{1,3})\}\{(\d{1,3})\}", lambda match: f"({math.comb(int(match[1]), int(match[2]))})"),
    (r" ?(°|\^ ?\{? ?\\circ ?\}?)", " degrees"),
    (r" ?%", " percent"),
    (r"(?<=[0-9])([cmk]m|[mk]g|m[lL]|mph|am|pm|元)(?![A-Za-z])", r" \1"),
    (r"([0-9.]+) (dozen|hundred|thousand|[mb]illion)\b", lambda m: f"({m[1]}*{_MAGNITUDES[m[2]]})"),
    (r"\$ ?([0-9.]+|\([^()]*\))( dollars)?", r"\1 dollars"),
    (r"^([^<>=,]+)< ?[a-z] ?<([^<>=,]+)$", r"(\1,\2)"),
    (r"(?<![0-9A-Za-z)}π]) | (?![0-9A-Za-z元])|[ .]+$", ""),
    (r"(?:(?<=[0-9)}π] )|(?<=/))[A-Za-z]{4,}", lambda match: match[0].lower().removesuffix("s")),
    (r"^\(([^(),]*)\)$", r"\1"),
    (r"^([(\[])((?:[^()\[\]]|\([^()]*\))*)([)\]])$", r"\1\3,\2"),  # [1,2) becomes [),1,2
]
_MAGNITUDES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_UNIT = (  # words that change the number are no units; "2 x" and "2 xy" are mathematics
    r"(?:(?!(?i:hal[fv]|third|(?!month)\w+th\b|squared|cubed|factorial|dozen|hundred|thousand|\w*illi[ao]|mil\b"
    r"|(?:time|plu|minu|over|out|negative|les|more|than|not)s?\b))"
    r"(?:[A-Za-z]{3,}|[cmdk]?m|in|ft|[mk]?g|m?[lL]|m?s|h|[ap]m|[AP]M)\b(?:\^[23])?|元)"
)
_PARTS = re.compile(rf"(?:([A-Za-z](?:\([a-z]\))?) ?= ?)?(.*?)(?:(?<=[0-9)}}π]) ({_UNIT}(?:[ /*]{_UNIT})*))?")
_UNCLEAR = re.compile(  # words, f(x), and 1/2x, which may mean x/2 or 1/(2x)
    r"[^0-9A-Za-zπ+\-*/^(){}\\.\n ]|\*\*|//|\\(?!frac|sqrt)|(?<![\\A-Za-z])[A-Za-z]{3}|(?m:^[A-Za-z ]+$)"
    r"|\.(?!\d)|[fgh]\(|/([0-9.]+|[A-Za-zπ])(?=[A-Za-zπ(\\])"
)
_TO_PYTHON = [
    (r"(?<!\d) | (?!\d)", ""),
    (r"(?<=[0-9A-Za-zπ)}])(?=[A-Za-zπ(\\])|(\\[a-z]+[\[({]?)", lambda match: match[1] or "*"),
    (r"[0-9]*\.?[0-9]+", r"('\g<0>')"),
    (r"[{}^\\]", lambda match: {"{": "(", "}": ")", "^": "**", "\\": ""}[match[0]]),
]
_NAMES = {letter: Decimal(1 + random.Random(letter).random()) for letter in string.ascii_letters + "π"}
_NAMES |= {"sqrt": Decimal.sqrt, "frac": lambda a: lambda b: a / b}
_OPERATIONS = {ast.Add: op.add, ast.Sub: op.sub, ast.Mult: op.mul, ast.Div: op.truediv, ast.Pow: op.pow}
_OPERATIONS |= {ast.USub: op.neg, ast.UAdd: op.pos, ast.Call: op.call}
_CONTEXT = Context(200, Emin=-40, Emax=40, traps=[InvalidOperation, DivisionByZero, Overflow, Underflow])


def final_answer(text):
    r"""Returns what stands after the last `####` or in the last `\boxed{}`, None if that is not closed."""
    heading = None
    for mark in reversed([*_MARK.finditer(text)][-100:]):
        marked = _MARKED.match(text[mark.start() : mark.start() + 300])  # no real final answer is longer
        if marked is None:
            return None
        answer = marked[marked.lastindex].strip()
        if marked[1] and answer.lstrip("*_ ")[:1].isalpha():
            heading = heading or answer  # counts only if nothing else is marked
        elif answer:
            return answer
    return heading


def gold_answers(answer):
    """Returns the bare gold answers of a row, a list of texts: of a solution its final answer, "" if none."""
    return [final_answer(text) or ("" if _MARK.search(text) else text) for text in _as_texts(answer)]


def _rewrite(text, rewrites):
    return functools.reduce(lambda rewritten, row: re.sub(*row, rewritten), rewrites, text)


def answers_equal(answer, gold):
    """Returns whether two final answers are the same, as texts, numbers or formulas with their units."""
    texts = [" ".join((text or "").split()) for text in (answer, gold)]
    if texts[0] == texts[1] or "" in texts or max(map(len, texts)) > 300:
        return texts[0] == texts[1] != ""
    items, golds = [re.split(r",(?![^(\[{]*[)\]}])", _rewrite(text, _REWRITES)) for text in texts]
    if len(items) != len(golds) or len(items) > 20:
        return False
    if len(items) == 1 or items[0] in ("()", "[]", "[)", "(]"):
        return all(map(_same, items, golds))
    counts = [sum(_same(item, other) for other in items) for item in items]
    return counts == [sum(_same(item, gold) for gold in golds) for item in items]  # in any order


def _same(answer, gold):
    """Returns whether two answers are the same number or formula. Its name or unit may be missing in one."""
    name, number, unit = _PARTS.fullmatch(answer).groups("")
    gold_name, gold_number, gold_unit = _PARTS.fullmatch(gold).groups("")
    if (name and gold_name and name != gold_name) or (unit and gold_unit and unit != gold_unit):
        return False
    if number == gold_number or _UNCLEAR.search(f"{number}\n{gold_number}"):
        return number == gold_number != ""
    try:
        trees = [ast.parse(_rewrite(text, _TO_PYTHON), mode="eval") for text in (number, gold_number)]
        with localcontext(_CONTEXT):
            value, gold_value = [_evaluate(tree.body) for tree in trees]
            return value == gold_value or abs(value / gold_value - 1) < Decimal("1e-99")
    except (ArithmeticError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False  # not understood, or too large


def _evaluate(node):
    """Returns the value of a formula, 1e-40 to 1e40, to 200 digits. A letter is a random number."""
    if isinstance(node, ast.Constant):
        return Decimal(node.value)
    if isinstance(node, ast.Name):
        return _NAMES[node.id]
    operands = [_evaluate(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    return _OPERATIONS[type(getattr(node, "op", node))](*operands)


def answer_in(pattern, name="tagged_answer"):
    """Returns a reward function for answers in a format of yours, such as answer_in("Final: (.*)")."""
    if re.compile(pattern).groups != 1:
        raise UserError(f'answer_in({pattern!r}): the pattern must have one group, as "Final: (.*)" has')

    def read(text):
        found = [None, *re.findall(pattern, text)][-1]
        return found and (final_answer(found) or found)

    return _per_row(name, answers_equal, read)


def normalise_answer(text, strict=False):
    """Returns a text without case, punctuation, articles and extra blanks (hotpot_evaluate_v1.py). strict:
    signs stay in -5, 3.5, 1/2, <5, C#, B- and the like, and nothing becomes empty, such as "A" or "+"."""
    kept = r"^\W+$|(?<![\w-])-(?=[$.]?\d)|(?<=\d)([./:^*+-]|,(?!\d{3}))(?=\d)|(?<![\w.])\.(?=\d)"
    kept = rf"{kept}|[<>]=?(?= ?\d)|(?<=\b[a-z])[-+#]+(?!\w)" if strict else "(?!)"
    articles = r"\b(a|an|the)\b(?! *$)" if strict else r"\b(a|an|the)\b"
    words = re.sub(f"({kept})|[{re.escape(string.punctuation)}]", r"\1", text.lower().strip())
    return " ".join(re.sub(articles, " ", words).split())


def em_score(response, answer, strict=False):
    """1.0 if both normalise to the same text, else 0.0 (hotpot_evaluate_v1.py, exact_match_score)."""
    return float(normalise_answer(response, strict) == normalise_answer(answer, strict))


def f1_score(response, answer, strict=False):
    """F1 over the bags of normalised words, 0 to 1 (hotpot_evaluate_v1.py, f1_score)."""
    words, gold = normalise_answer(response, strict), normalise_answer(answer, strict)
    if words != gold and {words, gold} & {"yes", "no", "noanswer"}:
        return 0.0
    common = sum((Counter(words.split()) & Counter(gold.split())).values())
    return 2 * common / max(1, len(words.split()) + len(gold.split()))


def rouge_l_score(response, answer):
    """F-measure of the longest common subsequence of words, 0 to 1 (Lin 2004; library rouge-score)."""
    from rouge_score.rouge_scorer import RougeScorer  # its own words have a-z and 0-9 only

    words = SimpleNamespace(tokenize=lambda text: re.findall(r"[^\W_]+", text.lower()))
    return float(RougeScorer(["rougeL"], tokenizer=words).score(answer, response)["rougeL"].fmeasure)


def answer_format(prompts, responses, answers):
    """1.0 where the response states one final answer and ends with it, or with what closes its formula."""
    scores = []
    for response in responses:
        _, answer, rest = response.rpartition(final_answer(response) or "\0")  # "\0": in no response
        is_end = re.fullmatch(r"(?:[.$*\s}]|\\\)|\\\]|\\end\{\w+\*?\})*", rest)
        scores.append(float(answer != "" and is_end is not None and len(_MARK.findall(response)) == 1))
    return scores


def length_penalty(prompts, responses, answers):
    """Minus the number of characters. Its weight is the price of one character."""
    return [-float(len(response)) for response in responses]


exact_answer = _per_row("exact_answer", answers_equal, final_answer)
last_number = answer_in(_LAST_NUMBER, "last_number")
tagged_answer = answer_in("(?s)<answer>((?:(?!<answer>).)*?)</answer>")
em = _per_row("em", em_score)
f1 = _per_row("f1", f1_score)
rouge_l = _per_row("rouge_l", rouge_l_score)
strict_em = _per_row("strict_em", functools.partial(em_score, strict=True))
strict_f1 = _per_row("strict_f1", functools.partial(f1_score, strict=True))
