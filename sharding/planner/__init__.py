"""Planners: on which devices each sequence of a microbatch, and each unit of the vision tower, is computed. numpy only.

    plan = flex_ulysses([9000, 120, 4000, 310], num_devices=4, limits=Limits(num_heads=28))
    print(plan.balance)

Both planners of sequences return a `plan.ShardPlan`.
"""

from typing import TYPE_CHECKING

from ..door import door

if TYPE_CHECKING:
    from .flex import flex_ulysses, ulysses
    from .plan import Limits
    from .vision_units import VisionPlan, spread_vision

__all__ = [
    "Limits",
    "VisionPlan",
    "flex_ulysses",
    "spread_vision",
    "ulysses",
]
__getattr__ = door(
    __name__,
    flex=("flex_ulysses", "ulysses"),
    plan=("Limits",),
    vision_units=("VisionPlan", "spread_vision"),
)
