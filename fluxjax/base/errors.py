"""Errors that a user can mend. Their text is one line, which names the field, the file or the record, and the fix."""

USER, LOST = 2, 3  # exit statuses of `fluxjax.train`: an error for the user to mend, the loss of another process


class ConfigError(ValueError):
    """A setting is wrong. The message names the field, the value and the allowed values."""


class DataError(ValueError):
    """A data set cannot be used, for example because of an unreadable file, a wrong field or a full disk."""


class RecordError(ValueError):
    """One record cannot be used. `reason` names nothing of the record, so that equal reasons can be counted; `detail`
    is for the log."""

    def __init__(self, id: str, reason: str, detail: str = "unusable record") -> None:
        super().__init__(f"{id}: {reason}")
        self.id = id
        self.reason = reason
        self.detail = detail


def said(error: BaseException) -> str:
    """Returns the type and the text of an error, or only the type if `str(error)` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
