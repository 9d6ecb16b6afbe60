"""Opens the bytes of a medium, from a local file or from memory. Decoders see either one as an open file only."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator

from .bad_media import MediaError

Source = str | bytes  # a local path, or an encoded file's content
OpenFile = io.BytesIO | io.BufferedReader


def source_name(source: Source) -> str:
    """The name of a source in messages."""
    return source if isinstance(source, str) else f"<{len(source)} bytes>"


@contextlib.contextmanager
def opened(source: Source) -> Iterator[OpenFile]:
    """The source as a file that is open for reading. Raises MediaError where there is nothing to read."""
    name = source_name(source)
    if isinstance(source, bytes):
        if not source:
            raise MediaError(name, "the data is empty")
        yield io.BytesIO(source)
        return
    if not os.path.isfile(source):
        raise MediaError(name, "is not a file" if os.path.exists(source) else "no such file")
    try:
        # A file that is opened by its descriptor has no name, so that no decoder can go by the name's ending.
        file = os.fdopen(os.open(source, os.O_RDONLY), "rb")
    except OSError as error:
        raise MediaError(name, f"cannot be read: {error.strerror}") from error
    with file:
        if os.fstat(file.fileno()).st_size == 0:
            raise MediaError(name, "the file is empty")
        yield file
