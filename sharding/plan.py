"""A shard plan: on how many devices, and on which, each sequence of a microbatch is computed. numpy only.

Devices are numbered along the mesh in row-major order. A group of degree `p` is `p` consecutive devices beginning at a
multiple of `p`, so any two groups are disjoint or nested (FlexRL section 3.3), and a group is the product of the last
`log2(p)` mesh axes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np


class PlanError(ValueError):
    """There is no plan within the limits. Names the sequence or the field, and what to change."""


@dataclasses.dataclass(frozen=True)
class Round:
    """What all devices do at once: one sequence group on each group of `degree` devices.

    `groups[g]` are the sequences, in order, of the packed stream of devices `[g * degree, (g + 1) * degree)`; a stream
    is cut into `degree` chunks of which the first ones may be one token longer.
    """

    degree: int
    groups: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """Sequence `i` is computed by devices `[firsts[i], firsts[i] + degrees[i])`.

    `rounds` stand in the order of execution, degrees never increasing (highest sharding first); each sequence is in
    exactly one of them. `work` is the compute of each sequence, in any unit: by default the attention proxy `length**2`.
    """

    num_devices: int
    lengths: tuple[int, ...]
    work: tuple[float, ...]
    degrees: tuple[int, ...]
    firsts: tuple[int, ...]
    rounds: tuple[Round, ...]

    def __post_init__(self) -> None:
        check(self)

    def compute(self) -> np.ndarray:
        """`[devices]`: C_d, the sum of `work / p` over the sequences of each device."""
        return self._over_devices(np.array(self.work) / np.array(self.degrees))

    def memory(self) -> np.ndarray:
        """`[devices]`: M_d, the tokens of each device."""
        return self._over_devices(np.array(self.lengths) / np.array(self.degrees))

    def traffic(self) -> np.ndarray:
        """`[devices]`: token vectors that leave each device in one all-to-all, the sum of `length * (p - 1) / p**2`."""
        p = np.array(self.degrees, float)
        return self._over_devices(np.array(self.lengths) * (p - 1) / p**2)

    @property
    def balance(self) -> float:
        """Largest over mean compute of a device; 1 is perfect."""
        return _peak(self.compute())

    @property
    def memory_ratio(self) -> float:
        """Largest over mean tokens of a device."""
        return _peak(self.memory())

    def _over_devices(self, share: np.ndarray) -> np.ndarray:
        firsts, degrees = np.array(self.firsts, int), np.array(self.degrees, int)
        edges = np.zeros(self.num_devices + 1)
        np.add.at(edges, firsts, share)
        np.add.at(edges, firsts + degrees, -share)
        return np.maximum(np.cumsum(edges)[:-1], 0.0)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> ShardPlan:
        """Raises PlanError, naming what is missing, for anything that `to_json` did not write."""
        try:
            raw = json.loads(text)
            rounds = tuple(Round(r["degree"], tuple(map(tuple, r["groups"]))) for r in raw["rounds"])
            sequences = {name: tuple(raw[name]) for name in ("lengths", "work", "degrees", "firsts")}
            return ShardPlan(num_devices=raw["num_devices"], rounds=rounds, **sequences)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise PlanError(f"this is not a serialised shard plan: {type(error).__name__} {error}") from error


def _peak(per_device: np.ndarray) -> float:
    mean = float(per_device.mean())
    return float(per_device.max()) / mean if mean else 1.0


def check(plan: ShardPlan) -> None:
    """Raises PlanError if the plan is not executable: groups that are not aligned, degrees that increase, sequences
    that are missing from the rounds, there twice, or in a round of another group."""
    count = len(plan.lengths)
    if not len(plan.work) == len(plan.degrees) == len(plan.firsts) == count:
        raise PlanError("lengths, work, degrees and firsts must be of equal length")
    for index, (degree, first) in enumerate(zip(plan.degrees, plan.firsts, strict=True)):
        if degree < 1 or degree & (degree - 1) or first % degree or not 0 <= first <= plan.num_devices - degree:
            raise PlanError(
                f"sequence {index}: devices [{first}, {first + degree}) are no aligned power-of-two group of "
                f"{plan.num_devices} devices"
            )
    degrees = [one.degree for one in plan.rounds]
    if degrees != sorted(degrees, reverse=True):
        raise PlanError(f"rounds must stand in decreasing degree, got {degrees}")
    seen: list[int] = []
    for one in plan.rounds:
        if len(one.groups) != plan.num_devices // one.degree:
            raise PlanError(f"a round of degree {one.degree} needs {plan.num_devices // one.degree} groups")
        for group, members in enumerate(one.groups):
            for index in members:
                if plan.degrees[index] != one.degree or plan.firsts[index] != group * one.degree:
                    raise PlanError(f"sequence {index} stands in a round of another group than its own")
                seen.append(index)
    if sorted(seen) != list(range(count)):
        raise PlanError("each sequence must stand in exactly one round")


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
    """Packs the sequences of each group into sequence groups and those into rounds (dynamic packing, section 3.4).

    Within a group, sequences of at most `short` tokens (h_pack) are joined up to `cap` tokens (H_pack); longer ones
    stand alone. The k-th largest sequence groups of all groups of a degree form a round; there are at most `most`
    rounds a degree, into the last of which the rest is packed. `short` or `cap` of 0 joins everything.
    """
    made: list[Round] = []
    for degree in sorted(set(degrees), reverse=True):
        streams: list[list[list[int]]] = [[] for _ in range(num_devices // degree)]
        members: list[list[int]] = [[] for _ in streams]
        for index, (own, first) in enumerate(zip(degrees, firsts, strict=True)):
            if own == degree:
                members[first // degree].append(index)
        for group, indices in enumerate(members):
            streams[group] = _join(indices, lengths, short, cap, most)
        depth = max(map(len, streams))
        for k in range(depth):
            made.append(Round(degree, tuple(tuple(s[k]) if k < len(s) else () for s in streams)))
    return tuple(made)


def _join(indices: Sequence[int], lengths: Sequence[int], short: int, cap: int, most: int) -> list[list[int]]:
    if not indices:
        return []
    if not short or not cap or most == 1:
        return [list(indices)]
    packs: list[list[int]] = [[i] for i in indices if lengths[i] > short]
    sizes = [lengths[pack[0]] for pack in packs]
    open_pack = -1
    for i in indices:
        if lengths[i] <= short:
            if open_pack < 0 or sizes[open_pack] + lengths[i] > cap:
                open_pack = len(packs)
                packs.append([])
                sizes.append(0)
            packs[open_pack].append(i)
            sizes[open_pack] += lengths[i]
    packs.sort(key=lambda pack: (-sum(lengths[i] for i in pack), pack[0]))
    return [*packs[: most - 1], [i for pack in packs[most - 1 :] for i in pack]] if len(packs) > most else packs
