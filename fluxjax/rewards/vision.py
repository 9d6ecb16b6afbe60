"""Rewards for questions about pictures: choices, numbers, transcriptions, boxes, lists.

Each compares the text with the prompt's answer in a few milliseconds, however long and odd the text is. All but
`EditDistance` look for the answer where the text marks one (`extraction.explicit_answer`).
"""

import dataclasses
import json
import re
import unicodedata
from collections.abc import Sequence
from typing import ClassVar

from rapidfuzz.distance import Levenshtein

from ..base.scored import Completion, Prompt, Reward
from ..config.bounds import not_negative, positive, within
from .extraction import TAIL, as_number, explicit_answer, last_number, tagged
from .parameters import check_parameters
from .rules import no_number, normalise

_WRONG, _RIGHT = Reward(0.0, False), Reward(1.0, True)
_BETWEEN_ITEMS = re.compile(r"->|→|[\n;,>]")


@dataclasses.dataclass(frozen=True)
class NumericAnswer:
    """Gives 1 if the marked number, or else the last of the text, is near the prompt's answer.

    Near is within `tolerance` times the answer, or within `absolute` of it. 5 % is the "relaxed accuracy" of ChartQA
    (arXiv:2203.10244, section 5.1). `12 %` is 0.12. Raises ValueError if the prompt's answer has no number.
    """

    kind: ClassVar[str] = "rule"

    tolerance: float = not_negative(0.05)
    absolute: float = not_negative(0.0)

    def __post_init__(self) -> None:
        check_parameters("numeric", self)

    async def score(self, completion: Completion) -> Reward:
        marked = explicit_answer(completion.text)
        found = _number(completion.text if marked is None else marked)
        wanted = _number(completion.prompt.answer)
        if wanted is None:
            raise ValueError(f"the answer {completion.prompt.answer!r} of prompt {completion.prompt.id} has no number")
        if found is None:
            return Reward(0.0, False, "no number found")
        return _RIGHT if abs(found - wanted) <= max(self.tolerance * abs(wanted), self.absolute) else _WRONG

    def unreadable(self, prompt: Prompt) -> str:
        """Says why the prompt's answer can't be graded; empty if it can."""
        return no_number(prompt) if as_number(prompt.answer) is None else ""


@dataclasses.dataclass(frozen=True)
class EditDistance:
    """Gives 1 - d / L: d is the Levenshtein distance of the text and the prompt's answer, L the longer one's length.

    That is the similarity of ANLS (arXiv:1905.13648, section 4) with its `threshold` of 0.5: what is less similar
    gets 0. The text is what `<answer>` tags enclose, if there are any. White space is counted as single spaces.
    """

    kind: ClassVar[str] = "rule"

    threshold: float = within(0.5, "[0, 1]")
    ignore_case: bool = True
    most_characters: int = positive(10_000)  # a longer text gets 0

    def __post_init__(self) -> None:
        check_parameters("edit_distance", self)

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
class OrderedList:
    """Gives the share of places that have the right item, of the longer list; 1 is the whole list in its order.

    A list is JSON, or items between commas, semicolons, arrows or lines; of a text without a marked answer, the last
    line that is not empty. `graded=False`: 1 for the whole list, else 0.
    """

    kind: ClassVar[str] = "rule"

    graded: bool = True

    def __post_init__(self) -> None:
        check_parameters("ordered_list", self)

    async def score(self, completion: Completion) -> Reward:
        wanted, found = _items(completion.prompt.answer), _items(_marked_or_last_line(completion.text))
        if wanted == found:
            return _RIGHT
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
    if marked is not None:
        return marked
    return text[-TAIL:].rstrip().rpartition("\n")[2]


def _items(text: str) -> Sequence[str]:
    text = text[-TAIL:].strip()
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = _BETWEEN_ITEMS.split(text.strip("[]() "))
    if not isinstance(values, list):
        values = [values]
    return [normalise(str(value)).strip("'\"") for value in values]
