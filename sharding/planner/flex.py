"""FlexUlysses: every sequence its own degree, so that all devices compute alike and little travels.

Objective, lexicographic: tokens of a device within the memory limit and the largest compute load within
`Limits.tolerance` of the smallest possible (where not both can be had, memory counts ten times), then traffic. If a
placement without any sharding reaches the first, it is the plan. Else sequences descend the tree of groups (`descend`)
and pairs of groups exchange what they have (`exchange`): milliseconds, and nearly always good. Only where that plan is
not good, a search (`search`) follows, and the best of all is the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .baselines import longest_first
from .blocks import blocks
from .descend import Descent
from .exchange import Exchange
from .limits import Limits, Problem, problem
from .placement import Placement, dealt, largest, score, weights
from .plan import PlanError, ShardPlan
from .search import redealt, search, top_degree

TRIALS = 64  # pairs of groups that exchange, about 0.1 ms each; more of them where there are few or many devices
TOLERANCES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)  # tried when a cost model can tell which is best
MANY = 128  # devices from which on there are fewer exchanges; above it no repair, and fewer tolerances to choose from
EIGHT, LITTLE = 8, 0.85  # good plans send at most so much of what degree 8 for all would send
EPS = 1e-9


def flex_ulysses(
    lengths: Sequence[int] | np.ndarray,
    num_devices: int,
    limits: Limits | None = None,
    *,
    work: Sequence[float] | Sequence[int] | np.ndarray | None = None,
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
    tolerances = TOLERANCES if num_devices <= MANY else TOLERANCES[4::3]
    plans = [
        _plan(problem(lengths, num_devices, dataclasses.replace(limits, tolerance=tolerance), work, cost), quick=True)
        for tolerance in sorted({limits.tolerance, *tolerances})
    ]
    seconds = [float(cost.step_seconds(plan)) for plan in plans]
    return plans[seconds.index(min(seconds))]


def _plan(made: Problem, *, quick: bool = False) -> ShardPlan:
    """`quick` searches less: for one plan of many."""
    if not len(made.lengths_I):
        return made.plan([], [])
    try:
        degrees, firsts = _unsharded(made, quick) or _sharded(made, quick)
        return made.plan(degrees, firsts)
    except PlanError:
        if made.max_degree == 1 or not made.limits.tokens_per_device:
            raise
    # Memory is short: the most even there is, whole blocks.
    tokens = (made.lengths_I * (made.num_devices / float(made.lengths_I.sum()) / made.max_degree)).tolist()
    own = blocks(tokens, tokens, made.num_devices // made.max_degree)
    return made.plan([made.max_degree] * len(own), [block * made.max_degree for block in own])


def _unsharded(made: Problem, quick: bool) -> Placement | None:
    """A placement without traffic that reaches both limits, if one is easily found."""
    compute, memory = made.compute_limit * (1 + EPS), made.memory_limit * (1 + EPS)
    if made.work_I.max() > compute or made.lengths_I.max() > memory:
        return None
    ways = [lambda: longest_first(made.work_I, made.num_devices), lambda: dealt(made, 1)]
    for bins in ways[: 1 if quick and made.num_devices > MANY else 2]:
        firsts = bins()
        loads = [np.bincount(firsts, amounts, made.num_devices).max() for amounts in (made.work_I, made.lengths_I)]
        if loads[0] <= compute and loads[1] <= memory:
            return [1] * len(firsts), firsts
    return None


def _sharded(made: Problem, quick: bool) -> Placement:
    """The first placement that is good, or else the best of all rungs; of the first rungs only, if `quick`."""
    if made.max_degree == 1:
        ways = (dealt(made, 1), longest_first(made.work_I, made.num_devices), redealt(made, 1))
        return min((([1] * len(own), own) for own in ways), key=lambda placement: score(made, placement))
    found: list[Placement] = []
    for placement in _rungs(made, found, quick):
        if _good(made, placement):
            return placement
        found.append(placement)
    return min(found, key=lambda placement: score(made, placement))


def _rungs(made: Problem, before: list[Placement], quick: bool) -> Iterator[Placement]:
    """Placements, quick ones first. Blocks of the highest degree are rarely better than those of a host."""
    for degree in dict.fromkeys((top_degree(made), made.max_degree)):
        yield _descent(made, degree, dealt(made, degree))
    if not quick:
        aimed = dataclasses.replace(made, compute_limit=_accepted(made))
        yield _descent(aimed, made.max_degree, redealt(aimed, made.max_degree))
        yield from search(aimed, before, lambda placement: _good(made, placement), mend=made.num_devices <= MANY)


def _good(made: Problem, placement: Placement) -> bool:
    """Whether no search is worth its time: loads are accepted, and the traffic is little or can't be."""
    compute, memory = largest(made, placement)
    if compute > _accepted(made) * (1 + EPS) or memory > made.memory_limit * (1 + EPS):
        return False
    shares = np.maximum(made.work_I / (_accepted(made) or 1.0), made.lengths_I / made.memory_limit)
    least = _vectors(made, 2 ** np.ceil(np.log2(np.maximum(shares * (1 - EPS), 1))))  # what each needs by itself
    little = LITTLE * _vectors(made, np.array(EIGHT))
    return made.max_degree < EIGHT or least > little or _vectors(made, np.array(placement[0])) <= little


def _vectors(made: Problem, degrees: np.ndarray) -> float:
    """Tokens sent at these degrees."""
    return float((made.lengths_I * (1 - 1 / degrees)).sum())


def _accepted(made: Problem) -> float:
    """The largest compute load of a good placement."""
    mean = float(made.work_I.sum()) / made.num_devices
    return max(made.least_compute, (1 + made.limits.tolerance) * mean)


def _descent(made: Problem, degree: int, own: list[int]) -> Placement:
    """Every block of `degree` devices by itself, given the block of each sequence, then exchanges between blocks."""
    count = made.num_devices // degree
    amounts = np.array([made.work_I, made.lengths_I])
    # What a block has in all bounds what its devices can reach.
    fullest = np.array([np.bincount(own, row, count).max() for row in amounts]) / degree
    limits = np.array([made.compute_limit or 1.0, made.memory_limit])
    limits = np.maximum(limits, fullest * (1 + made.limits.tolerance / 2, 1))
    work, tokens = (amounts / limits[:, None]).tolist()
    descent = Descent(work, tokens, weights(made))
    for block in range(count):
        descent.place(np.flatnonzero(np.equal(own, block)).tolist(), block * degree, degree, 1.0, 1.0)
    _exchange(made, descent.degrees, descent.firsts)
    return descent.degrees, descent.firsts


def _exchange(made: Problem, degrees: list[int], firsts: list[int]) -> None:
    """Improves a placement in place. No load exceeds its limit for that, or what is the largest already."""
    loads = largest(made, (degrees, firsts))
    work = (made.work_I / max(made.compute_limit, loads[0], 1e-300)).tolist()
    tokens = (made.lengths_I / max(made.memory_limit, loads[1])).tolist()
    trials = max(TRIALS * (1 + (made.num_devices < MANY)), made.num_devices // 2)
    Exchange(work, tokens, weights(made), degrees, firsts, made.num_devices).run(made.max_degree, trials)
