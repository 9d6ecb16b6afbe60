"""Rewards for questions about pictures: choices, numbers, transcriptions, boxes, lists.

Each reward compares the text with the prompt's answer in a few milliseconds, however long and odd the text is. All but
`EditDistance` and `BoxOverlap` use the answer that the text marks, if any (`extraction.explicit_answer`).
"""

import dataclasses
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float64
from rapidfuzz.distance import Levenshtein

from ..base.scored import Completion, Prompt, Reward
from ..config.bounds import not_negative, positive, within
from .extraction import TAIL, as_number, explicit_answer, last_number, tagged
from .named import BuiltIn
from .rules import RIGHT, WRONG, no_number, normalise

_BETWEEN_ITEMS = re.compile(r"->|→|[\n;,>]")


@dataclasses.dataclass(frozen=True)
class NumericAnswer(BuiltIn):
    """Gives 1 if the marked, or else the last, number is near the prompt's answer. A number is near if it differs by at
    most `tolerance` times the answer, or by at most `absolute`. A tolerance of 0.05 is ChartQA's "relaxed accuracy"
    (arXiv:2203.10244, section 5.1). `12 %` counts as 0.12. Raises ValueError for an answer without a number."""

    name = "numeric"
    tolerance: float = not_negative(0.05)
    absolute: float = not_negative(0.0)

    async def score(self, completion: Completion) -> Reward:
        marked = explicit_answer(completion.text)
        found = _number(completion.text if marked is None else marked)
        wanted = _number(completion.prompt.answer)
        if wanted is None:
            raise ValueError(f"the answer {completion.prompt.answer!r} of prompt {completion.prompt.id} has no number")
        if found is None:
            return Reward(0.0, False, "no number found")
        return RIGHT if abs(found - wanted) <= max(self.tolerance * abs(wanted), self.absolute) else WRONG

    def unreadable(self, prompt: Prompt) -> str:
        return no_number(prompt) if as_number(prompt.answer) is None else ""


@dataclasses.dataclass(frozen=True)
class EditDistance(BuiltIn):
    """Gives 1 - d / L: d is the Levenshtein distance of the text and the prompt's answer, L is the greater length.

    ANLS has this similarity (arXiv:1905.13648, section 4) and the `threshold` 0.5. A similarity below `threshold` gives
    0. If there are `<answer>` tags, only the text inside counts. Any white space counts as one space.
    """

    name = "edit_distance"
    threshold: float = within(0.5, "[0, 1]")
    ignore_case: bool = True
    most_characters: int = positive(10_000)  # a longer text gets 0

    async def score(self, completion: Completion) -> Reward:
        inside = tagged(completion.text)
        text = completion.text if inside is None else inside
        if len(text) > self.most_characters:
            return Reward(0.0, False, f"the text is longer than {self.most_characters} characters")
        text, answer = self._plain(text), self._plain(completion.prompt.answer)
        value = Levenshtein.normalized_similarity(text, answer)
        return Reward(value if value >= self.threshold else 0.0, text == answer)

    def _plain(self, text: str) -> str:
        text = " ".join(unicodedata.normalize("NFC", text).split())
        return text.casefold() if self.ignore_case else text


@dataclasses.dataclass(frozen=True)
class OrderedList(BuiltIn):
    """Gives the share of the longer list's positions that have the right item; 1 for the complete list in its order. A
    list is JSON, or items with commas, semicolons, arrows or line ends between them. A text without a marked answer has
    its list in the last line that is not empty. With `graded=False`, a list that is not right gets 0."""

    name = "ordered_list"
    graded: bool = True

    async def score(self, completion: Completion) -> Reward:
        wanted, found = _items(completion.prompt.answer), _items(_marked_or_last_line(completion.text))
        if wanted == found:
            return RIGHT
        hits = sum(w == f for w, f in zip(wanted, found, strict=False))
        return Reward(hits / max(len(wanted), len(found)) if self.graded else 0.0, False)


def _number(text: str) -> float | None:
    value = as_number(text)
    if value is None:
        last = last_number(text)
        value = None if last is None else as_number(last)
    try:
        return None if value is None else float(value)
    except OverflowError:
        return None


def _marked_or_last_line(text: str) -> str:
    marked = explicit_answer(text)
    return text[-TAIL:].rstrip().rpartition("\n")[2] if marked is None else marked


