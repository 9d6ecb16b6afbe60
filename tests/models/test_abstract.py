"""Full-size models by abstract evaluation: published sizes, shapes of a forward pass, both forms of `config.json`."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from media_files import parity

import models
from fluxjax.sizing.model_sizes import SHIPPED
from models.config import NameLayout
from models.decoder import hidden_states, logprobs, parameter_count
from models.hf import tensor_names
from models.inputs import PackedTokens, VisionInput
from models.qwen2_5_vl.params import read_config as read_qwen2_5_vl
from models.registry import read_config, write_config
from sharding.walk import Walk

# The settings of the published files, in their (flat) form, and the number of weights of the published checkpoints
# (`total_size` of the index over two bytes a weight).
VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "max_position_embeddings": 128000,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "image_token_id": 151655,
    "video_token_id": 151656,
}
TOWER = {
    "depth": 32,
    "hidden_act": "silu",
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_chans": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
    "temporal_patch_size": 2,
}


def sized(hidden, intermediate, layers, heads, kv_heads, vocab, tied):
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


def vl_file(*size, **tower):
    text = sized(*size)
    return {**VL, **text, "vision_config": {**TOWER, "out_hidden_size": text["hidden_size"], **tower}}


def qwen3_file(*size):
    rest = {"head_dim": 128, "attention_bias": False, "use_sliding_window": False, "rope_theta": 1e6}
    return {"architectures": ["Qwen3ForCausalLM"], **sized(*size), **rest}


FILES = {
    "Qwen2.5-VL-3B": (vl_file(2048, 11008, 36, 16, 2, 151936, True), 3_754_622_976),
    "Qwen2.5-VL-7B": (vl_file(3584, 18944, 28, 28, 4, 152064, False), 8_292_166_656),
    "Qwen2.5-VL-72B": (vl_file(8192, 29568, 80, 64, 8, 152064, False, intermediate_size=3456), 73_410_777_344),
    "Qwen2.5-0.5B": (
        {"architectures": ["Qwen2ForCausalLM"], **sized(896, 4864, 24, 14, 2, 151936, True), "rope_theta": 1e6},
        494_032_768,
    ),
    "Qwen2.5-7B": (
        {"architectures": ["Qwen2ForCausalLM"], **sized(3584, 18944, 28, 28, 4, 152064, False), "rope_theta": 1e6},
        7_615_616_512,
    ),
    "Qwen3-0.6B": (qwen3_file(1024, 3072, 28, 16, 8, 151936, True), 596_049_920),
    "Qwen3-8B": (qwen3_file(4096, 12288, 36, 32, 8, 151936, False), 8_190_735_360),
    "Qwen3-VL-8B": (json.loads((SHIPPED / "Qwen3-VL-8B-Instruct.json").read_text()), 8_767_123_696),
    "Qwen3.5-4B": (json.loads((SHIPPED / "Qwen3.5-4B.json").read_text()), 4_539_265_536),  # without `mtp.*`
    "Qwen3.5-9B": (json.loads((SHIPPED / "Qwen3.5-9B.json").read_text()), 9_409_813_744),
}


@pytest.mark.parametrize("name", FILES)
def test_published_parameter_counts(name: str) -> None:
    file, count = FILES[name]
    config = read_config(file)
    assert parameter_count(models.abstract(config)) == count
    on_disk = sum(int(np.prod(entry.disk_shape)) * len(entry.full_names) for entry in tensor_names(config))
    assert on_disk == count, "every weight has exactly one name on disk"


@pytest.mark.parametrize(
    ("name", "tensors", "total_size"), [("Qwen3.5-4B", 738, 9_319_737_856), ("Qwen3.5-9B", 775, 19_306_216_416)]
)
def test_tensors_of_the_published_qwen3_5(name: str, tensors: int, total_size: int) -> None:
    """The index of a published checkpoint counts these tensors and bytes: ours, and 15 of `mtp.*`, which are one layer
    of attention, a matrix from two states to one, and three norms. `A_log` and DeltaNet's norms are float32."""
    config = read_config(FILES[name][0])
    entries = {entry.path[-2:]: entry for entry in tensor_names(config)}
    assert entries["delta", "decay_log"].full_names[-1] == "model.language_model.layers.30.linear_attn.A_log"
    text, sizes = config.text, {entry: int(np.prod(entry.disk_shape)) for entry in tensor_names(config)}
    wide = [entry for entry in sizes if entry.path[-1] == "decay_log" or entry.path[-3:] == ("delta", "norm", "scale")]
    layer = [entry for entry in sizes if entry.path[0] == "layers"]
    draft = sum(sizes[entry] for entry in layer) + 2 * text.hidden_size**2 + 3 * text.hidden_size
    values = sum(size * len(entry.full_names) for entry, size in sizes.items())
    assert 2 * (values + draft + sum(sizes[entry] * len(entry.full_names) for entry in wide)) == total_size
    assert sum(len(entry.full_names) for entry in sizes) + len(layer) + 4 == tensors


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen2.5-VL-3B", "Qwen2.5-VL-72B"])
def test_counts_and_names_equal_those_of_transformers(name: str) -> None:
    torch, transformers = parity("torch", "transformers")
    file, count = FILES[name]
    with torch.device("meta"):
        reference = transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(**file))
    assert sum(parameter.numel() for parameter in reference.parameters()) == count
    shapes = {name: tuple(parameter.shape) for name, parameter in reference.named_parameters()}
    config = read_config(file)
    config = dataclasses.replace(config, names=NameLayout.NESTED)  # the names that it has in memory
    ours = {}
    for entry in tensor_names(config):
        depth = config.vision.depth if entry.path[0] == "visual" else config.text.num_layers
        ours |= {entry.name.format(layer): entry.disk_shape for layer in range(depth if entry.stacked else 1)}
    assert ours == shapes


