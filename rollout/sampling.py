"""Draws tokens: every slot of a decode step has its own parameters, so that one compiled step serves them all.

Log-probs follow the convention of `engine.SamplingParams`: `log_softmax(logits / temperature)` over the whole
vocabulary without forbidden ids (temperature 1 if greedy), not renormalised for top-k or top-p.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from models.inputs import AnyArray

CANDIDATES = 256  # most probable tokens that top-k and top-p try before they sort the whole vocabulary
NEVER = np.float32(-1e30)  # the score of a forbidden token; finite, so that no NaN can arise


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotSampling:
    """`SamplingParams` and seeds of `B` slots as arrays. Lists of ids are filled up with -1."""

    temperature_B: Float[AnyArray, " B"]  # 0 is greedy
    top_p_B: Float[AnyArray, " B"]
    top_k_B: Int[AnyArray, " B"]  # 0 is off
    stop_ids_BI: Int[AnyArray, "B I"]
    forbidden_ids_BI: Int[AnyArray, "B J"]
    seed_B2: UInt32[AnyArray, "B 2"]  # the words of the request's seed, high first
    sample_B: Int[AnyArray, " B"]  # number of the sample in its request


def seed_words(seed: int) -> tuple[int, int]:
    """A seed of any size and sign as the two 32-bit words (its lowest 64 bits, high word first)."""
    return (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF


def sample_keys(seed_B2: UInt32[Array, "B 2"], sample_B: Int[Array, " B"]) -> Array:
    """The key of each sample. Token `t` is drawn with `fold_in(key, t)`, and with no other randomness."""
    return jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(seed_B2, impl="threefry2x32"), sample_B)


def allowed_tokens(forbidden_ids_BI: Int[Array, "B I"], vocabulary: int) -> Bool[Array, "B V"]:
    """The tokens that each slot may draw."""
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
    """Draws one token a slot: `(tokens_B, logprobs_B)`.

    Forbidden ids are removed first, then all but the `top_k` most probable tokens, then all but the smallest set of
    these whose renormalised probability reaches `top_p`; equal logits rank by token id. The draw adds Gumbel noise and
    takes the maximum, so that whether a token is drawn depends on its own logit and noise, not on an order of
    summation. `index_B` is the token's index in its response.
    """
    greedy_B = params.temperature_B == 0
    temperature_B = jnp.where(greedy_B, 1.0, params.temperature_B)
    logits_BV = logits_BV.astype(jnp.float32) / temperature_B[:, None]
    logits_BV = jnp.where(allowed_BV, logits_BV, NEVER)
    logprobs_BV = jax.nn.log_softmax(logits_BV)

    def noise(key: Array, index: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(key, index), (logits_BV.shape[1],), jnp.float32)

    def noises() -> Array:
        return jnp.where(greedy_B[:, None], 0.0, jax.vmap(noise)(keys_B, index_B))

    noise_BV = jax.lax.cond(jnp.all(greedy_B), lambda: jnp.zeros_like(logits_BV), noises)
    limited_B = ~greedy_B & ((params.top_p_B < 1.0) | (params.top_k_B > 0))

    def plain() -> Array:
        return jnp.argmax(logits_BV + noise_BV, axis=-1).astype(jnp.int32)

    def sort() -> Array:
        return _sample_sorted(logits_BV, noise_BV, params.top_p_B, params.top_k_B)

    def limited() -> Array:  # sorting a large vocabulary is slow: only if a slot's limits need more than the candidates
        if logits_BV.shape[1] <= CANDIDATES:
            return jnp.where(limited_B, sort(), plain())
        few_B, settled_B = _sample_candidates(logits_BV, noise_BV, params.top_p_B, params.top_k_B)
        unsettled = jnp.any(limited_B & ~settled_B)
        drawn_B = jax.lax.cond(unsettled, lambda: jnp.where(settled_B, few_B, sort()), lambda: few_B)
        return jnp.where(limited_B, drawn_B, plain())

    tokens_B = jax.lax.cond(jnp.any(limited_B), limited, plain)
    return tokens_B, jnp.take_along_axis(logprobs_BV, tokens_B[:, None], axis=-1)[:, 0]


def _sample_sorted(logits_BV: Array, noise_BV: Array, top_p_B: Array, top_k_B: Array) -> Array:
    """Draws within top-k and top-p, after sorting every slot's vocabulary by falling probability."""
    V = logits_BV.shape[1]
    ids_BV = jnp.broadcast_to(jnp.arange(V, dtype=jnp.int32), logits_BV.shape)
    negated_BV, ids_BV, noise_BV = jax.lax.sort((-logits_BV, ids_BV, noise_BV), num_keys=1, is_stable=True)
    rank_V = jnp.arange(V)[None, :]
    kept_BV = rank_V < jnp.where(top_k_B > 0, top_k_B, V)[:, None]
    probs_BV = jax.nn.softmax(jnp.where(kept_BV, -negated_BV, NEVER), axis=-1)
    before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV  # total of all more probable tokens
    enough_B = jnp.where(top_p_B < 1.0, top_p_B, jnp.inf)  # a rounded sum may reach 1 too early
    kept_BV &= (before_BV < enough_B[:, None]) | (rank_V == 0)
    best_B = jnp.argmax(jnp.where(kept_BV, noise_BV - negated_BV, NEVER), axis=-1)
    return jnp.take_along_axis(ids_BV, best_B[:, None], axis=-1)[:, 0]


def _sample_candidates(logits_BV: Array, noise_BV: Array, top_p_B: Array, top_k_B: Array) -> tuple[Array, Array]:
    """(the draws of `_sample_sorted`, among the most probable tokens only; the slots for which these suffice)."""
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
