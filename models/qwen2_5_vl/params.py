"""Names of Qwen2.5-VL's weights in Hugging Face checkpoints, in both layouts."""

from __future__ import annotations

from collections.abc import Iterable

from ..config import NameLayout, Qwen25VLConfig, VisionConfig
from ..tensor_names import TensorName, decoder_names, linear, vector

PREFIXES = {  # where the tower and the decoder stand
    NameLayout.FLAT: ("visual", "model"),
    NameLayout.NESTED: ("model.visual", "model.language_model"),
}


def name_layout(names: Iterable[str]) -> NameLayout:
    """The layout that a checkpoint with these tensor names has."""
    nested = any(name.startswith(("model.visual.", "model.language_model.")) for name in names)
    return NameLayout.NESTED if nested else NameLayout.FLAT


def tower_names(vision: VisionConfig, prefix: str) -> list[TensorName]:
    """Every weight of the vision tower once; `prefix` is where the tower stands in the checkpoint."""
    D, F, N, H = vision.hidden_size, vision.intermediate_size, vision.num_heads, vision.head_dim
    X = vision.patch_values
    inner = D * vision.merge_unit
    size, frames = vision.patch_size, vision.temporal_patch_size
    block = f"{prefix}.blocks.{{}}"
    merger = f"{prefix}.merger"
    names = [
        TensorName(
            f"{prefix}.patch_embed.proj.weight",
            ("visual", "patch_embed", "kernel"),
            (X, D),
            inputs=1,
            disk_shape=(D, vision.in_channels, frames, size, size),  # a 3-D convolution
        ),
        vector(f"{block}.norm1.weight", ("visual", "blocks", "attention_norm", "scale"), (D,)),
        linear(f"{block}.attn.qkv", ("visual", "blocks", "qkv"), (D, 3, N, H)),
        vector(f"{block}.attn.qkv.bias", ("visual", "blocks", "qkv_bias"), (3, N, H)),
        linear(f"{block}.attn.proj", ("visual", "blocks", "o"), (N, H, D), inputs=2),
        vector(f"{block}.attn.proj.bias", ("visual", "blocks", "o_bias"), (D,)),
        vector(f"{block}.norm2.weight", ("visual", "blocks", "mlp_norm", "scale"), (D,)),
        vector(f"{merger}.ln_q.weight", ("visual", "merger", "norm", "scale"), (D,)),
        linear(f"{merger}.mlp.0", ("visual", "merger", "up"), (inner, inner)),
        vector(f"{merger}.mlp.0.bias", ("visual", "merger", "up_bias"), (inner,)),
        linear(f"{merger}.mlp.2", ("visual", "merger", "down"), (inner, vision.out_hidden_size)),
        vector(f"{merger}.mlp.2.bias", ("visual", "merger", "down_bias"), (vision.out_hidden_size,)),
    ]
    for part, shape in (("gate", (D, F)), ("up", (D, F)), ("down", (F, D))):
        names.append(linear(f"{block}.mlp.{part}_proj", ("visual", "blocks", "mlp", part), shape))
        names.append(vector(f"{block}.mlp.{part}_proj.bias", ("visual", "blocks", "mlp", f"{part}_bias"), shape[1:]))
    return names


def tensor_names(config: Qwen25VLConfig) -> list[TensorName]:
    """Every weight of the model, each exactly once, under the names of `config.names`."""
    tower, decoder = PREFIXES[config.names]
    return tower_names(config.vision, tower) + decoder_names(config.text, decoder)
