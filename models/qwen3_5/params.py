"""Reads and writes `config.json` and the names of weights of a Qwen3.5 checkpoint.

Reading adds three fields that transformers does not write and SGLang needs in exports: `full_attention_interval`,
`partial_rotary_factor` outside `rope_parameters`, and an empty `deepstack_visual_indexes`.
"""

import dataclasses
import json
from typing import Any

from sharding.kernels.delta_heads import DeltaHeads

from ..config import DecoderConfig, DeepVisionConfig, JsonObject, ModelConfigError, NameLayout, TextConfig
from ..hf_config import need, read_text, uninterleaved, write_text
from ..qwen2_5_vl.params import TOKEN_IDS
from ..qwen3_vl.params import read_vision, tower_names, write_vision
from ..tensor_names import PREFIXES, TensorName, Weights, decoder_names, name_weights

TOKENS = dict(zip(TOKEN_IDS, (248056, 248057, 248053, 248054), strict=True))  # the defaults of transformers
INTERVAL = 4
SHARE = "partial_rotary_factor"
# The names of the fields of `DeltaHeads` in config.json, with the defaults of transformers.
DELTA = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_size": ("linear_key_head_dim", 128),
    "value_size": ("linear_value_head_dim", 128),
}
KERNEL = 4  # tokens of the convolution
DELTA_LAYERS = {
    "layers.{}.input_layernorm": "delta_layers.delta_norm.scale",
    "layers.{}.linear_attn.in_proj_qkv": "delta_layers.delta.qkv",
    "layers.{}.linear_attn.in_proj_z": "delta_layers.delta.z",
    "layers.{}.linear_attn.in_proj_b": "delta_layers.delta.b",
    "layers.{}.linear_attn.in_proj_a": "delta_layers.delta.a",
    "layers.{}.linear_attn.conv1d": "delta_layers.delta.conv",
    "layers.{}.linear_attn.A_log": "delta_layers.delta.decay_log",
    "layers.{}.linear_attn.dt_bias": "delta_layers.delta.decay_bias",
    "layers.{}.linear_attn.norm": "delta_layers.delta.norm.scale",
    "layers.{}.linear_attn.out_proj": "delta_layers.delta.out",
    "layers.{}.post_attention_layernorm": "delta_layers.mlp_norm.scale",
    "layers.{}.mlp.gate_proj": "delta_layers.mlp.gate",
    "layers.{}.mlp.up_proj": "delta_layers.mlp.up",
    "layers.{}.mlp.down_proj": "delta_layers.mlp.down",
}


def read_text_model(config: JsonObject) -> DecoderConfig:
    text = _read_text(config, config)
    return DecoderConfig("qwen3_5_text", text, extra=json.dumps(_completed(config, text)))


def read_config(config: JsonObject) -> DecoderConfig:
    text_config = need(config, "text_config", "config.json", dict)
    vision_config = {"deepstack_visual_indexes": [], **need(config, "vision_config", "config.json", dict)}
    text, vision = _read_text(text_config, config), read_vision(vision_config)
    if vision.deepstack_layers:
        raise ModelConfigError(
            f"deepstack_visual_indexes {list(vision.deepstack_layers)} are not supported with Qwen3.5, which has none"
        )
    complete = {**config, "text_config": _completed(text_config, text), "vision_config": vision_config}
    return DecoderConfig(
        "qwen3_5",
        text,
        vision,
        **{**TOKENS, **{name: config[name] for name in TOKEN_IDS if config.get(name) is not None}},
        names=NameLayout.NESTED,
        extra=json.dumps(complete),
    )


def _completed(config: JsonObject, text: TextConfig) -> JsonObject:
    return {**config, "full_attention_interval": text.attention_interval, SHARE: text.rotated}


