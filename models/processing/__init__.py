"""Prompts, images and videos to model inputs."""

from .bad_media import MediaError, PromptError
from .processor import Processor

__all__ = ["MediaError", "Processor", "PromptError"]
