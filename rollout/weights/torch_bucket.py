"""Flattened buckets of tensors as SGLang's `/update_weights_from_tensor` takes them, without PyTorch.

A bucket is `{"flattened_tensor": bytes of all tensors as one uint8 tensor, "metadata": [one a tensor]}`
(`sglang.srt.weight_sync.tensor_bucket`). The trainer has no PyTorch: what it would pickle is written opcode by opcode.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.hf import DTYPES as NAMES
from models.hf import StoredTensor

DTYPES = {name: jnp.dtype(name) for name in NAMES}
METADATA = "sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of `torch.save`


def write_bucket(tensors: Sequence[tuple[str, np.ndarray]]) -> bytes:
    """A pickle of a flattened bucket. Raises KeyError for a dtype that it cannot say."""
    # Each must begin at a multiple of its own width: the reader views the bytes in place.
    tensors = sorted(tensors, key=lambda entry: -entry[1].itemsize)
    flat = b"".join(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data for _, tensor in tensors)
    return bucket_of(_byte_tensor(flat), [StoredTensor(name, tensor.shape, tensor.dtype) for name, tensor in tensors])


def bucket_of(flat: bytes, tensors: Sequence[StoredTensor]) -> bytes:
    """A pickle of a flattened bucket, of one (without its end) of a uint8 tensor in which these stand one behind the
    other. Raises KeyError for a dtype that it cannot say."""
    metadata, start = b"", 0
    for tensor in tensors:
        if tensor.dtype.name not in DTYPES:
            raise KeyError(tensor.dtype.name)
        end = start + tensor.nbytes
        state = {
            "name": _text(tensor.name),
            "shape": _call("torch", "Size", _tuple(map(_integer, tensor.shape)) + pickle.TUPLE1),
            "dtype": _global("torch", tensor.dtype.name),
            "start_idx": _integer(start),
            "end_idx": _integer(end),
            "numel": _integer(end - start),  # bytes, as there
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
