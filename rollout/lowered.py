"""An embedded engine's arrays and programs for devices that are only described: shapes, and lowered programs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

import models
from models.decoder import Decoder
from models.inputs import ModelInput
from sharding.walk import Params

from .engine_weights import EngineLayout, LayerParams, engine_model
from .programs import KVCache, programs
from .prompt_pixels import FeatureWork, PromptFeatures
from .requests import EngineLimits
from .scheduler import CHUNK_TOKENS, PREFILL_TOKENS
from .slots import PAGE_TOKENS, SlotTable, pages_for
from .turns import PREFILL_PATCHES, PrefillBatch, Prefix, by_groups, chunk_tokens, part, plan, text_input


@dataclasses.dataclass(frozen=True)
class EngineArrays:
    """The arrays that an engine keeps on its devices, as shapes with shardings."""

    params: LayerParams
    cache: KVCache
    handed_in: Params  # the weights of an update: stacks of layers, in the served dtype

    @staticmethod
    def of(model: Decoder, kv_tokens: int, compute_dtype: DTypeLike | None, devices: Sequence[Any]) -> EngineArrays:
        """Takes the arguments of `JaxEngine`; the model may be abstract. Raises EngineError as the engine does."""
        layout, text = EngineLayout.of(devices), model.config.text
        abstract = models.abstract(model.config)
        turned, _ = engine_model(abstract)

        def served(x: Any, sharding: Sharding, stacked: int = 0) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape[stacked:], compute_dtype or x.dtype, sharding=sharding)

        handed_in: Params = jax.tree.map(served, models.split(abstract)[1], layout.weights(abstract))
        of_a_layer = functools.partial(served, stacked=1)
        shardings = layout.weights(turned.layers, stacked=False)
        layer = jax.tree.map(of_a_layer, models.split(turned)[1]["layers"], shardings)
        params: LayerParams = {**handed_in, "layers": [layer] * text.num_layers}
        shape = KVCache.shape(text, pages_for(kv_tokens))
        dtype = jax.tree.leaves(layer)[0].dtype
        rows = jax.ShapeDtypeStruct(shape, dtype, sharding=layout.rows(text))
        return EngineArrays(params, KVCache(rows, rows), handed_in)


def lowered_programs(
    model: Decoder,
    arrays: EngineArrays,
    *,
    slots: int,
    max_sequence_tokens: int,
    devices: Sequence[Any],
    prompt: ModelInput,
    begun: Sequence[int] = (),
) -> dict[str, jax.stages.Lowered]:
    """The programs that need most memory, by name, not compiled yet. `prefill` has as many prompts like the given one,
    which is the longest, as a call takes, or the last chunk of a sequence if that needs more. `features` has the
    prompt's largest group of frame pairs, if its features are computed by groups. `decode` has all slots at full
    length.

    `begun` are the lengths of a prompt's responses that are prefilled with it: requests continue after their cache was
    dropped.
    """
    limits = EngineLimits.of(model.config, slots, max_sequence_tokens)
    graphdef, _ = models.split(engine_model(model)[0])
    layout = EngineLayout.of(devices)
    rows = layout.rows(model.config.text) if len(devices) > 1 else None
    engine = programs(graphdef, limits.steps_per_sync, rows)
    whole = chunk_tokens(prompt)
    fitting = tuple(np.zeros(n, np.int32) for n in begun if len(prompt) + n <= whole) or (np.zeros(0, np.int32),)
    kept = PromptFeatures.of(prompt, limits.merge_unit, PREFILL_PATCHES) if by_groups(prompt.vision) else None
    features = None if kept is None else FeatureWork("", kept, ())
    if len(prompt) <= whole:
        prefixes = [Prefix(prompt, fitting, features=features)] * max(PREFILL_TOKENS // len(prompt), 1)
    else:
        prefixes = [Prefix(part(prompt, fitting[0], 0, whole), fitting[:1], features=features)]
    packed = list(plan(prefixes, limits, PREFILL_TOKENS, PREFILL_PATCHES))
    longest = len(prompt) + max(begun, default=0)
    if longest > whole:
        context = range(pages_for(longest - CHUNK_TOKENS))
        last = text_input([0] * CHUNK_TOKENS)
        chunk = Prefix(last, (np.zeros(0, np.int32),), tuple(context))
        packed += plan([chunk], limits, PREFILL_TOKENS, PREFILL_PATCHES)
    largest = max((batch for _, batch in packed), key=_scores)
    before: tuple[Any, ...] = () if largest.context is None else (arrays.cache, largest.context)
    pages = pages_for(max_sequence_tokens)
    table = SlotTable(slots, max_sequence_tokens, limits.pages)
    batch = table.round(np.arange(slots), slots, limits.steps_per_sync, pages)
    lowered = {"decode": engine.decode.lower(arrays.params, arrays.cache, batch)}
    if kept is not None:
        groups = (kept.input(number, kept.patches(number)) for number in range(len(kept.groups)))
        most = max(groups, key=lambda group: group.num_patches * (group.num_patches + group.frame_bound))
        lowered["features"] = engine.features.lower(arrays.params, most)
        if largest.features is not None:
            rows_FD = (kept.size, model.config.text.hidden_size)
            dtype = arrays.params["embedding"]["table"].dtype
            features_FD = jax.ShapeDtypeStruct(rows_FD, dtype, sharding=layout.replicated)
            before = (*(before or (None, None)), features_FD)
    return lowered | {"prefill": engine.prefill.lower(arrays.params, largest.inputs, *before)}


def _scores(batch: PrefillBatch) -> int:
    """The number of attention scores of a head in a prefill."""
    B, T = batch.inputs.tokens_BT.shape
    return B * T * (T + (0 if batch.context is None else batch.context.pages_BC.shape[1] * PAGE_TOKENS))
