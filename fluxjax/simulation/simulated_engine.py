"""A simulated inference engine: continuous batching, a KV cache of limited size, preemption by recomputation.

The engine works in steps, as vLLM and SGLang do. At the end of each step the engine

1. preempts the youngest samples while the cache lacks room for one more token of every sample (the cache of a preempted
   sample is dropped, and computed anew when there is room: Flexes, section 4.2),
2. lets in waiting samples in their order, as far as cache and `max_running` allow, in a step of prefill: this step
   fills the cache with their prompts and generated tokens, and gives no other sample a token,
3. or, if it let in no sample, decodes: one token for every running sample.

Time is not simulated token by token. While no sample enters or leaves, the time of n steps is a sum in closed form, so
that the engine jumps to the next step in which a sample ends or the cache is full. A call from outside (a sample, an
abort, an update) cuts the jump short after the step under way. `continuous_batch.py` has samples and cache.
"""

import bisect
import enum
from collections.abc import Callable

from .clock import Action, Clock, Handle
from .continuous_batch import Batch, SampleProgress, Segments, Sequence
from .hardware import Hardware

OnFinish = Callable[[SampleProgress], object]


class Jump:
    """`steps` decode steps from time `anchor` (s) on. Step `i`, from 0 on, takes `first + i * growth` seconds."""

    __slots__ = ("anchor", "first", "growth", "steps")

    def __init__(self, anchor: float, first: float, growth: float, steps: int) -> None:
        self.anchor, self.first, self.growth, self.steps = anchor, first, growth, steps

    def end(self, steps: int) -> float:
        """Returns the time at which `steps` steps are done."""
        return self.anchor + (steps * self.first + self.growth * (steps * (steps - 1) // 2))

    def cut(self, done: int, now: float) -> None:
        """Reduces the jump, after `done` steps, to the step under way at `now`; to no step if a step ends at `now`."""
        self.anchor, self.first = self.end(done), self.first + self.growth * done
        self.steps = 0 if self.anchor >= now else 1


class Phase(enum.Enum):
    IDLE = 0  # nothing to do, or paused
    DECODE = 1
    PREFILL = 2
    UPDATE = 3  # new weights arrive
    DOWN = 4


class SimulatedEngine:
    """An engine of `degree` GPUs. It calls `on_finish`, which may submit and abort samples, when one has all tokens."""

    def __init__(
        self, clock: Clock, cost: Hardware, degree: int, on_finish: OnFinish, max_running: int = 256, version: int = 0
    ) -> None:
        self.clock, self.cost, self.degree = clock, cost, degree
        self.batch = Batch(cost.kv_limit(degree), max_running, version)
        self.prefilled = 0  # tokens computed to fill the cache
        self.phase = Phase.IDLE
        self._step_seconds: dict[int, float] = {}  # by the number of samples; filled when first needed
        self._kv_seconds = cost.kv_seconds(degree)
        self._updates: list[tuple[float, int, bool, Action | None]] = []
        self.paused = self._cut = False
        self._newest = version  # the newest weights that `update` ordered
        self._inside = False  # a callback runs: its calls take effect when it returns
        self._slowdown = 1.0
        self._jump = Jump(0.0, 1.0, 0.0, 0)
        self._handle: Handle | None = None
        self._busy, self._since = 0.0, -1.0  # seconds of earlier work; when work began, -1: at rest
        self.on_finish = on_finish
        self._samples: dict[tuple[str, int], Sequence] = {}  # by request and number

    def submit(self, rid: str, sample: int, prompt_tokens: int, total_tokens: int, begun: Segments = ()) -> None:
        """Adds a sample that ends with `total_tokens` generated tokens; the tokens of `begun` exist already. The sample
        waits while the engine is down. Raises ValueError for a sample that the engine has already, that has
        no tokens left to generate, or that the cache can never hold."""
        batch, had = self.batch, sum(tokens for _, tokens in begun)
        if had >= total_tokens or prompt_tokens + total_tokens > batch.kv_limit:
            raise ValueError(
                f"{rid}/{sample} has {prompt_tokens} + {total_tokens} tokens, {had} of them begun; "
                f"the cache holds {batch.kv_limit}"
            )
        if (rid, sample) in self._samples:
            raise ValueError(f"{rid}/{sample} is here already")
        sequence = self._samples[rid, sample] = Sequence(rid, sample, prompt_tokens, total_tokens, begun)
        first = not batch.waiting  # a sample behind others can't be let in before them
        batch.add(sequence)
        if self.phase is Phase.IDLE or (first and batch.fits(sequence, self.kv_tokens)):
            self._interrupt()

    def abort(self, name: str) -> list[SampleProgress]:
        """Ends a request (`rid`) or one sample (`rid/i`). Returns the progress of each ended sample."""
        rid, _, sample = name.partition("/")
        found = [key for key in self._samples if key[0] == rid and (not sample or key[1] == int(sample))]
        if found:
            self._interrupt()
        return [self.batch.remove(self._samples.pop(key)) for key in found]

    def pause(self) -> None:
        """Pauses after the step under way, until `resume`. Running samples keep their cache."""
        self.paused = True
        self._interrupt()

    def resume(self) -> None:
        self.paused = False
        self._interrupt()

    def update(self, seconds: float, version: int, recompute: bool, done: Action | None = None) -> None:
        """Loads new weights: pauses for `seconds` from the end of the step under way, then generates under `version`.
        `recompute` fills the cache anew under the new weights. `done` is called when the weights are loaded. If the
        engine is down, or crashes before that, `done` is not called, and the engine has the weights after `recover`."""
        self._newest = version
        if self.up:
            self._updates.append((seconds, version, recompute, done))
            self._interrupt()

    def slow_down(self, factor: float) -> None:
        """Makes every step take `factor` times its normal time, from the next step on."""
        self._slowdown = factor
        self._interrupt()

    def crash(self) -> list[str]:
        """Loses all samples and returns the ids of their requests. The engine is down until `recover`."""
        self._settle()
        self.clock.cancel(self._handle)
        self._updates.clear()
        self._cut, self._slowdown = False, 1.0
        self._rest(Phase.DOWN)
        lost = dict.fromkeys(rid for rid, _ in self._samples)
        for sequence in self._samples.values():
            self.batch.remove(sequence)
        self._samples.clear()
        return list(lost)

    def recover(self) -> None:
        """Brings the engine up after a crash, with the newest weights that `update` ordered."""
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
        """The number of tokens generated so far, including the tokens of aborted samples."""
        return self.batch.decoded + self._elapsed() * len(self.batch.running)

    @property
    def kv_tokens(self) -> int:
        """The number of tokens in the cache."""
        return self.batch.kv + self._elapsed() * len(self.batch.running)

    @property
    def busy_seconds(self) -> float:
        """The seconds spent in steps so far, without updates and pauses."""
        return self._busy + (self.clock.now - self._since if self._since >= 0 else 0.0)

    @property
    def peak(self) -> float:
        """The most tokens a second that the engine could decode, from an empty cache."""
        cost, most = self.cost, self.batch.max_running
        return max(batch / cost.step_seconds(batch, self.degree) for batch in range(1, most + 1))

    # --- steps in time ------------------------------------------------------------------------------

    def _elapsed(self) -> int:
        """Returns the number of steps of the jump that are done."""
        done = range(1, self._jump.steps + 1) if self.phase is Phase.DECODE else range(0)
        return bisect.bisect(done, self.clock.now, key=self._jump.end)

    def _settle(self) -> None:
        if self.phase is Phase.DECODE:
            done = self._elapsed()
            self.batch.advance(done)
            self._jump.cut(done, self.clock.now)

    def _interrupt(self) -> None:
        """Has the engine choose its next action as soon as possible: now, or at the end of the step under way."""
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
            token_seconds = self._kv_seconds * self._slowdown
            if running not in self._step_seconds:
                self._step_seconds[running] = self.cost.step_seconds(running, self.degree)
            first = self._step_seconds[running] * self._slowdown + token_seconds * batch.kv
            self._jump = Jump(now, first, token_seconds * running, batch.horizon())
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
            del self._samples[progress.rid, progress.sample]
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
