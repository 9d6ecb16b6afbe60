"""The parts that architectures share. Each weight is declared once, next to its use.

`stack=L` creates L layers as one module, whose weights have a leading layer axis.
Norms, the exact GELU and rotary embeddings compute in float32, all other parts in the dtype of the weights.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from sharding.kernels import gated
from sharding.mesh import target
from sharding.weights import Initializer, WeightSpec, weight, zeros

from .config import RopeConfig


def ones(_: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape, np.float32)


def normal(std: float) -> Initializer:
    """Normally distributed initial values with mean 0."""
    return lambda rng, shape: np.float32(std) * rng.standard_normal(shape, np.float32)


def uniform(low: float, high: float) -> Initializer:
    """Initial values that are uniform in [low, high)."""
    return lambda rng, shape: np.float32(low) + np.float32(high - low) * rng.random(shape, np.float32)


class RMSNorm(nnx.Module):
    """The RMS norm times a scale, or times one plus a scale (`zero_centred`)."""

    def __init__(
        self, size: int, eps: float, stack: int | None = None, axis: str = "D", *, zero_centred: bool = False
    ) -> None:
        self.eps = eps
        self.zero_centred = zero_centred
        self.scale = weight(WeightSpec((size,), (axis,), zeros if zero_centred else ones), stack)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        scale = 1 + scale if self.zero_centred else scale
        return (wide * jnp.broadcast_to(scale, wide.shape)).astype(x.dtype)


class LayerNorm(nnx.Module):
    def __init__(self, size: int, eps: float, stack: int | None = None) -> None:
        self.eps = eps
        self.scale = weight(WeightSpec((size,), ("D",), ones), stack)
        self.scale_bias = weight(WeightSpec((size,), ("D",), zeros), stack)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        scale, bias = (jnp.broadcast_to(part[...], x.shape) for part in (self.scale, self.scale_bias))
        return (wide * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


class GatedMLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))`, with or without biases."""

    def __init__(self, width: int, inner: int, *, bias: bool, std: float, stack: int | None = None) -> None:
        self.gate = weight(WeightSpec((width, inner), ("D", "F"), normal(std), inputs=1), stack)
        self.up = weight(WeightSpec((width, inner), ("D", "F"), normal(std), inputs=1), stack)
        self.down = weight(WeightSpec((inner, width), ("F", "D"), normal(std), inputs=1), stack)
        self.bias = bias
        if bias:
            self.gate_bias = weight(WeightSpec((inner,), ("F",), zeros), stack)
            self.up_bias = weight(WeightSpec((inner,), ("F",), zeros), stack)
            self.down_bias = weight(WeightSpec((width,), ("D",), zeros), stack)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        gate, up = project(x, self.gate), project(x, self.up)
        if self.bias:
            gate, up = add_bias(gate, self.gate_bias[...]), add_bias(up, self.up_bias[...])
        if self.down.get_metadata("spec").outputs_first or not target().is_gpu:
            out = project(jax.nn.silu(gate) * up, self.down)
        else:  # GPUs compute gradients in one pass over the activations
            flat = [x.reshape(-1, x.shape[-1]) for x in (gate, up)]
            out = gated.gated_product(*flat, self.down[...]).reshape(*gate.shape[:-1], -1)
        return add_bias(out, self.down_bias[...]) if self.bias else out


class PlainMLP(nnx.Module):
    """`down(gelu(up(x)))` with biases, and with the approximation of the GELU by `tanh`."""

    def __init__(self, width: int, inner: int, *, std: float, stack: int | None = None) -> None:
        self.up = weight(WeightSpec((width, inner), ("D", "F"), normal(std), inputs=1), stack)
        self.up_bias = weight(WeightSpec((inner,), ("F",), zeros), stack)
        self.down = weight(WeightSpec((inner, width), ("F", "D"), normal(std), inputs=1), stack)
        self.down_bias = weight(WeightSpec((width,), ("D",), zeros), stack)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        inner = jax.nn.gelu(add_bias(project(x, self.up), self.up_bias[...]), approximate=True)
        return add_bias(project(inner, self.down), self.down_bias[...])


class Embedding(nnx.Module):
    """A table with a row for each token id. The table serves as the input embedding, the output head or both."""

    def __init__(self, vocab: int, width: int, std: float) -> None:
        self.table = weight(WeightSpec((vocab, width), ("V", "D"), normal(std)))

    def __call__(self, tokens: Int[Array, "*shape"]) -> Float[Array, "*shape D"]:
        return self.table[...][tokens]


