"""The Triton kernels of attention over packed rows, which `flash` launches.

A program of a kernel computes one tile of queries (or keys) of one head of one row. The program visits the tiles of
keys (or queries) of a list. First come the tiles that need the mask, then the tiles in which every query reaches every
key. Products accumulate in float32. The softmax is FlashAttention-2's running softmax (arXiv:2307.08691), to base 2.
Gradients are sums in a fixed order, so that equal inputs give equal bits.

Arrays are dense: q, out, dout, dq `[B, T, N, H]`; k, v, dk, dv `[B, T, K, H]`; lse and slope `[B, N, T]` float32;
segments and branches `[B, filled]` int32, whose T tokens are filled up to full tiles with segment 0. The lists of tiles
`visits` are `[B, tiles, width]` int32. `counts` `[B, tiles, 2]` has the number of listed tiles that need the mask, and
the number of all listed tiles. In `forward`, q, out and lse lack the first AHEAD tokens of a row.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

MASKED = tl.constexpr(-1e30)  # the score of a key that the query does not reach
FLOOR = tl.constexpr(-1e20)  # the least running maximum: if a query reaches no key, all its weights are 0
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _start(row, T, index, head, HEADS: tl.constexpr, H: tl.constexpr):
    """The offset of a token's head in `[B, T, HEADS, H]`, in 64 bits, because long rows exceed 2**31 numbers."""
    return ((row.to(tl.int64) * T + index) * HEADS + head) * H


@triton.jit
def _offsets(TOKENS: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr):
    return tl.arange(0, TOKENS)[:, None] * (HEADS * H) + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _load(pointers, index, T, H: tl.constexpr, WIDTH: tl.constexpr, CHECK: tl.constexpr):
    """Loads a tile of tokens, with zeros beyond the head's size and, with `CHECK`, beyond the row's end."""
    if CHECK:
        return tl.load(pointers, mask=(index < T)[:, None] & (tl.arange(0, WIDTH) < H)[None, :], other=0.0)
    if WIDTH == H:
        return tl.load(pointers)
    return tl.load(pointers, mask=(tl.arange(0, WIDTH) < H)[None, :], other=0.0)


@triton.jit
def _store(pointers, value, index, T, H: tl.constexpr, WIDTH: tl.constexpr):
    value = value.to(pointers.dtype.element_ty)
    tl.store(pointers, value, mask=(index < T)[:, None] & (tl.arange(0, WIDTH) < H)[None, :])


@triton.jit
def _reached(query, key, q_segment, k_segment, q_branch, k_branch, CAUSAL: tl.constexpr):
    allowed = (q_segment == k_segment) & (k_segment != 0) & ((k_branch == 0) | (k_branch == q_branch))
    if CAUSAL:
        allowed = allowed & (query >= key)
    return allowed


