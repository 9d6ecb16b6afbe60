"""A tiny Qwen2.5-VL and a tiny Qwen2, and random packed rows for them; no PyTorch needed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models
from models.config import DecoderConfig, DeepVisionConfig, NameLayout, RopeConfig, TextConfig, VisionConfig
from models.decoder import Decoder, hidden_states
from models.inputs import PackedTokens
from models.processing.processor import pack_patches
from sharding.kernels.delta_heads import DeltaHeads
from sharding.walk import Walk

GRID = (1, 4, 8)  # of the image of every prompt: 32 patches, 8 features


def text_config(**changes: Any) -> TextConfig:
    settings = {
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rope": RopeConfig(mrope_section=(2, 1, 1)),
        "initializer_range": 0.15,
        **changes,
    }
    return TextConfig(**settings)


def vl_config(**text: Any) -> DecoderConfig:
    vision = VisionConfig(
        hidden_size=32,
        intermediate_size=48,
        depth=3,
        num_heads=2,
        out_hidden_size=48,
        full_attention_layers=(1,),
        patch_size=4,
        window_size=16,
        initializer_range=0.15,
    )
    return DecoderConfig("qwen2_5_vl", text_config(**text), vision, image_token_id=60, video_token_id=61)


def qwen2_config(**text: Any) -> DecoderConfig:
    return DecoderConfig("qwen2", text_config(rope=RopeConfig(), **text))


def qwen3_config(**text: Any) -> DecoderConfig:
    qwen3 = {"head_norm": True, "qkv_bias": False, "head_dim": 10}
    return DecoderConfig("qwen3", text_config(rope=RopeConfig(), **qwen3 | text))


def qwen3_vl_config(**text: Any) -> DecoderConfig:
    vision = DeepVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        depth=3,
        num_heads=2,
        out_hidden_size=48,
        patch_size=4,
        position_grid=5,
        deepstack_layers=(0, 2),
        initializer_range=0.15,
    )
    rope = RopeConfig(mrope_section=(2, 2, 1), interleaved=True)
    config = text_config(**{"rope": rope, "head_norm": True, "qkv_bias": False, "head_dim": 10, **text})
    return DecoderConfig("qwen3_vl", config, vision, image_token_id=60, video_token_id=61, names=NameLayout.NESTED)


def qwen3_5_text_config(**text: Any) -> DecoderConfig:
    """Four layers, the third with attention."""
    hybrid = {"delta": DeltaHeads(2, 4, 16, 12), "attention_interval": 3, "num_layers": 4, "initializer_range": 0.1}
    settings = {
        "rotated": 0.5,
        "output_gate": True,
        "zero_centred_norms": True,
        "head_norm": True,
        "qkv_bias": False,
        "head_dim": 12,
    }
    rope = RopeConfig(mrope_section=(1, 1, 1), interleaved=True)
    return DecoderConfig("qwen3_5_text", text_config(rope=rope, **settings | hybrid | text))


def qwen3_5_config(**text: Any) -> DecoderConfig:
    tower = qwen3_vl_config().vision
    assert tower is not None
    vision = dataclasses.replace(tower, deepstack_layers=())
    plain = qwen3_5_text_config(**text)
    return dataclasses.replace(plain, architecture="qwen3_5", vision=vision, image_token_id=60, video_token_id=61)


def run(model: Decoder, function: Any, inputs: PackedTokens, *args: Any, **settings: Any) -> Any:
    """`function(model, inputs, ...)` in one jit, the way everything here is called."""
    graphdef, params = models.split(model)
    if model.config.text.delta is not None:
        inputs = inputs.with_runs()
    return jax.jit(lambda params, inputs: function(models.merge(graphdef, params), inputs, *args, **settings))(
        params, inputs
    )


def logits(model: Decoder, inputs: PackedTokens, walk: Walk) -> jax.Array:
    """The next-token logits of every token, float32."""
    hidden = hidden_states(model, inputs, walk)
    return jnp.einsum("BTD,VD->BTV", hidden, model.head_weight(walk), preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A prompt with one image (if `pixels`), then text; as one row of its own."""

    tokens: np.ndarray
    positions: np.ndarray
    features: np.ndarray
    pixels: np.ndarray | None


def sequence(rng: np.random.Generator, length: int, image: bool) -> Sequence:
    tokens = rng.integers(0, 60, length).astype(np.int32)
    features = np.full(length, -1, np.int32)
    pixels = None
    if image:
        features[2:10] = np.arange(8)
        pixels = rng.normal(size=(32, 96)).astype(np.float32)
    # any positions will do here, as long as the three axes differ
    return Sequence(tokens, rng.integers(0, 30, (3, length)).astype(np.int32), features, pixels)


def rows(packed: list[list[Sequence]], width: int, config: DecoderConfig) -> PackedTokens:
    """Plain packing: every sequence its own segment, padding at the end of each row."""
    B = len(packed)
    result = PackedTokens(
        tokens_BT=np.zeros((B, width), np.int32),
        segments_BT=np.zeros((B, width), np.int32),
        branches_BT=np.zeros((B, width), np.int32),
        positions_3BT=np.zeros((3, B, width), np.int32),
        predecessor_BT=np.zeros((B, width), np.int32),
        feature_index_BT=np.full((B, width), -1, np.int32),
        vision=None,
    )
    pixels: list[np.ndarray] = []
    for b, sequences in enumerate(packed):
        start = 0
        for number, part in enumerate(sequences, start=1):
            stop = start + len(part.tokens)
            result.tokens_BT[b, start:stop] = part.tokens
            result.segments_BT[b, start:stop] = number
            result.positions_3BT[:, b, start:stop] = part.positions
            result.predecessor_BT[b, start:stop] = np.maximum(np.arange(start, stop) - 1, start)
            if part.pixels is not None:
                shift = 8 * len(pixels)
                result.feature_index_BT[b, start:stop] = np.where(part.features < 0, -1, part.features + shift)
                pixels.append(part.pixels)
            start = stop
    if not pixels or config.vision is None:
        return result
    vision, order = pack_patches(np.concatenate(pixels), [GRID] * len(pixels), config.vision)
    index = result.feature_index_BT
    return dataclasses.replace(result, vision=vision, feature_index_BT=np.where(index < 0, -1, order[index]))
