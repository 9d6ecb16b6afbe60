"""Turns a medium, or some of its frame pairs, into patches, which depend only on its file and `MediaSettings`.

Patches of one medium stand in window order. Windows never cross a frame pair, so that frame pair `k` of a medium of the
grid `(pairs, rows, columns)` begins at patch `k * rows * columns`. A prompt has the patches of its media, one medium
after another. Patches are bytes until they are normalised, since floats would take four times the memory.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Sequence

import numpy as np

from ..config import Grid, JsonObject, PatchLayout
from .containers import check_size
from .images import image_facts, load_image, resized, target_size
from .media_file import Facts, MediaError, Medium, Source, opened, source_name
from .patches import arrange, normalise, patchify
from .settings import VIDEO_PIXELS, DecodeLimits, FrameSettings, PixelSettings
from .video_slices import VideoSlicer
from .videos import VideoReader, pair_times, sample_indices, seconds_per_grid, too_many_frames, video_facts, video_size

PAIRS_AT_ONCE = 2  # frame pairs that are put into window order at once


@dataclasses.dataclass(frozen=True)
class MediaSettings:
    """Bounds of sizes, choice of frames, and normalisation. Immutable."""

    layout: PatchLayout = dataclasses.field(default_factory=PatchLayout)
    image: PixelSettings = dataclasses.field(default_factory=PixelSettings)
    video: PixelSettings = VIDEO_PIXELS
    frames: FrameSettings = dataclasses.field(default_factory=FrameSettings)
    limits: DecodeLimits = dataclasses.field(default_factory=DecodeLimits)

    def to_json(self) -> JsonObject:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: JsonObject) -> "MediaSettings":
        """Reads the settings that `to_json` wrote. Raises TypeError or ValueError for anything else."""

        def pixels(values: JsonObject) -> PixelSettings:
            return PixelSettings(**{**values, "mean": tuple(values["mean"]), "std": tuple(values["std"])})

        return cls(
            PatchLayout(**fields["layout"]),
            pixels(fields["image"]),
            pixels(fields["video"]),
            FrameSettings(**fields["frames"]),
            DecodeLimits(**fields["limits"]),
        )

    @functools.cached_property
    def digest(self) -> str:
        """A name of the settings. Settings with the same digest turn every file into the same patches."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def patch_bytes(self) -> int:
        """The number of values of a patch, each of which is a byte before it is normalised."""
        return 3 * self.layout.temporal_patch_size * self.layout.patch_size**2

    def facts(self, kind: str, source: Source, *, count: bool = False) -> Facts:
        """The facts of a medium, by its header; `count` reads all packets of a video, without decoding them. Raises
        MediaError if the header or the packets show that the file can't be used."""
        return image_facts(source, self.limits) if kind == "image" else video_facts(source, self.limits, count=count)

    def medium_of(self, kind: str, name: str, facts: Facts) -> Medium:
        """The medium that has these facts. Raises MediaError, with this name, for a medium that can't be used. If facts
        are not counted, a count of the frames may show that it can be used after all."""
        layout, patch = self.layout, self.layout.temporal_patch_size
        check_size(facts.width, facts.height, name, self.limits)
        if kind == "image":
            height, width = target_size(name, facts.width, facts.height, layout.factor, self.image)
            return Medium(kind, (1, height // layout.patch_size, width // layout.patch_size))
        if facts.frames > self.limits.frames:
            raise too_many_frames(name, self.limits)
        try:
            indices = sample_indices(facts.frames, facts.seconds, self.frames, patch, timed=layout.timed)
        except ValueError as error:
            raise MediaError(name, str(error)) from None
        count = len(indices)
        height, width = video_size(name, facts.width, facts.height, count, layout, self.video, self.frames)
        grid = (-(-count // patch), height // layout.patch_size, width // layout.patch_size)
        return self._video(grid, indices, facts.frames, facts.seconds)

    def _video(
        self, grid: Grid, indices: np.ndarray, total: int, seconds: float | None, seekable: bool = False
    ) -> Medium:
        """The video, if the frames of `indices` were sampled among `total` frames that last `seconds`."""
        patch = self.layout.temporal_patch_size
        times = pair_times(indices, total, seconds, patch) if self.layout.timed else ()
        return Medium("video", grid, seconds_per_grid(seconds, len(indices), patch), seekable, times)

    def glance(self, kind: str, source: Source, *, count: bool = False) -> tuple[Medium, bool]:
        """Returns (the medium, whether it is certain: the number of frames is not a header's). With `count`, or if the
        header shows no usable medium, all packets of a video are read, without decoding. Raises MediaError."""
        facts = self.facts(kind, source, count=count)
        found = self.medium_by(kind, source_name(source), facts)
        return found or (self.medium_of(kind, source_name(source), self.facts(kind, source, count=True)), True)

    def medium_by(self, kind: str, name: str, facts: Facts) -> tuple[Medium, bool] | None:
        """As `glance`, from known facts; None if only a count of the frames can show whether the file can be used."""
        try:
            return self.medium_of(kind, name, facts), facts.counted
        except MediaError:
            if facts.counted:
                raise
            return None

    def load(self, kind: str, source: Source) -> tuple[Medium, np.ndarray]:
        """A medium and its patches `[P, 3, n]` (uint8) in window order. Raises MediaError."""
        if kind == "image":
            picture, name = load_image(source, self.limits), source_name(source)
            height, width = target_size(name, picture.width, picture.height, self.layout.factor, self.image)
            patches, grid = self._patches([resized(picture, height, width, self.image.resample)])
            return Medium(kind, grid), patches
        patch = self.layout.temporal_patch_size
        patches, grid = np.empty((0, 0, 0), np.uint8), (0, 0, 0)
        frames: list[np.ndarray] = []

        def keep(slot: int, count: int, pixels: np.ndarray) -> None:
            nonlocal patches, grid
            if slot == 0:  # again, if the header was wrong about the frames
                frames.clear()
            frames.append(pixels)
            last = slot + 1
            if last % (PAIRS_AT_ONCE * patch) and last < count:
                return
            first = (last - len(frames)) // patch
            part, (_, rows, columns) = self._patches(frames)
            frames.clear()
            if first == 0:
                grid = (-(-count // patch), rows, columns)
                patches = np.empty((math.prod(grid), *part.shape[1:]), np.uint8)
            patches[first * rows * columns :][: len(part)] = part

        with opened(source) as file:
            sampling = VideoReader(file, source_name(source), *self._of_videos).read(keep)
        return self._video(grid, sampling.indices, sampling.total, sampling.seconds, sampling.seekable), patches

    def load_pairs(self, source: Source, medium: Medium, first: int, last: int) -> np.ndarray:
        """The patches `[P, 3, n]` (uint8) of the frame pairs `first .. last - 1` of a medium that `load` has returned.
        Only the necessary part of a video is decoded, if the result is the same (`video_slices.py`). Raises MediaError
        if the file has changed since `load`, and ValueError for pairs that do not exist."""
        pairs, rows, columns = medium.grid
        if not 0 <= first <= last <= pairs:
            raise ValueError(f"frame pairs {first} to {last} were asked for, but there are {pairs}")
        if first == last:
            return np.empty((0, 3, self.patch_bytes // 3), np.uint8)
        if medium.seekable and (first, last) != (0, pairs):
            with opened(source) as file:
                part = VideoSlicer(file, source_name(source), *self._of_videos, medium).slice(range(first, last))
            if part is not None:
                return self._patches(part.frames)[0]
        found, patches = self.load(medium.kind, source)
        if found != medium:
            raise MediaError(source_name(source), "has changed since it was preprocessed")
        return patches[first * rows * columns : last * rows * columns]

    @property
    def _of_videos(self) -> tuple[PatchLayout, PixelSettings, FrameSettings, DecodeLimits]:
        return self.layout, self.video, self.frames, self.limits

    def _patches(self, frames: Sequence[np.ndarray] | np.ndarray) -> tuple[np.ndarray, Grid]:
        """The patches of frames of one size, in window order, and their grid."""
        patches, grid = patchify(np.asarray(frames), self.layout)
        return arrange([grid], self.layout).packed(patches), grid

    def normalised(self, kind: str, patches: np.ndarray) -> np.ndarray:
        """Patches `[P, X]` (float32), as models read them, from patches `[P, 3, n]` (uint8)."""
        return normalise(patches, self.video if kind == "video" else self.image, fused=kind == "video")
