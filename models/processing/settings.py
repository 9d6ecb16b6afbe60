"""Preprocessing settings as typed values, read from and written to Hugging Face's JSON files.

Defaults are those of transformers 5.23 (`Qwen2VLImageProcessor`, `Qwen2VLVideoProcessor`), but videos without a rate in
the checkpoint are sampled at 2 frames a second, as in the authors' `qwen-vl-utils`.
"""

import dataclasses
import pathlib

from ..config import JsonObject, PatchLayout
from ..folder import read_json, write_json

HALF = (0.5, 0.5, 0.5)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
BICUBIC = 3  # a member of `PIL.Image.Resampling`; videos have no other resampling


@dataclasses.dataclass(frozen=True)
class PixelSettings:
    """Resizing and normalisation. `min_pixels` and `max_pixels` bound the area of one frame. For videos of a timed
    layout (`PatchLayout.timed`), both bound the area of all frames together."""

    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    rescale_factor: float = 1 / 255
    resample: int = BICUBIC  # a `PIL.Image.Resampling` value

    def __post_init__(self) -> None:
        # transformers allows min_pixels above max_pixels, and applies the upper bound first
        if min(self.min_pixels, self.max_pixels) < 1:
            raise ValueError(f"min_pixels and max_pixels must be positive, got {self.min_pixels}, {self.max_pixels}")
        if len(self.mean) != 3 or len(self.std) != 3 or 0.0 in self.std:
            raise ValueError(f"mean and std need three numbers, std none of them 0, got {self.mean} and {self.std}")


@dataclasses.dataclass(frozen=True)
class FrameSettings:
    """The choice of a video's frames: `num_frames` spread evenly, else `fps` a second, else all. `max_video_tokens` > 0
    caps the pixels of a frame, so that all frames of a video have at most 90 % of the pixels of `max_video_tokens`
    tokens. In a timed layout (`PatchLayout.timed`), each frame has at most the pixels of `max_video_tokens` tokens."""

    num_frames: int = 0
    fps: float | int = 2
    min_frames: int = 4  # bounds for `fps`
    max_frames: int = 768
    max_video_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class DecodeLimits:
    """The largest images and videos that are decoded. A small file can hold a huge picture."""

    pixels: int = 2**26  # pixels of an image or a video frame before resizing: 8192 x 8192
    frames: int = 2**20  # frames of a video: 9.7 hours at 30 a second


VIDEO_PIXELS = PixelSettings(min_pixels=128 * 28 * 28, max_pixels=28 * 28 * 768)
TIMED_VIDEO_PIXELS = PixelSettings(min_pixels=128 * 32 * 32, max_pixels=32 * 32 * 768, mean=HALF, std=HALF)
TIMED_LAYOUT = PatchLayout(patch_size=16, window_size=0)
PROCESSORS = {  # names of transformers' classes for prompts and for videos, by whether the layout is timed
    False: ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    True: ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
}


def read_pixels(config: JsonObject, default: PixelSettings) -> PixelSettings:
    """The settings in a `preprocessor_config.json`. Raises ValueError for a step that is switched off, and for a `size`
    that does not bound pixels."""
    for step in STEPS:
        if config.get(step, True) is False:
            raise ValueError(f"{step}=false is not supported")
    said = {name: value for name, value in config.items() if value is not None}  # 0 is a setting, too
    size = said["size"] if isinstance(said.get("size"), dict) else {}
    # the older names min_pixels and max_pixels win over `size`, as in transformers
    low = said.get("min_pixels", size.get("min_pixels", size.get("shortest_edge")))
    high = said.get("max_pixels", size.get("max_pixels", size.get("longest_edge")))
    if said.get("size") and None in (low, high):
        raise ValueError(f"size must bound pixels by shortest_edge and longest_edge, not {said['size']}")
    return PixelSettings(
        min_pixels=int(default.min_pixels if low is None else low),
        max_pixels=int(default.max_pixels if high is None else high),
        mean=tuple(float(v) for v in said.get("image_mean", default.mean)),
        std=tuple(float(v) for v in said.get("image_std", default.std)),
        rescale_factor=float(said.get("rescale_factor", default.rescale_factor)),
        resample=int(said.get("resample", default.resample)),
    )


