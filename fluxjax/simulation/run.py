"""From the configuration to a simulated run, and what came of it."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections import Counter
from typing import Any

from ..config.schedules import make_schedules
from ..coordinator import Coordinator, PromptStage, Settings
from ..coordinator.factory import make_parallelism, make_policy
from .cluster import Cluster, OnStep, Watch
from .options import SimulateConfig
from .step_records import step_times


def make_cluster(config: SimulateConfig, watch: Watch | None = None, on_step: OnStep | None = None) -> Cluster:
    """With the coordinator and the policy that a run of this configuration has, on as many engines as there are."""
    cache = config.simulation.hardware().kv_limit(config.simulation.degree)
    settings = dataclasses.replace(Settings.of(config), kv_tokens=cache, kv_reserved=0)
    coordinator = Coordinator(settings, make_policy(config), make_schedules(config.schedules), make_parallelism(config))
    return Cluster(config, coordinator, watch, on_step)


def simulate(config: SimulateConfig, watch: Watch | None = None) -> dict[str, Any]:
    """The summary of a whole run. Raises what `Cluster.run` raises."""
    cluster = make_cluster(config, watch)
    began = time.perf_counter()
    run(cluster)
    return summary(cluster, time.perf_counter() - began)


def run(cluster: Cluster) -> None:
    """`cluster.run()`, faster: nothing in it refers to itself in a circle, so that there is nothing to collect."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        cluster.run()
    finally:
        gc.enable()
        gc.unfreeze()


def summary(cluster: Cluster, wall_seconds: float) -> dict[str, Any]:
    """JSON. Times are virtual but for `wall_seconds`."""
    config, ledger, records = cluster.config, cluster.coordinator.ledger, cluster.records
    rollout, now = cluster.rollout, cluster.clock.now
    used = cluster.utilisation()
    tokens = sum(record.trained_tokens for record in records)
    reasons = Counter(skipped.reason for skipped in ledger.skipped)
    waiting = {stage.value: ledger.count(stage) for stage in PromptStage if ledger.count(stage)}
    return {
        "policy": config.policy.name.value,
        "model": config.simulation.model.value,
        "gpus": config.simulation.gpus,
        "engines": len(rollout.engines),
        "steps": len(records),
        "simulated_seconds": round(now, 1),
        "simulated_samples_per_second": round(ledger.trained_responses / now, 3) if now else 0.0,
        "simulated_tokens_per_second": round(tokens / now, 1) if now else 0.0,
        "simulated_step_seconds": step_times(records),
        "simulated_utilisation": {name: round(value, 4) for name, value in used.items()},
        "simulated_bubbles": round(1 - used["busy"], 4),
        "preemptions": rollout.fleet.preemptions,
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
