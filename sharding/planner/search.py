"""A search beyond the descent of `placement`: beam searches place all sequences anew, then repair improves the best.

Repair takes some sequences of two or three blocks of devices out of a placement, and places them anew if that helps.
It does not find a cheaper placement that changes all blocks at once, as two of the mixes of
`tests/sharding/test_planner_mixes.py` would need to send 1 and 2 % less.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .placement import Score, dealt, score
from .plan import Placement, Problem

# For each beam: the weight of unevenness, and the share of the limits that the beam aims at, since the last sequences
# exceed the aim a little. No pair is best for all problems.
STARTS = ((0.001, 0.997), (0.1, 0.997), (0.4, 0.997), (1.0, 0.997), (1.0, 0.999), (0.4, 0.999))
WIDTH = 64  # partial placements (ways) that a beam keeps, at most
BLOCK = 64  # devices that are searched together
RUNGS = ((1024, 32), (10240, 64))  # (ways times devices of all beams, rounds of repair of the two best placements)
SHORT = ((1024, 1),)  # the same for few sequences (`Problem.few`): no plan is good then, and a long search idle
ALLOWED = (1.0, 1.005, 1.01, 1.02, 1.03, 1.04, 1.06, 1.1, 1.15, 1.2, 1.3, 1.5)  # factors on the compute limit
DEALS = 24  # rounds of repair for each factor of `ALLOWED`
FEW_ALLOWED, FEW_DEALS = (1.0, 1.03, 1.15), 1  # the same for few sequences
EPS = 1e-9

HARD = 1e4  # the weight of exceeding a limit in a beam, against traffic in units of one device's limit
DUST = 0.04  # share of a device's limit; once sequences are smaller, a beam keeps the best way only

EVENS = (0.001, 0.1, 0.4, 1.0) * 2  # the weight of unevenness in each try of a round of repair; tries run side by side
TOUCHED = 3  # blocks of devices whose sequences a try may move; two, if blocks are larger than `LARGE`
LARGE = 8  # devices of a block
FREED = 12  # the most sequences that a try places anew
FEW = 16  # ways that a beam of repair keeps, at most


def search(
    problem: Problem, starts: list[Placement], good: Callable[[Placement], bool], *, mend: bool
) -> Iterator[Placement]:
    """Yields the best placement of `starts` and of beams, then, with `mend`, those of repair, for each of `RUNGS`."""
    found, score_of, rungs = list(starts), functools.partial(score, problem), SHORT if problem.few else RUNGS
    amounts = problem.shares
    weights_K = problem.weights[: top_degree(problem).bit_length()]
    for cells, rounds in rungs:
        scored = {score_of(placement): placement for placement in [*found, *beams(problem, cells)]}
        found = [scored[key] for key in sorted(scored)]
        yield found[0]
        for k in range(min(1 if problem.few else 2, len(found)) if mend else 0):
            found[k] = repair(amounts, weights_K, found[k], problem.num_devices, score_of, good, rounds)
            yield found[k]


def beams(problem: Problem, cells: int) -> list[Placement]:
    """A placement for each of the first entries of `STARTS`. Blocks of at most `BLOCK` (or `top_degree`) devices are
    searched side by side. `cells` bounds ways times devices, summed over at least two beams of two ways each."""
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
    weights_K = problem.weights[: top.bit_length()]
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


def beam(
    work_KI: np.ndarray,
    tokens_KI: np.ndarray,
    even_K: np.ndarray,
    held_KRD: np.ndarray,
    weights: Sequence[float],
    width: int,
) -> tuple[np.ndarray, np.ndarray]:
    """(degree, first device within the block) of every sequence: `[blocks, sequences]` int each.

    Beam search places the largest sequence first, on any aligned group of 2^k devices, in each of the best ways so far.
    Blocks of devices are independent, and searched in lockstep, so that one numpy call serves all blocks.

    `work_KI` and `tokens_KI`, `[blocks, sequences]`, are in units of one device's limit, zero behind a block's last
    sequence. `held_KRD`, `[blocks, 2, devices]`, has the work and the tokens of each device before the search.
    `weights[log2(p)]` is the traffic of a token at degree `p`, `even_K` the weight of unevenness against traffic; the
    beam keeps `width` ways. Limits that can't be met are exceeded by as little as the search achieves.
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
    # For each way: its traffic, its excess over the limits, and the sum of its squared loads.
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
    way_K = np.zeros(blocks, int)  # ways are sorted, the best way first
    for i in reversed(range(count)):
        group_KI[:, i] = choices[i][block_K[:, 0], way_K]
        way_K = parents[i][block_K[:, 0], way_K]
    place_KI = np.zeros_like(group_KI)
    np.put_along_axis(place_KI, order_KI, group_KI, 1)
    return degree_G[place_KI], first_G[place_KI]


def device_shares(degree_I: np.ndarray, first_I: np.ndarray, num_devices: int) -> np.ndarray:
    """`[sequences, devices]`: the share of each sequence that each device computes."""
    device_D, last_I = np.arange(num_devices), first_I + degree_I
    return ((first_I[:, None] <= device_D) & (device_D < last_I[:, None])) / degree_I[:, None]


