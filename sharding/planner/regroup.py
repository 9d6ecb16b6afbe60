"""Regrouping: the cheapest way to share the longest sequences among a few blocks of devices, over all subsets of them.

Repair moves sequences between two or three blocks at a time. Where loads are tight, a cheaper placement may need all
blocks to change at once; with at most four blocks, every subset of the longest sequences can be priced instead.
"""

from __future__ import annotations

import numpy as np

from .beam import HARD, beam
from .limits import Problem
from .placement import Placement, shares, weights

LONGEST = 16  # most sequences that are shared exactly: 2**16 subsets; shorter ones only follow the beam
BLOCKS = (2, 4)
SUBSETS = 1000  # that are priced; fewer sequences are shared exactly where more subsets fit a block
EVEN, WIDTH = 0.1, 16
EPS = 1e-9


def regrouped(problem: Problem, size: int) -> Placement | None:
    """The placement whose longest sequences send the least in blocks of `size` devices.

    None where there are not 2 or 4 blocks, or no division of the longest sequences among them fits.
    """
    count = problem.num_devices // size
    if count not in BLOCKS:
        return None
    amounts = shares(problem)
    order = np.argsort(-amounts.max(0), kind="stable")
    most = min(LONGEST, len(order)) + 1
    while True:
        most -= 1
        longest, others = order[:most], order[most:]
        sums = np.zeros((2, 1))
        for i in longest:  # bit k of a subset's number stands for longest[k]
            sums = np.concatenate([sums, sums + amounts[:, [i]]], 1)
        # A subset fits a block if the other blocks can hold the rest.
        least = amounts.sum(1) - (count - 1) * size - amounts[:, others].sum(1)
        subsets = np.flatnonzero(((sums <= size + EPS) & (sums >= least[:, None] - EPS)).all(0))
        if len(subsets) <= SUBSETS:
            break
    if not len(subsets):
        return None
    everything = (1 << most) - 1
    weights_K = weights(problem)[: size.bit_length()]
    chosen_KI = (subsets[:, None] >> np.arange(len(longest))) & 1 == 1
    priced = amounts[:, None, longest] * chosen_KI
    held = np.zeros((len(subsets), 2, size))
    degree_KI, first_KI = beam(priced[0], priced[1], np.full(len(subsets), EVEN), held, weights_K, WIDTH)
    device = np.arange(size)
    for k in range(len(longest)):
        share_KD = (first_KI[:, k, None] <= device) & (device < (first_KI + degree_KI)[:, k, None])
        held += (priced[:, :, k] / degree_KI[:, k]).T[:, :, None] * share_KD[:, None]
    traffic_K = (priced[1] * np.array(weights_K)[np.log2(degree_KI).astype(int)]).sum(1)
    cost = np.full(everything + 1, np.inf)
    cost[subsets] = traffic_K + HARD * np.maximum(held.max((1, 2)) - 1 - EPS, 0)
    division = _cheapest(cost, everything, count)
    if division is None:
        return None
    degrees, firsts = np.ones(len(order), int), np.zeros(len(order), int)
    loads = np.zeros((2, problem.num_devices))
    for block, subset in enumerate(division):
        k = int(np.searchsorted(subsets, subset))
        members = chosen_KI[k]
        degrees[longest[members]] = degree_KI[k, members]
        firsts[longest[members]] = first_KI[k, members] + block * size
        loads[:, block * size : (block + 1) * size] = held[k]
    if len(others):
        rest = amounts[:, None, others]
        found = beam(rest[0], rest[1], np.array([EVEN]), loads[None], weights_K, WIDTH)
        degrees[others], firsts[others] = found[0][0], found[1][0]
    return degrees.tolist(), firsts.tolist()


def _cheapest(cost: np.ndarray, everything: int, count: int) -> list[int] | None:
    """The `count` disjoint subsets (2 or 4) that hold everything at the least sum of `cost`, indexed by subset."""
    number = np.arange(everything + 1)
    halves, partner = cost, number
    if count == 4:
        halves, partner = np.full(len(cost), np.inf), np.zeros_like(number)
        subsets = np.flatnonzero(cost < np.inf)
        for subset in subsets:
            other = subsets[(subsets & subset == 0) & (subsets > subset)]
            total = cost[subset] + cost[other]
            union = other | subset
            better = total < halves[union]
            halves[union[better]], partner[union[better]] = total[better], subset
    both = halves + halves[everything - number]
    best = int(both.argmin())
    if both[best] == np.inf:
        return None
    sides = [best, everything - best]
    return sides if count == 2 else [part for side in sides for part in (int(partner[side]), side - int(partner[side]))]
