"""The weights of an embedded engine: each layer has arrays of its own, on the engine's devices.

A decode step reads every weight once, and memory traffic limits its speed. A program that takes a layer out of a stack
copies the layer's weights first, which triples the traffic. In the matrices of layers, output axes come first
(`engine_model`): on a CPU, products of few rows then take half the time.

With several devices, attention is cut by heads, an MLP by its inner width, embedding and head by the vocabulary. The
compiler divides the programs by the shardings of the weights (GSPMD).
"""

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import PyTree

import models
from models.config import DecoderConfig, TextConfig
from models.decoder import Decoder, shapes_only
from models.registry import ARCHITECTURES
from sharding.mesh import Device, make_mesh
from sharding.walk import Params
from sharding.weights import WeightSpec, by_path, map_weights

from .engine import EngineError

T = TypeVar("T")
CUT = frozenset("NKFV")  # axes to cut: heads, KV heads, inner width of an MLP, vocabulary; no weight has two of them
TOGETHER = 16 << 20  # the most bytes of small weights that one call copies; a call takes longer than a small copy
LayerParams: TypeAlias = dict[str, Any]  # weights as `models.split` gives them, but a list of layers for each kind

# Several engines copy the same weights at the same time, each in its thread. JAX lists the shards of an array at the
# first use; two threads that do this at once may get lists that are too short or too long.
_placing = threading.Lock()


def served(config: DecoderConfig) -> DecoderConfig:
    """The configuration with the weight names that servers read: SGLang reads only the published names."""
    return dataclasses.replace(config, names=ARCHITECTURES[config.architecture].published)


def on_host(model: Decoder) -> Params:
    """Shardings for weights read from disk: on the host, from which an engine moves them piece by piece, freeing its
    old weights meanwhile, or on the first device if JAX has no CPU backend."""
    try:
        place = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS=cuda
        place = jax.local_devices()[0]
    return map_weights(lambda *_: SingleDeviceSharding(place), model)


def by_name(params: PyTree) -> dict[str, Any]:
    """The weights by a name for messages."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def check_shapes(served: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """Raises EngineError, which names the tensor, unless names and shapes are those of the served weights."""
    for name in sorted(served.keys() | params.keys()):
        if name not in params or name not in served:
            raise EngineError(f"weight {name} is {'missing' if name in served else 'not among the served weights'}")
        shape, dtype = getattr(params[name], "shape", None), getattr(params[name], "dtype", None)
        if shape != served[name].shape or dtype is None:  # no dtype: not an array
            raise EngineError(f"weight {name} has shape {shape}, the engine serves {served[name].shape}")


def check_finite(params: Mapping[str, Any], dtype: DTypeLike | None) -> None:
    """Raises EngineError, which names the tensor, if one of `params`, cast to `dtype` (None: not cast), has NaN or
    infinity. Each device checks the pieces that it holds."""
    weights = by_name(params)
    found = dict.fromkeys(weights, True)
    on_devices: dict[Device, list[tuple[str, jax.Array]]] = {}
    for name, weight in weights.items():
        if not isinstance(weight, jax.Array):
            with np.errstate(over="ignore"):  # values beyond the range of `dtype` become infinite
                found[name] = bool(np.isfinite(np.asarray(weight, dtype)).all())
            continue
        with _placing:
            pieces = {str(shard.index): shard for shard in weight.addressable_shards}  # one copy of each piece
        for shard in pieces.values():
            on_devices.setdefault(shard.device, []).append((name, shard.data))
    # One program for each device; all devices begin before the first answer is awaited.
    answers = [
        ([name for name, _ in held], _are_finite([data for _, data in held], dtype)) for held in on_devices.values()
    ]
    for names, finite in answers:
        for name, holds in zip(names, np.asarray(finite), strict=True):
            found[name] &= bool(holds)
    for name, holds in found.items():
        if not holds:
            raise EngineError(f"weight {name} has values that are not finite (NaN or infinity)")


def split_layers(
    params: Mapping[str, Any],
    dtype: DTypeLike | None,
    stacked: Params,
    whole: LayerParams,
    matrices: Mapping[tuple, int],
    old: LayerParams | None,
) -> LayerParams:
    """Returns the weights `params` (`models.split`) by layers, cast to `dtype` (None: not cast), when all copies are
    complete. `stacked` has the shardings of complete stacks on the engine's devices, `whole` those of the result.
    Weights of layers are copied; in those of `matrices`, output axes come first. Any other array is shared if its dtype
    and sharding are right already. Each weight is dropped from `old` before its replacement is made, so that only about
    `TOGETHER` bytes, or one larger weight, are on the devices twice."""
    stacks = {kind: layers for kind, layers in whole.items() if isinstance(layers, list)}
    places, targets = by_path(stacked), by_path({**whole, **{kind: layers[0] for kind, layers in stacks.items()}})
    by_kind: dict[str, list[dict[tuple, jax.Array]]] = {kind: [{} for _ in layers] for kind, layers in stacks.items()}
    outer: dict[tuple, jax.Array] = {}
    for portion in map(dict, portions(by_path(params).items(), lambda weight: weight[1].nbytes, TOGETHER)):
        if old is not None:
            for path in portion:
                _forget(old, path)
        # Shared arrays keep their buffers, and get the engine's mesh, since a program is compiled again for each mesh.
        shared = {
            path: w for path, w in portion.items() if path[0] not in stacks and _as_served(w, dtype, targets[path])
        }
        outer |= jax.device_put(shared, {path: targets[path] for path in shared})
        # `device_put` alone may share memory, even with a numpy array; the output of a compiled copy never does.
        placed = {path: _placed(w, dtype, places[path]) for path, w in portion.items() if path not in shared}
        copies = _copied(placed, tuple(stacks), tuple(matrices.items()))
        del placed
        for path, copy in jax.device_put(copies, {path: targets[path] for path in copies}).items():
            if path[0] in stacks:
                for layer, weight in zip(by_kind[path[0]], copy, strict=True):
                    layer[path[1:]] = weight
            else:
                outer[path] = copy
        jax.block_until_ready((by_kind, outer))
    return {**unflatten_dict(outer), **{kind: list(map(unflatten_dict, layers)) for kind, layers in by_kind.items()}}


def portions(items: Iterable[T], nbytes: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yields all items in order, in lists of at most `most` bytes or of one larger item."""
    portion: list[T] = []
    size = 0
    for item in items:
        if portion and size + nbytes(item) > most:
            yield portion
            portion, size = [], 0
        portion.append(item)
        size += nbytes(item)
    yield portion


