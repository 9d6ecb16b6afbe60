"""The Triton kernel that `paged` launches: attention over pages for one new token of each sequence.

A program computes the query heads of one KV head over one part of one sequence. The part has tiles of `KEYS` entries
(tokens of the cache), whose pages `pages` names. Products accumulate in float32. The running softmax is to base 2.

Arrays are dense: q `[B, N, H]`; k and v `[L, C, K, PAGE, H]`; pages `[B, width]` and length, part_tiles `[B]` int32;
sums `[B, parts, N, H]`, totals and peaks `[B, parts, N]` float32.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

MASKED = tl.constexpr(-1e30)  # the score of an entry after the sequence's end
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    q, k, v, pages, length, part_tiles, first_page, C, width, sums, totals, peaks,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The grid is KV heads, parts, sequences. `first_page` is the number of the layer's first page. A part without
    entries is not written."""
    kv_head, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entries, tiles = tl.load(length + row), tl.load(part_tiles + row)
    first = part * tiles
    last = tl.minimum(first + tiles, tl.cdiv(entries, KEYS))
    if first >= last:
        return
    group, column = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    head, inside = kv_head * (N // K) + group, column < H
    real = group < N // K
    places = (row * N + head)[:, None] * H + column[None, :]
    queries = tl.load(q + places, mask=real[:, None] & inside[None, :], other=0.0)
    pages += row * width
    total = tl.zeros((HEADS,), tl.float32)
    peak = tl.full((HEADS,), MASKED, tl.float32)
    out = tl.zeros((HEADS, WIDTH), tl.float32)
    for tile in range(first, last):
        entry = tile * KEYS + tl.arange(0, KEYS)
        known = entry < entries
        page = tl.load(pages + entry // PAGE, mask=known, other=0)
        page = first_page + tl.minimum(page, C - 1)
        start = ((page.to(tl.int64) * K + kv_head) * PAGE + entry % PAGE) * H
        offsets, mask = start[:, None] + column[None, :], known[:, None] & inside[None, :]
        keys = tl.load(k + offsets, mask=mask, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (SCALE * LOG2E)
        scores = tl.where(known[None, :], scores, MASKED)
        new = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        fade = tl.exp2(peak - new)
        values = tl.load(v + offsets, mask=mask, other=0.0)
        out = tl.dot(weights.to(values.dtype), values, out * fade[:, None], input_precision=PRECISION)
        total = total * fade + tl.sum(weights, 1)
        peak = new
    number = (row * tl.num_programs(1) + part) * N + head
    tl.store(totals + number, total, mask=real)
    tl.store(peaks + number, peak, mask=real)
    tl.store(sums + number.to(tl.int64)[:, None] * H + column[None, :], out, mask=real[:, None] & inside[None, :])
