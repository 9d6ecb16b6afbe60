"""`config.json` of Hugging Face, both generations: flat and nested text settings. Rotary embeddings: `hf_rope`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from .config import AnyConfig, ModelConfigError, NameLayout, Qwen2Config, Qwen25VLConfig, TextConfig, VisionConfig
from .hf_rope import read_rope, read_vision_theta, write_rope


def _need(config: Mapping[str, Any], name: str, where: str) -> Any:
    if config.get(name) is None:
        raise ModelConfigError(f"{where} has no {name!r}")
    return config[name]


# Settings that change what other programs compute, and the value that means the computation done here.
_DONE_HERE: dict[str, Any] = {
    "attention_bias": True,  # on q, k and v, as in every published checkpoint of these architectures
    "qkv_bias": True,
    "mlp_bias": False,
    "is_causal": True,
    "attention_dropout": 0,
    "partial_rotary_factor": 1,
    "dual_chunk_attention_config": None,
}


def _refuse_quantised(config: Mapping[str, Any], where: str) -> None:
    for name in ("quantization_config", "compression_config"):
        if (found := config.get(name)) is not None:
            method = found.get("quant_method", "") if isinstance(found, Mapping) else found
            raise ModelConfigError(
                f"{name} ({method}) in {where} is not supported, weights must be full-precision ones: take the "
                "checkpoint that was not quantised, or remove the field if these weights never were"
            )


def _refuse_unsupported(config: Mapping[str, Any], where: str) -> None:
    """Raises ModelConfigError, naming the field, for what `config` asks of the decoder and would not get."""
    _refuse_quantised(config, where)
    if config.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(f"hidden_act {config['hidden_act']!r} in {where} is not supported; supported is silu")
    for name, done in _DONE_HERE.items():
        if config.get(name, done) not in (None, done):
            raise ModelConfigError(f"{name}={config[name]!r} in {where} is not supported; supported is {done!r}")


def _refuse_sliding_windows(config: Mapping[str, Any], layers: int, default_full_layers: int, where: str) -> None:
    """Defaults are those of transformers, where a window of 4096 slides in layers from `max_window_layers` on."""
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
    config: Mapping[str, Any],
    outer: Mapping[str, Any],
    *,
    default_theta: float = 10000.0,
    default_eps: float = 1e-6,
    default_section: tuple[int, ...] = (),
    default_full_layers: int = 28,
) -> TextConfig:
    """The decoder's settings in `config`; `outer` is the whole file, where tying may be said instead.

    The defaults are what transformers takes for the architecture where the file says nothing.
    """
    where = "config.json" if config is outer else "text_config of config.json"
    _refuse_quantised(outer, "config.json")
    _refuse_unsupported(config, where)
    layers, heads = _need(config, "num_hidden_layers", where), _need(config, "num_attention_heads", where)
    _refuse_sliding_windows(config, layers, default_full_layers, where)
    rope = read_rope(config, default_theta=default_theta, default_section=default_section)
    beside = {name: outer[name] for name in ("rope_scaling", "rope_parameters", "rope_theta") if outer.get(name)}
    if read_rope({**config, **beside}, default_theta=default_theta, default_section=default_section) != rope:
        raise ModelConfigError(f"{', '.join(beside)} of config.json contradict {where}; keep what stands there")
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
        rope=rope,
        tie_word_embeddings=bool(outer.get("tie_word_embeddings") or config.get("tie_word_embeddings")),
        max_position_embeddings=config.get("max_position_embeddings", 32768),
        initializer_range=float(config.get("initializer_range", 0.02)),
    )


def read_vision(config: Mapping[str, Any]) -> VisionConfig:
    where = "vision_config of config.json"
    _refuse_quantised(config, where)
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
        rope_theta=read_vision_theta(config),
        initializer_range=float(config.get("initializer_range", 0.02)),
    )


def read_qwen2(config: Mapping[str, Any]) -> Qwen2Config:
    return Qwen2Config(text=read_text(config, config), extra=json.dumps(config))


def read_qwen2_5_vl(config: Mapping[str, Any]) -> Qwen25VLConfig:
    text = config.get("text_config") or config
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return Qwen25VLConfig(
        text=read_text(
            text,
            config,
            default_theta=1e6,
            default_eps=1e-5,
            default_section=(16, 24, 24),
            default_full_layers=80,
        ),
        vision=read_vision(_need(config, "vision_config", "config.json")),
        **{name: config[name] for name in ids if config.get(name) is not None},
        names=NameLayout.FLAT,
        extra=json.dumps(config),
    )


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
        "rope_theta": vision.rope_theta,
        "initializer_range": vision.initializer_range,
    }


def write_config(config: AnyConfig) -> dict[str, Any]:
    """A `config.json` dictionary; what `config` was read from, with every typed field brought up to date."""
    return write_qwen2(config) if isinstance(config, Qwen2Config) else write_qwen2_5_vl(config)


def write_qwen2(config: Qwen2Config) -> dict[str, Any]:
    source = json.loads(config.extra)
    if source and read_qwen2(source) == config:
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
