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
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from models.config import AnyConfig
from models.shadow import Fetch

from .engine import EngineError, EngineStats, GenerateRequest, TokenChunk
from .fleet_job import FleetOptions, Server, ServerStatus
from .fleet_requests import FleetRequests
from .fleet_state import FleetState
from .local_server import LocalServer
from .requests import EngineLimits
from .sglang import CONNECT, Refused, ServerClient, ServerError
from .weights.published import Published, SharedFolders
from .weights.routes import SharedMemory, SyncRoute

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Fleet:
    """Servers for `rollout.fleet_engine`s, one a seat. `start`, `close` at the end; `join` and `leave` in between.

    `processes` are started by the fleet, `addresses` are of servers that others start; server `i` takes seat
    `i % seats`, and is called by `name` and its number. `limits` are what a server can take. Prompts may have their
    pixels elsewhere where servers fetch these themselves (`shadows`), or else `fetch` has them, for each request when
    it is sent. Every method but `close` may be called from any thread.
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
        self.limits = dataclasses.replace(limits, shadows=shadows or fetch is not None)
        self._options = options or FleetOptions()
        self._folders, self._route = folders, route or SharedMemory()
        self._first = [*processes, *addresses]
        self.seats = seats or len(self._first)
        if not self.seats:
            raise EngineError("a fleet needs a server at least")
        self._state = FleetState(config, self.limits, self._options, self.seats)
        self._requests = FleetRequests(self._state, fetch=fetch, shadows=shadows)
        self._name, self._joined = name, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
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

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

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
            self._route.close()
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
        client = ServerClient("" if local else str(member), token=self._options.token)
        seat = min(range(self.seats), key=lambda seat: (sum(s.seat == seat for s in self._state.servers), seat))
        server = Server(f"{self._name} {self._joined}", seat, client, local)
        self._joined += 1
        self._state.servers.append(server)
        self._state.begin(self._look_after(server))
        return server.name

    def leave(self, name: str) -> None:
        """A server leaves: its samples go on elsewhere. One that the fleet started ends. Raises EngineError for a name
        that there is not."""
        self.call(self._leave(name)).result()

    async def _leave(self, name: str) -> None:
        server = next((server for server in self._state.servers if server.name == name), None)
        if server is None:
            raise EngineError(f"no {name} in the fleet; there are {', '.join(s.name for s in self._state.servers)}")
        server.leaving = True
        self._state.servers.remove(server)
        server.reason = "left"
        self._lower(server)
        server.suspect()

    # --- the life of a server -------------------------------------------------------------------

    async def _look_after(self, server: Server) -> None:
        try:
            await self._live(server)
        finally:  # also of those that left
            await self._route.forget(server.client)
            await server.client.close()
            if server.process is not None:
                await asyncio.to_thread(server.process.stop)

    async def _live(self, server: Server) -> None:
        trouble = 0  # in a row
        while not server.leaving:
            await self._rest(server)
            began = time.monotonic()
            try:
                await self._raise_up(server)
                trouble = 0
                await self._watch(server)
            except EngineError as error:
                server.reason = str(error)
            except Exception as error:
                self._state.fail(error)
                server.reason = str(error)
            else:
                return
            self._lower(server)
            await self._route.forget(server.client)
            if server.leaving or self._state.failed:
                return
            log.info("%r is lost: %s", server, server.reason)  # who shows `servers` tells users
            if server.process is not None:
                await asyncio.to_thread(server.process.kill)
            server.restarts += 1
            trouble += 1
            if trouble > 1:  # it did not even come up
                server.suspected.clear()
                with contextlib.suppress(TimeoutError):
                    wait = max(0.0, min(2.0 ** min(trouble, 5), 30.0) - (time.monotonic() - began))
                    await asyncio.wait_for(server.suspected.wait(), wait)

    async def _rest(self, server: Server) -> None:
        """Returns when the server may start: its memory may be lent to others."""
        seat = self._state.seats[server.seat]
        while server.process is not None and seat.asleep and not server.leaving:
            if not server.waits:
                server.waits = True
                self._state.tell()
            await self._state.news()
        server.waits = False

    async def _raise_up(self, server: Server) -> None:
        if server.process is not None:
            await server.client.close()
            server.process.start()  # in this thread: Linux takes it for the parent that the process is bound to
            server.client = ServerClient(server.process.address, token=self._options.token)
        deadline = time.monotonic() + self._options.start_seconds
        while True:
            server.check_process()
            if server.leaving:
                return
            if server.process is not None and self._state.seats[server.seat].asleep:
                raise ServerError("it was to sleep before it was up; it starts when it is to wake")
            try:
                await server.client.load(CONNECT)
                break
            except Refused:  # no waiting helps
                raise
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"not ready after {self._options.start_seconds:g} s (servers.start_seconds); last: {error}"
                    ) from error
            await asyncio.sleep(0.25)
        # One of others may sleep since an earlier run, or a loss.
        server.holds, server.asleep = None, server.process is None and await server.client.asleep()
        server.served.clear()
        server.down.clear()
        server.trouble = ""
        await self._bring(server)
        server.cleared = server.doubts
        server.up = True
        self._state.tell()

    async def _watch(self, server: Server) -> None:
        """Returns when the server leaves. Raises ServerError when it is lost."""
        while not server.leaving:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.suspected.wait(), self._options.look_every)
            server.suspected.clear()
            server.check_process()
            if server.trouble:
                raise ServerError(server.trouble)
            changing = server.lock.locked()  # its weights, say: it may be silent
            try:
                if not changing:
                    await server.look(self._options.patience)
                    self._state.tell()
            except ServerError:
                if not (changing := server.lock.locked()):
                    raise
            excused = changing or self._state.seats[server.seat].paused
            # Before it counts a request, a server reads it, and may have hundreds of others to read.
            server.check_silence(excused, 3 * self._options.patience, self._options.start_seconds)

    def _lose(self, server: Server, why: str) -> None:
        """Ends this life of a server: the next one gets the weights and the orders of its seat."""
        server.trouble = why
        server.suspect()
        self._lower(server)

    def _lower(self, server: Server) -> None:
        server.up = False
        server.down.set()
        self._state.tell()

    # --- weights --------------------------------------------------------------------------------

    async def publish(self, seat: int, version: int, params: Mapping[str, Any]) -> None:
        """Brings the seat's servers to these weights; those that sleep wake. Servers that can't take them are lost, and
        come back with them.

        Raises WeightsMismatch for a server that holds something else afterwards, OSError where there is no room."""
        self._state.raise_fatal()
        written = await asyncio.to_thread(self._folders.write, version, params)
        await asyncio.to_thread(self._route.publish, written, params)
        self._state.seats[seat].wanted = written
        await self.wake(seat)
        wanted = [seat.wanted for seat in self._state.seats if seat.wanted is not None]
        await asyncio.to_thread(lambda: self._folders.keep(self._route.keep(wanted)))
        self._state.raise_fatal()

    def oldest(self) -> Published | None:
        """The oldest weights that a seat is to have; from any thread."""
        wanted = [seat.wanted for seat in self._state.seats if seat.wanted is not None]
        return min(wanted, key=lambda published: published.version, default=None)

    async def take(self, published: Published | None) -> None:
        """Makes these, of another fleet with the same folders, the weights of all seats, which must sleep."""
        for seat in self._state.seats:
            seat.wanted = published
        if published is not None:
            await asyncio.to_thread(self._route.publish, published)

    async def _bring_all(self, seat: int) -> None:
        async def bring(server: Server) -> None:
            client = server.client
            try:
                await self._bring(server)
            except EngineError as error:
                if server.client is client:  # else it is another life of it by now
                    place = self._state.seats[seat]
                    weights = "an order" if place.wanted is None else f"version {place.wanted.version} of the weights"
                    self._lose(server, f"it did not {'sleep' if place.asleep else f'take {weights}'}: {error}")
            except Exception as error:
                self._state.fail(error)

        await asyncio.gather(*(bring(server) for server in self._state.of_seat(seat) if server.up))

    async def _bring(self, server: Server) -> None:
        """Brings a server to the weights of its seat, and proves it, before it generates anything with them; or puts it
        to sleep."""
        seat = self._state.seats[server.seat]
        async with server.lock:
            while True:
                if seat.asleep:
                    await server.sleep(self._options.patience)
                    return
                await server.wake()
                wanted = seat.wanted
                if wanted is not None and server.holds is not wanted:
                    try:
                        await server.update(wanted, self._route)
                    except Exception:
                        if seat.wanted is wanted:  # else its folder may be gone
                            raise
                    continue
                if not seat.paused:
                    await server.client.resume()
                if seat.wanted is wanted and not seat.asleep:  # still
                    return

    # --- orders to a seat -----------------------------------------------------------------------

    async def pause(self, seat: int) -> None:
        self._state.seats[seat].paused = True
        await self._on_seat(seat, lambda server: server.client.pause("in_place"))

    async def resume(self, seat: int) -> None:
        self._state.seats[seat].paused = False
        self._state.tell()
        if self._options.together:
            await self._requests.sent(seat, self._options.start_seconds)
        await self._on_seat(seat, lambda server: server.client.resume())

    async def sleep(self, seat: int) -> None:
        """Has the seat's servers give their memory back, weights included. Until it wakes, none starts: one that is
        about to, or that ends meanwhile, waits. One that is starting may come up first, or it never would where rounds
        are shorter; samples of other seats end first. Raises EngineError where samples of this one run."""
        if running := self._requests.running(seat):
            raise EngineError(f"can't sleep: {running} samples are running; abort them first")
        place = self._state.seats[seat]
        starting = {server: server.restarts for server in self._state.of_seat(seat) if server.starting}
        await self._until(lambda: not any(s.starting and s.restarts == before for s, before in starting.items()))
        place.asleep = True
        self._state.tell()
        await self._until(lambda: not any(server.open for server in self._state.of_seat(seat) if server.up))
        await self._bring_all(seat)
        await self._until(lambda: not place.asleep or all(server.rests for server in self._state.of_seat(seat)))

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._state.raise_fatal()
            await self._state.news()

    async def wake(self, seat: int) -> None:
        """Servers that slept have no weights: they are given those of the seat."""
        self._state.seats[seat].asleep = False
        self._state.tell()
        await self._bring_all(seat)

    async def _on_seat(self, seat: int, order: Callable[[Server], Awaitable[None]]) -> None:
        """Gives an order to the seat's servers at once. One that does not take it is lost."""

        async def give(server: Server) -> None:
            try:
                async with server.lock:
                    if not server.asleep:  # else it hears of it when it wakes
                        await order(server)
            except ServerError as error:
                self._lose(server, str(error))

        await asyncio.gather(*(give(server) for server in self._state.of_seat(seat) if server.up))

    async def ready(self) -> None:
        """Returns when all servers are up, with the weights of their seats or asleep. Raises EngineError, which says
        what is wrong with the others, after `options.start_seconds`."""
        deadline = time.monotonic() + self._options.start_seconds
        while missing := [server for server in self._state.servers if not server.up]:
            self._state.raise_fatal()
            if time.monotonic() > deadline:
                raise EngineError("; ".join(server.state() for server in missing))
            await self._state.news()

    # --- what it says of itself, from any thread ------------------------------------------------

    def stats(self, seat: int) -> EngineStats:
        """Counts of the seat, a moment old."""
        place, here = self._state.seats[seat], self._state.of_seat(seat)
        return EngineStats(
            version=-1 if place.wanted is None else place.wanted.version,
            running=self._requests.running(seat),
            waiting=0,
            slots=self.limits.slots * max(len(here), 1),
            tokens_generated=place.tokens,
            tokens_prefilled=0,
            preemptions=place.preemptions,
        )

    def servers(self) -> list[ServerStatus]:
        """The servers as they are now."""
        return [server.status() for server in list(self._state.servers)]

    def busy(self) -> dict[str, list[tuple[float, float]]]:
        """The times in which each server ran samples, by `time.perf_counter`."""
        return {server.name: server.busy_times() for server in list(self._state.servers)}

    # --- requests -------------------------------------------------------------------------------

    async def serve(self, seat: int, request: GenerateRequest, put: Callable[[TokenChunk], None]) -> None:
        """Generates: `put` gets one chunk a sample, with all of its tokens, when it has ended. Raises EngineError."""
        await self._requests.serve(seat, request, put)

    async def abort(self, seat: int, rid: str) -> None:
        """Ends a request (`rid`), or one sample of it (`rid/i`)."""
        await self._requests.abort(seat, rid)
