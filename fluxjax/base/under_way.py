"""Reports the current activity of this process, in words, and its time of compiling, which is a stage of its own."""

import collections
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator

_EVENTS = "/jax/core/compile/"  # tracing, lowering, and the compiler
_activities: list[str | Callable[[], str]] = []


class Compilations:
    """Times the compilations of this process, by the events of JAX."""

    def __init__(self) -> None:
        import jax

        self.under_way = 0
        self.spans: collections.deque[tuple[float, float]] = collections.deque(maxlen=10_000)  # disjoint, ascending
        # the start of the compilations under way; the seconds of earlier ones
        self._lock, self._since, self._ended = threading.Lock(), 0.0, 0.0
        jax.monitoring.register_scalar_listener(lambda event, *_, **__: self._count(event, 1))
        jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: self._count(event, -1))

    def _count(self, event: str, change: int) -> None:
        if not event.startswith(_EVENTS) or threading.current_thread().name.startswith("compile"):
            return  # nobody waits for a compilation in such a thread
        with self._lock:
            now, before, self.under_way = time.perf_counter(), self.under_way, max(self.under_way + change, 0)
            if not before:
                self._since = now
            elif not self.under_way:
                self.spans.append((self._since, now))
                self._ended += now - self._since

    @property
    def seconds(self) -> float:
        """The seconds in which at least one compilation was under way."""
        with self._lock:
            return self._ended + (time.perf_counter() - self._since if self.under_way else 0.0)


compilations = functools.cache(Compilations)  # the only instance in this process


def working_time() -> float:
    """Returns the seconds on a clock that stands still while this process compiles."""
    return time.perf_counter() - compilations().seconds


@contextlib.contextmanager
def activity(words: str | Callable[[], str]) -> Iterator[None]:
    """Makes `words` the activity of its body; any thread may call `words`, whenever it asks."""
    _activities.append(words)
    try:
        yield
    finally:
        _activities.remove(words)


def under_way() -> str:
    """Returns the activity of this process that began last, and whether the process compiles."""
    words = [said if isinstance(said, str) else said() for said in _activities[-1:]]
    return ", ".join(words + ["compiling"] * bool(compilations().under_way))
