"""Buffers of this process's connections that hold more than one packet.

Gloo, which carries XLA's collectives between processes on CPUs, leaves the buffers for sending at Linux's default of
16 KiB. Loopback's packets have 64 KiB: one fills the buffer, and the next one waits until the peer's delayed
acknowledgement comes, 40 ms later. Where both ends send, as in an all-to-all, that is 1.6 MB/s. Gloo has no setting for
it, but its connections are this process's own.
"""

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable

_BYTES = 1 << 20
_EVERY = 0.5  # seconds between two looks: a program's first collectives open connections
_OPEN_FILES = "/proc/self/fd"  # Linux's; elsewhere nothing is changed


def widen_send_buffers() -> None:
    """Gives each TCP connection of this process a mebibyte, or what the system allows, where it has less."""
    for name in os.listdir(_OPEN_FILES) if os.path.isdir(_OPEN_FILES) else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                _widen(int(name))


def _widen(descriptor: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as ours:  # the duplicate is closed, the connection stays
        internet = ours.family in (socket.AF_INET, socket.AF_INET6) and ours.type == socket.SOCK_STREAM
        if internet and ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < _BYTES:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BYTES)


def keep_send_buffers_wide(closed: Callable[[], bool]) -> None:
    """Does so again and again, in a thread, for connections to come."""

    def watch() -> None:
        while not closed():
            widen_send_buffers()
            time.sleep(_EVERY)

    threading.Thread(target=watch, daemon=True, name="send-buffers").start()
