"""Where a run lives: `runs/<name>-<date>` or the folder that the configuration names."""

from __future__ import annotations

import datetime
import json
import os
import pathlib

from .sections import Config, ConfigError, from_json, to_json

CONFIG = "config.json"


def create(config: Config) -> pathlib.Path:
    """The run's folder, made if missing, with the configuration written into it (also when a run is resumed: the
    settings may have changed). Raises `ConfigError` if it cannot be written."""
    if config.run_dir:
        folder = pathlib.Path(config.run_dir)
    else:
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = pathlib.Path("runs") / f"{config.name}-{now}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(config, folder)
    except OSError as error:
        raise ConfigError(f"run_dir: cannot write {folder}: {error.strerror}") from error
    return folder


def write(config: Config, folder: pathlib.Path) -> None:
    """Replaces the folder's configuration at once: a kill or a full disk leaves the old one."""
    temporary = folder / f"{CONFIG}.tmp"
    temporary.write_text(json.dumps(to_json(config), indent=2) + "\n")
    os.replace(temporary, folder / CONFIG)


def read_config(folder: pathlib.Path) -> Config:
    """The configuration of an existing run. Raises `ConfigError` if the folder holds none."""
    file = folder / CONFIG
    if not file.is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no {CONFIG}")
    try:
        config = from_json(json.loads(file.read_text()))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is damaged: {error}") from None
    config.run_dir = str(folder)
    return config
