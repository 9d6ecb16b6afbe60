"""References of media, made without reading pixels, and the bytes that they refer to: files, parquet cells, URLs."""

from __future__ import annotations

import functools

from models.processing import MediaError
from models.processing.media_file import MediaUnavailable, Source

from ..base.medium import Media
from .locations import is_url, local, read, version_of, why
from .tickets import MediaRef, StaleTicket


def ref_of(media: Media) -> MediaRef:
    """The reference of a medium, in the version that its file has now. Raises MediaError for a file that is missing,
    and for a medium that is in no file."""
    if media.data is not None:
        raise MediaError(media.name, "is in no file")
    path = local(media.path)
    return MediaRef(media.kind.value, path, media.stamp or current_stamp(path), media.cell)


def current_stamp(path: str) -> str:
    """The version that a file or URL has now. Raises MediaError where that can't be told."""
    try:
        return version_of(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def check_ref(ref: MediaRef) -> None:
    """Raises StaleTicket where the file is not the one that was referred to, MediaError where it is missing.

    Whoever decodes a local file checks its reference again afterwards: the file may have changed meanwhile.
    """
    if (now := current_stamp(ref.path)) != ref.stamp:
        raise StaleTicket(ref.name, f"has changed (it is version {now}, not {ref.stamp})")


def read_ref(ref: MediaRef) -> Source:
    """Returns the input of decoders: the path of a local file, or the bytes of a parquet cell or of a URL. Blocks.

    Raises StaleTicket where the file is not the one that was referred to, MediaError where it can't be read.
    """
    if ref.cell:
        return _read_cell(ref)
    if not is_url(ref.path):
        check_ref(ref)
        return ref.path
    try:
        data = read(ref.path)
    except OSError as error:
        raise _unreadable(ref.name, error) from error
    check_ref(ref)  # after reading: what was read can be no older than that
    return data


def source_of(media: Media) -> Source:
    """Returns the input of decoders, as `read_ref` does, for a medium that has no reference yet. Blocks. Raises
    MediaError."""
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
