"""The FlexUlysses planner: every plan is executable, within its limits, even, and sends no more than it has to."""

import functools
import itertools
import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.patches import Rectangle
from plan_cases import assert_executable, executable
from turns import third_of

from benchmarks.dynamic_packing import packed_rounds, repacked
from benchmarks.plan_picture import draw, sent, summary
from benchmarks.plan_text import plan_of, text_of
from benchmarks.planner_baselines import PLANNERS, balance_bound, bucketing, flexrl, greedy
from sharding.planner import flex
from sharding.planner.packing import longest_first
from sharding.planner.plan import Limits, PlanError, ShardPlan, least_load

flex_ulysses, ulysses = executable(flex.flex_ulysses), executable(flex.ulysses)

LENGTHS = st.one_of(
    st.lists(st.integers(1, 20_000), min_size=1, max_size=60),
    st.lists(st.sampled_from([300, 700, 16_000, 17_000, 90_000]), min_size=1, max_size=60),
)
DEVICES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 32, 48])


def traffic(plan: ShardPlan) -> float:
    """Token vectors that all all-to-alls of one direction move."""
    return sum(n * (p - 1) / p for n, p in zip(plan.lengths, plan.degrees, strict=True))


@pytest.mark.long
@pytest.mark.slow
@settings(max_examples=third_of(25), deadline=None)
@given(LENGTHS, DEVICES, st.sampled_from([0, 1, 5, 28]), st.booleans())
def test_any_plan_keeps_to_its_limits(lengths: list[int], num_devices: int, heads: int, packed: bool) -> None:
    limits = Limits(num_heads=heads)
    plan = flex_ulysses(lengths, num_devices, limits)
    assert plan.lengths == tuple(lengths)
    assert max(plan.degrees) <= min(num_devices & -num_devices, heads or num_devices)
    assert plan == flex_ulysses(np.array(lengths), num_devices, limits)
    if packed:
        assert_executable(plan := repacked(plan, short=1000, cap=4000, most=3))
    assert plan_of(text_of(plan)) == plan
    assert all(sum(one.degree == p for one in plan.rounds) <= (3 if packed else 1) for p in plan.degrees)
    assert plan.balance >= balance_bound(lengths, num_devices, limits) - 1e-9


@pytest.mark.long
@settings(max_examples=third_of(20), deadline=None)
@given(LENGTHS, st.sampled_from([2, 4, 8, 16, 32]))
def test_without_a_cap_balance_and_memory_are_within_their_limits(lengths: list[int], num_devices: int) -> None:
    plan = flex_ulysses(lengths, num_devices)
    assert plan.balance <= 1.025 * (1 + 1e-6)
    assert plan.memory_ratio <= 1.1 * (1 + 1e-6)


@pytest.mark.long
@settings(max_examples=third_of(40), deadline=None)
@given(LENGTHS, DEVICES)
def test_where_unsharded_is_balanced_nothing_is_sharded(lengths: list[int], num_devices: int) -> None:
    plain, plan = greedy(lengths, num_devices), flex_ulysses(lengths, num_devices)
    limits = Limits()
    bound = balance_bound(lengths, num_devices, limits)
    if plain.balance <= bound * (1 + limits.tolerance) and plain.memory_ratio <= limits.alpha:
        assert set(plan.degrees) == {1}
    if plain.memory_ratio <= limits.alpha:
        assert plan.balance <= plain.balance * (1 + limits.tolerance)


@pytest.mark.long
@settings(max_examples=third_of(50), deadline=None)
@given(LENGTHS, DEVICES, st.sampled_from([0, 4]))
@example([1551, 2617, 2701, 2701, 4169, 4169, 4580, 6277, 9246, 19090], 48, 0)  # three blocks of 16 devices
@example([1551, 2617, 2701, 2701, 4169, 4169, 4580, 6277, 9246, 10000], 48, 0)  # memory against compute
@example([16704, 13325, 10348, 10348, 16704, 10348, 10348, 10348, 10348, 10348, 10348], 48, 0)  # the same, harder
@example([693, 10586, 9029, 1903, 558, 17741, 9003, 7270, 10029, 2], 24, 0)  # no plan keeps to the memory limit
@example([7466, 1074, 30, 266, 6167, 8115, 2110], 12, 0)  # traffic at a highest degree of 4
@example([700, 16000, 17000, 700, 16000, 90000, 17000, 300, 16000, 90000, 17000], 48, 0)
@example([12513, 15506, 12513, 9758, 9758, 15506, 9758, 12513, 12513, 9758], 6, 4)  # the paper's exceeds alpha
def test_never_worse_than_the_papers_own_algorithm(lengths: list[int], num_devices: int, heads: int) -> None:
    """FlexRL's placement is no candidate of the planner. Loads may be higher than its by the tolerance that the planner
    documents, and traffic up to what counts as little, 0.85 of that of degree 8 for all; no further. A placement beyond
    the memory limit, where the plan keeps to it, is no yardstick of balance: both cannot always be had."""
    limits = Limits(num_heads=heads)
    plan, published = flex_ulysses(lengths, num_devices, limits), flexrl(lengths, num_devices, limits)
    least = balance_bound(lengths, num_devices, limits)
    if published.memory_ratio <= max(plan.memory_ratio, limits.alpha) * (1 + 1e-6):
        assert plan.balance <= (1 + limits.tolerance) * max(published.balance, least) + 1e-9
    assert plan.memory_ratio <= max(published.memory_ratio, limits.alpha) * (1 + 1e-6)
    if published.balance <= (1 + limits.tolerance) * least and published.memory_ratio <= limits.alpha:
        assert traffic(plan) <= max(traffic(published), 0.85 * sum(lengths) * 7 / 8) + 1e-6


