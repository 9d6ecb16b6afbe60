"""An embedded engine's arrays and programs for devices that are not there: shapes, and what is lowered from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

import models
from models.decoder import Decoder
from models.inputs import ModelInput
from sharding.strategy import Params
from sharding.walk import Walk
from sharding.weights import with_shardings

from .engine_weights import EngineLayout, LayerParams
from .programs import KVCache, doubling, programs
from .requests import EngineLimits
from .scheduler import SlotTable
from .turns import LEAST_VIEW, PREFILL_PATCHES, PREFILL_TOKENS, Prefix, plan


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
        handed_in = with_shardings(models.split(abstract)[1], layout.weights(abstract))

        def served(x: Any, sharding: Sharding, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, compute_dtype or x.dtype, sharding=sharding)

        params: LayerParams = jax.tree.map(lambda x: served(x, x.sharding, x.shape), handed_in)
        one = layout.weights(abstract.layers, stacked=False)
        layer = jax.tree.map(lambda x, sharding: served(x, sharding, x.shape[1:]), handed_in["layers"], one)
        params["layers"] = [layer] * text.num_layers
        shape = KVCache.shape(text, slots, max_sequence_tokens)
        dtype = jax.tree.leaves(layer)[0].dtype
        rows = jax.ShapeDtypeStruct(shape, dtype, sharding=layout.rows(text))
        return EngineArrays(params, KVCache(rows, rows), handed_in)


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
    _, slots, tokens, *_ = arrays.cache.k_LBSKH.shape
    limits = EngineLimits(slots, tokens, model.config.text.vocab_size)
    graphdef, _ = models.split(model)
    rows = EngineLayout.of(devices).rows(model.config.text) if len(devices) > 1 else None
    engine = programs(graphdef, Walk(), limits.steps_per_sync, rows)
    batches = plan(
        [Prefix(prompt, tuple(np.zeros(n, np.int32) for n in begun or [0]))] * max(PREFILL_TOKENS // len(prompt), 1),
        row_tokens=tokens,
        batch_tokens=PREFILL_TOKENS,
        batch_patches=PREFILL_PATCHES,
        merge_unit=merge_unit,
    )
    _, largest = max(batches, key=lambda found: found[1].inputs.tokens_BT.size)
    batch = SlotTable(slots, tokens).round(np.arange(slots), slots)
    return {
        "prefill": engine.prefill.lower(arrays.params, largest.inputs),
        "decode": engine.decode.lower(arrays.params, arrays.cache, batch, doubling(tokens, LEAST_VIEW, tokens)),
    }
