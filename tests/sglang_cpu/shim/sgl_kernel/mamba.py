"""SGLang's CPU operators for Qwen3.5 in PyTorch: gated delta networks, and the gate and norms of its attention.

Every operator computes in float32 and returns the dtype of its input. The names and arguments are SGLang's. The pools
of states have a slot for each request and are written in place: the convolution's last inputs `[slots, channels,
width - 1]`, the recurrent states `[slots, value heads, dv, dk]`. A negative slot is padding: its output is zero.
"""

from typing import Any

import torch
from torch.nn.functional import silu, softplus

SOFTPLUS_THRESHOLD = 20.0  # beyond it, softplus is the identity


# --- causal depthwise convolution ----------------------------------------------------------------


def _convolved(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, act: Any) -> torch.Tensor:
    """The sums over `width` neighbours of `inputs` [.., channels, width - 1 + T], as [.., channels, T]."""
    out = (inputs.float().unfold(-1, weight.shape[1], 1) * weight.float()[:, None]).sum(-1)
    out = out if bias is None else out + bias.float()[:, None]
    return (silu(out) if act in ("silu", "swish", True) else out).to(inputs.dtype)


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: Any,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Convolves the sequences that lie one after the other in `x` [channels, T]; a sequence goes on from the state of
    its slot if `has_initial_state` says so."""
    out = torch.zeros_like(x)
    bounds = query_start_loc.tolist()
    slots, begun = cache_indices.tolist(), has_initial_state.tolist()
    for start, end, slot, goes_on in zip(bounds[:-1], bounds[1:], slots, begun, strict=True):
        if slot < 0 or start == end:
            continue
        state = conv_states[slot].to(x.dtype)
        inputs = torch.cat([state if goes_on else torch.zeros_like(state), x[:, start:end]], dim=1)
        out[:, start:end] = _convolved(inputs, weight, bias, activation)
        conv_states[slot] = inputs[:, -state.shape[1] :].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Any = None,
    *,
    conv_state_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Convolves one further token of each request: `x` is [requests, channels]."""
    rows = (conv_state_indices >= 0).nonzero()[:, 0]
    slots = conv_state_indices[rows].long()
    inputs = torch.cat([conv_state[slots].to(x.dtype), x[rows][:, :, None]], dim=2)
    conv_state[slots] = inputs[:, :, 1:].to(conv_state.dtype)
    out = torch.zeros_like(x)
    out[rows] = _convolved(inputs, weight, bias, activation)[:, :, 0]
    return out


# --- gated delta rule (arXiv 2412.06464) ----------------------------------------------------------


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logarithm of the decay, beta), each float32 [1, T, value heads]."""
    gate = -A_log.float().exp() * softplus(a.float() + dt_bias.float(), threshold=SOFTPLUS_THRESHOLD)
    return gate[None], b.float().sigmoid()[None]


def _queries_and_keys(q: torch.Tensor, k: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both of unit length, queries over the root of dk, as [T, value heads, dk]: a key head serves several value
    heads."""
    lengths = [x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k)]
    unit_q, unit_k = (x.repeat_interleave(heads // x.shape[-2], dim=-2) for x in lengths)
    return unit_q * q.shape[-1] ** -0.5, unit_k


def _step(state: torch.Tensor, q: Any, k: Any, v: Any, gate: Any, beta: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each request. `state` decays, then takes what it lacks of `v` at `k`. Returns (state, output)."""
    state = state * gate.exp()[..., None, None]
    lacks = beta[..., None] * (v - (state @ k[..., None])[..., 0])
    state = state + lacks[..., None] * k[..., None, :]
    return state, (state @ q[..., None])[..., 0]


def chunk_gated_delta_rule_cpu(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, None]:
    """The sequences that lie one after the other in [1, T, heads, size], each from the state of its slot on."""
    queries, keys = _queries_and_keys(q[0], k[0], v.shape[2])
    values, out = v[0].float(), torch.zeros_like(v)
    bounds = cu_seqlens.tolist()
    for start, end, slot in zip(bounds[:-1], bounds[1:], initial_state_indices.tolist(), strict=True):
        if slot < 0:
            continue
        state = initial_state[slot].float()
        for t in range(start, end):
            state, token = _step(state, queries[t], keys[t], values[t], g[0, t], beta[0, t])
            out[0, t] = token.to(v.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    disable_state_update: bool = False,
    **_: Any,
) -> torch.Tensor:
    """One further token of each request: q, k, v are [1, requests, heads, size]."""
    # Only speculative decoding asks for this, and no server of the tests speculates. Updating the state in spite of it
    # would give wrong tokens.
    if disable_state_update:
        raise NotImplementedError("speculative decoding is not in this stand-in")
    rows = (initial_state_indices >= 0).nonzero()[:, 0]
    slots = initial_state_indices[rows].long()
    queries, keys = _queries_and_keys(q[0, rows], k[0, rows], v.shape[2])
    gate, beta = fused_gdn_gating_cpu(A_log, a[rows], b[rows], dt_bias)
    state, tokens = _step(initial_state_source[slots].float(), queries, keys, v[0, rows].float(), gate[0], beta[0])
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    out = torch.zeros_like(v)
    out[0, rows] = tokens.to(v.dtype)
    return out


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: torch.Tensor, ba: torch.Tensor, key_heads: int, value_heads: int, dk: int, dv: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q | k | v, z by head, b, a) of two joined projections."""
    width = 2 * key_heads * dk + value_heads * dv
    b, a = ba.split(value_heads, dim=1)
    z = qkvz[:, width:].reshape(-1, value_heads, dv)
    return qkvz[:, :width].contiguous(), z.contiguous(), b.contiguous(), a.contiguous()


# --- gated attention ------------------------------------------------------------------------------


def _head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, size: int) -> torch.Tensor:
    """An RMS norm of each head, as [T * heads, size]; `weight` is the scale less one."""
    heads = x.reshape(-1, size).float()
    scale = torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)
    return (heads * scale * (1 + weight.float())).to(x.dtype)


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _head_norm(q, q_weight, eps, size), _head_norm(k, k_weight, eps, size)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_and_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    size: int,
    heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The projection of a head is its query, then its gate."""
    q, gate = q_and_gate.reshape(-1, heads, 2 * size).split(size, dim=-1)
    q, k = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, size)
    return q, k, gate.reshape(-1, heads * size).contiguous()


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiplies `x` in place."""
    x.copy_((x.float() * gate.reshape(x.shape).float().sigmoid()).to(x.dtype))


# What modules of SGLang look up as `torch.ops.sgl_kernel.NAME` while they are imported.
LOOKED_UP = (
    fused_gdn_gating_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_sigmoid_mul_cpu,
)
