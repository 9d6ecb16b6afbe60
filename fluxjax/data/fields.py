"""Finds out which field of a record is which, with typos caught, and makes a prompt of them, whatever the file.

A record is a mapping with a question, an answer and perhaps media. Manifests of this project say `prompt`,
`answer`, `images`, `videos`, `id`; published data sets say `problem`, `question`, `solution` and so on.
"""

import dataclasses
import decimal
import difflib
import itertools
import logging
import re
import urllib.request
from collections.abc import Container, Iterable, Mapping, Sequence

from ..base.errors import DataError
from ..base.types import Media, MediaKind, Prompt
from .locations import joined

log = logging.getLogger("fluxjax.data")
ALIASES: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "problem", "question", "query", "instruction"),
    "answer": ("answer", "solution", "ground_truth", "label"),
    "images": ("images", "image"),
    "videos": ("videos", "video"),
    "id": ("id", "question_id", "uid"),
}
REQUIRED, MEDIA = ("prompt", "answer"), ("images", "videos")
MARKS = {MediaKind.IMAGE: "<image>", MediaKind.VIDEO: "<video>"}
MARK = re.compile("<image>|<video>")
_TYPO = 0.75  # difflib ratio from which an unknown name counts as a misspelt one
_ENDINGS = "png|jpe?g|jfif|webp|gif|bmp|tiff?|avif|hei[cf]|jp2|p[gnp]m|mp4|m4v|mpe?g|mov|mkv|webm|avi|wmv|flv"
_MEDIA_NAME = re.compile(rf"(?is)data:(image|video)/.*|.*\.({_ENDINGS})(\?\S*)?")


@dataclasses.dataclass(frozen=True)
class Fields:
    """The name of each field in one file; empty where the file has none (or, as a request: to be detected)."""

    prompt: str = ""
    answer: str = ""
    images: str = ""
    videos: str = ""
    id: str = ""


def resolve(found: Iterable[str], wanted: Fields, where: str, empty: Container[str] = ()) -> Fields:
    """Finds the fields of a file (or line) that has the names `found`, of which `empty` ones hold nothing. `where`
    opens every error message.

    Raises `DataError` when a name given in `wanted` is absent, when prompt or answer cannot be found, when two fields
    hold media of a kind, and when an unknown name must be a typo: dropping images silently would be worse.
    """
    names = list(found)
    result: dict[str, str] = {}
    for role, aliases in ALIASES.items():
        asked = getattr(wanted, role)
        if asked and asked not in names:
            raise DataError(f"{where}: no field {asked!r}{_nearest([asked], names)}")
        full = [alias for alias in aliases if alias in names and (role in REQUIRED or alias not in empty)]
        if role in MEDIA and len(full) > 1 and not asked:
            rivals = " and ".join(map(repr, full))
            raise DataError(f"{where}: {rivals} hold {role}; name one: data.sources.*.columns.{role}")
        result[role] = asked or next(iter(full), "")
    unused = [name for name in names if name not in result.values() and name not in empty]
    for role in REQUIRED:
        if not result[role]:
            raise DataError(f"{where}: no {role} field{_nearest(ALIASES[role], unused or names)}")
    for role in MEDIA:
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
    """Returns an answer as text, or None where the value is neither text nor a number nor a truth value."""
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    return str(value) if isinstance(value, str | int | float) else None


def tell_unused(fields: Mapping[str, Sequence[object]], source: str, any_used: bool, where: str) -> None:
    """Warns of fields that hold media, by some of their values, and are not used. Raises `DataError` where these are
    more than names of files, and no others are used."""
    for name, values in fields.items():
        if any(map(_is_media, values)):
            fix = f"data.sources.{source}.columns.images or .videos"
            names_only = not any(isinstance(v, list | bytes) or (isinstance(v, dict) and "bytes" in v) for v in values)
            if not any_used and not names_only:
                raise DataError(f"{where}: media in {name!r} are not used: name the field in {fix}, or take it out")
            log.warning("%s: media in %r are not used; to use them: %s", where, name, fix)


def _is_media(value: object) -> bool:
    """Says whether a value is of media by its looks: bytes, a path, a data URI, or what holds one of these."""
    if isinstance(value, list | dict):
        return any(map(_is_media, value.values() if isinstance(value, dict) else value))
    return isinstance(value, bytes) or (isinstance(value, str) and bool(_MEDIA_NAME.fullmatch(value)))


def medium_at(kind: MediaKind, folder: str, path: str) -> Media:
    """Returns the medium at a path relative to a folder, at a URL, or in a data URI. Raises `ValueError`."""
    if not path.startswith("data:"):
        return Media(kind, joined(folder, path))
    try:
        with urllib.request.urlopen(path) as content:
            return Media(kind, f"{path[:30]}... ({len(path)} characters)", data=content.read())
    except (OSError, ValueError) as error:
        raise ValueError(f"a data URI that cannot be read ({error})") from None


def make_prompt(id: str, source: str, text: str, answer: str, media: Mapping[MediaKind, Sequence[Media]]) -> Prompt:
    """Makes a prompt whose media stand in the order of the marks. Text without any mark gets them in front, which is
    how records without marks are meant. Marks are words where the record has no field of media at all.

    Raises `ValueError` with a short reason when marks and media disagree, and when there is nothing to answer."""
    if not text and not any(media.values()):
        raise ValueError("an empty prompt")
    if not media:
        return Prompt(id, source, text, answer)
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
