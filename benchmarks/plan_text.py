"""Shard plans as text, for the processes of a benchmark."""

import dataclasses
import json

from sharding.planner.plan import Round, ShardPlan


def text_of(plan: ShardPlan) -> str:
    return json.dumps(dataclasses.asdict(plan))


def plan_of(text: str) -> ShardPlan:
    """Reads what `text_of` wrote."""
    raw = json.loads(text)
    rounds = tuple(Round(r["degree"], tuple(map(tuple, r["groups"]))) for r in raw["rounds"])
    sequences = {name: tuple(raw[name]) for name in ("lengths", "work", "degrees", "firsts")}
    return ShardPlan(num_devices=raw["num_devices"], rounds=rounds, **sequences)
