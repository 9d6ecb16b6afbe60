"""Fetches the pixels of batches in the background, before the batches are computed.

A batch has shadows in the place of its patches (`models.shadow`). Fetching overlaps with computing, as in FlexRL
(section 4, "Prefetching and Asynchronous Materialization").
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeAlias, TypeVar

import jax
import numpy as np

from models.processing import MediaError
from models.shadow import Fetch, ShadowTensor

from ..base.errors import DataError

Tree = TypeVar("Tree")  # a pytree of arrays and shadows
NoteFetch: TypeAlias = Callable[[float, float, int], None]  # gets a fetch's start, end (`time.perf_counter`) and bytes


@dataclasses.dataclass(frozen=True)
class Materialized:
    """Totals since the materializer was made."""

    bytes: int = 0
    fetching: float = 0.0  # seconds in which pixels were fetched
    waited: float = 0.0  # seconds in which a batch waited for its pixels


class Materializer:
    """Fetches the pixels of expected batches in the order of their use. At most `ahead` fetched batches wait to be
    read, to bound the memory. The materializer's thread calls `fetch` for expected shadows, the reading thread for
    other shadows. `read` raises the errors of `fetch`; a MediaError becomes a DataError that names the file."""

    def __init__(self, fetch: Fetch, ahead: int = 2, note: NoteFetch = lambda start, end, bytes: None) -> None:
        self._fetch, self._ahead, self._note = fetch, ahead, note
        self._lock = threading.Lock()
        self._tasks: dict[int, _Task] = {}  # the task of each expected shadow, by the `id` of the shadow
        self._coming: collections.deque[list[_Task]] = collections.deque()  # tasks not yet begun, by batch
        self._unread = 0  # batches whose fetch has begun, and that are not yet read
        self.totals = Materialized()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="materialize")

    def expect(self, batches: Iterable[object]) -> None:
        """Announces that these batches will be read, in this order. Batches announced earlier keep their position."""
        with self._lock:
            for batch in batches:
                fresh = [_Task(shadow) for shadow in shadows_of(batch) if id(shadow) not in self._tasks]
                self._tasks |= {id(task.shadow): task for task in fresh}
                if fresh:
                    self._coming.append(fresh)
            self._begin()

    def read(self, tree: Tree) -> Tree:
        """Returns the tree with arrays in the place of its shadows. Waits for these arrays."""
        return jax.tree.map(lambda leaf: self._data(leaf) if isinstance(leaf, ShadowTensor) else leaf, tree)

    def forget(self, batches: Iterable[object]) -> None:
        """Announces that these batches will not be read again. Their pixels are dropped, or not fetched."""
        with self._lock:
            for batch in batches:
                for shadow in shadows_of(batch):
                    task = self._tasks.pop(id(shadow), None)
                    if task is not None and task.future is not None:
                        self._seen(task)
            kept = (list(filter(lambda task: id(task.shadow) in self._tasks, tasks)) for tasks in self._coming)
            self._coming = collections.deque(filter(None, kept))
            self._begin()

    def close(self) -> None:
        """Ends the thread, after the fetch under way."""
        with self._lock:
            self._coming.clear()
        self._thread.shutdown(cancel_futures=True)

    def _data(self, shadow: ShadowTensor) -> np.ndarray:
        with self._lock:
            task = self._tasks.get(id(shadow))
            while task is not None and task.future is None:  # the shadow is read before its fetch has begun
                self._unread = 0
                self._begin()
            if task is not None:
                self._seen(task)
                self._begin()
        began = time.perf_counter()
        data = self._materialized(shadow) if task is None or task.future is None else task.future.result()
        waited = time.perf_counter() - began
        with self._lock:
            self.totals = dataclasses.replace(self.totals, waited=self.totals.waited + waited)
        return data

    def _begin(self) -> None:
        """Begins to fetch batches until `ahead` batches are unread. The caller holds the lock."""
        while self._coming and self._unread < self._ahead:
            tasks = self._coming.popleft()
            for task in tasks:
                task.batch = tasks
                task.future = self._thread.submit(self._materialized, task.shadow)
            self._unread += 1

    def _seen(self, task: _Task) -> None:
        """Counts the batch of a task as read, once. The caller holds the lock."""
        if task.batch is not None:
            self._unread = max(self._unread - 1, 0)
            for sibling in task.batch:
                sibling.batch = None

    def _materialized(self, shadow: ShadowTensor) -> np.ndarray:
        began = time.perf_counter()
        try:
            data = shadow.materialize(self._fetch)
        except MediaError as error:  # a prompt that was answered can't be skipped any more
            raise DataError(f"{error}; media must stay as they are while a run trains on them") from error
        ended, size = time.perf_counter(), sum(map(len, shadow.elsewhere)) * shadow.nbytes // max(len(shadow), 1)
        self._note(began, ended, size)
        with self._lock:
            old = self.totals
            self.totals = dataclasses.replace(old, bytes=old.bytes + size, fetching=old.fetching + ended - began)
        return data


class _Task:
    """The fetch of one shadow's pixels. From the start of a batch's fetch until the batch's first read, `batch` has all
    tasks of the batch; at other times it is None."""

    def __init__(self, shadow: ShadowTensor) -> None:
        self.shadow = shadow
        self.future: concurrent.futures.Future[np.ndarray] | None = None
        self.batch: list[_Task] | None = None


def shadows_of(tree: object) -> list[ShadowTensor]:
    """Returns the shadows among the leaves of a pytree."""
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, ShadowTensor)]
