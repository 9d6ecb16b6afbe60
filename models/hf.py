"""Hugging Face checkpoint folders: `config.json` and safetensors, one file or several with an index.

Weights are read and written tensor by tensor. The writer of safetensors would need all tensors of a file at once.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import Sharding
from numpy.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from sharding.walk import Params
from sharding.weights import by_path, on_first_device, place, place_stack

from .config import DecoderConfig, JsonObject, ModelConfigError
from .creation import abstract
from .decoder import Decoder
from .folder import CheckpointError, read_json, why_missing, write_json
from .registry import ARCHITECTURES, read_config, write_config
from .tensor_names import TensorName, name_layout

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # as safetensors names them
SHARD_BYTES = 5_000_000_000  # the most bytes of a file; the default of `transformers` before version 5
HEAD = "lm_head.weight"
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # a buffer in old files, derived from the configuration


def tensor_names(config: DecoderConfig) -> list[TensorName]:
    """Every weight of the architecture with its name and layout on disk."""
    weights = dict(nnx.to_flat_state(nnx.state(abstract(config))))
    return ARCHITECTURES[config.architecture].tensor_names(config, weights)


class TensorFiles:
    """The open safetensors files of a folder: those that its index names, or `single`, which has no index under another
    name. `where` maps the name of a tensor to its file. Raises CheckpointError, naming file and tensor."""

    def __init__(
        self,
        folder: pathlib.Path,
        stack: contextlib.ExitStack,
        single: str = SINGLE,
        progress: Callable[[float], object] = float,
    ) -> None:
        self.folder, self._progress = folder, progress
        self._read: set[str] = set()
        claims: dict[str, str] = {}
        if single == SINGLE and (folder / INDEX).exists():
            claims = read_json(folder / INDEX, needed=True).get("weight_map", {})
        elif not (folder / single).exists():
            kinds = f"; the folder has neither {SINGLE} nor {INDEX}" if single == SINGLE else ""
            raise CheckpointError(f"{folder / single}: no such file{kinds}")
        self.where: dict[str, str] = {}
        self.open: dict[str, safe_open] = {}
        for file in sorted(set(claims.values())) if claims else [single]:
            try:
                self.open[file] = stack.enter_context(safe_open(folder / file, framework="numpy"))
            except FileNotFoundError:
                raise CheckpointError(f"{folder / file}: no such file, but {INDEX} names it") from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{folder / file}: not a whole safetensors file: {error}") from error
            for name in self.open[file].keys():  # noqa: SIM118 (not a dict)
                if name in self.where:
                    raise CheckpointError(f"{folder / file}: tensor {name} is also in {self.where[name]}")
                self.where[name] = file
        for name, file in claims.items():
            if self.where.get(name) != file:
                raise CheckpointError(f"{folder / file}: tensor {name} is missing, but {INDEX} says that it is there")

    def path(self, name: str) -> pathlib.Path:
        """The file that holds the tensor `name`; if no file holds it, the file that an error message should name."""
        return self.folder / self.where.get(name, INDEX if len(self.open) > 1 else next(iter(self.open)))

    def check_dtypes(self) -> None:
        """Refuses a dtype that is not in `DTYPES`, as in quantised checkpoints."""
        for name, file in self.where.items():
            dtype = self.open[file].get_slice(name).get_dtype()
            if dtype not in DTYPES.values() and not name.endswith(IGNORED_SUFFIXES):
                raise CheckpointError(
                    f"{self.path(name)}: tensor {name} is {dtype}; supported are {', '.join(DTYPES.values())}: take a "
                    "checkpoint that was not quantised"
                )

    def check_present(self, names: Collection[str]) -> None:
        for name in sorted(set(names) - self.where.keys()):
            raise CheckpointError(f"{self.path(name)}: tensor {name} is missing")

    def check_names(self, wanted: Collection[str], reason: str) -> None:
        """Refuses files that lack one of the tensors `wanted`, or have another one, for this reason."""
        self.check_present(wanted)
        for name in sorted(self.where.keys() - set(wanted)):
            if name != HEAD and not name.endswith(IGNORED_SUFFIXES):  # `_tied_or_not` found that the head is a copy
                raise CheckpointError(f"{self.path(name)}: tensor {name} is unexpected; {reason}")

    def carried(self, prefix: str) -> dict[str, np.ndarray]:
        """The tensors whose names begin with `prefix`, by name; no tensors if `prefix` is empty."""
        names = [name for name in self.where if prefix and name.startswith(prefix)]
        return {name: self.open[self.where[name]].get_tensor(name) for name in sorted(names)}

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor as it is on disk, which must have this shape."""
        self.check_present([name])
        file = self.open[self.where[name]]
        found = tuple(file.get_slice(name).get_shape())
        if found != shape:
            raise CheckpointError(
                f"{self.path(name)}: tensor {name} has shape {list(found)}, but by its configuration it must have "
                f"{list(shape)}: it is of another model"
            )
        self._read.add(name)
        self._progress(len(self._read) / len(self.where))
        return file.get_tensor(name)


