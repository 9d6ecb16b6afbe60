"""Sources of prompts: their protocol, JSONL manifests, and opening whatever the configuration names."""

import collections
import itertools
import json
import logging
import pathlib
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import xxhash

from ..base.errors import DataError, RecordError
from ..base.types import Media, MediaKind, Prompt
from ..config import Config, DataConfig
from .fields import MARK, Fields, answer_text, make_prompt, medium_at, resolve, tell_unused
from .locations import exists, is_folder, is_url, local, opened, parent, suffix, why

log = logging.getLogger("fluxjax.data")
_WORD = re.compile(r"[^\W\d_]{2,}")


@runtime_checkable
class Source(Protocol):
    """Holds a fixed number of prompts, read one at a time in any order, from any thread."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt:
        """Reads the prompt of a row. Raises `RecordError` when this one record cannot be used."""
        ...

    def texts(self) -> Iterator[str]:
        """Yields every prompt and every answer, without reading media."""
        ...


class PromptList:
    """A source whose prompts are in memory, and the records that cannot be used."""

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
    """Returns the xxh3-128 of the records in their order: their ids, prompts and answers, and, where these are in
    memory, the names of their media. Media are not read."""
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


def given(prompts: Sequence[Prompt], config: DataConfig) -> dict[str, Source]:
    """Groups prompts by source. Raises `DataError` for a source that the configuration does not name: it would have no
    reward."""
    by_source: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        if prompt.source not in config.sources:
            known = ", ".join(config.sources)
            raise DataError(f"prompt {prompt.id} is of source {prompt.source!r}; data.sources names {known}")
        by_source.setdefault(prompt.source, []).append(prompt)
    return {name: PromptList(group) for name, group in by_source.items()}


class JsonlSource(PromptList):
    """A manifest: one JSON object a line, e.g. `{"id": "a", "prompt": "<image>How many?", "answer": "3",
    "images": ["images/a.png"]}`. Media paths are relative to the manifest's folder, or URLs; so may the manifest be.

    The whole file is checked when it is opened (media are not touched): `DataError` names file and line of what is no
    record, or lacks a field, and of the first record if none can be used."""

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
                prompt = _to_prompt(record, name, str(number), parent(path), found, where)
                if (line := lines.setdefault(prompt.id, number)) != number:
                    raise RecordError(prompt.id, "an id that is used before", f"{where}, first in line {line}")
            except RecordError as error:
                prompt = error
            prompts.append(prompt)
        if not prompts:
            raise DataError(f"{path}: the file has no records")
        if isinstance(first := prompts[0], RecordError) and not any(isinstance(prompt, Prompt) for prompt in prompts):
            raise DataError(f"{first.detail}: {first.reason}; all records are unusable")
        tell_unused(unused, name, any(isinstance(prompt, Prompt) and prompt.media for prompt in prompts), path)
        super().__init__(prompts)


def open_sources(config: Config) -> dict[str, Source]:
    """Opens the training records of every source; embedded data sets are built when they are missing.

    Raises `DataError` for files that cannot be used, and for a source that is neither embedded nor has a path.
    """
    return {name: _open(config, name, source.path, "train.jsonl") for name, source in config.data.sources.items()}


def open_held_out(config: Config) -> dict[str, Source]:
    """Opens the held-out records of every source that has some."""
    result: dict[str, Source] = {}
    for name, source in config.data.sources.items():
        if source.eval_path or not source.path:
            result[name] = _open(config, name, source.eval_path, "eval.jsonl", held_out=True)
        else:
            log.warning("data.sources.%s has no eval_path: its accuracy is not measured", name)
    return result


def open_warm_start(config: Config) -> dict[str, Source]:
    """Opens the records whose answers the warm start sees: those meant for it, or else the training records."""
    return {
        name: _open(config, name, source.path, "warm_start.jsonl", "train.jsonl")
        for name, source in config.data.sources.items()
    }


def _open(config: Config, name: str, path: str, *manifests: str, held_out: bool = False) -> Source:
    """Opens `path`, or, if that is empty, the first of the `manifests` that the embedded data set of that name has."""
    if not path:
        from ..tasks.embedded import ensure

        # A digit, and half of a clip, is a merged feature of the tiny model.
        cell = 0 if config.model.path else 2 * int(str(config.model.tiny["patch_size"]))
        folder = ensure(name, cell=cell)
        found = (folder / manifest for manifest in manifests if (folder / manifest).exists())
        path = str(next(found, folder / manifests[-1]))  # one that is missing is told by whoever opens it
    source = config.data.sources[name]
    return open_source(path, name, Fields(**source.columns), held_out)


def open_source(path: str | pathlib.Path, name: str, fields: Fields | None = None, held_out: bool = False) -> Source:
    """Opens a `.jsonl` manifest, a `.parquet` file, or a folder of parquet shards, of which it takes a split: local
    ones, or URLs. Raises `DataError`."""
    path = local(str(path))
    if not is_url(path):
        path = str(pathlib.Path(path).expanduser())
    try:
        found, folder = exists(path), is_folder(path)
    except OSError as error:
        raise DataError(f"data.sources.{name}: {path} cannot be read: {why(error)}") from error
    if not found and "*" not in path:
        raise DataError(f"data.sources.{name}: {path} does not exist{_how_to_download(path)}")
    if folder or suffix(path) == ".parquet":
        from .parquet import ParquetSource  # pyarrow takes a third of a second to import

        return ParquetSource(path, name, fields, held_out)
    if suffix(path) in (".jsonl", ".ndjson"):
        return JsonlSource(path, name, fields)
    raise DataError(f"data.sources.{name}: {path} is neither .jsonl nor .parquet nor a folder of .parquet files")


def _how_to_download(path: str) -> str:
    """Returns a hint where `path` looks like a Hub id, ORGANISATION/NAME."""
    parts = pathlib.PurePath(path).parts
    if is_url(path) or len(parts) != 2 or "/" in parts or suffix(path) in (".jsonl", ".ndjson", ".parquet"):
        return ""
    return (
        "; data sets are not downloaded by themselves, if this is a Hub id: "
        f"hf download {path} --repo-type dataset --local-dir {parts[1]}, then give that folder, or one of its subsets"
    )


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


def _to_prompt(
    record: Mapping[str, object], source: str, default_id: str, folder: str, fields: Fields, where: str
) -> Prompt:
    """The prompt of a record. Raises `RecordError`, whose detail names the line."""
    id = record[fields.id] if fields.id else default_id

    def refused(reason: str, field: str, needed: str) -> RecordError:
        return RecordError(str(id), reason, f"{where}: {field!r} must be {needed}, found {reprlib.repr(record[field])}")

    if isinstance(id, bool) or not isinstance(id, (str, int)):
        raise refused("no id", fields.id, "a string or an integer")
    text, answer = record[fields.prompt], answer_text(record[fields.answer])
    if not isinstance(text, str):
        raise refused("no prompt", fields.prompt, "a string")
    if answer is None:
        raise refused("no answer", fields.answer, "a string or a number")
    media: dict[MediaKind, list[Media]] = {}
    try:
        for kind, field in ((MediaKind.IMAGE, fields.images), (MediaKind.VIDEO, fields.videos)):
            if field:
                value = record[field] or []
                paths = [value] if isinstance(value, str) else value
                if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
                    raise refused(f"no {kind.value}", field, "a path or a list of paths")
                media[kind] = [medium_at(kind, folder, path) for path in paths]
        return make_prompt(str(id), source, text, answer, media)
    except ValueError as error:
        raise error if isinstance(error, RecordError) else RecordError(str(id), str(error), where) from error


def all_texts(sources: Iterable[Source]) -> Iterator[str]:
    """Yields every prompt and answer: what a tokenizer built for these sources must be able to write."""
    return itertools.chain.from_iterable(source.texts() for source in sources)


def common_words(sources: Iterable[Source], share: float = 0.02) -> list[str]:
    """Returns, sorted, the words of two letters or more that stand in at least `share` of the texts of some source: the
    words of its questions and of a small set of answers."""
    words: set[str] = set()
    for source in sources:
        counts: collections.Counter[str] = collections.Counter()
        total = 0
        for text in source.texts():
            counts.update(set(_WORD.findall(MARK.sub(" ", text))))
            total += 1
        words.update(word for word, count in counts.items() if count >= share * total)
    return sorted(words)
