"""A search beyond the quick descent: beams over whole placements, then repair of the best of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .beam import beam
from .limits import Problem
from .placement import Placement, Score, dealt, score, weights
from .repair import repair

# What unevenness counts in a beam, and how much of the limits it aims at, as a little is exceeded at the end. No
# pair is best everywhere.
STARTS = ((0.001, 0.997), (0.1, 0.997), (0.4, 0.997), (1.0, 0.997), (1.0, 0.999), (0.4, 0.999))
WIDTH = 64  # ways that a beam keeps
BLOCK = 64  # devices that are searched together
RUNGS = ((1024, 32), (10240, 64))  # ways times devices of all beams, then rounds of repair of the best two
ALLOWED = (1.0, 1.005, 1.01, 1.02, 1.03, 1.04, 1.06)  # times the limit of compute
DEALS = 24  # rounds of repair for each of them
EPS = 1e-9


def search(
    made: Problem, starts: list[Placement], good: Callable[[Placement], bool], *, mend: bool
) -> Iterator[Placement]:
    """Ever better placements, until one is good: from `starts`, beams and, with `mend`, repair; then more of both."""
    found = list(starts)
    amounts = np.array([made.work_I / (made.compute_limit or 1.0), made.lengths_I / made.memory_limit])
    weights_K = weights(made)[: top_degree(made).bit_length()]
    for cells, rounds in RUNGS:
        scored = {score(made, placement): placement for placement in [*found, *beams(made, cells)]}
        found = [scored[key] for key in sorted(scored)]
        yield found[0]
        for k in range(min(2, len(found)) if mend else 0):
            found[k] = repair(
                amounts, weights_K, found[k], made.num_devices, lambda one: score(made, one), good, rounds
            )
            yield found[k]


def beams(made: Problem, cells: int) -> list[Placement]:
    """A placement for each of the first entries of `STARTS`. Devices are searched in blocks of at most `BLOCK`, or one
    group, side by side. `cells` bounds the ways times the devices of all of them."""
    top = top_degree(made)
    units = made.num_devices // top
    per = max(k for k in range(1, units + 1) if units % k == 0 and (k == 1 or k * top <= BLOCK))
    size, count = per * top, units // per
    own = np.array(dealt(made, size))
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
    weights_K = weights(made)[: top.bit_length()]
    degree, first = beam(
        work, tokens, np.repeat([even for even, _ in starts], count), np.zeros((len(work), 2, size)), weights_K, width
    )
    made_of: list[Placement] = []
    for start in range(0, len(work), count):
        degrees, firsts = np.zeros((2, len(own)), int)
        for block, indices in enumerate(members):
            degrees[indices] = degree[start + block, : len(indices)]
            firsts[indices] = block * size + first[start + block, : len(indices)]
        made_of.append((degrees.tolist(), firsts.tolist()))
    return made_of


def top_degree(made: Problem) -> int:
    """The highest degree worth looking at first: that of a host, or what the longest sequence needs."""
    need = max(float(made.work_I.max()) / (made.compute_limit or 1.0), float(made.lengths_I.max()) / made.memory_limit)
    degree = min(1 << (made.limits.tau.bit_length() - 1), made.max_degree)
    while degree < made.max_degree and degree < need:
        degree *= 2
    return degree


def redealt(made: Problem, degree: int) -> list[int]:
    """The block of `degree` devices of each sequence, by repair with blocks for devices: slower, and better than
    `dealt`. Where the limit of compute cannot be kept to, ever higher ones are tried."""
    own = dealt(made, degree)
    amounts = np.array([made.work_I / (made.compute_limit or 1.0), made.lengths_I / made.memory_limit]) / degree
    placement: Placement = ([1] * len(own), own)
    for allowed in ALLOWED:
        within = amounts / np.array([[allowed], [1.0]])
        count = made.num_devices // degree

        def excess(one: Placement, within: np.ndarray = within, count: int = count) -> Score:
            return sum(max(np.bincount(one[1], row, count).max() - 1 - EPS, 0.0) for row in within), 0.0

        placement = repair(within, [0.0], placement, count, excess, lambda one: not excess(one)[0], DEALS)
        if not excess(placement)[0]:
            break
    return placement[1]
