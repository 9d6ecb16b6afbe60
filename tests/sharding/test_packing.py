"""Schedules over devices and microbatches: whole, within the budget, as even as promised; small cases by hand."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turns import third_of

from benchmarks.cost_fit import published
from benchmarks.packing_baselines import (
    SCHEDULERS,
    MicrobatchSchedule,
    bubble_rate,
    lb_micro,
    lb_mini,
    local_sort,
    makespan,
    verl_native,
)
from sharding.planner.packing import karmarkar_karp, swapped
from sharding.planner.plan import Limits, PlanError

LENGTHS = st.lists(st.integers(1, 100), max_size=24)
DEVICES = st.integers(1, 6)
ROOM = st.sampled_from([0, 100, 130, 250])


def limits(room: int) -> Limits:
    return Limits(tokens_per_device=room)


def loads(bins: list[int], amounts: list[int], count: int) -> np.ndarray:
    return np.bincount(np.array(bins, int), amounts, count)


ALL = SCHEDULERS | {"verl_native": verl_native}


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=third_of(60), deadline=None)
@given(LENGTHS, DEVICES, ROOM)
def test_whole_within_budget_and_repeatable(name: str, lengths: list[int], devices: int, room: int) -> None:
    made = ALL[name](lengths, devices, limits(room))
    assert made == ALL[name](np.array(lengths, int), devices, limits(room))
    assert made.num_devices == devices
    assert sorted(i for own in made.microbatches for one in own for i in one) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in one) <= (room or 10**9) for own in made.microbatches for one in own)
    assert all(list(one) == sorted(one) for own in made.microbatches for one in own)
    assert made.work == tuple(24576.0 * n + n * n for n in lengths)
    if name == "lb_mini":
        assert all(one for own in made.microbatches for one in own)
    else:  # all meet in every microbatch, of which none is empty on all devices
        assert len(set(made.counts())) == 1
        assert all(any(column) for column in zip(*made.microbatches, strict=True))
        sizes = [sum(map(len, own)) for own in made.microbatches]
        assert max(sizes) - min(sizes) <= 1
    assert 0 <= bubble_rate(made, barrier="minibatch") <= bubble_rate(made) + 1e-12 < 1


@pytest.mark.slow
@settings(max_examples=third_of(150), deadline=None)
@given(LENGTHS, DEVICES, ROOM)
def test_balancing_whole_minibatches_is_never_slower(lengths: list[int], devices: int, room: int) -> None:
    micro, mini = lb_micro(lengths, devices, limits(room)), lb_mini(lengths, devices, limits(room))
    apart = makespan(micro, "minibatch")
    assert makespan(mini, "minibatch") <= apart * (1 + 1e-12)
    assert apart <= makespan(micro, "microbatch") * (1 + 1e-12)
    for own in mini.microbatches:  # each device alone: no more microbatches than sequences, one if all fit
        tokens = [sum(lengths[i] for i in one) for one in own]
        assert -(-sum(tokens) // room) <= len(own) if room else len(own) <= 1


@settings(max_examples=third_of(100), deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(1, 3))
def test_equal_sizes_against_all_partitions(amounts: list[int], count: int) -> None:
    bins = karmarkar_karp(amounts, count, equal_size=True)
    sizes = np.bincount(bins, minlength=count)
    assert sizes.max() - sizes.min() <= 1
    every = (list(c) for c in itertools.product(range(count), repeat=len(amounts)))
    equal = [c for c in every if np.ptp(np.bincount(c, minlength=count)) <= 1]
    best = min(max(loads(c, amounts, count)) for c in equal)
    # of at most four items a bin (Michiels et al., 2003)
    assert best <= max(loads(bins, amounts, count)) <= 19 / 12 * best + 1e-9


@settings(max_examples=third_of(150), deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(1, 3))
def test_differencing_is_near_the_optimum_and_swaps_only_help(amounts: list[int], count: int) -> None:
    best = min(max(loads(list(c), amounts, count)) for c in itertools.product(range(count), repeat=len(amounts)))
    differenced, anyhow = karmarkar_karp(amounts, count), [i * 7 % 5 % count for i in range(len(amounts))]
    assert max(loads(differenced, amounts, count)) <= (4 / 3 - 1 / (3 * count)) * best + 1e-9
    for bins in (differenced, anyhow):
        better = max(loads(swapped(amounts, bins, count), amounts, count))
        assert best <= better <= max(loads(bins, amounts, count))


@settings(max_examples=third_of(100), deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 4))
def test_exchanges_of_one_for_one_keep_sizes(amounts: list[int], count: int) -> None:
    bins = karmarkar_karp(amounts, count, equal_size=True)
    better = swapped(amounts, bins, count, equal_size=True)
    assert np.bincount(better, minlength=count).tolist() == np.bincount(bins, minlength=count).tolist()
    most = max(loads(better, amounts, count))
    assert most <= max(loads(bins, amounts, count))
    full = int(np.argmax(loads(better, amounts, count)))
    for i, j in itertools.product(range(len(amounts)), repeat=2):  # and none is left that would help
        if better[i] == full != better[j]:
            changed = [*better]
            changed[i], changed[j] = better[j], better[i]
            pair = loads(changed, amounts, count)[[better[i], better[j]]]
            assert max(pair) >= most


def test_lb_micro_leaves_whole_devices_even() -> None:
    """Eight sequences a device: Karmarkar-Karp of equal sizes alone lets devices wait for a tenth of the time."""
    rng = np.random.default_rng(0)
    alone = whole = work = 0.0
    for _ in range(20):
        made = lb_micro(rng.lognormal(9, 0.5, 64).clip(1, 65536).astype(int), 8, limits(65536))
        alone += max(np.bincount(karmarkar_karp(made.work, 8, equal_size=True), made.work))
        whole += makespan(made, "minibatch")
        work += sum(made.work) / 8
    assert work < whole < 1.01 * work < 1.1 * work < alone


def test_partitions_by_hand() -> None:
    # Of equal size: {8, 7} and {6, 5} differ by 1 each and {4} by 4; 4-1 -> 3, 3-1 -> 2: 16 and 14, three and two.
    bins = karmarkar_karp([8, 7, 6, 5, 4], 2, equal_size=True)
    assert sorted(loads(bins, [8, 7, 6, 5, 4], 2)) == [14, 16]
    # One giant: alone without equal sizes, with one of the small with them.
    giant = [100, 1, 1, 1]
    assert sorted(loads(karmarkar_karp(giant, 2), giant, 2)) == [3, 100]
    assert sorted(loads(karmarkar_karp(giant, 2, equal_size=True), giant, 2)) == [2, 101]
    # A swap of 5 for 4, where no single item can move: 11 and 9 become 10 and 10.
    assert sorted(loads(swapped([6, 5, 4, 5], [0, 0, 1, 1], 2), [6, 5, 4, 5], 2)) == [10, 10]
    assert swapped([], [], 2) == karmarkar_karp([], 2) == karmarkar_karp([], 2, equal_size=True) == []


def test_bubbles_by_hand() -> None:
    """Two devices, work 4, 1 | 2, 3. A barrier at each microbatch: 4 + 3 = 7, so 14 of which 10 are work. One at the
    end: both take 5."""
    made = MicrobatchSchedule((4, 1, 2, 3), (4.0, 1.0, 2.0, 3.0), (((0,), (1,)), ((2,), (3,))))
    assert makespan(made) == 7
    assert bubble_rate(made) == pytest.approx(4 / 14, rel=1e-12)
    assert bubble_rate(made, barrier="minibatch") == 0
    # Squares: 16, 1 | 4, 9: 16 + 9 = 25 and 17, of 30 in all.
    assert bubble_rate(made, lambda n: n**2) == pytest.approx(1 - 30 / 50, rel=1e-12)
    assert bubble_rate(made, lambda n: n**2, "minibatch") == pytest.approx(1 - 30 / 34, rel=1e-12)
    # Two minibatches of one microbatch: their barriers are the same.
    apart = MicrobatchSchedule(made.lengths, made.work, made.microbatches, 0, (0, 1))
    assert bubble_rate(apart, barrier="minibatch") == pytest.approx(4 / 14, rel=1e-12)
    # Unequal numbers: 4 | 1, 1, 1 takes 4 at the end, 4 + 1 + 1 with barriers.
    uneven = MicrobatchSchedule((4, 1, 1, 1), (4.0, 1.0, 1.0, 1.0), (((0,),), ((1,), (2,), (3,))))
    assert bubble_rate(uneven, barrier="minibatch") == pytest.approx(1 - 7 / 8, rel=1e-12)
    assert bubble_rate(uneven) == pytest.approx(1 - 7 / 12, rel=1e-12)
    with pytest.raises(PlanError, match="barrier must be"):
        bubble_rate(made, barrier="layer")


def test_schedules_by_hand() -> None:
    """10 alone is as much as a microbatch holds: by squares 100, and the others are 16 + 16 + 9 + 9 + 4."""
    lengths = [10, 4, 4, 3, 3, 2]
    square: dict[str, Any] = {"work": [100, 16, 16, 9, 9, 4]}
    assert local_sort(lengths, 2, limits(10), **square).microbatches == (((0,), (2,), (4,)), ((1,), (3,), (5,)))
    mini = lb_mini(lengths, 2, limits(10), **square)
    assert mini.microbatches[0] == ((0,),)
    assert sorted(map(sum, [[lengths[i] for i in one] for one in mini.microbatches[1]])) == [7, 9]
    micro = lb_micro(lengths, 2, limits(10), **square)
    assert [sum(map(len, own)) for own in micro.microbatches] == [3, 3]
    assert micro.counts().tolist() == [2, 2]
    assert micro.microbatches[0][0] == (0,)  # the heaviest of both together
    assert makespan(mini, "minibatch") == 100 < makespan(micro, "minibatch")


def test_one_giant_and_fewer_sequences_than_devices() -> None:
    for name, scheduler in ALL.items():
        assert scheduler([7], 3, limits(7)).counts().tolist() == ([1, 0, 0] if name == "lb_mini" else [1, 1, 1])
        assert bubble_rate(scheduler([7], 3, limits(7))) == pytest.approx(2 / 3, rel=1e-12)
        assert scheduler([], 2).microbatches == ((), ())
        assert bubble_rate(scheduler([], 2)) == 0
        with pytest.raises(PlanError, match=r"sequence 1 has 8 tokens.*limits.tokens_per_device 7"):
            scheduler([3, 8, 7], 2, limits(7))
        with pytest.raises(PlanError, match="sequence 1 has length 0"):
            scheduler([3, 0], 2)
        with pytest.raises(PlanError, match="num_devices is 0"):
            scheduler([3], 0)


def test_two_levels_are_balanced_only_together() -> None:
    lengths = [int(n) for n in np.random.default_rng(0).lognormal(6, 1, 64).clip(1, 4000)]
    made = verl_native(lengths, 4, limits(4000), minibatch=4, seed=1)
    assert len(made.starts) == 4
    ends = [*made.starts[1:], int(made.counts()[0])]
    for start, end in zip(made.starts, ends, strict=True):
        assert [sum(map(len, own[start:end])) for own in made.microbatches] == [4] * 4
    assert made == verl_native(lengths, 4, limits(4000), minibatch=4, seed=1)
    assert made != verl_native(lengths, 4, limits(4000), minibatch=4, seed=2)
    whole = MicrobatchSchedule(made.lengths, made.work, made.microbatches, made.budget)
    assert bubble_rate(whole, barrier="minibatch") < 0.02 < bubble_rate(made, barrier="minibatch") < bubble_rate(made)
    assert len(verl_native(lengths[:63], 4, limits(4000), minibatch=5).starts) == 4
    with pytest.raises(PlanError, match="minibatch is -1"):
        verl_native(lengths, 4, minibatch=-1)


def test_work_follows_the_cost() -> None:
    cost: Any = published()  # its numbers are numpy's
    lengths = [9000, 4000, 1000]
    made = lb_mini(lengths, 2, cost=cost)
    assert made.work == tuple(float(cost.attention_seconds(n) + cost.linear_seconds(n)) for n in lengths)
    rate = bubble_rate(made, barrier="minibatch")
    assert bubble_rate(lb_mini(lengths, 2), cost, "minibatch") == pytest.approx(rate, rel=1e-12)
    assert lb_mini(lengths, 2, cost=lambda n: n).work == (9000, 4000, 1000)
    assert lb_mini(lengths, 2, work=[1, 2, 3]).microbatches == (((2,),), ((0, 1),))
    with pytest.raises(PlanError, match="work has shape"):
        lb_mini(lengths, 2, work=[1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"microbatches": (((0,),), ((0, 1),))}, "exactly one microbatch"),
        ({"microbatches": (((0,),), ())}, "exactly one microbatch"),
        ({"microbatches": ()}, "at least one device"),
        ({"microbatches": (((0,),), ((2, 1),)), "budget": 6}, "microbatch 0 of device 1 has 7 tokens, the budget is 6"),
        ({"starts": (1,)}, "starts of minibatches"),
        ({"starts": (0, 2, 2)}, "starts of minibatches"),
    ],
)
def test_what_is_no_schedule(change: dict, said: str) -> None:
    made = {"lengths": (5, 3, 4), "work": (1.0, 1.0, 1.0), "microbatches": (((0,),), ((1, 2),))}
    MicrobatchSchedule(**made, budget=7)
    with pytest.raises(PlanError, match=said):
        MicrobatchSchedule(**{**made, **change})
