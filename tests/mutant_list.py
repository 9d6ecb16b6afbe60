"""Mutants that tests must notice: `tests/mutants.py` runs them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`old`, which is in `file` exactly once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str


MUTANTS: list[Mutant] = []
