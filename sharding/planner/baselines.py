"""What FlexUlysses is compared with: one degree for all, Karmarkar-Karp buckets, longest first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..plan import PlanError, ShardPlan
from .limits import Limits, problem


def ulysses(
    lengths: Sequence[int] | np.ndarray,
    num_devices: int,
    limits: Limits | None = None,
    *,
    work: Sequence[float] | Sequence[int] | np.ndarray | None = None,
    cost: Any = None,
    degree: int = 8,
) -> ShardPlan:
    """Every sequence on `degree` devices, longest (by work) first to the group with the least.

    Raises PlanError for a degree that devices or heads forbid.
    """
    made = problem(lengths, num_devices, limits or Limits(), work, cost)
    if degree < 1 or degree & (degree - 1) or degree > made.max_degree:
        raise PlanError(f"ulysses: degree {degree} must be a power of two, at most {made.max_degree} here")
    groups = longest_first(made.work_I, num_devices // degree)
    return made.plan([degree] * len(groups), [degree * group for group in groups])


def greedy(
    lengths: Sequence[int] | np.ndarray,
    num_devices: int,
    limits: Limits | None = None,
    *,
    work: Sequence[float] | Sequence[int] | np.ndarray | None = None,
    cost: Any = None,
) -> ShardPlan:
    """Nothing sharded: longest (by work) first to the device with the least."""
    made = problem(lengths, num_devices, limits or Limits(), work, cost)
    return made.plan([1] * len(made.lengths_I), longest_first(made.work_I, num_devices))


def bucketing(
    lengths: Sequence[int] | np.ndarray,
    num_devices: int,
    limits: Limits | None = None,
    *,
    work: Sequence[float] | Sequence[int] | np.ndarray | None = None,
    cost: Any = None,
) -> ShardPlan:
    """Nothing sharded: Karmarkar-Karp differencing over devices of verl's workload `24576 * length + length**2`, which
    stands for the whole of a 7B model rather than for attention. `work` and `cost` only describe the plan."""
    made = problem(lengths, num_devices, limits or Limits(), work, cost)
    tokens = made.lengths_I.astype(float)
    return made.plan([1] * len(tokens), karmarkar_karp(24576 * tokens + tokens**2, num_devices))


def longest_first(work_I: np.ndarray, count: int) -> list[int]:
    """The bin of each item, of `count`: the largest first, each to the bin with the least so far."""
    heap = [(0.0, bin) for bin in range(count)]
    bins = [0] * len(work_I)
    for i in np.argsort(-work_I, kind="stable").tolist():
        load, bin = heap[0]
        bins[i] = bin
        heapq.heapreplace(heap, (load + float(work_I[i]), bin))
    return bins


def karmarkar_karp(work: Sequence[float] | np.ndarray, count: int) -> list[int]:
    """The bin of each item, of `count`, by the largest differencing method.

    A partial solution is its bins in decreasing order. The two with the widest spread are joined, the fullest of one
    with the emptiest of the other, until one is left. Empty bins are not stored.
    """
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for i, amount in enumerate(np.asarray(work, float).tolist()):
        heap.append((-amount if count > 1 else 0.0, i, [(amount, [i])]))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        overlap = max(len(one) + len(other) - count, 0)
        alone = len(other) - overlap  # bins of `other` that meet an empty one
        meet = [
            (load + more, items + others)
            for (load, items), (more, others) in zip(one[len(one) - overlap :], reversed(other[alone:]), strict=True)
        ]
        joined = sorted(one[: len(one) - overlap] + other[:alone] + meet, key=lambda bin: -bin[0])
        least = joined[-1][0] if len(joined) == count else 0.0
        heapq.heappush(heap, (least - joined[0][0], number, joined))
        number += 1
    bins = [0] * len(work)
    for bin, (_, items) in enumerate(heap[0][2] if heap else []):
        for i in items:
            bins[i] = bin
    return bins
