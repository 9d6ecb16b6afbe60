"""Brings rows to workers, and gradients to owners, in one minibatch, within a process and between processes.

An itinerary lists the weights that a device needs at each of its steps. A window fetches the weights in time. A device
holds the weights of at most three steps: the previous step, which may still run, the dispatched step, and the next
step. `docs/parallelism.md` has the orders of pushes, and the way between processes.
"""

import collections
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..links import Links
from ..mesh import Device
from .flat import ParameterRows

Key = tuple[int, int]  # unit, layer
Turn = tuple[int, int]  # device, number of the microbatch on this device
Row = tuple[jax.Array, ...]  # one layer's row of each owner, in order, on the device that fetched the rows
Itinerary = Sequence[tuple[Key, ...]]  # for each step of a device: the keys of its weights
BOUND = 6  # limit of waiting pushes of a device at an owner; beyond it, the device waits
_FETCH, _PUSH = 0, 1


def held_at(itinerary: Itinerary, step: int) -> list[Key]:
    """The keys of the weights of this step and of the next one, which the window holds when the step is dispatched."""
    return list(dict.fromkeys(key for needs in itinerary[step : step + 2] for key in needs))


def fetches(itinerary: Itinerary) -> list[list[Key]]:
    """The keys that are fetched before each step: not those still held. Owners elsewhere compute the same lists."""
    held = [held_at(itinerary, step) for step in range(len(itinerary))]
    return [[key for key in now if key not in before] for before, now in itertools.pairwise([[], *held])]


class Window:
    """Fetches the weights of an itinerary. `fetch(key, count)` starts transfer `count`; `ready` waits for rows."""

    def __init__(
        self, itinerary: Itinerary, fetch: Callable[[Key, int], Row], ready: Callable[[Sequence[Row]], None]
    ) -> None:
        self._itinerary, self._fetch, self._ready = itinerary, fetch, ready
        self._fetches = fetches(itinerary)
        self._held: dict[Key, Row] = {}
        self._pending = collections.deque[jax.Array]()  # outputs of the last steps, which may still run
        self._step = self._count = 0

    def next(self) -> list[Row]:
        """Returns the rows of the next step, and starts the transfers for the following step."""
        if len(self._pending) > 1:  # waits, because further dispatched steps would hold more weights
            jax.block_until_ready(self._pending.popleft())
        self._held = {key: self._held[key] for key in held_at(self._itinerary, self._step) if key in self._held}
        for key in self._fetches[self._step]:
            self._held[key] = self._fetch(key, self._count)
            self._count += 1
        rows = [self._held[key] for key in self._itinerary[self._step]]
        self._ready(rows)
        self._step += 1
        return rows

    @property
    def done(self) -> int:
        """The number of steps that `next` has waited for, which are surely done."""
        return self._step - len(self._pending)

    def dispatched(self, result: jax.Array) -> None:
        """Notes that a step was dispatched. `result` is any output of its program."""
        self._pending.append(result)

    def finish(self) -> None:
        jax.block_until_ready(list(self._pending))
        self._held = {}


@dataclasses.dataclass
class _Owner:
    sums: dict[Key, jax.Array] = dataclasses.field(default_factory=dict)
    order: dict[Key, collections.deque[Turn]] = dataclasses.field(default_factory=dict)
    waiting: dict[tuple[Key, Turn], collections.deque[jax.Array]] = dataclasses.field(default_factory=dict)
    early: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)  # waiting pushes by device
    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)


class PushedGradients:
    """Sums of pushed rows, in float32, on the devices that own the rows. `orders` has, for each owner's device and each
    key, the order in which pushes are added (None: of arrival). `check` raises if the minibatch has failed."""

    def __init__(
        self,
        owners: Sequence[Device],
        orders: Mapping[Device, Mapping[Key, Sequence[Turn]]] | None,
        check: Callable[[], None],
    ) -> None:
        self._owners = {device: _Owner() for device in owners}
        self._check, self._ordered = check, orders is not None
        for device, order in (orders or {}).items():
            self._owners[device].order = {key: collections.deque(turns) for key, turns in order.items()}

    def push(self, owner: Device, key: Key, turn: Turn, row: jax.Array) -> None:
        """Adds a row, which may be on any device. Blocks while more than `BOUND` pushes of the pushing device wait."""
        server = self._owners[owner]
        row = jax.device_put(row, owner)
        with server.changed:
            if not self._ordered:
                self._add(server, key, row)
                return
            server.waiting.setdefault((key, turn), collections.deque()).append(row)
            server.early[turn[0]] += 1
            order = server.order[key]
            while order and (rows := server.waiting.get((key, order[0]))):
                server.early[order.popleft()[0]] -= 1
                self._add(server, key, rows.popleft())
            server.changed.notify_all()
            while server.early[turn[0]] > BOUND:
                self._check()
                server.changed.wait(timeout=0.1)

    def of(self, owner: Device, key: Key, size: int) -> jax.Array:
        """Returns the sum of a key's pushes, `[size]` float32, or zeros if nothing was pushed. Forgets the sum."""
        total = self._owners[owner].sums.pop(key, None)
        return jax.device_put(jnp.zeros(size, jnp.float32), owner) if total is None else total

    def _add(self, server: _Owner, key: Key, row: jax.Array) -> None:
        before = server.sums.get(key)
        server.sums[key] = _first(row) if before is None else _sum(before, row)


