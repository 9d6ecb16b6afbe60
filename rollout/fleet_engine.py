"""The engines that a fleet of servers looks like to the coordinator."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from sharding.mesh import Device

from .engine import EngineError, EngineStats, GenerateRequest
from .fleet import Fleet
from .requests import Mailbox, TokenStream, checked

Result = TypeVar("Result")


class FleetEngine:
    """A seat of a fleet as an `rollout.engine.Engine`. A sample's tokens come in one chunk, when it has ended.

    What is drawn is up to the server: `rollout.serve` repeats draws by seed, SGLang does not. `devices` are those of
    this process that the server shares.
    """

    def __init__(self, fleet: Fleet, seat: int, devices: Sequence[Device] = ()) -> None:
        self.move(fleet, seat, devices)

    def move(self, fleet: Fleet, seat: int, devices: Sequence[Device]) -> None:
        """Makes this engine another seat from now on."""
        self._fleet, self._seat, self.devices = fleet, seat, tuple(devices)

    async def _on(self, work: Coroutine[Any, Any, Result]) -> Result:
        job = self._fleet.call(work)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            raise EngineError("the fleet was closed") from None

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Streams a request's chunks (`Engine.generate`). Raises EngineError for one that no server could take."""
        request = checked(request, self._fleet.limits)
        mailbox = Mailbox()

        def in_loop(function: Callable[..., None], *args: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may have closed
                mailbox.loop.call_soon_threadsafe(function, *args)

        job = self._fleet.call(self._fleet.serve(self._seat, request, lambda chunk: in_loop(mailbox.put, chunk)))

        def ended(job: concurrent.futures.Future[None]) -> None:
            error = EngineError("the fleet was closed") if job.cancelled() else job.exception()
            in_loop(mailbox.close, error)

        job.add_done_callback(ended)
        return TokenStream(mailbox, functools.partial(_cancel, job))

    async def abort(self, rid: str) -> None:
        await self._on(self._fleet.abort(self._seat, rid))

    async def update_weights(self, version: int, params: Mapping[str, Any]) -> None:
        await self._on(self._fleet.publish(self._seat, version, params))

    async def set_parallelism(self, devices: Sequence[Device]) -> None:
        raise EngineError("rollout servers keep their devices")

    async def pause(self) -> None:
        await self._on(self._fleet.pause(self._seat))

    async def resume(self) -> None:
        await self._on(self._fleet.resume(self._seat))

    async def sleep(self) -> None:
        await self._on(self._fleet.sleep(self._seat))

    async def wake(self) -> None:
        await self._on(self._fleet.wake(self._seat))

    def stats(self) -> EngineStats:
        return self._fleet.stats(self._seat)

    async def close(self) -> None:
        """Servers go with the fleet."""


def _cancel(job: concurrent.futures.Future[None]) -> None:
    job.cancel()
