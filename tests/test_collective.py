"""Sequences that no single device holds (`sharding.strategy=odc`): all devices compute them together, and nothing else
but what fills devices left idle; nothing lost, nothing beyond a device's row and patches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_cases import MODEL, compose, make_config, make_groups, owners, works

from fluxjax.batch.composition import plan_metrics, unpack
from fluxjax.config import ConfigError, Strategy
from sharding.planner.vision_units import surely_hold
from sharding.spread.shapes import ShapeBook

ROOM, PATCHES = 80, 96  # of a device
UNIQUE = 1 << 30  # a vocabulary so large that no token of a response is drawn twice


def odc(degree=0, share=True):
    config = make_config(ROOM // 2, 2, PATCHES, share)
    config.sharding.strategy, config.sharding.max_degree = Strategy.ODC, degree
    return config


def composed(contents, lengths, devices, config=None, vision=None, seed=0):
    groups, prepared = make_groups(contents, lengths, seed, UNIQUE)
    return groups, compose(groups, prepared, config or odc(), devices, vision=vision, text=MODEL.text)


def plans(composition):
    """Those of the collective microbatches."""
    return [microbatch.layout.plan for microbatch in composition.microbatches if microbatch.owner is None]


def places(composition):
    """The number of the microbatch of each response, by (draw, sample)."""
    shapes = [batch.loss_weights_BT.shape for batch in composition.batches]
    found = unpack(composition, [np.full(shape, number) for number, shape in enumerate(shapes)])
    assert all(len(set(numbers)) == 1 for numbers in found.values())
    return {key: int(numbers[0]) for key, numbers in found.items()}


def check_responses(groups, composition):
    """Every token of every response is there once, where `unpack` finds it."""
    wanted = {(s.response.draw, s.response.sample): s.response for group in groups for s in group.samples}
    wanted = {key: response for key, response in wanted.items() if response.token_ids}
    tokens = unpack(composition, [batch.inputs.tokens_BT for batch in composition.batches])
    assert len(composition.keys) == len(wanted)
    assert {key: ids.tolist() for key, ids in tokens.items()} == {k: list(r.token_ids) for k, r in wanted.items()}
    trained = sum(int((batch.loss_weights_BT != 0).sum()) for batch in composition.batches)
    assert trained == sum(len(response.token_ids) for response in wanted.values())


def check_buffers(composition, devices, config):
    """Collective ones first, then in order of device and work; every row and its patches within a device's."""
    whose, work = owners(composition), works(composition)
    count = whose.count(None)
    assert len(whose) == len(work) == len(composition.batches) and set(whose) <= {None, *range(devices)}
    assert all(owner is None for owner in whose[:count]) and min(work) > 0
    own = [*zip(whose[count:], work[count:], strict=True)]
    assert own == sorted(own, key=lambda pair: (pair[0], -pair[1]))
    for owner, batch in zip(whose, composition.batches, strict=True):
        rows, columns = batch.inputs.tokens_BT.shape
        assert rows == (devices if owner is None else 1) and columns <= ROOM
        degrees = {degree for degree, _ in batch.inputs.spread.rounds}
        assert max(degrees) <= (config.sharding.max_degree or devices) if owner is None else degrees == {1}
        if batch.inputs.vision is not None:
            assert batch.inputs.vision.num_patches <= rows * PATCHES