def _items(text: str) -> Sequence[str]:
    text = text[-TAIL:].strip()
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = _BETWEEN_ITEMS.split(text.strip("[]() "))
    if not isinstance(values, list):
        values = [values]
    return [normalise(str(value)).strip("'\"") for value in values]


# --- choices ----------------------------------------------------------------------------------

LETTERS = "ABCDEFGHIJ"
_LONGEST = 1000  # characters of an answer; a longer text chooses nothing
_OPTION_LINE = re.compile(r"^[ \t]{0,9}\(?([A-J])[).:]", re.MULTILINE)
_OPTION_INLINE = re.compile(r"(?<!\S)\(?([A-J])\)")
_BEGINS = re.compile(r"[\s*(\[]{0,4}([A-Ja-j])(?:[)\]*.:]{1,4}|$)\s{0,9}")
# Matches a letter alone. "A" and "I" are words if a word in lower case follows, except "is", "or" and "and".
_LETTER = re.compile(r"\(([A-J])\)|(?<![\w'\u2019])([B-HJ]|[AI](?!\s+(?!is\b|or\b|and\b)[a-z]))(?![\w'\u2019])")


@dataclasses.dataclass(frozen=True)
class Choice(BuiltIn):
    """Gives 1 if the text chooses the option that the prompt's answer names: by letter, or by the option's text.
    Options are read from the prompt: `A. cat`, `(A) cat`, `A) cat`. The choice is in the answer that the text marks,
    else in the last line that is not empty: `B`, `(B)`, `B. cat`, `the cat`. A text that names two options gets 0."""

    name = "choice"

    async def score(self, completion: Completion) -> Reward:
        if why := self.unreadable(completion.prompt):
            raise ValueError(f"the answer {completion.prompt.answer!r} of prompt {completion.prompt.id} {why}")
        options = options_of(completion.prompt.text)
        found = chosen(_marked_or_last_line(completion.text), options)
        if len(found) > 1:
            return Reward(0.0, False, f"ambiguous: {' and '.join(sorted(found))}")
        if not found:
            return Reward(0.0, False, "no choice found")
        return RIGHT if found == chosen(completion.prompt.answer, options) else WRONG

    def unreadable(self, prompt: Prompt) -> str:
        wanted = chosen(prompt.answer, options_of(prompt.text))
        return "" if len(wanted) == 1 else "is neither a letter nor the text of an option"


def options_of(question: str) -> dict[str, str]:
    """Returns the options of a question by letter; empty unless there are A and B. Letters of options begin lines. If
    fewer than two lines begin with a letter, letters in brackets within lines count."""
    question = question[-TAIL:]
    for pattern in (_OPTION_LINE, _OPTION_INLINE):
        options = _options(question, list(pattern.finditer(question)))
        if len(options) > 1:
            return options
    return {}


def _options(question: str, marks: Sequence[re.Match[str]]) -> dict[str, str]:
    """Returns the text behind each mark, up to the next mark or the end of the line. An A begins a new list; a mark out
    of alphabetical order is left out."""
    options: dict[str, str] = {}
    for index, mark in enumerate(marks):
        if mark[1] == "A":
            options = {}
        if mark[1] == LETTERS[len(options) : len(options) + 1]:
            end = marks[index + 1].start() if index + 1 < len(marks) else len(question)
            options[mark[1]] = normalise(question[mark.end() : end].strip().partition("\n")[0])
    return options


def chosen(text: str, options: Mapping[str, str]) -> set[str]:
    """Returns the letters that the text chooses: one if the choice is clear. Without `options`, all `LETTERS` count."""
    if len(text) > _LONGEST:
        return set()
    plain = normalise(text)
    if same := {letter for letter, option in options.items() if option == plain}:
        return same
    known = set(options) or set(LETTERS)
    if (match := _BEGINS.match(text)) and match[1].upper() in known:
        rest = text[match.end() :]
        further = _letters(rest, known) | _named(normalise(rest), options)
        return {match[1].upper()} | further
    return _letters(text, known) | _named(plain, options)


def _letters(text: str, known: set[str]) -> set[str]:
    return {match[1] or match[2] for match in _LETTER.finditer(text)} & known


def _named(plain: str, options: Mapping[str, str]) -> set[str]:
    """Returns the letters of options whose text stands in `plain` as complete words, not within a longer option."""
    held = {
        letter: option
        for letter, option in options.items()
        if option and re.search(rf"(?<!\w){re.escape(option)}(?!\w)", plain)
    }
    inner = {short for short in held.values() for long in held.values() if short != long and short in long}
    return {letter for letter, option in held.items() if option not in inner}


