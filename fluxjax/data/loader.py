"""Opens the sources of a run, and draws prompts from the sources.

The order of draws is a Grain data set that shuffles sources anew each epoch, and mixes sources by weight. The order is
a pure function of seed, source names, source sizes, weights and draw. A resumed run with the same sources and weights
therefore needs only the number of the next draw.
"""

import dataclasses
import functools
import itertools
import logging
import pathlib
import zlib
from collections.abc import Mapping
from typing import TypeAlias, TypedDict, TypeVar

import grain

from ..base.errors import DataError, RecordError
from ..base.types import Prompt
from ..config import Config
from .locations import exists, is_folder, is_url, local, suffix, why
from .sources import Fields, JsonlSource, Source, digest_of

log = logging.getLogger("fluxjax.data")
T = TypeVar("T")
_ENDLESS = 1 << 40  # more draws than any run makes


def open_sources(config: Config) -> dict[str, Source]:
    """Opens the training records of every source. Builds embedded data sets that are missing. Raises `DataError` for
    files that cannot be used, and for a source that is neither embedded nor has a path."""
    return {name: _open(config, name, source.path, "train.jsonl") for name, source in config.data.sources.items()}


def open_held_out(config: Config) -> dict[str, Source]:
    """Opens the held-out records of every source that has an `eval_path` or is embedded. Warns of other sources."""
    result: dict[str, Source] = {}
    for name, source in config.data.sources.items():
        if source.eval_path or not source.path:
            result[name] = _open(config, name, source.eval_path, "eval.jsonl", held_out=True)
        else:
            log.warning("data.sources.%s has no eval_path: its accuracy is not measured", name)
    return result


def open_warm_start(config: Config) -> dict[str, Source]:
    """Opens the records whose answers the warm start trains on: `warm_start.jsonl`, or else the training records."""
    manifests = "warm_start.jsonl", "train.jsonl"
    return {name: _open(config, name, source.path, *manifests) for name, source in config.data.sources.items()}


def _open(config: Config, name: str, path: str, *manifests: str, held_out: bool = False) -> Source:
    """Opens `path`, or if it is empty, the first existing file of `manifests` of the embedded data set `name`."""
    if not path:
        from ..tasks.embedded import ensure

        # A merged feature of the tiny model covers `cell` x `cell` pixels: a digit, or a quarter of a clip's frame.
        cell = 0 if config.model.path else 2 * int(str(config.model.tiny["patch_size"]))
        folder = ensure(name, cell=cell)
        found = (folder / manifest for manifest in manifests if (folder / manifest).exists())
        path = str(next(found, folder / manifests[-1]))  # opening a missing file reports it
    source = config.data.sources[name]
    return open_source(path, name, Fields(**source.columns), held_out)


def open_source(path: str | pathlib.Path, name: str, fields: Fields | None = None, held_out: bool = False) -> Source:
    """Opens a `.jsonl` manifest, a `.parquet` file, or one split of a folder of parquet shards. Raises `DataError`."""
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
    parts = pathlib.PurePath(path).parts
    if is_url(path) or len(parts) != 2 or "/" in parts or suffix(path) in (".jsonl", ".ndjson", ".parquet"):
        return ""
    return (
        "; if this is a Hub id, download the data set first: "
        f"hf download {path} --repo-type dataset --local-dir {parts[1]}, then give that folder, or one of its subsets"
    )


@dataclasses.dataclass(frozen=True)
class SkippedPrompt:
    """A draw that cannot be used. `reason` names no file, so that equal reasons can be counted."""

    prompt: Prompt
    reason: str
    detail: str


Drawn: TypeAlias = Prompt | SkippedPrompt
Place: TypeAlias = tuple[str, int]  # a source's name, and a position in its endless order of rows


class Mixture(TypedDict):
    """The weights by which sources are mixed from draw `start` on, and the number of records of each source."""

    start: int
    weights: dict[str, float]
    sizes: dict[str, int]


