"""Doors of packages: names that a package offers, each in a module that is imported when the name is first used."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def door(package: str, **modules: tuple[str, ...]) -> Callable[[str], object]:
    """Returns the `__getattr__` (PEP 562) of a package; `modules` maps each module to the names that it offers."""
    homes = {name: f"{package}.{module}" for module, names in modules.items() for name in names}

    def offered(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return offered


def _found(package: str, path: str) -> Any:
    """The module of this path below `package`, or for a path `module:attribute` the module's attribute."""
    module, _, attribute = path.partition(":")
    value: Any = importlib.import_module(f"{package}.{module}")
    return getattr(value, attribute) if attribute else value


def later(beside: str, path: str) -> Callable[..., Any]:
    """The function or class `module:name` in the package of the module `beside`, imported when it is first called."""

    def call(*args: Any, **settings: Any) -> Any:
        return _found(beside.rpartition(".")[0], path)(*args, **settings)

    return call


class ByName(Mapping[str, T], Generic[T]):
    """The choices of a setting: `paths` maps the name of each choice to a module beside the module `beside`, or to its
    attribute, `module:attribute`, which `make(value, name)` turns into the choice when that is first used."""

    def __init__(
        self, beside: str, paths: Mapping[str, str], make: Callable[[Any, str], T] = lambda value, name: value
    ) -> None:
        self._package, self._paths, self._make = beside.rpartition(".")[0], paths, make
        self._choices: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._choices:
            self._choices[name] = self._make(_found(self._package, self._paths[name]), name)
        return self._choices[name]

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)
