"""The scheduler of verl that those of `sharding.planner.packing` are compared with, and how long devices wait."""

import dataclasses

import numpy as np

from sharding.planner.limits import Problem
from sharding.planner.packing import (
    Cost,
    MicrobatchSchedule,
    Minibatch,
    local_sort,
    makespan,
    scheduler,
    shares_of,
    together,
)
from sharding.planner.partition import karmarkar_karp
from sharding.planner.plan import PlanError


@scheduler
def verl_native(problem: Problem, minibatch: int = 0, seed: int = 0) -> list[Minibatch]:
    """Balances as verl does: over the global batch, before that is cut into minibatches (appendix C.2).

    Each device shuffles its equal share, by `seed`, and cuts it into minibatches of `minibatch` sequences a device (0:
    one minibatch), so each of them is uneven; each is packed as by `lb_micro`. The optimized form (C.3) is `lb_micro`
    for each minibatch. Unlike verl's published code, this one never exceeds the budget.
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

    Collective FSDP waits at each `microbatch`, ODC at each `minibatch`. `cost` as for the schedulers, `schedule.work`
    if not given. Communication is not counted.
    """
    if cost is not None:
        work = local_sort(schedule.lengths, schedule.num_devices, cost=cost).work
        schedule = dataclasses.replace(schedule, work=work)
    total = schedule.num_devices * makespan(schedule, barrier)
    return max(1.0 - float(schedule.loads().sum()) / total, 0.0) if total else 0.0
