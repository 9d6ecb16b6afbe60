"""Attention over spread sequences is plain attention over whole ones, whatever the plan and the heads; and all devices
go through the same collectives."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from turns import by_turns, third_of

from sharding.kernels.attention import Mask, attention
from sharding.kernels.delta import DeltaInputs, delta_rule
from sharding.kernels.delta_heads import DeltaHeads
from sharding.kernels.runs import packed_runs
from sharding.mesh import binary_axes, make_mesh
from sharding.planner.plan import PlanError, Round, ShardPlan
from sharding.spread.buffers import SizedLayout, Spread, lay
from sharding.spread.recurrence import spread_delta
from sharding.spread.ulysses import deal_heads, spread_attention, views_of

DEVICES, COLUMNS, TOKENS, H = 8, 96, 96, 4  # TOKENS: of all sequences together, at most
BUDGETS = ((8, 12), (4, 24), (4, 24), (2, 48), (2, 48), (1, 96), (1, 96))
ROWS = P(binary_axes(DEVICES))
EXAMPLE = [(37, 0, 0, 2), (5, 0, 0, 1), (20, 1, 1, 3), (9, 3, 3, 1), (7, 4, 0, 4), (1, 5, 7, 1), (6, 6, 7, 2)]
SEQUENCE = st.tuples(st.integers(1, 16), st.integers(0, len(BUDGETS) - 1), st.integers(0, 7), st.integers(1, 4))


def plan_of(sequences, budgets=BUDGETS):
    """The plan of sequences `(tokens, round, group, parts)`."""
    lengths = tuple(tokens for tokens, *_ in sequences)
    where = [(budgets[j][0], j, group % (DEVICES // budgets[j][0])) for _, j, group, _ in sequences]
    rounds = []
    for j, (degree, _) in enumerate(budgets):
        groups = [[] for _ in range(DEVICES // degree)]
        for i, (_, of, group) in enumerate(where):
            if of == j:
                groups[group].append(i)
        rounds.append(Round(degree, tuple(map(tuple, groups))))
    return ShardPlan(
        num_devices=DEVICES,
        lengths=lengths,
        work=tuple(float(n * n) for n in lengths),
        degrees=tuple(degree for degree, *_ in where),
        firsts=tuple(degree * group for degree, _, group in where),
        rounds=tuple(rounds),
    )


def batch(sequences, budgets=BUDGETS):
    """(spread, cell of each token, segments, branches) of the sequences of a plan.

    `parts` of about equal length are a prompt (branch 0) and its responses. Segments are numbered in no order."""
    layout, lengths = lay(plan_of(sequences, budgets)), [tokens for tokens, *_ in sequences]
    exports = np.zeros((DEVICES, 0), np.int32)
    starts, counts = layout.starts.astype(np.int32), layout.counts.astype(np.int32)
    spread = Spread(starts, counts, exports, budgets, binary_axes(DEVICES))
    numbers = np.random.default_rng(len(lengths)).permutation(len(lengths)) + 1
    segments = np.repeat(numbers, lengths).astype(np.int32)
    branches = [np.sort(np.arange(tokens) % parts) for tokens, *_, parts in sequences]
    device, column = layout.places()
    return spread, device * COLUMNS + column, segments, np.concatenate(branches).astype(np.int32)


def to_rows(values, cells):
    """One value a token -> `[devices, columns, ...]`, zeros elsewhere."""
    rows = np.zeros((DEVICES * COLUMNS, *values.shape[1:]), values.dtype)
    rows[np.asarray(cells, int)] = values
    return rows.reshape(DEVICES, COLUMNS, *values.shape[1:])


def inputs(N, K, dtype=np.float32):
    rng = np.random.default_rng(N)
    return [rng.normal(size=(TOKENS, heads, H)).astype(dtype) for heads in (N, K, K, N)]


@functools.cache  # so that one function is compiled once a shape
def on_mesh(local):
    return jax.shard_map(local, mesh=make_mesh(DEVICES), in_specs=ROWS, out_specs=ROWS, check_vma=True)


def attend(q, k, v, segments, branches, spread):
    return spread_attention(spread, segments, branches, tile=8)(q, k, v)


def plain(q, k, v, segments, branches, _):
    return attention(q, k, v, Mask(segments, branches))


@functools.partial(jax.jit, static_argnums=0)
def value_and_grads(f, q, k, v, dout, *rest):
    out, pull = jax.vjp(lambda q, k, v: f(q, k, v, *rest), q, k, v)
    return out, *pull(dout)


def assert_equal(sequences, tokens, local=attend, whole=plain, budgets=BUDGETS):
    """Values and gradients, spread and plain: at the tokens; those of padding are 0."""
    spread, cells, segments, branches = batch(sequences, budgets)
    count = len(cells)
    rows = [to_rows(x[:count], cells) for x in (*tokens, segments, branches)]
    got = value_and_grads(on_mesh(local), *rows, spread)
    padded = [np.pad(x, (0, TOKENS - count))[None] for x in (segments, branches)]
    want = value_and_grads(whole, *(x[None] for x in tokens), *padded, None)
    padding = np.setdiff1d(np.arange(DEVICES * COLUMNS), cells)
    for ours, theirs in zip(got, want, strict=True):
        flat = np.asarray(ours).reshape(DEVICES * COLUMNS, *ours.shape[2:])
        np.testing.assert_allclose(flat[cells], np.asarray(theirs)[0, :count], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(flat[padding], 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "heads", by_turns([pytest.param((28, 4)), pytest.param((9, 3)), pytest.param((12, 6))])
)  # 4 KV heads over 8 devices, and over 4 and fewer; 3; and 6, which are dealt twice over 4
def test_values_and_gradients_equal_plain_attention(heads):
    assert_equal(EXAMPLE, inputs(*heads))


@pytest.mark.slow
@settings(deadline=None, max_examples=third_of(25))
@given(st.lists(SEQUENCE, min_size=1, max_size=6))
def test_any_plan_gives_the_same(sequences):  # 8 heads that read 2 KV heads
    assert_equal(sequences, inputs(8, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "heads", by_turns([pytest.param(DeltaHeads(3, 6, 4, 5)), pytest.param(DeltaHeads(1, 4, 3, 3))])
)  # 3 key heads over 2 and 4 devices, and one over more
def test_states_go_through_streams_as_through_whole_sequences(heads):
    budgets = tuple(budget for budget in BUDGETS if budget[0] <= 4)
    sequences = [(n, max(j - 1, 0), group, parts) for n, j, group, parts in EXAMPLE]
    spread, cells, segments, branches = batch(sequences, budgets)
    layout = lay(plan_of(sequences, budgets))
    sizes = dict(zip(layout.names(), (budget for _, budget in budgets), strict=True))
    spread = dataclasses.replace(
        spread, runs=SizedLayout(layout, {"columns": COLUMNS, "runs": 4} | sizes).runs(segments, branches)
    )
    runs, rng = packed_runs(segments[None], branches[None]), np.random.default_rng(0)

    def delta(channels, gates, conv):
        return DeltaInputs(channels, -gates[..., 0], gates[..., 1], conv)

    def local(channels, gates, conv, spread):
        return spread_delta(spread, heads, COLUMNS)(delta(channels, gates, conv[0]))

    def whole(channels, gates, conv):
        return delta_rule(delta(channels, gates, conv), heads, runs)[0]

    T, V = len(cells), heads.value_heads
    tokens = [
        rng.normal(size=(T, heads.channels)),
        rng.uniform(size=(T, V, 2)),
        rng.normal(size=(T, V, heads.value_size)),
    ]
    channels, gates, dout = (x.astype(np.float32) for x in tokens)
    conv = rng.normal(size=(heads.channels, 4)).astype(np.float32)
    rows = [to_rows(x, cells) for x in (channels, gates, dout)]
    got = value_and_grads(on_mesh(local), rows[0], rows[1], np.stack([conv] * DEVICES), rows[2], spread)
    want = value_and_grads(whole, channels[None], gates[None], conv, dout[None])
    for ours, theirs in zip(got[:3], want[:3], strict=True):
        flat = np.asarray(ours).reshape(DEVICES * COLUMNS, *ours.shape[2:])
        np.testing.assert_allclose(flat[cells], np.asarray(theirs)[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(np.delete(flat, cells, axis=0), 0)
    np.testing.assert_allclose(got[3].sum(axis=0), want[3], rtol=1e-5, atol=1e-4)  # a sum over all tokens


@pytest.mark.long
def test_layers_of_a_scan_share_the_views_of_four_heads_over_four_devices():
    def layers(q, k, v, attend):
        return jax.lax.scan(jax.checkpoint(lambda x, _: (x + attend(x, k, v), None)), q, None, length=3)[0]

    def deep(q, k, v, segments, branches, spread):
        return layers(q, k, v, spread_attention(spread, segments, branches, tile=8))

    def deep_plain(q, k, v, segments, branches, _):
        return layers(q, k, v, lambda q, k, v: attention(q, k, v, Mask(segments, branches)))

    budgets = tuple(budget for budget in BUDGETS if budget[0] <= 4)
    sequences = [(n, max(j - 1, 0), group, parts) for n, j, group, parts in EXAMPLE]
    assert_equal(sequences, inputs(4, 1), deep, deep_plain, budgets)


@pytest.mark.slow
def test_bfloat16_goes_over_the_wire_and_comes_out():
    spread, cells, segments, branches = batch(EXAMPLE)
    rows = [to_rows(x[: len(cells)], cells) for x in (*inputs(8, 2), segments, branches)]
    exact = value_and_grads(on_mesh(attend), *rows, spread)
    got = value_and_grads(on_mesh(attend), *(jnp.asarray(x, jnp.bfloat16) for x in rows[:4]), *rows[4:], spread)
    for ours, theirs in zip(got, exact, strict=True):
        assert ours.dtype == jnp.bfloat16
        assert np.abs(np.asarray(ours, np.float32) - theirs).max() < 0.02 * np.abs(theirs).max()


@pytest.mark.slow
def test_one_device_needs_no_mesh():
    q, k, v, _ = (jnp.asarray(x[None]) for x in inputs(4, 2))
    segments = jnp.asarray(np.repeat([1, 2, 0], [50, 30, 16]), jnp.int32)[None]
    nothing = jnp.zeros_like(segments)
    spread = Spread(np.array([[0, 50]]), np.array([[50, 30]]), np.zeros((1, 0), int), ((1, 64), (1, 40)), ())
    got = jax.jit(lambda q, k, v: spread_attention(spread, segments, nothing)(q, k, v))(q, k, v)
    np.testing.assert_allclose(got, attention(q, k, v, Mask(segments)), rtol=1e-5, atol=1e-5)


def test_a_plan_without_sequences_gives_zeros():
    nothing = np.zeros((DEVICES, 0), np.int32)
    spread = Spread(nothing, nothing, nothing, (), binary_axes(DEVICES))
    rows = [to_rows(x[:0], []) for x in (*inputs(4, 2), *[np.zeros(0, np.int32)] * 2)]
    for x in value_and_grads(on_mesh(attend), *rows, spread):
        np.testing.assert_array_equal(x, 0)


def degrees_in(program):
    """The size of the groups of every all-to-all of a program, in its order."""
    sizes = [re.search(r"split_count = (\d+)", line) for line in program.splitlines() if "stablehlo.all_to_all" in line]
    return [int(size.group(1)) for size in sizes]


def groups_in(module):
    """The groups of devices of every all-to-all of a compiled module, in its order.

    XLA writes them out, or from JAX 0.12 on says along which axes of which mesh they lie."""
    found = []
    for line in module.splitlines():
        if written := re.search(r" all-to-all\(.*replica_groups=\{(\{.*?\})\}", line):
            groups = [list(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", written.group(1))]
        elif along := re.search(r" all-to-all\(.*replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
            sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", along.group(1))}
            axes = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", along.group(2))]
            numbers = np.arange(DEVICES).reshape(list(sizes.values()))
            last = range(numbers.ndim - len(axes), numbers.ndim)
            size = np.prod([numbers.shape[axis] for axis in axes])
            groups = np.moveaxis(numbers, axes, last).reshape(-1, size).tolist()
        else:
            assert "all-to-all(" not in line
            continue
        found.append(groups)
    return found


def lowered(sequences):
    spread, cells, segments, branches = batch(sequences)
    rows = [to_rows(x[: len(cells)], cells) for x in (*inputs(8, 2), segments, branches)]
    return value_and_grads.lower(on_mesh(attend), *rows, spread)


@pytest.mark.slow
def test_all_devices_run_one_sequence_of_nested_collectives():
    """One program for all devices, so one order for all; with what this asserts of the groups, the docstring of
    `sharding.spread.ulysses` proves that no device waits for ever. That a compiler keeps the order of the degrees, too,
    is asserted where it matters: `test_overlap.py`."""
    program = lowered(EXAMPLE)
    degrees = [degree for degree, _ in BUDGETS if degree > 1]
    order = [("send", 0)]
    for j in range(len(degrees) - 1):  # the next tokens are on their way before these results are sent back
        order += [("send", j + 1), ("return", j)]
    order.append(("return", len(degrees) - 1))
    written = degrees_in(program.as_text())
    assert written == 2 * [degrees[j] for _, j in order]

    compiled = program.compile().as_text() or ""
    assert "is_scheduled=true" in compiled
    executed = groups_in(compiled)
    assert sorted(len(groups[0]) for groups in executed) == sorted(written)
    for groups in executed:
        assert sorted(device for group in groups for device in group) == list(range(DEVICES))
        for group in groups:  # consecutive devices from a multiple of their number: nested or disjoint
            assert group == list(range(group[0], group[0] + len(group))) and group[0] % len(group) == 0


@pytest.mark.medium
def test_plans_of_one_shape_are_one_program():
    assert lowered(EXAMPLE).as_text() == lowered([(3, 2, 0, 1), (8, 6, 5, 2)]).as_text()


def test_empty_halves_of_rounds_cost_no_tiles():
    def tiles_of(sequences):
        spread, cells, segments, branches = batch(sequences, ((8, 12), (1, 96)))

        def local(segments, branches, spread):
            views = views_of(spread, segments, branches, 4)
            return jnp.stack([view.table.count for view in views])[None]

        rows = [to_rows(x, cells) for x in (segments, branches)]
        return np.asarray(jax.jit(on_mesh(local))(*rows, spread))

    full = tiles_of([(96, 0, 0, 1), (40, 1, 2, 1)])
    half = tiles_of([(48, 0, 0, 1), (20, 1, 2, 1)])
    assert (full[:, 0] == 24 * 25 // 2).all()
    assert (full[:, 1] == np.where(np.arange(8) == 2, 10 * 11 // 2, 0)).all()
    # A budget of 12 is half full on each device: two of its three tiles of 4 hold 6 tokens. The 20 tokens of the other
    # round begin in column 6 of a view that begins in column 0: they touch 6 tiles.
    assert (half[:, 0] == 16 * 17 // 2).all()
    assert (half[:, 1] == np.where(np.arange(8) == 2, 6 * 7 // 2, 0)).all()


@pytest.mark.parametrize(
    ("heads", "degree", "local"),
    [
        ((28, 4), 4, (7, 1)),
        ((28, 4), 8, (4, 1)),  # 7 query heads a KV head become 8
        ((32, 8), 8, (4, 1)),
        ((40, 8), 2, (20, 4)),
        ((40, 8), 16, (3, 1)),
        ((8, 2), 8, (1, 1)),
        ((4, 1), 4, (1, 1)),
        ((12, 6), 4, (3, 3)),  # 6 KV heads twice, one query head each
        ((6, 6), 4, (2, 2)),  # 6 KV heads become 8
    ],
)
def test_what_a_degree_costs(heads, degree, local):
    deal = deal_heads(heads[0], heads[1], degree)
    assert (deal.local_queries, deal.local_kv) == local


@given(ratio=st.integers(1, 9), kv=st.integers(1, 12), twos=st.integers(0, 5))
def test_every_head_is_dealt_once(ratio, kv, twos):
    degree = 1 << twos
    if degree > ratio * kv:
        with pytest.raises(PlanError, match="attention heads; lower the cap"):
            deal_heads(ratio * kv, kv, degree)
        return
    deal = deal_heads(ratio * kv, kv, degree)
    assert deal.local_kv * degree == deal.kv * deal.copies and deal.kv >= kv
    assert deal.copies * deal.queries >= ratio
    if kv % degree == 0:
        assert (deal.local_queries, deal.local_kv) == (ratio * kv // degree, kv // degree)


def test_errors_say_what_is_wrong():
    spread, cells, segments, _ = batch(EXAMPLE)
    rows = jnp.asarray(to_rows(segments, cells))
    with pytest.raises(ValueError, match="one row, not 8"):
        spread_attention(spread, rows, rows)
    with pytest.raises(PlanError, match="8 devices by 4 attention heads"):
        deal_heads(4, 1, 8)
    with pytest.raises(ValueError, match="can't be shared"):
        deal_heads(7, 2, 2)
