"""The folder for data sets that were built and programs that were compiled."""

from __future__ import annotations

import os
import pathlib


def cache_folder() -> pathlib.Path:
    """Returns `$XDG_CACHE_HOME/fluxjax`, by default `~/.cache/fluxjax`."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (pathlib.Path(cache) if cache else pathlib.Path.home() / ".cache") / "fluxjax"
