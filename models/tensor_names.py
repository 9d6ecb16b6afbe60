"""The names and layouts of weights on disk, in Hugging Face checkpoints."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .config import DecoderConfig, NameLayout

if TYPE_CHECKING:  # preprocessors read configurations without flax
    from sharding.weights import WeightSpec

Path: TypeAlias = tuple[str, ...]  # the keys of a parameter in the nested dict
Weights: TypeAlias = Mapping[Any, Any]  # the weights (`nnx.Variable`) of an abstract model, by path
PREFIXES = {  # prefixes of the tower and of the decoder
    NameLayout.FLAT: ("visual.", "model."),
    NameLayout.NESTED: ("model.visual.", "model.language_model."),
}


@dataclasses.dataclass(frozen=True)
class TensorName:
    """The name of one weight, with `{}` for the layer number if the weight is stacked over layers. A parameter has its
    input axes first (`[in..., out...]`). The disk holds the transpose, as torch's linear layers have it, flattened to
    `disk_shape`. Writing and reading keep every bit."""

    name: str
    path: Path
    shape: tuple[int, ...]  # shape of one layer's parameter
    numbers: tuple[int, ...]  # layer numbers of the weight's stack; empty outside all stacks
    inputs: int  # number of input axes in `shape`; 0 for tables and vectors
    disk_shape: tuple[int, ...]

    @property
    def stacked(self) -> bool:
        return bool(self.numbers)

    @property
    def full_names(self) -> list[str]:
        """The name on disk in each layer of the stack; one name for a weight outside all stacks."""
        return [self.name.format(number) for number in self.numbers] or [self.name]

    def to_disk(self, value: np.ndarray) -> np.ndarray:
        """One layer's weight as the checkpoint has it; contiguous."""
        return np.ascontiguousarray(self.laid_out(value))

    def laid_out(self, value: Any) -> Any:
        """`to_disk` for arrays of NumPy or JAX; the result need not be contiguous."""
        order = (*range(self.inputs, value.ndim), *range(self.inputs))
        return value.transpose(order).reshape(self.disk_shape)

    def from_disk(self, disk: np.ndarray) -> np.ndarray:
        """A view of the checkpoint's tensor in the layout of the parameter."""
        outputs = len(self.shape) - self.inputs
        order = (*range(outputs, len(self.shape)), *range(outputs))
        return disk.reshape(*self.shape[self.inputs :], *self.shape[: self.inputs]).transpose(order)


def name_weights(
    modules: Mapping[str, str], prefix: str, weights: Weights, numbers: Sequence[int] | None = None
) -> list[TensorName]:
    """The names of the weights of torch modules. `modules` maps each module to the path of its weight, with dots.
    `numbers` are the layer numbers of stacked weights, in the order of the stack; None: 0, 1, 2, ...

    A bias has the path of its matrix with `_bias` behind it. Tables (`[V, D]`) have the same layout here and on disk,
    and biases and scales are flat on disk. All other weights are matrices of a torch `Linear`. If the last axis of
    a matrix is the width `D`, all axes before it are input axes; otherwise only the first axis is one.
    """
    names = []
    for module, path in modules.items():
        *parents, last = path.split(".")
        for part, key in (("weight", last), ("bias", f"{last}_bias")):
            if (variable := weights.get((*parents, key))) is None:
                continue
            spec: WeightSpec = variable.get_metadata("spec")
            inputs = len(spec.shape) - 1 if spec.axes[-1] == "D" else 1
            disk_shape = (math.prod(spec.shape[inputs:]), math.prod(spec.shape[:inputs]))
            if spec.axes[0] == "V" or len(spec.shape) == 1 or part == "bias":
                inputs, disk_shape = 0, spec.shape if spec.axes[0] == "V" else (math.prod(spec.shape),)
            name, depth = f"{prefix}{module}.{part}", variable.shape[0] if len(variable.shape) > len(spec.shape) else 0
            layers = tuple(numbers if numbers is not None and depth else range(depth))
            if len(layers) != depth:
                raise ValueError(f"{name}: a stack of {depth} layers has the numbers {layers}")
            names.append(TensorName(name, (*parents, key), spec.shape, layers, inputs, disk_shape))
    return names


DECODER = {
    "embed_tokens": "embedding.table",
    "layers.{}.input_layernorm": "layers.attention_norm.scale",
    "layers.{}.self_attn.q_proj": "layers.attention.q",
    "layers.{}.self_attn.k_proj": "layers.attention.k",
    "layers.{}.self_attn.v_proj": "layers.attention.v",
    "layers.{}.self_attn.o_proj": "layers.attention.o",
    "layers.{}.self_attn.q_norm": "layers.attention.q_norm.scale",
    "layers.{}.self_attn.k_norm": "layers.attention.k_norm.scale",
    "layers.{}.post_attention_layernorm": "layers.mlp_norm.scale",
    "layers.{}.mlp.gate_proj": "layers.mlp.gate",
    "layers.{}.mlp.up_proj": "layers.mlp.up",
    "layers.{}.mlp.down_proj": "layers.mlp.down",
    "norm": "norm.scale",
}


def decoder_names(weights: Weights, prefix: str, numbers: Sequence[int] | None = None) -> list[TensorName]:
    """The name of every weight of the decoder; `prefix` begins all but the head's. `numbers`: see `name_weights`."""
    # A tied model has no weight for the head.
    return name_weights(DECODER, prefix, weights, numbers) + name_weights({"lm_head": "head.table"}, "", weights)


def text_model_names(config: DecoderConfig, weights: Weights) -> list[TensorName]:
    return decoder_names(weights, "model.")


def name_layout(names: Iterable[str]) -> NameLayout:
    """The layout that a checkpoint with these tensor names has."""
    nested = any(name.startswith(PREFIXES[NameLayout.NESTED]) for name in names)
    return NameLayout.NESTED if nested else NameLayout.FLAT
