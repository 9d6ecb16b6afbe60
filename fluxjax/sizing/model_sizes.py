"""The sizes of the model that a configuration names, read without its weights."""

from __future__ import annotations

import json
import pathlib

from models.config import DecoderConfig, ModelConfigError
from models.registry import read_config

from ..config import Config, ConfigError
from ..config.bounds import as_config_error

SHIPPED = pathlib.Path(__file__).resolve().parent / "models"


def model_sizes(config: Config, file: str = "") -> DecoderConfig:
    """Returns the sizes in `file`, a Hugging Face config.json; without `file`, those in the config.json of the
    folder `model.path`, or else in the shipped file of that folder's name. Raises ConfigError if there is no such file,
    or for an architecture that is not supported."""
    path = config.model.path
    shipped = SHIPPED / f"{pathlib.Path(path).name}.json"
    if file:
        found = pathlib.Path(file)
    elif not path:
        raise ConfigError(
            "model.path is empty: a tiny model of random weights fits anywhere; give --config.model.path=FOLDER or "
            "--model-config FILE (a config.json)"
        )
    else:
        found = next((f for f in (pathlib.Path(path) / "config.json", shipped) if f.is_file()), pathlib.Path(path))
    if not found.is_file():
        known = ", ".join(sorted(f.stem for f in SHIPPED.glob("*.json")))
        raise ConfigError(
            f"{found}: no such file"
            if file
            else f"model.path: {path} has no config.json, and {shipped.stem} is no model of known sizes "
            f"({known}); give --model-config FILE (a config.json)"
        )
    with as_config_error(str(found), ModelConfigError, ValueError):
        return read_config(json.loads(found.read_text()))
