"""The records of a fleet: of a server, of a request under way, and of an attempt to have the one serve the other."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping

from .engine import EngineError, FinishReason, GenerateRequest, TokenChunk
from .local_server import LocalServer
from .sglang import SampleReply, ServerClient, ServerError
from .weights.published import Published
from .weights.routes import SyncRoute


@dataclasses.dataclass(frozen=True)
class FleetOptions:
    patience: float = 10.0  # seconds without an answer after which a server is taken for hung
    start_seconds: float = 600.0  # that a server may take to start, or to come back
    look_every: float = 1.0  # seconds between two looks at a server
    attempts: int = 4  # servers that a request may lose before it fails
    token: str = ""  # that servers beyond this host ask for
    together: bool = False  # what is asked for while a seat is paused runs only when all of it is on the servers
    interval: int = 16  # tokens between two looks at a response, at least; those since then are lost with a server


@dataclasses.dataclass(frozen=True)
class ServerStatus:
    """One server as it is at a moment, for whoever shows it. One that is not up runs nothing."""

    name: str
    address: str
    seat: int
    up: bool
    version: int  # of the weights that it was proven to have; -1: none
    running: int  # samples, as it says itself
    waiting: int
    tokens_per_second: float  # as it says itself
    restarts: int
    tokens: int  # that came from it
    reason: str  # for which it was lost last
    asleep: bool = False


class Server:
    """One server: its place in the fleet, and what is known of it. It belongs to the fleet's thread."""

    def __init__(self, name: str, seat: int, client: ServerClient, process: LocalServer | None) -> None:
        self.name, self.seat, self.client, self.process = name, seat, client, process
        self.up = False
        self.asleep = False  # without weights and cache
        self.waits = False  # for its seat to wake, before it starts
        self.holds: Published | None = None  # the weights that it was proven to have
        self.served: set[int] = set()  # versions since it came up
        self.down = asyncio.Event()  # set when this life of it ends
        self.suspected = asyncio.Event()  # it is to be looked at now
        self.doubts = 0  # times that somebody had trouble with it
        self.cleared = 0  # of those, the times before its last good look
        self.trouble = ""  # for which this life of it must end
        self.reason = ""  # for which the last one ended
        self.leaving = False
        self.attempts: set[Attempt] = set()
        self.open = 0  # samples of ours, those of the attempts
        self.restarts = 0
        self.tokens = 0  # that came from it
        self.load: dict[str, float] = {}
        self.lock = asyncio.Lock()  # held while its weights change
        self.busy: collections.deque[tuple[float, float]] = collections.deque(maxlen=4096)  # when samples of ours ran
        self._busy_since = 0.0

    def __repr__(self) -> str:
        return f"{self.name} ({self.client.address})"

    def begin(self, attempt: Attempt) -> None:
        """Notes that the samples of an attempt begin to run here."""
        if not self.open:
            self._busy_since = time.perf_counter()
        self.attempts.add(attempt)
        self.open += len(attempt.replies)

    def end(self, attempt: Attempt) -> None:
        self.attempts.remove(attempt)
        self.open -= len(attempt.replies)
        if not self.open:
            self.busy.append((self._busy_since, time.perf_counter()))

    def busy_times(self) -> list[tuple[float, float]]:
        """The times in which samples of the fleet ran here, by `time.perf_counter`, up to now. From any thread."""
        running = [(self._busy_since, time.perf_counter())] if self.open else []
        return [*self.busy.copy(), *running]

    def status(self) -> ServerStatus:
        """The state of the server at this moment. From any thread."""
        up, holds = self.up, self.holds
        load = self.load if up else {}
        return ServerStatus(
            name=self.name,
            address=self.client.address,
            seat=self.seat,
            up=up,
            version=holds.version if up and holds is not None else -1,
            running=int(load.get("running", 0)),
            waiting=int(load.get("waiting", 0)),
            tokens_per_second=load.get("tokens_per_second", 0.0),
            restarts=self.restarts,
            tokens=self.tokens,
            reason=self.reason,
            asleep=self.asleep and up,
        )

    def check_process(self) -> None:
        """Raises ServerError for a process that has ended."""
        if self.process is not None and (status := self.process.ended()) is not None:
            raise ServerError(f"its process ended with status {status}; its log, {self.process.log}, ends with:\n"
                              f"{self.process.last_words()}")  # fmt: skip

    async def look(self, patience: float) -> None:
        """Has the server answer. Where somebody had trouble with it, it must show its weights, as others may have
        restarted it."""
        doubts, holds = self.doubts, self.holds
        self.load = await self.client.load(patience)
        if doubts > self.cleared:
            has = await self.client.weight_version(patience)
            if holds is not None and self.holds is holds and has != str(holds.version):
                raise ServerError(f"{self!r} has weights {has}, not {holds.version}, which it was given")
            self.cleared = doubts

    def check_silence(self, excused: bool, idle: float, busy: float) -> None:
        """Raises ServerError where nothing came of an attempt for so many seconds: for `idle` if the server runs
        nothing, else for `busy`, as it may take long for the first tokens, and for samples that wait."""
        most = busy if self.load.get("running") else idle
        if self.load.get("waiting"):
            excused = True
        if [attempt for attempt in self.attempts if attempt.silence(excused) > most]:
            raise ServerError(f"{self!r} runs {self.load['running']:g} samples, and says nothing for {most:g} s")

    async def update(self, wanted: Published, route: SyncRoute) -> None:
        """Has the server serve these weights, and prove it."""
        client = self.client  # of this life
        await route.stage(client, wanted)
        self.holds = None
        await client.pause("retract")
        await route.deliver(client, wanted)
        held = await client.checksums()
        await asyncio.to_thread(wanted.checksums.check, held, client.address)
        # None above it: a run may go back to an older checkpoint.
        self.served = {version for version in self.served if version < wanted.version} | {wanted.version}
        self.holds = wanted

    async def sleep(self, patience: float) -> None:
        """Has the server give memory back, when what was aborted has ended there. Raises ServerError if that takes too
        long."""
        if self.asleep:
            return
        deadline = time.monotonic() + patience
        while True:
            load = await self.client.load()
            if not load["running"] + load["waiting"]:
                break
            if time.monotonic() > deadline:
                raise ServerError(f"{self!r} can't sleep: after {patience:g} s, samples are still running there")
            await asyncio.sleep(0.05)
        self.holds = None  # SGLang keeps no copy: what it has after waking is anything
        await self.client.sleep()
        self.asleep = True

    async def wake(self) -> None:
        if self.asleep:
            await self.client.wake()
            self.asleep = False

    @property
    def starting(self) -> bool:
        """Says whether the server is one that the fleet starts, and on its way."""
        return self.process is not None and not self.up and not self.waits and not self.leaving

    @property
    def rests(self) -> bool:
        """Says whether the server takes no memory for weights: it sleeps, or is not there."""
        return self.asleep if self.up else self.waits or self.process is None

    @property
    def usable(self) -> bool:
        """Says whether the server is up and has weights, and nobody had trouble with it since it was last looked at."""
        return self.up and self.holds is not None and self.doubts == self.cleared

    def suspect(self) -> None:
        self.doubts += 1
        self.suspected.set()

    def state(self) -> str:
        """The reason why there is no use of the server, for messages."""
        reason, words = self.reason or "is starting", self.process.last_words() if self.process is not None else ""
        return f"{self!r}: {reason}" + (f"; its log ends with:\n{words}" if words not in reason else "")


@dataclasses.dataclass(eq=False)
class Attempt:
    """Samples of a request on a server, and the reply to each so far."""

    server: Server
    replies: Mapping[int, SampleReply]
    heard: float = math.inf  # when something came, or had no reason to come; not before it is sent
    came: int = 0  # tokens, by then
    accepted: bool = False  # the server has all of it

    def silence(self, excused: bool) -> float:
        """The seconds since a token came, as seen by those who look now and then; none pass while it is `excused`."""
        came = sum(len(reply.ids) for reply in self.replies.values())
        if excused or came != self.came:
            self.heard, self.came = time.monotonic(), came
        return time.monotonic() - self.heard

    async def abort(self, samples: Iterable[int]) -> None:
        try:
            await asyncio.gather(*(self.server.client.abort(self.replies[sample].rid) for sample in samples))
        except EngineError:
            self.server.suspect()


class FleetJob:
    """A request under way, and the tokens that each sample has so far."""

    def __init__(self, request: GenerateRequest, seat: int, put: Callable[[TokenChunk], None]) -> None:
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
