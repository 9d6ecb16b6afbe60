"""The table of architectures, which reads and writes the `config.json` of each architecture."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sharding.door import later

from .config import DecoderConfig, JsonObject, ModelConfigError, NameLayout
from .folder import one_line

if TYPE_CHECKING:
    from .decoder import Decoder
    from .tensor_names import TensorName


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The parts of an architecture that differ from other architectures. The first call of a part imports its module.
    `read(config.json)` raises ModelConfigError for a file that can't be used. `write(config)` returns the content of a
    config.json without the names of the architecture. `tensor_names(config, weights)` names every weight on disk."""

    name: str  # in `architectures` of config.json
    read: Callable[[JsonObject], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    model: Callable[[DecoderConfig], "Decoder"]  # with shapes for weights
    tensor_names: Callable[[DecoderConfig, Mapping[Any, Any]], "list[TensorName]"]
    published: NameLayout = NameLayout.FLAT  # layout of published checkpoints, which SGLang reads
    rope_index: Callable[..., tuple[np.ndarray, int]] | None = None  # as in `positions`; None: text only
    carried: str = ""  # prefix of tensors that no model here reads; they are copied into exports


_part = functools.partial(later, __name__)


def _text_model(name: str, read: str) -> Architecture:
    write, model, names = "hf_config:write_text_model", "decoder:Decoder", "tensor_names:text_model_names"
    return Architecture(name, _part(read), _part(write), _part(model), _part(names))


def _in_folder(folder: str, name: str, model: str, **more: Any) -> Architecture:
    """An architecture of its own folder, with media, whose `params` has the usual names."""
    read, write, names = (_part(f"{folder}.params:{part}") for part in ("read_config", "write_config", "tensor_names"))
    rope_index = _part("qwen2_5_vl.positions:rope_index")  # from Qwen3-VL on, each frame pair is a medium of its own
    return Architecture(name, read, write, _part(f"{folder}.modeling:{model}"), names, rope_index=rope_index, **more)


# By `model_type` of config.json
ARCHITECTURES = {
    "qwen2": _text_model("Qwen2ForCausalLM", read="hf_config:read_qwen2"),
    "qwen3": _text_model("Qwen3ForCausalLM", read="hf_config:read_qwen3"),
    "qwen2_5_vl": _in_folder("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "Qwen25VL"),  # also MiMo-VL
    "qwen3_vl": _in_folder("qwen3_vl", "Qwen3VLForConditionalGeneration", "Qwen3VL", published=NameLayout.NESTED),
    "qwen3_5": _in_folder(
        "qwen3_5", "Qwen3_5ForConditionalGeneration", "Qwen35", published=NameLayout.NESTED, carried="mtp."
    ),
    "qwen3_5_text": Architecture(
        "Qwen3_5ForCausalLM",
        read=_part("qwen3_5.params:read_text_model"),
        write=_part("qwen3_5.params:write_text_model"),
        model=_part("qwen3_5.modeling:Qwen35Text"),
        tensor_names=_part("qwen3_5.params:text_model_names"),
        carried="mtp.",
    ),
}


@one_line(ModelConfigError)
def read_config(config: JsonObject) -> DecoderConfig:
    """The typed configuration of a `config.json`. Raises ModelConfigError for contents that can't be used."""
    return ARCHITECTURES[architecture_of(config)].read(config)


def architecture_of(config: JsonObject) -> str:
    """The key in `ARCHITECTURES` for the `architectures` of a `config.json` or, if there are none, for its
    `model_type`. Raises ModelConfigError, which lists the supported architectures."""
    names = config.get("architectures") or []
    keys = {row.name: key for key, row in ARCHITECTURES.items()}
    known = [keys[name] for name in names if name in keys]
    if not names and config.get("model_type") in ARCHITECTURES:
        known = [config["model_type"]]
    if known:
        return known[0]
    found = (", ".join(names) or f"model_type {config.get('model_type')!r}")[:100]
    raise ModelConfigError(f"unsupported architecture {found}; supported are {', '.join(sorted(keys))}")


def write_config(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` dictionary of a configuration: the one that was read, if it still means the same."""
    source = json.loads(config.extra)
    # `names` is a property of the weight files, not of config.json
    if source and dataclasses.replace(read_config(source), names=config.names) == config:
        return source
    row = ARCHITECTURES[config.architecture]
    return {"architectures": [row.name], "model_type": config.architecture, **row.write(config)}
