"""Qwen2.5-VL: a vision tower, and a decoder whose placeholder tokens are replaced by the tower's features.

The tower reads packed patches in window order (`models.inputs.VisionInput`). Most of its layers attend within a window,
a few within a frame pair. All layers are one stack; the scan gives each layer a boolean for its kind of attention.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from sharding.kernels.attention import segment_attention
from sharding.spread.ulysses import Attention
from sharding.walk import Stack, Walk
from sharding.weights import WeightSpec, weight, zeros

from ..config import DecoderConfig, VisionConfig
from ..decoder import Decoder
from ..inputs import VisionInput
from ..layers import GatedMLP, LayerNorm, PlainMLP, RMSNorm, add_bias, gelu, normal, project, rotate

NORM_EPS = 1e-6  # not a setting of the published configurations


class PatchEmbed(nnx.Module):
    """A 3-D convolution whose stride is its kernel: one matrix over the flattened patch, with or without a bias."""

    def __init__(self, config: VisionConfig, *, bias: bool = False) -> None:
        shape = (config.patch_values, config.hidden_size)
        self.kernel = weight(WeightSpec(shape, ("X", "D"), normal(config.initializer_range)))
        self.bias = bias
        if bias:
            self.kernel_bias = weight(WeightSpec(shape[1:], ("D",), zeros))

    def __call__(self, patches: Float[Array, "P X"]) -> Float[Array, "P D"]:
        kernel = self.kernel[...]
        x = jnp.einsum("PX,XD->PD", patches.astype(kernel.dtype), kernel)
        return add_bias(x, self.kernel_bias[...]) if self.bias else x


class VisionBlock(nnx.Module):
    """Pre-norm attention and MLP, all with biases. `q`, `k`, `v` are one weight (axis `C`). `plain` blocks have layer
    norms and an MLP without gate, other blocks have RMS norms and a gated MLP."""

    def __init__(self, config: VisionConfig, stack: int | None = None, *, plain: bool = False) -> None:
        D, F, N, H = config.hidden_size, config.intermediate_size, config.num_heads, config.head_dim
        init, std = normal(config.initializer_range), config.initializer_range
        norm = LayerNorm if plain else RMSNorm
        self.attention_norm = norm(D, NORM_EPS, stack)
        self.qkv = weight(WeightSpec((D, 3, N, H), ("D", "C", "N", "H"), init), stack)
        self.qkv_bias = weight(WeightSpec((3, N, H), ("C", "N", "H"), zeros), stack)
        self.o = weight(WeightSpec((N, H, D), ("N", "H", "D"), init, inputs=2), stack)
        self.o_bias = weight(WeightSpec((D,), ("D",), zeros), stack)
        self.mlp_norm = norm(D, NORM_EPS, stack)
        if plain:
            self.mlp = PlainMLP(D, F, std=std, stack=stack)
        else:
            self.mlp = GatedMLP(D, F, bias=True, std=std, stack=stack)

    def __call__(self, x: Float[Array, "P D"], rotary: tuple[Array, Array], attend: Attention) -> Float[Array, "P D"]:
        """`attend(q, k, v) -> out`, all `[P, N, H]`."""
        qkv = jnp.einsum("PD,DCNH->CPNH", self.attention_norm(x), self.qkv[...])
        q, k, v = (add_bias(part, bias) for part, bias in zip(qkv, self.qkv_bias[...], strict=True))
        out = attend(rotate(q, rotary), rotate(k, rotary), v)
        x = x + add_bias(project(out, self.o), self.o_bias[...])
        return x + self.mlp(self.mlp_norm(x))


class PatchMerger(nnx.Module):
    """Joins every `merge_unit` neighbouring patches (one merge block) into one text-width feature."""

    def __init__(self, config: VisionConfig, norm: RMSNorm | LayerNorm) -> None:
        """`norm` is over one patch, or over all patches of a merge block."""
        inner = config.hidden_size * config.merge_unit
        init = normal(config.initializer_range)
        self.width = inner
        self.norm = norm
        self.up = weight(WeightSpec((inner, inner), ("X", "F"), init))
        self.up_bias = weight(WeightSpec((inner,), ("F",), zeros))
        self.down = weight(WeightSpec((inner, config.out_hidden_size), ("F", "D"), init))
        self.down_bias = weight(WeightSpec((config.out_hidden_size,), ("D",), zeros))

    def __call__(self, x: Float[Array, "P C"]) -> Float[Array, "M D"]:
        merged = self.norm(x.reshape(-1, self.norm.scale.shape[-1])).reshape(-1, self.width)
        inner = add_bias(jnp.einsum("MX,XF->MF", merged, self.up[...]), self.up_bias[...])
        return add_bias(jnp.einsum("MF,FD->MD", gelu(inner), self.down[...]), self.down_bias[...])


def axial_rotary(config: VisionConfig, positions_P2: Array) -> tuple[Array, Array]:
    """(cosine, sine) `[P, H]` float32: half of the pairs of a head rotate with the row, half with the column."""
    quarter = config.head_dim // 4
    exponent = np.arange(quarter, dtype=np.float32) / np.float32(quarter)
    frequencies = (np.float32(1) / np.float32(config.rope_theta) ** exponent).astype(np.float32)
    angles = positions_P2.astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
    angles = angles.reshape(len(positions_P2), 2 * quarter)
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


class VisionTower(nnx.Module):
    """Patch embedding, a stack of blocks, and the merger into features as wide as the text."""

    def __init__(self, config: VisionConfig) -> None:
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.blocks = VisionBlock(config, stack=config.depth)
        self.merger = PatchMerger(config, RMSNorm(config.hidden_size, NORM_EPS))

    def __call__(self, walk: Walk, vision: VisionInput) -> Float[Array, "M D"]:
        """Merged features of the packed patches, in window order; rows of padding are finite and meaningless."""
        x = walk.use(self.patch_embed)(jnp.asarray(vision.patches_PX))
        rotary = axial_rotary(self.config, jnp.asarray(vision.positions_P2))
        frames, windows = jnp.asarray(vision.frame_segments_P), jnp.asarray(vision.window_segments_P)
        frame_bound, window_bound = vision.frame_bound, (self.config.window_size // self.config.patch_size) ** 2
        window_bound = min(window_bound, frame_bound or window_bound)  # a window never reaches beyond its frame pair
        in_frame = functools.partial(segment_attention, segments=frames, bound=frame_bound)
        in_window = functools.partial(segment_attention, segments=windows, bound=window_bound)

        def step(block: VisionBlock, x: Array, full: Array) -> tuple[Array, None]:
            # A real branch, not a mask, since a frame may be a hundred times longer than a window.
            return block(x, rotary, lambda q, k, v: jax.lax.cond(full, in_frame, in_window, q, k, v)), None

        full = np.isin(np.arange(self.config.depth), self.config.full_attention_layers)
        x, _ = walk.scan(Stack.of(self.blocks), x, step, full)
        return walk.use(self.merger)(x)


class Qwen25VL(Decoder):
    """`Qwen2_5_VLForConditionalGeneration`. M-RoPE follows from the rope settings of the text config."""

    tower: Callable[..., nnx.Module] = VisionTower

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        assert config.vision is not None
        self.visual = self.tower(config.vision)

    def features(self, walk: Walk, vision: VisionInput) -> Float[Array, "M X"]:
        return self.visual(walk, vision)
