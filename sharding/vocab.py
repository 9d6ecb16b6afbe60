"""Computes log-probabilities over the vocabulary in chunks of tokens: logits of all tokens never exist at once.

Logits of 16k tokens over a vocabulary of 152k are 10 GB in float32 and their gradient as much again. Here the backward
pass computes a chunk's logits again, given the saved log-normaliser. On NVIDIA GPUs, the kernels of
`kernels.head_kernels` compute instead (`docs/parallelism.md`, "Kernels and walks"); this module launches them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .mesh import Tiling, launch, runs_triton, target, varying_zero

CHUNK_LOGITS = 1 << 26  # logits of a chunk if no size is given: 256 MB in float32
LOG2E = 1.4426950408889634
TOGETHER = 16  # tiles of tokens that run at once on one part of the head, so that tokens and part stay in L2
LEAST_PARTS = 8  # the least number of parts of the vocabulary: 8 x TOGETHER programs for an H100's 132 processors
PROGRAMS = 1024  # the aim for the number of programs: with few tokens, the vocabulary has more parts


def token_logprobs(
    hidden_BTD: Float[Array, "B T D"],
    head_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    *,
    chunk: int = 0,
    temperature: float | Float[Array, "B T"] = 1.0,
    allowed_V: Bool[Array, " V"] | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(log-probability of each target, entropy) under `softmax(hidden @ head.T / temperature)`, float32, in nats,
    differentiable in `hidden_BTD` and `head_VD`; products accumulate in float32 whatever the dtype of these two.

    `allowed_V` restricts the softmax to the tokens that an engine may sample. Otherwise probability would leak to
    tokens that are never sampled, and no reward would take the probability back. `chunk` is the number of tokens whose
    logits exist at once; 0 chooses by V. If the kernels compute (`chosen`), only gradients of logits are in memory, at
    most about `chunk * V`. Raises ValueError for a negative chunk, or a single temperature that is not positive.
    """
    if chunk < 0:
        raise ValueError(f"chunk must not be negative, got {chunk}")
    if isinstance(temperature, int | float) and not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}; use 1 for greedy decoding")
    B, T, D = hidden_BTD.shape
    V, tokens = head_VD.shape[0], B * T
    allowed_V = jnp.ones(V, bool) if allowed_V is None else allowed_V
    temperatures = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (B, T)).reshape(tokens)
    if chosen(hidden_BTD, head_VD):
        rows = hidden_BTD.reshape(tokens, D), head_VD, targets_BT.reshape(tokens), allowed_V, temperatures
        logprobs, entropies = fused_logprobs(*rows, chunk * V or CHUNK_LOGITS)
        return logprobs.reshape(B, T), entropies.reshape(B, T)
    chunk = min(chunk or max(CHUNK_LOGITS // V, 1), tokens)
    chunks = -(-tokens // chunk)
    padding = chunks * chunk - tokens
    hidden = jnp.pad(hidden_BTD.reshape(tokens, D), ((0, padding), (0, 0))).reshape(chunks, chunk, D)
    targets = jnp.pad(targets_BT.reshape(tokens), (0, padding)).reshape(chunks, chunk)
    temperatures = jnp.pad(temperatures, (0, padding), constant_values=1.0).reshape(chunks, chunk)
    logprobs, entropies = _chunked(hidden, head_VD, targets, allowed_V, temperatures)
    return logprobs.reshape(-1)[:tokens].reshape(B, T), entropies.reshape(-1)[:tokens].reshape(B, T)


# In the suffixes below, C counts chunks and T the tokens of one chunk.


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


_chunked = jax.custom_vjp(lambda *arrays: _forward(*arrays)[0])
_chunked.defvjp(_forward, _backward)


def _logits(hidden_TD: Array, head_VD: Array, allowed_V: Array, temperatures_T: Array) -> Array:
    logits_TV = jnp.einsum("TD,VD->TV", hidden_TD, head_VD, preferred_element_type=jnp.float32)
    # -1e30, not -inf: 0 * log(0) must be 0
    return jnp.where(allowed_V[None, :], logits_TV / temperatures_T[:, None], -1e30)


# Says, while a program is traced, whether the kernels below compute log-probabilities of (hidden states, head).
chosen = functools.partial(runs_triton, multiple=16)


def tiling_of(dtype: Any, capability: int) -> Tiling:
    """The tiles of both kernels: tokens, ids, and numbers of the width that are multiplied at once. Larger tiles would
    not fit into registers. Only bfloat16 on Hopper was timed (`benchmarks/head.py`)."""
    if jnp.dtype(dtype).itemsize == 4:
        return Tiling((64, 64, 32), 4, 2)
    if 90 <= capability < 120:
        return Tiling((128, 256 if capability < 100 else 128, 64), 8, 4)
    return Tiling((128, 128, 32), 8, 4)


def _fused_forward(
    hidden_TD: Float[Array, "T D"],
    head_VD: Float[Array, "V D"],
    targets_T: Int[Array, " T"],
    allowed_V: Bool[Array, " V"],
    temperatures_T: Float[Array, " T"],
    numbers: int,
) -> tuple[tuple[Float[Array, " T"], Float[Array, " T"]], tuple[Array, ...]]:
    """`token_logprobs` of a row of tokens: (log-probability of each target, entropy), and residuals for the backward
    pass, which has about `numbers` gradients of logits in memory at once."""
    del numbers
    T, V = len(hidden_TD), len(head_VD)
    tiling = tiling_of(hidden_TD.dtype, target().capability)
    groups, tiles = _groups(T, tiling), -(-V // tiling.sizes[1])
    parts = min(max(LEAST_PARTS, PROGRAMS // (groups * TOGETHER)), tiles)
    sums = [jax.ShapeDtypeStruct((parts, T), jnp.float32)] * 4
    arrays = (hidden_TD, head_VD, targets_T, _filled(allowed_V, tiling), LOG2E / temperatures_T)
    peaks, totals, slopes, hits = _call("softmax_sums", arrays, sums, (TOGETHER, parts, groups), tiling)

    peak_T = peaks.max(axis=0)
    below = peaks - peak_T[None, :]
    total_T = jnp.sum(jnp.exp2(below) * totals, axis=0)
    slope_T = jnp.sum(jnp.exp2(below) * (slopes + totals * below), axis=0)
    normaliser_T = peak_T + jnp.log2(total_T)
    logprobs_T = (hits.sum(axis=0) - normaliser_T) / LOG2E
    entropies_T = (jnp.log2(total_T) - slope_T / total_T) / LOG2E
    residuals = (hidden_TD, head_VD, targets_T, allowed_V, temperatures_T, normaliser_T, entropies_T)
    return (logprobs_T, entropies_T), residuals


def _fused_backward(
    numbers: int, residuals: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None, None, None]:
    hidden_TD, head_VD, targets_T, allowed_V, temperatures_T, normaliser_T, entropies_T = residuals
    logprob_grads_T, entropy_grads_T = cotangents
    T, V, dtype = len(hidden_TD), len(head_VD), hidden_TD.dtype
    tiling = tiling_of(dtype, target().capability)
    ids = tiling.sizes[1]
    width = min(max(numbers // (T * ids), 1) * ids, V)
    # d logprob / d logit_v = [v == target] - p_v;  d entropy / d logit_v = -p_v (log p_v + entropy)
    of_tokens = (
        LOG2E / temperatures_T,
        normaliser_T,
        logprob_grads_T / temperatures_T,
        (logprob_grads_T + entropy_grads_T * entropies_T) / temperatures_T,
        entropy_grads_T / (LOG2E * temperatures_T),
    )

    def add_chunk(start: int | Array, width: int, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        """Returns `grads` (of hidden states, of head) with the part of the ids `start .. start + width` filled in."""
        hidden_grad_TD, head_grad_VD = grads
        # Here V counts the ids of the chunk.
        chunk_VD, chunk_V = (jax.lax.dynamic_slice_in_dim(x, start, width) for x in (head_VD, allowed_V))
        arrays = (hidden_TD, chunk_VD, targets_T - start, _filled(chunk_V, tiling), *of_tokens)
        filled = -(-width // 16) * 16
        outs = [jax.ShapeDtypeStruct((T, filled), dtype)]
        grid = (TOGETHER, -(-width // ids), _groups(T, tiling))
        grads_TV = _call("logit_gradients", arrays, outs, grid, tiling, WIDTH=filled)[0][:, :width]
        hidden_grad_TD += _product("TV,VD->TD", grads_TV, chunk_VD)
        chunk_grad_VD = _product("TV,TD->VD", grads_TV, hidden_TD).astype(head_VD.dtype)
        return hidden_grad_TD, jax.lax.dynamic_update_slice_in_dim(head_grad_VD, chunk_grad_VD, start, 0)

    zero = varying_zero(*(x for x in residuals if x is not allowed_V), *cotangents)
    grads = (
        jnp.zeros(hidden_TD.shape, jnp.float32) + zero,
        jnp.zeros(head_VD.shape, head_VD.dtype) + zero.astype(head_VD.dtype),
    )
    chunks, rest = divmod(V, width)
    grads = jax.lax.fori_loop(0, chunks, lambda chunk, grads: add_chunk(chunk * width, width, grads), grads)
    hidden_grad_TD, head_grad_VD = add_chunk(V - rest, rest, grads) if rest else grads
    return hidden_grad_TD.astype(dtype), head_grad_VD, None, None, None


fused_logprobs = jax.custom_vjp(lambda *arguments: _fused_forward(*arguments)[0], nondiff_argnums=(5,))
fused_logprobs.defvjp(_fused_forward, _fused_backward)


def _groups(tokens: int, tiling: Tiling) -> int:
    return -(-tokens // (tiling.sizes[0] * TOGETHER))


def _filled(allowed_V: Array, tiling: Tiling) -> Array:
    return jnp.pad(allowed_V.astype(jnp.int8), (0, -len(allowed_V) % tiling.sizes[1]))


def _call(
    kernel: str, arrays: tuple[Array, ...], outs: Any, grid: tuple[int, int, int], tiling: Tiling, **constants: int
) -> list[Array]:
    """Runs a kernel over `arrays`: hidden states `[T, D]`, a head `[V, D]`, and the kernel's further inputs."""
    (T, D), V = arrays[0].shape, len(arrays[1])
    tokens, ids, depth = tiling.sizes
    arguments = (*arrays, T, V)
    return launch(
        "head_kernels", kernel, arguments, outs, grid, tiling, D=D, TOKENS=tokens, IDS=ids, DEPTH=depth, **constants
    )


def _product(equation: str, a: Array, b: Array) -> Array:
    """A product accumulated in float32. Float32 inputs are not multiplied in TF32, as GPUs would by default."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)
