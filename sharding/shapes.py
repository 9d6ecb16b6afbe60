"""Few compiled shapes for many batches: sizes that were used before are used again where they waste little.

Every distinct tuple of buffer sizes is a program of its own, which takes seconds to compile on a CPU and minutes on a
cluster. Lengths differ in every batch; rounding each size to a coarse grid would waste a third of every buffer and
still multiply the combinations of a dozen sizes. So sizes are chosen together, and remembered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

Sizes = dict[str, int]  # by the name of the buffer


@dataclasses.dataclass
class ShapeBook:
    """The sizes that have been compiled so far, at most about `most` of them.

    A request is served by the cheapest entry that is large enough, if that costs at most `slack` more than sizes made
    for it. Otherwise a new entry is made, its sizes rounded up by an eighth of an octave at most. Once `most` entries
    exist, requests are served by any entry that is large enough; one that fits none enlarges a last entry that holds
    the largest of all sizes, so that ever fewer requests do not fit.

    The order of requests decides, so it is part of a run's state: `state` and `load_state`.
    """

    most: int = 32
    slack: float = 0.15
    entries: list[Sizes] = dataclasses.field(default_factory=list)

    def fit(self, needs: Mapping[str, int], caps: Mapping[str, int], weights: Mapping[str, float]) -> Sizes:
        """Sizes of at least `needs`, each at most its cap (if it has one). `weights` is what one unit of a size costs;
        1 if it is not named."""
        tight = {name: round_up(need, caps.get(name, 0)) for name, need in needs.items()}
        if fitting := [one for one in self.entries if _covers(one, needs)]:
            best = min(fitting, key=lambda one: _cost(one, weights))
            full = len(self.entries) >= self.most
            if full or _cost(best, weights) <= (1 + self.slack) * _cost(tight, weights):
                return best
        if len(self.entries) < self.most:
            self.entries.append(tight)
            return tight
        names = {name for one in [tight, *self.entries] for name in one}
        largest = {name: max(one.get(name, 0) for one in [tight, *self.entries]) for name in sorted(names)}
        self.entries[-1] = largest
        return largest

    def state(self) -> list[Sizes]:
        """What `load_state` takes: plain JSON."""
        return [dict(one) for one in self.entries]

    def load_state(self, state: list[Sizes]) -> None:
        self.entries = [dict(one) for one in state]


def round_up(need: int, cap: int = 0) -> int:
    """The next of a geometric series with eight members an octave, all multiples of 8; never above `cap` (0: none)."""
    step = max(1 << max(need.bit_length() - 4, 0), 8)
    size = -(-need // step) * step
    return min(size, cap) if cap and need <= cap else size


def _covers(sizes: Mapping[str, int], needs: Mapping[str, int]) -> bool:
    return all(need <= sizes.get(name, 0) for name, need in needs.items())


def _cost(sizes: Mapping[str, int], weights: Mapping[str, float]) -> float:
    return sum(size * weights.get(name, 1.0) for name, size in sizes.items())
