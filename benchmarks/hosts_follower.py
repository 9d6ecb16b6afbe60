"""Runs many followers in one process, which speak the wire protocol and compute nothing: run by `hosts_scripted.py`.
Standard library only.

    python benchmarks/hosts_follower.py '{"port": 1234, "secret": "...", "followers": 511}'

Each follower connects to process 0, greets it as a process of the run does, reads what it is told, and answers every
order with the line that standard input gave last. Followers stand for other machines, so that they take as little of
this one as they can: the kernel drops bytes that nobody looks at.
"""

from __future__ import annotations

import itertools
import json
import selectors
import socket
import sys
import time
from typing import Any

BEAT = 3.0  # seconds between two signs of life
_LINES = 1 << 12  # bytes that are read where the next message begins
_BUFFER = bytearray(1 << 20)
_DROP = socket.MSG_TRUNC if sys.platform == "linux" else 0  # there, bytes of a stream are counted, but not copied


class Follower:
    """One connection to process 0."""

    def __init__(self, process: int, settings: dict[str, Any]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", settings["port"]))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.write({"process": str(process), "secret": settings["secret"]})
        self._line = b""
        self._missing = 0  # bytes of the order that is under way

    def write(self, message: dict[str, str], data: bytes = b"") -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n" + data)

    def read(self, answer: bytes) -> bool:
        """Reads what has come, and answers an order that is complete. Returns False when the connection has ended."""
        if self._missing:  # nearly always
            count = self.socket.recv_into(_BUFFER, min(self._missing, len(_BUFFER)), _DROP)
            self._missing -= count
            if count and not self._missing:
                self._answer(answer)
            return count > 0
        piece = self.socket.recv(_LINES)
        more = bool(piece)
        while piece:
            head, newline, piece = piece.partition(b"\n")
            self._line += head
            if not newline:
                break
            size, self._line = int(json.loads(self._line).get("bytes", 0)), b""
            self._missing, piece = max(size - len(piece), 0), piece[size:]
            if size and not self._missing:
                self._answer(answer)
        return more

    def _answer(self, answer: bytes) -> None:
        self.write({"kind": "data", "bytes": str(len(answer))}, answer)


def main(settings: dict[str, Any]) -> None:
    watched = selectors.DefaultSelector()
    watched.register(sys.stdin, selectors.EVENT_READ)
    followers = [Follower(process, settings) for process in range(1, settings["followers"] + 1)]
    for follower in followers:
        watched.register(follower.socket, selectors.EVENT_READ, follower)
    turns = itertools.cycle(followers)
    answer, beat = b"", time.monotonic()
    while True:
        for key, _ in watched.select(max(beat - time.monotonic(), 0.0)):
            if key.data is None:
                line = sys.stdin.readline()
                if not line:
                    return
                answer = line.strip().encode()
                print("ready", flush=True)
            elif not key.data.read(answer):
                return
        while time.monotonic() > beat:  # one after the other, as processes that know nothing of each other
            next(turns).write({"kind": "alive"})
            beat += BEAT / len(followers)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
