"""Beam search: the largest sequence first, each on any group of devices, in the best few ways so far.

Blocks of devices that share nothing are searched in lockstep, so one numpy call serves all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

HARD = 1e4  # what exceeding a limit counts, against traffic in units of what one device holds
DUST = 0.04  # of a device's limit: smaller sequences only follow the best way, which they hardly change


def beam(
    work_KI: np.ndarray,
    tokens_KI: np.ndarray,
    even_K: np.ndarray,
    held_KRD: np.ndarray,
    weights: Sequence[float],
    width: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Degree and first device, within its block, of every sequence: `[blocks, sequences]` int each.

    `work_KI` and `tokens_KI`, `[blocks, sequences]`, are in units of what one device may take, zero where a block has
    fewer sequences. `held_KRD`, `[blocks, 2, devices]`, is the work and the tokens that devices have already.
    `weights[log2(p)]` is the traffic of a token at degree `p`, `even_K` what unevenness counts against it, and `width`
    ways are kept. Where the limits cannot be kept to, they are exceeded by as little as is found.
    """
    (blocks, count), size = work_KI.shape, held_KRD.shape[-1]
    amounts_KRI = np.stack([work_KI, tokens_KI], 1)
    order_KI = np.argsort(-amounts_KRI.max(1), axis=1, kind="stable")
    amounts_KRI = np.take_along_axis(amounts_KRI, order_KI[:, None], 2)
    groups = [(2**k, first) for k in range(len(weights)) for first in range(0, size, 2**k)]
    degree_G, first_G = np.array(groups).T
    share_GD = device_shares(degree_G, first_G, size)
    weight_G = np.repeat(weights, size >> np.arange(len(weights)))

    block_K = np.arange(blocks)[:, None]
    loads_KBRD = held_KRD[:, None]
    # Of each way: its traffic, what it exceeds the limits by, and the sum of its squared loads.
    traffic_KB, square_KB = np.zeros((2, blocks, 1))
    over_KB = np.maximum(loads_KBRD.max((2, 3)) - 1 - 1e-9, 0)
    parents, choices = [], []
    for i in range(count):
        amount_KR = amounts_KRI[:, :, i]
        most, total = _groups(loads_KBRD, len(weights))
        added_KRG = amount_KR[:, :, None] / degree_G
        over_KBG = np.maximum((most + added_KRG[:, None]).max(2) - 1 - 1e-9, over_KB[:, :, None])
        square_KBG = square_KB[:, :, None] + (added_KRG[:, None] * (2 * total + amount_KR[:, None, :, None])).sum(2)
        traffic_KBG = traffic_KB[:, :, None] + (amount_KR[:, 1, None] * weight_G)[:, None]
        score_KC = (traffic_KBG + HARD * over_KBG + even_K[:, None, None] * square_KBG).reshape(blocks, -1)
        keep = width if amount_KR.max() > DUST else 1
        chosen_KB = _best(score_KC, keep)
        parent_KB, choice_KB = np.divmod(chosen_KB, len(groups))
        loads_KBRD = loads_KBRD[block_K, parent_KB] + amount_KR[:, None, :, None] * share_GD[choice_KB][:, :, None]
        traffic_KB, over_KB, square_KB = (
            np.take_along_axis(values.reshape(blocks, -1), chosen_KB, 1)
            for values in (traffic_KBG, over_KBG, square_KBG)
        )
        parents.append(parent_KB)
        choices.append(choice_KB)
    group_KI = np.zeros((blocks, count), int)
    way_K = np.zeros(blocks, int)  # ways are sorted, the best one first
    for i in reversed(range(count)):
        group_KI[:, i] = choices[i][block_K[:, 0], way_K]
        way_K = parents[i][block_K[:, 0], way_K]
    place_KI = np.zeros_like(group_KI)
    np.put_along_axis(place_KI, order_KI, group_KI, 1)
    return degree_G[place_KI], first_G[place_KI]


def device_shares(degree_I: np.ndarray, first_I: np.ndarray, num_devices: int) -> np.ndarray:
    """`[groups, devices]`: the share of each of these groups that each device computes."""
    device_D, last_I = np.arange(num_devices), first_I + degree_I
    return ((first_I[:, None] <= device_D) & (device_D < last_I[:, None])) / degree_I[:, None]


def _groups(loads_KBRD: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """`[blocks, ways, 2, groups]`: the largest load of a device of each group, and the sum over its devices."""
    most, total = [loads_KBRD], [loads_KBRD]
    for _ in range(levels - 1):
        most.append(np.maximum(most[-1][..., ::2], most[-1][..., 1::2]))
        total.append(total[-1][..., ::2] + total[-1][..., 1::2])
    return np.concatenate(most, -1), np.concatenate(total, -1)


def _best(score_KC: np.ndarray, keep: int) -> np.ndarray:
    """The candidates with the lowest scores, `[blocks, at most keep]`, lowest first. Of equal scores, those of devices
    in another order, one is enough."""
    if keep == 1:
        return score_KC.argmin(1)[:, None]
    order_KC = np.argsort(score_KC, axis=1, kind="stable")
    sorted_KC = np.take_along_axis(score_KC, order_KC, 1)
    new_KC = np.ones(sorted_KC.shape, bool)
    new_KC[:, 1:] = np.diff(sorted_KC, axis=1) > 1e-10
    keep = min(keep, int(new_KC.sum(1).max()))
    # Those that are new come first, in order; where one block has fewer than another, repetitions fill up.
    return np.take_along_axis(order_KC, np.argsort(~new_KC, axis=1, kind="stable")[:, :keep], 1)
