"""Adapters of a tiny model that do something, for tests of files."""

import numpy as np

from models.lora import Lora, adapted, fresh_adapters
from sharding.weights import on_first_device

LORA = Lora(3, 6.0)


def given_adapters(model, lora):
    """Adapters whose product is as large as the weights."""
    rng = np.random.default_rng(0)
    shapes = adapted(model, lora)
    drawn = fresh_adapters(shapes, 1, on_first_device(shapes))
    return {path: np.asarray(value) + 0.2 * rng.normal(size=value.shape).astype(np.float32)
            for path, value in drawn.items()}  # fmt: skip
