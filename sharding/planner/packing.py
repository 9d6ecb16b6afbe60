"""LB-Mini deals sequences to devices and microbatches, so that devices wait little for each other. numpy only.

Under ODC devices meet once a minibatch, not at every layer of every microbatch (ODC paper, sections 3 and 4), so that
only the work of a whole minibatch must be even. Nothing is sharded: a sequence is computed by one device.
"""

from collections.abc import Sequence

import numpy as np

from .partition import karmarkar_karp, longest_first, swapped
from .plan import PlanError

Microbatches = list[list[int]]  # the sequences of each microbatch of one device


def lb_mini(lengths_I: np.ndarray, work_I: np.ndarray, num_devices: int, room: int = 0) -> list[Microbatches]:
    """Returns the microbatches of each device, even over the whole minibatch (section 4, C.1): however many sequences
    and microbatches each has, perhaps none.

    `lengths_I` are the tokens and `work_I` (f64) the work of each sequence; a microbatch holds at most `room` tokens,
    0 for no bound. The best of Karmarkar-Karp, of longest first and of equal numbers of sequences deals them out, each
    improved by exchanges. Then each device packs alone, in as many microbatches as it takes until every one fits: even
    in tokens, since work need not be. Raises PlanError for a sequence that no microbatch holds.
    """
    if room and lengths_I.max(initial=0) > room:
        worst = int(lengths_I.argmax())
        raise PlanError(
            f"sequence {worst} has {lengths_I[worst]} tokens, but a microbatch holds limits.tokens_per_device "
            f"{room}: raise it, shorten the sequence, or use a strategy that spreads sequences over devices"
        )
    starts = karmarkar_karp(work_I, num_devices), longest_first(work_I, num_devices), as_many_each(work_I, num_devices)
    dealt = [swapped(work_I, bins, num_devices) for bins in starts]
    bins = min(dealt, key=lambda bins: np.bincount(bins, work_I, num_devices).max(initial=0.0))
    devices = []
    for share in shares_of(bins, num_devices):
        count = fewest(lengths_I, share, room)
        while (microbatches := packed(lengths_I, work_I, share, count, room, by=(lengths_I, work_I))) is None:
            count += 1
        devices.append(microbatches)
    return devices


def busiest(devices: Sequence[Microbatches], work_I: np.ndarray) -> float:
    """The work of the device that has the most, in the unit of `work_I`."""
    work = work_I.tolist()
    table = np.zeros((len(devices), max(map(len, devices), default=0)))
    for device, microbatches in enumerate(devices):
        table[device, : len(microbatches)] = [sum(work[i] for i in members) for members in microbatches]
    return float(table.sum(axis=1).max(initial=0.0))


def as_many_each(work_I: np.ndarray, num_devices: int) -> list[int]:
    """The device of each sequence: even in work, and in numbers of sequences up to one."""
    bins = karmarkar_karp(work_I, num_devices, equal_size=True)
    return swapped(work_I, bins, num_devices, equal_size=True)


def shares_of(bins: Sequence[int], count: int) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(count)]
    for i, bin in enumerate(bins):
        shares[bin].append(i)
    return shares


def fewest(lengths_I: np.ndarray, share: list[int], room: int) -> int:
    """The number of microbatches below which no packing of a device's share fits."""
    return -(-int(lengths_I[share].sum()) // room) if room and share else min(len(share), 1)


def packed(
    lengths_I: np.ndarray, work_I: np.ndarray, share: list[int], count: int, room: int, by: Sequence[np.ndarray]
) -> Microbatches | None:
    """`count` microbatches that fit, made even in one of the amounts `by`, the first that does, heaviest first; None if
    none does. One always does for as many microbatches as sequences, which then stand alone."""

    def order(members: list[int]) -> tuple[float, list[int]]:
        return -float(work_I[members].sum()) if members else 0.0, members

    for amounts in by:
        bins = shares_of(karmarkar_karp(amounts[share], count), count) if share else [[]] * count
        microbatches = [[share[k] for k in bin] for bin in bins]
        if not room or all(lengths_I[members].sum() <= room for members in microbatches if members):
            return sorted(microbatches, key=order)
    return None
