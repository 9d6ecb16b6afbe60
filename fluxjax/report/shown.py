"""The views of processes, servers, preprocessors, pixels and rewards that users get: metrics of a step, a few words, a
line or a row of a table for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..base.host_status import HostStatus
from ..base.timeline import Span

if TYPE_CHECKING:
    from rollout.fleet_server import ServerStatus

    from ..base.preprocessor_status import PreprocessorStatus
    from ..data.local_store import StoreStats
    from ..data.materializer import Materialized

T = TypeVar("T")

_NAMES = ("process", "host", "server", "preprocessor")  # columns on the left of which their texts stand
MOST = 16  # processes that have a line; of more, the slowest are shown
_BUSY = "rewards/busy/"
_NOTABLE = 0.5  # share of the places of a kind from which it is named


def tag(phase: str, name: str) -> str:
    """Returns the name of a metric where phases are not apart."""
    return name if phase == "rl" else f"{phase}/{name}"


# --- pixels and rewards ---------------------------------------------------------------------------


class DataMetrics:
    """Computes a step's metrics of pixels: bytes and seconds of fetches, decoding, caches, preprocessors."""

    def __init__(self) -> None:
        self._known = time.perf_counter()  # when the stats were those of the last step
        self._rate = 0.0  # of frames
        self._moved: Materialized | None = None  # at the last step
        self._stats: StoreStats | None = None
        self._bytes: dict[str, int] = {}  # by preprocessor

    def since_last(
        self, moved: Materialized, stats: StoreStats, known: float, preprocessors: Sequence[PreprocessorStatus]
    ) -> dict[str, float]:
        """Returns the metrics since the last step, by their names in `metrics.jsonl`. `moved` and `stats` are totals
        since the run was started; `known` is when `stats` were as given, by `time.perf_counter`: the rate of frames
        stays until newer stats are known."""
        moved_before, stats_before = self._moved or type(moved)(), self._stats or type(stats)()
        self._moved, self._stats = moved, stats
        size, fetching = moved.bytes - moved_before.bytes, moved.fetching - moved_before.fetching
        frames = stats.decoded_frames - stats_before.decoded_frames
        if known > self._known:
            self._rate, self._known = frames / (known - self._known), known
        hits, misses = stats.hits - stats_before.hits, stats.misses - stats_before.misses
        metrics = {
            "data/waited": moved.waited - moved_before.waited,
            "data/fetched_mb": size / 1e6,
            "data/fetch_mb_per_second": size / 1e6 / fetching if fetching else 0.0,
            "data/decoded_media": float(stats.decoded_media - stats_before.decoded_media),
            "data/decoded_frames_per_second": self._rate,
            "data/queue": float(stats.queue_depth),
            "data/memory_mb": stats.memory_bytes / 1e6,
        }
        if hits + misses:  # else there is no share
            metrics["data/cache_hits"] = hits / (hits + misses)
        return metrics | self._by_preprocessor(preprocessors)

    def _by_preprocessor(self, preprocessors: Sequence[PreprocessorStatus]) -> dict[str, float]:
        if not preprocessors:
            return {}
        before, self._bytes = self._bytes, {place.name: place.bytes for place in preprocessors}
        handed_out = {
            f"data/mb_from/{name}": (size - before.get(name, 0)) / 1e6 for name, size in sorted(self._bytes.items())
        }
        return {
            "data/preprocessors_up": float(sum(place.up for place in preprocessors)),
            "data/preprocessors_lost": float(sum(place.lost for place in preprocessors)),
        } | handed_out


def data_words(metrics: Mapping[str, float]) -> str:
    """The numbers of a step in a few words; empty where they say nothing."""
    waited, frames = metrics.get("data/waited", 0.0), metrics.get("data/decoded_frames_per_second", 0.0)
    size = metrics.get("data/fetched_mb", 0.0)
    words = [f"waits {waited:.2f} s"] if size or waited else []
    words += [f"decodes {frames:,.0f} frames/s"] if frames >= 0.5 else []
    words += [f"fetches {size:,.0f} MB" if size >= 10 else f"fetches {size:.1f} MB"] if size else []
    return ", ".join(words)


def reward_words(metrics: Mapping[str, float]) -> str:
    """Says how long rewards take, what they wait for and how many failed; empty where only built-in rules score."""
    words = []
    if "rewards/seconds_median" in metrics:
        words.append(f"{metrics['rewards/seconds_median']:.2g} s, 95 % {metrics['rewards/seconds_p95']:.2g} s")
    if waiting := metrics.get("rewards/waiting", 0.0):
        words.append(f"{waiting:.0f} waited")
    busy = {name.removeprefix(_BUSY): share for name, share in metrics.items() if name.startswith(_BUSY)}
    words += [f"{kind} {share:.0%} busy" for kind, share in busy.items() if share >= _NOTABLE]
    if failed := metrics.get("rewards/failed", 0.0):
        words.append(f"{failed:.0f} failed")
    return ", ".join(words)


# --- tables ---------------------------------------------------------------------------------------


class StatusTable(Generic[T]):
    """Rows about `statuses`, as they are whenever the terminal is drawn; nothing where there are none."""

    def __init__(
        self,
        columns: Sequence[str],
        statuses: Callable[[], Sequence[T]],
        rows: Callable[[Sequence[T]], Iterable[Sequence[str]]],
    ) -> None:
        """`rows` returns for each row a cell for each of the columns, and a last one for words that may be cut."""
        self._columns, self._statuses, self._rows = columns, statuses, rows

    def __rich__(self) -> Table | Group:
        statuses = self._statuses()
        if not statuses:
            return Group()
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in self._columns:
            table.add_column(column, justify="left" if column in _NAMES else "right", no_wrap=True)
        table.add_column()  # the one that gives way where a terminal is narrow
        for *cells, words in self._rows(statuses):
            table.add_row(*cells, Text(words, no_wrap=True, overflow="ellipsis"))
        return table


