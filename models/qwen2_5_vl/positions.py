"""The rotary positions of a prompt with images and videos (M-RoPE), in numpy on the host.

Text advances all three axes together. A medium extends over (time, row, column). The time axis advances by
`tokens_per_second` for each second of a video, and stands still for an image. Text behind a medium begins at 1 plus
the largest position of all three axes, so that a long video's time axis counts. The authors' own code does so
(transformers pull request 35569), and so do SGLang, vLLM and transformers up to 5.2. From 5.3 on, transformers'
`get_rope_index` counts only rows and columns inside a prompt, but starts the answer behind all three axes.
"""

from collections.abc import Sequence

import numpy as np

from ..config import Grid


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
    first_position: int = 0,
) -> tuple[np.ndarray, int]:
    """Positions `[3, T]` (time, row, column; i32) from `first_position` on, and the position of the first generated
    token. `token_ids_T` has a run of `image_token_id` or `video_token_id` for each grid. `seconds_per_grid` has the
    seconds that one frame pair of each video spans. Raises ValueError if runs and grids do not match."""
    token_ids_T = np.asarray(token_ids_T)
    if len(seconds_per_grid) != len(video_grids):
        raise ValueError(f"there are {len(video_grids)} videos, but {len(seconds_per_grid)} values of seconds_per_grid")
    is_image, is_video = token_ids_T == image_token_id, token_ids_T == video_token_id
    kind_T = is_image.astype(np.int8) + 2 * is_video.astype(np.int8)
    starts = np.flatnonzero(np.diff(kind_T, prepend=-1))
    stops = np.append(starts[1:], len(token_ids_T))

    positions_3T = np.empty((3, len(token_ids_T)), np.int32)
    images, videos = iter(image_grids), iter(zip(video_grids, seconds_per_grid, strict=True))
    position, done = first_position, 0
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        if kind_T[start] == 0:
            positions_3T[:, start:stop] = np.arange(position, position + stop - start, dtype=np.int32)
            position += stop - start
            continue
        grid, seconds = (next(images, None), 0.0) if kind_T[start] == 1 else next(videos, (None, 0.0))
        shape = None if grid is None else (grid[0], grid[1] // spatial_merge_size, grid[2] // spatial_merge_size)
        if shape is None or int(np.prod(shape)) != stop - start:
            raise ValueError(f"{stop - start} placeholders at token {start} do not match the medium's grid {grid}")
        time, row, column = np.indices(shape, dtype=np.int32).reshape(3, -1)
        # float32, in the authors' order of factors: truncation would otherwise differ at whole ticks
        ticks = time.astype(np.float32) * np.float32(seconds) * np.float32(tokens_per_second)
        positions_3T[0, start:stop] = position + ticks.astype(np.int32)
        positions_3T[1, start:stop] = position + row
        positions_3T[2, start:stop] = position + column
        position = int(positions_3T[:, start:stop].max()) + 1
        done += 1
    if done != len(image_grids) + len(video_grids):
        raise ValueError(f"there are {len(image_grids) + len(video_grids)} media, but placeholders for {done} media")
    return positions_3T, position
