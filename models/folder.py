"""Checkpoint folders that are not there: one line, which says how a Hub id becomes a folder."""

from __future__ import annotations

import os
import pathlib
import re

HUB_ID = re.compile(r"(?!\.)[\w.-]+/[\w.-]+")  # as in Qwen/Qwen2.5-VL-3B-Instruct


def why_missing(path: str | os.PathLike[str]) -> str:
    """What to tell somebody who gave `path`; empty where it is a folder."""
    if pathlib.Path(path).is_dir():
        return ""
    name = os.fspath(path)
    if not HUB_ID.fullmatch(name):
        return f"{name}: no such folder"
    folder = name.split("/")[1]
    return (
        f"{name}: no such folder, and models are not downloaded by themselves; "
        f"if this is a Hub id: hf download {name} --local-dir {folder}, then give {folder}"
    )
