"""Numbers that users' code returns, and counts of the reasons why users' code fails."""

import collections
import decimal
import math
import numbers
from typing import Any

_REASONS = 32  # reasons that are counted one by one; further reasons are counted together
_LENGTH = 200  # characters after which a reason is cut off


class ReasonCounts(collections.Counter[str]):
    """The number of failures by reason, of bounded size."""

    def note(self, reason: str) -> str:
        """Counts a reason, and returns the text under which the reason is counted."""
        reason = reason if len(reason) <= _LENGTH else f"{reason[:_LENGTH]}..."
        if reason not in self and len(self) >= _REASONS:
            reason = "other reasons"
        self[reason] += 1
        return reason


def finite(value: Any, expected: str = "a number") -> float:
    """Returns a finite number of Python, numpy, JAX or the like as a float, also from an array without dimensions.
    Raises ValueError, whose text continues "returned"."""
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(number, numbers.Real | decimal.Decimal):
        raise ValueError(f"{type(value).__name__}, expected {expected}")
    try:
        result = float(number)
    except (OverflowError, ValueError) as error:  # a number too large for a float, a signalling NaN
        raise ValueError(f"{type(number).__name__}, which is no float: {error}") from None
    if not math.isfinite(result):
        raise ValueError(str(result))
    return result
