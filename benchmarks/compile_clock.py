"""Measures the time that JAX spends on compiling, so that benchmarks can report or subtract it."""

from __future__ import annotations

import collections
import threading
from typing import Any

import jax

_COMPILING = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")
_ALL = "/jax/core/compile/"  # tracing, too


class CompileClock:
    """Adds up the seconds that JAX spends compiling, by thread. Tracing can be left out: traces contain each other, and
    would count more than once."""

    def __init__(self, *, tracing: bool = True) -> None:
        self._events = _ALL if tracing else _COMPILING
        self._threads: collections.Counter[str] = collections.Counter()
        jax.monitoring.register_event_duration_secs_listener(self._add)

    @property
    def seconds(self) -> float:
        return self.in_threads("")

    def in_threads(self, prefix: str) -> float:
        """The seconds of the threads whose names begin with `prefix`."""
        return sum(seconds for name, seconds in list(self._threads.items()) if name.startswith(prefix))

    def _add(self, event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith(self._events):
            self._threads[threading.current_thread().name] += duration_secs
