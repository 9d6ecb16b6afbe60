"""Which layers of a streamed model stay on the device, and when the others travel."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_cases import TEXT
from streamed_program import CONFIG as SEVEN

from rollout.engine import EngineError
from rollout.streamed import (
    PARTS,
    DeviceSpeed,
    layer_weights,
    pass_bytes,
    resident_layers,
    streamed_places,
    travel,
)

LAYER = 2 * layer_weights(SEVEN)  # bytes in bfloat16
PLENTY = float("inf")


def chosen(tokens, free_bytes=PLENTY, rows=1):
    pace = DeviceSpeed()
    compute = pace.compute_seconds(SEVEN, rows, tokens, 0, LAYER)
    return resident_layers(28, LAYER, compute, pace.transfer_seconds(LAYER), free_bytes)


def test_a_7b_judge_on_an_h100():
    assert 465e6 < LAYER < 467e6
    assert chosen(32768) == 0  # a layer computes for longer than it travels
    assert chosen(8192) in (0, 14)
    assert chosen(4096) in (14, 19)
    assert chosen(512) == 28  # nothing would hide the transfers
    assert chosen(512, 10 * LAYER) == 8  # all that fit beside two buffers
    with pytest.raises(EngineError, match="needs room for 2 layers"):
        chosen(512, 1.9 * LAYER)


@given(
    st.integers(1, 80),
    st.floats(1e-4, 1e4),
    st.floats(1e-4, 1e4),
    st.floats(2, 100),
    st.floats(1, 10),
    st.floats(1, 10),
)
def test_it_is_monotone_and_fits(layers, compute, transfer, free, longer, larger):
    size = 1000
    resident = resident_layers(layers, size, compute, transfer, free * size)
    assert 0 <= resident <= layers
    assert resident == layers or (resident + 2) * size <= free * size
    assert resident_layers(layers, size, compute, transfer, free * larger * size) >= resident
    assert resident_layers(layers, size, compute * longer, transfer, free * size) <= resident
    if free >= layers and transfer > PARTS * compute:
        assert resident == layers
    if transfer <= compute and layers > 2:
        assert resident == 0


@given(st.integers(1, 64), st.data())
def test_each_streamed_layer_travels_once_and_is_there_in_time(layers, data):
    resident = data.draw(st.integers(0, layers))
    streamed = streamed_places(layers, resident)
    assert len(set(streamed)) == layers - resident and (not streamed or streamed[0] == 0)
    plan = travel(layers, streamed)
    assert len(plan) == layers
    if not streamed:
        assert all(parts == () for _, parts in plan)
        return
    edges = [*streamed, layers]
    gaps = [stop - start for start, stop in itertools.pairwise(edges)]
    assert max(gaps) - min(gaps) <= 1
    for (start, stop), gap in zip(itertools.pairwise(edges), gaps, strict=True):
        during = plan[start:stop]
        assert {target for target, _ in during} == {stop % layers}
        assert [part for _, parts in during for part in parts] == list(range(PARTS))
        assert max(len(parts) for _, parts in during) == -(-PARTS // gap)


def test_costs_grow_with_the_batch():
    pace = DeviceSpeed(flops=1e9, memory_bytes=1e9, link_bytes=1e9)
    text = TEXT.text
    short, long, behind = (pace.compute_seconds(text, 1, *tokens, 1000) for tokens in ((100, 0), (200, 0), (100, 50)))
    assert 2 * short < long and short < behind
    assert pace.compute_seconds(text, 1, 1, 0, 10**9) == 1.0  # its weights are read
    one, two, three = (pass_bytes(text, rows, 64, 0, 4) for rows in (1, 2, 3))
    assert two > one > 4 * layer_weights(text) and three - two == two - one
    assert pass_bytes(text, 1, 64, 16, 4) - pass_bytes(text, 1, 64, 0, 4) == 4 * 80 * 2 * 2 * 16
    with pytest.raises(EngineError, match="a pace needs positive"):
        DeviceSpeed(flops=0.0)
