r"""The answer inside a response: in its tags, in its `\boxed{}`, behind "the answer is", or its last number.

A response may be adversarial: the functions take at most linear time, except `matches` and `last_group`, whose patterns
are the user's. Only the last `TAIL` characters of a text are searched for an answer. Digits are ASCII digits.
"""

import collections
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

TAIL = 20_000  # characters searched for an answer, from the end
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,40})"
_NUMBER = rf"(?:{_DIGITS}(?:\.[0-9]{{0,40}})?|\.[0-9]{{1,40}})(?:[eE][-+]?[0-9]{{1,3}})?"
_PERCENT = r"\s{0,3}(?:\\?%)?"
# No match is a part of a longer number or of a word. A sign between two terms is an operator, and not matched.
_IN_TEXT = re.compile(
    rf"(?<![0-9A-Za-z_])(?<![0-9]\.)(?:(?<![0-9A-Za-z)\]}}])[-+])?{_NUMBER}(?:/[0-9]{{1,40}})?(?![0-9]|[eE][-+]?[0-9]){_PERCENT}"
)
_ALONE = re.compile(rf"([-+]?)\s?({_NUMBER})(?:\s?/\s?({_NUMBER}))?({_PERCENT})")
_FRACTION = re.compile(rf"([-+]?)\s?\\frac\s?\{{({_DIGITS})\}}\s?\{{({_DIGITS})\}}({_PERCENT})")
_ESCAPED_OR_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_STATED = re.compile(r"\banswer\b\W{0,4}?(?:\s{0,3}is\b|[:=])[\s:*]{0,9}", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?]?(?:\n|$)|[.!?]\s(?=[A-Z])")


def explicit_answer(text: str) -> str | None:
    """Returns the answer that the text marks, or `None`. Marks are, in order of precedence, `<answer>`
    tags, `\\boxed{}` (also inside the tags), and "answer is" or "answer:"; the last mark of a kind counts."""
    text = text[-TAIL:]
    inside = tagged(text)
    if inside is not None:
        inner = boxed(inside)
        return inside.strip() if inner is None else inner
    content = boxed(text)
    return stated(text) if content is None else content


def tagged(text: str) -> str | None:
    """Returns the content of the last `<answer>…</answer>`; `None` if there is none."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return None if begin < 0 else text[begin + len("<answer>") : end]


def boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{…}`; `None` if there is no `\boxed`, or if the last one has no end."""
    begin = text.rfind("\\boxed{")
    if begin < 0:
        return None
    begin += len("\\boxed{")
    depth = 1
    for match in _ESCAPED_OR_BRACE.finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if not depth:
            return text[begin : match.start()].strip()
    return None


def stated(text: str) -> str | None:
    """Returns the rest of the sentence behind the last "answer is", "answer:" or the like, or `None`."""
    if (match := _last(_STATED, text)) is None:
        return None
    end = _SENTENCE_END.search(text, match.end())
    return text[match.end() : end.start() if end else None].strip(" *") or None


def last_number(text: str) -> str | None:
    """Returns the last number as it stands in the text, with its sign, fraction and percent sign, or `None`."""
    match = _last(_IN_TEXT, _plain_minus(text[-TAIL:]))
    return match and match[0].strip()


def as_number(text: str) -> Fraction | None:
    r"""Returns the value of a text that is only a number: `-1,000.5`, `3/4`, `\frac{3}{4}`, `2e-3` or `12 %` (0.12).
    `None` for other text: an expression, a number and a unit, NaN, infinity, a division by 0."""
    text = _plain_minus(text).strip().removeprefix("$").removesuffix("$").strip()
    if len(text) > 200:
        return None
    match = _ALONE.fullmatch(text) or _FRACTION.fullmatch(text)
    if match is None:
        return None
    sign, numerator, denominator, percent = match.groups()
    bottom = _value(denominator or "1") * (100 if percent.strip() else 1)
    if not bottom:
        return None
    return _value(numerator) / bottom * (-1 if sign == "-" else 1)


def last_place(text: str) -> Fraction:
    """Returns one unit of a number's last decimal: 0.01 for `3.14`, 0.0001 for `3.14 %`; 0 without a decimal point."""
    match = re.search(r"\.([0-9]*)(?:[eE]([-+]?[0-9]+))?", text)
    place = Fraction(10) ** (int(match[2] or 0) - len(match[1])) if match else Fraction(0)
    return place / 100 if "%" in text else place


def near(wanted: Fraction, found: Fraction, places: Sequence[Fraction], tolerance: float) -> bool:
    """Says whether two numbers differ by rounding only: by at most `tolerance` times the larger absolute value, and by
    less than the largest of `places`. `places` has each number's `last_place`; all 0: no second bound."""
    difference, place = abs(wanted - found), max(places)
    return difference <= Fraction(str(tolerance)) * max(abs(wanted), abs(found)) and not (place and difference >= place)


def matches(question: Mapping[str, str]) -> bool:
    """Says whether all of `text` matches `pattern`; a full stop also matches a newline. Some patterns take for ever, so
    that this function and `last_group` are called in a process that can be killed."""
    return re.fullmatch(question["pattern"], question["text"], re.DOTALL) is not None


def last_group(question: Mapping[str, str]) -> str | None:
    """Returns the first capturing group of the last match of `pattern` in `text`; None if there is no match."""
    match = _last(re.compile(question["pattern"]), question["text"])
    return match and match[1]


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(collections.deque(pattern.finditer(text), maxlen=1)), None)


def sendable(text: str) -> str:
    """Returns the text with surrogates replaced: surrogates can neither be sent to processes nor written to files."""
    return text.encode("utf-8", "replace").decode()


def _value(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


def _plain_minus(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")
