"""A fleet of rollout servers behind engines: routing, health, restarts, and proof that servers have their weights.

The coordinator sees engines. Each engine is a *seat* of the fleet, with several servers. A request runs on one server,
the least loaded of its seat. If a server dies, hangs or gives a wrong answer, its samples continue on another server,
of another seat if need be, from the tokens that they have. The fleet starts its own servers again, and waits for
others; both get the seat's weights before they run requests. A seat fails only if no server comes back in time.

The fleet works in a thread of its own, so that it outlives event loops.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from models.config import DecoderConfig
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
    """The servers of several `FleetEngine`s; each engine is a seat. Call `close` at the end.

    The fleet starts `processes`; others start the servers at `addresses`. Server `i` takes seat `i % seats`, and is
    called `name` and its number. `limits` bound the requests of a server. Prompts may lack their pixels if servers
    fetch pixels (`shadows`), or if the fleet does by `fetch`, for each request when it is sent. Any thread may call
    `start`, `call`, `close`, `join`, `leave`, `oldest` and the reports at the end; all other methods run in the
    fleet's thread, by `call`.
    """

    def __init__(
        self,
        config: DecoderConfig,
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
        self._lock = threading.RLock()  # held while the fleet starts, closes, or takes work
        self._closed = False

    def start(self) -> None:
        """Starts the servers; the first `call` does so, too. May be called again."""
        with self._lock:
            if self._closed:
                raise EngineError("the fleet is closed")
            if self._thread.ident is None:
                self._thread.start()
                for member in self._first:
                    self.join(member)

    def call(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Runs `work` in the fleet's thread."""
        with self._lock:
            try:
                self.start()
            except EngineError:
                work.close()
                raise
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Ends the servers that the fleet started, and all requests, which fail. May be called again."""
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
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # tasks of servers, requests and orders
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()

    # --- membership -----------------------------------------------------------------------------

    def join(self, member: LocalServer | str) -> str:
        """Adds a server, at an address or to be started. It gets requests when it has weights. Returns its name."""
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
        """Removes a server, and ends it if the fleet started it. Its samples continue on other servers. Raises
        EngineError for an unknown name."""
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
        """Brings the seat's servers to these weights; sleeping servers wake. A server that can't take the weights is
        lost, and gets them when it comes back.

        Raises WeightsMismatch if a server holds other weights afterwards, and OSError if there is no room."""
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
        """The oldest of the weights that seats are to have; for any thread."""
        return min(self._wanted(), key=lambda published: published.version, default=None)

    async def take(self, published: Published | None) -> None:
        """Gives all seats, which must sleep, weights of another fleet with the same folders."""
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
        """Has the seat's servers give their memory back, weights included. Until the seat wakes, no server starts: a
        server that is about to start, or that ends meanwhile, waits. A server that is starting comes up first, since
        with short rounds it never would. Samples of other seats on these servers end first. Raises EngineError if
        samples of this seat run."""
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
        """Wakes the seat's servers, and gives them its weights, since sleeping servers keep none."""
        seat.asleep = False
        self.tell()
        await self._bring(seat)

    async def ready(self) -> None:
        """Returns when all servers are up, with the weights of their seats or asleep. After `options.start_seconds`,
        raises EngineError, which says why the other servers are not up."""
        if not await self.until(lambda: all(server.up for server in self.members), self.options.start_seconds):
            raise EngineError("; ".join(server.state() for server in self.members if not server.up))

    # --- reports, for any thread -----------------------------------------------------------------

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
    """A seat of a fleet as a `rollout.engine.Engine`. A sample's tokens come in one chunk, when it has ended.

    A seed gives the same tokens again on `rollout.serve`, but not on SGLang. `devices` are the devices of this process
    that the seat's servers share.
    """

    def __init__(self, fleet: Fleet, seat: int, devices: Sequence[Device] = ()) -> None:
        self.move(fleet, seat, devices)

    def move(self, fleet: Fleet, seat: int, devices: Sequence[Device]) -> None:
        """Makes this engine a seat of `fleet` from now on."""
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
        """Streams a request's chunks (`Engine.generate`). Raises EngineError if no server could take it."""
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
        """Does nothing: servers end with the fleet."""
