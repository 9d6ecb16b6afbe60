"""The picture of media over time, in the colours of the preprocessors that looked at them and held them."""

import pathlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..coordinator.places import MediumStage, Transition
from .media_history import MediumBar, bars_of

MOST_ROWS = 240  # media; of more, one in two, three, ... is drawn
MOST_NAMED = 12  # places in the legend
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf", "#7f7f7f")


def media_picture(history: Sequence[Transition], end: float, file: pathlib.Path) -> None:
    """Draws a row for each medium, from the first that was wanted down to the last: light while a place looks at it,
    dark while one holds it. `history` is that of a `FlightStore` up to `end`, on its clock."""
    bars = bars_of(history, end)
    rows = 1 + max((bar.row for bar in bars), default=0)
    every = -(-rows // MOST_ROWS)
    chance = random.Random(
        0
    )  # which of some neighbours is drawn: places take turns, and a fixed one may be always theirs
    chosen = {first + chance.randrange(every) for first in range(0, rows, every)}
    places = sorted({name for _, name, _, _ in history if name}, key=lambda name: (len(name), name))
    colours = dict(zip(places, _COLOURS * len(places), strict=False))
    origin = history[0].time if history else end
    figure = Figure(figsize=(10, 5.5), dpi=140, layout="constrained")
    axes = figure.add_subplot()
    for held in (True, False):  # a look at what is held lies upon it
        drawn = [bar for bar in bars if bar.held is held and bar.row in chosen]
        tones = [colours[bar.place] if held else _light(colours[bar.place]) for bar in drawn]
        corners = _corners(drawn, every, origin)
        # Edges keep in sight what takes less time than a pixel is wide.
        axes.add_collection(PolyCollection(list(corners), facecolors=tones, edgecolors=tones, linewidths=0.4))
    lost = [(place, time - origin) for _, place, stage, time in history if stage is MediumStage.LOST]
    for place, time in lost:
        axes.axvline(time, color=colours[place], linewidth=1.2, linestyle="--")
        axes.plot(time, 0, "X", color=colours[place], markeredgecolor="black", clip_on=False, markersize=9, zorder=3)
    title = f"one in {every} of {rows:,} media" if every > 1 else f"{rows:,} media"
    axes.set_title(f"Who held what when ({title})", pad=12)
    axes.set(
        xlabel="seconds",
        ylabel="media in the order in which they were first wanted",
        xlim=(0, max(end - origin, 1e-3)),
        ylim=(rows, 0),
    )
    axes.legend(
        handles=_legend(bars, colours, Counter(place for place, _ in lost)),
        fontsize=8,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )
    FigureCanvasAgg(figure).print_png(str(file))


def _corners(bars: Sequence[MediumBar], height: int, origin: float) -> np.ndarray:
    """The rectangles of bars, as high as so many rows: their corners, `[bars, 4, 2]`."""
    sizes = np.array([(bar.start - origin, bar.end - origin, bar.row // height * height) for bar in bars]).reshape(
        -1, 3
    )
    left, right, top = sizes.T
    bottom = top + height
    return np.stack([left, top, left, bottom, right, bottom, right, top], axis=1).reshape(-1, 4, 2)


def _legend(bars: Sequence[MediumBar], colours: Mapping[str, str], lost: Counter[str]) -> list[Patch | Line2D]:
    held = Counter(bar.place for bar in bars if bar.held)
    handles: list[Patch | Line2D] = []
    for place, colour in list(colours.items())[:MOST_NAMED]:
        losses = f", lost {lost[place]}x" if lost[place] else ""
        handles.append(Patch(color=colour, label=f"{place}: {held[place]:,} held{losses}"))
    if len(colours) > MOST_NAMED:
        handles.append(Patch(facecolor="none", label=f"and {len(colours) - MOST_NAMED} more"))
    handles.append(Patch(color="#bbbbbb", label="light: being looked at"))
    if lost:
        handles.append(Line2D([], [], color="black", marker="X", linestyle="--", label="lost, with all it held"))
    return handles


def _light(colour: str) -> tuple[float, float, float]:
    red, green, blue = (0.4 * part + 0.6 for part in to_rgb(colour))
    return red, green, blue
