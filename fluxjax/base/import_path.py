"""Finds what an import path of the configuration, `module:attribute`, stands for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .errors import ConfigError


def imported(path: str, field: str, offers: Callable[[Any], bool]) -> Any:
    """Returns the attribute that `path` names. Raises `ConfigError`, naming `field`, where the module can't be
    imported or lacks it; the message lists what the module has instead, of that for which `offers` is true."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever importing the user's module raises
        raise ConfigError(
            f"{field} is {path!r}, but importing {module_name!r} raised {type(error).__name__}: {error}"
        ) from error
    value = getattr(module, attribute, None)
    if value is None:
        known = [name for name, other in vars(module).items() if offers(other)]
        raise ConfigError(
            f"{field} is {path!r}, but {module_name} has no {attribute!r}; it has {', '.join(known) or 'none'}"
        )
    return value
