"""Final answers: how they are found in a text, and whether two of them are the same.

Only a few forms are understood: numbers with units, lists, tuples, intervals, and formulas of + - * / powers,
roots, factorials and letters. Anything else is compared as text. Nothing here takes long, in any thread.
"""

import decimal
import functools
import math
import operator
import random
import re
from fractions import Fraction

_MAX_ANSWER_CHARS = 300  # no real final answer is longer
_MAX_MARKS = 100  # of a response, counted from its end
_MAX_ITEMS = 20  # of a list
_MAX_BITS = 20_000  # of the numerator and the denominator of any intermediate result

# ---------------------------------------------------------------- final answers in a text

_MARK = re.compile(r"(?<!#)####(?!#)|\\(?:boxed|fbox|framebox)(?![A-Za-z])")
_GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_WITHOUT_BRACES = re.compile(rf"-?(?:[0-9][0-9.,/]*|\\[a-z]+(?:[0-9]|{_GROUP})*)")  # \boxed 5, \boxed\frac12


def count_marks(text):
    """Returns how often a text marks a final answer, by `####` or a box."""
    return len(_MARK.findall(text))


def final_answer(text):
    r"""Returns what stands after the last `####` or in the last `\boxed{}`, whichever is later, or None.

    Marks without an answer are passed over. A `####` line that begins with a letter may be a heading, so it
    counts only if nothing else is marked. If a box is not closed, the answer was cut off: None.
    """
    heading = None
    for mark in reversed(list(_MARK.finditer(text))[-_MAX_MARKS:]):
        content = text[mark.end() : mark.end() + _MAX_ANSWER_CHARS + 2].lstrip()
        if mark[0] == "####":
            answer = re.split(r"\n|####", content)[0].strip()
            if answer.lstrip("*_ ")[:1].isalpha():
                heading = heading or answer
                answer = ""
        elif content.startswith("{"):
            answer = _inside_braces(content)
            if answer is None:
                return None
        else:
            short = _WITHOUT_BRACES.match(content)
            answer = short[0] if short else ""
        if answer:
            return answer
    return heading


def _inside_braces(text):
    """Returns what stands inside the braces that open a text, or None if they are not closed."""
    depth = 0
    for end, char in enumerate(text):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth == 0:
            return text[1:end].strip()
    return None


_ANY_NUMBER = re.compile(
    r"(?:(?<![\w)}])-[ \t]*[$€£]?[ \t]*)?"  # the minus of "5-2" is no sign
    r"(?:[0-9]+ [0-9]+/[0-9]+"  # 1 1/2
    r"|[0-9]{1,3}(?:[, ][0-9]{3})+(?![0-9])(?:\.[0-9]+)?"  # 10,000 or 10 000
    r"|(?:[0-9]+|(?=\.[0-9]))(?:[./][0-9]+)*(?:[eE][-+]?[0-9]{1,3}\b)?)"
)


def find_last_number(text):
    """Returns the last number of a text as it is written, with its sign, or None."""
    text = re.sub(r"[\u2010-\u2015\u2212]", "-", text)
    text = re.sub(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}", r" \1/\2", text)
    text = text.replace("{,}", ",").replace("\\,", " ").replace("\\$", "$").replace("\u202f", " ")
    text = re.sub(r"(?<=[0-9)}%])[ \t]*-", " minus ", text)
    numbers = _ANY_NUMBER.findall(text)
    return numbers[-1] if numbers else None


# ---------------------------------------------------------------- one way to write each thing


def _repeating_decimal(match):
    """Returns the fraction of 0.1\\overline{6}: (16 - 1) / 90."""
    whole, digits, repeated = match.groups()
    numerator = int(whole + digits + repeated) - int("0" + whole + digits)
    return f"{numerator}/{(10 ** len(repeated) - 1) * 10 ** len(digits)}"


def _mixed_number(match):
    """Returns the fraction of 1 1/2: 3/2."""
    whole, numerator, denominator = map(int, match.groups())
    return f"{whole * denominator + numerator}/{denominator}"


