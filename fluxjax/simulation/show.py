"""The summary of a simulated run as a table, and a line now and then while it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from .step_records import StepRecord

_EVERY = 5.0  # seconds between two lines


class ProgressLine:
    """Told of every step."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._next = time.perf_counter() + _EVERY

    def __call__(self, record: StepRecord) -> None:
        if time.perf_counter() >= self._next:
            self._next = time.perf_counter() + _EVERY
            print(
                f"step {record.step}/{self._steps} | {record.end:,.0f} simulated seconds", file=sys.stderr, flush=True
            )


def show(result: dict[str, Any]) -> None:
    """Prints the answer of `run.summary`."""
    title = (
        f"{result['policy']}, {result['model']} on {result['gpus']:,} simulated GPUs ({result['engines']:,} engines)"
    )
    table = Table(title=title, show_header=False)
    for row in _rows(result):
        table.add_row(*row)
    Console().print(table)


def _rows(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    used, prompts, stale = result["simulated_utilisation"], result["prompts"], result["staleness"]
    yield "steps", f"{result['steps']:,} in {result['simulated_seconds']:,.0f} simulated seconds"
    yield "samples a second", f"{result['simulated_samples_per_second']:,.2f}"
    for kind, times in result["simulated_step_seconds"].items():
        name = "step" if kind == "all" else f"{kind} rounds ({times['steps']})"
        parts = f"rollout {times['mean_rollout_seconds']:.1f}, training {times['mean_train_seconds']:.1f}"
        longest = f"longest response {times['mean_longest_tokens']:,.0f} tokens"
        yield name, f"mean {times['mean_seconds']:.1f} s, median {times['median_seconds']:.1f} s; {parts}; {longest}"
    yield (
        "GPUs busy",
        f"{used['busy']:.1%} (engines {used['rollout_busy']:.1%} of theirs); bubbles {1 - used['busy']:.1%}",
    )
    yield "throughput of the peak", f"{used['throughput']:.1%}"
    yield "preemptions", f"{result['preemptions']:,}"
    yield "staleness", f"mean {stale['mean']:.2f} versions, at most {stale['max']}"
    yield "prompts trained on", f"{prompts['trained']:,}"
    for reason, count in prompts["skipped"].items():
        yield "prompts skipped", f"{count:,}: {reason}"
    if prompts["waiting"]:
        yield "prompts left", ", ".join(f"{count:,} {stage}" for stage, count in prompts["waiting"].items())
    yield "responses", ", ".join(f"{count:,} {what}" for what, count in result["responses"].items())
    yield "rewards timed out", f"{result['rewards_timed_out']:,}"
    if result["crashes"]:
        yield "crashes of engines", f"{result['crashes']:,}"
    yield "this took", f"{result['wall_seconds']:.1f} s for {result['events']:,} events"
