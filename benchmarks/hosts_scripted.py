"""Links of process 0 to followers that compute nothing: real connections, with the greetings and threads of a run."""

from __future__ import annotations

import collections
import json
import pathlib
import secrets
import subprocess
import sys
import threading

from common import ROOT

from sharding.links.meeting import Card, connect, listen
from sharding.links.wires import LinkError, Message, Wires, widen_send_buffers


class ScriptedLinks:
    """The part of `sharding.links.Links` that a gang needs, without the other processes of `jax.distributed`."""

    def __init__(self, processes: int, timeout: float = 60.0) -> None:
        self.process, self.processes, self.name, self.rank_here = 0, processes, "process 0", 0
        self._news = threading.Condition()
        self._boxes: collections.defaultdict[int, collections.deque[bytes]] = collections.defaultdict(collections.deque)
        self._failure = ""
        with listen("127.0.0.1", processes) as door:
            port, secret = door.getsockname()[1], secrets.token_hex(16)
            settings = json.dumps({"port": port, "secret": secret, "followers": processes - 1})
            self._followers = subprocess.Popen(
                [sys.executable, str(pathlib.Path(ROOT) / "benchmarks" / "hosts_follower.py"), settings],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            card = Card("here", "127.0.0.1", port, "", secret)
            wires = connect(0, [card] * processes, door, timeout)
        widen_send_buffers()  # as `Links` does
        self._wires = Wires(wires, timeout, self._heard, self._gone)

    def answer(self, data: bytes) -> None:
        """Sets the followers' answer from now on."""
        assert self._followers.stdin is not None and self._followers.stdout is not None
        self._followers.stdin.write(data.hex() + "\n")
        self._followers.stdin.flush()
        self._followers.stdout.readline()

    def send(self, process: int, *data: bytes) -> int:
        self.check()
        size = sum(map(len, data))
        self._wires.send(process, {"kind": "data", "bytes": str(size)}, *data)
        return size

    def receive(self, process: int) -> bytes:
        with self._news:
            self._news.wait_for(lambda: self._boxes[process] or self._failure)
        self.check()
        return self._boxes[process].popleft()

    def check(self) -> None:
        if self._failure:
            raise LinkError(self._failure)

    def notify(self, process: int, topic: str) -> None:
        """Does nothing: the followers wait for no notification."""

    def counted(self, topic: str) -> int:
        return 0

    def fail(self, reason: str) -> None:
        self._failure = reason

    def close(self) -> None:
        self._wires.close()
        self._followers.kill()
        self._followers.wait()

    def _heard(self, process: int, message: Message, data: bytes) -> None:
        if message["kind"] == "data":
            with self._news:
                self._boxes[process].append(data)
                self._news.notify_all()

    def _gone(self, process: int, why: str) -> None:
        with self._news:
            self._failure = f"scripted process {process}: {why}"
            self._news.notify_all()