# --- boxes ------------------------------------------------------------------------------------

_N = r"\s{0,20}(-?[0-9]{1,9}(?:\.[0-9]{1,20})?)\s{0,20}"
# Matches [1, 2, 3, 4], alone or behind Qwen2.5-VL's "bbox_2d", and Qwen2-VL's (1,2),(3,4).
_BOX = re.compile(rf"[\[(]{_N},{_N}(?:,|\)\s{{0,9}},\s{{0,9}}\(){_N},{_N}[\])]")


@dataclasses.dataclass(frozen=True)
class BoxOverlap(BuiltIn):
    """Gives the sum of IoU over matched boxes, divided by the greater number of boxes: superfluous boxes lower it.

    A box is `[x1, y1, x2, y2]`, `(x1,y1),(x2,y2)` or JSON with such lists (`[{"bbox_2d": [..], "label": ".."}]`), with
    x1 < x2 and y1 < y2, in the unit of the prompt's answer. Labels are not compared. Boxes are matched one to one, for
    the greatest sum. With a `threshold` above 0, a pair counts 1 if its IoU reaches the threshold, else 0. Raises
    ValueError if the prompt's answer has no box.
    """

    name = "boxes"
    threshold: float = within(0.0, "[0, 1]")
    correct_from: float = within(0.5, "(0, 1]")  # the IoU that every pair of a right answer reaches
    most_boxes: int = positive(100)  # a text with more boxes gets 0

    async def score(self, completion: Completion) -> Reward:
        wanted = boxes_in(completion.prompt.answer)
        if not len(wanted):
            raise ValueError(f"the answer {completion.prompt.answer!r} of prompt {completion.prompt.id} has no box")
        inside = tagged(completion.text)
        found = boxes_in(completion.text[-TAIL:] if inside is None else inside)
        if len(found) > self.most_boxes:
            return Reward(0.0, False, f"more than {self.most_boxes} boxes")
        if not len(found):
            return Reward(0.0, False, "no box found")
        overlaps = _matched(iou(wanted, found))
        values = overlaps >= self.threshold if self.threshold else overlaps
        correct = len(wanted) == len(found) and bool((overlaps >= self.correct_from).all())
        return Reward(float(values.sum()) / max(len(wanted), len(found)), correct)

    def unreadable(self, prompt: Prompt) -> str:
        wanted = boxes_in(prompt.answer)
        return "has no box" if not len(wanted) else "" if iou(wanted, wanted).diagonal().all() else "has an empty box"


def _matched(overlaps_NM: Float64[np.ndarray, "N M"]) -> Float64[np.ndarray, " K"]:
    """Returns the overlaps of the min(N, M) pairs with the greatest sum."""
    if 1 in overlaps_NM.shape:
        return overlaps_NM.max(keepdims=True).reshape(1)
    # scipy takes most of a second to import, and every process that scores imports this file.
    from scipy.optimize import linear_sum_assignment

    return overlaps_NM[linear_sum_assignment(overlaps_NM, maximize=True)]


def boxes_in(text: str) -> Float64[np.ndarray, "N 4"]:
    """Returns the boxes of a text, in order, as x1, y1, x2, y2."""
    return np.array([match.groups() for match in _BOX.finditer(text)], np.float64).reshape(-1, 4)


def iou(first_N4: Float64[np.ndarray, "N 4"], second_M4: Float64[np.ndarray, "M 4"]) -> Float64[np.ndarray, "N M"]:
    """Returns the intersection over union of each pair of boxes; 0 if both lack an area."""
    low_NM2 = np.maximum(first_N4[:, None, :2], second_M4[None, :, :2])
    high_NM2 = np.minimum(first_N4[:, None, 2:], second_M4[None, :, 2:])
    common_NM = np.prod(np.maximum(high_NM2 - low_NM2, 0.0), axis=-1)
    areas_N, areas_M = (np.prod(np.maximum(b[:, 2:] - b[:, :2], 0.0), axis=-1) for b in (first_N4, second_M4))
    union_NM = areas_N[:, None] + areas_M[None, :] - common_NM
    return np.divide(common_NM, union_NM, out=np.zeros_like(common_NM), where=union_NM > 0)
