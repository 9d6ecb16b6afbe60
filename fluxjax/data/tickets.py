"""References of media in files, and tickets that stand for decoded media.

A ticket names the patches of one medium in one version of its file, decoded with given settings. These patches never
change, so any store can serve any ticket. If a file changes, a store refuses its old tickets with StaleTicket.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from models.processing import MediaError
from models.processing.media_file import MediaUnavailable, Medium, Source
from models.shadow import Rows, ShadowTensor

from ..base.medium import Media
from .locations import is_url, local, read, version_of, why

if TYPE_CHECKING:
    from models.processing.media import MediaSettings


class StaleTicket(MediaError):
    """The file is not in the version that a ticket or a reference names."""


@dataclasses.dataclass(frozen=True)
class MediaRef:
    """An image or a video file by reference. `path` is a local file, or any URL that fsspec opens. In a parquet file,
    `cell` names one medium, as `COLUMN/ROW/INDEX`. `stamp` is the version of the file."""

    kind: str  # "image" or "video"
    path: str
    stamp: str
    cell: str = ""

    @property
    def name(self) -> str:
        """The name of the medium in messages."""
        return f"{self.path}#{self.cell}" if self.cell else self.path


def ref_of(media: Media) -> MediaRef:
    """Returns the reference of a medium, with the version that the medium names, or else with the present version of
    its file. Raises MediaError if the medium is in no file, or its file is missing."""
    if media.data is not None:
        raise MediaError(media.name, "is in no file")
    path = local(media.path)
    return MediaRef(media.kind.value, path, media.stamp or current_stamp(path), media.cell)


def current_stamp(path: str) -> str:
    """Returns the present version of a file or URL. Raises MediaError if the version can't be read."""
    try:
        return version_of(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def check_ref(ref: MediaRef) -> None:
    """Raises StaleTicket if the file is not in the referenced version, MediaError if its version can't be read.
    `LocalStore` calls `check_ref` again after decoding a local file, because the file may have changed meanwhile."""
    if (now := current_stamp(ref.path)) != ref.stamp:
        raise StaleTicket(ref.name, f"has changed (it is version {now}, not {ref.stamp})")


def read_ref(ref: MediaRef) -> Source:
    """Returns what a decoder reads: the path of a local file, or the bytes of a parquet cell or of a URL. Blocks.
    Raises StaleTicket if the file is not in the referenced version, MediaError if the file can't be read."""
    if ref.cell:
        return _read_cell(ref)
    if not is_url(ref.path):
        check_ref(ref)
        return ref.path
    try:
        data = read(ref.path)
    except OSError as error:
        raise _unreadable(ref.name, error) from error
    check_ref(ref)  # after reading, because the URL may have changed meanwhile
    return data


def source_of(media: Media) -> Source:
    """Returns what a decoder reads, as `read_ref` does, for a medium without a reference. Blocks. Raises MediaError."""
    if media.data is not None:
        return media.data
    if media.cell or is_url(media.path):
        return read_ref(ref_of(media))
    return local(media.path)


@functools.cache
def _cells():
    from .cells import Cells  # pyarrow takes a third of a second to import

    return Cells()


def _read_cell(ref: MediaRef) -> bytes:
    from .cells import CellError, OtherVersion

    try:
        return _cells().read(ref.path, ref.stamp, ref.cell)
    except OtherVersion as error:
        raise StaleTicket(ref.name, str(error)) from None
    except CellError as error:
        raise MediaError(ref.name, str(error)) from None
    except OSError as error:
        raise _unreadable(ref.name, error) from error


def _unreadable(name: str, error: OSError) -> MediaError:
    missing = isinstance(error, FileNotFoundError)
    return MediaUnavailable(name, "no such file" if missing else f"cannot be read: {why(error)}")


@dataclasses.dataclass(frozen=True)
class Ticket:
    """The name of a medium's patches, `[P, X]` in the vision tower's window order. `settings` is the digest of the
    settings that decoded the file."""

    ref: MediaRef
    settings: str
    medium: Medium

    @property
    def num_patches(self) -> int:
        pairs, rows, columns = self.medium.grid
        return pairs * rows * columns

    def __str__(self) -> str:
        ref, medium = self.ref, self.medium
        seen = [*medium.grid, medium.seconds_per_grid, medium.seekable, *medium.times]
        fields = [ref.kind, ref.path, ref.stamp, ref.cell, self.settings, *seen]
        return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def parse(cls, word: str) -> Ticket:
        """Reads a ticket from the text of `str(ticket)`. Raises ValueError or TypeError for other text."""
        try:
            kind, path, stamp, cell, settings, pairs, rows, columns, seconds, seekable, *times = json.loads(word)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{word[:200]!r} is no ticket: {error}") from None
        words = (kind, path, stamp, cell, settings)
        if not all(isinstance(field, str) for field in words) or kind not in ("image", "video"):
            raise ValueError(f"{word[:200]!r} is no ticket")
        medium = Medium(kind, (pairs, rows, columns), float(seconds), bool(seekable), tuple(map(float, times)))
        return cls(MediaRef(kind, path, stamp, cell), settings, medium)

    def shadow(self, patch_values: int) -> ShadowTensor:
        """Returns a shadow tensor in the place of the patches, each of `patch_values` values."""
        return ShadowTensor.of(str(self), (self.num_patches, patch_values), np.float32)


parsed = functools.lru_cache(maxsize=4096)(Ticket.parse)


def normalised(settings: MediaSettings, rows: Sequence[Rows], fetched: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the patches `[P, X]` (float32) of each of `rows`, from its fetched patches `[P, 3, n]` (uint8)."""
    kinds = (parsed(piece.ticket).ref.kind for piece in rows)
    return [settings.normalised(kind, patches) for kind, patches in zip(kinds, fetched, strict=True)]


@runtime_checkable
class MediaStore(Protocol):
    """Turns media into pixels, in this process or in preprocessors. Its methods block. Thread-safe."""

    @property
    def concurrency(self) -> int:
        """The number of threads that keep all decoders busy by calling `look`."""
        ...

    def look(self, refs: Sequence[MediaRef]) -> list[Ticket | MediaError]:
        """Decodes these media. Returns, in the order of `refs`, the ticket of each medium, or the error of a medium
        that can't be used. Pixels stay in memory for later fetches while there is room."""
        ...

    def fetch(self, rows: Sequence[Rows]) -> list[np.ndarray]:
        """Returns the patches `[P, X]` (float32) of these rows of tickets. Raises MediaError if a medium can't be
        decoded, StaleTicket if its file has changed."""
        ...

    def close(self) -> None:
        """Ends the store's processes, threads and connections."""
        ...


@runtime_checkable
class ByteStore(Protocol):
    """A source of pixels as bytes."""

    @property
    def settings(self) -> MediaSettings: ...

    def fetch_bytes(self, rows: Sequence[Rows]) -> list[np.ndarray]:
        """Returns the patches `[P, 3, n]` (uint8) of these rows, which callers must not change. Thread-safe."""
        ...