@pytest.mark.slow
def test_forward_shapes_of_the_7b() -> None:
    """Two rows of 4,096 tokens with a video of 4,096 patches a frame pair; nothing is allocated."""
    config = read_config(FILES["Qwen2.5-VL-7B"][0])
    graphdef, params = models.split(models.abstract(config))

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    vision = VisionInput(
        patches_PX=jax.ShapeDtypeStruct((16384, 1176), jnp.float32),
        positions_P2=ints(16384, 2),
        frame_segments_P=ints(16384),
        window_segments_P=ints(16384),
        frame_bound=4096,
    )
    inputs = PackedTokens(
        ints(2, 4096), ints(2, 4096), ints(2, 4096), ints(3, 2, 4096), ints(2, 4096), ints(2, 4096), vision
    )
    bf16 = Walk(gather=lambda spec, local: local.astype(jnp.bfloat16), remat="layer")

    def forward(params, inputs):
        return hidden_states(models.merge(graphdef, params), inputs, bf16)

    hidden = jax.eval_shape(forward, params, inputs)
    assert (hidden.shape, hidden.dtype) == ((2, 4096, 3584), jnp.bfloat16)

    def loss(params, inputs):
        return logprobs(models.merge(graphdef, params), inputs, bf16)[0].sum()

    gradients = jax.eval_shape(jax.grad(loss), params, inputs)
    assert jax.tree.map(lambda leaf: leaf.shape, gradients) == jax.tree.map(lambda leaf: leaf.shape, params)


def test_all_forms_of_the_same_file_mean_the_same() -> None:
    """Flat and nested text settings; `rope_scaling` with `rope_theta`, and `rope_parameters`; tying in and out."""
    flat = FILES["Qwen2.5-VL-3B"][0]
    want = read_qwen2_5_vl(flat)
    outer = ("architectures", "model_type", "vision_config", "image_token_id", "video_token_id")
    text = {key: value for key, value in flat.items() if key not in outer}
    nested = {key: flat[key] for key in outer} | {"text_config": text}
    assert read_qwen2_5_vl(nested) == want
    assert want.text.tie_word_embeddings
    rope = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1000000.0}
    new_text = {key: value for key, value in text.items() if not key.startswith(("rope", "tie"))}
    newest = {**nested, "tie_word_embeddings": True, "text_config": {**new_text, "rope_parameters": rope}}
    assert read_qwen2_5_vl(newest) == want
    assert want.text.rope.mrope_section == (16, 24, 24)
    assert want.text.rope.theta == 1e6


@pytest.mark.parametrize("name", FILES)
def test_config_comes_back(name: str) -> None:
    """Unchanged it is the very file; changed, or without a file to start from, it is one that means the same."""
    file = FILES[name][0]
    config = read_config(file)
    assert write_config(config) == file
    bare = config.__class__(**{**vars(config), "extra": "{}"})
    written = json.loads(json.dumps(write_config(bare)))
    assert read_config(written) == config
    assert (config.vision is not None) == (config.architecture in ("qwen2_5_vl", "qwen3_vl", "qwen3_5"))
