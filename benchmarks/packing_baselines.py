"""Schedulers say which sequences each device computes in which microbatch, so that devices wait little for each other.

    schedule = lb_mini(lengths, num_devices=8, limits=Limits(tokens_per_device=65536))
    print(makespan(schedule, barrier="minibatch"))

Under collective FSDP all devices meet at every layer of every microbatch, so that microbatches must be equally many
and equally long; under ODC they meet once a minibatch (ODC paper, sections 3 and 4). The schedulers are those of its
section 5.1 and appendix C: pure functions with the same arguments, in `SCHEDULERS` by name; numpy only. Nothing is
sharded: one device computes a sequence. `lb_mini` is that of `sharding.planner.packing`; the others, and verl's own
scheduler, are its baselines.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.cost_fit import forward_seconds
from sharding.cost import CostModel
from sharding.planner import packing
from sharding.planner.packing import as_many_each, fewest, karmarkar_karp, packed, shares_of
from sharding.planner.plan import Limits, PlanError, Problem, pose

Lengths = Sequence[int] | np.ndarray
Cost = CostModel | Callable[[int], float] | None
Work = Sequence[float] | Sequence[int] | np.ndarray
Microbatches = tuple[tuple[int, ...], ...]  # the sequences of each microbatch of one device, in order of execution
Minibatch = list[list[list[int]]]  # the sequences of each microbatch of each device, under construction


@dataclasses.dataclass(frozen=True)
class MicrobatchSchedule:
    """Device `d` computes the sequences `microbatches[d][m]` in its `m`-th microbatch.

    In an empty microbatch, a device only takes part in the collectives of the others. Devices may have different
    numbers of microbatches. `work` is the compute of each sequence, in any unit, and adds up over a microbatch.
    `budget` is the most tokens of a microbatch, 0 for no bound. `starts` are the indices of the first microbatch of
    each minibatch, the same on all devices. Raises PlanError unless every sequence is in exactly one microbatch and
    every microbatch is within the budget.
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
        """`[devices, microbatches]`: the work of each microbatch, 0 if a device has no such microbatch."""
        table = np.zeros((self.num_devices, int(self.counts().max(initial=0))))
        for device, microbatches in enumerate(self.microbatches):
            table[device, : len(microbatches)] = [sum(self.work[i] for i in members) for members in microbatches]
        return table


def makespan(schedule: MicrobatchSchedule, barrier: str = "microbatch") -> float:
    """The time until all devices are done, in the unit of `schedule.work`. At each barrier all wait for the slowest."""
    if barrier not in ("microbatch", "minibatch"):
        raise PlanError(f"barrier must be microbatch or minibatch, not {barrier!r}")
    loads = schedule.loads()
    if barrier == "minibatch":
        ends = [*schedule.starts[1:], loads.shape[1]]
        pairs = zip(schedule.starts, ends, strict=True)
        loads = np.stack([loads[:, start:end].sum(axis=1) for start, end in pairs], axis=1)
    return float(loads.max(axis=0, initial=0.0).sum())


def scheduler(deal: Callable[..., list[Minibatch]]) -> Callable[..., MicrobatchSchedule]:
    """Makes a scheduler out of `deal(problem, **options)`, which returns minibatches. In all minibatches but the last,
    all devices have equally many microbatches.

    `limits.tokens_per_device` is the most tokens of a microbatch, 0 for no bound; other limits of sharding are ignored.
    `work` is the compute of each sequence. Without it, `cost` gives the compute: a function of the length, or a cost
    model with `attention_seconds` and `linear_seconds`; without both, verl's `24576 * length + length**2`. Raises
    PlanError, naming sequence and field, if no schedule can hold the sequences.
    """

    def schedule(
        lengths: Lengths,
        num_devices: int,
        limits: Limits | None = None,
        *,
        work: Work | None = None,
        cost: Cost = None,
        **options: int,
    ) -> MicrobatchSchedule:
        problem = _pose(lengths, num_devices, limits or Limits(), work, cost)
        lengths_I, room = problem.lengths_I, problem.limits.tokens_per_device
        if room and lengths_I.max(initial=0) > room:
            worst = int(lengths_I.argmax())
            raise PlanError(
                f"sequence {worst} has {lengths_I[worst]} tokens, but a microbatch holds limits.tokens_per_device "
                f"{room}: raise it, shorten the sequence, or use a strategy that spreads sequences over devices"
            )
        minibatches = deal(problem, **options)
        starts = np.cumsum([0] + [len(minibatch[0]) for minibatch in minibatches[:-1]])
        devices = zip(*minibatches, strict=True)
        rows = [[tuple(members) for microbatches in device for members in microbatches] for device in devices]
        return MicrobatchSchedule(
            lengths=tuple(lengths_I.tolist()),
            work=tuple(problem.work_I.tolist()),
            microbatches=tuple(map(tuple, rows)),
            budget=room,
            starts=tuple(starts.tolist()),
        )

    schedule.__name__, schedule.__doc__ = deal.__name__, deal.__doc__
    return schedule