def _interval(match):
    """Returns the interval of 5 < x <= 6: (5,6]."""
    low, left, right, high = match.groups()
    return f"{'[' if left == '<=' else '('}{low},{high}{']' if right == '<=' else ')'}"


_REWRITES = [  # (pattern, replacement), in this order
    (r"[\u2010-\u2015\u2212]", "-"),
    (r"²|\^\s*\{2\}", "^2"),
    (r"³|\^\s*\{3\}", "^3"),
    (r"\^\s*\\circ|\^\s*\{\s*\\circ\s*\}", "°"),
    # Decoration
    (r"(?<!\\)\$(.*?)(?<!\\)\$", r"\1"),  # a single $ is a currency
    (r"\*\*|(?<!\\)\\[()\[\]]|\\!", ""),
    (r"\\(?:left|right|displaystyle)(?![a-z])|\\(?:text)?color\s*\{\w+\}", ""),
    (r"\\(?:text\w*|mathrm|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 "),
    (r"([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*\{?([0-9]+)\}?", _repeating_decimal),
    (r"\\(?:underline|overline|mathbf|boxed|fbox|framebox)(?=\s*\{)", ""),
    (r"\\[,;: ]|\\q?quad(?![a-z])|~|\s", " "),
    (r"\\(?=[$%#&])", ""),
    (r" +", " "),
    (r"^ ?\{([^{}]*)\} ?$", r"\1"),
    (r"^ ?(?i:the )?(?i:final )?(?i:answer)(?: is)?[ :=]+", ""),
    # Operators
    (r"\\cdot(?![a-z])|\\times(?![a-z])|[\u00d7·]", "*"),
    (r"\\div(?![a-z])|÷", "/"),
    (r"\\leq?(?![a-z])|≤", "<="),
    (r"\\lt(?![a-z])", "<"),
    (r"π", r"\\pi "),
    (r"√", r"\\sqrt"),
    (r"(?<![\\A-Za-z])(pi|sqrt|ln|log|sin|cos|tan)(?![A-Za-z])", r"\\\1"),
    (r" ?, (?:and|or) | (?:and|or) ", ","),
    # Numbers
    (r"\\[dt](frac|binom)", r"\\\1"),
    (r"\\(frac|binom|sqrt) ?([0-9])", r"\\\1{\2}"),
    (r"(\\(?:frac|binom)\{[^{}]*\}) ?([0-9])", r"\1{\2}"),
    (r"(?<=[0-9])\{,\}(?=[0-9]{3})", ","),
    (r"(?<![0-9.,(\[{])[0-9]{1,3}(?:[, ][0-9]{3})+(?![0-9)\]])", lambda match: re.sub("[, ]", "", match[0])),
    (r"(?<![\w.,/^}])([0-9]+) ?\\frac\{([0-9]+)\}\{([0-9]+)\}(?! ?[\^!])", _mixed_number),
    (r"(?<![\w.,/^}])([0-9]+) ([0-9]+)/([0-9]+)(?![\w.^!])", _mixed_number),
    (r"^(.+?)(<=?) ?[a-z] ?(<=?)(.+)$", _interval),
    (r"^[a-z] ?\\in(?![a-z])", ""),
    (r"([百千万億亿])", r" \1 "),
]


def _rewrite(text):
    """Returns an answer without decoration, and with one way to write signs, operators and numbers."""
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text.strip())
    return text.strip().rstrip(".").strip()


def _without_blanks(text):
    """Returns a text without blanks, except those between two digits."""
    return re.sub(r"(?<![0-9]) | (?![0-9])", "", text)


# ---------------------------------------------------------------- units

