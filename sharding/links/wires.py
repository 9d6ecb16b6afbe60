"""One TCP connection between each two processes: messages, a heartbeat, and immediate news of a death.

A message is a line of JSON; its field `bytes` says how many bytes of data follow. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping

Message = dict[str, str]

_LINE = 1 << 16  # the most bytes of a line
MOST = 1 << 30  # the most bytes of data after a line
_PARTS = 512  # the most buffers that one `sendmsg` sends; Linux takes 1,024
_LAST_WORDS = 2.0  # seconds for which peers that read nothing may delay `tell_all`
_SEND_BUFFER = 1 << 20  # bytes
_EVERY = 0.5  # seconds between two calls of `widen_send_buffers`
_OPEN_FILES = "/proc/self/fd"  # exists on Linux only; other systems keep their send buffers


class LinkError(RuntimeError):
    """A peer is lost, has failed or does not answer. The message is one line: the process, its host, and a remedy."""


@dataclasses.dataclass
class Wire:
    """One end of a connection. `lines` reads from `socket`; a thread holds `writing` while it writes to `socket`."""

    socket: socket.socket
    lines: io.BufferedReader
    writing: threading.Lock

    @classmethod
    def on(cls, end: socket.socket) -> Wire:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(end, end.makefile("rb"), threading.Lock())

    def write(self, message: Message, *data: bytes) -> None:
        """Sends a message, then `data`, uncopied, whose total length must be the message's field `bytes`."""
        head = json.dumps(message).encode() + b"\n"
        missing = len(head) + int(message.get("bytes", 0))
        waiting: list[bytes | memoryview] = [head, *data]
        with self.writing:
            while sent := self.socket.sendmsg(waiting[:_PARTS]):
                missing -= sent
                if not missing:
                    return
                whole = 0
                while sent >= len(waiting[whole]):
                    sent -= len(waiting[whole])
                    whole += 1
                waiting[: whole + 1] = [memoryview(waiting[whole])[sent:]]

    def read(self) -> tuple[Message, bytes] | None:
        """Returns the next message and its data; None at the end. Raises ValueError for a cut or too long message."""
        line = self.lines.readline(_LINE)
        if not line:
            return None
        if not line.endswith(b"\n"):
            raise ValueError(f"a message is cut off, or has more than {_LINE} bytes")
        message = json.loads(line)
        size = int(message.get("bytes", 0))
        if not 0 <= size <= MOST:
            raise ValueError(f"{size} bytes were announced, but at most {MOST} may come")
        data = self.lines.read(size)
        if len(data) < size:
            raise ValueError(f"{len(data)} of {size} bytes came")
        return message, data

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


class Wires:
    """The wires of one process at work. The thread that listens to a peer calls `heard(process, message, data)` for
    every message, in order, and `gone(process, why)` once, after the last message. A peer that sends no byte for
    `timeout` seconds, in which a thread sends at least five heartbeats, is gone."""

    def __init__(
        self,
        wires: Mapping[int, Wire],
        timeout: float,
        heard: Callable[[int, Message, bytes], None],
        gone: Callable[[int, str], None],
    ) -> None:
        self._wires = dict(wires)
        self._timeout = timeout
        self._heard = heard
        self._gone = gone
        self._closed = threading.Event()
        for wire in self._wires.values():
            wire.socket.settimeout(timeout)
        for process in self._wires:
            threading.Thread(target=self._listen, args=(process,), name=f"link-{process}", daemon=True).start()
        threading.Thread(target=self._beat, name="link-heartbeat", daemon=True).start()

    def send(self, process: int, message: Message, *data: bytes) -> None:
        """Sends a message to a peer. Never raises: `gone` reports a lost peer, after the peer's last message."""
        try:
            self._wires[process].write(message, *data)
        except TimeoutError:  # the peer's buffers were full for the whole time-out, and the message is incomplete
            self._hang_up(self._wires[process])
        except OSError:
            pass

    def tell_all(self, message: Message) -> None:
        """Sends a message to every peer; returns after two seconds at the latest, even if a peer reads nothing."""
        threads = [threading.Thread(target=self.send, args=(peer, message), daemon=True) for peer in self._wires]
        for thread in threads:
            thread.start()
        end = time.monotonic() + _LAST_WORDS
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0.0))

    def close(self) -> None:
        """Ends sending, and listens until the peers close, too: a reset would lose messages under way."""
        self._closed.set()
        for wire in self._wires.values():
            self._hang_up(wire, socket.SHUT_WR)

    def _hang_up(self, wire: Wire, how: int = socket.SHUT_RDWR) -> None:
        with contextlib.suppress(OSError):  # the peer has closed already
            wire.socket.shutdown(how)

    def _listen(self, process: int) -> None:
        wire = self._wires[process]
        try:
            while (came := wire.read()) is not None:
                self._heard(process, *came)
            why = "its connection closed"
        except ConnectionError:  # a reset: the peer died before it had read all data
            why = "its connection closed"
        except TimeoutError:
            why = f"it has not answered for {self._timeout:g} s"
        except Exception as error:  # the peer sent something that is no message
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        self._gone(process, why)
        wire.close()

    def _beat(self) -> None:
        while not self._closed.wait(min(self._timeout / 5, 5.0)):
            for process in self._wires:
                self.send(process, {"kind": "alive"})


def widen_send_buffers() -> None:
    """Raises smaller send buffers of this process's TCP connections to a mebibyte, or to the system's maximum. Gloo
    leaves them at 16 KiB, and is slow (`docs/parallelism.md`). Its connections belong to this process."""
    for name in os.listdir(_OPEN_FILES) if os.path.isdir(_OPEN_FILES) else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as ours:  # the duplicate is closed, the connection stays
                internet = ours.family in (socket.AF_INET, socket.AF_INET6) and ours.type == socket.SOCK_STREAM
                if internet and ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < _SEND_BUFFER:
                    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)


def keep_send_buffers_wide(closed: Callable[[], bool]) -> None:
    """Calls `widen_send_buffers` in a thread, again and again until `closed()`, for connections that open later."""

    def watch() -> None:
        while not closed():
            widen_send_buffers()
            time.sleep(_EVERY)

    threading.Thread(target=watch, daemon=True, name="send-buffers").start()
