"""Qwen3-VL: the decoder of Qwen3, and a vision tower. The decoder reads several of the tower's layers (DeepStack).

Every layer of the tower attends within a frame pair. Patches also have learned positions: a square grid, resampled
bilinearly to the rows and columns of each frame. The tower's layers are cut into stacks after each layer whose
features the decoder reads, so that a walk hands on only a hidden state.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from sharding.kernels.attention import segment_attention
from sharding.walk import Stack, Walk
from sharding.weights import WeightSpec, weight

from ..config import DeepVisionConfig
from ..inputs import VisionInput
from ..layers import LayerNorm, normal
from ..qwen2_5_vl.modeling import NORM_EPS, PatchEmbed, PatchMerger, Qwen25VL, VisionBlock, axial_rotary


def grid_taps(
    positions_P2: Int[Array, "P 2"], frame_segments_P: Int[Array, " P"], side: int
) -> tuple[Int[Array, "P 4"], Float[Array, "P 4"]]:
    """The four entries of a grid `[side, side]` between which a patch lies (indices row by row), and their weights. The
    corners of a frame lie on the corners of the grid. Patches of padding (segment 0) get arbitrary entries."""
    begins_P = jnp.diff(frame_segments_P, prepend=frame_segments_P[:1]) != 0
    frame_P = jnp.cumsum(begins_P.astype(jnp.int32))
    last_S2 = jax.ops.segment_max(positions_P2, frame_P, len(frame_P), indices_are_sorted=True)
    last_P2 = jnp.maximum(last_S2[frame_P], 1)
    place_P2 = positions_P2.astype(jnp.float32) * (side - 1) / last_P2.astype(jnp.float32)
    low_P2 = jnp.clip(jnp.floor(place_P2).astype(jnp.int32), 0, side - 1)
    share_P2 = place_P2 - low_P2.astype(jnp.float32)
    rows_P2, columns_P2 = (
        jnp.stack([low_P2[:, axis], jnp.minimum(low_P2[:, axis] + 1, side - 1)], axis=1) for axis in (0, 1)
    )
    by_row_P2, by_column_P2 = (jnp.stack([1 - share_P2[:, axis], share_P2[:, axis]], axis=1) for axis in (0, 1))
    indices_P22 = rows_P2[:, :, None] * side + columns_P2[:, None, :]
    weights_P22 = by_row_P2[:, :, None] * by_column_P2[:, None, :]
    return indices_P22.reshape(-1, 4), weights_P22.reshape(-1, 4)


class PositionGrid(nnx.Module):
    """The learned positions: a grid of vectors, row by row."""

    def __init__(self, config: DeepVisionConfig) -> None:
        self.side = config.position_grid
        shape = (self.side**2, config.hidden_size)
        self.table = weight(WeightSpec(shape, ("V", "D"), normal(config.initializer_range)))

    def __call__(self, vision: VisionInput) -> Float[Array, "P D"]:
        positions_P2, segments_P = jnp.asarray(vision.positions_P2), jnp.asarray(vision.frame_segments_P)
        indices_P4, weights_P4 = grid_taps(positions_P2, segments_P, self.side)
        table = self.table[...]

        def part(tap: int) -> Array:
            rows_PD = table[indices_P4[:, tap]]
            return rows_PD * jnp.broadcast_to(weights_P4[:, tap, None].astype(table.dtype), rows_PD.shape)

        return part(0) + part(1) + part(2) + part(3)


class DeepVisionTower(nnx.Module):
    """Patches with learned positions, stacks of blocks, and a merger for each layer that the decoder reads."""

    def __init__(self, config: DeepVisionConfig) -> None:
        self.config = config
        self.patch_embed = PatchEmbed(config, bias=True)
        self.positions = PositionGrid(config)
        for number, layers in enumerate(config.stretches):
            setattr(self, f"blocks_{number}", VisionBlock(config, stack=len(layers), plain=True))
        for number in range(len(config.deepstack_layers)):
            norm = LayerNorm(config.hidden_size * config.merge_unit, NORM_EPS)
            setattr(self, f"deep_merger_{number}", PatchMerger(config, norm))
        self.merger = PatchMerger(config, LayerNorm(config.hidden_size, NORM_EPS))

    def __call__(self, walk: Walk, vision: VisionInput) -> Float[Array, "M X"]:
        """Merged features of the packed patches: features of the last layer, then of each of `deepstack_layers`, side
        by side. Rows of padding are finite and meaningless."""
        x = walk.use(self.patch_embed)(jnp.asarray(vision.patches_PX))
        x = x + walk.use(self.positions)(vision)
        rotary = axial_rotary(self.config, jnp.asarray(vision.positions_P2))
        frames = jnp.asarray(vision.frame_segments_P)

        def step(block: VisionBlock, x: Array, _: None) -> tuple[Array, None]:
            return block(x, rotary, lambda q, k, v: segment_attention(q, k, v, frames, vision.frame_bound)), None

        deep = []
        for number, layers in enumerate(self.config.stretches):
            x, _ = walk.scan(Stack.of(getattr(self, f"blocks_{number}")), x, step)
            if layers[-1] in self.config.deepstack_layers:
                deep.append(walk.use(getattr(self, f"deep_merger_{number}"))(x))
        return jnp.concatenate([walk.use(self.merger)(x), *deep], axis=-1)


class Qwen3VL(Qwen25VL):
    """`Qwen3VLForConditionalGeneration`."""

    tower = DeepVisionTower
