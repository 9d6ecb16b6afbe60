"""Computes log-probabilities over the vocabulary in chunks of tokens: logits of all tokens never exist at once.

With a vocabulary of 152k and 16k tokens, logits are 10 GB in float32 and their gradient as much again. Here a chunk's
logits are computed, used and dropped; the backward pass computes them again from the saved log-normaliser. NVIDIA GPUs
have kernels of their own (`kernels.head`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .kernels import head

CHUNK_LOGITS = 1 << 26  # logits of a chunk where no size is given: 256 MB in float32


def token_logprobs(
    hidden_BTD: Float[Array, "B T D"],
    head_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    *,
    chunk: int = 0,
    temperature: float | Float[Array, "B T"] = 1.0,
    allowed_V: Bool[Array, " V"] | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(log-probability of each target, entropy of its distribution) under `softmax(hidden @ head.T / temperature)`.
    `temperature` is a positive number for all tokens, or one for each.

    `allowed_V` restricts the softmax to the tokens that an engine may sample. Otherwise probability would leak to the
    other tokens: they are never sampled, so that no reward ever takes it back.

    Both are float32 and in nats, differentiable in `hidden_BTD` and `head_VD`; products accumulate in float32 whatever
    the dtype of the two. `chunk` is the number of tokens whose logits exist at once; 0 chooses by V. On NVIDIA GPUs,
    where `head` computes, logits never exist in memory, and `chunk` is the tokens whose gradients of logits do.
    Raises ValueError for a chunk or a temperature that makes no sense.
    """
    if chunk < 0:
        raise ValueError(f"chunk must not be negative, got {chunk}")
    if isinstance(temperature, int | float) and not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}; greedy decoding scores with 1")
    B, T, D = hidden_BTD.shape
    V, tokens = head_VD.shape[0], B * T
    allowed_V = jnp.ones(V, bool) if allowed_V is None else allowed_V
    temperatures = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (B, T)).reshape(tokens)
    if head.chosen(hidden_BTD, head_VD):
        rows = hidden_BTD.reshape(tokens, D), head_VD, targets_BT.reshape(tokens), allowed_V, temperatures
        logprobs, entropies = head.fused_logprobs(*rows, chunk * V or CHUNK_LOGITS)
        return logprobs.reshape(B, T), entropies.reshape(B, T)
    chunk = min(chunk or max(CHUNK_LOGITS // V, 1), tokens)
    chunks = -(-tokens // chunk)
    padding = chunks * chunk - tokens
    hidden = jnp.pad(hidden_BTD.reshape(tokens, D), ((0, padding), (0, 0))).reshape(chunks, chunk, D)
    targets = jnp.pad(targets_BT.reshape(tokens), (0, padding)).reshape(chunks, chunk)
    temperatures = jnp.pad(temperatures, (0, padding), constant_values=1.0).reshape(chunks, chunk)
    logprobs, entropies = _chunked(hidden, head_VD, targets, allowed_V, temperatures)
    return logprobs.reshape(-1)[:tokens].reshape(B, T), entropies.reshape(-1)[:tokens].reshape(B, T)


# Below, C counts chunks and T the tokens of one chunk.


@jax.custom_vjp
def _chunked(
    hidden_CTD: Array, head_VD: Array, targets_CT: Array, allowed_V: Array, temperatures_CT: Array
) -> tuple[Array, Array]:
    return _forward(hidden_CTD, head_VD, targets_CT, allowed_V, temperatures_CT)[0]


def _forward(
    hidden_CTD: Array, head_VD: Array, targets_CT: Array, allowed_V: Array, temperatures_CT: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    def score(inputs: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        hidden_TD, targets_T, temperatures_T = inputs
        logits_TV = _logits(hidden_TD, head_VD, allowed_V, temperatures_T)
        normaliser_T = jax.nn.logsumexp(logits_TV, axis=-1)
        logs_TV = logits_TV - normaliser_T[:, None]
        logprobs_T = jnp.take_along_axis(logs_TV, targets_T[:, None], axis=-1)[:, 0]
        return logprobs_T, -jnp.sum(jnp.exp(logs_TV) * logs_TV, axis=-1), normaliser_T

    logprobs, entropies, normalisers = jax.lax.map(score, (hidden_CTD, targets_CT, temperatures_CT))
    residuals = (hidden_CTD, head_VD, allowed_V, targets_CT, temperatures_CT, entropies, normalisers)
    return (logprobs, entropies), residuals


def _backward(residuals: tuple, cotangents: tuple[Array, Array]) -> tuple[Array, Array, None, None, None]:
    hidden_CTD, head_VD, allowed_V, *rest = residuals

    def add_chunk(head_grad_VD: Array, inputs: tuple) -> tuple[Array, Array]:
        hidden_TD, targets_T, temperatures_T, entropies_T, normalisers_T, logprob_grads_T, entropy_grads_T = inputs
        logs_TV = _logits(hidden_TD, head_VD, allowed_V, temperatures_T) - normalisers_T[:, None]
        probs_TV = jnp.exp(logs_TV)
        hit_TV = (jnp.arange(head_VD.shape[0])[None, :] == targets_T[:, None]) & allowed_V[None, :]
        # d logprob / d logit_v = [v == target] - p_v;  d entropy / d logit_v = -p_v (log p_v + entropy)
        grads_TV = jnp.where(hit_TV, logprob_grads_T[:, None], 0.0) - probs_TV * (
            logprob_grads_T[:, None] + entropy_grads_T[:, None] * (logs_TV + entropies_T[:, None])
        )
        grads_TV = (grads_TV / temperatures_T[:, None]).astype(hidden_TD.dtype)
        hidden_grad_TD = jnp.einsum("TV,VD->TD", grads_TV, head_VD, preferred_element_type=jnp.float32)
        head_grad_VD += jnp.einsum("TV,TD->VD", grads_TV, hidden_TD, preferred_element_type=jnp.float32)
        return head_grad_VD, hidden_grad_TD.astype(hidden_TD.dtype)

    zeros = jnp.zeros_like(head_VD, dtype=jnp.float32)
    head_grad, hidden_grad = jax.lax.scan(add_chunk, zeros, (hidden_CTD, *rest, *cotangents))
    return hidden_grad, head_grad.astype(head_VD.dtype), None, None, None


_chunked.defvjp(_forward, _backward)


def _logits(hidden_TD: Array, head_VD: Array, allowed_V: Array, temperatures_T: Array) -> Array:
    logits_TV = jnp.einsum("TD,VD->TV", hidden_TD, head_VD, preferred_element_type=jnp.float32)
    # finite: 0 * log(0) must be 0
    return jnp.where(allowed_V[None, :], logits_TV / temperatures_T[:, None], -1e30)
