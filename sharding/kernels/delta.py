"""The gated delta rule (Gated DeltaNet, arXiv:2412.06464) over packed rows, computed by matrix products over chunks.

Each value head has a state, a matrix `[H, J]` from keys to values. A token decays the state, corrects the value under
the token's key, and reads the value under the token's query:

    S = exp(log_decay) * S;  S = S + k (beta * (v - S^T k))^T;  out = S^T q

Within a chunk of C tokens, the corrections U solve a triangular system (the UT transform of DeltaNet,
arXiv:2406.06484). Only two products of a chunk depend on the state S before the chunk: `U = U0 - W S` and the next
state. `PackedRuns` says with which state a chunk begins.

Blocks of chunks are computed one after another. The backward pass computes a block again from the state before the
block, so that memory holds the states of one block. Everything is float32 with full precision, because TF32 would lose
three digits.

Axes of this file: `N` chunks of `C` cells, `K` key heads, `V = K * R` value heads (`R` for each key head), `H` numbers
of a key, `J` numbers of a value, `X` channels of the convolution (queries, keys and values of all heads).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..mesh import varying_zero
from .delta_heads import DeltaHeads
from .runs import TAIL, ChunkStart, PackedRuns

BLOCK = 8  # chunks of a block; from 4 to 32, memory grows, and the time on CPUs is the same
UNROLL = 1  # chunks of an iteration of the loop over states
SMALL = 8  # matrices of at most this many rows are multiplied as sums, which are faster than a library's product
NORM_EPS = 1e-6  # added to the sum of squares of a query or key, under the root

_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaInputs:
    """The inputs of the mixing of a layer's tokens. `channels_BTX` are queries, keys and values before the convolution.
    `log_decay_BTV` is at most 0, and `beta_BTV` from 0 to 1, both float32. `conv_XS` is the convolution's weight,
    oldest token first."""

    channels_BTX: Any
    log_decay_BTV: Any
    beta_BTV: Any
    conv_XS: Any  # S = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaState:
    """The float32 states of all heads after sequences, and the channels of the last three tokens, oldest first."""

    heads_BVHJ: Any
    channels_B3X: Any


def new_state(heads: DeltaHeads, rows: int, dtype: DTypeLike) -> DeltaState:
    """The state before the first token of `rows` sequences: zeros, of this dtype for the convolution's inputs."""
    states = jnp.zeros((rows, heads.value_heads, heads.key_size, heads.value_size), jnp.float32)
    return DeltaState(states, jnp.zeros((rows, TAIL, heads.channels), dtype))


def delta_rule(
    inputs: DeltaInputs, heads: DeltaHeads, runs: PackedRuns, state: DeltaState | None = None, block: int = BLOCK
) -> tuple[Float[Array, "B T V J"], DeltaState]:
    """Convolution and delta rule over packed rows: (float32 outputs, zero at padding; the state after each row's last
    run). Runs made with `given` need the `state` before the rows. The backward pass computes `block` chunks at a time.
    """
    x, runs = inputs.channels_BTX, jax.tree.map(jnp.asarray, runs)
    B, N, C = runs.columns_BNC.shape
    given = new_state(heads, B, x.dtype) if state is None else state
    x_BSX = jnp.concatenate([x, given.channels_B3X.astype(x.dtype)], axis=1)  # `runs` counts columns in this order
    columns, cells = runs.columns_BNC.reshape(B, N * C), runs.cells_BT

    def blocks(x: Array, value: int = 0) -> Array:
        """`[B, N, ...]` -> `[blocks, block, B, ...]`, padded with `value`."""
        x = jnp.pad(x, ((0, 0), (0, -N % block)) + ((0, 0),) * (x.ndim - 2), constant_values=value)
        return jnp.moveaxis(x, 1, 0).reshape(-1, block, B, *x.shape[2:])

    def chunks(x: Array) -> Array:
        return _exchange(x, columns, cells).reshape(B, N, C, -1)

    before = _taken(x_BSX, runs.before_BN3.reshape(B, N * TAIL)).reshape(B, N, TAIL, -1)
    arrays = (
        blocks(jnp.concatenate([before, chunks(x)], axis=2)),
        blocks(chunks(inputs.log_decay_BTV)),
        blocks(chunks(inputs.beta_BTV)),
        blocks(runs.start_BN, ChunkStart.NEXT),
    )
    first = given.heads_BVHJ.astype(jnp.float32) + varying_zero(x_BSX, *arrays)
    first = first.reshape(B, heads.key_heads, -1, *first.shape[2:])
    step = jax.checkpoint(functools.partial(_block, heads, inputs.conv_XS), prevent_cse=False)
    (end, _), out = jax.lax.scan(step, (first, jnp.zeros_like(first)), arrays)
    out = jnp.moveaxis(out.reshape(-1, B, C, heads.value_heads * heads.value_size), 0, 1)[:, :N].reshape(B, N * C, -1)
    out = _exchange(out, cells, columns).reshape(*x.shape[:2], heads.value_heads, -1)
    return out, DeltaState(end.reshape(given.heads_BVHJ.shape), _taken(x_BSX, runs.last_B3))


