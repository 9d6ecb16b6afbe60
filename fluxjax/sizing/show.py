"""A pre-flight's findings as tables and as a picture."""

from __future__ import annotations

import pathlib

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from .account import GIB
from .check import Verdict

_KINDS = {  # in the order of the table's rows and of the parts of a bar
    "master weights": "#1f77b4",
    "cast weights": "#aec7e8",
    "merged weights": "#c6dbef",
    "moments": "#6baed6",
    "gradients": "#08519c",
    "reference weights": "#9ecae1",
    "critic weights and moments": "#17becf",
    "engine weights": "#2ca02c",
    "KV cache": "#ff7f0e",
    "states": "#ffbb78",
    "servers": "#bcbd22",
    "batches": "#9467bd",
    "temporaries": "#d62728",
}
_MEANING = {
    "accumulate": "gradients of a microbatch",
    "update": "optimizer step",
    "logprobs": "log-probs of a microbatch",
    "prefill": "prompts into the cache",
    "decode": "tokens of all slots",
    "rollout": "servers awake",
    "publish": "new weights to engines or servers",
}


def show(verdict: Verdict, title: str, console: Console) -> None:
    """Prints memory by phase and kind, collectives by program and kind, and the verdict."""
    phases = verdict.account.phases()
    kinds = [kind for kind in _KINDS if any(kind in sizes for sizes in phases.values())]
    memory = Table(title=f"{title}: GiB on the fullest of {verdict.devices} devices", title_justify="left")
    memory.add_column("kind")
    for phase in phases:
        memory.add_column(phase, justify="right")
    for kind in kinds:
        memory.add_row(kind, *(f"{sizes[kind] / GIB:.2f}" if kind in sizes else "" for sizes in phases.values()))
    memory.add_section()
    memory.add_row("in all", *(f"{sum(sizes.values()) / GIB:.2f}" for sizes in phases.values()))
    console.print(memory)
    console.print("; ".join(f"{phase}: {_MEANING[phase]}" for phase in phases) + ".", style="dim")

    sent = Table(title="collectives of one run of a program, as one device sees them", title_justify="left")
    for column in ("program", "kind", "count", "GB", "exposed", "GB exposed"):
        sent.add_column(column, justify="left" if column in ("program", "kind") else "right")
    for program, compiled in verdict.programs.items():
        for kind, traffic in sorted(compiled.traffic.items()):
            numbers = (f"{traffic.count:.0f}", f"{traffic.bytes / 1e9:.2f}", f"{traffic.exposed:.0f}")
            sent.add_row(program, kind, *numbers, f"{traffic.exposed_bytes / 1e9:.2f}")
            program = ""
        sent.add_section()
    console.print(sent)
    console.print(
        "Exposed: in the compiled schedule, no work that takes as long runs beside the collective.", style="dim"
    )
    for line in _conclusions(verdict):
        console.print(line, highlight=False, soft_wrap=True)


def _conclusions(verdict: Verdict) -> list[str]:
    lines = [f"{verdict.parameters / 1e9:.2f} billion parameters, {verdict.layers} decoder layers."]
    if verdict.extrapolated:
        few = verdict.compiled_layers
        lines.append(
            f"EXTRAPOLATED: {few} and {2 * few} layers were compiled; temporaries and collectives of "
            f"{verdict.layers} layers are extrapolated in a straight line. Without --layers, all layers are compiled."
        )
    lines.append(
        f"While weights are loaded, a process takes up to {verdict.host / GIB:.1f} GiB of host memory (the largest "
        "tensor, as read and as float32), in addition to what Python and XLA take."
    )
    programs: dict[str, list[str]] = {}
    for name, kernels in verdict.attention.items():
        programs.setdefault(kernels, []).append(name)
    attention = "; ".join(f"{', '.join(names)}: {kernels}" for kernels, names in programs.items())
    lines.append(f"Attention as compiled: {attention}. Rematerialisation: {verdict.remat.value}.")
    if verdict.offloaded:
        lines.append(f"Of each device's activations, {verdict.offloaded / GIB:.1f} GiB lie in the host's memory.")
    lines.append(
        f"The largest row that fits: {verdict.largest_row} tokens (packing.tokens_per_row is {verdict.row}; "
        f"extrapolated in a straight line from rows of {verdict.row} and {2 * verdict.row} tokens)."
        if verdict.largest_row
        else "No row fits, however short."
    )
    return lines + verdict.answer()


def draw(verdict: Verdict, title: str, file: pathlib.Path) -> None:
    """Draws memory by phase as stacked bars, with a line at the memory that JAX may use."""
    phases = verdict.account.phases()
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    left = dict.fromkeys(phases, 0.0)
    for kind, colour in _KINDS.items():
        widths = [phases[phase].get(kind, 0.0) / GIB for phase in phases]
        if any(widths):
            axes.barh(list(phases), widths, left=list(left.values()), color=colour, label=kind)
            left = {phase: left[phase] + width for phase, width in zip(phases, widths, strict=True)}
    axes.axvline(verdict.room.usable / GIB, color="black", linestyle="--", linewidth=1)
    axes.text(verdict.room.usable / GIB, -0.6, "usable ", ha="right", va="bottom", fontsize=8)
    axes.invert_yaxis()
    layers = f", extrapolated from {verdict.compiled_layers} layers" if verdict.extrapolated else ""
    axes.set(xlabel=f"GiB on the fullest device{layers}", title=title)
    axes.legend(fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    FigureCanvasAgg(figure).print_png(str(file))
