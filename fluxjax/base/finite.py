"""Reads numbers that users' code returns."""

import decimal
import math
import numbers
from typing import Any


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