def delta_step(inputs: DeltaInputs, heads: DeltaHeads, state: DeltaState) -> tuple[Float[Array, "B 1 V J"], DeltaState]:
    """Convolution and delta rule of one token in each row, for decoding: (float32 outputs, new states)."""
    x_B4X = jnp.concatenate([state.channels_B3X.astype(inputs.channels_BTX.dtype), inputs.channels_BTX], axis=1)
    q, k, v = (x[:, 0] for x in _queries_keys_values(_convolved(x_B4X, inputs.conv_XS), heads))
    log_decay, beta = (_grouped(x[:, 0], heads)[..., None] for x in (inputs.log_decay_BTV, inputs.beta_BTV))
    states = _grouped(state.heads_BVHJ, heads) * jnp.exp(log_decay)[..., None]
    correction = beta * (v - _dot("BKRHJ,BKH->BKRJ", states, k))
    states = states + k[:, :, None, :, None] * correction[..., None, :]
    out = _dot("BKRHJ,BKH->BKRJ", states, q).reshape(len(q), 1, heads.value_heads, heads.value_size)
    return out, DeltaState(states.reshape(state.heads_BVHJ.shape), x_B4X[:, 1:])


def _grouped(x: Array, heads: DeltaHeads, axis: int = 1) -> Array:
    """`[..., V, ...]` -> `[..., K, R, ...]`, float32."""
    shape = (*x.shape[:axis], heads.key_heads, heads.value_heads // heads.key_heads, *x.shape[axis + 1 :])
    return x.astype(jnp.float32).reshape(shape)


def _convolved(x: Float[Array, "*rows S X"], weight: Float[Array, "X 4"]) -> Float[Array, "*rows T X"]:
    """The causal convolution of four tokens in each channel, and SiLU, in float32; `T = S - 3`."""
    tokens = x.shape[-2] - TAIL
    wide, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    shifted = (wide[..., i : i + tokens, :] for i in range(TAIL + 1))
    return jax.nn.silu(sum(part * jnp.broadcast_to(weight[:, i], part.shape) for i, part in enumerate(shifted)))


def _queries_keys_values(x: Float[Array, "*rows X"], heads: DeltaHeads) -> tuple[Array, Array, Array]:
    """Returns queries and keys `[..., K, H]` of norm 1 (queries times `H**-0.5`), and values `[..., K, R, J]`."""
    size = heads.key_heads * heads.key_size
    q, k, v = jnp.split(x, [size, 2 * size], axis=-1)
    q, k = (part.reshape(*x.shape[:-1], heads.key_heads, heads.key_size) for part in (q, k))
    q, k = (part * jax.lax.rsqrt(jnp.sum(part * part, axis=-1, keepdims=True) + NORM_EPS) for part in (q, k))
    return q * heads.key_size**-0.5, k, v.reshape(*x.shape[:-1], heads.key_heads, -1, heads.value_size)


def _block(heads: DeltaHeads, conv_XS: Array, carry: tuple[Array, Array], chunks: tuple[Array, ...]) -> tuple:
    """Computes the chunks `[n, B, ...]` of a block. `chunks` are the channels (with the three tokens before each
    chunk), log_decay, beta and `ChunkStart`. `carry` is the present state and the kept state of a prompt, `[B, K, R, H,
    J]` each. Outputs are `[n, B, C, K, R, J]`."""
    channels, log_decay, beta, start = chunks
    q, k, v = _queries_keys_values(_convolved(channels, conv_XS), heads)
    q, k, v = jnp.moveaxis(q, 2, 3), jnp.moveaxis(k, 2, 3), jnp.moveaxis(v, 2, 4)  # [n, B, K, C, H], [n, B, K, R, C, J]
    log_decay, beta = (jnp.moveaxis(_grouped(x, heads, 3), 2, 4) for x in (log_decay, beta))  # [n, B, K, R, C]
    q, k, beta = q[:, :, :, None], k[:, :, :, None], beta[..., None]
    C = log_decay.shape[-1]
    # A product sums from the chunk's beginning, because XLA computes the operand of a `cumsum` again for each term.
    total = _dot("...S,CS->...C", log_decay, jnp.tri(C))[..., None]
    lower = jnp.broadcast_to(jnp.tri(C, dtype=bool), (*log_decay.shape, C))
    between = jnp.exp(jnp.where(lower, total - jnp.swapaxes(total, -1, -2), -jnp.inf))  # decay from token to token
    strictly = jnp.broadcast_to(jnp.tri(C, k=-1, dtype=bool), lower.shape)
    system = jnp.where(strictly, beta * between * _dot("...CH,...SH->...CS", k, k), 0.0)
    decayed = k * jnp.exp(total)
    solved = _solved(system, beta * jnp.concatenate([v, jnp.broadcast_to(decayed, (*v.shape[:-1], k.shape[-1]))], -1))
    corrections, reads = jnp.split(solved, [v.shape[-1]], axis=-1)
    end = total[..., -1:, :]
    states, corrections, carry = _states(corrections, reads, k * jnp.exp(end - total), jnp.exp(end), start, carry)
    out = _dot("...CH,...HJ->...CJ", q * jnp.exp(total), states)
    out = out + _dot("...CS,...SJ->...CJ", between * _dot("...CH,...SH->...CS", q, k), corrections)
    return carry, jnp.moveaxis(out, 4, 2)


def _states_forward(
    corrections: Array, reads: Array, writes: Array, decay: Array, start: Array, carry: tuple[Array, Array]
) -> tuple[tuple[Array, Array, tuple[Array, Array]], tuple]:
    """The recurrence from chunk to chunk. The argument `corrections` `[n, ..., C, J]` is that of chunks that begin with
    S = 0. Returns ((the state S with which each chunk begins, corrections, carry), residuals)."""

    def step(carry: tuple[Array, Array], chunk: tuple[Array, ...]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        (state, kept), (corrections, reads, writes, decay, start) = carry, chunk
        start = start[:, None, None, None, None]
        kept = jnp.where(start == ChunkStart.FORK, state, kept)
        state = jnp.where(start == ChunkStart.NEW, 0.0, jnp.where(start == ChunkStart.BRANCH, kept, state))
        corrections = corrections - _dot("...CH,...HJ->...CJ", reads, state)
        after = decay * state + _dot("...CH,...CJ->...HJ", writes, corrections)
        return (after, kept), (state, corrections)

    carry, (states, corrections) = jax.lax.scan(step, carry, (corrections, reads, writes, decay, start), unroll=UNROLL)
    return (states, corrections, carry), (states, corrections, reads, writes, decay, start)


def _states_backward(residuals: tuple, cotangents: tuple) -> tuple:
    states, corrections, reads, writes, decay, start = residuals
    d_states, d_corrections, d_carry = cotangents

    def step(carry: tuple[Array, Array], chunk: tuple[Array, ...]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        (after, kept), (d_state, d_corrections, reads, writes, decay, start) = carry, chunk
        start = start[:, None, None, None, None]
        d_corrections = d_corrections + _dot("...CH,...HJ->...CJ", writes, after)
        d_state = d_state + decay * after - _dot("...CH,...CJ->...HJ", reads, d_corrections)
        forks = start == ChunkStart.FORK
        before = jnp.where((start == ChunkStart.NEXT) | forks, d_state, 0.0) + jnp.where(forks, kept, 0.0)
        kept = jnp.where(forks, 0.0, kept) + jnp.where(start == ChunkStart.BRANCH, d_state, 0.0)
        return (before, kept), (after, d_corrections)

    chunks = (d_states, d_corrections, reads, writes, decay, start)
    d_carry, (d_after, d_corrections) = jax.lax.scan(step, d_carry, chunks, reverse=True, unroll=UNROLL)
    d_reads = -_dot("...CJ,...HJ->...CH", d_corrections, states)
    d_writes = _dot("...CJ,...HJ->...CH", corrections, d_after)
    d_decay = jnp.sum(states * d_after, axis=(-1, -2), keepdims=True)
    return d_corrections, d_reads, d_writes, d_decay, None, d_carry


_states = jax.custom_vjp(lambda *arguments: _states_forward(*arguments)[0])
_states.defvjp(_states_forward, _states_backward)


def _solved_forward(
    system: Float[Array, "*n C C"], right: Float[Array, "*n C J"]
) -> tuple[Float[Array, "*n C J"], tuple[Array, Array]]:
    """`(I + system)^-1 right` of a strictly lower triangular `system`, and residuals."""
    inverse = _inverse(system)
    solved = _dot("...CS,...SJ->...CJ", inverse, right)
    return solved, (inverse, solved)


def _solved_backward(residuals: tuple[Array, Array], d_solved: Array) -> tuple[Array, Array]:
    inverse, solved = residuals
    d_right = _dot("...CS,...CJ->...SJ", inverse, d_solved)
    d_system = -_dot("...CJ,...SJ->...CS", d_right, solved)  # the caller masks the upper triangle
    return d_system, d_right


_solved = jax.custom_vjp(lambda *arguments: _solved_forward(*arguments)[0])
_solved.defvjp(_solved_forward, _solved_backward)


def _inverse(system: Array) -> Array:
    """`(I + system)^-1` of a strictly lower triangular `system`. The inverse of `[[A, 0], [B, D]]` is `[[A^-1, 0],
    [-D^-1 B A^-1, D^-1]]`. Powers of `system` are avoided, because they have large entries of both signs where keys
    repeat."""
    size = system.shape[-1]
    if size == 1:
        return jnp.ones_like(system)
    half = size // 2
    first, second = _inverse(jnp.stack([system[..., :half, :half], system[..., half:, half:]]))
    across = -_small_dot(second, _small_dot(system[..., half:, :half], first))
    upper = jnp.concatenate([first, jnp.zeros_like(across)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([across, second], axis=-1)], axis=-2)


def _small_dot(a: Array, b: Array) -> Array:
    """`a @ b`. Small matrices are multiplied as sums, which become one loop."""
    if a.shape[-1] > SMALL:
        return _dot("...CS,...SJ->...CJ", a, b)
    return jnp.sum(a[..., None] * b[..., None, :, :], axis=-2)


@jax.custom_vjp
def _exchange(x: Float[Array, "B T X"], there_BS: Int[Array, "B S"], back_BT: Int[Array, "B T"]) -> Array:
    """`x[there]`, zero where it is -1. `back` is the inverse, so that gradients are gathered, not scattered."""
    return _taken(x, there_BS)


_exchange.defvjp(lambda x, there, back: (_taken(x, there), back), lambda back, d_out: (_taken(d_out, back), None, None))


def _taken(x: Float[Array, "B T X"], index_BS: Int[Array, "B S"]) -> Float[Array, "B S X"]:
    """`x[index]` of each row, zero where the index is -1."""
    found = jnp.take_along_axis(x, jnp.maximum(index_BS, 0)[..., None], axis=1)
    return jnp.where(index_BS[..., None] >= 0, found, 0)
