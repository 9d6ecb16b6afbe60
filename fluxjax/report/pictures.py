"""Draws a run's accuracy, the stages of its last steps, and when preprocessors measured and held media."""

import dataclasses
import pathlib
import random
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..base.statuses import MediumStage, Transition
from ..base.timeline import Span, disjoint

MOST_ROWS = 240  # media that are drawn, at most; of more media, one in two, three and so on is drawn
MOST_NAMED = 12  # preprocessors in the legend, at most
_PLACE_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf", "#7f7f7f")
_SOURCE_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
_STAGE_COLOURS = {
    "rollout": "#1f77b4",
    "reward": "#2ca02c",
    "train": "#d62728",
    "sync": "#ff7f0e",
    "data": "#9467bd",
    "media": "#9467bd",
    "materialize": "#aec7e8",
    "decode": "#98df8a",
    "plan": "#bcbd22",
    "layout": "#c49c94",
    "compile": "#393b79",
    "eval": "#7f7f7f",
    "checkpoint": "#8c564b",
    "start": "#f7b6d2",
    "restart": "#e377c2",
}


def learning_curve(
    records: Sequence[Mapping[str, Any]], controls: Mapping[str, Mapping[str, float]], file: pathlib.Path
) -> None:
    """Draws held-out accuracy (points) and smoothed training accuracy (lines) of each source against the RL step.
    `records` are the lines of `metrics.jsonl`. `controls` is `{"blind": {source: accuracy}, "chance": {source:
    accuracy}}`."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    training = [r for r in records if r["phase"] == "rl"]
    held_out = [r for r in records if r["phase"] == "eval"]
    sources = sorted({k.removeprefix("accuracy/") for r in held_out for k in r if k.startswith("accuracy/")})
    for source, colour in zip(sources, _SOURCE_COLOURS * len(sources), strict=False):
        key = f"accuracy/{source}"
        points = [(r["step"], 100 * r[key]) for r in held_out if key in r]
        line = [(r["step"], 100 * r[key]) for r in training if key in r]
        if line:
            steps, values = zip(*line, strict=True)
            axes.plot(steps, _smooth(values), color=colour, alpha=0.35, linewidth=1)
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=f"{source}, held out")
        for name, style in (("blind", "--"), ("chance", ":")):
            if source in controls.get(name, {}):
                axes.axhline(100 * controls[name][source], color=colour, linestyle=style, linewidth=0.8)
    axes.set(xlabel="RL step", ylabel="accuracy (%)", ylim=(0, 101), title="Learning by reinforcement")
    handles, _ = axes.get_legend_handles_labels()
    handles += [
        Patch(facecolor="none", label="thin: training samples"),
        Patch(facecolor="none", label="dashed: without pixels, dotted: chance"),
    ]
    axes.legend(handles=handles, fontsize=8, loc="best")
    axes.grid(alpha=0.3)
    FigureCanvasAgg(figure).print_png(str(file))


def _smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    smooth, total, norm = [], 0.0, 0.0
    for value in values:  # an exponential mean without the bias of its start
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        smooth.append(total / norm)
    return smooth


def of_steps(spans: Sequence[Span]) -> list[Span]:
    """Returns the spans of complete steps, without evaluations."""
    last = max((span.end for span in spans if span.name == "sync"), default=0.0)
    return [span for span in spans if span.name != "eval" and span.start < last]


def timeline(spans: Sequence[Span], file: pathlib.Path) -> None:
    """Draws the spans as a Gantt chart: a row for each lane, seconds since the first start, a line at each step."""
    lanes = sorted({span.lane for span in spans}, key=lambda lane: (lane.rstrip("0123456789"), len(lane), lane))
    figure = Figure(figsize=(10, max(3.2, 1.4 + 0.3 * len(lanes))), layout="constrained")
    axes = figure.add_subplot()
    if spans:
        origin = min(span.start for span in spans)
        for row, lane in enumerate(lanes):
            for name in {span.name for span in spans if span.lane == lane}:
                bars = [(s.start - origin, s.end - s.start) for s in spans if s.lane == lane and s.name == name]
                axes.broken_barh(bars, (row - 0.4, 0.8), color=_STAGE_COLOURS.get(name, "#17becf"), linewidth=0)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        for step in sorted({span.step for span in spans}):
            start = min(span.start for span in spans if span.step == step) - origin
            axes.axvline(start, color="black", linewidth=0.5, alpha=0.5)
            axes.text(start, -0.55, f" {step}", fontsize=7, va="bottom")
        names = list(dict.fromkeys(span.name for span in spans))
        handles = [Patch(color=_STAGE_COLOURS.get(name, "#17becf"), label=name) for name in names]
        axes.legend(handles=handles, fontsize=8, ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, -0.18))
    axes.set(xlabel="seconds", title="The last steps, stage by stage")
    FigureCanvasAgg(figure).print_png(str(file))


@dataclasses.dataclass(frozen=True)
class MediumBar:
    """The time in which the preprocessor `place` measured a medium, or (`held`) held the decoded medium. `row` counts
    media in the order of their first requests. `start` and `end` are seconds on the clock of the history."""

    row: int
    place: str
    held: bool
    start: float
    end: float


def bars_of(history: Iterable[Transition], end: float) -> list[MediumBar]:
    """Returns the bars of a history up to `end`. Bars that began before the history are left out. The last
    preprocessor that measured a medium counts as the medium's holder until the preprocessor is lost or the medium
    proves unusable. The history does not record dropped media."""
    rows: dict[Hashable, int] = {}
    looks: dict[Hashable, tuple[str, float]] = {}  # by medium: the preprocessor, and the start
    holds: dict[Hashable, tuple[str, float]] = {}
    bars: list[MediumBar] = []

    def close(begun: dict[Hashable, tuple[str, float]], key: Hashable, now: float) -> None:
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
        elif stage is MediumStage.UNUSABLE:
            close(holds, key, now)
    for begun in (looks, holds):
        for key in list(begun):
            close(begun, key, end)
    return sorted(bars, key=lambda bar: (bar.row, bar.start, bar.held))


def look_lanes(history: Iterable[Transition], spans: Sequence[Span], end: float, later: float) -> list[Span]:
    """Returns, in a lane for each preprocessor, the times in which the preprocessor measured media, cut to the time of
    `spans`. The clock of `spans` is `later` seconds ahead of the clock of the history, which ends at `end`."""
    if not spans:
        return []
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    steps = sorted({step: min(s.start for s in spans if s.step == step) for step in {s.step for s in spans}}.items())
    looks = [
        Span("decode", bar.place, max(bar.start + later, first), min(bar.end + later, last), 0)
        for bar in bars_of(history, end)
        if not bar.held
    ]
    busy = disjoint((look for look in looks if look.start < look.end), lambda look: look.lane)
    return [
        Span("decode", place, start, stop, max(step for step, begin in steps if begin <= start))
        for place, times in busy.items()
        for start, stop in times
    ]


def media_picture(history: Sequence[Transition], end: float, file: pathlib.Path) -> None:
    """Draws a row for each medium, in the order of first requests. The row is light while a preprocessor measures the
    medium, and dark while a preprocessor holds the medium. `history` is that of a `FlightStore`, and ends at `end`."""
    bars = bars_of(history, end)
    rows = 1 + max((bar.row for bar in bars), default=0)
    every = -(-rows // MOST_ROWS)
    # One of each `every` rows is chosen, at random: the rows at a fixed distance may all belong to one preprocessor.
    chance = random.Random(0)
    chosen = {first + chance.randrange(every) for first in range(0, rows, every)}
    places = sorted({name for _, name, _, _ in history if name}, key=lambda name: (len(name), name))
    colours = dict(zip(places, _PLACE_COLOURS * len(places), strict=False))
    origin = history[0].time if history else end
    figure = Figure(figsize=(10, 5.5), dpi=140, layout="constrained")
    axes = figure.add_subplot()
    for held in (True, False):  # measuring is drawn over holding
        drawn = [bar for bar in bars if bar.held is held and bar.row in chosen]
        tones = [tuple(part if held else 0.4 * part + 0.6 for part in to_rgb(colours[bar.place])) for bar in drawn]
        starts, widths = [bar.start - origin for bar in drawn], [bar.end - bar.start for bar in drawn]
        tops = [bar.row // every * every for bar in drawn]
        axes.barh(tops, widths, every, starts, align="edge", color=tones, edgecolor=tones, linewidth=0.4)
    lost = [(place, time - origin) for _, place, stage, time in history if stage is MediumStage.LOST]
    for place, time in lost:
        axes.axvline(time, color=colours[place], linewidth=1.2, linestyle="--")
        axes.plot(time, 0, "X", color=colours[place], markeredgecolor="black", clip_on=False, markersize=9, zorder=3)
    title = f"one in {every} of {rows:,} media" if every > 1 else f"{rows:,} media"
    axes.set_title(f"Which process held which media ({title})", pad=12)
    axes.set(xlabel="seconds", ylabel="media, in the order in which they were first needed")
    axes.set(xlim=(0, max(end - origin, 1e-3)), ylim=(rows, 0))
    handles = _legend(bars, colours, Counter(place for place, _ in lost))
    axes.legend(handles=handles, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    FigureCanvasAgg(figure).print_png(str(file))


def _legend(bars: Sequence[MediumBar], colours: Mapping[str, str], lost: Counter[str]) -> list[Patch | Line2D]:
    held = Counter(bar.place for bar in bars if bar.held)
    handles: list[Patch | Line2D] = []
    for place, colour in list(colours.items())[:MOST_NAMED]:
        losses = f", lost {lost[place]}x" if lost[place] else ""
        handles.append(Patch(color=colour, label=f"{place}: {held[place]:,} held{losses}"))
    if len(colours) > MOST_NAMED:
        handles.append(Patch(facecolor="none", label=f"and {len(colours) - MOST_NAMED} more"))
    handles.append(Patch(color="#bbbbbb", label="light: the size is being read"))
    if lost:
        handles.append(Line2D([], [], color="black", marker="X", linestyle="--", label="process lost, with its media"))
    return handles
