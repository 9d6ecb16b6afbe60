"""Microbatches of `sharding.strategy=odc`: one device computes each, and all devices together those with sequences that
no device holds and what fills devices left idle. Nothing is lost, nothing beyond a device's row and patches, and no
device waits long. `test_spread_equivalence` has their loss."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import random_groups
from packing_cases import MODEL, QWEN3_5, TEXT, compose, make_config, make_groups, owners, works
from plan_cases import assert_executable
from turns import third_of

from benchmarks.cost_fit import QWEN2_5_VL_7B, published, save
from fluxjax.batch.composer import MAX_SHAPES, Composer
from fluxjax.batch.composition import packing_metrics, unpack
from fluxjax.batch.work import estimate, mixing_work, model_sizes
from fluxjax.config import FSDP, ODC, ConfigError
from fluxjax.data.prepare import PromptLimits
from sharding.planner.vision_units import surely_hold
from sharding.spread.buffers import size_cost
from sharding.spread.shapes import ShapeBook

pytestmark = pytest.mark.slow

ROOM, PATCHES = 80, 96  # of a device
UNIQUE = 1 << 30  # a vocabulary so large that no token of a response is drawn twice


def odc(tokens_per_row=ROOM // 2, rows=2, patches=PATCHES, share=True, degree=0):
    config = make_config(tokens_per_row, rows, patches, share)
    config.sharding.strategy = ODC(max_degree=degree)
    return config


def composed(contents, lengths, devices, degree=0):
    return compose(*make_groups(contents, lengths, 0, UNIQUE), odc(degree=degree), devices, text=MODEL.text)


def plans(composition):
    """Those of the collective microbatches."""
    return [microbatch.layout.plan for microbatch in composition.microbatches if microbatch.owner is None]


# Strategies draw plain numbers only: run-time type checks draw random numbers, which hypothesis forbids inside them.
def cases(parts, responses, most_parts, most_groups):
    """Prompts of so many parts at most and the lengths of their responses."""
    prompts = st.lists(parts, min_size=1, max_size=most_parts)
    return st.lists(st.tuples(prompts, st.lists(responses, min_size=1, max_size=5)), min_size=1, max_size=most_groups)


media = st.sampled_from([(1, 2, 2), (1, 2, 4), (1, 6, 4), (2, 2, 2), (2, 4, 2)])
large_media = st.sampled_from([(1, 2, 2), (1, 6, 4), (2, 4, 4), (5, 4, 6), (3, 8, 6)])  # 4 to 144 patches
short_text = cases(st.integers(1, 12), st.integers(0, 20), 2, 9)
short_vision = cases(st.one_of(st.integers(1, 6), media), st.integers(0, 9), 3, 7)
long_text = cases(
    st.one_of(st.integers(1, 12), st.integers(60, 90)), st.one_of(st.integers(0, 20), st.integers(60, 150)), 1, 9
)
long_vision = cases(st.one_of(st.integers(1, 40), large_media), st.one_of(st.integers(0, 9), st.integers(20, 90)), 3, 7)
options = {
    "seed": st.integers(0, 99),
    "devices_degree": st.sampled_from([(1, 0), (2, 0), (3, 0), (4, 0), (4, 2), (5, 0), (6, 0), (8, 2), (8, 4)]),
    "share": st.booleans(),
}


def build(case):
    """At least one response of the first group has a token."""
    lengths = [[*sizes] for _, sizes in case]
    lengths[0][0] = max(lengths[0][0], 1)
    return [[*content] for content, _ in case], lengths


@pytest.mark.parametrize(
    ("cases", "vision"), [(short_text, None), (short_vision, MODEL.vision), (long_vision, MODEL.vision)]
)
@settings(deadline=None, max_examples=third_of(50))
@given(data=st.data(), **options)
def test_every_response_is_there_once(cases, vision, data, seed, devices_degree, share):
    check(data.draw(cases), vision, seed, devices_degree, share)


@pytest.mark.long
@settings(deadline=None, max_examples=third_of(60))
@given(case=long_text, **options)
def test_only_what_is_too_long_and_what_fills_is_collective(case, seed, devices_degree, share):
    composition = check(case, None, seed, devices_degree, share)
    for plan in plans(composition) if composition else ():
        assert_executable(plan)
        rows, needed = np.zeros(devices_degree[0]), np.zeros(devices_degree[0])
        for n, p, first in zip(plan.lengths, plan.degrees, plan.firsts, strict=True):
            rows[first : first + p] += n / p
            needed[first : first + p] += n / p if n > ROOM else 0
            assert n > ROOM or p == 1
        assert needed.any() and rows.max() < needed.max() + 1  # chunks are rounded up to a token


def check(case, vision, seed, devices_degree, share):
    """The composition of a step; None where no devices hold one of its sequences."""
    groups, prepared = make_groups(*build(case), seed, UNIQUE)
    (devices, degree), heads = devices_degree, MODEL.text.num_heads
    config, replica = odc(share=share, degree=degree), devices & -devices
    responses = {(s.response.draw, s.response.sample): s.response for g in groups for s in g.samples}
    responses = {key: response for key, response in responses.items() if response.token_ids}
    sizes = {key: len(prepared[key[0]].inputs) + len(response.token_ids) for key, response in responses.items()}
    media = {draw: getattr(prompt.inputs, "vision", None) for draw, prompt in prepared.items()}
    shown = {draw: vision_input.num_patches if vision_input else 0 for draw, vision_input in media.items()}
    if not all(surely_hold(n, 48, replica, PATCHES) for n in shown.values()):
        return None  # refused before, with the prompt (`data.prepare.Limits`)
    if max(sizes.values()) > (degree or min(replica, heads)) * ROOM:
        with pytest.raises(ConfigError, match=r"prompt-\d+: .*tokens_per_row \* packing.rows_per_device"):
            compose(groups, prepared, config, devices, vision=vision, text=MODEL.text)
        return None
    composition = compose(groups, prepared, config, devices, vision=vision, text=MODEL.text)
    check_microbatches(composition, vision, devices, degree)
    check_responses(composition, responses)
    owned = check_prompts(composition, prepared, share, responses, devices)
    assert all(sizes[key] <= ROOM and shown[key[0]] <= PATCHES for key in owned)
    return composition


def check_responses(composition, responses):
    """Every token of every response is there once, where `unpack` finds it."""
    batches = composition.batches
    assert sorted(composition.keys) == sorted(responses)
    trained = sum(int((batch.loss_weights_BT != 0).sum()) for batch in batches)
    assert trained == sum(len(response.token_ids) for response in responses.values())
    assert sum(batch.loss_weights_BT.sum(dtype=np.float64) for batch in batches) == pytest.approx(1.0, rel=1e-5)
    tokens = unpack(composition, [batch.inputs.tokens_BT for batch in batches])
    logprobs = unpack(composition, [batch.behaviour_logprobs_BT for batch in batches])
    for key, response in responses.items():
        assert tokens[key].tolist() == list(response.token_ids)
        assert logprobs[key].tolist() == list(response.logprobs)


def check_microbatches(composition, vision, devices, degree):
    """Collective ones first, then in order of device and work; every row and its patches within a device's, and never
    empty."""
    whose, work = owners(composition), works(composition)
    count = whose.count(None)
    assert len(whose) == len(work) == len(composition.batches) and set(whose) <= {None, *range(devices)}
    assert all(microbatch.layout is not None for microbatch in composition.microbatches)
    assert all(owner is None for owner in whose[:count]) and min(work) > 0
    own = [*zip(whose[count:], work[count:], strict=True)]
    assert own == sorted(own, key=lambda pair: (pair[0], -pair[1]))
    for owner, inputs in zip(whose, (batch.inputs for batch in composition.batches), strict=True):
        rows, columns = inputs.tokens_BT.shape
        assert rows == (devices if owner is None else 1) and columns <= ROOM and inputs.segments_BT.any()
        degrees = {degree for degree, _ in inputs.spread.rounds}
        assert max(degrees) <= (degree or devices) if owner is None else degrees == {1} and inputs.spread.axes == ()
        assert (inputs.vision is None) == (vision is None)
        assert vision is None or inputs.vision.num_patches <= rows * PATCHES
        assert vision is None or owner is None or not inputs.vision.route.axes


def check_prompts(composition, prepared, share, responses, devices):
    """Every response that one device computes stands behind its own prompt, whose tokens show their own pixels, once in
    a microbatch. Returns the keys of these responses."""
    ends = np.cumsum([batch.inputs.tokens_BT.size for batch in composition.batches])
    firsts = composition.cells[np.cumsum(composition.lengths) - composition.lengths]
    segments, owned = {}, set()
    for key, cell in zip(composition.keys, firsts.tolist(), strict=True):
        number = int(np.searchsorted(ends, cell, side="right"))
        if composition.microbatches[number].owner is None:
            continue
        owned.add(key)
        inputs, prompt = composition.batches[number].inputs, prepared[key[0]].inputs
        column = cell - int(ends[number]) + inputs.tokens_BT.size
        before = inputs.predecessor_BT[0]
        chain = [int(before[column])]
        while before[chain[-1]] != chain[-1]:
            chain.append(int(before[chain[-1]]))
        chain = chain[::-1]
        assert inputs.tokens_BT[0, chain].tolist() == prompt.token_ids_T.tolist()
        assert set(inputs.segments_BT[0, chain].tolist()) == {int(inputs.segments_BT[0, column])}
        assert not inputs.branches_BT[0, chain].any() and bool(inputs.branches_BT[0, column]) == share
        shown, own = inputs.feature_index_BT[0, chain], prompt.feature_index_T
        np.testing.assert_array_equal(shown >= 0, own >= 0)
        if prompt.vision is not None:
            size = (-1, MODEL.vision.merge_unit * MODEL.vision.patch_values)
            pixels = inputs.vision.patches_PX.reshape(size)[shown[shown >= 0]]
            np.testing.assert_array_equal(pixels, prompt.vision.patches_PX.reshape(size)[own[own >= 0]])
        segments.setdefault(key[0], set()).add((number, int(inputs.segments_BT[0, column])))
    for draw, places in segments.items():
        lengths = [len(response.token_ids) for key, response in responses.items() if key[0] == draw and key in owned]
        if not share:
            assert len(places) == len(lengths)
        elif devices == 1 and len(prepared[draw].inputs) + sum(lengths) <= 80:
            assert len(places) == 1  # nothing would be gained by computing the prompt again
    if composition.batches[0].inputs.vision is not None:
        for number, batch in enumerate(composition.batches):
            if composition.microbatches[number].owner is None:
                continue
            there = {draw for draw, places in segments.items() if number in {place for place, _ in places}}
            media = [prepared[draw].inputs.vision for draw in there]
            patches = sum(one.num_patches for one in media if one is not None)
            assert np.count_nonzero(batch.inputs.vision.frame_segments_P) == patches
    return owned


@settings(deadline=None, max_examples=third_of(15))
@given(case=short_vision, seed=options["seed"], devices=st.integers(1, 6), share=options["share"])
def test_order_of_arrival_does_not_matter(case, seed, devices, share):
    groups, prepared = make_groups(*build(case), seed)
    first, second = (
        compose(some, prepared, odc(share=share), devices, vision=MODEL.vision, text=MODEL.text)
        for some in (groups, groups[::-1])
    )
    assert first.keys == second.keys and owners(first) == owners(second) and works(first) == works(second)
    assert jax.tree.structure(first.batches) == jax.tree.structure(second.batches)
    for one, other in zip(jax.tree.leaves(first.batches), jax.tree.leaves(second.batches), strict=True):
        np.testing.assert_array_equal(one, other)


def test_media_split_what_tokens_would_let_stand_together():
    groups, prepared = make_groups([[3, (1, 8, 6)]] * 4 + [[3]], [[4]] * 5)  # 48 patches each, two fit
    config = odc(tokens_per_row=200, patches=99)
    composition = compose(groups, prepared, config, 1, vision=MODEL.vision, text=MODEL.text)
    used = [np.count_nonzero(batch.inputs.vision.frame_segments_P) for batch in composition.batches]
    assert used == [96, 96] and owners(composition) == (0, 0)
    assert works(composition)[0] > works(composition)[1]  # the text is in the first one


def test_devices_may_have_no_microbatch():
    groups, prepared = make_groups([[9], [9]], [[4], [4]])
    composition = compose(groups, prepared, odc(), 5, text=MODEL.text)
    assert len(composition.batches) == 2 and len(set(owners(composition))) == 2
    metrics = packing_metrics([composition], 5)
    assert metrics["sharding/bubble"] == pytest.approx(3 / 5)
    assert (metrics["sharding/microbatches_max"], metrics["sharding/microbatches_min"]) == (1, 0)
    assert 0 <= metrics["sharding/mlp_padding"] < 1


def test_groups_are_cut_where_devices_would_wait():
    groups, prepared = make_groups([[6], [6]], [[9] * 6, [9] * 6])
    composition = compose(groups, prepared, odc(), 4, text=MODEL.text)
    assert owners(composition) == (0, 1, 2, 3) and packing_metrics([composition], 4)["sharding/bubble"] < 0.01
    prompts = sum(len(np.unique(b.inputs.segments_BT[b.inputs.segments_BT != 0])) for b in composition.batches)
    assert prompts == 4
    many, prepared = make_groups([[6]] * 8, [[9] * 6] * 8)
    assert len(compose(many, prepared, odc(), 4, text=MODEL.text).batches) == 8  # even as they are


def test_devices_have_as_many_microbatches_as_they_need():
    groups, prepared = make_groups([[75], [36], [36], [75]], [[5]] * 4)  # 80, 41, 41, 80 tokens
    composition = compose(groups, prepared, odc(), 3, text=MODEL.text)
    assert sorted(np.bincount(owners(composition)).tolist()) == [1, 1, 2]
    assert packing_metrics([composition], 3)["sharding/bubble"] < 0.05


def test_few_shapes_over_all_devices_and_steps():
    config = odc(tokens_per_row=200, patches=512)
    book = ShapeBook(4)
    shapes = set()
    for step in range(60):
        groups, prepared = random_groups(step)
        composition = compose(groups, prepared, config, 1 + step % 6, vision=MODEL.vision, text=MODEL.text, shapes=book)
        if step >= 30:
            shapes |= {(b.inputs.tokens_BT.shape, b.inputs.vision.num_patches) for b in composition.batches}
        assert len(book) <= 4
    assert len(shapes) <= 5  # four, and the last one as it was before it grew


def test_what_no_device_holds_is_refused():
    groups, prepared = make_groups([[4], [70]], [[3], [5, 11]])
    said = r"prompt-103: 70 .* 11 make 81.*tokens_per_row \* packing.rows_per_device = 80"
    with pytest.raises(ConfigError, match=said):
        compose(groups, prepared, odc(), 3, text=MODEL.text)  # of an odd number, no two compute a sequence together
    groups, prepared = make_groups([[4], [70]], [[3], [5, 91]])
    with pytest.raises(ConfigError, match=r"prompt-103: .* make 161.*packing.rows_per_device \* 2 devices = 160"):
        compose(groups, prepared, odc(degree=2), 8, text=MODEL.text)
    groups, prepared = make_groups([[4, (1, 10, 10)]], [[3]])
    with pytest.raises(ConfigError, match=r"prompt-100: .* 100 patches.* packing\.patches_per_device = 96"):
        compose(groups, prepared, odc(patches=99), 3, vision=MODEL.vision, text=MODEL.text)
    with pytest.raises(ConfigError, match=r"packing\.patches_per_device = 99"):
        compose(groups, prepared, odc(patches=99), 2, vision=MODEL.vision, text=MODEL.text)  # one image, one device


def test_a_rollout_longer_than_the_devices_of_a_sequence_hold_is_refused_at_the_start():
    config = odc()
    config.rollout.max_sequence_tokens = 320
    Composer(config, 4, None, MODEL.text).check()
    config.rollout.max_sequence_tokens = 321
    with pytest.raises(ConfigError, match=r"max_sequence_tokens is 321, but the 4 devices .* hold 320"):
        Composer(config, 8, None, MODEL.text).check()  # it has four heads


def test_a_prompt_has_the_patches_of_all_devices():
    config = odc(patches=96)
    config.sharding.devices = 12
    assert PromptLimits.of(config).devices == 4
    config.sharding.strategy = FSDP()
    assert PromptLimits.of(config).devices == 1


def test_work_counts_attention_linear_layers_and_media(tmp_path):
    tokens, squares, patches = np.array([100.0]), np.array([1e4]), np.array([40.0])
    config, text, vision = odc(), MODEL.text, MODEL.vision
    assert estimate(config, None, vision)(tokens, squares, patches) == 24576.0 * 100 + 1e4
    sizes = model_sizes(config, text, vision)
    layer = 32 * (2 * 4 * 16 + 2 * 2 * 16) + 3 * 32 * 48
    flops = 2 * 100 * (2 * layer + 32 * 64) + 2 * 1e4 / 2 * 2 * 4 * 16 * 2
    assert estimate(config, text, None)(tokens, squares, patches) == pytest.approx(flops)
    with_media = estimate(config, text, vision)(tokens, squares, patches)
    assert with_media == pytest.approx(flops + 40 * sizes.vision_flops())

    save(published(), tmp_path / "h800.json")
    config.sharding.calibration = str(tmp_path / "h800.json")
    cost = published().of(sizes)
    wanted = cost.attention_seconds(100) + cost.linear_seconds(100) + cost.vision_seconds(40)
    assert estimate(config, text, vision)(tokens, squares, patches) == pytest.approx(float(wanted))


def test_a_plan_counts_states_by_tokens_and_what_they_send():
    """Three of four layers have states of 4 heads, 16 x 12; the fourth has attention with 4 heads of 12."""
    lengths, squares = [10, 20], [100.0, 400.0]
    state = 3 * 4 * (3 * 16 * 12 + 64 * (16 + 12)) / (4 * 12)
    assert mixing_work(QWEN3_5.text, lengths, squares).tolist() == [100 + 10 * state, 400 + 20 * state]
    assert mixing_work(MODEL.text, lengths, squares).tolist() == mixing_work(None, lengths, squares).tolist() == squares
    sizes = model_sizes(odc(), QWEN3_5.text)
    channels, gates, outputs = 2 * 2 * 16 + 4 * 12, 2 * 4, 4 * 12
    assert (sizes.state_layers, sizes.state_bytes) == (3, 4 * (channels + gates + outputs))
    cost = published()
    seconds, plain = (cost.of(s).all_to_all_seconds(64, 2) for s in (sizes, dataclasses.replace(sizes, state_layers=0)))
    sent = 64 * sizes.state_bytes / 4
    assert seconds - plain == pytest.approx(3 * cost.within.seconds(sent, 2 * sent))


def test_the_weight_of_a_token_is_near_what_was_measured():
    """ODC's fit to times of a 7B model, in units of its attention: 8.768 / 4.348 * 32000 a token."""
    size = QWEN2_5_VL_7B
    widths = {"vocab_size": size.vocabulary, "hidden_size": size.width, "intermediate_size": size.mlp}
    heads = {"num_heads": size.heads, "num_kv_heads": size.kv_heads, "head_dim": size.head_size}
    text = dataclasses.replace(TEXT.text, num_layers=size.layers, **widths, **heads)
    work = estimate(odc(), text, None)
    one, none = np.ones(1), np.zeros(1)
    assert float((work(one, none, none) / work(none, one, none))[0]) == pytest.approx(8.768 / 4.348 * 32000, rel=0.1)


