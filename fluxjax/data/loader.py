"""The order in which prompts are drawn, as a Grain data set: every source shuffled anew each epoch, mixed by weight.

The order is a pure function of (seed, source names and sizes, weights, draw). So the next draw's number is all that a
resumed run needs in order to go on exactly where the interrupted one was, and any draw can be read again by its number.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import zlib
from collections.abc import Mapping
from typing import SupportsIndex, TypeAlias, TypedDict, TypeVar

import grain

from ..base.errors import DataError, RecordError
from ..base.types import Prompt
from .sources import Source

log = logging.getLogger("fluxjax.data")
T = TypeVar("T")
_ENDLESS = 1 << 40  # draws; more than any run makes


@dataclasses.dataclass(frozen=True)
class SkippedPrompt:
    """A draw that cannot be used. `reason` is short and without names, so that it can be counted; `detail` is for the
    log."""

    prompt: Prompt
    reason: str
    detail: str


Drawn: TypeAlias = Prompt | SkippedPrompt


class Mixture(TypedDict):
    """The weights by which sources are mixed from draw `start` on, and the number of records of each source."""

    start: int
    weights: dict[str, float]
    sizes: dict[str, int]


class PromptLoader:
    """Draws prompts from several sources in proportion to their weights: `order[n]` is draw `n`.

    Every source is shuffled anew for each of its own epochs and gives every record exactly once an epoch.
    Raises `DataError` for weights that name no source or are not positive.
    """

    def __init__(self, sources: Mapping[str, Source], weights: Mapping[str, float], seed: int) -> None:
        if not sources:
            raise DataError("no data sources")
        if sorted(weights) != sorted(sources):
            raise DataError(f"weights are given for {sorted(weights)}, but the sources are {sorted(sources)}")
        for name, weight in weights.items():
            if not 0 < weight < float("inf"):
                raise DataError(f"data.sources.{name}.weight is {weight}; it must be greater than 0")
        self.sources = dict(sorted(sources.items()))  # the order must not depend on the configuration file
        self.weights = {name: float(weights[name]) for name in self.sources}
        self.seed = seed
        self.mixtures = [self._mixture_from(0)]  # one more for each time that a resumed run had other weights
        self.order = self._make_order()

    def resume(self, seed: int, mixtures: list[Mixture], draw: int) -> None:
        """Continues the order of a checkpoint from `draw` on.

        Other weights, more sources or fewer are allowed: each source goes on where it was, in a new mixture.
        Raises `DataError` when the seed or the size of a source differs: the order would be another.
        """
        if seed != self.seed:
            raise DataError(f"the checkpoint was made with seed {seed}; resume it with that, not {self.seed}")
        for name, size in itertools.chain.from_iterable(mixture["sizes"].items() for mixture in mixtures):
            if name in self.sources and size != (now := len(self.sources[name])):
                raise DataError(
                    f"data source {name!r} had {size} records when the checkpoint was made and has {now} now"
                )
        self.mixtures = list(mixtures)
        if mixtures[-1]["weights"] != self.weights:
            log.warning("the mixture changed from %s to %s", mixtures[-1]["weights"], self.weights)
            self.mixtures.append(self._mixture_from(draw))
        self.order = self._make_order()

    def _mixture_from(self, start: int) -> Mixture:
        sizes = {name: len(source) for name, source in self.sources.items()}
        return Mixture(start=start, weights=self.weights, sizes=sizes)

    def _make_order(self) -> grain.MapDataset[Drawn]:
        parts: list[grain.MapDataset[Drawn]] = []
        drawn: collections.Counter[str] = collections.Counter()  # by source, in earlier mixtures
        ends = [mixture["start"] for mixture in self.mixtures[1:]]
        for mixture, end in zip(self.mixtures, [*ends, _ENDLESS], strict=True):
            weights, length = mixture["weights"], end - mixture["start"]
            sources = {name: self._shuffled(name, mixture["sizes"][name])[drawn[name] :] for name in sorted(weights)}
            parts.append(_mix(sources, weights)[:length])
            if end != _ENDLESS:
                drawn.update(_count(weights, length))
        order = parts[0] if len(parts) == 1 else grain.MapDataset.concatenate(parts)
        return order.map_with_index(lambda index, item: _placed(item, draw=index))

    def _shuffled(self, name: str, size: int) -> grain.MapDataset[Drawn]:
        records = grain.MapDataset.source(_Records(name, size, self.sources.get(name)))
        shuffled = records.shuffle(seed=zlib.crc32(f"{self.seed}/{name}".encode())).repeat()
        return shuffled.map_with_index(lambda index, item: _placed(item, epoch=index // size))


class _Records:
    """A source as Grain reads it: a record that cannot be used is a value, not an error.

    Draws of a source that the configuration does not name any more (`source` is None) keep their places in the order.
    """

    def __init__(self, name: str, size: int, source: Source | None) -> None:
        self.name, self.size, self.source = name, size, source

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: SupportsIndex) -> Drawn:
        row = index.__index__()
        if self.source is None:
            raise DataError(f"the checkpoint has a prompt of row {row} of data source {self.name!r}, which is not here")
        try:
            return dataclasses.replace(self.source[row], row=row)
        except RecordError as error:
            return SkippedPrompt(Prompt(error.id, self.name, "", "", row=row), error.reason, "unusable record")


def _placed(item: Drawn, **place: int) -> Drawn:
    if isinstance(item, SkippedPrompt):
        return dataclasses.replace(item, prompt=dataclasses.replace(item.prompt, **place))
    return dataclasses.replace(item, **place)


def at(dataset: grain.MapDataset[T], index: int) -> T:
    """Returns an element of a data set from which nothing is filtered."""
    element = dataset[index]
    assert element is not None  # Grain's way to say "filtered out"
    return element


def _mix(sources: Mapping[str, grain.MapDataset[T]], weights: Mapping[str, float]) -> grain.MapDataset[T]:
    if len(sources) == 1:
        return next(iter(sources.values()))
    return grain.MapDataset.mix(list(sources.values()), weights=[weights[name] for name in sources])


def _count(weights: Mapping[str, float], length: int) -> dict[str, int]:
    """Counts the elements of each source among the first `length` of a mixture: the index of its next one."""
    endless = grain.MapDataset.range(_ENDLESS)
    numbers = {name: endless.map(lambda index, name=name: (name, index)) for name in sorted(weights)}
    mixture, counts = _mix(numbers, weights), {}
    for position in itertools.count(length):
        name, index = at(mixture, position)
        counts.setdefault(name, index)
        if len(counts) == len(weights):
            break
    return counts
