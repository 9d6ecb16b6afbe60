"""Deals attention heads to the devices of a sequence-parallel group. Plain Python, since planners price deals with it.

All devices of a group compute equally many heads. If heads do not divide evenly, zeros fill them up, or several devices
get copies of a KV head and compute a part of its query heads each.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from ..planner.plan import PlanError


class Deal(NamedTuple):
    """`kv` KV heads after filling up, each copied `copies` times, with `queries` query heads for each copy. All copies
    are cut into `degree` consecutive equal parts."""

    degree: int
    kv: int
    copies: int
    queries: int

    @property
    def local_kv(self) -> int:
        return self.kv * self.copies // self.degree

    @property
    def local_queries(self) -> int:
        return self.local_kv * self.queries


@functools.lru_cache
def deal_heads(num_heads: int, num_kv_heads: int, degree: int) -> Deal:
    """The deal with the fewest query heads a device (compute), then the fewest KV heads (traffic).

    KV heads that `degree` divides are neither filled up nor copied. Zeros multiply the compute of attention by
    `local_queries * degree / num_heads`: 8 / 7 for 28/4 heads at 8. Raises PlanError for a degree above the number of
    query heads, and ValueError for heads that are no multiple of the KV heads.
    """
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads can't be shared by {num_kv_heads} KV heads")
    if degree > num_heads:
        raise PlanError(
            f"a sequence can't be sharded over {degree} devices by {num_heads} attention heads; lower the degree cap"
        )
    ratio = num_heads // num_kv_heads
    deals = []
    for copies in range(1, min(degree, ratio) + 1):
        step = degree // math.gcd(degree, copies)  # KV heads must be a multiple of `step`
        deals.append(Deal(degree, -(-num_kv_heads // step) * step, copies, -(-ratio // copies)))
    return min(deals, key=lambda deal: (deal.local_queries, deal.local_kv, deal.copies))