# Shorter than three letters, or often written without a blank. "5m" without a blank is mathematics
_SHORT_UNITS = set(
    "mm cm dm m km in ft yd mi sq g kg mg lb lbs oz l L ml mL s ms min h hr hrs am pm AM PM"
    " mph kmh Hz kHz N J kJ W kW V ° °C °F % $ € £".split()
)
_SYMBOLS = {"%": "percent", "°": "degree", "$": "dollar", "€": "euro", "£": "pound"}
_MAGNITUDES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_MAGNITUDES |= {"trillion": 10**12, "百": 100, "千": 1000, "万": 10**4, "億": 10**8, "亿": 10**8}
# These words change the number and are no units
_NO_UNIT = re.compile(
    r"(?:half|halves|thirds?|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|million)ths?|squared|cubed"
    r"|factorial|times|plus|minus|over|out|negative|less|more|than|not|mil|mill?e|mio"
    r"|mill?ion\w+|mill?ones|milliard\w*|tausend|lakhs?|crores?|score|gross|тыс\w*|миллион\w*|миллиард\w*)",
    re.IGNORECASE,
)
_UNIT = re.compile(
    r"([-+]?)\s*([$€£]?)\s*(.*?(?:[0-9)}!]|\\pi))(\s*)((?![/*.^ ])(?:[^\W\d_]|[%°$€£/*. ]|\^[23])*)"
)


def _split_unit(text):
    """Returns (number or formula, unit): of "-$3 million" ("-3000000", "dollar"). The unit may be ""."""
    match = _UNIT.fullmatch(text)
    if match is None:
        return text, ""
    sign, currency, number, blank, unit = match.groups()
    factor = 1
    words = []
    for word in re.findall(r"°?[^\W\d_]+|[%°$€£]|[/*]|\^[23]", re.sub(r"\bper\b", "/", unit)):
        plain = word.lower().removesuffix("s") if len(word) > 3 else word
        if plain in _MAGNITUDES and not words:
            factor *= _MAGNITUDES[plain]
        elif re.match(r"[/*^]", word) or _is_unit(word, is_glued=not blank and not words):
            words.append(_SYMBOLS.get(plain, plain))
        else:
            return text, ""
    if factor > 1:
        number = f"({number})*{factor}"
    return sign + number, _SYMBOLS.get(currency, "") + "".join(words)


def _is_unit(word, is_glued):
    """Returns whether a word behind a number is a unit. Without a blank before it, it may be algebra: 2xy."""
    if _NO_UNIT.fullmatch(word):
        return False
    if word in _SHORT_UNITS:
        return len(word) > 1 or not word.isalpha() or not is_glued
    is_of_another_script = re.fullmatch(r"[\u0400-\u1eff\u2e80-\ud7ff]+", word) is not None
    return is_of_another_script or len(word) >= (5 if is_glued else 3)


# ---------------------------------------------------------------- formulas

_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\\[a-z]+|\S")
_LETTER = re.compile(r"[A-Za-z]|\\(?:pi|alpha|beta|gamma|delta|theta|lambda|mu|sigma|phi|omega)")
_FUNCTIONS = ["\\ln", "\\log", "\\sin", "\\cos", "\\tan"]
_CLOSING = {"(": ")", "{": "}", "[": "]"}
_DIGITS = decimal.Context(
    prec=100, traps=[decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow, decimal.Underflow]
)


@functools.lru_cache(maxsize=1000)
def _value(text):
    """Returns the value of a number or formula: a Fraction, a Decimal of 100 digits, or else None."""
    number = text.replace(" ", "") if re.match("[-+] ", text) else text
    try:
        if re.fullmatch(r"[-+]?[0-9./]+(?:[eE][-+]?[0-9]{1,3})?", number):
            return Fraction(number)
        if text.isalpha() or re.search(r"(?<![\\A-Za-z])[A-Za-z]{3}", text):  # words
            return None
        with decimal.localcontext(_DIGITS):
            formula = _Formula(text)
            value = formula.sum()
        return value if formula.tokens == [""] else None
    except (ValueError, ArithmeticError, RecursionError):
        return None


