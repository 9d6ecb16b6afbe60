"""Log-probabilities over the vocabulary on NVIDIA GPUs: launches the Triton kernels of `head_kernels`.

In the forward pass, logits exist in registers only. Each program goes through a part of the vocabulary for some tokens;
the sums of the parts, `[parts, T]`, are combined here.

In the backward pass, the vocabulary is cut into chunks. A kernel computes a chunk's logits again and writes their
gradients in the dtype of the hidden states, `[T, width]`. Two matrix products of XLA (cuBLAS, or a faster kernel that
XLA finds) compute from these the chunk of the head's gradient, which is final, and a term of the hidden states'
gradient, which is summed in float32. So each number of the head's gradient is one sum over all tokens, rounded once,
and no float32 copy of it exists. Nothing is added by atomics: the same inputs give the same bits.

Four products of T x V x D in all are the least possible without storing logits. Kernels that also summed the gradients
would compute logits several times more: sums of `[TOKENS, D]` or `[IDS, D]` do not fit into the registers of a program,
and the two gradients are sums along different axes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..target import target
from . import triton_launch

LOG2E = 1.4426950408889634
TOGETHER = 16  # tiles of tokens that run at once on the same part of the head: both stay in the L2 cache
LEAST_PARTS = 8  # parts of the vocabulary: times TOGETHER, a program for nearly each of an H100's 132 processors
PROGRAMS = 1024  # programs aimed at: with few tokens, the vocabulary has more parts


def chosen(hidden: Array, head: Array) -> bool:
    """Says, while a program is traced, whether this file's kernels compute log-probabilities of these arrays.

    They do where a Triton kernel can be launched (`launch.possible`) and the width of the model is a multiple of 16.
    """
    return hidden.size > 0 and hidden.shape[-1] % 16 == 0 and triton_launch.possible(hidden, head)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The sizes of the kernels' tiles, and how the kernels are compiled."""

    tokens: int
    ids: int
    depth: int  # numbers of the model's width that are multiplied at once
    warps: int
    stages: int  # stages of the software pipeline
    precision: str = "tf32x3"  # the products that make up one of float32; bfloat16 is multiplied directly


def tiling(dtype: Any, capability: int) -> Tiling:
    """The settings of both kernels: the largest tiles that ptxas fits into registers. No GPU has timed them."""
    if jnp.dtype(dtype).itemsize == 4:
        return Tiling(64, 64, 32, 4, 2)
    if 90 <= capability < 120:
        return Tiling(128, 256 if capability < 100 else 128, 64, 8, 4)
    return Tiling(128, 128, 32, 8, 4)