def _tied_or_not(files: TensorFiles, config: DecoderConfig, raw: JsonObject) -> DecoderConfig:
    """The configuration, untied if the files store a head that differs from the embedding. transformers ties head and
    embedding if config.json says so at its top or in `text_config`, but keeps a stored head that differs, which SGLang
    drops. Raises CheckpointError for such a head, unless the top sets `tie_word_embeddings` to false."""
    if not config.text.tie_word_embeddings or HEAD not in files.where or _is_tied_copy(files, config):
        return config
    if raw.get("tie_word_embeddings") is not False:
        raise CheckpointError(
            f"{files.path(HEAD)}: tensor {HEAD} differs from the embedding that config.json ties it to; "
            "set tie_word_embeddings to false to keep the head, or remove the tensor to drop it"
        )
    settled = {**raw, "text_config": {**raw["text_config"], "tie_word_embeddings": False}}
    text = dataclasses.replace(config.text, tie_word_embeddings=False)
    return dataclasses.replace(config, text=text, extra=json.dumps(settled))


def _is_tied_copy(files: TensorFiles, config: DecoderConfig) -> bool:
    """Says whether the stored head equals the embedding, bit for bit, as in some tied checkpoints."""
    entry = next(entry for entry in tensor_names(config) if entry.path == ("embedding", "table"))
    head, embedding = (files.read(name, entry.disk_shape) for name in (HEAD, entry.name))
    return head.dtype == embedding.dtype and head.tobytes() == embedding.tobytes()


def _parameter(files: TensorFiles, entry: TensorName, dtype: DTypeLike | None, sharding: Sharding) -> jax.Array:
    layers = _layers_of(files, entry, dtype)
    return place_stack(layers, len(entry.numbers), sharding) if entry.stacked else place(next(layers), sharding)


def _layers_of(files: TensorFiles, entry: TensorName, dtype: DTypeLike | None) -> Iterator[np.ndarray]:
    first = None
    for name in entry.full_names:
        value = files.read(name, entry.disk_shape)
        first = first or value.dtype
        if value.dtype != first and dtype is None:
            raise CheckpointError(
                f"{files.path(name)}: tensor {name} is {value.dtype}, but the same tensor of layer {entry.numbers[0]} "
                f"is {first}; all layers of a stack must have one dtype, or be loaded with dtype=..."
            )
        yield np.ascontiguousarray(entry.from_disk(value), dtype=dtype or first)


