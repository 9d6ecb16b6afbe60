"""The compiled programs of the embedded engine: prefill prompts, fill pages, start samples, decode a round.

The programs are pure functions of weights, cache and small host arrays. A program is compiled for each bucketed shape,
and once more if a sample has a top-k or top-p.

A round of decoding writes the keys and values of each new token into pages of the donated cache, and attention reads
the pages in place (`sharding.kernels.paged`). The loop over tokens never copies the cache. States of layers are
gathered, carried through the loop, and scattered after the loop.
"""

import contextlib
import dataclasses
import functools
import itertools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, UInt32

from models.decoder import Decoder, Mix
from models.inputs import AnyArray, PackedTokens, VisionInput
from sharding.kernels.attention import Mask, attention
from sharding.kernels.delta import DeltaInputs, DeltaState, delta_rule, delta_step
from sharding.kernels.paged import paged_attention
from sharding.mesh import Target, compiling_for, target
from sharding.walk import Walk

from .cache import Context, KVCache, LayerRows, PageWrites, Rows, layers_by_kind
from .engine_weights import LayerParams, model_by_layers
from .slots import PAGE_TOKENS, DecodeRound, SlotSampling

CANDIDATES = 256  # number of most probable tokens in which top-k and top-p look before they sort the vocabulary
ENDED = -1  # in the place of the last token of a sample that has ended
DELTA_LAYERS = "delta_layers"  # the kind of the layers that have states
NEVER = np.float32(-1e30)  # the score of a forbidden token; finite, so that no NaN can arise
T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Starts:
    """Samples to start from prefilled rows. `index_B` is the number of tokens that the response has already."""

    row_B: Int[AnyArray, " B"]
    last_B: Int[AnyArray, " B"]  # the column of the sample's last token
    slot_B: Int[AnyArray, " B"]  # out of range in padding
    index_B: Int[AnyArray, " B"]
    sampling: SlotSampling


