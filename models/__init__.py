"""Models in Flax NNX behind one small interface. Importing this package is light; JAX loads with the first call.

model = models.load(path)                       # a local Hugging Face checkpoint folder
model = models.create(config, seed)             # random weights; `models.abstract(config)` has shapes only
graphdef, params = models.split(model)          # once; `params` is a pure nested dict of arrays
model = models.merge(graphdef, params)          # inside `jax.jit`
models.save(model, path)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .decoder import merge, split
    from .hf import load, save
    from .registry import abstract, create

__all__ = ["abstract", "create", "load", "merge", "save", "split"]
_HOMES = {"registry": ("abstract", "create"), "hf": ("load", "save"), "decoder": ("merge", "split")}


def __getattr__(name: str) -> object:
    """Imports the module of a function above at its first use (PEP 562)."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
