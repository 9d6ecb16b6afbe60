"""Mixes of sequence lengths drawn by bootstrap, and what is wrong with a plan of one: what no plan can go below is
proven for one case at a time by integer programming (HiGHS, in scipy)."""

import collections
import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from sharding.planner.plan import ShardPlan, least_load

BALANCE, MEMORY, TRAFFIC = 1.03, 1.10, 0.85  # traffic: of fixed degree 8
EXACT = 1 + 1e-5  # the solver's gap and rounding
PROVABLE = 32  # devices up to which a bound of the traffic says more than what each sequence needs
FLUIDS = (0.15, 0.05, 0.0)  # of a device's limit: the shorter sequences of a proof, each tried if the one before fails
HOST = 8  # no plan sends more, 16 times dearer, beyond a host of so many devices for less traffic within


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    lengths: list[int]
    num_devices: int
    cap: int


def drawn(pools: dict[str, np.ndarray], seed: int) -> Case:
    """Sequences of one mix, with replacement; two or four for each device."""
    rng = np.random.default_rng(seed)
    name = sorted(pools)[rng.integers(len(pools))]
    devices = int(rng.choice([16, 32, 64, 128]))
    lengths = rng.choice(pools[name], devices * int(rng.choice([2, 2, 2, 4]))).tolist()
    return Case(f"{name} seed {seed}", lengths, devices, min(devices, int(rng.choice([8, 16, 32]))))


def shared_pools(file: pathlib.Path) -> dict[str, np.ndarray]:
    pools = collections.defaultdict(list)
    for case in json.loads(file.read_text()):
        pools[case["name"].rsplit("_", 1)[0]] += [sequence["length"] for sequence in case["sequences"]]
    return {name: np.array(lengths) for name, lengths in pools.items()}


def synthetic_pools() -> dict[str, np.ndarray]:
    """Lengths like those: questions on one image, short videos, long ones cut to a number of frames."""
    rng = np.random.default_rng(0)
    image, short = rng.lognormal(6.2, 0.5, 1000), rng.lognormal(9.1, 0.6, 1000).clip(1500, 43_000)
    long = rng.normal(32_500, 150, 1000)
    parts = {"image_heavy": (62, 27, 11), "video_heavy": (12, 22, 66)}
    pools = {
        name: np.concatenate([source[: 10 * share] for source, share in zip((image, short, long), shares, strict=True)])
        for name, shares in parts.items()
    }
    pools["only_video"] = rng.normal(8300, 250, 1000)
    return {name: lengths.astype(int) for name, lengths in pools.items()}


def vectors(lengths: list[int], degrees: tuple[int, ...]) -> float:
    return float(sum(n * (p - 1) / p for n, p in zip(lengths, degrees, strict=True)))


def assert_executable(plan: ShardPlan) -> None:
    """Groups are aligned, degrees never increase, and each sequence is in one round, there on its own group."""
    for degree, first in zip(plan.degrees, plan.firsts, strict=True):
        assert not degree & (degree - 1) and not first % degree and 0 <= first <= plan.num_devices - degree
    degrees = [round.degree for round in plan.rounds]
    assert degrees == sorted(degrees, reverse=True)
    assert all(len(round.groups) * round.degree == plan.num_devices for round in plan.rounds)
    placed = sorted(
        (index, round.degree, group * round.degree)
        for round in plan.rounds
        for group, members in enumerate(round.groups)
        for index in members
    )
    assert placed == list(zip(range(len(plan.lengths)), plan.degrees, plan.firsts, strict=True))
    assert len(plan.work) == len(plan.lengths)


def executable(planner: Callable[..., ShardPlan]) -> Callable[..., ShardPlan]:
    """The planner, each of whose plans is checked."""

    def plan(*arguments: Any, **options: Any) -> ShardPlan:
        assert_executable(made := planner(*arguments, **options))
        return made

    return plan


