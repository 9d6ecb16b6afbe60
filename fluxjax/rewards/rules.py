"""Rewards that compare a text with the known answer: pure functions of a few microseconds.

`Reward.correct`, which accuracy counts, is True only if the text equals the answer in the form that the rule compares.
A partly right answer may raise `Reward.value`, but never `correct`.
"""

import re
from fractions import Fraction

from ..base.scored import Prompt, Reward
from .extraction import as_number, last_number

EXACT_BONUS = 0.5  # the part of a shaped reward that only a fully right answer gets
WRONG, RIGHT = Reward(0.0, False), Reward(1.0, True)
# Matches the signs of a formula (but not `$` and `%`), and a number beside a letter or another number.
_FORMULA = re.compile(
    r"\\(?![$%])|[\^_{}\u221a\u03c0]|[0-9](?:!|(?![eE][-+]?[0-9])[A-Za-z])|[0-9](?![eE][-+]?[0-9])[^0-9,./]+.*[0-9]"
    r"|[0-9],(?:[^0-9].*|[0-9]{1,2}(?![0-9]))"
)


def normalise(text: str) -> str:
    """Returns the text in lower case, with single spaces, without a full stop at the end."""
    return " ".join(text.split()).casefold().removesuffix(".").rstrip()


def exact(prompt: Prompt, text: str) -> Reward:
    """Gives 1 if the text is the answer, else 0."""
    return RIGHT if normalise(text) == normalise(prompt.answer) else WRONG


def positions(prompt: Prompt, text: str) -> Reward:
    """Gives 1 for the right text, else half of the share of positions that are right. Characters are compared one by
    one. The end of the text counts as one more character, which is right if the text has the length of the answer. The
    share is of the longer text's positions, so that superfluous characters cost something."""
    return _shaped(normalise(prompt.answer), normalise(text))


def digits(prompt: Prompt, text: str) -> Reward:
    """Scores a transcription of digits as `positions` does, but ignores white space."""
    return _shaped("".join(prompt.answer.split()), "".join(text.split()))


def number(prompt: Prompt, text: str) -> Reward:
    """Gives 1 if text and answer have equal last numbers, such as `1,000`, `1000.0` and `2000/2`, else 0."""
    given, wanted = _number(text), _number(prompt.answer)
    return RIGHT if given is not None and given == wanted else WRONG


def _number(text: str) -> Fraction | None:
    last = last_number(text)
    return None if last is None else as_number(last.rstrip("\\% "))


def no_answer(prompt: Prompt) -> str:
    """Says why `exact`, `positions` and `digits` can't grade the prompt's answer; empty if they can."""
    return "" if normalise(prompt.answer) else "is empty"


def no_number(prompt: Prompt) -> str:
    r"""Says why the last number of the prompt's answer is not the answer, as in `10\sqrt{3}`; empty if it is. Text
    before `####` or in an earlier line is no part of the answer."""
    last = prompt.answer.rpartition("####")[2].strip().rpartition("\n")[2]
    if _number(last) is None:
        return "has no number"
    return "is more than a number" if _FORMULA.search(last) else ""


# Rules, each with the function that says why the rule can't grade a prompt's answer.
UNREADABLE = {exact: no_answer, positions: no_answer, digits: no_answer, number: no_number}


def _shaped(answer: str, text: str) -> Reward:
    if answer == text:
        return RIGHT
    hits = sum(a == t for a, t in zip(answer, text, strict=False)) + (len(answer) == len(text))
    share = hits / (max(len(answer), len(text)) + 1)
    return Reward((1 - EXACT_BONUS) * share, False)
