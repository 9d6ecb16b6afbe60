"""Owners and workers in other processes: the same fetches and pushes, over `sharding.links`.

Nobody asks and nobody answers. All processes know the whole minibatch, so each knows which rows others' devices will
fetch, in which order, and offers them under numbers that both sides count up; and which gradients they will push, so
that an owner pulls these in that order. A worker that is more than a few pushes ahead of an owner waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from ..links import Device, Links
from .pushed_gradients import Key, PushedGradients, Turn
from .window import Row

_FETCH, _PUSH = 0, 1


def taken(minibatch: int) -> str:
    """What the topics begin with under which owners say that they have taken gradients of this minibatch."""
    return f"taken/{minibatch}/"


class Remote:
    """One minibatch's traffic with the devices of other processes. `number` is this minibatch's own in the life of
    `links`, `devices` are all of the mesh, in its order, `bound` is how many pushes an owner may be behind."""

    def __init__(self, links: Links, number: int, devices: Sequence[Device], bound: int) -> None:
        self._links, self._number, self._devices, self._bound = links, number, devices, bound

    def offer(
        self, client: int, owners: Sequence[int], rows: Callable[[int, Key], jax.Array], keys: Sequence[Key]
    ) -> None:
        """Everything that device `client` will fetch from `owners`, devices of this process; `rows(owner, key)`."""
        for count, key in enumerate(keys):
            for owner in owners:
                self._links.offer(self._name(_FETCH, client, count, owner), [rows(owner, key)])

    def fetch(self, client: int, owner: int, count: int, size: int, dtype: jnp.dtype) -> jax.Array:
        """Starts the `count`-th transfer of this device from this owner."""
        return self._pull(owner, self._name(_FETCH, client, count, owner), size, dtype, self._devices[client])

    def push(self, client: int, owner: int, count: int, row: jax.Array) -> None:
        """Hands over the `count`-th gradient of this device, once the owner has taken all but the last few."""
        topic = self._topic(client, owner)
        self._links.wait(topic, count - self._bound)
        self._links.offer(self._name(_PUSH, client, count, owner), [row])

    def serve(
        self,
        client: int,
        owners: Sequence[int],
        pushes: Sequence[tuple[int, Key]],
        sizes: Mapping[Key, int],
        dtype: jnp.dtype,
        gradients: PushedGradients,
    ) -> None:
        """Takes all that device `client` pushes to `owners`, devices of this process, to the end of the minibatch."""
        process = self._devices[client].process_index
        for count, (microbatch, key) in enumerate(pushes):
            turn: Turn = (client, microbatch)
            rows = [
                self._pull(client, self._name(_PUSH, client, count, o), sizes[key], dtype, self._devices[o])
                for o in owners
            ]
            self._links.ready(rows)
            for owner, row in zip(owners, rows, strict=True):
                gradients.push(self._devices[owner], key, turn, row)
                self._links.notify(process, self._topic(client, owner))

    def ready(self, rows: Sequence[Row]) -> None:
        """Waits for rows that may come from other processes."""
        self._links.ready([array for row in rows for array in row])

    def _pull(self, source: int, name: int, size: int, dtype: jnp.dtype, device: Device) -> jax.Array:
        like = jax.ShapeDtypeStruct((size,), dtype, sharding=SingleDeviceSharding(device))
        return self._links.fetch(self._devices[source].process_index, name, [like], device)[0]

    def _name(self, kind: int, client: int, count: int, owner: int) -> int:
        """Unique in the offering process. Raises ValueError where the 63 bits of a key are not enough."""
        name = 0
        for part, bits in ((self._number, 24), (kind, 1), (client, 10), (owner, 10), (count, 18)):
            if part >> bits:
                raise ValueError(
                    f"{len(self._devices)} devices, minibatch {self._number}, transfer {count} of a device: keys hold "
                    "1,024 devices, 16 million minibatches, 262,144 transfers of a device in each"
                )
            name = name << bits | part
        return name

    def _topic(self, client: int, owner: int) -> str:
        return f"{taken(self._number)}{client}/{owner}"
