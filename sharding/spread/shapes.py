"""Keeps compiled shapes few for many batches: sizes that were used before are used again where they waste little.

Every distinct tuple of buffer sizes is a program of its own, which takes seconds to compile on a CPU and minutes on a
cluster. Lengths differ in every batch; rounding each size to a coarse grid would waste a third of every buffer and
still multiply the combinations of a dozen sizes. So sizes are chosen together, and remembered.
"""

import dataclasses
from collections.abc import Callable, Mapping

Sizes = dict[str, int]  # by the name of the buffer


@dataclasses.dataclass
class ShapeBook:
    """The sizes that have been compiled so far, at most about `most` of them.

    A request is served by the cheapest entry that is large enough, if that costs at most `slack` more than sizes made
    for it. Otherwise a new entry is made, its sizes rounded up by an eighth of an octave at most. Once `most` entries
    exist, requests are served by any entry that is large enough; one that fits none enlarges a last entry that holds
    the largest of all sizes, so that ever fewer requests do not fit.

    Sizes made for some number of devices are of no use to others: each number has entries of its own, and `most` counts
    them apart. The order of requests decides, so it is part of a run's state: `state` and `load_state`.
    """

    most: int = 32
    slack: float = 0.15
    entries: dict[int, list[Sizes]] = dataclasses.field(default_factory=dict)  # by the number of devices

    def __len__(self) -> int:
        return sum(map(len, self.entries.values()))

    def fit(
        self, needs: Mapping[str, int], caps: Mapping[str, int], weight: Callable[[str], float], devices: int = 1
    ) -> Sizes:
        """The sizes of buffers for so many devices: at least `needs`, each at most its cap (if it has one). `weight` is
        the cost of a unit of a size."""

        def cost(sizes: Mapping[str, int]) -> float:
            return sum(size * weight(name) for name, size in sizes.items())

        tight = {name: round_up(need, caps.get(name, 0)) for name, need in needs.items()}
        entries = self.entries.setdefault(devices, [])
        usable = [sizes for sizes in entries if all(sizes.get(name, 0) <= cap for name, cap in caps.items())]
        full = len(entries) >= self.most
        if fitting := [sizes for sizes in usable if all(n <= sizes.get(name, 0) for name, n in needs.items())]:
            best = min(fitting, key=cost)
            if full or cost(best) <= (1 + self.slack) * cost(tight):
                return best
        if not full:
            entries.append(tight)
            return tight
        names = {name for sizes in [tight, *usable] for name in sizes}
        largest = {name: max(sizes.get(name, 0) for sizes in [tight, *usable]) for name in sorted(names)}
        entries[-1] = largest
        return largest

    def state(self) -> dict[str, dict[str, list[Sizes]]]:
        """The entries as plain JSON, which `load_state` takes."""
        return {"entries": {str(devices): list(map(dict, entries)) for devices, entries in self.entries.items()}}

    def load_state(self, state: Mapping[str, Mapping[str, list[Sizes]]]) -> None:
        self.entries = {int(devices): list(map(dict, entries)) for devices, entries in state["entries"].items()}


def round_up(need: int, cap: int = 0) -> int:
    """The next of a geometric series with eight members an octave, all multiples of 8; never above `cap` (0: none)."""
    step = max(1 << max(need.bit_length() - 4, 0), 8)
    size = -(-need // step) * step
    return min(size, cap) if cap and need <= cap else size
