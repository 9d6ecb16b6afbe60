"""A cache, in this process, of pixels from preprocessors.

The cache follows FlexRL (section 4, "Prefetching and Asynchronous Materialization"). The cache holds pixels of expected
prompts and of used prompts. Cached pixels are bytes, not floats.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from collections.abc import Sequence

import numpy as np

from models.shadow import Rows

from .tickets import ByteStore, normalised

log = logging.getLogger("fluxjax.data")
QUESTION_BYTES = 8 << 20  # a request to a store asks for no further rows after this many bytes of patches


@dataclasses.dataclass(eq=False)
class _KeptPatches:
    rows: Rows
    size: int  # bytes
    promised: bool  # True: the patches are expected, and were not requested yet
    patches: np.ndarray | None = None  # `[P, 3, n]`; None while they are being fetched


class NearPixels:
    """Caches up to `limit` bytes of patches, and fetches other patches from the `store`. Expected patches are fetched
    ahead, in order. Fetched patches that are not yet requested take at most half of the limit. To make room, other
    patches are dropped, the least recently used first. Any thread may call the methods."""

    def __init__(self, store: ByteStore, limit: int) -> None:
        self._store, self._limit = store, limit
        self._changed = threading.Condition()
        self._expected: collections.OrderedDict[str, Rows] = collections.OrderedDict()  # by ticket: rows to fetch ahead
        self._kept: collections.OrderedDict[Rows, _KeptPatches] = collections.OrderedDict()  # newest use last
        self._parts: dict[str, list[_KeptPatches]] = {}  # the values of `_kept`, by ticket
        self.used = self._promised = 0  # bytes of all patches in `_kept`, and of the promised patches among them
        self._closed = False
        threading.Thread(target=self._fetch_ahead, name="near-pixels", daemon=True).start()

    def expect(self, rows: Sequence[Rows]) -> None:
        """Announces that these rows will be requested next, after rows that were announced earlier. Does not block."""
        with self._changed:
            self._expected.update((ticket_rows.ticket, ticket_rows) for ticket_rows in rows)
            self._changed.notify_all()

    def pass_by(self, rows: Sequence[Rows]) -> None:
        """Announces that these rows are no longer expected. Does not block."""
        with self._changed:
            for ticket_rows in rows:
                self._expected.pop(ticket_rows.ticket, None)
                if (kept := self._kept.get(ticket_rows)) is not None:
                    self._promise(kept, False)
            self._changed.notify_all()

    def fetch(self, rows: Sequence[Rows]) -> list[np.ndarray]:
        """Returns the patches `[P, X]` (float32) of these rows. Raises the store's errors."""
        with self._changed:
            near = [self._here(asked) for asked in rows]
        gaps = [asked for asked, patches in zip(rows, near, strict=True) if patches is None]
        fetched = self._store.fetch_bytes(gaps) if gaps else []
        with self._changed:
            for gap, patches in zip(gaps, fetched, strict=True):
                if len(gap) and gap not in self._kept and self._make_room(patches.nbytes):
                    for part in [*self._parts.get(gap.ticket, ())]:
                        if part.patches is not None and gap.start <= part.rows.start and part.rows.stop <= gap.stop:
                            self._forget(part)
                    self._keep(_KeptPatches(gap, patches.nbytes, False, patches))
        came = iter(fetched)
        return normalised(self._store.settings, rows, [next(came) if patches is None else patches for patches in near])

    def close(self) -> None:
        """Drops all patches, and ends the thread that fetches ahead."""
        with self._changed:
            self._closed = True
            self._expected.clear()
            self._kept.clear()
            self._parts.clear()
            self.used = self._promised = 0
            self._changed.notify_all()

    # The methods down to `_begun` need the lock.

    def _here(self, rows: Rows) -> np.ndarray | None:
        """Returns the patches of the rows, joined from cached pieces; waits for pieces that are being fetched. Returns
        None if there are no rows, or if a row is neither cached nor being fetched."""
        self._expected.pop(rows.ticket, None)
        pieces: list[np.ndarray] = []
        start = rows.start
        while start < rows.stop:
            parts = [k for k in self._parts.get(rows.ticket, ()) if k.rows.start <= start < k.rows.stop]
            if not parts:
                return None
            kept = max(parts, key=lambda kept: kept.rows.stop)
            if kept.patches is None:
                self._changed.wait()
                continue
            self._promise(kept, False)
            self._kept.move_to_end(kept.rows)
            pieces.append(kept.patches[start - kept.rows.start : rows.stop - kept.rows.start])
            start = kept.rows.stop
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else None

    def _keep(self, kept: _KeptPatches) -> None:
        self._kept[kept.rows] = kept
        self._parts.setdefault(kept.rows.ticket, []).append(kept)
        self.used += kept.size
        self._promised += kept.size if kept.promised else 0

    def _forget(self, kept: _KeptPatches) -> None:
        if self._kept.get(kept.rows) is kept:
            self._promise(kept, False)
            del self._kept[kept.rows]
            self._parts[kept.rows.ticket].remove(kept)
            if not self._parts[kept.rows.ticket]:
                del self._parts[kept.rows.ticket]
            self.used -= kept.size

    def _promise(self, kept: _KeptPatches, promised: bool) -> None:
        if kept.promised != promised:
            kept.promised = promised
            self._promised += kept.size if promised else -kept.size

    def _make_room(self, size: int) -> bool:
        """Drops the least recently used patches until `size` bytes fit. Returns False if they can't fit."""
        if self._closed or self._promised + size > self._limit:
            return False
        for kept in [kept for kept in self._kept.values() if not kept.promised]:
            if self.used + size <= self._limit:
                break
            self._forget(kept)
        return True

    def _fits(self) -> bool:
        """Says whether the next expected rows fit, or are too large to ever fit."""
        size = self._size(next(iter(self._expected.values())))
        return self._promised + size <= self._limit // 2 or size > self._limit // 2

    def _size(self, rows: Rows) -> int:
        return len(rows) * self._store.settings.patch_bytes

    def _begun(self) -> list[_KeptPatches]:
        """Takes expected rows from the queue while there is room. Returns the patches to fetch now."""
        begun: list[_KeptPatches] = []
        while self._expected and self._fits() and sum(kept.size for kept in begun) < QUESTION_BYTES:
            _, rows = self._expected.popitem(last=False)
            if (known := self._kept.get(rows)) is not None:
                self._promise(known, True)
            elif (size := self._size(rows)) <= self._limit // 2 and self._make_room(size):
                begun.append(_KeptPatches(rows, size, True))
                self._keep(begun[-1])
        return begun

    # The methods below belong to the thread `near-pixels`.

    def _fetch_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._expected and self._fits()))
                if self._closed:
                    return
                begun = self._begun()
            if begun:
                self._bring(begun)

    def _bring(self, begun: Sequence[_KeptPatches]) -> None:
        arrived: Sequence[np.ndarray] = ()
        try:
            arrived = self._store.fetch_bytes([kept.rows for kept in begun])
        except Exception as error:  # `fetch` asks for the pixels again, and raises
            log.debug("pixels could not be fetched ahead: %s", error)
        with self._changed:
            for kept, patches in zip(begun, arrived, strict=False):
                kept.patches = patches
            for kept in begun[len(arrived) :]:
                self._forget(kept)
            self._changed.notify_all()
