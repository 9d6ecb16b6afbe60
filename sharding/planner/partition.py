"""Deals numbers to bins of nearly equal sums: Karmarkar-Karp differencing, with and without equal sizes, and swaps.

numpy only. A partition is the bin of each item, `[items]` int in `[0, bins)`. All functions are deterministic.
"""

import heapq
from collections.abc import Sequence

import numpy as np

Bins = list[tuple[float, list[int]]]  # (sum, items) of each bin, fullest first


def karmarkar_karp(
    work: Sequence[float] | Sequence[int] | np.ndarray, count: int, *, equal_size: bool = False
) -> list[int]:
    """Deals items to `count` bins by the largest differencing method (Karmarkar and Karp, 1982); returns their bins.

    A partial solution is its bins in decreasing order. The two with the widest spread are joined, the fullest bin of
    one with the emptiest of the other, until one partial solution is left. Empty bins are not stored. With
    `equal_size`, the first partial solutions are `count` items of similar work, one in each bin. Every bin gets one
    item of each, so that bins have equal sizes, or differ by one where `count` does not divide the number of items.
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
    """Improves `bins` by exchanges: the fullest bin gives an item away, for nothing or for another item, if it gets
    emptier and no other bin as full as it was. The best exchange is made as long as there is one. The largest sum never
    grows. `equal_size` allows no gift for nothing, so that bins keep their numbers of items."""
    work_I, bins_I = np.asarray(work, float), np.array(bins, int)
    while True:
        loads = np.bincount(bins_I, work_I, count)
        full = int(loads.argmax())
        inside, outside = np.flatnonzero(bins_I == full), np.flatnonzero(bins_I != full)
        empty_handed = np.arange(0 if equal_size else count)
        partner = np.concatenate([bins_I[outside], empty_handed])  # the item given in return, or nothing
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
