"""The history of media on preprocessors, from the books of `coordinator.places`, as bars for pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from ..base.timeline import Span
from ..coordinator.places import MediumStage, Transition


@dataclasses.dataclass(frozen=True)
class MediumBar:
    """A time in which a preprocessor (`place`) looked at a medium, or (`held`) had it decoded. `row` counts media in
    the order in which they were first wanted; `start` and `end` are on the clock of the history."""

    row: int
    place: str
    held: bool
    start: float
    end: float


def bars_of(history: Iterable[Transition], end: float) -> list[MediumBar]:
    """The bars of a history up to `end`, with those that are still open. A bar that began before the history is left
    out.

    A place counts as holding a medium that it has looked at until the place is lost or nobody asks for the medium any
    more: media that it has no room for it decodes again, of which the books know nothing.
    """
    rows: dict[str, int] = {}
    looks: dict[str, tuple[str, float]] = {}  # by key: the place, and since when
    holds: dict[str, tuple[str, float]] = {}
    bars: list[MediumBar] = []

    def close(begun: dict[str, tuple[str, float]], key: str, now: float) -> None:
        if (since := begun.pop(key, None)) is not None:
            bars.append(MediumBar(rows[key], since[0], begun is holds, since[1], now))

    for key, place, stage, now in history:
        if not key:
            for begun in (looks, holds) if stage is MediumStage.LOST else ():
                for lost in [medium for medium, (holder, _) in begun.items() if holder == place]:
                    close(begun, lost, now)
            continue
        rows.setdefault(key, len(rows))
        close(looks, key, now)
        if stage is MediumStage.LOOKED_AT:
            looks[key] = place, now
        elif stage is MediumStage.HELD and holds.get(key, ("",))[0] != place:
            close(holds, key, now)
            holds[key] = place, now
        elif stage in (MediumStage.RELEASED, MediumStage.UNUSABLE):
            close(holds, key, now)
    for begun in (looks, holds):
        for key in list(begun):
            close(begun, key, end)
    return sorted(bars, key=lambda bar: (bar.row, bar.start, bar.held))


def look_lanes(history: Iterable[Transition], spans: Sequence[Span], end: float, later: float) -> list[Span]:
    """Returns a lane for each place: the times in which it had media to look at, within the time of `spans`. The clock
    of `spans` is `later` seconds ahead of that of the history, which ends at `end`."""
    if not spans:
        return []
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    steps = sorted({step: min(s.start for s in spans if s.step == step) for step in {s.step for s in spans}}.items())
    busy: dict[str, list[tuple[float, float]]] = {}  # disjoint times, ascending
    looks = (bar for bar in bars_of(history, end) if not bar.held)
    for bar in sorted(looks, key=lambda bar: bar.start):
        start, stop = max(bar.start + later, first), min(bar.end + later, last)
        times = busy.setdefault(bar.place, [])
        if times and start <= times[-1][1]:
            times[-1] = times[-1][0], max(times[-1][1], stop)
        elif start < stop:
            times.append((start, stop))
    return [
        Span("decode", place, start, stop, max(step for step, begin in steps if begin <= start))
        for place, times in busy.items()
        for start, stop in times
    ]
