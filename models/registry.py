"""The class that builds each configuration, and the names in a `config.json` that mean it."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sharding.weights import WeightSpec

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


def abstract(config: AnyConfig) -> Decoder:
    """The model with shapes (`jax.ShapeDtypeStruct`) for weights: counts parameters of any size, allocates nothing."""
    if isinstance(config, Qwen25VLConfig):
        return nnx.eval_shape(lambda: Qwen25VL(config, nnx.Rngs(0)))
    return nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))  # a Qwen2 text model is the plain decoder


def create(config: AnyConfig, seed: int = 0) -> Decoder:
    """The model with random weights, reproducible from `seed`.

    Weights are drawn on the host, each from a generator of its own (`seed` and the weight's path): the values depend on
    no other weight, no device and no compiler, and a tiny model is there at once.
    """
    graphdef, state = nnx.split(abstract(config))

    def draw(path: tuple, variable: nnx.Variable) -> nnx.Variable:
        spec: WeightSpec = variable.get_metadata("spec")
        if isinstance(spec.init, Normal):
            name = ".".join(str(key.key) for key in path).encode()
            rng = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name)]))
            value = jnp.asarray(spec.init.on_host(rng, variable.shape), spec.dtype)
        else:  # a constant
            value = spec.init(jax.random.key(0), variable.shape, spec.dtype)
        return variable.replace(value)

    return nnx.merge(graphdef, jax.tree.map_with_path(draw, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))