def brute_force(lengths: list[int], num_devices: int, tolerance: float) -> tuple[float, float]:
    """The smallest possible largest load, and the least traffic of plans within tolerance of it and of memory."""
    places = [(p, first) for p in (1, 2, 4) if p <= num_devices for first in range(0, num_devices, p)]
    mean, found = sum(lengths) / num_devices, []
    for choice in itertools.product(places, repeat=len(lengths)):
        compute, memory, moved = [0.0] * num_devices, [0.0] * num_devices, 0.0
        for n, (p, first) in zip(lengths, choice, strict=True):
            moved += n * (p - 1) / p
            for device in range(first, first + p):
                compute[device] += n * n / p
                memory[device] += n / p
        if max(memory) <= 1.1 * mean * (1 + 1e-9):
            found.append((max(compute), moved))
    least = min(load for load, _ in found)
    return least, min(moved for load, moved in found if load <= (1 + tolerance) * least * (1 + 1e-9))


@pytest.mark.slow
@settings(max_examples=third_of(25), deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=4), st.sampled_from([2, 4]))
def test_tiny_instances_are_solved_almost_exactly(lengths: list[int], num_devices: int) -> None:
    least, moved = brute_force(lengths, num_devices, Limits.tolerance)
    plan = flex_ulysses(lengths, num_devices)
    assert plan.compute().max() <= (1 + Limits.tolerance) * least * (1 + 1e-9)
    if num_devices == 2:  # a single group of two: all left/right/both are enumerated
        assert traffic(plan) <= moved + 1e-6
    else:
        assert traffic(plan) <= 1.5 * moved + 0.25 * sum(lengths)


@pytest.mark.medium
@settings(max_examples=third_of(200), deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.sampled_from([(2, 1), (2, 2), (4, 2)]))
def test_least_load_is_a_bound(lengths: list[int], shape: tuple[int, int]) -> None:
    num_devices, degree = shape
    blocks = num_devices // degree
    best = min(
        max(sum(n for n, b in zip(lengths, choice, strict=True) if b == block) for block in range(blocks)) / degree
        for choice in itertools.product(range(blocks), repeat=len(lengths))
    )
    assert least_load(np.array(lengths, float), num_devices, degree) <= best + 1e-9


def test_work_need_not_be_the_square_of_the_length() -> None:
    plan = flex_ulysses([100] * 8, 4, work=[8, 1, 1, 1, 1, 1, 1, 2])
    assert plan.work == (8, 1, 1, 1, 1, 1, 1, 2)
    assert plan.balance <= 1.025 * (1 + 1e-9)
    assert plan.degrees[0] > 1


def cost(wire: float, plan: ShardPlan) -> float:
    """Attention is quadratic; each token sent costs `wire`."""
    return float((plan.compute() + wire * sent(plan)).max())


def test_a_cost_model_says_how_even_is_even_enough() -> None:
    lengths = [1000, 900, 800, 720, 650, 500, 450, 430, 300, 120]
    free, dear = (flex_ulysses(lengths, 4, cost=functools.partial(cost, wire)) for wire in (0.0, 1e6))
    assert free.balance < 1.025
    assert traffic(dear) < traffic(free)
    for wire, plan in ((0.0, free), (1e6, dear)):
        assert cost(wire, plan) <= cost(wire, flex_ulysses(lengths, 4))


