"""Flattened buckets of tensors as SGLang's `/update_weights_from_tensor` takes them, without PyTorch.

A bucket is `{"flattened_tensor": bytes of all tensors as one uint8 tensor, "metadata": [one a tensor]}`
(`sglang.srt.weight_sync.tensor_bucket`). Neither the trainer nor `rollout.serve` has PyTorch: what it would pickle is
written opcode by opcode here, and read by an unpickler that knows these few names and no others.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.weight_file import DTYPES as NAMES

DTYPES = {name: jnp.dtype(name) for name in NAMES}
METADATA = "sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of `torch.save`


class BucketError(ValueError):
    """Bytes that are no bucket of tensors."""


def write_bucket(tensors: Sequence[tuple[str, np.ndarray]]) -> bytes:
    """A pickle of a flattened bucket. Raises KeyError for a dtype that it cannot say."""
    # Each must begin at a multiple of its own width: the reader views the bytes in place.
    tensors = sorted(tensors, key=lambda entry: -entry[1].itemsize)
    flat = b"".join(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data for _, tensor in tensors)
    metadata, start = b"", 0
    for name, tensor in tensors:
        if tensor.dtype.name not in DTYPES:
            raise KeyError(tensor.dtype.name)
        end = start + tensor.nbytes
        state = {
            "name": _text(name),
            "shape": _call("torch", "Size", _tuple(map(_integer, tensor.shape)) + pickle.TUPLE1),
            "dtype": _global("torch", tensor.dtype.name),
            "start_idx": _integer(start),
            "end_idx": _integer(end),
            "numel": _integer(end - start),  # bytes, as there
        }
        metadata += _global(*METADATA) + pickle.EMPTY_TUPLE + pickle.NEWOBJ + _dict(state) + pickle.BUILD
        metadata += pickle.APPEND
        start = end
    values = {"flattened_tensor": _byte_tensor(flat), "metadata": pickle.EMPTY_LIST + metadata}
    return pickle.PROTO + b"\x04" + _dict(values) + pickle.STOP


def read_bucket(data: bytes) -> dict[str, np.ndarray]:
    """The tensors of a pickled bucket. Raises BucketError, also for names that buckets have no use for."""
    try:
        bucket = _Unpickler(io.BytesIO(data), _BUCKET).load()
        flat, tensors = bucket["flattened_tensor"], {}
        for part in bucket["metadata"]:
            piece = flat[part.start_idx : part.end_idx]
            tensors[part.name] = piece.view(part.dtype).reshape(part.shape)
    except BucketError:
        raise
    except Exception as error:  # whatever foreign bytes make of the unpickler
        raise BucketError(f"not a flattened bucket of tensors: {type(error).__name__}: {error}") from None
    return tensors


# --- writing ------------------------------------------------------------------------------------


def _byte_tensor(data: bytes) -> bytes:
    """`torch.Tensor.__reduce_ex__` of a uint8 vector that is pickled with its values."""
    saved = _saved(data)
    storage = pickle.BINBYTES8 + struct.pack("<Q", len(saved)) + saved
    arguments = [
        _call("torch.storage", "_load_from_bytes", storage + pickle.TUPLE1),
        _integer(0),  # where it begins in the storage
        _integer(len(data)) + pickle.TUPLE1,  # its size
        _integer(1) + pickle.TUPLE1,  # its stride
        pickle.NEWFALSE,  # no gradient
        _call("collections", "OrderedDict", pickle.EMPTY_TUPLE),  # no hooks
    ]
    return _call("torch._utils", "_rebuild_tensor_v2", _tuple(arguments))


def _saved(data: bytes) -> bytes:
    """`torch.save` of a storage of bytes, in the older format, as storages are pickled: five pickles and the bytes."""
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


# --- reading ------------------------------------------------------------------------------------


class _Metadata:
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    start_idx: int
    end_idx: int


def _storage(data: bytes) -> np.ndarray:
    stream = io.BytesIO(data)
    magic, protocol, host, _, keys = (_Unpickler(stream, _STORAGE).load() for _ in range(5))
    if (magic, protocol, len(keys)) != (MAGIC, PROTOCOL, 1) or not host["little_endian"]:
        raise BucketError("a storage that is not as PyTorch pickles one")
    (size,) = struct.unpack("<q", stream.read(8))
    return np.frombuffer(data, np.uint8, size, stream.tell())


def _rebuilt(storage: np.ndarray, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any) -> np.ndarray:
    if len(size) != 1 or tuple(stride) != (1,):
        raise BucketError(f"a flattened tensor of shape {tuple(size)} with strides {tuple(stride)}")
    return storage[offset : offset + size[0]]


_STORAGE: dict[tuple[str, str], Any] = {("torch", "ByteStorage"): None, ("torch.storage", "UntypedStorage"): None}
_BUCKET: dict[tuple[str, str], Callable[..., Any] | np.dtype] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    METADATA: _Metadata,
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, known: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(data)
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            raise BucketError(f"a pickle that wants {module}.{name}, which no bucket of tensors needs")
        return self._known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        return pid
