"""Rotary positions of a prompt with images and videos (M-RoPE), in numpy on the host.

Text advances all three axes together. A medium spreads over (time, row, column); its time axis runs in
`tokens_per_second` ticks for a video and stands still for an image. The text behind a medium continues from the
medium's larger *spatial* side, even where a long video's time axis reaches further: that is how the checkpoints
were trained (transformers 5.23, `Qwen2_5_VLModel.get_rope_index`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Grid = tuple[int, int, int]  # frame pairs, patch rows, patch columns


def rope_index(
    token_ids_T: np.ndarray,
    image_grids: Sequence[Grid] = (),
    video_grids: Sequence[Grid] = (),
    seconds_per_grid: Sequence[float] = (),
    *,
    image_token_id: int,
    video_token_id: int,
    spatial_merge_size: int,
    tokens_per_second: float | int,
) -> tuple[np.ndarray, int]:
    """Positions `[3, T]` (time, row, column; i32) and the position of the first generated token.

    `token_ids_T` has its media placeholders expanded: one run of `image_token_id` or `video_token_id` for each grid.
    `seconds_per_grid` is the time that one frame pair of each video spans.
    Raises ValueError where the runs and the grids do not match.
    """
    token_ids_T = np.asarray(token_ids_T)
    if len(seconds_per_grid) != len(video_grids):
        raise ValueError(f"{len(video_grids)} videos, but {len(seconds_per_grid)} times a frame pair")
    is_image, is_video = token_ids_T == image_token_id, token_ids_T == video_token_id
    kind_T = is_image.astype(np.int8) + 2 * is_video.astype(np.int8)
    starts = np.flatnonzero(np.diff(kind_T, prepend=-1))
    stops = np.append(starts[1:], len(token_ids_T))

    positions_3T = np.empty((3, len(token_ids_T)), np.int32)
    images, videos = iter(image_grids), iter(zip(video_grids, seconds_per_grid, strict=True))
    position, done = 0, 0
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        if kind_T[start] == 0:
            positions_3T[:, start:stop] = np.arange(position, position + stop - start, dtype=np.int32)
            position += stop - start
            continue
        if kind_T[start] == 1:
            grid, tick = next(images, None), np.float32(1)
        else:
            grid, seconds = next(videos, (None, 0.0))
            # float32, as transformers computes it: truncation below would otherwise differ at whole ticks
            tick = np.float32(tokens_per_second) * np.float32(seconds)
        shape = None if grid is None else (grid[0], grid[1] // spatial_merge_size, grid[2] // spatial_merge_size)
        if shape is None or int(np.prod(shape)) != stop - start:
            raise ValueError(f"{stop - start} placeholders at token {start} do not match the medium's grid {grid}")
        time, row, column = np.indices(shape, dtype=np.int32).reshape(3, -1)
        positions_3T[0, start:stop] = position + (time.astype(np.float32) * tick).astype(np.int32)
        positions_3T[1, start:stop] = position + row
        positions_3T[2, start:stop] = position + column
        position += max(shape[1], shape[2])
        done += 1
    if done != len(image_grids) + len(video_grids):
        raise ValueError(f"{len(image_grids) + len(video_grids)} media, but placeholders for {done}")
    return positions_3T, int(positions_3T.max(initial=-1)) + 1
