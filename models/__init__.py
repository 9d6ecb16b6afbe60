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
    from .decoder import merge as merge
    from .decoder import split as split
    from .hf import load as load
    from .hf import save as save
    from .registry import abstract as abstract
    from .registry import create as create

_HOME = {
    "abstract": "registry",
    "create": "registry",
    "load": "hf",
    "save": "hf",
    "merge": "decoder",
    "split": "decoder",
}


def __getattr__(name: str) -> object:
    """Imports the module of one of the functions above when it is first asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
