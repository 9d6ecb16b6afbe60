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
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from models.config import AnyConfig

from . import wire
from .engine import EngineError, EngineStats, FinishReason, GenerateRequest, TokenChunk
from .fleet_job import FleetJob, Server
from .local_server import LocalServer
from .requests import EngineLimits, ended_before
from .sglang import CONNECT, SampleReply, ServerClient, ServerError
from .weights.published import Published, SharedFolders

log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class FleetOptions:
    patience: float = 10.0  # seconds without an answer after which a server is taken for hung
    start_seconds: float = 600.0  # that a server may take to start, or to come back
    look_every: float = 1.0  # seconds between two looks at a server
    attempts: int = 4  # servers that a request may lose before it fails
    token: str = ""  # that servers beyond this host ask for
    interval: int = 16  # tokens between two looks at a response; those since the last one are lost with a server


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
        options: FleetOptions = FleetOptions(),
    ) -> None:
        self.config, self.limits, self.options = config, limits, options
        self._folders = folders
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
        self._closed = False

    def start(self) -> None:
        """Starts the servers; the first use does, too. It may be called again."""
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
        try:
            self.start()
        except EngineError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Ends servers of this fleet, and whatever still runs. It may be called again."""
        if not self._closed and self._thread.ident is not None:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._closed = True
        self._loop.close()
        self._folders.close()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers:
            await server.client.close()
        await asyncio.gather(*(asyncio.to_thread(s.process.stop) for s in self._servers if s.process))
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
        self._lower(server)

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
        trouble = 0  # in a row
        while not server.leaving:
            began = time.monotonic()
            try:
                await self._raise_up(server)
                trouble = 0
                await self._watch(server)
            except EngineError as error:
                reason = str(error)
            except Exception as error:  # weights that did not arrive, a full disk: no restart mends that
                self._fatal = error
                reason = str(error)
            else:
                reason = "left"
            server.reason = reason
            self._lower(server)
            if server.leaving or self._fatal is not None:
                break
            log.warning("%r is lost: %s", server, reason)
            if server.process is not None:
                await asyncio.to_thread(server.process.kill)
            server.restarts += 1
            trouble += 1
            if trouble > 1:  # it did not even come up
                await asyncio.sleep(max(0.0, min(2.0**trouble, 30.0) - (time.monotonic() - began)))
        if server.process is not None:
            await asyncio.to_thread(server.process.stop)
        self._tell()

    async def _raise_up(self, server: Server) -> None:
        if server.process is not None:
            await server.client.close()
            server.process.start()
            server.client = ServerClient(server.process.address, token=self.options.token)
        deadline = time.monotonic() + self.options.start_seconds
        while True:
            self._check_process(server)
            try:
                await server.client.load(CONNECT)
                break
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"not ready after {self.options.start_seconds:g} s (servers.start_seconds); last: {error}"
                    ) from error
            await asyncio.sleep(0.25)
        server.holds = None
        server.served.clear()
        server.down.clear()
        server.suspected.clear()
        server.trouble = ""
        await self._bring(server)
        server.up = True
        self._tell()

    async def _watch(self, server: Server) -> None:
        """Returns when the server leaves. Raises ServerError when it is lost."""
        while not server.leaving:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.suspected.wait(), self.options.look_every)
            server.suspected.clear()
            self._check_process(server)
            if server.trouble:
                raise ServerError(server.trouble)
            if not server.lock.locked():  # while its weights change, it may be silent
                server.load = await server.client.load(self.options.patience)

    def _check_process(self, server: Server) -> None:
        if server.process is not None and (status := server.process.ended()) is not None:
            raise ServerError(f"its process ended with status {status}; its log, {server.process.log}, ends with:\n"
                              f"{server.process.last_words()}")  # fmt: skip

    def _lower(self, server: Server) -> None:
        server.up = False
        server.down.set()
        self._tell()

    # --- weights --------------------------------------------------------------------------------

    async def publish(self, seat: int, version: int, params: Mapping[str, Any]) -> None:
        """Brings the seat's servers to these weights. Servers that can't take them are lost, and come back with them.

        Raises WeightsMismatch for a server that holds something else afterwards, OSError where there is no room."""
        self._raise_fatal()
        self._wanted[seat] = await asyncio.to_thread(self._folders.write, version, params)

        async def bring(server: Server) -> None:
            try:
                await self._bring(server)
            except EngineError as error:
                server.trouble = f"it did not take version {version} of the weights: {error}"
                server.suspected.set()
                self._lower(server)

        await asyncio.gather(*(bring(server) for server in self._servers if server.seat == seat and server.up))
        self._folders.keep([published for published in self._wanted if published is not None])
        self._raise_fatal()

    async def _bring(self, server: Server) -> None:
        """Brings a server to the weights of its seat, and proves it, before it generates anything with them."""
        async with server.lock:
            while (wanted := self._wanted[server.seat]) is not None and server.holds is not wanted:
                await server.client.pause("retract")
                server.holds = None
                await server.client.update_from_disk(str(wanted.folder), wanted.version)
                wanted.checksums.check(await server.client.checksums(), server.client.address)
                server.served.add(wanted.version)
                server.holds = wanted
            if not self._paused[server.seat]:
                await server.client.resume()

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
        """Gives an order to the seat's servers at once. One that can't be reached is looked at."""

        async def give(server: Server) -> None:
            try:
                async with server.lock:
                    await order(server)
            except ServerError:
                server.suspected.set()

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

    # --- requests -------------------------------------------------------------------------------

    async def serve(self, seat: int, request: GenerateRequest, put: Callable[[TokenChunk], None]) -> None:
        """Generates: `put` gets one chunk a sample, with all of its tokens, when it has ended. Raises EngineError."""
        if request.rid in self._jobs:
            raise EngineError(f"request {request.rid!r}: a request of this id is already in flight")
        job = self._jobs[request.rid] = FleetJob(request, seat, put)
        try:
            lost: list[str] = []
            while self._settle(job):
                server = await self._server_for(job)
                if server is None:  # aborted while there was none
                    continue
                try:
                    await self._attempt(job, server)
                except ServerError as error:
                    server.suspected.set()
                    lost.append(str(error))
                    if len(lost) >= self.options.attempts:
                        raise EngineError(f"request {request.rid!r} was lost {len(lost)} times: {lost[-1]}") from error
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
        """The least loaded server of the job's seat, or of another where it has none. Waits until there is one; None
        when the job is changed meanwhile."""
        deadline = time.monotonic() + self.options.start_seconds
        while True:
            self._raise_fatal()
            usable = [s for s in self._servers if s.up and s.holds is not None and not self._paused[s.seat]]
            here = [server for server in usable if server.seat == job.seat]
            if here or (usable and not self._paused[job.seat]):
                return min(here or usable, key=lambda server: (server.open, server.name))
            if job.aborted & job.open:
                return None
            if time.monotonic() > deadline:
                reasons = [f"{server!r}: {server.reason or 'is starting'}" for server in self._servers]
                raise EngineError(
                    f"request {job.request.rid!r}: no server for {self.options.start_seconds:g} s "
                    f"(servers.start_seconds); {'; '.join(reasons) or 'all have left'}"
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 1.0)

    async def _attempt(self, job: FleetJob, server: Server) -> None:
        """Has one server generate what is open, until it has, or fails. What is certain is kept in either case."""
        rids = {sample: uuid.uuid4().hex for sample in sorted(job.open)}
        replies = [SampleReply(rid) for rid in rids.values()]
        prefixes = tuple(map(job.ids, range(job.request.n)))
        request = dataclasses.replace(job.request, prefix_ids=prefixes)
        body = await asyncio.to_thread(  # patches are many bytes
            wire.request_body, request, rids, self.config, interval=self.options.interval
        )
        job.running = server, rids
        server.open += len(rids)
        collecting = asyncio.ensure_future(self._collect(job, server, body, dict(zip(rids, replies, strict=True))))
        falling = asyncio.ensure_future(server.down.wait())
        try:
            await asyncio.wait({collecting, falling}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                raise ServerError(f"{server!r} was lost")
            collecting.result()
        except asyncio.CancelledError:  # nobody listens any more; a closed connection tells a server late
            self._start(self._abort_there(server, rids.values()))
            raise
        finally:
            for task in (collecting, falling):
                task.cancel()
            await asyncio.gather(collecting, falling, return_exceptions=True)
            job.running = None
            server.open -= len(rids)
            for sample, reply in zip(rids, replies, strict=True):
                if sample in job.open and reply.finish is None:
                    job.keep(sample, reply)
                self._count(job, server, len(reply.versions))

    def _count(self, job: FleetJob, server: Server, tokens: int) -> None:
        server.tokens += tokens
        self._tokens[job.seat] += tokens

    async def _collect(
        self, job: FleetJob, server: Server, body: wire.Json, replies: Mapping[int, SampleReply]
    ) -> None:
        sample_of = {reply.rid: sample for sample, reply in replies.items()}
        stop_ids = job.request.sampling.stop_ids
        ordered = list(replies.values())
        version = -1 if server.holds is None else server.holds.version
        ending = server.client.generate(body, ordered, self.limits.vocabulary, version)
        async with contextlib.aclosing(ending) as stream:
            async for reply in stream:
                sample, finish = sample_of[reply.rid], reply.finish
                assert finish is not None
                if unknown := set(reply.versions) - server.served:
                    reply.versions = []
                    reply.finish = None
                    raise ServerError(f"{server!r} answers with weights {sorted(unknown)}, which it was not given")
                if finish is FinishReason.STOP and stop_ids and reply.ids[-1] not in stop_ids:
                    raise EngineError(
                        f"{server!r} ends answers at token {reply.ids[-1]} of its own accord (its checkpoint's "
                        f"generation_config.json), stop_ids are {stop_ids}"
                    )
                job.keep(sample, reply)
                if finish is not FinishReason.ABORT or sample in job.aborted:
                    job.end(sample, finish)
        if job.open & replies.keys():  # not our doing
            raise ServerError(f"{server!r} ended {len(job.open)} samples that it should not have")

    async def abort(self, seat: int, rid: str) -> None:
        """Ends a request (`rid`), or one sample of it (`rid/i`)."""
        name, _, sample = rid.partition("/")
        job = self._jobs.get(name)
        if job is None or job.seat != seat or not (sample.isdecimal() or not sample):
            return
        chosen = ({int(sample)} if sample else set(range(job.request.n))) & job.open
        job.aborted |= chosen
        self._tell()
        if job.running is not None:
            server, rids = job.running
            await self._abort_there(server, [rids[sample] for sample in sorted(chosen & rids.keys())])

    async def _abort_there(self, server: Server, rids: Iterable[str]) -> None:
        try:
            await asyncio.gather(*map(server.client.abort, rids))
        except EngineError:
            server.suspected.set()
