"""Followers that speak the wire and compute nothing, many in one process: run by `hosts_scripted.py`. Standard library
only.

    python benchmarks/hosts_follower.py '{"port": 1234, "secret": "...", "followers": 511}'

Each follower calls process 0, greets it like a process of a run, reads its messages, and answers every order with the
last line of standard input, which is in hexadecimal digits.
"""

from __future__ import annotations

import itertools
import json
import selectors
import socket
import sys
import time
from typing import Any

BEAT = 3.0  # seconds between two heartbeats
_BUFFER = memoryview(bytearray(1 << 16))


class Follower:
    """One connection to process 0."""

    def __init__(self, process: int, settings: dict[str, Any]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", settings["port"]))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.write({"process": str(process), "secret": settings["secret"]})
        self._line = b""
        self._missing = 0  # bytes of the present order that have not arrived

    def write(self, message: dict[str, str], data: bytes = b"") -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n" + data)

    def read(self, answer: bytes) -> bool:
        """Reads the bytes that have arrived; answers an order that is complete. False at the connection's end."""
        count = self.socket.recv_into(_BUFFER)
        if not count:
            return False
        if count < self._missing:  # nearly always: skips the bytes unread
            self._missing -= count
            return True
        piece = bytes(_BUFFER[:count])
        while piece:
            if self._missing:
                taken = min(len(piece), self._missing)
                self._missing, piece = self._missing - taken, piece[taken:]
                if not self._missing:
                    self.write({"kind": "data", "bytes": str(len(answer))}, answer)
                continue
            head, newline, piece = piece.partition(b"\n")
            self._line += head
            if newline:
                self._missing, self._line = int(json.loads(self._line).get("bytes", 0)), b""
        return True


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
                answer = bytes.fromhex(line)
                print("ready", flush=True)
            elif not key.data.read(answer):
                return
        while time.monotonic() > beat:  # spread over time, like independent processes
            next(turns).write({"kind": "alive"})
            beat += BEAT / len(followers)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
