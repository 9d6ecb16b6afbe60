"""A simulated inference engine: continuous batching, a KV cache of limited size, preemption by recomputation.

It works as vLLM and SGLang do, in steps. At the end of each step the engine

1. preempts the youngest samples while the cache has no room for one more token of everybody; what they had is dropped
   and computed anew when there is room (Flexes, section 4.2),
2. lets in waiting samples in their order, as far as cache and `max_running` allow, and fills the cache with their
   prompts and what they had generated: a step of prefill, in which nobody else goes on,
3. or else decodes: one token for every running sample.

Time is not walked through token by token. While nothing enters or leaves, the time of n steps is a sum in closed form,
so the engine jumps to the next step at which something happens: a sample's last token, a full cache. What comes from
outside (a new sample, an abort, an update) cuts the jump short at the end of the step that is under way. An event costs
O(log n). `continuous_batch.py` has the samples and the cache, without time.
"""

import bisect
import enum
from collections.abc import Callable

from .clock import Action, Clock, Handle
from .continuous_batch import Batch, SampleProgress, Segments, Sequence
from .hardware import Hardware

OnFinish = Callable[[SampleProgress], object]


class Jump:
    """`steps` decode steps from time `anchor` (s) on.

    Each takes a little longer than the one before, because the cache grows by as much: step i = 0, 1, ... takes
    `first + i * growth` seconds, so n steps take n first + growth n (n - 1) / 2.
    """

    __slots__ = ("anchor", "first", "growth", "steps")

    def __init__(self, anchor: float, first: float, growth: float, steps: int) -> None:
        self.anchor, self.first, self.growth, self.steps = anchor, first, growth, steps

    def end(self, steps: int) -> float:
        """The time at which so many steps are done."""
        return self.anchor + (steps * self.first + self.growth * (steps * (steps - 1) // 2))

    def elapsed(self, now: float) -> int:
        """Steps that are done at `now`."""
        return bisect.bisect(range(1, self.steps + 1), now, key=self.end)

    def cut(self, done: int, now: float) -> None:
        """After `done` steps, the jump is only the step that is under way at `now`; nothing if none is."""
        self.anchor, self.first = self.end(done), self.first + self.growth * done
        self.steps = 0 if self.anchor >= now else 1


class Phase(enum.Enum):
    IDLE = 0  # nothing to do, or paused
    DECODE = 1
    PREFILL = 2
    UPDATE = 3  # new weights arrive
    DOWN = 4


class SimulatedEngineError(RuntimeError):
    """A sample that can't be generated here."""


class SimulatedEngine:
    """An engine of `degree` GPUs. It calls `on_finish` when a sample has all its tokens; the callback may submit and
    abort."""

    def __init__(
        self,
        clock: Clock,
        cost: Hardware,
        degree: int,
        on_finish: OnFinish,
        max_running: int = 256,
        version: int = 0,
    ) -> None:
        self.clock, self.cost, self.degree = clock, cost, degree
        self.batch = Batch(cost.kv_limit(degree), max_running, version)
        self.prefilled = 0  # tokens computed to fill the cache
        self.phase = Phase.IDLE
        self._step_seconds: dict[int, float] = {}  # by the number of samples, as they occur
        self._kv_seconds = cost.kv_seconds(degree)
        self._updates: list[tuple[float, int, bool, Action | None]] = []
        self.paused = self._cut = False
        self._newest = version  # the weights that it was told to serve
        self._inside = False  # a callback runs: what it asks for takes effect when it returns
        self._slowdown = 1.0
        self._jump = Jump(0.0, 1.0, 0.0, 0)
        self._handle: Handle | None = None
        self._busy, self._since = 0.0, -1.0  # seconds of work, and the time since which the engine works; -1: it rests
        self.on_finish = on_finish
        self._requests: dict[str, dict[int, Sequence]] = {}

    def submit(self, rid: str, sample: int, prompt_tokens: int, total_tokens: int, begun: Segments = ()) -> None:
        """Takes in a sample that ends with `total_tokens` generated tokens, of which those of `begun` exist already; it
        waits while the engine is down. Raises SimulatedEngineError if there is such a sample, if it has nothing left to
        generate or can never fit."""
        batch, had = self.batch, sum(tokens for _, tokens in begun)
        if had >= total_tokens or prompt_tokens + total_tokens > batch.kv_limit:
            raise SimulatedEngineError(
                f"{rid}/{sample} has {prompt_tokens} + {total_tokens} tokens, {had} of them begun; "
                f"the cache holds {batch.kv_limit}"
            )
        samples = self._requests.setdefault(rid, {})
        if sample in samples:
            raise SimulatedEngineError(f"{rid}/{sample} is here already")
        sequence = samples[sample] = Sequence(rid, sample, prompt_tokens, total_tokens, begun)
        first = not batch.waiting  # behind others it can't be let in, and what they wait for is an event of its own
        batch.add(sequence)
        if self.phase is Phase.IDLE or (first and batch.fits(sequence, self.kv_tokens)):
            self._interrupt()

    def abort(self, name: str) -> list[SampleProgress]:
        """Ends a request (`rid`) or one sample (`rid/i`) and returns what each sample had; [] for what isn't here."""
        rid, _, sample = name.partition("/")
        samples = self._requests.get(rid, {})
        found = [number for number in samples if not sample or number == int(sample)]
        if found:
            self._interrupt()
        return [self.batch.remove(self._forget(rid, number)) for number in found]

    def pause(self) -> None:
        """Stands still after the step under way, until `resume`. Running samples keep their cache."""
        self.paused = True
        self._interrupt()

    def resume(self) -> None:
        self.paused = False
        self._interrupt()

    def update(self, seconds: float, version: int, recompute: bool, done: Action | None = None) -> None:
        """Loads new weights: stands still for `seconds` from the end of the step under way, then generates under
        `version`. `recompute` fills the cache anew under the new weights. `done` is called when they are loaded, unless
        the engine is down or crashes before: then it has them when it is up again. Updates follow one another."""
        self._newest = version
        if self.up:
            self._updates.append((seconds, version, recompute, done))
            self._interrupt()

    def slow_down(self, factor: float) -> None:
        """Makes everything take `factor` times as long as it should, from the next step on."""
        self._slowdown = factor
        self._interrupt()

    def crash(self) -> list[str]:
        """Loses everything that is here and returns the ids of its requests. The engine is down until `recover`."""
        self._settle()
        self.clock.cancel(self._handle)
        self._updates.clear()
        self._cut, self._slowdown = False, 1.0
        self._rest(Phase.DOWN)
        lost = list(self._requests)
        for samples in self._requests.values():
            for sequence in samples.values():
                self.batch.remove(sequence)
        self._requests.clear()
        return lost

    def recover(self) -> None:
        """Brings the engine up after a crash, with the newest weights that it was told to serve."""
        if not self.up:
            self.phase = Phase.IDLE
            self.batch.change_version(self._newest)
            self._interrupt()

    @property
    def up(self) -> bool:
        return self.phase is not Phase.DOWN

    @property
    def version(self) -> int:
        return self.batch.version

    @property
    def decoded(self) -> int:
        """Tokens generated so far, those of aborted samples included."""
        return self.batch.decoded + self._elapsed() * len(self.batch.running)

    @property
    def kv_tokens(self) -> int:
        """Tokens in the cache."""
        return self.batch.kv + self._elapsed() * len(self.batch.running)

    @property
    def busy_seconds(self) -> float:
        """Seconds spent in steps so far. Standing still for an update or a pause is not work."""
        return self._busy + (self.clock.now - self._since if self._since >= 0 else 0.0)

    @property
    def peak(self) -> float:
        """The most tokens a second that the engine could decode, from an empty cache."""
        cost, most = self.cost, self.batch.max_running
        return max(batch / cost.step_seconds(batch, self.degree) for batch in range(1, most + 1))

    # --- samples ------------------------------------------------------------------------------------

    def _forget(self, rid: str, sample: int) -> Sequence:
        samples = self._requests[rid]
        sequence = samples.pop(sample)
        if not samples:
            del self._requests[rid]
        return sequence

    # --- steps in time ------------------------------------------------------------------------------

    def _elapsed(self) -> int:
        """Steps of the jump that are done but not yet counted by the batch."""
        return self._jump.elapsed(self.clock.now) if self.phase is Phase.DECODE else 0

    def _settle(self) -> None:
        """Brings the batch up to now; what is left of the jump is the step under way."""
        if self.phase is Phase.DECODE:
            done = self._elapsed()
            self.batch.advance(done)
            self._jump.cut(done, self.clock.now)

    def _interrupt(self) -> None:
        """Decides anew what to do next as soon as possible: now, or at the end of the step under way."""
        self._settle()
        if self._inside or self._cut:
            return
        if self.phase is Phase.IDLE:
            self._cut = True
            self._handle = self.clock.at(self.clock.now, self._go)
        elif self.phase is Phase.DECODE:
            self._cut = True
            self.clock.cancel(self._handle)
            self._handle = self.clock.at(self._jump.end(self._jump.steps), self._decode_ended)

    def _go(self) -> None:
        """Decides, between two steps, what is next."""
        self._cut = False
        if self.phase is Phase.DOWN:
            return
        batch, now = self.batch, self.clock.now
        if self._updates:
            self._rest(Phase.UPDATE)
            self._handle = self.clock.at(now + self._updates[0][0], self._updated)
            return
        if self.paused:
            self._rest(Phase.IDLE)
            return
        batch.preempt()
        if tokens := batch.admit():
            self.prefilled += tokens
            seconds = self.cost.prefill_seconds(tokens, self.degree) * self._slowdown
            self._work(Phase.PREFILL, now + seconds, self._go)
        elif running := len(batch.running):
            each = self._kv_seconds * self._slowdown
            if running not in self._step_seconds:
                self._step_seconds[running] = self.cost.step_seconds(running, self.degree)
            first = self._step_seconds[running] * self._slowdown + each * batch.kv
            self._jump = Jump(now, first, each * running, batch.horizon())
            self._work(Phase.DECODE, self._jump.end(self._jump.steps), self._decode_ended)
        else:
            self._rest(Phase.IDLE)

    def _work(self, phase: Phase, until: float, then: Action) -> None:
        self.phase = phase
        if self._since < 0:
            self._since = self.clock.now
        self._handle = self.clock.at(until, then)

    def _rest(self, phase: Phase) -> None:
        self.phase = phase
        if self._since >= 0:
            self._busy += self.clock.now - self._since
        self._since = -1.0

    def _decode_ended(self) -> None:
        self.batch.advance(self._jump.steps)
        self.phase = Phase.IDLE
        ended = self.batch.ended()
        for progress in ended:
            self._forget(progress.rid, progress.sample)
        self._inside = True
        for progress in ended:
            self.on_finish(progress)
        self._inside = False
        self._go()

    def _updated(self) -> None:
        _, version, recompute, done = self._updates.pop(0)
        self.phase = Phase.IDLE
        self.batch.change_version(version)
        if recompute:
            self.batch.expel_all()
        self._inside = True
        if done:
            done()
        self._inside = False
        self._go()


class SimulatedFleet:
    """Engines of `degree` GPUs each, on `gpus` GPUs. Raises ValueError for a degree that does not divide them, or a
    host's."""

    def __init__(
        self, clock: Clock, cost: Hardware, gpus: int, degree: int, on_finish: OnFinish, max_running: int = 256
    ) -> None:
        self.clock, self.cost, self.gpus, self.on_finish, self.max_running = clock, cost, gpus, on_finish, max_running
        self._past = [0.0] * 4  # of earlier engines: GPU seconds of work, peak tokens, tokens, preemptions
        self._build(degree, version=0)

    def _build(self, degree: int, version: int) -> None:
        hosts = self.cost.gpus_per_host
        if degree < 1 or self.gpus % degree or hosts % degree:
            raise ValueError(f"{self.gpus} GPUs in hosts of {hosts} can't be engines of {degree}")
        self.degree, self._since = degree, self.clock.now
        self.engines = [
            SimulatedEngine(self.clock, self.cost, degree, self.on_finish, self.max_running, version)
            for _ in range(self.gpus // degree)
        ]

    def set_parallelism(self, degree: int) -> None:
        """Replaces the engines, on which nothing is generated, by others on the same GPUs, with the oldest weights that
        any of them had. Raises ValueError like the class."""
        past, before = self._totals(), self.engines
        self._build(degree, min(engine.version for engine in before))
        self._past = past
        for engine in before:
            engine.crash()  # a last step may be under way, for samples that were aborted

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
        """Preemptions on all engines since the beginning."""
        return int(self._totals()[3])

    def utilisation(self) -> tuple[float, float]:
        """Returns (part of the GPUs' time in which their engine worked, tokens decoded as part of the most that were
        possible) since the beginning."""
        busy, peak, tokens, _ = self._totals()
        span = self.clock.now
        return (busy / (span * self.gpus), tokens / peak) if span > 0 else (0.0, 0.0)
