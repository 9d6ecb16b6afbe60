"""Planners of sequences: `ulysses` gives all sequences one degree. FlexUlysses gives each sequence its own degree, so
that all devices compute for equally long and little is sent.

FlexUlysses has two objectives. First, the tokens of a device are within the memory limit, and the largest compute load
is within `Limits.tolerance` of the smallest possible; excess memory weighs a hundred times as much as excess compute.
Second, traffic is little. A placement without any sharding is the plan if it reaches the first objective. Otherwise
sequences descend the tree of device groups; then pairs of groups exchange sequences (`placement`). This takes
milliseconds. If the placement is not good, which is rare, a `search` follows, and the best of all is the plan.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .packing import longest_first
from .placement import Descent, Exchange, blocks, dealt, largest, score
from .plan import Limits, Placement, PlanError, Problem, ShardPlan, pose
from .search import redealt, search, top_degree

TRIALS = 64  # pairs of groups that exchange, about 0.1 ms each; more pairs if devices are few or many
TOLERANCES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)  # tried if a cost model can choose between the plans
MANY = 128  # for more devices, plans are improved less: no doubled `TRIALS`, no `redealt`, fewer tolerances
EIGHT, LITTLE = 8, 0.85  # traffic is little if it is at most LITTLE times the traffic of degree EIGHT for all sequences
EPS = 1e-9


def ulysses(
    lengths: Sequence[int] | np.ndarray,
    num_devices: int,
    limits: Limits | None = None,
    *,
    work: Sequence[float] | Sequence[int] | np.ndarray | None = None,
    degree: int = 8,
) -> ShardPlan:
    """Puts every sequence on `degree` devices: longest (by work) first, each to the group with the least work so far.
    Arguments and errors are those of `flex_ulysses`; a degree that devices or heads forbid is an error, too."""
    problem = pose(lengths, num_devices, limits or Limits(), work)
    if degree < 1 or degree & (degree - 1) or degree > problem.max_degree:
        raise PlanError(f"ulysses: degree {degree} must be a power of two, at most {problem.max_degree} here")
    groups = longest_first(problem.work_I, problem.num_devices // degree)
    return problem.plan([degree] * len(groups), [degree * group for group in groups])


def flex_ulysses(
    lengths: Sequence[int] | np.ndarray,
    num_devices: int,
    limits: Limits | None = None,
    *,
    work: Sequence[float] | Sequence[int] | np.ndarray | None = None,
    cost: Callable[[ShardPlan], float] | None = None,
) -> ShardPlan:
    """The plan for sequences of `lengths` tokens on `num_devices` devices. `work` is the compute of each sequence in
    any unit, `length**2` unless given. With the `cost` of plans, such as `sharding.cost.CostModel.step_seconds`, the
    cheapest of plans for several tolerances is taken. Raises PlanError, naming sequence or field, if there is none."""
    limits = limits or Limits()
    if cost is None:
        return _plan(pose(lengths, num_devices, limits, work))
    tolerances = TOLERANCES if num_devices <= MANY else TOLERANCES[4::3]
    plans = [
        _plan(pose(lengths, num_devices, dataclasses.replace(limits, tolerance=tolerance), work), quick=True)
        for tolerance in sorted({limits.tolerance, *tolerances})
    ]
    return min(plans, key=cost)


def _plan(problem: Problem, *, quick: bool = False) -> ShardPlan:
    """Makes the plan. `quick` searches less, for plans that are compared with each other."""
    if not len(problem.lengths_I):
        return problem.plan([], [])
    try:
        degrees, firsts = _unsharded(problem, quick) or _sharded(problem, quick)
        return problem.plan(degrees, firsts)
    except PlanError:
        if problem.max_degree == 1 or not problem.limits.tokens_per_device:
            raise
    # Memory is short: all sequences get the highest degree, in blocks that are as even as possible.
    tokens = problem.lengths_I * (problem.num_devices / float(problem.lengths_I.sum()) / problem.max_degree)
    block_I = blocks(np.array([tokens, tokens]), problem.num_devices // problem.max_degree, np.array([0.01, 0.03]))
    return problem.plan([problem.max_degree] * len(block_I), [block * problem.max_degree for block in block_I])


def _unsharded(problem: Problem, quick: bool) -> Placement | None:
    """A placement without traffic that meets both limits, or None if no such placement is easily found."""
    compute, memory = problem.compute_limit * (1 + EPS), problem.memory_limit * (1 + EPS)
    if problem.work_I.max() > compute or problem.lengths_I.max() > memory:
        return None
    ways = [lambda: longest_first(problem.work_I, problem.num_devices), lambda: dealt(problem, 1)]
    for bins in ways[: 1 if quick and problem.num_devices > MANY else 2]:
        firsts = bins()
        work, tokens = (
            np.bincount(firsts, row, problem.num_devices).max() for row in (problem.work_I, problem.lengths_I)
        )
        if work <= compute and tokens <= memory:
            return [1] * len(firsts), firsts
    return None


def _sharded(problem: Problem, quick: bool) -> Placement:
    """The first good placement of `_rungs`, or else the best; `quick` leaves out the slow placements."""
    if problem.max_degree == 1:
        ways = (dealt(problem, 1), longest_first(problem.work_I, problem.num_devices), redealt(problem, 1))
        return min((([1] * len(firsts), firsts) for firsts in ways), key=lambda placement: score(problem, placement))
    found: list[Placement] = []
    for placement in _rungs(problem, found, quick):
        if _good(problem, placement):
            return placement
        found.append(placement)
    return min(found, key=lambda placement: score(problem, placement))


def _rungs(problem: Problem, before: list[Placement], quick: bool) -> Iterator[Placement]:
    """Yields placements, the quickest first. Blocks of one host precede those of the highest, rarely better degree."""
    for degree in dict.fromkeys((top_degree(problem), problem.max_degree)):
        yield _descent(problem, degree, dealt(problem, degree))
    if not quick:
        aimed = dataclasses.replace(problem, compute_limit=_accepted(problem))
        yield _descent(aimed, problem.max_degree, redealt(aimed, problem.max_degree))
        yield from search(aimed, before, lambda placement: _good(problem, placement), mend=problem.num_devices <= MANY)


def _good(problem: Problem, placement: Placement) -> bool:
    """Says whether no search is needed: loads are accepted, and traffic is little or the least possible."""
    compute, memory = largest(problem, placement)
    if compute > _accepted(problem) * (1 + EPS) or memory > problem.memory_limit * (1 + EPS):
        return False
    shares = np.maximum(problem.work_I / (_accepted(problem) or 1.0), problem.lengths_I / problem.memory_limit)
    least = _vectors(problem, 2 ** np.ceil(np.log2(np.maximum(shares * (1 - EPS), 1))))  # of the least possible degrees
    little = LITTLE * _vectors(problem, np.array(EIGHT))
    return _vectors(problem, np.array(placement[0])) <= max(little, least) * (1 + EPS)


def _vectors(problem: Problem, degrees: np.ndarray) -> float:
    return float((problem.lengths_I * (1 - 1 / degrees)).sum())


def _accepted(problem: Problem) -> float:
    mean = float(problem.work_I.sum()) / problem.num_devices
    return max(problem.least_compute, (1 + problem.limits.tolerance) * mean)


def _descent(problem: Problem, degree: int, block_I: list[int]) -> Placement:
    """Places the sequences of each block of `degree` devices by descent; then groups exchange sequences."""
    count = problem.num_devices // degree
    amounts = np.array([problem.work_I, problem.lengths_I])
    # The total of a block bounds how even its devices can become.
    fullest = np.array([np.bincount(block_I, row, count).max() for row in amounts]) / degree
    limits = np.array([problem.compute_limit or 1.0, problem.memory_limit])
    limits = np.maximum(limits, fullest * (1 + problem.limits.tolerance / 2, 1))
    descent = Descent(amounts / limits[:, None], problem.weights)
    for block in range(count):
        descent.place(np.flatnonzero(np.equal(block_I, block)).tolist(), block * degree, degree, (1.0, 1.0))
    # No load may exceed its limit, or the largest load so far if that is more.
    degrees, firsts = descent.degrees, descent.firsts
    compute, memory = largest(problem, (degrees, firsts))
    work, tokens = max(problem.compute_limit, compute, 1e-300), max(problem.memory_limit, memory)
    trials = max(TRIALS * (1 + (problem.num_devices < MANY and not problem.few)), problem.num_devices // 2)
    exchange = Exchange(
        np.array([problem.work_I / work, problem.lengths_I / tokens]),
        problem.weights,
        degrees,
        firsts,
        problem.num_devices,
    )
    exchange.run(problem.max_degree, trials)
    return degrees, firsts
