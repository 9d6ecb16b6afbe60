"""Weights for SGLang's `/update_weights_from_tensor`: pickled with their bytes, or in memory that SGLang opens.

A flattened bucket is `{"flattened_tensor": bytes of all tensors as one uint8 tensor, "metadata": [one per tensor]}`
(`sglang.srt.weight_sync.tensor_bucket`). The trainer needs no PyTorch for such a bucket: the pickle that PyTorch would
make is written opcode by opcode. A shared bucket is PyTorch's memory, filled from JAX's arrays (route `ipc`).
"""

# pyright: reportPrivateImportUsage=false
import functools
import pickle
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.config import DecoderConfig
from models.hf import DTYPES as NAMES
from models.hf import StoredTensor, tensor_names
from models.tensor_names import TensorName
from sharding.weights import by_path

from .published import as_bytes

METADATA = "sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # numbers of `torch.save`
Bytes = Callable[[np.dtype], jax.Array | None]


def write_bucket(tensors: Sequence[tuple[str, np.ndarray]]) -> bytes:
    """A pickle of a flattened bucket. Raises KeyError for a dtype that the format lacks."""
    # Each tensor must begin at a multiple of its own width, since the reader views the bytes in place.
    tensors = sorted(tensors, key=lambda entry: -entry[1].itemsize)
    flat = b"".join(as_bytes(tensor).data for _, tensor in tensors)
    return bucket_of(_byte_tensor(flat), [StoredTensor(name, tensor.shape, tensor.dtype) for name, tensor in tensors])


def bucket_of(flat: bytes, tensors: Sequence[StoredTensor]) -> bytes:
    """A pickle of a flattened bucket. `flat` is a pickle, without its end, of a uint8 tensor in which `tensors` stand
    one behind the other. Raises KeyError for a dtype that the format lacks."""
    metadata, start = b"", 0
    for tensor in tensors:
        if tensor.dtype.name not in NAMES:
            raise KeyError(tensor.dtype.name)
        end = start + tensor.nbytes
        state = {
            "name": _text(tensor.name),
            "shape": _call("torch", "Size", _tuple(map(_integer, tensor.shape)) + pickle.TUPLE1),
            "dtype": _global("torch", tensor.dtype.name),
            "start_idx": _integer(start),
            "end_idx": _integer(end),
            "numel": _integer(end - start),  # bytes, as in SGLang
        }
        metadata += _global(*METADATA) + pickle.EMPTY_TUPLE + pickle.NEWOBJ + _dict(state) + pickle.BUILD
        metadata += pickle.APPEND
        start = end
    values = {"flattened_tensor": flat, "metadata": pickle.EMPTY_LIST + metadata}
    return pickle.PROTO + b"\x04" + _dict(values) + pickle.STOP


def _byte_tensor(data: bytes) -> bytes:
    """`torch.Tensor.__reduce_ex__` of a uint8 vector that is pickled with its values."""
    saved = _saved(data)
    storage = pickle.BINBYTES8 + struct.pack("<Q", len(saved)) + saved
    arguments = [
        _call("torch.storage", "_load_from_bytes", storage + pickle.TUPLE1),
        _integer(0),  # its offset in the storage
        _integer(len(data)) + pickle.TUPLE1,  # its size
        _integer(1) + pickle.TUPLE1,  # its stride
        pickle.NEWFALSE,  # no gradient
        _call("collections", "OrderedDict", pickle.EMPTY_TUPLE),  # no hooks
    ]
    return _call("torch._utils", "_rebuild_tensor_v2", _tuple(arguments))


