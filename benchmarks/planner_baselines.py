"""The planners that FlexUlysses is compared with, beside fixed-degree `ulysses`: FlexRL's, verl's, and longest first.

All planners have the same arguments, and are in `PLANNERS` by name. `balance_bound` is a balance that none can beat.
"""

from collections.abc import Callable, Sequence

import numpy as np

from sharding.planner.flex import Limits, flex_ulysses, ulysses
from sharding.planner.packing import karmarkar_karp, longest_first
from sharding.planner.plan import Placement, Problem, ShardPlan, pose

CANDIDATES = 4  # m of FlexRL's FindMergeCandidates: the number of a group's shortest sequences tried for a merge
EPS = 1e-9


def balance_bound(
    lengths: Sequence[int], num_devices: int, limits: Limits, work: Sequence[float] | None = None
) -> float:
    """A bound below the ratio of largest to mean compute load (`ShardPlan.balance`) of every plan under `limits`."""
    problem = pose(lengths, num_devices, limits, work)
    mean = float(problem.work_I.sum()) / num_devices
    return problem.least_compute / mean if mean else 1.0


def planner(place: Callable[[Problem], Placement]) -> Callable[..., ShardPlan]:
    """Makes a planner of `place(problem)`. It has `pose`'s arguments and errors."""

    def plan(
        lengths: Sequence[int] | np.ndarray,
        num_devices: int,
        limits: Limits | None = None,
        *,
        work: Sequence[float] | Sequence[int] | np.ndarray | None = None,
    ) -> ShardPlan:
        problem = pose(lengths, num_devices, limits or Limits(), work)
        return problem.plan(*place(problem))

    plan.__name__, plan.__doc__ = place.__name__, place.__doc__
    return plan


@planner
def greedy(problem: Problem) -> Placement:
    """Shards nothing: longest (by work) first, each to the device with the least work."""
    return [1] * len(problem.lengths_I), longest_first(problem.work_I, problem.num_devices)


@planner
def bucketing(problem: Problem) -> Placement:
    """Shards nothing: Karmarkar-Karp differencing over devices of verl's workload `24576 * length + length**2`, that of
    a complete 7B model rather than of attention. `work` and `cost` only describe the plan."""
    tokens = problem.lengths_I.astype(float)
    return [1] * len(tokens), karmarkar_karp(24576 * tokens + tokens**2, problem.num_devices)


@planner
def flexrl(problem: Problem) -> Placement:
    """FlexRL's own placement, Algorithms 2 and 3 of its Appendix A, as published: baseline split and place, then merges
    from the highest degree down, then the short items anew.

    The paper leaves some choices open; ours are: GetSPSize is the smallest degree whose share fits the mean tokens of a
    device; m of FindMergeCandidates is 4; TwoWayPack gives the longest first to the side with fewer tokens; a merge is
    feasible if no device exceeds the memory threshold; the load of ShortItemReorder is the compute load C_d; the
    highest degree is that of the limits.
    """
    state = _FlexRL(problem)
    state.split_and_place()
    degree = problem.max_degree
    while degree > 1:
        groups = range(problem.num_devices // degree)
        candidates = {group: c for group in groups if (c := state.candidate(degree, group))}
        while candidates:
            group = min(candidates, key=lambda g: (candidates[g][0], g))
            _, *sides = candidates.pop(group)
            for k, side in enumerate(sides):  # ExecuteMerge
                for i in side:
                    state.take(i)
                    state.put(i, degree // 2, degree * group + k * degree // 2)
            # A merge changes no other group of this degree.
            if again := state.candidate(degree, group):
                candidates[group] = again
        degree //= 2
    state.reorder_short()
    return state.degrees, state.firsts


class _FlexRL:
    """The tokens of each device and the place of every sequence, while `flexrl` moves them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.lengths = problem.lengths_I.tolist()
        self.mean = sum(self.lengths) / problem.num_devices
        self.most = problem.limits.alpha * self.mean + EPS
        self.tokens = np.zeros(problem.num_devices)
        self.degrees, self.firsts = [1] * len(self.lengths), [0] * len(self.lengths)
        self.down = sorted(range(len(self.lengths)), key=lambda i: (-self.lengths[i], i))

    def put(self, i: int, degree: int, first: int) -> None:
        self.degrees[i], self.firsts[i] = degree, first
        self.tokens[first : first + degree] += self.lengths[i] / degree

    def take(self, i: int) -> None:
        first, degree = self.firsts[i], self.degrees[i]
        self.tokens[first : first + degree] -= self.lengths[i] / degree

    def split_and_place(self) -> None:
        """BaselineSplitPlace: the lowest degree with a group that has room, and its group with the most room."""
        for i in self.down:
            degree = 1
            while degree < self.problem.max_degree and self.lengths[i] / degree > self.mean:
                degree *= 2
            while True:
                groups = self.tokens.reshape(-1, degree)
                fits = groups.max(1) + self.lengths[i] / degree <= self.most
                if fits.any() or degree == self.problem.max_degree:
                    break
                degree *= 2
            fullness = groups.sum(1)
            best = np.where(fits, fullness, np.inf) if fits.any() else fullness
            self.put(i, degree, degree * int(best.argmin()))

    def candidate(self, degree: int, group: int) -> tuple[float, list[int], list[int]] | None:
        """FindMergeCandidates for one group: the cheapest way for some of its sequences to move to its two halves."""
        first, half = degree * group, degree // 2
        here = [i for i in reversed(self.down) if self.degrees[i] == degree and self.firsts[i] == first]
        best: tuple[float, list[int], list[int]] | None = None
        for count in range(2, min(CANDIDATES, len(here)) + 1):
            sides, loads = ([], []), [0.0, 0.0]
            for i in reversed(here[:count]):
                side = int(loads[1] < loads[0])
                sides[side].append(i)
                loads[side] += self.lengths[i]
            whole = sum(loads) / degree
            parts = [self.tokens[first + k * half : first + (k + 1) * half].max() for k in (0, 1)]
            if all(part - whole + load / half <= self.most for part, load in zip(parts, loads, strict=True)):
                change = sum(self._split_cost(i, half) - self._split_cost(i, degree) for i in here[:count])
                if best is None or change < best[0]:
                    best = (change, *sides)
        return best

    def reorder_short(self) -> None:
        """ShortItemReorder: sequences of degree 1 or 2 become unsharded, each on the device with the least compute."""
        short = [i for i in self.down if self.degrees[i] <= 2]
        for i in short:
            self.take(i)
        compute = np.zeros(len(self.tokens))
        for i in self.down:
            if self.degrees[i] > 2:
                compute[self.firsts[i] : self.firsts[i] + self.degrees[i]] += self.problem.work_I[i] / self.degrees[i]
        for i in short:
            fits = self.tokens + self.lengths[i] <= self.most
            device = int(np.where(fits, compute, np.inf).argmin()) if fits.any() else int(self.tokens.argmin())
            self.put(i, 1, device)
            compute[device] += self.problem.work_I[i]

    def _split_cost(self, i: int, degree: int) -> float:
        return self.lengths[i] * self.problem.weights[degree.bit_length() - 1] / degree


PLANNERS: dict[str, Callable[..., ShardPlan]] = {
    planner.__name__: planner for planner in (flex_ulysses, flexrl, ulysses, bucketing, greedy)
}
