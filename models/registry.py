"""The class that builds each configuration, and the names in a `config.json` that mean it."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from sharding.strategy import Params
from sharding.weights import WeightSpec, by_path, map_weights, on_first_device, place, place_stack

from .config import AnyConfig, JsonObject, ModelConfigError, Qwen25VLConfig
from .decoder import Decoder
from .hf_config import read_qwen2, read_qwen2_5_vl
from .layers import Normal
from .qwen2_5_vl.modeling import Qwen25VL

# Keys are the names of `architectures` in config.json (MiMo-VL's is that of Qwen2.5-VL).
ARCHITECTURES: dict[str, Callable[[JsonObject], AnyConfig]] = {
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen2_5_VLForConditionalGeneration": read_qwen2_5_vl,
}
# For files without `architectures`.
MODEL_TYPES: dict[str, Callable[[JsonObject], AnyConfig]] = {"qwen2": read_qwen2, "qwen2_5_vl": read_qwen2_5_vl}


def read_config(config: JsonObject) -> AnyConfig:
    """The typed configuration of a `config.json`; `ModelConfigError` lists what is supported."""
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name](config)
    if not names and config.get("model_type") in MODEL_TYPES:
        return MODEL_TYPES[config["model_type"]](config)
    found = ", ".join(names) or f"model_type {config.get('model_type')!r}"
    raise ModelConfigError(f"unsupported architecture {found}; supported are {', '.join(sorted(ARCHITECTURES))}")


def build(config: AnyConfig, rngs: nnx.Rngs) -> Decoder:
    """The model of a configuration, every weight drawn from `rngs`. A Qwen2 text model is the plain decoder."""
    return Qwen25VL(config, rngs) if isinstance(config, Qwen25VLConfig) else Decoder(config, rngs)


def abstract(config: AnyConfig) -> Decoder:
    """The model with shapes (`jax.ShapeDtypeStruct`) for weights: counts parameters of any size, allocates nothing."""
    return nnx.eval_shape(lambda: build(config, nnx.Rngs(0)))


def create(config: AnyConfig, seed: int = 0, shardings: Callable[[Decoder], Params] | None = None) -> Decoder:
    """The model with random weights, reproducible from `seed`.

    Weights are drawn on the host, each from a generator of its own (`seed` and the weight's path): the values depend on
    no other weight, no device and no compiler, and a tiny model is there at once. `shardings` are as of `models.load`.
    """
    model = abstract(config)
    places = by_path((shardings or on_first_device)(model))

    def draw(path: tuple, variable: nnx.Variable) -> jax.Array:
        spec: WeightSpec = variable.get_metadata("spec")
        names = tuple(key.key for key in path)
        if isinstance(spec.init, Normal):
            rng = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(".".join(names).encode())]))
            layers = (spec.init.on_host(rng, spec.shape).astype(spec.dtype) for _ in itertools.count())
        else:  # a constant
            layers = itertools.repeat(np.asarray(spec.init(jax.random.key(0), spec.shape, spec.dtype)))
        if len(variable.shape) > len(spec.shape):
            return place_stack(layers, variable.shape[0], places[names])
        return place(next(layers), places[names])

    return nnx.merge(nnx.graphdef(model), map_weights(draw, model))
