"""The arrays (as shapes) and the lowered programs of an embedded engine, for devices that need not exist."""

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

import models
from models.decoder import Decoder
from models.inputs import ModelInput, text_input
from sharding.walk import Params

from .device import DeviceState
from .engine import GenerateRequest, SamplingParams
from .engine_weights import EngineLayout, LayerParams
from .requests import EngineLimits
from .scheduler import CHUNK_TOKENS, PREFILL_TOKENS
from .slots import PAGE_TOKENS, DecodeRound, SlotTable, pages_for
from .turns import PREFILL_PATCHES, PrefillBatch, Prefix, by_groups, chunk_tokens, part, plan


class EngineArrays:
    """Arrays of an engine, as shapes with shardings. The engine keeps `params` and `cache` on its devices. `handed_in`
    are the weights of an update: stacks of layers, in the served dtype."""

    def __init__(
        self, model: Decoder, limits: EngineLimits, compute_dtype: DTypeLike | None, devices: Sequence[Any]
    ) -> None:
        """The model may be abstract. Raises EngineError for devices that `EngineLayout` refuses."""
        abstract = models.abstract(model.config)
        self._state = state = DeviceState(abstract, limits, EngineLayout.of(devices), compute_dtype)

        def served(x: Any, sharding: Sharding, stacked: int = 0) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape[stacked:], compute_dtype or x.dtype, sharding=sharding)

        self.handed_in: Params = jax.tree.map(served, models.split(abstract)[1], state.stacked)
        stacks: Params = models.split(state.engine_model)[1]
        self.params: LayerParams = {**self.handed_in}
        for kind, count in collections.Counter(state.engine_model.stack.order).items():
            layer = jax.tree.map(functools.partial(served, stacked=1), stacks[kind], state.by_layers[kind][0])
            self.params[kind] = [layer] * count
        self.cache = state.cache_shapes(limits.pages)

    def round(self, size: int, sampling: SamplingParams) -> DecodeRound:
        """The input of the decode program for a round of `size` samples with this sampling."""
        limits, slots = self._state.limits, list(range(size))
        table = SlotTable(limits.slots, limits.max_sequence_tokens, limits.pages, limits.kept_states)
        table.assign(GenerateRequest("", text_input([0]), sampling), slots, slots, [()] * size)
        return table.round(np.arange(size), size, limits.round_tokens, limits.round_tokens)

    def decode(self, batch: DecodeRound | None = None) -> jax.stages.Lowered:
        """The program of a round like `batch`, or of a round with samples in all slots, not compiled yet."""
        limits = self._state.limits
        batch = batch or self.round(limits.slots, SamplingParams())
        last_N = jax.ShapeDtypeStruct((limits.slots,), np.int32, sharding=self._state.layout.replicated)
        return self._state.programs.decode.lower(self.params, self.cache, last_N, batch)

    def lowered(self, prompt: ModelInput, begun: Sequence[int] = ()) -> dict[str, jax.stages.Lowered]:
        """The programs that need the most memory, by name, not compiled yet. `prompt` is the longest prompt. `prefill`
        takes as many copies of it as one call may have, with `begun` tokens of responses behind them, as after the loss
        of a cache, or the last chunk of a sequence if this chunk has more attention scores. `features` takes the
        largest group of frame pairs, if the vision tower computes by groups. `decode` takes all slots."""
        from .prompt_pixels import FeatureWork, PromptFeatures

        limits, programs = self._state.limits, self._state.programs
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
        before: tuple[Any, ...] = () if largest.context is None else (self.cache, largest.context)
        lowered = {"decode": self.decode()}
        if kept is not None:
            groups = (kept.input(number, kept.patches(number)) for number in range(len(kept.groups)))
            most = max(groups, key=lambda group: group.num_patches * (group.num_patches + group.frame_bound))
            lowered["features"] = programs.features.lower(self.params, most)
            if largest.features is not None:
                rows_FX = (kept.size, self._state.abstract.config.feature_width)
                dtype = self.params["embedding"]["table"].dtype
                features_FX = jax.ShapeDtypeStruct(rows_FX, dtype, sharding=self._state.layout.replicated)
                before = (*(before or (None, None)), features_FX)
        return lowered | {"prefill": programs.prefill.lower(self.params, largest.inputs, *before)}


def _scores(batch: PrefillBatch) -> int:
    """The number of attention scores of one head in a prefill, masked scores included."""
    B, T = batch.inputs.tokens_BT.shape
    return B * T * (T + (0 if batch.context is None else batch.context.pages_BC.shape[1] * PAGE_TOKENS))