def preprocessor_table(preprocessors: Callable[[], Sequence[PreprocessorStatus]]) -> StatusTable[PreprocessorStatus]:
    def row(place: PreprocessorStatus) -> list[str]:
        sizes = _size(place.bytes), _size(place.memory_bytes)
        state = _state_words(place.up, place.lost, place.reason)
        return [place.name, f"{place.queued:,}", f"{place.decoded:,}", *sizes, str(place.lost), state]

    columns = "preprocessor", "queued", "decoded", "gave", "keeps", "restarts"
    return StatusTable(columns, preprocessors, lambda places: map(row, places))


def _size(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _state_words(up: bool, lost: int, reason: str) -> str:
    if up:
        return "up"
    return "lost: " + "".join(reason.strip().splitlines()[:1]) if lost else "starting"


def server_table(servers: Callable[[], Sequence[ServerStatus]]) -> StatusTable[ServerStatus]:
    def row(server: ServerStatus) -> list[str]:
        version = "-" if server.version < 0 else str(server.version)
        numbers = [str(server.running), str(server.waiting), f"{server.tokens_per_second:,.0f}", str(server.restarts)]
        asleep = server.up and server.asleep
        state = "asleep" if asleep else _state_words(server.up, server.restarts, server.reason)
        return [server.name, version, *numbers, state]

    columns = "server", "version", "running", "queued", "tok/s", "restarts"
    return StatusTable(columns, servers, lambda statuses: map(row, statuses))


# --- processes ------------------------------------------------------------------------------------


def slowest(hosts: Sequence[HostStatus]) -> HostStatus:
    """The process that the other processes wait for: see `HostStatus.own_seconds`."""
    return max(hosts, key=lambda host: host.own_seconds)


def host_lines(hosts: Sequence[HostStatus]) -> list[str]:
    """A line for each process, to be printed."""
    lines = []
    for host in _shown(hosts):
        numbers = " | ".join(f"{name} {text}" for name, text in _numbers(host).items())
        mark = _mark(host, hosts)
        lines.append(f"process {host.process} ({host.host}) | {numbers}{f' | {mark}' if mark else ''}")
    return lines + _others(hosts)


def host_table(hosts: Callable[[], Sequence[HostStatus]]) -> StatusTable[HostStatus]:
    def rows(statuses: Sequence[HostStatus]) -> list[list[str]]:
        shown = [
            [str(host.process), host.host, *_numbers(host).values(), _mark(host, statuses)] for host in _shown(statuses)
        ]
        return [*shown, *(["", line, *[""] * 7] for line in _others(statuses))]

    columns = "process", "host", "devices", "memory", "on device", "prepares", "trains", "waits"
    return StatusTable(columns, hosts, rows)


def host_lanes(hosts: Sequence[HostStatus], step: int) -> list[Span]:
    """The stages of the last step as bars of the Gantt picture, a lane for each process; a process that has not told of
    that step yet has none."""
    return [
        Span(stage.name, f"process {host.process}", stage.start, stage.end, step)
        for host in hosts
        if host.step == hosts[0].step
        for stage in host.stages
    ]


def host_metrics(hosts: Sequence[HostStatus]) -> dict[str, float]:
    """Returns a step's metrics of all processes together; none where the run has one process."""
    if not hosts:
        return {}
    return {
        "hosts/processes": float(len(hosts)),
        "hosts/slowest": float(slowest(hosts).process),
        "hosts/own_seconds_max": max(host.own_seconds for host in hosts),
        "hosts/own_seconds_mean": sum(host.own_seconds for host in hosts) / len(hosts),
        "hosts/memory_bytes_max": float(max(host.memory for host in hosts)),
    }


def host_records(hosts: Sequence[HostStatus]) -> list[dict[str, Any]]:
    """Returns the records of the processes in `metrics.jsonl`, under `hosts`."""
    return [
        {
            "process": host.process,
            "host": host.host,
            "devices": host.devices,
            "memory_bytes": host.memory,
            "device_memory_bytes": host.device_memory,
            "prepare_seconds": round(host.prepared, 6),
            "train_seconds": round(host.trained, 6),
            "wait_seconds": round(host.waited, 6),
            "own_seconds": round(host.own_seconds, 6),
        }
        for host in hosts
    ]


def _shown(hosts: Sequence[HostStatus]) -> list[HostStatus]:
    chosen = sorted(hosts, key=lambda host: -host.own_seconds)[:MOST]
    return sorted(chosen, key=lambda host: host.process)


def _others(hosts: Sequence[HostStatus]) -> list[str]:
    return [f"and {len(hosts) - MOST} faster ones"] if len(hosts) > MOST else []


def _numbers(host: HostStatus) -> dict[str, str]:
    return {
        "devices": str(host.devices),
        "memory": f"{host.memory / 1e9:.1f} GB",
        "on device": f"{host.device_memory / 1e9:.1f} GB" if host.device_memory else "-",
        "prepares": f"{host.prepared:.2f} s",
        "trains": f"{host.trained:.2f} s",
        "waits": f"{host.waited:.2f} s",
    }


def _mark(host: HostStatus, hosts: Sequence[HostStatus]) -> str:
    return "slowest" if len(hosts) > 1 and host is slowest(hosts) else ""
