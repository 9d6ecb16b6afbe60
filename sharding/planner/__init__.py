"""Planners: on which devices each sequence of a microbatch, and each unit of the vision tower, is computed. numpy only.

    plan = flex_ulysses([9000, 120, 4000, 310], num_devices=4, limits=Limits(num_heads=28))
    print(plan.summary())

All planners of sequences are called alike and are in `PLANNERS` by name. `plan.ShardPlan` is what they return.
"""

from collections.abc import Callable

from .baselines import bucketing, flexrl, greedy, ulysses
from .flex import flex_ulysses
from .limits import Limits, balance_bound
from .plan import ShardPlan
from .vision_units import VisionPlan, spread_vision

PLANNERS: dict[str, Callable[..., ShardPlan]] = {
    planner.__name__: planner for planner in (flex_ulysses, flexrl, ulysses, bucketing, greedy)
}

__all__ = [
    "PLANNERS",
    "Limits",
    "VisionPlan",
    "balance_bound",
    "bucketing",
    "flex_ulysses",
    "flexrl",
    "greedy",
    "spread_vision",
    "ulysses",
]
