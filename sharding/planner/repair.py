"""Repair: some sequences are taken out of a placement and placed anew, best ways first, as long as that helps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .beam import beam

ROUNDS = 16  # of `len(EVENS)` tries each, side by side
POLISHED = 6  # rounds that are made even if no limit is exceeded, for less traffic
EVENS = (0.001, 0.1, 0.4, 1.0) * 2
FREED = 10  # sequences placed anew in a try
WIDTH = 8

Placement = tuple[list[int], list[int]]
Score = tuple[float, float]  # what exceeds the limits, then traffic


def repair(
    amounts: np.ndarray,
    weights: Sequence[float],
    placement: Placement,
    num_devices: int,
    score_of: Callable[[Placement], Score],
) -> Placement:
    """A placement that is no worse by `score_of`. Ends early when no limit is exceeded.

    `amounts`, `[2, sequences]`: work and tokens in units of what one device may take. Sequences on devices that exceed
    a limit, and those that cause traffic, are the likelier to be taken out. The same arguments give the same placement.
    """
    rng = np.random.default_rng(0)
    degrees, firsts = (np.array(row) for row in placement)
    score, device = score_of(placement), np.arange(num_devices)
    for turn in range(ROUNDS):
        if not score[0] and turn >= POLISHED:
            break
        share = ((firsts[:, None] <= device) & (device < (firsts + degrees)[:, None])) / degrees[:, None]
        loads = amounts @ share
        chance = amounts[1] * np.array(weights)[np.log2(degrees).astype(int)] + 0.1 * amounts.max(0) + 0.02
        chance *= 1 + 3 * ((share > 0) & (loads.max(0) > 1 + 1e-9)).any(1)
        count = min(FREED, len(degrees))
        tries = [rng.choice(len(degrees), count, replace=False, p=chance / chance.sum()) for _ in EVENS]
        held = np.array([loads - amounts[:, freed] @ share[freed] for freed in tries]).clip(0)
        work, tokens = (row[np.array(tries)] for row in amounts)
        found = beam(work, tokens, np.array(EVENS), held, weights, WIDTH)
        before = degrees, firsts
        for freed, new_degrees, new_firsts in zip(tries, *found, strict=True):
            changed = before[0].copy(), before[1].copy()
            changed[0][freed], changed[1][freed] = new_degrees, new_firsts
            after = score_of((changed[0].tolist(), changed[1].tolist()))
            if after < score:
                score, (degrees, firsts) = after, changed
    return degrees.tolist(), firsts.tolist()