def _as_served(weight: jax.Array | np.ndarray, dtype: DTypeLike | None, sharding: Sharding) -> bool:
    """Says whether the engine can serve this array without a copy. A numpy array may still change, and is copied."""
    if not isinstance(weight, jax.Array) or (dtype is not None and weight.dtype != dtype):
        return False
    return weight.sharding.is_equivalent_to(sharding, weight.ndim)


def _placed(weight: jax.Array | np.ndarray, dtype: DTypeLike | None, sharding: Sharding) -> jax.Array:
    """The weight in `dtype` and `sharding`, cast before it moves, so that fewer bytes move."""
    with _placing:
        if dtype is not None and weight.dtype != dtype:
            weight = _cast(weight, dtype) if isinstance(weight, jax.Array) else weight.astype(dtype)
        return jax.device_put(weight, sharding)


@functools.partial(jax.jit, static_argnums=1)
def _cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    return x.astype(dtype)


def _forget(params: LayerParams, path: tuple) -> None:
    layers = isinstance(params[path[0]], list)
    for tree in params[path[0]] if layers else [params]:
        for key in path[1:-1] if layers else path[:-1]:
            tree = tree[key]
        del tree[path[-1]]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _copied(
    weights: dict[tuple, jax.Array], stacks: tuple[str, ...], matrices: tuple[tuple[tuple, int], ...]
) -> dict[tuple, jax.Array | tuple[jax.Array, ...]]:
    """A copy of each weight, or of each layer of it; copies of `matrices` have their output axes first."""
    inputs = dict(matrices)

    def copy(path: tuple, x: jax.Array) -> jax.Array | tuple[jax.Array, ...]:
        if path[0] in stacks:
            first = range(inputs.get(path, 0))
            last = [n - len(first) for n in first]
            return tuple(jnp.array(jnp.moveaxis(x[i], first, last)) for i in range(x.shape[0]))
        return jnp.array(x, copy=True)

    return {path: copy(path, x) for path, x in weights.items()}


