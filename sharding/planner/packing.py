"""LB-Mini deals sequences to devices and microbatches, so that devices wait little for each other (ODC paper).

Below stand the ways to deal numbers to bins of nearly equal sums: Karmarkar-Karp differencing, with and without equal
sizes, longest first, and swaps. A partition is the bin of each item, `[items]` int in `[0, bins)`.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from .plan import PlanError

Microbatches = list[list[int]]  # the sequences of each microbatch of one device
Bins = list[tuple[float, list[int]]]  # (sum, items) of each bin, fullest first


def lb_mini(lengths_I: np.ndarray, work_I: np.ndarray, num_devices: int, room: int = 0) -> list[Microbatches]:
    """Returns the microbatches of each device. Work is even over the whole minibatch (section 4, C.1); devices may have
    different numbers of sequences and microbatches, even none.

    `lengths_I` are the tokens and `work_I` (f64) the work of each sequence; a microbatch holds at most `room` tokens,
    0 for no bound. The best of three deals is taken, each improved by exchanges. Then each device packs its share into
    the fewest microbatches that fit. Raises PlanError for a sequence that no microbatch holds.
    """
    if room and lengths_I.max(initial=0) > room:
        worst = int(lengths_I.argmax())
        raise PlanError(
            f"sequence {worst} has {lengths_I[worst]} tokens, but a microbatch holds at most {room}: raise "
            "this limit, shorten the sequence, or use a strategy that spreads sequences over devices"
        )
    starts = karmarkar_karp(work_I, num_devices), longest_first(work_I, num_devices), as_many_each(work_I, num_devices)
    dealt = [swapped(work_I, bins, num_devices) for bins in starts]
    bins = min(dealt, key=lambda bins: np.bincount(bins, work_I, num_devices).max(initial=0.0))
    devices = []
    for share in shares_of(bins, num_devices):
        count = fewest(lengths_I, share, room)
        while (microbatches := packed(lengths_I, work_I, share, count, room, by=(lengths_I, work_I))) is None:
            count += 1
        devices.append(microbatches)
    return devices


def busiest(devices: Sequence[Microbatches], work_I: np.ndarray) -> float:
    """The work of the device that has the most work, in the unit of `work_I`."""
    work = work_I.tolist()
    table = np.zeros((len(devices), max(map(len, devices), default=0)))
    for device, microbatches in enumerate(devices):
        table[device, : len(microbatches)] = [sum(work[i] for i in members) for members in microbatches]
    return float(table.sum(axis=1).max(initial=0.0))


def as_many_each(work_I: np.ndarray, num_devices: int) -> list[int]:
    """The device of each sequence: even in work, with numbers of sequences that differ by one at most."""
    bins = karmarkar_karp(work_I, num_devices, equal_size=True)
    return swapped(work_I, bins, num_devices, equal_size=True)


def shares_of(bins: Sequence[int], count: int) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(count)]
    for i, bin in enumerate(bins):
        shares[bin].append(i)
    return shares


def fewest(lengths_I: np.ndarray, share: list[int], room: int) -> int:
    """A lower bound of the number of microbatches that hold a device's share."""
    return -(-int(lengths_I[share].sum()) // room) if room and share else min(len(share), 1)


def packed(
    lengths_I: np.ndarray, work_I: np.ndarray, share: list[int], count: int, room: int, by: Sequence[np.ndarray]
) -> Microbatches | None:
    """Packs a share into `count` microbatches, heaviest first, even in the first of the amounts `by` in which all of
    them fit. Returns None if they fit in none."""

    def order(members: list[int]) -> tuple[float, list[int]]:
        return -float(work_I[members].sum()) if members else 0.0, members

    for amounts in by:
        bins = shares_of(karmarkar_karp(amounts[share], count), count) if share else [[]] * count
        microbatches = [[share[k] for k in bin] for bin in bins]
        if not room or all(lengths_I[members].sum() <= room for members in microbatches if members):
            return sorted(microbatches, key=order)
    return None


def karmarkar_karp(
    work: Sequence[float] | Sequence[int] | np.ndarray, count: int, *, equal_size: bool = False
) -> list[int]:
    """Deals items to `count` bins by the largest differencing method (Karmarkar and Karp, 1982); returns their bins.

    A partial solution is its bins in decreasing order. The two solutions with the widest spread are joined, the fullest
    bin of one with the emptiest bin of the other, until one solution is left. A first solution is one item; its empty
    bins are not stored. With `equal_size`, a first solution is `count` items of similar work, one in each bin. So bins
    have equal sizes, or differ by one item if `count` does not divide the number of items.
    """
    amounts = np.asarray(work, float)
    if equal_size:
        order = np.argsort(-amounts, kind="stable").tolist()
        dealt = [[(float(amounts[i]), [i]) for i in order[at : at + count]] for at in range(0, len(order), count)]
        starts: list[Bins] = [bins + [(0.0, [])] * (count - len(bins)) for bins in dealt]
    else:
        starts = [[(amount, [i])] for i, amount in enumerate(amounts.tolist())]
    heap = [(-_spread(bins, count), number, bins) for number, bins in enumerate(starts)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        overlap = max(len(left) + len(right) - count, 0)
        alone = len(right) - overlap  # bins of `right` that meet an empty bin
        meet = [
            (load + more, items + added)
            for (load, items), (more, added) in zip(left[len(left) - overlap :], reversed(right[alone:]), strict=True)
        ]
        joined = sorted(left[: len(left) - overlap] + right[:alone] + meet, key=lambda bin: -bin[0])
        heapq.heappush(heap, (-_spread(joined, count), number, joined))
        number += 1
    bins = [0] * len(amounts)
    for bin, (_, items) in enumerate(heap[0][2] if heap else []):
        for i in items:
            bins[i] = bin
    return bins


def longest_first(work_I: np.ndarray, count: int) -> list[int]:
    """Deals items to `count` bins, the largest first, each to the bin with the least so far; returns their bins."""
    heap = [(0.0, bin) for bin in range(count)]
    bins = [0] * len(work_I)
    for i in np.argsort(-work_I, kind="stable").tolist():
        load, bin = heap[0]
        bins[i] = bin
        heapq.heapreplace(heap, (load + float(work_I[i]), bin))
    return bins


def swapped(
    work: Sequence[float] | Sequence[int] | np.ndarray, bins: Sequence[int], count: int, *, equal_size: bool = False
) -> list[int]:
    """Improves `bins` by exchanges, the best one first, until none helps. The fullest bin gives an item away, for
    nothing or (always with `equal_size`) for another one, if both bins are then emptier than the fullest bin was."""
    work_I, bins_I = np.asarray(work, float), np.array(bins, int)
    while True:
        loads = np.bincount(bins_I, work_I, count)
        full = int(loads.argmax())
        inside, outside = np.flatnonzero(bins_I == full), np.flatnonzero(bins_I != full)
        empty_handed = np.arange(0 if equal_size else count)
        partner = np.concatenate([bins_I[outside], empty_handed])  # the bin that gives an item, or nothing, in return
        if not len(inside) or not len(partner):
            return bins_I.tolist()
        given = work_I[inside][:, None] - np.concatenate([work_I[outside], np.zeros(len(empty_handed))])[None]
        fuller = np.maximum(loads[full] - given, loads[partner][None] + given)
        fuller[:, partner == full] = np.inf
        item, column = np.unravel_index(int(fuller.argmin()), fuller.shape)
        if not fuller[item, column] < loads[full] * (1 - 1e-12):
            return bins_I.tolist()
        bins_I[inside[item]] = partner[column]
        if column < len(outside):
            bins_I[outside[column]] = full


def _spread(bins: Bins, count: int) -> float:
    return bins[0][0] - (bins[-1][0] if len(bins) == count else 0.0)
