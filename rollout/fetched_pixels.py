"""Fetches the pixels of an engine's prompts while the device computes, and no more than the next turns need.

Prompts travel without pixels (`models.shadow`). The pixels of a turn are fetched for that turn, piece by piece, and the
pixels of the next turn meanwhile; used pixels are not kept.
"""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from models.shadow import Fetch, Rows, ShadowTensor

THREADS = 4  # threads that wait for pixels
AHEAD_PATCHES = 8192  # most patches fetched before `take`: those of one or two turns


class FetchedPixels:
    """Fetches the patches of prompts by `fetch`, None for an engine whose prompts have pixels. Used by one thread at a
    time."""

    def __init__(self, fetch: Fetch | None) -> None:
        self._fetch = fetch
        self._wanted: deque[ShadowTensor] = deque()  # to be fetched, in this order
        self._held: dict[tuple[Rows, ...], concurrent.futures.Future[list[np.ndarray]]] = {}
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None

    def expect(self, tensors: Iterable[ShadowTensor]) -> None:
        """Announces the tensors that `take` will get, in this order, and no others; begins to fetch the first ones."""
        self._wanted = deque(tensors)
        wanted = {tensor.elsewhere for tensor in self._wanted}
        for rows in self._held.keys() - wanted:
            self._held.pop(rows).cancel()
        self._begin()

    def _begin(self) -> None:
        held = sum(len(rows) for tensor_rows in self._held for rows in tensor_rows)
        while self._wanted and (not self._held or held + len(self._wanted[0]) <= AHEAD_PATCHES):
            tensor = self._wanted.popleft()
            if tensor.elsewhere and tensor.elsewhere not in self._held:
                self._held[tensor.elsewhere] = self._begun(tensor.elsewhere)
                held += len(tensor)

    def _begun(self, rows: tuple[Rows, ...]) -> concurrent.futures.Future[list[np.ndarray]]:
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="rollout-pixels")
        return self._threads.submit(self._fetched, rows)

    def _fetched(self, rows: tuple[Rows, ...]) -> list[np.ndarray]:
        assert self._fetch is not None, "requests are checked"
        fetched = list(self._fetch(rows))
        for piece, patches in zip(rows, fetched, strict=True):
            if not np.isfinite(patches).all():
                raise ValueError(f"patches {piece.start} to {piece.stop} of {piece.ticket} have NaN or infinity")
        return fetched

    def take(self, tensor: ShadowTensor) -> np.ndarray:
        """Waits for the patches and returns them; they are not kept. Raises the errors of `fetch`, ShadowError for
        patches of another shape, and ValueError for pixels that are not finite."""
        rows = tensor.elsewhere
        if not rows:
            return tensor.materialize(_nothing)
        future = self._held.pop(rows, None) or self._begun(rows)
        self._begin()
        fetched = future.result()
        return tensor.materialize(lambda _: fetched)

    def close(self) -> None:
        """Cancels the fetches; those under way end when they return. May be called again."""
        self.expect(())
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _nothing(rows: Sequence[Rows]) -> Sequence[np.ndarray]:
    return []
