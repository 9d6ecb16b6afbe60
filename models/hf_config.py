"""Reads and writes a `config.json` of Hugging Face, with flat or nested text settings (rotary ones: `hf_rope`)."""

import dataclasses
import json
from typing import Any

from .config import (
    AnyConfig,
    JsonObject,
    ModelConfigError,
    NameLayout,
    Qwen2Config,
    Qwen25VLConfig,
    TextConfig,
    VisionConfig,
)
from .folder import one_line
from .hf_rope import read_rope, read_vision_theta, write_rope

_TOKEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def _need(config: JsonObject, name: str, where: str, kind: type = int) -> Any:
    value = config.get(name)
    if type(value) is not kind or not value:
        wrong = f"{name}={str(value)[:50]!r}, which must be a {kind.__name__} that is not 0"
        raise ModelConfigError(f"{where} has no {name!r}" if value is None else f"{where} has {wrong}")
    return value


# Settings that change what other programs compute, each with the one value under which they compute as this decoder.
_SUPPORTED: dict[str, bool | int | None] = {
    "attention_bias": True,  # on q, k and v, as in every published checkpoint of these architectures
    "qkv_bias": True,
    "mlp_bias": False,
    "is_causal": True,
    "attention_dropout": 0,
    "partial_rotary_factor": 1,
    "dual_chunk_attention_config": None,
}


def _refuse_quantised(config: JsonObject, where: str) -> None:
    for name in ("quantization_config", "compression_config"):
        if (found := config.get(name)) is not None:
            method = found.get("quant_method", "") if isinstance(found, dict) else found
            raise ModelConfigError(
                f"{name} ({method}) in {where} is not supported, weights must be full-precision ones: take the "
                "checkpoint that was not quantised, or remove the field if these weights never were"
            )


def _refuse_unsupported(config: JsonObject, where: str) -> None:
    """Raises ModelConfigError, naming the field, where `config` asks the decoder for something that it can't do."""
    _refuse_quantised(config, where)
    if config.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(f"hidden_act {config['hidden_act']!r} in {where} is not supported; supported is silu")
    for name, value in _SUPPORTED.items():
        if config.get(name, value) not in (None, value):
            raise ModelConfigError(f"{name}={config[name]!r} in {where} is not supported; supported is {value!r}")


def _refuse_sliding_windows(config: JsonObject, layers: int, default_full_layers: int, where: str) -> None:
    """Raises ModelConfigError for attention within a sliding window.

    Defaults are those of transformers: windows of 4096 tokens, in layers from `max_window_layers` on.
    """
    full = config.get("max_window_layers")
    full = default_full_layers if full is None else full
    if config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None and full < layers:
        raise ModelConfigError(f"sliding-window attention is not supported (use_sliding_window in {where})")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise ModelConfigError(
            f"layer_types {', '.join(sorted(kinds))} in {where} are not supported; supported is full_attention"
        )


