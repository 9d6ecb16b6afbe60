"""FlexUlysses: every sequence its own degree, so that all devices compute alike and little travels.

Objective, lexicographic: tokens of a device within the memory limit and the largest compute load within
`Limits.tolerance` of the smallest possible (where not both can be had, memory counts ten times), then traffic. If a
placement without any sharding reaches the first, it is the plan. Else sequences descend the tree of groups (`descend`),
pairs of groups exchange what they have (`exchange`). Beside that, the best ways to place one sequence after the other
are searched (`beam`), and what then exceeds a limit by a little is mended (`repair`). The best of all is the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..plan import PlanError, ShardPlan
from .baselines import longest_first
from .beam import beam
from .blocks import blocks
from .descend import Descent
from .exchange import Exchange
from .limits import Limits, Problem, problem
from .repair import repair

TRIALS = 64  # pairs of groups that exchange, about 0.1 ms each; more of them where there are few or many devices
TOLERANCES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)  # tried when a cost model can tell which is best
SPARE = 0.03  # of the memory limit, for the devices within a block to even out
MANY = 64  # devices from which on there is time for one start only
# What unevenness counts in a beam, and how much of the limits it aims at, as a little is exceeded at the end. No
# pair is best everywhere.
STARTS = (
    (0.001, 0.997),
    (0.1, 0.997),
    (0.4, 0.997),
    (1.0, 0.997),
    (0.05, 0.997),
    (0.2, 0.997),
    (1.0, 0.999),
    (0.4, 0.999),
)
WIDTH = 64  # ways that a beam keeps
BLOCK = 64  # devices that are searched together
CELLS = 10240  # ways times devices of all beams: less of both where there are many devices
REPAIRED = 128  # devices up to which placements are mended
MEMORY = 10.0  # what exceeding the memory limit counts, against compute
EPS = 1e-9

Placement = tuple[list[int], list[int]]


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
    tolerances = TOLERANCES if num_devices <= REPAIRED else TOLERANCES[2::2]
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
        degrees, firsts = _unsharded(made) or _sharded(made, quick)
        return made.plan(degrees, firsts)
    except PlanError:
        if made.max_degree == 1 or not made.limits.tokens_per_device:
            raise
    # Memory is short: the most even there is, whole blocks.
    tokens = (made.lengths_I * (made.num_devices / float(made.lengths_I.sum()) / made.max_degree)).tolist()
    own = blocks(tokens, tokens, made.num_devices // made.max_degree)
    return made.plan([made.max_degree] * len(own), [block * made.max_degree for block in own])


def _unsharded(made: Problem) -> Placement | None:
    """A placement without traffic that reaches both limits, if one is easily found."""
    compute, memory = made.compute_limit * (1 + EPS), made.memory_limit * (1 + EPS)
    if made.work_I.max() > compute or made.lengths_I.max() > memory:
        return None
    for bins in (lambda: longest_first(made.work_I, made.num_devices), lambda: _blocks(made, 1)):
        firsts = bins()
        loads = [np.bincount(firsts, amounts, made.num_devices).max() for amounts in (made.work_I, made.lengths_I)]
        if loads[0] <= compute and loads[1] <= memory:
            return [1] * len(firsts), firsts
    return None


def _blocks(made: Problem, degree: int) -> list[int]:
    """The block of `degree` devices of each sequence: as even as can be in compute, within the memory limit."""
    amounts = np.array([made.work_I, made.lengths_I])
    target = np.array([made.least_compute or 1.0, max(made.least_memory, (1 - SPARE) * made.memory_limit)])
    spare = np.maximum([made.compute_limit or 1.0, made.memory_limit] / target - 1, 0.002) / [2, 1]
    work, tokens = (amounts / (target * degree)[:, None]).tolist()
    return blocks(work, tokens, made.num_devices // degree, spare=(float(spare[0]), float(spare[1])))


def _sharded(made: Problem, quick: bool) -> Placement:
    if made.max_degree == 1:
        own = _blocks(made, 1)
        return [1] * len(own), own
    if quick and made.num_devices > REPAIRED:
        return min(_beams(made, CELLS // 2), key=lambda placement: _score(made, placement))
    # Blocks may be of the highest degree or, as groups beyond a host are dear, of a host: neither is always better.
    host = min(1 << (made.limits.tau.bit_length() - 1), made.max_degree)
    tops = {made.max_degree} if made.num_devices >= MANY else {made.max_degree, host}
    starts = [_descent(made, degree) for degree in sorted(tops)]
    for degrees, firsts in starts:
        _exchange(made, degrees, firsts)
    if quick:
        return min([*starts, *_beams(made, CELLS // 16)], key=lambda placement: _score(made, placement))
    return _repaired(made, [*starts, *_beams(made, CELLS)])


def _beams(made: Problem, cells: int) -> list[Placement]:
    """A placement for each of the first entries of `STARTS`. Devices are searched in blocks of at most `BLOCK`, or one
    group, side by side. `cells` bounds the ways times the devices of all of them."""
    top = _top(made)
    units = made.num_devices // top
    per = max(k for k in range(1, units + 1) if units % k == 0 and (k == 1 or k * top <= BLOCK))
    size, count = per * top, units // per
    own = np.array(_blocks(made, size))
    amounts = np.array([made.work_I, made.lengths_I])
    fullest = np.array([np.bincount(own, row, count).max() for row in amounts]) / size
    members = [np.flatnonzero(own == block) for block in range(count)]
    padded = np.zeros((2, count, max(map(len, members))))
    for block, indices in enumerate(members):
        padded[:, block, : len(indices)] = amounts[:, indices]
    starts = STARTS[: max(2, cells // (4 * made.num_devices))]
    width = max(2, min(WIDTH, cells // (made.num_devices * len(starts))))
    limits = np.array([made.compute_limit or 1.0, made.memory_limit])
    limits_SR = np.maximum([limits * aim for _, aim in starts], fullest)
    work, tokens = np.concatenate([padded / aimed[:, None, None] for aimed in limits_SR], 1)
    weights = _weights(made)[: top.bit_length()]
    degree, first = beam(
        work, tokens, np.repeat([even for even, _ in starts], count), np.zeros((len(work), 2, size)), weights, width
    )
    made_of: list[Placement] = []
    for start in range(0, len(work), count):
        degrees, firsts = np.zeros((2, len(own)), int)
        for block, indices in enumerate(members):
            degrees[indices] = degree[start + block, : len(indices)]
            firsts[indices] = block * size + first[start + block, : len(indices)]
        made_of.append((degrees.tolist(), firsts.tolist()))
    return made_of


def _top(made: Problem) -> int:
    """The highest degree that a beam looks at: that of a host, or what the longest sequence needs."""
    need = max(float(made.work_I.max()) / (made.compute_limit or 1.0), float(made.lengths_I.max()) / made.memory_limit)
    degree = min(1 << (made.limits.tau.bit_length() - 1), made.max_degree)
    while degree < made.max_degree and degree < need:
        degree *= 2
    return degree


def _repaired(made: Problem, starts: list[Placement]) -> Placement:
    """The best of them, polished, or one that exceeds a limit by a little and is better once that is mended."""
    scored = sorted(((_score(made, placement), placement) for placement in starts), key=lambda pair: pair[0])
    if made.num_devices > REPAIRED:
        return scored[0][1]
    wanting = [start for start in scored if start[0][0] and (scored[0][0][0] or start[0][1] < scored[0][0][1])]
    amounts = np.array([made.work_I / (made.compute_limit or 1.0), made.lengths_I / made.memory_limit])
    for _, placement in [scored[0], *(start for start in wanting[:2] if start is not scored[0])]:
        mended = repair(amounts, _weights(made), placement, made.num_devices, lambda found: _score(made, found))
        scored.append((_score(made, mended), mended))
    return min(scored, key=lambda pair: pair[0])[1]


def _descent(made: Problem, degree: int) -> Placement:
    """Every block of `degree` devices by itself."""
    own, count = _blocks(made, degree), made.num_devices // degree
    amounts = np.array([made.work_I, made.lengths_I])
    # What a block has in all bounds what its devices can reach.
    fullest = np.array([np.bincount(own, row, count).max() for row in amounts]) / degree
    limits = np.array([made.compute_limit or 1.0, made.memory_limit])
    limits = np.maximum(limits, fullest * (1 + made.limits.tolerance / 2, 1))
    work, tokens = (amounts / limits[:, None]).tolist()
    descent = Descent(work, tokens, _weights(made))
    for block in range(count):
        descent.place(np.flatnonzero(np.equal(own, block)).tolist(), block * degree, degree, 1.0, 1.0)
    return descent.degrees, descent.firsts


def _exchange(made: Problem, degrees: list[int], firsts: list[int]) -> None:
    """Improves a placement in place. No load exceeds its limit for that, or what is the largest already."""
    loads = _largest(made, (degrees, firsts))
    work = (made.work_I / max(made.compute_limit, loads[0], 1e-300)).tolist()
    tokens = (made.lengths_I / max(made.memory_limit, loads[1])).tolist()
    trials = max(TRIALS * (1 + (made.num_devices < 2 * MANY)), made.num_devices // 2)
    Exchange(work, tokens, _weights(made), degrees, firsts, made.num_devices).run(made.max_degree, trials)


def _weights(made: Problem) -> list[float]:
    return [made.weight(2**k) for k in range(made.max_degree.bit_length())]


def _largest(made: Problem, placement: Placement) -> tuple[float, float]:
    """The largest compute and the most tokens of a device."""
    degrees, firsts = np.array(placement[0]), np.array(placement[1])
    edges = np.zeros((2, made.num_devices + 1))
    for row, amounts in enumerate((made.work_I / degrees, made.lengths_I / degrees)):
        np.add.at(edges[row], firsts, amounts)
        np.add.at(edges[row], firsts + degrees, -amounts)
    compute, memory = np.cumsum(edges, 1).max(1).tolist()
    return compute, memory


def _score(made: Problem, placement: Placement) -> tuple[float, float]:
    """Smaller is better: what exceeds the limits of memory and compute (relative to them), then traffic."""
    compute, memory = _largest(made, placement)
    over = [
        round(max(load / limit - 1, 0.0), 9) if limit else 0.0
        for load, limit in ((memory, made.memory_limit), (compute, made.compute_limit))
    ]
    weights = np.array(_weights(made))
    return MEMORY * over[0] + over[1], float((made.lengths_I * weights[np.log2(placement[0]).astype(int)]).sum())
