"""Images to patches, bit for bit those of `Qwen2VLImageProcessorPil` (transformers 5.23).

That class is transformers' portable image processor; the other one, `Qwen2VLImageProcessor`, needs torchvision,
which no test environment here has. They differ in the resampler's last bits by their own design.
"""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from media_files import parity
from PIL import Image
from turns import third_of

from models.processing.images import load_image, resized, smart_resize, target_size
from models.processing.patches import normalise, patchify
from models.processing.settings import PatchLayout, PixelSettings, read_pixels

THEIRS = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"


def patches_of(path, layout, pixels):
    picture = load_image(str(path))
    height, width = target_size(str(path), picture.width, picture.height, layout.factor, pixels)
    patches, grid = patchify(resized(picture, height, width, pixels.resample)[None], layout)
    return normalise(patches, pixels, fused=False), grid


def expected_of(path, layout, pixels):
    processor = parity(THEIRS).Qwen2VLImageProcessorPil(
        size={"shortest_edge": pixels.min_pixels, "longest_edge": pixels.max_pixels},
        patch_size=layout.patch_size,
        temporal_patch_size=layout.temporal_patch_size,
        merge_size=layout.spatial_merge_size,
        image_mean=list(pixels.mean),
        image_std=list(pixels.std),
        rescale_factor=pixels.rescale_factor,
        resample=pixels.resample,
    )
    with Image.open(path) as image:
        out = processor(images=[image], return_tensors="np")
    return out["pixel_values"], tuple(out["image_grid_thw"][0].tolist())


@pytest.mark.parametrize("name", ["1.jpg", "2.jpg"])
@pytest.mark.parametrize(
    ("layout", "pixels"),
    [
        (PatchLayout(), PixelSettings()),
        (PatchLayout(), PixelSettings(min_pixels=300 * 300, max_pixels=500 * 500)),  # enlarged
        (PatchLayout(), PixelSettings(max_pixels=100 * 100)),  # shrunk
        (PatchLayout(patch_size=8, temporal_patch_size=3, spatial_merge_size=4), PixelSettings(max_pixels=64 * 64)),
        (PatchLayout(), PixelSettings(mean=(0.5, 0.4, 0.3), std=(0.5, 0.6, 0.7), resample=2, rescale_factor=1 / 127)),
    ],
)
def test_real_photographs_equal_transformers(shared, name, layout, pixels):
    path = shared / "data" / "media" / name
    expected, grid = expected_of(path, layout, pixels)
    patches, own_grid = patches_of(path, layout, pixels)
    assert own_grid == grid
    assert patches.dtype == np.float32
    np.testing.assert_array_equal(patches, expected)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1", "CMYK", "YCbCr", "P transparent", "RGB keyed"])
def test_every_colour_mode_equals_transformers(tmp_path, mode):
    rng = np.random.default_rng(1)
    base = Image.fromarray(rng.integers(0, 256, (40, 60, 4), dtype=np.uint8), "RGBA")
    path = tmp_path / ("a.jpg" if mode in ("CMYK", "YCbCr") else "a.png")
    options: dict[str, Any] = {}
    if mode == "P transparent":
        image, options = base.convert("RGB").quantize(16), {"transparency": 3}
    elif mode == "RGB keyed":
        image, options = base.convert("RGB"), {"transparency": base.convert("RGB").getpixel((0, 0))}
    else:
        image = base.convert("RGB").quantize(16) if mode == "P" else base.convert(mode)
    image.save(path, **options)
    expected, grid = expected_of(path, PatchLayout(), PixelSettings())
    patches, own_grid = patches_of(path, PatchLayout(), PixelSettings())
    assert own_grid == grid
    np.testing.assert_array_equal(patches, expected)


@pytest.mark.parametrize("resample", range(6))
def test_every_way_to_resample_equals_transformers(tmp_path, resample):
    rng = np.random.default_rng(2)
    Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    pixels = read_pixels({"resample": resample}, PixelSettings())
    assert pixels.resample == resample
    expected, _ = expected_of(tmp_path / "a.png", PatchLayout(), pixels)
    np.testing.assert_array_equal(patches_of(tmp_path / "a.png", PatchLayout(), pixels)[0], expected)


@pytest.mark.parametrize("most", [255, 256, 4095, 65535])
def test_grey_values_of_a_portable_map_are_shown_in_eight_bits(tmp_path, most):
    share = np.linspace(0, 1, 24).reshape(4, 6)
    values = np.round(share * most).astype(">u2" if most > 255 else np.uint8)
    (tmp_path / "a.pgm").write_bytes(b"P5 6 4 %d\n" % most + values.tobytes())
    shown = np.asarray(load_image(str(tmp_path / "a.pgm")))
    assert (shown == shown[..., :1]).all()
    np.testing.assert_allclose(shown[..., 0], share * 255, atol=1)


sides = st.integers(1, 5000)


@settings(max_examples=third_of(300), deadline=None)
@given(
    height=sides,
    width=sides,
    factor=st.sampled_from([8, 16, 28, 32]),
    low=st.integers(1, 200_000),
    ratio=st.floats(0.2, 50.0),
)
def test_smart_resize_equals_transformers(height, width, factor, low, ratio):
    module = parity(THEIRS)
    high = int(low * ratio)
    assume(high >= factor * factor)
    try:
        expected = module.smart_resize(height, width, factor, low, high)
    except ValueError:
        with pytest.raises(ValueError, match="aspect ratio"):
            smart_resize(height, width, factor, low, high)
        return
    assert smart_resize(height, width, factor, low, high) == expected


def test_rescaling_by_division_is_the_product_for_every_byte():
    """`normalise` divides by 255 in float32 where transformers multiplies by 1/255 in float64 and rounds."""
    values = np.arange(256)
    product = (values.astype(np.float64) * (1 / 255)).astype(np.float32)
    np.testing.assert_array_equal(values.astype(np.float32) / np.float32(255), product)


def test_settings_are_read_as_transformers_reads_them():
    assert read_pixels({}, PixelSettings()) == PixelSettings()
    published = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14}
    assert read_pixels(published, PixelSettings()).max_pixels == 12845056
    both = {"min_pixels": 100, "size": {"shortest_edge": 200, "longest_edge": 300}}
    assert read_pixels(both, PixelSettings()) == PixelSettings(min_pixels=100, max_pixels=300)
    with pytest.raises(ValueError, match="do_resize=false"):
        read_pixels(json.loads('{"do_resize": false}'), PixelSettings())
    for wrong in ({"min_pixels": 0}, {"size": {"shortest_edge": 0, "longest_edge": 300}}):
        with pytest.raises(ValueError, match="must be positive"):
            read_pixels(wrong, PixelSettings())
    for size in ({"height": 224, "width": 224}, {"shortest_edge": 224}, {"longest_edge": 224}, 224, [224, 224]):
        with pytest.raises(ValueError, match="size must bound pixels by shortest_edge and longest_edge, not "):
            read_pixels({"size": size}, PixelSettings())
    assert read_pixels({"size": {"shortest_edge": 200}, "max_pixels": 300}, PixelSettings()).max_pixels == 300
    nothing: dict[str, Any] = dict.fromkeys(
        ("size", "resample", "image_mean", "image_std", "rescale_factor", "min_pixels")
    )
    assert read_pixels(nothing, PixelSettings()) == PixelSettings()
    with pytest.raises(ValueError, match="std none of them 0"):
        PixelSettings(std=(1.0, 0.0, 1.0))
