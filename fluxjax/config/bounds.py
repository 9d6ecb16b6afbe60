"""The common part of all sections of settings: bounds declared beside their fields, and functions over all fields."""

import contextlib
import dataclasses
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..base.errors import ConfigError

T = TypeVar("T")
PLAIN = str | int | float | bool | list | tuple | None  # types of the values of a dictionary that has no sections


class Section:
    """The base of the dataclasses of settings. A settled section refuses assignments; its copies accept them."""

    __slots__ = ("_settled",)
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    if not TYPE_CHECKING:  # type checkers see the declared fields

        def __setattr__(self, name: str, value: object) -> None:
            if getattr(self, "_settled", None) == id(self):
                raise ConfigError(
                    f"{name}: the configuration of a FluxTrainer can't be changed; change it before making one"
                )
            super().__setattr__(name, value)

    def settle(self) -> None:
        """Settles this section, and all sections within it: from now on, assignments raise `ConfigError`."""
        for value in children(self).values():
            for entry in value.values() if isinstance(value, Mapping) else [value]:
                if isinstance(entry, Section):
                    entry.settle()
        self._settled = id(self)  # a copy has another id, and is not settled


def bounded(default: T, holds: Callable[[Any], bool], allowed: str) -> T:
    """Declares a field of settings. `holds(value)` is True for allowed values; errors say "it must" and `allowed`."""
    return dataclasses.field(default=default, metadata={"holds": holds, "allowed": allowed})


def within(default: T, interval: str, why: str = "") -> T:
    """Declares a number field with an interval such as "[0, 1)" or "[1, inf)"; errors end with `why`."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    if high < math.inf:
        allowed = f"be in {interval}"
    elif interval[0] == "(":
        allowed = f"be greater than {low:g}"
    else:
        allowed = f"be at least {low:g}" if low else "not be negative"
    allowed += f": {why}" if why else ""
    return bounded(default, _holds(interval), allowed)


def _holds(interval: str) -> Callable[[float], bool]:
    """Returns a function that returns True for numbers in an interval such as "[0, 1)"."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above, below = (operator.gt, operator.ge)[interval[0] == "["], (operator.lt, operator.le)[interval[-1] == "]"]
    return lambda value: above(value, low) and below(value, high)


def positive(default: T) -> T:
    return within(default, "(0, inf)")


def not_negative(default: T) -> T:
    return within(default, "[0, inf)")


def pair(default: T, first: str, second: str, why: str = "") -> T:
    """Declares a field of two numbers, each with its interval."""
    holds = [_holds(interval) for interval in (first, second)]

    def are_within(value: tuple[object, ...]) -> bool:
        numbers = [entry for entry in value if isinstance(entry, int | float)]
        return len(value) == len(numbers) == 2 and holds[0](numbers[0]) and holds[1](numbers[1])

    return bounded(default, are_within, f"be two numbers, in {first} and {second}" + (f": {why}" if why else ""))


def power_of_two(default: T) -> T:
    """Declares a number field whose value must be a power of two, or 0 if the default is 0."""
    least, allowed = (1, "be a power of two") if default else (0, "be 0 or a power of two")
    return bounded(default, lambda value: value >= least and not value & (value - 1), allowed)


class Chosen(Section):
    """The base of the sections that a `choice` holds."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The choice's name on the command line."""
        return variant(type(self))


def choice(default: type, *alternatives: type) -> Any:
    """Declares a field that holds one of several sections, each with its own settings."""
    kinds = {variant(kind): kind for kind in (default, *alternatives)}
    return dataclasses.field(default_factory=default, metadata={"choices": kinds})


