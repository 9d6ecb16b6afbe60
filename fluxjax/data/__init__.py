"""Prompts: where they come from, in which order they are drawn, and how they are made ready for the model."""

from __future__ import annotations

import logging
import pathlib

from ..base.errors import DataError, RecordError
from ..config import DataConfig, SourceConfig
from .fields import Fields
from .sources import Source, all_texts, common_words, open_source

__all__ = [
    "DataError",
    "Fields",
    "RecordError",
    "Source",
    "all_texts",
    "common_words",
    "open_held_out",
    "open_source",
    "open_sources",
    "open_warm_start",
]


def open_sources(config: DataConfig) -> dict[str, Source]:
    """Opens the training records of every source; embedded data sets are built when they are missing.

    Raises `DataError` for files that cannot be used, and for a source that is neither embedded nor has a path.
    """
    return {
        name: open_source(source.path or _embedded(config, name) / "train.jsonl", name, _fields(source))
        for name, source in config.sources.items()
    }


def open_held_out(config: DataConfig) -> dict[str, Source]:
    """Opens the held-out records of every source that has some."""
    result: dict[str, Source] = {}
    for name, source in config.sources.items():
        if source.eval_path or not source.path:
            result[name] = open_source(
                source.eval_path or _embedded(config, name) / "eval.jsonl", name, _fields(source)
            )
        else:
            logging.getLogger("fluxjax.data").warning(
                "data.sources.%s has no eval_path: its accuracy is not measured", name
            )
    return result


def open_warm_start(config: DataConfig) -> dict[str, Source]:
    """Opens the records whose answers the warm start sees: those meant for it, or else the training records."""
    result: dict[str, Source] = {}
    for name, source in config.sources.items():
        path = source.warm_start_path
        if not path and not source.path:
            folder = _embedded(config, name)
            manifest = folder / "warm_start.jsonl"
            path = manifest if manifest.exists() else folder / "train.jsonl"
        result[name] = open_source(path or source.path, name, _fields(source))
    return result


def _fields(source: SourceConfig) -> Fields:
    return Fields(source.prompt_field, source.answer_field, source.images_field, source.videos_field, source.id_field)


def _embedded(config: DataConfig, name: str) -> pathlib.Path:
    from ..tasks.embedded import ensure

    return ensure(name, config.root)
