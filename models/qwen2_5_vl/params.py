"""Names of Qwen2.5-VL's weights in Hugging Face checkpoints, in both layouts."""

import dataclasses
from collections.abc import Iterable

from ..config import NameLayout, Qwen25VLConfig
from ..tensor_names import TensorName, Weights, decoder_names, name_weights

PREFIXES = {  # prefixes of the tower and of the decoder
    NameLayout.FLAT: ("visual.", "model."),
    NameLayout.NESTED: ("model.visual.", "model.language_model."),
}
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


def name_layout(names: Iterable[str]) -> NameLayout:
    """The layout that a checkpoint with these tensor names has."""
    nested = any(name.startswith(PREFIXES[NameLayout.NESTED]) for name in names)
    return NameLayout.NESTED if nested else NameLayout.FLAT


def tensor_names(config: Qwen25VLConfig, weights: Weights) -> list[TensorName]:
    """Every weight of the model, each exactly once, under the names of `config.names`."""
    tower, decoder = PREFIXES[config.names]
    vision = config.vision
    size, frames = vision.patch_size, vision.temporal_patch_size
    kernel, *tower_names = name_weights(TOWER, tower, weights)
    convolution = (vision.hidden_size, vision.in_channels, frames, size, size)
    return [dataclasses.replace(kernel, disk_shape=convolution), *tower_names, *decoder_names(weights, decoder)]
