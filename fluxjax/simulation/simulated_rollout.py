"""The rollout side of a simulated cluster: requests on engines, new weights for engines, and the faults of both.

Every sample has its length from the `Workload`; a continued response keeps its first length. Requests for an engine
that crashed wait until the engine is up again. The engine then has the newest weights that were published to it. A lost
response is noticed after `reply_limit` seconds.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby

from ..base.timeline import Span, Timeline
from ..base.types import ENVIRONMENT, Response
from ..coordinator.ledger import ABORTED
from ..coordinator.messages import EngineFailed, Event, Generate, PublishWeights, Request, ResponseFinished, Turn
from .clock import Clock
from .continuous_batch import SampleProgress
from .faults import FaultPlan
from .options import SimulationConfig
from .simulated_engine import SimulatedEngine
from .workload import Samples, Workload, response

SHOWN = 8  # engines in the Gantt picture


@dataclasses.dataclass(slots=True)
class Generation:
    """A request, with its present and future responses."""

    request: Request
    samples: Samples
    began: float  # s
    step: int
    left: int = 0  # samples on the engine


@dataclasses.dataclass(eq=False)
class Rollout:
    """Runs requests on engines and reports to `post`. `newest` has the last generation of each draw."""

    clock: Clock
    settings: SimulationConfig
    work: Workload
    faults: FaultPlan
    post: Callable[[Event], None]
    timeline: Timeline

    def __post_init__(self) -> None:
        self.hardware = self.settings.hardware()
        self.newest: dict[int, Generation] = {}
        self.launched = self.aborted = self.crashes = 0
        self.longest = 0  # tokens of the longest response that ended since this was set to 0
        self._open: dict[str, Generation] = {}  # by rid: generations with a sample on the engine
        self._seconds, self._busy_since = 0.0, -1.0  # earlier seconds with an open request; when the present ones began
        self._past = [0.0] * 4  # of earlier engines: GPU seconds of work, tokens at peak, decoded tokens, preemptions
        self._build(self.settings.degree, version=0)

    def _build(self, degree: int, version: int) -> None:
        self.degree, self._since = degree, self.clock.now
        self.engines = [
            SimulatedEngine(self.clock, self.hardware, degree, self._ended, self.settings.max_running, version)
            for _ in range(self.settings.rollout_gpus // degree)
        ]
        self._loading: set[int] = set()
        self._lent: set[int] = set()  # engines that sleep until they get new weights

    @property
    def seconds(self) -> float:
        """The seconds so far with a request on an engine."""
        return self._seconds + (self.clock.now - self._busy_since if self._open else 0.0)

    @property
    def idle(self) -> bool:
        return not self._open

    # --- requests -----------------------------------------------------------------------------------

    def generate(self, order: Generate, step: int) -> None:
        """Begins requests. Responses in `Request.begun` that have ended do not run again."""
        if not self._open:
            self._busy_since = self.clock.now
        for request in order.requests:
            rid, draw = request.rid, request.prompt.draw
            if request.begun:
                samples = self.newest[draw].samples
            else:
                samples = self.work.samples(draw, request.attempt, request.n)
            generation = Generation(request, samples, self.clock.now, step)
            self._open[rid] = self.newest[draw] = generation
            for sample, before in enumerate(request.begun or [None] * request.n):
                if before is None or before.finish == ABORTED:
                    self._submit(generation, sample, before)
            self.launched += generation.left

    def _submit(self, generation: Generation, sample: int, before: Response | None) -> None:
        """Starts a sample, or its next turn, on the engine of its request."""
        request, versions = generation.request, () if before is None else before.versions
        begun = tuple((version, len(list(run))) for version, run in groupby(versions))
        generation.left += 1
        if self._turn_ended(generation, sample, versions):  # a turn that was parked at its end ends again at once
            progress = SampleProgress(request.rid, sample, len(versions), begun)
            self.clock.after(0.0, partial(self._ended_again, generation, progress))
            return
        end = next(end for end in generation.samples.turn_ends[sample] if end > len(versions))
        prompt = self.work.prompt_tokens(request.prompt.draw)
        self.engines[request.engine].submit(request.rid, sample, prompt, end, begun)

    @staticmethod
    def _turn_ended(generation: Generation, sample: int, versions: Sequence[int]) -> bool:
        """Says whether a turn ends with the last of these tokens."""
        return len(versions) in generation.samples.turn_ends[sample] and versions[-1] != ENVIRONMENT

    def _ended_again(self, generation: Generation, progress: SampleProgress) -> None:
        if self._open.get(progress.rid) is generation:  # else the request was lost or parked meanwhile
            self._close(generation, 1)
            self.post(ResponseFinished(self._response(generation, progress)))

    def continue_turn(self, turn: Turn) -> None:
        """Begins the next turn of a response on the engine of its request."""
        generation, rid = self.newest[turn.prompt.draw], turn.response.rid.partition("/")[0]
        if not self._open:
            self._busy_since = self.clock.now
        if rid not in self._open:
            generation.began = self.clock.now
        self._open[rid] = generation
        self._submit(generation, turn.response.sample, turn.response)
        self.launched += 1

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
        """A response with its last token has ended, even if it is aborted at that moment."""
        rid, sample, tokens, segments = progress
        finish = "length" if tokens >= self.work.max_new_tokens else "stop"
        found = response(f"{rid}/{sample}", opened.request.prompt.draw, sample, segments, finish)
        ended = self._turn_ended(opened, sample, found.versions)
        return found if ended else dataclasses.replace(found, finish=ABORTED)

    def _close(self, opened: Generation, samples: int) -> None:
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
        """Ends a request or one of its samples; the tokens so far are reported as aborted responses."""
        opened = self._open.get(name.partition("/")[0])
        if opened is None:
            return
        engine = self.engines[opened.request.engine]
        found = engine.abort(name)
        if engine.up:
            self.aborted += len(found)
        else:  # samples that wait for an engine that is down do not count as launched
            self.launched -= len(found)
        if found:
            self._close(opened, len(found))
        for progress in found:
            self.post(ResponseFinished(self._response(opened, progress)))

    def forget(self, draw: int) -> None:
        """Drops the generation of a prompt that is no longer needed."""
        self.newest.pop(draw, None)

    # --- weights ------------------------------------------------------------------------------------

    def publish(self, order: PublishWeights, done: Callable[[], None]) -> None:
        """Loads new weights, and calls `done` when all engines that are up have them. Others load them later."""
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
        """Pauses some engines until `wake`, so that their GPUs are free. Returns the engines that were awake."""
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

    # --- engines ------------------------------------------------------------------------------------

    def set_parallelism(self, degree: int) -> None:
        """Replaces the idle engines by engines of another degree on the same GPUs, with the oldest of their weights."""
        past, before = self._totals(), self.engines
        self._build(degree, min(engine.version for engine in before))
        self._past = past
        for engine in before:
            engine.crash()  # a last step of aborted samples may be under way

    def _totals(self) -> list[float]:
        engines, span = self.engines, self.clock.now - self._since
        now = [
            self.degree * sum(engine.busy_seconds for engine in engines),
            span * len(engines) * engines[0].peak,
            float(sum(engine.decoded for engine in engines)),
            float(sum(engine.batch.preemptions for engine in engines)),
        ]
        return [before + more for before, more in zip(self._past, now, strict=True)]

    @property
    def preemptions(self) -> int:
        """The number of preemptions on all engines since the beginning."""
        return int(self._totals()[3])

    def utilisation(self) -> tuple[float, float]:
        """Returns (the share of the GPUs' time in which their engines worked, the share of the peak) since the
        beginning. The second is the decoded tokens, divided by those that engines would have decoded at their peak."""
        busy, peak, tokens, _ = self._totals()
        span = self.clock.now
        return (busy / (span * self.settings.rollout_gpus), tokens / peak) if span > 0 else (0.0, 0.0)

    def crash(self, index: int) -> None:
        """Loses all samples on an engine. When the engine is up again, it has the weights that it was loading."""
        self.crashes += 1
        lost = self.engines[index].crash()
        for rid in lost:
            self._close(self._open[rid], self._open[rid].left)
        if lost:
            self.post(EngineFailed(tuple(lost), f"engine {index} crashed"))
        self._has_loaded(index)


def meet_incidents(rollout: Rollout, faults: FaultPlan, over: Callable[[], bool]) -> None:
    """Lets engines crash and slow down as a `FaultPlan` says, until `over()`. Engines that are gone have no faults."""
    clock = rollout.clock

    def meet(index: int, crashes: bool, spells: Iterator[tuple[float, float]], begins: bool) -> None:
        if index < len(rollout.engines):
            engine = rollout.engines[index]
            if not crashes:
                engine.slow_down(faults.rates.slow_factor if begins else 1.0)
            elif begins:
                rollout.crash(index)
            else:
                engine.recover()
        if not begins:
            next_spell(index, crashes, spells)

    def next_spell(index: int, crashes: bool, spells: Iterator[tuple[float, float]]) -> None:
        if not over() and (spell := next(spells, None)) is not None:
            begin = max(spell[0], clock.now)
            clock.at(begin, partial(meet, index, crashes, spells, True))
            clock.at(begin + spell[1], partial(meet, index, crashes, spells, False))

    for index in range(len(rollout.engines)):
        next_spell(index, True, faults.crashes(index))
        next_spell(index, False, faults.slow_spells(index))
