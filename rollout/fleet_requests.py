"""The requests of a fleet: each runs on a server, and continues on another if that server is lost."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import time
import uuid
from collections.abc import Callable, Mapping

from models.shadow import Fetch, ShadowTensor

from . import wire
from .engine import EngineError, FinishReason, GenerateRequest, TokenChunk
from .fleet_server import Attempt, FleetState, Seat, Server
from .requests import ended_before
from .sglang import SampleReply, ServerError


class FleetJob:
    """A request under way, and the tokens that each sample has so far."""

    def __init__(self, request: GenerateRequest, seat: Seat, put: Callable[[TokenChunk], None]) -> None:
        self.request, self.seat, self.put = request, seat, put
        prefixes = request.prefix_ids or ((),) * request.n
        self.begun = list(prefixes)  # token ids of the prefixes
        self.came = [SampleReply("") for _ in range(request.n)]  # tokens behind the prefixes, all of them certain
        self.open = set(range(request.n))
        self.aborted: set[int] = set()
        self.running: Attempt | None = None
        self.lost: collections.Counter[str] = collections.Counter()  # lost attempts, by the names of their servers

    def ids(self, sample: int) -> tuple[int, ...]:
        return (*self.begun[sample], *self.came[sample].ids)

    def end(self, sample: int, finish: FinishReason) -> None:
        if sample in self.open:
            self.open.remove(sample)
            came = self.came[sample]
            tokens = tuple(came.ids), tuple(came.logprobs), tuple(came.versions)
            self.put(TokenChunk(self.request.rid, sample, *tokens, finish))

    def keep(self, sample: int, reply: SampleReply) -> None:
        """Adds the certain tokens of a reply: the tokens that have a version."""
        came, certain = self.came[sample], len(reply.versions)
        came.ids += reply.ids[:certain]
        came.logprobs += reply.logprobs[:certain]
        came.versions += reply.versions


class FleetRequests:
    """Generates on the servers of `state`, in its thread. Servers get tickets in the place of pixels (`shadows`), or
    the pixels that `fetch` returns for the tickets."""

    def __init__(self, state: FleetState, *, fetch: Fetch | None = None, shadows: bool = False) -> None:
        self._state, self._options = state, state.options
        self._fetch, self._shadows = fetch, shadows
        self._jobs: dict[str, FleetJob] = {}

    def running(self, seat: Seat) -> int:
        """The number of the seat's samples that are open."""
        return sum(len(job.open) for job in list(self._jobs.values()) if job.seat is seat)

    async def sent(self, seat: Seat, most: float) -> None:
        """Returns when servers have accepted all requests of the seat, or after `most` seconds."""

        def missing() -> bool:
            jobs = (job for job in self._jobs.values() if job.seat is seat)
            return any(job.running is None or not job.running.accepted for job in jobs)

        await self._state.until(lambda: not missing(), most)

    async def serve(self, seat: Seat, request: GenerateRequest, put: Callable[[TokenChunk], None]) -> None:
        """Generates: when a sample has ended, `put` gets all its tokens in one chunk. Raises EngineError."""
        if request.rid in self._jobs:
            raise EngineError(f"request {request.rid!r}: a request of this id is already in flight")
        job = self._jobs[request.rid] = FleetJob(request, seat, put)
        try:
            while self._settle(job):
                server = await self._server_for(job)
                if server is None:  # a sample was aborted while there was no server
                    continue
                try:
                    await self._attempt(job, server)
                except ServerError as error:
                    server.suspect()
                    if not server.leaving:  # a server that leaves loses its attempts
                        job.lost[server.name] += 1
                    if (lost := job.lost.total()) >= self._options.attempts:
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
        """The server that lost the job least often; among equals one of the job's seat, then the least loaded. Waits
        until a server is usable; None if a sample is aborted meanwhile."""
        deadline = time.monotonic() + self._options.start_seconds
        while True:
            self._state.raise_fatal()
            if job.aborted & job.open:
                return None
            if job.seat.paused or job.seat.asleep:
                deadline = time.monotonic() + self._options.start_seconds
            elif usable := [server for server in self._state.members if self._fits(server, job)]:
                return min(usable, key=lambda s: (job.lost[s.name], s.seat is not job.seat, s.open, s.name))
            if time.monotonic() > deadline:
                reasons = [server.state() for server in self._state.members]
                raise EngineError(
                    f"request {job.request.rid!r}: no server for {self._options.start_seconds:g} s "
                    f"(servers.start_seconds); {'; '.join(reasons) or 'all have left'}"
                )
            await self._state.news()

    def _fits(self, server: Server, job: FleetJob) -> bool:
        """Says whether the server can take the job, and has weights no older than those of the job's seat."""
        wanted = job.seat.wanted
        if not server.usable or server.seat.paused or server.seat.asleep:
            return False
        return wanted is None or (server.holds is not None and server.holds.version >= wanted.version)

    async def _attempt(self, job: FleetJob, server: Server) -> None:
        """Has one server generate the open samples until they end or it fails; certain tokens are kept either way."""
        attempt = Attempt(server, {sample: SampleReply(uuid.uuid4().hex) for sample in sorted(job.open)})
        server.begin(attempt)  # at once: other jobs are looking for the least loaded server
        tasks = [asyncio.ensure_future(self._collect(job, attempt)), asyncio.ensure_future(server.down.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise ServerError(f"{server!r} was lost: {server.trouble or server.reason}")
            tasks[0].result()
        except asyncio.CancelledError:  # the consumer left; servers notice a closed connection late
            self._state.begin(attempt.abort(attempt.replies))
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
                job.seat.tokens += len(reply.versions)
                job.seat.preemptions += reply.preemptions

    def _body(self, request: GenerateRequest, rids: Mapping[int, str], interval: int) -> wire.Json:
        """The body of a request for a server; it has the pixels if the server can't fetch them. Raises EngineError if
        `fetch` fails."""
        vision = request.prompt.vision
        if not self._shadows and vision is not None and isinstance(vision.patches_PX, ShadowTensor):
            assert self._fetch is not None, "requests are checked"
            try:
                pixels = dataclasses.replace(vision, patches_PX=vision.patches_PX.materialize(self._fetch))
            except Exception as error:
                raise EngineError(f"request {request.rid!r} was lost: {type(error).__name__}: {error}") from error
            request = dataclasses.replace(request, prompt=dataclasses.replace(request.prompt, vision=pixels))
        return wire.request_body(request, rids, self._state.config, interval=interval)

    async def _collect(self, job: FleetJob, attempt: Attempt) -> None:
        server, replies = attempt.server, attempt.replies
        rids = {sample: reply.rid for sample, reply in replies.items()}
        request = dataclasses.replace(job.request, prefix_ids=tuple(map(job.ids, range(job.request.n))))
        # An event has all tokens so far: without a bound on events, their bytes grow with the square of the length.
        interval = max(self._options.interval, request.sampling.max_new_tokens // 32)
        body = await asyncio.to_thread(self._body, request, rids, interval)  # in a thread: patches are many bytes
        if job.aborted & job.open:  # while the body was written
            return
        job.running, attempt.heard = attempt, time.monotonic()
        sample_of = {reply.rid: sample for sample, reply in replies.items()}
        version = -1 if server.holds is None else server.holds.version
        least = max(server.served, default=-1)  # an older version is not from this attempt

        def accepted() -> None:
            attempt.accepted = True
            self._state.tell()

        ending = server.client.generate(body, list(replies.values()), self._state.limits.vocabulary, version, accepted)
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
        if job.open & replies.keys():  # none of our orders ended them
            raise ServerError(f"{server!r} aborted {len(job.open)} samples, which nobody asked for")

    async def abort(self, seat: Seat, rid: str) -> None:
        """Ends a request (`rid`), or one sample of it (`rid/i`)."""
        name, _, sample = (rid, "", "") if rid in self._jobs else rid.rpartition("/")
        job = self._jobs.get(name)
        if job is None or job.seat is not seat or not (sample.isdecimal() or not sample):
            return
        chosen = ({int(sample)} if sample else set(range(job.request.n))) & job.open
        job.aborted |= chosen
        self._state.tell()
        self._state.begin(self._insist(job, chosen))

    async def _insist(self, job: FleetJob, chosen: set[int]) -> None:
        """Aborts samples again and again until they end: an abort may reach the server before the samples do."""
        while (attempt := job.running) is not None and (left := chosen & job.open & attempt.replies.keys()):
            await attempt.abort(left)
            await asyncio.sleep(self._options.look_every)
