"""Resolves import paths of the configuration (`module:attribute`), and hides a package from libraries."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .errors import ConfigError


def imported(path: str, field: str, offers: Callable[[Any], bool]) -> Any:
    """Returns the attribute that `path` names. Raises `ConfigError`, naming `field`, if the module can't be imported or
    lacks the attribute. If the attribute is missing, the message lists the attributes for which `offers` is true."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(
            f"{field} is {path!r}, but importing {module_name!r} raised {type(error).__name__}: {error}"
        ) from error
    value = getattr(module, attribute, None)
    if value is None:
        known = ", ".join(name for name, candidate in vars(module).items() if offers(candidate))
        raise ConfigError(f"{field} is {path!r}, but {module_name} has no {attribute!r}; it has {known or 'none'}")
    return value


@contextlib.contextmanager
def as_if_missing(package: str) -> Iterator[None]:
    """Hides a package from libraries that the block imports. A package that is already imported is not hidden."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # None makes `import` raise ImportError
    try:
        yield
    finally:
        del sys.modules[package]
