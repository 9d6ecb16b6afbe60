"""Records and sources of prompts.

A record is a mapping with a question, an answer and perhaps media. `ALIASES` or the settings name the fields.
"""

import collections
import dataclasses
import decimal
import difflib
import itertools
import json
import logging
import pathlib
import re
import reprlib
import urllib.request
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import xxhash

from ..base.errors import DataError, RecordError
from ..base.types import Media, MediaKind, Prompt
from ..config import DataConfig
from .locations import joined, local, opened, parent, why

log = logging.getLogger("fluxjax.data")
_WORD = re.compile(r"[^\W\d_]{2,}")
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
_TYPO = 0.75  # least difflib ratio at which a name counts as a misspelt alias
_ENDINGS = "png|jpe?g|jfif|webp|gif|bmp|tiff?|avif|hei[cf]|jp2|p[gnp]m|mp4|m4v|mpe?g|mov|mkv|webm|avi|wmv|flv"
_MEDIA_NAME = re.compile(rf"(?is)data:(image|video)/.*|.*\.({_ENDINGS})(\?\S*)?")


@dataclasses.dataclass(frozen=True)
class Fields:
    """The name of each field in a file; empty if it lacks the field or, in settings, for the names in `ALIASES`."""

    prompt: str = ""
    answer: str = ""
    images: str = ""
    videos: str = ""
    id: str = ""

    @property
    def media(self) -> list[tuple[MediaKind, str]]:
        """The kinds of media that have a field, each with the field's name."""
        return [(kind, name) for kind, name in zip(MediaKind, (self.images, self.videos), strict=True) if name]


def resolve(found: Iterable[str], wanted: Fields, where: str, empty: Container[str] = ()) -> Fields:
    """Returns the names of the fields, out of the names `found` in a file or line. The fields in `empty` hold nothing.
    Every error message begins with `where`. Raises `DataError` if a name given in `wanted` is absent, or if prompt or
    answer cannot be found. Raises `DataError` if several fields hold images (or videos) and `wanted` names none of
    them, or if an unused name resembles that of a missing media field."""
    names = list(found)
    result: dict[str, str] = {}
    for role, aliases in ALIASES.items():
        asked = getattr(wanted, role)
        if asked and asked not in names:
            raise DataError(f"{where}: no field {asked!r}{_nearest([asked], names)}")
        full = [alias for alias in aliases if alias in names and (role in REQUIRED or alias not in empty)]
        if role in MEDIA and len(full) > 1 and not asked:
            rivals = " and ".join(map(repr, full))
            raise DataError(f"{where}: {rivals} hold {role}; name one of them in data.sources.*.columns.{role}")
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
    """Returns an answer as text; None if the value is neither text nor a number nor a truth value."""
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    return str(value) if isinstance(value, str | int | float) else None


def tell_unused(fields: Mapping[str, Sequence[object]], source: str, any_used: bool, where: str) -> None:
    """Warns of unused fields whose values look like media. If no media are used (`any_used` is False), raises
    `DataError` for a field that holds more than file names."""
    for name, values in fields.items():
        if any(map(_is_media, values)):
            fix = f"data.sources.{source}.columns.images or .videos"
            names_only = not any(isinstance(v, list | bytes) or (isinstance(v, dict) and "bytes" in v) for v in values)
            if not any_used and not names_only:
                raise DataError(f"{where}: media in {name!r} are not used: name the field in {fix}, or remove it")
            log.warning("%s: media in %r are not used; to use them, name the field in %s", where, name, fix)


def _is_media(value: object) -> bool:
    if isinstance(value, list | dict):
        return any(map(_is_media, value.values() if isinstance(value, dict) else value))
    return isinstance(value, bytes) or (isinstance(value, str) and bool(_MEDIA_NAME.fullmatch(value)))


def _medium_at(kind: MediaKind, folder: str, path: str | Media) -> Media:
    """Returns the medium at a path relative to a folder, at a URL, or in a data URI. Raises `ValueError`."""
    if isinstance(path, Media):
        return path
    if not path.startswith("data:"):
        return Media(kind, joined(folder, path))
    try:
        with urllib.request.urlopen(path) as content:
            return Media(kind, f"{path[:30]}... ({len(path)} characters)", data=content.read())
    except (OSError, ValueError) as error:
        raise ValueError(f"a data URI that cannot be read ({error})") from None


