"""Many decode steps at once. Each takes a little longer than the one before, because the cache grows by as much.

Step i of a jump (i = 0, 1, ...) takes `first + i * growth` seconds, so n steps take n first + growth n (n - 1) / 2.
"""

from __future__ import annotations

import math


class Jump:
    """`steps` steps from time `anchor` (s) on."""

    __slots__ = ("anchor", "first", "growth", "steps")

    def __init__(self, anchor: float, first: float, growth: float, steps: int) -> None:
        self.anchor, self.first, self.growth, self.steps = anchor, first, growth, steps

    def end(self, steps: int) -> float:
        """The time at which so many steps are done."""
        return self.anchor + (steps * self.first + self.growth * (steps * (steps - 1) // 2))

    def elapsed(self, now: float) -> int:
        """Steps that are done at `now`: a guess from the quadratic equation, made exact."""
        if now >= self.end(self.steps):
            return self.steps
        spent, linear = max(now - self.anchor, 0.0), self.first - self.growth / 2
        root = math.sqrt(linear * linear + 2 * self.growth * spent)
        guess = min(int(2 * spent / (linear + root)), self.steps) if linear + root > 0 else 0
        while guess > 0 and self.end(guess) > now:
            guess -= 1
        while guess < self.steps and self.end(guess + 1) <= now:
            guess += 1
        return guess

    def cut(self, done: int, now: float) -> None:
        """After `done` steps, the jump is only the step that is under way at `now`; nothing if none is."""
        self.anchor, self.first = self.end(done), self.first + self.growth * done
        self.steps = 0 if self.anchor >= now else 1
