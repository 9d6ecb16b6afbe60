"""Files that are replaced as a whole: a kill or a full disk leaves the old text or the new one, nothing between."""

from __future__ import annotations

import os
import pathlib


def replace_text(file: pathlib.Path, text: str) -> None:
    """Writes `text` beside `file` and renames it in one step. Raises `OSError`, and then `file` is as it was."""
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, file)
