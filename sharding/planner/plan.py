"""A shard plan: on how many devices, and on which, each sequence of a microbatch is computed. numpy only.

Devices are numbered along the mesh in row-major order. A group of degree `p` is `p` consecutive devices beginning at a
multiple of `p`, so any two groups are disjoint or nested (FlexRL section 3.3), and a group is the product of the last
`log2(p)` mesh axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
        seen: list[int] = []
        for round in self.rounds:
            if round.degree < 1 or round.degree & (round.degree - 1) or self.num_devices % round.degree:
                raise PlanError(
                    f"{self.num_devices} devices have no round of degree {round.degree}: a power of two divides them"
                )
            if len(round.groups) != self.num_devices // round.degree:
                raise PlanError(f"a round of degree {round.degree} needs {self.num_devices // round.degree} groups")
            for group, members in enumerate(round.groups):
                for index in members:
                    if not 0 <= index < count:
                        raise PlanError(f"a round names sequence {index}, but there are {count}")
                    if self.degrees[index] != round.degree or self.firsts[index] != group * round.degree:
                        raise PlanError(f"sequence {index} stands in a round of another group than its own")
                    seen.append(index)
        if sorted(seen) != list(range(count)):
            raise PlanError("each sequence must stand in exactly one round")

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


def rounds(
    num_devices: int,
    lengths: Sequence[int],
    degrees: Sequence[int],
    firsts: Sequence[int],
    *,
    short: int = 0,
    cap: int = 0,
    most: int = 1,
) -> tuple[Round, ...]:
    """Packs the sequences of each group into sequence groups, and these into rounds (dynamic packing, section 3.4).

    Within a group, sequences of at most `short` tokens (h_pack) are joined up to `cap` tokens (H_pack); longer
    sequences stay alone. A degree has at most `most` rounds. It has one if `short` or `cap` is 0, and so has degree 1,
    which has no all-to-all to hide. A round lasts as long as the longest stream of its groups. Streams are therefore
    dealt longest first, each to the round that it lengthens least. The longest round of a degree comes first.
    """
    packed: list[Round] = []
    for degree in sorted(set(degrees), reverse=True):
        members: list[list[int]] = [[] for _ in range(num_devices // degree)]
        for index, (sharded, first) in enumerate(zip(degrees, firsts, strict=True)):
            if sharded == degree:
                members[first // degree].append(index)
        joined = not short or not cap or most == 1 or degree == 1
        packs = [[indices] if joined and indices else _join(indices, lengths, short, cap) for indices in members]
        packed.extend(Round(degree, groups) for groups in _deal(packs, lengths, min(most, max(map(len, packs)))))
    return tuple(packed)


def _join(indices: Sequence[int], lengths: Sequence[int], short: int, cap: int) -> list[list[int]]:
    """Sequence groups: long sequences alone, each short one in the first group that has room."""
    packs = [[i] for i in indices if lengths[i] > short]
    alone, sizes = len(packs), []
    for i in (i for i in indices if lengths[i] <= short):
        fits = next((k for k, size in enumerate(sizes) if size + lengths[i] <= cap), len(sizes))
        if fits == len(sizes):
            sizes.append(0)
            packs.append([])
        sizes[fits] += lengths[i]
        packs[alone + fits].append(i)
    return packs


def _deal(
    packs: Sequence[Sequence[list[int]]], lengths: Sequence[int], count: int
) -> list[tuple[tuple[int, ...], ...]]:
    """`[count][groups]`: the stream of each group in each round. The group with the most tokens is dealt first."""

    def size(pack: Sequence[int]) -> int:
        return sum(lengths[i] for i in pack)

    totals = [sum(map(size, group)) for group in packs]
    longest = [0] * count
    streams: list[list[list[int]]] = [[[] for _ in packs] for _ in range(count)]
    for group in sorted(range(len(packs)), key=lambda g: (-totals[g], g)):
        mine = [0] * count
        for pack in sorted(packs[group], key=lambda pack: (-size(pack), pack[0])):
            after = [mine[k] + size(pack) for k in range(count)]
            k = min(range(count), key=lambda k: (max(after[k] - longest[k], 0), after[k], k))
            mine[k] = after[k]
            streams[k][group] += pack
        longest = [max(pair) for pair in zip(longest, mine, strict=True)]
    order = sorted(range(count), key=lambda k: (-longest[k], k))
    return [tuple(tuple(sorted(stream)) for stream in streams[k]) for k in order if longest[k]]
