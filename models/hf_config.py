"""Reads and writes a `config.json` of Hugging Face, with flat or nested text settings.

The rotary settings are in `rope_parameters` (new), or in `rope_scaling` and `rope_theta` (old), as in transformers 5.23
(`modeling_rope_utils`). A rotary setting that changes anything, but that this file does not read, is refused."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from .config import DecoderConfig, JsonObject, ModelConfigError, RopeConfig, TextConfig

_ROPE_FIELDS = ("rope_scaling", "rope_parameters")
_ALWAYS = {"type", "rope_type", "rope_theta", "original_max_position_embeddings"}
_YARN = {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
# The settings that each rope type reads; transformers calls the vision tower's type `axial`.
_READ = {
    "default": _ALWAYS | {"mrope_section"},
    "linear": _ALWAYS | {"mrope_section", "factor"},
    "yarn": _ALWAYS | {"mrope_section"} | _YARN,
}
_READ_BY_VISION = {"default": _ALWAYS, "axial": _ALWAYS}


def need(config: JsonObject, name: str, where: str, kind: type = int) -> Any:
    value = config.get(name)
    if type(value) is not kind or not value:
        wrong = f"{name}={str(value)[:50]!r}, which must be a {kind.__name__} that is not 0"
        raise ModelConfigError(f"{where} has no {name!r}" if value is None else f"{where} has {wrong}")
    return value


# The only supported value of each setting. Under this value, this decoder computes what other programs compute.
_SUPPORTED: dict[str, bool | int | None] = {
    "mlp_bias": False,
    "is_causal": True,
    "attention_dropout": 0,
    "partial_rotary_factor": 1,
    "dual_chunk_attention_config": None,
}
_QWEN2_BIASES: dict[str, bool] = {"attention_bias": True, "qkv_bias": True}  # q, k and v always have biases


def refuse_quantised(config: JsonObject, where: str) -> None:
    for name in ("quantization_config", "compression_config"):
        if (found := config.get(name)) is not None:
            method = found.get("quant_method", "") if isinstance(found, dict) else found
            raise ModelConfigError(
                f"{name} ({method}) in {where} is not supported, weights must be full-precision ones: take the "
                "checkpoint that was not quantised, or remove the field if these weights are not quantised"
            )


def _refuse_unsupported(config: JsonObject, where: str, head_norm: bool) -> None:
    """Raises ModelConfigError, naming the field, for a setting under which the decoder would compute wrongly."""
    refuse_quantised(config, where)
    if config.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(f"hidden_act {config['hidden_act']!r} in {where} is not supported; supported is silu")
    for name, value in (_SUPPORTED | ({"qkv_bias": False} if head_norm else _QWEN2_BIASES)).items():
        if config.get(name, value) not in (None, value):
            raise ModelConfigError(f"{name}={config[name]!r} in {where} is not supported; supported is {value!r}")


def _refuse_sliding_windows(config: JsonObject, layers: int, default_full_layers: int, where: str) -> None:
    """Raises ModelConfigError for attention within a sliding window. Defaults are those of transformers: windows of
    4096 tokens, in layers from `max_window_layers` on."""
    full = config.get("max_window_layers")
    full = default_full_layers if full is None else full
    if config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None and full < layers:
        raise ModelConfigError(f"sliding-window attention is not supported (use_sliding_window in {where})")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise ModelConfigError(f"layer_types {', '.join(sorted(kinds))} in {where}: only full_attention is supported")


def _rope_settings(config: JsonObject, field: str, read: Mapping[str, set[str]]) -> tuple[str, JsonObject]:
    """(rope type, settings) of a field of `config`. `read` has the settings that each supported type reads."""
    rope = config.get(field) or {}
    kinds = ["default" if name == "mrope" else name for name in (rope.get("rope_type"), rope.get("type")) if name]
    if len(set(kinds)) > 1 and rope["type"] != "mrope":
        raise ModelConfigError(f"{field} has the types {rope['rope_type']!r} and {rope['type']!r}; keep one of them")
    kind = kinds[0] if kinds else "default"
    if kind not in read:
        raise ModelConfigError(f"{field}: rope type {kind!r} is not supported; supported are {', '.join(read)}")
    for name in sorted(rope.keys() - read[kind]):
        value = rope[name]
        scales_by_nothing = name.endswith("factor") and value == 1 and value is not True
        if not (value is None or value is False or scales_by_nothing):
            raise ModelConfigError(
                f"{field}: {name}={value!r} is not supported with rope type {kind!r}, which reads "
                f"{', '.join(sorted(read[kind]))}"
            )
    return kind, rope


def _theta(config: JsonObject, rope: JsonObject, default: float) -> float:
    theta = rope.get("rope_theta")
    theta = config.get("rope_theta") if theta is None else theta
    return float(default if theta is None else theta)


def _rope_fields(config: JsonObject) -> list[str]:
    """The fields of `config` that hold rotary settings; `rope_parameters` if there is no such field."""
    return [name for name in _ROPE_FIELDS if config.get(name)] or ["rope_parameters"]


def uninterleaved(text: JsonObject) -> JsonObject:
    """The text settings without `mrope_interleaved`, for architectures that always interleave the frequencies of their
    rotary embedding. Raises ModelConfigError if it is false."""
    result = dict(text)
    for field in _ROPE_FIELDS:
        rope = dict(result.get(field) or {})
        if rope.pop("mrope_interleaved", True) is not True:
            raise ModelConfigError(f"{field}: mrope_interleaved=false is not supported; supported is true")
        result[field] = rope
    return result


def read_rope(
    config: JsonObject, outer: JsonObject, *, default_theta: float, default_section: tuple[int, ...] = ()
) -> RopeConfig:
    """The decoder's rotary embedding in `config`. `outer` is the complete file, whose top may repeat the settings.
    Raises ModelConfigError for a type or setting that is not supported, and for fields that contradict each other."""
    readings = {
        field if config.get(field) else f"the default of {field}": _read_rope_field(
            config, field, default_theta, default_section
        )
        for field in _rope_fields(config)
    }
    rope = next(iter(readings.values()))
    if outer is not config:
        # transformers reads only `text_config`. We read the top level, and `text_config` for a setting that it lacks.
        repeated = {name: outer[name] for name in (*_ROPE_FIELDS, "rope_theta") if outer.get(name)}
        beside = {**config, "rope_theta": rope.theta, **repeated}
        readings = {f"{field} of text_config": reading for field, reading in readings.items()}
        if "rope_theta" in repeated:
            readings["rope_theta of config.json"] = dataclasses.replace(rope, theta=float(outer["rope_theta"]))
        for field in filter(repeated.get, _ROPE_FIELDS):
            readings[f"{field} of config.json"] = _read_rope_field(beside, field, default_theta, default_section)
    first, *further = readings
    for field in further:
        if differing := [name for name, value in vars(readings[field]).items() if value != getattr(rope, name)]:
            raise ModelConfigError(f"{first} and {field} contradict each other ({', '.join(differing)}); keep one")
    return rope


def _read_rope_field(
    config: JsonObject, field: str, default_theta: float, default_section: tuple[int, ...]
) -> RopeConfig:
    kind, rope = _rope_settings(config, field, _READ)
    theta = _theta(config, rope, default_theta)
    section = tuple(rope.get("mrope_section") or default_section)
    if kind == "default":
        return RopeConfig(theta=theta, mrope_section=section)
    longest = config.get("max_position_embeddings", 32768)
    # transformers prefers the field beside the rope settings to the field within them
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    factor = rope.get("factor")
    if factor is None and kind == "yarn" and original:
        factor = longest / original
    if factor is None or factor <= 0:
        raise ModelConfigError(f"{field} of type {kind!r} needs a positive factor, not {factor!r}")
    if kind == "linear":
        return RopeConfig(theta=theta, mrope_section=section, kind=kind, factor=float(factor))
    attention_factor = rope.get("attention_factor")
    return RopeConfig(
        theta=theta,
        mrope_section=section,
        kind=kind,
        factor=float(factor),
        original_max_positions=int(original or longest),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=float(rope.get("mscale") or 0.0),
        mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
        truncate=bool(rope.get("truncate", True)),
    )


def _vision_theta(config: JsonObject) -> float:
    settings = {field: _rope_settings(config, field, _READ_BY_VISION)[1] for field in _rope_fields(config)}
    thetas = {field: _theta(config, rope, 10000.0) for field, rope in settings.items()}
    if len(set(thetas.values())) > 1:
        raise ModelConfigError(f"{' and '.join(thetas)} of vision_config contradict each other; keep one of them")
    return next(iter(thetas.values()))


def read_tower(config: JsonObject, activation: str, *more: str) -> dict[str, Any]:
    """The fields of a `VisionConfig` that every architecture reads from `vision_config`, and the fields `more` that the
    file has. Raises ModelConfigError for a missing field, quantised weights, and another activation."""
    where = "vision_config of config.json"
    refuse_quantised(config, where)
    if config.get("hidden_act", activation) != activation:
        raise ModelConfigError(f"vision hidden_act {config['hidden_act']!r} is not supported; only {activation} is")
    needed = ("hidden_size", "intermediate_size", "depth", "num_heads", "out_hidden_size")
    optional = ("patch_size", "temporal_patch_size", "spatial_merge_size", *more)
    return {
        **{name: need(config, name, where) for name in needed},
        **{name: config[name] for name in optional if config.get(name) is not None},
        "rope_theta": _vision_theta(config),
        "initializer_range": float(config.get("initializer_range", 0.02)),
    }


def read_text(
    config: JsonObject,
    outer: JsonObject,
    *,
    default_theta: float = 10000.0,
    default_eps: float = 1e-6,
    default_section: tuple[int, ...] = (),
    default_full_layers: int = 28,
    rotated: float = 1.0,
    head_norm: bool = False,
) -> TextConfig:
    """The decoder's settings in `config`, with the defaults of transformers for the architecture. `outer` is the
    complete file, whose top may say that weights are tied. `rotated` is the share of each head that is rotated. Only
    Qwen3 and later models (`head_norm`) have `attention_bias` as a setting."""
    where = "config.json" if config is outer else "text_config of config.json"
    refuse_quantised(outer, "config.json")
    _refuse_unsupported(config, where, head_norm)
    layers, heads = need(config, "num_hidden_layers", where), need(config, "num_attention_heads", where)
    _refuse_sliding_windows(config, layers, default_full_layers, where)
    hidden = need(config, "hidden_size", where)
    bias = config.get("attention_bias") or False
    if head_norm and bias is not True and bias is not False:
        raise ModelConfigError(f"{where} has attention_bias {bias!r}; it must be true or false")
    qwen3_bias = head_norm and bias
    rope = read_rope(config, outer, default_theta=default_theta, default_section=default_section)
    return TextConfig(
        vocab_size=need(config, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=need(config, "intermediate_size", where),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or (128 if head_norm else hidden // heads),
        qkv_bias=qwen3_bias or not head_norm,
        o_bias=qwen3_bias,
        head_norm=head_norm,
        rms_norm_eps=float(config.get("rms_norm_eps", default_eps)),
        rotated=rotated,
        rope=rope,
        tie_word_embeddings=bool(outer.get("tie_word_embeddings") or config.get("tie_word_embeddings")),
        max_position_embeddings=config.get("max_position_embeddings", 32768),
        initializer_range=float(config.get("initializer_range", 0.02)),
    )


def read_qwen2(config: JsonObject) -> DecoderConfig:
    return DecoderConfig("qwen2", read_text(config, config), extra=json.dumps(config))


def read_qwen3(config: JsonObject) -> DecoderConfig:
    return DecoderConfig("qwen3", read_text(config, config, head_norm=True), extra=json.dumps(config))


# Fields of `TextConfig` that have another name in config.json, with that name.
_TEXT_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}


def write_rope(rope: RopeConfig) -> dict[str, object]:
    """The fields `rope_theta` and `rope_scaling`, the older form, which every reader understands."""
    scaling: dict[str, object] = {}
    if rope.mrope_section:
        kind = {"rope_type": "default", "mrope_interleaved": True} if rope.interleaved else {"type": "mrope"}
        scaling = {**kind, "mrope_section": list(rope.mrope_section)}
    if rope.kind != "default":
        scaling |= {"type": rope.kind, "rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": rope.original_max_positions,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
        }
        scaling |= {} if rope.attention_factor is None else {"attention_factor": rope.attention_factor}
        scaling |= {name: value for name in ("mscale", "mscale_all_dim") if (value := getattr(rope, name))}
    return {"rope_theta": rope.theta, "rope_scaling": scaling or None}


def write_text(text: TextConfig) -> dict[str, object]:
    unnamed = {"rope", "qkv_bias", "o_bias", "head_norm", "output_gate", "zero_centred_norms"}
    unnamed |= {"delta", "attention_interval", "rotated"}
    fields = {_TEXT_NAMES.get(name, name): value for name, value in vars(text).items() if name not in unnamed}
    if text.head_norm:
        fields["attention_bias"] = text.o_bias
    return {**fields, "hidden_act": "silu", "use_sliding_window": False, **write_rope(text.rope)}


def write_text_model(config: DecoderConfig) -> dict[str, object]:
    return write_text(config.text)
