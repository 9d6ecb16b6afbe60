"""A search beyond the quick descent: beams over whole placements, repair of the best of them, then regrouping."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .beam import beam
from .limits import Problem
from .placement import Placement, Score, dealt, score, shares, weights
from .regroup import regrouped
from .repair import repair

# What unevenness counts in a beam, and how much of the limits it aims at, as a little is exceeded at the end. No
# pair is best everywhere.
STARTS = ((0.001, 0.997), (0.1, 0.997), (0.4, 0.997), (1.0, 0.997), (1.0, 0.999), (0.4, 0.999))
WIDTH = 64  # ways that a beam keeps
BLOCK = 64  # devices that are searched together
RUNGS = ((1024, 32), (10240, 64))  # ways times devices of all beams, then rounds of repair of the best two
ALLOWED = (1.0, 1.005, 1.01, 1.02, 1.03, 1.04, 1.06, 1.1, 1.15, 1.2, 1.3, 1.5)  # times the limit of compute
DEALS = 24  # rounds of repair for each of them
EPS = 1e-9


def search(
    problem: Problem, starts: list[Placement], good: Callable[[Placement], bool], *, mend: bool
) -> Iterator[Placement]:
    """Yields ever better placements until the caller finds one good: from `starts`, beams and, with `mend`, repair;
    then more of both; then the longest sequences regrouped."""
    found = list(starts)

    def score_of(placement: Placement) -> Score:
        return score(problem, placement)

    amounts = shares(problem)
    weights_K = weights(problem)[: top_degree(problem).bit_length()]
    for cells, rounds in RUNGS:
        scored = {score_of(placement): placement for placement in [*found, *beams(problem, cells)]}
        found = [scored[key] for key in sorted(scored)]
        yield found[0]
        for k in range(min(2, len(found)) if mend else 0):
            found[k] = repair(amounts, weights_K, found[k], problem.num_devices, score_of, good, rounds)
            yield found[k]
    if placement := regrouped(problem, top_degree(problem)):
        yield placement


def beams(problem: Problem, cells: int) -> list[Placement]:
    """A placement for each of the first entries of `STARTS`. Devices are searched in blocks of at most `BLOCK`, or one
    group, side by side. `cells` bounds the ways times the devices of all of them."""
    top = top_degree(problem)
    units = problem.num_devices // top
    per = max(k for k in range(1, units + 1) if units % k == 0 and (k == 1 or k * top <= BLOCK))
    size, count = per * top, units // per
    block_I = np.array(dealt(problem, size))
    amounts = np.array([problem.work_I, problem.lengths_I])
    fullest = np.array([np.bincount(block_I, row, count).max() for row in amounts]) / size
    members = [np.flatnonzero(block_I == block) for block in range(count)]
    padded = np.zeros((2, count, max(map(len, members))))
    for block, indices in enumerate(members):
        padded[:, block, : len(indices)] = amounts[:, indices]
    starts = STARTS[: max(2, cells // (4 * problem.num_devices))]
    width = max(2, min(WIDTH, cells // (problem.num_devices * len(starts))))
    limits = np.array([problem.compute_limit or 1.0, problem.memory_limit])
    limits_SR = np.maximum([limits * aim for _, aim in starts], fullest)
    work, tokens = np.concatenate([padded / aimed[:, None, None] for aimed in limits_SR], 1)
    weights_K = weights(problem)[: top.bit_length()]
    degree, first = beam(
        work, tokens, np.repeat([even for even, _ in starts], count), np.zeros((len(work), 2, size)), weights_K, width
    )
    placements: list[Placement] = []
    for start in range(0, len(work), count):
        degrees, firsts = np.zeros((2, len(block_I)), int)
        for block, indices in enumerate(members):
            degrees[indices] = degree[start + block, : len(indices)]
            firsts[indices] = block * size + first[start + block, : len(indices)]
        placements.append((degrees.tolist(), firsts.tolist()))
    return placements


def top_degree(problem: Problem) -> int:
    """The highest degree worth looking at first: that of a host, or what the longest sequence needs."""
    need = float(shares(problem).max())
    degree = min(1 << (problem.limits.tau.bit_length() - 1), problem.max_degree)
    while degree < problem.max_degree and degree < need:
        degree *= 2
    return degree


def redealt(problem: Problem, degree: int) -> list[int]:
    """The block of `degree` devices of each sequence, by repair with blocks for devices: slower, and better than
    `dealt`. Where the limit of compute cannot be kept to, ever higher ones are tried."""
    block_I = dealt(problem, degree)
    amounts = shares(problem) / degree
    placement: Placement = ([1] * len(block_I), block_I)
    for allowed in ALLOWED:
        within = amounts / np.array([[allowed], [1.0]])
        count = problem.num_devices // degree

        def excess(tried: Placement, within: np.ndarray = within, count: int = count) -> Score:
            return sum(max(np.bincount(tried[1], row, count).max() - 1 - EPS, 0.0) for row in within), 0.0

        placement = repair(within, [0.0], placement, count, excess, lambda tried: not excess(tried)[0], DEALS)
        if not excess(placement)[0]:
            break
    return placement[1]