def test_devices_that_the_long_sequence_leaves_idle_compute_shorter_ones():
    contents, lengths = [[10], [10], [4], [4], [4], [9], [30]], [[110], [40], [20, 19], [30], [3, 2], [44], [45]]
    composition = composed(contents, lengths, 8, 2)
    [plan] = plans(composition)
    assert plan.lengths == (120, 53, 50, 43, 34, 9) and plan.degrees == (2, 1, 1, 1, 1, 1)  # 60 tokens a device
    assert plan.firsts == (0, 2, 3, 4, 5, 6)
    assert composition.batches[0].inputs.tokens_BT.shape == (8, 64)
    assert len(composition.batches) == 2 and owners(composition)[1] in range(8)  # 75 tokens alone, none at 7 others
    metrics = packing_metrics([composition], 8)
    assert metrics["sharding/collective"] == 1 and metrics["sharding/sharded_tokens"] == pytest.approx(120 / 384)
    assert (metrics["sharding/microbatches_max"], metrics["sharding/microbatches_min"]) == (2, 1)
    busy = sum(plan.compute()) + works(composition)[1]
    assert works(composition)[0] == pytest.approx(plan.compute().max())
    assert metrics["sharding/bubble"] == pytest.approx(1 - busy / (8 * sum(works(composition))))


