"""The gradient rows that this process's devices own, and the order in which pushes are added to them.

In arrival order a push is added at once, and two runs differ in the last bits. In a fixed order a push waits until all
pushes before it have been added: pushes of microbatches that the plan expects to end earlier. Few pushes wait if the
expectation is right. The number of waiting pushes is bounded, so that a device that is too early waits itself. That
can't block all devices: the first microbatch in the order that is not added in full never waits, neither to push nor,
since a fetch only reads, to fetch.
"""

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from ..links import Device

Key = tuple[int, int]  # unit, layer
Turn = tuple[int, int]  # device, number of its microbatch


@dataclasses.dataclass
class _Owner:
    sums: dict[Key, jax.Array] = dataclasses.field(default_factory=dict)
    order: dict[Key, collections.deque[Turn]] = dataclasses.field(default_factory=dict)
    waiting: dict[tuple[Key, Turn], collections.deque[jax.Array]] = dataclasses.field(default_factory=dict)
    early: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)  # by device that pushed
    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)


class PushedGradients:
    """Sums of pushed rows, in float32, on the devices that own the rows.

    `orders` gives, for each owner's device and each key, the order in which pushes are added; None adds them as they
    arrive. `bound` is the most pushes of one device that wait at an owner. `check` is called while a push waits, and
    raises if the minibatch has failed.
    """

    def __init__(
        self,
        owners: Sequence[Device],
        orders: Mapping[Device, Mapping[Key, Sequence[Turn]]] | None,
        bound: int,
        check: Callable[[], None],
    ) -> None:
        self._owners = {device: _Owner() for device in owners}
        self._bound, self._check, self._ordered = bound, check, orders is not None
        for device, order in (orders or {}).items():
            self._owners[device].order = {key: collections.deque(turns) for key, turns in order.items()}

    def push(self, owner: Device, key: Key, turn: Turn, row: jax.Array) -> None:
        """Adds a row, which may be on any device; blocks while more than `bound` pushes of the pushing device wait."""
        server = self._owners[owner]
        row = jax.device_put(row, owner)
        with server.changed:
            if not self._ordered:
                self._add(server, key, row)
                return
            server.waiting.setdefault((key, turn), collections.deque()).append(row)
            server.early[turn[0]] += 1
            self._drain(server, key)
            while server.early[turn[0]] > self._bound:
                self._check()
                server.changed.wait(timeout=0.1)

    def of(self, owner: Device, key: Key, size: int) -> jax.Array:
        """The sum of a key's pushes, `[size]` float32; zeros if nothing was pushed."""
        total = self._owners[owner].sums.pop(key, None)
        return jax.device_put(jnp.zeros(size, jnp.float32), owner) if total is None else total

    def _drain(self, server: _Owner, key: Key) -> None:
        order = server.order[key]
        while order and (rows := server.waiting.get((key, order[0]))):
            turn = order.popleft()
            self._add(server, key, rows.popleft())
            server.early[turn[0]] -= 1
        server.changed.notify_all()

    def _add(self, server: _Owner, key: Key, row: jax.Array) -> None:
        before = server.sums.get(key)
        server.sums[key] = _first(row) if before is None else _sum(before, row)


@jax.jit
def _first(row: jax.Array) -> jax.Array:
    return row.astype(jnp.float32)


@functools.partial(jax.jit, donate_argnums=0)
def _sum(total: jax.Array, row: jax.Array) -> jax.Array:
    return total + row.astype(jnp.float32)
