"""Watches the rollout servers of a run: tells users when a server comes up, is lost or leaves, and keeps the times when
servers were down. Servers join and leave the running job by a file in the run's folder, with a line each."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from rollout.engine import EngineError
from rollout.fleet import Fleet
from rollout.fleet_server import ServerStatus

from ..base.errors import ConfigError
from ..base.timeline import Span, Timeline
from ..config.servers import check_address

HEADER = """\
# Rollout servers that others started, one on a line: the server's address and, for weights.route=orbax, the address of
# the agent on its host, if there is one. While the run goes on, a server joins when its line is added, and leaves when
# its line is removed. Servers that the run started itself are not listed.
"""
_LOOK_SECONDS = 0.25
_REASON_CHARACTERS = 300


@dataclasses.dataclass
class _SeenServer:
    since: float  # when it was lost, or first seen
    up: bool = False
    was_up: bool = False  # whether it was ever up
    restarts: int = 0
    told: str = ""  # the last reason of this loss that users were told


class ServerWatch:
    """Looks at servers in a thread of its own, from `start` to `stop`. `members`, called before each look, makes
    servers join and leave, and returns a line for each failure. Times are on the clock of the timeline."""

    def __init__(
        self, servers: Callable[[], Sequence[ServerStatus]], members: Callable[[], Sequence[str]] = tuple
    ) -> None:
        self._servers, self._members = servers, members
        self._known: dict[str, _SeenServer] = {}
        self._down: collections.deque[Span] = collections.deque(maxlen=1024)
        self._lock = threading.Lock()  # guards `_known` and `_down`
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, tell: Callable[[str], None]) -> None:
        """Starts the thread, which calls `tell` with each line. Later calls do nothing: the first `tell` stays."""
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
            for line in (*complaints, *self.hear(self._servers(), time.perf_counter())):
                tell(line)
            self._stopping.wait(_LOOK_SECONDS)

    def hear(self, servers: Sequence[ServerStatus], now: float) -> list[str]:
        """Returns a line for each event since the last look: a server is up, is lost, is back or has left."""
        lines: list[str] = []
        with self._lock:
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
        if server.restarts > known.restarts:  # before that, `reason` is the reason of an earlier loss
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
        """Returns the spans in which servers were down: `start` before a server was first up, `restart` after that."""
        with self._lock:
            still = [_down(name, known, now) for name, known in self._known.items() if not known.up]
            return [*self._down, *still]


def _down(name: str, known: _SeenServer, now: float) -> Span:
    return Span("restart" if known.was_up else "start", name, known.since, now, 0)


def first_line(reason: str) -> str:
    """Returns the first line of a reason. If it ends with a colon, as before a log, the reason's last line follows."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["no reason is known"]
    text = f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return text if len(text) <= _REASON_CHARACTERS else f"{text[:_REASON_CHARACTERS]}..."


def server_lanes(
    spans: Sequence[Span], busy: Mapping[str, Sequence[tuple[float, float]]], down: Sequence[Span]
) -> list[Span]:
    """Returns the spans with a lane for each server instead of each engine, since a request may move between servers.
    `busy` has the times when each server ran samples; times within the span of a rollout belong to the span's step."""
    if not spans:
        return []
    lanes = Timeline(keep_steps=len(spans))  # joins spans that overlap
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


class ServerFile:
    """Writes `agents` (servers' addresses, each with its agent's or "") to `file`. Makes servers join and leave as the
    file changes, and keeps `agents` up to date. `reachable` raises ConfigError if weights can't reach an address."""

    def __init__(
        self, file: pathlib.Path, fleet: Fleet, agents: MutableMapping[str, str], reachable: Callable[[str], None]
    ) -> None:
        self.file, self._fleet, self._agents, self._reachable = file, fleet, agents, reachable
        self._done = HEADER + "".join(f"{' '.join(filter(None, pair))}\n" for pair in agents.items())
        self._seen = self._done

    def write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(self._done)

    def look(self) -> list[str]:
        """Carries out the file's changes once two looks have read the same text. Returns a line for each failure. A
        file that can't be read changes nothing, and no server leaves while a line can't be read."""
        try:
            text = self.file.read_text()
        except (OSError, UnicodeDecodeError):
            return []
        settled, self._seen = text == self._seen, text
        if not settled or text == self._done:
            return []
        self._done = text
        wanted, complaints = self._read(text)
        names = {server.address: server.name for server in self._fleet.servers()}
        for address in () if complaints else self._agents.keys() - wanted.keys():
            del self._agents[address]
            try:
                self._fleet.leave(names[address])
            except (EngineError, KeyError) as error:
                complaints.append(f"{self.file}: {address} can't leave: {error}")
        for address, agent in wanted.items():
            joins = address not in self._agents
            self._agents[address] = agent
            if joins:
                try:
                    self._fleet.join(address)
                except EngineError as error:
                    complaints.append(f"{self.file}: {address} can't join: {error}")
        return complaints

    def _read(self, text: str) -> tuple[Mapping[str, str], list[str]]:
        wanted: dict[str, str] = {}
        complaints: list[str] = []
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            try:
                for word in words[:2]:
                    check_address(word, f"{self.file}, line {number}")
                if len(words) > 2:
                    raise ConfigError(
                        f"{self.file}, line {number} has {words[2]!r} after the addresses of a server and its agent; "
                        "remove it"
                    )
                self._reachable(words[0])
            except ConfigError as error:
                complaints.append(f"{error}; no server leaves the run until this line is mended")
                continue
            wanted[words[0].rstrip("/")] = words[1] if len(words) == 2 else ""
        return wanted, complaints
