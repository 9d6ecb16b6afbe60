"""A fleet of rollout servers behind engines: routing, health, restarts, and weights that are proven to be there.

The coordinator sees engines; each is a *seat* of the fleet, with the servers that have joined it. A seat's requests
run on its servers, the least loaded first, a group together. Where a server dies, hangs or talks nonsense, its samples
go on on another one, of another seat if need be, from the tokens that they had; it is started again (one that is not
ours: waited for), brought to the seat's weights, and comes back. A seat fails only when no server comes back in time.

The fleet works in a thread of its own, so that it lives as long as it is needed, whatever event loops come and go.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from models.config import AnyConfig
from models.shadow import Fetch
from sharding.mesh import Device

from .engine import EngineError, EngineStats, GenerateRequest
from .fleet_requests import FleetRequests
from .fleet_server import FleetOptions, FleetState, Seat, Server, ServerStatus
from .local_server import LocalServer
from .requests import EngineLimits, Mailbox, TokenStream, checked
from .sglang import ServerClient
from .weights.published import Published, SharedFolders
from .weights.routes import SharedMemory, SyncRoute

Result = TypeVar("Result")


class Fleet(FleetState):
    """Servers for `FleetEngine`s, one a seat. `start`, `close` at the end; `join` and `leave` in between.

    `processes` are started by the fleet, `addresses` are of servers that others start; server `i` takes seat
    `i % seats`, and is called by `name` and its number. `limits` are what a server can take. Prompts may have their
    pixels elsewhere where servers fetch these themselves (`shadows`), or else `fetch` has them, for each request when
    it is sent. `start`, `call`, `close`, `join`, `leave` and what the fleet says of itself are for any thread; all
    else runs in the fleet's thread, by `call`.
    """

    def __init__(
        self,
        config: AnyConfig,
        limits: EngineLimits,
        folders: SharedFolders,
        *,
        processes: Sequence[LocalServer] = (),
        addresses: Sequence[str] = (),
        seats: int = 0,
        name: str = "server",
        route: SyncRoute | None = None,
        options: FleetOptions | None = None,
        fetch: Fetch | None = None,
        shadows: bool = False,
    ) -> None:
        self._first, self._folders = [*processes, *addresses], folders
        if not self._first and not seats:
            raise EngineError("a fleet needs a server at least")
        limits = dataclasses.replace(limits, shadows=shadows or fetch is not None)
        super().__init__(config, limits, options or FleetOptions(), route or SharedMemory(), seats or len(self._first))
        self.requests = FleetRequests(self, fetch=fetch, shadows=shadows)
        self._name, self._joined = name, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fleet", daemon=True)
        self._lock = threading.RLock()  # of the two below, and of what is given to the loop
        self._closed = False

    def start(self) -> None:
        """Starts the servers; the first use does, too. It may be called again."""
        with self._lock:
            if self._closed:
                raise EngineError("the fleet is closed")
            if self._thread.ident is None:
                self._thread.start()
                for member in self._first:
                    self.join(member)

    def call(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Runs in the fleet's thread."""
        with self._lock:
            try:
                self.start()
            except EngineError:
                work.close()
                raise
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Ends servers of this fleet, and whatever still runs: requests fail. It may be called again."""
        with self._lock:
            if not self._closed and self.started:
                asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
            self._closed = True
            self._loop.close()
            self.route.close()
            self._folders.close()

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    async def _close(self) -> None:
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # requests and orders, too
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()

    # --- membership -----------------------------------------------------------------------------

    def join(self, member: LocalServer | str) -> str:
        """A server joins, by its address or to be started; used once it is up and has weights. Returns its name."""
        return self.call(self._join(member)).result()

    async def _join(self, member: LocalServer | str) -> str:
        local = member if isinstance(member, LocalServer) else None
        client = ServerClient("" if local else str(member), token=self.options.token)
        seat = min(self.seats, key=lambda seat: len(self.of_seat(seat)))
        server = Server(self, f"{self._name} {self._joined}", seat, client, local)
        self._joined += 1
        self.members.append(server)
        self.begin(server.live())
        return server.name

    def leave(self, name: str) -> None:
        """A server leaves: its samples go on elsewhere. One that the fleet started ends. Raises EngineError for a name
        that there is not."""
        self.call(self._leave(name)).result()

    async def _leave(self, name: str) -> None:
        server = next((server for server in self.members if server.name == name), None)
        if server is None:
            raise EngineError(f"no {name} in the fleet; there are {', '.join(s.name for s in self.members)}")
        server.leaving = True
        self.members.remove(server)
        server.reason = "left"
        server.lower()
        server.suspect()

    # --- weights --------------------------------------------------------------------------------

    async def publish(self, seat: Seat, version: int, params: Mapping[str, Any]) -> None:
        """Brings the seat's servers to these weights; those that sleep wake. Servers that can't take them are lost, and
        come back with them.

        Raises WeightsMismatch for a server that holds something else afterwards, OSError where there is no room."""
        self.raise_fatal()
        written = await asyncio.to_thread(self._folders.write, version, params)
        await asyncio.to_thread(self.route.publish, written, params)
        seat.wanted = written
        await self.wake(seat)
        await asyncio.to_thread(lambda: self._folders.keep(self.route.keep(self._wanted())))
        self.raise_fatal()

    def _wanted(self) -> list[Published]:
        return [seat.wanted for seat in self.seats if seat.wanted is not None]

    def oldest(self) -> Published | None:
        """The oldest weights that a seat is to have; from any thread."""
        return min(self._wanted(), key=lambda published: published.version, default=None)

    async def take(self, published: Published | None) -> None:
        """Makes these, of another fleet with the same folders, the weights of all seats, which must sleep."""
        for seat in self.seats:
            seat.wanted = published
        if published is not None:
            await asyncio.to_thread(self.route.publish, published)

    async def _bring(self, seat: Seat) -> None:
        await asyncio.gather(*(server.bring() for server in self.of_seat(seat) if server.up))

    # --- orders to a seat -----------------------------------------------------------------------

    async def pause(self, seat: Seat) -> None:
        seat.paused = True
        await self._follow(seat)

    async def resume(self, seat: Seat) -> None:
        seat.paused = False
        self.tell()
        if self.options.together:
            await self.requests.sent(seat, self.options.start_seconds)
        await self._follow(seat)

    async def _follow(self, seat: Seat) -> None:
        """Has the seat's servers pause or go on. Those of a seat that is to sleep learn it when they wake: other seats'
        samples may still end there."""
        if not seat.asleep:
            await self._bring(seat)

    async def sleep(self, seat: Seat) -> None:
        """Has the seat's servers give their memory back, weights included. Until it wakes, none starts: one that is
        about to, or that ends meanwhile, waits. One that is starting may come up first, or it never would where rounds
        are shorter; samples of other seats end first. Raises EngineError where samples of this one run."""
        if running := self.requests.running(seat):
            raise EngineError(f"can't sleep: {running} samples are running; abort them first")
        starting = {server: server.restarts for server in self.of_seat(seat) if server.starting}
        await self.until(lambda: not any(s.starting and s.restarts == before for s, before in starting.items()))
        seat.asleep = True
        self.tell()
        await self.until(lambda: not any(server.open for server in self.of_seat(seat) if server.up))
        await self._bring(seat)
        await self.until(lambda: not seat.asleep or all(server.rests for server in self.of_seat(seat)))

    async def wake(self, seat: Seat) -> None:
        """Servers that slept have no weights: they are given those of the seat."""
        seat.asleep = False
        self.tell()
        await self._bring(seat)

    async def ready(self) -> None:
        """Returns when all servers are up, with the weights of their seats or asleep. Raises EngineError, which says
        what is wrong with the others, after `options.start_seconds`."""
        if not await self.until(lambda: all(server.up for server in self.members), self.options.start_seconds):
            raise EngineError("; ".join(server.state() for server in self.members if not server.up))

    # --- what it says of itself, from any thread ------------------------------------------------

    def stats(self, seat: Seat) -> EngineStats:
        """Counts of the seat, a moment old."""
        return EngineStats(
            version=-1 if seat.wanted is None else seat.wanted.version,
            running=self.requests.running(seat),
            waiting=0,
            slots=self.limits.slots * max(len(self.of_seat(seat)), 1),
            tokens_generated=seat.tokens,
            tokens_prefilled=0,
            preemptions=seat.preemptions,
        )

    def servers(self) -> list[ServerStatus]:
        """The servers as they are now."""
        return [server.status() for server in list(self.members)]

    def busy(self) -> dict[str, list[tuple[float, float]]]:
        """The times in which each server ran samples, by `time.perf_counter`."""
        return {server.name: server.busy_times() for server in list(self.members)}


class FleetEngine:
    """A seat of a fleet as an `rollout.engine.Engine`. A sample's tokens come in one chunk, when it has ended.

    What is drawn is up to the server: `rollout.serve` repeats draws by seed, SGLang does not. `devices` are those of
    this process that the server shares.
    """

    def __init__(self, fleet: Fleet, seat: int, devices: Sequence[Device] = ()) -> None:
        self.move(fleet, seat, devices)

    def move(self, fleet: Fleet, seat: int, devices: Sequence[Device]) -> None:
        """Makes this engine another seat from now on."""
        self._fleet, self._seat, self.devices = fleet, fleet.seats[seat], tuple(devices)

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

        job = self._fleet.call(
            self._fleet.requests.serve(self._seat, request, lambda chunk: in_loop(mailbox.put, chunk))
        )

        def ended(job: concurrent.futures.Future[None]) -> None:
            error = EngineError("the fleet was closed") if job.cancelled() else job.exception()
            in_loop(mailbox.close, error)

        job.add_done_callback(ended)
        return TokenStream(mailbox, job.cancel)

    async def abort(self, rid: str) -> None:
        await self._on(self._fleet.requests.abort(self._seat, rid))

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
