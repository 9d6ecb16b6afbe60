"""Random numbers as functions of names (seed, kind, draw, attempt, sample), and the faults that they cause: crashes,
slow engines, lost, doubled and late replies, slow syncs, rewards that hang.

Runs of different scheduling policies meet the same faults for the same engines, responses and versions.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from ..config.bounds import Section, not_negative, positive, within

_CRASH, _DOWN, _SLOW, _SLOW_FOR, _REPLY, _DELAY, _SYNC, _REWARD = range(8)
_MASK = (1 << 64) - 1


def key(*names: int) -> int:
    """Returns a 64-bit hash of the whole numbers (the finaliser of splitmix64, chained)."""
    mixed = 0
    for name in names:
        mixed = (mixed + name + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed


def uniform(*names: int) -> float:
    """Returns a uniform number in (0, 1)."""
    return ((key(*names) >> 12) + 0.5) * 2.0**-52


def exponential(mean: float, *names: int) -> float:
    return -mean * math.log(uniform(*names))


def generator(*names: int) -> np.random.Generator:
    """Returns a generator of random numbers that depend only on `names`."""
    return np.random.Generator(np.random.Philox(key=key(*names)))


@dataclasses.dataclass(slots=True)
class FaultRates(Section):
    """Rates of faults; by default none happen. Intervals and durations (s) are means of exponential distributions."""

    crash_every: float = not_negative(0.0)  # seconds that an engine is up between two crashes; 0: never
    down: float = not_negative(60.0)  # seconds until a crashed engine is up again
    slow_every: float = not_negative(0.0)  # seconds between two slow spells of an engine; 0: never
    slow_for: float = not_negative(120.0)  # seconds that a slow spell lasts
    slow_factor: float = positive(4.0)  # factor on the time of an engine's work in a slow spell
    lost: float = within(0.0, "[0, 1]")  # probability that a response never arrives
    doubled: float = within(0.0, "[0, 1]")  # probability that a response arrives twice
    late: float = within(0.0, "[0, 1]")  # probability that a response arrives late
    delay: float = not_negative(30.0)  # seconds until a late reply, and until the second copy of a doubled reply
    slow_sync: float = within(0.0, "[0, 1]")  # probability that an engine takes long to load new weights
    sync_delay: float = not_negative(30.0)  # additional seconds of a slow sync
    environment_fails: float = within(0.0, "[0, 1]")  # probability that an environment does not answer a turn
    reward_hangs: float = within(0.0, "[0, 1]")  # probability that a reward never arrives: only a time-out ends it


class FaultPlan:
    """The faults of one run. Draws, attempts and samples are named as in `Workload.samples`."""

    def __init__(self, rates: FaultRates, seed: int) -> None:
        self.rates, self.seed = rates, seed

    def crashes(self, engine: int) -> Iterator[tuple[float, float]]:
        """Yields (time of a crash, seconds until the engine is up again), endlessly; nothing if `crash_every` is 0."""
        return self._spells(self.rates.crash_every, self.rates.down, _CRASH, _DOWN, engine)

    def slow_spells(self, engine: int) -> Iterator[tuple[float, float]]:
        """Yields (beginning, seconds) of the spells in which the engine takes `slow_factor` times as long."""
        return self._spells(self.rates.slow_every, self.rates.slow_for, _SLOW, _SLOW_FOR, engine)

    def _spells(self, every: float, lasts: float, gap: int, length: int, engine: int) -> Iterator[tuple[float, float]]:
        time, count = 0.0, 0
        while every > 0:
            time += exponential(every, self.seed, gap, engine, count)
            seconds = exponential(lasts, self.seed, length, engine, count) if lasts > 0 else 0.0
            yield time, seconds
            time += seconds
            count += 1

    def replies(self, draw: int, attempt: int, sample: int) -> tuple[float, ...]:
        """Returns the times at which a response arrives, in seconds after its end: `(0.0,)` without a fault, `()` for a
        lost response, one late time, or two times."""
        rates = self.rates
        chance = rates.lost + rates.doubled + rates.late
        if not chance:
            return (0.0,)
        dice = uniform(self.seed, _REPLY, draw, attempt, sample)
        if dice >= chance:
            return (0.0,)
        if dice < rates.lost:
            return ()
        delay = exponential(rates.delay, self.seed, _DELAY, draw, attempt, sample)
        return (delay,) if dice < rates.lost + rates.late else (0.0, delay)

    def sync_delay(self, version: int, engine: int) -> float:
        """Returns the additional seconds that an engine takes to load the weights of `version`."""
        rates = self.rates
        if not rates.slow_sync or uniform(self.seed, _SYNC, version, engine) >= rates.slow_sync:
            return 0.0
        return exponential(rates.sync_delay, self.seed, _DELAY, version, engine)

    def reward_hangs(self, draw: int, attempt: int, sample: int) -> bool:
        """Says whether scoring this response never ends by itself."""
        chance = self.rates.reward_hangs
        return chance > 0 and uniform(self.seed, _REWARD, draw, attempt, sample) < chance