class _Formula:
    """Computes a formula from left to right. A letter is a fixed random number: formulas of letters that are
    the same for it are the same for all. Raises ValueError at what is not understood or becomes too large."""

    def __init__(self, text):
        self.tokens = [*_TOKEN.findall(text), ""]

    def take(self, *wanted):
        """Removes and returns the next token if it is one of those wanted, else returns None."""
        return self.tokens.pop(0) if self.tokens[0] in wanted else None

    def sum(self):
        value = self.product()
        while sign := self.take("+", "-"):
            value = _calculate({"+": operator.add, "-": operator.sub}[sign], value, self.product())
        return value

    def product(self):
        value = self.signed()
        while True:
            if self.take("*"):
                value = _calculate(operator.mul, value, self.signed())
            elif self.take("/"):
                value = _calculate(operator.truediv, value, self.signed())
            elif re.match(r"[A-Za-z({\\]", self.tokens[0]):  # 2x
                value = _calculate(operator.mul, value, self.power())
            else:
                return value

    def signed(self):
        sign = self.take("+", "-")
        if sign is None:
            return self.power()
        value = self.signed()
        return -value if sign == "-" else value

    def power(self):
        value = self.operand()
        if self.take("!"):
            value = Fraction(math.factorial(_small_integer(value)))
        if self.take("^"):
            value = _power(value, self.signed())
        return value

    def operand(self):
        token = self.tokens.pop(0)
        if re.match(r"[0-9.]", token):
            return Fraction(token)
        if _LETTER.fullmatch(token):
            return _random_number(token)
        if token in _FUNCTIONS:  # two of them are the same if their arguments are
            is_bracket = self.tokens[0] in _CLOSING
            argument = self.operand()
            if not is_bracket and re.match(r"[0-9A-Za-z(^!]", self.tokens[0]):
                raise ValueError("where does the argument end?")
            return _random_number(f"{token} {argument}")
        if token in ("(", "{", "["):
            value = self.sum()
            if not self.take(_CLOSING[token]):
                raise ValueError("a bracket is not closed")
            return value
        if token == "\\frac":
            numerator = self.operand()
            return _calculate(operator.truediv, numerator, self.operand())
        if token == "\\sqrt":
            degree = self.operand() if self.tokens[0] == "[" else Fraction(2)
            return _root(self.operand(), degree)
        if token == "\\binom":
            n = _small_integer(self.operand())
            return Fraction(math.comb(n, _small_integer(self.operand())))
        raise ValueError(f"{token!r} is not understood")


def _random_number(name):
    """Returns the same random number from 0 to 2 for the same name."""
    return Fraction(random.Random(name).getrandbits(64), 2**63)