def read_frames(config: JsonObject, *, timed: bool = False) -> FrameSettings:
    """The settings in a video processor's dictionary; `timed` says whether its layout is timed."""
    tokens = 768 if timed else 128000
    num_frames = 0 if config.get("do_sample_frames") is False else int(config.get("num_frames") or 0)
    return FrameSettings(
        num_frames=num_frames,
        fps=0 if num_frames or config.get("do_sample_frames") is False else config.get("fps") or 2,
        min_frames=int(config.get("min_frames") or 4),
        max_frames=int(config.get("max_frames") or 768),
        max_video_tokens=int(config.get("max_video_tokens") or tokens) if config.get("cap_pixels_per_frame") else 0,
    )


def read_layout(config: JsonObject, default: PatchLayout) -> PatchLayout:
    """The layout in an image processor's dictionary; `default` supplies missing values."""
    return PatchLayout(
        patch_size=int(config.get("patch_size") or default.patch_size),
        temporal_patch_size=int(config.get("temporal_patch_size") or default.temporal_patch_size),
        spatial_merge_size=int(config.get("merge_size") or default.spatial_merge_size),
        window_size=int(default.window_size if (size := config.get("window_size")) is None else size),
        tokens_per_second=config.get("tokens_per_second") or default.tokens_per_second,
    )


def read_configs(folder: pathlib.Path) -> tuple[JsonObject, JsonObject]:
    """The image and the video processor's dictionaries of a checkpoint folder, found as transformers finds them."""
    joint = read_json(folder / "processor_config.json")
    single = read_json(folder / "preprocessor_config.json")
    image = joint.get("image_processor") or single
    video = joint.get("video_processor") or read_json(folder / "video_preprocessor_config.json") or single
    return image, video


def write_configs(
    folder: pathlib.Path, layout: PatchLayout, image: PixelSettings, video: PixelSettings, frames: FrameSettings
) -> None:
    """Writes `preprocessor_config.json` and `video_preprocessor_config.json`, readable by transformers too."""

    def common(pixels: PixelSettings) -> dict[str, object]:
        return {
            **dict.fromkeys(STEPS, True),
            "size": {"shortest_edge": pixels.min_pixels, "longest_edge": pixels.max_pixels},
            "image_mean": list(pixels.mean),
            "image_std": list(pixels.std),
            "rescale_factor": pixels.rescale_factor,
            "resample": pixels.resample,
            "patch_size": layout.patch_size,
            "temporal_patch_size": layout.temporal_patch_size,
            "merge_size": layout.spatial_merge_size,
        }

    processor, video_processor = PROCESSORS[layout.timed]
    image_config = common(image) | {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": processor,
        # read if the folder has no config.json
        "window_size": layout.window_size,
        "tokens_per_second": layout.tokens_per_second,
    }
    sampling: dict[str, object] = {"num_frames": frames.num_frames} if frames.num_frames else {"fps": frames.fps}
    if frames.num_frames and layout.timed:
        sampling["fps"] = None  # else transformers' class adds its default rate, and refuses a rate beside `num_frames`
    video_config = common(video) | {
        "video_processor_type": video_processor,
        "processor_class": processor,
        "do_sample_frames": bool(frames.num_frames or frames.fps),
        "min_frames": frames.min_frames,
        "max_frames": frames.max_frames,
        "cap_pixels_per_frame": frames.max_video_tokens > 0,
        **({"max_video_tokens": frames.max_video_tokens} if frames.max_video_tokens else {}),
        **sampling,
    }
    write_json(folder / "preprocessor_config.json", image_config)
    write_json(folder / "video_preprocessor_config.json", video_config)
