"""Keeps the number of compiled shapes small: compiled buffer sizes are used again if they waste little.

Every distinct tuple of buffer sizes needs its own program, whose compilation takes seconds on a CPU and minutes on a
cluster. A coarse grid would waste a third of every buffer, and a dozen sizes would still have too many combinations. So
all sizes are chosen together, and remembered.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Sizes = dict[str, int]  # sizes of buffers, by name
Cost = Callable[[Mapping[str, int]], float]  # cost of a microbatch in buffers of these sizes

BASE = "columns"  # the size that scales all sizes except FIXED and GIVEN
FIXED = ("frame", "exports")  # sizes that never shrink
GIVEN = "rows"  # the size that is always exact
PER_ROW = "chunks"  # the size that grows with the columns of a row, not with all rows
COARSE = ("round/", "send/")  # sizes that vary so much that their shares of a device's tokens are powers of two
LEAST = 0.25  # the least share of a COARSE size
SETTLED = 100  # requests without a new entry after which the accepted slack has doubled; after 200, it has tripled


@dataclasses.dataclass
class ShapeBook:
    """The sizes that have been compiled so far, at most `most` entries.

    The cheapest entry that is large enough serves a request, unless a new entry would be cheaper by more than the share
    `slack` (see `patience`). A new entry has the requested columns, rounded up (`round_up`). Relative to its columns,
    most of its other sizes are at least as large as in all earlier entries, so that entries differ mainly in columns.
    The last entry has the largest possible sizes (caps), and serves every request within them.

    Entries for one number of devices are useless for another number: each number has its own entries, at most `most`.
    If microbatches of single devices and of all devices alternate (`odc`), single devices get `alone` of the `most`
    entries. Entries depend on the order of requests, so that they are part of a run's state: `state` and `load_state`.

    With `ahead`, a new entry is compiled first, and used only `ahead` steps (`next_step`) later. Until then a larger
    ready entry serves the request; without a larger entry, the new entry is used at once. So equal runs compute in
    equal sizes, however long compilations take.
    """

    most: int = 32
    slack: float = 0.06
    alone: int = 0
    ahead: int = 0
    step: int = 0
    entries: dict[int, list[Sizes]] = dataclasses.field(default_factory=dict)  # by the number of devices
    served: dict[int, int] = dataclasses.field(default_factory=dict)  # by devices: requests since the last new entry
    coming: list[tuple[int, Sizes, int]] = dataclasses.field(default_factory=list)  # devices, entry, its first step
    divided: dict[int, int] = dataclasses.field(default_factory=dict)  # by devices: `served` at the last `divide`

    def __len__(self) -> int:
        return sum(map(len, self.entries.values()))

    def places(self, devices: int) -> int:
        """The bound on the entries for this number of devices."""
        if not self.alone:
            return self.most
        return self.alone if devices == 1 else max(self.most - self.alone, 1)

    def next_step(self) -> None:
        self.step += 1
        self.coming = [(devices, sizes, first) for devices, sizes, first in self.coming if first > self.step]

    def choose(
        self, needs: Mapping[str, int], caps: Mapping[str, int], cost: Cost, devices: int = 1, exact: bool = False
    ) -> tuple[Sizes, Sizes | None]:
        """Returns (the sizes of the buffers now, the sizes to compile for later or None: always without `ahead`)."""
        sizes = self.fit(needs, caps, cost, devices, exact)
        if not self.ahead:
            return sizes, None
        new = not self.served[devices]
        if not new and (devices, sizes) not in [(number, entry) for number, entry, _ in self.coming]:
            return sizes, None
        unready = [entry for number, entry, _ in self.coming if number == devices] + [sizes]
        ready = [entry for entry in self.holding(needs, caps, devices) if entry not in unready]
        if not ready:  # no ready entry is large enough: the new entry is compiled now
            self.coming = [known for known in self.coming if known[:2] != (devices, sizes)]
            return sizes, None
        if new:
            self.coming.append((devices, sizes, self.step + self.ahead))
        return min(ready, key=cost), sizes

    def fit(
        self, needs: Mapping[str, int], caps: Mapping[str, int], cost: Cost, devices: int = 1, exact: bool = False
    ) -> Sizes:
        """The sizes of buffers for this number of devices: at least `needs`, each at most its cap (if it has one). With
        `exact`, while more than one entry may be made, sizes equal `needs`, but `frame` never shrinks."""
        usable, places = self._usable(needs, caps, devices), self.places(devices)
        # Drops entries of other settings: a resumed run may have smaller buffers, or another strategy.
        entries = self.entries[devices] = list(usable)
        if exact and len(entries) < places - 1:
            frame = max((sizes.get("frame", 0) for sizes in usable), default=0)
            needs = {name: max(need, frame) if name == "frame" else need for name, need in needs.items()}
            found = next((sizes for sizes in usable if sizes == needs), None)
        else:
            found = self.found(needs, caps, cost, devices)
        if found is not None:
            self.served[devices] = self.served.get(devices, 0) + 1
            return found
        self.served[devices] = self.divided[devices] = 0
        if len(entries) < places - 1:
            sizes = dict(needs) if exact else self._fresh(needs, caps, usable)
        else:  # the last entry: sizes without a cap grow to a power of two
            names = sorted({name for known in [needs, caps, *usable] for name in known})
            most = {name: max(known.get(name, 0) for known in [needs, *usable]) for name in names}
            sizes = {name: caps.get(name) or 1 << max(most[name] - 1, 7).bit_length() for name in names}
            del entries[places - 1 :]
        entries.append(sizes)
        return sizes

    def found(self, needs: Mapping[str, int], caps: Mapping[str, int], cost: Cost, devices: int = 1) -> Sizes | None:
        """The entry that serves a request; None if `fit` would make an entry."""
        usable, holding = self._usable(needs, caps, devices), self.holding(needs, caps, devices)
        if not holding:
            return None
        best = min(holding, key=cost)
        if len(usable) >= self.places(devices):
            return best
        fresh = cost(self._fresh(needs, caps, usable))
        return best if cost(best) <= (1 + self.patience(devices)) * fresh else None

    def patience(self, devices: int) -> float:
        """The share by which an entry may cost more than a new one. It grows from `slack` with the requests since the
        last new entry, since new entries for rare requests save little."""
        return self.slack * (1 + self.served.get(devices, 0) / SETTLED)

    def settled(self, devices: int) -> bool:
        """Says whether requests that no entry serves are rare, so that a new entry would hardly be used again."""
        return self.served.get(devices, 0) >= max(3 * SETTLED, self.divided.get(devices, 0) + SETTLED // 2)

    def divide(self, devices: int) -> None:
        """Notes that a request was divided into smaller ones and got no entry. The next request that no entry serves
        gets one if it follows soon, since lengths have then grown for good."""
        self.divided[devices] = self.served.get(devices, 0)

    def begin_anew(self) -> None:
        """Forgets all entries."""
        self.entries, self.served, self.divided, self.coming = {}, {}, {}, []

    def columns(self, devices: int, least: int, most: int, rows: int = 0) -> list[int]:
        """The ascending columns, `least` to `most`, of this number of devices' entries with `rows` rows (0: none)."""
        entries = [sizes for sizes in self.entries.get(devices, []) if sizes.get(GIVEN, 0) == rows]
        return sorted({c for sizes in entries if least <= (c := sizes[BASE]) <= most})

    def full(self, devices: int) -> bool:
        """Says whether another entry for this number of devices would be the last possible entry."""
        return len(self.entries.get(devices, [])) >= self.places(devices) - 1

    def _usable(self, needs: Mapping[str, int], caps: Mapping[str, int], devices: int) -> list[Sizes]:
        """The entries within the caps, with a number of rows if `needs` has one, else without."""
        kind = [sizes for sizes in self.entries.get(devices, []) if (GIVEN in sizes) == (GIVEN in needs)]
        return [sizes for sizes in kind if all(sizes.get(name, 0) <= cap for name, cap in caps.items())]

    def holding(self, needs: Mapping[str, int], caps: Mapping[str, int], devices: int) -> list[Sizes]:
        """The usable entries that are large enough."""
        usable = self._usable(needs, caps, devices)
        return [sizes for sizes in usable if all(n <= sizes.get(name, 0) for name, n in needs.items())]

    def _fresh(self, needs: Mapping[str, int], caps: Mapping[str, int], entries: Sequence[Sizes]) -> Sizes:
        columns = round_up(needs[BASE], caps.get(BASE, 0))
        sizes, cells = {BASE: columns}, _cells({**needs, BASE: columns})
        for name in sorted({name for known in [needs, *entries] for name in known} - {BASE}):
            need, cap = needs.get(name, 0), caps.get(name, 0)
            if name == GIVEN:
                sizes[name] = need
                continue
            if name in FIXED:
                need = max(need, max((known.get(name, 0) for known in entries), default=0))
            else:
                of = (lambda sizes: sizes[BASE]) if name == PER_ROW else _cells
                share = max((known.get(name, 0) / of(known) for known in entries), default=0.0)
                if need > share * cells and name.startswith(COARSE):
                    share = max(2.0 ** math.ceil(math.log2(need / cells)), LEAST)
                need = max(need, math.ceil(share * (columns if name == PER_ROW else cells)))
            need = min(need, columns) if name.startswith("round/") else need
            sizes[name] = round_up(min(need, max(cap, needs.get(name, 0))) if cap else need, cap)
        return sizes

    def state(self) -> dict[str, Any]:
        """The entries as plain JSON, which `load_state` takes."""
        entries = {str(devices): list(map(dict, entries)) for devices, entries in self.entries.items()}
        served = {str(devices): count for devices, count in self.served.items()}
        divided = {str(devices): count for devices, count in self.divided.items()}
        coming = list(map(list, self.coming))
        return {"entries": entries, "served": served, "divided": divided, "step": self.step, "coming": coming}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.entries = {int(devices): _present(entries) for devices, entries in state["entries"].items()}
        # Older checkpoints lack the fields below.
        self.served = {int(devices): count for devices, count in state.get("served", {}).items()}
        self.divided = {int(devices): count for devices, count in state.get("divided", {}).items()}
        self.step = state.get("step", 0)
        coming = state.get("coming", [])
        self.coming = [(devices, dict(sizes), first) for devices, sizes, first in coming if _present([sizes])]


def _present(entries: Sequence[Sizes]) -> list[Sizes]:
    """Copies of the entries, without those for spread sequences that count chunks, not runs, as older versions did."""
    return [dict(sizes) for sizes in entries if GIVEN in sizes or PER_ROW not in sizes]


def _cells(sizes: Mapping[str, int]) -> int:
    """The number of tokens that buffers of these sizes hold on a device."""
    return sizes[BASE] * sizes.get(GIVEN, 1)


def round_up(need: int, cap: int = 0) -> int:
    """`need` rounded up to a multiple of an eighth of the power of two below it, and of 8; at most `cap` (0: no cap). A
    `need` above `cap` is rounded up without a cap."""
    step = max(1 << max(need.bit_length() - 4, 0), 8)
    size = -(-need // step) * step
    return min(size, cap) if cap and need <= cap else size
