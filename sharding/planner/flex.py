"""FlexUlysses: every sequence its own degree, so that all devices compute alike and little travels.

Objective, lexicographic: tokens of a device within the memory limit, then the largest compute load within
`Limits.tolerance` of the smallest possible, then traffic. If a placement without any sharding reaches the first two, it
is the plan. Else sequences descend the tree of groups (`descend`), pairs of groups exchange what they have
(`exchange`), and FlexRL's own placement (`flexrl`) is taken where it is better.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..plan import PlanError, ShardPlan
from .baselines import karmarkar_karp, longest_first
from .blocks import blocks
from .descend import Descent
from .exchange import Exchange
from .flexrl import place
from .limits import Limits, Problem, problem

TRIALS = 64  # pairs of groups that exchange, about 0.1 ms each; more of them where there are few or many devices
TOLERANCES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # tried when a cost model can tell which is best
SPARE = 0.03  # of the memory limit, for the devices within a block to even out
EPS = 1e-9

Placement = tuple[list[int], list[int]]


def flex_ulysses(
    lengths: Sequence[int] | np.ndarray,
    num_devices: int,
    limits: Limits | None = None,
    *,
    work: Sequence[float] | np.ndarray | None = None,
    cost: Any = None,
) -> ShardPlan:
    """The plan for sequences of so many tokens (`lengths`) on `num_devices` devices.

    `work` is the compute of each sequence in any unit, `length**2` unless given; a `cost` model (`sharding.cost`)
    gives it in seconds, and then of plans for several tolerances the one with the shortest step is taken.
    The same arguments give the same plan. Raises PlanError, naming sequence or field, if there is none.
    """
    limits = limits or Limits()
    if cost is None:
        return _plan(problem(lengths, num_devices, limits, work))
    plans = [
        _plan(problem(lengths, num_devices, dataclasses.replace(limits, tolerance=tolerance), work, cost))
        for tolerance in sorted({limits.tolerance, *TOLERANCES})
    ]
    seconds = [float(cost.step_seconds(plan)) for plan in plans]
    return plans[seconds.index(min(seconds))]


def _plan(made: Problem) -> ShardPlan:
    if not len(made.lengths_I):
        return made.plan([], [])
    try:
        degrees, firsts = _unsharded(made) or _sharded(made)
        return made.plan(degrees, firsts)
    except PlanError:
        if made.max_degree == 1 or not made.limits.tokens_per_device:
            raise
    # Memory is short: the most even there is, whole blocks.
    tokens = (made.lengths_I * (made.num_devices / float(made.lengths_I.sum()) / made.max_degree)).tolist()
    dealt = blocks(tokens, tokens, made.num_devices // made.max_degree)
    firsts = [0] * len(made.lengths_I)
    for block, members in enumerate(dealt):
        for i in members:
            firsts[i] = block * made.max_degree
    return made.plan([made.max_degree] * len(firsts), firsts)


def _unsharded(made: Problem) -> Placement | None:
    """A placement without traffic that reaches both limits, if one is easily found."""
    compute, memory = made.compute_limit * (1 + EPS), made.memory_limit * (1 + EPS)
    if made.work_I.max() > compute or made.lengths_I.max() > memory:
        return None
    for bins in (longest_first, karmarkar_karp):
        firsts = bins(made.work_I, made.num_devices)
        loads = [np.bincount(firsts, amounts, made.num_devices).max() for amounts in (made.work_I, made.lengths_I)]
        if loads[0] <= compute and loads[1] <= memory:
            return [1] * len(firsts), firsts
    return None


def _sharded(made: Problem) -> Placement:
    degree, count = made.max_degree, made.num_devices // made.max_degree
    limits = np.array([made.compute_limit or 1.0, made.memory_limit])
    least = np.array([made.least_compute or 1.0, made.least_memory])
    amounts = np.array([made.work_I, made.lengths_I])
    target = np.array([least[0], max(least[1], (1 - SPARE) * limits[1])])
    spare = np.maximum(limits / target - 1, 0.002) / [2, 1]
    whole_work, whole_tokens = (amounts / (target * degree)[:, None]).tolist()
    dealt = blocks(whole_work, whole_tokens, count, spare=(float(spare[0]), float(spare[1])))
    if degree == 1:
        firsts = [0] * len(made.lengths_I)
        for device, members in enumerate(dealt):
            for i in members:
                firsts[i] = device
        return [1] * len(firsts), firsts
    # What a block has in all bounds what its devices can reach.
    fullest = np.max([amounts[:, members].sum(1) for members in dealt], axis=0) / degree
    limits = np.maximum(limits, fullest * (1 + made.limits.tolerance / 2, 1))
    weights = [made.weight(2**k) for k in range(degree.bit_length())]
    work, tokens = (amounts / limits[:, None]).tolist()
    descent = Descent(work, tokens, weights)
    for block, members in enumerate(dealt):
        descent.place(members, block * degree, degree, 1.0, 1.0)
    trials = max(TRIALS * (1 + (made.num_devices < 128)), made.num_devices // 2)
    Exchange(work, tokens, weights, descent.degrees, descent.firsts, made.num_devices).run(degree, trials)
    ours = descent.degrees, descent.firsts
    theirs = place(made)
    return theirs if _score(made, theirs) < _score(made, ours) else ours


def _score(made: Problem, placement: Placement) -> tuple[float, float, float]:
    """Smaller is better: tokens above the memory limit, compute above its limit (both relative), traffic."""
    degrees, firsts = np.array(placement[0]), np.array(placement[1])
    edges = np.zeros((2, made.num_devices + 1))
    for row, amounts in enumerate((made.lengths_I / degrees, made.work_I / degrees)):
        np.add.at(edges[row], firsts, amounts)
        np.add.at(edges[row], firsts + degrees, -amounts)
    most = np.cumsum(edges, 1).max(1)
    excess = [
        round(max(float(load) / limit - 1, 0.0), 9) if limit else 0.0
        for load, limit in zip(most, (made.memory_limit, made.compute_limit), strict=True)
    ]
    weights = np.array([made.weight(2**k) for k in range(made.max_degree.bit_length())])
    return excess[0], excess[1], float((made.lengths_I * weights[np.log2(degrees).astype(int)]).sum())
