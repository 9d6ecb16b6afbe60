"""Builds the model of a configuration, with shapes only or with random weights."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sharding.weights import WeightSpec

from .config import AnyConfig, Qwen25VLConfig
from .decoder import Decoder
from .layers import Normal
from .qwen2_5_vl.modeling import Qwen25VL


def abstract(config: AnyConfig) -> Decoder:
    """The model with shapes (`jax.ShapeDtypeStruct`) for weights: counts parameters of any size, allocates nothing."""
    if isinstance(config, Qwen25VLConfig):
        return nnx.eval_shape(lambda: Qwen25VL(config, nnx.Rngs(0)))
    return nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))  # a Qwen2 text model is the plain decoder


def create(config: AnyConfig, seed: int = 0) -> Decoder:
    """The model with random weights, reproducible from `seed`.

    Weights are drawn on the host, each from a generator of its own (`seed` and the weight's path): the values depend on
    no other weight, no device and no compiler, and a tiny model is there at once.
    """
    graphdef, state = nnx.split(abstract(config))

    def draw(path: tuple, variable: nnx.Variable) -> nnx.Variable:
        spec: WeightSpec = variable.get_metadata("spec")
        if isinstance(spec.init, Normal):
            name = ".".join(str(key.key) for key in path).encode()
            rng = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name)]))
            value = jnp.asarray(spec.init.on_host(rng, variable.shape), spec.dtype)
        else:  # a constant
            value = spec.init(jax.random.key(0), variable.shape, spec.dtype)
        return variable.replace(value)

    return nnx.merge(graphdef, jax.tree.map_with_path(draw, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))
