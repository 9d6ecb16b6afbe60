"""What no plan can go below, proven for one case at a time by integer programming (HiGHS, in scipy)."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

NODES = 20_000  # of the search tree; seconds bound it only where a machine is very slow


def least_balance(lengths: Sequence[int], num_devices: int, cap: int, memory: float) -> float:
    """A bound below the largest over the mean attention work of a device, of plans whose fullest device has at most
    `memory` times the mean tokens. A sequence is somewhere within one block of `cap` devices; nothing else is asked."""
    blocks, tokens = num_devices // cap, np.array(sorted(lengths, reverse=True), float)
    amounts = [tokens**2 / (tokens**2).sum() * blocks, tokens / tokens.sum() * blocks / memory]
    sequence, block = (index.ravel() for index in np.indices((len(tokens), blocks)))
    # Variables: whether a sequence is in a block, and at last the balance. Which block is first does not matter.
    columns, size = np.arange(len(sequence)), len(sequence) + 1
    work = coo_array((amounts[0][sequence], (block, columns)), (blocks, size)).toarray()
    work[:, -1] = -1
    held = coo_array((amounts[1][sequence], (block, columns)), (blocks, size))
    once = coo_array((np.ones(len(columns)), (sequence, columns)), (len(tokens), size))
    upper = np.append((block <= sequence).astype(float), np.inf)
    result = milp(
        np.append(np.zeros(len(columns)), 1.0),
        constraints=[LinearConstraint(work, ub=0), LinearConstraint(held, ub=1), LinearConstraint(once, 1, 1)],
        integrality=np.append(np.ones(len(columns)), 0),
        bounds=Bounds(np.zeros(size), upper),
        options={"node_limit": NODES, "time_limit": 200},
    )
    return _bound(result)


def least_traffic(lengths: Sequence[int], num_devices: int, cap: int, balance: float, memory: float) -> float:
    """A bound below the vectors moved, the sum of `length * (p - 1) / p`, of plans that keep to both ratios. Infinite
    if there is none. Tells something on a dozen devices; on many, only what each sequence needs by itself."""
    tokens = np.array(sorted(lengths, reverse=True), float)
    amounts = [tokens**2 / (tokens**2).mean() / len(tokens) * num_devices / balance]
    amounts.append(tokens / tokens.mean() / len(tokens) * num_devices / memory)
    degrees = [2**k for k in range(cap.bit_length())]
    groups = [(p, first) for p in degrees for first in range(0, num_devices, p)]
    ways = [
        (i, p, first)
        for i in range(len(tokens))
        for p, first in groups
        # Which half of all devices the longest is in, and on which group of them, does not matter.
        if max(amount[i] for amount in amounts) <= p * (1 + 1e-9) and not (i == 0 and first)
    ]
    column = np.concatenate([np.full(p, index) for index, (_, p, _) in enumerate(ways)])
    device = np.concatenate([np.arange(first, first + p) for _, p, first in ways])
    shares = [np.concatenate([np.full(p, amount[i] / p) for i, p, _ in ways]) for amount in amounts]
    rows = [coo_array((share, (device, column)), (num_devices, len(ways))) for share in shares]
    sequence = np.array([i for i, _, _ in ways])
    once = coo_array((np.ones(len(ways)), (sequence, np.arange(len(ways)))), (len(tokens), len(ways)))
    price = np.array([tokens[i] * (1 - 1 / p) for i, p, _ in ways])
    result = milp(
        price / tokens.sum(),
        constraints=[*(LinearConstraint(row, ub=1 + 1e-9) for row in rows), LinearConstraint(once, 1, 1)],
        integrality=np.ones(len(ways)),
        bounds=Bounds(0, 1),
        options={"node_limit": NODES, "time_limit": 200},
    )
    return _bound(result) * float(tokens.sum())


def _bound(result) -> float:
    if result.status == 2:
        return float("inf")
    bound = result.mip_dual_bound if result.mip_dual_bound is not None else 0.0
    return float(bound) * (1 - 1e-6)  # what the solver calls equal
