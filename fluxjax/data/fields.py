"""Finds out which field of a record is which: names as found in the wild, detected or given, with typos caught.

A record is a mapping with a question, an answer and perhaps media. Manifests of this project say `prompt`,
`answer`, `images`, `videos`, `id`; published data sets say `problem`, `question`, `solution` and so on.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable

from ..base.errors import DataError
from ..base.types import MediaKind

ALIASES: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "problem", "question", "query", "instruction"),
    "answer": ("answer", "solution", "ground_truth", "label"),
    "images": ("images", "image"),
    "videos": ("videos", "video"),
    "id": ("id", "question_id", "uid"),
}
REQUIRED = ("prompt", "answer")
MARKS = {MediaKind.IMAGE: "<image>", MediaKind.VIDEO: "<video>"}
_MARK = re.compile("<image>|<video>")
_TYPO = 0.75  # difflib ratio from which an unknown name counts as a misspelt one


@dataclasses.dataclass(frozen=True)
class Fields:
    """The name of each field in one file; empty where the file has none (or, as a request: to be detected)."""

    prompt: str = ""
    answer: str = ""
    images: str = ""
    videos: str = ""
    id: str = ""


def resolve(found: Iterable[str], wanted: Fields, where: str) -> Fields:
    """Finds the fields of a file (or line) that has the names `found`. `where` opens every error message.

    Raises `DataError` when a name given in `wanted` is absent, when prompt or answer cannot be found, and when
    an unknown name is so near to a known one that it must be a typo: dropping images silently would be worse.
    """
    names = list(found)
    result: dict[str, str] = {}
    for role, aliases in ALIASES.items():
        asked = getattr(wanted, role)
        if asked and asked not in names:
            raise DataError(f"{where}: no field {asked!r}{_nearest([asked], names)}")
        result[role] = asked or next((alias for alias in aliases if alias in names), "")
    unused = [name for name in names if name not in result.values()]
    for role in REQUIRED:
        if not result[role]:
            raise DataError(f"{where}: no {role} field{_nearest(ALIASES[role], unused or names)}")
    for role in ("images", "videos"):
        for name in unused if not result[role] else ():
            if difflib.get_close_matches(name, ALIASES[role], 1, _TYPO):
                raise DataError(f"{where}: unknown field {name!r}; did you mean {role!r}?")
    return Fields(**result)


def _nearest(expected: Iterable[str], found: list[str]) -> str:
    expected = list(expected)
    ranked = sorted(
        ((difflib.SequenceMatcher(None, name, want).ratio(), name, want) for name in found for want in expected),
        key=lambda item: -item[0],
    )
    if ranked and ranked[0][0] >= 0.6:
        return f"; found {ranked[0][1]!r}, expected {ranked[0][2]!r}"
    return f"; found {', '.join(map(repr, found)) or 'nothing'}; expected {' or '.join(map(repr, expected))}"


def place_marks(text: str, kinds: list[MediaKind]) -> str:
    """Returns `text` with one mark for each media item. Text without any mark gets them in front, which is how records
    without marks are meant; text with some must have exactly the right ones in the right order.

    Raises `ValueError` with a short reason otherwise.
    """
    marks = _MARK.findall(text)
    wanted = [MARKS[kind] for kind in kinds]
    if not marks:
        return "".join(wanted) + text
    if sorted(marks) == sorted(wanted):  # a record has images before videos, its text may not: the caller reorders
        return text
    raise ValueError(
        f"{marks.count('<image>')} <image> and {marks.count('<video>')} <video> marks in the prompt for "
        f"{wanted.count('<image>')} images and {wanted.count('<video>')} videos"
    )


def order_by_marks(text: str) -> list[MediaKind]:
    """Returns the kinds of the marks in `text`, in order."""
    return [MediaKind.IMAGE if mark == "<image>" else MediaKind.VIDEO for mark in _MARK.findall(text)]
