"""ODC: the same loss and gradients as one device whoever computes what; bounded, reproducible if asked, never stuck."""

import functools
import random
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from toy import assert_equal, loss, make_batch, strategy, toy

from sharding.mesh import MeshError
from sharding.odc import OdcError
from sharding.odc.executor import Odc, Worker
from sharding.odc.flat import ParameterRows
from sharding.odc.stages import MarkingWalk, Program, StageError
from sharding.odc.traffic import Window, fetches, held_at
from sharding.walk import Stack, Tally, Walk

KINDS = (3, 7)  # rows of a microbatch: two compiled shapes


@functools.cache
def batches():
    return {rows: make_batch(rows) for rows in KINDS}


@functools.cache
def alone(rows):
    """(loss, tally, gradients) and log-probs of a microbatch on one device."""
    model, params = toy()
    one = strategy(1, model)
    params, batch = one.shard(params), one.place(batches()[rows])
    return jax.jit(one.loss_and_grad)(params, batch), jax.jit(one.logprobs)(params, batch["inputs"])


@functools.cache
def make(devices, **options):
    model, params = toy()
    fsdp = strategy(devices, model, remat=options.pop("remat", "none"))
    return Odc(fsdp, **options), fsdp.shard(params)


def summed(kinds):
    total, tally, grads = alone(kinds[0])[0]
    for rows in kinds[1:]:
        more = alone(rows)[0]
        total, tally = total + more[0], tally + more[1]
        grads = jax.tree.map(jnp.add, grads, more[2])
    return total, tally, grads


# --- equality ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "options", "microbatches"),  # (rows, device) of each
    [
        (1, {}, [(3, 0), (7, 0)]),
        (2, {"remat": "layer"}, [(3, 0), (7, 1), (3, 0)]),
        (2, {"remat": "dots"}, [(3, 0), (7, 1), (3, 0)]),
        (3, {}, [(7, 2), (3, 0), (3, 2)]),  # one has none
        (4, {"group": 2}, [(3, 0), (7, 1), (7, 3), (3, 3), (3, 2)]),
        (6, {"group": 2, "deterministic": True}, [(7, 5), (3, 0), (3, 5)]),
        (8, {}, [(3, 7), (7, 0), (3, 4), (7, 7), (3, 1), (3, 2)]),
    ],
)
def test_equals_one_device_whoever_computes_what(devices, options, microbatches):
    odc, params = make(devices, **options)
    kinds, own = [rows for rows, _ in microbatches], [device for _, device in microbatches]
    result = odc.loss_and_grad(params, [batches()[rows] for rows in kinds], own)
    assert_equal(result, summed(kinds), 1e-5)
    for grad, param in zip(jax.tree.leaves(result[2]), jax.tree.leaves(params), strict=True):
        assert grad.sharding.is_equivalent_to(param.sharding, grad.ndim), "gradients lie where FSDP puts them"


@pytest.mark.slow
def test_scores_lie_on_the_devices_that_computed_them():
    odc, params = make(3)
    scores = odc.logprobs(params, [batches()[rows]["inputs"] for rows in (7, 3, 7)], [2, 0, 2])
    for rows, device, result in zip((7, 3, 7), (2, 0, 2), scores, strict=True):
        assert_equal(result, alone(rows)[1], 1e-5)
        assert result[0].devices() == {jax.devices()[device]}


@pytest.mark.slow
def test_low_precision_weights_travel_in_low_precision():
    model, params = toy()
    fsdp = strategy(2, model, compute_dtype=jnp.bfloat16)
    odc = Odc(fsdp)
    placed = fsdp.shard(params)
    result = odc.loss_and_grad(placed, [batches()[3], batches()[7]], [0, 1])
    one = strategy(1, model, compute_dtype=jnp.bfloat16)
    same = [jax.jit(one.loss_and_grad)(one.shard(params), one.place(batches()[rows])) for rows in KINDS]
    assert_equal(result[2], jax.tree.map(jnp.add, same[0][2], same[1][2]), 2e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(result[2])} == {jnp.dtype(jnp.float32)}
    assert {row.dtype for unit in odc._rows.publish(placed) for row in unit} == {jnp.dtype(jnp.bfloat16)}


