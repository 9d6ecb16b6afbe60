"""The weights that a device holds at each of its steps, and when it asks for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax

from .pushed_gradients import Key

Row = tuple[jax.Array, ...]  # one unit's rows, of each of its owners in order, on the device that fetched them


@dataclasses.dataclass(frozen=True)
class Itinerary:
    """The weights of a device's steps, which follow each other: those of at most `live` steps are there at once.

    `needs` are the keys of each step. What the next steps need is fetched ahead; weights that two near steps share are
    fetched once. Of `live` 3 or more, one step is dispatched before the one before it is done.
    """

    needs: tuple[tuple[Key, ...], ...]
    live: int

    @property
    def lag(self) -> int:
        return 1 if self.live > 2 else 0

    def wanted(self, step: int) -> list[Key]:
        """The weights that are held, or on their way, when this step is dispatched."""
        ahead = self.live - 1 - self.lag
        return list(dict.fromkeys(key for needs in self.needs[step : step + 1 + ahead] for key in needs))

    def fetches(self) -> list[list[Key]]:
        """The keys that are asked for before each step: an owner in another process knows them without being told."""
        found: list[list[Key]] = []
        held: set[Key] = set()
        for step in range(len(self.needs)):
            wanted = self.wanted(step)
            found.append([key for key in wanted if key not in held])
            held = set(wanted)
        return found


class Window:
    """Walks an itinerary: `fetch(key, count)` starts the `count`-th transfer, `ready` waits for rows that need it."""

    def __init__(
        self, itinerary: Itinerary, fetch: Callable[[Key, int], Row], ready: Callable[[Sequence[Row]], None]
    ) -> None:
        self._itinerary, self._fetch, self._ready = itinerary, fetch, ready
        self._fetches = itinerary.fetches()
        self._held: dict[Key, Row] = {}
        self._results: list[jax.Array | None] = []  # of the steps taken; None where known to be done
        self._count = 0

    def next(self) -> list[Row]:
        """Returns the rows for the next step, and asks for those of the steps after it."""
        step = len(self._results)
        done = step - 1 - self._itinerary.lag
        if done >= 0:  # what runs ahead of the device would hold ever more weights
            jax.block_until_ready(self._results[done])
            self._results[done] = None
        self._held = {key: self._held[key] for key in self._itinerary.wanted(step) if key in self._held}
        for key in self._fetches[step]:
            self._held[key] = self._fetch(key, self._count)
            self._count += 1
        rows = [self._held[key] for key in self._itinerary.needs[step]]
        self._ready(rows)
        return rows

    @property
    def done(self) -> int:
        """How many steps are known to be done."""
        return max(len(self._results) - 1 - self._itinerary.lag, 0)

    def dispatched(self, result: jax.Array) -> None:
        """Notes that a step is under way; `result` is any output of its program."""
        self._results.append(result)

    def finish(self) -> None:
        jax.block_until_ready([result for result in self._results if result is not None])
        self._held = {}
