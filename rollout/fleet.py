"""A fleet of rollout servers behind engines: routing, health, restarts, and proof that servers have their weights.

Each engine is a *seat* of the fleet, with one or several servers. The fleet works in a thread of its own, so that it
outlives event loops. `docs/servers.md` ("How it works") has the ways of requests, weights and servers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from sharding.mesh import Device

from .engine import EngineError, EngineStats, GenerateRequest, TokenChunk
from .fleet_requests import FleetJob
from .fleet_server import FleetState, Seat, Server, ServerStatus
from .local_server import LocalServer
from .requests import Mailbox, TokenStream, checked
from .sglang import ServerClient
from .weights.published import Published

Result = TypeVar("Result")
Order = TypeVar("Order", bound=Callable[..., Coroutine[Any, Any, None]])


class Fleet(FleetState):
    """The servers of the engines in `seats`. Any thread may call the methods of this class, except `ready`, which
    `call` runs in the fleet's thread. Call `close` at the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seats: list[FleetEngine] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fleet", daemon=True)
        self._lock = threading.RLock()  # held while the fleet starts, closes, or takes work
        self.started = self._closed = False

    def add_seats(
        self, members: Sequence[LocalServer | str], count: int = 0, name: str = "server"
    ) -> list[FleetEngine]:
        """Adds `count` seats (0: one for each server) and their servers, before the fleet starts. A member is a process
        that the fleet will start, or the address of a server that somebody else starts. Server `i` belongs to seat
        `i % count`; its name is `name` and a number. Raises EngineError without seats."""
        names = (f"{name} {number}" for number in itertools.count())
        seats = [FleetEngine(self, number, names) for number in range(count or len(members))]
        if not seats:
            raise EngineError("a fleet needs at least one server")
        self.seats += seats
        for number, member in enumerate(members):
            self._add(member, seats[number % len(seats)])
        return seats

    def _add(self, member: LocalServer | str, seat: FleetEngine) -> Server:
        process = member if isinstance(member, LocalServer) else None
        client = ServerClient("" if process else str(member), token=self.options.token)
        server = Server(self, next(seat.names), seat, client, process)
        self.members.append(server)
        return server

    def start(self) -> None:
        """Starts the servers, as `call` does, too. Raises EngineError if the fleet is closed."""
        with self._lock:
            if self._closed:
                raise EngineError("the fleet is closed")
            if not self.started:
                self.started = True
                self._thread.start()
                for server in self.members:
                    self._loop.call_soon_threadsafe(self.begin, server.live())

    def call(self, work: Callable[..., Coroutine[Any, Any, Result]], *args: Any) -> concurrent.futures.Future[Result]:
        """Runs `work(*args)` in the fleet's thread."""
        with self._lock:
            self.start()
            return asyncio.run_coroutine_threadsafe(work(*args), self._loop)

    def close(self) -> None:
        """Ends the servers that the fleet started; open requests fail. May be called again."""
        with self._lock:
            if not self._closed and self.started:
                asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
            self._closed = True
            self._loop.close()
            self.route.close()

    async def _close(self) -> None:
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # tasks of servers, requests and orders
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()

    async def ready(self) -> None:
        """Returns when each server is up or has to wait until its seat wakes. Raises EngineError, which says why some
        are not, after `options.start_seconds`."""
        if not await self.until(lambda: all(s.up or s.waits for s in self.members), self.options.start_seconds):
            raise EngineError("; ".join(server.state() for server in self.members if not (server.up or server.waits)))

    # --- membership -----------------------------------------------------------------------------

    def join(self, member: LocalServer | str) -> str:
        """Adds a server, at an address or to be started, to the seat with the fewest servers; returns its name."""
        with self._lock:
            self.start()
            server = self._add(member, min(self.seats, key=lambda seat: len(seat.servers)))
            self._loop.call_soon_threadsafe(self.begin, server.live())
        return server.name

    def leave(self, name: str) -> None:
        """Removes a server, and ends it if the fleet started it. Raises EngineError for an unknown name."""
        self.call(self._leave, name).result()

    async def _leave(self, name: str) -> None:
        server = next((server for server in self.members if server.name == name), None)
        if server is None:
            raise EngineError(f"no {name} in the fleet; there are {', '.join(s.name for s in self.members)}")
        server.leaving = True
        self.members.remove(server)
        server.reason = "left"
        server.lower()
        server.suspect()

    # --- reports ----------------------------------------------------------------------------------

    def wanted(self) -> list[Published]:
        """The weights that seats are to have."""
        return [seat.wanted for seat in self.seats if seat.wanted is not None]

    def servers(self) -> list[ServerStatus]:
        """The servers as they are now."""
        return [server.status() for server in list(self.members)]

    def busy(self) -> dict[str, list[tuple[float, float]]]:
        """The spans in which each server ran samples, in seconds of `time.perf_counter`."""
        return {server.name: server.busy_times() for server in list(self.members)}


def in_fleet(order: Order) -> Order:
    """Makes a method of a `FleetEngine` run in the fleet's thread. Any event loop may await the method."""

    @functools.wraps(order)
    async def ordered(self: FleetEngine, *args: Any, **options: Any) -> None:
        job = self.fleet.call(functools.partial(order, self, *args, **options))
        try:
            await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            raise EngineError("the fleet was closed") from None

    return cast(Order, ordered)


