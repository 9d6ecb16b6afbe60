"""Names of the decoder's weights in Hugging Face checkpoints."""

from __future__ import annotations

from ..config import Qwen2Config, TextConfig
from ..tensor_names import TensorName, linear, table, vector


def decoder_names(text: TextConfig, prefix: str) -> list[TensorName]:
    """`prefix` is where the decoder stands in the checkpoint: `model`, or `model.language_model`."""
    D, F, N, K, H = text.hidden_size, text.intermediate_size, text.num_heads, text.num_kv_heads, text.head_dim
    layer = f"{prefix}.layers.{{}}"
    attention = f"{layer}.self_attn"
    names = [
        table(f"{prefix}.embed_tokens.weight", ("embedding", "table"), (text.vocab_size, D)),
        vector(f"{layer}.input_layernorm.weight", ("layers", "attention_norm", "scale"), (D,)),
        linear(f"{attention}.q_proj", ("layers", "attention", "q"), (D, N, H)),
        linear(f"{attention}.k_proj", ("layers", "attention", "k"), (D, K, H)),
        linear(f"{attention}.v_proj", ("layers", "attention", "v"), (D, K, H)),
        vector(f"{attention}.q_proj.bias", ("layers", "attention", "q_bias"), (N, H)),
        vector(f"{attention}.k_proj.bias", ("layers", "attention", "k_bias"), (K, H)),
        vector(f"{attention}.v_proj.bias", ("layers", "attention", "v_bias"), (K, H)),
        linear(f"{attention}.o_proj", ("layers", "attention", "o"), (N, H, D), inputs=2),
        vector(f"{layer}.post_attention_layernorm.weight", ("layers", "mlp_norm", "scale"), (D,)),
        linear(f"{layer}.mlp.gate_proj", ("layers", "mlp", "gate"), (D, F)),
        linear(f"{layer}.mlp.up_proj", ("layers", "mlp", "up"), (D, F)),
        linear(f"{layer}.mlp.down_proj", ("layers", "mlp", "down"), (F, D)),
        vector(f"{prefix}.norm.weight", ("norm", "scale"), (D,)),
    ]
    if not text.tie_word_embeddings:
        names.append(table("lm_head.weight", ("head", "table"), (text.vocab_size, D)))
    return names


def tensor_names(config: Qwen2Config) -> list[TensorName]:
    """Every weight of the model, each exactly once."""
    return decoder_names(config.text, "model")
