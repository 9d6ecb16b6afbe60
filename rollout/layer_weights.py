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
from jax.sharding import Sharding
from jax.typing import DTypeLike
from jaxtyping import PyTree

import models
from models.decoder import Decoder, DecoderLayer
from sharding.strategy import Params

from .engine import EngineError

LayerParams: TypeAlias = dict[str, Any]  # as of `models.split`, but `layers` is a list of the weights of one layer each

# Engines copy the same weights at once, each in its thread. JAX lists the shards of an array when first asked, and two
# threads that ask together may get lists that are too short or too long.
_placing = threading.Lock()


def split_layers(
    params: Mapping[str, Any], dtype: DTypeLike | None, stacked: Params, whole: LayerParams
) -> LayerParams:
    """A copy of `params` (as of `models.split`) by layers, complete when this returns; it shares no buffer with them.

    `dtype` casts the weights (None: as they are). `stacked` are the shardings of the weights as they come in, `whole`
    (by layers) those of the copy. One weight at a time is on the devices twice. Raises EngineError, which names the
    tensor, for NaN and infinity.
    """

    def copied(path: tuple, x: jax.Array | np.ndarray, sharding: Sharding) -> PyTree:
        # `device_put` alone may share memory, even with a numpy array; the output of a compiled copy never does.
        layers = x.shape[0] if path[0].key == "layers" else None
        with _placing:
            placed = jax.device_put(x, sharding)
        copy, finite = _copied(placed, dtype or x.dtype, layers)
        if not finite:  # this waits for the copy, too
            name = jax.tree_util.keystr(path)
            raise EngineError(f"weight {name} has values that are not finite (NaN or infinity)")
        return copy

    copy = jax.tree_util.tree_map_with_path(copied, dict(params), dict(stacked))
    by_weight, structure = jax.tree.flatten(copy["layers"], is_leaf=lambda x: isinstance(x, tuple))
    copy["layers"] = [structure.unflatten(layer) for layer in zip(*by_weight, strict=True)]
    return jax.device_put(copy, whole)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _copied(x: jax.Array, dtype: DTypeLike, layers: int | None) -> tuple[PyTree, jax.Array]:
    """(a copy, or a tuple of one copy a layer where there are `layers`; a boolean: all of it is finite)."""
    if layers is None:
        copy = jnp.array(x, dtype=dtype, copy=True)
    else:
        copy = tuple(jnp.array(x[i], dtype=dtype, copy=True) for i in range(layers))
    return copy, jnp.stack([jnp.isfinite(part).all() for part in jax.tree.leaves(copy)]).all()


def model_by_layers(graphdef: nnx.GraphDef[Decoder], params: LayerParams) -> tuple[Decoder, list[DecoderLayer]]:
    """(the model, its layers). The model's own `layers` is the first of them: what is stacked elsewhere is not here."""
    parts: list[Decoder] = [models.merge(graphdef, {**params, "layers": layer}) for layer in params["layers"]]
    return parts[0], [part.layers for part in parts]
