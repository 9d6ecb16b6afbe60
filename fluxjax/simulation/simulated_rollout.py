"""The rollout side of a simulated cluster: requests on engines, new weights for them, and what goes wrong with both.

Every sample has its length from the `Workload`; a response that goes on keeps the one that it was begun with. An engine
that crashed is down for a while; requests for it are held back until it is up, with the newest weights that were
meant for it. A response that is lost on the way is noticed after `reply_limit` seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

from ..base.timeline import Span, Timeline
from ..base.types import Response
from ..coordinator.ledger import ABORTED
from ..coordinator.messages import EngineFailed, Event, Generate, PublishWeights, Request, ResponseFinished
from .clock import Clock
from .continuous_batch import Progress
from .faults import FaultPlan
from .options import SimulationConfig
from .simulated_engine import SimulatedFleet
from .workload import Samples, Workload, response

SHOWN = 8  # engines in the Gantt picture


@dataclasses.dataclass(slots=True)
class _OpenRequest:
    """A request of which a sample still runs, or is held back."""

    request: Request
    samples: Samples
    began: float
    step: int
    left: int = 0  # samples on the engine


class Rollout:
    """Runs requests on engines and reports to `post`. Of a draw that is generated, `requests` has the newest request,
    `samples` its responses as they are or will be."""

    def __init__(
        self,
        clock: Clock,
        settings: SimulationConfig,
        work: Workload,
        faults: FaultPlan,
        post: Callable[[Event], None],
        timeline: Timeline,
    ) -> None:
        self.clock, self.settings, self.work, self.faults = clock, settings, work, faults
        self.post, self.timeline = post, timeline
        self.hardware = settings.hardware()
        gpus, degree = settings.rollout_gpus, settings.degree
        self.fleet = SimulatedFleet(clock, self.hardware, gpus, degree, self._ended, settings.max_running)
        self.engines = self.fleet.engines
        self.requests: dict[int, Request] = {}
        self.samples: dict[int, Samples] = {}
        self.launched = self.aborted = self.crashes = 0
        self.longest = 0  # tokens of the longest response that arrived since this was set to 0
        self._open: dict[str, _OpenRequest] = {}
        self._held: dict[int, dict[str, _OpenRequest]] = {}  # by engine that is down, then by rid
        self._weights = [0] * len(self.engines)  # the version that each engine was told to serve
        self._loading: set[int] = set()
        self._asleep: set[int] = set()
        self._lent: set[int] = set()  # engines that sleep until they get new weights
        self._seconds, self._since = 0.0, -1.0  # with a request open, and since when; -1: none is

    @property
    def seconds(self) -> float:
        """Seconds so far in which a request was generated or held back."""
        return self._seconds + (self.clock.now - self._since if self._open else 0.0)

    @property
    def idle(self) -> bool:
        return not self._open

    # --- requests -----------------------------------------------------------------------------------

    def generate(self, order: Generate, step: int) -> None:
        """Begins requests; responses that ended before (`begun`) do not run again."""
        if not self._open:
            self._since = self.clock.now
        for request in order.requests:
            draw = request.prompt.draw
            if not request.begun:
                self.samples[draw] = self.work.samples(draw, request.attempt, request.n)
            opened = self._open[request.rid] = _OpenRequest(request, self.samples[draw], self.clock.now, step)
            self.requests[draw] = request
            if self.engines[request.engine].up:
                self._submit(opened)
            else:
                self._held.setdefault(request.engine, {})[request.rid] = opened

    def _submit(self, opened: _OpenRequest) -> None:
        request, engine = opened.request, self.engines[opened.request.engine]
        prompt = self.work.prompt_tokens(request.prompt.draw)
        for sample, before in _running(request):
            begun = 0 if before is None else len(before.token_ids)
            engine.submit(request.rid, sample, prompt, opened.samples.lengths[sample], begun)
            opened.left += 1
        self.launched += opened.left

    def _ended(self, progress: Progress) -> None:
        opened = self._open[progress.rid]
        self.longest = max(self.longest, progress.tokens)
        self._close(opened, 1)
        event = ResponseFinished(self._response(opened, progress))
        delays = self.faults.replies(opened.request.prompt.draw, opened.request.attempt, progress.sample)
        for delay in delays:
            if delay:
                self.clock.after(delay, partial(self.post, event))
            else:
                self.post(event)
        if not delays:
            failed = EngineFailed((progress.rid,), f"no answer within {self.settings.reply_limit:g} s")
            self.clock.after(self.settings.reply_limit, partial(self.post, failed))

    def _response(self, opened: _OpenRequest, progress: Progress) -> Response:
        """A sample with what it had before. At the very moment of its last token it is over, even if it is aborted."""
        rid, sample, tokens, segments = progress
        finish = "length" if tokens >= self.work.max_new_tokens else "stop"
        finish = finish if tokens >= opened.samples.lengths[sample] else ABORTED
        more = response(f"{rid}/{sample}", opened.request.prompt.draw, sample, segments, finish)
        before = opened.request.begun[sample] if opened.request.begun else None
        if before is None:
            return more
        return dataclasses.replace(
            more,
            token_ids=before.token_ids + more.token_ids,
            logprobs=before.logprobs + more.logprobs,
            versions=before.versions + more.versions,
        )

    def _close(self, opened: _OpenRequest, samples: int) -> None:
        """Notes that so many of a request's samples do not run any more."""
        opened.left -= samples
        if opened.left > 0:
            return
        request, now = opened.request, self.clock.now
        del self._open[request.rid]
        if request.engine < SHOWN:
            self.timeline.add(Span("rollout", f"engine {request.engine}", opened.began, now, opened.step))
        if not self._open:
            self._seconds += now - self._since

    def abort(self, name: str) -> None:
        """Ends a request or one of its samples; what it has is reported as aborted."""
        rid, _, sample = name.partition("/")
        opened = self._open.get(rid)
        if opened is None:
            return
        request = opened.request
        if rid in self._held.get(request.engine, {}):
            if not sample:  # a held request ends as a whole: a sample of it can't end before the engine is up
                del self._held[request.engine][rid]
                self._close(opened, 0)
                for number, before in _running(request):
                    had = len(before.token_ids) if before else 0
                    self.post(ResponseFinished(self._response(opened, Progress(rid, number, had, ()))))
            return
        found = self.engines[request.engine].abort(name)
        self.aborted += len(found)
        if found:
            self._close(opened, len(found))
        for progress in found:
            self.post(ResponseFinished(self._response(opened, progress)))

    def park(self, draw: int) -> None:
        self.abort(self.requests[draw].rid)

    def forget(self, draw: int) -> None:
        """Drops what is known of a prompt that nothing will be asked about any more."""
        self.samples.pop(draw, None)
        self.requests.pop(draw, None)

    # --- weights ------------------------------------------------------------------------------------

    def publish(self, order: PublishWeights, done: Callable[[], None]) -> None:
        """Loads new weights; `done` is called when all engines that are up have them, the others load them when they
        come up."""
        engines = order.engines or range(len(self.engines))
        for index in engines:
            self._weights[index] = order.version
        self._loading = {index for index in engines if self.engines[index].up}
        self._loaded = done
        self.wake(self._lent & set(engines))
        self._lent -= set(engines)
        if not self._loading:
            self.clock.after(0.0, done)
        for index in sorted(self._loading):
            seconds = self.hardware.sync_seconds() + self.faults.sync_delay(order.version, index)
            then = partial(self._has_loaded, index)
            self.engines[index].update(seconds, order.version, self.settings.recompute, then)

    def _has_loaded(self, index: int) -> None:
        if index in self._loading:
            self._loading.discard(index)
            if not self._loading:
                self._loaded()

    def sleep(self, engines: set[int]) -> set[int]:
        """Takes the GPUs of some engines away until `wake`; what runs there stands still. Returns the engines that did
        not sleep already."""
        awake = engines - self._asleep
        for index in sorted(awake):
            self.engines[index].pause()
        self._asleep |= awake
        return awake

    def lend(self, engines: set[int]) -> None:
        """Puts some engines to sleep until they get new weights."""
        self._lent |= self.sleep(engines)

    def wake(self, engines: set[int]) -> None:
        for index in sorted(engines & self._asleep):
            self.engines[index].resume()
        self._asleep -= engines

    def set_parallelism(self, degree: int) -> int:
        """Makes other engines on the same GPUs, with the oldest weights that any had, and returns their number. Nothing
        may be generated meanwhile."""
        self.fleet.set_parallelism(degree)
        self.engines = self.fleet.engines
        self._weights = [engine.version for engine in self.engines]
        self._loading, self._asleep, self._lent = set(), set(), set()
        return len(self.engines)

    # --- crashes ------------------------------------------------------------------------------------

    def crash(self, index: int) -> None:
        """Loses everything on an engine; weights that it is loading will be there when it is up again."""
        self.crashes += 1
        lost = self.engines[index].crash()
        for rid in lost:
            self._close(self._open[rid], self._open[rid].left)
        if lost:
            self.post(EngineFailed(tuple(lost), f"engine {index} crashed"))
        self._has_loaded(index)

    def recover(self, index: int) -> None:
        engine = self.engines[index]
        engine.recover(self._weights[index])
        if index in self._asleep:
            engine.pause()
        for opened in self._held.pop(index, {}).values():
            self._submit(opened)


