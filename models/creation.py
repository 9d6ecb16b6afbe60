"""Builds the model of a configuration, with shapes only or with random weights."""

import itertools
import zlib
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from sharding.walk import Module as Model
from sharding.walk import Params
from sharding.weights import WeightSpec, by_path, map_weights, on_first_device, place, place_stack

from .config import DecoderConfig
from .decoder import Decoder
from .registry import ARCHITECTURES


def abstract(config: DecoderConfig) -> Decoder:
    """The model with shapes (`jax.ShapeDtypeStruct`) for weights. Allocates no weights."""
    return ARCHITECTURES[config.architecture].model(config)


def create(config: DecoderConfig, seed: int = 0, shardings: Callable[[Decoder], Params] | None = None) -> Decoder:
    """The model with random weights. Each weight is sampled on the host by a generator of its own, seeded with `seed`
    and the weight's path, so that it depends on no device and no compiler. `shardings`: see `models.load`."""
    return with_values(abstract(config), seed, shardings)


def with_values(model: Model, seed: int = 0, shardings: Callable[[Model], Params] | None = None) -> Model:
    """The abstract model, or module, with random weights as `create` samples them."""
    places = by_path((shardings or on_first_device)(model))

    def draw(path: tuple, variable: nnx.Variable) -> jax.Array:
        names = tuple(key.key for key in path)
        return drawn(names, variable, seed, places[names])

    return nnx.merge(nnx.graphdef(model), map_weights(draw, model))


def drawn(path: tuple[str, ...], variable: nnx.Variable, seed: int, sharding: Sharding) -> jax.Array:
    """The initial value of an abstract weight, laid out by `sharding`."""
    spec: WeightSpec = variable.get_metadata("spec")
    rng = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(".".join(path).encode())]))
    layers = (spec.init(rng, spec.shape).astype(spec.dtype) for _ in itertools.count())
    if len(variable.shape) > len(spec.shape):
        return place_stack(layers, variable.shape[0], sharding)
    return place(next(layers), sharding)