def test_where_all_devices_share_the_long_sequence_nothing_is_added():
    composition = composed([[10]] * 7, [[150], [5], [40], [30], [20], [9], [8]], 4)
    [plan] = plans(composition)
    assert plan.lengths == (160,) and plan.degrees == (4,)
    assert len(composition.keys) == 7 and set(owners(composition)) == {None, 0, 1, 2, 3}


def test_a_step_of_long_sequences_only():
    composition = composed([[100], [90]], [[5, 6], [9]], 2)
    assert set(owners(composition)) == {None} and len(composition.keys) == 3
    metrics = packing_metrics([composition], 2)
    assert metrics["sharding/microbatches_max"] == metrics["sharding/microbatches_min"] == len(composition.batches)
    assert 0 <= metrics["sharding/bubble"] < 0.1


def test_responses_of_a_long_prompt_stay_together():
    """Two of four would fit a device behind 70 tokens of prompt, but that would compute the prompt again."""
    composition = composed([[70]], [[5, 40, 6, 50]], 4)
    [plan] = plans(composition)
    assert plan.lengths == (171,)
    composition = composed([[10]], [[65, 140, 66, 69]], 4)  # here the prompt is the smaller part
    assert sorted(n for plan in plans(composition) for n in plan.lengths) == [150]
    assert len(composition.batches) == 4


