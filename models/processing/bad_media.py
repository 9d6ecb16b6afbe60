"""The errors of media and prompts that cannot be used; each message is one line."""

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
    """A prompt cannot be used: its text and media do not fit together, or the model cannot read it.

    `reason` is a short name of the kind of problem, for counting.
    """

    def __init__(self, message: str, reason: str = "marks and media disagree") -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (str(self), self.reason)
