"""Each part of the vision tower equals its counterpart in `transformers`, 1e-4 absolute in float32.

`pytest -rP` shows the largest error of each comparison.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_reference import TOLERANCE, Pair, build_vl, layer_of, torch, worst

from models.processing.vision_input import pack_patches, pad
from sharding.kernels.attention import segment_attention
from sharding.walk import Walk

# Frames larger than a window, cut windows at the edges, several frame pairs, several media.
GRIDS = ((1, 6, 10), (3, 4, 6), (1, 4, 4), (2, 10, 8))


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    return build_vl(tmp_path_factory.mktemp("vl"))


@pytest.fixture(scope="module")
def patches_PX() -> np.ndarray:
    count = sum(int(np.prod(grid)) for grid in GRIDS)
    return np.random.default_rng(0).normal(size=(count, 96)).astype(np.float32)


def check(ours, reference) -> None:
    error = worst(ours, reference)
    print("max error", error)
    assert float(reference.detach().abs().max()) > 0.3
    assert error < TOLERANCE


def window_order(pair: Pair, patches_PX):
    return pack_patches(patches_PX, GRIDS, pair.model.config.vision)[0]


def boundaries(segments_P):
    """Segments as the reference wants them: where each begins, and the end."""
    return torch.as_tensor(np.append(0, np.cumsum(np.bincount(segments_P)[1:])).astype(np.int32))


def test_patch_embedding(pair: Pair, patches_PX) -> None:
    reference = pair.reference.model.visual.patch_embed(torch.as_tensor(patches_PX))
    check(pair.model.visual.patch_embed(jnp.asarray(patches_PX)), reference)


def test_rotary_of_rows_and_columns(pair: Pair, patches_PX) -> None:
    vision = window_order(pair, patches_PX)
    positions = torch.as_tensor(vision.positions_P2)
    cos, sin = pair.reference.model.visual.rotary_pos_emb(torch.zeros(1), positions)
    ours = pair.model.visual.rotary(jnp.asarray(vision.positions_P2))
    check(ours[0], cos)
    check(ours[1], sin)


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True], ids=["windowed", "full"])
def test_block(pair: Pair, patches_PX, full: bool) -> None:
    vision = window_order(pair, patches_PX)
    segments = vision.frame_segments_P if full else vision.window_segments_P
    x = np.random.default_rng(1).normal(size=(vision.num_patches, 48)).astype(np.float32)
    tower = pair.reference.model.visual
    cos_sin = tower.rotary_pos_emb(torch.zeros(1), torch.as_tensor(vision.positions_P2))
    reference = tower.blocks[2](torch.as_tensor(x), cu_seqlens=boundaries(segments), position_embeddings=cos_sin)
    bound = vision.frame_bound if full else pair.model.config.vision.window_patches
    ours = layer_of(pair.model.visual.blocks, 2)(
        jnp.asarray(x),
        pair.model.visual.rotary(jnp.asarray(vision.positions_P2)),
        lambda q, k, v: segment_attention(q, k, v, jnp.asarray(segments), bound),
    )
    check(ours, reference)


def test_merger(pair: Pair) -> None:
    x = np.random.default_rng(2).normal(size=(40, 48)).astype(np.float32)
    check(pair.model.visual.merger(jnp.asarray(x)), pair.reference.model.visual.merger(torch.as_tensor(x)))


@pytest.mark.parametrize("bounded", [True, False], ids=["bound known", "bound unknown"])
def test_whole_tower(pair: Pair, patches_PX, bounded: bool) -> None:
    """Raster-ordered patches in, raster-ordered features out; padding at the end changes nothing."""
    vision, order = pack_patches(patches_PX, GRIDS, pair.model.config.vision)
    real = vision.num_patches // 4
    vision = pad(vision, 512)
    if not bounded:
        vision = dataclasses.replace(vision, frame_bound=0)
    ours = jax.jit(lambda vision: pair.model.visual(Walk(), vision))(vision)
    assert np.isfinite(ours).all()
    with torch.no_grad():
        reference = pair.reference.model.visual(torch.as_tensor(patches_PX), grid_thw=torch.as_tensor(GRIDS))
    check(np.asarray(ours[:real])[order], reference.pooler_output)
