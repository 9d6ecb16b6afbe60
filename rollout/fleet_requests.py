"""A request of a fleet: the request runs on a server, and continues on another server if the first is lost."""

import asyncio
import collections
import contextlib
import dataclasses
import time
import uuid
from collections.abc import Callable, Collection, Mapping

from models.shadow import ShadowTensor

from . import wire
from .engine import EngineError, FinishReason, GenerateRequest, TokenChunk
from .fleet_server import Attempt, FleetState, Seat, Server
from .requests import ended_before
from .sglang import Refused, SampleReply, ServerError

KNOWN_MEDIA = 1 << 16  # names of media of a server, at most; then all media are sent again


class FleetJob:
    """A request under way, and the tokens that each sample has so far. Its methods run in the fleet's thread, except
    `_body`. When a sample has ended, `put` gets the sample's tokens behind the prefix in one chunk."""

    def __init__(
        self, fleet: FleetState, seat: Seat, request: GenerateRequest, put: Callable[[TokenChunk], None]
    ) -> None:
        self._fleet, self._seat, self._request, self._put = fleet, seat, request, put
        self._begun = list(request.prefix_ids or ((),) * request.n)  # token ids of the prefixes
        self._came = [SampleReply("") for _ in range(request.n)]  # tokens with a version, behind the prefixes
        self.open = set(range(request.n))
        self._aborted: set[int] = set()
        self._running: Attempt | None = None
        self.accepted = False  # whether the server has the complete request
        self._left_out = False  # whether the last body lacked pixels that the server should have
        self.lost: collections.Counter[str] = collections.Counter()  # lost attempts, by the names of their servers

    async def run(self) -> None:
        """Generates until all samples have ended. Raises EngineError, or the error that ended the fleet."""
        while self._settle():
            server = await self._choose_server()
            if server is None:  # a sample was aborted while there was no server
                continue
            try:
                await self._attempt(server)
            except Refused:
                if not self._left_out:
                    raise
                server.media = set()  # the server has dropped pixels that the body left out
            except ServerError as error:
                server.media = set()
                server.suspect()
                if not server.leaving:  # a loss at a server that leaves does not count
                    self.lost[server.name] += 1
                if (lost := self.lost.total()) >= self._fleet.options.attempts:
                    raise EngineError(f"request {self._request.rid!r} was lost {lost} times: {error}") from error

    def abort(self, samples: Collection[int] = ()) -> None:
        """Ends these samples, or all samples if none is given."""
        chosen = self.open.intersection(samples or self.open)
        self._aborted |= chosen
        self._fleet.tell()
        self._fleet.begin(self._insist(chosen))

    # --- samples --------------------------------------------------------------------------------

    def _ids(self, sample: int) -> tuple[int, ...]:
        return (*self._begun[sample], *self._came[sample].ids)

    def _settle(self) -> bool:
        for sample in sorted(self.open):
            if (finish := ended_before(self._ids(sample), self._request.sampling)) is not None:
                self._end(sample, finish)
            elif sample in self._aborted:
                self._end(sample, FinishReason.ABORT)
        return bool(self.open)

    def _end(self, sample: int, finish: FinishReason) -> None:
        if sample in self.open:
            self.open.remove(sample)
            came = self._came[sample]
            tokens = tuple(came.ids), tuple(came.logprobs), tuple(came.versions)
            self._put(TokenChunk(self._request.rid, sample, *tokens, finish))

    def _keep(self, sample: int, reply: SampleReply) -> None:
        """Adds the tokens of a reply that have a version."""
        came, certain = self._came[sample], len(reply.versions)
        came.ids += reply.ids[:certain]
        came.logprobs += reply.logprobs[:certain]
        came.versions += reply.versions

    # --- servers --------------------------------------------------------------------------------

    async def _choose_server(self) -> Server | None:
        """The usable server that lost the request least often; among equals the server of the session's last turn, then
        a server of the seat, then the one with the fewest open samples. Returns None if a sample is aborted meanwhile.
        Raises EngineError if an awake, unpaused seat has no usable server for `start_seconds`."""
        seat, patience = self._seat, self._fleet.options.start_seconds
        deadline = time.monotonic() + patience
        while True:
            self._fleet.raise_fatal()
            if self._aborted & self.open:
                return None
            if seat.paused or seat.asleep:
                deadline = time.monotonic() + patience
            elif usable := [server for server in self._fleet.members if self._fits(server)]:
                home = self._home(min(server.open for server in usable))
                return min(usable, key=lambda s: (self.lost[s.name], s is not home, s.seat is not seat, s.open, s.name))
            if time.monotonic() > deadline:
                reasons = [server.state() for server in self._fleet.members if not server.seat.asleep]
                raise EngineError(
                    f"request {self._request.rid!r}: no server for {patience:g} s (servers.start_seconds); "
                    f"{'; '.join(reasons) or 'all have left'}"
                )
            await self._fleet.news()

    def _home(self, least: int) -> Server | None:
        """The server with the conversation so far; None if it is full and a server with `least` open samples is not."""
        homes = self._fleet.homes.get(self._request.session, {})
        home = homes.get(self._request.numbers[min(self.open)])
        return None if home is None or home.open >= self._fleet.limits.slots > least else home

    def _fits(self, server: Server) -> bool:
        """Says whether the server can take the request, and has weights no older than those of the seat."""
        wanted = self._seat.wanted
        if not server.usable or server.seat.paused or server.seat.asleep:
            return False
        return wanted is None or (server.holds is not None and server.holds.version >= wanted.version)

    async def _attempt(self, server: Server) -> None:
        """Has a server generate the open samples, until they end or the server fails. Tokens with a version are kept
        either way."""
        attempt = Attempt(server, {sample: SampleReply(uuid.uuid4().hex) for sample in sorted(self.open)})
        server.begin(attempt)  # before any wait: other requests look for the least loaded server
        if self._request.session:
            homes = self._fleet.homes.setdefault(self._request.session, {})
            homes |= {self._request.numbers[sample]: server for sample in attempt.replies}
        tasks = [asyncio.ensure_future(self._collect(attempt)), asyncio.ensure_future(server.down.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise ServerError(f"{server!r} was lost: {server.trouble or server.reason}")
            tasks[0].result()
        except asyncio.CancelledError:  # the consumer left; servers notice a closed connection late
            self._fleet.begin(attempt.abort(attempt.replies))
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._running, self.accepted = None, False
            server.end(attempt)
            for sample, reply in attempt.replies.items():
                if sample in self.open and reply.finish is None:
                    self._keep(sample, reply)
                server.tokens += len(reply.versions)
                self._seat.tokens += len(reply.versions)
                self._seat.preemptions += reply.preemptions

    async def _collect(self, attempt: Attempt) -> None:
        fleet, server, replies = self._fleet, attempt.server, attempt.replies
        known, names = server.media, set[str]()
        rids = {sample: reply.rid for sample, reply in replies.items()}
        body = await asyncio.to_thread(self._body, rids, known, names)
        self._left_out = not names.isdisjoint(known)
        if self._aborted & self.open:  # a sample was aborted while the body was written
            return
        self._running, attempt.heard = attempt, time.monotonic()
        sample_of = {reply.rid: sample for sample, reply in replies.items()}
        version = -1 if server.holds is None else server.holds.version
        least = max(server.served, default=-1)  # tokens of an older version are not from this attempt

        def accepted() -> None:
            self.accepted = True
            server.media = names | (server.media if len(server.media) < KNOWN_MEDIA else set())
            fleet.tell()

        ending = server.client.generate(body, list(replies.values()), fleet.limits.vocabulary, version, accepted)
        async with contextlib.aclosing(ending) as stream:
            async for reply in stream:
                sample, finish = sample_of[reply.rid], reply.finish
                assert finish is not None
                if unknown := set(reply.versions) - {served for served in server.served if served >= least}:
                    reply.versions = []
                    reply.finish = None
                    raise ServerError(f"{server!r} answers with weights {sorted(unknown)}, which it was not given")
                self._keep(sample, reply)
                if finish is not FinishReason.ABORT or sample in self._aborted:
                    self._end(sample, finish)
        if self.open & replies.keys():  # samples that the server ended without a call of `abort`
            raise ServerError(f"{server!r} aborted {len(self.open)} samples, which nobody asked for")

    def _body(self, rids: Mapping[int, str], known: Collection[str], names: set[str]) -> wire.Json:
        """`wire.request_body`, with pixels if the fleet has a `fetch`. Runs in another thread than the fleet's, since
        patches are many bytes. Raises EngineError if `fetch` fails."""
        fleet, request = self._fleet, self._request
        request = dataclasses.replace(request, prefix_ids=tuple(map(self._ids, range(request.n))))
        vision = request.prompt.vision
        if fleet.fetch is not None and vision is not None and isinstance(vision.patches_PX, ShadowTensor):
            try:
                pixels = dataclasses.replace(vision, patches_PX=vision.patches_PX.materialize(fleet.fetch))
            except Exception as error:
                raise EngineError(f"request {request.rid!r} was lost: {type(error).__name__}: {error}") from error
            request = dataclasses.replace(request, prompt=dataclasses.replace(request.prompt, vision=pixels))
        # Each event repeats all tokens so far. With about 32 events for a sample, bytes grow linearly with the length.
        interval = max(fleet.options.interval, request.sampling.max_new_tokens // 32)
        return wire.request_body(request, rids, fleet.config, interval=interval, known=known, names=names)

    async def _insist(self, chosen: set[int]) -> None:
        """Aborts samples again and again until they end, since an abort may reach the server before the samples do."""
        while (attempt := self._running) is not None and (left := chosen & self.open & attempt.replies.keys()):
            await attempt.abort(left)
            await asyncio.sleep(self._fleet.options.look_every)
