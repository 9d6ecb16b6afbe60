"""Models in Flax NNX behind one small interface. The first use of a name of this package imports JAX.

model = models.load(path)                       # a local Hugging Face checkpoint folder
model = models.create(config, seed)             # random weights; `models.abstract(config)` has shapes only
graphdef, params = models.split(model)          # `params` is a pure nested dict of arrays
model = models.merge(graphdef, params)          # inside `jax.jit`
models.save(model, path)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sharding.door import door

if TYPE_CHECKING:
    from .creation import abstract, create
    from .decoder import merge, split
    from .hf import load, save
    from .lora import Lora, adapted, fresh_adapters, load_adapters, save_adapters

__all__ = [
    "Lora",
    "abstract",
    "adapted",
    "create",
    "fresh_adapters",
    "load",
    "load_adapters",
    "merge",
    "save",
    "save_adapters",
    "split",
]
__getattr__ = door(
    __name__,
    decoder=("merge", "split"),
    hf=("load", "save"),
    lora=("Lora", "adapted", "fresh_adapters", "load_adapters", "save_adapters"),
    creation=("abstract", "create"),
)
