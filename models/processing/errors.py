"""What goes wrong with media and prompts, in one line each."""

from __future__ import annotations


class MediaError(ValueError):
    """A media file cannot be used. The message names the file and says why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.path, self.reason)  # survives the way back from a worker process


class PromptError(ValueError):
    """Text and media of a prompt do not fit together."""
