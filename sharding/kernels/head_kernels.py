"""The Triton kernels of the head: sums of the softmax over the vocabulary, and gradients of a chunk of the logits.

`sharding.vocab` launches these kernels. A program computes logits tile by tile, `[TOKENS, IDS]` float32 in registers,
and reduces the logits to sums or gradients. Scores are logits over the temperature, times `log2(e)`. The sum of `weight
* score`, for the entropy, runs beside the running softmax (Milakov and Gimelshein, arXiv:1805.02867).

Arrays are dense: hidden `[T, D]`; head `[V, D]`; allowed `[V]` int8, filled up with zeros to full tiles; targets `[T]`
int32; other arrays `[T]` float32. Tokens are cut into tiles, of which `vocab.TOGETHER` make a group.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

MASKED = tl.constexpr(-1.4426950408889634e30)  # the score of an id that is not allowed, -1e30 in nats
FLOOR = tl.constexpr(-1e20)  # no running maximum is lower, so that a forbidden id gets the weight 0


@triton.jit
def _logits(
    hidden, head, token, id, T, V,
    D: tl.constexpr, TOKENS: tl.constexpr, IDS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The logits of a tile that begins at a token and an id. Beyond the end, the last token or id is repeated, so that
    loads need no mask."""
    depth = tl.arange(0, DEPTH)[None, :]
    # Offsets begin at a scalar of 64 bits, because a head may have more than 2**31 numbers.
    hidden = (
        hidden + tl.cast(token, tl.int64) * D + (tl.minimum(tl.arange(0, TOKENS), T - 1 - token)[:, None] * D + depth)
    )
    head = head + tl.cast(id, tl.int64) * D + (tl.minimum(tl.arange(0, IDS), V - 1 - id)[:, None] * D + depth)
    logits = tl.zeros((TOKENS, IDS), tl.float32)
    for start in range(0, D, DEPTH):
        if D % DEPTH == 0:
            hiddens, heads = tl.load(hidden), tl.load(head)
        else:
            hiddens = tl.load(hidden, mask=start + depth < D, other=0.0)
            heads = tl.load(head, mask=start + depth < D, other=0.0)
        logits = tl.dot(hiddens, tl.trans(heads), logits, input_precision=PRECISION)
        hidden += DEPTH
        head += DEPTH
    return logits


@triton.jit
def softmax_sums(
    hidden, head, targets, allowed, scale, T, V, peaks, totals, slopes, hits,
    D: tl.constexpr, TOKENS: tl.constexpr, IDS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The grid is tiles of tokens in a group, parts of the vocabulary, groups of tiles. A program computes a tile and a
    part. Results are `[parts, T]`. `peaks` are the largest scores, and `totals` the sums of weights `2**(score -
    largest)`. `slopes` are the sums of `weight * (score - largest)`, which lose no digits if scores are large. `hits`
    are the targets' scores, or 0 if a target is in another part. `scale` turns logits into scores."""
    token = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * TOKENS
    if token >= T:
        return
    index = token + tl.arange(0, TOKENS)
    real = index < T
    target = tl.load(targets + index, mask=real, other=-1)
    scales = tl.load(scale + index, mask=real, other=0.0)
    peak = tl.full((TOKENS,), FLOOR, tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    slope = tl.zeros((TOKENS,), tl.float32)
    hit = tl.zeros((TOKENS,), tl.float32)
    tiles = tl.cdiv(V, IDS)
    width = tl.cdiv(tiles, tl.num_programs(1))
    first = tl.program_id(1) * width
    for tile in range(first, tl.minimum(first + width, tiles)):
        ids = tile * IDS + tl.arange(0, IDS)
        logits = _logits(hidden, head, token, tile * IDS, T, V, D, TOKENS, IDS, DEPTH, PRECISION)
        scores = tl.where((tl.load(allowed + ids) != 0)[None, :], logits * scales[:, None], MASKED)
        hit += tl.sum(tl.where(ids[None, :] == target[:, None], scores, 0.0), 1)
        new = tl.maximum(peak, tl.max(scores, 1))
        below = scores - new[:, None]
        weights = tl.exp2(below)
        fade = tl.exp2(peak - new)
        slope = fade * (slope + total * (peak - new)) + tl.sum(weights * below, 1)
        total = fade * total + tl.sum(weights, 1)
        peak = new
    place = tl.program_id(1).to(tl.int64) * T + index
    tl.store(peaks + place, peak, mask=real)
    tl.store(totals + place, total, mask=real)
    tl.store(slopes + place, slope, mask=real)
    tl.store(hits + place, hit, mask=real)


@triton.jit
def logit_gradients(
    hidden, head, targets, allowed, scale, normaliser, hit_grad, grad, entropy_grad, T, V, out,
    WIDTH: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, IDS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The grid is tiles of tokens in a group, tiles of ids, groups of tiles. `head`, `allowed` and `targets` belong to
    a chunk of V ids, numbered from 0. `out` is `[T, WIDTH]` in the dtype of `hidden`, with zeros from V on. WIDTH is a
    multiple of 16 and a constant for the compiler, so that a thread stores 16 bytes at once. With `log2 p = score -
    normaliser`, a gradient is `[id == target] hit_grad - p (grad + entropy_grad log2 p)`."""
    token = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * TOKENS
    if token >= T:
        return
    index = token + tl.arange(0, TOKENS)
    real = index < T
    id = tl.program_id(1) * IDS
    ids = id + tl.arange(0, IDS)
    logits = _logits(hidden, head, token, id, T, V, D, TOKENS, IDS, DEPTH, PRECISION)
    scales = tl.load(scale + index, mask=real, other=0.0)
    normalisers = tl.load(normaliser + index, mask=real, other=0.0)
    hit_grads = tl.load(hit_grad + index, mask=real, other=0.0)
    grads = tl.load(grad + index, mask=real, other=0.0)
    entropy_grads = tl.load(entropy_grad + index, mask=real, other=0.0)
    target = tl.load(targets + index, mask=real, other=-1)

    logs = logits * scales[:, None] - normalisers[:, None]
    slopes = tl.exp2(logs) * (grads[:, None] + entropy_grads[:, None] * logs)
    slopes = tl.where(ids[None, :] == target[:, None], hit_grads[:, None], 0.0) - slopes
    slopes = tl.where((tl.load(allowed + ids) != 0)[None, :], slopes, 0.0)
    out = out + tl.cast(token, tl.int64) * WIDTH + (tl.arange(0, TOKENS)[:, None] * WIDTH + ids[None, :])
    tl.store(out, slopes.to(out.dtype.element_ty), mask=real[:, None] & (ids < WIDTH)[None, :])