class FleetEngine(Seat):
    """A seat of a fleet as a `rollout.engine.Engine`. Orders reach only the servers of the seat; requests may also run
    on servers of other seats. The tokens of a sample come in one chunk, when it has ended. A seed gives the same tokens
    again on `rollout.serve`, but not on SGLang. `devices` are the devices of this process that the seat's servers
    share. `names` yields the names of new servers."""

    def __init__(self, fleet: Fleet, number: int, names: Iterator[str]) -> None:
        super().__init__(number)
        self.fleet, self.names = fleet, names
        self.devices: tuple[Device, ...] = ()
        self._jobs: dict[str, FleetJob] = {}

    @property
    def servers(self) -> list[Server]:
        return [server for server in list(self.fleet.members) if server.seat is self]

    # --- requests -------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Streams a request's chunks (`Engine.generate`). Raises EngineError for a request that no server can take."""
        request = checked(request, self.fleet.limits)
        mailbox = Mailbox()

        def in_loop(function: Callable[..., None], *args: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may have closed
                mailbox.loop.call_soon_threadsafe(function, *args)

        job = self.fleet.call(self._serve, request, lambda chunk: in_loop(mailbox.put, chunk))

        def ended(job: concurrent.futures.Future[None]) -> None:
            error = EngineError("the fleet was closed") if job.cancelled() else job.exception()
            in_loop(mailbox.close, error)

        job.add_done_callback(ended)
        return TokenStream(mailbox, job.cancel)

    async def _serve(self, request: GenerateRequest, put: Callable[[TokenChunk], None]) -> None:
        if request.rid in self._jobs:
            raise EngineError(f"request {request.rid!r}: a request of this id is already in flight")
        job = self._jobs[request.rid] = FleetJob(self.fleet, self, request, put)
        try:
            await job.run()
        finally:
            del self._jobs[request.rid]

    @in_fleet
    async def abort(self, rid: str) -> None:
        name, _, sample = (rid, "", "") if rid in self._jobs else rid.rpartition("/")
        if name in self._jobs and (sample.isdecimal() or not sample):
            self._jobs[name].abort([int(sample)] if sample else [])

    @in_fleet
    async def end_session(self, session: str) -> None:
        for server in set(self.fleet.homes.pop(session, {}).values()):
            self.fleet.begin(server.end_session(session))

    @property
    def _running(self) -> int:
        return sum(len(job.open) for job in list(self._jobs.values()))

    # --- orders ---------------------------------------------------------------------------------

    @in_fleet
    async def update_weights(self, version: int, params: Mapping[str, Any]) -> None:
        """Brings the seat's servers to these weights; sleeping servers wake. A server that can't take them is lost.
        Raises WeightsMismatch if a server holds other weights afterwards, and OSError if the disk has no room."""
        self.fleet.raise_fatal()
        self.wanted = await asyncio.to_thread(self.fleet.route.publish, version, params)
        self.asleep = False
        await self._bring()
        await asyncio.to_thread(lambda: self.fleet.route.keep(self.fleet.wanted()))
        self.fleet.raise_fatal()

    async def _bring(self) -> None:
        self.fleet.tell()
        await asyncio.gather(*(server.bring() for server in self.servers if server.up))

    @in_fleet
    async def pause(self) -> None:
        self.paused = True
        if not self.asleep:  # else `wake` pauses the servers, which may still run samples of other seats
            await self._bring()

    @in_fleet
    async def resume(self) -> None:
        self.paused = False
        self.fleet.tell()
        if (options := self.fleet.options).together:
            await self.fleet.until(lambda: all(job.accepted for job in self._jobs.values()), options.start_seconds)
        if not self.asleep:
            await self._bring()

    @in_fleet
    async def sleep(self, *, weights: bool = True) -> None:
        """Frees the memory of the seat's servers, weights included. First waits for servers that are starting, which
        would never come up if a training step took less time than a start, and for samples of other seats. No server of
        the seat starts until it wakes. Raises EngineError if samples of this seat run."""
        if self._running:
            raise EngineError(f"can't sleep: {self._running} samples are running; abort them first")
        fleet, starting = self.fleet, {server: server.restarts for server in self.servers if server.starting}
        await fleet.until(lambda: not any(s.starting and s.restarts == before for s, before in starting.items()))
        self.asleep = True
        fleet.tell()
        await fleet.until(lambda: not any(server.open for server in self.servers if server.up))
        await self._bring()
        await fleet.until(lambda: not self.asleep or all(server.rests for server in self.servers))

    @in_fleet
    async def wake(self) -> None:
        """Wakes the seat's servers, and sends them the seat's weights, which sleeping servers do not keep."""
        self.asleep = False
        await self._bring()

    async def set_parallelism(self, devices: Sequence[Device]) -> None:
        raise EngineError("rollout servers can't change their devices")

    def stats(self) -> EngineStats:
        """Returns the counts of the seat. Any thread may call this method."""
        return EngineStats(
            version=-1 if self.wanted is None else self.wanted.version,
            running=self._running,
            waiting=0,
            slots=self.fleet.limits.slots * max(len(self.servers), 1),
            tokens_generated=self.tokens,
            tokens_prefilled=0,
            preemptions=self.preemptions,
        )

    async def close(self) -> None:
        """Does nothing: servers end with the fleet."""
