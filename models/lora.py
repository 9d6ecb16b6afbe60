"""LoRA of a decoder: which weights get adapters, their first values, and adapters on disk in PEFT's format."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
from typing import Any

import jax
import numpy as np
from flax import nnx

from sharding.walk import Params
from sharding.weights import attach, beside, by_path, is_adapter

from . import creation
from .config import DecoderConfig, ModelConfigError, NameLayout
from .decoder import Decoder, shapes_only
from .folder import CheckpointError, read_json, why_missing, write_json
from .hf import StoredTensor, TensorFiles, tensor_names, write_weights
from .tensor_names import DECODER, Path, TensorName

ADAPTER, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
PROJECTIONS = tuple(module.split(".")[-1] for module in DECODER if "_proj" in module)  # of attention and MLP


@dataclasses.dataclass(frozen=True)
class Lora:
    """The settings of adapters. `targets` are every layer's adapted projections, by their names in `transformers`."""

    rank: int
    alpha: float  # alpha / rank multiplies the product of a pair of adapters
    targets: tuple[str, ...] = PROJECTIONS


def _as_peft(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Initial values of the first adapter of a pair: uniform in [-b, b] with b = 1 / sqrt(inputs)."""
    bound = np.float32(1 / math.sqrt(math.prod(shape[:-1])))
    return bound * (2 * rng.random(shape, np.float32) - 1)


def adapted(model: Decoder, lora: Lora) -> Decoder:
    """The abstract model with adapters and frozen weights. `model` may be abstract, and is not changed. Raises
    ModelConfigError for a target that the model lacks."""
    shapes = shapes_only(model)
    paths = [weight.path for weight in _adapted_weights(model.config, lora)]
    attach(shapes, paths, lora.rank, lora.alpha / lora.rank, _as_peft)
    return shapes


def _adapted_weights(config: DecoderConfig, lora: Lora) -> list[TensorName]:
    """The names of the weights that get adapters. A target names projections in all kinds of layers."""
    found: dict[str, list[TensorName]] = {}
    for weight in tensor_names(config):
        name = weight.name.removesuffix(".weight").split(".")[-1]
        if "_proj" in name and weight.path[0] != "visual":
            found.setdefault(name, []).append(weight)
    if missing := [target for target in lora.targets if target not in found]:
        raise ModelConfigError(f"lora.targets has {', '.join(missing)}; the projections are {', '.join(found)}")
    return [weight for name, weights in found.items() if name in lora.targets for weight in weights]


def fresh_adapters(model: Decoder, seed: int, shardings: Params) -> dict[Path, jax.Array]:
    """The first values of an adapted model's adapters, by path; `shardings` are those of all its parameters."""
    places = by_path(shardings)
    drawn: dict[Path, jax.Array] = {}
    for keys, weight in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if is_adapter(path := tuple(map(str, keys))):
            drawn[path] = creation.drawn(path, weight, seed, places[path])
    return drawn


def save_adapters(
    config: DecoderConfig, adapters: Params, path: str | os.PathLike[str], lora: Lora, base: str = ""
) -> None:
    """Writes a folder that `peft` loads onto a model of `transformers` 5; `base` names the frozen weights."""
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    values = by_path(adapters)
    contents, tensors = [], []
    for entry in _entries(config, lora):
        for name, value in zip(entry.full_names, np.asarray(values[entry.path]), strict=True):
            contents.append(StoredTensor(name, entry.disk_shape, value.dtype))
            tensors.append(entry.to_disk(value))
    write_weights(folder / "new.part", contents, tensors)
    os.replace(folder / "new.part", folder / ADAPTER)
    write_json(folder / SETTINGS, _settings(config, lora, base))


def load_adapters(config: DecoderConfig, path: str | os.PathLike[str], lora: Lora) -> dict[Path, np.ndarray]:
    """Reads adapters that `save_adapters` or PEFT wrote: float32 arrays by path. Raises CheckpointError for other
    settings than `lora`, and for a tensor that is missing, unexpected or mis-shaped."""
    folder = pathlib.Path(path)
    if why := why_missing(path):
        raise CheckpointError(why)
    said = read_json(folder / SETTINGS, needed=True)
    _check_settings(folder, said, lora)
    entries = _entries(config, lora)
    with contextlib.ExitStack() as stack:
        files = TensorFiles(folder, stack, ADAPTER)
        files.check_names([n for entry in entries for n in entry.full_names], f"adapters stand beside {lora.targets}")

        def layers(entry: TensorName) -> list[np.ndarray]:
            tensors = (files.read(name, entry.disk_shape) for name in entry.full_names)
            return [entry.from_disk(tensor).astype(np.float32) for tensor in tensors]

        return {entry.path: np.stack(layers(entry)) for entry in entries}


def _entries(config: DecoderConfig, lora: Lora) -> list[TensorName]:
    """The names of the adapters on disk, which follow the modules of `transformers`, not the checkpoint's layout."""
    config = dataclasses.replace(config, names=NameLayout.NESTED)
    entries = []
    for weight in _adapted_weights(config, lora):
        inputs, outputs = weight.shape[: weight.inputs], weight.shape[weight.inputs :]
        name = f"base_model.model.{weight.name.removesuffix('.weight')}.lora_"
        first, second = beside(weight.path)
        on_disk = (lora.rank, math.prod(inputs)), (math.prod(outputs), lora.rank)
        entries += [
            TensorName(f"{name}A.weight", first, (*inputs, lora.rank), weight.numbers, weight.inputs, on_disk[0]),
            TensorName(f"{name}B.weight", second, (lora.rank, *outputs), weight.numbers, 1, on_disk[1]),
        ]
    return entries


def _settings(config: DecoderConfig, lora: Lora, base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        # Modules of the vision tower with the same names get no adapters.
        "exclude_modules": r".*\bvisual\b.*" if config.vision else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _check_settings(folder: pathlib.Path, said: dict[str, Any], lora: Lora) -> None:
    defaults = {"use_dora": False, "use_rslora": False, "bias": "none"}
    wanted: dict[str, Any] = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, **defaults}
    for name, value in wanted.items():
        if (found := said.get(name, defaults.get(name))) != value:
            raise CheckpointError(f"{folder / SETTINGS}: {name} is {json.dumps(found)}, not {json.dumps(value)}")
    for name in ("rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform"):
        if said.get(name):
            raise CheckpointError(f"{folder / SETTINGS}: {name} is set, but all layers must have the same adapters")
