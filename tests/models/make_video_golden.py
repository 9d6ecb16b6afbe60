"""Writes goldens/video_processor.json with transformers' own `Qwen2VLVideoProcessor`.

Needs torchvision, which the test environment has not; the committed file was made with transformers 5.23.0,
torch 2.13.0 and torchvision 0.28.0: `python tests/models/make_video_golden.py`.
"""

import hashlib
import json
import pathlib

from media_files import moving_frames

GOLDEN = pathlib.Path(__file__).parent / "goldens" / "video_processor.json"
SETTINGS = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 24 * 32},
}
PIXELS = [{"num_frames": 6}, {"fps": 2}, {}]  # {}: every frame
SAMPLING = [
    (243, 25.0, {"fps": 2}),
    (270, 359 / 12, {"fps": 2}),
    (901, 30.0, {"fps": 1}),
    (5, 30.0, {"fps": 2}),
    (3, 1.0, {"fps": 2}),
    (4000, 10.0, {"fps": 2}),
    (100, 25.0, {"num_frames": 7}),
    (100, 25.0, {"num_frames": 5}),
    (17, 25.0, {"num_frames": 16}),
    (9, 12.0, {"num_frames": 3}),
]


def main() -> None:
    from transformers import Qwen2VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    processor = Qwen2VLVideoProcessor(**SETTINGS)
    pixels = []
    for setting in PIXELS:
        out = processor(
            videos=[moving_frames(7, 30, 44)],
            video_metadata=[VideoMetadata(total_num_frames=7, fps=2.0, duration=3.5)],
            do_sample_frames=bool(setting),
            cap_pixels_per_frame=False,
            return_tensors="pt",
            **setting,
        )
        digest = hashlib.sha256(out["pixel_values_videos"].numpy().tobytes()).hexdigest()
        pixels.append({"setting": setting, "grid": out["video_grid_thw"][0].tolist(), "sha256": digest})
    sampling = []
    for total, fps, setting in SAMPLING:
        metadata = VideoMetadata(total_num_frames=total, fps=fps)
        indices = processor.sample_frames(metadata=metadata, temporal_patch_size=2, **setting).tolist()
        sampling.append({"total": total, "fps": fps, "setting": setting, "indices": indices})
    GOLDEN.write_text(json.dumps({"pixels": pixels, "sampling": sampling}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