def _running(request: Request) -> Iterator[tuple[int, Response | None]]:
    """Yields the samples of a request that are to be generated, with what there is of each."""
    for sample in range(request.n):
        before = request.begun[sample] if request.begun else None
        if before is None or before.finish == ABORTED:
            yield sample, before


def meet_incidents(rollout: Rollout, faults: FaultPlan, over: Callable[[], bool]) -> None:
    """Lets engines crash and slow down as a `FaultPlan` says, until `over()`. Engines that a change of degree removed
    meet nothing."""
    clock = rollout.clock

    def meets(index: int, incident: Callable[[int], None]) -> None:
        if index < len(rollout.engines):
            incident(index)

    def next_spell(index: int, spells: Iterator[tuple[float, float]], *incidents: Callable[[int], None]) -> None:
        """One of the two `incidents` begins the next spell, the other ends it."""
        if over() or (spell := next(spells, None)) is None:
            return
        begin = max(spell[0], clock.now)
        clock.at(begin, partial(meets, index, incidents[0]))
        clock.at(begin + spell[1], partial(spell_ends, index, spells, *incidents))

    def spell_ends(index: int, spells: Iterator[tuple[float, float]], *incidents: Callable[[int], None]) -> None:
        meets(index, incidents[1])
        next_spell(index, spells, *incidents)

    def pace(factor: float, index: int) -> None:
        rollout.engines[index].slow_down(factor)

    slow, fast = partial(pace, faults.rates.slow_factor), partial(pace, 1.0)
    for index in range(len(rollout.engines)):
        next_spell(index, faults.crashes(index), rollout.crash, rollout.recover)
        next_spell(index, faults.slow_spells(index), slow, fast)
