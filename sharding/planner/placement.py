"""A placement is a plan in the making: its score, its largest loads, and the blocks that sequences are dealt to."""

from __future__ import annotations

import numpy as np

from .blocks import blocks
from .limits import Problem

SPARE = 0.03  # of the memory limit, for the devices within a block to even out
MEMORY = 10.0  # what exceeding the memory limit counts, against compute

Placement = tuple[list[int], list[int]]  # degree and first device of every sequence
Score = tuple[float, float]  # what exceeds the limits of memory and compute (relative to them), then traffic


def dealt(made: Problem, degree: int) -> list[int]:
    """The block of `degree` devices of each sequence: as even as can be in compute, within the memory limit."""
    amounts = np.array([made.work_I, made.lengths_I])
    target = np.array([made.least_compute or 1.0, max(made.least_memory, (1 - SPARE) * made.memory_limit)])
    spare = np.maximum([made.compute_limit or 1.0, made.memory_limit] / target - 1, 0.002) / [2, 1]
    work, tokens = (amounts / (target * degree)[:, None]).tolist()
    return blocks(work, tokens, made.num_devices // degree, spare=(float(spare[0]), float(spare[1])))


def weights(made: Problem) -> list[float]:
    """The traffic of a token at degree 1, 2, 4 and so on."""
    return [made.weight(2**k) for k in range(made.max_degree.bit_length())]


def largest(made: Problem, placement: Placement) -> tuple[float, float]:
    """The largest compute and the most tokens of a device."""
    degrees, firsts = np.array(placement[0]), np.array(placement[1])
    edges = np.zeros((2, made.num_devices + 1))
    for row, amounts in enumerate((made.work_I / degrees, made.lengths_I / degrees)):
        np.add.at(edges[row], firsts, amounts)
        np.add.at(edges[row], firsts + degrees, -amounts)
    compute, memory = np.cumsum(edges, 1).max(1).tolist()
    return compute, memory


def score(made: Problem, placement: Placement) -> Score:
    """Smaller is better: what exceeds the limits of memory and compute (relative to them), then traffic."""
    compute, memory = largest(made, placement)
    over = [
        round(max(load / limit - 1, 0.0), 9) if limit else 0.0
        for load, limit in ((memory, made.memory_limit), (compute, made.compute_limit))
    ]
    weights_K = np.array(weights(made))
    return MEMORY * over[0] + over[1], float((made.lengths_I * weights_K[np.log2(placement[0]).astype(int)]).sum())
