"""The text of `--help`: every setting that the command reads, with its value, the comment that stands at its
declaration, its bound, and, if it is a choice, the possible choices."""

import dataclasses
import enum
import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

from . import Config, RewardTerm, SourceConfig
from .bounds import Section, children, lies_in, variant

_OBVIOUS = ("", "be greater than 0", "not be negative")  # bounds that are left out


def help_text(doc: str, config: Config, word: str = "") -> str:
    """Returns what `--help` prints: `doc`, then every setting that `config` does not list as unread, with its value.
    With a `word`, returns only the entries that contain it."""
    entries = [
        entry for name, entry in _entries(config, "") if not lies_in(name.removeprefix("--config."), config.unread)
    ]
    if "data" not in config.unread:
        entries += [entry for _, entry in _entries(SourceConfig(), "data.sources.NAME.")]
        entries += [entry for _, entry in _entries(RewardTerm(), "data.sources.NAME.rewards.TERM.")]
    shown = [entry for entry in entries if word.lower() in entry.lower()]
    if word:
        return "\n".join(shown) or f"no setting has {word!r} in its name or its help text"
    return "\n".join([doc.strip(), "", "Settings, with the values of the configuration that --config names:", *shown])


def _entries(section: Section, prefix: str) -> Iterator[tuple[str, str]]:
    """Yields (name, lines of the help text) of each setting of a section."""
    for field in dataclasses.fields(section):
        value: Any = children(section)[field.name]
        name = f"{prefix}{field.name}"
        words = comments(type(section)).get(field.name, "")
        if kinds := field.metadata.get("choices"):
            options = [f"      {option}: {inspect.getdoc(kind)}" for option, kind in kinds.items()]
            yield name, "\n".join([_line(name, variant(type(value)), words), *options])
            every = {option: value if kind is type(value) else kind() for option, kind in kinds.items()}
            of: dict[str, tuple[Any, list[str]]] = {}
            for option, chosen in every.items():
                for inner, entry in _entries(chosen, f"{name}."):
                    _, having = of.setdefault(inner, (entry, []))
                    having.append(option)
            for inner, (entry, having) in of.items():
                yield inner, entry + f" [{', '.join(having)}]"
        elif isinstance(value, Section):
            yield from _entries(value, f"{name}.")
        elif isinstance(value, dict) and "entries" in field.metadata:
            for key, entry in children(value).items():
                yield from _entries(entry, f"{name}.{key}.") if isinstance(entry, Section) else ()
        elif isinstance(value, dict):
            items = [f"      --config.{name}.{key}={item}" for key, item in value.items()]
            yield name, "\n".join([f"  --config.{name}: {words}", *items])
        else:
            allowed = field.metadata.get("allowed", "").partition(": ")[0]
            words = f"{words.rstrip('.')}; must {allowed}" if allowed not in _OBVIOUS else words
            members, said = (type(value), comments(type(value))) if isinstance(value, enum.Enum) else ((), {})
            options = [f"      {member.value}: {said.get(member.name, '')}".rstrip(": ") for member in members]
            yield name, "\n".join([_line(name, getattr(value, "value", value), words), *options])


def _line(name: str, value: object, words: str) -> str:
    return f"{f'  --config.{name}={value}'.ljust(56)}  {words}".rstrip()


@functools.cache
def comments(kind: type) -> dict[str, str]:
    """Returns the comment of each field of a class, or of each member of an enumeration: the comment lines above the
    declaration, then the comment behind it."""
    words: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if owner.__module__ == "builtins" or owner in (enum.Enum,):
            continue
        above: list[str] = []
        for line in inspect.getsource(owner).splitlines():
            if match := re.match(r"    (\w+)(?:: | = )", line):
                behind = re.search(r"#\s*(.*)$", line)
                words[match[1]] = " ".join([*above, *([behind[1]] if behind else [])])
            above = [*above, line.strip("# ")] if line.startswith("    #") else []
    return words
