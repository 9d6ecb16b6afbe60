"""Shows a shard plan in a line, and as a picture: the work, tokens and traffic of each device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sharding.planner.plan import ShardPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any

# Unsharded work is pale; higher degrees are darker.
PALE, DARK = 0.12, 0.95
INK, LIMIT = "#222222", "#c0392b"


def draw(plan: ShardPlan, *, alpha: float = 1.1, tolerance: float = 0.025) -> Figure:
    """Draws three rows of bars over devices: attention and tokens, over a device's mean, and the token vectors that
    leave the device in one all-to-all, over the mean number of tokens. Bars are stacked and coloured by degree."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    degrees = np.array(plan.degrees, float)
    lengths, work = np.array(plan.lengths, float), np.array(plan.work, float)
    tokens = max(float(lengths.sum()) / plan.num_devices, 1e-12)
    compute = max(float(work.sum()) / plan.num_devices, 1e-12)
    rows = (
        ("compute\n(attention / mean)", work / degrees / compute, 1 + tolerance, f"+{tolerance:.1%}"),
        ("memory\n(tokens / mean)", lengths / degrees / tokens, alpha, f"{alpha:g}x"),
        ("all-to-all\n(sent / mean tokens)", lengths * (degrees - 1) / degrees**2 / tokens, None, ""),
    )
    kinds = sorted(set(plan.degrees))
    shades = colormaps["YlGnBu"](np.linspace(PALE, DARK, max(len(kinds), 2)))
    figure = Figure(figsize=(min(6 + plan.num_devices / 12, 16), 6.2), layout="constrained")
    axes = figure.subplots(len(rows), 1, sharex=True, height_ratios=(3, 3, 2))
    for axis, (label, share, limit, name) in zip(axes, rows, strict=True):
        base = np.zeros(plan.num_devices)
        for kind, shade in reversed(list(zip(kinds, shades, strict=False))):  # the highest degree is at the bottom
            height = plan.over_devices(np.where(degrees == kind, share, 0.0))
            axis.bar(np.arange(plan.num_devices), height, 1.0, base, color=shade, edgecolor="white", linewidth=0.4)
            base += height
        mean = float(base.mean()) if len(base) else 0.0
        axis.axhline(mean, color=INK, linewidth=1.0)
        marks = [(mean, "mean", INK)]
        top = max(float(base.max(initial=0.0)), limit or 0.0, 1e-9)
        if limit is not None:
            axis.axhline(limit, color=LIMIT, linewidth=1.0, linestyle=(0, (4, 3)))
            marks.append((limit, name, LIMIT))
        for value, text, colour in marks:
            below = text == "mean"
            axis.annotate(
                text,
                (1.005, value),
                xycoords=("axes fraction", "data"),
                va="top" if below else "bottom",
                color=colour,
                fontsize=8,
                annotation_clip=False,
            )
        peak = f"largest / mean {base.max() / mean:.3f}" if mean else "nothing is sent"
        axis.set_title(peak, loc="right", fontsize=8, color=INK)
        axis.set_ylabel(label, fontsize=9)
        axis.set_ylim(0, top * 1.12)
        axis.margins(x=0)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("device", fontsize=9)
    counts = [plan.degrees.count(kind) for kind in kinds]
    handles = [
        Patch(color=shade, label=f"degree {kind} ({count})")
        for kind, shade, count in zip(kinds, shades, counts, strict=False)
    ]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    figure.suptitle(f"{len(lengths)} sequences on {plan.num_devices} devices, {len(plan.rounds)} rounds", fontsize=11)
    return figure


def sent(plan: ShardPlan) -> np.ndarray:
    """`[devices]`: token vectors that leave each device in one all-to-all, the sum of `length * (p - 1) / p**2`."""
    p = np.array(plan.degrees, float)
    return plan.over_devices(np.array(plan.lengths) * (p - 1) / p**2)


def summary(plan: ShardPlan) -> str:
    """Describes the plan in a line: sizes, balance, memory, the number of sequences of each degree, traffic."""
    degrees = np.array(plan.degrees, int)
    kinds = ", ".join(f"{(degrees == p).sum()} at {p}" for p in sorted(set(plan.degrees)))
    lengths = np.array(plan.lengths, float)
    moved = float((lengths * (1 - 1 / degrees)).sum()) / max(float(lengths.sum()), 1.0) if len(lengths) else 0.0
    return (
        f"{len(plan.lengths)} sequences on {plan.num_devices} devices: compute {plan.balance:.3f} and memory "
        f"{plan.memory_ratio:.3f} of the mean, degrees {kinds or 'none'}, {moved:.0%} of tokens travel, "
        f"{len(plan.rounds)} rounds"
    )
