"""Where rows come from and where gradients go, in one minibatch: devices of this process, or of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from ..links import Device
from .flat import Rows
from .pushed_gradients import Key, PushedGradients
from .remote import Remote
from .window import Itinerary, Row, Window


class Traffic:
    """`published` are the rows of this minibatch, `local` the numbers of this process's devices; `remote` carries what
    concerns devices of other processes, None if there are none."""

    def __init__(
        self,
        rows: Rows,
        published: Sequence[Sequence[jax.Array]],
        devices: Sequence[Device],
        local: Sequence[int],
        remote: Remote | None,
    ) -> None:
        self._rows, self._devices, self._local, self._remote = rows, devices, set(local), remote
        self._dtype = published[0][0].dtype
        self._shards = [
            [{shard.device: shard.data for shard in layer.addressable_shards} for layer in unit] for unit in published
        ]
        self._sizes = {
            (u, layer): rows.units[u].size * rows.outer
            for u, layers in enumerate(published)
            for layer in range(len(layers))
        }

    @property
    def clients(self) -> list[int]:
        """The devices of other processes that fetch from this one, and push to it."""
        return [d for d in range(len(self._devices)) if d not in self._local and self._own(d)]

    def offer(self, trips: Sequence[Itinerary]) -> None:
        """Everything that other processes' devices will fetch here on their way; `trips` are those of all devices."""
        for client in self.clients:
            keys = [key for keys in trips[client].fetches() for key in keys]
            assert self._remote is not None
            self._remote.offer(client, self._own(client), self._row, keys)

    def window(self, device: int, trip: Itinerary) -> Window:
        """What feeds this device with weights."""
        owners = self._rows.members(device)
        here = [owner for owner in owners if owner in self._local]

        def fetch(key: Key, count: int) -> Row:
            local = [self._row(owner, key) for owner in here]
            rows = dict(zip(here, jax.device_put(local, self._devices[device]), strict=True))
            for owner in owners:
                if owner not in rows and self._remote is not None:
                    rows[owner] = self._remote.fetch(device, owner, count, self._sizes[key], self._dtype)
            return tuple(rows[owner] for owner in owners)

        away = self._remote if len(here) < len(owners) else None
        return Window(trip, fetch, (lambda rows: None) if away is None else away.ready)

    def pusher(self, device: int, gradients: PushedGradients) -> Callable[[Key, int, Sequence[jax.Array]], None]:
        """What takes this device's gradients to their owners."""
        count = 0

        def push(key: Key, microbatch: int, rows: Sequence[jax.Array]) -> None:
            nonlocal count
            for owner, row in zip(self._rows.members(device), rows, strict=True):
                if owner in self._local:
                    gradients.push(self._devices[owner], key, (device, microbatch), row)
                elif self._remote is not None:
                    self._remote.push(device, owner, count, row)
            count += 1

        return push

    def serve(self, client: int, pushes: Sequence[tuple[int, Key]], gradients: PushedGradients) -> None:
        """Takes what a device of another process pushes here."""
        assert self._remote is not None
        self._remote.serve(client, self._own(client), pushes, self._sizes, self._dtype, gradients)

    def _own(self, client: int) -> list[int]:
        return [owner for owner in self._rows.members(client) if owner in self._local]

    def _row(self, owner: int, key: Key) -> jax.Array:
        unit, layer = key
        return self._shards[unit][layer][self._devices[owner]]