def variant(kind: type) -> str:
    """Returns the name of a choice on the command line: `flex_ulysses` for `FlexUlysses`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__.removesuffix("Config")).lower()


def scheduled(default: float, interval: str, why: str = "") -> Any:
    """Declares a field that is a number or the text of a schedule. `interval` bounds the values."""
    declared: Any = within(default, interval, why)
    low, high = (float(end) for end in interval[1:-1].split(","))
    return dataclasses.field(default=default, metadata={**declared.metadata, "schedule": (low, high)})


def is_port(text: str) -> bool:
    """Returns True for a port, `host:port` or the empty text."""
    port = text.rpartition(":")[2]
    return not text or (port.isdigit() and 0 < int(port) < 1 << 16)


def check_fields(section: Any, prefix: str = "") -> None:
    """Raises `ConfigError`, naming the field, unless each field has the type of its default and is within its bound.
    Numbers must be finite. An int may stand for a float. A field that allows objects is not checked, nor is the text of
    a schedule. Sections within `section`, and in its dictionaries, are checked. A dictionary of plain values whose
    default is not empty may have only the keys of the default."""
    for field in dataclasses.fields(section):
        name, metadata = prefix + field.name, field.metadata
        value: Any = getattr(section, field.name)
        if "object" in metadata or ("schedule" in metadata and isinstance(value, str)):
            continue
        wanted: Any = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if kinds := metadata.get("choices"):
            if type(value) not in kinds.values():
                names = ", ".join(kind.__name__ for kind in kinds.values())
                raise ConfigError(f"{name} is {value!r}; it must be one of {names}")
            check_fields(value, f"{name}.")
        elif isinstance(wanted, Section):
            _check_section(name, value, type(wanted))
        elif isinstance(wanted, float):
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise ConfigError(f"{name} is {value!r}; it must be a finite number")
        elif isinstance(wanted, Mapping) and isinstance(value, Mapping):
            for key, entry in value.items():
                if "entries" in metadata:
                    _check_section(f"{name}.{key}", entry, metadata["entries"])
                elif wanted and key not in wanted:
                    raise ConfigError(f"{name} has no field {key!r}; it has {', '.join(wanted)}")
                elif wanted and type(entry) is not type(wanted[key]):
                    raise ConfigError(f"{name}.{key} is {entry!r}; it must be of type {type(wanted[key]).__name__}")
                elif not isinstance(entry, PLAIN | (Mapping if "nested" in metadata else PLAIN)):
                    raise ConfigError(f"{name}.{key} is {entry!r}; it must be text, a number, true, false or a list")
        elif type(value) is not type(wanted):
            raise ConfigError(f"{name} is {value!r}; it must be of type {type(wanted).__name__}")
        if "holds" in metadata and not metadata["holds"](value):
            raise ConfigError(f"{name} is {value!r}; it must {metadata['allowed']}")


def _check_section(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be a {kind.__name__}, not {value!r}")
    check_fields(value, f"{name}.")


def expand_home(section: Section | Mapping[str, Any]) -> None:
    """Replaces a `~` at the start of a section's texts, at any depth, by the user's home, as shells do."""
    for name, value in children(section).items():
        if isinstance(value, Section | Mapping):
            expand_home(value)
        elif isinstance(section, Section) and isinstance(value, str) and value.startswith("~"):
            setattr(section, name, os.path.expanduser(value))


def flatten(section: Section | Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields all fields as (dotted name, value), depth first, in order; a choice yields its name, then its fields."""
    for name, value in children(section).items():
        if isinstance(section, Section) and "choices" in section.__dataclass_fields__[name].metadata:
            yield f"{prefix}{name}", variant(type(value))
        if isinstance(value, Section | Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def children(section: Section | Mapping[str, Any]) -> Mapping[str, object]:
    """Returns the fields of a section, or the entries of a dictionary, by name. An object's entry is its `label`."""
    if isinstance(section, Mapping):
        return section
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    named = (name for name, field in section.__dataclass_fields__.items() if "object" in field.metadata)
    return values | {name: label(values[name]) for name in named}


def label(value: object) -> str:
    """Returns a text itself, a module's name, or `module:Class` of a class or an object."""
    if isinstance(value, str):
        return value
    named = value if hasattr(value, "__name__") else type(value)
    module, name = getattr(named, "__module__", ""), getattr(named, "__qualname__", getattr(named, "__name__", ""))
    return f"{module}:{name}" if module else name


def lies_in(field: str, names: Iterable[str]) -> bool:
    """Returns True if a dotted field is one of `names`, or lies in a section among `names`."""
    return any(f"{field}.".startswith(f"{name}.") for name in names)


@contextlib.contextmanager
def as_config_error(field: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turns errors of these kinds into a `ConfigError`, whose message begins with `field`."""
    try:
        yield
    except kinds as error:
        raise ConfigError(f"{field}: {error}") from error