def fused_logprobs(
    hidden_TD: Float[Array, "T D"],
    head_VD: Float[Array, "V D"],
    targets_T: Int[Array, " T"],
    allowed_V: Bool[Array, " V"],
    temperatures_T: Float[Array, " T"],
    numbers: int,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """`sharding.vocab.token_logprobs` of a row of tokens: (log-probability of each target, entropy).

    `numbers` is about how many gradients of logits the backward pass has in memory at once.
    """
    return _fused(hidden_TD, head_VD, targets_T, allowed_V, temperatures_T, numbers)


def _values(
    hidden_TD: Array, head_VD: Array, targets_T: Array, allowed_V: Array, temperatures_T: Array, numbers: int
) -> tuple[Array, Array]:
    return _forward(hidden_TD, head_VD, targets_T, allowed_V, temperatures_T, numbers)[0]


def _forward(
    hidden_TD: Array, head_VD: Array, targets_T: Array, allowed_V: Array, temperatures_T: Array, numbers: int
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    del numbers
    T, V = len(hidden_TD), len(head_VD)
    settings = tiling(hidden_TD.dtype, target().capability)
    groups, tiles = _groups(T, settings), -(-V // settings.ids)
    parts = min(max(LEAST_PARTS, PROGRAMS // (groups * TOGETHER)), tiles)
    sums = [jax.ShapeDtypeStruct((parts, T), jnp.float32)] * 4
    arrays = (hidden_TD, head_VD, targets_T, _filled(allowed_V, settings), LOG2E / temperatures_T)
    peaks, totals, slopes, hits = _call("softmax_sums", arrays, sums, (TOGETHER, parts, groups), settings)

    peak_T = peaks.max(axis=0)
    below = peaks - peak_T[None, :]
    total_T = jnp.sum(jnp.exp2(below) * totals, axis=0)
    slope_T = jnp.sum(jnp.exp2(below) * (slopes + totals * below), axis=0)
    normaliser_T = peak_T + jnp.log2(total_T)
    logprobs_T = (hits.sum(axis=0) - normaliser_T) / LOG2E
    entropies_T = (jnp.log2(total_T) - slope_T / total_T) / LOG2E
    residuals = (hidden_TD, head_VD, targets_T, allowed_V, temperatures_T, normaliser_T, entropies_T)
    return (logprobs_T, entropies_T), residuals


def _backward(
    numbers: int, residuals: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None, None, None]:
    hidden_TD, head_VD, targets_T, allowed_V, temperatures_T, normaliser_T, entropies_T = residuals
    logprob_grads_T, entropy_grads_T = cotangents
    T, V, dtype = len(hidden_TD), len(head_VD), hidden_TD.dtype
    settings = tiling(dtype, target().capability)
    width = min(max(numbers // (T * settings.ids), 1) * settings.ids, V)
    # d logprob / d logit_v = [v == target] - p_v;  d entropy / d logit_v = -p_v (log p_v + entropy)
    of_tokens = (
        LOG2E / temperatures_T,
        normaliser_T,
        logprob_grads_T / temperatures_T,
        (logprob_grads_T + entropy_grads_T * entropies_T) / temperatures_T,
        entropy_grads_T / (LOG2E * temperatures_T),
    )

    def add_chunk(start: int | Array, width: int, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        """Adds the gradients through `width` ids from `start` on to the gradients of hidden states and head."""
        hidden_grad_TD, head_grad_VD = grads
        # Here V counts the ids of the chunk.
        chunk_VD, chunk_V = (jax.lax.dynamic_slice_in_dim(x, start, width) for x in (head_VD, allowed_V))
        arrays = (hidden_TD, chunk_VD, targets_T - start, _filled(chunk_V, settings), *of_tokens)
        filled = -(-width // 16) * 16
        outs = [jax.ShapeDtypeStruct((T, filled), dtype)]
        grid = (TOGETHER, -(-width // settings.ids), _groups(T, settings))
        grads_TV = _call("logit_gradients", arrays, outs, grid, settings, WIDTH=filled)[0][:, :width]
        hidden_grad_TD += _product("TV,VD->TD", grads_TV, chunk_VD)
        chunk_grad_VD = _product("TV,TD->VD", grads_TV, hidden_TD).astype(head_VD.dtype)
        return hidden_grad_TD, jax.lax.dynamic_update_slice_in_dim(head_grad_VD, chunk_grad_VD, start, 0)

    zero = triton_launch.varying_zero(*(x for x in residuals if x is not allowed_V), *cotangents)
    grads = (
        jnp.zeros(hidden_TD.shape, jnp.float32) + zero,
        jnp.zeros(head_VD.shape, head_VD.dtype) + zero.astype(head_VD.dtype),
    )
    chunks, rest = divmod(V, width)
    grads = jax.lax.fori_loop(0, chunks, lambda chunk, grads: add_chunk(chunk * width, width, grads), grads)
    hidden_grad_TD, head_grad_VD = add_chunk(V - rest, rest, grads) if rest else grads
    return hidden_grad_TD.astype(dtype), head_grad_VD, None, None, None


_fused = jax.custom_vjp(_values, nondiff_argnums=(5,))
_fused.defvjp(_forward, _backward)


def _groups(tokens: int, settings: Tiling) -> int:
    return -(-tokens // (settings.tokens * TOGETHER))


def _filled(allowed_V: Array, settings: Tiling) -> Array:
    return jnp.pad(allowed_V.astype(jnp.int8), (0, -len(allowed_V) % settings.ids))


def _call(
    kernel: str,
    arrays: tuple[Array, ...],
    outs: Any,
    grid: tuple[int, int, int],
    settings: Tiling,
    **constants: int,
) -> list[Array]:
    """Runs a kernel over `arrays`: hidden states `[T, D]`, a head `[V, D]`, and the kernel's further inputs."""
    (T, D), V = arrays[0].shape, len(arrays[1])
    results = triton_launch.launch(
        "head_kernels",
        kernel,
        (*arrays, T, V),
        outs,
        grid,
        warps=settings.warps,
        stages=settings.stages,
        D=D,
        TOKENS=settings.tokens,
        IDS=settings.ids,
        DEPTH=settings.depth,
        PRECISION=settings.precision,
        **constants,
    )
    zero = triton_launch.varying_zero(*arrays)
    return [x + zero.astype(x.dtype) for x in results]


def _product(equation: str, a: Array, b: Array) -> Array:
    """A product accumulated in float32. Float32 inputs are not multiplied in TF32, as GPUs would by default."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)
