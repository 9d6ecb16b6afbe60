"""Three turns share what takes long and seldom shows anything: three landings in a row see all of it.

`FLUXJAX_TURN` is 0, 1 or 2; `.ci/run` takes the number of commits modulo three. A property test draws a third of its
examples then, others in each turn. Of each file's tests that are marked `slow` or `long`, every third runs. A test with
the marker `turn` runs in the turns that it names, whatever it takes: so cases of a product of options are dealt out,
mostly. Without the variable, all run.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

TURN = int(os.environ["FLUXJAX_TURN"]) if os.environ.get("FLUXJAX_TURN") else None


def third_of(examples: int) -> int:
    """Returns how many of a property's examples are drawn."""
    return examples if TURN is None else -(-examples // 3)


def has_come(*turns: int) -> bool:
    """Says whether the tests of these turns are to run."""
    return TURN is None or TURN in turns


def by_turns(cases: Iterable[Any], first: int = 0) -> list[Any]:
    """Returns the cases of `pytest.mark.parametrize` such that one runs in each of the turns 0, 1, 2, 0, ..., from
    `first` on."""
    given = [
        case if hasattr(case, "marks") else pytest.param(*(case if isinstance(case, tuple) else (case,)))
        for case in cases
    ]
    return [
        pytest.param(*case.values, marks=[*case.marks, pytest.mark.turn(turn % 3)], id=case.id)
        for turn, case in enumerate(given, first)
    ]


def divided(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Returns the tests that are to run, and those of other turns.

    Files begin with different turns, since many have one slow test or two.
    """
    seen: Counter[str] = Counter()
    due, later = [], []
    for item in items:
        turns: tuple[int, ...] = (0, 1, 2)
        if marker := item.get_closest_marker("turn"):
            turns = marker.args
        elif item.get_closest_marker("slow") or item.get_closest_marker("long"):
            file = item.location[0]
            turns = ((zlib.crc32(file.encode()) + seen[file]) % 3,)
            seen[file] += 1
        (due if has_come(*turns) else later).append(item)
    return due, later