@triton.jit
def _scores(
    q, k, segments, branches, tile, query, q_segment, q_branch, T, row, kv_head, offsets,
    K: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Loads a tile of keys. Returns the keys' indices, the offsets of the keys' numbers, the keys, and the scores."""
    start = tile * KEYS
    key = start + tl.arange(0, KEYS)
    place = _start(row, T, start, kv_head, K, H) + offsets
    keys = _load(k + place, key, T, H, WIDTH, MASK)
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    if MASK:
        k_segment, k_branch = tl.load(segments + key), tl.load(branches + key)
        allowed = _reached(
            query[:, None], key[None, :], q_segment[:, None], k_segment[None, :],
            q_branch[:, None], k_branch[None, :], CAUSAL,
        )  # fmt: skip
        scores = tl.where(allowed, scores, MASKED)
    return key, place, keys, scores


@triton.jit
def _attend(
    sums, total, peak, q, k, v, segments, branches, visits, first, last, query, q_segment, q_branch,
    T, row, kv_head, offsets, scale2: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for visit in range(first, last):
        key, place, _, scores = _scores(
            q, k, segments, branches, tl.load(visits + visit), query, q_segment, q_branch,
            T, row, kv_head, offsets, K, H, WIDTH, KEYS, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
        new = tl.maximum(peak, tl.max(scores, 1) * scale2)
        weights = tl.exp2(scores * scale2 - new[:, None])
        fade = tl.exp2(peak - new)
        values = _load(v + place, key, T, H, WIDTH, MASK)
        sums = sums * fade[:, None]
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision=PRECISION)
        total = total * fade + tl.sum(weights, 1)
        peak = new
    return sums, total, peak


@triton.jit
def forward(
    q, k, v, segments, branches, visits, counts, T, filled, width, out, lse,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """The grid is tiles of queries, query heads, rows. The last tiles, with most work under a causal mask, go first."""
    tile, head, row = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = head // (N // K)
    query = AHEAD + tile * QUERIES + tl.arange(0, QUERIES)
    places = _start(row, T - AHEAD, tile * QUERIES, head, N, H) + _offsets(QUERIES, WIDTH, N, H)
    offsets = _offsets(KEYS, WIDTH, K, H)
    queries = _load(q + places, query, T, H, WIDTH, True)
    segments += row * filled
    branches += row * filled
    q_segment, q_branch = tl.load(segments + query), tl.load(branches + query)
    listed = row * tl.num_programs(0) + tile
    visits += listed.to(tl.int64) * width
    masked, every = tl.load(counts + 2 * listed), tl.load(counts + 2 * listed + 1)
    scale2: tl.constexpr = SCALE * LOG2E  # scores become exponents of 2

    sums = tl.zeros((QUERIES, WIDTH), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    peak = tl.full((QUERIES,), FLOOR, tl.float32)
    sums, total, peak = _attend(
        sums, total, peak, queries, k, v, segments, branches, visits, 0, masked, query, q_segment, q_branch,
        T, row, kv_head, offsets, scale2, K, H, WIDTH, KEYS, CAUSAL, True, PRECISION,
    )  # fmt: skip
    sums, total, peak = _attend(
        sums, total, peak, queries, k, v, segments, branches, visits, masked, every, query, q_segment, q_branch,
        T, row, kv_head, offsets, scale2, K, H, WIDTH, KEYS, CAUSAL, False, PRECISION,
    )  # fmt: skip

    some = total > 0
    total = tl.where(some, total, 1.0)
    _store(out + places, sums / total[:, None], query, T, H, WIDTH)
    normaliser = tl.where(some, (peak + tl.log2(total)) / LOG2E, 0.0)
    numbers = (row * N + head).to(tl.int64) * (T - AHEAD) + query - AHEAD
    tl.store(lse + numbers, normaliser, mask=query < T)


@triton.jit
def _query_gradients(
    dq, q, dout, normaliser, slope, k, v, segments, branches, visits, first, last, query, q_segment, q_branch,
    T, row, kv_head, offsets, scale2: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for visit in range(first, last):
        key, place, keys, scores = _scores(
            q, k, segments, branches, tl.load(visits + visit), query, q_segment, q_branch,
            T, row, kv_head, offsets, K, H, WIDTH, KEYS, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
        values = _load(v + place, key, T, H, WIDTH, MASK)
        weights = tl.exp2(scores * scale2 - normaliser[:, None])
        dweights = tl.dot(dout, tl.trans(values), input_precision=PRECISION)
        dscores = weights * (dweights - slope[:, None])
        dq = tl.dot(dscores.to(keys.dtype), keys, dq, input_precision=PRECISION)
    return dq


@triton.jit
def query_gradients(
    q, k, v, dout, lse, slope, segments, branches, visits, counts, T, filled, width, dq,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The grid and the lists are those of `forward`. `slope` is the sum of `out * dout` over the numbers of a head."""
    tile, head, row = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = head // (N // K)
    query = tile * QUERIES + tl.arange(0, QUERIES)
    places = _start(row, T, tile * QUERIES, head, N, H) + _offsets(QUERIES, WIDTH, N, H)
    offsets = _offsets(KEYS, WIDTH, K, H)
    queries = _load(q + places, query, T, H, WIDTH, True)
    douts = _load(dout + places, query, T, H, WIDTH, True)
    numbers = (row * N + head).to(tl.int64) * T + query
    normaliser = tl.load(lse + numbers, mask=query < T, other=0.0) * LOG2E
    slopes = tl.load(slope + numbers, mask=query < T, other=0.0)
    segments += row * filled
    branches += row * filled
    q_segment, q_branch = tl.load(segments + query), tl.load(branches + query)
    listed = row * tl.num_programs(0) + tile
    visits += listed.to(tl.int64) * width
    masked, every = tl.load(counts + 2 * listed), tl.load(counts + 2 * listed + 1)
    scale2: tl.constexpr = SCALE * LOG2E  # scores become exponents of 2

    sums = tl.zeros((QUERIES, WIDTH), tl.float32)
    sums = _query_gradients(
        sums, queries, douts, normaliser, slopes, k, v, segments, branches, visits, 0, masked,
        query, q_segment, q_branch, T, row, kv_head, offsets, scale2, K, H, WIDTH, KEYS, CAUSAL, True, PRECISION,
    )  # fmt: skip
    sums = _query_gradients(
        sums, queries, douts, normaliser, slopes, k, v, segments, branches, visits, masked, every,
        query, q_segment, q_branch, T, row, kv_head, offsets, scale2, K, H, WIDTH, KEYS, CAUSAL, False, PRECISION,
    )  # fmt: skip
    _store(dq + places, sums * SCALE, query, T, H, WIDTH)


@triton.jit
def _key_gradients(
    dk, dv, keys, values, q, dout, lse, slope, segments, branches, visits, first, last, key, k_segment, k_branch,
    T, row, head, offsets, scale2: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for visit in range(first, last):
        start = tl.load(visits + visit) * QUERIES
        query = start + tl.arange(0, QUERIES)
        place = _start(row, T, start, head, N, H)
        queries = _load(q + place + offsets, query, T, H, WIDTH, MASK)
        numbers = (row * N + head).to(tl.int64) * T + query
        if MASK:
            normaliser = tl.load(lse + numbers, mask=query < T, other=0.0) * LOG2E
            slopes = tl.load(slope + numbers, mask=query < T, other=0.0)
        else:
            normaliser = tl.load(lse + numbers) * LOG2E
            slopes = tl.load(slope + numbers)
        scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
        if MASK:
            q_segment, q_branch = tl.load(segments + query), tl.load(branches + query)
            allowed = _reached(
                query[None, :], key[:, None], q_segment[None, :], k_segment[:, None],
                q_branch[None, :], k_branch[:, None], CAUSAL,
            )  # fmt: skip
            scores = tl.where(allowed, scores, MASKED)
        weights = tl.exp2(scores * scale2 - normaliser[None, :])
        douts = _load(dout + place + offsets, query, T, H, WIDTH, MASK)
        dv = tl.dot(weights.to(douts.dtype), douts, dv, input_precision=PRECISION)
        dweights = tl.dot(values, tl.trans(douts), input_precision=PRECISION)
        dscores = weights * (dweights - slopes[None, :])
        dk = tl.dot(dscores.to(queries.dtype), queries, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def key_gradients(
    q, k, v, dout, lse, slope, segments, branches, visits, counts, T, filled, width, dk, dv,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The grid is tiles of keys, KV heads, rows. The lists name tiles of queries. A program goes through all query
    heads that read its KV head. Under a causal mask the first tiles have the most work."""
    tile, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key = tile * KEYS + tl.arange(0, KEYS)
    places = _start(row, T, tile * KEYS, kv_head, K, H) + _offsets(KEYS, WIDTH, K, H)
    offsets = _offsets(QUERIES, WIDTH, N, H)
    keys = _load(k + places, key, T, H, WIDTH, True)
    values = _load(v + places, key, T, H, WIDTH, True)
    segments += row * filled
    branches += row * filled
    k_segment, k_branch = tl.load(segments + key), tl.load(branches + key)
    listed = row * tl.num_programs(0) + tile
    visits += listed.to(tl.int64) * width
    masked, every = tl.load(counts + 2 * listed), tl.load(counts + 2 * listed + 1)
    scale2: tl.constexpr = SCALE * LOG2E  # scores become exponents of 2

    dk_sums = tl.zeros((KEYS, WIDTH), tl.float32)
    dv_sums = tl.zeros((KEYS, WIDTH), tl.float32)
    for reader in range(N // K):
        head = kv_head * (N // K) + reader
        dk_sums, dv_sums = _key_gradients(
            dk_sums, dv_sums, keys, values, q, dout, lse, slope, segments, branches, visits, 0, masked,
            key, k_segment, k_branch, T, row, head, offsets, scale2, N, H, WIDTH, QUERIES, CAUSAL, True, PRECISION,
        )  # fmt: skip
        dk_sums, dv_sums = _key_gradients(
            dk_sums, dv_sums, keys, values, q, dout, lse, slope, segments, branches, visits, masked, every,
            key, k_segment, k_branch, T, row, head, offsets, scale2, N, H, WIDTH, QUERIES, CAUSAL, False, PRECISION,
        )  # fmt: skip
    _store(dk + places, dk_sums * SCALE, key, T, H, WIDTH)
    _store(dv + places, dv_sums, key, T, H, WIDTH)
