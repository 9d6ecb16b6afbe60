"""The files of a Qwen2.5-VL checkpoint: `config.json`, and the names of all weights in both layouts."""

import dataclasses
import json

from ..config import DecoderConfig, JsonObject, VisionConfig
from ..hf_config import need, read_text, read_tower, write_text
from ..tensor_names import PREFIXES, TensorName, Weights, decoder_names, name_weights

TOWER = {
    "patch_embed.proj": "visual.patch_embed.kernel",
    "blocks.{}.norm1": "visual.blocks.attention_norm.scale",
    "blocks.{}.attn.qkv": "visual.blocks.qkv",
    "blocks.{}.attn.proj": "visual.blocks.o",
    "blocks.{}.norm2": "visual.blocks.mlp_norm.scale",
    "blocks.{}.mlp.gate_proj": "visual.blocks.mlp.gate",
    "blocks.{}.mlp.up_proj": "visual.blocks.mlp.up",
    "blocks.{}.mlp.down_proj": "visual.blocks.mlp.down",
    "merger.ln_q": "visual.merger.norm.scale",
    "merger.mlp.0": "visual.merger.up",
    "merger.mlp.2": "visual.merger.down",
}
TOKEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def read_config(config: JsonObject) -> DecoderConfig:
    text, vision = config.get("text_config") or config, need(config, "vision_config", "config.json", dict)
    return DecoderConfig(
        "qwen2_5_vl",
        text=read_text(
            text, config, default_theta=1e6, default_eps=1e-5, default_section=(16, 24, 24), default_full_layers=80
        ),
        vision=VisionConfig(
            **read_tower(vision, "silu", "window_size"),
            full_attention_layers=tuple(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
            in_channels=vision.get("in_channels") or vision.get("in_chans") or 3,
            tokens_per_second=float(vision.get("tokens_per_second", 4)),
        ),
        **{name: config[name] for name in TOKEN_IDS if config.get(name) is not None},
        extra=json.dumps(config),
    )


def write_config(config: DecoderConfig) -> dict[str, object]:
    assert config.vision is not None
    return {
        **write_text(config.text),
        "vision_config": write_vision(config.vision),
        **{name: getattr(config, name) for name in TOKEN_IDS},
    }


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


def tensor_names(config: DecoderConfig, weights: Weights) -> list[TensorName]:
    """Every weight of the model, each exactly once, under the names of `config.names`."""
    assert config.vision is not None
    tower, decoder = PREFIXES[config.names]
    kernel, *tower_names = name_weights(TOWER, tower, weights)
    kernel = dataclasses.replace(kernel, disk_shape=config.vision.kernel_shape)
    return [kernel, *tower_names, *decoder_names(weights, decoder)]
