"""Sources of media, the facts of images and videos, and the errors of media and prompts that cannot be used."""

import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator

from ..config import Grid

Source = str | bytes  # a local path, or an encoded file's content
OpenFile = io.BytesIO | io.BufferedReader


class MediaError(ValueError):
    """A media file cannot be used. The message names the file and says why."""

    def __init__(self, path: str, reason: str) -> None:
        name = path if len(path) < 1000 else f"{path[:60]}... ({len(path)} characters)"  # data URLs are long
        super().__init__(f"{name}: {reason}".encode(errors="backslashreplace").decode())  # always printable
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.path, self.reason)  # lets a worker process send the error back


class MediaUnavailable(MediaError):
    """A media file can't be read now but perhaps later, since it is missing, or its disk or host fails."""


class PromptError(ValueError):
    """A prompt cannot be used: its text and media do not fit together, or the model can't read it. `reason` is a short
    name of the kind of problem, for counting."""

    def __init__(self, message: str, reason: str = "marks and media disagree") -> None:
        super().__init__(message)
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts of an image or a video."""

    width: int  # of the upright picture, in pixels
    height: int
    frames: int = 1
    seconds: float | None = None  # None: nothing tells how long the video lasts
    counted: bool = True  # False: `frames` and `seconds` are from a header


@dataclasses.dataclass(frozen=True)
class Medium:
    """An image or a video as the model sees it."""

    kind: str  # "image" or "video"
    grid: Grid
    seconds_per_grid: float = 0.0  # seconds that a frame pair of a video spans
    # True if decoding has shown that packets tell the time of each frame; equality of media ignores `seekable`.
    seekable: bool = dataclasses.field(default=False, compare=False)
    times: tuple[float, ...] = ()  # times of a video's frame pairs in seconds, in a timed layout (`PatchLayout.timed`)

    @property
    def blocks(self) -> list[Grid]:
        """The grids of the parts that have a placeholder each: frame pairs that have times, or the complete medium."""
        _, rows, columns = self.grid
        return [(1, rows, columns)] * len(self.times) or [self.grid]


def source_name(source: Source) -> str:
    """The name of a source in messages."""
    return source if isinstance(source, str) else f"<{len(source)} bytes>"


@contextlib.contextmanager
def opened(source: Source) -> Iterator[OpenFile]:
    """The source as a file that is open for reading. Raises MediaError if there is nothing to read."""
    name = source_name(source)
    if isinstance(source, bytes):
        if not source:
            raise MediaError(name, "the data is empty")
        yield io.BytesIO(source)
        return
    if not os.path.isfile(source):
        raise MediaUnavailable(name, "is not a file" if os.path.exists(source) else "no such file")
    try:
        # A file that is opened by its descriptor has no name, so that no decoder can judge it by the name's ending.
        file = os.fdopen(os.open(source, os.O_RDONLY), "rb")
    except OSError as error:
        raise MediaUnavailable(name, f"cannot be read: {error.strerror}") from error
    with file:
        if os.fstat(file.fileno()).st_size == 0:
            raise MediaError(name, "the file is empty")
        yield file