def _pose(lengths: Lengths, num_devices: int, limits: Limits, work: Work | None, cost: Cost) -> Problem:
    """The problem of dealing unsharded sequences, checked as by the planners."""
    free = dataclasses.replace(limits, max_degree=1, tokens_per_device=0)
    lengths_I = pose(lengths, num_devices, free).lengths_I
    if work is None and cost is None:
        work = 24576.0 * lengths_I + lengths_I.astype(float) ** 2
    elif work is None and callable(cost):
        work = np.array([cost(n) for n in lengths_I.tolist()], float)
    elif work is None:
        work = forward_seconds(cost, lengths_I)
    problem = pose(lengths_I, num_devices, free, work)
    return dataclasses.replace(problem, limits=limits)  # the tokens of a device bound only a microbatch


@scheduler
def local_sort(problem: Problem) -> list[Minibatch]:
    """Deals sequence `i` to device `i` modulo the devices; each device computes the longest first, unpacked (section
    5.1)."""
    lengths_I, count = problem.lengths_I, problem.num_devices
    shares = [range(device, len(lengths_I), count) for device in range(count)]
    alone = [[[i] for i in sorted(share, key=lambda i: (-lengths_I[i], i))] for share in shares]
    most = max(map(len, alone))
    return [[microbatches + [[]] * (most - len(microbatches)) for microbatches in alone]]


@scheduler
def lb_micro(problem: Problem) -> list[Minibatch]:
    """Equal numbers of sequences and of microbatches on all devices, for a barrier at each microbatch (appendix C.1).

    Karmarkar-Karp with exchanges deals the sequences to devices; their numbers differ by one at most. Karmarkar-Karp
    deals each device's sequences to its microbatches; the number of microbatches grows until all fit on all devices.
    The `m`-th heaviest microbatches run together, which is the best order. The appendix does not mention exchanges, but
    without them devices are far less even than Tables 4 and 6 say (`docs/log.md`).
    """
    return [together(problem, shares_of(as_many_each(problem.work_I, problem.num_devices), problem.num_devices))]


@scheduler
def lb_mini(problem: Problem) -> list[Minibatch]:
    """Deals sequences by `sharding.planner.packing`: devices are even over the whole minibatch."""
    room = problem.limits.tokens_per_device
    return [packing.lb_mini(problem.lengths_I, problem.work_I, problem.num_devices, room)]


SCHEDULERS = {packer.__name__: packer for packer in (local_sort, lb_micro, lb_mini)}


def together(problem: Problem, shares: Sequence[list[int]]) -> Minibatch:
    """The microbatches of Karmarkar-Karp by work: on all devices the smallest number with which all devices fit."""
    lengths_I, work_I, room = problem.lengths_I, problem.work_I, problem.limits.tokens_per_device
    count = max(fewest(lengths_I, share, room) for share in shares)
    while True:
        tried = [packed(lengths_I, work_I, share, count, room, by=(work_I,)) for share in shares]
        fit = [microbatches for microbatches in tried if microbatches is not None]
        if len(fit) == len(tried):
            return fit
        count += 1


@scheduler
def verl_native(problem: Problem, minibatch: int = 0, seed: int = 0) -> list[Minibatch]:
    """Balances as verl does: over the global batch, before it is cut into minibatches (appendix C.2).

    Each device shuffles its equal share, by `seed`, and cuts it into minibatches of `minibatch` sequences a device (0:
    one minibatch), so each minibatch is uneven; each is packed as by `lb_micro`. The optimized form (C.3) is `lb_micro`
    for each minibatch. Unlike verl's published code, this function never exceeds the budget.
    """
    if minibatch < 0:
        raise PlanError(f"minibatch is {minibatch} sequences a device; use 0 for all")
    shares = shares_of(karmarkar_karp(problem.work_I, problem.num_devices, equal_size=True), problem.num_devices)
    size = minibatch or max(1, *map(len, shares), 1)
    if minibatch:
        shares = [np.random.default_rng((seed, d)).permutation(np.array(s, int)).tolist() for d, s in enumerate(shares)]
    cuts = range(0, max(1, *map(len, shares)), size)
    return [together(problem, [sorted(share[at : at + size]) for share in shares]) for at in cuts]


def bubble_rate(schedule: MicrobatchSchedule, cost: Cost = None, barrier: str = "microbatch") -> float:
    """The share of all devices' time in which they wait because of uneven work (appendix G): 0 is perfect.

    Collective FSDP waits at each `microbatch`, ODC at each `minibatch`. `cost` is that of the schedulers and replaces
    `schedule.work`. Communication is not counted.
    """
    if cost is not None:
        work = local_sort(schedule.lengths, schedule.num_devices, cost=cost).work
        schedule = dataclasses.replace(schedule, work=work)
    total = schedule.num_devices * makespan(schedule, barrier)
    return max(1.0 - float(schedule.loads().sum()) / total, 0.0) if total else 0.0
