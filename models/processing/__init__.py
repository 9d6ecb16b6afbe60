"""Turns prompts, images and videos into model inputs."""

from .bad_media import MediaError, PromptError
from .processor import Processor

__all__ = ["MediaError", "Processor", "PromptError"]
