"""A shard plan says on how many devices, and on which, each sequence of a microbatch is computed.

Devices are numbered along the mesh in row-major order. A group of degree `p` is `p` consecutive devices beginning at a
multiple of `p`: they lie along the last `log2(p)` mesh axes. Any two groups are disjoint or nested (FlexRL, 3.3).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

GAMMA = 16.0  # traffic between hosts costs this many times as much as traffic within a host

Placement = tuple[list[int], list[int]]  # degree and first device of every sequence


class PlanError(ValueError):
    """No plan exists within the limits. The message names the sequence or the field, and a remedy."""


@dataclasses.dataclass(frozen=True)
class Round:
    """A round of a plan, computed by all devices together: one stream of sequences on each group of `degree` devices.
    `groups[g]` are the sequences, in order, of the stream of devices `[g * degree, (g + 1) * degree)`. A stream is cut
    into `degree` chunks; the first chunks may be one token longer."""

    degree: int
    groups: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """Devices `[firsts[i], firsts[i] + degrees[i])` compute sequence `i`. `rounds` are in the order of execution,
    degrees never increasing (highest sharding first); each sequence is in exactly one round. `work` is the compute of
    each sequence, in any unit; by default `length**2`."""

    num_devices: int
    lengths: tuple[int, ...]
    work: tuple[float, ...]
    degrees: tuple[int, ...]
    firsts: tuple[int, ...]
    rounds: tuple[Round, ...]

    def compute(self) -> np.ndarray:
        """`[devices]`: C_d, the sum of `work / p` over the sequences of each device."""
        return self.over_devices(np.array(self.work) / np.array(self.degrees))

    def memory(self) -> np.ndarray:
        """`[devices]`: M_d, the tokens of each device."""
        return self.over_devices(np.array(self.lengths) / np.array(self.degrees))

    def rows(self) -> np.ndarray:
        """`[devices]` int: tokens in the buffer of each device, chunks rounded up."""
        rows = np.zeros(self.num_devices, np.int64)
        for round in self.rounds:
            chunks = [-(-sum(self.lengths[i] for i in members) // round.degree) for members in round.groups]
            rows += np.repeat(np.array(chunks, np.int64), round.degree)
        return rows

    @property
    def balance(self) -> float:
        """The largest compute of a device divided by the mean; 1 is perfect."""
        return _peak(self.compute())

    @property
    def memory_ratio(self) -> float:
        """The largest number of tokens of a device divided by the mean."""
        return _peak(self.memory())

    def over_devices(self, share: np.ndarray) -> np.ndarray:
        return over_devices(share, np.array(self.degrees, int), np.array(self.firsts, int), self.num_devices)


def over_devices(share: np.ndarray, degrees: np.ndarray, firsts: np.ndarray, num_devices: int) -> np.ndarray:
    """`[devices]`: the sum of `share`, an amount for each sequence on each of its devices."""
    edges = np.zeros(num_devices + 1)
    np.add.at(edges, firsts, share)
    np.add.at(edges, firsts + degrees, -share)
    return np.maximum(np.cumsum(edges)[:-1], 0.0)


def _peak(per_device: np.ndarray) -> float:
    mean = float(per_device.mean())
    return float(per_device.max()) / mean if mean else 1.0


def rounds(num_devices: int, degrees: Sequence[int], firsts: Sequence[int]) -> tuple[Round, ...]:
    """One round for each degree, the highest degree first: all sequences of a group are one stream, in their order."""
    found: list[Round] = []
    for degree in sorted(set(degrees), reverse=True):
        groups: list[list[int]] = [[] for _ in range(num_devices // degree)]
        for index, (sharded, first) in enumerate(zip(degrees, firsts, strict=True)):
            if sharded == degree:
                groups[first // degree].append(index)
        found.append(Round(degree, tuple(map(tuple, groups))))
    return tuple(found)


class Deal(NamedTuple):
    """Attention heads as they are dealt to the devices of a group, each of which computes equally many. If heads do not
    divide evenly, zeros fill them up, or several devices get copies of a KV head, and divide the query heads that read
    it. There are `kv` KV heads after filling up, `copies` copies of each, and `queries` query heads for each copy. All
    copies are cut into `degree` consecutive equal parts."""

    degree: int
    kv: int
    copies: int
    queries: int

    @property
    def local_kv(self) -> int:
        return self.kv * self.copies // self.degree

    @property
    def local_queries(self) -> int:
        return self.local_kv * self.queries


@functools.lru_cache
def deal_heads(num_heads: int, num_kv_heads: int, degree: int) -> Deal:
    """The deal with the fewest query heads on a device (compute), then the fewest KV heads (traffic). Filling up
    multiplies attention's compute by `local_queries * degree / num_heads`: 8 / 7 for 28 query heads, 4 KV heads and
    degree 8. Raises PlanError for a degree above the query heads, ValueError if these are no multiple of KV heads."""
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads can't be shared by {num_kv_heads} KV heads")
    if degree > num_heads:
        raise PlanError(f"can't shard a sequence over {degree} devices by {num_heads} attention heads; lower the cap")
    ratio = num_heads // num_kv_heads
    deals = []
    for copies in range(1, min(degree, ratio) + 1):
        step = degree // math.gcd(degree, copies)  # KV heads must be a multiple of `step`
        deals.append(Deal(degree, -(-num_kv_heads // step) * step, copies, -(-ratio // copies)))
    return min(deals, key=lambda deal: (deal.local_queries, deal.local_kv, deal.copies))


@dataclasses.dataclass(frozen=True)
class Limits:
    """The settings of every planner. Sizes are tokens.

    `max_degree`: the most devices for one sequence, a power of two; 0 for the most that devices and heads allow. A
    group stays in an aligned block, whose size is the largest power of two that divides the number of devices.
    `num_heads`: query heads; no degree exceeds this number. 0: heads set no bound.
    `alpha`: the largest ratio of a device's tokens to the mean (FlexRL's alpha). More is accepted only if one sequence,
    or one block of `max_degree` devices, holds more even at the highest degree.
    `tolerance`: for less traffic, the largest compute load may exceed the smallest possible by this share.
    `tokens_per_device`: the tokens of a device's buffer, padding of chunks included; never exceeded. 0: no bound.
    `tau`: degrees above `tau` leave a host, and their traffic counts `GAMMA` times (SplitCost).
    """

    max_degree: int = 0
    num_heads: int = 0
    alpha: float = 1.1
    tolerance: float = 0.025
    tokens_per_device: int = 0
    tau: int = 8

    def __post_init__(self) -> None:
        for name in ("max_degree", "num_heads", "tokens_per_device"):
            if getattr(self, name) < 0:
                raise PlanError(f"limits.{name} is {getattr(self, name)}; use 0 for no bound")
        if self.max_degree & (self.max_degree - 1):
            below = 1 << (self.max_degree.bit_length() - 1)
            raise PlanError(f"limits.max_degree {self.max_degree} is no power of two; use {below} or {2 * below}")
        least = {"alpha": 1.0, "tolerance": 0.0, "tau": 1}
        for name, low in least.items():
            if not low <= getattr(self, name) < math.inf:
                raise PlanError(f"limits.{name} must be at least {low}, not {getattr(self, name)}")

    def degree(self, num_devices: int) -> int:
        """The largest degree on these devices. Raises PlanError for a `max_degree` that devices or heads forbid."""
        if num_devices < 1:
            raise PlanError(f"num_devices is {num_devices}; a plan needs at least one device")
        aligned = num_devices & -num_devices
        heads = 1 << (self.num_heads.bit_length() - 1) if self.num_heads else aligned
        for most, bound in (
            (aligned, f"{aligned}, the largest power of two that divides the {num_devices} devices"),
            (heads, f"the {self.num_heads} query heads (limits.num_heads)"),
        ):
            if self.max_degree > most:
                raise PlanError(f"limits.max_degree {self.max_degree} is above {bound}; use at most {most}, or 0")
        return self.max_degree or min(aligned, heads)


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """One microbatch to place."""

    lengths_I: np.ndarray  # tokens of each sequence, int64
    work_I: np.ndarray  # float64
    num_devices: int
    max_degree: int
    limits: Limits
    least_compute: float  # of the largest compute of a device, under any plan
    least_memory: float  # tokens
    compute_limit: float  # within which planners try to keep every device
    memory_limit: float

    def plan(self, degrees: Sequence[int], firsts: Sequence[int]) -> ShardPlan:
        """The plan with its rounds. Raises PlanError if a device gets more tokens than `limits.tokens_per_device`."""
        plan = ShardPlan(
            self.num_devices,
            tuple(self.lengths_I.tolist()),
            tuple(self.work_I.tolist()),
            tuple(degrees),
            tuple(firsts),
            rounds(self.num_devices, degrees, firsts),
        )
        room, rows = self.limits.tokens_per_device, plan.rows()
        if room and rows.max() > room:
            device = int(rows.argmax())
            raise PlanError(
                f"device {device} would hold {rows[device]} tokens, limits.tokens_per_device is {room}: use smaller "
                "microbatches, more devices, a higher limits.max_degree or another planner"
            )
        return plan

    @property
    def few(self) -> bool:
        """Says whether there are no more sequences than devices, and these are a power of two. On 48 devices, which are
        three blocks, a short search sends more than FlexRL's own algorithm for some lengths."""
        return len(self.lengths_I) <= self.num_devices and not self.num_devices & (self.num_devices - 1)

    @property
    def weights(self) -> list[float]:
        """The traffic of one token at degree 1, 2, 4 and so on, summed over the devices of a group."""
        limits, degrees = self.limits, [2**k for k in range(self.max_degree.bit_length())]
        return [(degree - 1) / degree * (GAMMA if degree > limits.tau else 1.0) for degree in degrees]

    @property
    def shares(self) -> np.ndarray:
        """`[2, sequences]`: work and tokens of each sequence in units of one device's limit."""
        return np.array([self.work_I / (self.compute_limit or 1.0), self.lengths_I / self.memory_limit])


