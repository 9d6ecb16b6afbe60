"""Engines on a fixed set of GPUs: how many there are follows from how many GPUs each spans."""

from __future__ import annotations

from collections.abc import Callable

from .batch import Progress, Segments
from .clock import Clock
from .costs import EngineCost
from .simulated_engine import SimulatedEngine

OnFinish = Callable[[int, str, int, int, Segments], object]  # engine, rid, sample, tokens, segments


class SimulatedFleet:
    """`gpus` GPUs in hosts of `gpus_per_host`, as engines of `degree` GPUs each. `on_finish` is that of
    `SimulatedEngine`, with the index of the engine in front."""

    def __init__(
        self,
        clock: Clock,
        cost: EngineCost,
        gpus: int,
        degree: int,
        on_finish: OnFinish,
        max_running: int = 256,
        gpus_per_host: int = 8,
        version: int = 0,
    ) -> None:
        self.clock, self.cost, self.gpus, self.on_finish = clock, cost, gpus, on_finish
        self.max_running, self.gpus_per_host = max_running, gpus_per_host
        self._begun = clock.now
        self._past = [
            0.0,
            0.0,
            0.0,
            0.0,
        ]  # GPU seconds of work, peak tokens so far, tokens, preemptions of earlier ones
        self._check(degree)
        self._build(degree, version)

    def _check(self, degree: int) -> None:
        if degree < 1 or self.gpus % degree or self.gpus_per_host % degree:
            raise ValueError(f"{self.gpus} GPUs in hosts of {self.gpus_per_host} can't be engines of {degree}")

    def _build(self, degree: int, version: int) -> None:
        self.degree, self._since = degree, self.clock.now

        def teller(engine: int) -> Callable[[str, int, int, Segments], object]:
            return lambda *what: self.on_finish(engine, *what)

        self.engines = [
            SimulatedEngine(self.clock, self.cost, degree, teller(index), self.max_running, version)
            for index in range(self.gpus // degree)
        ]

    def set_parallelism(self, degree: int, seconds: float = 0.0) -> list[Progress]:
        """Other engines on the same GPUs: what was on the old ones is handed back, to be submitted anew with what it
        has begun. The new ones can be used at once and begin to work after `seconds`; they serve the oldest weights
        that any of the old ones had. Raises ValueError for a degree that does not divide a host."""
        self._check(degree)
        oldest = min(engine.version for engine in self.engines)
        unfinished = [progress for engine in self.engines for progress in engine.crash()]
        self._past = self._totals()
        self._build(degree, oldest)
        if seconds > 0:
            for engine in self.engines:
                engine.update(seconds)
        return unfinished

    def _totals(self) -> list[float]:
        engines, span = self.engines, self.clock.now - self._since
        now = [
            self.degree * sum(engine.busy_seconds for engine in engines),
            span * len(engines) * engines[0].peak,
            float(sum(engine.decoded for engine in engines)),
            float(sum(engine.preemptions for engine in engines)),
        ]
        return [before + more for before, more in zip(self._past, now, strict=True)]

    @property
    def preemptions(self) -> int:
        """Of all engines since the beginning."""
        return int(self._totals()[3])

    def utilisation(self) -> tuple[float, float]:
        """(part of the GPUs' time in which their engine worked, tokens decoded as part of the most that were possible)
        since the beginning."""
        busy, peak, tokens, _ = self._totals()
        span = self.clock.now - self._begun
        return (busy / (span * self.gpus), tokens / peak) if span > 0 else (0.0, 0.0)
