"""The media store of this process, which decodes media and caches their patches."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import os
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence

import numpy as np
import xxhash

from models.processing import MediaError
from models.processing.media import MediaSettings
from models.processing.media_file import Medium, Source, opened
from models.shadow import Rows

from ..config.data import DataConfig
from .decoders import DecodeJob, DecoderPool, ThreadDecoders
from .locations import is_url
from .media_cache import SLICE_BYTES, Recent, Slices
from .tickets import MediaRef, StaleTicket, Ticket, check_ref, normalised, parsed, read_ref

GIB = 1 << 30
DECODE_SECONDS = 60.0  # seconds that a process may take to decode a file
DECODE_MEMORY_GIB = 8.0  # memory that a process may take to decode a file
KNOWN = 1 << 18  # files whose content hash and decoding result are remembered


@dataclasses.dataclass
class StoreStats:
    """Counts of a store since its start, and its present memory and load."""

    hits: int = 0  # requested slices that were in memory
    misses: int = 0  # requested slices that were not in memory
    decoded_media: int = 0  # media decoded, completely or in part
    decoded_frames: int = 0
    decoded_patches: int = 0
    bad_media: int = 0
    memory_bytes: int = 0  # bytes of decoded media in memory
    queue_depth: int = 0  # media that wait to be decoded
    busy_workers: int = 0
    killed_workers: int = 0


class LocalStore:
    """A `MediaStore` on this machine. Threads that ask for one medium at once wait for one decoding. Slices of decoded
    media (`media_cache.Slices`) are cached by the content of files, so that equal files share them."""

    def __init__(
        self, settings: MediaSettings, config: DataConfig, *, workers: int, slice_bytes: int = SLICE_BYTES
    ) -> None:
        """`workers` processes decode; if `workers` is 0, the calling threads decode."""
        self.settings = settings
        self.digest = settings.digest
        self.slice_bytes, self._workers = slice_bytes, workers
        # Slices, by content, digest of the settings, medium, and slice number.
        self._kept = Recent[np.ndarray](int(config.cache_gib * GIB), lambda patches: patches.nbytes)
        self._decoders: ThreadDecoders | DecoderPool = ThreadDecoders(settings)
        self._fetching: concurrent.futures.ThreadPoolExecutor | None = None  # threads that wait while processes decode
        if workers:
            bounds = {"seconds": DECODE_SECONDS, "memory_gib": DECODE_MEMORY_GIB}
            self._decoders = DecoderPool(settings, workers, **bounds)
            self._fetching = concurrent.futures.ThreadPoolExecutor(workers, "fetch")
        self._contents: Recent[bytes] = Recent(KNOWN)  # digests by path, stamp and cell
        self._verdicts: Recent[Medium | MediaError] = Recent(KNOWN)  # by content and kind: the medium or the fault
        self._locks = weakref.WeakValueDictionary[Hashable, threading.Lock]()  # locks of media and slices being decoded
        self._stats = StoreStats()
        self._lock = threading.Lock()  # guards `_stats` and `_locks`

    @property
    def concurrency(self) -> int:
        return 2 * self._workers if self._workers else min(8, max(2, os.cpu_count() or 1))

    def look(self, refs: Sequence[MediaRef]) -> list[Ticket | MediaError]:
        """Decodes media, as `MediaStore.look` says. Raises DataError if no decoder process can be started."""
        return [self._judged(ref) for ref in refs]

    def fetch(self, rows: Sequence[Rows]) -> list[np.ndarray]:
        """Fetches normalised patches, as `MediaStore.fetch` says."""
        return normalised(self.settings, rows, self.fetch_bytes(rows))

    def fetch_bytes(self, rows: Sequence[Rows]) -> list[np.ndarray]:
        """Returns the patches `[P, 3, n]` (uint8) of these rows of tickets. Raises the errors of `fetch`. The arrays
        may be views of cached slices, so callers must not change the arrays."""
        tickets = {wanted.ticket: self._ticket(wanted) for wanted in rows}
        for ticket in tickets.values():
            if not is_url(ticket.ref.path):  # the server of a URL is asked only if the URL is read again
                check_ref(ticket.ref)

        def read(wanted: Rows) -> list[np.ndarray]:
            return self._pieces(tickets[wanted.ticket], wanted)

        pieces = map(read, rows) if self._fetching is None or len(rows) < 2 else self._fetching.map(read, rows)
        return [arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for arrays in pieces]

    def stats(self) -> StoreStats:
        waiting, busy, killed = self._decoders.load()
        workers = {"queue_depth": waiting, "busy_workers": busy, "killed_workers": killed}
        with self._lock:
            return dataclasses.replace(self._stats, memory_bytes=self._kept.used, **workers)

    def close(self) -> None:
        """Ends the decoder processes and drops cached slices."""
        self._decoders.close()
        if self._fetching:
            self._fetching.shutdown(cancel_futures=True)
        self._kept.clear()

    def _judged(self, ref: MediaRef) -> Ticket | MediaError:
        try:
            check_ref(ref)
            verdict = self._verdict(ref)
        except MediaError as error:
            return error
        if isinstance(verdict, Medium):
            return Ticket(ref, self.digest, verdict)
        return type(verdict)(ref.name, verdict.reason)  # the verdict may name another file of equal content

    def _verdict(self, ref: MediaRef) -> Medium | MediaError:
        """Returns the medium, or the error of decoding its content. Raises MediaError if the content can't be read."""
        content = self._contents.get(_version(ref))
        if content and (verdict := self._verdicts.get((content, ref.kind))):
            return verdict
        content, source = self._read(ref)
        with self._holding((content, ref.kind)):
            verdict = self._verdicts.get((content, ref.kind))
            if verdict is None:
                try:
                    verdict, _ = self._decode(ref, content, source)
                except StaleTicket:
                    raise
                except MediaError as error:
                    verdict = error
                    self._add(bad_media=1)
                self._verdicts.put((content, ref.kind), verdict)
            return verdict

    def _decode(
        self, ref: MediaRef, content: bytes, source: Source, known: Medium | None = None, run: range = range(0)
    ) -> tuple[Medium, dict[int, np.ndarray]]:
        """Decodes a medium and caches its slices. If `known` is the medium of an earlier decoding, decodes and returns
        only the slices `run`. Raises MediaError, and StaleTicket if the file changes meanwhile."""
        found: dict[int, np.ndarray] = {}

        def keep(medium: Medium, number: int, patches: np.ndarray) -> None:
            if number == run.start:  # the decoder has read the complete file once the first slice arrives
                _still(ref, source)
            if isinstance(patches.base, np.ndarray) and patches.base.nbytes > patches.nbytes:
                patches = patches.copy()  # a part of a larger array would keep the complete array in memory
            patches.setflags(write=False)
            self._kept.put((content, self.digest, medium, number), patches)
            if known is not None:
                found[number] = patches
            pairs = len(patches) // (medium.grid[1] * medium.grid[2])
            frames = pairs * self.settings.layout.temporal_patch_size if medium.kind == "video" else 1
            self._add(decoded_frames=frames, decoded_patches=len(patches))

        job = DecodeJob(ref.name, ref.kind, source, known, run.start, run.stop, self.slice_bytes)
        try:
            medium = self._decoders.decode(job, keep, urgent=known is not None)
        except StaleTicket:
            raise
        except MediaError:
            _still(ref, source)
            raise
        self._add(decoded_media=1)
        return medium, found

    @contextlib.contextmanager
    def _holding(self, *keys: Hashable) -> Iterator[None]:
        """Takes the locks of all keys in the given order, which must be the same for all callers."""
        with self._lock:
            locks = [self._locks.setdefault(key, threading.Lock()) for key in keys]
        with contextlib.ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            yield

    def _add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self._stats, name, getattr(self._stats, name) + count)

    def _ticket(self, rows: Rows) -> Ticket:
        try:
            ticket = parsed(rows.ticket)
        except ValueError as error:
            raise MediaError("a ticket", str(error)) from None
        if ticket.settings != self.digest:
            reason = f"its ticket has the media settings {ticket.settings}, this process {self.digest}"
            raise MediaError(ticket.ref.name, f"{reason}: all processes of a run must have the same media settings")
        if not 0 <= rows.start <= rows.stop <= ticket.num_patches:
            raise MediaError(
                ticket.ref.name,
                f"rows {rows.start} to {rows.stop} were asked for, but it has {ticket.num_patches} patches",
            )
        return ticket

    def _pieces(self, ticket: Ticket, rows: Rows) -> list[np.ndarray]:
        slices = Slices.of(ticket.medium, self.settings.patch_bytes, self.slice_bytes)
        first = min(rows.start // slices.patches, len(slices) - 1)
        last = max(first + 1, -(-rows.stop // slices.patches))
        arrays = self._slices(ticket, first, last)
        starts = range(first * slices.patches, last * slices.patches, slices.patches)
        return [
            array[max(rows.start - start, 0) : rows.stop - start] for start, array in zip(starts, arrays, strict=True)
        ]

    def _slices(self, ticket: Ticket, first: int, last: int) -> list[np.ndarray]:
        content = self._contents.get(_version(ticket.ref)) or self._read(ticket.ref)[0]
        keys = {n: (content, self.digest, ticket.medium, n) for n in range(first, last)}
        found = {number: self._kept.get(key) for number, key in keys.items()}
        missing = [number for number, array in found.items() if array is None]
        self._add(hits=len(found) - len(missing), misses=len(missing))
        if missing:
            with self._holding((content, ticket.ref.kind)):
                pass  # waits for a thread that decodes the complete medium and caches these slices, too
            with self._holding(*(keys[number] for number in missing)):
                found |= {number: self._kept.get(keys[number]) for number in missing}
                for run in _runs(number for number in missing if found[number] is None):
                    again, source = self._read(ticket.ref)
                    if again != content:
                        raise StaleTicket(ticket.ref.name, "has changed")
                    found |= self._decode(ticket.ref, content, source, ticket.medium, run)[1]
        return [array for number in sorted(found) if (array := found[number]) is not None]

    def _read(self, ref: MediaRef) -> tuple[bytes, Source]:
        """Returns the hash of a medium's content, and the source to decode it from."""
        source, version = read_ref(ref), _version(ref)
        content = self._contents.get(version) if isinstance(source, str) else None
        if content is None:
            content = _hashed(ref, source)
            _still(ref, source)
            self._contents.put(version, content)
        return content, source


def _version(ref: MediaRef) -> tuple[str, str, str]:
    return ref.path, ref.stamp, ref.cell


def _still(ref: MediaRef, source: Source) -> None:
    """Raises StaleTicket if the file is no longer the version that `ref` names. Bytes in memory can't change."""
    if isinstance(source, str):
        check_ref(ref)


def _hashed(ref: MediaRef, source: Source) -> bytes:
    """Returns the xxh3-128 hash of the content. Raises MediaError if the content can't be read."""
    if isinstance(source, bytes):
        return xxhash.xxh3_128_digest(source)
    try:
        with opened(source) as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).digest()
    except OSError as error:
        raise MediaError(ref.name, f"cannot be read: {error.strerror}") from error


def _runs(numbers: Iterable[int]) -> Iterator[range]:
    for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        yield range(run[0], run[-1] + 1)
