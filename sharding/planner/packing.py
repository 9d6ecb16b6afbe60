"""Schedulers say which sequences each device computes in which microbatch, so that devices wait little for each other.

    schedule = lb_mini(lengths, num_devices=8, limits=Limits(tokens_per_device=65536))
    print(bubble_rate(schedule, barrier="minibatch"))

Under collective FSDP all devices meet at every layer of every microbatch, so that microbatches must be equally many
and equally long; under ODC they meet once a minibatch (ODC paper, sections 3 and 4). The schedulers are those of its
section 5.1 and appendix C, pure functions that are called alike and stand in `SCHEDULERS` by name; numpy only. Nothing
is sharded: a sequence is computed by one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from .baselines import longest_first
from .limits import Limits, SequenceCost, pose
from .partition import karmarkar_karp, swapped
from .plan import PlanError

Lengths = Sequence[int] | np.ndarray
Cost = SequenceCost | Callable[[int], float] | None
Work = Sequence[float] | Sequence[int] | np.ndarray
Microbatches = tuple[tuple[int, ...], ...]  # the sequences of each microbatch of one device, in order of execution


@dataclasses.dataclass(frozen=True)
class MicrobatchSchedule:
    """Device `d` computes the sequences `microbatches[d][m]` in its `m`-th microbatch.

    An empty microbatch is one in which a device only takes part in the collectives of the others. Devices may have
    different numbers of microbatches. `work` is the compute of each sequence, in any unit, and adds up over a
    microbatch. `budget` is the most tokens of a microbatch, 0 for no bound. `starts` are the indices, the same on all
    devices, of the first microbatch of each minibatch. Raises PlanError unless every sequence is there exactly once
    and every microbatch within the budget.
    """

    lengths: tuple[int, ...]
    work: tuple[float, ...]
    microbatches: tuple[Microbatches, ...]
    budget: int = 0
    starts: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not self.microbatches or len(self.work) != len(self.lengths):
            raise PlanError("a schedule needs at least one device, and work and length of every sequence")
        seen = sorted(i for microbatches in self.microbatches for members in microbatches for i in members)
        if seen != list(range(len(self.lengths))):
            raise PlanError("each sequence must stand in exactly one microbatch")
        if self.starts[:1] != (0,) or list(self.starts) != sorted(set(self.starts)):
            raise PlanError(f"starts of minibatches must be 0 and then increase, not {self.starts}")
        for device, microbatches in enumerate(self.microbatches):
            for number, members in enumerate(microbatches):
                tokens = sum(self.lengths[i] for i in members)
                if self.budget and tokens > self.budget:
                    raise PlanError(
                        f"microbatch {number} of device {device} has {tokens} tokens, the budget is {self.budget}"
                    )

    @property
    def num_devices(self) -> int:
        return len(self.microbatches)

    def counts(self) -> np.ndarray:
        """`[devices]` int: microbatches of each device."""
        return np.array([len(microbatches) for microbatches in self.microbatches], int)

    def loads(self) -> np.ndarray:
        """`[devices, microbatches]`: the work of each, 0 where a device has no such microbatch."""
        table = np.zeros((self.num_devices, int(self.counts().max(initial=0))))
        for device, microbatches in enumerate(self.microbatches):
            table[device, : len(microbatches)] = [sum(self.work[i] for i in members) for members in microbatches]
        return table


def makespan(schedule: MicrobatchSchedule, barrier: str = "microbatch") -> float:
    """When the last device is done, in the unit of `schedule.work`: all wait for the slowest at every barrier."""
    if barrier not in ("microbatch", "minibatch"):
        raise PlanError(f"barrier must be microbatch or minibatch, not {barrier!r}")
    loads = schedule.loads()
    if barrier == "minibatch":
        ends = [*schedule.starts[1:], loads.shape[1]]
        pairs = zip(schedule.starts, ends, strict=True)
        loads = np.stack([loads[:, start:end].sum(axis=1) for start, end in pairs], axis=1)
    return float(loads.max(axis=0, initial=0.0).sum())


def bubble_rate(schedule: MicrobatchSchedule, cost: Cost = None, barrier: str = "microbatch") -> float:
    """The share of all devices' time in which they wait because of uneven work (appendix G): 0 is perfect.

    Collective FSDP waits at each `microbatch`, ODC at each `minibatch`. `cost` as for the schedulers, `schedule.work`
    if not given. Communication is not counted.
    """
    if cost is not None:
        work = _work(schedule.lengths, schedule.num_devices, Limits(), None, cost)[1]
        schedule = dataclasses.replace(schedule, work=tuple(work.tolist()))
    total = schedule.num_devices * makespan(schedule, barrier)
    return max(1.0 - float(schedule.loads().sum()) / total, 0.0) if total else 0.0


def local_sort(
    lengths: Lengths,
    num_devices: int,
    limits: Limits | None = None,
    *,
    work: Work | None = None,
    cost: Cost = None,
) -> MicrobatchSchedule:
    """Each device its share in the order given, one after the other to the next device; longest first, nothing packed.

    `limits.tokens_per_device` is the most tokens of a microbatch, 0 for no bound; nothing else in `limits` that is
    about sharding counts. `work` is the compute of each sequence; without it, `cost`: a function of the length, or a
    cost model with `attention_seconds` and `linear_seconds`; without both, `24576 * length + length**2`, which is
    verl's. Raises PlanError, with sequence and field, for whatever no schedule can hold. (Section 5.1.)
    """
    lengths_I, work_I, room = _problem(lengths, num_devices, limits, work, cost)
    shares = [list(range(device, len(lengths_I), num_devices)) for device in range(num_devices)]
    alone = [[[i] for i in sorted(share, key=lambda i: (-lengths_I[i], i))] for share in shares]
    return _schedule(lengths_I, work_I, room, [_even(alone)])


def lb_micro(
    lengths: Lengths,
    num_devices: int,
    limits: Limits | None = None,
    *,
    work: Work | None = None,
    cost: Cost = None,
) -> MicrobatchSchedule:
    """Equal numbers of sequences and of microbatches on all devices, for a barrier at each (appendix C.1).

    Karmarkar-Karp with exchanges deals the sequences to devices, as many to each up to one. Karmarkar-Karp deals those
    of each device to its microbatches, of which there are ever more until every one of every device fits. The `m`-th
    heaviest microbatches run together, which is the best order. The appendix does not tell of exchanges, but without
    them devices are far less even than Tables 4 and 6 say (`docs/log.md`). Arguments and errors as for `local_sort`.
    """
    lengths_I, work_I, room = _problem(lengths, num_devices, limits, work, cost)
    shares = _shares(_as_many_each(work_I, num_devices), num_devices)
    return _schedule(lengths_I, work_I, room, [_together(shares, lengths_I, work_I, room)])


def lb_mini(
    lengths: Lengths,
    num_devices: int,
    limits: Limits | None = None,
    *,
    work: Work | None = None,
    cost: Cost = None,
) -> MicrobatchSchedule:
    """Devices even over the whole minibatch, however many sequences and microbatches each has (section 4, C.1).

    The best of Karmarkar-Karp, of longest first and of the shares of `lb_micro`, each improved by exchanges. So its
    makespan with one barrier at the end never exceeds that of `lb_micro`, be its barriers one or many. Then each device
    packs alone, in as many microbatches as it takes until every one fits: even in tokens, since work need not be.
    Only for ODC: numbers of microbatches differ, and a device may have none. Arguments and errors as for `local_sort`.
    """
    lengths_I, work_I, room = _problem(lengths, num_devices, limits, work, cost)
    starts = (
        karmarkar_karp(work_I, num_devices),
        longest_first(work_I, num_devices),
        _as_many_each(work_I, num_devices),
    )
    dealt = [swapped(work_I, bins, num_devices) for bins in starts]
    bins = min(dealt, key=lambda bins: np.bincount(bins, work_I, num_devices).max(initial=0.0))
    devices = []
    for share in _shares(bins, num_devices):
        count = _fewest(share, lengths_I, room)
        while (microbatches := _packed(share, lengths_I, room, count, by=(lengths_I, work_I))) is None:
            count += 1
        devices.append(_heaviest_first(microbatches, work_I))
    return _schedule(lengths_I, work_I, room, [devices])


def verl_native(
    lengths: Lengths,
    num_devices: int,
    limits: Limits | None = None,
    *,
    work: Work | None = None,
    cost: Cost = None,
    minibatch: int = 0,
    seed: int = 0,
) -> MicrobatchSchedule:
    """What verl does: devices are balanced over the global batch, before that is cut into minibatches (appendix C.2).

    Each device shuffles its equal share, by `seed`, and cuts it into minibatches of `minibatch` sequences a device (0:
    one minibatch), so each of them is uneven; each is packed as by `lb_micro`. The optimized form (C.3) is `lb_micro`
    for each minibatch. Unlike verl's published code, this one never exceeds the budget. Arguments and errors as for
    `local_sort`.
    """
    if minibatch < 0:
        raise PlanError(f"minibatch is {minibatch} sequences a device; use 0 for all")
    lengths_I, work_I, room = _problem(lengths, num_devices, limits, work, cost)
    shares = _shares(karmarkar_karp(work_I, num_devices, equal_size=True), num_devices)
    size = minibatch or max(1, *map(len, shares), 1)
    if minibatch:
        shares = [np.random.default_rng((seed, d)).permutation(np.array(s, int)).tolist() for d, s in enumerate(shares)]
    cuts = range(0, max(1, *map(len, shares)), size)
    parts = [[sorted(share[at : at + size]) for share in shares] for at in cuts]
    return _schedule(lengths_I, work_I, room, [_together(part, lengths_I, work_I, room) for part in parts])


SCHEDULERS: dict[str, Callable[..., MicrobatchSchedule]] = {
    "local_sort": local_sort,
    "lb_micro": lb_micro,
    "lb_mini": lb_mini,
    "verl_native": verl_native,
}


def _work(
    lengths: Lengths, num_devices: int, limits: Limits, work: Work | None, cost: Cost
) -> tuple[np.ndarray, np.ndarray]:
    """`[sequences]` int64 lengths and float64 work, checked as by the planners, for no sharding and no bound."""
    free = dataclasses.replace(limits, max_degree=1, tokens_per_device=0)
    checked = pose(lengths, num_devices, free).lengths_I
    if work is None and cost is None:
        work = 24576.0 * checked + checked.astype(float) ** 2
    elif work is None and callable(cost):
        work = np.array([cost(n) for n in checked.tolist()], float)
    return checked, pose(checked, num_devices, free, work, None if callable(cost) else cost).work_I


def _problem(
    lengths: Lengths, num_devices: int, limits: Limits | None, work: Work | None, cost: Cost
) -> tuple[np.ndarray, np.ndarray, int]:
    limits = limits or Limits()
    lengths_I, work_I = _work(lengths, num_devices, limits, work, cost)
    room = limits.tokens_per_device
    if room and lengths_I.max(initial=0) > room:
        worst = int(lengths_I.argmax())
        raise PlanError(
            f"sequence {worst} has {lengths_I[worst]} tokens, but a microbatch holds limits.tokens_per_device {room}: "
            "raise it, shorten the sequence, or use a strategy that spreads sequences over devices"
        )
    return lengths_I, work_I, room


def _as_many_each(work_I: np.ndarray, count: int) -> list[int]:
    return swapped(work_I, karmarkar_karp(work_I, count, equal_size=True), count, equal_size=True)


def _shares(bins: Sequence[int], count: int) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(count)]
    for i, bin in enumerate(bins):
        shares[bin].append(i)
    return shares


def _fewest(share: Sequence[int], lengths_I: np.ndarray, room: int) -> int:
    """The number of microbatches below which no packing fits."""
    tokens = int(lengths_I[list(share)].sum()) if share else 0
    return -(-tokens // room) if room else min(len(share), 1)


def _packed(
    share: list[int], lengths_I: np.ndarray, room: int, count: int, by: Sequence[np.ndarray]
) -> list[list[int]] | None:
    """`count` microbatches that fit, made even in one of the amounts `by`, the first that does; None if none does.
    One always does for as many microbatches as sequences, which then stand alone."""
    for amounts in by:
        bins = _shares(karmarkar_karp(amounts[share], count), count) if share else [[]] * count
        microbatches = [[share[k] for k in bin] for bin in bins]
        if not room or all(lengths_I[members].sum() <= room for members in microbatches if members):
            return microbatches
    return None


def _together(
    shares: Sequence[list[int]], lengths_I: np.ndarray, work_I: np.ndarray, room: int
) -> list[list[list[int]]]:
    """The smallest equal number of microbatches in which Karmarkar-Karp by work makes those of all devices fit."""
    count = max(_fewest(share, lengths_I, room) for share in shares)
    while True:
        packed = [_packed(share, lengths_I, room, count, by=(work_I,)) for share in shares]
        fit = [microbatches for microbatches in packed if microbatches is not None]
        if len(fit) == len(packed):
            return [_heaviest_first(microbatches, work_I) for microbatches in fit]
        count += 1


def _heaviest_first(microbatches: list[list[int]], work_I: np.ndarray) -> list[list[int]]:
    return sorted(microbatches, key=lambda members: (-float(work_I[members].sum()) if members else 0.0, members))


def _even(devices: Sequence[list[list[int]]]) -> list[list[list[int]]]:
    """Adds empty microbatches at the end, so that all devices have as many."""
    most = max(map(len, devices))
    return [microbatches + [[]] * (most - len(microbatches)) for microbatches in devices]


def _schedule(
    lengths_I: np.ndarray, work_I: np.ndarray, room: int, minibatches: Sequence[Sequence[list[list[int]]]]
) -> MicrobatchSchedule:
    """Joins minibatches, all of which but the last have as many microbatches on all devices."""
    starts = np.cumsum([0] + [len(part[0]) for part in minibatches[:-1]])
    rows = [[tuple(members) for part in device for members in part] for device in zip(*minibatches, strict=True)]
    return MicrobatchSchedule(
        lengths=tuple(lengths_I.tolist()),
        work=tuple(work_I.tolist()),
        microbatches=tuple(map(tuple, rows)),
        budget=room,
        starts=tuple(starts.tolist()),
    )
