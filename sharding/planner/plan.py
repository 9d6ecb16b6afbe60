"""A shard plan: on how many devices, and on which, each sequence of a microbatch is computed. numpy only.

Devices are numbered along the mesh in row-major order. A group of degree `p` is `p` consecutive devices beginning at a
multiple of `p`, so any two groups are disjoint or nested (FlexRL section 3.3), and a group is the product of the last
`log2(p)` mesh axes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class PlanError(ValueError):
    """No plan exists within the limits. The message names the sequence or the field, and a remedy."""


@dataclasses.dataclass(frozen=True)
class Round:
    """A round of a plan, computed by all devices at once: one sequence group on each group of `degree` devices.

    `groups[g]` are the sequences, in order, of the packed stream of devices `[g * degree, (g + 1) * degree)`. A stream
    is cut into `degree` chunks; the first chunks may be one token longer.
    """

    degree: int
    groups: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """Devices `[firsts[i], firsts[i] + degrees[i])` compute sequence `i`.

    `rounds` are in the order of execution, degrees never increasing (highest sharding first); each sequence is in
    exactly one of them. `work` is the compute of each sequence, in any unit; by default `length**2`.
    """

    num_devices: int
    lengths: tuple[int, ...]
    work: tuple[float, ...]
    degrees: tuple[int, ...]
    firsts: tuple[int, ...]
    rounds: tuple[Round, ...]

    def __post_init__(self) -> None:
        """Raises PlanError if the plan is not executable: groups that are not aligned, degrees that increase, or
        sequences that are in no round, in two, or in a round of another group."""
        count = len(self.lengths)
        if not len(self.work) == len(self.degrees) == len(self.firsts) == count:
            raise PlanError("lengths, work, degrees and firsts must be of equal length")
        if self.num_devices < 1:
            raise PlanError(f"a plan needs at least one device, not {self.num_devices}")
        for index, (degree, first) in enumerate(zip(self.degrees, self.firsts, strict=True)):
            if degree < 1 or degree & (degree - 1) or first % degree or not 0 <= first <= self.num_devices - degree:
                raise PlanError(
                    f"sequence {index}: devices [{first}, {first + degree}) are no aligned power-of-two group of "
                    f"{self.num_devices} devices"
                )
        degrees = [round.degree for round in self.rounds]
        if degrees != sorted(degrees, reverse=True):
            raise PlanError(f"rounds must stand in decreasing degree, got {degrees}")
        for round in self.rounds:
            if round.degree < 1 or round.degree & (round.degree - 1) or self.num_devices % round.degree:
                raise PlanError(
                    f"{self.num_devices} devices have no round of degree {round.degree}: a power of two divides them"
                )
            if len(round.groups) != self.num_devices // round.degree:
                raise PlanError(f"a round of degree {round.degree} needs {self.num_devices // round.degree} groups")
        placed = sorted(
            (index, round.degree, group * round.degree)
            for round in self.rounds
            for group, members in enumerate(round.groups)
            for index in members
        )
        if placed != list(zip(range(count), self.degrees, self.firsts, strict=True)):
            raise PlanError("each sequence must stand in exactly one round, and there on its own group")

    def compute(self) -> np.ndarray:
        """`[devices]`: C_d, the sum of `work / p` over the sequences of each device."""
        return self.over_devices(np.array(self.work) / np.array(self.degrees))

    def memory(self) -> np.ndarray:
        """`[devices]`: M_d, the tokens of each device."""
        return self.over_devices(np.array(self.lengths) / np.array(self.degrees))

    def traffic(self) -> np.ndarray:
        """`[devices]`: token vectors that leave each device in one all-to-all, the sum of `length * (p - 1) / p**2`."""
        p = np.array(self.degrees, float)
        return self.over_devices(np.array(self.lengths) * (p - 1) / p**2)

    @property
    def balance(self) -> float:
        """Largest over mean compute of a device; 1 is perfect."""
        return _peak(self.compute())

    @property
    def memory_ratio(self) -> float:
        """Largest over mean tokens of a device."""
        return _peak(self.memory())

    def over_devices(self, share: np.ndarray) -> np.ndarray:
        """`[devices]`: the sum of `share`, an amount for each sequence on each of its devices."""
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
    """Attention heads as they are dealt to the devices of a group, each of which computes equally many.

    If heads do not divide evenly, zeros fill them up, or several devices get copies of a KV head and compute a part of
    its query heads each: `kv` KV heads after filling up, each copied `copies` times, with `queries` query heads for
    each copy. All copies are cut into `degree` consecutive equal parts.
    """

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
    """The deal with the fewest query heads a device (compute), then the fewest KV heads (traffic).

    KV heads that `degree` divides are neither filled up nor copied. Zeros multiply the compute of attention by
    `local_queries * degree / num_heads`: 8 / 7 for 28/4 heads at 8. Raises PlanError for a degree above the number of
    query heads, and ValueError for heads that are no multiple of the KV heads.
    """
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads can't be shared by {num_kv_heads} KV heads")
    if degree > num_heads:
        raise PlanError(
            f"a sequence can't be sharded over {degree} devices by {num_heads} attention heads; lower the degree cap"
        )
    ratio = num_heads // num_kv_heads
    deals = []
    for copies in range(1, min(degree, ratio) + 1):
        step = degree // math.gcd(degree, copies)  # KV heads must be a multiple of `step`
        deals.append(Deal(degree, -(-num_kv_heads // step) * step, copies, -(-ratio // copies)))
    return min(deals, key=lambda deal: (deal.local_queries, deal.local_kv, deal.copies))