def to_prompt(record: Mapping[str, object], fields: Fields, source: str, id: str, folder: str, where: str) -> Prompt:
    """Returns the prompt of a record. `where` names the record's file and line. A media field has a path relative to
    `folder`, or a list of such paths or `Media`. Raises `RecordError`."""
    text, answer = record[fields.prompt], answer_text(record[fields.answer])
    if not isinstance(text, str):
        raise _refused(id, "no prompt", where, fields.prompt, record, "a string")
    if answer is None:
        raise _refused(id, "no answer", where, fields.answer, record, "a string or a number")
    media: dict[MediaKind, list[Media]] = {}
    try:
        for kind, field in fields.media:
            value = record[field] or []
            items = [value] if isinstance(value, str) else value
            if not isinstance(items, list) or not all(item and isinstance(item, str | Media) for item in items):
                raise _refused(id, f"no {kind.value}", where, field, record, "a path or a list of paths")
            media[kind] = [_medium_at(kind, folder, item) for item in items]
        return marked(id, source, text, answer, media)
    except ValueError as error:
        raise error if isinstance(error, RecordError) else RecordError(id, str(error), where) from error


def _refused(id: object, reason: str, where: str, field: str, record: Mapping[str, object], needed: str) -> RecordError:
    return RecordError(str(id), reason, f"{where}: {field!r} must be {needed}, found {reprlib.repr(record[field])}")


def marked(id: str, source: str, text: str, answer: str, media: Mapping[MediaKind, Sequence[Media]]) -> Prompt:
    """Returns a prompt whose media stand in the order of the marks. A text without marks gets the marks of all media at
    its beginning. If `media` is empty (no media field), marks in the text are plain words. Raises `ValueError` with a
    short reason if marks and media disagree, or if the prompt is empty."""
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
            f"{marks.count('<image>')} <image> and {marks.count('<video>')} <video> marks in the text for "
            f"{wanted.count('<image>')} images and {wanted.count('<video>')} videos"
        )
    queues = {MARKS[kind]: iter(items) for kind, items in media.items()}
    return Prompt(id, source, text, answer, tuple(next(queues[mark]) for mark in marks))


