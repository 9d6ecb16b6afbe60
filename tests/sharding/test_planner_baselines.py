"""What FlexUlysses is compared with: as published, and checked by hand or against all possibilities."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turns import third_of

from benchmarks.planner_baselines import bucketing, flexrl, greedy
from sharding.planner import Limits, ulysses
from sharding.planner.packing import longest_first
from sharding.planner.plan import PlanError


def test_longest_first_by_hand() -> None:
    amounts = np.array([8, 7, 6, 5, 4], float)  # 8, 5, 4 and 7, 6
    assert sorted(np.bincount(longest_first(amounts, 2), amounts)) == [13, 17]


def test_buckets_weigh_by_verls_formula() -> None:
    # By attention alone the long one would fill a device; by 24576 * n + n**2 the three short ones are as much.
    plan = bucketing([30_000, 13_000, 13_000, 13_000], 2)
    weights = np.array([24576 * n + n**2 for n in plan.lengths], float)
    assert sorted(np.bincount(plan.firsts, weights, 2)) == sorted([weights[0], weights[1:].sum()])
    assert plan.work == tuple(float(n) ** 2 for n in plan.lengths)
    assert set(plan.degrees) == {1}


def test_greedy_and_fixed_degree_by_hand() -> None:
    assert greedy([5, 4, 3, 3], 2).firsts == (0, 1, 1, 0)  # 25 | 16 + 9, and the tie goes to the first
    plan = ulysses([5, 4, 3, 3], 4, degree=2)
    assert plan.degrees == (2, 2, 2, 2)
    assert plan.firsts == (0, 2, 2, 0)
    with pytest.raises(PlanError, match="degree 8 must be a power of two, at most 4"):
        ulysses([5], 4)


def test_the_papers_algorithms_by_hand() -> None:
    """Four devices, mean 10, threshold 11. 16: two devices, 8 each. 9 and 9: one each. 4: no device has room
    (8, 8, 9, 9), two have: 10 beside the 16. 2: beside a 9. No merge: 16 on one device is above 11. At last all of
    degree 1 or 2 are dealt anew, unsharded: 16 has room nowhere and goes to the emptiest; 9 and 9 to the next, 4 and 2
    to the device with the least compute of those with room."""
    plan = flexrl([16, 9, 9, 4, 2], 4)
    assert plan.degrees == (1, 1, 1, 1, 1)
    assert plan.firsts == (0, 1, 2, 3, 3)


def test_the_papers_merge_by_hand() -> None:
    """Degrees start at the lowest that fits: four sequences of 20 on 8 devices (mean 10) have degree 2, which the last
    step undoes; one of 40 (mean 5) has degree 8 and stays."""
    assert flexrl([20] * 4, 8).degrees == (1,) * 4
    assert flexrl([40], 8).degrees == (8,)


@settings(max_examples=third_of(60), deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.sampled_from([2, 4, 8, 12]))
def test_all_of_them_place_everything(lengths: list[int], num_devices: int) -> None:
    for planner in (flexrl, bucketing, greedy):
        plan = planner(lengths, num_devices, Limits())
        assert abs(plan.compute().sum() - sum(n * n for n in lengths)) <= 1e-6 * sum(n * n for n in lengths)
