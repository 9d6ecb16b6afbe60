"""Sequences dealt over blocks of devices that none may span, as evenly as can be in compute and memory at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .descend import HARD, halves

GOOD = 0.25  # pressure below which nothing is dealt anew
NEIGHBOURS = 6  # emptiest blocks that the fullest one deals anew with


def blocks(
    work: Sequence[float], tokens: Sequence[float], count: int, *, spare: tuple[float, float] = (0.01, 0.03)
) -> list[int]:
    """The block of each item, of `count`. `work` and `tokens` are in units of what one block should take.

    Longest first to the least loaded; then the block with the most pressure (how far it exceeds 1, over what is `spare`
    in work and in tokens) and one of the others deal out anew what they have, as long as that helps.
    """
    if count == 1:
        return [0] * len(work)
    loads = np.zeros((count, 2))
    members: list[list[int]] = [[] for _ in range(count)]
    amounts = np.array([work, tokens]).T.reshape(-1, 2)
    room = np.array(spare)
    most = 1 + spare[1]

    def pressure_of(loads: np.ndarray) -> np.ndarray:
        over = (loads - 1) / room
        return over.max(1) + HARD * np.maximum(over[:, 1] - 1, 0.0)

    for i in np.argsort(-amounts.max(1, initial=0.0), kind="stable").tolist():
        # The larger of both after it counts, then the sum.
        after = loads + amounts[i]
        over = HARD * np.maximum(after[:, 1] - most, 0.0)
        best = int((after.max(1) + 0.1 * loads.sum(1) + over).argmin())
        members[best].append(i)
        loads[best] += amounts[i]
    for _ in range(3 * count):
        pressure = pressure_of(loads)
        fullest = int(pressure.argmax())
        if pressure[fullest] <= GOOD:
            break
        resource = int(((loads[fullest] - 1) / room).argmax())
        for other in np.argsort(loads[:, resource], kind="stable")[:NEIGHBOURS].tolist():
            if other == fullest:
                continue
            left = 2 * (1 + room) - loads[fullest] - loads[other]
            _, *sides = halves(
                sorted(members[fullest] + members[other]), work, tokens, *np.maximum(left, room / 4).tolist()
            )
            new = np.array([amounts[side].sum(0) for side in sides])
            if pressure_of(new).max() < max(pressure[fullest], pressure[other]) - 1e-6:
                for block, load, side in zip((fullest, other), new, sides, strict=True):
                    members[block], loads[block] = side, load
                break
        else:
            break
    answer = [0] * len(work)
    for block, inside in enumerate(members):
        for i in inside:
            answer[i] = block
    return answer