# --- reproducible -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_deterministic_order_gives_the_same_bits_whatever_the_pace(monkeypatch):
    odc, params = make(4, deterministic=True)
    kinds, own = (3, 7, 7, 3, 3, 7), [0, 1, 1, 2, 3, 3]
    work = [1.0, 5.0, 4.0, 2.0, 3.0, 1.0]
    step = Worker._next

    def dawdle(self, *args):
        time.sleep(pace.random() * 0.02)
        return step(self, *args)

    monkeypatch.setattr(Worker, "_next", dawdle)
    results = []
    for seed in range(4):
        pace = random.Random(seed)
        results.append(odc.loss_and_grad(params, [batches()[rows] for rows in kinds], own, work))
    for result in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, result, results[0])
    assert_equal(results[0], summed(kinds), 1e-5)


# --- memory -----------------------------------------------------------------------------------------


@pytest.mark.medium
def test_few_fetched_layers_are_alive(monkeypatch):
    """Counts arrays that still exist, not those that the window says it holds: nothing else may keep them."""
    odc, params = make(2)
    alive, most = set(), [0]

    class Counting(Window):
        def __init__(self, itinerary, fetch, ready):
            def counted(key, count):
                rows = fetch(key, count)
                name = (id(self), key, count)
                alive.add(name)
                weakref.finalize(rows[1], alive.discard, name)  # another device's row: a copy, which nobody else has
                most[0] = max(most[0], len(alive))
                return rows

            super().__init__(itinerary, counted, ready)

    monkeypatch.setattr("sharding.odc.traffic.Window", Counting)
    odc.loss_and_grad(params, [batches()[7]] * 3, [0, 0, 0])
    assert 2 <= most[0] <= 3
    assert not alive


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_no_whole_weight_is_kept_for_the_backward_pass(remat):
    """Of what a forward pass hands to the backward pass, nothing is as large as the smallest matrix."""
    odc, _ = make(2, remat=remat)
    rows, batch = odc._rows, batches()[3]
    one = odc._staged_for(odc._strategy.loss, batch)
    sizes = {u: unit.size for u, unit in enumerate(rows.units)}
    values = dict(zip(one.inputs, jax.tree.leaves(batch), strict=True))
    shapes = {piece.shape for unit in rows.units for piece in unit.pieces if len(piece.shape) > 1}
    for step, keys in zip(one.steps, one.keys, strict=True):
        given = [tuple(jax.ShapeDtypeStruct((sizes[u],), jnp.float32) for _ in range(2)) for u, _ in keys]
        outputs, saved = jax.eval_shape(one.forward[step.stage], given, [values[s] for s in step.reads], np.int32(0))
        values |= dict(zip(step.writes, outputs, strict=True))
        kept = {leaf.shape for leaf in jax.tree.leaves(saved)}
        assert not kept & (shapes | {shape[::-1] for shape in shapes}) and (sizes[keys[0][0]],) not in kept
        assert step.name != "layers[0]" or kept  # activations


@given(st.lists(st.lists(st.integers(0, 4), max_size=2, unique=True), max_size=12))
def test_an_itinerary_fetches_what_it_needs_and_holds_little(needs):
    trip = [tuple((unit, 0) for unit in step) for step in needs]
    held = set()
    for step, asked in enumerate(fetches(trip)):
        assert not held & set(asked)
        held = (held | set(asked)) & set(held_at(trip, step))
        assert set(trip[step]) <= held <= {key for step_needs in trip[step : step + 2] for key in step_needs}


# --- faults -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_device_that_fails_ends_the_minibatch_in_one_clear_error(monkeypatch, deterministic):
    odc, params = make(4, deterministic=deterministic)
    kinds, own = (3, 7, 3, 3, 7, 7, 3), [1, 1, 0, 2, 2, 3, 3]
    step = Worker._next

    def fail(self, window, number, place):
        rows = step(self, window, number, place)
        if self.number == 1 and number == 1 and place == "layers[2] backward":
            raise MemoryError("no room for 3 GB")
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "_next", fail)
        with pytest.raises(OdcError, match=r"cpu:1 failed in microbatch 2 of 2, layers\[2\] backward: MemoryError"):
            odc.loss_and_grad(params, [batches()[rows] for rows in kinds], own)
    assert_equal(odc.loss_and_grad(params, [batches()[rows] for rows in kinds], own), summed(kinds), 1e-5)


