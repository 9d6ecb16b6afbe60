"""Models in Flax NNX behind one small interface. Importing this package is light; JAX loads with the first call.

model = models.load(path)                       # a local Hugging Face checkpoint folder
graphdef, params = models.split(model)          # once; `params` is a pure nested dict of arrays
model = models.merge(graphdef, params)          # inside `jax.jit`
models.save(model, path)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flax import nnx

    from .config import AnyConfig
    from .decoder import Decoder


def create(config: AnyConfig, seed: int = 0) -> Decoder:
    """A model with random weights, reproducible from `seed`."""
    from . import registry

    return registry.create(config, seed)


def abstract(config: AnyConfig) -> Decoder:
    """The model with shapes for weights: counts parameters of any size, allocates nothing."""
    from . import registry

    return registry.abstract(config)


def load(path: str | os.PathLike[str], dtype: Any = None) -> Decoder:
    """Reads a local Hugging Face checkpoint folder tensor by tensor.

    `dtype` casts every weight (float32 masters of a bfloat16 checkpoint); None keeps the checkpoint's own.
    Raises `hf.CheckpointError` naming file and tensor for anything missing, unexpected or mis-shaped, and
    `config.ModelConfigError` for architectures and settings that are not supported.
    """
    from . import hf

    return hf.load(path, dtype)


def save(model: Decoder, path: str | os.PathLike[str], dtype: Any = None) -> None:
    """Writes `config.json` and safetensors that `transformers`, SGLang and `load` read; bit for bit what was loaded.

    `dtype` casts every weight; None writes them as they are.
    """
    from . import hf

    hf.save(model, path, dtype)


def split(model: Decoder) -> tuple[nnx.GraphDef[Decoder], dict[str, Any]]:
    """(structure, parameters as a pure nested dict). The structure is hashable and static."""
    from flax import nnx

    graphdef, state = nnx.split(model)
    return graphdef, nnx.to_pure_dict(state)


def merge(graphdef: nnx.GraphDef[Decoder], params: dict[str, Any]) -> Decoder:
    """The model again; cheap inside `jax.jit`, where it belongs."""
    from flax import nnx

    return nnx.merge(graphdef, params)
