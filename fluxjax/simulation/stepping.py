"""Steps of a simulated engine in time: what is next, how long it takes, and jumps over dull stretches."""

from __future__ import annotations

import abc
import enum

from .batch import Batch, Sequence
from .clock import Action, Clock, Handle
from .costs import EngineCost
from .jump import Jump


class Phase(enum.Enum):
    IDLE = 0  # nothing to do, or paused
    DECODE = 1
    PREFILL = 2
    UPDATE = 3  # new weights arrive
    DOWN = 4


class Stepper(abc.ABC):
    """The inside of `SimulatedEngine`: see there."""

    def __init__(self, clock: Clock, cost: EngineCost, degree: int, max_running: int, version: int) -> None:
        self.clock, self.cost, self.degree = clock, cost, degree
        self.batch = Batch(cost.kv_limit(degree), max_running, version)
        self.prefilled = 0  # tokens computed to fill the cache
        self.phase = Phase.IDLE
        self._step_seconds: dict[int, float] = {}  # by the number of samples, as they occur
        self._kv_seconds = cost.kv_seconds(degree)
        self._updates: list[tuple[float, int | None, bool, Action | None]] = []
        self._paused = self._cut = False
        self._inside = False  # while others are told what happened: what they ask for takes effect right afterwards
        self._slowdown = 1.0
        self._jump = Jump(0.0, 1.0, 0.0, 0)
        self._handle: Handle | None = None
        self._busy, self._since = 0.0, -1.0  # seconds of work, and since when it works; -1: it does not

    @abc.abstractmethod
    def report(self, ended: list[Sequence]) -> None:
        """Tells whom it concerns that these have all their tokens."""

    @property
    def busy_seconds(self) -> float:
        """Time spent in steps so far. Standing still for an update or a pause is not work."""
        return self._busy + (self.clock.now - self._since if self._since >= 0 else 0.0)

    @property
    def peak(self) -> float:
        """The most tokens a second that it could decode, from an empty cache."""
        cost, most = self.cost, self.batch.max_running
        return max(batch / cost.step_seconds(batch, self.degree) for batch in range(1, most + 1))

    def elapsed(self) -> int:
        """Steps of the jump that are done but not yet in the books."""
        return self._jump.elapsed(self.clock.now) if self.phase is Phase.DECODE else 0

    def settle(self) -> None:
        """The books as they are now; what is left of the jump is the step under way."""
        if self.phase is Phase.DECODE:
            done = self.elapsed()
            self.batch.advance(done)
            self._jump.cut(done, self.clock.now)

    def interrupt(self) -> None:
        """What to do next is decided anew as soon as possible: now, or at the end of the step under way."""
        self.settle()
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
        """Between two steps: decides what is next."""
        self._cut = False
        if self.phase is Phase.DOWN:
            return
        batch, now = self.batch, self.clock.now
        if self._updates:
            self._rest(Phase.UPDATE)
            self._handle = self.clock.at(now + self._updates[0][0], self._updated)
            return
        if self._paused:
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
        self._inside = True
        self.report(self.batch.ended())
        self._inside = False
        self._go()

    def halt(self) -> None:
        """Down, whatever was under way; the books are as of the last step that ended."""
        self.settle()
        self.clock.cancel(self._handle)
        self._updates.clear()
        self._paused, self._cut, self._slowdown = False, False, 1.0
        self._rest(Phase.DOWN)

    def _updated(self) -> None:
        _, version, recompute, done = self._updates.pop(0)
        self.phase = Phase.IDLE
        if version is not None:
            self.batch.change_version(version)
        if recompute:
            self.batch.expel_all()
        self._inside = True
        if done:
            done()
        self._inside = False
        self._go()