class EnginePrograms:
    """The compiled programs of one architecture. `rows` are the shardings of the cache's arrays and of a prefill's
    rows, if several devices compute together. All programs keep them, so that a cache can be donated."""

    walk = Walk()

    def __init__(self, graphdef: nnx.GraphDef[Decoder], rows: tuple[Sharding, ...] = ()) -> None:
        self.graphdef, self.rows = graphdef, rows
        self.prefill = jax.jit(self._prefill)
        self.features = jax.jit(self._features)
        # Puts features [M, X] into rows [F, X], from a row on.
        self.keep = jax.jit(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0), donate_argnums=0)
        self.fill = jax.jit(self._fill, donate_argnums=0)
        self.start = jax.jit(self._start, donate_argnums=(1, 2))
        self.decode = jax.jit(self._decode, donate_argnums=(1, 2))

    def _features(self, params: LayerParams, vision: VisionInput) -> Float[Array, "M X"]:
        """The features of some frame pairs, for a prompt that has too many patches for one prefill."""
        model, _ = model_by_layers(self.graphdef, params)
        with self._divided():
            features_MX = model.features(self.walk, vision).astype(params["embedding"]["table"].dtype)
        return self._complete(features_MX)

    def _complete(self, x: Array) -> Array:
        if not self.rows:
            return x
        assert isinstance(self.rows[0], NamedSharding)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.rows[0].mesh, P()))

    def _divided(self) -> contextlib.AbstractContextManager[None]:
        """Selects portable code for several devices, since the compiler can't divide the GPU kernels of attention."""
        return contextlib.nullcontext() if not self.rows else compiling_for(Target("cpu"))

    def _prefill(
        self,
        params: LayerParams,
        inputs: PackedTokens,
        cache: KVCache | None = None,
        context: Context | None = None,
        features_FX: Float[Array, "F X"] | None = None,
    ) -> tuple[Rows, Array]:
        """Returns (`Rows`, final hidden states `[B, T, D]`) of packed prompts, or of the tokens behind a cached
        `context`. Every token of a row sees the row's complete context. `features_FX` replace pixels."""
        model, layers = model_by_layers(self.graphdef, params)
        mask = Mask(inputs.segments_BT, inputs.branches_BT)
        if context is not None:  # its entries belong to the row's segment, which is number 1
            before_BS = jnp.arange(context.pages_BC.shape[1] * PAGE_TOKENS)[None, :] < context.length_B[:, None]
            mask = Mask(
                jnp.concatenate([before_BS.astype(jnp.int32), inputs.segments_BT], axis=1),
                jnp.pad(inputs.branches_BT, ((0, 0), (before_BS.shape[1], 0))),
            )
        rotary = model.rotary(inputs.positions_3BT)

        def step(layer: Any, x: Array, numbers: tuple[int, int]) -> tuple[Array, LayerRows | DeltaState]:
            whole, number = numbers

            def attend(q: Array, k: Array, v: Array) -> tuple[Array, LayerRows]:
                keys, values = k, v
                if cache is not None and context is not None:
                    before = cache.view(context.pages_BC, number)
                    keys, values = (
                        jnp.concatenate([jnp.swapaxes(old, 1, 2), new], axis=1)
                        for old, new in zip(before, (k, v), strict=True)
                    )
                with self._divided():
                    return attention(q, keys, values, mask), (k, v)

            def recur(channels: DeltaInputs) -> tuple[Array, DeltaState]:
                before = None
                if cache is not None and context is not None:
                    before = cache.state(context.slot_B, number)
                heads, runs = model.config.text.delta, inputs.runs
                assert heads is not None and runs is not None, "inputs of a model with states have `PackedRuns`"
                return delta_rule(channels, heads, runs, before)

            x, rows = layer(x, rotary, Mix(attention=attend, delta=recur))
            return x if deep is None else deep.added(x, whole), rows

        with self._divided():
            x, deep = model.embed(self.walk, inputs.tokens_BT, inputs.feature_index_BT, inputs.vision, features_FX)
        x, by_layer = self.walk.loop(layers, x, step, enumerate(_numbers(model)))
        pairs, states = layers_by_kind(by_layer)
        k_LBKTH, v_LBKTH = (jnp.swapaxes(jnp.stack(x), 2, 3) for x in zip(*pairs, strict=True))
        return self._placed((k_LBKTH, v_LBKTH, states)), model.final_norm(self.walk, x)

    def _placed(self, rows: T) -> T:
        places = jax.tree.unflatten(jax.tree.structure(rows), self.rows) if self.rows else None
        return rows if places is None else jax.lax.with_sharding_constraint(rows, places)

    def _over_pages(self, q_BNH: Array, cache: KVCache, pages_BC: Array, length_B: Array, layer: int) -> Array:
        """Attention over pages in one layer; each of several devices computes the heads whose keys it has."""
        attend = functools.partial(paged_attention, layer=layer)
        if self.rows:
            place = self.rows[0]
            assert isinstance(place, NamedSharding)
            heads, whole = P(None, *place.spec[2:]), P()
            specs = (heads, place.spec, place.spec, whole, whole)
            attend = jax.shard_map(attend, mesh=place.mesh, in_specs=specs, out_specs=heads)
        return attend(q_BNH, cache.k_LCKSH, cache.v_LCKSH, pages_BC, length_B)

    def _logits(self, model: Decoder, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """The head is the left factor of the product: CPUs are then up to twice as fast for few rows."""
        head = model.head_weight(self.walk)
        logits_VB = jnp.einsum("VD,BD->VB", head, hidden_BD, preferred_element_type=jnp.float32)
        return jax.lax.optimization_barrier(logits_VB).T

    def _fill(self, cache: KVCache, rows: Rows, writes: PageWrites) -> KVCache:
        return self._placed(cache.insert(rows, writes))

    def _start(
        self,
        params: LayerParams,
        cache: KVCache,
        last_N: Int[Array, " N"],
        rows: Rows,
        hidden_BTD: Float[Array, "R T D"],
        writes: PageWrites,
        starts: Starts,
    ) -> tuple[KVCache, Int[Array, " N"], Int[Array, "B 1"], Float[Array, "B 1"], Int[Array, " B"]]:
        """Fills pages, and samples one token for each of `starts`. Returns a tuple as `_decode` does."""
        cache = self._fill(cache, rows, writes)
        model, _ = model_by_layers(self.graphdef, params)
        logits_BV = self._logits(model, hidden_BTD[starts.row_B, starts.last_B])
        sampling = starts.sampling
        allowed_BV = allowed_tokens(sampling.forbidden_ids_BI, logits_BV.shape[1])
        keys_B = sample_keys(sampling.seed_B2, sampling.sample_B)
        token_B, logprob_B = sample(logits_BV, allowed_BV, sampling, keys_B, starts.index_B)
        last_N = self._noted(last_N, starts.slot_B, token_B, ~stopped(token_B, sampling.stop_ids_BI))
        return cache, last_N, token_B[:, None], logprob_B[:, None], jnp.ones_like(token_B)

    def _noted(self, last_N: Array, slot_B: AnyArray, token_B: Array, alive_B: Array) -> Array:
        return self._complete(last_N.at[slot_B].set(jnp.where(alive_B, token_B, ENDED), mode="drop"))

    def _decode(
        self, params: LayerParams, cache: KVCache, last_N: Int[Array, " N"], batch: DecodeRound
    ) -> tuple[KVCache, Int[Array, " N"], Int[Array, "B R"], Float[Array, "B R"], Int[Array, " B"]]:
        """Decodes up to `batch.steps` tokens for each sample, which ends at a stop id (counted) or at its limit.
        Returns (cache, last tokens of all slots, new tokens, log-probs, each sample's number of new tokens)."""
        model, layers = model_by_layers(self.graphdef, params)
        text = model.config.text
        B, room = len(batch.slot_B), batch.longest
        first_B = jnp.take(last_N, batch.slot_B, mode="clip")
        numbers, order = _numbers(model), model.stack.order
        states = [
            cache.state(batch.slot_B, i) if kind == DELTA_LAYERS else None
            for i, kind in zip(numbers, order, strict=True)
        ]
        sampling = batch.sampling
        keys_B = sample_keys(sampling.seed_B2, sampling.sample_B)
        allowed_BV = allowed_tokens(sampling.forbidden_ids_BI, text.vocab_size)
        no_features = jnp.full((B, 1), -1, jnp.int32)

        def forward(
            token_B: Array, alive_B: Array, cache: KVCache, states: list[DeltaState | None], i: Array
        ) -> tuple[Array, KVCache, list[DeltaState | None]]:
            positions_3B1 = jnp.broadcast_to((batch.position_B + i)[None, :, None], (3, B, 1))
            rotary, entry_B = model.rotary(positions_3B1), batch.length_B + i
            length_B = jnp.where(alive_B, batch.length_B + i + 1, 1)  # an ended sample may lack pages for more tokens

            def step(
                layer: Any, carry: tuple[Array, KVCache], xs: tuple[int, DeltaState | None]
            ) -> tuple[tuple[Array, KVCache], DeltaState | None]:
                (x, cache), (number, state) = carry, xs

                def attend(q: Array, k: Array, v: Array) -> tuple[Array, KVCache]:
                    new = cache.extended(number, batch.pages_BC, entry_B, k[:, 0], v[:, 0])
                    return self._over_pages(q[:, 0], new, batch.pages_BC, length_B, number)[:, None], new

                def recur(channels: DeltaInputs) -> tuple[Array, DeltaState]:
                    assert text.delta is not None and state is not None, "the layer has a state"
                    return delta_step(channels, text.delta, state)

                x, new = layer(x, rotary, Mix(attention=attend, delta=recur))
                return ((x, new), None) if isinstance(new, KVCache) else ((x, cache), new)

            x, _ = model.embed(self.walk, token_B[:, None], no_features, None)
            (x, cache), states = self.walk.loop(layers, (x, cache), step, zip(numbers, states, strict=True))
            return model.final_norm(self.walk, x)[:, 0], cache, states

        def running(state: tuple) -> Array:
            return (state[0] < batch.steps) & jnp.any(state[2])

        def decode_token(state: tuple) -> tuple:
            i, token_B, alive_B, cache, states, tokens_BR, logprobs_BR, count_B = state
            hidden_BD, cache, states = forward(token_B, alive_B, cache, states, i)
            logits_BV = self._logits(model, hidden_BD)
            token_B, logprob_B = sample(logits_BV, allowed_BV, sampling, keys_B, batch.index_B + i)
            tokens_BR = jax.lax.dynamic_update_slice_in_dim(tokens_BR, token_B[:, None], i, axis=1)
            logprobs_BR = jax.lax.dynamic_update_slice_in_dim(logprobs_BR, logprob_B[:, None], i, axis=1)
            count_B = count_B + alive_B.astype(jnp.int32)
            alive_B = alive_B & (count_B < batch.remaining_B) & ~stopped(token_B, sampling.stop_ids_BI)
            return i + 1, token_B, alive_B, cache, states, tokens_BR, logprobs_BR, count_B

        state = (
            jnp.int32(0),
            jnp.maximum(first_B, 0),
            (first_B != ENDED) & (batch.remaining_B > 0),
            cache,
            states,
            jnp.zeros((B, room), jnp.int32),
            jnp.zeros((B, room), jnp.float32),
            jnp.zeros((B,), jnp.int32),
        )
        state = jax.lax.while_loop(running, decode_token, state)
        _, token_B, alive_B, cache, states, tokens_BR, logprobs_BR, count_B = state
        cache = self._placed(cache.with_states(batch.slot_B, [state for state in states if state is not None]))
        return cache, self._noted(last_N, batch.slot_B, token_B, alive_B), tokens_BR, logprobs_BR, count_B


def _numbers(model: Decoder) -> list[int]:
    """The number of each layer among the layers of its kind."""
    stack = model.stack
    return stack.in_order({kind: itertools.count() for kind in stack.modules})


programs = functools.lru_cache(maxsize=32)(EnginePrograms)


# --- sampling tokens ----------------------------------------------------------------------------


def sample_keys(seed_B2: UInt32[Array, "B 2"], sample_B: Int[Array, " B"]) -> Array:
    """The key of each sample. Token `t` is sampled with `fold_in(key, t)`, and with no other randomness."""
    return jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(seed_B2, impl="threefry2x32"), sample_B)


