"""Waiting for arrays in a way that can be given up: JAX's own wait for a peer that hangs never ends."""

import queue
import threading
from collections.abc import Callable, Sequence

import jax

_LOOK = 1.0  # seconds between two looks at whether to give up, should nobody call `give_up`


class _Wait:
    def __init__(self, arrays: Sequence[jax.Array]) -> None:
        self.arrays: Sequence[jax.Array] = arrays
        self.done = threading.Event()
        self.arrived = False
        self.error: Exception | None = None


class Arrivals:
    """Daemon threads that wait for arrays, one for each wait under way, used again and again.

    A thread whose arrays never come stays behind. It can't be stopped, only left to the end of the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: set[_Wait] = set()
        self._work: queue.SimpleQueue[_Wait] = queue.SimpleQueue()
        self._idle = 0

    def wait(self, arrays: Sequence[jax.Array], hopeless: Callable[[], bool]) -> bool:
        """Returns True once all `arrays` are there; False soon after `hopeless()`, at once if `give_up` was called too.

        Raises the error of the program or of the transfer that should have brought them.
        """
        wait = _Wait(arrays)
        with self._lock:
            self._waits.add(wait)
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._serve, name="link-arrival", daemon=True).start()
        self._work.put(wait)
        while not wait.arrived and wait.error is None and not hopeless():
            wait.done.wait(_LOOK)
        with self._lock:
            self._waits.discard(wait)
        if wait.error is not None:
            raise wait.error
        return wait.arrived

    def give_up(self) -> None:
        """Wakes everybody who waits, to look whether it is hopeless."""
        with self._lock:
            for wait in self._waits:
                wait.done.set()

    def _serve(self) -> None:
        while True:
            wait = self._work.get()
            try:
                jax.block_until_ready(wait.arrays)
                wait.arrived = True
            except Exception as error:
                wait.error = error
            wait.arrays = ()
            with self._lock:
                self._idle += 1
            wait.done.set()
            del wait  # nor the arrays' error with its frames
