"""The three compiled programs of the embedded engine: prefill prompts, start samples, decode a round.

They are pure functions of weights, cache and small host arrays. Nothing depends on values, only on bucketed
shapes, so that the number of compilations stays small.

In the cache, every running sample owns one row of fixed length, on the device. A round of decoding reads a *view*: the
active slots, as long as the longest of them needs. New keys and values collect in a small buffer of the round and are
written back once. So a nearly empty engine pays for what runs, not for all slots, and the loop over tokens never copies
the cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from models.config import TextConfig
from models.decoder import Decoder, DecoderLayer
from models.inputs import AnyArray, PackedTokens
from sharding.kernels.attention import Mask, attention
from sharding.target import compiling_for
from sharding.walk import Walk

from .engine_weights import LayerParams, model_by_layers
from .sampling import SlotSampling, allowed_tokens, sample, sample_keys, stopped

T = TypeVar("T")
Rows = tuple[Array, Array]  # keys and values [L, B, T, K, H] of a prefill
LayerRows = tuple[Array, Array]  # keys and values of one layer [B, K, T, H], as attention reads them


def doubling(size: int, least: int, most: int | None = None) -> int:
    """The smallest of `least, 2 least, 4 least, ...` that holds `size`, but no more than `most`.

    It never depends on what an engine did before: the last bits of a result go by the shape.
    """
    bucket = least
    while bucket < size:
        bucket *= 2
    return bucket if most is None else min(bucket, max(most, size))


def geometric(size: int, least: int) -> int:
    """Like `doubling`, with a value half-way between each two: 16, 24, 32, 48, 64, 96, ..."""
    bucket = doubling(size, least)
    if bucket > least and size <= bucket * 3 // 4:
        bucket = bucket * 3 // 4
    return bucket


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (rotated) and values of `B` slots and up to `S` tokens each. Entries beyond a slot's length are stale."""

    k_LBSKH: PyTree  # arrays; JAX also builds this class of one sharding for each
    v_LBSKH: PyTree

    @staticmethod
    def shape(text: TextConfig, slots: int, tokens: int) -> tuple[int, ...]:
        """`[L, B, S, K, H]` of the keys, and of the values, for so many slots of so many tokens."""
        return text.num_layers, slots, tokens, text.num_kv_heads, text.head_dim

    def view(self, slots_B: Int[Array, " B"], length: int) -> list[LayerRows]:
        """The first `length` entries of some slots, layer by layer. An out-of-range slot (padding) reads another slot's
        entries."""

        def layer(x: Array) -> Array:
            return jnp.swapaxes(jnp.take(x[:, :length], slots_B, axis=0, mode="clip"), 1, 2)

        return [(layer(k), layer(v)) for k, v in zip(self.k_LBSKH, self.v_LBSKH, strict=True)]

    def append(self, layers: list[LayerRows], slots_B: Int[Array, " B"], start_B: Int[Array, " B"]) -> KVCache:
        """Writes `layers` behind the first `start_B` entries of each slot; what does not fit is dropped, and so is
        everything for an out-of-range slot."""
        offsets_BT = start_B[:, None] + jnp.arange(layers[0][0].shape[2])[None, :]

        def write(x: Array, new: tuple[Array, ...]) -> Array:
            new_LBTKH = jnp.swapaxes(jnp.stack(new), 2, 3)
            return x.at[:, slots_B[:, None], offsets_BT].set(new_LBTKH, mode="drop")

        k, v = zip(*layers, strict=True)
        return KVCache(write(self.k_LBSKH, k), write(self.v_LBSKH, v))

    def insert(
        self, rows: Rows, row_B: Int[Array, " B"], source_BT: Int[Array, "B T"], slots_B: Int[Array, " B"]
    ) -> KVCache:
        """Fills slots from prefilled rows: entry `t` of slot `slots_B[b]` becomes entry `source_BT[b, t]` of row
        `row_B[b]`. Several slots may read one row: that is how samples share the prefill of their prompt."""
        length = min(source_BT.shape[1], self.k_LBSKH.shape[2])
        source_BT = source_BT[:, :length]

        def write(x: Array, new: Array) -> Array:
            return x.at[:, slots_B, :length].set(new[:, row_B[:, None], source_BT], mode="drop")

        return KVCache(write(self.k_LBSKH, rows[0]), write(self.v_LBSKH, rows[1]))


