"""A placement is a plan in the making. Here are its score, its largest loads, and its first blocks."""

import numpy as np

from .descend import HARD, halves
from .plan import Placement, Problem, over_devices

SPARE = 0.03  # share of the memory limit left free, so that the devices within a block can even out
MEMORY = 100.0  # the weight of exceeding the memory limit, against compute
GOOD = 0.25  # the pressure below which no block is dealt anew
NEIGHBOURS = 6  # emptiest blocks with which the fullest one deals anew

Score = tuple[float, float]  # excess over the limits of memory and compute (relative to them), then traffic


def dealt(problem: Problem, degree: int) -> list[int]:
    """The block of `degree` devices of each sequence: as even as possible in compute, within the memory limit."""
    amounts = np.array([problem.work_I, problem.lengths_I])
    target = np.array([problem.least_compute or 1.0, max(problem.least_memory, (1 - SPARE) * problem.memory_limit)])
    spare = np.maximum([problem.compute_limit or 1.0, problem.memory_limit] / target - 1, 0.002) / [2, 1]
    return blocks(amounts / (target * degree)[:, None], problem.num_devices // degree, spare)


def blocks(amounts: np.ndarray, count: int, room: np.ndarray) -> list[int]:
    """The block, out of `count`, of each sequence: as even as possible in compute and memory at once.

    `amounts`, `[2, sequences]`, are work and tokens in units of what one block should take; `room`, `[2]`, is the spare
    part of these units. The longest sequence goes first, to the least loaded block. The pressure of a block is its
    excess over 1, divided by `room`. Then the block with the most pressure and another one deal anew, as long as that
    helps.
    """
    if count == 1:
        return [0] * amounts.shape[1]
    loads = np.zeros((count, 2))
    members: list[list[int]] = [[] for _ in range(count)]
    work, tokens = amounts.tolist()
    amounts_I2 = amounts.T

    def pressure_of(loads: np.ndarray) -> np.ndarray:
        over = (loads - 1) / room
        return over.max(1) + HARD * np.maximum(over[:, 1] - 1, 0.0)

    for i in np.argsort(-amounts.max(0), kind="stable").tolist():
        # The larger of both loads afterwards counts, then their sum.
        after = loads + amounts_I2[i]
        over = HARD * np.maximum(after[:, 1] - (1 + room[1]), 0.0)
        best = int((after.max(1) + 0.1 * loads.sum(1) + over).argmin())
        members[best].append(i)
        loads[best] += amounts_I2[i]
    for _ in range(3 * count):
        pressure = pressure_of(loads)
        fullest = int(pressure.argmax())
        if pressure[fullest] <= GOOD:
            break
        resource = int(((loads[fullest] - 1) / room).argmax())
        for partner in np.argsort(loads[:, resource], kind="stable")[:NEIGHBOURS].tolist():
            if partner == fullest:
                continue
            left = 2 * (1 + room) - loads[fullest] - loads[partner]
            pooled = sorted(members[fullest] + members[partner])
            _, *sides = halves(pooled, work, tokens, *np.maximum(left, room / 4).tolist())
            new = np.array([amounts_I2[side].sum(0) for side in sides])
            if pressure_of(new).max() < max(pressure[fullest], pressure[partner]) - 1e-6:
                for block, load, side in zip((fullest, partner), new, sides, strict=True):
                    members[block], loads[block] = side, load
                break
        else:
            break
    answer = [0] * amounts.shape[1]
    for block, inside in enumerate(members):
        for i in inside:
            answer[i] = block
    return answer


def shares(problem: Problem) -> np.ndarray:
    """`[2, sequences]`: work and tokens of each sequence in units of one device's limit."""
    return np.array([problem.work_I / (problem.compute_limit or 1.0), problem.lengths_I / problem.memory_limit])


def weights(problem: Problem) -> list[float]:
    """The traffic of a token at degree 1, 2, 4 and so on."""
    return [problem.weight(2**k) for k in range(problem.max_degree.bit_length())]


def largest(problem: Problem, placement: Placement) -> tuple[float, float]:
    """The largest compute and the most tokens of a device."""
    degrees, firsts = map(np.array, placement)
    amounts = problem.work_I / degrees, problem.lengths_I / degrees
    compute, memory = (over_devices(share, degrees, firsts, problem.num_devices).max() for share in amounts)
    return float(compute), float(memory)


def score(problem: Problem, placement: Placement) -> Score:
    """A placement's excess over the limits of memory and compute (relative to them), then its traffic."""
    compute, memory = largest(problem, placement)
    over = [
        round(max(load / limit - 1, 0.0), 9) if limit else 0.0
        for load, limit in ((memory, problem.memory_limit), (compute, problem.compute_limit))
    ]
    weights_K = np.array(weights(problem))
    return MEMORY * over[0] + over[1], float((problem.lengths_I * weights_K[np.log2(placement[0]).astype(int)]).sum())
