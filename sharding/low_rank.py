"""Low-rank adapters (LoRA, arXiv:2106.09685): the product of two small matrices is added to a weight.

A model with adapters has more weights: beside `q` (`[in..., out...]`, frozen) are `q_lora_a` (`[in..., R]`) and
`q_lora_b` (`[R, out...]`), which are trained. No model reads the two: when a layer is used, a walk adds `factor * a @
b` in float32 to the shard of `q` that a device holds, before it casts and gathers the sum. So every strategy computes
with the same weights that engines get (`merged`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import unflatten_dict
from jaxtyping import Array

from .weights import Initializer, WeightSpec, by_path

A, B = "_lora_a", "_lora_b"  # suffixes of the weight's name
Weight: TypeAlias = tuple[WeightSpec, jax.Array]
Path: TypeAlias = tuple[Any, ...]


def beside(path: Path) -> tuple[Path, Path]:
    """The paths of the two adapters of a weight."""
    *parents, name = path
    return (*parents, f"{name}{A}"), (*parents, f"{name}{B}")


def is_adapter(path: Path) -> bool:
    return str(path[-1]).endswith((A, B))


def attach(model: nnx.Module, paths: Iterable[Path], rank: int, factor: float, init_a: Initializer) -> None:
    """Freezes all weights of an abstract model and gives those of `paths` adapters: `a` drawn by `init_a`, `b` zero."""
    adapted_paths = set(paths)
    for keys, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        path = tuple(map(str, keys))
        parent: Any = model
        for name in path[:-1]:
            parent = getattr(parent, name)
        spec: WeightSpec = variable.get_metadata("spec")
        frozen = dataclasses.replace(spec, frozen=True, lora=factor if path in adapted_paths else 0.0)
        setattr(parent, path[-1], nnx.Param(variable.get_raw_value(), spec=frozen))
        if not frozen.lora:
            continue
        inputs, outputs = slice(None, spec.inputs), slice(spec.inputs, None)
        zeros = nnx.initializers.zeros_init()
        declared = (
            WeightSpec((*spec.shape[inputs], rank), (*spec.axes[inputs], "R"), init_a, inputs=spec.inputs),
            WeightSpec((rank, *spec.shape[outputs]), ("R", *spec.axes[outputs]), zeros, inputs=1),
        )
        layers = variable.shape[: len(variable.shape) - len(spec.shape)]
        for name, adapter in zip(beside(path), declared, strict=True):
            shape = jax.ShapeDtypeStruct((*layers, *adapter.shape), adapter.dtype)
            setattr(parent, name[-1], nnx.Param(shape, spec=adapter))


def merge(spec: WeightSpec, weight: Array, a: Array, b: Array) -> Array:
    """Returns `weight + factor * a @ b`, computed in float32, in the dtype of `weight`. The arguments are those of one
    layer, or matching shards of them."""
    rank = a.shape[-1]
    flat = a.reshape(-1, rank), b.reshape(rank, math.prod(b.shape[1:]))
    product = jnp.matmul(*flat, precision=jax.lax.Precision.HIGHEST).reshape(weight.shape)
    return (weight.astype(jnp.float32) + spec.lora * product.astype(jnp.float32)).astype(weight.dtype)


def plain(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters, or a tree like them, without the adapters."""
    return unflatten_dict({path: leaf for path, leaf in by_path(tree).items() if not is_adapter(path)})


def adapted(tree: Mapping[str, Any], specs: Mapping[str, Any]) -> dict[str, Any]:
    """The weights that have adapters, out of a tree like the parameters."""
    declared, leaves = by_path(specs), by_path(tree)
    return unflatten_dict({path: leaf for path, leaf in leaves.items() if path in declared and declared[path].lora})


def merged(weights: Mapping[str, Any], adapters: Mapping[str, Any], specs: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of `adapted` with their adapters added."""
    declared, found = by_path(specs), by_path(adapters)

    def merged_weight(path: Path, value: Array) -> Array:
        spec: WeightSpec = declared[path]
        add = functools.partial(merge, spec)
        for _ in range(value.ndim - len(spec.shape)):
            add = jax.vmap(add)
        return add(value, *(found[name] for name in beside(path)))

    return unflatten_dict({path: merged_weight(path, value) for path, value in by_path(weights).items()})
