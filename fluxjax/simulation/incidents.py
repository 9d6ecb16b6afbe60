"""What befalls the engines of a simulated cluster, as a `FaultPlan` says: crashes and slow spells."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from .faults import FaultPlan
from .rollout import Rollout

Spells = Iterator[tuple[float, float]]


class Incidents:
    """One after the other. Where engines became fewer on the way, those that are gone meet none."""

    def __init__(self, rollout: Rollout, faults: FaultPlan) -> None:
        self.rollout, self.clock, self.factor = rollout, rollout.clock, faults.rates.slow_factor
        for index in range(len(rollout.engines)):
            self._next_crash(index, faults.crashes(index))
            self._next_spell(index, faults.slow_spells(index))

    def _next_crash(self, index: int, crashes: Spells) -> None:
        if (crash := next(crashes, None)) is not None:
            time, seconds = crash
            self.clock.at(max(time, self.clock.now), partial(self._crash, index, seconds, crashes))

    def _crash(self, index: int, seconds: float, crashes: Spells) -> None:
        self.clock.after(seconds, partial(self._recover, index, crashes))
        if index < len(self.rollout.engines):
            self.rollout.crash(index, f"engine {index} crashed")

    def _recover(self, index: int, crashes: Spells) -> None:
        if index < len(self.rollout.engines):
            self.rollout.recover(index)
        self._next_crash(index, crashes)

    def _next_spell(self, index: int, spells: Spells) -> None:
        if (spell := next(spells, None)) is not None:
            begin = max(spell[0], self.clock.now)
            self.clock.at(begin, partial(self._slow_down, index, self.factor))
            self.clock.at(begin + spell[1], partial(self._spell_ends, index, spells))

    def _spell_ends(self, index: int, spells: Spells) -> None:
        self._slow_down(index, 1.0)
        self._next_spell(index, spells)

    def _slow_down(self, index: int, factor: float) -> None:
        if index < len(self.rollout.engines):
            self.rollout.engines[index].slow_down(factor)
