"""A placement is a plan in the making. Here are its score, its largest loads, and the blocks that it begins with."""

from __future__ import annotations

import numpy as np

from .blocks import blocks
from .limits import Problem

SPARE = 0.03  # of the memory limit, for the devices within a block to even out
MEMORY = 100.0  # what exceeding the memory limit counts, against compute

Placement = tuple[list[int], list[int]]  # degree and first device of every sequence
Score = tuple[float, float]  # what exceeds the limits of memory and compute (relative to them), then traffic


def dealt(problem: Problem, degree: int) -> list[int]:
    """The block of `degree` devices of each sequence: as even as can be in compute, within the memory limit."""
    amounts = np.array([problem.work_I, problem.lengths_I])
    target = np.array([problem.least_compute or 1.0, max(problem.least_memory, (1 - SPARE) * problem.memory_limit)])
    spare = np.maximum([problem.compute_limit or 1.0, problem.memory_limit] / target - 1, 0.002) / [2, 1]
    work, tokens = (amounts / (target * degree)[:, None]).tolist()
    return blocks(work, tokens, problem.num_devices // degree, spare=(float(spare[0]), float(spare[1])))


def shares(problem: Problem) -> np.ndarray:
    """`[2, sequences]`: work and tokens of each sequence in units of what one device may take."""
    return np.array([problem.work_I / (problem.compute_limit or 1.0), problem.lengths_I / problem.memory_limit])


def weights(problem: Problem) -> list[float]:
    """The traffic of a token at degree 1, 2, 4 and so on."""
    return [problem.weight(2**k) for k in range(problem.max_degree.bit_length())]


def largest(problem: Problem, placement: Placement) -> tuple[float, float]:
    """The largest compute and the most tokens of a device."""
    degrees, firsts = np.array(placement[0]), np.array(placement[1])
    edges = np.zeros((2, problem.num_devices + 1))
    for row, amounts in enumerate((problem.work_I / degrees, problem.lengths_I / degrees)):
        np.add.at(edges[row], firsts, amounts)
        np.add.at(edges[row], firsts + degrees, -amounts)
    compute, memory = np.cumsum(edges, 1).max(1).tolist()
    return compute, memory


def score(problem: Problem, placement: Placement) -> Score:
    """Smaller is better: what exceeds the limits of memory and compute (relative to them), then traffic."""
    compute, memory = largest(problem, placement)
    over = [
        round(max(load / limit - 1, 0.0), 9) if limit else 0.0
        for load, limit in ((memory, problem.memory_limit), (compute, problem.compute_limit))
    ]
    weights_K = np.array(weights(problem))
    return MEMORY * over[0] + over[1], float((problem.lengths_I * weights_K[np.log2(placement[0]).astype(int)]).sum())
