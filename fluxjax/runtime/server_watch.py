"""Watches the rollout servers of a run: tells users what becomes of them, and when each generated or was down."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from rollout.fleet_server import ServerStatus

from ..base.timeline import Span, Timeline

_LOOK_SECONDS = 0.25
_REASON_CHARACTERS = 300


@dataclasses.dataclass
class _SeenServer:
    """A server as it was at the last look."""

    since: float  # when it was lost, or first seen
    up: bool = False
    was_up: bool = False  # at any time
    restarts: int = 0
    told: str = ""  # the reason of this loss, as it was told last


class ServerNews:
    """Compares the servers from look to look. `now` is on the clock of the timeline."""

    def __init__(self) -> None:
        self._known: dict[str, _SeenServer] = {}
        self._down: collections.deque[Span] = collections.deque(maxlen=1024)

    def hear(self, servers: Sequence[ServerStatus], now: float) -> list[str]:
        """Returns a line for each event since the last look: a server is up, lost, back, or has left."""
        lines: list[str] = []
        for server in servers:
            lines += self._changes(server, self._known.setdefault(server.name, _SeenServer(now)), now)
        for name in sorted(self._known.keys() - {server.name for server in servers}):
            lines.append(f"{name} has left")
            del self._known[name]
        return lines

    def _changes(self, server: ServerStatus, known: _SeenServer, now: float) -> list[str]:
        lines: list[str] = []
        if known.up and (not server.up or server.restarts > known.restarts):
            known.up, known.since, known.told = False, now, ""
        if server.restarts > known.restarts:  # only then the reason is that of this loss
            known.restarts = server.restarts
            reason = first_line(server.reason)
            if reason != known.told:
                event = ("did not come back" if known.told else "is lost") if known.was_up else "did not start"
                lines.append(f"{server.name} {event}: {reason}")
            known.told = reason
        if server.up and not known.up:
            event = "is back" if known.was_up else "is up"
            weights = f" with version {server.version}" if server.version >= 0 else ""
            place = "" if known.was_up else f": {server.address}"
            lines.append(f"{server.name} {event}{weights} after {now - known.since:.1f} s{place}")
            self._down.append(_down(server.name, known, now))
            known.up = known.was_up = True
        return lines

    def down(self, now: float) -> list[Span]:
        """Returns when servers were down up to now: spans `start`, of one that was never up before, and `restart`."""
        return [*self._down, *(_down(name, known, now) for name, known in self._known.items() if not known.up)]


def _down(name: str, known: _SeenServer, now: float) -> Span:
    return Span("restart" if known.was_up else "start", name, known.since, now, 0)


def first_line(reason: str) -> str:
    """Returns the first line of a reason; where that introduces the end of a log, with the log's last line."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["no reason is known"]
    text = f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return text if len(text) <= _REASON_CHARACTERS else f"{text[:_REASON_CHARACTERS]}..."


class ServerWatch:
    """Looks at servers in a thread of its own, from `start` to `stop`, whatever the run is busy with. `members` has
    servers join and leave before each look, and returns what it can't do."""

    def __init__(
        self, servers: Callable[[], Sequence[ServerStatus]], members: Callable[[], Sequence[str]] = tuple
    ) -> None:
        self._servers, self._members = servers, members
        self._news = ServerNews()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, tell: Callable[[str], None]) -> None:
        """Begins to tell; `tell` is called from the thread. It may be called again: the first `tell` stays."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(tell,), name="server watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, tell: Callable[[str], None]) -> None:
        while not self._stopping.is_set():
            complaints = self._members()
            with self._lock:
                lines = self._news.hear(self._servers(), time.perf_counter())
            for line in (*complaints, *lines):
                tell(line)
            self._stopping.wait(_LOOK_SECONDS)

    def down(self) -> list[Span]:
        with self._lock:
            return self._news.down(time.perf_counter())


def server_lanes(
    spans: Sequence[Span], busy: Mapping[str, Sequence[tuple[float, float]]], down: Sequence[Span]
) -> list[Span]:
    """Returns the spans with a lane for each server in place of those of engines: a request may move from server to
    server, which engines do not know. `busy` says when a server ran samples: during a rollout, they are of its step.
    """
    if not spans:
        return []
    lanes = Timeline(keep_steps=len(spans))  # joins what overlaps
    for span in spans:
        if span.name != "rollout":
            lanes.add(span)
            continue
        for server, times in busy.items():
            for begin, end in times:
                start, end = max(begin, span.start), min(end, span.end)
                if start < end:
                    lanes.add(Span(span.name, server, start, end, span.step))
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    for span in down:
        start, end = max(span.start, first), min(span.end, last)
        if start < end:
            step = max(earlier.step for earlier in spans if earlier.start <= start)
            lanes.add(dataclasses.replace(span, start=start, end=end, step=step))
    return lanes.spans()
