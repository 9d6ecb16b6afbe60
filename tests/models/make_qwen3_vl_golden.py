"""Writes goldens/qwen3_vl_processor.json with transformers' own `Qwen3VLProcessor`: prompts with images and videos.

Needs torchvision, which the test environment has not; the committed file was made with transformers 5.24.0,
torch 2.13.0 and torchvision 0.28.0: `python tests/models/make_qwen3_vl_golden.py`.
"""

import hashlib
import json
import pathlib
import tempfile
from typing import Any

from media_files import moving_frames
from PIL import Image

from models.config import PatchLayout
from models.processing import tiny

GOLDEN = pathlib.Path(__file__).parent / "goldens" / "qwen3_vl_processor.json"
LAYOUT = PatchLayout(patch_size=4, window_size=0)
TEXTS = ["What moves? abc.,:\n"]
PIXELS: dict[str, Any] = {
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
IMAGES: dict[str, Any] = {**PIXELS, "size": {"shortest_edge": 16 * 16, "longest_edge": 40 * 32}}
VIDEOS: dict[str, Any] = {
    **PIXELS,
    "size": {"shortest_edge": 4 * 16 * 16, "longest_edge": 9 * 24 * 32},
    "do_sample_frames": True,
}
# (text, media as (frames, height, width, frames a second), where one frame is an image, settings of videos)
PROMPTS: list[tuple[str, list[tuple[int, int, int, int]], dict[str, Any]]] = [
    ("What: <video>moves?", [(11, 30, 44, 4)], {}),
    ("<image>a <video>b<image>", [(1, 20, 30, 0), (8, 40, 18, 10), (1, 64, 50, 0)], {"num_frames": 5, "fps": None}),
    ("<video><video>?", [(3, 30, 44, 1), (60, 18, 26, 25)], {"cap_pixels_per_frame": True, "max_video_tokens": 6}),
    ("a<video>", [(13, 5, 7, 3)], {"fps": 1.5}),
    ("<video>", [(40, 48, 64, 30)], {"fps": 24, "max_frames": 21}),
    ("<video>.", [(9, 24, 32, 8)], {"do_sample_frames": False}),
]


def main() -> None:
    from transformers import AutoTokenizer, Qwen3VLProcessor, Qwen3VLVideoProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.video_utils import VideoMetadata

    with tempfile.TemporaryDirectory() as folder:
        tiny.build(TEXTS, layout=LAYOUT).save(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    cases = []
    for text, media, settings in PROMPTS:
        videos = Qwen3VLVideoProcessor(**VIDEOS | settings)
        processor: Any = Qwen3VLProcessor(Qwen2VLImageProcessorPil(**IMAGES), tokenizer, videos)
        frames = [moving_frames(count, *size, seed=seed) for seed, (count, *size, _) in enumerate(media)]
        given = {
            "images": [Image.fromarray(part[0]) for part in frames if len(part) == 1],
            "videos": [part for part in frames if len(part) > 1],
            "video_metadata": [
                VideoMetadata(
                    total_num_frames=count, fps=float(fps), duration=count / fps, frames_indices=[*range(count)]
                )
                for count, *_, fps in media
                if count > 1
            ],
        }
        for kind in ("image", "video"):
            text = text.replace(f"<{kind}>", f"<|vision_start|><|{kind}_pad|><|vision_end|>")
        out = processor(text=[text], **{name: values for name, values in given.items() if values}, return_tensors="np")
        case = {"ids": out["input_ids"][0].tolist()}
        for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if name in out:
                case[kind] = {
                    "grids": out[f"{kind}_grid_thw"].tolist(),
                    "sha256": hashlib.sha256(out[name].tobytes()).hexdigest(),
                }
        cases.append(case)
    GOLDEN.write_text(json.dumps(cases, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