def pose(
    lengths: Sequence[int] | np.ndarray,
    num_devices: int,
    limits: Limits,
    work: Sequence[float] | Sequence[int] | np.ndarray | None = None,
) -> Problem:
    """The problem of placing sequences of `lengths` tokens within `limits`. The compute of a sequence is its `work`, or
    else `length**2`. Raises PlanError, naming sequence or field, for a problem that no planner can solve."""
    degree = limits.degree(num_devices)
    lengths_I = np.asarray(lengths)
    if lengths_I.ndim != 1 or (lengths_I.size and lengths_I.dtype.kind not in "iu"):
        raise PlanError(f"lengths must be one row of integers, not {lengths_I.dtype} of shape {lengths_I.shape}")
    lengths_I = lengths_I.astype(np.int64)
    if lengths_I.min(initial=1) < 1:
        index = int(np.argmax(lengths_I < 1))
        raise PlanError(f"sequence {index} has length {lengths_I[index]}; every sequence needs at least one token")
    work_I = lengths_I.astype(float) ** 2 if work is None else np.asarray(work, float)
    if work_I.shape != lengths_I.shape:
        raise PlanError(f"work has shape {work_I.shape}, but there are {len(lengths_I)} sequences")
    if not (np.isfinite(work_I) & (work_I >= 0)).all():
        index = int(np.argmin(np.isfinite(work_I) & (work_I >= 0)))
        raise PlanError(f"sequence {index} has work {work_I[index]}; work must be finite and not negative")
    least_compute = least_load(work_I, num_devices, degree)
    least_memory = least_load(lengths_I.astype(float), num_devices, degree)
    memory = max(limits.alpha * float(lengths_I.sum()) / num_devices, least_memory)
    room = limits.tokens_per_device
    if room and len(lengths_I):
        longest = int(lengths_I.argmax())
        if -(-int(lengths_I[longest]) // degree) > room:
            raise PlanError(
                f"sequence {longest} has {lengths_I[longest]} tokens, but {degree} devices hold {degree * room}: raise "
                f"limits.tokens_per_device ({room}) or limits.max_degree ({degree}), or shorten the sequence"
            )
        if least_memory > room:
            raise PlanError(
                f"{int(lengths_I.sum())} tokens do not fit {num_devices} devices of limits.tokens_per_device {room} at "
                f"limits.max_degree {degree}: one device would hold at least {math.ceil(least_memory)}"
            )
        # Each round may add a token of padding.
        memory = max(least_memory, min(memory, float(room - degree.bit_length())))
    return Problem(
        lengths_I=lengths_I,
        work_I=work_I,
        num_devices=num_devices,
        max_degree=degree,
        limits=limits,
        least_compute=least_compute,
        least_memory=least_memory,
        compute_limit=(1 + limits.tolerance) * least_compute,
        memory_limit=memory,
    )


def least_load(amounts_I: np.ndarray, num_devices: int, max_degree: int) -> float:
    """A lower bound of the largest load of a device under any plan: the mean, or more. Of the `k * blocks + 1` largest
    sequences, at least `k + 1` share one block of `max_degree` devices."""
    if not len(amounts_I):
        return 0.0
    blocks = num_devices // max_degree
    down = -np.sort(-amounts_I)
    total = np.concatenate([[0.0], np.cumsum(down)])
    k = np.arange((len(down) - 1) // blocks + 1)
    last = k * blocks + 1  # the k + 1 smallest of the `last` largest sequences
    meet = (total[last] - total[last - k - 1]).max() / max_degree
    return float(max(total[-1] / num_devices, meet))
