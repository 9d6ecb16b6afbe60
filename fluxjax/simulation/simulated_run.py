"""A simulated run from its configuration to its summary, and the summary as a table."""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ..coordinator import PromptStage, messages
from ..coordinator.factory import make_coordinator
from ..coordinator.run_settings import prompt_work
from .options import SimulateConfig
from .virtual_cluster import Cluster, StepRecord, Watch


def make_cluster(config: SimulateConfig, watch: Watch | None = None) -> Cluster:
    """Makes a cluster with the coordinator and the policy of a run of this configuration."""
    cache = config.simulation.hardware().kv_limit(config.simulation.degree)
    changes = {"kv_tokens": cache, "kv_reserved": 0, "prompt_work": prompt_work(config.simulation.max_running)}
    return Cluster(config, make_coordinator(config, **changes), watch)


def summary(cluster: Cluster, wall_seconds: float) -> dict[str, Any]:
    """Returns the summary of a run, as JSON values. All times except `wall_seconds` are virtual."""
    config, ledger, records = cluster.config, cluster.coordinator.ledger, cluster.records
    rollout, now = cluster.rollout, cluster.clock.now
    used = cluster.utilisation()
    tokens = sum(record.trained_tokens for record in records)
    reasons = Counter(skipped.reason for skipped in ledger.skipped)
    waiting = {stage.value: ledger.count(stage) for stage in PromptStage if ledger.count(stage)}
    kinds = {"all": records} if records else {}
    kinds |= {kind: [r for r in records if r.round == kind] for kind in dict.fromkeys(r.round for r in records) if kind}
    return {
        "policy": config.policy.name,
        "model": config.simulation.model.value,
        "gpus": config.simulation.gpus,
        "engines": len(rollout.engines),
        "steps": len(records),
        "simulated_seconds": round(now, 1),
        "simulated_samples_per_second": round(ledger.trained_responses / now, 3) if now else 0.0,
        "simulated_tokens_per_second": round(tokens / now, 1) if now else 0.0,
        "simulated_step_seconds": {kind: _times(some) for kind, some in kinds.items()},
        "simulated_utilisation": {name: round(value, 4) for name, value in used.items()},
        "simulated_bubbles": round(1 - used["busy"], 4),
        "preemptions": rollout.preemptions,
        "staleness": {
            "mean": round(statistics.fmean(r.lag_mean for r in records), 4) if records else 0.0,
            "max": max((r.lag_max for r in records), default=0),
        },
        "prompts": {"trained": ledger.trained, "skipped": dict(reasons), "waiting": waiting},
        "responses": {"launched": rollout.launched, "aborted": rollout.aborted, "accepted": ledger.accepted},
        "rewards_timed_out": cluster.scoring.timed_out,
        "crashes": rollout.crashes,
        "ignored": dict(ledger.ignored),
        "events": cluster.events,
        "wall_seconds": round(wall_seconds, 2),
    }


def _times(records: Sequence[StepRecord]) -> dict[str, float | int]:
    def mean(name: str) -> float:
        return round(statistics.fmean(getattr(record, name) for record in records), 2)

    return {
        "steps": len(records),
        "mean_seconds": mean("seconds"),
        "median_seconds": round(statistics.median(record.seconds for record in records), 2),
        "mean_rollout_seconds": mean("rollout"),
        "mean_train_seconds": mean("train"),
        "mean_longest_tokens": round(statistics.fmean(record.longest for record in records), 1),
    }


# --- display ------------------------------------------------------------------------------------------

_EVERY = 5.0  # seconds between two lines


class ProgressLine:
    """Prints a line on standard error every few seconds. Called with the simulated time and every message of a run."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._next = time.perf_counter() + _EVERY

    def __call__(self, now: float, message: messages.Message) -> None:
        if isinstance(message, messages.Trained) and time.perf_counter() >= self._next:
            self._next = time.perf_counter() + _EVERY
            print(f"step {message.version}/{self._steps} | {now:,.0f} simulated seconds", file=sys.stderr, flush=True)


def show(result: dict[str, Any]) -> None:
    """Prints the result of `summary` as a table."""
    title = f"{result['policy']}, {result['model']} on {result['gpus']:,} simulated GPUs, {result['engines']:,} engines"
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
