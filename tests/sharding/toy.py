"""A small model and a loss for strategies to walk. Of its weights 8 devices divide some, only 4 or 2 others, and none
the odd bias."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import layers
from models.creation import with_values
from sharding.mesh import make_mesh
from sharding.vocab import token_logprobs
from sharding.walk import Fsdp, Stack, Tally
from sharding.weights import WeightSpec, weight

B, T, D, F, V, L = 24, 5, 12, 18, 24, 3
normal = layers.normal(0.3)


class Layer(nnx.Module):
    def __init__(self, stack, width, inner):
        self.up = weight(WeightSpec((width, inner), ("D", "F"), normal), stack)
        self.down = weight(WeightSpec((inner, width), ("F", "D"), normal), stack)
        self.scale = weight(WeightSpec((width,), ("D",), layers.ones), stack)
        self.odd = weight(WeightSpec((5,), ("H",), normal), stack)

    def __call__(self, x):
        inner = jnp.tanh(jnp.einsum("BTD,DF->BTF", x * jnp.broadcast_to(self.scale[...], x.shape), self.up[...]))
        return x + jnp.einsum("BTF,FD->BTD", inner, self.down[...]) * jnp.sum(self.odd[...])


class Toy(nnx.Module):
    def __init__(self, width=D, inner=F, layers=L):
        self.table = Table(width)
        self.layers = Layer(layers, width, inner)


class Table(nnx.Module):
    def __init__(self, width):
        self.weight = weight(WeightSpec((V, width), ("V", "D"), normal))


def forward(model, inputs, walk):
    table = walk.use(model.table).weight[...]
    hidden, _ = walk.scan(Stack.of(model.layers), table[inputs["tokens"]], lambda layer, x, _: (layer(x), None))
    return token_logprobs(hidden, table, inputs["targets"], chunk=7)


def loss(model, batch, walk):
    logprobs, entropies = forward(model, batch["inputs"], walk)
    weighted = -jnp.sum(batch["weights"] * logprobs)
    return weighted, Tally({"entropy": jnp.sum(entropies), "loss": weighted}, {"worst": -jnp.min(logprobs)})


def make_batch(rows=B):
    rng = np.random.default_rng(3)
    tokens, targets = rng.integers(0, V, (2, rows, T)).astype(np.int32)
    weights = rng.normal(size=(rows, T)).astype(np.float32)
    return {"inputs": {"tokens": tokens, "targets": targets}, "weights": weights}


def toy(**sizes):
    model = with_values(Toy(**sizes))
    return model, nnx.to_pure_dict(nnx.state(model))


def strategy(devices, model, **options):
    return Fsdp(
        make_mesh(devices),
        model,
        forward=forward,
        loss=loss,
        row_dims=lambda batch: jax.tree.map(lambda _: 0, batch),
        **options,
    )


def assert_equal(got, want, relative):
    def check(a, b):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=0, atol=relative * np.abs(b).max()
        )

    jax.tree.map(check, got, want)