def read_text(
    config: JsonObject,
    outer: JsonObject,
    *,
    default_theta: float = 10000.0,
    default_eps: float = 1e-6,
    default_section: tuple[int, ...] = (),
    default_full_layers: int = 28,
) -> TextConfig:
    """The decoder's settings in `config`; `outer` is the content of the file, whose top may say that weights are tied.

    The defaults are those of transformers for the architecture, used where the file has no value.
    """
    where = "config.json" if config is outer else "text_config of config.json"
    _refuse_quantised(outer, "config.json")
    _refuse_unsupported(config, where)
    layers, heads = _need(config, "num_hidden_layers", where), _need(config, "num_attention_heads", where)
    _refuse_sliding_windows(config, layers, default_full_layers, where)
    hidden = _need(config, "hidden_size", where)
    return TextConfig(
        vocab_size=_need(config, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_need(config, "intermediate_size", where),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        rms_norm_eps=float(config.get("rms_norm_eps", default_eps)),
        rope=read_rope(config, outer, default_theta=default_theta, default_section=default_section),
        tie_word_embeddings=bool(outer.get("tie_word_embeddings") or config.get("tie_word_embeddings")),
        max_position_embeddings=config.get("max_position_embeddings", 32768),
        initializer_range=float(config.get("initializer_range", 0.02)),
    )


def read_vision(config: JsonObject) -> VisionConfig:
    where = "vision_config of config.json"
    _refuse_quantised(config, where)
    if config.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(f"vision hidden_act {config['hidden_act']!r} is not supported; supported is silu")
    needed = ("hidden_size", "intermediate_size", "depth", "num_heads", "out_hidden_size")
    optional = ("patch_size", "temporal_patch_size", "spatial_merge_size", "window_size")
    return VisionConfig(
        **{name: _need(config, name, where) for name in needed},
        **{name: config[name] for name in optional if config.get(name) is not None},
        full_attention_layers=tuple(config.get("fullatt_block_indexes", (7, 15, 23, 31))),
        in_channels=config.get("in_channels") or config.get("in_chans") or 3,
        tokens_per_second=float(config.get("tokens_per_second", 4)),
        rope_theta=read_vision_theta(config),
        initializer_range=float(config.get("initializer_range", 0.02)),
    )


def read_qwen2(config: JsonObject) -> Qwen2Config:
    return Qwen2Config(text=read_text(config, config), extra=json.dumps(config))


def read_qwen2_5_vl(config: JsonObject) -> Qwen25VLConfig:
    text = config.get("text_config") or config
    return Qwen25VLConfig(
        text=read_text(
            text, config, default_theta=1e6, default_eps=1e-5, default_section=(16, 24, 24), default_full_layers=80
        ),
        vision=read_vision(_need(config, "vision_config", "config.json", dict)),
        **{name: config[name] for name in _TOKEN_IDS if config.get(name) is not None},
        names=NameLayout.FLAT,
        extra=json.dumps(config),
    )


# Keys are names in `architectures` of config.json; MiMo-VL has Qwen2.5-VL's.
_READERS = {"Qwen2ForCausalLM": read_qwen2, "Qwen2_5_VLForConditionalGeneration": read_qwen2_5_vl}
_MODEL_TYPES = {"qwen2": read_qwen2, "qwen2_5_vl": read_qwen2_5_vl}  # for files without `architectures`


@one_line(ModelConfigError)
def read_config(config: JsonObject) -> AnyConfig:
    """The typed configuration of a `config.json`. Raises ModelConfigError, which lists the supported architectures."""
    names = config.get("architectures") or []
    known = [_READERS[name] for name in names if name in _READERS]
    if not names and config.get("model_type") in _MODEL_TYPES:
        known = [_MODEL_TYPES[config["model_type"]]]
    if known:
        return known[0](config)
    found = ", ".join(names) or f"model_type {config.get('model_type')!r}"
    raise ModelConfigError(f"unsupported architecture {found}; supported are {', '.join(sorted(_READERS))}")


# Fields of `TextConfig` that have another name in config.json, with that name.
_TEXT_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}


def write_text(text: TextConfig) -> dict[str, object]:
    fields = {_TEXT_NAMES.get(name, name): value for name, value in vars(text).items() if name != "rope"}
    return {**fields, "hidden_act": "silu", "use_sliding_window": False, **write_rope(text.rope)}


def write_vision(vision: VisionConfig) -> dict[str, object]:
    fields = {name: value for name, value in vars(vision).items() if name != "full_attention_layers"}
    ticks = vision.tokens_per_second
    return {
        "model_type": "qwen2_5_vl",
        **fields,
        "hidden_act": "silu",
        "fullatt_block_indexes": list(vision.full_attention_layers),
        "spatial_patch_size": vision.patch_size,
        "in_chans": vision.in_channels,  # the published files' name; other readers accept this or `in_channels`
        "tokens_per_second": int(ticks) if ticks == int(ticks) else ticks,  # `transformers` insists on an integer
    }


def write_config(config: AnyConfig) -> dict[str, Any]:
    """The `config.json` dictionary of a configuration: the one that it was read from, if that still means the same."""
    source = json.loads(config.extra)
    if isinstance(config, Qwen2Config):
        if source and read_qwen2(source) == config:
            return source
        return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **write_text(config.text)}
    # The names of weights are a property of the weight files, not of config.json.
    if source and dataclasses.replace(read_qwen2_5_vl(source), names=config.names) == config:
        return source
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **write_text(config.text),
        "vision_config": write_vision(config.vision),
        **{name: getattr(config, name) for name in _TOKEN_IDS},
    }