def test_a_process_compiles_ahead_for_the_microbatches_of_its_own_devices():
    composer = Composer(odc(), 2, text=MODEL.text)
    step = composer.outline(*make_groups([[9], [9], [9]], [[4], [4], [4]]))
    coming = tuple(dataclasses.replace(outline, coming=outline.sizes) for outline in step.micros)
    for share in dataclasses.replace(step, micros=coming).cut(2):
        composition = composer.lay_out(share)
        assert composition.elsewhere and composition.batches
        for now, then in zip(composition.batches, composition.coming, strict=True):
            jax.tree.map(np.testing.assert_array_equal, now, then)


def test_shapes_of_one_device_and_of_all_are_remembered_apart():
    config, book = odc(), ShapeBook(MAX_SHAPES)
    groups, prepared = make_groups([[10], [10]], [[150], [5]])
    compose(groups, prepared, config, 4, text=MODEL.text, shapes=book)
    assert {devices: len(own) for devices, own in book.entries.items()} == {4: 1, 1: 1} and len(book) == 2
    again = ShapeBook(MAX_SHAPES)
    again.load_state(book.state())
    assert again == book


def test_sizes_of_an_earlier_release_are_not_taken_over():
    """Spread streams counted chunks, which no size counts today; rows count them still."""
    spread, rows = {"columns": 512, "round/1/0": 512, "chunks": 24}, {"columns": 512, "rows": 2, "chunks": 24}
    book = ShapeBook(MAX_SHAPES)
    book.load_state({"entries": {"1": [spread, rows]}, "coming": [[1, spread, 3], [1, rows, 4]]})
    assert book.entries == {1: [rows]} and book.coming == [(1, rows, 4)]
    needs = {"columns": 500, "round/1/0": 500, "runs": 8}
    assert "chunks" not in book.fit(needs, {"columns": 1024}, size_cost)
