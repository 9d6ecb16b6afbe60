"""The device side of the embedded engine: weights, cache, prefill and decoding."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import models
from models.decoder import Decoder, shapes_only
from models.hf import tensor_names
from models.inputs import PackedTokens
from models.shadow import Fetch, ShadowTensor
from models.tensor_names import TensorName
from sharding.mesh import exact_products
from sharding.walk import is_abstract
from sharding.weights import by_path

from .cache import KVCache, Rows
from .engine import EngineError
from .engine_weights import (
    EngineLayout,
    LayerParams,
    by_name,
    check_finite,
    check_shapes,
    engine_model,
    served,
    split_layers,
)
from .programs import ENDED, programs
from .requests import EngineLimits
from .slots import PAGE_TOKENS, DecodeRound, SlotSampling
from .turns import PrefillBatch, RoundPlan, StartPlan

if TYPE_CHECKING:
    from .prompt_pixels import FeatureWork, FetchedPixels

Program: TypeAlias = tuple[str, tuple[int, ...]]  # the name of a program, and the bucketed sizes of its arrays


@dataclasses.dataclass(frozen=True)
class Unread:
    """New tokens that the device may still be computing."""

    slots_B: np.ndarray
    parts: Sequence[Sequence[jax.Array]]  # padded tokens, log-probs and counts of each part of the slots
    sizes: Sequence[int]  # slots of each part
    lost: Mapping[str, Exception] = dataclasses.field(default_factory=dict)  # as in `NewTokens`

    def read(self) -> NewTokens:
        """Returns the tokens once the device has computed them. Raises the error of the computation."""
        parts = [[x[:size] for x in part] for part, size in zip(jax.device_get(self.parts), self.sizes, strict=True)]
        nothing = np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32), np.zeros(0, np.int32)
        joined = map(np.concatenate, zip(*parts, strict=True)) if parts else nothing
        return NewTokens(self.slots_B, *joined, lost=self.lost)


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """New tokens of some slots, on the host."""

    slots_B: np.ndarray
    tokens_BR: np.ndarray
    logprobs_BR: np.ndarray
    count_B: np.ndarray  # number of tokens of each row; padding follows them
    lost: Mapping[str, Exception] = dataclasses.field(default_factory=dict)  # by rid: why a request got no pixels

    @property
    def finite_B(self) -> np.ndarray:
        """Says for each slot whether all its log-probs are finite; if not, its tokens are arbitrary."""
        counted_BR = np.arange(self.tokens_BR.shape[1]) < self.count_B[:, None]
        return (np.isfinite(self.logprobs_BR) | ~counted_BR).all(axis=1)

    def only(self, rows_B: np.ndarray) -> NewTokens:
        kept = self.slots_B[rows_B], self.tokens_BR[rows_B], self.logprobs_BR[rows_B], self.count_B[rows_B]
        return NewTokens(*kept, self.lost)


def decode_program(batch: DecodeRound) -> Program:
    """The name and the bucketed sizes of the program of a round."""
    return "decode", (*batch.pages_BC.shape, *_ids(batch.sampling))


def _ids(sampling: SlotSampling) -> tuple[int, int, bool]:
    return sampling.stop_ids_BI.shape[1], sampling.forbidden_ids_BI.shape[1], sampling.limited


class DeviceState:
    """Weights and cache on the devices, for one thread at a time. The weights of `model` are cast to `dtype` (None: not
    cast). Weights of layers are copied; other weights are shared unless layout or dtype change."""

    def __init__(
        self,
        model: Decoder,
        limits: EngineLimits,
        layout: EngineLayout,
        dtype: DTypeLike | None,
        fetch: Fetch | None = None,
    ) -> None:
        self.pixels: FetchedPixels | None = None
        if fetch is not None:
            from .prompt_pixels import FetchedPixels

            self.pixels = FetchedPixels(fetch)
        self.engine_model, self._matrices = engine_model(model)
        self._graphdef, params = models.split(self.engine_model)[0], models.split(shapes_only(model))[1]
        self.abstract, self._text = models.abstract(model.config), model.config.text
        self.dtype = dtype
        self.limits = limits
        self._served = {  # every weight in the shape of updates and in the served dtype
            name: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype) for name, x in by_name(params).items()
        }
        exact_products(self.cache_dtype)
        self._settle(layout)
        self.params: LayerParams | None = None  # None: no update yet, lost by a failure, or asleep without weights
        if not is_abstract(weights := models.split(model)[1]):
            self._replace(weights)
        self.cache: KVCache | None = None  # None until a program needs it; a failure, a move or sleep drops it
        self.last_N: jax.Array | None = None  # made with the cache: the last token of each slot's sample, or `ENDED`
        self.shapes: set[Program] = set()  # of all calls so far
        self.compiling: dict[Program, concurrent.futures.Future[Any]] = {}  # compiled by threads before the first call

    def _settle(self, layout: EngineLayout) -> None:
        self.layout = layout
        self.stacked, self.rows = layout.weights(self.abstract), layout.rows(self._text)
        stack = self.engine_model.stack
        layers = {kind: layout.weights(module, stacked=False) for kind, module in stack.modules.items()}
        self.by_layers = {**self.stacked, **{kind: [layer] * stack.order.count(kind) for kind, layer in layers.items()}}
        rows = self.rows if len(layout.devices) > 1 else ()  # the programs for one device are the same for every device
        self.programs = programs(self._graphdef, rows)

    def move(self, layout: EngineLayout) -> None:
        """Moves the weights to other devices and drops the cache."""
        self.cache = None
        before = self.layout
        self._settle(layout)
        try:
            self.take(self)
        except BaseException:  # no memory on the new devices: keeps the old devices
            self._settle(before)
            raise

    def take(self, source: DeviceState) -> None:
        """Serves the weights of `source`; arrays on the same device are shared."""
        if source.params is not None:
            self.params = jax.block_until_ready(jax.device_put(source.params, self.by_layers))

    def disk_tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Returns (name, tensor) of every weight, in the checkpoint layout that servers read and in the served dtype.
        Holds the present weights until the iterator has ended. Raises EngineError if there are none."""
        params = self.params
        if params is None:
            raise EngineError("the engine has no weights")
        stacks = {kind: list(map(by_path, layers)) for kind, layers in params.items() if isinstance(layers, list)}
        outer = by_path({name: value for name, value in params.items() if name not in stacks})
        # The int is the number of axes that move from the end to the front, so that input axes come first.
        held: list[tuple[TensorName, Sequence[jax.Array] | jax.Array, int]] = []
        for entry in tensor_names(served(self.abstract.config)):
            if layers := stacks.get(entry.path[0]):
                held.append((entry, [layer[entry.path[1:]] for layer in layers], self._matrices.get(entry.path, 0)))
            else:
                held.append((entry, outer[entry.path] if entry.stacked else [outer[entry.path]], 0))
        return (
            (name, entry.to_disk(np.moveaxis(np.asarray(value), range(-inputs, 0), range(inputs))))
            for entry, layers, inputs in held
            for name, value in zip(entry.full_names, layers, strict=True)
        )

    def update(self, params: Mapping[str, Any]) -> None:
        """Replaces the weights by `params` (`models.split`). Raises EngineError, which names the tensor, for another
        name, shape or dtype (of floats, unless the engine casts weights), or a value that is not finite; the old
        weights then stay."""
        old, new = self._served, by_name(dict(params))
        check_shapes(old, new)
        for name, weight in new.items():
            dtype = weight.dtype
            if dtype != old[name].dtype and not (self.dtype is not None and jnp.issubdtype(dtype, jnp.floating)):
                raise EngineError(f"weight {name} has dtype {dtype}, the engine serves {old[name].dtype}")
        self._replace(params)

    def _replace(self, params: Mapping[str, Any]) -> None:
        check_finite(params, self.dtype)
        try:
            self.params = split_layers(params, self.dtype, self.stacked, self.by_layers, self._matrices, self.params)
        except BaseException:  # no memory: some of the old weights are gone
            self.params = None
            raise

    def start(self, plan: StartPlan) -> Unread:
        """Prefills prompts into pages and samples the first token of each sample whose prompt is prefilled to its end.
        If the pixels of a request can't be fetched, blank pixels take their place, so that no other request fails.
        `lost` then has the request's error, and the request's tokens are arbitrary."""
        lost, slots, parts = dict[str, Exception](), [np.zeros(0, np.int32)], []
        for step in plan:
            rows, hidden_BTD = step.batch.outputs = step.batch.outputs or self._prefill(step.batch, lost)
            sizes = (*step.batch.inputs.tokens_BT.shape, len(step.writes.page_W))
            if step.writes.states is not None:
                sizes = (*sizes, len(step.writes.states[0]))
            if step.starts is None:
                self.shapes.add(("fill", sizes))
                self.cache = self.programs.fill(self._ready_cache(), rows, step.writes)
            else:
                self.shapes.add(("start", (*sizes, len(step.starts.row_B), *_ids(step.starts.sampling))))
                self.cache, self.last_N, *new = self.programs.start(
                    self.params, self._ready_cache(), self.last_N, rows, hidden_BTD, step.writes, step.starts
                )
                slots.append(step.slots_B)
                parts.append(new)
        return Unread(np.concatenate(slots), parts, list(map(len, slots[1:])), lost)

    def _prefill(self, batch: PrefillBatch, lost: dict[str, Exception]) -> tuple[Rows, jax.Array]:
        inputs, context = self._with_pixels(batch, lost), batch.context
        vision = inputs.vision
        sizes = (vision.num_patches, vision.frame_bound) if vision is not None else ()
        before: tuple[Any, ...] = ()
        if context is not None:
            sizes, before = (context.pages_BC.shape[1], *sizes), (self._ready_cache(), context)
        if batch.features is not None:
            features_FX = self._features(batch.features, lost)
            sizes, before = (*sizes, len(features_FX)), (*(before or (None, None)), features_FX)
            batch.features = None
        self.shapes.add(("prefill" if context is None else "continue", (*inputs.tokens_BT.shape, *sizes)))
        return self.programs.prefill(self.params, inputs, *before)

    def _with_pixels(self, batch: PrefillBatch, lost: dict[str, Exception]) -> PackedTokens:
        vision = batch.inputs.vision
        if vision is None or not isinstance(vision.patches_PX, ShadowTensor):
            return batch.inputs
        patches_PX = np.zeros(vision.patches_PX.shape, np.float32)
        for rid, start, stop in batch.shown:
            patches_PX[start:stop] = self._fetched(rid, vision.patches_PX[start:stop], lost)
        return dataclasses.replace(batch.inputs, vision=dataclasses.replace(vision, patches_PX=patches_PX))

    def _fetched(self, rid: str, tensor: ShadowTensor, lost: dict[str, Exception]) -> np.ndarray:
        """The patches of a tensor: blank ones if fetching fails, which adds the request to `lost`."""
        try:
            assert self.pixels is not None, "requests are checked"
            if rid not in lost:
                return self.pixels.take(tensor)
        except Exception as error:
            lost[rid] = error
        return np.zeros(tensor.shape, np.float32)

    def _features(self, work: FeatureWork, lost: dict[str, Exception]) -> jax.Array:
        """Computes the planned groups of frame pairs. Returns all features of the prompt, 0 if not computed yet."""
        kept = work.kept
        for number in work.groups:
            group, patches = kept.groups[number], kept.patches(number)
            patches = self._fetched(work.rid, patches, lost) if isinstance(patches, ShadowTensor) else patches
            vision = kept.input(number, patches)
            self.shapes.add(("features", (vision.num_patches, vision.frame_bound)))
            features_MX = self.programs.features(self.params, vision)
            if kept.rows is None:
                shape, place = (kept.size, features_MX.shape[1]), features_MX.sharding
                kept.rows = jnp.zeros(shape, features_MX.dtype, device=place)
            self.shapes.add(("keep", (kept.size, len(features_MX))))
            kept.rows = self.programs.keep(kept.rows, features_MX, np.int32(group.row))
        assert kept.rows is not None, "the first chunk that shows a feature must compute features"
        return kept.rows

    def decode(self, plan: RoundPlan) -> Unread:
        """Decodes the tokens of a round. The first inputs are the tokens that earlier turns left in `last_N`."""
        slots_B, batch = plan
        program = decode_program(batch)
        self.shapes.add(program)
        if (compiling := self.compiling.pop(program, None)) is not None:  # its failure is the call's failure, too
            concurrent.futures.wait([compiling])
        self.cache, self.last_N, *new = self.programs.decode(self.params, self._ready_cache(), self.last_N, batch)
        return Unread(slots_B, [new], [len(slots_B)])

    def room(self, share: float, unknown: int) -> int:
        """The tokens whose cache fits into `share` of the free memory (`unknown` bytes if a device reports none) of the
        fullest device, beside the states of all slots."""
        room: list[int] = []
        for device in self.layout.devices:
            memory = device.memory_stats() or {}
            known = "bytes_limit" in memory
            room.append(int(share * (memory["bytes_limit"] - memory["bytes_in_use"])) if known else unknown)
        arrays = jax.tree.leaves(self.cache_shapes(1))
        keys, values, *states = (math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)
        return max(min(room) - sum(states), 0) // ((keys + values) // PAGE_TOKENS)

    def cache_shapes(self, pages: int) -> KVCache:
        """A cache with this many pages, states for all slots, and kept states, as shapes with shardings."""
        states = self.limits.slots + self.limits.kept_states
        shapes = KVCache.shapes(self._text, pages, states, self.cache_dtype)
        places = jax.tree.unflatten(jax.tree.structure(shapes), self.rows)
        return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)

    @property
    def cache_bytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self.cache))

    @property
    def cache_dtype(self) -> jnp.dtype:
        return next(iter(self._served.values())).dtype

    def _ready_cache(self) -> KVCache:
        if self.cache is None:
            shapes = self.cache_shapes(self.limits.pages)
            cache: KVCache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)
            self.cache = cache
            self.last_N = jnp.full(self.limits.slots, ENDED, jnp.int32, device=self.layout.replicated)
        return self.cache