@jax.jit
def _first(row: jax.Array) -> jax.Array:
    return row.astype(jnp.float32)


@functools.partial(jax.jit, donate_argnums=0)
def _sum(total: jax.Array, row: jax.Array) -> jax.Array:
    return total + row.astype(jnp.float32)


class Traffic:
    """The transfers of one minibatch, of this number in the lifetime of the links (None: there is one process).
    `devices` are all devices in the order of the mesh, `local` the numbers of this process's devices."""

    def __init__(
        self,
        rows: ParameterRows,
        published: Sequence[Sequence[jax.Array]],
        devices: Sequence[Device],
        local: Sequence[int],
        links: Links | None,
        number: int,
    ) -> None:
        self._rows, self._devices, self._local = rows, devices, set(local)
        self._links: Any = links  # used only if other processes have devices
        self._number = number
        self._dtype = published[0][0].dtype
        self._shards = [
            [{shard.device: shard.data for shard in layer.addressable_shards} for layer in unit] for unit in published
        ]

    @property
    def clients(self) -> list[int]:
        """The devices of other processes that fetch rows from this process and push gradients to it."""
        return [d for d in range(len(self._devices)) if d not in self._local and self._owners_here(d)]

    def offer(self, trips: Sequence[Itinerary]) -> None:
        """Offers all rows that devices of other processes will fetch from this process on their `trips`."""
        for client in self.clients:
            keys = [key for keys in fetches(trips[client]) for key in keys]
            for count, key in enumerate(keys):
                for owner in self._owners_here(client):
                    self._links.offer(self._name(_FETCH, client, count, owner), [self._row(owner, key)])

    def window(self, device: int, trip: Itinerary) -> Window:
        """Returns the window through which this device gets its weights."""
        owners = self._rows.members(device)
        here = [owner for owner in owners if owner in self._local]

        def fetch(key: Key, count: int) -> Row:
            local = [self._row(owner, key) for owner in here]
            rows = dict(zip(here, jax.device_put(local, self._devices[device]), strict=True))
            for owner in owners:
                if owner not in rows:
                    rows[owner] = self._pull(owner, self._name(_FETCH, device, count, owner), key, device)
            return tuple(rows[owner] for owner in owners)

        def ready(rows: Sequence[Row]) -> None:
            if len(here) < len(owners):
                self._links.ready([array for row in rows for array in row])

        return Window(trip, fetch, ready)

    def pusher(self, device: int, gradients: PushedGradients) -> Callable[[Key, int, Sequence[jax.Array]], None]:
        """Returns the function that sends this device's gradients to their owners."""
        count = 0

        def push(key: Key, microbatch: int, rows: Sequence[jax.Array]) -> None:
            nonlocal count
            for owner, row in zip(self._rows.members(device), rows, strict=True):
                if owner in self._local:
                    gradients.push(self._devices[owner], key, (device, microbatch), row)
                else:
                    self._links.wait(self._topic(device, owner), count - BOUND)
                    self._links.offer(self._name(_PUSH, device, count, owner), [row])
            count += 1

        return push

    def serve(self, client: int, pushes: Sequence[tuple[int, Key]], gradients: PushedGradients) -> None:
        """Takes all gradients that a device of another process pushes to this process in this minibatch."""
        owners = self._owners_here(client)
        for count, (microbatch, key) in enumerate(pushes):
            rows = [self._pull(client, self._name(_PUSH, client, count, owner), key, owner) for owner in owners]
            self._links.ready(rows)
            for owner, row in zip(owners, rows, strict=True):
                gradients.push(self._devices[owner], key, (client, microbatch), row)
                self._links.notify(self._devices[client].process_index, self._topic(client, owner))

    def end(self) -> None:
        """Waits for all processes at the end of the minibatch."""
        if self._links is not None:
            self._links.barrier("end of a minibatch")
            self._links.forget(self._taken)

    def _owners_here(self, client: int) -> list[int]:
        return [owner for owner in self._rows.members(client) if owner in self._local]

    def _row(self, owner: int, key: Key) -> jax.Array:
        unit, layer = key
        return self._shards[unit][layer][self._devices[owner]]

    def _pull(self, source: int, name: int, key: Key, device: int) -> jax.Array:
        like = jax.ShapeDtypeStruct((self._rows.units[key[0]].size * self._rows.outer,), self._dtype)
        return self._links.fetch(self._devices[source].process_index, name, [like], self._devices[device])[0]

    def _name(self, kind: int, client: int, count: int, owner: int) -> int:
        """The name of a transfer, unique in the offering process. Raises ValueError if 63 bits do not suffice."""
        name = 0
        for part, bits in ((self._number, 24), (kind, 1), (client, 10), (owner, 10), (count, 18)):
            if part >> bits:
                raise ValueError(
                    f"no name is left for transfer {count} of a device in minibatch {self._number} on "
                    f"{len(self._devices)} devices: at most 1,024 devices, 16 million minibatches and 262,144 "
                    "transfers of a device in each minibatch are possible"
                )
            name = name << bits | part
        return name

    @property
    def _taken(self) -> str:
        return f"taken/{self._number}/"

    def _topic(self, client: int, owner: int) -> str:
        return f"{self._taken}{client}/{owner}"
