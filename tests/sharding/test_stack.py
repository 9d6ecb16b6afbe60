"""Stacks whose layers differ: every walk computes the loss and gradients of a plain loop over the layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from toy import D, Layer, Table, assert_equal, make_batch, normal

from models.creation import with_values
from sharding.mesh import make_mesh
from sharding.odc.executor import Odc
from sharding.vocab import token_logprobs
from sharding.walk import Fsdp, Stack, Tally, Walk
from sharding.weights import WeightSpec, weight

ORDERS = ("ggglgggl", "lglg", "gllgg", "ggg")  # g: gates, l: layers
REMATS = ("dots", "layer", "offload")
TOLERANCE = 5e-5  # float32; sums over tokens cancel, in another order on each number of devices


class Gate(nnx.Module):
    def __init__(self, stack):
        self.matrix = weight(WeightSpec((D, 2, D), ("D", "C", "F"), normal), stack)
        self.bias = weight(WeightSpec((2, D), ("C", "F"), normal), stack)

    def __call__(self, x):
        inner = jnp.einsum("BTD,DCF->CBTF", x, self.matrix[...])
        value, gate = inner + jnp.broadcast_to(self.bias[...][:, None, None], inner.shape)
        return x + value * jax.nn.sigmoid(gate)


class Hybrid(nnx.Module):
    def __init__(self, order):
        self.table = Table(D)
        self.kinds = tuple({"g": "gates", "l": "layers"}[kind] for kind in order)
        self.gates = Gate(order.count("g"))
        self.layers = Layer(max(order.count("l"), 1), D, 18)

    @property
    def stack(self):
        return Stack({kind: getattr(self, kind) for kind in sorted(set(self.kinds))}, self.kinds)


def step(layer, x, scales):
    scale, shift_BT = scales
    return jnp.tanh(layer(x)) * scale + jnp.broadcast_to(shift_BT[..., None], x.shape), None


def loss(model, batch, walk):
    table = walk.use(model.table).weight[...]
    layers = len(model.kinds)
    scales = 1 + 0.1 * np.arange(layers, dtype=np.float32)  # a constant of the program
    shifts_LBT = jnp.stack([number * batch["weights"] for number in range(layers)])  # values of the batch
    x, _ = walk.scan(model.stack, table[batch["inputs"]["tokens"]], step, (scales, shifts_LBT))
    logprobs, _ = token_logprobs(x, table, batch["inputs"]["targets"])
    weighted = -jnp.sum(batch["weights"] * logprobs)
    return weighted, Tally({"loss": weighted}, {})


def entry(layers, index):
    """A layer of a stack, as a module of its own."""
    graphdef, state = nnx.split(layers)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x[index], state))


class PlainLoop(Walk):
    """Walks layer after layer, each taken out of its stack, without any strategy."""

    def scan(self, stack, carry, step, xs=None):
        done = dict.fromkeys(stack.modules, 0)
        for number, kind in enumerate(stack.order):
            layer = entry(stack.modules[kind], done[kind])
            carry, _ = step(layer, carry, jax.tree.map(lambda x, number=number: x[number], xs))
            done[kind] += 1
        return carry, None


def strategy(devices, model, **options):
    rows = lambda batch: jax.tree.map(lambda _: 0, batch)  # noqa: E731
    return Fsdp(make_mesh(devices), model, forward=loss, loss=loss, row_dims=rows, **options)


def hybrid(order):
    model = with_values(Hybrid(order))
    return model, jax.tree.map(lambda x: x / 2, nnx.to_pure_dict(nnx.state(model)))  # gentle: eight layers round little


@functools.cache
def by_plain_loop(order, rows):
    model, params = hybrid(order)
    graphdef, batch = nnx.graphdef(model), jax.tree.map(jnp.asarray, make_batch(rows))
    run = jax.jit(jax.value_and_grad(lambda params: loss(nnx.merge(graphdef, params), batch, PlainLoop())[0]))
    return run(params)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("order", "devices", "remat", "unroll"),
    [
        *((order, devices, "none", unroll) for order in ORDERS for devices, unroll in ((1, 0), (4, 8))),
        *((order, devices, remat, 8) for order, devices in (("ggglgggl", 4), ("gllgg", 1)) for remat in REMATS),
        ("lglg", 4, "none", 0),
    ],
)
def test_one_program_equals_a_plain_loop(order, devices, remat, unroll):
    model, params = hybrid(order)
    fsdp = strategy(devices, model, remat=remat, unroll=unroll)
    value, _, grads = jax.jit(fsdp.loss_and_grad)(fsdp.shard(params), fsdp.place(make_batch(8)))
    assert_equal((value, grads), by_plain_loop(order, 8), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("devices", "remat"), [(1, "layer"), (3, "none")])
def test_odc_equals_a_plain_loop(order, devices, remat):
    model, params = hybrid(order)
    fsdp = strategy(devices, model, remat=remat)
    value, _, grads = Odc(fsdp).loss_and_grad(fsdp.shard(params), [make_batch(3), make_batch(5)], [0, devices - 1])
    want = jax.tree.map(jnp.add, by_plain_loop(order, 3), by_plain_loop(order, 5))
    assert_equal((value, grads), want, TOLERANCE)


@pytest.mark.medium
def test_results_of_layers_come_in_their_order():
    model, _ = hybrid("gglggl")
    x = np.random.default_rng(0).normal(size=(2, 3, D)).astype(np.float32)

    def step(layer, x, number):
        return layer(x), (number, jnp.sum(x))

    last, (numbers, sums) = Walk(unroll=0).scan(model.stack, x, step, np.arange(6))
    assert numbers.tolist() == list(range(6))
    kinds = {"gates": list(range(10, 14)), "layers": [20, 21]}
    assert model.stack.in_order(kinds) == [10, 11, 20, 12, 13, 21]
    for number, kind in enumerate(model.kinds):
        np.testing.assert_allclose(sums[number], jnp.sum(x), rtol=1e-5)
        x = entry(getattr(model, kind), model.kinds[:number].count(kind))(x)
    np.testing.assert_allclose(last, x, rtol=1e-5, atol=1e-5)


@given(st.text("gl", min_size=1, max_size=6), st.integers(1, 4))
def test_a_period_is_the_shortest_beginning_that_repeats(part, times):
    order = tuple(part * times)
    period = Stack({}, order).period
    assert period * (len(order) // len(period)) == order and len(period) <= len(part)
    assert not any(len(order) % n == 0 and order[:n] * (len(order) // n) == order for n in range(1, len(period)))


@pytest.mark.medium
@pytest.mark.parametrize(("remat", "most"), [("none", 0.5), ("layer", 0.02)])
def test_more_periods_keep_as_much_as_more_layers_of_one_kind(remat, most):
    """No layer keeps a copy of its weights, whatever its place in a period. `most`: by which part of the weights of 32
    layers the memory may grow faster than with one kind; with remat `none`, layers keep one more activation."""

    def temporaries(order):
        names = {kind: "gl".index(kind) for kind in sorted(set(order))}
        modules = {kind: with_values(Gate(order.count(kind)), number) for kind, number in names.items()}
        graphdefs = {kind: nnx.graphdef(module) for kind, module in modules.items()}

        def summed(params):
            stack = Stack({kind: nnx.merge(graphdefs[kind], params[kind]) for kind in params}, tuple(order))
            x, _ = Walk(remat=remat, unroll=0).scan(stack, jnp.ones((4, 2, D)), lambda layer, x, _: (layer(x), None))
            return jnp.sum(x**2)

        params = {kind: nnx.to_pure_dict(nnx.state(module)) for kind, module in modules.items()}
        return jax.jit(jax.grad(summed)).lower(params).compile().memory_analysis().temp_size_in_bytes

    grown = [temporaries(period * 16) - temporaries(period * 8) for period in ("gggl", "gggg")]
    weights = 32 * sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(with_values(Gate(1)))))
    assert 0 < grown[0] <= grown[1] + most * weights
