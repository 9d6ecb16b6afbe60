"""A server of a fleet: the fleet starts, watches and restarts the server, and gives it the weights of its `Seat`."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from models.config import DecoderConfig
from models.shadow import Fetch

from .engine import EngineError
from .local_server import LocalServer
from .requests import EngineLimits
from .sglang import CONNECT, Refused, SampleReply, ServerClient, ServerError, UnfitRelease
from .weights.published import Published
from .weights.routes import SyncRoute

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FleetOptions:
    patience: float = 10.0  # seconds without an answer after which a server is taken for hung
    start_seconds: float = 600.0  # seconds that a server may take to start, or to come back
    look_every: float = 1.0  # seconds between two looks at a server
    attempts: int = 4  # lost attempts after which a request fails
    token: str = ""  # access token of the fleet's requests to servers; empty: none
    together: bool = False  # True: a resumed seat generates once servers have all its requests; False: at once
    interval: int = 16  # least tokens between two events; a lost server loses tokens since the last event


@dataclasses.dataclass(frozen=True)
class ServerStatus:
    """The state of a server at one moment, for displays. A server that is not up has no version, and runs nothing."""

    name: str
    address: str
    seat: int
    up: bool
    version: int  # version of the weights that it was proven to have; -1: none
    running: int  # samples that run, by the server's own report
    waiting: int
    tokens_per_second: float  # by the server's own report
    restarts: int
    tokens: int  # tokens that came from the server
    reason: str  # reason of its last loss
    asleep: bool = False


@dataclasses.dataclass(eq=False)
class Seat:
    """The orders to the present and later servers of an engine, and the counts of the engine's requests."""

    number: int
    wanted: Published | None = None  # the weights that the seat's servers are to have
    paused: bool = False
    asleep: bool = False
    tokens: int = 0  # tokens that the seat's requests got
    preemptions: int = 0


