"""Flattened buckets of tensors as SGLang's `/update_weights_from_tensor` takes them, without PyTorch.

A bucket is `{"flattened_tensor": bytes of all tensors as one uint8 tensor, "metadata": [one a tensor]}`
(`sglang.srt.weight_sync.tensor_bucket`). Neither the trainer nor `rollout.serve` has PyTorch: what it would pickle is
written opcode by opcode here, and read opcode by opcode, for Python's unpickler lets a pickle change the classes that
it names, and sets memory aside for whatever memo it mentions.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.weight_file import DTYPES as NAMES
from models.weight_file import StoredTensor

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


def read_bucket(data: bytes) -> dict[str, np.ndarray]:
    """The tensors of a pickled bucket. Raises BucketError, also for names that buckets have no use for."""
    try:
        bucket = _unpickled(io.BytesIO(data), _BUCKET)
        flat, tensors = bucket["flattened_tensor"], {}
        for part in map(vars, bucket["metadata"]):
            piece = flat[_checked(part["start_idx"], int) : _checked(part["end_idx"], int)]
            typed = piece.view(_checked(part["dtype"], np.dtype))
            tensors[_checked(part["name"], str)] = typed.reshape(_checked(part["shape"], tuple))
    except BucketError:
        raise
    except Exception as error:  # whatever foreign bytes mean
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
    """A tensor's attributes, as a pickle says them."""


def _checked(value: Any, kind: type) -> Any:
    """The value, which is of this kind. It is neither shown nor compared before: tuples of tuples that a few bytes
    make have no end."""
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} in the place of {kind.__name__}")
    return value


def _storage(data: bytes) -> np.ndarray:
    stream = io.BytesIO(data)
    magic, protocol, host, _, keys = (_unpickled(stream, _STORAGE) for _ in range(5))
    if (magic, protocol, len(keys)) != (MAGIC, PROTOCOL, 1) or not host["little_endian"]:
        raise BucketError("a storage that is not as PyTorch pickles one")
    (size,) = struct.unpack("<q", stream.read(8))
    return np.frombuffer(data, np.uint8, size, stream.tell())


def _rebuilt(storage: np.ndarray, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any) -> np.ndarray:
    if len(_checked(size, tuple)) != 1 or _checked(stride, tuple) != (1,):
        raise BucketError(f"a flattened tensor of {len(size)} dimensions, or with strides")
    return _checked(storage, np.ndarray)[_checked(offset, int) : offset + _checked(size[0], int)]


# The names that a pickle may say: functions, which it may call, and values. None of them copies what it is given, for a
# few bytes can say a large value again and again.
_STORAGE: dict[tuple[str, str], Any] = {("torch", "ByteStorage"): None, ("torch.storage", "UntypedStorage"): None}
_BUCKET: dict[tuple[str, str], Callable[..., Any] | np.dtype] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("torch", "Size"): lambda sides: _checked(sides, tuple),
    ("collections", "OrderedDict"): lambda: {},
    METADATA: _Metadata,
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
           "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}  # fmt: skip
_NEW = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "NONE": lambda: None, "NEWTRUE": lambda: True,
        "NEWFALSE": bool}  # fmt: skip
_COUNTS = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": -1, "APPEND": 1, "APPENDS": -1, "SETITEM": 2, "SETITEMS": -1}


def _unpickled(stream: io.BytesIO, known: Mapping[tuple[str, str], Any]) -> Any:
    """The value of the pickle that begins here, of the opcodes only that PyTorch writes for a bucket. Raises
    BucketError for others and for names that are not `known`, and whatever a pickle without sense ends in."""
    stack, marks, memo = list[Any](), list[int](), dict[int, Any]()
    value: Any

    def popped(count: int) -> list[Any]:
        """The topmost values, all of them above the last mark for -1."""
        start = marks.pop() if count < 0 else len(stack) - count
        values = stack[start:]
        del stack[start:]
        return values

    for opcode, value, _ in pickletools.genops(stream):
        match opcode.name:
            case "PROTO" | "FRAME" | "BINPERSID":  # what stands for a storage is not looked at
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                marks.append(len(stack))
            case name if name in _VALUES:
                stack.append(value)
            case name if name in _NEW:
                stack.append(_NEW[name]())
            case "MEMOIZE" | "BINPUT" | "LONG_BINPUT":
                memo[len(memo) if value is None else value] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case name if name in _COUNTS:
                items = popped(_COUNTS[name])
                if name.startswith("TUPLE"):
                    stack.append(tuple(items))
                elif name.startswith("APPEND"):
                    _checked(stack[-1], list).extend(items)
                else:
                    keys = (_checked(key, str) for key in items[::2])
                    _checked(stack[-1], dict).update(zip(keys, items[1::2], strict=True))
            case "GLOBAL" | "STACK_GLOBAL":
                module, name = value.split(" ", 1) if opcode.name == "GLOBAL" else popped(2)
                if (_checked(module, str), _checked(name, str)) not in known:
                    raise BucketError(
                        f"a pickle that wants {module}.{name}"[:200] + ", which no bucket of tensors needs"
                    )
                stack.append(known[module, name])
            case "REDUCE" | "NEWOBJ":
                called, arguments = popped(2)
                stack.append(called(*_checked(arguments, tuple)))
            case "BUILD":
                (state,) = popped(1)
                vars(_checked(stack[-1], _Metadata)).update(_checked(state, dict))
            case name:
                raise BucketError(f"a pickle with the opcode {name}, which no bucket of tensors needs")
