"""The folder of a run, `runs/<name>-<date>` or the folder that the configuration names, and the settings in it."""

import contextlib
import datetime
import enum
import errno
import json
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any, cast

from filelock import FileLock, Timeout

from ..base.errors import ConfigError
from . import Config
from .bounds import Chosen, Section, children, flatten, lies_in

log = logging.getLogger(__name__)
CONFIG = "config.json"
CHOICE = "choice"  # the key in `config.json` of a choice's name
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors of file systems without locks


def named(config: Config) -> pathlib.Path:
    """Returns the folder that the configuration names, or a new one with the present time in its name."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return pathlib.Path(config.run_dir or f"runs/{config.name}-{now}")


def create(config: Config) -> tuple[pathlib.Path, contextlib.ExitStack]:
    """Returns the run's folder, made if missing, and the folder's lock. Writes the configuration if the folder has no
    configuration. Raises `ConfigError` if the folder is in use, or cannot be written."""
    folder = named(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = lock(folder)
        if not (folder / CONFIG).exists():
            write(config, folder)
    except OSError as error:
        raise ConfigError(f"run_dir: cannot write {folder}: {error.strerror}") from error
    return folder, held


def lock(folder: pathlib.Path) -> contextlib.ExitStack:
    """Locks a run folder as `lock_file` does. Raises `ConfigError` if it is in use, OSError if it cannot be written."""
    try:
        return lock_file(folder / "lock", wait=False)
    except Timeout:
        raise ConfigError(f"run_dir: a run is going on in {folder}; wait for its end, or name another folder") from None


def lock_file(file: str | os.PathLike[str], *, wait: bool = True) -> contextlib.ExitStack:
    """Locks `file` for this process until the returned stack is closed or the process ends in any way. Forked children
    do not hold the lock. A file system without locks locks nothing, and warns. Raises `filelock.Timeout` if another
    process holds the lock and `wait` is False, other OSErrors if the file cannot be written."""
    held = contextlib.ExitStack()
    try:
        held.enter_context(FileLock(file, blocking=wait, thread_local=False, fallback_to_soft=False))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        log.warning("%s cannot be locked (%s): start no second process that writes there", file, error.strerror)
    return held


def changes(config: Config, folder: pathlib.Path) -> list[str]:
    """Returns `name: BEFORE -> NOW` for each setting that differs from the configuration in the folder, except
    `run_dir` and the settings of `distributed`."""
    try:
        before = dict(flatten(json.loads((folder / CONFIG).read_bytes())))
    except (OSError, ValueError, TypeError) as error:
        return [f"unknown, because {folder / CONFIG} cannot be read ({error})"]
    now = dict(flatten(json.loads(json.dumps(to_json(config)))))
    names = [name for name in {**now, **before} if not lies_in(name, ("run_dir", "distributed"))]
    pairs = {name: (before.get(name, "none"), now.get(name, "none")) for name in names}
    return [f"{name}: {old!r} -> {new!r}" for name, (old, new) in pairs.items() if old != new]


def write(config: Config, folder: pathlib.Path) -> None:
    """Replaces the folder's configuration; a kill or a full disk leaves the old configuration."""
    replace_text(folder / CONFIG, json.dumps(to_json(config), indent=2) + "\n")


def read_config(folder: pathlib.Path) -> Config:
    """Returns the configuration of an existing run. Raises `ConfigError` if the folder has no valid configuration."""
    file = folder / CONFIG
    if not file.is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no {CONFIG}")
    try:
        config = from_json(json.loads(file.read_text()))
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError) as error:
        raise ConfigError(f"{file} is damaged: {error}") from None
    config.run_dir = str(folder)
    return config


def to_json(config: Config) -> dict[str, object]:
    """Returns the configuration as plain values, which `json` can write. An algorithm that is an object is written as a
    label. The sizes of the tiny model are left out if the model is a checkpoint."""
    values = cast(dict[str, Any], _plain(config))
    if config.model.path:
        del values["model"]["tiny"]
    return values


def _plain(value: object) -> object:
    """Returns a value in the types of JSON; a section that is one of several choices also has the choice's name."""
    if isinstance(value, Section | Mapping):
        named = {CHOICE: value.name} if isinstance(value, Chosen) else {}
        return named | {name: _plain(entry) for name, entry in children(value).items()}
    return value.value if isinstance(value, enum.Enum) else value


def from_json(values: Mapping[str, Any]) -> Config:
    """Returns the configuration from the result of `to_json`. Raises `ConfigError` for fields, choices and values that
    this version of fluxjax lacks, TypeError for a value of another shape."""
    config = Config()
    _fill(config, values, "")
    return config


def _fill(section: Section, values: Mapping[str, Any], prefix: str) -> None:
    for name, value in _object(values, prefix).items():
        if name == CHOICE:
            continue
        if not hasattr(section, name):
            raise ConfigError(f"the saved configuration has a field {prefix}{name} that this version does not know")
        current, metadata = getattr(section, name), section.__dataclass_fields__[name].metadata
        if kinds := metadata.get("choices"):
            if not isinstance(value, Mapping) or value.get(CHOICE) not in kinds:
                raise ConfigError(
                    f"the saved configuration has {prefix}{name}: {value!r}, which is not among the choices of this "
                    f"version: {', '.join(kinds)}"
                )
            current = kinds[value[CHOICE]]()
            setattr(section, name, current)
        if isinstance(current, Section):
            _fill(current, value, f"{prefix}{name}.")
        elif isinstance(current, dict):
            kind = metadata.get("entries")
            for key, entry in _object(value, f"{prefix}{name}").items():
                like = current.get(key)
                current[key] = kind() if kind else tuple(entry) if isinstance(like, tuple) else entry
                if kind:
                    _fill(current[key], entry, f"{prefix}{name}.{key}.")
        else:
            try:
                setattr(section, name, type(current)(value) if isinstance(current, enum.Enum | tuple) else value)
            except ValueError as error:
                raise ConfigError(f"the saved configuration has {prefix}{name}: {error}") from None


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name.rstrip('.') or 'the configuration'} must be an object, not {value!r}")
    return value


def replace_text(file: pathlib.Path, text: str) -> None:
    """Writes `text` to a temporary file, and renames that file to `file`. After an `OSError`, `file` is unchanged."""
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, file)
