"""The sources of a run's pixels, as users see them: a step's numbers, a few words, a row for each preprocessor."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ..base.preprocessor_status import PreprocessorStatus
    from ..data.local_store import StoreStats
    from ..data.materializer import Materialized


T = TypeVar("T")


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
            "data/spilled_mb": stats.spilled_bytes / 1e6,
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


class StatusTable(Generic[T]):
    """A row for each of `statuses`, as it is whenever the terminal is drawn; nothing where there are none."""

    def __init__(self, columns: str, statuses: Callable[[], Sequence[T]], row: Callable[[T], Sequence[str]]) -> None:
        """`row` returns a cell for each of the columns, and a last one for words that may be cut."""
        self._columns, self._statuses, self._row = columns.split(), statuses, row

    def __rich__(self) -> Table | Group:
        statuses = self._statuses()
        if not statuses:
            return Group()
        table = Table(box=None, pad_edge=False, header_style="dim")
        for k, column in enumerate(self._columns):
            table.add_column(column, justify="right" if k else "left", no_wrap=True)
        table.add_column()  # the one that gives way where a terminal is narrow
        for status in statuses:
            *cells, words = self._row(status)
            table.add_row(*cells, Text(words, no_wrap=True, overflow="ellipsis"))
        return table


def preprocessor_table(preprocessors: Callable[[], Sequence[PreprocessorStatus]]) -> StatusTable[PreprocessorStatus]:
    def row(place: PreprocessorStatus) -> list[str]:
        sizes = _size(place.bytes), _size(place.memory_bytes + place.spilled_bytes)
        state = state_words(place.up, place.lost, place.reason)
        return [place.name, f"{place.queued:,}", f"{place.decoded:,}", *sizes, str(place.lost), state]

    return StatusTable("preprocessor queued decoded gave keeps restarts", preprocessors, row)


def _size(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def state_words(up: bool, lost: int, reason: str) -> str:
    if up:
        return "up"
    return "lost: " + "".join(reason.strip().splitlines()[:1]) if lost else "starting"
