"""Units of the vision tower: spread evenly, near the tokens that wait for them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turns import third_of

from sharding.planner.packing import longest_first
from sharding.planner.vision_units import spread_vision

RUN = st.tuples(st.integers(1, 40), st.sampled_from([16, 64, 100, 256, 999]), st.integers(0, 7), st.integers(0, 2))


def units(runs: list[tuple[int, int, int, int]]) -> tuple[list[int], list[int], list[int]]:
    """(count, patches, device, log2 degree) of each run -> units, home_first, home_degree on 8 devices."""
    rows = [(size, device >> k << k, 1 << k) for count, size, device, k in runs for _ in range(count)]
    units, home_first, home_degree = map(list, zip(*rows, strict=True))
    return units, home_first, home_degree


def home_patches(device: np.ndarray, sizes: list[int], home_first: list[int], home_degree: list[int]) -> int:
    """Patches computed on a device that holds part of their sequence; the features of the others all travel."""
    first = np.array(home_first, int)
    home = (first <= device) & (device < first + np.array(home_degree, int))
    return int(np.array(sizes, np.int64)[home].sum())


@pytest.mark.long
@settings(max_examples=third_of(150), deadline=None)
@given(st.lists(RUN, min_size=1, max_size=12), st.sampled_from([0, 4]))
def test_units_are_even_within_their_replica(runs: list[tuple[int, int, int, int]], replica: int) -> None:
    sizes, first, degree = units(runs)
    devices = spread_vision(sizes, first, degree, 8, replica=replica)
    again = spread_vision(np.array(sizes), np.array(first), np.array(degree), 8, replica=replica)
    np.testing.assert_array_equal(devices, again)
    block = replica or 8
    for base in range(0, 8, block):
        own = [u for u in range(len(sizes)) if first[u] // block == base // block]
        assert all(base <= devices[u] < base + block for u in own)
        loads = np.bincount(devices, sizes, 8)[base : base + block]
        amounts = np.array([sizes[u] for u in own], float)
        plain = np.bincount(longest_first(amounts, block), amounts, block) if own else np.zeros(block)
        assert loads.max() <= max(1.05 * loads.mean(), plain.max()) + 1e-6


def test_frames_of_a_video_fill_their_home_first() -> None:
    first, degree = [0] * 40 + [4] * 40, [4] * 80
    devices = spread_vision([100] * 80, first, degree, 8)
    assert home_patches(devices, [100] * 80, first, degree) == 8000
    assert np.bincount(devices).tolist() == [10] * 8
    devices = spread_vision([100] * 80, [0] * 80, [1] * 80, 8)  # all tokens on device 0: nearly all features travel
    assert np.bincount(devices).max() <= 10.5
    assert home_patches(devices, [100] * 80, [0] * 80, [1] * 80) >= 1000


def test_a_text_only_device_takes_its_part() -> None:
    devices = spread_vision([64] * 100, [2] * 100, [2] * 100, 4)
    counts = np.bincount(devices)
    assert counts.min() >= 24 and counts.max() <= 1.05 * 25  # up to 1.05 of the mean may stay home
    assert home_patches(devices, [64] * 100, [2] * 100, [2] * 100) == 64 * counts[2:].sum() >= 3200


def test_one_large_unit_sets_the_bound() -> None:
    sizes = [1000, 10, 10, 10]
    assert np.bincount(spread_vision(sizes, [0, 0, 0, 0], [1, 1, 1, 1], 4), sizes).max() == 1000


def test_nothing_to_spread() -> None:
    assert spread_vision([], [], [], 4).tolist() == []