def faults(case: Case, plan: ShardPlan, near: float = EXACT) -> list[str]:
    """The bounds that a plan exceeds though no proof excuses it: it may reach `near` times what is proven the least.

    Proven is the least balance of plans with `MEMORY`, and the least traffic of plans with `BALANCE` and `MEMORY` whose
    sequences stay within a host. Proofs are computed only where they are needed.
    """
    found, devices, cap = [], case.num_devices, case.cap
    tokens = np.array(case.lengths, float)
    if plan.balance > BALANCE:
        floor = max(
            least_balance(case.lengths, devices, cap, MEMORY),
            least_load(tokens**2, devices, cap) * devices / float((tokens**2).sum()),
        )
        if plan.balance > max(BALANCE, near * floor):
            found.append(f"balance {plan.balance:.4f}, proven least {floor:.4f}")
    memory = max(MEMORY, least_load(tokens, devices, cap) * devices / float(tokens.sum()))
    if plan.memory_ratio > memory * (1 + 1e-9):
        found.append(f"memory {plan.memory_ratio:.4f}")
    moved, fixed = vectors(case.lengths, plan.degrees), vectors(case.lengths, (8,) * len(tokens))
    if moved > TRAFFIC * fixed:
        within = max(HOST, *plan.degrees)
        least = 0.0
        for fluid in FLUIDS if devices <= PROVABLE else ():
            if moved > near * least:
                least = max(least, least_traffic(case.lengths, devices, within, BALANCE, MEMORY, fluid))
        if moved > near * least:
            found.append(f"traffic {moved / fixed:.4f}, proven least {least / fixed:.4f}")
    return found


def stretched(case: Case, seed: int) -> Case:
    """The case with its longest sequence up to twice as long: harder."""
    lengths = list(case.lengths)
    lengths[int(np.argmax(lengths))] = int(max(lengths) * (1 + np.random.default_rng(seed).random()))
    return dataclasses.replace(case, name=f"{case.name}, stretched", lengths=lengths)


NODES = 2_000  # of the search tree; no seconds, so that a busy machine proves the same


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
        bounds=Bounds(np.zeros(size), upper),  # pyright: ignore[reportArgumentType]
        options={"node_limit": NODES},
    )
    return _bound(result)


def least_traffic(
    lengths: Sequence[int], num_devices: int, cap: int, balance: float, memory: float, fluid: float = 0.0
) -> float:
    """A bound below the vectors moved, the sum of `length * (p - 1) / p`, of plans that keep to both ratios. Infinite
    if there is none. Tells something on a dozen devices; on many, only what each sequence needs by itself.

    Sequences below `fluid` of what a device may take count as a fluid that fills any device and sends nothing: the
    bound is a little lower, and found in a tenth of the time.
    """
    tokens = np.array(sorted(lengths, reverse=True), float)
    amounts = np.array([tokens**2 / (tokens**2).sum() / balance, tokens / tokens.sum() / memory]) * num_devices
    whole = max(1, int((amounts.max(0) >= fluid).sum()))
    groups = [(2**k, first) for k in range(cap.bit_length()) for first in range(0, num_devices, 2**k)]
    ways = [
        (i, p, first)
        for i in range(whole)
        for p, first in groups
        # Which block is the first, the second and so on, and on which group of its block the longest is, are all one.
        if amounts[:, i].max() <= p * (1 + 1e-9) and first // cap <= i and not (i == 0 and first)
    ]
    # Variables: whether a sequence goes a way, then what each device has of the fluid, work before tokens.
    count, size = len(ways), len(ways) + 2 * num_devices
    column = np.concatenate([np.full(p, index) for index, (_, p, _) in enumerate(ways)])
    device = np.concatenate([np.arange(first, first + p) for _, p, first in ways])
    constraints = []
    for k, amount in enumerate(amounts):
        fluids = count + k * num_devices + np.arange(num_devices)
        share = np.append(np.concatenate([np.full(p, amount[i] / p) for i, p, _ in ways]), np.ones(num_devices))
        where = np.append(device, np.arange(num_devices)), np.append(column, fluids)
        constraints.append(LinearConstraint(coo_array((share, where), (num_devices, size)), ub=1 + 1e-9))
        poured = coo_array((np.ones(num_devices), (np.zeros(num_devices, int), fluids)), (1, size))
        constraints.append(LinearConstraint(poured, lb=amount[whole:].sum() * (1 - 1e-9)))
    sequence = np.array([i for i, _, _ in ways])
    once = coo_array((np.ones(count), (sequence, np.arange(count))), (whole, size))
    price = np.array([tokens[i] * (1 - 1 / p) for i, p, _ in ways])
    is_way = np.arange(size) < count
    result = milp(
        np.append(price / tokens.sum(), np.zeros(2 * num_devices)),
        constraints=[*constraints, LinearConstraint(once, 1, 1)],
        integrality=is_way,
        bounds=Bounds(0, np.where(is_way, 1, np.inf)),  # pyright: ignore[reportArgumentType]
        options={"node_limit": NODES},
    )
    return _bound(result) * float(tokens.sum())


def _bound(result) -> float:
    if result.status == 2:
        return float("inf")
    bound = result.mip_dual_bound if result.mip_dual_bound is not None else 0.0
    return float(bound) * (1 - 1e-6)  # what the solver calls equal