@runtime_checkable
class Source(Protocol):
    """A fixed number of prompts, which any thread may read in any order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt:
        """Raises `RecordError` if the record cannot be used."""
        ...

    def texts(self) -> Iterator[str]:
        """Yields every prompt and every answer, without reading media."""
        ...


class PromptList:
    """A source whose prompts are in memory, with a `RecordError` in the place of a record that cannot be used."""

    def __init__(self, prompts: Sequence[Prompt | RecordError]) -> None:
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        prompt = self.prompts[index]
        if isinstance(prompt, RecordError):
            raise prompt
        return prompt

    def texts(self) -> Iterator[str]:
        for prompt in self.prompts:
            if isinstance(prompt, Prompt):
                yield from (prompt.text, prompt.answer)


def digest_of(source: Source) -> str:
    """Returns the xxh3-128, in hexadecimal, of the ids, prompts and answers of all records in their order. The digest
    of a `PromptList` includes the names of media. Media are not read."""
    if isinstance(source, PromptList):
        records = (
            (p.id, p.text, p.answer, *(media.path.rpartition("/")[2] for media in p.media))
            if isinstance(p, Prompt)
            else (str(p),)
            for p in source.prompts
        )
    else:
        records = (getattr(source, "ids", tuple)(), source.texts())
    digest = xxhash.xxh3_128()
    for text in itertools.chain.from_iterable(records):
        digest.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))
    return digest.hexdigest()


def given(prompts: Sequence[Prompt | str], config: DataConfig) -> dict[str, Source]:
    """Returns the sources that the prompts name. Texts are prompts of the configuration's only source, without an
    answer. Raises `DataError` for a name that the configuration lacks, and for what is no prompt."""
    if isinstance(prompts, str):
        raise DataError("prompts is one text; give a list of texts or prompts")
    by_source: dict[str, list[Prompt]] = {}
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if len(config.sources) != 1:
                known = ", ".join(config.sources) or "none"
                raise DataError(
                    f"prompt {number} is a text, which needs one source in data.sources; there are: {known}"
                )
            prompt = Prompt(str(number), next(iter(config.sources)), prompt, "")
        if not isinstance(prompt, Prompt):
            raise DataError(
                f"prompt {number} is of type {type(prompt).__name__}; give a text or a fluxjax.rewards.Prompt"
            )
        if prompt.source not in config.sources:
            known = ", ".join(config.sources)
            raise DataError(f"prompt {prompt.id} is of source {prompt.source!r}, but data.sources has only {known}")
        by_source.setdefault(prompt.source, []).append(prompt)
    return {name: PromptList(group) for name, group in by_source.items()}


class JsonlSource(PromptList):
    """A manifest with a JSON object in each line, such as `{"id": "a", "prompt": "<image>How many?", "answer": "3",
    "images": ["images/a.png"]}`. A media path is relative to the manifest's folder, or a URL. The manifest may be a
    URL, too. All lines are checked when the file is opened, without reading media. Raises `DataError` for a line that
    is no record or lacks a field, and if no record can be used."""

    def __init__(self, path: str | pathlib.Path, name: str, fields: Fields | None = None) -> None:
        path = local(str(path))
        prompts: list[Prompt | RecordError] = []
        lines: dict[str, int] = {}
        unused: dict[str, list[object]] = {}
        for number, record in _read_lines(path):
            where = f"{path}:{number}"
            empty = [field for field, value in record.items() if not value]
            found = resolve(record, fields or Fields(), where, empty)
            for field in record.keys() - vars(found).values() - unused.keys() - set(empty):
                unused[field] = [record[field]]
            try:
                id = record[found.id] if found.id else str(number)
                if isinstance(id, bool) or not isinstance(id, str | int):
                    raise _refused(id, "no id", where, found.id, record, "a string or an integer")
                prompt = to_prompt(record, found, name, str(id), parent(path), where)
                if (line := lines.setdefault(prompt.id, number)) != number:
                    raise RecordError(prompt.id, "an id that was used before", f"{where}, first in line {line}")
            except RecordError as error:
                prompt = error
            prompts.append(prompt)
        if not prompts:
            raise DataError(f"{path}: the file has no records")
        if isinstance(first := prompts[0], RecordError) and not any(isinstance(prompt, Prompt) for prompt in prompts):
            raise DataError(f"{first.detail}: {first.reason}; all records are unusable")
        tell_unused(unused, name, any(isinstance(prompt, Prompt) and prompt.media for prompt in prompts), path)
        super().__init__(prompts)


def _read_lines(path: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    try:
        with opened(path) as file:
            for number, raw in enumerate(file, start=1):
                if not raw.strip():
                    continue
                try:
                    record = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
                except json.JSONDecodeError as error:
                    raise DataError(f"{path}:{number}: not valid JSON: {error.msg} at column {error.colno}") from error
                except UnicodeDecodeError as error:
                    raise DataError(f"{path}:{number}: not valid UTF-8: {error.reason}") from error
                if not isinstance(record, dict):
                    raise DataError(f"{path}:{number}: expected a JSON object, found {type(record).__name__}")
                yield number, record
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {why(error)}") from error


def all_texts(sources: Iterable[Source]) -> Iterator[str]:
    """Yields every prompt and every answer of the sources."""
    return itertools.chain.from_iterable(source.texts() for source in sources)


def common_words(sources: Iterable[Source], share: float = 0.02) -> list[str]:
    """Returns the sorted words, of two letters or more, that stand in at least `share` of the texts of some source."""
    words: set[str] = set()
    for source in sources:
        counts: collections.Counter[str] = collections.Counter()
        total = 0
        for text in source.texts():
            counts.update(set(_WORD.findall(MARK.sub(" ", text))))
            total += 1
        words.update(word for word, count in counts.items() if count >= share * total)
    return sorted(words)
