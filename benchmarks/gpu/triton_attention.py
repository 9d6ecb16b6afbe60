"""Lets the Triton kernels of attention compute where others do: on Hopper (`without_hopper`), and heads of 256.

`sharding.kernels.flash` computes heads of at most 128. With these tiles ptxas fits heads of 256 into the registers of
Hopper, or nearly: the gradients of keys spill 72 bytes, where smaller tiles, which spill none, multiply by `mma`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from sharding.kernels import flash
from sharding.mesh import Tiling, runs_triton

SETTINGS = {
    "forward": Tiling((128, 32), 8, 2),
    "query_gradients": Tiling((128, 32), 8, 2),
    "key_gradients": Tiling((32, 64), 8, 2),
}


@contextlib.contextmanager
def wide_heads() -> Iterator[None]:
    """Programs that are traced meanwhile compute heads of 256 by the Triton kernels, where a GPU runs them."""
    chosen, tiling_of = flash.chosen, flash.tiling_of

    def tiling(kernel: str, dtype: Any, head: int, capability: int) -> Tiling:
        return SETTINGS[kernel] if head > 128 else tiling_of(kernel, dtype, head, capability)

    flash.chosen, flash.tiling_of = functools.partial(runs_triton, multiple=8, most=256), tiling
    try:
        yield
    finally:
        flash.chosen, flash.tiling_of = chosen, tiling_of


@contextlib.contextmanager
def without_hopper() -> Iterator[None]:
    """Programs that are traced meanwhile attend by the Triton kernels where they would by Mosaic's."""
    before, flash.for_hopper = flash.for_hopper, lambda queries: False
    try:
        yield
    finally:
        flash.for_hopper = before
