"""Parameters of rewards: fields of a frozen dataclass, checked when one is made."""

import dataclasses
import math
from typing import Any

from ..base.errors import ConfigError


def check_parameters(name: str, reward: Any) -> None:
    """Raises `ConfigError`, naming the parameter of the reward `name`, unless each field has the type of its default
    and is within the bound declared beside it (`config.bounds`). An int may stand for a float. A field that may hold
    an object is not looked at."""
    for field in dataclasses.fields(reward):
        if "object" in field.metadata:
            continue
        value, kind = getattr(reward, field.name), type(field.default)
        allowed = (int, float) if kind is float else (kind,)
        if type(value) not in allowed or (kind is float and not math.isfinite(value)):
            number = "a finite number" if kind is float else f"of type {kind.__name__}"
            raise ConfigError(f"{name}.{field.name} is {value!r}; it must be {number}")
        if "holds" in field.metadata and not field.metadata["holds"](value):
            raise ConfigError(f"{name}.{field.name} is {value!r}; it must {field.metadata['allowed']}")
