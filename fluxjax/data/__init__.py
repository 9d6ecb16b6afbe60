"""Prompts: where they come from, in which order they are drawn, and how they are made ready for the model."""

from __future__ import annotations

import logging

from ..base.errors import DataError as DataError
from ..base.errors import RecordError as RecordError
from ..config import DataConfig
from .fields import Fields as Fields
from .sources import Source as Source
from .sources import all_texts as all_texts
from .sources import common_words as common_words
from .sources import open_source as open_source


def open_sources(config: DataConfig) -> dict[str, Source]:
    """Opens the training records of every source; embedded data sets are built when they are missing.

    Raises `DataError` for files that cannot be used, and for a source that is neither embedded nor has a path.
    """
    return {name: _open(config, name, source.path, "train.jsonl") for name, source in config.sources.items()}


def open_held_out(config: DataConfig) -> dict[str, Source]:
    """Opens the held-out records of every source that has some."""
    result: dict[str, Source] = {}
    for name, source in config.sources.items():
        if source.eval_path or not source.path:
            result[name] = _open(config, name, source.eval_path, "eval.jsonl")
        else:
            logging.getLogger("fluxjax.data").warning(
                "data.sources.%s has no eval_path: its accuracy is not measured", name
            )
    return result


def open_warm_start(config: DataConfig) -> dict[str, Source]:
    """Opens the records whose answers the warm start sees: those meant for it, or else the training records."""
    return {
        name: _open(config, name, source.warm_start_path or source.path, "warm_start.jsonl", "train.jsonl")
        for name, source in config.sources.items()
    }


def _open(config: DataConfig, name: str, path: str, *manifests: str) -> Source:
    """Opens `path`, or, if that is empty, the first of the `manifests` that the embedded data set of that name has."""
    if not path:
        from ..tasks.embedded import ensure

        folder = ensure(name, config.root)
        path = next(str(folder / manifest) for manifest in manifests if (folder / manifest).exists())
    source = config.sources[name]
    fields = Fields(source.prompt_field, source.answer_field, source.images_field, source.videos_field, source.id_field)
    return open_source(path, name, fields)