@dataclasses.dataclass(eq=False)
class FleetState:
    """The state that the parts of a fleet share, and the fleet's thread changes: servers, news of them and of seats."""

    config: DecoderConfig
    limits: EngineLimits  # bounds of the requests of a server
    route: SyncRoute
    options: FleetOptions = FleetOptions()
    fetch: Fetch | None = None  # returns pixels that prompts lack, when requests are sent; None: servers fetch them

    def __post_init__(self) -> None:
        self.members: list[Server] = []
        self.fatal: Exception | None = None  # an error that no restart can mend
        # The server of the last turn, by session and number of the sample.
        self.homes: dict[str, dict[int, Server]] = {}
        self._changed = asyncio.Event()  # replaced each time it is set
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts work as a task of its own."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def tell(self) -> None:
        """Makes all calls of `news` return."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def news(self) -> None:
        """Returns at the next `tell`, or after a second."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), 1.0)

    async def until(self, done: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Waits until `done()`, or for `seconds`; returns whether it is done. Raises the error that ended the fleet."""
        deadline = time.monotonic() + seconds
        while not done():
            self.raise_fatal()
            if time.monotonic() > deadline:
                return False
            await self.news()
        return True

    def fail(self, error: Exception) -> None:
        """Ends the fleet for an error that no restart mends, such as weights that did not arrive, or a full disk."""
        self.fatal = self.fatal or error
        self.tell()

    def raise_fatal(self) -> None:
        if self.fatal is not None:
            raise self.fatal


class Server:
    """One server: its seat, its process and its state. Only the fleet's thread may change a `Server`. A *life* of
    the server lasts from a start to a loss."""

    def __init__(
        self, fleet: FleetState, name: str, seat: Seat, client: ServerClient, process: LocalServer | None
    ) -> None:
        self._fleet, self.name, self.seat, self.client, self.process = fleet, name, seat, client, process
        self.up = False
        self.asleep = False  # the server has neither weights nor cache
        self.waits = False  # the server starts when its seat wakes
        self.holds: Published | None = None  # the weights that the server was proven to have
        self.served: set[int] = set()  # versions of weights that the server has had in this life
        self.media: set[str] = set()  # names of the media that the server got for conversations (`wire.completed`)
        self.down = asyncio.Event()  # set when this life ends
        self.suspected = asyncio.Event()  # set to make the watch look at the server now
        self.doubts = 0  # calls of `suspect`
        self.cleared = 0  # value of `doubts` that the last good answer cleared
        self.trouble = ""  # reason why this life must end
        self.reason = ""  # reason why the last life ended
        self.leaving = False
        self.attempts: set[Attempt] = set()
        self.open = 0  # samples of the attempts
        self.restarts = 0
        self.tokens = 0  # tokens that came from the server
        self.load: dict[str, float] = {}
        self.lock = asyncio.Lock()  # held while the server's weights or orders change
        self.busy: collections.deque[tuple[float, float]] = collections.deque(maxlen=4096)  # spans in which samples ran
        self._busy_since = 0.0

    def __repr__(self) -> str:
        return f"{self.name} ({self.client.address})"

    def begin(self, attempt: Attempt) -> None:
        """Notes that the samples of an attempt begin to run on the server."""
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
        """The last spans in which the fleet's samples ran on the server, in seconds of `time.perf_counter`."""
        running = [(self._busy_since, time.perf_counter())] if self.open else []
        return [*self.busy.copy(), *running]

    def status(self) -> ServerStatus:
        """The state of the server at this moment. Any thread may call this method."""
        up, holds = self.up, self.holds
        load = self.load if up else {}
        return ServerStatus(
            name=self.name,
            address=self.client.address,
            seat=self.seat.number,
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

    @property
    def starting(self) -> bool:
        """Says whether the fleet is starting the server."""
        return self.process is not None and not self.up and not self.waits and not self.leaving

    @property
    def rests(self) -> bool:
        """Says whether the server holds no memory that the fleet could free: it sleeps, is not started, or is
        lost and was started by somebody else."""
        return self.asleep if self.up else self.waits or self.process is None

    @property
    def usable(self) -> bool:
        """Says whether the server is up, has weights, and has given a good answer since the last doubt."""
        return self.up and self.holds is not None and self.doubts == self.cleared

    def suspect(self) -> None:
        self.doubts += 1
        self.suspected.set()

    def state(self) -> str:
        """The reason why the server can't be used, for messages."""
        reason, words = self.reason or "is starting", self.process.last_words() if self.process is not None else ""
        return f"{self!r}: {reason}" + (f"; its log ends with:\n{words}" if words not in reason else "")

    # --- its life -------------------------------------------------------------------------------

    async def live(self) -> None:
        """Starts and watches the server, life after life, until the server leaves or the fleet ends."""
        try:
            await self._lives()
        finally:
            await self.client.close()
            if self.process is not None:
                await asyncio.to_thread(self.process.stop)

    async def _lives(self) -> None:
        trouble = 0  # failed starts in a row, plus 1 for the loss before them
        while not self.leaving:
            await self._rest()
            began = time.monotonic()
            try:
                await self._raise_up()
                trouble = 0
                await self._watch()
            except EngineError as error:
                self.reason = str(error)
                if isinstance(error, UnfitRelease) and self.process is not None:  # the same release would start again
                    self._fleet.fail(error)
            except Exception as error:
                self._fleet.fail(error)
                self.reason = str(error)
            else:
                return
            self.lower()
            if self.leaving or self._fleet.fatal is not None:
                return
            log.info("%r is lost: %s", self, self.reason)  # users see the loss in displays of `servers`
            if self.process is not None:
                await asyncio.to_thread(self.process.kill)
            self.restarts += 1
            trouble += 1
            if trouble > 1:  # the last start failed
                self.suspected.clear()
                with contextlib.suppress(TimeoutError):
                    wait = max(0.0, min(2.0 ** min(trouble, 5), 30.0) - (time.monotonic() - began))
                    await asyncio.wait_for(self.suspected.wait(), wait)

    async def _rest(self) -> None:
        """Returns when the server may start: a sleeping seat may have lent its devices' memory to training."""
        while self.process is not None and self.seat.asleep and not self.leaving:
            if not self.waits:
                self.waits = True
                self._fleet.tell()
            await self._fleet.news()
        self.waits = False

    async def _raise_up(self) -> None:
        options = self._fleet.options
        if self.process is not None:
            await self.client.close()
            self.process.start()  # in this thread: Linux binds the process to the thread that starts it
            self.client = ServerClient(self.process.address, token=options.token)
        deadline = time.monotonic() + options.start_seconds
        while True:
            self._check_process()
            if self.leaving:
                return
            if self.process is not None and self.seat.asleep:
                raise ServerError("the server was told to sleep before it was up; it will start when it is woken")
            try:
                await self.client.load(CONNECT)
                break
            except Refused:  # waiting does not help
                raise
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"not ready after {options.start_seconds:g} s (servers.start_seconds); last: {error}"
                    ) from error
            await asyncio.sleep(0.25)
        await self.client.check_release(self._fleet.config.architecture)
        # A server that somebody else started may still sleep from an earlier run or life.
        self.holds, self.asleep = None, self.process is None and await self.client.asleep()
        self.served.clear()
        self.media = set()
        self.down.clear()
        self.trouble = ""
        await self._bring()
        self.cleared = self.doubts
        self.up = True
        self._fleet.tell()

    async def _watch(self) -> None:
        """Returns when the server leaves. Raises ServerError when it is lost."""
        options = self._fleet.options
        while not self.leaving:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.suspected.wait(), options.look_every)
            self.suspected.clear()
            self._check_process()
            if self.trouble:
                raise ServerError(self.trouble)
            changing = self.lock.locked()  # weights or orders change: the server may be silent meanwhile
            try:
                if not changing:
                    await self._look()
                    self._fleet.tell()
            except ServerError:
                if not (changing := self.lock.locked()):
                    raise
            self._check_silence(changing or self.seat.paused)

    def _check_process(self) -> None:
        if self.process is not None and (status := self.process.ended()) is not None:
            raise ServerError(f"its process ended with status {status}; its log, {self.process.log}, ends with:\n"
                              f"{self.process.last_words()}")  # fmt: skip

    async def _look(self) -> None:
        """Asks the server for its load and, if there are doubts, for the version of its weights, since somebody else
        may have restarted the server. Raises ServerError for a wrong version."""
        doubts, holds, patience = self.doubts, self.holds, self._fleet.options.patience
        self.load = await self.client.load(patience)
        if doubts > self.cleared:
            has = await self.client.weight_version(patience)
            if holds is not None and self.holds is holds and has != str(holds.version):
                raise ServerError(f"{self!r} has weights of version {has}, but was given version {holds.version}")
            self.cleared = doubts

    def _check_silence(self, excused: bool) -> None:
        """Raises ServerError if an attempt got no token for too long: `start_seconds` if the server runs samples, since
        first tokens may take long, else three times `patience`, since a server may read hundreds of requests before it
        counts them. Time does not count if `excused`, or while samples wait at the server."""
        options = self._fleet.options
        most = options.start_seconds if self.load.get("running") else 3 * options.patience
        excused = excused or bool(self.load.get("waiting"))
        if [attempt for attempt in self.attempts if attempt.silence(excused) > most]:
            raise ServerError(f"{self!r} runs {self.load['running']:g} samples, but has sent nothing for {most:g} s")

    def lower(self) -> None:
        """Ends this life of the server. The next life gets the weights and the orders of the seat."""
        self.up = False
        self.down.set()
        self._fleet.tell()

    async def end_session(self, session: str) -> None:
        """Has the server free what it keeps of a session. A server that does not will free it for other samples."""
        with contextlib.suppress(EngineError):
            await self.client.end_session(session)

    # --- weights --------------------------------------------------------------------------------

    async def bring(self) -> None:
        """Has the server follow the orders of its seat; a server that can't follow them is lost."""
        client, seat = self.client, self.seat
        try:
            await self._bring()
        except EngineError as error:
            if self.client is client:  # else another life has begun
                weights = f"weights of version {seat.wanted.version}" if seat.wanted is not None else "weights"
                self.trouble = f"it did not {'sleep' if seat.asleep else f'take its orders and {weights}'}: {error}"
                self.suspect()
                self.lower()
        except Exception as error:
            self._fleet.fail(error)

    async def _bring(self) -> None:
        """Brings the server to the weights of its seat and proves that it has them, or puts it to sleep."""
        seat = self.seat
        async with self.lock:
            while not seat.asleep:
                if self.asleep:
                    await self.client.wake()
                    self.asleep = False
                wanted = seat.wanted
                if wanted is not None and self.holds is not wanted:
                    try:
                        await self._update(wanted)
                    except Exception:
                        if seat.wanted is wanted:  # else newer weights may have removed the folder of `wanted`
                            raise
                    continue
                paused = seat.paused
                await (self.client.pause("in_place") if paused else self.client.resume())
                if seat.wanted is wanted and seat.paused is paused and not seat.asleep:  # no newer orders
                    return
            await self._sleep()

    async def _update(self, wanted: Published) -> None:
        """Has the server serve these weights, and proves that it has them."""
        client = self.client  # the client of this life

        async def pause() -> None:
            self.holds = None
            await client.pause("retract")

        await self._fleet.route.deliver(client, wanted, pause)
        held = await client.checksums()
        await asyncio.to_thread(wanted.checksums.check, held, client.address)
        # Higher versions are removed, since a run may go back to an older checkpoint.
        self.served = {version for version in self.served if version < wanted.version} | {wanted.version}
        self.holds = wanted

    async def _sleep(self) -> None:
        """Has the server give memory back when its samples have ended. Raises ServerError after `patience` seconds."""
        if self.asleep:
            return
        patience = self._fleet.options.patience
        deadline = time.monotonic() + patience
        while True:
            load = await self.client.load()
            if not load["running"] + load["waiting"]:
                break
            if time.monotonic() > deadline:
                raise ServerError(f"{self!r} can't sleep: after {patience:g} s, samples are still running there")
            await asyncio.sleep(0.05)
        self.holds = None  # SGLang keeps no copy: after waking, weights are arbitrary
        await self.client.sleep()
        self.asleep = True


@dataclasses.dataclass(eq=False)
class Attempt:
    """Samples of a request on a server, and the reply to each so far."""

    server: Server
    replies: Mapping[int, SampleReply]
    heard: float = math.inf  # last time that tokens came, or were not due; infinite before the attempt is sent
    came: int = 0  # tokens that had come at `heard`

    def silence(self, excused: bool) -> float:
        """The seconds since this method first saw the latest token, or since its last call with `excused`."""
        came = sum(len(reply.ids) for reply in self.replies.values())
        if excused or came != self.came:
            self.heard, self.came = time.monotonic(), came
        return time.monotonic() - self.heard

    async def abort(self, samples: Iterable[int]) -> None:
        try:
            await asyncio.gather(*(self.server.client.abort(self.replies[sample].rid) for sample in samples))
        except EngineError:
            self.server.suspect()
