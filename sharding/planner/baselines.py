"""The planners that FlexUlysses is compared with: one degree for all, Karmarkar-Karp buckets, longest first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from .limits import Limits, SequenceCost, pose
from .partition import karmarkar_karp
from .plan import PlanError, ShardPlan


def ulysses(
    lengths: Sequence[int] | np.ndarray,
    num_devices: int,
    limits: Limits | None = None,
    *,
    work: Sequence[float] | Sequence[int] | np.ndarray | None = None,
    cost: SequenceCost | None = None,
    degree: int = 8,
) -> ShardPlan:
    """Every sequence on `degree` devices, longest (by work) first to the group with the least.

    Raises PlanError for a degree that devices or heads forbid.
    """
    problem = pose(lengths, num_devices, limits or Limits(), work, cost)
    if degree < 1 or degree & (degree - 1) or degree > problem.max_degree:
        raise PlanError(f"ulysses: degree {degree} must be a power of two, at most {problem.max_degree} here")
    groups = longest_first(problem.work_I, num_devices // degree)
    return problem.plan([degree] * len(groups), [degree * group for group in groups])


def greedy(
    lengths: Sequence[int] | np.ndarray,
    num_devices: int,
    limits: Limits | None = None,
    *,
    work: Sequence[float] | Sequence[int] | np.ndarray | None = None,
    cost: SequenceCost | None = None,
) -> ShardPlan:
    """Nothing sharded: longest (by work) first to the device with the least."""
    problem = pose(lengths, num_devices, limits or Limits(), work, cost)
    return problem.plan([1] * len(problem.lengths_I), longest_first(problem.work_I, num_devices))


def bucketing(
    lengths: Sequence[int] | np.ndarray,
    num_devices: int,
    limits: Limits | None = None,
    *,
    work: Sequence[float] | Sequence[int] | np.ndarray | None = None,
    cost: SequenceCost | None = None,
) -> ShardPlan:
    """Nothing sharded: Karmarkar-Karp differencing over devices of verl's workload `24576 * length + length**2`, which
    stands for the whole of a 7B model rather than for attention. `work` and `cost` only describe the plan."""
    problem = pose(lengths, num_devices, limits or Limits(), work, cost)
    tokens = problem.lengths_I.astype(float)
    return problem.plan([1] * len(tokens), karmarkar_karp(24576 * tokens + tokens**2, num_devices))


def longest_first(work_I: np.ndarray, count: int) -> list[int]:
    """The bin of each item, of `count`: the largest first, each to the bin with the least so far."""
    heap = [(0.0, bin) for bin in range(count)]
    bins = [0] * len(work_I)
    for i in np.argsort(-work_I, kind="stable").tolist():
        load, bin = heap[0]
        bins[i] = bin
        heapq.heapreplace(heap, (load + float(work_I[i]), bin))
    return bins
