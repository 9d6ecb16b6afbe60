"""Turns prompts, images and videos into model inputs. Importing this package is light; JAX loads with `Processor`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .media_file import MediaError, PromptError

if TYPE_CHECKING:
    from .processor import Processor

__all__ = ["MediaError", "Processor", "PromptError"]


def __getattr__(name: str) -> object:
    """Imports `Processor` at its first use (PEP 562): processes that only decode media do not load it."""
    if name == "Processor":
        return importlib.import_module(".processor", __name__).Processor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
