"""The order in which prompts are drawn: a seeded shuffle an epoch and a weighted mixture of sources, over Grain.

The order is a pure function of (seed, source names and sizes, weights, draw), so that the whole state of the
loader is a few counters: a resumed run draws exactly what the interrupted one would have drawn.
"""

from __future__ import annotations

import dataclasses
import logging
import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

import grain

from ..base.errors import DataError, RecordError
from ..base.types import Prompt
from .sources import Source

log = logging.getLogger("fluxjax.data")
T = TypeVar("T")
_ENDLESS = 1 << 40  # draws of one source; more than any run makes


class _Rows:
    """The row numbers of a source, for Grain to permute; the records themselves are read afterwards."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class PromptLoader:
    """Draws prompts from several sources in proportion to their weights.

    Every source is shuffled anew for each of its own epochs and gives every record exactly once an epoch. With
    `epochs`, drawing ends when the first source has been through that many: the proportions hold to the end.
    Not thread-safe: one thread draws. Raises `DataError` for weights that name no source or are not positive.
    """

    def __init__(
        self, sources: Mapping[str, Source], weights: Mapping[str, float], seed: int, epochs: int | None = None
    ) -> None:
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
        self.epochs = epochs
        self._names = list(self.sources)
        self._orders = {
            name: grain.MapDataset.source(_Rows(len(source)))
            .shuffle(seed=zlib.crc32(f"{seed}/{name}".encode()))
            .repeat(epochs)
            for name, source in self.sources.items()
        }
        self._schedule = self._mixture()
        self._draw = 0  # prompts drawn in this run
        self._position = 0  # in the schedule
        self._offset = dict.fromkeys(self._names, 0)  # draws of each source before the schedule began
        self._taken = dict.fromkeys(self._names, 0)  # draws of each source in all

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts, fewer only when the data is exhausted. Raises `RecordError` for a bad one."""
        prompts = []
        while len(prompts) < count and (taken := self.take()) is not None:
            prompt, reason = taken
            if reason:
                raise RecordError(prompt.id, reason)
            prompts.append(prompt)
        return prompts

    def take(self) -> tuple[Prompt, str] | None:
        """The next prompt and, if its record is unusable, the reason; None at the end of the data."""
        if self.exhausted:
            return None
        name, _ = self._next()
        index = self._taken[name]
        source = self.sources[name]
        row, epoch = self._at(self._orders[name], index), index // len(source)
        try:
            prompt, reason = source[row], ""
        except RecordError as error:
            prompt, reason = Prompt(error.id, name, "", ""), error.reason
        prompt = dataclasses.replace(prompt, draw=self._draw, epoch=epoch, row=row)
        self._draw += 1
        self._position += 1
        self._taken[name] += 1
        return prompt, reason

    def again(self, draw: int, source: str, row: int, epoch: int) -> Prompt:
        """A prompt that was drawn before. Raises `DataError` if its source is not here any more, `RecordError` if the
        record has become unusable."""
        if source not in self.sources or row >= len(self.sources[source]):
            raise DataError(f"the checkpoint has a prompt of row {row} of data source {source!r}, which is not here")
        return dataclasses.replace(self.sources[source][row], draw=draw, epoch=epoch, row=row)

    @property
    def exhausted(self) -> bool:
        if self.epochs is None:
            return False
        name, _ = self._next()
        return self._taken[name] >= self.epochs * len(self.sources[name])

    def state_dict(self) -> dict[str, Any]:
        """Everything the next draw depends on, as JSON values."""
        return {
            "seed": self.seed,
            "weights": dict(self.weights),
            "sizes": {name: len(source) for name, source in self.sources.items()},
            "draw": self._draw,
            "position": self._position,
            "offset": dict(self._offset),
            "taken": dict(self._taken),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken.

        Other weights, more sources or fewer are allowed: each source goes on where it was, in a new mixture.
        Raises `DataError` when the seed or the size of a source differs: the order would be another.
        """
        if state["seed"] != self.seed:
            raise DataError(f"the checkpoint was made with seed {state['seed']}; resume it with that, not {self.seed}")
        for name, source in self.sources.items():
            size = state["sizes"].get(name, len(source))
            if size != len(source):
                raise DataError(
                    f"data source {name!r} had {size} records when the checkpoint was made and has {len(source)} now"
                )
        self._draw = state["draw"]
        self._taken = {name: state["taken"].get(name, 0) for name in self._names}
        if state["weights"] == self.weights:
            self._position = state["position"]
            self._offset = dict(state["offset"])
        else:
            log.warning("the mixture changed from %s to %s", state["weights"], self.weights)
            self._position = 0
            self._offset = dict(self._taken)

    def _next(self) -> tuple[str, int]:
        """The source of the next draw and the index within the source's own sequence."""
        which, index = self._at(self._schedule, self._position)
        name = self._names[which]
        index += self._offset[name]
        if index != self._taken[name]:  # Grain promises in-order mixtures; without that, resuming would be wrong
            raise AssertionError(f"the mixture asks for draw {index} of {name}, which is at {self._taken[name]}")
        return name, index

    @staticmethod
    def _at(dataset: grain.MapDataset[T], index: int) -> T:
        element = dataset[index]
        assert element is not None  # Grain's way to say "filtered out"; nothing is filtered here
        return element

    def _mixture(self) -> grain.MapDataset[tuple[int, int]]:
        """(source number, index within the source) for each position."""
        parts = [
            grain.MapDataset.range(_ENDLESS).map(lambda index, which=which: (which, index))
            for which in range(len(self._names))
        ]
        if len(parts) == 1:
            return parts[0]
        return grain.MapDataset.mix(parts, weights=list(self.weights.values()))
