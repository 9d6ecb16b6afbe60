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
from .batch import Segments
from .clock import Clock
from .faults import FaultPlan
from .options import SimulationConfig
from .simulated_engines import SimulatedFleet
from .workload import Samples, Workload, response

SHOWN = 8  # engines in the Gantt picture


@dataclasses.dataclass(slots=True)
class _Open:
    """A request of which something still runs, or is held back."""

    request: Request
    samples: Samples
    began: float
    step: int
    left: int = 0  # samples on the engine


class Rollout:
    """Reports to `post`. Of a draw that is generated, `requests` has the newest request, `samples` what its responses
    are, or will be."""

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
        self.hardware = hardware = settings.hardware()
        self.fleet = SimulatedFleet(
            clock,
            hardware,
            settings.rollout_gpus,
            settings.degree,
            self._ended,
            settings.max_running,
            hardware.gpus_per_host,
        )
        self.engines = self.fleet.engines
        self.requests: dict[int, Request] = {}
        self.samples: dict[int, Samples] = {}
        self.launched = self.aborted = self.crashes = self.syncs = 0
        self.longest = 0  # tokens of the responses that arrived since it was set to 0
        self._open: dict[str, _Open] = {}
        self._held: dict[int, dict[str, _Open]] = {}  # by engine that is down
        self._weights = [0] * len(self.engines)  # that each was told to serve
        self._loading: set[int] = set()
        self._asleep: set[int] = set()
        self._lent: set[int] = set()  # of those
        self._seconds, self._since = 0.0, -1.0  # with something open, and since when; -1: nothing is

    @property
    def seconds(self) -> float:
        """Time so far in which something was generated or held back."""
        return self._seconds + (self.clock.now - self._since if self._open else 0.0)

    @property
    def idle(self) -> bool:
        return not self._open

    # --- requests -----------------------------------------------------------------------------------

    def generate(self, order: Generate, step: int) -> None:
        """Of a request with `begun`, what has ended before does not run again."""
        if not self._open:
            self._since = self.clock.now
        for request in order.requests:
            draw = request.prompt.draw
            if not request.begun:
                self.samples[draw] = self.work.samples(draw, request.attempt, request.n)
            one = _Open(request, self.samples[draw], self.clock.now, step)
            self._open[request.rid] = one
            self.requests[draw] = request
            if self.engines[request.engine].up:
                self._submit(one)
            else:
                self._held.setdefault(request.engine, {})[request.rid] = one

    def _submit(self, one: _Open) -> None:
        request, engine = one.request, self.engines[one.request.engine]
        prompt = self.work.prompt_tokens(request.prompt.draw)
        for sample, before in _running(request):
            engine.submit(request.rid, sample, prompt, one.samples.lengths[sample], _tokens(before))
            one.left += 1
        self.launched += one.left

    def _ended(self, engine: int, rid: str, sample: int, tokens: int, segments: Segments) -> None:
        one = self._open[rid]
        self.longest = max(self.longest, tokens)
        self._close(one, 1)
        event = ResponseFinished(self._response(one.request, sample, segments, self._finish(tokens)))
        delays = self.faults.replies(one.request.prompt.draw, one.request.attempt, sample)
        for delay in delays:
            if delay:
                self.clock.after(delay, partial(self.post, event))
            else:
                self.post(event)
        if not delays:
            reason = f"no answer within {self.settings.reply_limit:g} s"
            self.clock.after(self.settings.reply_limit, partial(self.post, EngineFailed((rid,), reason)))

    def _finish(self, tokens: int) -> str:
        return "length" if tokens >= self.work.max_new_tokens else "stop"

    @staticmethod
    def _response(request: Request, sample: int, segments: Segments, finish: str) -> Response:
        rid, draw = f"{request.rid}/{sample}", request.prompt.draw
        before = request.begun[sample] if request.begun else None
        if before is None:
            return response(rid, draw, sample, segments, finish)
        more = response(rid, draw, sample, segments, finish)
        return dataclasses.replace(
            more,
            token_ids=before.token_ids + more.token_ids,
            logprobs=before.logprobs + more.logprobs,
            versions=before.versions + more.versions,
        )

    def _close(self, one: _Open, samples: int) -> None:
        """So many of its samples do not run any more."""
        one.left -= samples
        if one.left > 0:
            return
        request, now = one.request, self.clock.now
        del self._open[request.rid]
        if request.engine < SHOWN:
            self.timeline.add(Span("rollout", f"engine {request.engine}", one.began, now, one.step))
        if not self._open:
            self._seconds += now - self._since

    def abort(self, name: str) -> None:
        """A request or one of its samples: what it has is reported as aborted."""
        rid, _, sample = name.partition("/")
        one = self._open.get(rid)
        if one is None:
            return
        held = self._held.get(one.request.engine, {})
        if rid in held:
            self._let_go(one, sample)
            return
        found = self.engines[one.request.engine].abort(name)
        self.aborted += len(found)
        if found:
            self._close(one, len(found))
        for _, number, tokens, segments in found:  # at the very moment of its last token, it is over all the same
            finish = ABORTED if tokens < one.samples.lengths[number] else self._finish(tokens)
            self.post(ResponseFinished(self._response(one.request, number, segments, finish)))

    def _let_go(self, one: _Open, sample: str) -> None:
        """A held request ends as a whole; one of its samples can't end before the engine is up."""
        if sample:
            return
        del self._held[one.request.engine][one.request.rid]
        self._close(one, 0)
        for number, _ in _running(one.request):
            self.post(ResponseFinished(self._response(one.request, number, (), ABORTED)))

    def park(self, draw: int) -> None:
        self.abort(self.requests[draw].rid)

    def forget(self, draw: int) -> None:
        """Nothing will be asked about this prompt any more."""
        self.samples.pop(draw, None)
        self.requests.pop(draw, None)

    # --- weights ------------------------------------------------------------------------------------

    def publish(self, order: PublishWeights, done: Callable[[], None]) -> None:
        """`done` is called when all engines that are up have them; the others load them when they come up."""
        engines = order.engines or range(len(self.engines))
        self.syncs += 1
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
        """Their GPUs are wanted for something else until `wake`; what runs there stands still. Says which did not sleep
        already."""
        awake = engines - self._asleep
        for index in sorted(awake):
            self.engines[index].pause()
        self._asleep |= awake
        return awake

    def lend(self, engines: set[int]) -> None:
        """So, until they get new weights."""
        self._lent |= self.sleep(engines)

    def wake(self, engines: set[int]) -> None:
        for index in sorted(engines & self._asleep):
            self.engines[index].resume()
        self._asleep -= engines

    def set_parallelism(self, degree: int) -> int:
        """Other engines on the same GPUs, with the oldest weights that any had; nothing may be generated. How many."""
        self.fleet.set_parallelism(degree)
        self.engines = self.fleet.engines
        self._weights = [engine.version for engine in self.engines]
        self._loading, self._asleep, self._lent = set(), set(), set()
        return len(self.engines)

    # --- crashes ------------------------------------------------------------------------------------

    def crash(self, index: int, reason: str) -> None:
        """Everything on it is lost; weights that it is loading will be there when it is up again."""
        self.crashes += 1
        lost = dict.fromkeys(progress.rid for progress in self.engines[index].crash())
        for rid in lost:
            self._close(self._open[rid], self._open[rid].left)
        if lost:
            self.post(EngineFailed(tuple(lost), reason))
        self._has_loaded(index)

    def recover(self, index: int) -> None:
        engine = self.engines[index]
        engine.recover(self._weights[index])
        if index in self._asleep:
            engine.pause()
        for one in self._held.pop(index, {}).values():
            self._submit(one)


def _running(request: Request) -> Iterator[tuple[int, Response | None]]:
    """The samples of a request that are to be generated, and what there is of each."""
    for sample in range(request.n):
        before = request.begun[sample] if request.begun else None
        if before is None or before.finish == ABORTED:
            yield sample, before


def _tokens(before: Response | None) -> int:
    return 0 if before is None else len(before.token_ids)
