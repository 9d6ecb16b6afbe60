"""Estimates the cost of computing sequences, in measured seconds or in FLOPs, so that devices get equal work."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from models.config import DeepVisionConfig, TextConfig, VisionConfig
from sharding.cost import CostError, CostModel, ModelSizes
from sharding.kernels.runs import CHUNK

from ..config import Config, DType
from ..config.bounds import as_config_error

Floats = np.ndarray  # f64, one for each sequence
Estimate = Callable[[Floats, Floats, Floats], Floats]  # (tokens, squares, patches) of each sequence -> work
Numbers = Sequence[int] | Sequence[float] | np.ndarray

VERL_LINEAR = 24576.0  # verl's work of a token, in the unit in which attention costs length**2


def estimate(config: Config, text: TextConfig | None, vision: VisionConfig | None) -> Estimate:
    """Returns a function that estimates the work of sequences, in seconds if `sharding.calibration` is set, else in
    FLOPs. Without a calibration and with `text` None, the function computes verl's formula. The argument `squares` of
    the function is twice the number of (query, key) pairs of attention. A medium's patches count for each sequence that
    shows the medium. Raises ConfigError for an unreadable calibration."""
    if config.sharding.calibration:
        with as_config_error("sharding.calibration", CostError):
            cost = calibrated(config, text, vision)
        return lambda tokens, squares, patches: (
            forward_seconds(cost, tokens, squares) + (cost.vision_seconds(patches) if vision is not None else 0.0)
        )
    if text is None:
        return lambda tokens, squares, patches: VERL_LINEAR * tokens + squares
    # The FLOPs are those of a forward pass. Matrix products cost two FLOPs for each token and weight. A (query, key)
    # pair costs four FLOPs in each channel of all heads of each layer, and `squares` count a pair twice. In the unit of
    # `squares`, a token therefore costs weights / (layers * heads * head_size) with the weights of all matrices,
    # including the output head. This is 70,000 for Qwen2.5-VL-7B. ODC's fit to measured times of a 7B model has 64,500.
    sizes = model_sizes(config, text, vision)
    token, square = sizes.linear_flops(), 2.0 * sizes.layers * sizes.heads * sizes.head_size
    patch = sizes.vision_flops() if vision is not None else 0.0
    return lambda tokens, squares, patches: token * tokens + square * squares + patch * patches


def forward_seconds(cost: CostModel, tokens: Numbers, squares: Numbers) -> np.ndarray:
    """Returns the seconds of a forward pass over each sequence without its media."""
    # Attention over a shared prompt is not quadratic in the length. The cost model therefore gets the length of an
    # unshared sequence with equal work.
    return np.asarray(cost.attention_seconds(np.sqrt(squares)) + cost.linear_seconds(np.array(tokens, float)))


def calibrated(config: Config, text: TextConfig | None, vision: VisionConfig | None = None) -> CostModel:
    """Returns the cost model in the file `sharding.calibration`, for a model of these sizes, or of the file's sizes if
    `text` is None. Raises CostError for an unreadable file."""
    cost = _load(config.sharding.calibration)
    return cost if text is None else cost.of(model_sizes(config, text, vision))


_load = functools.cache(CostModel.load)


def model_sizes(config: Config, text: TextConfig, vision: VisionConfig | None = None) -> ModelSizes:
    """Returns the trained model's sizes in the form that the cost model takes."""
    value_bytes = 2 if config.model.compute_dtype is DType.BFLOAT16 else 4
    decoder = ModelSizes(
        name="the trained model",
        layers=len(text.attention_layers),
        width=text.hidden_size,
        heads=text.num_heads,
        kv_heads=text.num_kv_heads,
        head_size=text.head_dim,
        mlp=text.intermediate_size,
        vocabulary=text.vocab_size,
        value_bytes=value_bytes,
        state_layers=len(text.delta_layers),
    )
    if (heads := text.delta) is not None:
        floats = heads.value_heads * (2 + heads.value_size)  # gates and outputs, which are float32
        values = heads.value_heads * heads.value_size
        inner = text.hidden_size * (heads.channels + 2 * values + 2 * heads.value_heads + 3 * text.intermediate_size)
        gates = len(text.attention_layers) * text.hidden_size * text.num_heads * text.head_dim
        flops = 2.0 * (gates + len(text.delta_layers) * inner) + _state_flops(text)
        sent = float(heads.channels * value_bytes + 4 * floats)
        decoder = dataclasses.replace(decoder, other_flops=flops, state_bytes=sent)
    if vision is None:
        return decoder
    return dataclasses.replace(
        decoder,
        vision_layers=vision.depth,
        vision_width=vision.hidden_size,
        vision_mlp=vision.intermediate_size,
        vision_products=2 if isinstance(vision, DeepVisionConfig) else 3,
        vision_mergers=vision.feature_width // vision.out_hidden_size,
        patch_values=vision.patch_values,
        patches_per_token=vision.merge_unit,
    )


def _state_flops(text: TextConfig) -> float:
    if (heads := text.delta) is None:
        return 0.0
    # A token reads its state twice and writes it once, and meets half of the other tokens of its chunk.
    state = heads.value_heads * (3 * heads.key_size * heads.value_size + CHUNK * (heads.key_size + heads.value_size))
    return 2.0 * len(text.delta_layers) * state


def mixing_work(text: TextConfig | None, tokens: Numbers, squares: Numbers) -> np.ndarray:
    """Returns the work of mixing each sequence's tokens, in the unit of `squares`. Gated DeltaNet's is linear."""
    if text is None:
        return np.asarray(squares, float)
    square = 2.0 * len(text.attention_layers) * text.num_heads * text.head_dim
    return np.asarray(squares, float) + _state_flops(text) / square * np.asarray(tokens, float)
