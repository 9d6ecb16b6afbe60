"""Messages between a run and its worker process, with arrays of pixels.

Messages are msgpack on a socket. A small array follows its message on the socket. A large array is copied once into a
nameless file in memory, which the other process maps. No file remains if a process is killed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np

HEADER = struct.Struct(">QQ")  # bytes of the message, and of the array that follows on the socket
MAPPED_FROM = 4 << 20  # bytes; smaller arrays use the socket, because a process may have only 65,530 mappings


class WithArrays(NamedTuple):
    """A result of msgpack's types, and arrays (uint8) that follow the result, each in its own message."""

    result: Any
    arrays: Sequence[np.ndarray]


class Channel:
    """One end of the channel. Methods raise EOFError if the other process has ended, TimeoutError if it is too slow."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def send(
        self, message: Mapping[str, Any], array: np.ndarray | None = None, *, seconds: float | None = None
    ) -> None:
        """Sends a message and an optional array (uint8). The caller may change the array afterwards."""
        self.socket.settimeout(seconds)
        memory = None
        if array is not None:
            message = {**message, "shape": array.shape}
            memory = _written(array) if array.nbytes >= MAPPED_FROM else None
        words = msgpack.packb(message, unicode_errors="surrogateescape")
        assert words is not None
        inline = array.nbytes if array is not None and memory is None else 0
        try:
            head, descriptors = HEADER.pack(len(words), inline), [] if memory is None else [memory]
            socket.send_fds(self.socket, [head], descriptors)
            self.socket.sendall(words)
            if inline and array is not None:
                self.socket.sendall(np.ascontiguousarray(array).data.cast("B"))
        except ConnectionError:
            raise EOFError from None
        finally:
            if memory is not None:
                os.close(memory)

    def receive(self, seconds: float | None = None) -> tuple[dict[str, Any], np.ndarray | None]:
        """Returns the next message, and its array, if any. The array may be read-only."""
        end = None if seconds is None else time.monotonic() + seconds
        self._wait(end)
        try:
            head, descriptors, _, _ = socket.recv_fds(self.socket, HEADER.size, 1)
        except ConnectionError:
            raise EOFError from None
        with contextlib.ExitStack() as files:
            for descriptor in descriptors:
                files.callback(os.close, descriptor)
            head += self._exactly(HEADER.size - len(head), end)
            size, inline = HEADER.unpack(head)
            message = msgpack.unpackb(self._exactly(size, end), unicode_errors="surrogateescape")
            shape = message.get("shape")
            if shape is None:
                return message, None
            values = _mapped(descriptors[0]) if descriptors else np.frombuffer(self._exactly(inline, end), np.uint8)
            return message, values.reshape(shape)

    def has_message(self, seconds: float) -> bool:
        """Waits up to `seconds` for the begin of a message, or for the end of the other process."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def close(self) -> None:
        self.socket.close()

    def _exactly(self, size: int, end: float | None) -> bytearray:
        content = bytearray(size)
        rest = memoryview(content)
        while rest:
            self._wait(end)
            try:
                count = self.socket.recv_into(rest)
            except ConnectionError:
                count = 0
            if not count:
                raise EOFError
            rest = rest[count:]
        return content

    def _wait(self, end: float | None) -> None:
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        self.socket.settimeout(left)


def _written(array: np.ndarray) -> int | None:
    try:
        memory = _nameless()
    except OSError:
        return None
    try:
        rest = np.ascontiguousarray(array).data.cast("B")
        while rest:
            rest = rest[os.write(memory, rest) :]
    except OSError:
        os.close(memory)
        return None
    return memory


def _nameless() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fluxjax-media")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _mapped(descriptor: int) -> np.ndarray:
    size = os.fstat(descriptor).st_size
    try:
        return np.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), np.uint8)
    except OSError:
        return np.frombuffer(os.pread(descriptor, size, 0), np.uint8)
