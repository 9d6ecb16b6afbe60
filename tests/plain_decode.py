"""One prompt, decoded token by token with a KV cache of fixed size: prefill and loop are one compiled program.

This is the plain way to generate: nothing of the engine is in it, which is therefore tested against it, as
transformers is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import models
from models.decoder import Decoder, DecoderLayer, Mix
from models.inputs import ModelInput, pad
from sharding.kernels.attention import Mask, attention
from sharding.walk import Walk

LEAST_TOKENS = 32  # sizes are rounded up to powers of two from here on, so that few shapes are compiled
LEAST_PATCHES = 64


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated. `logprobs` are natural logs under `softmax(logits)`.

    A stop id is the last token (`stopped`); without one, the limit was reached.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool


def generate(model: Decoder, prompt: ModelInput, *, max_new_tokens: int, stop_ids: Sequence[int] = ()) -> Generation:
    """Decodes greedily."""
    graphdef, params = models.split(model)
    T = _bucket(len(prompt), LEAST_TOKENS)
    missing = T - len(prompt)
    vision = prompt.vision
    tokens, logprobs, count = _program(
        graphdef,
        params,
        np.pad(prompt.token_ids_T, (0, missing)),
        np.pad(prompt.positions_3T, ((0, 0), (0, missing))),
        np.pad(prompt.feature_index_T, (0, missing), constant_values=-1),
        None if vision is None else pad(vision, _bucket(vision.num_patches, LEAST_PATCHES)),
        np.int32(len(prompt)),
        np.int32(prompt.next_position),
        np.int32(max_new_tokens),
        np.asarray(stop_ids, np.int32),
        room=_bucket(max_new_tokens, LEAST_TOKENS),
    )
    count = int(count)
    ids = tuple(np.asarray(tokens)[:count].tolist())
    return Generation(ids, tuple(np.asarray(logprobs)[:count].tolist()), ids[-1] in stop_ids)


def _bucket(size: int, least: int) -> int:
    return max(least, 1 << (size - 1).bit_length())


@functools.partial(jax.jit, static_argnames=("graphdef", "room"))
def _program(
    graphdef: Any,
    params: Any,
    tokens_T: Array,
    positions_3T: Array,
    feature_index_T: Array,
    vision: Any,
    length: Array,
    next_position: Array,
    limit: Array,
    stop_ids: Array,
    *,
    room: int,
) -> tuple[Array, Array, Array]:
    """(tokens `[room]`, log-probs `[room]`, how many of them count). Token `i` is written to slot `length + i`."""
    model, walk = models.merge(graphdef, params), Walk()
    T = tokens_T.shape[0]

    def run(embedded: Any, rotary: Any, attend: Any, caches: Any) -> tuple[Array, Any]:
        """The stack over `embedded`, `attend(cache, q, k, v) -> (out, cache)`; returns normed states and the caches."""
        x, deep = embedded

        def step(layer: DecoderLayer, x: Array, xs: Any) -> tuple[Array, Any]:
            number, cache = xs
            x, cache = layer(x, rotary, Mix(functools.partial(attend, cache)))
            return x if deep is None else deep.added(x, number), cache

        x, caches = walk.scan(model.stack, x, step, (jnp.arange(model.config.text.num_layers), caches))
        return model.final_norm(walk, x), caches

    def next_logits(hidden_D: Array) -> Array:
        return jnp.einsum("D,VD->V", hidden_D, model.head_weight(walk), preferred_element_type=jnp.float32)

    def attend_prompt(_: None, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        out = attention(q, k, v, Mask((jnp.arange(T) < length).astype(jnp.int32)[None]))
        widths = [(0, 0), (0, room), (0, 0), (0, 0)]
        return out, (jnp.pad(k, widths), jnp.pad(v, widths))

    embedded = model.embed(walk, tokens_T[None], feature_index_T[None], vision)
    hidden, caches = run(embedded, model.rotary(positions_3T[:, None]), attend_prompt, None)

    def decode(i: Array, token: Array, caches: Any) -> tuple[Array, Any]:
        slot = length + i
        reach = (jnp.arange(T + room) <= slot)[None, None]

        def attend(cache: Any, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(c, n, slot, 1) for c, n in zip(cache, (k, v), strict=True)
            )
            return attention(q, keys, values, reach), (keys, values)

        position = jnp.broadcast_to(next_position + i, (3, 1, 1))
        hidden, caches = run(model.embed(walk, token[None, None]), model.rotary(position), attend, caches)
        return next_logits(hidden[0, 0]), caches

    def unfinished(state: Any) -> Array:
        i, done, *_ = state
        return (i < limit) & ~done

    def body(state: Any) -> Any:
        i, _, logits, caches, tokens, logprobs = state
        token = jnp.argmax(logits).astype(jnp.int32)
        tokens = tokens.at[i].set(token)
        logprobs = logprobs.at[i].set(jax.nn.log_softmax(logits)[token])
        logits, caches = decode(i, token, caches)
        return i + 1, jnp.any(stop_ids == token), logits, caches, tokens, logprobs

    logits = next_logits(jax.lax.dynamic_index_in_dim(hidden[0], length - 1, keepdims=False))
    state = (jnp.int32(0), jnp.bool(False), logits, caches, jnp.zeros(room, jnp.int32), jnp.zeros(room))
    count, _, _, _, tokens, logprobs = jax.lax.while_loop(unfinished, body, state)
    return tokens, logprobs, count
