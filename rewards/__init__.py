"""Reward functions: pure functions over strings, the one module the trainers share.

Functions of one response (`final_answer`, `answers_equal`, `em_score`, `f1_score`, `rouge_l_score`) return
one value.
Functions that REWARD_FUNCTIONS can name take three equally long lists and return one float a row:

    f(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float]

A prompt that is a chat is a list of messages. Yours may be any such function; `answers` comes from the data
set's output column and holds None without one. Where that column holds a list of texts, several gold
answers, a response is compared with each and the best counts. The reward modes of `rce/rce.py` take the
numbers of one prompt's candidates and return one reward a candidate.
"""

import functools
import logging
import math
import re
import string
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

# The number after `####`, as GSM8K writes it: sign, currency, thousands commas, decimals or a fraction, on
# the same line.
_MARKED = re.compile(r"####[ \t]*([^\n]*)")
_NUMBER = re.compile(
    r"[-+\u2212]?[ \t]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+|/[1-9][0-9]*)?(?![0-9])"
)
_ANY_NUMBER = re.compile(r"(?:(?<![\w)])[-\u2212]\$?)?(?:[0-9][0-9,./]*|\.[0-9]+)")
# What makes another number of the one before it, or mathematics: 2x, 4 and a half. Units do not: 5km, 12 m²
_NO_UNIT = re.compile(
    r".*[0-9\\^{}=()+*/√π-]|.*(?<!m)(?<!ft)(?<!in)(?<!yd)(?<!mi)[²³]|.*\band an? (half|third|quarter|\w+th)\b"
    r"|(?!(km|cm|mm|m|mi|ft|in|yd|kg|g|mg|lb|oz|ml|l|h|hr|s|hp|am|pm|st|nd|rd|th)\b)[^\W\d_]{1,2}\b",
    re.IGNORECASE | re.DOTALL,
)
# Units that answers must share if both have one: 5 million, 10 AM
_KINDS = re.compile(r"(?<![^\W\d_])(hundred|thousand|million|billion|trillion|dozen|[ap](?=\.?m\b))")
# Powers and factorials that no computer writes out
_HUGE = re.compile(r"\^\s*[{(]*\d+\s*\^|\^\s*[{(]*\d{6}|(\d{5}|[)}])\s*!")
_MAX_ANSWER_CHARS = 500  # no real final answer is longer; keeps every parser linear in practice


def threaded(function, threads: int, rows: int = 1):
    """Returns `function` so that `threads` threads call it with `rows` responses each: for one that waits,
    for a judge over HTTP or a sandbox. Values keep the responses' order. It must not draw from the generators
    of random, numpy or torch, nor change what other calls read."""

    @functools.wraps(function)
    def concurrently(prompts, responses, answers, **columns):
        def call(start):
            part = slice(start, start + rows)
            taken = {name: values[part] for name, values in columns.items()}
            values = list(function(prompts[part], responses[part], answers[part], **taken))
            if len(values) != len(responses[part]):
                raise ValueError(f"{len(values)} values for {len(responses[part])} responses")
            return values

        with ThreadPoolExecutor(threads) as pool:
            parts = pool.map(call, range(0, len(responses), rows))
            return [value for values in parts for value in values]

    return concurrently


# ---------------------------------------------------------------- final answers


