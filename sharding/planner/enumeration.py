"""All ways to place a handful of things, as small matrices: made once, then every enumeration is a matrix product."""

from __future__ import annotations

import functools
import itertools
import typing

import numpy as np


@functools.cache
def signs(count: int) -> np.ndarray:
    """`[2**(count - 1), count]` of +1 and -1: all ways to put `count` things on two sides, the first one always +1."""
    codes = np.arange(2 ** max(count - 1, 0))[:, None] >> np.arange(count)[None, ::-1]
    return 1.0 - 2.0 * (codes & 1)


class Ternary(typing.NamedTuple):
    """`[codes, count]` each: 1.0 where the thing is left, right, stays; and the code itself (0, 1, 2)."""

    left: np.ndarray
    right: np.ndarray
    stay: np.ndarray
    code: np.ndarray


@functools.cache
def ternary(count: int) -> Ternary:
    """Left, right or both, for each of `count` things. The two sides are alike, so the first is never right."""
    code = np.array(list(itertools.product((0, 1, 2), repeat=count)), np.int8).reshape(-1, count)
    code = code[code[:, 0] != 1] if count else code
    return Ternary((code == 0) * 1.0, (code == 1) * 1.0, (code == 2) * 1.0, code)


class Subsets(typing.NamedTuple):
    """Each of `count` things elsewhere (0), left (1), right (2) or in both halves (3) of a group.

    Ordered by the set of those that are here: the codes of set `m` (bit `i`: thing `i` is here) are
    `[starts[m], starts[m + 1])`. `left` and `right` hold the share of a thing that each half computes, `both` is 1.0
    where a thing stays in both.
    """

    code: np.ndarray
    starts: np.ndarray
    left: np.ndarray
    right: np.ndarray
    both: np.ndarray


@functools.cache
def subsets(count: int) -> Subsets:
    code = np.array(list(itertools.product(range(4), repeat=count)), np.int8).reshape(-1, count)
    here = ((code > 0) << np.arange(count)).sum(1)
    order = np.argsort(here, kind="stable")
    code, here = code[order], here[order]
    both = (code == 3) * 1.0
    starts = np.searchsorted(here, np.arange(2**count + 1))
    return Subsets(code, starts, (code == 1) + both / 2, (code == 2) + both / 2, both)