@functools.partial(jax.jit, static_argnums=1)
def _are_finite(arrays: Sequence[jax.Array], dtype: DTypeLike | None) -> jax.Array:
    return jnp.stack([jnp.isfinite(x.astype(dtype or x.dtype)).all() for x in arrays])


def engine_model(model: Decoder) -> tuple[Decoder, dict[tuple, int]]:
    """Returns (the abstract model that an engine computes with, the number of input axes of each matrix of layers, by
    its path). In these matrices of the model, output axes come first."""
    turned, matrices = shapes_only(model), dict[tuple, int]()
    for kind, layers in turned.stack.modules.items():
        for path, variable in nnx.iter_graph(layers):
            if isinstance(variable, nnx.Param) and (spec := variable.get_metadata("spec")).inputs:
                variable.set_metadata(spec=spec.turned())
                stack, dtype = variable.shape[: -len(spec.shape)], variable.dtype
                variable.set_value(jax.ShapeDtypeStruct((*stack, *spec.turned().shape), dtype))
                matrices[kind, *path] = spec.inputs
    return turned, matrices


def model_by_layers(graphdef: nnx.GraphDef[Decoder], params: LayerParams) -> tuple[Decoder, list[Any]]:
    """Returns (the model, its layers in order). In place of a stack, the model has the first layer of the kind."""
    stacks = {kind: layers for kind, layers in params.items() if isinstance(layers, list)}
    parts: list[Decoder] = [
        models.merge(graphdef, {**params, **{kind: layers[min(i, len(layers) - 1)] for kind, layers in stacks.items()}})
        for i in range(max(map(len, stacks.values())))
    ]
    layers = {kind: [part.stack.modules[kind] for part in parts[: len(of_kind)]] for kind, of_kind in stacks.items()}
    return parts[0], parts[0].stack.in_order(layers)


@dataclasses.dataclass(frozen=True)
class EngineLayout:
    """The devices that one engine computes on, and the way its arrays lie on them. An axis of `CUT` is cut into as many
    parts as the largest power of two that divides it and is at most the number of devices; with fewer parts than
    devices, each part lies on several. Raises EngineError unless there are 1, 2, 4, ... different devices."""

    devices: tuple[Device, ...]

    def __post_init__(self) -> None:
        count = len(self.devices)
        if not count or count & (count - 1) or len(set(self.devices)) < count:
            raise EngineError(f"an engine computes on 1, 2, 4, ... different devices, not on {list(self.devices)}")

    @staticmethod
    def of(devices: Sequence[Device] | None) -> "EngineLayout":
        """The layout on `devices` (None: on this process's first device)."""
        return EngineLayout(tuple(jax.local_devices()[:1] if devices is None else devices))

    def weights(self, model: nnx.Module, *, stacked: bool = True) -> Params:
        """Shardings in the structure of the model's parameters; without `stacked`, those of one layer of a stack."""

        def sharding(_: tuple, variable: nnx.Variable) -> Sharding:
            spec: WeightSpec = variable.get_metadata("spec")
            for dim, (axis, size) in enumerate(zip(spec.axes, spec.shape, strict=True)):
                if axis in CUT:
                    return self._sharding(dim + (len(variable.shape) - len(spec.shape) if stacked else 0), size)
            return self.replicated

        return map_weights(sharding, model)

    @property
    def replicated(self) -> Sharding:
        """The sharding of an array that is complete on each device."""
        return self._sharding(0, 1)

    def rows(self, text: TextConfig) -> tuple[Sharding, ...]:
        """The shardings of keys and values (`[L, C, K, S, H]` in the cache, `[L, B, K, T, H]` in a prefill), and of the
        states of layers, if they have any (`[L, B, V, H, J]` and `[L, B, 3, X]`)."""
        heads = self._sharding(2, text.num_kv_heads)
        if text.delta is None:
            return heads, heads
        return heads, heads, self._sharding(2, text.delta.value_heads), self.replicated

    def _sharding(self, dim: int, size: int) -> Sharding:
        if len(self.devices) == 1:
            return SingleDeviceSharding(self.devices[0])
        mesh = make_mesh(devices=self.devices)
        # Outer axes come first, so that device `i` has KV head `i * K // devices`, which its query heads read.
        axes = mesh.axis_names[1:]
        while size % math.prod(mesh.shape[axis] for axis in axes):
            axes = axes[:-1]
        return NamedSharding(mesh, P(*[None] * dim, axes) if axes else P())