class PromptLoader:
    """Draws prompts from several sources in proportion to their weights. `order[n]` is draw `n`. An epoch of a source
    has each record once. Raises `DataError` for weights of other sources, or outside of (0, inf)."""

    def __init__(self, sources: Mapping[str, Source], weights: Mapping[str, float], seed: int) -> None:
        if not sources:
            raise DataError("no data sources")
        if sorted(weights) != sorted(sources):
            raise DataError(f"weights are given for {sorted(weights)}, but the sources are {sorted(sources)}")
        for name, weight in weights.items():
            if not 0 < weight < float("inf"):
                raise DataError(f"data.sources.{name}.weight is {weight}; it must be greater than 0")
        self.sources = dict(sorted(sources.items()))  # draws must not depend on the configuration's order
        self.weights = {name: float(weights[name]) for name in self.sources}
        self.seed = seed
        self.mixtures = [self._mixture_from(0)]  # `resume` adds a mixture if the weights have changed
        self.order = self._make_order()

    @functools.cached_property
    def contents(self) -> dict[str, str]:
        """A digest of the records of each source, and of their order."""
        return {name: digest_of(source) for name, source in self.sources.items()}

    def resume(self, seed: int, mixtures: list[Mixture], draw: int) -> None:
        """Continues the order of a checkpoint from `draw` on. Weights and sources may differ. Each source then
        continues after its last draw, in a new mixture. Raises `DataError` for another seed or size of a source."""
        if seed != self.seed:
            raise DataError(f"the checkpoint was made with seed {seed}; resume it with that seed, not {self.seed}")
        for name, size in itertools.chain.from_iterable(mixture["sizes"].items() for mixture in mixtures):
            if name in self.sources and size != (now := len(self.sources[name])):
                raise DataError(f"source {name!r} had {size} records when the checkpoint was made and has {now} now")
        self.mixtures = list(mixtures)
        if mixtures[-1]["weights"] != self.weights:
            log.warning("the mixture changed from %s to %s", mixtures[-1]["weights"], self.weights)
            self.mixtures.append(self._mixture_from(draw))
        self.order = self._make_order()

    def check(self, contents: Mapping[str, str]) -> None:
        """Raises `DataError` if a source differs from a checkpoint's `contents`."""
        if changed := [name for name in self.sources if contents.get(name, self.contents[name]) != self.contents[name]]:
            raise DataError(
                f"data source {', '.join(changed)} has other records than when the checkpoint was made, or has them in "
                "another order; restore the records, or begin another run"
            )

    def _mixture_from(self, start: int) -> Mixture:
        sizes = {name: len(source) for name, source in self.sources.items()}
        return Mixture(start=start, weights=self.weights, sizes=sizes)

    def _make_order(self) -> grain.MapDataset[Drawn]:
        sizes = {name: size for mixture in self.mixtures for name, size in mixture["sizes"].items()}
        parts: list[grain.MapDataset[Place]] = []
        begins = dict.fromkeys(sizes, 0)  # for each source: the first position that earlier mixtures have not drawn
        ends = [mixture["start"] for mixture in self.mixtures[1:]]
        for mixture, end in zip(self.mixtures, [*ends, _ENDLESS], strict=True):
            places = _mix(mixture["weights"], begins)
            parts.append(places[: end - mixture["start"]])
            if end != _ENDLESS:
                begins |= _next_places(places, end - mixture["start"], len(mixture["weights"]))
        order = parts[0] if len(parts) == 1 else grain.MapDataset.concatenate(parts)
        seeds = {name: zlib.crc32(f"{self.seed}/{name}".encode()) for name in sizes}
        rows = {name: grain.MapDataset.range(size).shuffle(seed=seeds[name]).repeat() for name, size in sizes.items()}
        return order.map_with_index(functools.partial(_read, self.sources, rows))


def _mix(weights: Mapping[str, float], begins: Mapping[str, int]) -> grain.MapDataset[Place]:
    endless, names = grain.MapDataset.range(_ENDLESS), sorted(weights)
    places = [endless[begins[name] :].map(lambda index, name=name: (name, index)) for name in names]
    return places[0] if len(names) == 1 else grain.MapDataset.mix(places, [weights[name] for name in names])


def _next_places(places: grain.MapDataset[Place], start: int, sources: int) -> dict[str, int]:
    """Skips `start` elements of a mixture, and returns the position of each source's next element."""
    first: dict[str, int] = {}
    for position in itertools.count(start):
        name, index = at(places, position)
        first.setdefault(name, index)
        if len(first) == sources:
            break
    return first


def _read(sources: Mapping[str, Source], rows: Mapping[str, grain.MapDataset[int]], draw: int, place: Place) -> Drawn:
    """Reads the prompt of a `Place`. Raises `DataError` if the configuration no longer names its source."""
    name, index = place
    row = at(rows[name], index)
    if name not in sources:
        raise DataError(
            f"the checkpoint has a prompt of row {row} of data source {name!r}, which data.sources does not name"
        )
    return read_row(sources[name], name, row, epoch=index // len(sources[name]), draw=draw)


def read_row(source: Source, name: str, row: int, *, epoch: int = 0, draw: int = 0) -> Drawn:
    """Reads a row of the source `name`. Returns a `SkippedPrompt` for a record that cannot be used."""
    try:
        return dataclasses.replace(source[row], row=row, epoch=epoch, draw=draw)
    except RecordError as error:
        prompt = Prompt(error.id, name, "", "", row=row, epoch=epoch, draw=draw)
        return SkippedPrompt(prompt, error.reason, error.detail)


def at(dataset: grain.MapDataset[T], index: int) -> T:
    """Returns an element of a data set from which nothing is filtered."""
    element = dataset[index]
    assert element is not None  # Grain's way to say "filtered out"
    return element