def _boxed(text):
    """(position, content, end) of the last `\\boxed{...}` with balanced braces, or None. `\\boxed 5` and
    `\\fbox{5}`, which MATH has too, are read like it."""
    boxes = list(re.finditer(r"\\(?:boxed|fbox)(?:\{| +([-+]?[0-9](?:[^\s${}\\]*[0-9])?))", text))
    if not boxes:
        return None
    start, content_start = boxes[-1].span()
    if boxes[-1].group(1):
        return start, boxes[-1].group(1), content_start
    depth = 1
    for i in range(content_start, min(len(text), content_start + _MAX_ANSWER_CHARS)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return start, text[content_start:i].strip(), i + 1
    return None


def _number(text):
    """The leading number of `text` as a Fraction, or None. "-$1,234.50" is -1234.5; "12 apples" is 12;
    "1,2" is None."""
    text = text.strip()[:_MAX_ANSWER_CHARS]
    match = _NUMBER.match(text)
    digits = re.sub(r"[ \t$,+]", "", match.group()).replace("\u2212", "-") if match else ""
    if not re.match(r"[-+]?\.?[0-9]", digits) or re.match(r",[0-9]", text[match.end() :]):
        return None
    return Fraction(digits)


def final_answer(text: str) -> str | None:
    """The final answer that `text` states: what follows its last `####` on that line, or its last
    `\\boxed{}`, whichever stands later; None where there is neither or it is empty. Source:
    openai/grade-school-math, MATH."""
    boxed = _boxed(text)
    marks = list(_MARKED.finditer(text))
    marked = marks[-1] if marks else None
    if marked and (boxed is None or marked.start() > boxed[0]):
        return marked.group(1).strip() or None
    return (boxed[1] or None) if boxed else None


def answers_equal(answer: str | None, gold: str | None) -> bool:
    """Whether two final answers are the same: as numbers, else as text, else as mathematics (library
    math-verify). A missing or empty answer or gold equals nothing, not even another missing one."""
    if answer is None or gold is None or not answer.strip() or not gold.strip():
        return False
    a = _whole_number(answer)
    b = _whole_number(gold)
    if a is not None and b is not None:
        kinds = [_KINDS.findall(text.lower()) for text in (answer, gold)]
        return a == b and ([] in kinds or kinds[0] == kinds[1])
    if re.sub(r"\s", "", answer) == re.sub(r"\s", "", gold):
        return True
    if max(len(answer), len(gold)) > _MAX_ANSWER_CHARS or not re.search(r"[\\^{}=()]", answer + gold):
        return False  # plain words or unlike plain numbers: no mathematics to compare
    if _HUGE.search(answer) or _HUGE.search(gold):
        return False
    from math_verify import parse, verify

    # Its time limit is a signal, which only the main thread may set; in others it warns of having none
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    parsed = [parse(f"${text}$", parsing_timeout=limit) for text in (gold, answer)]
    return bool(verify(*parsed, timeout_seconds=limit))


def _whole_number(text):
    """`text` as a Fraction when it is nothing but a number (a unit or a full stop may follow), or None."""
    number = _number(text)
    if number is None:
        return None
    rest = _NUMBER.sub("", text.strip(), count=1)
    return None if _NO_UNIT.match(rest) else number


def exact_answer(prompts, responses, answers):
    """1.0 where the response's final answer equals the gold one, else 0.0. The gold may be a whole solution
    ending in `#### n` or `\\boxed{}`, or the bare answer. Range {0, 1}."""
    golds = [gold_answers(a) for a in _need_answers("exact_answer", answers)]
    return [float(any(answers_equal(final_answer(r), g) for g in gs)) for r, gs in zip(responses, golds)]


def _last_number(text):
    """The last number in `text`, as it stands there, or None; the minus of "5-2" is no sign."""
    return (_ANY_NUMBER.findall(text) or [None])[-1]


def last_number(prompts, responses, answers):
    """1.0 where the last number in the response equals the last in the gold answer, whatever stands around
    them ("so he has 3 + 4 = 7 apples."), else 0.0. Range {0, 1}. Source: verl's gsm8k.py, "flexible"."""
    golds = [[_last_number(g) for g in gold_answers(a)] for a in _need_answers("last_number", answers)]
    return [float(any(answers_equal(_last_number(r), g) for g in gs)) for r, gs in zip(responses, golds)]


def answer_in(pattern: str):
    """A reward function for a format of yours, a regular expression whose one group is the answer, such as
    answer_in("Final: (.*)"): 1.0 where its last match's equals the gold answer, else 0.0. Range {0, 1}."""
    if re.compile(pattern).groups != 1:
        hint = 'it takes one group, as "Final: (.*)" has; (?:...) groups without counting'
        raise ValueError(f"answer_in({pattern!r}): {hint}")

    def tagged_answer(prompts, responses, answers):
        golds = [gold_answers(a) for a in _need_answers("tagged_answer", answers)]
        stated = [re.findall(pattern, response)[-1:] for response in responses]  # one or none each
        return [float(any(answers_equal(s, g) for s in ss for g in gs)) for ss, gs in zip(stated, golds)]

    return tagged_answer


tagged_answer = answer_in("(?s)<answer>((?:(?!<answer>).)*?)</answer>")


def gold_answers(answer: str | list[str]) -> list[str]:
    """The bare gold answers that an output column's value states: of a text with a mark (`####`, `\\boxed`)
    what the mark holds, "" if nothing; a text without a mark is itself the answer; of a list, each one's,
    repeats kept."""
    texts = answer if isinstance(answer, list) else [answer]
    return [final_answer(a) or ("" if "####" in a or "\\boxed" in a else a) for a in texts]


def _best(score, response, gold):
    return max(score(response, g) for g in gold) if isinstance(gold, list) else score(response, gold)


def _need_answers(name, answers):
    if any(a is None for a in answers):
        compares = f"{name} compares with the true answer, and a prompt has none"
        raise ValueError(f'{compares}: give its data set an "output" column, or evaluate() the answers')
    return answers


# ---------------------------------------------------------------- question answering (HotpotQA's own script)


def normalise_answer(text: str) -> str:
    """Lower case, without punctuation, articles and extra blanks. Source: hotpot_evaluate_v1.py,
    normalize_answer."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def em_score(response: str, answer: str) -> float:
    """1.0 if both normalise to the same text. Range {0, 1}. Source: hotpot_evaluate_v1.py,
    exact_match_score."""
    return float(normalise_answer(response) == normalise_answer(answer))


def f1_score(response: str, answer: str) -> float:
    """F1 over the bags of normalised words; yes, no and noanswer count only when equal. Range [0, 1].
    Source: hotpot_evaluate_v1.py, f1_score."""
    got = normalise_answer(response)
    gold = normalise_answer(answer)
    if got != gold and {got, gold} & {"yes", "no", "noanswer"}:
        return 0.0
    common = sum((Counter(got.split()) & Counter(gold.split())).values())
    if common == 0:
        return 0.0
    precision = common / len(got.split())
    recall = common / len(gold.split())
    return 2 * precision * recall / (precision + recall)


def em(prompts, responses, answers):
    """Exact match of each response with its answer. Range {0, 1}. See em_score."""
    return [_best(em_score, r, a) for r, a in zip(responses, _need_answers("em", answers))]


def f1(prompts, responses, answers):
    """Word F1 of each response with its answer. Range [0, 1]. See f1_score."""
    return [_best(f1_score, r, a) for r, a in zip(responses, _need_answers("f1", answers))]


# ---------------------------------------------------------------- overlap, form, length


class _Words:
    """Splits a text into words of letters and digits of any script; rouge-score's own keeps a-z and 0-9."""

    def tokenize(self, text):
        return re.findall(r"[^\W_]+", text.lower())


def rouge_l_score(response: str, answer: str) -> float:
    """F-measure of the longest common subsequence of words (Lin 2004), by the library rouge-score. A script
    without blanks, such as Chinese, has one word between two punctuation marks. Range [0, 1]."""
    from rouge_score.rouge_scorer import RougeScorer

    return float(RougeScorer(["rougeL"], tokenizer=_Words()).score(answer, response)["rougeL"].fmeasure)


def rouge_l(prompts, responses, answers):
    """ROUGE-L of each response with its answer. Range [0, 1]. See rouge_l_score."""
    return [_best(rouge_l_score, r, a) for r, a in zip(responses, _need_answers("rouge_l", answers))]


def answer_format(prompts, responses, answers):
    """1.0 where the response states one final answer and ends with it (`#### n`, or `\\boxed{}` and what
    closes its formula or sentence), else 0.0. Range {0, 1}."""

    def well_formed(r):
        if len(re.findall(r"####|\\boxed|\\fbox", r)) != 1:
            return False
        box = _boxed(r)
        if box:
            closers = r"(?:[.$*\s}]|\\\)|\\\]|\\end\{\w+\*?\})*"
            return bool(box[1]) and bool(re.fullmatch(closers, r[box[2] :]))
        return bool(re.search(r"####[ \t]*\S[^\n]*\Z", r.rstrip()))

    return [float(well_formed(response)) for response in responses]


def length_penalty(prompts, responses, answers):
    """Minus the number of characters; its weight is the price of one. Range (-inf, 0]."""
    return [-float(len(r)) for r in responses]


# ---------------------------------------------------------------- reward modes of rce/rce.py
# Lists of the same length, of one prompt's candidates: hard is 0 or 1 (right or wrong), soft and gt_prob are
# in [0, 1], score is any number.


def hard_only(hard, soft, gt_prob, score):
    """hard. Range {0, 1}: candidates that are alike right or wrong weigh alike."""
    return list(hard)


def soft_only(hard, soft, gt_prob, score):
    """soft. Range [0, 1]."""
    return list(soft)


def hard_plus_soft(hard, soft, gt_prob, score):
    """hard + soft. Range [0, 2]; right ones in [1, 2], wrong ones in [0, 1]: they can meet."""
    return [h + s for h, s in zip(hard, soft)]


def hard_plus_soft_v2(hard, soft, gt_prob, score):
    """soft + 2 hard. Range [0, 3]; right ones in [2, 3], wrong ones in [0, 1]: at least 1 apart."""
    return [s + 2 * h for h, s in zip(hard, soft)]


def separated(hard, soft, gt_prob, score):
    """2 hard + soft: hard_plus_soft_v2 by its other name. Range [0, 1] for wrong ones, [2, 3] for right
    ones."""
    return hard_plus_soft_v2(hard, soft, gt_prob, score)


def hard_plus_gtprob(hard, soft, gt_prob, score):
    """hard + gt_prob. Range [0, 2]; right ones in [1, 2], wrong ones in [0, 1]."""
    return [h + p for h, p in zip(hard, gt_prob)]


def hard_plus_gtprob_separated(hard, soft, gt_prob, score):
    """2 hard + gt_prob. Range [0, 1] for wrong ones, [2, 3] for right ones."""
    return [2 * h + p for h, p in zip(hard, gt_prob)]


def hybrid(hard, soft, gt_prob, score, mix=0.5):
    """mix * scaled score + (1 - mix) * hard, the score min-max scaled over the prompt's candidates (equal
    scores: 0). Range [0, 1]; up to mix = 0.5 no wrong one is above a right one."""
    low = min(score)
    width = max(score) - low
    return [mix * ((x - low) / width if width > 0 else 0.0) + (1 - mix) * h for h, x in zip(hard, score)]


def shape_wrong(reward, hard, similarity, weight):
    """reward + weight * similarity where hard is 0, reward elsewhere: being close orders wrong candidates
    among themselves and never a right one. Keep weight below the mode's distance from wrong to right. Range:
    the mode's + [0, weight]."""
    return [r if h else r + weight * s for r, h, s in zip(reward, hard, similarity)]


def hard_plus_gtprob_plus_rel(hard, soft, gt_prob, score):
    """2 hard + gt_prob, and .1 of the relevance in `score`, in [0, 1], where hard is 0. Range [0, 1.1] for
    wrong ones, [2, 3] for right ones."""
    return shape_wrong(hard_plus_gtprob_separated(hard, soft, gt_prob, score), hard, score, 0.1)


# ---------------------------------------------------------------- visual question answering (rce/rce_icl.py)

_NUMBER_WORDS = {
    word: str(n) for n, word in enumerate("zero one two three four five six seven eight nine ten".split())
} | {"none": "0"}
_CONTRACTIONS = (
    "ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't "
    "he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've "
    "mustn't must've needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't "
    "shouldn't've somebody'd've somebody'll somebody's someone'd someone'd've someone'll someone's "
    "something'd something'd've something'll that's there'd there'd've there're there's they'd they'd've "
    "they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's "
    "where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't "
    "wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've"
).split()
_WITH_APOSTROPHE = {  # its table: one apostrophe is missing, each in turn; one key has one too many
    word[:n] + word[n + 1 :]: word for word in _CONTRACTIONS for n, sign in enumerate(word) if sign == "'"
}
_WITH_APOSTROPHE["somebody'd"] = "somebodyd"


@functools.lru_cache(maxsize=100_000)
def normalise_vqa(text: str) -> str:
    """An answer as the VQA evaluation compares it: lower case, number words as digits, no articles, no
    punctuation, contractions with their apostrophes. Source: GT-Vision-Lab/VQA, vqaEval.py."""
    text = text.replace("\n", " ").replace("\t", " ").strip()
    original = text
    for sign in ';/[]"{}()=+\\_-><@`,?!':
        beside_a_blank = f"{sign} " in original or f" {sign}" in original
        alone = beside_a_blank or re.search(r"\d,\d", original)
        text = text.replace(sign, "" if alone else " ")
    text = re.sub(r"(?!<=\d)\.(?!\d)", "", text)
    words = [_NUMBER_WORDS.get(word, word) for word in text.lower().split()]
    words = [word for word in words if word not in ("a", "an", "the")]
    return " ".join(_WITH_APOSTROPHE.get(word, word) for word in words)


def vqa_accuracy(response: str, golds: list[str]) -> float:
    """Official VQA accuracy: min(agreeing / 3, 1) averaged over leaving each of the gold answers out; one
    gold answer: 1.0 where it is the same. Range [0, 1]."""
    said = normalise_vqa(response)
    same = [normalise_vqa(gold) == said for gold in golds]
    if len(golds) == 1:
        return float(same[0])
    agreeing = sum(same)
    return sum(min((agreeing - one) / 3, 1.0) for one in same) / len(golds)


# ---------------------------------------------------------------- recommendation (grpo/grpo_rec.py)


def rule_reward(histories, items, targets):
    """1.0 where the item is the logged target, else 0.0. Range {0, 1}."""
    return [float(item == target) for item, target in zip(items, targets)]


def ranking_reward(hits):
    """Rewards of one group, likelier items first, from its hits (0 or 1 each): a hit gets 1; where the group
    has one, the miss at rank i from 0 gets minus its share of the discounts, -d_i / sum_j d_j with d_i =
    1 / log2(i + 2); without a hit all get 0. Range [-1, 1]. Source: MiniOneRec, rl.py."""
    if not any(hits):
        return [0.0] * len(hits)
    discounts = [1 / math.log2(rank + 2) for rank in range(len(hits))]
    return [1.0 if hit else -discount / sum(discounts) for hit, discount in zip(hits, discounts)]


def min_max(scores):
    """Scores of one group, the lowest 0 and the highest 1; equal ones all 0. Range [0, 1]."""
    low = min(scores)
    width = max(scores) - low
    return [(score - low) / width if width > 0 else 0.0 for score in scores]


def history_value(values, history, item, decay):
    """What an item is worth after a history: the mean of values[h][item] over its items h, each weighing
    `decay` times as much as the next one. Range: that of the values."""
    weights = [decay**back for back in range(len(history) - 1, -1, -1)]
    return float(sum(w * values[h][item] for w, h in zip(weights, history)) / sum(weights))
