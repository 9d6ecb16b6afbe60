"""Layouts: every token has its own cell, views cover their round, predecessors and features are found again."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from turns import third_of

from benchmarks.dynamic_packing import packed_rounds
from sharding.mesh import binary_axes, make_mesh
from sharding.planner.plan import PlanError, ShardPlan
from sharding.spread.buffers import SizedLayout, lay, size_cost
from sharding.spread.route import crossings, route
from sharding.spread.shapes import ShapeBook, round_up

DEVICES = 8


@st.composite
def choices(draw):
    """(lengths, degrees, firsts, rounds a degree) of a plan; it is made in the test (beartype draws random numbers)."""
    count = draw(st.integers(1, 12))
    lengths = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    degrees = [1 << draw(st.integers(0, 3)) for _ in range(count)]
    firsts = [draw(st.integers(0, DEVICES // degree - 1)) * degree for degree in degrees]
    return lengths, degrees, firsts, draw(st.integers(1, 3))


def make_plan(lengths, degrees, firsts, most=1, devices=DEVICES) -> ShardPlan:
    packed = packed_rounds(devices, lengths, degrees, firsts, short=20, cap=50, most=most)
    work = tuple(float(n * n) for n in lengths)
    return ShardPlan(devices, tuple(lengths), work, tuple(degrees), tuple(firsts), packed)


def sized(plan, **exports) -> SizedLayout:
    layout = lay(plan)
    return SizedLayout(layout, {name: round_up(need) for name, need in (layout.needs() | exports).items()})


def streams(layout: SizedLayout):
    """(round, group, cells of its stream in the order of devices and columns)."""
    for j, round in enumerate(layout.plan.rounds):
        for group in range(len(round.groups)):
            cells = [
                device * layout.columns + layout.starts[device, j] + np.arange(layout.counts[device, j])
                for device in range(group * round.degree, (group + 1) * round.degree)
            ]
            yield round, group, np.concatenate(cells)


@given(choices())
@settings(deadline=None, max_examples=third_of(60))
def test_every_token_has_its_own_cell_in_the_order_of_its_stream(choice):
    plan = make_plan(*choice)
    layout = sized(plan)
    assert len(np.unique(layout.cells)) == len(layout.cells) == sum(plan.lengths)
    assert layout.cells.max() < plan.num_devices * layout.columns
    ends = np.cumsum(plan.lengths)
    for round, group, cells in streams(layout):
        expected = [layout.cells[ends[i] - plan.lengths[i] : ends[i]] for i in round.groups[group]]
        np.testing.assert_array_equal(cells, np.concatenate(expected) if expected else [])
    used = layout.counts.sum(axis=1)
    np.testing.assert_allclose(used, plan.memory(), atol=len(plan.rounds))  # chunks are rounded up
    budgets = np.array([budget for _, budget in layout.rounds])
    assert (layout.counts <= budgets[None]).all() and budgets.max() <= layout.columns
    assert [degree for degree, _ in layout.rounds] == [round.degree for round in plan.rounds]


@given(choices(), st.integers(0, 2**31))
@settings(deadline=None, max_examples=third_of(60))
def test_predecessors_are_found_in_the_row_or_among_the_exports(choice, seed):
    plan = make_plan(*choice)
    rng = np.random.default_rng(seed)
    ends = np.cumsum(plan.lengths)
    starts = ends - np.array(plan.lengths)
    owner = np.repeat(np.arange(len(plan.lengths)), plan.lengths)
    virtual = rng.integers(starts[owner], ends[owner])  # any token of the same sequence
    layout = sized(plan, exports=sum(plan.lengths))
    columns, spread = layout.spread(virtual)
    exports = spread.exports_BX
    hidden = np.arange(plan.num_devices * layout.columns).reshape(plan.num_devices, -1)  # each token's is its cell
    exported = np.take_along_axis(hidden, exports, axis=1)
    group = plan.rounds[0].degree
    device = layout.cells // layout.columns
    for token in range(len(virtual)):
        members = slice(device[token] // group * group, device[token] // group * group + group)
        seen = np.concatenate([hidden[device[token]], exported[members].reshape(-1)])
        assert seen[columns[token]] == layout.cells[virtual[token]]


def test_a_sequence_that_is_on_one_device_exports_nothing():
    plan = make_plan([5, 3], [1, 1], [0, 1], devices=2)
    before = np.array([0, 0, 1, 2, 3, 5, 5, 6])
    columns, spread = sized(plan).spread(before)
    assert spread.exports_BX.shape == (2, 0)
    assert columns.tolist() == [0, 0, 1, 2, 3, 0, 0, 1]


def test_larger_buffers_and_further_rounds_change_no_place():
    plan = make_plan([9, 4, 3], [4, 2, 1], [0, 6, 5])
    layout = lay(plan)
    needs = layout.needs()
    roomy = SizedLayout(
        layout, {name: 2 * need + 8 for name, need in needs.items()} | {"round/4/1": 8, "round/8/0": 16}
    )
    assert [degree for degree, _ in roomy.rounds] == [8, 4, 4, 2, 1]
    assert not roomy.counts[:, [0, 2]].any()
    tight = SizedLayout(layout, needs)
    np.testing.assert_array_equal(np.divmod(roomy.cells, roomy.columns), np.divmod(tight.cells, tight.columns))


def test_a_device_that_is_too_full_is_named():
    plan = make_plan([50, 3], [1, 1], [1, 0], devices=2)
    with pytest.raises(PlanError, match="device 1 has 50 tokens, more than the 32"):
        lay(plan, 32)


@pytest.mark.parametrize("devices", [1, 2, 6, 8])
def test_features_reach_their_tokens(devices):
    """Random features wanted anywhere in their replica, some several times, some never; gradients return to them."""
    rng = np.random.default_rng(devices)
    rows, wanted = 16, 40
    block = 1 << len(binary_axes(devices))
    source = rng.integers(0, devices, wanted)
    target = source // block * block + rng.integers(0, block, wanted)
    row = rng.integers(0, rows, wanted)
    counts = np.zeros((devices, devices), int)
    np.add.at(counts, (source, target), 1)  # a little more than needed, where a feature is wanted several times
    way, found = route(source, row, target, devices, rows, crossings(counts))
    mesh = make_mesh(devices)
    features = rng.normal(size=(devices * rows, 3)).astype(np.float32)

    spec = P(mesh.axis_names)
    local = jax.shard_map(lambda features, way: way(features), mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    routed = jax.jit(local)
    buffers = np.asarray(routed(features, way)).reshape(devices, -1, 3)
    np.testing.assert_array_equal(buffers[target, found], features.reshape(devices, rows, 3)[source, row])

    weights = rng.normal(size=(wanted, 3)).astype(np.float32)
    flat = target * buffers.shape[1] + found
    grads = jax.grad(lambda f: jnp.sum(routed(f, way)[flat] * weights))(jnp.asarray(features))
    expected = np.zeros((devices * rows, 3))
    np.add.at(expected, source * rows + row, weights)
    np.testing.assert_allclose(grads, expected, atol=1e-5)


def test_features_that_are_at_home_do_not_travel():
    way, found = route(np.arange(4), np.arange(4), np.arange(4), 4, 8, crossings(np.eye(4, dtype=int)))
    assert way.axes == () and found.tolist() == [0, 1, 2, 3]


def test_features_stay_within_their_replica():
    with pytest.raises(ValueError, match="replica of 2"):
        route(np.array([0]), np.array([0]), np.array([5]), 6, 8, {})


@pytest.mark.parametrize("need", [1, 7, 8, 9, 100, 1000, 4097, 100_000])
def test_sizes_waste_at_most_an_eighth(need):
    assert need <= round_up(need) <= need * 1.125 + 8 and round_up(need) % 8 == 0
    assert round_up(round_up(need)) == round_up(need)
    assert round_up(need, cap=need) == need


def one_each(sizes) -> float:
    return float(sum(sizes.values()))


def test_a_shape_that_wastes_little_is_used_again():
    book = ShapeBook(most=3, slack=0.1)
    first = book.fit({"columns": 1000, "round/2/0": 500}, {}, one_each)
    assert book.fit({"columns": 990, "round/2/0": 480}, {}, one_each) is first
    assert book.fit({"columns": 500}, {}, one_each) is not first  # three times its cost
    assert len(book) == 2


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3000)), min_size=1, max_size=60), st.integers(1, 5))
@settings(deadline=None, max_examples=third_of(60))
def test_shapes_cover_what_is_asked_and_are_never_more_than_allowed(requests, most):
    book, caps = ShapeBook(most=most), {"columns": 3000, "round/2/0": 3000}
    given_out = set()
    for columns, sent in requests:
        needs = {"columns": columns} | ({"round/2/0": min(sent, columns)} if sent else {})
        sizes = book.fit(needs, caps, one_each)
        assert all(need <= sizes[name] <= caps[name] for name, need in needs.items())
        given_out.add(tuple(sizes.items()))
    assert len(given_out) <= len(book) <= most

    again = ShapeBook(most=most)
    again.load_state(book.state())
    assert again.fit({"columns": 77}, caps, one_each) == book.fit({"columns": 77}, caps, one_each)


def test_what_has_no_cap_grows_seldom():
    book, given_out = ShapeBook(most=1), set()
    for need in range(1, 3000):
        sizes = book.fit({"columns": 10, "send/s0": need}, {"columns": 64}, one_each)
        assert sizes["columns"] == 64 and sizes["send/s0"] >= need
        given_out.add(sizes["send/s0"])
    assert len(given_out) <= 12  # doubled each time


def test_a_new_shape_differs_from_the_others_in_its_columns_only():
    book = ShapeBook()
    first = book.fit({"columns": 1024, "round/2/0": 300, "patches": 3000, "frame": 256}, {}, one_each)
    assert first["round/2/0"] == 512  # half of the columns
    second = book.fit({"columns": 2048, "round/2/0": 10, "patches": 100, "frame": 64}, {}, one_each)
    assert second == {name: size if name == "frame" else 2 * size for name, size in first.items()}
    third = book.fit({"columns": 512, "patches": 100, "frame": 64}, {}, one_each)
    assert third == {name: size if name == "frame" else size // 2 for name, size in first.items()}


def test_a_book_that_has_served_long_is_content_with_more():
    book = ShapeBook(slack=0.1)
    first = book.fit({"columns": 1000}, {}, one_each)
    for _ in range(300):
        assert book.fit({"columns": 1000}, {}, one_each) is first
    again = ShapeBook(slack=0.1)
    again.load_state(json.loads(json.dumps(book.state())))
    for known in (book, again):
        assert known.fit({"columns": 760}, {}, one_each) == first  # a third more than a new one would have
        assert known.fit({"columns": 600}, {}, one_each) != first
        assert known.fit({"columns": 520}, {}, one_each)["columns"] < 600  # which begins anew


def test_shapes_of_single_devices_and_of_all_share_the_places():
    book, caps = ShapeBook(most=4, alone=3), {"columns": 8192}
    given_out = {
        (devices, book.fit({"columns": columns}, caps, one_each, devices)["columns"])
        for columns in range(1, 8192, 100)
        for devices in (1, 8)
    }
    assert sorted(devices for devices, _ in given_out) == [1, 1, 1, 8]


def test_exact_shapes_are_as_they_are_asked_for_while_there_are_places():
    book, caps = ShapeBook(most=3), {"rows": 8, "columns": 128, "frame": 64}

    def fit(rows, columns, frame):
        needs = {"rows": rows, "columns": columns, "frame": frame}
        return book.fit(needs, caps, lambda sizes: float(sizes["rows"] * sizes["columns"]), exact=True)

    assert fit(2, 128, 16) == {"rows": 2, "columns": 128, "frame": 16}
    assert fit(1, 128, 32) == {"rows": 1, "columns": 128, "frame": 32}
    assert fit(1, 128, 16) == {"rows": 1, "columns": 128, "frame": 32}  # a bound never shrinks
    assert fit(4, 128, 16) == caps  # the last place
    assert fit(2, 64, 16) == {"rows": 2, "columns": 128, "frame": 16}
    assert len(book) == 3


def test_shapes_of_other_devices_or_above_the_caps_of_today_are_not_used():
    book = ShapeBook(most=1)
    large = book.fit({"columns": 1000, "round/8/0": 200}, {}, one_each, devices=8)
    assert book.fit({"columns": 100}, {}, one_each, devices=8) is large  # full
    tight = book.fit({"columns": 100}, {"columns": 128}, one_each, devices=8)
    assert tight["columns"] <= 128
    again = ShapeBook(most=1)
    again.load_state(json.loads(json.dumps(book.state())))
    assert again == book
    assert again.fit({"columns": 100}, {}, one_each, devices=4)["columns"] <= 128  # and leaves those of 8 devices alone
    assert again.entries[8] == book.entries[8] and len(again) == 2


def test_what_an_entry_has_too_much_is_weighed_as_what_it_is():
    """A sharded round of 200 columns that stays empty costs 50 columns' worth: less than a new shape."""
    book = ShapeBook()
    first = book.fit({"columns": 1000, "round/2/0": 200, "round/1/0": 1000, "exports": 8}, {}, size_cost)
    assert book.fit({"columns": 1000, "round/1/0": 1000}, {}, size_cost) is first


def test_entries_of_other_settings_take_no_place():
    book, caps = ShapeBook(most=4), {"columns": 8192}
    for rows in range(1, 9):
        book.fit({"rows": rows, "columns": 128}, {"rows": 8, "columns": 128}, one_each, exact=True)
    again = ShapeBook(most=4)
    again.load_state(book.state())
    assert again.fit({"columns": 1000}, caps, one_each)["columns"] < 1200
    assert len(again) == 1
