"""`config.json` of Hugging Face, both generations: flat and nested text settings, `rope_scaling`, `rope_parameters`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from .config import (
    ModelConfigError,
    NameLayout,
    Qwen2Config,
    Qwen25VLConfig,
    RopeConfig,
    TextConfig,
    VisionConfig,
)

ROPE_KINDS = ("default", "mrope", "linear", "yarn")


def _need(config: Mapping[str, Any], name: str, where: str) -> Any:
    if config.get(name) is None:
        raise ModelConfigError(f"{where} has no {name!r}")
    return config[name]


def read_rope(config: Mapping[str, Any], *, default_theta: float) -> RopeConfig:
    """From `rope_parameters` (new) or `rope_scaling` and `rope_theta` (old); whichever the file has."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelConfigError(f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    original = rope.get("original_max_position_embeddings", config.get("max_position_embeddings", 32768))
    return RopeConfig(
        theta=float(default_theta if theta is None else theta),
        mrope_section=tuple(rope.get("mrope_section") or ()),
        kind="default" if kind == "mrope" else kind,
        factor=float(rope.get("factor") or 1.0),
        original_max_positions=int(original) if kind == "yarn" else 0,
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=float(rope.get("attention_factor") or 0.0),
    )


def read_text(
    config: Mapping[str, Any],
    outer: Mapping[str, Any],
    *,
    default_theta: float = 10000.0,
    default_eps: float = 1e-6,
) -> TextConfig:
    """The decoder's settings in `config`; `outer` is the whole file, where tying may be said instead."""
    where = "config.json" if config is outer else "text_config of config.json"
    if config.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(f"hidden_act {config['hidden_act']!r} is not supported; supported is silu")
    layers, heads = _need(config, "num_hidden_layers", where), _need(config, "num_attention_heads", where)
    slides = config.get("use_sliding_window") and config.get("max_window_layers", layers) < layers
    if slides or "sliding_attention" in (config.get("layer_types") or ()):
        raise ModelConfigError("sliding-window attention in the decoder is not supported (use_sliding_window)")
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
        rope=read_rope(config, default_theta=default_theta),
        tie_word_embeddings=bool(outer.get("tie_word_embeddings") or config.get("tie_word_embeddings")),
        max_position_embeddings=config.get("max_position_embeddings", 32768),
        initializer_range=float(config.get("initializer_range", 0.02)),
    )


def read_vision(config: Mapping[str, Any]) -> VisionConfig:
    where = "vision_config of config.json"
    if config.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(f"vision hidden_act {config['hidden_act']!r} is not supported; supported is silu")
    return VisionConfig(
        hidden_size=_need(config, "hidden_size", where),
        intermediate_size=_need(config, "intermediate_size", where),
        depth=_need(config, "depth", where),
        num_heads=_need(config, "num_heads", where),
        out_hidden_size=_need(config, "out_hidden_size", where),
        full_attention_layers=tuple(config.get("fullatt_block_indexes", (7, 15, 23, 31))),
        patch_size=config.get("patch_size", 14),
        temporal_patch_size=config.get("temporal_patch_size", 2),
        spatial_merge_size=config.get("spatial_merge_size", 2),
        window_size=config.get("window_size", 112),
        in_channels=config.get("in_channels") or config.get("in_chans") or 3,
        tokens_per_second=float(config.get("tokens_per_second", 4)),
        rope_theta=float((config.get("rope_parameters") or {}).get("rope_theta", 10000.0)),
        initializer_range=float(config.get("initializer_range", 0.02)),
    )


def read_qwen2_5_vl(config: Mapping[str, Any]) -> Qwen25VLConfig:
    text = config.get("text_config") or config
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return Qwen25VLConfig(
        text=read_text(text, config, default_theta=1e6, default_eps=1e-5),
        vision=read_vision(_need(config, "vision_config", "config.json")),
        **{name: config[name] for name in ids if config.get(name) is not None},
        names=NameLayout.FLAT,
        extra=json.dumps(config),
    )


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`: the older form, which every reader understands."""
    scaling: dict[str, Any] = {}
    if rope.mrope_section:
        scaling = {"type": "mrope", "mrope_section": list(rope.mrope_section)}
    if rope.kind != "default":
        scaling |= {"type": rope.kind, "rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": rope.original_max_positions,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
        }
        if rope.attention_factor:
            scaling["attention_factor"] = rope.attention_factor
    return {"rope_theta": rope.theta, "rope_scaling": scaling or None}


def write_text(text: TextConfig) -> dict[str, Any]:
    return {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_hidden_layers": text.num_layers,
        "num_attention_heads": text.num_heads,
        "num_key_value_heads": text.num_kv_heads,
        "head_dim": text.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": text.rms_norm_eps,
        "tie_word_embeddings": text.tie_word_embeddings,
        "max_position_embeddings": text.max_position_embeddings,
        "initializer_range": text.initializer_range,
        "use_sliding_window": False,
        **write_rope(text.rope),
    }


def _whole(number: float) -> float | int:
    return int(number) if number == int(number) else number


def write_vision(vision: VisionConfig) -> dict[str, Any]:
    return {
        "model_type": "qwen2_5_vl",
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.intermediate_size,
        "depth": vision.depth,
        "num_heads": vision.num_heads,
        "hidden_act": "silu",
        "out_hidden_size": vision.out_hidden_size,
        "fullatt_block_indexes": list(vision.full_attention_layers),
        "patch_size": vision.patch_size,
        "spatial_patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "spatial_merge_size": vision.spatial_merge_size,
        "window_size": vision.window_size,
        "in_channels": vision.in_channels,
        "in_chans": vision.in_channels,  # the name in the published files; other readers look for either
        "tokens_per_second": _whole(vision.tokens_per_second),  # `transformers` insists on an integer
        "initializer_range": vision.initializer_range,
    }


def write_qwen2(config: Qwen2Config) -> dict[str, Any]:
    source = json.loads(config.extra)
    if source and Qwen2Config.from_hf(source) == config:
        return source
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **write_text(config.text)}


def write_qwen2_5_vl(config: Qwen25VLConfig) -> dict[str, Any]:
    source = json.loads(config.extra)
    # How weights are named is a property of the weight files, not of config.json.
    if source and dataclasses.replace(read_qwen2_5_vl(source), names=config.names) == config:
        return source
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **write_text(config.text),
        "vision_config": write_vision(config.vision),
        "image_token_id": config.image_token_id,
        "video_token_id": config.video_token_id,
        "vision_start_token_id": config.vision_start_token_id,
        "vision_end_token_id": config.vision_end_token_id,
    }