def _saved(data: bytes) -> bytes:
    """`torch.save` of a byte storage, in the older format that pickles storages: five pickles, then the bytes."""
    place = [_text("storage"), _global("torch", "ByteStorage"), _text("0"), _text("cpu"), _integer(len(data))]
    reference = pickle.PROTO + b"\x02" + _tuple([*place, pickle.NONE]) + pickle.BINPERSID + pickle.STOP
    host = {"protocol_version": PROTOCOL, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    before = b"".join(pickle.dumps(value, protocol=2) for value in (MAGIC, PROTOCOL, host))
    return before + reference + pickle.dumps(["0"], protocol=2) + struct.pack("<q", len(data)) + data


def _call(module: str, name: str, arguments: bytes) -> bytes:
    return _global(module, name) + arguments + pickle.REDUCE


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    encoded = text.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded


def _integer(number: int) -> bytes:
    encoded = pickle.encode_long(number)
    return pickle.LONG1 + bytes([len(encoded)]) + encoded


def _tuple(items: Any) -> bytes:
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def _dict(items: Mapping[str, bytes]) -> bytes:
    pairs = (_text(key) + value + pickle.SETITEM for key, value in items.items())
    return pickle.EMPTY_DICT + b"".join(pairs)


def device_tensors(config: DecoderConfig, params: Mapping[str, Any]) -> dict[str, Bytes]:
    """A function for each tensor, by its name in a checkpoint, unless other processes hold parts of it. The function
    casts the tensor to a dtype, and returns its bytes `[N]` (uint8) as in a checkpoint, on the device. It keeps no
    array alive: it returns None for one that was freed or deleted."""
    values, found = by_path(params), dict[str, Bytes]()
    for entry in tensor_names(config):
        value = values[entry.path]
        if isinstance(value, jax.Array) and value.is_fully_addressable:
            for layer, name in enumerate(entry.full_names):
                found[name] = functools.partial(_bytes_of, weakref.ref(value), entry, layer)
    return found


def _bytes_of(array: weakref.ref[jax.Array], entry: TensorName, layer: int, dtype: np.dtype) -> jax.Array | None:
    value = array()
    if value is None or value.is_deleted():
        return None
    flat = _flat(value, layer, entry, dtype)
    first = min(flat.sharding.device_set, key=lambda device: device.id)
    return jax.device_put(flat, first)  # joins the parts of a sharded array


@functools.partial(jax.jit, static_argnames=("entry", "dtype"))
def _flat(value: jax.Array, layer: jax.Array, entry: TensorName, dtype: np.dtype) -> jax.Array:
    if entry.stacked:
        value = jax.lax.dynamic_index_in_dim(value, layer, keepdims=False)
    return jax.lax.bitcast_convert_type(entry.laid_out(value).astype(dtype), jnp.uint8).reshape(-1)


class SharedBucket:
    """Memory that another process opens. The memory may be filled again when that process has read it."""

    def __init__(self) -> None:
        """Raises ImportError if PyTorch is not installed."""
        import torch  # no other route needs PyTorch

        self._torch = torch
        self._memory = torch.empty(0, dtype=torch.uint8)

    def fill(self, parts: Sequence[np.ndarray | jax.Array]) -> None:
        """Fills the memory with `parts` (uint8, `[N]` each), one behind the other; on a GPU if any part is on a GPU."""
        torch = self._torch
        found = [
            torch.from_numpy(part) if isinstance(part, np.ndarray) else torch.from_dlpack(part.block_until_ready())
            for part in parts
        ]
        device = next((part.device for part in found if part.is_cuda), found[0].device)
        size = sum(part.numel() for part in found)
        if self._memory.numel() < size or self._memory.device != device:
            self._memory = torch.empty(size, dtype=torch.uint8, device=device)
            if not self._memory.is_cuda:
                torch.multiprocessing.set_sharing_strategy("file_system")  # the other strategy passes file descriptors
                self._memory.share_memory_()
        self._filled = self._memory[:size]
        torch.cat(found if device.type == "cpu" else [part.to(device) for part in found], out=self._filled)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def handle(self) -> bytes:
        """A pickle, without its end, of the filled memory, for one process."""
        from torch.multiprocessing import reductions

        rebuild, arguments = reductions.reduce_tensor(self._filled)
        if self._filled.is_cuda:  # the other process may see its GPUs under other numbers; SGLang looks for the UUID
            uuid = str(self._torch.cuda.get_device_properties(self._filled.device).uuid)
            arguments = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
        return _call(rebuild.__module__, rebuild.__name__, bytes(ForkingPickler.dumps(arguments))[: -len(pickle.STOP)])


_DEVICE = 6  # index of the device among the arguments of `rebuild_cuda_tensor`
