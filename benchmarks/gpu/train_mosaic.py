"""Measures the training step as `train` does, with attention's candidate in Pallas-Mosaic-GPU.

Losses and norms of gradients are to be those of `train`, to the digits that bfloat16 leaves.
"""

from __future__ import annotations

import contextlib
import sys

import part
import train


def measure(figures: part.Figures, dry: bool) -> None:
    if dry:
        kernels = contextlib.nullcontext()  # on a CPU no kernel is chosen
    else:
        from mosaic_gradients import in_place_of_flash

        kernels = in_place_of_flash()
    with kernels:
        train.measure(figures, dry, (train.AGAIN, train.PRODUCTS))


if __name__ == "__main__":
    sys.exit(part.main(measure, __doc__))