def _calculate(operation, left, right):
    """Returns operation(left, right), exactly if both are Fractions."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return _checked(operation(left, right))
    return _checked(operation(_decimal(left), _decimal(right)))


def _power(base, exponent):
    """Returns base ** exponent, exactly if base is a Fraction and exponent a whole number."""
    if not isinstance(base, Fraction) or exponent != int(exponent):
        return _checked(_decimal(base) ** _decimal(exponent))
    if abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length()) > _MAX_BITS:
        raise ValueError("too large")
    return _checked(base ** int(exponent))


def _root(value, degree):
    """Returns the root of a degree from 2. Odd roots of negative numbers are negative."""
    degree = _small_integer(degree)
    if degree < 2:
        raise ValueError(f"{degree} is no degree of a root")
    if value < 0 and degree % 2 == 1:
        return -_root(-value, Fraction(degree))
    return _checked(
        _decimal(value).sqrt() if degree == 2 else _decimal(value) ** (decimal.Decimal(1) / degree)
    )


def _decimal(value):
    """Returns a Fraction or Decimal as a Decimal."""
    if isinstance(value, Fraction):
        value = decimal.Decimal(value.numerator) / decimal.Decimal(value.denominator)
    return _checked(value)


def _checked(value):
    """Returns a Fraction or Decimal if it is of a size that is computed quickly and compared rightly."""
    if isinstance(value, Fraction):
        is_right = max(value.numerator.bit_length(), value.denominator.bit_length()) <= _MAX_BITS
    else:  # else 100 digits might not show the 1 of sqrt(2)^999 + 1
        is_right = value == 0 or 1e-20 < abs(value) < 1e20
    if not is_right:
        raise ValueError("too large or too small")
    return value


def _small_integer(value):
    """Returns a number as an int if it is one from 0 to 1000, else raises ValueError."""
    if value != int(value) or not 0 <= value <= 1000:
        raise ValueError(f"{value} is no small integer")
    return int(value)


# ---------------------------------------------------------------- whether two answers are the same


def answers_equal(answer, gold):
    """Returns whether two final answers are the same, as text or as far as this file understands them.

    A unit may be missing on one side: "18 dollars" is "18", but "5 m" is not "5 km". "x = 5" is "5".
    An answer that is None or empty equals nothing.
    """
    if answer is None or gold is None or not answer.strip() or not gold.strip():
        return False
    if answer.split() == gold.split():
        return True
    if max(len(answer), len(gold)) > _MAX_ANSWER_CHARS:
        return False
    return _same(_rewrite(answer), _rewrite(gold))


def _same(answer, gold):
    if not answer or not gold:
        return False
    if _without_blanks(answer) == _without_blanks(gold):
        return True
    brackets, items = _split_list(answer)
    gold_brackets, gold_items = _split_list(gold)
    if len(items) != len(gold_items) or len(items) > _MAX_ITEMS:
        return False
    if len(items) == 1:
        return _same_value(items[0], gold_items[0])
    if brackets != gold_brackets:
        return False
    if brackets != "{}":
        return all(map(_same, items, gold_items))
    for item in items:  # in any order
        match = next((gold for gold in gold_items if _same(item, gold)), None)
        if match is None:
            return False
        gold_items.remove(match)
    return True


def _split_list(text):
    """Returns (brackets, items): "()" of "(1,2)", "[)" of "[1,2)", "{}" of a set and of "1,2"."""
    brackets = "{}"
    match = re.fullmatch(r"(\\\{|[(\[]) ?(.*?) ?(\\\}|[)\]])", text)
    if match:
        items = _split_at_commas(match[2])
        if items and (len(items) > 1 or match[1] + match[3] in ("()", "\\{\\}")):
            return (match[1] + match[3]).replace("\\", ""), items
    return brackets, _split_at_commas(text) or [text]


def _split_at_commas(text):
    """Returns the parts between the commas outside brackets, or [] if a bracket closes that is not open."""
    items = [""]
    depth = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return []
        if depth == 0 and char in ",;":
            items.append("")
        else:
            items[-1] += char
    return [item.strip() for item in items]


def _same_value(answer, gold):
    """Returns whether two answers without commas are the same number or formula, with one name and unit."""
    name, answer = _split_name(answer)
    gold_name, gold = _split_name(gold)
    number, unit = _split_unit(answer)
    gold_number, gold_unit = _split_unit(gold)
    if (name and gold_name and name != gold_name) or (unit and gold_unit and unit != gold_unit):
        return False
    if _without_blanks(number) == _without_blanks(gold_number):
        return True
    value, gold_value = _value(number), _value(gold_number)
    if value is None or gold_value is None:
        return False
    if isinstance(value, Fraction) and isinstance(gold_value, Fraction):
        return value == gold_value
    value, gold_value = Fraction(value), Fraction(gold_value)
    return abs(value - gold_value) <= max(abs(value), abs(gold_value)) / 10**80


def _split_name(text):
    """Returns (name, value) of "x = 5" or "f(x) = 2x", ("", text) of any other text."""
    match = re.fullmatch(r"([A-Za-z](?:\([a-z]\))?|\\[a-z]+) ?= ?(.+)", text)
    return match.groups() if match else ("", text)
