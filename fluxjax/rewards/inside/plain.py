"""Plain data as lines of JSON, the only data that tests exchange with the tested code.

A received value consists of Python's own types. It can therefore neither claim to equal everything, nor run code when
it is compared, printed or unpacked. Texts, lists, None, booleans and most numbers stand for themselves. Any other value
is a dict with one key, such as the name of the value's type. No code is evaluated, and no data are unpickled.
"""

import collections
import importlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

LONGEST_LINE = 16 << 20  # bytes
MOST_ITEMS = 100_000  # the most items of an iterator, which may be endless
_EXACT = 1 << 53  # larger integers are hexadecimal, because Python refuses long decimals
_COLLECTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "iterator": iter,
}
_ATOMS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {  # functions to and from JSON
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda ends: range(*ends)),
}
_MODULES = {"Decimal": "decimal", "Fraction": "fractions"}  # imported only when needed, as imports are slow
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))


class NotPlain(Exception):
    """A value is not plain data, or a line is not of this protocol."""


def _refuse(value: Any) -> Any:
    raise NotPlain(f"of type {type(value).__name__}, which is no plain data")


def encode(value: Any, encode_object: Callable[[Any], Any] = _refuse) -> Any:
    """Returns a value that `json` can write. Subclasses become their built-in base type. `encode_object` encodes other
    objects. Raises `NotPlain` for an iterator that is too long and, by default, for other objects."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if -_EXACT < value < _EXACT else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    for name, (atom, to_json, _) in _ATOMS.items():
        if isinstance(value, atom):
            return {name: to_json(value)}
    if isinstance(value, dict):
        return {"dict": [[encode(key, encode_object), encode(item, encode_object)] for key, item in value.items()]}
    if isinstance(value, (list, *_VIEWS)):
        return _encode_items(value, encode_object)
    for name in ("tuple", "set", "frozenset", "deque"):
        if isinstance(value, _COLLECTIONS[name]):  # type: ignore[arg-type]  # these four values are types
            return {name: _encode_items(value, encode_object)}
    if isinstance(value, Iterator):
        return {"iterator": _encode_items(value, encode_object)}
    kind = type(value)
    if _MODULES.get(kind.__name__) == kind.__module__:
        return {kind.__name__: str(value)}
    if kind.__module__ == "numpy":  # numpy's arrays and numbers, except for `float64`, which is a float
        return encode(value.tolist(), encode_object)
    return encode_object(value)


def _encode_items(values: Iterable[Any], encode_object: Callable[[Any], Any]) -> list[Any]:
    items = []
    for value in values:
        if len(items) == MOST_ITEMS and isinstance(values, Iterator):
            raise NotPlain(f"an iterator of more than {MOST_ITEMS} items")
        items.append(encode(value, encode_object))
    return items


def decode(data: Any, object_at: Callable[[int], Any] = _refuse) -> Any:
    """Returns the value that `encode` encoded. `object_at(n)` has the object of `{"object": n}`. Raises `NotPlain`."""
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if isinstance(data, list):
        return [decode(item, object_at) for item in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise NotPlain("not of this protocol")
    ((name, content),) = data.items()
    try:
        if name == "object":
            return object_at(int(content))
        if name == "dict":
            return {decode(key, object_at): decode(item, object_at) for key, item in content}
        if name in _COLLECTIONS:
            return _COLLECTIONS[name]([decode(item, object_at) for item in content])
        if name == "int":
            return int(content, 16)
        if name in _MODULES:
            return getattr(importlib.import_module(_MODULES[name]), name)(str(content))
        return _ATOMS[name][2](content)
    except (TypeError, ValueError, ArithmeticError, KeyError) as error:  # such as a list in a set
        raise NotPlain(f"not of this protocol: {type(error).__name__}") from error


def write(pipe: BinaryIO, message: Any) -> None:
    """Writes a result of `encode` as one line. Raises `NotPlain` if the result is too deep or too long."""
    try:
        line = json.dumps(message).encode()
    except (RecursionError, ValueError) as error:
        raise NotPlain("nested too deep") from error
    if len(line) >= LONGEST_LINE:
        raise NotPlain(f"longer than {LONGEST_LINE >> 20} MiB")
    pipe.write(line + b"\n")
    pipe.flush()


def read(pipe: BinaryIO) -> Any:
    """Reads a line. Raises EOFError if the other process has ended, and `NotPlain` if the line is no JSON."""
    line = pipe.readline(LONGEST_LINE)
    if not line:
        raise EOFError
    if not line.endswith(b"\n"):
        raise NotPlain("an endless line or half a line")
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotPlain("no line of JSON") from error
