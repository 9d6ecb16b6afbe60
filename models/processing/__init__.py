"""Prompts, images and videos to model inputs."""

from .errors import MediaError, PromptError
from .processor import Processor

__all__ = ["MediaError", "Processor", "PromptError"]
