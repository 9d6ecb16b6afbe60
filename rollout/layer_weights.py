"""The weights of an embedded engine: each layer's are arrays of their own, not slices of a stack.

A decode step reads every weight once. Out of a stack, a layer's weights are copied first: sliced, written and read
again, which is three times the memory traffic, and memory traffic is what decoding takes its time for.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import Sharding
from jax.typing import DTypeLike
from jaxtyping import PyTree

import models
from models.decoder import Decoder, DecoderLayer
from sharding.strategy import Params
from sharding.weights import by_path

from .engine import EngineError

LayerParams: TypeAlias = dict[str, Any]  # as of `models.split`, but `layers` is a list of the weights of one layer each

# Engines copy the same weights at once, each in its thread. JAX lists the shards of an array when first asked, and two
# threads that ask together may get lists that are too short or too long.
_placing = threading.Lock()


def check_finite(params: Mapping[str, Any], stacked: Params) -> None:
    """Raises EngineError, which names the tensor, where one of `params` has NaN or infinity. They are brought to the
    shardings `stacked` for that, one after the other."""
    places = by_path(stacked)
    for path, weight in by_path(params).items():
        if not _is_finite(_placed(weight, places[path])):
            name = "".join(f"[{key!r}]" for key in path)
            raise EngineError(f"weight {name} has values that are not finite (NaN or infinity)")


def split_layers(
    params: Mapping[str, Any], dtype: DTypeLike | None, stacked: Params, whole: LayerParams, old: LayerParams | None
) -> LayerParams:
    """A copy of `params` (as of `models.split`) by layers, complete when this returns; it shares no buffer with them.

    `dtype` casts the weights (None: as they are). `stacked` are the shardings of the weights as they come in, `whole`
    (by layers) those of the copy. The weights `old` are emptied as they are replaced, so that one weight at a time is
    on the devices twice, not all of them.
    """
    places, targets = by_path(stacked), by_path({**whole, "layers": whole["layers"][0]})
    layers: list[dict[tuple, jax.Array]] = [{} for _ in whole["layers"]]
    others: dict[tuple, jax.Array] = {}
    for path, weight in by_path(params).items():
        # `device_put` alone may share memory, even with a numpy array; the output of a compiled copy never does.
        placed = _placed(weight, places[path])
        if old is not None:
            _forget(old, path)
        if path[0] == "layers":
            copies = _copied(placed, dtype or placed.dtype, len(layers))
            for layer, copy in zip(layers, jax.device_put(copies, targets[path]), strict=True):
                layer[path[1:]] = copy
        else:
            others[path] = jax.device_put(_copied(placed, dtype or placed.dtype, None), targets[path])
        del placed
        jax.block_until_ready((layers, others))
    return {**unflatten_dict(others), "layers": [unflatten_dict(layer) for layer in layers]}


def _placed(weight: jax.Array | np.ndarray, sharding: Sharding) -> jax.Array:
    with _placing:
        return jax.device_put(weight, sharding)


def _forget(params: LayerParams, path: tuple) -> None:
    """Drops one weight, of all layers if it is a layer's."""
    for tree in params["layers"] if path[0] == "layers" else [params]:
        for key in path[1:-1] if path[0] == "layers" else path[:-1]:
            tree = tree[key]
        del tree[path[-1]]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _copied(x: jax.Array, dtype: DTypeLike, layers: int | None) -> PyTree:
    """A copy, or a tuple of one copy a layer where there are `layers`."""
    if layers is None:
        return jnp.array(x, dtype=dtype, copy=True)
    return tuple(jnp.array(x[i], dtype=dtype, copy=True) for i in range(layers))


@jax.jit
def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()


def model_by_layers(graphdef: nnx.GraphDef[Decoder], params: LayerParams) -> tuple[Decoder, list[DecoderLayer]]:
    """(the model, its layers). The model's own `layers` is the first of them: what is stacked elsewhere is not here."""
    parts: list[Decoder] = [models.merge(graphdef, {**params, "layers": layer}) for layer in params["layers"]]
    return parts[0], [part.layers for part in parts]


def abstract_by_layer(model: Decoder) -> Decoder:
    """The abstract model of one layer that is no stack: its shapes are those of `model_by_layers`."""
    graphdef, params = models.split(model)
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params["layers"])
    return nnx.merge(graphdef, {**params, "layers": first})