def _read_text(config: JsonObject, outer: JsonObject) -> TextConfig:
    where = "config.json" if config is outer else "text_config of config.json"
    kernel = config.get("linear_conv_kernel_dim", KERNEL)
    if kernel != KERNEL:
        raise ModelConfigError(f"linear_conv_kernel_dim={kernel!r} in {where} is not supported; supported is {KERNEL}")
    interval = _interval(config, where)
    rotated, text = _rotated(uninterleaved(config), where)
    text = {"head_dim": 256, **{name: value for name, value in text.items() if name != "layer_types"}}
    read = read_text(
        text, text if config is outer else outer, default_section=(11, 11, 10), rotated=rotated, head_norm=True
    )
    heads = {field: config.get(name, default) for field, (name, default) in DELTA.items()}
    for field, value in heads.items():
        if type(value) is not int or value < 1:
            raise ModelConfigError(f"{DELTA[field][0]}={str(value)[:50]!r} in {where} is no int of at least 1")
    try:
        delta = DeltaHeads(**heads)
    except ValueError as error:
        raise ModelConfigError(f"{where}: {error}") from None
    return dataclasses.replace(
        read,
        rope=dataclasses.replace(read.rope, interleaved=True),
        output_gate=True,
        zero_centred_norms=True,
        delta=delta,
        attention_interval=interval,
    )


def _rotated(text: JsonObject, where: str) -> tuple[float, JsonObject]:
    """Returns (the rotated share of a head, the settings without it), beside the rotary settings or among them."""
    result, found = dict(text), []
    for field in ("rope_parameters", "rope_scaling"):
        result[field] = dict(result.get(field) or {})
        found.append(result[field].pop(SHARE, None))
    found = {share for share in (*found, result.pop(SHARE, None)) if share is not None} or {0.25}
    if len(found) > 1:
        raise ModelConfigError(f"{where} has several values of {SHARE}: {sorted(found)}; keep one of them")
    (share,) = found
    if not isinstance(share, float | int) or not 0 < share <= 1:
        raise ModelConfigError(f"{SHARE}={share!r} in {where} must be above 0 and at most 1")
    return float(share), result


def _interval(config: JsonObject, where: str) -> int:
    """The n for which every n-th layer has full attention. Raises ModelConfigError if there is no such number."""
    kinds = config.get("layer_types")
    interval = config.get("full_attention_interval", INTERVAL)
    if kinds:
        known = {"full_attention", "linear_attention"}
        if odd := sorted(set(kinds) - known):
            raise ModelConfigError(f"layer_types {', '.join(odd)} in {where} are not supported; supported are {known}")
        interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
        ordered = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(len(kinds))]
        if list(kinds) != ordered or len(kinds) != config.get("num_hidden_layers"):
            raise ModelConfigError(
                f"layer_types in {where} must name num_hidden_layers layers, with full_attention at equal distances"
            )
    if type(interval) is not int or interval < 2:
        raise ModelConfigError(f"full_attention_interval={interval!r} in {where} must be an int of at least 2")
    return interval


def write_text_model(config: DecoderConfig) -> dict[str, Any]:
    return _write_text(config.text)


def write_config(config: DecoderConfig) -> dict[str, Any]:
    assert isinstance(config.vision, DeepVisionConfig)
    return {
        "text_config": {"model_type": "qwen3_5_text", **_write_text(config.text)},
        "vision_config": {**write_vision(config.vision), "model_type": "qwen3_5_vision"},
        "tie_word_embeddings": config.text.tie_word_embeddings,
        **{name: getattr(config, name) for name in TOKEN_IDS},
    }


def _write_text(text: TextConfig) -> dict[str, Any]:
    kinds = ["full_attention" if i in text.attention_layers else "linear_attention" for i in range(text.num_layers)]
    return {
        **write_text(text),
        "layer_types": kinds,
        "full_attention_interval": text.attention_interval,
        SHARE: text.rotated,
        "linear_conv_kernel_dim": KERNEL,
        **{name: getattr(text.delta, field) for field, (name, _) in DELTA.items()},
    }


def text_model_names(config: DecoderConfig, weights: Weights) -> list[TensorName]:
    return _text_names(config, weights, "model.")


def tensor_names(config: DecoderConfig, weights: Weights) -> list[TensorName]:
    """Returns the name of every weight of the model, by the layout `config.names`."""
    return [*tower_names(config, weights), *_text_names(config, weights, PREFIXES[config.names][1])]


def _text_names(config: DecoderConfig, weights: Weights, prefix: str) -> list[TensorName]:
    names = decoder_names(weights, prefix, config.text.attention_layers)
    for entry in name_weights(DELTA_LAYERS, prefix, weights, config.text.delta_layers):
        if entry.path[-1] in ("decay_log", "decay_bias"):
            entry = dataclasses.replace(entry, name=entry.name.removesuffix(".weight"))
        if entry.path[-1] == "conv":
            entry = dataclasses.replace(entry, inputs=0, disk_shape=(entry.shape[0], 1, KERNEL))
        names.append(entry)
    return names
