"""JSON values that nobody expects, and a JSON value with one of them in some place."""

from __future__ import annotations

import copy
import random
from typing import Any

from hypothesis import strategies as st

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
# Values at the ends of what types hold, and of the wrong type, for draws without hypothesis.
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, -(2**63), 2**64, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "x", "1", "\ud800", "\0", "ü" * 300, "../..", "~", "/dev/zero", "/proc/self/mem", "data:,", "file:///etc/passwd",
    [], [[]], {}, {"": None}, [None], ["x", 1], [[1, 2], [3]], [1e999], [{}] * 100,
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every part of a JSON value."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


def spoiled(value: Any, draw: random.Random, most: int = 3) -> Any:
    """The value with some of its parts replaced by odd ones, removed, or doubled."""
    for _ in range(draw.randint(1, most)):
        place = draw.choice(places(value)[draw.random() < 0.95 :] or [()])  # seldom all of it
        parent: Any = value
        for key in place[:-1]:
            parent = parent[key]
        if place and isinstance(parent, dict) and draw.random() < 0.2:
            value = replaced(value, place[:-1], {key: inner for key, inner in parent.items() if key != place[-1]})
        elif place and isinstance(parent, list) and draw.random() < 0.3:
            value = replaced(value, place[:-1], parent * draw.randint(2, 5))
        else:
            value = replaced(value, place, draw.choice(ODD))
    return value


def spoiled_bytes(data: bytes, draw: random.Random) -> bytes:
    """The bytes with a few of them changed, left out, put in, or cut off."""
    content = bytearray(data)
    for _ in range(draw.randint(0, 4)):
        place = draw.randrange(len(content) + 1)
        how = draw.randrange(4)
        if how == 0 and place < len(content):
            content[place] ^= 1 << draw.randrange(8)
        elif how == 1:
            del content[place : place + draw.choice((1, 2, 8, 100))]
        elif how == 2:
            content[place:place] = draw.randbytes(draw.choice((1, 2, 8, 100)))
        elif draw.random() < 0.3:
            del content[place:]
    return bytes(content)
