"""Finds out which field of a record is which, with typos caught, and makes a prompt of them, whatever the file.

A record is a mapping with a question, an answer and perhaps media. Manifests of this project say `prompt`,
`answer`, `images`, `videos`, `id`; published data sets say `problem`, `question`, `solution` and so on.
"""

import dataclasses
import difflib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from ..base.errors import DataError
from ..base.types import Media, MediaKind, Prompt

ALIASES: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "problem", "question", "query", "instruction"),
    "answer": ("answer", "solution", "ground_truth", "label"),
    "images": ("images", "image"),
    "videos": ("videos", "video"),
    "id": ("id", "question_id", "uid"),
}
REQUIRED = ("prompt", "answer")
MARKS = {MediaKind.IMAGE: "<image>", MediaKind.VIDEO: "<video>"}
MARK = re.compile("<image>|<video>")
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


def _nearest(expected: Sequence[str], found: Sequence[str]) -> str:
    def likeness(pair: tuple[str, str]) -> float:
        return difflib.SequenceMatcher(None, *pair).ratio()

    name, meant = max(itertools.product(found, expected), key=likeness, default=("", "nothing"))
    if likeness((name, meant)) >= 0.6:
        return f"; found {name!r}, expected {meant!r}"
    return f"; found {', '.join(map(repr, found)) or 'nothing'}; expected {' or '.join(map(repr, expected))}"


def answer_text(value: object) -> str | None:
    """Returns an answer as text, or None where the value is neither text nor a number."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def make_prompt(id: str, source: str, text: str, answer: str, media: Mapping[MediaKind, Sequence[Media]]) -> Prompt:
    """Makes a prompt whose media stand in the order of the marks. Text without any mark gets them in front, which is
    how records without marks are meant. Raises `ValueError` with a short reason when marks and media disagree."""
    marks = MARK.findall(text)
    wanted = [MARKS[kind] for kind in MediaKind for _ in media.get(kind, ())]
    if not marks:
        text, marks = "".join(wanted) + text, wanted
    if sorted(marks) != sorted(wanted):
        raise ValueError(
            f"{marks.count('<image>')} <image> and {marks.count('<video>')} <video> marks in the prompt for "
            f"{wanted.count('<image>')} images and {wanted.count('<video>')} videos"
        )
    queues = {MARKS[kind]: iter(items) for kind, items in media.items()}
    return Prompt(id, source, text, answer, tuple(next(queues[mark]) for mark in marks))
