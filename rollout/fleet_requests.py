"""The requests of a fleet: where each runs, what is kept of it when its server is lost, and its end."""

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
        self.begun = list(prefixes)  # token ids that were there before
        self.came = [SampleReply("") for _ in range(request.n)]  # since then, all of it certain
        self.open = set(range(request.n))
        self.aborted: set[int] = set()
        self.running: Attempt | None = None
        self.lost: collections.Counter[str] = collections.Counter()  # attempts, by the names of their servers

    def ids(self, sample: int) -> tuple[int, ...]:
        return (*self.begun[sample], *self.came[sample].ids)

    def end(self, sample: int, finish: FinishReason) -> None:
        if sample in self.open:
            self.open.remove(sample)
            came = self.came[sample]
            tokens = tuple(came.ids), tuple(came.logprobs), tuple(came.versions)
            self.put(TokenChunk(self.request.rid, sample, *tokens, finish))

    def keep(self, sample: int, reply: SampleReply) -> None:
        """Adds the certain tokens of a reply: those whose version is known."""
        came, certain = self.came[sample], len(reply.versions)
        came.ids += reply.ids[:certain]
        came.logprobs += reply.logprobs[:certain]
        came.versions += reply.versions


class FleetRequests:
    """Generates on the servers of `state`, in its thread. Servers are given tickets in the place of pixels (`shadows`),
    or the pixels that `fetch` has for these."""

    def __init__(self, state: FleetState, *, fetch: Fetch | None = None, shadows: bool = False) -> None:
        self._state, self._options = state, state.options
        self._fetch, self._shadows = fetch, shadows
        self._jobs: dict[str, FleetJob] = {}

    def running(self, seat: Seat) -> int:
        """The number of the seat's samples that are open."""
        return sum(len(job.open) for job in list(self._jobs.values()) if job.seat is seat)

    async def sent(self, seat: Seat, most: float) -> None:
        """Returns when servers have what the seat was asked for, or after so many seconds."""

        def missing() -> bool:
            jobs = (job for job in self._jobs.values() if job.seat is seat)
            return any(job.running is None or not job.running.accepted for job in jobs)

        await self._state.until(lambda: not missing(), most)

    async def serve(self, seat: Seat, request: GenerateRequest, put: Callable[[TokenChunk], None]) -> None:
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
        """The least loaded server of the job's seat, or of another seat where none is left that the job was not lost
        on. Waits until there is one; None when a sample is aborted meanwhile."""
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
        """Says whether the job can go to the server, and would not fall back behind the weights of its seat."""
        wanted = job.seat.wanted
        if not server.usable or server.seat.paused or server.seat.asleep:
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
        """The body of a request as a server gets it; pixels that the server can't fetch are fetched for it. Raises
        EngineError where they can't be."""
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
        # Each event has all tokens so far: more than some dozens of them would be quadratic in a response's length.
        interval = max(self._options.interval, request.sampling.max_new_tokens // 32)
        body = await asyncio.to_thread(self._body, request, rids, interval)  # patches are many bytes
        if job.aborted & job.open:  # in the meantime
            return
        job.running, attempt.heard = attempt, time.monotonic()
        sample_of = {reply.rid: sample for sample, reply in replies.items()}
        version = -1 if server.holds is None else server.holds.version
        least = max(server.served, default=-1)  # an older one is of another life, whatever its number

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
        if job.open & replies.keys():  # not our doing
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
        """Has samples aborted until they are: an order to a server may come before the samples do."""
        while (attempt := job.running) is not None and (left := chosen & job.open & attempt.replies.keys()):
            await attempt.abort(left)
            await asyncio.sleep(self._options.look_every)