def cached_attention(
    q: Float[Array, "B 1 N H"], cached: LayerRows, fresh: LayerRows, length_B: Int[Array, " B"], step: Int[Array, ""]
) -> Float[Array, "B 1 N H"]:
    """Attention of one new token a slot over its first `length_B` cached entries (`[B, K, S, H]`) and the round's
    own entries `0 .. step` (`[B, K, R, H]`). Scores and softmax are float32."""
    B, _, N, H = q.shape
    K = cached[0].shape[1]
    q = q.reshape(B, K, N // K, H)

    def scores(k: Array) -> Array:
        return jnp.einsum("BKGH,BKSH->BKGS", q, k, preferred_element_type=jnp.float32) * H**-0.5

    S, R = cached[0].shape[2], fresh[0].shape[2]
    old = jnp.where((jnp.arange(S)[None, :] < length_B[:, None])[:, None, None], scores(cached[0]), -1e30)
    new = jnp.where((jnp.arange(R) <= step)[None, None, None], scores(fresh[0]), -1e30)
    probs = jax.nn.softmax(jnp.concatenate([old, new], axis=-1), axis=-1).astype(q.dtype)
    out = jnp.einsum("BKGS,BKSH->BKGH", probs[..., :S], cached[1])
    out += jnp.einsum("BKGS,BKSH->BKGH", probs[..., S:], fresh[1])
    return out.reshape(B, 1, N, H)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Starts:
    """Samples to start from prefilled rows. `index_B` counts the tokens of the response so far (0 without prefix)."""

    slots_B: Int[AnyArray, " B"]  # out of range: padding
    row_B: Int[AnyArray, " B"]
    source_BT: Int[AnyArray, "B T"]  # the columns of the row in which the sample's entries stand
    last_B: Int[AnyArray, " B"]  # the column of its last token
    index_B: Int[AnyArray, " B"]
    sampling: SlotSampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeRound:
    """Samples to decode. Their last token is not in the cache yet: it is the first input."""

    slots_B: Int[AnyArray, " B"]  # out of range: padding
    token_B: Int[AnyArray, " B"]  # last token of the sample
    position_B: Int[AnyArray, " B"]  # its rotary position
    length_B: Int[AnyArray, " B"]  # entries in the cache
    index_B: Int[AnyArray, " B"]  # tokens of the response so far
    remaining_B: Int[AnyArray, " B"]  # tokens it may still get; 0: padding
    sampling: SlotSampling


class EnginePrograms:
    """The compiled programs of one architecture. Engines of equal settings share them (`programs`).

    `rows` is the sharding of keys and values where several devices compute together: it holds from program to program,
    so that a cache can be donated. All else follows from how the weights lie.
    """

    def __init__(
        self, graphdef: nnx.GraphDef[Decoder], walk: Walk, steps: int, rows: jax.sharding.Sharding | None = None
    ) -> None:
        self.graphdef, self.walk, self.steps, self.rows = graphdef, walk, steps, rows
        self.prefill = jax.jit(self._prefill)
        self.start = jax.jit(self._start, donate_argnums=1)
        self.decode = jax.jit(self._decode, donate_argnums=1, static_argnums=3)

    def _prefill(self, params: LayerParams, inputs: PackedTokens) -> tuple[Rows, Array]:
        """Keys, values `[L, B, T, K, H]` and final hidden states `[B, T, D]` of packed prompts."""
        model, layers = model_by_layers(self.graphdef, params)
        allowed = Mask(inputs.segments_BT, inputs.branches_BT).dense()
        rotary = model.rotary(inputs.positions_3BT)

        def step(layer: DecoderLayer, x: Array, _: None) -> tuple[Array, Rows]:
            return layer(x, rotary, lambda q, k, v: (attention(q, k, v, allowed), (k, v)))

        # Over several devices the compiler divides the program, which it can't with the GPU kernel of the vision tower.
        with contextlib.nullcontext() if self.rows is None else compiling_for("cpu"):
            x = model.embed(self.walk, inputs.tokens_BT, inputs.feature_index_BT, inputs.vision)
        x, by_layer = self.walk.each(layers, x, step, [None] * len(layers))
        k_LBTKH, v_LBTKH = (jnp.stack(x) for x in zip(*by_layer, strict=True))
        return self._placed((k_LBTKH, v_LBTKH)), model.final_norm(self.walk, x)

    def _placed(self, rows: T) -> T:
        return rows if self.rows is None else jax.lax.with_sharding_constraint(rows, self.rows)

    def _logits(self, model: Decoder, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """The head stands first, and is kept there: for few rows, the CPU is up to twice as fast this way round."""
        head = model.head_weight(self.walk)
        logits_VB = jnp.einsum("VD,BD->VB", head, hidden_BD, preferred_element_type=jnp.float32)
        return jax.lax.optimization_barrier(logits_VB).T

    def _start(
        self, params: LayerParams, cache: KVCache, rows: Rows, hidden_BTD: Float[Array, "R T D"], starts: Starts
    ) -> tuple[KVCache, Int[Array, " B"], Float[Array, " B"]]:
        """Copies prefilled rows into the samples' slots and draws each one's first token."""
        cache = self._placed(cache.insert(rows, starts.row_B, starts.source_BT, starts.slots_B))
        model, _ = model_by_layers(self.graphdef, params)
        logits_BV = self._logits(model, hidden_BTD[starts.row_B, starts.last_B])
        sampling = starts.sampling
        allowed_BV = allowed_tokens(sampling.forbidden_ids_BI, logits_BV.shape[1])
        keys_B = sample_keys(sampling.seed_B2, sampling.sample_B)
        return cache, *sample(logits_BV, allowed_BV, sampling, keys_B, starts.index_B)

    def _decode(
        self, params: LayerParams, cache: KVCache, batch: DecodeRound, view_length: int
    ) -> tuple[KVCache, Int[Array, "B R"], Float[Array, "B R"], Int[Array, " B"]]:
        """Up to `steps` tokens a sample: tokens and log-probs `[B, steps]`, and how many of them count.

        A sample ends at a stop id (counted) or when nothing remains; the round ends with its last sample.
        """
        model, layers = model_by_layers(self.graphdef, params)
        text = model.config.text
        B, steps = batch.slots_B.shape[0], self.steps
        cached = cache.view(batch.slots_B, view_length)
        sampling = batch.sampling
        keys_B = sample_keys(sampling.seed_B2, sampling.sample_B)
        allowed_BV = allowed_tokens(sampling.forbidden_ids_BI, text.vocab_size)
        empty = jnp.zeros((B, text.num_kv_heads, steps, text.head_dim), cached[0][0].dtype)
        fresh = [(empty, empty)] * text.num_layers

        def forward(token_B: Array, fresh: list[LayerRows], i: Array) -> tuple[Array, list[LayerRows]]:
            positions_3B1 = jnp.broadcast_to((batch.position_B + i)[None, :, None], (3, B, 1))
            rotary = model.rotary(positions_3B1)

            def step(layer: DecoderLayer, x: Array, xs: tuple[LayerRows, LayerRows]) -> tuple[Array, LayerRows]:
                old, new = xs

                def attend(q: Array, k: Array, v: Array) -> tuple[Array, LayerRows]:
                    k_new, v_new = (
                        jax.lax.dynamic_update_slice_in_dim(buffer, jnp.swapaxes(x, 1, 2), i, axis=2)
                        for buffer, x in zip(new, (k, v), strict=True)
                    )
                    return cached_attention(q, old, (k_new, v_new), batch.length_B, i), (k_new, v_new)

                return layer(x, rotary, attend)

            no_features = jnp.full((B, 1), -1, jnp.int32)
            x = model.embed(self.walk, token_B[:, None], no_features, None)
            x, fresh = self.walk.each(layers, x, step, zip(cached, fresh, strict=True))
            return model.final_norm(self.walk, x)[:, 0], fresh

        def running(state: tuple) -> Array:
            return (state[0] < steps) & jnp.any(state[2])

        def decode_token(state: tuple) -> tuple:
            i, token_B, alive_B, fresh, tokens_BR, logprobs_BR, count_B = state
            hidden_BD, fresh = forward(token_B, fresh, i)
            logits_BV = self._logits(model, hidden_BD)
            token_B, logprob_B = sample(logits_BV, allowed_BV, sampling, keys_B, batch.index_B + i)
            tokens_BR = jax.lax.dynamic_update_slice_in_dim(tokens_BR, token_B[:, None], i, axis=1)
            logprobs_BR = jax.lax.dynamic_update_slice_in_dim(logprobs_BR, logprob_B[:, None], i, axis=1)
            count_B = count_B + alive_B.astype(jnp.int32)
            alive_B = alive_B & (count_B < batch.remaining_B) & ~stopped(token_B, sampling.stop_ids_BI)
            return i + 1, token_B, alive_B, fresh, tokens_BR, logprobs_BR, count_B

        state = (
            jnp.int32(0),
            batch.token_B,
            batch.remaining_B > 0,
            fresh,
            jnp.zeros((B, steps), jnp.int32),
            jnp.zeros((B, steps), jnp.float32),
            jnp.zeros((B,), jnp.int32),
        )
        _, _, _, fresh, tokens_BR, logprobs_BR, count_B = jax.lax.while_loop(running, decode_token, state)
        cache = self._placed(cache.append(fresh, batch.slots_B, batch.length_B))
        return cache, tokens_BR, logprobs_BR, count_B


programs = functools.lru_cache(maxsize=32)(EnginePrograms)  # engines of equal settings share what is compiled