@jax.custom_jvp
def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The exact GELU: `x` times the standard normal CDF of `x`, computed by `erf` as in PyTorch. In a `shard_map` that
    checks replication, JAX 0.12 refuses `erfc`, which `jax.nn.gelu` uses, and its own derivative of `erf`."""
    wide = x.astype(jnp.float32)
    return (wide * _normal_cdf(wide)).astype(x.dtype)


@gelu.defjvp
def _gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    wide = x.astype(jnp.float32)
    density = jnp.exp(-0.5 * jnp.square(wide)) / np.float32(math.sqrt(2 * math.pi))
    return gelu(x), tangent * (_normal_cdf(wide) + wide * density).astype(x.dtype)


def _normal_cdf(x: Array) -> Array:
    return 0.5 * (1 + jax.lax.erf(x * np.float32(math.sqrt(0.5))))


FEW_ROWS = 48  # the most rows for which a CPU is faster with the weight as left factor (measured with 2 to 64)


def project(x: Array, matrix: nnx.Variable) -> Array:
    """Multiplies the last axes of `x` by the input axes of a weight (`WeightSpec.inputs`), and sums over them. All axes
    of rows are joined: with several, XLA on CPUs would transpose the activations for each weight's gradient, which
    takes half as long as the products."""
    spec: WeightSpec = matrix.get_metadata("spec")
    weights, rows = matrix[...], x.shape[: x.ndim - spec.inputs]
    flat = x.reshape(math.prod(rows), -1)
    if spec.outputs_first:
        out = _by_outputs(flat, weights.reshape(-1, flat.shape[1]))
        return out.reshape(*rows, *weights.shape[: -spec.inputs])
    out = flat @ weights.reshape(flat.shape[1], -1)
    return out.reshape(*rows, *weights.shape[spec.inputs :])


def kept_in_loop(rotary: tuple[Array, Array], x: Array) -> tuple[Array, Array]:
    """The angles (cosine, sine), tied to the hidden states `x` of the loop over layers. XLA on GPUs would otherwise
    move their broadcast to all heads out of the loop, and layers would read the broadcast from memory."""
    if not target().is_gpu:
        return rotary
    return jax.lax.optimization_barrier((rotary, jax.lax.stop_gradient(x[:1, :1, :1])))[0]


def _by_outputs(x: Array, weights: Array) -> Array:
    """`[B, D] x [O, D] -> [B, O]`. If rows are few, XLA on CPUs takes half the time with the weight as the left factor.
    The barrier keeps XLA from exchanging the factors again."""
    rows = x.shape[0]
    if target().is_gpu or rows > FEW_ROWS:
        return x @ weights.T
    out = weights @ x.T
    return out.T if rows == 1 else jax.lax.optimization_barrier(out).T


def add_bias(x: Array, bias: Array) -> Array:
    """`x + bias` over the trailing axes of `x`, without rank promotion."""
    return x + jnp.broadcast_to(bias, x.shape)


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """The angle per position of each pair of the head's `head_dim` rotated numbers, `[head_dim / 2]` float32, and the
    factor on cosine and sine. `yarn` interpolates slow frequencies only (Peng et al., arXiv 2309.00071)."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (np.float32(1) / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.kind == "linear":
        return frequencies / np.float32(rope.factor), 1.0
    if rope.kind == "yarn":
        kept = 1 - _yarn_ramp(rope, head_dim)
        frequencies = frequencies / np.float32(rope.factor) * (1 - kept) + frequencies * kept
        return frequencies, _yarn_attention_factor(rope)
    return frequencies, 1.0


def _yarn_ramp(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """The share by which each pair of the head is interpolated, `[H/2]` float32: 0 for fast pairs, 1 for slow pairs.
    The share is float32 as in transformers, since rounding near 1 changes the share that is not interpolated."""

    def turning_point(rotations: float) -> float:
        # The pair that turns `rotations` times within the original context.
        return head_dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = turning_point(rope.beta_fast), turning_point(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width)
    return np.clip(ramp, np.float32(0), np.float32(1))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """The factor on cosine and sine: `attention_factor`, or as transformers derives it from `factor` and `mscale`s."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(by: float) -> float:
        return 0.1 * by * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def rotate(
    x: Float[Array, "*rows N H"], rotary: tuple[Float[Array, "*rows R"], Float[Array, "*rows R"]]
) -> Float[Array, "*rows N H"]:
    """Rotates each pair `(x[i], x[i + R/2])` of a head's first R numbers; `rotary` is (cosine, sine), float32."""
    if (size := rotary[0].shape[-1]) < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :size], rotary), x[..., size:]], axis=-1)
    cos, sin = (jnp.broadcast_to(part[..., None, :], x.shape) for part in rotary)
    wide = x.astype(jnp.float32)
    first, second = jnp.split(wide, 2, axis=-1)
    return (wide * cos + jnp.concatenate([-second, first], axis=-1) * sin).astype(x.dtype)
