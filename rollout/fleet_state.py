"""The state that the parts of a fleet share: its servers, its seats, news of them. All of it belongs to one thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Coroutine
from typing import Any

from models.config import AnyConfig

from .fleet_job import FleetOptions, Server
from .requests import EngineLimits
from .weights.published import Published


@dataclasses.dataclass
class Seat:
    """The orders to the servers of a seat, those of now and those to come, and counts of their tokens."""

    wanted: Published | None = None  # the weights that they are to have
    paused: bool = False
    asleep: bool = False
    tokens: int = 0  # that came from them
    preemptions: int = 0


class FleetState:
    def __init__(self, config: AnyConfig, limits: EngineLimits, options: FleetOptions, seats: int) -> None:
        self.config, self.limits, self.options = config, limits, options
        self.seats = [Seat() for _ in range(seats)]
        self.servers: list[Server] = []
        self._fatal: Exception | None = None  # what no restart can mend
        self._changed = asyncio.Event()  # replaced each time it is set
        self._tasks: set[asyncio.Task[None]] = set()

    def of_seat(self, seat: int) -> list[Server]:
        return [server for server in list(self.servers) if server.seat == seat]

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts work that runs beside all else."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def tell(self) -> None:
        """Wakes those who wait for a server, or for anything else."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def news(self) -> None:
        """Returns when something was told, or after a second."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), 1.0)

    def fail(self, error: Exception) -> None:
        """Ends the fleet for an error that no restart mends, such as weights that did not arrive, or a full disk."""
        self._fatal = self._fatal or error
        self.tell()

    @property
    def failed(self) -> bool:
        return self._fatal is not None

    def raise_fatal(self) -> None:
        if self._fatal is not None:
            raise self._fatal