def test_bad_minibatches_are_refused():
    odc, params = make(2)
    with pytest.raises(ValueError, match="one device for each microbatch, not 2 for 1"):
        odc.loss_and_grad(params, [batches()[3]], [0, 1])
    with pytest.raises(ValueError, match=r"devices \[5\], but the mesh has only 2"):
        odc.loss_and_grad(params, [batches()[3]], [5])
    with pytest.raises(MeshError, match="no group of 4 devices"):
        make(2, group=4)


# --- parts ------------------------------------------------------------------------------------------


def test_the_loss_is_cut_at_its_stack():
    model, params = toy()
    fsdp = strategy(1, model)
    abstract = jax.eval_shape(lambda: params)

    def traced(params, batch):
        return loss(nnx.merge(fsdp.graphdef, params), batch, MarkingWalk())

    program = Program(traced, abstract, batches()[3])
    assert [step.name for step in program.steps] == ["table", "layers[0]", "layers[1]", "layers[2]", "table"]
    assert len({id(step.stage) for step in program.steps}) == 3


@pytest.mark.medium
def test_what_comes_before_any_weight_has_no_backward_pass():
    """A stack may start from what is computed from the batch alone."""
    model, params = toy()

    def loss_of_numbers(model, batch, walk):
        x = jnp.asarray(batch["x"]) * 2.0
        x, _ = walk.scan(Stack.of(model.layers), x, lambda layer, x, _: (layer(x), None))
        return jnp.sum(x**2), Tally({"loss": jnp.sum(x**2)}, {})

    fsdp = strategy(2, model)
    fsdp.loss = loss_of_numbers
    batch = {"x": np.random.default_rng(0).normal(size=(2, 5, 12)).astype(np.float32)}
    loss, _, grads = Odc(fsdp).loss_and_grad(fsdp.shard(params), [batch], [1])
    want = jax.value_and_grad(lambda p: loss_of_numbers(nnx.merge(fsdp.graphdef, p), batch, Walk())[0])(params)
    assert_equal((loss, grads), want, 1e-5)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (lambda layer, x, _: (layer(x), jnp.sum(x)), "beside the carry"),
        (lambda layer, x, _: (layer(x)[:2], None), r"gets float32\[3, 5, 12\] and hands on float32\[2, 5, 12\]"),
    ],
    ids=["an output for each layer", "another shape"],
)
def test_a_stack_that_can_not_be_cut_is_refused(step, says):
    model, params = toy()
    fsdp = strategy(1, model)

    def traced(params, inputs):
        model = nnx.merge(fsdp.graphdef, params)
        return MarkingWalk().scan(Stack.of(model.layers), model.table.weight[...][inputs["tokens"]], step)

    with pytest.raises(StageError, match=says):
        Program(traced, params, batches()[3]["inputs"])


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "group"), [(1, 0), (3, 0), (4, 2), (6, 2), (8, 0)])
def test_rows_hold_every_weight_once_and_give_it_back(devices, group):
    model, params = toy()
    fsdp = strategy(devices, model)
    rows = ParameterRows(fsdp, group)
    published = rows.publish(fsdp.shard(params))
    leaves = jax.tree.leaves(params)
    for unit, layers in zip(rows.units, published, strict=True):
        for layer, array in enumerate(layers):
            shards = {shard.device: shard.data for shard in array.addressable_shards}
            for device in range(devices):
                own = [shards[fsdp.mesh.devices.flat[d]] for d in rows.members(device)]
                here = jax.device_put(own, jax.devices()[0])
                found = rows.whole([rows.units.index(unit)], [here], [p.leaf for p in unit.pieces])
                for piece, weight in zip(unit.pieces, found, strict=True):
                    want = leaves[piece.leaf][layer] if unit.layers else leaves[piece.leaf]
                    np.testing.assert_array_equal(weight, want)
    held = sum(unit.size * max(unit.layers, 1) for unit in rows.units) * devices
    total = sum(leaf.size for leaf in leaves)
    padding = sum(max(unit.layers, 1) * devices for unit in rows.units for piece in unit.pieces if piece.copies > 1)
    assert total <= held <= total + padding * max(1, devices)
    # Each of the groups' copies counts as a gradient of its own.
    back = rows.collect(published)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want * rows.outer, rtol=1e-6), back, params)
