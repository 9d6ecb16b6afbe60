"""Which class builds which configuration, and which names in a `config.json` mean it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from .config import AnyConfig, ModelConfigError, Qwen2Config, Qwen25VLConfig
from .decoder import Decoder
from .qwen2.modeling import Qwen2
from .qwen2_5_vl.modeling import Qwen25VL

# Keys are the names of `architectures` in config.json (MiMo-VL's is that of Qwen2.5-VL).
ARCHITECTURES: dict[str, type[AnyConfig]] = {
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen2_5_VLForConditionalGeneration": Qwen25VLConfig,
}
# For files without `architectures`.
MODEL_TYPES: dict[str, type[AnyConfig]] = {"qwen2": Qwen2Config, "qwen2_5_vl": Qwen25VLConfig}


def read_config(config: Mapping[str, Any]) -> AnyConfig:
    """The typed configuration of a `config.json`; `ModelConfigError` lists what is supported."""
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name].from_hf(config)
    if not names and config.get("model_type") in MODEL_TYPES:
        return MODEL_TYPES[config["model_type"]].from_hf(config)
    found = ", ".join(names) or f"model_type {config.get('model_type')!r}"
    raise ModelConfigError(f"unsupported architecture {found}; supported are {', '.join(sorted(ARCHITECTURES))}")


def build(config: AnyConfig, rngs: nnx.Rngs) -> Decoder:
    """The model of a configuration, every weight drawn from `rngs`."""
    return Qwen25VL(config, rngs) if isinstance(config, Qwen25VLConfig) else Qwen2(config, rngs)


def abstract(config: AnyConfig) -> Decoder:
    """The model with `jax.ShapeDtypeStruct` weights."""
    return nnx.eval_shape(lambda: build(config, nnx.Rngs(0)))


def create(config: AnyConfig, seed: int = 0) -> Decoder:
    """All weights are drawn in one compiled program."""
    graphdef = nnx.graphdef(abstract(config))

    @jax.jit
    def draw(key: jax.Array) -> dict[str, Any]:
        return nnx.to_pure_dict(nnx.state(build(config, nnx.Rngs(params=key))))

    return nnx.merge(graphdef, draw(jax.random.key(seed)))
