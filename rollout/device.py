"""The device side of the embedded engine: weights, cache, and the turns. One thread at a time uses it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

import models
from models.decoder import Decoder, is_abstract, shapes_only
from sharding.walk import Walk

from .engine import EngineError
from .kv_cache import KVCache
from .layer_weights import LayerParams, abstract_by_layer, check_finite, split_layers
from .programs import programs
from .sampling import SlotSampling
from .tensor_parallel import EngineLayout
from .turns import RoundPlan, StartPlan, TurnLimits


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """New tokens of some slots, on the host: the only thing that is copied from the device."""

    slots_B: np.ndarray
    tokens_BR: np.ndarray
    logprobs_BR: np.ndarray
    count_B: np.ndarray  # number of tokens of each row that count; the others are filling

    @property
    def finite_B(self) -> np.ndarray:
        """A boolean for each slot: all its log-probs are finite. The other slots were given arbitrary tokens."""
        counted_BR = np.arange(self.tokens_BR.shape[1]) < self.count_B[:, None]
        return (np.isfinite(self.logprobs_BR) | ~counted_BR).all(axis=1)

    def only(self, rows_B: np.ndarray) -> NewTokens:
        return NewTokens(self.slots_B[rows_B], self.tokens_BR[rows_B], self.logprobs_BR[rows_B], self.count_B[rows_B])


def _by_name(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _ids(sampling: SlotSampling) -> tuple[int, int]:
    return sampling.stop_ids_BI.shape[1], sampling.forbidden_ids_BI.shape[1]


class DeviceState:
    """Weights and cache on the devices. `model` is copied, its weights are cast to `dtype` (None: as they are); an
    abstract model has none, and `params` is None until they come. `walk` and `steps` are those of the programs."""

    params: LayerParams | None  # None: none came yet, or a failure left some of them behind

    def __init__(
        self, model: Decoder, walk: Walk, steps: int, limits: TurnLimits, layout: EngineLayout, dtype: DTypeLike | None
    ) -> None:
        self._graphdef, params = models.split(shapes_only(model))
        self._abstract, self._text = models.abstract(model.config), model.config.text
        self._walk, self._steps, self._dtype = walk, steps, dtype
        self.limits = limits
        self._served = {  # every weight as it is handed in, but in the dtype that is served
            name: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype) for name, x in _by_name(params).items()
        }
        self._settle(layout)
        self.params = None
        if not is_abstract(model):
            self._replace(models.split(model)[1])
        self.cache: KVCache | None = None  # made when needed; None after a failure or while asleep
        self.shapes: set[tuple[str, tuple[int, ...]]] = set()  # program and bucketed sizes of every call so far

    def _settle(self, layout: EngineLayout) -> None:
        """Prepares shardings and programs for these devices."""
        self.layout = layout
        self._stacked, self._rows = layout.weights(self._abstract), layout.rows(self._text)
        by_layer = layout.weights(abstract_by_layer(self._abstract))
        self._by_layers = {**by_layer, "layers": [by_layer["layers"]] * self._text.num_layers}
        several = len(layout.devices) > 1  # the programs of one device serve any other, too
        self.programs = programs(self._graphdef, self._walk, self._steps, self._rows if several else None)

    def move(self, layout: EngineLayout) -> None:
        """Moves the weights to other devices and drops the cache."""
        self.cache = None
        before = self.layout
        self._settle(layout)
        try:
            self.take(self)
        except BaseException:  # no room there: it goes on where it was
            self._settle(before)
            raise

    def take(self, other: DeviceState) -> None:
        """Serves the weights that `other` serves; where both are on the same device, the very arrays."""
        if other.params is not None:
            self.params = jax.block_until_ready(jax.device_put(other.params, self._by_layers))

    def update(self, params: Mapping[str, Any]) -> None:
        """Replaces the weights by a copy. Raises EngineError, which names the tensor, where names, shapes or dtypes
        differ from the old ones or a value is not finite; the old ones then stay."""
        old, new = self._served, _by_name(dict(params))
        for name in sorted(old.keys() | new.keys()):
            if name not in new or name not in old:
                raise EngineError(f"weight {name} is {'missing' if name in old else 'none of those that are served'}")
            shape, dtype = getattr(new[name], "shape", None), getattr(new[name], "dtype", None)
            if shape != old[name].shape or dtype is None:  # None: no array at all
                raise EngineError(f"weight {name} has shape {shape}, the engine serves {old[name].shape}")
            if dtype != old[name].dtype and not (self._dtype is not None and jnp.issubdtype(dtype, jnp.floating)):
                raise EngineError(f"weight {name} has dtype {dtype}, the engine serves {old[name].dtype}")
        self._replace(params)

    def _replace(self, params: Mapping[str, Any]) -> None:
        check_finite(params, self._stacked)
        old, self.params = self.params, None
        self.params = split_layers(params, self._dtype, self._stacked, self._by_layers, old)

    def start(self, plan: StartPlan) -> list[NewTokens]:
        """Prefills prompts into slots and draws the first token of each sample."""
        for batch in plan.prefills:
            vision = batch.inputs.vision
            patches = (vision.num_patches, vision.frame_bound) if vision is not None else ()
            self.shapes.add(("prefill", (*batch.inputs.tokens_BT.shape, *patches)))
            batch.outputs = self.programs.prefill(self.params, batch.inputs)
        drawn = []
        for batch, slots_B, starts in plan.starts:
            assert batch.outputs is not None, "prefilled above, or in an earlier turn"
            self.shapes.add(("start", (*batch.inputs.tokens_BT.shape, *starts.source_BT.shape, *_ids(starts.sampling))))
            self.cache, *new = self.programs.start(self.params, self._ready_cache(), *batch.outputs, starts)
            drawn.append((slots_B, new))
        results = []
        for slots_B, new in drawn:
            tokens_B, logprobs_B = jax.device_get(new)
            J = len(slots_B)
            results.append(NewTokens(slots_B, tokens_B[:J, None], logprobs_B[:J, None], np.ones_like(slots_B)))
        return results

    def decode(self, plan: RoundPlan) -> list[NewTokens]:
        """Up to `steps_per_sync` tokens for each running sample."""
        self.shapes.add(("decode", (len(plan.batch.slots_B), plan.view_length, *_ids(plan.batch.sampling))))
        self.cache, *new = self.programs.decode(self.params, self._ready_cache(), plan.batch, plan.view_length)
        return [NewTokens(plan.slots_B, *(x[: len(plan.slots_B)] for x in jax.device_get(new)))]

    def _ready_cache(self) -> KVCache:
        if self.cache is None:
            dtype = next(iter(self._served.values())).dtype
            slots, tokens = self.limits.slots, self.limits.max_sequence_tokens
            self.cache = KVCache.create(self._text, slots, tokens, dtype, self._rows)
        return self.cache