def load(
    path: str | os.PathLike[str],
    dtype: DTypeLike | None = None,
    shardings: Callable[[Decoder], Params] | None = None,
    progress: Callable[[float], object] = float,
) -> Decoder:
    """Reads a local Hugging Face checkpoint folder tensor by tensor: the host holds at most two tensors at a time, a
    device its weights and its share of one tensor.

    `dtype` casts every weight; None keeps the dtypes of the checkpoint. `shardings(model)` gets the abstract model and
    returns the sharding of each weight, in the structure of its parameters (default: this process's first device).
    `progress` gets the share of the tensors read so far, up to 1. Raises CheckpointError naming file and tensor for
    anything missing, unexpected or mis-shaped, and ModelConfigError for what is not supported.
    """
    folder = pathlib.Path(path)
    if why := why_missing(path):
        raise CheckpointError(why)
    raw = read_json(folder / "config.json", needed=True)
    try:
        config = read_config(raw)
    except ModelConfigError as error:
        raise ModelConfigError(f"{folder / 'config.json'}: {error}") from None
    with contextlib.ExitStack() as stack:
        files = TensorFiles(folder, stack, progress=progress)
        files.check_dtypes()
        config = dataclasses.replace(config, names=name_layout(files.where))
        config = _tied_or_not(files, config, raw)
        config = dataclasses.replace(config, carried=files.carried(ARCHITECTURES[config.architecture].carried))
        names = tensor_names(config)
        wanted = {name for entry in names for name in entry.full_names}
        files.check_names(wanted | set(config.carried), "this architecture has no such weight")
        model = abstract(config)
        places = by_path((shardings or on_first_device)(model))
        params = {entry.path: _parameter(files, entry, dtype, places[entry.path]) for entry in names}
    return nnx.merge(nnx.graphdef(model), unflatten_dict(params))


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """The name, shape and dtype of a tensor in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_weights(file: pathlib.Path, contents: Sequence[StoredTensor], values: Iterable[np.ndarray]) -> None:
    """Writes one value for each entry of `contents`, taken from `values` one by one. A file has the header's length in
    eight bytes, the header in JSON, filled up to a multiple of eight bytes, and the tensors in the header's order.
    Raises ValueError for a value of another shape or dtype."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers reads the framework from it
    end = 0
    for tensor in contents:
        place = [end, end := end + tensor.nbytes]
        header[tensor.name] = {"dtype": DTYPES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor, value in zip(contents, values, strict=False):  # the remaining values are for other files
            if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(
                    f"{tensor.name} is {value.dtype} of shape {value.shape}, but the file's header says {tensor.dtype} "
                    f"of shape {tensor.shape}"
                )
            out.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


def disk_tensors(config: DecoderConfig, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, tensor as on disk) of every weight, for export and for weight sync, in the order of `stored`."""
    values = by_path(params)
    for entry in _in_order(config, values):
        value = values[entry.path]
        for layer, name in enumerate(entry.full_names):
            yield name, entry.to_disk(np.asarray(value[layer] if entry.stacked else value))


def stored(config: DecoderConfig, params: Params, dtype: DTypeLike | None = None) -> list[StoredTensor]:
    """The name, shape and dtype of every tensor on disk. `dtype`, if given, replaces the dtypes of `params`."""
    values = by_path(params)
    return [
        StoredTensor(name, entry.disk_shape, np.dtype(dtype or values[entry.path].dtype))
        for entry in _in_order(config, values)
        for name in entry.full_names
    ]


def _in_order(config: DecoderConfig, values: Mapping[tuple[str, ...], Any]) -> list[TensorName]:
    """The names, wide dtypes first, so that each tensor of a file begins at a multiple of its item size."""
    return sorted(tensor_names(config), key=lambda entry: -values[entry.path].dtype.itemsize)


def save(
    model: Decoder, path: str | os.PathLike[str], dtype: DTypeLike | None = None, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes `config.json`, which is written last, and safetensors that `transformers`, SGLang and `load` read. `dtype`
    casts every weight but those that the model carries (`config.carried`); None writes weights bit for bit. Weights are
    copied to the host one at a time. Older weight files are removed after all new files are written."""
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    params = nnx.to_pure_dict(nnx.state(model))
    shards: list[list[StoredTensor]] = [[]]
    carried = model.config.carried
    wide = [name for name, value in carried.items() if value.dtype.itemsize > 2]  # first, as in `_in_order`
    narrow = [name for name in carried if name not in wide]

    def described(names: list[str]) -> list[StoredTensor]:
        return [StoredTensor(name, carried[name].shape, carried[name].dtype) for name in names]

    for tensor in [*described(wide), *stored(model.config, params, dtype), *described(narrow)]:
        if shards[-1] and sum(entry.nbytes for entry in shards[-1]) + tensor.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    weights = (value.astype(dtype or value.dtype, copy=False) for _, value in disk_tensors(model.config, params))
    values = itertools.chain((carried[name] for name in wide), weights, (carried[name] for name in narrow))
    for number, shard in enumerate(shards, start=1):
        write_weights(folder / f"new-{number:05d}.part", shard, values)

    for old in (*folder.glob("model*.safetensors"), *folder.glob(INDEX)):
        old.unlink()
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [SINGLE]
    for number, file in enumerate(files, start=1):
        os.replace(folder / f"new-{number:05d}.part", folder / file)
    if len(shards) > 1:
        where = {tensor.name: file for file, shard in zip(files, shards, strict=True) for tensor in shard}
        total = sum(tensor.nbytes for shard in shards for tensor in shard)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})
    kept = jnp.dtype(dtype if dtype is not None else params["embedding"]["table"].dtype).name
    write_json(folder / "config.json", _with_dtype(write_config(model.config), kept))


def _with_dtype(config: JsonObject, stored: str) -> JsonObject:
    """The dictionary with the weights' dtype in every field that names a dtype, and at the top in any case."""
    said = ("dtype", "torch_dtype")
    top: dict[str, Any] = {} if any(config.get(key) for key in said) else {"torch_dtype": stored}
    for section in ("text_config", "vision_config"):
        if isinstance(config.get(section), dict):
            top[section] = {k: stored if k in said and v else v for k, v in config[section].items()}
    return {k: stored if k in said and v else v for k, v in config.items()} | top
