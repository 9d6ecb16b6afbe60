"""The files of a Qwen3-VL checkpoint: `config.json`, and the names of all weights."""

import dataclasses
import json
import math

from ..config import DecoderConfig, DeepVisionConfig, JsonObject, ModelConfigError, NameLayout
from ..hf_config import need, read_text, read_tower, uninterleaved, write_text
from ..qwen2_5_vl.params import TOKEN_IDS
from ..tensor_names import PREFIXES, TensorName, Weights, decoder_names, name_weights

EMBEDDING = {"patch_embed.proj": "patch_embed.kernel", "pos_embed": "positions.table"}
BLOCK = {
    "norm1": "attention_norm.scale",
    "attn.qkv": "qkv",
    "attn.proj": "o",
    "norm2": "mlp_norm.scale",
    "mlp.linear_fc1": "mlp.up",
    "mlp.linear_fc2": "mlp.down",
}
MERGER = {"norm": "norm.scale", "linear_fc1": "up", "linear_fc2": "down"}
ACTIVATION = "gelu_pytorch_tanh"


def read_config(config: JsonObject) -> DecoderConfig:
    text = uninterleaved(need(config, "text_config", "config.json", dict))
    read = read_text(text, config, default_theta=5e5, default_section=(24, 20, 20), head_norm=True)
    return DecoderConfig(
        "qwen3_vl",
        text=dataclasses.replace(read, rope=dataclasses.replace(read.rope, interleaved=True)),
        vision=read_vision(need(config, "vision_config", "config.json", dict)),
        **{name: config[name] for name in TOKEN_IDS if config.get(name) is not None},
        names=NameLayout.NESTED,
        extra=json.dumps(config),
    )


def read_vision(config: JsonObject) -> DeepVisionConfig:
    fields = read_tower(config, ACTIVATION, "in_channels")
    positions = config.get("num_position_embeddings", 2304)
    side = math.isqrt(positions)
    if side**2 != positions:
        raise ModelConfigError(f"num_position_embeddings={positions} in vision_config of config.json is no square")
    deepstack = tuple(config.get("deepstack_visual_indexes", (8, 16, 24)))
    return DeepVisionConfig(**fields, position_grid=side, deepstack_layers=deepstack)


def write_config(config: DecoderConfig) -> dict[str, object]:
    assert isinstance(config.vision, DeepVisionConfig)
    return {
        "text_config": {"model_type": "qwen3_vl_text", **write_text(config.text)},
        "vision_config": write_vision(config.vision),
        "tie_word_embeddings": config.text.tie_word_embeddings,
        **{name: getattr(config, name) for name in TOKEN_IDS},
    }


def write_vision(vision: DeepVisionConfig) -> dict[str, object]:
    ours = {"position_grid", "deepstack_layers", "full_attention_layers", "window_size", "tokens_per_second"}
    return {
        "model_type": "qwen3_vl",
        **{name: value for name, value in vars(vision).items() if name not in ours},
        "hidden_act": ACTIVATION,
        "num_position_embeddings": vision.position_grid**2,
        "deepstack_visual_indexes": list(vision.deepstack_layers),
    }


def tensor_names(config: DecoderConfig, weights: Weights) -> list[TensorName]:
    """Every weight of the model, each exactly once, under the names of `config.names`."""
    return [*tower_names(config, weights), *decoder_names(weights, PREFIXES[config.names][1])]


def tower_names(config: DecoderConfig, weights: Weights) -> list[TensorName]:
    """Every weight of the tower, each exactly once, under the names of `config.names`."""
    tower, vision = PREFIXES[config.names][0], config.vision
    assert isinstance(vision, DeepVisionConfig)

    def named(module: str, modules: dict[str, str], path: str, layers: range | None = None) -> list[TensorName]:
        here = {f"{module}{name}": f"visual.{path}{inner}" for name, inner in modules.items()}
        return name_weights(here, tower, weights, layers)

    kernel, *names = named("", EMBEDDING, "")
    for number, layers in enumerate(vision.stretches):
        names += named("blocks.{}.", BLOCK, f"blocks_{number}.", layers)
    for number in range(len(vision.deepstack_layers)):
        names += named(f"deepstack_merger_list.{number}.", MERGER, f"deep_merger_{number}.")
    names += named("merger.", MERGER, "merger.")
    return [dataclasses.replace(kernel, disk_shape=vision.kernel_shape), *names]
