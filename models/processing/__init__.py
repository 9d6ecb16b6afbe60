"""Turns prompts, images and videos into model inputs. Of the names of this package, only the processors import JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sharding.door import door

from .media_file import MediaError, PromptError

if TYPE_CHECKING:
    from .conversation import ObservationProcessor
    from .processor import Processor

__all__ = ["MediaError", "ObservationProcessor", "Processor", "PromptError"]
__getattr__ = door(__name__, processor=("Processor",), conversation=("ObservationProcessor",))
