"""Which class builds which configuration, and which names in a `config.json` mean it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from .config import AnyConfig, ModelConfigError, Qwen2Config, Qwen25VLConfig
from .decoder import Decoder
from .qwen2.modeling import Qwen2
from .qwen2_5_vl.modeling import Qwen25VL


@dataclasses.dataclass(frozen=True)
class Architecture:
    config: type[Qwen2Config] | type[Qwen25VLConfig]
    model: type[Qwen2] | type[Qwen25VL]


QWEN2 = Architecture(Qwen2Config, Qwen2)
QWEN2_5_VL = Architecture(Qwen25VLConfig, Qwen25VL)

# Keys are the names of `architectures` in config.json (MiMo-VL's is that of Qwen2.5-VL).
ARCHITECTURES: dict[str, Architecture] = {
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2_5_VLForConditionalGeneration": QWEN2_5_VL,
}
# For files without `architectures`.
MODEL_TYPES: dict[str, Architecture] = {"qwen2": QWEN2, "qwen2_5_vl": QWEN2_5_VL}


def read_config(config: Mapping[str, Any]) -> AnyConfig:
    """The typed configuration of a `config.json`; `ModelConfigError` lists what is supported."""
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name].config.from_hf(config)
    if not names and config.get("model_type") in MODEL_TYPES:
        return MODEL_TYPES[config["model_type"]].config.from_hf(config)
    found = ", ".join(names) or f"model_type {config.get('model_type')!r}"
    raise ModelConfigError(f"unsupported architecture {found}; supported are {', '.join(sorted(ARCHITECTURES))}")


def model_class(config: AnyConfig) -> type[Qwen2] | type[Qwen25VL]:
    for architecture in (QWEN2, QWEN2_5_VL):
        if isinstance(config, architecture.config):
            return architecture.model
    raise ModelConfigError(f"no model for a {type(config).__name__}")


def abstract(config: AnyConfig) -> Decoder:
    """The model with `jax.ShapeDtypeStruct` weights."""
    build = model_class(config)
    return nnx.eval_shape(lambda: build(config, nnx.Rngs(0)))


def create(config: AnyConfig, seed: int = 0) -> Decoder:
    """All weights are drawn in one compiled program."""
    build = model_class(config)
    graphdef = nnx.graphdef(abstract(config))

    @jax.jit
    def draw(key: jax.Array) -> dict[str, Any]:
        return nnx.to_pure_dict(nnx.state(build(config, nnx.Rngs(params=key))))

    return nnx.merge(graphdef, draw(jax.random.key(seed)))
