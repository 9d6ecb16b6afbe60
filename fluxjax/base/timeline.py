"""Records the time of a run as named spans on lanes. Times this process's compilations, and names its activity."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import jax

K = TypeVar("K")
_EVENTS = "/jax/core/compile/"  # covers tracing, lowering and the compiler
_activities: list[str | Callable[[], str]] = []


@dataclasses.dataclass(frozen=True)
class Span:
    """A time in which one lane was busy. `name` is a stage or other work, such as `compile`. `lane` names the worker,
    such as an engine. `start` and `end` are seconds on the timeline's clock. `step` is 0 for work of no step."""

    name: str
    lane: str
    start: float
    end: float
    step: int


class Timeline:
    """Records spans as they end, and drops spans older than the last `keep_steps` steps."""

    def __init__(self, keep_steps: int = 10, clock: Callable[[], float] = time.perf_counter) -> None:
        self._keep = keep_steps
        self._clock = clock
        self._steps: dict[int, list[Span]] = {}

    @contextlib.contextmanager
    def span(self, name: str, lane: str, step: int) -> Iterator[None]:
        """Records the time of the `with` body as a span, even if the body raises."""
        start = self._clock()
        try:
            with activity(name):
                yield
        finally:
            self.add(Span(name, lane, start, self._clock(), step))

    def add(self, span: Span) -> None:
        self._steps.setdefault(span.step, []).append(span)
        for step in sorted(self._steps)[: -self._keep]:
            del self._steps[step]

    def spans(self) -> list[Span]:
        """Returns the recorded spans, sorted by start. Overlapping spans of one name, lane and step are joined."""
        kept = itertools.chain.from_iterable(self._steps.values())
        bars = [
            Span(name, lane, start, end, step)
            for (name, lane, step), times in disjoint(kept, lambda span: (span.name, span.lane, span.step)).items()
            for start, end in times
        ]
        return sorted(bars, key=lambda bar: (bar.start, bar.lane))

    def seconds(self, step: int) -> dict[str, float]:
        """Returns, for each name, the wall seconds in which at least one lane had a span of this name in `step`. The
        seconds of `compile` are not counted under other names."""
        spans = self._steps.get(step, ())

        def wall(*names: str) -> int | float:
            times = disjoint((span for span in spans if span.name in names), lambda span: None)
            return sum(end - start for start, end in times.get(None, ()))

        names, compiled = dict.fromkeys(span.name for span in spans), wall("compile")
        return {name: wall(name, "compile") - (name != "compile") * compiled for name in names}


def disjoint(spans: Iterable[Span], key: Callable[[Span], K]) -> dict[K, list[tuple[float, float]]]:
    """Returns, for each key, ascending disjoint intervals that cover the same time as the key's spans."""
    joined: dict[K, list[tuple[float, float]]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        times = joined.setdefault(key(span), [])
        if times and span.start <= times[-1][1]:
            times[-1] = (times[-1][0], max(times[-1][1], span.end))
        else:
            times.append((span.start, span.end))
    return joined


class Compilations:
    """Times the compilations of this process, by the events of JAX."""

    def __init__(self) -> None:
        self.under_way = 0
        self.spans: collections.deque[tuple[float, float]] = collections.deque(maxlen=10_000)  # disjoint, ascending
        # The start of the compilations under way, and the seconds of earlier compilations.
        self._lock, self._since, self._ended = threading.Lock(), 0.0, 0.0
        jax.monitoring.register_scalar_listener(lambda event, *_, **__: self._count(event, 1))
        jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: self._count(event, -1))

    def _count(self, event: str, change: int) -> None:
        if not event.startswith(_EVENTS) or threading.current_thread().name.startswith("compile"):
            return  # a thread of `Gradients.compile_ahead`, for which the run does not wait
        with self._lock:
            now, before, self.under_way = time.perf_counter(), self.under_way, max(self.under_way + change, 0)
            if not before:
                self._since = now
            elif not self.under_way:
                self.spans.append((self._since, now))
                self._ended += now - self._since

    @property
    def seconds(self) -> float:
        """The seconds in which at least one counted compilation was under way."""
        with self._lock:
            return self._ended + (time.perf_counter() - self._since if self.under_way else 0.0)


compilations = functools.cache(Compilations)  # the only instance of this process


def working_time() -> float:
    """Returns the seconds on a clock that stands still while this process compiles."""
    return time.perf_counter() - compilations().seconds


@contextlib.contextmanager
def activity(words: str | Callable[[], str]) -> Iterator[None]:
    """Makes `words` the activity of this process in the `with` body. Any thread may call a function `words`."""
    _activities.append(words)
    try:
        yield
    finally:
        _activities.remove(words)


def under_way() -> str:
    """Returns the latest activity of this process, with the word "compiling" while the process compiles."""
    words = [said if isinstance(said, str) else said() for said in _activities[-1:]]
    return ", ".join(words + ["compiling"] * bool(compilations().under_way))
