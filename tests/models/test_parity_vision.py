"""The vision tower equals its counterpart in `transformers`, 1e-4 absolute in float32.

`pytest -rP` shows the largest error of each comparison.
"""

import dataclasses

import jax
import numpy as np
import pytest
from hf_reference import TOLERANCE, Pair, build_vl, torch, worst

from models.processing.vision_input import pack_patches, pad
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
