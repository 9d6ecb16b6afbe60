"""An embedded engine's arrays and programs for devices that are not there: shapes, and what is lowered from them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

import models
from models.decoder import Decoder
from models.inputs import ModelInput
from sharding.strategy import Params
from sharding.walk import Walk
from sharding.weights import with_shardings

from .buckets import doubling
from .jax_engine import JaxEngine
from .kv_cache import KVCache
from .layer_weights import LayerParams, abstract_by_layer
from .prefill import Prefix, plan
from .programs import programs
from .slots import SlotTable
from .tensor_parallel import EngineLayout
from .turns import LEAST_VIEW, TurnLimits


@dataclasses.dataclass(frozen=True)
class EngineArrays:
    """What an engine keeps on its devices, as shapes with shardings."""

    params: LayerParams
    cache: KVCache
    handed_in: Params  # the weights as an update brings them, stacks of layers

    @staticmethod
    def of(
        model: Decoder, slots: int, max_sequence_tokens: int, compute_dtype: DTypeLike | None, devices: Sequence[Any]
    ) -> EngineArrays:
        """Arguments are those of `JaxEngine`; the model may be abstract. Raises EngineError as the engine does."""
        layout, text = EngineLayout.of(devices), model.config.text
        abstract = models.abstract(model.config)
        by_layer = abstract_by_layer(abstract)
        handed_in = with_shardings(models.split(abstract)[1], layout.weights(abstract))
        params = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, compute_dtype or x.dtype, sharding=sharding),
            models.split(by_layer)[1],
            layout.weights(by_layer),
        )
        params["layers"] = [params["layers"]] * text.num_layers
        dtype = jax.tree.leaves(params)[0].dtype
        cache = jax.eval_shape(lambda: KVCache.create(text, slots, max_sequence_tokens, dtype))
        rows = layout.rows(text)
        return EngineArrays(params, with_shardings(cache, KVCache(rows, rows)), handed_in)


def lowered_programs(
    model: Decoder,
    arrays: EngineArrays,
    *,
    devices: Sequence[Any],
    prompt: ModelInput,
    begun: Sequence[int] = (),
    merge_unit: int = 1,
) -> dict[str, jax.stages.Lowered]:
    """The programs that need most, by name, not compiled yet: `prefill` of as many prompts like the given one, which is
    the longest, as a call takes; `decode` of all slots at their full length.

    `begun` are the lengths of a prompt's responses that are prefilled with it, where requests go on after their cache
    was dropped. `merge_unit` patches are a feature.
    """
    default = {name: parameter.default for name, parameter in inspect.signature(JaxEngine).parameters.items()}
    _, slots, tokens, *_ = arrays.cache.k_LBSKH.shape
    limits = TurnLimits(
        slots, tokens, default["prefill_tokens"], default["prefill_patches"], merge_unit, small_model=True
    )
    graphdef, _ = models.split(model)
    rows = EngineLayout.of(devices).rows(model.config.text) if len(devices) > 1 else None
    engine = programs(graphdef, Walk(), default["steps_per_sync"], rows)
    batches = plan(
        [Prefix(prompt, tuple(np.zeros(n, np.int32) for n in begun or [0]))]
        * max(limits.prefill_tokens // len(prompt), 1),
        row_tokens=tokens,
        batch_tokens=limits.prefill_tokens,
        batch_patches=limits.prefill_patches,
        merge_unit=merge_unit,
    )
    _, largest = max(batches, key=lambda found: found[1].inputs.tokens_BT.size)
    size = doubling(slots, limits.least_rows, slots)
    batch = SlotTable(slots, tokens).round(np.arange(slots), size)
    return {
        "prefill": engine.prefill.lower(arrays.params, largest.inputs),
        "decode": engine.decode.lower(arrays.params, arrays.cache, batch, doubling(tokens, LEAST_VIEW, tokens)),
    }