@pytest.mark.slow
@settings(max_examples=third_of(20), deadline=None)
@given(LENGTHS, st.sampled_from([4, 6, 8]), st.integers(0, 3000))
def test_tokens_per_device_hold_with_the_padding_of_chunks(lengths: list[int], num_devices: int, extra: int) -> None:
    room = -(-sum(lengths) // num_devices) + extra
    limits = Limits(alpha=3.0, tokens_per_device=room)
    try:
        plan = flex_ulysses(lengths, num_devices, limits)
    except PlanError as error:
        assert "tokens" in str(error)
        assert num_devices == 6 or extra < 8  # one block of all devices can always be filled evenly
    else:
        assert plan.rows().max() <= room


@pytest.mark.parametrize(
    ("lengths", "devices", "limits", "words"),
    [
        ([10, 5000], 8, {"tokens_per_device": 1000, "max_degree": 4}, "sequence 1 has 5000 tokens, but 4 devices"),
        ([900] * 8, 2, {"tokens_per_device": 1000}, "do not fit 2 devices"),
        ([10, 0], 2, {}, "sequence 1 has length 0"),
        ([-3], 2, {}, "sequence 0 has length -3"),
        ([10], 8, {"max_degree": 16}, "max_degree 16 is above 8"),
        ([10], 12, {"max_degree": 8}, "use at most 4"),
        ([10], 8, {"max_degree": 8, "num_heads": 6}, "6 query heads"),
        ([10], 0, {}, "at least one device"),
    ],
)
def test_what_cannot_be_planned_is_named(lengths: list[int], devices: int, limits: dict, words: str) -> None:
    for planner in PLANNERS.values():
        with pytest.raises(PlanError, match=words):
            planner(lengths, devices, Limits(**limits))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_degree": 6}, "no power of two; use 4 or 8"),
        ({"alpha": 0.9}, "limits.alpha"),
        ({"tolerance": float("nan")}, "limits.tolerance"),
        ({"tokens_per_device": -1}, "limits.tokens_per_device"),
    ],
)
def test_limits_are_checked(limits: dict, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Limits(**limits)


def test_work_is_checked() -> None:
    with pytest.raises(PlanError, match="sequence 1 has work nan"):
        flex_ulysses([1, 2], 2, work=[1.0, float("nan")])
    with pytest.raises(PlanError, match="there are 2 sequences"):
        flex_ulysses([1, 2], 2, work=[1.0])


def test_groups_stay_in_aligned_blocks() -> None:
    plan = flex_ulysses([9000, 50, 60, 70], 12)  # 12 devices: blocks of 4
    assert plan.degrees[0] == 4
    assert flex_ulysses([9000, 50, 60], 3).degrees == (1, 1, 1)


def test_nothing_to_plan() -> None:
    for name, planner in PLANNERS.items():
        degree = {"degree": 2} if name == "ulysses" else {}
        plan = planner([], 4, **degree)
        assert (plan.rounds, plan.balance, plan.memory_ratio) == ((), 1.0, 1.0)
        assert "0 sequences on 4 devices" in summary(plan)


def test_rounds_of_a_degree_are_even() -> None:
    lengths = [900, 800, 500, 400, 300, 200, 100, 90, 80, 1000, 700, 650, 620]
    made = packed_rounds(4, lengths, [2] * 13, [0] * 9 + [2] * 4, short=250, cap=400, most=3)
    streams = [[sum(lengths[i] for i in members) for members in one.groups] for one in made]
    longest = [max(stream) for stream in streams]
    assert len(made) == 3
    assert sum(longest) <= 3370 * 1.2  # the tokens of the fuller group: no round is long for one group alone
    assert longest == sorted(longest, reverse=True)
    assert sum(map(sum, streams)) == sum(lengths)
    assert len(packed_rounds(4, lengths, [1] * 13, [0] * 13, short=250, cap=400, most=3)) == 1


def test_short_sequences_are_joined_up_to_the_cap() -> None:
    made = packed_rounds(2, [100] * 10 + [900], [2] * 11, [0] * 11, short=200, cap=300, most=9)
    sizes = [sum(100 if i < 10 else 900 for i in one.groups[0]) for one in made]
    assert sizes == [900, 300, 300, 300, 100]


@pytest.mark.slow
def test_a_plan_can_be_drawn_and_summed_up() -> None:
    plan = flex_ulysses([5000, 300, 200, 700, 900, 1000], 8)
    figure = draw(plan)
    assert len(figure.axes) == 3
    for axis, loads in zip(figure.axes, (plan.compute(), plan.memory(), sent(plan)), strict=True):
        tops = np.zeros(8)
        for bar in axis.patches:
            assert isinstance(bar, Rectangle)
            tops[round(bar.get_x() + 0.5)] += bar.get_height()
        mean = (plan.compute() if axis is figure.axes[0] else plan.memory()).mean()
        np.testing.assert_allclose(tops, loads / mean, rtol=1e-9, atol=1e-12)
    assert "6 sequences on 8 devices" in summary(plan)


def test_the_shared_mixes(shared) -> None:
    for case in json.loads((shared / "data" / "lengths" / "flexrl_mixes.json").read_text()):
        lengths = [sequence["length"] for sequence in case["sequences"]]
        fixed = ulysses(lengths, case["devices"], Limits(num_heads=28))
        plan = flex_ulysses(lengths, case["devices"], Limits(num_heads=28))
        assert plan.balance <= 1.03
        assert plan.memory_ratio <= 1.10 * (1 + 1e-9)
        share = 0.85 if case["name"].startswith("image_heavy") else 0.35
        assert traffic(plan) <= share * traffic(fixed), case["name"]


# --- what FlexUlysses is compared with: as published, and checked by hand ---------------------------


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