def _groups(loads_KBRD: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    most, total = [loads_KBRD], [loads_KBRD]
    for _ in range(levels - 1):
        most.append(np.maximum(most[-1][..., ::2], most[-1][..., 1::2]))
        total.append(total[-1][..., ::2] + total[-1][..., 1::2])
    return np.concatenate(most, -1), np.concatenate(total, -1)


def _best(score_KC: np.ndarray, keep: int) -> np.ndarray:
    """The candidates with the lowest scores, `[blocks, at most keep]`, lowest first, and one of each score, since those
    of equal score differ in the order of devices only."""
    if keep == 1:
        return score_KC.argmin(1)[:, None]
    order_KC = np.argsort(score_KC, axis=1, kind="stable")
    sorted_KC = np.take_along_axis(score_KC, order_KC, 1)
    new_KC = np.ones(sorted_KC.shape, bool)
    new_KC[:, 1:] = np.diff(sorted_KC, axis=1) > 1e-10
    keep = min(keep, int(new_KC.sum(1).max()))
    # New scores come first, in order; a block with fewer new scores than another is filled up with repetitions.
    return np.take_along_axis(order_KC, np.argsort(~new_KC, axis=1, kind="stable")[:, :keep], 1)


def top_degree(problem: Problem) -> int:
    """The highest degree that is tried first: the largest within a host (`tau`), or more if a sequence needs more."""
    need = float(problem.shares.max())
    degree = min(1 << (problem.limits.tau.bit_length() - 1), problem.max_degree)
    while degree < problem.max_degree and degree < need:
        degree *= 2
    return degree


def redealt(problem: Problem, degree: int) -> list[int]:
    """As `dealt`, slower and better: repairs that result, a block as one device, within higher limits if it must."""
    block_I = dealt(problem, degree)
    amounts = problem.shares / degree
    placement: Placement = ([1] * len(block_I), block_I)
    factors, rounds = (FEW_ALLOWED, FEW_DEALS) if problem.few else (ALLOWED, DEALS)
    for allowed in factors:
        within = amounts / np.array([[allowed], [1.0]])
        count = problem.num_devices // degree

        def excess(tried: Placement, within: np.ndarray = within, count: int = count) -> Score:
            return sum(max(np.bincount(tried[1], row, count).max() - 1 - EPS, 0.0) for row in within), 0.0

        placement = repair(within, [0.0], placement, count, excess, lambda tried: not excess(tried)[0], rounds)
        if not excess(placement)[0]:
            break
    return placement[1]


def repair(
    amounts: np.ndarray,
    weights: Sequence[float],
    placement: Placement,
    num_devices: int,
    score_of: Callable[[Placement], Score],
    good: Callable[[Placement], bool],
    rounds: int,
) -> Placement:
    """A placement no worse by `score_of`, after `rounds` rounds of repair or as soon as it is `good`. `amounts`,
    `[2, sequences]`: work and tokens in units of one device's limit. `weights[log2(p)]` is the traffic of a token at
    degree `p`; the last entry is that of a complete block. Sequences that cause traffic, and sequences on devices that
    exceed a limit, are likelier to be moved. The same arguments give the same placement."""
    rng = np.random.default_rng(0)
    degrees, firsts = (np.array(row) for row in placement)
    best = score_of(placement)
    block = 2 ** (len(weights) - 1)
    for _ in range(rounds):
        if good((degrees.tolist(), firsts.tolist())):
            break
        share_ID = device_shares(degrees, firsts, num_devices)
        loads = amounts @ share_ID
        traffic = amounts[1] * np.array(weights)[np.log2(np.minimum(degrees, block)).astype(int)]
        chance_I = (traffic + 0.1 * amounts.max(0) + 0.02) * (degrees <= block)
        chance_I *= 1 + 3 * ((share_ID > 0) & (loads.max(0) > 1 + 1e-9)).any(1)
        home_I = firsts // block
        chance_B = np.bincount(home_I, chance_I, num_devices // block) + 1e-9
        count = min(TOUCHED if block <= LARGE else 2, len(chance_B))
        tries, spans = [], []
        for _ in EVENS:
            span = rng.choice(len(chance_B), count, replace=False, p=chance_B / chance_B.sum())
            here = chance_I * np.isin(home_I, span)
            freed = min(FREED, int(np.count_nonzero(here)))
            moved = rng.choice(len(here), freed, replace=False, p=here / here.sum()) if freed else np.zeros(0, int)
            tries.append(moved)
            spans.append(np.sort(span))
        devices = [(block * span[:, None] + np.arange(block)).ravel() for span in spans]
        held = np.array(
            [(loads - amounts[:, freed] @ share_ID[freed])[:, at] for freed, at in zip(tries, devices, strict=True)]
        ).clip(0)
        padded = np.zeros((2, len(tries), max(map(len, tries))))
        for k, freed in enumerate(tries):
            padded[:, k, : len(freed)] = amounts[:, freed]
        found = beam(padded[0], padded[1], np.array(EVENS), held, weights, FEW)
        before = degrees, firsts
        for k, (freed, at) in enumerate(zip(tries, devices, strict=True)):
            changed = before[0].copy(), before[1].copy()
            changed[0][freed], changed[1][freed] = found[0][k, : len(freed)], at[found[1][k, : len(freed)]]
            after = score_of((changed[0].tolist(), changed[1].tolist()))
            if after < best:
                best, (degrees, firsts) = after, changed
    return degrees.tolist(), firsts.tolist()
