"""A PID controller, which moves a value between bounds; whatever steers by a measurement uses it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Pid:
    """Moves `value` up while the error is positive (Flux, component 1); the unit of time is one update.

    Each update adds `kp * error + ki * sum of errors + kd * change of the error`. Anti-windup: if that would leave the
    bounds, the sum of errors is cut back to what just reaches them. So no sum keeps the value at a bound: when the
    error changes its sign, the value follows at once.
    """

    def __init__(self, value: float, low: float, high: float, *, kp: float, ki: float, kd: float) -> None:
        if not low <= value <= high:
            raise ValueError(f"the value {value} is not between {low} and {high}")
        self.value, self.low, self.high = value, low, high
        self._kp, self._ki, self._kd = kp, ki, kd
        self._sum = 0.0
        self._last: float | None = None  # the error of the update before

    def update(self, error: float) -> float:
        """Returns the new value. An error that is no finite number changes nothing."""
        if not math.isfinite(error):
            return self.value
        change = 0.0 if self._last is None else error - self._last
        self._last = error
        self._sum += error
        direct = self._kp * error + self._kd * change
        wanted = self.value + direct + self._ki * self._sum
        bounded = min(max(wanted, self.low), self.high)
        if bounded != wanted and self._ki:
            reaching = (bounded - self.value - direct) / self._ki
            self._sum = min(max(reaching, min(0.0, self._sum)), max(0.0, self._sum))  # nearer to 0, never past it
        self.value = bounded
        return self.value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value, "sum": self._sum, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state. A value outside of the bounds, which may have changed, moves to the nearer one."""
        self.value = min(max(state["value"], self.low), self.high)
        self._sum, self._last = state["sum"], state["last"]
