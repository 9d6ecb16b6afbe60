"""The names and layouts of weights on disk, in Hugging Face checkpoints: of one weight, and of the whole decoder."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from .config import TextConfig


@dataclasses.dataclass(frozen=True)
class TensorName:
    """The name of one weight. It has `{}` for the layer number if the weight is stacked over layers.

    A parameter has its input axes first (`[in..., out...]`), a torch linear layer has `[out, in]`: the disk holds the
    transpose, flattened to `disk_shape`. Only the layout differs, so the way there and back keeps every bit.
    """

    name: str
    path: tuple[str, ...]  # in the nested parameter dict
    shape: tuple[int, ...]  # shape of one layer's parameter
    inputs: int = 0  # number of input axes in `shape`; 0 for tables and vectors
    disk_shape: tuple[int, ...] = ()  # () derives it: [out, in] or flat

    def __post_init__(self) -> None:
        if not self.disk_shape:
            split = (math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs]))
            object.__setattr__(self, "disk_shape", split if self.inputs else (split[0],))

    @property
    def stacked(self) -> bool:
        return "{}" in self.name

    def to_disk(self, value: np.ndarray) -> np.ndarray:
        """One layer's weight as the checkpoint has it; contiguous."""
        order = (*range(self.inputs, value.ndim), *range(self.inputs))
        return np.ascontiguousarray(value.transpose(order).reshape(self.disk_shape))

    def from_disk(self, disk: np.ndarray) -> np.ndarray:
        """A view of the checkpoint's tensor in the layout of the parameter."""
        outputs = len(self.shape) - self.inputs
        order = (*range(outputs, len(self.shape)), *range(outputs))
        return disk.reshape(*self.shape[self.inputs :], *self.shape[: self.inputs]).transpose(order)


def linear(prefix: str, path: tuple[str, ...], shape: tuple[int, ...], inputs: int = 1) -> TensorName:
    """The matrix of a torch `Linear`."""
    return TensorName(f"{prefix}.weight", path, shape, inputs)


def vector(name: str, path: tuple[str, ...], shape: tuple[int, ...]) -> TensorName:
    """A bias or a norm scale."""
    return TensorName(name, path, shape)


def table(name: str, path: tuple[str, ...], shape: tuple[int, int]) -> TensorName:
    """An embedding or an output head, `[V, D]` on both sides."""
    return TensorName(name, path, shape, disk_shape=shape)


def decoder_names(text: TextConfig, prefix: str) -> list[TensorName]:
    """Every weight of the decoder once; `prefix` is its place on disk: `model`, or `model.language_model`."""
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
