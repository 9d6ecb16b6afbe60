"""Causal attention over packed rows, for all layers of a model: masks and lists of tiles are computed once.

Short rows are computed with all their scores, in a few large products. In long rows most scores belong to another
segment, another branch or the future; only tiles with other scores are computed (`tiles`), and all rows form one stream
there. NVIDIA GPUs have a kernel of their own for rows of any length.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Int

from . import flash
from .attention import Mask, attention
from .tiles import tile_attention, tile_list

LONG_ROW = 512  # tokens; longer rows are cut into tiles

Attention = Callable[[Array, Array, Array], Array]  # (q_BTNH, k_BTKH, v_BTKH) -> out_BTNH


def packed_attention(segments_BT: Int[Array, "B T"], branches_BT: Int[Array, "B T"]) -> Attention:
    """Attention under the rules of `attention.Mask` (causal, with branches). Both arrays may be tracers."""
    B, T = segments_BT.shape
    mask = Mask(segments_BT, branches_BT)
    if T < LONG_ROW:
        return lambda q, k, v: attention(q, k, v, mask)
    # Segments of different rows get different numbers, in the order of the rows.
    rows_B1 = jnp.arange(B, dtype=segments_BT.dtype)[:, None] * (jnp.max(segments_BT) + 1)
    apart_BT = jnp.where(segments_BT != 0, segments_BT + rows_B1, 0)
    tiles = tile_list(apart_BT.reshape(-1), branches_BT.reshape(-1))

    def attend(q: Array, k: Array, v: Array) -> Array:
        if flash.chosen(q, k, v):
            return attention(q, k, v, mask)
        q_SNH, k_SKH, v_SKH = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        return tile_attention(q_SNH, k_SKH, v_SKH, tiles).reshape(q.shape)

    return attend
