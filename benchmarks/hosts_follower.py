"""Followers that speak the wire and compute nothing, many in one process: run by `hosts_scripted.py`. Standard library
only.

    python benchmarks/hosts_follower.py '{"port": 1234, "secret": "...", "followers": 511}'

Each calls process 0, greets it as a process of the run does, reads what it is told, and answers every order with what
standard input gave last, in hexadecimal digits.
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
_BUFFER = memoryview(bytearray(1 << 16))


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
        """Takes what has come; answers an order that is complete. False at the end."""
        count = self.socket.recv_into(_BUFFER)
        if not count:
            return False
        if count < self._missing:  # nearly always: not a byte is looked at
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
        while time.monotonic() > beat:  # one after the other, as processes that know nothing of each other
            next(turns).write({"kind": "alive"})
            beat += BEAT / len(followers)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
