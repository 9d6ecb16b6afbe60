"""The rollout side of a simulated cluster: requests on engines, new weights for them, and what goes wrong with both.

Every sample has its length from the `Workload`; a response that goes on keeps the one that it was begun with. An engine
that crashed is down for a while; requests for it are held back until it is up, with the newest weights that were
meant for it. A response that is lost on the way is noticed after `reply_limit` seconds.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby

from ..base.timeline import Span, Timeline
from ..base.types import Response
from ..coordinator.ledger import ABORTED
from ..coordinator.messages import EngineFailed, Event, Generate, PublishWeights, Request, ResponseFinished
from .clock import Clock
from .continuous_batch import SampleProgress
from .faults import FaultPlan
from .options import SimulationConfig
from .simulated_engine import SimulatedFleet
from .workload import Samples, Workload, response

SHOWN = 8  # engines in the Gantt picture


@dataclasses.dataclass(slots=True)
class Generation:
    """A request, with its responses as they are or will be."""

    request: Request
    samples: Samples
    began: float  # s
    step: int
    left: int = 0  # samples on the engine


class Rollout(SimulatedFleet):
    """Runs requests on engines and reports to `post`. `newest` has the last generation of each draw."""

    def __init__(
        self,
        clock: Clock,
        settings: SimulationConfig,
        work: Workload,
        faults: FaultPlan,
        post: Callable[[Event], None],
        timeline: Timeline,
    ) -> None:
        gpus, degree = settings.rollout_gpus, settings.degree
        super().__init__(clock, settings.hardware(), gpus, degree, self._ended, settings.max_running)
        self.settings, self.work, self.faults = settings, work, faults
        self.post, self.timeline = post, timeline
        self.newest: dict[int, Generation] = {}
        self.launched = self.aborted = self.crashes = 0
        self.longest = 0  # tokens of the longest response that arrived since this was set to 0
        self._open: dict[str, Generation] = {}  # by rid: those of which a sample is on the engine
        self._loading: set[int] = set()
        self._lent: set[int] = set()  # engines that sleep until they get new weights
        self._seconds, self._busy_since = 0.0, -1.0  # with a request open, and since when; -1: none is

    @property
    def seconds(self) -> float:
        """The seconds so far in which a request was on an engine."""
        return self._seconds + (self.clock.now - self._busy_since if self._open else 0.0)

    @property
    def idle(self) -> bool:
        return not self._open

    # --- requests -----------------------------------------------------------------------------------

    def generate(self, order: Generate, step: int) -> None:
        """Begins requests; responses that ended before (`begun`) do not run again."""
        if not self._open:
            self._busy_since = self.clock.now
        for request in order.requests:
            rid, draw, engine = request.rid, request.prompt.draw, self.engines[request.engine]
            if request.begun:
                samples = self.newest[draw].samples
            else:
                samples = self.work.samples(draw, request.attempt, request.n)
            generation = Generation(request, samples, self.clock.now, step)
            self._open[rid] = self.newest[draw] = generation
            for sample, before in enumerate(request.begun or [None] * request.n):
                if before is None or before.finish == ABORTED:
                    versions = () if before is None else before.versions
                    begun = tuple((version, len(list(run))) for version, run in groupby(versions))
                    engine.submit(rid, sample, self.work.prompt_tokens(draw), samples.lengths[sample], begun)
                    generation.left += 1
            self.launched += generation.left

    def _ended(self, progress: SampleProgress) -> None:
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

    def _response(self, opened: Generation, progress: SampleProgress) -> Response:
        """Returns a sample's response. At the very moment of its last token a response is over, even if it is
        aborted."""
        rid, sample, tokens, segments = progress
        finish = "length" if tokens >= self.work.max_new_tokens else "stop"
        finish = finish if tokens >= opened.samples.lengths[sample] else ABORTED
        return response(f"{rid}/{sample}", opened.request.prompt.draw, sample, segments, finish)

    def _close(self, opened: Generation, samples: int) -> None:
        """Notes that so many of a request's samples do not run any more."""
        opened.left -= samples
        if opened.left > 0:
            return
        request, now = opened.request, self.clock.now
        del self._open[request.rid]
        if request.engine < SHOWN:
            self.timeline.add(Span("rollout", f"engine {request.engine}", opened.began, now, opened.step))
        if not self._open:
            self._seconds += now - self._busy_since

    def abort(self, name: str) -> None:
        """Ends a request or one of its samples; what it has is reported as aborted."""
        opened = self._open.get(name.partition("/")[0])
        if opened is None:
            return
        engine = self.engines[opened.request.engine]
        found = engine.abort(name)
        if engine.up:
            self.aborted += len(found)
        else:  # what waits for an engine was never launched
            self.launched -= len(found)
        if found:
            self._close(opened, len(found))
        for progress in found:
            self.post(ResponseFinished(self._response(opened, progress)))

    def forget(self, draw: int) -> None:
        """Drops what is known of a prompt that nothing will be asked about any more."""
        self.newest.pop(draw, None)

    # --- weights ------------------------------------------------------------------------------------

    def publish(self, order: PublishWeights, done: Callable[[], None]) -> None:
        """Loads new weights; `done` is called when all engines that are up have them, the others load them when they
        come up."""
        engines = order.engines or range(len(self.engines))
        self._loading = {index for index in engines if self.engines[index].up}
        self._loaded = done
        self.wake(self._lent & set(engines))
        self._lent -= set(engines)
        if not self._loading:
            self.clock.after(0.0, done)
        for index in sorted(engines):
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
        awake = {index for index in engines if not self.engines[index].paused}
        for index in sorted(awake):
            self.engines[index].pause()
        return awake

    def lend(self, engines: set[int]) -> None:
        """Puts some engines to sleep until they get new weights."""
        self._lent |= self.sleep(engines)

    def wake(self, engines: set[int]) -> None:
        for index in sorted(engines):
            if self.engines[index].paused:
                self.engines[index].resume()

    def set_parallelism(self, degree: int) -> None:
        super().set_parallelism(degree)
        self._loading, self._lent = set(), set()

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


Incident = Callable[[int], None]  # to the engine of this index
Spells = Iterator[tuple[float, float]]


def meet_incidents(rollout: Rollout, faults: FaultPlan, over: Callable[[], bool]) -> None:
    """Lets engines crash and slow down as a `FaultPlan` says, until `over()`. Engines that a change of degree removed
    meet nothing."""
    clock, factor = rollout.clock, faults.rates.slow_factor

    def next_spell(index: int, spells: Spells, begins: Incident, ends: Incident) -> None:
        if over() or (spell := next(spells, None)) is None:
            return
        begin = max(spell[0], clock.now)
        clock.at(begin, partial(meets, index, begins))
        clock.at(begin + spell[1], partial(spell_ends, index, spells, begins, ends))

    def spell_ends(index: int, spells: Spells, begins: Incident, ends: Incident) -> None:
        meets(index, ends)
        next_spell(index, spells, begins, ends)

    def meets(index: int, incident: Incident) -> None:
        if index < len(rollout.engines):
            incident(index)

    def pace(factor: float, index: int) -> None:
        rollout.engines[index].slow_down(factor)

    for index in range(len(rollout.engines)):
        next_spell(index, faults.crashes(index), rollout.crash, lambda index: rollout.engines[index].recover())
        next_spell(index, faults.slow_spells(index), partial(pace, factor), partial(pace, 1.0))