# Strategies draw plain numbers only: run-time type checks draw random numbers, which hypothesis forbids inside them.
media = st.sampled_from([(1, 2, 2), (1, 6, 4), (2, 4, 4), (5, 4, 6), (3, 8, 6)])  # 4 to 144 patches
text_case = st.lists(
    st.tuples(
        st.lists(st.one_of(st.integers(1, 12), st.integers(60, 90)), min_size=1, max_size=1),
        st.lists(st.one_of(st.integers(0, 20), st.integers(60, 150)), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=9,
)
vision_case = st.lists(
    st.tuples(
        st.lists(st.one_of(st.integers(1, 40), media), min_size=1, max_size=3),
        st.lists(st.one_of(st.integers(0, 9), st.integers(20, 90)), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=7,
)
options = {
    "seed": st.integers(0, 99),
    "devices_degree": st.sampled_from([(1, 0), (2, 0), (3, 0), (4, 0), (4, 2), (6, 0), (8, 2), (8, 4)]),
    "share": st.booleans(),
}


def build(case):
    lengths = [[*sizes] for _, sizes in case]
    lengths[0][0] = max(lengths[0][0], 1)
    return [[*content] for content, _ in case], lengths


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(case=text_case, **options)
def test_only_what_is_too_long_and_what_fills_is_collective(case, seed, devices_degree, share):
    contents, lengths = build(case)
    devices, degree = devices_degree
    config, most = odc(degree, share), degree or min(devices & -devices, MODEL.text.num_heads)
    if any(content[0] + n > most * ROOM for content, sizes in zip(contents, lengths, strict=True) for n in sizes if n):
        with pytest.raises(ConfigError, match=r"prompt-\d+: .*tokens_per_row \* packing.rows_per_device"):
            composed(contents, lengths, devices, config)
        return
    groups, composition = composed(contents, lengths, devices, config, seed=seed)
    check_responses(groups, composition)
    check_buffers(composition, devices, config)
    together = {key for key, number in places(composition).items() if composition.microbatches[number].owner is None}
    sizes = {(100 + 3 * i, k): contents[i][0] + n for i, own in enumerate(lengths) for k, n in enumerate(own) if n}
    assert {key for key, size in sizes.items() if size > ROOM} <= together
    for plan in plans(composition):
        rows, needed = np.zeros(devices), np.zeros(devices)
        for n, p, first in zip(plan.lengths, plan.degrees, plan.firsts, strict=True):
            rows[first : first + p] += n / p
            needed[first : first + p] += n / p if n > ROOM else 0
            assert n > ROOM or p == 1
        assert needed.any() and rows.max() < needed.max() + 1  # chunks are rounded up to a token


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(case=vision_case, **options)
def test_media_keep_within_their_buffers_too(case, seed, devices_degree, share):
    contents, lengths = build(case)
    devices, degree = devices_degree
    config, replica = odc(degree, share), devices & -devices
    patches = [sum(t * h * w for t, h, w in (p for p in content if isinstance(p, tuple))) for content in contents]
    if not all(surely_hold(n, 48, replica, PATCHES) for n in patches):
        return  # refused before, with the prompt (`data.prepare.Limits`)
    groups, prepared = make_groups(contents, lengths, seed, UNIQUE)
    most = degree or min(replica, MODEL.text.num_heads)
    sizes = [len(prepared[g.prompt.draw].inputs) + max(len(s.response.token_ids) for s in g.samples) for g in groups]
    if max(sizes) > most * ROOM:
        return
    groups, composition = composed(contents, lengths, devices, config, MODEL.vision, seed)
    check_responses(groups, composition)
    check_buffers(composition, devices, config)
    where = places(composition)
    for index, group in enumerate(groups):
        for sample in (s.response for s in group.samples if s.response.token_ids):
            if patches[index] > PATCHES:
                assert composition.microbatches[where[sample.draw, sample.sample]].owner is None


def test_devices_that_the_long_sequence_leaves_idle_compute_shorter_ones():
    contents, lengths = [[10], [10], [4], [4], [4], [9], [30]], [[110], [40], [20, 19], [30], [3, 2], [44], [45]]
    _, composition = composed(contents, lengths, 8, odc(degree=2))
    [plan] = plans(composition)
    assert plan.lengths == (120, 53, 50, 43, 34, 9) and plan.degrees == (2, 1, 1, 1, 1, 1)  # 60 tokens a device
    assert plan.firsts == (0, 2, 3, 4, 5, 6)
    assert composition.batches[0].inputs.tokens_BT.shape == (8, 64)
    assert len(composition.batches) == 2 and owners(composition)[1] in range(8)  # 75 tokens alone, none at 7 others
    metrics = plan_metrics(composition, 8)
    assert metrics["sharding/collective"] == 1 and metrics["sharding/sharded_tokens"] == pytest.approx(120 / 384)
    assert (metrics["sharding/microbatches_max"], metrics["sharding/microbatches_min"]) == (2, 1)
    busy = sum(plan.compute()) + works(composition)[1]
    assert works(composition)[0] == pytest.approx(plan.compute().max())
    assert metrics["sharding/bubble"] == pytest.approx(1 - busy / (8 * sum(works(composition))))


def test_where_all_devices_share_the_long_sequence_nothing_is_added():
    _, composition = composed([[10]] * 7, [[150], [5], [40], [30], [20], [9], [8]], 4)
    [plan] = plans(composition)
    assert plan.lengths == (160,) and plan.degrees == (4,)
    assert len(composition.keys) == 7 and set(owners(composition)) == {None, 0, 1, 2, 3}


def test_a_step_of_long_sequences_only():
    _, composition = composed([[100], [90]], [[5, 6], [9]], 2)
    assert set(owners(composition)) == {None} and len(composition.keys) == 3
    metrics = plan_metrics(composition, 2)
    assert metrics["sharding/microbatches_max"] == metrics["sharding/microbatches_min"] == len(composition.batches)
    assert 0 <= metrics["sharding/bubble"] < 0.1


def test_responses_of_a_long_prompt_stay_together():
    """Two of four would fit a device behind 70 tokens of prompt, but that would compute the prompt again."""
    _, composition = composed([[70]], [[5, 40, 6, 50]], 4)
    [plan] = plans(composition)
    assert plan.lengths == (171,)
    _, composition = composed([[10]], [[65, 140, 66, 69]], 4)  # here the prompt is the smaller part
    assert sorted(n for plan in plans(composition) for n in plan.lengths) == [150]
    assert len(composition.batches) == 4


def test_shapes_of_one_device_and_of_all_are_remembered_apart():
    config, book = odc(), ShapeBook(odc().sharding.max_shapes)
    groups, prepared = make_groups([[10], [10]], [[150], [5]])
    compose(groups, prepared, config, 4, text=MODEL.text, shapes=book)
    assert {devices: len(own) for devices, own in book.entries.items()} == {4: 1, 1: 1} and len(book) == 2
    again = ShapeBook(config.sharding.max_shapes)
    again.load_state(book.state())
    assert again == book
