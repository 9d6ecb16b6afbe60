"""The times at which devices end the attention of a layer, if communication overlaps computation (FlexRL, 3.4)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..planner.plan import Round, ShardPlan

GroupSeconds = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


def attention_ends(
    plan: ShardPlan, squares: np.ndarray, compute: GroupSeconds, arrive: GroupSeconds, leave: GroupSeconds
) -> np.ndarray:
    """Returns `[devices]`: seconds from the start of a layer's attention until a device has sent all outputs.

    A device computes its unsharded sequences first, with the all-to-all of its first group under way. When a group's
    attention starts, the all-to-all of the device's next group is issued; when it ends, that of its outputs is.
    All-to-alls go over one wire a device, in the order of issue, and start when the whole group is there.

    `squares` are the squared tokens of each sequence. `compute`, `arrive` and `leave` give the seconds that each group
    of a round takes, from its sums of squares and of tokens (`[groups]` each) and its degree.
    """
    lengths = np.array(plan.lengths, float)
    busy_until, wire_until, issued = (np.zeros(plan.num_devices) for _ in range(3))
    leaving = None

    def send(after: np.ndarray, takes: np.ndarray, there: np.ndarray, degree: int) -> None:
        ready = np.where(there, np.maximum(wire_until, after), 0.0).reshape(-1, degree).max(axis=1)
        wire_until[there] = np.repeat(ready + takes, degree)[there]

    for turn in sorted(plan.rounds, key=lambda turn: turn.degree > 1):  # the unsharded ones first; stable
        degree, work = turn.degree, (_sums(turn, squares), _sums(turn, lengths))
        there = np.repeat(work[1] > 0, degree)
        seconds = np.repeat(compute(*work, degree), degree)
        if degree == 1:
            busy_until[there] += seconds[there]
            continue
        send(issued, arrive(*work, degree), there, degree)
        begin = np.maximum(busy_until, wire_until)
        if leaving:  # the outputs of the round before: issued when its attention ended, after the arrival above
            send(*leaving)
        issued[there] = begin[there]
        busy_until[there] = (begin + seconds)[there]
        leaving = busy_until.copy(), leave(*work, degree), there, degree
    if leaving:
        send(*leaving)
    return np.maximum(busy_until, wire_until)


def _sums(turn: Round, values: np.ndarray) -> np.ndarray:
    """Sums the values of each group's sequences: `[groups]`."""
    return np.array([values[list(members)].sum() if members else 0.0 for members in turn.groups])
