"""Repair: some sequences of a few blocks of devices are taken out of a placement and placed anew, if that helps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .beam import beam
from .placement import Placement, Score

EVENS = (0.001, 0.1, 0.4, 1.0) * 2  # what unevenness counts in each of the tries of a round, which run side by side
BLOCKS = 3  # blocks of devices whose sequences a try may move; two, if they are larger than `LARGE`
LARGE = 8
FREED = 12  # sequences that a try places anew
WIDTH = 16


def repair(
    amounts: np.ndarray,
    weights: Sequence[float],
    placement: Placement,
    num_devices: int,
    score_of: Callable[[Placement], Score],
    good: Callable[[Placement], bool],
    rounds: int,
) -> Placement:
    """A placement that is no worse by `score_of`, after so many rounds or as soon as it is `good`.

    `amounts`, `[2, sequences]`: work and tokens in units of what one device may take. `weights[log2(p)]` is the traffic
    of a token at degree `p`; the last one is that of a whole block. Sequences that cause traffic, and those on devices
    that exceed a limit, are the likelier to be moved. The same arguments give the same placement.
    """
    rng = np.random.default_rng(0)
    degrees, firsts = (np.array(row) for row in placement)
    score, device = score_of(placement), np.arange(num_devices)
    block = 2 ** (len(weights) - 1)
    within = np.arange(block)
    for _ in range(rounds):
        if good((degrees.tolist(), firsts.tolist())):
            break
        share_ID = ((firsts[:, None] <= device) & (device < (firsts + degrees)[:, None])) / degrees[:, None]
        loads = amounts @ share_ID
        movable = degrees <= block
        traffic = amounts[1] * np.array(weights)[np.log2(np.minimum(degrees, block)).astype(int)]
        chance_I = (traffic + 0.1 * amounts.max(0) + 0.02) * movable
        chance_I *= 1 + 3 * ((share_ID > 0) & (loads.max(0) > 1 + 1e-9)).any(1)
        home_I = firsts // block
        chance_B = np.bincount(home_I, chance_I, num_devices // block) + 1e-9
        count = min(BLOCKS if block <= LARGE else 2, len(chance_B))
        tries, spans = [], []
        for _ in EVENS:
            span = rng.choice(len(chance_B), count, replace=False, p=chance_B / chance_B.sum())
            here = chance_I * np.isin(home_I, span)
            freed = min(FREED, int(np.count_nonzero(here)))
            tries.append(
                rng.choice(len(here), freed, replace=False, p=here / here.sum()) if freed else np.zeros(0, int)
            )
            spans.append(np.sort(span))
        devices = [(block * span[:, None] + within).ravel() for span in spans]
        held = np.array(
            [(loads - amounts[:, freed] @ share_ID[freed])[:, at] for freed, at in zip(tries, devices, strict=True)]
        ).clip(0)
        padded = np.zeros((2, len(tries), max(map(len, tries))))
        for k, freed in enumerate(tries):
            padded[:, k, : len(freed)] = amounts[:, freed]
        found = beam(padded[0], padded[1], np.array(EVENS), held, weights, WIDTH)
        before = degrees, firsts
        for k, (freed, at) in enumerate(zip(tries, devices, strict=True)):
            changed = before[0].copy(), before[1].copy()
            changed[0][freed], changed[1][freed] = found[0][k, : len(freed)], at[found[1][k, : len(freed)]]
            after = score_of((changed[0].tolist(), changed[1].tolist()))
            if after < score:
                score, (degrees, firsts) = after, changed
    return degrees.tolist(), firsts.tolist()
