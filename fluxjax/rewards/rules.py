"""Rewards that compare text with the known answer: pure, a few microseconds each.

`Reward.correct` is always the exact match of the normalised texts (of the numbers, for `number`), whatever shape
`value` has: it is what accuracy counts.
"""

import decimal
import re

from ..base.scored import Prompt, Reward

EXACT_BONUS = 0.5  # the part of a shaped reward that only a fully right answer gets
_WRONG, _RIGHT = Reward(0.0, False), Reward(1.0, True)
# At most 40 digits either side: a number is compared, not a bomb defused.
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,40})?(?:\.\d{1,40})?(?:\s*/\s*\d{1,40})?")
_TAIL = 2000  # characters searched for a number, from the end


def normalise(text: str) -> str:
    """Returns text in lower case with single spaces and no full stop at the end."""
    return " ".join(text.split()).casefold().removesuffix(".").rstrip()


def exact(prompt: Prompt, text: str) -> Reward:
    """Gives 1 if the text is the answer, else 0."""
    return _RIGHT if normalise(text) == normalise(prompt.answer) else _WRONG


def positions(prompt: Prompt, text: str) -> Reward:
    """Gives half for the share of positions that are right, half for all of them.

    Characters are compared one by one, and the end of the text counts as one more: stopping in the right place is
    a hit, stopping early or late is none. The share is of the longer of the two, so that length is never free.
    """
    return _shaped(normalise(prompt.answer), normalise(text))


def digits(prompt: Prompt, text: str) -> Reward:
    """Scores as `positions` does, blind to white space: for transcriptions of digits."""
    return _shaped("".join(prompt.answer.split()), "".join(text.split()))


def number(prompt: Prompt, text: str) -> Reward:
    """Gives 1 if the last number in the text equals the last number in the answer: `1,000`, `1000.0` and `2000/2` are
    one number. 0 if either has none."""
    given, wanted = last_number(text), last_number(prompt.answer)
    return _RIGHT if given is not None and given == wanted else _WRONG


def last_number(text: str) -> decimal.Decimal | None:
    found = ""
    for match in _NUMBER.finditer(text[-_TAIL:]):
        if any(c.isdigit() for c in match[0]):
            found = match[0]
    if not found:
        return None
    numerator, _, denominator = found.replace(",", "").partition("/")
    try:
        value = decimal.Decimal(numerator.strip())
        return value / decimal.Decimal(denominator.strip()) if denominator else value.normalize()
    except decimal.DecimalException:  # division by zero
        return None


def _shaped(answer: str, text: str) -> Reward:
    if answer == text:
        return _RIGHT
    hits = sum(a == t for a, t in zip(answer, text, strict=False)) + (len(answer) == len(text))
    share = hits / (max(len(answer), len(text)) + 1)
    return Reward((1 - EXACT_BONUS) * share, False)
