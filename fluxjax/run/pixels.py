"""The pixels of a process: the media store, which decodes, and the materializer, which fetches for batches."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Iterable, Sequence

from models.processing import Processor

from ..base.statuses import PreprocessorStatus
from ..base.timeline import Span
from ..batch.composer import Team
from ..config import Config
from ..data.local_store import GIB, LocalStore, StoreStats
from ..data.materializer import Materialized, Materializer, NoteFetch
from ..data.near_pixels import NearPixels
from ..data.shadows import MediaIndex, ProxyMedia
from ..hosts.orders import UNKNOWN_PLACE
from ..report.pictures import look_lanes, media_picture
from ..runtime.flight_store import FlightStore
from ..runtime.preprocessors import Preprocessors

AHEAD = 2  # microbatches whose pixels are fetched ahead


class Pixels:
    """The media store and the materializer of one process. The creation of a `Pixels` is collective, because processes
    exchange the addresses of their preprocessors."""

    def __init__(
        self, config: Config, processor: Processor, gang: Team, run_dir: pathlib.Path, token: str, note: NoteFetch
    ) -> None:
        """`token` is that of the run. Raises DataError if the preprocessors can't be started."""
        self._note, self._metrics = note, DataMetrics()
        self._began: float | None = None  # time of the run's first request of prompts
        self._first_batch: float | None = None  # seconds from `begin` to the end of the first fetch
        self._open = contextlib.ExitStack()
        data = config.data
        self.store: FlightStore | LocalStore
        if data.preprocessors:
            self.store = self._preprocessed(config, processor, gang, run_dir, token)
        else:
            store = LocalStore(processor.settings, data, workers=data.workers)
            self.store = self._open.enter_context(contextlib.closing(store))
        near, self.fetch = None, self.store.fetch
        if isinstance(self.store, FlightStore) and data.near_gib:
            near = NearPixels(self.store, int(data.near_gib * GIB))
            self._open.callback(near.close)
            self.fetch = near.fetch
        # The engines of all processes take the prompts of process 0 in turn.
        self.proxy = ProxyMedia(self.store, MediaIndex(), near, among=gang.processes)
        materializer = Materializer(self.fetch, AHEAD, self._fetched)
        self.materializer = self._open.enter_context(contextlib.closing(materializer))

    def _preprocessed(
        self, config: Config, processor: Processor, gang: Team, run_dir: pathlib.Path, token: str
    ) -> FlightStore:
        data = config.data
        folder = run_dir / "preprocessors"
        preprocessors = Preprocessors(
            data.preprocessors,
            # Each process finds the addresses of its preprocessors in their logs, so each process needs its own folder.
            folder if gang.alone else folder / f"process-{gang.process}",
            data,
            host="127.0.0.1" if gang.links is None else gang.links.address,
            token=token,
            prefix="" if gang.alone else f"process-{gang.process}-",
        )
        self._open.callback(preprocessors.close)
        addresses: dict[str, str] = {}
        for told in gang.exchange(preprocessors.addresses):
            addresses |= told
        store = FlightStore(addresses, processor.settings, token, silent=preprocessors.restart)
        self._open.callback(store.close)
        preprocessors.tell(store)
        return store

    def place_of(self, ticket: str) -> str:
        """Returns the preprocessor that holds the ticket's medium, or `UNKNOWN_PLACE`."""
        return self.store.holder(ticket) if isinstance(self.store, FlightStore) else UNKNOWN_PLACE

    def hear(self, media: Iterable[tuple[str, str]]) -> None:
        """Notes pairs (ticket, preprocessor that holds the ticket's medium) from process 0."""
        if isinstance(self.store, FlightStore):
            for ticket, place in media:
                if place != UNKNOWN_PLACE:
                    self.store.hint(ticket, place)

    # The methods below are called in process 0; `close` is called in every process.

    def begin(self) -> None:
        """Notes that the run begins to ask for prompts."""
        self._began = time.perf_counter()

    def begin_steps(self) -> None:
        """Starts the counts of `metrics` at zero, because earlier pixels belong to no step."""
        first, self._first_batch = self._first_batch, None
        self.metrics()
        self._first_batch = first

    def metrics(self) -> dict[str, float]:
        """Returns the metrics `data/...` of `metrics.jsonl` since the last call. Counts of preprocessors cover all
        processes, and are a few seconds old. All other counts are of this process alone."""
        known = self.store.known if isinstance(self.store, FlightStore) else time.perf_counter()
        metrics = self._metrics.since_last(self.materializer.totals, self.store.stats(), known, self.preprocessors())
        if self._first_batch is not None:
            metrics["data/first_batch"], self._first_batch = self._first_batch, None
        return metrics

    def preprocessors(self) -> list[PreprocessorStatus]:
        """Returns the last known status of every preprocessor."""
        return self.store.statuses() if isinstance(self.store, FlightStore) else []

    def lanes(self, spans: Sequence[Span]) -> list[Span]:
        """Returns a lane of the timeline picture for each preprocessor, within the time that `spans` covers."""
        if not isinstance(self.store, FlightStore):
            return []
        now = time.monotonic()
        return look_lanes(self.store.history(), spans, now, time.perf_counter() - now)

    def draw(self, file: pathlib.Path) -> None:
        """Draws which preprocessor held which medium at which time. Without preprocessors, draws nothing."""
        if isinstance(self.store, FlightStore) and (history := self.store.history()):
            media_picture(history, time.monotonic(), file)

    def _fetched(self, start: float, end: float, bytes: int) -> None:
        if self._began is not None:
            self._first_batch, self._began = end - self._began, None
        self._note(start, end, bytes)

    def close(self) -> None:
        self._open.close()


class DataMetrics:
    """Computes a step's metrics of pixels."""

    def __init__(self) -> None:
        self._known = time.perf_counter()  # `time.perf_counter` when the newest stats were read
        self._rate = 0.0  # frames decoded per second
        self._moved, self._stats = Materialized(), StoreStats()  # totals at the last call
        self._bytes: dict[str, int] = {}  # by preprocessor: bytes that it has sent

    def since_last(
        self, moved: Materialized, stats: StoreStats, known: float, preprocessors: Sequence[PreprocessorStatus]
    ) -> dict[str, float]:
        """Returns the metrics since the last call, by their names in `metrics.jsonl`. `moved` and `stats` are totals.
        `known` is the `time.perf_counter` at which `stats` were read. The rate of frames is the newest."""
        moved_before, stats_before, self._moved, self._stats = self._moved, self._stats, moved, stats
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
        if hits + misses:  # without requests, the share is undefined
            metrics["data/cache_hits"] = hits / (hits + misses)
        if preprocessors:
            before, self._bytes = self._bytes, {place.name: place.bytes for place in preprocessors}
            metrics["data/preprocessors_up"] = float(sum(place.up for place in preprocessors))
            metrics["data/preprocessors_lost"] = float(sum(place.lost for place in preprocessors))
            for name, size in sorted(self._bytes.items()):
                metrics[f"data/mb_from/{name}"] = (size - before.get(name, 0)) / 1e6
        return metrics
