"""Each part of the decoder equals its counterpart in `transformers`, 1e-4 absolute in float32.

`pytest -rP` shows the largest error of each comparison.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from hf_reference import TOLERANCE, Pair, build_text, build_vl, layer_of, torch, worst

from models.layers import rotate
from sharding.kernels.attention import Mask, attention

B, T = 2, 23


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    return build_vl(tmp_path_factory.mktemp("vl"))


@pytest.fixture
def x_BTD() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(B, T, 112)).astype(np.float32)


@pytest.fixture
def positions_3BT() -> np.ndarray:
    """Three different axes, far apart: a mixed-up section would show."""
    rng = np.random.default_rng(1)
    return np.stack([rng.integers(0, top, (B, T)) for top in (300, 40, 70)]).astype(np.int32)


def decoder(pair: Pair):
    return pair.reference.model.language_model


def check(ours, reference) -> None:
    error = worst(ours, reference)
    print("max error", error)
    assert float(reference.detach().abs().max()) > 0.3
    assert error < TOLERANCE


def test_rms_norm(pair: Pair, x_BTD) -> None:
    reference = decoder(pair).layers[1].input_layernorm(torch.as_tensor(x_BTD))
    check(layer_of(pair.model.layers, 1).attention_norm(jnp.asarray(x_BTD)), reference)


def test_final_norm(pair: Pair, x_BTD) -> None:
    check(pair.model.norm(jnp.asarray(x_BTD)), decoder(pair).norm(torch.as_tensor(x_BTD)))


def test_rms_norm_computes_in_float32(pair: Pair, x_BTD) -> None:
    """The mean of squares would be wrong in the third digit in bfloat16; only the result is rounded."""
    norm = pair.model.norm
    wide = norm(jnp.asarray(x_BTD, jnp.bfloat16).astype(jnp.float32)).astype(jnp.bfloat16)
    narrow = norm(jnp.asarray(x_BTD, jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(narrow), np.asarray(wide))


def test_mlp(pair: Pair, x_BTD) -> None:
    check(layer_of(pair.model.layers, 2).mlp(jnp.asarray(x_BTD)), decoder(pair).layers[2].mlp(torch.as_tensor(x_BTD)))


def test_embedding(pair: Pair) -> None:
    tokens = np.arange(B * T, dtype=np.int32).reshape(B, T)
    check(pair.model.embedding(jnp.asarray(tokens)), decoder(pair).embed_tokens(torch.as_tensor(tokens)))


def test_rotary_with_three_axes(pair: Pair, x_BTD, positions_3BT) -> None:
    cos, sin = decoder(pair).rotary_emb(torch.as_tensor(x_BTD), torch.as_tensor(positions_3BT))
    ours = pair.model.rotary(jnp.asarray(positions_3BT))
    check(ours[0], cos)
    check(ours[1], sin)


def test_rotary_with_one_axis(tmp_path, x_BTD, positions_3BT) -> None:
    """A text model reads row 0 only."""
    pair = build_text(tmp_path)
    cos, sin = pair.reference.model.rotary_emb(torch.as_tensor(x_BTD), torch.as_tensor(positions_3BT[0]))
    ours = pair.model.rotary(jnp.asarray(positions_3BT))
    check(ours[0], cos)
    check(ours[1], sin)


def test_rotation_of_heads(pair: Pair, x_BTD, positions_3BT) -> None:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb

    q_BTNH = x_BTD.reshape(B, T, 14, 8)
    cos, sin = decoder(pair).rotary_emb(torch.as_tensor(x_BTD), torch.as_tensor(positions_3BT))
    reference, _ = apply_rotary_pos_emb(torch.as_tensor(q_BTNH), torch.as_tensor(q_BTNH), cos, sin, unsqueeze_dim=2)
    check(rotate(jnp.asarray(q_BTNH), pair.model.rotary(jnp.asarray(positions_3BT))), reference)


def causal_mask():
    return torch.full((T, T), float("-inf")).triu(1)[None, None]


def attend(q, k, v):
    return attention(q, k, v, Mask(jnp.ones((B, T), jnp.int32))), None


def test_attention(pair: Pair, x_BTD, positions_3BT) -> None:
    """14 query heads over 2 KV heads."""
    cos_sin = decoder(pair).rotary_emb(torch.as_tensor(x_BTD), torch.as_tensor(positions_3BT))
    reference, _ = (
        decoder(pair)
        .layers[0]
        .self_attn(torch.as_tensor(x_BTD), attention_mask=causal_mask(), position_embeddings=cos_sin)
    )
    layer = layer_of(pair.model.layers, 0)
    ours, _ = layer.attention(jnp.asarray(x_BTD), pair.model.rotary(jnp.asarray(positions_3BT)), attend)
    check(ours, reference)


def test_decoder_layer(pair: Pair, x_BTD, positions_3BT) -> None:
    cos_sin = decoder(pair).rotary_emb(torch.as_tensor(x_BTD), torch.as_tensor(positions_3BT))
    reference = decoder(pair).layers[1](
        torch.as_tensor(x_BTD), attention_mask=causal_mask(), position_embeddings=cos_sin
    )
    ours, aux = layer_of(pair.model.layers, 1)(
        jnp.asarray(x_BTD),
        pair.model.rotary(jnp.asarray(positions_3BT)),
        lambda q, k, v: (attend(q, k, v)[0], (k.shape, v.shape)),
    )
    check(ours, reference)
    assert aux == ((B, T, 2, 8), (B, T, 2, 8)), "what `attend` returns beside the output comes back"
