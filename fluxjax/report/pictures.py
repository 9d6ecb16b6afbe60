"""The two pictures of a run: how it learned, and where the time of its last steps went."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..base.timeline import Span

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
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

    `records` are those of `metrics.jsonl`; `controls` gives `{"blind": {source: accuracy}, "chance": {...}}`.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    training = [r for r in records if r["phase"] == "rl"]
    held_out = [r for r in records if r["phase"] == "eval"]
    sources = sorted({k.removeprefix("accuracy/") for r in held_out for k in r if k.startswith("accuracy/")})
    for source, colour in zip(sources, _COLOURS * len(sources), strict=False):
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
    """The spans of complete steps. Evaluations, which dwarf steps, are left out."""
    last = max((span.end for span in spans if span.name == "sync"), default=0.0)
    return [span for span in spans if span.name != "eval" and span.start < last]


def timeline(spans: Sequence[Span], file: pathlib.Path) -> None:
    """Draws the spans as a Gantt chart: a row for each lane, seconds since the first start, and a line at each step."""
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
