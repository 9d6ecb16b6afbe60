"""Parts of the models that JAX has in another form."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from tiny import vl_config

import models
from models.creation import with_values
from models.layers import FEW_ROWS, GatedMLP, gelu, project
from sharding.mesh import make_mesh
from sharding.weights import WeightSpec, zeros

X = np.linspace(-12, 12, 4801).astype(np.float32)
CDF = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in X.tolist()])
SLOPE = CDF + X * np.exp(-0.5 * X.astype(np.float64) ** 2) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize(("dtype", "relative"), [(jnp.float32, 2e-7), (jnp.bfloat16, 2**-8)])
def test_gelu_is_exact(dtype, relative):
    """To rounding: an absolute error a unit of the largest of `x`, 1 and the result."""
    x = jnp.asarray(X, dtype)
    exact = np.interp(np.asarray(x, np.float64), X, X * CDF), np.interp(np.asarray(x, np.float64), X, SLOPE)
    got = gelu(x), jax.vmap(jax.grad(gelu))(x)
    for ours, want in zip(got, exact, strict=True):
        assert ours.dtype == dtype
        np.testing.assert_array_less(np.abs(np.asarray(ours, np.float64) - want), relative * np.maximum(np.abs(X), 1))


@pytest.mark.parametrize("remat", [False, True])
def test_gelu_and_its_gradient_on_several_devices(remat):
    """JAX 0.12 refuses its own exact `gelu` and its own derivative of `erf` where replication is checked."""
    function = jax.checkpoint(gelu) if remat else gelu

    def local(x):
        return function(x), jax.grad(lambda x: jnp.sum(function(x)))(x)

    mesh = make_mesh(4)
    split = P(mesh.axis_names)
    on_mesh = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split))
    x = X[:4800]
    for ours, want in zip(on_mesh(x), (X * CDF, SLOPE), strict=True):
        np.testing.assert_allclose(ours, want[:4800], atol=3e-6, rtol=0)


def test_project_equals_einsum():
    rng = np.random.default_rng(0)
    x, dout = rng.normal(size=(2, 3, 4, 5)).astype(np.float32), rng.normal(size=(2, 3, 6, 7)).astype(np.float32)
    weights = rng.normal(size=(4, 5, 6, 7)).astype(np.float32)

    def both(function):
        out, pull = jax.vjp(function, x, weights)
        return out, *pull(jnp.asarray(dout))

    want = both(lambda x, weights: jnp.einsum("BTNH,NHKF->BTKF", x, weights))
    spec = WeightSpec(weights.shape, ("N", "H", "K", "F"), zeros, inputs=2)
    for ours, theirs in zip(both(lambda x, weights: project(x, nnx.Param(weights, spec=spec))), want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, FEW_ROWS, FEW_ROWS + 1])
def test_project_with_outputs_first_equals_einsum(rows):
    """As engines keep their matrices; the number of rows decides how the product is computed."""
    rng = np.random.default_rng(rows)
    x, weights = rng.normal(size=(rows, 1, 4, 5)), rng.normal(size=(4, 5, 6, 7))
    spec = WeightSpec(weights.shape, ("N", "H", "K", "F"), zeros, inputs=2).turned()
    assert (spec.shape, spec.axes) == ((6, 7, 4, 5), ("K", "F", "N", "H"))
    matrix = nnx.Param(jnp.asarray(np.moveaxis(weights, (0, 1), (2, 3)), jnp.float32), spec=spec)
    ours = jax.jit(project)(jnp.asarray(x, jnp.float32), matrix)
    np.testing.assert_allclose(ours, np.einsum("BTNH,NHKF->BTKF", x, weights), rtol=0, atol=1e-5)


def test_gradients_are_products_of_two_matrices():
    """With rows along two axes, XLA on CPUs transposes all activations again for each weight's gradient."""
    mlp = with_values(GatedMLP(8, 16, bias=False, std=1.0))
    graphdef, state = nnx.split(mlp)

    def loss(state, x):
        return jnp.sum(nnx.merge(graphdef, state)(x))

    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(state, jnp.ones((2, 3, 8)))
    products = [equation for equation in program.jaxpr.eqns if equation.primitive.name == "dot_general"]
    assert len(products) == 9  # three forward, six backward
    assert all(operand.aval.ndim == 2 for product in products for operand in product.invars)


@pytest.mark.medium
def test_rms_norm_computes_in_float32():
    """The mean of squares would be wrong in the third digit in bfloat16; only the result is rounded."""
    norm = models.create(vl_config()).norm
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 23, 48)), jnp.bfloat16)
    narrow = norm(x)
    assert narrow.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(narrow), np.asarray(norm(x.astype(jnp.float32)).astype(jnp.bfloat16)))