def allowed_tokens(forbidden_ids_BI: Int[Array, "B I"], vocabulary: int) -> Bool[Array, "B V"]:
    """The tokens that each slot may sample."""
    B = forbidden_ids_BI.shape[0]
    ids = jnp.where(forbidden_ids_BI < 0, vocabulary, forbidden_ids_BI)  # out of range: dropped
    return jnp.ones((B, vocabulary), bool).at[jnp.arange(B)[:, None], ids].set(False, mode="drop")


def sample(
    logits_BV: Float[Array, "B V"],
    allowed_BV: Bool[Array, "B V"],
    params: SlotSampling,
    keys_B: Array,
    index_B: Int[Array, " B"],
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Returns (sampled tokens, their log-probs). Forbidden ids are removed first, then all but the `top_k` most
    probable tokens, then all but the most probable of these with a total renormalised probability of just `top_p`.
    Equal logits rank by token id. The token with the largest sum of logit and Gumbel noise is sampled. `index_B` is the
    token's index in its response."""
    greedy_B = params.temperature_B == 0
    temperature_B = jnp.where(greedy_B, 1.0, params.temperature_B)
    logits_BV = logits_BV.astype(jnp.float32) / temperature_B[:, None]
    logits_BV = jnp.where(allowed_BV, logits_BV, NEVER)
    logprobs_BV = jax.nn.log_softmax(logits_BV)

    def noise(key: Array, index: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(key, index), (logits_BV.shape[1],), jnp.float32)

    def noises() -> Array:
        return jnp.where(greedy_B[:, None], 0.0, jax.vmap(noise)(keys_B, index_B))

    if target().platform == "cpu":  # other devices would stop at each token until the host has read the condition
        noise_BV = jax.lax.cond(jnp.all(greedy_B), lambda: jnp.zeros_like(logits_BV), noises)
    else:
        noise_BV = noises()
    limited_B = ~greedy_B & ((params.top_p_B < 1.0) | (params.top_k_B > 0))

    def plain() -> Array:
        return jnp.argmax(logits_BV + noise_BV, axis=-1).astype(jnp.int32)

    def sort() -> Array:
        return _sample_sorted(logits_BV, noise_BV, params.top_p_B, params.top_k_B)

    def limited() -> Array:  # sorting a large vocabulary is slow: only if the candidates do not suffice
        if logits_BV.shape[1] <= CANDIDATES:
            return jnp.where(limited_B, sort(), plain())
        few_B, settled_B = _sample_candidates(logits_BV, noise_BV, params.top_p_B, params.top_k_B)
        unsettled = jnp.any(limited_B & ~settled_B)
        drawn_B = jax.lax.cond(unsettled, lambda: jnp.where(settled_B, few_B, sort()), lambda: few_B)
        return jnp.where(limited_B, drawn_B, plain())

    tokens_B = limited() if params.limited else plain()
    return tokens_B, jnp.take_along_axis(logprobs_BV, tokens_B[:, None], axis=-1)[:, 0]


def _sample_sorted(logits_BV: Array, noise_BV: Array, top_p_B: Array, top_k_B: Array) -> Array:
    V = logits_BV.shape[1]
    ids_BV = jnp.broadcast_to(jnp.arange(V, dtype=jnp.int32), logits_BV.shape)
    negated_BV, ids_BV, noise_BV = jax.lax.sort((-logits_BV, ids_BV, noise_BV), num_keys=1, is_stable=True)
    rank_V = jnp.arange(V)[None, :]
    kept_BV = rank_V < jnp.where(top_k_B > 0, top_k_B, V)[:, None]
    probs_BV = jax.nn.softmax(jnp.where(kept_BV, -negated_BV, NEVER), axis=-1)
    before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV  # total probability of all more probable tokens
    enough_B = jnp.where(top_p_B < 1.0, top_p_B, jnp.inf)  # a rounded sum may reach 1 too early
    kept_BV &= (before_BV < enough_B[:, None]) | (rank_V == 0)
    best_B = jnp.argmax(jnp.where(kept_BV, noise_BV - negated_BV, NEVER), axis=-1)
    return jnp.take_along_axis(ids_BV, best_B[:, None], axis=-1)[:, 0]


def _sample_candidates(logits_BV: Array, noise_BV: Array, top_p_B: Array, top_k_B: Array) -> tuple[Array, Array]:
    """(The tokens of `_sample_sorted`, found among the `CANDIDATES` most probable; whether these suffice, by slot)."""
    logits_BC, ids_BC = jax.lax.top_k(logits_BV, CANDIDATES)  # equal logits rank by token id here, too
    noise_BC = jnp.take_along_axis(noise_BV, ids_BC, axis=-1)
    rank_C = jnp.arange(CANDIDATES)[None, :]
    few_B = (top_k_B > 0) & (top_k_B <= CANDIDATES)
    kept_BC = rank_C < jnp.where(few_B, top_k_B, CANDIDATES)[:, None]
    kept_total_B = jax.nn.logsumexp(jnp.where(kept_BC, logits_BC, NEVER), axis=-1)
    total_B = jnp.where(few_B, kept_total_B, jax.nn.logsumexp(logits_BV, axis=-1))
    probs_BC = jnp.where(kept_BC, jnp.exp(logits_BC - total_B[:, None]), 0.0)
    reached_BC = jnp.cumsum(probs_BC, axis=-1)
    enough_B = jnp.where(top_p_B < 1.0, top_p_B, jnp.inf)
    kept_BC &= (reached_BC - probs_BC < enough_B[:, None]) | (rank_C == 0)
    best_B = jnp.argmax(jnp.where(kept_BC, noise_BC + logits_BC, NEVER), axis=-1)
    drawn_B = jnp.take_along_axis(ids_BC, best_B[:, None], axis=-1)[:, 0]
    return drawn_B, few_B | ((top_k_B == 0) & (reached_BC[:, -1] >= enough_B))


def stopped(tokens_B: Int[Array, " B"], stop_ids_BI: Int[Array, "B I"]) -> Bool[Array, " B"]:
    return jnp.any(tokens_B[:, None] == stop_ids_BI, axis=-1)
