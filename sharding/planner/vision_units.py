"""Deals images and frame pairs to devices that run the vision tower: evenly, and near the units' own tokens."""

import dataclasses
import heapq
import itertools
from collections.abc import Sequence

import numpy as np

TARGETS = (1.05, 1.03, 1.01)  # ratios of a device's load to the mean load up to which units stay on their home devices
EPS = 1e-9


def spread_vision(
    units: Sequence[int] | np.ndarray,
    home_first: Sequence[int] | np.ndarray,
    home_degree: Sequence[int] | np.ndarray,
    num_devices: int,
    *,
    replica: int = 0,
) -> np.ndarray:
    """Returns the device of each unit, `[units]` int64. The units of the vision tower (images and frame pairs) are
    spread over the devices of their replica: `replica` consecutive devices, or all (0).

    `units`: patches of each unit. Consecutive equal units of one home (the frame pairs of a video) are dealt together.
    `home_first`, `home_degree`: the devices that hold the tokens of each unit, its home. In each replica the largest
    load is at most 1.05 times the mean or, if that is more, the largest load of longest-first placement. Among the
    placements tried within this bound, the one with the most patches at home is taken.
    """
    replica = replica or num_devices
    rows = [np.asarray(row, np.int64).reshape(-1) for row in (units, home_first, home_degree)]
    devices = np.zeros(len(rows[0]), np.int64)
    runs: list[_Run] = []
    for unit, members in itertools.groupby(zip(*(row.tolist() for row in rows), strict=True)):
        runs.append(_Run(runs[-1].start + runs[-1].count if runs else 0, len(list(members)), *unit))
    runs.sort(key=lambda run: (-run.size, run.start))
    for base in range(0, num_devices, replica):
        _replica([run for run in runs if run.first // replica == base // replica], base, replica, devices)
    return devices


@dataclasses.dataclass(frozen=True)
class _Run:
    """`count` units from number `start` on, of `size` patches each; their home is `degree` devices from `first`."""

    start: int
    count: int
    size: int
    first: int
    degree: int


def _replica(runs: Sequence[_Run], base: int, replica: int, devices: np.ndarray) -> None:
    if not runs:
        return
    mean = sum(run.count * run.size for run in runs) / replica
    even = _spread(runs, base, replica, 0.0)  # no unit prefers its home: the evenest placement
    most = max(TARGETS[0] * mean, float(even[0].max()))
    kept = even
    for target in (most, *(t * mean for t in TARGETS)):
        tried = _spread(runs, base, replica, target)
        if tried[0].max() <= most + EPS and tried[1] > kept[1]:
            kept = tried
    for run, counts in zip(runs, kept[2], strict=True):
        devices[run.start : run.start + run.count] = base + np.repeat(np.arange(replica), counts)


def _spread(runs: Sequence[_Run], base: int, replica: int, target: float) -> tuple[np.ndarray, int, list[np.ndarray]]:
    """Returns loads of a replica's devices (patches), patches at home, and units of each run on each device. Places
    runs in order. A unit stays home while its device stays within `target`, else goes to the least loaded device."""
    loads, home, placed = np.zeros(replica), 0, []
    for run in runs:
        counts = np.zeros(replica, np.int64)
        here = slice(run.first - base, run.first - base + run.degree)
        room = np.maximum((target - loads[here] + EPS) // run.size, 0).astype(np.int64)
        if room.any():
            counts[here] = _level(loads[here], run.size, min(run.count, int(room.sum())), room)
            loads += counts * run.size
        rest = run.count - int(counts.sum())
        if rest:
            more = _level(loads, run.size, rest, np.full(replica, rest))
            loads += more * run.size
            counts += more
        home += int(counts[here].sum()) * run.size
        placed.append(counts)
    return loads, home, placed


def _level(loads: np.ndarray, size: int, count: int, room: np.ndarray) -> np.ndarray:
    """Counts how many of `count` equal units each device gets if each goes to the least loaded device with `room`."""
    heap = [(load, device) for device, load in enumerate(loads.tolist()) if room[device] > 0]
    heapq.heapify(heap)
    left, counts = room.tolist(), [0] * len(loads)
    for _ in range(count):
        load, device = heap[0]
        counts[device] += 1
        if counts[device] < left[device]:
            heapq.heapreplace(heap, (load + size, device))
        else:
            heapq.heappop(heap)
    return np.array(counts, np.int64)


def surely_hold(patches: int, frame: int, devices: int, cap: int) -> bool:
    """Says whether devices of `cap` patches surely hold `patches`, spread in units of at most `frame` patches. The
    largest load under `spread_vision` is at most 1.05 times the mean or, if that is more, the mean plus one unit."""
    mean = patches / devices
    return patches <= cap or (mean * TARGETS[0] <= cap and mean + frame <= cap)
