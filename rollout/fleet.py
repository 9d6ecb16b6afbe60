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
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from models.config import AnyConfig

from . import wire
from .engine import EngineError, EngineStats, FinishReason, GenerateRequest, TokenChunk
from .fleet_job import Attempt, FleetJob, FleetOptions, Server, ServerStatus
from .local_server import LocalServer
from .requests import EngineLimits, ended_before
from .sglang import CONNECT, Refused, SampleReply, ServerClient, ServerError
from .weights.published import Published, SharedFolders
from .weights.routes import Route, SharedMemory

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Fleet:
    """Servers for `rollout.fleet_engine`s, one a seat. `start`, `close` at the end; `join` and `leave` in between.

    `processes` are started by the fleet, `addresses` are of servers that others start; server `i` takes seat
    `i % seats`. `limits` are what a server can take. Every method but `close` may be called from any thread.
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
        route: Route | None = None,
        options: FleetOptions | None = None,
    ) -> None:
        self.config, self.limits, self.options = config, limits, options or FleetOptions()
        self._folders, self._route = folders, route or SharedMemory()
        self._first = [*processes, *addresses]
        self.seats = seats or len(self._first)
        if not self.seats:
            raise EngineError("a fleet needs a server at least")
        self._servers: list[Server] = []
        self._joined = 0
        self._jobs: dict[str, FleetJob] = {}
        self._wanted: list[Published | None] = [None] * self.seats
        self._paused = [False] * self.seats
        self._tokens = [0] * self.seats
        self._fatal: Exception | None = None  # what no restart can mend
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()  # replaced each time it is set
        self._tasks: set[asyncio.Task[None]] = set()
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
            if not self._closed and self._thread.ident is not None:
                asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
            self._closed = True
            self._loop.close()
            self._route.close()
            self._folders.close()

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
        seat = min(range(self.seats), key=lambda seat: (sum(s.seat == seat for s in self._servers), seat))
        server = Server(f"server {self._joined}", seat, client, local)
        self._joined += 1
        self._servers.append(server)
        self._start(self._look_after(server))
        return server.name

    def leave(self, name: str) -> None:
        """A server leaves: its samples go on elsewhere. One that the fleet started ends. Raises EngineError for a name
        that there is not."""
        self.call(self._leave(name)).result()

    async def _leave(self, name: str) -> None:
        server = next((server for server in self._servers if server.name == name), None)
        if server is None:
            raise EngineError(f"no {name} in the fleet; there are {', '.join(s.name for s in self._servers)}")
        server.leaving = True
        self._servers.remove(server)
        server.reason = "left"
        self._lower(server)
        server.suspect()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tell(self) -> None:
        """Wakes those who wait for a server, or for anything else."""
        self._changed.set()
        self._changed = asyncio.Event()

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
            began = time.monotonic()
            try:
                await self._raise_up(server)
                trouble = 0
                await self._watch(server)
            except EngineError as error:
                server.reason = str(error)
            except Exception as error:
                self._fail(error)
                server.reason = str(error)
            else:
                return
            self._lower(server)
            await self._route.forget(server.client)
            if server.leaving or self._fatal is not None:
                return
            log.info("%r is lost: %s", server, server.reason)  # who shows `servers` tells users
            if server.process is not None:
                await asyncio.to_thread(server.process.kill)
            server.restarts += 1
            trouble += 1
            if trouble > 1:  # it did not even come up
                server.suspected.clear()
                with contextlib.suppress(TimeoutError):
                    wait = max(0.0, min(2.0**trouble, 30.0) - (time.monotonic() - began))
                    await asyncio.wait_for(server.suspected.wait(), wait)

    async def _raise_up(self, server: Server) -> None:
        if server.process is not None:
            await server.client.close()
            server.process.start()  # in this thread: Linux takes it for the parent that the process is bound to
            server.client = ServerClient(server.process.address, token=self.options.token)
        deadline = time.monotonic() + self.options.start_seconds
        while True:
            server.check_process()
            if server.leaving:
                return
            try:
                await server.client.load(CONNECT)
                break
            except Refused:  # no waiting helps
                raise
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"not ready after {self.options.start_seconds:g} s (servers.start_seconds); last: {error}"
                    ) from error
            await asyncio.sleep(0.25)
        server.holds = None
        server.served.clear()
        server.down.clear()
        server.trouble = ""
        await self._bring(server)
        server.cleared = server.doubts
        server.up = True
        self._tell()

    async def _watch(self, server: Server) -> None:
        """Returns when the server leaves. Raises ServerError when it is lost."""
        while not server.leaving:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.suspected.wait(), self.options.look_every)
            server.suspected.clear()
            server.check_process()
            if server.trouble:
                raise ServerError(server.trouble)
            changing = server.lock.locked()  # its weights, say: it may be silent
            try:
                if not changing:
                    await server.look(self.options.patience)
                    self._tell()
            except ServerError:
                if not (changing := server.lock.locked()):
                    raise
            excused = changing or self._paused[server.seat]
            # Before it counts a request, a server reads it, and may have hundreds of others to read.
            server.check_silence(excused, 3 * self.options.patience, self.options.start_seconds)

    def _lose(self, server: Server, why: str) -> None:
        """Ends this life of a server: the next one gets the weights and the orders of its seat."""
        server.trouble = why
        server.suspect()
        self._lower(server)

    def _fail(self, error: Exception) -> None:
        """Ends it all: weights that did not arrive, a full disk. No restart mends that."""
        self._fatal = self._fatal or error
        self._tell()

    def _lower(self, server: Server) -> None:
        server.up = False
        server.down.set()
        self._tell()

    # --- weights --------------------------------------------------------------------------------

    async def publish(self, seat: int, version: int, params: Mapping[str, Any]) -> None:
        """Brings the seat's servers to these weights. Servers that can't take them are lost, and come back with them.

        Raises WeightsMismatch for a server that holds something else afterwards, OSError where there is no room."""
        self._raise_fatal()
        written = await asyncio.to_thread(self._folders.write, version, params)
        await asyncio.to_thread(self._route.publish, written)
        self._wanted[seat] = written

        async def bring(server: Server) -> None:
            client = server.client
            try:
                await self._bring(server)
            except EngineError as error:
                if server.client is client:  # else it is another life of it by now
                    self._lose(server, f"it did not take version {version} of the weights: {error}")
            except Exception as error:
                self._fail(error)

        await asyncio.gather(*(bring(server) for server in self._servers if server.seat == seat and server.up))
        wanted = [published for published in self._wanted if published is not None]
        await asyncio.to_thread(lambda: self._folders.keep(self._route.keep(wanted)))
        self._raise_fatal()

    async def _bring(self, server: Server) -> None:
        """Brings a server to the weights of its seat, and proves it, before it generates anything with them."""
        async with server.lock:
            while True:
                wanted = self._wanted[server.seat]
                if wanted is not None and server.holds is not wanted:
                    try:
                        await server.update(wanted, self._route)
                    except Exception:
                        if self._wanted[server.seat] is wanted:  # else its folder may be gone
                            raise
                    continue
                if not self._paused[server.seat]:
                    await server.client.resume()
                if self._wanted[server.seat] is wanted:  # still
                    return

    def _raise_fatal(self) -> None:
        if self._fatal is not None:
            raise self._fatal

    # --- orders to a seat -----------------------------------------------------------------------

    async def pause(self, seat: int) -> None:
        self._paused[seat] = True
        await self._on_seat(seat, lambda server: server.client.pause("in_place"))

    async def resume(self, seat: int) -> None:
        self._paused[seat] = False
        self._tell()
        await self._on_seat(seat, lambda server: server.client.resume())

    async def sleep(self, seat: int) -> None:
        if running := sum(len(job.open) for job in self._jobs.values() if job.seat == seat):
            raise EngineError(f"can't sleep: {running} samples are running; abort them first")
        await self._on_seat(seat, lambda server: server.client.sleep())

    async def wake(self, seat: int) -> None:
        await self._on_seat(seat, lambda server: server.client.wake())

    async def _on_seat(self, seat: int, order: Callable[[Server], Awaitable[None]]) -> None:
        """Gives an order to the seat's servers at once. One that does not take it is lost."""

        async def give(server: Server) -> None:
            try:
                async with server.lock:
                    await order(server)
            except ServerError as error:
                self._lose(server, str(error))

        await asyncio.gather(*(give(server) for server in self._servers if server.seat == seat and server.up))

    def stats(self, seat: int) -> EngineStats:
        """Counts of the seat; read from any thread, a moment old."""
        wanted = self._wanted[seat]
        here = [server for server in list(self._servers) if server.seat == seat]
        return EngineStats(
            version=-1 if wanted is None else wanted.version,
            running=sum(len(job.open) for job in list(self._jobs.values()) if job.seat == seat),
            waiting=0,
            slots=self.limits.slots * max(len(here), 1),
            tokens_generated=self._tokens[seat],
            tokens_prefilled=0,
        )

    def servers(self) -> list[ServerStatus]:
        """The servers as they are now; from any thread."""
        return [server.status() for server in list(self._servers)]

    def busy(self) -> dict[str, list[tuple[float, float]]]:
        """When each server ran samples, by `time.perf_counter`; from any thread."""
        return {server.name: server.busy_times() for server in list(self._servers)}

    # --- requests -------------------------------------------------------------------------------

    async def serve(self, seat: int, request: GenerateRequest, put: Callable[[TokenChunk], None]) -> None:
        """Generates: `put` gets one chunk a sample, with all of its tokens, when it has ended. Raises EngineError."""
        if request.rid in self._jobs:
            raise EngineError(f"request {request.rid!r}: a request of this id is already in flight")
        job = self._jobs[request.rid] = FleetJob(request, seat, put)
        try:
            while self._settle(job):
                server = await self._server_for(job)
                if server is None:  # aborted while there was none
                    continue
                try:
                    await self._attempt(job, server)
                except ServerError as error:
                    server.suspect()
                    if not server.leaving:  # that was to be
                        job.lost[server.name] += 1
                    if (lost := job.lost.total()) >= self.options.attempts:
                        raise EngineError(f"request {request.rid!r} was lost {lost} times: {error}") from error
        finally:
            del self._jobs[request.rid]

    def _settle(self, job: FleetJob) -> bool:
        """Ends samples that need no server any more. Returns whether some do."""
        for sample in sorted(job.open):
            if (finish := ended_before(job.ids(sample), job.request.sampling)) is not None:
                job.end(sample, finish)
            elif sample in job.aborted:
                job.end(sample, FinishReason.ABORT)
        return bool(job.open)

    async def _server_for(self, job: FleetJob) -> Server | None:
        """The least loaded server of the job's seat, or of another seat where none is left that the job was not lost
        on. Waits until there is one; None when a sample is aborted meanwhile."""
        deadline = time.monotonic() + self.options.start_seconds
        while True:
            self._raise_fatal()
            if job.aborted & job.open:
                return None
            if self._paused[job.seat]:
                deadline = time.monotonic() + self.options.start_seconds
            elif usable := [server for server in self._servers if self._fits(server, job)]:
                return min(usable, key=lambda s: (job.lost[s.name], s.seat != job.seat, s.open, s.name))
            if time.monotonic() > deadline:
                reasons = [server.state() for server in self._servers]
                raise EngineError(
                    f"request {job.request.rid!r}: no server for {self.options.start_seconds:g} s "
                    f"(servers.start_seconds); {'; '.join(reasons) or 'all have left'}"
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 1.0)

    def _fits(self, server: Server, job: FleetJob) -> bool:
        """The job can go there, and would not fall back behind the weights of its seat."""
        wanted = self._wanted[job.seat]
        if not server.usable or self._paused[server.seat]:
            return False
        return wanted is None or (server.holds is not None and server.holds.version >= wanted.version)

    async def _attempt(self, job: FleetJob, server: Server) -> None:
        """Has one server generate what is open, until it has, or fails. What is certain is kept in either case."""
        attempt = Attempt(server, {sample: SampleReply(uuid.uuid4().hex) for sample in sorted(job.open)})
        server.begin(attempt)  # at once: others are looking for the least loaded server
        tasks = [asyncio.ensure_future(self._collect(job, attempt)), asyncio.ensure_future(server.down.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise ServerError(f"{server!r} was lost: {server.trouble or server.reason}")
            tasks[0].result()
        except asyncio.CancelledError:  # nobody listens any more; a closed connection tells a server late
            self._start(attempt.abort(attempt.replies))
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            job.running = None
            server.end(attempt)
            for sample, reply in attempt.replies.items():
                if sample in job.open and reply.finish is None:
                    job.keep(sample, reply)
                server.tokens += len(reply.versions)
                self._tokens[job.seat] += len(reply.versions)

    async def _collect(self, job: FleetJob, attempt: Attempt) -> None:
        server, replies = attempt.server, attempt.replies
        rids = {sample: reply.rid for sample, reply in replies.items()}
        request = dataclasses.replace(job.request, prefix_ids=tuple(map(job.ids, range(job.request.n))))
        # Each event has all tokens so far: more than some dozens of them would be quadratic in a response's length.
        interval = max(self.options.interval, request.sampling.max_new_tokens // 32)
        body = await asyncio.to_thread(  # patches are many bytes
            wire.request_body, request, rids, self.config, interval=interval
        )
        if job.aborted & job.open:  # in the meantime
            return
        job.running, attempt.heard = attempt, time.monotonic()
        sample_of = {reply.rid: sample for sample, reply in replies.items()}
        version = -1 if server.holds is None else server.holds.version
        least = max(server.served, default=-1)  # an older one is of another life, whatever its number
        ending = server.client.generate(body, list(replies.values()), self.limits.vocabulary, version)
        async with contextlib.aclosing(ending) as stream:
            async for reply in stream:
                sample, finish = sample_of[reply.rid], reply.finish
                assert finish is not None
                if unknown := set(reply.versions) - {served for served in server.served if served >= least}:
                    reply.versions = []
                    reply.finish = None
                    raise ServerError(f"{server!r} answers with weights {sorted(unknown)}, which it was not given")
                job.keep(sample, reply)
                if finish is not FinishReason.ABORT or sample in job.aborted:
                    job.end(sample, finish)
        if job.open & replies.keys():  # not our doing
            raise ServerError(f"{server!r} aborted {len(job.open)} samples, which nobody asked for")

    async def abort(self, seat: int, rid: str) -> None:
        """Ends a request (`rid`), or one sample of it (`rid/i`)."""
        name, _, sample = (rid, "", "") if rid in self._jobs else rid.rpartition("/")
        job = self._jobs.get(name)
        if job is None or job.seat != seat or not (sample.isdecimal() or not sample):
            return
        chosen = ({int(sample)} if sample else set(range(job.request.n))) & job.open
        job.aborted |= chosen
        self._tell()
        self._start(self._insist(job, chosen))

    async def _insist(self, job: FleetJob, chosen: set[int]) -> None:
        """Has samples aborted until they are: an order to a server may come before the samples do."""
        while (attempt := job.running) is not None and (left := chosen & job.open & attempt.replies.keys()):
            await attempt.abort(left)
            await asyncio.sleep(self.options.look_every)
