"""Turns prompts, images and videos into model inputs."""

from .media_file import MediaError, PromptError
from .processor import Processor

__all__ = ["MediaError", "Processor", "PromptError"]
